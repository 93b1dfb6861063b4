#!/usr/bin/env python3
"""test_reference.py: the real program against reference.py, the same mathematics a second time.

    python3 test/test_reference.py      TEST_ALL=1: more random runs, and all planted faults;
                                        TEST_SEED=N: the random choices, printed
                                        TRAIN_GPT=FILE: another binary than ./train_gpt

    TheReference  its gradient is what differences of its loss say
    Rules         a row of flags for each rule: losses, norms and rates of each step, weights after
                  the last; and that the rule acts: without it the reference's run is another one
    Random        random combinations of rules, on random layouts
    Private       clipped gradients of single samples, over several steps
    Chains        a run that shares, then one that begins with its checkpoint
    Evaluations   validation losses, bits per byte, texts at a temperature
    Numbers       initial values, tokens a second, MFU
    Precision     what --dtype bf16 rounds
    Faults        programs with a fault in a rule (FAULTS lists them, and which row must see each)

Standard library and numpy; the tests run themselves in .venv's Python where this one has no numpy.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
try:
    import numpy as np
except ImportError:
    VENV = os.path.join(ROOT, ".venv/bin/python")
    if sys.prefix != sys.base_prefix or not os.path.exists(VENV):
        sys.exit("test_reference.py needs numpy: scripts/setup.sh python gets it")
    os.execv(VENV, [VENV, *sys.argv])
import glob
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

import reference
import test_train
from reference import Config, Run, Samples
from test_faults import at_once, sample
from test_pseudo import states
from test_train import ALL, SEED, put, scratch, shard

# Relative errors of sums of some thousand products of fp32, where the reference has fp64; seen:
# 4e-8 (losses), 4e-7 (norms). A tensor after the last step: a part of its way, and rounding of the
# weights themselves, 6e-8 in each step.
LOSS, NORM, RATE, WAY, ROUNDING = 3e-6, 1e-5, 1e-12, 2e-5, 3e-7
ACTS = 30  # without its rule a run must differ by so many tolerances

T, S, END = 8, 6, 3
CONFIG = Config(layers=4, heads=2, channels=16, vocab=50, positions=11)  # rows of wpe that nobody uses
DESCRIPTOR = "layers=4,heads=2,channels=16,vocab=50"
TOKENS = [END] + random.Random(7).choices(range(CONFIG.vocab), k=210)  # a run wraps
BASE = dict(shuffle=0, seq_len=T, micro_batch=S, batch_tokens=S * T, steps=6, lr=0.05, lr_schedule="constant",
            weight_decay=0, grad_clip=0, threads=1, val_every=0)
SGD = dict(optimizer="sgd", momentum=0.9)
# So large an eps that it counts, and hides the gradients that are nothing but rounding (biases of keys).
ADAM = dict(optimizer="adamw", momentum=None, lr=0.01, eps=0.003, beta1=0.8, beta2=0.97)
V1, V2 = dict(SGD, cyclic="v1", cyclic_stages=3), dict(SGD, cyclic="v2", grad_clip=None, cyclic_stages=3)
SHARED = dict(model=DESCRIPTOR, seed=5, lr=0.5)  # shared blocks begin with a descriptor, so with small weights
DELAY = dict(offload="optimizer", offload_delay=1)
OUTLIERS = dict(ADAM, steps=138, batch_tokens=3 * T, micro_batch=3, reference=dict(tokens=[
    token for t in range(139) for token in random.Random(t).choices(range(30, 50) if t in (131, 134) else range(5, 9), k=3 * T)]))

# name: (flags, flags without the rule)
ROWS = {
    # optimizers
    "sgd": (SGD, dict(momentum=0)),
    "sgd, decay": (dict(SGD, weight_decay=0.1), dict(weight_decay=0)),
    "adamw": (ADAM, dict(eps=0.006)),
    "adamw, decay": (dict(ADAM, weight_decay=0.1), dict(weight_decay=0)),
    "adamw, second moment": (dict(ADAM, beta2=0.5), dict(beta2=0.97)),
    # learning rates
    "cosine": (dict(SGD, lr_schedule="cosine", warmup=2, final_lr_fraction=0.1, steps=10), dict(final_lr_fraction=0.2)),
    "linear": (dict(SGD, lr_schedule="linear", warmup=3, final_lr_fraction=0.3, steps=10), dict(warmup=0)),
    "constant": (dict(SGD, warmup=4, final_lr_fraction=0.1), dict(warmup=1)),
    "wsd": (dict(SGD, lr_schedule="wsd", warmup=1, final_lr_fraction=0.2, steps=12), dict(lr_schedule="constant")),
    # clipping
    "clip": (dict(SGD, grad_clip=0.8), dict(grad_clip=0)),
    "clip by default": (dict(SGD, grad_clip=None), dict(grad_clip=0)),
    "clip, adamw": (dict(ADAM, grad_clip=0.8), dict(grad_clip=0)),
    "clip where it sometimes does nothing": (dict(SGD, grad_clip=1.7), dict(grad_clip=0)),
    # data
    "continuous windows wrap": (dict(SGD, steps=10), dict(momentum=0)),
    "documents": (dict(SGD, windows="document"), dict(windows="continuous")),
    "accumulation of documents": (dict(SGD, windows="document", micro_batch=1, weight_decay=0.1), dict(windows="continuous")),
    # cyclic
    "v1": (V1, dict(cyclic="off")),
    "v1, clip": (dict(V1, grad_clip=0.8), dict(grad_clip=0)),
    "v1, adamw": (dict(V1, **ADAM, weight_decay=0.1), dict(weight_decay=0)),
    "v2": (V2, dict(cyclic="v1")),
    "v2 of two stages": (dict(V2, cyclic_stages=2), dict(cyclic_stages=3)),
    "v2, adamw": (dict(V2, **ADAM, weight_decay=0.1), dict(cyclic="v1")),
    "v2, decay": (dict(V2, weight_decay=0.2), dict(weight_decay=0)),
    "v2, slack": (dict(V2, cyclic_slack=1), dict(cyclic_slack=0)),
    "v2, cut": (dict(V2, cyclic_cut="1,4,1"), dict(cyclic_cut=None)),
    "v2, remainder": (dict(V2, cyclic_stages=4), dict(cyclic_cut="1,1,2,2")),
    "v2, storage": (dict(V2, grad_clip=0.8, cyclic_clip="storage"), dict(cyclic_clip="none")),
    "v2, storage, adamw": (dict(V2, **ADAM, grad_clip=0.8, cyclic_clip="storage"), dict(cyclic_clip="none")),
    "v2, storage, shared": (dict(V2, **SHARED, share="2", cyclic_stages=2, cyclic_cut="3,3", grad_clip=0.5, cyclic_clip="storage"), dict(cyclic_clip="none")),
    "v2, pieces": (dict(V2, micro_batch=1, batch_tokens=7 * T), dict(cyclic="v1")),
    "v2, documents": (dict(V2, windows="document", batch_tokens=7 * T), dict(windows="continuous")),
    "v2, schedule": (dict(V2, lr_schedule="cosine", warmup=2, final_lr_fraction=0), dict(cyclic="v1")),
    "v2, shared": (dict(V2, **SHARED, share="2", cyclic_stages=2, cyclic_cut="3,3"), dict(share="none")),
    "v2, shared by stages": (dict(V2, **SHARED, share="2x2", ranks=3, cyclic_mode="data", cyclic_stages=None, reference={"cyclic-stages": 3}), dict(cyclic_cut="1,4,1")),
    "v1, one stage": (dict(V1, cyclic_stages=1), dict(cyclic="off")),
    # sharing
    "all": (dict(SGD, **SHARED, share="all", steps=8), dict(share="none")),
    "pairs": (dict(SGD, **SHARED, share="2", weight_decay=0.1), dict(share="2x2")),
    "three and one": (dict(SGD, **SHARED, share="3"), dict(share="2")),
    "rows": (dict(SGD, **SHARED, share="2x2"), dict(share="2")),
    "shared, clip": (dict(SGD, **SHARED, share="all", grad_clip=0.3), dict(grad_clip=0)),
    "shared, adamw": (dict(SHARED, **{**ADAM, "eps": 0.03}, share="all"), dict(eps=0.01)),
    "share-lr": (dict(SGD, **SHARED, share="2", share_lr=0.2, delink_at=3, lr_schedule="cosine", final_lr_fraction=0.5, warmup=1), dict(share_lr=0)),
    # delinking
    "delink": (dict(SGD, **SHARED, share="2x2", delink_at=3), dict(delink_at=0)),
    "delink, mean": (dict({**SHARED, "lr": 0.02}, **{**ADAM, "lr": 0.02, "eps": 0.01}, share="all", delink_at=3, weight_decay=0.1), dict(delink_moments="reset")),
    "delink, reset": (dict({**SHARED, "lr": 0.02}, **{**ADAM, "lr": 0.02, "eps": 0.01}, share="all", delink_at=3, delink_moments="reset"), dict(delink_moments="mean")),
    "delink, reset, sgd": (dict(SGD, **SHARED, share="all", delink_at=3, delink_moments="reset"), dict(delink_moments="mean")),
    "delink, warm-up": (dict(SGD, **SHARED, share="3", delink_at=2, delink_warmup=3, lr_schedule="linear", final_lr_fraction=0.5), dict(delink_warmup=0)),
    # one step late
    "delay": (dict(SGD, **DELAY), dict(offload_delay=0)),
    "delay, rate and clip": (dict(SGD, **DELAY, grad_clip=0.8, weight_decay=0.1, lr_schedule="linear", final_lr_fraction=0), dict(grad_clip=0)),
    "delay, adamw": (dict(ADAM, **DELAY, weight_decay=0.1), dict(offload_delay=0)),
    # outliers: the window has 128 values; garbage in steps 131 and 134
    "skip-loss-z": (dict(OUTLIERS, skip_loss_z=6, skip_grad_z=20), None),
    "skip-grad-z": (dict(OUTLIERS, skip_grad_z=6, skip_loss_z=20), None),
}
# Layouts that change nothing: of plain runs, of cyclic ones.
LAYOUTS = [dict(), dict(micro_batch=1), dict(micro_batch=2), dict(recompute="block"), dict(ranks=2), dict(ranks=2, micro_batch=1, zero=1), dict(ranks=3, zero=2), dict(ranks=2, zero=3),
           dict(ranks=2, pipeline="2", micro_batch=2), dict(ranks=3, pipeline="2:1,4:2", zero=1, micro_batch=3)]
MODES = [dict(), dict(micro_batch=1), dict(cyclic_mode="single", recompute="block"), dict(cyclic_mode="data"), dict(cyclic_mode="model"), dict(cyclic_mode="zero")]


# ------------------------------------------------------------------------------------------------
# Runs of both

class Job(test_train.Job):
    """A private run draws batches of any size, which send other bytes than the expected one."""

    def check_end(self):
        if "--dp-noise" not in self.command:
            super().check_end()


def random_model(config=CONFIG, seed=3):
    """Weights as those of a trained model: no tensor is 0 or 1."""
    draw, found = np.random.default_rng(seed), {}
    for key, shape in config.tensors():
        z = draw.standard_normal(shape)
        value = z / math.sqrt(config.channels) if len(shape) == 2 else 0.2 * z + key[1].endswith("w")
        found[key] = value.astype("<f4").astype(float)
    found["wte", "wte"][config.vocab:] = 0  # rows of no token
    return found


def initial_model(flags):
    """Of a descriptor: those that the program exports."""
    path = os.path.join(scratch(), "initial.bin")
    run(**{**flags, "steps": 0, "export": path, "delink_at": None, "delink_moments": None, "delink_warmup": None, "offload_delay": None, "offload": None, "cyclic": None,
           "cyclic_stages": None, "cyclic_mode": None, "cyclic_cut": None, "cyclic_clip": None, "cyclic_slack": None, "ranks": 1, "share_lr": None, "zero": None, "pipeline": None})
    return reference.read_model(path)


def run(ranks=1, binary=test_train.BINARY, environment=(), **flags):
    """The program's run, to its end. One rank needs no mpirun."""
    flags = {**BASE, **flags}
    if ranks > 1:
        return Job(ranks, binary, environment=environment, **flags).done()
    log = os.path.join(scratch(), "log")
    words = [binary, *test_train.command_line(dict(flags, log=log))]
    return Job(shell=shlex.join(words), log=log, environment=environment, steps=flags["steps"]).done()


