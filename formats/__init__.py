"""Formats: rewrite rules, decomposition, index inference, and a library of formats."""

from sparsetir.formats.bsr import BSR
from sparsetir.formats.converted import ConvertedFormat, PartStatistics
from sparsetir.formats.csr import CSR
from sparsetir.formats.describe import Operand, dense, fixed, make_rule, ragged, sparse
from sparsetir.formats.format import Format
from sparsetir.formats.pattern import Pattern

__all__ = [
    "BSR",
    "CSR",
    "ConvertedFormat",
    "Format",
    "Operand",
    "PartStatistics",
    "Pattern",
    "dense",
    "fixed",
    "make_rule",
    "ragged",
    "sparse",
]
