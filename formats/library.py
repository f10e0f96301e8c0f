"""The library's formats, and limits of conversion."""

from __future__ import annotations

import numpy as np

from sparsetir.formats.bsr import BSR
from sparsetir.formats.csr import CSR
from sparsetir.formats.dcsr import DCSR
from sparsetir.formats.dia import DIA
from sparsetir.formats.ell import ELL
from sparsetir.formats.format import REGISTRY, Format
from sparsetir.formats.hyb import Hyb
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.mixture import Mixture, by_band, by_block_fill, by_row_length
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.row_ell import RowELL
from sparsetir.formats.sr_bcrs import SRBCRS

# Limits of conversion: slots per element, above few bytes; bytes of all arrays.
MOST_PLACES = 64
FEW_BYTES = 1 << 20
MOST_BYTES = 2 << 30
MIXTURES = (
    Mixture("blocks_and_csr", (BSR(4, 4), CSR()), by_block_fill(4, 4, 0.5)),
    Mixture("columns_and_hyb", (SRBCRS(8, 32), Hyb(1, 3)), by_block_fill(8, 1, 0.5)),
    Mixture("band_and_csr", (DIA(), CSR()), by_band(-8, 8)),
    Mixture("ell_and_csr", (ELL(), CSR()), by_row_length(16)),
    Mixture("dcsr_and_pieces", (DCSR(), RowELL(32)), by_row_length(64)),
)


def library(pattern: Pattern) -> list[Format]:
    """Formats of each class, and mixtures."""
    return [fmt for entry in REGISTRY.values() for fmt in entry.library(pattern)] + [*MIXTURES]


def refusal(
    pattern: Pattern, places: int, operand: Operand | None = None, most_places: float = MOST_PLACES
) -> str | None:
    """Return why the conversion of a pattern would take too much memory, or None.

    operand : the stored buffers; by default one in float32, with int32 indices
    most_places : limit of slots per element
    """
    operand = operand or Operand()
    # Values, an index and a mask for each slot.
    values = sum(np.dtype(dtype).itemsize for _, dtype in operand.buffers)
    size = places * (values + np.dtype(operand.idtype).itemsize + 1)
    few = size <= FEW_BYTES or places <= most_places * max(1, pattern.nnz)
    if few and size <= MOST_BYTES:
        return None
    each = places / max(1, pattern.nnz)
    return f"{size / 1e6:,.0f} MB, {each:,.1f} slots per element"
