#!/usr/bin/env python3
"""test_fuzz.py: damaged input of every kind, given to the real program built with the address and
undefined-behaviour sanitizers.

    python3 test/test_fuzz.py               200 mutations; TEST_ALL=1: 10,000; TEST_FUZZ=N: so many;
                                            TEST_SEED=N: which, printed
    python3 test/test_fuzz.py SEED NUMBER   one mutation; prints the command and keeps the files:
                                            what a failure tells to call

A mutation is a function of (seed, number) alone. It takes the good input of one of the TARGETS and
changes bits, bytes, the words that have a meaning, or lengths. Each target has a verdict of its
own: a plain reading of docs/formats.md which says of any bytes whether the program must take them
(exit code 0) or refuse them (2), so that a refusal of something good is found too. And whatever the
input: exactly one message where it is refused, no report of a sanitizer, no crash, no hang, no huge
allocation. To add a target, add a class to TARGETS. Standard library only.
"""

import array
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

import harness
from harness import (
    ALL, EXIT_INPUT, EXIT_RESOURCES, MODEL, PADDED, ROOT, SEED, T, TEMPORARY, TIMEOUT, TOKENS,
    VOCAB, apart, at_once, get, header, scratch,
)

PLAIN, BINARY = os.path.join(ROOT, "train_gpt"), os.path.join(ROOT, "build/train_gpt_sanitized")
COUNT = int(os.environ.get("TEST_FUZZ", 10000 if ALL else 100))
# in one allocation, and resident: the model is 1 MB, the sanitizer's own memory most of it
MOST_MB = 2048
HEADS = 3  # of the golden model

# One thread, one process, no launcher's daemon; leaks at the end are MPI's own.
ENVIRONMENT = dict(
    os.environ,
    OMPI_MCA_ess_singleton_isolated="1",
    OMPI_MCA_btl="self",
    OPENBLAS_NUM_THREADS="1",
    OMP_NUM_THREADS="1",
    UBSAN_OPTIONS="print_stacktrace=1",
    ASAN_OPTIONS=f"detect_leaks=0:"
    f"allocator_may_return_null=1:"
    f"max_allocation_size_mb={MOST_MB}:hard_rss_limit_mb={MOST_MB}",
)
RUN = {
    "model": MODEL, "train": TOKENS, "val": TOKENS, "shuffle": 0, "seq-len": T, "micro-batch": 1,
    "steps": 1, "val-every": 0, "threads": 1,
}

TAKEN, REFUSED, EITHER, ANYTHING = {0}, {2}, {0, 2}, {0, 2, 3}


# --------------------------------------------------------------------------------------------------
# Files


def put(folder, name, data):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(data)
    return path


def word(data, at):
    return struct.unpack_from("<i", data, 4 * at)[0]


def words_of(data):
    """The uint16 words behind the header."""
    return struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024 : len(data) - len(data) % 2])


def all_finite(data, bits=32):
    """Whether none of these fp32 or bf16 numbers is NaN or infinite."""
    ones = 0x7F800000 >> (32 - bits)  # the exponent of what is not finite
    numbers = array.array("I" if bits == 32 else "H", data)
    return not any(number & ones == ones for number in numbers)


def flags(**changes):
    merged = dict(RUN, **{name.replace("_", "-"): value for name, value in changes.items()})
    return [
        text
        for name, value in merged.items()
        if value is not None
        for text in (f"--{name}", str(value))
    ]


# --------------------------------------------------------------------------------------------------
# Mutators: (draw, bytes, words) -> bytes; `words` lists where the words with a meaning begin, and
# their size.


def place(draw, data, words):
    """Half of the time at a word with a meaning, else anywhere."""
    at, size = draw.choice(words)
    at += draw.randrange(size)
    return at if draw.random() < 0.5 and at < len(data) else draw.randrange(len(data))


def flip_bits(draw, data, words):
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[place(draw, data, words)] ^= 1 << draw.randrange(8)
    return bytes(data)


def set_bytes(draw, data, words):
    data = bytearray(data)
    for _ in range(draw.choice((1, 2, 8))):
        data[place(draw, data, words)] = draw.choice(
            (0, 1, 9, 32, 48, 127, 128, 255, draw.randrange(256))
        )
    return bytes(data)


def extremes(draw, data, words):
    at, size = draw.choice(words)
    if at + size > len(data):
        return data
    bits, old = 8 * size, int.from_bytes(data[at : at + size], "little")
    new = draw.choice(
        (
            0, 1, -1, 1 << bits - 1, (1 << bits - 1) - 1, old + 1, old - 1, old * 2, old // 2,
            draw.getrandbits(bits), draw.randrange(1000),
        )
    )
    return data[:at] + (new % (1 << bits)).to_bytes(size, "little") + data[at + size :]


