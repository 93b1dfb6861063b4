#!/usr/bin/env python3
"""Speed of whole training steps of GPT-2 124M against this machine's own BLAS, in one run: `make bench`.

    scripts/bench.py [--rounds N]

Every round runs, in turn, the matrix products alone (build/bench_ops: cblas_sgemm on the same shapes) and the real program
on each shape, so that what else the machine does hits both. Figures are medians over the rounds; a ratio is taken within a
round. "of sgemm" is the rate of the model's arithmetic (products of the blocks, of causal attention and of the classifier)
as a share of sgemm's rate: 1.00 would mean that everything but the products is free. Then two ranks with one thread each
against one rank with one thread, and the peak memory against what was predicted.
"""
import argparse
import array
import json
import os
import random
import re
import statistics
import subprocess
import tempfile

SHAPES = [(4, 64, 8), (4, 256, 5), (1, 1024, 5)]  # sequences, tokens, steps
LAYERS, CHANNELS, PADDED_VOCAB = 12, 768, 50304


def write_shard(path, tokens=200000):
    header = array.array("i", [20240520, 1, tokens] + [0] * 253)
    words = array.array("H", (random.Random(1).randrange(50257) for _ in range(tokens)))
    with open(path, "wb") as f:
        f.write(header.tobytes() + words.tobytes())


def flops(B, T):
    tokens = B * T
    return 3 * tokens * (LAYERS * (24 * CHANNELS**2 + 2 * CHANNELS * T) + 2 * PADDED_VOCAB * CHANNELS)


def train(folder, ranks, threads, B, T, steps):
    """Milliseconds of the median step (the first is left out), and the log's last event."""
    log = os.path.join(folder, "log.jsonl")
    env = dict(os.environ, **({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}))
    subprocess.run(["mpirun", "--oversubscribe", "-np", str(ranks), "./train_gpt", "--train", os.path.join(folder, "train.bin"), "--model", "gpt2:124M",
                    "--micro-batch", str(B), "--seq-len", str(T), "--steps", str(steps), "--threads", str(threads), "--val-every", "0",
                    "--grad-clip", "0", "--weight-decay", "0.1", "--log", log], env=env, check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in open(log)]
    return statistics.median(e["ms"] for e in events if e["event"] == "step" and e["step"] > 1), events[-1]


def sgemm_rates(threads):
    """GFLOP/s of cblas_sgemm on the products of a step, for each shape."""
    text = subprocess.run(["build/bench_ops", str(threads), "2"], check=True, capture_output=True, text=True).stdout
    return [float(x) for x in re.findall(r"sgemm alone [\d.]+ ms at ([\d.]+) GFLOP/s", text)]


def spread(values, form="{:.2f}"):
    return " ".join(form.format(f(values)) for f in (min, statistics.median, max))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cores = len(os.sched_getaffinity(0))
    ms, shares, pairs, memory = {s: [] for s in SHAPES}, {s: [] for s in SHAPES}, [], None
    with tempfile.TemporaryDirectory() as folder:
        write_shard(os.path.join(folder, "train.bin"))
        for _ in range(rounds):
            rates = sgemm_rates(cores)
            for shape, rate in zip(SHAPES, rates):
                step, end = train(folder, 1, cores, *shape)
                ms[shape].append(step)
                shares[shape].append(flops(*shape[:2]) / (step * 1e6) / rate)
            memory = end["memory"]  # of the last shape, B=1 T=1024
            pairs.append((train(folder, 2, 1, 4, 64, 5)[0], train(folder, 1, 1, 4, 64, 5)[0]))
    print(f"GPT-2 124M, fp32, {cores} threads, {rounds} rounds; ratios: lowest median highest")
    for B, T, _ in SHAPES:
        print(f"  step B={B} T={T:<5} {statistics.median(ms[B, T, _]):8.0f} ms   of sgemm {spread(shares[B, T, _])}")
    print(f"  2 ranks x 1 thread {statistics.median(p[0] for p in pairs):6.0f} ms   against 1 rank x 1 thread {spread([a / b for a, b in pairs])}")
    both = [sum(memory[k][name] for name in ("device", "host")) / 2**30 for k in ("predicted", "measured")]
    print(f"  memory B=1 T=1024  {both[1]:6.2f} GiB at its peak, {both[0]:.2f} GiB predicted")


if __name__ == "__main__":
    main()
