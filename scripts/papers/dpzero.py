"""dpzero.py: what private training (DP-ZeRO, arXiv 2311.11822) costs in time, memory and traffic,
and in loss.

    scripts/reproduce_dpzero.sh --quick | --full [--part steps|stages|wide|text|curves]
    [--into FOLDER] [--program FILE]

steps   whole steps, private against non-private: at ZeRO stages 0 to 3 on 1, 2 (and 4) ranks, and
        of several sizes on one rank. The sizes are GPT-2's: one whole, of the others two blocks
        with their share of the vocabulary.
stages  a pipeline of as many stages as ranks, private and not, beside ZeRO on as many ranks: the
        same samples a step. On an emulated cluster (cluster.sh: a slow network, an equal share of
        the cores for each rank), where this machine can have one.
wide    one block as wide as those of 7B, 13B, 26B and 100B models, forward and backward, without
        optimizer (the times of these actions, from --profile-steps); and what --dry-run says of
        gpt:100B on 64 x 8 GPUs.
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
hours. FOLDER also gets rows.csv; the pictures are speed.png, text.png, curves.png. A width whose
block does not fit into this machine is left out, and named.
"""

import re
import statistics
import sys
from dataclasses import dataclass

import experiment
from experiment import (
    COUNTED, EXIT_RESOURCES, FORECAST, MIB, SEEDS, TIMED, Claim, Failed, Paper, cluster, cores,
    data_flags, events, first_object, last, listed, local_ranks, markdown, no_cluster,
    percent, plans, random_shard, span, spread, timed_steps, turns, words, write_rows,
)
from papers import dpzero_curves

WARMUP = 1  # steps that are not looked at
POISSON = 16  # the data set is so many times the batch

PUBLIC, UNIT, FLAT, STAGE, SAMPLED = "non-private", "unit", "flat", "stage", "unit, Poisson"
PRIVATE = "--dp-noise 1 --dp-delta 1e-5 --dp-show-private --dp-clip-style"
FLAGS = {
    PUBLIC: "",
    UNIT: f"{PRIVATE} unit",
    FLAT: f"{PRIVATE} flat",
    STAGE: f"{PRIVATE} stage",
    SAMPLED: f"{PRIVATE} unit",
}
# Ranks -> the cluster they are on, and 10 units in balanced stages: the head and the embedding
# count little here.
CLUSTERS = {2: "2x1 --rate 400mbit", 4: "2x2 --rate 400mbit"}
SPLITS = {2: "5:1,5:1", 4: "3:1,2:1,2:1,3:1"}
ZERO1, PIPELINE = "ZeRO 1", "pipeline"
PIPELINE_RANKS = 2, 4
LAYOUTS = {  # stage of ZeRO, variants
    ZERO1: (1, (PUBLIC, UNIT, FLAT)),
    "ZeRO 3": (3, (PUBLIC, UNIT, FLAT)),
    PIPELINE: (0, (PUBLIC, UNIT, STAGE, FLAT)),
}
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
# GPT2, medium, large at 100 tokens, one A100
BOOK_KEEPING = "124M 0.80, 350M 0.80, 774M 0.87"
# NVIDIA's A100 in nodes of 8 with 400 Gbit/s, half of its peak for products.
CLUSTER_RUN = (
    "--dry-run --json --model gpt:100B --cluster 64x8,intra=300,inter=50,tflops=156,memory=1555"
    " --zero 3 --dtype bf16 --reduce-dtype fp32 --recompute block --seq-len 2048 --micro-batch 1"
    f" --batch-tokens {2 * 512 * 2048}"
)


