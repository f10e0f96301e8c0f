"""Whether the arguments of a primitive are of the types that it says."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import tvm

from sparsetir.sparse_ir.schedule.handles import SparseIterationRef, SpIter

__all__ = ["listed", "wrong_argument"]

WORDS = {
    SpIter: "a handle of get_sp_iters",
    SparseIterationRef: "a handle of get_sparse_iteration",
    str: "a string",
    int: "an integer",
    bool: "True or False",
    type(None): "None",
}


def _is_dtype(name: str) -> bool:
    """Whether it is a type of numbers."""
    try:
        dtype = tvm.DataType(name)
    except ValueError:
        return False
    return dtype.lanes == 1 and name.startswith(("float", "bfloat", "int", "uint"))


# Of strings, by the name of the argument, what they have to be.
MEANT = {
    "dtype": (_is_dtype, "a dtype, such as 'float32'"),
    "name": (str.isidentifier, "a name"),
}


def listed(value: Any) -> Any:
    """What can be gone through as a list; anything else, and text, as it is."""
    if isinstance(value, str | bytes | Mapping):
        return value
    try:
        return list(value)
    except TypeError:
        return value


def wrong_argument(
    primitive: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """What an error is to say of the first argument of another type; "" where there is none.

    primitive : of a function and these; its annotations are the types, and what has none, or one
        that the primitives here have not, is not looked at
    """
    hints = _hints(primitive)
    names = list(inspect.signature(primitive).parameters)[1:]
    for name, value in [*zip(names, inputs, strict=False), *options.items()]:
        if not _fits(hints.get(name, Any), value):
            return (
                f"{primitive.__name__}: argument '{name}': expected {_words(hints[name])}, "
                f"got {value!r}"
            )
        check, words = MEANT.get(name, (None, ""))
        if check is not None and isinstance(value, str) and not check(value):
            return f"{primitive.__name__}: argument '{name}': expected {words}, got {value!r}"
    return ""


@functools.cache
def _hints(primitive: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(primitive)
    except NameError:  # a user's primitive, with names that its checker alone knows
        return {}


def _choices(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of another type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(hint: Any, value: Any) -> bool:
    return any(_is_one(choice, value) for choice in _choices(hint))


def _is_one(hint: Any, value: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is None:
        if hint not in WORDS:
            return True
        return type(value) is hint if hint in (int, bool) else isinstance(value, hint)
    if kind not in (dict, list, Mapping, Sequence):
        return True
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(inner[0], k) and _fits(inner[1], v) for k, v in value.items()
        )
    return isinstance(value, list | tuple) and all(_fits(inner[0], v) for v in value)


def _words(hint: Any) -> str:
    return " or ".join(_word(choice) for choice in _choices(hint))


def _word(hint: Any) -> str:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is None:
        return WORDS[hint]
    if issubclass(kind, Mapping):
        return "a dict"
    return f"a list of which each is {_words(inner[0])}"
