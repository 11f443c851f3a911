"""A file in a stranger's directory, opened without being fooled by what bears its name."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from adaptercache.errors import AdapterInvalid

__all__ = ["open_regular"]


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to be read. Symbolic links are followed: model hubs publish through them.

    Raises:
        AdapterInvalid: a directory, FIFO, socket or device. None of them is waited for or read.
        OSError: it can't be opened.
    """
    # Without O_NONBLOCK, opening a FIFO waits for somebody who writes to it.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            raise
        raise AdapterInvalid("not a regular file", where=str(path), expected="a file") from error
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise AdapterInvalid(
            "not a regular file", where=str(path), found=stat.filemode(kind), expected="a file"
        )
    return open(handle, "rb")
