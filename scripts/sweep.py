#!/usr/bin/env python3
"""sweep.py: trains with every combination of the flags in a grid, and says which did best.

    scripts/sweep.sh GRID [--into FOLDER] [--jobs J] [--restarts N] [--program FILE] [--dry-run]

GRID is a text file: on each line a flag of train_gpt and its values, written as for a shell. A flag
with several values is varied, one with a single value or none is the same in all runs. The line
`ranks` says with how many ranks to run.

    # learning rate against width, three seeds each
    --train "data/text_bytes_train_*.bin"
    --val   "data/text_bytes_val_*.bin"
    --model layers=4,heads=4,channels=64,vocab=256 layers=4,heads=4,channels=128,vocab=256
    --lr    1e-3 3e-3
    --seed  1 2 3
    --steps 500
    ranks   2

FOLDER (default: out/GRID's name) gets for each run a folder named after what is varied, with
log.jsonl, output.txt and the checkpoints; the table of all runs, best final validation loss first,
as table.txt and table.tsv; and loss.png. A varied --seed is also averaged over.

The same command goes on where it was stopped: finished runs are skipped, interrupted ones resumed,
failed and refused ones tried again. What train_gpt refuses stays in the table with its message.
Each finished run has a line: how many of all are done, the time gone and left. A second sweep in
the same FOLDER is refused.
Ctrl-C lets the running ones save and stop; a second one ends them. A crash is restarted by
launch.sh, --restarts times. --jobs runs so many at once and parts the cores among them.

Exit status: 0 every run is done or was refused, 2 bad grid or all refused, 3 FOLDER cannot be
written, 4 some failed, 130 stopped by Ctrl-C.
"""

import argparse
import csv
import itertools
import json
import os
import queue
import re
import shlex
import signal
import statistics
import subprocess
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import run_log
from progress import Progress
from regular_files import hold_folder, one_line, plain, read_regular

EXIT_INPUT, EXIT_RESOURCES, EXIT_FAILED, EXIT_STOPPED = 2, 3, 4, 130
SCRIPTS = Path(__file__).resolve().parent
GIVEN_BY_US = ("--out", "--log", "--resume")
LONGEST_NAME = 200  # of a folder; file systems take 255 bytes
STOPPED_EARLY = b"stopped at step "  # what train_gpt prints after a graceful stop
COLUMNS = (
    "run", "state", "steps", "val loss", "bits/byte", "best val", "at step", "train loss",
    "tokens/s", "time (s)", "message",
)


class BadGrid(Exception):
    pass


# --------------------------------------------------------------------------------------------------
# The grid


def parse_line(words, grid):
    """Adds one line's flag and values to the grid: name -> values."""
    name, values = words[0], words[1:]
    if name != "ranks" and not re.fullmatch(r"--[a-z][a-z0-9-]*", name):
        raise BadGrid(f"a line is a long flag and its values, as in --lr 1e-3 3e-3; found {name}")
    if name in GIVEN_BY_US:
        raise BadGrid(f"each run gets its own {name}: leave it out")
    if name in grid:
        raise BadGrid(f"{name} is given twice: put all its values on one line")
    if name == "ranks" and not (
        values and all(re.fullmatch("[1-9][0-9]*", value) for value in values)
    ):
        raise BadGrid("ranks takes whole numbers above 0")
    for value in values:
        if values.count(value) > 1:
            raise BadGrid(f"{name} has the value {value} twice")
        if value.startswith("--"):
            raise BadGrid(f"one flag a line; found {value} among the values of {name}")
    grid[name] = values or [None]


