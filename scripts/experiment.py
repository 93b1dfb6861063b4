#!/usr/bin/env python3
"""experiment.py: runs the experiments of a paper, each of which is a file of scripts/papers/: what
is run, what is measured, what the paper says, and the rules of the verdicts.

    scripts/reproduce_*.sh --quick | --full [--part PART ...] [--into FOLDER] [--program FILE]

What all papers share is here: command lines, runs that go on where they were stopped, logs, repeats
and their spread, learning rates that are tuned, how far a script is, tables, pictures, verdicts.
"""

import argparse
import array
import collections
import concurrent.futures
import csv
import glob
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import run_log
from plot import pyplot_or_none
from progress import Progress
from regular_files import hold_folder

EXIT_CLAIM, EXIT_INPUT, EXIT_RESOURCES, EXIT_FAILED, EXIT_STOPPED = 1, 2, 3, 4, 130
SCRIPTS = Path(__file__).resolve().parent
RESULTS = SCRIPTS.parent / "docs/results.md"
CLUSTER = str(SCRIPTS / "cluster.sh")
TEXT = "data/text_bytes"
MIB = 1 << 20
WARMUP = 3  # steps of a timed run that are not looked at
# What the help of every paper ends with.
HELP_OF_ALL = """
FOLDER (default: out/{name}_quick or out/{name}_full) gets a folder for each run, with log.jsonl and
output.txt, the tables as table.md, and the pictures. The same command goes on where it was stopped:
what is there is not run again. A second one in the same FOLDER is refused. Ctrl-C leaves no process
and no cluster behind. Where no emulated cluster (cluster.sh) can be made, its parts are left out,
and it is said what is missing.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of {page} that these runs decide, and what it rests on:
"one timing" is a single run of each, which a busy machine can turn.

Exit status: 0 done, 1 a claim that {page} calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""


class Failed(Exception):
    """The script ends with this status and message; of_run is the exit status of the run that
    failed."""

    def __init__(self, message, status=EXIT_INPUT, of_run=None):
        super().__init__(message)
        self.status, self.of_run = status, of_run


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
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                     env=environment, start_new_session=True)
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
        raise Failed(f"{folder} holds another run: choose another --into, or remove it")
    if found:
        return log, False
    folder.mkdir(parents=True, exist_ok=True)
    status = runner.run(command, output)
    if status:
        raise Failed(
            f"{folder.name}: exit status {status}: {last_words(output)} (all of it: {output})",
            EXIT_FAILED, status
        )
    new = folder / "run.tmp"
    new.write_text(json.dumps({"command": command}) + "\n")
    new.replace(folder / "run.json")
    return log, True


# --------------------------------------------------------------------------------------------------
# Command lines and data


def words(*parts):
    """A command line: a text is cut at its spaces; what a list or tuple holds, and a path, are
    whole words; None is nothing."""
    found = []
    for part in parts:
        if isinstance(part, (list, tuple)):
            found += map(str, part)
        elif isinstance(part, Path):
            found.append(str(part))
        elif part is not None:
            found += str(part).split()
    return found


def data_flags(prefix=TEXT):
    return words(f"--train {prefix}_train_*.bin --val {prefix}_val_*.bin")


def local_ranks(ranks):
    return words("mpirun --oversubscribe --bind-to none -np", ranks)


def cluster(*parts):
    """What starts ranks on an emulated cluster: its shape (nodes x ranks) and flags."""
    return [CLUSTER, *words(*parts), "--"]


def no_cluster(*parts):
    """What this machine lacks for a cluster, empty where it lacks nothing."""
    check = subprocess.run([CLUSTER, *words("check --cpu 10", *parts)], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, check=False)
    return check.stdout.strip() or "no cluster" if check.returncode else ""


def cores():
    return len(os.sched_getaffinity(0))


def equal_quota(ranks, of_cores=None):
    """Percent of a core that every rank can have; a tenth is left to the kernel's side of the
    network and to mpirun."""
    return 90 // -(-ranks // (of_cores or cores()))


def processes(program):
    """(pid, words of its command line) of all processes that run a program of this file name."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            line = Path(path).read_text(errors="replace").split("\0")[:-1]
        except OSError:
            continue  # it ended meanwhile
        if line and os.path.basename(line[0]) == os.path.basename(program):
            yield int(path.split("/")[2]), line


