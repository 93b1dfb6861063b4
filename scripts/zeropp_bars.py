#!/usr/bin/env python3
"""What `train_gpt --dry-run --cluster` predicts for the runs of the ZeRO++ release, beside what was
published.

    scripts/zeropp_bars.py           prints the fit set and every hold-out set apart, and for each
                                     the median and the largest error; exit status 1 where a bar is
                                     missed by more than 15 %; docs/results/logs/zeropp_bars.txt
                                     has what it prints
    scripts/zeropp_bars.py --bars    only the bars, without the logs and the runs of others
    scripts/zeropp_bars.py --draw FILE    also draws the bars, a panel for each row of the table
    scripts/zeropp_bars.py --fit     finds the constants again, from the bars of FIT_ROW alone

The bars: TFLOP/s per GPU of GPT models on 384 V100 (24 DGX-2 with 1 to 8 links of 100 Gbit/s each)
at 1024 or 2048 tokens a GPU and step, ZeRO-3 and ZeRO++ (the release's figures 6 to 8, labels are
whole numbers). They count 8 operations a parameter and token, a forward pass, its recomputation and
a backward pass, and Megatron's terms for attention and vocabulary: so counted, the release's log of
its 18B run (64 V100, 512 tokens, 9956 ms) has the 7.65 TFLOP/s that it states.

The release does not tell its models' shapes but for the 18B; the others are plausible ones of those
sizes.

The time model is the program's own: it plays the action list of one step with a clock for computing
and one for messages. Its constants are here:
    GIVEN   by the makers: V100 125 TFLOP/s and 900 GB/s of memory, NVSwitch 150 GB/s a GPU in each
            direction
    FITTED  to FIT_ROW: the share of the links' 12.5 GB/s that arrives, the tokens at which products
            reach half of their rate, and the
            share of its speed with which the 18B computes beside messages
    none    of it for the larger models: DeepSpeed keeps at most 1e9 gathered parameters (its
            default). Two of the 18B's layers are that
            many; of the other models' not one (1.8e9), or one (8e8), which leaves no room to gather
            ahead

Fit set: the 8 bars of FIT_ROW. Hold-out sets, from the cleanest to the least clean:
    runs of others        the runs of docs/results/published.md to which nothing is fitted: other
                          programs and GPUs, with constants of their own (published_runs.py)
    alike                 the other 32 bars, without overlap for any model, so no bar outside
                          FIT_ROW decided anything. (One overlap for all models cannot be fitted
                          to FIT_ROW: more of it and slower links look the same there.)
    logs                  the release's logs of its 18B on 64 V100. That of ZeRO-3 settled how
                          operations are counted. They do not tell the links of a node
    by model              the other 32 bars, with the overlap of the 18B only. That this is so was
                          decided with all bars in sight
"""

import argparse
import statistics
import sys
from collections import namedtuple

import published_runs
import experiment
from published_runs import LIMIT, recomputed_flops

NODES, GPUS, VOCAB = 24, 16, 50257

Shape = namedtuple("Shape", "layers channels")
SHAPES = {
    "18B": Shape(40, 6144),
    "49B": Shape(60, 8192),
    "91B": Shape(50, 12288),
    "138B": Shape(76, 12288),
}
Row = namedtuple("Row", "links tokens")
BARS = {  # ZeRO-3, ZeRO++
    Row(1, 1024): {"18B": (14, 31), "49B": (11, 22), "91B": (11, 22), "138B": (11, 22)},
    Row(1, 2048): {"18B": (26, 46), "49B": (20, 38), "91B": (20, 38), "138B": (20, 38)},
    Row(2, 2048): {"18B": (37, 50), "138B": (32, 48)},
    Row(4, 1024): {"18B": (25, 35), "49B": (23, 36), "91B": (23, 36), "138B": (23, 36)},
    Row(4, 2048): {"18B": (40, 53), "49B": (36, 51), "91B": (36, 51), "138B": (36, 50)},
    Row(8, 2048): {"18B": (47, 54), "138B": (48, 55)},
}
METHODS = ("ZeRO-3", "ZeRO++")
LOGGED_NODES, LOGGED_TOKENS = 4, 512  # the logs of the 18B, one sequence of 512 a GPU
LOGGED_MS = (9956, 3681)  # ms of step 40, by method
ZEROPP = "--zero-quantized-weights", "--zero-hpz-partition-size", GPUS
ZEROPP += ("--zero-quantized-gradients",)
GIVEN = {"tflops": 125, "memory": 900, "intra": 150}
FIT_ROW = Row(1, 2048)
FITTED = {"links": 0.853, "half": 1951, "overlap": 0.391}
ALIKE = {"links": 0.961, "half": 1960}  # without overlap


def step_seconds(shape, nodes, row, length, method, overlap, fitted):
    """The time of a step that `--dry-run` predicts for this shape on nodes of GPUS V100."""
    inter = 12.5 * row.links * fitted["links"]
    rates = dict(GIVEN, inter=inter, half=fitted["half"], overlap=overlap)
    rates = ",".join(f"{name}={value:.12g}" for name, value in rates.items())
    model = f"layers={shape.layers},heads={shape.channels // 128},channels={shape.channels}"
    return published_runs.dry_run(
        "--cluster", f"{nodes}x{GPUS},{rates}", "--model", f"{model},vocab={VOCAB}",
        "--seq-len", length, "--micro-batch", row.tokens // length, "--dtype", "bf16",
        "--recompute", "block", "--zero", 3, *(ZEROPP if method else ()),
    )