def both(flags, steps=None, **more):
    """(the program's run, the reference before its first step, the config and model of both)."""
    flags = {**BASE, **flags}
    about = dict(flags.pop("reference", {}))
    if flags.get("model"):
        config, model = initial_model({**flags, **more})
    else:
        config, model = CONFIG, random_model()
        flags["model"] = put("model.bin", reference.model_bytes(config, model))
    tokens = about.pop("tokens", TOKENS)
    data, export = shard(tokens), os.path.join(scratch(), "export.bin")
    job = run(**{**flags, **more}, train=data, val=data, tokenizer=tokenizer(), export=export)
    job.export = export


    def make(changes=()):
        """The reference with these flags, changed."""
        ours = {**flags, **dict(changes)}
        samples = Samples(tokens, T, ours.get("windows", "continuous"), END)
        return Run(config, model, samples, {**dashed(ours), **about})
    return job, make, model


def dashed(flags):
    """Names as on the command line."""
    return {name.replace("_", "-"): value for name, value in flags.items()}


def tokenizer():
    """Tokens of 1 to 5 bytes, so that bytes and tokens are told apart."""
    return test_train.tokenizer([b"x" * (1 + 7 * i % 5) for i in range(CONFIG.vocab)], END)


def differences(found, expected, start):
    """Of losses, norms, rates and weights: the largest error, each in units of its tolerance."""
    worst = {}
    for (what, tolerance), a, b in zip((("loss", LOSS), ("norm", NORM), ("rate", RATE)), zip(*found[0]), zip(*expected[0])):
        worst[what] = max(abs(float(x) - y) / max(abs(y), 1e-30) for x, y in zip(a, b)) / tolerance
    for key, value in expected[1].items():
        allowed = WAY * np.linalg.norm(value - start[key]) + ROUNDING * np.linalg.norm(value)
        error = np.linalg.norm(found[1][key] - value) / max(allowed, 1e-30)
        worst["weights"] = max(worst.get("weights", 0), float(error))
    return worst


