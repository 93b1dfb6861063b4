"""pseudo_seconds.py: the parts `clock` and `seconds` of pseudo.py: loss against measured seconds,
of runs that share for a part of their time, of training from scratch, and of sharing for ever. All
have the same seconds, so the cheaper steps are, the more there are of them."""

import statistics
from dataclasses import dataclass

from experiment import (
    markdown, no_cluster, percent, plans, sent_bytes, spread, step_ms, tuned_runs, turns, words,
)

RANKS = 4  # of the cluster: so many nodes with a rank each
SLOW = 3  # messages of the real model over that link, where its compute takes 1
SHARE = "4"  # blocks that use one storage
LINK, DISK = "slow link", "states on disk"
POINTS = 10  # validations of a run


# channels -> kind of a method -> learning rates; of two phases: while blocks share / later
RATES = {
    64: {
        "real": ("4e-3", "8e-3", "1.6e-2"),
        "both": ("2e-3/1e-3", "4e-3/2e-3", "8e-3/4e-3"),
        "shared": ("2e-3", "4e-3", "8e-3"),
    },
    128: {
        "real": ("1e-3", "2e-3", "4e-3", "8e-3"),
        "both": ("1e-3/5e-4", "2e-3/1e-3", "4e-3/2e-3", "8e-3/4e-3"),
        "shared": ("1e-3", "2e-3", "4e-3"),
    },
}
FEW = {"real": ("4e-3", "8e-3"), "both": ("4e-3/2e-3", "8e-3/4e-3"), "shared": ("4e-3", "8e-3")}
PLANS = plans(
    steps=({64: 1500}, {64: 1500, 128: 400}),  # channels -> steps of training from scratch
    moments=((0.7,), (0.1, 0.3, 0.5, 0.7, 0.9)),  # shares of the time in which blocks share
    tutors=({}, {0.1: 0.3, 0.5: 0.7, 0.9: 0.7}),  # a moment -> the one whose rates it takes
    rates=({64: FEW}, RATES),
    rounds=(1, 3),  # of timed runs, in turns
)


@dataclass(frozen=True)
class Method:
    """time: the share of the seconds in which blocks share. ratio: seconds of a step while blocks
    share, over those of a real one."""

    channels: int
    time: float
    ratio: float

    @property
    def optimizer(self):
        """Whose rates are tried (tuned())."""
        return {0: "real", 1: "shared"}.get(self.time, "both")

    def __str__(self):
        name = {0: "real from scratch", 1: "always shared"}.get(self.time)
        return name or f"shared for {100 * self.time:g} % of the time, then real"

    def steps(self, of_scratch):
        """While blocks share, and later."""
        return round(self.time / self.ratio * of_scratch), round((1 - self.time) * of_scratch)

    def flags(self, of_scratch):
        shared, real = self.steps(of_scratch)
        switch = f"--delink-at {shared}" if real else ""
        return f"--steps {shared + real}" + (f" --share {SHARE} {switch}" if shared else "")


# --------------------------------------------------------------------------------------------------
# Seconds of a step


def slow_link(log):
    """Words for a link that is slow for the run of the log, which had one without a limit."""
    return f"--rate {sent_bytes(log) * 8 / (step_ms(log) * SLOW) / 1000:.1f}mbit"


def timed(bench, name, flags, place=None):
    """The log of a timed run; place: words for the cluster, None: this machine alone."""
    train = words(flags, f"--steps {bench.plan.timed_steps} --val-every 0")
    if place is not None:
        train = words(bench.on_cluster(RANKS, place), train)
    return bench.run(name, train)


def on_disk(bench):
    """Flags of a real model all of whose optimizer states are on a disk."""
    folder = bench.into / "clock" / "disk"
    folder.mkdir(parents=True, exist_ok=True)
    return "--offload", "optimizer", "--offload-dir", folder


def clock_runs(bench):
    """(channels, place) -> {shared?: ms of a step, by round}."""
    found, slow = {}, not no_cluster()
    for channels in bench.seconds.steps:

        def run(name, share, more=(), place=None):
            flags = bench.train(channels), more, f"--share {SHARE}" if share else "", "--threads 1"
            return timed(bench, f"clock/{name}_{channels}", words(*flags), place)

        link = slow and slow_link(run("calibration", False, place=""))
        for round_, share in turns(bench.seconds.rounds, (False, True)):
            name = f"{'shared' if share else 'real'}_round{round_}"
            logs = {DISK: run(f"disk_{name}", share, () if share else on_disk(bench))}
            if link:
                logs[LINK] = run(f"link_{name}", share, place=link)
            for place, log in logs.items():
                times = found.setdefault((channels, place), {False: [], True: []})
                times[share].append(step_ms(log))
    return found


def ratio_of(times):
    """To two digits, so that the runs stay the same where it is measured again."""
    return round(statistics.median(times[True]) / statistics.median(times[False]), 2)


def clock(bench):
    rows = [
        [f"12 x {channels}", place,
         *(spread(times[share]).text("{:.1f}") for share in (False, True)),
         f"{ratio_of(times):.2f}"]
        for (channels, place), times in clock_runs(bench).items()
    ]
    rounds = bench.seconds.rounds
    ms = f"real: ms a step, median of {rounds}" if rounds > 1 else "real: ms a step, one timing"
    return markdown(["blocks x channels", "place", ms, f"--share {SHARE}", "ratio"], rows), []


