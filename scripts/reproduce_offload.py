#!/usr/bin/env python3
"""reproduce_offload.py: granular offloading (M6-10T, arXiv 2110.03888): what of a run lies on the
host, by a budget in bytes, and what that costs.

    scripts/reproduce_offload.sh --quick | --full [--part PART ...] [--into FOLDER] [--program FILE]

budgets      step time against --device-memory, from what the run takes that fits down to the
             smallest that runs, updated by the host and by the
             device, and beside all-or-nothing offload (--offload optimizer, params, all); for each
             number of tokens in a step. Losses and norms of all of them must be those of the run
             that fits, and what was forecast what was measured.
largest      the largest model (blocks) that the forecast lets in at each device budget: without
             offload, with all optimizer states on the host,
             and with a budget; the largest of them runs two steps.
utilisation  how much of a step's time goes to forward and backward passes, from the start of the
             step to its end (--trace).
scale        forecasts for dense GPTs of 1T and 10T parameters on 512 ranks of 32 GB, shared and
             real: bytes of each tier, what moves, days; and
             a real run of 4 ranks whose states are ten times what their device budgets sum up to.

On the processor's build the device is the same memory with a budget, and moving is copying: its
ratios say what a memory copy costs, not a PCIe link. --quick takes less than 5 minutes on 2 quiet
cores; --full less than two hours. FOLDER (default: out/offload_quick or out/offload_full) gets a
folder for each run, with log.jsonl and output.txt, the tables as table.md, budgets.png and
utilisation.png. The same command goes on where it was stopped: what is there is not run again.
Ctrl-C leaves no process.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import itertools
import json
import re
import sys
from dataclasses import dataclass

import reproduce_cyclic
from plot import MIB
from reproduce import (
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_RESOURCES,
    TEXT,
    Claim,
    Failed,
    markdown,
    parts_options,
    parts_parser,
    reproduce_parts,
    span,
)
from reproduce_cyclic import WARMUP, found_events, step_ms

FITS, HALF = "fits", 0.55
HOST, DEVICE = "host", "device"  # who updates
ALL_OR_NOTHING = ("optimizer", "params", "all")
MICRO = 4, 128  # sequences, and tokens of each
SHAPE = "heads=4,channels=256,vocab=256"
MODEL = f"layers=12,{SHAPE}"
RATES = (  # of forecasts that only ask what fits: nothing is timed for them
    "1x1,intra=10,inter=10,tflops=0.1,memory=10,link=10,host=10"
)


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in."""

    tokens: tuple  # of a step
    shares: tuple  # of the states' bytes that do not lie on the device
    timed_steps: int
    rounds: int  # of all runs, in turns
    budgets: tuple  # of the device, for the largest model
    sizes: tuple  # of forecasts


PLANS = {
    "quick": Plan(
        tokens=(4096,),
        shares=(0.25, 0.5),
        timed_steps=WARMUP + 4,
        rounds=1,
        budgets=("128M", "256M"),
        sizes=("1T",),
    ),
    "full": Plan(
        tokens=(4096, 16384, 65536),
        shares=(0.25, 0.5, 0.75),
        timed_steps=WARMUP + 3,
        rounds=1,
        budgets=("64M", "128M", "256M", "512M", "1G"),
        sizes=("1T", "10T"),
    ),
}


def model_flags(model, tokens):
    return [
        "--train",
        f"{TEXT}_train_*.bin",
        "--model",
        model,
        "--seq-len",
        MICRO[1],
        "--micro-batch",
        MICRO[0],
        "--batch-tokens",
        tokens,
        "--val-every",
        0,
    ]


class Bench(reproduce_cyclic.Bench):
    def __init__(self, options):
        super().__init__(options, PLANS)

    def train(self, flags, *, model=MODEL, tokens=MICRO[0] * MICRO[1], steps):
        return [self.options.program, *model_flags(model, tokens), "--steps", steps, *flags]

    def ask(self, name, *flags):
        """What a forecast says: (the object, ""), or (None, why it ends with the status of
        resources)."""
        folder = self.options.into / "forecasts"
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / f"{name}.txt".replace(" ", "_").replace("/", "_")
        status = self.runner.run(
            [self.options.program, "--dry-run", "--json", *map(str, flags)], output
        )
        text = output.read_text(errors="replace")
        if status == EXIT_RESOURCES:
            return None, text
        if status:
            raise Failed(
                EXIT_FAILED, f"{name}: exit status {status}: {text.strip()[-300:]}", status
            )
        return json.loads(next(line for line in text.splitlines() if line.startswith("{"))), ""

    def accepts(self, offload):
        """Is this a value of --offload?"""
        folder = self.options.into / "forecasts"
        folder.mkdir(parents=True, exist_ok=True)
        flags = [
            *model_flags(MODEL, MICRO[0] * MICRO[1]),
            "--steps",
            1,
            "--offload",
            offload,
            "--cluster",
            RATES,
        ]
        return (
            self.runner.run(
                [*map(str, [self.options.program, "--dry-run", *flags])],
                folder / f"accepts_{offload}.txt",
            )
            != EXIT_INPUT
        )


