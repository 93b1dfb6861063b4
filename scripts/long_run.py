#!/usr/bin/env python3
"""long_run.py: does a run that is disturbed again and again compute what an undisturbed one
computes, in constant memory?

    scripts/long_run.sh [--minutes M] [--ranks R] [--seed S] [--kinds KIND,KIND...]
                        [--out FOLDER] [--data PREFIX] [--program FILE]

Trains a GPT of 2.7 M parameters on bytes (default: data/text_bytes, of make data) under launch.sh
for about M minutes, default 30, while faults hit it: each kind once in random order, then at
random, one every M/12 minutes or so. Then the same flags undisturbed.

    rank     kill -9 of a rank
    stop     SIGTERM to launch.sh: it saves; started again
    mpirun   kill -9 of mpirun
    power    kill -9 of everything at once; started again
    hang     SIGSTOP of a rank; the program's watchdog ends it
    torn     the same, and the newest checkpoint is damaged meanwhile
    disk     no space for checkpoints until one could not be saved (as root on Linux, where OUT can
             be a small disk in memory)

Compared digit by digit: loss, gradient norm and learning rate of every step event of both logs,
every one of a step that was redone too, the validations, and the exported weights. Resident memory
of each rank is sampled twice a second; within one process it must not grow. The tables printed at
the end are in Markdown.

Exit status: 0 all equal and flat, 1 not, or a fault was not survived, 2 bad input, 3 resources.
"""

import argparse
import contextlib
import errno
import filecmp
import glob
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from regular_files import hold_folder

EXIT_DIFFERENT, EXIT_INPUT, EXIT_RESOURCES = 1, 2, 3
LAUNCH = str(Path(__file__).resolve().parent / "launch.sh")
KINDS = ("rank", "mpirun", "hang", "stop", "power", "torn", "disk")
WATCHDOG = 10  # seconds; far above the longest step and checkpoint
FAULTS = 12  # in --minutes, about
# seconds that a fault costs besides redone steps; only the length of the run is estimated with it
RECOVERY = 6
PATIENCE = 180  # seconds for the run to make a new step after a fault
SAMPLE_EVERY = 0.5  # seconds
CHECKPOINTS_ON_DISK = (
    6  # that the small disk has room for: three kept, one being written, two to spare
)
FLAT = (0.01, 2 << 20)  # growth of a process that passes for noise: a share of its memory, or bytes
COMPARED = {"step": ("loss", "grad_norm", "lr"), "val": ("loss", "bits_per_byte")}
FLAGS = {
    "model": "layers=6,heads=6,channels=192,vocab=256",
    "seq-len": "128",
    "micro-batch": "4",
    "lr": "1e-3",
    "warmup": "20",
    "final-lr-fraction": "0.1",
    "weight-decay": "0.1",
    "val-batches": "2",
}


class Failure(Exception):
    pass


# --------------------------------------------------------------------------------------------------
# Processes and memory


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # the process has ended


