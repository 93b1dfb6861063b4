"""text_sources.py: where prepare_data.py finds documents.

    Document     a plain text file, or a range of its bytes; read in pieces, whatever its size
    Item         a document, or a piece of one, for the tokenizer
    Source       something that gives blocks in an order that never changes, so that a later run
                 can skip those that an earlier one has used: whole documents, a file of records (a
                 text file that is cut into documents, JSON lines), a table (Parquet, Arrow)
    Block        about BLOCK bytes of a source, which a worker turns into documents: documents_of()

Memory does not grow with files: of a file of records one block is in memory, or one record where it
is larger than that. Files may be compressed (.gz, .zst).
"""

import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import re
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data_files import Failure
from regular_files import open_regular
from text_tokenizers import need_package

BLOCK = 1 << 20  # bytes of text in memory at a time
RECORD_MOST = 1 << 28  # bytes of a record
PIECE_MOST = 1 << 22  # characters of a text that wait for a place where it can be cut
WINDOW_MOST = 1 << 31  # bytes that a .zst file may look back: zstd --long=31
ROWS = 64  # of a table at a time
CONTEXT = 256  # characters before a piece of a text, which a tokenizer sees with it
MARK, WIDE_MARKS = codecs.BOM_UTF8, (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Why bytes of a file do not come back from its tokens.
NO_MARK, NO_UTF8 = "of a byte order mark, left out", "that are no UTF-8, replaced by U+FFFD"
BAD_RECORD = "of records that cannot be read, left out"

SPOOL = ".stdin"  # ending of the file that holds standard input
COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
# Of a folder of the Hugging Face library datasets: facts about the files of the table.
DATASET_FACTS = ("dataset_info.json", "state.json", "dataset_dict.json")
# Endings of files that hold text, but not as it is: trained on as they are, they would teach their
# own syntax.
UNREAD = frozenset(
    ".feather .avro .orc .csv .tsv .tfrecord .tfrecords .warc .bz2 .xz .lzma .zstd .lz4 .br .z"
    "".split()
)
# Endings of files that hold other files, whatever those are.
ARCHIVES = frozenset(".tar .tgz .tbz .tbz2 .txz .tlz .tzst .zip .7z .rar .cpio .jar .whl".split())


def open_input(path):
    try:
        return open_regular(path)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error


def file_size(path):
    try:
        return path.stat().st_size
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error


def kind_of(path):
    """The ending that says how a file is read, in small letters, without .gz and .zst."""
    path = Path(path)
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path.name).suffix.lower()


def is_archive(path):
    """Also where it is compressed: .tar.gz, .tar.bz2."""
    *_, before, last = ["", "", *Path(path).suffixes]
    packed = last.lower() in UNREAD or last.lower() in COMPRESSED
    return last.lower() in ARCHIVES or (packed and before.lower() in ARCHIVES)


def is_hidden(path, folder):
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


# --------------------------------------------------------------------------------------------------
# Compressed files


class ZstdReader(io.RawIOBase):
    """The text of a .zst file. The package's own reader takes a cut file for a whole one."""

    INPUT = 1 << 14  # bytes; a few may stand for many

    def __init__(self, file):
        need_package("a .zst file", "zstandard")
        self.file, self.frame, self.held = file, None, b""
        self.package = importlib.import_module("zstandard")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.held:
            data = self.frame.unused_data if self.frame and self.frame.eof else b""
            data = data or self.file.read(self.INPUT)
            if not data:
                if self.frame and not self.frame.eof:
                    raise EOFError("it ends inside of a frame")
                return 0
            if not self.frame or self.frame.eof:
                decompressor = self.package.ZstdDecompressor(max_window_size=WINDOW_MOST)
                self.frame = decompressor.decompressobj()
            try:
                self.held = self.frame.decompress(data)
            except self.package.ZstdError as error:
                raise zlib.error(self.reason(str(error))) from error
        count = min(len(buffer), len(self.held))
        buffer[:count], self.held = self.held[:count], self.held[count:]
        return count

    @staticmethod
    def reason(said):
        if "too much memory" not in said:
            return said
        return f"its window is larger than {WINDOW_MOST} bytes: compress it with zstd --long=31"


@contextlib.contextmanager
def plain_bytes(path):
    """Gives (the text of a file as bytes, a function that says how far the file was read)."""
    with open_input(path) as file:
        ending = Path(path).suffix.lower()
        if ending == ".gz":
            yield gzip.GzipFile(fileobj=file), file.tell
        elif ending == ".zst":
            yield io.BufferedReader(ZstdReader(file), BLOCK), file.tell
        else:
            yield file, file.tell


