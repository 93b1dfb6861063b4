#!/usr/bin/env python3
"""test_faults.py: what may happen to a run, and that nothing is lost, nothing hangs, and the
message says what it was.

    python3 test/test_faults.py         TEST_ALL=1: every case instead of a sample; TEST_SEED=N: the
                                        random choices, printed

    Actions     a rank is killed, crashes, is stopped or hangs in each kind of action; the run
                resumes bit by bit
    Disks       full at any byte, read-only from the start, gone from some moment on
    Memory      not enough of it
    Torn        the newest checkpoint cut off, or overwritten with zeros, from any 4 KiB boundary
                on: the one before it counts
    Clocks      the wall clock jumps, the monotonic clock leaps: nothing changes
    Folder      of two runs that start in one folder one goes on

What takes the protection away is tested too, where a flag can do it: without the watchdog a stopped
rank is waited for.
"""

import concurrent.futures
import glob
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import test_train
from test_train import (
    ALL,
    AT_ONCE,
    EXIT_DONE,
    EXIT_INPUT,
    EXIT_RESOURCES,
    ROOT,
    SEED,
    Job,
    checkpoint,
    checkpoints,
    scratch,
    train,
)

EXIT_PEER = 4
FAULTY = os.path.join(ROOT, "build/train_gpt_faulty")
CLOCK = os.path.join(ROOT, "build/jumping_clock.so")
PAGE = 4096
# for the end of a run that lost a rank: the limits below, mpirun's own end, and a busy machine
LIMIT_S = 15
SAVED, FAULT_AT, LAST = 2, 4, 6  # steps
# of what others wait for: parameters of the step before are still on their way
STEPS_THEN = f"[{FAULT_AT - 1}{FAULT_AT}]"


def sample(cases, count):
    cases = list(cases)
    return cases if ALL else random.Random(SEED).sample(cases, min(count, len(cases)))


def quotation(before, right, after, text):
    """(begin, end) of `right` at each place of a source that reads before + right + after, however
    its lines are broken."""
    spaced = [
        r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", part)))
        for part in (before, right, after)
    ]
    pattern = r"%s\s*(%s)\s*%s" % tuple(spaced)
    return [found.span(1) for found in re.finditer(pattern, text)]


