#!/usr/bin/env python3
"""test_fit.py: --fit, beside an exhaustive search; presets of --cluster; what a forecast says of a
run.

    python3 test/test_fit.py

The exhaustive search knows nothing of --fit: it asks --dry-run for every combination of flags that
the program accepts, and takes the fastest that fits.
"""

import itertools
import json
import os
import re
import shlex
import unittest
from random import Random

import harness
from harness import (ALL, EXIT_INPUT, EXIT_RESOURCES, SEED, at_once, output_of, scratch, train)

ENVIRONMENT = dict(harness.ENVIRONMENT, OPENBLAS_NUM_THREADS="1")
SPARE = 1.05  # of the best time, that --fit may take


def run(*words):
    return output_of(harness.BINARY, *words, env=ENVIRONMENT, text=True)


def ask(*words):
    """What the program prints as an object; None where it refuses these flags."""
    done = run(*words, "--json")
    assert done.returncode in (0, EXIT_INPUT, EXIT_RESOURCES), (words, done.stderr)
    return json.loads(done.stdout) if done.returncode == 0 else None


def parts(total, count):
    """All ways to write `total` as a sum of `count` positive numbers, in order."""
    for cuts in itertools.combinations(range(1, total), count - 1):
        borders = (0, *cuts, total)
        yield [borders[i + 1] - borders[i] for i in range(count)]


