#!/usr/bin/env python3
"""planner_trial.py: is `--pipeline auto` as fast as the best plan that can be tried?

    scripts/planner_trial.py [--cases N] [--only A-B] [--seed S] [--seconds S] [--into FOLDER]
                             [--program FILE]

Draws N small cases (default 100): a model, a step, and an emulated cluster (scripts/cluster.sh:
root on Linux). Of each ten cases

    eight have two ranks on two nodes, each with a core of its own: nothing limits it, so that short
          steps measure the plan
    one   has four ranks on four or on two nodes, with 45 % of a core for each
    one   has unequal nodes: of two ranks and of one, or with unequal shares of a core

A share of a core is dealt out in periods of 10 ms, so steps of these last two are made long.

Each case trains for a few steps with the planner's choice and with other plans: data parallelism,
even stages with micro-batches of several sizes, warm-ups and schedules, a plan that is drawn, and
for four ranks two stages of two. The fastest of the others and the planner's choice then run once
more, and these second runs are compared, since the fastest of many noisy runs looks faster than it
is. Where the choice is more than 5 % behind, both run a third time, and the means of both repeats
are compared. Where the fastest of the others is the plan that the planner chose, the ratio is 1. A
plan that is refused is left out.

Prints a line for each case and writes FOLDER/cases.csv and FOLDER/table.md (default FOLDER:
out/planner_trial). Each run is kept in a folder of its own; the same command goes on where it was
stopped. --seconds: no case begins later than that. `make data` makes what the runs train on.
Nothing else should run on the machine: a run whose steps differ is repeated.

Exit status: 0 done, 2 bad usage or missing input, 3 FOLDER cannot be written, 4 a run failed, 77
no cluster can be made here, 130 stopped by Ctrl-C.
"""

import argparse
import glob
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiment import (
    CLUSTER, EXIT_FAILED, TEXT, Failed, Runner, complete, last, last_words, markdown, no_cluster,
    run_script, timed_steps, words, write_rows,
)

NAME, DATA, EXIT_NO_CLUSTER = "planner_trial", f"{TEXT}_train_*.bin", 77
AUTO, DATA_PARALLEL, EVEN, DRAWN = "auto", "data parallel", "even stages", "drawn"
STEPS = 8  # the first is not counted
NEAR = 1.05  # as fast as the best
# Where the second and the fourth fastest step of a run differ by more than this, the run was
# disturbed, and is tried again.
STEADY, TRIES = 1.08, 3
SETTINGS = {
    "warm-up a": "",
    "warm-up b": "--pipeline-warmup b",
    "zero-bubble": "--pipeline-schedule zero-bubble",
}


@dataclass(frozen=True)
class Case:
    cluster: str  # words for scripts/cluster.sh
    ranks: int
    layers: int
    channels: int
    vocab: int
    length: int  # of a sequence
    samples: int  # of a step
    drawn: tuple  # units of the stages, micro-batch, setting

    def model(self):
        return f"layers={self.layers},heads=4,channels={self.channels},vocab={self.vocab}"

    def flags(self):
        return (
            f"--model {self.model()} --seq-len {self.length} --threads 1"
            f" --batch-tokens {self.samples * self.length} --val-every 0 --train {DATA}"
            f" --steps {STEPS}"
        )

    def plans(self):
        """Name -> flags of the plans that are tried."""
        units, each = self.layers + 2, self.samples // self.ranks
        plans = {
            AUTO: "--pipeline auto",
            DATA_PARALLEL: f"--pipeline {units}:{self.ranks} --micro-batch {min(each, 16)}",
        }

        def add(name, spec, batch, setting):
            flags = f"--pipeline {spec} --micro-batch {batch} {SETTINGS[setting]}"
            plans[f"{name}, micro-batch {batch}, {setting}"] = flags

        for batch, setting in (
            (1, "warm-up a"), (2, "warm-up a"), (4, "warm-up a"),
            (1, "warm-up b"), (2, "zero-bubble"),
        ):
            add(EVEN, self.ranks, batch, setting)
        stages, batch, setting = self.drawn
        spec = ",".join(f"{units}:1" for units in stages)
        add(f"{DRAWN}, {spec}", spec, batch, setting)
        if self.ranks == 4:
            first = (units + 1) // 2
            plans["two stages of two"] = f"--pipeline {first}:2,{units - first}:2 --micro-batch 4"
        return plans


