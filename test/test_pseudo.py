#!/usr/bin/env python3
"""test_pseudo.py: Pseudo-to-Real training of the real program under mpirun, from outside.

    python3 test/test_pseudo.py         TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random
                                        choices, printed

    Mean        the gradient of a shared storage is the mean of those that its layers have for
                themselves, and counts once in the norm
    Equality    quantized gradients are those of one rank, and so is the GPU build; with nothing
                shared it is a plain run. Other layouts are in test_layouts.py
    Numbers     parameters and memory shrink as the formula says
    Delink      the switch changes no bit of the function; moments are copied, or begin anew
    Resume      bit-equal before, at and after the switch, in the same layout and another; not with
                another sharing
    Refusals    what does not fit ends with exit 2 and one message

Every run is checked for memory and traffic as predicted (harness.Job). The model has 6 blocks.
Standard library only.
"""

import os
import random
import shutil
import unittest

import harness
from harness import (
    ALL, EMULATED, EXIT_INPUT, SAME, SEED, T, at_once, sample, scratch, train, train_all, weights,
)

LAYERS, CHANNELS, VOCAB, PADDED = 6, 16, 101, 128
MODEL = f"layers={LAYERS},heads=2,channels={CHANNELS},vocab={VOCAB}"
BLOCK = 12 * CHANNELS**2 + 13 * CHANNELS
RUN = dict(model=MODEL, seed=3, steps=6, micro_batch=2, batch_tokens=8 * T, threads=1)
SHARES = {
    "all": [0] * 6, "2": [0, 0, 1, 1, 2, 2], "4": [0, 0, 0, 0, 1, 1], "2x3": [0, 1] * 3,
    "3x2": [0, 1, 2] * 2, "6x1": list(range(6)), "1x6": [0] * 6,
}


def any_architecture(draw):
    return harness.any_model(draw, layers=LAYERS)


def tensors():
    """(begin, elements of a layer) in the order of the file, of the tensors of blocks; then of the
    others (begin, elements)."""
    C, at, blocks, others = CHANNELS, 0, [], []
    for n, layers in (
        (PADDED * C, 0),
        (T * C, 0),
        *((n * C, 1) for n in (1, 1, 3 * C, 3, C, 1, 1, 1, 4 * C, 4, 4 * C, 1)),
        (C, 0),
        (C, 0),
    ):
        (blocks if layers else others).append((at, n))
        at += n * (LAYERS if layers else 1)
    return blocks, others


def layer(file, number):
    return [
        x for begin, n in tensors()[0] for x in file[begin + number * n : begin + (number + 1) * n]
    ]


def rest(file):
    return [x for begin, n in tensors()[1] for x in file[begin : begin + n]]


class Check(harness.TestCase):
    def trained(self, cases):
        cases = [dict(case, export=harness.export_of(case)) for case in cases]
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            if harness.is_gpt2(case["model"]):
                job.weights = weights(case["export"])
        return jobs


# --------------------------------------------------------------------------------------------------
class Mean(Check):
    LR = 1 << 19  # such an sgd step leaves -LR x gradient in the weights, to 24 bits
    STEP = dict(RUN, steps=1, optimizer="sgd", momentum=0, weight_decay=0, grad_clip=0, lr=LR)

    def test_of_the_layers_gradients(self):
        def check(share):
            of, start = SHARES[share], os.path.join(scratch(), "start.bin")
            train(**dict(self.STEP, steps=0, share=share, export=start))  # its layers are copies
            before = weights(start)
            for number in range(LAYERS):
                self.assertEqual(
                    layer(before, number),
                    layer(before, of.index(of[number])),
                    f"{share}: layer {number}",
                )
            shared, real = self.trained(
                [dict(self.STEP, share=share), dict(self.STEP, model=start)]
            )
            self.assertEqual(shared.losses(), real.losses(), "one function")
            squares = sum(
                ((b - a) / self.LR) ** 2 for a, b in zip(rest(before), rest(shared.weights))
            )
            for group in sorted(set(of)):
                users = [number for number in range(LAYERS) if of[number] == group]
                each = [
                    [
                        (a - b) / self.LR
                        for a, b in zip(layer(before, number), layer(real.weights, number))
                    ]
                    for number in users
                ]
                mean = [sum(values) / len(users) for values in zip(*each)]
                found = [
                    (a - b) / self.LR
                    for a, b in zip(layer(before, users[0]), layer(shared.weights, users[0]))
                ]
                norm = sum(x * x for x in mean) ** 0.5
                # 24 bits of each weight, of sums of 6 layers
                self.assertLess(
                    sum((a - b) ** 2 for a, b in zip(found, mean)) ** 0.5 / norm, 1e-6, share
                )
                squares += norm**2
            self.assert_close(shared.steps("grad_norm")[0], [squares**0.5], SAME, share)

        at_once(check, sample(SHARES, 2))


