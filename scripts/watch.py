#!/usr/bin/env python3
"""watch.py: follows a run of train_gpt in the terminal, by its log (--log FILE).

    watch.py LOG           a page that is drawn again whenever the log grows; q quits
    watch.py LOG --once    one page, as where the output is no terminal

The page has the loss as a curve (the mean of the steps of each column; o: validation), the speed,
the time left, the last validation, epsilon in private runs, and faults: starts after the first one,
losses that are not finite, lines that a kill cut off, and a log that has not grown for long. Its
size is the terminal's, 80 columns and 24 lines if there is none. The page stays on the screen when
the run ends.

Standard library only. Exit status: 0 done, 2 the log cannot be read.
"""

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from regular_files import one_line, open_regular
from run_log import EXIT_INPUT, Run, inner, is_number, number, size_text

RECENT = 50  # steps in means
SILENT = 60  # seconds without a new event, and so many times a step, until it is a fault
COLORS = {"title": "1", "bar": "32", "faults": "31"}  # of lines; faults, where there are any


class Follower(Run):
    """What the log says so far, read whenever it has grown."""

    def begin(self):
        super().begin()
        self.offset, self.rest = 0, b""
        self.steps, self.slow = [], True  # the newest events; only a slow step?

    def read(self):
        with open_regular(self.path) as file:
            if file.seek(0, os.SEEK_END) < self.offset:
                self.begin()  # a new run has begun the file again
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.add_line(line)

    def add_start(self, event):
        super().add_start(event)
        self.steps, self.slow = [], True

    def add_step(self, event, step):
        super().add_step(event, step)
        # the first step after a start is slow: it counts until there is another
        kept = self.steps[1 - RECENT :] if len(self.steps) > 1 or not self.slow else []
        self.slow &= not self.steps
        self.steps = [*kept, event]

    def mean(self, key):
        values = [event[key] for event in self.steps if is_number(event.get(key))]
        return sum(values) / len(values) if values else None


def clock(seconds):
    seconds = round(seconds)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def step_time(seconds):
    """In one unit, as readable_step() in base/readable.h."""
    units = ((1e-3, 999.95, "ms"), (1, 119.95, "s"), (60, 119.95, "min"), (3600, 47.95, "h"))
    for unit, most, name in (*units, (86400, float("inf"), "d")):
        n = seconds / unit
        if n < most:
            digits = 1 if name in ("min", "h", "d") or n >= 99.995 else 2 if n >= 0.9995 else 3
            return f"{n:.{digits}f} {name}"


def faults(run, silent):
    found = run.faults()
    every = number(inner(run.start, "flags"), "log-every") or 1
    if run.last != "end" and silent > SILENT * max(1, every * (run.mean("ms") or 0) / 1000):
        found.append(f"no news for {clock(silent)}")
    return "; ".join(found) or "none"


def listed(*parts):
    """The values of (form, value) that are known."""
    return ", ".join(form.format(value) for form, value in parts if value is not None)


def rows(run, silent):
    """Names and texts of the lines above the curve."""
    total, flags = run.total(), inner(run.start, "flags")
    state = "ended at" if run.last == "end" else "at"
    parameters = number(run.start, "parameters")
    size = "" if parameters is None else f"{size_text(parameters)}, "
    ranks = run.start.get("ranks", 1)
    name = Path(str(flags.get("model", "?"))).name
    yield "model", f"{size}{ranks} rank{'s' * (ranks != 1)}, {run.start.get('compute')}, {name}"
    left = (total - run.step) * (run.mean("ms") or 0) / 1000
    end = time.strftime("%a %H:%M", time.localtime(time.time() + left)) if 0 <= left < 1e9 else "?"
    goes_on = run.last != "end" and total and run.steps
    ending = f", {clock(left)} left, ends around {end}" if goes_on else ""
    yield "step", f"{state} {run.step}" + (f" of {total}" if total else "") + ending
    if run.steps:
        ms, mfu = run.mean("ms"), run.mean("mfu")
        yield "speed", listed(
            ("{:,.0f} tokens/s", run.mean("tokens_per_s")),
            ("{} a step", None if ms is None else step_time(ms / 1000)),
            ("MFU {:.1f} %", None if mfu is None else 100 * mfu),
            ("{:.3g} TFLOP/s", run.mean("tflops") if mfu is None else None),
        )
    recent = [event["loss"] for event in run.steps if is_number(event.get("loss"))]
    if recent:
        yield "loss", listed(
            ("{:.4f}", recent[-1]),
            (f"mean of {len(recent)}: {{:.4f}}", sum(recent) / len(recent)),
            ("norm {:.3f}", number(run.steps[-1], "grad_norm")),
            ("lr {:.2e}", number(run.steps[-1], "lr")),
        )
    val = [*run.vals.values()][-1] if run.vals else {}
    if is_number(val.get("loss")):
        bits, before = val.get("bits_per_byte"), min(run.val.values())
        yield "validation", (
            f"{val['loss']:.4f} at step {val['step']}, lowest {before:.4f}"
            + (f", {bits:.4f} bits/byte" if is_number(bits) else "")
        )
    if run.private():
        promised, spent = number(inner(run.start, "privacy"), "epsilon"), val.get("epsilon")
        yield "epsilon", (
            (f"{spent:.4f} at step {val['step']}" if is_number(spent) else "not yet logged")
            + ("" if promised is None else f", {promised:.4f} at the end")
        )
    yield "faults", faults(run, silent)


