"""Files opened for writing in folders that others may write to: no link there is written through.

Whoever knows the name at which a file will be written may have put a link there, or a second name
of a file that is somebody else's. Lock files are safe by themselves: filelock follows no links.
"""

from __future__ import annotations

import contextlib
import os
import stat
from io import BufferedRandom, BufferedWriter
from pathlib import Path

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
"""With it, no link can slip in between a look and the opening, where the system knows the flag."""


def create(path: Path) -> BufferedWriter:
    """Open a file that does not exist; FileExistsError if anything has its name, be it a link."""
    return path.open("xb")


def open_kept(path: Path) -> BufferedRandom:
    """Open a file for reading and writing from its beginning, with what it has.

    It is a new file if there is none, or something else than a file with this one name. OSError if
    that cannot be removed, as a folder, or is back at once.
    """

    def open_real(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CREAT | _NO_LINKS, 0o666)

    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            path.unlink()
    # Not in append mode: two that write the same bytes to the same places do no harm.
    return open(path, "r+b", opener=open_real)


def remove_link(folder: Path) -> None:
    """Remove a symbolic link from a place for a folder: what it points to is somebody else's."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
