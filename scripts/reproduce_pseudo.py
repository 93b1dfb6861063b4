#!/usr/bin/env python3
"""reproduce_pseudo.py: Pseudo-to-Real training (arXiv 2110.03888, 2110.03848): blocks that share,
then do not, beside training from scratch.

    scripts/reproduce_pseudo.sh --quick | --full [--part PART ...] [--steps N] [--into FOLDER]
    [--program FILE]

quality  validation loss at equal tokens of text (data/text_bytes_*, `make data`), a GPT of 12
         blocks: real from scratch; all blocks shared, and
         delinked after several shares of the steps; shared for ever. Each at its own best learning
         rate.
budget   what 0.6 of the time of training from scratch buys where a real step takes three times what
         a shared one does (that much of it shared, and
         the rest real): final validation losses beside that from scratch. Learning rates of both
         phases are tuned; they stay until the last fifth of the steps (wsd), and from scratch the
         better of this and cosine counts.
moments  what copies begin with: the moments of the mean gradient, with and without a re-warm-up, or
         none. At the switch in the middle and the
         learning rate found for it.
speed    step times of the shared and of the real model: on this machine as it is; with offload,
         where the device is as small as the shared model (or
         the least that the real one runs with), so that the real one's states lie on the host; and
         on an emulated cluster of 4 nodes (cluster.sh) whose link makes the real model's messages
         three times its compute. Joules where /sys/class/powercap can be read.
clock    seconds of a step with 4 blocks to a storage, and of a real one, at two sizes (--quick: at
         one): over such a link, and where the real model's optimizer states lie on a disk.
seconds  validation loss after the same measured seconds over this link: from scratch, shared for
         several shares of the time and then real, always shared (pseudo_seconds.py).
The part speed has loss at equal time, too: losses are those of the steps of the part quality, which
no layout changes, and each step takes what its model's takes.

--quick takes less than 5 minutes on 2 quiet cores; --full, with three seeds, about two hours.
--steps replaces the number of training steps. FOLDER (default: out/pseudo_quick or out/pseudo_full)
gets a folder for each run, with log.jsonl and output.txt, the tables as table.md, quality.png and
seconds.png.
The same command goes on where it was stopped: what is there is not run again. Ctrl-C leaves no
process and no cluster. Where no cluster can be made, its part says so.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import re
import statistics
import sys
from dataclasses import dataclass

import pseudo_seconds
import reproduce_cyclic
from pseudo_seconds import RANKS, SLOW, quota
from reproduce import (
    EXIT_FAILED,
    EXIT_RESOURCES,
    TEXT,
    Claim,
    Failed,
    markdown,
    parts_options,
    parts_parser,
    percent,
    reproduce_parts,
    span,
)
from reproduce_cyclic import (
    CLUSTER,
    WARMUP,
    cluster_name,
    found_events,
    last_validation,
    no_cluster,
    run_name,
    step_ms,
    tuned,
)

MODEL = (
    "--model",
    "layers=12,heads=4,channels=64,vocab=256",
    "--seq-len",
    32,
    "--micro-batch",
    8,
    "--batch-tokens",
    256,
    "--final-lr-fraction",
    0,
)
GOAL = 0.6  # of the time of training from scratch


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in."""

    steps: int
    # learning rates, of runs in which blocks share, of those that do not: large ones are not for
    # both
    rates: dict
    switches: tuple  # shares of the steps in which blocks share
    # --share -> learning rates of the two phases; what is left of the goal's time for real steps:
    # below
    budgets: dict
    left: tuple  # steps that do not share, over those of training from scratch
    seeds: tuple
    timed_steps: int
    rounds: int  # of timed runs, in turns

    @property
    def tuning_seeds(self):
        """The first seed chooses the learning rate."""
        return self.seeds[:1]


PLANS = {
    "quick": Plan(
        steps=500,
        rates={True: ("5e-4", "1e-3", "2e-3"), False: ("2e-3", "4e-3", "8e-3")},
        switches=(0.1, 0.5),
        budgets={"4": ("1e-3/1e-3", "2e-3/1e-3")},
        left=(0.1,),
        seeds=(1,),
        timed_steps=WARMUP + 10,
        rounds=1,
    ),
    "full": Plan(
        steps=3000,
        rates={True: ("5e-4", "1e-3", "2e-3"), False: ("2e-3", "4e-3", "8e-3", "1.6e-2")},
        switches=(0.1, 0.25, 0.5),
        budgets={share: ("4e-3/1e-3", "4e-3/2e-3", "8e-3/4e-3") for share in ("2", "4")},
        left=(0.1, 0.2),
        seeds=(1, 2, 3),
        timed_steps=WARMUP + 30,
        rounds=3,
    ),
}


