#!/usr/bin/env python3
"""run_picture.py: README's picture of what `make run` gives: what it prints, and its loss curve.

    make run | tee out/shakespeare/printed.txt
    .venv/bin/python scripts/run_picture.py out/shakespeare docs/run.png

Reads printed.txt and log.jsonl of the folder. Run it after a run on an idle machine: times are in
the picture. Needs matplotlib and Pillow (scripts/setup.sh python and data).
"""

import argparse
import io
import re
import sys
import textwrap
from pathlib import Path

import plot

WIDTH, ROWS = 80, 40  # of the terminal
COLORS = 48  # of the picture, which is small then


def excerpt(text):
    """The lines to show: the table, the first and last steps, the sample's begin, the end."""
    lines = [line.rstrip() for line in text.split("\n")]
    begin = next(i for i, line in enumerate(lines) if line.startswith("model "))
    first = next(i for i, line in enumerate(lines) if re.match(r"step +\d+ ", line))
    last = max(i for i, line in enumerate(lines) if re.match(r"step +\d+/", line))
    sample = next(i for i, line in enumerate(lines) if line.startswith("--- sample"))
    saved = max(i for i, line in enumerate(lines) if re.match(r"step +\d+ \| checkpoint", line))
    shown = [*lines[begin : first + 3], "...", *lines[last - 1 : sample + 1]]
    room = ROWS - len(shown) - 3
    return ["$ make run", *shown, *lines[sample + 1 : sample + 1 + room], "...", lines[saved]]


def draw(pyplot, folder):
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, 6.4), width_ratios=(1.32, 1), layout="constrained"
    )
    lines = excerpt((folder / "printed.txt").read_text())
    left.axis("off")
    left.set(xlim=(0, 1), ylim=(0, 1))
    text = "\n".join(line[:100] for line in lines)
    left.text(0, 1, text, family="monospace", size=8.2, va="top", linespacing=1.25)
    runs = plot.load_all([folder / "log.jsonl"])
    plot.draw_losses(right, runs, "steps", 0)
    right.set_title(textwrap.fill(plot.title(runs), 60), size="medium")
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    options = parser.parse_args()
    try:
        import matplotlib
        from PIL import Image

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, data = draw(pyplot, options.folder), io.BytesIO()
        figure.savefig(data, dpi=100, facecolor="white")
        Image.open(data).convert("RGB").quantize(COLORS).save(options.picture, optimize=True)
    except ImportError as error:
        print(f"run_picture.py: {error}: scripts/setup.sh python", file=sys.stderr)
        return plot.EXIT_RESOURCES
    except (OSError, StopIteration, ValueError, plot.BadLog) as error:
        print(f"run_picture.py: {options.folder}: not of `make run`: {error}", file=sys.stderr)
        return plot.EXIT_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
