"""Float64 constants of GPU programs, to the last bit.

TVM prints a double into device code with fifteen digits after the point, so that 1.25e-20 becomes
zero. Passing its bits keeps it; single precision is printed exactly.
"""

from __future__ import annotations

import struct
from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.tir import dtype_of, with_body
from sparsetir.sparse_ir.traversal import map_expr


def exact_constants(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace float64 constants that would not survive printing by their reinterpreted bits."""

    def visit(imm: Any) -> Any:
        if dtype_of(imm) != "float64" or float(f"{imm.value:.15f}") == imm.value:
            return imm
        (bits,) = struct.unpack("<q", struct.pack("<d", imm.value))
        if abs(bits) < 2**31:  # TVM would narrow the integer; only the smallest denormals do this
            return imm
        return tirx.reinterpret("float64", tirx.IntImm("int64", bits))

    return with_body(func, map_expr(func.body, [(tirx.FloatImm, visit)]))