# --------------------------------------------------------------------------------------------------
# Step time against the budget


@dataclass(frozen=True)
class Setting:
    """Where the states lie. budget: bytes of the device, 0: any; offload: "" as the budget says;
    update: who updates."""

    label: str
    budget: int = 0
    offload: str = ""
    update: str = ""

    @property
    def flags(self):
        where = (
            ["--offload", self.offload]
            if self.offload
            else ["--device-memory", self.budget] if self.budget else []
        )
        return [*where, *(["--offload-update", self.update] if where else [])]

    def __str__(self):
        return f"{self.label}, updated by the {self.update}" if self.update else self.label


def state_bytes(memory):
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


def smallest_budget(bench, tokens, update):
    """Bytes of the device below which nothing runs, as the message says."""
    flags = [
        *model_flags(MODEL, tokens),
        "--steps",
        1,
        "--device-memory",
        1024,
        "--offload-update",
        update,
        "--cluster",
        RATES,
    ]
    found, said = bench.ask(f"smallest_{tokens}_{update}", *flags)
    number = re.search(r"smallest that fits is --device-memory (\d+)", said)
    if found or not number:
        raise Failed(EXIT_FAILED, f"no smallest budget in: {said.strip()[-300:]}")
    return int(number.group(1))


def settings(bench, tokens):
    whole, _ = bench.ask(
        f"fits_{tokens}", *model_flags(MODEL, tokens), "--steps", 1, "--cluster", RATES
    )
    memory = whole["predicted"]["memory"]
    yield Setting(FITS)
    for update in (HOST, DEVICE):
        least = smallest_budget(bench, tokens, update)
        for share in bench.plan.shares:
            budget = int(memory["device"] - share * state_bytes(memory))
            if budget > least:
                yield Setting(f"budget {budget / MIB:.1f} MiB", budget, "", update)
        yield Setting(f"smallest budget, {least / MIB:.1f} MiB", least, "", update)
        for offload in filter(bench.accepts, ALL_OR_NOTHING):
            yield Setting(f"all or nothing: {offload}", 0, offload, update)


def budget_runs(bench, tokens):
    """Setting -> logs, one a round."""
    logs = {}
    for round_, setting in itertools.product(
        range(bench.plan.rounds), list(settings(bench, tokens))
    ):
        name = (
            f"budgets/{tokens}_{setting}_round{round_}".replace(", ", "_")
            .replace(": ", "_")
            .replace(" ", "_")
        )
        logs.setdefault(setting, []).append(
            bench.run(name, bench.train(setting.flags, tokens=tokens, steps=bench.plan.timed_steps))
        )
    return logs


def end_of(log):
    return found_events(log, "end")[-1]


def apart(log, base):
    """The largest relative difference of losses and norms; 0: no bit differs."""
    pairs = zip(found_events(log, "step"), found_events(base, "step"))
    return max(
        abs(a[key] - b[key]) / abs(b[key]) for a, b in pairs for key in ("loss", "grad_norm")
    )


def forecast_error(log):
    """The largest relative difference of what lies and moves, forecast against measured."""
    end = end_of(log)
    kinds = [
        (end["memory"][side]["device"], *end.get("offload", {}).get(side, {}).values())
        for side in ("predicted", "measured")
    ]
    return max(abs(a - b) / max(b, 1) for a, b in zip(*kinds))


def budget_lines(found):
    base = min(map(step_ms, found[Setting(FITS)]))
    states = state_bytes(end_of(found[Setting(FITS)][0])["memory"]["measured"])
    for setting, logs in found.items():
        end, ms = end_of(logs[0]), min(map(step_ms, logs))
        moved = end["offload"]["measured"] if setting.flags else {"bytes": 0, "in": 0, "out": 0}
        device = end["memory"]["measured"]["device"]
        yield (
            setting,
            ms / base,
            {
                "device": device,
                "share": 1 - state_bytes(end["memory"]["measured"]) / states,
                "ms": ms,
                "host": moved["bytes"],
                "in": moved["in"],
                "out": moved["out"],
                "apart": max(apart(log, found[Setting(FITS)][0]) for log in logs),
                "error": max(map(forecast_error, logs)),
            },
        )