class Check(test_train.TestCase):
    def assert_same(self, found, expected, start, what):
        worst = differences(found, expected, start)
        self.assertLessEqual(max(worst.values()), 1, f"{what}: errors in units of the tolerance: {worst}")

    def compare(self, name, flags, without=None, **more):
        """`more`: a layout, which the reference knows nothing of."""
        job, make, start = both(flags, **more)
        ours = make()
        expected = [ours.step() for _ in range(ours.f["steps"])], ours.file()
        told = [int(step) for step in re.findall(r"warning: step (\d+): update skipped", job.err)]
        self.assertEqual(told, ours.skipped, f"{name}: steps without an update")
        self.assertEqual(bool(told), name.startswith("skip"), name)
        found = job.steps("loss", "grad_norm", "lr"), reference.read_model(job.export)[1]
        self.assertEqual(len(found[0]), len(expected[0]))
        self.assert_same(found, expected, start, (name, more))
        if without is not None:
            other = make(without)
            changed = [other.step() for _ in range(ours.f["steps"])], other.file()
            acts = differences(changed, expected, start)
            self.assertGreater(max(acts.values()), ACTS, f"{name}: this run does not show the rule: {acts}")


# ------------------------------------------------------------------------------------------------
class TheReference(Check):
    def test_gradient(self):
        """Against central differences of the loss, of some elements of each tensor; one target masked."""
        config, draw = Config(2, 2, 8, 9, 5), np.random.default_rng(SEED)
        p = random_model(config, SEED)
        inputs, targets = draw.integers(0, 9, (3, 4)), draw.integers(0, 9, (3, 4))
        targets[1, 2] = reference.MASKED
        _, g = reference.loss_and_gradient(config, p, inputs, targets, 0.1)
        for key, value in p.items():
            for at in draw.integers(0, value.size, 4):
                old, sums = value.flat[at], []
                for step in (1e-5, -1e-5):
                    value.flat[at] = old + step
                    sums.append(0.1 * reference.loss_and_gradient(config, p, inputs, targets, 0.1)[0])
                value.flat[at] = old
                slope = (sums[0] - sums[1]) / 2e-5
                self.assertAlmostEqual(g[key].flat[at], slope, delta=1e-8 + 1e-6 * abs(slope), msg=(key, at))


# ------------------------------------------------------------------------------------------------
class Rules(Check):
    def test_each(self):
        def check(item):
            name, (flags, without) = item
            with self.subTest(name):
                self.compare(name, flags, without)
        at_once(check, ROWS.items())

    def test_default_clip_is_not_applied_to_v2(self):
        """Its norms must be above 1 for that to show."""
        job, _, _ = both(V2)
        self.assertGreater(max(float(norm) for norm, in job.steps("grad_norm")), 1.1)


