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
    Chains        a run that shares, then one that begins with its checkpoint; a cyclic run,
                  then one by another rule
    Evaluations   validation losses, bits per byte, texts at a temperature
    Numbers       initial values, tokens a second, MFU
    Precision     what --dtype bf16 rounds
    Faults        a program with a fault in a rule (planted_faults.py), which its row must see

Rules that have an independent reference elsewhere:

    ten steps of AdamW, clipped and not, and of SGD, by PyTorch   test_gpt.c, test_train.py: Golden
    Llama, Qwen2, Qwen3, nanochat's block, by transformers        test_modern.py
    each operation and its gradient, in fp64                      test_ops.c
    windows of shards and documents, permutations, Poisson draws  test_dataloader.c
    INT8 and INT4 blocks, two hops, error feedback                test_ops.c, test_zero.py
    clipping of samples, of all sizes; noise by a slow ChaCha20   test_dp.py
    epsilon                                                       test_accountant.c
    HellaSwag and label accuracy, by losses of plain documents    test_evaluations.py
    memory and traffic, by formulas                               test_zero.py, test_dry_run.py
    times of schedules, by formulas                               test_schedule.c, test_pipeline.c

Standard library and numpy; the tests run themselves in .venv's Python where this one has none.
"""

import glob
import itertools
import math
import os
import random
import re
import shlex
import shutil
import struct

import harness

harness.need_numpy()
import numpy as np  # noqa: E402
from harness import ALL, FAULTY, PLANTED, SEED, at_once, get, put, sample, scratch, shard
from planted_faults import REFERENCE, numbered

import reference
from reference import Config, Run, Samples

ROOT = harness.ROOT


def states(folder):
    """(kind, storage) -> the elements of a state, of a checkpoint (docs/formats.md)."""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "state_*"))):
        with open(path, "rb") as file:
            data = file.read()
        at = 24 + 32 * struct.unpack_from("<3Q", data)[2]
        for kind, storage, begin, n in struct.iter_unpack("<4q", data[24:at]):
            found.setdefault((kind, storage), {})[begin] = np.frombuffer(data, "<f4", n, at)
            at += 4 * n
    return {
        key: np.concatenate([pieces[begin] for begin in sorted(pieces)])
        for key, pieces in found.items()
    }


# Relative errors of sums of some thousand products of fp32, where the reference has fp64; seen:
# 1e-6 (losses), 1e-6 (norms). A tensor after the last step: a part of its way, and the rounding of
# the weights themselves, 6e-8 in each step. Muon's orthogonalization enlarges the error of a
# gradient, 1e-6, by up to 3.4445^5 = 485 where singular values are small; seen: 1.4e-4 of the way.
LOSS, NORM, RATE, ROUNDING = 3e-6, 1e-5, 1e-12, 3e-7
WAY = {"sgd": 2e-5, "adamw": 2e-5, "muon": 5e-4}
ACTS = 30  # without its rule a run must differ by so many tolerances

T, S, END = 8, 6, 3
CONFIG = Config(layers=4, heads=2, channels=16, vocab=50, positions=11)  # 3 rows of wpe are unused
DESCRIPTOR = "layers=4,heads=2,channels=16,vocab=50"
TOKENS = [END] + random.Random(7).choices(range(CONFIG.vocab), k=210)  # fewer than a run takes
BASE = dict(
    shuffle=0, seq_len=T, micro_batch=S, batch_tokens=S * T, steps=6, lr=0.05,
    lr_schedule="constant", weight_decay=0, grad_clip=0, threads=1, val_every=0,
)


# ------------------------------------------------------------------------------------------------
# Rows: name: (flags, changes that take the rule away)

SGD = dict(optimizer="sgd", momentum=0.9)
# eps is so large that it counts, and hides gradients that are nothing but rounding (keys' biases).
ADAM = dict(optimizer="adamw", momentum=None, lr=0.01, eps=0.003, beta1=0.8, beta2=0.97)
MUON = dict(ADAM, optimizer="muon", muon_lr=0.03)
V1 = dict(SGD, cyclic="v1", cyclic_stages=3)
V2 = dict(SGD, cyclic="v2", cyclic_stages=3, grad_clip=None)
STORAGE = dict(grad_clip=0.8, cyclic_clip="storage")
# Blocks that share begin with a descriptor, so with small weights.
SHARED = dict(SGD, model=DESCRIPTOR, seed=5, lr=0.5)
SHARED_ADAM = dict(SHARED, **{**ADAM, "lr": 0.02, "eps": 0.01})
SHARED_MUON = dict(SHARED, **{**MUON, "lr": 0.02, "eps": 0.01})
DISTANT = "layers=6,heads=1,channels=2,vocab=50"
TWO = dict(share="2", cyclic_stages=2, cyclic_cut="3,3")
DELAY = dict(offload="optimizer", offload_delay=1)
GARBAGE = 131, 134  # steps from 0
WORDS = {True: range(30, 50), False: range(5, 9)}
OUTLIERS = dict(
    ADAM,
    steps=138,
    batch_tokens=3 * T,
    micro_batch=3,
    reference=dict(
        tokens=[
            token
            for t in range(139)
            for token in random.Random(t).choices(WORDS[t in GARBAGE], k=3 * T)
        ]
    ),
)

OPTIMIZERS = {
    "sgd": (SGD, dict(momentum=0)),
    "sgd, decay": (dict(SGD, weight_decay=0.1), dict(weight_decay=0)),
    "adamw": (ADAM, dict(eps=0.006)),
    "adamw, decay": (dict(ADAM, weight_decay=0.1), dict(weight_decay=0)),
    "adamw, second moment": (dict(ADAM, beta2=0.5), dict(beta2=0.97)),
    "cosine": (
        dict(SGD, lr_schedule="cosine", warmup=2, final_lr_fraction=0.1, steps=10),
        dict(final_lr_fraction=0.2),
    ),
    "linear": (
        dict(SGD, lr_schedule="linear", warmup=3, final_lr_fraction=0.3, steps=10),
        dict(warmup=0),
    ),
    "constant": (dict(SGD, warmup=4, final_lr_fraction=0.1), dict(warmup=1)),
    "wsd": (
        dict(SGD, lr_schedule="wsd", warmup=1, final_lr_fraction=0.2, steps=12),
        dict(lr_schedule="constant"),
    ),
    "last part": (
        dict(
            SGD, lr_schedule="wsd-linear", lr_last_part=0.6, warmup=1, final_lr_fraction=0,
            steps=12,
        ),
        dict(lr_last_part=0.5),
    ),
    "wsd, last part": (
        dict(SGD, lr_schedule="wsd", lr_last_part=0.6, final_lr_fraction=0.1, steps=10),
        dict(lr_schedule="wsd-linear"),
    ),
    "rate of embeddings": (dict(ADAM, lr_embedding=2), dict(lr_embedding=1)),
    "rate of vectors": (dict(SGD, lr_vectors=0.5), dict(lr_vectors=1)),
    "nesterov, sgd": (dict(SGD, nesterov=1, momentum=0.8, weight_decay=0.1), dict(nesterov=0)),
    "nesterov, adamw": (dict(ADAM, nesterov=1), dict(nesterov=0)),
    "muon": (MUON, dict(muon_momentum=0.9)),
    "muon, rate": (dict(MUON, muon_lr=0.01, muon_weight_decay=0), dict(muon_lr=0.011)),
    "muon, decay": (dict(MUON, muon_weight_decay=0.5, weight_decay=0.1), dict(muon_weight_decay=0)),
    "muon, decay of others": (
        dict(MUON, muon_weight_decay=0, weight_decay=0.2),
        dict(weight_decay=0),
    ),
    "muon, iterations": (dict(MUON, muon_steps=3), dict(muon_steps=4)),
    "muon, warm-up": (
        dict(MUON, muon_momentum=0.9, muon_momentum_warmup=4, steps=7),
        dict(muon_momentum_warmup=3),
    ),
    "muon, schedule": (
        dict(MUON, lr_schedule="wsd-linear", lr_last_part=0.5, warmup=2, final_lr_fraction=0),
        dict(lr_last_part=0.4),
    ),
    "muon, clip": (dict(MUON, grad_clip=0.8), dict(grad_clip=0)),
    "muon, 2 ranks": (dict(MUON, ranks=2, zero=1, micro_batch=1), None),
    "muon, 3 ranks": (dict(MUON, ranks=3, zero=2, micro_batch=1), None),
    "muon, rates": (dict(MUON, lr_embedding=3, lr_vectors=0.5), dict(lr_vectors=1)),
    "clip": (dict(SGD, grad_clip=0.8), dict(grad_clip=0)),
    "clip by default": (dict(SGD, grad_clip=None), dict(grad_clip=0)),
    "clip, adamw": (dict(ADAM, grad_clip=0.8), dict(grad_clip=0)),
    "clip where it sometimes does nothing": (dict(SGD, grad_clip=1.7), dict(grad_clip=0)),
    "skip-loss-z": (dict(OUTLIERS, skip_loss_z=6, skip_grad_z=20), None),
    "skip-grad-z": (dict(OUTLIERS, skip_grad_z=6, skip_loss_z=20), None),
    "windows wrap": (dict(SGD, steps=10), dict(momentum=0)),
    "documents": (dict(SGD, windows="document"), dict(windows="continuous")),
    "documents, pieces": (
        dict(SGD, windows="document", micro_batch=1, weight_decay=0.1),
        dict(windows="continuous"),
    ),
    "delay": (dict(SGD, **DELAY), dict(offload_delay=0)),
    "delay, rate and clip": (
        dict(
            SGD, **DELAY, grad_clip=0.8, weight_decay=0.1, lr_schedule="linear", final_lr_fraction=0
        ),
        dict(grad_clip=0),
    ),
    "delay, adamw": (dict(ADAM, **DELAY, weight_decay=0.1), dict(offload_delay=0)),
}
CYCLIC = {
    "v1": (V1, dict(cyclic="off")),
    "v1, clip": (dict(V1, grad_clip=0.8), dict(grad_clip=0)),
    "v1, adamw": (dict(V1, **{**ADAM, "weight_decay": 0.1}), dict(weight_decay=0)),
    "v1, muon": (dict(V1, **{**MUON, "weight_decay": 0.1}), dict(cyclic="off")),
    "v2, muon": (dict(V2, **{**MUON, "weight_decay": 0.1}), dict(cyclic="v1")),
    "v1, one stage": (dict(V1, cyclic_stages=1), dict(cyclic="off")),
    "v2": (V2, dict(cyclic="v1")),
    "v2 of two stages": (dict(V2, cyclic_stages=2), dict(cyclic_stages=3)),
    "v2, adamw": (dict(V2, **{**ADAM, "weight_decay": 0.1}), dict(cyclic="v1")),
    "v2, decay": (dict(V2, weight_decay=0.2), dict(weight_decay=0)),
    "v2, slack": (dict(V2, cyclic_slack=1), dict(cyclic_slack=0)),
    "v2, cut": (dict(V2, cyclic_cut="1,4,1"), dict(cyclic_cut=None)),
    "v2, remainder": (dict(V2, cyclic_stages=4), dict(cyclic_cut="1,1,2,2")),
    "v2, storage": (dict(V2, **STORAGE), dict(cyclic_clip="none")),
    "v2, storage, adamw": (dict(V2, **{**ADAM, **STORAGE}), dict(cyclic_clip="none")),
    "v2, storage, shared": (dict(V2, **{**SHARED, **TWO, **STORAGE}), dict(cyclic_clip="none")),
    "v2, pieces": (dict(V2, micro_batch=1, batch_tokens=7 * T), dict(cyclic="v1")),
    "v2, documents": (dict(V2, windows="document", batch_tokens=7 * T), dict(windows="continuous")),
    "v2, schedule": (
        dict(V2, lr_schedule="cosine", warmup=2, final_lr_fraction=0),
        dict(cyclic="v1"),
    ),
    "v2, shared": (dict(V2, **{**SHARED, **TWO}), dict(share="none")),
    "v2, shared, muon": (dict(V2, **{**SHARED_MUON, **TWO}), dict(share="none")),
    "v2, shared by stages": (
        dict(
            V2,
            **{**SHARED, "share": "2x2", "ranks": 3, "cyclic_mode": "data"},
            reference={"cyclic-stages": 3},
        ),
        dict(cyclic_cut="1,4,1"),
    ),
    "v2, shared by distant stages": (
        dict(
            V2,
            **{**SHARED, "model": DISTANT, "share": "2x3", "ranks": 6, "cyclic_mode": "data"},
            cyclic_cut="1,1,2,1,1,2",
            reference={"cyclic-stages": 6},
        ),
        dict(cyclic_cut="2,2,1,1,1,1"),
    ),
}
PIECES = dict(SHARED, share="2x2", ranks=2, cyclic_mode="data", micro_batch=1, cyclic_stages=None)
for rule, without in (V1, "off"), (V2, "v1"):
    name = f"{rule['cyclic']}, shared by stages, pieces"
    CYCLIC[name] = dict(rule, **PIECES, reference={"cyclic-stages": 2}), dict(cyclic=without)
for name in "v2, shared by stages", "v2, shared by distant stages":
    CYCLIC[name][0]["cyclic_stages"] = None  # as many as ranks
PSEUDO = {
    "all": (dict(SHARED, share="all", steps=8), dict(share="none")),
    "pairs": (dict(SHARED, share="2", weight_decay=0.1), dict(share="2x2")),
    "three and one": (dict(SHARED, share="3"), dict(share="2")),
    "rows": (dict(SHARED, share="2x2"), dict(share="2")),
    "shared, clip": (dict(SHARED, share="all", grad_clip=0.3), dict(grad_clip=0)),
    "shared, adamw": (dict(SHARED_ADAM, share="all"), dict(eps=0.02)),
    "shared, muon": (dict(SHARED_MUON, share="all"), dict(share="2")),
    "delink, muon": (
        dict(SHARED_MUON, share="2x2", delink_at=3, weight_decay=0.1),
        dict(delink_moments="reset"),
    ),
    "share-lr, muon": (dict(SHARED_MUON, share="2", share_lr=0.01, delink_at=3), dict(share_lr=0)),
    "share-lr": (
        dict(
            SHARED, share="2", share_lr=0.2, delink_at=3, lr_schedule="cosine",
            final_lr_fraction=0.5, warmup=1,
        ),
        dict(share_lr=0),
    ),
    "delink": (dict(SHARED, share="2x2", delink_at=3), dict(delink_at=0)),
    "delink, mean": (
        dict(SHARED_ADAM, share="all", delink_at=3, weight_decay=0.1),
        dict(delink_moments="reset"),
    ),
    "delink, reset": (
        dict(SHARED_ADAM, share="all", delink_at=3, delink_moments="reset"),
        dict(delink_moments="mean"),
    ),
    "delink, reset, sgd": (
        dict(SHARED, share="all", delink_at=3, delink_moments="reset"),
        dict(delink_moments="mean"),
    ),
    "delink, warm-up": (
        dict(
            SHARED, share="3", delink_at=2, delink_warmup=3, lr_schedule="linear",
            final_lr_fraction=0.5,
        ),
        dict(delink_warmup=0),
    ),
}
ROWS = {**OPTIMIZERS, **CYCLIC, **PSEUDO}

# Layouts change nothing: of plain runs, of cyclic ones.
LAYOUTS = [
    dict(),
    dict(micro_batch=1),
    dict(micro_batch=2),
    dict(recompute="block"),
    dict(ranks=2),
    dict(ranks=2, micro_batch=1, zero=1),
    dict(ranks=3, zero=2),
    dict(ranks=2, zero=3),
    dict(ranks=2, pipeline="2", micro_batch=2),
    dict(ranks=3, pipeline="2:1,4:2", zero=1, micro_batch=3),
]
MODES = [
    dict(),
    dict(micro_batch=1),
    dict(cyclic_mode="single", recompute="block"),
    *(dict(cyclic_mode=mode) for mode in ("data", "model", "zero")),
    dict(cyclic_mode="data", micro_batch=1),
]


# ------------------------------------------------------------------------------------------------
# Runs of both


class Job(harness.Job):
    """A private run draws batches of any size, which send other bytes than the expected one."""

    def check_end(self):
        if "--dp-noise" not in self.command:
            super().check_end()


def run(ranks=1, binary=harness.BINARY, environment=(), **flags):
    """The program's run, to its end. One rank needs no mpirun."""
    flags = {**BASE, **flags}
    if ranks > 1:
        return Job(ranks, binary, environment=environment, **flags).done()
    log = os.path.join(scratch(), "log")
    words = [binary, *harness.command_line(dict(flags, log=log))]
    shell = shlex.join(words)
    return Job(shell=shell, log=log, environment=environment, steps=flags["steps"]).done()


