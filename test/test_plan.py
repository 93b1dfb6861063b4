#!/usr/bin/env python3
"""test_plan.py: --plan as a user would run it: its object, its table, plans that are given, and what is refused.

    python3 test/test_plan.py

Standard library only. What it chooses is tested by test_planner.c.
"""
import json
import os
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / os.environ.get("TRAIN_GPT", "train_gpt")
PROFILES = ROOT / "test/golden/dapple_profiles.json"
TASK = ["--cluster", "2x8,intra=25,inter=3,gather=1", "--seq-len", "1", "--batch-tokens", "64"]


def plan(*flags, model="bert-48"):
    command = [BINARY, "--plan", "--profile", f"{PROFILES}:{model}" if model else PROFILES, *TASK, *flags]
    return subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False)


class Plan(unittest.TestCase):
    def check_plan(self, one, units=53, ranks=16, samples=64):
        self.assertEqual(sum(stage["units"] for stage in one["stages"]), units)
        self.assertEqual(sorted(rank for stage in one["stages"] for rank in stage["ranks"]), list(range(ranks)))
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
        self.assertEqual(names[:4], ["data parallel", "GPipe, even split", "PipeDream's planner", "equations 1 to 3"])
        self.assertEqual(answer["equations"]["micro_batch"], 1)

    def test_memory(self):
        limit = 4 << 30
        answer = json.loads(plan("--json", "--device-memory", "4G").stdout)
        for one in (answer, *answer["alternatives"]):
            self.assertLessEqual(max(one["predicted"]["memory"]), limit)
        self.assertNotIn("data parallel", [other["name"] for other in answer["alternatives"]])
        self.assertEqual(plan("--device-memory", "1M").returncode, 3)

    def test_given(self):
        free, given = json.loads(plan("--json").stdout), json.loads(plan("--json", "--pipeline", "28:8,25:8", "--pipeline-warmup", "b").stdout)
        self.check_plan(given)
        self.assertEqual([(stage["units"], stage["replicas"]) for stage in given["stages"]], [(28, 8), (25, 8)])
        self.assertEqual((given["warmup"], given["alternatives"]), ("b", []))
        self.assertGreaterEqual(given["predicted"]["step_ms"], free["predicted"]["step_ms"])
        pinned = json.loads(plan("--json", "--pipeline", "2", "--micro-batch", "16").stdout)
        self.assertEqual((pinned["micro_batch"], pinned["micro_batches"]), (16, 4))

    def test_schedules(self):
        """Of the same stages: zero bubble waits less than dapple, and holds more; gpipe most."""
        found = {kind: json.loads(plan("--json", "--pipeline", "28:8,25:8", "--pipeline-schedule", kind, "--micro-batch", "8").stdout) for kind in ("dapple", "zero-bubble", "gpipe")}
        for kind, one in found.items():
            self.check_plan(one)
            self.assertEqual(one["schedule"], kind)
        steps, memory = ({kind: pick(one["predicted"]) for kind, one in found.items()} for pick in (lambda p: p["step_ms"], lambda p: max(p["memory"])))
        self.assertLess(steps["zero-bubble"], steps["dapple"])
        self.assertTrue(memory["dapple"] < memory["zero-bubble"] < memory["gpipe"], memory)

    def test_table(self):
        text = plan().stdout
        for word in ("plan", "data parallel", "GPipe, even split", "PipeDream's planner", "equations 1 to 3", "memory MiB", "ranks"):
            self.assertIn(word, text)

    def test_refused(self):
        for flags, model, word in ((["--pipeline", "28:8,26:8"], "bert-48", "53"), (["--pipeline", "3"], "bert-48", "16 ranks"), ([], "", "which model"), ([], "gpt", "no model"),
                                   (["--micro-batch", "3"], "bert-48", "multiple"),
                                   (["--pipeline", "2", "--pipeline-schedule", "zero-bubble", "--recompute", "block"], "bert-48", "zero-bubble")):
            run = plan(*flags, model=model)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(word, run.stderr)


if __name__ == "__main__":
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    unittest.main()
