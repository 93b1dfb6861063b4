#!/usr/bin/env python3
"""reproduce_dpzero.py: what private training (DP-ZeRO, arXiv 2311.11822) costs in time, memory and
traffic, and in loss.

    scripts/reproduce_dpzero.sh --quick | --full [--part steps|stages|wide|text|curves]
    [--into FOLDER] [--program FILE]

steps   whole steps, private against non-private: at ZeRO stages 0 to 3 on 1, 2 (and 4) ranks, and
        of several sizes on one rank. The
        sizes are GPT-2's: one whole, of the others two blocks with their share of the vocabulary.
stages  a pipeline of as many stages as ranks, private and not, beside ZeRO on as many ranks: the
        same samples a step. On an emulated cluster
        (cluster.sh: a slow network, an equal share of the cores for each rank), where this machine
        can have one.
wide    one block as wide as those of 7B, 13B, 26B and 100B models, forward and backward, without
        optimizer (the times of these actions,
        from --profile-steps); and what --dry-run says of gpt:100B on 64 x 8 GPUs.
text    the bytes of Shakespeare, privately with epsilon 8, 3 and 1, and not: losses on held-out
        plays. Two of these runs in bf16, too, with the same samples and noise. Data of `make data`.
curves  loss at epsilon 8, 3 and 1 and without privacy, by size of the model, at equal tokens, with
        tuned batch and rate (dpzero_curves.py). Only where it is asked for: with --full it is
        estimated at 40 minutes of one core, with --quick at one.

Whoever is compared runs one after the other, each time in the other order; a ratio is taken within
such a round, and what is told is the median of the rounds. Private steps sample by Poisson's rule:
where the same samples are to be compared, with probability 1, so that a step takes all of a small
data set; the "Poisson" rows sample with 1 / 16, and all times are for a sample that was really
taken. Memory is what the program takes on rank 0 (docs/memory.md), in a pipeline the first stage;
traffic what its counters say.

--quick takes less than 5 minutes on 2 cores, with small models and one round; --full about two
hours. FOLDER (default: out/dpzero_quick or out/dpzero_full) gets a folder with log.jsonl and
output.txt for each run, rows.csv, the tables as table.md, and speed.png, text.png, curves.png. The
same command goes on where it was stopped: what is there is not run again. A width whose block does
not fit into this machine is left out, and named.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import argparse
import array
import csv
import glob
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import dpzero_curves
import plot
import run_log
from reproduce import (
    EXIT_RESOURCES,
    SCRIPTS,
    Claim,
    Failed,
    Runner,
    complete,
    markdown,
    percent,
    pyplot_or_none,
    run_claims,
    span,
)

NAME = "reproduce_dpzero"
DATA = "data/text_bytes"
CORES = len(os.sched_getaffinity(0))
WARMUP = 1  # steps that are not looked at
POISSON = 16  # the data set is so many times the batch

PUBLIC, UNIT, FLAT, STAGE, SAMPLED = "non-private", "unit", "flat", "stage", "unit, Poisson"
PRIVATE = ("--dp-noise", "1", "--dp-delta", "1e-5", "--dp-show-private")
FLAGS = {
    PUBLIC: (),
    UNIT: (*PRIVATE, "--dp-clip-style", "unit"),
    FLAT: (*PRIVATE, "--dp-clip-style", "flat"),
    STAGE: (*PRIVATE, "--dp-clip-style", "stage"),
    SAMPLED: (*PRIVATE, "--dp-clip-style", "unit"),
}
# Ranks -> the cluster they are on, and 10 units in balanced stages: the head and the embedding
# count little here.
CLUSTERS, SPLITS = {2: ("2x1", "--rate", "400mbit"), 4: ("2x2", "--rate", "400mbit")}, {
    2: "5:1,5:1",
    4: "3:1,2:1,2:1,3:1",
}
LAYOUTS = {
    "ZeRO 1": (1, (PUBLIC, UNIT, FLAT)),
    "ZeRO 3": (3, (PUBLIC, UNIT, FLAT)),
    "pipeline": (0, (PUBLIC, UNIT, STAGE, FLAT)),
}  # stage of ZeRO, variants
EPSILONS = (8, 3, 1)


@dataclass(frozen=True)
class Shape:
    """What a step computes."""

    name: str
    layers: int
    heads: int
    channels: int
    vocab: int
    T: int
    rows: int  # samples of a micro-step of a rank
    micro_steps: int

    def model(self):
        return (
            f"layers={self.layers},heads={self.heads},channels={self.channels},vocab={self.vocab}"
        )


def blocks_of(name, of_layers, heads, channels, T, rows, micro_steps):
    """Two blocks of a GPT-2, with as large a part of its 50257 tokens as two are of its blocks."""
    return Shape(name, 2, heads, channels, 50257 * 2 // of_layers, T, rows, micro_steps)


@dataclass(frozen=True)
class Width:
    name: str
    heads: int
    channels: int
    blocks: int  # of the model: 12 x channels^2 parameters each
    paper: float  # DP / non-DP throughput


# The release states sizes, not shapes: those of GPT-3 for 7B and 13B, ours for the others.
WIDTHS = {
    w.name: w
    for w in (
        Width("7B", 32, 4096, 32, 0.95),
        Width("13B", 40, 5120, 40, 0.945),
        Width("26B", 48, 6144, 58, 0.959),
        Width("100B", 80, 10240, 80, 0.955),
    )
}
BOOK_KEEPING = {
    "124M": "0.80",
    "350M": "0.80",
    "774M": "0.87",
}  # GPT2, medium, large at 100 tokens, one A100
# NVIDIA's A100 in nodes of 8 with 400 Gbit/s, half of its peak for products.
CLUSTER = "64x8,intra=300,inter=50,tflops=156,memory=1555"
CLUSTER_RUN = (
    "--dry-run",
    "--json",
    "--model",
    "gpt:100B",
    "--cluster",
    CLUSTER,
    "--zero",
    "3",
    "--dtype",
    "bf16",
    "--reduce-dtype",
    "fp32",
    "--recompute",
    "block",
    "--seq-len",
    "2048",
    "--micro-batch",
    "1",
    "--batch-tokens",
    str(2 * 512 * 2048),
)


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in."""

    grid: Shape
    ranks: dict  # ranks -> stages
    pipelined: Shape  # of 8 blocks
    pipeline_ranks: tuple
    layouts: tuple  # of LAYOUTS
    sizes: tuple
    size_styles: tuple
    steps: int
    rounds: int
    widths: tuple
    wide_styles: tuple
    wide_tokens: int
    wide_rounds: int
    training: tuple  # flags of a run on text
    training_steps: int
    note: str


