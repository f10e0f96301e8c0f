"""Sparse tensors and matrices, the users' handles of their data, which cache conversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from numpy.typing import DTypeLike

from sparsetir.data import hooks, sources
from sparsetir.data.array_methods import ArrayMethods, refuse_gradient
from sparsetir.data.notebook import html_of
from sparsetir.extras import need
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.formats.format import Format
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.formats.rule_format import RuleFormat
from sparsetir.runtime.arrays import is_array, is_torch
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.index_arrays import index_type, is_integer

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


# Rows and columns that scipy may compress, however few elements there are.
FEW_LINES = 2**20
# Values that are compared to notice that all were written to.
SAMPLES = 16


class _Structure:
    """A pattern and objects derived from it once, whatever the values."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.conversions: dict[tuple[Format, Operand], ConvertedFormat] = {}
        # The transposed structure, the positions here of its elements, and the inverse.
        self.transposed: tuple[_Structure, np.ndarray, np.ndarray] | None = None

    def transpose(self) -> tuple[_Structure, np.ndarray, np.ndarray]:
        if self.transposed is None:
            shape, positions = self.pattern.shape[::-1], self.positions
            if positions.format == "csr":
                turned = positions.tocsc()
                order = turned.data - 1
                pattern = Pattern.from_csr(turned.indptr, turned.indices, shape, check=False)
            else:
                order = np.lexsort(self.pattern.coords)
                pattern = Pattern([c[order] for c in self.pattern.coords[::-1]], shape)
            places = np.empty_like(order)
            places[order] = np.arange(len(order), dtype=order.dtype)
            other = _Structure(pattern)
            other.transposed = self, places, order
            self.transposed = other, order, places
        return self.transposed

    @cached_property
    def positions(self) -> Any:
        """An array of scipy with the positions of elements, from 1, as values."""
        pattern, count = self.pattern, self.pattern.nnz + 1
        numbers = np.arange(1, count, dtype=index_type(count))
        if pattern.order != 2 or max(pattern.shape) > FEW_LINES + 8 * count:
            out: Any = scipy.sparse.coo_array((numbers, tuple(pattern.coords)), pattern.shape)
        else:
            pattern.check_rows()
            arrays = numbers, pattern.columns, pattern.indptr
            out = scipy.sparse.csr_array(arrays, pattern.shape)
        out.has_canonical_format = True
        return out


