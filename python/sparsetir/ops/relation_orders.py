"""Relations whose rows of X are multiplied before they are summed up, and what that takes.

    Y[i] = sum over j of A[r, i, j] * (X[j] @ W[r])

Of these relations each column j that has edges is multiplied once, whatever the number of its
edges; of the others, what a row gathers. Products are in an array, of which a sum over all these
relations gathers. (SparseTIR, section 4.4.)
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparsetir.ops.cache import lasting
from sparsetir.ops.compress import compress
from sparsetir.ops.relations import RelationRows
from sparsetir.ops.structure import Structure
from sparsetir.schedules.search.choose_rgms import RelationSizes, products_first


def where_products_first(
    rows: RelationRows, m: int, n: int, feat_in: int, feat: int, blocks: int
) -> ProductsFirst | None:
    """The graph in parts as :func:`products_first` chooses; None where sums come first in all.

    m, n : rows and columns
    feat_in, feat, blocks : features of X and Y, and of how many blocks they are
    """
    if not rows.is_whole:
        return None
    sizes = (feat_in, feat, blocks)

    def made(rows: RelationRows) -> ProductsFirst | None:
        counts = rows.derived(RelationSizes, lambda of: sizes_of(of, n))
        first = products_first(counts, m, n, *sizes)
        if first is None:
            return None
        return rows.derived(first.tobytes(), lambda of: ProductsFirst(of, first, m, n))

    return rows.derived(sizes, made)


@lasting
def sizes_of(rows: RelationRows, columns: int) -> RelationSizes:
    """Numbers of edges, rows and different columns of each relation.

    columns : that there are
    """
    starts, indices = _starts(rows), rows.indices.numpy()
    last = np.empty(columns, indices.dtype)  # the last element of each column
    found = np.zeros(len(starts) - 1, "int64")
    for relation, (begin, end) in enumerate(pairwise(starts)):
        mine, place = indices[begin:end], np.arange(end - begin, dtype=indices.dtype)
        last[mine] = place
        found[relation] = np.count_nonzero(last[mine] == place)
    return RelationSizes(np.diff(starts), np.diff(rows.row_ptr.numpy()), found)


def _starts(rows: RelationRows) -> np.ndarray:
    """(relations + 1,) where the elements of each begin."""
    return rows.indptr.numpy()[rows.row_ptr.numpy()]


class ProductsFirst:
    """A graph in two parts: relations whose products come first, and the others.

    products : rows of products by relation, each of which has one element, the column of X
    sums : (m, products) of which products each row is the sum
    others : the rows of the other relations; None without any
    """

    @lasting
    def __init__(self, rows: RelationRows, first: np.ndarray, m: int, n: int) -> None:
        """Of `first`, (relations,) whether products come first, and numbers of rows and columns."""
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
        found = compress(torch.stack([torch.from_numpy(numbers), target]), m, count)
        assert found is not None
        rowptr, col, order = found
        self.sums = Structure(rowptr, col, (m, count))
        chosen = of_elements.nonzero()[:, 0]
        self._of_sums = chosen if order is None else chosen[order]
        self._of_others = (~of_elements).nonzero()[:, 0]
        self.others = _others(rows, of_rows, of_elements) if len(self._of_others) else None
        self._kept: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def values(self, values: Tensor, lasting: bool) -> tuple[Tensor, Tensor]:
        """Those of the elements of `sums` and of `others`, of those of all (E,).

        lasting : the same numbers come again, as the same tensor, so that parts are kept
        """
        if lasting and self._kept is not None and self._kept[0] is values:
            return self._kept[1]
        parts = values[self._of_sums], values[self._of_others]
        if lasting:
            self._kept = values, parts
        return parts


def _numbered(
    indices: np.ndarray, starts: np.ndarray, first: np.ndarray, n: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """The columns of each relation, in order, none where `first` does not hold; and (E',) which of
    all these the column of each element is."""
    place, numbers = np.empty(n, indices.dtype), []
    columns, total = [indices[:0]] * len(first), 0
    for relation in np.flatnonzero(first):
        mine = indices[starts[relation] : starts[relation + 1]]
        columns[relation] = np.unique(mine)
        place[columns[relation]] = np.arange(total, total + len(columns[relation]))
        numbers.append(place[mine])
        total += len(columns[relation])
    return columns, np.concatenate(numbers)


def _others(rows: RelationRows, of_rows: Tensor, of_elements: Tensor) -> RelationRows:
    """The rows of relations, less those and the elements given."""

    def before(mask: Tensor) -> Tensor:
        kept = torch.zeros(len(mask) + 1, dtype=rows.rows.dtype)
        torch.cumsum(~mask, 0, out=kept[1:])
        return kept

    ptr = before(of_rows)[rows.row_ptr.long()]
    starts = before(of_elements)[rows.indptr.long()]
    indptr = torch.cat([starts[:-1][~of_rows], starts[-1:]])
    return RelationRows.of(ptr, rows.rows[~of_rows], indptr, rows.indices[~of_elements])
