#!/usr/bin/env python3
"""test_huggingface.py: folders of Hugging Face, read by --model and written by --export.

    python3 test/test_huggingface.py        TEST_ALL=1: all damaged input, not a sample; TEST_SEED=N
                                            TEST_PRINT=1: also the differences that were measured

    RoundTrip     a model file -> a folder -> the same bytes: fp32 and bf16
    Layout        every element lies where an independent table says; the forms in which others
                  store the same
    Malformed     damaged and foreign input ends with exit status 2 and one message, and leaves
                  nothing behind
    Tokenizers    the tokenizer that --export writes has the ids of the shards; what is kept of the
                  model's folder, and which note says what is missing
    Transformers  logits, losses and tokens of the current transformers equal the program's, both
                  ways; skipped without torch

transformers runs in .venv-peers' Python (.venv-peers/bin/pip install torch transformers).
"""

import array
import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import unittest
from pathlib import Path

import harness
from harness import (
    CHANNELS, EXIT_INPUT, EXIT_RESOURCES, LAYERS, PADDED, PARAMETERS, POSITIONS, SAME, VOCAB,
    header, sample,
)

ROOT, BINARY = Path(harness.ROOT), harness.BINARY
MODEL, TOKENS, GOLDEN = map(Path, (harness.MODEL, harness.TOKENS, harness.GOLDEN))
HEADS = 3  # of the golden model
ENVIRONMENT = dict(harness.ENVIRONMENT, HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")


def python_with(*packages):
    """The first of the project's Pythons that has them, or None."""
    looks = (
        "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in"
        " sys.argv[1:]))"
    )
    for path in (ROOT / ".venv/bin/python", ROOT / ".venv-peers/bin/python", Path(sys.executable)):
        if (
            path.exists()
            and not subprocess.run(
                [path, "-c", looks, *packages], stderr=subprocess.DEVNULL
            ).returncode
        ):
            return str(path)
    return None


PYTHON, PEER = python_with("numpy"), python_with("torch", "transformers")


def run(*command, status=0, **options):
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
        **options,
    )
    if result.returncode != status:
        raise AssertionError(
            f"exit status {result.returncode} instead of {status}:"
            f" {command}\n{result.stdout[-2000:]}{result.stderr[-3000:]}"
        )
    return result


def program(*flags, **how):
    return run(BINARY, *flags, **how)


PLAIN = "--steps", 0, "--val-every", 0, "--seq-len", 8, "--threads", 1


def bf16_model():
    """The golden model, cut to bf16."""
    words = array.array("H", MODEL.read_bytes()[1024:])[1::2]
    return header(20240326, 5, POSITIONS, VOCAB, LAYERS, HEADS, CHANNELS, PADDED) + words.tobytes()


def read_safetensors(path):
    """Returns {name: (dtype, shape, bytes)}; its own reader, so that a mistake of the program
    shows."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 8 == 0
    entries, at = json.loads(data[8 : 8 + length]), 0
    assert entries.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        assert begin == at, "a gap"
        found[name], at = (
            entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end],
        ), end
    assert 8 + length + at == len(data)
    return found


def write_safetensors(path, tensors, **changes):
    """The inverse; changes of the header's entries by name."""
    entries, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {
            "dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)],
        } | changes.get(name, {})
        at += len(data)
    text = json.dumps(entries).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
    )


def transposed(values, rows, columns):
    return [values[r * columns + c] for c in range(columns) for r in range(rows)]


class InFolder(harness.InFolder):
    def export(self, model, *options, name="hf", **how):
        """The model as a folder, or as a file."""
        path = self.folder / name
        self.said = program("--model", model, *PLAIN, *options, "--export", path, **how)
        return path

    def load(self, source, name="back.bin", **how):
        return self.export(source, name=name, **how)

    def read(self, name):
        return (self.folder / name).read_bytes()

    def names(self, name="hf"):
        return sorted(path.name for path in (self.folder / name).iterdir())


