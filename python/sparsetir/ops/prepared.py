"""Sparse matrices prepared once for many operator calls."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor

from sparsetir.ops.cache import attach, cacheable, private
from sparsetir.ops.operands import Prepared, resolve, size_of
from sparsetir.ops.relations import Relations, check_relations
from sparsetir.ops.tensors import check_strided
from sparsetir.runtime.refusals import wrong


class PreparedRelations:
    """Edges with relations, prepared for `ops.rgms` and `nn.RGCNConv`.

    :func:`prepare` makes them.

    Parameters
    ----------
    edge_index : (2, E) Tensor
        Sources, then targets; copied.
    edge_type : (E,) Tensor
        Relation of each edge; copied.
    n : int
        Number of sources.
    m : int
        Number of targets.
    count : int
        Number of relations.
    """

    n: int
    m: int
    count: int

    def __init__(self, edge_index: Tensor, edge_type: Tensor, n: int, m: int, count: int) -> None:
        graph = edge_index, edge_type, n, m, count
        self.n, self.m, self.count = check_relations("prepare", *graph)
        self.edge_index: Tensor = private(edge_index)
        self.edge_type: Tensor = private(edge_type)
        self.structure: Relations = Relations.of(
            self.edge_index, self.edge_type, self.n, self.m, self.count
        )
        attach(self.edge_type, (self.edge_index, self.structure))

    def edges_for(self, caller: str, n: int, m: int, count: int) -> tuple[Tensor, Tensor]:
        """Return edges and their relations if they were prepared for these sizes.

        Parameters
        ----------
        caller : str
            The caller's name, for errors.
        n : int
            Number of sources.
        m : int
            Number of targets.
        count : int
            Number of relations.

        Returns
        -------
        (Tensor, Tensor)
            (2, E) and (E,).

        Raises
        ------
        ValueError
            If they were prepared for other sizes.
        """
        if (n, m, count) != (self.n, self.m, self.count):
            expected = f"one prepared for {n} sources, {m} targets and {count} relations"
            raise wrong(caller, "edge_index", expected, f"{self.n}, {self.m} and {self.count}")
        return self.edge_index, self.edge_type

    def __deepcopy__(self, memo: object) -> PreparedRelations:
        return self  # nothing writes to it

    def __reduce__(self) -> tuple[type[PreparedRelations], tuple[Tensor, Tensor, int, int, int]]:
        graph = self.edge_index, self.edge_type, self.n, self.m, self.count
        return PreparedRelations, graph

    def __repr__(self) -> str:
        return (
            f"<sparsetir.ops.PreparedRelations {self.count} relations, ({self.m}, {self.n}), "
            f"{len(self.edge_type)} edges, {self.edge_type.device}>"
        )


@overload
def prepare(A: object, size: object = None, values: Tensor | None = None) -> Prepared: ...
@overload
def prepare(
    A: Tensor, size: object = None, *, edge_type: Tensor, num_relations: int | None = None
) -> PreparedRelations: ...
def prepare(
    A: object,
    size: object = None,
    values: Tensor | None = None,
    *,
    edge_type: Tensor | None = None,
    num_relations: int | None = None,
) -> Prepared | PreparedRelations:
    """Prepare a sparse matrix for many calls: keep the data that operators derive from its pattern.

    The pattern is copied: later writes to A change nothing here, so that no call compares it with a
    copy, as calls with A itself do. Values are not copied: each call reads them anew. The data
    lives as long as the handle, whatever the limits of the caches.

    Parameters
    ----------
    A : sparse (m, n) matrix
        Any kind that :func:`resolve` accepts.
    size : int or (int, int), optional
        Size for edges: (sources, targets) or one number for both; by default from the largest node.
    values : (nnz,) or (nnz, heads) Tensor, optional
        Values of the elements in A's order, instead of its own.
    edge_type : (E,) Tensor, optional
        Relation of each of A's edges, a (2, E) tensor.
    num_relations : int, optional
        Number of relations in edge_type; by default the largest one plus 1.

    Returns
    -------
    Prepared or PreparedRelations
        The latter if `edge_type` is passed, for :func:`rgms` and `nn.RGCNConv`.

    Raises
    ------
    TypeError, ValueError
        As for :func:`resolve`.

    Examples
    --------
    >>> g = ops.prepare(edge_index, num_nodes)
    >>> for features in batches:
    ...     ops.spmm(g, features)
    """
    if edge_type is not None:
        return _with_relations(A, size, values, edge_type, num_relations)
    if num_relations is not None:
        raise wrong(
            "prepare", "num_relations", "None without 'edge_type'", f"{num_relations!r}", TypeError
        )
    if isinstance(A, Prepared):
        return A if values is None else A.with_values(values)
    if size is not None:
        if not (isinstance(A, Tensor) or hasattr(A, "__dlpack__")):
            raise TypeError(
                f"prepare: argument 'size': expected None for {type(A).__name__}, which has one"
            )
        size_of("prepare", "size", size)
        A = (A, size)
    return Prepared.of(resolve(A, values, None, "prepare"))


@cacheable
def _with_relations(
    edges: Any, size: Any, values: Tensor | None, edge_type: Tensor, count: int | None
) -> PreparedRelations:
    for name, x in (("A", edges), ("edge_type", edge_type)):
        check_strided("prepare", name, x, "a tensor of integers with 'edge_type'")
    if values is not None:
        raise TypeError("prepare: argument 'values': expected None with 'edge_type'")
    if size is None:
        size = int(edges.max()) + 1 if edges.numel() else 0
    m, n = size_of("prepare", "size", size)
    if count is None:
        count = int(edge_type.max()) + 1 if edge_type.numel() else 0
    return PreparedRelations(edges, edge_type, n, m, count)