def random_model(config=CONFIG, seed=3):
    """Weights as those of a trained model: no tensor is 0 or 1."""
    draw, found = np.random.default_rng(seed), {}
    for key, shape in config.tensors():
        z = draw.standard_normal(shape)
        gain = key[1].startswith("ln") and key[1].endswith("w")
        value = z / math.sqrt(config.channels) if len(shape) == 2 else 0.2 * z + gain
        found[key] = value.astype("<f4").astype(float)
    found["wte", "wte"][config.vocab :] = 0  # rows of no token
    return found


def initial_model(flags):
    """Of a descriptor: (Config, parameters) that the program exports."""
    path = os.path.join(scratch(), "initial.bin")
    run(model=flags["model"], seed=flags["seed"], share=flags.get("share"), steps=0, export=path)
    return reference.read_model(path)


def dashed(flags):
    """Names as on the command line."""
    return {name.replace("_", "-"): value for name, value in flags.items()}


def tokenizer():
    """Tokens of 1 to 5 bytes, so that bytes and tokens are told apart."""
    return harness.tokenizer([b"x" * (1 + 7 * i % 5) for i in range(CONFIG.vocab)], END)


def both(flags, **more):
    """(the program's run, what makes the reference of it, its first weights).

    `more`: a layout or another binary, of which the reference knows nothing.
    """
    flags = {**BASE, **flags}
    about = dict(flags.pop("reference", {}))
    if flags.get("model"):
        config, model = initial_model(flags)
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


