"""Compile CPU functions without TVM's passes over buffers, which take half of the time.

TVM compacts the buffers of a block to the accessed region. If that is only bounded by the types of
sizes, as for `W[T.max(k - 1, 0), ..]` over parameters `m` and `feat`, it allocates 2**62 elements,
whose bytes overflow to 0: they go on the stack. A function with such workspaces, and without TVM's
own caches, which need compaction, is compiled without that pass; so is one whose buffers all fit
the stack, as the pass takes hours for some loop bounds (TVM 0.27).

TVM flattens buffers, and simplifies the offset of each access with all that surrounds it, even if
the buffers have one dimension.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir.instrument import pass_instrument

from sparsetir.sparse_ir.nodes import nodes_of, variables_of
from sparsetir.sparse_ir.tir import constant

# Attribute of a stage-III function.
WHOLE = "sparsetir.whole_workspaces"
STACK = 1024  # the most bytes of a buffer that TVM puts on the stack


def whole_workspaces(func: tirx.PrimFunc, names: Container[str]) -> tirx.PrimFunc:
    """A stage-III function, marked if TVM must not compact its workspaces.

    names : of stage-I buffers; others are caches created by TVM's primitives
    """
    arrays = [v for b in nodes_of(s_tir.SBlock, func.body) for v in b.alloc_buffers]
    open_ended = [v.name in names for v in arrays if _has_dynamic_shape(v)]
    stays = all(open_ended) if open_ended else all(map(_fits_the_stack, arrays))
    return func.with_attr(WHOLE, True) if stays else func


def _fits_the_stack(array: Any) -> bool:
    bits = prod(map(int, array.ty.shape)) * tvm.DataType(array.ty.dtype).bits
    return bits <= 8 * STACK


def _has_dynamic_shape(array: Any) -> bool:
    return not all(isinstance(n, tirx.IntImm) for n in array.ty.shape)


def is_flat(func: tirx.PrimFunc) -> bool:
    """Whether each access of a function is one to a flat buffer; TVM stores booleans as bytes."""
    accesses = nodes_of((ir.TensorLoad, tirx.BufferStore), func.body)
    buffers = [v for v in variables_of(func.body) if tirx.is_buffer_var(v)]
    params = {p.__chandle__() for p in func.params}
    return all(len(access.indices) == 1 for access in accesses) and all(
        (v.__chandle__() in params or len(v.ty.shape) == 1) and v.ty.dtype != "bool"
        and not v.ty.strides and constant(v.ty.elem_offset) == 0
        for v in buffers
    )  # fmt: skip


def without_passes(names: Container[str]) -> tvm.transform.PassContext:
    """A context in which TVM compiles functions without some of its passes."""

    @pass_instrument
    class Without:
        def should_run(self, _: Any, info: Any) -> bool:
            return str(info.name).rpartition(".")[2] not in names

    current = tvm.transform.PassContext.current()
    return tvm.transform.PassContext(
        opt_level=current.opt_level, config=dict(current.config.items()),
        instruments=[*current.instruments, Without()],
    )  # fmt: skip
