#!/usr/bin/env python3
"""test_huggingface.py: scripts/to_huggingface.py and from_huggingface.py, run as a user would run
them.

    python3 test/test_huggingface.py        TEST_ALL=1: all damaged input, not a sample; TEST_SEED=N
                                            TEST_PRINT=1: also the differences that were measured

    RoundTrip     a model file -> a folder -> the same bytes: fp32 and bf16, made elsewhere and by
                  the program
    Program       --model FOLDER and --export FOLDER do the same; what they refuse
    Layout        every element lies where an independent table says; the forms in which others
                  store the same
    Malformed     damaged and foreign input ends with exit status 2 and one message, and leaves
                  nothing behind
    Transformers  logits and losses of the current transformers equal the program's, both ways;
                  skipped without torch

The scripts run in .venv's Python, transformers in .venv-peers' (.venv-peers/bin/pip install torch
transformers).
"""

import array
import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import unittest
from pathlib import Path

import harness
from harness import (
    CHANNELS,
    EXIT_INPUT,
    EXIT_RESOURCES,
    LAYERS,
    PADDED,
    PARAMETERS,
    POSITIONS,
    SAME,
    VOCAB,
    header,
    sample,
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


def program(*flags):
    return run("mpirun", "-np", "1", BINARY, *flags)


def bf16_model():
    """The golden model, cut to bf16."""
    words = array.array("H", MODEL.read_bytes()[1024:])[1::2]
    return header(20240326, 5, POSITIONS, VOCAB, LAYERS, HEADS, CHANNELS, PADDED) + words.tobytes()


def read_safetensors(path):
    """Returns {name: (dtype, shape, bytes)}; its own reader, so that a mistake of the scripts'
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
            entry["dtype"],
            entry["shape"],
            data[8 + length + begin : 8 + length + end],
        ), end
    assert 8 + length + at == len(data)
    return found


def write_safetensors(path, tensors, **changes):
    """The inverse; changes of the header's entries by name."""
    entries, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [at, at + len(data)],
        } | changes.get(name, {})
        at += len(data)
    text = json.dumps(entries).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
    )


def transposed(values, rows, columns):
    return [values[r * columns + c] for c in range(columns) for r in range(rows)]


@unittest.skipUnless(PYTHON, "no numpy here")
class InFolder(harness.InFolder):
    def export(self, model, *options, name="hf", **how):
        run(PYTHON, ROOT / "scripts/to_huggingface.py", model, self.folder / name, *options, **how)
        return self.folder / name

    def load(self, source, name="back.bin", **how):
        run(PYTHON, ROOT / "scripts/from_huggingface.py", source, self.folder / name, **how)
        return self.folder / name


# --------------------------------------------------------------------------------------------------
class RoundTrip(InFolder):
    def check(self, model):
        self.assertEqual(self.load(self.export(model)).read_bytes(), model.read_bytes())
        self.assertEqual(
            sorted(path.name for path in (self.folder / "hf").iterdir()),
            ["config.json", "generation_config.json", "model.safetensors"],
        )

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
                "--model",
                "layers=2,heads=2,channels=32,vocab=101",
                "--train",
                TOKENS,
                "--val-every",
                0,
                "--seq-len",
                20,
                "--steps",
                3,
                "--dtype",
                dtype,
                "--weight-decay",
                0.1,
                "--export",
                exported,
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

    def test_checkpoints_are_exported_as_the_help_says(self):
        same = (
            "--model",
            MODEL,
            "--train",
            TOKENS,
            "--val-every",
            0,
            "--seq-len",
            20,
            "--out",
            self.folder / "out",
            "--save-every",
            2,
        )
        whole, resumed = self.folder / "whole.bin", self.folder / "resumed.bin"
        program(*same, "--steps", 2, "--export", whole)
        self.assertIn(
            "--resume 1 --steps 0 --export",
            run(PYTHON, ROOT / "scripts/to_huggingface.py", "--help").stdout,
        )
        program(*same, "--resume", 1, "--steps", 0, "--export", resumed)
        self.assertEqual(resumed.read_bytes(), whole.read_bytes())
        self.assertIn(
            "--resume 1 --steps 0 --export",
            run(
                PYTHON,
                ROOT / "scripts/to_huggingface.py",
                self.folder / "out/step_00000002",
                self.folder / "hf",
                status=EXIT_INPUT,
            ).stderr,
        )