def differences(found, expected, start, optimizer):
    """Of losses, norms, rates and weights: the largest error, in units of its tolerance.

    found, expected: (steps, weights). start: weights before the first step. optimizer: that of
    the run.
    """
    worst = {}
    for what, tolerance, a, b in zip(
        ("loss", "norm", "rate"), (LOSS, NORM, RATE), zip(*found[0]), zip(*expected[0])
    ):
        errors = [abs(float(x) - y) / max(abs(y), 1e-30) for x, y in zip(a, b)]
        worst[what] = max(errors) / tolerance
    worst["weights"] = 0
    for key, value in expected[1].items():
        way = np.linalg.norm(value - start[key])
        allowed = WAY[optimizer] * way + ROUNDING * np.linalg.norm(value)
        error = float(np.linalg.norm(found[1][key] - value) / max(allowed, 1e-30))
        worst["weights"] = max(worst["weights"], error)
    return worst


class Check(harness.TestCase):
    def found(self, job):
        return job.steps("loss", "grad_norm", "lr"), reference.read_model(job.export)[1]

    def assert_same(self, found, expected, start, optimizer, what):
        self.assertEqual(len(found[0]), len(expected[0]), what)
        worst = differences(found, expected, start, optimizer)
        self.assertLessEqual(max(worst.values()), 1, f"{what}: errors, in tolerances: {worst}")

    def assert_acts(self, changed, expected, start, optimizer, what):
        acts = differences(changed, expected, start, optimizer)
        self.assertGreater(max(acts.values()), ACTS, f"{what}: does not show the rule: {acts}")

    def compare(self, name, flags, without=None, **more):
        job, make, start = both(flags, **more)
        ours = make()
        expected = [ours.step() for _ in range(ours.f["steps"])], ours.file()
        told = re.findall(r"warning: step (\d+): update skipped", job.err)
        self.assertEqual([int(step) for step in told], ours.skipped, f"{name}: without an update")
        self.assertEqual(bool(told), name.startswith("skip"), name)
        optimizer = ours.f["optimizer"]
        self.assert_same(self.found(job), expected, start, optimizer, (name, more))
        if without is not None:
            other = make(without)
            changed = [other.step() for _ in range(ours.f["steps"])], other.file()
            self.assert_acts(changed, expected, start, optimizer, name)


