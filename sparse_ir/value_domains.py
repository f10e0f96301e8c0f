"""What index arrays hold: which coordinates or positions, and whether each of them once.

Known of arrays that are checked with the structure, and of those that recipes make of them. So
`X[I_at[e], k]` needs no guard where `I_at` holds rows and X lies over the rows, and a loop over e
that writes `Out[order[e]]` is free of races where `order` holds each position once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.assumptions import assumed_coordinates
from sparsetir.sparse_ir.computed import computed_parameters, keyword
from sparsetir.sparse_ir.nodes import Axis, SparseFunc, map_expr, variables_of, walk
from sparsetir.sparse_ir.position_space import as_dtype

__all__ = ["as_if_in_order", "counted_steps", "made_by_recipes", "permutations", "value_domains"]

PERMUTATIONS = (
    "order_by_column_parts",
    "pattern_order",
    "rows_of_slices",
    "long_rows",
    "left_rows",
    "rows_by_length",
)


def value_domains(func: SparseFunc) -> dict[Any, Any]:
    """By stage-I variable of a buffer, the length L where its values are known in [0, L)."""
    known: dict[str, Any] = {}  # by parameter
    by_indptr: dict[str, Axis] = {}
    by_indices: dict[str, Axis] = {}
    for axis in func.axes:
        if axis.kind == "sparse_variable":  # slots of a sparse_fixed axis may be padding
            known[str(axis.indices.name)] = axis.length
            by_indices[str(axis.indices.name)] = axis
        if axis.indptr is not None:
            by_indptr[str(axis.indptr.name)] = axis
            known[str(axis.indptr.name)] = axis.nnz + as_dtype(1, axis.idtype)
    for name, how in computed_parameters(func).items():
        rule = _RECIPES.get(how["recipe"])
        length = None if rule is None else rule(how, known, by_indptr, by_indices)
        if length is not None:
            known[name] = length
    length = {a.name: a.length for a in func.axes}
    out = {
        b.var: known[str(b.handle.name)]
        for b in func.buffers
        if b.handle is not None and str(b.handle.name) in known
    }
    said = assumed_coordinates(func)
    return out | {b.var: length[said[b.name]] for b in func.buffers if b.name in said}


def permutations(func: SparseFunc) -> set[Any]:
    """Stage-I variables of the buffers that hold no value twice."""
    made = {n for n, how in computed_parameters(func).items() if how["recipe"] in PERMUTATIONS}
    return {b.var for b in func.buffers if b.handle is not None and str(b.handle.name) in made}


def counted_steps(func: SparseFunc) -> dict[str, int]:
    """Computed parameters that count steps through an axis, and how long each step is."""
    found = {n: (_STEPS.get(how["recipe"]), how) for n, how in computed_parameters(func).items()}
    steps = {n: how[step] for n, (step, how) in found.items() if step is not None}
    return {n: int(step) for n, step in steps.items() if not isinstance(step, str)}


def made_by_recipes(func: SparseFunc) -> tuple[set[str], set[Any]]:
    """Axes, by name, and stage-I variables of buffers that recipes make.

    What is computed of them is a primitive's work, and trusted as they are.
    """
    made = set(computed_parameters(func))
    axes = {
        a.name
        for a in func.axes
        for own in [*(x for x in (a.indptr, a.indices) if x is not None), *variables_of(a.length)]
        if str(own.name) in made
    }
    return axes, {
        b.var for b in func.buffers if b.handle is not None and str(b.handle.name) in made
    }


def as_if_in_order(tree: Any, orders: set[Any]) -> Any:
    """A statement or iteration that visits elements in the order of storage, for what asks who

    writes what: where all accesses of a buffer go through the same permutation, `Out[order[e]]`,
    two of them meet if and only if those at `Out[e]` do.
    """
    if not orders:
        return tree
    through: dict[Any, list[set[Any]]] = {}

    def note(buffer: Any, indices: Any) -> None:
        found = through.setdefault(buffer, [set() for _ in indices])
        for dim, index in zip(found, indices, strict=True):
            dim.add(_order_of(index, orders))

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferStore):
            note(node.buffer, node.indices)
        elif isinstance(node, ir.TensorLoad):
            note(node.source, node.indices)

    walk(tree, visit, tirx.BufferStore, ir.TensorLoad)

    def straight(buffer: Any, indices: Any) -> list[Any]:
        return [
            index.indices[0] if len(dim) == 1 and None not in dim else index
            for dim, index in zip(through.get(buffer, [set()] * len(indices)), indices, strict=True)
        ]

    def load(node: Any) -> Any:
        return tirx.BufferLoad(node.source, straight(node.source, node.indices))

    def store(node: Any) -> Any:
        return tirx.BufferStore(node.buffer, node.value, straight(node.buffer, node.indices))

    return map_expr(tree, [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def _order_of(index: Any, orders: set[Any]) -> Any:
    """The permutation that an index is loaded from; None for other indices."""
    loaded = isinstance(index, ir.TensorLoad) and len(index.indices) == 1
    return index.source if loaded and index.source in orders else None


def _rows(how: Mapping[str, Any], _: Any, by_indptr: Mapping[str, Axis], __: Any) -> Any:
    axis = by_indptr.get(str(how["indptr"])[1:])
    root = axis is not None and axis.parent.kind == "dense_fixed"
    return axis.parent.length if axis is not None and root else None


def _elements(how: Mapping[str, Any], _: Any, __: Any, by_indices: Mapping[str, Axis]) -> Any:
    axis = by_indices.get(str(how["indices"])[1:])
    return None if axis is None else axis.nnz


def _columns(how: Mapping[str, Any], _: Any, __: Any, by_indices: Mapping[str, Axis]) -> Any:
    """The length of an axis by that of the columns."""
    found = [a.length for a in by_indices.values() if keyword(a.length) == how["n"]]
    return found[0] if found else None


def _last_vectors(how: Mapping[str, Any], _: Any, by_indptr: Mapping[str, Axis], __: Any) -> Any:
    """Where vectors begin of elements that are all there."""
    axis = by_indptr.get(str(how["indptr"])[1:])
    return None if axis is None else axis.nnz - as_dtype(how["lanes"] - 1, axis.idtype)


def _positions(how: Mapping[str, Any], _: Any, by_indptr: Mapping[str, Axis], __: Any) -> Any:
    axis = by_indptr.get(str(how["indptr"])[1:])
    return None if axis is None else axis.nnz


def _places(how: Mapping[str, Any], _: Any, by_indptr: Mapping[str, Axis], __: Any) -> Any:
    axis = by_indptr.get(str(how["starts"])[1:])
    return None if axis is None else as_dtype(how["size"], axis.idtype)


def _rows_of_panel(how: Mapping[str, Any], _: Any, __: Any, ___: Any) -> Any:
    return as_dtype(how["rows"], "int32")


def _some(how: Mapping[str, Any], known: Mapping[str, Any], _: Any, __: Any) -> Any:
    return known.get(str(how["order"])[1:])


def _same_values(how: Mapping[str, Any], known: Mapping[str, Any], _: Any, __: Any) -> Any:
    return known.get(str(how["values"])[1:])


# recipe of a number -> its argument that says how long a step is
_STEPS = {"panel_count": "rows", "slice_count": "lanes", "tile_count": "size"}
# recipe -> the length of what its values are coordinates or positions of
_RECIPES: dict[str, Callable[..., Any]] = {
    "row_of_position": _rows,
    "order_by_column_parts": _elements,
    "pattern_order": _elements,
    "entry_columns": _columns,
    "pattern_rows": _rows_of_panel,
    "in_order": _same_values,
    "row_order": _rows,
    "rows_by_length": _rows,
    "rows_of_slices": _some,
    "long_rows": _some,
    "left_rows": _some,
    "slice_slots": _positions,
    "positions_of_rows": _positions,
    "row_lasts": _positions,
    "row_starts": _positions,
    "last_vectors": _last_vectors,
    "places_in_tiles": _places,
}
