"""Pickles read as data: numbers, texts and containers. Nothing that a pickle names is called.

`pickle.Unpickler` would call what its `find_class` lets through, and makes tables as large as a
pickle says. This reader takes time and memory in proportion to the file.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DICTS = {("collections", "OrderedDict"), ("collections", "defaultdict")}
DICTS |= {(module, "dict") for module in ("builtins", "__builtin__")}
LISTS = {(module, n) for module in ("builtins", "__builtin__") for n in ("list", "set")}
# What an opcode pushes as it is told.
VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
FIXED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": list,
}  # fmt: skip
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
CALLS = ("REDUCE", "NEWOBJ")
MOST_IN_A_KEY = 8


class PickleError(ValueError):
    """Bytes that are no pickle, or are damaged."""


@dataclass(frozen=True)
class Named:
    """A class or function that a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """What a pickle has a class or function make: by what, and all that it is given."""

    by: Any
    parts: list[Any] = field(default_factory=list)


def read_pickle(
    file: io.BytesIO,
    make: Callable[[Named, tuple[Any, ...]], Any] = lambda named, args: None,
    stored: Callable[[Any], Any] = lambda name: None,
) -> Any:
    """The next pickle of a file, which is left behind its end.

    make : gives what a function makes of arguments, None for what it does not know
    stored : gives what a persistent name stands for

    Sets are lists; dicts and their ordered and defaulting kin are dicts; other objects are
    :class:`Made`. Keys of dicts that are no numbers or texts (or tuples of some texts) are replaced
    by nameless ones. Raises PickleError, and what `make` and `stored` raise.
    """
    reader = _Reader(make, stored)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            reader.take(opcode.name, argument)
        return reader.stack.pop()
    except PickleError:
        raise
    except (ValueError, OverflowError) as error:
        raise PickleError(str(error).splitlines()[0]) from error
    except (IndexError, KeyError, TypeError) as error:
        raise PickleError("it asks for what is not there") from error


class _Reader:
    """The stack and the memory of a pickle that is being read."""

    def __init__(self, make: Callable[..., Any], stored: Callable[[Any], Any]) -> None:
        self.make, self.stored = make, stored
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks before each mark
        self.memory: dict[int, Any] = {}

    def take(self, name: str, argument: Any) -> None:
        """One opcode."""
        stack = self.stack
        if name in VALUES:
            stack.append(argument)
        elif name in FIXED:
            stack.append(FIXED[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memory[argument])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memory[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memory[len(self.memory)] = stack[-1]
        elif name == "MARK":
            self.below.append(stack)
            self.stack = []
        elif name in TUPLES:
            count = TUPLES[name]
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            items = self.marked()
            self.stack.append(tuple(items) if name == "TUPLE" else items)
        elif name == "DICT":
            items = self.marked()
            self.stack.append({})
            self.put(items)
        elif name in ("APPENDS", "ADDITEMS"):
            self.extend(self.marked())
        elif name == "APPEND":
            self.extend([stack.pop()])
        elif name == "SETITEMS":
            self.put(self.marked())
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self.put([key, value])
        elif name == "POP":
            stack.pop() if stack else self.marked()
        elif name == "POP_MARK":
            self.marked()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            self.name(name, argument)
        elif name in CALLS:
            args, by = stack.pop(), stack.pop()
            stack.append(self.called(by, args))
        elif name == "NEWOBJ_EX":
            options, args, by = stack.pop(), stack.pop(), stack.pop()
            stack.append(Made(by, [args, options]))
        elif name == "OBJ":
            by, *args = self.marked()
            self.stack.append(self.called(by, tuple(args)))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Made):
                stack[-1].parts.append(state)
        elif name in ("PERSID", "BINPERSID"):
            stack.append(self.stored(argument if name == "PERSID" else stack.pop()))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"opcode {name}, which files of data do not have")

    def marked(self) -> list[Any]:
        """What was pushed since the last mark, which is taken off."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def name(self, opcode: str, argument: Any) -> None:
        """Push what a pickle names; INST makes an object of it."""
        if opcode == "STACK_GLOBAL":
            name, module = self.stack.pop(), self.stack.pop()
        else:
            module, name = argument.split(" ", 1)
        found = Named(str(module), str(name))
        if opcode == "INST":
            args = tuple(self.marked())
            self.stack.append(self.called(found, args))
        else:
            self.stack.append(found)

    def called(self, by: Any, args: Any) -> Any:
        """What a class or function makes of arguments."""
        if not isinstance(by, Named) or not isinstance(args, tuple):
            return Made(by, [args])
        given = args[-1] if args else None
        # Never a copy: a short pickle may ask for many of one long list.
        if (by.module, by.name) in LISTS and isinstance(given, list | None):
            return [] if given is None else given
        if (by.module, by.name) in DICTS and not isinstance(given, list):
            return given if isinstance(given, dict) else {}
        found = self.make(by, args)
        return Made(by, list(args)) if found is None else found

    def extend(self, items: list[Any]) -> None:
        """Add to the list on top."""
        top = self.stack[-1]
        (top.parts if isinstance(top, Made) else _only(list, top)).extend(items)

    def put(self, items: list[Any]) -> None:
        """Add to the dict on top, keys and values by turns."""
        top = self.stack[-1]
        if isinstance(top, Made):
            found: dict[Any, Any] = {}
            top.parts.append(found)
        else:
            found = _only(dict, top)
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[_key(key)] = value


def _only(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise PickleError(f"it takes a {type(value).__name__} for a {kind.__name__}")
    return value


def _key(key: Any) -> Any:
    """A key whose hash takes no longer than it took to read it."""
    if key is None or isinstance(key, str | bytes):
        return key
    if isinstance(key, int) and abs(key) < 2**100:
        return key
    if isinstance(key, tuple) and len(key) <= MOST_IN_A_KEY:
        if all(isinstance(part, str) for part in key):
            return key
    return object()
