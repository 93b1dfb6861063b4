#!/usr/bin/env python3
"""report.py: makes one page of a run of train_gpt, or of several, from their logs (--log FILE).

    report.py OUT                  OUT/report.html, from OUT/log.jsonl
    report.py OUT1 OUT2 ...        their curves over each other, and what differs; in OUT1
    report.py run.jsonl --out run.html

The page opens in a browser from the file alone: nothing is fetched. It has what was run, the curves
of losses (drag to zoom, double-click to see all), of the learning rate, the gradient's norm and the
speed, memory and traffic as predicted and measured, the timeline of a step (--profile-steps with
--trace), samples of text, faults and resumes, and the command. A curve of more than 4000 points is
drawn by the least and the largest point of each of its parts. report.js draws in the browser.

Of a private run it has the guarantee, the validation, and what was known before; nothing that
depends on which samples a step took, unless the run was started with --dp-show-private.

Exit status: 0 done, 2 bad input, 3 the page could not be written.
"""

import argparse
import base64
import hashlib
import html
import json
import math
import os
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where Python is isolated

import run_log
from plot import COLORS, MEANINGS, MIB, read_cells, span_of, time_unit
from plot import LONG as UNITS
from regular_files import one_line
from run_log import EXIT_INPUT, EXIT_RESOURCES, BadLog, inner, is_number, number, plain

POINTS = 4000  # of a curve that is drawn whole
ALL_POINTS = 32000  # of all runs in a figure
CELLS = 3000  # of a timeline
MARKERS = 60  # validations of a run that are drawn with one each
LARGEST_PAGE = 8e6  # bytes
SAMPLES = 20  # texts of a run
LAST = 50  # steps whose mean loss runs are compared by
HUES = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
LINKS = {"intra": "inside a node", "inter": "between nodes"}
WAYS = {"steps": "step", "tokens": "tokens", "time": "time"}  # of run_log.AXES
DRAWS = Path(__file__).resolve().with_name("report.js")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 0 auto;
       padding: 0 16px 40px; }
