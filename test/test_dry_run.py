#!/usr/bin/env python3
"""test_dry_run.py: --dry-run --cluster, which predicts memory, traffic and time of ranks that are
not here.

    python3 test/test_dry_run.py

Memory and traffic are compared with the formulas of the ZeRO and ZeRO++ papers, times with what
follows from the rates that were given.
"""

import json
import os
import re
import resource
import subprocess
import sys
import unittest

import harness
from harness import (EXIT_INPUT, EXIT_RESOURCES, NORM_CHUNK, ROOT, at_once, output_of, scratch,
                     shard)

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import published_runs  # noqa: E402

ENVIRONMENT = dict(harness.ENVIRONMENT, OPENBLAS_NUM_THREADS="1")
MANY = "24x16,intra=150,inter=50,tflops=125,memory=900"
BF16 = ["--dtype", "bf16", "--reduce-dtype", "bf16"]
QWZ, HPZ, QGZ = (
    ["--zero-quantized-weights"],
    ["--zero-hpz-partition-size", 16],
    ["--zero-quantized-gradients"],
)


def run(*words, ranks=1, address_space=1 << 36):
    words = [harness.BINARY, "--dry-run", "--json", *words]
    limit = lambda: resource.setrlimit(
        resource.RLIMIT_AS, (address_space, address_space)
    )  # nothing of the model is allocated
    if ranks > 1:
        words = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", ranks, *words]
    return output_of(*words, env=ENVIRONMENT, text=True, timeout=60, preexec_fn=limit)


