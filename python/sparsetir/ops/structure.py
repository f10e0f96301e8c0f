"""Sparse patterns of torch tensors, with cached data and plans for kernels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from sparsetir.ops.blocks import Blocks
from sparsetir.ops.cache import Deriving, attach, attached, cacheable, is_private, kept, private
from sparsetir.ops.compress import INT32_MAX, compress, transpose
from sparsetir.ops.tensors import (
    DTYPES,
    Planned,
    call_plan,
    check_csr,
    check_edges,
    check_kind,
    check_pairs,
    check_size,
    recorded,
    target_of,
)
from sparsetir.planning.plan import plan_per_run
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import Plan
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.registry import OPERATORS

# Plans of a structure; a plan that no record has chosen counts twice.
MAX_PLANS = 64
K = TypeVar("K", Plan, Planned)


class Structure(Deriving):
    """The pattern of a sparse (m, n) matrix, and the plans made for it.

    Get one with :func:`structure_of`. Elements are in row order here, in any order within a row;
    several may have the same column (parallel edges), each with its own value. The caller may have
    them in another order; :meth:`arranged` and :meth:`restored` convert between both, and
    :meth:`run` does so itself. Safe to use from several threads.

    Parameters
    ----------
    rowptr : (m + 1,) Tensor, int32 or int64
        Start of each row.
    col : (nnz,) Tensor, int32 or int64
        Columns, on the same device.
    shape : (int, int)
        (m, n).
    order : (nnz,) Tensor, int64, optional
        Position of each element in the caller's order; None if the order is the same.
    blocks : Blocks, optional
        The blocks, for a matrix of dense blocks whose values the caller has block by block.

    Notes
    -----
    Plans follow the records of tuning, like those of :func:`sparsetir.plan`, if the pattern has no
    duplicates. Records for the transposed pattern serve gradients.
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
        super().__init__()
        self.rowptr, self.col, self.shape, self.order = rowptr, col, shape, order
        self.blocks = blocks
        self.m, self.n = shape
        self.nnz: int = len(col)
        self.device: torch.device = col.device
        self._plans: OrderedDict[Hashable, Plan | Planned] = OrderedDict()
        self._calls: dict[Hashable, tuple[Plan, bool]] = {}

    @cached_property
    @cacheable
    def rows(self) -> Tensor:
        """The row of each element, (nnz,)."""
        return torch.repeat_interleave(
            torch.arange(self.m, device=self.device, dtype=self.col.dtype), self.degrees
        )

    @cached_property
    @cacheable
    def degrees(self) -> Tensor:
        """The number of elements of each row, (m,)."""
        return self.rowptr[1:] - self.rowptr[:-1]

    @cached_property
    def pattern(self) -> CsrPattern:
        """The pattern on the host, with int32 if it suffices."""
        small = max(self.m, self.n, self.nnz) < INT32_MAX
        dtype = torch.int32 if small else torch.int64
        rowptr, col = (x.to("cpu", dtype).numpy() for x in (self.rowptr, self.col))
        return CsrPattern(rowptr, col, self.shape)

    @property
    def transposed(self) -> Structure:
        """The structure of the transposed matrix, for the same order of the caller's elements."""
        return self.derived("transposed", Structure._transpose)

    @cacheable
    def _transpose(self) -> Structure:
        rowptr, col, order = transpose(self.rowptr, self.col, self.n, self.order)
        blocks = self.blocks and self.blocks.transposed(self.n // self.blocks.size[1])
        return Structure(rowptr, col, (self.n, self.m), order, blocks)

    @property
    def with_columns_in_order(self) -> Structure:
        """The structure with sorted columns in each row; made once."""
        return self.transposed.transposed

    def arranged(self, values: Tensor, dim: int = -1) -> Tensor:
        """Permute values from the caller's order into row order.

        Parameters
        ----------
        values : Tensor
            Values with nnz elements along `dim`.
        dim : int
            The dimension of the elements.

        Returns
        -------
        Tensor
        """
        return values if self.order is None else values.index_select(dim, self.order)

    def restored(self, values: Tensor, dim: int = -1) -> Tensor:
        """Permute values from row order into the caller's order.

        Parameters
        ----------
        values : Tensor
            Values with nnz elements along `dim`.
        dim : int
            The dimension of the elements.

        Returns
        -------
        Tensor
        """
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(dim, self.order, values)

    def run(
        self,
        op: str,
        operands: Sequence[Tensor],
        values: Tensor | None = None,
        reduce: str = "sum",
        feat: int | None = None,
    ) -> Tensor:
        """Run an operator of :func:`sparsetir.plan` on this pattern.

        Parameters
        ----------
        op : str
            The operator: "spmm", "spmv", "sddmm", or one defined by a record.
        operands : sequence of Tensor
            Operands of one dtype on this structure's device; (n, feat), (n,), or (m, feat) and
            (n, feat); with a first dimension for heads, if any. Shapes are not checked.
        values : (nnz,) or (heads, nnz) Tensor, optional
            Values in the caller's order; by default ones.
        reduce : str
            The reduction of "spmm" and "spmv", one of REDUCERS.
        feat : int, optional
            The number of features; by default the last size of the first operand.

        Returns
        -------
        Tensor
            The result, in new memory.
        """
        operator = OPERATORS[op]
        first = operands[0] if operands else values
        assert first is not None
        batched = operator.takes_heads and first.dim() > (1 if operator.vectors else 2)
        heads = first.shape[0] if batched else None
        if feat is None:
            feat = 1 if operator.vectors else first.shape[-1]
        nonempty = operator.takes_heads and self.nnz and feat and heads != 0
        if not nonempty:
            shape = operator.shapes(self.shape, self.nnz, feat, heads)["out"]
            if operator.takes_heads or 0 in shape or not feat:
                return first.new_zeros(shape)  # sums are empty
        ones = values is None and operator.reads_values
        if batched and ones:
            return torch.stack([self.run(op, (b,), None, reduce) for b in first.unbind()])
        run, resorted, in_blocks = self.planned(op, feat, first.dtype, reduce, heads, ones)
        side = self.with_columns_in_order if resorted else self
        quick = operator.takes_heads and run.repeats and not resorted
        if quick and self.device.type == "cpu":
            if len(self._calls) >= MAX_PLANS:
                self._calls.clear()
            self._calls[_call_key(op, operands, values, reduce)] = run, in_blocks
        if values is not None:
            blocks = self.blocks if in_blocks else None
            values = side.arranged(values) if blocks is None else blocks.arranged(values)
        elif ones and run.needs_values:
            values = self.ones(first.dtype)
        if not operator.takes_heads:
            each = zip(operands, map(operator.axes, operator.names), strict=True)
            operands = [side.arranged(x, 0) if per == ["nnz"] else x for x, per in each]
        out = call_plan(run, operands, values)
        return side.restored(out) if operator.axes("out") == ["nnz"] else out

    def fast_path(
        self,
        op: str,
        operands: tuple[Tensor, ...],
        values: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor | None:
        """The result of :meth:`run` on a short path, for tensors like those of an earlier call.

        Parameters
        ----------
        op, operands, values, reduce
            The same as for :meth:`run`; any tensors that hold data, on any device.

        Returns
        -------
        Tensor or None
            None for other tensors, and for those that need a check, for :meth:`run` to report.
        """
        call = self._calls.get(_call_key(op, operands, values, reduce))
        if call is None:
            return None
        for x in operands:
            if x.is_neg():
                return None
        run, in_blocks = call
        if values is not None:
            if values.is_neg() or not values.is_cpu:
                return None
            blocks = self.blocks if in_blocks else None
            values = self.arranged(values) if blocks is None else blocks.arranged(values)
        elif run.needs_values:
            values = self.ones(operands[0].dtype)
        out = run.repeat(operands, values)
        return out if out is None or op != "sddmm" else self.restored(out)

    def has_run(
        self,
        op: str,
        operands: tuple[Tensor, ...],
        values: Tensor | None = None,
        reduce: str = "sum",
    ) -> bool:
        """Whether tensors like these have been passed in an earlier call.

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
        self, op: str, feat: int, dtype: torch.dtype, reduce: str = "sum", heads: int | None = None
    ) -> Plan:
        """The plan for an operator, chosen by sizes alone, made on first use and kept.

        Parameters
        ----------
        op, feat, dtype, reduce, heads
            As for :func:`sparsetir.plan`.

        Returns
        -------
        Plan
            A plan whose values are in row order.
        """

        def make() -> Plan:
            return plan_per_run(op, self.pattern, feat, **self._options(dtype, reduce, heads))

        return self._kept((op, feat, dtype, reduce, heads, default_threads()), make)

    def planned(
        self,
        op: str,
        feat: int,
        dtype: torch.dtype,
        reduce: str = "sum",
        heads: int | None = None,
        ones: bool = False,
    ) -> Planned:
        """The plan that :meth:`run` uses: from a record, by blocks, or else :meth:`plan`.

        Parameters
        ----------
        op, feat, dtype, reduce, heads
            As for :func:`sparsetir.plan`.
        ones : bool
            Whether runs have no values.

        Returns
        -------
        Planned
        """
        key = (op, feat, dtype, reduce, heads, ones, default_threads())
        kept = self._plans.get(key)
        if kept is not None:
            return cast(Planned, kept)

        def make() -> Planned:
            options = self._options(dtype, reduce, heads)
            in_order = lambda: self.with_columns_in_order.pattern  # noqa: E731
            planned = recorded(self.pattern, in_order, op, feat, ones, **options)
            plain = op == "spmm" and reduce == "sum" and heads is None and not ones
            if planned is None and self.blocks is not None and plain:
                target = target_of(self.device)
                by_blocks = self.blocks.plan(self.pattern, feat, DTYPES[dtype], target)
                planned = None if by_blocks is None else Planned(by_blocks, in_blocks=True)
            return planned or Planned(self.plan(op, feat, dtype, reduce, heads))

        return self._kept(key, make)

    def _options(self, dtype: torch.dtype, reduce: str, heads: int | None) -> dict[str, object]:
        target = target_of(self.device)
        return {"dtype": DTYPES[dtype], "reduce": reduce, "heads": heads, "target": target}

    def _kept(self, key: Hashable, make: Callable[[], K]) -> K:
        """The plan kept for a key, made if missing; beyond MAX_PLANS the oldest is dropped."""
        with self._lock:
            if key not in self._plans:
                self._plans[key] = make()
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
                    self._calls.clear()
            return cast(K, self._plans[key])

    def ones(self, dtype: torch.dtype) -> Tensor:
        """Ones, (nnz,), made once; do not write to them.

        Parameters
        ----------
        dtype : torch.dtype
            The type of the ones.

        Returns
        -------
        Tensor
        """
        return self.derived(dtype, lambda of: _ones(of.nnz, dtype, of.device))

    def __repr__(self) -> str:
        return f"<sparsetir.ops.Structure {self.shape}, {self.nnz} elements, {self.device}>"


def _call_key(op: str, operands: Sequence[Tensor], values: Tensor | None, reduce: str) -> Hashable:
    """The key of calls that can share a plan: operator, shapes, type and threads."""
    shape = None if values is None else values.shape
    first = operands[0]
    last = first if len(operands) == 1 else operands[1]
    return op, reduce, shape, first.shape, last.shape, first.dtype, torch.get_num_threads()


@cacheable
def _ones(nnz: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(nnz, dtype=dtype, device=device)


# -- cached structures ---------------------------------------------------------------------------


class PatternCopy(NamedTuple):
    """A pattern copied when it was first seen.

    rowptr : (m + 1,) row pointers, which keep the structure alive
    col : (nnz,) columns, or (2, nnz) edges in the caller's order
    structure : the structure of both

    Operators find the structure by these tensors, which are private, without comparing them.
    """

    rowptr: Tensor
    col: Tensor
    structure: Structure

    @staticmethod
    def of(structure: Structure, col: Tensor) -> PatternCopy:
        """Wrap a structure of private tensors; col : the caller's columns or edges."""
        rowptr = private(structure.rowptr.to(col.dtype))
        attach(rowptr, (col, structure))
        return PatternCopy(rowptr, col, structure)

    @staticmethod
    def from_csr(caller: str, rowptr: Tensor, col: Tensor, n: int) -> PatternCopy:
        """Check private compressed rows with n columns (StructureError) and wrap them."""
        check_csr(caller, rowptr, col, n)
        return PatternCopy.of(Structure(rowptr, col, (len(rowptr) - 1, n)), col)

    @staticmethod
    def from_edges(
        caller: str,
        edges: Tensor,
        m: int,
        n: int,
        name: str = "edges",
        blocks: Blocks | None = None,
    ) -> PatternCopy:
        """Check private edges of an (m, n) matrix, sort them, and wrap the result.

        blocks : the blocks that the edges belong to, in order
        """
        check_pairs(caller, edges, name)
        compressed = compress(edges, m, n)
        if compressed is None:
            check_edges(caller, edges, m, n, name)  # raises, naming what is out of range
        assert compressed is not None
        rowptr, col, order = compressed
        return PatternCopy.of(Structure(rowptr, col, (m, n), order, blocks), edges)


def structure_of(rowptr: Tensor, col: Tensor, n: int, caller: str = "structure_of") -> Structure:
    """The structure of a pattern, made when first seen and kept in a bounded cache.

    Parameters
    ----------
    rowptr : (m + 1,) Tensor, int32 or int64
        Non-decreasing from 0 to nnz.
    col : (nnz,) or (2, nnz) Tensor
        Columns in row order; or edges in any order, columns (sources) first, then rows (targets);
        then only the length of `rowptr` matters.
    n : int
        Number of columns.
    caller : str
        The caller's name, for errors.

    Returns
    -------
    Structure

    Raises
    ------
    TypeError, ValueError, StructureError
        If the tensors are not a pattern.

    Notes
    -----
    A structure is looked up by the memory of the tensors, and used if they equal the copies that it
    was made from: after any write to them, the result is that of their contents. It is dropped when
    the memory of one of the tensors is freed. Comparing reads the tensors and the copies once: a
    small part of a product with many features, a good part of one with few. Results of
    :func:`prepare` and :func:`resolve` are recognised without comparison.
    """
    return pattern_of(rowptr, col, n, caller).structure


def pattern_of(rowptr: Tensor, col: Tensor, n: int, caller: str) -> PatternCopy:
    """The structure of :func:`structure_of` with the private tensors that identify it."""
    seen = known_pattern(rowptr, col, n, count=True)
    if seen is not None:
        return seen
    if col.dim() == 2:
        return pattern_of_edges(col, len(rowptr) - 1, n, caller)
    n = check_size(caller, "n", n)
    for name, x in (("rowptr", rowptr), ("col", col)):
        check_kind(caller, name, x)
    return kept.keep(("csr", n), partial(PatternCopy.from_csr, caller, n=n), rowptr, col)


def pattern_of_edges(
    edges: Tensor, m: int, n: int, caller: str = "structure_of", name: str = "edges"
) -> PatternCopy:
    """The pattern of (2, nnz) edges, columns first, of an (m, n) matrix; see :func:`pattern_of`.

    caller, name : names of the function and argument, for errors
    """
    seen = known_edges(edges, m, n, count=True)
    if seen is not None:
        return seen
    m, n = check_size(caller, "m", m), check_size(caller, "n", n)
    check_kind(caller, name, edges)
    make = partial(PatternCopy.from_edges, caller, m=m, n=n, name=name)
    return kept.keep(("edges", m, n), make, edges)


def known_pattern(rowptr: Tensor, col: Tensor, n: int, count: bool = False) -> PatternCopy | None:
    """The cached result of :func:`pattern_of`, or None.

    Raises RuntimeError for tensors that have no memory.
    """
    carried = attached(rowptr)
    if carried is not None:
        own_col, structure = carried
        if structure.n == n and col.is_set_to(own_col) and is_private(col):
            return PatternCopy(rowptr, own_col, structure)
    if col.dim() == 2:
        return known_edges(col, len(rowptr) - 1, n, count)
    return kept.find(("csr", n), rowptr, col, count=count)


def known_edges(edges: Tensor, m: int, n: int, count: bool = False) -> PatternCopy | None:
    """The cached result of :func:`pattern_of_edges`, or None; as :func:`known_pattern`."""
    return kept.find(("edges", m, n), edges, count=count)


def limit_cache(entries: int | None = None, bytes: int | None = None) -> None:
    """Set limits of the cache of patterns, 512 and 4 GiB at first; entries beyond are dropped.

    Parameters
    ----------
    entries : int, optional
        Maximum number of patterns and objects derived from them, 1 or more.
    bytes : int, optional
        Maximum bytes of their arrays, as measured; the last entry always stays.
    """
    for name, value in (("entries", entries), ("bytes", bytes)):
        if value is not None:
            check_size("limit_cache", name, value, 1)
    kept.limit(entries, bytes)


def clear_cache() -> None:
    """Forget all patterns and the plans made for them; compiled kernels are kept."""
    kept.clear()


def cache_info() -> dict[str, int]:
    """Statistics of the pattern cache: "entries", "bytes" of all arrays, and "misses" so far."""
    return {"entries": len(kept), "bytes": kept.measure(), "misses": kept.misses}
