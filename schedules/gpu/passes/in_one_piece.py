"""Keep the number of a row in one piece, so that nvcc sees where its elements are aligned.

TVM turns `int64(blockIdx.x * 4 + threadIdx.y) * 128` into a sum of casts. Of an address that holds
such a sum nvcc often does not see that it is a multiple of 16 bytes, and makes a vector store four.
Before, at the block "spmm0"::

    vi = T.axis.spatial(m, i_0 * 4 + i_1)

After `in_one_piece(func, "spmm0")`, which leaves TVM nothing to multiply out::

    vi = T.axis.spatial(m, i_0 * 4 + i_1 | 0)

Numbers of 64 bits go through 32, which must hold them: `T.int64(T.int32(i_0 * 4 + i_1) | 0)`.
TVM's schedule takes such blocks for more than they are: this comes when all else is done.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.expressions import as_dtype, dtype_of
from sparsetir.sparse_ir.nodes import map_expr
from sparsetir.sparse_ir.statements import block_with

__all__ = ["in_one_piece"]


def in_one_piece(func: tirx.PrimFunc, *names: str) -> tirx.PrimFunc:
    """A stage-II function whose blocks of these names have iterators that are opaque sums.

    Iterators that are a loop's variable, or a constant, stay as they are. So do indices, but for
    numbers of vectors in stores, `(min(p * 32, 118) + x) * 4 + lane`.
    """

    def realize(node: Any) -> Any:
        if str(node.block.name_hint) not in names:
            return node
        values = [_whole(value) for value in node.iter_values]
        body = map_expr(node.block.body, [(tirx.BufferStore, _store)])
        return s_tir.SBlockRealize(values, node.predicate, block_with(node.block, body=body))

    return func.with_body(map_expr(func.body, [(s_tir.SBlockRealize, realize)]))


def _store(store: Any) -> Any:
    *outer, last = store.indices
    vectors: Any = last.a if isinstance(last, tirx.Add) and isinstance(last.b, ir.Var) else None
    if not isinstance(vectors, tirx.Mul) or not isinstance(vectors.a, tirx.Add):
        return store
    place = _whole(vectors.a) * vectors.b + last.b
    return tirx.BufferStore(store.buffer, store.value, [*outer, place])


def _whole(value: Any) -> Any:
    if isinstance(value, ir.Var | tirx.IntImm):
        return value
    return as_dtype(tirx.bitwise_or(as_dtype(value, "int32"), 0), dtype_of(value))
