"""The names that all entrances take: of reductions, operators and types.

Imports nothing that takes time, as `sparsetir --help` needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sparsetir.schedules.operators.names import DTYPES, OPS, REDUCTIONS

__all__ = [
    "DTYPES", "EDGE_OPS", "MESSAGES", "OPS", "REDUCTIONS", "REDUCTION_NAMES", "edge_op", "message",
    "operator", "reduction",
]  # fmt: skip

# What libraries call them: PyG "add", torch "amax" and "amin".
REDUCTION_NAMES = {
    "sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
    "amin": "min",
}  # fmt: skip

BINARY = ("add", "sub", "mul", "div")
TARGETS = ("u", "v", "e")
# Of an edge from a source "u"; also as DGL's `gspmm` and its operators call them.
MESSAGES = {
    "copy_u": "copy_u", "copy_lhs": "copy_u", "copy_e": "copy_e", "copy_rhs": "copy_e",
    **{name: name for name in BINARY}, **{f"u_{name}_e": name for name in BINARY},
}  # fmt: skip
EDGE_OPS = ("copy_lhs", "copy_rhs", *BINARY, "dot")


def reduction(
    who: str, name: Any, among: Iterable[str] = REDUCTIONS, argument: str = "reduce"
) -> str:
    """The one of `REDUCTIONS` that a name means.

    who, argument : the function and its argument, as errors name them
    among : those that it has

    Raises ValueError for other names.
    """
    found = REDUCTION_NAMES.get(name) if isinstance(name, str) else None
    if found is None or found not in among:
        known = [name for name, kind in REDUCTION_NAMES.items() if kind in among]
        raise ValueError(f"{who}: argument '{argument}': expected {', '.join(known)}, got {name!r}")
    return found


def message(who: str, op: Any, reduce: Any = None) -> tuple[str, str]:
    """One of the values of `MESSAGES`, and one of `REDUCTIONS`.

    op : a name of `MESSAGES`, or one with a reduction behind it, as "u_mul_e_sum"
    reduce : None for that in the name, or a sum
    """
    name, _, behind = op.rpartition("_") if isinstance(op, str) else ("", "", "")
    if name in MESSAGES and behind in REDUCTION_NAMES:
        named = REDUCTION_NAMES[behind]
        if reduce is not None and reduction(who, reduce) != named:
            raise ValueError(
                f"{who}: argument 'reduce': expected none beside {op!r}, got {reduce!r}"
            )
        return MESSAGES[name], named
    if not isinstance(op, str) or op not in MESSAGES:
        raise ValueError(
            f"{who}: argument 'op': expected one of {', '.join(MESSAGES)}, or one with a "
            f"reduction, as 'u_mul_e_sum', got {op!r}"
        )
    return MESSAGES[op], reduction(who, "sum" if reduce is None else reduce)


def edge_op(who: str, op: Any, lhs_target: Any, rhs_target: Any) -> tuple[str, str, str]:
    """One of `EDGE_OPS`, and the targets of both sides, of a name that may hold them."""
    parts = op.split("_") if isinstance(op, str) else []
    if len(parts) == 2 and parts[0] == "copy" and parts[1] in TARGETS:
        return "copy_lhs", parts[1], rhs_target
    if len(parts) == 3 and parts[0] in TARGETS and parts[2] in TARGETS:
        lhs_target, op, rhs_target = parts
    if op not in EDGE_OPS:
        raise ValueError(
            f"{who}: argument 'op': expected one of {', '.join(EDGE_OPS)}, or a name such as "
            f"'u_add_v' or 'copy_u', got {op!r}"
        )
    for name, target in (("lhs_target", lhs_target), ("rhs_target", rhs_target)):
        if target not in TARGETS:
            raise ValueError(
                f"{who}: argument '{name}': expected one of {', '.join(TARGETS)}, got {target!r}"
            )
    return op, lhs_target, rhs_target


def operator(
    who: str, op: Any, reduce: Any = "sum", ops: Collection[str] = OPS
) -> tuple[str, str, bool]:
    """One of `ops`, one of `REDUCTIONS`, and whether all values of the matrix are to be one.

    op : a name of `ops`, or DGL's for what one of them computes: "u_mul_e_sum" and the like,
        "copy_u_sum" and the like, "u_dot_v"
    reduce : "sum" where the name says which
    """
    if isinstance(op, str) and op in ops:
        return op, reduction(who, reduce), False
    if op == "u_dot_v":
        return "sddmm", reduction(who, reduce), False
    name, _, behind = op.rpartition("_") if isinstance(op, str) else ("", "", "")
    if name not in ("u_mul_e", "copy_u") or behind not in REDUCTION_NAMES:
        known = ", ".join((*ops, "rgms"))
        raise ValueError(
            f"{who}: argument 'op': expected one of {known}, or u_mul_e_sum, copy_u_sum (also with "
            f"another reduction) or u_dot_v, got {op!r}"
        )
    named = REDUCTION_NAMES[behind]
    if reduction(who, reduce) not in ("sum", named):
        raise ValueError(f"{who}: argument 'reduce': expected none beside {op!r}, got {reduce!r}")
    return "spmm", named, name == "copy_u"
