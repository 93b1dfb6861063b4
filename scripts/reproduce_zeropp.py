#!/usr/bin/env python3
"""reproduce_zeropp.py: what ZeRO++ (arXiv 2306.10209) gains over ZeRO-3 where the link is slow, and
what it costs in loss.

    scripts/reproduce_zeropp.sh --quick | --full [--part cluster|convergence|pairs|long]
    [--into FOLDER] [--program FILE]

cluster      on emulated clusters (cluster.sh) of 2x2 and 4x2 nodes x ranks, each rank with an equal
             share of a core: step time,
             traffic between nodes and loss of ZeRO-3 (bf16 messages), of qwZ, hpZ and qgZ alone and
             of all three, over links from unlimited to slow. Where ZeRO-3 runs at a quarter of its
             unlimited speed is interpolated and then measured.
convergence  on local ranks that pretend to be 2 nodes: validation loss on held-out plays of ZeRO-3,
             of ZeRO++, and of ZeRO++
             with one scale for a whole storage, the negative control. Data: data/text_bytes_* of
             `make data`.
pairs        only where it is asked for: the same ranks, bf16, two micro-steps a step, and many more
             steps, for ZeRO-3 and every combination of the three parts: does a loss get stuck, or
             become NaN? About 5 minutes with --full on 2 quiet cores.
long         only where it is asked for: 2 ranks as 2 nodes, bf16, ZeRO-3 and ZeRO++ with 21 million
             parameters for 20,000 steps of 64 bytes, both at once. A node of one rank leaves hpZ
             nothing to do; it changes no bit anyway. About half an hour with --full on 2 quiet
             cores, and 0.6 GB of checkpoints, from which the same command goes on.

--quick takes about 5 minutes on 2 cores, with fewer links and steps; --full about an hour. ZeRO-3
and ZeRO++ are run three times at each link, in turns, for the 95 % interval of the speed-up.
FOLDER (default: out/zeropp_quick or out/zeropp_full) gets a folder with log.jsonl and output.txt
for each run, rows.csv, the tables as table.md, and sweep.png, loss.png and paper.png (ours beside
the release's bars). The same command goes on where it was stopped: what is there is not run again.
Ctrl-C leaves no process and no cluster behind. Where no cluster can be made, that part is skipped
and says what is missing.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import argparse
import concurrent.futures
import csv
import glob
import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import run_log
from reproduce import (
    SCRIPTS,
    Claim,
    Runner,
    complete,
    markdown,
    percent,
    pyplot_or_none,
    run_claims,
    span,
)
from reproduce_cyclic import STUDENT
from zeropp_bars import BARS

CLUSTER = str(SCRIPTS / "cluster.sh")
DATA = "data/text_bytes"
UNLIMITED = math.inf  # a rate, in Mbit/s like all of them
BLOCK, WHOLE = (
    256,
    1 << 30,
)  # elements that share a scale; of the negative control: all of a storage
QUARTER = 0.25  # the share of its unlimited speed at which ZeRO-3 is looked at
CLOSE = 0.01  # a share this near is met

PARTS = {
    "qwZ": ["--zero-quantized-weights"],
    "hpZ": ["--zero-hpz-partition-size", "2"],
    "qgZ": ["--zero-quantized-gradients"],
}
BASE, ALL = "ZeRO-3", "ZeRO++"
VARIANTS = {
    BASE: (),
    "qwZ": ("qwZ",),
    "hpZ": ("hpZ",),
    "qgZ": ("qgZ",),
    "qwZ+hpZ": ("qwZ", "hpZ"),
    ALL: tuple(PARTS),
}
COLORS = {name: f"C{at}" for at, name in enumerate(VARIANTS)}
CONTROL = "unblocked"  # all three, with one scale for a storage
# Every combination of the parts: ZeRO-3, each alone, the pairs, all.
COMBINATIONS = {
    "+".join(chosen) or BASE: chosen
    for count in range(len(PARTS) + 1)
    for chosen in itertools.combinations(PARTS, count)
}

COMMON = [
    "--train",
    DATA + "_train_*.bin",
    "--val",
    DATA + "_val_*.bin",
    "--zero",
    "3",
    "--dtype",
    "bf16",
    "--reduce-dtype",
    "bf16",
    "--threads",
    "1",
]
CONVERGENCE_SHAPE = "2x2"  # nodes and their ranks


@dataclass(frozen=True)
class Training:
    """Runs of one part that differ only in their messages."""

    runs: dict  # name -> (parts of ZeRO++, more flags)
    flags: tuple
    steps: int
    validations: int = 5
    shape: str = CONVERGENCE_SHAPE
    at_once: int = 1  # runs
    resumable: bool = False  # from checkpoints in the run's folder


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in."""

    links: dict  # shape -> variant -> rates
    steps: int  # of a run on the cluster, the first WARMUP of which are not looked at
    repeats: int  # of ZeRO-3 and of ZeRO++ at each link, in turns
    searches: int  # runs at the rate where ZeRO-3 is expected at a quarter of its speed
    model: str
    trainings: dict  # part -> Training
    note: str


