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
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import run_log
from experiment import cores, last, local_ranks, processes, random_shard, step_ms, words

SHAPES = [(4, 64, 8), (4, 256, 5), (1, 1024, 5)]  # sequences, tokens, steps
LAYERS, CHANNELS, PADDED_VOCAB = 12, 768, 50304


def flops(B, T):
    tokens = B * T
    return (
        3 * tokens * (LAYERS * (24 * CHANNELS**2 + 2 * CHANNELS * T) + 2 * PADDED_VOCAB * CHANNELS)
    )


ENVIRONMENT = dict(os.environ)
if os.geteuid() == 0:
    ENVIRONMENT.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def train_words(folder, threads, B, T, steps, model="gpt2:124M", dtype="fp32"):
    return words("./train_gpt --train", folder / "train.bin", "--log", folder / "log.jsonl",
                 f"--model {model} --dtype {dtype} --micro-batch {B} --seq-len {T} --steps {steps}",
                 f"--threads {threads} --val-every 0 --grad-clip 0 --weight-decay 0.1")


def train(folder, ranks, threads, B, T, steps, **model):
    """The log; milliseconds of its median step but the first."""
    command = [*local_ranks(ranks), *train_words(folder, threads, B, T, steps, **model)]
    subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    log = folder / "log.jsonl"
    return log, step_ms(log, 1)


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


def speed(folder, rounds):
    threads, runs, pairs, memory = cores(), {}, {}, {}  # runs: {(dtype, shape): of each round}
    for _ in range(rounds):
        for dtype in ("fp32", "bf16"):
            for shape in SHAPES:
                rates = peak_rates(threads)
                log, ms = train(folder, 1, threads, *shape, dtype=dtype)
                if dtype == "bf16" and last(log, "start")["compute"] != "bf16":
                    continue
                share = flops(*shape[:2]) / (ms * 1e6) / rates[dtype] if rates[dtype] else 0
                runs.setdefault((dtype, shape), []).append((ms, share))
                memory[dtype] = last(log, "end")["memory"]  # of the last shape, B=1 T=1024
            two, one = (train(folder, ranks, 1, 4, 64, 5, dtype=dtype)[1] for ranks in (2, 1))
            pairs.setdefault(dtype, []).append(two / one)
    print(f"GPT-2 124M, {threads} threads, {rounds} rounds; ratios: lowest median highest")
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
        predicted, measured = (
            (found[side]["device"] + found[side]["host"]) / 2**30
            for side in ("predicted", "measured")
        )
        print(
            f"  {dtype} 2 ranks x 1 thread against 1 rank x 1 thread {spread(pairs[dtype])};"
            f" memory B=1 T=1024 {measured:.2f} GiB at its peak, {predicted:.2f} GiB predicted"
        )


# of make run
SMALL = "layers=4,heads=4,channels=128,vocab=256"


def overhead(folder, rounds):
    for name, run in (
        ("GPT-2 124M, B=4 T=64", dict(ranks=1, threads=cores(), steps=8)),
        ("the model of make run", dict(ranks=2, threads=1, steps=500, model=SMALL)),
    ):
        random_shard(folder / "train.bin", 256, 200_000)
        shares, times = [], []
        for _ in range(rounds):
            log, ms = train(folder, B=4, T=64, **run)
            shares.append(100 * last(log, "end")["overhead"])
            times.append(ms)
        share, ms = spread(shares, "{:.4f}"), statistics.median(times)
        print(f"  overhead, {name}: {share} % of steps of {ms:.1f} ms")


def wait_for(kind, log, begin):
    """The first event of its kind among those from number `begin` on; returns the number after
    it."""
    while True:
        time.sleep(0.01)
        found = list(run_log.events(log)) if log.exists() else []
        for i, event in enumerate(found[begin:], begin + 1):
            if event["event"] == kind:
                return i


def restart(folder, rounds):
    out, log, seconds, at = folder / "out", folder / "log.jsonl", [], 0
    command = words(
        "scripts/launch.sh --ranks 2 --", train_words(folder, max(1, cores() // 2), 4, 64, 10**6),
        "--save-every 3 --keep 1 --out", out,
    )
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    run = subprocess.Popen(command, env=ENVIRONMENT, **nothing)
    try:
        for _ in range(rounds):
            at = wait_for("step", log, wait_for("checkpoint", log, at))
            begin = time.monotonic()
            ranks = [pid for pid, line in processes("train_gpt") if str(log) in line]
            os.kill(max(ranks), signal.SIGKILL)
            at = wait_for("step", log, wait_for("start", log, at))
            seconds.append(time.monotonic() - begin)
    finally:
        (out / "stop").touch()
        run.wait()
    print(
        f"  from a killed rank to the next step, 2 ranks of GPT-2 124M: {spread(seconds)} s;"
        f" a step takes {step_ms(log, 0) / 1000:.2f} s"
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
            PARTS[part](Path(folder), options.rounds)


if __name__ == "__main__":
    main()
