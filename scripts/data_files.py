"""data_files.py: what prepare_data.py writes: shards of tokens and tokenizer files
(docs/formats.md), how they appear complete or not at all, and how a run that was killed goes on.

    writers      one ShardWriter for each side (training, validation) cuts a stream into shards
    locked       one run at a time writes files of a name
    publish      gives finished files their names; the stamp file says what they were made from
    progress     a file .NAME.progress names the finished shards with their checksums, and how far
                 the unfinished ones and the input had been read. A later run with the same input
                 and arguments checks them and goes on from there

Standard library only.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import sys
from pathlib import Path

from regular_files import one_line, read_regular

SHARD_MAGIC, SHARD_VERSIONS = 20240520, {2: 1, 4: 2}  # by bytes of a token
TOKENIZER_MAGIC, TOKENIZER_VERSIONS = 20240328, {False: 2, True: 3}  # by whether one is LONG
HEADER_WORDS = 256  # int32, the unused ones zero
HEADER_BYTES = 4 * HEADER_WORDS
VOCABULARY_MOST, NARROW_VOCABULARY = 1 << 24, 1 << 16  # tokens; those that 16 bits can number
TOKEN_BYTES_MOST, TOKEN_LONG = 65535, 256  # from here on a length has two bytes, behind a zero
MIN_SHARD_TOKENS = 100  # a shard must hold a window or two

EXIT_INPUT, EXIT_RESOURCES, EXIT_STOPPED = 2, 3, 130


class Failure(Exception):
    """Ends the program with an exit status and one message."""

    def __init__(self, message, status=EXIT_INPUT):
        super().__init__(message)
        self.status = status


def note(message):
    print(one_line(f"prepare_data: {message}"), file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Formats


def header(magic, version, *words):
    return struct.pack(
        f"<{HEADER_WORDS}i", magic, version, *words, *[0] * (HEADER_WORDS - 2 - len(words))
    )


def token_width(vocabulary):
    """Bytes of a token in shards."""
    return 2 if len(vocabulary) <= NARROW_VOCABULARY else 4


def tokenizer_file(tokenizer):
    def length(token):
        few = len(token) < TOKEN_LONG
        return struct.pack("<B" if few else "<xH", len(token))

    tokens = b"".join(length(token) + token for token in tokenizer.vocabulary)
    version = TOKENIZER_VERSIONS[any(len(token) >= TOKEN_LONG for token in tokenizer.vocabulary)]
    words = len(tokenizer.vocabulary), tokenizer.end_of_text
    return header(TOKENIZER_MAGIC, version, *words) + tokens


def tokenizer_words(file):
    """What a shard says of its tokenizer: the magic of its file, the vocabulary, a hash in two
    halves.

    The hash is FNV-1a, 64 bits, of the vocabulary, the end-of-text token and all tokens, as they
    stand in the file.
    """
    value = 0xCBF29CE484222325
    for byte in file[8:16] + file[HEADER_BYTES:]:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return (
        TOKENIZER_MAGIC, *struct.unpack("<i", file[8:12]),
        *struct.unpack("<2i", struct.pack("<Q", value)),
    )


# --------------------------------------------------------------------------------------------------
# Files. All are written under a temporary name first; publish() then gives them their own.


def temporary(path):
    return path.with_name(path.name + ".tmp")


def create(path):
    """The file that becomes `path`, to be written: a new one, never what a link of its name leads
    to."""
    made = temporary(path)
    if made.is_file() and not made.is_symlink():
        made.unlink()  # what a crash left
    return open(made, "x+b")


def synced(file):
    file.flush()
    os.fsync(file.fileno())


def write_whole(path, data):
    with create(path) as file:
        file.write(data)
        synced(file)


def replace_whole(path, data):
    write_whole(path, data)
    os.replace(temporary(path), path)


def hidden(prefix, ending):
    return prefix.with_name(f".{prefix.name}.{ending}")


@contextlib.contextmanager
def locked(prefix):
    """Nobody else writes files of this name meanwhile. The lock ends with the process, however that
    ends; its workers do not have it."""
    path, flags = hidden(prefix, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as held:
        while True:
            file = os.open(path, flags, 0o666)
            held.callback(os.close, file)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise Failure(
                    f"another prepare_data.py is writing {prefix}: wait for its end, or give this"
                    " one another --name"
                ) from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    break  # else the run that had the lock has removed the file
            held.close()
        held.callback(path.unlink, missing_ok=True)
        yield


def files_of(prefix):
    """All that this program has written under this name, at any time."""
    name = re.escape(prefix.name)
    pattern = re.compile(
        rf"({name}_((train|val)_\d{{6,}}\.bin|tokenizer\.(bin|json))"
        rf"|\.{name}\.(stamp|progress|stdin))(\.tmp)?"
    )
    return [path for path in prefix.parent.iterdir() if pattern.fullmatch(path.name)]


def remove_unfinished(prefix):
    for path in files_of(prefix):
        if path.suffix in (".tmp", ".progress") and not path.is_symlink():
            path.unlink()


def publish(paths, prefix, stamp):
    """Puts finished files in place of those of an earlier run. Without its stamp a half-done
    exchange is done again."""
    hidden(prefix, "stamp").unlink(missing_ok=True)
    hidden(prefix, "progress").unlink(missing_ok=True)
    for path in paths:
        os.replace(temporary(path), path)
    for path in set(files_of(prefix)) - set(paths):
        path.unlink()
    stamp["files"] = {path.name: path.stat().st_size for path in paths}
    replace_whole(hidden(prefix, "stamp"), json.dumps(stamp, indent=1).encode())
    folder = os.open(prefix.parent, os.O_RDONLY)
    os.fsync(folder)  # the new names
    os.close(folder)


def up_to_date(prefix, stamp):
    try:
        old = json.loads(read_regular(hidden(prefix, "stamp")))
        sizes = {name: (prefix.parent / name).stat().st_size for name in old["files"]}
    except (
        OSError, ValueError, KeyError, TypeError,
    ):  # no stamp or a damaged one, or a file is gone
        return False
    return old == stamp | {"files": sizes}


# --------------------------------------------------------------------------------------------------
# Shards


class Damaged(Exception):
    """What an earlier run left is not what it says it left."""


class ShardWriter:
    """Cuts a stream of packed tokens into shards of `shard_tokens`, whose headers end with `words`.

    The last one holds what is left. It is begun only when that is MIN_SHARD_TOKENS at least: less
    joins the shard before it.
    """

    def __init__(self, prefix, shard_tokens, words, width):
        self.prefix, self.shard_tokens, self.words, self.width = prefix, shard_tokens, words, width
        self.pending = bytearray()
        self.paths, self.shards = [], []  # shards: tokens and checksum of each finished one
        self.tokens = self.documents = self.size = 0  # size: bytes of text
        self.file = None

    def begin(self):
        self.paths.append(Path(f"{self.prefix}_{len(self.paths):06d}.bin"))
        self.file = create(self.paths[-1])
        self.file.write(self.header())
        self.room, self.sum = self.shard_tokens, hashlib.sha256()

    def header(self, *words):
        return header(SHARD_MAGIC, SHARD_VERSIONS[self.width], *words)

    def put(self, tokens):
        data = self.pending[: self.width * tokens]
        self.file.write(data)
        self.sum.update(data)
        del self.pending[: self.width * tokens]
        self.tokens += tokens
        self.room -= tokens

    def finish(self):
        count = self.shard_tokens - self.room
        self.file.seek(0)
        self.file.write(self.header(count, *self.words))
        synced(self.file)
        self.file.close()
        self.file = None
        self.shards.append([count, self.sum.hexdigest()])

    def held(self):
        return len(self.pending) // self.width

    def received(self):
        """Tokens, those that wait for the next shard too."""
        return self.tokens + self.held()

    def write(self, packed):
        if not self.file:
            self.begin()
        self.pending += packed
        while self.held() >= self.room + MIN_SHARD_TOKENS:
            self.put(self.room)
            self.finish()
            self.begin()
        self.put(min(self.held(), self.room))

    def close(self):
        if self.file:
            self.put(self.held())
            self.finish()

    def state(self):
        """What restore() needs; all of it is on the disk."""
        if self.file:
            synced(self.file)
        return {
            "shards": self.shards,
            "count": self.shard_tokens - self.room if self.file else None,
            "sum": self.sum.hexdigest() if self.file else None,
            "pending": self.pending.hex(),
            "total": [self.tokens, self.documents, self.size],
        }

    def restore(self, state):
        """Goes on where another writer was in this state. Checks every byte that it left."""
        for count, digest in state["shards"]:
            self.reopen(count, digest)
            self.file.seek(0)
            if self.file.read(HEADER_BYTES) != self.header(count, *self.words):
                raise Damaged(f"the header of {self.paths[-1].name}.tmp")
            self.file.close()
            self.file = None
            self.shards.append([count, digest])
        if state["count"] is not None:
            self.reopen(state["count"], state["sum"])
            self.room = self.shard_tokens - state["count"]
        self.pending = bytearray.fromhex(state["pending"])
        self.tokens, self.documents, self.size = state["total"]

    def reopen(self, count, digest):
        """The next shard, cut after `count` tokens, with the writing position behind them."""
        self.paths.append(Path(f"{self.prefix}_{len(self.paths):06d}.bin"))
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file = os.fdopen(os.open(temporary(self.paths[-1]), flags), "r+b")
        self.sum, left = hashlib.sha256(), self.width * count
        self.file.seek(HEADER_BYTES)
        while data := self.file.read(min(left, 1 << 20)):
            self.sum.update(data)
            left -= len(data)
        if left or self.sum.hexdigest() != digest:
            raise Damaged(f"{self.paths[-1].name}.tmp")
        self.file.truncate(HEADER_BYTES + self.width * count)
        self.file.seek(0, os.SEEK_END)


# --------------------------------------------------------------------------------------------------
# Going on after a kill


def save_progress(prefix, progress):
    replace_whole(hidden(prefix, "progress"), json.dumps(progress).encode())


def checksum(path):
    """Of a file that is not finished; None if there is none."""
    try:
        return hashlib.sha256(read_regular(temporary(path), None)).hexdigest()
    except FileNotFoundError:
        return None


def load_progress(prefix, stamp):
    """What a run with this stamp had saved, or None."""
    try:
        progress = json.loads(read_regular(hidden(prefix, "progress")))
        return progress if progress["stamp"] == stamp and "json" in progress else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
