#!/usr/bin/env python3
"""Published speeds of training GPT models on GPUs, beside what `train_gpt --dry-run --cluster`
predicts for the same runs.

    scripts/published_runs.py          prints the table; exit status 1 where a row misses the goal
                                       of 15 %
    scripts/published_runs.py --fit    finds the fitted constants again, each from its own row

The runs are those that this program can express: data parallelism and ZeRO, without tensor
parallelism. So of Megatron's table of GPT-3 sizes (arXiv 2104.04473, table 1) only its first row is
here, and LLMQ's models (Qwen 2.5) are not. The ZeRO++ bars are in scripts/zeropp_bars.py.

Sources
    MPT       MosaicML, llm-foundry, scripts/train/benchmarking/README.md: tokens a second of FSDP
              (ZeRO-3), in nodes of 8 GPUs
    llm.c     the notes in its scripts run_gpt2_124M.sh, 350M, 774M (8 A100) and 1558M (8 H100: 2.7
              to 2.8 s a step, of which the middle is taken)
    Megatron  Narayanan et al., arXiv 2104.04473: table 1, first row, and table 2, ZeRO-3. They are
              TFLOP/s of a GPU, by their formula, which counts a recomputed forward pass, too

Constants
    GIVEN    figures of the makers, in the presets of --cluster gpu= (engine/cluster.h)
    FITTED   each to one row, marked in the table: on each GPU the share of its peak that matrix
             products reach, and the tokens of a micro-step with which they reach half of that
             (both are the preset's own); for the runs of Megatron's paper, of 2021, another share;
             and for its ZeRO-3 the share of the links between nodes that DeepSpeed used
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections import namedtuple

PROGRAM = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "train_gpt")
LIMIT = 0.15

# published: tokens a second, or TFLOP/s of a GPU where it is below 1000; batch: sequences of a step
Run = namedtuple("Run", "source model gpu nodes ranks T micro_batch batch flags published")
GPT2 = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280)}
GPT2["1558M"] = (48, 25, 1600)
MPT = {
    "125m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "760m": (24, 12, 1536),
    "1b": (24, 16, 2048),
    "3b": (32, 20, 2560),
    "7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "70b": (80, 64, 8192),
}
MEGATRON = {"1.7B": (24, 24, 2304), "175B": (96, 96, 12288), "530B": (105, 128, 20480)}
SHAPES = {"MPT": (MPT, 50368), "llm.c": (GPT2, 50257), "Megatron": (MEGATRON, 51200)}
AGAIN = ["--recompute", "block"]


def mpt(model, gpu, gpus, T, micro_batch, accumulated, published, flags=()):
    nodes = max(1, gpus // 8)
    batch = gpus * micro_batch * accumulated
    words = ["--zero", 3, *flags]
    return Run("MPT", model, gpu, nodes, gpus // nodes, T, micro_batch, batch, words, published)


def llmc(model, gpu, micro_batch, tokens, published):
    batch = tokens // 1024
    return Run("llm.c", model, gpu, 1, 8, 1024, micro_batch, batch, ["--zero", 1], published)


def megatron(model, gpus, micro_batch, batch, published, zero=3):
    words = ["--zero", zero, *AGAIN]
    return Run("Megatron", model, "a100", gpus // 8, 8, 2048, micro_batch, batch, words, published)


RUNS = [
    mpt("3b", "a100", 8, 2048, 10, 2, 86491),
    mpt("125m", "a100", 8, 2048, 32, 2, 1133901),
    mpt("350m", "a100", 8, 2048, 32, 2, 470263),
    mpt("760m", "a100", 8, 2048, 24, 2, 259472),
    mpt("1b", "a100", 8, 2048, 14, 4, 164109),
    mpt("7b", "a100", 8, 2048, 6, 2, 37130),
    mpt("13b", "a100", 8, 2048, 2, 3, 18097),
    mpt("30b", "a100", 8, 2048, 3, 21, 7330, AGAIN),
    mpt("70b", "a100", 32, 2048, 2, 16, 11962, AGAIN),
    mpt("70b", "a100", 64, 2048, 8, 4, 26274, AGAIN),
    llmc("124M", "a100", 64, 524288, 524288 / 0.300),
    llmc("350M", "a100", 64, 524288, 524288 / 0.820),
    llmc("774M", "a100", 32, 524288, 524288 / 1.700),
    mpt("3b", "h100", 16, 2048, 10, 3, 386285),
    mpt("760m", "h100", 8, 2048, 24, 2, 505177),
    mpt("1b", "h100", 8, 2048, 14, 1, 363645),
    mpt("1b", "h100", 64, 2048, 20, 1, 2841754),
    mpt("3b", "h100", 64, 2048, 6, 3, 1441663),
    mpt("7b", "h100", 8, 2048, 6, 1, 85144),
    mpt("13b", "h100", 8, 2048, 2, 1, 38336),
    mpt("13b", "h100", 64, 2048, 2, 1, 307209),
    mpt("30b", "h100", 32, 2048, 14, 3, 73860, AGAIN),
    mpt("70b", "h100", 64, 2048, 8, 4, 66523, AGAIN),
    llmc("1558M", "h100", 16, 1048576, 1048576 / 2.75),
    megatron("1.7B", 32, 16, 512, 137, zero=0),
    megatron("175B", 768, 2, 1536, 88),
    megatron("175B", 384, 4, 1536, 144),
    megatron("175B", 1536, 1, 1536, 44),
    megatron("530B", 640, 4, 2560, 138),
    megatron("530B", 1120, 2, 2240, 98),
    megatron("530B", 2240, 1, 2240, 48),
]
PEAK, SEND = {"a100": 312, "h100": 989}, {"a100": 25}  # TFLOP/s; GB/s of a GPU between nodes


def row(*which):
    """The first run of this source, model and GPU (and number of GPUs)."""
    return next(
        i
        for i, run in enumerate(RUNS)
        if (run.source, run.model, run.gpu, run.nodes * run.ranks)[: len(which)] == which
    )


# constant: the row that it is fitted to
FITS = {
    "a100 products": row("MPT", "7b", "a100"),
    "a100 half": row("MPT", "13b", "a100"),
    "h100 products": row("MPT", "7b", "h100"),
    "h100 half": row("MPT", "13b", "h100"),
    "Megatron products": row("Megatron", "1.7B"),
    "ZeRO-3 links": row("Megatron", "175B", "a100", 768),
}
FITTED = {"Megatron products": 0.457, "ZeRO-3 links": 0.0825}  # those of GPUs are in the presets
START = {"a100 products": 0.7, "a100 half": 500, "h100 products": 0.5, "h100 half": 1000, **FITTED}


def predict(run, fitted):
    """What is predicted for a run, as it was published. fitted: constants, where they are not the
    preset's."""
    shapes, vocab = SHAPES[run.source]
    layers, heads, channels = shapes[run.model]
    cluster = f"{run.nodes}x{run.ranks},gpu={run.gpu}"
    share = "Megatron products" if run.source == "Megatron" else run.gpu + " products"
    if share in fitted:
        cluster += f",tflops={PEAK[run.gpu] * fitted[share]:.6g}"
    if run.gpu + " half" in fitted:
        cluster += f",half={fitted[run.gpu + ' half']:.6g}"
    if run.source == "Megatron" and run.nodes > 4:
        cluster += f",inter={SEND[run.gpu] * run.ranks * fitted['ZeRO-3 links']:.6g}"
    shape = f"layers={layers},heads={heads},channels={channels},vocab={vocab}"
    words = [PROGRAM, "--dry-run", "--json", "--cluster", cluster, "--model", shape]
    words += ["--seq-len", run.T, "--micro-batch", run.micro_batch, "--reduce-dtype", "bf16"]
    words += ["--batch-tokens", run.T * run.batch, *run.flags]
    with tempfile.TemporaryDirectory() as folder:  # of MPI, which starts faster alone
        environment = dict(
            os.environ, TMPDIR=folder, OMPI_MCA_ess_singleton_isolated="1", OPENBLAS_NUM_THREADS="1"
        )
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
    predicted = json.loads(done.stdout)["predicted"]
    if run.published >= 1000:
        return predicted["tokens_per_s"]
    tokens, L, C = run.T * run.batch, layers, channels
    flops = 96 * tokens * L * C * C * (1 + run.T / (6 * C) + vocab / (16 * L * C))
    return flops / (predicted["step_ms"] / 1000) / (run.nodes * run.ranks) / 1e12