def budgets(bench):
    text, told, worst_loss, worst_forecast, curves = "", [], 0, 0, {}
    for tokens in bench.plan.tokens:
        lines = []
        for setting, ratio, row in budget_lines(budget_runs(bench, tokens)):
            lines.append(
                [
                    str(setting),
                    f"{row['device'] / MIB:.1f}",
                    f"{100 * row['share']:.0f} %",
                    f"{row['host'] / MIB:.1f}",
                    f"{row['in'] / MIB:.1f}",
                    f"{row['out'] / MIB:.1f}",
                    f"{row['ms']:.0f}",
                    f"{ratio:.2f}x",
                    "the same" if not row["apart"] else f"{row['apart']:.1e} apart",
                ]
            )
            worst_loss, worst_forecast = max(worst_loss, row["apart"]), max(
                worst_forecast, row["error"]
            )
            if not setting.offload:
                curves.setdefault((tokens, setting.update), []).append((row["device"] / MIB, ratio))
            told.append((tokens, setting, ratio, row["share"]))
        text += markdown(
            [
                f"{tokens} tokens a step",
                "device, MiB",
                "states not there",
                "host, MiB",
                "in, MiB a step",
                "out, MiB a step",
                "ms a step",
                "against the run that fits",
                "losses and norms",
            ],
            lines,
        )
    draw_budgets(bench, curves)
    bench.found["apart"] = worst_loss
    half = [ratio for _, setting, ratio, share in told if setting.budget and share <= HALF]
    if half:
        bench.found["half away"] = half

    def worst(wanted):
        chosen = [
            (ratio, tokens, setting)
            for tokens, setting, ratio, share in told
            if wanted(setting, share)
        ]
        return (
            "; ".join(
                f"{tokens} tokens, {setting}: {ratio:.2f}x" for ratio, tokens, setting in chosen
            )
            or "no such run"
        )

    return text, [
        [
            (
                "step time with up to half of the states on the host, against the run that fits"
                " (goal 1.10)"
            ),
            "DeepSpeed ZeRO-Offload: 17.6 % of full speed, ZenFlow 42.2 %",
            worst(lambda setting, share: setting.budget and share <= HALF),
            "a memory copy stands for the link here",
        ],
        [
            "the smallest budget",
            "all or nothing",
            worst(lambda setting, share: setting.label.startswith("smallest")),
            "the forecast names it",
        ],
        [
            "all or nothing",
            "DeepSpeed: 17.6 % of full speed",
            worst(lambda setting, share: setting.offload),
            "the same",
        ],
        [
            "losses and norms with and without offload",
            "silent errors in DeepSpeed",
            f"largest relative difference {worst_loss:.1g}",
            "the processor's updates are one operation, wherever states lie",
        ],
        [
            "forecast of device, host and moved bytes (goal 1 %)",
            "none forecasts the host",
            f"largest difference {100 * worst_forecast:.2g} %",
            "",
        ],
    ]


def draw_budgets(bench, curves):
    def paint(axes):
        for (tokens, update), points in curves.items():
            if update:
                axes[0].plot(
                    *zip(*sorted([*points, *curves[tokens, ""]])),
                    marker="o",
                    label=f"{tokens} tokens, updated by the {update}",
                )
        axes[0].set(
            xlabel="device (MiB)", ylabel="step time, against the run that fits", ylim=(0, None)
        )
        axes[0].legend(loc="lower left")

    bench.draw("budgets", 1, paint)


# --------------------------------------------------------------------------------------------------
# The largest model

WAYS = {
    "without offload": ["--offload", "none"],
    "all optimizer states on the host": ["--offload", "optimizer"],
    "by the budget": [],
}


def model_of(layers):
    return f"layers={layers},{SHAPE}"


def most_blocks(bench, budget, way, flags):
    """The largest number of blocks that is let in, 0: none; by doubling and halving."""

    def fits(layers):
        asked = [
            *model_flags(model_of(layers), MICRO[0] * MICRO[1]),
            "--steps",
            1,
            "--cluster",
            RATES,
            "--device-memory",
            budget,
            *flags,
        ]
        return bench.ask(f"largest {budget} {way} {layers}", *asked)[0] is not None

    low, high = 0, 1
    while high <= 1 << 16 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(bench):
    found = {
        budget: {way: most_blocks(bench, budget, way, flags) for way, flags in WAYS.items()}
        for budget in bench.plan.budgets
    }
    least, lines = bench.plan.budgets[0], [
        [budget, *(f"{layers} blocks" for layers in ways.values())]
        for budget, ways in found.items()
    ]
    log = bench.run(
        f"largest/{least}",
        bench.train(
            ["--device-memory", least], model=model_of(found[least]["by the budget"]), steps=2
        ),
    )
    claim = [
        f"the largest model at {least} of the device",
        "ZeRO-Offload: 13B where 1.4B fits (V100)",
        "; ".join(f"{way}: {layers} blocks" for way, layers in found[least].items()),
        (
            "activations take their part of the budget; the largest ran, with"
            f" {end_of(log)['memory']['measured']['device'] / MIB:.1f} MiB of the device"
        ),
    ]
    return markdown(["device budget", *WAYS], lines), [claim]