def processes(name, out):
    """Processes of the run in this folder whose program has this name."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        words = read(path).split(b"\0")
        if os.path.basename(words[0]) == name.encode() and str(out).encode() in words:
            yield int(path.split("/")[2])


def rank_of(pid):
    found = re.search(rb"\bOMPI_COMM_WORLD_RANK=(\d+)", read(f"/proc/{pid}/environ"))
    return int(found[1]) if found else 0


class MemorySampler(threading.Thread):
    """Resident bytes of the ranks of one folder: (rank, pid) -> values, until it is told to end."""

    def __init__(self, program, out):
        super().__init__(daemon=True)
        self.program, self.out = os.path.basename(program), out
        self.samples, self.over = {}, threading.Event()

    def run(self):
        ranks = {}
        while not self.over.wait(SAMPLE_EVERY):
            for pid in processes(self.program, self.out):
                resident = read(f"/proc/{pid}/statm").split()
                if resident:
                    rank = ranks.setdefault(pid, rank_of(pid))
                    self.samples.setdefault((rank, pid), []).append(
                        int(resident[1]) * os.sysconf("SC_PAGE_SIZE")
                    )

    def rows(self, label):
        """For each rank: how many processes, the longest one's seconds and memory, and the largest
        growth in one."""
        self.over.set()
        self.join()
        for rank in sorted({rank for rank, _ in self.samples}):
            mine = [values for (r, _), values in self.samples.items() if r == rank]
            long = [
                values for values in mine if len(values) >= 20
            ]  # a quarter is then enough for a median
            if long:
                longest = max(long, key=len)
                yield (
                    label,
                    rank,
                    len(mine),
                    len(longest) * SAMPLE_EVERY,
                    statistics.median(longest),
                    max(map(growth, long)),
                )


def growth(values):
    """Bytes from the second quarter to the last: the first one belongs to the start."""
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


# --------------------------------------------------------------------------------------------------
# A run under launch.sh


class Follower:
    """Reads a growing log: new whole events since the last look. A run that begins anew empties its
    log."""

    def __init__(self, path):
        self.path, self.at = path, 0

    def events(self):
        if not self.path.exists():
            return []
        self.at = 0 if self.path.stat().st_size < self.at else self.at
        with open(self.path, "rb") as file:
            file.seek(self.at)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self.at += sum(map(len, lines))
        return [event for event in map(parse, lines) if event]


def parse(line):
    """The event; numbers with a fraction stay text, to be compared digit by digit. None: torn by a
    kill."""
    try:
        return json.loads(line, parse_float=str)
    except ValueError:
        return None


class Training:
    """One folder: --out in it, log.jsonl, output.txt, model.bin."""

    def __init__(self, folder, options, flags, restarts):
        self.folder, self.out, self.log = folder, folder / "checkpoints", folder / "log.jsonl"
        self.output, self.model = folder / "output.txt", folder / "model.bin"
        self.options, self.child = options, None
        flags = dict(flags, out=self.out, log=self.log, export=self.model)
        self.command = [
            LAUNCH,
            "--restarts",
            str(restarts),
            "--ranks",
            str(options.ranks),
            "--continue",
            "--",
            options.program,
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(exist_ok=True)

    def start(self):
        with open(self.output, "ab") as output:
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def pids(self, name):
        return sorted(processes(name, self.out), key=rank_of)

    def ranks(self):
        return self.pids(os.path.basename(self.options.program))

    def end(self):
        """kill -9 of everything, launch.sh first; returns when all are gone."""
        if self.child:
            self.child.kill()
            self.child.wait()
        until = time.monotonic() + 60
        while left := [*self.pids("mpirun"), *self.ranks()]:
            if time.monotonic() > until:
                raise Failure(f"processes that cannot be killed: {left}")
            for pid in left:
                kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def done(self):
        """Runs to the end, undisturbed."""
        self.start()
        if self.child.wait():
            raise Failure(f"launch.sh ended with {self.child.returncode}: {self.last_words()}")
        return self

    def events(self):
        return Follower(self.log).events()

    def last_words(self):
        return f"see {self.output}\n" + "\n".join(
            self.output.read_text(errors="replace").splitlines()[-8:]
        )


def kill(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --------------------------------------------------------------------------------------------------
# Faults


@dataclass
class Fault:
    kind: str
    minute: float
    at_step: int  # the last one logged before
    time: float = field(default_factory=time.monotonic)
    # seconds to the first new step; of disk: to the first checkpoint that could be saved again
    back: float | None = None
    first: int | None = None  # the first new step

    def redone(self):
        return 0 if self.first is None else max(0, self.at_step - self.first + 1)


class Disturbed(Training):
    """A training and what happens to it."""

    def __init__(self, folder, options, flags, draw, interval, disk):
        super().__init__(folder, options, flags, restarts=5)
        self.draw, self.interval, self.disk = draw, interval, disk
        self.faults, self.kinds, self.open, self.could_not_save = [], [], None, False
        self.steps, self.last, self.logged, self.checkpoints = flags["steps"], 0, 0, 0
        self.follower, self.restarts = Follower(self.log), 0

    def next_kind(self):
        if not self.kinds:
            self.kinds = self.draw.sample(self.options.kinds, len(self.options.kinds))
        return self.kinds.pop()

    def run(self):
        """Until the last step is done. Returns the seconds it took."""
        begin = time.monotonic()
        due = begin + self.wait()
        self.start()
        while True:
            time.sleep(0.01)
            closed = self.look()
            if closed:
                due = time.monotonic() + self.wait()
            if self.child.poll() is not None and self.ended():
                return time.monotonic() - begin
            now = time.monotonic()
            if self.open and now - self.open.time > PATIENCE:
                raise Failure(
                    f"no new step {PATIENCE} s after fault {self.open.kind}: {self.last_words()}"
                )
            if (
                not self.open
                and now > due
                and self.logged > 1
                and self.checkpoints > 1
                and self.last < self.steps
            ):
                self.open = Fault(self.next_kind(), (now - begin) / 60, self.last)
                self.faults.append(self.open)
                self.logged = 0
                getattr(self, "do_" + self.open.kind)()
                print(
                    f"{self.open.minute:6.2f} min  step {self.open.at_step}: {self.open.kind}",
                    flush=True,
                )

    def wait(self):
        return self.interval * self.draw.uniform(0.5, 1.5)

    def look(self):
        """Takes in what the log says; true when it closes the open fault."""
        closed = False
        for event in self.follower.events():
            if event["event"] == "start":
                self.restarts, self.logged = self.restarts + 1, -1  # -1: no step of this start yet
            elif event["event"] == "checkpoint":
                self.checkpoints += 1
                closed |= self.close("disk", None)
            elif event["event"] == "step":
                closed |= self.logged == -1 and self.close("", event["step"])
                self.last, self.logged = event["step"], max(self.logged, 0) + 1
        return closed

    def close(self, kind, step):
        fault = self.open
        if not fault or (fault.kind == "disk") != (kind == "disk"):
            return False
        fault.back, fault.first, self.open = time.monotonic() - fault.time, step, None
        return True

    def ended(self):
        """launch.sh is there no more: true at the end of the run; any other end is a failure."""
        self.look()
        if (
            self.child.returncode not in ((0, EXIT_RESOURCES) if self.could_not_save else (0,))
            or self.last < self.steps
        ):
            raise Failure(
                f"launch.sh ended with {self.child.returncode} at step {self.last}:"
                f" {self.last_words()}"
            )
        return True

    def do_rank(self):
        for pid in self.draw.sample(self.ranks(), 1):
            kill(pid, signal.SIGKILL)

    def do_mpirun(self):
        for pid in self.pids("mpirun"):
            kill(pid, signal.SIGKILL)

    def do_hang(self):
        for pid in self.draw.sample(self.ranks(), 1):
            kill(pid, signal.SIGSTOP)

    def do_stop(self):
        self.child.terminate()
        code = self.child.wait()
        if code not in ((0, EXIT_RESOURCES) if self.could_not_save else (0,)):
            raise Failure(f"launch.sh ended with {code} after SIGTERM: {self.last_words()}")
        self.look()
        self.could_not_save, self.open.at_step = False, self.last
        self.start()

    def do_power(self):
        self.end()
        self.look()
        self.open.at_step = self.last
        self.start()

    def do_torn(self):
        self.end()
        self.look()
        self.open.at_step = self.last
        newest = max(self.out.glob("step_*[0-9]"))
        victim = self.draw.choice(sorted(newest.iterdir()))
        size = victim.stat().st_size
        with open(victim, "r+b") as file:
            if self.draw.random() < 0.5:
                file.truncate(self.draw.randrange(size))
            else:
                file.seek(self.draw.randrange(size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
        self.start()

    def do_disk(self):
        """Fills the small disk until the run says that it could not save."""
        warnings = self.warnings()
        ballast = self.out / "ballast"
        until = time.monotonic() + PATIENCE
        while self.warnings() == warnings:
            if time.monotonic() > until or self.child.poll() is not None:
                break  # the last save may have been before
            fill(ballast)
            time.sleep(0.05)
        self.could_not_save = True
        ballast.unlink(missing_ok=True)
        self.look()
        if self.last >= self.steps:
            self.open = None

    def warnings(self):
        return read(self.output).count(b"not saved: No space left")


def fill(path):
    """Appends to a file until the disk is full."""
    try:
        with open(path, "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextlib.contextmanager
def small_disk(folder, size, wanted):
    """A disk in memory of this size in the folder, where it is wanted."""
    if wanted:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "long_run", str(folder)], check=True
        )
    try:
        yield
    finally:
        if wanted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


# --------------------------------------------------------------------------------------------------
# The experiment


def known_flags(options):
    result = subprocess.run(
        [LAUNCH, "--ranks", "1", "--", options.program, "--help"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if result.returncode:
        raise Failure(f"{options.program} --help does not work: {result.stderr}")
    return result.stdout


def can_mount(folder):
    """Whether a disk in memory can be made here."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with small_disk(folder, 1 << 20, True):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def possible_kinds(options, help_text):
    reasons = {
        "hang": (
            "--watchdog is not among the program's flags" if "--watchdog" not in help_text else ""
        ),
        "disk": (
            "no small disk can be mounted here"
            if "disk" in options.kinds and not can_mount(options.out / "probe")
            else ""
        ),
    }
    for kind in options.kinds:
        if reasons.get(kind):
            print(f"without {kind}: {reasons[kind]}", flush=True)
    return [kind for kind in options.kinds if not reasons.get(kind)]