# --------------------------------------------------------------------------------------------------
class RoundTrip(InFolder):
    def check(self, model):
        self.assertEqual(self.load(self.export(model)).read_bytes(), model.read_bytes())
        self.assertEqual(self.names(), ["config.json", "model.safetensors"])

    def test_fp32(self):
        self.check(MODEL)

    def test_bf16(self):
        self.check(self.write("half.bin", bf16_model()))

    def test_models_of_the_program(self):
        """Trained, with weight decay: the rows of the padding are still the zeros that an import
        makes."""
        for dtype in ("fp32", "bf16"):
            exported = self.folder / f"{dtype}.bin"
            program(
                "--model", "layers=2,heads=2,channels=32,vocab=101", "--train", TOKENS,
                "--val-every", 0, "--seq-len", 20, "--steps", 3, "--dtype", dtype, "--weight-decay",
                0.1, "--export", exported,
            )
            self.check(exported)

    def test_rotary_positions(self):
        """Where newer folders say how positions turn: rope_parameters counts as the keys beside it
        do."""

        def write(keys):
            """None: without the key."""
            config = json.loads(self.config) | keys
            config = {key: value for key, value in config.items() if value is not None}
            (self.folder / "rotary" / "config.json").write_text(json.dumps(config))

        def loss(**keys):
            write(keys)
            flags = dict(model=self.folder / "rotary", steps=0, val_every=1)
            return harness.train(**flags).of("val")[0]["loss"]

        def refused(**keys):
            write(keys)
            model = self.folder / "rotary"
            return harness.train(model=model, steps=0, code=harness.EXIT_INPUT).err

        keys = "arch=llama,layers=1,heads=2,channels=16,ffn=24,vocab=101,positions=64"
        harness.train(model=keys + ",theta=50", steps=0, export=self.folder / "rotary")
        self.config = (self.folder / "rotary" / "config.json").read_text()
        llama3 = dict(rope_type="llama3", factor=2, original_max_position_embeddings=16)
        llama3 |= dict(low_freq_factor=0.5, high_freq_factor=3)
        both = (loss(rope_theta=50.0), loss(rope_theta=50.0, rope_scaling=llama3))
        self.assertNotEqual(loss(rope_theta=None, rope_parameters=None), both[0], "theta 1e4")
        for scaling, expected in zip(({"rope_type": "default"}, llama3), both):
            newer = dict(scaling, rope_theta=50.0)
            found = loss(rope_theta=None, rope_scaling=None, rope_parameters=newer)
            self.assertEqual(found, expected, newer)
        for key in ("factor", "low_freq_factor", "high_freq_factor"):
            other = dict(llama3, **{key: llama3[key] * 2})
            self.assertNotEqual(loss(rope_theta=50.0, rope_scaling=other), both[1], key)
        self.assertIn("partial_rotary_factor", refused(partial_rotary_factor=0.5))
        path = self.folder / "rotary" / "model.safetensors"
        header, tensors = path.read_bytes(), read_safetensors(path)
        name = "model.layers.0.mlp.down_proj.weight"
        kind, shape, data = tensors[name]
        write_safetensors(path, tensors | {name: (kind, shape[::-1], data)})
        self.assertIn(f"tensor {name} is (24, 16), expected (16, 24)", refused(rope_theta=50.0))
        path.write_bytes(header)
        other = dict(llama3, original_max_position_embeddings=8)
        self.assertNotEqual(loss(rope_theta=50.0, rope_scaling=other), both[1])

    def test_a_model_replaces_itself(self):
        copy = self.write("copy.bin", MODEL.read_bytes())
        self.load(self.export(copy), "copy.bin")
        self.load(self.export(copy), "copy.bin")
        self.assertEqual(copy.read_bytes(), MODEL.read_bytes())

    def test_checkpoints(self):
        same = "--model", MODEL, "--train", TOKENS, "--val-every", 0, "--seq-len", 20
        same += "--out", self.folder / "out", "--save-every", 2
        whole, resumed = self.folder / "whole.bin", self.folder / "resumed.bin"
        program(*same, "--steps", 2, "--export", whole)
        program(*same, "--resume", 1, "--steps", 0, "--export", resumed)
        self.assertEqual(resumed.read_bytes(), whole.read_bytes())

    def test_bf16_beside_fp32(self):
        """A folder is one of bf16 if all of its tensors are; whichever is in fp32, its numbers
        stay."""
        folder = self.export(MODEL)
        whole = read_safetensors(folder / "model.safetensors")
        half = {
            name: ("BF16", shape, array.array("H", array.array("H", data)[1::2]).tobytes())
            for name, (_, shape, data) in whole.items()
        }
        for i, name in enumerate((None, "wte.weight", "h.1.ln_1.weight", "ln_f.bias")):
            kept = {f"transformer.{name}": whole[f"transformer.{name}"]} if name else {}
            write_safetensors(folder / "model.safetensors", half | kept)
            back = self.export(folder, name=f"back{i}")
            found = read_safetensors(back / "model.safetensors")
            expected = "F32" if name else "BF16"
            self.assertEqual({dtype for dtype, _, _ in found.values()}, {expected}, name)
            self.assertEqual({key: found[key] for key in kept}, kept)

