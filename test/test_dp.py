#!/usr/bin/env python3
"""test_dp.py: private training of the real program under mpirun, against gradients of single
samples and a slow generator.

    python3 test/test_dp.py             TEST_ALL=1: the exhaustive forms, TEST_SEED=N: of these the
                                        random choices; DP_SEED=N: another sample

    Clipping      the update is the sum of the clipped gradients of single samples, which plain runs
                  of one window give
    Sensitivity   one more sample, however bad, changes the sum by at most R
    Noise         every element once, of the right deviation, independent; ChaCha20's own. That all
                  layouts are one computation, also after a resume, is in test_layouts.py
    Sampling      Poisson: independent coins; batches of any size, none too
    Stages        clipping, noise and messages across the stages of pipelines, of any plan
    Cyclic        the same where micro-batches are delayed against each other, on one rank or a rank
                  each
    Ledger        epsilon is the accountant's; the step that would exceed the target is not taken;
                  the key stays secret
    Audit         what an attacker learns of canaries is below the claim
    Controls      a program with a fault (sigma halved, noise twice, cross term dropped) fails these
                  tests
    Refusals      what would break the guarantee ends with exit code 2

The gradients come from the binary itself: a step of sgd with a huge rate leaves -LR x gradient in
the weights, to 24 bits. All else is numpy in fp64: the tests run themselves in .venv's Python where
this one has no numpy.
"""

import glob
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import time
import typing

# The sample is fixed: its tolerances were seen to hold. Other seeds on purpose, by DP_SEED.
if not os.environ.get("TEST_ALL"):
    os.environ["TEST_SEED"] = os.environ.get("DP_SEED", "5")
import harness  # noqa: E402

harness.need_numpy()
import numpy as np  # noqa: E402
from harness import (
    ALL, EXIT_DONE, EXIT_INPUT, PLANTED, SAME, SEED, at_once, covering, get, header, put, sample,
    scratch, shard, tokenizer,
)

import planted_faults
import reference
import test_zero
from test_zero import LR, Layout, distance, expected_traffic

CLIP_STYLES, CLIP_FUNCTIONS = ("unit", "flat", "stage"), ("abadi", "automatic")
ROOT = harness.ROOT
KEY = "%064x" % random.Random(SEED).getrandbits(256)
# One step that leaves the private gradient in the weights. Noise is left out unless it is asked
# for.
PRIVATE = dict(
    optimizer="sgd", momentum=0, weight_decay=0, grad_clip=0, lr=LR, steps=1, threads=1,
    shuffle=None, dp_noise=0, dp_clip=1, dp_key=KEY,
)
# Relative error of a sum of clipped gradients: sums of up to 1e3 products of fp32, 24 bits each, in
# two orders, and a norm of them, read off weights that may be a hundred times the update. What is
# looked for (a lost term, a wrong weight) is a hundredth at least.
CLOSE = 1e-4
RUN = dict(
    dp_noise=0.7, dp_clip=0.5, dp_key=KEY, dp_show_private=1, shuffle=None, grad_clip=0, steps=6,
    batch_tokens=7 * 20, seq_len=20, threads=1,
)


class Job(harness.Job):
    """A run whose batches may be of any size: then its traffic is not that of the expected one
    (Numbers checks it)."""

    def check_end(self):
        events = self.events
        if self.of("end") and " --dp-" in self.command:
            self.events = json.loads(json.dumps(events))
            self.end()["traffic"]["measured"] = self.end()["traffic"]["predicted"]
        super().check_end()
        self.events = events


def train(ranks=1, code=EXIT_DONE, **changes):
    return Job(ranks, **changes).done(code)


def train_all(cases):
    return at_once(lambda case: train(**case), cases)


# --------------------------------------------------------------------------------------------------
# Models: any shape, with weights that give samples norms of all sizes


class Shape(reference.Config):
    @property
    def units(self):
        return self.layers + 2

    def parts(self):
        """(name, storage, unit, slice of the file) of each tensor of each layer. wte is the
        embedding's, whoever uses it."""
        at = 0
        for (storage, name), shape in self.tensors():
            home = {"wte": (0, 0), "wpe": (1, 0), "lnf": (self.layers + 2, self.layers + 1)}.get(
                storage
            ) or (2 + storage, 1 + storage)
            end = at + math.prod(shape)
            yield name, *home, slice(at, end)
            at = end

    def elements(self):
        return sum(math.prod(shape) for _, shape in self.tensors())

    def used(self):
        """True but for the rows of wte that no token has."""
        mask = np.ones(self.elements(), bool)
        mask[self.vocab * self.channels : self.padded * self.channels] = False
        return mask

    def file(self, values):
        assert len(values) == self.elements()
        return put(
            "model.bin",
            header(
                20240326, 3, self.positions, self.vocab, self.layers, self.heads, self.channels,
                self.padded,
            ),
            values.astype("<f4").tobytes(),
        )

    def random(self, seed=1, **scales):
        """A file of weights as those of a trained model; `scales` multiply tensors."""
        draw, values = np.random.default_rng(seed), np.zeros(self.elements())
        for name, _, _, where in self.parts():
            n = where.stop - where.start
            z = draw.standard_normal(n)
            values[where] = scales.get(name, 1) * (
                1 + 0.2 * z
                if name[-1] == "w" and name.startswith("ln")
                else 0.1 * z if name[-1] == "b" else z / math.sqrt(self.channels)
            )
        return self.file(np.where(self.used(), values, 0))


GOLDEN = Shape(harness.LAYERS, 3, harness.CHANNELS, harness.VOCAB, harness.POSITIONS)
# Where ghost norms are the cheaper way: in blocks and head; in neither; in the head only; in blocks
# only.
RATIO = int(re.search(r"GHOST_RATIO = (\d+)", get(os.path.join(ROOT, "dp.h")).decode())[1])
SHORT, LONG = Shape(2, 2, 48, 7, 8), Shape(2, 2, 16, 11, 64)
HEAD, BLOCKS = Shape(2, 4, 16, 5, int(math.sqrt(13.1 * RATIO))), Shape(
    1, 2, 96, 9, int(math.sqrt(63 * RATIO))
)  # dp.h: T^2 16 C against 12 C^2, T^2 (C + V) against C V


def values(path):
    """Of a model file, as fp64."""
    data = get(path)
    words = np.frombuffer(data, "<f4" if data[4] == 3 else "<u2", offset=1024)
    return (words if data[4] == 3 else (words.astype("<u4") << 16).view("<f4")).astype(float)


# --------------------------------------------------------------------------------------------------
# The reference: gradients of single samples, clipped and summed in fp64


def windows_of(tokens, T):
    return [tuple(tokens[at : at + T + 1]) for at in range(0, len(tokens) - T, T)]


KNOWN = {}  # gradients of single samples, which many tests share


def gradients(model, samples, T, **flags):
    """Of each sample's mean loss over its own targets: what sgd subtracts when the sample is all
    there is."""
    plain = dict(
        PRIVATE, dp_noise=None, dp_clip=None, dp_key=None, model=model, seq_len=T, batch_tokens=T,
        micro_batch=1, **flags,
    )
    key = lambda s: (model, s, T, *sorted(flags.items()))
    missing = [s for s in dict.fromkeys(samples) if key(s) not in KNOWN]
    cases = [
        dict(plain, train=shard(s), val=shard(s), export=os.path.join(scratch(), "export.bin"))
        for s in missing
    ]
    for s, case, job in zip(missing, cases, train_all(cases)):
        found, (told,) = (values(model) - values(case["export"])) / LR, job.steps("grad_norm")[0]
        if not abs(np.linalg.norm(found) / float(told) - 1) < (1e-2 if "dtype" in flags else CLOSE):
            raise AssertionError(
                f"the plain run {job.command} has a gradient of norm {told}, its weights tell "
                f"{np.linalg.norm(found)}"
            )
        KNOWN[key(s)] = found
    return np.array([KNOWN[key(s)] for s in samples])


def groups(shape, style):
    """Slices of each group that is clipped as one. style: of --dp-clip-style; or, of a pipeline's
    stages, how many units each has."""
    stage_of = (
        [stage for stage, units in enumerate(style) for _ in range(units)]
        if isinstance(style, tuple)
        else None
    )
    found = {}
    for _, _, unit, where in shape.parts():
        found.setdefault(stage_of[unit] if stage_of else unit if style == "unit" else 0, []).append(
            where
        )
    return list(found.values())


def norm(values, slices):
    return math.sqrt(sum(np.dot(values[where], values[where]) for where in slices))


def clipped(shape, gradient, R, style, function):
    """One sample's contribution."""
    parts, out = groups(shape, style), np.zeros_like(gradient)
    threshold = R / math.sqrt(len(parts))
    for slices in parts:
        size = norm(gradient, slices)
        factor = (
            min(1, threshold / (size + 1e-6)) if function == "abadi" else threshold / (size + 0.01)
        )
        for where in slices:
            out[where] = factor * gradient[where]
    return out


