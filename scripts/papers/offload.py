"""offload.py: granular offloading (M6-10T, arXiv 2110.03888): what of a run lies on the host, by a
budget in bytes, and what that costs.

    scripts/reproduce_offload.sh --quick | --full [--part PART ...] [--into FOLDER] [--program FILE]

budgets      step time against --device-memory, from what the run takes that fits down to the
             smallest that runs, updated by the host and by the device, and beside all-or-nothing
             offload (--offload optimizer, params, all); for each number of tokens in a step. Losses
             and norms of all of them must be those of the run that fits, and what was forecast what
             was measured.
largest      the largest model (blocks) that the forecast lets in at each device budget: without
             offload, with all optimizer states on the host, and with a budget; the largest of them
             runs two steps.
utilisation  how much of a step's time goes to forward and backward passes, from the start of the
             step to its end (--trace).
scale        forecasts for dense GPTs of 1T and 10T parameters on 512 ranks of 32 GB, shared and
             real: bytes of each tier, what moves, days; and a real run of 4 ranks whose states are
             ten times what their device budgets sum up to.

On the processor's build the device is the same memory with a budget, and moving is copying: its
ratios say what a memory copy costs, not a PCIe link. --quick takes less than 5 minutes on 2 quiet
cores; --full less than two hours. The pictures are budgets.png and utilisation.png.
"""

import json
import re
from dataclasses import dataclass

import experiment
from experiment import (
    EXIT_INPUT, MIB, TEXT, TIMED, WARMUP, Claim, Paper, events, folder_name, largest, last,
    local_ranks, markdown, plans, smallest_that_fits, span, spread, step_ms,
)

FITS, HALF = "fits", 0.55
HOST, DEVICE = "host", "device"  # who updates
ALL_OR_NOTHING = ("optimizer", "params", "all")
LENGTH, MICRO = 128, 4  # tokens of a sequence, sequences
SHAPE = "heads=4,channels=256,vocab=256"
MODEL = f"layers=12,{SHAPE}"
# Of forecasts that only ask what fits: nothing is timed for them.
UNTIMED = "--steps 1 --cluster 1x1,intra=10,inter=10,tflops=0.1,memory=10,link=10,host=10"
DATA = f"--train {TEXT}_train_*.bin"


PLANS = plans(
    tokens=((4096,), (4096, 16384, 65536)),  # of a step
    shares=((0.25, 0.5), (0.25, 0.5, 0.75)),  # of the states' bytes that are not on the device
    timed_steps=(WARMUP + 4, WARMUP + 3),
    budgets=(("128M", "256M"), ("64M", "128M", "256M", "512M", "1G")),  # for the largest model
    sizes=(("1T",), ("1T", "10T")),  # of forecasts
    rounds=(1, 1),  # of all runs, in turns
)


def model_flags(model=MODEL, tokens=LENGTH * MICRO):
    return (
        f"{DATA} --model {model} --seq-len {LENGTH} --micro-batch {MICRO} --batch-tokens {tokens}"
        " --val-every 0"
    )


class Bench(experiment.Bench):
    def __init__(self, options, plans):
        super().__init__(options, plans)
        self.settings = {}  # tokens -> settings

    def forecast(self, name, *flags):
        """The first word of its name says whose it is."""
        return super().forecast(name, *flags, group=f"forecasts of {name.split()[0]}")

    def accepts(self, offload):
        """Is this a value of --offload?"""
        status, _ = self.ask(
            f"forecasts/accepts_{offload}.txt", self.program, "--dry-run", model_flags(),
            UNTIMED, "--offload", offload, allowed=range(256), group="forecasts of settings",
        )
        return status != EXIT_INPUT


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
        where = f"--device-memory {self.budget}" if self.budget else ""
        where = f"--offload {self.offload}" if self.offload else where
        return where and f"{where} --offload-update {self.update}"

    def __str__(self):
        return f"{self.label}, updated by the {self.update}" if self.update else self.label


def state_bytes(memory):
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


def smallest_budget(bench, tokens, update):
    """Bytes of the device below which nothing runs, as the message says."""
    _, said = bench.forecast(f"settings smallest {tokens} {update}", model_flags(tokens=tokens),
                             UNTIMED, f"--device-memory 1024 --offload-update {update}")
    return smallest_that_fits(said)


def find_settings(bench, tokens):
    whole, _ = bench.forecast(f"settings fits {tokens}", model_flags(tokens=tokens), UNTIMED)
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


def settings(bench, tokens):
    if tokens not in bench.settings:
        bench.settings[tokens] = list(find_settings(bench, tokens))
    return bench.settings[tokens]


