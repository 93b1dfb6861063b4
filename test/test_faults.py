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

import glob
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time

import harness
from harness import (
    ALL, EXIT_DONE, EXIT_INPUT, EXIT_PEER, EXIT_RESOURCES, Faulty, Job, LAST, ROOT, SEED,
    STEPS_THEN, at_once, checkpoint, checkpoints, sample, scratch, small_disk, train,
)
import unittest

CLOCK = os.path.join(ROOT, "build/jumping_clock.so")
PAGE = 4096


class Actions(unittest.TestCase):
    KINDS = (
        "FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "RECOMPUTE", "PREFETCH", "ACQUIRE",
        "RELEASE", "REDUCE", "NORM", "UPDATE",
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
                rf"lost rank {rank} on {socket.gethostname()}: it is stopped, seen for \d.\d s, in "
                rf"[a-z_ ]+( \d+)?, step {STEPS_THEN}",
            )

        self.each("stop", 3, check)

    def test_silent(self):
        def check(job, rank):
            self.assertEqual(job.code, EXIT_PEER, job.err)
            self.assertRegex(
                job.err,
                rf"lost rank {rank} on {socket.gethostname()}: no sign of progress for \d.\d s, in "
                rf"[a-z_ ]+( \d+)?, step {STEPS_THEN}",
            )

        self.each("hang", 2, check, watchdog=3)

    def test_stopped_with_no_watchdog(self):
        """The protection taken away: the others wait; and they go on when the stopped rank does,
        bit by bit."""
        fault = Faulty("stop", 1, "REDUCE", watchdog=0)
        with self.assertRaisesRegex(AssertionError, "still there"):
            fault.ends(6)
        while fault.job.process.poll() is None:  # on a busy machine it may be stopped only now
            fault.job.kill(fault.job.pids(), signal.SIGCONT)
            time.sleep(0.1)
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
        """One rank waits for the other for longer than the watchdog's limit, and hears that it
        computes."""
        slow = Faulty("slow", 1, "FORWARD", watchdog=2)
        self.assertEqual(slow.job.done().steps("loss", "grad_norm"), self.undisturbed)

    def test_told_to_die(self):
        """A rank that gets SIGTERM says where it was."""
        job = Job(2, out=os.path.join(scratch(), "out"), steps=10**9)
        job.wait_until(lambda: job.logged() > 3, "a step")
        os.kill(job.pids()[1], signal.SIGTERM)
        self.assertRegex(
            job.done().err,
            r"note: rank 1: SIGTERM in ([A-Z_]+ of (unit|storage) \d+.*|NORM|between steps).*, "
            r"waiting for .*; stopping after this step\n",
        )

    def test_told_to_stop_amid_products(self):
        """A signal that comes while a library multiplies matrices changes nothing in memory: oneDNN
        keeps other addresses in the register of the stack, so a handler needs a stack of its own.
        One signal in some hundreds would be enough."""
        same = dict(
            model="layers=2,heads=4,channels=256,vocab=256",
            seq_len=64,
            micro_batch=8,
            batch_tokens=2048,
            threads=1,
            seed=3,
        )
        undisturbed = train(**same, steps=3).steps("loss", "grad_norm")
        job = Job(**same, steps=10**9, out=os.path.join(scratch(), "out"))
        job.wait_until(lambda: job.logged() >= 1, "a step")
        (pid,) = job.pids()
        while job.process.poll() is None:
            try:
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                break
            time.sleep(0.0002)
        steps = job.done().steps("loss", "grad_norm")
        self.assertIn(steps, [undisturbed[:n] for n in (2, 3)])


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
        for pages in sample(range(2, size + 3), 3):
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
        at_once(lambda case: self.tear(whole, *case), sample(cases, 6))

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