# ------------------------------------------------------------------------------------------------
class Random(Check):
    """Rules combined, on layouts of which the reference knows nothing."""

    @staticmethod
    def flags(draw):
        """(flags, layout)"""
        kind = draw.choice(("plain", "plain", "v1", "v2", "v2", "share", "delink", "delay"))
        shared = kind in ("share", "delink")
        eps = dict(eps=0.02, lr=0.02) if shared else dict(eps=0.003, lr=0.01)
        flags = dict(draw.choice((SGD, dict(ADAM, **eps))), weight_decay=draw.choice((0, 0.1, 0.5)))
        flags.update(lr_schedule=draw.choice(("cosine", "linear", "constant", "wsd")), warmup=draw.randrange(4),
                     final_lr_fraction=draw.choice((0, 0.3, 1)), windows=draw.choice(("continuous", "document")),
                     batch_tokens=draw.choice((3, 4, 6, 7)) * T, steps=draw.randrange(5, 9))
        flags["grad_clip"] = draw.choice((0, 0.5, 1, 2))
        if kind == "delay":
            return dict(flags, **DELAY), draw.choice([l for l in LAYOUTS if "recompute" not in l])
        if shared:
            flags.update(model=DESCRIPTOR, seed=draw.randrange(99), share=draw.choice(("all", "2", "2x2", "3")), share_lr=draw.choice((0, 0.1)))
            if flags["optimizer"] == "sgd":
                flags["lr"] = 0.4
            if flags["share_lr"]:
                flags["share_lr"] = flags["lr"] / 2
            if kind == "delink":
                flags.update(delink_at=draw.randrange(1, 4), delink_moments=draw.choice(("mean", "reset")), delink_warmup=draw.randrange(3))
            return flags, draw.choice(LAYOUTS)
        if kind == "plain":
            return flags, draw.choice(LAYOUTS)
        N = draw.randrange(1, 5)
        flags.update(cyclic=kind, cyclic_stages=N, cyclic_cut=draw.choice((None, {1: "6", 2: "2,4", 3: "1,4,1", 4: "2,1,1,2"}[N])))
        if kind == "v2":
            flags.update(cyclic_slack=draw.choice((0, 0, 1, 2)), grad_clip=draw.choice((None, 0.5)))
            flags["cyclic_clip"] = "storage" if flags["grad_clip"] else None
        layout = dict(draw.choice(MODES))
        mode = layout.get("cyclic_mode", "single")
        if mode != "single" and N > 1:
            layout.update(ranks=N, cyclic_stages=None)
        else:
            layout.pop("cyclic_mode", None)
        return flags, layout

    def test_combinations(self):
        def check(number):
            flags, layout = self.flags(random.Random(f"{SEED} {number}"))
            self.compare(f"random run {number} of seed {SEED}: {flags}", flags, **layout)
        at_once(check, range(200 if ALL else 14))


# ------------------------------------------------------------------------------------------------
class Private(Check):
    """Noise 0: what is clipped, and how it is added up. The log tells which windows each step took."""
    FLAGS = dict(SGD, shuffle=None, dp_noise=0, dp_key="%064x" % 77, dp_show_private=1, steps=5, lr=0.2)
    ROWS = {"unit, abadi": (dict(dp_clip=0.8), dict(dp_clip=0.9)), "unit, automatic": (dict(dp_clip=0.8, dp_clip_function="automatic"), dict(dp_clip_function="abadi")),
            "flat, abadi": (dict(dp_clip=1, dp_clip_style="flat"), dict(dp_clip_style="unit")),
            "flat, automatic": (dict(dp_clip=1, dp_clip_style="flat", dp_clip_function="automatic"), dict(dp_clip_function="abadi")),
            "most are not clipped": (dict(dp_clip=5, dp_clip_style="flat"), dict(dp_clip=4)),
            "stages": (dict(dp_clip=1, dp_clip_style="stage", ranks=2, pipeline="2:1,4:1", micro_batch=2), dict(dp_clip_style="flat")),
            "adamw, clip": (dict(ADAM, dp_clip=1, grad_clip=0.3, weight_decay=0.1), dict(grad_clip=0)),
            "v1": (dict(cyclic="v1", cyclic_stages=2, dp_clip=0.8), dict(cyclic="off")),
            "v2": (dict(cyclic="v2", cyclic_stages=2, dp_clip=0.8, grad_clip=None), dict(cyclic="v1")),
            "zero": (dict(dp_clip=0.8, ranks=2, zero=3, micro_batch=1), None)}

    def steps_of(self, ours, job):
        stages = [1, 1, 2, 2, 2, 2] if ours.f["dp-clip-style"] == "stage" else None
        return [ours.step(drawn, stages) for drawn, in job.steps("samples")]

    def check(self, item, **program):
        name, (changes, without) = item
        flags = {**self.FLAGS, **changes}
        job, make, start = both(flags, **program)
        ours = make(dict(shuffle=0))
        expected = self.steps_of(ours, job), ours.file()
        found = job.steps("loss", "grad_norm", "lr"), reference.read_model(job.export)[1]
        self.assert_same(found, expected, start, name)
        if without:
            other = make(dict(shuffle=0, **without))
            acts = differences((self.steps_of(other, job), other.file()), expected, start)
            self.assertGreater(max(acts.values()), ACTS, (name, acts))

    def test_each(self):
        def check(item):
            with self.subTest(item[0]):
                self.check(item)
        at_once(check, self.ROWS.items())


