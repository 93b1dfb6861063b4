#!/usr/bin/env python3
"""Published speeds of training GPT models on GPUs, beside what `train_gpt --dry-run --cluster`
predicts for the same runs.

    scripts/published_runs.py          prints the table; exit status 1 where a row that nothing was
                                       fitted to misses the goal of 15 %
    scripts/published_runs.py --all    prints every row of MPT, also those of the fit
                                       (docs/results/logs/published_runs.txt has the table)
    scripts/published_runs.py --fit    finds the fitted constants again (some minutes, needs numpy)

The runs are those that this program can express: data parallelism and ZeRO, without tensor
parallelism. So of Megatron's table of GPT-3 sizes (arXiv 2104.04473, table 1) only its first row is
here: all others use tensor parallelism. Of LLMQ's tables those in bf16 without partial
recomputation are here. The ZeRO++ bars are in scripts/zeropp_bars.py.

Sources
    MPT       MosaicML's table, in published_mpt.txt: FSDP, which is ZeRO-3 (or 2), in PyTorch
    llm.c     the notes in its scripts for GPT-2 124M, 350M, 774M (8 A100) and 1558M (8 H100: 2.7 to
              2.8 s a step, of which the middle is taken)
    LLMQ      IST-DASLab/llmq, benchmarks/H100x1.md and H100x8.md: bf16, the last step of each log
    Megatron  Narayanan et al., arXiv 2104.04473, quoted from memory: table 1, first row, and table
              2, ZeRO-3. They are TFLOP/s of a GPU, by their formula, which counts a recomputed
              forward pass, too

Constants
    GIVEN     figures of the makers, in the presets of --cluster gpu= (plan/cluster.h), and the
              shares of the peak that attention reaches, from the abstracts of FlashAttention-2 and
              FlashAttention-3
    FITTED    to MPT's rows on 8 GPUs of 80 GB with sequences that are not of 2048 tokens, and
              tested on all rows of 2048 tokens. For each GPU the share of its peak that products
              reach, the tokens of a micro-step with which they reach half of that (both are the
              preset's own), and the share of the peak that MPT's attention (FlashAttention in
              Triton) reaches; for A100 and H100 together the bytes a logit that PyTorch's loss
              and metrics move more than this program's
    FITTED    to a row each, for Megatron's paper, of 2021: another share of products, of which
              attention is a part; the share of the links between nodes that DeepSpeed used
"""

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import namedtuple

FOLDER = os.path.dirname(os.path.realpath(__file__))
PROGRAM = os.path.join(FOLDER, "..", "train_gpt")
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
QWEN_3B = "arch=qwen2,layers=36,heads=16,kv_heads=2,head_dim=128,channels=2048,ffn=11008,"
QWEN_3B += "vocab=151936,theta=1000000,eps=1e-6,tie=1"
AGAIN = "--recompute", "block"


def mpt():
    with open(os.path.join(FOLDER, "published_mpt.txt"), encoding="ascii") as file:
        for line in file:
            if not line.startswith("#"):
                gpu, model, *numbers = line.split()
                T, gpus, zero, rows, accumulated, again, published = map(int, numbers)
                words = "--zero", zero, *(AGAIN if again else ())
                ranks, batch = min(gpus, 8), gpus * rows * accumulated
                nodes = gpus // ranks
                yield Run("MPT", model, gpu, nodes, ranks, T, rows, batch, words, published)


def llmc(model, gpu, micro_batch, tokens, published):
    batch = tokens // 1024
    return Run("llm.c", model, gpu, 1, 8, 1024, micro_batch, batch, ("--zero", 1), published)


def llmq(model, gpus, micro_batch, published):
    words = "--zero", 1
    return Run("LLMQ", model, "h100_80gb", 1, gpus, 1024, micro_batch, 512, words, published)


def megatron(model, gpus, micro_batch, batch, published, zero=3):
    words = "--zero", zero, *AGAIN
    gpu, nodes = "a100_80gb", gpus // 8
    return Run("Megatron", model, gpu, nodes, 8, 2048, micro_batch, batch, words, published)


OTHERS = [
    llmc("124M", "a100_80gb", 64, 524288, 524288 / 0.300),
    llmc("350M", "a100_80gb", 64, 524288, 524288 / 0.820),
    llmc("774M", "a100_80gb", 32, 524288, 524288 / 1.700),
    llmc("1558M", "h100_80gb", 16, 1048576, 1048576 / 2.75),
    llmq("0.5B", 1, 32, 524288 / 3.508),
    llmq("1.5B", 1, 32, 524288 / 8.930),
    llmq("3B", 1, 16, 524288 / 16.935),
    llmq("7B", 1, 4, 524288 / 37.817),
    llmq("0.5B", 8, 32, 524288 / 0.465),
    llmq("1.5B", 8, 32, 524288 / 1.148),
    llmq("3B", 8, 16, 524288 / 2.182),
    llmq("7B", 8, 8, 524288 / 4.649),
    megatron("1.7B", 32, 16, 512, 137, zero=0),
    megatron("175B", 768, 2, 1536, 88),
    megatron("175B", 384, 4, 1536, 144),
    megatron("175B", 1536, 1, 1536, 44),
    megatron("530B", 640, 4, 2560, 138),
    megatron("530B", 1120, 2, 2240, 98),
    megatron("530B", 2240, 1, 2240, 48),
]
RUNS = [*mpt(), *OTHERS]
PEAK, SEND = {"a100": 312, "h100": 989}, {"a100": 25}  # TFLOP/s; GB/s of a GPU between nodes
MEMORY = {"a100_40gb": 1555, "a100_80gb": 2039, "h100_80gb": 3350}  # GB/s
COPIES = 0.8  # the share of that which the presets take