def predict(*words, cluster=MANY, ranks=1):
    done = run("--cluster", cluster, *words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def predict_all(lines, cluster=MANY):
    """What is predicted for each of these lists of words."""
    return at_once(lambda words: predict(*words, cluster=cluster), lines)


class Offload(unittest.TestCase):
    def test_states_of_other_stages(self):
        """They leave the device, too: what a real rank of the large stage needs fits its device on
        a cluster. Updates that are late have their schedule."""
        words = ["--model", "layers=6,heads=2,channels=64,vocab=256", "--seq-len", 16]
        words += ["--batch-tokens", 64, "--micro-batch", 2, "--pipeline", "1:1,7:1"]
        words += ["--train", shard([1] * 500), "--threads", 1]
        offload = ["--offload", "optimizer", "--offload-update", "host"]
        real = run(*words, *offload, "--device-memory", "1K", ranks=2, address_space=-1)
        needed = re.search(r"a rank needs (\d+) bytes of its device", real.stderr)[1]
        cluster = "1x2,intra=5,tflops=1,memory=10,link=10,host=10"
        words += ["--device-memory", needed]
        for more, fits in (offload, True), (["--offload", "none"], False):
            found = predict(*words, *more, cluster=cluster)["predicted"]
            self.assertEqual(found["fits"], fits, more)
        predict(*words, "--offload", "optimizer", "--offload-delay", 1, cluster=cluster)


class Memory(unittest.TestCase):
    # GB of model states a rank at stages 0 to 3 with 2-byte gradients (ZeRO, figure 1, and its
    # formulas)
    TABLE = [
        ("layers=94,heads=20,channels=2560,vocab=50257", 7.5e9, 64, (120, 31.4, 16.6, 1.88)),
        ("gpt2:124M", None, 8, (1.99, 0.68, 0.47, 0.25)),
        ("gpt2:1558M", None, 8, (24.92, 8.57, 5.84, 3.12)),
        ("gpt2:774M", None, 64, (12.38, 3.24, 1.72, 0.19)),
    ]

    def test_states_follow_the_formulas(self):
        for model, size, N, table in self.TABLE:
            lines = [["--model", model, "--zero", stage, "--dtype", "bf16"] for stage in range(4)]
            for stage, (published, found) in enumerate(
                zip(table, predict_all(lines, f"{N // 8}x8,intra=1,inter=1,tflops=1,memory=1"))
            ):
                P, memory = found["parameters"], found["predicted"]["memory"]
                slack = 100 * NORM_CHUNK  # a chunk of each storage
                for kind, size_of, divided in (
                    ("parameters", 2, stage >= 3),
                    ("gradients", 4, stage >= 2),
                    ("optimizer", 12, stage >= 1),
                ):
                    self.assertLessEqual(
                        abs(memory[kind] / size_of - P / (N if divided else 1)),
                        slack if divided else 0,
                        (model, stage, kind),
                    )
                states = memory["parameters"] + memory["gradients"] / 2 + memory["optimizer"]
                self.assertAlmostEqual(
                    states / 1e9 * (size / P if size else 1), published,
                    delta=0.006 * published + 0.005, msg=(model, stage),
                )

    def test_secondary_copy(self):
        """hpZ adds 2 bytes a parameter, over the ranks of its partition; 100e9 parameters on 1024
        ranks, 16 on a node: 2 / 16 + 16 / 1024."""
        cluster = "64x16,intra=1,inter=1,tflops=1,memory=1"
        plain, more = predict_all(
            [
                ["--model", "gpt:100B", "--dtype", "bf16", "--zero", 3, *words]
                for words in ([], HPZ)
            ],
            cluster,
        )
        plain_states, states = (
            {
                kind: found["predicted"]["memory"][kind]
                for kind in ("parameters", "gradients", "optimizer")
            }
            for found in (plain, more)
        )
        P = plain["parameters"]
        self.assertAlmostEqual(
            (states["parameters"] - plain_states["parameters"]) / (2 * P / 16), 1, delta=1e-3
        )
        paper = [
            found["parameters"] + found["gradients"] / 2 + found["optimizer"]
            for found in (plain_states, states)
        ]
        self.assertAlmostEqual(paper[1] / paper[0], 9.0, delta=0.05)


class Traffic(unittest.TestCase):
    def inter(self, lines):
        """What leaves a node, by kind, in units of M: 2 bytes a parameter, of which 23 in 24 come
        from other nodes."""
        for found in predict_all(
            [
                ["--model", "gpt3:175B", "--seq-len", 1024, *BF16, "--zero", 3, *words]
                for words in lines
            ]
        ):
            self.assertEqual(found["ranks"], 384)
            sent, M = found["predicted"]["traffic"], 2 * found["parameters"] / 16 * 23 / 24
            self.assertEqual(sent["total"]["inter"], sum(sent["inter"].values()))
            yield {kind: sent["inter"][kind] / M for kind in sent["inter"]}

    def test_volumes_of_the_papers(self):
        full, int8, int4 = (
            1, 0.5 * (1 + 4 / 256), 0.25 * (1 + 8 / 256),
        )  # 4 bytes of scale to 256 elements
        cases = (
            ([], 2 * full, full),
            (QWZ, 2 * int8, full),
            (HPZ, full, full),
            (QGZ, 2 * full, int4),
            (QWZ + HPZ, int8, full),
            (QWZ + QGZ, 2 * int8, int4),
            (HPZ + QGZ, full, int4),
            (QWZ + HPZ + QGZ, int8, int4),
        )
        for (words, gathers, reduces), sent in zip(cases, self.inter([case[0] for case in cases])):
            coded = QGZ[0] in words
            for kind, expected in (
                ("all_gather", gathers),
                ("reduce_scatter", 0 if coded else reduces),
                ("all_to_all", reduces if coded else 0),
            ):
                self.assertAlmostEqual(
                    sent[kind], expected, delta=2e-3, msg=(words, kind)
                )  # unevenness of slices

    def test_accumulation(self):
        """Three micro-steps gather and reduce three times, but with hpZ parameters come from other
        nodes once."""
        more = ["--batch-tokens", 3 * 384 * 1024, "--micro-batch", 1]
        for gathers, sent in zip((6, 1), self.inter((more, HPZ + more))):
            self.assertAlmostEqual(sent["all_gather"], gathers, delta=6e-3)
            self.assertAlmostEqual(sent["reduce_scatter"], 3, delta=6e-3)


class Time(unittest.TestCase):
    MODEL = [
        "--model",
        "layers=8,heads=8,channels=1024,vocab=50257",
        "--seq-len",
        1024,
        "--micro-batch",
        1,
        "--zero",
        3,
    ]
    WIDE = "intra=1e5,tflops=1,memory=1e5"
    RATES = dict(intra=1e6, inter=1e6, tflops=1e6, memory=1e6)  # all but free

    def seconds(self, words=(), **rates):
        given = ",".join(f"{name}={value}" for name, value in dict(self.RATES, **rates).items())
        found = predict(*self.MODEL, *BF16, *words, cluster="4x8," + given)
        self.assertEqual(found["rates"]["flops"], dict(self.RATES, **rates)["tflops"] * 1e12)
        return found["predicted"]["step_ms"] / 1000, found["predicted"]["traffic"]["total"]

    def test_bound_by_messages(self):
        """Where only a link takes time, a step takes what its bytes do: a rank has the rate inside
        its node, and its share of the node's link."""
        for words in ([], QGZ):
            seconds, sent = self.seconds(words, inter=0.5)
            self.assertAlmostEqual(seconds / (sent["inter"] * 8 / 0.5e9), 1, delta=0.02)
            seconds, sent = self.seconds(words, intra=0.5)
            self.assertAlmostEqual(seconds / (sent["intra"] / 0.5e9), 1, delta=0.02)

    def test_bound_by_latency(self):
        """Per storage of which there are 11: a gather for the forward pass, one of 8 blocks for the
        backward pass and of wte for the head, a reduction; on two levels."""
        seconds, _ = self.seconds(latency=1e6)
        self.assertAlmostEqual(seconds, 2 * (11 + 8 + 1 + 11), delta=0.1)

    def test_bound_by_products(self):
        seconds, _ = self.seconds(tflops=1)
        flops = 3 * 1024 * (8 * (2 * 12 * 1024**2 + 2 * 1024 * 1024) + 2 * 50304 * 1024)
        self.assertAlmostEqual(seconds / (flops / 1e12), 1, delta=0.01)
        again, _ = self.seconds(["--recompute", "block"], tflops=1)
        self.assertAlmostEqual(
            (again - seconds) / (1024 * 8 * (2 * 12 * 1024**2 + 2 * 1024 * 1024) / 1e12),
            1,
            delta=0.01,
        )
        half, _ = self.seconds(tflops=1, half=1024)
        self.assertAlmostEqual(half / seconds, 2, delta=0.01)

    def test_bound_by_memory(self):
        """Records are written and read: INT8 ones of two gathers (but one of wpe and lnf) become
        bf16; of gradients INT4 ones are made twice and added twice."""
        seconds = {
            name: self.seconds(words, memory=1)[0]
            for name, words in (
                ("plain", []),
                ("weights", QWZ),
                ("gradients", QGZ),
                ("kept", ["--zero-hpz-partition-size", 8]),
            )
        }
        once, P = (
            1024 * 1024 + 2 * 1024,
            8 * (12 * 1024**2 + 13 * 1024) + 50304 * 1024 + 1024 * 1024 + 2 * 1024,
        )
        for name, taken in (
            ("weights", (2 * P - once) * (1 + 4 / 256 + 2)),
            ("gradients", P * (4 + 3 * (0.5 + 4 / 256))),
            ("kept", P * 2 * 2 / 8),
        ):
            self.assertAlmostEqual(
                (seconds[name] - seconds["plain"]) / (taken / 1e9), 1, delta=0.01, msg=name
            )

    def test_bound_by_the_host(self):
        """It reads the gradient, and reads and writes the master and two moments: 28 bytes an
        element, in pieces, or late and as a whole."""
        words = [*self.MODEL[:-2], "--dtype", "bf16", "--offload", "optimizer"]
        cluster = "1x1,tflops=1e6,memory=1e6,link=1e6,host=1"
        for how in (["--offload-update", "host"], ["--offload-delay", 1]):
            found = predict(*words, *how, cluster=cluster)
            taken = found["parameters"] * 28 / 1e9
            self.assertAlmostEqual(found["predicted"]["step_ms"] / 1000 / taken, 1, delta=0.001)

    def test_unequal_nodes(self):
        """All wait for the rank that sends most to other nodes, whichever node it is on: a rank
        that is alone sends 3 parts of 4 of what it sums and gathers, through a third of the link
        of the nodes for 3."""
        for zero in range(4):
            words = [*self.MODEL[:-2], *BF16, "--zero", zero]
            rates = "tflops=1e6,memory=1e6,intra=1e6,inter=1,latency=0"
            first, last = (
                predict(*words, cluster=f"{nodes},{rates}") for nodes in ("1x1+1x3", "1x3+1x1")
            )
            self.assertAlmostEqual(
                first["predicted"]["step_ms"] / last["predicted"]["step_ms"], 1, delta=1e-3
            )
            sent = first["predicted"]["traffic"]["inter"]
            self.assertGreater(sum(sent.values()) * 3 / 1e6, first["predicted"]["step_ms"] / 1.2)
            self.assertLess(sum(sent.values()) * 3 / 1e6, first["predicted"]["step_ms"])

    def test_unequal_ranks(self):
        """The slowest rank decides, in all that it computes: 2 samples take 3 parts of 2 (forward
        and backward), and recomputation is a fourth; and in Muon's matrices."""
        rates = ",".join(f"{name}={value}" for name, value in {**self.RATES, "tflops": 1}.items())
        muon = ["--optimizer", "muon"]
        for words in ([], ["--recompute", "block"], ["--pipeline", "2"], muon):
            half, mixed, one = (
                predict(*self.MODEL[:-2], *BF16, *words, cluster=f"{nodes},{rates}")["predicted"]
                for nodes in ("2x1*0.5", "1x1+1x1*0.5", "2x1")
            )
            self.assertAlmostEqual(half["step_ms"] / one["step_ms"], 2, delta=0.01, msg=words)
            if "--pipeline" not in words:
                self.assertAlmostEqual(mixed["step_ms"], half["step_ms"], delta=0.01, msg=words)

    def test_homes_of_matrices(self):
        """Muon's matrices are divided by their arithmetic, the costliest first: of two blocks, 4
        matrices of 18 C^3 and 8 of 6 C^3. Of three ranks the first has much of the small ones."""
        words = ["--model", "arch=nano,layers=4,heads=2,channels=256,vocab=256", "--seq-len", 64]
        seconds = {}
        for ranks, here in ((1, 24), (2, 12), (3, 10)):
            found = predict(*words, "--optimizer", "muon", cluster=f"1x{ranks},{self.WIDE}")
            self.assertEqual(found["matrices"]["all"], 24)
            self.assertEqual(found["matrices"]["here"], here, ranks)
            seconds[ranks] = found["matrices"]["of_step"] * found["predicted"]["step_ms"]
        self.assertAlmostEqual(seconds[2] / seconds[1], 0.5, delta=0.01)
        self.assertAlmostEqual(seconds[3] / seconds[1], 7 / 20, delta=0.01)

    def test_overlap(self):
        """Messages hide behind products but for what the key keeps of them."""
        alone, _ = self.seconds(tflops=1)
        hidden, sent = self.seconds(tflops=1, inter=8)
        messages = sent["inter"] * 8 / 8e9
        self.assertLess(messages, alone / 2)
        waits = hidden - alone  # for messages beside which there is nothing to compute
        self.assertLess(waits, 0.5 * messages)
        for overlap in (0, 0.5):
            seconds, _ = self.seconds(tflops=1, inter=8, overlap=overlap)
            lost = (seconds - hidden) / (messages - waits)
            self.assertAlmostEqual(lost, 1 - overlap, delta=0.02, msg=overlap)

    def test_overlap_of_pipelines(self):
        """What a message between two ranks keeps of computing is half at each end: of one
        micro-batch, whose two messages take 100 ms each, nothing, since both ends wait for them. A
        rank that has most of the work computes beside 77 of its 80 messages."""
        words = ["--model", "arch=nano,layers=4,heads=2,channels=64,vocab=64", "--seq-len", 64]
        words += ["--pipeline", "5:1,1:1", "--micro-batch", 1, "--dtype", "fp32"]
        for many, tflops, beside in ((1, 1e6, 0), (40, 1e-5, 77)):
            step = {}
            for overlap in (1, 0.5, 0):
                cluster = f"1x2,intra=1e6,tflops={tflops},memory=1e6,latency=1e5,overlap={overlap}"
                found = predict(*words, "--batch-tokens", 64 * many, cluster=cluster)
                step[overlap] = found["predicted"]["step_ms"]
                lost = step[overlap] - step[1]
                self.assertAlmostEqual(lost, (1 - overlap) / 2 * 100 * beside, delta=0.1)
            if many == 1:
                self.assertAlmostEqual(step[1], 200, delta=0.1)

    def test_messages_that_wait(self):
        """A message takes nothing from its sender before its receiver is there: of 80 that take
        1 ms, a step that takes many seconds may lose no more than that."""
        words = ["--model", "arch=nano,layers=4,heads=2,channels=64,vocab=64", "--seq-len", 64]
        words += ["--pipeline", "2", "--micro-batch", 1, "--dtype", "fp32", "--batch-tokens", 2560]
        step = {}
        for overlap in (1, 0):
            cluster = f"1x2,intra=1e6,tflops=1e-5,memory=1e6,latency=1000,overlap={overlap}"
            step[overlap] = predict(*words, cluster=cluster)["predicted"]["step_ms"]
        self.assertGreater(step[1], 10000)
        self.assertGreaterEqual(step[0], step[1])
        self.assertLess(step[0], step[1] + 80)

    def test_what_slows(self):
        """Copies from the host slow nothing, and messages that are short or empty change nothing of
        what others in flight slow: the last figures are those of a simulation that keeps each
        message apart."""
        words = ["--model", "arch=llama,layers=6,heads=4,channels=256,vocab=512", "--seq-len", 64]
        words += ["--micro-batch", 2, "--batch-tokens", 1024, "--dtype", "fp32", "--zero", 3]
        experts = words + ["--expert-parallel", 4]
        experts[1] = "arch=llama,layers=4,heads=4,channels=256,vocab=512,experts=4,top_k=2"
        experts[1] += ",expert_ffn=256"
        rates = "tflops=0.05,memory=50,"
        copies = []
        for overlap, expected in ((0, 120.06), (0.5, 110.15), (1, 100.32)):
            cluster = f"2x2,intra=2,inter=1,{rates}overlap={overlap}"
            found = predict(*experts, cluster=cluster)["predicted"]["step_ms"]
            self.assertAlmostEqual(found, expected, delta=0.01)
            cluster = f"1x4,intra=1000,link=0.3,host=20,{rates}overlap={overlap}"
            copies.append(predict(*words, "--offload", "params", cluster=cluster)["predicted"])
            self.assertAlmostEqual(copies[-1]["step_ms"], copies[0]["step_ms"], delta=0.2)


class Parts(unittest.TestCase):
    """Replicas of a pipeline that do the same beside each other: one of them is planned."""

    MODEL = ["--model", "layers=6,heads=4,channels=256,vocab=512", "--seq-len", 64]
    EXPERTS = ["--model", "arch=llama,layers=6,heads=4,channels=256,vocab=512,experts=8"]

    def test_as_if_each_were_planned(self):
        """Each is, where nodes have different numbers of ranks. Here their links are as fast. Rows
        of experts cross parts."""
        one, each = "1x8,intra=5", "1x3+1x5,intra=5,inter=25"
        for words in (
            ["--pipeline", 2],
            ["--pipeline", 4, "--zero", 1, "--pipeline-schedule", "gpipe"],
            ["--pipeline", "3:4,3:2,2:2", "--zero", 2, "--recompute", "block"],
            ["--pipeline", "4:2,4:6", "--zero", 3, "--micro-batch", 12],
            ["--pipeline", 2, "--pipeline-schedule", "zero-bubble", "--batch-tokens", 40 * 64],
            [*self.EXPERTS, "--pipeline", "4:2,4:6", "--expert-parallel", 2],
            [*self.EXPERTS, "--pipeline", 2, "--expert-parallel", 4, "--zero", 2],
        ):
            model = [] if words[:2] == self.EXPERTS else self.MODEL[:2]
            words = [*model, *self.MODEL[2:], "--micro-batch", 8, "--batch-tokens", 96 * 64, *words]
            rates = ",tflops=1,memory=100"
            found = [predict(*words, cluster=text + rates)["predicted"] for text in (one, each)]
            for name in ("device", "activations", "buffers"):
                self.assertEqual(*(p["memory"][name] for p in found), (words, name))
            for name in ("step_ms", "idle"):
                # slices differ a little: rank 0 counts, or the rank that sends most to other nodes
                ratio = found[0][name] / found[1][name]
                self.assertAlmostEqual(ratio, 1, delta=1e-3, msg=(words, name))
            sent = [sum(p["traffic"]["total"].values()) for p in found]
            self.assertEqual(*sent, words)

    def test_many(self):
        """All of them would take more memory than this."""
        words = [*self.MODEL, "--pipeline", 4, "--micro-batch", 4096, "--batch-tokens", 1 << 25]
        cluster = ["--cluster", "2048x8,gpu=h100", "--dtype", "bf16"]
        done = run(*words, *cluster, address_space=1 << 33)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["ranks"], 1 << 14)


