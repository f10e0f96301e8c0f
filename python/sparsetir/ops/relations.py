"""Graphs whose edges have relations, in the form of the kernels of relational operators.

The kernels' arrays are made once per graph and kept, as :mod:`sparsetir.ops.structure` keeps
patterns: rows of each relation, compressed twice (CSF), which the host sorts.

    Y[i] = sum over j of A[r, i, j] * (X[j] @ W[r])

In some relations each column j that has edges is multiplied by W once, whatever the number of its
edges; in the others, each row multiplies the sum that it gathers. The products of the former are
stored in an array, from which one sum over all these relations gathers. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparsetir.formats import ConvertedFormat
from sparsetir.ops.cache import Deriving, attached, cacheable, is_private, kept
from sparsetir.ops.compress import compress
from sparsetir.ops.registry import holds_data
from sparsetir.ops.structure import Structure
from sparsetir.ops.tensors import check_edges, check_kind, check_range, check_size
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.search.choose_rgms import RelationSizes, products_first
from sparsetir.sparse_ir.errors import StructureError

# The maximum number of rows of a piece of a relation.
ROWS_OF_PIECE = 2048


class Pieces:
    """A division of each relation's rows into pieces.

    row_ptr : (pieces + 1,) into the rows
    relation : (pieces,) relation of each piece, ascending
    one_each : whether each relation has one piece
    """

    @cacheable
    def __init__(self, row_ptr: Tensor) -> None:
        # A relation without rows has one piece without rows, whose result is zeros.
        rows = row_ptr.diff()
        counts = ((rows + ROWS_OF_PIECE - 1) // ROWS_OF_PIECE).clamp(min=1)
        relation = torch.repeat_interleave(counts)
        place = torch.arange(len(relation)) - (counts.cumsum(0) - counts)[relation]
        starts = row_ptr[relation] + place * ROWS_OF_PIECE
        self.row_ptr = torch.cat([starts, row_ptr[-1:]]).to(row_ptr.dtype)
        self.relation = relation.to(row_ptr.dtype)
        self.one_each = len(relation) == len(rows)


class RelationRows(Deriving):
    """The nonempty rows of each relation, with their elements.

    row_ptr : (relations + 1,) into the rows of relations
    rows : (nnz_rows,) row numbers
    indptr : (nnz_rows + 1,) into the elements
    indices : (E,) columns
    order : (E,) edge of each element; None for the same order
    is_whole : whether these are the rows of a whole graph, rather than a part by ProductsFirst
    """

    row_ptr: Tensor
    rows: Tensor
    indptr: Tensor
    indices: Tensor
    order: Tensor | None
    is_whole = True

    @cacheable
    def __init__(self, pattern: RelationPattern, device: torch.device) -> None:
        super().__init__()
        arrays = (torch.from_numpy(x).to(device) for x in pattern[:4])
        self.row_ptr, self.rows, self.indptr, self.indices = arrays
        kept = pattern.keeps_order
        self.order = None if kept else torch.from_numpy(pattern.order).to(device)

    def pattern(self, shape: tuple[int, int, int]) -> RelationPattern:
        """The pattern for plans; shape : relations, rows and columns."""
        arrays = self.row_ptr, self.rows, self.indptr, self.indices
        row_ptr, rows, indptr, indices = (x.cpu().numpy() for x in arrays)
        pattern = _InOrder(row_ptr, rows, indptr, indices, shape, np.empty(0, np.int64))
        pattern.device = self.rows.device
        return pattern

    @staticmethod
    def of(row_ptr: Tensor, rows: Tensor, indptr: Tensor, indices: Tensor) -> RelationRows:
        """Make rows from arrays, with edges in the order of the elements; sums come first."""
        part = object.__new__(RelationRows)
        Deriving.__init__(part)
        part.row_ptr, part.rows, part.indptr, part.indices = row_ptr, rows, indptr, indices
        part.order, part.is_whole = None, False
        return part

    @cached_property
    def pieces(self) -> Pieces:
        """The rows in pieces, on a CPU."""
        return Pieces(self.row_ptr)

    @cacheable
    def shares(self, dtype: torch.dtype) -> Tensor:
        """For each element, one over the number of elements in its row, (E,)."""
        counts = self.indptr[1:] - self.indptr[:-1]
        share = 1 / counts.to(dtype)
        if self.rows.device.type != "cpu":
            return torch.repeat_interleave(share, counts.long())
        return torch.from_numpy(np.repeat(share.numpy(), counts.numpy()))  # less memory

    @cacheable
    def arranged(self, values: Tensor) -> Tensor:
        """Permute values from the order of edges into that of elements."""
        return values if self.order is None else values.index_select(0, self.order)

    @cacheable
    def restored(self, values: Tensor) -> Tensor:
        """Permute values from the order of elements into that of edges."""
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(0, self.order.long(), values)


class _InOrder(RelationPattern):
    """A pattern whose values come in the order of the elements, as tensors on a device."""

    device: torch.device

    @cached_property
    def keeps_order(self) -> bool:
        return True

    def stored_in(self, converted: ConvertedFormat) -> _Gathered:
        return _Gathered(converted, self.device)


class _Gathered:
    """A format whose values are gathered on a device."""

    keeps_order = True  # values() itself permutes

    @cacheable
    def __init__(self, converted: ConvertedFormat, device: torch.device) -> None:
        self.padding = converted.padding
        self._elements = {
            converted.parameter("A", part): (torch.from_numpy(part.elements).to(device), part.shape)
            for part in converted.parts
        }

    def values(self, /, A: Tensor) -> dict[str, Tensor]:
        """Arrays of values by parameter, from (E,) elements; zeros where padded."""
        more = torch.nn.functional.pad(A, (0, 1))
        return {
            name: more.index_select(0, elements).view(shape)
            for name, (elements, shape) in self._elements.items()
        }


class Relations(Deriving):
    """Edges of `count` relations from n nodes to m nodes; get one with :func:`relations_of`.

    Index arrays are int32 if that suffices. Safe to use from several threads.
    """

    n: int
    m: int
    count: int
    edges: int
    device: torch.device
    by_target: RelationRows

    def __init__(
        self, by_target: RelationRows, by_source: Callable[[], RelationRows], n: int, m: int
    ) -> None:
        """Take rows of targets, and a function that makes rows of sources of the same edges."""
        super().__init__()
        self.n, self.m, self.count = n, m, len(by_target.row_ptr) - 1
        self.edges, self.device = len(by_target.indices), by_target.indices.device
        self.by_target, self._by_source = by_target, by_source

    @staticmethod
    def of(edge_index: Tensor, edge_type: Tensor, n: int, m: int, count: int) -> Relations:
        """Make relations from edges in any order; arguments as for :func:`relations_of`."""
        source, target, relation = (x.cpu().numpy() for x in (*edge_index, edge_type))
        pattern, device = (
            RelationPattern.of(relation, target, source, (count, m, n)),
            edge_type.device,
        )
        return Relations(
            RelationRows(pattern, device), lambda: RelationRows(pattern.transposed(), device), n, m
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of sources, targets and relations."""
        return self.n, self.m, self.count

    @cached_property
    def by_source(self) -> RelationRows:
        """The same edges as elements of the transposed matrices."""
        return self._by_source()

    def rows(self, transposed: bool) -> RelationRows:
        """Rows of sources if `transposed`, else of targets."""
        return self.by_source if transposed else self.by_target

    def shares(self, dtype: torch.dtype, transposed: bool) -> Tensor:
        """For each element, one over its target's edges in the same relation, (E,)."""

        def make(of: Relations) -> Tensor:
            shares = of.by_target.shares(dtype)
            return of.by_source.arranged(of.by_target.restored(shares)) if transposed else shares

        return self.derived((dtype, transposed), make)

    def is_cached(self, values: Tensor) -> bool:
        """Whether values are cached shares, which do not change."""
        return any(values is kept for kept in self.made.values())


