#!/usr/bin/env python3
"""test_process.py: the program among other programs: how long its threads spin, and standard output
that is full, closed, or no longer read; files of a limited size.

    python3 test/test_process.py
"""

import contextlib
import glob
import json
import os
import shlex
import subprocess
import sys
import time
import unittest

import harness
from harness import (
    BINARY, EXIT_DONE, EXIT_RESOURCES, apart, at_once, checkpoints, command_line, scratch,
)

# The defaults of a user, without those of the tests for threads.
PLAIN = {k: v for k, v in harness.ENVIRONMENT.items() if k != "OMP_WAIT_POLICY"}
CLUSTER = ["--cluster", "2x2,intra=1,inter=1,tflops=1,memory=1"]
SMALL = ["--model", "layers=2,heads=2,channels=64,vocab=256", "--seq-len", "64"]
PRINTS = (
    ["--help"],
    ["--help", "all"],
    ["--version"],
    ["--compat"],
    ["--dp-account", "q=0.01,sigma=1,steps=100,delta=1e-6", "--json"],
    ["--dry-run", *SMALL],
    ["--dry-run", "--json", *SMALL],
    ["--show-schedule", *SMALL],
    ["--plan", *SMALL, *CLUSTER],
    ["--plan", "--json", *SMALL, *CLUSTER],
    ["--fit", "--dry-run", *SMALL, *CLUSTER],
    ["--fit", "--dry-run", "--json", *SMALL, *CLUSTER],
)


def run(words, environment=(), shell='exec "$0" "$@"', **options):
    """A run of one rank without mpirun, in a shell that may redirect its streams."""
    return subprocess.run(
        ["bash", "-c", shell, BINARY, *map(str, words)],
        **{
            "env": apart(harness.ENVIRONMENT, **dict(environment)),
            "capture_output": True,
            "timeout": harness.TIMEOUT,
            "text": True,
            **options,
        },
    )


def unread():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


class Printing(harness.TestCase):
    """Commands that only print."""

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_full(self):
        def check(words):
            done = run(words, shell='exec "$0" "$@" >/dev/full')
            self.assertEqual(done.returncode, EXIT_RESOURCES, (words, done.stderr))
            said = "cannot write to standard output: No space left on device"
            self.assertEqual(done.stderr.count(said), 1, (words, done.stderr))

        at_once(check, PRINTS)

    def test_closed(self):
        done = run(PRINTS[6], shell='exec "$0" "$@" >&-')
        self.assertEqual(done.returncode, EXIT_RESOURCES, done.stderr)
        self.assertIn("cannot write to standard output", done.stderr)

    def test_reader_leaves(self):
        def check(words):
            with unread() as output:
                done = run(words, capture_output=False, stdout=output, stderr=subprocess.PIPE)
            self.assertEqual((done.returncode, done.stderr), (EXIT_DONE, ""), words)

        at_once(check, PRINTS)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_full_trace(self):
        done = run(["--show-schedule", *SMALL, "--trace", "/dev/full"])
        self.assertEqual(done.returncode, EXIT_RESOURCES, done.stderr)
        self.assertIn("cannot write --trace /dev/full: No space left on device", done.stderr)

    def test_prompts(self):
        with unread() as output:
            done = run(
                [*SMALL, "--prompt", "-"], capture_output=False, stdout=output,
                stderr=subprocess.PIPE, input="A\n" * 10,
            )
        self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
        self.assertRegex(done.stderr, r"texts +1 tokens read", "it stops after the first text")
        self.assertEqual(done.stderr.count("new weights, which nothing has trained"), 1)


class Training(harness.TestCase):
    def check(self, code, said, shell=None, **options):
        """The run goes on to its end, whatever becomes of standard output."""
        log, out = os.path.join(scratch(), "log"), os.path.join(scratch(), "out")
        words = command_line(dict(log=log, out=out, save_every=10, log_every=1))
        done = run(words, **({"shell": shell} if shell else {}), **options)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(checkpoints(out), [10])
        with open(log, encoding="utf-8") as file:
            events = [json.loads(line)["event"] for line in file]
        self.assertEqual((events.count("step"), events[-1]), (10, "end"))
        self.assertEqual(done.stderr.count("training goes on"), 1, done.stderr)
        self.assertIn(f"cannot write to standard output: {said}", done.stderr)

    def test_reader_leaves(self):
        with unread() as output:
            self.check(
                EXIT_DONE, "nobody reads it any more", capture_output=False, stdout=output,
                stderr=subprocess.PIPE,
            )

    def test_closed(self):
        """A file of the run does not take the place of standard output."""
        self.check(EXIT_DONE, "Bad file descriptor", 'exec "$0" "$@" <&- >&-')

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_full(self):
        self.check(EXIT_RESOURCES, "No space left on device", 'exec "$0" "$@" >/dev/full')

    def test_limit_of_file_size(self):
        """It is an error of each file, and the end of none but these."""
        folder = scratch()
        log, out, trace, hf = (os.path.join(folder, name) for name in ("log", "out", "trace", "hf"))
        files = dict(log=log, out=out, save_every=10, trace=trace, profile_steps="1:10", export=hf)
        done = run(command_line(files), shell='ulimit -f 4; exec "$0" "$@"')
        self.assertEqual(done.returncode, EXIT_RESOURCES, done.stderr)
        for what in (
            f"checkpoint {out}/step_00000010 not saved", "cannot write the log",
            f"cannot write --trace {trace}", f"cannot write {hf}",
        ):
            self.assertEqual(done.stderr.count(f"{what}: File too large"), 1, (what, done.stderr))
        self.assertEqual((checkpoints(out), os.listdir(hf)), ([], []))


