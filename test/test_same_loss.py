#!/usr/bin/env python3
"""test_same_loss.py: does scripts/same_loss.py see what it should, and nothing else?

    python3 test/test_same_loss.py      TEST_ALL=1: each fault in all layouts; TRAIN_GPT=FILE:
                                        another binary than ./train_gpt

    Layouts   of one rank's training none is named; a program with faults (harness.py) is, by the
              layout that the fault is in
    Flags     what is refused, with one line
    Readers   logs of each form, made anew as the programs write them
    Logs      what is said of two logs
    Hostile   logs that are cut off, damaged or nonsense: one line, exit status 2

Standard library only; the script needs numpy.
"""

import contextlib
import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import unittest.mock
import warnings

import harness
from harness import ALL, EXIT_DONE, EXIT_INPUT, PLANTED, Job, at_once, output_of, shard
from planted_faults import SAME_LOSS, numbered
from test_output import crc32c

sys.path.insert(0, os.path.join(harness.ROOT, "scripts"))
import same_loss as script  # noqa: E402

SCRIPT = os.path.join(harness.ROOT, "scripts/same_loss.py")
DIFFERENT = 1
FLAGS = {
    "model": "layers=3,heads=2,channels=16,vocab=256",
    "seq-len": 8,
    "batch-tokens": 64,
    "micro-batch": 2,
    "lr": 1e-3,
    "threads": 1,
    "val-every": 0,
}