class Experts(unittest.TestCase):
    """Ranks that exchange rows of experts."""

    def predicted(self, *words, **rates):
        model = "arch=llama,layers=4,heads=4,channels=256,vocab=512,experts=8,expert_ffn=512"
        free = dict(intra=1e6, tflops=1e6, memory=1e6)
        cluster = ",".join(f"{name}={value}" for name, value in {**free, **rates}.items())
        words = ["--model", model, "--seq-len", 64, "--micro-batch", 2, "--dtype", "bf16", *words]
        words += ["--expert-parallel", 4]
        return predict(*words, cluster=f"1x4,{cluster}")["predicted"]

    def test_uneven_loads(self):
        """The busiest rank has B times as many rows, which travel and are computed B times as
        long; all others wait for it. Without --moe-buffer, B is the most that there can be."""
        even = self.predicted("--moe-buffer", 1, intra=1, tflops=1)
        self.assertEqual((even["uneven"], even["uneven_step_ms"]), (1, even["step_ms"]))
        self.assertEqual(even["uneven_all_to_all_ms"], even["all_to_all_ms"])
        self.assertEqual(self.predicted("--moe-buffer", 0.5)["uneven"], 1)
        self.assertEqual(self.predicted()["uneven"], 4)
        for words in ([], ["--recompute", "block"]):
            found = self.predicted("--moe-buffer", 2, *words, intra=1)
            sent = found["traffic"]["intra"]["all_to_all"] / 1e6
            self.assertEqual(found["uneven"], 2)
            self.assertAlmostEqual(found["all_to_all_ms"] / sent, 1, delta=1e-6)
            self.assertAlmostEqual(found["uneven_all_to_all_ms"] / sent, 2, delta=1e-6)
            longer = found["uneven_step_ms"] - found["step_ms"]
            self.assertAlmostEqual(longer / sent, 1, delta=0.01, msg=words)
        # 128 tokens of a rank, two choices, three matrices, of 4 blocks forward and twice back
        found = self.predicted("--moe-buffer", 2, tflops=1)
        flops = 3 * 4 * 128 * 2 * 3 * 2 * 256 * 512
        longer = found["uneven_step_ms"] - found["step_ms"]
        self.assertAlmostEqual(longer / (1e3 * flops / 1e12), 1, delta=0.01)
        # in pieces the experts compute once more
        longer = self.predicted("--moe-buffer", 0.5, tflops=1)["step_ms"] - found["step_ms"]
        self.assertAlmostEqual(longer / (1e3 * flops / 3 / 1e12), 1, delta=0.01)

    def test_each_rank_needs_samples(self):
        """Of a cluster, too, whose ranks are not all planned: in each micro-batch."""
        for tokens, words, accepted in (
            (8, [], True),
            (6, [], False),  # 2, 1, 2, 1 samples, in two micro-batches
            (6, ["--micro-batch", 2], True),
            (12, ["--pipeline", 2, "--micro-batch", 4], True),
            (13, ["--pipeline", 2, "--micro-batch", 4], False),
            (14, ["--pipeline", 2, "--micro-batch", 4], True),
        ):
            model = "arch=llama,layers=2,heads=2,channels=16,vocab=64,experts=4"
            flags = ["--model", model, "--seq-len", 8, "--batch-tokens", 8 * tokens]
            flags += ["--micro-batch", 1, "--expert-parallel", 2, "--dtype", "fp32"]
            done = run(*flags, *words, "--cluster", "1x4,intra=1,tflops=1,memory=1")
            self.assertEqual(done.returncode, 0 if accepted else EXIT_INPUT, (tokens, words))
            self.assertEqual("samples of its own" in done.stderr, not accepted, done.stderr)