def calibrate(options, flags):
    """Seconds of a step and bytes of a checkpoint."""
    short = Training(
        options.out / "calibration",
        options,
        dict(flags, steps=40, **{"val-every": 0, "save-every": 40}),
        restarts=0,
    ).done()
    seconds = (
        statistics.median(
            float(e["ms"]) for e in short.events() if e["event"] == "step" and e["step"] > 10
        )
        / 1000
    )
    size = sum(path.stat().st_size for path in short.out.glob("step_00000040/*"))
    return seconds, size


def differences(disturbed, whole):
    """How many step and validation events were compared, and those of the disturbed run that
    differ, or are missing."""

    def facts(event):
        return tuple(event.get(key) for key in COMPARED[event["event"]])

    expected = {(e["event"], e["step"]): facts(e) for e in whole if e["event"] in COMPARED}
    found = [((e["event"], e["step"]), facts(e)) for e in disturbed if e["event"] in COMPARED]
    wrong = [key for key, value in found if expected.get(key) != value]
    return len(found), wrong + [key for key in expected if key not in dict(found)]


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print(
            "| "
            + " | ".join(
                f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
                for value in row
            )
            + " |"
        )
    print(flush=True)


def report(options, disturbed, seconds, undisturbed, memory):
    count, wrong = differences(disturbed.events(), undisturbed.events())
    same_weights = filecmp.cmp(disturbed.model, undisturbed.model, shallow=False)
    grown = [row for row in memory if row[5] > max(FLAT[0] * row[4], FLAT[1])]
    print()
    table(
        (
            "fault",
            "at minute",
            "step",
            "steps redone",
            "seconds to the first new step (disk: checkpoint)",
        ),
        [(f.kind, f.minute, f.at_step, f.redone(), f.back) for f in disturbed.faults],
    )
    table(
        ("run", "rank", "processes", "longest, s", "resident, MiB", "largest growth in one, MiB"),
        [(*row[:4], row[4] / 2**20, row[5] / 2**20) for row in memory],
    )
    backs = sorted(
        f.back for f in disturbed.faults if f.back is not None and f.kind not in ("disk", "hang")
    )
    table(
        ("what", "measured"),
        [
            (
                "disturbed run",
                (
                    f"{disturbed.steps} steps on {options.ranks} ranks in {seconds / 60:.1f} min,"
                    f" seed {options.seed}"
                ),
            ),
            (
                "faults",
                f"{len(disturbed.faults)}: "
                + ", ".join(
                    f"{kind} {n}"
                    for kind in KINDS
                    if (n := sum(f.kind == kind for f in disturbed.faults))
                ),
            ),
            ("starts of the program", disturbed.restarts),
            ("steps redone", sum(f.redone() for f in disturbed.faults)),
            (
                "seconds from a fault to the first new step (without hang, disk)",
                (
                    f"median {statistics.median(backs):.1f}, longest {backs[-1]:.1f}"
                    if backs
                    else "none"
                ),
            ),
            (
                "step and validation events, compared digit by digit",
                f"{count}, {len(wrong)} differ or are missing"
                + "".join(f", {k} {s}" for k, s in wrong[:5]),
            ),
            ("exported weights", "equal, byte for byte" if same_weights else "DIFFERENT"),
            (
                "memory",
                (
                    f"GROWS in {len(grown)} rows"
                    if grown
                    else "flat" if memory else "not measured: no process lived for 10 s"
                ),
            ),
        ],
    )
    return EXIT_DIFFERENT if wrong or not same_weights or grown else 0


