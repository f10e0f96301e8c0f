"""Computed parameters: arrays and numbers that a schedule derives from the caller's arguments.

A schedule may need arrays that follow from the structure: where blocks of equal work begin, the row
of each nonzero. It adds them as parameters, after all others, and the function attribute "computed"
says by which recipe each is made:

    T.func_attr({"computed": {
        "blocks": {"recipe": "number", "value": 16},
        "block_ptr": {"recipe": "equal_work", "indptr": "$indptr", "parts": "$blocks", "cost": 2},
    }})

A keyword is a number, a string, or "$name": the value of that parameter, a NumPy array or an
integer; it may be an earlier computed parameter. A kernel computes them when it first sees a
structure, so that its signature does not depend on the schedule. The result of recipe "packed"
depends on values, and is made in every call. Guards and the absence of races are proven from the
facts that recipes are registered with, so callers may only choose the numbers that recipes leave
open, such as 16 blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from tvm import ir, tirx

from sparsetir.sparse_ir.errors import LoweringError, ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc, declared, nodes_of
from sparsetir.sparse_ir.promises import check_promises, promises_of
from sparsetir.sparse_ir.recipes.registry import RECIPES, facts_of
from sparsetir.sparse_ir.verify_sites import Broken, Found

COMPUTED = "computed"


def computed_parameters(func: SparseFunc) -> dict[str, dict[str, Any]]:
    """Recipe and keywords of each computed parameter, as plain Python objects, in order."""
    return {name: dict(made.how) for name, made in _recipes(func).items()}


class _Recipe(NamedTuple):
    """How a computed parameter is made, as calls need it: looking it up takes as long as computing.

    how : the recipe and its keywords
    recipe : its name
    keywords : the names of its keywords
    reads : by keyword, the parameters whose values the recipe receives
    """

    how: dict[str, Any]
    recipe: str
    keywords: tuple[str, ...]
    reads: dict[str, str]


@lru_cache(256)  # by identity
def _recipes(func: SparseFunc) -> dict[str, _Recipe]:
    """The recipe of each computed parameter, in order."""
    if COMPUTED not in func.attrs:
        return {}
    recipes = {str(name): dict(how) for name, how in func.attrs[COMPUTED].items()}
    names = [str(p.name) for p in func.params]  # JSON does not keep the order of a dict
    return {name: _recipe_of(recipes[name]) for name in names if name in recipes}


def _recipe_of(how: dict[str, Any]) -> _Recipe:
    keywords = tuple(k for k in how if k != "recipe")
    parameters = zip(keywords, (_parameter(how[k]) for k in keywords), strict=True)
    return _Recipe(how, str(how.get("recipe")), keywords, {k: p for k, p in parameters if p})


def _parameter(value: Any) -> str | None:
    """The parameter that a keyword of a recipe names, or None."""
    return value[1:] if isinstance(value, str) and value.startswith("$") else None


def parameters_made_by(func: SparseFunc, recipe: Callable[..., Any]) -> list[str]:
    """The names of the computed parameters that a recipe makes."""
    computed = computed_parameters(func)
    return [name for name, how in computed.items() if how["recipe"] == recipe.__name__]


def buffers_made_by(func: SparseFunc, recipe: Callable[..., Any]) -> list[str]:
    """The names of the buffers that hold what a recipe makes."""
    names = parameters_made_by(func, recipe)
    return [b.name for b in func.buffers if b.handle is not None and str(b.handle.name) in names]


def keyword(size: Any) -> int | str | None:
    """A size as a recipe's keyword; None if it is neither a number nor a parameter."""
    if isinstance(size, tirx.IntImm):
        return int(size)
    return f"${size.name}" if isinstance(size, ir.Var) else None


def reads(how: Mapping[str, Any]) -> list[str]:
    """The parameters whose values a recipe receives."""
    return [name for name in map(_parameter, how.values()) if name]


def valid_for_any(how: Mapping[str, Any]) -> int | None:
    """The number that a recipe gives if none of its arguments are known, or None."""
    return facts_of(how["recipe"]).unknown


def value_parameters(func: SparseFunc) -> list[str]:
    """The computed parameters that depend on values, not only on the structure."""
    computed = computed_parameters(func).items()
    return [name for name, how in computed if facts_of(how["recipe"]).of_values]


