"""What goes wrong while a file is read, in words for people; what a file may ask for."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

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
# What any file may ask for, and what larger ones may for each of their bytes: compressed ones
# unpack to a thousand times their size, and a large id is short. Text takes long to read.
FEW_BYTES, BYTES_PER_BYTE = 2**28, 256
FEW_LINES, LINES_PER_BYTE = 2**24, 32
FEW_TEXT, TEXT_PER_BYTE = 2**23, 32
MOST_WORDS = 300  # characters of an error


def as_path(who: str, argument: str, value: Any) -> Path:
    """A path that a user gave, with "~" resolved.

    Raises TypeError for what is none, ValueError for an empty one.
    """
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str):
        raise TypeError(
            f"{who}: argument '{argument}': expected a path, got {type(value).__name__}"
        )
    if not found:
        raise ValueError(f"{who}: argument '{argument}': expected a path, got an empty text")
    return Path(os.path.expanduser(found))


class NoRoom(ValueError):
    """A file asks for more memory than is free, or than suits its size."""


def why(error: BaseException) -> str:
    """Why a file cannot be read, of an error in UNREADABLE."""
    if isinstance(error, MemoryError):
        return "does not fit into memory"
    if isinstance(error, DAMAGE):
        return f"the file is damaged or cut off: {first_line(error)}"
    if isinstance(error, OverflowError):
        return f"a number in it is too large: {first_line(error)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= MOST_WORDS else line[:MOST_WORDS] + "..."


def printable(text: str) -> str:
    r"""A text in which what is no character for people is written out, as "\x1b" and "\n".

    Names of files may have codes in them that a terminal obeys, and halves of pairs, which nothing
    can be made of that is printed.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def check_npz(path: Path) -> None:
    """Raise where a file is no zip file, or unpacks to more than there is room for."""
    with zipfile.ZipFile(path) as archive:
        need_room(sum(entry.file_size for entry in archive.infolist()), path)


def need_room(size: int, path: Path) -> None:
    """Raise NoRoom where so many bytes are more than is free, or than suits the file."""
    free = _free_bytes()
    if free is not None and size > free:
        raise NoRoom(f"needs {size / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB free")
    _refuse_more(size, path, FEW_BYTES, BYTES_PER_BYTE, "bytes of memory")


def check_lengths(path: Path, *lengths: int) -> None:
    """Raise NoRoom for a matrix of so many rows and columns that few of them can have elements."""
    _refuse_more(max(lengths), path, FEW_LINES, LINES_PER_BYTE, "rows or columns")


def unpacked(path: Path) -> BinaryIO:
    """A file opened for reading, unpacked if its name ends in .gz.

    Reading it raises NoRoom where it unpacks to more than suits its size.
    """
    if not path.name.lower().endswith(".gz"):
        return path.open("rb")
    return io.BufferedReader(_Unpacked(path), 2**16)


class _Unpacked(io.RawIOBase):
    """The bytes in a file of gzip, up to a bound."""

    def __init__(self, path: Path) -> None:
        self._file, self._path, self._read = gzip.open(path), path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._read += len(data)
        _refuse_more(self._read, self._path, FEW_TEXT, TEXT_PER_BYTE, "bytes unpacked")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _refuse_more(count: int, path: Path, few: int, per_byte: int, what: str) -> None:
    if count <= few:
        return
    size = path.stat().st_size
    most = max(few, per_byte * size)
    if count > most:
        raise NoRoom(
            f"expected at most {most:,} {what} for a file of {size:,} bytes, got {count:,}"
        )


def _free_bytes() -> int | None:
    """Memory that is free; None where the system does not say."""
    try:
        found: Any = re.search(r"^MemAvailable:\s*(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
