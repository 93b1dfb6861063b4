#!/usr/bin/env python3
"""test_output.py: what a run shows, and what others make of its log.

    python3 test/test_output.py

    Start         one screen: rows of at most 100 columns, the table on request, no zeros
    LogEvery      which steps are printed and logged; the first step does not count in rates
    Tensorboard   event files of the program, by a reader that checks every checksum
    Curves        scripts/plot.py: names of runs, means, what a step stands for
    Watch         scripts/watch.py, in a pipe and in a terminal

Standard library only.
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import harness
from harness import (
    BINARY, ENVIRONMENT, EXIT_INPUT, EXIT_RESOURCES, Job, command_line, get, scratch, train,
    train_all,
)

SCRIPTS = Path(harness.ROOT) / "scripts"
sys.path.insert(0, str(SCRIPTS))
import plot  # noqa: E402

COLUMNS, LINES, STEP_COLUMNS = 80, 24, 100


def script(name, *words, code=0, **environment):
    """The ended script, which must have ended with this code."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
    )
    if done.returncode != code:
        raise AssertionError(f"{done.returncode} instead of {code}: {done.stdout}{done.stderr}")
    return done


class Start(harness.TestCase):
    def test_one_screen(self):
        """Of an ordinary run on one rank and on two: what comes before the first step."""
        for ranks in (1, 2):
            job = train(ranks=ranks, threads=1, steps=2, val_every=0, val=None)
            before, *steps = re.split(r"(?m)^(?=step +\d+/)", job.out)
            lines = before.splitlines()
            self.assertLessEqual(len(lines), LINES)
            self.assertLessEqual(max(map(len, lines)), COLUMNS)
            self.assertLessEqual(max(map(len, job.out.splitlines())), STEP_COLUMNS)
            for line in lines:
                self.assertRegex(line, r"^(\S+ {2,}| {11})\S.*\S$", "a row, or its rest")
            memory = job.of("start")[0]["predicted"]["memory"]
            shown = re.findall(r"(?m)^memory .*$", before)
            self.assertEqual(len(shown), 1, "one line")
            self.assertIn(f" {memory['device'] / 2**20:.1f} MiB of the device", shown[0])
            self.assertIn(f"{ranks} rank{'s' * (ranks > 1)} on 1 node, 1 thread each", before)
            self.assertEqual(len(re.findall("(?m)^traffic ", before)), ranks - 1)
            # what it says on a busy machine is in test_faults.py
            self.assertRegex(job.out, r"(?m)^time +2 steps of [\d.]+ m?s, \w+: about \d+ s[\n;]")
            self.assertEqual(len(steps), 2)

    def test_width_of_the_terminal(self):
        """Rows fit it, whatever it is; where there is none, or it does not tell, 80 columns."""
        longest = {}
        for width in (0, 60, 80, 132):
            _, text = harness.train_on_terminal(width, steps=1, val_every=0, val=None)
            before = text.decode().replace("\r\n", "\n").split("\r")[0]
            longest[width] = max(map(len, before.splitlines()))
        self.assertLessEqual(longest[60], 60)
        # the rows have measured figures, whose lengths differ from run to run
        self.assertTrue(60 < longest[0] <= 80, longest)
        self.assertTrue(60 < longest[80] <= 80 < longest[132] <= 132, longest)

    def test_help(self):
        """One screen, that says where the rest is."""
        done = subprocess.run([BINARY, "--help"], capture_output=True, text=True, env=ENVIRONMENT)
        lines = done.stdout.splitlines()
        self.assertLess(len(lines), LINES)
        self.assertLessEqual(max(map(len, lines)), COLUMNS)
        self.assertEqual([line for line in lines if line != line.rstrip()], [])
        for word in ("--train, -i", "--out, -o", "--help TOPIC", "privacy", "--help all", "4 a"):
            self.assertIn(word, done.stdout)

    def test_what_is_saved(self):
        """A run of which nothing would be left says so, in one line, before it trains."""
        out = Path(scratch())
        nothing = "saves      nothing: --out FOLDER --save-every N save checkpoints\n"
        stopped = "saves      nothing unless it is stopped: --save-every N saves checkpoints\n"
        cases = [
            (dict(steps=1), nothing),
            (dict(steps=1, out=out / "a"), stopped),
            (dict(steps=1, out=out / "b", save_every=5), None),
            (dict(steps=1, export=out / "c.bin"), None),
            (dict(steps=0), None),
        ]
        for (changes, said), job in zip(cases, train_all([changes for changes, _ in cases])):
            rows = re.findall(r"(?m)^saves .*\n", job.out)
            self.assertEqual(rows, [said] if said else [], changes)
            if said:
                self.assertLess(job.out.index(said), job.out.index("step     1/"))

    def test_learning_rate(self):
        """Its row says how it goes, and what no flag said."""
        cases = {
            "0.001, constant": {},
            "2 steps of warm-up to 0.001, constant": dict(warmup=2, lr_schedule="linear"),
            "1 steps of warm-up to 0.001, constant": dict(
                warmup=1, lr_schedule="constant", final_lr_fraction=0.5
            ),
            "0.001, then by a cosine to 0.0001 at the last step": dict(lr_schedule="cosine"),
            "0.001, in the last 0.2 of the steps by 1 - sqrt to 0 at the last step": dict(
                lr_schedule="wsd", final_lr_fraction=0
            ),
        }
        jobs = train_all([dict(steps=3, lr="1e-3", **changes) for changes in cases.values()])
        for (said, changes), job in zip(cases.items(), jobs):
            self.assertIn(f"\nlr         {said}\n", job.out)
            schedule = changes.get("lr_schedule")
            note = "note: --lr-schedule has no effect: the rate ends at --final-lr-fraction 1"
            self.assertEqual(note in job.out, schedule == "linear", said)
            note = "note: --final-lr-fraction has no effect with --lr-schedule constant\n"
            self.assertEqual(note in job.out, schedule == "constant", said)

    def test_order_of_private_samples(self):
        """They are drawn, so that --shuffle 0 says nothing of them."""
        note = "note: --shuffle 0 has no effect: a private step draws its samples at random\n"
        jobs = train_all([dict(steps=1, dp_noise=1, shuffle=n) for n in (0, 1)])
        self.assertEqual([note in job.out for job in jobs], [True, False])

    def test_command_to_go_on_as_root(self):
        """It has what Open MPI asks of root, unless the environment has it."""
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        bare = {name: value for name, value in ENVIRONMENT.items() if name not in names}
        bare["OMPI_MCA_ess_singleton_isolated"] = "1"
        needs = " ".join(f"{name}=1" for name in names) + " " if os.geteuid() == 0 else ""
        for more, expected in (({}, needs), (dict.fromkeys(names, "1"), "")):
            out = Path(scratch())
            (out / "stop").touch()
            words = [BINARY, *command_line(dict(steps=3, out=out, val_every=0))]
            done = subprocess.run(
                [str(word) for word in words], env={**bare, **more}, capture_output=True, text=True
            )
            self.assertIn(f"To go on: {expected}mpirun -np 1 ", done.stdout, done.stderr)

    def test_table_on_request(self):
        job = Job(2, words=[*command_line({}), "--dry-run"]).done()
        for name in ("parameters", "gradients", "optimizer", "activations", "device", "host"):
            self.assertRegex(job.out, rf"(?m)^  {name} +[\d.]+ MiB$")
        self.assertRegex(job.out, r"(?m)^  reduce_scatter +[\d.]+ MiB inside a node$")

    def test_no_zeros(self):
        """What takes or sends nothing has no row; a run without steps has no times."""
        for job in train_all([dict(ranks=2, steps=1), dict(steps=0)]):
            self.assertNotRegex(job.out, r"(?<![\d.])0\.0+ (MiB|KiB|B|ms|s)\b")
            self.assertEqual("waiting" in job.out, job.ranks > 1)

    def test_long_run(self):
        """How long it will take, and when it ends; the file that stops it is there already."""
        out = Path(scratch())
        (out / "stop").touch()
        job = train(steps=10**10, out=out)
        self.assertRegex(
            job.out, r"(?m)^time +10000000000 steps of .*: about \d+ days.*, ends\s+around"
        )
        self.assertEqual([e["step"] for e in job.of("step")], [1])
        self.assertEqual(job.of("start")[0]["steps"], 10**10)