# --------------------------------------------------------------------------------------------------
class Layout(InFolder):
    # docs/formats.md beside transformers' modeling_gpt2.py: name there, (rows, columns) in the
    # model file, Conv1D there.
    C = CHANNELS
    BLOCK = [
        ("ln_1.weight", (C,), 0),
        ("ln_1.bias", (C,), 0),
        ("attn.c_attn.weight", (3 * C, C), 1),
        ("attn.c_attn.bias", (3 * C,), 0),
        ("attn.c_proj.weight", (C, C), 1),
        ("attn.c_proj.bias", (C,), 0),
        ("ln_2.weight", (C,), 0),
        ("ln_2.bias", (C,), 0),
        ("mlp.c_fc.weight", (4 * C, C), 1),
        ("mlp.c_fc.bias", (4 * C,), 0),
        ("mlp.c_proj.weight", (C, 4 * C), 1),
        ("mlp.c_proj.bias", (C,), 0),
    ]
    TABLE = [
        ("wte.weight", (VOCAB, C), 0),
        ("padding", (PADDED - VOCAB, C), 0),
        ("wpe.weight", (POSITIONS, C), 0),
        *(
            (f"h.{layer}.{name}", shape, conv)
            for name, shape, conv in BLOCK
            for layer in range(LAYERS)
        ),
        ("ln_f.weight", (C,), 0),
        ("ln_f.bias", (C,), 0),
    ]

    def expected(self, values):
        """{name: (shape, values)} of a model file that holds `values`."""
        found, at = {}, 0
        for name, shape, conv in self.TABLE:
            part = values[at : at + shape[0] * (shape[1] if len(shape) == 2 else 1)]
            found[name] = (
                ([*shape[::-1]], transposed(part, *shape)) if conv else ([*shape], [*part])
            )
            at += len(part)
        self.assertEqual(at, PARAMETERS)
        del found["padding"]
        return found

    def test_every_element(self):
        values = array.array(
            "f", range(PARAMETERS)
        )  # each is exact in fp32, and tells where it was
        folder = self.export(self.write("model.bin", MODEL.read_bytes()[:1024], values.tobytes()))
        expected = {f"transformer.{name}": of for name, of in self.expected(values).items()}
        found = read_safetensors(folder / "model.safetensors")
        self.assertEqual(
            {name: "F32" for name in expected},
            {name: dtype for name, (dtype, _, _) in found.items()},
        )
        for name, (_, shape, data) in found.items():
            self.assertEqual((shape, [*array.array("f", data)]), expected[name], name)
        config = json.loads((folder / "config.json").read_text())
        self.assertEqual(
            [config[key] for key in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")],
            [POSITIONS, VOCAB, LAYERS, HEADS, CHANNELS],
        )

    def test_forms_of_others(self):
        """Names without the prefix, masks, the tied matrix twice, a single file, several files with
        an index, fp16."""
        folder = self.export(MODEL)
        whole = read_safetensors(folder / "model.safetensors")
        bare = {name.removeprefix("transformer."): of for name, of in whole.items()}
        extras = {
            "h.0.attn.bias": ("U8", [1, 1, 24, 24], bytes(576)),
            "h.0.attn.masked_bias": ("F32", [], bytes(4)),
            "lm_head.weight": bare["wte.weight"],
        }
        write_safetensors(folder / "model.safetensors", extras | bare)
        self.assertEqual(self.load(folder).read_bytes(), MODEL.read_bytes())
        os.remove(folder / "model.safetensors")
        names, files = sorted(whole), (
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        )
        for i, file in enumerate(files):
            write_safetensors(folder / file, {name: whole[name] for name in names[i::2]})
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(
                {"metadata": {}, "weight_map": {name: files[i % 2] for i, name in enumerate(names)}}
            )
        )
        self.assertEqual(self.load(folder).read_bytes(), MODEL.read_bytes())

    def test_many_names(self):
        """Of a header of 30 MB, with escapes and a name that comes twice: the last one counts. Each
        name is not compared with each: that takes half a minute of the processor."""
        model = "layers=150,heads=1,channels=2,vocab=101"
        folder = self.export(model, "--steps", "0", "--train", TOKENS, name="deep")
        expected = (folder / "model.safetensors").read_bytes()
        whole, wte = read_safetensors(folder / "model.safetensors"), "transformer.wte.weight"
        others = {
            f"unused.layers.{i}.some.rather.long.name.weight": ("F32", [1], bytes(4))
            for i in range(260000)
        }
        others["twice"] = whole[wte][:2] + (bytes(len(whole[wte][2])),)
        path = folder / "model.safetensors"
        write_safetensors(path, others | whole)
        data = path.read_bytes()
        for old, new in (("twice", wte), ("transformer.wpe", "transformer.wp\\u0065")):
            data = data.replace(old.encode(), new.encode(), 1)
        length = data.index(b"}}", data.index(b"transformer.ln_f.bias")) + 2 - 8
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (12, 12))
        words = "--model", folder, *PLAIN, "--steps", "0", "--train", TOKENS
        words += "--export", self.folder / "again"
        done = harness.output_of(BINARY, *words, env=ENVIRONMENT, preexec_fn=limit)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        self.assertEqual(self.read("again/model.safetensors"), expected)

    def test_fp16_becomes_fp32(self):
        halves = struct.pack("<5e", 1.5, -0.0, 6e-8, 65504, -65504)
        folder = self.export(MODEL)
        fp16 = {
            name: ("F16", shape, (halves * len(data))[: len(data) // 2])
            for name, (_, shape, data) in read_safetensors(folder / "model.safetensors").items()
        }
        write_safetensors(folder / "model.safetensors", fp16)
        found = self.load(folder).read_bytes()
        self.assertEqual(found[:1024], MODEL.read_bytes()[:1024])
        bias = found[-4 * CHANNELS :]  # lnfb
        self.assertEqual(bias[:20], struct.pack("<5f", *struct.unpack("<5e", halves)))


# --------------------------------------------------------------------------------------------------
class Malformed(InFolder):
    def setUp(self):
        super().setUp()
        self.hf = self.export(MODEL)
        self.tensors = self.hf / "model.safetensors"

    def refused(self, message):
        out = self.folder / "result.bin"
        words = BINARY, "--model", self.hf, *PLAIN, "--export", out
        self.assertIn(message, run(*words, status=EXIT_INPUT).stderr)
        self.assertFalse([*self.folder.glob("result*")], "something is left behind")

    def test_bytes(self):
        good = self.tensors.read_bytes()
        cases = [
            (good[:7], "cut off"),
            (good[:-1], "are not in the file"),
            (good[:1000], "cut off"),
            (b"\xff" * 8 + good[8:], "cut off"),
            (struct.pack("<Q", 50) + good[8:], "no JSON"),
            (struct.pack("<Q", 2) + b"[]", "JSON object"),
            (struct.pack("<Q", 2) + b"{}", "wte.weight is missing"),
            (struct.pack("<Q", 100000) + b"[" * 100000, "JSON"),
            (struct.pack("<Q", 3) + b'{"\xff', "JSON"),
        ]
        for data, message in sample(cases, 5):
            with self.subTest(message):
                self.tensors.write_bytes(data)
                self.refused(message)

    def test_entries(self):
        source, name = read_safetensors(self.tensors), "transformer.h.1.mlp.c_fc.weight"
        total = sum(len(data) for _, _, data in source.values())
        wrong_place = [[0, total + 1], [8, 4], [-4, 0], [0.5, 4.5], [0], None, [True, True]]
        entries = [{"data_offsets": place} for place in wrong_place]
        entries += [{"shape": shape} for shape in ([48], [192, 48], [1] * 99, "48")]
        entries += [{"dtype": dtype} for dtype in ("F64", "BF16", None)]
        entries += [{"shape": [0, 1 << 70]}]
        for change in sample(entries, 5):
            with self.subTest(change):
                write_safetensors(self.tensors, source, **{name: change})
                self.refused(name)
        left, wte = {k: v for k, v in source.items() if k != name}, source["transformer.wte.weight"]
        for tensors, message in (
            (left, f"{name} is missing"),
            (source | {"lm_head.weight": (*wte[:2], bytes(len(wte[2])))}, "lm_head.weight differs"),
        ):
            with self.subTest(message):
                write_safetensors(self.tensors, tensors)
                self.refused(message)

    def test_configurations(self):
        """test_huggingface_keys.py has the keys."""
        good = json.loads((self.hf / "config.json").read_text())
        for changes, message in (
            ({"n_inner": 100}, "n_inner"),
            ({"n_layer": 3.5}, "n_layer"),
            ({"n_head": 5}, "heads"),
            ({"vocab_size": 100}, "wte.weight"),
            ({"n_layer": 4}, "h.3."),
            ({"n_layer": 2}, "h.2."),
            ({"n_positions": 25}, "wpe.weight"),
        ):
            with self.subTest(changes):
                (self.hf / "config.json").write_text(json.dumps(good | changes))
                self.refused(message)
        (self.hf / "config.json").write_bytes(b"\0")
        self.refused("config.json")

    def test_indices(self):
        os.rename(self.tensors, self.hf / "part.safetensors")
        self.refused("model.safetensors")
        for weight_map, message in (
            (None, "weight_map"),
            ({"a": 1}, "no name of a file"),
            ({"a": "../part.safetensors"}, "part.safetensors"),
            ({"a": "/etc/passwd"}, "passwd"),
            ({"a": "other.safetensors"}, "other.safetensors"),
            ({}, "wte.weight is missing"),
        ):
            with self.subTest(message):
                (self.hf / "model.safetensors.index.json").write_text(
                    json.dumps({"weight_map": weight_map})
                )
                self.refused(message)


# --------------------------------------------------------------------------------------------------
END = "<|endoftext|>"


def tokenizer_file(tokens, end):
    """llm.c's, of these bytes."""
    texts = b"".join(bytes([len(token)]) + token for token in tokens)
    return header(20240328, 2, len(tokens), end) + texts


BYTES = tokenizer_file([bytes([i]) for i in range(256)], 0)
SMALL = "layers=1,heads=1,channels=2"
# texts on standard input, as JSON -> their ids by the package tokenizers
ENCODE = """
import json, sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
texts = json.load(sys.stdin)
ids = [tokenizer.encode(text).ids for text in texts]
assert all(tokenizer.decode(i, skip_special_tokens=False) == t for i, t in zip(ids, texts))
print(json.dumps(ids))
"""


def tokenizer_json(merges=(), end=END):
    """A tokenizer.json of the letters, of merges and of an end of text, as bytes; and the same
    tokens as a tokenizer file."""
    tokens = [chr(i) for i in range(97, 123)] + [a + b for a, b in merges]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}}
    model["merges"] = [f"{a} {b}" for a, b in merges]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"id": len(tokens), "content": end, "special": True, "single_word": False}
    special |= {"lstrip": False, "rstrip": False, "normalized": False}
    whole = {"version": "1.0", "added_tokens": [special], "pre_tokenizer": level, "model": model}
    file = tokenizer_file([token.encode() for token in [*tokens, end]], len(tokens))
    return json.dumps(whole, indent=8).encode(), file