# --------------------------------------------------------------------------------------------------
# What a step's time goes to

SLICES = 50  # of a step


def busy(trace):
    """The share of each slice of a step's time in which a forward or backward pass runs."""
    actions = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    begin, end = min(event["ts"] for event in actions), max(
        event["ts"] + event["dur"] for event in actions
    )
    shares, width = [0.0] * SLICES, (end - begin) / SLICES
    for event in actions:
        if not event["name"].startswith(("FORWARD", "BACKWARD", "RECOMPUTE")):
            continue
        at, until = event["ts"] - begin, event["ts"] - begin + event["dur"]
        for k in range(int(at / width), min(SLICES, int(until / width) + 1)):
            shares[k] += max(0, min(until, (k + 1) * width) - max(at, k * width)) / width
    return shares


def utilisation(bench):
    tokens, found = bench.plan.tokens[0], {}
    for setting in settings(bench, tokens):
        if setting.offload or (setting.budget and not setting.label.startswith("smallest")):
            continue
        name = f"utilisation/{setting}".replace(", ", "_").replace(" ", "_")
        trace = bench.options.into / name / "trace.json"
        bench.run(
            name,
            bench.train(
                [*setting.flags, "--profile-steps", f"{WARMUP + 1}:{WARMUP + 1}", "--trace", trace],
                tokens=tokens,
                steps=WARMUP + 1,
            ),
        )
        found[setting] = busy(json.loads(trace.read_text()))

    def paint(axes):
        for setting, shares in found.items():
            axes[0].step(
                [(k + 0.5) / SLICES for k in range(SLICES)], shares, where="mid", label=str(setting)
            )
        axes[0].set(xlabel="share of a step", ylabel="passes run", ylim=(0, 1.05))
        axes[0].legend()

    bench.draw("utilisation", 1, paint)
    bench.found["busy"] = min(sum(shares) / SLICES for shares in found.values())
    told = "; ".join(
        f"{setting}: {100 * sum(shares) / SLICES:.0f} %" for setting, shares in found.items()
    )
    return "", [
        [
            "share of a step in which forward and backward passes run",
            "M6-10T: high, no figure; ZeRO-Offload 40 % idle and more (ZenFlow blog)",
            told,
            f"{tokens} tokens; one step's trace",
        ]
    ]


# --------------------------------------------------------------------------------------------------
# Scale

GIB = 1 << 30
NODES, LOCAL = 64, 8  # M6-10T's 512 V100 of 32 GB
CLUSTER = f"{NODES}x{LOCAL},intra=100,inter=12,tflops=60,memory=800,link=12,host=20,disk=2"
TIERS = (
    "--device-memory",
    "32G",
    "--host-memory",
    "128G",
    "--offload-dir",
    "/nowhere",
)  # given the cluster's disk, no folder need be there
WIDE = (  # a block of 1.02G parameters, of which two have room on such a device
    "heads=72,channels=9216,vocab=50257"
)
SIZES = {
    "1T": (982, 512),
    "10T": (9815, 176),
}  # blocks, tokens of a sequence: what comes into each block has room on device and host
TOKENS = 4e9  # 16 GB of text, M6-10T's data
RANKS, TIMES = 4, 10  # of the real run; its states over the sum of its device budgets
SMALL = (
    192,
    "heads=2,channels=64,vocab=256",
    8,
)  # blocks, the rest of its model, tokens of a sequence


