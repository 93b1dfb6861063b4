"""reproduce.py: what the reproductions of papers (reproduce_*.py) share: runs that go on where they
were stopped, how far they are, tables, and the verdicts on the papers' claims."""

import argparse
import collections
import glob
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

EXIT_CLAIM, EXIT_INPUT, EXIT_RESOURCES, EXIT_FAILED, EXIT_STOPPED = 1, 2, 3, 4, 130
SCRIPTS = Path(__file__).resolve().parent
RESULTS = SCRIPTS.parent / "docs/results.md"
TEXT = "data/text_bytes"


class Failed(Exception):
    """The script ends with this status and message; of_run is the exit status of the run that
    failed."""

    def __init__(self, status, message, of_run=None):
        super().__init__(message)
        self.status, self.of_run = status, of_run


def clock(seconds):
    """1:02, or 1:02:03."""
    hours, rest = divmod(round(seconds), 3600)
    return (f"{hours}:{rest // 60:02}" if hours else f"{rest // 60}") + f":{rest % 60:02}"


class Progress:
    """How far a script is, by groups of runs that take about the same time each. A line tells of
    each finished run; a terminal also shows how far the script is while a run is under way."""

    def __init__(self):
        self.planned, self.done = {}, {}  # group -> how many runs; names of runs
        self.spent = {}  # group -> seconds of each run that was not there yet
        self.begun = self.last = time.monotonic()
        self.live, self.lock = sys.stdout.isatty(), threading.Lock()

    def plan(self, *counts):
        """Each: group -> how many runs it will have at most. Forgets what was planned before."""
        self.planned = {}
        for groups in counts:
            for group, runs in groups.items():
                self.planned[group] = max(runs, self.planned.get(group, 0))

    def to_come(self):
        """Group -> how many runs."""
        done = {group: len(names) for group, names in self.done.items()}
        return {group: max(0, runs - done.get(group, 0)) for group, runs in self.planned.items()}

    def left(self):
        """Seconds of all runs that are to come: as long as those of their group so far, or as those
        of all groups; None before the first."""
        every = [seconds for found in self.spent.values() for seconds in found]
        if not every:
            return None
        return sum(
            runs * sum(found) / len(found)
            for group, runs in self.to_come().items()
            for found in (self.spent.get(group, every),)
        )

    def status(self):
        done = sum(map(len, self.done.values()))
        runs = done + sum(self.to_come().values())
        left, now = self.left(), time.monotonic()
        text = f"{done:3}/{runs} {clock(now - self.begun):>5}"
        return text if left is None else f"{text}, {clock(max(0, left - (now - self.last)))} left"

    def finished(self, group, name, fresh=True, more="", quiet=False):
        """A run has ended, or (not fresh) was there; quiet: no line of its own."""
        with self.lock:
            names = self.done.setdefault(group, set())
            if name in names:
                return
            now = time.monotonic()
            if fresh:
                self.spent.setdefault(group, []).append(now - self.last)
            names.add(name)
            self.last = now
        if not quiet:
            self.line(("" if fresh else "there: ") + name + more)

    def line(self, text):
        print(self.live * "\r\033[K" + f"{self.status()}  {text}", flush=True)

    def show(self):
        print(f"\r\033[K{self.status()} ...", end="", flush=True)


