"""Sparse patterns of torch tensors: what kernels want of a pattern is made once and kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
import tvm_ffi
from torch import Tensor

from sparsetir.kernel import Kernel
from sparsetir.ops.blocks import Blocks
from sparsetir.ops.cache import kept, lasting, memory_key
from sparsetir.ops.check_pattern import check_csr, check_edges, check_size
from sparsetir.ops.compress import compress, transpose
from sparsetir.ops.recorded import Planned, recorded
from sparsetir.plan import Plan, plan
from sparsetir.schedules.operators.operands import OPERATORS
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.targets import resolve_target

__all__ = [
    "DTYPES",
    "Structure",
    "cache_info",
    "call_plan",
    "clear_cache",
    "compiled_code",
    "find_kept",
    "known_edges",
    "known_structure",
    "keep",
    "limit_cache",
    "pinned",
    "structure_of",
    "structure_of_edges",
    "target_of",
]

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
# Of one structure, where one that no record has chosen counts twice.
MAX_PLANS = 64
INT32_MAX = 2**31 - 1
# Vector loads of a GPU want whole vectors.
GPU_ALIGNMENT = 16


class Structure:
    """Where a sparse (m, n) matrix has elements, and the plans that were made for it.

    Get one with :func:`structure_of`. Elements are in row order here; those of a row are in any
    order, and several may have the same column (parallel edges), each with a value of its own. The
    caller may have them in another order, which :meth:`arranged` and :meth:`restored` translate;
    :meth:`run` does that by itself. May be used from several threads at once.

    Parameters
    ----------
    rowptr : (m + 1,) Tensor, int32 or int64
        Where rows begin.
    col : (nnz,) Tensor, int32 or int64
        Columns, on the same device.
    shape : (int, int)
        (m, n).
    order : (nnz,) Tensor, int64, optional
        Place, in the caller's order, of each element; None where that is the same.
    blocks : Blocks, optional
        Where the matrix is made of full blocks, and the caller has values block by block.

    Notes
    -----
    Plans are made by the records of tuning, as those of :func:`sparsetir.plan`, where each element
    is there once. Records for the transposed pattern serve gradients.
    """

    rowptr: Tensor
    col: Tensor
    shape: tuple[int, int]
    order: Tensor | None
    m: int
    n: int

    def __init__(
        self,
        rowptr: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        order: Tensor | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.rowptr, self.col, self.shape, self.order = rowptr, col, shape, order
        self.blocks = blocks
        self.m, self.n = shape
        self.nnz: int = len(col)
        self.device: torch.device = col.device
        self._lock = threading.RLock()
        self._plans: OrderedDict[Any, Any] = OrderedDict()
        self._calls: dict[Any, tuple[Plan, bool]] = {}
        self._ones: dict[torch.dtype, Tensor] = {}
        self._derived: dict[Any, Any] = {}
        self._transposed: Structure | None = None

    @cached_property
    @lasting
    def rows(self) -> Tensor:
        """(nnz,) row of each element."""
        return torch.repeat_interleave(
            torch.arange(self.m, device=self.device, dtype=self.col.dtype), self.degrees
        )

    @cached_property
    @lasting
    def degrees(self) -> Tensor:
        """(m,) elements of each row."""
        return self.rowptr[1:] - self.rowptr[:-1]

    @cached_property
    def pattern(self) -> CsrPattern:
        """The same on the host, with int32 where it suffices."""
        small = max(self.m, self.n, self.nnz) < INT32_MAX
        dtype = torch.int32 if small else torch.int64
        rowptr, col = (x.to("cpu", dtype).numpy() for x in (self.rowptr, self.col))
        return CsrPattern(rowptr, col, self.shape)

    @cached_property
    @lasting
    def index_arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """:attr:`pattern`, and the place of each element in row order, on the device."""
        rowptr, col, _ = self.pattern
        arrays = (torch.from_numpy(x).to(self.device) for x in (rowptr, col))
        rowptr, col = arrays
        return rowptr, col, torch.arange(self.nnz, dtype=rowptr.dtype, device=self.device)

    @property
    def transposed(self) -> Structure:
        """Of the transposed matrix, for a caller that has the same elements in the same order."""
        with self._lock:
            if self._transposed is None:
                self._transposed = self._transpose()
            return self._transposed

    @lasting
    def _transpose(self) -> Structure:
        rowptr, col, order = transpose(self.rowptr, self.col, self.n)
        if self.order is not None:
            order = self.order[order]
        blocks = self.blocks and self.blocks.transposed(self.n // self.blocks.size[1])
        return Structure(rowptr, col, (self.n, self.m), order, blocks)

    @property
    def with_columns_in_order(self) -> Structure:
        """The same, with the columns of each row in order; made once."""
        return self.transposed.transposed

    def derived(self, kind: Any, make: Callable[[Structure], Any]) -> Any:
        """What another module makes of the pattern, made once; may not refer to the structure.

        Parameters
        ----------
        kind : hashable
            What it is kept by.
        make : callable
            Makes it of this structure.

        Returns
        -------
        object
        """
        with self._lock:
            if kind not in self._derived:
                self._derived[kind] = make(self)
            return self._derived[kind]

    def arranged(self, values: Tensor, dim: int = -1) -> Tensor:
        """Values in row order, of values in the caller's order.

        Parameters
        ----------
        values : Tensor
            With nnz elements along `dim`.
        dim : int
            That of the elements.

        Returns
        -------
        Tensor
        """
        return values if self.order is None else values.index_select(dim, self.order)

    def restored(self, values: Tensor, dim: int = -1) -> Tensor:
        """Values in the caller's order, of values in row order.

        Parameters
        ----------
        values : Tensor
            With nnz elements along `dim`.
        dim : int
            That of the elements.

        Returns
        -------
        Tensor
        """
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(dim, self.order, values)

    def run(
        self, op: str, operands: tuple[Tensor, ...], values: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor:  # fmt: skip
        """An operator of :func:`sparsetir.plan` on this pattern.

        Parameters
        ----------
        op : {"spmm", "spmv", "sddmm"}
            The operator.
        operands : tuple of Tensor
            Of one dtype and this structure's device; (n, feat), (n,), or (m, feat) and (n, feat);
            with a first dimension for heads, if any. Shapes are not checked.
        values : (nnz,) or (heads, nnz) Tensor, optional
            In the caller's order; by default all one.
        reduce : {"sum", "mean", "max", "min"}
            Of "spmm" and "spmv".

        Returns
        -------
        Tensor
            A new one.
        """
        first, operator = operands[0], OPERATORS[op]
        batched = first.dim() > (1 if operator.vectors else 2)
        heads = first.shape[0] if batched else None
        feat = 1 if operator.vectors else first.shape[-1]
        if not self.nnz or not feat or heads == 0:  # nothing is added up
            return first.new_zeros(operator.shapes(self.shape, self.nnz, feat, heads)["out"])
        if batched and values is None and operator.reads_values:
            return torch.stack([self.run(op, (b,), None, reduce) for b in first.unbind()])
        ones = values is None and operator.reads_values
        run, resorted, in_blocks = self.planned(op, feat, first.dtype, reduce, heads, ones)
        at = self.with_columns_in_order if resorted else self
        if not resorted and run.repeats and self.device.type == "cpu":
            if len(self._calls) >= MAX_PLANS:
                self._calls.clear()
            self._calls[_call_key(op, operands, values, reduce)] = run, in_blocks
        if not operator.reads_values:
            return at.restored(call_plan(run, operands, None))
        if values is not None:
            blocks = self.blocks if in_blocks else None
            values = at.arranged(values) if blocks is None else blocks.arranged(values)
        elif ones and run.needs_values:
            values = self._unit(first.dtype)
        return call_plan(run, operands, values)

    def again(
        self, op: str, operands: tuple[Tensor, ...], values: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor | None:  # fmt: skip
        """What :meth:`run` gives, for tensors as it has had before.

        Parameters
        ----------
        op, operands, values, reduce
            As for :meth:`run`; any tensors that hold data, on any device.

        Returns
        -------
        Tensor or None
            None for other tensors, and for those that must be looked at: :meth:`run` then says what
            is wrong with them.
        """
        found = self._calls.get(_call_key(op, operands, values, reduce))
        if found is None:
            return None
        for x in operands:
            if x.is_neg():
                return None
        run, in_blocks = found
        if values is not None:
            if values.is_neg() or not values.is_cpu:
                return None
            blocks = self.blocks if in_blocks else None
            values = self.arranged(values) if blocks is None else blocks.arranged(values)
        elif run.needs_values:
            values = self._unit(operands[0].dtype)
        out = run.repeat(operands, values)
        return out if out is None or op != "sddmm" else self.restored(out)

    def has_run(
        self, op: str, operands: tuple[Tensor, ...], values: Tensor | None = None,
        reduce: str = "sum",
    ) -> bool:  # fmt: skip
        """Whether there was a call with tensors as these.

        Parameters
        ----------
        op, operands, values, reduce
            As for :meth:`run`.

        Returns
        -------
        bool
        """
        return _call_key(op, operands, values, reduce) in self._calls

    def plan(
        self,
        op: str,
        feat: int,
        dtype: torch.dtype,
        reduce: str = "sum",
        heads: int | None = None,
    ) -> Plan:
        """The plan for an operator, chosen by sizes alone: made when it is first wanted, and kept.

        Parameters
        ----------
        op, feat, dtype, reduce, heads
            As for :func:`sparsetir.plan`.

        Returns
        -------
        Plan
            Takes values, and gives them, in row order.
        """

        def make() -> Plan:
            return plan(op, self.pattern, feat, **self._options(dtype, reduce, heads))

        return self._kept((op, feat, dtype, reduce, heads), make)

    def planned(
        self,
        op: str,
        feat: int,
        dtype: torch.dtype,
        reduce: str = "sum",
        heads: int | None = None,
        ones: bool = False,
    ) -> Planned:
        """The plan that :meth:`run` uses: by what tuning has found, of blocks, else :meth:`plan`.

        Parameters
        ----------
        op, feat, dtype, reduce, heads
            As for :func:`sparsetir.plan`.
        ones : bool
            For runs without values.

        Returns
        -------
        Planned
        """
        key = (op, feat, dtype, reduce, heads, ones)
        kept = self._plans.get(key)
        if kept is not None:
            return kept

        def make() -> Planned:
            options = self._options(dtype, reduce, heads)
            found = recorded(self.pattern, self._pattern_in_order, op, feat, ones, **options)
            if found is None and self.blocks is not None and op == "spmm":
                if reduce == "sum" and heads is None and not ones:
                    found = self._in_blocks(feat, dtype)
            return found or Planned(self.plan(op, feat, dtype, reduce, heads))

        return self._kept(key, make)

    def _in_blocks(self, feat: int, dtype: torch.dtype) -> Planned | None:
        """The sum by blocks, where these are fast."""
        assert self.blocks is not None
        found = self.blocks.plan(self.pattern, feat, DTYPES[dtype], target_of(self.device))
        return None if found is None else Planned(found, in_blocks=True)

    def _pattern_in_order(self) -> CsrPattern:
        return self.with_columns_in_order.pattern

    def _options(self, dtype: torch.dtype, reduce: str, heads: int | None) -> dict[str, Any]:
        target = target_of(self.device)
        return {"dtype": DTYPES[dtype], "reduce": reduce, "heads": heads, "target": target}

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for a key; the oldest goes first."""
        with self._lock:
            if key not in self._plans:
                self._plans[key] = make()
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
                    self._calls.clear()
            return self._plans[key]

    def call(self, kernel: Kernel, arrays: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        """Run any kernel on this structure's device and torch's current stream there.

        Parameters
        ----------
        kernel : Kernel
            What is run.
        arrays : mapping of str to Tensor
            Its arrays, by name.
        sizes : mapping of str to int
            Its scalars, by name.
        """
        arrays = {name: _plain(x) for name, x in arrays.items()}
        if self.device.type == "cpu":
            kernel(**arrays, **sizes)
            return
        with torch.cuda.device(self.device), tvm_ffi.use_torch_stream():
            kernel(**arrays, **sizes)

    def _unit(self, dtype: torch.dtype) -> Tensor:
        """(nnz,) ones."""
        found = self._ones.get(dtype)
        if found is None:
            make = lasting(torch.ones)
            found = self._ones[dtype] = make(self.nnz, dtype=dtype, device=self.device)
        return found

    def __repr__(self) -> str:
        return f"<sparsetir.ops.Structure {self.shape}, {self.nnz} elements, {self.device}>"


def call_plan(run: Plan, operands: Sequence[Tensor], values: Tensor | None) -> Tensor:
    """A plan on operands that fit it, on their device and torch's current stream there."""
    plain, device = [_plain(x) for x in operands], operands[0].device
    values = None if values is None else _plain(values)
    if device.type == "cpu":
        return run.run_trusted(plain, values)
    with torch.cuda.device(device), tvm_ffi.use_torch_stream():
        return run.run_trusted(plain, values)


def _call_key(
    op: str, operands: tuple[Tensor, ...], values: Tensor | None, reduce: str
) -> tuple[Any, ...]:
    """What calls have in common that take the same way."""
    shape = None if values is None else values.shape
    first = operands[0]
    last = first if len(operands) == 1 else operands[1]
    return op, reduce, shape, first.shape, last.shape, first.dtype


def _plain(x: Tensor) -> Tensor:
    """As kernels take it, which read memory as it is."""
    if x.is_neg():
        x = x.resolve_neg()
    if x._is_zerotensor():
        x = x.clone()
    if not x.is_contiguous():
        x = x.contiguous()
    aligned = x.device.type == "cpu" or x.data_ptr() % GPU_ALIGNMENT == 0
    return x if aligned else x.clone()


@cache
def target_of(device: torch.device) -> Any:
    """What kernels are compiled for."""
    return resolve_target("cuda" if device.type == "cuda" else "llvm")


# -- structures that were seen -------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """A structure; where others may write unseen, copies of the tensors that it was made for."""

    structure: Any
    copies: tuple[Tensor, ...]


# Compiled code may use the memory of a pattern that it has made itself for the next one, and torch
# does not count that as writing. So what comes from there is copied, and compared each time that it
# comes again.
compiled_code = threading.local()

# Handles that have a structure of their own, by the key of their own tensors; it keeps none alive.
pinned: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def structure_of(rowptr: Tensor, col: Tensor, n: int, who: str = "structure_of") -> Structure:
    """The structure of a pattern, made when it is first seen and kept in a bounded cache.

    Parameters
    ----------
    rowptr : (m + 1,) Tensor, int32 or int64
        Non-decreasing from 0 to nnz.
    col : (nnz,) or (2, nnz) Tensor
        Columns in row order; or edges in any order, columns (sources) first, then rows (targets);
        of `rowptr` then its length alone matters.
    n : int
        Columns.
    who : str
        Is named in errors.

    Returns
    -------
    Structure

    Raises
    ------
    TypeError, ValueError, StructureError
        For what is no pattern.

    Notes
    -----
    Goes by the memory and the version of the tensors. What torch writes to them is seen, but for
    writing through `tensor.data`, and to tensors that were made in inference mode. What others
    write to the same memory, such as NumPy and whatever shares it by DLPack, is not seen. After
    such writing call :func:`clear_cache`: to compare patterns each time would take about as long as
    a small product.
    """
    if col.dim() == 2:
        return structure_of_edges(col, len(rowptr) - 1, n, who)
    key = (n, *memory_key(col), *memory_key(rowptr))
    found = find_kept(key, rowptr, col)
    if found is None:
        n = check_size(who, "n", n)
        check_csr(who, rowptr, col, n)
        shape = (len(rowptr) - 1, n)
        found = keep(key, lambda rowptr, col: Structure(rowptr, col, shape), rowptr, col)
    return found


def structure_of_edges(
    edges: Tensor,
    m: int,
    n: int,
    who: str = "structure_of",
    name: str = "edges",
    blocks: Blocks | None = None,
) -> Structure:
    """As :func:`structure_of` for (2, nnz) edges, columns first, of an (m, n) matrix.

    who, name : function and argument, as errors name them
    blocks : that the edges are of, one after the other; remembered for these edges
    """
    key = (m, n, *memory_key(edges))
    if blocks is not None:
        kept.put(("blocks", *key), blocks, edges)
    found = find_kept(key, edges)
    if found is None:
        m, n = check_size(who, "m", m), check_size(who, "n", n)
        check_edges(who, edges, m, n, name)

        def make(edges: Tensor) -> Structure:
            rowptr, col, order = compress(edges, m)
            return Structure(rowptr, col, (m, n), order, kept.get(("blocks", *key)))

        found = keep(key, make, edges)
    return found


def known_structure(rowptr: Tensor, col: Tensor, n: int) -> Structure | None:
    """What :func:`structure_of` has kept for a pattern; None where that is nothing.

    Raises RuntimeError for tensors that have no memory.
    """
    if col.dim() == 2:
        return known_edges(col, len(rowptr) - 1, n)
    return find_kept((n, *memory_key(col), *memory_key(rowptr)), rowptr, col, count=False)


def known_edges(edges: Tensor, m: int, n: int) -> Structure | None:
    """As :func:`known_structure`, of :func:`structure_of_edges`."""
    return find_kept((m, n, *memory_key(edges)), edges, count=False)


def find_kept(key: Any, *tensors: Tensor, count: bool = True) -> Any:
    """The structure, or None, that was kept for these tensors."""
    found = kept.get(key, count and key not in pinned)
    if found is None:
        handle = pinned.get(key)
        return None if handle is None else handle.structure
    if found.copies and not all(map(torch.equal, tensors, found.copies)):
        kept.drop(key)
        return None
    return found.structure


@lasting
def keep(key: Any, make: Callable[..., Any], *tensors: Tensor) -> Any:
    """The structure that `make` gives for tensors, kept; has `nbytes`."""
    copies: tuple[Tensor, ...] = ()
    if getattr(compiled_code, "runs", False):
        copies = tuple(x.clone() for x in tensors)
    found = make(*(x.detach().contiguous() for x in copies or tensors))
    return kept.put(key, _Kept(found, copies), *tensors).structure


def limit_cache(entries: int | None = None, bytes: int | None = None) -> None:
    """Limits of the cache of patterns, 512 and 4 GiB at first; what is over them is dropped.

    Parameters
    ----------
    entries : int, optional
        Patterns and what is derived from them, 1 or more.
    bytes : int, optional
        Of the arrays that are kept, as measured; the last entry always stays.
    """
    for name, value in (("entries", entries), ("bytes", bytes)):
        if value is not None and check_size("limit_cache", name, value) < 1:
            raise ValueError(f"limit_cache: argument '{name}': expected 1 or more, got {value}")
    kept.limit(entries, bytes)


def clear_cache() -> None:
    """Forget all patterns and the plans made for them; compiled kernels are kept."""
    kept.clear()


def cache_info() -> dict[str, int]:
    """Of the cache of patterns: "entries", "bytes" of all arrays, "misses" of patterns so far."""
    return {"entries": len(kept), "bytes": kept.measure(), "misses": kept.misses}
