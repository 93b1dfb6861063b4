"""pseudo_seconds.py: the parts `clock` and `seconds` of reproduce_pseudo.py: loss against measured
seconds, of runs that share for a part of their time, of training from scratch, and of sharing for
ever. All have the same seconds, so the cheaper steps are, the more there are of them."""

import statistics
import zlib
from dataclasses import dataclass

import reproduce_cyclic
from reproduce import markdown, percent
from reproduce_cyclic import (
    CLUSTER,
    WARMUP,
    found_events,
    last_validation,
    no_cluster,
    run_name,
    sent_bytes,
    step_ms,
    tuned,
)

RANKS = 4  # of the cluster: so many nodes with a rank each
SLOW = 3  # messages of the real model over that link, where its compute takes 1
SHARE = "4"  # blocks that use one storage
LINK, DISK = "slow link", "states on disk"
POINTS = 10  # validations of a run


@dataclass(frozen=True)
class SecondsPlan:
    """What --quick and --full differ in."""

    steps: dict  # channels of the model -> steps of training from scratch
    moments: tuple  # shares of the time in which blocks share
    tutors: dict  # a moment -> the one whose learning rates it takes
    # channels -> kind of a method -> learning rates that are tried; of two phases: while blocks
    # share / later
    rates: dict
    rounds: int  # of timed runs, in turns


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
PLANS = {
    "quick": SecondsPlan({64: 1500}, (0.7,), {}, {64: FEW}, 1),
    "full": SecondsPlan(
        {64: 1500, 128: 400},
        (0.1, 0.3, 0.5, 0.7, 0.9),
        {0.1: 0.3, 0.5: 0.7, 0.9: 0.7},
        RATES,
        3,
    ),
}


@dataclass(frozen=True)
class Method:
    """time: the share of the seconds in which blocks share. ratio: seconds of a step while blocks
    share, over those of a real one."""

    channels: int
    time: float
    ratio: float

    @property
    def optimizer(self):
        """Whose rates are tried (reproduce_cyclic.tuned)."""
        return {0: "real", 1: "shared"}.get(self.time, "both")

    def __str__(self):
        name = {0: "real from scratch", 1: "always shared"}.get(self.time)
        return name or f"shared for {100 * self.time:g} % of the time, then real"

    def steps(self, of_scratch):
        """While blocks share, and later."""
        return round(self.time / self.ratio * of_scratch), round((1 - self.time) * of_scratch)

    def flags(self, of_scratch):
        shared, real = self.steps(of_scratch)
        switch = ["--delink-at", shared] if real else []
        return ["--steps", shared + real, *(["--share", SHARE, *switch] if shared else [])]


# --------------------------------------------------------------------------------------------------
# Seconds of a step


def quota():
    """Of a core, in percent, that a rank of the cluster gets. A tenth is left to the kernel's side
    of the network and to mpirun."""
    return 90 // -(-RANKS // reproduce_cyclic.cores())


def slow_link(log):
    """Words for a link that is slow for the run of the log, which had one without a limit."""
    return ["--rate", f"{sent_bytes(log) * 8 / (step_ms(log) * SLOW) / 1000:.1f}mbit"]


def timed(bench, name, channels, share, *flags, cluster=None):
    """The log of a timed run; cluster: words for it, None: this machine alone."""
    train = [bench.options.program, *bench.data(), *bench.model(channels), *flags]
    train += ["--share", SHARE] if share else []
    train += ["--steps", bench.plan.timed_steps, "--val-every", 0, "--threads", 1]
    if cluster is not None:
        # of the folder as it is given, so that logs of another machine can be drawn here
        own = f"pseudo{zlib.crc32(str(bench.options.into).encode()):08x}"
        place = [f"{RANKS}x1", "--name", own, *cluster]
        train = [CLUSTER, *place, "--cpu", quota(), "--", *train]
    return bench.run(f"clock/{name}_{channels}", train)


def on_disk(bench, channels):
    """Flags of a real model all of whose optimizer states are on a disk."""
    folder = bench.options.into / "clock" / "disk"
    folder.mkdir(parents=True, exist_ok=True)
    return ["--offload", "optimizer", "--offload-dir", folder]


def clock_runs(bench):
    """(channels, place) -> {shared?: ms of a step, by round}."""
    found = {}
    for channels in bench.seconds.steps:
        link = None
        if not no_cluster():
            log = timed(bench, "calibration", channels, False, cluster=[])
            link = slow_link(log)
        for round_ in range(bench.seconds.rounds):
            for share in (False, True):
                word = f"{'shared' if share else 'real'}_round{round_}"
                flags = [] if share else on_disk(bench, channels)
                logs = {DISK: timed(bench, f"disk_{word}", channels, share, *flags)}
                if link:
                    logs[LINK] = timed(bench, f"link_{word}", channels, share, cluster=link)
                for place, log in logs.items():
                    times = found.setdefault((channels, place), {False: [], True: []})
                    times[share].append(step_ms(log))
    return found


def ratio_of(times):
    """To two digits, so that the runs stay the same where it is measured again."""
    return round(statistics.median(times[True]) / statistics.median(times[False]), 2)


def clock(bench):
    rows = [
        [
            f"12 x {channels}",
            place,
            *(" ".join(f"{ms:.1f}" for ms in times[share]) for share in (False, True)),
            f"{ratio_of(times):.2f}",
        ]
        for (channels, place), times in clock_runs(bench).items()
    ]
    shared = f"--share {SHARE}"
    header = ["blocks x channels", "place", "real: ms a step, by round", shared, "ratio"]
    return markdown(header, rows), []


# --------------------------------------------------------------------------------------------------
# Losses