def fit_rows(gpu):
    """MPT's rows that the constants of a GPU are fitted to."""
    of_gpu = [run for run in RUNS if run.source == "MPT" and run.gpu == f"{gpu}_80gb"]
    return [run for run in of_gpu if run.T != 2048 and run.nodes == 1]


def row(*which):
    """The first run of this source, model and number of GPUs."""
    return next(
        run
        for run in RUNS
        if (run.source, run.model, run.nodes * run.ranks)[: len(which)] == which
    )


# those that are fitted together, and the rows
FITS = (
    (("a100 products", "a100 half", "a100 attention", "logits"), fit_rows("a100")),
    (("h100 products", "h100 half", "h100 attention"), fit_rows("h100")),
    (("Megatron products",), [row("Megatron", "1.7B")]),
    (("ZeRO-3 links",), [row("Megatron", "175B", 768)]),
)
FITTED_TO = [run for _, runs in FITS for run in runs]
FITTED = {  # products and half: as in the presets
    "a100 products": 0.785,
    "a100 half": 465,
    "a100 attention": 0.278,
    "h100 products": 0.657,
    "h100 half": 1374,
    "h100 attention": 0.156,
    "logits": 61,
    "Megatron products": 0.4563,
    "ZeRO-3 links": 0.0825,
}


def cluster_of(run, fitted):
    """--cluster of a run."""
    gpu = run.gpu[:4]
    products = fitted[("Megatron" if run.source == "Megatron" else gpu) + " products"] * PEAK[gpu]
    rates = {"tflops": products, "half": fitted[gpu + " half"]}
    rates["memory"] = COPIES * MEMORY[run.gpu]
    if run.source == "MPT":
        rates["attention"] = fitted[gpu + " attention"] * PEAK[gpu]
    if run.source == "Megatron":
        rates["attention"] = products
        if run.nodes > 4:
            rates["inter"] = SEND[gpu] * run.ranks * fitted["ZeRO-3 links"]
    given = ",".join(f"{name}={value:.8g}" for name, value in rates.items())
    return f"{run.nodes}x{run.ranks},gpu={gpu},{given}"


def model_of(run):
    """--model of a run."""
    if run.source == "LLMQ":
        return QWEN_3B if run.model == "3B" else f"qwen2.5:{run.model}"
    shapes, vocab = SHAPES[run.source]
    layers, heads, channels = shapes[run.model]
    return f"layers={layers},heads={heads},channels={channels},vocab={vocab}"


def dry_run(*flags):
    """The seconds of a step that train_gpt predicts for a run, on any machine."""
    command = [PROGRAM, "--dry-run", "--json", "--reduce-dtype", "bf16", *flags]
    with tempfile.TemporaryDirectory() as folder:  # of MPI, which starts faster alone
        environment = dict(
            os.environ, TMPDIR=folder, OMPI_MCA_ess_singleton_isolated="1", OPENBLAS_NUM_THREADS="1"
        )
        done = subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, check=True, env=environment
        )
    return json.loads(done.stdout)["predicted"]["step_ms"] / 1000


def recomputed_flops(tokens, layers, channels, T, vocab):
    """Operations of a step as Megatron's papers and the release of ZeRO++ count them: 8 for each
    parameter and token, of which 2 are the forward pass that is recomputed."""
    attention, classifier = T / (6 * channels), vocab / (16 * layers * channels)
    return 96 * tokens * layers * channels**2 * (1 + attention + classifier)


def predict(run, fitted=FITTED):
    """What is predicted for a run, as it was published."""
    tokens, gpus = run.T * run.batch, run.nodes * run.ranks
    seconds = dry_run("--cluster", cluster_of(run, fitted), "--model", model_of(run), "--seq-len",
                      run.T, "--micro-batch", run.micro_batch, "--batch-tokens", tokens, *run.flags)
    if run.source == "MPT":
        moved = tokens / gpus * SHAPES["MPT"][1] * fitted["logits"]
        seconds += moved / (COPIES * MEMORY[run.gpu] * 1e9)
    if run.published >= 1000:
        return tokens / seconds
    shapes, vocab = SHAPES[run.source]
    layers, _, channels = shapes[run.model]
    return recomputed_flops(tokens, layers, channels, run.T, vocab) / seconds / gpus / 1e12