WARMUP = 2
RATES = (UNLIMITED, 1000, 400, 200, 100, 50, 20)
FEW_RATES = (UNLIMITED, 200, 50)
QUICK_RATES = (UNLIMITED, 130, 50)
SINGLE = ("qwZ", "hpZ", "qgZ")
SMALL = ("--model", "layers=4,heads=4,channels=128,vocab=256", "--seq-len", "64")
MIDDLE = ("--model", "layers=4,heads=6,channels=192,vocab=256", "--seq-len", "64")
LARGE = ("--model", "layers=3,heads=12,channels=768,vocab=256", "--seq-len", "32")
TWO_MICRO_STEPS = ("--batch-tokens", str(4 * 2 * 2 * 64))  # ranks, micro-steps, samples, tokens
# fp32 messages for what is not quantized, so the three parts are the only difference.
LONG_RATE = ("--reduce-dtype", "fp32", "--lr", "3e-4")


def batch(samples, validated):
    """Flags: samples of a rank and micro-step, batches of a validation."""
    return ("--micro-batch", str(samples), "--val-batches", str(validated))


def trainings(convergence, steps, pairs_steps, long, long_steps):
    """Part -> its runs; the model and the steps differ between --quick and --full."""
    unblocked = ("--zero-quant-block", str(WHOLE))
    return {
        "convergence": Training(
            {BASE: ((), ()), ALL: (VARIANTS[ALL], ()), CONTROL: (VARIANTS[ALL], unblocked)},
            convergence,
            steps,
        ),
        "pairs": Training(
            {name: (parts, ()) for name, parts in COMBINATIONS.items()},
            (*SMALL, *batch(2, 100), *TWO_MICRO_STEPS),
            pairs_steps,
        ),
        "long": Training(
            {BASE: ((), ()), "qwZ+qgZ": (("qwZ", "qgZ"), ())},
            (*long, *batch(1, 300), *LONG_RATE),
            long_steps,
            validations=20,
            shape="2x1",
            at_once=2,
            resumable=True,
        ),
    }


SWEEP_BATCH = ["--seq-len", "64", "--micro-batch", "2", "--val-every", "0"]
PLANS = {
    "quick": Plan(
        links={
            "2x2": {BASE: QUICK_RATES, **dict.fromkeys(SINGLE, (50,)), ALL: QUICK_RATES},
            "4x2": dict.fromkeys((BASE, ALL), (UNLIMITED, 50)),
        },
        steps=WARMUP + 3,
        repeats=3,
        searches=1,
        model="layers=4,heads=4,channels=256,vocab=256",
        trainings=trainings((*SMALL, *batch(2, 100)), 300, 300, SMALL, 400),
        note="--quick: a small model, few links and few steps. --full is the measurement.",
    ),
    "full": Plan(
        links=dict.fromkeys(
            ("2x2", "4x2"),
            {
                BASE: RATES,
                **dict.fromkeys(SINGLE, FEW_RATES),
                "qwZ+hpZ": FEW_RATES[-1:],
                ALL: RATES,
            },
        ),
        steps=WARMUP + 5,
        repeats=3,
        searches=3,
        model="layers=6,heads=4,channels=256,vocab=256",
        trainings=trainings(
            (*MIDDLE, *batch(4, 100)), 1000, 2000, (*LARGE, "--warmup", "1000"), 20000
        ),
        note="",
    ),
}
TRAINING = [
    "--lr",
    "2e-3",
    "--warmup",
    "100",
    "--final-lr-fraction",
    "0.1",
    "--weight-decay",
    "0.1",
    "--beta2",
    "0.99",
]


# --------------------------------------------------------------------------------------------------
# The arithmetic


def volume(parts, block=None):
    """Bytes that leave a node in a step, in units of M: every 16-bit parameter once to every other
    node. Two gathers and a reduction; with a block, the fp32 scales of the quantized ones too."""
    scale = 4 / block if block else 0  # bytes an element
    gather = (1 + scale) / 2 if "qwZ" in parts else 1
    reduction = (0.5 + scale) / 2 if "qgZ" in parts else 1
    return gather * (1 if "hpZ" in parts else 2) + reduction