class Spin(harness.TestCase):
    """Waiting threads spin by the load, unless the user says how: libgomp reads that before main,
    so the program starts itself once more."""

    LINE = "threads    wait by the load of the machine"

    def version(self, environment=(), shell='exec "$0" "$@"'):
        done = run(["--version"], environment, shell, env=dict(PLAIN, **dict(environment)))
        self.assertEqual((done.returncode, done.stderr), (EXIT_DONE, ""))
        self.assertEqual(done.stdout.count("train_gpt "), 1)
        return done.stdout

    def test_default(self):
        self.assertIn(self.LINE, self.version())
        for name in ("", "--help", "a b*?\n'"):  # whatever the program is called by
            shell = f'exec -a {shlex.quote(name)} "$0" "$@"'
            self.assertIn(self.LINE, self.version(shell=shell), name)

    def test_user_decides(self):
        for name, value in (("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")):
            text = self.version({name: value})
            self.assertIn(f"{name}={value}", text)
            self.assertNotIn(self.LINE, text)

    def test_process_stays_the_same(self):
        """Its number, its standard input, a signal that is ignored; and its environment is that of
        which libgomp read."""
        with subprocess.Popen(
            ["bash", "-c", 'trap "" USR2; exec "$0" "$@"', BINARY, *SMALL, "--prompt", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=apart(PLAIN),
        ) as process:
            process.stdin.write(b"A\n")
            process.stdin.flush()
            self.assertNotEqual(process.stdout.readline(), b"")
            environment = harness.get(f"/proc/{process.pid}/environ").split(b"\0")
            self.assertIn(b"GOMP_SPINCOUNT=300000", environment)
            self.assertIn(b"OMP_WAIT_POLICY=active", environment)
            status = harness.get(f"/proc/{process.pid}/status").decode()
            self.assertIn("Name:\t" + os.path.basename(BINARY)[:15] + "\n", status)
            ignored = int(status.split("SigIgn:")[1].split()[0], 16)
            self.assertTrue(ignored >> 11 & 1, "SIGUSR2 stays ignored")
            process.stdin.close()
            self.assertEqual(process.wait(harness.TIMEOUT), EXIT_DONE)

    def test_sleepers(self):
        """While other programs need its cores, the process has sleeping threads that make libgomp
        spin less: from the start on, not when the machine is calm, and again later."""
        cores = sorted(os.sched_getaffinity(0))[:2]
        if len(cores) < 2:
            self.skipTest("one core")
        others = []

        def make_busy():
            loop = f"import os; os.sched_setaffinity(0, {cores})\nwhile True: pass"
            others.extend(subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2))

        def make_calm():
            while others:
                others[-1].kill()
                others.pop().wait()

        def sleepers():
            names = []
            for path in glob.glob(f"/proc/{run.pid}/task/*/comm"):
                with contextlib.suppress(OSError):  # the thread has ended
                    names.append(harness.get(path))
            return names.count(b"spin watcher\n") - 1

        def wait_for(number, seconds=30):
            ends = time.monotonic() + seconds
            while sleepers() != number and time.monotonic() < ends:
                self.assertIsNone(run.poll())
                time.sleep(0.02)
            return sleepers() == number

        train = ["--train", harness.TOKENS, "--steps", 10**6, "--val-every", 0]
        make_busy()
        with subprocess.Popen(
            [BINARY, *map(str, [*SMALL, *train])],
            stdout=subprocess.DEVNULL,
            env=apart(PLAIN),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        ) as run:
            try:
                self.assertTrue(wait_for(1), "at the start")
                time.sleep(1.5)
                self.assertEqual(sleepers(), 1, "as long as the machine is busy")
                make_calm()
                if wait_for(0, 3):  # another program of this machine may keep it busy
                    make_busy()
                    self.assertTrue(wait_for(1), "busy again")
            finally:
                make_calm()
                run.kill()

    def test_under_mpirun(self):
        mpirun = 'unset OMP_WAIT_POLICY; exec mpirun --oversubscribe -np 2 "$0" "$@"'
        self.assertIn(self.LINE, self.version(shell=mpirun))

    def test_by_the_loader(self):
        """/proc/self/exe is then the loader: the run goes on without."""
        found = [p for p in ("/lib64/ld-linux-x86-64.so.2",) if os.path.exists(p)]
        if not found:
            self.skipTest("another loader")
        self.assertIn("operations", self.version(shell=f'exec {found[0]} "$0" "$@"'))

    def test_without_proc(self):
        hide = "mount -t tmpfs none /proc"
        if subprocess.run(["unshare", "-m", "bash", "-c", hide], capture_output=True).returncode:
            self.skipTest("cannot hide /proc")
        text = self.version(shell=f'unshare -m bash -c \'{hide}; exec "$0" "$@"\' "$0" "$@"')
        self.assertNotIn(self.LINE, text)


if __name__ == "__main__":
    harness.main()
