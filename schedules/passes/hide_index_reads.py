"""Hide reads that are only used as indices from TVM's primitives.

A block of stage II reads index arrays, and declares that::

    with T.sblock("spmm1"):
        T.reads(A[vi, vj], J_indices[vi, vj], B[J_indices[vi, vj], vk])

`tensorize` compares a block's reads with those of its intrinsic, which has no index arrays. After
`hide_index_reads(sch, "spmm1")`::

        T.reads(A[vi, vj], B[J_indices[vi, vj], vk])
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm_ffi.structural import WalkResult

from sparsetir.schedules.passes.parallel_loops import stage_two_of
from sparsetir.sparse_ir.exact import is_choice
from sparsetir.sparse_ir.nodes import nodes_of, stores_of


def hide_index_reads(sch: Any, block: Any) -> list[str]:
    """Hide the index arrays that a block reads, and return their names.

    sch : a sparsetir.Schedule lowered to stage II, or a tvm.s_tir.Schedule
    block : a block of TVM's, or its name

    These are arrays that the block only loads in indices, conditions, and loop bounds. This uses
    TVM's `unsafe_hide_buffer_access`: unsafe before a primitive that would move a block which
    writes these arrays, but programs have no such blocks.
    """
    sch = stage_two_of("hide_index_reads", sch)
    block = sch.get_sblock(block) if isinstance(block, str) else block
    node: s_tir.SBlock = sch.get(block)
    values: set[Any] = {r.source for r in node.writes}

    def visit(tree: Any) -> None:
        tvm_ffi.structural_walk(
            tree, [(ir.TensorLoad, read), (ir.Call, chosen), (tirx.Select, chosen)], order="pre"
        )

    def read(load: Any) -> Any:
        values.add(load.source)
        return WalkResult.SKIP  # the indices are not values

    def chosen(node: Any) -> Any:
        """The possible values of a conditional expression, without the condition."""
        if isinstance(node, tirx.Select):
            either = [node.true_value, node.false_value]
        elif is_choice(node):
            either = node.args[1:]
        else:
            return WalkResult.ADVANCE
        for expr in either:
            visit(expr)
        return WalkResult.SKIP

    for store in stores_of(node.body, node.init):
        visit(store.value)
    for call in nodes_of(tirx.Evaluate, node.body):
        visit(call.value)
    hidden = [n for n, region in enumerate(node.reads) if region.source not in values]
    if hidden:
        sch.unsafe_hide_buffer_access(block, "read", hidden)
    return [str(node.reads[n].source.name) for n in hidden]