SHARD, SHARD_MAGIC = "<256i", 20240520  # header: magic number, version, tokens; then 2 bytes each


def write_shard(path, tokens):
    """tokens: an array of 16-bit numbers."""
    header = struct.pack(SHARD, SHARD_MAGIC, 1, len(tokens), *[0] * 253)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    new.write_bytes(header + tokens.tobytes())
    new.replace(path)


def random_shard(path, vocab, tokens):
    """Tokens drawn evenly: a step costs the same whatever they are."""
    write_shard(path, array.array("H", random.Random(1).choices(range(vocab), k=tokens)))


def read_shard(path):
    """(header, tokens) of a shard."""
    data = Path(path).read_bytes()
    size = struct.calcsize(SHARD)
    if len(data) < size or (len(data) - size) % 2:
        raise Failed(f"{path}: no shard: run make data again")
    return struct.unpack_from(SHARD, data), array.array("H", data[size:])


# --------------------------------------------------------------------------------------------------
# Logs, and what repeats say


def events(log, kind):
    return [event for event in run_log.events(log) if event.get("event") == kind]


def last(log, kind):
    return events(log, kind)[-1]


def final_loss(log):
    """Of the last validation; of a run that diverged: infinite."""
    loss = last(log, "val")["loss"]
    return float(loss) if loss is not None and math.isfinite(float(loss)) else math.inf


def loss_curve(log):
    """[(step, validation loss) ...]"""
    return [(event["step"], event["loss"]) for event in events(log, "val")]


def timed_steps(log, warmup=WARMUP):
    return [step for step in events(log, "step") if step["step"] > warmup]


def step_ms(log, warmup=WARMUP):
    return statistics.median(step["ms"] for step in timed_steps(log, warmup))


def mean_ms(log):
    return statistics.mean(step["ms"] for step in timed_steps(log))


def sent_bytes(log):
    """What rank 0 sends to other nodes in a step."""
    return last(log, "end")["traffic"]["measured"]["total"]["inter"]


@dataclass(frozen=True)
class Spread:
    """Of repeats of one measurement: their median, the lowest, the highest, how many there are."""

    median: float
    low: float
    high: float
    count: int = 1

    def text(self, form="{:.3f}"):
        median, low, high = map(form.format, (self.median, self.low, self.high))
        return median + (f" ({low} to {high})" if low != high else "")

    def around(self):
        """How far the lowest and the highest are from the median."""
        return self.median - self.low, self.high - self.median


def spread(values):
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values), len(values))


def turns(rounds, variants):
    """(round, variant): each variant in turn, every other round backwards, so that a drift of the
    machine favours none."""
    variants = list(variants)
    for number in range(rounds):
        for variant in variants[::-1] if number % 2 else variants:
            yield number, variant


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of t by number of values


def value_at(points, x):
    """Of (x, y) in order: linear between two of them; the first and the last one's beyond."""
    for (a, low), (b, high) in zip(points, points[1:]):
        if x <= b:
            return low + (high - low) * max(0, x - a) / (b - a)
    return points[-1][1]


def interval(values):
    """The mean, and half of its 95 % interval (Student's t): 0 of a single value."""
    values = list(values)
    n, mean = len(values), statistics.mean(values)
    if n < 2 or math.isinf(mean):
        return mean, 0.0
    return mean, STUDENT[n] * statistics.stdev(values) / n**0.5


def busy():
    """Says so where more work waits for the cores than there are, before ours begins."""
    load = os.getloadavg()[0]
    if load <= cores():
        return ""
    return (
        f"the machine is busy: load {load:.1f} on {cores()} cores at the start; times of this run"
        " tell little"
    )


# --------------------------------------------------------------------------------------------------
# Runs


def plans(**values):
    """What --quick and --full differ in: name -> (value with --quick, with --full)."""
    sizes = "quick", "full"
    of = lambda at: {name: both[at] for name, both in values.items()}
    return {size: SimpleNamespace(**of(at)) for at, size in enumerate(sizes)}