def fit():
    """Each constant so that its row is met, by secants; those of one GPU change each other's row,
    so in rounds."""
    fitted = dict(START)
    for _ in range(8):
        for name, number in FITS.items():
            run, x = RUNS[number], fitted[name]
            error = predict(run, fitted) / run.published - 1
            changed = dict(fitted, **{name: x * 1.01})
            slope = (predict(run, changed) / run.published - 1 - error) / (0.01 * x)
            fitted[name] = min(max(x - error / slope, x / 2), x * 2)
        print(", ".join(f"{name} {value:.4g}" for name, value in fitted.items()), flush=True)


def constants():
    """The fitted constants, with those that the program's presets have."""
    found = {}
    for gpu in PEAK:
        words = [PROGRAM, "--dry-run", "--json", "--model", "d6", "--cluster", f"1x1,gpu={gpu}"]
        start = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        found[gpu + " products"] = round(start["rates"]["flops"] / start["peak_flops"], 4)
        found[gpu + " half"] = start["rates"]["half"]
    return {**found, **FITTED}


def table():
    """Prints published and predicted speeds; returns how many rows miss the goal."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda run: predict(run, FITTED), RUNS))
    rows = set(FITS.values())
    print("| run | GPUs | published | predicted | error | goal 15 % |\n|---|---|---|---|---|---|")
    missed = 0
    for i, (run, speed) in enumerate(zip(RUNS, found)):
        error = speed / run.published - 1
        missed += abs(error) > LIMIT
        unit = "tokens/s" if run.published >= 1000 else "TFLOP/s"
        verdict = "fitted" if i in rows else "MET" if abs(error) <= LIMIT else "NOT MET"
        print(
            f"| {run.source} {run.model} | {run.nodes * run.ranks} {run.gpu.upper()} | "
            f"{run.published:,.0f} {unit} | {speed:,.0f} | {100 * error:+.1f} % | "
            f"{verdict} |"
        )
    print("\nFitted: " + ", ".join(f"{name} {value}" for name, value in constants().items()))
    print(f"{missed} of {len(RUNS)} rows miss the goal")
    return missed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="find the constants again")
    if parser.parse_args().fit:
        return fit()
    return int(table() > 0)


if __name__ == "__main__":
    sys.exit(main())
