"""model_files.py: the two kinds of file that to_huggingface.py and from_huggingface.py turn into
each other.

    model file     llm.c's, which the program reads and writes (docs/formats.md)
    safetensors    8 bytes: the length of a header; the header, JSON: name -> dtype, shape, [begin,
                   end); the data. A model
                   in several such files has an index, JSON: name -> file

Both are read as {GPT-2's name of a tensor: array}, the arrays being views of the mapped file:
nothing is in memory before it is used, so a model of any size takes that of its largest tensor.
Arrays have the shapes that Hugging Face gives them. Files are untrusted: every length, shape and
offset is checked before it is believed.
"""

import contextlib
import fcntl
import json
import math
import os
import sys
from typing import NamedTuple

try:
    import numpy as np
except ImportError:
    print(
        "this needs numpy: scripts/setup.sh python gets it, then call .venv/bin/python scripts/...",
        file=sys.stderr,
    )
    sys.exit(3)

from regular_files import open_regular

EXIT_INPUT, EXIT_RESOURCES = 2, 3
HEADER_BYTES = 1024
MODEL_MAGIC = 20240326
VERSIONS = {3: "F32", 5: "BF16"}  # of model files
DTYPES = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
}  # numpy has no bf16: its bits
VOCAB_PADDING = (
    128  # the program rounds a vocabulary up to a multiple, and keeps the rows added at zero
)
HEADER_MOST = 100_000_000  # bytes of a safetensors header, as the library has it


class Failure(Exception):
    """Ends the program with an exit status and one message."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def main_of(name, run):
    """Runs a script's run(); returns its exit status, after at most one message."""
    try:
        run()
    except Failure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        return failure.status
    except (
        OSError,
        MemoryError,
    ) as error:  # input that cannot be read is a Failure: what is left is the disk
        print(f"{name}: {error or 'out of memory'}", file=sys.stderr)
        return EXIT_RESOURCES
    return 0


# --------------------------------------------------------------------------------------------------
# The model


class Config(NamedTuple):
    """Words 2 to 7 of a model file's header."""

    positions: int
    vocab: int
    layers: int
    heads: int
    channels: int
    padded_vocab: int

    def check(self, path):
        """The program's own limits (gpt_config_check in gpt.h)."""
        most = Config(1 << 24, 1 << 24, 10000, 1 << 20, 1 << 20, 1 << 25)
        if (
            min(self) < 1
            or any(a > b for a, b in zip(self, most))
            or self.channels % self.heads
            or self.padded_vocab < self.vocab
        ):
            raise Failure(EXIT_INPUT, f"{path}: an impossible model: {self}")
        return self


class Tensor(NamedTuple):
    name: str  # GPT-2's, with {} for the layer
    shape: tuple  # in the model file, of one layer

    @property
    def layered(self):
        return "{}" in self.name

    def names(self, config):
        return (
            [self.name.format(layer) for layer in range(config.layers)]
            if self.layered
            else [self.name]
        )

    def their_shape(self, config):
        """Hugging Face's: no padded vocabulary, and a block's matrices are (in, out)."""
        rows = config.vocab if self.name == "wte.weight" else self.shape[0]
        return self.shape[::-1] if self.layered else (rows, *self.shape[1:])


def tensors(config):
    """The tensors in the order of a model file."""
    C = config.channels
    layer = [
        ("ln_1.weight", (C,)),
        ("ln_1.bias", (C,)),
        ("attn.c_attn.weight", (3 * C, C)),
        ("attn.c_attn.bias", (3 * C,)),
        ("attn.c_proj.weight", (C, C)),
        ("attn.c_proj.bias", (C,)),
        ("ln_2.weight", (C,)),
        ("ln_2.bias", (C,)),
        ("mlp.c_fc.weight", (4 * C, C)),
        ("mlp.c_fc.bias", (4 * C,)),
        ("mlp.c_proj.weight", (C, 4 * C)),
        ("mlp.c_proj.bias", (C,)),
    ]
    return [
        Tensor("wte.weight", (config.padded_vocab, C)),
        Tensor("wpe.weight", (config.positions, C)),
        *(Tensor("h.{}." + name, shape) for name, shape in layer),
        Tensor("ln_f.weight", (C,)),
        Tensor("ln_f.bias", (C,)),
    ]


# --------------------------------------------------------------------------------------------------
# Files in general


def map_file(path, least):
    """The bytes of a file, mapped, and at least so many."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < least:
                raise Failure(EXIT_INPUT, f"{path}: cut off: {size} bytes are less than a header")
            return np.memmap(file, mode="r")
    except OSError as error:
        raise Failure(EXIT_INPUT, f"{path}: {error.strerror.lower()}") from error


def read_json(path, data):
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise Failure(EXIT_INPUT, f"{path}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise Failure(EXIT_INPUT, f"{path}: expected a JSON object")
    return found


@contextlib.contextmanager
def replacing(path):
    """A file to be written, which appears at `path` complete or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with alone(temporary) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # Ctrl-C too
            temporary.unlink(missing_ok=True)
            raise


