"""Keep small buffers of CPU programs on the stack, where LLVM promotes them to registers.

TVM 0.27 does so for constant sizes below 1024 bytes in scope "global"; others come from a workspace
pool in every iteration, which costs more than most rows of a sparse matrix. 16 vectors of 16 floats
just exceed that, and buffers of scope "local" (from `cache_write(.., "local")` and searches) are
the same memory on a CPU. TVM leaves an allocation unchanged that is annotated so, but its
`StorageRewrite` does not keep annotations: this pass runs after TVM's pipeline. It may go when the
test of sums in registers in `tests/runtime/test_lower.py` passes without it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
from tvm import tirx

from sparsetir.schedules.passes.consecutive_parts import consecutive_parts
from sparsetir.schedules.passes.row_offsets import row_offsets
from sparsetir.schedules.passes.short_tails import short_tails
from sparsetir.sparse_ir.tir import constant
from sparsetir.sparse_ir.traversal import map_expr

MOST = 4096  # bytes, as many as registers hold
UNCHANGED = "disable_lower_builtin"  # TVM's annotation
# The name of TVM's pipeline with this pass.
PIPELINE = "sparsetir.cpu"


def locals_on_stack(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function for a CPU, lowered but for TVM's builtins, whose small buffers are not lowered."""

    def visit(node: Any) -> Any:
        shape, element = node.buffer.ty.shape, tvm.DataType(str(node.buffer.ty.dtype))
        sizes = [n for n in map(constant, shape) if n is not None]
        if len(sizes) < len(shape) or prod(sizes) * element.bits * element.lanes > 8 * MOST:
            return node
        true = tirx.const(True, "bool")
        return tirx.AllocBuffer(node.buffer, {**node.annotations, UNCHANGED: true})

    return func.with_body(map_expr(func.body, [(tirx.AllocBuffer, visit)]))


def _pipeline() -> tuple[Any, Any, Any]:
    lowered, finished, of_device = tirx.get_tir_pipeline("s_tir")

    def host() -> Any:
        keep = tirx.transform.prim_func_pass(
            lambda func, *_: short_tails(row_offsets(locals_on_stack(consecutive_parts(func)))),
            opt_level=0,
        )
        return tvm.ir.transform.Sequential([keep, finished()])

    return lowered, host, of_device


tirx.register_tir_pipeline(PIPELINE, _pipeline)
