"""Place small local buffers of CPU programs on the stack.

TVM keeps a constant-size allocation on the stack, where LLVM promotes it to registers, only if its
scope is "global"; one of scope "local" (from `cache_write(..., "local")` and searches) comes from a
workspace pool in every iteration, which costs more than most rows of a sparse matrix. On a CPU the
two scopes are the same memory.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute


def locals_on_stack(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give every block-allocated buffer of scope "local" the scope "global"."""
    mapping = {
        var: buffer_var(var.ty.shape, var.ty.dtype, var.name)
        for block in nodes_of(s_tir.SBlock, func.body)
        for var in block.alloc_buffers
        if var.ty.storage_scope == "local"
    }
    return func.with_body(substitute(func.body, mapping)) if mapping else func
