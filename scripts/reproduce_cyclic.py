#!/usr/bin/env python3
"""reproduce_cyclic.py: Cyclic Data Parallelism (CDP, arXiv 2403.08837) beside data parallelism
(DP): memory, traffic, time and quality.

    scripts/reproduce_cyclic.sh --quick | --full [--part PART ...] [--steps N] [--images PREFIX]
    [--into FOLDER] [--program FILE]

memory   bytes of live activations over a step, on one rank that runs N micro-batches: all at once
         (DP: one micro-batch of them all) and
         staggered (CDP). When which unit works on which micro-batch is measured (--trace); what
         each holds then are the bytes of docs/memory.md, whose sum must be what the program
         counted.
traffic  what each link carries over a step, DP's all-reduce beside CDP's messages: the counters of
         the switch's ports, every few
         milliseconds, and how much of a step's bytes travel in its busiest tenth. On an emulated
         cluster of 4 nodes (cluster.sh).
speed    step times of DP (this program's own, whose messages hide behind the backward pass),
         CDP-v1, v2 and v2 with slack 1, on the same
         cluster, over link rates given by c, DP's time of messages when a forward pass takes 1 and
         a backward pass 2; and with a rank that stops now and then. What an ideal DP takes: 1 +
         max(2, c), CDP: max(3, c). PyTorch's DistributedDataParallel on the same cluster for
         information, where scripts/bench_peers.sh has installed PyTorch.
quality  validation loss at equal tokens of text (data/text_bytes_*, `make data`): DP, v1, v2, each
         at the best of the same learning rates, which is chosen with other seeds than those that
         are told. Many steps of 64 bytes: where steps are large and few, rates are as high as
         stability allows, and that is lower for gradients a step old.
settings where noise limits the learning rate and not stability: many steps of few tokens, warm-up
         over 40 % of them. SGD with and without momentum, and AdamW; text, and the images of
         PREFIX. Is each rule as good as plain training there? Differences by seed.
zero     ZeRO-3 beside CDP whose stages' states have an owner each (--cyclic-mode zero): step times
         over an unlimited link, at c = F + B, with ranks
         that stop now and then, and, where the kernel can delay messages, with 2 ms more for each;
         bytes, and memory.
images   the paper's own task, classification: the share of right labels on the images of PREFIX
         (prepare_data.py --images; default: data/digits_images; CIFAR-10 too), SGD with momentum
         and AdamW, many steps of 4 images. Left out without them.
causes   text in few steps of 256 bytes, where v1 and v2 fall behind, and what changes that:
         warm-up, beta1, beta2, clipping (of DP and v1), Nesterov's form. AdamW.

--quick takes less than 5 minutes on 2 quiet cores; --full some hours. --steps replaces the
number of training steps of quality and images. FOLDER (default: out/cyclic_quick or
out/cyclic_full) gets a folder for each run, with log.jsonl and output.txt (and the samples
traffic.jsonl), the tables as table.md, and plots (memory.png, traffic.png, quality.png, ...). The
same command goes on where it was stopped: what is there is not run again. Ctrl-C leaves no process
and no cluster. Where no cluster can be made, its parts say so.

Each finished run has a line: how many of all are done, the time gone and left. The last table gives
the verdict on each claim of docs/results.md that these runs decide.

Exit status: 0 done, 1 a claim that docs/results.md calls MET is not met here, 2 bad usage or
missing input, 3 FOLDER cannot be written, 4 a run failed, 130 stopped by Ctrl-C.
"""

import bisect
import concurrent.futures
import glob
import json
import math
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import plot
import run_log
from reproduce import (
    EXIT_FAILED,
    SCRIPTS,
    TEXT,
    Claim,
    Failed,
    Runner,
    complete,
    markdown,
    parts_options,
    parts_parser,
    percent,
    pyplot_or_none,
    reproduce_parts,
    span,
)

CLUSTER, PEERS = str(SCRIPTS / "cluster.sh"), SCRIPTS.parent / ".venv-peers"
DP, V1, V2, SLACK = "DP", "CDP-v1", "CDP-v2", "CDP-v2 slack 1"
RULES = {
    DP: (),
    V1: ("--cyclic", "v1"),
    V2: ("--cyclic", "v2"),
    SLACK: ("--cyclic", "v2", "--cyclic-slack", "1"),
}
QUALITY = (DP, V1, V2)  # the rules whose losses are compared
RANKS = 4  # of the cluster: so many nodes with a rank each, and N
UNLIMITED = 0.0  # a c
BALANCE = 3.0  # c = F + B
# Where bytes over time are looked at: DP's messages fill the first link, and leave the second idle
# for three quarters of a step.
TRAFFIC_LINKS = {"c = F + B": BALANCE, "c = (F + B) / 4": BALANCE / 4}


@dataclass(frozen=True)
class Plan:
    """What --quick and --full differ in."""

    memory_cuts: tuple  # values of N
    cluster_steps: int  # of a run there, the first WARMUP of which are not looked at
    loads: tuple  # values of c
    rounds: int  # of all loads and rules, in turns
    cuts: tuple  # values of N for quality
    tuning_seeds: tuple  # choose the learning rate
    seeds: tuple  # run at the chosen rate, and are told
    text_steps: int
    text_rates: dict  # learning rates by optimizer
    setting_share: float  # of the steps of SETTINGS
    image_steps: int
    image_rates: dict
    cause_steps: int
    cause_rates: tuple
    cause_seeds: tuple


WARMUP = 3
PLANS = {
    "quick": Plan(
        memory_cuts=(8,),
        cluster_steps=WARMUP + 8,
        loads=(UNLIMITED, BALANCE),
        rounds=1,
        cuts=(4,),
        tuning_seeds=(1,),
        seeds=(1,),
        text_steps=1000,
        text_rates={"adamw": ("2e-3", "4e-3")},
        setting_share=0.05,
        image_steps=1500,
        image_rates={"adamw": ("2.5e-3",), "sgd": ("3e-1",)},
        cause_steps=400,
        cause_rates=("4e-3",),
        cause_seeds=(1,),
    ),
    "full": Plan(
        memory_cuts=(2, 4, 8),
        cluster_steps=WARMUP + 20,
        loads=(UNLIMITED, 1, 2, BALANCE, 4.5, 6),
        rounds=3,
        cuts=(2, 4),
        tuning_seeds=(1, 2),
        seeds=(3, 4, 5, 6, 7),
        text_steps=12000,
        text_rates={"adamw": ("2e-3", "4e-3", "8e-3"), "sgd": ("1e-2", "3e-2", "1e-1", "3e-1")},
        setting_share=1,
        image_steps=8000,
        image_rates={
            "adamw": ("1.25e-3", "2.5e-3", "5e-3"),
            "sgd": ("1e-2", "3e-2", "1e-1", "3e-1"),
        },
        cause_steps=3000,
        cause_rates=("2e-3", "4e-3", "8e-3"),
        cause_seeds=(1, 2),
    ),
}


