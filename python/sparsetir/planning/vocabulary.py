"""The names that all entrances take: of reductions, operators and types.

Imports nothing that takes time, as `sparsetir --help` needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.names import NAMED, OPS, REDUCTIONS, SOFTMAX

# What libraries call them: PyG "add", torch "amax" and "amin".
REDUCTION_NAMES = {
    "sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
    "amin": "min",
}  # fmt: skip

BINARY = ("add", "sub", "mul", "div")
TARGETS = ("u", "v", "e")
# Of an edge from a source "u"; also as DGL's `gspmm` and its operators call them.
MESSAGES = {
    "copy_u": "copy_u",
    "copy_lhs": "copy_u",
    "copy_e": "copy_e",
    "copy_rhs": "copy_e",
    **{name: name for name in BINARY},
    **{f"u_{name}_e": name for name in BINARY},
}
EDGE_OPS = ("copy_lhs", "copy_rhs", *BINARY, "dot")


def reduction(who: str, name: object, among: Iterable[str] = REDUCTIONS) -> str:
    """The one of `REDUCTIONS` that a name means.

    who : the function, as errors name it
    among : those that it has

    Raises ValueError for other names.
    """
    found = REDUCTION_NAMES.get(name) if isinstance(name, str) else None
    if found is None or found not in among:
        known = ", ".join(name for name, kind in REDUCTION_NAMES.items() if kind in among)
        raise wrong(who, "reduce", known, f"{name!r}")
    return found


def message(who: str, op: object, reduce: object = None) -> tuple[str, str]:
    """One of the values of `MESSAGES`, and one of `REDUCTIONS`.

    op : a name of `MESSAGES`, or one with a reduction behind it, as "u_mul_e_sum"
    reduce : None for that in the name, or a sum
    """
    kind, named = _parts(op)
    if kind is None:
        expected = f"one of {', '.join(MESSAGES)}, or one with a reduction, as 'u_mul_e_sum'"
        raise wrong(who, "op", expected, f"{op!r}")
    if named is None:
        return kind, reduction(who, "sum" if reduce is None else reduce)
    if reduce is not None and reduction(who, reduce) != named:
        raise ValueError(f"{who}: argument 'reduce': expected none beside {op!r}, got {reduce!r}")
    return kind, named


def _parts(op: object) -> tuple[str | None, str | None]:
    """The message and the reduction that a name says, None for what it does not."""
    if not isinstance(op, str):
        return None, None
    name, _, behind = op.rpartition("_")
    if name in MESSAGES and behind in REDUCTION_NAMES:
        return MESSAGES[name], REDUCTION_NAMES[behind]
    return MESSAGES.get(op), None


def is_message(op: object) -> bool:
    """Whether a name is that of a message, with a reduction or without."""
    return _parts(op)[0] is not None


def is_along_edges(op: object, more: bool = False) -> bool:
    """Whether a name that plans take is a softmax, attention, or a message that "spmm" is not.

    more : whether it is asked for with heads or features of edges, which messages have as those of
        `ops.gspmm` do
    """
    kind, _ = _parts(op)
    if kind is None:
        return isinstance(op, str) and op in (*SOFTMAX, "attention")
    return more or kind not in ("copy_u", "mul")


def edge_op(who: str, op: str, lhs_target: str, rhs_target: str) -> tuple[str, str, str]:
    """One of `EDGE_OPS`, and the targets of both sides, of a name that may hold them."""
    parts = op.split("_") if isinstance(op, str) else []
    if len(parts) == 2 and parts[0] == "copy" and parts[1] in TARGETS:
        return "copy_lhs", parts[1], rhs_target
    if len(parts) == 3 and parts[0] in TARGETS and parts[2] in TARGETS:
        lhs_target, op, rhs_target = parts
    if op not in EDGE_OPS:
        expected = f"one of {', '.join(EDGE_OPS)}, or a name such as 'u_add_v' or 'copy_u'"
        raise wrong(who, "op", expected, f"{op!r}")
    for name, target in (("lhs_target", lhs_target), ("rhs_target", rhs_target)):
        if target not in TARGETS:
            raise wrong(who, name, f"one of {', '.join(TARGETS)}", f"{target!r}")
    return op, lhs_target, rhs_target


def operator(
    who: str, op: object, reduce: object = "sum", ops: Collection[str] = OPS
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
    if _parts(op)[0] not in ("mul", "copy_u"):
        known = ", ".join(dict.fromkeys((*OPS, *ops, *NAMED)))
        expected = f"one of {known}, a message as u_add_e_max or copy_u_mean, or u_dot_v"
        raise wrong(who, "op", expected, f"{op!r}")
    # "sum" is what is asked for where nothing is.
    named = None if reduction(who, reduce) == "sum" and _parts(op)[1] else reduce
    kind, reduce = message(who, op, named)
    return "spmm", reduce, kind == "copy_u"