# ------------------------------------------------------------------------------------------------
class TheReference(Check):
    def test_gradient(self):
        """Central differences of the loss, for some elements of each tensor; a target is masked."""
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
                    loss = reference.loss_and_gradient(config, p, inputs, targets, 0.1)[0]
                    sums.append(0.1 * loss)
                value.flat[at] = old
                slope = (sums[0] - sums[1]) / 2e-5
                delta = 1e-8 + 1e-6 * abs(slope)
                self.assertAlmostEqual(g[key].flat[at], slope, delta=delta, msg=(key, at))


# ------------------------------------------------------------------------------------------------
class Rules(Check):
    def test_each(self):
        """The program follows each rule. That its row shows it, which no change of the program can
        alter, a sample says."""
        acting = sample(ROWS, 12)

        def check(item):
            name, (flags, without) = item
            with self.subTest(name):
                self.compare(name, flags, without if name in acting else None)

        at_once(check, ROWS.items())

    def test_default_clip_is_not_applied_to_v2(self):
        """Its norms must be above 1 for row v2 to show that."""
        job, _, _ = both(V2)
        self.assertGreater(max(float(norm) for norm, in job.steps("grad_norm")), 1.1)


# ------------------------------------------------------------------------------------------------
class Random(Check):
    """Rules combined, on layouts of which the reference knows nothing."""

    @staticmethod
    def shared(draw, flags, delinks):
        flags.update(
            model=DESCRIPTOR, seed=draw.randrange(99), share=draw.choice(("all", "2", "2x2", "3")),
            lr=0.4,
        )
        if flags["optimizer"] != "sgd":
            flags.update(lr=0.02, eps=0.02)
        if draw.randrange(2):
            flags["share_lr"] = flags["lr"] / 2
        if delinks:
            flags.update(
                delink_at=draw.randrange(1, 4),
                delink_warmup=draw.randrange(3),
                delink_moments=draw.choice(("mean", "reset")),
            )
        return flags, draw.choice(LAYOUTS)

    @staticmethod
    def cyclic(draw, flags, kind):
        N = draw.randrange(1, 5)
        cut = draw.choice((None, {1: "6", 2: "2,4", 3: "1,4,1", 4: "2,1,1,2"}[N]))
        flags.update(cyclic=kind, cyclic_stages=N, cyclic_cut=cut)
        if kind == "v2":
            flags.update(cyclic_slack=draw.choice((0, 0, 1, 2)), grad_clip=draw.choice((None, 0.5)))
            flags["cyclic_clip"] = "storage" if flags["grad_clip"] else None
        layout = dict(draw.choice(MODES))
        if N == 1:
            layout.pop("cyclic_mode", None)
        elif layout.get("cyclic_mode", "single") != "single":
            layout["ranks"] = N
        if layout.get("cyclic_mode") == "data" and N > 1 and draw.randrange(2):
            flags.update(
                model=DESCRIPTOR,
                seed=draw.randrange(99),
                share=draw.choice(("all", "2", "2x2", "3")),
            )
            flags.update(dict(lr=0.4) if flags["optimizer"] == "sgd" else dict(lr=0.02, eps=0.02))
        if layout.get("cyclic_mode") == "model" and N < 4 and draw.randrange(2):
            layout["ranks"] = N * (N + 1) // 2  # ranks of a stage take turns
        return flags, layout

    def flags(self, draw):
        """(flags, layout)"""
        kinds = "plain", "plain", "v1", "v2", "v2", "share", "delink", "delay"
        kind = draw.choice(kinds)
        flags = dict(
            draw.choice((SGD, ADAM) if kind == "delay" else (SGD, ADAM, MUON)),
            weight_decay=draw.choice((0, 0.1, 0.5)),
            lr_schedule=draw.choice(("cosine", "linear", "constant", "wsd", "wsd-linear")),
            warmup=draw.randrange(4),
            final_lr_fraction=draw.choice((0, 0.3, 1)),
            windows=draw.choice(("continuous", "document")),
            batch_tokens=draw.choice((3, 4, 6, 7)) * T,
            steps=draw.randrange(5, 9),
            grad_clip=draw.choice((0, 0.5, 1, 2)),
        )
        if kind in ("share", "delink"):
            return self.shared(draw, flags, kind == "delink")
        if kind in ("v1", "v2"):
            return self.cyclic(draw, flags, kind)
        return dict(flags, **(DELAY if kind == "delay" else {})), draw.choice(LAYOUTS)

    def test_combinations(self):
        def check(number):
            flags, layout = self.flags(random.Random(f"{SEED} {number}"))
            self.compare(f"run {number} of seed {SEED}: {flags}", flags, **layout)

        at_once(check, range(200 if ALL else 14))