PLANS = plans(
    grid=(Shape("grid", 4, 4, 256, 256, 128, 4, 2), Shape("grid", 6, 6, 384, 256, 256, 4, 2)),
    ranks=({1: (0,), 2: (0, 1, 2, 3)}, dict.fromkeys((1, 2, 4), (0, 1, 2, 3))),  # ranks -> stages
    pipelined=(  # of 8 blocks
        Shape("stages", 8, 4, 128, 256, 128, 2, 2),
        Shape("stages", 8, 4, 256, 256, 128, 2, 4),
    ),
    layouts=((ZERO1, PIPELINE), tuple(LAYOUTS)),
    sizes=(
        (blocks_of("124M", 12, 12, 768, 256, 4, 2), blocks_of("1558M", 48, 25, 1600, 256, 4, 1)),
        (Shape("6 x 384", 6, 6, 384, 50257, 256, 12, 1),
         Shape("124M", 12, 12, 768, 50257, 1024, 2, 2),
         blocks_of("350M", 24, 16, 1024, 1024, 2, 2),
         blocks_of("774M", 36, 20, 1280, 1024, 2, 2),
         blocks_of("1558M", 48, 25, 1600, 1024, 2, 2)),
    ),
    size_styles=((PUBLIC, UNIT, FLAT), (PUBLIC, UNIT, FLAT, SAMPLED)),
    steps=(WARMUP + 2, WARMUP + 3),
    rounds=(1, 3),
    widths=(("7B",), tuple(WIDTHS)),
    wide_styles=((PUBLIC, UNIT), (PUBLIC, UNIT, FLAT)),
    wide_tokens=(256, 1024),
    wide_rounds=(1, 2),
    training=(  # flags of a run on text
        "--model layers=2,heads=4,channels=128,vocab=256 --seq-len 64 --micro-batch 16"
        " --batch-tokens 8192 --lr 3e-3 --warmup 10 --val-batches 8",
        "--model layers=4,heads=4,channels=128,vocab=256 --seq-len 64 --micro-batch 32"
        " --batch-tokens 32768 --lr 3e-3 --warmup 50 --val-batches 16",
    ),
    training_steps=(100, 500),
    note=("--quick: small models, few steps, one round. --full is the measurement.", ""),
)
TRAINING = "--final-lr-fraction 0.1 --beta2 0.99 --weight-decay 0.1"


# --------------------------------------------------------------------------------------------------
# Runs


def shard(into, vocab, windows, T):
    """A data set of so many windows."""
    path = into / "data" / f"{vocab}_{windows}x{T}.bin"
    if not path.exists():
        random_shard(path, vocab, windows * T + 1)
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


def speed_limit(output):
    """What the line `clipping` of a private run leaves of the speed."""
    found = re.search(r"^clipping .* leaves ([\d.]+) %", output.read_text(errors="replace"), re.M)
    return float(found[1]) / 100 if found else 1.0


def sample_ms(steps, T):
    """Milliseconds for a sample, and how many samples these steps took. Steps of equally many: that
    of the median step."""
    samples = [round(step["tokens_per_s"] * step["ms"] / 1000 / T) for step in steps]
    if min(samples) == max(samples):
        return statistics.median(step["ms"] for step in steps) / samples[0], sum(samples)
    return sum(step["ms"] for step in steps) / sum(samples), sum(samples)


def block_ms(profile, samples):
    """Milliseconds of a sample's way through the blocks and back, from the profile."""
    kinds = {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "CLIP"}
    ms = sum(
        action["ms"]
        for action in profile["actions"]
        if action["action"] in kinds and action["unit"] == "block"
    )
    return ms / samples, samples * profile["steps"]


def read_row(log, place, variant, number, T, samples):
    """samples: of a step, for a block's times; else None."""
    if samples:
        ms, counted = block_ms(last(log, "profile"), samples)
    else:
        ms, counted = sample_ms(timed_steps(log, WARMUP), T)
    end = last(log, "end")
    memory, traffic = end["memory"]["measured"], end["traffic"]["measured"]
    return Row(
        *place, variant, number, ms, counted, memory["device"], memory["host"],
        sum(traffic["total"].values()),
        {f"{link} {kind}": n for link in ("intra", "inter") for kind, n in traffic[link].items()},
        speed_limit(log.parent / "output.txt"),
    )