def budget_runs(bench, tokens):
    """Setting -> logs, one a round."""

    def run(setting, round_):
        return bench.run(
            folder_name(f"budgets/{tokens}_{setting}_round{round_}"), bench.program,
            model_flags(tokens=tokens), f"--steps {bench.plan.timed_steps}", setting.flags,
        )

    return bench.in_turns(bench.plan.rounds, settings(bench, tokens), run)


def apart(log, base):
    """The largest relative difference of losses and norms; 0: no bit differs."""
    pairs = zip(events(log, "step"), events(base, "step"))
    return max(
        abs(a[key] - b[key]) / abs(b[key]) for a, b in pairs for key in ("loss", "grad_norm")
    )


def forecast_error(log):
    """The largest relative difference of what lies and moves, forecast against measured."""
    end = last(log, "end")
    kinds = [
        (end["memory"][side]["device"], *end.get("offload", {}).get(side, {}).values())
        for side in ("predicted", "measured")
    ]
    return max(abs(a - b) / max(b, 1) for a, b in zip(*kinds))


@dataclass(frozen=True)
class Row:
    """Of a setting: bytes; the time of a step, over that of the run that fits; the share of the
    states that is not on the device."""

    tokens: int
    setting: Setting
    device: int
    moved: dict
    ms: object  # a Spread
    ratio: float
    share: float
    apart: float
    error: float

    def cells(self):
        return [
            str(self.setting), f"{self.device / MIB:.1f}", f"{100 * self.share:.0f} %",
            *(f"{self.moved[kind] / MIB:.1f}" for kind in ("bytes", "in", "out")),
            self.ms.text("{:.0f}"), f"{self.ratio:.2f}x",
            "the same" if not self.apart else f"{self.apart:.1e} apart",
        ]


def budget_rows(tokens, found):
    fits = found[Setting(FITS)]
    base = spread(map(step_ms, fits)).median
    states = state_bytes(last(fits[0], "end")["memory"]["measured"])
    for setting, logs in found.items():
        end, ms = last(logs[0], "end"), spread(map(step_ms, logs))
        memory = end["memory"]["measured"]
        yield Row(tokens, setting, memory["device"],
                  end["offload"]["measured"] if setting.flags else {"bytes": 0, "in": 0, "out": 0},
                  ms, ms.median / base, 1 - state_bytes(memory) / states,
                  max(apart(log, fits[0]) for log in logs), max(map(forecast_error, logs)))


def budgets(bench):
    text, rows = "", []
    for tokens in bench.plan.tokens:
        of_tokens = list(budget_rows(tokens, budget_runs(bench, tokens)))
        header = [f"{tokens} tokens a step", "device, MiB", "states not there", "host, MiB"]
        header += ["in, MiB a step", "out, MiB a step", "ms a step", "against the run that fits"]
        text += markdown([*header, "losses and norms"], [row.cells() for row in of_tokens])
        rows += of_tokens
    bench.draw("budgets", lambda axes: paint_budgets(rows, axes[0]))
    worst_loss, worst_forecast = max(row.apart for row in rows), max(row.error for row in rows)
    half = [row for row in rows if row.setting.budget and row.share <= HALF]
    bench.tell("apart", worst_loss)
    if half:
        bench.tell("half away", [row.ratio for row in half], bench.plan.rounds)

    def told(chosen):
        texts = (f"{row.tokens} tokens, {row.setting}: {row.ratio:.2f}x" for row in chosen)
        return "; ".join(texts) or "no such run"

    return text, [
        ["step time with up to half of the states on the host, against the run that fits"
         " (goal 1.10)",
         "DeepSpeed ZeRO-Offload: 17.6 % of full speed, ZenFlow 42.2 %", told(half),
         "a memory copy stands for the link here"],
        ["the smallest budget", "all or nothing",
         told(row for row in rows if row.setting.label.startswith("smallest")),
         "the forecast names it"],
        ["all or nothing", "DeepSpeed: 17.6 % of full speed",
         told(row for row in rows if row.setting.offload), "the same"],
        ["losses and norms with and without offload", "silent errors in DeepSpeed",
         f"largest relative difference {worst_loss:.1g}",
         "the processor's updates are one operation, wherever states lie"],
        ["forecast of device, host and moved bytes (goal 1 %)", "none forecasts the host",
         f"largest difference {100 * worst_forecast:.2g} %", ""],
    ]


def paint_budgets(rows, axes):
    for tokens in dict.fromkeys(row.tokens for row in rows):
        for update in (HOST, DEVICE):
            points = sorted(
                (row.device / MIB, row.ratio)
                for row in rows
                if row.tokens == tokens
                and not row.setting.offload
                and row.setting.update in ("", update)
            )
            label = f"{tokens} tokens, updated by the {update}"
            axes.plot(*zip(*points), marker="o", label=label)
    axes.set(xlabel="device (MiB)", ylabel="step time, against the run that fits", ylim=(0, None))


