#!/usr/bin/env python3
"""test_layouts.py: layouts that have every pair of flags which --compat accepts, of models of every
architecture: what they compute is what one rank computes, and bit by bit what their twins compute.

    python3 test/test_layouts.py        TEST_ALL=1: very many; TEST_SEED=N: the same ones again
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

A case is a model and its mathematics (optimizer, sharing, privacy, the rule of a cyclic run) with a
layout: ranks, ZeRO stages, quantized messages, stages and schedules, modes of cyclic runs, offload,
recomputation, micro-batches. Losses, norms, validation losses and weights are compared with one
rank's; memory and traffic with the forecast (harness.Job). A twin has the same bits: another stage
of ZeRO, schedule or place of states, or it is the same run, resumed. A run with another budget, or
resumed by one rank, has the same numbers to rounding.

Of very many cases that are drawn, those run that have most pairs of flags, and of their values,
which no case before had (Choice). So each run of this module has nearly every pair of flags that
the program accepts, and a few runs have all. Of a sample of the others it is tested that a case
that was drawn for the pair runs, or that --compat has a reason. A program with faults
(planted_faults.py) must differ. Standard library only.
"""

import collections
import itertools
import json
import os
import random
import re
import shutil

import harness
from harness import ALL, BINARY, EXIT_INPUT, EXIT_RESOURCES, PLANTED, SAME, SAME_NORM, SEED
from harness import TOUCHES, Job, at_once, sample, scratch, shard
from planted_faults import LAYOUTS, numbered

COUNT = 1000 if ALL else 16  # of those that are drawn, these have most pairs
VOCAB = 256
WITH_EXPERTS = "gpt2", "llama", "qwen3"  # every fourth case
ROUNDED = 4e-3, 6e-2  # of losses and norms: with messages of 8 bits, or bf16
# Of a weight: a hundredth of an update, a tenth of one of Muon, which enlarges what rounding
# leaves apart.
WEIGHTS = {"adamw": 1e-5, "sgd": 5e-6, "muon": 1e-4}
SCHEDULES = "gpipe", "dapple", "zero-bubble"
TRIED = 60  # cases for a planted fault; the rarest is seen in one of eight
UNTOUCHED = dict.fromkeys(("offload", "offload_update", "offload_dir"))


