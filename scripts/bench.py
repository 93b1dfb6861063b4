#!/usr/bin/env python3
"""Speed of whole training steps of GPT-2 124M against what this machine's cores can do, in one run:
`make bench`.

    scripts/bench.py [--rounds N] [--part speed|overhead|restart ...]

Every round runs, in turn, the peak of fused multiply-adds and of dot products of bf16
(build/bench_ops) and the real program on each shape, in fp32 and, where the processor has products
of bf16, in bf16, so that what else the machine does hits all. Figures are medians over the rounds;
a ratio is taken within a round. "of the peak" is the rate of the model's arithmetic (products of
the blocks, of causal attention and of the classifier) as a share of the peak of the type that
products are computed in: 1.00 would mean that all cores do nothing but multiply. Then two ranks
with one thread each against one rank with one thread, and the peak memory against what was
predicted.

overhead: the share of the training time that the log, the progress and the look for a stop take, on
GPT-2 124M and on the small model of `make run`. Checksums are of files: what a checkpoint costs is
the time between the step before it and its event. restart: two ranks of GPT-2 124M under
scripts/launch.sh; one is killed; seconds until the log has the next step.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from experiment import random_shard

SHAPES = [(4, 64, 8), (4, 256, 5), (1, 1024, 5)]  # sequences, tokens, steps
LAYERS, CHANNELS, PADDED_VOCAB = 12, 768, 50304


def flops(B, T):
    tokens = B * T
    return (
        3 * tokens * (LAYERS * (24 * CHANNELS**2 + 2 * CHANNELS * T) + 2 * PADDED_VOCAB * CHANNELS)
    )


ENVIRONMENT = dict(
    os.environ,
    **(
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if os.geteuid() == 0
        else {}
    ),
)


def read_log(folder):
    with open(os.path.join(folder, "log.jsonl")) as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def flags(folder, threads, B, T, steps, model="gpt2:124M", dtype="fp32"):
    return [
        "./train_gpt",
        "--train",
        os.path.join(folder, "train.bin"),
        "--model",
        model,
        "--dtype",
        dtype,
        "--micro-batch",
        str(B),
        "--seq-len",
        str(T),
        "--steps",
        str(steps),
        "--threads",
        str(threads),
        "--val-every",
        "0",
        "--grad-clip",
        "0",
        "--weight-decay",
        "0.1",
        "--log",
        os.path.join(folder, "log.jsonl"),
    ]


def train(folder, ranks, threads, B, T, steps, **model):
    """Milliseconds of the median step (the first is left out), and the log's events."""
    subprocess.run(
        [
            "mpirun",
            "--oversubscribe",
            "-np",
            str(ranks),
            *flags(folder, threads, B, T, steps, **model),
        ],
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    events = read_log(folder)
    return (
        statistics.median(e["ms"] for e in events if e["event"] == "step" and e["step"] > 1),
        events,
    )


def peak_rates(threads):
    """GFLOP/s of all threads together at this moment: {"fp32": multiply-adds, "bf16": dot products
    of pairs, 0 where the build has none}."""
    text = subprocess.run(
        ["build/bench_ops", str(threads), "peak"], check=True, capture_output=True, text=True
    ).stdout
    rates = re.search(r"multiply-adds ([\d.]+) GFLOP/s, of bf16 dot products ([\d.]+)", text)
    return dict(zip(("fp32", "bf16"), map(float, rates.groups())))


def spread(values, form="{:.2f}"):
    return " ".join(form.format(f(values)) for f in (min, statistics.median, max))


def speed(folder, rounds, cores):
    runs, pairs, memory = {}, {}, {}  # {(dtype, shape): [(ms, share of the peak) of a round]}
    for _ in range(rounds):
        for dtype in ("fp32", "bf16"):
            for shape in SHAPES:
                rates = peak_rates(cores)
                ms, events = train(folder, 1, cores, *shape, dtype=dtype)
                if dtype == "bf16" and events[0]["compute"] != "bf16":
                    continue
                share = flops(*shape[:2]) / (ms * 1e6) / rates[dtype] if rates[dtype] else 0
                runs.setdefault((dtype, shape), []).append((ms, share))
                memory[dtype] = events[-1]["memory"]  # of the last shape, B=1 T=1024
            pairs.setdefault(dtype, []).append(
                train(folder, 2, 1, 4, 64, 5, dtype=dtype)[0]
                / train(folder, 1, 1, 4, 64, 5, dtype=dtype)[0]
            )
    print(f"GPT-2 124M, {cores} threads, {rounds} rounds; ratios: lowest median highest")
    for (dtype, (B, T, steps)), found in runs.items():
        against = ""
        if dtype != "fp32":
            ratios = [a[0] / b[0] for a, b in zip(runs["fp32", (B, T, steps)], found)]
            against = f"   fp32's time over it {spread(ratios)}"
        print(
            f"  {dtype} step B={B} T={T:<5} {statistics.median(ms for ms, _ in found):8.0f} ms"
            f"   of the peak {spread([share for _, share in found])}{against}"
        )
    for dtype, found in memory.items():
        both = [
            sum(found[k][name] for name in ("device", "host")) / 2**30
            for k in ("predicted", "measured")
        ]
        print(
            f"  {dtype} 2 ranks x 1 thread against 1 rank x 1 thread {spread(pairs[dtype])};"
            f" memory B=1 T=1024 {both[1]:.2f} GiB at its peak, {both[0]:.2f} GiB predicted"
        )


def overhead(folder, rounds, cores):
    for name, run in (
        ("GPT-2 124M, B=4 T=64", dict(ranks=1, threads=cores, B=4, T=64, steps=8)),
        (
            "the model of make run",
            dict(
                ranks=2,
                threads=1,
                B=4,
                T=64,
                steps=500,
                model="layers=4,heads=4,channels=128,vocab=256",
            ),
        ),
    ):
        random_shard(Path(folder) / "train.bin", 256, 200_000)
        ends = [train(folder, **run) for _ in range(rounds)]
        print(
            f"  overhead, {name}: {spread([100 * e[-1]['overhead'] for _, e in ends], '{:.4f}')} %"
            f" of steps of {statistics.median(ms for ms, _ in ends):.1f} ms"
        )


def ranks_of(folder):
    """Process numbers of the ranks that write this folder's log."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if words[0] == b"./train_gpt" and os.path.join(folder, "log.jsonl").encode() in words:
            found.append(int(entry))
    return found


def wait_for(event, folder, begin):
    """The first event of its kind among those from number `begin` on; returns the number after
    it."""
    while True:
        time.sleep(0.01)
        events = read_log(folder) if os.path.exists(os.path.join(folder, "log.jsonl")) else []
        for i, e in enumerate(events[begin:], begin + 1):
            if e["event"] == event:
                return i


def restart(folder, rounds, cores):
    out, seconds = os.path.join(folder, "out"), []
    command = [
        "scripts/launch.sh",
        "--ranks",
        "2",
        "--",
        *flags(folder, max(1, cores // 2), 4, 64, 10**6),
        "--save-every",
        "3",
        "--keep",
        "1",
        "--out",
        out,
    ]
    run = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        at = 0
        for _ in range(rounds):
            at = wait_for("step", folder, wait_for("checkpoint", folder, at))
            begin = time.monotonic()
            os.kill(ranks_of(folder)[-1], signal.SIGKILL)
            at = wait_for("step", folder, wait_for("start", folder, at))
            seconds.append(time.monotonic() - begin)
    finally:
        open(os.path.join(out, "stop"), "w").close()
        run.wait()
    step = statistics.median(e["ms"] for e in read_log(folder) if e["event"] == "step") / 1000
    print(
        f"  from a killed rank to the next step, 2 ranks of GPT-2 124M: {spread(seconds)} s; "
        f"a step takes {step:.2f} s"
    )


PARTS = {"speed": speed, "overhead": overhead, "restart": restart}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    options = parser.parse_args()
    for part in options.part or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            random_shard(Path(folder) / "train.bin", 50257, 200_000)
            PARTS[part](folder, options.rounds, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
