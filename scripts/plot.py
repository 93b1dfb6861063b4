#!/usr/bin/env python3
"""plot.py: draws the JSON-lines logs of train_gpt (--log FILE): losses, memory, traffic; and
schedules (--trace FILE).

    plot.py run.jsonl other.jsonl --out loss.png
    plot.py a.jsonl b.jsonl c.jsonl --x tokens --smooth 50 --title "Three learning rates"
    plot.py run.jsonl --x seconds --panel loss --panel memory --panel traffic
    plot.py --trace trace.json --out schedule.svg

--panel loss      the training loss, a thin line for each step and a thick one for the mean of
                  --smooth steps, and markers for the validation loss; one colour and one legend
                  entry a log: the flags that differ between the logs, else the names of the files
--panel memory    bytes of rank 0 by kind, predicted beside measured; without an end event only what
                  was predicted
--panel traffic   the same for the bytes that rank 0 sends in a step, by kind and link
--x               what the losses are drawn against: steps, tokens, time (training alone; also named
                  seconds), joules. Tokens, time and joules are those of the steps that count, added
                  up over all resumptions; a step stands for those before it that --log-every left
                  out of the log.
--smooth N        logged steps in the mean; 1: none; default: a fiftieth of them
--title TEXT      default: the model, its size, and what else the logs have in common

--trace FILE      instead of logs: who computes which micro-batch when, a row for each rank, as
                  --show-schedule --trace planned it or
                  --profile-steps --trace measured it

Needs matplotlib. In a terminal watch.py --once draws a log, and the program its own schedules.

Losses that are null (private runs do not show them) are passed over. The key "joules" of a step
event is the energy since the start event before it.

Exit status: 0 done, 2 bad input, 3 the picture could not be written.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where Python is isolated

from regular_files import one_line, read_regular
from run_log import AXES, EXIT_INPUT, EXIT_RESOURCES, BadLog, is_number, load_all, smoothed, title

TRACE_MOST = 1e9  # seconds, ranks, micro-batches of a trace
SYNONYMS = {"seconds": "time"}
LONG = {"s": 1, "min": 60, "h": 3600, "days": 86400}  # units of time
BARS = {"memory": "memory of rank 0 (MiB)", "traffic": "sent by rank 0 in a step (MiB)"}
MIB = 1 << 20
# what is drawn of a schedule: neighbours of a rank with the same letter and micro-batch are one
# cell, weight parts that follow at once are of B
LETTERS = {
    "FORWARD": "F",
    "RECOMPUTE": "B",
    "BACKWARD_INPUT": "B",
    "CLIP": "B",
    "BACKWARD_WEIGHT": "W",
    "UPDATE": "U",
}
COLORS = {"F": "#7fb2e5", "B": "#8fcf8f", "W": "#d9c56b", "U": "#c9a0dc"}
MEANINGS = {"F": "forward", "B": "backward", "W": "weight gradients apart", "U": "update"}


def check(runs, panels, axis):
    for run in runs:
        for panel in panels:
            if panel == "loss" and not run.train and not run.val:
                raise BadLog(f"{run.path}: no losses in it")
            if panel != "loss" and not any(run.bars.get(panel, {}).values()):
                raise BadLog(
                    f"{run.path}: no {panel} in it"
                    + (" (one rank sends nothing)" if panel == "traffic" else "")
                )
        run.positions(axis)


def time_unit(longest):
    return [unit for unit, seconds in LONG.items() if longest >= 2 * seconds or unit == "s"][-1]


def draw_losses(axes, runs, axis, smooth):
    longest = max(max(run.positions(axis).values(), default=0) for run in runs)
    unit = time_unit(longest) if axis == "time" else ""
    for index, run in enumerate(runs):
        color = f"C{index % 10}"
        places, losses = run.points(run.train, axis)
        places = [place / LONG.get(unit, 1) for place in places]
        count = smooth or len(losses) // 50
        if count > 1:
            axes.plot(places, losses, color=color, linewidth=0.6, alpha=0.25)
        axes.plot(places, smoothed(losses, count), color=color, linewidth=1.5)
        places, losses = run.points(run.val, axis)
        places = [place / LONG.get(unit, 1) for place in places]
        axes.plot(places, losses, color=color, linestyle="none", marker="o", markersize=6,
                  markeredgecolor="black", zorder=3)
        axes.plot([], [], color=color, linewidth=1.5, label=run.legend())
    if any(run.train for run in runs):
        most = smooth or max(len(run.train) for run in runs) // 50
        text = f"training, mean of up to {most} logged steps" if most > 1 else "training"
        axes.plot([], [], color="gray", linewidth=1.5, label=text)
    if any(run.val for run in runs):
        axes.plot([], [], "o", color="white", markeredgecolor="black", label="validation")
    axes.set(xlabel=AXES[axis] + (f" ({unit})" if unit else ""), ylabel="loss (nats/token)")
    if longest >= 10000 and not unit:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)  # names may have dollars


def columns(runs, panel):
    """The bars of a panel, (run, "predicted" or "measured", kind -> bytes), and all kinds in
    them."""
    found = [(run.label, when, kinds) for run in runs for when, kinds in run.bars[panel].items()]
    return found, list(dict.fromkeys(kind for _, _, kinds in found for kind in kinds))


def draw_bars(axes, runs, panel):
    found, kinds = columns(runs, panel)
    bottom = [0.0] * len(found)
    for kind in kinds:
        heights = [table.get(kind, 0) / MIB for _, _, table in found]
        axes.bar(range(len(found)), heights, bottom=bottom, label=kind, width=0.7)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axes.set(ylabel=BARS[panel])
    axes.set_xticks(range(len(found)), [f"{label}\n{when}" for label, when, _ in found],
                    rotation=0 if len(found) < 7 else 90)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_picture(pyplot, runs, panels, options, out):
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(8 * len(panels), 5), layout="constrained", squeeze=False
    )
    for panel, place in zip(panels, axes[0]):
        if panel == "loss":
            draw_losses(place, runs, options.x, options.smooth)
        else:
            draw_bars(place, runs, panel)
    text = textwrap.fill(options.title or title(runs), 75 * len(panels))
    figure.suptitle(text, parse_math=False)
    figure.savefig(out, dpi=150)
    print(one_line(out))


def read_cells(path):
    """Of a trace: rank -> [letter, micro-batch, begin, end] of its cells, in seconds from the first
    one's begin on."""
    text = read_regular(path, None).decode(errors="replace")
    try:
        actions = [
            event
            for event in json.loads(text)["traceEvents"]
            if event["ph"] == "X" and event["cat"] == "compute"
        ]
        found = [
            (event["pid"], event["ts"] / 1e6, event["dur"] / 1e6, event["name"].split()[0],
             event["args"]["micro_batch"])
            for event in actions
        ]
        if not all(map(is_action, found)):
            raise ValueError
        found.sort()
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RecursionError):
        raise BadLog(f"{path}: this is no trace of train_gpt") from None
    cells = {}
    for rank, begin, seconds, name, micro in found:
        row, letter = cells.setdefault(rank, []), LETTERS.get(name)
        last = row[-1] if row else [None, None]
        if letter and last[1] == micro and (last[0] == letter or (last[0], letter) == ("B", "W")):
            last[3] = begin + seconds
        elif letter:
            row.append([letter, micro, begin, begin + seconds])
    cells = {rank: row for rank, row in cells.items() if row}
    first = min((row[0][2] for row in cells.values()), default=None)
    if first is None or span_of(cells) <= first:
        raise BadLog(f"{path}: nothing is computed in it")
    return {
        rank: [[letter, micro, begin - first, end - first] for letter, micro, begin, end in row]
        for rank, row in cells.items()
    }