class Bench:
    """What the parts of an experiment share: the plan (--quick or --full), runs that are made where
    they are not there yet, and what was measured."""

    def __init__(self, options, plans):
        self.plan, self.options, self.runner = plans[options.plan], options, Runner()
        self.steps = getattr(options, "steps", None) or getattr(self.plan, "steps", None)
        self.into, self.program = options.into, (options.program,)
        self.found = {}  # measurements by name, which the claims are decided by
        self.repeats = {}  # name -> how many timings or seeds a measurement rests on; without: 1

    def tell(self, name, value, repeats=1):
        """Notes a measurement."""
        self.found[name], self.repeats[name] = value, repeats

    def run(self, name, *command, group=None, say=lambda log: ""):
        """The log of a run, in the folder of its name. say: of a log, what its line tells."""
        log, fresh = complete(self.runner, self.into / name, words(*command))
        group = group or name.split("/")[0]
        self.runner.progress.finished(group, name, fresh, say(log))
        return log

    def run_together(self, commands, jobs=None, **how):
        """Logs by name; as many runs of one thread at a time as there are cores."""
        pool = concurrent.futures.ThreadPoolExecutor(jobs or cores())
        try:
            started = {
                name: pool.submit(self.run, name, command, **how)
                for name, command in commands.items()
            }
            return {name: job.result() for name, job in started.items()}
        finally:
            pool.shutdown(cancel_futures=True)

    def ask(self, name, *command, allowed=(0,), group=None):
        """(exit status, what it printed) of a command that only answers, and keeps no log."""
        output = self.into / name
        output.parent.mkdir(parents=True, exist_ok=True)
        status = self.runner.run(words(*command), output)
        if group:  # whose answers are too many for a line each
            self.runner.progress.finished(group, str(words(*command)), quiet=True)
        if status not in allowed:
            raise Failed(
                f"{name}: exit status {status}: {last_words(output)} (all of it: {output})",
                EXIT_FAILED, status
            )
        return status, output.read_text(errors="replace")

    def in_turns(self, rounds, variants, run):
        """Variant -> its logs: run(variant, round) of each variant in turn."""
        logs = {variant: [] for variant in variants}
        for number, variant in turns(rounds, logs):
            logs[variant].append(run(variant, number))
        return logs

    def times_in_turns(self, rounds, variants, run, measure=None):
        """Variant -> Spread of its steps' times over the rounds."""
        logs = self.in_turns(rounds, variants, run)
        return {variant: spread(map(measure or step_ms, of)) for variant, of in logs.items()}

    def forecast(self, name, *flags, group="forecasts"):
        """What --dry-run says: (the object, ""), or (None, why nothing fits)."""
        file = name.replace(",", "").replace(" ", "_").replace("/", "_")
        status, text = self.ask(f"forecasts/{file}.txt", self.program, "--dry-run --json", *flags,
                                allowed=(0, EXIT_RESOURCES), group=group)
        return (None, text) if status else (first_object(text), "")

    @property
    def cluster_name(self):
        """Of this folder as it is given, so that the same command goes on elsewhere, too."""
        return f"reproduce{zlib.crc32(str(self.into).encode()):08x}"

    def on_cluster(self, nodes, more=""):
        """What starts ranks on nodes with a rank each, with an equal share of the cores. more:
        further words for the cluster."""
        quota = equal_quota(nodes)
        return cluster(f"{nodes}x1 --name {self.cluster_name} {more} --cpu {quota}")

    def draw(self, name, paint, rows=1, columns=1, size=(7, 4)):
        """paint(axes): of one row a list, of several a list for each. Each gets a grid and, where
        something has a label, a legend, unless the figure has one."""
        pyplot = pyplot_or_none(Path(sys.argv[0]).stem)
        if not pyplot:
            return
        figure, panels = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows),
                                         layout="constrained", squeeze=False)
        paint(panels if rows > 1 else panels[0])
        for axes in panels.flat:
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0] and not (axes.get_legend() or figure.legends):
                axes.legend(fontsize=8)
        figure.savefig(self.into / f"{name}.png", dpi=120)
        pyplot.close(figure)


def folder_name(text):
    """A name of a run, as a folder: no spaces."""
    return text.replace(", ", "_").replace(": ", "_").replace(" ", "_")


