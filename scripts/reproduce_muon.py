#!/usr/bin/env python3
"""reproduce_muon.py: Muon beside AdamW: steps, tokens and seconds to equal loss.

    scripts/reproduce_muon.sh --quick | --full [--part PART ...] [--jobs N] [--steps N]
    [--into FOLDER] [--program FILE]

tokens   AdamW trains a GPT-2 of bytes of Shakespeare (data/text_bytes_*, `make data`) to its final
         loss on the five held-out plays. Muon trains the same model, and nanochat's block, in fewer
         steps: in so many tenths of AdamW's, each run with a schedule that ends there. The smallest
         budget that reaches AdamW's loss, of the same seed, counts (linear between it and the next
         smaller tenth). All steps have as many tokens.
seconds  the same in seconds: ratios of step times, measured in turns, one run at a time on one
         thread, times the ratios of tokens.
Each method has its own best learning rate: the same number of settings for each (rates, times two
schedules of AdamW, or two rates of what Muon does not train), and a rate at an edge adds the next
one, to each method alike. Four works of the training plays choose: no tuning run trains on them,
and none looks at the five plays. Tuning has another seed; Muon is tuned with 0.6 of AdamW's steps,
and with 0.4 where the block is nanochat's.

--quick takes less than 3 minutes on 2 quiet cores: one size, one seed, with the settings that
--full has found; --full, two sizes and three seeds, about 20 minutes. --jobs: runs at once, each of
one thread (default: the number of cores). --steps replaces the number of AdamW's steps. FOLDER
(default: out/muon_quick or out/muon_full) gets a folder for each run, with log.jsonl and
output.txt, the tables as table.md, and losses.png. The same command goes on where it was stopped:
what is there is not run again.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results/models.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results/models.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import array
import concurrent.futures
import glob
import math
import statistics
import struct
import sys
from dataclasses import dataclass

import reproduce_cyclic
from reproduce import (
    EXIT_INPUT,
    RESULTS,
    TEXT,
    Claim,
    Failed,
    markdown,
    parts_options,
    parts_parser,
    reproduce_parts,
)
from reproduce_cyclic import STUDENT, cores, found_events, last_validation, step_ms

PAGE = RESULTS.parent / "results/models.md"
# Tokens of a sample and of a step: about what is best for AdamW with GPT-2's block, which learns
# less from the same text with samples of 256 tokens or with steps of 2048.
T, BATCH = 64, 1024
WARMUP = 0.05  # of the steps
MOST = 15  # the largest budget, in tenths of AdamW's steps
MOST_RATES = 8  # of a grid, with what its edges add
EXCERPT = 1 << 15  # bytes of each work that validates
SHARD = "<256i"  # header: magic number, version, tokens; then 2 bytes a token
TUNING_SEED = 1


@dataclass(frozen=True)
class Method:
    """What trains. others: name -> flags of the second thing that is tuned; tuned: tenths of
    AdamW's steps that it is tuned with; first: those that the search for equal loss begins with."""

    name: str
    block: str
    rate_flag: str
    flags: tuple
    others: dict
    tuned: int
    first: int

    def __str__(self):
        return self.name

    def __hash__(self):
        return hash(self.name)