# Nodes x ranks of them, the ranks, and what they get of a core.
TWO = ("2x1", 2, "")
FOUR = (("4x1", 4, "--cpu 45"), ("2x2", 4, "--cpu 45"))
UNEQUAL = (
    ("1x2+1x1", 3, "--cpu 50"), ("1x1+1x2", 3, "--cpu 50"), ("2x1", 2, "--cpu 90,45"),
    ("2x1", 2, "--cpu 45,90"),
)


def draw_case(number, seed):
    """Case `number` of a seed, whatever the number of cases is."""
    draw = random.Random(f"{seed} {number}")
    choose = draw.choice
    shape, ranks, cpu = {8: choose(FOUR), 9: choose(UNEQUAL)}.get((number - 1) % 10, TWO)
    layers = choose((4, 5, 6, 8))
    cuts = sorted(draw.sample(range(1, layers + 2), ranks - 1))
    rate = choose(("200mbit", "500mbit", "1gbit", "2gbit"))
    channels = choose((192, 256) if cpu else (96, 128, 192, 256))
    vocab = choose((256, 256, 1024))
    samples = choose((16, 32))
    return Case(
        cluster=f"{shape} --rate {rate} {cpu}".strip(), ranks=ranks, layers=layers,
        channels=channels, vocab=vocab, length=128,
        samples=24 if ranks == 3 else 32 if cpu else 16 if channels > 128 else samples,
        drawn=(
            tuple(end - begin for begin, end in zip((0, *cuts), (*cuts, layers + 2))),
            choose((1, 2, 4)), choose(tuple(SETTINGS)),
        ),
    )


def remove_cluster(name):
    command = [CLUSTER, "down", "--name", name]
    subprocess.run(command, capture_output=True, check=False)


def steady(log):
    """Were the faster steps of a run alike?"""
    ms = sorted(times(log))
    return ms[3] <= STEADY * ms[1]


@dataclass
class Trial:
    runner: Runner
    program: str
    folder: Path
    case: Case

    def cluster(self, *parts):
        """Runs scripts/cluster.sh, or ends the script."""
        output, command = self.folder / "cluster.txt", words(*parts)
        if self.runner.run([CLUSTER, *command], output):
            raise Failed(f"cluster.sh {' '.join(command)}: {last_words(output)}", EXIT_FAILED)

    @contextmanager
    def on_cluster(self):
        """The cluster of the case, for all its runs."""
        name = f"{NAME}_{self.folder.name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_cluster(name)  # what a kill has left
        self.cluster("up", self.case.cluster, "--name", name)
        try:
            yield name
        finally:
            remove_cluster(name)

    def log(self, cluster, name, repeat=0):
        """The log of a run, or None where the program refuses the plan."""
        folder = self.folder / (name.replace(" ", "_").replace(",", "") + repeat * f"_{repeat}")
        plan = self.case.plans()[name]
        run = [CLUSTER, "run", "--name", cluster, "--", self.program]
        command = words(run, self.case.flags(), plan)
        for tried in range(TRIES):
            try:
                log = complete(self.runner, folder, command)[0]
            except Failed as error:
                if error.of_run in (2, 3) and name != AUTO:
                    return None
                raise
            if steady(log) or tried + 1 == TRIES:
                return log
            (folder / "run.json").unlink()
        return None


def times(log):
    """Of the steps that count."""
    return [step["ms"] for step in timed_steps(log, 1)]


def step_ms(log):
    """Of the second fastest step: slower ones tell of what else the machine did."""
    return sorted(times(log))[1]


def predicted_ms(log):
    return last(log, "end")["step_ms"]["predicted"]


def chosen_plan(log):
    """The planner's choice, as the run printed it: 16 x 2 samples, warm-up b, 3:1,3:1."""
    lines = (log.parent / "output.txt").read_text().splitlines()
    told = next(line.split("idle, ")[1] for line in lines if line.startswith("plan ")).split()
    return f"{' '.join(told[:-1])}, {told[-1]}"