def partition(draw, total, parts):
    """So many numbers from 1 on with this sum."""
    cuts = sorted(draw.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


class Drawn:
    """A case: `same`, the flags that decide what is computed; `layout`, the others; `rounds`:
    messages are rounded."""

    OPTIMIZERS = (  # eps hides gradients that are nothing but rounding (keys' biases)
        dict(optimizer="adamw", lr=1e-3, eps=1e-3),
        dict(optimizer="sgd", lr=0.05),
        dict(optimizer="sgd", lr=0.05, momentum=0.9),
        dict(optimizer="muon", lr=1e-3, eps=1e-3),
    )

    def __init__(self, draw, number=0):
        self.draw, self.layers, self.rounds = draw, draw.randint(1, 5), False
        self.touches = False
        self.units = self.layers + 2
        self.samples, T = draw.choice((2, 4, 5, 6, 8, 12)), draw.choice((8, 16))
        self.same = dict(
            draw.choice(self.OPTIMIZERS),
            model=harness.any_model(draw, self.layers, channels=draw.choice((16, 32)), vocab=VOCAB),
            seed=draw.randint(1, 99),
            seq_len=T,
            batch_tokens=self.samples * T,
            steps=draw.choice((2, 3)),
            grad_clip=draw.choice((0, 0.5, 1)),
            val_every=draw.choice((0, 1, 2)),
            val_batches=draw.randint(1, 3),
            threads=1,
        )
        if draw.randrange(4) == 0:
            self.same.update(dtype="bf16", stochastic_rounding=draw.choice((None, 1)))
        if draw.randrange(5) == 0:
            self.same["windows"] = "document"
        self.layout = dict(ranks=draw.randint(1, 4), recompute=draw.choice(("none", "block")))
        kinds = (self.cyclic, self.pipeline, self.whole)
        self.same["shuffle"] = draw.choice((0, 1))
        draw.choice((self.private, self.shared, self.shared, lambda: None))()
        draw.choice(kinds)()
        if number % 4 == 3:
            self.experts()
        self.twins, self.share_of_budget = self.drawn_twins(), draw.random()
        if self.saves() and "zero_error_feedback" in self.layout:
            self.layout["zero_error_feedback"] = 0  # a checkpoint forgets errors

    def experts(self):
        """In place of the MLP, of models that can have them."""
        draw, groups = self.draw, self.draw.choice((1, 1, 2, 3))
        each = draw.randint(1, 4)
        arch = draw.choice([a for a in harness.ARCHITECTURES if a.startswith(WITH_EXPERTS)])
        _, shape = self.same["model"].split(",layers=")
        self.same["model"] = (
            f"arch={arch},layers={shape},experts={groups * each},prototypes={groups},"
            f"top_k={draw.randint(1, each)},expert_ffn={draw.randint(3, 20)}"
            + draw.choice(("", f",shared_experts={draw.randint(1, 2)}"))
        )
        self.same.update(moe_balance=draw.choice(("none", "bias", "aux")))
        self.same.update(moe_z_coefficient=draw.choice((None, 0.01)))
        if draw.randrange(2):
            self.layout["expert_parallel"] = draw.choice((1, 2, 3, 4))
            if self.layout["expert_parallel"] > 1:  # rows in pieces: often, nearly always
                self.layout["moe_buffer"] = draw.choice((None, 1, 0.5))

    def private(self):
        style = self.draw.choice(("unit", "flat"))
        self.same.update(dp_noise=self.draw.choice((0, 0.5)), dp_clip=self.draw.choice((0.1, 1)))
        self.same.update(dp_clip_style=style, dp_show_private=1, dp_key="ab" * 32, dp_delta="1e-5")
        self.same["shuffle"] = None

    def shared(self):
        cycles = [f"{a}x{self.layers // a}" for a in range(1, 6) if self.layers % a == 0]
        self.same["share"] = self.draw.choice(["all", self.draw.randint(1, self.layers), *cycles])
        if not self.draw.randrange(4):
            self.same.update(steps=3, delink_at=1)
            self.same["delink_moments"] = self.draw.choice((None, "reset"))

    def cyclic(self):
        draw, N = self.draw, self.draw.randint(1, min(4, self.units))
        mode, clip = draw.choice(("data", "zero", "zero", "model")), draw.choice((0, 0.5))
        self.same.update(cyclic=draw.choice(("v1", "v2")), cyclic_stages=N, cyclic_mode="single")
        self.same.update(micro_batch=draw.randint(1, self.samples))
        self.same.update(delink_at=None, delink_moments=None)
        if self.same["cyclic"] == "v2":
            self.same.update(grad_clip=clip, cyclic_clip="storage" if clip else None)
            self.same.update(cyclic_slack=draw.choice((None, None, draw.randint(0, N))))
        if draw.randrange(3) == 0:
            self.same["cyclic_cut"] = ",".join(map(str, partition(draw, self.units, N)))
        turns = mode == "model" and N < 4 and draw.randrange(2)
        ranks = N * (N + 1) // 2 if turns else N
        nodes = draw.choice((None, 2)) if ranks % 2 == 0 else None
        self.layout.update(cyclic_mode=mode, ranks=ranks, ranks_per_node=nodes)

    def whole(self):
        draw, ranks = self.draw, self.layout["ranks"]
        self.layout.update(zero=draw.randint(0, 3), micro_batch=draw.randint(1, self.samples))
        self.layout["ranks_per_node"] = draw.choice((None, None, 1, 2)) if ranks % 2 == 0 else None
        if draw.randrange(3) == 0:
            bits, feedback = dict(zero_gradient_bits=8), dict(zero_error_feedback=draw.randrange(2))
            self.layout.update(zero_quantized_gradients=1, **bits, **feedback)
            self.rounds = True
        if self.layout["zero"] == 3:
            self.layout["zero_hpz_partition_size"] = draw.choice((None, None, 1, 2, ranks))
            self.layout["zero_quantized_weights"] = draw.choice((None, None, None, 1))
            self.rounds = self.rounds or bool(self.layout["zero_quantized_weights"])
        if draw.randrange(8) == 0:
            self.layout["reduce_dtype"] = "bf16"
            self.rounds = True
        if draw.randrange(3) == 0:
            self.layout.update(self.offloaded())

    def pipeline(self):
        draw, ranks = self.draw, max(2, self.layout["ranks"])
        self.layout["ranks"] = ranks
        self.whole()
        stages = draw.randint(2, min(ranks, self.units))
        units, replicas = partition(draw, self.units, stages), partition(draw, ranks, stages)
        self.layout["pipeline"] = ",".join(f"{u}:{r}" for u, r in zip(units, replicas))
        self.layout["pipeline_schedule"] = draw.choice(SCHEDULES)
        if self.layout["pipeline_schedule"] == "dapple":
            self.layout["pipeline_warmup"] = draw.choice((None, "b"))

    def offloaded(self):
        """Flags of any place of the states."""
        draw = self.draw
        return dict(
            offload=draw.choice(("optimizer", "params", "all")),
            offload_update=draw.choice((None, "host", "device")),
            offload_dir=draw.choice((None, None, None, scratch())),
        )

    def drawn_twins(self):
        """Two of the runs that have the bits of this one, or to rounding its numbers; those that
        its flags are about come often."""
        layout, names = self.layout, {"resumed": 1, "by one rank": 1}
        if "cyclic" not in self.same:
            names.update(budget=1, recomputed=1, elsewhere=1 + 2 * ("offload" in layout))
            if not layout.get("zero_quantized_weights"):
                names.update(stage=2)
            if layout["zero"] == 3:
                names.update(copies=1 + 3 * bool(layout.get("zero_hpz_partition_size")))
        if "pipeline" in layout:
            names.update(schedule=3)
        first = self.draw.choices([*names], [*names.values()])[0]
        del names[first]
        return first, *self.draw.choices([*names], [*names.values()])

    def saves(self):
        """Whether a twin goes on with a checkpoint of this run."""
        return "resumed" in self.twins or "by one rank" in self.twins

    def changes(self, name):
        """Of the layout, for a twin."""
        layout = self.layout
        if name == "elsewhere":
            return UNTOUCHED if "offload" in layout else self.offloaded()
        if name == "recomputed":
            return dict(recompute="none" if layout["recompute"] == "block" else "block")
        if name == "stage":
            return dict(zero=layout["zero"] ^ 1, zero_hpz_partition_size=None)
        if name == "copies":
            copies = layout.get("zero_hpz_partition_size")
            return dict(zero_hpz_partition_size=None if copies else layout["ranks"])
        if name == "schedule":
            other = (SCHEDULES.index(layout["pipeline_schedule"]) + 1 + self.samples % 2) % 3
            return dict(pipeline_schedule=SCHEDULES[other], pipeline_warmup=None)
        return {}

    def rounded(self):
        """How often numbers are rounded that one rank in fp32 does not round."""
        return bool(self.rounds) + ("dtype" in self.same)

    def tolerances(self):
        if self.rounded():
            return [self.rounded() * tolerance for tolerance in ROUNDED]
        muon = self.same["optimizer"] == "muon"  # its iterations enlarge what rounding leaves apart
        return (3 * SAME, 3 * SAME_NORM) if muon else (SAME, 2 * SAME_NORM)

    # What is paired: the flags that are given, and the values of some
    VALUES = ("optimizer", "cyclic", "cyclic_mode", "zero", "offload", "offload_update")
    VALUES += ("pipeline_schedule", "recompute", "dp_clip_style", "dtype", "windows")
    GIVEN = ("share", "delink_at", "dp_noise", "momentum", "cyclic_slack", "cyclic_cut")
    GIVEN += ("delink_moments", "stochastic_rounding", "reduce_dtype", "pipeline_warmup")
    GIVEN += ("cyclic_clip", "ranks_per_node", "zero_hpz_partition_size", "zero_quantized_weights")
    GIVEN += ("zero_quantized_gradients", "zero_error_feedback", "offload_dir", "pipeline", *VALUES)

    def pairs(self):
        """Its pairs of flags, and its pairs of (flag, value)."""
        flags = {**self.same, **self.layout}
        flags = {n: v for n, v in flags.items() if n in self.GIVEN and v not in (None, 0, "none")}
        values = [(name, value) for name, value in flags.items() if name in self.VALUES]
        values += [("architecture", re.match("arch=([a-z0-9]+)|", self.same["model"])[1])]
        return [
            *itertools.combinations(sorted(flags), 2),
            *itertools.combinations(sorted(values, key=str), 2),
        ]


class Choice:
    """Which of many cases run: those with most pairs that no accepted case has. A pair that was in
    a refused case counts less, the more often the less."""

    def __init__(self, draw, count):
        cases = [Drawn(draw, number) for number in range(count)]
        self.pairs = {case: case.pairs() for case in cases}  # of what has not run
        self.all = {pair for pairs in self.pairs.values() for pair in pairs}
        self.refusals, self.had, self.taken = collections.Counter(), set(), 0

    def worth(self, case):
        return sum(
            (1 if isinstance(pair[0], str) else 0.2) * 0.3 ** self.refusals[pair]
            for pair in self.pairs[case]
            if pair not in self.had
        )

    def take(self):
        """The best case, of very many the next one; its pairs are taken as had."""
        self.taken += 1
        case = max(self.pairs, key=self.worth) if self.taken < 200 else next(iter(self.pairs))
        case.adds = [pair for pair in self.pairs.pop(case) if pair not in self.had]
        self.had.update(case.adds)
        return case

    def refused(self, case, pair=None):
        """Because of this pair, where it is known."""
        self.had.difference_update(case.adds)
        self.refusals.update([pair] if pair in case.adds else case.adds)

    def missing(self):
        """Pairs of flags that no accepted case has, with cases that have not run."""
        for pair in sorted(p for p in self.all if isinstance(p[0], str) and p not in self.had):
            yield pair, [case for case, pairs in self.pairs.items() if pair in pairs]


class Layouts(harness.TestCase):
    @classmethod
    def setUpClass(cls):
        draw = random.Random(1)
        tokens = shard([draw.randrange(64) for _ in range(6000)])
        cls.data = dict.fromkeys(("train", "val"), tokens)

    def run_of(self, **flags):
        """The run, with `weights`; None if it is refused."""
        nowhere = "arch=gpt2" in flags["model"] and "experts" in flags["model"]
        export = None if nowhere else harness.export_of(flags)  # nor is one made of prototypes
        ranks = flags.pop("ranks", 1)
        job = Job(ranks if ranks > 1 else 0, **self.data, export=export, **flags).wait()
        job.even_steps = "dp_noise" not in flags
        if job.code == EXIT_INPUT and "a defect of train_gpt" not in job.err:
            return None
        made = job.done() and export and os.path.exists(export)
        job.weights, job.export = harness.exported(export) if made else None, export
        return job

    @staticmethod
    def told(job):
        return {
            "loss": [float(loss or 0) for loss in job.steps()],  # of no sample there is none
            "norm": [float(norm or 0) for norm, in job.steps("grad_norm")],
            "validation": [event["loss"] for event in job.of("val")],
        }

    def assert_told(self, job, other, tolerances, what):
        expected, (loss, norm) = self.told(other), tolerances
        for name, found in self.told(job).items():
            limit = norm if name == "norm" else loss
            self.assertNotIn(None, found, f"{name} of {what}")
            # of a run that goes on, what the other told of the same steps
            expected_now = expected[name][len(expected[name]) - len(found) :]
            self.assert_close(found, expected_now, limit, f"{name} of {what}")
        self.assertTrue(job.steps(), what)
        drawn = [run.steps("samples")[-1:] for run in (job, other) if "dp-noise" in run.command]
        self.assertEqual(drawn[:1], drawn[1:], f"samples of {what}")

    def assert_weights(self, job, other, case, what):
        """What the last step has left."""
        self.assertEqual(job.weights is None, other.weights is None, what)
        if job.weights and not case.rounded():
            a, b = (harness.exported_weights(run.export) for run in (job, other))
            apart = max(map(abs, map(float.__sub__, a, b)))
            self.assertLess(apart, WEIGHTS[case.same["optimizer"]], f"weights of {what}")

    def assert_bits(self, job, other, what):
        count = len(job.steps())
        steps = [run.steps("loss", "grad_norm")[-count:] for run in (job, other)]
        self.assertEqual(*steps, what)
        self.assertTrue(job.weights == other.weights, f"weights of {what}")

    def check(self, case, **program):
        """Whether the program takes it; what it computes is what one rank does."""
        flags = {**case.same, **case.layout}
        what = f"of seed {SEED}: {json.dumps(flags)}"
        saved = {}
        if case.saves():
            saved = dict(out=os.path.join(scratch(), "out"), save_every=case.same["steps"] - 1)
        job = self.run_of(**flags, **saved, **program)
        one = job and self.run_of(**case.same)
        if not one:
            return False
        self.assert_told(job, one, case.tolerances(), what)
        self.assert_weights(job, one, case, what)
        if "cyclic" in case.same and not program:
            self.assert_bits(job, one, "one rank, " + what)
        if case.touches:
            checked = self.run_of(**TOUCHES, **flags)
            tolerances = case.tolerances() if case.rounded() else (SAME, 2 * SAME_NORM)
            self.assert_told(checked, job, tolerances, "with touches, " + what)
        for twin in case.twins:
            if twin == "budget":
                self.check_budget(case, job, what, **program)
            else:
                resumes = saved if twin in ("resumed", "by one rank") else {}
                self.check_twin(case, job, twin, resumes, what, **program)
        return True

    def check_twin(self, case, job, twin, saved, what, **program):
        """It may be refused, unless it goes on with a run of the same numbers."""
        flags = {**case.same, **case.layout, **case.changes(twin)}
        if saved:
            shutil.rmtree(harness.checkpoint(saved["out"], case.same["steps"]))
            flags = case.same if twin == "by one rank" else flags
        what = f"{twin}, {flags}: {what}"
        other = self.run_of(**flags, **saved, **dict(resume=1) if saved else {}, **program)
        if not other:
            # Other sums around noise that was drawn before are refused (run/privacy_ledger.h).
            private = twin == "by one rank" and "dp_noise" in flags
            self.assertFalse(saved and not case.rounds and not private, f"refused: {what}")
            return
        paces = [re.findall(r"\d+ micro-steps? of up to \d+", run.out)[:1] for run in (job, other)]
        alone = twin == "by one rank" and "cyclic" not in case.same
        if alone or paces[0] != paces[1]:  # sums in another order
            self.assert_told(other, job, case.tolerances(), what)
        else:
            self.assert_bits(other, job, what)

    def check_budget(self, case, job, what, **program):
        """Between the smallest budget, which a message names, and what the job takes, the device's
        memory is within the budget, and numbers are the same. Gradients may leave the device: then
        they are summed in another order."""
        flags, taken = {**case.same, **case.layout, **UNTOUCHED}, job.end()["memory"]["measured"]
        asked = Job(**{**self.data, **flags, **program, "device_memory": 1}).wait()
        if asked.code != EXIT_RESOURCES:
            return  # it is refused with a budget
        least = int(re.search(r"smallest that fits is --device-memory (\d+)", asked.err)[1])
        budget = least + int(case.share_of_budget * max(0, taken["device"] - least))
        within = self.run_of(**flags, device_memory=budget, **program)
        if "pipeline" not in flags:
            self.assertLessEqual(within.end()["memory"]["measured"]["device"], budget, what)
        self.assert_told(within, job, case.tolerances(), f"within {budget} bytes, {what}")

    @staticmethod
    def reason(case):
        """The pair of flags that --compat has a reason against; pairs are checked first of all."""
        flags = {**case.same, **case.layout, "model": "nothing", "ranks": None}
        words = [BINARY, *harness.command_line(flags)]
        said = harness.output_of(*words, text=True, env=harness.ENVIRONMENT).stderr
        found = re.search(r": --(\S+) with --(\S+): ", said)
        return found and tuple(sorted(name.replace("-", "_") for name in found.groups()))

    def test_pairs(self):
        """Every pair of flags that is accepted has a case, here or in another of a few runs. In
        every third case, whatever an action does not touch (schedule/touches.h) is not a number
        while it runs (test/checked_touches.h): what a step computes does not change."""
        choice, accepted = Choice(random.Random(f"{SEED} layouts"), 600 + 8 * COUNT), 0

        def run(cases):
            found = at_once(self.check, cases)
            for case, takes in zip(cases, found):
                None if takes else choice.refused(case)
            return sum(found)

        while accepted < COUNT:
            cases = []
            while len(cases) < min(COUNT - accepted, 20):
                case = choice.take()
                case.touches = len(cases) % 3 == 1
                pair = self.reason(case)
                choice.refused(case, pair) if pair else cases.append(case)
            accepted += run(cases)
        print(f"{len(choice.had)} of {len(choice.all)} pairs are in {accepted} cases", flush=True)
        for pair, cases in sample(choice.missing(), 6):
            reasons = []
            for case in cases[:40]:
                reasons.append(self.reason(case))
                case.adds = []
                if reasons[-8:] == [pair] * 8 or not reasons[-1] and run([case]):
                    break
            else:
                self.assertNotIn(None, reasons, f"--compat does not say why {pair} is refused")
            accepted_now = reasons and not reasons[-1]
            print(pair, "has a case now" if accepted_now else "is refused", flush=True)

    @staticmethod
    def has(case, where):
        """Whether a case has these flags; True: of any value."""
        flags = {**case.same, **case.layout}
        given = {name: flags.get(name) for name in where}
        return all(value is True and given[n] or given[n] == value for n, value in where.items())

    def test_faults(self):
        """Each is seen by one of the first cases that have its flags."""

        def see(fault):
            number, where, _, pattern = fault
            draw, program = random.Random(f"{SEED} {pattern}"), dict(binary=PLANTED)
            cases = (Drawn(draw, n) for n in range(20000))
            cases = (case for case in cases if self.has(case, where) and not self.reason(case))
            for case in itertools.islice(cases, TRIED):
                case.twins = ("resumed",)
                try:
                    self.check(case, **program, environment=dict(FAULT=str(number)))
                except AssertionError:
                    return self.check(case, **program)  # without the fault it is right
            self.fail(f"not seen: {pattern}")

        at_once(see, sample(numbered(LAYOUTS), 2))

    def test_optimizers(self):
        """Layouts of every optimizer are drawn."""
        line = re.search("--optimizer +<(.*?)>", Job(words=["--help", "all"]).done().out)
        drawn = {case["optimizer"] for case in Drawn.OPTIMIZERS}
        self.assertEqual(set(line[1].split("|")), drawn)

    def test_messages_inside_blocks(self):
        """Blocks of `toy` (test/toy.h) have three parts, between which ranks exchange rows: they
        compute what one rank computes with nano, while what an action does not touch is not a
        number."""
        flags = dict(seq_len=16, batch_tokens=128, steps=3, val_every=1, val_batches=2, threads=1)
        layouts = (
            dict(ranks=1, micro_batch=4),
            dict(ranks=2, micro_batch=1, zero=2),
            dict(ranks=2, micro_batch=2, recompute="block"),
            dict(ranks=4, micro_batch=1, zero=3, offload="all"),
            dict(ranks=4, micro_batch=2, pipeline="2", zero=1),
            dict(ranks=2, micro_batch=2, pipeline="2", pipeline_schedule="zero-bubble"),
        )
        refused = (
            (dict(ranks=2, cyclic="v1"), "messages inside its blocks: not with --cyclic"),
            (dict(ranks=3), "must have equally many tokens"),
        )

        def job(name, **layout):
            model = f"arch={name},layers=3,heads=2,channels=32,vocab={VOCAB}"
            return Job(**TOUCHES, model=model, **self.data, **flags, **layout)

        one = job("nano", ranks=1, micro_batch=2).done()

        def check(layout):
            self.assert_told(job("toy", **layout).done(), one, (SAME, 2 * SAME_NORM), str(layout))

        at_once(check, layouts)
        for layout, why in refused:
            refusal = job("toy", **layout).wait()
            self.assertEqual(refusal.code, EXIT_INPUT, refusal.err)
            self.assertIn(why, refusal.err)


if __name__ == "__main__":
    harness.main()
