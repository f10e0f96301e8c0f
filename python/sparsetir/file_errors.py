"""What goes wrong while a file is read, in words for people."""

from __future__ import annotations

import gzip
import lzma
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

__all__ = ["DAMAGE", "UNREADABLE", "NoRoom", "check_npz", "first_line", "need_room", "why"]

# What readers raise for files that are damaged or cut off; zipfile raises RuntimeError where an
# entry seems to be encrypted or of another version.
DAMAGE = (
    EOFError, RuntimeError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    gzip.BadGzipFile,
)  # fmt: skip
UNREADABLE = (
    *DAMAGE, MemoryError, OSError, ValueError, OverflowError, KeyError, TypeError, IndexError,
)  # fmt: skip
MEMINFO = Path("/proc/meminfo")


class NoRoom(ValueError):
    """A file asks for more memory than is free."""


def why(error: BaseException) -> str:
    """Why a file cannot be read, of an error in UNREADABLE."""
    if isinstance(error, MemoryError):
        return "does not fit into memory"
    if isinstance(error, DAMAGE):
        return f"the file is damaged or cut off: {first_line(error)}"
    if isinstance(error, OverflowError):
        return f"a number in it is too large: {first_line(error)}"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_npz(path: Path) -> None:
    """Raise where a file is no zip file, or unpacks to more than there is room for."""
    with zipfile.ZipFile(path) as archive:
        need_room(sum(entry.file_size for entry in archive.infolist()))


def need_room(size: int) -> None:
    """Raise NoRoom where so many bytes are more than is free."""
    free = _free_bytes()
    if free is not None and size > free:
        raise NoRoom(f"needs {size / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB free")


def _free_bytes() -> int | None:
    """Memory that is free; None where the system does not say."""
    try:
        found: Any = re.search(r"^MemAvailable:\s*(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