class Here(unittest.TestCase):
    """Without --cluster: does it fit the memory of this machine?"""

    SMALL = ["--model", "layers=2,heads=2,channels=64,vocab=256", "--seq-len", 64]
    LARGE = ["--model", "layers=96,heads=96,channels=12288,vocab=50257", "--seq-len", 64]

    def check(self, words, ranks, message):
        """message: of a run that does not fit, else ''."""
        done = run(*words, ranks=ranks)
        self.assertEqual(done.returncode, EXIT_RESOURCES if message else 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["predicted"]["fits"], not message)
        table = run(*words, "--json", 0, ranks=ranks)
        self.assertEqual(table.returncode, done.returncode, table.stderr)
        said = " ".join(table.stdout.split())
        verb = "ranks on this machine need" if ranks > 1 else "rank on this machine needs"
        row = re.search(rf"memory fits: {ranks} {verb} (\S+) GiB more, (\S+) GiB are", said)
        self.assertEqual(bool(row), not message, said)
        self.assertIn("memory of rank 0:", said, "the prediction is printed in any case")
        for one in (done, table):
            self.assertEqual(one.stderr.count("GiB are available"), bool(message), one.stderr)
            self.assertRegex(one.stderr, message or r"\A")
        return row and float(row[1])

    def test_fits(self):
        for ranks in (1, 2):
            self.check(self.SMALL, ranks, "")

    def test_of_all_ranks(self):
        """What the ranks of a machine need together counts."""
        model = ["--model", "layers=8,heads=8,channels=1024,vocab=1000", "--seq-len", 64]
        one, two = (self.check(model, ranks, "") for ranks in (1, 2))
        self.assertAlmostEqual(two / one, 2, delta=0.2)

    def test_does_not_fit(self):
        for ranks in (1, 2):
            self.check(self.LARGE, ranks, rf"{ranks} ranks on this machine need .* GiB more")

    def test_the_delinked_model_does_not_fit(self):
        """Blocks that share fit, those that follow do not."""
        words = ["--model", "layers=500,heads=16,channels=2048,vocab=256", "--seq-len", 16]
        words += ["--micro-batch", 1, "--share", "all", "--steps", 9]
        self.check(words, 1, "")
        self.check([*words, "--delink-at", 5], 1, "GiB more")

    def test_a_cluster_is_elsewhere(self):
        found = predict(*self.LARGE, cluster="1x1,tflops=1,memory=1,capacity=1")
        self.assertFalse(found["predicted"]["fits"])