def predict(row, model, method, fitted):
    """TFLOP/s per GPU, as the bars count them."""
    shape, T = SHAPES[model], 1024
    overlap = fitted.get("overlap", 0) if model == "18B" else 0
    seconds = step_seconds(shape, NODES, row, T, method, overlap, fitted)
    return recomputed_flops(row.tokens, *shape, T, VOCAB) / seconds / 1e12


def predict_logs():
    """The times of the release's logs at each number of links that a node may have had:
    {links: [relative error by method]}. Prints them."""
    print("| links assumed | method | published, ms | predicted, ms | error |")
    print("|---|---|---|---|---|")
    found = {}
    for links in (1, 2, 4, 8):
        row = Row(links, LOGGED_TOKENS)
        for method, published in enumerate(LOGGED_MS):
            ms = 1000 * step_seconds(
                SHAPES["18B"], LOGGED_NODES, row, row.tokens, method, FITTED["overlap"], FITTED
            )
            found.setdefault(links, []).append(ms / published - 1)
            error = 100 * found[links][-1]
            print(f"| {links} | {METHODS[method]} | {published} | {ms:.0f} | {error:+.0f} % |")
    print()
    return found


def predict_rows(rows, fitted):
    """{(row, model, method): (published, predicted)} of these rows."""
    keys = [
        (row, model, method)
        for row in rows
        for model in BARS[row]
        for method in range(len(METHODS))
    ]
    found = published_runs.together(lambda key: predict(*key, fitted), keys)
    return {key: (BARS[key[0]][key[1]][key[2]], value) for key, value in zip(keys, found)}


def fit(start):
    """Finds the constants that FIT_ROW's bars are missed least with."""

    def errors(fitted):
        return errors_of(predict_rows([FIT_ROW], fitted), [FIT_ROW])

    published_runs.fit(errors, start, list(start))


def draw(bars, path):
    """Published bars beside predicted ones, on the same axes for all links."""
    pyplot = experiment.pyplot_or_none("zeropp_bars")
    if not pyplot:
        return
    figure, panels = pyplot.subplots(
        2, len(BARS) // 2, figsize=(13, 7), layout="constrained", sharey=True
    )
    for axes, row in zip(panels.flat, BARS):
        series = [(method, at) for method in (0, 1) for at in (0, 1)]
        heights = [
            (f"{METHODS[method]}, {('published', 'predicted')[at]}",
             [bars[row, model, method][at] for model in BARS[row]])
            for method, at in series
        ]
        styles = [{"color": f"C{method}", "alpha": 1 if at else 0.5} for method, at in series]
        experiment.bars(axes, list(BARS[row]), heights, styles)
        axes.set_title(f"{row.links} x 100 Gbit/s a node, {row.tokens} tokens a GPU")
        axes.grid(alpha=0.3, axis="y")
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s per GPU, 384 V100")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)


def table(bars, rows):
    """Prints published and predicted bars of these rows."""
    print("| links, tokens | method | " + " | ".join(SHAPES) + " |")
    print("|---|---|" + "---|" * len(SHAPES))
    for row in rows:
        for method, name in enumerate(METHODS):
            cells = []
            for model in SHAPES:
                published, predicted = bars.get((row, model, method), (None, None))
                error = predicted / published - 1 if published else 0
                cells.append(
                    f"{published} {predicted:.1f} ({100 * error:+.0f} %)" if published else ""
                )
            print(f"| {row.links}, {row.tokens} | {name} | " + " | ".join(cells) + " |")
    print()


def errors_of(bars, rows):
    """Relative errors of the bars of these rows."""
    return [found / given - 1 for (row, *_), (given, found) in bars.items() if row in rows]


def summary(sets):
    """Prints a line for each set of relative errors, which are by name."""
    print("| set | figures | median error | largest | within 15 % |\n|---|---|---|---|---|")
    for name, errors in sets.items():
        sizes = [abs(error) for error in errors]
        print(
            f"| {name} | {len(sizes)} | {100 * statistics.median(sizes):.1f} % |"
            f" {100 * max(errors, key=abs):+.1f} % | {sum(size <= LIMIT for size in sizes)} |"
        )


def report(bars, only_bars):
    """Prints the tables and what they come to."""
    others = [row for row in BARS if row != FIT_ROW]
    print("Published, predicted TFLOP/s per GPU.\n\nFit set:\n")
    table(bars, [FIT_ROW])
    print("Held out, overlap by model:\n")
    table(bars, others)
    sets = {"fitted: bars of 1 link, 2048 tokens": errors_of(bars, [FIT_ROW])}
    sets["held out: the other bars, overlap by model"] = errors_of(bars, others)
    if not only_bars:
        alike = predict_rows(BARS, ALIKE)
        print("Held out, no overlap for any model:\n")
        table(alike, others)
        print("Held out, logs of 64 V100:\n")
        sets["fitted, no overlap: bars of 1 link, 2048 tokens"] = errors_of(alike, [FIT_ROW])
        sets["held out: the other bars, no overlap"] = errors_of(alike, others)
        for links, errors in predict_logs().items():
            plural = "" if links == 1 else "s"
            sets[f"held out: logs, {links} link{plural} assumed"] = errors
        rows = [run for run in published_runs.RUNS if run not in published_runs.FITTED_TO]
        sets["held out: runs of others (published.md)"] = published_runs.errors(rows)
    summary(sets)
    return max(map(abs, errors_of(bars, BARS)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--bars", action="store_true")
    parser.add_argument("--draw", metavar="FILE")
    options = parser.parse_args()
    if options.fit:
        fit(FITTED)
        fit(ALIKE)
        return 0
    bars = predict_rows(BARS, FITTED)
    if options.draw:
        draw(bars, options.draw)
    return int(report(bars, options.bars) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
