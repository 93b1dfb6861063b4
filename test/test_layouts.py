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
which no case before had (Choice). So each run of this module has nine tenths of the pairs of flags
that the program accepts, and ten runs have all (test_ten_runs counts them). Pairs that no case can
have are refused by name. A program with faults (planted_faults.py) must differ. Standard library
only.
"""

import collections
import itertools
import json
import math
import os
import random
import re
import shutil
import unittest

import harness
from harness import ALL, BINARY, EXIT_INPUT, EXIT_RESOURCES, PLANTED, SAME, SAME_NORM, SEED
from harness import TOUCHES, Job, at_once, sample, scratch, shard
from planted_faults import LAYOUTS, numbered

COUNT = 20  # cases of a run: of those that are drawn, these have most pairs
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
        self.touches, self.has_experts = False, number % 4 == 3
        self.is_private = False
        self.units = self.layers + 2
        self.samples, T = draw.choice((2, 4, 5, 6, 8, 12)), draw.choice((8, 16))
        self.same = dict(
            draw.choice([o for o in self.OPTIMIZERS if not self.refuses(o["optimizer"])]),
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
        if draw.randrange(4) == 0:
            self.same["windows"] = "document"
        if self.same["optimizer"] != "muon":
            self.same["nesterov"] = draw.choice((None, None, 1))
        if draw.randrange(4) == 0:
            self.same.update(lr_schedule="wsd", lr_last_part=0.5)
        self.layout = dict(ranks=draw.randint(1, 4), recompute=draw.choice(("none", "block")))
        self.same["shuffle"] = draw.choice((0, 1))
        if self.has_experts:
            draw.choice((self.shared, lambda: None))()
            draw.choice((self.pipeline, self.whole, self.whole))()
            self.experts()
        else:
            draw.choice((self.private, self.shared, self.shared, lambda: None))()
            draw.choice((self.cyclic, self.pipeline, self.whole))()
        if not {"dp_noise", "cyclic"} & set(self.same):
            self.same["skip_loss_z"] = draw.choice((None, None, 50))
            self.same["skip_grad_z"] = draw.choice((None, None, 50))
        self.twins, self.share_of_budget = self.drawn_twins(), draw.random()

    def refuses(self, optimizer):
        return self.has_experts and optimizer == "muon"

    def experts(self):
        """In place of the MLP, of models that can have them."""
        draw, groups, each = self.draw, *self.draw.choice(((1, 2), (1, 3), (1, 4), (2, 2), (3, 2)))
        arch = draw.choice([a for a in harness.ARCHITECTURES if a.startswith(WITH_EXPERTS)])
        _, shape = self.same["model"].split(",layers=")
        self.same["model"] = (
            f"arch={arch},layers={shape},experts={groups * each},prototypes={groups},"
            f"top_k={draw.randint(1, each)},expert_ffn={draw.randint(3, 20)}"
            + draw.choice(("", f",shared_experts={draw.randint(1, 2)}"))
        )
        self.same.update(moe_balance=draw.choice(("bias", "none", "aux", "aux")))
        self.same.update(moe_z_coefficient=draw.choice((None, 0.01)))
        if self.same["moe_balance"] == "aux":
            self.same["moe_aux_coefficient"] = draw.choice((None, 0.05, 0.05))
        both = math.gcd(groups * each, *self.replicas)
        parts = [n for n in (1, 2, 3, 4) if both % n == 0]
        if draw.randrange(3) and not ("share" in self.same and "pipeline" in self.layout):
            self.layout["expert_parallel"] = draw.choice(parts)
            if self.layout["expert_parallel"] > 1:  # rows in pieces: often, nearly always
                self.layout["moe_buffer"] = draw.choice((None, 1, 0.5))

    def private(self):
        self.is_private, style = True, self.draw.choice(("unit", "flat"))
        self.same.update(dp_noise=self.draw.choice((0, 0.5)), dp_clip=self.draw.choice((0.1, 1)))
        self.same.update(dp_clip_style=style, dp_show_private=1, dp_key="ab" * 32, dp_delta="1e-5")
        self.same.update(dp_accountant="rdp")  # the fast one
        self.same.update(shuffle=None, dp_clip_function=self.draw.choice((None, "automatic")))
        if "windows" in self.same or self.draw.randrange(3) == 0:
            self.same.update(windows="document", dp_unit="document")

    def shared(self):
        cycles = [f"{a}x{self.layers // a}" for a in range(1, 6) if self.layers % a == 0]
        share = self.draw.choice(["all", self.draw.randint(1, self.layers), *cycles])
        self.same.update(share=share, share_lr=self.draw.choice((None, None, 5e-4)))
        if self.draw.randrange(2) and self.layers > 1 and share not in (1, f"{self.layers}x1"):
            self.same.update(steps=3, delink_at=1)
            self.same["delink_moments"] = self.draw.choice((None, "mean", "reset"))
            self.same["delink_warmup"] = self.draw.choice((None, 1, 1))

    def cyclic(self):
        draw, N = self.draw, self.draw.randint(1, min(4, self.units))
        mode, clip = draw.choice(("data", "zero", "zero", "model")), draw.choice((0, 0.5))
        if self.is_private:
            mode, self.same["dp_clip_style"] = "data", "unit"
        rule = draw.choice(("v1", "v2", "v2"))
        self.same.update(cyclic=rule, cyclic_stages=N, cyclic_mode="single")
        self.same.update(micro_batch=draw.randint(1, self.samples))
        self.same.update(delink_at=None, delink_moments=None, delink_warmup=None)
        if self.same["cyclic"] == "v2":
            self.same.update(grad_clip=clip, cyclic_clip="storage" if clip else None)
            self.same.update(cyclic_slack=draw.choice((None, draw.randint(0, N))))
        if draw.randrange(2) == 0:
            self.same["cyclic_cut"] = ",".join(map(str, partition(draw, self.units, N)))
        turns = mode == "model" and N < 4 and draw.randrange(2)
        ranks = N * (N + 1) // 2 if turns else N
        nodes = draw.choice((None, 2)) if ranks % 2 == 0 else None
        if mode == "zero":  # a rank's samples are one piece
            self.same["micro_batch"] = draw.randint(-(-self.samples // N), self.samples)
        self.layout.update(cyclic_mode=mode, ranks=ranks, ranks_per_node=nodes)

    def whole(self, replicas=()):
        """replicas: how many ranks each stage has, if there are stages."""
        draw, ranks = self.draw, self.layout["ranks"]
        self.replicas = replicas or [ranks]
        rounded = not self.is_private and not self.has_experts
        self.layout.update(zero=draw.randint(0, 3), micro_batch=draw.randint(1, self.samples))
        self.layout["ranks_per_node"] = draw.choice((None, None, 1, 2)) if ranks % 2 == 0 else None
        if draw.randrange(3) == 0 and rounded:
            bits, feedback = dict(zero_gradient_bits=8), dict(zero_error_feedback=draw.randrange(2))
            self.layout.update(zero_quantized_gradients=1, **bits, **feedback)
            self.rounds = True
        if self.layout["zero"] == 3 and not self.has_experts:
            copies = [n for n in (1, 2, ranks) if n <= min(self.replicas)]
            self.layout["zero_hpz_partition_size"] = draw.choice((None, *copies))
            self.layout["zero_quantized_weights"] = draw.choice((None, None, 1))
            self.rounds = self.rounds or bool(self.layout["zero_quantized_weights"])
        if draw.randrange(6) == 0 and not self.is_private:
            self.layout["reduce_dtype"] = "bf16"
            self.rounds = True
        quantized = {"zero_quantized_gradients", "zero_quantized_weights"}
        if any(map(self.layout.get, quantized)):
            self.layout["zero_quant_block"] = draw.choice((None, 64))
        if draw.randrange(3) == 0:
            self.layout.update(self.offloaded())
        elif draw.randrange(2) == 0 and self.same["optimizer"] != "muon" and not self.is_private:
            self.delayed()

    def delayed(self):
        """One rank also updates one step late."""
        for name in ("zero_quantized_gradients", "zero_gradient_bits", "zero_error_feedback"):
            self.layout.pop(name, None)
        if not self.layout.get("zero_quantized_weights"):
            self.layout.pop("zero_quant_block", None)
        self.same.update(offload="optimizer", offload_delay=1, delink_at=None)
        self.same.update(delink_moments=None, delink_warmup=None)
        self.layout["offload_update"] = self.draw.choice((None, "host"))

    def pipeline(self):
        draw, ranks = self.draw, max(2, self.layout["ranks"])
        stages = draw.randint(2, min(ranks, self.units))
        replicas = partition(draw, ranks, stages)
        if self.has_experts and draw.randrange(2):  # which several ranks of a stage divide
            replicas = [2, 2]
        units = partition(draw, self.units, len(replicas))
        self.layout["ranks"] = sum(replicas)
        self.whole(replicas)
        self.layout["pipeline"] = ",".join(f"{u}:{r}" for u, r in zip(units, replicas))
        bubbles = not self.is_private and self.layout["recompute"] == "none"
        self.layout["pipeline_schedule"] = draw.choice(SCHEDULES if bubbles else SCHEDULES[:2])
        if self.layout["pipeline_schedule"] == "dapple":
            self.layout["pipeline_warmup"] = draw.choice((None, "a", "b"))

    def offloaded(self):
        """Flags of any place of the states."""
        draw, muon = self.draw, self.same["optimizer"] == "muon"
        places = ("optimizer", "params", "optimizer" if self.is_private else "all")
        return dict(
            offload=draw.choice(places[: 1 if self.layout.get("zero_quantized_weights") else 3]),
            offload_update=draw.choice((None, "device", None if muon else "host")),
            offload_dir=None if muon else draw.choice((None, scratch())),
        )

    def drawn_twins(self):
        """Two of the runs that have the bits of this one, or to rounding its numbers; those that
        its flags are about come often."""
        layout, names = self.layout, {"resumed": 1, "by one rank": 1}
        if layout.get("zero_error_feedback"):
            names = {}  # a checkpoint forgets errors
        if "cyclic" not in self.same:
            names.update(recomputed=1)
            if "offload_delay" not in self.same:
                names.update(budget=1, elsewhere=1 + 2 * ("offload" in layout))
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

    def weights_tolerance(self):
        """Of a weight. A noisy sum lies on a grid (ops/noise.h), so rounding may leave sums a point
        apart, and each update of each such step with them; Adam divides little ones by eps."""
        same = self.same
        point = 2**-12 * same.get("dp_noise", 0) * same.get("dp_clip", 0) / self.samples
        updates = same["steps"] * (same["steps"] + 1) / 2
        way = updates * same["lr"] * point / same.get("eps", 1)
        return WEIGHTS[same["optimizer"]] + way

    def tolerances(self):
        muon = self.same["optimizer"] == "muon"  # its iterations enlarge what rounding leaves apart
        if self.rounded():
            loss, norm = (self.rounded() * tolerance for tolerance in ROUNDED)
            # so do copies of a block that get gradients of their own
            return loss, norm * (3 if muon or self.same.get("delink_at") else 1)
        return (3 * SAME, 3 * SAME_NORM) if muon else (SAME, 2 * SAME_NORM)

    # What is paired: the flags that are given, and the values of some. Beside each, what gives it.
    VALUES = dict(
        optimizer=dict(optimizer="sgd"),
        cyclic=dict(cyclic="v2"),
        cyclic_mode=dict(cyclic="v2", cyclic_mode="data"),
        zero=dict(zero=3),
        offload=dict(offload="optimizer"),
        offload_update=dict(offload="optimizer", offload_update="device"),
        pipeline_schedule=dict(pipeline="2", pipeline_schedule="gpipe"),
        recompute=dict(recompute="block"),
        dp_clip_style=dict(dp_noise=1, dp_clip_style="unit"),
        dtype=dict(dtype="bf16"),
        windows=dict(windows="document"),
        moe_balance=dict(moe_balance="bias"),
    )
    GIVEN = dict(
        VALUES,
        share=dict(share="all"),
        share_lr=dict(share="all", share_lr=1e-3),
        delink_at=dict(share="all", delink_at=1),
        delink_moments=dict(share="all", delink_at=1, delink_moments="reset"),
        delink_warmup=dict(share="all", delink_at=1, delink_warmup=1),
        dp_noise=dict(dp_noise=1),
        dp_clip_function=dict(dp_noise=1, dp_clip_function="abadi"),
        dp_unit=dict(dp_noise=1, windows="document", dp_unit="document"),
        momentum=dict(optimizer="sgd", momentum=0.9),
        nesterov=dict(optimizer="sgd", nesterov=1),
        lr_schedule=dict(lr_schedule="wsd"),
        skip_loss_z=dict(skip_loss_z=50),
        skip_grad_z=dict(skip_grad_z=50),
        cyclic_slack=dict(cyclic="v2", cyclic_slack=1),
        cyclic_cut=dict(cyclic="v2", cyclic_cut="2,3"),
        cyclic_clip=dict(cyclic="v2", cyclic_clip="storage"),
        stochastic_rounding=dict(dtype="bf16", stochastic_rounding=1),
        reduce_dtype=dict(reduce_dtype="bf16"),
        pipeline=dict(pipeline="2"),
        pipeline_warmup=dict(pipeline="2", pipeline_schedule="dapple", pipeline_warmup="b"),
        ranks_per_node=dict(ranks_per_node=1),
        zero_hpz_partition_size=dict(zero=3, zero_hpz_partition_size=2),
        zero_quantized_weights=dict(zero=3, zero_quantized_weights=1),
        zero_quantized_gradients=dict(zero_quantized_gradients=1),
        zero_error_feedback=dict(zero_quantized_gradients=1, zero_error_feedback=1),
        zero_quant_block=dict(zero_quantized_gradients=1, zero_quant_block=64),
        offload_dir=dict(offload="optimizer", offload_dir="."),
        offload_delay=dict(offload="optimizer", offload_delay=1),
        moe_aux_coefficient=dict(moe_balance="aux", moe_aux_coefficient=0.05),
        moe_z_coefficient=dict(moe_z_coefficient=0.01),
        expert_parallel=dict(expert_parallel=2),
        moe_buffer=dict(expert_parallel=2, moe_buffer=1),
    )

    # Flags that --compat names, too, but that no layout differs in: what is printed, planned, saved
    # and measured; numbers of a rule whose flag is paired; budgets and delinking, which twins and
    # other tests have.
    NOT_PAIRED = (
        "cluster dp_account dp_accountant dp_neighbours dry_run fit hellaswag json keep lr out "
        "plan profile profile_steps prompt resume save_every show_schedule steps trace val_every "
        "beta1 beta2 cyclic_stages dp_clip dp_delta dp_epsilon dp_key dp_show_private "
        "dp_windows_per_document eps grad_clip lr_last_part muon_lr muon_momentum "
        "muon_momentum_warmup muon_steps muon_weight_decay zero_gradient_bits "
        "delink device_memory host_memory sample_every sample_tokens temperature top_k top_p"
    ).split()

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
    """Which of many cases run: those with most pairs that no accepted case has. A pair that few
    cases have counts more, and another quarter of all pairs in each run, so that a few runs have
    all; one that was in a refused case counts less, the more often the less."""

    def __init__(self, draw, count):
        cases = [Drawn(draw, number) for number in range(count)]
        self.pairs = {case: case.pairs() for case in cases}  # of what has not run
        self.all = collections.Counter(pair for pairs in self.pairs.values() for pair in pairs)
        self.weight = {}
        for pair, cases in self.all.items():
            kind = 1 if isinstance(pair[0], str) else 0.2
            self.weight[pair] = kind * draw.choice((1, 1, 1, 4)) * cases**-0.3
        self.refusals, self.had, self.taken = collections.Counter(), set(), 0

    def worth(self, case):
        return sum(
            self.weight[pair] * 0.3 ** self.refusals[pair]
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
            self.assertLess(apart, case.weights_tolerance(), f"weights of {what}")

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
            # a twin before this one may have been refused, and have saved nothing
            shutil.rmtree(harness.checkpoint(saved["out"], case.same["steps"]), ignore_errors=True)
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
    def refusal(**flags):
        """What one rank says against these flags; pairs are checked first of all."""
        words = [BINARY, *harness.command_line(flags)]
        return harness.output_of(*words, text=True, env=harness.ENVIRONMENT).stderr

    def reason(self, case):
        """The pair of flags that --compat has a reason against."""
        said = self.refusal(**{**case.same, **case.layout, "model": "nothing", "ranks": None})
        found = re.search(r": --(\S+) with --(\S+): ", said)
        return found and tuple(sorted(name.replace("-", "_") for name in found.groups()))

    def choose(self, seed, run, count=COUNT):
        """Chooses the cases of a run of this module, and runs them: run(cases) says of each whether
        the program takes it. Returns the Choice."""
        choice, accepted = Choice(random.Random(f"{seed} layouts"), 600 + 8 * count), 0
        while accepted < count:
            cases = []
            while len(cases) < min(count - accepted, 20):
                case = choice.take()
                case.touches = len(cases) % 3 == 1
                pair = self.reason(case)
                choice.refused(case, pair) if pair else cases.append(case)
            found = run(cases)
            for case, takes in zip(cases, found):
                None if takes else choice.refused(case)
            accepted += sum(found)
        return choice

    def test_pairs(self):
        """Every pair of flags that is accepted has a case, here or in another of a few runs. In
        every third case, whatever an action does not touch (schedule/touches.h) is not a number
        while it runs (test/checked_touches.h): what a step computes does not change."""
        count = 1000 if ALL else COUNT
        choice = self.choose(SEED, lambda cases: at_once(self.check, cases), count)
        print(f"{len(choice.had)} of {len(choice.all)} pairs have a case", flush=True)

    def test_flags_of_compat(self):
        """Each flag that --compat names is drawn, or belongs to nothing that layouts differ in."""
        listed = re.findall(r"(?m)^  --(\S+) +with --(\S+)", Job(words=["--compat"]).done().out)
        named = {name.replace("-", "_") for pair in listed for name in pair}
        self.assertEqual(named - set(Drawn.GIVEN), set(Drawn.NOT_PAIRED))

    def test_every_pair_can_be_drawn(self):
        """A pair of flags that no case has is refused by name."""
        draw = random.Random(f"{SEED} pairs")
        drawn = {pair for n in range(8000) for pair in Drawn(draw, n).pairs()}
        never = [p for p in itertools.combinations(sorted(Drawn.GIVEN), 2) if p not in drawn]
        self.assertGreater(len(drawn), 1000)

        def refused(pair):
            model, given = "nothing", [Drawn.GIVEN[name] for name in pair]
            if any(name.startswith(("moe", "expert")) for name in pair):
                model = f"arch=llama,layers=2,heads=2,channels=16,vocab={VOCAB},experts=2"
            for a, b in (given, given[::-1]):
                said = self.refusal(**{"dry_run": 1, **self.data, "model": model, **a, **b})
                self.assertRegex(said, ": (--.*|experts are not done) with --", f"no case: {pair}")

        at_once(refused, sample(never, 30))

    @unittest.skipUnless(ALL, "takes half a minute")
    def test_ten_runs(self):
        """A count, without the runs: ten runs of this module, each with a seed of its own, have
        every pair of flags that is accepted."""
        draw, pairs, had = random.Random(SEED), collections.defaultdict(list), set()
        for _ in range(10):
            choice = self.choose(draw.randrange(1 << 30), lambda cases: [True] * len(cases))
            had.update(pair for pair in choice.had if isinstance(pair[0], str))
            for pair, cases in choice.missing():
                pairs[pair].extend(cases)
        missing = [pair for pair in sorted(pairs) if pair not in had]
        missing = [pair for pair in missing if not all(map(self.reason, pairs[pair]))]
        print(f"ten runs have {len(had)} pairs of flags, and lack {missing}", flush=True)
        self.assertFalse(missing)

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
                case.layout.update(zero_error_feedback=None)  # a checkpoint forgets errors
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

        at_once(check, sample(layouts, 3))
        for layout, why in refused:
            refusal = job("toy", **layout).wait()
            self.assertEqual(refusal.code, EXIT_INPUT, refusal.err)
            self.assertIn(why, refusal.err)


if __name__ == "__main__":
    harness.main()