# ------------------------------------------------------------------------------------------------
class Chains(Check):
    def test_delink_between_runs(self):
        """A run that shares, then one that begins with its checkpoint: steps, rates and samples from the first on; moments and counters as --delink-moments says, or still shared."""
        self.check()

    def check(self, **program):
        first = dict(ADAM, model=DESCRIPTOR, seed=5, share="2x2", steps=3, lr=0.02, eps=0.01, lr_schedule="linear", final_lr_fraction=0.2, warmup=2)
        config, model = initial_model(first)
        out = os.path.join(scratch(), "out")
        data = shard(TOKENS)
        run(**first, **program, train=data, val=data, out=out, save_every=3)

        def follow(changes):
            second = dict(first, model=test_train.checkpoint(out, 3), share=None, seed=None, steps=5, **changes)
            export = os.path.join(scratch(), "export.bin")
            job = run(**second, **program, train=data, val=data, export=export)
            flags = lambda f: dashed({**BASE, **f})
            ours = Run(config, model, Samples(TOKENS, T), flags(first))
            for _ in range(3):
                ours.step()
            ours.begin_again(flags(second))
            expected = [ours.step() for _ in range(5)], ours.file()
            found = job.steps("loss", "grad_norm", "lr"), reference.read_model(export)[1]
            self.assert_same(found, expected, model, changes)
        at_once(follow, [dict(), dict(delink=1), dict(delink=1, delink_moments="reset")])