def truncate(draw, data, words):
    at, size = draw.choice(words)
    return data[
        : draw.choice(
            (
                0, 1, 7, 8, 24, 1023, 1024, 1025, at, at + size, len(data) - 1, len(data) - 2,
                draw.randrange(len(data)),
            )
        )
    ]


def extend(draw, data, words):
    n = draw.choice((1, 2, 4, 8, 1024, draw.randrange(1, 5000)))
    return data + draw.choice((bytes(n), b"\xff" * n, draw.randbytes(n), data[-n:]))


def span(draw, data):
    begin = draw.randrange(len(data))
    return begin, min(len(data), begin + draw.choice((1, 2, 4, 16, 256, 4096)))


def splice(draw, data, words):
    """A piece written over another place."""
    begin, end = span(draw, data)
    at = draw.randrange(len(data))
    return (data[:at] + data[begin:end] + data[at + end - begin :])[: len(data)]


def cut_out(draw, data, words):
    begin, end = span(draw, data)
    return data[:begin] + data[end:]


def repeat(draw, data, words):
    begin, end = span(draw, data)
    return data[:end] + data[begin:end] + data[end:]


def swap(draw, data, words):
    """A file of another kind."""
    return draw.choice([target.base for target in TARGETS if getattr(target, "base", None)])


MUTATORS = [
    flip_bits, set_bytes, extremes, extremes, extremes, truncate, extend, splice, cut_out, repeat,
    swap,
]


def mutated(draw, data, words):
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice(MUTATORS)(draw, data, words) if data else data
    return data


# --------------------------------------------------------------------------------------------------
# Targets: case(draw, folder, good) returns (flags, the exit codes that are right); good: unchanged
# input.


class File:
    """A single file: `base`, the `words` of it that have a meaning, and its verdict."""

    def case(self, draw, folder, good):
        data = self.base if good else mutated(draw, self.base, self.words)
        return self.use(draw, put(folder, "input.bin", data), data)


class Shard(File):
    base = get(TOKENS)
    words = [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (1024, 2), (len(base) - 2, 2)]
    widths = {(20240520, 1): 2, (20240520, 2): 4, (20240801, 7): 4}

    def use(self, draw, path, data):
        windows, shuffle = draw.choice(("continuous", "document")), draw.randrange(2)
        if draw.random() < 0.3:
            batches = draw.choice((1, -1))
            changes = flags(val=path, val_every=1, val_batches=batches, steps=0)
            return changes, self.verdict(data, "continuous", batches < 0)
        return flags(train=path, windows=windows, shuffle=shuffle), self.verdict(
            data, windows, shuffle
        )

    @staticmethod
    def verdict(data, windows, whole):
        """whole: continuous windows must not go on at token 0."""
        width = Shard.widths.get((word(data, 0), word(data, 1))) if len(data) >= 1024 else None
        if not width or len(data) != 1024 + width * word(data, 2):
            return REFUSED
        tokens = struct.unpack(f"<{word(data, 2)}{'H' if width == 2 else 'I'}", data[1024:])
        if len(tokens) < 2 or max(tokens) >= VOCAB:
            return REFUSED
        if (
            word(data, 5) == 20240328 and not max(tokens) < word(data, 6) <= 1 << 24
        ):  # else words 5 to 8 say nothing
            return REFUSED
        if word(data, 3):
            return EITHER  # labelled shards have rules of their own
        if windows == "continuous":
            return TAKEN if not whole or len(tokens) > T else REFUSED
        starts = [i for i, token in enumerate(tokens) if token == 0]  # of documents
        lengths = [b - a for a, b in zip([0, *starts], [*starts, len(tokens)])]
        return TAKEN if starts and max(lengths) >= 2 else REFUSED


class ShardOfTokenizer(Shard):
    """A shard whose header says which tokenizer made it."""

    base = (
        Shard.base[:12] + struct.pack("<6i", 0, 0, 20240328, VOCAB, -5, 1 << 30) + Shard.base[36:]
    )
    words = Shard.words + [(4 * i, 4) for i in (5, 6, 6, 6, 7, 8)]


class WideShard(Shard):
    """A shard of 32-bit tokens."""

    base = header(20240520, 2, word(Shard.base, 2)) + struct.pack(
        f"<{word(Shard.base, 2)}I", *words_of(Shard.base)
    )
    words = Shard.words[:5] + [(1024, 4), (len(base) - 4, 4)]