@dataclass(frozen=True)
class Candidate:
    """What is compared at its best learning rate. switch: the share of the steps in which blocks
    share."""

    switch: float = 0
    moments: str = "mean"
    warmup: float = 0  # the share of the steps after the switch in which the rate rises again
    share: str = "all"
    length: float = 1  # steps, over those of training from scratch
    schedule: str = "cosine"

    @property
    def optimizer(self):
        """Whose rates are tried (reproduce_cyclic.tuned)."""
        return self.share if self.length != 1 else self.switch != 0

    def __str__(self):
        name = {0: "real from scratch", 1: "always shared"}.get(
            self.switch
        ) or f"shared for {100 * self.switch:g} %, then real"
        name += (f", {self.moments}" if self.moments != "mean" else "") + (
            ", re-warm-up" if self.warmup else ""
        )
        name += (
            f", --share {self.share}, {self.length:.2f} times the steps" if self.length != 1 else ""
        )
        return name + (f", {self.schedule}" if self.schedule != "cosine" else "")

    def flags(self, steps):
        if self.switch == 0:
            return []
        rise = ["--delink-warmup", max(1, round(self.warmup * steps))] if self.warmup else []
        return [
            "--share",
            self.share,
            *(
                []
                if self.switch == 1
                else ["--delink-at", self.at(steps), "--delink-moments", self.moments, *rise]
            ),
        ]

    def at(self, steps):
        return max(1, round(self.switch * steps))

    def steps(self, of_scratch):
        return max(1, round(self.length * of_scratch))


REAL, SHARED, STEADY = Candidate(0), Candidate(1), Candidate(0, schedule="wsd")
JOULES = "joules a step"


