"""Small local buffers of CPU programs on the stack.

TVM keeps a constant-size allocation on the stack, where LLVM turns it into registers, only when its
scope is "global"; one of scope "local" (what `cache_write(..., "local")` and searches make) is
fetched from a workspace pool in every iteration, which costs more than most rows of a sparse
matrix. On a CPU the two scopes mean the same memory.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from sparsetir.sparse_ir.nodes import buffer_var, substitute, walk

__all__ = ["locals_on_stack"]


def locals_on_stack(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give every block-allocated buffer of scope "local" the scope "global"."""
    mapping: dict[Any, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, s_tir.SBlock):
            for var in node.alloc_buffers:
                if var.ty.storage_scope == "local":
                    mapping[var] = buffer_var(var.ty.shape, var.ty.dtype, var.name)

    walk(func.body, visit)
    return func.with_body(substitute(func.body, mapping)) if mapping else func
