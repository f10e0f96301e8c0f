"""Sparse patterns of torch tensors: what kernels want of a pattern is made once and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from sparsetir.ops.blocks import Blocks
from sparsetir.ops.cache import Deriving, hand_out, handed_out, is_private, kept, lasting, private
from sparsetir.ops.compress import INT32_MAX, Order, compress, transpose
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
from sparsetir.planning.plan import plan_of_each_run
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import Plan
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.registry import OPERATORS

# Of one structure, where one that no record has chosen counts twice.
MAX_PLANS = 64
Orders = tuple[Order | None, Order | None]
K = TypeVar("K", Plan, Planned)


class Structure(Deriving):
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
        super().__init__()
        self.rowptr, self.col, self.shape, self.order = rowptr, col, shape, order
        self.blocks = blocks
        # Gives the transposed one, where an order by columns is known.
        self.turned: Callable[[], tuple[Tensor, Tensor, Tensor | None] | None] | None = None
        self.m, self.n = shape
        self.nnz: int = len(col)
        self.device: torch.device = col.device
        self._plans: OrderedDict[Hashable, Plan | Planned] = OrderedDict()
        self._calls: dict[Hashable, tuple[Plan, bool]] = {}

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

    @property
    def transposed(self) -> Structure:
        """Of the transposed matrix, for a caller that has the same elements in the same order."""
        return self.derived("transposed", Structure._transpose)

    @lasting
    def _transpose(self) -> Structure:
        found = None if self.turned is None else self.turned()
        rowptr, col, order = found or transpose(self.rowptr, self.col, self.n, self.order)
        blocks = self.blocks and self.blocks.transposed(self.n // self.blocks.size[1])
        return Structure(rowptr, col, (self.n, self.m), order, blocks)

    @property
    def with_columns_in_order(self) -> Structure:
        """The same, with the columns of each row in order; made once."""
        return self.transposed.transposed

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
        self,
        op: str,
        operands: Sequence[Tensor],
        values: Tensor | None = None,
        reduce: str = "sum",
        feat: int | None = None,
    ) -> Tensor:
        """An operator of :func:`sparsetir.plan` on this pattern.

        Parameters
        ----------
        op : str
            The operator: "spmm", "spmv", "sddmm", or one that is a record alone.
        operands : sequence of Tensor
            Of one dtype and this structure's device; (n, feat), (n,), or (m, feat) and (n, feat);
            with a first dimension for heads, if any. Shapes are not checked.
        values : (nnz,) or (heads, nnz) Tensor, optional
            In the caller's order; by default all one.
        reduce : {"sum", "mean", "max", "min"}
            Of "spmm" and "spmv".
        feat : int, optional
            By default the last size of the first operand.

        Returns
        -------
        Tensor
            A new one.
        """
        operator = OPERATORS[op]
        first = operands[0] if operands else values
        assert first is not None
        batched = operator.takes_heads and first.dim() > (1 if operator.vectors else 2)
        heads = first.shape[0] if batched else None
        if feat is None:
            feat = 1 if operator.vectors else first.shape[-1]
        known = operator.takes_heads and self.nnz and feat and heads != 0
        if not known:
            shape = operator.shapes(self.shape, self.nnz, feat, heads)["out"]
            if operator.takes_heads or 0 in shape or not feat:
                return first.new_zeros(shape)  # nothing is added up
        ones = values is None and operator.reads_values
        if batched and ones:
            return torch.stack([self.run(op, (b,), None, reduce) for b in first.unbind()])
        run, resorted, in_blocks = self.planned(op, feat, first.dtype, reduce, heads, ones)
        at = self.with_columns_in_order if resorted else self
        quick = operator.takes_heads and run.repeats and not resorted
        if quick and self.device.type == "cpu":
            if len(self._calls) >= MAX_PLANS:
                self._calls.clear()
            self._calls[_call_key(op, operands, values, reduce)] = run, in_blocks
        if values is not None:
            blocks = self.blocks if in_blocks else None
            values = at.arranged(values) if blocks is None else blocks.arranged(values)
        elif ones and run.needs_values:
            values = self.ones(first.dtype)
        if not operator.takes_heads:
            dims = (operator.dims[name] for name in operator.names)
            each = zip(operands, dims, strict=True)
            operands = [at.arranged(x, 0) if own == "e" else x for x, own in each]
        out = call_plan(run, operands, values)
        return at.restored(out) if operator.dims["out"] == "e" else out

    def again(
        self,
        op: str,
        operands: tuple[Tensor, ...],
        values: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor | None:
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
        self, op: str, feat: int, dtype: torch.dtype, reduce: str = "sum", heads: int | None = None
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
            return plan_of_each_run(op, self.pattern, feat, **self._options(dtype, reduce, heads))

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
        key = (op, feat, dtype, reduce, heads, ones, default_threads())
        kept = self._plans.get(key)
        if kept is not None:
            return cast(Planned, kept)

        def make() -> Planned:
            options = self._options(dtype, reduce, heads)
            in_order = lambda: self.with_columns_in_order.pattern  # noqa: E731
            found = recorded(self.pattern, in_order, op, feat, ones, **options)
            plain = op == "spmm" and reduce == "sum" and heads is None and not ones
            if found is None and self.blocks is not None and plain:
                target = target_of(self.device)
                by_blocks = self.blocks.plan(self.pattern, feat, DTYPES[dtype], target)
                found = None if by_blocks is None else Planned(by_blocks, in_blocks=True)
            return found or Planned(self.plan(op, feat, dtype, reduce, heads))

        return self._kept(key, make)

    def _options(self, dtype: torch.dtype, reduce: str, heads: int | None) -> dict[str, object]:
        target = target_of(self.device)
        return {"dtype": DTYPES[dtype], "reduce": reduce, "heads": heads, "target": target}

    def _kept(self, key: Hashable, make: Callable[[], K]) -> K:
        """What was made for a key; the oldest goes first."""
        with self._lock:
            if key not in self._plans:
                self._plans[key] = make()
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
                    self._calls.clear()
            return cast(K, self._plans[key])

    def ones(self, dtype: torch.dtype) -> Tensor:
        """(nnz,) ones, made once; not to be written to.

        Parameters
        ----------
        dtype : torch.dtype
            Of the ones.

        Returns
        -------
        Tensor
        """
        return self.derived(dtype, lambda of: _ones(of.nnz, dtype, of.device))

    def __repr__(self) -> str:
        return f"<sparsetir.ops.Structure {self.shape}, {self.nnz} elements, {self.device}>"


def _call_key(op: str, operands: Sequence[Tensor], values: Tensor | None, reduce: str) -> Hashable:
    """What calls have in common that take the same way."""
    shape = None if values is None else values.shape
    first = operands[0]
    last = first if len(operands) == 1 else operands[1]
    return op, reduce, shape, first.shape, last.shape, first.dtype, torch.get_num_threads()


@lasting
def _ones(nnz: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(nnz, dtype=dtype, device=device)


# -- structures that were seen -------------------------------------------------------------------


class SeenPattern(NamedTuple):
    """A pattern that was copied when it was first seen.

    rowptr : (m + 1,) row pointers that carry the structure: who holds them, holds it
    col : (nnz,) columns, or (2, nnz) edges in the caller's order
    structure : what was made of them

    Operators find the structure by these tensors, which are private, without comparing them.
    """

    rowptr: Tensor
    col: Tensor
    structure: Structure

    @staticmethod
    def of(structure: Structure, col: Tensor) -> SeenPattern:
        """Of a structure of private tensors, and what it is of in the caller's order."""
        rowptr = private(structure.rowptr.to(col.dtype))
        hand_out(rowptr, (col, structure))
        return SeenPattern(rowptr, col, structure)

    @staticmethod
    def of_csr(who: str, rowptr: Tensor, col: Tensor, n: int) -> SeenPattern:
        """Of private compressed rows with n columns; StructureError for what are none."""
        check_csr(who, rowptr, col, n)
        return SeenPattern.of(Structure(rowptr, col, (len(rowptr) - 1, n)), col)

    @staticmethod
    def of_edges(
        who: str,
        edges: Tensor,
        m: int,
        n: int,
        name: str = "edges",
        blocks: Blocks | None = None,
        orders: Callable[[], Orders] = lambda: (None, None),
    ) -> SeenPattern:
        """Of private edges of an (m, n) matrix, as :func:`pattern_of_edges` takes them.

        blocks : that the edges are of, one after the other
        """
        check_pairs(who, edges, name)
        by_rows, by_columns = orders()
        found = compress(edges, m, n, by_rows)
        if found is None:
            check_edges(who, edges, m, n, name)  # which says what is out of range
        assert found is not None
        rowptr, col, order = found
        made = Structure(rowptr, col, (m, n), order, blocks)
        if by_columns is not None:
            made.turned = lambda: compress(edges.flip(0), n, m, by_columns)
        return SeenPattern.of(made, edges)


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
    A structure is found by the memory of the tensors, and used if they are equal to the copies that
    it was made of: whoever wrote to them, the result is that of what they hold. What is kept goes
    when the memory of one of the tensors is freed. To compare costs reading the tensors and the
    copies once: a small part of a product with many features, a good part of one with few. What
    :func:`prepare` and :func:`resolve` give is known without comparing.
    """
    return pattern_of(rowptr, col, n, who).structure


def pattern_of(rowptr: Tensor, col: Tensor, n: int, who: str) -> SeenPattern:
    """As :func:`structure_of`, with the tensors that find the structure again."""
    found = known_pattern(rowptr, col, n, count=True)
    if found is not None:
        return found
    if col.dim() == 2:
        return pattern_of_edges(col, len(rowptr) - 1, n, who)
    n = check_size(who, "n", n)
    for name, x in (("rowptr", rowptr), ("col", col)):
        check_kind(who, name, x)
    return kept.keep(("csr", n), partial(SeenPattern.of_csr, who, n=n), rowptr, col)


def pattern_of_edges(
    edges: Tensor,
    m: int,
    n: int,
    who: str = "structure_of",
    name: str = "edges",
    orders: Callable[[], Orders] = lambda: (None, None),
) -> SeenPattern:
    """As :func:`pattern_of` for (2, nnz) edges, columns first, of an (m, n) matrix.

    who, name : function and argument, as errors name them
    orders : gives those by rows and by columns that are known, which then need no sorting
    """
    found = known_edges(edges, m, n, count=True)
    if found is not None:
        return found
    m, n = check_size(who, "m", m), check_size(who, "n", n)
    check_kind(who, name, edges)
    make = partial(SeenPattern.of_edges, who, m=m, n=n, name=name, orders=orders)
    return kept.keep(("edges", m, n), make, edges)


def known_pattern(rowptr: Tensor, col: Tensor, n: int, count: bool = False) -> SeenPattern | None:
    """What :func:`pattern_of` has kept for a pattern; None where that is nothing.

    Raises RuntimeError for tensors that have no memory.
    """
    carried = handed_out(rowptr)
    if carried is not None:
        own, structure = carried
        if structure.n == n and col.is_set_to(own) and is_private(col):
            return SeenPattern(rowptr, own, structure)
    if col.dim() == 2:
        return known_edges(col, len(rowptr) - 1, n, count)
    return kept.find(("csr", n), rowptr, col, count=count)


def known_edges(edges: Tensor, m: int, n: int, count: bool = False) -> SeenPattern | None:
    """As :func:`known_pattern`, of :func:`pattern_of_edges`."""
    return kept.find(("edges", m, n), edges, count=count)


def limit_cache(entries: int | None = None, bytes: int | None = None) -> None:
    """Limits of the cache of patterns, 512 and 4 GiB at first; entries beyond are dropped.

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