def same_loss(*words, environment=(), **options):
    done = output_of(
        harness.PYTHON,
        SCRIPT,
        *words,
        text=True,
        env=dict(harness.ENVIRONMENT, **dict(environment)),
        cwd=harness.TEMPORARY,
        **options,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@harness.need("numpy")
class Layouts(harness.TestCase):
    @classmethod
    def setUpClass(cls):
        draw = random.Random(1)
        cls.tokens = shard([draw.randrange(64) for _ in range(3000)])

    def run_of(self, *options, environment=(), limit=harness.TIMEOUT, **changes):
        flags = {**FLAGS, "train": self.tokens, **changes}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        options = ("--ranks", "2", *options)
        return same_loss(*options, "--", *words, environment=environment, timeout=limit)

    def names(self, done):
        """What the last line names."""
        found = re.search(r"(?m)^not the same: (.*)$", done.stdout)
        return found[1].split("; ") if found else []

    def check_fault(self, program, fault, faults):
        """The layout with the fault (number, what, layout) is named; without one none is."""
        number, what, layout = fault or (0, "no fault", None)
        tried = [fault] if fault else faults
        only = [] if ALL else [word for one in tried for word in ("--only", one[2])]
        done = self.run_of(
            *("--program", program, *only), environment={"FAULT": str(number)}, limit=600
        )
        names = self.names(done)
        self.assertEqual(done.returncode, DIFFERENT if number else EXIT_DONE, done)
        self.assertEqual(bool(names), bool(number), what)
        self.assertTrue(not number or any(layout in name for name in names), (what, names))
        return what, names

    def test_faults(self):
        """Each is named, and by the same program without it nothing is."""
        faults = [(number, *where) for number, where, _, _ in numbered(SAME_LOSS)]
        faults = harness.sample(faults, 1)

        def check(fault):
            what, names = self.check_fault(PLANTED, fault, faults)
            if what == "a stale version of parameters":  # only hpZ keeps a copy
                self.assertTrue(all("hpZ" in name or "ZeRO++" in name for name in names), names)

        at_once(check, [None, *faults])

    def test_kinds(self):
        """Twenty layouts and more, of every kind, with the tolerance of those that round apart."""
        only = ("ZeRO 0", "ZeRO 1", "ZeRO 2, m", "ZeRO 3, hpZ", "gpipe", "dapple", "zero-bubble")
        only += ("recomputation", "offload all", "to disk", "qwZ, hpZ", "qgZ of 8", "each stage")
        only += ("cyclic v2, micro", "a rank more")
        done = self.run_of(*() if ALL else (word for text in only for word in ("--only", text)))
        self.assertEqual(done.returncode, EXIT_DONE, done)
        compared = int(re.search(r"(?m)^(\d+) layouts, \1 the same", done.stdout)[1])
        self.assertGreaterEqual(compared, 20)
        for kind in (
            *("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "qwZ, hpZ", "qgZ", "gpipe", "dapple"),
            *("zero-bubble", "recomputation", "offload all", "offload to disk", "cyclic v1"),
            *("cyclic v2", "micro-batches of 1", "a rank more"),
        ):
            self.assertIn(kind, done.stdout)
        self.assertNotIn("refused", done.stdout)
        exact, rounded = done.stdout.split("messages of 8 bits or more: noise floor")
        self.assertNotIn("qgZ", exact)
        self.assertNotIn("\n  ZeRO 3,", rounded)

    def test_other_flags(self):
        """Muon, blocks that share, a private run, a layout that is given; refusals are told."""
        cases = [
            (dict(optimizer="muon", pipeline=2), ["as given", "ZeRO 1"], r"0 *norm|\n"),
            (dict(share="all"), ["ZeRO 3, hpZ"], "since blocks share"),
            (
                {"dp-noise": 0, "dp-show-private": 1, "dp-key": "ab" * 32},
                ["zero-bubble", "ZeRO 2, m"],
                "refused: --pipeline-schedule with --dp-noise",
            ),
            (dict(dtype="bf16", model="arch=nano," + FLAGS["model"]), ["gpipe"], "embed_tokens|"),
            (dict(cyclic="v1"), ["each stage", "cyclic v1, mi"], "cyclic v1, a rank for each st"),
        ]

        def check(case):
            flags, names, expected = case
            done = self.run_of(*(w for name in names for w in ("--only", name)), **flags)
            self.assertEqual(done.returncode, EXIT_DONE, done)
            self.assertRegex(done.stdout, expected)
            for name in names:
                self.assertIn(name, done.stdout)

        at_once(check, harness.sample(cases, 1))


class Flags(harness.InFolder):
    def refused(self, words, message):
        done = same_loss(*words)
        self.assertEqual((done.returncode, done.stdout), (EXIT_INPUT, ""), done)
        self.assertRegex(done.stderr, message)
        return done.stderr

    @harness.need("numpy")
    def test_of_the_program(self):
        private = f"--train {harness.TOKENS} --model {harness.MODEL} --seq-len 20"
        for flags, message in (
            ("--model layers=1 --stesp 3", r"unknown flag --stesp"),
            ("--dry-run --model layers=1,heads=1,channels=8,vocab=9", "train"),
            (f"{private} --dp-noise 1", "--dp-show-private"),
            (f"{private} --dp-epsilon 3 --dp-show-private 1", "--dp-key"),
        ):
            said = self.refused(["--ranks", "2", "--", *flags.split()], message)
            self.assertEqual(said.count("\n"), 1, said)

    def test_own(self):
        for words, message in (
            ([], "give two logs or more, or -- and flags"),
            (["one"], "give two logs or more"),
            (["a", "b", "--", "--model", "d12"], "give two logs or more, or"),
            (["--ranks", "0", "--"], "at least 1"),
            (["--program", "nothing", "--"], "there is no program nothing"),
            (["no.log", harness.TOKENS], "no.log: No such file or directory"),
        ):
            self.refused(words, message)


# --------------------------------------------------------------------------------------------------
# Logs

LOSSES = [round(5 - 0.03001 * step + 0.2 * (step * 7 % 5 - 2), 4) for step in range(40)]
VALS = {0: 5.1, 20: 4.5, 40: 4.1}  # after so many updates


def llm_c(losses=LOSSES):
    """As llm.c does: of a step first the validation, then the training."""
    lines = []
    for step in range(len(losses) + 1):
        if step in VALS:
            lines += [f"s:{step} tel:{VALS[step]:.4f}", f"s:{step} eval:0.2500"]
        if step < len(losses):
            lines.append(f"s:{step} trl:{losses[step]:.4f} lr:0.000600 norm:1.25")
    return "\n".join(lines) + "\n"


def nanogpt(losses=LOSSES):
    """As nanoGPT prints."""
    lines = ["tokens per iteration will be: 16,384", "number of parameters: 10.65M"]
    for step in range(len(losses) + 1):
        if step in VALS:
            lines.append(f"step {step}: train loss 4.2000, val loss {VALS[step]:.4f}")
            lines.append("saving checkpoint to out-shakespeare-char")
        if step < len(losses):
            lines.append(f"iter {step}: loss {losses[step]:.4f}, time 22.51ms, mfu 16.91%")
    return "\n".join(lines) + "\n"


def trainer_state(losses=LOSSES, every=1):
    """As the Trainer of Hugging Face saves: a loss is the mean of the steps since the last one."""
    history = []
    for step in range(1, len(losses) + 1):
        if step % every == 0:
            mean = sum(losses[step - every : step]) / every
            more = {"num_input_tokens_seen": 64 * step}
            entry = {"epoch": step / 40, "grad_norm": 1.25, "learning_rate": 6e-4}
            history.append({**entry, "loss": round(mean, 4), "step": step, **more})
        if VALS.get(step):
            history.append({"epoch": step / 40, "eval_loss": VALS[step], "step": step})
    history.append({"epoch": 1.0, "step": len(losses), "train_loss": 4.4, "total_flos": 1.0})
    state = {"epoch": 1.0, "global_step": len(losses), "log_history": history}
    return json.dumps({"best_metric": None, **state, "trial_params": None}, indent=2)


def own_log(losses=LOSSES):
    lines = [{"event": "start", "flags": {"seq-len": 8, "batch-tokens": 64}, "steps": len(losses)}]
    for step in range(len(losses) + 1):
        if step:
            cost = {"ms": 2.0, "tokens_per_s": 32000.0}
            lines.append({"event": "step", "step": step, "loss": losses[step - 1], **cost})
        if step in VALS:
            lines.append({"event": "val", "step": step, "loss": VALS[step]})
    return "".join(json.dumps(line) + "\n" for line in lines)


def table(losses=LOSSES, separator=","):
    rows = [("step", "loss", "val_loss", "tokens"), (0, "", VALS[0], 0)]
    rows += [(n, loss, VALS.get(n, ""), 64 * n) for n, loss in enumerate(losses, 1)]
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


TORCHTITAN = "loss_metrics/global_avg_loss", "validation_metrics/loss"


def varint(number):
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def part(number, content):
    return varint(number * 8 + 2) + varint(len(content)) + content


def record(content):
    def checksum(data):
        rest = crc32c(data)
        return struct.pack("<I", ((rest >> 15 | rest << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(content))
    return length + checksum(length) + content + checksum(content)


def event(step, tag=None, value=None, tensor=False, content=b""):
    """An Event as tensorboard's SummaryWriter encodes it; tensor: as a TensorProto, as TensorFlow
    does."""
    if tag:
        number = struct.pack("<f", value)
        scalar = (part(8, b"\x08\x01\x12\x00" + part(5, number)) if tensor else b"\x15" + number)
        content = part(5, part(1, part(1, tag.encode()) + scalar))
    return record(b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + varint(step) + content)


def event_file(losses=LOSSES, tag=TORCHTITAN[0], val=TORCHTITAN[1], each=1, **how):
    found = event(0, content=part(3, b"brain.Event:2"))
    for step in range(len(losses) + 1):
        if step:
            found += event(step, "grad_norm", 1.5)
            found += event(step * each, tag, losses[step - 1], **how)
        if step in VALS and val:
            found += event(step, val, VALS[step])
    return found


FORMS = {
    "llm.c": ("main.log", llm_c),
    "nanoGPT": ("out.txt", nanogpt),
    "Hugging Face": ("trainer_state.json", trainer_state),
    "train_gpt": ("log.jsonl", own_log),
    "CSV": ("losses.csv", table),
    "TensorBoard": ("events.out.tfevents.1700000000.host.1.0", event_file),
}


class LogCase(harness.InFolder):
    """In this process, which is quicker, and without pictures."""

    def run_here(self, *words):
        out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with (
            unittest.mock.patch.dict(sys.modules, matplotlib=None),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of files that an error leaves to the collector
            code = script.main(list(map(str, words)))
        out.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.getvalue())

    def compare(self, *words, code=EXIT_DONE):
        done = self.run_here(*words)
        self.assertEqual(done.returncode, code, done)
        return done.stdout

    def refuses(self, *words):
        done = self.run_here(*words)
        self.assertEqual(done.returncode, EXIT_INPUT, done)
        self.assertEqual(done.stderr.count("\n"), 1, done)
        return done.stderr


class Readers(LogCase):
    def test_each_against_each(self):
        """All have the losses of the same training: the same steps, and validations."""
        paths = [self.write(f"{n}/{name}", make()) for n, (name, make) in enumerate(FORMS.values())]
        said = self.compare(*paths)
        for form in FORMS:
            self.assertIn(f"({form})", said)
        others = len(FORMS) - 1
        self.assertEqual(said.count("training loss: the same; 40 in common, step 1 to 40"), others)
        self.assertEqual(len(re.findall("validation loss: the same; [23] in common", said)), others)

    def test_tags(self):
        """Of Megatron-LM, DeepSpeed, Lightning, TensorFlow's encoding; any tag that is named."""
        a = self.write("main.log", llm_c())
        name = "events.out.tfevents.1.host"
        for n, content in enumerate(
            (
                event_file(tag="lm loss", val="lm loss validation"),
                event_file(tag="Train/Samples/train_loss", val=None, each=32),
                event_file(tag="train_loss", val="val_loss"),
                event_file(tag="loss", val=None, tensor=True),
            )
        ):
            said = self.compare(a, self.write(f"{n}/{name}", content))
            self.assertIn("training loss: the same; 40 in common", said)
        other = self.write(f"other/deep/{name}", event_file(tag="perplexing", val=None))
        self.assertIn("it has grad_norm, perplexing", self.refuses(a, other))
        said = self.compare(a, self.folder / "other", "--tag", "perplexing")
        self.assertIn("40 in common", said)

    def test_sessions(self):
        """A resumed run's file takes back later steps of the first one's."""
        wrong = LOSSES[:20] + [9.0] * 20
        start = event(21, content=part(7, b"\x08\x01"))
        again = b"".join(event(n, "train/loss", LOSSES[n - 1]) for n in range(21, 41))
        version = event(0, content=part(3, b"brain.Event:2"))
        self.write("tb/events.out.tfevents.1.h", event_file(wrong, tag="train/loss", val=None))
        self.write("tb/events.out.tfevents.2.h", version, start, again)
        said = self.compare(self.write("main.log", llm_c()), self.folder / "tb")
        self.assertIn("training loss: the same; 40 in common", said)

    def test_of_the_program(self):
        """Its log and its event files, as they are."""
        log, board = self.folder / "log", self.folder / "tb"
        Job(ranks=0, steps=4, val_every=2, log=str(log), tensorboard=board).done()
        said = self.compare(log, board)
        self.assertIn("training loss: the same; 4 in common, step 1 to 4", said)
        self.assertIn("validation loss: the same; 3 in common, step 0 to 4", said)

    def test_means(self):
        """The Trainer's losses are means of --logging_steps."""
        a = self.write("log.jsonl", own_log())
        said = self.compare(a, self.write("trainer_state.json", trainer_state(every=5)))
        self.assertIn("training loss: the same; 8 in common, step 5 to 40", said)

    def test_tokens(self):
        """By tokens: of those that tell them, or with the tokens of a step."""
        a, b = self.write("log.jsonl", own_log()), self.write("main.log", llm_c())
        for other in (self.write("a.csv", table()), f"{b}@64"):
            self.assertIn("40 in common, tokens 64 to 2560", self.compare(a, other, "--tokens"))
        self.assertIn("give", self.refuses(a, b, "--tokens"))
        half = self.write("half.log", re.sub("s:.* tel:.*\n", "", llm_c(LOSSES[1::2])))
        said = self.compare(a, f"{half}@128", "--tokens")
        self.assertIn("training loss: the same; 20 in common, tokens 128 to 2560", said)


class Logs(LogCase):
    def test_where_they_part(self):
        """From the first step on that differs by more than the floor; what --floor allows."""
        other = [loss + 0.01 * (n >= 30) + 0.02 * (n == 34) for n, loss in enumerate(LOSSES)]
        a, b = self.write("a.log", llm_c()), self.write("b.log", llm_c(other))
        said = self.compare(a, b, code=DIFFERENT)
        self.assertIn(f"they part at step 31: {LOSSES[30]:g} and {other[30]:g}, 0.27 %", said)
        self.assertIn("farthest apart at step 35", said)
        self.assertRegex(said, r"mean of the last 4: \S+ and \S+, within what other batches")
        self.assertIn("validation loss: the same", said)
        self.compare(a, b, "--floor", "0.01")
        self.compare(a, b, "--floor", "0.005", code=DIFFERENT)

    def test_floor(self):
        """Half of the last decimal of each."""
        a = self.write("a.csv", table([loss + 0.00004 for loss in LOSSES]))
        self.compare(a, self.write("b.log", llm_c()))
        c = self.write("c.csv", table([loss + 0.0003 for loss in LOSSES]))
        self.compare(a, c, code=DIFFERENT)

    def test_shifted(self):
        """Steps that are counted from 0 are seen."""
        a, b = self.write("a.csv", table()), self.write("b.csv", table(LOSSES[1:]))
        said = self.compare(a, b, code=DIFFERENT)
        self.assertIn("b.csv moved by +1 they are the same", said)

    def test_no_number(self):
        """A loss that is none, in one of them."""
        a, text = self.write("a.log", llm_c()), llm_c()
        lost = re.sub(r"(?m)^s:30 trl:\S+", "s:30 trl:nan", text)
        said = self.compare(a, self.write("b.log", lost), code=DIFFERENT)
        self.assertIn("the loss of step 31 is a number in one of them only", said)
        null = own_log().replace(f'"step": 31, "loss": {LOSSES[30]}', '"step": 31, "loss": null')
        said = self.compare(a, self.write("c.jsonl", null), code=DIFFERENT)
        self.assertIn("the loss of step 31 is a number in one of them only", said)

    def test_nothing_in_common(self):
        a = self.write("a.csv", "step,loss\n1,2.0\n")
        b = self.write("b.csv", "step,loss\n2,2.0\n")
        self.assertIn("have no step in common", self.refuses(a, b))

    @harness.need("matplotlib")
    def test_picture(self):
        a, b = self.write("a.log", llm_c()), self.write("b $x$ <b>.log", llm_c())
        self.assertIn("a.same_loss.png", same_loss(a, b).stdout)
        picture = harness.get(self.folder / "a.same_loss.png")
        self.assertEqual(picture[:8], b"\x89PNG\r\n\x1a\n")
        done = same_loss(a, b, "--out", self.folder / "none/a.png")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (harness.EXIT_RESOURCES, 1))


class Hostile(LogCase):
    def test_refused(self):
        """Each with its name, in one line."""
        a = self.write("good.log", llm_c())
        digits = "9" * 5000
        bad = {
            "empty": b"",
            "binary": bytes(range(256)) * 20,
            "prose": "once upon a time, loss was 3\n",
            "nested.json": "[" * 200000,
            "nested2.json": '{"log_history":' * 100000,
            "torn.json": trainer_state()[:500],
            "list.json": '{"log_history": {"a": 1}}',
            "kinds.json": '{"log_history": [1, null, {"step": "x", "loss": []}, {"step": 1e999}]}',
            "none.jsonl": '{"event":"start"}\n{"event":"val","step":1,"loss":"x"}\n',
            "private.jsonl": '{"event":"start","privacy":{"sigma":1}}\n'
            '{"event":"step","step":1,"loss":null}\n',
            "long.csv": f"step,loss\n{digits},1.0\n-1,2\n1.5,2\n",
            "field.csv": "step,loss\n1," + "x" * 200000 + "\n",
            "quote.csv": 'step,loss\n"1\n',
            "numbers.log": f"s:{digits} trl:1.0 lr:1 norm:1\ns:1 trl:1.2.3 lr:1 norm:1\n",
            "huge.jsonl": f'{{"event":"step","step":{digits[:4000]},"loss":1.5}}\n',
            "big.jsonl": f'{{"event":"val","step":1,"loss":{digits[:4000]}}}\n',
        }
        files = [self.write(name, content) for name, content in bad.items()]
        (self.folder / "folder").mkdir()
        os.mkfifo(self.folder / "pipe")
        cases = [*files, self.folder / "folder", self.folder / "pipe", "/dev/zero"]

        def check(path):
            said = self.refuses(a, path)
            self.assertIn(os.path.basename(path), said)
            self.assertLess(len(said), 400)

        for path in cases:
            check(path)

    def test_far_steps(self):
        """A mean of so many steps is none; it is not looked for step by step."""
        state = {"log_history": [{"step": 1, "loss": 2.0}, {"step": 2**53, "loss": 1.0}]}
        a, b = self.write("a.json", json.dumps(state)), self.write("b.log", llm_c())
        done = self.run_here(a, b)
        self.assertIn(done.returncode, (EXIT_DONE, 1), done)

    def test_names(self):
        """Control characters of names do not reach the terminal."""
        a = self.write("a\x1b[31m.log", llm_c())
        said = self.compare(a, a)
        self.assertNotIn("\x1b", said)
        self.assertNotIn("\x1b", self.refuses(a, self.folder / "b\x1b[31m.log"))

    def test_event_files(self):
        """Cut off anywhere they are what came before, or refused; any changed byte is refused, or
        changes nothing of the loss."""
        a, good = self.write("a.log", llm_c()), event_file(LOSSES[:4], val=None)
        draw = random.Random(harness.SEED)
        head = len(event(0, content=part(3, b"brain.Event:2")))
        cases = [good[: draw.randrange(1, len(good))] for _ in range(4)]
        for _ in range(6):
            at = draw.randrange(head, len(good))
            cases.append(good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :])
        cases.append(good[:head] + record(b"\xff" * 40))
        cases.append(good[:head] + record(b"\x2a\xff\xff\xff\xff\x0f"))
        length = struct.pack("<Q", 1 << 62)
        cases.append(good[:head] + length + bytes(100))

        def check(number):
            path = self.write(f"{number}/events.out.tfevents.1.h", cases[number])
            done = self.run_here(a, path)
            self.assertIn(done.returncode, (EXIT_DONE, EXIT_INPUT), done)
            if number >= 4:
                self.assertEqual(done.returncode, EXIT_INPUT, done)
                self.assertEqual(done.stderr.count("\n"), 1, done)

        for number in range(len(cases)):
            check(number)


if __name__ == "__main__":
    harness.main()