def unit_bytes(parameters, nodes):
    """M: what a node sends in one exchange of 16-bit parameters."""
    return 2 * parameters * (nodes - 1) / nodes


def ms_at(times, rate):
    """Step time at a rate between those of times (rate -> ms): linear in what a byte takes, 1 /
    rate."""
    places = sorted((1 / known, ms) for known, ms in times.items())
    x = 1 / rate
    for (a, ms_a), (b, ms_b) in zip(places, places[1:]):
        if a <= x <= b:
            return ms_a + (ms_b - ms_a) * (x - a) / (b - a)
    return None


def rate_at_share(times, share):
    """The rate at which the step takes 1 / share of its unlimited time, the fastest one if there
    are several; None if none is."""
    wanted = times[UNLIMITED] / share
    places = sorted((1 / known, ms) for known, ms in times.items())
    for (a, ms_a), (b, ms_b) in zip(places, places[1:]):
        if ms_a < wanted <= ms_b:
            return 1 / (a + (b - a) * (wanted - ms_a) / (ms_b - ms_a))
    return None


def equal_quota(ranks, cores):
    """Percent of a core that every rank can have; a tenth is left to the kernel's side of the
    network and to mpirun."""
    return 90 // -(-ranks // cores)


# --------------------------------------------------------------------------------------------------
# Runs


@dataclass
class Row:
    """One run on a cluster; the columns of rows.csv."""

    shape: str
    rate: float
    variant: str
    ms: float
    predicted_ms: float
    tokens_per_s: float
    node_bytes: float  # sent to other nodes in a step, by a node
    parameters: int
    loss: float  # of the last step
    repeat: int = 1

    def volume(self):
        return self.node_bytes / unit_bytes(self.parameters, int(self.shape.split("x")[0]))


def rate_name(rate):
    return "unlimited" if rate == UNLIMITED else f"{rate:g}mbit"


def read_row(log, shape, rate, variant, repeat):
    found = {}
    for event in run_log.events(log):
        found.setdefault(event.get("event"), []).append(event)
    start, steps, end = (
        found["start"][-1],
        [step for step in found["step"] if step["step"] > WARMUP],
        found["end"][-1],
    )
    ranks = int(shape.split("x")[1])
    return Row(
        shape,
        rate,
        variant,
        ms=statistics.median(step["ms"] for step in steps),
        predicted_ms=start["predicted"]["step_ms"],
        tokens_per_s=statistics.median(step["tokens_per_s"] for step in steps),
        node_bytes=ranks
        * end["traffic"]["measured"]["total"]["inter"],  # rank 0 stands for its neighbours
        parameters=start["parameters"],
        loss=steps[-1]["loss"],
        repeat=repeat,
    )


class Sweep:
    """Rows on the clusters: has the ones that exist, runs the ones that do not."""

    def __init__(self, plan, runner, options):
        self.plan, self.runner, self.options, self.rows = plan, runner, options, []

    def command(self, shape, rate, variant):
        nodes, ranks = map(int, shape.split("x"))
        link = [] if rate == UNLIMITED else ["--rate", rate_name(rate)]
        quota = equal_quota(nodes * ranks, len(os.sched_getaffinity(0)))
        flags = [word for part in VARIANTS[variant] for word in PARTS[part]]
        return [
            CLUSTER,
            shape,
            *link,
            "--cpu",
            str(quota),
            "--",
            self.options.program,
            *COMMON,
            "--model",
            self.plan.model,
            *SWEEP_BATCH,
            "--steps",
            str(self.plan.steps),
            *flags,
        ]

    def measure(self, shape, rate, variant, repeat):
        again = f"-{repeat}" if repeat > 1 else ""
        folder = self.options.into / f"{shape}-{rate_name(rate)}-{variant}{again}"
        log, fresh = complete(self.runner, folder, self.command(shape, rate, variant))
        row = read_row(log, shape, rate, variant, repeat)
        self.rows.append(row)
        self.runner.progress.finished(
            "cluster",
            folder.name,
            fresh,
            f": {row.ms:.1f} ms a step, {row.predicted_ms:.1f} predicted, {row.volume():.3f} M,"
            f" loss {row.loss:.4f}",
        )

    def planned(self):
        """How many runs there will be at most."""
        links, repeats = self.plan.links.values(), self.plan.repeats
        return sum(
            len(rates) * (repeats if name in (BASE, ALL) else 1)
            for variants in links
            for name, rates in variants.items()
        ) + (2 * repeats * self.plan.searches * len(links))

    def measure_all(self):
        for shape, variants in self.plan.links.items():
            for rate in variants[BASE]:
                self.compare(shape, rate, [name for name in variants if rate in variants[name]])
            self.search(shape)

    def compare(self, shape, rate, names):
        """The variants follow each other, so a drift of the machine favours none. ZeRO-3 and ZeRO++
        are repeated, for the interval of their ratio."""
        for repeat in range(1, self.plan.repeats + 1):
            for name in names:
                if repeat == 1 or name in (BASE, ALL):
                    self.measure(shape, rate, name, repeat)

    def search(self, shape):
        """Goes where ZeRO-3 is expected at a quarter of its speed, and looks again from there."""
        for _ in range(self.plan.searches):
            times = self.times(shape, BASE)
            rate = rate_at_share(times, QUARTER)
            if rate is None or round(rate) in times:
                return
            self.compare(shape, round(rate), (BASE, ALL))
            if abs(times[UNLIMITED] / self.times(shape, BASE)[round(rate)] - QUARTER) <= CLOSE:
                return

    def repeated(self, shape, variant):
        """Step times by rate, in the order of the repeats."""
        found = {}
        for row in self.rows:
            if (row.shape, row.variant) == (shape, variant):
                found.setdefault(row.rate, []).append(row.ms)
        return found

    def times(self, shape, variant):
        """Median step time by rate."""
        return {rate: statistics.median(ms) for rate, ms in self.repeated(shape, variant).items()}