def columns(losses, width, first, last):
    """The mean loss of the steps of each column; None where there are none."""
    sums = [[0.0, 0] for _ in range(width)]
    for step, loss in losses.items():
        place = sums[min(width - 1, (step - first) * width // max(1, last - first + 1))]
        place[0] += loss
        place[1] += 1
    return [total / count if count else None for total, count in sums]


def curve(run, width, height, dots):
    """Lines of a picture of the losses. dots: eight to a character, else one."""
    label = 10
    width -= label + 1
    across, down = (2, 4) if dots else (1, 1)
    steps = {*run.train, *run.val}
    if height < 3 or width < 10 or not steps:
        return []
    first, last = min(steps), max(steps)
    means = columns(run.train, width * across, first, last)
    points = columns(run.val, width, first, last)
    known = sorted(x for x in (*means, *points) if x is not None)
    low, high = known[0], known[min(len(known) - 1, 19 * len(known) // 20)]
    high = high if high > low else low + 1e-9
    levels = (height - 1) * down
    level = lambda x: round((levels - 1) * (high - min(x, high)) / (high - low or 1))
    cells = [[0] * width for _ in range(height - 1)]
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of braille characters
    before = None
    for x, y in ((x, level(mean)) for x, mean in enumerate(means) if mean is not None):
        for part in {y, *range(*sorted((y, y if before is None else before)))}:  # without gaps
            cells[part // down][x // across] |= bits[x % across][part % down]
        before = y
    sign = lambda cell: " " if not cell else chr(0x2800 + cell) if dots else "*"
    lines = [[sign(cell) for cell in row] for row in cells]
    for x, mean in enumerate(points):
        if mean is not None:
            lines[level(mean) // down][x] = "o"
    sides = [""] * (height - 1)
    sides[0], sides[-1] = f"{high:.4f}", f"{low:.4f}"
    steps_row = f"{first}".ljust(width - len(str(last))) + f"{last}"
    return [f"{side:>{label}}|{''.join(line)}".rstrip() for side, line in zip(sides, lines)] + [
        " " * label + "+" + steps_row[:width]
    ]


def page(run, silent, width, height, dots=True):
    """Pairs of a name (for colours) and a line of at most `width` columns; at most `height`."""
    done = min(1.0, run.step / run.total()) if run.total() else 0
    room = width - 9
    bar = "#" * int(room * done)
    lines = [("title", f"train_gpt  {one_line(run.path)}"[:width])]
    lines += [("bar", f"[{bar.ljust(room, '.')}]{100 * done:5.1f} %")] if run.total() else []
    for name, text in rows(run, silent):
        lines.append(("" if text == "none" else name, f"{name:<11}{one_line(text)}"[:width]))
    lines += [("curve", line) for line in curve(run, width, height - len(lines), dots)]
    return lines[:height]


def show(run, color):
    """Prints the page, below each other or, in colours, from the top of the terminal."""
    width, height = shutil.get_terminal_size((80, 24))
    silent = time.time() - os.path.getmtime(run.path)
    dots = "utf" in (sys.stdout.encoding or "").lower()
    lines = page(run, silent, width, height - (2 if color else 1), dots)
    if color:
        ends = "\033[K\n"
        text = "".join(f"\033[{COLORS.get(name, '0')}m{line}\033[0m{ends}" for name, line in lines)
        print(f"\033[H{text}\033[Jq quits", end="", flush=True)
    else:
        print("\n".join(line for _, line in lines), flush=True)


@contextlib.contextmanager
def screen():
    """A second screen of the terminal, which reads keys one by one; the first one comes back."""
    try:
        import termios
        import tty

        keys = sys.stdin.isatty()
        before = termios.tcgetattr(sys.stdin) if keys else None
        if keys:
            tty.setcbreak(sys.stdin)
    except ImportError:
        keys = False
    print("\033[?1049h\033[?25l", end="", flush=True)
    try:
        yield keys
    finally:
        print("\033[?25h\033[?1049l", end="", flush=True)
        if keys:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def wait_for_key(keys, seconds=1):
    """Returns whether q was pressed within the time."""
    ready = select.select([sys.stdin], [], [], seconds)[0] if keys else time.sleep(seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"")


def follow(run):
    with screen() as keys, contextlib.suppress(KeyboardInterrupt):
        run.read()
        show(run, True)
        while run.last != "end" and not wait_for_key(keys):
            run.read()
            show(run, True)


def main():
    sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Follow a run of train_gpt by its log.")
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("--once", action="store_true", help="print one page and stop")
    options = parser.parse_args()
    run = Follower(options.log)
    try:
        if sys.stdout.isatty() and not options.once:
            follow(run)
        else:
            run.read()
        if run.starts or run.step:
            show(run, False)
        else:
            print(f"watch.py: {one_line(options.log)}: no event of a run in it", file=sys.stderr)
            return EXIT_INPUT
    except OSError as error:
        print(f"watch.py: {one_line(error.filename)}: {error.strerror}", file=sys.stderr)
        return EXIT_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