h1 { font-size: 24px; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 28px 0 4px; border-bottom: 1px solid #ddd; }
h3 { font-size: 15px; margin: 12px 0 0; overflow-wrap: anywhere; }
p { margin: 6px 0; max-width: 80ch; overflow-wrap: anywhere; }
.small { color: #666; font-size: 13px; }
.figure { width: 100%; margin: 8px 0; }
.figure > svg { display: block; overflow: visible; user-select: none; touch-action: pan-y; }
.figure text { font-size: 12px; fill: #444; }
.label { pointer-events: none; }
.label text { fill: #000; stroke: #fff; stroke-width: 4px; paint-order: stroke; }
button { font: 12px system-ui, sans-serif; color: inherit; background: none; cursor: pointer;
         padding: 4px 8px; border: 1px solid #bbb; border-radius: 3px; margin-right: 4px; }
button.on { background: #eef3fa; }
button.name { border: none; text-align: left; overflow-wrap: anywhere; }
button.off { opacity: 0.35; }
button svg { margin-right: 6px; }
.axes { margin-left: 62px; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr));
       gap: 8px; }
.row > div { min-width: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top;
         border-top: 1px solid #eee; }
pre { background: #f6f6f6; padding: 8px; white-space: pre-wrap; overflow-wrap: anywhere;
      max-height: 400px; overflow-y: auto; margin: 4px 0; }
"""


def escape(value):
    return html.escape(plain(value))


def flags_of(run):
    return inner(run.start, "flags")


# --------------------------------------------------------------------------------------------------
# Numbers and texts


def count(value):
    return f"{value:,.0f}"


def bytes_text(value):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def seconds_text(value):
    unit = time_unit(value)
    return f"{value / UNITS[unit]:.3g} {unit}"


def several(n, word):
    return f"{count(n)} {word}{'s' * (n != 1)}"


def run_of(run):
    """What was run, in one sentence."""
    flags, start = flags_of(run), run.start
    size = number(start, "parameters")
    words = [f"Model {plain(flags.get('model', 'unknown'))}"]
    if size is not None:
        words[0] += f" ({run_log.size_text(size)})"
    ranks = number(start, "ranks")
    if ranks is not None:
        words.append(f"on {several(ranks, 'rank')}")
    if start.get("compute"):
        words.append(f"in {plain(start['compute'])}")
    words += [text for text in (way_of(flags), optimizer_of(flags)) if text]
    return ", ".join(words) + ". " + how_far(run)


def way_of(flags):
    ways = []
    if number(flags, "zero"):
        ways.append(f"ZeRO stage {flags['zero']:g}")
    for flag, name, off in (
        ("pipeline", "pipeline", "1"),
        ("cyclic", "cyclic data parallelism", "off"),
        ("share", "shared blocks:", "none"),
        ("offload", "offload", "none"),
    ):
        if str(flags.get(flag, off)) not in (off, "auto"):
            ways.append(f"{name} {plain(flags[flag])}")
            if flag == "share" and number(flags, "delink-at"):
                ways[-1] += f" until step {flags['delink-at']:g}"
    return ", ".join(ways)


def optimizer_of(flags):
    if "optimizer" not in flags:
        return ""
    rate = number(flags, "lr")
    batch = number(flags, "batch-tokens")
    text = plain(flags["optimizer"]) + (f" at a rate of {rate:g}" if rate is not None else "")
    return text + (f", {several(batch, 'token')} a step" if batch else "")


def how_far(run):
    total, seconds = run.total(), run.spent("time")
    state = "The run ended at step" if run.end else "The log ends, without an end, at step"
    text = f"{state} {count(run.step)}" + (f" of {count(total)}" if total else "")
    if seconds and not run.hides:
        text += f" after {seconds_text(seconds)} of training"
    if run.val:
        last = max(run.val)
        text += f"; validation loss {run.val[last]:.4f} at step {count(last)}"
    if run.bits_per_byte is not None:
        text += f" ({run.bits_per_byte:.4f} bits/byte)"
    return text + "."


# --------------------------------------------------------------------------------------------------
# Figures


def thinned(xs, ys, most):
    """Places of the points to draw: all, or of equal parts of the curve the least and the largest,
    with the first and the last of all."""
    length = len(ys)
    if length <= most:
        return range(length)
    parts = max(1, most // 2 - 1)
    kept = {0, length - 1}
    for i in range(parts):
        part = range(length * i // parts, length * (i + 1) // parts)
        kept |= {min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)}
    return sorted(kept)


class Page:
    """Parts of HTML, and the figures in them."""

    def __init__(self, runs):
        self.runs, self.parts, self.figures = runs, [], []
        self.most = max(100, min(POINTS, ALL_POINTS // len(runs)))

    def add(self, *parts):
        self.parts += parts

    def heading(self, text):
        self.add(f"<h2>{text}</h2>")

    def text(self, text, kind=""):
        self.add(f"<p{kind}>{escape(text)}</p>")

    def note(self, text):
        self.text(text, ' class="small"')

    def figure(self, kind, traces, height=300, **more):
        """What more may be, and what traces are, is in report.js."""
        name = f"figure{len(self.figures)}"
        one = {"id": name, "kind": kind, "height": height, "title": "", "xtitle": "", "ytitle": ""}
        self.figures.append({**one, "axes": [], **more, "traces": traces})
        return f'<div class="figure" id="{name}"></div>'

    def table(self, rows, head=()):
        """Of texts. Rows that say nothing are left out."""
        line = lambda cells, tag: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
        top = f"<tr>{line(head, 'th')}</tr>" if head else ""
        self.add(f'<div class="wide"><table>{top}{body}</table></div>')

    def each(self, texts_of):
        """A heading with the run's name above what is said of a run, where there are several."""
        for run in self.runs:
            if len(self.runs) > 1:
                self.add(f"<h3>{escape(run.label)}</h3>")
            texts_of(run)

    def name(self, run, what=""):
        """Of a curve, in the legend."""
        return ", ".join(filter(None, [plain(run.label) if len(self.runs) > 1 else "", what]))

    def curve(self, run, values, **more):
        """A trace: step -> value."""
        steps = sorted(values)
        ys = [values[step] for step in steps]
        kept = thinned(steps, ys, self.most)
        return {"x": [steps[i] for i in kept], "y": [rounded(ys[i]) for i in kept], **more}


def rounded(value):
    """What a picture shows of a number; of a short one all digits."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() else short


def loss_curves(page, run, color):
    values = {} if run.hides else run.train
    width = len(values) // 50
    # A run among others is hidden as a whole.
    group = {"group": str(page.runs.index(run))} if len(page.runs) > 1 else {}
    if values:
        many = width > 1
        thin = {"width": 1, "opacity": 0.35, "unnamed": 1} if many else {"width": 2}
        training = group or {"group": "training"}
        name = page.name(run, "training")
        yield page.curve(run, values, name=name, color=color, **thin, **training)
        if many:
            steps = sorted(values)
            means = run_log.smoothed([values[step] for step in steps], width)
            name = page.name(run, f"training, mean of {width}")
            means = dict(zip(steps, means))
            yield page.curve(run, means, name=name, color=color, width=2, **training)
    if run.val:
        darker = "#" + "".join(f"{int(color[i : i + 2], 16) // 2:02x}" for i in (1, 3, 5))
        shape = {"color": darker, "width": 1.5, "dash": 1, "points": int(len(run.val) <= MARKERS)}
        yield page.curve(run, run.val, name=page.name(run, "validation"), **shape, **group)


def axes_of(page, traces):
    """The axes that all runs can tell, for (run, trace), whose places are steps."""
    axes = [{"label": "step"}]
    for axis, title in WAYS.items():
        if axis == "steps" or any(run.hides for run in page.runs):
            continue
        try:
            where = {run: run.positions(axis) for run in page.runs}
        except BadLog:
            continue
        longest = max((max(places.values(), default=0) for places in where.values()), default=0)
        unit = time_unit(longest) if axis == "time" else ""
        xs = [[rounded(where[run][x] / UNITS.get(unit, 1)) for x in t["x"]] for run, t in traces]
        axes.append({"label": title + (f" ({unit})" if unit else ""), "x": xs})
    return axes if len(axes) > 1 else []


def add_losses(page):
    page.heading("Loss")
    traces = [
        (run, trace)
        for i, run in enumerate(page.runs)
        for trace in loss_curves(page, run, HUES[i % len(HUES)])
    ]
    if traces:
        shape = {"height": 400, "ytitle": "loss (nats/token)", "axes": axes_of(page, traces)}
        shape["xtitle"] = "" if shape["axes"] else "step"
        page.add(page.figure("curves", [trace for _, trace in traces], **shape))
        page.note("Drag over a curve to zoom; double-click to see all of it.")
    else:
        page.text("The log has no losses.")
    if any(run.hides for run in page.runs):
        page.note(
            "The losses of training steps are not shown: epsilon does not cover them. The loss"
            " of validation is of other data, which must not be private."
        )


def add_rates(page):
    page.heading("Learning rate, norm, speed")
    shown = []
    for name, title in (
        ("lr", "learning rate"),
        ("grad_norm", "norm of the gradient"),
        ("tokens_per_s", "tokens/s"),
    ):
        traces = []
        for i, run in enumerate(page.runs):
            if run.series[name] and (name == "lr" or not run.hides):
                named, color = page.name(run, title), HUES[i % len(HUES)]
                traces.append(
                    page.curve(run, run.series[name], name=named, color=color, width=1, unnamed=1)
                )
        if traces:
            shown.append(page.figure("curves", traces, title=title, xtitle="step"))
    page.add('<div class="row">', *(f"<div>{one}</div>" for one in shown), "</div>")
    if not shown:
        page.text("The log has no steps.")


def kind_text(kind):
    """all_gather, intra -> all_gather inside a node"""
    name, _, link = kind.partition(", ")
    return plain(f"{name} {LINKS.get(link, link)}".strip())


def paler(color, part):
    """A colour, with so much white in it."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(one + (255 - one) * part):02x}" for one in parts)


def bar_traces(page, panel):
    for i, run in enumerate(page.runs):
        for when, kinds in run.bars.get(panel, {}).items():
            if kinds and not (run.hides and when == "measured"):
                yield {
                    "name": page.name(run, when),
                    "x": [kind_text(kind) for kind in kinds],
                    "y": [rounded(n / MIB) for n in kinds.values()],
                    "color": paler(HUES[i % len(HUES)], 0.5 * (when == "predicted")),
                }


def add_bars(page):
    for panel, title, none in (
        ("memory", "Memory of rank 0", "The log does not tell the memory."),
        ("traffic", "Traffic of rank 0, by link", "One rank sends nothing."),
    ):
        page.add("<div>")
        page.heading(title)
        traces = [*bar_traces(page, panel)]
        if traces:
            unit = "MiB" if panel == "memory" else "MiB a step"
            page.add(page.figure("bars", traces, ytitle=unit))
        else:
            page.text(none)
        page.add("</div>")


# --------------------------------------------------------------------------------------------------
# The timeline


def trace_of(run):
    """The file of --trace, as the log names it or beside the log; None where there is none."""
    named = flags_of(run).get("trace")
    if not isinstance(named, str) or not named or "\0" in named:
        return None
    return next((p for p in (Path(named), run.path.parent / Path(named).name) if p.is_file()), None)


def timeline(page, cells):
    """Bars for each rank, and the lines that say how long each is idle."""
    span = span_of(cells)
    busy = {rank: sum(end - begin for *_, begin, end in row) for rank, row in cells.items()}
    shown, left = [], CELLS
    for rank, row in sorted(cells.items()):
        left -= len(row)
        if left >= 0 or not shown:
            shown.append(rank)
    names = [f"rank {rank:g}: {1 - busy[rank] / (span or 1):.0%} idle" for rank in shown]
    traces = []
    for letter, color in COLORS.items():
        found = [(i, c) for i, r in enumerate(shown) for c in cells[r] if c[0] == letter]
        if found:
            traces.append({
                "name": MEANINGS[letter], "color": color,
                "row": [i for i, _ in found],
                "begin": [rounded(1000 * cell[2]) for _, cell in found],
                "length": [rounded(1000 * (cell[3] - cell[2])) for _, cell in found],
                "text": [f"{cell[1]:g}" if cell[1] >= 0 else "" for _, cell in found],
            })
    height = 70 + 34 * len(shown)
    page.add(page.figure("timeline", traces, height, xtitle="ms", rows=names))
    idle = 1 - sum(busy.values()) / (len(busy) * span or 1)
    text = f"Idle: {idle:.1%} of the time of all ranks. The numbers are micro-batches."
    page.note(text + (f" The first {len(shown)} ranks are drawn." * (len(shown) < len(cells))))


def add_profile(page, run):
    event = next((e for e in reversed(run.others) if e["event"] == "profile"), None)
    actions = event.get("actions") if event else None
    rows = [
        [one.get("action"), one.get("unit"), one.get("count"), f"{one['ms']:.3f}"]
        for one in (actions if isinstance(actions, list) else [])
        if isinstance(one, dict) and is_number(one.get("ms"))
    ]
    if rows and number(event, "waiting_ms") is not None:
        rows.append(["waiting for other stages", "", "", f"{event['waiting_ms']:.3f}"])
    if rows:
        page.note("The profiled steps of rank 0, milliseconds a step:")
        page.table(rows, ["action", "of", "times", "ms"])
    return bool(rows)


def add_schedule(page):
    page.heading("A step over time")

    def of(run):
        if run.hides:
            return page.text("Not measured: in a private run it depends on the samples of a step.")
        path, found = trace_of(run), False
        if path:
            try:
                timeline(page, read_cells(path))
                found = True
            except (BadLog, OSError) as error:
                page.text(f"The timeline cannot be drawn: {error}")
                found = True
        if not add_profile(page, run) and not found:
            page.text(
                "Not measured. Flags --profile-steps 10:12 --trace OUT/trace.json measure which"
                " rank computes what, and when it is idle."
            )

    page.each(of)


# --------------------------------------------------------------------------------------------------
# Texts


def add_samples(page):
    samples = {
        run: {
            str(e.get("step")): e["text"]
            for e in run.others
            if e["event"] == "sample" and isinstance(e.get("text"), str)
        }
        for run in page.runs
        if not run.hides
    }
    page.heading("Samples")
    if not any(samples.values()):
        return page.text(
            "None. --sample-every N writes a text after every N-th step."
            if not all(run.hides for run in page.runs)
            else "Not kept in a private run."
        )

    def of(run):
        for step, text in [*samples.get(run, {}).items()][-SAMPLES:]:
            page.note(f"step {step}")
            page.add(f"<pre>{escape(text)}</pre>")

    page.each(of)


def add_faults(page):
    page.heading("Faults and resumes")

    def of(run):
        saved = [e for e in run.others if e["event"] == "checkpoint"]
        rows = [[fault] for fault in run.faults()] or [["none"]]
        if not run.end:
            rows.append([f"the log has no end: the run goes on, or ended after step {run.step}"])
        last = f", the last is {saved[-1].get('path')}" if saved else ""
        rows.append([f"{several(len(saved), 'checkpoint')} saved{last}"])
        page.table(rows)

    page.each(of)


def add_privacy(page):
    private = [run for run in page.runs if run.private()]
    if not private:
        return
    page.heading("Privacy")
    for run in private:
        if len(page.runs) > 1:
            page.add(f"<h3>{escape(run.label)}</h3>")
        # of the steps that were taken, or may be
        fact = inner(run.end, "privacy") or inner(run.start, "privacy")
        steps, epsilon, delta = (number(fact, key) for key in ("steps", "epsilon", "delta"))
        kind = "document" if fact.get("unit") == "document" else "window"
        if epsilon is None or delta is None or delta < 1e-100:
            page.text("No guarantee: the noise hides nothing.")
        else:
            delta = up(delta, 10 ** (math.floor(math.log10(delta)) - 2))
            taken = "After" if inner(run.end, "privacy") else "At most, after"
            page.text(
                f"{taken} {count(steps or 0)} steps: epsilon <= {up(epsilon, 1e-4):.4f} at delta"
                f" {delta:.3g}, for each {kind} of the training data."
            )
        names = {
            "neighbours": "neighbours", "accountant": "accountant", "sampling": "sampling",
            "sampling_rate": "probability of a sample to be in a step", "sigma": "noise (sigma)",
            "clip": "clipping threshold", "clip_style": "clipping style",
            "clip_function": "clipping function", "windows": "windows of training data",
            "windows_per_document": "windows of a document", "target": "--dp-epsilon",
        }
        page.table([[text, fact[key]] for key, text in names.items() if fact.get(key) is not None])
        page.note(
            "Not counted: other runs on this data; what others on the machine can watch; rounding"
            " of sums before noise; validation data; copies of a sample elsewhere in the data."
        )
        if not run.hides:
            page.text(
                "--dp-show-private was given: epsilon does not hold for who sees the losses, norms"
                " and samples of this page."
            )


def up(value, unit):
    """The next multiple of the unit, never below the value: it is claimed."""
    return math.ceil(value / unit * (1 - 1e-12)) * unit


def command_of(run):
    words = run.start.get("command")
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        words = ["./train_gpt"]
        for name, value in flags_of(run).items():
            if value not in ("", None) and not isinstance(value, (dict, list)):
                words += [f"--{name}", str(value)]
    ranks = run.start.get("ranks")
    launcher = ["mpirun", "-np", str(ranks)] if isinstance(ranks, int) and ranks > 1 else []
    return shlex.join(launcher + words)


def add_command(page):
    page.heading("Command")
    page.each(lambda run: page.add(f"<pre>{escape(command_of(run))}</pre>"))
    page.note("To be given in the folder in which the run was started. --resume 1 goes on with it.")
    page.add("<details><summary>All flags</summary>")
    page.each(lambda run: page.table([[f"--{key}", value] for key, value in flags_of(run).items()]))
    page.add("</details>")


def results(run):
    """Name -> text, of what came out."""
    found = {"steps": count(run.step)}
    if run.train and not run.hides:
        last = [run.train[step] for step in sorted(run.train)[-LAST:]]
        found[f"training loss, mean of the last {LAST} or all"] = f"{sum(last) / len(last):.4f}"
    if run.val:
        found["last validation loss"] = f"{run.val[max(run.val)]:.4f}"
        found["lowest validation loss"] = f"{min(run.val.values()):.4f}"
    if run.bits_per_byte is not None:
        found["bits/byte"] = f"{run.bits_per_byte:.4f}"
    seconds, tokens = run.spent("time"), run.spent("tokens")
    if seconds and not run.hides:
        found["training time"] = seconds_text(seconds)
        found["tokens/s"] = count((tokens or 0) / seconds)
    memory = number(inner(run.end or run.start, "memory", "predicted"), "device")
    if memory is None:
        memory = number(inner(run.start, "predicted", "memory"), "device")
    if memory is not None:
        found["memory of the device, predicted"] = bytes_text(memory)
    epsilon = number(inner(run.end or run.start, "privacy"), "epsilon")
    if epsilon is not None:
        found["epsilon"] = f"{up(epsilon, 1e-4):.4f}"
    found["faults"] = "; ".join(run.faults()) or "none"
    return found


def add_differences(page):
    if len(page.runs) < 2:
        return
    page.heading("Differences")
    flags = [{**flags_of(run), "ranks": run.start.get("ranks")} for run in page.runs]
    every = dict.fromkeys(name for one in flags for name in one)
    rows = [
        [name if name == "ranks" else f"--{name}", *(one.get(name, "") for one in flags)]
        for name in every
        if len({str(one.get(name)) for one in flags}) > 1
    ]
    found = [results(run) for run in page.runs]
    kinds = dict.fromkeys(name for one in found for name in one)
    rows += [[name, *(one.get(name, "") for one in found)] for name in kinds]
    page.table(rows, ["", *(run.label for run in page.runs)])


# --------------------------------------------------------------------------------------------------
# The page


def script(text):
    """A script for the page, and the word that allows it and no other."""
    text = text.replace("</script", "<\\/script")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"<script>{text}</script>", f"'sha256-{digest}'"


def document(page, title):
    code, allowed = script(DRAWS.read_text(encoding="utf-8"))
    figures = json.dumps(page.figures, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        figures = figures.replace(sign, f"\\u{ord(sign):04x}")
    policy = f"default-src 'none'; script-src {allowed}"
    policy += "; style-src 'unsafe-inline'; img-src data:"
    return "\n".join(
        ["<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
         f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
         '<meta name="viewport" content="width=device-width, initial-scale=1">',
         '<link rel="icon" href="data:,">',
         f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>", *page.parts,
         f'<script type="application/json" id="figures">{figures}</script>', code,
         "<noscript><p>JavaScript, which draws the figures, is off.</p></noscript>",
         "</body></html>\n"]
    )


def make(runs):
    page = Page(runs)
    title = run_log.title(runs) if len(runs) == 1 else f"{len(runs)} runs"
    page.add(f"<h1>{escape(title)}</h1>")
    page.each(lambda run: page.text(run_of(run)))
    for add in (add_differences, add_privacy, add_losses, add_rates):
        add(page)
    page.add('<div class="row">')
    add_bars(page)
    page.add("</div>")
    for add in (add_schedule, add_samples, add_faults, add_command):
        add(page)
    made = time.strftime("%Y-%m-%d %H:%M")
    page.note(f"Made by scripts/report.py on {made} from {', '.join(str(r.path) for r in runs)}.")
    return document(page, title)


def log_of(path):
    """The log of an --out folder, or the log itself."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.jsonl"))
    if path / "log.jsonl" in found or len(found) == 1:
        return path / "log.jsonl" if path / "log.jsonl" in found else found[0]
    many = f"has {len(found)} logs: name one of them" if found else "has no log (--log)"
    raise BadLog(f"{path} {many}")


def read(paths):
    runs = run_log.load_all([log_of(path) for path in paths])
    for run in runs:
        if not (run.start or run.costs or run.val):
            raise BadLog(f"{run.path}: no event of a run in it")
    return runs


def write(path, text):
    """The whole page or none: a temporary file takes its place."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def main():
    parser = argparse.ArgumentParser(description="Make a page of runs of train_gpt.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="a folder, or its log")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: OUT/report.html")
    options = parser.parse_args()
    code, text = 0, ""
    try:
        runs = read(options.runs)
        page = make(runs)
        if len(page.encode()) > LARGEST_PAGE:
            raise BadLog(f"the page of {len(runs)} runs has over {LARGEST_PAGE / 1e6:.0f} MB")
    except OSError as error:
        code, text = EXIT_INPUT, f"{error.filename}: {error.strerror}"
    except BadLog as error:
        code, text = EXIT_INPUT, str(error)
    if not code:
        out = options.out or runs[0].path.parent / "report.html"
        try:
            write(out, page)
            print(one_line(out))
        except OSError as error:
            code, text = EXIT_RESOURCES, f"cannot write {out}: {error.strerror}"
    if code:
        print(one_line(f"report.py: {text}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