class Private(typing.NamedTuple):
    """A data set and a model, to be trained on privately."""

    shape: Shape
    model: str
    samples: list
    T: int
    flags: dict  # of the data: --windows

    def tokens(self):
        if self.flags.get("windows") == "document":
            return [token for words in self.samples for token in words]
        return [token for words in self.samples for token in words[:-1]] + [self.samples[-1][-1]]

    def case(self, **changes):
        """Every sample is taken: the expected batch is all of them."""
        tokens = shard(self.tokens())
        return dict(
            dict(
                PRIVATE,
                model=self.model,
                train=tokens,
                val=tokens,
                seq_len=self.T,
                batch_tokens=len(self.samples) * self.T,
                micro_batch=3,
                export=os.path.join(scratch(), "export.bin"),
                **self.flags,
            ),
            **changes,
        )

    def gradients(self, **flags):
        return gradients(self.model, self.samples, self.T, **self.flags, **flags)

    def sums(self, cases):
        """What the runs of these cases added up: the private gradient times the expected batch."""
        cases = [self.case(**case) for case in cases]
        train_all(cases)
        return [
            (values(self.model) - values(case["export"])) / LR * (case["batch_tokens"] // self.T)
            for case in cases
        ]

    def without_last(self):
        return self._replace(samples=self.samples[:-1])


def random_data(shape, T, count, windows="continuous", seed=SEED, **scales):
    """Samples of a small vocabulary: tokens come again and again."""
    draw, model = random.Random(seed), shape.random(seed, **scales)
    if windows == "document":
        samples = [
            (0, *(draw.randrange(1, shape.vocab) for _ in range(draw.choice((1, T // 2, T)))))
            for _ in range(count)
        ]
        return Private(shape, model, samples, T, dict(windows=windows))
    tokens = [draw.randrange(shape.vocab) for _ in range(count * T + 1)]
    return Private(shape, model, windows_of(tokens, T), T, {})


class PrivateCheck(test_zero.Check):
    def exported(self, cases):
        """The jobs of these cases, each with an `export` of its weights."""
        cases = [dict(dict(export=harness.export_of(case)), **case) for case in cases]
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            job.export = case["export"]
        return jobs

    def assert_sum(self, data, found, R, style, function, contributions, what, tolerance=CLOSE):
        """Tensor by tensor, of each layer: the error against the sum of the norms, as contributions
        may cancel each other."""
        expected = [clipped(data.shape, g, R, style, function) for g in contributions]
        total, unit_size = sum(expected), {}
        for name, _, unit, where in data.shape.parts():
            unit_size[unit] = math.hypot(
                unit_size.get(unit, 0), sum(norm(c, [where]) for c in expected)
            )
        for name, storage, unit, where in data.shape.parts():
            size = sum(norm(c, [where]) for c in expected)
            # A tensor whose gradient is tiny beside its unit's has its rounding errors: key biases
            # have nothing else.
            self.assertLessEqual(
                norm(found - total, [where]),
                tolerance * (size + 0.02 * unit_size[unit]),
                f"{name} of storage {storage}: {what}",
            )
        self.assertTrue((found[~data.shape.used()] == 0).all(), f"padding rows: {what}")

    def thresholds(self, data, style, contributions):
        """R at which about half of the groups are clipped, all of them, and none."""
        sizes = [
            norm(g, slices) * math.sqrt(len(groups(data.shape, style)))
            for g in contributions
            for slices in groups(data.shape, style)
        ]
        return float(np.median(sizes)), min(sizes) / 10, 10 * max(sizes)


# --------------------------------------------------------------------------------------------------
class Clipping(PrivateCheck):
    # Shapes and lengths; gradients too small to be clipped by anything but a tiny R, where the
    # constants of the functions count; and large ones.
    DATA = [
        (SHORT, 5, "continuous", {}),
        (SHORT, 8, "document", {}),
        (LONG, 64, "continuous", {}),
        (LONG, 60, "document", {}),
        (GOLDEN, 20, "continuous", {}),
        (HEAD, HEAD.positions, "document", {}),
        (BLOCKS, BLOCKS.positions, "continuous", {}),
        (SHORT, 8, "continuous", dict(wte=1e-2, lnfw=1e-2, lnfb=1e-2)),
        (LONG, 64, "document", dict(lnfw=1e4)),
    ]

    def data(self, index, count):
        shape, T, windows, scales = self.DATA[index]
        return random_data(shape, T, count, windows, **scales)

    def layouts(self, seed):
        """In a shuffled order: of each seed another one. Three samples a micro-batch, or one, or
        four."""
        cases = [
            dict(ranks=ranks, zero=stage, micro_batch=rows, recompute=how)
            for ranks in (1, 2, 3, 4)
            for stage in range(4)
            for rows in (1, 3, 4)
            for how in ("none", "block")
        ]
        cases.append(dict(ranks=4, ranks_per_node=2, zero=3, zero_hpz_partition_size=2))
        cases.append(dict(ranks=2, zero=3, zero_hpz_partition_size=2, micro_batch=1))
        random.Random(f"{SEED}{seed}").shuffle(cases)
        return cases

    def check(self, data, tolerance=CLOSE, **changes):
        contributions = data.gradients(
            **({"dtype": changes["dtype"]} if "dtype" in changes else {})
        )
        R = self.thresholds(data, changes["dp_clip_style"], contributions)[changes.pop("R")]
        if changes["dp_clip_style"] != "unit":
            changes["recompute"] = "none"  # the rest is refused
        (found,) = data.sums([dict(dp_clip=R, **changes)])
        self.assert_sum(
            data, found, R, changes["dp_clip_style"], changes["dp_clip_function"], contributions,
            changes, tolerance,
        )

    def test_the_reference(self):
        """Gradients of single samples, added up, are the plain gradient of all."""
        for index in sample(
            [i for i, (_, _, windows, _) in enumerate(self.DATA) if windows == "continuous"], 2
        ):
            data = self.data(index, 4)
            (found,) = data.sums([dict(dp_noise=None, dp_clip=None, dp_key=None, shuffle=0)])
            self.assert_sum(data, found, 1e30, "flat", "abadi", data.gradients(), self.DATA[index])

    def test_each_way(self):
        """Styles, functions, half of the samples clipped, all, none; of each data set another
        layout, in which some ranks have more of the 7 samples than others."""
        cases = [
            (index, dict(dp_clip_style=style, dp_clip_function=function, R=R))
            for index in range(len(self.DATA))
            for style in CLIP_STYLES
            for function in CLIP_FUNCTIONS
            for R in range(3)
        ]

        def check(case):
            index, changes = case
            self.check(self.data(index, 7), **changes, **self.layouts(case)[0])

        at_once(
            check,
            [
                case
                for index in sample(range(len(self.DATA)), 3)
                for case in sample([c for c in cases if c[0] == index], 1)
            ],
        )

    def test_where_memory_is_short(self):
        """There logits are made again for the gradient of wte: of a few samples at a time, of one.
        Then less speed is promised than where they are kept."""
        promise = lambda job: float(re.search(r"leaves ([0-9.]+) %", job.out)[1])
        for shape, count in ((Shape(1, 1, 8, 120, 12), 48), (Shape(1, 1, 8, 250, 24), 8)):
            data = random_data(shape, shape.positions, 6, "document")
            data = data._replace(
                samples=[random.Random(f"{SEED}{i}").choice(data.samples) for i in range(count)]
            )
            short = dict(ranks=2, zero=2 + SEED % 2, micro_batch=24)
            self.check(
                data, **short, dp_clip_style="unit", dp_clip_function=CLIP_FUNCTIONS[SEED % 2], R=0
            )
            kept, again = train_all([data.case(micro_batch=1), data.case(**short)])
            self.assertLessEqual(
                promise(again), promise(kept), shape
            )  # told to a tenth of a percent

    def test_bf16(self):
        # The weights, and so the gradients left in them, have 8 bits: 2^-9 of each element, in both
        # runs.
        at_once(
            lambda style: self.check(
                self.data(2, 4), 2**-8, dtype="bf16", dp_clip_style=style, dp_clip_function="abadi",
                R=0, zero=3, ranks=2,
            ),
            ("unit", "flat"),
        )

    def test_no_noise_and_nothing_clipped(self):
        """That is the plain run: losses and weights."""
        for changes in sample(
            [dict(optimizer="adamw", lr="1e-3"), dict(optimizer="sgd", lr=0.1, momentum=0.9)], 1
        ):
            same = dict(changes, steps=5, batch_tokens=28 * 20, seq_len=20, ranks=2, grad_clip=0)
            plain, private = (
                dict(same, export=os.path.join(scratch(), "export.bin"), **more)
                for more in (
                    dict(shuffle=1),
                    dict(
                        dp_noise=0, dp_clip="1e6", dp_clip_style="flat", dp_show_private=1,
                        shuffle=None,
                    ),
                )
            )
            expected, found = train_all([plain, private])
            expected.export, found.export = plain["export"], private["export"]
            self.assert_near(found, expected, changes)


# --------------------------------------------------------------------------------------------------
class Sensitivity(PrivateCheck):
    T, R = 8, 0.5

    def worst(self):
        """Data sets whose last sample is as bad as can be."""
        shape, T = SHORT, self.T
        others = [
            (0, *words) for words in ((1, 2, 3, 4, 5, 6, 1, 2), (3, 3, 5), (6, 5, 4, 3, 2, 1, 6, 5))
        ]
        extra = dict(
            repeated=(0, *[3] * T), like_another=others[0], one_target=(0, 6),
            alternating=(0, *[1, 2] * (T // 2)),
        )
        scales = dict(
            plain={}, large=dict(lnfw=1e3), huge=dict(lnfw=1e9, fcprojw=1e3),
            tiny=dict(wte=1e-6, lnfw=1e-6, lnfb=1e-6), steep=dict(wte=30, qkvw=30),
        )
        for name, how in itertools.product(extra, scales):
            yield f"{name}, {how}", Private(
                shape, shape.random(SEED, **scales[how]), [*others, extra[name]], T,
                dict(windows="document"),
            )

    def check(self, data, style, function, what, program=(), tolerance=1e-3, **layout):
        """The difference that the last sample makes, of the whole and of each group; by what it
        should be, too."""
        flags = dict(dp_clip=self.R, dp_clip_style=style, dp_clip_function=function)
        flags.update(program)
        (without,) = data.without_last().sums([flags])
        (found,) = data.sums([dict(flags, **layout)])
        difference, parts = found - without, groups(data.shape, style)
        for slices in [[slice(None)]] + parts:
            most = self.R if slices == [slice(None)] else self.R / math.sqrt(len(parts))
            # Norms from fp32 products are uncertain by some 2^-20 of the square of their terms'
            # sum, which is corrected where they cancel 64 T-fold: below that a norm may be a
            # thousandth too small (docs/privacy.md). A lost cross term would be up to 0.4.
            self.assertLessEqual(norm(difference, slices), most * (1 + tolerance), what)
        return norm(difference, [slice(None)])

    def test_worst_samples(self):
        layouts = [
            dict(ranks=ranks, zero=stage, micro_batch=rows)
            for ranks in (1, 2, 4)
            for stage in range(4)
            for rows in (1, 4)
        ]
        # There both uses of wte add up, or cancel.
        pipelines = [
            dict(pipeline=plan, ranks=plan.count(":"), micro_batch=rows)
            for plan in ("2:1,2:1", "1:1,3:1", "3:1,1:1", "1:1,2:1,1:1")
            for rows in (1, 3)
        ]
        cases = [
            (*data, style, function)
            for data in self.worst()
            for style in CLIP_STYLES
            for function in CLIP_FUNCTIONS
        ]

        def check(case):
            what, data, style, function = case
            layout = random.Random(f"{SEED}{what}{style}").choice(
                layouts if style == "stage" else layouts + pipelines
            )
            size = self.check(data, style, function, (what, style, function, layout), **layout)
            if "large" in what:
                self.assertGreater(size, 0.9 * self.R, (what, style, function))

        at_once(check, sample(cases, 4))

    def test_parts_that_cancel(self):
        """Positions that pull the head one way and the other: what is left is a thousandth of the
        parts, and less than the rounding of their products."""
        shape, parts = SHORT, groups(SHORT, "unit")
        where = {name: part for name, _, _, part in shape.parts()}

        def one(seed):
            draw = np.random.default_rng(seed)
            weights, C = values(shape.random(seed)), shape.channels
            bias = 10 ** draw.uniform(0, 2) * draw.choice((-1, 1), C) * draw.uniform(0.5, 1.5, C)
            rows = 0.3 * draw.standard_normal((shape.padded, C))
            rows -= np.outer(
                rows @ bias + np.where(np.isin(np.arange(shape.padded), (1, 2)), 0, 30), bias
            ) / (bias @ bias)  # tokens 1 and 2 alone are likely, equally
            rows[shape.vocab :] = 0
            weights[where["lnfw"]], weights[where["lnfb"]], weights[where["wte"]] = (
                1e-3, bias, rows.reshape(-1),
            )
            sample_ = (0, *map(int, draw.permutation([1] * 4 + [2] * 4)))
            data = Private(shape, shape.file(weights), [sample_], self.T, dict(windows="document"))
            R = norm(data.gradients()[0], parts[0]) / 5  # the norm is ten thresholds
            (found,) = data.sums([dict(dp_clip=R, dp_clip_style="unit")])
            return norm(found, parts[0]) / (R / 2), seed

        largest, seed = max(at_once(one, [SEED + i for i in range(200 if ALL else 6)]))
        self.assertLessEqual(largest, 1 + CLOSE, seed)

    def test_a_sample_that_overflows(self):
        """Gradients or norms beyond fp32: the sample is bounded, or left out; the others count as
        ever."""
        shape = SHORT
        for size in sample((1e4, 1e20, 1e30, 1e38), 2):
            weights = values(shape.random(SEED))
            where = {name: part for name, _, _, part in shape.parts()}
            # Token 6 is so unlikely that only a sample that holds it meets its row of wte.
            (
                weights[where["lnfw"]],
                weights[where["lnfb"]],
                weights[6 * shape.channels : 7 * shape.channels],
            ) = (0.1, 3, -size)
            data = Private(
                shape,
                shape.file(weights),
                [(0, 1, 2, 3), (0, 4, 5, 4), (0, 6, 6, 6)],
                self.T,
                dict(windows="document"),
            )
            for style in CLIP_STYLES:
                # The update is read off weights of 1e4, which are multiples of 2^-10: a 2^-29 at
                # this rate. Larger ones leave the sample out.
                self.check(data, style, "abadi", (size, style), tolerance=1e-3)
            (alone,) = data.without_last().sums([{}])
            self.assertGreater(norm(alone, [slice(None)]), 0.1, "the others")


# --------------------------------------------------------------------------------------------------
# A slow generator: RFC 8439's block function on arrays, and normal numbers of it as noise.h says


def chacha20(key, nonce, counters):
    """(blocks, 16) words."""
    rotate = lambda x, n: (x << np.uint32(n)) | (x >> np.uint32(32 - n))
    words = [
        0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *struct.unpack("<8I", bytes.fromhex(key)),
        None, *nonce,
    ]
    start = [
        counters.astype(np.uint32) if word is None else np.full(len(counters), word, np.uint32)
        for word in words
    ]
    x = list(start)

    def quarter(a, b, c, d):
        for to, of, into, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = x[to] + x[of]
            x[into] = rotate(x[into] ^ x[to], by)

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return np.array([a + b for a, b in zip(x, start)]).T


def normals(key, domain, part, step, n):
    words = chacha20(
        key, (domain << 24 | part, step & 0xFFFFFFFF, step >> 32), np.arange(-(-n // 16))
    ).reshape(-1, 2)
    low = words[:, 1].byteswap().astype(float)
    u = (words[:, 0] + (low + 0.5) / 2**32) / 2**32
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * (words[:, 1] >> np.uint32(8)) / 2**24
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:n]


class Silent(typing.NamedTuple):
    """A model of zeros: no sample has a gradient, so that noise is all there is. One step leaves
    -noise in the weights, exactly."""

    shape: Shape = GOLDEN
    samples: int = 8  # a power of two, so that nothing is rounded; and 28 windows are there

    def case(self, **changes):
        zeros = self.shape.file(np.zeros(self.shape.elements()))
        return dict(
            dict(
                PRIVATE,
                model=zeros,
                seq_len=20,
                batch_tokens=20 * self.samples,
                micro_batch=3,
                lr=1,
                dp_noise=1,
                dp_clip=1,
                export=os.path.join(scratch(), "export.bin"),
            ),
            **changes,
        )

    def noise(self, cases):
        cases = [self.case(**case) for case in cases]
        train_all(cases)
        return [-values(case["export"]) * self.samples for case in cases]

    def storages(self, noise):
        """The noise of each, in the order of its elements."""
        found = [[] for _ in range(self.shape.layers + 3)]
        for _, storage, _, where in self.shape.parts():
            found[storage].append(noise[where])
        found[0] = [found[0][0][: self.shape.vocab * self.shape.channels]]
        return [np.concatenate(parts) for parts in found]


class Noise(PrivateCheck):
    def assert_normal(self, z, what):
        """Standard normal numbers: sums of 2nd and 4th powers, the mean, and neighbours, each
        within 5 of its own deviations (6e-7)."""
        n = len(z)
        for name, found, expected, variance in (
            ("mean", z.mean(), 0, 1),
            ("variance", (z**2).mean(), 1, 2),
            ("kurtosis", (z**4).mean(), 3, 96),
            ("neighbours", (z[1:] * z[:-1]).mean(), 0, 1),
            ("pairs", (z[2:] ** 2 * z[:-2] ** 2).mean(), 1, 8),
        ):
            self.assertLess(abs(found - expected), 5 * math.sqrt(variance / n), f"{name}: {what}")

    def assert_unlike(self, a, b, what):
        n = min(len(a), len(b))
        self.assertLess(abs(np.dot(a[:n], b[:n])) / n, 5 / math.sqrt(n), what)

    def check_deviation(self, turn=0, **program):
        """In every element (sigma R / S)^2, whatever the layout; nothing in the padding."""
        silent, draw = Silent(), random.Random(f"{SEED}deviation{turn}")
        sigma, R = draw.uniform(0.5, 8), draw.uniform(0.1, 10)
        case = dict(
            program, dp_noise=sigma, dp_clip=R, ranks=draw.choice((2, 4)), zero=draw.randrange(4),
        )
        (noise,) = silent.noise([case])
        for storage, part in enumerate(silent.storages(noise)):
            self.assert_normal(part / (sigma * R), (storage, case))
        self.assertFalse(noise[~silent.shape.used()].any(), "padding rows")

    def check_unlike(self, **program):
        """Storages and shards know nothing of each other."""
        silent = Silent()
        (noise,) = silent.noise([dict(program, ranks=2, zero=2)])
        parts = silent.storages(noise)
        for a, b in itertools.combinations(range(len(parts)), 2):
            self.assert_unlike(parts[a], parts[b], f"storages {a} and {b}")
        for ranks in (2, 3, 4):  # shards of one storage, and of all
            for part in [*parts[2:4], noise[GOLDEN.used()]]:
                for a, b in itertools.combinations(np.array_split(part, ranks), 2):
                    self.assert_unlike(a, b, f"shards of {ranks}")

    def test_deviation(self):
        for turn in range(8 if ALL else 1):
            self.check_deviation(turn=turn)

    def test_unlike(self):
        self.check_unlike()

    def test_ranks_without_a_part(self):
        """Odd widths: a storage ends inside a block of the generator, and ranks whose slice of it
        is empty begin there."""
        silent = Silent(Shape(1, 3, 33, harness.VOCAB, harness.POSITIONS))
        one, *others = silent.noise([{}, *(dict(ranks=3, zero=stage) for stage in (1, 3))])
        for noise in others:
            self.assertTrue((noise == one).all())
        self.assert_normal(one[silent.shape.used()], "odd widths")

    def test_steps_and_keys(self):
        """Each has its own numbers. Weights of 1e-30 have no gradient either."""
        silent, lr = Silent(), 2.0**-100
        another = "%064x" % (int(KEY, 16) ^ 1)
        after = [
            noise / lr
            for noise in silent.noise(
                [
                    dict(lr=lr, steps=1), dict(lr=lr, steps=2), dict(lr=lr, steps=3),
                    dict(lr=lr, steps=1, dp_key=another),
                ]
            )
        ]
        steps = {
            "step 1": after[0], "step 2": after[1] - after[0], "step 3": after[2] - after[1],
            "another key": after[3],
        }
        for name, noise in steps.items():
            self.assert_normal(noise[GOLDEN.used()], name)
        for a, b in itertools.combinations(steps, 2):
            self.assert_unlike(steps[a][GOLDEN.used()], steps[b][GOLDEN.used()], (a, b))

    def test_against_a_slow_generator(self):
        """ChaCha20's numbers of (key, storage, step, element), on a grid of 2^-12 of the deviation
        or less."""
        silent, sigma = Silent(), random.Random(SEED).uniform(0.5, 4)
        (noise,) = silent.noise([dict(dp_noise=sigma, ranks=2, zero=2)])
        grid = 2.0 ** (math.floor(math.log2(sigma)) - 12)
        self.assertTrue((noise / grid == np.round(noise / grid)).all(), "a grid")
        for storage, part in enumerate(silent.storages(noise)):
            expected = sigma * normals(KEY, 1, storage, 0, len(part))
            # Half of the grid, and what noise.h says of its error: 3e-7 of a radius below 10, and
            # 2^-12 where it is next to 0.
            self.assertLess(
                abs(part - expected).max(),
                0.51 * grid + sigma * (3e-6 + 2**-12 * (abs(expected) < 1e-3 * sigma)).max(),
                storage,
            )

    def test_empty_batches(self):
        """Where the expected batch is one sample, every third has none: noise is added
        nevertheless, on all ranks, and nobody hangs."""
        jobs = self.exported(
            [
                dict(
                    PRIVATE, ranks=ranks, zero=stage, steps=12, batch_tokens=20, seq_len=20,
                    micro_batch=1, lr=1e-3, dp_noise=1, dp_show_private=1,
                )
                for ranks, stage in [(1, 0), *sample(itertools.product((2, 4), range(4)), 2)]
            ]
        )
        for job in jobs:
            taken = [len(s) for s, in job.steps("samples")]
            self.assertIn(0, taken)
            self.assertEqual(job.steps("samples"), jobs[0].steps("samples"))
            self.assertLess(distance(job.export, jobs[0].export), SAME)


# --------------------------------------------------------------------------------------------------
class Sampling(PrivateCheck):
    RUN = dict(PRIVATE, lr=1e-9, dp_show_private=1, seq_len=5, micro_batch=4)

    def draws(self, **changes):
        return [taken for taken, in train(**dict(self.RUN, **changes)).steps("samples")]

    def test_independent_coins(self):
        """Each window in each step with probability q: counts of windows, of steps, of pairs."""
        windows, expected, steps = 114, 11, 200
        taken = self.draws(steps=steps, batch_tokens=5 * expected)
        q, table = expected / windows, np.zeros((steps, windows))
        for step, found in enumerate(taken):
            self.assertEqual(found, sorted(set(found)), "in order, none twice")
            table[step, found] = 1

        def check(name, counts, n, p):
            """Counts of n coins each: their variance is right, and none is far off."""
            z = (counts - n * p) / math.sqrt(n * p * (1 - p))
            self.assertLess(abs((z**2).mean() - 1), 5 * math.sqrt((2 + 1 / (n * p)) / len(z)), name)
            self.assertLess(abs(z).max(), 7, name)

        check("windows", table.sum(0), steps, q)
        check("steps", table.sum(1), windows, q)
        self.assertLess(abs(table.sum() - steps * windows * q), 5 * math.sqrt(steps * windows * q))
        for name, a, b in (
            ("neighbours", table[:, 1:], table[:, :-1]),
            ("steps in a row", table[1:], table[:-1]),
        ):
            self.assertLess(abs((a * b).sum() - a.size * q * q), 5 * q * math.sqrt(a.size), name)

    def test_keys_and_layouts(self):
        """The samples are the key's, whatever the ranks; the seed of the model has no part in
        it."""
        another = "%064x" % (int(KEY, 16) + 1)
        runs = [
            dict(steps=10, batch_tokens=50, **changes)
            for changes in (
                dict(), dict(ranks=3, zero=3), dict(ranks=4, micro_batch=1, seed=7),
                dict(dp_key=another),
            )
        ]
        one, *same, other = at_once(lambda case: self.draws(**case), runs)
        for found in same:
            self.assertEqual(found, one)
        self.assertNotEqual(other, one)
        self.assertNotEqual(one[0], one[1])

    def test_against_a_slow_generator(self):
        """Gaps between samples are geometric, of ChaCha20's numbers of the key and the step."""
        windows, expected = 114, 11
        for step, taken in enumerate(self.draws(steps=6, batch_tokens=5 * expected)):
            words = chacha20(KEY, (2 << 24, step, 0), np.arange(windows)).reshape(-1)
            uniform = (
                (((int(a) << 32 | int(b)) >> 11) + 1) * 2.0**-53 for a, b in words.reshape(-1, 2)
            )
            at, found = -1, []
            while True:
                at += 1 + math.floor(math.log(next(uniform)) / math.log1p(-expected / windows))
                if at >= windows:
                    break
                found.append(at)
            self.assertEqual(taken, found, step)

    def test_all(self):
        for taken in self.draws(steps=3, batch_tokens=114 * 5):
            self.assertEqual(taken, list(range(114)))

    def test_the_samples_named_are_those_taken(self):
        """The private gradient of a step is made of them, and is divided by the expected batch."""
        data = random_data(GOLDEN, 20, 12)
        folder = os.path.join(scratch(), "export.bin")
        for function in sample(CLIP_FUNCTIONS, 1):
            R, expected = 2.0, 5
            job = train(
                **data.case(
                    batch_tokens=expected * 20, dp_clip=R, dp_clip_function=function, export=folder,
                    ranks=2, dp_show_private=1,
                )
            )
            ((taken,),) = job.steps("samples")
            contributions = data.gradients()[taken]
            found = (values(data.model) - values(folder)) / LR * expected
            self.assert_sum(data, found, R, "unit", function, contributions, (taken, function))




# --------------------------------------------------------------------------------------------------
class Stages(PrivateCheck):
    """Pipelines: the embedding's group crosses stages, in style flat the only one does."""

    # Ghost norms in blocks and head; in neither; in the head only
    DATA = [
        (Shape(4, 2, 48, 7, 8), 8, "document"),
        (Shape(4, 2, 16, 11, 64), 60, "continuous"),
        (Shape(4, 4, 16, 5, HEAD.positions), HEAD.positions, "continuous"),
    ]
    PLANS = [
        "3:1,3:1", "1:1,5:1", "5:1,1:1", "2:1,2:1,2:1", "1:1,4:1,1:1", "3:2,3:1", "2:1,4:2",
        "3:1,3:2", "1:1,2:1,3:1", "3:3,3:1", "3:1,3:3", "3:2,3:2", "1:2,4:1,1:1", "1:1,4:2,1:1",
        "2:1,1:2,3:1", "1:1,1:1,3:1,1:1", "2:1,2:1,1:1,1:1",
    ]
    CASES = [
        dict(pipeline=plan, dp_clip_style=style, pipeline_schedule=schedule, micro_batch=rows)
        for plan in PLANS
        for style in CLIP_STYLES
        for schedule in ("gpipe", "dapple")
        for rows in (1, 2, 3, 4)
    ]

    def ranks(self, plan):
        return sum(int(stage.split(":")[1]) for stage in plan.split(","))

    def chosen(self, count):
        """Of CASES, or all; each with a stage of ZeRO, and recomputation where it is accepted. A
        sample has styles in turns."""
        draw, cases = random.Random(f"{SEED}stages"), self.CASES
        if not ALL:
            styles = itertools.islice(itertools.cycle(CLIP_STYLES), count)
            cases = [draw.choice([c for c in cases if c["dp_clip_style"] == s]) for s in styles]
        for case in cases:
            unit = case["dp_clip_style"] == "unit"
            more = dict(ranks=self.ranks(case["pipeline"]), zero=draw.randrange(4))
            yield dict(case, **more, recompute="block" if unit and draw.random() < 0.3 else None)

    def check(self, what, plan, style, function, count=5, **changes):
        shape, T, windows = what
        data = random_data(shape, T, count, windows)
        groups_of = (
            tuple(int(stage.split(":")[0]) for stage in plan.split(","))
            if style == "stage"
            else style
        )
        contributions = data.gradients()
        R = self.thresholds(data, groups_of, contributions)[0]
        (found,) = data.sums(
            [
                dict(
                    dict(
                        dp_clip=R, pipeline=plan, ranks=self.ranks(plan), dp_clip_style=style,
                        dp_clip_function=function,
                    ),
                    **changes,
                )
            ]
        )
        self.assert_sum(
            data, found, R, groups_of, function, contributions, (what, plan, style, changes)
        )

    def test_each_plan(self):
        """The sum of single samples' clipped gradients, of groups as SEMANTICS says: of 7 samples
        replicas have unequal parts, the last micro-batch fewer."""

        def check(numbered):
            number, case = numbered
            draw = random.Random(f"{SEED}{case}")
            changes = {
                name: value
                for name, value in case.items()
                if name not in ("pipeline", "dp_clip_style")
            }
            self.check(
                self.DATA[number % 3], case["pipeline"], case["dp_clip_style"],
                draw.choice(CLIP_FUNCTIONS), 7, **changes,
            )

        at_once(check, list(enumerate(self.chosen(3))))

    def test_empty_batches(self):
        """Where the expected batch is one sample: nobody hangs, and noise is that of one rank."""
        common = dict(
            PRIVATE, steps=12, batch_tokens=20, seq_len=20, micro_batch=2, lr=1e-3, dp_noise=1,
            dp_show_private=1,
        )
        jobs = self.exported(
            [
                common,
                *(
                    dict(
                        common, pipeline=plan, ranks=self.ranks(plan), dp_clip_style=style,
                        zero=zero,
                    )
                    for plan, style, zero in sample(
                        itertools.product(
                            ("2:1,3:1", "1:2,3:1,1:1", "4:1,1:3"), ("unit", "flat"), range(4)
                        ),
                        2,
                    )
                ),
            ]
        )
        for job in jobs[1:]:
            self.assertIn(0, [len(s) for s, in job.steps("samples")])
            self.assertEqual(job.steps("samples"), jobs[0].steps("samples"))
            self.assertLess(
                distance(job.export, jobs[0].export),
                1e-2,
                # noise of 1 beside gradients of up to 1: styles differ by the latter, other noise
                # by 1.4
            )

    def test_messages(self):
        """Where all samples are taken: as predicted, and besides activations and gradients 8 bytes
        for each sample's norm, 4 T C for the classifier's rows, 4 for a factor."""
        T, C, S = 20, harness.CHANNELS, 28
        for plan, style in sample(
            itertools.product(("2:1,3:1", "1:1,3:1,1:1", "2:2,2:1,1:1"), CLIP_STYLES), 2
        ):
            common = dict(
                pipeline=plan, ranks=self.ranks(plan), batch_tokens=S * T, seq_len=T, micro_batch=5,
                steps=2, shuffle=None,
            )
            plain, found = train_all(
                [
                    common,
                    dict(common, dp_noise=1, dp_key=KEY, dp_show_private=1, dp_clip_style=style),
                ]
            )
            stages = [int(stage.split(":")[1]) for stage in plan.split(",")]
            told = found.end()["traffic"]
            self.assertEqual(told["measured"], told["predicted"], (plan, style))
            factors = 4 * (len(stages) - 1 if style == "flat" else 1)
            mine = sum(
                min(5, S - begin) // stages[0] for begin in range(0, S, 5)
            )  # samples of rank 0: part_begin rounds down
            self.assertEqual(
                told["measured"]["intra"]["send"],
                plain.end()["traffic"]["measured"]["intra"]["send"] + factors * mine,
                (plan, style),
            )
            for kind in ("all_gather", "reduce_scatter"):
                self.assertEqual(
                    told["measured"]["intra"][kind],
                    plain.end()["traffic"]["measured"]["intra"][kind],
                    (plan, style),
                )

    def test_stages_are_part_of_what_a_step_computes(self):
        """In style stage: the same noise around the sums of other groups would show their
        difference."""
        out = os.path.join(scratch(), "out")
        run = dict(
            RUN, steps=4, save_every=2, out=out, dp_key=None, micro_batch=3,
            pipeline="3:1,2:1", ranks=2, dp_clip_style="stage",
        )
        train(**run)
        shutil.rmtree(harness.checkpoint(out, 4))
        job = Job(**dict(run, resume=1, pipeline="4:1,1:1")).wait()
        self.assertEqual(job.code, EXIT_INPUT, job.err)
        self.assertIn("under other flags", job.err)
        self.assertEqual(
            len(train(**dict(run, resume=1, pipeline_schedule="gpipe", micro_batch=2)).steps()), 2
        )


class Cyclic(PrivateCheck):
    DATA, data, check = Clipping.DATA, Clipping.data, Clipping.check
    RULES = [dict(cyclic="v1"), dict(cyclic="v2"), dict(cyclic="v2", cyclic_slack=1)]

    @staticmethod
    def modes(N, **case):
        return dict(case, ranks=1, cyclic_stages=N), dict(case, ranks=N, cyclic_mode="data")

    def test_each_way(self):
        """The first step finds one version of all: the sum of clipped gradients, whatever the way
        to norms, in pieces or not."""
        cases = [
            (
                index,
                dict(
                    mode, dp_clip_style="unit", dp_clip_function=function, R=R, recompute=how,
                    micro_batch=rows,
                ),
            )
            for index, (shape, *_) in enumerate(self.DATA)
            for N in (2, 3, 4)
            if N <= shape.units
            for rule in self.RULES
            for mode in self.modes(N, **rule)
            for function in CLIP_FUNCTIONS
            for R in range(3)
            for how in ("none", "block")
            for rows in (1, 7)
        ]
        picked = (
            covering(cases)
            if ALL
            else [
                random.Random(f"{SEED}{at}").choice(
                    [c for c in cases if c[0] == at and c[1]["ranks"] < 2 + at % 3]
                )
                for at in sample(range(len(self.DATA)), 2)
            ]
        )
        at_once(lambda case: self.check(self.data(case[0], 7), **case[1]), picked)

    def test_noise(self):
        """Once, to the sum of all: the numbers of a plain run, in each step."""
        silent, lr = Silent(), 2.0**-100
        cases = [
            dict(mode, lr=lr, steps=2, grad_clip=clip)
            for N in (2, 3)
            for rule in self.RULES
            for clip in (0, "1e30")[: 1 + (rule["cyclic"] == "v1")]
            for mode in self.modes(N, **rule)
        ]
        cases = sample(cases, 2)
        first, *others = silent.noise([dict(lr=lr, steps=2), *cases])
        for noise, case in zip(others, cases):
            self.assertTrue((noise == first).all(), case)

    def test_dealt_by_chance(self):
        """Each sample's micro-batch is drawn for itself: cut by their order, one more would move
        others to other versions of the parameters. All 28 windows are taken in each of 100 steps;
        where the list goes down, the second of two micro-batches begins.
        """
        (job,) = self.exported(
            [
                dict(
                    PRIVATE, cyclic="v2", cyclic_stages=2, steps=100, batch_tokens=28 * 20,
                    seq_len=20, micro_batch=14, lr=1e-3, dp_show_private=1,
                )
            ]
        )
        ends = [
            [k for k in range(1, 28) if taken[k] < taken[k - 1]] for taken, in job.steps("samples")
        ]
        self.assertTrue(
            all(len(end) == 1 for end in ends), "two lists, each ascending; of 2^28 one has none"
        )
        first = np.array(
            [
                [w in taken[: end[0]] for w in range(28)]
                for (taken,), end in zip(job.steps("samples"), ends)
            ]
        )
        most = 5 / (2 * math.sqrt(first.size))  # deviations of a share
        for name, share in dict(
            first=first.mean(),
            neighbours=(first[:, 1:] == first[:, :-1]).mean(),
            steps=(first[1:] == first[:-1]).mean(),
        ).items():
            self.assertLess(abs(share - 0.5), most, name)
        self.assertEqual({len(taken) for taken, in job.steps("samples")}, {28})



# --------------------------------------------------------------------------------------------------
def account(flags=(), **question):
    """What --dp-account answers."""
    text = ",".join(f"{name}={value!r}" for name, value in question.items())
    return json.loads(Job(words=["--dp-account", text, "--json", *flags]).done().out)


class Ledger(PrivateCheck):
    RUN = dict(
        PRIVATE, lr="1e-3", seq_len=20, batch_tokens=100, micro_batch=2, dp_noise=1.1,
        dp_delta=1e-5, val_every=2, val_batches=1,
    )

    def test_epsilon(self):
        """At each validation that of the steps so far, as --dp-account says it."""
        for changes in sample(
            [
                dict(), dict(dp_accountant="rdp"), dict(dp_neighbours="replace-one"),
                dict(dp_noise=0.8, ranks=2, zero=2),
            ],
            2,
        ):
            run = dict(self.RUN, steps=5, **dict(changes))
            for event in train(**run).of("val"):
                flags = [
                    word
                    for name in ("dp_accountant", "dp_neighbours")
                    if name in run
                    for word in ("--" + name.replace("_", "-"), run[name])
                ]
                expected = (
                    account(
                        flags, q=5 / 28, sigma=run["dp_noise"], steps=event["step"], delta=1e-5
                    )["epsilon"]
                    if event["step"]
                    else 0
                )
                # The run spends a little of its delta on its cap (privacy/privacy.h), and the
                # interval is as wide as it is.
                self.assertLess(
                    abs(float(event["epsilon"]) - expected),
                    1e-3 * expected + 1e-12,
                    (changes, event),
                )

    def test_noise_for_a_target(self):
        """The least noise with which all steps stay within epsilon; what is told at the end is what
        --dp-account says of it."""
        for target in sample((0.7, 3, 9), 1):
            job = train(**dict(self.RUN, steps=6, dp_noise=None, dp_epsilon=target))
            told = job.end()["privacy"]
            self.assertLessEqual(float(told["epsilon"]), target)
            again = account(q=5 / 28, sigma=float(told["sigma"]) - 2e-4, steps=6, delta=1e-5)[
                "epsilon"
            ]
            self.assertGreater(again, 0.999 * target, "less noise would do")
            self.assertEqual(told["steps"], 6)
            self.assertIn(
                f"epsilon <= {math.ceil(float(told['epsilon']) * 1e4) / 1e4:.4f}", job.out
            )

    def test_dry_run(self):
        """It promises what the run then does: epsilon, sigma and q. Without the data, and where a
        checkpoint goes on, it says what they depend on."""
        documents = dict(windows="document", dp_unit="document", dp_windows_per_document=2)
        cases = [
            dict(self.RUN, steps=6, dp_noise=None, dp_epsilon=3, dp_key=None),
            dict(self.RUN, steps=-1, ranks=2, zero=2),
            dict(self.RUN, steps=6, dp_epsilon=1, dp_delta=None),
            dict(self.RUN, steps=6, **documents),
        ]
        rows = lambda job: re.search(r"(?m)^privacy .*\n(?: +.*\n)+", job.out).group()
        for case in sample(cases, 2):
            job, dry = train(**case), train(**dict(case, dry_run=1, log=None))
            self.assertEqual(rows(dry).split(), rows(job).split())
            self.assertRegex(rows(dry), r"epsilon \d\S+ at delta ")
            self.assertRegex(rows(dry), r"sampling rate q = 0\.\d+ \(Poisson\)")
            self.assertRegex(" ".join(rows(dry).split()), r"noise of sigma [\d.]+ times that")
            self.assertIn("20 tokens", " ".join(rows(dry).split()))
            alone = train(**dict(case, dry_run=1, log=None, json=1)).out
            told = json.loads(alone, parse_float=str)["privacy"]
            begun = job.of("start")[0]["privacy"]
            self.assertIsNone(told.pop("key"))
            self.assertEqual(len(begun.pop("key")), 16)
            self.assertEqual(told, begun)
        missing = dict(cases[0], dry_run=1, train="/nowhere/train_*.bin", log=None)
        said = " ".join(rows(train(**missing)).split())
        self.assertIn("epsilon, sigma and q follow from the number of windows of --train /no", said)
        out = os.path.join(scratch(), "out")
        train(**dict(cases[0], out=out, save_every=3))
        said = rows(train(**dict(cases[0], out=out, resume=1, steps=9, dry_run=1, log=None)))
        self.assertIn("are those of the checkpoint in --out", " ".join(said.split()))

    def test_delta_of_a_unit(self):
        """28 windows: a delta above 1 / 28 is refused before a minute goes into the noise."""
        for dry in ({}, dict(dry_run=1, log=None)):
            case = dict(self.RUN, steps=6, dp_noise=None, dp_epsilon=3, **dry)
            job = train(**dict(case, dp_delta=0.036), code=EXIT_INPUT)
            self.assertIn("--dp-delta 0.036 is above 1 / units, 0.0357: --train has 28", job.err)
            self.assertIn("better a tenth of it", job.err)
            train(**dict(case, dp_delta=0.0357))

    def test_the_step_that_would_exceed_the_target_is_not_taken(self):
        budget = account(q=5 / 28, sigma=1.1, steps=4, delta=1e-5)["epsilon"] * 1.001
        out = os.path.join(scratch(), "out")
        run = dict(
            self.RUN, steps=9, dp_epsilon=budget, dp_noise=1.1, out=out, save_every=3, ranks=2,
            zero=1,
        )
        job = train(**run)
        self.assertEqual([step for step, in job.steps("step")], [1, 2, 3, 4])
        self.assertEqual(harness.checkpoints(out), [3, 4])
        self.assertLessEqual(max(float(e["epsilon"]) for e in job.of("val")), budget)
        again = train(**dict(run, resume=1, steps=20))
        self.assertEqual(again.steps(), [])
        self.assertIn("no step is left", again.err)
        more = train(
            **dict(
                run,
                resume=1,
                steps=20,
                dp_epsilon=account(q=5 / 28, sigma=1.1, steps=6, delta=1e-5)["epsilon"] * 1.001,
            )
        )
        self.assertEqual([step for step, in more.steps("step")], [5, 6])

    def test_resumes_that_are_refused(self):
        """What was spent was spent under one setting; and the same noise must not be drawn around
        other gradients."""
        out = os.path.join(scratch(), "out")
        run = dict(self.RUN, steps=4, save_every=2, out=out, dp_key=None, dp_clip=0.5)
        train(**run)
        shorter = shard(harness.golden_tokens()[:-20])
        changed = [
            (dict(dp_noise=1.2), "sigma"),
            (dict(dp_delta=1e-6), "delta"),
            (dict(dp_clip=0.6), "clip"),
            (dict(dp_clip_style="flat"), "style"),
            (dict(dp_clip_function="automatic"), "function"),
            (dict(batch_tokens=120), "samples"),
            (dict(train=shorter), "windows"),
            (dict(dp_neighbours="replace-one"), "neighbours"),
            (dict(dp_key=KEY), "key"),
            (dict(windows="document"), "windows"),
            (dict(dp_noise=None, dp_delta=None, dp_clip=None), "private run"),
        ]

        def refused(changes, words):
            job = Job(
                random.Random(f"{SEED}{words}").choice((1, 2)),
                **dict(run, steps=6, resume=1, **changes),
            ).wait()
            self.assertEqual(job.code, EXIT_INPUT, (changes, job.err))
            self.assertIn(words, job.err, changes)

        for changes, words in sample(changed, 2):  # one at a time: a folder has one run
            refused(changes, words)
        shutil.rmtree(harness.checkpoint(out, 4))
        refused(dict(lr="2e-3"), "steps 3 to 4 have drawn noise after this checkpoint")
        other, same = harness.golden_tokens(), shard(harness.golden_tokens())
        other[5] = (other[5] + 1) % harness.VOCAB
        refused(dict(train=shard(other)), "under other flags")
        for name in ("dp_key", "dp_steps"):
            os.rename(os.path.join(out, name), os.path.join(out, "elsewhere"))
            refused(dict(), f"{name} cannot be read")
            os.rename(os.path.join(out, "elsewhere"), os.path.join(out, name))
        self.assertEqual(
            len(train(**dict(run, resume=1, steps=5, ranks=2, zero=3, train=same)).steps()),
            3,
            "in another layout, and another file",
        )
        self.assertEqual(
            len(train(**dict(run, resume=1, steps=6, lr="2e-3")).steps()),
            1,
            "another rate for steps that nobody has seen",
        )
        for step in (4, 5, 6):
            shutil.rmtree(harness.checkpoint(out, step))
        for lr in ("1e-3", "2e-3"):  # steps 3 to 6 had both
            refused(dict(lr=lr), "steps 3 to 6 have drawn noise")

    def test_before_the_first_checkpoint(self):
        """Steps that were lost are repeated with the same key, so they count once; with other flags
        the same noise would be around other gradients."""
        out = os.path.join(scratch(), "out")
        run = dict(self.RUN, out=out, dp_key=None, dp_show_private=1)
        lost = train(**dict(run, steps=2))
        key = harness.get(os.path.join(out, "dp_key"))
        for changes in (dict(lr="2e-3"), dict(dp_noise=1.2), dict(dp_clip=0.6)):
            job = train(**dict(run, steps=4, resume=1, **changes), code=EXIT_INPUT)
            self.assertIn("steps 1 to 2 have drawn noise before the first checkpoint", job.err)
        job = train(**dict(run, steps=4, save_every=4, resume=1))
        self.assertIn("has no checkpoint yet: the run starts from the beginning", job.out)
        self.assertEqual(job.steps()[:2], lost.steps())
        self.assertEqual(harness.get(os.path.join(out, "dp_key")), key)
        again = os.path.join(scratch(), "out")
        train(**dict(run, steps=2, out=again))
        os.remove(os.path.join(again, "dp_key"))
        job = train(**dict(run, steps=4, out=again, resume=1), code=EXIT_INPUT)
        self.assertIn("dp_key cannot be read", job.err)



class Documents(PrivateCheck):
    T = 6

    def setUp(self):
        draw = random.Random(SEED)
        self.lengths = [1, 3, 2, 5, 1, 4]  # windows of each
        self.texts = [
            (0, *(draw.randrange(1, SHORT.vocab) for _ in range(n * self.T))) for n in self.lengths
        ]
        self.tokens = shard([token for text in self.texts for token in text])
        self.run_ = dict(
            PRIVATE, model=SHORT.random(SEED), train=self.tokens, val=self.tokens,
            windows="document", dp_unit="document", seq_len=self.T, micro_batch=4,
        )

    def windows(self, most):
        """Those that are in the data: of each document the first ones."""
        return [window for text in self.texts for window in windows_of(text, self.T)[:most]]

    def test_longer_documents_lose_the_rest(self):
        for most in (1, 2, 3):
            wanted = self.windows(most)
            case = dict(
                self.run_,
                dp_windows_per_document=most,
                batch_tokens=len(wanted) * self.T,
                export=os.path.join(scratch(), "export.bin"),
                ranks=2,
                zero=2,
                dp_show_private=1,
            )
            job = train(**case)
            self.assertEqual(job.steps("samples"), [(list(range(len(wanted))),)])
            data = Private(SHORT, case["model"], wanted, self.T, {})
            found = (values(data.model) - values(case["export"])) / LR * len(wanted)
            self.assert_sum(data, found, 1, "unit", "abadi", data.gradients(), most)

    def test_epsilon(self):
        """That of as many windows as a document may have: more than a window's."""
        told, run = {}, dict(
            self.run_, dp_noise=1.3, dp_delta=1e-5, steps=4, lr=1e-3, val_every=4, val_batches=1,
            batch_tokens=2 * self.T,
        )
        for most in (1, 2, 3):
            job, W = train(**dict(run, dp_windows_per_document=most)), len(self.windows(most))
            told[most] = float(job.of("val")[-1]["epsilon"])
            expected = account(q=2 / W, sigma=1.3, steps=4, delta=1e-5, windows=most)["epsilon"]
            self.assertLess(abs(told[most] - expected), 1e-3 * expected, most)
        alone = account(q=2 / len(self.windows(3)), sigma=1.3, steps=4, delta=1e-5)["epsilon"]
        self.assertGreater(told[3], 1.5 * alone)


# --------------------------------------------------------------------------------------------------
# What an attacker learns who may choose half of the data: canaries, each there or not by a fair
# coin, and a look at all that was published


def normal_cdf(x):
    return math.erfc(-x / math.sqrt(2)) / 2


def delta_of_gaussian(mu, epsilon):
    """Of the Gaussian mechanism (arXiv 1805.06530)."""
    return normal_cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal_cdf(
        -mu / 2 - epsilon / mu
    )


def bisect(function, low, high):
    """Where a falling function is 0."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return low


def epsilon_of_gaussian(mu, delta):
    return bisect(lambda epsilon: delta_of_gaussian(mu, epsilon) - delta, 0, 500)


def binomial(n, p):
    """Probabilities of 0 .. n successes."""
    k = np.arange(n + 1)
    logs = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    return np.exp(logs + k * math.log(p) + (n - k) * math.log1p(-p))


def chance_of_guesses(canaries, guesses, right, epsilon, delta):
    """At most this is the chance of so many right guesses under (epsilon, delta): theorem 5.2 and
    appendix D of arXiv 2305.08846."""
    of = binomial(guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(of[right - 1 :: -1]) if right else np.zeros(1)
    alpha = max(0, (below / np.arange(1, len(below) + 1)).max())
    return min(1, of[right:].sum() + 2 * canaries * delta * alpha)


class Audit(PrivateCheck):
    """A canary is a document of one word that no other document has. The last layernorm is strong
    and the words' vectors are weak, so that its gradient is all but the word's row of wte: as many
    directions as canaries, at right angles. Its score is what the step moved along it.
    """

    SHAPE, OTHERS, DELTA = Shape(1, 1, 16, 1000, 1), 20, 1e-8
    DOUBT = 1e-6  # that the bounds are wrong

    def model(self):
        draw, shape = np.random.default_rng(SEED), self.SHAPE
        weights = {
            name: 0.02 * draw.standard_normal(part.stop - part.start)
            for name, _, _, part in shape.parts()
        }
        for name in ("ln1w", "ln2w", "lnfw"):
            weights[name] = np.full(shape.channels, 50.0 if name == "lnfw" else 1.0)
        weights["wpe"] = draw.standard_normal(shape.channels)
        weights["wte"] *= 0.01
        return shape.file(
            np.where(
                shape.used(), np.concatenate([weights[name] for name, _, _, _ in shape.parts()]), 0
            )
        )

    def scores(self, present, sigma, **layout):
        """Of each canary: 1 where it is there, 0 where not, beside noise."""
        shape, model, first = self.SHAPE, self.model(), 1 + self.OTHERS
        samples = [(0, 1 + i) for i in range(self.OTHERS)] + [
            (0, first + i) for i in np.flatnonzero(present)
        ]
        documents = dict(windows="document", tokenizer=tokenizer([b"word"] * shape.vocab, 0))
        data = Private(shape, model, samples, 1, documents)
        (total,) = data.sums(
            [dict(dp_noise=sigma, dp_clip=1, dp_clip_style="flat", micro_batch=64, **layout)]
        )
        (gradient,) = gradients(model, [(0, first)], 1, **documents)
        C, rows = shape.channels, total[: shape.vocab * shape.channels].reshape(
            shape.vocab, shape.channels
        )
        row = gradient[
            first * C : (first + 1) * C
        ]  # of other canaries it is all but the same: their words have the same weak vectors
        size = np.linalg.norm(row)
        self.assertGreater(size / np.linalg.norm(gradient), 0.95, "canaries are at right angles")
        return rows[first:] @ (row / size)

    def check(self, claimed, sigma, **program):
        """What two estimates say against the claim for the noise `claimed`, while `sigma` is what
        the program is told."""
        canaries = self.SHAPE.vocab - 1 - self.OTHERS
        present = np.random.default_rng(SEED).integers(0, 2, canaries).astype(bool)
        draw = random.Random(f"{SEED}audit")
        layout = dict(ranks=draw.choice((1, 2)), zero=draw.randrange(4))
        scores = self.scores(present, sigma, **layout, **program)
        claim = account(q=1, sigma=claimed, steps=1, delta=self.DELTA)["epsilon"]
        # Guesses: the highest third was there, the lowest third was not.
        order, third = np.argsort(scores), canaries // 3
        right = int(present[order[-third:]].sum() + (~present[order[:third]]).sum())
        bound = bisect(
            lambda epsilon: self.DOUBT
            - chance_of_guesses(canaries, 2 * third, right, epsilon, self.DELTA),
            0,
            50,
        )
        # For a Gaussian mechanism: how far apart the scores are, in deviations, less what chance
        # may do (5 of its own deviations).
        within = math.sqrt((scores[present].var(ddof=1) + scores[~present].var(ddof=1)) / 2)
        mu = (scores[present].mean() - scores[~present].mean()) / within
        doubt = 5 * math.sqrt(4 / canaries + mu * mu / (2 * canaries))
        return claim, bound, mu, doubt

    def audit(self, **program):
        sigma = 1
        claim, bound, mu, doubt = self.check(sigma, sigma, **program)
        self.assertLess(bound, claim)
        self.assertLess(mu - doubt, 1 / sigma)
        self.assertLess(epsilon_of_gaussian(max(mu - doubt, 1e-3), self.DELTA), claim)
        self.assertGreater(mu + doubt, 0.9 / sigma, "the audit sees canaries")

    def test_canaries(self):
        self.audit()

    def test_a_tenth_of_the_noise(self):
        """The control: both estimates are above the claim."""
        claim, bound, mu, doubt = self.check(3, 0.3)
        self.assertGreater(bound, claim)
        self.assertGreater(epsilon_of_gaussian(mu - doubt, self.DELTA), claim)


# --------------------------------------------------------------------------------------------------
class Controls(PrivateCheck):
    """A program with a fault (planted_faults.py), which the tests above must notice."""

    FAULTS = planted_faults.numbered(planted_faults.PRIVATE)
    DONE = {
        name: str(number)
        for number, name, _, _ in planted_faults.numbered(planted_faults.DONE_TO_PRIVATE)
    }

    def notice(self, check, **program):
        if check == "noise":
            Noise().check_deviation(**program)
        elif check == "unlike":
            Noise().check_unlike(**program)
        elif check == "audit":
            Audit().audit(**program)
        elif check == "stages":
            Stages().check(Stages.DATA[0], "3:1,3:1", "unit", "abadi", micro_batch=1, **program)
        elif check == "sensitivity":
            data = dict(Sensitivity().worst())["repeated, large"]
            Sensitivity().check(data, "unit", "automatic", "a fault", program)
        else:
            data, style = random_data(SHORT, 8, 4, check), "unit"
            Clipping().check(data, dp_clip_style=style, dp_clip_function="abadi", R=1, **program)

    def test_faults(self):
        def check(fault):
            number, (how, message), _, pattern = fault
            with self.subTest(pattern), self.assertRaisesRegex(AssertionError, message):
                self.notice(how, binary=PLANTED, environment=dict(FAULT=str(number)))

        at_once(check, sample(self.FAULTS, 3))

    def test_no_fault(self):
        """The same program without one passes: it is the fault that is noticed."""
        for how in sample(sorted({where[0] for _, where, _, _ in self.FAULTS}), 1):
            self.notice(how, binary=PLANTED)

    def done(self, *what, **more):
        """What a run is started with so that this is done to it."""
        faults = ",".join(self.DONE[name] for name in what)
        return dict(binary=PLANTED, environment=dict(FAULT=faults, **more))

    def test_unlike_machines_and_a_skipped_update(self):
        """Rank 1 takes other logarithms, and what it draws is not asked for; the norm of step 2 is
        no number, and the run goes on; no key is left."""
        key = "%u,%u" % struct.unpack("<2I", bytes.fromhex(KEY)[:8])
        faults = self.done("other logarithms", "no norm", "a look for the key", KEY_WORDS=key)
        case = dict(RUN, ranks=2, zero=2)
        found, expected = train(**dict(case, **faults)), train(**case)
        self.assertEqual(found.steps("samples"), expected.steps("samples"))
        self.assert_close(found.losses()[:2], expected.losses()[:2], SAME)
        self.assertEqual(len(found.steps()), 6)
        self.assertIn("step 2: update skipped: gradient norm is not finite", found.err)
        self.assertIn("the key is gone", found.out)
        self.assertNotIn("the key is left", found.out)

    def test_schedules_of_other_batches(self):
        """Those of no sample, and of as many as a step may take, are proved before the first
        step."""
        for of in sample(("a schedule of no sample", "a schedule of most samples"), 1):
            job = Job(**dict(Ledger.RUN, ranks=2, zero=3, **self.done(of))).wait()
            self.assertEqual(job.code, EXIT_INPUT, job.err)
            self.assertIn("invalid schedule", job.err)


# --------------------------------------------------------------------------------------------------
class Refusals(PrivateCheck):
    def test_combinations(self):
        """What would break the promise, with the reason."""
        cases = [
            (dict(zero=2, zero_quantized_gradients=1), "one sample can move all"),
            (dict(reduce_dtype="bf16"), "private gradients travel in fp32"),
            (dict(skip_loss_z=5), "reveals something of its samples"),
            (dict(skip_grad_z=5), "reveals something of its samples"),
            (dict(dp_key=KEY[1:]), "found 63 characters"),
            (dict(dp_key="x" * 64), "hexadecimal"),
            (dict(dp_noise=0, dp_epsilon=3), "without noise no epsilon"),
            (dict(dp_clip_style="flat", recompute="block"), "--dp-clip-style unit"),
            (dict(dp_unit="document"), "--windows document"),
            (dict(cyclic="v2", cyclic_mode="model"), "choose single or data"),
            (dict(cyclic="v1", dp_clip_style="flat"), "choose unit"),
            (dict(pipeline="auto"), "auto does not know what clipping takes"),
            (dict(pipeline="2", pipeline_schedule="zero-bubble"), "choose dapple"),
        ]

        def check(case):
            changes, words = case
            job = Job(
                random.Random(f"{SEED}{words}").choice((1, 2)),
                **dict(dict(dp_noise=1, shuffle=None), **changes),
            ).wait()
            self.assertEqual(job.code, EXIT_INPUT, job.err)
            self.assertIn(words, job.err)
            self.assertNotIn(KEY[1:], job.err)

        at_once(check, sample(cases, 3))


class Products(PrivateCheck):
    """Steps that have drawn noise are not repeated with other products."""

    def test_other_instructions(self):
        out = os.path.join(scratch(), "out")
        run = dict(Ledger.RUN, steps=3, save_every=2, out=out, dp_key=None)

        def on(isa, steps=3, **changes):
            words = {"ONEDNN_MAX_CPU_ISA": isa, "DNNL_MAX_CPU_ISA": isa}
            return Job(**dict(run, steps=steps, **changes), environment=words).wait()

        for dtype in ("bf16", "fp32"):
            shutil.rmtree(out, ignore_errors=True)
            run.update(dtype=dtype)
            self.assertEqual(on("AVX2").code, 0)
            manifest = get(harness.checkpoint(out, 3) + "/manifest").decode()
            products = re.search("(?m)^products (.*)$", manifest)
            if "CBLAS" in products[1]:
                self.skipTest("the library does not say what it multiplies with")
            shutil.rmtree(harness.checkpoint(out, 3))
            other = on("AVX512_CORE", 4, resume=1)
            if dtype == "bf16":
                self.assertEqual(other.code, EXIT_INPUT, other.err)
                self.assertIn("steps 3 to 3 have drawn noise", other.err)
                self.assertIn(
                    "with other products (cpu fp32 oneDNN AVX2, here cpu fp32 oneDNN AVX-512)",
                    other.err,
                )
                ranks = on("AVX512_CORE", 4, resume=1, ranks=2)
                self.assertEqual(ranks.code, EXIT_INPUT, ranks.err)
                self.assertEqual(on("AVX2", 4, resume=1, ranks=2).code, 0, "as before")
                # At a checkpoint of the last step everything may change.
                self.assertEqual(on("AVX512_CORE", 5, resume=1).code, 0)
            else:
                self.assertEqual(products[1], "cpu fp32")
                self.assertEqual(other.code, 0, other.err)


class Secrets(PrivateCheck):
    RUN = dict(Ledger.RUN, steps=4, save_every=2)

    def told(self, job, out=None):
        """All that a run leaves for others, but for the key file."""
        texts = [job.out.encode(), job.err.encode(), get(job.log_path)]
        for path in glob.glob(os.path.join(out, "**"), recursive=True) if out else []:
            if os.path.isfile(path) and os.path.basename(path) != "dp_key":
                texts.append(get(path))
        return texts

    def forms(self, key):
        raw = bytes.fromhex(key)
        words = b"".join(raw[i : i + 4][::-1] for i in range(0, 32, 4))
        return [
            key.encode(),
            key.upper().encode(),
            *(whole[i : i + 8] for whole in (raw, words) for i in range(0, 32, 8)),
        ]

    def test_private_parts(self):
        """Losses, norms, samples and their number are told to nobody; with --dp-show-private they
        are, and labelled."""
        quiet, shown, plain = train_all(
            [
                dict(self.RUN, steps=6, save_every=None, ranks=2, zero=2),
                dict(self.RUN, steps=6, save_every=None, ranks=2, zero=2, dp_show_private=1),
                dict(
                    self.RUN, steps=6, save_every=None, dp_noise=None, dp_delta=None, dp_clip=None,
                    dp_key=None,
                ),
            ]
        )
        self.assertEqual(quiet.steps("loss", "grad_norm"), [(None, None)] * 6)
        digits = lambda number: len(
            f"{float(number):.9e}".split("e")[0].rstrip("0").replace(".", "")
        )
        for event in quiet.of("step"):
            self.assertNotIn("samples", event)
            self.assertLessEqual(digits(event["ms"]), 2, "of the mean over the steps so far")
            self.assertIsNone(event["joules"])
        self.assertTrue(any(digits(event["ms"]) > 2 for event in shown.of("step")))
        measured = [quiet.end()[name]["measured"] for name in ("step_ms", "idle")] + [
            quiet.end()["overhead"]
        ]
        self.assertLessEqual(
            max(map(digits, [*measured, *quiet.end()["traffic"]["measured"]["intra"].values()])), 2
        )
        self.assertIsNone(quiet.end()["energy_j"])
        for line in quiet.out.splitlines():
            if line.startswith("step") and "validation" not in line and "checkpoint" not in line:
                self.assertNotRegex(line, "loss|norm")
        self.assertIn(
            "loss", next(line for line in plain.out.splitlines() if line.startswith("step     1"))
        )
        self.assertTrue(all(loss for loss, norm in shown.steps("loss", "grad_norm")))
        self.assertEqual([e["loss"] for e in quiet.of("val")], [e["loss"] for e in shown.of("val")])
        said = re.sub(r"validation loss .* bits/byte", "", quiet.out + quiet.err)  # is public
        for number in (n for pair in shown.steps("loss", "grad_norm") for n in pair if n):
            self.assertNotIn(f"{float(number):.4f}", said)
        self.assertIn("--dp-show-private: epsilon does not hold", shown.err)
        self.assertNotIn("show-private", quiet.err)

    def test_no_time_of_a_step(self):
        """Whatever a run writes: figures are rounded means that seldom change, clocks stand still,
        and which steps are printed does not depend on how long they took."""
        folder = scratch()
        out, board = os.path.join(folder, "out"), os.path.join(folder, "board")
        export = os.path.join(folder, "folder" if SEED % 2 else "model.bin")
        run = dict(self.RUN, steps=20, save_every=1, ranks=2, val_every=5, zero=SEED % 4, keep=4)
        begun = time.time()
        job = train(**dict(run, out=out, tensorboard=board, export=export))
        times = [e["ms"] for e in job.of("step")]
        changed = [i + 2 for i in range(19) if times[i + 1] != times[i]]
        # The first step does not count.
        self.assertLessEqual(set(changed), {9, 17})
        step_s = float(job.of("start")[0]["predicted"]["step_ms"]) / 1000
        self.assert_close([float(times[0])], [float(f"{step_s * 1000:.1e}")], 1e-12)
        tokens = [float(e["ms"]) * float(e["tokens_per_s"]) for e in job.of("step")]
        self.assert_close(tokens, tokens[:1] * 20, 1e-9, "of as many samples as on average")
        shown = {int(n) for n in re.findall(r"(?m)^step +(\d+)/", job.out)}
        stride = max(1, int(1 / step_s))
        self.assertEqual(shown, {s for s in range(1, 21) if s in (1, 20) or s % stride == 0})
        (events,) = glob.glob(os.path.join(board, "*"))
        stamps, text, at = set(), get(events), 0
        while at < len(text):
            (length,) = struct.unpack_from("<Q", text, at)
            self.assertEqual(text[at + 12], 1 << 3 | 1, "the time comes first")
            stamps.add(struct.unpack_from("<d", text, at + 13)[0])
            at += 16 + length
        self.assertEqual(len(stamps), 1)
        files = glob.glob(os.path.join(folder, "**"), recursive=True)
        for path in (*files, job.log_path):
            name = os.path.basename(path)  # the first two are made once, at the start
            if name not in ("lock", "dp_key") and (os.path.isfile(path) or "/out" in path):
                self.assertEqual(os.stat(path).st_mtime_ns, int(min(stamps)) * 10**9, path)
        self.assertTrue(begun - 2 < min(stamps) < time.time())

    def test_checkpoints_hold_no_losses(self):
        """Nor norms, even where they are shown: checkpoints are published. A plain run's hold both,
        to judge outliers."""
        cases = [
            dict(self.RUN, out=os.path.join(scratch(), "out"), **more)
            for more in (
                dict(dp_show_private=1),
                dict(dp_noise=None, dp_delta=None, dp_clip=None, dp_key=None),
            )
        ]
        for case, job, held in zip(cases, train_all(cases), (False, True)):
            text = get(os.path.join(harness.checkpoint(case["out"], 4), "manifest")).decode()
            numbers = [
                float.fromhex(word) for word in re.findall(r"0x[0-9a-f.]+p[-+]\d+", text)
            ] + [float(word) for word in re.findall(r"\d+\.\d+", text)]
            told = [
                float(number)
                for pair in job.steps("loss", "grad_norm")
                for number in pair
                if number
            ]
            self.assertEqual(
                any(abs(a / b - 1) < 1e-4 for a in told for b in numbers if b), held, text
            )

    def test_the_key_is_not_told(self):
        for own in (True, False):
            out = os.path.join(scratch(), "out")
            job = train(**dict(self.RUN, out=out, dp_key=None if own else KEY))
            path = os.path.join(out, "dp_key")
            key = get(path).decode().strip() if own else KEY
            self.assertEqual(len(bytes.fromhex(key)), 32)
            if own:
                self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
            for text in self.told(job, out):
                for form in self.forms(key):
                    self.assertNotIn(form, text)
            if not own:
                self.assertRegex(job.err, "warning: .*--dp-key")

    def test_the_command_line_does_not_show_it(self):
        """What ps shows of a rank, as soon as it trains; and the command that resumes."""
        out = os.path.join(scratch(), "out")
        job = Job(**dict(self.RUN, steps=10**4, out=out, save_every=None))
        job.wait_until(lambda: job.logged() > 2, "a step")
        lines = [get(f"/proc/{pid}/cmdline") for pid in job.pids()]
        open(os.path.join(out, "stop"), "w").close()
        job.done()
        for line in [*lines, job.out.encode()]:
            self.assertNotIn(KEY.encode(), line)
        self.assertIn("--resume 1", job.out)  # which takes the key of OUT
        self.assertTrue(lines)


# --------------------------------------------------------------------------------------------------
class Numbers(PrivateCheck):
    def test_traffic(self):
        """At q = 1 each rank sends what it sends without privacy, byte for byte, and has states of
        the same size."""
        flags = [
            dict(zero=stage, **more) for stage in range(4) for more in (dict(), dict(micro_batch=1))
        ]
        flags += [
            dict(zero=3, zero_quantized_weights=1),
            dict(zero=3, zero_hpz_partition_size=2, zero_quantized_weights=1),
            dict(zero=3, dtype="bf16", zero_hpz_partition_size=2),
        ]
        nodes = ((2, 0), (2, 1), (3, 0), (4, 2), (4, 0))
        cases = [
            dict(more, ranks=ranks, ranks_per_node=per_node)
            for more in flags
            for ranks, per_node in nodes
        ]
        common = dict(batch_tokens=28 * 20, steps=2, reduce_dtype="fp32", shuffle=None)
        draw = random.Random(f"{SEED} models")
        chosen = [dict(case, model=harness.any_model(draw)) for case in sample(cases, 2)]
        style = lambda case: random.Random(f"{SEED}{case}").choice(CLIP_STYLES)
        jobs = self.trained(
            [
                dict(common, **case, **more)
                for case in chosen
                for more in (
                    {},
                    dict(dp_noise=1, dp_key=KEY, dp_show_private=1, dp_clip_style=style(case)),
                )
            ]
        )
        for case, plain, found in zip(chosen, jobs[::2], jobs[1::2]):
            self.assertEqual(found.end()["traffic"], plain.end()["traffic"], case)

    def test_traffic_of_chance(self):
        """Else it follows the batches: the gathers and reductions of as many micro-steps as the
        largest share of a step's samples takes, at least one."""
        for case in sample(
            [
                dict(ranks=ranks, zero=stage, micro_batch=1)
                for ranks in (2, 3)
                for stage in range(4)
            ],
            2,
        ):
            changes = dict(
                case, dp_noise=1, dp_key=KEY, dp_show_private=1, steps=6, batch_tokens=60,
                shuffle=None,
            )
            job, layout, sums = train(**changes), Layout(changes), {}
            for (taken,) in job.steps("samples"):
                layout.micro_steps = max(1, -(-len(taken) // layout.ranks))
                for kind, links in expected_traffic(layout).items():
                    sums[kind] = [a + b for a, b in zip(sums.get(kind, [0, 0]), links)]
            found = job.end()["traffic"]["measured"]
            for kind, (near, _) in sums.items():
                self.assertLess(abs(found["intra"][kind] - near / 6), 1, (kind, case))

    def test_memory(self):
        """At most 105 % of the plain run's, as the dry run says it for large models; what runs say
        is as predicted (Job.check_end)."""
        for model, T, rows in sample(
            [
                ("gpt2:124M", 1024, 4),
                ("gpt2:1558M", 1024, 1),
                ("layers=6,heads=6,channels=384,vocab=50257", 256, 12),
            ],
            2,
        ):
            device = []
            for more in ([], ["--dp-noise", "1"]):
                words = [
                    "--dry-run", "--json", "--cluster", "1x1,tflops=1,memory=100", "--model", model,
                    "--seq-len", str(T), "--micro-batch", str(rows), *more,
                ]
                device.append(
                    json.loads(Job(words=words).done().out)["predicted"]["memory"]["device"]
                )
            self.assertLessEqual(device[1], 1.05 * device[0], (model, T, rows))


if __name__ == "__main__":
    harness.main()