def experiment(options):
    help_text = known_flags(options)
    options.kinds = possible_kinds(options, help_text)
    flags = dict(
        FLAGS,
        train=f"{options.data}_train_*.bin",
        val=f"{options.data}_val_*.bin",
        **{"batch-tokens": 128 * max(8, options.ranks), "seed": options.seed},
    )
    if "--watchdog" in help_text:
        flags["watchdog"] = WATCHDOG
    step, checkpoint = calibrate(options, flags)
    interval = options.minutes * 60 / FAULTS
    every = max(
        2, round(interval / 5 / step)
    )  # steps between checkpoints: a fault costs a tenth of the interval
    share = interval / (1.1 * interval + RECOVERY) if options.kinds else 1
    steps = max(20, round(options.minutes * 60 * share / step))
    flags.update({"steps": steps, "save-every": every, "keep": 3, "val-every": 2 * every})
    print(
        f"{steps} steps of {1000 * step:.0f} ms, a checkpoint of {checkpoint / 2**20:.1f} MiB every"
        f" {every} steps, a fault every {interval:.0f} s; seed {options.seed}",
        flush=True,
    )
    disturbed = Disturbed(
        options.out / "disturbed",
        options,
        flags,
        random.Random(options.seed),
        interval,
        "disk" in options.kinds,
    )
    undisturbed = Training(options.out / "undisturbed", options, flags, restarts=0)
    memory = []
    with small_disk(disturbed.out, CHECKPOINTS_ON_DISK * checkpoint, disturbed.disk):
        try:
            sampler = MemorySampler(options.program, disturbed.out)
            sampler.start()
            seconds = disturbed.run()
            memory += sampler.rows("disturbed")
        finally:
            disturbed.end()
    print("the same flags, undisturbed", flush=True)
    try:
        sampler = MemorySampler(options.program, undisturbed.out)
        sampler.start()
        undisturbed.done()
        memory += sampler.rows("undisturbed")
    finally:
        undisturbed.end()
    return report(options, disturbed, seconds, undisturbed, memory)


