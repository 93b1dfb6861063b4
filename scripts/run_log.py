"""run_log.py: reads the logs of train_gpt (--log FILE; docs/formats.md has the events), for
plot.py, watch.py, report.py and whoever else looks at a run.

A resumed run appends to its log: the later event of a step replaces the earlier one, and what came
after the step from which a run was resumed counts no more. Lines that are no event (a run was
killed while it wrote, or another program did) are counted and passed over.
Nothing in a log is trusted: numbers that are too large to compute with count as missing.
"""

import itertools
import json
from pathlib import Path

from regular_files import open_regular, plain

EXIT_INPUT, EXIT_RESOURCES = 2, 3
LEGEND = 60  # columns of the flags in it
# flags that shape no curve
OUTPUTS = {
    "out", "log", "log-every", "export", "trace", "tensorboard", "profile-steps", "watchdog",
    "val-every", "sample-every", "sample-tokens", "save-every", "keep", "resume",
}
AXES = {"steps": "step", "tokens": "tokens", "time": "training time", "joules": "energy (J)"}
PANELS = ("memory", "traffic")
SERIES = ("grad_norm", "lr", "tokens_per_s")  # of steps, besides the loss
LARGEST = 1e100  # squares and sums of such numbers are finite, too


class BadLog(Exception):
    pass


