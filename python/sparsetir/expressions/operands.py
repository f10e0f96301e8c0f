"""Operands of expressions: arrays, sparse tensors of all kinds, and their arrays in a storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sparsetir.data.sources import is_sparse, summed
from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.expressions.storage import COMPRESSED, DENSE, REPEATED, SLOTS
from sparsetir.formats import CSF, ELL
from sparsetir.formats.pattern import Pattern
from sparsetir.runtime.arrays import device_name, dtype_name, is_array, is_torch, to_host
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.index_arrays import INT32

DTYPES = (
    "float16", "bfloat16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8"
)  # fmt: skip


class Operand(NamedTuple):
    """What a caller gave for a name.

    values : the array; of a sparse one its values in the order of the pattern
    pattern : None of a dense one
    constant : whether it is a number of Python's, whose type is that of the others
    """

    values: Any
    shape: tuple[int, ...]
    dtype: str
    pattern: Pattern | None = None
    constant: bool = False


def read(who: str, name: str, given: Any) -> Operand:
    """An operand of any kind.

    Raises TypeError or ValueError, naming the argument.
    """
    kind = type(given)
    if kind is np.ndarray and given.dtype.name in DTYPES:
        return Operand(given, given.shape, given.dtype.name)
    if isinstance(given, SparseTensor):
        return Operand(given.values, given.shape, given.dtype.name, given.pattern)
    if is_torch(given):
        _check_device(who, name, given)
        dtype = _dtype(who, name, given)
        if "sparse" not in str(given.layout):
            return Operand(given, tuple(given.shape), dtype)
        return _of_torch(who, name, given)
    if isinstance(given, bool | int | float):
        dtype = {bool: "bool", int: "int64"}.get(kind, "float64")
        return Operand(np.asarray(given), (), dtype, constant=True)
    if is_sparse(given):
        return read(
            who,
            name,
            SparseMatrix.adopt(who, name, given) if len(given.shape) == 2 else SparseTensor(given),
        )
    if is_array(given) or isinstance(given, list | np.generic):
        array = to_host(who, name, given)
        return Operand(array, array.shape, _dtype(who, name, array))
    if hasattr(given, "rowptr") or (isinstance(given, tuple) and any(map(is_torch, given))):
        return _of_torch(who, name, given)
    return read(who, name, SparseMatrix.adopt(who, name, given))


def _check_device(who: str, name: str, given: Any) -> None:
    if device_name(given) != "cpu":
        raise wrong(who, name, "a tensor on the CPU", f"one on {device_name(given)}")


def _dtype(who: str, name: str, array: Any) -> str:
    dtype = dtype_name(array)
    if dtype not in DTYPES:
        raise wrong(who, name, f"one of {', '.join(DTYPES)}", dtype, TypeError)
    return dtype


def _of_torch(who: str, name: str, given: Any) -> Operand:
    """A sparse operand of torch; its values keep their gradient, its pattern is kept."""
    import torch

    from sparsetir.ops.cache import kept
    from sparsetir.ops.operands import resolve

    if is_torch(given) and given.dim() != 2:
        found = given if given.is_coalesced() else given.coalesce()
        tensor = kept.get(
            ("expressions", tuple(given.shape)),
            lambda at: SparseTensor(at, np.ones(at.shape[1], np.float32), tuple(given.shape)),
            found.indices(),
        )
        values = found.values()
    else:
        rowptr, col, m, n, values = resolve(given, who=who, name=name)
        edges = col.dim() == 2

        def matrix(rowptr: Any, col: Any) -> SparseMatrix:
            if edges:
                return SparseMatrix.from_edge_index(col, shape=(m, n))
            return SparseMatrix.from_csr(rowptr, col, shape=(m, n))

        tensor = kept.get(("expressions", m, n), matrix, rowptr, col)
        if values is None:
            count = col.shape[-1]
            values = torch.ones(count)
    if values.dim() != 1:
        raise wrong(
            who, name, "a number for each element", f"values of shape {tuple(values.shape)}"
        )
    dtype = _dtype(who, name, values)
    if tensor.places is not None:
        if values.requires_grad:
            at = torch.from_numpy(tensor.places.astype(np.int64))
            values = values.new_zeros(tensor.nnz).index_add(0, at, values)
        else:
            host = to_host(who, name, values)
            values = torch.from_numpy(summed(host, tensor.places, tensor.nnz))
    return Operand(values, tensor.shape, dtype, tensor.pattern)


@dataclass(frozen=True)
class Stored:
    """The arrays of a pattern in a storage.

    arrays : `indptr` and `indices` of each level, None where it has none
    lengths : of each level what follows from these: elements, or slots of each parent
    take : for each place its element, `padded` where there is none; None where they are the same
    padded : number of elements, where there are more places
    """

    arrays: tuple[tuple[np.ndarray | None, np.ndarray | None], ...]
    lengths: tuple[int, ...]
    take: np.ndarray | None = None
    padded: int | None = None

    @property
    def places(self) -> int:
        """Number of values, padding included."""
        last = self.arrays[-1][1]
        assert last is not None
        return len(last)

    def values(self, values: Any) -> Any:
        """Values in this order, of those in the order of the pattern."""
        if self.take is None:
            return values
        if is_torch(values):
            import torch

            if self.padded is not None:
                values = torch.cat([values, values.new_zeros(1)])
            return values.index_select(0, torch.from_numpy(self.take))
        return (
            np.append(values, values.dtype.type(0)) if self.padded is not None else values
        ).take(self.take)


_stored: WeakKeyDictionary[Pattern, dict[object, Stored]] = WeakKeyDictionary()


def stored(pattern: Pattern, levels: str, order: tuple[int, ...], idtype: str) -> Stored:
    """The arrays of a pattern in a storage, made once."""
    kept = _stored.setdefault(pattern, {})
    key = levels, order, idtype
    if key not in kept:
        kept[key] = _converted(pattern, levels, order, np.dtype(idtype))
    return kept[key]


def _converted(pattern: Pattern, levels: str, order: tuple[int, ...], idtype: np.dtype) -> Stored:
    nnz = pattern.nnz
    ends = np.array([0, nnz], idtype)
    if levels == COMPRESSED:
        return _typed(idtype, [(ends, pattern.coords[0])])
    if levels == REPEATED + SLOTS:
        return _typed(idtype, [(ends, pattern.coords[0]), (None, pattern.coords[1])], slots=1)
    tensor = SparseTensor.of_stored(_pattern_alone(pattern))
    if levels == DENSE + SLOTS:
        part = tensor.to(ELL()).parts[0]
        slots = part.indices["indices_jc_ell"]
        take = part.elements.astype(np.int64)
        found = _typed(
            idtype,
            [(None, None), (None, slots.reshape(-1))],
            slots=part.shape[0] // max(1, pattern.shape[0]),
        )
        return Stored(found.arrays, found.lengths, take, pattern.nnz)
    natural = order == tuple(range(len(order)))
    arrays: list[tuple[np.ndarray | None, np.ndarray | None]] = [(None, None)]
    take = None
    if natural and len(order) == 2:
        arrays.append((pattern.indptr, pattern.columns))
    else:
        part = tensor.to(CSF(order)).parts[0]
        by_kind = [
            [v for k, v in part.indices.items() if k.startswith(kind)]
            for kind in ("indptr_", "indices_")
        ]
        arrays += list(zip(*by_kind, strict=True))
        take = None if natural else part.elements.astype(np.int64)
    if levels[0] == COMPRESSED:  # without roots that have nothing below them
        ptr = np.asarray(arrays[1][0])
        rows = np.flatnonzero(np.diff(ptr))
        arrays[0] = np.array([0, len(rows)]), rows
        arrays[1] = np.append(ptr[rows], ptr[-1]), arrays[1][1]
    found = _typed(idtype, arrays)
    return Stored(found.arrays, found.lengths, take)


def _pattern_alone(pattern: Pattern) -> Any:
    from sparsetir.data.sources import Stored as Source

    return Source(pattern, np.ones(pattern.nnz, np.int8), None)


def _typed(idtype: np.dtype, arrays: Any, slots: int | None = None) -> Stored:
    out = tuple(
        tuple(None if x is None else np.ascontiguousarray(x, idtype) for x in pair)
        for pair in arrays
    )
    lengths = [
        0 if idx is None else len(idx) if ptr is not None else int(slots or 0) for ptr, idx in out
    ]
    return Stored(out, tuple(lengths))  # type: ignore[arg-type]


def idtype_of(operands: Iterable[Operand]) -> str:
    """The type of indices for all operands of a program."""
    for x in operands:
        if max(x.shape, default=0) > INT32 or (x.pattern is not None and x.pattern.nnz > INT32):
            return "int64"
    return "int32"
