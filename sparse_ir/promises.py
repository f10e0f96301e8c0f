"""Promises: what a schedule takes for granted about numbers that callers give.

Function attribute "promises", a list of `{"param": name, "kind": kind, "value": number}`:

    T.func_attr({"promises": [{"param": "feat", "kind": "multiple", "value": 64}]})

kind : "exact" (the parameter is `value`), "max" (at most), "min" (at least) or "multiple" (of it)

A kernel and the interpreter check them in every call. (Senanayake et al., `bound`, section 5.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import ir

from sparsetir.sparse_ir.nodes import SparseFunc, declared
from sparsetir.sparse_ir.verify_sites import Broken, Found

__all__ = [
    "PROMISES",
    "check_promises",
    "promise_problems",
    "promised_range",
    "promised_steps",
    "promises_of",
]

PROMISES = "promises"
# kind -> how a message says what is expected
KINDS = {"exact": "{}", "max": "at most {}", "min": "at least {}", "multiple": "a multiple of {}"}
LOWEST, LARGEST = -(2**63), 2**64 - 1


@lru_cache(256)  # by identity
def promises_of(func: SparseFunc) -> list[dict[str, Any]]:
    """The promises of a function, as plain Python; not to be changed."""
    if PROMISES not in func.attrs:
        return []
    return [
        {"param": str(p["param"]), "kind": str(p["kind"]), "value": int(p["value"])}
        for p in func.attrs[PROMISES]
    ]


def promised_range(promise: Mapping[str, Any]) -> tuple[int, int, int]:
    """Smallest and largest value that keep a promise, and what they are a multiple of."""
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


def check_promises(
    func_name: str, promises: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> None:
    """Raise ValueError for a value that breaks a promise.

    values : by parameter name; what is absent or no integer is not looked at
    """
    for promise in promises:
        value = values.get(promise["param"])
        if not isinstance(value, int | np.integer):
            continue
        lowest, largest, step = promised_range(promise)
        if not lowest <= value <= largest or value % step:
            expected = KINDS[promise["kind"]].format(promise["value"])
            raise ValueError(
                f"{func_name}: argument '{promise['param']}': expected {expected}, as its schedule "
                f"promises, got {value}"
            )


def promise_problems(func: SparseFunc) -> Found:
    """The verifier's rule: promises are well formed, about integer parameters."""
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
        if name not in params:
            yield Broken(
                func.span, f"promise about '{name}': no such parameter; there are {[*params]}"
            )
        elif not _is_integer(params[name]):
            yield Broken(
                params[name].span,
                f"promise about '{name}': expected a parameter of an integer type",
            )
        if kind not in KINDS:
            yield Broken(
                func.span,
                f"promise about '{name}': expected a kind among {[*KINDS]}, got {kind!r}",
            )
        least = 1 if kind == "multiple" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            yield Broken(
                func.span,
                f"promise about '{name}': expected an integer of {least} or more, got {value!r}",
            )


def _is_integer(param: Any) -> bool:
    return isinstance(param.ty, ir.PrimType) and str(param.ty.dtype).startswith(("int", "uint"))