LINEAR = ("--lr-schedule", "wsd-linear", "--lr-last-part", 0.5)
MUON = ("--optimizer", "muon", "--muon-weight-decay", 0.01, "--beta1", 0.8, *LINEAR)
REST = {f"rest {rate}": ("--lr", rate) for rate in ("3e-3", "1e-2")}
ADAMW = Method(
    "AdamW, GPT-2's block",
    "gpt2",
    "--lr",
    ("--optimizer", "adamw", "--weight-decay", 0.1, "--beta2", 0.99),
    {"cosine": ("--lr-schedule", "cosine"), "wsd-linear": LINEAR},
    10,
    10,
)
SAME = Method("Muon, GPT-2's block", "gpt2", "--muon-lr", MUON, REST, 6, 4)
NANO = Method("Muon, nano block", "nano", "--muon-lr", MUON, REST, 4, 3)
METHODS = ADAMW, SAME, NANO
RATES = {ADAMW: (1e-3, 2e-3, 4e-3, 8e-3), SAME: (0.01, 0.02, 0.04, 0.08)}
RATES[NANO] = RATES[SAME]


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in. sizes: name -> layers, heads and channels; settings:
    (size, method) -> (rate, other) that are known; those that are not are tuned."""

    steps: int
    sizes: dict
    seeds: tuple
    settings: dict
    timed_steps: int
    rounds: int


LARGE, SMALL = "4 layers of 128", "2 layers of 64"
SIZES = {LARGE: "layers=4,heads=4,channels=128", SMALL: "layers=2,heads=2,channels=64"}
PLANS = {
    "quick": Plan(
        steps=1200,
        sizes={SMALL: SIZES[SMALL]},
        seeds=(2,),
        settings={
            (SMALL, ADAMW): (8e-3, "wsd-linear"),
            (SMALL, SAME): (0.02, "rest 1e-2"),
            (SMALL, NANO): (0.02, "rest 1e-2"),
        },
        timed_steps=reproduce_cyclic.WARMUP + 60,
        rounds=2,
    ),
    "full": Plan(
        steps=1200,
        sizes=SIZES,
        seeds=(2, 3, 4),
        settings={},
        timed_steps=reproduce_cyclic.WARMUP + 60,
        rounds=5,
    ),
}


# --------------------------------------------------------------------------------------------------
# Data


def read_works(pattern):
    """Each begins with the token 0."""
    text = b""
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as file:
            header = file.read(struct.calcsize(SHARD))
            tokens = array.array("H", file.read())
        if len(header) < struct.calcsize(SHARD) or max(tokens, default=256) > 255:
            raise Failed(EXIT_INPUT, f"{path}: no shard of bytes: run make data again")
        text += bytes(tokens.tolist())
    return [b"\0" + work for work in text.split(b"\0")[1:]]


def write_shard(path, works):
    tokens = array.array("H", list(b"".join(works)))
    with open(path, "wb") as file:
        file.write(struct.pack(SHARD, 20240520, 1, len(tokens), *[0] * 253))
        tokens.tofile(file)


def write_data(folder):
    """What tunes: all training works but four, which validate. What counts: all of them, and the
    held-out plays. The beginning of each work validates."""
    works, plays = (read_works(f"{TEXT}_{part}_*.bin") for part in ("train", "val"))
    held = works[4::9]
    if not held or not plays:
        raise Failed(EXIT_INPUT, f"{TEXT}_*.bin: too few works: run make data again")
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("tuning_train", [work for at, work in enumerate(works) if at % 9 != 4]),
        ("tuning_val", [work[:EXCERPT] for work in held]),
        ("final_train", works),
        ("final_val", [work[:EXCERPT] for work in plays]),
    ):
        write_shard(folder / f"{name}.bin", part)


# --------------------------------------------------------------------------------------------------
# Runs


def final_loss(log):
    """Of a run that diverged: infinite."""
    loss = last_validation(log)["loss"]
    return float(loss) if loss is not None and math.isfinite(float(loss)) else math.inf


@dataclass(frozen=True)
class Job:
    size: str
    method: Method
    rate: float
    other: str
    seed: int
    tenths: int
    group: str  # tuning or final

    @property
    def name(self):
        words = f"{self.method} {self.rate:g} {self.other} {self.tenths} tenths seed {self.seed}"
        folder = f"{self.group} {self.size}"
        return "/".join(
            part.replace(",", "").replace("'", "").replace(" ", "_") for part in (folder, words)
        )


class Bench(reproduce_cyclic.Bench):
    def __init__(self, options):
        super().__init__(options, PLANS)
        self.steps = options.steps or self.plan.steps
        self.jobs = options.jobs or cores()

    def of(self, job):
        return max(1, round(self.steps * job.tenths / 10))

    def command(self, size, method, setting, data, steps, seed):
        """Of a run that validates at its end; of one that does not: data without validation."""
        rate, other = setting
        folder = self.options.into / "data"
        validates = data != "timed"
        data = data if validates else "final"
        return [
            self.options.program,
            "--train",
            folder / f"{data}_train.bin",
            "--val",
            folder / f"{data}_val.bin",
            "--model",
            f"arch={method.block},{self.plan.sizes[size]},vocab=256",
            *("--seq-len", T, "--micro-batch", BATCH // T, "--batch-tokens", BATCH),
            *("--threads", 1, "--steps", steps, "--warmup", round(WARMUP * self.steps)),
            *("--final-lr-fraction", 0, "--val-every", steps if validates else 0),
            *("--val-batches", -1, "--seed", seed),
            *method.flags,
            *method.others[other],
            *(method.rate_flag, f"{rate:g}"),
        ]

    def losses(self, jobs):
        """Job -> final loss; so many runs at a time as --jobs says."""
        pool = concurrent.futures.ThreadPoolExecutor(self.jobs)
        try:
            runs = {
                job: pool.submit(
                    self.run,
                    job.name,
                    self.command(
                        job.size,
                        job.method,
                        (job.rate, job.other),
                        job.group,
                        self.of(job),
                        job.seed,
                    ),
                )
                for job in jobs
            }
            return {job: final_loss(run.result()) for job, run in runs.items()}
        finally:
            pool.shutdown(cancel_futures=True)

    def cases(self):
        return [(size, method) for size in self.plan.sizes for method in METHODS]


# --------------------------------------------------------------------------------------------------
# Tuning


def edge(grid):
    """The rate that a grid (rate -> loss) lacks because its best one is at an edge, or None."""
    best, rates = min(grid, key=grid.get), sorted(grid)
    if len(rates) >= MOST_RATES:
        return None
    return best / 2 if best == rates[0] else best * 2 if best == rates[-1] else None


def tune(bench):
    """(size, method) -> (rate, other) -> loss. All grids begin with as many settings."""
    losses = {}
    wanted = [
        (case, rate, other)
        for case in bench.cases()
        if case not in bench.plan.settings
        for rate in RATES[case[1]]
        for other in case[1].others
    ]
    while wanted:
        jobs = {
            (case, rate, other): Job(*case, rate, other, TUNING_SEED, case[1].tuned, "tuning")
            for case, rate, other in wanted
        }
        found = bench.losses(jobs.values())
        for (case, rate, other), job in jobs.items():
            losses.setdefault(case, {})[rate, other] = found[job]
        wanted = []
        for case, grid in losses.items():
            other = min(grid, key=grid.get)[1]
            rate = edge({rate: loss for (rate, of), loss in grid.items() if of == other})
            wanted += [(case, rate, other)] if rate else []
    return losses


def settings(bench):
    bench.grids = tune(bench)
    return {
        **bench.plan.settings,
        **{case: min(grid, key=grid.get) for case, grid in bench.grids.items()},
    }


def tuning_table(bench):
    lines = [
        [
            size,
            str(method),
            other,
            ", ".join(
                f"{rate:g}: {loss:.4f}"
                for (rate, of), loss in sorted(grid.items(), key=lambda item: item[0][0])
                if of == other
            ),
            str(round(bench.steps * method.tuned / 10)),
        ]
        for (size, method), grid in bench.grids.items()
        for other in method.others
    ]
    header = ["size", "method", "with", "rate: loss on works of the training plays", "steps"]
    return markdown(header, lines) if lines else ""


# --------------------------------------------------------------------------------------------------
# Tokens to equal loss


def next_budget(losses, goal, first):
    """Of budgets in tenths -> loss: the next one to run, or None where the smallest that reaches
    the goal is known, or none does."""
    met = [tenths for tenths, loss in losses.items() if loss <= goal]
    if not losses:
        return first
    after = min(met) - 1 if met else max(losses) + 1
    return after if 1 <= after <= MOST and after not in losses else None


def equal_loss(losses, goal):
    """The part of AdamW's tokens to the goal: linear between the smallest budget that reaches it
    and the tenth below; infinite: none does."""
    met = [tenths for tenths, loss in losses.items() if loss <= goal]
    if not met:
        return math.inf
    low = min(met)
    above = losses.get(low - 1)
    if above is None or math.isinf(above):
        return low / 10
    return (low - 1 + (above - goal) / (above - losses[low])) / 10


def find_tokens(bench):
    """Runs everything; sets of the bench chosen (case -> setting), goals ((size, seed) -> AdamW's
    loss), budgets ((size, method, seed) -> tenths -> loss), ratios (case -> by seed)."""
    if hasattr(bench, "ratios"):
        return
    write_data(bench.options.into / "data")
    bench.chosen = settings(bench)
    seeds, sizes = bench.plan.seeds, bench.plan.sizes

    def job(size, method, seed, tenths):
        return Job(size, method, *bench.chosen[size, method], seed, tenths, "final")

    first = {(size, seed): job(size, ADAMW, seed, 10) for size in sizes for seed in seeds}
    found = bench.losses(first.values())
    bench.goals = {key: found[one] for key, one in first.items()}
    bench.budgets = {
        (size, method, seed): {} for size in sizes for method in (SAME, NANO) for seed in seeds
    }
    while True:
        wanted = {
            key: next_budget(losses, bench.goals[key[0], key[2]], key[1].first)
            for key, losses in bench.budgets.items()
        }
        jobs = {key: job(*key, tenths) for key, tenths in wanted.items() if tenths}
        if not jobs:
            break
        found = bench.losses(jobs.values())
        for key, one in jobs.items():
            bench.budgets[key][one.tenths] = found[one]
    bench.ratios = {
        (size, method): [
            equal_loss(bench.budgets[size, method, seed], bench.goals[size, seed])
            for seed in seeds
        ]
        for size in sizes
        for method in (SAME, NANO)
    }


def mean_and_doubt(values):
    """The mean with half of its 95 % interval (Student's t) over seeds."""
    mean = statistics.mean(values)
    if len(values) < 2 or math.isinf(mean):
        return f"{mean:.3f}"
    doubt = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} ± {doubt:.3f}"


