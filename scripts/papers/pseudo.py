"""pseudo.py: Pseudo-to-Real training (arXiv 2110.03888, 2110.03848): blocks that share, then do
not, beside training from scratch.

    scripts/reproduce_pseudo.sh --quick | --full [--part PART ...] [--steps N] [--into FOLDER]
    [--program FILE]

quality  validation loss at equal tokens of text (data/text_bytes_*, `make data`), a GPT of 12
         blocks: real from scratch; all blocks shared, and delinked after several shares of the
         steps; shared for ever. Each at its own best learning rate.
budget   what 0.6 of the time of training from scratch buys where a real step takes three times what
         a shared one does (that much of it shared, and the rest real): final validation losses
         beside that from scratch. Learning rates of both phases are tuned; they stay until the last
         fifth of the steps (wsd), and from scratch the better of this and cosine counts.
moments  what copies begin with: the moments of the mean gradient, with and without a re-warm-up, or
         none. At the switch in the middle and the learning rate found for it.
speed    step times of the shared and of the real model: on this machine as it is; with offload,
         where the device is as small as the shared model (or the least that the real one runs
         with), so that the real one's states lie on the host; and on an emulated cluster of 4 nodes
         (cluster.sh) whose link makes the real model's messages three times its compute. Joules
         where /sys/class/powercap can be read.
clock    seconds of a step with 4 blocks to a storage, and of a real one, at two sizes (--quick: at
         one): over such a link, and where the real model's optimizer states lie on a disk.
seconds  validation loss after the same measured seconds over this link: from scratch, shared for
         several shares of the time and then real, always shared (pseudo_seconds.py).
The part speed has loss at equal time, too: losses are those of the steps of the part quality, which
no layout changes, and each step takes what its model's takes.

--quick takes less than 5 minutes on 2 quiet cores; --full, with three seeds, about two hours.
--steps replaces the number of training steps. The pictures are quality.png and seconds.png.
"""

import statistics
from dataclasses import dataclass

import experiment
from experiment import (
    EXIT_RESOURCES, TIMED, WARMUP, Claim, Paper, data_flags, folder_name, last, loss_curve,
    markdown, no_cluster, percent, plans, run_name, smallest_that_fits, span, spread, step_ms,
    tuned, tuned_runs, value_at, words,
)
from papers import pseudo_seconds
from papers.pseudo_seconds import SLOW, timed

MODEL = "--model layers=12,heads=4,channels={},vocab=256"
SAMPLES = "--seq-len 32 --micro-batch 8 --batch-tokens 256 --final-lr-fraction 0"
GOAL = 0.6  # of the time of training from scratch


PLANS = plans(
    steps=(500, 3000),
    rates=(  # by whether blocks share in the run: large ones are not for both
        {True: ("5e-4", "1e-3", "2e-3"), False: ("2e-3", "4e-3", "8e-3")},
        {True: ("5e-4", "1e-3", "2e-3"), False: ("2e-3", "4e-3", "8e-3", "1.6e-2")},
    ),
    switches=((0.1, 0.5), (0.1, 0.25, 0.5)),  # shares of the steps in which blocks share
    budgets=(  # --share -> learning rates of the two phases
        {"4": ("1e-3/1e-3", "2e-3/1e-3")},
        {share: ("4e-3/1e-3", "4e-3/2e-3", "8e-3/4e-3") for share in ("2", "4")},
    ),
    left=((0.1,), (0.1, 0.2)),  # steps of budget that do not share, over those from scratch
    tuning_seeds=((1,), (1,)),  # choose the learning rate
    seeds=((1,), (1, 2, 3)),
    timed_steps=(WARMUP + 10, WARMUP + 30),
    rounds=(1, 3),  # of timed runs, in turns
)


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
        """Whose rates are tried (tuned())."""
        return self.share if self.length != 1 else self.switch != 0

    def __str__(self):
        whole = {0: "real from scratch", 1: "always shared"}
        parts = [whole.get(self.switch) or f"shared for {100 * self.switch:g} %, then real"]
        parts += [self.moments] * (self.moments != "mean") + ["re-warm-up"] * bool(self.warmup)
        if self.length != 1:
            parts += [f"--share {self.share}", f"{self.length:.2f} times the steps"]
        return ", ".join(parts + [self.schedule] * (self.schedule != "cosine"))

    def flags(self, steps):
        if self.switch == 0:
            return ""
        text = f"--share {self.share}"
        if self.switch != 1:
            text += f" --delink-at {self.at(steps)} --delink-moments {self.moments}"
            if self.warmup:
                text += f" --delink-warmup {max(1, round(self.warmup * steps))}"
        return text

    def at(self, steps):
        return max(1, round(self.switch * steps))

    def steps(self, of_scratch):
        return max(1, round(self.length * of_scratch))


