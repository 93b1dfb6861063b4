"""regular_files.py: how the scripts open files that they did not make themselves.

A pipe without a writer would block for ever, a device such as /dev/zero has no end, and a text that
is read as a whole must fit into memory. Whoever wants to pipe a text gives it on standard input,
where a script says so.
"""

import errno
import os
import stat

TEXT_MOST = 1 << 26  # bytes; also of the program's JSON files (base/json.h)


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
