"""A list of formats, and how many places each would take for a pattern."""

from __future__ import annotations

import numpy as np

from sparsetir.formats.bsr import BSR
from sparsetir.formats.coo import COO
from sparsetir.formats.csc import CSC
from sparsetir.formats.csf import CSF
from sparsetir.formats.csr import CSR
from sparsetir.formats.dbsr import DBSR
from sparsetir.formats.dcsr import DCSR
from sparsetir.formats.dia import DIA
from sparsetir.formats.ell import ELL
from sparsetir.formats.enumerated_patterns import EnumeratedPatterns
from sparsetir.formats.format import Format
from sparsetir.formats.hyb import Hyb
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.mixture import Mixture, by_band, by_block_fill, by_row_length
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.ragged_rows import Ragged
from sparsetir.formats.row_ell import RowELL
from sparsetir.formats.sell import SELL, sliced_rows
from sparsetir.formats.sr_bcrs import SRBCRS

__all__ = [
    "block_places", "diagonal_places", "hyb_places", "library", "places", "ragged_places",
    "refusal", "row_places", "slice_places", "tile_places",
]  # fmt: skip

# What is larger is not converted: places for each element, and bytes of all arrays.
MOST_PLACES = 64
MOST_BYTES = 2 << 30
FORMATS = (
    CSR(), CSC(), COO(), DCSR(), BSR(4, 4), DBSR(4, 4), ELL(), RowELL(8), CSF((0, 1)), CSF((1, 0)),
    Ragged(), DIA(), SRBCRS(8, 32), SELL(16, 4096), EnumeratedPatterns(4),
)  # fmt: skip
MIXTURES = (
    Mixture("blocks_and_csr", (BSR(4, 4), CSR()), by_block_fill(4, 4, 0.5)),
    Mixture("columns_and_hyb", (SRBCRS(8, 32), Hyb(1, 3)), by_block_fill(8, 1, 0.5)),
    Mixture("band_and_csr", (DIA(), CSR()), by_band(-8, 8)),
    Mixture("ell_and_csr", (ELL(), CSR()), by_row_length(16)),
    Mixture("dcsr_and_pieces", (DCSR(), RowELL(32)), by_row_length(64)),
)


def library(pattern: Pattern) -> list[Format]:
    """Each format, and mixtures; hyb with the k of the paper, for c = 4 at most 5.

    Hyb(4, k) has 4 * (k + 1) rules, which take a while to build.
    """
    k = Hyb.for_pattern(pattern).k
    return [*FORMATS, Hyb(1, k), Hyb(4, min(k, 5)), *MIXTURES]


def places(fmt: Format, pattern: Pattern) -> int:
    """Places of a format, padding included; of the library's own counted without converting."""
    match fmt:
        case BSR(rows=r, cols=c) | DBSR(rows=r, cols=c):
            return block_places(pattern, r, c)
        case SRBCRS(t=t, g=g):
            return tile_places(pattern, t, g)
        case SELL(c=c, sigma=sigma):
            return slice_places(pattern, c, sigma)
        case Hyb(c=c, k=k):
            return hyb_places(pattern, c, k)
        case ELL():
            return row_places(pattern)
        case RowELL(cols=c):
            return row_places(pattern, c)
        case Ragged():
            return ragged_places(pattern)
        case DIA():
            return diagonal_places(pattern)
        case Mixture(formats=formats, choose=choose):
            number = choose(pattern)
            parts = [pattern.take(np.flatnonzero(number == n)) for n in range(len(formats))]
            return sum(places(f, p) for f, p in zip(formats, parts, strict=True))
        case CSR() | CSC() | COO() | DCSR() | CSF() | EnumeratedPatterns():
            return pattern.nnz
    return sum(part.size for part in fmt.convert(pattern).parts)


def refusal(
    pattern: Pattern, places: int, operand: Operand | None = None, most_places: float = MOST_PLACES
) -> str | None:
    """Why a pattern is not converted, if it takes too much room.

    operand : the buffers that are stored; by default one in float32, with int32 indices
    most_places : for each element
    """
    operand = operand or Operand()
    # Values, an index and a mask for each place.
    values = sum(np.dtype(dtype).itemsize for _, dtype in operand.buffers)
    size = places * (values + np.dtype(operand.idtype).itemsize + 1)
    if places <= most_places * max(1, pattern.nnz) and size <= MOST_BYTES:
        return None
    each = places / max(1, pattern.nnz)
    return f"{size / 1e6:,.0f} MB, {each:,.1f} places for each element"


def hyb_places(pattern: Pattern, c: int, k: int, fitted: bool = True) -> int:
    """Places of hyb(c, k).

    fitted : what is left of a row longer than 2^k goes to the bucket that it fits; otherwise it is
        padded to 2^k
    """
    width = max(1, -(-pattern.shape[1] // c))
    rows, cols = pattern.coords
    lengths = np.bincount(rows.astype(np.int64) * c + cols // width)
    whole, rest = np.divmod(lengths[lengths > 0], 2**k)
    rest_places = 2 ** np.ceil(np.log2(np.maximum(rest, 1))).astype(np.int64) * (rest > 0)
    if not fitted:
        rest_places[(whole > 0) & (rest > 0)] = 2**k
    return int((whole * 2**k + rest_places).sum())


def block_places(pattern: Pattern, rows: int, cols: int) -> int:
    """Places of dense blocks."""
    i, j = pattern.coords
    across = -(-pattern.shape[1] // cols)
    return len(_distinct((i // rows).astype(np.int64) * across + j // cols)) * rows * cols


def tile_places(pattern: Pattern, t: int, g: int) -> int:
    """Places of SR-BCRS: columns of t rows, in groups of g."""
    i, j = pattern.coords
    columns = _distinct((i // t).astype(np.int64) * pattern.shape[1] + j)
    counts = np.bincount(columns // max(1, pattern.shape[1]))
    return int((-(-counts // g)).sum()) * g * t


def slice_places(pattern: Pattern, c: int, sigma: int) -> int:
    """Places of SELL: slices of c rows as long as their longest."""
    _, widths = sliced_rows(np.diff(pattern.indptr), c, sigma)
    return int(widths.sum(dtype=np.int64)) * c


def row_places(pattern: Pattern, cols: int | None = None) -> int:
    """Places of padded rows: all as long as the longest, or in pieces of `cols`."""
    lengths = np.diff(pattern.indptr)
    if cols is None:
        return int(lengths.max(initial=0)) * len(lengths)
    return int((-(-lengths // cols)).sum()) * cols


def ragged_places(pattern: Pattern) -> int:
    """Places of rows that reach to their last element."""
    ends = pattern.indptr[1:][np.diff(pattern.indptr) > 0]
    return int((pattern.coords[1][ends - 1].astype(np.int64) + 1).sum())


def diagonal_places(pattern: Pattern) -> int:
    """Places of diagonals, each as long as there are rows."""
    i, j = pattern.coords
    return len(_distinct(j.astype(np.int64) - i)) * pattern.shape[0]


def _distinct(values: np.ndarray) -> np.ndarray:
    """The different values in order; NumPy's `unique` hashes, which is far slower than a sort."""
    values = np.sort(values)
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values