# --------------------------------------------------------------------------------------------------
# The largest model

WAYS = {
    "without offload": "--offload none",
    "all optimizer states on the host": "--offload optimizer",
    "by the budget": "",
}


def most_blocks(bench, budget, way, flags):
    """The largest number of blocks that is let in, 0: none; by doubling and halving."""

    def fits(layers):
        model = model_flags(f"layers={layers},{SHAPE}")
        asked = model, UNTIMED, "--device-memory", budget, flags
        return bench.forecast(f"largest {budget} {way} {layers}", *asked)[0] is not None

    low, high = 0, 1
    while high <= 1 << 16 and fits(high):
        low, high = high, 2 * high
    return largest(fits, low, high)


def largest_model(bench):
    found = {
        budget: {way: most_blocks(bench, budget, way, flags) for way, flags in WAYS.items()}
        for budget in bench.plan.budgets
    }
    lines = [
        [budget, *(f"{layers} blocks" for layers in ways.values())]
        for budget, ways in found.items()
    ]
    least = bench.plan.budgets[0]
    model = model_flags(f"layers={found[least]['by the budget']},{SHAPE}")
    log = bench.run(f"largest/{least}", bench.program, model, f"--steps 2 --device-memory {least}")
    device = last(log, "end")["memory"]["measured"]["device"]
    return markdown(["forecast, device budget", *WAYS], lines), [
        [f"the largest model at {least} of the device", "ZeRO-Offload: 13B where 1.4B fits (V100)",
         "; ".join(f"{way}: {layers} blocks" for way, layers in found[least].items()),
         "activations take their part of the budget; the largest ran, with"
         f" {device / MIB:.1f} MiB of the device"]
    ]


# --------------------------------------------------------------------------------------------------
# What a step's time goes to

SLICES = 50  # of a step


def busy_slices(trace):
    """The share of each slice of a step's time in which a forward or backward pass runs."""
    actions = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    begin = min(event["ts"] for event in actions)
    end = max(event["ts"] + event["dur"] for event in actions)
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
        name = folder_name(f"utilisation/{setting}")
        trace = bench.into / name / "trace.json"
        bench.run(name, bench.program, model_flags(tokens=tokens), f"--steps {WARMUP + 1}",
                  setting.flags, f"--profile-steps {WARMUP + 1}:{WARMUP + 1} --trace", trace)
        found[setting] = busy_slices(json.loads(trace.read_text()))

    def paint(axes):
        middles = [(k + 0.5) / SLICES for k in range(SLICES)]
        for setting, shares in found.items():
            axes[0].step(middles, shares, where="mid", label=str(setting))
        axes[0].set(xlabel="share of a step", ylabel="passes run", ylim=(0, 1.05))

    bench.draw("utilisation", paint)
    busy = {setting: sum(shares) / SLICES for setting, shares in found.items()}
    bench.tell("busy", min(busy.values()))
    return "", [
        ["share of a step in which forward and backward passes run",
         "M6-10T: high, no figure; ZeRO-Offload 40 % idle and more (ZenFlow blog)",
         "; ".join(f"{setting}: {100 * share:.0f} %" for setting, share in busy.items()),
         f"{tokens} tokens; one step's trace"]
    ]


# --------------------------------------------------------------------------------------------------
# Scale

GIB = 1 << 30
NODES, LOCAL = 64, 8  # M6-10T's 512 V100 of 32 GB
CLUSTER = f"{NODES}x{LOCAL},intra=100,inter=12,tflops=60,memory=800,link=12,host=20,disk=2"
# Given the cluster's disk, no folder need be there.
TIERS = "--device-memory 32G --host-memory 128G --offload-dir /nowhere"
# A block of 1.02G parameters, of which two have room on such a device.
WIDE = "heads=72,channels=9216,vocab=50257"
# Blocks, tokens of a sequence: what comes into each block has room on device and host.
SIZES = {"1T": (982, 512), "10T": (9815, 176)}
TOKENS = 4e9  # 16 GB of text, M6-10T's data
RANKS, TIMES = 4, 10  # of the real run; its states over the sum of its device budgets
# Many blocks, so that two of them are little.
SMALL = (
    f"{DATA} --model layers=192,heads=2,channels=64,vocab=256 --seq-len 8 --micro-batch 1"
    " --val-every 0 --zero 3 --recompute block"
)


