"""Paths of users, readable errors while reading files, and limits on the memory of a file."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from sparsetir.runtime.refusals import wrong

# Exceptions of readers for files that are damaged or cut off.
DAMAGE = (
    EOFError, RuntimeError, AttributeError, LookupError, ArithmeticError, struct.error, zlib.error,
    lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile,
)  # fmt: skip
# Memory that any file may demand, and memory per byte for larger files: compressed files unpack to
# a thousand times their size, and a large id takes few characters.
FEW_BYTES, BYTES_PER_BYTE = 2**28, 256
# The least bytes of memory for an element, a row, and a character of text.
ELEMENT_BYTES, ROW_BYTES, TEXT_BYTES = 24, 8, 8
PIECE = 2**20
MOST_WORDS = 300  # characters of an error
SCRATCH = ".sparsetir-"  # prefix of the folders that hold unfinished files


class GraphError(ValueError):
    """Raised for a file that is not the expected graph; the text names the file and the reason."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def as_path(caller: str, argument: str, value: object) -> Path:
    """Convert a user's path, with "~" expanded.

    Raises TypeError for another type, ValueError for an empty path.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise wrong(caller, argument, "a path", type(value).__name__, TypeError)
    if not path:
        raise wrong(caller, argument, "a path", "an empty text")
    return Path(os.path.expanduser(path))


def user_path(variable: str, name: str) -> Path | None:
    """The path that an environment variable holds; None if it is empty.

    Without the variable it is `sparsetir/<name>` in `XDG_CACHE_HOME` or `~/.cache`.
    """
    get = os.environ.get
    return _user_path(get(variable), name, get("XDG_CACHE_HOME"), get("HOME"))


@lru_cache(8)
def _user_path(named: str | None, name: str, caches: str | None, home: str | None) -> Path | None:
    """:func:`user_path`, from the values of these variables; home : what `~` stands for."""
    if named is not None:
        return Path(os.path.expanduser(named)) if named else None
    return Path(caches or os.path.expanduser("~/.cache"), "sparsetir", name)


@contextmanager
def reading(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn any exception of a library while reading a file into `kind`, prefixed by `what`."""
    try:
        yield
    except kind:
        raise
    except Exception as error:
        raise kind(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Why a file cannot be read."""
    if isinstance(error, MemoryError):
        return "does not fit into memory"
    if isinstance(error, OverflowError):
        return f"a number in it is too large: {first_line(error)}"
    if isinstance(error, DAMAGE):
        return f"the file is damaged or cut off: {first_line(error)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= MOST_WORDS else line[:MOST_WORDS] + "..."


def printable(text: str) -> str:
    r"""Escape the unprintable characters of a text, as "\x1b" and "\n".

    File names may contain terminal control codes, and unpaired surrogates, which cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def check_size(path: Path, size: int, what: str) -> None:
    """Raise ValueError if `size` bytes are out of proportion to the file's size."""
    if size <= FEW_BYTES:
        return
    of_file = path.stat().st_size
    most = max(FEW_BYTES, BYTES_PER_BYTE * of_file)
    if size > most:
        raise ValueError(
            f"{what}: expected at most {most:,} bytes of memory for a file of {of_file:,} bytes, "
            f"got {size:,}"
        )


def check_matrix(path: Path, shape: tuple[int, ...], count: int) -> None:
    """Raise ValueError if rows, columns and elements are out of proportion to the file's size."""
    size = ELEMENT_BYTES * count + ROW_BYTES * max(shape)
    said = f"a matrix of {' x '.join(f'{n:,}' for n in shape)} with {count:,} elements"
    check_size(path, size, f"{said} (are nodes numbered from 0, without gaps?)")


def check_npz(path: Path) -> None:
    """Raise if a file is not a zip file, or unpacks to more than its size permits."""
    with zipfile.ZipFile(path) as archive:
        check_size(path, sum(entry.file_size for entry in archive.infolist()), "its arrays")


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked if its name ends in .gz, up to the limit for its size."""
    packed, size = path.name.lower().endswith(".gz"), 0
    with gzip.open(path) if packed else path.open("rb") as file:
        while piece := file.read(PIECE):
            size += len(piece)
            check_size(path, TEXT_BYTES * size if packed else 0, "its text, unpacked")
            yield piece


def check_unpacked(path: Path) -> None:
    """Raise ValueError if a file whose name ends in .gz unpacks to more than its size permits."""
    if path.suffix.lower() == ".gz":
        for _ in pieces(path):
            pass


@contextmanager
def whole(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """Yield a path to write to; the file appears, or replaces another, once it is complete.

    Raises OSError, such as FileExistsError unless `overwrite`, and then changes nothing.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=SCRATCH) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        if not overwrite:
            try:
                os.link(temporary, path)  # atomic: one of several processes succeeds
                return
            except FileExistsError:
                raise
            except OSError:
                pass  # a file system without links
        os.replace(temporary, path)


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8 to a file that appears when it is complete; see :func:`whole`."""
    with whole(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
