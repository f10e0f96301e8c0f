"""Names of operators and types; has no heavy imports, for `sparsetir --help`."""

from sparsetir.reductions import REDUCTION_NAMES

# Operators on the elements of a matrix; SOFTMAX is over each row's.
OPS = ("spmm", "spmv", "sddmm")
SOFTMAX = ("softmax", "sparse_softmax", "edge_softmax")
# Names accepted by plans and searches, besides message names.
NAMED = (*OPS, *SOFTMAX, "attention", "rgms", "spgemm")
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
# Messages of an edge from a source "u"; the other names are those of DGL's `gspmm`.
MESSAGES = {
    "copy_u": "copy_u",
    "copy_lhs": "copy_u",
    "copy_e": "copy_e",
    "copy_rhs": "copy_e",
    **{name: name for name in BINARY},
    **{f"u_{name}_e": name for name in BINARY},
}
DTYPES = ("float32", "float16", "bfloat16", "float64")
IDTYPES = ("int32", "int64")


def message_parts(op: object) -> tuple[str | None, str | None]:
    """The message and the reduction in a name, None for what it does not contain."""
    if not isinstance(op, str):
        return None, None
    name, _, behind = op.rpartition("_")
    if name in MESSAGES and behind in REDUCTION_NAMES:
        return MESSAGES[name], REDUCTION_NAMES[behind]
    return MESSAGES.get(op), None


def is_message(op: object) -> bool:
    """Whether a name is that of a message, with a reduction or without."""
    return message_parts(op)[0] is not None


def is_along_edges(op: object, more: bool = False) -> bool:
    """Whether a name accepted by plans is a softmax, attention, or a message that "spmm" is not.

    more : whether it is used with heads or features of edges, which messages take as `ops.gspmm`
        does
    """
    kind, _ = message_parts(op)
    if kind is None:
        return isinstance(op, str) and op in (*SOFTMAX, "attention")
    return more or kind not in ("copy_u", "mul")