class Diverged(harness.TestCase):
    """Losses that are not finite any more: no good checkpoint is lost, and the run ends."""

    LAYOUTS = (
        dict(),
        dict(ranks=2, zero=1),
        dict(ranks=3, zero=2),
        dict(ranks=2, zero=3),
        dict(ranks=2, pipeline=2),
        dict(ranks=3, pipeline="3:1,2:2", zero=2),
        dict(cyclic="v1", cyclic_stages=2),
        dict(ranks=2, cyclic="v2", cyclic_stages=2, cyclic_mode="data", grad_clip=0),
        dict(ranks=2, cyclic="v1", cyclic_mode="zero", grad_clip=0),
        dict(zero=2, offload="optimizer"),
        dict(ranks=2, zero=2, offload="optimizer", offload_delay=1),
        dict(ranks=2, zero=3, offload="all"),
    )
    BAD = dict(lr="1e6", weight_decay=100, grad_clip=0)
    MOST = 4  # skipped updates

    def run_until(self, layout, **changes):
        out = os.path.join(scratch(), "out")
        same = dict(layout, out=out, save_every=2, keep=2)
        train(**same, steps=6)
        self.assertEqual(checkpoints(out), [4, 6])
        job = train(**dict(same, resume=1, **{**self.BAD, **changes}), code=EXIT_RESOURCES)
        return same, job

    def diverges(self, layout):
        same, job = self.run_until(layout, steps=1000, save_every=1, max_skipped=self.MOST)
        text = f"{layout}: {job.err}"
        self.assertRegex(
            job.err,
            rf"the run has diverged: {self.MOST} updates in a row were skipped \(--max-skipped\)",
            text,
        )
        self.assertEqual(job.err.count("has diverged"), 1, text)
        # Loss and gradients need not overflow in the same step.
        finite = [e["step"] for e in job.of("step") if e["loss"] is not None]
        updated = [e["step"] for e in job.of("step") if e["grad_norm"] is not None]
        saved = [6, *(e["step"] for e in job.of("checkpoint"))]
        good = max(step for step in saved if step + 1 in finite)
        path = checkpoint(same["out"], good)
        self.assertIn(f"with --resume 1 it goes on from {path}; give it", job.err, text)
        self.assertIn(good, checkpoints(same["out"]), text)
        self.assertEqual(len(job.of("step")), updated[-1] - 6 + self.MOST, text)
        # A loss that is finite came after it, and comes again.
        job = train(**dict(same, resume=1, steps=good + 1, lr=0, save_every=0))
        self.assertIn(f"resumed from {path}", job.out, text)
        self.assertTrue(all(e["loss"] is not None for e in job.of("step")), text)

    def test_ends_with_its_good_checkpoints(self):
        at_once(self.diverges, sample(self.LAYOUTS, 4))

    def test_at_its_end(self):
        """A run that is over before it has skipped enough, and what it would have exported."""
        export = os.path.join(scratch(), "model.bin")
        same, job = self.run_until({}, steps=30, export=export)
        self.assertRegex(job.err, "has diverged: the last (loss is not|updates were skipped)")
        self.assertFalse(os.path.exists(export))
        finite = [e["step"] for e in job.of("step") if e["loss"] is not None]
        self.assertIn(max(s for s in range(finite[-1]) if s % 2 == 0), checkpoints(same["out"]))
        for step in checkpoints(same["out"]):
            self.assertLessEqual(step, finite[-1])

    def test_gradients(self):
        """Finite losses to the end, whose gradients are not, and make no update."""
        cyclic = dict(ranks=2, cyclic="v2", cyclic_stages=2, cyclic_mode="data", grad_clip=0)
        for layout in ({}, cyclic):
            same = dict(layout, model="layers=4,heads=2,channels=16,vocab=101", steps=6)
            job = train(**same, optimizer="sgd", lr=1e4, code=EXIT_RESOURCES)
            last = job.of("step")[-1]
            if last["loss"] is not None:  # as on each machine seen, but another may round otherwise
                self.assertIsNone(last["grad_norm"])
                self.assertIn("has diverged: the last updates were skipped", job.err)

    def test_private(self):
        """Losses decide nothing: weights do."""
        out, export = os.path.join(scratch(), "out"), os.path.join(scratch(), "model.bin")
        same = dict(out=out, save_every=1, keep=1, dp_noise=1, dp_show_private=1, ranks=2)
        same.update(steps=12, optimizer="sgd", export=export)
        job = train(**same, **self.BAD, code=EXIT_RESOURCES)
        self.assertIn("not saved: a weight or a moment is NaN or infinite", job.err)
        self.assertIn("has diverged: a weight is NaN or infinite", job.err)
        self.assertFalse(os.path.exists(export))
        self.assertEqual(len(checkpoints(out)), 1, "the last with finite weights")

    def test_keep_one(self):
        """No step tells whether the last one is good: it is evaluated."""
        layouts = [dict(save_every=2, keep=1, steps=5, **layout) for layout in self.LAYOUTS]
        for case in sample(layouts, 3):
            out = os.path.join(scratch(), "out")
            train(**case, out=out)
            self.assertEqual(checkpoints(out), [5], case)

    def test_the_last_update_breaks_it(self):
        same, job = self.run_until({}, steps=1000, save_every=1, max_skipped=self.MOST)
        finite = [e["step"] for e in job.of("step") if e["loss"] is not None][-1]
        out = os.path.join(scratch(), "out")
        train(**dict(same, out=out), steps=6)
        same.update(out=out, resume=1, steps=finite, save_every=1, keep=1, **self.BAD)
        job = train(**same, code=EXIT_RESOURCES)
        self.assertIn("the last loss is not finite", job.err)
        self.assertEqual(checkpoints(out), [finite - 1])
        self.assertIn(f"so it is now {checkpoint(out, finite)}.diverged", job.err)


