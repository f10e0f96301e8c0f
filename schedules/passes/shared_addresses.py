"""Addresses in shared memory as one address and a constant (GPU).

Instructions such as `ldmatrix` and `cp.async` take an address of 32 bits. CUDA's compiler does not
see through the conversion of one whose index it cannot split, and computes each anew. Before, and
after, with elements of two bytes::

    T.cuda.cvta_generic_to_shared(T.address_of(tiles[lane * 72 + 9248]))
    T.cuda.cvta_generic_to_shared(T.address_of(tiles[lane * 72])) + T.uint32(18496)

The instruction itself adds the constant.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.schedules.passes.nests import element_bytes
from sparsetir.sparse_ir.tir import with_body
from sparsetir.sparse_ir.traversal import map_expr

CONVERT = "tirx.cuda.cvta_generic_to_shared"


def shared_addresses(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function in CUDA's form with constants added to addresses instead of indices."""
    return with_body(func, map_expr(func.body, [(ir.Call, _split)]))


def _split(call: Any) -> Any:
    """A conversion with the constant outside; another call unchanged."""
    if not isinstance(call.op, ir.Op) or call.op.name != CONVERT:
        return call
    (load,) = call.args[0].args
    (index,) = load.indices
    if not isinstance(index, tirx.Add) or not isinstance(index.b, tirx.IntImm) or index.b.value < 0:
        return call
    first = tirx.address_of(tirx.BufferLoad(load.source, [index.a]))
    offset = tirx.const(int(index.b) * element_bytes(load.source), "uint32")
    return tirx.call_intrin("uint32", CONVERT, first) + offset