PLANS = {
    "quick": Plan(
        grid=Shape("grid", 4, 4, 256, 256, 128, 4, 2),
        ranks={1: (0,), 2: (0, 1, 2, 3)},
        pipelined=Shape("stages", 8, 4, 128, 256, 128, 2, 2),
        pipeline_ranks=(2, 4),
        layouts=("ZeRO 1", "pipeline"),
        sizes=(
            blocks_of("124M", 12, 12, 768, 256, 4, 2),
            blocks_of("1558M", 48, 25, 1600, 256, 4, 1),
        ),
        size_styles=(PUBLIC, UNIT, FLAT),
        steps=WARMUP + 2,
        rounds=1,
        widths=("7B",),
        wide_styles=(PUBLIC, UNIT),
        wide_tokens=256,
        wide_rounds=1,
        training=(
            "--model",
            "layers=2,heads=4,channels=128,vocab=256",
            "--seq-len",
            "64",
            "--micro-batch",
            "16",
            "--batch-tokens",
            "8192",
            "--lr",
            "3e-3",
            "--warmup",
            "10",
            "--val-batches",
            "8",
        ),
        training_steps=100,
        note="--quick: small models, few steps, one round. --full is the measurement.",
    ),
    "full": Plan(
        grid=Shape("grid", 6, 6, 384, 256, 256, 4, 2),
        ranks=dict.fromkeys((1, 2, 4), (0, 1, 2, 3)),
        pipelined=Shape("stages", 8, 4, 256, 256, 128, 2, 4),
        pipeline_ranks=(2, 4),
        layouts=tuple(LAYOUTS),
        sizes=(
            Shape("6 x 384", 6, 6, 384, 50257, 256, 12, 1),
            Shape("124M", 12, 12, 768, 50257, 1024, 2, 2),
            blocks_of("350M", 24, 16, 1024, 1024, 2, 2),
            blocks_of("774M", 36, 20, 1280, 1024, 2, 2),
            blocks_of("1558M", 48, 25, 1600, 1024, 2, 2),
        ),
        size_styles=(PUBLIC, UNIT, FLAT, SAMPLED),
        steps=WARMUP + 3,
        rounds=3,
        widths=tuple(WIDTHS),
        wide_styles=(PUBLIC, UNIT, FLAT),
        wide_tokens=1024,
        wide_rounds=2,
        training=(
            "--model",
            "layers=4,heads=4,channels=128,vocab=256",
            "--seq-len",
            "64",
            "--micro-batch",
            "32",
            "--batch-tokens",
            "32768",
            "--lr",
            "3e-3",
            "--warmup",
            "50",
            "--val-batches",
            "16",
        ),
        training_steps=500,
        note="",
    ),
}
TRAINING = ("--final-lr-fraction", "0.1", "--beta2", "0.99", "--weight-decay", "0.1")


# --------------------------------------------------------------------------------------------------
# Runs


def write_shard(path, vocab, tokens):
    """Tokens drawn evenly: a step costs the same whatever they are."""
    header = array.array("i", [20240520, 1, tokens] + [0] * 253)
    words = array.array("H", random.Random(1).choices(range(vocab), k=tokens))
    new = path.with_suffix(".tmp")
    new.write_bytes(header.tobytes() + words.tobytes())
    new.replace(path)


def shard(into, vocab, windows, T):
    """A data set of so many windows."""
    path = into / "data" / f"{vocab}_{windows}x{T}.bin"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        write_shard(path, vocab, windows * T + 1)
    return path


@dataclass
class Row:
    """One run of steps; the columns of rows.csv."""

    part: str
    name: str  # of the shape or width
    ranks: int
    stage: int
    variant: str
    round: int
    ms: float  # for a sample
    samples: int  # that were looked at
    device: int  # bytes that rank 0 took
    host: int  # resident besides
    sent: int  # bytes that rank 0 sends in a step
    traffic: dict  # the same by link and kind
    limit: float  # of the speed against non-private, as the program says; 1: not private

    def place(self):
        return self.part, self.name, self.ranks, self.stage


def by_kind(log):
    """The events of a log, in lists."""
    found = {}
    for event in run_log.events(log):
        found.setdefault(event.get("event"), []).append(event)
    return found


def speed_limit(output):
    """What the line `clipping` of a private run leaves of the speed."""
    found = re.search(r"^clipping .* leaves ([\d.]+) %", output.read_text(errors="replace"), re.M)
    return float(found[1]) / 100 if found else 1.0