def training_command(program, training, name, folder):
    """A run of a training: ranks of this machine as nodes."""
    nodes, ranks = map(int, training.shape.split("x"))
    parts, more = training.runs[name]
    every = str(training.steps // training.validations)
    start = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(nodes * ranks)]
    kept = []
    if training.resumable:
        start = [str(SCRIPTS / "launch.sh"), "--continue", "--bind-to", "none"]
        start += ["--ranks", str(nodes * ranks), "--"]
        kept = ["--out", str(folder / "checkpoints"), "--save-every", every, "--keep", "1"]
    return [
        *start,
        program,
        *COMMON,
        "--ranks-per-node",
        str(ranks),
        *TRAINING,
        *training.flags,
        *more,
        "--steps",
        str(training.steps),
        "--val-every",
        every,
        *(word for part in parts for word in PARTS[part]),
        *kept,
    ]


def train(part, plan, runner, options):
    """The logs of a part's runs, by name; runs that are there already are not run again."""
    training = plan.trainings[part]

    def one(name):
        folder = options.into / f"{part}-{name}"
        command = training_command(options.program, training, name, folder)
        log, fresh = complete(runner, folder, command)
        loss = final_loss(log)
        runner.progress.finished(part, folder.name, fresh, f": validation loss {loss:.4f}")
        return log

    with concurrent.futures.ThreadPoolExecutor(training.at_once) as pool:
        return dict(zip(training.runs, pool.map(one, training.runs)))


def loss_table(logs):
    """How each combination ended, and whether its loss was ever stuck or no number."""
    base, rows = final_loss(logs[BASE]), []
    for name, log in logs.items():
        losses = step_losses(log)
        fifth = len(losses) // 5
        parts = [statistics.fmean(losses[at : at + fifth]) for at in range(0, 5 * fifth, fifth)]
        rows.append(
            [
                name,
                *(f"{loss:.4f}" for loss in parts),
                f"{final_loss(log):.4f}",
                percent(final_loss(log) / base),
                "no" if all(map(math.isfinite, losses)) else "yes",
            ]
        )
    fifths = [f"mean loss, fifth {i}" for i in range(1, 6)]
    return markdown(["", *fifths, "validation", f"against {BASE}", "a loss is no number"], rows)


def step_losses(log):
    """By step; a resumed run tells some steps twice, of which the last counts."""
    losses = {}
    for event in run_log.events(log):
        if event.get("event") == "step":
            losses[event["step"]] = event["loss"] or math.nan
    return [losses[step] for step in sorted(losses)]


def final_loss(log):
    found = run_log.load(log, log.parent.name).val
    return found[max(found)]


