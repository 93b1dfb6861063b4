"""experts.py: mixtures of experts at the ratios of M6-10T (arXiv 2110.03888).

    scripts/reproduce_experts.sh --quick | --full [--part PART ...] [--steps N] [--into FOLDER]
    [--program FILE]

forecast  the paper's own model (--model m6:10T) on its 512 V100 of 32 GB: shared and real, with
          and without offload, and a dense model of as much arithmetic: memory of a GPU and of its
          host, traffic, days; its arithmetic beside GPT-3's.
losses    a model at the paper's ratios on two ranks: two prototypes with top 1 each, experts of
          9.75 times the channels, nearly all parameters in experts. Dense (of as much arithmetic a
          token), experts from scratch, shared (--share all), and shared for half of the steps, then
          real: validation losses at equal tokens, each at the best of the same learning rates. What
          all-to-all was forecast to send, for even loads, and sent.
time      experts against dense at equal time: step times, in turns, one run at a time, and the
          losses of the same runs after as many steps as have room in the same seconds. What a busy
          machine gave can be measured again: remove FOLDER/time, and give --part time.
cluster   the first seed's runs once more, on two emulated nodes of one rank (cluster.sh) and a link
          of 200 Mbit/s, so that experts live on both nodes: the same losses, what a node sends, and
          losses at equal time where all-to-all is slow.

--quick takes 7 minutes on 2 quiet cores: one seed, which also chooses the rate; --full some hours:
three seeds, and another one that chooses. --steps replaces the number of steps.
"""

import math
import statistics

import experiment
from experiment import (
    COUNTED, FORECAST, MIB, SEEDS, WARMUP, Claim, Paper, data_flags, folder_name, last, local_ranks,
    loss_curve, markdown, percent, plans, sent_bytes, span, step_ms, tuned_to_edges, value_at,
    words,
)

GIB = 1 << 30
DENSE, EXPERTS, SHARED, DELINKED = "dense", "experts", "shared", "shared, then real"
METHODS = DENSE, EXPERTS, SHARED, DELINKED
WIDTH = 9.75  # of an expert, in channels
T, BATCH, RANKS = 128, 2048, 2
MOST_RATES = 6  # with those that are added because the best is at an edge


PLANS = plans(
    channels=(32, 64),
    steps=(200, 1000),
    rates=((4, 8), (2, 4, 8)),  # in thousandths, that tuning begins with
    seeds=((1,), (2, 3, 4)),
    timed_steps=(WARMUP + 12, WARMUP + 20),
    rounds=(2, 5),
)
COUNT, TUNING = 32, 1  # experts; the seed that chooses the rate


class Bench(experiment.Bench):
    def model(self, method):
        width = int(WIDTH * self.plan.channels)
        mlp = f"experts={COUNT},prototypes=2,expert_ffn={width}"
        return f"arch=llama,layers=4,heads=4,channels={self.plan.channels},vocab=256," + (
            f"ffn={2 * width}" if method == DENSE else mlp
        )

    def command(self, method, rate, seed, steps, every, start=None):
        """every: steps between validations; 0: none. start: what starts the ranks."""
        return words(start or local_ranks(RANKS), self.program, data_flags(),
                     f"--model {self.model(method)} --seq-len {T} --batch-tokens {BATCH}",
                     f"--micro-batch {BATCH // T // RANKS} --threads 1 --zero 1",
                     f"--steps {steps} --lr {rate_text(rate)} --lr-schedule constant",
                     f"--warmup {max(1, self.steps // 20)} --seed {seed}",
                     f"--val-every {every} --val-batches 16",
                     f"--moe-balance bias --expert-parallel {RANKS}" if method != DENSE else "",
                     "--share all" if method in (SHARED, DELINKED) else "",
                     f"--delink-at {self.steps // 2}" if method == DELINKED else "")


# --------------------------------------------------------------------------------------------------
# Forecasts of the paper's own model

TOKENS = 4e9  # 16 GB of text, M6-10T's data
PAPER_DAYS, GPT3_TOKENS = 10, 300e9
GPUS = 512
V100 = "--cluster 64x8,gpu=v100 --dtype bf16"
ON = f"{V100} --seq-len 512 --batch-tokens 2097152 --recompute block --micro-batch 4"
HOST = "--device-memory 31G --host-memory 400G"
M6 = f"--model m6:10T --expert-parallel {GPUS} --moe-buffer 1.25"
ACTIVE = "arch=llama,layers=48,channels=1024,heads=16,ffn=532480,vocab=21128,positions=512"
REAL = "real, offload as the device needs it"
FORECASTS = {
    "shared": f"{M6} --share all --zero 1",
    "shared, its optimizer on the host": f"{M6} --share all --offload optimizer",
    "real, without offload": f"{M6} --offload none",
    REAL: f"{M6} {HOST}",
    "dense, as much arithmetic a token": f"--model {ACTIVE} --zero 3 {HOST}",
}
GPT3 = f"--model gpt3:175B {V100} --zero 3 --seq-len 2048 --micro-batch 1 --recompute block"


