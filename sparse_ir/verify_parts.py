"""The rules of stage I on axes that are visited in parts (`T.part`)."""

from __future__ import annotations

from typing import Any

from tvm.sym import Analyzer

from sparsetir.sparse_ir.nodes import Axis, FusedAxis, PartAxis, flat_axes
from sparsetir.sparse_ir.tir import size_text
from sparsetir.sparse_ir.verify_sites import Site, Texts


def parts_problems(site: Site) -> Texts:
    """The broken rules of an iteration's parts, in textual order."""
    before = {a.name for it in site.iterations for a in flat_axes(it.axes)}
    for item in site.stmt.axes:
        if isinstance(item, PartAxis):
            problem = _by(item) or _of(item) or _size(item) or _parent(item, before)
            if problem:
                yield f"part('{item.name}', '{item.by.name}'): {problem}"
        before |= {a.name for a in flat_axes([item])}


def _by(item: PartAxis) -> str:
    by = item.by
    if by.kind != "dense_variable":
        return f"expected '{by.name}' to be a dense_variable axis, got a {by.kind} one"
    types = {a.idtype for a in flat_axes([item])}
    if types != {by.idtype}:
        return (
            f"expected '{by.name}' of the idtype of '{item.name}', {' and '.join(sorted(types))}, "
            f"got {by.idtype}"
        )
    return ""


def _of(item: PartAxis) -> str:
    axes = flat_axes([item])
    if isinstance(item.axis, FusedAxis):
        if [a.name for a in axes[-1].ancestors()] != [a.name for a in axes]:
            path = [a.name for a in axes[-1].ancestors()]
            return f"expected fused axes from a root down, {path}, got {[a.name for a in axes]}"
    elif axes[0].kind == "sparse_fixed":
        return (
            f"expected a root or a variable axis, got '{item.name}' (sparse_fixed); "
            "split its slots instead, or fuse it with the axes above it"
        )
    return ""


def _size(item: PartAxis) -> str:
    axes = flat_axes([item])
    size: Any = axes[0].length
    for axis in axes[-1].ancestors():
        size = _positions(axis, size)
    if Analyzer().can_prove_equal(size, item.by.nnz):
        return ""
    return (
        f"expected parts of all positions of '{axes[-1].name}', nnz = {size_text(size)} of "
        f"'{item.by.name}', got {size_text(item.by.nnz)}"
    )


def _positions(axis: Axis, above: Any) -> Any:
    """The number of elements of an axis, under all of its parents."""
    if axis.kind == "dense_fixed":
        return axis.length
    return axis.nnz if axis.is_variable else above * axis.nnz_cols


def _parent(item: PartAxis, before: set[str]) -> str:
    parent = item.by.parent
    if parent.name in before:
        return ""
    return f"expected axis '{parent.name}', the parent of '{item.by.name}', to be iterated outside"
