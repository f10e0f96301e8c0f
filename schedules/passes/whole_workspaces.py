"""Workspaces of sizes that are no constants stay as large as they are.

TVM compacts the buffers of a block to the region that is accessed. Where that is bounded by the
types of sizes alone, as of `W[T.max(k - 1, 0), ..]` over parameters `m` and `feat`, it takes 2**62
elements, whose bytes overflow to none: they go on the stack. A function with such workspaces, and
without caches of TVM's own that are to be compacted, is compiled without that pass; so is one whose
buffers all fit on the stack, as the pass takes hours over some bounds of loops (TVM 0.27), and a
third of the time of all passes over most.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.instrument import pass_instrument

from sparsetir.sparse_ir.nodes import nodes_of

# Attribute of a function of stage III.
WHOLE = "sparsetir.whole_workspaces"
STACK = 1024  # bytes up to which TVM puts a buffer on the stack


def whole_workspaces(func: tirx.PrimFunc, names: Container[str]) -> tirx.PrimFunc:
    """A function of stage III, marked where TVM is not to compact its workspaces.

    names : of buffers of stage I; others are caches that primitives of TVM made
    """
    arrays = [v for b in nodes_of(s_tir.SBlock, func.body) for v in b.alloc_buffers]
    open_ended = [v.name in names for v in arrays if _is_open_ended(v)]
    stays = all(open_ended) if open_ended else all(map(_fits_the_stack, arrays))
    return func.with_attr(WHOLE, True) if stays else func


def _fits_the_stack(array: Any) -> bool:
    bits = prod(map(int, array.ty.shape)) * tvm.DataType(array.ty.dtype).bits
    return bits <= 8 * STACK


def _is_open_ended(array: Any) -> bool:
    return not all(isinstance(n, tirx.IntImm) for n in array.ty.shape)


def without_compaction() -> Any:
    """A context in which TVM compiles functions without compacting their buffers."""

    @pass_instrument
    class Whole:
        def should_run(self, _: Any, info: Any) -> bool:
            return not str(info.name).endswith("CompactBufferAllocation")

    current = tvm.transform.PassContext.current()
    return tvm.transform.PassContext(
        opt_level=current.opt_level, config=dict(current.config.items()),
        instruments=[*current.instruments, Whole()],
    )  # fmt: skip