# ------------------------------------------------------------------------------------------------
class Private(Check):
    """Noise 0: what is clipped, and how it is added up. The log tells the windows of each step."""

    FLAGS = dict(
        SGD, shuffle=None, dp_noise=0, dp_key="%064x" % 77, dp_show_private=1, steps=5, lr=0.2
    )
    # It scales each sample to the clip, also one whose norm is below it: here all are.
    AUTOMATIC = dict(dp_clip_function="automatic", lr=0.02)
    ROWS = {
        "unit, abadi": (dict(dp_clip=0.8), dict(dp_clip=0.4)),
        "unit, automatic": (dict(AUTOMATIC, dp_clip=8), dict(dp_clip_function="abadi")),
        "flat, abadi": (dict(dp_clip=1, dp_clip_style="flat"), dict(dp_clip_style="unit")),
        "flat, automatic": (
            dict(AUTOMATIC, dp_clip=10, dp_clip_style="flat"),
            dict(dp_clip_function="abadi"),
        ),
        "most are not clipped": (dict(dp_clip=5, dp_clip_style="flat"), dict(dp_clip=1)),
        "stages": (
            dict(dp_clip=1, dp_clip_style="stage", ranks=2, pipeline="2:1,4:1", micro_batch=2),
            dict(dp_clip_style="flat"),
        ),
        "flat over stages": (
            dict(dp_clip=1, dp_clip_style="flat", ranks=2, pipeline="2:1,4:1", micro_batch=2),
            dict(dp_clip_style="unit"),
        ),
        "adamw, clip": (dict(ADAM, dp_clip=1, grad_clip=0.3, weight_decay=0.1), dict(grad_clip=0)),
        "muon": (dict(MUON, dp_clip=1), dict(muon_momentum=0.5)),
        "v1": (dict(cyclic="v1", cyclic_stages=2, dp_clip=0.8), dict(cyclic="off")),
        "v2": (dict(cyclic="v2", cyclic_stages=2, dp_clip=0.8, grad_clip=None), dict(cyclic="v1")),
        "zero": (dict(dp_clip=0.8, ranks=2, zero=3, micro_batch=1), None),
    }

    def steps_of(self, ours, job):
        stages = [1, 1, 2, 2, 2, 2] if ours.f["dp-clip-style"] == "stage" else None
        return [ours.step(drawn, stages) for drawn, in job.steps("samples")]

    def check(self, name, **program):
        changes, without = self.ROWS[name]
        job, make, start = both({**self.FLAGS, **changes}, **program)
        ours = make(dict(shuffle=0))
        expected = self.steps_of(ours, job), ours.file()
        optimizer = ours.f["optimizer"]
        self.assert_same(self.found(job), expected, start, optimizer, name)
        if without:
            other = make(dict(shuffle=0, **without))
            changed = self.steps_of(other, job), other.file()
            self.assert_acts(changed, expected, start, optimizer, name)

    def test_each(self):
        def check(name):
            with self.subTest(name):
                self.check(name)

        at_once(check, self.ROWS)


