#!/usr/bin/env python3
"""reproduce_experts.py: mixtures of experts at the ratios of M6-10T (arXiv 2110.03888).

    scripts/reproduce_experts.sh --quick | --full [--part PART ...] [--steps N] [--into FOLDER]
    [--program FILE]

forecast  the paper's own model (--model m6:10T) on its 512 V100 of 32 GB: shared and real, with
          and without offload, and a dense model of as much arithmetic: memory of a GPU and of its
          host, traffic, days; its arithmetic beside GPT-3's.
losses    a model at the paper's ratios on two ranks: two prototypes with top 1 each, experts of
          9.75 times the channels, nearly all parameters in experts. Dense (of as much arithmetic a
          token), experts from scratch, shared (--share all), and shared for half of the steps,
          then real: validation losses at equal tokens, each at the best of the same learning
          rates. What all-to-all was forecast to send, for even loads, and sent.
time      experts against dense at equal time: step times, in turns, one run at a time, and the
          losses of the same runs after as many steps as have room in the same seconds. What a busy
          machine gave can be measured again: remove FOLDER/time, and give --part time.

--quick takes 5 minutes on 2 quiet cores: one seed, which also chooses the rate; --full some hours:
three seeds, and another one that chooses. --steps replaces the number of steps. FOLDER (default:
out/experts_quick or out/experts_full) gets a folder for each run, with log.jsonl and output.txt,
and the tables as table.md. The same command goes on where it was stopped: what is there is not run
again.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import bisect
import json
import math
import statistics
import sys
from dataclasses import dataclass

import reproduce_cyclic
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
from reproduce_cyclic import found_events, step_ms

GIB = 1 << 30
DENSE, EXPERTS, SHARED, DELINKED = "dense", "experts", "shared", "shared, then real"
METHODS = DENSE, EXPERTS, SHARED, DELINKED
WIDTH = 9.75  # of an expert, in channels
T, BATCH, RANKS = 128, 2048, 2
MOST_RATES = 6  # with those that are added because the best is at an edge


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in."""

    channels: int
    experts: int
    steps: int
    rates: tuple  # in thousandths, that tuning begins with
    tuning: int  # the seed that chooses the rate
    seeds: tuple
    timed_steps: int
    rounds: int


PLANS = {
    "quick": Plan(32, 32, 200, (4, 8), 1, (1,), reproduce_cyclic.WARMUP + 12, 2),
    "full": Plan(64, 32, 1000, (2, 4, 8), 1, (2, 3, 4), reproduce_cyclic.WARMUP + 20, 5),
}