class LogEvery(harness.TestCase):
    @staticmethod
    def printed(job):
        return [int(step) for step in re.findall(r"(?m)^step +(\d+)/", job.out)]

    def test_steps(self):
        """The first, each third and the last, in the log and printed; validations as before; the
        same losses."""
        every, all_ = train_all(
            [dict(steps=8, log_every=3, val_every=2), dict(steps=8, val_every=2)]
        )
        steps = [e["step"] for e in every.of("step")]
        self.assertEqual(steps, [1, 3, 6, 8])
        self.assertEqual(self.printed(every), steps)
        self.assertEqual([e["step"] for e in every.of("val")], [0, 2, 4, 6, 8])
        self.assertEqual(
            every.steps("step", "loss"),
            [one for one in all_.steps("step", "loss") if one[0] in steps],
        )
        self.assertEqual([e["step"] for e in all_.of("step")], list(range(1, 9)), "the default")

    def test_resumed_and_stopped(self):
        """The first step after a resume, and the step at which a run is stopped."""
        same = dict(out=Path(scratch()), save_every=4, log_every=10)
        train(steps=4, **same)
        (same["out"] / "stop").touch()
        job = train(steps=9, resume=1, **same)
        self.assertEqual([e["step"] for e in job.of("step")], [5])
        self.assertEqual([e["step"] for e in train(steps=9, resume=1, **same).of("step")], [6, 9])

    def test_first_step_is_not_counted(self):
        """The mean time of a step is that of the others; of the only one if there is one."""
        for steps in (1, 2, 4):
            job = train(steps=steps)
            times = [float(ms) for (ms,) in job.steps("ms")]
            mean = sum(times[1:]) / (steps - 1) if steps > 1 else times[0]
            self.assertAlmostEqual(float(job.end()["step_ms"]["measured"]), mean, delta=1e-6 * mean)