def is_number(value):
    kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind and -LARGEST < value < LARGEST


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def inner(value, *keys):
    """The object under these keys, {} where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def number(value, key):
    """The number under this key, or None."""
    value = value.get(key)
    return value if is_number(value) else None


def size_text(parameters):
    """Of a model."""
    for unit, sign in ((1e9, "G"), (1e6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:.1f} {sign} parameters"
    return f"{parameters / 1e3:.1f} K parameters"


def parse(line):
    """The event of a line of bytes, or None."""
    try:
        event = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def events(path):
    """Yields the events of a log, in file order."""
    with open_regular(path) as file:
        yield from (event for event in map(parse, file) if event)


def bars(panel, table):
    """Kinds and their bytes; sums of others and what is zero are left out."""
    if panel == "traffic":
        table = {
            f"{kind}, {link}": n
            for link in ("intra", "inter")
            for kind, n in inner(table, link).items()
        }
    return {kind: n for kind, n in table.items() if kind != "device" and is_number(n) and n > 0}


class Run:
    """What a log says so far."""

    def __init__(self, path, label=""):
        self.path, self.label = path, label
        self.begin()

    def begin(self):
        self.start, self.end = {}, {}  # the last events of these kinds
        self.starts = []  # the step before each start
        self.resumes = False  # whether no step has followed the last start
        self.last, self.step = "", 0  # kind of the last event, its step
        self.train, self.val = {}, {}  # step -> loss in nats per token
        self.vals = {}  # step -> its validation, the newest one last
        self.series = {name: {} for name in SERIES}  # step -> value
        # step -> axis -> what this step took, None where the log does not tell
        self.costs, self.joules = {}, 0
        self.bars = {}  # panel -> "predicted" or "measured" -> kind -> bytes
        self.lost, self.torn = [], 0  # steps whose loss is not finite; lines that are no events
        self.others = []  # events of other kinds, in file order
        self.hides = False  # some start was private and did not show losses

    def read(self):
        with open_regular(self.path) as file:
            for line in file:
                self.add_line(line)
        return self

    def add_line(self, line):
        event = parse(line)
        if event:
            self.add(event)
        else:
            self.torn += 1

    def add(self, event):
        self.last, step = event["event"], event.get("step")
        if self.resumes and self.last in ("step", "val") and is_count(step):
            self.forget(step - (self.last == "step"))
        if self.last == "start":
            self.add_start(event)
        elif self.last == "end":
            self.end = event
            self.bars = {
                panel: {
                    when: bars(panel, inner(event, panel, when))
                    for when in ("predicted", "measured")
                }
                for panel in PANELS
            }
        elif self.last == "step" and is_count(step):
            self.add_step(event, step)
        elif self.last == "val" and is_count(step):
            self.step = step
            self.vals.pop(step, None)
            self.vals[step] = event
            self.put(self.val, step, event, "loss")
        else:
            self.others.append(event)

    def forget(self, done):
        """What an earlier start has of later steps: this one goes on from `done` updates."""
        self.resumes = False
        for values in (self.train, self.val, self.vals, self.costs, *self.series.values()):
            for later in [step for step in values if step > done]:
                del values[later]
        self.others = [e for e in self.others if not (number(e, "step") or 0) > done]

    def add_start(self, event):
        self.starts.append(self.step)
        self.resumes = True
        inner(event, "flags").pop("dp-key", None)  # nobody is to see it
        self.start, self.end, self.joules = event, {}, 0
        self.hides |= self.private() and not inner(event, "flags").get("dp-show-private")
        self.bars = {
            panel: {"predicted": bars(panel, inner(event, "predicted", panel))} for panel in PANELS
        }

    def add_step(self, event, step):
        self.step = step
        self.put(self.train, step, event, "loss")
        if step not in self.train and not self.private():
            self.lost.append(step)
        for name, values in self.series.items():
            self.put(values, step, event, name)
        ms, rate, joules = (number(event, key) for key in ("ms", "tokens_per_s", "joules"))
        spent = None if joules is None or self.joules is None else joules - self.joules
        tokens = ms and rate and round(rate * ms / 1000)
        self.costs[step] = {"time": ms and ms / 1000, "tokens": tokens, "joules": spent}
        self.joules = joules

    @staticmethod
    def put(values, step, event, key):
        values.pop(step, None)
        if is_number(event.get(key)):
            values[step] = event[key]

    def private(self):
        return bool(inner(self.start, "privacy"))

    @property
    def bits_per_byte(self):
        """Of the last validation."""
        return number(self.vals[max(self.vals)], "bits_per_byte") if self.vals else None

    def total(self):
        """The steps of the run; 0: not known."""
        steps = self.start.get("steps", inner(self.start, "flags").get("steps"))
        allowed = inner(self.start, "privacy").get("steps")
        return min((n for n in (steps, allowed) if is_count(n) and n), default=0)

    def faults(self):
        found = []
        if len(self.starts) > 1:
            after = ", ".join(map(str, self.starts[1:][-5:]))
            found.append(f"started again after step {after}")
        if self.lost:
            losses = f"{len(self.lost)} loss{'es' * (len(self.lost) > 1)}"
            found.append(f"{losses} not finite, the last at step {self.lost[-1]}")
        if self.torn:
            found.append(f"{self.torn} line{'s' * (self.torn > 1)} cut off")
        return found

    def legend(self):
        if not self.val:
            return self.label
        text = f"{self.label} (validation {self.val[max(self.val)]:.4f}"
        return text + (
            f", {self.bits_per_byte:.4f} bits/byte)" if self.bits_per_byte is not None else ")"
        )

    def flags(self):
        """The flags and the number of ranks, as far as they may shape a curve."""
        flags = {**inner(self.start, "flags"), "ranks": self.start.get("ranks")}
        return {name: str(value) for name, value in flags.items() if name not in OUTPUTS}

    def positions(self, axis):
        """Where each step lies on the axis. A validation between two logged steps lies between
        them."""
        if axis == "steps":
            return {step: step for step in {*self.costs, *self.val}}
        if not all(cost[axis] is not None for cost in self.costs.values()):
            raise BadLog(f"{self.path}: its steps do not tell their {axis}; try --x steps")
        where, total, before = {}, 0, None
        waiting = sorted(self.val, reverse=True)
        for step in sorted(self.costs):
            gap = step - (step - 1 if before is None else before)
            each = self.costs[step][axis] / (gap if axis == "joules" else 1)
            while waiting and waiting[-1] < step:
                early = waiting.pop()
                where[early] = total + each * max(0, early - (step - gap))
            total += each * gap
            where[step], before = total, step
        return {**dict.fromkeys(waiting, total), **where}

    def spent(self, axis):
        """By all steps, those between logged ones too; None where the log does not tell."""
        try:
            return max(self.positions(axis).values(), default=None)
        except BadLog:
            return None

    def points(self, losses, axis):
        """Positions and losses, in the order of steps."""
        where, steps = self.positions(axis), sorted(losses)
        return [where[step] for step in steps], [losses[step] for step in steps]


def load(path, label):
    return Run(path, label).read()


def names(paths):
    """The names of the logs, or of their folders where these tell more."""
    stems = [path.stem for path in paths]
    return [
        plain(
            path.resolve().parent.name
            if stems.count(path.stem) > 1 or path.stem == "log"
            else path.stem
        )
        for path in paths
    ]


def differing(runs):
    """The flags that differ between the runs."""
    flags = [run.flags() for run in runs]
    every = dict.fromkeys(name for one in flags for name in one)
    return [name for name in every if len({one.get(name) for one in flags}) > 1]


def load_all(paths):
    """The runs, labelled by the flags that differ between them, if these tell them apart; else by
    names."""
    runs = [load(path, name) for path, name in zip(paths, names(paths))]
    differ = differing(runs)
    labels = [
        plain(", ".join(f"{name} {run.flags().get(name) or 'none'}" for name in differ))
        for run in runs
    ]
    if differ and max(map(len, labels)) <= LEGEND and len(set(labels)) == len(runs):
        for run, label in zip(runs, labels):
            run.label = label
    return runs


def title(runs):
    """What the runs have in common."""
    flags = [run.flags() for run in runs]
    common = {
        name: value
        for name, value in flags[0].items()
        if all(one.get(name) == value for one in flags)
    }
    parts = [runs[0].label if len(runs) == 1 else "Loss"]
    if "model" in common:
        parts.append(Path(common["model"]).name)
        if is_number(runs[0].start.get("parameters")):
            parts.append(size_text(runs[0].start["parameters"]))
    parts += [f"{name} {common[name]}" for name in ("seq-len", "lr") if name in common]
    return plain(", ".join(parts))


def smoothed(values, count):
    """The mean of `count` values around each one, so that the curve does not lag: of fewer at the
    begin, where losses fall fast, and of those before it at the end."""
    sums, last = [0, *itertools.accumulate(values)], len(values)
    ends = [(i - min(count // 2, i), min(i + min(count // 2, i) + 1, last)) for i in range(last)]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in ends]
