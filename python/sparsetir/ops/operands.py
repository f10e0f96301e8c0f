"""Sparse operands of operators, and their structure."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from sparsetir.data.scipy_patterns import adopt_matrix, known_tensor
from sparsetir.data.sources import Compressed, Edges, adopted
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.pattern import Pattern
from sparsetir.ops.blocks import Blocks
from sparsetir.ops.cache import cached_result, kept, private
from sparsetir.ops.registry import Operation, Operator, holds_data
from sparsetir.ops.structure import (
    PatternCopy,
    Structure,
    known_edges,
    known_pattern,
    pattern_of,
    pattern_of_edges,
)
from sparsetir.ops.tensors import INDEX_DTYPES, check_csr, check_size
from sparsetir.runtime.arrays import device_name, is_array, plain_view, to_host
from sparsetir.runtime.refusals import wrong


class Operand(NamedTuple):
    """A sparse (m, n) matrix in the form of operators; accepted wherever a matrix is.

    Parameters
    ----------
    rowptr : (m + 1,) Tensor, int32 or int64
        Start of each row.
    col : (nnz,) or (2, nnz) Tensor
        Columns in row order; or edges in any order, columns first, then rows.
    m, n : int
        Numbers of rows and columns.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Values in the order of `col`; None for ones.
    """

    rowptr: Tensor
    col: Tensor
    m: int
    n: int
    values: Tensor | None = None


class Prepared:
    """The result of :func:`sparsetir.ops.prepare`, accepted wherever a sparse matrix is.

    Parameters
    ----------
    operand : Operand
        The matrix; its rowptr and col are private copies.
    structure : Structure
        The structure of these tensors.
    """

    operand: Operand
    structure: Structure
    rowptr: Tensor
    col: Tensor
    m: int
    n: int
    values: Tensor | None

    def __init__(self, operand: Operand, structure: Structure) -> None:
        self.operand, self.structure = operand, structure
        self.rowptr, self.col, self.m, self.n, self.values = operand
        self.seen: PatternCopy = PatternCopy(self.rowptr, self.col, structure)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n), rows and columns."""
        return self.m, self.n

    @property
    def nnz(self) -> int:
        """Number of elements."""
        return self.col.shape[-1]

    def with_values(self, values: Tensor | None) -> Prepared:
        """The same pattern with other values.

        Parameters
        ----------
        values : (nnz,) or (nnz, heads) Tensor, or None
            None for ones.

        Returns
        -------
        Prepared
        """
        return Prepared(self.operand._replace(values=values), self.structure)

    @staticmethod
    def of(operand: Operand) -> Prepared:
        """Prepare the pattern of an operand, which is checked and copied."""
        rowptr, col, m, n, values = operand
        rowptr, col, structure = cached_result(pattern_of, rowptr, col, n, "prepare")
        return Prepared(Operand(rowptr, col, m, n, values), structure)

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self.with_values(deepcopy(self.values, memo))  # nothing writes to the pattern

    def __reduce__(self) -> tuple[Callable[[Operand], Prepared], tuple[Operand]]:
        return Prepared.of, (self.operand,)

    def __repr__(self) -> str:
        return f"<sparsetir.ops.Prepared {self.shape}, {self.nnz} elements, {self.col.device}>"


