#!/usr/bin/env python3
"""plot.py: draws loss against step from the JSON-lines logs of train_gpt (--log FILE).

    plot.py run.jsonl other.jsonl --out loss.png

One colour and one legend entry per log: a thin line for the training loss, markers for the validation loss. Without
matplotlib it draws a small curve in the terminal instead.

A resumed run appends to its log: the later event of a step replaces the earlier one. Lines that are no JSON object (a
run was killed while it wrote) and losses that are null (private runs do not show them) are passed over.

Exit status: 0 done, 2 bad input, 3 the picture could not be written.
"""
import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

EXIT_INPUT, EXIT_RESOURCES = 2, 3
TEXT_WIDTH = 60  # columns of the curve in the terminal


@dataclass
class Run:
    label: str
    train: dict  # step -> loss in nats per token
    val: dict
    bits_per_byte: float | None  # of the last validation

    def legend(self):
        if not self.val:
            return self.label
        text = f"{self.label} (validation {self.val[max(self.val)]:.4f}"
        return text + (f", {self.bits_per_byte:.4f} bits/byte)" if self.bits_per_byte is not None else ")")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def events(path):
    """Yields the events of a log, in file order."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def load(path):
    losses, bits = {"step": {}, "val": {}}, {}
    for event in events(path):
        kind, step = event.get("event"), event.get("step")
        if kind not in losses or not is_number(step):
            continue
        losses[kind].pop(step, None)
        if is_number(event.get("loss")):
            losses[kind][step] = event["loss"]
        if kind == "val":
            bits[step] = event.get("bits_per_byte")
    last = bits[max(bits)] if bits else None
    return Run(path.stem, losses["step"], losses["val"], last if is_number(last) else None)


def points(losses):
    """Steps and losses, in the order of steps."""
    steps = sorted(losses)
    return steps, [losses[step] for step in steps]


def draw_picture(pyplot, runs, out):
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, run in enumerate(runs):
        color = f"C{index % 10}"
        axes.plot(*points(run.train), color=color, linewidth=0.8, alpha=0.45)
        axes.plot(*points(run.val), color=color, linestyle="none", marker="o", markersize=5, markeredgecolor="black", zorder=3)
        axes.plot([], [], color=color, linewidth=0.8, marker="o", markersize=4, label=run.legend())
    axes.set(xlabel="step", ylabel="loss (nats/token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)
    print(out)


def draw_text(runs):
    """One row of bars per run, each bar the mean of its share of the points; tall is a high loss."""
    for run in runs:
        steps, losses = points(run.train or run.val)
        width = min(TEXT_WIDTH, len(losses))
        edges = [len(losses) * i // width for i in range(width + 1)]
        means = [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
        low, high = min(means), max(means)
        bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] for mean in means)
        print(f"{run.legend()}\n  {high:8.4f} {bars} {means[-1]:.4f}  steps {steps[0]} to {steps[-1]}")


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of the bars
    parser = argparse.ArgumentParser(description="Draw loss against step from logs of train_gpt.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: the first log's name, with .png")
    options = parser.parse_args()
    try:
        runs = [load(path) for path in options.logs]
    except OSError as error:
        print(f"plot: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_INPUT
    for run, path in zip(runs, options.logs):
        if not run.train and not run.val:
            print(f"plot: {path}: no losses in it", file=sys.stderr)
            return EXIT_INPUT
    try:
        import matplotlib
    except ImportError:
        print("plot: matplotlib is not there (scripts/setup.sh python gets it): drawing in text")
        draw_text(runs)
        return 0
    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        draw_picture(pyplot, runs, options.out or options.logs[0].with_suffix(".png"))
    except (OSError, ValueError) as error:  # ValueError: no such picture format
        print(f"plot: cannot write the picture: {error}", file=sys.stderr)
        return EXIT_RESOURCES
    return 0


if __name__ == "__main__":
    sys.exit(main())