# --------------------------------------------------------------------------------------------------
class Equality(Check):
    def test_quantized_gradients(self):
        """Blocks that alternate are reduced at the end of the step, and so travel apart from what
        is reduced before: the norm of the first gradient, in 8 bits, is that of one rank."""
        cases = [
            dict(layout, share=share, model=model)
            for model in (MODEL, any_architecture(random.Random(SEED)))
            for share in ("2x3", "3x2", "2")
            for layout in (dict(), dict(zero=1), dict(zero=2), dict(zero=3, micro_batch=1))
        ]
        bits = dict(ranks=2, zero_quantized_gradients=1, zero_gradient_bits=8)
        fixed = [case for case in cases[:8] if case.get("zero", 0) < 2]  # alternate, zero 0 or 1
        for case in cases if ALL else sample(fixed, 1):
            run = dict(RUN, steps=3, optimizer="sgd", lr=0.01, grad_clip=0, **case)
            one, job = self.trained([dict(run, zero=None), dict(run, **bits)])
            norms = [[norm for norm, in each.steps("grad_norm")] for each in (job, one)]
            self.assert_close(*norms, 0.02, case)
            self.assert_close(job.losses(), one.losses(), 1e-3, case)

    # of the GPU build: blocks that share across stages, and replicas, which start many collectives
    PIPELINES = [
        dict(ranks=2, pipeline="2"),
        dict(ranks=3, pipeline="3"),
        dict(ranks=3, pipeline="2:1,3:1,3:1"),
        dict(ranks=4, pipeline="4"),
        dict(ranks=4, pipeline="4:2,4:2"),
        dict(ranks=3, pipeline="5:2,3:1", micro_batch=4),
        dict(ranks=4, pipeline="3:1,3:2,2:1"),
    ]

    def drawn(self, draw):
        """A pipeline whose ranks share one GPU or have one each."""
        return dict(
            draw.choice(self.PIPELINES),
            share=draw.choice(list(SHARES)),
            zero=draw.randrange(4),
            pipeline_schedule=draw.choice(["gpipe", "dapple", "zero-bubble"]),
            batch_tokens=draw.choice([2, 6, 8, 11]) * T,
            dtype=draw.choice(["fp32", "fp32", "bf16"]),
            gpus=draw.choice([1, 1, 4]),
        )

    @unittest.skipUnless(os.path.exists(EMULATED), "train_gpt_emu is not built: make emu")
    def test_gpu_build(self):
        """Where ranks share a GPU, only a few collectives are under way at once, and one more waits
        for its members."""
        draw = random.Random(SEED)
        fixed = [
            dict(
                layout, share="2x3", zero=0, pipeline_schedule="dapple", batch_tokens=8 * T,
                dtype="fp32", gpus=1,
            )
            for layout in self.PIPELINES[:2]
        ]
        cases = [
            dict(RUN, steps=3, watchdog=30, **case)
            for case in sample(fixed, 1) + [self.drawn(draw) for _ in range(60 if ALL else 1)]
        ]
        places = [dict(EMU_SEED=str(SEED), EMU_GPUS=str(case.pop("gpus"))) for case in cases]
        jobs = train_all(
            [dict(case, binary=EMULATED, environment=place) for case, place in zip(cases, places)]
        )
        alone = train_all(
            [
                dict(RUN, steps=3, share=case["share"], batch_tokens=case["batch_tokens"])
                for case in cases
            ]
        )
        for case, place, job, one in zip(cases, places, jobs, alone):
            self.assert_close(
                job.losses(), one.losses(), SAME if case["dtype"] == "fp32" else 0.02, (case, place)
            )

    def test_nothing_shared(self):
        none, ones = self.trained([dict(RUN), dict(RUN, share="6x1")])
        self.assertEqual(
            none.steps("step", "loss", "grad_norm"), ones.steps("step", "loss", "grad_norm")
        )
        self.assertTrue(none.weights == ones.weights)