def forecast(bench, size, share):
    layers, length = SIZES[size]
    flags = [
        "--model",
        f"layers={layers},{WIDE}",
        "--share",
        share,
        "--seq-len",
        length,
        "--micro-batch",
        1,
        "--zero",
        3,
        "--dtype",
        "bf16",
        "--recompute",
        "block",
        "--steps",
        1000,
        "--val-every",
        0,
        "--cluster",
        CLUSTER,
        *TIERS,
    ]
    found, said = bench.ask(f"scale {size} {share}", *flags)
    if not found:
        smallest = re.search(r"smallest that fits is (--[a-z-]+ \S+)", said)
        return [
            size,
            "shared" if share == "all" else "real",
            "does not fit" + (f": {smallest.group(1)}" if smallest else ""),
            *[""] * 7,
        ]
    predicted = found["predicted"]
    offload, memory = predicted["offload"], predicted["memory"]
    days = TOKENS / (NODES * LOCAL * length) * predicted["step_ms"] / 1000 / 86400
    return [
        size,
        "shared" if share == "all" else "real",
        f"{found['parameters'] / 1e9:.1f}G",
        *(
            f"{bytes_ / GIB:.1f}"
            for bytes_ in (memory["device"], offload["bytes"], offload["disk"])
        ),
        f"{(offload['in'] + offload['out']) / GIB:.1f}",
        f"{predicted['traffic']['total']['inter'] / GIB:.1f}",
        f"{predicted['step_ms'] / 1000:.0f}",
        f"{days:.0f}",
    ]


def ten_times(bench):
    """A real run of ranks whose device budgets are, together, a tenth of the states; (the sum of
    the budgets, bytes of states, its log)."""
    layers, rest, length = SMALL
    model = [
        "--train",
        f"{TEXT}_train_*.bin",
        "--model",
        f"layers={layers},{rest}",
        "--seq-len",
        length,
        "--micro-batch",
        1,
        "--val-every",
        0,
        "--zero",
        3,
        "--recompute",
        "block",
    ]
    alone, _ = bench.ask("scale one rank", *model, "--steps", 1, "--cluster", RATES)
    states = state_bytes(alone["predicted"]["memory"])
    budget = states // (TIMES * RANKS)
    run = [
        "mpirun",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        RANKS,
        bench.options.program,
        *model,
        "--steps",
        3,
        "--threads",
        1,
        "--device-memory",
        budget,
    ]
    return budget * RANKS, states, bench.run("scale/ten_times", run)


def scale(bench):
    lines = [forecast(bench, size, share) for size in bench.plan.sizes for share in ("none", "all")]
    text = markdown(
        [
            "dense GPT on 512 ranks of 32 GB",
            "blocks",
            "parameters",
            "device, GiB",
            "host, GiB",
            "disk, GiB",
            "moved a step, GiB",
            "sent between nodes, GiB",
            "step, s",
            "days for 4G tokens",
        ],
        lines,
    )
    sum_, states, log = ten_times(bench)
    loss = found_events(log, "step")[-1]["loss"]
    return text, [
        [
            "10T parameters on 512 GPUs of 32 GB",
            (
                "10 days (a mixture of experts, of which a token uses little; shared blocks for"
                " most of them)"
            ),
            "; ".join(
                f"dense {line[0]}, {line[1]}: {line[-1] + ' days' if line[-1] else line[2]}"
                for line in lines
            ),
            (
                "forecasts, of 60 TFLOP/s a rank and 12 GB/s a node; a dense model computes with"
                " all of its parameters for each token"
            ),
        ],
        [
            f"{RANKS} ranks, states {TIMES}x the device budgets",
            "not reported",
            (
                f"{states / MIB:.1f} MiB of states, budgets of {sum_ / MIB:.1f} MiB together: runs,"
                f" loss {loss:.4f} after 3 steps"
            ),
            "a small model of many blocks, so that two of them are little",
        ],
    ]


# --------------------------------------------------------------------------------------------------
# The claims, and all of it: parts, each with what it will run at most

CLAIMS = (
    # A memory copy stands for the link; no GPU.
    Claim(
        "M4",
        "high utilization",
        ("half away", "apart", "busy"),
        lambda ratios, apart, busy: f"half away: {span(ratios)}x the time, {100 * busy:.0f} % busy",
        partly=lambda ratios, apart, busy: max(ratios) <= 1.25 and busy >= 0.8 and apart == 0,
    ),
)


def settings_count(plan):
    return 1 + 2 * (len(plan.shares) + 1 + len(ALL_OR_NOTHING))


PARTS = {
    "budgets": (
        budgets,
        lambda bench: {
            "budgets": len(bench.plan.tokens) * bench.plan.rounds * settings_count(bench.plan)
        },
    ),
    "largest": (largest, lambda bench: {"largest": 1}),
    "utilisation": (utilisation, lambda bench: {"utilisation": 3}),
    "scale": (scale, lambda bench: {"scale": 1}),
}


def main():
    options = parts_options(
        parts_parser("reproduce_offload", __doc__, PLANS, PARTS), "reproduce_offload"
    )
    return reproduce_parts("reproduce_offload", Bench(options), PARTS, CLAIMS)


if __name__ == "__main__":
    sys.exit(main())
