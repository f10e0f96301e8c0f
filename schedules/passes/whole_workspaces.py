"""Keep TVM from compacting workspaces of non-constant sizes.

TVM compacts the buffers of a block to the accessed region. If that is only bounded by the types of
sizes, as for `W[T.max(k - 1, 0), ..]` over parameters `m` and `feat`, it allocates 2**62 elements,
whose bytes overflow to 0: they go on the stack. A function with such workspaces, and without TVM's
own caches, which need compaction, is compiled without that pass; so is one with nothing to
compact, as the pass takes hours for some loop bounds (TVM 0.27).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.instrument import pass_instrument

from sparsetir.sparse_ir.nodes import nodes_of
from sparsetir.sparse_ir.tir import is_one

# Attribute of a stage-III function.
WHOLE = "sparsetir.whole_workspaces"


def whole_workspaces(func: tirx.PrimFunc, names: Container[str]) -> tirx.PrimFunc:
    """A stage-III function, marked if TVM must not compact its workspaces.

    names : of stage-I buffers; others are caches created by TVM's primitives
    """
    arrays = [v for b in nodes_of(s_tir.SBlock, func.body) for v in b.alloc_buffers]
    open_ended = [v.name in names for v in arrays if _has_dynamic_shape(v)]
    stays = all(open_ended) if open_ended else all(map(_is_scalar, arrays))
    return func.with_attr(WHOLE, True) if stays else func


def _is_scalar(array: Any) -> bool:
    return all(is_one(n) for n in array.ty.shape)


def _has_dynamic_shape(array: Any) -> bool:
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