def setting_text(setting):
    return f"{setting[0]:g}, {setting[1]}"


def budgets_text(losses):
    return ", ".join(f"{tenths / 10:g}: {losses[tenths]:.4f}" for tenths in sorted(losses))


def tokens_table(bench):
    runs = [
        [
            size,
            str(method),
            str(seed),
            f"{bench.goals[size, seed]:.4f}",
            budgets_text(losses),
            f"{equal_loss(losses, bench.goals[size, seed]):.3f}",
        ]
        for (size, method, seed), losses in bench.budgets.items()
    ]
    means = [
        [
            size,
            str(method),
            setting_text(bench.chosen[size, ADAMW]),
            setting_text(bench.chosen[size, method]),
            mean_and_doubt(ratios),
        ]
        for (size, method), ratios in bench.ratios.items()
    ]
    return markdown(
        ["size", "method", "seed", "AdamW's loss", "budget: loss", "tokens, of AdamW's"], runs
    ) + markdown(
        ["size", "method", "AdamW at", "at", f"tokens to the loss of AdamW, {bench.steps} steps"],
        means,
    )


def told(bench, ratios):
    return "; ".join(f"{size}: {mean_and_doubt(of)}" for size, of in ratios.items())


def by_size(bench, method):
    return {size: bench.ratios[size, method] for size in bench.plan.sizes}