def resolve(
    A: object,
    values: Tensor | None = None,
    shape: tuple[int, int] | None = None,
    caller: str = "resolve",
    name: str = "A",
) -> Operand:
    """Convert a sparse matrix of any kind to an :class:`Operand`; conversions are cached.

    Parameters
    ----------
    A : sparse (m, n) matrix
        One of

        - a sparse tensor of torch: COO (uncoalesced ones are coalesced in each call), CSR, CSC, BSR
          or BSC
        - a :class:`sparsetir.SparseMatrix`
        - (2, nnz) integers: the edges of a graph as in PyG, sources A[0] and targets A[1]. The
          matrix has a row for each target and a column for each source, so that A @ X sums what
          each node receives. Or a pair (edges, size), where size is (sources, targets) or one
          number for both
        - `torch_geometric.EdgeIndex`, likewise
        - a `torch_sparse.SparseTensor`, a `dgl.sparse.SparseMatrix`
        - an :class:`Operand`, or a result of :func:`sparsetir.ops.prepare`
        - anything else that a :class:`sparsetir.SparseMatrix` takes: scipy's matrices, (2, nnz)
          integers of NumPy and others with DLPack, graphs of PyG and DGL, names of files. Data
          outside tensors is converted in each call

    values : (nnz,) or (nnz, heads) Tensor, optional
        Values of the elements in A's order, instead of its own. That is the order of A.values() for
        torch's tensors (block by block for BSR and BSC), of the edges, of `SparseMatrix.values`, of
        the rows for a SparseTensor and of A.val for DGL. They keep their gradients.
    shape : (int, int), optional
        (m, n) for edges without a size; by default the sizes are read from the edges.
    caller, name : str
        Names of the function and argument, for errors.

    Returns
    -------
    Operand

    Raises
    ------
    TypeError, ValueError
        If A is not a sparse matrix.

    Notes
    -----
    Row pointers and columns are copies, which identify the data derived from the pattern and keep
    it alive: do not write to them. Under `torch.compile`, transforms and where tensors have no data
    they are A's own. `torch.compile` breaks the graph at sparse tensors of torch, as torch itself
    does, and so refuses them with fullgraph=True.
    """
    if isinstance(A, Tensor):
        if A.layout is torch.strided:
            edges, size = plain_edges(caller, name, A)
            return _from_edges(caller, name, edges, values, size or shape)
        return _from_sparse(caller, name, A, values)
    if isinstance(A, Operand):
        _check_operand(caller, name, A)
        own_values = A.values if values is None else values
        return _compressed(caller, A.rowptr, A.col, A.m, A.n, own_values)
    if isinstance(A, SparseMatrix):
        return _from_matrix(A, values)
    if isinstance(A, Prepared):
        return A.operand if values is None else A.operand._replace(values=values)
    if isinstance(A, tuple) and len(A) == 2 and isinstance(A[0], Tensor) and A[0].dim() != 1:
        edges, size = plain_edges(caller, name, A[0])
        size = size or shape if A[1] is None else size_of(caller, name, A[1])
        return _from_edges(caller, name, edges, values, size)
    return _from_foreign(caller, name, A, values, shape)


def known(A: Any, n: int) -> tuple[PatternCopy, Tensor | None] | None:
    """The cached pattern of a matrix and its own values; None for a matrix not seen before.

    A : as for :func:`resolve`; None is returned for kinds that need conversion
    n : columns and rows for edges without a size

    Raises RuntimeError for tensors that have no memory.
    """
    kind, values, pattern = type(A), None, None
    if kind is Operand:
        rowptr, col, _, n, values = A
        if type(rowptr) is Tensor and type(col) is Tensor:
            pattern = known_pattern(rowptr, col, n)
    elif kind is Prepared:
        return A.seen, A.values
    elif kind is Tensor and A.layout is torch.sparse_csr and A.dim() == 2:
        values, n = A.values(), A.shape[1]
        rowptr, col = A.crow_indices(), A.col_indices()
        pattern = kept.find(("csr", n), rowptr, col) or known_pattern(rowptr, col, n)
    elif kind is Tensor and A.layout is torch.sparse_coo and A.is_coalesced() and A.dim() == 2:
        values, pattern = A.values(), kept.find(("coo", *A.shape), A.indices())
    elif kind is SparseMatrix:
        values = tensor_of(A.values)
        pattern = kept.find(("matrix", A.shape), *arrays_of(A))
    else:
        matrix = known_tensor(A)
        if matrix is not None:
            return known(matrix, n)
        edges, size = A if kind is tuple and len(A) == 2 else (A, n)
        ends: Any = size if type(size) is tuple and len(size) == 2 else (size, size)
        if type(edges) is Tensor and {*map(type, ends)} == {int} and edges.layout is torch.strided:
            pattern = known_edges(edges, ends[1], ends[0]) if edges.dim() == 2 else None
    return None if pattern is None else (pattern, values)


def pattern_and_values(
    caller: str, name: str, A: object, undisturbed: bool
) -> tuple[PatternCopy, Tensor | None]:
    """The pattern of a matrix and its own values: those of :func:`known`, or of :func:`resolve`.

    undisturbed : the result of :func:`sparsetir.ops.registry.is_plain_eager`
    """
    try:
        seen = known(A, -1) if undisturbed else None
    except RuntimeError:  # of tensors without memory
        seen = None
    if seen is not None:
        return seen
    rowptr, col, _, n, values = resolve(A, None, None, caller, name)
    return pattern_of(rowptr, col, n, caller), values