class Model(File):
    base = get(MODEL)
    words = [(4 * i, 4) for i in range(8)] + [(1024, 4), (len(base) - 4, 4)]

    def use(self, draw, path, data):
        how = draw.choice(
            (
                dict(),
                dict(dtype="bf16"),
                dict(steps=0, val_every=1, val_batches=1),
                dict(recompute="block", optimizer="sgd"),
                dict(
                    zero=3, zero_quantized_weights=1, zero_quantized_gradients=1,
                    zero_quant_block=draw.choice((16, 1 << 30)),
                ),
            )
        )
        return flags(model=path, **how), self.verdict(data)

    @staticmethod
    def verdict(data):
        if len(data) < 1024:
            return REFUSED
        magic, version, positions, V, L, heads, C, Vp = struct.unpack_from("<8i", data)
        if (
            magic != 20240326
            or version not in (3, 5)
            or min(positions, V, L, heads, C, Vp) < 1
            or C % heads
            or Vp < V
        ):
            return REFUSED
        if L > 10000 or max(V, positions) > 1 << 24 or C > 1 << 20 or Vp > 1 << 25:
            return REFUSED
        parameters = (Vp + positions) * C + L * (12 * C * C + 13 * C) + 2 * C
        bits = 32 if version == 3 else 16
        return (
            TAKEN
            if len(data) == 1024 + parameters * bits // 8
            and positions >= T
            and V > max(words_of(Shard.base))
            and all_finite(data[1024:], bits)
            else REFUSED
        )


def safetensors_of(shapes):
    """A safetensors file of equal numbers; its bytes, and those of its header."""
    tensors, data = {}, b""
    for name, shape in shapes.items():
        values = struct.pack("<f", 0.01) * math.prod(shape)
        place = (len(data), len(data) + len(values))
        tensors[name] = dict(dtype="F32", shape=shape, data_offsets=place)
        data += values
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data, text