@contextlib.contextmanager
def named_failures(place):
    """A file that is cut off or damaged is bad input; place() says where."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Failure(f"{place()}: cut off or damaged: {error}") from error


# --------------------------------------------------------------------------------------------------
# Plain text


def add_lost(lost, more):
    """Adds to {file: {why: bytes that the tokens do not give back}}."""
    for path, reasons in more.items():
        known = lost.setdefault(path, {})
        for why, count in reasons.items():
            known[why] = known.get(why, 0) + count


@dataclass
class Document:
    path: Path
    begin: int  # the range of bytes in the file, of a compressed one in what it holds
    end: int | None  # None: not known before it was read
    size: int = 0  # bytes of the text as it will be tokenized
    digest: str = ""  # of the same
    unread: str = ""  # why it is not taken for text
    lost: int = 0  # bytes that are not in the text as they are in the file

    @property
    def title(self):
        name = self.path.name if self.path.suffix != SPOOL else self.source
        return name.removesuffix("_gut.txt") + (" (its end)" if self.begin else "")

    @property
    def source(self):
        return "standard input" if self.path.suffix == SPOOL else str(self.path)

    def pieces(self, whole=False, lost=None):
        """Yields the text piece by piece, or `whole` for a tokenizer that must see it so. `lost`
        gets {why: bytes that are not in the text as they are in the file}."""
        lost, held, parts, size = {} if lost is None else lost, "", [], 0
        for text, last in self.texts(lost):
            if whole:
                parts.append(text)
                size += len(text)
                if size > RECORD_MOST:
                    raise Failure(
                        f"{self.source}: longer than {RECORD_MOST} characters, and this tokenizer"
                        " has tokens across words: it cannot be tokenized in pieces"
                    )
                if not last:
                    continue
                text = "".join(parts)
            begin, text = len(held), held + text
            cut = len(text) if last else last_word(text, begin)
            held = text[cut:]
            if cut:
                text, bad = readable(text[:cut])
                if bad:
                    lost[NO_UTF8] = lost.get(NO_UTF8, 0) + bad
                yield text

    def texts(self, lost):
        """(text, whether it is the last one) of each block; bytes that are no UTF-8 are surrogates
        in it."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        for i, (block, last) in enumerate(self.blocks()):
            if not i and not self.begin:
                if block.startswith(WIDE_MARKS):
                    self.unread = "UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)"
                if block.startswith(MARK):
                    lost[NO_MARK] = len(MARK)
                block = block.removeprefix(MARK)
            yield decoder.decode(block, final=last), last

    def blocks(self):
        """(bytes, whether they are the last ones)."""
        left, at = sys.maxsize if self.end is None else self.end - self.begin, self.begin
        with plain_bytes(self.path) as (file, _), named_failures(lambda: self.path):
            skip(file, self.begin)
            block = file.read(min(left, BLOCK))
            while left:
                left, at = left - len(block), at + len(block)
                if not block and self.end is not None:
                    raise Failure(f"{self.path}: became shorter while it was read")
                following = file.read(min(left, BLOCK)) if left else b""
                last = not left or (self.end is None and not following)
                self.end = at if last else self.end
                yield block, last
                if last:
                    return
                block = following

    def before(self, place, size):
        """`size` bytes of the file before a place."""
        with plain_bytes(self.path) as (file, _), named_failures(lambda: self.path):
            skip(file, place - size)
            return file.read(size)


def skip(file, count):
    """Goes to a place in a file from its begin; a compressed one must be read up to there."""
    if file.seekable():
        file.seek(count)
        return
    while count and (data := file.read(min(count, BLOCK))):
        count -= len(data)