class Rest(unittest.TestCase):
    def test_whatever_runs(self):
        """The prediction is the cluster's, however many processes make it."""
        words = ["--model", "d12", *BF16, "--zero", 3]
        self.assertEqual(predict(*words), predict(*words, ranks=2))

    def test_uneven_batch(self):
        """One sample more than ranks: the rank that has two of them decides."""
        words = ["--model", "d12", "--seq-len", 64, *BF16, "--zero", 3, "--micro-batch"]
        one, two, half = predict_all(
            [
                [*words, rows, "--batch-tokens", 64 * samples]
                for rows, samples in ((1, 385), (1, 768), (1, 384))
            ],
            MANY + ",overlap=0",
        )
        self.assertEqual(one["predicted"]["step_ms"], two["predicted"]["step_ms"])
        self.assertGreater(one["predicted"]["step_ms"], 1.5 * half["predicted"]["step_ms"])

    def test_nonsense(self):
        for cluster in (
            "", "nonsense", "24x16,intra=150", MANY + ",tflops=1", MANY + ",speed=1",
            "0x0,intra=1,inter=1", "24x16,intra=150,inter=nan",
        ):
            done = run("--cluster", cluster or "x")
            self.assertEqual((done.returncode, done.stdout), (EXIT_INPUT, ""), cluster)
            self.assertEqual(
                done.stderr.count("--cluster "), 2, "one message, and what to write instead"
            )

    def test_bars_of_the_paper(self):
        done = subprocess.run(
            [os.path.join(ROOT, "scripts/zeropp_bars.py"), "--bars"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count("%)"), 40)
        with open(os.path.join(ROOT, "docs/results/logs/zeropp_bars.txt")) as file:
            written = file.read()
        rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
        self.assertEqual([row for row in rows if row not in written], [])

    def test_published_runs(self):
        """A sample of the table behind docs/results/published.md is predicted as it says, with the
        constants that the presets have; the page has the rows that are not met."""
        results = os.path.join(ROOT, "docs/results")
        with open(os.path.join(results, "logs/published_runs.txt"), encoding="utf-8") as file:
            written = file.read()
        with open(os.path.join(results, "published.md"), encoding="utf-8") as file:
            page = file.read()
        lines = written.split("\n")
        self.assertEqual(sum(line.count("MET |") for line in lines), 144)
        missed = [line for line in lines if line.endswith("NOT MET |")]
        self.assertEqual([line for line in page.split("\n") if line.endswith("NOT MET |")], missed)
        for name, value in published_runs.presets().items():
            self.assertEqual(published_runs.FITTED[name], value, name)
        runs = harness.sample(published_runs.RUNS, 12)
        for run_, error in zip(runs, published_runs.errors(runs)):
            self.assertIn(published_runs.row_text(run_, error), written)


if __name__ == "__main__":
    harness.main()
