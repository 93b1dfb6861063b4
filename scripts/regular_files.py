"""regular_files.py: how the scripts open files that they did not make themselves, and how they show
what is in them.

A pipe without a writer would block for ever, a device such as /dev/zero has no end, and a text that
is read as a whole must fit into memory. Whoever wants to pipe a text gives it on standard input,
where a script says so.
"""

import errno
import fcntl
import os
import re
import stat

TEXT_MOST = 1 << 26  # bytes; also of the program's JSON files (base/json.h)
# controls but for newline and tab, marks that turn the direction of a text, halves of characters
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def open_regular(path, most=None):
    """Opens a file to read bytes. Raises OSError where it is no regular file, or has more than
    `most` bytes."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    info, trouble = os.fstat(file), None
    if not stat.S_ISREG(info.st_mode):
        trouble = errno.ENOTSUP, "not a regular file"
    elif most is not None and info.st_size > most:
        trouble = errno.EFBIG, f"larger than {most} bytes"
    if trouble:
        os.close(file)
        raise OSError(*trouble, str(path))
    return os.fdopen(file, "rb")


def read_regular(path, most=TEXT_MOST):
    """The bytes of a file, as open_regular opens it."""
    with open_regular(path, most) as file:
        return file.read()


def plain(text):
    """A text that drives no terminal and no page: what would is shown as its number."""

    def number(found):
        code = ord(found[0])
        code -= 0xDC00 if 0xDC80 <= code <= 0xDCFF else 0  # a byte that is no UTF-8
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return UNSEEN.sub(number, str(text))


def one_line(text):
    """The same in one line: for messages, and for names and texts in tables."""
    return " ".join(plain(text).split("\n"))


def hold_folder(folder):
    """A lock on a folder, made where it is missing, which ends when it is closed or we are; None
    where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