def llama_shapes():
    """The tensors of the model below."""
    block = {
        "input_layernorm": (8,), "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8), "post_attention_layernorm": (8,),
        "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
    }
    shapes = {"model.embed_tokens.weight": (VOCAB, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        for name, shape in block.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


class HuggingFace(File):
    """A folder of Hugging Face, of which the tensors are damaged; weights may have any value."""

    config = dict(
        model_type="llama", hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=VOCAB,
        max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        tie_word_embeddings=True,
    )
    base, text = safetensors_of(llama_shapes())
    words = [(0, 8), (0, 8), (8, 1), (8 + len(text), 4)] + [
        (8 + at.start(), 1) for at in re.finditer(rb"[0-9]+|F32|shape", text)
    ]

    def use(self, draw, path, data):
        folder = os.path.dirname(path)
        put(folder, "model.safetensors", data)
        put(folder, "config.json", json.dumps(self.config).encode())
        return flags(model=folder), TAKEN if data == self.base else EITHER


class HuggingFaceConfig(File):
    """The same, where config.json is damaged."""

    base = json.dumps(HuggingFace.config).encode()
    words = [(at.start(), 1) for at in re.finditer(rb"[0-9]+|llama|null|true", base)]

    def use(self, draw, path, data):
        folder = os.path.dirname(path)
        put(folder, "model.safetensors", HuggingFace.base)
        put(folder, "config.json", data)
        return flags(model=folder), TAKEN if data == self.base else EITHER


class Tokenizer(File):
    base = header(20240328, 2, VOCAB, 7) + b"".join(
        bytes([1 + i % 5]) + bytes([33 + i % 90]) * (1 + i % 5) for i in range(VOCAB)
    )
    words = [(4 * i, 4) for i in range(4)] + [(1024, 1), (1026, 1)]

    def use(self, draw, path, data):
        return flags(
            tokenizer=path,
            sample_every=1,
            sample_tokens=5,
            windows=draw.choice(("continuous", "document")),
        ), self.verdict(data)

    @staticmethod
    def verdict(data):
        if data.lstrip(b" \t\r\n")[:1] == b"{":
            return TokenizerJson.json_verdict(data)
        if len(data) < 1024 or word(data, 0) != 20240328 or word(data, 1) not in (1, 2, 3):
            return REFUSED
        vocab, end, at = word(data, 2), word(data, 3) if word(data, 1) > 1 else 50256, 1024
        if not max(words_of(Shard.base)) < vocab <= 1 << 24 or not 0 <= end < min(vocab, VOCAB):
            return REFUSED
        for _ in range(vocab):
            long = word(data, 1) == 3 and at + 2 < len(data) and data[at] == 0
            if at >= len(data) or (data[at] == 0 and not long):
                return REFUSED
            size = data[at + 1] + 256 * data[at + 2] if long else data[at]
            if long and size < 256:
                return REFUSED
            at += (3 if long else 1) + size
        return (
            TAKEN if at == len(data) else REFUSED
        )  # documents: every token of the vocabulary is in the golden shard


def pairs_of(text):
    """JSON whose objects are lists of (name, value), as the program reads it: no special numbers,
    none of 64 characters or more."""

    def number(digits):
        if len(digits) >= 64 or digits in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(digits)
        value = float(digits)
        if abs(value) == float("inf"):
            raise ValueError(digits)
        return value

    return json.loads(
        text,
        object_pairs_hook=lambda pairs: ("object", pairs),
        parse_int=number,
        parse_float=number,
        parse_constant=number,
    )


def member(value, name):
    """The first of this name, or None."""
    pairs = value[1] if isinstance(value, tuple) else []
    return next((member for key, member in pairs if key == name), None)


class TokenizerJson(Tokenizer):
    """A Hugging Face tokenizer.json."""

    base = get(os.path.join(ROOT, "test/golden/tokenizer_tiny.json"))
    words = [(found.start(1), 3) for found in re.finditer(rb'": (\d)', base)] + [
        (base.index(b'"added_tokens"'), 16),
        (base.index(b'"vocab"'), 9),
        (base.index(b'"content"'), 11),
    ]
    # GPT-2's alphabet
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {*map(chr, seen), *(chr(0x100 + i) for i in range(256 - len(seen)))}
    ends = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")

    @classmethod
    def json_verdict(cls, data):
        text = data.decode("utf-8", "surrogateescape")
        if re.search(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})', text) or "\\u" in text:
            return EITHER  # escapes that are in no token are not looked at
        try:
            return cls.verdict_of(pairs_of(text))
        except ValueError:
            return REFUSED

    @classmethod
    def verdict_of(cls, whole):
        vocab, added = member(member(whole, "model"), "vocab"), member(whole, "added_tokens")
        if not isinstance(vocab, tuple):
            return REFUSED
        members = added if isinstance(added, list) else []
        if isinstance(added, tuple):
            members = [value for _, value in added[1]]
        special = [(member(token, "id"), member(token, "content")) for token in members]
        tokens = [(i, token) for token, i in vocab[1]]
        if any(not isinstance(content, str) for _, content in special):
            return REFUSED
        for i, token in special + tokens:
            if not isinstance(i, float) or i != int(i) or not 0 <= i < 1 << 24:
                return REFUSED
        literal = dict(special)
        tokens = special + [(i, token) for i, token in tokens if i not in literal]
        if len(dict(tokens)) < len(tokens):
            return REFUSED
        for i, token in tokens:
            if i not in literal and not set(token) <= cls.alphabet:
                return REFUSED
            size = len(token.encode("utf-8", "surrogateescape")) if i in literal else len(token)
            if not 1 <= size <= 65535:
                return REFUSED
        end = next((i for name in cls.ends for i, content in special if content == name), None)
        largest = max((i for i, _ in tokens), default=-1)
        good = end is not None and end < min(VOCAB, PADDED) and largest >= VOCAB - 1
        if good and end != 0:
            return EITHER  # documents begin with another token, which may be in no shard
        return TAKEN if good else REFUSED


class HellaSwag(File):
    """llm.c's multiple-choice file: a header, then examples of uint16 words."""

    base = None  # made below, where the program knows the flag

    @staticmethod
    def make():
        draw, examples = random.Random(1), []
        for number in range(6):
            lists = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 7))] for _ in range(5)]
            body = [number, draw.randrange(4), 4] + [
                w for tokens in lists for w in (len(tokens), *tokens)
            ]
            examples.append(struct.pack(f"<{len(body) + 2}H", 65535, 2 * len(body) + 4, *body))
        return header(20240522, 1, len(examples), max(map(len, examples))) + b"".join(examples)

    @property
    def words(self):
        return [(4 * i, 4) for i in range(4)] + [(1024 + 2 * i, 2) for i in range(20)]

    def use(self, draw, path, data):
        return flags(hellaswag=path, steps=0, val_every=1, val_batches=1), self.verdict(data)

    @staticmethod
    def verdict(data):
        if (
            len(data) < 1024
            or [word(data, 0), word(data, 1)] != [20240522, 1]
            or not 1 <= word(data, 2) <= 65536
            or len(data) % 2
        ):
            return REFUSED
        stream, at, longest = words_of(data), 0, 0
        for number in range(word(data, 2)):
            begin = at
            if [*stream[at : at + 1], *stream[at + 2 : at + 3], *stream[at + 4 : at + 5]] != [
                65535, number, 4,
            ] or stream[at + 3] > 3:
                return REFUSED
            end, at, lengths = begin + stream[begin + 1] / 2, begin + 5, []
            for _ in range(5):
                if (
                    at >= min(end, len(stream))
                    or stream[at] == 0
                    or at + 1 + stream[at] > min(end, len(stream))
                ):
                    return REFUSED
                tokens = stream[at + 1 : at + 1 + stream[at]]
                if max(tokens) >= VOCAB:
                    return REFUSED
                lengths.append(len(tokens))
                at += 1 + len(tokens)
            if at != end or lengths[0] + max(lengths[1:]) - 1 > T:
                return REFUSED
            longest = max(longest, 2 * (at - begin))
        return TAKEN if at == len(stream) and longest == word(data, 3) else REFUSED


