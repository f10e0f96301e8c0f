"""Contributions of a program's iterations to the gradients of the buffers that they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.adjoint import NoAdjointError, adjoints
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    is_among,
    variables_of,
)
from sparsetir.sparse_ir.reduction import identity
from sparsetir.sparse_ir.tir import cast, dtype_of, zero
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.updates import Update, refused


class Contribution(NamedTuple):
    """The values that visits of an iteration add to elements of a buffer.

    name : of the iteration that adds them
    kinds : "S" or "R" per axis of `it`
    term : the value; None if the iteration is taken as it is, to recompute what it writes
    """

    name: str
    it: SparseIteration
    kinds: str
    conditions: list[Any]
    indices: list[Any]
    term: Any
    to: SparseBuffer

    @property
    def reads(self) -> list[Any]:
        """The variables that the values depend on."""
        trees = [self.it] if self.term is None else [self.term, *self.conditions, *self.indices]
        return variables_of(*trees)


def sum_type(value: Any) -> str:
    """The type in which gradients through a value are accumulated."""
    return "float64" if dtype_of(value) == "float64" else "float32"


def _last_first(updates: Sequence[Update]) -> list[Update]:
    """Updates of a buffer after all that read it, otherwise in their order."""
    depth: dict[Any, int] = {}  # of each buffer: reads between it and a result
    for u in reversed(updates):
        for other in updates:
            if u.reads(other.target):
                depth[other.target] = max(depth.get(other.target, 0), depth.get(u.target, 0) + 1)
    return sorted(updates, key=lambda u: depth.get(u.target, 0))


def contributions_of(
    func: SparseFunc, updates: Sequence[Update], graded: Mapping[Any, SparseBuffer]
) -> list[Contribution]:
    """The contributions of iterations, in the order of the gradient: those to the gradient of a
    buffer before those that read it.

    graded : the gradient of each buffer that has one; those of results are parameters
    """
    parts: list[Contribution] = []
    known = {grad.var for grad in graded.values() if grad.handle is not None}
    for update in _last_first(updates):
        if update.target in graded and graded[update.target].var in known:
            parts += _of_update(func, update, graded)
            known |= {part.to.var for part in parts}
    return parts


def _of_update(
    func: SparseFunc, update: Update, graded: Mapping[Any, SparseBuffer]
) -> list[Contribution]:
    """The contributions of one iteration: one for each place that it reads of a buffer."""
    it, store = update.it, update.store
    adjoint = tirx.BufferLoad(graded[update.target].var, store.indices)
    adjoint = cast(adjoint, sum_type(update.value))
    parts: list[Contribution] = []
    if update.operator in ("max", "min"):
        attained, number = _attained(update), _number(func, func.buffer(store.buffer.name), adjoint)
        one, none = tirx.const(1.0, number.dtype), zero(number.dtype)
        ones = tirx.Select(attained, one, none)
        parts.append(_contribution(f"{it.name}_number", update, list(store.indices), ones, number))
        share = adjoint / tirx.BufferLoad(number.var, store.indices)
        adjoint = tirx.Select(attained, share, none)
    for var, to in graded.items():
        buffer = func.buffer(str(var.name))
        try:
            terms = adjoints(update.value, adjoint, var)
        except NoAdjointError as error:
            raise refused(
                func,
                f"'{it.name}': expected an expression with a rule for its gradient, got {error}",
            ) from None
        of = str(var.name).lower() if buffer.handle is None else buffer.handle.name
        parts += [
            _contribution(f"{it.name}_grad_{of}", update, list(at), term, to) for at, term in terms
        ]
    return parts


def with_stored_values(
    part: Contribution, updates: Sequence[Update], stored: Collection[Any]
) -> Contribution:
    """A contribution that loads the value that its iteration sets, instead of computing it.

    stored : the buffers whose values are there
    """
    update = next(u for u in updates if u.it.name == part.it.name)
    load = tirx.BufferLoad(update.target, update.store.indices)
    same_type = dtype_of(load) == dtype_of(update.value)
    is_set = update.operator is None and update.target in stored and same_type
    is_set = is_set and sum(u.target.same_as(update.target) for u in updates) == 1
    if part.term is None or not is_set or isinstance(update.value, ir.TensorLoad):
        return part

    def loaded(expr: Any) -> Any:
        return load if tvm_ffi.structural_equal(expr, update.value) else expr

    return part._replace(term=map_expr(part.term, [(type(update.value), loaded)]))


def live(parts: Sequence[Contribution], out: SparseBuffer) -> list[Contribution]:
    """The contributions that a buffer's values depend on."""
    needed, kept = {out.var}, list[Contribution]()
    for part in reversed(parts):
        if part.to.var in needed:
            kept.insert(0, part)
            needed |= {*part.reads}
    return kept


def _contribution(
    name: str, update: Update, indices: list[Any], term: Any, to: SparseBuffer
) -> Contribution:
    used = set(variables_of(*indices))
    kinds = "".join("S" if v in used else "R" for v in update.it.vars)
    return Contribution(name, update.it, kinds, update.conditions, indices, term, to)


def _attained(update: Update) -> Any:
    """Whether a term attains a maximum or minimum that the constant of its init does not."""
    best = tirx.BufferLoad(update.target, update.store.indices)
    attained = tirx.EQ(cast(update.value, dtype_of(best)), best)
    first = update.it.init.value
    assert update.operator is not None
    lowest = tirx.min_value if update.operator == "max" else tirx.max_value
    dtype = dtype_of(first)
    if is_among(first, [identity(update.operator, dtype), lowest(dtype)]):
        return attained
    return tirx.all(attained, tirx.NE(best, first))


def _number(func: SparseFunc, buffer: SparseBuffer, adjoint: Any) -> SparseBuffer:
    """A buffer for the number of terms that attain each of another buffer's extrema."""
    name = fresh_name(func, f"NUMBER_{buffer.name}")
    var = buffer_var(list(buffer.var.ty.shape), dtype_of(adjoint), name)
    return SparseBuffer(var, buffer.axes, None)