# --------------------------------------------------------------------------------------------------
# Telling


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as ZeRO-3: the geometric mean over repeats that followed each other,
    and its 95 % interval (Student's t), None of a single repeat."""

    ratio: float
    low: float = None
    high: float = None

    def __str__(self):
        if self.low is None:
            return f"{self.ratio:.2f}x"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


def speedup(base, ours):
    """Of step times in the order of the repeats."""
    logs = [math.log(its / mine) for its, mine in zip(base, ours)]
    mean, n = statistics.mean(logs), len(logs)
    if n < 2:
        return Speedup(math.exp(mean))
    doubt = STUDENT[n] * statistics.stdev(logs) / n**0.5
    return Speedup(*(math.exp(mean + by) for by in (0, -doubt, doubt)))


def speedups(sweep, shape, variant=ALL):
    """Rate -> Speedup."""
    base, ours = sweep.repeated(shape, BASE), sweep.repeated(shape, variant)
    return {rate: speedup(base[rate], ours[rate]) for rate in sorted(ours, reverse=True)}


def at_quarter(sweep, shape):
    """(rate, Speedup) where ZeRO-3 runs at a quarter of its unlimited speed, None where it never
    does."""
    base, ours = sweep.repeated(shape, BASE), sweep.repeated(shape, ALL)
    rate = rate_at_share(sweep.times(shape, BASE), QUARTER)
    rounds = range(min(map(len, ours.values()), default=0))

    def at_rate(times):
        return [ms_at({known: ms[i] for known, ms in times.items()}, rate) for i in rounds]

    return rate and (rate, speedup(at_rate(base), at_rate(ours)))


def names_of(sweep, shape):
    return [name for name in VARIANTS if sweep.times(shape, name)]


def time_table(sweep, shape):
    """Rates against variants."""
    names, times = names_of(sweep, shape), {
        name: sweep.times(shape, name) for name in names_of(sweep, shape)
    }
    ratios = {name: speedups(sweep, shape, name) for name in names}
    predicted = {
        (row.rate, row.variant): row.predicted_ms for row in sweep.rows if row.shape == shape
    }
    tokens = {
        row.rate: row.tokens_per_s
        for row in sweep.rows
        if (row.shape, row.variant) == (shape, BASE)
    }
    lines = []
    for rate in sorted(times[BASE], reverse=True):
        cells = [
            (
                f"{times[name][rate]:.0f} ({predicted[rate, name]:.0f})"
                + ("" if name == BASE else f", {ratios[name][rate]}")
                if rate in times[name]
                else ""
            )
            for name in names
        ]
        lines.append(
            [
                "unlimited" if rate == UNLIMITED else f"{rate:g} Mbit/s",
                f"{100 * times[BASE][UNLIMITED] / times[BASE][rate]:.0f} %",
                f"{tokens[rate]:.0f}",
                *cells,
            ]
        )
    return (
        f"{shape}: milliseconds a step (predicted at start), speed against ZeRO-3 (95 % interval"
        f" over {sweep.plan.repeats} repeats)\n\n"
        + markdown(["link", "ZeRO-3 runs at", "its tokens/s", *names], lines)
    )


def traffic_table(sweep, shape):
    lines = []
    for name in names_of(sweep, shape):
        row = next(row for row in sweep.rows if (row.shape, row.variant) == (shape, name))
        parts = VARIANTS[name]
        lines.append(
            [
                name,
                f"{row.node_bytes / 1e6:.3f}",
                f"{row.volume():.3f} M",
                f"{volume(parts):g} M",
                f"{volume(parts, BLOCK):.3f} M",
                f"{row.loss:.4f}",
            ]
        )
    return (
        f"{shape}: bytes that a node sends to the others in a step, counted; loss of step"
        f" {sweep.plan.steps}\n\n"
        + markdown(["", "MB", "counted", "formula", "and scales", "loss"], lines)
    )


def both(texts):
    return "; ".join(texts) or "not measured"


def alone_text(alone, together):
    rate = min(min(ratios) for ratios in alone.values())
    return (
        f"{', '.join(f'{name} {ratios[rate]}' for name, ratios in alone.items())}, all"
        f" {together[rate]} at {rate:g} Mbit/s"
    )


def cluster_lines(sweep):
    """Lines beside the paper."""
    shapes = [shape for shape in sweep.plan.links if sweep.times(shape, ALL)]
    volumes = {(row.shape, row.variant): row.volume() for row in sweep.rows}
    ratios = {shape: speedups(sweep, shape) for shape in shapes}
    found = {shape: at_quarter(sweep, shape) for shape in shapes}
    slowest = {shape: min(ratios[shape]) for shape in shapes}
    least = {
        shape: min(ratios[shape], key=lambda rate, of=ratios[shape]: of[rate].ratio)
        for shape in shapes
    }
    alone = {
        shape: {name: speedups(sweep, shape, name) for name in SINGLE if sweep.times(shape, name)}
        for shape in shapes
    }
    wrong = [row.predicted_ms / row.ms for row in sweep.rows]
    return [
        [
            "traffic between nodes, ZeRO-3 over ZeRO++",
            "4x (3M, 0.75M)",
            both(
                f"{shape}: {volumes[shape, BASE] / volumes[shape, ALL]:.2f}x"
                f" ({volumes[shape, BASE]:.2f}M, {volumes[shape, ALL]:.3f}M)"
                for shape in shapes
            ),
            (
                f"the scales, 4 bytes for a block of {BLOCK}; layernorms and positions are gathered"
                " once, not twice"
            ),
        ],
        [
            "speed where ZeRO-3 runs at 25 % of its unlimited speed (goal 2.7x)",
            "2.0x to 2.2x (384 V100, 1 link of 100 Gb/s); 2.70x (64 V100, tutorial)",
            both(
                (
                    f"{shape}: {found[shape][1]} at {found[shape][0]:.0f} Mbit/s"
                    if found[shape]
                    else f"{shape}: no link was slow enough"
                )
                for shape in shapes
            ),
            (
                "the messages of the bytes counted, 3.9 times fewer, would give 2.3x where none"
                " hides behind computing, 3.9x where all do"
            ),
        ],
        [
            "speed at the slowest link (goal 3.5x)",
            "2.2x at 1 link, its slowest",
            both(
                f"{shape}: {ratios[shape][slowest[shape]]} at {slowest[shape]:g} Mbit/s"
                for shape in shapes
            ),
            "the slower the link, the nearer to the ratio of the bytes",
        ],
        [
            "lowest speed of the sweep (goal 0.95x)",
            "1.15x at 8 links",
            both(
                f"{shape}: {ratios[shape][least[shape]]} at {rate_name(least[shape])}"
                for shape in shapes
            ),
            "without a limit messages still take the processor's time, and there are fewer of them",
        ],
        [
            "each alone gains less than all",
            "so (figure)",
            both(
                f"{shape}: {alone_text(alone[shape], ratios[shape])}"
                for shape in shapes
                if alone[shape]
            ),
            "the slowest link that each was measured at",
        ],
        [
            "predicted over measured step time",
            "",
            (
                f"{min(wrong):.2f}, {statistics.median(wrong):.2f}, {max(wrong):.2f} (lowest,"
                f" median, highest of {len(wrong)} runs)"
            ),
            "rates are measured for milliseconds at start, within a period of the quota",
        ],
    ]


def convergence_lines(plan, logs):
    losses = {variant: final_loss(log) for variant, log in logs.items()}
    base, steps = losses[BASE], plan.trainings["convergence"].steps
    return [
        [
            f"validation loss of ZeRO++ after {steps} steps is that of ZeRO-3 (goal 1 %)",
            "equal (GPT-350M, 30B tokens); +0.6 % at step 40 of the tutorial's log",
            f"{losses[ALL]:.4f} against {base:.4f}, {percent(losses[ALL] / base)}",
            "a small model, few steps",
        ],
        [
            "quantizing without blocks is worse",
            "diverges",
            f"{losses[CONTROL]:.4f}, {percent(losses[CONTROL] / base)}",
            "one scale for a storage: a block's matrices and vectors together",
        ],
    ]


# --------------------------------------------------------------------------------------------------
# The claims


def measurements(sweep, logs):
    """What the claims are decided by, as far as it was run."""
    found = {}
    if sweep.rows:
        shapes = [shape for shape in sweep.plan.links if sweep.times(shape, ALL)]
        volumes = {(row.shape, row.variant): row.volume() for row in sweep.rows}
        quarters = [at_quarter(sweep, shape) for shape in shapes]
        ratios = {shape: speedups(sweep, shape) for shape in shapes}
        found["bytes"] = [volumes[shape, BASE] / volumes[shape, ALL] for shape in shapes]
        found["unlimited"] = [ratios[shape][UNLIMITED].ratio for shape in shapes]
        if all(quarters):
            found["quarter"] = [at.ratio for _, at in quarters]
        found["alone"] = [
            (volumes[shape, name], volume(VARIANTS[name]), alone.ratio, ratios[shape][rate].ratio)
            for shape in shapes
            for name in SINGLE
            for rate, alone in list(speedups(sweep, shape, name).items())[-1:]
        ]
    if logs:
        losses = {variant: final_loss(log) for variant, log in logs.items()}
        found["loss"] = losses[ALL] / losses[BASE]
        found["unblocked"] = losses[CONTROL], losses[CONTROL] / losses[BASE]
    return found


GUESSED = math.log(256)  # the loss of a model that knows nothing of bytes
CLAIMS = (
    # Scales of blocks of 256, and what is gathered once, not twice, take 2 % of the 4x.
    Claim(
        "Z1",
        "4x",
        ("bytes",),
        lambda ratios: span(ratios, "{:.2f}x") + " fewer bytes",
        met=lambda ratios: min(ratios) >= 0.95 * 4,
        partly=lambda ratios: min(ratios) > 1,
    ),
    # No 384 GPUs: the mechanism alone.
    Claim(
        "Z2",
        "up to 2.16x",
        ("quarter",),
        lambda ratios: span(ratios, "{:.2f}x") + ", ZeRO-3 at 25 % of its speed",
        partly=lambda ratios: min(ratios) >= 2.16,
    ),
    # (bytes counted, by the formula, speed alone, of all three at that link); noise: 2 %.
    Claim(
        "Z3",
        "each part gains, all gain most",
        ("alone",),
        lambda parts: f"{span([part[2] for part in parts], '{:.2f}x')},"
        f" all {span([part[3] for part in parts], '{:.2f}x')}",
        met=lambda parts: all(
            bytes_ <= 1.02 * formula and 1 < alone < together
            for bytes_, formula, alone, together in parts
        ),
        partly=lambda parts: all(bytes_ <= 1.02 * formula for bytes_, formula, *_ in parts),
    ),
    Claim(
        "Z4",
        "equal loss",
        ("loss",),
        lambda ratio: f"{percent(ratio)} in loss",
        met=lambda ratio: ratio <= 1.01,
        partly=lambda ratio: ratio <= 1.02,
    ),
    Claim(
        "Z5",
        "diverges",
        ("unblocked",),
        lambda found: f"{percent(found[1])} in loss",
        met=lambda found: not found[0] < GUESSED,
        partly=lambda found: found[1] > 1.01,
    ),
    # Without a limit of the link messages cost time of the CPUs, which is not the paper's reason.
    Claim(
        "Z8",
        "1.15x at 8 links",
        ("unlimited",),
        lambda ratios: span(ratios, "{:.2f}x") + " without a limit of the link",
        partly=lambda ratios: min(ratios) >= 1,
    ),
)


def report(sweep, logs, plan, options):
    """The tables and measurements; writes the rows and the pictures. logs: by part and run."""
    text = f"{plan.note}\n\n" if plan.note else ""
    convergence = logs.get("convergence", {})
    lines = (cluster_lines(sweep) if sweep.rows else []) + (
        convergence_lines(plan, convergence) if convergence else []
    )
    if lines:
        text += markdown(["what", "paper", "ours", "why they differ"], lines)
    for part in ("pairs", "long"):
        if part in logs:
            text += f"{part}: {plan.trainings[part].steps} steps\n\n" + loss_table(logs[part])
    if sweep.rows:
        text += "".join(
            time_table(sweep, shape) + traffic_table(sweep, shape) for shape in plan.links
        )
    if sweep.rows:
        write_rows(sweep, options.into / "rows.csv")
        draw(sweep, options.into / "sweep.png")
        draw_beside_paper(sweep, options.into / "paper.png")
    for part, of_part in logs.items():
        picture = options.into / ("loss.png" if part == "convergence" else f"loss_{part}.png")
        words = [sys.executable, str(SCRIPTS / "plot.py"), *map(str, of_part.values())]
        subprocess.run([*words, "--out", str(picture)], check=False)
    return text, measurements(sweep, convergence)


def write_rows(sweep, path):
    names = [field.name for field in fields(Row)]
    with open(path, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*names, "volume", "formula", "formula_with_scales"])
        for row in sweep.rows:
            parts = VARIANTS[row.variant]
            table.writerow(
                [
                    *(getattr(row, name) for name in names),
                    row.volume(),
                    volume(parts),
                    volume(parts, BLOCK),
                ]
            )


