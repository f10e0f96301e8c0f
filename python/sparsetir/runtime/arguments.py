"""Arguments of a kernel: bound to its parameters, completed, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm.target import Target

from sparsetir.runtime.arrays import (
    device_name,
    dtype_name,
    hidden,
    is_array,
    is_contiguous,
    is_read_only,
    itemsize,
    memory,
    spans_meet,
    strides,
)
from sparsetir.runtime.signature import Signature
from sparsetir.sparse_ir.promises import check_promises

PENDING = object()  # stands for an array that is yet to be made


class Arguments:
    """The parameters of a kernel that its caller gives.

    count : how many
    arrays, scalars : their places; outputs : of arrays that are written
    limits : of scalars that are handed over as they are: place, type, minimum and maximum

    Messages name the function and the argument. Values are a list, in the parameters' order.
    """

    def __init__(self, name: str, signature: Signature, target: Target) -> None:
        self.name = name
        self.signature = signature
        self.count = len(signature.names)
        self.arrays = tuple(signature.arrays)
        self.scalars = tuple(signature.scalars)
        self.outputs = frozenset(signature.outputs)
        self._kind = "cpu" if "cpu" in target.keys else target.kind.name
        self._itemsizes = tuple(itemsize(signature.dtypes[i]) for i in self.arrays)
        limits = [(i, _limits(signature.dtypes[i])) for i in self.scalars]
        self.limits = tuple((i, *limit) for i, limit in limits if limit is not None)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        """Values in order, None for scalars that were left out."""
        names = self.signature.names
        if len(args) > self.count:
            raise TypeError(
                f"{self.name}: expected at most {self.count} arguments "
                f"({', '.join(names)}), got {len(args)}"
            )
        values = [*args, *([None] * (self.count - len(args)))]
        for key, value in kwargs.items():
            at = self.signature.position.get(key)
            if at is None or at >= self.count:
                raise TypeError(f"{self.name}: no argument '{key}'; there are {', '.join(names)}")
            if at < len(args):
                raise TypeError(f"{self.name}: argument '{key}' is given twice")
            values[at] = value
        for i in self.arrays:
            if values[i] is None:
                raise TypeError(f"{self.named(i)} is missing: expected an array")
        return values

    def complete(self, values: list[Any]) -> None:
        """Fill in the scalars that the shapes of arrays imply; make the others Python numbers."""
        for i in self.scalars:
            if values[i] is not None:
                values[i] = self._number(i, values[i])
        for i, value in self.signature.constants.items():
            if values[i] is None:
                values[i] = value
        for step in self.signature.inferences:
            if values[step.scalar] is not None:
                continue
            shape = self._shape(step.array, values)
            if shape is None:
                continue
            size = int(shape[step.dim]) - step.minus
            for at in step.divide:
                if values[at]:
                    size //= values[at]
            values[step.scalar] = size
        for i in self.scalars:
            if values[i] is None:
                for at in (at for at in self.arrays if values[at] is not PENDING):
                    self._refuse_kind(at, values[at])
                    if self._shape(at, values) is None:
                        self._refuse_rank(at, values)
                raise TypeError(
                    f"{self.named(i)} is missing, and no array's shape implies it: expected a "
                    "number"
                )

    def _shape(self, at: int, values: list[Any]) -> Sequence[int] | None:
        """The shape of an array; None where it has not as many dimensions as are expected."""
        try:
            shape = values[at].shape
        except (AttributeError, RuntimeError):  # no array, or a nested tensor
            return None
        return shape if len(shape) == len(self.signature.shapes[at] or []) else None

    def _refuse_rank(self, at: int, values: list[Any]) -> None:
        expected, shape = self.signature.expected_shape(at, values), tuple(values[at].shape)
        raise ValueError(
            f"{self.named(at)}: expected {len(expected)} dimensions "
            f"({', '.join(map(str, expected))}), got {len(shape)}: {shape}"
        )

    def refuse_broken_promise(self, values: list[object]) -> None:
        """Raise for a scalar that is not what the schedule promised of it."""
        named = {self.signature.names[i]: values[i] for i in self.scalars}
        check_promises(self.name, self.signature.promises, named)

    def refuse(self, values: list[Any]) -> None:
        """Raise for what is wrong with the arguments, if anything is."""
        for i in self.scalars:
            values[i] = self._number(i, values[i])
        for i in self.arrays:
            self._refuse_kind(i, values[i])
        for i in self.arrays:
            array, who = values[i], self.named(i)
            expected = self.signature.expected_shape(i, values)
            shape = [int(s) for s in array.shape]
            if shape != expected:
                why = self.signature.why_exactly(expected, shape)
                raise ValueError(f"{who}: expected shape {tuple(expected)}{why}, got {(*shape,)}")
            if not is_contiguous(array):
                raise ValueError(
                    f"{who}: expected a contiguous array, got strides {strides(array)}"
                )
            if i in self.outputs and is_read_only(array):
                raise ValueError(f"{who}: it is written, but the array is read-only")
        self._refuse_shared(values)

    def _refuse_shared(self, values: list[object]) -> None:
        """Raise where an array that is written has memory in common with another one."""
        sizes = self._itemsizes
        spans = {i: memory(values[i], size) for i, size in zip(self.arrays, sizes, strict=True)}
        for at in sorted(self.outputs):
            for other, span in spans.items():
                if at != other and spans_meet(spans[at], span):
                    name = self.signature.names[other]
                    raise ValueError(f"{self.named(at)} is written and shares memory with '{name}'")

    def named(self, at: int) -> str:
        """How messages begin."""
        return f"{self.name}: argument '{self.signature.names[at]}'"

    def _number(self, at: int, value: object) -> Any:
        """A scalar argument as a Python number; raises for what is none or does not fit."""
        dtype = self.signature.dtypes[at]
        if dtype == "bool":
            if not isinstance(value, bool | np.bool_):
                raise TypeError(f"{self.named(at)}: expected a bool, got {_describe(value)}")
            return bool(value)
        if dtype.startswith("float"):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{self.named(at)}: expected a number, got {_describe(value)}")
            return float(value)
        if not dtype.startswith(("int", "uint")):
            return value
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{self.named(at)}: expected an integer, got {_describe(value)}")
        info = np.iinfo(dtype)
        if not info.min <= value <= info.max:
            raise ValueError(f"{self.named(at)}: expected a number that {dtype} holds, got {value}")
        return int(value)

    def _refuse_kind(self, at: int, array: object) -> None:
        """Raise for what is no array, or one of another dtype or on another device."""
        who, dtype = self.named(at), self.signature.dtypes[at]
        instead = hidden(array)
        if instead:
            raise TypeError(f"{who}: expected {instead}")
        layout = getattr(array, "layout", None)
        if layout is not None and "strided" not in str(layout):
            raise TypeError(f"{who}: expected a dense array of values or indices, got {layout}")
        if not is_array(array):
            raise TypeError(
                f"{who}: expected a torch, NumPy or TVM array, got {type(array).__name__}"
            )
        kind = self._kind
        device = device_name(array)
        if kind == "cpu" and device != "cpu":
            raise ValueError(f"{who}: expected an array on the CPU, got one on {device}")
        if kind == "cuda" and device != "cuda":
            raise ValueError(f"{who}: expected an array on a CUDA device, got one on {device}")
        if dtype_name(array) != dtype:
            raise TypeError(f"{who}: expected dtype {dtype}, got {dtype_name(array)}")


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r}"


def _limits(dtype: str) -> tuple[type, Any, Any] | None:
    """Type, minimum and maximum of a scalar argument that is handed over as it is."""
    if dtype == "bool":
        return bool, False, True
    if dtype.startswith("float"):
        return float, -math.inf, math.inf
    if dtype.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        return int, int(info.min), int(info.max)
    return None
