#!/usr/bin/env python3
"""test_layouts.py: layouts drawn from all that --compat accepts, of models of every architecture:
what they compute is what one rank computes.

    python3 test/test_layouts.py        TEST_ALL=1: very many; TEST_SEED=N: the same ones again
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

A case is a model and its mathematics (optimizer, sharing, privacy, the rule of a cyclic run) with a
layout: ranks, ZeRO stages, quantized messages, stages and schedules, modes of cyclic runs, offload,
recomputation, micro-batches. Losses, norms and validation losses are compared with one rank's;
memory and traffic with the forecast (harness.Job). A pair of flags that the program refuses is
drawn again. Standard library only.
"""

import json
import random
import re

import harness
from harness import ALL, EXIT_INPUT, SAME, SAME_NORM, SEED, TOUCHES, Job, at_once, scratch, shard

COUNT = 1000 if ALL else 20
VOCAB = 256
WITH_EXPERTS = "gpt2", "llama", "qwen3"  # every fourth case
LOSS_ROUNDED, NORM_ROUNDED = 4e-3, 6e-2  # with messages of 8 bits


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
        self.units = self.layers + 2
        self.samples, T = draw.choice((4, 5, 6, 8, 12)), draw.choice((8, 16))
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
        self.layout = dict(ranks=draw.randint(1, 4), recompute=draw.choice(("none", "block")))
        kinds = (self.cyclic, self.pipeline, self.whole)
        draw.choice((self.private, self.shared, self.shared, lambda: None))()
        draw.choice(kinds)()
        if number % 4 == 3:
            self.experts()

    def experts(self):
        """In place of the MLP, of models that can have them."""
        draw, groups = self.draw, self.draw.choice((1, 1, 2, 3))
        each = draw.randint(1, 4)
        arch = draw.choice([a for a in harness.ARCHITECTURES if a.startswith(WITH_EXPERTS)])
        _, shape = self.same["model"].split(",layers=")
        self.same["model"] = (
            f"arch={arch},layers={shape},experts={groups * each},prototypes={groups},"
            f"top_k={draw.randint(1, each)},expert_ffn={draw.randint(3, 20)}"
        )
        self.same.update(moe_balance=draw.choice(("none", "bias", "aux")))
        self.same.update(moe_z_coefficient=draw.choice((None, 0.01)))
        if draw.randrange(2):
            self.layout["expert_parallel"] = draw.choice((1, 2, 3, 4))

    def private(self):
        style = self.draw.choice(("unit", "flat"))
        self.same.update(dp_noise=self.draw.choice((0, 0.5)), dp_clip=self.draw.choice((0.1, 1)))
        self.same.update(dp_clip_style=style, dp_show_private=1, dp_key="ab" * 32, dp_delta="1e-5")

    def shared(self):
        cycles = [f"{a}x{self.layers // a}" for a in range(1, 6) if self.layers % a == 0]
        self.same["share"] = self.draw.choice(["all", self.draw.randint(1, 5), *cycles])
        if not self.draw.randrange(4):
            self.same.update(steps=3, delink_at=1)

    def cyclic(self):
        draw, N = self.draw, self.draw.randint(1, min(4, self.units))
        mode, clip = draw.choice(("data", "zero", "zero", "model")), draw.choice((0, 0.5))
        self.same.update(cyclic=draw.choice(("v1", "v2")), cyclic_stages=N, cyclic_mode="single")
        self.same.update(micro_batch=draw.randint(1, self.samples), delink_at=None)
        if self.same["cyclic"] == "v2":
            self.same.update(grad_clip=clip, cyclic_clip="storage" if clip else None)
            self.same.update(cyclic_slack=draw.choice((None, None, draw.randint(0, N))))
        if draw.randrange(3) == 0:
            self.same["cyclic_cut"] = ",".join(map(str, partition(draw, self.units, N)))
        turns = mode == "model" and N < 4 and draw.randrange(2)
        self.layout.update(cyclic_mode=mode, ranks=N * (N + 1) // 2 if turns else N)

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
        if draw.randrange(3) == 0:
            self.layout["offload"] = draw.choice(("optimizer", "params", "all"))
            self.layout["offload_update"] = draw.choice((None, "host", "device"))
            self.layout["offload_dir"] = draw.choice((None, None, None, scratch()))

    def pipeline(self):
        draw, ranks = self.draw, max(2, self.layout["ranks"])
        self.layout["ranks"] = ranks
        self.whole()
        stages = draw.randint(2, min(ranks, self.units))
        units, replicas = partition(draw, self.units, stages), partition(draw, ranks, stages)
        self.layout["pipeline"] = ",".join(f"{u}:{r}" for u, r in zip(units, replicas))
        self.layout["pipeline_schedule"] = draw.choice(("gpipe", "dapple", "zero-bubble"))

    def tolerances(self):
        if self.rounds:
            return LOSS_ROUNDED, NORM_ROUNDED
        muon = self.same["optimizer"] == "muon"  # its iterations enlarge what rounding leaves apart
        return (3 * SAME, 3 * SAME_NORM) if muon else (SAME, 2 * SAME_NORM)


class Layouts(harness.TestCase):
    @classmethod
    def setUpClass(cls):
        draw = random.Random(1)
        tokens = shard([draw.randrange(64) for _ in range(6000)])
        cls.data = dict.fromkeys(("train", "val"), tokens)

    def run_of(self, **flags):
        job = Job(**self.data, **flags).wait()
        job.even_steps = "dp_noise" not in flags
        refused = job.code == EXIT_INPUT and "a defect of train_gpt" not in job.err
        return None if refused else job.done()

    def accepted(self, draw, number):
        """A case, its job and one rank's: the first that is drawn and that the program takes."""
        while True:
            case = Drawn(draw, number)
            job = self.run_of(**{**case.same, **case.layout})
            one = job and self.run_of(**case.same)
            if one:
                return case, job, one

    @staticmethod
    def told(job):
        return {
            "loss": job.losses(),
            "norm": [norm for norm, in job.steps("grad_norm")],
            "validation": [event["loss"] for event in job.of("val")],
        }

    def assert_told(self, job, other, tolerances, what):
        expected, (loss, norm) = self.told(other), tolerances
        for name, found in self.told(job).items():
            limit = norm if name == "norm" else loss
            self.assert_close(found, expected[name], limit, f"{name} of {what}")

    def test_drawn(self):
        def check(number):
            draw = random.Random(f"{SEED} layout {number}")
            case, job, one = self.accepted(draw, number)
            what = f"layout {number} of seed {SEED}: {json.dumps({**case.same, **case.layout})}"
            self.assert_told(job, one, case.tolerances(), what)

        at_once(check, range(COUNT))

    def test_optimizers(self):
        """Layouts of every optimizer are drawn."""
        line = re.search("--optimizer +<(.*?)>", Job(words=["--help", "all"]).done().out)
        drawn = {case["optimizer"] for case in Drawn.OPTIMIZERS}
        self.assertEqual(set(line[1].split("|")), drawn)

    def test_actions_touch_what_they_say(self):
        """While an action runs, whatever it does not touch (schedule/touches.h) is not a number, in
        test/train_gpt_touches.c: what a step computes does not change."""

        def check(number):
            draw = random.Random(f"{SEED} touches {number}")
            case, job, _ = self.accepted(draw, number)
            flags = {**case.same, **case.layout}
            checked = Job(binary=TOUCHES, **self.data, **flags).wait()
            checked.even_steps = job.even_steps
            tolerances = case.tolerances() if case.rounds else (SAME, 2 * SAME_NORM)
            self.assert_told(checked.done(), job, tolerances, json.dumps(flags))

        at_once(check, range(COUNT // 2))

    def test_messages_inside_blocks(self):
        """Blocks of `toy` (test/toy.h) have three parts, between which ranks exchange rows: they
        compute what one rank computes with nano, while what an action does not touch is not a
        number."""
        flags = dict(seq_len=16, batch_tokens=128, steps=3, val_every=1, val_batches=2, threads=1)
        layouts = (
            dict(ranks=1, micro_batch=4),
            dict(ranks=2, micro_batch=1, zero=2),
            dict(ranks=4, micro_batch=1, zero=3, offload="all"),
            dict(ranks=4, micro_batch=2, pipeline="2", zero=1),
            dict(ranks=2, micro_batch=2, pipeline="2", pipeline_schedule="zero-bubble"),
        )
        refused = (
            (dict(ranks=2, recompute="block"), "messages inside its blocks: not with --recompute"),
            (dict(ranks=2, cyclic="v1"), "messages inside its blocks: not with --cyclic"),
            (dict(ranks=3), "must have equally many tokens"),
        )

        def job(name, **layout):
            model = f"arch={name},layers=3,heads=2,channels=32,vocab={VOCAB}"
            return Job(binary=TOUCHES, model=model, **self.data, **flags, **layout)

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
