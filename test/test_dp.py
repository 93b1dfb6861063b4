#!/usr/bin/env python3
"""test_dp.py: private training of the real program under mpirun, against gradients of single samples and a slow generator.

    python3 test/test_dp.py             TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random choices, printed

    Clipping      the update is the sum of the clipped gradients of single samples, which plain runs of one window give
    Sensitivity   one more sample, however bad, changes the sum by at most R
    Noise         every element once, of the right deviation, independent; the same bits in every layout; ChaCha20's own
    Sampling      Poisson: independent coins; batches of any size, none too
    Trajectories  one computation at every stage, on any number of ranks, after a resume and in another layout
    Ledger        epsilon is the accountant's; the step that would exceed the target is not taken; the key stays secret
    Audit         what an attacker learns of canaries is below the claim
    Controls      programs with a fault (sigma halved, noise twice, cross term dropped) fail these tests
    Refusals      what would break the guarantee ends with exit code 2

The gradients come from the binary itself: a step of sgd with a huge rate leaves -LR x gradient in the weights, to 24 bits. All else is
numpy in fp64: the tests run themselves in .venv's Python where this one has no numpy.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
try:
    import numpy as np
except ImportError:
    VENV = os.path.join(ROOT, ".venv/bin/python")
    if sys.prefix != sys.base_prefix or not os.path.exists(VENV):
        sys.exit("test_dp.py needs numpy: scripts/setup.sh python gets it")
    os.execv(VENV, [VENV, *sys.argv])
import functools
import glob
import itertools
import math
import random
import re
import shutil
import struct
import subprocess
import tempfile
import typing
import unittest

import test_train
from test_faults import at_once, sample
from test_train import ALL, EXIT_INPUT, MODEL, SAME, SEED, Job, get, header, put, scratch, shard, train, train_all
from test_zero import LR, Check

CLIP_STYLES, CLIP_FUNCTIONS = ("unit", "flat", "stage"), ("abadi", "automatic")
KEY = "%064x" % random.Random(SEED).getrandbits(256)
# One step that leaves the private gradient in the weights. Noise is left out unless it is asked for.
PRIVATE = dict(optimizer="sgd", momentum=0, weight_decay=0, grad_clip=0, lr=LR, steps=1, threads=1, shuffle=None, dp_noise=0, dp_clip=1, dp_key=KEY)
# Relative error of a sum of clipped gradients: sums of up to 1e3 products of fp32, 24 bits each, in two orders, and a norm of them.
CLOSE = 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Models: any shape, with weights that give samples norms of all sizes

class Shape(typing.NamedTuple):
    layers: int
    heads: int
    channels: int
    vocab: int
    positions: int

    @property
    def padded(self):
        return -(-self.vocab // 128) * 128

    @property
    def units(self):
        return self.layers + 2

    def tensors(self):
        """(name, elements of a layer, layers) in the order of a file."""
        C = self.channels
        block = dict(ln1w=C, ln1b=C, qkvw=3 * C * C, qkvb=3 * C, attprojw=C * C, attprojb=C, ln2w=C, ln2b=C, fcw=4 * C * C, fcb=4 * C, fcprojw=4 * C * C, fcprojb=C)
        return [("wte", self.padded * C, 1), ("wpe", self.positions * C, 1), *((name, n, self.layers) for name, n in block.items()), ("lnfw", C, 1), ("lnfb", C, 1)]

    def parts(self):
        """(name, storage, unit, slice of the file) of each tensor of each layer. wte is the embedding's, whoever uses it."""
        at = 0
        for name, n, layers in self.tensors():
            for layer in range(layers):
                home = {"wte": (0, 0), "wpe": (1, 0)}.get(name, (self.layers + 2, self.layers + 1) if name.startswith("lnf") else (2 + layer, 1 + layer))
                yield name, *home, slice(at, at + n)
                at += n

    def elements(self):
        return sum(n * layers for _, n, layers in self.tensors())

    def used(self):
        """True but for the rows of wte that no token has."""
        mask = np.ones(self.elements(), bool)
        mask[self.vocab * self.channels:self.padded * self.channels] = False
        return mask

    def file(self, values):
        assert len(values) == self.elements()
        return put("model.bin", header(20240326, 3, self.positions, self.vocab, self.layers, self.heads, self.channels, self.padded), values.astype("<f4").tobytes())

    def random(self, seed=1, **scales):
        """A file of weights as those of a trained model; `scales` multiply tensors."""
        draw, values = np.random.default_rng(seed), np.zeros(self.elements())
        for name, _, _, where in self.parts():
            n = where.stop - where.start
            z = draw.standard_normal(n)
            values[where] = scales.get(name, 1) * (1 + 0.2 * z if name[-1] == "w" and name.startswith("ln") else 0.1 * z if name[-1] == "b" else z / math.sqrt(self.channels))
        return self.file(np.where(self.used(), values, 0))