class Runner:
    """Starts commands and waits for them, in several threads where that is asked for. A signal ends
    the running ones gently, which remove what they made, and then us."""

    def __init__(self):
        self.children, self.stopped, self.progress = set(), False, Progress()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.stop)

    def stop(self, *_):
        for child in () if self.stopped else tuple(self.children):
            child.terminate()
        self.stopped = True

    def run(self, command, output):
        """Returns the exit status. What the command says goes into the file output."""
        if self.stopped:
            raise KeyboardInterrupt
        environment = dict(
            os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
        )
        with open(output, "wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        self.children.add(child)
        if self.stopped:  # the signal came between the look above and now
            child.terminate()
        status = self.wait(child)
        self.children.discard(child)
        if self.stopped:
            raise KeyboardInterrupt
        return status

    def wait(self, child):
        while True:
            try:
                return child.wait(1 if self.progress.live else None)
            except subprocess.TimeoutExpired:
                self.progress.show()


def last_words(path):
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    ours = [
        line
        for line in lines
        if line.startswith(("train_gpt: ", "cluster: ")) and " sent " not in line
    ]
    return (ours or lines or ["it says nothing"])[-1]


def recorded(folder):
    """The command of the finished run in a folder, or None."""
    record = folder / "run.json"
    return json.loads(record.read_text())["command"] if record.exists() else None


def complete(runner, folder, command):
    """Makes sure that the run is in its folder, whose log is returned; True if it had to run."""
    log, output = folder / "log.jsonl", folder / "output.txt"
    command = [*command, "--log", str(log)]
    found = recorded(folder)
    if found and found != command:
        raise Failed(EXIT_INPUT, f"{folder} holds another run: choose another --into, or remove it")
    if found:
        return log, False
    folder.mkdir(parents=True, exist_ok=True)
    status = runner.run(command, output)
    if status:
        raise Failed(
            EXIT_FAILED,
            f"{folder.name}: exit status {status}: {last_words(output)} (all of it: {output})",
            status,
        )
    new = folder / "run.tmp"
    new.write_text(json.dumps({"command": command}) + "\n")
    new.replace(folder / "run.json")
    return log, True


def markdown(header, lines):
    first, *rest = (f"| {' | '.join(line)} |\n" for line in (header, *lines))
    return "".join((first, "|---" * len(header), "|\n", *rest, "\n"))


def percent(ratio, digits=1):
    return f"{100 * (ratio - 1):+.{digits}f} %"


def span(values, form="{:.2f}"):
    """The lowest and the highest, or one where they print alike."""
    texts = [form.format(value) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))


# --------------------------------------------------------------------------------------------------
# The verdicts on the papers' claims