def first_object(text):
    """The JSON object that a program printed, behind its warnings."""
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def largest(fits, low, high):
    """The largest whole number that fits, of those from low, which does, to below high."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def smallest_that_fits(text):
    """Bytes of the smallest device budget that a refusal names."""
    found = re.search(r"smallest that fits is --device-memory (\d+)", text)
    if not found:
        raise Failed(f"no smallest budget in: {text.strip()[-300:]}", EXIT_FAILED)
    return int(found[1])


# --------------------------------------------------------------------------------------------------
# Candidates, each at its best learning rate


@dataclass(frozen=True)
class Tuned:
    """What a candidate reached: at each rate, the mean over the seeds that choose; at the best of
    them, each of the seeds that are told."""

    grid: dict
    rate: str
    scores: list

    @property
    def mean(self):
        return statistics.mean(self.scores)

    def against(self, base):
        """The mean difference by seed, and half of its 95 % interval."""
        return interval(mine - its for mine, its in zip(self.scores, base.scores, strict=True))


def run_name(part, one, rate, seed):
    """The folder of a run."""
    text = f"{one}, lr {rate}, seed {seed}".replace(", ", "_").replace(" ", "").replace("/", "_")
    return f"{part}/{text}"


def tuned(bench, part, every, rates, command, score=final_loss, better=min):
    """Candidate -> Tuned. A candidate's `optimizer` says whose rates are tried; better: min or
    max."""
    plan = bench.plan

    def runs(jobs):
        names = {job: run_name(part, *job) for job in dict.fromkeys(jobs)}
        logs = bench.run_together({name: command(*job) for job, name in names.items()})
        return {job: score(logs[name]) for job, name in names.items()}

    tried = runs(
        (one, rate, seed)
        for one in every
        for rate in rates[one.optimizer]
        for seed in plan.tuning_seeds
    )
    grids = {
        one: {
            rate: statistics.mean(tried[one, rate, seed] for seed in plan.tuning_seeds)
            for rate in rates[one.optimizer]
        }
        for one in every
    }
    best = {one: better(grid, key=grid.get) for one, grid in grids.items()}
    found = tried | runs(
        (one, best[one], seed)
        for one in every
        for seed in plan.seeds
        if (one, best[one], seed) not in tried
    )
    return {
        one: Tuned(grids[one], best[one], [found[one, best[one], seed] for seed in plan.seeds])
        for one in every
    }


def tuned_to_edges(settings, losses_of, most):
    """Candidate -> (rate, other) -> loss. settings: (candidate, rate, other) to begin with, where
    other is what is tuned beside the rate; losses_of: of settings, setting -> loss. While the best
    rate of a candidate is at an edge of its grid, the next one is tried, up to so many."""
    grids, wanted = {}, list(settings)
    while wanted:
        for (one, rate, other), loss in losses_of(wanted).items():
            grids.setdefault(one, {})[rate, other] = loss
        wanted = []
        for one, grid in grids.items():
            other = min(grid, key=grid.get)[1]
            of_other = {rate: loss for (rate, of), loss in grid.items() if of == other}
            rate = rate_beyond(of_other, most)
            wanted += [(one, rate, other)] if rate else []
    return grids


def rate_beyond(grid, most):
    """The rate that a grid (rate -> loss) of so many at most lacks because its best one is at an
    edge, or None."""
    best, rates = min(grid, key=grid.get), sorted(grid)
    if len(rates) >= most or best not in (rates[0], rates[-1]):
        return None
    return best / 2 if best == rates[0] else best * 2


def tuned_runs(plan, rates):
    """How many runs tuned() makes of a candidate with so many rates."""
    return rates * len(plan.tuning_seeds) + len(set(plan.seeds) - set(plan.tuning_seeds))


# --------------------------------------------------------------------------------------------------
# Tables and pictures


def markdown(header, lines):
    first, *rest = (f"| {' | '.join(line)} |\n" for line in (header, *lines))
    return "".join((first, "|---" * len(header), "|\n", *rest, "\n"))


def percent(ratio, digits=1):
    return f"{100 * (ratio - 1):+.{digits}f} %"


def span(values, form="{:.2f}"):
    """The lowest and the highest, or one where they print alike."""
    texts = [form.format(value) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))


def listed(texts, none="not measured"):
    return "; ".join(texts) or none


def simulated(lines):
    """Lines beside the paper whose figures no run has measured."""
    return [[what, paper, f"simulated: {ours}", why] for what, paper, ours, why in lines]


def write_rows(path, rows, columns=vars):
    """As CSV. columns: of a row, value by name."""
    found = list(map(columns, rows))
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, [*found[0]], lineterminator="\n")
        table.writeheader()
        table.writerows(found)


def bars(axes, labels, series, styles=None, **of_labels):
    """Bars side by side for each label. series: of (name, heights); styles: of each series."""
    width = 0.8 / len(series)
    for at, (name, heights) in enumerate(series):
        places = [place + width * (at - (len(series) - 1) / 2) for place in range(len(labels))]
        axes.bar(places, heights, width, label=name, **(styles[at] if styles else {}))
    axes.set_xticks(range(len(labels)), labels, **of_labels)


# --------------------------------------------------------------------------------------------------
# The verdicts on the papers' claims

MET, PARTLY, NOT_MET, NOT_TESTABLE = "MET", "PARTLY", "NOT MET", "NOT TESTABLE HERE"
VERDICTS = MET, PARTLY, NOT_MET, NOT_TESTABLE, "REFUTED"
NOT_RUN = "not run"


# What a verdict rests on.
TIMED, SEEDS, COUNTED, SIMULATED, FORECAST = "timed", "seeds", "counted", "simulated", "forecast"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, by its number in docs/results.md, and how a run decides it. needs: names
    of the measurements that ours, met and partly take; basis: what they are. Without met the claim
    cannot be shown in full on any machine that a script knows; without partly, too, it is not
    testable there."""

    number: str
    paper: str
    needs: tuple
    basis: str
    ours: Callable  # a text
    met: Callable = None
    partly: Callable = None

    def decide(self, found):
        """(ours, the verdict) of measurements by name."""
        if any(name not in found for name in self.needs):
            return "", NOT_RUN
        values = [found[name] for name in self.needs]
        rules = {MET: self.met, PARTLY: self.partly}
        last_one = NOT_MET if self.met or self.partly else NOT_TESTABLE
        verdict = next((name for name, rule in rules.items() if rule and rule(*values)), last_one)
        return self.ours(*values), verdict

    def rests_on(self, repeats):
        """repeats: how often each measurement was made."""
        n = min(repeats.get(name, 1) for name in self.needs)
        if self.basis == TIMED:
            return f"median of {n}" if n > 1 else "one timing"
        if self.basis == SEEDS:
            return f"{n} seeds" if n > 1 else "one seed"
        return self.basis


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
            raise Failed(f"{page}: no row of its table of claims: {line[:60]} ...")
        found[row[1]] = row[2]
    count = collections.Counter(found.values())
    said = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    if f"{len(found)} claims: {said}." not in " ".join(text.split()):
        raise Failed(
            f"{page}: its table has {len(found)} claims: {said or 'none'}; its text does not"
            " say that"
        )
    return found


