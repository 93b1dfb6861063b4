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

from experiment import MIB, SCRIPTS, markdown, processes, words
from regular_files import hold_folder

EXIT_DIFFERENT, EXIT_INPUT, EXIT_RESOURCES = 1, 2, 3
LAUNCH = SCRIPTS / "launch.sh"
KINDS = ("rank", "mpirun", "hang", "stop", "power", "torn", "disk")
WATCHDOG = 10  # seconds; far above the longest step and checkpoint
FAULTS = 12  # in --minutes, about
# seconds that a fault costs besides redone steps; only the length of the run is estimated with it
RECOVERY = 6
PATIENCE = 180  # seconds for the run to make a new step after a fault
SAMPLE_EVERY = 0.5  # seconds
# that the small disk has room for: three kept, one being written, two to spare
CHECKPOINTS_ON_DISK = 6
FLAT = (0.01, 2 * MIB)  # growth of a process that passes for noise: a share of its memory, or bytes
COMPARED = {"step": ("loss", "grad_norm", "lr"), "val": ("loss", "bits_per_byte")}
FLAGS = (
    "--model layers=6,heads=6,channels=192,vocab=256 --seq-len 128 --micro-batch 4 --lr 1e-3"
    " --warmup 20 --final-lr-fraction 0.1 --weight-decay 0.1 --val-batches 2"
)


class Failure(Exception):
    pass


# --------------------------------------------------------------------------------------------------
# Processes and memory


def read(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""  # the process has ended


def rank_of(pid):
    found = re.search(rb"\bOMPI_COMM_WORLD_RANK=(\d+)", read(f"/proc/{pid}/environ"))
    return int(found[1]) if found else 0


def processes_of(out, program):
    """Those of the run with this --out, by rank."""
    return sorted((pid for pid, line in processes(program) if str(out) in line), key=rank_of)


class MemorySampler(threading.Thread):
    """Resident bytes of the ranks of one folder: (rank, pid) -> values, until it is told to end."""

    def __init__(self, program, out):
        super().__init__(daemon=True)
        self.program, self.out = program, out
        self.samples, self.over = {}, threading.Event()

    def run(self):
        ranks, page = {}, os.sysconf("SC_PAGE_SIZE")
        while not self.over.wait(SAMPLE_EVERY):
            for pid in processes_of(self.out, self.program):
                resident = read(f"/proc/{pid}/statm").split()
                if resident:
                    place = ranks.setdefault(pid, rank_of(pid)), pid
                    self.samples.setdefault(place, []).append(page * int(resident[1]))

    def rows(self, label):
        """For each rank: how many processes, the longest one's seconds and memory, and the largest
        growth in one."""
        self.over.set()
        self.join()
        for rank in sorted({rank for rank, _ in self.samples}):
            mine = [values for (r, _), values in self.samples.items() if r == rank]
            long = [values for values in mine if len(values) >= 20]  # a quarter has a median
            if long:
                longest = max(long, key=len)
                seconds, middle = len(longest) * SAMPLE_EVERY, statistics.median(longest)
                yield label, rank, len(mine), seconds, middle, max(map(growth, long))


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

    def __init__(self, folder, options, flags, restarts=0):
        self.out, self.log = folder / "checkpoints", folder / "log.jsonl"
        self.output, self.model = folder / "output.txt", folder / "model.bin"
        self.program, self.child = options.program, None
        self.command = words(LAUNCH, "--restarts", restarts, "--ranks", options.ranks,
                             "--continue --", (options.program,), FLAGS, flags, "--out", self.out,
                             "--log", self.log, "--export", self.model)
        self.out.mkdir(parents=True, exist_ok=True)

    def start(self):
        with open(self.output, "ab") as output:
            self.child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output,
                                          stderr=output, start_new_session=True)

    def ranks(self):
        return processes_of(self.out, self.program)

    def end(self):
        """kill -9 of everything, launch.sh first; returns when all are gone."""
        if self.child:
            self.child.kill()
            self.child.wait()
        until = time.monotonic() + 60
        while left := [*processes_of(self.out, "mpirun"), *self.ranks()]:
            if time.monotonic() > until:
                raise Failure(f"processes that cannot be killed: {left}")
            kill(signal.SIGKILL, *left)
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
        lines = self.output.read_text(errors="replace").splitlines()[-8:]
        return "\n".join([f"see {self.output}", *lines])


