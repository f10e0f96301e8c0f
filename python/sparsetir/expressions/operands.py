"""Operands of expressions: arrays and sparse tensors of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparsetir.data.scipy_patterns import adopt
from sparsetir.data.sources import is_sparse, summed
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import device_name, dtype_name, is_array, is_torch, to_host
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.index_arrays import INT32

if TYPE_CHECKING:
    from sparsetir.ops.structure import Structure

DTYPES = (
    "float16", "bfloat16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8"
)  # fmt: skip

# Cached, as NumPy makes a name anew each time, which takes as long as a small product.
NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


class Operand(NamedTuple):
    """An operand of an expression.

    values : the array; for a sparse operand its values in the order of the pattern
    pattern : None for a dense operand
    constant : whether it is a Python number, which adopts the type of the others
    steady : whether the values are a SparseTensor's, so that writes to them do not affect cached
        conversions
    """

    values: Any
    shape: tuple[int, ...]
    dtype: str
    pattern: Pattern | None = None
    constant: bool = False
    steady: bool = False


def read(caller: str, name: str, operand: Any) -> Operand:
    """Convert an operand of any kind.

    Raises TypeError or ValueError, naming the argument.
    """
    kind = type(operand)
    if kind is np.ndarray and operand.dtype in NAMES:
        return Operand(operand, operand.shape, NAMES[operand.dtype])
    if kind is Operand:
        return operand
    if isinstance(operand, SparseTensor):
        values = operand.values
        return Operand(values, operand.shape, name_of(values), operand.pattern, steady=True)
    if is_torch(operand):
        if operand.is_nested:
            raise wrong(caller, name, "a dense or sparse tensor", "a nested one", TypeError)
        if not operand.is_cpu:
            raise wrong(caller, name, "a tensor on the CPU", f"one on {device_name(operand)}")
        strided = operand.layout is _loaded()[0].strided or "sparse" not in str(operand.layout)
        is_edges = kind is not _loaded()[0].Tensor and hasattr(operand, "sparse_size")
        if strided and not is_edges:  # is_edges : a torch_geometric.EdgeIndex
            return Operand(operand, tuple(operand.shape), _dtype(caller, name, operand))
        return _of_torch(caller, name, operand)
    if isinstance(operand, bool | int | float):
        dtype = {bool: "bool", int: "int64"}.get(kind, "float64")
        return Operand(np.asarray(operand), (), dtype, constant=True)
    if is_sparse(operand):
        tensor = adopt(caller, name, operand)
        dtype = _dtype(caller, name, tensor.values)
        return Operand(tensor.values, tensor.shape, dtype, tensor.pattern)
    if is_array(operand) or isinstance(operand, list | np.generic):
        array = to_host(caller, name, operand)
        return Operand(array, array.shape, _dtype(caller, name, array))
    if hasattr(operand, "rowptr") or (isinstance(operand, tuple) and any(map(is_torch, operand))):
        return _of_torch(caller, name, operand)
    return read(caller, name, SparseMatrix.adopt(caller, name, operand))


def name_of(array: Any) -> str:
    """The name of an array's type."""
    known = NAMES.get(array.dtype) if type(array) is np.ndarray else None
    return known or dtype_name(array)


def _dtype(caller: str, name: str, array: Any) -> str:
    dtype = name_of(array)
    if dtype not in DTYPES:
        raise wrong(caller, name, f"one of {', '.join(DTYPES)}", dtype, TypeError)
    return dtype


@cache
def _loaded() -> tuple[Any, Any]:
    """Torch, and our operators on its tensors; looking up modules in each call takes long."""
    import torch

    from sparsetir import ops

    return torch, ops


def _of_torch(caller: str, name: str, operand: Any) -> Operand:
    """A sparse operand from torch; its values keep their gradient, its pattern is cached."""
    torch, ops = _loaded()
    if is_torch(operand) and operand.dim() != 2:
        if operand.layout is not torch.sparse_coo or operand.dense_dim():
            expected = "a COO tensor without dense dimensions for another number of axes than two"
            got = f"{operand.layout} of shape {tuple(operand.shape)}"
            raise wrong(caller, name, expected, got, TypeError)
        coalesced = operand if operand.is_coalesced() else operand.coalesce()
        tensor = ops.cache.kept.get(
            ("expressions", tuple(operand.shape)),
            lambda at: SparseTensor(at, np.ones(at.shape[1], np.float32), tuple(operand.shape)),
            coalesced.indices(),
        )
        values = coalesced.values()
    else:
        undisturbed = ops.registry.is_plain_eager()
        seen, values = ops.operands.pattern_and_values(caller, name, operand, undisturbed)
        tensor: Any = seen.structure.derived("expressions", partial(_matrix, seen.rowptr, seen.col))
        if values is None:
            values = torch.ones(seen.structure.nnz)
    places, shape, pattern = tensor.places, tensor.shape, tensor.pattern
    count = pattern.nnz if places is None else len(places)
    if values.shape != (count,):
        raise wrong(
            caller, name, f"a number for each of {count} elements",
            f"values of shape {tuple(values.shape)}",
        )  # fmt: skip
    dtype = _dtype(caller, name, values)
    if places is not None:
        if values.requires_grad:
            at = torch.from_numpy(places.astype(np.int64))
            values = values.new_zeros(pattern.nnz).index_add(0, at, values)
        else:
            host = to_host(caller, name, values)
            values = torch.from_numpy(summed(host, places, pattern.nnz))
    return Operand(values, shape, dtype, pattern)


def _matrix(rowptr: Any, col: Any, structure: Structure) -> SparseMatrix:
    """The matrix of a structure, from row pointers and columns, or edges."""
    if col.dim() == 2:
        return SparseMatrix.from_edge_index(col, shape=structure.shape)
    return SparseMatrix.from_csr(rowptr, col, shape=structure.shape)


def patterns_of(operands: Mapping[str, Operand]) -> dict[str, Pattern]:
    """The patterns of sparse operands by name."""
    return {n: x.pattern for n, x in operands.items() if x.pattern is not None}


def idtype_of(operands: Iterable[Operand]) -> str:
    """The type of indices for all operands of a program."""
    for x in operands:
        if max(x.shape, default=0) > INT32 or (x.pattern is not None and x.pattern.nnz > INT32):
            return "int64"
    return "int32"
