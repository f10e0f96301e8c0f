"""Primitives: functions of a program and handles, which become methods of `Schedule`.

A primitive returns another program of the same meaning, and the caller's output::

    @primitive
    def innermost(func: SparseFunc, loop: SpIter) -> tuple[SparseFunc, None]:
        ...

After that every `Schedule` has `innermost(loop)`. The method's parameters, the checks of its
arguments, its documentation and its trace follow from the function alone. A primitive that visits
an iteration in another order is declared by `@primitive(reorders=True)`, and then refused if
:func:`sparsetir.sparse_ir.legal.reorderable` finds a dependence.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tvm

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.legal import reorderable
from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter, find_iteration, show

F = TypeVar("F", bound=Callable[..., Any])
PRIMITIVES: dict[str, Callable[..., Any]] = {}

WORDS = {
    SpIter: "a handle of get_sp_iters",
    SparseIterationRef: "a handle of get_sparse_iteration",
    str: "a string",
    int: "an integer",
    bool: "True or False",
    type(None): "None",
}


STUB = """# Of the primitives; tests/sparse_ir/test_schedule_methods.py says how it is made.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from sparsetir.sparse_ir.schedule.loops import SparseIterationRef, SpIter

F = TypeVar("F", bound=Callable[..., Any])
PRIMITIVES: dict[str, Callable[..., Any]]

@overload
def primitive(function: F, *, reorders: bool = ...) -> F: ...
@overload
def primitive(function: None = ..., *, reorders: bool = ...) -> Callable[[F], F]: ...
def stub() -> str: ...
def arguments_of(
    function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]: ...
def wrong_argument(
    function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]
) -> str: ...

class Primitives:
    _apply: Callable[..., Any]
"""


class Primitives:
    """The methods that primitives become; `Schedule` runs them."""

    _apply: Callable[..., Any]


def primitive(function: Any = None, *, reorders: bool = False) -> Any:
    """Make a function (func, handles and options) -> (func, output) a method of every Schedule.

    reorders : whether it changes the order of visits of its first handle's iteration, and is
        refused if a dependence forbids that

    Raises ValueError if schedules have another attribute of that name.
    """
    if function is None:
        return functools.partial(primitive, reorders=reorders)
    if reorders:
        function = _where_reorderable(function)
    name = function.__name__
    old = PRIMITIVES.get(name)
    same = old is not None and (old.__module__, old.__qualname__) == (
        function.__module__, function.__qualname__,
    )  # fmt: skip
    taken = any(hasattr(kind, name) for kind in (Primitives, *Primitives.__subclasses__()))
    if taken and not same:
        raise ValueError(f"primitive: argument 'function': schedules have another '{name}'")

    def method(self: Primitives, *inputs: Any, **options: Any) -> Any:
        return self._apply(function, *inputs, **options)

    signature = inspect.signature(function)
    first = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    method.__signature__ = signature.replace(
        parameters=[*first, *list(signature.parameters.values())[1:]],
        return_annotation=_output_of(signature.return_annotation),
    )
    method.__name__, method.__qualname__ = name, f"Schedule.{name}"
    method.__doc__, method.__module__ = _documented(function), function.__module__
    PRIMITIVES[name] = function
    setattr(Primitives, name, method)
    return function


def _where_reorderable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The primitive, which raises ScheduleError if the order of visits matters."""

    @functools.wraps(function)
    def run(func: Any, *inputs: Any, **options: Any) -> Any:
        arguments = [*inputs, *options.values()]
        handle = next((x for x in arguments if isinstance(x, SpIter | SparseIterationRef)), None)
        if handle is not None:
            name = handle.iteration if isinstance(handle, SpIter) else handle.name
            it = find_iteration(func, name, function.__name__)
            problem = reorderable(func, it)
            if problem is not None:
                raise ScheduleError(
                    f"{function.__name__}: the order of visits of '{it.name}' matters: "
                    f"{problem}\n{show(it)}"
                )
        return function(func, *inputs, **options)

    return run