def at_once(function, cases):
    """Each case in turn, some at a time: they mostly wait. The first that fails speaks."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, cases))


def small_disk(test, kib):
    """A folder on a disk of its own, or the test is skipped."""
    folder = scratch()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], capture_output=True
        ).returncode
    ):
        test.skipTest("cannot mount a small disk")
    test.addCleanup(subprocess.run, ["umount", "-l", folder], check=True)
    return folder


class Faulty:
    """Runs of the program with a fault in it."""

    def __init__(self, how, rank, action, step=FAULT_AT, ranks=3, **changes):
        self.out, self.log = os.path.join(scratch(), "out"), os.path.join(scratch(), "log")
        self.same = dict(
            ranks=ranks,
            out=self.out,
            log=self.log,
            save_every=SAVED,
            steps=LAST,
            shuffle=1,
            recompute="block",
            **changes,
        )
        self.job = Job(
            binary=FAULTY, environment={"FAULT": f"{how} {rank} {step} {action}"}, **self.same
        )

    def ends(self, limit=LIMIT_S):
        """Exit code and messages; mpirun must end by itself, and with it every rank."""
        try:
            self.job.process.wait(timeout=limit + 30 * bool(os.getloadavg()[0] > 4))
        except subprocess.TimeoutExpired:
            if self.job.pids():  # else mpirun hangs by itself (test_train.Job.die)
                raise AssertionError(
                    f"ranks {self.job.pids()} still there: {self.job.command}"
                ) from None
            self.job.end_all()
        return self.job.wait()

    def resumes(self, test, undisturbed):
        test.assertEqual(checkpoints(self.out), [SAVED], "the checkpoint before the fault")
        again = train(**dict(self.same, resume=1))
        steps = {e["step"]: (e["loss"], e["grad_norm"]) for e in again.of("step")}
        test.assertEqual(sorted(steps), list(range(1, LAST + 1)))
        test.assertEqual([steps[s] for s in sorted(steps)], undisturbed)


class Actions(unittest.TestCase):
    KINDS = (
        "FORWARD",
        "BACKWARD_INPUT",
        "BACKWARD_WEIGHT",
        "RECOMPUTE",
        "PREFETCH",
        "ACQUIRE",
        "RELEASE",
        "REDUCE",
        "NORM",
        "UPDATE",
    )

    @classmethod
    def setUpClass(cls):
        cls.undisturbed = train(ranks=3, steps=LAST, shuffle=1, recompute="block").steps(
            "loss", "grad_norm"
        )

    def each(self, how, count, check, **changes):
        def one(kind):
            rank = random.Random(f"{SEED}{how}{kind}").randrange(3)
            fault = Faulty(how, rank, kind, **changes)
            check(fault.ends(), rank)
            fault.resumes(self, self.undisturbed)

        at_once(one, sample(self.KINDS, count))

    def test_every_kind_is_there(self):
        """The list above is what a schedule holds."""
        schedule = train(show_schedule=1, recompute="block", steps=1).out
        self.assertEqual(
            {line.split()[1] for line in schedule.splitlines() if line.startswith("   ")},
            set(self.KINDS),
        )

    def test_killed(self):
        def check(job, rank):
            self.assertNotEqual(job.code, EXIT_DONE)

        self.each("kill", 3, check)
        self.each("crash", 1, check)

    def test_stopped(self):
        def check(job, rank):
            self.assertEqual(job.code, EXIT_PEER, job.err)
            self.assertRegex(
                job.err,
                rf"lost rank {rank} on {socket.gethostname()}: it is stopped, seen for \d.\d s, in [a-z_ ]+( \d+)?, step {STEPS_THEN}",
            )

        self.each("stop", 3, check)

    def test_silent(self):
        def check(job, rank):
            self.assertEqual(job.code, EXIT_PEER, job.err)
            self.assertRegex(
                job.err,
                rf"lost rank {rank} on {socket.gethostname()}: no sign of progress for \d.\d s, in [a-z_ ]+( \d+)?, step {STEPS_THEN}",
            )

        self.each("hang", 2, check, watchdog=3)

    def test_stopped_with_no_watchdog(self):
        """The protection taken away: the others wait; and they go on when the stopped rank does,
        bit by bit."""
        fault = Faulty("stop", 1, "REDUCE", watchdog=0)
        with self.assertRaisesRegex(AssertionError, "still there"):
            fault.ends(6)
        for pid in fault.job.pids():
            os.kill(pid, signal.SIGCONT)
        self.assertEqual(fault.job.done().steps("loss", "grad_norm"), self.undisturbed)

    def test_all_stopped_for_a_while(self):
        """A job that is suspended as a whole is not taken for one that lost a rank."""
        out = os.path.join(scratch(), "out")
        job = Job(2, out=out, steps=10**9, watchdog=1)
        job.wait_until(lambda: job.logged() > 3, "a step")
        ranks = job.pids()
        for signal_number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in ranks:
                os.kill(pid, signal_number)
            time.sleep(3)
        seen = job.logged()
        job.wait_until(lambda: job.logged() > seen + 3, "a step after the pause")
        open(os.path.join(out, "stop"), "w").close()
        job.done()

    def test_slow_is_not_lost(self):
        """One sample on two ranks: the first waits for the other for several times the watchdog's
        limit, and hears that it computes."""
        losses = [
            train(
                ranks=ranks,
                threads=1,
                steps=1,
                model="layers=3,heads=8,channels=512,vocab=101",
                seq_len=4096,
                micro_batch=1,
                batch_tokens=4096,
                watchdog=1,
            ).losses()[0]
            for ranks in (2, 1)
        ]
        self.assertLess(abs(losses[0] - losses[1]), 1e-5 * losses[1])

    def test_told_to_die(self):
        """A rank that gets SIGTERM says where it was."""
        job = Job(2, out=os.path.join(scratch(), "out"), steps=10**9)
        job.wait_until(lambda: job.logged() > 3, "a step")
        os.kill(job.pids()[1], signal.SIGTERM)
        self.assertRegex(
            job.done().err,
            r"note: rank 1: SIGTERM in ([A-Z_]+ of (unit|storage) \d+.*|NORM|between steps).*, waiting for .*; stopping after this step\n",
        )


class Disks(unittest.TestCase):
    def test_full_at_any_byte(self):
        """Disks on which the second checkpoint ends at a state file, at the manifest, or just
        fits."""
        whole = os.path.join(scratch(), "out")
        job = train(2, out=whole, steps=2, save_every=2)
        size = sum(
            -(-os.path.getsize(path) // PAGE) for path in glob.glob(checkpoint(whole, 2) + "/*")
        )
        losses = train(2, steps=4).steps()
        for pages in sample(range(2, size + 3), 6):
            with self.subTest(pages=pages):
                out = os.path.join(small_disk(self, (size + pages + 2) * PAGE // 1024), "out")
                job = train(2, out=out, steps=4, save_every=2, code=None)
                self.assertIn(job.code, (EXIT_DONE, EXIT_RESOURCES))
                self.assertEqual(job.steps(), losses, "training goes on")
                self.assertEqual(checkpoints(out), [2, 4] if job.code == EXIT_DONE else [2])
                self.assertEqual(
                    job.err.count("not saved: No space left"), int(job.code != EXIT_DONE)
                )
                self.assertFalse(glob.glob(os.path.join(out, "*.tmp")), "halves are removed")
                self.assertEqual(
                    train(2, out=out, steps=4, resume=1).steps(),
                    losses[checkpoints(out)[-1] :],
                    "what was saved is whole",
                )

    def test_read_only_from_the_start(self):
        disk = small_disk(self, 4000)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        job = train(2, out=os.path.join(disk, "out"), steps=2, code=EXIT_RESOURCES)
        self.assertIn("Read-only file system", job.err)
        self.assertIn(
            "cannot write", train(2, log=os.path.join(disk, "log"), steps=1, code=EXIT_INPUT).err
        )

    def test_gone_from_some_moment_on(self):
        out = os.path.join(scratch(), "out")
        job = Job(2, out=out, steps=10**9, save_every=5, keep=2)
        job.wait_until(lambda: len(checkpoints(out)) == 2, "checkpoints")
        os.rename(out, out + " moved")
        saved, seen = checkpoints(out + " moved"), job.logged()
        job.wait_until(lambda: job.logged() > seen + 12, "steps without a folder")
        job.process.send_signal(signal.SIGUSR1)
        job.done(EXIT_RESOURCES)
        self.assertIn("not saved: No such file or directory; training goes on", job.err)
        self.assertEqual(checkpoints(out + " moved"), saved, "what was there is there")


class Memory(unittest.TestCase):
    def test_more_than_there_is(self):
        """Found before anything is allocated, and before an earlier run's files are touched."""
        out = os.path.join(scratch(), "out")
        train(out=out, steps=1, save_every=1)
        job = train(2, out=out, steps=1, model="gpt3:175B", tokenizer="", code=EXIT_RESOURCES)
        self.assertRegex(
            job.err, r"2 ranks on this machine need \d+\.\d\d GiB more, \d+\.\d\d GiB are available"
        )
        self.assertEqual(checkpoints(out), [1])


