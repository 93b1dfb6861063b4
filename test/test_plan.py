#!/usr/bin/env python3
"""test_plan.py: --plan as a user would run it: its object, its table, plans that are given, and
what is refused.

    python3 test/test_plan.py

Standard library only. What the search chooses is tested by test_planner.c; the planners of the
papers that --plan is compared with, here; and whether faults of the search and of --fit
(planted_faults.py) are seen.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import unittest
from itertools import combinations
from pathlib import Path
from random import Random

import harness
from harness import (
    BINARY,
    ENVIRONMENT,
    PLANTED,
    ROOT,
    SEED,
    apart,
    at_once,
    output_of,
    sample,
    scratch,
)
from planted_faults import PLANNER, numbered

sys.path.insert(0, str(Path(ROOT) / "scripts"))
from papers import dapple_planners  # noqa: E402

PROFILES = os.path.join(ROOT, "test/golden/dapple_profiles.json")
TASK = ["--cluster", "2x8,intra=25,inter=3,gather=1", "--seq-len", "1", "--batch-tokens", "64"]


def plan(*flags, model="bert-48"):
    command = [
        BINARY,
        "--plan",
        "--profile",
        f"{PROFILES}:{model}" if model else PROFILES,
        *TASK,
        *flags,
    ]
    return output_of(*command, env=ENVIRONMENT, text=True)


class Plan(unittest.TestCase):
    def check_plan(self, one, units=53, ranks=16, samples=64):
        self.assertEqual(sum(stage["units"] for stage in one["stages"]), units)
        self.assertEqual(
            sorted(rank for stage in one["stages"] for rank in stage["ranks"]), list(range(ranks))
        )
        self.assertTrue(all(stage["replicas"] == len(stage["ranks"]) for stage in one["stages"]))
        self.assertEqual(one["micro_batch"] * one["micro_batches"], samples)
        self.assertIn(one["recompute"], (True, False))
        self.assertIn(one["warmup"], ("a", "b"))
        self.assertIn(one["schedule"], ("gpipe", "dapple", "zero-bubble"))
        self.assertEqual(len(one["predicted"]["memory"]), len(one["stages"]))
        self.assertTrue(all(isinstance(size, int) for size in one["predicted"]["memory"]))
        self.assertTrue(0 <= one["predicted"]["bubble"] < 1)

    def test_object(self):
        answer = json.loads(plan("--json").stdout)
        self.check_plan(answer)
        for other in answer["alternatives"]:
            self.check_plan(other)
            self.assertGreaterEqual(other["predicted"]["step_ms"], answer["predicted"]["step_ms"])
        names = [other["name"] for other in answer["alternatives"]]
        self.assertEqual(names[:3], ["data parallel", "GPipe, even split", "runner-up"])

    def test_flags_to_type(self):
        """The flags that are printed for a plan are accepted, and give its predicted time."""
        slow = "2x2,intra=5,inter=0.1,tflops=1,memory=100,latency=20"
        cases = {
            "stages": ["--cluster", slow, "--batch-tokens", 2048],
            "one": ["--cluster", "1x4,intra=900,tflops=1,memory=900", "--batch-tokens", 65536],
            "small": ["--cluster", slow, "--batch-tokens", 4096, "--device-memory", "80M"],
        }
        size = ["--model", "layers=6,heads=4,channels=256,vocab=512", "--seq-len", 64]
        size += ["--dtype", "fp32"]
        kinds = set()
        for name, words in cases.items():
            words = [BINARY, *map(str, [*words, *size])]
            ask = lambda *more: subprocess.check_output(
                [*words, *more], env=apart(ENVIRONMENT), text=True, timeout=120
            )
            answer = json.loads(ask("--plan", "--json"))
            self.assertIn(f"\nflags      {answer['flags']}\n", ask("--plan"))
            for one in (answer, *answer["alternatives"]):
                flags, spec = shlex.split(one["flags"]), "1"
                if len(one["stages"]) > 1:
                    spec = ",".join(f"{s['units']}:{s['replicas']}" for s in one["stages"])
                    in_order = [r for s in one["stages"] for r in s["ranks"]] == [0, 1, 2, 3]
                    spec = spec if in_order else "auto"
                self.assertEqual(flags[:2], ["--pipeline", spec], one)
                if spec == "auto":
                    continue
                kinds.add(min(len(one["stages"]), 2))
                took = json.loads(ask("--dry-run", "--json", *flags))["predicted"]["step_ms"]
                self.assertLess(abs(took / one["predicted"]["step_ms"] - 1), 0.15, one)
        self.assertEqual(kinds, {1, 2})

    def test_one_stage(self):
        """--pipeline 1 gives one stage, as --pipeline 2 gives two, and --micro-batch is a rank's
        then, as in a run; data parallelism takes as many micro-batches as a run of its flags, and
        sums a table of both ends once. In drawn cases where passes, however small, take time, and
        links are fast or slow."""
        draw = Random(f"{SEED} one stage")

        def one(number):
            ranks, T = draw.choice((1, 2, 3, 5, 8)), 64
            samples = ranks * draw.choice((2, 3, 4, 8)) + draw.choice((0, 0, 1))
            where = f"1x{ranks},intra={draw.choice((900, 0.3))},tflops=1,memory=100,half=500"
            model = f"layers=4,heads=4,channels=256,vocab={draw.choice((512, 20000))}"
            words = ["--cluster", where, "--model", model]
            words += ["--dtype", "fp32", "--seq-len", T, "--batch-tokens", T * samples]
            return words, ranks, samples, draw.randint(1, 4), draw.choice((0, 0, 1))

        def check(case):
            words, ranks, samples, rows, recompute = case
            ask = lambda *more: json.loads(
                output_of(BINARY, "--json", *words, *more, env=ENVIRONMENT, text=True).stdout
            )
            rows = min(rows, -(-samples // ranks))
            given = ["--pipeline", 1, "--micro-batch", rows]
            given += ["--recompute", "block"] * recompute
            told = ask("--plan", *given)
            apart = ask("--plan", "--micro-batch", 1)  # of all ranks together
            alone = [p for p in (apart, *apart["alternatives"]) if len(p["stages"]) == 1]
            self.assertTrue(alone, case)
            self.assertEqual((len(told["stages"]), told["alternatives"]), (1, []), case)
            self.assertIn(f"--micro-batch {rows} ", told["flags"], case)
            self.assertEqual(told["recompute"], bool(recompute), case)
            for plan in (told, *alone):
                found = ask("--dry-run", *shlex.split(plan["flags"]))["predicted"]
                believed = plan["predicted"]["step_ms"]
                self.assertLess(abs(believed / found["step_ms"] - 1), 0.1, (case, plan))
                self.assertEqual(plan["predicted"]["memory"], [found["memory"]["device"]], case)
                self.assertTrue(min(found["idle"], plan["predicted"]["bubble"]) >= 0, (case, found))

        at_once(check, [one(number) for number in range(12)])

    def test_beside_the_forecast(self):
        """What --plan takes a plan's step for, stage by stage, is about what --dry-run predicts of
        every action of a run: in drawn cases, most of all within a twentieth."""
        draw = Random(f"{SEED} forecast")
        models = ["gpt2:124M", "gpt2:774M", "gpt2:1558M", "gpt3:6.7B", "gpt3:13B", "llama3.1:8B"]
        models += ["layers=24,heads=16,channels=2048,vocab=50000", "layers=48,heads=8,channels=512"]

        def one(number):
            shape = draw.choice(["1x4", "1x8", "2x4", "2x8", "4x8", "4x1", "8x1"])
            nodes, ranks = map(int, shape.split("x"))
            T = draw.choice((512, 1024))
            tokens = T * nodes * ranks * draw.choice((1, 2, 4, 16))
            gpu = draw.choice(("a100", "h100", "v100", "l40s"))
            words = ["--cluster", f"{shape},gpu={gpu}", "--model", draw.choice(models)]
            words += ["--dtype", "bf16", "--seq-len", T, "--batch-tokens", tokens]
            words += draw.choice(([], [], ["--optimizer", "muon"]))
            return [*words, "--zero", draw.randrange(4)]

        def ratio(words):
            answers = [
                output_of(BINARY, *flags, *words, "--json", env=ENVIRONMENT, text=True)
                for flags in (["--plan"], ["--dry-run", "--pipeline", "auto"])
            ]
            if any(answer.returncode for answer in answers):
                return None  # it does not fit
            believed, took = (json.loads(one.stdout)["predicted"]["step_ms"] for one in answers)
            return believed / took

        cases = [one(number) for number in sample(range(60), 12)]
        ratios = dict(zip(map(str, cases), at_once(ratio, cases)))
        found = sorted(value for value in ratios.values() if value)
        self.assertGreater(len(found), len(cases) / 3)
        self.assertTrue(0.7 < found[0] and found[-1] < 1.25, ratios)
        self.assertTrue(0.95 < found[len(found) // 2] < 1.05, ratios)

    def test_memory(self):
        limit = 4 << 30
        answer = json.loads(plan("--json", "--device-memory", "4G").stdout)
        for one in (answer, *answer["alternatives"]):
            self.assertLessEqual(max(one["predicted"]["memory"]), limit)
        self.assertNotIn("data parallel", [other["name"] for other in answer["alternatives"]])
        self.assertEqual(plan("--device-memory", "1M").returncode, 3)

    def test_memory_of_a_model(self):
        """What --plan says that stages take is what --dry-run says of its flags, and fits; in drawn
        cases with little memory, of the alternatives, too."""
        draw = Random(f"{SEED} memory")

        def one(number):
            layers, channels = draw.choice((4, 8, 12, 24)), draw.choice((256, 512, 1024))
            shape = draw.choice(("1x4", "2x2", "2x4", "4x1", "3x2"))
            nodes, ranks = map(int, shape.split("x"))
            T, parameters = draw.choice((256, 1024)), channels * (12 * layers * channels + 50000)
            share = 16 * parameters / (nodes * ranks) / 2**30
            capacity = 0.1 + share * draw.choice((1.5, 2, 3, 5, 10))
            where = f"{shape},intra=100,inter={draw.choice((1, 10, 100))},tflops=100,memory=1000"
            arch = draw.choice(("gpt2", "llama", "qwen3", "nano"))
            model = f"arch={arch},layers={layers},heads={channels // 64},channels={channels}"
            vocabulary = draw.choice((1000, 50257))
            words = ["--cluster", f"{where},capacity={capacity:.3f}", "--seq-len", T]
            words += ["--model", f"{model},vocab={vocabulary}", "--zero", draw.randrange(4)]
            words += draw.choice(([], ["--dtype", "bf16"], ["--optimizer", "muon"]))
            return words, T * nodes * ranks * draw.choice((8, 32))

        def check(case):
            words, tokens = case
            ask = lambda *more: output_of(
                BINARY, "--json", *words, *more, env=ENVIRONMENT, text=True, timeout=120
            )
            done = ask("--plan", "--batch-tokens", tokens)
            if done.returncode == 3:
                return None  # nothing fits
            answer = json.loads(done.stdout)
            for plan in (answer, *answer["alternatives"][:2]):
                flags = shlex.split(re.sub("--zero . ", "", plan["flags"]))
                run = json.loads(ask("--dry-run", *flags).stdout)["predicted"]
                said, found = plan["predicted"]["memory"][0], run["memory"]["device"]
                if "auto" in flags:  # the run may plan otherwise
                    said = found
                self.assertEqual((said, True), (found, run["fits"]), (words, plan))
            return answer

        cases = [one(number) for number in sample(range(60), 12)]
        found = list(filter(None, at_once(check, cases)))
        self.assertGreater(len(found), len(cases) / 3)

    def test_memory_is_tight(self):
        """Where ZeRO divides gradients, the search counts slots; else it would leave out what fits,
        after plans that do not."""
        for shape, capacity, zero, model, more in (
            ("1x2", 0.02598, 3, "arch=nano,layers=2,vocab=300", (256, 4)),
            ("1x4", 0.02267, 3, "layers=3,vocab=1000", (64, 4, "--optimizer", "sgd")),
            ("1x3", 0.03704, 2, "arch=llama,layers=5,vocab=1000",
             (64, 3, "--optimizer", "sgd", "--dtype", "bf16")),
        ):
            T, samples, *flags = more
            rates = f"intra=100,inter=10,tflops=1,memory=1000,capacity={capacity}"
            words = ["--cluster", f"{shape},{rates}", "--model", f"{model},heads=4,channels=256"]
            words += ["--zero", zero, "--seq-len", T, "--batch-tokens", T * samples, *flags]
            done = output_of(BINARY, "--plan", "--json", *words, env=ENVIRONMENT, text=True)
            self.assertEqual(done.returncode, 0, (words, done.stderr))
            self.assertTrue(json.loads(done.stdout)["predicted"]["fits"], words)

    def test_given(self):
        free, given = json.loads(plan("--json").stdout), json.loads(
            plan("--json", "--pipeline", "28:8,25:8", "--pipeline-warmup", "b").stdout
        )
        self.check_plan(given)
        self.assertEqual(
            [(stage["units"], stage["replicas"]) for stage in given["stages"]], [(28, 8), (25, 8)]
        )
        self.assertEqual((given["warmup"], given["alternatives"]), ("b", []))
        self.assertGreaterEqual(given["predicted"]["step_ms"], free["predicted"]["step_ms"])
        pinned = json.loads(plan("--json", "--pipeline", "2", "--micro-batch", "16").stdout)
        self.assertEqual((pinned["micro_batch"], pinned["micro_batches"]), (16, 4))

    def test_schedules(self):
        """Of the same stages: zero bubble waits less than dapple, and holds more; gpipe most."""
        found = {
            kind: json.loads(
                plan(
                    "--json",
                    "--pipeline",
                    "28:8,25:8",
                    "--pipeline-schedule",
                    kind,
                    "--micro-batch",
                    "8",
                ).stdout
            )
            for kind in ("dapple", "zero-bubble", "gpipe")
        }
        for kind, one in found.items():
            self.check_plan(one)
            self.assertEqual(one["schedule"], kind)
        steps, memory = (
            {kind: pick(one["predicted"]) for kind, one in found.items()}
            for pick in (lambda p: p["step_ms"], lambda p: max(p["memory"]))
        )
        self.assertLess(steps["zero-bubble"], steps["dapple"])
        self.assertTrue(memory["dapple"] < memory["zero-bubble"] < memory["gpipe"], memory)

    def test_table(self):
        text = plan().stdout
        for word in (
            "plan",
            "data parallel",
            "GPipe, even split",
            "memory MiB",
            "ranks",
        ):
            self.assertIn(word, text)

    def test_refused(self):
        for flags, model, word in (
            (["--pipeline", "28:8,26:8"], "bert-48", "53"),
            (["--pipeline", "3"], "bert-48", "16 ranks"),
            ([], "", "which model"),
            ([], "gpt", "no model"),
            (["--micro-batch", "3"], "bert-48", "multiple"),
            (["--micro-batch", "2", "--micro-batches", "3"], "bert-48", "--micro-batches x"),
            (["--recompute", "block"], "bert-48", "--recompute"),
            (
                ["--pipeline", "2", "--pipeline-schedule", "zero-bubble", "--recompute", "block"],
                "bert-48",
                "zero-bubble",
            ),
        ):
            run = plan(*flags, model=model)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(word, run.stderr)

    def test_useless(self):
        """What a profile makes useless is told, beside the answer that it does not change."""
        plain, told = plan("--json"), plan("--json", "--model", "d6", "--optimizer", "muon")
        self.assertEqual((told.returncode, told.stdout), (0, plain.stdout))
        notes = re.findall(r"(?m)^note: --(\S+) has no effect: --profile says what", told.stderr)
        self.assertEqual((notes, plain.stderr), (["model", "optimizer"], ""))


class Experts(unittest.TestCase):
    """--plan of models with experts: on how many ranks they are is among the choices."""

    RATES = "intra=50,inter=5,tflops=1,half=50,memory=100,latency=10"

    def ask(self, *words):
        done = subprocess.run(
            list(map(str, [BINARY, *words])),
            env=apart(ENVIRONMENT),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(done.returncode, 0, (words, done.stderr))
        return done.stdout

    def check_way(self, one, words, ranks, samples):
        """The flags of a way give what was said of it."""
        flags, said = shlex.split(one["flags"]), one["predicted"]
        spec = ",".join(f"{stage['units']}:{stage['replicas']}" for stage in one["stages"])
        spec = spec if len(one["stages"]) > 1 else "1"
        self.assertEqual(flags[flags.index("--pipeline") + 1], spec, one)
        found = json.loads(self.ask(*words, "--dry-run", "--json", *flags))["predicted"]
        for key in ("step_ms", "tokens_per_s", "tflops", "mfu", "fits", "all_to_all_ms", "uneven"):
            self.assertEqual(said.get(key), found.get(key), (key, one))
        self.assertEqual(said.get("uneven_step_ms"), found.get("uneven_step_ms"), one)
        self.assertEqual(said["memory"][0], found["memory"]["device"], one)
        self.assertTrue(said["fits"] and 0 <= said["bubble"] < 1, one)
        numbers = [rank for stage in one["stages"] for rank in stage["ranks"]]
        self.assertEqual(numbers, list(range(ranks)))
        self.assertGreaterEqual(one["micro_batch"] * one["micro_batches"], samples)
        for stage in one["stages"]:
            self.assertEqual(stage["replicas"] % one["expert_parallel"], 0, one)
        for key in ("zero", "expert_parallel"):
            self.assertEqual(flags[flags.index("--" + key.replace("_", "-")) + 1], str(one[key]))

    def test_flags_to_type(self):
        """Drawn models and clusters. Each forecast is that of --dry-run, to the last digit."""
        random, kinds = Random(f"{SEED} experts"), set()
        for share, given in (  # of what one stage takes where each rank has all experts
            (3, ["--pipeline", 1, "--expert-parallel", 4]),
            (0.6, []),
            (0.9, ["--pipeline", 2, "--expert-parallel", 2]),
        ):
            nodes, ranks = random.choice(((1, 4), (2, 4), (1, 8)))
            model = f"arch={random.choice(('llama', 'qwen3'))},layers={random.randint(3, 5)},"
            model += "heads=4,channels=128,vocab=512,experts=8,expert_ffn=192,"
            model += f"top_k={random.randint(1, 2)}"
            words = ["--model", model, "--seq-len", 64, "--batch-tokens", 64 * 32]
            cluster = f"{nodes}x{ranks},{self.RATES}"
            words += ["--dtype", "bf16"]
            plain = [*words, "--micro-batch", 1, "--cluster", cluster, "--dry-run", "--json"]
            device = json.loads(self.ask(*plain))["predicted"]["memory"]["device"]
            words += ["--cluster", f"{cluster},capacity={share * device / 2**30}"]
            words += random.choice(([], ["--moe-buffer", 1.25], ["--moe-balance", "aux"]))
            words += random.choice(([], ["--zero", random.randrange(1, 4)]))
            answer = json.loads(self.ask(*words, *given, "--plan", "--json"))
            times = [one["predicted"]["step_ms"] for one in (answer, *answer["alternatives"])]
            self.assertEqual(times, sorted(times))
            for one in (answer, *answer["alternatives"]):
                self.check_way(one, words, nodes * ranks, 32)
                kinds.add((len(one["stages"]) > 1, one["expert_parallel"] > 1))
            text = self.ask(*words, *given, "--plan")
            self.assertIn(f"\nflags      {answer['flags']}\n", text)
            waits = "of a step for rows, if loads are even" in " ".join(text.split())
            self.assertEqual(waits, answer["expert_parallel"] > 1)
        self.assertTrue({(True, True), (False, True)} <= kinds, kinds)

    def test_given(self):
        """Flags that are given stay as they are."""
        words = ["--model", "arch=llama,layers=4,heads=4,channels=64,vocab=512,experts=4"]
        words += ["--seq-len", 64, "--batch-tokens", 64 * 16, "--dtype", "bf16", "--plan", "--json"]
        words += ["--cluster", f"1x4,{self.RATES}"]
        for given in (
            {"--pipeline": "2:2,4:2", "--expert-parallel": 2},
            {"--pipeline": 2, "--zero": 3, "--pipeline-schedule": "gpipe"},
            {"--expert-parallel": 4, "--micro-batch": 2},
            {"--pipeline": 1, "--expert-parallel": 1},
        ):
            flags = [word for pair in given.items() for word in pair]
            answer = json.loads(self.ask(*words, *flags))
            for one in (answer, *answer["alternatives"]):
                stages = [(stage["units"], stage["replicas"]) for stage in one["stages"]]
                spec = {1: [(6, 4)], 2: [(3, 2), (3, 2)], "2:2,4:2": [(2, 2), (4, 2)]}
                self.assertIn(stages, [spec.get(given.get("--pipeline"), stages)])
                for key in ("expert_parallel", "zero"):
                    self.assertIn(one[key], [given.get("--" + key.replace("_", "-"), one[key])])
                self.assertIn(one["schedule"], [given.get("--pipeline-schedule", one["schedule"])])

    def test_refused(self):
        small = ["--seq-len", 64, "--batch-tokens", 1024, "--cluster", f"1x4,{self.RATES}"]
        experts = "arch=llama,layers=2,heads=4,channels=64,vocab=512,experts=4"
        for model, words, status, name in (
            (experts, ["--expert-parallel", 3], 2, "--expert-parallel 3"),
            (experts + ",top_k=1", ["--optimizer", "muon"], 2, "--optimizer muon"),
            (experts, ["--zero", 3, "--zero-quantized-weights"], 2, "--zero-quantized-weights"),
            (experts, ["--device-memory", "1M"], 3, "--plan: no way to run fits"),
            (experts, ["--offload", "all"], 2, "--offload"),
            ("d12", ["--expert-parallel", 2], 2, "no experts"),
            ("d12", ["--moe-balance", "aux"], 2, "no experts"),
        ):
            command = [BINARY, "--plan", "--model", model, *small, *words]
            done = output_of(*command, text=True, env=ENVIRONMENT)
            self.assertEqual(done.returncode, status, (words, done.stderr))
            self.assertIn(name, done.stderr)

    @unittest.skipUnless(harness.ALL, "TEST_ALL=1: some seconds each")
    def test_presets(self):
        """Published mixtures, on clusters that they fit."""
        for model, shape, more in (
            ("mixtral:8x7B", "4x8,gpu=h100", []),
            ("qwen3:30B-A3B", "2x8,gpu=h100", ["--moe-buffer", 1.25]),
            ("m6:10T", "512x8,gpu=h100", ["--moe-buffer", 1.25, "--seq-len", 512]),
        ):
            words = ["--model", model, "--dtype", "bf16", "--cluster", shape, *more]
            answer = json.loads(self.ask(*words, "--plan", "--json"))
            flags = shlex.split(answer["flags"])
            found = json.loads(self.ask(*words, "--dry-run", "--json", *flags))["predicted"]
            self.assertEqual(found["step_ms"], answer["predicted"]["step_ms"])


class OtherPlanners(unittest.TestCase):
    """scripts/papers/dapple_planners.py."""

    def test_equations_by_hand(self):
        # (forward, backward, all-reduce) of two stages and their link. Nothing gains where all are
        # alike, so the pivot is the last: 1 + 0.5 + 1, 3 x 3, then what drains.
        pivot, latency = dapple_planners.pivot, dapple_planners.latency
        line = [(1, 2, 0), (0.5, 0.5, 0), (1, 2, 0)]
        self.assertEqual((pivot(line, 4), latency(line, 4)), (2, 2.5 + 9 + 4.5))
        # The first stage is slower: (M - 1) 6 > (M - 1) 3 + 1.
        slow = [(2, 4, 0), (0.5, 0.5, 0), (1, 2, 0)]
        self.assertEqual((pivot(slow, 4), latency(slow, 4)), (0, 2 + 18 + 4))
        # The first stage's all-reduce adds to its drain; the last one's hides behind the backward
        # passes from the pivot to it.
        self.assertEqual(latency([(2, 4, 3), *slow[1:]], 4), 2 + 18 + 4 + 3)
        self.assertEqual(latency([*slow[:2], (1, 2, 11)], 4), 2 + 18 + 11 - 6.5)
        # What is between a stage and the pivot counts: with M = 2, 4.5 is not more than 3 + 1.5.
        middle = [(1.5, 3, 0), (0.5, 1, 0), (1, 2, 0)]
        self.assertEqual([pivot(middle, batches) for batches in (2, 3)], [2, 0])
        # Always against the pivot so far.
        self.assertEqual(pivot([(2, 2, 0), (2.1, 2.1, 0), (1, 1, 0)], 10), 1)
        self.assertEqual(latency([(1, 2, 3)], 1), 1 + 2 + 3)

    def test_paper_choices(self):
        """Another evaluation of the equations on these profiles gave the same kinds of plans, and
        these speed-ups."""
        config_a, config_c = "2x8,intra=25,inter=3,gather=1", "16x1,inter=1.2"
        for name, samples, batch, *wanted in (
            ("vgg-19", 2048, 1, ("26:16", 16), ("22:15,4:1", 12.7)),
            ("gnmt-16", 1024, 1, ("39:8,57:8", 12.4), ("straight", 5.2)),
            ("bert-48", 64, 1, ("28:8,25:8", 15.1), ("straight", 11.6)),
            ("xlnet-36", 128, 1, ("24:8,19:8", 15.6), ("straight", 10.5)),
            ("amoebanet-36", 128, 8, ("31:8,13:8", 12.4), ("33:11,11:5", 5.4)),
        ):
            model = dapple_planners.Model(Path(PROFILES), name)
            for text, (plan, speedup) in zip((config_a, config_c), wanted):
                with self.subTest(model=name, cluster=text):
                    seconds, chosen = dapple_planners.equations(
                        model, dapple_planners.Cluster(text), samples, batch
                    )
                    straight = all(replicas == 1 for _, replicas in chosen)
                    self.assertEqual("straight" if straight else dapple_planners.spec(chosen), plan)
                    ours = samples * model.seconds(0, model.units) / seconds
                    self.assertAlmostEqual(ours / speedup, 1, delta=0.03)

    def test_pipedream(self):
        """Nodes of one GPU, and one node: the slowest stage or link is the fastest that there is,
        among all cuts and replicas."""
        random = Random(SEED)
        for _ in range(20):
            units, ranks = random.randint(2, 6), random.randint(2, 5)
            nodes = [
                {"id": u, "name": "layer", "act_bytes": random.uniform(1e5, 1e8)}
                | {key: random.uniform(1, 10) for key in ("fwd_ms", "bwd_ms")}
                | {"param_bytes": random.choice((0, random.uniform(1e6, 1e9)))}
                for u in range(units)
            ]
            edges = [[u, u + 1] for u in range(units - 1)]
            profile = {"profile_batch_size": 2, "nodes": nodes, "edges": edges}
            path = Path(scratch()) / "profile.json"
            path.write_text(json.dumps({"models": {"m": profile}}))
            model = dapple_planners.Model(path, "m")
            for text in (f"1x{ranks},intra=2,inter=1", f"{ranks}x1,inter=2"):
                plan = dapple_planners.pipedream(model, dapple_planners.Cluster(text))
                self.assertEqual([sum(column) for column in zip(*plan)], [units, ranks])
                plans = (
                    list(zip(lengths, replicas))
                    for stages in range(1, min(units, ranks) + 1)
                    for lengths in self.parts(units, stages)
                    for replicas in self.parts(ranks, stages)
                )
                least = min(self.slowest(model, one) for one in plans)
                self.assertAlmostEqual(self.slowest(model, plan) / least, 1, delta=1e-9)

    def parts(self, whole, count):
        for cuts in combinations(range(1, whole), count - 1):
            yield [end - begin for begin, end in zip((0, *cuts), (*cuts, whole))]

    def slowest(self, model, plan, rate=2e9):
        times, unit = [], 0
        for units, replicas in plan:
            end, batch = unit + units, model.batch
            size = model.parameters[end] - model.parameters[unit]
            computing = batch * model.seconds(unit, end)
            times.append(max(computing, 2 * (replicas - 1) * size / rate) / replicas)
            times.append(2 * batch * model.cut[unit] / rate)
            unit = end
        return max(times)


class Faults(unittest.TestCase):
    """A program with a fault, which a test of test_planner.c or of test_fit.py must notice."""

    FAULTS, SAMPLE = numbered(PLANNER), 3

    @staticmethod
    def passes(where, **more):
        if where.startswith("Fit."):
            command = [sys.executable, "test/test_fit.py", where]
        else:
            command = ["build/planner_planted"]
        more = dict(more, PLANNER_TESTS=where, TRAIN_GPT=os.path.relpath(PLANTED, ROOT))
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=apart(ENVIRONMENT, **more),
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode == 0, done.stdout + done.stderr

    def test_each(self):
        def see(fault):
            number, where, file, pattern = fault
            with self.subTest(pattern):
                passed, said = self.passes(where, FAULT=str(number))
                self.assertFalse(passed, f"not seen by {where}")
                self.assertRegex(said, r"FAILED|failures=", "a test says so")
                print(f"{where}: {file}: {pattern}", flush=True)

        faults = sample(self.FAULTS, self.SAMPLE)
        at_once(see, faults)
        # without a fault
        for where in sample(sorted({where for _, where, _, _ in faults}), 1):
            passed, said = self.passes(where)
            self.assertTrue(passed, said)


if __name__ == "__main__":
    harness.main()