class SparseTensor(ArrayMethods):
    """A sparse tensor of any number of axes, with cached conversions to formats.

    Parameters
    ----------
    coords : arrays
        An integer array for each axis, or an (order, nnz) array; or a COO array of scipy or a
        sparse COO tensor of torch of any order, with its own values and shape.
    values : (nnz,) array, optional
        float16, bfloat16, float32, float64, integers or bool; float32 ones by default.
    shape : tuple of int, optional
        Lengths of the axes; by default the least that hold all coordinates.

    Raises
    ------
    TypeError
        For arrays of the wrong type.
    ValueError
        For wrong shapes.
    StructureError
        A ValueError, for coordinates out of range.

    Notes
    -----
    Elements are kept in lexicographic order of their coordinates, without duplicates. Values of
    duplicate coordinates are added, as in scipy, 16-bit ones in float32; stored zeros are kept.
    Coordinates are int32, or int64 if a length or nnz does not fit.

    Arrays may be of NumPy, torch, TVM or anything with DLPack. They are never changed, and not
    copied if they are in canonical order and of the right type already: later writes to them then
    change this tensor, too, but neither its conversions nor plans. Tensors on a GPU are copied to
    the host; those that require a gradient are detached. Products of a :class:`SparseMatrix` notice
    that most of its values were written to, but not a few of them: call :meth:`clear_cache` then.
    """

    def __init__(self, coords: object, values: object = None, shape: object = None) -> None:
        caller = type(self).__name__
        if isinstance(coords, SparseTensor):
            self._share(caller, coords, values, shape)
        else:
            self._set(sources.read(caller, "coords", coords, values, shape))

    @classmethod
    def from_dense(cls, array: object) -> Self:
        """Make a tensor from the nonzeros of a dense array, including NaN.

        Parameters
        ----------
        array : array
            An array of NumPy, torch or TVM, with as many dimensions as there are axes.

        Returns
        -------
        SparseTensor
            A tensor of the same class.
        """
        return cls.of_stored(sources.from_dense(f"{cls.__name__}.from_dense", array))

    @property
    def pattern(self) -> Pattern:
        """The coordinates."""
        return self._structure.pattern

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.pattern.shape

    @property
    def nnz(self) -> int:
        """Number of stored elements, including stored zeros."""
        return self.pattern.nnz

    @property
    def values(self) -> np.ndarray:
        """The values in the order of the pattern, (nnz,)."""
        return self._values

    @property
    def dtype(self) -> np.dtype:
        """The type of the values."""
        return self._values.dtype

    @property
    def places(self) -> np.ndarray | None:
        """The position in the pattern of each original element, (given,).

        None if the original elements were in the order of the pattern, without duplicates.
        """
        return self._places

    def arrange(self, values: object) -> np.ndarray:
        """Reorder values from the order of the original data to that of the pattern.

        For example, edge weights in the order of the edges: `A.with_values(A.arrange(weights))`.
        Features of edges, which have more dimensions, are added for duplicates like values.

        Parameters
        ----------
        values : (given, ...) array
            Values of each original element.

        Returns
        -------
        (nnz, ...) ndarray
        """
        count = self.nnz if self._places is None else len(self._places)
        checked = sources.check_values(f"{type(self).__name__}.arrange", values, count, True)
        return checked if self._places is None else sources.summed(checked, self._places, self.nnz)

    def with_values(self, values: object) -> Self:
        """A tensor with the same coordinates and other values.

        Both tensors share conversions.

        Parameters
        ----------
        values : (nnz,) array
            Values in the order of the pattern.

        Returns
        -------
        SparseTensor
            A tensor of the same class.
        """
        caller = f"{type(self).__name__}.with_values"
        return self.holding(sources.check_values(caller, values, self.nnz))

    def holding(self, values: np.ndarray) -> Self:
        """Do the same as :meth:`with_values` for values that are known to fit.

        Parameters
        ----------
        values : (nnz,) ndarray
            Contiguous values in the order of the pattern.

        Returns
        -------
        SparseTensor
            A tensor of the same class.
        """
        out = type(self).__new__(type(self))
        out._structure, out._places = self._structure, self._places
        out._values, out._arguments = values, {}
        return out

    def astype(self, dtype: DTypeLike) -> Self:
        """A tensor with values of another type; shares conversions.

        Parameters
        ----------
        dtype : str or numpy.dtype
            The type, such as "float16".

        Returns
        -------
        SparseTensor
            A tensor of the same class.
        """
        return self.with_values(self._values.astype(np.dtype(dtype)))

    def operand(self) -> Operand:
        """The default operand of conversions: a buffer A of this dtype over axes I, J, K, ..."""
        return Operand.default(self.pattern.order, self.dtype.name, self.pattern.idtype)

    def to(
        self, format: Format | FormatRewriteRule, operand: Operand | None = None
    ) -> ConvertedFormat:
        """Convert the pattern to a format, once for each format and operand.

        Parameters
        ----------
        format : Format or FormatRewriteRule
            The format to convert to.
        operand : Operand, optional
            By default :meth:`operand`, or the operand of a rule.

        Returns
        -------
        ConvertedFormat
        """
        if isinstance(format, FormatRewriteRule):
            format = RuleFormat(format)
        if not isinstance(format, Format):
            expected = "a Format, such as CSR(), or a rule"
            raise wrong(f"{type(self).__name__}.to", "format", expected, f"{format!r}", TypeError)
        if operand is None:
            operand = format.operand if isinstance(format, RuleFormat) else self.operand()
        key = format, operand
        kept = self._structure.conversions
        if key not in kept:
            kept[key] = format.convert(self.pattern, key[1])
        return kept[key]

    def arguments(
        self,
        format: Format | FormatRewriteRule,
        operand: Operand | None = None,
        drop_full_masks: bool = True,
        **stored: np.ndarray | None,
    ) -> dict[str, np.ndarray]:
        """This tensor's arguments for a kernel of a decomposed program, by name.

        Parameters
        ----------
        format : Format or FormatRewriteRule
            The format that the program is decomposed by.
        operand : Operand, optional
            By default :meth:`operand`; its first buffer has the values of this tensor.
        drop_full_masks : bool
            The same as in `ConvertedFormat.decompose`.
        **stored : (nnz,) array or None
            Values of other buffers of the operand, or of the first instead of this tensor's; None
            for an output, which gets zeros.

        Returns
        -------
        dict of str to array
            The converted values of this tensor are cached and shared: do not write to them.

        Raises
        ------
        ValueError
            If values do not have the operand's dtype.
        """
        converted = self.to(format, operand)
        name = converted.operand.buffers[0][0]
        out = converted.arguments(drop_full_masks, **stored)
        if name not in stored:
            if converted not in self._arguments:
                self._arguments[converted] = converted.values(**{name: self._values})
            out |= self._arguments[converted]
        return out

    @property
    def cached(self) -> Mapping[tuple[Format, Operand], ConvertedFormat]:
        """The cached conversions by format and operand; each has its `nbytes`."""
        return MappingProxyType(self._structure.conversions)

    def clear_cache(self) -> None:
        """Drop the conversions, including those of tensors that share them, and the transpose."""
        self._structure.conversions.clear()
        self._structure.transposed = None
        self._structure.__dict__.pop("positions", None)
        self._arguments.clear()

    def to_scipy(self) -> Any:
        """A copy for scipy: a `csr_array` for a SparseMatrix, else (values, coords)."""
        return self._values.copy(), tuple(c.copy() for c in self.pattern.coords)

    def to_torch(self, layout: object = "coo") -> Tensor:
        """A copy as a coalesced sparse tensor of torch on the CPU.

        Parameters
        ----------
        layout : str or torch.layout
            "coo" or `torch.sparse_coo`; a SparseMatrix supports others.

        Returns
        -------
        Tensor
        """
        import torch

        if (name := _layout(layout)) != "coo":
            raise wrong(f"{type(self).__name__}.to_torch", "layout", "'coo'", f"{name!r}")
        indices = torch.from_numpy(np.stack([c.astype(np.int64) for c in self.pattern.coords]))
        return torch.sparse_coo_tensor(
            indices, _tensor(self._values), self.shape, is_coalesced=True, check_invariants=False
        )

    def to_pydata(self) -> Any:
        """A copy as a `sparse.COO` of PyData's library `sparse`, which has no 16-bit values."""
        import sparse  # pyright: ignore[reportMissingImports]

        coords = np.stack(self.pattern.coords)
        return sparse.COO(coords, self._values, self.shape, has_duplicates=False, sorted=True)

    def plot(self, format: Format | None = None, ax: Any = None, **options: Any) -> Any:
        """Draw the pattern, or its storage in a format.

        Parameters
        ----------
        format : Format, optional
            By default the pattern alone.
        ax : matplotlib.axes.Axes, optional
            By default a new figure.
        **options
            Options of `sparsetir.plot.plot_pattern`, or `plot_format` if there is a format, such as
            `name` for the title.

        Returns
        -------
        matplotlib.figure.Figure or matplotlib.axes.Axes
            The new figure, or `ax` if given.
        """
        patterns = need(f"{type(self).__name__}.plot", "sparsetir.plotting.patterns")
        if format is None:
            return patterns.plot_pattern(self.pattern, ax=ax, **options)
        return patterns.plot_format(self.to(format), ax=ax, **options)

    def __getstate__(self) -> sources.Stored:
        """Coordinates and values; conversions are not pickled."""
        return sources.Stored(self.pattern, self._values, self._places)

    def __setstate__(self, stored: sources.Stored) -> None:
        self._set(stored)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: shape {self.shape}, {self.nnz} elements, {self.dtype}>"

    def _repr_html_(self) -> str:
        return html_of(self)

    @classmethod
    def of_stored(cls, stored: sources.Stored) -> Self:
        """Make a tensor from a pattern and values that are known to fit, without copies.

        Parameters
        ----------
        stored : sparsetir.data.sources.Stored
            The pattern and values.

        Returns
        -------
        SparseTensor
            A tensor of the same class.
        """
        out = cls.__new__(cls)
        out._set(stored)
        return out

    @classmethod
    def _adopted(cls, caller: str, data: Any) -> Self:
        refuse_gradient(caller, data)
        return data if isinstance(data, cls) else cls(data)

    def _taken(self, kept: np.ndarray) -> Self:
        """A tensor of the elements at increasing positions."""
        return self.of_stored(sources.Stored(self.pattern.take(kept), self._values[kept]))

    def _as_scipy(self, values: np.ndarray | None = None) -> Any:
        """An array of scipy with values, or positions from 1, that shares the coordinates."""
        out = copy(self._structure.positions)
        if values is not None:
            out.data = values
        return out

    def _derived(self, moved: Any, values_of: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Make a tensor of an array of scipy, with values computed from its data.

        It has this class, or is a SparseTensor if the number of axes differs.
        """
        cls = type(self) if len(moved.shape) == self.ndim else SparseTensor
        if moved.ndim == 2 and moved.format != "coo":
            moved = moved.tocsr()
            moved.sort_indices()
            indices = moved.indices.astype(index_type(max(*moved.shape, moved.nnz)), copy=False)
            pattern = Pattern.from_csr(moved.indptr, indices, moved.shape, check=False)
            return cls.of_stored(sources.Stored(pattern, values_of(moved.data)))
        moved = moved.tocoo()
        stored = sources.ordered([*moved.coords], values_of(moved.data), moved.shape)
        return cls.of_stored(sources.Stored(stored.pattern, stored.values))

    def _set(self, stored: sources.Stored) -> None:
        self._check_order(stored.pattern)
        self._structure = _Structure(stored.pattern)
        self._values, self._places = stored.values, stored.places
        self._arguments: dict[ConvertedFormat, dict[str, np.ndarray]] = {}

    def _share(self, caller: str, other: SparseTensor, values: object, shape: object) -> None:
        """Share the data and conversions of another tensor."""
        self._check_order(other.pattern)
        if values is not None:
            raise ValueError(
                f"{caller}: argument 'values': expected none for a {type(other).__name__}; "
                "with_values replaces them"
            )
        if (
            shape is not None
            and sources.check_shape(caller, shape, len(other.shape)) != other.shape
        ):
            raise wrong(caller, "shape", f"{other.shape}", shape)
        self._structure, self._places = other._structure, other._places
        self._values, self._arguments = other._values, other._arguments

    def _check_order(self, pattern: Pattern) -> None:
        """Raise for patterns that this class does not support."""


class SparseMatrix(SparseTensor):
    """A sparse matrix with cached conversions to formats.

    Parameters
    ----------
    data : matrix
        One of

        - a matrix or array of scipy in any format; a sparse tensor of torch (COO, CSR, CSC, BSR,
          BSC) without batch and dense dimensions
        - a pair (rows, columns) of integer arrays
        - an edge_index, (2, E) integers, or a pair (edge_index, size): see :meth:`from_edge_index`
        - a graph of PyG (`Data`, or one relation of `HeteroData`) or DGL (one relation), a
          `torch_sparse.SparseTensor`, a `dgl.sparse.SparseMatrix`
        - the name of a file or a graph, as for :func:`sparsetir.graphs.load_graph`

    shape : (int, int), optional
        By default that of `data`; square for the largest node of an edge_index, the least that
        holds all coordinates of a pair.
    values : array, optional
        As in :class:`SparseTensor`, for a pair and edges only.

    Notes
    -----
    The notes of :class:`SparseTensor` on order, copies and errors hold here, too. Canonical CSR
    with int32 indices is shared, not copied; scipy's and torch's flags for canonical data are not
    trusted. All elements of blocks (BSR, BSC) and of diagonals (DIA) within the shape are stored.
    """

    def __init__(self, data: object, shape: object = None, values: object = None) -> None:
        if isinstance(data, SparseTensor):
            self._share("SparseMatrix", data, values, shape)
            return
        self._set(sources.read_matrix("SparseMatrix", "data", data, values, shape))

    @classmethod
    def adopt(cls, caller: str, name: str, data: object) -> SparseMatrix:
        """Convert any accepted input; a SparseMatrix is returned unchanged.

        Parameters
        ----------
        caller, name : str
            Names of the function and argument, for errors.
        data : matrix
            The same as for the class.

        Returns
        -------
        SparseMatrix
        """
        if isinstance(data, SparseMatrix):
            return data
        known: Any = data if isinstance(data, SparseTensor) or sources.is_sparse(data) else None
        if known is not None and len(known.shape) != 2:
            raise wrong(caller, name, "2 axes", f"shape {tuple(known.shape)}; see SparseTensor")
        if isinstance(data, SparseTensor):
            return cls(data)
        return cls.of_stored(sources.read_matrix(caller, name, data))

    @classmethod
    def from_csr(
        cls, indptr: object, indices: object, values: object = None, shape: object = None
    ) -> Self:
        """Make a matrix from compressed sparse rows.

        Parameters
        ----------
        indptr : (m + 1,) integer array
            Row pointers.
        indices : (nnz,) integer array
            Columns; those of a row in any order.
        values : (nnz,) array, optional
            float32 ones by default.
        shape : (int, int), optional
            By default `len(indptr) - 1` rows, and the least number of columns.

        Returns
        -------
        SparseMatrix
        """
        caller = f"{cls.__name__}.from_csr"
        return cls.of_stored(sources.from_compressed(caller, indptr, indices, values, shape))

    @classmethod
    def from_edge_index(
        cls, edge_index: object, values: object = None, shape: object = None, rows: str = "target"
    ) -> Self:
        """Make a matrix from the edges of a graph.

        Parameters
        ----------
        edge_index : (2, E) integer array
            Sources first, then targets (as in PyG).
        values : (E,) array, optional
            Edge weights; float32 ones by default; those of equal edges are added.
        shape : int or (int, int), optional
            Shape of the matrix, or the number of nodes; by default square, for the largest node.
        rows : {"target", "source"}
            "target": row = target and column = source, so that A @ X aggregates the incoming edges
            of each node, as in graph neural networks; "source": the transposed matrix.

        Returns
        -------
        SparseMatrix
        """
        caller = f"{cls.__name__}.from_edge_index"
        if rows not in ("target", "source"):
            raise wrong(caller, "rows", "'target' or 'source'", repr(rows))
        if is_integer(values):
            expected = f"(E,) weights, or None: the number of nodes is shape={values}"
            raise wrong(caller, "values", expected, repr(values), TypeError)
        shape = (shape, shape) if is_integer(shape) else shape
        return cls.of_stored(
            sources.read_edges(caller, "edge_index", edge_index, values, shape, rows == "source")
        )

    @classmethod
    def from_file(cls, path: object) -> Self:
        """Read a Matrix Market file of coordinates, or a file of `scipy.sparse.save_npz`.

        Parameters
        ----------
        path : str or Path
            A file that ends in .mtx, .mtx.gz or .npz.

        Returns
        -------
        SparseMatrix
            Symmetric files are expanded. A file without values gives float32 ones; real numbers are
            float64 and integers int64, which :meth:`astype` changes.
        """
        return cls.of_stored(sources.read_file(f"{cls.__name__}.from_file", path))

    @property
    def T(self) -> Self:
        """The transposed matrix, made once, with its own conversions. `A.T.T` is `A`."""
        self.drop_if_written()
        kept = self._structure.transposed
        structure, order, places = self._structure.transpose()
        if kept is None or self._transposed is None:
            out = type(self).__new__(type(self))
            out._structure, out._arguments = structure, {}
            out._values = self._values[order]
            out._places = places if self._places is None else places[self._places]
            out._transposed, self._transposed = self, out
        return self._transposed

    def to_scipy(self) -> scipy.sparse.csr_array:
        """A copy as a `csr_array`; scipy itself does not compute with 16-bit values."""
        arrays = self._values, self.pattern.columns, self.pattern.indptr
        return scipy.sparse.csr_array(arrays, shape=self.shape, copy=True)

    def tocsr(self) -> scipy.sparse.csr_array:
        """Alias of :meth:`to_scipy`, by scipy's name."""
        return self.to_scipy()

    def __matmul__(self, x: object) -> Any:
        """A @ x, for a vector (n,) or matrix (n, feat) of NumPy or torch; returns the same kind.

        The result has a tensor's type; for NumPy the type that holds those of x and the values,
        among float16, bfloat16, float32 and float64. Gradients of tensors propagate. The plan for a
        number of features is kept with the matrix; the first product with an array of NumPy makes
        none, and the last bits of sums may differ from later ones.

        For a sparse x, including scipy's and torch's, the result of :meth:`matmul`.
        """
        if isinstance(x, SparseMatrix) or sources.is_sparse(x):
            return self.matmul(x)
        if isinstance(x, SparseTensor):
            return super().__matmul__(x)
        return hooks.product(self, x, self._products)

    def __rmatmul__(self, x: object) -> Any:
        """The product x @ A, for a vector (m,) or matrix (batch, m); else as :meth:`__matmul__`."""
        caller = "SparseMatrix.__rmatmul__"
        if sources.is_sparse(x):
            return self._adopted(caller, x).matmul(self)
        if not is_array(x):
            return NotImplemented
        dense: Any = x if is_torch(x) else np.asarray(x)
        if dense.ndim not in (1, 2) or dense.shape[-1] != self.shape[0]:
            m = self.shape[0]
            raise wrong(caller, "x", f"shape ({m},) or (batch, {m})", f"{tuple(dense.shape)}")
        return self.T @ dense if dense.ndim == 1 else (self.T @ dense.T).T

    def matvec(self, x: object) -> Any:
        """A @ x, as SciPy names it, whose `aslinearoperator`, `cg` and `eigsh` take the matrix.

        Parameters
        ----------
        x : array
            A vector, or a matrix with a column for each product.

        Returns
        -------
        array
        """
        return self @ x

    def rmatvec(self, x: object) -> Any:
        """A.T @ x, as SciPy names it.

        Parameters
        ----------
        x : array
            A vector, or a matrix with a column for each product.

        Returns
        -------
        array
        """
        return self.T @ x

    def matmul(self, other: object, *, semiring: str = "plus_times", mask: object = None) -> Self:
        """The product with a sparse matrix, which is sparse.

        Parameters
        ----------
        other : (n, p) sparse matrix
            A matrix in any form that the class accepts.
        semiring : str
            "plus_times"; "min_plus", whose sums are minima of sums, such as shortest paths of two
            edges; "max_plus", "max_times", "or_and".
        mask : (m, p) sparse matrix, optional
            The pattern of the result: only its elements are computed. Where the product stores
            nothing they are the semiring's zero: 0, or an infinity (for integers the largest or
            least number) if sums are minima or maxima. With an earlier result as the mask only the
            numeric phase runs.

        Returns
        -------
        (m, p) SparseMatrix
            Stores all sums that have terms, even if they are zero. Its type holds those of both;
            sums of 16-bit values are in float32; those of bool are "or_and".

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.

        Notes
        -----
        Gustavson's algorithm: each row in a dense workspace, with its columns in a bitmap of one to
        three levels, on all threads, and in one pass. See :func:`sparsetir.build_assembled`.
        """
        return self._with_others("matmul", other, semiring=semiring, mask=mask)

    def inner(self, other: object, *, semiring: str = "plus_times", mask: object = None) -> Self:
        """The inner products of this matrix's rows with those of another, A @ B.T.

        Parameters
        ----------
        other : (p, n) sparse matrix
            A matrix in any form that the class accepts.
        semiring, mask
            The same as for :meth:`matmul`; a mask, (m, p), selects pairs of rows.

        Returns
        -------
        (m, p) SparseMatrix
            The same as from :meth:`matmul`.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.

        Notes
        -----
        For few pairs the two rows of each are merged; if their lengths differ much, the elements of
        short rows are searched in long ones.
        """
        return self._with_others("inner", other, semiring=semiring, mask=mask)

    def vecdot(self, other: object) -> np.ndarray:
        """The inner product of each row with the same row of another sparse matrix.

        Parameters
        ----------
        other : (m, n) sparse matrix
            A matrix in any form that the class accepts.

        Returns
        -------
        (m,) ndarray
            `A.multiply(B)` summed by rows.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.
        """
        return self._with_others("vecdot", other).values

    def kron(self, other: object) -> Self:
        """The Kronecker product: copies of another sparse matrix, each times an element of this.

        Parameters
        ----------
        other : (p, q) sparse matrix
            A matrix in any form that the class accepts.

        Returns
        -------
        (m * p, n * q) SparseMatrix

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.
        """
        return self._with_others("kron", other)

    def add(self, *others: object) -> Self:
        """The sum with up to seven sparse matrices of this shape, in one pass.

        Parameters
        ----------
        *others : (m, n) sparse matrices
            Matrices in any form that the class accepts.

        Returns
        -------
        (m, n) SparseMatrix
            Stores the union of the patterns, even where the sum is zero.
        """
        return self._with_others("add", *others)

    def multiply(self, *others: object) -> Self:
        """Elementwise product, stored where all matrices are; see :meth:`add`.

        Parameters
        ----------
        *others : (m, n) sparse matrices
            Matrices in any form that the class accepts.

        Returns
        -------
        (m, n) SparseMatrix
        """
        return self._with_others("multiply", *others)

    def maximum(self, *others: object) -> Self:
        """Elementwise maximum, with zeros where nothing is stored; see :meth:`add`.

        Parameters
        ----------
        *others : (m, n) sparse matrices
            Matrices in any form that the class accepts.

        Returns
        -------
        (m, n) SparseMatrix
            Stores the union of the patterns.
        """
        return self._with_others("maximum", *others)

    def minimum(self, *others: object) -> Self:
        """Elementwise minimum, with zeros where nothing is stored; see :meth:`add`.

        Parameters
        ----------
        *others : (m, n) sparse matrices
            Matrices in any form that the class accepts.

        Returns
        -------
        (m, n) SparseMatrix
            Stores the union of the patterns.
        """
        return self._with_others("minimum", *others)

    def __add__(self, other: object) -> Self:
        """A + B; see :meth:`add`."""
        return self._combined("add", other)

    def __sub__(self, other: object) -> Self:
        """A - B."""
        return self._combined("subtract", other)

    def __mul__(self, other: object) -> Self:
        """Elementwise A * B, see :meth:`multiply`; other factors as for any tensor."""
        if isinstance(other, SparseTensor):
            if other._structure.pattern.shape != self._structure.pattern.shape:
                return super().__mul__(other)
        by_element = self._combined("multiply", other)
        return super().__mul__(other) if by_element is NotImplemented else by_element

    def __radd__(self, other: object) -> Self:
        """B + A, for B of scipy or torch."""
        refuse_gradient("SparseMatrix.__radd__", other)
        return self + other

    def __rsub__(self, other: object) -> Any:
        """B - A, for B of scipy or torch."""
        if not sources.is_sparse(other):
            return NotImplemented
        return self._adopted("SparseMatrix.__rsub__", other) - self

    def _with_others(self, op: str, *others: object, **options: object) -> Any:
        caller = f"SparseMatrix.{op}"
        known: list[SparseMatrix] = []
        for x in others:
            if not isinstance(x, SparseMatrix):
                refuse_gradient(caller, x)
                x = SparseMatrix.adopt(caller, "other", x)
            known.append(x)
        return self._combined(op, *known, **options)

    def _combined(self, op: str, *others: object, **options: object) -> Any:
        for x in others:
            if not isinstance(x, SparseTensor) and sources.is_sparse(x):
                refuse_gradient(f"SparseMatrix.{op}", x)
        result = hooks.sparse_operation(op, self, *others, **options)
        return result if result is NotImplemented else self.of_stored(result)

    def diagonal(self, k: int = 0) -> np.ndarray:
        """A dense copy of a diagonal.

        Parameters
        ----------
        k : int
            Its distance to the right of the main one.

        Returns
        -------
        ndarray
        """
        return self._moved("diagonal", lambda positions: positions.diagonal(k))

    def trace(self, offset: int = 0) -> Any:
        """The sum of a diagonal.

        Parameters
        ----------
        offset : int
            The same as `k` of :meth:`diagonal`.

        Returns
        -------
        number
            The sum, typed as in :meth:`sum`.
        """
        return self._narrowed(self._wide().trace(offset))

    def to_torch(self, layout: object = "csr", blocksize: tuple[int, int] | None = None) -> Tensor:
        """A copy as a sparse tensor of torch on the CPU.

        Parameters
        ----------
        layout : str or torch.layout
            "csr", "csc", "coo", "bsr", "bsc", or torch's constants, such as `torch.sparse_csr`.
        blocksize : (int, int), optional
            The block size of "bsr" and "bsc", which divides the shape.

        Returns
        -------
        Tensor
        """
        import torch

        name = _layout(layout)
        if name not in ("coo", "csr", "csc", "bsr", "bsc"):
            expected = "'csr', 'csc', 'coo', 'bsr' or 'bsc'"
            raise wrong("SparseMatrix.to_torch", "layout", expected, f"{name!r}")
        if (blocksize is None) == (name in ("bsr", "bsc")):
            expected = "two integers for 'bsr' and 'bsc' and None for others"
            raise wrong("SparseMatrix.to_torch", "blocksize", expected, f"{blocksize} for '{name}'")
        if name == "coo":
            return super().to_torch("coo")
        # Torch itself converts CSR to CSC for fewer types of values.
        by = self.T if name == "csc" else self
        make = torch.sparse_csc_tensor if name == "csc" else torch.sparse_csr_tensor
        indptr = _tensor(by.pattern.indptr.astype(by.pattern.idtype))
        arrays = indptr, _tensor(by.pattern.columns), _tensor(by.values)
        out = make(*arrays, self.shape, check_invariants=False)
        if blocksize is None:
            return out
        return out.to_sparse(layout=getattr(torch, f"sparse_{name}"), blocksize=blocksize)

    # Cached by operators on sparse matrices; see `sparsetir.planning.sparse_results.csr`.
    as_operand: Any = None
    _transposed: Self | None = None

    @cached_property
    def _sampled(self) -> tuple[np.ndarray, bytes]:
        """Some of the values, and the bytes that they had when plans were made."""
        sample = self._values[:: self._values.size // SAMPLES + 1]
        return sample, sample.tobytes()

    def drop_if_written(self) -> None:
        """Drop copies of the values, those of plans and of the transposed matrix, if the values
        were written to since, as a sample of them says: to compare all takes too long."""
        sample, before = self._sampled
        if sample.tobytes() != before:
            del self._sampled
            self._products.clear()
            if self._transposed is not None:
                self._transposed._transposed = self._transposed = None

    @cached_property
    def _products(self) -> dict[object, object]:
        """The plans of :meth:`__matmul__`."""
        return {}

    def clear_cache(self) -> None:
        """Drop the conversions and plans, and the transposed matrix."""
        super().clear_cache()
        self._products.clear()

    def _check_order(self, pattern: Pattern) -> None:
        if pattern.order != 2:
            raise ValueError(
                f"SparseMatrix: expected 2 axes, got shape {pattern.shape}; see SparseTensor"
            )


def _layout(layout: object) -> str:
    """The name of a layout: "csr" for both "csr" and `torch.sparse_csr`."""
    return str(layout).removeprefix("torch.").removeprefix("sparse_")


def _tensor(array: np.ndarray) -> Tensor:
    """A copy as a tensor of torch."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