def is_chosen(case, name, chosen):
    """Do the flags of a plan give the planner's choice?"""
    flags = dict(zip(*[iter(words(case.plans()[name]))] * 2))
    units = case.layers + 2
    stages, batch = flags["--pipeline"], int(flags["--micro-batch"])
    if stages == str(case.ranks):
        sizes = [units // case.ranks + (s < units % case.ranks) for s in range(case.ranks)]
        stages = ",".join(f"{size}:1" for size in sizes)
    setting = flags.get("--pipeline-schedule", "warm-up " + flags.get("--pipeline-warmup", "a"))
    if "," not in stages:  # one stage: flags tell of a rank's samples, the planner of all
        batch *= case.ranks
    return chosen == f"{case.samples // batch} x {batch} samples, {setting}, {stages}"


def measure(trial, number):
    """The row of a case."""
    case = trial.case
    with trial.on_cluster() as cluster:
        logs = {name: trial.log(cluster, name) for name in case.plans()}
        first = {name: step_ms(log) for name, log in logs.items() if log}
        best = min((name for name in first if name != AUTO), key=first.get)
        again = {AUTO: [], best: []}
        chosen = chosen_plan(logs[AUTO])
        same = is_chosen(case, best, chosen)
        for repeat in (1,) if same else (1, 2):
            for name, values in again.items():
                values.append(step_ms(trial.log(cluster, name, repeat)))
            if again[AUTO][0] <= NEAR * again[best][0]:
                break
    ms = {name: statistics.mean(values) for name, values in again.items()}
    even = min((name for name in first if name.startswith(EVEN)), key=first.get)
    return {
        "case": number,
        "cluster": case.cluster,
        "model": f"{case.model()}, T={case.length}",
        "samples": case.samples,
        "chosen": chosen,
        "auto_ms": ms[AUTO],
        "predicted_ms": predicted_ms(logs[AUTO]),
        "best": best,
        "best_ms": ms[best],
        "best_predicted_ms": predicted_ms(logs[best]),
        "even_ms": ms.get(even, first[even]),
        "ratio": 1.0 if same else ms[AUTO] / ms[best],
        # of two runs of the same plan
        "noise": max(
            max(first[name], again[name][0]) / min(first[name], again[name][0]) for name in again
        ),
    }


def summary(rows):
    lines = []
    for title, other in (("the best other plan", "best_ms"), ("the best even stages", "even_ms")):
        ratios = sorted(
            row["ratio"] if row[other] == row["best_ms"] else row["auto_ms"] / row[other]
            for row in rows
        )
        lines.append([title, str(len(rows)), str(sum(ratio <= 1 for ratio in ratios)),
                      str(sum(ratio <= NEAR for ratio in ratios)),
                      f"{ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}"])
    noise = sorted(row["noise"] for row in rows)
    return (
        markdown(
            ["the planner's choice against", "cases", "no slower", "within 5 %", "its time in the"
             " other's: least, median, most"],
            lines,
        )
        + "Two runs of one plan differ by"
        f" {100 * (statistics.median(noise) - 1):.1f} % (median; 90th percentile"
        f" {100 * (noise[int(0.9 * (len(noise) - 1))] - 1):.1f} %, at most"
        f" {100 * (noise[-1] - 1):.1f} %).\n"
    )


def write(rows, folder):
    write_rows(folder / "cases.csv", rows, dict)
    (folder / "table.md").write_text(summary(rows))


def row_of(options, runner, number):
    """The row of a case; it is kept in row.json once it is there."""
    folder = options.into / f"seed_{options.seed}" / f"case_{number}"
    kept = folder / "row.json"
    if not kept.exists():
        trial = Trial(runner, options.program, folder, draw_case(number, options.seed))
        row = measure(trial, number)
        kept.write_text(json.dumps(row) + "\n")
    return json.loads(kept.read_text())


def run_cases(options):
    runner, rows, begun = Runner(), [], time.monotonic()
    # cases without quotas first, which take the least time
    numbered = range(options.only[0], options.only[1] + 1)
    runner.progress.plan({"cases": len(numbered)})
    for number in sorted(numbered, key=lambda number: ((number - 1) % 10 > 7, number)):
        folder = options.into / f"seed_{options.seed}" / f"case_{number}"
        late, there = time.monotonic() - begun > options.seconds, (folder / "row.json").exists()
        if late and not there:
            continue
        row = row_of(options, runner, number)
        rows.append(row)
        runner.progress.finished(
            "cases", f"case {number}", not there,
            f": {row['cluster']}, {row['model']} x {row['samples']}: auto {row['auto_ms']:.1f} ms"
            f" ({row['chosen']}), {row['best']} {row['best_ms']:.1f} ms: {row['ratio']:.3f}",
        )
        write(rows, options.into)
    print("\n" + summary(rows), end="")


def numbers(text):
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, metavar="N")
    parser.add_argument("--only", type=numbers, metavar="A-B")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--into", type=Path, default=Path("out") / NAME, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    options = parser.parse_args()
    options.only = options.only or (1, options.cases)
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if not glob.glob(DATA):
        parser.error(f"no {DATA}: run make data first")
    return options


def main():
    options = arguments()
    missing = no_cluster()
    if missing:
        print(f"{NAME}: {missing}", file=sys.stderr)
        return EXIT_NO_CLUSTER
    return run_script(NAME, options.into, lambda: run_cases(options))


if __name__ == "__main__":
    sys.exit(main())
