#!/usr/bin/env python3
"""planner_trial.py: is `--pipeline auto` as fast as the best plan that can be tried?

    scripts/planner_trial.py [--cases N] [--seed S] [--into FOLDER] [--program FILE]

Draws N small cases (default 100): a model, a step, and an emulated cluster (scripts/cluster.sh:
root on Linux). Trains each for a few steps with the planner's choice and with other plans: data
parallelism, even stages with micro-batches of several sizes, and for four ranks two stages of two.
The fastest of the others and the planner's choice are then run once more, and these second runs are
compared, since the fastest of many noisy runs looks faster than it is. A plan that needs more
memory or is refused is left out.

Steps should take some tenths of a second: a rank's share of a core is dealt out in periods of 10
ms, which short steps measure instead of the plan.

Prints a line for each case and writes FOLDER/cases.csv and FOLDER/table.md (default FOLDER:
out/planner_trial). Each run is kept in a folder of its own; the same command goes on where it was
stopped. `make data` makes what the runs train on. Nothing else should run on the machine.

Exit status: 0 done, 2 bad usage or missing input, 3 FOLDER cannot be written, 4 a run failed, 77
no cluster can be made here, 130 stopped by Ctrl-C.
"""

import argparse
import csv
import glob
import json
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from reproduce import SCRIPTS, Failed, Runner, complete, markdown, run_script

NAME, DATA, EXIT_NO_CLUSTER = "planner_trial", "data/text_bytes_train_*.bin", 77
AUTO, DATA_PARALLEL, EVEN = "auto", "data parallel", "even stages"
STEPS = 7  # the first is not counted
COLUMNS = ("case", "cluster", "model", "samples", "chosen", "auto_ms", "even_ms", "best", "best_ms")


@dataclass(frozen=True)
class Case:
    cluster: tuple  # of scripts/cluster.sh
    ranks: int
    layers: int
    channels: int
    vocab: int
    length: int  # of a sequence
    samples: int  # of a step

    def model(self):
        return f"layers={self.layers},heads=4,channels={self.channels},vocab={self.vocab}"

    def flags(self):
        return (
            *("--model", self.model(), "--seq-len", str(self.length), "--threads", "1"),
            *("--batch-tokens", str(self.samples * self.length), "--val-every", "0"),
            *("--train", DATA, "--steps", str(STEPS)),
        )

    def plans(self):
        """Name -> flags of the plans that are tried."""
        units, each = self.layers + 2, self.samples // self.ranks
        plans = {AUTO: ("--pipeline", "auto")}
        plans[DATA_PARALLEL] = (
            *("--pipeline", f"{units}:{self.ranks}"),
            *("--micro-batch", str(self.ranks * min(each, 8))),
        )
        for batch in (1, 2, 4):
            plans[f"{EVEN}, micro-batch {batch}"] = (
                *("--pipeline", str(self.ranks), "--micro-batch", str(batch)),
            )
        if self.ranks == 4:
            first = (units + 1) // 2
            plans["two stages of two"] = (
                *("--pipeline", f"{first}:2,{units - first}:2", "--micro-batch", "4"),
            )
        return plans


def draw_case(number, seed):
    """Case `number` of a seed, whatever the number of cases is."""
    choose = random.Random(f"{seed} {number}").choice
    shape, ranks, cpu = choose(
        (("2x1", 2, ()), ("4x1", 4, ("--cpu", "45")), ("2x2", 4, ("--cpu", "45")))
    )
    rate = choose(("100mbit", "200mbit", "500mbit", "1gbit"))
    return Case(
        cluster=(shape, "--rate", rate, *cpu),
        ranks=ranks,
        layers=choose((4, 6, 8, 10)),
        channels=choose((128, 192, 256, 384)),
        vocab=choose((256, 256, 1024)),
        length=128,
        samples=choose((32, 64)),
    )


def log_of(trial, case, name):
    """The log of a run, or None where the program refuses the plan."""
    folder = trial.folder / name.replace(" ", "_").replace(",", "")
    plan = case.plans()[name.removeprefix("again ")]
    command = [str(SCRIPTS / "cluster.sh"), *case.cluster, "--", trial.program]
    try:
        return complete(trial.runner, folder, [*command, *case.flags(), *plan])[0]
    except Failed as error:
        if error.of_run in (2, 3) and name != AUTO:
            return None
        raise


def step_ms(log):
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return statistics.median(
        event["ms"] for event in events if event["event"] == "step" and event["step"] > 1
    )


def chosen_plan(log):
    """The planner's choice, as the run printed it."""
    lines = (log.parent / "output.txt").read_text().splitlines()
    return next(line.split("idle, ")[1] for line in lines if line.startswith("plan "))


@dataclass
class Trial:
    runner: Runner
    program: str
    folder: Path


def measure(trial, number, case):
    """The row of a case."""
    logs = {name: log_of(trial, case, name) for name in case.plans()}
    first = {name: step_ms(log) for name, log in logs.items() if log}
    others = [name for name in first if name != AUTO]
    best = min(others, key=first.get)
    even = min((name for name in others if name.startswith(EVEN)), key=first.get)
    again = {name: step_ms(log_of(trial, case, f"again {name}")) for name in {AUTO, best, even}}
    return {
        "case": number,
        "cluster": " ".join(case.cluster),
        "model": f"{case.model()}, T={case.length}",
        "samples": case.samples,
        "chosen": chosen_plan(logs[AUTO]),
        "auto_ms": again[AUTO],
        "even_ms": again[even],
        "best": best,
        "best_ms": again[best],
    }


def summary(rows):
    ratios = sorted(row["best_ms"] / row["auto_ms"] for row in rows)
    even = sorted(row["even_ms"] / row["auto_ms"] for row in rows)
    lines = [
        [
            name,
            str(len(rows)),
            str(sum(ratio >= 1 for ratio in values)),
            str(sum(ratio >= 0.95 for ratio in values)),
            f"{values[0]:.2f} {statistics.median(values):.2f} {values[-1]:.2f}",
        ]
        for name, values in (("the best other plan", ratios), ("the best even stages", even))
    ]
    return markdown(
        ["the planner's choice against", "cases", "no slower", "within 5 %", "times as fast"],
        lines,
    )


def write(rows, folder):
    with open(folder / "cases.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (folder / "table.md").write_text(summary(rows))


def run_cases(options):
    runner, rows = Runner(), []
    for number in range(1, options.cases + 1):
        case = draw_case(number, options.seed)
        folder = options.into / f"seed_{options.seed}" / f"case_{number}"
        rows.append(measure(Trial(runner, options.program, folder), number, case))
        row = rows[-1]
        print(
            f"case {number} of {options.cases}: {row['cluster']}, {row['model']}: auto"
            f" {row['auto_ms']:.1f} ms, {row['best']} {row['best_ms']:.1f} ms",
            flush=True,
        )
        write(rows, options.into)
    print("\n" + summary(rows), end="")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--into", type=Path, default=Path("out") / NAME, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    options = parser.parse_args()
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if not glob.glob(DATA):
        parser.error(f"no {DATA}: run make data first")
    return options


def main():
    options = arguments()
    check = subprocess.run(
        [SCRIPTS / "cluster.sh", "check"], capture_output=True, text=True, check=False
    )
    if check.returncode:
        print(f"{NAME}: {check.stderr.strip() or check.stdout.strip()}", file=sys.stderr)
        return EXIT_NO_CLUSTER
    return run_script(NAME, options.into, lambda: run_cases(options))


if __name__ == "__main__":
    sys.exit(main())
