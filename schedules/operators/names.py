"""Names of operators and types; imports names alone, as `sparsetir --help` needs them."""

from sparsetir.reductions import REDUCTION_NAMES

# On the elements of a matrix; softmax of each row's.
OPS = ("spmm", "spmv", "sddmm")
SOFTMAX = ("softmax", "sparse_softmax", "edge_softmax")
# That plans and searches take by their names, beside those of messages.
NAMED = (*OPS, *SOFTMAX, "attention", "rgms", "spgemm")
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
# Of an edge from a source "u"; also as DGL's `gspmm` and its operators call them.
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
    """The message and the reduction that a name says, None for what it does not."""
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
    """Whether a name that plans take is a softmax, attention, or a message that "spmm" is not.

    more : whether it is asked for with heads or features of edges, which messages have as those of
        `ops.gspmm` do
    """
    kind, _ = message_parts(op)
    if kind is None:
        return isinstance(op, str) and op in (*SOFTMAX, "attention")
    return more or kind not in ("copy_u", "mul")