def alone(path):
    """A new file, never what a link leads to. What a crash left is removed first; a file that
    another process is writing is refused, as this one is to others."""
    taken = Failure(EXIT_INPUT, f"{path}: another program is writing it")
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_file() and not path.is_symlink():
        with open(os.open(path, os.O_RDONLY | flags), "rb") as left:
            lock(left, taken)
            path.unlink(missing_ok=True)
    file = open(path, "xb")
    lock(file, taken)
    if not os.fstat(file.fileno()).st_nlink:
        raise taken
    return file


def lock(file, taken):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken from None


# --------------------------------------------------------------------------------------------------
# Model files


def read_model(path):
    """Returns (Config, {name: view of Hugging Face's shape})."""
    data = map_file(path, HEADER_BYTES)
    magic, version, *rest = data[:32].view("<i4").tolist()
    if magic != MODEL_MAGIC or version not in VERSIONS:
        raise Failure(
            EXIT_INPUT,
            f"{path}: expected a model file (magic {MODEL_MAGIC}, version 3 or 5), found magic"
            f" {magic}, version {version}",
        )
    config, dtype = Config(*rest).check(path), DTYPES[VERSIONS[version]]
    parameters = sum(
        math.prod(tensor.shape) * len(tensor.names(config)) for tensor in tensors(config)
    )
    if data.size != HEADER_BYTES + parameters * dtype.itemsize:
        raise Failure(
            EXIT_INPUT,
            f"{path}: expected {HEADER_BYTES + parameters * dtype.itemsize} bytes, found"
            f" {data.size}: cut off or damaged",
        )
    views, values = {}, data[HEADER_BYTES:].view(dtype)
    for tensor in tensors(config):
        for name in tensor.names(config):
            view, values = (
                values[: math.prod(tensor.shape)].reshape(tensor.shape),
                values[math.prod(tensor.shape) :],
            )
            views[name] = (
                view.T if tensor.layered else view[: config.vocab] if name == "wte.weight" else view
            )
    return config, views


def converted(array, dtype):
    """To fp32, exactly; to bf16 only what is bf16."""
    if dtype == DTYPES["F32"] and array.dtype == DTYPES["BF16"]:
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype(dtype, copy=False)


def write_model(file, config, views):
    """Writes fp32, or bf16 where every tensor is bf16: no value changes."""
    version = 5 if {view.dtype for view in views.values()} == {DTYPES["BF16"]} else 3
    dtype = DTYPES[VERSIONS[version]]
    file.write(
        np.array([MODEL_MAGIC, version, *config], "<i4").tobytes().ljust(HEADER_BYTES, b"\0")
    )
    for tensor in tensors(config):
        for name in tensor.names(config):
            array = views[name].T if tensor.layered else views[name]
            file.write(np.ascontiguousarray(converted(array, dtype)))
            file.write(
                bytes((math.prod(tensor.shape) - array.size) * dtype.itemsize)
            )  # rows of the padding


# --------------------------------------------------------------------------------------------------
# Safetensors


def entry_fits(entry, available):
    if not isinstance(entry, dict) or not all(
        isinstance(entry.get(key), list) for key in ("shape", "data_offsets")
    ):
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    return (
        all(type(number) is int and 0 <= number <= available for number in shape + offsets)
        and len(shape) <= 8
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    )


def read_safetensors(path):
    """Returns {name: view}; tensors of dtypes that a model of ours cannot have are views of their
    bytes."""
    data = map_file(path, 8)
    length = int(data[:8].view("<u8")[0])
    if length > min(HEADER_MOST, data.size - 8):
        raise Failure(
            EXIT_INPUT,
            f"{path}: not safetensors, or cut off: a header of {length} bytes in a file of"
            f" {data.size}",
        )
    header, data, views = read_json(path, data[8 : 8 + length]), data[8 + length :], {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not entry_fits(entry, data.size):
            raise Failure(
                EXIT_INPUT,
                f"{path}: {name!r:.100}: expected dtype, shape and a range of the {data.size} bytes"
                f" of data, found {entry!r:.200}",
            )
        dtype, (begin, end) = DTYPES.get(entry.get("dtype")), entry["data_offsets"]
        views[name] = data[begin:end]
        if dtype and math.prod(entry["shape"]) * dtype.itemsize != end - begin:
            raise Failure(
                EXIT_INPUT,
                f"{path}: {name!r:.100}: {end - begin} bytes do not hold {entry['dtype']} of shape"
                f" {entry['shape']!r:.100}",
            )
        if dtype:
            views[name] = views[name].view(dtype).reshape(entry["shape"])
    return views


def write_safetensors(file, views):
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, view in views.items():
        header[name] = {
            "dtype": names[view.dtype],
            "shape": view.shape,
            "data_offsets": [at, at + view.nbytes],
        }
        at += view.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data lie on multiples of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for view in views.values():
        file.write(np.ascontiguousarray(view))