def note(bench):
    return (
        f"GPTs of bytes, {bench.steps} steps of {BATCH} tokens, {len(bench.plan.seeds)} seed(s);"
        " mean with its 95 % interval"
    )


def tokens(bench):
    find_tokens(bench)
    bench.found["same tokens"] = by_size(bench, SAME)
    bench.found["nano tokens"] = by_size(bench, NANO)
    draw(bench)
    lines = [
        [
            "tokens to AdamW's loss, Muon, same block",
            "track 3 of modded-nanogpt: 3,250 steps for 4,875 (AdamH): 0.67",
            told(bench, by_size(bench, SAME)),
            note(bench),
        ],
        [
            "tokens to AdamW's loss, Muon, nano block",
            "modded-nanogpt: 19,560 to 3,200 steps (record 9): 0.16",
            told(bench, by_size(bench, NANO)),
            "the same; value embeddings and more of those records are not in this block",
        ],
    ]
    return tuning_table(bench) + tokens_table(bench), lines


# --------------------------------------------------------------------------------------------------
# Seconds to equal loss


def timed_log(bench, case, round_):
    steps = bench.plan.timed_steps
    name = f"seconds/{case[0]}_{case[1]}_round{round_}".replace(" ", "_").replace("'", "")
    command = bench.command(*case, bench.chosen[case], "timed", steps, bench.plan.seeds[0])
    return bench.run(name.replace(",", ""), command)


def seconds(bench):
    find_tokens(bench)
    times = {case: [] for case in bench.cases()}
    for round_ in range(bench.plan.rounds):
        for case, found in times.items():
            found.append(step_ms(timed_log(bench, case, round_)))
    ms = {case: min(found) for case, found in times.items()}
    ratios = {
        (size, method): [ratio * ms[size, method] / ms[size, ADAMW] for ratio in by_seed]
        for (size, method), by_seed in bench.ratios.items()
    }
    bench.found["same seconds"] = {
        size: of for (size, method), of in ratios.items() if method == SAME
    }
    lines = [
        [
            size,
            str(method),
            f"{ms[size, method]:.1f}",
            f"{ms[size, method] / ms[size, ADAMW]:.3f}",
            mean_and_doubt(ratios[size, method]) if method != ADAMW else "1",
        ]
        for size, method in bench.cases()
    ]
    text = markdown(
        ["size", "method", "ms a step", "against AdamW's", "seconds to AdamW's loss, of AdamW's"],
        lines,
    )
    return text, [
        [
            f"seconds to AdamW's loss, {method}",
            "record 4 of modded-nanogpt: 0.71 of the minutes" if method == SAME else "8.2 of 45",
            told(
                bench, {size: of for (size, which), of in ratios.items() if which == method}
            ),
            "step times in turns, one run at a time, one thread, the lowest median of"
            f" {bench.plan.rounds} rounds, times tokens",
        ]
        for method in (SAME, NANO)
    ]


