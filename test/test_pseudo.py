#!/usr/bin/env python3
"""test_pseudo.py: Pseudo-to-Real training of the real program under mpirun, from outside.

    python3 test/test_pseudo.py         TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random choices, printed

    Mean        the gradient of a shared storage is the mean of those that its layers have for themselves, and counts once in the norm
    Equality    sharing composes: every ZeRO stage, pipeline, precision and schedule is one computation with one rank
    Numbers     parameters and memory shrink as the formula says
    Measured    second moments of copies are those of the layers' own gradients, however these are divided
    Auto        cosines of the layers' own gradients; the rule; a look changes no bit
    Gradual     groups are cut again and again: function, mean, layouts, resume; in one step it is the switch, bit by bit
    Delink      the switch changes no bit of the function; moments are copied, or begin anew; every layout is one rank; within a run is between runs
    Resume      bit-equal before, at and after the switch, in the same layout and another; not with another sharing
    Refusals    what does not fit ends with exit 2 and one message

Every run is checked for memory and traffic as predicted (test_train.Job). The model has 6 blocks. Standard library only.
"""
import array
import glob
import os
import random
import shutil
import struct
import tempfile
import unittest

import test_train
from test_faults import at_once, sample
from test_train import ALL, EXIT_INPUT, SAME, SEED, T, scratch, train, train_all, weights

LAYERS, CHANNELS, VOCAB, PADDED = 6, 16, 101, 128
MODEL = f"layers={LAYERS},heads=2,channels={CHANNELS},vocab={VOCAB}"
BLOCK = 12 * CHANNELS**2 + 13 * CHANNELS
RUN = dict(model=MODEL, seed=3, steps=6, micro_batch=2, batch_tokens=8 * T, threads=1)
SHARES = {"all": [0] * 6, "2": [0, 0, 1, 1, 2, 2], "4": [0, 0, 0, 0, 1, 1], "2x3": [0, 1] * 3, "3x2": [0, 1, 2] * 2, "6x1": list(range(6)), "1x6": [0] * 6}
SAME_NORM = 10 * SAME  # as in test_pipeline.py


def tensors():
    """(begin, elements of a layer) in the order of the file, of the tensors of blocks; then of the others (begin, elements)."""
    C, at, blocks, others = CHANNELS, 0, [], []
    for n, layers in ((PADDED * C, 0), (T * C, 0), *((n * C, 1) for n in (1, 1, 3 * C, 3, C, 1, 1, 1, 4 * C, 4, 4 * C, 1)), (C, 0), (C, 0)):
        (blocks if layers else others).append((at, n))
        at += n * (LAYERS if layers else 1)
    return blocks, others


def layer(file, number):
    return [x for begin, n in tensors()[0] for x in file[begin + number * n:begin + (number + 1) * n]]


def rest(file):
    return [x for begin, n in tensors()[1] for x in file[begin:begin + n]]


def states(folder):
    """(kind, storage) -> the elements of a state, of a checkpoint."""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "state_*"))):
        data = test_train.get(path)
        count = struct.unpack_from("<3Q", data)[2]
        at = 24 + 32 * count
        for kind, storage, begin, n in struct.iter_unpack("<4q", data[24:at]):
            found.setdefault((kind, storage), {})[begin] = array.array("f", data[at:at + 4 * n])
            at += 4 * n
    return {key: [x for begin in sorted(pieces) for x in pieces[begin]] for key, pieces in found.items()}


V, MEASURED = 2, 4  # kinds of states


class Check(test_train.TestCase):
    def saved(self, cases):
        """The states that each run ends with."""
        cases = [dict(case, out=os.path.join(scratch(), "out"), save_every=case["steps"]) for case in cases]
        return [states(test_train.checkpoint(case["out"], case["steps"])) for case, job in zip(cases, train_all(cases))]

    def trained(self, cases):
        cases = [dict(case, export=os.path.join(scratch(), "export")) for case in cases]
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            job.weights = weights(case["export"])
        return jobs


# ---------------------------------------------------------------------------------------------------------------------
class Mean(Check):
    LR = 1 << 19  # such an sgd step leaves -LR x gradient in the weights, to 24 bits
    STEP = dict(RUN, steps=1, optimizer="sgd", momentum=0, weight_decay=0, grad_clip=0, lr=LR)

    def test_of_the_layers_gradients(self):
        def check(share):
            of, start = SHARES[share], os.path.join(scratch(), "start.bin")
            train(**dict(self.STEP, steps=0, share=share, export=start))  # its layers are copies
            before = weights(start)
            for number in range(LAYERS):
                self.assertEqual(layer(before, number), layer(before, of.index(of[number])), f"{share}: layer {number}")
            shared, real = self.trained([dict(self.STEP, share=share), dict(self.STEP, model=start)])
            self.assertEqual(shared.losses(), real.losses(), "one function")
            squares = sum(((b - a) / self.LR) ** 2 for a, b in zip(rest(before), rest(shared.weights)))
            for group in sorted(set(of)):
                users = [number for number in range(LAYERS) if of[number] == group]
                each = [[(a - b) / self.LR for a, b in zip(layer(before, number), layer(real.weights, number))] for number in users]
                mean = [sum(values) / len(users) for values in zip(*each)]
                found = [(a - b) / self.LR for a, b in zip(layer(before, users[0]), layer(shared.weights, users[0]))]
                norm = sum(x * x for x in mean) ** 0.5
                # 24 bits of each weight, of sums of 6 layers
                self.assertLess(sum((a - b) ** 2 for a, b in zip(found, mean)) ** 0.5 / norm, 1e-6, share)
                squares += norm ** 2
            self.assert_close(shared.steps("grad_norm")[0], [squares ** 0.5], SAME, share)
        at_once(check, sample(SHARES, 3))