def together(predict, keys):
    """What is predicted for each of these."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(predict, keys))


def errors(runs, fitted=FITTED):
    """The relative error of each run's prediction."""
    found = together(lambda run: predict(run, fitted), runs)
    return [speed / run.published - 1 for run, speed in zip(runs, found)]


def fit(errors, fitted, names, most=12):
    """Constants by least squares of the logarithms of predicted over published figures, in
    Gauss-Newton steps, of which it prints each. errors: of constants, the relative errors."""
    import numpy as np

    step = 0.01
    for _ in range(most):
        now = np.log1p(errors(fitted))
        slopes = [
            (np.log1p(errors({**fitted, name: fitted[name] * math.exp(step)})) - now) / step
            for name in names
        ]
        change = np.clip(np.linalg.lstsq(np.array(slopes).T, -now, rcond=None)[0], -0.5, 0.5)
        by = dict(zip(names, map(math.exp, change)))
        fitted = {name: value * by.get(name, 1) for name, value in fitted.items()}
        print(", ".join(f"{name} {fitted[name]:.4g}" for name in names), flush=True)
        if np.abs(change).max() < 1e-4:
            break
    return fitted


def fit_all():
    fitted = FITTED
    for names, runs in FITS:
        fitted = fit(lambda constants: errors(runs, constants), fitted, names, 4)


def presets():
    """Of the constants those that the program has, too, with the program's values."""
    found = {}
    for gpu in PEAK:
        words = [PROGRAM, "--dry-run", "--json", "--model", "d6", "--cluster", f"1x1,gpu={gpu}"]
        start = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        found[gpu + " products"] = round(start["rates"]["flops"] / start["peak_flops"], 4)
        found[gpu + " half"] = start["rates"]["half"]
    return found


def group(run):
    """The table that a run belongs to, of those that are counted together."""
    if run.source != "MPT":
        return run.source
    gpu = {"a100_40gb": "A100 of 40 GB", "a100_80gb": "A100", "h100_80gb": "H100"}[run.gpu]
    gpus = run.nodes * run.ranks
    if gpu == "A100 of 40 GB":
        return f"MPT, {gpu}"
    if gpu == "H100" and gpus >= 128:
        return f"MPT, {gpu}, 128 to 512"
    return f"MPT, {gpu}, " + ("T=2048" if run.T == 2048 else "other lengths")


def summary(what, found):
    """Prints how a group of rows is met; returns how many are not."""
    sizes = [abs(error) for error in found]
    within = sum(size <= LIMIT for size in sizes)
    print(
        f"| {what} | {len(sizes)} | {within} | {100 * statistics.mean(found):+.1f} % | "
        f"{100 * statistics.median(sizes):.1f} % | {100 * max(sizes):.1f} % |"
    )
    return len(sizes) - within


def summaries(found):
    """Prints a line for each table; returns how many rows are not met, of those that nothing was
    fitted to."""
    print("| table | rows | within 15 % | mean error | median size | largest |")
    print("|---|---|---|---|---|---|")
    for fitted in (True, False):
        rows = [run for run in found if (run in FITTED_TO) == fitted]
        for name in dict.fromkeys(map(group, rows)):
            errors_of_group = [found[run] for run in rows if group(run) == name]
            summary(name + (" (fitted to)" if fitted else ""), errors_of_group)
    return summary("**all that nothing was fitted to**", [found[run] for run in rows])


def row_text(run, error):
    """A row of the table."""
    fitted = run in FITTED_TO
    verdict = "fitted" if fitted else "MET" if abs(error) <= LIMIT else "NOT MET"
    unit = "tokens/s" if run.published >= 1000 else "TFLOP/s"
    length = f", T={run.T}" if run.T != 2048 else ""
    gpu = run.gpu.upper().replace("_80GB", "").replace("_40GB", " 40 GB")
    return (
        f"| {run.source} {run.model}{length} | {run.nodes * run.ranks} {gpu} | "
        f"{run.published:,.0f} {unit} | {run.published * (1 + error):,.0f} | "
        f"{100 * error:+.1f} % | {verdict} |"
    )


def table(every):
    """Prints published and predicted speeds; returns how many rows that nothing was fitted to miss
    the goal."""
    found = dict(zip(RUNS, errors(RUNS)))
    print("| run | GPUs | published | predicted | error | goal 15 % |\n|---|---|---|---|---|---|")
    for run, error in found.items():
        if every or run not in FITTED_TO or run.source != "MPT":
            print(row_text(run, error))
    print("\nFitted: " + ", ".join(f"{name} {value}" for name, value in FITTED.items()))
    for name, value in presets().items():
        if FITTED[name] != value:
            print(f"the preset has {name} {value}")
    print()
    return summaries(found)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="print the rows of the fit, too")
    parser.add_argument("--fit", action="store_true", help="find the constants again")
    options = parser.parse_args()
    return fit_all() if options.fit else int(table(options.all) > 0)


if __name__ == "__main__":
    sys.exit(main())