def kill(number, *pids):
    for pid in pids:
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

    def __init__(self, folder, options, flags, steps, interval):
        super().__init__(folder, options, flags, restarts=5)
        self.draw, self.interval, self.steps = random.Random(options.seed), interval, steps
        self.options, self.faults, self.kinds, self.open = options, [], [], None
        self.last, self.logged, self.checkpoints, self.restarts = 0, 0, 0, 0
        self.follower, self.could_not_save = Follower(self.log), False

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
            if self.look():
                due = time.monotonic() + self.wait()
            now = time.monotonic()
            if self.child.poll() is not None:
                self.check_end()
                return now - begin
            if self.open and now - self.open.time > PATIENCE:
                raise Failure(
                    f"no new step {PATIENCE} s after fault {self.open.kind}: {self.last_words()}"
                )
            ready = self.logged > 1 and self.checkpoints > 1 and self.last < self.steps
            if not self.open and now > due and ready and self.options.kinds:
                self.open = Fault(self.next_kind(), (now - begin) / 60, self.last)
                self.faults.append(self.open)
                self.logged = 0
                getattr(self, "do_" + self.open.kind)()
                fault = self.faults[-1]
                print(f"{fault.minute:6.2f} min  step {fault.at_step}: {fault.kind}", flush=True)

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

    def ended_well(self):
        """Of launch.sh, which is there no more."""
        return self.child.returncode in ((0, EXIT_RESOURCES) if self.could_not_save else (0,))

    def check_end(self):
        """Any end before the last step is a failure."""
        self.look()
        if not self.ended_well() or self.last < self.steps:
            raise Failure(
                f"launch.sh ended with {self.child.returncode} at step {self.last}:"
                f" {self.last_words()}"
            )

    def do_rank(self):
        kill(signal.SIGKILL, *self.draw.sample(self.ranks(), 1))

    def do_mpirun(self):
        kill(signal.SIGKILL, *processes_of(self.out, "mpirun"))

    def do_hang(self):
        kill(signal.SIGSTOP, *self.draw.sample(self.ranks(), 1))

    def do_stop(self):
        self.child.terminate()
        self.child.wait()
        if not self.ended_well():
            raise Failure(
                f"launch.sh ended with {self.child.returncode} after SIGTERM: {self.last_words()}"
            )
        self.could_not_save = False
        self.go_on()

    def do_power(self):
        self.end()
        self.go_on()

    def do_torn(self):
        self.end()
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
        self.go_on()

    def go_on(self):
        self.look()
        self.open.at_step = self.last
        self.start()

    def do_disk(self):
        """Fills the small disk until the run says that it could not save."""
        before, ballast = self.warnings(), self.out / "ballast"
        until = time.monotonic() + PATIENCE
        while self.warnings() == before:
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
def small_disk(folder, size, wanted=True):
    """A disk in memory of this size in the folder, where it is wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    if wanted:
        mount = words("mount -t tmpfs -o", f"size={size}", "long_run", folder)
        subprocess.run(mount, check=True)
    try:
        yield
    finally:
        if wanted:
            subprocess.run(["umount", "-l", folder], check=True)


def without_disk(options):
    """The kinds of faults, without disk where no small disk can be mounted here."""
    try:
        with small_disk(options.out / "probe", MIB, "disk" in options.kinds):
            return options.kinds
    except (OSError, subprocess.CalledProcessError):
        print("without disk: no small disk can be mounted here", flush=True)
        return [kind for kind in options.kinds if kind != "disk"]


# --------------------------------------------------------------------------------------------------
# The experiment


def calibrate(options, flags):
    """Seconds of a step and bytes of a checkpoint."""
    short = words(flags, "--steps 40 --val-every 0 --save-every 40")
    run = Training(options.out / "calibration", options, short).done()
    steps = [e for e in run.events() if e["event"] == "step" and e["step"] > 10]
    size = sum(path.stat().st_size for path in run.out.glob("step_00000040/*"))
    return statistics.median(float(step["ms"]) for step in steps) / 1000, size


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
    def text(value):
        return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)

    print(markdown(head, [list(map(text, row)) for row in rows]), flush=True)


def report(options, disturbed, seconds, undisturbed, memory):
    count, wrong = differences(disturbed.events(), undisturbed.events())
    same_weights = filecmp.cmp(disturbed.model, undisturbed.model, shallow=False)
    grown = [row for row in memory if row[5] > max(FLAT[0] * row[4], FLAT[1])]
    kinds = [fault.kind for fault in disturbed.faults]
    backs = sorted(
        f.back for f in disturbed.faults if f.back is not None and f.kind not in ("disk", "hang")
    )
    print()
    head = ["fault", "at minute", "step", "steps redone"]
    table([*head, "seconds to the first new step (disk: checkpoint)"],
          [(f.kind, f.minute, f.at_step, f.redone(), f.back) for f in disturbed.faults])
    table(["run", "rank", "processes", "longest, s", "resident, MiB", "largest growth in one, MiB"],
          [(*row[:4], row[4] / MIB, row[5] / MIB) for row in memory])
    back = f"median {statistics.median(backs):.1f}, longest {backs[-1]:.1f}" if backs else "none"
    flat = "flat" if memory else "not measured: no process lived for 10 s"
    measured = {
        "disturbed run": f"{disturbed.steps} steps on {options.ranks} ranks in"
        f" {seconds / 60:.1f} min, seed {options.seed}",
        "faults": f"{len(kinds)}: "
        + ", ".join(f"{kind} {kinds.count(kind)}" for kind in KINDS if kind in kinds),
        "starts of the program": disturbed.restarts,
        "steps redone": sum(fault.redone() for fault in disturbed.faults),
        "seconds from a fault to the first new step (without hang, disk)": back,
        "step and validation events, compared digit by digit": f"{count}, {len(wrong)} differ or"
        " are missing" + "".join(f", {kind} {step}" for kind, step in wrong[:5]),
        "exported weights": "equal, byte for byte" if same_weights else "DIFFERENT",
        "memory": f"GROWS in {len(grown)} rows" if grown else flat,
    }
    table(["what", "measured"], measured.items())
    return EXIT_DIFFERENT if wrong or not same_weights or grown else 0


def run_whole(options, run, what):
    """What run() gives, and the rows of memory meanwhile."""
    sampler = MemorySampler(options.program, run.out)
    sampler.start()
    try:
        return what(), list(sampler.rows(run.out.parent.name))
    finally:
        run.end()


def experiment(options):
    options.kinds = without_disk(options)
    train, val = (f"{options.data}_{part}_*.bin" for part in ("train", "val"))
    flags = words("--train", (train,), "--val", (val,), "--batch-tokens",
                  128 * max(8, options.ranks), f"--seed {options.seed} --watchdog {WATCHDOG}")
    step, checkpoint = calibrate(options, flags)
    interval = options.minutes * 60 / FAULTS
    # steps between checkpoints: a fault costs a tenth of the interval
    every = max(2, round(interval / 5 / step))
    share = interval / (1.1 * interval + RECOVERY) if options.kinds else 1
    steps = max(20, round(options.minutes * 60 * share / step))
    flags += words(f"--steps {steps} --save-every {every} --keep 3 --val-every {2 * every}")
    print(
        f"{steps} steps of {1000 * step:.0f} ms, a checkpoint of {checkpoint / MIB:.1f} MiB every"
        f" {every} steps, a fault every {interval:.0f} s; seed {options.seed}",
        flush=True,
    )
    disturbed = Disturbed(options.out / "disturbed", options, flags, steps, interval)
    undisturbed = Training(options.out / "undisturbed", options, flags)
    with small_disk(disturbed.out, CHECKPOINTS_ON_DISK * checkpoint, "disk" in options.kinds):
        seconds, memory = run_whole(options, disturbed, disturbed.run)
    print("the same flags, undisturbed", flush=True)
    memory += run_whole(options, undisturbed, undisturbed.done)[1]
    return report(options, disturbed, seconds, undisturbed, memory)


def arguments():
    def kinds(text):
        chosen = text.split(",") if text else []
        if not set(chosen) <= set(KINDS):
            raise argparse.ArgumentTypeError(f"some of {','.join(KINDS)}, found {text}")
        return chosen

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="long_run.sh [option ...]",
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=max(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    of_faults = "of faults (default all); empty: none"
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), help=of_faults)
    parser.add_argument("--out", type=Path, default=Path("out/long_run"))
    parser.add_argument("--data", default="data/text_bytes", metavar="PREFIX")
    parser.add_argument("--program", default="./train_gpt")
    options = parser.parse_args()
    if options.minutes <= 0 or options.ranks < 1:
        parser.error("--minutes and --ranks must be above 0")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty: choose another --out, or remove it")
    if not glob.glob(f"{options.data}_train_*.bin"):
        parser.error(f"no {options.data}_train_*.bin: run make data, or name others with --data")
    options.out = options.out.resolve()
    return options


def main():
    # through the finally clauses, as Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