def _check_operand(caller: str, name: str, A: Operand) -> None:
    for part, x in (("rowptr", A.rowptr), ("col", A.col)):
        if not isinstance(x, Tensor):
            raise wrong(caller, f"{name}.{part}", "a tensor", type(x).__name__, TypeError)
    if A.rowptr.shape != (A.m + 1,):
        raise wrong(
            caller, f"{name}.rowptr", f"shape ({A.m + 1},) for {A.m} rows", tuple(A.rowptr.shape)
        )


def _compressed(
    caller: str, rowptr: Tensor, col: Tensor, m: int, n: int, values: Tensor | None
) -> Operand:
    """The operand of rowptr and col tensors."""
    if _is_readable(rowptr, col):
        rowptr, col, _ = pattern_of(rowptr, col, n, caller)
    return Operand(rowptr, col, m, n, values)


def _is_readable(*tensors: Tensor) -> bool:
    """Whether data can be read now, rather than later, when traced code runs."""
    return not torch.compiler.is_compiling() and holds_data(*tensors)


# -- edges ----------------------------------------------------------------------------------------


@dataclass
class RowPointers(Operation[Tensor]):
    """Row pointers of edges, checked."""

    edges: Tensor
    m: int
    n: int
    autocast = False

    def run(self) -> Tensor:
        return pattern_of_edges(self.edges, self.m, self.n).rowptr.clone()

    def fake(self) -> Tensor:
        return self.edges.new_empty(self.m + 1)


row_pointers = Operator("row_pointers", RowPointers)


def plain_edges(caller: str, name: str, A: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """A as a plain tensor of edges, and (m, n) if A has a size."""
    size = None
    if hasattr(A, "sparse_size"):  # torch_geometric.EdgeIndex
        sources, targets = A.sparse_size()  # type: ignore[attr-defined]
        if sources is not None and targets is not None:
            size = int(targets), int(sources)
        A = A.as_tensor()  # type: ignore[attr-defined]
    if A.is_nested or A.layout is not torch.strided:
        expected = "a sparse matrix or an edge_index of shape (2, E)"
        raise wrong(
            caller, name, expected, "a nested tensor" if A.is_nested else A.layout, TypeError
        )
    if A.dim() != 2 or A.shape[0] != 2:
        expected = "a sparse matrix or an edge_index of shape (2, E)"
        raise wrong(caller, name, expected, f"a dense tensor of shape {tuple(A.shape)}")
    if A.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"{caller}: argument '{name}': expected an edge_index of int32 or int64, got "
            f"{str(A.dtype).removeprefix('torch.')}"
            + (" that requires a gradient: a pattern has none" if A.requires_grad else "")
        )
    return A, size


def size_of(caller: str, name: str, size: object) -> tuple[int, int]:
    """(m, n) from the size of edges, (sources, targets) or one number."""
    # Not `tuple | list`: Dynamo of torch 2.9 cannot trace it.
    ends = size if isinstance(size, (tuple, list)) else (size, size)
    if len(ends) != 2:
        expected = "(edge_index, size) with size = (sources, targets) or one number"
        raise wrong(caller, name, expected, f"{size!r}")
    return check_size(caller, name, ends[1]), check_size(caller, name, ends[0])


def _from_edges(
    caller: str, name: str, edges: Tensor, values: Tensor | None, shape: tuple[int, int] | None
) -> Operand:
    """The operand of plain edges."""
    if shape is None and edges.is_meta:
        raise ValueError(
            f"{caller}: argument '{name}': expected (edge_index, size) for edges without data"
        )
    m, n = shape or _least_shape(edges)
    if not _is_readable(edges):
        return Operand(row_pointers(edges, m, n), edges, m, n, values)
    pattern = pattern_of_edges(edges, m, n, caller, name)
    return Operand(pattern.rowptr, pattern.col, m, n, values)


def _least_shape(edges: Tensor) -> tuple[int, int]:
    nodes = int(edges.max()) + 1 if edges.numel() else 0
    return nodes, nodes


# -- torch.sparse ---------------------------------------------------------------------------------


