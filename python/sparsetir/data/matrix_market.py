"""Files of Matrix Market, read by SciPy, which takes much that is no number for one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sparsetir.runtime.file_errors import need_room, unpacked

PIECE = 2**22  # bytes that are looked through at a time
INTEGER = re.compile(rb"[+-]?\d+")
NUMBER = re.compile(rb"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)
INTEGERS = b"0123456789+- \t\r\n"
NUMBERS = INTEGERS + b".eE"
# The least bytes of memory for each element that is read: coordinates, values, order.
ELEMENT_BYTES = 24


class MarketFile(NamedTuple):
    """Coordinates as a file has them, both of a pair that it says is symmetric.

    values : (nnz,); None for a pattern, whose values are ones
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    shape: tuple[int, int]


def read_market(path: Path) -> MarketFile:
    """The elements of a file of coordinates.

    Raises errors in :data:`sparsetir.runtime.file_errors.UNREADABLE`: for dense files and complex
    numbers, for more or fewer numbers than the file says, and for words that are no numbers, such
    as "1D3", of which SciPy reads the beginning.
    """
    from scipy.io import mminfo, mmread

    with unpacked(path) as file:  # before SciPy, which unpacks without a bound
        words = _count_words(file)
    m, n, count, layout, field, symmetry = mminfo(path)
    if layout != "coordinate":
        raise ValueError(
            "expected coordinates, got a dense matrix ('array'); SparseMatrix.from_dense takes "
            "what scipy.io.mmread makes of it"
        )
    if field == "complex":
        raise ValueError("expected real numbers, got complex ones")
    need_room(ELEMENT_BYTES * count, path)
    found: Any = mmread(path, spmatrix=False)
    pattern = field == "pattern"
    each = 2 if pattern else 3
    if words != count * each:
        raise ValueError(f"expected {count} lines of {each} numbers, got {words} numbers")
    values = None if pattern and symmetry != "skew-symmetric" else found.data
    rows, columns = found.coords
    return MarketFile(rows, columns, values, (m, n))


def _count_words(file: BinaryIO) -> int:
    """How many numbers follow the size of a matrix; raises ValueError for other words."""
    banner = file.readline(PIECE)
    if not banner.startswith(b"%%MatrixMarket"):
        return 0  # SciPy says so
    integers = any(field in banner.lower().split() for field in (b"integer", b"pattern"))
    kind, usual = (INTEGER, INTEGERS) if integers else (NUMBER, NUMBERS)
    for line in file:  # comments, and the size
        if line.strip() and not line.startswith(b"%"):
            break
    words, rest = 0, b""
    while data := file.read(PIECE):
        text = rest + data
        # The last word may go on in the next piece.
        cut = max(map(text.rfind, (b"\n", b" ", b"\t"))) + 1
        text, rest = (text[:cut], text[cut:]) if len(rest) < PIECE else (text, b"")
        words += _words(text, kind, usual)
    return words + _words(rest, kind, usual)


def _words(text: bytes, kind: re.Pattern[bytes], usual: bytes) -> int:
    """How many words there are, all of a kind; only where there are unusual bytes each is seen."""
    if text.translate(None, usual):
        for word in text.split():
            if not kind.fullmatch(word):
                got = word[:40].decode("utf-8", "backslashreplace")
                what = "an integer" if kind is INTEGER else "a number"
                raise ValueError(f"expected {what}, got {got!r}")
    visible = np.frombuffer(text, np.uint8) > ord(" ")
    return int(visible[:1].sum()) + int(np.count_nonzero(visible[1:] & ~visible[:-1]))