def draw(sweep, path):
    """For each cluster: throughput by link, and how many times as fast as ZeRO-3, beside the
    paper's figures."""
    pyplot = pyplot_or_none("reproduce_zeropp")
    if not pyplot:
        return
    shapes = list(sweep.plan.links)
    figure, axes = pyplot.subplots(
        len(shapes), 2, figsize=(13, 4.5 * len(shapes)), layout="constrained", squeeze=False
    )
    for shape, (left, right) in zip(shapes, axes):
        rates = sorted(sweep.times(shape, BASE))
        place = {
            rate: (
                rate if rate < UNLIMITED else 5 * max(known for known in rates if known < UNLIMITED)
            )
            for rate in rates
        }
        for name in names_of(sweep, shape):
            tokens = {
                row.rate: row.tokens_per_s
                for row in sweep.rows
                if (row.shape, row.variant, row.repeat) == (shape, name, 1)
            }
            left.plot(
                [place[rate] for rate in sorted(tokens)],
                [tokens[rate] for rate in sorted(tokens)],
                marker="o",
                markersize=4,
                color=COLORS[name],
                label=name,
            )
            if name != BASE:
                ratios = speedups(sweep, shape, name)
                means = [one.ratio for one in ratios.values()]
                below = [one.ratio - (one.low or one.ratio) for one in ratios.values()]
                above = [(one.high or one.ratio) - one.ratio for one in ratios.values()]
                right.errorbar(
                    [place[rate] for rate in ratios],
                    means,
                    yerr=[below, above],
                    capsize=3,
                    marker="o",
                    markersize=4,
                    color=COLORS[name],
                    label=name,
                )
        right.axhspan(1.4, 2.2, color="black", alpha=0.08, label="paper, 384 V100, 4 links to 1")
        right.axhline(
            2.70,
            color="black",
            linestyle="--",
            linewidth=0.8,
            label="DeepSpeed's tutorial, 64 V100",
        )
        quarter = at_quarter(sweep, shape)
        if quarter:
            right.plot(
                quarter[0],
                quarter[1].ratio,
                marker="*",
                markersize=14,
                color="black",
                linestyle="none",
                label=f"ZeRO-3 at 25 %: {quarter[0]:.0f} Mbit/s, {quarter[1]}",
            )
        left.set(ylabel=f"tokens/s, {shape}")
        right.set(ylabel="speed against ZeRO-3")
        for one in (left, right):
            one.set(xscale="log", xlabel="link (Mbit/s)")
            planned = sweep.plan.links[shape][BASE]  # those of the search lie too close for names
            one.set_xticks(
                [place[rate] for rate in planned],
                ["no limit" if rate == UNLIMITED else f"{rate:g}" for rate in planned],
            )
            one.minorticks_off()
            one.grid(alpha=0.3)
            one.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    print(path)


