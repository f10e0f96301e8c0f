"""Check a program's arguments by name, and add those that can be inferred or filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.runtime.arrays import is_array, to_numpy
from sparsetir.runtime.signature import Signature
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.position_space import SIGNATURE

# Types of missing arrays that get random numbers.
FILLED = ("float16", "bfloat16", "float32", "float64")


def bound_arguments(
    program: SparseFunc,
    arguments: object,
    caller: str = "tune: argument 'arguments'",
    rng: np.random.Generator | None = None,
) -> dict[str, Any]:
    """Complete the arguments of a function, in the order of its parameters.

    Sizes that the shapes of arrays imply may be missing; missing outputs become zeros.

    caller : beginning of errors
    rng : fills missing arrays of floating-point numbers; None refuses them

    Raises TypeError or ValueError naming the argument.
    """
    signature = Signature(lower_sparse_iter(program).attrs[SIGNATURE])
    names = signature.names
    if not isinstance(arguments, Mapping):
        raise TypeError(
            f"{caller}: expected a dict of arrays and numbers by parameter, got "
            f"{type(arguments).__name__}"
        )
    for name in arguments:
        if name not in names:
            raise ValueError(
                f"{caller}: '{program.name}' has no '{name}'; it has {', '.join(names)}"
            )
    values: list[Any] = [arguments.get(name) for name in names]
    missing = [
        i
        for i in signature.arrays
        if values[i] is None
        and (i in signature.outputs or rng is not None and signature.dtypes[i] in FILLED)
    ]
    present = [i for i in signature.arrays if i not in missing]
    for i in present:
        values[i] = _array(f"{caller}: '{names[i]}'", values[i], signature.dtypes[i])
    signature.infer(values)
    for i in signature.scalars:
        values[i] = _number(f"{caller}: '{names[i]}'", values[i], signature.dtypes[i])
    for i in signature.arrays:
        expected = signature.expected_shape(i, values)
        if min(expected, default=0) < 0:
            raise ValueError(
                f"{caller}: '{names[i]}': expected lengths of 0 or more, got {expected}"
            )
        if i in missing:
            filled = np.zeros(expected)
            if rng is not None and i not in signature.outputs:  # far enough from zero to divide by
                filled = rng.uniform(0.5, 1, expected) * rng.choice([-1, 1], expected)
            values[i] = filled.astype(signature.dtypes[i])
            continue
        values[i] = signature.view(i, values)
        if list(values[i].shape) != expected:
            legal = signature.expected_text(i, values)
            raise ValueError(
                f"{caller}: '{names[i]}': expected shape {legal}, got {values[i].shape}"
            )
    return dict(zip(names, values, strict=True))


def _array(caller: str, value: object, dtype: str) -> np.ndarray:
    if not is_array(value):
        got = "nothing" if value is None else type(value).__name__
        raise TypeError(f"{caller}: expected an array, got {got}")
    array = np.asarray(to_numpy(value))
    if str(array.dtype) != dtype:
        raise TypeError(f"{caller}: expected dtype {dtype}, got {array.dtype}")
    return array


def _number(caller: str, value: object, dtype: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    what = "a number" if dtype.startswith(("float", "bfloat")) else "an integer"
    if not isinstance(value, bool | int | float if what == "a number" else int):
        got = "nothing" if value is None else repr(value)
        raise TypeError(f"{caller}: expected {what}, got {got}")
    return value