# ------------------------------------------------------------------------------------------------
class Chains(Check):
    """A run that shares, then one that begins with its checkpoint, and may delink. A cyclic run,
    then one that goes on by another rule."""

    FIRST = dict(
        SHARED_ADAM, share="2x2", steps=3, lr_schedule="linear", final_lr_fraction=0.2, warmup=2
    )

    def test_delink_between_runs(self):
        """Steps, rates and samples begin anew; moments and counters are as the flags say."""
        self.check()

    def check(self, **program):
        config, model = initial_model(self.FIRST)
        out, data = os.path.join(scratch(), "out"), shard(TOKENS)
        run(**self.FIRST, **program, train=data, val=data, out=out, save_every=3)

        def follow(changes):
            begin = harness.checkpoint(out, 3)
            second = dict(self.FIRST, model=begin, share=None, seed=None, steps=5, **changes)
            export = os.path.join(scratch(), "export.bin")
            job = run(**second, **program, train=data, val=data, export=export)
            job.export = export
            ours = Run(config, model, Samples(TOKENS, T), dashed({**BASE, **self.FIRST}))
            for _ in range(3):
                ours.step()
            ours.begin_again(dashed({**BASE, **second}))
            expected = [ours.step() for _ in range(5)], ours.file()
            self.assert_same(self.found(job), expected, model, ours.f["optimizer"], changes)

        at_once(follow, [dict(), dict(delink=1), dict(delink=1, delink_moments="reset")])

    ANOTHER_RULE = (
        dict(cyclic="v1"), dict(cyclic="v1", cyclic_stages=3), dict(cyclic_stages=3),
        dict(cyclic_slack=1), dict(cyclic_cut="5,1"),
    )

    def test_another_rule(self):
        """In any mode before and after: what v2 used in its newest version alone, and is used in an
        old one now, has no other version at first."""
        first = dict(BASE, **{**V2, "cyclic_stages": 2})
        model, data = random_model(), shard(TOKENS)
        path = put("model.bin", reference.model_bytes(CONFIG, model))

        def part(mode, **flags):
            ranks = 1 if mode == "single" else flags["cyclic_stages"]
            return run(ranks, **{**flags, "cyclic_mode": mode})

        def check(case):
            changes, before, after = case
            out, export = (os.path.join(scratch(), name) for name in ("out", "export.bin"))
            flags = dict(first, model=path, train=data, val=data, out=out, save_every=3)
            part(before, **flags)
            shutil.rmtree(harness.checkpoint(out, first["steps"]))
            job = part(after, **{**flags, **changes, "resume": 1, "export": export})
            job.export = export
            ours = Run(CONFIG, model, Samples(TOKENS, T), dashed(first))
            for _ in range(3):
                ours.step()
            ours.resume(dashed(changes))
            expected = [ours.step() for _ in range(first["steps"] - 3)], ours.file()
            self.assert_same(self.found(job), expected, model, "sgd", case)

        modes = "single", "data", "model", "zero"
        at_once(check, sample(itertools.product(self.ANOTHER_RULE, modes, modes), 6))


