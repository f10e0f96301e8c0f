"""Blocks that add products to elements atomically, taken apart (GPU).

What :mod:`sparsetir.schedules.gpu.passes.inner_sums` and
:mod:`sparsetir.schedules.gpu.passes.inner_products` read, and how both write the steps of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, tirx

from sparsetir.schedules.passes.nests import Nest, block_of, find_nest, is_choice, is_zero
from sparsetir.sparse_ir.expressions import as_dtype, dtype_of, free_vars, is_one
from sparsetir.sparse_ir.nodes import buffer_var, nodes_of, substitute
from sparsetir.sparse_ir.reduction import factors_of, taken_apart
from sparsetir.sparse_ir.statements import loop_over, loop_with
from sparsetir.sparse_ir.tile_marks import is_likely
from sparsetir.sparse_ir.traversal import map_expr

ATOMIC_ADD = "atomicAdd"


class AtomicProduct(NamedTuple):
    """A block that adds a product to an element.

    place : the element
    factors : without what says that they are zero elsewhere
    conditions : that it is added, and that factors are not zero, each once
    """

    place: Any
    factors: list[Any]
    conditions: list[Any]

    def add(self, value: Any) -> Any:
        """The statement that adds another value."""
        dtype = dtype_of(self.place)
        call = tirx.call_extern(dtype, ATOMIC_ADD, tirx.address_of(self.place), value)
        return tirx.Evaluate(call)


def atomic_product(body: Any) -> AtomicProduct | None:
    """Of the body of a block; None for another one."""
    conditions, added = taken_apart(body)
    call: Any = added.value if isinstance(added, tirx.Evaluate) else None
    if getattr(getattr(call, "op", None), "name", "") != "tirx.call_extern" or (
        str(getattr(call.args[0], "value", "")) != ATOMIC_ADD
    ):
        return None
    found = [c for condition in conditions for c in _each(condition)]
    factors = []
    for factor in factors_of(call.args[2]):
        plain, more = _without_choice(factor)
        factors.append(plain)
        found += more
    return AtomicProduct(call.args[1].args[0], factors, _different(found))


def tile_nest(who: str, func: tirx.PrimFunc, block: str, outer: int) -> tuple[Nest, list[Any]]:
    """The nest of a block less its outer loops, and those of these that run more than once."""
    nest = find_nest(who, func, block)
    around = nest.loops[:outer]
    single = {x.loop_var: as_dtype(0, dtype_of(x.loop_var)) for x in around if is_one(x.extent)}
    inside = Nest(nest.name, nest.loops[outer:], substitute(nest.body, single))
    return inside, [x for x in around if not is_one(x.extent)]


def within(loops: list[Any], body: Any) -> Any:
    """A statement in loops, outermost first."""
    for loop in reversed(loops):
        body = loop_with(loop, body=body)
    return body


def known_by(conditions: list[Any], loops: list[Any], inside: list[Any]) -> list[Any]:
    """The conditions that some of the loops, and those around all `inside`, tell."""
    others = {x.loop_var for x in inside} - {x.loop_var for x in loops}
    return [c for c in conditions if not free_vars(c) & others]


def step_of(name: str, loops: list[Any], body: Any) -> Any:
    """A block in loops of its own variables."""
    inside = nodes_of(tirx.For, body)
    fresh = {x.loop_var: _fresh(x.loop_var) for x in [*loops, *inside]}
    body = block_of(name, substitute(body, fresh))
    for loop in reversed(loops):
        body = loop_over(fresh[loop.loop_var], loop.extent, body)
    return body


def tile_buffer(loops: list[Any], dtype: str, name: str, scope: str) -> Any:
    """A buffer over loops of constant extents."""
    return buffer_var([int(x.extent) for x in loops], dtype, name, scope)


def at(*loops: Any) -> list[Any]:
    """Indices along loops."""
    return [x.loop_var for x in loops]


def _each(condition: Any) -> list[Any]:
    if isinstance(condition, tirx.And):
        return [*_each(condition.a), *_each(condition.b)]
    if is_likely(condition):
        return _each(condition.args[0])
    return [condition]


def _different(conditions: list[Any]) -> list[Any]:
    out: list[Any] = []
    for condition in conditions:
        if not any(tvm_ffi.structural_equal(condition, other) for other in out):
            out.append(condition)
    return out


def _without_choice(factor: Any) -> tuple[Any, list[Any]]:
    """A factor, and the conditions without which it is zero."""
    found: list[Any] = []

    def visit(call: Any) -> Any:
        if not is_choice(call) or not is_zero(call.args[2]):
            return call
        found.extend(_each(call.args[0]))
        return call.args[1]

    return map_expr(factor, [(ir.Call, visit)]), found


def _fresh(var: Any) -> Any:
    return tirx.Var(var.name, dtype_of(var))