# ------------------------------------------------------------------------------------------------
class Evaluations(Check):
    def test_validation(self):
        """The first samples of the joined shards in name order, the weights after so many updates, bits of the bytes that the targets stand for (end of text: none)."""
        cases = [(layout, batches, windows) for layout in (dict(), dict(ranks=2), dict(ranks=2, pipeline="2", micro_batch=2)) for batches in (1, 2, -1) for windows in ("continuous", "document")]
        self.check_validation(sample(cases, 4))

    def check_validation(self, cases, **program):
        draw = random.Random(SEED)
        text = [END] + [draw.randrange(CONFIG.vocab) for _ in range(150)]
        folder = scratch()
        for name, part in (("v_b.bin", text[61:]), ("v_a.bin", text[:61])):
            shutil.copy(shard(part), os.path.join(folder, name))
        lengths = [0 if i == END else 1 + 7 * i % 5 for i in range(CONFIG.vocab)]

        def check(case):
            layout, batches, windows = case
            model, data = random_model(), shard(TOKENS)
            flags = {**BASE, **SGD, "model": put("model.bin", reference.model_bytes(CONFIG, model)), "val_every": 2, "val_batches": batches, "windows": windows, "steps": 5}
            job = run(**{**flags, **layout}, **program, train=data, val=os.path.join(folder, "v_*.bin"), tokenizer=tokenizer())
            ours = Run(CONFIG, model, Samples(TOKENS, T, windows, END), dashed(flags))
            expected = {}
            for t in range(6):
                if t % 2 == 0 or t == 5:
                    loss, total, targets = ours.validate(Samples(text, T))  # never cut at documents
                    read = sum(lengths[target] for target in targets.flat if target != reference.MASKED)
                    expected[t] = (loss, total / math.log(2) / read)
                if t < 5:
                    ours.step()
            self.assertEqual([e["step"] for e in job.of("val")], list(expected), case)
            for e in job.of("val"):
                self.assert_close((e["loss"], e["bits_per_byte"]), expected[e["step"]], LOSS, case)
        at_once(check, cases)

    def test_texts_at_a_temperature(self):
        """log p of what was drawn, p = softmax(logits / temperature), against its expected value and deviation: within 5 of these. Begins with end of text."""
        self.check_texts((0.5, 1.0, 2.0))

    def check_texts(self, temperatures, **program):
        texts, model, data, many = [bytes([33 + i // 94, 33 + i % 94]) for i in range(CONFIG.vocab)], random_model(), shard(TOKENS), 60
        path = put("model.bin", reference.model_bytes(CONFIG, model))

        def check(temperature):
            job = run(**SGD, **program, model=path, train=data, val=data, lr=1e-12, steps=many, batch_tokens=T, micro_batch=1, tokenizer=test_train.tokenizer(texts, END),
                      sample_every=1, sample_tokens=T, temperature=temperature)
            found = re.findall(r"--- sample at step \d+ ---\n(.*)\n---\n", job.out)
            self.assertEqual(len(found), many)
            rows = np.array([[END] + [texts.index(text[i:i + 2].encode()) for i in range(0, 2 * T, 2)] for text in found])
            p = reference.forward(CONFIG, model, rows[:, :-1])[0] ** (1 / temperature)
            p /= p.sum(-1, keepdims=True)
            log = np.log(p)
            mean, square = (p * log).sum(-1), (p * log**2).sum(-1)
            drawn = np.take_along_axis(log, rows[:, 1:, None], -1)[..., 0]
            z = (drawn - mean).sum() / math.sqrt((square - mean**2).sum())
            self.assertLess(abs(z), 5, temperature)
        at_once(check, temperatures)


# ------------------------------------------------------------------------------------------------
class Numbers(Check):
    def test_initial_values(self):
        """Normal, of deviation 0.02, of residual outputs 0.02 / sqrt(2 L), L counting layers that share, too; biases 0, gains 1; the same for any layout. Within 5 deviations."""
        self.check_initial()

    def check_initial(self, **program):
        config = Config(3, 2, 32, 200, T)
        shape, files = "layers=3,heads=2,channels=32,vocab=200", []
        for flags in (dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2", micro_batch=2), dict(cyclic="v1", cyclic_stages=2), dict(share="all")):
            path = os.path.join(scratch(), "export.bin")
            run(**flags, **program, model=shape, steps=0, export=path)
            files.append(test_train.get(path))
            found, model = reference.read_model(path)
            self.assertEqual(found, config)
            for (storage, name), value in model.items():
                value = value[:config.vocab] if name == "wte" else value
                if value.ndim == 1:
                    self.assertTrue((value == (name.startswith("ln") and name.endswith("w"))).all(), name)
                    continue
                deviation = 0.02 / math.sqrt(2 * 3) if "proj" in name else 0.02
                self.assertLess(abs(value.mean()), 5 * deviation / math.sqrt(value.size), name)
                self.assertLess(abs(value.std() / deviation - 1), 5 / math.sqrt(2 * value.size), name)
                self.assertLess(abs((np.abs(value) < deviation).mean() - 0.6827), 5 * 0.466 / math.sqrt(value.size), name)
        self.assertEqual(len(set(files[:4])), 1, "layouts")
        self.assertTrue((model[0, "qkvw"] == model[2, "qkvw"]).all())

    def test_speed(self):
        """Tokens of all ranks by the step's time; MFU: 6 for each weight of a product and token, the classifier's padding too, and causal attention's, of the peak of all ranks."""
        self.check_speed()

    def check_speed(self, **program):
        shape = Config(3, 2, 32, 200, 16)
        weights = sum(math.prod(s) for (storage, _), s in shape.tensors() if len(s) == 2 and isinstance(storage, int)) + shape.padded * shape.channels
        attention = shape.layers * 2 * shape.channels * 16 / 2  # products of a token with those before it and values: half of 2 T C
        for ranks in (1, 2):
            job = run(ranks=ranks, **program, model="layers=3,heads=2,channels=32,vocab=200", train=shard(TOKENS), val=shard(TOKENS), seq_len=16, batch_tokens=96, micro_batch=1, steps=2)
            peak = float(job.of("start")[0]["peak_flops"])
            for ms, rate, mfu in job.steps("ms", "tokens_per_s", "mfu"):
                seconds = float(ms) / 1e3
                self.assert_close([rate, mfu], [96 / seconds, 6 * (weights + attention) * 96 / seconds / peak / ranks], 1e-6, ranks)


# ------------------------------------------------------------------------------------------------
class Precision(Check):
    def test_bf16(self):
        """Used parameters and what units tell each other are rounded; masters, moments and gradients are not. The masters of the program are far nearer to the
        reference that rounds both than to one that leaves out either."""
        self.check()

    def check(self, **program):
        out = os.path.join(scratch(), "out")
        flags = dict(SGD, dtype="bf16", steps=2, weight_decay=0.1)
        job, make, start = both(flags, out=out, save_every=2, **program)
        masters = states(test_train.checkpoint(out, 2))
        found = np.concatenate([masters[0, storage] for storage in range(CONFIG.layers + 3)])
        keys = sorted(start, key=lambda key: {"wte": -2, "wpe": -1, "lnf": CONFIG.layers}.get(*2 * key[:1]))  # stable: tensors of a block in their order

        def distance(rounded, stored):
            ours = make()
            ours.rounded, ours.stored = rounded, stored
            for _ in range(2):
                ours.step()
            return np.linalg.norm(np.concatenate([ours.now[key].ravel() for key in keys]) - found)
        half, whole = reference.bf16, reference.exact
        self.assertLess(distance(half, half), 0.3 * min(distance(half, whole), distance(whole, half)))


# ------------------------------------------------------------------------------------------------
class Faults(Check):
    """One program with all faults in it, of which a variable of the environment switches one on: {right ==> wrong} in the text of a source file. Each must be seen,
    by the row of ROWS, the row of Private.ROWS (dp: ...) or the check that is named beside it; without one the program passes."""
    UPDATE, PLAN = "kernels/update_cpu.h", "cyclic.h"
    FAULTS = [
        # optimizers
        ("adamw", UPDATE, "pow((double)o.beta1, (double){o.step ==> (o.step + 1)})"),
        ("adamw", UPDATE, "pow((double)o.beta2, (double){o.step ==> (o.step - 1)})"),
        ("adamw", UPDATE, "m[i] * unbias_m / ({sqrtf(v[i] * unbias_v) ==> sqrtf(v[i] * unbias_v + o.eps * o.eps) - o.eps} +"),
        ("adamw", UPDATE, "(sqrtf(v[i] * unbias_v) + {o.eps ==> o.eps * sqrtf(unbias_v)})"),
        ("clip, adamw", UPDATE, "(1.0f - o.beta2) * {g * g ==> grad[i] * grad[i]};"),
        ("adamw, decay", UPDATE, ") + {o.weight_decay * was[i] ==> o.weight_decay * was[i] / o.lr});"),
        ("sgd, decay", "zero.h", "o.weight_decay = {tensor_specs[parts[i].tensor].decay ? decay : 0.0f ==> decay};"),
        ("sgd, decay", "zero.h", "o.weight_decay = {tensor_specs[parts[i].tensor].decay ? decay : 0.0f ==> tensor_specs[parts[i].tensor].decay && parts[i].tensor != WPE ? decay : 0.0f};"),
        ("sgd", UPDATE, "o.momentum * was_b[i] + {grad[i] * o.grad_scale ==> (1 - o.momentum) * grad[i] * o.grad_scale}"),
        ("sgd", UPDATE, "master[i] = was[i] - o.lr * {b[i] ==> (o.momentum * b[i] + grad[i] * o.grad_scale)};"),
        # learning rates
        ("cosine", "options.h", "0.5 * (1 + cos({3.141592653589793 ==> 3.1415} * done));"),
        ("linear", "options.h", "o->lr + (last - o->lr) * {done ==> done * done};"),
        ("wsd", "options.h", "double from = {0.8 ==> 0.75} * (double)steps;"),
        ("wsd", "options.h", "(1 - {sqrt(((double)step - from) / ((double)steps - from)) ==> ((double)step - from) / ((double)steps - from)})"),
        ("constant", "options.h", "o->lr * (double)(step + {1 ==> 0}) / (double)o->warmup"),
        ("linear", "options.h", "(double)max_i64(steps - {o->warmup ==> 0}, 1);"),
        ("cosine", "options.h", "last = {o->lr * o->final_lr_fraction ==> o->final_lr_fraction}, done"),
        # clipping and skipping
        ("clip where it sometimes does nothing", "engine/trainer.h", "o->grad_clip > 0 && {norm > o->grad_clip ==> norm > 0} ?"),
        ("clip", "engine/trainer.h", "? o->grad_clip / {norm ==> (norm + 1e-3)} : 1.0;"),
        ("v1, clip", "engine/executor.h", "if (most > 0 && {norm > most ==> false})"),
        ("v2, storage", "train_gpt.c", "t->options.grad_clip / {sqrt((double)t->model.storages) ==> (double)t->model.storages}"),
        ("v2, storage, shared", "train_gpt.c", "t->options.grad_clip / {sqrt((double)t->model.storages) ==> sqrt((double)t->model.units)}"),
        ("v2, storage", "engine/executor.h", "norm = sqrt(exact_value(squares)), most = e->storage_clip, {exact_join(&e->squares, &squares) ==> (void)0}"),
        ("skip-loss-z", "checkpoint.h", "variance > 0 ? (value - mean) / {sqrt(variance) ==> sqrt(16 * variance)} : 0"),
        ("skip-loss-z", "engine/trainer.h", "double loss_z = outlier_z(&t->progress.loss, {loss ==> norm})"),
        ("skip-grad-z", "engine/trainer.h", "t->options.skip_grad_z > 0 && norm_z > {t->options.skip_grad_z ==> t->options.skip_grad_z / 8}"),
        # data
        ("continuous windows wrap", "dataloader.h", "window % n * T % {n ==> (n - T)};"),
        ("documents", "dataloader.h", "for (int64_t i = {end ==> T}; i < T; i++) { targets[i] = -1; }"),
        ("accumulation of documents", "engine/trainer.h", "t->executor.losses, (float)(1.0 / (double){max_i64(targets, 1) ==> (t->samples * t->options.seq_len)})"),
        ("sgd", "engine/trainer.h", "t->progress.position += {t->samples ==> (t->samples + 1)};"),
        # cyclic
        ("v2", PLAN, "p->rule == CYCLIC_V2 && micro + stage + 1 >= p->N + {p->slack ==> (p->slack + 1)}; }"),
        ("v2, slack", PLAN, "micro + stage + 1 >= p->N + {p->slack ==> 0}; }"),
        ("v2", PLAN, "!cyclic_fresh(b->plan, cyclic_micro(b->plan, use->micro), {stage ==> cyclic_stage_of_unit(b->plan, use->unit)});"),
        ("v2, remainder", PLAN, "cut.stage[j].units = units / N + {(j < units % N) ==> (j >= N - units % N)}; }"),
        ("v2, pieces", "store/layout.h", "const int64_t begin = begins ? begins[micro] : {part_begin(samples, p->micros, micro) ==> part_begin(samples, p->micros, micro + 1) - samples / p->micros};"),
        ("v2, documents", "engine/trainer.h", "*loss = e->telling.loss / (double){max_i64(counted, 1) ==> (t->samples * t->options.seq_len)};"),
        # sharing
        ("all", "zero.h", "o.step = version - s->restarted[storage], o.grad_scale *= {(float)store_mean(s, storage) ==> 1.0f};"),
        ("shared, clip", "zero.h", "exact_add(sum, {mean * mean ==> mean} * *partial++);"),
        ("three and one", "zero.h", "return 1 / (double){gpt_storage_shared_by(s->model, storage) ==> gpt_storage_shared_by(s->model, storage > 1 && gpt_storage_class(s->model, storage) == STORAGE_BLOCK ? 2 : storage)}; }"),
        ("share-lr", "pseudo.h", "const double shared = {share_is(&m->share) ==> true} && o->share_lr > 0"),
        ("delink, reset", "pseudo.h", "p->restarted = {moments == DELINK_RESET ==> false} ? p->updates : 0;"),
        ("delink, mean", "pseudo.h", "p->restarted = {moments == DELINK_RESET ==> true} ? p->updates : 0;"),
        ("delink, mean", "pseudo.h", "kind != STATE_PREVIOUS && ({moments != DELINK_RESET ==> false} ||"),
        ("delink, warm-up", "pseudo.h", "since < o->delink_warmup ? (double)(since + {1 ==> 2}) /"),
        ("delink", "train_gpt.c", "return o->delink_at && {step >= o->delink_at ==> step > o->delink_at} &&"),
        # one step late
        ("delay, rate and clip", "engine/trainer.h", "store_delays(&t->store) ? {t->progress.pending_norm ==> 0} : 0)"),
        ("delay", "engine/trainer.h", "t->store.pending = {!skipped ==> !skipped && t->progress.step % 2}, t->progress.pending_norm"),
        ("delay, adamw", "zero.h", "store_update_parts(s, storage, &p, s->updates[storage] + {1 ==> 2}, o);"),
        # the model
        ("sgd", "ops_cpu.h", "1.0f / sqrtf(squares / (float)C + {1e-5f ==> 1e-6f});"),
        ("sgd", "ops_cpu.h", "-1.5957691216f * (x + {0.044715f ==> 0.044f} * x * x * x); }"),
        # private steps
        ("dp: unit, abadi", "dp.h", "(float)(R / {sqrt(groups) ==> groups}), function};"),
        ("dp: unit, automatic", "kernels/clip_cpu.h", "automatic = (double)R / (norm + {0.01 ==> 0.02});"),
        ("dp: flat, abadi", "dp.h", "const double groups = clips == CLIPS_UNITS ? m->units : clips == CLIPS_STAGES ? stages : {1 ==> 2};"),
        ("dp: stages", "dp.h", "clips == CLIPS_STAGES ? {stages ==> 1} : 1;"),
        ("dp: most are not clipped", "kernels/clip_cpu.h", "abadi = {fmin(1.0, (double)R / (norm + 1e-6)) ==> (double)R / (norm + 1e-6)}"),
        ("dp: unit, abadi", "train_gpt.c", "t->store.noise.scale = (float)(1.0 / (double){p->samples ==> (p->samples + 1)});"),
        # around steps
        ("chains", "checkpoint.h", "p->restarted = {anew ==> false} ? of.updates : of.restarted;"),
        ("validation", "dataloader.h", "sum += {tokenizer_bytes(t, targets[i]) ==> 1}; }"),
        ("validation", "train_gpt.c", "bits = e.loss / {log(2.0) ==> 1.0} / (double)t->val_bytes; }"),
        ("validation", "train_gpt.c", "double loss = e.loss / (double){max_i64(e.targets, 1) ==> (e.targets + 1)}"),
        ("texts", "engine/executor.h", "draw -= exp(((double)logits[i] - (double)logits[best]) / {d.temperature ==> 1});"),
        ("initial", "gpt.h", "0.02 / sqrt({2.0 ==> 1.0} * (double)m->config.layers)"),
        ("initial", "gpt.h", "values[e] = init == {INIT_ONE ==> INIT_ZERO}; }"),
        ("speed", "gpt.h", "return tokens * (2.0 * 12.0 * C * C + {2.0 ==> 4.0} * C * T);"),
        ("speed", "engine/trainer.h", "/ seconds / (t->rates.peak_flops_per_s * {t->comm.ranks ==> 1});"),
        ("bf16", "support/base.h", "(bits + {0x7fffu ==> 0u} + ((bits >> 16) & 1u)) >> 16"),
    ]
    @staticmethod
    def expression(right, wrongs):
        """wrongs: (number of the fault, text)"""
        for number, wrong in wrongs:
            right = f"(fault({number}) ? ({wrong}) : {right})"
        return right

    def planted(self, text, file, faults):
        """The text of a file with these (number, pattern) in it."""
        places = {}
        for number, pattern in faults:
            before, right, wrong, after = re.fullmatch(r"(?s)(.*)\{(.*) ==> (.*?)\}(.*)", pattern).groups()
            self.assertEqual(text.count(before + right + after), 1, f"{file} has no longer one {before + right + after!r}")
            at = text.index(before + right + after) + len(before)
            places.setdefault((at, at + len(right)), []).append((number, wrong))
        for begin, end in sorted(places, reverse=True):  # no two of them overlap
            text = text[:begin] + self.expression(text[begin:end], places[begin, end]) + text[end:]
        return text

    def program(self):
        folder = os.path.join(scratch(), "faulty")
        files = ["Makefile"] + [os.path.relpath(path, ROOT) for pattern in ("*.[ch]", "[!t]*/*.h") for path in glob.glob(os.path.join(ROOT, pattern))]
        for file in files:
            text = test_train.get(os.path.join(ROOT, file)).decode()
            text = self.planted(text, file, [(number, pattern) for number, (_, where, pattern) in enumerate(self.FAULTS, 1) if where == file])
            if file == "support/base.h":
                switch = "static inline int fault(int n) {\n    const char *on = getenv(\"FAULT\");\n    return on && atoi(on) == n;\n}\n"
                text = text.replace("#include <unistd.h>", "#include <unistd.h>\n" + switch + "//", 1)
            os.makedirs(os.path.dirname(os.path.join(folder, file)), exist_ok=True)
            with open(os.path.join(folder, file), "w") as out:
                out.write(text)
        made = subprocess.run(["make", "-C", folder, "train_gpt", "FAST=-O0 -march=native"], capture_output=True, timeout=600)
        self.assertEqual(made.returncode, 0, made.stderr.decode()[-3000:])
        return os.path.join(folder, "train_gpt")

    def notice(self, where, **program):
        """Runs the check that is named."""
        checks = {"chains": Chains().check, "texts": lambda **p: Evaluations().check_texts((2.0,), **p), "initial": Numbers().check_initial, "speed": Numbers().check_speed,
                  "validation": lambda **p: Evaluations().check_validation([(dict(), 2, "continuous")], **p), "bf16": Precision().check}
        if where in checks:
            checks[where](**program)
        elif where.startswith("dp: "):
            Private().check((where[4:], Private.ROWS[where[4:]]), **program)
        else:
            self.compare(where, ROWS[where][0], **program)

    @unittest.skipUnless(ALL, "TEST_ALL=1: the source's text changes more often than its rules")
    def test_each(self):
        binary = self.program()

        def check(fault):
            number, (where, _, pattern) = fault
            with self.subTest(pattern):
                with self.assertRaises(AssertionError, msg=f"{where} does not see fault {number}: {pattern}") as seen:
                    self.notice(where, binary=binary, environment=dict(FAULT=str(number)))
                print(f"fault {number:2}: {where}: {pattern}\n          {str(seen.exception)[:150]!r}")
        at_once(check, enumerate(self.FAULTS, 1))
        at_once(lambda where: self.notice(where, binary=binary), sorted({fault[0] for fault in self.FAULTS}))


if __name__ == "__main__":
    print("seed of sampled tests:", SEED, "(set TEST_SEED to repeat)", flush=True)
    with tempfile.TemporaryDirectory() as test_train.TEMPORARY:
        unittest.main()
