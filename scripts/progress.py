"""progress.py: how far a script is that starts many runs, and what is left of them."""

import sys
import threading
import time


def clock(seconds):
    """1:02, or 1:02:03."""
    hours, rest = divmod(round(seconds), 3600)
    return (f"{hours}:{rest // 60:02}" if hours else f"{rest // 60}") + f":{rest % 60:02}"


class Progress:
    """How far a script is, by groups of runs that take about the same time each. A line tells of
    each finished run; a terminal also shows how far the script is while a run is under way."""

    def __init__(self):
        self.planned, self.done = {}, {}  # group -> how many runs; names of runs
        self.spent = {}  # group -> seconds of each run that was not there yet
        self.begun = self.last = time.monotonic()
        self.live, self.lock = sys.stdout.isatty(), threading.Lock()

    def plan(self, *counts):
        """Each: group -> how many runs it will have at most. Forgets what was planned before."""
        self.planned = {}
        for groups in counts:
            for group, runs in groups.items():
                self.planned[group] = max(runs, self.planned.get(group, 0))

    def to_come(self):
        """Group -> how many runs."""
        done = {group: len(names) for group, names in self.done.items()}
        return {group: max(0, runs - done.get(group, 0)) for group, runs in self.planned.items()}

    def left(self):
        """Seconds of all runs that are to come: as long as those of their group so far, or as those
        of all groups; None before the first."""
        every = [seconds for found in self.spent.values() for seconds in found]
        if not every:
            return None
        return sum(
            runs * sum(found) / len(found)
            for group, runs in self.to_come().items()
            for found in (self.spent.get(group, every),)
        )

    def status(self):
        done = sum(map(len, self.done.values()))
        runs = done + sum(self.to_come().values())
        left, now = self.left(), time.monotonic()
        text = f"{done:3}/{runs} {clock(now - self.begun):>5}"
        return text if left is None else f"{text}, {clock(max(0, left - (now - self.last)))} left"

    def finished(self, group, name, fresh=True, more="", quiet=False):
        """A run has ended, or (not fresh) was there; quiet: no line of its own."""
        with self.lock:
            names = self.done.setdefault(group, set())
            if name in names:
                return
            now = time.monotonic()
            if fresh:
                self.spent.setdefault(group, []).append(now - self.last)
            names.add(name)
            self.last = now
        if not quiet:
            self.line(("" if fresh else "there: ") + name + more)

    def line(self, text):
        print(self.live * "\r\033[K" + f"{self.status()}  {text}", flush=True)

    def show(self):
        print(f"\r\033[K{self.status()} ...", end="", flush=True)
