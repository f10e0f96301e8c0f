"""Readers of Matrix Market files and of files of `scipy.sparse.save_npz`, by SciPy.

Errors do not name the file; callers wrap them in :func:`sparsetir.runtime.file_errors.reading`.
"""

from __future__ import annotations

import gzip
import re
import zipfile
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy.sparse as sp
from numpy.lib import format as npy

from sparsetir.runtime.file_errors import (
    ELEMENT_BYTES,
    check_npz,
    check_size,
    check_unpacked,
    pieces,
)

HEADER = re.compile(rb"\A(?:%.*\n|[ \t\r]*\n)*.*\n?")  # comments, and the line of sizes
# Bytes by kind: digit, sign, exponent, a letter of "nan" and "infinity", space, another.
INTEGERS = dict.fromkeys(range(256), "?") | dict.fromkeys(b"0123456789", "0")
INTEGERS |= dict.fromkeys(b"+-", "-") | dict.fromkeys(b" \t\r\n", " ")
NUMBERS = INTEGERS | dict.fromkeys(b"nNaAiIfFtTyY", "n") | dict.fromkeys(b"eE", "e") | {46: "0"}
# Words whose beginning SciPy reads as a number, ignoring the rest: "0x10", "1D3", "1.5-100".
ODD = (b"?", b"0-", b"0n", b"n0", b"e ")
INTEGER_ARRAYS = {f"{name}.npy" for name in ("shape", "indptr", "indices", "row", "col", "offsets")}


def read_market(path: Path) -> sp.coo_array:
    """Read the coordinates of a file, .mtx or .mtx.gz; symmetric files are expanded.

    Values of patterns are float32 ones. ValueError for dense files and complex numbers, and for
    words and lines that SciPy would truncate.
    """
    from scipy.io import mminfo, mmread

    check_unpacked(path)
    # SciPy unpacks only files with a lower-case ending.
    text: Any = partial(gzip.open, path) if path.suffix.lower() == ".gz" else lambda: path
    m, n, count, layout, field, symmetry = mminfo(text())
    if layout != "coordinate":
        raise ValueError(
            "expected coordinates, got a dense matrix ('array'); SparseMatrix.from_dense takes "
            "what scipy.io.mmread makes of it"
        )
    if field == "complex":
        raise ValueError("expected real numbers, got complex ones")
    if symmetry != "general" and m != n:
        raise ValueError(f"expected as many rows as columns for a {symmetry} matrix, got {m} x {n}")
    check_size(path, ELEMENT_BYTES * count, f"a matrix with {count:,} elements")
    words = _count_words(path, field)
    matrix: Any = mmread(text(), spmatrix=False)
    each = 2 if field == "pattern" else 3
    if words != each * count:
        raise ValueError(f"expected {count} lines of {each} numbers, got {words} numbers")
    if field == "pattern" and symmetry != "skew-symmetric":
        matrix.data = np.ones(matrix.nnz, "float32")
    return matrix


def _count_words(path: Path, field: str) -> int:
    """Count the numbers after the sizes; ValueError for another word."""
    integers = field in ("integer", "pattern")
    table = "".join((INTEGERS if integers else NUMBERS).values()).encode()
    words, last = 0, b""
    for piece in pieces(path):
        text = last + piece if last else b"\n" + HEADER.sub(b"", piece, 1)
        kinds = text.translate(table)
        present = (pair for pair in ODD if all(byte in kinds for byte in pair))  # a fast filter
        odd = [i for i in map(kinds.find, present) if i >= 0]
        if odd:
            start = kinds.rfind(b" ", 0, min(odd)) + 1
            word = text[start : start + 40].split()[0].decode("utf-8", "replace")
            raise ValueError(f"expected {'an integer' if integers else 'a number'}, got {word!r}")
        space = np.frombuffer(kinds, np.uint8) == ord(" ")
        words += int(np.count_nonzero(space[:-1] & ~space[1:]))
        last = text[-1:]
    return words


def read_saved(path: Path) -> Any:
    """Read a file of `scipy.sparse.save_npz`, in its own format; diagonals as coordinates."""
    check_npz(path)
    with zipfile.ZipFile(path) as archive:
        for name in INTEGER_ARRAYS & set(archive.namelist()):  # SciPy would round them
            with archive.open(name) as file:
                _, dtype = read_header(file)
            if dtype.kind not in "iu":
                raise ValueError(f"{name[:-4]}: expected integers, got {dtype}")
    matrix = sp.load_npz(path)
    if matrix.ndim != 2:
        raise ValueError(f"expected a matrix, got shape {matrix.shape}")
    if matrix.format in ("csr", "csc", "bsr"):  # conversions write where the indices say
        matrix.check_format(full_check=True)
    if matrix.dtype.kind not in "biuf":
        raise ValueError(f"expected real numbers, got {matrix.dtype}")
    # SciPy before 1.17 counts diagonals beyond what is stored of them.
    count = matrix.data.size if matrix.format == "dia" else matrix.nnz
    check_size(path, ELEMENT_BYTES * count, f"a matrix with {count:,} elements")
    return diagonals(matrix) if matrix.format == "dia" else matrix


def diagonals(data: Any) -> sp.coo_array:
    """Convert a DIA matrix to coordinates; its `tocoo` would drop stored zeros."""
    columns = np.arange(min(data.data.shape[1], data.shape[1]))
    rows = columns - data.offsets[:, None].astype(np.int64)
    inside = (rows >= 0) & (rows < data.shape[0])
    coords = rows[inside], np.broadcast_to(columns, inside.shape)[inside]
    return sp.coo_array((data.data[:, : len(columns)][inside], coords), shape=data.shape)


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and dtype of an .npy file, up to its first number."""
    version = npy.read_magic(file)
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = header(file)
    return shape, dtype