class Bench(experiment.Bench):
    """Rows: has the ones that exist, runs the ones that do not."""

    def __init__(self, options, plans):
        super().__init__(options, plans)
        self.rows = []

    def command(self, shape, ranks, stage, variant, more="", launcher=None):
        samples = ranks * shape.rows * shape.micro_steps
        windows = samples * (POISSON if variant == SAMPLED else 1)
        return words(launcher or local_ranks(ranks), self.program, "--train",
                     shard(self.into, shape.vocab, windows, shape.T), "--val-every 0",
                     f"--model {shape.model()} --seq-len {shape.T} --micro-batch {shape.rows}",
                     f"--batch-tokens {samples * shape.T} --zero {stage}",
                     f"--threads {max(1, cores() // ranks)} {more} {FLAGS[variant]}")

    def measure(self, place, variant, number, command, T, samples=None):
        part, name, ranks, stage = place

        def say(log):
            row = read_row(log, place, variant, number, T, samples)
            self.rows.append(row)
            return (
                f": {row.ms:.2f} ms a sample ({row.samples}), {row.device / MIB:.1f} MiB,"
                f" {row.sent} bytes sent"
            )

        folder = f"{part}-{name}-{ranks}-{stage}-{variant}-{number}"
        self.run(folder.replace(" ", "").replace(",", ""), command, group=part, say=say)

    def rounds(self, place, shape, variants, count, more, block=False, launcher=None):
        for number, variant in turns(count, variants):
            command = self.command(shape, *place[2:], variant, more, launcher=launcher)
            self.measure(place, variant, number, command, shape.T, shape.rows if block else None)

    def of(self, place, variant):
        """Round -> row."""
        return {
            row.round: row for row in self.rows if row.place() == place and row.variant == variant
        }

    def places(self, part):
        return list(dict.fromkeys(row.place() for row in self.rows if row.part == part))

    def styles(self, places):
        """The private variants that were measured in any of these places."""
        return [
            variant
            for variant in FLAGS
            if variant != PUBLIC and any(self.of(place, variant) for place in places)
        ]

    def ratios(self, place, variant, value, base=None):
        """Of a value of the private run over that of the non-private one, by round. base: of
        another (place, variant)."""
        base, ours = self.of(*(base or (place, PUBLIC))), self.of(place, variant)
        return [
            value(ours[number]) / value(base[number]) for number in sorted(ours) if number in base
        ]

    def speed(self, place, variant, base=None):
        """Private over non-private throughput: the Spread over the rounds; None where it was not
        measured."""
        found = self.ratios(place, variant, lambda row: row.ms, base)
        return spread(1 / ratio for ratio in found) if found else None

    def speeds(self, places, variant):
        """place -> median."""
        found = {place: self.speed(place, variant) for place in places}
        return {place: speed.median for place, speed in found.items() if speed}

    def memory(self, place, variant):
        found = self.ratios(place, variant, lambda row: row.device)
        return statistics.median(found) if found else None

    def over_zero(self, place, variant):
        """The speed over private ZeRO-1 in style unit on as many ranks."""
        return self.speed(place, variant, ((("stages", ZERO1, place[2], 1)), UNIT)).median

    def median(self, place, variant, value):
        return statistics.median(map(value, self.of(place, variant).values()))

    def base_ms(self, place):
        return self.median(place, PUBLIC, lambda row: row.ms)

    def limit(self, place, variant):
        return self.median(place, variant, lambda row: row.limit)

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


def spread_text(found):
    return found.text() if found else ""


def range_text(values):
    values = [value for value in values if value is not None]
    return f"{min(values):.3f} to {max(values):.3f}" if values else "not measured"


# --------------------------------------------------------------------------------------------------
# Steps


def steps(bench):
    plan, more = bench.plan, f"--steps {bench.plan.steps}"
    for ranks, stages_of_zero in plan.ranks.items():
        for stage in stages_of_zero:
            place = "grid", plan.grid.name, ranks, stage
            bench.rounds(place, plan.grid, (PUBLIC, UNIT, FLAT), plan.rounds, more)
    for shape in plan.sizes:
        bench.rounds(("size", shape.name, 1, 0), shape, plan.size_styles, plan.rounds, more)
    places = bench.places("grid") + bench.places("size")
    medians = {
        style: statistics.median(bench.speeds(places, style).values()) for style in (UNIT, FLAT)
    }
    bench.tell("speed", medians, plan.rounds)
    bench.tell("memory", [bench.memory(place, style) for place in places for style in (UNIT, FLAT)])
    bench.tell("traffic", [a.traffic == b.traffic for a, b in bench.pairs()])
    return grid_table(bench) + size_table(bench), grid_lines(bench) + size_lines(bench)


