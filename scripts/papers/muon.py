"""muon.py: Muon beside AdamW: steps, tokens and seconds to equal loss.

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
one thread (default: the number of cores). --steps replaces the number of AdamW's steps. The picture
is losses.png.
"""

import array
import glob
import math
import statistics
from dataclasses import dataclass

import experiment
from experiment import (
    RESULTS, SEEDS, TEXT, TIMED, WARMUP, Claim, Failed, Paper, cores, events, final_loss, interval,
    markdown, plans, read_shard, tuned_to_edges, words, write_shard,
)

# Tokens of a sample and of a step: about what is best for AdamW with GPT-2's block, which learns
# less from the same text with samples of 256 tokens or with steps of 2048.
T, BATCH = 64, 1024
RISE = 0.05  # of the steps: warm-up
MOST = 15  # the largest budget, in tenths of AdamW's steps
MOST_RATES = 8  # of a grid, with what its edges add
EXCERPT = 1 << 15  # bytes of each work that validates
TUNING_SEED = 1


@dataclass(frozen=True)
class Method:
    """What trains. others: name -> flags of the second thing that is tuned; tuned: tenths of
    AdamW's steps that it is tuned with; first: those that the search for equal loss begins with."""

    name: str
    block: str
    rate_flag: str
    flags: str
    others: dict
    tuned: int
    first: int

    def __str__(self):
        return self.name

    def __hash__(self):
        return hash(self.name)


LINEAR = "--lr-schedule wsd-linear --lr-last-part 0.5"
MUON = f"--optimizer muon --muon-weight-decay 0.01 --beta1 0.8 {LINEAR}"
REST = {f"rest {rate}": f"--lr {rate}" for rate in ("3e-3", "1e-2")}
ADAMW = Method(
    "AdamW, GPT-2's block", "gpt2", "--lr", "--optimizer adamw --weight-decay 0.1 --beta2 0.99",
    {"cosine": "--lr-schedule cosine", "wsd-linear": LINEAR}, 10, 10,
)
SAME = Method("Muon, GPT-2's block", "gpt2", "--muon-lr", MUON, REST, 6, 4)
NANO = Method("Muon, nano block", "nano", "--muon-lr", MUON, REST, 4, 3)
METHODS = ADAMW, SAME, NANO
RATES = {ADAMW: (1e-3, 2e-3, 4e-3, 8e-3), SAME: (0.01, 0.02, 0.04, 0.08)}
RATES[NANO] = RATES[SAME]


LARGE, SMALL = "4 layers of 128", "2 layers of 64"
SIZES = {LARGE: "layers=4,heads=4,channels=128", SMALL: "layers=2,heads=2,channels=64"}
PLANS = plans(
    sizes=({SMALL: SIZES[SMALL]}, SIZES),  # name -> layers, heads and channels
    seeds=((2,), (2, 3, 4)),
    settings=(  # (size, method) -> (rate, other) that are known; those that are not are tuned
        {
            (SMALL, ADAMW): (8e-3, "wsd-linear"),
            (SMALL, SAME): (0.02, "rest 1e-2"),
            (SMALL, NANO): (0.02, "rest 1e-2"),
        },
        {},
    ),
    rounds=(2, 5),
    steps=(1200, 1200),
)
TIMED_STEPS = WARMUP + 60


# --------------------------------------------------------------------------------------------------
# Data


def read_works(pattern):
    """Each begins with the token 0."""
    text = b""
    for path in sorted(glob.glob(pattern)):
        _, tokens = read_shard(path)
        if max(tokens, default=256) > 255:
            raise Failed(f"{path}: no shard of bytes: run make data again")
        text += bytes(tokens.tolist())
    return [b"\0" + work for work in text.split(b"\0")[1:]]


def write_works(path, works):
    write_shard(path, array.array("H", list(b"".join(works))))


def write_data(folder):
    """What tunes: all training works but four, which validate. What counts: all of them, and the
    held-out plays. The beginning of each work validates."""
    works, plays = (read_works(f"{TEXT}_{part}_*.bin") for part in ("train", "val"))
    held = works[4::9]
    if not held or not plays:
        raise Failed(f"{TEXT}_*.bin: too few works: run make data again")
    for name, part in (
        ("tuning_train", [work for at, work in enumerate(works) if at % 9 != 4]),
        ("tuning_val", [work[:EXCERPT] for work in held]),
        ("final_train", works),
        ("final_val", [work[:EXCERPT] for work in plays]),
    ):
        write_works(folder / f"{name}.bin", part)


# --------------------------------------------------------------------------------------------------
# Runs


def plain_name(text):
    return text.replace(",", "").replace("'", "").replace(" ", "_")


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
        text = f"{self.method} {self.rate:g} {self.other} {self.tenths} tenths seed {self.seed}"
        return f"{plain_name(f'{self.group} {self.size}')}/{plain_name(text)}"


