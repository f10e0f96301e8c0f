"""Formats: rewrite rules, decomposition, index inference, and the library's formats."""

from sparsetir.formats.bsr import BSR
from sparsetir.formats.converted import ConvertedFormat, PartStatistics
from sparsetir.formats.coo import COO
from sparsetir.formats.csc import CSC
from sparsetir.formats.csf import CSF
from sparsetir.formats.csr import CSR
from sparsetir.formats.dbsr import DBSR
from sparsetir.formats.dcsr import DCSR
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.dia import DIA
from sparsetir.formats.ell import ELL
from sparsetir.formats.enumerated_patterns import EnumeratedPatterns, PanelPatterns
from sparsetir.formats.format import Format
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.hyb import Hyb
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, ragged, sparse
from sparsetir.formats.mixture import Mixture, by_band, by_block_fill, by_row_length
from sparsetir.formats.partition import check_partition
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.formats.quantised_rows import QuantisedRows
from sparsetir.formats.ragged_rows import Ragged
from sparsetir.formats.relational_hyb import RelationalHyb
from sparsetir.formats.row_ell import RowELL
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.formats.rule_format import RuleFormat
from sparsetir.formats.sell import SELL
from sparsetir.formats.sr_bcrs import SRBCRS

__all__ = [
    "BSR",
    "COO",
    "CSC",
    "CSF",
    "CSR",
    "ConvertedFormat",
    "DBSR",
    "DCSR",
    "DIA",
    "ELL",
    "EnumeratedPatterns",
    "Format",
    "FormatPart",
    "FormatRewriteRule",
    "Hyb",
    "Mixture",
    "Operand",
    "PanelPatterns",
    "PartStatistics",
    "Pattern",
    "QuantisedRows",
    "Ragged",
    "RelationalHyb",
    "RowELL",
    "RuleFormat",
    "SELL",
    "SRBCRS",
    "by_band",
    "by_block_fill",
    "by_row_length",
    "check_partition",
    "decompose_format",
    "dense",
    "extract_preprocess",
    "fixed",
    "infer_format",
    "make_rule",
    "ragged",
    "sparse",
]