def compute(
    func: SparseFunc,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, Any]:
    """The values of a function's computed parameters, in order.

    arguments : by name, at least what the recipes read: NumPy arrays and numbers. If values are
        missing, parameters computed from them are left out
    overrides : values for numbers that their recipes leave open (:class:`Facts`), such as the
        number of blocks; dependent parameters follow
    names : the parameters that are needed, to which their own inputs are added; all by default
    A number with a default that is valid for any arguments (:class:`Facts`) takes it where its
    arguments are missing.

    Returns Python integers, and arrays of the type of the axis (idtype) or buffer (dtype) that
    they are bound to. Raises LoweringError for an unknown recipe or one that does not take these
    keywords, TypeError for a missing or wrongly typed argument, ScheduleError for a value that its
    type does not hold, ValueError for an override of a number that is not open and for a broken
    promise, and the errors of recipes.
    """
    of_func = func.name  # whose look-up takes longer than most recipes
    recipes, dtypes = _recipes(func), _dtypes(func)
    needed = set(recipes if names is None else names)
    for name, made in reversed(recipes.items()) if names is not None else ():
        if name in needed:
            needed.update(made.reads.values())
    chosen, values, results = dict(overrides or {}), dict(arguments), {}
    for name in chosen:
        if name not in recipes:
            raise TypeError(f"{of_func}: '{name}' is no computed parameter; there are {[*recipes]}")
        if not facts_of(recipes[name].recipe).open:
            free = [n for n, made in recipes.items() if facts_of(made.recipe).open]
            raise ValueError(
                f"{of_func}: computed parameter '{name}': expected what recipe "
                f"'{recipes[name].recipe}' makes, got another value; open are {free}"
            )
    for name, made in recipes.items():
        if name not in needed:
            continue
        place = f"{of_func}: computed parameter '{name}'"
        facts = facts_of(made.recipe)
        if facts.of_values and values.get(made.reads.get("values", "")) is None:
            continue
        if facts.unknown is not None and any(values.get(p) is None for p in made.reads.values()):
            chosen.setdefault(name, facts.unknown)
        value = chosen[name] if name in chosen else _evaluate(place, made, values, dtypes)
        results[name] = values[name] = _fitted(place, value, *dtypes[name])
    check_promises(of_func, promises_of(func), results)
    return results


