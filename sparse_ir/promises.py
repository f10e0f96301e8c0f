"""Facts that a schedule assumes: promises about numbers, assumptions about arrays.

Function attribute "promises", a list of `{"param": name, "kind": kind, "value": number}`:

    T.func_attr({"promises": [{"param": "feat", "kind": "multiple", "value": 64}]})

kind : "exact" (the parameter is `value`), "max" (at most), "min" (at least) or "multiple" (of it)

Kernels and the interpreter check them in every call. (Senanayake et al., `bound`, section 5.)

Function attribute "assumed", a list of facts by which the lowering omits guards:

    T.func_attr({"assumed": [
        {"fact": "coordinates", "buffer": "ETYPE", "axis": "R"},
        {"fact": "filled", "axis": "J"},
    ]})

"coordinates" : each value of the buffer is a coordinate of the axis, or of one of equal length
"filled" : no slot of the sparse_fixed axis is padding; checked with the structure
"inside" : the buffer is only accessed at coordinates of the axis, one of its dimensions

Facts that follow from the structure and from recipes need no entry (:mod:`known`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import ir

from sparsetir.sparse_ir.nodes import SparseFunc, declared
from sparsetir.sparse_ir.verify_sites import Broken, Found

PROMISES = "promises"
# kind -> the expectation, as messages word it
KINDS = {"exact": "{}", "max": "at most {}", "min": "at least {}", "multiple": "a multiple of {}"}
LOWEST, LARGEST = -(2**63), 2**64 - 1


@lru_cache(256)  # by identity
def promises_of(func: SparseFunc) -> list[dict[str, Any]]:
    """The promises of a function, as plain Python; not to be modified."""
    if PROMISES not in func.attrs:
        return []
    return [
        {"param": str(p["param"]), "kind": str(p["kind"]), "value": int(p["value"])}
        for p in func.attrs[PROMISES]
    ]


def promised_range(promise: Mapping[str, Any]) -> tuple[int, int, int]:
    """The smallest and the largest value that keep a promise, and the divisor of all."""
    kind, value = promise["kind"], promise["value"]
    lowest = value if kind in ("exact", "min") else LOWEST
    largest = value if kind in ("exact", "max") else LARGEST
    return lowest, largest, value if kind == "multiple" else 1


def promised_steps(func: SparseFunc) -> dict[str, int]:
    """The largest power of two that each parameter is a multiple of, by promises."""
    steps: dict[str, int] = {}
    for promise in promises_of(func):
        name, value = promise["param"], promise["value"]
        if promise["kind"] == "multiple":
            steps[name] = max(steps.get(name, 1), value & -value)
    return steps


def keeps(promise: Mapping[str, Any], value: Any) -> bool:
    """Whether a number keeps a promise."""
    lowest, largest, step = promised_range(promise)
    return bool(lowest <= value <= largest and value % step == 0)


def check_promises(
    func_name: str, promises: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> None:
    """Raise ValueError for a value that breaks a promise.

    values : by parameter name; missing ones and non-integers are ignored
    """
    for promise in promises:
        value = values.get(promise["param"])
        if not isinstance(value, int | np.integer):
            continue
        if not keeps(promise, value):
            expected = KINDS[promise["kind"]].format(promise["value"])
            raise ValueError(
                f"{func_name}: argument '{promise['param']}': expected {expected}, as its schedule "
                f"promises, got {value}"
            )


def promise_problems(func: SparseFunc) -> Found:
    """The verifier's rule: promises are well formed and about integer parameters."""
    if PROMISES not in func.attrs:
        return
    params = declared(func).params
    promises = func.attrs[PROMISES]
    if isinstance(promises, str | Mapping) or not isinstance(promises, Sequence):
        yield Broken(func.span, f"attribute '{PROMISES}': expected a list, got {promises!r}")
        return
    for promise in promises:
        if not isinstance(promise, Mapping) or set(promise) != {"param", "kind", "value"}:
            yield Broken(
                func.span, f"promise {promise}: expected a dict of 'param', 'kind' and 'value'"
            )
            continue
        name, kind, value = promise["param"], promise["kind"], promise["value"]
        least, where, text = int(kind == "multiple"), func.span, ""
        if name not in params:
            text = f"no such parameter; there are {[*params]}"
        elif not _is_integer(params[name]):
            where, text = params[name].span, "expected a parameter of an integer type"
        elif kind not in KINDS:
            text = f"expected a kind among {[*KINDS]}, got {kind!r}"
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            text = f"expected an integer of {least} or more, got {value!r}"
        if text:
            yield Broken(where, f"promise about '{name}': {text}")


def _is_integer(param: Any) -> bool:
    return isinstance(param.ty, ir.PrimType) and str(param.ty.dtype).startswith(("int", "uint"))


# -- assumptions ---------------------------------------------------------------------------------

ASSUMED = "assumed"
# fact -> its subjects
FACTS = {"coordinates": ("buffer", "axis"), "filled": ("axis",), "inside": ("buffer", "axis")}


def assumed(func: SparseFunc, fact: str = "") -> list[dict[str, str]]:
    """The assumptions of a function, those of one fact or all, as plain Python."""
    facts = [{str(k): str(v) for k, v in f.items()} for f in func.attrs.get(ASSUMED, [])]
    return [f for f in facts if not fact or f["fact"] == fact]


def with_fact(func: SparseFunc, fact: str, **about: str) -> SparseFunc:
    """The function with one more fact about these subjects."""
    old, new = assumed(func), {"fact": fact, **about}
    return func if new in old else func.with_attr(ASSUMED, [*old, new])


def assumption_problems(func: SparseFunc) -> Found:
    """The verifier's rule: assumptions are well formed and about suitable subjects."""
    if ASSUMED not in func.attrs:
        return
    facts = func.attrs[ASSUMED]
    if isinstance(facts, str | Mapping) or not isinstance(facts, Sequence):
        yield Broken(func.span, f"attribute '{ASSUMED}': expected a list, got {facts!r}")
        return
    _, axes, buffers, _ = declared(func)
    for fact in facts:
        where, text = _assumption_problem(fact, axes, buffers)
        if text:
            yield Broken(where, text)


def _assumption_problem(
    fact: Any, axes: Mapping[str, Any], buffers: Mapping[str, Any]
) -> tuple[Any, str]:
    """Return the place and text of what is wrong with an assumption, or ""."""
    kind = fact.get("fact") if isinstance(fact, Mapping) else None
    if kind not in FACTS or set(fact) != {"fact", *FACTS[kind]}:
        return None, f"assumption {fact}: expected a fact among {[*FACTS]} and what it is of"
    axis, buffer = axes.get(str(fact["axis"])), buffers.get(str(fact.get("buffer")))
    if axis is None:
        return None, f"assumption about '{fact['axis']}': no such axis; there are {[*axes]}"
    if kind == "filled":
        text = (
            f"assumption: axis '{axis.name}': expected a sparse_fixed axis, whose slots may be "
            f"padding, got a {axis.kind} one"
        )
        return axis, "" if axis.kind == "sparse_fixed" else text
    label = f"assumption about '{fact['buffer']}'"
    if buffer is None:
        return None, f"{label}: no such buffer; there are {[*buffers]}"
    over = [a.name for a in buffer.axes or ()]
    text = ""
    if kind == "coordinates" and not buffer.dtype.startswith("int"):
        text = f"{label}: expected a buffer of integers, got {buffer.dtype}"
    elif kind == "inside" and axis.name not in over:
        text = f"{label}: expected one of its axes, {over}, got '{axis.name}'"
    return buffer.var.span, text