class Bench:
    """Starts runs that are not there yet, and knows where they are."""

    def __init__(self, options, plans):
        self.plan, self.options, self.runner = plans[options.plan], options, Runner()
        self.found = {}  # measurements by name, which the claims are decided by

    def run(self, name, command):
        log, fresh = complete(
            self.runner, self.options.into / name, [str(word) for word in command]
        )
        self.runner.progress.finished(name.split("/")[0], name, fresh)
        return log

    def run_together(self, commands):
        """Logs by name; as many runs of one thread at a time as there are cores."""
        pool = concurrent.futures.ThreadPoolExecutor(cores())
        try:
            jobs = {
                name: pool.submit(self.run, name, command) for name, command in commands.items()
            }
            return {name: job.result() for name, job in jobs.items()}
        finally:
            pool.shutdown(cancel_futures=True)

    def train(self, data, rule, *flags):
        return [
            self.options.program,
            "--train",
            f"{data}_train_*.bin",
            "--val",
            f"{data}_val_*.bin",
            "--threads",
            1,
            "--grad-clip",
            0,
            *flags,
            *RULES[rule],
        ]

    def draw(self, name, panels, paint):
        pyplot = pyplot_or_none(Path(sys.argv[0]).stem)
        if pyplot:
            figure, axes = pyplot.subplots(
                1, panels, figsize=(7 * panels, 4), layout="constrained", squeeze=False
            )
            paint(axes[0])
            figure.savefig(self.options.into / f"{name}.png", dpi=120)
            pyplot.close(figure)


def cores():
    return len(os.sched_getaffinity(0))


def found_events(log, kind):
    return [event for event in run_log.events(log) if event.get("event") == kind]


def step_ms(log):
    return statistics.median(
        step["ms"] for step in found_events(log, "step") if step["step"] > WARMUP
    )


def mean_ms(log):
    return statistics.mean(
        step["ms"] for step in found_events(log, "step") if step["step"] > WARMUP
    )


# --------------------------------------------------------------------------------------------------
# Memory over time, one rank

SAMPLES, T, C, HEADS = 16, 64, 64, 4  # of a step; the model


def unit_bytes(units, tokens):
    """Activations of each unit for a micro-batch (docs/memory.md): the embedding's tokens, blocks,
    the head with its targets; and what comes into each."""
    block, boundary = (60 * C + 4 * HEADS + 16) * tokens, 4 * C * tokens
    return [4 * tokens, *[block + boundary] * (units - 2), (8 * C + 16) * tokens + boundary]


def live_bytes(trace, sizes):
    """(ms, bytes) whenever the bytes change, over the step of a trace. A unit's activations live
    from its forward to the end of its weight part; what ends without having begun belongs to the
    step before, and lives from the start."""
    actions = sorted(
        (event for event in trace["traceEvents"] if event.get("cat") == "compute"),
        key=lambda event: event["ts"],
    )
    begin = actions[0]["ts"]
    changes, seen, live = [], set(), 0
    for event in actions:
        kind, unit, micro = (
            event["name"].split()[0],
            event["args"]["unit"],
            event["args"]["micro_batch"],
        )
        if kind == "BACKWARD_WEIGHT":
            changes.append((event["ts"] + event["dur"], -sizes[unit]))
            live += 0 if (unit, micro) in seen else sizes[unit]
        elif kind == "FORWARD":
            changes.append((event["ts"], sizes[unit]))
            seen.add((unit, micro))
    curve = [(0.0, live)]
    for when, change in changes:
        live += change
        curve.append(((when - begin) / 1000, live))
    return curve


def mean_of(curve):
    area = sum((b - a) * bytes_ for (a, bytes_), (b, _) in zip(curve, curve[1:]))
    return area / (curve[-1][0] - curve[0][0])