class Tokenizers(InFolder):
    def json(self, name, folder="hf"):
        return json.loads((self.folder / folder / name).read_text())

    def ids(self, *texts):
        python = python_with("tokenizers")
        if not python:
            self.skipTest("no package tokenizers")
        path = self.folder / "hf" / "tokenizer.json"
        return json.loads(run(python, "-c", ENCODE, path, input=json.dumps(texts)).stdout)

    def check_end(self, token, text, positions=8):
        """Where texts end, in the files that transformers reads."""
        for name in ("config.json", "generation_config.json"):
            found = self.json(name)
            self.assertEqual([found["bos_token_id"], found["eos_token_id"]], [token] * 2, name)
        expected = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=text, eos_token=text)
        expected |= dict(model_max_length=positions, clean_up_tokenization_spaces=False)
        self.assertEqual(self.json("tokenizer_config.json"), expected)

    def test_bytes(self):
        """With the file beside the shards, and without any."""
        text = "Ein M\u0153rder, der  schl\u00e4ft:\n\t'tis 42 \x7f don't "
        self.write("t_tokenizer.bin", BYTES)
        self.write("t_train_0.bin", header(20240520, 1, 100), bytes(200))
        for words in ((), ("--train", self.folder / "t_train_*.bin")):
            self.export(f"{SMALL},vocab=256", *words)
            self.assertEqual(self.said.stdout.count("note: --export"), 0)
            self.check_end(0, END)
            self.assertEqual(self.ids(text, "\n"), [[*text.encode()], [10]])
            shutil.rmtree(self.folder / "hf")

    def test_gpt2(self):
        """The text of a shard has the shard's tokens again; whatever says that they are GPT-2's."""
        text = self.write(
            "text.txt",
            *((ROOT / name).read_bytes() for name in ("README.md", "LICENSE", "Makefile")),
            "\n\n'\u00c7a va' \u6587\u5b57 \U0001f642  \t don't\n".encode() * 9,
        )
        prepare = ROOT / "scripts/prepare_data.py", "--tokenizer", "gpt2", "--out", self.folder
        words = [PYTHON, *prepare, "--name", "t", "--input", text]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        if done.returncode == EXIT_RESOURCES:
            self.skipTest(done.stderr)
        vocabulary, tokens, at = self.read("t_tokenizer.bin"), [], 1024
        while at < len(vocabulary):
            tokens.append(vocabulary[at + 1 : at + 1 + vocabulary[at]])
            at += 1 + vocabulary[at]
        ids = [*array.array("H", self.read("t_train_000000.bin")[1026:])]
        text = b"".join(tokens[i] for i in ids).decode()
        made = []
        for kind in (SMALL, f"arch=llama,{SMALL},vocab=50304"):
            for flag, file in (("tokenizer", "t_tokenizer.bin"), ("train", "t_train_*.bin")):
                self.export(kind, f"--{flag}", self.folder / file)
                self.check_end(50256, END)
                made.append(self.read("hf/tokenizer.json"))
        self.assertEqual(made[1:], made[:-1])
        self.assertEqual(self.ids(text, f"a{END}b"), [ids, [64, 50256, 65]])
        self.assertGreater(len(ids), 2000)
        if PEER:
            of_bytes = self.export(f"arch=qwen3,{SMALL},vocab=256", name="bytes")
            folders = self.folder / "hf", of_bytes
            found = ask_peer(*(("encode", folder, text) for folder in folders))
            self.assertEqual(found[0], [ids, text, 50256])
            self.assertEqual(found[1], [[*text.encode()], text, 0])

    def test_qwen2(self):
        """transformers takes Qwen's pattern of words for it: a note says so."""
        for arch, notes in (("qwen2", 1), ("qwen3", 0)):
            self.export(f"arch={arch},{SMALL},vocab=256")
            self.assertEqual(self.said.stdout.count("note: AutoTokenizer"), notes)

    def test_json(self):
        """It is copied, byte for byte; one beside a .bin only if both have the same tokens."""
        merges = [("t", "h"), ("th", "e")]
        text, file = tokenizer_json(merges, "<eos>")
        text = text.replace(b"{", b"{ ", 1)
        paths = self.write("x.json", text), self.write("b_tokenizer.bin", file)
        self.write("b_tokenizer.json", text)
        for path in paths:
            self.export(f"{SMALL},vocab=64", "--tokenizer", path)
            self.assertEqual(self.read("hf/tokenizer.json"), text)
            self.check_end(28, "<eos>")
            self.assertEqual(self.ids("the"), [[27]])
        self.write("b_tokenizer.json", tokenizer_json([("t", "h"), ("h", "e")], "<eos>")[0])
        words = "--model", f"{SMALL},vocab=64", *PLAIN, "--tokenizer", paths[1], "--export"
        refused = program(*words, self.folder / "new", status=EXIT_INPUT)
        self.assertIn("b_tokenizer.json: expected the tokens of", refused.stderr)
        self.assertFalse((self.folder / "new").exists())

    def test_what_is_missing(self):
        """A note says why there is no tokenizer, and none is written."""
        large = tokenizer_file([END.encode(), *(b"c" * i for i in range(1, 86))], 0)
        names = ["config.json", "generation_config.json", "model.safetensors"]
        for file, note in (
            (tokenizer_json([("a", "b")])[1], "t.json, has them"),
            (large, "has 86 tokens, and the model 64"),
            (None, "none is known; --tokenizer names one"),
        ):
            with self.subTest(note):
                words = ("--tokenizer", self.write("t.bin", file)) if file else ()
                out = self.export(f"{SMALL},vocab=64", *words)
                (line,) = [x for x in self.said.stdout.splitlines() if x.startswith("note: ")]
                self.assertRegex(line, f"^note: --export writes no tokenizer: .*{note}$")
                self.assertEqual(self.names(), names if file else [names[0], names[2]])
                shutil.rmtree(out)

    def test_beside_another_model(self):
        """Files of an export before that this one does not replace are named."""
        folder = self.export(f"{SMALL},vocab=256")
        self.assertNotIn("stays", self.said.stderr)
        self.export(f"{SMALL},vocab=64")
        left = sorted(re.findall(r"(?m)^warning: (.*) stays as it is", self.said.stderr))
        names = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
        self.assertEqual(left, [str(folder / name) for name in names])

    def test_of_checkpoints(self):
        """A model without data has the tokenizer with which its checkpoint was trained."""
        text, file = tokenizer_json([("t", "h")])
        self.write("b_tokenizer.bin", file)
        self.write("b_tokenizer.json", text)
        self.write("b_train_0.bin", header(20240520, 1, 100), bytes(200))
        words = "--train", self.folder / "b_train_*.bin", "--steps", 1, "--seq-len", 8
        out = self.folder / "out"
        program("--model", f"{SMALL},vocab=64", *words, "--out", out, "--save-every", 1)
        for name in ("b_tokenizer.bin", "b_tokenizer.json", "b_train_0.bin"):
            (self.folder / name).unlink()
        self.export(out)
        self.assertEqual(self.read("hf/tokenizer.json"), text)
        self.check_end(27, END)

    def test_of_the_models_folder(self):
        """What lies there is kept as it is, if the run has no other tokenizer."""
        hf = self.export(f"{SMALL},vocab=64")
        text, _ = tokenizer_json([("a", "b")])
        texts = {"tokenizer.json": text, "tokenizer_config.json": b"{ }", "merges.txt": b"a b\n"}
        texts |= {"special_tokens_map.json": b"{}", "vocab.json": b"[]", "added_tokens.json": b"{}"}
        texts |= {"tokenizer.model": b"\0\xff", "chat_template.jinja": b"{{ x }}"}
        for name, content in texts.items():
            self.write(f"hf/{name}", content)
        same = self.write("same.json", text)
        for words in ((), ("--tokenizer", same), ("--tokenizer", hf / "tokenizer.json")):
            self.export(hf, *words, name="again")
            for name, content in texts.items():
                self.assertEqual(self.read(f"again/{name}"), content, name)
            self.assertNotIn("note", self.said.stdout)
            shutil.rmtree(self.folder / "again")
        other = self.write("other.json", tokenizer_json([("b", "a")])[0])
        self.export(hf, "--tokenizer", other, name="again")
        self.assertEqual(self.read("again/tokenizer.json"), other.read_bytes())
        names = "config.json model.safetensors tokenizer.json tokenizer_config.json".split()
        self.assertEqual(self.names("again"), names)
        self.assertEqual(self.json("tokenizer_config.json", "again")["eos_token"], END)

    def test_what_cannot_be_written(self):
        """It is named, and not left behind; and no link is written through."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for name in ("full", "full.bin"):
            words = "--model", MODEL, *PLAIN, "--export", self.folder / name
            how = dict(preexec_fn=limit, status=EXIT_RESOURCES)
            self.assertIn(f"cannot write {self.folder / name}: ", program(*words, **how).stderr)
        self.assertEqual([path for path in self.folder.rglob("*") if path.is_file()], [])
        precious = self.write("precious", "precious")
        link = self.folder / "hf" / "tokenizer.json.tmp"
        link.parent.mkdir()
        link.symlink_to(precious)
        words = "--model", f"{SMALL},vocab=256", *PLAIN, "--export", self.folder / "hf"
        said = program(*words, status=EXIT_RESOURCES).stderr
        self.assertIn(f"cannot write {self.folder}/hf/tokenizer.json: ", said)
        self.assertEqual(precious.read_text(), "precious")
        self.assertEqual(
            self.names(), ["generation_config.json", "model.safetensors", "tokenizer.json.tmp"]
        )


# --------------------------------------------------------------------------------------------------
# Run by the Python that has transformers; arguments and results are JSON.
PEER_CODE = r"""
import json, struct, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