def step_ms(found, T):
    """Milliseconds for a sample in the steps after the first, and how many samples these took.
    Steps of equally many: that of the median step."""
    steps = [step for step in found["step"] if step["step"] > WARMUP]
    samples = [round(step["tokens_per_s"] * step["ms"] / 1000 / T) for step in steps]
    if min(samples) == max(samples):
        return statistics.median(step["ms"] for step in steps) / samples[0], sum(samples)
    return sum(step["ms"] for step in steps) / sum(samples), sum(samples)


def block_ms(found, samples):
    """Milliseconds of a sample's way through the blocks and back, from the profile."""
    profile = found["profile"][-1]
    kinds = {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "CLIP"}
    return (
        sum(
            action["ms"]
            for action in profile["actions"]
            if action["action"] in kinds and action["unit"] == "block"
        )
        / samples,
        samples * profile["steps"],
    )


def read_row(log, place, variant, number, T, samples):
    """samples: of a step, for a block's times; else None."""
    found = by_kind(log)
    end = found["end"][-1]
    ms, counted = block_ms(found, samples) if samples else step_ms(found, T)
    memory, traffic = end["memory"]["measured"], end["traffic"]["measured"]
    return Row(
        *place,
        variant,
        number,
        ms,
        counted,
        memory["device"],
        memory["host"],
        sum(traffic["total"].values()),
        {f"{link} {kind}": n for link in ("intra", "inter") for kind, n in traffic[link].items()},
        speed_limit(log.parent / "output.txt"),
    )