def relations_of(
    edge_index: Tensor, edge_type: Tensor, n: int, m: int, count: int, caller: str = "relations_of"
) -> Relations:
    """The :class:`Relations` of a graph, made when first seen and kept in a bounded cache.

    edge_index : (2, E) int32 or int64 sources, then targets, in any order
    edge_type : (E,) int32 or int64 relation of each edge, from 0 to count - 1
    n, m : numbers of sources and targets
    caller : the caller's name, for errors

    They are looked up as by :func:`structure_of`. Raises TypeError, ValueError and StructureError
    for invalid edges or relations.
    """
    carried = attached(edge_type)
    if carried is not None:
        known, relations = carried
        if relations.sizes == (n, m, count) and edge_index.is_set_to(known) and is_private(known):
            return relations
    key = "relations", n, m, count
    relations_found = kept.find(key, edge_index, edge_type, count=True)
    if relations_found is None:
        n, m, count = check_relations(caller, edge_index, edge_type, n, m, count)
        make = partial(Relations.of, n=n, m=m, count=count)
        relations_found = kept.keep(key, make, edge_index, edge_type)
    return relations_found


def edge_copies(edge_index: Tensor, edge_type: Tensor) -> tuple[Tensor, Tensor]:
    """Private copies of edges and relations, the same ones as long as these are unchanged.

    Lookups by the copies need no comparison, and later writes do not change gradients.
    """
    if torch.compiler.is_compiling() or not holds_data(edge_index, edge_type):
        return edge_index, edge_type
    if is_private(edge_index) and is_private(edge_type):
        return edge_index, edge_type
    return kept.get("relational edges", lambda *copies: copies, edge_index, edge_type)