torch.set_num_threads(2)


def tokens_of(path):
    data = open(path, "rb").read()
    return torch.tensor(struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:]))


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is GPT2LMHeadModel and not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), info
    assert model.lm_head.weight is model.transformer.wte.weight
    return model.to(dtype).eval()


def loss(folder, tokens, T, dtype):
    windows = (len(tokens) - 1) // T
    x, y = (tokens[i : i + windows * T].view(windows, T) for i in (0, 1))
    logits = load(folder, dtype)(x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def losses(folders, shard, T):
    tokens = tokens_of(shard)
    return [
        [loss(folder, tokens, T, dtype) for dtype in (torch.float32, torch.float64)]
        for folder in folders
    ]


def golden(
    folder, state
):  # largest difference of logits from those of make_golden.py, and the largest of these
    data = open(state, "rb").read()
    B, T = struct.unpack("<2i", data[8:16])
    x = (
        torch.frombuffer(bytearray(data[1024 : 1024 + 4 * B * T]), dtype=torch.int32)
        .long()
        .view(B, T)
    )
    logits = load(folder, torch.float32)(x).logits
    expected = torch.frombuffer(
        bytearray(data[1024 + 8 * B * T : 1024 + 8 * B * T + 4 * logits.numel()]),
        dtype=torch.float32,
    ).view_as(logits)
    return (logits - expected).abs().max().item(), expected.abs().max().item()


def make(folders, dtypes, shard_size):  # random models, biases and norms too
    torch.manual_seed(1)
    for folder, dtype in zip(folders, dtypes):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=101, n_positions=24, n_embd=48, n_layer=3, n_head=3)
        )
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape))
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)