def memory_run(bench, rule, N):
    """(bytes of activations that the program counted, the curve)."""
    name = f"memory/{rule}_N{N}".replace(" ", "_")
    micro, cut = (SAMPLES, []) if rule == DP else (SAMPLES // N, ["--cyclic-stages", N])
    trace = bench.options.into / name / "trace.json"
    model = [
        "--model",
        f"layers={2 * N - 2},heads={HEADS},channels={C},vocab=256",
        "--seq-len",
        T,
        "--micro-batch",
        micro,
        "--batch-tokens",
        SAMPLES * T,
    ]
    log = bench.run(
        name,
        bench.train(
            TEXT,
            rule,
            *model,
            *cut,
            "--steps",
            6,
            "--val-every",
            0,
            "--profile-steps",
            "5:5",
            "--trace",
            trace,
        ),
    )
    counted = found_events(log, "end")[-1]["memory"]["measured"]["activations"]
    sizes = unit_bytes(2 * N, micro * T)
    places = [
        1 if rule == DP else N - unit // 2 for unit in range(2 * N)
    ]  # of a stage of two units: micro-batches at once
    if sum(map(lambda size, count: size * count, sizes, places)) != counted:
        raise Failed(
            EXIT_FAILED, f"{name}: {counted} bytes of activations are not those of docs/memory.md"
        )
    return counted, live_bytes(json.loads(trace.read_text()), sizes)


def memory(bench):
    found = {
        (N, rule): memory_run(bench, rule, N)
        for N in bench.plan.memory_cuts
        for rule in (DP, V1, V2)
    }
    largest = bench.plan.memory_cuts[-1]

    def paint(axes):
        for rule in (DP, V2):
            curve = found[largest, rule][1]
            axes[0].step(
                [when / curve[-1][0] for when, _ in curve],
                [size / plot.MIB for _, size in curve],
                where="post",
                label=rule,
            )
        peak = found[largest, DP][0] * (largest + 1) / 2 / largest / plot.MIB
        axes[0].axhline(peak, color="black", linestyle="--", label="paper: (N + 1) / 2N of DP")
        axes[0].set(
            xlabel="share of a step",
            ylabel="live activations (MiB)",
            title=f"one rank, N = {largest}",
            ylim=(0, None),
        )
        axes[0].legend()

    bench.draw("memory", 1, paint)
    bench.found["memory"] = [
        (
            N,
            found[N, rule][0] / found[N, DP][0],
            max(size for _, size in found[N, rule][1]) / mean_of(found[N, rule][1]),
        )
        for N in bench.plan.memory_cuts
        for rule in (V1, V2)
    ]
    lines = []
    for N in bench.plan.memory_cuts:
        for rule in (V1, V2):
            ratio = found[N, rule][0] / found[N, DP][0]
            shape = "; ".join(
                f"{name}"
                f" {max(size for _, size in found[N, name][1]) / mean_of(found[N, name][1]):.2f}"
                for name in (DP, rule)
            )
            lines.append(
                [
                    f"{rule}: peak of activations over DP's, N={N}, one rank",
                    f"(N+1)/2N = {(N + 1) / 2 / N:.4f}",
                    f"{ratio:.4f}; peak over mean: {shape}",
                    (
                        "allocated bytes; stages of two units, the embedding and head are lighter"
                        " than blocks"
                    ),
                ]
            )
    return "", lines


# --------------------------------------------------------------------------------------------------
# The cluster, watched from outside

EVERY = 0.004  # seconds between two looks at the counters
MODEL = (
    "--model",
    "layers=12,heads=4,channels=128,vocab=256",
    "--seq-len",
    64,
    "--micro-batch",
    4,
    "--batch-tokens",
    RANKS * 4 * 64,
)
CUT = (
    "--cyclic-cut",
    "4,3,3,4",
)  # three blocks a stage: by count the second would have four, and the last two


def cluster_name(into):
    return f"cyclic{zlib.crc32(str(into.resolve()).encode()):08x}"


def processes():
    """(pid, words of its command line) of all there are."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            yield int(path.split("/")[2]), Path(path).read_text(errors="replace").split("\0")[:-1]
        except OSError:
            continue  # it ended meanwhile


def switch_process(name):
    """The process that holds a cluster's switch, None where there is none."""
    return next(
        (
            pid
            for pid, words in processes()
            if words[:1] == ["bash"] and words[-2:] == ["hold-switch", name]
        ),
        None,
    )


class Watch(threading.Thread):
    """Does look() again and again, beside a run on the cluster of this name."""

    def __init__(self, name, pause):
        super().__init__(daemon=True)
        self.cluster, self.pause, self.over = name, pause, threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def run(self):
        while not self.over.wait(self.pause):
            try:
                self.look()
            except OSError:
                pass  # the cluster is not there yet, or not any more


class Counters(Watch):
    """Samples what every node has sent, as the switch's ports received it: lines [seconds, bytes of
    node 0, of node 1, ...] of a file."""

    def __init__(self, name, path):
        super().__init__(name, EVERY)
        self.path, self.ports, self.samples = path, None, []

    def look(self):
        if not self.ports:
            switch = switch_process(self.cluster)
            self.ports = switch and open(f"/proc/{switch}/net/dev")
            return
        self.ports.seek(0)
        bytes_in = {
            line.split(":")[0].strip(): int(line.split(":")[1].split()[0])
            for line in self.ports
            if ":" in line
        }
        sent = [bytes_in.get(f"port{n}") for n in range(RANKS)]
        if None not in sent:  # the cluster is whole
            self.samples.append([time.monotonic(), *sent])

    def __exit__(self, *_):
        super().__exit__()
        if self.ports:
            self.ports.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(sample) + "\n" for sample in self.samples))


class Pulses(Watch):
    """Stops a rank, drawn by lot, for so many seconds, and leaves all alone for five times that."""

    def __init__(self, name, program, seconds):
        super().__init__(name, 5 * seconds)
        self.program, self.seconds, self.draws = program, seconds, random.Random(1)

    def look(self):
        inside = os.readlink(f"/proc/{switch_process(self.cluster)}/ns/pid")
        ranks = sorted(
            pid
            for pid, words in processes()
            if words[:1] == [self.program] and os.readlink(f"/proc/{pid}/ns/pid") == inside
        )
        if len(ranks) == RANKS:
            chosen = self.draws.choice(ranks)
            os.kill(chosen, signal.SIGSTOP)
            time.sleep(self.seconds)
            os.kill(chosen, signal.SIGCONT)


def on_cluster(bench, rate, *words):
    """The command's words before the program. rate: Mbit/s of a link, 0: unlimited."""
    link = ["--rate", f"{rate:.1f}mbit"] if rate else []
    quota = 90 // -(
        -RANKS // cores()
    )  # a tenth is left to the kernel's side of the network and to mpirun
    return [
        CLUSTER,
        f"{RANKS}x1",
        "--name",
        cluster_name(bench.options.into),
        *link,
        *words,
        "--cpu",
        quota,
        "--",
    ]


def cluster_run(bench, name, flags, rate, watch=None, words=()):
    """The log."""
    cut = CUT if "--cyclic" in flags else ()
    command = [
        *on_cluster(bench, rate, *words),
        *bench.train(TEXT, DP, *MODEL, *flags, *cut),
        "--steps",
        bench.plan.cluster_steps,
        "--val-every",
        0,
    ]
    if watch is None or (bench.options.into / name / "run.json").exists():
        return bench.run(name, command)
    with watch:
        return bench.run(name, command)


def sent_bytes(log):
    """What rank 0 sends to other nodes in a step."""
    return found_events(log, "end")[-1]["traffic"]["measured"]["total"]["inter"]


def rate_of(bench, c):
    """The link, in Mbit/s, over which DP's messages take c where a forward pass takes 1: a third of
    a step over an unlimited link."""
    log = cluster_run(bench, "speed/calibration", (), 0)
    return sent_bytes(log) * 8 / (step_ms(log) / 3 * c) / 1000 if c else 0