# ---------------------------------------------------------------------------------------------------------------------
class Equality(Check):
    LAYOUTS = [dict(ranks=2), dict(ranks=3, zero=1), dict(ranks=2, zero=2), dict(ranks=2, zero=2, micro_batch=1), dict(ranks=3, zero=3), dict(ranks=4, zero=3, zero_hpz_partition_size=2, ranks_per_node=2),
               dict(ranks=2, pipeline="2"), dict(ranks=4, pipeline="3:1,3:2,2:1", zero=1), dict(ranks=4, pipeline="4:2,4:2", zero=3, micro_batch=4),
               dict(ranks=2, pipeline="2", pipeline_schedule="zero-bubble", zero=2), dict(ranks=2, pipeline="1:1,7:1", pipeline_schedule="gpipe"),
               dict(ranks=3, pipeline="3", recompute="block"), dict(recompute="block"), dict(ranks=2, zero=3, recompute="block")]

    def test_one_rank(self):
        cases = [(share, layout) for share in SHARES for layout in self.LAYOUTS]
        cases = cases if ALL else sample(cases, 7)
        shares = sorted({share for share, _ in cases})
        alone = dict(zip(shares, self.trained([dict(RUN, share=share) for share in shares])))
        for (share, layout), job in zip(cases, self.trained([dict(dict(RUN, share=share), **layout) for share, layout in cases])):
            what = f"--share {share}, {layout}"
            self.assert_close(job.losses(), alone[share].losses(), SAME, what)
            self.assert_close([norm for norm, in job.steps("grad_norm")], [norm for norm, in alone[share].steps("grad_norm")], SAME_NORM, what)
            of = SHARES[share]
            for number in range(LAYERS):
                self.assertEqual(layer(job.weights, number), layer(job.weights, of.index(of[number])), what)

    def test_messages_in_few_bits(self):
        """Quantized and bf16 runs: as close to fp32 as without sharing, and they learn."""
        for changes in (dict(dtype="bf16"), dict(zero=3, zero_quantized_weights=1, zero_quantized_gradients=1)):
            few, exact = self.trained([dict(RUN, ranks=2, share="2x3", **changes), dict(RUN, share="2x3")])
            self.assert_close(few.losses(), exact.losses(), 0.02, changes)

    def test_nothing_shared(self):
        none, ones = self.trained([dict(RUN), dict(RUN, share="6x1")])
        self.assertEqual(none.steps("step", "loss", "grad_norm"), ones.steps("step", "loss", "grad_norm"))
        self.assertTrue(none.weights == ones.weights)


# ---------------------------------------------------------------------------------------------------------------------
class Numbers(Check):
    def test_memory(self):
        for share, of in sample(list(SHARES.items()), 3):
            elements = PADDED * CHANNELS + T * CHANNELS + 2 * CHANNELS + len(set(of)) * BLOCK
            memory = train(**dict(RUN, share=share, steps=1)).end()["memory"]["measured"]
            self.assertEqual((memory["parameters"], memory["gradients"], memory["optimizer"]), (4 * elements, 4 * elements, 8 * elements), share)
            users = sum(of.count(group) > 1 for group in set(of))
            more = train(**dict(RUN, share=share, steps=1, delink_moments="measured", delink_at=None)).end()["memory"]["measured"]
            layers = sum(of.count(number) > 1 for number in of)
            self.assertEqual((more["parameters"], more["gradients"], more["optimizer"]), (4 * elements, 4 * (elements + layers * BLOCK), 8 * elements + 4 * users * BLOCK), share)


