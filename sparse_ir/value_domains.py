"""Value domains of index arrays: coordinates or positions of an axis, with or without repetition.

They are known for arrays that are checked with the structure, and for those that recipes compute
from them. So `X[I_at[e], k]` needs no guard if `I_at` holds rows and X lies over the rows, and a
loop over e that writes `Out[order[e]]` is free of races if `order` holds each position once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.computed import computed_parameters, keyword
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, nodes_of, variables_of
from sparsetir.sparse_ir.promises import assumed_coordinates
from sparsetir.sparse_ir.recipes.registry import (
    Below,
    LengthOf,
    NonzerosOf,
    RowsOf,
    SameAs,
    facts_of,
)
from sparsetir.sparse_ir.tir import as_dtype
from sparsetir.sparse_ir.traversal import access_rules, map_expr


def value_domains(func: SparseFunc) -> dict[Any, Any]:
    """Lengths L by stage-I variable of a buffer whose values are known to be in [0, L)."""
    known = _Lengths(func).known
    length = {a.name: a.length for a in func.axes}
    out = {
        b.var: known[str(b.handle.name)]
        for b in func.buffers
        if b.handle is not None and str(b.handle.name) in known
    }
    said = assumed_coordinates(func)
    return out | {b.var: length[said[b.name]] for b in func.buffers if b.name in said}


def permutations(func: SparseFunc) -> set[Any]:
    """Stage-I variables of the buffers without repeated values."""
    names: set[str] = set()
    for name, how in computed_parameters(func).items():
        distinct = facts_of(how["recipe"]).distinct
        if str(how[distinct])[1:] in names if isinstance(distinct, str) else distinct:
            names.add(name)
    if not names:
        return set()
    return {b.var for b in func.buffers if b.handle is not None and str(b.handle.name) in names}


def counted_steps(func: SparseFunc) -> dict[str, int]:
    """Computed parameters that count steps through an axis, and the length of each step."""
    computed = computed_parameters(func)
    facts = {n: (facts_of(how["recipe"]).steps, how) for n, how in computed.items()}
    steps = {n: how[step] for n, (step, how) in facts.items() if step is not None}
    return {n: int(step) for n, step in steps.items() if not isinstance(step, str)}


def made_by_recipes(func: SparseFunc) -> tuple[set[str], set[Any]]:
    """Names of axes, and stage-I variables of buffers, that recipes compute.

    Values computed from them are a primitive's, and are trusted as well.
    """
    computed = set(computed_parameters(func))
    axes = {
        a.name
        for a in func.axes
        for array in [*(x for x in (a.indptr, a.indices) if x is not None), *variables_of(a.length)]
        if str(array.name) in computed
    }
    return axes, {
        b.var for b in func.buffers if b.handle is not None and str(b.handle.name) in computed
    }


def without_permutations(tree: Any, orders: set[Any]) -> Any:
    """A statement or iteration with permutations replaced by the identity.

    If all accesses of a buffer are indexed by the same permutation, `Out[order[e]]`, two of them
    conflict if and only if those at `Out[e]` do.
    """
    if not orders:
        return tree
    through: dict[Any, list[set[Any]]] = {}

    for node in nodes_of((tirx.BufferStore, ir.TensorLoad), tree):
        buffer = node.source if isinstance(node, ir.TensorLoad) else node.buffer
        dims = through.setdefault(buffer, [set() for _ in node.indices])
        for dim, index in zip(dims, node.indices, strict=True):
            dim.add(_order_of(index, orders))

    def straight(buffer: Any, indices: Any) -> tuple[Any, list[Any]]:
        return buffer, [
            index.indices[0] if len(dim) == 1 and None not in dim else index
            for dim, index in zip(through.get(buffer, [set()] * len(indices)), indices, strict=True)
        ]

    return map_expr(tree, access_rules(straight))


def _order_of(index: Any, orders: set[Any]) -> Any:
    """The permutation from which an index is loaded; None for other indices."""
    loaded = isinstance(index, ir.TensorLoad) and len(index.indices) == 1
    return index.source if loaded and index.source in orders else None


class _Lengths:
    """The domains of recipes' results, from the known domains of their inputs.

    known : by parameter, the length L if its values are in [0, L); results are added
    """

    def __init__(self, func: SparseFunc) -> None:
        self.known: dict[str, Any] = {}
        self.by_indptr: dict[str, Axis] = {}
        self.by_indices: dict[str, Axis] = {}
        for axis in func.axes:
            if axis.kind == "sparse_variable":  # slots of a sparse_fixed axis may be padding
                self.known[str(axis.indices.name)] = axis.length
                self.by_indices[str(axis.indices.name)] = axis
            if axis.indptr is not None:
                self.by_indptr[str(axis.indptr.name)] = axis
                self.known[str(axis.indptr.name)] = axis.nnz + as_dtype(1, axis.idtype)
        dtypes = {str(b.handle.name): b.dtype for b in func.buffers if b.handle is not None}
        for name, how in computed_parameters(func).items():
            length = self._length(facts_of(how["recipe"]).values, how, dtypes.get(name))
            if length is not None:
                self.known[name] = length

    def _length(self, said: Any, how: Mapping[str, Any], dtype: str | None) -> Any:
        """The length that a recipe's fact implies for a buffer of a type, or None."""
        names = {key: str(value)[1:] for key, value in how.items()}
        match said:
            case RowsOf(indptr, run):
                axis = self.by_indptr.get(names[indptr])
                if axis is None or axis.parent.kind != "dense_fixed":
                    return None
                length = axis.parent.length
                return length if run is None else length - as_dtype(how[run] - 1, axis.idtype)
            case NonzerosOf(indptr, indices, run):
                axis = self.by_indptr.get(names[indptr]) if indptr else None
                axis = self.by_indices.get(names[indices]) if indices else axis
                if axis is None or run is None:
                    return None if axis is None else axis.nnz
                return axis.nnz - as_dtype(how[run] - 1, axis.idtype)
            case LengthOf(length, run):
                axes = self.by_indices.values()
                axis = next((a for a in axes if keyword(a.length) == how[length]), None)
                if axis is None or run is None:
                    return None if axis is None else axis.length
                return axis.length - as_dtype(how[run] - 1, axis.idtype)
            case Below(bound):
                return None if dtype is None else as_dtype(how[bound], dtype)
            case SameAs(array):
                return self.known.get(names[array])
        return None