def readable(text):
    """(text, bytes of it that are no UTF-8, which become U+FFFD) of a text in which surrogates
    stand for such bytes."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogateescape")
        return data.decode("utf-8", "replace"), len(re.findall("[\udc80-\udcff]", text))


# Where a text can be cut.
WORD = re.compile(r".*\S(?= [^\W\d_])", re.DOTALL)
SPACE = re.compile(r".*(?=[ \n]\S)", re.DOTALL)
SIGNS = r"[!-&(-/:-@[-^`{-~\u3001\u3002\uff01-\uff0f\uff1a\uff1b\uff1f]"
SIGN = re.compile(rf".*[^\W\d_](?={SIGNS})", re.DOTALL)
LETTER = re.compile(r".+(?=\w)", re.DOTALL)


def last_word(text, begin=0):
    """Where a text can be cut: before the last space between a word and a letter, where every
    tokenizer begins a token; 0: nowhere. What is before `begin` was searched before. In a long text
    without one it is before any white space and a character, where GPT-2's does. A text without
    white space is cut between a letter and a sign, where almost all do, else at a letter."""
    border = WORD.match(text, max(0, begin - 2))
    if not border and len(text) > min(16 * BLOCK, PIECE_MOST):
        border = SPACE.match(text)
    if not border and len(text) > PIECE_MOST:
        border = SIGN.match(text) or LETTER.match(text)
    return border.end() if border else len(text) if len(text) > PIECE_MOST else 0


def measured(document):
    """Fills in size, digest, what is lost and whether it is no text (has a NUL byte); the end, too,
    where it is not known."""
    digest, lost = hashlib.sha256(), {}
    for text in document.pieces(lost=lost):
        if "\0" in text:
            document.unread = document.unread or "binary"
        data = text.encode()
        document.size += len(data)
        digest.update(data)
    document.digest, document.lost = digest.hexdigest(), sum(lost.values())
    return document


def document_of(path):
    """A plain text file as one document."""
    is_compressed = path.suffix.lower() in COMPRESSED
    return measured(Document(path, 0, None if is_compressed else file_size(path)))


def last_border(text):
    for border in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        if border in text:
            return text.rindex(border) + len(border)
    # No white space: where a character begins (10xxxxxx are the later bytes of one).
    return max((i for i, byte in enumerate(text) if byte & 0xC0 != 0x80), default=0)


# --------------------------------------------------------------------------------------------------
# Blocks


class Item(NamedTuple):
    side: str | None  # None: chosen later
    data: object  # text, or an image
    size: int  # bytes of it
    path: str
    before: str | None = None  # the end of the piece before this one; None: it begins a document


@dataclass
class Block:
    kind: str  # a row of READERS, or "items"
    data: object
    path: str = ""
    first: int = 1  # number of the first record
    read: int = 0  # bytes of the source that were read so far
    place: tuple = ()  # number of the source; how many of its blocks are behind this one's end
    lost: dict = field(default_factory=dict)  # {file: {why: bytes that were lost in reading}}


class Documents:
    """A source: documents whose side is known; their items are pieces of text, or images."""

    whole = False  # whether the tokenizer must see whole documents

    def __init__(self, sides):
        self.sides = sides  # {side: documents}
        self.path, self.bytes = "", sum(d.size for documents in sides.values() for d in documents)

    def items(self):
        """(item, {why: bytes that were lost in reading}) of all documents."""
        for side, documents in self.sides.items():
            for document in documents:
                before, lost = None, {}
                for data in document.pieces(self.whole, lost):
                    is_text = isinstance(data, str)
                    size = len(data.encode()) if is_text else len(data)
                    yield Item(side, data, size, document.source, before), {**lost}
                    lost.clear()
                    before = data[-CONTEXT:] if is_text else None

    def blocks(self):
        block, held = Block("items", []), 0
        for item, lost in self.items():
            block.data.append(item)
            if lost:
                add_lost(block.lost, {item.path: lost})
            held += len(item.data)
            if held >= BLOCK:
                block.read += held
                yield block
                block, held = Block("items", [], read=block.read), 0
        if block.data:
            block.read += held
            yield block


class LateDocument(Documents):
    """A source: a text file among files of records. `choose` gives the side of a digest."""

    def __init__(self, path, choose):
        self.path, self.bytes, self.choose = path, file_size(path), choose

    def blocks(self):
        document = document_of(self.path)
        if document.unread:
            raise Failure(f"{self.path}: no text, but {document.unread}")
        self.sides = {self.choose(document.digest): [document]}
        yield from super().blocks()


class Records:
    """A source: a file of records that end with `separator`."""

    def __init__(self, path, kind, separator=b"\n", file=None):
        self.path, self.kind, self.separator, self.file = path, kind, separator, file
        self.bytes = 0 if file else file_size(path)

    def opened(self):
        if self.file:
            return contextlib.nullcontext((self.file, lambda: 0))
        return plain_bytes(self.path)

    def blocks(self):
        held, first, lost, begins = bytearray(), 1, {}, True
        with self.opened() as (file, read), named_failures(lambda: f"{self.path}: record {first}"):
            while data := file.read(BLOCK):
                if begins and data.startswith(MARK):
                    data = data[len(MARK) :]
                    lost = {str(self.path): {NO_MARK: len(MARK)}} if self.kind != "json" else {}
                begins = False
                searched = max(0, len(held) - len(self.separator) + 1)
                held += data
                cut = held.rfind(self.separator, searched) + len(self.separator)
                if cut < len(self.separator):
                    if len(held) > RECORD_MOST:
                        raise Failure(
                            f"{self.path}: record {first}: longer than {RECORD_MOST} bytes"
                        )
                    continue
                block = bytes(held[:cut])
                yield Block(self.kind, block, str(self.path), first, read(), lost=lost)
                lost = {}
                first += block.count(self.separator)
                del held[:cut]
            if held:
                yield Block(self.kind, bytes(held), str(self.path), first, read(), lost=lost)


class Table:
    """A source: the column `key` of a Parquet or Arrow file."""

    def __init__(self, path, key):
        need_package(f"{path}: a {kind_of(path)} file", "pyarrow")
        self.path, self.key, self.bytes = path, key, file_size(path)

    def batches(self, pyarrow):
        """(schema, what gives its batches, the number of rows; 0: unknown)."""
        if kind_of(self.path) == ".parquet":
            parquet = importlib.import_module("pyarrow.parquet")
            file = parquet.ParquetFile(self.path, buffer_size=BLOCK)
            batches = lambda: file.iter_batches(ROWS, columns=[self.key], use_threads=False)
            return file.schema_arrow, batches, file.metadata.num_rows
        file = pyarrow.memory_map(str(self.path))
        try:
            stream = pyarrow.ipc.open_stream(file)
            return stream.schema, lambda: iter(stream), 0
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(file)
            numbers = range(table.num_record_batches)
            return table.schema, lambda: map(table.get_batch, numbers), 0

    def blocks(self):
        pyarrow, held, size, first, count = importlib.import_module("pyarrow"), [], 0, 1, 0
        try:
            schema, batches, rows = self.batches(pyarrow)
            self.check(schema)
            for batch in batches():
                column = batch.column(self.key)
                for at in range(0, len(column), ROWS):
                    texts = column.slice(at, ROWS).to_pylist()
                    held += texts
                    size += sum(len(text or "") for text in texts)
                    count += len(texts)
                    if size >= BLOCK:
                        read = self.bytes * count // rows if rows else 0
                        yield Block("texts", held, str(self.path), first, read)
                        held, size, first = [], 0, count + 1
        except (OSError, ValueError, pyarrow.ArrowException) as error:  # ArrowInvalid: ValueError
            said = str(error).split("\n")[0][:200]
            raise Failure(f"{self.path}: record {count + 1}: cut off or damaged: {said}") from error
        if held:
            yield Block("texts", held, str(self.path), first, self.bytes)

    def check(self, schema):
        index = schema.get_field_index(self.key)
        if index < 0:
            columns = ", ".join(schema.names[:20])
            raise Failure(f"{self.path}: no column {self.key!r}: --text-key names one of {columns}")
        kind = schema.field(index).type
        if not TEXT_KIND.fullmatch(str(stored_kind(kind))):
            raise Failure(f"{self.path}: column {self.key!r} is {kind}, not text")


# Arrow's names of the kinds of texts, and of bytes, which must be UTF-8.
TEXT_KIND = re.compile(r"(large_)?(string|binary)|(string|binary)_view|fixed_size_binary\[\d+\]")


def stored_kind(kind):
    """The kind of what is stored: of an extension, in a dictionary, or once for a run of rows."""
    if hasattr(kind, "storage_type"):
        return stored_kind(kind.storage_type)
    repeats = hasattr(kind, "index_type") or hasattr(kind, "run_end_type")
    return stored_kind(kind.value_type) if repeats else kind


def blocks_of(sources, place):
    """The blocks of all sources, from a place on; bytes that were read count through all."""
    before = sum(source.bytes for source in sources[: place[0]])
    for number in range(place[0], len(sources)):
        skipped = place[1] if number == place[0] else 0
        for i, block in enumerate(sources[number].blocks(), 1):
            if i > skipped:
                block.place, block.read = (number, i), before + block.read
                yield block
        before += sources[number].bytes


# --------------------------------------------------------------------------------------------------
# Records: what a worker makes of a block. Each gives texts, or the reason why one cannot be read.


@dataclass
class Rules:
    """How records are read, and on which side their documents are."""

    key: str
    split: str  # the written end of text at which they are cut; empty: none
    skip: bool  # records that cannot be read
    fraction: float | None  # of documents held out; None: their sides are chosen later

    def side(self, digest):
        """Of a hexadecimal digest: equal documents are on one side."""
        if self.fraction is None:
            return None
        return "val" if int(digest[:16], 16) < self.fraction * 2**64 else "train"


class Bad(Exception):
    """A record that cannot be read."""


def json_text(line, rules):
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise Bad(f"no JSON object in one line: {error}") from error
    if not isinstance(record, dict):
        raise Bad("no JSON object, but another value")
    if rules.key not in record:
        names = ", ".join(list(record)[:10])
        raise Bad(f"no key {rules.key!r}: --text-key names one of {names}"[:300])
    return record[rules.key]


def plain_text(line, rules):
    return line.decode().removesuffix("\r")


def column_text(value, rules):
    return value.decode() if isinstance(value, bytes) else value


# kind of a block: (how its data are cut into records, how a record becomes text)
READERS = {
    "json": (lambda data, rules: data.split(b"\n"), json_text),
    "lines": (lambda data, rules: data.split(b"\n"), plain_text),
    "parts": (lambda data, rules: data.split(rules.split.encode()), plain_text),
    "texts": (lambda data, rules: data, column_text),
}


def documents_of(block, rules, forbidden, bad):
    """The documents of a block of records. Reasons why one cannot be read go to bad(), with its
    bytes; it raises Failure or does not."""
    cut, read = READERS[block.kind]
    records = cut(block.data, rules)
    for number, record in enumerate(records, block.first):
        if block.kind != "texts" and not record.strip():
            continue  # an empty line, or what is behind the last separator
        try:
            text = read(record, rules)
            if not isinstance(text, str):
                raise Bad(f"{rules.key!r} is no text")
            if forbidden and forbidden in text:
                raise Bad(f"the text has the character {forbidden!r}, which ends texts")
        except (Bad, UnicodeDecodeError) as error:
            reason = error if isinstance(error, Bad) else "no UTF-8"
            data = record if isinstance(record, bytes) else str(record).encode(errors="replace")
            bad(f"{block.path}: record {number}: {reason}", len(data))
            continue
        for part in text.split(rules.split) if rules.split else [text]:
            part = part.strip("\r\n") if rules.split else part
            if part:
                yield part


# --------------------------------------------------------------------------------------------------
# Which source reads a file


def source_of(path, rules, per_line):
    """The source of a file among files of records."""
    kind = kind_of(path)
    if kind in TABLES:
        return Table(path, rules.key)
    if kind in JSON_LINES:
        return Records(path, "json")
    if per_line:
        return Records(path, "lines")
    if rules.split:
        return Records(path, "parts", rules.split.encode())
    return LateDocument(path, rules.side)


def has_records(path):
    return kind_of(path) in TABLES + JSON_LINES


class Rejoined:
    """A stream whose begin has been read."""

    def __init__(self, begin, file):
        self.begin, self.file = io.BytesIO(begin), file

    def read(self, size):
        data = self.begin.read(size)
        return data + self.file.read(size - len(data)) if len(data) < size else data


def standard_input(rules, per_line, spool):
    """A source of JSON lines if its first sign is {, behind white space and a byte order mark; else
    the file `spool`, with the text, or a source that cuts it into documents."""
    file, begin, sign = sys.stdin.buffer, bytearray(), b""
    while not sign and len(begin) < RECORD_MOST and (data := file.read(BLOCK)):
        begin += data
        sign = data.lstrip(MARK + b" \t\r\n")[:1]
    file = Rejoined(begin, file)
    if sign == b"{":
        return Records("standard input", "json", file=file)
    if per_line:
        return Records("standard input", "lines", file=file)
    if rules.split:
        return Records("standard input", "parts", rules.split.encode(), file)
    with open(spool, "wb") as copy:
        while data := file.read(BLOCK):
            copy.write(data)
    return spool


def identity(path):
    """What tells that a file is the same as before, without reading it."""
    info = os.stat(path)
    return f"{os.path.abspath(path)} {info.st_size} {info.st_mtime_ns}"