def is_action(found):
    """Whether an action of a trace can be drawn."""
    rank, begin, seconds, _, micro = found
    return (
        all(map(is_number, (rank, begin, seconds, micro)))
        and 0 <= seconds < TRACE_MOST
        and max(map(abs, (rank, begin, micro))) < TRACE_MOST
    )


def span_of(cells):
    """When the last one of all cells ends."""
    return max(cell[3] for row in cells.values() for cell in row)


def draw_schedule(pyplot, cells, out):
    figure, axes = pyplot.subplots(figsize=(14, 0.8 + 0.6 * len(cells)), layout="constrained")
    span = span_of(cells)
    for rank, row in cells.items():
        for letter, micro, begin, end in row:
            axes.barh(rank, 1000 * (end - begin), left=1000 * begin, height=0.8,
                      color=COLORS[letter], edgecolor="black", linewidth=0.4)
            if micro >= 0 and end - begin > 0.012 * span:
                axes.text(
                    500 * (begin + end), rank, str(micro), ha="center", va="center", fontsize=7
                )
    axes.set(xlabel="ms", yticks=list(cells), yticklabels=[f"rank {rank}" for rank in cells],
             xlim=(0, 1000 * span))
    axes.invert_yaxis()
    letters = {cell[0] for row in cells.values() for cell in row}
    axes.legend(
        handles=[
            pyplot.Rectangle((0, 0), 1, 1, color=COLORS[letter], label=MEANINGS[letter])
            for letter in COLORS
            if letter in letters
        ],
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False,
    )
    figure.savefig(out, dpi=150)
    print(one_line(out))


def pyplot_or_none(name):
    """matplotlib's drawing, without a screen; None, and a word about it, where it is not
    installed."""
    try:
        import matplotlib
    except ImportError:
        print(f"{name}: matplotlib is not there (scripts/setup.sh python gets it): no pictures")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main():
    sys.stdout.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        description="Draw losses, memory and traffic from logs of train_gpt."
    )
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a schedule instead of logs")
    parser.add_argument("--x", choices=AXES, type=lambda word: SYNONYMS.get(word, word),
                        default="steps", help="what losses are drawn against (default steps)")
    parser.add_argument("--smooth", type=int, default=0, metavar="N",
                        help="logged steps in a mean (default: auto)")
    parser.add_argument("--title", help="default: what the logs have in common")
    parser.add_argument("--panel", choices=["loss", *BARS], action="append",
                        help="may be given several times (default loss)")
    parser.add_argument("--out", type=Path, metavar="FILE.png",
                        help="default: the first log's or the trace's name, with .png")
    options = parser.parse_args()
    if bool(options.logs) == bool(options.trace):
        parser.error("give logs, or a --trace")
    panels = options.panel or ["loss"]
    try:
        runs = load_all(options.logs) if options.logs else []
        check(runs, panels, options.x)
        cells = read_cells(options.trace) if options.trace else {}
    except OSError as error:
        print(one_line(f"plot: {error.filename}: {error.strerror}"), file=sys.stderr)
        return EXIT_INPUT
    except BadLog as error:
        print(one_line(f"plot: {error}"), file=sys.stderr)
        return EXIT_INPUT
    pyplot = pyplot_or_none("plot")
    if not pyplot:
        return EXIT_RESOURCES
    out = options.out or (options.trace or options.logs[0]).with_suffix(".png")
    try:
        if options.trace:
            draw_schedule(pyplot, cells, out)
        else:
            draw_picture(pyplot, runs, panels, options, out)
    except (OSError, ValueError) as error:  # ValueError: no such picture format
        print(one_line(f"plot: cannot write the picture: {error}"), file=sys.stderr)
        return EXIT_RESOURCES
    return 0


if __name__ == "__main__":
    sys.exit(main())
