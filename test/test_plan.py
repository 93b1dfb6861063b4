#!/usr/bin/env python3
"""test_plan.py: --plan as a user would run it: its object, its table, plans that are given, and
what is refused.

    python3 test/test_plan.py

Standard library only. What the search by simulation chooses is tested by test_planner.c; what
equations 1 to 3 choose, here, by brute force.
"""

import json
import shlex
import operator
import os
import subprocess
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import harness
from harness import ALL, BINARY, ROOT, SEED, scratch

PROFILES = os.path.join(ROOT, "test/golden/dapple_profiles.json")
TASK = ["--cluster", "2x8,intra=25,inter=3,gather=1", "--seq-len", "1", "--batch-tokens", "64"]


def environment():
    """With a folder for MPI's files that no other process makes at the same time."""
    return dict(harness.ENVIRONMENT, OMPI_MCA_ess_singleton_isolated="1", TMPDIR=scratch())


def plan(*flags, model="bert-48"):
    command = [
        BINARY,
        "--plan",
        "--profile",
        f"{PROFILES}:{model}" if model else PROFILES,
        *TASK,
        *flags,
    ]
    return subprocess.run(
        list(map(str, command)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


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
        self.assertEqual(
            names[:4],
            ["data parallel", "GPipe, even split", "PipeDream's planner", "equations 1 to 3"],
        )
        self.assertEqual(answer["equations"]["micro_batch"], 1)

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
                [*words, *more], env=environment(), text=True, timeout=120
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
                if one is answer:  # the search counts the sums of some others more coarsely
                    self.assertLess(abs(took / one["predicted"]["step_ms"] - 1), 0.15, one)
        self.assertEqual(kinds, {1, 2})

    def test_memory(self):
        limit = 4 << 30
        answer = json.loads(plan("--json", "--device-memory", "4G").stdout)
        for one in (answer, *answer["alternatives"]):
            self.assertLessEqual(max(one["predicted"]["memory"]), limit)
        self.assertNotIn("data parallel", [other["name"] for other in answer["alternatives"]])
        self.assertEqual(plan("--device-memory", "1M").returncode, 3)

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
            "PipeDream's planner",
            "equations 1 to 3",
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


class Equations:
    """Equations 1 to 3 of DAPPLE (arXiv 2007.01045, section 4.1), to the letter, over every plan:
    each cut, each number of replicas, each of the paper's placement policies (section 4.2) for each
    stage. An independent and slow reference for what --plan finds.
    """

    def __init__(self, random):
        shapes = ((1, 4), (1, 5), (5, 1), (4, 1), (2, 2), (2, 2), (2, 3), (3, 2))
        uneven = ([1, 2], [2, 1], [3, 1], [1, 2, 1], [2, 2, 1], [1, 1, 3], [2, 3])
        nodes, ranks = random.choice(shapes)
        self.sizes = random.choice(uneven) if random.random() < 0.4 else [ranks] * nodes
        self.node_of = [node for node, size in enumerate(self.sizes) for _ in range(size)]
        units = random.randint(3, 6 if len(self.node_of) < 6 else 5)
        spread = random.choice((1.5, 10))  # how much the layers differ
        parameters, activations = 10 ** random.uniform(6.5, 9), 10 ** random.uniform(3.5, 6)
        self.batch, self.samples = random.choice((1, 4)), random.choice((4, 8, 12, 32, 64))
        self.forward = [random.uniform(1, spread) * 1e-3 for _ in range(units)]
        self.backward = [random.uniform(1, 3) * time for time in self.forward]
        self.outputs = [activations * random.uniform(0.1, 3) for _ in range(units)]
        self.weights = [
            parameters * random.uniform(0.1, 10) * random.choice((0, 1, 1)) for _ in range(units)
        ]
        self.skips = [
            u for u in range(units - 2) if random.random() < 0.2
        ]  # layers that feed the one after the next, too
        self.intra, self.inter, self.gather = (
            random.uniform(1, 30),
            random.uniform(0.2, 5),
            random.uniform(0.1, 5),
        )
        self.latency = random.choice((0, random.uniform(1, 500)))
        self.memory = float("inf")

    def profile(self):
        nodes = [
            {
                "id": u,
                "name": f"layer_{u}",
                "fwd_ms": 1e3 * self.batch * forward,
                "bwd_ms": 1e3 * self.batch * self.backward[u],
                "act_bytes": self.batch * self.outputs[u],
                "param_bytes": self.weights[u],
            }
            for u, forward in enumerate(self.forward)
        ]
        edges = [[u, u + 1] for u in range(len(nodes) - 1)] + [[u, u + 2] for u in self.skips]
        return {"profile_batch_size": self.batch, "nodes": nodes, "edges": edges}

    def cluster(self):
        return (
            "+".join(f"1x{size}" for size in self.sizes) + ","
            f"intra={self.intra!r},"
            f"inter={self.inter!r},gather={self.gather!r},latency={self.latency!r}"
        )

    def cut(self, unit):
        """Bytes of a sample that cross the border before a unit: each output once, up to its last
        reader."""
        return sum(
            size
            for u, size in enumerate(self.outputs)
            if u < unit <= min(u + (2 if u in self.skips else 1), len(self.outputs) - 1)
        )

    def sum_rate(self, ranks):
        crosses = len({self.node_of[rank] for rank in ranks}) > 1
        return (
            1e9
            * (self.inter if crosses else self.intra * (len(ranks) // 2))
            / (2 * (len(ranks) - 1) / len(ranks))
        )

    def all_reduce(self, ranks, size):
        return size / self.sum_rate(ranks) + 2e-6 * self.latency if len(ranks) > 1 and size else 0

    def message(self, senders, receivers, size):
        homes = {self.node_of[rank] for rank in receivers}
        outside = (
            sum(self.node_of[rank] not in homes for rank in senders)
            if len(homes) == 1
            else len(senders)
        )
        if not size:
            return 0
        if not outside:
            return size / (1e9 * self.intra) + 1e-6 * self.latency
        rate = self.gather if len(homes) == 1 and outside > 1 else self.inter
        return size * outside / len(senders) / (1e9 * rate) + 1e-6 * self.latency

    def fits(self, first, end, replicas, micro_batch):
        rows = -(-micro_batch // replicas)
        return (
            4 * sum(self.weights[first:end])
            + rows * (sum(self.outputs[first:end]) + self.cut(first))
            <= self.memory
        )

    def step(self, stages, micro_batch):
        """Seconds of a step of stages (first unit, end, ranks); infinite where one has no memory
        for a micro-batch."""
        if not all(self.fits(first, end, len(ranks), micro_batch) for first, end, ranks in stages):
            return float("inf")
        many, line = self.samples // micro_batch, []
        for index, (first, end, ranks) in enumerate(stages):
            if index:  # the link from the stage before is a stage of its own
                before, size = stages[index - 1][2], micro_batch * self.cut(first)
                line.append(
                    (self.message(before, ranks, size), self.message(ranks, before, size), 0)
                )
            rows = micro_batch / len(ranks)
            line.append(
                (
                    rows * sum(self.forward[first:end]),
                    rows * sum(self.backward[first:end]),
                    self.all_reduce(ranks, sum(self.weights[first:end])),
                )
            )
        if len(stages) == 1:
            return many * (line[0][0] + line[0][1]) + self.exposed(
                stages[0][2], micro_batch / len(stages[0][2])
            )
        pivot = len(line) - 1
        for s in reversed(range(pivot)):
            if (many - 1) * sum(line[s][:2]) > (many - 1) * sum(line[pivot][:2]) + sum(
                f + b for f, b, _ in line[s + 1 : pivot]
            ):
                pivot = s
        warm = sum(f for f, _, _ in line[: pivot + 1])
        end = max(
            [
                reduce + sum(b for _, b, _ in line[s : pivot + 1])
                for s, (_, _, reduce) in enumerate(line)
                if s <= pivot
            ]
            + [
                reduce - sum(b for _, b, _ in line[pivot : s + 1])
                for s, (_, _, reduce) in enumerate(line)
                if s > pivot
            ]
        )
        return warm + (many - 1) * sum(line[pivot][:2]) + end

    def exposed(self, ranks, rows):
        """What is left of data parallelism's all-reduce, layer by layer from the last one on, when
        the last backward ends."""
        computed = sent = 0
        for backward, size in reversed(list(zip(self.backward, self.weights))):
            computed += rows * backward
            if size and len(ranks) > 1:
                sent = max(sent, computed) + self.all_reduce(ranks, size)
        return max(0, sent - computed)

    def place(self, policy, used, last, count):
        """How many ranks of each node a stage takes. Nodes have numbers used of theirs in use; the
        stage before ended on node last."""
        nodes = len(self.sizes)
        take = [0] * nodes
        for fresh in ((True, False) if policy == "fresh" else (False, True)):
            wanted = [
                k
                for k in ((last if policy == "append" else 0) + i for i in range(nodes))
                if (used[k % nodes] == 0) == fresh
            ]
            wanted = [k % nodes for k in wanted]
            while count and any(used[k] + take[k] < self.sizes[k] for k in wanted):
                for k in wanted:
                    part = min(
                        count,
                        self.sizes[k] - used[k] - take[k],
                        1 if policy == "scatter" else self.sizes[k],
                    )
                    take[k] += part
                    count -= part
        return take

    def plans(self, first=0, used=None, last=0):
        """All lists of stages from a unit on."""
        nodes = range(len(self.sizes))
        used = used or [0 for _ in nodes]
        free, units = sum(self.sizes) - sum(used), len(self.forward)
        for count in range(1, free + 1):
            takes = {
                tuple(self.place(policy, used, last, count))
                for policy in ("fresh", "append", "scatter")
            }
            for take in takes if count < free else [tuple(map(operator.sub, self.sizes, used))]:
                ranks = [
                    self.node_of.index(k) + used[k] + i for k in nodes for i in range(take[k])
                ]
                then = [u + t for u, t in zip(used, take)]
                end_node = max(k for k in nodes if take[k])
                for end in range(first + 1, units + 1) if count < free else (units,):
                    if end == units and count == free:
                        yield [(first, end, ranks)]
                    elif end < units and count < free:
                        for rest in self.plans(end, then, end_node):
                            yield [(first, end, ranks), *rest]

    def best(self, micro_batch):
        """Data parallelism may take any micro-batch where none is asked for; pipelines take 1,
        whose slices may be fractions of a sample."""
        divisors = [b for b in range(1, self.samples + 1) if self.samples % b == 0]
        return min(
            self.step(stages, b)
            for stages in self.plans()
            for b in ([micro_batch] if micro_batch else divisors if len(stages) == 1 else [1])
        )


class EquationsSearch(unittest.TestCase):
    """ "equations 1 to 3" of --plan are searched in full: no plan of any number of stages is better
    by them."""

    def check(self, flags_of):
        instances = 300 if ALL else 16
        random, asked, stages = Random(SEED), [], []
        tasks = [Equations(random) for _ in range(instances)]
        asked = [flags_of(task, random) for task in tasks]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(
            4
        ) as pool:  # mpirun's start takes longer than a plan
            path = Path(folder) / "profile.json"
            path.write_text(
                json.dumps({"models": {str(i): task.profile() for i, task in enumerate(tasks)}})
            )
            runs = list(
                pool.map(
                    lambda i: self.run_plan(tasks[i], f"{path}:{i}", asked[i]), range(instances)
                )
            )
        for task, micro_batch, run in zip(tasks, asked, runs):
            with self.subTest(task=vars(task), micro_batch=micro_batch):
                stages.append(self.check_one(task, micro_batch, run))
        self.assertGreaterEqual(
            sum(count > 2 for count in stages), instances // 100
        )  # or the instances are too simple; a small sample may be

    def run_plan(self, task, profile, micro_batch):
        command = [
            str(BINARY),
            "--plan",
            "--json",
            "--profile",
            profile,
            "--cluster",
            task.cluster(),
            "--seq-len",
            "1",
            "--batch-tokens",
            str(task.samples),
        ]
        command += ["--micro-batch", str(micro_batch)] if micro_batch else []
        command += ["--device-memory", str(task.memory)] if task.memory < float("inf") else []
        return subprocess.run(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )

    def check_one(self, task, micro_batch, run):
        best = task.best(micro_batch)
        if best == float("inf"):
            self.assertEqual((run.returncode, run.stdout), (3, ""), run.stderr)
            return 0
        self.assertEqual(run.returncode, 0, run.stderr)
        answer = json.loads(run.stdout)
        self.assertAlmostEqual(answer["equations"]["step_ms"] / (1e3 * best), 1, delta=1e-9)
        self.assertIs(answer["equations"]["complete"], True)
        chosen = next(one for one in answer["alternatives"] if one["name"] == "equations 1 to 3")
        edges = [
            sum(stage["units"] for stage in chosen["stages"][:s])
            for s in range(len(chosen["stages"]) + 1)
        ]
        plan = [
            (first, end, stage["ranks"])
            for first, end, stage in zip(edges, edges[1:], chosen["stages"])
        ]
        self.assertAlmostEqual(
            task.step(plan, answer["equations"]["micro_batch"]) / best, 1, delta=1e-9
        )
        if micro_batch or len(plan) > 1:
            self.assertEqual(answer["equations"]["micro_batch"], micro_batch or 1)
        if micro_batch:
            self.assertEqual(chosen["micro_batch"], micro_batch)
        return len(plan)

    def test_any_number_of_stages(self):
        self.check(lambda task, random: 0)

    def test_micro_batch(self):
        self.check(
            lambda task, random: random.choice(
                [b for b in range(1, task.samples + 1) if task.samples % b == 0]
            )
        )

    def test_memory(self):
        def flags(task, random):
            asked = random.choice((0, 1, 2, 4))
            task.weights = [
                size / random.choice((1, 1000)) for size in task.weights
            ]  # or they alone would count
            task.outputs = [size * random.choice((1, 100)) for size in task.outputs]
            task.memory = int(
                (4 * sum(task.weights) + sum(task.outputs) * (asked or 1)) / random.uniform(1, 4)
            )
            return asked

        self.check(flags)


if __name__ == "__main__":
    harness.main()