MET, PARTLY, NOT_MET, NOT_TESTABLE = "MET", "PARTLY", "NOT MET", "NOT TESTABLE HERE"
VERDICTS = MET, PARTLY, NOT_MET, NOT_TESTABLE, "REFUTED"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, by its number in docs/results.md, and how a run decides it. needs: names
    of the measurements that ours, met and partly take. Without met the claim cannot be shown in
    full on any machine that a script knows; without partly, too, it is not testable there."""

    number: str
    paper: str
    needs: tuple
    ours: Callable  # a text
    met: Callable = None
    partly: Callable = None

    def decide(self, found):
        """(ours, the verdict) of measurements by name."""
        if any(name not in found for name in self.needs):
            return "", NOT_RUN
        values = [found[name] for name in self.needs]
        rules = {MET: self.met, PARTLY: self.partly}
        last = NOT_MET if self.met or self.partly else NOT_TESTABLE
        verdict = next((name for name, rule in rules.items() if rule and rule(*values)), last)
        return self.ours(*values), verdict


def documented(page=None):
    """Number of a claim -> its verdict in the table of docs/results.md, or of another page, the
    form of which is checked: a row that is overlooked would count as no claim."""
    page = page or RESULTS
    text = page.read_text() if page.exists() else ""
    header, found = "| no | claim | paper | ours | verdict |\n|---|---|---|---|---|\n", {}
    rows = text.partition(header)[2].splitlines()
    for line in itertools.takewhile(lambda line: line.startswith("|"), rows):
        row = re.fullmatch(r"\| ([A-Z]\d+) \|(?:[^|]+\|){3} \[([A-Z ]+)\]\([^()|]+\)[^|]*\|", line)
        if not row:
            raise Failed(EXIT_INPUT, f"{page}: no row of its table of claims: {line[:60]} ...")
        found[row[1]] = row[2]
    count = collections.Counter(found.values())
    said = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    if f"{len(found)} claims: {said}." not in " ".join(text.split()):
        raise Failed(
            EXIT_INPUT,
            f"{page}: its table has {len(found)} claims: {said or 'none'}; its text does not"
            " say that",
        )
    return found


def verdict_table(decided):
    """Of claims with (ours, verdict): columns that line up."""
    lines = [["no", "paper", "ours", "verdict"]]
    lines += [[claim.number, claim.paper, *row] for claim, row in decided.items()]
    widths = [max(map(len, column)) for column in zip(*lines)]
    header, *rest = [[*map(str.ljust, line, widths)] for line in lines]
    return "## Verdicts\n\n" + markdown(header, rest)


def run_claims(name, into, claims, work, page=None):
    """Does the work, which returns the text of its tables and measurements by name; prints and
    writes the tables with the verdicts, beside those of docs/results.md or of another page; returns
    the exit status."""
    page = page or RESULTS

    def judged():
        known = documented(page)
        missing = [claim.number for claim in claims if claim.number not in known]
        if missing:
            raise Failed(EXIT_INPUT, f"{page}: no row of {', '.join(missing)}")
        text, found = work()
        decided = {claim: claim.decide(found) for claim in claims}
        text += verdict_table(decided)
        print("\n" + text, end="", flush=True)
        (into / "table.md").write_text(text)
        wrong = [
            f"{claim.number} is {verdict} here: {ours} (paper: {claim.paper});"
            f" {page.relative_to(SCRIPTS.parent)} says {MET}"
            for claim, (ours, verdict) in decided.items()
            if known[claim.number] == MET and verdict in (PARTLY, NOT_MET)
        ]
        for line in wrong:
            print(f"{name}: {line}", file=sys.stderr)
        return EXIT_CLAIM if wrong else 0

    return run_script(name, into, judged)


def pyplot_or_none(name):
    """matplotlib's drawing, without a screen; None, and a word about it, where it is not
    installed."""
    try:
        import matplotlib
    except ImportError:
        print(f"{name}: matplotlib is not there (scripts/setup.sh python gets it): no pictures")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def parts_parser(name, doc, plans, parts):
    """Of a script that has so many plans (--quick, --full) and parts; parts_options() reads it."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{name}.sh --quick | --full [option ...]",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    for plan in plans:
        size.add_argument(f"--{plan}", dest="plan", action="store_const", const=plan)
    parser.add_argument("--part", action="append", choices=parts)
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    return parser


def parts_options(parser, name):
    options = parser.parse_args()
    options.into = options.into or Path("out") / f"{name.removeprefix('reproduce_')}_{options.plan}"
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if not glob.glob(TEXT + "_train_*.bin") or not glob.glob(TEXT + "_val_*.bin"):
        parser.error(f"no {TEXT}_train_*.bin and {TEXT}_val_*.bin: run make data first")
    return options


def reproduce_parts(name, bench, parts, claims, page=None):
    """parts: name -> (what it does, what it will run). Each part of a bench gives (tables, lines
    beside the paper) and adds to bench.found; returns the exit status."""
    chosen = bench.options.part or list(parts)

    def work():
        counts = [parts[part][1](bench) for part in chosen]
        tables, lines = [], []
        for at, part in enumerate(chosen):
            bench.runner.progress.plan(*counts[at:])
            table, told = parts[part][0](bench)
            tables.append(table)
            lines += told
        header = ["what", "paper", "ours", "why they differ"]
        return markdown(header, lines) + "".join(tables), bench.found

    return run_claims(name, bench.options.into, claims, work, page)


def run_script(name, into, work):
    """Does the work, whose results go into a folder; returns the exit status: what work returns,
    or 0."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        return work() or 0
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on", file=sys.stderr)
        return EXIT_STOPPED
    except Failed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"{name}: cannot write into {into}: {error}", file=sys.stderr)
        return EXIT_RESOURCES