def check_relations(
    caller: str, edge_index: Tensor, edge_type: Tensor, n: int, m: int, count: int
) -> tuple[int, int, int]:
    """The numbers of sources, targets and relations; raises as :func:`relations_of`."""
    sizes = {"n": n, "m": m, "count": count}
    n, m, count = (check_size(caller, name, size) for name, size in sizes.items())
    check_edges(caller, edge_index, m, n, "edge_index")
    _check_types(caller, edge_index, edge_type, count)
    return n, m, count


def _check_types(caller: str, edge_index: Tensor, edge_type: Tensor, count: int) -> None:
    check_kind(caller, "edge_type", edge_type)
    if edge_type.shape != edge_index.shape[1:]:
        expected = f"shape {tuple(edge_index.shape[1:])}"
        raise wrong(caller, "edge_type", expected, tuple(edge_type.shape), StructureError)
    if edge_type.device != edge_index.device:
        expected = f"to be on {edge_index.device} as 'edge_index'"
        raise wrong(caller, "edge_type", expected, edge_type.device, StructureError)
    check_range(caller, "edge_type", "relation", edge_type, count)


# -- relations with products before sums ----------------------------------------------------------


def where_products_first(
    rows: RelationRows, m: int, n: int, feat_in: int, feat: int, blocks: int
) -> ProductsFirst | None:
    """The graph divided as :func:`products_first` chooses; None if all sums come first.

    m, n : rows and columns
    feat_in, feat, blocks : features of X and Y, and the number of their blocks
    """
    if not rows.is_whole:
        return None
    sizes = (feat_in, feat, blocks)

    def make(rows: RelationRows) -> ProductsFirst | None:
        counts = rows.derived(RelationSizes, lambda of: sizes_of(of, n))
        first = products_first(counts, m, n, *sizes)
        if first is None:
            return None
        return rows.derived(first.tobytes(), lambda of: ProductsFirst(of, first, m, n))

    return rows.derived(sizes, make)


@cacheable
def sizes_of(rows: RelationRows, columns: int) -> RelationSizes:
    """Numbers of edges, rows and distinct columns of each relation."""
    starts, indices = _starts(rows), rows.indices.numpy()
    last = np.empty(columns, indices.dtype)  # the last element of each column
    distinct = np.zeros(len(starts) - 1, "int64")
    for relation, (begin, end) in enumerate(pairwise(starts)):
        cols, place = indices[begin:end], np.arange(end - begin, dtype=indices.dtype)
        last[cols] = place
        distinct[relation] = np.count_nonzero(last[cols] == place)
    return RelationSizes(np.diff(starts), np.diff(rows.row_ptr.numpy()), distinct)