def verdict_table(decided, repeats=None):
    """Of claims with (ours, verdict): columns that line up."""
    lines = [["no", "paper", "ours", "rests on", "verdict"]]
    for claim, (ours, verdict) in decided.items():
        basis = "" if verdict == NOT_RUN else claim.rests_on(repeats or {})
        lines.append([claim.number, claim.paper, ours, basis, verdict])
    widths = [max(map(len, column)) for column in zip(*lines)]
    header, *rest = [[*map(str.ljust, line, widths)] for line in lines]
    return "## Verdicts\n\n" + markdown(header, rest)


# --------------------------------------------------------------------------------------------------
# A paper, from its command line to its verdicts


@dataclass(frozen=True)
class Paper:
    """An experiment of a paper. parts: name -> (what it does: of a bench, the text of its tables
    and the lines beside the paper; what it will run: of a bench, group -> runs at most; a title, if
    it needs a cluster, under which it is left out where there is none). The first writes what the
    claims are decided by into the bench. default: the parts that are done where none is
    asked for; steps: --steps replaces the training steps of its plans; reads_text: the parts that
    need `make data`; arguments: adds options of its own; bench: makes the Bench; finish: writes
    what several parts have a share in."""

    name: str
    doc: str
    plans: dict  # --quick, --full -> what they differ in
    parts: dict
    claims: tuple
    default: tuple = ()
    steps: bool = False
    reads_text: tuple = None
    arguments: Callable = lambda parser: None
    bench: Callable = Bench
    finish: Callable = lambda bench: None
    page: Path = None

    @property
    def script(self):
        return f"reproduce_{self.name}"

    def page_name(self):
        return str((self.page or RESULTS).relative_to(SCRIPTS.parent))