def arithmetic(found):
    """Operations for a token."""
    predicted = found["predicted"]
    return predicted["tflops"] * 1e12 * GPUS / predicted["tokens_per_s"]


def days_of(found):
    return TOKENS / found["predicted"]["tokens_per_s"] / 86400 if found else math.inf


def row(name, found):
    if not found:
        return [name, "no room", *[""] * 6]
    predicted = found["predicted"]
    room = "" if predicted["fits"] else ": no room"
    moved = predicted.get("offload", {"bytes": 0, "in": 0, "out": 0})
    gib = moved["bytes"], moved["in"] + moved["out"], sum(predicted["traffic"]["total"].values())
    return [
        name, f"{found['parameters'] / 1e9:.0f} G",
        f"{predicted['memory']['device'] / GIB:.1f}{room}",
        *(f"{bytes_ / GIB:.0f}" for bytes_ in gib),
        f"{predicted['step_ms'] / 1000:.1f}", f"{days_of(found):.1f}",
    ]


def forecast(bench):
    found = {name: bench.forecast(name, ON, flags)[0] for name, flags in FORECASTS.items()}
    ours, gpt3 = found["shared"], bench.forecast("GPT-3", GPT3)[0]
    days = days_of(ours), days_of(found[REAL])
    a_token = arithmetic(ours)
    share = a_token * TOKENS / (arithmetic(gpt3) * GPT3_TOKENS)
    of_size = a_token / (6 * ours["parameters"] * 48)  # shared: a 48th of the real model's
    bench.tell("m6", (*days, bool(found[REAL] and found[REAL]["predicted"]["fits"])))
    bench.tell("arithmetic", (share, of_size))
    header = ["forecast: M6-10T on 512 V100", "parameters", "device, GiB", "host, GiB a rank"]
    header += ["moved a step, GiB", "sent a step by a rank, GiB", "step, s", "days for 4 G tokens"]
    return markdown(header, [row(*item) for item in found.items()]), [
        ["10T parameters on 512 GPUs", f"{PAPER_DAYS} days",
         f"forecast: {days[0]:.1f} days shared, {days[1]:.1f} real",
         "loads at most 1.25 times the mean; docs/results/experts.md has more"],
        ["operations of its training, of GPT-3's", "energy: about 1 % (second-hand)",
         f"{100 * share:.2g} %; {100 * of_size:.2g} % of a dense model of its size",
         f"counted for 4 G tokens and {GPT3_TOKENS / 1e9:.0f} G; no energy was measured"],
    ]


# --------------------------------------------------------------------------------------------------
# Losses at equal tokens


def curve(log):
    """(step, validation loss); of a run that diverged infinite."""
    return [(step, math.inf if loss is None else float(loss)) for step, loss in loss_curve(log)]