def grid_lines(bench):
    places = bench.places("grid")
    equal = [a.traffic == b.traffic for a, b in bench.pairs()]
    ranks = ", ".join(map(str, sorted({place[2] for place in places})))

    def by_style(values):
        return listed(f"{style}: {range_text(values(style))}" for style in (UNIT, FLAT))

    return [
        [f"speed, private over non-private, ZeRO 0 to 3 on {ranks} ranks",
         "0.93 to 0.96 (16 to 128 GPUs, largest batch); 0.92 (128, same batch)",
         by_style(lambda style: bench.speeds(places, style).values()),
         "a small model on this machine's cores, which the ranks share"],
        ["memory, private over non-private (goal 1.05)", "1.0 to 1.3",
         by_style(lambda style: [bench.memory(place, style) for place in places]),
         "no gradient of a sample is kept longer than its unit is at work"],
        ["traffic, private and non-private", "equal",
         f"equal in {sum(equal)} of {len(equal)} pairs, by link and kind of message, byte for"
         " byte",
         "messages of fp32 in both"],
    ]


def size_lines(bench):
    places = bench.places("size")

    def told(style, value=lambda place, speed: speed):
        return listed(
            f"{place[1]}: {value(place, speed):.3f}"
            for place, speed in bench.speeds(places, style).items()
        )

    lines = [
        ["speed by size (goal 0.95; 0.93 at T <= 256)",
         f"book-keeping: {BOOK_KEEPING} (100 tokens)", told(UNIT),
         "style unit; a sample's gradient is made once, measured, and added"],
        ["style flat, speed over what the norms' arithmetic leaves (goal 0.95)",
         "flat at stages 2 and 3: not offered",
         told(FLAT, lambda place, speed: speed / bench.limit(place, FLAT)),
         "the limit counts multiplications alone; norms also read"],
        ["the same as sampled by Poisson's rule", "accounts for it, but shuffles", told(SAMPLED),
         "a step's last micro-step is seldom full"],
    ]
    return lines if bench.speeds(places, SAMPLED) else lines[:-1]


def grid_table(bench):
    """Ranks and stages against styles."""
    shape, lines = bench.plan.grid, []
    for place in bench.places("grid"):
        sent = sorted({row.sent for row, _ in bench.pairs() if row.place() == place})
        lines.append([str(place[2]), str(place[3]), f"{bench.base_ms(place):.2f}",
                      *(spread_text(bench.speed(place, variant)) for variant in (UNIT, FLAT)),
                      *(f"{bench.memory(place, variant):.3f}" for variant in (UNIT, FLAT)),
                      ", ".join(f"{n / 1e6:.6f}" for n in sent)])
    header = ["ranks", "ZeRO", "non-private, ms a sample", "speed, unit", "flat", "memory, unit"]
    return (
        f"{shape.model()}, {shape.T} tokens, micro-batch {shape.rows}, {shape.micro_steps}"
        " micro-steps\n\n" + markdown([*header, "flat", "MB sent, private"], lines)
    )


def size_table(bench):
    lines, places = [], bench.places("size")
    names, shapes = bench.styles(places), {shape.name: shape for shape in bench.plan.sizes}
    for place in places:
        shape = shapes[place[1]]
        lines.append([f"{shape.name}: {shape.layers} blocks of {shape.channels}, vocabulary"
                      f" {shape.vocab}, T = {shape.T}, {shape.rows * shape.micro_steps} samples",
                      f"{bench.base_ms(place):.1f}",
                      *(spread_text(bench.speed(place, name)) for name in names),
                      f"{bench.limit(place, FLAT):.3f}",
                      *(f"{bench.memory(place, name):.3f}" for name in names)])
    columns = [*(f"speed, {name}" for name in names), "flat's limit"]
    columns += [f"memory, {name}" for name in names]
    return "one rank\n\n" + markdown(["size", "non-private, ms a sample", *columns], lines)


# --------------------------------------------------------------------------------------------------
# Pipelines beside ZeRO