def draw_beside_paper(sweep, path):
    """How many times as fast as ZeRO-3, by the share of its speed that the link leaves ZeRO-3: on
    the emulated clusters, and on the paper's 384 V100, where 8 links stand for no limit."""
    pyplot = pyplot_or_none("reproduce_zeropp")
    if not pyplot:
        return
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for shape in sweep.plan.links:
        times, ratios = sweep.times(shape, BASE), speedups(sweep, shape)
        points = sorted(
            (100 * times[UNLIMITED] / times[rate], ratios[rate].ratio) for rate in ratios
        )
        axes.plot(*zip(*points), marker="o", label=f"here: {shape} ranks, emulated links")
    for marker, model in zip("s^", ("18B", "138B")):
        bars = [bars[model] for row, bars in BARS.items() if row.tokens == 2048 and model in bars]
        most = max(base for base, _ in bars)
        points = sorted((100 * base / most, ours / base) for base, ours in bars)
        label = f"paper: {model}, 384 V100, 1 to 8 links"
        axes.plot(*zip(*points), marker=marker, color="black", linestyle=":", label=label)
    axes.set(
        xscale="log",
        xlabel="speed of ZeRO-3, % of its speed with the fastest link",
        ylabel="speed of ZeRO++ against ZeRO-3",
    )
    axes.set_xticks(ticks := (5, 10, 20, 50, 100), list(map(str, ticks)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    print(path)


# --------------------------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="reproduce_zeropp.sh --quick | --full [option ...]",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", dest="plan", action="store_const", const="quick")
    size.add_argument("--full", dest="plan", action="store_const", const="full")
    parser.add_argument(
        "--part",
        choices=("cluster", "convergence", "pairs", "long"),
        action="append",
        help="only this; default: the first two",
    )
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    options = parser.parse_args()
    options.into = options.into or Path("out") / f"zeropp_{options.plan}"
    options.part = options.part or ["cluster", "convergence"]
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if not all(glob.glob(f"{DATA}_{name}_*.bin") for name in ("train", "val")):
        parser.error(f"{DATA}_* is not there: run make data first")
    return options


def cluster_possible():
    """Says what is missing where not."""
    check = subprocess.run(
        [CLUSTER, "check", "--cpu", "10"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check.returncode:
        print(
            f"reproduce_zeropp: the cluster part is skipped: {check.stdout.strip()}",
            file=sys.stderr,
        )
    return check.returncode == 0


def reproduce(options):
    plan, runner = PLANS[options.plan], Runner()
    sweep = Sweep(plan, runner, options)
    with_cluster = "cluster" in options.part and cluster_possible()
    runner.progress.plan(
        {
            "cluster": with_cluster * sweep.planned(),
        **{part: len(plan.trainings[part].runs) for part in plan.trainings if part in options.part},
        }
    )
    if with_cluster:
        sweep.measure_all()
    logs = {
        part: train(part, plan, runner, options)
        for part in plan.trainings
        if part in options.part
    }
    return report(sweep, logs, plan, options)


def main():
    options = arguments()
    return run_claims("reproduce_zeropp", options.into, CLAIMS, lambda: reproduce(options))


if __name__ == "__main__":
    sys.exit(main())