def _starts(rows: RelationRows) -> np.ndarray:
    """Offsets of each relation's elements, (relations + 1,)."""
    return rows.indptr.numpy()[rows.row_ptr.numpy()]


class ProductsFirst:
    """A graph in two parts: relations whose products come first, and the others.

    products : rows of products by relation, each of which has one element, the column of X
    sums : (m, products) pattern of the products that each row sums
    others : the rows of the other relations; None without any
    """

    @cacheable
    def __init__(self, rows: RelationRows, first: np.ndarray, m: int, n: int) -> None:
        """Divide rows by `first`, (relations,) whether products come first; m, n : matrix sizes."""
        starts, dtype = _starts(rows), rows.indices.dtype
        counts = (rows.indptr[1:] - rows.indptr[:-1]).long()
        of_rows = torch.from_numpy(np.repeat(first, np.diff(rows.row_ptr.numpy())))
        of_elements = torch.repeat_interleave(of_rows, counts)
        columns, numbers = _numbered(rows.indices.numpy(), starts, first, n)
        ptr = np.append(0, np.cumsum([len(x) for x in columns]))
        count = int(ptr[-1])
        one_each = torch.arange(count + 1, dtype=dtype)
        indices = torch.from_numpy(np.concatenate(columns)).to(dtype)
        ptr = torch.from_numpy(ptr).to(dtype)
        self.products = RelationRows.of(ptr, one_each[:-1], one_each, indices)
        target = torch.repeat_interleave(rows.rows[of_rows], counts[of_rows])
        compressed = compress(torch.stack([torch.from_numpy(numbers), target]), m, count)
        assert compressed is not None
        rowptr, col, order = compressed
        self.sums = Structure(rowptr, col, (m, count))
        chosen = of_elements.nonzero()[:, 0]
        self._of_sums = chosen if order is None else chosen[order]
        self._of_others = (~of_elements).nonzero()[:, 0]
        self.others = _others(rows, of_rows, of_elements) if len(self._of_others) else None
        self._kept: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def values(self, values: Tensor, cached: bool) -> tuple[Tensor, Tensor]:
        """Divide values of all elements, (E,), into those of `sums` and of `others`.

        cached : whether the same tensor comes again with the same values, so that parts are cached
        """
        if cached and self._kept is not None and self._kept[0] is values:
            return self._kept[1]
        parts = values[self._of_sums], values[self._of_others]
        if cached:
            self._kept = values, parts
        return parts


def _numbered(
    indices: np.ndarray, starts: np.ndarray, first: np.ndarray, n: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """The sorted columns of each relation, none where `first` does not hold; and (E',) the number
    of each element's column among all of them."""
    place, numbers = np.empty(n, indices.dtype), []
    columns, total = [indices[:0]] * len(first), 0
    for relation in np.flatnonzero(first):
        cols = indices[starts[relation] : starts[relation + 1]]
        columns[relation] = np.unique(cols)
        place[columns[relation]] = np.arange(total, total + len(columns[relation]))
        numbers.append(place[cols])
        total += len(columns[relation])
    return columns, np.concatenate(numbers)


def _others(rows: RelationRows, of_rows: Tensor, of_elements: Tensor) -> RelationRows:
    """The rows of relations without the masked rows and elements."""

    def before(mask: Tensor) -> Tensor:
        kept = torch.zeros(len(mask) + 1, dtype=rows.rows.dtype)
        torch.cumsum(~mask, 0, out=kept[1:])
        return kept

    ptr = before(of_rows)[rows.row_ptr.long()]
    starts = before(of_elements)[rows.indptr.long()]
    indptr = torch.cat([starts[:-1][~of_rows], starts[-1:]])
    return RelationRows.of(ptr, rows.rows[~of_rows], indptr, rows.indices[~of_elements])