class Case:
    """A small model on a small cluster, and flags that are given. Cases of even numbers have one
    stage and all else free; the others have pipelines, but ZeRO and offloading given."""

    def __init__(self, seed):
        draw = Random(seed)
        self.staged = seed % 2 == 1
        one, two = ((1, 1), (1, 2), (2, 1), (2, 2)), ((1, 2), (2, 1), (1, 2), (2, 2))
        self.nodes, self.ranks = draw.choice(two if self.staged else one)
        self.size = self.nodes * self.ranks
        self.layers = draw.choice((1, 2) if self.staged else (1, 2, 3))
        channels = draw.choice((64, 256, 1024))
        self.T = draw.choice((64, 256))
        self.samples = self.size * draw.choice((1, 2) if self.staged else (1, 2, 4))
        self.dtype = draw.choice(("fp32", "bf16"))
        memory = draw.uniform(100, 2000)
        self.rates = dict(
            intra=draw.uniform(5, 300),
            inter=10 ** draw.uniform(-0.5, 1.7),
            latency=draw.choice((0, draw.uniform(1, 30))),
            tflops=10 ** draw.uniform(0, 2.5),
            memory=memory,
            half=draw.choice((0, draw.uniform(1, 300))),
            overlap=draw.choice((1, draw.uniform(0.5, 1))),
            link=draw.uniform(5, 50),
            host=memory * draw.uniform(0.05, 0.5),
        )
        self.flags = ["--model", f"layers={self.layers},heads=4,channels={channels},vocab=1000"]
        self.flags += ["--seq-len", self.T, "--dtype", self.dtype]
        self.flags += ["--batch-tokens", self.T * self.samples]
        self.capacity = None
        self.zero = draw.randrange(4)
        if self.staged:
            self.flags += ["--zero", self.zero, "--zero-quantized-gradients", 0]
            self.flags += ["--zero-quantized-weights", 0, "--zero-hpz-partition-size", 1]
            self.flags += ["--offload", "none"]
        else:
            self.flags += ["--pipeline", 1]
        self.share = draw.uniform(0.45, 1.3)

    def words(self):
        rates = dict(self.rates, **({"capacity": self.capacity} if self.capacity else {}))
        text = f"{self.nodes}x{self.ranks}," + ",".join(f"{k}={v:.6g}" for k, v in rates.items())
        return ["--dry-run", "--cluster", text, *self.flags]

    def plain(self):
        return [] if self.staged else ["--zero", 0]

    def limit(self):
        """Gives the ranks a share of what plain data parallelism takes."""
        found = ask(*self.words(), *self.plain(), "--micro-batch", 1)
        self.capacity = self.share * found["predicted"]["memory"]["device"] / 2**30

    def zeropp(self):
        """The flags of every stage of ZeRO, with and without each part of ZeRO++."""
        if self.staged or self.size == 1:
            return [[]]
        found = []
        for zero, weights, gradients, apart in itertools.product(range(4), (0, 1), (0, 1), (0, 1)):
            words = ["--zero", zero] + ["--zero-quantized-weights"] * weights
            words += ["--zero-quantized-gradients"] * gradients
            words += ["--zero-hpz-partition-size", self.ranks] * apart
            if zero == 3 or not (weights or apart):
                found.append(words)
        return found

    def memory(self):
        """The flags of every way to need less memory."""
        return [
            ["--recompute", recompute] + ([] if self.staged else ["--offload", offload])
            for recompute in ("none", "block")
            for offload in (("none",) if self.staged else ("none", "optimizer", "params", "all"))
        ]

    def ways(self):
        """The flags of every way to run."""
        memory = self.memory()
        for b in range(1, -(-self.samples // self.size) + 1):
            for zero, fits in itertools.product(self.zeropp(), memory):
                yield [*zero, *fits, "--micro-batch", b]
        if not self.staged:
            return
        schedules = [
            ["--pipeline-schedule", "gpipe"],
            ["--pipeline-warmup", "a"],
            ["--pipeline-warmup", "b"],
            ["--pipeline-schedule", "zero-bubble"],
        ]
        units = self.layers + 2
        for stages in range(2, min(units, self.size) + 1):
            for cut, replicas in itertools.product(parts(units, stages), parts(self.size, stages)):
                text = ",".join(f"{u}:{r}" for u, r in zip(cut, replicas))
                for b, schedule, fits in itertools.product(
                    (b for b in range(1, self.samples + 1) if self.samples % b == 0),
                    schedules,
                    memory,
                ):
                    yield ["--pipeline", text, *schedule, *fits, "--micro-batch", b]

    def exhaustive(self):
        """The seconds of the fastest way that fits, and its flags; None where none fits."""

        def predicted(way):
            found = ask(*self.words(), *way)
            if found and found["predicted"]["fits"]:
                return found["predicted"]["step_ms"], way
            return float("inf"), way

        best = min(at_once(predicted, list(self.ways())), key=lambda one: one[0])
        return best if best[0] < float("inf") else None


class Mixture(Case):
    """The same of a model with experts, without recomputation and offloading."""

    def __init__(self, seed):
        super().__init__(seed)
        draw = Random(f"{seed} mixture")
        if self.staged:
            self.nodes, self.ranks = draw.choice(((1, 4), (2, 2)))
            self.size, self.layers, self.samples = 4, 1, 4
        keys = f"arch=llama,layers={self.layers},heads=4,channels={draw.choice((64, 256))},"
        keys += f"vocab=1000,experts=4,top_k={draw.choice((1, 2))},"
        keys += f"expert_ffn={draw.choice((64, 512))}"
        flags = dict(zip(self.flags[::2], self.flags[1::2]))
        flags.update({"--model": keys, "--batch-tokens": self.T * self.samples})
        flags.update({"--recompute": "none", "--offload": "none"})
        flags.update({"--moe-buffer": draw.choice((1, 1.5))} if draw.randrange(2) else {})
        self.flags = [word for pair in flags.items() for word in pair]

    def plain(self):
        return [*super().plain(), "--expert-parallel", 1]

    def zeropp(self):
        return [[]] if self.staged else [["--zero", zero] for zero in range(4)]

    def memory(self):
        return [[]]

    def ways(self):
        for way in super().ways():
            for ranks in (1, 2, 4):
                if self.size % ranks == 0:
                    yield [*way, "--expert-parallel", ranks]


class Fit(harness.TestCase):
    def check(self, seed, case=None):
        case = case or Case(seed)
        case.limit()
        best, found = case.exhaustive(), ask("--fit", *case.words())
        if not best:
            self.assertIsNone(found, (seed, case.words()))
            return
        self.assertIsNotNone(found, (seed, case.words(), best))
        chosen = found["best"][0]
        self.assertLessEqual(chosen["step_ms"], SPARE * best[0], (seed, case.words(), chosen, best))
        # the flags can be typed, and do what was said
        typed = ask(*case.words(), *shlex.split(chosen["flags"]))
        self.assertAlmostEqual(typed["predicted"]["step_ms"] / chosen["step_ms"], 1, delta=1e-9)
        self.assertTrue(typed["predicted"]["fits"])
        self.assertLessEqual(typed["predicted"]["memory"]["device"], chosen["memory"])
        self.assertEqual(typed["predicted"]["traffic"]["total"], chosen["traffic"])
        for key in ("all_to_all_ms", "uneven_step_ms"):
            self.assertEqual(typed["predicted"].get(key), chosen.get(key))
        return chosen

    def test_beside_an_exhaustive_search(self):
        """50 cases with TEST_ALL=1, else one in which ZeRO++ or a pipeline is fastest."""
        draw = Random(SEED)
        short = [draw.choice((12, 34, 38, 40, 44)), draw.choice((13, 21, 39, 49))]
        seeds = range(50) if ALL else [draw.choice(short)]
        for seed in seeds:
            with self.subTest(seed=seed):
                self.check(seed)

    def test_trains_with_the_best(self):
        # Quantized messages would change the losses, and timings decide.
        exact = {"zero-quantized-weights": 0, "zero-quantized-gradients": 0}
        job = train(ranks=2, fit=1, steps=2, batch_tokens=120, **exact)
        self.assertIn("ways to run were planned", job.out)
        self.assertEqual(len(job.losses()), 2)
        plain = train(ranks=2, steps=2, batch_tokens=120)
        self.assert_close(job.losses(), plain.losses(), 1e-5, "the same samples, in another way")

    def test_host_memory(self):
        """What is off the device must fit the host."""
        words = ["--model", "layers=4,heads=4,channels=512,vocab=1000", "--seq-len", 64]
        words += ["--dry-run", "--device-memory", "150M", "--batch-tokens", 64, "--dtype", "fp32"]
        words += ["--cluster", "1x1,tflops=1,memory=100,link=10,host=10"]
        hosts = [way["host"] for way in ask("--fit", *words, "--host-memory", "1T")["best"]]
        self.assertLess(min(hosts), max(hosts))
        middle = int(min(hosts) + max(hosts)) // 2
        fewer = ask("--fit", *words, "--host-memory", middle)["best"]
        self.assertLess(max(way["host"] for way in fewer), max(hosts))
        done = run("--fit", *words, "--host-memory", "1M")
        self.assertEqual(done.returncode, EXIT_RESOURCES, done.stdout)

    def test_rates_of_moves(self):
        """Where a way moves states at a rate that is not given, it is asked for."""
        words = ["--model", "layers=2,heads=4,channels=256,vocab=1000", "--seq-len", 64]
        words += ["--fit", "--dry-run", "--batch-tokens", 256, "--dtype", "fp32"]
        disk = ["--offload", "auto", "--device-memory", "30M", "--offload-dir", scratch()]
        for rates, given, missing in (
            ("", ["--offload", "params"], "link="),
            (",link=25", ["--offload", "optimizer"], "host="),
            (",link=25,host=50", disk, "disk="),
            (",link=25,host=50,disk=3", disk, None),
        ):
            done = run(*words, *given, "--cluster", "1x1,tflops=1,memory=1000" + rates)
            self.assertEqual(done.returncode, EXIT_INPUT if missing else 0, (rates, done.stderr))
            self.assertIn(f"needs {missing}" if missing else "", done.stderr)

    def test_quantized_messages_must_gain(self):
        """At least one percent, since they change what is computed."""
        words = ["--dry-run", "--model", "layers=2,heads=4,channels=512,vocab=1000", "--dtype"]
        words += ["bf16", "--seq-len", 64, "--batch-tokens", 256, "--micro-batch", 1]
        words += ["--pipeline", 1, "--zero", 0, "--recompute", "none", "--offload", "none"]

        def cluster(inter):
            rates = f"intra=100,inter={inter},tflops=1,memory=100,overlap=0"
            return ["--cluster", f"2x2,{rates}"]

        def gain(inter):
            plain, coded = (
                ask(*words, *more, *cluster(inter))["predicted"]["step_ms"]
                for more in ([], ["--zero-quantized-gradients"])
            )
            return plain / coded - 1

        low, high = 0.01, 1e5  # a slow link gains, a fast one loses
        self.assertTrue(gain(low) > 0.02 and gain(high) < 0)
        while not 0.003 < gain(low) < 0.008:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if gain(middle) > 0.003 else (low, middle)
        found = {inter: ask("--fit", *words, *cluster(inter))["best"] for inter in (low, 0.01)}
        self.assertNotIn("quantized", found[low][0]["flags"], found[low])
        self.assertLess(found[low][1]["step_ms"], found[low][0]["step_ms"], "the gain is small")
        self.assertIn("--zero-quantized-gradients", found[0.01][0]["flags"])

    def test_experts_beside_an_exhaustive_search(self):
        """On how many ranks experts are is among the choices, with stages and without."""
        draw = Random(f"{SEED} experts")
        numbers = range(24) if ALL else [draw.choice((11, 13, 21, 22))]
        found = {}
        for number in numbers:
            with self.subTest(number=number):
                found[number] = self.check(number, Mixture(number))
        if ALL:
            flags = [one["flags"] for one in found.values() if one]
            self.assertTrue(any("--expert-parallel 1" in one for one in flags))
            apart = [one for one in flags if "--expert-parallel 1" not in one]
            self.assertEqual({"--pipeline" in one for one in apart}, {False, True})

    def test_experts_where_they_are_told(self):
        """--expert-parallel fixes it; so do texts and exports, which ranks with parts of the
        experts do not make."""
        words = ["--model", "arch=llama,layers=2,heads=4,channels=256,vocab=1000,experts=8"]
        words += ["--seq-len", 64, "--batch-tokens", 1024, "--dtype", "bf16", "--dry-run"]
        words += ["--cluster", "2x4,intra=50,inter=50,tflops=1,half=100,memory=100"]
        for given, wanted in (
            ([], {"1", "2", "4", "8"}),
            (["--expert-parallel", 4], {"4"}),
            (["--sample-every", 10], {"1"}),
            (["--export", os.path.join(scratch(), "folder")], {"1"}),
        ):
            degrees = set()
            for one in ([], ["--pipeline", 1], ["--pipeline", 2]):
                best = ask("--fit", *words, *given, *one)["best"]
                texts = [re.search(r"--expert-parallel (\d+)", way["flags"])[1] for way in best]
                degrees |= set(texts)
            self.assertTrue(degrees <= wanted, (given, degrees))
            self.assertTrue(len(degrees) > 1 or len(wanted) == 1, (given, degrees))

    def test_secondary_copies_need_nodes(self):
        """Inside one node a secondary copy saves nothing, and nodes of different sizes cannot each
        hold one that is cut alike: such ways are not tried."""
        words = ["--fit", "--dry-run", "--model", "layers=2,heads=4,channels=512,vocab=1000"]
        words += ["--seq-len", 64, "--batch-tokens", 256, "--dtype", "bf16", "--zero", 3]
        words += ["--pipeline", 1, "--offload", "none", "--recompute", "none"]
        found = {}
        for shape in ("1x4", "2x2", "1x2+1x1", "1x1+1x2"):
            rates = ",intra=100,inter=0.1,tflops=1,memory=100,overlap=0"
            ways = ask(*words, "--cluster", shape + rates)["best"]
            found[shape] = any("hpz" in way["flags"] for way in ways)
        uneven = {"1x2+1x1": False, "1x1+1x2": False}
        self.assertEqual(found, {"1x4": False, "2x2": True, **uneven})

    def test_micro_batches_of_pipelines(self):
        """Each size that divides the samples of a step is tried; another one if it is given."""
        words = ["--fit", "--dry-run", "--model", "layers=2,heads=4,channels=64,vocab=1000"]
        words += ["--seq-len", 64, "--pipeline", "2:1,2:1", "--pipeline-schedule", "gpipe"]
        words += ["--zero", 0, "--zero-quantized-gradients", 0, "--offload", "none"]
        words += ["--recompute", "none", "--cluster", "1x2,intra=100,tflops=1,memory=100"]
        for samples, sizes in ((6, [1, 2, 3, 6]), (7, [1, 7]), (9, [1, 3, 9])):
            ways = ask(*words, "--batch-tokens", 64 * samples)["best"]
            found = [re.search(r"--micro-batch (\d+)", way["flags"])[1] for way in ways]
            self.assertEqual(sorted(map(int, found)), sizes)
        # one that is given is, too
        for size in (4, 9):
            ways = ask(*words, "--batch-tokens", 64 * 6, "--micro-batch", size)["best"]
            found = [int(re.search(r"--micro-batch (\d+)", way["flags"])[1]) for way in ways]
            self.assertEqual(found, [min(size, 6)])

    @unittest.skipUnless(ALL, "TEST_ALL=1: some seconds")
    def test_many_ranks(self):
        """Of ranks that do the same one is planned, and what cannot fit is not."""
        words = ["--fit", "--dry-run", "--model", "gpt3:175B", "--cluster", "2048x8,gpu=h100"]
        best = ask(*words)["best"]
        self.assertEqual(len(best), 10)
        self.assertTrue(all(way["fits"] for way in best))

    def test_what_is_given_stays(self):
        """Also where the search would not try it: what one rank has no use for, a partition inside
        a node, offloading in pipelines. --offload auto is what the search does in any case."""
        words = ["--fit", "--dry-run", "--model", "layers=4,heads=2,channels=16,vocab=256"]
        words += ["--seq-len", 16, "--batch-tokens", 128]
        rates = ",intra=5,inter=1,tflops=1,memory=10,link=10,host=10"
        for cluster, given in (
            ("1x1", "--zero 3"),
            ("1x1", "--zero-quantized-gradients"),
            ("1x1", "--zero 3 --zero-quantized-weights"),
            ("1x4", "--zero 3 --zero-hpz-partition-size 2"),
            ("2x2", "--zero 3 --zero-hpz-partition-size 2 --pipeline 3:2,3:2"),
            ("1x4", "--offload params"),
            ("1x4", "--offload optimizer --pipeline 3:2,3:2"),
        ):
            ways = ask(*words, "--cluster", cluster + rates, *given.split())["best"]
            self.assertTrue(ways)
            for way, flag in itertools.product(ways, re.findall(r"--\S+(?: \w\S*)?", given)):
                self.assertIn(f"{flag} ", way["flags"], (cluster, given))
        words += ["--cluster", "1x4" + rates, "--device-memory", "350K"]
        self.assertEqual(ask(*words), ask(*words, "--offload", "auto"))

    def test_nothing_fits(self):
        cluster = ["--cluster", "1x1,gpu=v100", "--dry-run"]
        done = run("--fit", "--model", "gpt3:13B", *cluster)
        self.assertEqual(done.returncode, EXIT_RESOURCES)
        self.assertIn("no way to run fits into 31.0 GiB", done.stderr)


class Presets(harness.TestCase):
    def test_every_gpu(self):
        """gpu= stands for all rates; a key that is given replaces its rate."""
        for gpu, peak, capacity in (
            ("a100", 312, 79), ("b200", 2250, 178), ("h100", 989, 79), ("h200", 989, 139),
            ("l40s", 362, 44), ("v100", 125, 31),
        ):
            words = ["--dry-run", "--model", "d12", "--offload", "all", "--cluster"]
            found = ask(*words, f"2x8,gpu={gpu}")
            self.assertEqual((found["peak_flops"], found["device"]), (peak * 1e12, gpu))
            self.assertLessEqual(found["rates"]["flops"], found["peak_flops"])
            self.assertTrue(found["predicted"]["fits"])
            own = ask(*words, f"2x8,inter=8,tflops=7,gpu={gpu},capacity=0.1")
            self.assertEqual(own["rates"]["flops"], 7e12)
            self.assertEqual(own["rates"]["inter"], 1e9)
            self.assertEqual(own["rates"]["intra"], found["rates"]["intra"])
            self.assertEqual(own["peak_flops"], found["peak_flops"])
            self.assertFalse(own["predicted"]["fits"])
            text = run(*words, f"2x8,gpu={gpu}").stdout
            self.assertIn(f"gpu={gpu}: {peak} TFLOP/s", text)
            self.assertIn(f"fits {capacity}.0 GiB", text)

    def test_missing_rates(self):
        """What a forecast needs is asked for, by name, and nothing is timed instead."""
        rates = dict(intra=10, inter=10, tflops=1, memory=10, link=10, host=10, disk=1)
        stored = ["--offload", "all", "--offload-dir", scratch()]
        for missing, mode, words in (
            ("intra", "--dry-run", []),
            ("inter", "--dry-run", []),
            ("tflops", "--dry-run", []),
            ("memory", "--dry-run", []),
            ("link", "--dry-run", ["--offload", "optimizer"]),
            ("host", "--dry-run", ["--offload", "optimizer"]),
            ("disk", "--dry-run", stored),
            ("tflops", "--plan", []),
            ("memory", "--plan", []),
        ):
            text = "2x2," + ",".join(f"{k}={v}" for k, v in rates.items() if k != missing)
            done = run(mode, "--model", "d6", *words, "--cluster", text)
            self.assertEqual(done.returncode, EXIT_INPUT, (missing, mode))
            self.assertIn(f"needs {missing}=", done.stderr.splitlines()[0])
            whole = f"{text},{missing}={rates[missing]}"
            self.assertEqual(run(mode, "--model", "d6", *words, "--cluster", whole).returncode, 0)
        done = run("--dry-run", "--model", "d6", "--dtype", "fp32", "--cluster", "1x1,gpu=a100")
        self.assertEqual(done.returncode, EXIT_INPUT)
        self.assertIn("give --dtype bf16", done.stderr)


class Forecast(harness.TestCase):
    CLUSTER = ["--cluster", "1x8,gpu=a100"]

    def test_speed(self):
        """tokens/s and MFU follow from the step; the days from --steps."""
        words = ["--dry-run", "--model", "gpt2:124M", *self.CLUSTER, "--seq-len", 1024]
        words += ["--micro-batch", 8, "--steps", 20000]
        found, tokens = ask(*words), 8 * 8 * 1024
        predicted, seconds = found["predicted"], found["predicted"]["step_ms"] / 1000
        self.assertAlmostEqual(predicted["tokens_per_s"] * seconds / tokens, 1, delta=1e-9)
        # 2 operations for each weight of a product, and attention's; three times for a step
        weights = 12 * 12 * 768**2 + 768 * 50304
        flops = 3 * tokens * (2 * weights + 12 * 2 * 1024 * 768)
        self.assertAlmostEqual(predicted["mfu"] * seconds * 8 * 312e12 / flops, 1, delta=0.02)
        hours = 20000 * seconds / 3600
        text = run(*words).stdout
        self.assertIn(f"1.31 B tokens take {hours * 60:.3g} minutes", text)

    def test_what_would_fit(self):
        for words, remedy in (
            (["--model", "gpt3:1.3B"], "; --zero 1 would fit"),
            (["--model", "gpt3:6.7B"], "; --zero 3 --recompute block would fit"),
            (
                ["--model", "gpt2:1558M", "--zero", 3, "--micro-batch", 32],
                "; --recompute block would fit",
            ),
            (["--model", "gpt3:175B"], " TiB"),
        ):
            words += ["--dry-run", "--seq-len", 1024, "--cluster", "1x8,gpu=a100,capacity=24"]
            line = [s for s in run(*words).stdout.splitlines() if s.startswith("memory  ")][0]
            self.assertIn("does not fit 24.0 GiB, by", line)
            self.assertTrue(line.endswith(remedy), line)
            self.assertFalse(ask(*words)["predicted"]["fits"])

    def test_stages(self):
        """Whether a pipeline fits is decided by the stage that needs most, not by rank 0's."""
        words = ["--dry-run", "--model", "gpt2:124M", "--pipeline", "2:2,12:2", "--zero", 1]
        words += ["--micro-batch", 4, "--batch-tokens", 4096]
        small = ask(*words, "--cluster", "1x4,gpu=a100,capacity=1")
        self.assertLess(small["predicted"]["memory"]["device"], 2**30)
        self.assertFalse(small["predicted"]["fits"])
        self.assertTrue(ask(*words, "--cluster", "1x4,gpu=a100")["predicted"]["fits"])

    def test_plan(self):
        """--plan in one process, for a model that no CPU could time."""
        found = ask("--plan", "--model", "gpt3:13B", "--cluster", "8x8,gpu=h100")
        self.assertTrue(found["predicted"]["fits"])
        self.assertLessEqual(max(found["predicted"]["memory"]), 79 * 2**30)
        self.assertTrue(0.05 < found["predicted"]["mfu"] < 0.6)
        samples = found["micro_batch"] * found["micro_batches"]
        tokens = found["predicted"]["tokens_per_s"] * found["predicted"]["step_ms"] / 1000
        self.assertAlmostEqual(tokens / (samples * 2048), 1, delta=1e-9)


class Sizes(harness.TestCase):
    """Sequences and steps that no flag gives: with --cluster those that such models are trained
    with, else those of the run that the same flags start; both are printed."""

    CLUSTER = ["--dry-run", "--cluster", "1x8,gpu=h100"]
    PAPER = {"125M": 2**19, "350M": 2**19, "760M": 2**19, "1.3B": 2**20, "2.7B": 2**20}
    PAPER |= {"6.7B": 2**21, "13B": 2**21, "175B": 1600 * 2048}  # table 2.1 of GPT-3's paper

    def flags(self, *words):
        found = ask(*words)["flags"]
        return found["seq-len"], found["batch-tokens"]

    def test_models_of_the_paper(self):
        def check(size):
            return self.flags(*self.CLUSTER, "--model", f"gpt3:{size}")

        found = at_once(check, self.PAPER)
        self.assertEqual(found, [(2048, tokens) for tokens in self.PAPER.values()])

    def test_other_models(self):
        for model, length, tokens in (
            ("gpt2:124M", 1024, 2**19),
            ("d12", 1024, 2**19),
            ("llama3.1:8B", 8192, 2**21),
            ("llama3:70B", 8192, None),
            ("qwen3:0.6B", 4096, 2**19),
            ("nano:d20", 2048, 2**19),
            ("layers=24,heads=16,channels=2048", 2048, 2**20),
            ("layers=2,heads=2,channels=64,vocab=256,positions=128", 128, 0),
            ("layers=2,heads=2,channels=64,vocab=256", 256, 0),
        ):
            found = self.flags(*self.CLUSTER, "--model", model)
            self.assertEqual(found[0], length, model)
            if tokens is None:  # between 13B's and 175B's
                self.assertTrue(2**21 < found[1] < 1600 * 2048, (model, found))
            else:
                self.assertEqual(found[1], tokens, model)

    def test_what_is_given_stays(self):
        model = ["--model", "gpt3:1.3B"]
        for words, expected in (
            (["--seq-len", 512], (512, 0)),
            (["--micro-batch", 1], (2048, 0)),
            (["--batch-tokens", 2**18], (2048, 2**18)),
            (["--batch-tokens", 4096], (256, 4096)),  # 2 samples of 2048 for 8 ranks
            (["--seq-len", 512, "--batch-tokens", 4096], (512, 4096)),
            (["--micro-batch", 2, "--batch-tokens", 2**14], (2048, 2**14)),
            (["--micro-batch", 3, "--batch-tokens", 2**14], (256, 2**14)),  # 8 samples of 2048
            (["--pipeline", 2, "--micro-batches", 4], (2048, 0)),
        ):
            self.assertEqual(self.flags(*self.CLUSTER, *model, *words), expected, words)
        here = ["--dry-run", "--model", "d6"]  # what the run of the same flags has
        self.assertEqual(self.flags(*here), (256, 0))
        line = "sizes      --seq-len 256, --batch-tokens 1024: not given, the run's default"
        self.assertIn(line, run(*here).stdout)

    def test_searches(self):
        """The micro-batch is theirs to choose, so they choose the step whatever else is given."""
        chosen = "sizes      --seq-len 2048, --batch-tokens 1048576: not given, as such models"
        cluster = ["--cluster", "1x8,gpu=h100", "--model", "gpt3:1.3B"]
        for words in (["--plan"], ["--fit", "--dry-run"]):
            self.assertIn(chosen, run(*words, *cluster).stdout, words)
            found = ask(*words, *cluster)
            self.assertEqual((found["seq_len"], found["batch_tokens"]), (2048, 2**20))
            shorter = ask(*words, *cluster, "--seq-len", 1024)
            self.assertEqual((shorter["seq_len"], shorter["batch_tokens"]), (1024, 2**20))
        best = found["best"][0]
        typed = ask("--dry-run", *cluster, *shlex.split(best["flags"]))
        self.assertAlmostEqual(typed["predicted"]["step_ms"] / best["step_ms"], 1, delta=1e-9)

    def test_odd_numbers_of_ranks(self):
        """A step is whole samples for each rank."""
        _, tokens = self.flags("--dry-run", "--cluster", "3x8,gpu=h100", "--model", "gpt3:1.3B")
        self.assertEqual(tokens % (24 * 2048), 0)
        self.assertLess(abs(tokens / 2**20 - 1), 0.05)


if __name__ == "__main__":
    harness.main()