class Torn(unittest.TestCase):
    def test_at_every_page(self):
        """The files of the newest checkpoint, cut at a 4 KiB boundary or zero from there on."""
        whole = os.path.join(scratch(), "out")
        train(2, out=whole, steps=4, save_every=2)
        files = sorted(glob.glob(checkpoint(whole, 4) + "/*"))
        self.assertEqual(len(files), 3)
        cases = [
            (os.path.basename(path), at, zeros)
            for path in files
            for at in range(0, os.path.getsize(path), PAGE)
            for zeros in (False, True)
        ]
        at_once(lambda case: self.tear(whole, *case), sample(cases, 12))

    def tear(self, whole, name, at, zeros):
        out = os.path.join(scratch(), "out")
        shutil.copytree(whole, out)
        path = os.path.join(checkpoint(out, 4), name)
        size = os.path.getsize(path)
        os.truncate(path, at)
        if zeros:
            os.truncate(path, size)
        job = train(2, out=out, steps=4, resume=1, save_every=100)
        case = f"{name} at {at}, {'zeros' if zeros else 'cut'}: {job.err}"
        self.assertIn(f"resumed from {checkpoint(out, 2)}: step 2", job.out, case)
        self.assertIn(f"skips checkpoint {checkpoint(out, 4)}", job.err, case)
        self.assertEqual(len(job.steps()), 2, case)
        shutil.rmtree(out)


class Clocks(unittest.TestCase):
    def test_jumps(self):
        if not os.path.exists(CLOCK):
            self.skipTest("build/jumping_clock.so is not built")
        same = dict(steps=20, save_every=7, shuffle=1)
        expected = train(2, **same, out=os.path.join(scratch(), "out")).steps("loss", "grad_norm")
        out, log = os.path.join(scratch(), "out"), os.path.join(scratch(), "log")
        words = test_train.command_line(dict(same, out=out, log=log, watchdog=5))
        job = Job(
            shell=" ".join(
                [
                    "exec",
                    "mpirun",
                    "--oversubscribe",
                    "-np",
                    "2",
                    "-x",
                    f"LD_PRELOAD={CLOCK}",
                    test_train.BINARY,
                    *words,
                ]
            ),
            log=log,
        ).done()
        self.assertEqual(job.steps("loss", "grad_norm"), expected)
        self.assertTrue(any(float(e["ms"]) > 3.5e6 for e in job.of("step")), "the clock has leapt")


class Folder(unittest.TestCase):
    def test_two_runs(self):
        for _ in range(5 if ALL else 2):
            out = os.path.join(scratch(), "out")
            jobs = [Job(2, out=out, steps=300, save_every=100) for _ in "12"]
            codes = sorted(job.wait().code for job in jobs)
            self.assertEqual(codes, [EXIT_DONE, EXIT_INPUT], [job.err for job in jobs])
            refused = next(job for job in jobs if job.code == EXIT_INPUT)
            self.assertIn("another run is using", refused.err)
            self.assertEqual(checkpoints(out), [100, 200, 300])


if __name__ == "__main__":
    print("seed of sampled tests:", SEED, "(set TEST_SEED to repeat)", flush=True)
    in_memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1 << 30
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else None) as test_train.TEMPORARY:
        unittest.main()