# --------------------------------------------------------------------------------------------------
class Program(InFolder):
    """--model FOLDER and --export FOLDER beside the scripts."""

    def test_there_and_back(self):
        """The program reads and writes what the scripts read and write."""
        folder, back = self.export(MODEL), self.folder / "program.bin"
        plain = "--steps", 0, "--val-every", 0, "--seq-len", 8
        program("--model", folder, *plain, "--export", back)
        self.assertEqual(back.read_bytes(), MODEL.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"n_inner": 4 * CHANNELS}))
        program("--model", folder, *plain, "--export", self.folder / "hf2")
        ours, theirs = (
            read_safetensors(path / "model.safetensors") for path in (self.folder / "hf2", folder)
        )
        self.assertEqual(ours, theirs)

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
            back = self.folder / f"back{i}"
            plain = "--steps", 0, "--val-every", 0, "--seq-len", 8
            program("--model", folder, *plain, "--export", back)
            found = read_safetensors(back / "model.safetensors")
            expected = "F32" if name else "BF16"
            self.assertEqual({dtype for dtype, _, _ in found.values()}, {expected}, name)
            self.assertEqual({key: found[key] for key in kept}, kept)

    def test_what_it_does_not_compute(self):
        folder = self.export(MODEL)
        good = json.loads((folder / "config.json").read_text())
        for key, value in (
            ("activation_function", "gelu"),
            ("layer_norm_epsilon", 1e-6),
            ("scale_attn_weights", False),
            ("scale_attn_by_inverse_layer_idx", True),
            ("add_cross_attention", True),
            ("tie_word_embeddings", False),
            ("n_inner", 100),
            ("n_layer", 2),  # the file has more blocks
        ):
            with self.subTest(key):
                (folder / "config.json").write_text(json.dumps(good | {key: value}))
                words = BINARY, "--model", folder, "--steps", 0, "--val-every", 0, "--seq-len", 8
                named = {"n_layer": "h.2."}.get(key, key)
                self.assertIn(named, run(*words, status=EXIT_INPUT).stderr)


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
        write_safetensors(folder / "bare.safetensors", extras | bare)
        self.assertEqual(self.load(folder / "bare.safetensors").read_bytes(), MODEL.read_bytes())
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

    def test_fp16_becomes_fp32(self):
        halves = struct.pack("<5e", 1.5, -0.0, 6e-8, 65504, float("inf"))
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
    def refused(self, script, source, message):
        out = self.folder / "result"
        result = run(
            PYTHON, ROOT / f"scripts/{script}_huggingface.py", source, out, status=EXIT_INPUT
        )
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn(message, result.stderr)
        self.assertFalse([*self.folder.glob("result*")], "something is left behind")

    def test_model_files(self):
        model = MODEL.read_bytes()

        def word(at, value):
            return model[: 4 * at] + struct.pack("<i", value) + model[4 * at + 4 :]

        cases = [
            (b"", "cut off"),
            (model[:1023], "cut off"),
            (model[:-1], "expected 369856 bytes"),
            (model + b"\0", "expected 369856 bytes"),
            (TOKENS.read_bytes(), "magic 20240520"),
            (word(1, 1), "version 1"),
            (word(1, 5), "expected 185440 bytes"),
        ]
        cases += [
            (
                word(at, value),
                "impossible" if at in (5, 7) or value in (-1, 0, 2**31 - 1) else "expected",
            )
            for at in range(2, 8)
            for value in (-1, 0, 2**31 - 1)
        ]
        for data, message in sample(cases, 4):
            with self.subTest(message):
                self.refused("to", self.write("model.bin", data), message)
        self.refused("to", self.folder, "--export MODEL.bin")
        self.refused("to", self.folder / "nothing", "no such file")

    def test_tokenizers(self):
        good = header(20240328, 2, 3, 0) + b"\1a\1b\2ab"
        cases = [
            good[:-1],
            good + b"\0",
            good[:1024],
            TOKENS.read_bytes(),
            header(20240328, 2, 3, 3) + good[1024:],
            header(20240328, 2, -1, 0),
            good[:1024] + b"\1a\1a\2aa",
            good[:1024] + b"\1a\0\2aa",
            header(20240328, 2, 102, 0) + b"".join(bytes([1, i]) for i in range(102)),
            header(20240328, 2, 3, 0) + b"\1a\1b\3bbb",
        ]
        for i, data in sample(enumerate(cases), 4):
            with self.subTest(i):
                result = run(
                    PYTHON,
                    ROOT / "scripts/to_huggingface.py",
                    MODEL,
                    self.folder / "result",
                    "--tokenizer",
                    self.write("t.bin", data),
                    status=EXIT_INPUT,
                )
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                self.assertFalse([*self.folder.glob("result*")])

    def test_safetensors(self):
        folder = self.export(MODEL)
        path, source = folder / "model.safetensors", read_safetensors(folder / "model.safetensors")
        good, name = path.read_bytes(), "transformer.h.1.mlp.c_fc.weight"
        raw = [
            (good[:7], "cut off"),
            (good[:-1], "range of the"),
            (good[:1000], "not safetensors, or cut off"),
            (b"\xff" * 8 + good[8:], "not safetensors"),
            (struct.pack("<Q", 50) + good[8:], "expected JSON"),
            (struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
            (struct.pack("<Q", 2) + b"{}", "found none"),
            (struct.pack("<Q", 100000) + b"[" * 100000, "expected JSON"),
            (struct.pack("<Q", 3) + b'{"\xff', "expected JSON"),
        ]
        for data, message in sample(raw, 4):
            with self.subTest(message):
                path.write_bytes(data)
                self.refused("from", folder, message)
        total = sum(len(data) for _, _, data in source.values())
        entries = [
            ({"data_offsets": [0, total + 1]}, "range of the"),
            ({"data_offsets": [8, 4]}, "range of the"),
            ({"data_offsets": [-4, 0]}, "range of the"),
            ({"data_offsets": [0.0, 4.0]}, "range of the"),
            ({"data_offsets": [0]}, "range of the"),
            ({"data_offsets": None}, "range of the"),
            ({"data_offsets": [True, True]}, "range of the"),
            ({"shape": [48]}, "do not hold"),
            ({"shape": [192, 48]}, "expected h.1.mlp.c_fc.weight"),
            ({"shape": [0, 1 << 70], "data_offsets": [0, 0]}, "range of the"),
            ({"shape": [1] * 99}, "range of the"),
            ({"shape": "48"}, "range of the"),
            ({"dtype": "F64"}, "in fp32, bf16 or fp16"),
            ({"dtype": "BF16"}, "do not hold"),
            ({"dtype": None}, "in fp32, bf16 or fp16"),
        ]
        for change, message in sample(entries, 4):
            with self.subTest(change):
                write_safetensors(path, source, **{name: change})
                self.refused("from", folder, message)
        left, wte = {k: v for k, v in source.items() if k != name}, source["transformer.wte.weight"]
        for tensors, message in (
            (left, "found none"),
            (source | {"score.weight": ("F32", [1], bytes(4))}, "no tensor 'score.weight'"),
            (source | {"lm_head.weight": (*wte[:2], bytes(len(wte[2])))}, "one matrix for both"),
        ):
            with self.subTest(message):
                write_safetensors(path, tensors)
                self.refused("from", folder, message)

    def test_configurations(self):
        folder = self.export(MODEL)
        good = json.loads((folder / "config.json").read_text())
        for key, value in sample(
            (
                ("model_type", "llama"),
                ("activation_function", "gelu"),
                ("layer_norm_epsilon", 1e-6),
                ("scale_attn_weights", False),
                ("scale_attn_by_inverse_layer_idx", True),
                ("tie_word_embeddings", False),
                ("n_inner", 100),
                ("n_layer", 3.0),
                ("n_layer", 1 << 40),
                ("n_head", 5),
                ("n_embd", None),
                ("vocab_size", "101"),
                ("vocab_size", 0),
                ("n_positions", [24]),
            ),
            4,
        ):
            with self.subTest(key, value=value):
                (folder / "config.json").write_text(json.dumps(good | {key: value}))
                self.refused(
                    "from",
                    folder,
                    (
                        "impossible"
                        if value in (5, 1 << 40) or (key, value) == ("vocab_size", 0)
                        else key
                    ),
                )
        for changes, message in (
            ({"vocab_size": 100}, "wte.weight"),
            ({"n_layer": 4}, "h.3."),
            ({"n_layer": 2}, "no tensor 'h.2."),
            ({"n_positions": 25}, "wpe.weight"),
        ):
            with self.subTest(message):
                (folder / "config.json").write_text(json.dumps(good | changes))
                self.refused("from", folder, message)
        (folder / "config.json").write_bytes(b"\0")
        self.refused("from", folder, "expected JSON")
        os.remove(folder / "config.json")
        self.refused("from", folder, "config.json: no such file")

    def test_indices(self):
        folder = self.export(MODEL)
        os.rename(folder / "model.safetensors", folder / "part.safetensors")
        self.refused("from", folder, "no model.safetensors")
        for weight_map, message in sample(
            (
                (None, "weight_map"),
                ({"a": 1}, "weight_map"),
                ({"a": "../part.safetensors"}, "weight_map"),
                ({"a": "/etc/passwd"}, "weight_map"),
                ({"a": "other.safetensors"}, "no such file"),
                ({"a": "part.safetensors"}, "'a' is not in part"),
                ({}, "found none"),
            ),
            4,
        ):
            with self.subTest(message):
                (folder / "model.safetensors.index.json").write_text(
                    json.dumps({"weight_map": weight_map})
                )
                self.refused("from", folder, message)

    def test_full_disk(self):
        folder = self.export(MODEL)
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        before = sorted(self.folder.rglob("*"))
        self.load(folder, status=EXIT_RESOURCES, preexec_fn=limit)
        self.export(MODEL, name="more", status=EXIT_RESOURCES, preexec_fn=limit)
        self.assertEqual(sorted(self.folder.rglob("*")), before)

    def test_link_in_the_way(self):
        """A link where the half-written file will be is not written through, nor removed."""
        folder, precious = self.export(MODEL), self.folder / "precious"
        precious.write_text("precious")
        link = self.folder / "back.bin.tmp"
        link.symlink_to(precious)
        self.load(folder, status=EXIT_RESOURCES)
        self.assertEqual(precious.read_text(), "precious")
        self.assertTrue(link.is_symlink())

    def test_two_at_once(self):
        """The second one to write a file is refused, as long as the first one does."""
        folder = self.export(MODEL)
        half = self.folder / "back.bin.tmp"
        with open(half, "wb") as first:
            fcntl.flock(first, fcntl.LOCK_EX)
            script = ROOT / "scripts/from_huggingface.py"
            said = run(PYTHON, script, folder, self.folder / "back.bin", status=EXIT_INPUT).stderr
            self.assertIn("is writing it", said)
            self.assertEqual(half.read_bytes(), b"")
        self.load(folder)
        self.assertFalse(half.exists())


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


@unittest.skipUnless(
    PEER, "no Python with torch and transformers: .venv-peers/bin/pip install torch transformers"
)
class Transformers(InFolder):
    T = 20

    def peer(self, *calls):
        """The results of calls (function, argument ...) in transformers' Python, one process for
        all."""
        return json.loads(
            run(PEER, "-c", PEER_CODE, input=json.dumps(calls, default=str)).stdout.splitlines()[-1]
        )

    def our_loss(self, model):
        log = self.folder / "log"
        program(
            "--model",
            model,
            "--dtype",
            "fp32",
            "--val",
            TOKENS,
            "--steps",
            0,
            "--val-every",
            1,
            "--val-batches",
            -1,
            "--seq-len",
            self.T,
            "--log",
            log,
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
        losses, (difference, largest), generated, versions = self.peer(
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
        self.assertEqual(generated, [0, 6], "end of text of a small vocabulary; tokens generated")

    def test_imported(self):
        """Models that transformers made and saved: fp32 in several files with an index, bf16,
        fp16."""
        dtypes = ("float32", "bfloat16", "float16")
        folders = [self.folder / dtype for dtype in dtypes]
        _, _, losses = self.peer(
            ("make", folders[:1], dtypes, "100KB"),
            ("make", folders[1:], dtypes[1:], "1GB"),
            ("losses", folders, TOKENS, self.T),
        )
        self.assertTrue((folders[0] / "model.safetensors.index.json").exists())
        for dtype, folder, of in zip(dtypes, folders, losses):
            self.check(f"imported {dtype}", of, self.load(folder))
            self.export(self.folder / "back.bin", name="again")
            self.assertEqual(
                self.peer(("losses", [self.folder / "again"], TOKENS, self.T)),
                [[of]],
                "there and back again, bit by bit",
            )

    def test_tokenizer_of_bytes(self):
        vocabulary = self.write(
            "t.bin", header(20240328, 2, 256, 0), *(bytes([1, i]) for i in range(256))
        )
        model = self.folder / "bytes.bin"
        program(
            "--model",
            "layers=1,heads=1,channels=16,vocab=256",
            "--steps",
            0,
            "--val-every",
            0,
            "--seq-len",
            8,
            "--export",
            model,
        )
        text = "Ein Mœrder, der  schläft:\n\t'tis 42 \x7f "
        (found,) = self.peer(("encode", self.export(model, "--tokenizer", vocabulary), text))
        self.assertEqual(found, [[*text.encode()], text, 0])

    def test_tokenizer_of_gpt2(self):
        """The text of a shard has the shard's tokens again."""
        text = self.write(
            "text.txt",
            *((ROOT / name).read_bytes() for name in ("README.md", "LICENSE", "Makefile")),
            "\n\n'Ça va' 文字 🙂  \t don't\n".encode() * 9,
        )
        prepare = subprocess.run(
            [
                PYTHON,
                ROOT / "scripts/prepare_data.py",
                "--tokenizer",
                "gpt2",
                "--out",
                self.folder,
                "--name",
                "t",
                "--input",
                text,
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if prepare.returncode == EXIT_RESOURCES:
            self.skipTest(prepare.stderr)
        shard, vocabulary = (
            (self.folder / f"t_{end}.bin").read_bytes() for end in ("train_000000", "tokenizer")
        )
        tokens, at = [], 1024
        while at < len(vocabulary):
            tokens.append(vocabulary[at + 1 : at + 1 + vocabulary[at]])
            at += 1 + vocabulary[at]
        ids = [*array.array("H", shard[1026:])]
        text = b"".join(tokens[i] for i in ids).decode()
        model = self.folder / "gpt2.bin"
        program(
            "--model",
            "layers=1,heads=1,channels=2",
            "--steps",
            0,
            "--val-every",
            0,
            "--seq-len",
            8,
            "--export",
            model,
        )
        ((found, decoded, end),) = self.peer(
            ("encode", self.export(model, "--tokenizer", self.folder / "t_tokenizer.bin"), text)
        )
        self.assertEqual((found, decoded, end), (ids, text, 50256))
        self.assertGreater(len(ids), 2000)


if __name__ == "__main__":
    harness.main()
