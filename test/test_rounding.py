#!/usr/bin/env python3
"""test_rounding.py: --stochastic-rounding, of the real program under mpirun, from outside.

    python3 test/test_rounding.py       TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random
                                        choices, printed

    Formula       every bf16 parameter is what the formula of docs/formats.md, written again here,
                  makes of its fp32 master, in any
                  layout and on both builds
    Independence  draws of two blocks, two steps and two seeds have nothing to do with each other;
                  their mean is right

Standard library only.
"""

import array
import math
import os
import random
import re
import struct

import harness
from harness import (
    ALL, CHANNELS, EMULATED, LAYERS, MODEL, SEED, T, TestCase, checkpoint, checkpoints, get, put,
    scratch, tensors, train, train_all,
)

PARAMETERS = 0  # the state of a checkpoint
WORD = (1 << 64) - 1
DESCRIPTOR = "layers=3,heads=3,channels=48,vocab=101"  # the golden model, with T positions


def sample(items, count):
    return items if ALL else random.Random(SEED).sample(items, count)


# --------------------------------------------------------------------------------------------------
# The formula, as docs/formats.md has it


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def key(seed, updates, storage):
    return mix64(
        mix64(mix64(mix64(seed) ^ int.from_bytes(b"rounding", "big")) ^ updates) ^ mix64(storage)
    )


def rounded(masters, seed, updates, storage):
    """bf16 words of a storage, whole."""
    of = key(seed, updates, storage)
    return [
        (bits + (mix64(of ^ mix64(i)) >> 48)) >> 16
        for i, bits in enumerate(array.array("I", masters.tobytes()))
    ]


# --------------------------------------------------------------------------------------------------
# Files


def masters_of(folder):
    """The fp32 parameters of a checkpoint: {storage: elements}."""
    pieces = []
    for name in sorted(os.listdir(folder)):
        if not name.startswith("state_"):
            continue
        data = get(os.path.join(folder, name))
        (count,) = struct.unpack_from("<Q", data, 16)
        at = 24 + 32 * count
        for i in range(count):
            state, storage, first, elements = struct.unpack_from("<4q", data, 24 + 32 * i)
            if state == PARAMETERS:
                pieces.append((storage, first, array.array("f", data[at : at + 4 * elements])))
            at += 4 * elements
    found = {}
    for storage, _, piece in sorted(pieces, key=lambda p: p[:2]):
        found.setdefault(storage, array.array("f")).extend(piece)
    return found


def storages_of(path):
    """{storage: bf16 words} of an exported file of the golden model; each block has a storage here,
    shared or not."""
    data = get(path)
    positions, words = struct.unpack_from("<i", data, 8)[0], array.array("H", data[1024:])
    of_tensors = [elements for elements, _ in tensors()]
    of_tensors[1] = positions * CHANNELS
    owners = [0, 1, *[None] * 12, LAYERS + 2, LAYERS + 2]
    found, at = {storage: [] for storage in range(LAYERS + 3)}, 0
    for elements, owner in zip(of_tensors, owners):
        for storage in range(2, LAYERS + 2) if owner is None else [owner]:
            n = elements // (LAYERS if owner is None else 1)
            found[storage].extend(words[at : at + n])
            at += n
    assert at == len(words)
    return found


def updates_of(folder):
    return int(re.search(rb"(?m)^updates (\d+)$", get(os.path.join(folder, "manifest"))).group(1))


# --------------------------------------------------------------------------------------------------
RUN = dict(
    dtype="bf16", stochastic_rounding=1, steps=3, save_every=3, micro_batch=1, batch_tokens=6 * T,
    seed=11,
)
SHARES = {"all": [2, 2, 2], "2": [2, 2, 3]}  # the storage of each block
HOST, DEVICE = (dict(offload="optimizer", offload_update=update) for update in ("host", "device"))
LAYOUTS = [
    dict(ranks=2, zero=1),
    dict(ranks=3, zero=2),
    dict(ranks=4, zero=3),
    dict(ranks=2, zero=3, zero_quantized_weights=1),
    dict(optimizer="sgd", lr=0.05, threads=3),
    dict(ranks=2, pipeline="2"),
    dict(ranks=3, pipeline="1:2,4:1", zero=1),
    dict(cyclic="v1", cyclic_stages=2),
    dict(ranks=2, cyclic="v2", grad_clip=0),
    dict(model=DESCRIPTOR, share="all"),
    dict(model=DESCRIPTOR, ranks=2, share="2", zero=3),
    dict(skip_grad_z=0.5, steps=8, save_every=8),
    HOST,
    DEVICE,
    dict(HOST, ranks=2, zero=2),
    dict(DEVICE, ranks=2, zero=3, offload="params"),
    dict(HOST, offload_delay=1),
    dict(HOST, optimizer="sgd"),
    dict(binary=EMULATED),
    dict(binary=EMULATED, ranks=3, zero=3),
    dict(HOST, binary=EMULATED),
    dict(DEVICE, binary=EMULATED, offload="params"),
]