class Bench(reproduce_cyclic.Bench):
    def __init__(self, options):
        super().__init__(options, PLANS)
        self.steps = options.steps or self.plan.steps
        self.seconds = pseudo_seconds.PLANS[options.plan]
        self.switches = [Candidate(share) for share in self.plan.switches]
        self.middle = self.switches[len(self.switches) // 2]

    def command(self, one, rate, seed):
        steps, (shared, real) = one.steps(self.steps), (
            rate.split("/") if "/" in rate else ("", rate)
        )
        rates = ["--lr", real, *(["--share-lr", shared] if shared else [])]
        return [
            self.options.program,
            *self.data(),
            *MODEL,
            "--threads",
            1,
            "--steps",
            steps,
            *rates,
            "--lr-schedule",
            one.schedule,
            "--warmup",
            steps // 10,
            "--weight-decay",
            0.1,
            "--val-every",
            max(1, steps // 20),
            "--val-batches",
            40,
            "--seed",
            seed,
            *one.flags(steps),
        ]

    @staticmethod
    def model(channels):
        return [*("--model", f"layers=12,heads=4,channels={channels},vocab=256"), *MODEL[2:]]

    @staticmethod
    def data():
        return ["--train", f"{TEXT}_train_*.bin", "--val", f"{TEXT}_val_*.bin"]

    def best(self, part, every, rates):
        """Candidate -> (learning rate, validations by seed): (step, loss) of each of a run."""
        found = tuned(
            self, part, every, rates, self.command, lambda log: last_validation(log)["loss"], min
        )
        return {
            one: (
                its.rate,
                its.scores,
                [self.curve(part, one, its.rate, seed) for seed in self.plan.seeds],
            )
            for one, its in found.items()
        }

    def curve(self, part, one, rate, seed):
        log = self.run(run_name(part, one, rate, seed), self.command(one, rate, seed))
        return [(event["step"], event["loss"]) for event in found_events(log, "val")]


def mean_curve(curves):
    return [(at[0][0], statistics.mean(loss for _, loss in at)) for at in zip(*curves)]


# --------------------------------------------------------------------------------------------------
# Losses


def quality_runs(bench):
    return bench.best("quality", [REAL, *bench.switches, SHARED], bench.plan.rates)


def loss_lines(bench, found, base):
    def cells(one, rate, losses):
        return [
            str(one),
            rate,
            " ".join(f"{loss:.4f}" for loss in losses),
            f"{statistics.mean(losses):.4f}",
            percent(statistics.mean(losses) / base, 2),
        ]

    return markdown(
        [
            f"text, {bench.steps} steps",
            "learning rate",
            "validation loss by seed",
            "mean",
            "against real from scratch",
        ],
        [cells(one, rate, losses) for one, (rate, losses, _) in found.items()],
    )


def quality(bench):
    found = quality_runs(bench)
    means = {one: statistics.mean(losses) for one, (_, losses, _) in found.items()}
    told = "; ".join(
        f"{one}: {percent(means[one] / means[REAL], 2)}"
        for one in means
        if one not in (REAL, SHARED)
    )
    spread = (
        f"; seeds from scratch are {100 * (max(found[REAL][1]) / min(found[REAL][1]) - 1):.1f} %"
        " apart"
        if len(bench.plan.seeds) > 1
        else "; one seed"
    )
    claims = [
        [
            "loss at equal tokens, shared then real, against real from scratch",
            "SWE (BERT-Large): better, by 36-54 % of what twice the steps bring",
            told,
            f"a small GPT on bytes, {bench.steps} steps, final validation loss" + spread,
        ],
        [
            "loss at equal tokens, always shared",
            "ALBERT: clearly worse",
            percent(means[SHARED] / means[REAL], 2),
            "the same",
        ],
    ]
    return loss_lines(bench, found, means[REAL]), claims


def budget(bench):
    def candidate(share, left):
        shared = SLOW * (GOAL - left)
        return Candidate(
            shared / (shared + left), share=share, length=shared + left, schedule="wsd"
        )

    def mean(item):
        return statistics.mean(item[1][1])

    scratch = {
        **bench.best("quality", [REAL], bench.plan.rates),
        **bench.best("budget", [STEADY], bench.plan.rates),
    }
    base = min(map(mean, scratch.items()))
    found = bench.best(
        "budget",
        [candidate(share, left) for share in bench.plan.budgets for left in bench.plan.left],
        bench.plan.budgets,
    )
    one, (rate, losses, _) = min(
        ((one, item) for one, item in found.items() if one.switch < 1), key=mean
    )
    told = (
        f"{percent(statistics.mean(losses) / base, 2)}: {one}, rates {rate}; seeds"
        f" {' '.join(f'{loss:.4f}' for loss in losses)} against a mean of {base:.4f}"
    )
    return loss_lines(bench, {**scratch, **found}, base), [
        [
            (
                f"loss for {GOAL}x of the time of training from scratch, where a real step takes"
                f" {SLOW} times a shared one (goal: not above it)"
            ),
            "SWE: half the iterations for equal downstream quality",
            told,
            (
                "the best of those tried that end real, beside the better schedule from scratch;"
                " rates: while blocks share / later"
            ),
        ]
    ]


def moments(bench):
    ((rate, losses, curves),) = (quality_runs(bench)[bench.middle],)
    share = bench.middle.switch
    others = bench.best(
        "moments",
        [
            Candidate(share, "mean", 0.02),
            Candidate(share, "reset"),
            Candidate(share, "reset", 0.02),
        ],
        {True: (rate,)},
    )
    found = {bench.middle: (rate, losses, curves), **others}
    base = statistics.mean(losses)
    told = "; ".join(
        f"{one}: {percent(statistics.mean(other) / base, 2)}"
        for one, (_, other, _) in others.items()
    )
    return loss_lines(bench, found, base).replace(
        "against real from scratch", "against moments of the mean"
    ), [
        [
            f"what copies begin with, against moments of the mean gradient ({bench.middle})",
            "not reported",
            told,
            "final validation loss, at that one's learning rate",
        ]
    ]


# --------------------------------------------------------------------------------------------------
# Times


def timed(bench, name, share, cluster, *more_flags):
    """The log of a timed run; cluster: words for it, None: this machine alone."""
    flags = [*(["--share", "all"] if share else []), *more_flags]
    train = [
        bench.options.program,
        *bench.data(),
        *MODEL,
        *flags,
        "--steps",
        bench.plan.timed_steps,
        "--val-every",
        0,
    ]
    if cluster is None:
        return bench.run(name, train)
    return bench.run(
        name,
        [
            CLUSTER,
            f"{RANKS}x1",
            "--name",
            cluster_name(bench.options.into),
            *cluster,
            "--cpu",
            quota(),
            "--",
            *train,
            "--threads",
            1,
        ],
    )


def slow_link(bench):
    log = timed(bench, "speed/calibration", False, [])
    return pseudo_seconds.slow_link(log)


def smallest_budget(bench):
    """Bytes of the device that the shared model takes, or, where the real one does not run with so
    few, the least that it does."""
    shared = found_events(timed(bench, "speed/budget", True, None), "end")[-1]["memory"][
        "measured"
    ]["device"]
    output = bench.options.into / "speed" / "smallest.txt"
    ask = [bench.options.program, *bench.data(), *MODEL, "--dry-run", "--device-memory", shared]
    status, text = bench.runner.run([str(word) for word in ask], output), output.read_text(
        errors="replace"
    )
    least = re.search(r"smallest that fits is --device-memory (\d+)", text)
    if status and (status != EXIT_RESOURCES or not least):
        raise Failed(
            EXIT_FAILED, f"the forecast: exit status {status}: {text.strip()[-300:]}", status
        )
    return int(least.group(1)) if status else shared


def speed_runs(bench):
    """Place -> shared? -> (ms, joules or None) of a step: the lowest of the rounds, in turns."""
    places, flags = {"this machine": None, "offload": None}, {
        "offload": ["--device-memory", smallest_budget(bench)]
    }
    if not no_cluster():
        places["slow link"] = slow_link(bench)
    logs = {}
    for round_ in range(bench.plan.rounds):
        for place, words in places.items():
            for share in (False, True):
                name = f"speed/{place}_{'shared' if share else 'real'}_round{round_}".replace(
                    " ", "_"
                )
                logs.setdefault((place, share), []).append(
                    timed(bench, name, share, words, *flags.get(place, []))
                )
    return {
        place: {
            share: (min(map(step_ms, logs[place, share])), joules(bench, logs[place, share]))
            for share in (False, True)
        }
        for place in places
    }


def joules(bench, logs):
    found = [found_events(log, "end")[-1].get("energy_j") for log in logs]
    return None if None in found else min(found) / bench.plan.timed_steps


def elapsed(curve, switch, costs):
    """(what the steps so far have cost, loss): costs of a step while blocks share, and later."""
    return [
        (min(step, switch) * costs[True] + max(0, step - switch) * costs[False], loss)
        for step, loss in curve
    ]


def reaches(curve, loss):
    """Where a curve comes down to a loss, between its points; None: it does not."""
    for (a, high), (b, low) in zip(curve, curve[1:]):
        if low <= loss:
            return b if high <= low else a + (b - a) * min(1, max(0, high - loss) / (high - low))
    return None


def loss_at(curve, when):
    for (a, high), (b, low) in zip(curve, curve[1:]):
        if when <= b:
            return high + (low - high) * (when - a) / (b - a)
    return curve[-1][1]


def against(bench, curves, costs):
    """candidate -> (its whole cost over from scratch's; from scratch's loss at that cost; the cost
    to from scratch's final loss, or None)."""
    real = elapsed(curves[REAL], 0, costs)
    told = {}
    for one in (*bench.switches, SHARED):
        mine = elapsed(curves[one], one.at(bench.steps), costs)
        reached = reaches(mine, real[-1][1])
        told[one] = (
            mine[-1][0] / real[-1][0],
            loss_at(real, mine[-1][0]),
            reached and reached / real[-1][0],
        )
    return told


def time_table(bench, kind, place, curves, costs):
    lines = [
        [
            str(one),
            f"{whole:.2f}x",
            f"{curves[one][-1][1]:.4f}",
            f"{beside:.4f}",
            percent(curves[one][-1][1] / beside, 2),
            f"{reached:.2f}x" if reached else "not reached",
        ]
        for one, (whole, beside, reached) in against(bench, curves, costs).items()
    ]
    return markdown(
        [
            f"equal {kind}, {place}",
            f"{kind} of all steps, against real's",
            "loss then",
            "real from scratch, then",
            "against it",
            f"{kind} to real's final loss",
        ],
        lines,
    )


def speed(bench):
    times, note = speed_runs(bench), no_cluster()
    curves = {one: mean_curve(by_seed) for one, (_, _, by_seed) in quality_runs(bench).items()}
    text, claims = f"Slow link: left out: {note}\n\n" if note else "", []
    text += markdown(
        ["place", "real: ms a step", "shared: ms a step", "real: " + JOULES, "shared: " + JOULES],
        [
            [
                place,
                *(f"{found[share][0]:.1f}" for share in (False, True)),
                *(
                    "not measured" if found[share][1] is None else f"{found[share][1]:.2f}"
                    for share in (False, True)
                ),
            ]
            for place, found in times.items()
        ],
    )
    for place, found in times.items():
        costs = {share: ms for share, (ms, _) in found.items()}
        text += time_table(bench, "time", place, curves, costs)
        beside = against(bench, curves, costs)
        told = "; ".join(
            f"{one}: {reached:.2f}x" if reached else f"{one}: not reached"
            for one, (_, _, reached) in beside.items()
        )
        claims.append(
            [
                f"time to real from scratch's final loss, {place}"
                + (f" (goal {GOAL}x)" if place != "this machine" else ""),
                "SWE: half the iterations for equal downstream quality",
                told,
                f"a shared step takes {costs[True] / costs[False]:.2f}x of a real one here",
            ]
        )
        watts = {share: joule for share, (_, joule) in found.items()}
        if None not in watts.values():
            text += time_table(bench, "energy", place, curves, watts)
    if any(joule is None for found in times.values() for _, joule in found.values()):
        claims.append(
            [
                "loss against joules",
                "not reported",
                "not measured",
                "/sys/class/powercap cannot be read here",
            ]
        )
    draw(bench, curves, times)
    return text, claims


def draw(bench, curves, times):
    def paint(axes):
        panels = [
            ("steps", {False: 1, True: 1}),
            *(
                (f"seconds, {place}", {share: ms / 1000 for share, (ms, _) in found.items()})
                for place, found in times.items()
            ),
        ]
        for axis, (name, costs) in zip(axes, panels):
            for one in (REAL, *bench.switches, SHARED):
                axis.plot(
                    *zip(*elapsed(curves[one], one.at(bench.steps) if one.switch else 0, costs)),
                    label=str(one),
                )
            axis.set(
                xlabel=name,
                ylabel="validation loss",
                ylim=(None, statistics.median(loss for _, loss in curves[REAL]) * 1.3),
            )
        axes[0].legend()

    bench.draw("quality", 1 + len(times), paint)


# --------------------------------------------------------------------------------------------------
# The claim, and all of it: parts, each with what it will run at most

CLAIMS = (
    # Runs that share, then do not, over real from scratch, after equal measured seconds: the ratios
    # of all moments, by size of the model.
    Claim(
        "M3",
        "better at equal time",
        ("equal seconds",),
        lambda sizes: "loss"
        f" {span([100 * r - 100 for ratios in sizes.values() for r in ratios], '{:+.2f}')} %",
        met=lambda sizes: max(map(max, sizes.values())) < 1,
        partly=lambda sizes: min(map(min, sizes.values())) < 1,
    ),
)


def candidate_runs(plan, rates):
    """Of one candidate."""
    return len(rates) + len(set(plan.seeds) - set(plan.tuning_seeds))


def quality_count(bench):
    plan = bench.plan
    shared, real = (candidate_runs(plan, plan.rates[share]) for share in (True, False))
    return {"quality": real + (len(bench.switches) + 1) * shared}


def budget_count(bench):
    plan = bench.plan
    real = candidate_runs(plan, plan.rates[False])
    ends = sum(len(plan.left) * candidate_runs(plan, rates) for rates in plan.budgets.values())
    return {"quality": real, "budget": real + ends}


def moments_count(bench):
    return {**quality_count(bench), "moments": 3 * candidate_runs(bench.plan, (1,))}


def speed_count(bench):
    places, slow = 2, not no_cluster()
    return {**quality_count(bench), "speed": 1 + slow + 2 * bench.plan.rounds * (places + slow)}


PARTS = {
    "quality": (quality, quality_count),
    "budget": (budget, budget_count),
    "moments": (moments, moments_count),
    "speed": (speed, speed_count),
    "clock": (pseudo_seconds.clock, pseudo_seconds.clock_count),
    "seconds": (pseudo_seconds.seconds, pseudo_seconds.seconds_count),
}


def main():
    options = parts_options(
        parts_parser("reproduce_pseudo", __doc__, PLANS, PARTS), "reproduce_pseudo"
    )
    return reproduce_parts("reproduce_pseudo", Bench(options), PARTS, CLAIMS)


if __name__ == "__main__":
    sys.exit(main())