def read_grid(path):
    grid = {}
    for number, line in enumerate(read_regular(path).decode().splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                parse_line(words, grid)
        except (BadGrid, ValueError) as error:  # ValueError: a quotation without an end
            raise BadGrid(f"{path}:{number}: {error}") from None
    if not grid:
        raise BadGrid(f"{path}: no flags in it")
    return grid


def combinations(grid):
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


class Run:
    """One combination: its folder, its command, and what became of it, which is kept in
    run.json."""

    def __init__(self, chosen, varied, into):
        self.chosen = chosen
        self.name = self.name_without(varied, ())
        self.folder = into / self.name
        self.log, self.output, self.record = (
            self.folder / name for name in ("log.jsonl", "output.txt", "run.json")
        )
        self.flags = [
            word
            for name, value in chosen.items()
            if name != "ranks"
            for word in ((name,) if value is None else (name, value))
        ]

    def name_without(self, varied, left_out):
        parts = [
            f"{name.lstrip('-')}={self.chosen[name]}" for name in varied if name not in left_out
        ]
        return urllib.parse.quote(",".join(parts), safe="=,.:+") or "run"

    def command(self, program, restarts):
        return [
            str(SCRIPTS / "launch.sh"), "--restarts", str(restarts), "--ranks",
            self.chosen.get("ranks", "1"), "--continue", "--", program, *self.flags, "--out",
            str(self.folder), "--log", str(self.log),
        ]

    def recorded(self):
        if not self.record.exists():
            return {"state": "new", "chosen": self.chosen, "message": ""}
        try:
            found = json.loads(read_regular(self.record))
            return {"chosen": found["chosen"], **{k: str(found[k]) for k in ("state", "message")}}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BadGrid(f"{self.record}: damaged: remove it") from error

    def write_record(self, state, message=""):
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.record.with_suffix(".tmp")
        new.write_text(
            json.dumps({"state": state, "chosen": self.chosen, "message": message}) + "\n"
        )
        new.replace(self.record)

    def finish(self, code, text):
        """Notes how a start ended: its exit code and what it wrote."""
        if code == 0:
            self.write_record(
                "stopped"
                if STOPPED_EARLY in text or b"stopped before the first step" in text
                else "done"
            )
        elif code > 128:  # ended by a second signal
            self.write_record("stopped")
        else:
            self.write_record("refused" if code == EXIT_INPUT else "failed",
                              f"exit {code}: {last_message(text.decode(errors='replace'))}")


def last_message(text):
    """train_gpt's or launch.sh's own last words, else the last line."""
    found = re.findall(r"(?m)^train_gpt: rank \d+ on \S+ \S+: (.*)$", text) or re.findall(
        r"(?m)^launch: (.*)$", text
    )
    lines = [line for line in text.splitlines() if line.strip()]
    return (found or lines or [""])[-1]


def make_runs(grid, into):
    varied = [name for name, values in grid.items() if len(values) > 1]
    runs = [Run(chosen, varied, into) for chosen in combinations(grid)]
    names = [run.name for run in runs]
    for run in runs:
        if len(run.name) > LONGEST_NAME or names.count(run.name) > 1:
            raise BadGrid(
                f"{run.name}: too long for a folder's name, or not the only one; use shorter values"
                " (a link to a file)"
            )
        if run.recorded()["chosen"] != run.chosen:
            raise BadGrid(
                f"{run.folder} holds a run with other flags: choose another --into, or remove it"
            )
    return runs


# --------------------------------------------------------------------------------------------------
# Running


class Sweep:
    def __init__(self, runs, options):
        self.runs, self.options = runs, options
        self.stops, self.children, self.progress = 0, set(), Progress()
        self.progress.plan({"runs": len(runs)})
        cores = sorted(os.sched_getaffinity(0))
        jobs = options.jobs
        self.slots = queue.SimpleQueue()  # of cores, one for each run at a time
        for i in range(jobs):
            self.slots.put(cores[len(cores) * i // jobs : len(cores) * (i + 1) // jobs] or cores)

    def stop(self, *_):
        self.stops += 1
        print(
            "sweep: stopping"
            + (": the running ones save (once more: ends them)" if self.stops == 1 else ""),
            file=sys.stderr,
        )
        for child in list(self.children):
            child.send_signal(signal.SIGINT)

    def run_one(self, run):
        if run.recorded()["state"] == "done":
            self.progress.finished("runs", run.name, fresh=False, quiet=True)
        if self.stops or run.recorded()["state"] == "done":
            return
        slot = self.slots.get()
        run.write_record("stopped")  # what it is if we are killed
        command = [
            "taskset", "--cpu-list", ",".join(map(str, slot)),
            *run.command(self.options.program, self.options.restarts),
        ]
        with open(run.output, "ab+") as output:
            begin = output.seek(0, os.SEEK_END)
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                     stderr=output, start_new_session=True)
            self.children.add(child)
            if self.stops:  # it came between the look above and now
                child.send_signal(signal.SIGINT)
            code = child.wait()
            self.children.discard(child)
            output.seek(begin)
            run.finish(code, output.read())
        self.slots.put(slot)
        state = run.recorded()
        self.progress.finished(
            "runs", one_line(run.name), more=one_line(f": {state['state']} {state['message']}")
        )

    def run_all(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(self.run_one, self.runs))


# --------------------------------------------------------------------------------------------------
# Telling


def measure(run):
    """The row of a run, by column."""
    record = run.recorded()
    row = {"run": run.name, "state": record["state"], "message": record["message"]}
    if not run.log.exists():
        return row
    log = run_log.load(run.log, run.name)
    row["steps"] = max(log.costs, default=0)
    if log.val:
        row["val loss"], row["bits/byte"] = log.val[max(log.val)], log.bits_per_byte
        row["at step"] = min(log.val, key=log.val.get)
        row["best val"] = log.val[row["at step"]]
    if log.train:
        row["train loss"] = log.train[max(log.train)]
    seconds, tokens = log.spent("time") or 0, log.spent("tokens") or 0
    row["time (s)"] = round(seconds, 1)
    row["tokens/s"] = round(tokens / seconds) if seconds else None
    return row


def rank(row):
    """Sorts by final validation loss, then training loss; what has none comes last."""
    return [
        row.get(key) if row.get(key) is not None else float("inf")
        for key in ("val loss", "train loss")
    ]


def cell(value):
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def text_table(rows, columns):
    cells = [list(columns)] + [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    left = ("run", "state", "message")
    return "".join(
        "  ".join(
            word.ljust(width) if column in left else word.rjust(width)
            for word, width, column in zip(line, widths, columns)
        ).rstrip()
        + "\n"
        for line in cells
    )


def over_seeds(runs, rows, varied):
    """Mean and standard deviation of the final validation losses of finished runs that differ in
    their seed alone."""
    groups = {}
    for run, row in zip(runs, rows):
        if row.get("val loss") is not None and row["state"] == "done":
            groups.setdefault(run.name_without(varied, ("--seed",)), []).append(row["val loss"])
    means = [
        {
            "run": name,
            "seeds": len(losses),
            "val loss": statistics.mean(losses),
            "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        }
        for name, losses in groups.items()
    ]
    return text_table(sorted(means, key=rank), ("run", "seeds", "val loss", "deviation"))


def report(runs, grid, into):
    """Prints the table and writes it, as text and as TSV with all digits."""
    rows = [measure(run) for run in runs]
    text = text_table(sorted(rows, key=rank), COLUMNS)
    if len(grid.get("--seed", ())) > 1:
        text += "\n" + over_seeds(
            runs, rows, [name for name, values in grid.items() if len(values) > 1]
        )
    text = plain(text)
    print("\n" + text, end="")
    (into / "table.txt").write_text(text)
    with open(into / "table.tsv", "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, dialect="excel-tab", lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(rows, key=rank))
    logs = [
        str(run.log) for run, row in zip(runs, rows) if "train loss" in row or "val loss" in row
    ]
    if logs:
        subprocess.run(
            [sys.executable, str(SCRIPTS / "plot.py"), *logs, "--out", str(into / "loss.png")],
            check=False,
        )
    return {row["state"] for row in rows}


def exit_status(states, stopped):
    if stopped:
        return EXIT_STOPPED
    if states == {"refused"}:
        return EXIT_INPUT
    return 0 if states <= {"done", "refused"} else EXIT_FAILED


def arguments():
    def positive(text):
        if not re.fullmatch("[1-9][0-9]*", text):
            raise argparse.ArgumentTypeError(f"a whole number above 0, found {text}")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sweep.sh GRID [option ...]",
    )
    parser.add_argument("grid", type=Path, metavar="GRID")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", "-j", type=positive, default=1)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    options.into = options.into or Path("out") / options.grid.stem
    return options


def main():
    options = arguments()
    try:
        grid = read_grid(options.grid)
        runs = make_runs(grid, options.into)
    except BadGrid as error:
        print(one_line(f"sweep: {error}"), file=sys.stderr)
        return EXIT_INPUT
    except (OSError, UnicodeDecodeError) as error:
        print(one_line(f"sweep: cannot read {options.grid}: {error}"), file=sys.stderr)
        return EXIT_INPUT
    if options.dry_run:
        for run in runs:
            command = shlex.join(run.command(options.program, options.restarts))
            print(f"# {run.name}: {run.recorded()['state']}\n{command}")
        return 0
    sweep = Sweep(runs, options)
    try:
        held = hold_folder(options.into)
        if not held:
            text = f"another sweep works in {options.into}: wait for it, or choose another --into"
            print(one_line(f"sweep: {text}"), file=sys.stderr)
            return EXIT_INPUT
        sweep.run_all()
        return exit_status(report(runs, grid, options.into), sweep.stops)
    except OSError as error:
        print(one_line(f"sweep: cannot write into {options.into}: {error}"), file=sys.stderr)
        return EXIT_RESOURCES


if __name__ == "__main__":
    sys.exit(main())
