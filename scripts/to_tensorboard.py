#!/usr/bin/env python3
"""to_tensorboard.py: turns logs of train_gpt (--log FILE) into event files for TensorBoard.

    to_tensorboard.py run.jsonl DIR
    to_tensorboard.py out/*/log.jsonl DIR

Several logs go into a folder each, named after the logs or their folders. The values are named as
by the program itself (--tensorboard DIR writes the same while it trains): train/loss, train/lr,
val/loss and so on. What the log has as null, or cuts off, is left out. Where a run was resumed, its
later events take the place of the earlier ones. A log has no clock, so times are those of the steps
added up, back from the last change of the file. A file of an earlier conversion is replaced.

Standard library only. Exit status: 0 done, 2 bad input, 3 a file could not be written.
"""

import argparse
import struct
import sys
from pathlib import Path

from plot import EXIT_INPUT, EXIT_RESOURCES, events, is_number, names

GROUPS = {"step": "train", "val": "val", "hellaswag": "hellaswag"}  # of events with values
TIME, STEP, VERSION, SUMMARY, SESSION = 1, 2, 3, 5, 7  # fields of an Event
START = b"\x08\x01"  # the status of a session: later events replace those of these steps


def crc_table():
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        yield value


CRC = list(crc_table())


def masked_crc(data):
    """CRC-32C, rotated and shifted by a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number):
    data = b""
    while number >= 128:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])


def part(field, data):
    """A field of a message that is a text or a message."""
    return varint(field * 8 + 2) + varint(len(data)) + data


def record(data):
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def event(seconds, step, field, data):
    clock = varint(TIME * 8 + 1) + struct.pack("<d", seconds)
    return record(clock + varint(STEP * 8) + varint(step) + part(field, data))


def values(path):
    """Yields of each event with values: whether it is the first one after a start, its step, the
    milliseconds that it took, and its values by name."""
    first = True
    for found in events(path):
        group, step = GROUPS.get(found.get("event")), found.get("step")
        first |= found.get("event") == "start"
        if group and isinstance(step, int) and 0 <= step < 1 << 63:
            numbers = {
                f"{group}/{key}": float(value)
                for key, value in found.items()
                if key != "step" and is_number(value)
            }
            yield first, step, numbers.get("train/ms", 0), numbers
            first = False


def summary(numbers):
    return b"".join(
        part(1, part(1, name.encode()) + b"\x15" + struct.pack("<f", value))
        for name, value in numbers.items()
        if abs(value) < 3e38  # larger ones are no floats
    )


def convert(path, options, name):
    """Writes one log's event file; several logs have a folder each."""
    found = list(values(path))
    if not found:
        raise ValueError(f"{path}: no steps in it")
    seconds = path.stat().st_mtime - sum(ms for _, _, ms, _ in found) / 1000
    data = [event(seconds, 0, VERSION, b"brain.Event:2")]
    for first, step, ms, numbers in found:
        seconds += ms / 1000
        data += [event(seconds, step, SESSION, START)] if first else []
        data += [event(seconds, step, SUMMARY, summary(numbers))]
    folder = options.folder / (name if len(options.logs) > 1 else "")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"events.out.tfevents.0.{name}"
    file.write_bytes(b"".join(data))
    print(file)


def convert_all(parser, convert_one):
    """Reads the command line, and calls convert_one(log, options, name) for each log. Returns the
    exit status."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args()
    code, text = 0, ""
    try:
        for path, name in zip(options.logs, names(options.logs)):
            convert_one(path, options, name)
    except ImportError as error:
        code = EXIT_RESOURCES
        text = f"the package {error.name} is missing: pip install {error.name}"
    except OSError as error:
        reads = error.filename in map(str, options.logs) or error.filename in options.logs
        code = EXIT_INPUT if reads else EXIT_RESOURCES
        text = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        code, text = EXIT_INPUT, error
    if code:
        print(f"{parser.prog}: {text}", file=sys.stderr)
    return code


def main():
    parser = argparse.ArgumentParser(description="Turn logs of train_gpt into TensorBoard's files.")
    return convert_all(parser, convert)


if __name__ == "__main__":
    sys.exit(main())
