#!/usr/bin/env python3
"""run_picture.py: README's pictures: what `make run` prints, and its loss curve; the page of a run.

    make run | tee out/shakespeare/printed.txt
    .venv/bin/python scripts/run_picture.py out/shakespeare docs/run.png
    .venv/bin/python scripts/run_picture.py docs/results/english_cpu.html docs/page.png

Reads printed.txt and log.jsonl of a folder, or a page. Run it after a run on an idle
machine: times are in the picture. Needs matplotlib and Pillow (scripts/setup.sh python and data);
for the page Chromium instead of matplotlib.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import plot
from regular_files import one_line

ROWS = 37  # of the terminal
COLORS = 48  # of the picture, which is small then
PAGE = 1280, 1385  # of the page: down to the bars of memory and traffic


def excerpt(text):
    """The lines to show: the table, the first and last steps, the sample's begin, the end."""
    lines = [line.rstrip() for line in text.split("\n")]

    def at(pattern):
        return [i for i, line in enumerate(lines) if re.match(pattern, line)]

    begin, first, last = at("model  ")[0], at(r"step +0 \| ")[0], at(r"step +\d+/")[-1]
    sample, saved = at("--- sample")[0], at(r"step +\d+ \| checkpoint")[-1]
    shown = [*lines[begin : first + 2], "...", *lines[last - 1 : sample + 1]]
    end = min(sample + ROWS - len(shown) - 2, saved - 1)
    return ["$ make run", *shown, *lines[sample + 1 : end], "...", lines[saved]]


def draw(pyplot, folder):
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8.8, 8.4), height_ratios=(1.75, 1), layout="constrained"
    )
    lines = excerpt((folder / "printed.txt").read_text())
    above.axis("off")
    above.text(0, 1, "\n".join(lines), family="monospace", size=8.4, va="top", parse_math=False)
    runs = plot.load_all([folder / "log.jsonl"])
    plot.draw_losses(below, runs, "steps", 0)
    return figure


def photograph(page):
    """A PNG of the begin of a page, as Chromium shows it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if not browser:
        raise ImportError("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="run_picture_") as folder:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--window-size=%d,%d" % PAGE, "--virtual-time-budget=20000"]
        words += [f"--user-data-dir={folder}", f"--screenshot={folder}/page.png"]
        subprocess.run([browser, *words, page.resolve(True).as_uri()], capture_output=True)
        return io.BytesIO((Path(folder) / "page.png").read_bytes())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="FOLDER|PAGE.html")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    options = parser.parse_args()
    try:
        from PIL import Image

        if options.source.suffix == ".html":
            data = photograph(options.source)
        else:
            import matplotlib

            matplotlib.use("agg")
            from matplotlib import pyplot

            figure, data = draw(pyplot, options.source), io.BytesIO()
            figure.savefig(data, dpi=100, facecolor="white")
        Image.open(data).convert("RGB").quantize(COLORS).save(options.picture, optimize=True)
    except ImportError as error:
        print(f"run_picture.py: {error}: scripts/setup.sh python", file=sys.stderr)
        return plot.EXIT_RESOURCES
    except (OSError, IndexError, ValueError, plot.BadLog) as error:
        text = f"run_picture.py: {options.source}: not of `make run`: {error}"
        print(one_line(text), file=sys.stderr)
        return plot.EXIT_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
