"""What goes wrong while a file is read, in words for people; what a file may ask for."""

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
from pathlib import Path

# What readers raise for files that are damaged or cut off.
DAMAGE = (
    EOFError, RuntimeError, AttributeError, LookupError, ArithmeticError, struct.error, zlib.error,
    lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile,
)  # fmt: skip
# Memory that any file may ask for, and what larger ones may for each of their bytes: compressed
# ones unpack to a thousand times their size, and a large id is short.
FEW_BYTES, BYTES_PER_BYTE = 2**28, 256
# The least bytes of memory for an element, a row, and a character of text.
ELEMENT_BYTES, ROW_BYTES, TEXT_BYTES = 24, 8, 8
PIECE = 2**20
MOST_WORDS = 300  # characters of an error


class GraphError(ValueError):
    """A file that is not the graph that was expected; the text names it and says why."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def as_path(who: str, argument: str, value: object) -> Path:
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


@contextmanager
def reading(what: str, kind: type[Exception]) -> Iterator[None]:
    """Whatever libraries raise while a file is read is an error of a kind, which says of what."""
    try:
        yield
    except kind:
        raise
    except Exception as error:
        raise kind(f"{what}: {why(error)}") from error


def why(error: BaseException) -> str:
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
    r"""A text in which what is no character for people is written out, as "\x1b" and "\n".

    Names of files may have codes in them that a terminal obeys, and halves of pairs, which nothing
    can be made of that is printed.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def need_room(path: Path, size: int, what: str) -> None:
    """Raise ValueError where so many bytes are more than suits the file."""
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
    """Raise ValueError for more rows, columns and elements than suit the file."""
    size = ELEMENT_BYTES * count + ROW_BYTES * max(shape)
    said = f"a matrix of {' x '.join(f'{n:,}' for n in shape)} with {count:,} elements"
    need_room(path, size, f"{said} (are nodes numbered from 0, without gaps?)")


def check_npz(path: Path) -> None:
    """Raise where a file is no zip file, or unpacks to more than suits it."""
    with zipfile.ZipFile(path) as archive:
        need_room(path, sum(entry.file_size for entry in archive.infolist()), "its arrays")


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked if its name ends in .gz, as far as that suits its size."""
    packed, size = path.name.lower().endswith(".gz"), 0
    with gzip.open(path) if packed else path.open("rb") as file:
        while piece := file.read(PIECE):
            size += len(piece)
            need_room(path, TEXT_BYTES * size if packed else 0, "its text, unpacked")
            yield piece


def check_unpacked(path: Path) -> None:
    """Raise ValueError where a file whose name ends in .gz unpacks to more than suits it."""
    if path.suffix.lower() == ".gz":
        for _ in pieces(path):
            pass


@contextmanager
def whole(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """Where to write a file that appears, or replaces one, when it is complete.

    Raises OSError, such as FileExistsError unless `overwrite`, and leaves what was there as it was.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sparsetir-") as folder:
        made = Path(folder) / path.name
        yield made
        if not overwrite:
            try:
                os.link(made, path)  # of several processes one writes
                return
            except FileExistsError:
                raise
            except OSError:
                pass  # a file system without links
        os.replace(made, path)


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8 to a file that appears when it is complete; see :func:`whole`."""
    with whole(path) as made, open(made, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