class Measurements:
    """Rows: has the ones that exist, runs the ones that do not."""

    def __init__(self, plan, runner, options):
        self.plan, self.runner, self.options, self.rows, self.left_out, self.cluster = (
            plan,
            runner,
            options,
            [],
            {},
            False,
        )

    def command(self, shape, ranks, stage, variant, *more, launcher=None):
        samples = ranks * shape.rows * shape.micro_steps
        data = shard(
            self.options.into,
            shape.vocab,
            samples * (POISSON if variant == SAMPLED else 1),
            shape.T,
        )
        launcher = launcher or ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
        return [
            *launcher,
            self.options.program,
            "--train",
            str(data),
            "--val-every",
            "0",
            "--model",
            shape.model(),
            "--seq-len",
            str(shape.T),
            "--micro-batch",
            str(shape.rows),
            "--batch-tokens",
            str(samples * shape.T),
            "--zero",
            str(stage),
            "--threads",
            str(max(1, CORES // ranks)),
            *more,
            *FLAGS[variant],
        ]

    def measure(self, place, variant, number, command, T, samples=None):
        part, name, ranks, stage = place
        folder = self.options.into / f"{part}-{name}-{ranks}-{stage}-{variant}-{number}".replace(
            " ", ""
        ).replace(",", "")
        log, fresh = complete(self.runner, folder, command)
        row = read_row(log, place, variant, number, T, samples)
        self.rows.append(row)
        self.runner.progress.finished(
            part,
            folder.name,
            fresh,
            f": {row.ms:.2f} ms a sample ({row.samples}), {row.device / plot.MIB:.1f} MiB,"
            f" {row.sent} bytes sent",
        )

    def rounds(self, place, shape, variants, count, *more, block=False, launcher=None):
        """Each variant in turn, every other time backwards: a drift of the machine favours none."""
        for number in range(count):
            for variant in variants[::-1] if number % 2 else variants:
                self.measure(
                    place,
                    variant,
                    number,
                    self.command(shape, *place[2:], variant, *more, launcher=launcher),
                    shape.T,
                    shape.rows if block else None,
                )

    def planned(self):
        """Part -> group -> how many runs."""
        plan = self.plan
        stages = sum(len(LAYOUTS[name][1]) for name in plan.layouts)
        return {
            "steps": {
                "grid": 3 * plan.rounds * sum(map(len, plan.ranks.values())),
                "size": len(plan.sizes) * len(plan.size_styles) * plan.rounds,
            },
            "stages": {"stages": len(plan.pipeline_ranks) * stages * plan.rounds},
            "wide": {
                "wide": len(plan.widths) * len(plan.wide_styles) * plan.wide_rounds,
                "forecast": 2,
            },
            "text": {"text": len(TRAININGS)},
        }

    def measure_steps(self):
        plan, steps = self.plan, ("--steps", str(self.plan.steps))
        for ranks, stages in plan.ranks.items():
            for stage in stages:
                self.rounds(
                    ("grid", plan.grid.name, ranks, stage),
                    plan.grid,
                    (PUBLIC, UNIT, FLAT),
                    plan.rounds,
                    *steps,
                )
        for shape in plan.sizes:
            self.rounds(("size", shape.name, 1, 0), shape, plan.size_styles, plan.rounds, *steps)

    def measure_stages(self):
        """All layouts of as many ranks in turn: rounds of one are compared with those of
        another."""
        plan, shape = self.plan, self.plan.pipelined
        self.cluster = not subprocess.run(
            [SCRIPTS / "cluster.sh", "check"], capture_output=True, check=False
        ).returncode
        for ranks in plan.pipeline_ranks:
            cluster = [
                str(SCRIPTS / "cluster.sh"),
                *CLUSTERS[ranks],
                "--cpu",
                str(min(100, 100 * CORES // ranks)),
                "--",
            ]
            for name, (stage, variants) in ((name, LAYOUTS[name]) for name in plan.layouts):
                more = ("--pipeline", SPLITS[ranks]) if name == "pipeline" else ()
                self.rounds(
                    ("stages", name, ranks, stage),
                    shape,
                    variants,
                    plan.rounds,
                    "--steps",
                    str(plan.steps),
                    *more,
                    launcher=cluster if self.cluster else None,
                )

    def measure_widths(self):
        """A block alone, one sample at a time. Stochastic gradient descent without a step takes
        least memory beside it."""
        plan, last = self.plan, WARMUP + 2
        flags = (
            "--optimizer",
            "sgd",
            "--momentum",
            "0",
            "--lr",
            "0",
            "--steps",
            str(last),
            "--profile-steps",
            f"{WARMUP + 1}:{last}",
        )
        for width in (WIDTHS[name] for name in plan.widths):
            shape = Shape(width.name, 1, width.heads, width.channels, 256, plan.wide_tokens, 1, 1)
            try:
                self.rounds(
                    ("wide", width.name, 1, 0),
                    shape,
                    plan.wide_styles,
                    plan.wide_rounds,
                    *flags,
                    block=True,
                )
            except Failed as error:
                if error.of_run != EXIT_RESOURCES:
                    raise
                self.left_out[width.name] = str(error)
                print(f"{NAME}: {width.name} is left out: {error}", file=sys.stderr)

    def of(self, place, variant):
        """Round -> row."""
        return {
            row.round: row for row in self.rows if row.place() == place and row.variant == variant
        }

    def places(self, part):
        return list(dict.fromkeys(row.place() for row in self.rows if row.part == part))

    def ratios(self, place, variant, value):
        """Of a value of the private run over that of the non-private one, by round."""
        base, ours = self.of(place, PUBLIC), self.of(place, variant)
        return [
            value(ours[number]) / value(base[number]) for number in sorted(ours) if number in base
        ]

    def speed(self, place, variant):
        """Private over non-private throughput: median, lowest, highest of the rounds; None where it
        was not measured."""
        found = [1 / ratio for ratio in self.ratios(place, variant, lambda row: row.ms)]
        return (statistics.median(found), min(found), max(found)) if found else None

    def memory(self, place, variant):
        found = self.ratios(place, variant, lambda row: row.device)
        return statistics.median(found) if found else None

    def over_zero(self, place, variant, value=lambda row: row.ms):
        """Of a value, this over private ZeRO-1 in style unit on as many ranks: the median of the
        rounds."""
        ours, base = self.of(place, variant), self.of(("stages", "ZeRO 1", place[2], 1), UNIT)
        return statistics.median(value(ours[number]) / value(base[number]) for number in ours)

    def limit(self, place, variant):
        return statistics.median(row.limit for row in self.of(place, variant).values())

    def pairs(self):
        """(private row, non-private row) of those that took the same samples."""
        return [
            (row, self.of(row.place(), PUBLIC)[row.round])
            for row in self.rows
            if row.part == "grid"
            and row.ranks > 1
            and row.variant != PUBLIC
            and row.round in self.of(row.place(), PUBLIC)
        ]


def predict_100b(runner, options):
    """Variant -> what --dry-run predicts of a rank."""
    found = {}
    for variant in (PUBLIC, UNIT):
        folder = options.into / f"cluster-{variant}"
        flags = FLAGS[variant] and (
            "--dp-noise",
            "1",
            "--dp-delta",
            "1e-8",
            "--dp-clip-style",
            "unit",
        )
        _, fresh = complete(runner, folder, [options.program, *CLUSTER_RUN, *flags])
        runner.progress.finished("forecast", folder.name, fresh)
        line = next(
            line
            for line in (folder / "output.txt").read_text().splitlines()
            if line.startswith("{")
        )
        found[variant] = json.loads(line)["predicted"]
    return found


@dataclass(frozen=True)
class Training:
    """A run on text. epsilon 0: not private."""

    epsilon: int
    dtype: str = "fp32"

    def __str__(self):
        name = f"epsilon {self.epsilon}" if self.epsilon else PUBLIC
        return name if self.dtype == "fp32" else f"{name}, {self.dtype}"


# In bf16 the least private and the non-private run, each beside the same run in fp32.
TRAININGS = (
    *(Training(epsilon) for epsilon in (0, *EPSILONS)),
    *(Training(epsilon, "bf16") for epsilon in (0, EPSILONS[0])),
)
# All private runs draw the same samples and the same noise, so that precisions can be compared.
KEY = "1" * 64


def train_all(plan, runner, options):
    """The logs of the runs on text, by Training."""
    logs, ranks = {}, min(2, CORES)
    for training in TRAININGS:
        folder = options.into / f"text-{str(training).replace(', ', '-').replace(' ', '')}"
        command = [
            "mpirun",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-np",
            str(ranks),
            options.program,
            "--threads",
            str(max(1, CORES // ranks)),
            "--train",
            DATA + "_train_*.bin",
            "--val",
            DATA + "_val_*.bin",
            *plan.training,
            *TRAINING,
            "--steps",
            str(plan.training_steps),
            "--val-every",
            str(plan.training_steps // 10),
            "--dtype",
            training.dtype,
            *(("--dp-epsilon", str(training.epsilon), "--dp-key", KEY) if training.epsilon else ()),
        ]
        logs[training], fresh = complete(runner, folder, command)
        runner.progress.finished(
            "text",
            folder.name,
            fresh,
            f": validation loss {last_validation(logs[training])['loss']:.4f}",
        )
    return logs


def validations(log):
    """The val events of a log, the last of each step."""
    return {event["step"]: event for event in run_log.events(log) if event.get("event") == "val"}


def last_validation(log):
    found = validations(log)
    return found[max(found)]


# --------------------------------------------------------------------------------------------------
# Telling


def spread(found):
    if found is None:
        return ""
    median, low, high = found
    return f"{median:.3f}" + (f" ({low:.3f} to {high:.3f})" if low < high else "")


def gigabytes(n):
    return f"{n / 1e9:.3f} GB"


def joined(texts):
    return "; ".join(texts) or "not measured"


def styles(measured, places):
    """The private variants that were measured in any of these places."""
    return [
        variant
        for variant in FLAGS
        if variant != PUBLIC and any(measured.of(place, variant) for place in places)
    ]


def range_text(values):
    values = [value for value in values if value is not None]
    return f"{min(values):.3f} to {max(values):.3f}" if values else "not measured"


def grid_lines(measured):
    places = measured.places("grid")
    found = {
        variant: [
            measured.speed(place, variant)[0] for place in places if measured.speed(place, variant)
        ]
        for variant in (UNIT, FLAT)
    }
    memory = {
        variant: [measured.memory(place, variant) for place in places] for variant in (UNIT, FLAT)
    }
    pairs = measured.pairs()
    equal = sum(a.traffic == b.traffic for a, b in pairs)
    ranks = ", ".join(map(str, sorted({place[2] for place in places})))
    return [
        [
            f"speed, private over non-private, ZeRO 0 to 3 on {ranks} ranks",
            "0.93 to 0.96 (16 to 128 GPUs, largest batch); 0.92 (128, same batch)",
            joined(f"{variant}: {range_text(values)}" for variant, values in found.items()),
            "a small model on this machine's cores, which the ranks share",
        ],
        [
            "memory, private over non-private (goal 1.05)",
            "1.0 to 1.3",
            joined(f"{variant}: {range_text(values)}" for variant, values in memory.items()),
            "no gradient of a sample is kept longer than its unit is at work",
        ],
        [
            "traffic, private and non-private",
            "equal",
            f"equal in {equal} of {len(pairs)} pairs, by link and kind of message, byte for byte",
            "messages of fp32 in both",
        ],
    ]


def size_lines(measured):
    places = measured.places("size")
    others = ", ".join(f"{name} {value}" for name, value in BOOK_KEEPING.items())
    lines = [
        [
            "speed by size (goal 0.95; 0.93 at T <= 256)",
            f"book-keeping: {others} (100 tokens)",
            joined(
                f"{place[1]}: {measured.speed(place, UNIT)[0]:.3f}"
                for place in places
                if measured.speed(place, UNIT)
            ),
            "style unit; a sample's gradient is made once, measured, and added",
        ]
    ]
    flat = [
        (place, measured.speed(place, FLAT)[0] / measured.limit(place, FLAT))
        for place in places
        if measured.speed(place, FLAT)
    ]
    lines.append(
        [
            "style flat, speed over what the norms' arithmetic leaves (goal 0.95)",
            "flat at stages 2 and 3: not offered",
            joined(f"{place[1]}: {share:.3f}" for place, share in flat),
            "the limit counts multiplications alone; norms also read",
        ]
    )
    sampled = [
        (place, measured.speed(place, SAMPLED)[0])
        for place in places
        if measured.speed(place, SAMPLED)
    ]
    if sampled:
        lines.append(
            [
                "the same as sampled by Poisson's rule",
                "accounts for it, but shuffles",
                joined(f"{place[1]}: {value:.3f}" for place, value in sampled),
                "a step's last micro-step is seldom full",
            ]
        )
    return lines


def stages_lines(measured):
    places = [place for place in measured.places("stages") if place[1] == "pipeline"]

    def told(variant, value):
        return ", ".join(f"{place[2]} ranks: {value(place, variant):.2f}" for place in places)

    return [
        [
            "speed, private pipeline over private ZeRO-1 (unit), equal ranks",
            "",
            joined(
                f"{variant}: {told(variant, lambda place, v: 1 / measured.over_zero(place, v))}"
                for variant in (UNIT, STAGE, FLAT)
            ),
            "the same samples a step; a slow network, or none: see the table",
        ],
        [
            "speed, private over non-private, the same pipeline",
            "",
            joined(
                f"{variant}: {told(variant, lambda place, v: measured.speed(place, v)[0])}"
                for variant in (UNIT, STAGE, FLAT)
            ),
            (
                "flat clipping waits for one more way to the first stage and back, and keeps"
                " activations meanwhile"
            ),
        ],
    ]


def wide_lines(measured, predicted):
    places = measured.places("wide")
    found = [
        (place[1], measured.speed(place, UNIT)[0])
        for place in places
        if measured.speed(place, UNIT)
    ]
    left_out = "".join(f"; {name}: too little memory here" for name in measured.left_out)
    a, b = predicted[PUBLIC], predicted[UNIT]
    return [
        [
            "speed at the widths of 7B, 13B, 26B, 100B",
            ", ".join(f"{width.paper:g}" for width in WIDTHS.values()),
            joined(f"{name}: {value:.3f}" for name, value in found) + left_out,
            (
                f"one block of the width, {measured.plan.wide_tokens} tokens, style unit, without"
                " optimizer and messages"
            ),
        ],
        [
            "GPT-100B on 512 GPUs",
            "trained",
            (
                f"predicted a rank: {gigabytes(a['memory']['device'])}, private"
                f" {gigabytes(b['memory']['device'])}"
                f" ({b['memory']['device'] / a['memory']['device']:.3f}); traffic"
                f" {'equal' if a['traffic'] == b['traffic'] else 'DIFFERS'}"
            ),
            "80 blocks of 10240, our geometry; a prediction",
        ],
    ]


def text_lines(plan, logs):
    losses = {training: last_validation(log)["loss"] for training, log in logs.items()}
    public = losses[Training(0)]
    private = ", ".join(
        f"epsilon {epsilon}: {losses[Training(epsilon)]:.4f}"
        f" ({percent(losses[Training(epsilon)] / public)})"
        for epsilon in EPSILONS
    )
    rounded = ", ".join(
        f"{Training(epsilon)}: "
        + percent(losses[Training(epsilon, "bf16")] / losses[Training(epsilon)])
        for epsilon in (0, EPSILONS[0])
    )
    return [
        [
            f"validation loss after {plan.training_steps} steps",
            "large models come close to non-private ones",
            f"{private}; non-private: {public:.4f}",
            "a small model, little text, few steps; the less noise, the lower",
        ],
        [
            "the same in bf16, against fp32",
            "as fp32",
            rounded,
            "same samples and noise",
        ],
    ]


def curves_line(curves):
    return [
        "loss over non-private at equal tokens, epsilon 8, 3, 1, by parameters",
        "large models come close to non-private ones",
        dpzero_curves.summary(curves),
        "models of some millions of parameters at most, from scratch, on 4.5 MB of text",
    ]


def grid_table(measured):
    """Ranks and stages against styles."""
    places, shape = measured.places("grid"), measured.plan.grid
    lines = []
    for place in places:
        base = statistics.median(row.ms for row in measured.of(place, PUBLIC).values())
        sent = {row.sent for row, _ in measured.pairs() if row.place() == place}
        lines.append(
            [
                str(place[2]),
                str(place[3]),
                f"{base:.2f}",
                *(spread(measured.speed(place, variant)) for variant in (UNIT, FLAT)),
                *(f"{measured.memory(place, variant):.3f}" for variant in (UNIT, FLAT)),
                ", ".join(f"{n / 1e6:.6f}" for n in sorted(sent)),
            ]
        )
    return (
        f"{shape.model()}, {shape.T} tokens, micro-batch {shape.rows}, {shape.micro_steps}"
        " micro-steps\n\n"
        + markdown(
            [
                "ranks",
                "ZeRO",
                "non-private, ms a sample",
                "speed, unit",
                "flat",
                "memory, unit",
                "flat",
                "MB sent, private",
            ],
            lines,
        )
    )


def stages_table(measured):
    lines, shape = [], measured.plan.pipelined
    for place in measured.places("stages"):
        for variant in LAYOUTS[place[1]][1]:
            rows = measured.of(place, variant).values()
            middle = lambda value: statistics.median(value(row) for row in rows)
            lines.append(
                [
                    str(place[2]),
                    place[1] + (f", {SPLITS[place[2]]}" if place[1] == "pipeline" else ""),
                    variant,
                    f"{middle(lambda row: row.ms):.2f}",
                    "" if variant == PUBLIC else spread(measured.speed(place, variant)),
                    f"{1 / measured.over_zero(place, variant):.3f}",
                    f"{middle(lambda row: row.device) / plot.MIB:.1f}",
                    f"{middle(lambda row: row.sent) / 1e6:.3f}",
                ]
            )
    where = (
        ", ".join(" ".join(CLUSTERS[ranks]) for ranks in measured.plan.pipeline_ranks)
        + ", an equal share of the cores each"
        if measured.cluster
        else "no emulated cluster here: ranks share cores and memory"
    )
    return (
        f"{shape.model()}, {shape.T} tokens, {shape.rows * shape.micro_steps} samples a rank and"
        f" step, micro-batches of {shape.rows}; {where}\n\n"
        + markdown(
            [
                "ranks",
                "layout",
                "clipping",
                "ms a sample",
                "speed over non-private",
                "over private ZeRO 1",
                "MiB, rank 0",
                "MB sent, rank 0",
            ],
            lines,
        )
    )


def size_table(measured):
    lines, places = [], measured.places("size")
    names = styles(measured, places)
    shapes = {shape.name: shape for shape in measured.plan.sizes}
    for place in places:
        shape = shapes[place[1]]
        base = statistics.median(row.ms for row in measured.of(place, PUBLIC).values())
        what = (
            f"{shape.name}: {shape.layers} blocks of {shape.channels}, vocabulary {shape.vocab}, T"
            f" = {shape.T}, {shape.rows * shape.micro_steps} samples"
        )
        lines.append(
            [
                what,
                f"{base:.1f}",
                *(spread(measured.speed(place, name)) for name in names),
                f"{measured.limit(place, FLAT):.3f}",
                *(f"{measured.memory(place, name):.3f}" for name in names),
            ]
        )
    columns = [
        *(f"speed, {name}" for name in names),
        "flat's limit",
        *(f"memory, {name}" for name in names),
    ]
    return "one rank\n\n" + markdown(["size", "non-private, ms a sample", *columns], lines)


def wide_table(measured):
    lines, places = [], measured.places("wide")
    names = styles(measured, places)
    for place in places:
        width = WIDTHS[place[1]]
        base = statistics.median(row.ms for row in measured.of(place, PUBLIC).values())
        lines.append(
            [
                width.name,
                f"{width.blocks} of {width.channels}, {width.heads} heads",
                f"{12 * width.channels**2 / 1e6:.0f} M",
                f"{base:.0f}",
                *(spread(measured.speed(place, name)) for name in names),
                *(f"{measured.limit(place, name):.3f}" for name in names),
                f"{width.paper:g}",
            ]
        )
    columns = [
        *(f"speed, {name}" for name in names),
        *(f"limit, {name}" for name in names),
        "paper",
    ]
    return f"one block, forward and backward, {measured.plan.wide_tokens} tokens\n\n" + markdown(
        ["width of", "blocks", "parameters of one", "non-private, ms", *columns], lines
    )


def cluster_table(predicted):
    kinds = [kind for kind in predicted[PUBLIC]["memory"] if kind != "host"]

    def cells(p):
        return [
            *(p["memory"][kind] for kind in kinds),
            *(p["traffic"]["total"][link] for link in ("intra", "inter")),
            p["step_ms"],
        ]

    found = {variant: cells(p) for variant, p in predicted.items()}
    rows = [
        [variant, *map(gigabytes, values[:-1]), f"{values[-1]:.0f}"]
        for variant, values in found.items()
    ]
    rows.append(["ratio", *(f"{a / b:.3f}" for a, b in zip(found[UNIT], found[PUBLIC]))])
    header = ["", *kinds, "sent inside a node, a step", "between nodes", "ms a step"]
    return f"`./train_gpt {' '.join(CLUSTER_RUN)}`: a rank\n\n" + markdown(header, rows)


def shown_steps(found):
    return sorted(found)[1:-1:3]


def text_table(plan, logs):
    lines = []
    for training, log in logs.items():
        found, start = validations(log), by_kind(log)["start"][-1]
        last = found[max(found)]
        spent = last.get("epsilon")
        lines.append(
            [
                str(training),
                "" if spent is None else f"{spent:.4f}",
                *(f"{found[step]['loss']:.4f}" for step in shown_steps(found)),
                f"{last['loss']:.4f}",
                f"{last['bits_per_byte']:.4f}",
                str(start["ranks"]),
            ]
        )
    steps = shown_steps(validations(logs[Training(0)]))
    return f"`{' '.join(plan.training + TRAINING)} --steps {plan.training_steps}`\n\n" + markdown(
        [
            "run",
            "epsilon spent",
            *(f"loss at step {step}" for step in steps),
            f"at step {plan.training_steps}",
            "bits/byte",
            "ranks",
        ],
        lines,
    )


# --------------------------------------------------------------------------------------------------
# The claims


def measurements(measured, predicted, logs, curves):
    """What the claims are decided by, as far as it was run."""
    found, places = {}, measured.places("grid") + measured.places("size")
    if places:
        found["speed"] = {
            style: statistics.median(measured.speed(place, style)[0] for place in places)
            for style in (UNIT, FLAT)
        }
        found["memory"] = [
            measured.memory(place, style) for place in places for style in (UNIT, FLAT)
        ]
        found["traffic"] = [a.traffic == b.traffic for a, b in measured.pairs()]
    if predicted:
        found["forecast"] = (
            predicted[UNIT]["memory"]["device"] / predicted[PUBLIC]["memory"]["device"]
        )
    if logs:
        losses = {training: last_validation(log)["loss"] for training, log in logs.items()}
        least = EPSILONS[0]
        found["bf16"] = losses[Training(least, "bf16")] / losses[Training(least)]
        found["private"] = [losses[Training(e)] / losses[Training(0)] for e in EPSILONS]
    if curves.losses:
        found["private"] = list(curves.ratios(curves.plan.sizes[-1]).values())
    return found


CLAIMS = (
    Claim(
        "P1",
        "GPT-100B on 128 GPUs",
        ("forecast",),
        lambda ratio: f"forecast: {ratio:.3f} of the memory",
    ),
    # A single shape is good to some percent: the medians of the shapes. 0.93 was found for short
    # sequences.
    Claim(
        "P2",
        "speed 0.945 to 0.96",
        ("speed",),
        lambda speed: f"unit {speed[UNIT]:.3f}, flat {speed[FLAT]:.3f} (medians)",
        met=lambda speed: min(speed.values()) >= 0.945,
        partly=lambda speed: max(speed.values()) >= 0.93,
    ),
    Claim(
        "P3",
        "equal bytes",
        ("traffic",),
        lambda equal: f"equal in {sum(equal)} of {len(equal)} pairs",
        met=all,
    ),
    # The same samples and noise in both.
    Claim(
        "P4",
        "bf16 loss as fp32's",
        ("bf16",),
        lambda ratio: f"{percent(ratio, 2)} at epsilon {EPSILONS[0]}",
        met=lambda ratio: abs(ratio - 1) <= 0.005,
        partly=lambda ratio: abs(ratio - 1) <= 0.02,
    ),
    Claim(
        "P6",
        "memory 1.0 to 1.3",
        ("memory",),
        lambda ratios: span(ratios, "{:.3f}"),
        met=lambda ratios: max(ratios) <= 1.3,
        partly=lambda ratios: min(ratios) <= 1.3,
    ),
    # Of large models.
    Claim(
        "P8",
        "large models come close",
        ("private",),
        lambda ratios: f"loss {', '.join(map(percent, ratios))}, small model",
    ),
)


def report(measured, predicted, logs, curves, options):
    """The tables and measurements; writes the rows and the pictures."""
    plan = measured.plan
    text = f"{plan.note}\n\n" if plan.note else ""
    lines, tables = [], ""
    if measured.places("grid"):
        lines += grid_lines(measured) + size_lines(measured)
        tables += grid_table(measured) + size_table(measured)
    if measured.places("stages"):
        lines += stages_lines(measured)
        tables += stages_table(measured)
    if predicted:
        lines += wide_lines(measured, predicted)
        tables += wide_table(measured) + cluster_table(predicted)
    if logs:
        lines += text_lines(plan, logs)
        tables += text_table(plan, logs)
    if curves.losses:
        lines.append(curves_line(curves))
        tables += dpzero_curves.result_table(curves) + dpzero_curves.tuning_table(curves)
    text += markdown(["what", "paper", "ours", "why they differ"], lines) + tables
    if measured.rows:
        write_rows(measured.rows, options.into / "rows.csv")
    pyplot = pyplot_or_none(NAME)
    if pyplot and any(row.part != "stages" for row in measured.rows):
        draw_speed(pyplot, measured, options.into / "speed.png")
    if pyplot and logs:
        draw_text(pyplot, logs, options.into / "text.png")
    if pyplot and curves.losses:
        dpzero_curves.draw(pyplot, curves, options.into / "curves.png")
    return text, measurements(measured, predicted, logs, curves)


def write_rows(rows, path):
    names = [field.name for field in fields(Row) if field.name != "traffic"]
    with open(path, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        kinds = list(rows[0].traffic)
        table.writerow([*names, *kinds])
        for row in rows:
            table.writerow(
                [*(getattr(row, name) for name in names), *(row.traffic[kind] for kind in kinds)]
            )


def draw_bars(axes, labels, values, title, ylabel):
    """values: name -> one number for each label, None where there is none."""
    names = [name for name in values if any(value is not None for value in values[name])]
    for at, name in enumerate(names):
        places = [i + (at - (len(names) - 1) / 2) * 0.8 / len(names) for i in range(len(labels))]
        shown = [(place, value) for place, value in zip(places, values[name]) if value is not None]
        axes.bar(
            [place for place, _ in shown],
            [value for _, value in shown],
            width=0.8 / len(names),
            label=name,
        )
    axes.set(title=title, ylabel=ylabel)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlim(-1, len(labels))
    axes.grid(alpha=0.3, axis="y")


def draw_speed(pyplot, measured, path):
    """Private over non-private: by ranks and stage, by size, by width; speed above, memory
    below."""
    titles = {
        "grid": "ranks / ZeRO stage",
        "size": "one rank, by size",
        "wide": "one block, by width",
    }
    parts = [part for part in titles if measured.places(part)]
    figure, panels = pyplot.subplots(
        2, len(parts), figsize=(6 * len(parts), 8), layout="constrained", squeeze=False
    )
    for part, (above, below) in zip(parts, panels.T):
        places = measured.places(part)
        labels = [f"{place[2]} / {place[3]}" if part == "grid" else place[1] for place in places]
        names = styles(measured, places)
        speeds = {
            name: [(measured.speed(place, name) or (None,))[0] for place in places]
            for name in names
        }
        draw_bars(above, labels, speeds, titles[part], "private / non-private speed")
        draw_bars(
            below,
            labels,
            {name: [measured.memory(place, name) for place in places] for name in names},
            "",
            "private / non-private memory",
        )
        if part == "wide":
            above.plot(
                range(len(labels)),
                [WIDTHS[label].paper for label in labels],
                marker="_",
                markersize=30,
                color="black",
                linestyle="none",
                label="paper, whole model",
            )
        else:
            above.axhspan(0.92, 0.96, color="black", alpha=0.12, label="paper, 16 to 128 GPUs")
        below.axhspan(1.0, 1.3, color="black", alpha=0.12, label="paper")
        for axes in (above, below):
            axes.set_ylim(bottom=0.5)
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.06), "frameon": False}
            axes.legend(fontsize=8, ncols=4, markerscale=0.4, **place)
    figure.savefig(path, dpi=150)
    print(path)


def draw_text(pyplot, logs, path):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    for training, log in logs.items():
        found = validations(log)
        steps = sorted(found)
        left.plot(
            steps,
            [found[step]["loss"] for step in steps],
            marker="o",
            markersize=4,
            label=str(training),
        )
    left.set(xlabel="step", ylabel="validation loss (nats/token)")
    right.plot(
        EPSILONS,
        [last_validation(logs[Training(epsilon)])["loss"] for epsilon in EPSILONS],
        marker="o",
        color="black",
        label="private",
    )
    public = last_validation(logs[Training(0)])["loss"]
    right.axhline(public, color="black", linestyle="--", label=PUBLIC)
    right.set(xscale="log", xlabel="epsilon", ylabel="validation loss at the end")
    right.set_xticks(EPSILONS, map(str, EPSILONS))
    right.minorticks_off()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    print(path)


# --------------------------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="reproduce_dpzero.sh --quick | --full [option ...]",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", dest="plan", action="store_const", const="quick")
    size.add_argument("--full", dest="plan", action="store_const", const="full")
    parser.add_argument(
        "--part",
        choices=("steps", "stages", "wide", "text", "curves"),
        action="append",
        help="only this; default: all but curves",
    )
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--program", default="./train_gpt", metavar="FILE")
    options = parser.parse_args()
    options.into = options.into or Path("out") / f"dpzero_{options.plan}"
    options.part = options.part or ["steps", "stages", "wide", "text"]
    if not shutil.which(options.program):
        parser.error(f"{options.program} is not there: run make first")
    if {"text", "curves"} & set(options.part) and not all(
        glob.glob(f"{DATA}_{name}_*.bin") for name in ("train", "val")
    ):
        parser.error(f"{DATA}_* is not there: run make data first")
    return options


def reproduce(options):
    plan, runner = PLANS[options.plan], Runner()
    measured, predicted, logs = Measurements(plan, runner, options), {}, {}
    curves = dpzero_curves.Curves(dpzero_curves.PLANS[options.plan], runner, options)
    planned = {**measured.planned(), "curves": curves.planned()}
    runner.progress.plan(*(planned[part] for part in options.part))
    if "steps" in options.part:
        measured.measure_steps()
    if "stages" in options.part:
        measured.measure_stages()
    if "wide" in options.part:
        measured.measure_widths()
        predicted = predict_100b(runner, options)
    if "text" in options.part:
        logs = train_all(plan, runner, options)
    if "curves" in options.part:
        curves.make()
    return report(measured, predicted, logs, curves, options)


def main():
    options = arguments()
    return run_claims(NAME, options.into, CLAIMS, lambda: reproduce(options))


if __name__ == "__main__":
    sys.exit(main())