def _from_sparse(caller: str, name: str, A: Tensor, values: Tensor | None) -> Operand:
    try:
        flat = A.dim() == 2 and A.sparse_dim() == 2
    except RuntimeError:  # torch.func.grad looks for strides, torch.sparse.mm fails there, too
        expected = "a result of ops.prepare for a compressed tensor, under torch.func.grad and vjp"
        raise wrong(caller, name, expected, A.layout, TypeError) from None
    if not flat:
        expected = "a sparse matrix without batch and dense dimensions"
        raise wrong(caller, name, expected, f"shape {tuple(A.shape)}")
    m, n = A.shape
    if A.layout is torch.sparse_csr:
        own_values = _own(A) if values is None else values
        return _compressed(caller, A.crow_indices(), A.col_indices(), m, n, own_values)
    if A.layout is torch.sparse_coo:
        A = A if A.is_coalesced() else A.coalesce()
        indices, own_values = A.indices(), _own(A) if values is None else values
        if not _is_readable(indices):
            return Operand(_pointers(indices[0], m), indices[1], m, n, own_values)

        def from_indices(indices: Tensor) -> PatternCopy:
            rows, cols = indices
            return PatternCopy.from_csr(
                caller, _pointers(_in_order(caller, name, rows), m), cols, n
            )

        pattern = kept.get(("coo", m, n), from_indices, indices)
        return Operand(pattern.rowptr, pattern.col, m, n, own_values)
    by_rows = A.layout is torch.sparse_bsr
    outer, inner = (
        (A.crow_indices(), A.col_indices()) if by_rows else (A.ccol_indices(), A.row_indices())
    )
    blocks = _own(A)
    if blocks.dim() not in (1, 3):
        raise wrong(
            caller,
            name,
            "values without dense dimensions",
            f"values of shape {tuple(blocks.shape)}",
        )
    block = (1, 1) if blocks.dim() == 1 else (blocks.shape[1], blocks.shape[2])

    def from_blocks(outer: Tensor, inner: Tensor) -> PatternCopy:
        height, width = block
        count = n // width if by_rows else m // height
        kinds = ("crow", "col") if by_rows else ("ccol", "row")
        check_csr(caller, outer, inner, count, tuple(f"{name}.{kind}_indices()" for kind in kinds))
        by_blocks = Blocks(outer, inner, block) if by_rows else None
        edges = _block_edges(outer, inner, block, by_rows)
        return PatternCopy.from_edges(caller, private(edges, is_new=True), m, n, name, by_blocks)

    own_values = blocks.reshape(-1) if values is None else values
    if not _is_readable(outer, inner):
        edges = _block_edges(outer, inner, block, by_rows)
        return Operand(row_pointers(edges, m, n), edges, m, n, own_values)
    pattern = kept.get(("blocks", block, by_rows, m, n), from_blocks, outer, inner)
    return Operand(pattern.rowptr, pattern.col, m, n, own_values)


def _in_order(caller: str, name: str, rows: Tensor) -> Tensor:
    """The rows of a tensor marked as coalesced, checked, as torch trusts its creator."""
    if bool((rows[1:] < rows[:-1]).any()):
        raise ValueError(
            f"{caller}: argument '{name}': expected elements in order of rows, as its "
            "is_coalesced() says; make it without is_coalesced=True"
        )
    return rows


def _own(A: Tensor) -> Tensor:
    """The values of a sparse tensor, not as a view, on which torch.compile fails."""
    values = A.values()
    return values.clone() if values.requires_grad else values.detach()


def _pointers(rows: Tensor, m: int) -> Tensor:
    """(m + 1,) row pointers of sorted rows."""
    bounds = torch.arange(m + 1, dtype=rows.dtype, device=rows.device)
    return torch.searchsorted(rows.contiguous(), bounds, out_int32=rows.dtype == torch.int32)


def _block_edges(outer: Tensor, inner: Tensor, block: tuple[int, int], by_rows: bool) -> Tensor:
    """(2, nnz) columns and rows of the elements of compressed blocks, block by block."""
    major = torch.repeat_interleave(outer[1:] - outer[:-1]).to(inner.dtype)
    row, col = (major, inner) if by_rows else (inner, major)
    height, width = (torch.arange(size, device=inner.device, dtype=inner.dtype) for size in block)
    rows = row[:, None, None] * block[0] + height[None, :, None]
    cols = col[:, None, None] * block[1] + width[None, None, :]
    shape = (len(inner), *block)
    return torch.stack([cols.expand(shape).reshape(-1), rows.expand(shape).reshape(-1)])


# -- matrices of other libraries ------------------------------------------------------------------