def train(bench, method, rate, seed):
    every = max(1, bench.steps // 10)
    name = folder_name(f"losses/{method}_lr_{rate_text(rate)}_seed_{seed}")
    return bench.run(name, bench.command(method, rate, seed, bench.steps, every))


def rate_text(rate):
    return f"{rate:g}e-3"


def find_losses(bench):
    """Sets of the bench: tried (method -> rate -> loss), rates (method -> the best), logs ((method,
    seed) -> log)."""
    if hasattr(bench, "logs"):
        return

    def losses_of(settings):
        return {one: curve(train(bench, *one[:2], TUNING))[-1][1] for one in settings}

    begin = [(method, rate, None) for method in METHODS for rate in bench.plan.rates]
    grids = tuned_to_edges(begin, losses_of, MOST_RATES)
    bench.tried = {
        method: {rate: loss for (rate, _), loss in grid.items()} for method, grid in grids.items()
    }
    bench.rates = {method: min(grid, key=grid.get) for method, grid in bench.tried.items()}
    bench.logs = {
        (method, seed): train(bench, method, bench.rates[method], seed)
        for method in METHODS
        for seed in bench.plan.seeds
    }


def all_to_all(log):
    """(forecast, sent) bytes of a step."""
    traffic = last(log, "end")["traffic"]
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
    bench.tell("delinked", list(zip(half, ends[DELINKED])), len(seeds))
    mean = {method: statistics.mean(found) for method, found in ends.items()}
    sent = [all_to_all(bench.logs[EXPERTS, seed]) for seed in seeds]

    def row_of(method):
        grid = sorted(bench.tried[method].items())
        return [
            method, ", ".join(f"{rate_text(rate)}: {loss:.4f}" for rate, loss in grid),
            rate_text(bench.rates[method]), " ".join(f"{loss:.4f}" for loss in ends[method]),
            percent(mean[method] / mean[DENSE], 2),
        ]

    header = ["method", "rate: loss of the seed that chooses", "at", "loss by seed"]
    return markdown([*header, "against dense"], list(map(row_of, METHODS))), [
        [f"loss after {bench.steps} steps of {BATCH} tokens, against dense", "no figure",
         "; ".join(f"{m}: {percent(mean[m] / mean[DENSE], 2)}" for m in METHODS[1:]),
         f"{bench.model(EXPERTS)}; {len(seeds)} seed(s)"],
        ["bytes of all-to-all, sent against forecast", "no figure",
         span([b / a for a, b in sent], "{:.3f}") + "x", "the forecast is that of even loads"],
    ]


# --------------------------------------------------------------------------------------------------
# Losses at equal time


def equal_time(bench):
    find_losses(bench)
    plan = bench.plan

    def timed_log(method, round_):
        command = bench.command(method, bench.rates[method], 1, plan.timed_steps, 0)
        return bench.run(f"time/{method}_round{round_}", command)

    ms = bench.times_in_turns(plan.rounds, (DENSE, EXPERTS), timed_log)
    seconds = bench.steps * min(of.median for of in ms.values())
    found = [
        value_at(curve(bench.logs[EXPERTS, seed]), seconds / ms[EXPERTS].median)
        / value_at(curve(bench.logs[DENSE, seed]), seconds / ms[DENSE].median)
        for seed in plan.seeds
    ]
    rows = [[m, ms[m].text("{:.1f}"), f"{seconds / ms[m].median:.0f}"] for m in ms]
    return markdown(["method", "ms a step", "steps in the same time"], rows), [
        ["loss at equal time, experts against dense, by seed", "nanochat: a loss at small size",
         ", ".join(percent(one, 2) for one in found),
         f"a step takes {ms[EXPERTS].median / ms[DENSE].median:.2f} of a dense one, the median"
         f" of {plan.rounds} rounds"]
    ]


# --------------------------------------------------------------------------------------------------
# On an emulated cluster: experts live on two nodes

LINK = "200mbit"


def on_cluster(bench):
    find_losses(bench)
    start = bench.on_cluster(RANKS, f"--rate {LINK}")
    steps, seed, every = bench.steps, bench.plan.seeds[0], max(1, bench.steps // 10)
    logs = {}
    for method in METHODS:
        command = bench.command(method, bench.rates[method], seed, steps, every, start)
        logs[method] = bench.run(folder_name(f"cluster/{method}"), command)
    ms = {method: step_ms(log) for method, log in logs.items()}
    seconds = steps * min(ms.values())
    ends = {m: value_at(curve(log), seconds / ms[m]) for m, log in logs.items()}
    apart = max(
        abs(curve(logs[method])[-1][1] / curve(bench.logs[method, seed])[-1][1] - 1)
        for method in METHODS
    )

    def row_of(method):
        log, (forecast_, sent) = logs[method], all_to_all(logs[method])
        return [
            method, f"{curve(log)[-1][1]:.4f}", f"{ms[method]:.1f}",
            *(f"{of / MIB:.2f}" for of in (sent_bytes(log), forecast_, sent)),
            percent(ends[method] / ends[DENSE], 2),
        ]

    header = [f"on nodes of one rank, {LINK}", f"loss after {steps} steps", "ms a step"]
    header += ["MiB a node sends a step", "all-to-all: forecast", "sent", "loss at equal time"]
    return markdown(header, list(map(row_of, METHODS))), [
        ["loss on the cluster and on one machine, largest relative difference", "no figure",
         f"{apart:.1e}", "the same runs, whose messages take another way"]
    ]


# --------------------------------------------------------------------------------------------------
# The claims, and all of it

CLAIMS = (
    # A forecast of the paper's own model: it says nothing of the speed of machines.
    Claim(
        "M1", "10 days for 10T", ("m6",), FORECAST,
        lambda m6: f"{m6[0]:.1f} days shared, {m6[1]:.1f} real, {'fits' if m6[2] else 'no room'}",
    ),
    # Of experts: those that shared go on from where they were.
    Claim("M2", "any sequential layers", ("delinked",), SEEDS,
          lambda found: f"experts, {found[0][0]:.3f} shared, {found[0][1]:.3f} at the end",
          met=lambda found: all(end < half for half, end in found)),
    # Arithmetic that is counted stands for energy.
    Claim("M5", "about 1 % of GPT-3's", ("arithmetic",), COUNTED,
          lambda shares: f"{100 * shares[0]:.2g} % of its operations",
          partly=lambda shares: max(shares) <= 0.02),
)


def losses_count(bench):
    plan = bench.plan
    told = [seed for seed in plan.seeds if seed != TUNING]
    return {"losses": len(METHODS) * (len(plan.rates) + 1 + len(told))}


PAPER = Paper(
    name="experts",
    doc=__doc__,
    plans=PLANS,
    parts={
        "forecast": (forecast, lambda bench: {"forecasts": len(FORECASTS) + 1}),
        "losses": (losses, losses_count),
        "time": (equal_time, lambda bench: {**losses_count(bench), "time": 2 * bench.plan.rounds}),
        "cluster": (on_cluster, lambda bench: {**losses_count(bench), "cluster": len(METHODS)},
                    "Cluster"),
    },
    claims=CLAIMS,
    steps=True,
    bench=Bench,
)