def stages(bench):
    """All layouts of as many ranks in turn: rounds of one are compared with those of another."""
    plan, shape, missing = bench.plan, bench.plan.pipelined, no_cluster()
    for ranks in PIPELINE_RANKS:
        quota = min(100, 100 * cores() // ranks)
        launcher = None if missing else cluster(CLUSTERS[ranks], "--cpu", quota)
        for name in plan.layouts:
            stage, variants = LAYOUTS[name]
            more = f"--steps {plan.steps}"
            more += f" --pipeline {SPLITS[ranks]}" if name == PIPELINE else ""
            place = "stages", name, ranks, stage
            bench.rounds(place, shape, variants, plan.rounds, more, launcher=launcher)
    return stages_table(bench, missing), stages_lines(bench)


def stages_lines(bench):
    places = [place for place in bench.places("stages") if place[1] == PIPELINE]

    def told(value):
        return listed(
            f"{variant}: "
            + ", ".join(f"{place[2]} ranks: {value(place, variant):.2f}" for place in places)
            for variant in (UNIT, STAGE, FLAT)
        )

    return [
        ["speed, private pipeline over private ZeRO-1 (unit), equal ranks", "",
         told(bench.over_zero), "the same samples a step; a slow network, or none: see the table"],
        ["speed, private over non-private, the same pipeline", "",
         told(lambda place, variant: bench.speed(place, variant).median),
         "flat clipping waits for one more way to the first stage and back, and keeps"
         " activations meanwhile"],
    ]


def stages_table(bench, missing):
    lines, shape = [], bench.plan.pipelined
    for place in bench.places("stages"):
        split = f", {SPLITS[place[2]]}" if place[1] == PIPELINE else ""
        for variant in LAYOUTS[place[1]][1]:
            private = "" if variant == PUBLIC else spread_text(bench.speed(place, variant))
            lines.append([str(place[2]), place[1] + split, variant,
                          f"{bench.median(place, variant, lambda row: row.ms):.2f}", private,
                          f"{bench.over_zero(place, variant):.3f}",
                          f"{bench.median(place, variant, lambda row: row.device) / MIB:.1f}",
                          f"{bench.median(place, variant, lambda row: row.sent) / 1e6:.3f}"])
    where = ", ".join(CLUSTERS[ranks] for ranks in PIPELINE_RANKS)
    where += ", an equal share of the cores each"
    if missing:
        where = f"no emulated cluster here ({missing}): ranks share cores and memory"
    header = ["ranks", "layout", "clipping", "ms a sample", "speed over non-private"]
    return (
        f"{shape.model()}, {shape.T} tokens, {shape.rows * shape.micro_steps} samples a rank and"
        f" step, micro-batches of {shape.rows}; {where}\n\n"
        + markdown([*header, "over private ZeRO 1", "MiB, rank 0", "MB sent, rank 0"], lines)
    )


# --------------------------------------------------------------------------------------------------
# Wide blocks, and a forecast


def measure_widths(bench):
    """A block alone, one sample at a time. Stochastic gradient descent without a step takes least
    memory beside it. Returns the widths that do not fit."""
    plan, end, left_out = bench.plan, WARMUP + 2, []
    more = f"--optimizer sgd --momentum 0 --lr 0 --steps {end} --profile-steps {WARMUP + 1}:{end}"
    for width in (WIDTHS[name] for name in plan.widths):
        shape = Shape(width.name, 1, width.heads, width.channels, 256, plan.wide_tokens, 1, 1)
        place = "wide", width.name, 1, 0
        try:
            bench.rounds(place, shape, plan.wide_styles, plan.wide_rounds, more, block=True)
        except Failed as error:
            if error.of_run != EXIT_RESOURCES:
                raise
            left_out.append(width.name)
            print(f"{PAPER.script}: {width.name} is left out: {error}", file=sys.stderr)
    return left_out


def forecast_100b(bench):
    """Variant -> what --dry-run predicts of a rank."""
    found = {}
    for variant in (PUBLIC, UNIT):
        flags = FLAGS[variant] and "--dp-noise 1 --dp-delta 1e-8 --dp-clip-style unit"
        name = f"cluster-{variant}"
        bench.run(name, bench.program, CLUSTER_RUN, flags, group="forecast")
        found[variant] = first_object((bench.into / name / "output.txt").read_text())["predicted"]
    return found


def gigabytes(n):
    return f"{n / 1e9:.3f} GB"


def wide(bench):
    left_out, predicted = measure_widths(bench), forecast_100b(bench)
    a, b = predicted[PUBLIC], predicted[UNIT]
    ratio = b["memory"]["device"] / a["memory"]["device"]
    bench.tell("forecast", ratio)
    speeds = bench.speeds(bench.places("wide"), UNIT)
    told = listed(f"{place[1]}: {speed:.3f}" for place, speed in speeds.items())
    told += "".join(f"; {name}: too little memory here" for name in left_out)
    return wide_table(bench) + cluster_table(predicted), [
        ["speed at the widths of 7B, 13B, 26B, 100B",
         ", ".join(f"{width.paper:g}" for width in WIDTHS.values()), told,
         f"one block of the width, {bench.plan.wide_tokens} tokens, style unit, without"
         " optimizer and messages"],
        ["GPT-100B on 512 GPUs", "trained",
         f"forecast of a rank: {gigabytes(a['memory']['device'])}, private"
         f" {gigabytes(b['memory']['device'])} ({ratio:.3f}); traffic"
         f" {'equal' if a['traffic'] == b['traffic'] else 'DIFFERS'}",
         "80 blocks of 10240, our geometry; a forecast"],
    ]


def wide_table(bench):
    lines, places = [], bench.places("wide")
    names = bench.styles(places)
    for place in places:
        width = WIDTHS[place[1]]
        lines.append([width.name, f"{width.blocks} of {width.channels}, {width.heads} heads",
                      f"{12 * width.channels**2 / 1e6:.0f} M", f"{bench.base_ms(place):.0f}",
                      *(spread_text(bench.speed(place, name)) for name in names),
                      *(f"{bench.limit(place, name):.3f}" for name in names), f"{width.paper:g}"])
    columns = [*(f"speed, {name}" for name in names), *(f"limit, {name}" for name in names)]
    return f"one block, forward and backward, {bench.plan.wide_tokens} tokens\n\n" + markdown(
        ["width of", "blocks", "parameters of one", "non-private, ms", *columns, "paper"], lines
    )


def cluster_table(predicted):
    kinds = [kind for kind in predicted[PUBLIC]["memory"] if kind != "host"]

    def cells(p):
        sent = (p["traffic"]["total"][link] for link in ("intra", "inter"))
        return [*(p["memory"][kind] for kind in kinds), *sent, p["step_ms"]]

    found = {variant: cells(p) for variant, p in predicted.items()}
    rows = [
        [variant, *map(gigabytes, values[:-1]), f"{values[-1]:.0f}"]
        for variant, values in found.items()
    ]
    rows.append(["ratio", *(f"{a / b:.3f}" for a, b in zip(found[UNIT], found[PUBLIC]))])
    header = ["forecast", *kinds, "sent inside a node, a step", "between nodes", "ms a step"]
    return f"`./train_gpt {CLUSTER_RUN}`: a rank\n\n" + markdown(header, rows)


# --------------------------------------------------------------------------------------------------
# Text


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


def train(bench, training):
    """The validations of a run on text, by step, and its number of ranks."""
    plan, ranks = bench.plan, min(2, cores())
    private = f"--dp-epsilon {training.epsilon} --dp-key {KEY}" if training.epsilon else ""
    log = bench.run(
        f"text-{str(training).replace(', ', '-').replace(' ', '')}",
        local_ranks(ranks), bench.program, f"--threads {max(1, cores() // ranks)}",
        data_flags(), plan.training, TRAINING, f"--steps {plan.training_steps}",
        f"--val-every {plan.training_steps // 10} --dtype {training.dtype} {private}", group="text",
        say=lambda log: f": validation loss {last(log, 'val')['loss']:.4f}",
    )
    return {event["step"]: event for event in events(log, "val")}, last(log, "start")["ranks"]


def text(bench):
    plan, found = bench.plan, {training: train(bench, training) for training in TRAININGS}
    losses = {training: vals[max(vals)]["loss"] for training, (vals, _) in found.items()}
    public, least = losses[Training(0)], EPSILONS[0]
    ratios = {epsilon: losses[Training(epsilon)] / public for epsilon in EPSILONS}
    rounded = {e: losses[Training(e, "bf16")] / losses[Training(e)] for e in (0, least)}
    bench.tell("bf16", rounded[least])
    if "private" not in bench.found:  # curves are of more seeds
        bench.tell("private", list(ratios.values()))
    bench.draw("text", lambda axes: paint_text(found, losses, axes), columns=2)
    private = ", ".join(
        f"epsilon {epsilon}: {losses[Training(epsilon)]:.4f} ({percent(ratio)})"
        for epsilon, ratio in ratios.items()
    )
    return text_table(plan, found), [
        [f"validation loss after {plan.training_steps} steps",
         "large models come close to non-private ones", f"{private}; non-private: {public:.4f}",
         "a small model, little text, few steps, one seed; the less noise, the lower"],
        ["the same in bf16, against fp32", "as fp32",
         ", ".join(f"{Training(epsilon)}: {percent(r)}" for epsilon, r in rounded.items()),
         "same samples and noise"],
    ]


def text_table(plan, found):
    vals, _ = found[Training(0)]
    shown = sorted(vals)[1:-1:3]
    lines = []
    for training, (vals, ranks) in found.items():
        end = vals[max(vals)]
        spent = end.get("epsilon")
        lines.append([str(training), "" if spent is None else f"{spent:.4f}",
                      *(f"{vals[step]['loss']:.4f}" for step in shown), f"{end['loss']:.4f}",
                      f"{end['bits_per_byte']:.4f}", str(ranks)])
    header = ["run", "epsilon spent", *(f"loss at step {step}" for step in shown)]
    header += [f"at step {plan.training_steps}", "bits/byte", "ranks"]
    return f"`{plan.training} {TRAINING} --steps {plan.training_steps}`\n\n" + markdown(
        header, lines
    )


def paint_text(found, losses, axes):
    left, right = axes
    for training, (vals, _) in found.items():
        curve = [vals[step]["loss"] for step in sorted(vals)]
        left.plot(sorted(vals), curve, marker="o", markersize=4, label=str(training))
    left.set(xlabel="step", ylabel="validation loss (nats/token)")
    ends = [losses[Training(epsilon)] for epsilon in EPSILONS]
    right.plot(EPSILONS, ends, marker="o", color="black", label="private")
    right.axhline(losses[Training(0)], color="black", linestyle="--", label=PUBLIC)
    right.set(xscale="log", xlabel="epsilon", ylabel="validation loss at the end")
    right.set_xticks(EPSILONS, map(str, EPSILONS))
    right.minorticks_off()


# --------------------------------------------------------------------------------------------------
# The picture of all timed parts

TITLES = {"grid": "ranks / ZeRO stage", "size": "one rank, by size", "wide": "one block, by width"}


def draw_bars(axes, labels, values, **words_of_axes):
    """values: name -> for each label one (number, lowest, highest), or None where there is none."""
    names = [name for name in values if any(values[name])]
    for at, name in enumerate(names):
        shift = (at - (len(names) - 1) / 2) * 0.8 / len(names)
        shown = [(i + shift, value) for i, value in enumerate(values[name]) if value]
        axes.bar([place for place, _ in shown], [middle for _, (middle, _, _) in shown],
                 width=0.8 / len(names),
                 yerr=list(zip(*((m - low, high - m) for _, (m, low, high) in shown))), label=name)
    axes.set(**words_of_axes)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlim(-1, len(labels))


def paint_speed(bench, parts, panels):
    """Private over non-private: by ranks and stage, by size, by width; speed (with the spread of
    the rounds) above, memory below."""
    for part, (above, below) in zip(parts, panels.T):
        places = bench.places(part)
        names = bench.styles(places)
        labels = [f"{place[2]} / {place[3]}" if part == "grid" else place[1] for place in places]

        def speed(place, name):
            found = bench.speed(place, name)
            return found and (found.median, found.low, found.high)

        def memory(place, name):
            found = bench.memory(place, name)
            return found and (found,) * 3

        for axes, value, what in ((above, speed, "speed"), (below, memory, "memory")):
            values = {name: [value(place, name) for place in places] for name in names}
            title = TITLES[part] if axes is above else ""
            draw_bars(axes, labels, values, title=title, ylabel=f"private / non-private {what}")
        if part == "wide":
            papers = [WIDTHS[label].paper for label in labels]
            above.plot(papers, "k_", markersize=30, label="paper, whole model")
        else:
            above.axhspan(0.92, 0.96, color="black", alpha=0.12, label="paper, 16 to 128 GPUs")
        below.axhspan(1.0, 1.3, color="black", alpha=0.12, label="paper")
        for axes in (above, below):
            axes.set_ylim(bottom=0.5)
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.06), "frameon": False}
            axes.legend(fontsize=8, ncols=4, markerscale=0.4, **place)