def _documented(function: Callable[..., Any]) -> str | None:
    """The documentation of a primitive, with the program before and after from its module."""
    said = inspect.getdoc(function)
    if said is None:
        return None
    summary, _, rest = said.partition("\n\n")
    return f'{summary}\n\nMore: `help("{function.__module__}")`.\n\n{rest}'.rstrip()


def _output_of(annotation: Any) -> Any:
    """The output in `tuple[SparseFunc, output]`, as text."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    begin = "tuple[SparseFunc, "
    return text[len(begin) : -1] if text.startswith(begin) else inspect.Signature.empty


def stub() -> str:
    """The text of `primitives.pyi`, which describes the methods to type checkers and editors."""

    def text(parameter: inspect.Parameter) -> str:
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        return f"{parameter.name}{kind}{default}"

    lines: list[str] = [*STUB.splitlines()]
    ours = (n for n, f in PRIMITIVES.items() if f.__module__.startswith("sparsetir."))
    for name in sorted(ours):
        signature = inspect.signature(getattr(Primitives, name))
        parameters = list(signature.parameters.values())
        words = [text(p) for p in parameters if p.kind is not p.KEYWORD_ONLY]
        options = [text(p) for p in parameters if p.kind is p.KEYWORD_ONLY]
        words += ["*", *options] if options else []
        lines.append(f"    def {name}({', '.join(words)}) -> {signature.return_annotation}: ...")
    return "\n".join(lines) + "\n"


# -- arguments ------------------------------------------------------------------------------------


def _is_dtype(name: str) -> bool:
    """Whether a name is that of a numeric dtype."""
    try:
        dtype = tvm.DataType(name)
    except ValueError:
        return False
    return dtype.lanes == 1 and name.startswith(("float", "bfloat", "int", "uint"))


# The checks of string arguments, by argument name, with the expectation.
MEANT = {"dtype": (_is_dtype, "a dtype, such as 'float32'"), "name": (str.isidentifier, "a name")}


def arguments_of(
    function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """All positional arguments of a primitive, and its options that differ from the default.

    Sequences become lists. Raises TypeError as a call does.
    """
    signature, hints = inspect.signature(function), _hints(function)
    bound = signature.bind(None, *inputs, **options)
    bound.apply_defaults()
    positional, named = [], {}
    for name, parameter in list(signature.parameters.items())[1:]:
        value = bound.arguments[name]
        if any(_is_sequence(choice) for choice in _choices(hints.get(name, Any))):
            value = _listed(value)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(value)
        elif value != ([] if parameter.default == () else parameter.default):
            named[name] = value
    return positional, named


def _is_sequence(hint: Any) -> bool:
    return get_origin(hint) in (list, Sequence)


def _listed(value: Any) -> Any:
    """A sequence as a list; other values, also text and handles, unchanged."""
    if isinstance(value, str | bytes | Mapping | SpIter | SparseIterationRef):
        return value
    try:
        return list(value)
    except TypeError:
        return value


def wrong_argument(
    function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """The text of an error about the first argument of a wrong type; "" if there is none.

    function : the primitive; its annotations are the types, and parameters with none, or one
        that no primitive here has, are not checked
    """
    hints = _hints(function)
    names = list(inspect.signature(function).parameters)[1:]
    for name, value in [*zip(names, inputs, strict=False), *options.items()]:
        if not _fits(hints.get(name, Any), value):
            return (
                f"{function.__name__}: argument '{name}': expected {_words(hints[name])}, "
                f"got {value!r}"
            )
        check, words = MEANT.get(name, (None, ""))
        if check is not None and isinstance(value, str) and not check(value):
            return f"{function.__name__}: argument '{name}': expected {words}, got {value!r}"
    return ""


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError:  # a user's primitive, with names that only its type checker knows
        return {}


def _choices(hint: Any) -> tuple[Any, ...]:
    """The members of a union; any other type by itself."""
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
