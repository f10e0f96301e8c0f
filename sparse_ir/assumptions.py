"""Assumptions: what the author of a schedule knows of arrays, and the program does not say.

Function attribute "assumed", a list of facts, which the lowering leaves guards out by:

    T.func_attr({"assumed": [
        {"fact": "coordinates", "buffer": "ETYPE", "axis": "R"},
        {"fact": "filled", "axis": "J"},
    ]})

"coordinates" : each value of the buffer is a coordinate of the axis, or of one as long
"filled" : no slot of the sparse_fixed axis is padding; checked with the structure
"inside" : the buffer is accessed at coordinates of the axis alone, which is one of its own

What follows from the structure and from recipes is known without (:mod:`value_domains`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.verify_sites import Broken, Found

__all__ = [
    "ASSUMED",
    "FACTS",
    "accessed_inside",
    "assumed_coordinates",
    "assumption_problems",
    "filled_axes",
    "with_fact",
]

ASSUMED = "assumed"
# fact -> what it is about
FACTS = {"coordinates": ("buffer", "axis"), "filled": ("axis",), "inside": ("buffer", "axis")}


def assumed_coordinates(func: SparseFunc) -> dict[str, str]:
    """The axis, by name, that a buffer's values are assumed to be coordinates of."""
    found = _assumed(func, "coordinates")
    return {str(f["buffer"]): str(f["axis"]) for f in found}


def filled_axes(func: SparseFunc) -> set[str]:
    """Names of the sparse_fixed axes without padding."""
    return {str(f["axis"]) for f in _assumed(func, "filled")}


def accessed_inside(func: SparseFunc) -> set[tuple[str, str]]:
    """(buffer, axis), by name, where a buffer is accessed at coordinates of the axis alone."""
    return {(str(f["buffer"]), str(f["axis"])) for f in _assumed(func, "inside")}


def with_fact(func: SparseFunc, fact: str, **about: str) -> SparseFunc:
    """The function with one more fact, by its name and what it is about."""
    old = [{str(k): str(v) for k, v in f.items()} for f in func.attrs.get(ASSUMED, [])]
    new = {"fact": fact, **about}
    return func if new in old else func.with_attr(ASSUMED, [*old, new])


def _assumed(func: SparseFunc, fact: str) -> list[Mapping[str, str]]:
    return [f for f in func.attrs.get(ASSUMED, []) if f["fact"] == fact]


def assumption_problems(func: SparseFunc) -> Found:
    """The verifier's rule: assumptions are well formed, about what they can be about."""
    if ASSUMED not in func.attrs:
        return
    facts = func.attrs[ASSUMED]
    if isinstance(facts, str | Mapping) or not isinstance(facts, Sequence):
        yield Broken(func.span, f"attribute '{ASSUMED}': expected a list, got {facts!r}")
        return
    axes = {a.name: a for a in func.axes}
    buffers = {b.name: b for b in func.buffers}
    for fact in facts:
        kind = fact.get("fact") if isinstance(fact, Mapping) else None
        if kind not in FACTS or set(fact) != {"fact", *FACTS[kind]}:
            yield Broken(
                func.span, f"assumption {fact}: expected a fact among {[*FACTS]} and what it is of"
            )
            continue
        axis = axes.get(str(fact["axis"]))
        if axis is None:
            yield Broken(
                func.span, f"assumption about '{fact['axis']}': no such axis; there are {[*axes]}"
            )
            continue
        if kind == "filled" and axis.kind != "sparse_fixed":
            yield Broken(
                axis, f"assumption: axis '{axis.name}': expected a sparse_fixed axis, whose slots "
                f"may be padding, got a {axis.kind} one",
            )  # fmt: skip
        if kind == "filled":
            continue
        buffer = buffers.get(str(fact["buffer"]))
        if buffer is None:
            yield Broken(
                func.span,
                f"assumption about '{fact['buffer']}': no such buffer; there are {[*buffers]}",
            )
        elif kind == "coordinates" and not buffer.dtype.startswith("int"):
            yield Broken(
                buffer.var.span,
                f"assumption about '{buffer.name}': expected a buffer of integers, got "
                f"{buffer.dtype}",
            )
        elif kind == "inside" and axis.name not in [a.name for a in buffer.axes or ()]:
            yield Broken(
                buffer.var.span,
                f"assumption about '{buffer.name}': expected one of its axes, "
                f"{[a.name for a in buffer.axes or ()]}, got '{axis.name}'",
            )