def _from_foreign(
    caller: str, name: str, A: object, values: Tensor | None, shape: tuple[int, int] | None
) -> Operand:
    source = adopted(caller, name, A)
    if isinstance(source, Compressed):
        own = source.values if values is None else values
        return _compressed(caller, source.rowptr, source.col, *source.shape, own)
    if isinstance(source, Edges):
        index, size = source.index, source.size
        size = shape if size is None else size_of(caller, name, size)
        if values is None and source.values is not None:
            values = as_tensor(caller, name, source.values)
        if isinstance(index, tuple):
            sources, targets = (as_tensor(caller, name, x) for x in index)
            if sources.shape != targets.shape:
                got = f"shapes {tuple(sources.shape)} and {tuple(targets.shape)}"
                raise wrong(caller, name, "arrays of one length", got)
            return _from_ends(caller, name, sources, targets, values, size)
        edges, own = plain_edges(caller, name, as_tensor(caller, name, index))
        return _from_edges(caller, name, edges, values, size or own)
    if isinstance(source, Tensor):
        return _from_sparse(caller, name, source, values)
    return _from_matrix(adopt_matrix(caller, name, source), values)


def _from_ends(
    caller: str,
    name: str,
    sources: Tensor,
    targets: Tensor,
    values: Tensor | None,
    shape: tuple[int, int] | None,
) -> Operand:
    """The operand of the two ends of edges, (E,) each."""
    if not _is_readable(sources, targets):
        edges, _ = plain_edges(caller, name, torch.stack([sources, targets]))
        return _from_edges(caller, name, edges, values, shape)

    def from_ends(*ends: Tensor) -> PatternCopy:
        edges, _ = plain_edges(caller, name, torch.stack(ends))
        m, n = shape or _least_shape(edges)
        return PatternCopy.from_edges(caller, private(edges, is_new=True), m, n, name)

    pattern = kept.get(("ends", shape), from_ends, sources, targets)
    return Operand(pattern.rowptr, pattern.col, *pattern.structure.shape, values)


def as_tensor(caller: str, name: str, array: object) -> Tensor:
    """Convert an array of any library to a tensor, sharing writable memory; integers become int64.

    caller, name : names of the function and argument, for errors
    """
    if isinstance(array, Tensor):
        return array
    if is_array(array) and device_name(array) != "cpu":
        return torch.from_dlpack(array)
    host = to_host(caller, name, array)
    if host.dtype.kind in "iu" and host.dtype.name not in ("int32", "int64"):
        host = host.astype(np.int64)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    backwards = any(step < 0 for step in host.strides)
    try:
        return torch.from_numpy(host.copy() if backwards or not host.flags.writeable else host)
    except TypeError:
        raise wrong(
            caller, name, "an array of numbers that torch knows", f"one of {host.dtype}", TypeError
        ) from None


# -- SparseMatrix ---------------------------------------------------------------------------------


# Tensors that share a pattern's memory and lifetime; the dictionary keeps no pattern alive.
_arrays: WeakKeyDictionary[Pattern, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def arrays_of(A: SparseMatrix) -> tuple[Tensor, Tensor]:
    """Row pointers and columns; the same tensors in each call for a pattern."""
    pattern = A.pattern
    arrays = _arrays.get(pattern)
    if arrays is None:
        rowptr, col = map(tensor_of, (pattern.indptr, pattern.columns))
        arrays = _arrays[pattern] = rowptr, col
    return arrays


def _from_matrix(A: SparseMatrix, values: Tensor | None) -> Operand:
    (m, n), arrays = A.shape, arrays_of(A)

    def from_arrays(rowptr: Tensor, col: Tensor) -> PatternCopy:
        return PatternCopy.from_csr("resolve", rowptr, col.to(rowptr.dtype), n)

    if _is_readable(*arrays):
        rowptr, col, _ = kept.get(("matrix", A.shape), from_arrays, *arrays)
    else:
        rowptr, col = arrays[0], arrays[1].to(arrays[0].dtype)
    return Operand(rowptr, col, m, n, tensor_of(A.values) if values is None else values)


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor of the same memory, also read-only, of NumPy's types and bfloat16."""
    bits = array.dtype.kind == "V"  # bfloat16, which NumPy does not know
    plain: Any = plain_view(array.view("int16") if bits else array)
    values = torch.from_numpy(plain)
    return values.view(torch.bfloat16) if bits else values