class Formula(TestCase):
    def check(self, case):
        folder = checkpoint(case["out"], checkpoints(case["out"])[-1])
        updates = updates_of(folder)
        expected = {
            storage: rounded(masters, case["seed"], updates, storage)
            for storage, masters in masters_of(folder).items()
        }
        found = storages_of(case["export"])
        self.assertEqual(found.pop(LAYERS + 2), expected[max(expected)])
        for storage, words in found.items():
            of = (
                storage
                if storage < 2 or "share" not in case
                else SHARES[case["share"]][storage - 2]
            )
            self.assertEqual(words, expected[of], f"storage {storage} of {case}")

    def test_layouts(self):
        cases = [dict(RUN, **layout) for layout in [dict(), *sample(LAYOUTS, 3)]]
        cases = [
            dict(
                case,
                out=os.path.join(scratch(), "out"),
                export=os.path.join(scratch(), "export.bin"),
            )
            for case in cases
        ]
        train_all(cases)
        for case in cases:
            with self.subTest(**case):
                self.check(case)

    def test_same_masters_same_bits(self):
        """Of one file's masters every layout and build makes the same parameters."""
        layouts = [
            dict(), dict(ranks=4, zero=3), dict(ranks=2, pipeline="2"),
            dict(binary=EMULATED, ranks=2, zero=1), dict(HOST, binary=EMULATED),
        ]
        exports = [os.path.join(scratch(), "export.bin") for _ in layouts]
        train_all(
            [
                dict(RUN, steps=0, save_every=0, export=export, **layout)
                for export, layout in zip(exports, layouts)
            ]
        )
        for layout, export in zip(layouts, exports):
            self.assertEqual(get(export), get(exports[0]), layout)

    def test_resume(self):
        """Draws go on where they were."""
        whole, out = os.path.join(scratch(), "export.bin"), os.path.join(scratch(), "out")
        train(**dict(RUN, steps=5, save_every=0, export=whole))
        train(**dict(RUN, out=out))
        again = os.path.join(scratch(), "export.bin")
        train(ranks=1, **dict(RUN, out=out, resume=1, steps=5, export=again))
        self.assertEqual(get(again), get(whole))


# --------------------------------------------------------------------------------------------------
HALF_WAY = 1 + 2**-8  # between 1 and the next bf16: up and down are as likely


class Independence(TestCase):
    """All masters lie half way between two bf16 numbers, and no update moves them: of two draws,
    half agree."""

    STEPS = 6

    @classmethod
    def setUpClass(cls):
        model = put(
            "model.bin",
            get(MODEL)[:1024],
            array.array("f", [HALF_WAY]) * (len(get(MODEL)) // 4 - 256),
        )
        cases = [
            *[dict(steps=steps) for steps in range(cls.STEPS)],
            dict(steps=0, seed=RUN["seed"] + 1),
        ]
        cases = [
            {
                **RUN,
                "save_every": 0,
                "model": model,
                "lr": 0,
                "export": os.path.join(scratch(), "export.bin"),
                **case,
            }
            for case in cases
        ]
        train_all(cases)
        *cls.after, cls.other_seed = [
            storages_of(case["export"]) for case in cases
        ]  # so many steps

    def test_both_neighbours(self):
        for found in [*self.after, self.other_seed]:
            self.assertEqual(set(sum(found.values(), [])), {0x3F80, 0x3F81})

    def check(self, a, b, what):
        n = len(a)
        self.assertEqual(len(b), n)
        agree = sum(x == y for x, y in zip(a, b))
        self.assertLess(
            abs(agree - n / 2), 5 * math.sqrt(n) / 2, f"{what}: {agree} of {n} agree"
        )  # 5 standard deviations
        shifted = sum(
            x == y for x, y in zip(a[::2] + a[1::2], b[1::2] + b[::2])
        )  # neighbours in each other's place
        self.assertLess(
            abs(shifted - n / 2),
            5 * math.sqrt(n) / 2 + 1,
            f"{what}: {shifted} of {n} agree with the other's neighbours",
        )

    def test_blocks(self):
        for a in range(2, LAYERS + 2):
            for b in range(2, a):
                self.check(self.after[0][a], self.after[0][b], f"blocks {a} and {b}")

    def test_storages(self):
        found = self.after[0]
        n = min(map(len, found.values()))
        for storage in range(1, LAYERS + 3):
            self.check(found[0][:n], found[storage][:n], f"storages 0 and {storage}")

    def test_steps(self):
        for a in range(self.STEPS):
            for b in range(a):
                for storage in self.after[a]:
                    self.check(
                        self.after[a][storage],
                        self.after[b][storage],
                        f"updates {a} and {b}, storage {storage}",
                    )

    def test_seeds(self):
        for storage, words in self.after[0].items():
            self.check(words, self.other_seed[storage], f"storage {storage}")

    def test_mean(self):
        """Half of all elements go up in each step, and over the steps each goes up as often as
        coins fall."""
        columns = [[word == 0x3F81 for word in sum(found.values(), [])] for found in self.after]
        n = len(columns[0])
        for column in columns:
            self.assertLess(abs(sum(column) - n / 2), 5 * math.sqrt(n) / 2)
        ups = [sum(row) for row in zip(*columns)]
        for count in range(self.STEPS + 1):
            expected = n * math.comb(self.STEPS, count) / 2**self.STEPS
            self.assertLess(
                abs(ups.count(count) - expected),
                6 * math.sqrt(expected),
                f"elements that go up {count} times",
            )


if __name__ == "__main__":
    harness.main()