# ---------------------------------------------------------------------------------------------------------------------
class Delink(Check):
    AT = 4
    RUN = dict(RUN, steps=AT + 3, share="2x3", delink_at=AT)

    def test_function(self):
        """The loss of the first step of copies is what it would be of what they are copies of; then they go their own ways."""
        for share in sample(["all", "4", "3x2"], 2):
            delinked, shared = self.trained([dict(self.RUN, share=share), dict(self.RUN, share=share, delink_at=None)])
            self.assertEqual(delinked.steps()[:self.AT + 1], shared.steps()[:self.AT + 1], share)
            self.assertNotEqual(delinked.steps()[self.AT + 1], shared.steps()[self.AT + 1], share)
            self.assertEqual(len({tuple(layer(delinked.weights, number)) for number in range(LAYERS)}), LAYERS, share)
            event, = delinked.of("delink")
            self.assertEqual((event["step"], event["parameters"]), (self.AT, PADDED * CHANNELS + T * CHANNELS + 2 * CHANNELS + LAYERS * BLOCK))

    def test_layouts(self):
        cases = sample([dict(layout, delink_moments=moments) for layout in Equality.LAYOUTS for moments in ("mean", "reset")], 4)
        alone = {moments: job for moments, job in zip(("mean", "reset"), self.trained([dict(self.RUN, delink_moments=moments) for moments in ("mean", "reset")]))}
        self.assertNotEqual(alone["mean"].losses()[-1], alone["reset"].losses()[-1])
        for layout, job in zip(cases, self.trained([dict(self.RUN, **layout) for layout in cases])):
            self.assert_close(job.losses(), alone[layout["delink_moments"]].losses(), SAME, layout)

    def assert_mean(self, delinked, shared, of, what):
        """sgd with momentum is linear: the mean of what copies do is what the shared layer does, where they have its moments."""
        for group in sorted(set(of)):
            users = [number for number in range(LAYERS) if of[number] == group]
            mean = [sum(values) / len(users) for values in zip(*(layer(delinked, number) for number in users))]
            self.assertLess(max(abs(a - b) for a, b in zip(mean, layer(shared, users[0]))), 1e-6, what)
            self.assertGreater(max(abs(a - b) for a, b in zip(layer(delinked, users[0]), layer(delinked, users[1]))), 2e-6, what)
        self.assertLess(max(abs(a - b) for a, b in zip(rest(delinked), rest(shared))), 1e-6, what)

    def test_moments_are_copied(self):
        """Within a run, and between runs, where they come from files."""
        linear = dict(self.RUN, optimizer="sgd", momentum=0.9, lr=0.5, grad_clip=0, delink_at=None)
        for share, layout in sample([(share, layout) for share in ("all", "3x2", "2") for layout in (dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2", zero=1))], 2):
            out, one = os.path.join(scratch(), "out"), dict(linear, share=share, steps=self.AT + 1, **layout)
            shared, inside = self.trained([one, dict(one, delink_at=self.AT)])
            self.assert_mean(inside.weights, shared.weights, SHARES[share], (share, layout))
            train(**dict(one, steps=self.AT, out=out, save_every=self.AT))
            begun = dict(one, model=os.path.join(out, f"step_{self.AT:08}"), share=None, steps=1)
            shared, outside, anew = self.trained([begun, dict(begun, delink=1), dict(begun, delink=1, delink_moments="reset")])
            self.assertEqual(shared.steps(), outside.steps(), (share, layout))
            self.assert_mean(outside.weights, shared.weights, SHARES[share], (share, layout))
            with self.assertRaises(AssertionError):
                self.assert_mean(anew.weights, shared.weights, SHARES[share], (share, layout))

    def test_moments_begin_anew(self):
        """The first update of Adam is lr x the sign of the gradient."""
        lr, run = 1e-3, dict(self.RUN, weight_decay=0, eps=1e-20, lr=1e-3, delink_moments="reset", steps=self.AT + 1)
        before, after = self.trained([dict(run, delink_at=None, delink_moments=None, steps=self.AT), run])
        for number in range(LAYERS):
            moved = [abs(a - b) / lr for a, b in zip(layer(after.weights, number), layer(before.weights, number))]
            self.assertLess(sum(x < 0.99 for x in moved), 0.1 * len(moved), "biases of keys have no gradient")
            self.assertLess(max(moved), 1.01)
        moved = [abs(a - b) / lr for a, b in zip(rest(after.weights), rest(before.weights))]
        self.assertGreater(sum(0 < x < 0.9 for x in moved), 0.2 * len(moved), "others go on")

    def test_warmup(self):
        rates = [float(rate) for rate, in train(**dict(self.RUN, delink_warmup=2)).steps("lr")]
        for found, factor in zip(rates[self.AT - 1:], (1, 0.5, 1, 1)):
            self.assertAlmostEqual(found, factor * rates[0], delta=1e-9)
        rates = [float(rate) for rate, in train(**dict(self.RUN, lr=4e-3, share_lr=1e-3)).steps("lr")]
        for found, expected in zip(rates, [1e-3] * self.AT + [4e-3] * 3):
            self.assertAlmostEqual(found, expected, delta=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
class Measured(Check):
    """The second moments that blocks will want: where nothing moves (lr 0), each layer's own is known from a run of equal copies that do not share."""
    AT = 3
    RUN = dict(RUN, steps=AT, lr=0, grad_clip=0, delink_moments="measured")
    LAYOUTS = [dict(), dict(ranks=3, zero=1), dict(ranks=2, zero=2, micro_batch=1), dict(ranks=3, zero=3, micro_batch=1), dict(ranks=2, pipeline="2"),
               dict(ranks=4, pipeline="3:1,3:2,2:1", zero=1), dict(ranks=4, pipeline="4:2,4:2", zero=3, micro_batch=4), dict(ranks=2, reduce_dtype="bf16")]

    def layers(self, share):
        """v of each layer after AT steps, and after one more."""
        start = os.path.join(scratch(), "start.bin")
        train(**dict(RUN, steps=0, share=share, export=start))
        alone = [dict(self.RUN, model=start, steps=steps, delink_moments=None) for steps in (self.AT, self.AT + 1)]
        return [[found[V, 2 + number] for number in range(LAYERS)] for found in self.saved(alone)]

    def assert_same(self, found, expected, what, tolerance=1e-5):
        self.assertEqual(len(found), len(expected), what)
        most = max(expected)
        self.assertLess(max(abs(a - b) for a, b in zip(found, expected)), tolerance * most, what)

    def test_of_the_layers(self):
        """While blocks share, at the switch, and clipped as the update."""
        shares = ["all", "4", "2x3"]
        cases = [(share, layout) for share in shares for layout in self.LAYOUTS]
        for share in shares if ALL else sample(shares, 1):
            of, (before, after) = SHARES[share], self.layers(share)
            mean = {group: [sum(vs) / of.count(group) for vs in zip(*(before[n] for n in range(LAYERS) if of[n] == group))] for group in set(of)}
            layouts = self.LAYOUTS if ALL else sample(self.LAYOUTS, 2)
            shared = self.saved([dict(self.RUN, share=share, **layout) for layout in layouts])
            switched = self.saved([dict(self.RUN, share=share, steps=self.AT + 1, delink_at=self.AT, **layout) for layout in layouts])
            for layout, found, delinked in zip(layouts, shared, switched):
                few = 1e-2 if "reduce_dtype" in layout else 1e-5
                for group in mean:
                    self.assert_same(found[MEASURED, 2 + group], mean[group], (share, layout), few)
                for number in range(LAYERS):
                    expected = [0.95 * s + b - 0.95 * a for s, a, b in zip(mean[of[number]], before[number], after[number])]
                    self.assert_same(delinked[V, 2 + number], expected, (share, layout, number), few)
                self.assertFalse([key for key in delinked if key[0] == MEASURED])
                self.assertGreater(sum(found[MEASURED, 2]), 1.002 * sum(found[V, 2]), "layers' gradients differ")

    def test_clipped(self):
        run = dict(self.RUN, share="all", steps=1)
        job, = self.trained([run])
        factor = 0.01 / float(job.steps("grad_norm")[0][0])
        plain, clipped = self.saved([run, dict(run, grad_clip=0.01)])
        self.assert_same(clipped[MEASURED, 2], [factor**2 * x for x in plain[MEASURED, 2]], "clipped")

    def test_learns_alike(self):
        """What is measured does not change what is computed while blocks share; later it does. Layouts, memory and traffic as ever."""
        run = dict(Delink.RUN, delink_moments="measured")
        mean, one, *others = self.trained([Delink.RUN, run, *(dict(run, **layout) for layout in sample(self.LAYOUTS[1:-1], 1))])
        self.assert_close(one.losses()[:Delink.AT + 1], mean.losses()[:Delink.AT + 1], SAME, "the same function")
        self.assertNotEqual(one.losses()[-1], mean.losses()[-1])
        for job in others:
            self.assert_close(job.losses(), one.losses(), SAME, job.command)

    def test_between_runs(self):
        """A run that shares leaves what it has measured for one that delinks; another has none."""
        out = os.path.join(scratch(), "out")
        run = dict(Delink.RUN, delink_at=None)
        begun = test_train.checkpoint(out, Delink.AT)
        train(**dict(run, out=out, steps=Delink.AT, save_every=Delink.AT, delink_moments="measured", ranks=2, zero=2))
        after, shared = dict(run, model=begun, share=None, steps=1, delink=1), states(begun)
        one, mean = self.saved([dict(after, lr=0, delink_moments=moments) for moments in ("measured", "mean")])
        for number in range(LAYERS):
            of = 2 + SHARES["2x3"][number]
            more = [0.95 * (a - b) for a, b in zip(shared[MEASURED, of], shared[V, of])]
            self.assert_same([a - b for a, b in zip(one[V, 2 + number], mean[V, 2 + number])], more, number)
        self.assertEqual([one[key] for key in one if key[0] != V], [mean[key] for key in one if key[0] != V])
        train(**dict(run, out=out, steps=Delink.AT, save_every=Delink.AT))
        job = train(code=EXIT_INPUT, **dict(after, delink_moments="measured"))
        self.assertIn("measured v", job.err)


# ---------------------------------------------------------------------------------------------------------------------
class Auto(Check):
    """Looks at the gradients of layers that share, and the switch that follows."""
    RUN = dict(RUN, steps=9, share="2x3", delink_auto=1, delink_every=2)
    LAYOUTS = [dict(ranks=2, zero=2, micro_batch=1), dict(ranks=3, zero=3), dict(ranks=2, pipeline="2"), dict(ranks=4, pipeline="3:1,3:2,2:1", zero=1),
               dict(ranks=2, pipeline="2", pipeline_schedule="zero-bubble", zero=2), dict(ranks=2, zero=3, recompute="block"), dict(delink_moments="measured")]

    @staticmethod
    def cosines(job):
        return [[float(x) for x in event["cosines"] if x is not None] for event in job.of("look")]

    def test_cosines(self):
        """Of the layers' own gradients: such an sgd step of equal copies leaves them in the weights."""
        for share in sorted(SHARES) if ALL else sample(["all", "4", "2", "3x2"], 1):
            start, of = os.path.join(scratch(), "start.bin"), SHARES[share]
            train(**dict(Mean.STEP, steps=0, share=share, export=start))
            run = dict(Mean.STEP, share=share, lr=0, steps=2, delink_auto=1, delink_every=1)
            before, (shared, one, two) = weights(start), self.trained([run, *(dict(Mean.STEP, model=start, batch_tokens=tokens * T) for tokens in (8, 16))])
            # of the second step's samples, by the mean of both steps'
            each = [[(2 * (a - c) - (a - b)) / Mean.LR for a, b, c in zip(*(layer(of_all, n) for of_all in (before, one.weights, two.weights)))] for n in range(LAYERS)]
            expected = []
            for number in range(LAYERS):
                for before_it in [n for n in range(number) if of[n] == of[number]][-1:]:
                    dot, aa, bb = (sum(x * y for x, y in zip(each[i], each[j])) for i, j in ((before_it, number), (before_it, before_it), (number, number)))
                    expected.append(dot / (aa * bb) ** 0.5)
            found, = self.cosines(shared)
            self.assertEqual(len(found), len(expected), share)
            for a, b in zip(found, expected):
                self.assertAlmostEqual(a, b, delta=1e-5, msg=share)

    def test_rule(self):
        """Three looks in a row; the threshold; layouts decide alike; a look changes no bit."""
        never, = self.trained([dict(self.RUN, delink_below=0)])
        plain, = self.trained([dict(self.RUN, delink_auto=None, delink_every=None)])
        self.assertEqual(never.steps("loss", "grad_norm"), plain.steps("loss", "grad_norm"))
        self.assertTrue(never.weights == plain.weights)
        self.assertEqual([event["step"] for event in never.of("look")], [2, 4, 6, 8])
        self.assertFalse(never.of("delink"))
        fixed, = self.trained([dict(self.RUN, delink_auto=None, delink_every=None, delink_at=6)])
        jobs = self.trained([dict(self.RUN, delink_below=1, **layout) for layout in [dict(), *sample(self.LAYOUTS, 2)]])
        for job in jobs:
            event, = job.of("delink")
            self.assertEqual(([event["in_a_row"] for event in job.of("look")], event["step"]), ([1, 2, 3], 6), job.command)
            for a, b in zip(self.cosines(job), self.cosines(jobs[0])):
                self.assertLess(max(abs(x - y) for x, y in zip(a, b)), 1e-4, job.command)
        self.assertEqual(jobs[0].steps("loss", "grad_norm"), fixed.steps("loss", "grad_norm"))
        looks = self.cosines(never)
        below = sorted(looks[1])[len(looks[1]) // 2] + 1e-6  # of 4 pairs 3 are below it
        event, *_ = self.trained([dict(self.RUN, steps=5, delink_below=below)])[0].of("look")[1:]
        self.assertEqual((event["unlike"], event["in_a_row"] > 0), (3, True))

    def test_resume(self):
        """Looks in a row are counted on; after the switch nobody looks."""
        run = dict(self.RUN, delink_below=1, **random.Random(SEED).choice([dict(), *self.LAYOUTS]))
        whole, = self.trained([run])
        for stop in (4, 5, 6, 7) if ALL else sample((4, 5, 6, 7), 1):
            out = os.path.join(scratch(), "out")
            train(**dict(run, out=out, steps=stop, save_every=stop))
            again, = self.trained([dict(run, out=out, resume=1)])
            self.assertEqual(again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[stop:], stop)
            self.assertEqual([event["in_a_row"] for event in again.of("look")], [n for n in (2, 3) if 2 * n >= stop], stop)
            self.assertTrue(again.weights == whole.weights)


# ---------------------------------------------------------------------------------------------------------------------
class Gradual(Check):
    """Groups are cut in two again and again, and so have any lengths."""
    RUN = dict(RUN, steps=9, share="all", delink_at=3, delink_gradual=1, delink_every=2)
    GROUPS = [[0, 0, 0, 3, 3, 3], [0, 0, 2, 3, 3, 5], list(range(6))]  # after steps 3, 5, 7
    LAYOUTS = [*Equality.LAYOUTS, dict(share="2x3"), dict(share="4", ranks=2, zero=3), dict(share="2x3", ranks=3, zero=3), dict(share="2x3", ranks=2, pipeline="2", zero=2)]

    def test_function(self):
        """No cut changes a bit of the function; groups are what the log says; the end is a model that shares nothing."""
        whole, *cuts = self.trained([self.RUN, *(dict(self.RUN, delink_every=every, steps=steps) for every, steps in ((1000, 9), (2, 4), (2, 6)))])
        shared, = self.trained([dict(self.RUN, delink_at=None, delink_gradual=None, delink_every=None)])
        self.assertEqual([(event["step"], event["first"]) for event in whole.of("delink")], list(zip((3, 5, 7), self.GROUPS)))
        for other, step in ((shared, 3), (cuts[0], 5)):
            self.assertEqual(whole.steps()[:step + 1], other.steps()[:step + 1], step)
            self.assertNotEqual(whole.steps()[step + 1], other.steps()[step + 1], step)
        for job, groups in zip((*cuts[1:], whole), self.GROUPS):
            for number in range(LAYERS):
                alike = [other for other in range(LAYERS) if layer(job.weights, other) == layer(job.weights, number)]
                self.assertEqual(alike, [other for other in range(LAYERS) if groups[other] == groups[number]], groups)

    def test_at_once(self):
        """Pairs have all been cut after one step: that is delinking as ever, bit by bit."""
        layouts = sample([dict(), dict(delink_moments="reset"), dict(delink_moments="measured", ranks=2, zero=1), dict(ranks=2, zero=3, dtype="bf16"), dict(ranks=2, pipeline="2", delink_warmup=2)], 2)
        for share in sample(["2", "3x2"], 1):
            cases = [dict(Delink.RUN, share=share, **layout) for layout in layouts]
            for case, job, gradual in zip(cases, self.trained(cases), self.trained([dict(case, delink_gradual=1) for case in cases])):
                self.assertEqual(job.steps("loss", "grad_norm", "lr"), gradual.steps("loss", "grad_norm", "lr"), case)
                self.assertTrue(job.weights == gradual.weights, case)

    def test_mean(self):
        """Of groups of two and of one, from a checkpoint: the mean of their layers' gradients, once in the norm."""
        out, lr = os.path.join(scratch(), "out"), Mean.LR
        train(**dict(Mean.STEP, share="all", steps=3, lr=0, delink_at=1, delink_gradual=1, delink_every=1, out=out, save_every=3))
        begun, start = test_train.checkpoint(out, 3), os.path.join(scratch(), "start.bin")
        self.assertIn("share=0.0.2.3.3.5\n", test_train.get(os.path.join(begun, "manifest")).decode())
        train(**dict(Mean.STEP, steps=0, model=begun, export=start))
        before, (shared, real) = weights(start), self.trained([dict(Mean.STEP, model=begun), dict(Mean.STEP, model=start)])
        squares = sum(((b - a) / lr) ** 2 for a, b in zip(rest(before), rest(shared.weights)))
        for users in ((0, 1), (2,), (3, 4), (5,)):
            each = [[(a - b) / lr for a, b in zip(layer(before, number), layer(real.weights, number))] for number in users]
            mean = [sum(values) / len(users) for values in zip(*each)]
            for number in users:
                found = [(a - b) / lr for a, b in zip(layer(before, number), layer(shared.weights, number))]
                self.assertLess(sum((a - b) ** 2 for a, b in zip(found, mean)), 1e-12 * sum(x * x for x in mean), users)
            squares += sum(x * x for x in mean)
        self.assert_close(shared.steps("grad_norm")[0], [squares ** 0.5], SAME, "norm")

    def test_layouts(self):
        cases = sample([dict(layout, delink_moments=moments) for layout in self.LAYOUTS for moments in ("mean", "measured", "reset") if (moments, layout.get("reduce_dtype")) != ("measured", "bf16")], 4)
        alone = {}
        for case in cases:
            key = case.get("share", "all"), case["delink_moments"]
            if key not in alone:
                alone[key], = self.trained([dict(self.RUN, share=key[0], delink_moments=key[1])])
        for case, job in zip(cases, self.trained([{**self.RUN, **case} for case in cases])):
            self.assert_close(job.losses(), alone[case.get("share", "all"), case["delink_moments"]].losses(), SAME, case)

    def test_measured(self):
        """A layer that shares no more gets what was measured for v; those that still share keep v, and go on measuring."""
        run = dict(Measured.RUN, share="4", steps=3, delink_at=2, delink_gradual=1, delink_every=1)  # 4 and 2 blocks; 2, 2, 1, 1 after 2 steps
        before, = self.saved([dict(run, steps=2, delink_at=None, delink_gradual=None, delink_every=None)])
        begun, = self.saved([run])
        self.assertEqual(sorted(number for kind, number in begun if kind == MEASURED), [2, 3])
        one, = self.saved([dict(run, delink_moments="mean")])
        for number in (4, 5):  # the two of the second group: v begins with s, and sees the same gradient
            more = [0.95 * (s - v) for s, v in zip(before[MEASURED, 3], before[V, 3])]
            found = [a - b for a, b in zip(begun[V, number], one[V, number])]
            self.assertLess(max(abs(a - b) for a, b in zip(found, more)), 1e-5 * max(begun[V, number]), number)
        for number in (2, 3):
            self.assertLess(max(abs(a - b) for a, b in zip(begun[V, number], one[V, number])), 1e-5 * max(one[V, number]), number)
            self.assertGreaterEqual(min(b - 0.95 * a for a, b in zip(before[MEASURED, 2], begun[MEASURED, number])), -1e-6 * max(before[MEASURED, 2]), number)
            self.assertGreater(sum(begun[MEASURED, number]), 1.002 * sum(begun[V, number]), number)

    def test_unlike(self):
        """Each look cuts a group before its least cosine, if that is below the threshold; layouts decide alike; pseudo models of all kinds."""
        layouts = sample([dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2", delink_moments="measured"), dict(share="2x3", ranks=3, zero=1)], 2)
        for layout in layouts:
            run = {**RUN, "share": "all", "steps": 9, "delink_auto": 1, "delink_gradual": 1, "delink_every": 1, **layout}
            never, job = self.trained([dict(run, delink_below=0, steps=3), dict(run, delink_below=1)])
            self.assertFalse(never.of("delink"))
            groups = SHARES[run["share"]]
            first = [groups.index(group) for group in groups]
            cuts = {event["step"]: event["first"] for event in job.of("delink")}
            for event in job.of("look"):
                for group in sorted(set(first)):
                    users = [number for number in range(LAYERS) if first[number] == group]
                    if len(users) > 1:
                        least = min(users[1:], key=lambda number: float(event["cosines"][number]))
                        first = [least if number in users and number >= least else first[number] for number in range(LAYERS)]
                self.assertEqual(cuts[event["step"]], first, (layout, event))
            self.assertEqual(first, list(range(LAYERS)), layout)

    def test_resume(self):
        """Bit-equal in the same layout, from between any two cuts; correct in another one."""
        layouts = [dict(), dict(ranks=2, zero=3), dict(ranks=3, pipeline="2:2,6:1", zero=2), dict(delink_moments="reset", dtype="bf16"), dict(delink_moments="measured", ranks=2, zero=2),
                   dict(delink_at=None, delink_auto=1, delink_below=1)]
        for layout in sample(layouts, 1):
            run = {**self.RUN, **layout}
            whole, = self.trained([run])
            for stop in (3, 4, 5, 6, 7, 8) if ALL else sample((4, 5, 6, 7), 2):
                out = os.path.join(scratch(), "out")
                train(**dict(run, out=out, steps=stop, save_every=stop) if stop > 3 else dict(run, out=out, steps=stop + 1, save_every=stop))
                again, other = (self.trained([dict(run, out=out, resume=1, **changes)])[0] for changes in ({}, dict(ranks=2, zero=1, pipeline=None)))
                self.assertEqual(again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[-len(again.steps()):], (layout, stop))
                self.assertTrue(again.weights == whole.weights, (layout, stop))
                self.assert_close(other.losses(), whole.losses()[-len(other.losses()):], 0.02 if layout.get("dtype") else SAME, (layout, stop))
            plain = train(code=EXIT_INPUT, **{**run, "out": out, "resume": 1, "delink_gradual": None, "delink_every": None, "delink_auto": None, "delink_below": None, "delink_at": 8})
            self.assertTrue(stop > 7 or "share=" in plain.err, plain.err)


# ---------------------------------------------------------------------------------------------------------------------
class Resume(Check):
    def test_around_the_switch(self):
        """Stopped before, at and after it, again and again, in one layout or others."""
        at = Delink.AT
        layouts = [dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2"), dict(ranks=3, pipeline="2:2,6:1", zero=2)]
        for moments, first, second in sample([(m, a, b) for m in ("mean", "measured", "reset") for a in layouts for b in layouts], 1):
            run = dict(Delink.RUN, delink_moments=moments)
            whole, = self.trained([dict(run, **first)])
            for stop in (at - 1, at, at + 1):
                out = os.path.join(scratch(), "out")
                leg = train(**dict(run, out=out, steps=stop, save_every=stop, **first))
                self.assertEqual("blocks share to the end" in leg.out, stop <= at, "a part that ends before the switch says so")
                self.assertEqual("delinked" in leg.of("start")[0], stop > at, "and forecasts none")
                exported, = self.trained([dict(run, out=out, resume=1, steps=0, delink_moments=moments, **second)])
                self.assertEqual(len({tuple(layer(exported.weights, number)) for number in range(LAYERS)}), LAYERS if stop > at else 2)
                again, = self.trained([dict(run, out=out, resume=1, **second)])
                what = f"{moments}, stopped at {stop}, {first} then {second}"
                if first == second:
                    self.assertEqual(again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[stop:], what)
                    self.assertTrue(again.weights == whole.weights, what)
                else:
                    self.assert_close(again.losses(), whole.losses()[stop:], SAME, what)

    def test_damaged_after_the_switch(self):
        """The newest valid checkpoint counts, also where its blocks still share and those of a damaged one do not."""
        at, out = Delink.AT, os.path.join(scratch(), "out")
        run = dict(Delink.RUN, **random.Random(SEED).choice([dict(), dict(ranks=2, zero=3), dict(delink_gradual=1, delink_every=1)]), out=out)
        whole, = self.trained([dict(run, save_every=1)])
        for step in range(at + 1, run["steps"] + 1):
            path = os.path.join(test_train.checkpoint(out, step), "state_00000")
            test_train.change(path, random.Random(SEED).randrange(os.path.getsize(path)))
        again, = self.trained([dict(run, resume=1)])
        self.assertEqual(again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[at:], again.err)
        self.assertTrue(again.weights == whole.weights)

    def test_of_a_run_that_began_with_a_shared_checkpoint(self):
        """It goes on after its switch, though what it began with shares; and moments begin anew at the switch, not before."""
        at, out, first = Delink.AT, os.path.join(scratch(), "out"), os.path.join(scratch(), "first")
        train(**dict(RUN, share="2x3", out=first, steps=1, save_every=1))
        run = dict(Delink.RUN, model=test_train.checkpoint(first, 1), out=out)
        run["delink_moments"] = "reset"
        shared, whole = self.trained([dict(run, out="", delink_at=None, delink_moments=None), dict(run, save_every=at + 1)])
        self.assertEqual(whole.steps("loss", "grad_norm")[:at], shared.steps("loss", "grad_norm")[:at])
        shutil.rmtree(test_train.checkpoint(out, run["steps"]))
        again, = self.trained([dict(run, resume=1)])
        self.assertEqual(again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[at + 1:])
        self.assertTrue(again.weights == whole.weights)

    def test_bit_equal(self):
        for changes in random.Random(SEED).sample([dict(share="all"), dict(share="2x3", ranks=2, zero=2), dict(share="4", ranks=2, pipeline="2")], 3 if ALL else 1):
            out = os.path.join(scratch(), "out")
            whole, = self.trained([dict(RUN, **changes)])
            train(**dict(RUN, out=out, save_every=3, steps=3, lr_schedule="constant", **changes))
            again, = self.trained([dict(RUN, out=out, resume=1, **changes)])
            self.assertEqual(again.steps("step", "loss", "grad_norm"), whole.steps("step", "loss", "grad_norm")[3:], changes)
            self.assertTrue(again.weights == whole.weights, changes)
            other = train(code=EXIT_INPUT, **dict(RUN, out=out, resume=1, **dict(changes, share="3")))
            self.assertRegex(other.err, r"of another model or optimizer: \S+,share=\S+\ntrain_gpt: rank")


# ---------------------------------------------------------------------------------------------------------------------
class Refusals(test_train.TestCase):
    def test_delink(self):
        out = os.path.join(scratch(), "out")
        train(**dict(RUN, out=out, steps=1, save_every=1))
        real = os.path.join(out, "step_00000001")
        shared = os.path.join(scratch(), "out")
        train(**dict(RUN, share="all", out=shared, steps=1, save_every=1))
        begun = os.path.join(shared, "step_00000001")
        cases = ((dict(delink=1), "no blocks that share"), (dict(model=real, delink=1), "no blocks that share"), (dict(delink_at=2), "--delink-at with --share"),
                 (dict(share="1", delink_at=2), "none can be delinked"), (dict(share="6x1", delink_auto=1), "none can be delinked"), (dict(model=scratch(), delink=1), "no checkpoint"), (dict(model=real, share="all"), "not the same"),
                 (dict(model=begun, delink=1, out=os.path.join(shared, "..", "out")), "lies in --out"),
                 *((dict(model=begun, **with_), "its blocks share") for with_ in (dict(dp_noise=1), dict(dp_epsilon=8), dict(pipeline="auto"), dict(plan=1))),
                 (dict(model=os.path.join(out, "none"), delink=1), "--model"), (dict(delink_moments="sum"), "mean|measured|reset"))
        self.check_refused(cases)
        self.assertEqual(test_train.checkpoints(shared), [1], "it is where it was")

    def test_shares(self):
        self.check_refused([(dict(share=share), "--share") for share in ("", "some", "0", "7", "-1", "2x2", "x3", "3x", "0x6", "2x3x1", "1e1", "99999999999999999999", "2 ", " 2")])

    def check_refused(self, cases):
        for (_, words), job in zip(cases, train_all([dict(RUN, **changes, code=EXIT_INPUT) for changes, _ in cases])):
            self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)
            self.assertIn(words, job.err)


if __name__ == "__main__":
    print("seed of sampled tests:", SEED, "(set TEST_SEED to repeat)", flush=True)
    in_memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1 << 30
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else None) as test_train.TEMPORARY:
        unittest.main()