class CutOff(harness.TestCase):
    """A shard that is cut off while a run reads it."""

    LAYOUTS = (dict(), dict(ranks=2, zero=3), dict(ranks=2, pipeline=2), dict(dp_noise=1))

    def test_ends_in_one_line(self):
        tokens = harness.golden_tokens() * 40
        # Nothing is left; the cut is in the middle of a page; the last page is not whole any more.
        lengths = (0, PAGE + 100, 1024 + 2 * len(tokens) - 3000)
        for layout, left in zip(sample(self.LAYOUTS, 2), sample(lengths, 3) * 2):
            path, out = harness.shard(tokens), os.path.join(scratch(), "out")
            same = dict(layout, train=path, out=out, save_every=20, shuffle=1, keep=2)
            job = Job(steps=30000, **same)
            job.wait_until(lambda: len(checkpoints(out)) == 2, "checkpoints")
            whole = harness.get(path)
            os.truncate(path, left)
            job.wait()
            self.assertEqual(job.code, EXIT_INPUT, job.err)
            self.assertEqual(job.err.count("cut off or changed"), 1, job.err)
            self.assertNotIn("Signal", job.err)
            saved = checkpoints(out)
            with open(path, "wb") as file:
                file.write(whole)
            # A private step that is lost is repeated with the same flags.
            job = train(**dict(same, resume=1, steps=saved[-1] + 2, save_every=20))
            self.assertEqual(len(job.of("step")), 2)


class Clocks(unittest.TestCase):
    def test_jumps(self):
        if not os.path.exists(CLOCK):
            self.skipTest("build/jumping_clock.so is not built")
        same = dict(steps=20, save_every=7, shuffle=1)
        expected = train(2, **same, out=os.path.join(scratch(), "out")).steps("loss", "grad_norm")
        out, log = os.path.join(scratch(), "out"), os.path.join(scratch(), "log")
        # A leap counts as half a second of silence, and a waiting rank looks at the clock so often
        # that it leaps 10 times in 50 ms: 60 s of silence are more than half a second.
        words = harness.command_line(dict(same, out=out, log=log, watchdog=60))
        job = Job(
            shell=" ".join(
                [
                    "exec", "mpirun", "--oversubscribe", "-np", "2", "-x", f"LD_PRELOAD={CLOCK}",
                    harness.BINARY, *words,
                ]
            ),
            log=log,
        ).done()
        self.assertEqual(job.steps("loss", "grad_norm"), expected)
        self.assertTrue(any(float(e["ms"]) > 3.5e6 for e in job.of("step")), "the clock has leapt")

    def test_busy(self):
        """What is measured at the start seems to take far longer than it does, or the steps do, as
        on a machine that others use: no prediction is shown that the first steps contradict, and no
        share of a peak above the whole."""
        if not os.path.exists(CLOCK):
            self.skipTest("build/jumping_clock.so is not built")
        for when in ("before", "after"):
            log = os.path.join(scratch(), "log")  # it is made when everything is measured
            words = harness.command_line(dict(steps=6, val_every=0, val=None, threads=1, log=log))
            environment = f"LD_PRELOAD={CLOCK} CLOCK_FAST='{when} {log}'"
            command = f"exec env {environment} {harness.BINARY} {' '.join(words)}"
            job = Job(shell=command, log=log, environment=harness.AS_USER)
            out = " ".join(job.done().out.split())
            self.assertRegex(out, r"6 steps of [\d.]+ \w+, measured: about .* seems busy")
            self.assertNotIn("predicted: about", out)
            self.assertIn("step (machine busy) ", out)
            for share in (e["mfu"] for e in job.of("step")):
                self.assertTrue(share is None or 0 < float(share) <= 1, share)
            self.assertEqual("MFU - %" in out, when == "before", out)
            # what is known all the same
            self.assertEqual(bool(re.search(r"MFU - % \S+ TFLOP/s \|", out)), when == "before", out)


class Folder(unittest.TestCase):
    def test_two_runs(self):
        for _ in range(5 if ALL else 1):
            out = os.path.join(scratch(), "out")
            jobs = [Job(2, out=out, steps=300, save_every=100) for _ in "12"]
            codes = sorted(job.wait().code for job in jobs)
            self.assertEqual(codes, [EXIT_DONE, EXIT_INPUT], [job.err for job in jobs])
            refused = next(job for job in jobs if job.code == EXIT_INPUT)
            self.assertIn("another run is using", refused.err)
            self.assertEqual(checkpoints(out), [100, 200, 300])


if __name__ == "__main__":
    harness.main()