def forecast(bench, size, share):
    layers, length = SIZES[size]
    found, said = bench.forecast(
        f"scale {size} {share}",
        f"--model layers={layers},{WIDE} --share {share} --seq-len {length} --micro-batch 1",
        f"--zero 3 --dtype bf16 --recompute block --steps 1000 --val-every 0 --cluster {CLUSTER}",
        TIERS,
    )
    name = [size, "shared" if share == "all" else "real"]
    if not found:
        smallest = re.search(r"smallest that fits is (--[a-z-]+ \S+)", said)
        return [*name, "does not fit" + (f": {smallest[1]}" if smallest else ""), *[""] * 7]
    predicted = found["predicted"]
    offload, seconds = predicted["offload"], predicted["step_ms"] / 1000
    places = predicted["memory"]["device"], offload["bytes"], offload["disk"]
    moved = offload["in"] + offload["out"], predicted["traffic"]["total"]["inter"]
    days = TOKENS / (NODES * LOCAL * length) * seconds / 86400
    return [
        *name, f"{found['parameters'] / 1e9:.1f}G",
        *(f"{bytes_ / GIB:.1f}" for bytes_ in (*places, *moved)), f"{seconds:.0f}", f"{days:.0f}",
    ]


def ten_times(bench):
    """A real run of ranks whose device budgets are, together, a tenth of the states; (the sum of
    the budgets, bytes of states, its log)."""
    alone, _ = bench.forecast("scale one rank", SMALL, UNTIMED)
    states = state_bytes(alone["predicted"]["memory"])
    budget = states // (TIMES * RANKS)
    log = bench.run("scale/ten_times", local_ranks(RANKS), bench.program, SMALL,
                    f"--steps 3 --threads 1 --device-memory {budget}")
    return budget * RANKS, states, log


def scale(bench):
    lines = [forecast(bench, size, share) for size in bench.plan.sizes for share in ("none", "all")]
    header = ["forecast: dense GPT on 512 ranks of 32 GB", "blocks", "parameters", "device, GiB"]
    header += ["host, GiB", "disk, GiB", "moved a step, GiB", "sent between nodes, GiB", "step, s"]
    sum_, states, log = ten_times(bench)
    return markdown([*header, "days for 4G tokens"], lines), [
        ["10T parameters on 512 GPUs of 32 GB",
         "10 days (a mixture of experts, of which a token uses little; shared blocks for"
         " most of them)",
         "; ".join(
             f"dense {line[0]}, {line[1]}: {line[-1] + ' days' if line[-1] else line[2]}"
             for line in lines
         ),
         "forecasts, of 60 TFLOP/s a rank and 12 GB/s a node; a dense model computes with"
         " all of its parameters for each token"],
        [f"{RANKS} ranks, states {TIMES}x the device budgets", "not reported",
         f"{states / MIB:.1f} MiB of states, budgets of {sum_ / MIB:.1f} MiB together: runs,"
         f" loss {last(log, 'step')['loss']:.4f} after 3 steps",
         "a small model of many blocks, so that two of them are little"],
    ]


# --------------------------------------------------------------------------------------------------
# The claims, and all of it: parts, each with what it will run at most

CLAIMS = (
    # A memory copy stands for the link; no GPU.
    Claim("M4", "high utilization", ("half away", "apart", "busy"), TIMED,
          lambda ratios, apart, busy: f"half away: {span(ratios)}x the time,"
          f" {100 * busy:.0f} % busy",
          partly=lambda ratios, apart, busy: max(ratios) <= 1.25 and busy >= 0.8 and apart == 0),
)


def budgets_count(bench):
    """With the forecasts that find the settings: what fits, and for each way to update what is
    smallest, and what --offload takes."""
    plan, ways = bench.plan, len(ALL_OR_NOTHING)
    each = 1 + 2 * (len(plan.shares) + 1 + ways)
    return {"forecasts of settings": len(plan.tokens) * (1 + 2) + ways,
            "budgets": len(plan.tokens) * plan.rounds * each}


def largest_count(bench):
    """About seven doublings and seven halvings for each."""
    return {"forecasts of largest": 14 * len(WAYS) * len(bench.plan.budgets), "largest": 1}


def scale_count(bench):
    return {"forecasts of scale": 2 * len(bench.plan.sizes) + 1, "scale": 1}


PAPER = Paper(
    name="offload",
    doc=__doc__,
    plans=PLANS,
    parts={
        "budgets": (budgets, budgets_count),
        "largest": (largest_model, largest_count),
        "utilisation": (utilisation, lambda _: {"utilisation": 3}),
        "scale": (scale, scale_count),
    },
    claims=CLAIMS,
    bench=Bench,
)