def compute_of_values(
    func: SparseFunc, names: Iterable[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Some of the computed parameters that depend on values (:func:`value_parameters`), by name.

    values : by name, at least what their recipes read: arguments, and results of :func:`compute`

    Raises the errors of :func:`compute`.
    """
    recipes, dtypes, results = _recipes(func), _dtypes(func), dict[str, Any]()
    for name in names:
        place = f"{func.name}: computed parameter '{name}'"
        results[name] = _fitted(
            place, _evaluate(place, recipes[name], values, dtypes), *dtypes[name]
        )
    return results


@lru_cache(256)  # by identity
def _dtypes(func: SparseFunc) -> dict[str, tuple[bool, str]]:
    """Whether each parameter is an array, and its dtype; handles without a buffer are left out."""
    out = {
        str(p.name): (False, str(p.ty.dtype)) for p in func.params if isinstance(p.ty, ir.PrimType)
    }
    for axis in func.axes:
        for handle in (axis.indptr, axis.indices):
            if handle is not None:
                out[str(handle.name)] = (True, axis.idtype)
    for buffer in func.buffers:
        if buffer.handle is not None:
            out[str(buffer.handle.name)] = (True, buffer.dtype)
    return out


def _evaluate(
    place: str, made: _Recipe, values: Mapping[str, Any], dtypes: Mapping[str, Any]
) -> Any:
    problem = _recipe_problem(made)
    if problem is not None:
        raise LoweringError(f"{place}: {problem}")
    name = made.recipe
    for read in made.reads.values():
        if values.get(read) is None:
            there = sorted(n for n, v in values.items() if v is not None)
            raise TypeError(
                f"{place}: recipe '{name}' reads '{read}', which is not among the arguments {there}"
            )
        wanted = np.ndarray if read in dtypes and dtypes[read][0] else int | np.integer
        if not isinstance(values[read], wanted):
            raise TypeError(
                f"{place}: recipe '{name}' reads '{read}': expected "
                f"{'a NumPy array' if wanted is np.ndarray else 'an integer'}, "
                f"got {type(values[read]).__name__}"
            )
    keywords = {key: made.how[key] for key in made.keywords}
    for key, read in made.reads.items():
        value = values[read]
        keywords[key] = value if isinstance(value, np.ndarray) else int(value)
    result, fact = RECIPES[name](**keywords), facts_of(name).values
    most = None if fact is None else fact.most(keywords)
    if most is None or not isinstance(result, np.ndarray) or not result.size:
        return result
    if not 0 <= result.min() <= result.max() < most:
        raise ScheduleError(
            f"{place}: expected recipe '{name}' to make numbers in [0, {most}), which guards are "
            f"proven from, got {result.min()} to {result.max()}"
        )
    return result


def _recipe_problem(made: _Recipe) -> str | None:
    """Return what is wrong with a recipe's name and keywords, or None."""
    name = made.recipe
    if name not in RECIPES:
        return (
            f"unknown recipe '{name}': import the module that registers it before; there are "
            f"{sorted(RECIPES)}"
        )
    return _keyword_problem(name, RECIPES[name], made.keywords)


@cache
def _keyword_problem(
    name: str, recipe: Callable[..., Any], keywords: tuple[str, ...]
) -> str | None:
    """Return what is wrong with the keywords of a recipe."""
    signature = inspect.signature(recipe)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError:
        expected = [*signature.parameters]
        return f"recipe '{name}': expected the keywords {expected}, got {sorted(keywords)}"
    return None


@cache
def _limits(dtype: str) -> tuple[int, int]:
    """The smallest and the largest number of an integer type."""
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _fitted(place: str, value: Any, is_array: bool, dtype: str) -> Any:
    """A value converted to the type of its parameter."""
    if not is_array:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{place}: expected an integer, got {value!r}")
        smallest, largest = _limits(dtype)
        if not smallest <= value <= largest:
            raise ScheduleError(f"{place}: expected a number that {dtype} holds, got {value}")
        return int(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{place}: expected a NumPy array, got {type(value).__name__}")
    if dtype.startswith(("int", "uint")):
        if value.dtype.kind not in "iu":
            raise TypeError(f"{place}: expected an array of integers, got one of {value.dtype}")
        smallest, largest = _limits(dtype)
        fits = np.can_cast(value.dtype, dtype) or not value.size
        if not fits and (value.min() < smallest or value.max() > largest):
            raise ScheduleError(
                f"{place}: expected numbers that {dtype} holds, got {value.min()} to {value.max()}"
            )
    return np.ascontiguousarray(value, np.dtype(dtype))


def computed_problems(func: SparseFunc) -> Found:
    """The verifier's rule: computed parameters exist, come last, and can be computed."""
    if COMPUTED not in func.attrs:
        return
    if not isinstance(func.attrs[COMPUTED], Mapping):
        yield Broken(func.span, f"attribute '{COMPUTED}': expected a dict by parameter")
        return
    params = declared(func).params
    for name, how in func.attrs[COMPUTED].items():
        place = f"computed parameter '{name}'"
        if name not in params:
            yield Broken(func.span, f"{place}: no such parameter; there are {[*params]}")
        if not isinstance(how, Mapping):
            yield Broken(func.span, f"{place}: expected a dict with its 'recipe', got {how!r}")
    recipes, dtypes, before = computed_parameters(func), _dtypes(func), list[str]()
    first = next(iter(recipes), None)
    for name, param in params.items():
        if name not in recipes and recipes.keys() & set(before):
            yield Broken(
                param.span,
                f"computed parameter '{first}': expected it after all that callers give, but "
                f"'{name}' comes later",
            )
        elif name in recipes:
            for text in _problems_of(name, recipes[name], dtypes, before):
                yield Broken(param.span, f"computed parameter '{name}': {text}")
        before.append(name)
    handles = {b.var: str(b.handle.name) for b in func.buffers if b.handle is not None}
    stored = nodes_of(tirx.BufferStore, func.body)
    for store in stored:
        if handles.get(store.buffer) in recipes:
            yield Broken(
                store.span, f"computed parameter '{handles[store.buffer]}': the body writes it"
            )


def _problems_of(
    name: str, how: Mapping[str, Any], dtypes: Mapping[str, tuple[bool, str]], before: list[str]
) -> list[str]:
    """Return what is wrong with one computed parameter, after those before it."""
    if name not in dtypes:
        return ["expected it to be bound to an axis or a buffer, or an integer"]
    is_array, dtype = dtypes[name]
    if not is_array and not dtype.startswith(("int", "uint")):
        return [f"expected an array or an integer, got {dtype}"]
    problems = []
    problem = _recipe_problem(_recipe_of(dict(how)))
    if problem is not None:
        problems.append(problem)
    for read in reads(how):
        if read not in before:
            problems.append(f"it reads '{read}'; parameters before it are {before}")
        elif read not in dtypes:
            problems.append(f"it reads '{read}', which is bound to no axis and no buffer")
    return problems