# --------------------------------------------------------------------------------------------------
def crc32c(data):
    """By long division of polynomials, bit by bit, lowest first."""
    rest = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            feedback = (rest ^ byte >> bit) & 1
            rest = rest >> 1 ^ feedback * 0x82F63B78
    return rest ^ 0xFFFFFFFF


def check_crc(data, found):
    found = (found - 0xA282EAD8) & 0xFFFFFFFF
    found = (found << 15 | found >> 17) & 0xFFFFFFFF
    if crc32c(data) != found:
        raise AssertionError(f"checksum of {data}")


def fields(data):
    """(number, value) of the fields of a message: varints as int, others as bytes."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(tag & 7) or varint()
            yield tag >> 3, data[at : at + size]
            at += size
    assert at == len(data)


def read_events(path):
    """The events of a file: (step, what), what: a version, "start" or values by name."""
    data, at = get(str(path)), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        check_crc(data[at : at + 8], *struct.unpack_from("<I", data, at + 8))
        body = data[at + 12 : at + 12 + length]
        check_crc(body, *struct.unpack_from("<I", data, at + 12 + length))
        at += 16 + length
        event = dict(fields(body))
        assert abs(struct.unpack("<d", event[1])[0] - time.time()) < 3600
        if 3 in event:
            yield 0, event[3].decode()
        elif 7 in event:
            assert dict(fields(event[7])) == {1: 1}
            yield event.get(2, 0), "start"
        else:
            values = [dict(fields(value)) for _, value in fields(event[5])]
            yield event[2], {v[1].decode(): struct.unpack("<f", v[2])[0] for v in values}


def logged(job):
    """The same of the log of a job."""
    single = lambda x: struct.unpack("<f", struct.pack("<f", float(x)))[0]
    groups = {"step": "train", "val": "val"}
    return [
        (
            e["step"],
            {
                f"{groups[e['event']]}/{key}": single(value)
                for key, value in e.items()
                if key not in ("event", "step") and value is not None
            },
        )
        for e in job.events
        if e["event"] in groups
    ]


class Tensorboard(harness.TestCase):
    def files(self, folder):
        return sorted(Path(folder).rglob("events.out.tfevents.*"))

    def test_known_checksum(self):
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)

    def test_events(self):
        """What the program writes is what its log has."""
        folder = Path(scratch()) / "runs/one"
        job = train(ranks=2, steps=4, val_every=2, tensorboard=folder)
        expected = [(0, "brain.Event:2"), (0, "start"), *logged(job)]
        (file,) = self.files(folder)
        self.assertEqual(list(read_events(file)), expected)

    def test_resumed(self):
        """A file for each start; the second one takes back what the first one has of its steps."""
        folder = Path(scratch())
        same = dict(out=folder / "out", save_every=2, tensorboard=folder, val_every=0)
        first = train(steps=2, **same)
        again = train(steps=4, resume=1, log=first.log_path, **same)
        second = [e for e in logged(again) if e[0] > 2]
        found = sorted((list(read_events(file)) for file in self.files(folder)), key=lambda e: e[1])
        self.assertEqual(found[0], [(0, "brain.Event:2"), (1, "start"), *logged(first)])
        self.assertEqual(found[1], [(0, "brain.Event:2"), (3, "start"), *second])

    def test_places(self):
        """A folder that cannot be made is bad input, and moves no earlier checkpoints; nothing is
        written by what only prints."""
        folder = Path(scratch())
        (folder / "file").touch()
        train(out=folder / "out", steps=1, save_every=1)
        before = sorted(os.listdir(folder / "out"))
        job = train(tensorboard=folder / "file/a", out=folder / "out", code=EXIT_INPUT)
        self.assertEqual(sorted(os.listdir(folder / "out")), before)
        self.assertIn("--tensorboard names a folder that can be written", job.err)
        Job(words=[*command_line(dict(tensorboard=folder / "new")), "--dry-run"]).done()
        self.assertFalse((folder / "new").exists())

    def test_full_disk(self):
        folder = harness.small_disk(self, 4)
        job = train(steps=40, tensorboard=folder, code=EXIT_RESOURCES)
        self.assertEqual(job.err.count("cannot write the log"), 1, "warned once")
        self.assertEqual(len(job.of("step")), 40)


# --------------------------------------------------------------------------------------------------
class Curves(harness.TestCase):
    def runs(self, *starts, steps=((1, 2.0), (2, 1.0)), **more):
        """Runs whose logs have these start events."""
        paths = [Path(scratch()) / f"{'abc'[i]}.jsonl" for i in range(len(starts))]
        for path, start in zip(paths, starts):
            events = [{"event": "start", **start}] if start else []
            events += [{"event": "step", "step": n, "loss": loss, **more} for n, loss in steps]
            path.write_text("".join(json.dumps(e) + "\n" for e in events))
        return plot.load_all(paths)

    def labels(self, *starts):
        return [run.label for run in self.runs(*starts)]

    def test_labels(self):
        """The flags that differ, if they tell the runs apart and fit; else the files' names."""
        run = lambda lr, **more: {"flags": {"lr": lr, "model": "d12", **more}, "ranks": 2}
        self.assertEqual(self.labels(run(0.1, log="a"), run(0.2, log="b")), ["lr 0.1", "lr 0.2"])
        self.assertEqual(
            self.labels(run(0.1, seed=1), run(0.2, seed=1), run(0.2)),
            ["lr 0.1, seed 1", "lr 0.2, seed 1", "lr 0.2, seed none"],
        )
        self.assertEqual(self.labels(run(0.1), dict(run(0.1), ranks=4)), ["ranks 2", "ranks 4"])
        for same in ((run(0.1), run(0.1)), (run(0.1), run(0.1), run(0.2)), ({}, {}, {})):
            self.assertEqual(self.labels(*same), ["a", "b", "c"][: len(same)])
        self.assertEqual(self.labels(run(0.1, prompt="x" * 99), run(0.2)), ["a", "b"])
        self.assertEqual(self.labels(run(0.1)), ["a"])

    def test_titles(self):
        start = lambda lr: {"parameters": 1500000, "flags": {"model": "out/d12", "lr": lr}}
        self.assertEqual(plot.title(self.runs(start(1), start(2))), "Loss, d12, 1.5 M parameters")
        self.assertEqual(plot.title(self.runs(start(1))), "a, d12, 1.5 M parameters, lr 1")
        self.assertEqual(plot.title(self.runs({}, {})), "Loss")

    def test_means(self):
        """Around each point, as many before as after; at the end of those that are there."""
        self.assertEqual(plot.smoothed([8, 4, 0, 4, 8], 3), [8, 4, 8 / 3, 4, 6])
        self.assertEqual(plot.smoothed([1, 2, 3], 1), [1, 2, 3])
        self.assertEqual(plot.smoothed([], 7), [])

    def test_what_a_step_stands_for(self):
        """Of --log-every 4, steps of 10 tokens and 0.1 s; a validation between two of them."""
        steps = ((1, 2.0), (4, 2.0), (8, 2.0))
        (run,) = self.runs({}, steps=steps, ms=100.0, tokens_per_s=100.0)
        run.val = {0: 3.0, 6: 2.0, 8: 2.0}
        for axis, each in (("steps", 1), ("tokens", 10), ("time", 0.1)):
            found = run.positions(axis)
            self.assert_close(
                [found[step] for step in (1, 4, 6, 8)], [each * n for n in (1, 4, 6, 8)], 1e-9, axis
            )
            self.assertEqual(found[0], 0)