def arguments():
    def kinds(text):
        chosen = text.split(",") if text else []
        if not set(chosen) <= set(KINDS):
            raise argparse.ArgumentTypeError(f"some of {','.join(KINDS)}, found {text}")
        return chosen

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="long_run.sh [option ...]",
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=max(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument(
        "--kinds", type=kinds, default=list(KINDS), help="of faults (default all); empty: none"
    )
    parser.add_argument("--out", type=Path, default=Path("out/long_run"))
    parser.add_argument("--data", default="data/text_bytes", metavar="PREFIX")
    parser.add_argument("--program", default="./train_gpt")
    options = parser.parse_args()
    if options.minutes <= 0 or options.ranks < 1:
        parser.error("--minutes and --ranks must be above 0")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty: choose another --out, or remove it")
    if not glob.glob(f"{options.data}_train_*.bin"):
        parser.error(
            f"no shards {options.data}_train_*.bin: run make data, or name others with --data"
        )
    options.out = options.out.resolve()
    return options


def main():
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # through the finally clauses, as Ctrl-C
    options = arguments()
    try:
        held = hold_folder(options.out)
        if not held:
            raise OSError(f"another long run works in {options.out}: choose another --out")
        return experiment(options)
    except Failure as failure:
        print(f"long_run: {failure}", file=sys.stderr)
        return EXIT_DIFFERENT
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"long_run: {error}", file=sys.stderr)
        return EXIT_RESOURCES


if __name__ == "__main__":
    sys.exit(main())
