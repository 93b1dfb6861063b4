#!/usr/bin/env python3
"""unicode_tables.py: writes text/unicode_classes.h and text/unicode_normal.h, the properties of
characters that the program needs to encode text.

    .venv/bin/python scripts/unicode_tables.py

A model has learned the tokens that the PyPI package tokenizers makes, so the package itself is
asked: for the class of each code point, and for what NFC changes. Its tables of classes and of NFC
are of different versions of Unicode; the headers say which. Combining classes, and the pairs that
may compose, are Python's; those that the package does not know are left out.
"""

import importlib.metadata
import unicodedata
from pathlib import Path

from tokenizers import Regex, normalizers

TEXT = Path(__file__).resolve().parent.parent / "text"
CODES = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
CLASSES = {"LETTER": r"\p{L}", "NUMBER": r"\p{N}", "MARK": r"\p{M}", "SPACE": r"\s"}
# Two assigned in a version of Unicode and not in the one before; the package knows the first.
CLASSES_OF = "16.0", 0x10D6F, 0x88F
NORMAL_OF = "9.0", 0x1E94A, 0x1DF6
COLUMNS = 100
BELOW, SUBSCRIPT = "\u0334", "\u0345"  # the lowest combining class, 1, and the highest, 240


def matched(pattern):
    """The code points that a pattern of one character matches."""
    without, found = normalizers.Replace(Regex(pattern), ""), set()
    for begin in range(0, len(CODES), 4096):
        codes = CODES[begin : begin + 4096]
        left = without.normalize_str("".join(map(chr, codes)))
        found.update(set(codes).difference(map(ord, left)))
    return found


def ranges(values):
    """Where a range of another value begins: (code point, value)."""
    changes = (code for code in range(1, len(values)) if values[code] != values[code - 1])
    return [(code, values[code]) for code in (0, *changes)]


def classes():
    members = {name: matched(pattern) for name, pattern in CLASSES.items()}
    _, newest, too_new = CLASSES_OF
    assert newest in members["LETTER"] and too_new not in members["LETTER"]
    values = bytearray(0x110000)
    for i, codes in enumerate(members.values(), 1):
        assert not any(values[code] for code in codes)
        for code in codes:
            values[code] = i
    return ranges(values)


def combining():
    order = normalizers.NFD().normalize_str

    def known(code):
        # A mark moves in front of one of a higher class, and behind one of a lower class.
        mark = chr(code)
        return order(SUBSCRIPT + mark) == mark + SUBSCRIPT or order(mark + BELOW) == BELOW + mark

    values = bytearray(0x110000)
    for code in CODES:
        value = unicodedata.combining(chr(code))
        values[code] = value if value and known(code) else 0
    _, newest, too_new = NORMAL_OF
    assert values[newest] and not values[too_new]
    return ranges(values)


def decompositions():
    """[(code point, first, second, whether NFC composes it)], and [(code point, the only one)]."""
    nfc, nfd = (form().normalize_str for form in (normalizers.NFC, normalizers.NFD))
    pairs, singles = [], []
    for code in CODES:
        parts = unicodedata.decomposition(chr(code))
        if not parts or parts.startswith("<") or nfd(chr(code)) == chr(code):
            continue
        parts = [int(part, 16) for part in parts.split()]
        if len(parts) == 1:
            singles.append((code, *parts))
        else:
            pairs.append((code, *parts, nfc("".join(map(chr, parts))) == chr(code)))
    return pairs, singles


def array(kind, name, numbers):
    lines = [[]]
    for number in (f"0x{number:x}," for number in numbers):
        if 4 + sum(len(text) + 1 for text in [*lines[-1], number]) - 1 > COLUMNS:
            lines.append([])
        lines[-1].append(number)
    lines[-1][-1] = lines[-1][-1].rstrip(",")
    body = "\n".join("    " + " ".join(line) for line in lines)
    return f"static const {kind} {name}[] = {{\n{body}}};\n"


def write(name, comment, *parts):
    guard = name.upper().replace(".", "_")
    head = "".join(f"// {line}".rstrip() + "\n" for line in comment)
    text = f"{head}#ifndef {guard}\n#define {guard}\n\n#include <stdint.h> // the tables\n\n"
    body = "// clang-format off\n" + "\n".join(parts) + "// clang-format on\n"
    (TEXT / name).write_text(f"{text}{body}\n#endif\n")


def main():
    source = f"tokenizers {importlib.metadata.version('tokenizers')}"
    made = f"Made by scripts/unicode_tables.py from {source}; do not edit."
    names = ", ".join(f"CHARACTER_{name}" for name in ("OTHER", *CLASSES))
    write(
        "unicode_classes.h",
        [
            f"unicode_classes.h: classes of characters, of Unicode {CLASSES_OF[0]}.",
            made,
            "Each number is the first code point of a range, times 8, and the range's class.",
        ],
        f"enum {{ {names} }};\n",
        array("uint32_t", "unicode_classes", (code << 3 | kind for code, kind in classes())),
    )
    pairs, singles = decompositions()
    pairs = (code << 41 | one << 21 | two << 1 | joins for code, one, two, joins in pairs)
    write(
        "unicode_normal.h",
        [
            f"unicode_normal.h: what NFC changes, of Unicode {NORMAL_OF[0]}.",
            made,
            "",
            "  unicode_combining   first code point of a range << 8 | its combining class",
            "  unicode_pairs       code point << 41 | first part << 21 | second part << 1 | 1",
            "                      where NFC composes it",
            "  unicode_singles     code point << 20 | what stands for it",
            "All are sorted. Hangul is missing: it follows a formula.",
        ],
        array("uint32_t", "unicode_combining", (code << 8 | kind for code, kind in combining())),
        array("uint64_t", "unicode_pairs", pairs),
        array("uint64_t", "unicode_singles", (code << 20 | one for code, one in singles)),
    )


if __name__ == "__main__":
    main()