# --------------------------------------------------------------------------------------------------
# The picture


def smooth(log, width=25):
    """(millions of tokens, mean loss of so many steps) of a run's training."""
    steps = [step["loss"] for step in found_events(log, "step")]
    parts = [steps[at : at + width] for at in range(0, len(steps), width)]
    return [
        (min(len(steps), (at + 1) * width) * BATCH / 1e6, statistics.mean(part))
        for at, part in enumerate(parts)
    ]


def draw(bench):
    """Of each size, the first seed's runs: training losses of AdamW and of the smallest budgets
    that reach its loss, and final losses on the held-out plays of all budgets."""
    seed = bench.plan.seeds[0]

    def paint(axes):
        for axis, size in zip(axes, bench.plan.sizes):
            goal = bench.goals[size, seed]
            for color, method in enumerate(METHODS):
                losses = {10: goal} if method == ADAMW else bench.budgets[size, method, seed]
                met = [tenths for tenths, loss in losses.items() if loss <= goal]
                setting = bench.chosen[size, method]
                job = Job(size, method, *setting, seed, min(met or losses), "final")
                log = bench.options.into / job.name / "log.jsonl"
                axis.plot(*zip(*smooth(log)), color=f"C{color}", lw=1, label=f"{method}: training")
                ends = [
                    (bench.steps * tenths / 10 * BATCH / 1e6, losses[tenths])
                    for tenths in sorted(losses)
                ]
                axis.plot(
                    *zip(*ends), "o-", color=f"C{color}", label=f"{method}: held-out, at the end"
                )
            axis.axhline(goal, color="grey", lw=0.5)
            axis.set(
                title=size,
                xlabel="millions of tokens",
                ylabel="loss",
                ylim=(goal - 0.3, goal + 0.8),
            )
            axis.legend(fontsize=7)

    bench.draw("losses", len(bench.plan.sizes), paint)


# --------------------------------------------------------------------------------------------------
# The claims, and all of it


def goal(number, paper, need, most):
    def means(found):
        return [statistics.mean(ratios) for ratios in found.values()]

    return Claim(
        number,
        paper,
        (need,),
        lambda found: ", ".join(f"{mean:.2f}" for mean in means(found)),
        met=lambda found: max(means(found)) <= most,
        partly=lambda found: min(means(found)) <= most,
    )


CLAIMS = (
    goal("U1", "tokens: 0.70 or less", "same tokens", 0.70),
    goal("U2", "seconds: 0.75 or less", "same seconds", 0.75),
    goal("U3", "nano, tokens: 0.40 or less", "nano tokens", 0.40),
)


def tokens_count(bench):
    """Of the search for equal loss: about three budgets."""
    cases = [case for case in bench.cases() if case not in bench.plan.settings]
    counts = {
        f"tuning_{size.replace(' ', '_')}": sum(
            len(RATES[method]) * len(method.others) for of, method in cases if of == size
        )
        for size in bench.plan.sizes
    }
    seeds = len(bench.plan.seeds)
    return {
        **counts,
        **{f"final_{size.replace(' ', '_')}": seeds * (1 + 2 * 3) for size in bench.plan.sizes},
    }


def seconds_count(bench):
    return {**tokens_count(bench), "seconds": bench.plan.rounds * len(bench.cases())}


PARTS = {"tokens": (tokens, tokens_count), "seconds": (seconds, seconds_count)}


def main():
    parser = parts_parser("reproduce_muon", __doc__, PLANS, PARTS)
    parser.add_argument("--jobs", type=int, metavar="N")
    options = parts_options(parser, "reproduce_muon")
    return reproduce_parts("reproduce_muon", Bench(options), PARTS, CLAIMS, PAGE)


if __name__ == "__main__":
    sys.exit(main())