def no_cluster(*words):
    """What this machine lacks for a cluster, empty where it lacks nothing."""
    check = subprocess.run(
        [CLUSTER, "check", "--cpu", "10", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return check.returncode and (check.stdout.strip() or "no cluster")


# --------------------------------------------------------------------------------------------------
# Traffic over time

BINS = 100  # of a step


def bytes_at(samples, node, when):
    """The counter of a node between two samples."""
    at = min(
        max(bisect.bisect_right(samples, when, key=lambda sample: sample[0]), 1), len(samples) - 1
    )
    (a, *low), (b, *high) = samples[at - 1], samples[at]
    return low[node] + (high[node] - low[node]) * (when - a) / (b - a)


def steps_of(samples, seconds):
    """Where steps of that length begin, in the middle of the run: after a third of all bytes,
    before nine tenths."""
    sent = [sum(counters) for _, *counters in samples]
    inside = [
        when
        for (when, *_), total in zip(samples, sent)
        if sent[0] + (sent[-1] - sent[0]) / 3 <= total <= sent[0] + (sent[-1] - sent[0]) * 0.9
    ]
    return (
        [inside[0] + seconds * k for k in range(int((inside[-1] - inside[0]) / seconds))]
        if inside
        else []
    )


def bins_of(samples, node, begin, seconds):
    marks = [bytes_at(samples, node, begin + seconds * k / BINS) for k in range(BINS + 1)]
    return [b - a for a, b in zip(marks, marks[1:])]


def busiest(bins, share=0.1):
    """The share of all bytes in the busiest stretch of a step, which goes on in the next step."""
    n = round(share * len(bins))
    around = bins + bins[: n - 1]
    return max(sum(around[k : k + n]) for k in range(len(bins))) / sum(bins)


def traffic_found(bench, link, rule):
    """(seconds of a step, of each node: the bins of each step) over a link."""
    name = "traffic/" + f"{link}_{rule}".replace(" ", "").replace("/", "_over_")
    path = bench.options.into / name / "traffic.jsonl"
    watch = Counters(cluster_name(bench.options.into), path)
    rate = rate_of(bench, TRAFFIC_LINKS[link])
    seconds = step_ms(cluster_run(bench, name, RULES[rule], rate, watch)) / 1000
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    begins = steps_of(samples, seconds)
    if len(begins) < 2:
        raise Failed(
            EXIT_FAILED,
            f"{name}: {len(begins)} whole steps in {len(samples)} samples: remove the folder"
            " and run again on a machine with less to do",
        )
    return seconds, [
        [bins_of(samples, node, begin, seconds) for begin in begins] for node in range(RANKS)
    ]


def draw_traffic(bench, found):
    def paint(axes):
        for at, link in enumerate(TRAFFIC_LINKS):
            for rule in RULES:
                seconds, nodes = found[link, rule]
                bins = nodes[1][0] + nodes[1][1]
                axes[at].plot(
                    [k / BINS for k in range(len(bins))],
                    [b * BINS / seconds / 1e6 for b in bins],
                    label=rule,
                    linewidth=1,
                )
            axes[at].set(xlabel="time (steps)", ylabel="node 1 sends (MB/s)", title=link)
            axes[at].legend()

    bench.draw("traffic", len(TRAFFIC_LINKS), paint)


def traffic(bench):
    missing = no_cluster()
    if missing:
        return f"Traffic: left out: {missing}\n\n", []
    runs = [(link, rule) for link in TRAFFIC_LINKS for rule in RULES]
    found = {run: traffic_found(bench, *run) for run in runs}
    shares = {
        run: [statistics.mean(map(busiest, steps)) for steps in nodes]
        for run, (_, nodes) in found.items()
    }
    draw_traffic(bench, found)
    means = {run: statistics.mean(each) for run, each in shares.items()}
    bench.found["busiest"] = means
    rows = [
        [
            *run,
            *(
                f"{share:.2f}, {statistics.mean(map(sum, steps)) / 1e6:.2f}"
                for share, steps in zip(shares[run], found[run][1])
            ),
        ]
        for run in runs
    ]
    nodes = [f"node {n}: share in the busiest tenth, MB a step" for n in range(RANKS)]
    lines = [
        [
            f"{rule}: share of a link's bytes in the busiest tenth of a step, {link} (DP"
            f" {means[link, DP]:.2f})",
            "balanced: 0.10",
            f"{means[link, rule]:.2f}",
            "messages are as long as a storage, and a link carries one at its full rate",
        ]
        for link, rule in runs
        if rule != DP
    ]
    return markdown(["link", "traffic", *nodes], rows), lines


# --------------------------------------------------------------------------------------------------
# Step time over links


def ideal(c):
    """Step times of an ideal DP and an ideal CDP, forward 1, backward 2."""
    return 1 + max(2, c), max(3, c)


def measured_speed(bench):
    """(c, rule) -> lowest of the rounds' median ms. The rules take turns, so a drift of the machine
    favours none."""
    times = {}
    for round_ in range(bench.plan.rounds):
        for c in bench.plan.loads:
            for rule in RULES:
                name = f"speed/c{c:g}_{rule}_round{round_}".replace(" ", "_")
                times.setdefault((c, rule), []).append(
                    step_ms(cluster_run(bench, name, RULES[rule], rate_of(bench, c)))
                )
    return {place: min(found) for place, found in times.items()}


def pytorch_speed(bench):
    """c -> ms of PyTorch's DistributedDataParallel over gloo on the same cluster, one round; empty
    where bench_peers.sh has not installed it."""
    if not (PEERS / "installed").exists():
        return {}
    command = [
        "env",
        "GLOO_SOCKET_IFNAME=eth0",
        "OMP_NUM_THREADS=1",
        PEERS / "bin" / "python",
        "scripts/bench_peers.py",
        "--peer",
        "eager",
        "--cases",
        "cyclic",
    ]
    return {
        c: step_ms(
            bench.run(f"speed/c{c:g}_PyTorch", [*on_cluster(bench, rate_of(bench, c)), *command])
        )
        for c in bench.plan.loads
    }


def measured_jitter(bench, pulse):
    """rule -> the same over a fast link, while ranks stop for a moment."""
    times = {}
    for round_ in range(bench.plan.rounds):
        for rule in RULES:
            watch = Pulses(cluster_name(bench.options.into), bench.options.program, pulse)
            name = f"speed/jitter_{rule}_round{round_}".replace(" ", "_")
            log = cluster_run(bench, name, RULES[rule], 0, watch)
            times.setdefault(rule, []).append(mean_ms(log))
    return {rule: min(found) for rule, found in times.items()}


def speed(bench):
    missing = no_cluster()
    if missing:
        return f"Speed: left out: {missing}\n\n", []
    times = measured_speed(bench)
    pulse = round(
        step_ms(cluster_run(bench, "speed/calibration", (), 0)) / 3000, 3
    )  # a forward pass
    jitter, pytorch = measured_jitter(bench, pulse), pytorch_speed(bench)
    others = [rule for rule in RULES if rule != DP]

    def cells(base, found):
        return [
            f"{base:.0f}",
            *(f"{found(rule):.0f}, {base / found(rule):.2f}x" for rule in others),
        ]

    lines = []
    for c in bench.plan.loads:
        link = f"c = {c:g}: {rate_of(bench, c):.0f} Mbit/s" if c else "unlimited"
        lines.append(
            [
                link,
                f"{ideal(c)[0] / ideal(c)[1]:.2f}x",
                *cells(times[c, DP], lambda rule, at=c: times[at, rule]),
                f"{pytorch[c]:.0f}" if pytorch else "not installed",
            ]
        )
    lines.append(
        [
            (
                f"unlimited, one rank after another stops for {pulse * 1000:.0f} ms, pauses of"
                f" {5000 * pulse:.0f} ms"
            ),
            "",
            *cells(jitter[DP], jitter.get),
            "",
        ]
    )

    def paint(axes):
        for rule in others:
            axes[0].plot(
                bench.plan.loads,
                [times[c, DP] / times[c, rule] for c in bench.plan.loads],
                marker="o",
                label=rule,
            )
        places = [k / 20 for k in range(int(20 * max(bench.plan.loads)) + 1)]
        axes[0].plot(
            places,
            [ideal(c)[0] / ideal(c)[1] for c in places],
            color="black",
            linestyle="--",
            label="paper's schedule, ideal",
        )
        axes[0].set(xlabel="c: time of DP's messages (forward = 1)", ylabel="speed against DP")
        axes[0].legend()

    bench.draw("speed", 1, paint)
    table = markdown(
        [
            "link",
            "ideal CDP over DP",
            f"{DP}: ms a step",
            *(f"{rule}: ms, speed against DP" for rule in others),
            "PyTorch DDP: ms",
        ],
        lines,
    )

    def told(base, found):
        return "; ".join(f"{rule} {base / found(rule):.2f}x" for rule in others)

    bench.found["speed"] = {rule: times[BALANCE, DP] / times[BALANCE, rule] for rule in others}
    rows = [
        [
            "speed against overlapped DP at c = F + B (goal 1.2x)",
            "no times; ideal 1.33x",
            told(times[BALANCE, DP], lambda rule: times[BALANCE, rule]),
            (
                "DP here hides messages behind the backward pass; CDP's depend on each other, from"
                " rank to rank"
            ),
        ],
        [
            "the same, unlimited link (goal 0.98x)",
            "ideal 1.00x",
            told(times[UNLIMITED, DP], lambda rule: times[UNLIMITED, rule]),
            "messages take the processor's time",
        ],
        [
            "the same, ranks that stop now and then, unlimited link (mean step)",
            "",
            told(jitter[DP], jitter.get),
            "DP waits for the slowest rank in every step, CDP for a neighbour",
        ],
    ]
    return table, rows


# --------------------------------------------------------------------------------------------------
# Quality: losses on text, labels of images

TEXT_MODEL = (
    "--model",
    "layers=2,heads=4,channels=64,vocab=256",
    "--seq-len",
    16,
    "--micro-batch",
    4,
    "--batch-tokens",
    64,
    "--final-lr-fraction",
    0,
)
IMAGE_CUT, SMALL_STEP = 4, 4  # stages, images a step
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of t by number of seeds


@dataclass(frozen=True)
class Setting:
    """What all rules share. Flags come after those of training()."""

    data: str  # "text" or "images"
    optimizer: str
    steps: int
    rates: tuple
    flags: tuple = ()


# Steps of 4 x 8 bytes of text, or of 4 images.
SHORT_TEXT = ("--seq-len", 8, "--batch-tokens", 32)
SETTINGS = {
    "text, SGD without momentum": Setting(
        "text", "sgd", 24000, ("1e-1", "3e-1", "6e-1"), ("--momentum", 0, *SHORT_TEXT)
    ),
    "text, AdamW": Setting(
        "text", "adamw", 24000, ("1e-3", "2e-3", "4e-3"), ("--beta2", 0.99, *SHORT_TEXT)
    ),
    "images, SGD without momentum": Setting(
        "images", "sgd", 12000, ("1e-1", "3e-1", "1", "2"), ("--momentum", 0)
    ),
    "images, AdamW": Setting(
        "images", "adamw", 6000, ("2e-3", "4e-3", "8e-3"), ("--beta2", 0.99)
    ),
    "text, SGD with Nesterov momentum": Setting(
        "text",
        "sgd",
        24000,
        ("1e-2", "3e-2", "6e-2"),
        ("--momentum", 0.9, "--nesterov", 1, *SHORT_TEXT),
    ),
}


@dataclass(frozen=True)
class Candidate:
    """What is compared at its best learning rate. DP knows no N. setting: of SETTINGS, or none."""

    rule: str
    N: int = 0
    optimizer: str = "adamw"
    setting: str = ""

    def __str__(self):
        return (
            self.rule
            + (f", N={self.N}" if self.N else "")
            + (f", {self.setting or self.optimizer}" if self != self.plain() else "")
        )

    def plain(self):
        return Candidate(self.rule, self.N)

    def base(self):
        return Candidate(DP, 0, self.optimizer, self.setting)

    def flags(self):
        return [
            "--optimizer",
            self.optimizer,
            *RULES[self.rule],
            *(["--cyclic-stages", self.N] if self.N else []),
            *(SETTINGS[self.setting].flags if self.setting else ()),
        ]


def last_validation(log):
    return found_events(log, "val")[-1]


@dataclass(frozen=True)
class Tuned:
    """What a candidate reached: at each rate, the mean over the seeds that choose; at the best of
    them, each of the seeds that are told."""

    grid: dict
    rate: str
    scores: list

    @property
    def mean(self):
        return statistics.mean(self.scores)

    def against(self, base):
        """The mean difference by seed, and half of its 95 % interval (Student's t): 0 of a
        single run."""
        differences = [mine - its for mine, its in zip(self.scores, base.scores, strict=True)]
        n = len(differences)
        doubt = STUDENT[n] * statistics.stdev(differences) / n**0.5 if n > 1 else 0.0
        return statistics.mean(differences), doubt


def run_name(part, one, rate, seed):
    """The folder of a run."""
    words = f"{one}, lr {rate}, seed {seed}".replace(", ", "_").replace(" ", "").replace("/", "_")
    return f"{part}/{words}"


def tuned(bench, part, every, rates, command, score, better):
    """Candidate -> Tuned. better: min or max."""
    plan = bench.plan

    def runs(jobs):
        names = {job: run_name(part, *job) for job in dict.fromkeys(jobs)}
        logs = bench.run_together({name: command(*job) for job, name in names.items()})
        return {job: score(logs[name]) for job, name in names.items()}

    tried = runs(
        (one, rate, seed)
        for one in every
        for rate in rates[one.optimizer]
        for seed in plan.tuning_seeds
    )
    grids = {
        one: {
            rate: statistics.mean(tried[one, rate, seed] for seed in plan.tuning_seeds)
            for rate in rates[one.optimizer]
        }
        for one in every
    }
    best = {one: better(grid, key=grid.get) for one, grid in grids.items()}
    found = tried | runs(
        (one, best[one], seed)
        for one in every
        for seed in plan.seeds
        if (one, best[one], seed) not in tried
    )
    return {
        one: Tuned(grids[one], best[one], [found[one, best[one], seed] for seed in plan.seeds])
        for one in every
    }


def training(bench, data, steps, model, validation, one, rate, seed):
    return bench.train(
        data,
        DP,
        *model,
        "--steps",
        steps,
        "--lr",
        rate,
        "--warmup",
        steps // 10,
        "--weight-decay",
        0.1 if one.optimizer == "adamw" else 0,
        "--val-every",
        steps,
        "--val-batches",
        validation,
        "--seed",
        seed,
        *one.flags(),
    )


def against(one, base, number):
    """How far a candidate is from DP, and the 95 % interval of that."""
    mean, doubt = one.against(base)
    return number(mean) + (f" ± {number(doubt).lstrip('+')}" if doubt else "")


def quality_table(title, found, number, difference):
    """Of candidates of one or several optimizers; number and difference print a score."""
    rows = []
    for one, result in found.items():
        base = found[one.base()]
        rows.append(
            [
                str(one),
                ", ".join(f"{rate}: {number(score)}" for rate, score in result.grid.items()),
                result.rate,
                " ".join(map(number, result.scores)),
                number(result.mean),
                "" if one.rule == DP else against(result, base, difference),
            ]
        )
    header = [
        title,
        "mean of the seeds that choose, by rate",
        "rate",
        "by seed",
        "mean",
        "against DP by seed, 95 % interval",
    ]
    return markdown(header, rows)


def draw_quality(bench, name, found, label):
    """Each candidate's seeds as points, beside DP's."""

    def paint(axes):
        names = list(map(str, found))
        for at, result in enumerate(found.values()):
            axes[0].plot([at] * len(result.scores), result.scores, "o", color="C0", alpha=0.6)
            axes[0].plot([at - 0.25, at + 0.25], [result.mean] * 2, color="black")
        axes[0].set_xticks(range(len(names)), names, rotation=20, fontsize=8)
        axes[0].set(ylabel=label, title="points: seeds; bars: means")

    bench.draw(name, 1, paint)


def quality_lines(bench, found, what, paper, difference, why):
    """One line for each rule and optimizer; whether each candidate is DP's equal: 0 is in its
    interval, or it is within 1 %."""
    bench.found.setdefault("delay", []).extend(
        (one, abs(mean) <= max(0.01 * base.mean, doubt))
        for one, result in found.items()
        if one.rule != DP
        for base in (found[one.base()],)
        for mean, doubt in (result.against(base),)
    )
    rows = []
    for plain in dict.fromkeys(one.base() for one in found):
        for rule in (V1, V2):
            cells = "; ".join(
                f"N={one.N}: {against(result, found[plain], difference)}"
                for one, result in found.items()
                if (one.rule, one.base()) == (rule, plain)
            )
            name = plain.setting or plain.optimizer
            rows.append([f"{rule}: {what} against DP, {name}", paper, cells, why])
    return rows


def quality(bench):
    plan = bench.plan
    steps = bench.options.steps or plan.text_steps
    every = [
        Candidate(rule, N, optimizer)
        for optimizer in plan.text_rates
        for rule, N in ((DP, 0), *((rule, N) for N in plan.cuts for rule in (V1, V2)))
    ]
    found = tuned(
        bench,
        "quality",
        every,
        plan.text_rates,
        lambda *job: training(bench, TEXT, steps, TEXT_MODEL, 800, *job),
        lambda log: last_validation(log)["loss"],
        min,
    )
    table = quality_table(
        f"text, {steps} steps of 64 bytes, validation loss",
        found,
        "{:.4f}".format,
        "{:+.4f}".format,
    )
    draw_quality(bench, "quality", found, "validation loss")
    lines = quality_lines(
        bench,
        found,
        "validation loss, text",
        "as good as DP (CNNs, SGD)",
        "{:+.4f}".format,
        "a small GPT, many small steps (docs/results/cyclic.md)",
    )
    return table, lines


def setting_found(bench, name):
    """Candidate -> Tuned in one setting: rates and seeds are chosen within it."""
    setting = SETTINGS[name]
    steps = bench.options.steps or int(setting.steps * bench.plan.setting_share)
    text = setting.data == "text"
    prefix = TEXT if text else bench.options.images
    model = TEXT_MODEL if text else image_model(prefix, SMALL_STEP, 2)[0]
    flags = ("--warmup", steps * 2 // 5, "--final-lr-fraction", 0)

    def command(*job):
        validation = 1600 if text else -1
        return [*training(bench, prefix, steps, model, validation, *job), *flags]

    return tuned(
        bench,
        "settings",
        [Candidate(rule, 0 if rule == DP else RANKS, setting.optimizer, name) for rule in QUALITY],
        {setting.optimizer: setting.rates},
        command,
        (lambda log: last_validation(log)["loss"]) if text else labels_of,
        min if text else max,
    )


def settings(bench):
    """Each setting is a comparison of its own."""
    found = {name: setting_found(bench, name) for name in there_settings(bench)}
    table, lines = "", []
    for data, title, number, difference in (
        ("text", "text, steps of 32 bytes, validation loss", "{:.4f}".format, "{:+.4f}".format),
        ("images", "steps of 4 images, right labels in %", in_percent, points),
    ):
        these = {}
        for name in found:
            these |= found[name] if SETTINGS[name].data == data else {}
        if these:
            table += quality_table(title, these, number, difference)
            draw_quality(bench, f"settings_{data}", these, title)
            lines += quality_lines(
                bench, these, title, "no difference", difference, "noise limits the rate"
            )
    return table, lines


def there_settings(bench):
    """The settings whose data is there."""
    images_too = there_images(bench)
    return [name for name, one in SETTINGS.items() if one.data == "text" or images_too]


def settings_runs(bench):
    return {
        "settings": sum(
            tuned_runs(bench.plan, {one.optimizer: one.rates}, len(QUALITY))
            for one in (SETTINGS[name] for name in there_settings(bench))
        )
    }


def image_model(prefix, images, layers=4):
    """(flags for so many images a step, how many pixels) of labelled shards: a document is the end
    of text, an image, its label."""
    shard = Path(sorted(glob.glob(f"{prefix}_train_*.bin"))[0]).read_bytes()
    labels, first = struct.unpack_from("<2i", shard, 12)
    tokens = memoryview(shard)[1024:].cast("H")
    pixels = next(at for at in range(1, len(tokens)) if tokens[at] == tokens[0]) - 2
    return [
        "--model",
        f"layers={layers},heads={2 * layers},channels=64,vocab={first + labels}",
        "--seq-len",
        pixels + 1,
        "--micro-batch",
        4,
        "--batch-tokens",
        images * (pixels + 1),
        "--final-lr-fraction",
        0.1,
    ], pixels


def there_images(bench):
    prefix = bench.options.images
    return all(glob.glob(f"{prefix}_{which}_*.bin") for which in ("train", "val"))


def with_images(part, runs):
    """A part, and what it runs, that is left out where there are no images."""

    def run(bench):
        prefix = bench.options.images
        if there_images(bench):
            return part(bench, prefix)
        left_out = f"Images: left out: no {prefix}_train_*.bin: scripts/prepare_data.py --images"
        return left_out + " makes them.\n\n", []

    return run, lambda bench: runs(bench) if there_images(bench) else {}


def in_percent(share):
    return f"{100 * share:.1f}"


def points(difference):
    return f"{100 * difference:+.1f}"


def labels_of(log):
    return last_validation(log)["label_accuracy"]


def images(bench, prefix):
    plan = bench.plan
    model, pixels = image_model(prefix, SMALL_STEP)
    steps = bench.options.steps or plan.image_steps
    every = [
        Candidate(rule, 0 if rule == DP else IMAGE_CUT, optimizer)
        for optimizer in plan.image_rates
        for rule in (DP, V1, V2)
    ]
    found = tuned(
        bench,
        "images",
        every,
        plan.image_rates,
        lambda *job: training(bench, prefix, steps, model, -1, *job),
        labels_of,
        max,
    )
    table = quality_table(
        f"images of {pixels} pixels, {steps} steps of {SMALL_STEP}, right labels in %",
        found,
        in_percent,
        points,
    )
    draw_quality(bench, "images", found, "share of right labels")
    lines = quality_lines(
        bench,
        found,
        "right labels of held-out images, points of a percent,",
        "CIFAR-10 and ImageNet: the same within noise",
        points,
        f"a GPT that reads pixels; the paper's CNNs are not re-made ({prefix})",
    )
    return table, lines


CAUSES = {
    "as it is": (),
    "warm-up over 40 % of the steps": ("--warmup", "40 %"),
    "beta1 0.5": ("--beta1", 0.5),
    "beta2 0.999": ("--beta2", 0.999),
    "clipped at 0.5": ("--grad-clip", 0.5),
    "Nesterov": ("--nesterov", 1),
    "Nesterov, warm-up over 40 %": ("--nesterov", 1, "--warmup", "40 %"),
}


def causes(bench):
    """Few large steps, and one thing at a time that is otherwise."""
    plan = bench.plan
    steps = bench.options.steps or plan.cause_steps
    model = (*TEXT_MODEL, "--seq-len", 64, "--batch-tokens", 256)
    rules = [Candidate(DP), Candidate(V1, RANKS), Candidate(V2, RANKS)]
    jobs = {
        (name, one, rate, seed): [
            *training(bench, TEXT, steps, model, 200, one, rate, seed),
            *(steps * 2 // 5 if word == "40 %" else word for word in flags),
        ]
        for name, flags in CAUSES.items()
        for one in rules
        if not (one.rule == V2 and "--grad-clip" in flags)  # it has no norm in time
        for rate in plan.cause_rates
        for seed in plan.cause_seeds
    }
    names = {job: run_name(f"causes/{job[0].replace(' ', '-')}", *job[1:]) for job in jobs}
    logs = bench.run_together({names[job]: command for job, command in jobs.items()})

    def mean(name, one, rate):
        return statistics.mean(
            last_validation(logs[names[name, one, rate, seed]])["loss"] or math.inf
            for seed in plan.cause_seeds
        )

    def best(name, one):
        if (name, one, plan.cause_rates[0], plan.cause_seeds[0]) not in jobs:
            return "refused"
        rate = min(plan.cause_rates, key=lambda rate: mean(name, one, rate))
        return f"{mean(name, one, rate):.4f} ({rate})"

    rows = [[name, *(best(name, one) for one in rules)] for name in CAUSES]
    header = [
        f"text, {steps} steps of 256 bytes, AdamW: validation loss (at the best rate)",
        *map(str, rules),
    ]
    return markdown(header, rows), []


# --------------------------------------------------------------------------------------------------
# ZeRO: a stage's states have one owner

ZERO3, LATENCY = "ZeRO-3", "2ms"
ZERO = {
    ZERO3: ("--zero", "3"),
    **{f"ZeRO-{rule}": (*RULES[rule], "--cyclic-mode", "zero") for rule in (V1, V2, SLACK)},
}


def zero_links(bench):
    """What the modes are compared over: name -> (rate, further words for the cluster, whether ranks
    stop now and then)."""
    links = {
        "unlimited": (0, (), False),
        "c = F + B": (rate_of(bench, BALANCE), (), False),
        "unlimited, ranks that stop": (0, (), True),
    }
    if not no_cluster("--latency", LATENCY):
        links[f"unlimited, {LATENCY} later"] = (0, ("--latency", LATENCY), False)
    return links


def measured_zero(bench, links, pulse):
    """(link, mode) -> the logs of all rounds. The modes take turns."""
    logs = {}
    for round_ in range(bench.plan.rounds):
        for k, (link, (rate, words, stops)) in enumerate(links.items()):
            for mode, flags in ZERO.items():
                watch = (
                    Pulses(cluster_name(bench.options.into), bench.options.program, pulse)
                    if stops
                    else None
                )
                name = f"zero/link{k}_{mode}_round{round_}".replace(" ", "_")
                logs.setdefault((link, mode), []).append(
                    cluster_run(bench, name, flags, rate, watch, words)
                )
    return logs


def zero(bench):
    missing = no_cluster()
    if missing:
        return f"ZeRO: left out: {missing}\n\n", []
    links, pulse = zero_links(bench), round(
        step_ms(cluster_run(bench, "speed/calibration", (), 0)) / 3000, 3
    )
    logs = measured_zero(bench, links, pulse)

    def time_of(link, mode):
        return min(map(mean_ms if links[link][2] else step_ms, logs[link, mode]))

    def told(link):
        return "; ".join(
            f"{mode} {time_of(link, ZERO3) / time_of(link, mode):.2f}x"
            for mode in ZERO
            if mode != ZERO3
        )

    times = markdown(
        ["ms a step", *ZERO],
        [[link, *(f"{time_of(link, mode):.0f}" for mode in ZERO)] for link in links],
    )
    memories = {
        mode: found_events(logs["unlimited", mode][0], "end")[-1]["memory"]["measured"]
        for mode in ZERO
    }
    table = markdown(
        ["rank 0", "MB sent in a step", "parameters, MiB", "optimizer, MiB", "all memory, MiB"],
        [
            [
                mode,
                f"{sent_bytes(logs['unlimited', mode][0]) / 1e6:.2f}",
                *(
                    f"{memories[mode][kind] / plot.MIB:.2f}"
                    for kind in ("parameters", "optimizer", "device")
                ),
            ]
            for mode in ZERO
        ],
    )
    sent = {
        mode: found_events(logs["unlimited", mode][0], "end")[-1]["traffic"]["measured"]["inter"]
        for mode in ZERO
        if mode != ZERO3
    }
    bench.found["collectives"] = sum(
        bytes_ for kinds in sent.values() for kind, bytes_ in kinds.items() if kind != "send"
    )
    bench.found["zero speed"] = [
        time_of(link, ZERO3) / time_of(link, mode) for link in links for mode in sent
    ]
    goals = {"unlimited": "0.98x", "c = F + B": "0.98x"}
    return times + table, [
        [
            f"speed against ZeRO-3, {link} (goal {goals.get(link, '1.1x')})",
            "O(log N) to O(1) messages in turn",
            told(link),
            "ZeRO-3 gathers ahead of use; the owner of the longest stage sends most",
        ]
        for link in links
    ]


# --------------------------------------------------------------------------------------------------
# The claims


def shares_of(shares, dp):
    """The shares of bytes, by link and rule: of DP, or of the cyclic rules."""
    return {(link, rule): share for (link, rule), share in shares.items() if (rule == DP) == dp}


CLAIMS = (
    # Stages of two units, of which the embedding and the head are lighter; within 2 %. At N = 8 the
    # least of the schedule is 1 / 1.15 of its peak, however long each action takes.
    Claim(
        "C1",
        "(N + 1) / 2N of the peak",
        ("memory",),
        lambda found: f"{found[-1][1]:.4f} (N = {found[-1][0]}); peak over mean {found[-1][2]:.2f}",
        met=lambda found: found[-1][2] <= 1.15
        and all(ratio <= 1.02 * (N + 1) / 2 / N for N, ratio, _ in found),
        partly=lambda found: all(ratio < 1 for _, ratio, _ in found),
    ),
    Claim(
        "C2",
        "0.10 in the busiest tenth",
        ("busiest",),
        lambda shares: f"{span(shares_of(shares, dp=False).values())},"
        f" DP {span(shares_of(shares, dp=True).values())}",
        met=lambda shares: max(shares_of(shares, dp=False).values()) <= 0.12,
        partly=lambda shares: all(
            share < 0.9 * shares[link, DP]
            for (link, _), share in shares_of(shares, dp=False).items()
        ),
    ),
    # GPTs, not the paper's CNNs on CIFAR-10: in part at most.
    Claim(
        "C3",
        "no difference",
        ("delay",),
        lambda found: f"{sum(equal for _, equal in found)} of {len(found)} runs as DP",
        partly=lambda found: any(equal for one, equal in found if one.rule == V2),
    ),
    Claim(
        "C6",
        "no broadcasts",
        ("collectives", "zero speed"),
        lambda bytes_, speed: f"{bytes_} bytes of collectives; {span(speed)}x as fast",
        met=lambda bytes_, speed: bytes_ == 0,
    ),
    # ResNet-50 and ViT are not there.
    Claim("C7", "-30 %, -42 %", ("memory",), lambda found: f"GPT: {percent(found[-1][1])}"),
    Claim(
        "C8",
        "1.33x ideal",
        ("speed",),
        lambda speed: ", ".join(f"{ratio:.2f}x" for ratio in speed.values())
        + " (v1, v2, slack 1)",
        met=lambda speed: speed[V1] >= 1.2 and speed[V2] >= 1.1,
        partly=lambda speed: speed[V1] >= 1.2 or speed[V2] >= 1.1,
    ),
)

# --------------------------------------------------------------------------------------------------
# All of it: parts, each with what it will run at most


def tuned_runs(plan, rates, candidates):
    """Of tuned(), for so many candidates of each optimizer."""
    new = len(set(plan.seeds) - set(plan.tuning_seeds))
    return sum(
        candidates * (len(rates[optimizer]) * len(plan.tuning_seeds) + new) for optimizer in rates
    )


def cluster_runs(group, runs):
    """A part that looks at a calibration first."""
    return lambda bench: (
        {} if no_cluster() else {"speed": 1, group: runs(bench.plan) + (group == "speed")}
    )


def speed_runs(plan):
    with_pytorch = (PEERS / "installed").exists()
    return plan.rounds * len(RULES) * (len(plan.loads) + 1) + with_pytorch * len(plan.loads)


def zero_runs(plan):
    return plan.rounds * len(ZERO) * (3 + (not no_cluster("--latency", LATENCY)))


def cause_runs(bench):
    runs = 3 * len(CAUSES) - 1
    return {"causes": runs * len(bench.plan.cause_rates) * len(bench.plan.cause_seeds)}


PARTS = {
    "memory": (memory, lambda bench: {"memory": 3 * len(bench.plan.memory_cuts)}),
    "traffic": (traffic, cluster_runs("traffic", lambda plan: len(RULES) * len(TRAFFIC_LINKS))),
    "speed": (speed, cluster_runs("speed", speed_runs)),
    "quality": (
        quality,
        lambda bench: {
            "quality": tuned_runs(bench.plan, bench.plan.text_rates, 1 + 2 * len(bench.plan.cuts))
        },
    ),
    "settings": (settings, settings_runs),
    "zero": (zero, cluster_runs("zero", zero_runs)),
    "images": with_images(
        images, lambda bench: {"images": tuned_runs(bench.plan, bench.plan.image_rates, 3)}
    ),
    "causes": (causes, cause_runs),
}


def main():
    parser = parts_parser("reproduce_cyclic", __doc__, PLANS, PARTS)
    parser.add_argument("--images", default="data/digits_images", metavar="PREFIX")
    options = parts_options(parser, "reproduce_cyclic")
    return reproduce_parts("reproduce_cyclic", Bench(options, PLANS), PARTS, CLAIMS)


if __name__ == "__main__":
    sys.exit(main())