# --------------------------------------------------------------------------------------------------
# Checkpoints


def checksum(data):
    """checksum_add of base.h."""
    most = (1 << 64) - 1

    def mix(x):
        x = x + 0x9E3779B97F4A7C15 & most
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & most
        x = (x ^ x >> 27) * 0x94D049BB133111EB & most
        return x ^ x >> 31

    def turn(lane, value):
        lane = lane + value * 0xC2B2AE3D27D4EB4F & most
        return (lane << 31 | lane >> 33) * 0x9E3779B185EBCA87 & most

    lanes, whole, total = [mix(i) for i in range(4)], len(data) // 32 * 32, mix(len(data))
    for i, value in enumerate(struct.unpack(f"<{whole // 8}Q", data[:whole])):
        lanes[i % 4] = turn(lanes[i % 4], value)
    for value in (*lanes, *data[whole:]):
        total = turn(total, value)
    return mix(total)


class Checkpoint:
    """A folder with one checkpoint of two ranks; damaged, and sealed again with good checksums in
    half of the cases."""

    files = {}  # name -> bytes; made once, by the program

    @classmethod
    def make(cls):
        out = os.path.join(TEMPORARY, "out")
        small = flags(
            model=f"layers=1,heads=1,channels=4,vocab={VOCAB}", out=out, save_every=2, steps=2
        )
        environment = dict(
            os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
        )
        subprocess.run(
            ["mpirun", "--oversubscribe", "-np", "2", PLAIN, *small],
            check=True,
            capture_output=True,
            env=environment,
            timeout=TIMEOUT,
        )
        folder = os.path.join(out, "step_00000002")
        cls.files = {name: get(os.path.join(folder, name)) for name in os.listdir(folder)}

    def case(self, draw, folder, good):
        files = dict(self.files)
        verdict = (
            TAKEN
            if good
            else draw.choice(
                (
                    self.damage, self.damage, self.reseal_manifest, self.reseal_manifest,
                    self.reseal_state, self.replace,
                )
            )(draw, files)
        )
        inside = os.path.join(folder, "out", "step_00000002")
        os.makedirs(inside)
        for name, data in files.items():
            self.create(os.path.join(inside, name), data)
        return (
            flags(
                model=f"layers=1,heads=1,channels=4,vocab={VOCAB}",
                out=os.path.join(folder, "out"),
                resume=1,
                steps=3,
                zero=draw.randrange(4),
            ),
            verdict,
        )

    @staticmethod
    def create(path, data):
        """A file; or what stands there instead of one."""
        if data == "folder":
            os.mkdir(path)
        elif data == "pipe":
            os.mkfifo(path)
        elif data == "loop":
            os.symlink(path, path)
        elif data == "endless":
            os.symlink("/dev/zero", path)
        elif data != "missing":
            put(os.path.dirname(path), os.path.basename(path), data)

    def damage(self, draw, files):
        name = draw.choice(sorted(files))
        files[name] = mutated(draw, files[name], self.words(name))
        return TAKEN if files == self.files else REFUSED

    def replace(self, draw, files):
        name, other = draw.sample(sorted(files), 2)
        files[name] = draw.choice((files[other], "missing", "folder", "pipe", "loop", "endless"))
        return REFUSED

    @classmethod
    def words(cls, name):
        data = cls.files[name]
        if name == "manifest":
            return [(match.start(), 1) for match in re.finditer(rb"[0-9]+", data)]
        return [(at, 8) for at in range(0, 24 + 32 * struct.unpack_from("<Q", data, 16)[0], 8)]

    @staticmethod
    def seal(files):
        """Sizes and checksums of the state files, and the manifest's own."""
        lines = files["manifest"].split(b"\n")[:-2]
        for i, line in enumerate(lines):
            state = (
                files.get(f"state_{line[4:5].decode(errors='replace'):0>5}")
                if re.match(rb"file\d ", line)
                else None
            )
            lines[i] = (
                b"%s %d %016x" % (line.split()[0], len(state), checksum(state)) if state else line
            )
        text = b"\n".join(lines) + b"\n"
        files["manifest"] = text + b"checksum %016x\n" % checksum(text)

    def reseal_state(self, draw, files):
        """The piece table must be refused for what it says; elements may be any finite numbers, of
        an empty piece the state and storage anything."""
        name, data = draw.choice(
            [(name, data) for name, data in sorted(files.items()) if name != "manifest"]
        )
        files[name] = draw.choice((extremes, extremes, flip_bits, truncate, extend))(
            draw, data, self.words(name)
        )
        self.seal(files)
        return self.verdict([files[name] for name in sorted(files) if name != "manifest"])

    STORAGES = ((PADDED * 4, T * 4, 12 * 16 + 13 * 4, 2 * 4), 3)  # elements of each; states

    @classmethod
    def verdict(cls, files):
        """The pieces of all files, one after another, are every element of every state, and
        finite."""
        sizes, states = cls.STORAGES
        filled = {(state, storage): 0 for state in range(states) for storage in range(len(sizes))}
        for data in files:
            if len(data) < 24 or struct.unpack_from("<2Q", data) != (0x7470675F73746174, 1):
                return REFUSED
            pieces = struct.unpack_from("<Q", data, 16)[0]
            if pieces > len(filled) or len(data) < 24 + 32 * pieces:
                return REFUSED
            elements = 0
            for state, storage, begin, count in struct.iter_unpack(
                "<4q", data[24 : 24 + 32 * pieces]
            ):
                inside = 0 <= storage < len(sizes)
                if not inside or not 0 <= begin <= begin + count <= sizes[storage]:
                    return REFUSED
                if count == 0:  # says nothing, of whatever state
                    if 0 <= state < states:
                        continue
                    return EITHER
                if filled.get((state, storage)) != begin:
                    return REFUSED
                filled[state, storage] += count
                elements += count
            if len(data) != 24 + 32 * pieces + 4 * elements:
                return REFUSED
            if not all_finite(data[24 + 32 * pieces :]):
                return REFUSED
        return (
            TAKEN
            if all(count == sizes[storage] for (_, storage), count in filled.items())
            else REFUSED
        )

    def reseal_manifest(self, draw, files):
        """A field that a run could not have written."""
        key = draw.choice(
            (b"step", b"position", b"updates", b"losses", b"norms", b"files", b"model", b"privacy")
        )
        value = draw.choice(
            (
                b"-1", b"-9223372036854775808", b"9223372036854775807", b"99999999999999999999999",
                b"", b"x", b"2x", b"2 2", b"nan", b"0x2", b" ", b"9" * 5000,
                draw.randbytes(8).replace(b"\n", b""),
            )
        )
        files["manifest"] = re.sub(
            rb"(?m)^" + key + rb" .*$", lambda _: key + b" " + value, files["manifest"], count=1
        )
        self.seal(files)
        return REFUSED