def finish(bench):
    if not bench.rows:
        return
    write_rows(bench.into / "rows.csv", bench.rows, columns)
    parts = [part for part in TITLES if bench.places(part)]
    if parts:
        paint = lambda panels: paint_speed(bench, parts, panels)
        bench.draw("speed", paint, rows=2, columns=len(parts), size=(6, 4))


def columns(row):
    """The traffic of a row in columns of its own."""
    return {**{name: of for name, of in vars(row).items() if name != "traffic"}, **row.traffic}


# --------------------------------------------------------------------------------------------------
# The claims, and all of it: parts, each with what it will run at most

CLAIMS = (
    Claim("P1", "GPT-100B on 128 GPUs", ("forecast",), FORECAST,
          lambda ratio: f"forecast: {ratio:.3f} of the memory"),
    # A single shape is good to some percent: the medians of the shapes. 0.93 was found for short
    # sequences.
    Claim("P2", "speed 0.945 to 0.96", ("speed",), TIMED,
          lambda speed: f"unit {speed[UNIT]:.3f}, flat {speed[FLAT]:.3f} (medians)",
          met=lambda speed: min(speed.values()) >= 0.945,
          partly=lambda speed: max(speed.values()) >= 0.93),
    Claim("P3", "equal bytes", ("traffic",), COUNTED,
          lambda equal: f"equal in {sum(equal)} of {len(equal)} pairs",
          met=all),
    # The same samples and noise in both.
    Claim("P4", "bf16 loss as fp32's", ("bf16",), SEEDS,
          lambda ratio: f"{percent(ratio, 2)} at epsilon {EPSILONS[0]}",
          met=lambda ratio: abs(ratio - 1) <= 0.005,
          partly=lambda ratio: abs(ratio - 1) <= 0.02),
    Claim("P6", "memory 1.0 to 1.3", ("memory",), COUNTED,
          lambda ratios: span(ratios, "{:.3f}"),
          met=lambda ratios: max(ratios) <= 1.3,
          partly=lambda ratios: min(ratios) <= 1.3),
    # Of large models.
    Claim("P8", "large models come close", ("private",), SEEDS,
          lambda ratios: f"loss {', '.join(map(percent, ratios))}, small model"),
)


def steps_count(bench):
    plan = bench.plan
    return {
        "grid": 3 * plan.rounds * sum(map(len, plan.ranks.values())),
        "size": len(plan.sizes) * len(plan.size_styles) * plan.rounds,
    }


def stages_count(bench):
    variants = sum(len(LAYOUTS[name][1]) for name in bench.plan.layouts)
    return {"stages": len(PIPELINE_RANKS) * variants * bench.plan.rounds}


def wide_count(bench):
    plan = bench.plan
    return {"wide": len(plan.widths) * len(plan.wide_styles) * plan.wide_rounds, "forecast": 2}


PAPER = Paper(
    name="dpzero",
    doc=__doc__,
    plans=PLANS,
    parts={
        "steps": (steps, steps_count),
        "stages": (stages, stages_count),
        "wide": (wide, wide_count),
        "text": (text, lambda _: {"text": len(TRAININGS)}),
        "curves": (dpzero_curves.curves, lambda bench: dpzero_curves.Curves(bench).planned()),
    },
    claims=CLAIMS,
    default=("steps", "stages", "wide", "text"),
    reads_text=("text", "curves"),
    bench=Bench,
    finish=finish,
)
