#!/usr/bin/env python3
"""ngram.py: bits per byte of held-out text under simple models: what a network has to beat.

    .venv/bin/python scripts/ngram.py data/english [--order 5]

Reads NAME_train_*.bin, NAME_val_*.bin and NAME_tokenizer.bin (docs/formats.md) and prints the bits
per byte of the validation text for
  - an n-gram model of the tokens with interpolated Kneser-Ney smoothing (Chen and Goodman 1999,
    one discount for each order), counted on the training tokens, for each order up to --order;
  - gzip -9 and xz -9e of the validation text alone, which know nothing of the training text.

The text is the bytes of all tokens but the end of text; the n-gram model predicts the end of text
as well, as train_gpt does. So bits per byte = loss x tokens / (ln 2 x bytes).
"""

import argparse
import glob
import gzip
import lzma
import math
import struct
import sys

import numpy as np

from data_files import EXIT_INPUT, SHARD_MAGIC, SHARD_VERSIONS, TOKENIZER_MAGIC
from regular_files import one_line, read_regular

HEADER = 1024


class Bad(Exception):
    """A file that is none of prepare_data.py's."""


def tokens_of(pattern):
    parts, widths = [], {version: width for width, version in SHARD_VERSIONS.items()}
    for path in sorted(glob.glob(pattern)):
        data = read_regular(path, None)
        magic, version, count = struct.unpack("<3i", data[:12]) if len(data) > HEADER else (0, 0, 0)
        width = widths.get(version, 0)
        if magic != SHARD_MAGIC or not width or len(data) != HEADER + width * count:
            raise Bad(f"{path}: no shard of tokens")
        parts.append(np.frombuffer(data, f"<u{width}", offset=HEADER))
    if not parts:
        raise Bad(f"no file {pattern}")
    return np.concatenate(parts).astype(np.int64)


def vocabulary_of(path):
    data = read_regular(path)
    magic, _, size, end = struct.unpack("<4i", data[:16]) if len(data) > HEADER else (0, 0, 0, 0)
    place, texts = HEADER, []
    while magic == TOKENIZER_MAGIC and len(texts) < size and place + 2 < len(data):
        (length,), place = data[place : place + 1], place + 1
        if not length:  # a long one
            (length,), place = struct.unpack("<H", data[place : place + 2]), place + 2
        texts.append(data[place : place + length])
        place += length
    if len(texts) != size or place != len(data) or not 0 <= end < size:
        raise Bad(f"{path}: no tokenizer file")
    return texts, end


def numbered(context, tokens, size):
    """(the different n-grams, the number of the one that ends at each place): an n-gram is the
    number of its first n - 1 tokens, times the vocabulary, and its last token."""
    keys, numbers = np.unique(context * size + tokens, return_inverse=True)
    return keys, numbers.astype(np.int32)


def found(keys, context, tokens, size):
    """The number of the n-gram that ends at each place of another text; -1 if there is none."""
    wanted = np.where(context < 0, -1, context * size + tokens)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def levels(train, held, size, order):
    """Of each n: the number of contexts, and for each n-gram of the training text its context, how
    often it is there, and in how many contexts one token before it; and the context and the n-gram
    at each place of the held-out text. Both texts are circles, so each place has a context."""
    made, numbers, there, contexts = [], np.zeros(len(train), np.int32), np.zeros(len(held), int), 1
    for _ in range(order):
        before, held_before = np.roll(numbers, 1).astype(np.int64), np.roll(there, 1)
        keys, longer = numbered(before, train, size)
        if made:  # each different longer n-gram is one context of the shorter one that it ends with
            shorter = np.zeros(len(keys), np.int32)
            shorter[longer] = numbers
            made[-1]["widths"] = np.bincount(shorter, minlength=len(made[-1]["counts"]))
        numbers, there = longer, found(keys, held_before, held, size)
        made.append(
            {
                "contexts": contexts,
                "owner": keys // size,
                "counts": np.bincount(numbers),
                "held": (held_before, there),
            }
        )
        contexts = len(keys)
    return made


def discount_of(counts):
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return once / (once + 2 * twice) if once else 0.5


def probabilities(made, order, size):
    """Of each held-out token, behind the order - 1 tokens before it:

    P(w|h) = (max(c(hw) - D, 0) + D N(h) P(w|h')) / c(h), where h' lacks h's first token and N(h)
    counts the different tokens behind h. Orders below the highest count in how many contexts hw
    was seen instead of how often.
    """
    p = np.full(len(made[0]["held"][0]), 1 / size)
    for n, level in enumerate(made[:order], 1):
        counts = level["counts" if n == order else "widths"]
        total = np.bincount(level["owner"], counts, level["contexts"])
        different = np.bincount(level["owner"], minlength=level["contexts"])
        discount = discount_of(counts)
        context, gram = level["held"]
        count = np.where(gram >= 0, counts[np.maximum(gram, 0)], 0)
        rest = discount * different[np.maximum(context, 0)] * p
        q = (np.maximum(count - discount, 0) + rest) / total[np.maximum(context, 0)]
        p = np.where(context >= 0, q, p)
    return p


def model(train, held, size, order):
    """Yields n and the bits of the held-out tokens, for each order n."""
    made = levels(train, held, size, order)
    for n in range(1, order + 1):
        yield n, float(-np.log2(probabilities(made, n, size)).sum())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="what the names of the files begin with")
    parser.add_argument("--order", type=int, default=5)
    options = parser.parse_args()
    try:
        train, held = (tokens_of(f"{options.name}_{side}_*.bin") for side in ("train", "val"))
        texts, end = vocabulary_of(f"{options.name}_tokenizer.bin")
        if max(train.max(), held.max()) >= len(texts) or (held == end).all():
            raise Bad(f"{options.name}: tokens of another tokenizer, or no text")
    except (Bad, OSError) as error:
        print(one_line(f"ngram.py: {error}"), file=sys.stderr)
        sys.exit(EXIT_INPUT)
    text = b"".join(texts[token] for token in held.tolist() if token != end)
    print(f"training {len(train)} tokens; validation {len(held)} tokens, {len(text)} bytes")
    for name, size in (
        ("gzip -9", len(gzip.compress(text, 9))),
        ("xz -9e", len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))),
    ):
        print(f"{name}: {8 * size / len(text):.4f} bits per byte", flush=True)
    for n, bits in model(train, held, len(texts), options.order):
        print(
            f"{n}-gram: {bits / len(text):.4f} bits per byte,"
            f" loss {bits * math.log(2) / len(held):.4f} per token"
        )


if __name__ == "__main__":
    main()