# --------------------------------------------------------------------------------------------------
# Flag lines


class Flags:
    """Flags of --help with absurd values, unknown and repeated ones. Which are refused is known for
    some; the rest may be anything."""

    table = []  # (name, short letter or "", kind: number, switch, choice, text)
    LONG = (
        "model", "threads", "sample-tokens", "sample-every", "val-batches", "steps", "dry-run",
    )  # a real run with these takes as long as they say
    ABSURD = (
        "0", "1", "-1", "2147483647", "2147483648", "-2147483648", "9223372036854775807",
        "9223372036854775808", "1e12", "1e308", "1e999", "-1e308", "nan", "inf", "-inf", "0x10",
        "1e-320", "1.5", "1048576", "4096", "16777216", " 1", "1 ", "1,5", "+1", "--", "-", "=", "",
    )
    MODELS = (
        "d12",
        "gpt:100B",
        "gpt3:175B",
        "gpt2:d84",
        "layers=1,heads=1,channels=1",
        "layers=100,heads=1,channels=1048576,vocab=16777216",
        "layers=1000000000,heads=1,channels=1",
        "layers=9223372036854775807,heads=1,channels=8",
        "layers=1,heads=3,channels=8",
        "layers=1,layers=1",
        "heads=0,layers=1,channels=4",
        "layers=1,heads=1,channels=4,vocab=-1",
        "layers=1,heads=1,channels=4,",
        ",",
        "=",
        "layers",
        "layers=1,heads=1048576,channels=1048576",
    )
    CLUSTERS = (
        "1x1",
        "2x8,intra=25,inter=3,gather=1,latency=20",
        "4x2,inter=1e-6,intra=1e6,latency=1e9,half=1e9,overlap=0",
        "4096x4,intra=1,inter=1,tflops=1e-6,memory=1e6",
        "0x1",
        "16385x1,inter=1",
        "99999999999x1",
        "1x",
        "1x1,",
        "1x1,intra",
        "1x1,intra=",
        "1x1,intra=1,intra=1",
        "2x1,inter=nan",
        "2x2,inter=1",
        "1x1;",
        "1x1,overlap=2",
    )
    GARBAGE = (
        "x", "\udcff\udcfe", "\x1b[2J", "%s%n%x", "\n", "a" * 900, "a" * 901, "9" * 100000,
        "../" * 400, "\u202e", "{a,b}*", "[", "/dev/zero", "/dev/stdin", "/",
    )

    @classmethod
    def make(cls):
        out = subprocess.run(
            [BINARY, "--help", "all"], capture_output=True, text=True, env=ENVIRONMENT,
            timeout=TIMEOUT, check=True,
        ).stdout
        for name, letter, rest in re.findall(r"(?m)^  --(\S+?)(?:, -(\w+))?  +(.*)$", out):
            default, choices = re.search(r"\(default (.*)\)$", rest)[1], re.match(
                r"<(\w+(?:\|\w+)+)>", rest
            )
            number = re.fullmatch(r"-?[0-9.e-]+", default)
            kind = (
                "choice"
                if choices
                else "text" if not number else "number" if rest.startswith("<") else "switch"
            )
            cls.table.append((name, letter, kind))

    def case(self, draw, folder, good):
        """A dry run of a small model; --out and --log lead into the case's folder."""
        line = dict(
            model="layers=1,heads=1,channels=16,vocab=101",
            **{"seq-len": 8, "micro-batch": 1, "dry-run": 1, "threads": 1},
        )
        if draw.random() < 0.3:
            line = {**RUN, "steps": draw.randrange(2)}
        changed = [] if good else draw.sample(self.table, draw.choice((0, 1, 1, 2, 4)))
        if "dry-run" not in line:
            changed = [flag for flag in changed if flag[0] not in self.LONG]
        words, codes = [
            f"--{name}={value}"
            for name, value in line.items()
            if name not in [flag[0] for flag in changed]
        ], (ANYTHING if changed else TAKEN)
        insert = [self.absurd(draw, *flag) for flag in changed]
        insert += [
            draw.choice((self.unknown, self.twice, self.stray))(draw, words)
            for _ in range(0 if good else draw.choice((0, 0, 1, 2)))
        ]
        for more, refused in insert:
            at = draw.randrange(len(words) + 1)
            words[at:at] = more
            codes = REFUSED if refused or codes == REFUSED else ANYTHING
        return words, codes

    def absurd(self, draw, name, letter, kind):
        value = (
            draw.choice(self.MODELS)
            if name == "model" and draw.random() < 0.7
            else draw.choice(draw.choice((self.ABSURD, self.ABSURD, self.GARBAGE)))
        )
        if name == "cluster" and draw.random() < 0.7:
            value = draw.choice(self.CLUSTERS)
        if name in ("out", "log", "export"):
            value = "nowhere/" + value.strip("/")
        refused = (
            len(value) > 900
            or (kind in ("number", "choice", "switch") and value in self.GARBAGE)
            or (kind == "choice" and value in self.ABSURD)
        )
        return (
            [f"--{name}={value}"] if draw.random() < 0.5 or not letter else [f"-{letter}", value]
        ), refused

    def unknown(self, draw, words):
        name = "".join(
            draw.choice("abcdefghijklmnopqrstuvwxyz-_0\udcff")
            for _ in range(draw.choice((1, 3, 12, 200)))
        )
        known = {name for name, *_ in self.table} | {"help"}
        return [draw.choice((f"--{name}", f"--{name}=1", f"---{name}"))], name not in known

    def twice(self, draw, words):
        return [draw.choice(words)], False

    def stray(self, draw, words):
        return [draw.choice(("", "x", "-", "--", "=", "--=", "-=1", "\udcff", "a" * 100000))], True