# ------------------------------------------------------------------------------------------------
class Evaluations(Check):
    LAYOUTS = [dict(), dict(ranks=2), dict(ranks=2, pipeline="2", micro_batch=2)]

    def test_validation(self):
        """The first samples of the joined shards; the weights after so many updates."""
        cases = itertools.product(self.LAYOUTS, (1, 2, -1), ("continuous", "document"))
        self.check_validation(sample(cases, 4))

    def expected(self, ours, text, steps):
        """step -> (loss, bits per byte). Nothing is cut at documents; end of text is no byte."""
        lengths, found = [0 if i == END else 1 + 7 * i % 5 for i in range(CONFIG.vocab)], {}
        for t in range(steps + 1):
            if t % 2 == 0 or t == steps:
                loss, total, targets = ours.validate(Samples(text, T))
                found[t] = loss, total / math.log(2) / sum(lengths[i] for i in targets.flat)
            if t < steps:
                ours.step()
        return found

    def check_validation(self, cases, **program):
        text = [END] + random.Random(SEED).choices(range(CONFIG.vocab), k=150)
        folder = scratch()
        for name, part in (("v_b.bin", text[61:]), ("v_a.bin", text[:61])):
            shutil.copy(shard(part), os.path.join(folder, name))
        model, data = random_model(), shard(TOKENS)
        path = put("model.bin", reference.model_bytes(CONFIG, model))

        def check(case):
            layout, batches, windows = case
            flags = dict(
                BASE, **SGD, model=path, val_every=2, val_batches=batches, steps=5, windows=windows
            )
            job = run(
                **{**flags, **layout}, **program, train=data, tokenizer=tokenizer(),
                val=os.path.join(folder, "v_*.bin"),
            )
            ours = Run(CONFIG, model, Samples(TOKENS, T, windows, END), dashed(flags))
            expected = self.expected(ours, text, 5)
            self.assertEqual([e["step"] for e in job.of("val")], list(expected), case)
            for e in job.of("val"):
                self.assert_close((e["loss"], e["bits_per_byte"]), expected[e["step"]], LOSS, case)

        at_once(check, cases)

    def test_texts_at_a_temperature(self):
        """log p of what was drawn, p = softmax(logits / temperature), against its expected value:
        within 5 of its deviations. A text begins with end of text."""
        self.check_texts([dict(temperature=t) for t in (0.5, 1.0, 2.0)])

    def test_texts_of_the_likeliest(self):
        """The same among the tokens that --top-k and --top-p leave; no other token is drawn."""
        self.check_texts(
            [
                dict(temperature=1.0, top_k=3),
                dict(temperature=2.0, top_p=0.6),
                dict(temperature=1.5, top_k=12, top_p=0.5),
            ]
        )

    @staticmethod
    def kept(p, top_k=0, top_p=1.0, **_):
        """The probabilities that are left: of the top_k largest, the fewest that have top_p of
        their sum."""
        order = np.argsort(-p, axis=-1, kind="stable")
        largest = np.take_along_axis(p, order, -1)
        if top_k:
            largest[..., top_k:] = 0
        before = np.cumsum(largest, -1) - largest
        largest[before >= top_p * largest.sum(-1, keepdims=True)] = 0
        left = np.zeros_like(p)
        np.put_along_axis(left, order, largest, -1)
        return left / left.sum(-1, keepdims=True)

    def check_texts(self, cases, many=60, **program):
        texts = [bytes([33 + i // 94, 33 + i % 94]) for i in range(CONFIG.vocab)]
        model, data = random_model(), shard(TOKENS)
        path = put("model.bin", reference.model_bytes(CONFIG, model))

        def check(case):
            job = run(
                **SGD, **program, model=path, train=data, val=data, lr=1e-12, steps=many,
                batch_tokens=T, micro_batch=1, tokenizer=harness.tokenizer(texts, END),
                sample_every=1, sample_tokens=T, **case,
            )
            found = re.findall(r"--- sample at step \d+ ---\n(.*)\n---\n", job.out)
            self.assertEqual(len(found), many)
            rows = np.array(
                [
                    [END] + [texts.index(text[i : i + 2].encode()) for i in range(0, 2 * T, 2)]
                    for text in found
                ]
            )
            p = reference.forward(CONFIG, model, rows[:, :-1])[0] ** (1 / case["temperature"])
            p = self.kept(p, **case)
            self.assertTrue((np.take_along_axis(p, rows[:, 1:, None], -1) > 0).all(), case)
            log = np.log(np.where(p > 0, p, 1))
            mean, square = (p * log).sum(-1), (p * log**2).sum(-1)
            drawn = np.take_along_axis(log, rows[:, 1:, None], -1)[..., 0]
            z = (drawn - mean).sum() / math.sqrt((square - mean**2).sum())
            self.assertLess(abs(z), 5, case)

        at_once(check, cases)


# ------------------------------------------------------------------------------------------------
class Numbers(Check):
    SHAPE = "layers=3,heads=2,channels=32,vocab=200"

    def test_initial_values(self):
        """Normal, of deviation 0.02; of residual outputs 0.02 / sqrt(2 L), where L counts layers
        that share, too; biases 0, gains 1. The same for any layout."""
        self.check_initial()

    def check_initial(self, **program):
        files = []
        for flags in (
            dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline="2", micro_batch=2),
            dict(cyclic="v1", cyclic_stages=2), dict(share="all"),
        ):
            path = os.path.join(scratch(), "export.bin")
            run(**flags, **program, model=self.SHAPE, steps=0, export=path)
            files.append(harness.get(path))
            config, model = reference.read_model(path)
            self.assertEqual(config, Config(3, 2, 32, 200, T))
            for (_, name), value in model.items():
                self.check_initial_tensor(name, value[: config.vocab] if name == "wte" else value)
        self.assertEqual(len(set(files[:4])), 1, "layouts")
        self.assertTrue((model[0, "qkvw"] == model[2, "qkvw"]).all())

    def check_initial_tensor(self, name, value):
        """The mean, the deviation and how many lie within one, each to 5 standard errors."""
        if value.ndim == 1:
            gain = name.startswith("ln") and name.endswith("w")
            self.assertTrue((value == gain).all(), name)
            return
        deviation, error = 0.02 / math.sqrt(6 if "proj" in name else 1), 5 / math.sqrt(value.size)
        self.assertLess(abs(value.mean()), error * deviation, name)
        self.assertLess(abs(value.std() / deviation - 1), error / math.sqrt(2), name)
        self.assertLess(abs((np.abs(value) < deviation).mean() - 0.6827), error * 0.466, name)

    def test_speed(self):
        """Tokens of all ranks by the step's time; MFU of the peak of all ranks: 6 operations for
        each weight of a product and token, with the classifier's padding and half of attention."""
        self.check_speed()

    def check_speed(self, **program):
        config, tokens = Config(3, 2, 32, 200, 16), shard(TOKENS)
        weights = config.padded * config.channels
        weights += sum(
            math.prod(shape)
            for (storage, _), shape in config.tensors()
            if isinstance(storage, int) and len(shape) == 2
        )
        weights += config.layers * 2 * config.channels * 16 / 2  # q k and p v, of the past alone
        for ranks in (1, 2):
            job = run(
                ranks=ranks, **program, model=self.SHAPE, train=tokens, val=tokens, seq_len=16,
                batch_tokens=96, micro_batch=1, steps=2,
            )
            peak = float(job.of("start")[0]["peak_flops"])
            for ms, *found in job.steps("ms", "tokens_per_s", "mfu", "tflops"):
                tokens_per_s = 96e3 / float(ms)
                flops = 6 * weights * tokens_per_s / ranks
                self.assert_close(found, [tokens_per_s, flops / peak, flops / 1e12], 1e-6, ranks)
            step_ms, told = job.end()["step_ms"], job.end()["tflops"]
            for name in ("predicted", "measured"):
                rate = 6 * weights * 96e-9 / float(step_ms[name]) / ranks
                self.assert_close([told[name]], [rate], 1e-6, name)
            self.assertRegex(job.out, r"\n  TFLOP/s of a rank  .* \d")


# ------------------------------------------------------------------------------------------------
class Precision(Check):
    def test_bf16(self):
        """Parameters in use, the values that operations store, and their gradients are rounded, and
        the scores of attention where its products are computed in bf16; masters, moments and
        gradients of parameters are not. The program's masters and moments are far nearer to the
        reference that rounds all of them than to one that leaves out any. (They do not agree in all
        bits: which neighbour a number is rounded to depends on the order of sums, so on the CPU. A
        second step would make such differences ten times larger, so the reference begins it with
        the program's masters and moments.)"""
        for how in {}, {"TRAIN_GPT_LIBRARY_PRODUCTS": "1"}:
            self.check(environment=how)
        self.check_tiles(binary=FAULTY)

    def check_tiles(self, environment=(), **program):
        """The same where tiles multiply (emulated_tiles.h)."""
        if "avx512_bf16" in get("/proc/cpuinfo").decode():
            job = self.check(environment=dict(environment, TEST_TILES="1"), **program)
            self.assertEqual(job.of("start")[0]["matmul"], "own")
        else:
            print("left out, this CPU has no AVX512-BF16: products by tiles", flush=True)

    def check(self, **program):
        out, steps = os.path.join(scratch(), "out"), (1, 2)
        flags = dict(SGD, dtype="bf16", steps=len(steps), weight_decay=0.1)
        job, make, _ = both(flags, out=out, save_every=1, **program)
        order = ["wte", "wpe", *range(CONFIG.layers), "lnf"]
        saved = [states(harness.checkpoint(out, step)) for step in steps]
        found = [
            [np.concatenate([state[kind, i] for i in range(len(order))]) for kind in (0, 1)]
            for state in saved
        ]

        def distances(*precision):
            """Of masters, and of moments, after each step."""
            ours = make()
            ours.precision = reference.Precision(*precision)
            keys = sorted(ours.now, key=lambda key: order.index(key[0]))  # stable: as in a file
            apart = []
            for after in found:
                ours.step()
                for mine, theirs in zip((ours.now, ours.first), after):
                    values = np.concatenate([mine[key].ravel() for key in keys])
                    apart.append(np.linalg.norm(values - theirs))
                    ends = np.cumsum([mine[key].size for key in keys])[:-1]
                    for key, part in zip(keys, np.split(theirs.astype(float), ends)):
                        mine[key] = part.reshape(mine[key].shape)
            return apart

        half, whole = reference.bf16, reference.exact
        built = harness.output_of(program.get("binary", harness.BINARY), "--version").stdout
        # what attention multiplies is chosen when the program is compiled (make PORTABLE=1)
        pairs = b"AVX-512 BF16" in built or b"operations CPU" not in built
        scores = half if pairs and job.of("start")[0]["compute"] == "bf16" else whole
        others = ((whole, half, scores), (half, whole, scores), (half, whole, whole))
        others += ((half, half, whole if scores is half else half),)
        nearest = np.min([distances(*precision) for precision in others], axis=0)
        for right, other in zip(distances(half, half, scores), nearest):
            self.assertLess(right, 0.25 * other)
        return job


# ------------------------------------------------------------------------------------------------


# ------------------------------------------------------------------------------------------------
class Faults(Check):
    """Each must be seen by the check that is named beside it; without one that check passes."""

    FAULTS, SAMPLE = numbered(REFERENCE), 3

    def notice(self, where, **program):
        """Runs the check that is named."""
        evaluations, numbers = Evaluations(), Numbers()
        checks = {
            "chains": Chains().check,
            "bf16": Precision().check,
            "initial": numbers.check_initial,
            "speed": numbers.check_speed,
            "tiles": Precision().check_tiles,
            "texts": lambda **p: evaluations.check_texts(
                [dict(temperature=2.0), dict(temperature=1.5, top_k=12, top_p=0.5)], **p
            ),
            "validation": lambda **p: evaluations.check_validation(
                [(dict(), 2, "continuous")], **p
            ),
        }
        if where in checks:
            checks[where](**program)
        elif where.startswith("dp: "):
            Private().check(where[4:], **program)
        else:
            self.compare(where, ROWS[where][0], **program)

    def test_each(self):
        def see(fault):
            number, where, file, pattern = fault
            with self.subTest(pattern):
                with self.assertRaises(AssertionError, msg=f"not seen by {where}") as seen:
                    self.notice(where, binary=PLANTED, environment=dict(FAULT=str(number)))
                print(f"{where}: {file}: {pattern}\n    {str(seen.exception)[:150]!r}", flush=True)

        faults = sample(self.FAULTS, self.SAMPLE)
        at_once(see, faults)
        # without a fault
        rows = sample(sorted({where for _, where, _, _ in faults}), 1)
        at_once(lambda where: self.notice(where, binary=PLANTED), rows)


if __name__ == "__main__":
    harness.main()