GOLDEN = Shape(test_train.LAYERS, 3, test_train.CHANNELS, test_train.VOCAB, test_train.POSITIONS)
SHORT, LONG = Shape(2, 2, 48, 7, 8), Shape(2, 2, 16, 11, 64)  # ghost norms are cheaper in all matrices; in none


def values(path):
    """Of a model file, as fp64."""
    data = get(path)
    words = np.frombuffer(data, "<f4" if data[4] == 3 else "<u2", offset=1024)
    return (words if data[4] == 3 else (words.astype("<u4") << 16).view("<f4")).astype(float)


# ---------------------------------------------------------------------------------------------------------------------
# The reference: gradients of single samples, clipped and summed in fp64

def windows_of(tokens, T):
    return [tuple(tokens[at:at + T + 1]) for at in range(0, len(tokens) - T, T)]


KNOWN = {}  # gradients of single samples, which many tests share


def gradients(model, samples, T, **flags):
    """Of each sample's mean loss over its own targets: what sgd subtracts when the sample is all there is."""
    plain = dict(PRIVATE, dp_noise=None, dp_clip=None, dp_key=None, model=model, seq_len=T, batch_tokens=T, micro_batch=1, **flags)
    key = lambda s: (model, s, T, *sorted(flags.items()))
    missing = [s for s in dict.fromkeys(samples) if key(s) not in KNOWN]
    cases = [dict(plain, train=shard(s), val=shard(s), export=os.path.join(scratch(), "export")) for s in missing]
    train_all(cases)
    for s, case in zip(missing, cases):
        KNOWN[key(s)] = (values(model) - values(case["export"])) / LR
    return np.array([KNOWN[key(s)] for s in samples])


def groups(shape, style):
    """Slices of each group that is clipped as one."""
    found = {}
    for _, _, unit, where in shape.parts():
        found.setdefault(unit if style == "unit" else 0, []).append(where)
    return list(found.values())


def norm(values, slices):
    return math.sqrt(sum(np.dot(values[where], values[where]) for where in slices))