# --------------------------------------------------------------------------------------------------
# Losses


def scratch_steps(bench, channels):
    return bench.options.steps or bench.seconds.steps[channels]


def curves_of(bench, channels, ratio):
    """Method -> (Tuned, [(step, loss) ...] by seed)."""
    plan, of_scratch = bench.seconds, scratch_steps(bench, channels)
    methods = {time: Method(channels, time, ratio) for time in (0, *plan.moments, 1)}
    part = f"seconds/{channels}"

    def command(one, rate, seed):
        shared, real = rate.split("/") if "/" in rate else (rate, rate)
        steps = sum(one.steps(of_scratch))
        return words(bench.train(channels), one.flags(of_scratch),
                     f"--lr {real} --lr-schedule wsd --warmup {steps // 10}",
                     f"--share-lr {shared}" if one.time else "",
                     f"--weight-decay 0.1 --threads 1 --seed {seed}",
                     f"--val-every {max(1, steps // POINTS)} --val-batches 40")

    chosen = [methods[time] for time in methods if time not in plan.tutors]
    found = bench.best(part, chosen, plan.rates[channels], command)
    for time, tutor in plan.tutors.items():
        rates = {"both": (found[methods[tutor]][0].rate,)}
        found |= bench.best(part, [methods[time]], rates, command)
    return {one: found[one] for one in methods.values()}


def seconds_of(one, step, of_scratch, times):
    """When a step ends."""
    shared, _ = one.steps(of_scratch)
    real, cheap = (statistics.median(times[share]) / 1000 for share in (False, True))
    return min(step, shared) * cheap + max(0, step - shared) * real


def table_of(channels, found, clocks, of_scratch):
    """clocks: place -> ms of steps there."""
    base = next(its.mean for one, (its, _) in found.items() if one.time == 0)

    def row(one, its):
        shared, real = one.steps(of_scratch)
        ends = (seconds_of(one, shared + real, of_scratch, times) for times in clocks.values())
        grid = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in its.grid.items())
        return [
            str(one), f"{shared} + {real}", *(f"{end:.1f}" for end in ends),
            grid if len(its.grid) > 1 else "", its.rate,
            " ".join(f"{loss:.4f}" for loss in its.scores), f"{its.mean:.4f}",
            percent(its.mean / base, 2),
        ]

    header = [f"12 x {channels}", "steps, shared + real", *("seconds, " + one for one in clocks)]
    header += ["first seed, by learning rate", "learning rate", "validation loss by seed", "mean"]
    rows = [row(one, its) for one, (its, _) in found.items()]
    return markdown([*header, "against real from scratch"], rows)


def seconds(bench):
    measured, text, lines, panels, told = clock_runs(bench), "", [], [], {}
    for channels in bench.seconds.steps:
        clocks = {place: times for (size, place), times in measured.items() if size == channels}
        place = LINK if LINK in clocks else DISK
        times, of_scratch = clocks[place], scratch_steps(bench, channels)
        found = curves_of(bench, channels, ratio_of(times))
        text += table_of(channels, found, clocks, of_scratch)
        base = next(its for one, (its, _) in found.items() if one.time == 0)
        means = {one: its.mean / base.mean for one, (its, _) in found.items() if 0 < one.time < 1}
        told[f"12 x {channels}"] = [*means.values()]
        lines.append(
            [f"loss at equal measured seconds, {place}, 12 blocks x {channels} channels",
             "curves not available",
             "; ".join(f"{one}: {percent(ratio, 2)}" for one, ratio in means.items()),
             f"a shared step takes {ratio_of(times):.2f} of a real one; {of_scratch} real steps"]
        )
        panels.append((f"12 x {channels}, {place}", found, times, of_scratch))
    bench.tell("equal seconds", told, min(len(bench.plan.seeds), bench.seconds.rounds))
    bench.draw("seconds", lambda axes: paint(axes, panels), columns=len(panels))
    return text, lines


def paint(axes, panels):
    for axis, (name, found, times, of_scratch) in zip(axes, panels):
        for one, (_, curves) in found.items():
            at = [seconds_of(one, step, of_scratch, times) for step, _ in curves[0]]
            losses = [*zip(*([loss for _, loss in curve] for curve in curves))]
            (line,) = axis.plot(at, [statistics.mean(each) for each in losses], label=str(one))
            low, high = [*map(min, losses)], [*map(max, losses)]
            axis.fill_between(at, low, high, color=line.get_color(), alpha=0.2)
        last = min(curve[-1][1] for _, curves in found.values() for curve in curves)
        axis.set(xlabel=f"seconds: {name}", ylabel="validation loss")
        axis.set(ylim=(last * 0.97, last * 1.4))


# --------------------------------------------------------------------------------------------------
# What the parts will run at most


def clock_count(bench):
    slow = not no_cluster()
    sizes = len(bench.seconds.steps)
    return {"clock": sizes * (slow + 2 * bench.seconds.rounds * (1 + slow))}


def seconds_count(bench):
    plan, runs = bench.seconds, 0
    for rates in plan.rates.values():
        for time in (0, *plan.moments, 1):
            tried = 1 if time in plan.tutors else len(rates[Method(0, time, 1).optimizer])
            runs += tuned_runs(bench.plan, tried)
    return {**clock_count(bench), "seconds": runs}