class Bench(reproduce_cyclic.Bench):
    def __init__(self, options):
        super().__init__(options, PLANS)
        self.steps = options.steps or self.plan.steps

    def model(self, method):
        width = int(WIDTH * self.plan.channels)
        mlp = f"experts={self.plan.experts},prototypes=2,expert_ffn={width}"
        return f"arch=llama,layers=4,heads=4,channels={self.plan.channels},vocab=256," + (
            f"ffn={2 * width}" if method == DENSE else mlp
        )

    def command(self, method, rate, seed, steps, every):
        """every: steps between validations; 0: none."""
        shares = ("--share", "all") if method in (SHARED, DELINKED) else ()
        return [
            *("mpirun", "--oversubscribe", "--bind-to", "none", "-np", RANKS),
            *(self.options.program, "--train", f"{TEXT}_train_*.bin", "--val", f"{TEXT}_val_*.bin"),
            *("--model", self.model(method), "--seq-len", T, "--batch-tokens", BATCH),
            *("--micro-batch", BATCH // T // RANKS, "--threads", 1, "--zero", 1),
            *("--steps", steps, "--lr", rate_text(rate), "--lr-schedule", "constant"),
            *("--warmup", max(1, self.steps // 20), "--seed", seed),
            *("--val-every", every, "--val-batches", 16),
            *(("--moe-balance", "bias", "--expert-parallel", RANKS) if method != DENSE else ()),
            *shares,
            *(("--delink-at", self.steps // 2) if method == DELINKED else ()),
        ]

    def ask(self, name, *flags):
        """What a forecast says; None: there is no room."""
        output = self.options.into / f"forecast_{name}.txt".replace(" ", "_").replace(",", "")
        words = [self.options.program, "--dry-run", "--json", *map(str, flags)]
        status = self.runner.run(words, output)
        text = output.read_text(errors="replace")
        if status == EXIT_RESOURCES:
            return None
        if status:
            raise Failed(EXIT_FAILED, f"{name}: exit status {status}: {text.strip()[-300:]}")
        return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


# --------------------------------------------------------------------------------------------------
# Forecasts of the paper's own model

TOKENS = 4e9  # 16 GB of text, M6-10T's data
PAPER_DAYS, GPT3_TOKENS = 10, 300e9
GPUS = 512
ON = ("--cluster", "64x8,gpu=v100", "--dtype", "bf16", "--seq-len", 512, "--batch-tokens", 2097152)
ON += ("--recompute", "block", "--micro-batch", 4)
M6 = ("--model", "m6:10T", "--expert-parallel", GPUS, "--moe-buffer", 1.25)
ACTIVE = "arch=llama,layers=48,channels=1024,heads=16,ffn=532480,vocab=21128,positions=512"
HOST = ("--device-memory", "31G", "--host-memory", "400G")
FORECASTS = {
    "shared": (*M6, "--share", "all", "--zero", 1),
    "shared, its optimizer on the host": (*M6, "--share", "all", "--offload", "optimizer"),
    "real, without offload": (*M6, "--offload", "none"),
    "real, offload as the device needs it": (*M6, *HOST),
    "dense, as much arithmetic a token": ("--model", ACTIVE, "--zero", 3, *HOST),
}
REAL = "real, offload as the device needs it"


def arithmetic(found, ranks):
    """Operations for a token."""
    predicted = found["predicted"]
    return predicted["tflops"] * 1e12 * ranks / predicted["tokens_per_s"]


def forecast(bench):
    lines, days, fits = [], {}, {}
    for name, flags in FORECASTS.items():
        found = bench.ask(name, *ON, *flags)
        fits[name] = bool(found and found["predicted"]["fits"])
        if not found:
            lines.append([name, "no room", *[""] * 6])
            continue
        predicted = found["predicted"]
        memory, traffic = predicted["memory"], predicted["traffic"]
        moved = predicted.get("offload", {"bytes": 0, "in": 0, "out": 0})
        days[name] = TOKENS / predicted["tokens_per_s"] / 86400
        lines.append(
            [
                name,
                f"{found['parameters'] / 1e9:.0f} G",
                f"{memory['device'] / GIB:.1f}" + ("" if fits[name] else ": no room"),
                f"{moved['bytes'] / GIB:.0f}",
                f"{(moved['in'] + moved['out']) / GIB:.0f}",
                f"{sum(traffic['total'].values()) / GIB:.0f}",
                f"{predicted['step_ms'] / 1000:.1f}",
                f"{days[name]:.1f}",
            ]
        )
    ours = bench.ask("arithmetic", *ON, *M6, "--share", "all", "--zero", 1)
    gpt3 = bench.ask(
        "GPT-3",
        *("--model", "gpt3:175B", "--cluster", "64x8,gpu=v100", "--dtype", "bf16", "--zero", 3),
        *("--seq-len", 2048, "--micro-batch", 1, "--recompute", "block"),
    )
    a_token = arithmetic(ours, GPUS)
    share = a_token * TOKENS / (arithmetic(gpt3, GPUS) * GPT3_TOKENS)
    of_size = a_token / (6 * ours["parameters"] * 48)  # shared: a 48th of the real model's
    bench.found["m6"] = days.get("shared", math.inf), days.get(REAL, math.inf), fits[REAL]
    bench.found["arithmetic"] = share, of_size
    text = markdown(
        [
            "M6-10T on 512 V100",
            "parameters",
            "device, GiB",
            "host, GiB a rank",
            "moved a step, GiB",
            "sent a step by a rank, GiB",
            "step, s",
            "days for 4 G tokens",
        ],
        lines,
    )
    return text, [
        [
            "10T parameters on 512 GPUs",
            f"{PAPER_DAYS} days",
            f"{days.get('shared', math.inf):.1f} days shared,"
            f" {days.get(REAL, math.inf):.1f} real",
            "forecasts, loads at most 1.25 times the mean; docs/results/experts.md has more",
        ],
        [
            "operations of its training, of GPT-3's",
            "energy: about 1 % (second-hand)",
            f"{100 * share:.2g} %; {100 * of_size:.2g} % of a dense model of its size",
            f"counted for 4 G tokens and {GPT3_TOKENS / 1e9:.0f} G; no energy was measured",
        ],
    ]


# --------------------------------------------------------------------------------------------------
# Losses at equal tokens


def curve(log):
    """(step, validation loss); of a run that diverged infinite."""
    events = found_events(log, "val")
    return [
        (event["step"], math.inf if event["loss"] is None else float(event["loss"]))
        for event in events
    ]


def train(bench, method, rate, seed):
    name = f"losses/{method}_lr_{rate_text(rate)}_seed_{seed}".replace(", ", "_").replace(" ", "_")
    every = max(1, bench.steps // 10)
    return bench.run(name, bench.command(method, rate, seed, bench.steps, every))


def rate_text(rate):
    return f"{rate:g}e-3"


def beyond(grid):
    """The rate that a grid (rate -> loss) lacks because its best one is at an edge, if any."""
    best, rates = min(grid, key=grid.get), sorted(grid)
    if len(rates) >= MOST_RATES or best not in (rates[0], rates[-1]):
        return ()
    return (best / 2,) if best == rates[0] else (best * 2,)


def find_losses(bench):
    """Sets of the bench: rates (method -> the best), logs ((method, seed) -> log)."""
    if hasattr(bench, "logs"):
        return
    plan = bench.plan
    bench.tried, wanted = {method: {} for method in METHODS}, {m: plan.rates for m in METHODS}
    while any(wanted.values()):
        for method, rates in wanted.items():
            for rate in rates:
                log = train(bench, method, rate, plan.tuning)
                bench.tried[method][rate] = curve(log)[-1][1]
            wanted[method] = beyond(bench.tried[method])
    bench.rates = {method: min(grid, key=grid.get) for method, grid in bench.tried.items()}
    bench.logs = {
        (method, seed): train(bench, method, bench.rates[method], seed)
        for method in METHODS
        for seed in plan.seeds
    }


def all_to_all(log):
    """(forecast, sent) bytes of a step."""
    traffic = found_events(log, "end")[-1]["traffic"]
    return tuple(
        sum(traffic[side][link].get("all_to_all", 0) for link in ("intra", "inter"))
        for side in ("predicted", "measured")
    )


def losses(bench):
    find_losses(bench)
    seeds = bench.plan.seeds
    ends = {m: [curve(bench.logs[m, seed])[-1][1] for seed in seeds] for m in METHODS}
    middle = [dict(curve(bench.logs[DELINKED, seed])) for seed in seeds]
    half = [min(found.items(), key=lambda at: abs(at[0] - bench.steps // 2))[1] for found in middle]
    bench.found["delinked"] = list(zip(half, ends[DELINKED]))
    mean = {method: statistics.mean(found) for method, found in ends.items()}
    sent = [all_to_all(bench.logs[EXPERTS, seed]) for seed in seeds]
    text = markdown(
        ["method", "rate: loss of the seed that chooses", "at", "loss by seed", "against dense"],
        [
            [
                method,
                ", ".join(
                    f"{rate_text(rate)}: {loss:.4f}"
                    for rate, loss in sorted(bench.tried[method].items())
                ),
                rate_text(bench.rates[method]),
                " ".join(f"{loss:.4f}" for loss in ends[method]),
                percent(mean[method] / mean[DENSE], 2),
            ]
            for method in METHODS
        ],
    )
    return text, [
        [
            f"loss after {bench.steps} steps of {BATCH} tokens, against dense",
            "no figure",
            "; ".join(f"{m}: {percent(mean[m] / mean[DENSE], 2)}" for m in METHODS[1:]),
            f"{bench.model(EXPERTS)}; {len(seeds)} seed(s)",
        ],
        [
            "bytes of all-to-all, sent against forecast",
            "no figure",
            span([b / a for a, b in sent], "{:.3f}") + "x",
            "the forecast is that of even loads",
        ],
    ]


# --------------------------------------------------------------------------------------------------
# Losses at equal time


def loss_at(points, step):
    """Between two validations: linear."""
    at = bisect.bisect_left([s for s, _ in points], step)
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (a, low), (b, high) = points[at - 1 : at + 1]
    return low + (high - low) * (step - a) / (b - a)


def equal_time(bench):
    find_losses(bench)
    plan, times = bench.plan, {DENSE: [], EXPERTS: []}
    for round_ in range(plan.rounds):
        for method, found in times.items():
            command = bench.command(method, bench.rates[method], 1, plan.timed_steps, 0)
            found.append(step_ms(bench.run(f"time/{method}_round{round_}", command)))
    ms = {method: min(found) for method, found in times.items()}
    seconds = bench.steps * min(ms.values())
    found = [
        loss_at(curve(bench.logs[EXPERTS, seed]), seconds / ms[EXPERTS])
        / loss_at(curve(bench.logs[DENSE, seed]), seconds / ms[DENSE])
        for seed in plan.seeds
    ]
    bench.found["equal time"] = found
    text = markdown(
        ["method", "ms a step by round", "steps in the same time"],
        [
            [m, " ".join(f"{one:.1f}" for one in times[m]), f"{seconds / ms[m]:.0f}"]
            for m in times
        ],
    )
    return text, [
        [
            "loss at equal time, experts against dense, by seed",
            "nanochat: a loss at small size",
            ", ".join(percent(one, 2) for one in found),
            f"a step takes {ms[EXPERTS] / ms[DENSE]:.2f} of a dense one, the lowest median of"
            f" {plan.rounds} rounds",
        ]
    ]


# --------------------------------------------------------------------------------------------------
# The claims, and all of it

CLAIMS = (
    # A forecast of the paper's own model: it says nothing of the speed of machines.
    Claim(
        "M1",
        "10 days for 10T",
        ("m6",),
        lambda m6: f"forecast: {m6[0]:.1f} days shared, {m6[1]:.1f} real,"
        f" {'fits' if m6[2] else 'no room'}",
    ),
    # Of experts: those that shared go on from where they were.
    Claim(
        "M2",
        "any sequential layers",
        ("delinked",),
        lambda found: f"experts, {found[0][0]:.3f} shared, {found[0][1]:.3f} at the end",
        met=lambda found: all(end < half for half, end in found),
    ),
    # Arithmetic that is counted stands for energy.
    Claim(
        "M5",
        "about 1 % of GPT-3's",
        ("arithmetic",),
        lambda shares: f"{100 * shares[0]:.2g} % of its operations",
        partly=lambda shares: max(shares) <= 0.02,
    ),
)


def losses_count(bench):
    plan = bench.plan
    told = [seed for seed in plan.seeds if seed != plan.tuning]
    return {"losses": len(METHODS) * (len(plan.rates) + 1 + len(told))}


PARTS = {
    "forecast": (forecast, lambda bench: {}),
    "losses": (losses, losses_count),
    "time": (equal_time, lambda bench: {**losses_count(bench), "time": 2 * bench.plan.rounds}),
}


def main():
    options = parts_options(
        parts_parser("reproduce_experts", __doc__, PLANS, PARTS), "reproduce_experts"
    )
    return reproduce_parts("reproduce_experts", Bench(options), PARTS, CLAIMS)


if __name__ == "__main__":
    sys.exit(main())
