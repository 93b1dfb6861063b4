#!/usr/bin/env python3
"""test_zero.py: ZeRO stages 1-3 and ZeRO++ of the real program under mpirun, from outside.

    python3 test/test_zero.py           TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the random
                                        choices, printed

    Skipped     an update that is skipped changes no weight, at any stage
    Numbers     memory and traffic of each rank are what a plain count of slices and messages gives,
                to the byte
    Weights     qwZ's weights are those that a slow quantizer makes, on any number of ranks
    Gradients   qgZ's sums are those that a slow quantizer makes; error feedback helps
    Lost        a rank that is lost in a gather ends the job, and the message names the collective,
                the storage and the rank
    Emulated    the GPU build does the same

Every run is checked for memory and traffic: as predicted (harness.Job) and as counted here
(Check.numbers). That stages are one computation is in test_layouts.py, what the papers say of
memory and traffic in test_dry_run.py. Standard library only.
"""

import array
import itertools
import json
import math
import os
import random
import re
import socket
import unittest

import harness
from harness import (
    ALL, CHANNELS, EMULATED, EXIT_PEER, Faulty, Job, LAYERS, MODEL, NORM_CHUNK, PADDED, POSITIONS,
    SAME, SEED, T, TRAIN, VOCAB, at_once, command_line, get, golden_tokens, put, sample, scratch,
    shard, slices, tensors, tokenizer, train, train_all, weights,
)

QWZ, QGZ = dict(zero=3, zero_quantized_weights=1), dict(zero_quantized_gradients=1)
PLUS_PLUS = dict(QWZ, zero_hpz_partition_size=2, **QGZ)
LR = (
    1
    << 19
    # such an sgd step leaves -LR x gradient in the weights, to 24 bits: what is subtracted from is
    # too small to matter
)
SAME_FLIPPED = 1e-4  # where a rounding error now and then flips a code of INT8
GRADIENT = dict(
    optimizer="sgd", momentum=0, weight_decay=0, grad_clip=0, lr=LR, steps=1, micro_batch=1,
    threads=1,
)


# --------------------------------------------------------------------------------------------------
# What a run must take and send, counted another way than the program does: a slice and a message at
# a time