def options_of(paper, given):
    parser = argparse.ArgumentParser(
        description=paper.doc + HELP_OF_ALL.format(name=paper.name, page=paper.page_name()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{paper.script}.sh --quick | --full [option ...]",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    for plan in paper.plans:
        size.add_argument(f"--{plan}", dest="plan", action="store_const", const=plan)
    by_itself = f"only this; default: {', '.join(paper.default) or 'all'}"
    parser.add_argument("--part", action="append", choices=paper.parts, help=by_itself)
    if paper.steps:
        parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    paper.arguments(parser)
    options = parser.parse_args(given)
    options.part = options.part or list(paper.default or paper.parts)
    options.into = options.into or Path("out") / f"{paper.name}_{options.plan}"
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    reads_text = paper.parts if paper.reads_text is None else paper.reads_text
    if set(reads_text) & set(options.part):
        if not all(glob.glob(f"{TEXT}_{name}_*.bin") for name in ("train", "val")):
            parser.error(f"no {TEXT}_train_*.bin and {TEXT}_val_*.bin: run make data first")
    return options


def do_parts(paper, bench):
    """The text of all tables."""
    chosen, tables, lines = [], [], []
    for part in bench.options.part:
        work, count, *title = paper.parts[part]
        missing = no_cluster() if title else ""
        if missing:
            left_out = f"{title[0]}: left out: {missing}\n\n"
            chosen.append((lambda bench, text=left_out: (text, []), {}))
        else:
            chosen.append((work, count(bench)))
    for at, (work, _) in enumerate(chosen):
        bench.runner.progress.plan(*(count for _, count in chosen[at:]))
        table, told = work(bench)
        tables.append(table)
        lines += told
    paper.finish(bench)
    note = getattr(bench.plan, "note", "")
    text = f"{note}\n\n" if note else ""
    if lines:
        text += markdown(["what", "paper", "ours", "why they differ"], lines)
    return text + "".join(tables)


def reproduce(paper, options):
    """Does the parts; prints and writes the tables with the verdicts, beside those of the paper's
    page; returns the exit status."""

    def judged():
        known = documented(paper.page)
        missing = [claim.number for claim in paper.claims if claim.number not in known]
        if missing:
            raise Failed(f"{paper.page_name()}: no row of {', '.join(missing)}")
        disturbed = busy()
        bench = paper.bench(options, paper.plans)
        text = do_parts(paper, bench)
        decided = {claim: claim.decide(bench.found) for claim in paper.claims}
        text = (f"{disturbed}\n\n" if disturbed else "") + text
        text += verdict_table(decided, bench.repeats)
        print("\n" + text, end="", flush=True)
        (options.into / "table.md").write_text(text)
        wrong = [
            f"{claim.number} is {verdict} here: {ours} (paper: {claim.paper});"
            f" {paper.page_name()} says {MET}"
            for claim, (ours, verdict) in decided.items()
            if known[claim.number] == MET and verdict in (PARTLY, NOT_MET)
        ]
        for line in wrong:
            print(f"{paper.script}: {line}", file=sys.stderr)
        return EXIT_CLAIM if wrong else 0

    return run_script(paper.script, options.into, judged)


def run_script(name, into, work):
    """Does the work, whose results go into a folder; returns the exit status: what work returns,
    or 0."""
    try:
        held = hold_folder(into)
        if not held:
            raise Failed(f"another script works in {into}: wait for it, or choose another --into")
        if busy():
            print(f"{name}: {busy()}", file=sys.stderr)
        with held:
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


def main():
    files = (SCRIPTS / "papers").glob("*.py")
    names = sorted(file.stem for file in files if "\nPAPER = " in file.read_text())
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: experiment.py {'|'.join(names)} [option ...]", file=sys.stderr)
        return EXIT_INPUT
    paper = importlib.import_module(f"papers.{sys.argv[1]}").PAPER
    sys.argv[0] = paper.script
    return reproduce(paper, options_of(paper, sys.argv[2:]))


if __name__ == "__main__":
    import experiment  # the papers import this module, so that it is not twice

    sys.exit(experiment.main())