REAL, SHARED, STEADY = Candidate(0), Candidate(1), Candidate(0, schedule="wsd")
JOULES = "joules a step"


class Bench(experiment.Bench):
    def __init__(self, options, plans):
        super().__init__(options, plans)
        self.seconds = pseudo_seconds.PLANS[options.plan]
        self.switches = [Candidate(share) for share in self.plan.switches]
        self.middle = self.switches[len(self.switches) // 2]

    def train(self, channels=64):
        """The program, its data and model."""
        return words(self.program, data_flags(), MODEL.format(channels), SAMPLES)

    def command(self, one, rate, seed):
        steps = one.steps(self.steps)
        shared, real = rate.split("/") if "/" in rate else ("", rate)
        return words(
            self.train(), f"--threads 1 --steps {steps} --lr {real}",
            f"--share-lr {shared}" if shared else "",
            f"--lr-schedule {one.schedule} --warmup {steps // 10} --weight-decay 0.1",
            f"--val-every {max(1, steps // 20)} --val-batches 40 --seed {seed}", one.flags(steps),
        )

    def best(self, part, every, rates, command=None):
        """Candidate -> (Tuned, [(step, loss) ...] of each seed's run)."""
        command = command or self.command
        found = tuned(self, part, every, rates, command)

        def curve(*job):
            return loss_curve(self.run(run_name(part, *job), command(*job)))

        return {
            one: (its, [curve(one, its.rate, seed) for seed in self.plan.seeds])
            for one, its in found.items()
        }


# --------------------------------------------------------------------------------------------------
# Losses


def quality_runs(bench):
    return bench.best("quality", [REAL, *bench.switches, SHARED], bench.plan.rates)


def loss_lines(bench, found, base, against="real from scratch"):
    rows = [
        [str(one), its.rate, " ".join(f"{loss:.4f}" for loss in its.scores), f"{its.mean:.4f}",
         percent(its.mean / base, 2)]
        for one, (its, _) in found.items()
    ]
    header = [f"text, {bench.steps} steps", "learning rate", "validation loss by seed", "mean"]
    return markdown([*header, f"against {against}"], rows)


def quality(bench):
    found = quality_runs(bench)
    means = {one: its.mean for one, (its, _) in found.items()}
    told = "; ".join(
        f"{one}: {percent(means[one] / means[REAL], 2)}"
        for one in means
        if one not in (REAL, SHARED)
    )
    scores = found[REAL][0].scores
    apart = 100 * (max(scores) / min(scores) - 1)
    seeds = f"seeds from scratch are {apart:.1f} % apart" if len(scores) > 1 else "one seed"
    return loss_lines(bench, found, means[REAL]), [
        ["loss at equal tokens, shared then real, against real from scratch",
         "SWE (BERT-Large): better, by 36-54 % of what twice the steps bring", told,
         f"a small GPT on bytes, {bench.steps} steps, final validation loss; {seeds}"],
        ["loss at equal tokens, always shared", "ALBERT: clearly worse",
         percent(means[SHARED] / means[REAL], 2), "the same"],
    ]


def budget(bench):
    def candidate(share, left):
        shared = SLOW * (GOAL - left)
        length = shared + left
        return Candidate(shared / length, share=share, length=length, schedule="wsd")

    scratch = {
        **bench.best("quality", [REAL], bench.plan.rates),
        **bench.best("budget", [STEADY], bench.plan.rates),
    }
    base = min(its.mean for its, _ in scratch.values())
    tries = [candidate(share, left) for share in bench.plan.budgets for left in bench.plan.left]
    found = bench.best("budget", tries, bench.plan.budgets)
    ends_real = [one for one in found if one.switch < 1]
    one = min(ends_real, key=lambda one: found[one][0].mean)
    its = found[one][0]
    scores = " ".join(f"{loss:.4f}" for loss in its.scores)
    return loss_lines(bench, {**scratch, **found}, base), [
        [f"loss for {GOAL}x of the time of training from scratch, where a real step takes"
         f" {SLOW} times a shared one (goal: not above it)",
         "SWE: half the iterations for equal downstream quality",
         f"{percent(its.mean / base, 2)}: {one}, rates {its.rate}; seeds {scores} against a mean"
         f" of {base:.4f}",
         "the best of those tried that end real, beside the better schedule from scratch;"
         " rates: while blocks share / later"]
    ]


def moments(bench):
    middle = quality_runs(bench)[bench.middle]
    share, its = bench.middle.switch, middle[0]
    ways = (("mean", 0.02), ("reset", 0), ("reset", 0.02))
    others = bench.best("moments", [Candidate(share, *way) for way in ways], {True: (its.rate,)})
    found = {bench.middle: middle, **others}
    told = "; ".join(
        f"{one}: {percent(other.mean / its.mean, 2)}" for one, (other, _) in others.items()
    )
    return loss_lines(bench, found, its.mean, "moments of the mean"), [
        [f"what copies begin with, against moments of the mean gradient ({bench.middle})",
         "not reported", told, "final validation loss, at that one's learning rate"]
    ]


# --------------------------------------------------------------------------------------------------
# Times


def smallest_budget(bench):
    """Bytes of the device that the shared model takes, or, where the real one does not run with so
    few, the least that it does."""
    log = timed(bench, "speed/budget", words(bench.train(), "--share all"))
    shared = last(log, "end")["memory"]["measured"]["device"]
    status, text = bench.ask("speed/smallest.txt", bench.train(), "--dry-run --device-memory",
                             shared, allowed=(0, EXIT_RESOURCES))
    return smallest_that_fits(text) if status else shared


def speed_runs(bench):
    """Place -> shared? -> (Spread of ms, joules or None) of a step."""
    budget = f"--device-memory {smallest_budget(bench)}"
    places = {"this machine": (None, ""), "offload": (None, budget)}
    if not no_cluster():
        log = timed(bench, "speed/calibration", words(bench.train(), "--threads 1"), "")
        places["slow link"] = pseudo_seconds.slow_link(log), ""
    found = {}
    for place, (where, more) in places.items():

        def run(share, round_):
            name = f"speed/{place}_{'shared' if share else 'real'}_round{round_}"
            flags = bench.train(), "--share all" if share else "", more
            threads = "--threads 1" if where is not None else ""
            return timed(bench, folder_name(name), words(*flags, threads), where)

        logs = bench.in_turns(bench.plan.rounds, (False, True), run)
        found[place] = {
            share: (spread(map(step_ms, of)), joules(bench, of)) for share, of in logs.items()
        }
    return found


def joules(bench, logs):
    found = [last(log, "end").get("energy_j") for log in logs]
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


def against(bench, curves, costs):
    """candidate -> (its whole cost over from scratch's; from scratch's loss at that cost; the cost
    to from scratch's final loss, or None)."""
    real, told = elapsed(curves[REAL], 0, costs), {}
    for one in (*bench.switches, SHARED):
        mine = elapsed(curves[one], one.at(bench.steps), costs)
        reached, whole = reaches(mine, real[-1][1]), mine[-1][0]
        told[one] = whole / real[-1][0], value_at(real, whole), reached and reached / real[-1][0]
    return told


def reached_text(reached):
    return f"{reached:.2f}x" if reached else "not reached"


def time_table(bench, kind, place, curves, costs):
    rows = [
        [str(one), f"{whole:.2f}x", f"{curves[one][-1][1]:.4f}", f"{beside:.4f}",
         percent(curves[one][-1][1] / beside, 2), reached_text(reached)]
        for one, (whole, beside, reached) in against(bench, curves, costs).items()
    ]
    return markdown(
        [f"equal {kind}, {place}", f"{kind} of all steps, against real's", "loss then",
         "real from scratch, then", "against it", f"{kind} to real's final loss"],
        rows,
    )


def speed(bench):
    times, missing = speed_runs(bench), no_cluster()
    curves = {
        one: [(at[0][0], statistics.mean(loss for _, loss in at)) for at in zip(*by_seed)]
        for one, (_, by_seed) in quality_runs(bench).items()
    }
    text, lines = f"Slow link: left out: {missing}\n\n" if missing else "", []

    def cells(found):
        joule_texts = [
            "not measured" if joule is None else f"{joule:.2f}" for _, joule in found.values()
        ]
        return [*(ms.text("{:.1f}") for ms, _ in found.values()), *joule_texts]

    whose = "real: ", "shared: "
    header = ["place", *(of + "ms a step" for of in whose), *(of + JOULES for of in whose)]
    text += markdown(header, [[place, *cells(found)] for place, found in times.items()])
    for place, found in times.items():
        costs = {share: ms.median for share, (ms, _) in found.items()}
        text += time_table(bench, "time", place, curves, costs)
        goal = f" (goal {GOAL}x)" if place != "this machine" else ""
        lines.append(
            [f"time to real from scratch's final loss, {place}{goal}",
             "SWE: half the iterations for equal downstream quality",
             "; ".join(
                 f"{one}: {reached_text(reached)}"
                 for one, (_, _, reached) in against(bench, curves, costs).items()
             ),
             f"a shared step takes {costs[True] / costs[False]:.2f}x of a real one here, the"
             f" median of {bench.plan.rounds}"]
        )
        watts = {share: joule for share, (_, joule) in found.items()}
        if None not in watts.values():
            text += time_table(bench, "energy", place, curves, watts)
    if any(joule is None for found in times.values() for _, joule in found.values()):
        why = "/sys/class/powercap cannot be read here"
        lines.append(["loss against joules", "not reported", "not measured", why])
    draw(bench, curves, times)
    return text, lines


def draw(bench, curves, times):
    panels = {"steps": {False: 1, True: 1}}
    for place, found in times.items():
        panels[f"seconds, {place}"] = {share: ms.median / 1000 for share, (ms, _) in found.items()}

    def paint(axes):
        top = statistics.median(loss for _, loss in curves[REAL]) * 1.3
        for axis, (name, costs) in zip(axes, panels.items()):
            for one in (REAL, *bench.switches, SHARED):
                switch = one.at(bench.steps) if one.switch else 0
                axis.plot(*zip(*elapsed(curves[one], switch, costs)), label=str(one))
            axis.set(xlabel=name, ylabel="validation loss", ylim=(None, top))

    bench.draw("quality", paint, columns=len(panels))


# --------------------------------------------------------------------------------------------------
# The claim, and all of it: parts, each with what it will run at most

CLAIMS = (
    # Runs that share, then do not, over real from scratch, after equal measured seconds: the ratios
    # of all moments, by size of the model.
    Claim("M3", "better at equal time", ("equal seconds",), TIMED,
          lambda sizes: "loss"
          f" {span([100 * r - 100 for ratios in sizes.values() for r in ratios], '{:+.2f}')} %",
          met=lambda sizes: max(map(max, sizes.values())) < 1,
          partly=lambda sizes: min(map(min, sizes.values())) < 1),
)


def quality_count(bench):
    plan = bench.plan
    shared, real = (tuned_runs(plan, len(plan.rates[share])) for share in (True, False))
    return {"quality": real + (len(bench.switches) + 1) * shared}


def budget_count(bench):
    plan = bench.plan
    real = tuned_runs(plan, len(plan.rates[False]))
    ends = sum(len(plan.left) * tuned_runs(plan, len(of)) for of in plan.budgets.values())
    return {"quality": real, "budget": real + ends}


def speed_count(bench):
    places, slow = 2, not no_cluster()
    return {**quality_count(bench), "speed": 1 + slow + 2 * bench.plan.rounds * (places + slow)}


PAPER = Paper(
    name="pseudo",
    doc=__doc__,
    plans=PLANS,
    parts={
        "quality": (quality, quality_count),
        "budget": (budget, budget_count),
        "moments": (moments, lambda bench: {
            **quality_count(bench), "moments": 3 * tuned_runs(bench.plan, 1)}),
        "speed": (speed, speed_count),
        "clock": (pseudo_seconds.clock, pseudo_seconds.clock_count),
        "seconds": (pseudo_seconds.seconds, pseudo_seconds.seconds_count),
    },
    claims=CLAIMS,
    steps=True,
    bench=Bench,
)