def storages(model=None):
    """Elements of wte, wpe, the blocks and lnf: of the golden model, or of one given as text, whose
    positions are T."""
    if model in (None, MODEL):
        padded, positions, layers, C = PADDED, POSITIONS, LAYERS, CHANNELS
    else:
        shape = dict(pair.split("=") for pair in model.split(","))
        padded, positions, layers, C = (
            -(-int(shape["vocab"]) // 128) * 128, T, int(shape["layers"]), int(shape["channels"]),
        )
    return [padded * C, positions * C, *[12 * C**2 + 13 * C] * layers, 2 * C]


class Layout:
    """What the flags of a run say."""

    def __init__(self, changes):
        flags = dict(TRAIN, **{name.replace("_", "-"): value for name, value in changes.items()})
        flag = lambda name, default: flags.get(name) or default
        self.ranks, self.per_node, self.stage, self.alpha = (
            flag("ranks", 1), flag("ranks-per-node", 0), flag("zero", 0),
            flag("zero-hpz-partition-size", 1),
        )
        self.word = 2 if flag("dtype", "fp32") == "bf16" else 4
        self.reduce_word = 2 if flag("reduce-dtype", "fp32") == "bf16" else 4
        self.moments = 1 if flag("optimizer", "adamw") == "sgd" else 2
        self.muon, self.channels = flag("optimizer", "adamw") == "muon", CHANNELS
        self.qwz, self.qgz = flag("zero-quantized-weights", 0), flag("zero-quantized-gradients", 0)
        self.bits, self.block = int(flag("zero-gradient-bits", 4)), flag("zero-quant-block", 256)
        self.grain = max(
            NORM_CHUNK, self.block if self.qwz or self.qgz else 1
        )  # slices are cut at multiples of it
        samples = flags["batch-tokens"] // flags["seq-len"]
        self.micro_steps = -(--(-samples // self.ranks) // flags["micro-batch"])
        self.storages = storages(flags["model"])

    def partition(self, me):
        """Ranks that together keep a copy of the parameters: consecutive ones; the last may be
        fewer."""
        first = me - me % self.alpha
        return range(first, min(first + self.alpha, self.ranks))


def records(elements, bits, block):
    """Bytes of so many quantized elements from the beginning of a block on: a scale, codes, whole
    words."""
    full, rest = divmod(elements, block)
    size = lambda n: 4 + -(-n * bits // 32) * 4
    return full * size(block) + (size(rest) if rest else 0)


class Nodes:
    """Members of a group on their nodes: two levels where they lie evenly on several, else one."""

    def __init__(self, members, per_node):
        self.node = [rank // per_node if per_node else 0 for rank in members]
        counts = {node: self.node.count(node) for node in self.node}
        even = len(counts) > 1 and set(counts.values()) != {1} and len(set(counts.values())) == 1
        self.levels = [
            (node, self.node[:i].count(node)) if even else (0, i)
            for i, node in enumerate(self.node)
        ]  # (node, place in it) of each

    def sent(self, gathers, bytes_, me):
        """(inside, between nodes) that member `me` sends where slice i is of bytes_[i]."""
        total, my_level = [0, 0], self.levels[me]

        def send(to, n):
            if to != me:
                total[self.node[to] != self.node[me]] += n

        for i, level in enumerate(self.levels):
            beside = self.levels.index(
                (my_level[0], level[1])
            )  # in my node, in the place of the slice's owner
            if (
                gathers and i == me
            ):  # my slice to the same place in the other nodes, then inside mine
                for to, (node, place) in enumerate(self.levels):
                    if node == my_level[0] or place == my_level[1]:
                        send(to, bytes_[i])
            elif gathers and level[1] == my_level[1]:  # what came from another node, inside mine
                for to, (node, _) in enumerate(self.levels):
                    if node == my_level[0]:
                        send(to, bytes_[i])
            if (
                not gathers
            ):  # to my node's member in the owner's place, which sends the sum of the node on
                send(beside, bytes_[i])
                if beside == me and i != me:
                    send(i, bytes_[i])
        return total


def expected_memory(run, me=0):
    """Bytes of parameters, gradients and optimizer states on a rank."""
    own = sum(slices(n, run.ranks, run.grain)[me] for n in run.storages)
    part = lambda stage: own if run.stage >= stage else sum(run.storages)
    partition = run.partition(me)
    copy = (
        sum(slices(n, len(partition))[me - partition[0]] for n in run.storages)
        if run.alpha > 1
        else 0
    )
    masters = 4 if run.word == 2 else 0
    return {
        "parameters": run.word * (part(3) + copy),
        "gradients": 4 * part(2),
        "optimizer": (masters + 4 * run.moments) * part(1),
    }


WAVE = 4  # matrices of a wave for each rank: as matrices.h


def directions_away(run, me=0):
    """(inside, between nodes): elements of matrices that Muon makes orthogonal elsewhere, and those
    that it does here for others: sent there, and sent back. Of GPT-2's blocks, in the order of
    their storage."""
    C, blocks = run.channels, run.storages[2:-1]
    shapes = {"q": (C, C), "k": (C, C), "v": (C, C), "o": (C, C), "fc": (4 * C, C)}
    shapes["proj"] = C, 4 * C
    # where they begin: after ln1 w b; qkv w b; attproj w b; ln2 w b; fc w b
    C2 = C * C
    begins = [2 * C, 2 * C + C2, 2 * C + 2 * C2, 5 * C + 3 * C2, 8 * C + 4 * C2, 12 * C + 8 * C2]
    begins = dict(zip(shapes, begins))
    cost = lambda a, b: 4 * min(a, b) ** 2 * max(a, b) + 2 * min(a, b) ** 3
    widest = getattr(run, "widest", run.ranks)  # of a pipeline's stages
    wave = max(1, -(-WAVE * widest // len(shapes))) if widest > 1 else 1
    node = lambda rank: rank // run.per_node if run.per_node else 0
    parts, sent = slices(blocks[0], run.ranks, run.grain), [0, 0]
    bounds = [sum(parts[:r]) for r in range(run.ranks + 1)]
    inside = lambda name, r: max(
        0,
        min(begins[name] + math.prod(shapes[name]), bounds[r + 1]) - max(begins[name], bounds[r]),
    )
    for at in range(0, len(blocks), wave):
        work = [0] * run.ranks
        matrices = [name for _ in blocks[at : at + wave] for name in shapes]
        for name in sorted(matrices, key=lambda name: -cost(*shapes[name])):
            free = [r for r in range(run.ranks) if work[r] == min(work)]
            home = max(free, key=lambda r: inside(name, r))  # the first of those with most of it
            work[home] += cost(*shapes[name])
            for r in range(run.ranks):
                if r != home and me in (r, home):
                    sent[node(r) != node(home)] += inside(name, r)
    return sent


def expected_traffic(run, me=0):
    """Bytes that a rank sends in a step: {kind: [inside, between nodes]}."""
    partition, last = run.partition(me), len(run.storages) - 1
    everyone, near = Nodes(range(run.ranks), run.per_node), Nodes(partition, run.per_node)
    sent = {
        "all_gather": [0, 0], "reduce_scatter": [0, 0], "all_reduce": [0, 0], "all_to_all": [0, 0],
        "send": [0, 0],
    }

    def add(kind, times, group, bytes_, member):
        for link, n in enumerate(group.sent(kind == "all_gather", bytes_, member)):
            sent[kind][link] += times * n

    for storage, n in enumerate(run.storages):
        parts = slices(n, run.ranks, run.grain)
        reductions = run.micro_steps if run.stage >= 2 else 1
        add(
            "all_to_all" if run.qgz else "reduce_scatter",
            reductions,
            everyone,
            [records(p, run.bits, run.block) if run.qgz else run.reduce_word * p for p in parts],
            me,
        )
        gathers = (
            (1 if storage in (1, last) else 2) * run.micro_steps if run.stage == 3 else 1
        )  # wpe and lnf are used by one unit, once in a micro-step
        far = 1 if run.alpha > 1 else gathers
        add(
            "all_gather",
            far,
            everyone,
            [records(p, 8, run.block) if run.qwz else run.word * p for p in parts],
            me,
        )
        if run.alpha > 1:
            add(
                "all_gather",
                gathers - far,
                near,
                [run.word * p for p in slices(n, len(partition))],
                me - partition[0],
            )
    if run.muon:
        for link, n in enumerate(directions_away(run, me)):
            sent["all_to_all"][link] += 4 * n
    return sent


class Check(harness.TestCase):
    def numbers(self, changes, job):
        """Rank 0's memory and traffic; after an update that was skipped nothing new is sent."""
        run, end = Layout(changes), job.end()
        self.assertEqual(
            {
                kind: end["memory"]["measured"][kind]
                for kind in ("parameters", "gradients", "optimizer")
            },
            expected_memory(run),
            changes,
        )
        found = {
            kind: [end["traffic"]["measured"][link][kind] for link in ("intra", "inter")]
            for kind in end["traffic"]["measured"]["intra"]
        }
        if "update skipped" not in job.err:
            self.assertEqual(found, expected_traffic(run), changes)

    def trained(self, cases):
        """The jobs of these cases, each with a file `export` of its weights, and checked for its
        numbers."""
        cases = [dict(dict(export=harness.export_of(case)), **case) for case in cases]
        jobs = train_all(cases)
        for case, job in zip(cases, jobs):
            job.export = case["export"]
            if "arch=" not in str(case.get("model")):
                self.numbers(case, job)
        return jobs

    def assert_same(self, job, expected, what):
        """Bit by bit: losses, norms, validation losses, generated text and weights."""
        told = lambda j: (
            j.steps("loss", "grad_norm"),
            [e["loss"] for e in j.of("val")],
            re.findall(r"--- sample at step \d+ ---\n.*\n", j.out),
            harness.exported(j.export),
        )
        for name, a, b in zip(
            ("steps", "validation", "samples", "weights"), told(job), told(expected)
        ):
            (
                self.assertEqual(a, b, f"{name} of {what}")
                if name != "weights"
                else self.assertTrue(a == b, f"weights of {what}")
            )

    def assert_near(self, job, expected, what, tolerance=SAME):
        self.assert_close(job.losses(), expected.losses(), tolerance, what)
        self.assert_close(
            [n for n, in job.steps("grad_norm")],
            [n for n, in expected.steps("grad_norm")],
            10 * tolerance,
            what,
        )
        self.assertLess(distance(job.export, expected.export), tolerance, f"weights of {what}")


def printable():
    """A tokenizer of one character a token."""
    return tokenizer([bytes([33 + i % 94]) for i in range(VOCAB)], 9)


def key_biases():
    """Their gradient is 0 but for rounding: softmax takes no notice of them. Adam makes whole
    updates of that rounding."""
    at = 0
    for i, (elements, _) in enumerate(tensors()):
        if i == 5:  # qkvb: (layers, 3, channels)
            return {
                at + layer * 3 * CHANNELS + CHANNELS + c
                for layer in range(LAYERS)
                for c in range(CHANNELS)
            }
        at += elements


def distance(a, b):
    """Of two exports in fp32, relative to the second. Of the golden model without key biases."""
    a, b = harness.exported_weights(a), harness.exported_weights(b)
    left_out = key_biases() if len(b) == harness.PARAMETERS else ()
    kept = [i for i in range(len(b)) if i not in left_out]
    return math.sqrt(
        math.fsum((a[i] - b[i]) ** 2 for i in kept) / math.fsum(b[i] ** 2 for i in kept)
    )


# --------------------------------------------------------------------------------------------------
class Skipped(Check):
    def test_updates(self):
        """An update that is skipped leaves the weights as they are at every stage; and steps go on
        from them. Where messages are exact, they are those of stage 0."""
        late = dict(ranks=3, skip_loss_z=0.001, steps=140, lr="1e-5", shuffle=1, val_every=20)
        flags = [dict(zero=stage) for stage in (1, 2, 3)]
        flags += [dict(zero=3, zero_hpz_partition_size=2)]
        rounds = [PLUS_PLUS, dict(QGZ, zero=2, zero_error_feedback=1)]
        for exact in sample(flags, 1):
            whole, job = train_all([late, dict(late, **exact)])
            self.assertIn("update skipped", whole.err)  # from step 128 on, about half of them
            self.assertEqual(job.steps("loss", "grad_norm"), whole.steps("loss", "grad_norm"))
        for rounded in rounds if ALL else rounds[: random.Random(SEED).randrange(2)]:
            said = train(**dict(late, **rounded)).err
            skipped = int(re.search(r"step (\d+): update skipped", said)[1])
            pair = [dict(late, steps=steps, **rounded) for steps in (skipped - 1, skipped)]
            before, after = (harness.exported(job.export) for job in self.trained(pair))
            self.assertTrue(before == after, (rounded, skipped))


# --------------------------------------------------------------------------------------------------
SHAPES = [
    "layers=12,heads=12,channels=768,vocab=50257",
    "layers=48,heads=2,channels=64,vocab=300",
    "layers=1,heads=16,channels=1024,vocab=1000",
    "layers=1,heads=1,channels=64,vocab=200000",
    "layers=1,heads=1,channels=4,vocab=101",
    "layers=2,heads=4,channels=52,vocab=97",
    "layers=24,heads=16,channels=1024,vocab=50257",
]


def predicted(ranks, ranks_per_node=0, **changes):
    """What a dry run says, with 20 tokens a sequence. Of a cluster that is described, and not
    measured: one process tells."""
    per_node = ranks_per_node or ranks
    cluster = f"{ranks // per_node}x{per_node},intra=100,inter=10,tflops=10,memory=100"
    changes = dict(changes, cluster=cluster, train=None, val=None, steps=None, dry_run=1, json=1)
    return json.loads(Job(words=command_line(changes)).done().out)["predicted"]


class Numbers(Check):
    def test_stage_3_takes_least(self):
        """The memory of stage 3 is never above that of stage 2, whatever the shape of the model;
        nor stage 2's above stage 1's in a single micro-step.

        With more of them stage 2 has the sums of its slices beside the whole gradients that come
        and go.
        """
        cases = [
            (shape, ranks, dtype, more)
            for shape in (SHAPES if ALL else SHAPES[1:-1])
            for ranks in ((2, 3, 4, 8) if ALL else (2, 4))
            for dtype in ("fp32", "bf16")
            for more in (dict(), dict(batch_tokens=3 * ranks * T, recompute="block"))
        ]

        def check(case):
            shape, ranks, dtype, more = case
            devices = []
            for stage in range(4):
                changes = dict(
                    dict(
                        model=shape, dtype=dtype, zero=stage, ranks=ranks, micro_batch=1,
                        batch_tokens=T * ranks,
                    ),
                    **more,
                )
                memory = predicted(**changes)["memory"]
                self.assertEqual(
                    {kind: memory[kind] for kind in ("parameters", "gradients", "optimizer")},
                    expected_memory(Layout(changes)),
                    changes,
                )
                devices.append(memory["device"])
            return case, devices

        for case, devices in at_once(check, sample(cases, 2)):
            with self.subTest(case):
                self.assertLessEqual(devices[3], devices[2])
                if not case[3]:
                    self.assertLessEqual(devices[2], devices[1])

    PLUS_PLUS = [
        dict(),
        dict(zero_quantized_weights=1),
        dict(zero_hpz_partition_size=2),
        dict(zero_quantized_gradients=1),
        dict(zero_quantized_weights=1, zero_hpz_partition_size=2),
        dict(zero_quantized_gradients=1, zero_quantized_weights=1),
        dict(zero_quantized_gradients=1, zero_hpz_partition_size=2),
        PLUS_PLUS,
        dict(zero_quantized_gradients=1, zero_gradient_bits=8),
        dict(zero_quantized_weights=1, zero_quant_block=2048),
    ]

    def test_measured(self):
        """Real runs on even and uneven nodes, of each kind of traffic, a rank with fewer samples;
        with evaluation in between, which does not count."""
        kinds = (
            [dict(zero=stage) for stage in range(3)]
            + [dict(flags, zero=3) for flags in self.PLUS_PLUS]
            + [dict(QGZ, zero=stage) for stage in (0, 1, 2)]
        )
        kinds += [
            dict(zero=3, zero_hpz_partition_size=4, zero_quantized_weights=1),
            dict(QWZ, zero_quant_block=16),
            dict(QGZ, zero=2, zero_quant_block=1 << 30),
        ]
        muon = [dict(zero=stage, optimizer="muon") for stage in range(4)]
        muon += [dict(flags, zero=3, optimizer="muon") for flags in self.PLUS_PLUS[1:6]]
        nodes = (
            (4, 1), (4, 2), (4, 4), (3, 2), (5, 2), (6, 2),
        )  # ranks, and how many of them on a node
        cases_of = lambda kinds: [
            dict(
                kind, ranks=ranks, ranks_per_node=per_node, dtype=dtype, reduce_dtype=dtype,
                batch_tokens=(micro * ranks - 1) * T, micro_batch=1, steps=2, val_every=val,
                val_batches=1,
            )
            for kind in kinds
            for ranks, per_node in nodes
            for dtype in ("fp32", "bf16")
            for micro in (1, 3)
            for val in (0, 1)
            if ranks >= kind.get("zero_hpz_partition_size", 1)
        ]
        self.trained([*sample(cases_of(kinds), 1), *sample(cases_of(muon), 1)])


# --------------------------------------------------------------------------------------------------
# A slow quantizer: fp32 as the program's, one block after another


def quantized(values, bits, block):
    """What a storage's values become on their way, as floats."""
    most, out = 1 << bits - 1, array.array("f")
    for at in range(0, len(values), block):
        part = values[at : at + block]
        low, high = min(part), max(part)
        extreme = low if -low >= high else high
        scale = extreme / -most if abs(extreme) >= 2.0**-100 else 0.0
        inverse = array.array("f", [1 / scale])[0] if scale else 0.0
        out.extend(
            scale * min(max(round(x), -most), most - 1)
            for x in array.array("f", (x * inverse for x in part))
        )
    return out


def storages_of(values):
    """The values of a file, tensor by tensor, as storages: a block's tensors lie together."""
    parts, at = [array.array("f") for _ in range(LAYERS + 3)], 0
    for i, (elements, _) in enumerate(tensors()):
        homes = (
            [0] if i == 0 else [1] if i == 1 else [LAYERS + 2] if i >= 14 else range(2, LAYERS + 2)
        )
        for home in homes:
            parts[home].extend(values[at : at + elements // len(homes)])
            at += elements // len(homes)
    return parts


def file_of(parts):
    """The file's order again."""
    values, at = array.array("f"), [0] * len(parts)
    for i, (elements, _) in enumerate(tensors()):
        homes = (
            [0] if i == 0 else [1] if i == 1 else [LAYERS + 2] if i >= 14 else range(2, LAYERS + 2)
        )
        for home in homes:
            n = elements // len(homes)
            values.extend(parts[home][at[home] : at[home] + n])
            at[home] += n
    return values


def quantized_model(path, block):
    return put(
        "model.bin",
        get(MODEL)[:1024],
        file_of([quantized(part, 8, block) for part in storages_of(weights(path))]).tobytes(),
    )


class Weights(Check):
    def test_quantized(self):
        """Losses and norms of each step are those of a plain run on the weights that the slow
        quantizer makes, bit by bit; so are validations."""
        block = random.Random(SEED).choice((16, 256, 2048))
        one, two = [os.path.join(scratch(), "export.bin") for _ in "12"]
        same = dict(ranks=2, micro_batch=2, val_every=1, val_batches=1)
        jobs = train_all(
            [
                dict(same, **QWZ, zero_quant_block=block, steps=steps, export=file)
                for steps, file in ((1, one), (2, two))
            ]
        )
        for step, start in ((0, MODEL), (1, one)):
            plain = train(
                **same,
                steps=1,
                model=quantized_model(start, block),
                train=shard(golden_tokens()[3 * step * T :]),
            )
            self.assertEqual(
                jobs[1].steps("loss", "grad_norm")[step],
                plain.steps("loss", "grad_norm")[0],
                f"step {step + 1}",
            )
            self.assertEqual(jobs[1].of("val")[step]["loss"], plain.of("val")[0]["loss"])

    def test_ranks_change_nothing(self):
        """Blocks lie on the storage's own grid, so each rank gets the same weights. A code that
        flips changes one weight of 92208 by a 128th of a block's largest."""
        cases = [
            dict(QWZ, ranks=ranks, batch_tokens=5 * T, micro_batch=2, steps=10, recompute=how)
            for ranks, how in ((1, "none"), (2, "block"), (3, "none"), (4, "none"))
        ]
        one, *jobs = train_all(cases)
        for case, job in zip(cases[1:], jobs):
            self.assert_close(job.losses(), one.losses(), SAME_FLIPPED, case)
        plain = train(batch_tokens=5 * T, micro_batch=2, steps=10)
        self.assertNotEqual(one.steps(), plain.steps(), "nothing was rounded")
        self.assert_close(one.losses(), plain.losses(), 2e-3, "8 bits of a weight")


class Gradients(Check):
    def gradient(self, path):
        return array.array("f", ((a - b) / LR for a, b in zip(weights(MODEL), weights(path))))

    def gradients(self, cases):
        """What sgd subtracts."""
        cases = [
            dict(GRADIENT, export=os.path.join(scratch(), "export.bin"), **case) for case in cases
        ]
        train_all(cases)
        return [self.gradient(case["export"]) for case in cases]

    def contributions(self, ranks):
        """Of each rank, to the mean over one sample each. A power of two, so that the runs of
        single samples scale exactly."""
        tokens = golden_tokens()
        return [
            array.array("f", (g / ranks for g in gradient))
            for gradient in self.gradients(
                [
                    dict(train=shard(tokens[r * T : (r + 1) * T + 1]), batch_tokens=T)
                    for r in range(ranks)
                ]
            )
        ]

    def sum_of(self, contributions, nodes, bits, block):
        """Two hops: the sums of the nodes are quantized again."""
        parts = [storages_of(c) for c in contributions]
        locals_ = len(contributions) // nodes

        def total(arrays):
            result = arrays[0]
            for more in arrays[1:]:
                result = array.array("f", map(float.__add__, result, more))
            return result

        def storage(s):
            sums = [
                total(
                    [quantized(parts[node * locals_ + i][s], bits, block) for i in range(locals_)]
                )
                for node in range(nodes)
            ]
            return (
                total([quantized(one, bits, block) for one in sums])
                if nodes > 1 and locals_ > 1
                else total(sums)
            )

        return file_of([storage(s) for s in range(LAYERS + 3)])

    def test_against_a_slow_reference(self):
        contributions = self.contributions(4)
        cases = [
            (bits, block, per_node)
            for bits in (4, 8)
            for block in (16, 256, 2048)
            for per_node in (1, 2, 4)
        ]
        chosen = [case for bits in (4, 8) for case in sample([c for c in cases if c[0] == bits], 1)]
        found = self.gradients(
            [
                dict(
                    QGZ,
                    ranks=4,
                    batch_tokens=4 * T,
                    zero=random.Random(f"{SEED}{case}").randrange(4),
                    zero_gradient_bits=case[0],
                    zero_quant_block=case[1],
                    ranks_per_node=case[2],
                )
                for case in chosen
            ]
        )
        for (bits, block, per_node), gradient in zip(chosen, found):
            expected = self.sum_of(contributions, {1: 1, 2: 2, 4: 1}[per_node], bits, block)
            largest = max(map(abs, expected))
            wrong = sum(
                abs(a - b) > 1e-6 * abs(b) + 1e-9 * largest for a, b in zip(gradient, expected)
            )
            # Gradients are known here to 24 bits: about one code in 10^5 flips; one that becomes
            # the largest of its block moves all of it.
            self.assertLess(wrong, 0.01 * len(expected), (bits, block, per_node))

    def test_parcels(self):
        """How many storages travel together changes no bit. The program with faults in it packs
        small parcels."""
        cases = [
            dict(
                ranks=4, batch_tokens=micro * 4 * T, zero=stage, ranks_per_node=per_node,
                zero_error_feedback=feedback, dtype=dtype,
            )
            for micro in (1, 3)
            for stage in range(4)
            for per_node in (1, 2, 4)
            for feedback in (0, 1)
            for dtype in ("fp32", "bf16")
        ]
        for case in sample(cases, 2):
            one, several = self.trained(
                [
                    dict(case, **QGZ, micro_batch=1, steps=4, binary=binary)
                    for binary in (harness.BINARY, harness.FAULTY)
                ]
            )
            self.assert_same(several, one, case)

    def test_errors_are_forgotten(self):
        """With each checkpoint, which does not hold them, and after many updates: 8 in the program
        with faults. So a checkpoint then changes no bit, and an earlier one does."""
        same = dict(QGZ, zero_error_feedback=1, zero=2, ranks=2, batch_tokens=4 * T, micro_batch=1)
        same.update(steps=10, binary=harness.FAULTY)
        jobs = train_all(
            [
                dict(same, out=os.path.join(scratch(), "out"), save_every=every)
                for every in (20, 8, 7)
            ]
        )
        none, at_8, at_7 = (job.steps("loss", "grad_norm") for job in jobs)
        self.assertEqual(at_8, none)
        self.assertNotEqual(at_7, none, "errors are not fed back")

    def test_error_feedback(self):
        """Steps of sgd end nearer to the plain run's weights with error feedback than without. It
        knows nothing of the second hop's errors."""
        same = dict(
            ranks=4, optimizer="sgd", momentum=0, lr=0.1, grad_clip=0, steps=20, batch_tokens=4 * T,
            micro_batch=1, train=shard(golden_tokens()[: 4 * T + 1]),
        )
        for per_node, most in ((0, 0.4), (2, 0.95)) if ALL else ((0, 0.4),):
            stage = random.Random(SEED).randrange(4)
            plain, without, feedback = self.trained(
                [
                    dict(same, ranks_per_node=per_node, zero=stage, **more)
                    for more in (dict(), QGZ, dict(QGZ, zero_error_feedback=1))
                ]
            )
            self.assertLess(
                distance(feedback.export, plain.export),
                most * distance(without.export, plain.export),
            )


# --------------------------------------------------------------------------------------------------
class Lost(unittest.TestCase):
    KINDS = ("PREFETCH", "ACQUIRE", "RELEASE", "REDUCE", "FORWARD", "BACKWARD_WEIGHT")
    SAME = dict(
        zero=3, model="layers=3,heads=3,channels=96,vocab=101"
    )  # slices too long to be sent before anybody takes them

    @classmethod
    def setUpClass(cls):
        cls.undisturbed = train(
            ranks=3, steps=harness.LAST, shuffle=1, recompute="block", **cls.SAME
        ).steps("loss", "grad_norm")

    def test_in_each_action(self):
        def lose(case):
            how, kind = case
            rank = random.Random(f"{SEED}{how}{kind}").randrange(3)
            fault = Faulty(
                how, rank, kind, **self.SAME, **(dict(watchdog=3) if how == "hang" else {})
            )
            job = fault.ends()
            self.assertNotEqual(job.code, harness.EXIT_DONE)
            if how != "kill":
                self.assertEqual(job.code, EXIT_PEER, job.err)
                words = {"stop": "it is stopped, seen", "hang": "no sign of progress"}[how]
                self.assertRegex(
                    job.err,
                    rf"lost rank {rank} on {socket.gethostname()}: {words} for \d+.\d s, in"
                    r" (all_gather of parameters|reduce_scatter of gradient) \d, step \d",
                )
            fault.resumes(self, self.undisturbed)

        at_once(lose, sample(itertools.product(("stop", "kill", "hang"), self.KINDS), 2))

    def test_in_the_middle_of_a_gather(self):
        """What the others wait for is the gather that the lost rank does not take part in."""
        job = Faulty("stop", 1, "ACQUIRE", **self.SAME).ends()
        self.assertEqual(job.code, EXIT_PEER, job.err)
        self.assertRegex(
            job.err,
            rf"lost rank 1 on {socket.gethostname()}: it is stopped, seen for \d.\d s, in"
            r" all_gather of parameters \d, step [34]",
        )


# --------------------------------------------------------------------------------------------------
@unittest.skipUnless(os.path.exists(EMULATED), "train_gpt_emu is not built: make emu")
class Emulated(Check):
    def test_same(self):
        """Losses are those of the processor's build; stages are one computation here too."""
        cases = [
            dict(ranks=3, zero=3, recompute="block", micro_batch=1, batch_tokens=4 * T),
            dict(ranks=2, zero=2, optimizer="sgd"),
            dict(ranks=4, ranks_per_node=2, **PLUS_PLUS),
            dict(ranks=2, dtype="bf16", **PLUS_PLUS),
        ]
        runs = [
            (case, gpus) for case in sample(cases, 1) for gpus in (1, 4)
        ]  # one for all: messages by MPI; one each: by NCCL
        jobs = self.trained(
            [
                dict(
                    case,
                    steps=3,
                    binary=EMULATED,
                    environment={
                        "EMU_SEED": str(SEED), "EMU_GPUS": str(gpus), "OMP_NUM_THREADS": "1",
                    },
                )
                for case, gpus in runs
            ]
        )
        for (case, gpus), job in zip(runs, jobs):
            self.assertEqual(job.of("start")[0]["transport"], {1: "staged", 4: "nccl"}[gpus])
            if case.get("dtype") != "bf16":
                self.assert_close(
                    job.losses(),
                    train(**dict(case, steps=3)).losses(),
                    SAME_FLIPPED if "zero_quantized_weights" in case else SAME,
                    (case, gpus),
                )


if __name__ == "__main__":
    harness.main()