def encode(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    return ids, tokenizer.decode(ids), tokenizer.eos_token_id


def generate(folder):
    model = load(folder, torch.float32)
    return (
        model.generation_config.eos_token_id,
        model.generate(
            torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2), max_new_tokens=4
        ).shape[1],
    )


def versions():
    return torch.__version__, transformers.__version__


with torch.no_grad():
    print(
        "\n"
        + json.dumps([globals()[name](*arguments) for name, *arguments in json.load(sys.stdin)])
    )
"""


def ask_peer(*calls):
    """The results of calls (function, argument ...) in transformers' Python, one process for
    all."""
    done = run(PEER, "-c", PEER_CODE, input=json.dumps(calls, default=str))
    return json.loads(done.stdout.splitlines()[-1])


@unittest.skipUnless(
    PEER, "no Python with torch and transformers: .venv-peers/bin/pip install torch transformers"
)
class Transformers(InFolder):
    T = 20

    def our_loss(self, model):
        log = self.folder / "log"
        program(
            "--model", model, "--dtype", "fp32", "--val", TOKENS, "--steps", 0, "--val-every", 1,
            "--val-batches", -1, "--seq-len", self.T, "--log", log,
        )
        (event,) = (
            event
            for event in map(json.loads, log.read_text().splitlines())
            if event["event"] == "val"
        )
        return event["loss"]

    def check(self, what, losses, model):
        ours = self.our_loss(model)
        for precision, theirs in zip(("fp32", "float64"), losses):
            if os.environ.get("TEST_PRINT"):
                print(
                    f"{what}: train_gpt {ours:.9f}, transformers in {precision} {theirs:.9f}:"
                    f" relative difference {abs(ours / theirs - 1):.1e}"
                )
            self.assertLessEqual(abs(ours / theirs - 1), SAME, (what, precision))

    def test_exported(self):
        half = self.write("half.bin", bf16_model())
        folders = [self.export(MODEL, name="whole"), self.export(half, name="half")]
        losses, (difference, largest), generated, versions = ask_peer(
            ("losses", folders, TOKENS, self.T),
            ("golden", folders[0], GOLDEN),
            ("generate", folders[0]),
            ("versions",),
        )
        if os.environ.get("TEST_PRINT"):
            print(
                f"torch, transformers: {versions}; logits differ by {difference:.1e}, the largest"
                f" is {largest:.2f}"
            )
        self.assertLess(difference, SAME * largest)
        for what, model, of in (
            ("exported fp32", MODEL, losses[0]),
            ("exported bf16", half, losses[1]),
        ):
            self.check(what, of, model)
        self.assertEqual(generated, [None, 6], "end of text; tokens generated")

    def test_imported(self):
        """Models that transformers made and saved: fp32 in several files with an index, bf16,
        fp16."""
        dtypes = ("float32", "bfloat16", "float16")
        folders = [self.folder / dtype for dtype in dtypes]
        _, _, losses = ask_peer(
            ("make", folders[:1], dtypes, "100KB"),
            ("make", folders[1:], dtypes[1:], "1GB"),
            ("losses", folders, TOKENS, self.T),
        )
        self.assertTrue((folders[0] / "model.safetensors.index.json").exists())
        for dtype, folder, of in zip(dtypes, folders, losses):
            self.check(f"imported {dtype}", of, self.load(folder))
            self.export(self.folder / "back.bin", name="again")
            self.assertEqual(
                ask_peer(("losses", [self.folder / "again"], TOKENS, self.T)),
                [[of]],
                "there and back again, bit by bit",
            )


if __name__ == "__main__":
    harness.main()