# --------------------------------------------------------------------------------------------------
class Numbers(Check):
    def test_memory(self):
        for share, of in sample(list(SHARES.items()), 2):
            elements = PADDED * CHANNELS + T * CHANNELS + 2 * CHANNELS + len(set(of)) * BLOCK
            memory = train(**dict(RUN, share=share, steps=1)).end()["memory"]["measured"]
            self.assertEqual(
                (memory["parameters"], memory["gradients"], memory["optimizer"]),
                (4 * elements, 4 * elements, 8 * elements),
                share,
            )


# --------------------------------------------------------------------------------------------------
class Delink(Check):
    AT = 4
    RUN = dict(RUN, steps=AT + 3, share="2x3", delink_at=AT)

    def test_function(self):
        """The loss of the first step of copies is what it would be of what they are copies of; then
        they go their own ways."""
        for share in sample(["all", "4", "3x2"], 2):
            delinked, shared = self.trained(
                [dict(self.RUN, share=share), dict(self.RUN, share=share, delink_at=None)]
            )
            self.assertEqual(delinked.steps()[: self.AT + 1], shared.steps()[: self.AT + 1], share)
            self.assertNotEqual(delinked.steps()[self.AT + 1], shared.steps()[self.AT + 1], share)
            self.assertEqual(
                len({tuple(layer(delinked.weights, number)) for number in range(LAYERS)}),
                LAYERS,
                share,
            )
            (event,) = delinked.of("delink")
            self.assertEqual(
                (event["step"], event["parameters"]),
                (self.AT, PADDED * CHANNELS + T * CHANNELS + 2 * CHANNELS + LAYERS * BLOCK),
            )

    def assert_mean(self, delinked, shared, of, what):
        """sgd with momentum is linear: the mean of what copies do is what the shared layer does,
        where they have its moments."""
        for group in sorted(set(of)):
            users = [number for number in range(LAYERS) if of[number] == group]
            mean = [
                sum(values) / len(users)
                for values in zip(*(layer(delinked, number) for number in users))
            ]
            self.assertLess(
                max(abs(a - b) for a, b in zip(mean, layer(shared, users[0]))), 1e-6, what
            )
            self.assertGreater(
                max(
                    abs(a - b) for a, b in zip(layer(delinked, users[0]), layer(delinked, users[1]))
                ),
                2e-6,
                what,
            )
        self.assertLess(max(abs(a - b) for a, b in zip(rest(delinked), rest(shared))), 1e-6, what)

    def test_moments_are_copied(self):
        """Within a run, and between runs, where they come from files."""
        linear = dict(self.RUN, optimizer="sgd", momentum=0.9, lr=0.5, grad_clip=0, delink_at=None)
        for share, layout in sample(
            [
                (share, layout)
                for share in ("all", "3x2", "2")
                for layout in (dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2", zero=1))
            ],
            2,
        ):
            out, one = os.path.join(scratch(), "out"), dict(
                linear, share=share, steps=self.AT + 1, **layout
            )
            shared, inside = self.trained([one, dict(one, delink_at=self.AT)])
            self.assert_mean(inside.weights, shared.weights, SHARES[share], (share, layout))
            train(**dict(one, steps=self.AT, out=out, save_every=self.AT))
            begun = dict(one, model=os.path.join(out, f"step_{self.AT:08}"), share=None, steps=1)
            shared, outside, anew = self.trained(
                [begun, dict(begun, delink=1), dict(begun, delink=1, delink_moments="reset")]
            )
            self.assertEqual(shared.steps(), outside.steps(), (share, layout))
            self.assert_mean(outside.weights, shared.weights, SHARES[share], (share, layout))
            with self.assertRaises(AssertionError):
                self.assert_mean(anew.weights, shared.weights, SHARES[share], (share, layout))

    def test_moments_begin_anew(self):
        """The first update of Adam is lr x the sign of the gradient."""
        lr, run = 1e-3, dict(
            self.RUN, weight_decay=0, eps=1e-20, lr=1e-3, delink_moments="reset", steps=self.AT + 1
        )
        before, after = self.trained(
            [dict(run, delink_at=None, delink_moments=None, steps=self.AT), run]
        )
        for number in range(LAYERS):
            moved = [
                abs(a - b) / lr
                for a, b in zip(layer(after.weights, number), layer(before.weights, number))
            ]
            self.assertLess(
                sum(x < 0.99 for x in moved), 0.1 * len(moved), "biases of keys have no gradient"
            )
            self.assertLess(max(moved), 1.01)
        moved = [abs(a - b) / lr for a, b in zip(rest(after.weights), rest(before.weights))]
        self.assertGreater(sum(0 < x < 0.9 for x in moved), 0.2 * len(moved), "others go on")

    def test_warmup(self):
        rates = [float(rate) for rate, in train(**dict(self.RUN, delink_warmup=2)).steps("lr")]
        for found, factor in zip(rates[self.AT - 1 :], (1, 0.5, 1, 1)):
            self.assertAlmostEqual(found, factor * rates[0], delta=1e-9)
        rates = [
            float(rate) for rate, in train(**dict(self.RUN, lr=4e-3, share_lr=1e-3)).steps("lr")
        ]
        for found, expected in zip(rates, [1e-3] * self.AT + [4e-3] * 3):
            self.assertAlmostEqual(found, expected, delta=1e-9)


# --------------------------------------------------------------------------------------------------
class Resume(Check):
    def test_around_the_switch(self):
        """Stopped before, at and after it, again and again, in one layout or others."""
        at = Delink.AT
        layouts = [
            dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2"),
            dict(ranks=3, pipeline="2:2,6:1", zero=2),
        ]
        for moments, first, second in sample(
            [(m, a, b) for m in ("mean", "reset") for a in layouts for b in layouts], 1
        ):
            run = dict(Delink.RUN, delink_moments=moments)
            (whole,) = self.trained([dict(run, **first)])
            for stop in (at - 1, at, at + 1):
                out = os.path.join(scratch(), "out")
                leg = train(**dict(run, out=out, steps=stop, save_every=stop, **first))
                if stop < at:
                    other = dict(run, out=out, resume=1, share="3", code=EXIT_INPUT)
                    refused = r"of another model or optimizer: \S+,share=\S+\ntrain_gpt: rank"
                    self.assertRegex(train(**other).err, refused)
                self.assertEqual(
                    "blocks share to the end" in leg.out,
                    stop <= at,
                    "a part that ends before the switch says so",
                )
                self.assertEqual("delinked" in leg.of("start")[0], stop > at, "and forecasts none")
                (exported,) = self.trained(
                    [dict(run, out=out, resume=1, steps=0, delink_moments=moments, **second)]
                )
                self.assertEqual(
                    len({tuple(layer(exported.weights, number)) for number in range(LAYERS)}),
                    LAYERS if stop > at else 2,
                )
                (again,) = self.trained([dict(run, out=out, resume=1, **second)])
                what = f"{moments}, stopped at {stop}, {first} then {second}"
                if first == second:
                    self.assertEqual(
                        again.steps("loss", "grad_norm"),
                        whole.steps("loss", "grad_norm")[stop:],
                        what,
                    )
                    self.assertTrue(again.weights == whole.weights, what)
                else:
                    self.assert_close(again.losses(), whole.losses()[stop:], SAME, what)

    def test_damaged_after_the_switch(self):
        """The newest valid checkpoint counts, also where its blocks still share and those of a
        damaged one do not."""
        at, out = Delink.AT, os.path.join(scratch(), "out")
        run = dict(
            Delink.RUN, **random.Random(SEED).choice([dict(), dict(ranks=2, zero=3)]), out=out
        )
        (whole,) = self.trained([dict(run, save_every=1)])
        for step in range(at + 1, run["steps"] + 1):
            path = os.path.join(harness.checkpoint(out, step), "state_00000")
            harness.change(path, random.Random(SEED).randrange(os.path.getsize(path)))
        (again,) = self.trained([dict(run, resume=1)])
        self.assertEqual(
            again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[at:], again.err
        )
        self.assertTrue(again.weights == whole.weights)

    def test_of_a_run_that_began_with_a_shared_checkpoint(self):
        """It goes on after its switch, though what it began with shares; and moments begin anew at
        the switch, not before."""
        at, out, first = Delink.AT, os.path.join(scratch(), "out"), os.path.join(scratch(), "first")
        train(**dict(RUN, share="2x3", out=first, steps=1, save_every=1))
        run = dict(Delink.RUN, model=harness.checkpoint(first, 1), out=out)
        run["delink_moments"] = "reset"
        shared, whole = self.trained(
            [dict(run, out="", delink_at=None, delink_moments=None), dict(run, save_every=at + 1)]
        )
        self.assertEqual(
            whole.steps("loss", "grad_norm")[:at], shared.steps("loss", "grad_norm")[:at]
        )
        shutil.rmtree(harness.checkpoint(out, run["steps"]))
        (again,) = self.trained([dict(run, resume=1)])
        self.assertEqual(
            again.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm")[at + 1 :]
        )
        self.assertTrue(again.weights == whole.weights)


# --------------------------------------------------------------------------------------------------
class Refusals(harness.TestCase):
    def test_delink(self):
        out = os.path.join(scratch(), "out")
        train(**dict(RUN, out=out, steps=1, save_every=1))
        real = os.path.join(out, "step_00000001")
        shared = os.path.join(scratch(), "out")
        train(**dict(RUN, share="all", out=shared, steps=1, save_every=1))
        begun = os.path.join(shared, "step_00000001")
        cases = (
            (dict(delink=1), "no blocks that share"),
            (dict(model=real, delink=1), "no blocks that share"),
            (dict(delink_at=2), "--delink-at with --share"),
            (dict(share="1", delink_at=2), "--delink-at with --share 1: no two blocks"),
            (dict(share="6x1", delink_at=2), "no two blocks"),
            (dict(share="1", share_lr=1e-3), "--share-lr with --share 1: no two blocks"),
            (dict(model=scratch(), delink=1), "no checkpoint"),
            (dict(model=real, share="all"), "not the same"),
            (dict(model=begun, delink=1, out=os.path.join(shared, "..", "out")), "lies in --out"),
            *(
                (dict(model=begun, **with_), "its blocks share")
                for with_ in (
                    dict(dp_noise=1), dict(dp_epsilon=8), dict(pipeline="auto"), dict(plan=1),
                )
            ),
            (dict(model=os.path.join(out, "none"), delink=1), "--model"),
            (dict(delink_moments="sum"), "mean|reset"),
        )
        self.check_refused(cases)
        self.assertEqual(harness.checkpoints(shared), [1], "it is where it was")

    def test_shares(self):
        self.check_refused(
            [
                (dict(share=share), "--share")
                for share in (
                    "", "some", "0", "7", "-1", "2x2", "x3", "3x", "0x6", "2x3x1", "1e1",
                    "99999999999999999999", "2 ", " 2",
                )
            ]
        )

    def check_refused(self, cases):
        for (_, words), job in zip(
            cases, train_all([dict(RUN, **changes, code=EXIT_INPUT) for changes, _ in cases])
        ):
            self.assertEqual(job.err.count("train_gpt: rank"), 1, job.err)
            self.assertIn(words, job.err)


if __name__ == "__main__":
    harness.main()