def command(bench):
    def of(one, rate, seed):
        of_scratch = bench.options.steps or bench.seconds.steps[one.channels]
        shared, real = rate.split("/") if "/" in rate else (rate, rate)
        steps = sum(one.steps(of_scratch))
        return [
            *(bench.options.program, *bench.data(), *bench.model(one.channels)),
            *one.flags(of_scratch),
            *("--lr", real, "--lr-schedule", "wsd", "--warmup", steps // 10),
            *(["--share-lr", shared] if one.time else []),
            *("--weight-decay", 0.1, "--threads", 1, "--seed", seed),
            *("--val-every", max(1, steps // POINTS), "--val-batches", 40),
        ]

    return of


def curves_of(bench, channels, ratio):
    """Method -> (learning rate, grid, final losses by seed, [(step, loss) ...] by seed)."""
    plan, of = bench.seconds, command(bench)
    methods = {time: Method(channels, time, ratio) for time in (0, *plan.moments, 1)}
    part = f"seconds/{channels}"

    def reached(every, rates):
        return tuned(bench, part, every, rates, of, lambda log: last_validation(log)["loss"], min)

    chosen = [methods[time] for time in methods if time not in plan.tutors]
    found = reached(chosen, plan.rates[channels])
    for time, tutor in plan.tutors.items():
        found |= reached([methods[time]], {"both": (found[methods[tutor]].rate,)})

    def curve(one, seed):
        name = run_name(part, one, found[one].rate, seed)
        log = bench.run(name, of(one, found[one].rate, seed))
        return [(event["step"], event["loss"]) for event in found_events(log, "val")]

    return {
        one: (found[one], [curve(one, seed) for seed in bench.plan.seeds])
        for one in methods.values()
    }


def seconds_of(one, step, of_scratch, times):
    """When a step ends."""
    shared, _ = one.steps(of_scratch)
    real, cheap = (statistics.median(times[share]) / 1000 for share in (False, True))
    return min(step, shared) * cheap + max(0, step - shared) * real


def table_of(channels, found, clocks, of_scratch):
    """clocks: place -> ms of steps there."""
    base = next(its.mean for one, (its, _) in found.items() if one.time == 0)
    rows = []
    for one, (its, _) in found.items():
        shared, real = one.steps(of_scratch)
        grid = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in its.grid.items())
        rows.append(
            [
                str(one),
                f"{shared} + {real}",
                *(
                    f"{seconds_of(one, shared + real, of_scratch, times):.1f}"
                    for times in clocks.values()
                ),
                grid if len(its.grid) > 1 else "",
                its.rate,
                " ".join(f"{loss:.4f}" for loss in its.scores),
                f"{its.mean:.4f}",
                percent(its.mean / base, 2),
            ]
        )
    header = [
        f"12 x {channels}",
        "steps, shared + real",
        *("seconds, " + place for place in clocks),
        "first seed, by learning rate",
        "learning rate",
        "validation loss by seed",
        "mean",
        "against real from scratch",
    ]
    return markdown(header, rows)


def seconds(bench):
    measured, text, claims, panels = clock_runs(bench), "", [], []
    for channels in bench.seconds.steps:
        clocks = {place: times for (size, place), times in measured.items() if size == channels}
        place = LINK if LINK in clocks else DISK
        times = clocks[place]
        of_scratch = bench.options.steps or bench.seconds.steps[channels]
        found = curves_of(bench, channels, ratio_of(times))
        text += table_of(channels, found, clocks, of_scratch)
        base = next(its for one, (its, _) in found.items() if one.time == 0)
        means = {one: its.mean / base.mean for one, (its, _) in found.items() if 0 < one.time < 1}
        bench.found.setdefault("equal seconds", {})[f"12 x {channels}"] = [*means.values()]
        told = "; ".join(f"{one}: {percent(ratio, 2)}" for one, ratio in means.items())
        claims.append(
            [
                f"loss at equal measured seconds, {place}, 12 blocks x {channels} channels",
                "curves not available",
                told,
                f"a shared step takes {ratio_of(times):.2f} of a real one; {of_scratch} real steps",
            ]
        )
        panels.append((f"12 x {channels}, {place}", found, times, of_scratch))
    draw(bench, panels)
    return text, claims


def draw(bench, panels):
    def paint(axes):
        for axis, (name, found, times, of_scratch) in zip(axes, panels):
            for one, (_, curves) in found.items():
                at = [seconds_of(one, step, of_scratch, times) for step, _ in curves[0]]
                losses = [[loss for _, loss in curve] for curve in curves]
                (line,) = axis.plot(at, [statistics.mean(each) for each in zip(*losses)])
                line.set_label(str(one))
                low, high = [*map(min, zip(*losses))], [*map(max, zip(*losses))]
                axis.fill_between(at, low, high, color=line.get_color(), alpha=0.2)
            last = [curve[-1][1] for _, curves in found.values() for curve in curves]
            axis.set(xlabel=f"seconds: {name}", ylabel="validation loss")
            axis.set(ylim=(min(last) * 0.97, min(last) * 1.4))
        axes[0].legend()

    bench.draw("seconds", len(panels), paint)


# --------------------------------------------------------------------------------------------------
# What the parts will run at most


def clock_count(bench):
    slow = not no_cluster()
    sizes = len(bench.seconds.steps)
    return {"clock": sizes * (slow + 2 * bench.seconds.rounds * (1 + slow))}


def seconds_count(bench):
    plan, others = bench.seconds, len(bench.plan.seeds) - 1
    chosen = [0, 1, *(time for time in plan.moments if time not in plan.tutors)]
    runs = len(plan.steps) * (len(plan.tutors) + others * (len(plan.moments) + 2))
    for rates in plan.rates.values():
        runs += sum(len(rates[Method(0, time, 1).optimizer]) for time in chosen)
    return {**clock_count(bench), "seconds": runs}