class Bench(experiment.Bench):
    def command(self, size, method, setting, data, steps, seed):
        """Of a run that validates at its end; of one that does not: data "timed"."""
        rate, other = setting
        folder, validates = self.into / "data", data != "timed"
        data = data if validates else "final"
        return words(self.program, "--train", folder / f"{data}_train.bin", "--val",
                     folder / f"{data}_val.bin",
                     f"--model arch={method.block},{self.plan.sizes[size]},vocab=256",
                     f"--seq-len {T} --micro-batch {BATCH // T} --batch-tokens {BATCH}",
                     f"--threads 1 --steps {steps} --warmup {round(RISE * self.steps)}",
                     f"--final-lr-fraction 0 --val-every {steps if validates else 0}",
                     f"--val-batches -1 --seed {seed}", method.flags, method.others[other],
                     f"{method.rate_flag} {rate:g}")

    def losses(self, jobs):
        """Job -> final loss; so many runs at a time as --jobs says."""
        commands = {
            job.name: self.command(job.size, job.method, (job.rate, job.other), job.group,
                                   max(1, round(self.steps * job.tenths / 10)), job.seed)
            for job in jobs
        }
        logs = self.run_together(commands, self.options.jobs or cores())
        return {job: final_loss(logs[job.name]) for job in jobs}

    def cases(self):
        return [(size, method) for size in self.plan.sizes for method in METHODS]


# --------------------------------------------------------------------------------------------------
# Tuning


def tune(bench):
    """(size, method) -> (rate, other) -> loss. All grids begin with as many settings."""
    settings = [
        (case, rate, other)
        for case in bench.cases()
        if case not in bench.plan.settings
        for rate in RATES[case[1]]
        for other in case[1].others
    ]

    def losses_of(settings):
        jobs = {
            (case, rate, other): Job(*case, rate, other, TUNING_SEED, case[1].tuned, "tuning")
            for case, rate, other in settings
        }
        found = bench.losses(jobs.values())
        return {setting: found[job] for setting, job in jobs.items()}

    return tuned_to_edges(settings, losses_of, MOST_RATES)


def settings(bench):
    bench.grids = tune(bench)
    return {
        **bench.plan.settings,
        **{case: min(grid, key=grid.get) for case, grid in bench.grids.items()},
    }