def clipped(shape, gradient, R, style, function):
    """One sample's contribution."""
    parts, out = groups(shape, style), np.zeros_like(gradient)
    threshold = R / math.sqrt(len(parts))
    for slices in parts:
        size = norm(gradient, slices)
        factor = min(1, threshold / (size + 1e-6)) if function == "abadi" else threshold / (size + 0.01)
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
        return dict(dict(PRIVATE, model=self.model, train=tokens, val=tokens, seq_len=self.T, batch_tokens=len(self.samples) * self.T, micro_batch=3,
                         export=os.path.join(scratch(), "export"), **self.flags), **changes)

    def gradients(self, **flags):
        return gradients(self.model, self.samples, self.T, **self.flags, **flags)

    def sums(self, cases):
        """What the runs of these cases added up: the private gradient times the expected batch."""
        cases = [self.case(**case) for case in cases]
        train_all(cases)
        return [(values(self.model) - values(case["export"])) / LR * (case["batch_tokens"] // self.T) for case in cases]

    def without_last(self):
        return self._replace(samples=self.samples[:-1])


def random_data(shape, T, count, windows="continuous", seed=SEED, **scales):
    """Samples of a small vocabulary: tokens come again and again."""
    draw, model = random.Random(seed), shape.random(seed, **scales)
    if windows == "document":
        samples = [(0, *(draw.randrange(1, shape.vocab) for _ in range(draw.choice((1, T // 2, T))))) for _ in range(count)]
        return Private(shape, model, samples, T, dict(windows=windows))
    tokens = [draw.randrange(shape.vocab) for _ in range(count * T + 1)]
    return Private(shape, model, windows_of(tokens, T), T, {})


class PrivateCheck(Check):
    def assert_sum(self, data, found, R, style, function, contributions, what, tolerance=CLOSE):
        """Tensor by tensor, of each layer: the error against the sum of the norms, as contributions may cancel each other."""
        expected = [clipped(data.shape, g, R, style, function) for g in contributions]
        total, unit_size = sum(expected), {}
        for name, _, unit, where in data.shape.parts():
            unit_size[unit] = math.hypot(unit_size.get(unit, 0), sum(norm(c, [where]) for c in expected))
        for name, storage, unit, where in data.shape.parts():
            size = sum(norm(c, [where]) for c in expected)
            # A tensor whose gradient is tiny beside its unit's has its rounding errors: key biases have nothing else.
            self.assertLessEqual(norm(found - total, [where]), tolerance * (size + 0.01 * unit_size[unit]), f"{name} of storage {storage}: {what}")
        self.assertTrue((found[~data.shape.used()] == 0).all(), f"padding rows: {what}")

    def thresholds(self, data, style, contributions):
        """R at which about half of the groups are clipped, all of them, and none."""
        sizes = [norm(g, slices) * math.sqrt(len(groups(data.shape, style))) for g in contributions for slices in groups(data.shape, style)]
        return float(np.median(sizes)), min(sizes) / 10, 10 * max(sizes)


# ---------------------------------------------------------------------------------------------------------------------
class Clipping(PrivateCheck):
    # Shapes and lengths; gradients too small to be clipped by anything but a tiny R, where the constants of the functions count; and large ones.
    DATA = [(SHORT, 5, "continuous", {}), (SHORT, 8, "document", {}), (LONG, 64, "continuous", {}), (LONG, 60, "document", {}), (GOLDEN, 20, "continuous", {}),
            (SHORT, 8, "continuous", dict(wte=1e-4, lnfw=1e-4, lnfb=1e-4)), (LONG, 64, "document", dict(lnfw=1e4))]

    def data(self, index, count):
        shape, T, windows, scales = self.DATA[index]
        return random_data(shape, T, count, windows, **scales)

    def layouts(self, seed):
        """In a shuffled order: of each seed another one. Three samples a micro-batch, or one, or four."""
        cases = [dict(ranks=ranks, zero=stage, micro_batch=rows, recompute=how) for ranks in (1, 2, 3, 4) for stage in range(4) for rows in (1, 3, 4) for how in ("none", "block")]
        random.Random(f"{SEED}{seed}").shuffle(cases)
        return cases

    def check(self, data, tolerance=CLOSE, **changes):
        contributions = data.gradients(**({"dtype": changes["dtype"]} if "dtype" in changes else {}))
        R = self.thresholds(data, changes["dp_clip_style"], contributions)[changes.pop("R")]
        (found,) = data.sums([dict(dp_clip=R, **changes)])
        self.assert_sum(data, found, R, changes["dp_clip_style"], changes["dp_clip_function"], contributions, changes, tolerance)

    def test_the_reference(self):
        """Gradients of single samples, added up, are the plain gradient of all."""
        for index in sample([i for i, (_, _, windows, _) in enumerate(self.DATA) if windows == "continuous"], 2):
            data = self.data(index, 4)
            (found,) = data.sums([dict(dp_noise=None, dp_clip=None, dp_key=None, shuffle=0)])
            self.assert_sum(data, found, 1e30, "flat", "abadi", data.gradients(), self.DATA[index])

    def test_each_way(self):
        """Styles, functions, half of the samples clipped, all, none; of each data set another layout."""
        cases = [(index, dict(dp_clip_style=style, dp_clip_function=function, R=R)) for index in range(len(self.DATA)) for style in CLIP_STYLES for function in CLIP_FUNCTIONS
                 for R in range(3)]
        def check(case):
            index, changes = case
            self.check(self.data(index, 5), **changes, **self.layouts(case)[0])
        at_once(check, [case for index in range(len(self.DATA)) for case in sample([c for c in cases if c[0] == index], 2)])

    def test_layouts(self):
        """Ranks, stages, accumulation, recomputation: of 7 samples some ranks have more than others."""
        cases = self.layouts("layouts") if ALL else self.layouts("layouts")[:3]
        for how in [dict(ranks=4, ranks_per_node=2, zero=3, zero_hpz_partition_size=2, micro_batch=1), dict(ranks=2, zero=3, zero_hpz_partition_size=2)]:
            cases.append(how)
        draw = random.Random(SEED)
        at_once(lambda case: self.check(self.data(2 * draw.randrange(2), 7), dp_clip_style=draw.choice(CLIP_STYLES), dp_clip_function="abadi", R=0, **case), cases)

    def test_bf16(self):
        # The weights, and so the gradients left in them, have 8 bits: 2^-9 of each element, in both runs.
        at_once(lambda style: self.check(self.data(2, 4), 2**-8, dtype="bf16", dp_clip_style=style, dp_clip_function="abadi", R=0, zero=3, ranks=2), ("unit", "flat"))

    def test_no_noise_and_nothing_clipped(self):
        """That is the plain run: losses and weights."""
        for changes in sample([dict(optimizer="adamw", lr="1e-3"), dict(optimizer="sgd", lr=0.1, momentum=0.9)], 1):
            same = dict(changes, steps=5, batch_tokens=28 * 20, seq_len=20, ranks=2, grad_clip=0)
            plain, private = (dict(same, export=os.path.join(scratch(), "export"), **more) for more in
                              (dict(shuffle=0), dict(dp_noise=0, dp_clip="1e6", dp_clip_style="flat", dp_show_private=1, shuffle=None)))
            expected, found = train_all([plain, private])
            expected.export, found.export = plain["export"], private["export"]
            self.assert_near(found, expected, changes)


# ---------------------------------------------------------------------------------------------------------------------
class Sensitivity(PrivateCheck):
    T, R = 8, 0.5

    def worst(self):
        """Data sets whose last sample is as bad as can be."""
        shape, T = SHORT, self.T
        others = [(0, *words) for words in ((1, 2, 3, 4, 5, 6, 1, 2), (3, 3, 5), (6, 5, 4, 3, 2, 1, 6, 5))]
        extra = dict(repeated=(0, *[3] * T), like_another=others[0], one_target=(0, 6), alternating=(0, *[1, 2] * (T // 2)))
        scales = dict(plain={}, large=dict(lnfw=1e3), huge=dict(lnfw=1e9, fcprojw=1e3), tiny=dict(wte=1e-6, lnfw=1e-6, lnfb=1e-6), steep=dict(wte=30, qkvw=30))
        for name, how in itertools.product(extra, scales):
            yield f"{name}, {how}", Private(shape, shape.random(SEED, **scales[how]), [*others, extra[name]], T, dict(windows="document"))

    def check(self, data, style, function, what, binary=test_train.BINARY, **layout):
        """The difference that the last sample makes, of the whole and of each group; by what it should be, too."""
        flags = dict(dp_clip=self.R, dp_clip_style=style, dp_clip_function=function, binary=binary)
        (without,) = data.without_last().sums([flags])
        (found,) = data.sums([dict(flags, **layout)])
        difference, parts = found - without, groups(data.shape, style)
        for slices in [[slice(None)]] + parts:
            most = self.R if slices == [slice(None)] else self.R / math.sqrt(len(parts))
            # Sums of four samples of norm R in fp32, in two orders: 24 bits each.
            self.assertLessEqual(norm(difference, slices), most * (1 + CLOSE), what)
        return norm(difference, [slice(None)])

    def test_worst_samples(self):
        layouts = [dict(ranks=ranks, zero=stage, micro_batch=rows) for ranks in (1, 2, 4) for stage in range(4) for rows in (1, 4)]
        cases = [(*data, style, function) for data in self.worst() for style in CLIP_STYLES for function in CLIP_FUNCTIONS]
        def check(case):
            what, data, style, function = case
            layout = random.Random(f"{SEED}{what}{style}").choice(layouts)
            size = self.check(data, style, function, (what, style, function, layout), **layout)
            if "large" in what:
                self.assertGreater(size, 0.9 * self.R, (what, style, function))
        at_once(check, sample(cases, 8))

    def test_a_sample_that_overflows(self):
        """Gradients or norms beyond fp32: the sample is bounded, or left out; the others count as ever."""
        shape = SHORT
        for size in sample((1e10, 1e20, 1e30, 1e38), 2):
            weights = values(shape.random(SEED))
            where = {name: part for name, _, _, part in shape.parts()}
            # Token 6 is so unlikely that only a sample that holds it meets its row of wte.
            weights[where["lnfw"]], weights[where["lnfb"]], weights[6 * shape.channels:7 * shape.channels] = 0.1, 3, -size
            data = Private(shape, shape.file(weights), [(0, 1, 2, 3), (0, 4, 5, 4), (0, 6, 6, 6)], self.T, dict(windows="document"))
            for style in CLIP_STYLES:
                self.check(data, style, "abadi", (size, style))
            (alone,) = data.without_last().sums([{}])
            self.assertGreater(norm(alone, [slice(None)]), 0.1, "the others")


# ---------------------------------------------------------------------------------------------------------------------
# A slow generator: RFC 8439's block function on arrays, and normal numbers of it as noise.h says

def chacha20(key, nonce, counters):
    """(blocks, 16) words."""
    rotate = lambda x, n: (x << np.uint32(n)) | (x >> np.uint32(32 - n))
    words = [0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, *struct.unpack("<8I", bytes.fromhex(key)), None, *nonce]
    start = [counters.astype(np.uint32) if word is None else np.full(len(counters), word, np.uint32) for word in words]
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
    words = chacha20(key, (domain << 24 | part, step & 0xffffffff, step >> 32), np.arange(-(-n // 16))).astype(float).reshape(-1, 2)
    low = np.floor(words[:, 1] / 256)
    u = (words[:, 0] + (words[:, 1] - 256 * low + 0.5) / 256) / 2**32
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * low / 2**24
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:n]


class Silent(typing.NamedTuple):
    """A model of zeros: no sample has a gradient, so that noise is all there is. One step leaves -noise in the weights, exactly."""
    shape: Shape = GOLDEN
    samples: int = 8  # a power of two, so that nothing is rounded; and 28 windows are there

    def case(self, **changes):
        zeros = self.shape.file(np.zeros(self.shape.elements()))
        return dict(dict(PRIVATE, model=zeros, seq_len=20, batch_tokens=20 * self.samples, micro_batch=3, lr=1, dp_noise=1, dp_clip=1, export=os.path.join(scratch(), "export")),
                    **changes)

    def noise(self, cases):
        cases = [self.case(**case) for case in cases]
        train_all(cases)
        return [-values(case["export"]) * self.samples for case in cases]

    def storages(self, noise):
        """The noise of each, in the order of its elements."""
        found = [[] for _ in range(self.shape.layers + 3)]
        for _, storage, _, where in self.shape.parts():
            found[storage].append(noise[where])
        found[0] = [found[0][0][:self.shape.vocab * self.shape.channels]]
        return [np.concatenate(parts) for parts in found]


class Noise(PrivateCheck):
    def assert_normal(self, z, what):
        """Standard normal numbers: sums of 2nd and 4th powers, the mean, and neighbours, each within 5 of its own deviations (6e-7)."""
        n = len(z)
        for name, found, expected, variance in (("mean", z.mean(), 0, 1), ("variance", (z**2).mean(), 1, 2), ("kurtosis", (z**4).mean(), 3, 96),
                                                ("neighbours", (z[1:] * z[:-1]).mean(), 0, 1), ("pairs", (z[2:]**2 * z[:-2]**2).mean(), 1, 8)):
            self.assertLess(abs(found - expected), 5 * math.sqrt(variance / n), f"{name}: {what}")

    def assert_unlike(self, a, b, what):
        n = min(len(a), len(b))
        self.assertLess(abs(np.dot(a[:n], b[:n])) / n, 5 / math.sqrt(n), what)

    def check_deviation(self, binary=test_train.BINARY):
        """In every element (sigma R / S)^2, whatever the layout; nothing in the padding."""
        silent, draw = Silent(), random.Random(f"{SEED}deviation")
        sigma, R = draw.uniform(0.5, 8), draw.uniform(0.1, 10)
        case = dict(binary=binary, dp_noise=sigma, dp_clip=R, ranks=draw.choice((2, 4)), zero=draw.randrange(4))
        (noise,) = silent.noise([case])
        for storage, part in enumerate(silent.storages(noise)):
            self.assert_normal(part / (sigma * R), (storage, case))
        self.assertFalse(noise[~silent.shape.used()].any(), "padding rows")
        return noise, sigma * R

    def test_deviation(self):
        noise, deviation = self.check_deviation()
        parts = Silent().storages(noise / deviation)
        for a, b in itertools.combinations(range(len(parts)), 2):
            self.assert_unlike(parts[a], parts[b], f"storages {a} and {b}")
        whole = noise[GOLDEN.used()] / deviation
        for ranks in (2, 3, 4):  # shards of one storage, and of all
            for part in [*parts[2:4], whole]:
                pieces = np.array_split(part, ranks)
                for a, b in itertools.combinations(pieces, 2):
                    self.assert_unlike(a, b, f"shards of {ranks}")

    def test_the_same_in_every_layout(self):
        """Bit by bit: stages, ranks, nodes, accumulation, threads; any binary's vector code."""
        layouts = [dict(ranks=ranks, zero=stage, micro_batch=rows) for ranks in (1, 2, 3, 4) for stage in range(4) for rows in (1, 4)]
        layouts += [dict(ranks=4, ranks_per_node=2, zero=3, zero_hpz_partition_size=2), dict(ranks=2, threads=2), dict(ranks=3, threads=3, zero=3),
                    dict(ranks=2, zero=3, zero_quantized_weights=1)]
        silent = Silent()
        first, *others = silent.noise([{}, *sample(layouts, 6)])
        for noise, layout in zip(others, sample(layouts, 6)):
            self.assertTrue((noise == first).all(), layout)
        self.assertGreater(len(np.unique(first)), 1000)

    def test_steps_and_keys(self):
        """Each has its own numbers. Weights of 1e-30 have no gradient either."""
        silent, lr = Silent(), 2.0**-100
        another = "%064x" % (int(KEY, 16) ^ 1)
        after = [noise / lr for noise in silent.noise([dict(lr=lr, steps=1), dict(lr=lr, steps=2), dict(lr=lr, steps=3), dict(lr=lr, steps=1, dp_key=another)])]
        steps = {"step 1": after[0], "step 2": after[1] - after[0], "step 3": after[2] - after[1], "another key": after[3]}
        for name, noise in steps.items():
            self.assert_normal(noise[GOLDEN.used()], name)
        for a, b in itertools.combinations(steps, 2):
            self.assert_unlike(steps[a][GOLDEN.used()], steps[b][GOLDEN.used()], (a, b))

    def test_against_a_slow_generator(self):
        """ChaCha20's numbers of (key, storage, step, element), on a grid of 2^-12 of the deviation or less."""
        silent, sigma = Silent(), random.Random(SEED).uniform(0.5, 4)
        (noise,) = silent.noise([dict(dp_noise=sigma, ranks=2, zero=2)])
        grid = 2.0 ** (math.floor(math.log2(sigma)) - 12)
        self.assertTrue((noise / grid == np.round(noise / grid)).all(), "a grid")
        for storage, part in enumerate(silent.storages(noise)):
            expected = sigma * normals(KEY, 1, storage, FIRST_STEP, len(part))
            # Half of the grid, and fp32's rounding of sine, cosine and logarithm: 2^-20 of numbers of up to 6.
            self.assertLess(abs(part - expected).max(), grid / 2 + sigma * 6 * 2**-20, storage)

    def test_empty_batches(self):
        """Where the expected batch is one sample, every third has none: noise is added nevertheless, on all ranks, and nobody hangs."""
        jobs = self.trained([dict(PRIVATE, ranks=ranks, zero=stage, steps=12, batch_tokens=20, seq_len=20, micro_batch=1, lr=1e-3, dp_noise=1, dp_show_private=1)
                             for ranks, stage in [(1, 0), *sample(itertools.product((2, 4), range(4)), 4)]])
        for job in jobs:
            taken = [len(s) for s, in job.steps("samples")]
            self.assertIn(0, taken)
            self.assertEqual(job.steps("samples"), jobs[0].steps("samples"))
            self.assertLess(distance(job.export, jobs[0].export), SAME)


if __name__ == "__main__":
    print("seed of sampled tests:", SEED, "(set TEST_SEED to repeat)", flush=True)
    in_memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1 << 30
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else None) as test_train.TEMPORARY:
        unittest.main()
