"""Check a program's arguments by name, and add those that can be inferred or filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.target import Target

from sparsetir.runtime.arrays import is_array, to_numpy
from sparsetir.runtime.signature import PENDING, Arguments, Signature
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
    checker, values = _Given(caller, signature, Target("llvm")), [arguments.get(n) for n in names]
    missing = [
        i
        for i in signature.arrays
        if values[i] is None
        and (i in signature.outputs or rng is not None and signature.dtypes[i] in FILLED)
    ]
    for i in signature.arrays:
        if i in missing:
            values[i] = PENDING
        elif names[i] not in arguments:
            raise TypeError(f"{checker.named(i)} is missing: expected a torch, NumPy or TVM array")
        elif is_array(values[i]):
            values[i] = np.require(
                to_numpy(values[i]), None, ["C", "W"] if i in checker.outputs else "C"
            )
    checker.complete(values)
    for i in missing:
        expected = signature.expected_shape(i, values)
        if min(expected, default=0) < 0:
            raise ValueError(f"{checker.named(i)}: expected lengths of 0 or more, got {expected}")
        filled = np.zeros(expected)
        if rng is not None and i not in checker.outputs:  # far enough from zero to divide by
            filled = rng.uniform(0.5, 1, expected) * rng.choice([-1, 1], expected)
        values[i] = filled.astype(signature.dtypes[i])
    checker.refuse(values)
    for i in signature.arrays:
        values[i] = signature.view(i, values)
    return dict(zip(names, values, strict=True))


class _Given(Arguments):
    def named(self, at: int) -> str:
        return f"{self.name}: '{self.signature.names[at]}'"