def tuning_table(bench):

    def row(size, method, other, grid):
        losses = sorted((rate, loss) for (rate, of), loss in grid.items() if of == other)
        told_losses = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses)
        return [size, str(method), other, told_losses, str(round(bench.steps * method.tuned / 10))]

    lines = [
        row(size, method, other, grid)
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
    """The mean with half of its 95 % interval over seeds."""
    mean, doubt = interval(values)
    return f"{mean:.3f}" + (f" ± {doubt:.3f}" if len(values) > 1 and math.isfinite(mean) else "")


def setting_text(setting):
    return f"{setting[0]:g}, {setting[1]}"


def tokens_table(bench):
    runs = [
        [size, str(method), str(seed), f"{bench.goals[size, seed]:.4f}",
         ", ".join(f"{tenths / 10:g}: {losses[tenths]:.4f}" for tenths in sorted(losses)),
         f"{equal_loss(losses, bench.goals[size, seed]):.3f}"]
        for (size, method, seed), losses in bench.budgets.items()
    ]
    means = [
        [size, str(method), setting_text(bench.chosen[size, ADAMW]),
         setting_text(bench.chosen[size, method]), mean_and_doubt(ratios)]
        for (size, method), ratios in bench.ratios.items()
    ]
    reached = f"tokens to the loss of AdamW, {bench.steps} steps"
    return markdown(
        ["size", "method", "seed", "AdamW's loss", "budget: loss", "tokens, of AdamW's"], runs
    ) + markdown(["size", "method", "AdamW at", "at", reached], means)


def told(ratios):
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
    for name, method in (("same tokens", SAME), ("nano tokens", NANO)):
        bench.tell(name, by_size(bench, method), len(bench.plan.seeds))
    draw(bench)
    lines = [
        ["tokens to AdamW's loss, Muon, same block",
         "track 3 of modded-nanogpt: 3,250 steps for 4,875 (AdamH): 0.67",
         told(by_size(bench, SAME)), note(bench)],
        ["tokens to AdamW's loss, Muon, nano block",
         "modded-nanogpt: 19,560 to 3,200 steps (record 9): 0.16", told(by_size(bench, NANO)),
         "the same; value embeddings and more of those records are not in this block"],
    ]
    return tuning_table(bench) + tokens_table(bench), lines


# --------------------------------------------------------------------------------------------------
# Seconds to equal loss


def seconds(bench):
    find_tokens(bench)
    rounds = bench.plan.rounds

    def timed_log(case, round_):
        steps, seed = TIMED_STEPS, bench.plan.seeds[0]
        command = bench.command(*case, bench.chosen[case], "timed", steps, seed)
        return bench.run("seconds/" + plain_name(f"{case[0]}_{case[1]}_round{round_}"), command)

    ms = bench.times_in_turns(rounds, bench.cases(), timed_log)
    against = {(size, m): ms[size, m].median / ms[size, ADAMW].median for size, m in ms}
    ratios = {
        (size, method): [ratio * against[size, method] for ratio in by_seed]
        for (size, method), by_seed in bench.ratios.items()
    }
    told_of = {
        method: {size: of for (size, which), of in ratios.items() if which == method}
        for method in (SAME, NANO)
    }
    bench.tell("same seconds", told_of[SAME], rounds)
    lines = [
        [size, str(method), ms[size, method].text("{:.1f}"), f"{against[size, method]:.3f}",
         mean_and_doubt(ratios[size, method]) if method != ADAMW else "1"]
        for size, method in bench.cases()
    ]
    header = ["size", "method", "ms a step", "against AdamW's", "seconds to its loss, of AdamW's"]
    return markdown(header, lines), [
        [f"seconds to AdamW's loss, {method}",
         "record 4 of modded-nanogpt: 0.71 of the minutes" if method == SAME else "8.2 of 45",
         told(told_of[method]),
         "step times in turns, one run at a time, one thread, the median of"
         f" {rounds} rounds, times tokens"]
        for method in (SAME, NANO)
    ]


# --------------------------------------------------------------------------------------------------
# The picture


def smooth(log, width=25):
    """(millions of tokens, mean loss of so many steps) of a run's training."""
    steps = [step["loss"] for step in events(log, "step")]
    parts = [steps[at : at + width] for at in range(0, len(steps), width)]
    return [
        (min(len(steps), (at + 1) * width) * BATCH / 1e6, statistics.mean(part))
        for at, part in enumerate(parts)
    ]


def draw(bench):
    """Of each size, the first seed's runs: training losses of AdamW and of the smallest budgets
    that reach its loss, and final losses on the held-out plays of all budgets."""
    seed = bench.plan.seeds[0]

    def curve(axis, size, method, color):
        goal = bench.goals[size, seed]
        losses = {10: goal} if method == ADAMW else bench.budgets[size, method, seed]
        least = min([tenths for tenths, loss in losses.items() if loss <= goal] or losses)
        job = Job(size, method, *bench.chosen[size, method], seed, least, "final")
        trained = smooth(bench.into / job.name / "log.jsonl")
        axis.plot(*zip(*trained), color=color, lw=1, label=f"{method}: training")
        millions = bench.steps * BATCH / 1e7  # of tokens, in a tenth
        ends = [(millions * tenths, losses[tenths]) for tenths in sorted(losses)]
        axis.plot(*zip(*ends), "o-", color=color, label=f"{method}: held-out, at the end")

    def paint(axes):
        for axis, size in zip(axes, bench.plan.sizes):
            for at, method in enumerate(METHODS):
                curve(axis, size, method, f"C{at}")
            goal = bench.goals[size, seed]
            axis.axhline(goal, color="grey", lw=0.5)
            axis.set(title=size, xlabel="millions of tokens", ylabel="loss")
            axis.set(ylim=(goal - 0.3, goal + 0.8))

    bench.draw("losses", paint, columns=len(bench.plan.sizes))


# --------------------------------------------------------------------------------------------------
# The claims, and all of it


def goal(number, paper, need, basis, most):
    def means(found):
        return [statistics.mean(ratios) for ratios in found.values()]

    return Claim(number, paper, (need,), basis,
                 lambda found: ", ".join(f"{mean:.2f}" for mean in means(found)),
                 met=lambda found: max(means(found)) <= most,
                 partly=lambda found: min(means(found)) <= most)


CLAIMS = (
    goal("U1", "tokens: 0.70 or less", "same tokens", SEEDS, 0.70),
    goal("U2", "seconds: 0.75 or less", "same seconds", TIMED, 0.75),
    goal("U3", "nano, tokens: 0.40 or less", "nano tokens", SEEDS, 0.40),
)


def tokens_count(bench):
    """Of the search for equal loss: about three budgets."""
    plan = bench.plan
    counts = {plain_name(f"final {size}"): len(plan.seeds) * (1 + 2 * 3) for size in plan.sizes}
    for size, method in set(bench.cases()) - set(plan.settings):
        group = plain_name(f"tuning {size}")
        counts[group] = counts.get(group, 0) + len(RATES[method]) * len(method.others)
    return counts


PAPER = Paper(
    name="muon",
    doc=__doc__,
    plans=PLANS,
    parts={
        "tokens": (tokens, tokens_count),
        "seconds": (seconds, lambda bench: {
            **tokens_count(bench), "seconds": bench.plan.rounds * len(bench.cases())}),
    },
    claims=CLAIMS,
    steps=True,
    arguments=lambda parser: parser.add_argument("--jobs", type=int, metavar="N"),
    bench=Bench,
    page=RESULTS.parent / "results/models.md",
)