# --------------------------------------------------------------------------------------------------
# Running

TARGETS = [Shard(), ShardOfTokenizer(), WideShard(), Model(), Tokenizer(), TokenizerJson()]
TARGETS += [HuggingFace(), HuggingFaceConfig(), Checkpoint(), Flags()]


def set_up():
    Flags.make()
    Checkpoint.make()
    if any(name == "hellaswag" for name, *_ in Flags.table):
        HellaSwag.base = HellaSwag.make()
        TARGETS.append(HellaSwag())


def run(words, folder):
    """Returns (exit code, stdout, stderr, resident MB); the code is None after TIMEOUT. Open MPI's
    files lie in the folder too: two singletons that begin at once would make the same one
    elsewhere."""
    with open(os.path.join(folder, "stdout"), "wb+") as out, open(
        os.path.join(folder, "stderr"), "wb+"
    ) as err:
        process = subprocess.Popen(
            [os.fsencode(BINARY), *(os.fsencode(text) for text in words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=apart(ENVIRONMENT),
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        return code, *(get(file.name).decode(errors="replace") for file in (out, err))


def complaint(code, err, codes, good=False):
    """What is wrong with the end of a run, or None. good: its input is as it should be. Other
    weights may be numbers whose loss is none."""
    messages = re.findall(r"(?m)^train_gpt: rank 0 on \S+, \w+\.[hc]:\d+: (.*)$", err)
    diverged = messages == ["the run has diverged: the last loss is not finite"]
    if diverged and 0 in codes and not good:
        codes = codes | {3}
    if code is None:
        return f"no end after {TIMEOUT} s"
    if "ERROR: AddressSanitizer" in err or "runtime error:" in err or "hard rss limit" in err:
        return "a sanitizer's report"
    if code not in codes:
        return f"exit code {code}, expected {sorted(codes)}"
    if "WARNING: AddressSanitizer" in err and code != 3:
        return "a huge allocation"
    if code and len(messages) != 1:
        return f"{len(messages)} messages"
    if code and not re.search(r"[a-zA-Z]{3}", messages[0]):
        return "an empty message"
    return None


def attempt(seed, number, target=None):
    """Runs one mutation (target given: its good input). Returns None, or the story of what went
    wrong."""
    folder = scratch()
    words, codes = (target or TARGETS[number % len(TARGETS)]).case(
        random.Random(f"{seed}/{number}"), folder, bool(target)
    )
    code, out, err = run(words, folder)
    wrong = complaint(code, err, codes, bool(target))
    shutil.rmtree(folder)
    command = shlex.join([BINARY, *words])
    return (
        wrong
        and f"{wrong}: python3 test/test_fuzz.py {seed} "
        f"{number}\n{command[:2000]!r}\n{out[-500:]}\n{err[:4000]}"
    )


def repeat_one(seed, number):
    folder = tempfile.mkdtemp()
    words, codes = TARGETS[number % len(TARGETS)].case(
        random.Random(f"{seed}/{number}"), folder, False
    )
    code, _, err = run(words, folder)
    settings = " ".join(
        f"{name}={shlex.quote(value)}"
        for name, value in ENVIRONMENT.items()
        if os.environ.get(name) != value
    )
    print(
        f"cd {folder}; {settings} {shlex.join([BINARY, *words])}".encode(
            "utf-8", "surrogateescape"
        ).decode(errors="backslashreplace")
    )
    print(
        err,
        f"exit code {code}, expected {sorted(codes)}:"
        f" {complaint(code, err, codes) or 'as it must be'}",
        sep="\n",
    )


@unittest.skipUnless(
    os.path.exists(BINARY), "build/train_gpt_sanitized is not built: make sanitize"
)
class Fuzz(unittest.TestCase):
    def check(self, cases):
        for story in at_once(lambda case: attempt(*case), cases):
            with self.subTest():
                self.assertIsNone(story, story)

    def test_good_input_is_taken(self):
        self.check([(SEED, number, target) for target in TARGETS for number in range(2)])

    def test_mutations(self):
        self.check([(SEED, number) for number in range(COUNT)])


class Absurd(unittest.TestCase):
    """Dry runs of models that nobody can hold: predicted or refused, in little memory, with numbers
    that did not overflow."""

    def dry_run(self, model, code, *more):
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        result = subprocess.run(
            [PLAIN, "--dry-run", "--json", "--model", model, *map(str, more)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=limit,
            env=apart(ENVIRONMENT),
        )
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(
            len(re.findall(r"(?m)^train_gpt: rank 0", result.stderr)), bool(code), result.stderr
        )
        return [
            int(text)
            for text in re.findall(
                r'"(?:parameters|gradients|optimizer|activations|buffers|device|host)":(-?\d+)',
                result.stdout,
            )
        ]

    def test_predicted(self):
        for model in ("gpt:100B", "gpt3:175B"):  # they do not fit here
            numbers = self.dry_run(model, EXIT_RESOURCES)
            self.assertTrue(numbers and all(0 <= number < 1 << 50 for number in numbers))

    def test_refused(self):
        for model in (
            "layers=1000000000,heads=1,channels=64",
            "layers=9223372036854775807,heads=1,channels=1",
            "layers=1,heads=1,channels=2000000",
        ):
            self.dry_run(model, EXIT_INPUT)
        largest = "layers=10000,heads=1,channels=1048576,vocab=16777216"
        self.dry_run(largest, EXIT_INPUT, "--seq-len", 1 << 20, "--micro-batch", 1 << 20)
        self.dry_run("d12", EXIT_INPUT, "--batch-tokens", 10**12, "--seq-len", 1)
        numbers = self.dry_run(largest, EXIT_RESOURCES, "--seq-len", 64, "--micro-batch", 1)
        self.assertTrue(numbers and all(0 <= number < 1 << 62 for number in numbers))


if __name__ == "__main__":
    set_up()
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        repeat_one(*map(int, sys.argv[1:]))
    else:
        harness.main()