# --------------------------------------------------------------------------------------------------
class Watch(harness.TestCase):
    def log(self, *events):
        path = Path(scratch()) / "log.jsonl"
        path.write_text("".join(e if isinstance(e, str) else json.dumps(e) + "\n" for e in events))
        return path

    def step(self, number, loss=2.0, ms=10.0):
        values = dict(grad_norm=0.5, lr=1e-3, tokens_per_s=1000.0, mfu=0.25)
        return {"event": "step", "step": number, "loss": loss, "ms": ms, **values}

    START = {
        "event": "start", "parameters": 1500000, "ranks": 2, "compute": "fp32", "steps": 1000,
        "flags": {"model": "d12"},
    }

    def test_page(self):
        """Rates without the first step; a resume, a line cut off and a loss that is not finite."""
        events = [self.step(n, 4 - n / 50, 9e6 if n == 1 else 10.0) for n in range(1, 101)]
        events[40]["loss"] = None
        val = {"event": "val", "step": 100, "loss": 2.25, "bits_per_byte": 3.5}
        log = self.log(self.START, *events[:50], '{"event":"st\n', self.START, *events[50:], val)
        page = script("watch.py", log, COLUMNS="80", LINES="24").stdout
        self.assertEqual(page, script("watch.py", log, "--once", COLUMNS="80", LINES="24").stdout)
        for line in (
            "model      1.5 M parameters, 2 ranks, fp32, d12",
            "step       at 100 of 1000, 0:09 left, ends around ",
            "speed      1,000 tokens/s, 10.00 ms a step, MFU 25.0 %",
            "loss       2.0000, mean of 49: 2.4800, norm 0.500, lr 1.00e-03",
            "validation 2.2500 at step 100, lowest 2.2500, 3.5000 bits/byte",
            "faults     started again after step 50; 1 loss not finite, the last at step 41; 1",
        ):
            self.assertIn("\n" + line[:80], page)
        self.assertNotIn("\033", page)
        self.assertLessEqual(len(page.splitlines()), 24)
        self.assertLessEqual(max(map(len, page.splitlines())), 80)
        self.assertRegex(page, r"(?m)^    3\.\d+\|")
        self.assertRegex(page, r"(?m)^    2\.0000\|")
        self.assertRegex(page, r"(?m)^\|?.*o$", "the validation")
        curve = re.findall(r"(?m)\|(.*)$", page)
        self.assertTrue(any("\u2800" < sign < "\u2900" for sign in curve[0][:9]), "falls")
        self.assertFalse(
            any("\u2800" < sign < "\u2900" for sign in curve[0].ljust(69)[-9:]), "falls"
        )

    def test_first_step_counts_until_there_is_another(self):
        log = self.log(self.START, self.step(1, ms=500.0))
        self.assertIn("500.0 ms a step", script("watch.py", log).stdout)

    def test_what_is_not_known(self):
        """No figure stands for it: of a step that is faster than the peak, or whose gradients are
        not finite."""
        log = self.log(self.START, dict(self.step(1), mfu=None, tflops=0.25, grad_norm=None))
        page = script("watch.py", log).stdout
        self.assertIn("\nspeed      1,000 tokens/s, 10.00 ms a step, 0.25 TFLOP/s\n", page)
        self.assertIn("\nloss       2.0000, mean of 1: 2.0000, lr 1.00e-03\n", page)

    def test_long_steps(self):
        for ms, text in ((3520, "3.52 s"), (722e3, "12.0 min"), (9e6, "2.5 h"), (3e8, "3.5 d")):
            log = self.log(self.START, self.step(1, ms=float(ms)))
            self.assertIn(f", {text} a step", script("watch.py", log).stdout)

    def test_private(self):
        """Losses are not shown, and that is no fault."""
        start = dict(self.START, privacy={"epsilon": 3.0, "steps": 500})
        val = {"event": "val", "step": 2, "loss": 2.5, "epsilon": 1.25}
        log = self.log(start, self.step(1, None), self.step(2, None), val)
        page = script("watch.py", log).stdout
        self.assertIn("\nepsilon    1.2500 at step 2, 3.0000 at the end\n", page)
        self.assertIn("step       at 2 of 500,", page)
        self.assertIn("\nfaults     none\n", page)

    def test_silent(self):
        log = self.log(self.START, self.step(1))
        os.utime(log, (1, 1))
        self.assertIn("no news for", script("watch.py", log).stdout)
        os.utime(self.log(self.START, self.step(1), {"event": "end"}), (1, 1))
        self.assertIn("no news for", script("watch.py", log).stdout)

    def test_small_and_poor_terminals(self):
        log = self.log(self.START, *(self.step(n, 3 - n / 99) for n in range(1, 99)))
        for columns, lines in ((80, 24), (20, 5), (300, 80), (1, 1)):
            page = script("watch.py", log, COLUMNS=str(columns), LINES=str(lines)).stdout
            self.assertLessEqual(len(page.splitlines()), max(1, lines))
            self.assertLessEqual(max(map(len, page.splitlines()), default=0), columns)
        page = script("watch.py", log, PYTHONIOENCODING="ascii").stdout
        self.assertIn("*", page)
        self.assertTrue(page.isascii())

    def test_no_log(self):
        for path in (
            Path(scratch()) / "none", Path("/dev/null"), self.log("\0\1\n", "[]\n", "{}\n"),
        ):
            done = script("watch.py", path, code=EXIT_INPUT)
            self.assertRegex(done.stderr, r"\Awatch.py: .*\n\Z", "one line")

    def in_terminal(self, log, act):
        """What is shown in a terminal, while act(write) is called after the first page."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "watch.py"), str(log)],
            stdin=slave,
            stdout=slave,
            env=environment,
        )
        os.close(slave)
        text, acted = b"", False
        try:
            while chunk := os.read(master, 65536):
                text += chunk
                if not acted and b"faults" in text:
                    acted = True
                    act(lambda keys: os.write(master, keys))
        except OSError:
            pass  # the end of a terminal
        self.assertEqual(process.wait(), 0)
        os.close(master)
        return text.decode(errors="replace")

    def test_quits_on_q(self):
        log = self.log(self.START, self.step(1), self.step(2))
        text = self.in_terminal(log, lambda write: write(b"q"))
        self.assertIn("\033[?1049h", text)
        last = text.split("\033[?1049l")[1]
        self.assertIn("step       at 2 of 1000", last, "the page stays")
        self.assertNotIn("\033", last)

    def test_follows_to_the_end(self):
        """A line that comes in two parts; a run that begins the file again; the end."""
        log = self.log(self.START, self.step(1), self.step(2), self.step(3))
        whole = json.dumps(self.step(7, 1.5)) + "\n"

        def write(_):
            log.write_text(json.dumps(self.START) + "\n" + whole[:20])
            with open(log, "a") as file:
                file.write(whole[20:] + json.dumps({"event": "end"}) + "\n")

        last = self.in_terminal(log, write).split("\033[?1049l")[1]
        self.assertIn("step       ended at 7 of 1000", last)
        self.assertIn("\nloss       1.5000", last.replace("\r", ""))
        self.assertIn("\nfaults     none", last.replace("\r", ""))


if __name__ == "__main__":
    harness.main()
