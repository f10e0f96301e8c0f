"""Array methods of sparse tensors, with scipy's names; none changes a tensor in place.

Functions apply to values. To select, move and join elements, scipy processes their positions:
values of any type follow, and stored zeros are kept. scipy also reduces and compares.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import scipy.sparse
from numpy.lib.array_utils import normalize_axis_tuple

from sparsetir.data import sources
from sparsetir.runtime.arrays import is_array, is_torch, to_host, type_name
from sparsetir.runtime.refusals import wrong
from sparsetir.sparse_ir.index_arrays import starts

# Methods for NumPy's functions of two arrays, if the first is a tensor, and if only the second is.
OPERATORS = {
    "add": ("__add__", "__radd__"), "subtract": ("__sub__", "__rsub__"),
    "multiply": ("__mul__", "__rmul__"), "divide": ("__truediv__", "__rtruediv__"),
    "power": ("__pow__", "__rpow__"), "matmul": ("__matmul__", "__rmatmul__"),
    "equal": ("__eq__", "__eq__"), "not_equal": ("__ne__", "__ne__"),
    "less": ("__lt__", "__gt__"), "greater": ("__gt__", "__lt__"),
    "less_equal": ("__le__", "__ge__"), "greater_equal": ("__ge__", "__le__"),
    "maximum": ("maximum", "maximum"), "minimum": ("minimum", "minimum"),
}  # fmt: skip

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparsetir.formats.pattern import Pattern


def _function(name: str) -> Callable[[Any], Any]:
    """Make a method that applies a zero-preserving function of NumPy."""
    function = getattr(np, name)

    def method(self: ArrayMethods) -> Any:
        return self.with_values(function(self.values))

    method.__name__, method.__doc__ = name, f"`numpy.{name}` of the values; shares conversions."
    return method


def _reduction(name: str, result: str) -> Callable[..., Any]:
    """Make a method that reduces axes like scipy's of this name."""

    def method(
        self: ArrayMethods, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, *,
        dtype: Any = None, out: None = None,
    ) -> Any:  # fmt: skip
        if out is not None:
            caller = f"{type(self).__name__}.{name}"
            raise wrong(caller, "out", "None, as a tensor is not changed in place", type_name(out))
        return self._reduced(name, axis, keepdims, dtype)

    method.__name__ = name
    method.__doc__ = f"""The {name} over axes, with zeros where nothing is stored.

        Parameters
        ----------
        axis : int or tuple of int, optional
            The axes to reduce; by default all.
        keepdims : bool
            Whether to keep reduced axes, with length 1.
        dtype : type, optional
            The result's type.
        out : None
            Accepted for NumPy, whose functions of this name call the method.

        Returns
        -------
        {result} or number
            Typed as in scipy; sums of at most 32 bits are computed in float64 and rounded once.

        Raises
        ------
        ValueError
            For an invalid argument; for an empty tensor, except in sums.
        """
    return method


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    """Make a method that compares with a number or a sparse tensor, if the result is sparse."""

    def method(self: ArrayMethods, other: object) -> Any:
        return self._compared(getattr(operator, name), other)

    method.__name__, method.__doc__ = f"__{name}__", f"Bools, by :func:`operator.{name}`."
    return method


def _stacking(name: str, how: str) -> Any:
    """Make a class method that joins tensors like scipy's function of this name."""

    def method(cls: type[ArrayMethods], tensors: Iterable[Any]) -> Any:
        return cls._stacked(name, tensors)

    method.__name__ = name
    method.__doc__ = f"""Put matrices {how}.

        Parameters
        ----------
        tensors : iterable of matrices
            At least one, in any form that the class accepts.

        Returns
        -------
        SparseTensor
            A tensor of the same class, with a type that holds all values.
        """
    return classmethod(method)


class ArrayMethods:
    """Methods of :class:`sparsetir.SparseTensor` in common with scipy's arrays."""

    if TYPE_CHECKING:

        @property
        def pattern(self) -> Pattern: ...
        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def nnz(self) -> int: ...
        @property
        def values(self) -> np.ndarray: ...
        @property
        def dtype(self) -> np.dtype: ...
        def with_values(self, values: object) -> Self: ...
        @classmethod
        def _adopted(cls, caller: str, data: Any) -> Any: ...
        def _as_scipy(self, values: np.ndarray | None = None) -> Any: ...
        def _derived(self, moved: Any, values_of: Callable[[np.ndarray], np.ndarray]) -> Any: ...
        def _taken(self, kept: np.ndarray) -> Self: ...

    sign, sqrt, conj, expm1, log1p = map(_function, ("sign", "sqrt", "conj", "expm1", "log1p"))
    sin, arcsin, sinh, arcsinh = map(_function, ("sin", "arcsin", "sinh", "arcsinh"))
    tan, arctan, tanh, arctanh = map(_function, ("tan", "arctan", "tanh", "arctanh"))
    rint, floor, ceil, trunc = map(_function, ("rint", "floor", "ceil", "trunc"))
    deg2rad, rad2deg = _function("deg2rad"), _function("rad2deg")
    __abs__, __neg__ = _function("absolute"), _function("negative")

    sum, mean = _reduction("sum", "ndarray"), _reduction("mean", "ndarray")
    max, min = _reduction("max", "SparseTensor"), _reduction("min", "SparseTensor")

    vstack = _stacking("vstack", "one below the other")
    hstack = _stacking("hstack", "side by side")

    __hash__ = object.__hash__

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, which says where to find what scipy's arrays have."""
            scipys = not name.startswith("_") and hasattr(scipy.sparse.csr_array, name)
            scipys |= name in ("data", "indices", "indptr")
            hint = f"; A.to_scipy().{name} is SciPy's" if scipys else ""
            kind = type(self).__name__
            raise AttributeError(f"'{kind}' object has no attribute '{name}'{hint}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions of elements: those that are 0 at 0, and those that have operators."""
        name = ufunc.__name__
        if method == "__call__" and not options and name in OPERATORS:
            of_first, of_second = OPERATORS[name]
            # NumPy hands in its scalars as arrays.
            first, second = (x[()] if isinstance(x, np.ndarray) else x for x in inputs)
            left = isinstance(first, ArrayMethods)
            operate = getattr(*((first, of_first) if left else (second, of_second)), None)
            result = NotImplemented if operate is None else operate(second if left else first)
            if result is not NotImplemented:
                return result
        elif method == "__call__" and not options and (ufunc.nin, ufunc.nout) == (1, 1):
            with np.errstate(all="ignore"):
                if ufunc(self.dtype.type(0)) == 0:
                    return self.with_values(ufunc(self.values))
        if not all(isinstance(x, ArrayMethods | np.ndarray) or _is_number(x) for x in inputs):
            return NotImplemented  # another library's array may support it
        caller = f"numpy.{name}" if method == "__call__" else f"numpy.{name}.{method}"
        kinds = " and ".join(type_name(x) for x in inputs)
        raise TypeError(
            f"{caller}: expected a function with a sparse result, 0 where nothing is stored, "
            f"without out= and other options, got it for {kinds}; toarray() has all elements, "
            "with_values(...) replaces those that are stored"
        )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def toarray(self) -> np.ndarray:
        """Convert to a dense NumPy array."""
        out = np.zeros(self.shape, self.dtype)
        out[tuple(self.pattern.coords)] = self.values
        return out

    todense = toarray

    def copy(self) -> Self:
        """A tensor with a copy of the values; shares conversions."""
        return self.with_values(self.values.copy())

    def nonzero(self) -> tuple[np.ndarray, ...]:
        """Coordinates of the nonzero values, an array for each axis."""
        nonzero = self.values != 0
        return tuple(c[nonzero] for c in self.pattern.coords)

    def eliminate_zeros(self) -> Any:
        """A tensor without stored zeros; unlike in scipy, this one is not changed."""
        return self._taken(np.flatnonzero(self.values != 0))

    def reshape(self, *shape: Any) -> Any:
        """A tensor with the same elements in another shape, in row-major order.

        Parameters
        ----------
        *shape : int
            Lengths, or one sequence of them; one of them may be -1.

        Returns
        -------
        SparseTensor
            A SparseMatrix, if a matrix keeps two axes.
        """
        return self._moved("reshape", lambda positions: positions.reshape(*shape))

    @property
    def T(self) -> Any:
        """The tensor with its axes reversed."""
        return self.transpose(range(self.ndim)[::-1])

    def transpose(self, axes: Iterable[int] | None = None) -> Any:
        """The tensor with its axes in another order.

        Parameters
        ----------
        axes : sequence of int, optional
            For each axis of the result, that of this tensor; reversed by default.

        Returns
        -------
        SparseTensor
            A tensor of the same class.
        """
        if axes is None:
            return self.T
        return self._moved("transpose", lambda positions: positions.tocoo().transpose(tuple(axes)))

    def __getitem__(self, key: Any) -> Any:
        """A number, a tensor, or for lists of all coordinates an array; copies, as in scipy.

        Tensors of one, three or more axes need scipy 1.17.
        """
        caller = f"{type(self).__name__}.__getitem__"
        if isinstance(key, ArrayMethods):
            expected = "integers, slices and lists, such as those of nonzero()"
            raise wrong(caller, "key", expected, key, IndexError)
        each = key if isinstance(key, tuple) else (key,)
        key = tuple(to_host(caller, "key", index) if is_torch(index) else index for index in each)
        return self._moved("__getitem__", lambda positions: positions[key])

    def _moved(self, name: str, move: Callable[[Any], Any]) -> Any:
        """Apply a function of scipy's to the positions of elements, counted from 1."""
        with _named(f"{type(self).__name__}.{name}"):
            moved: Any = move(self._as_scipy())
        if not scipy.sparse.issparse(moved):
            positions = np.asarray(moved)
            out, stored = np.zeros(positions.shape, self.dtype), positions > 0
            out[stored] = self.values[positions[stored] - 1]
            return out[()]
        return self._derived(moved, lambda positions: self.values[positions - 1])

    def _wide(self) -> Any:
        """Convert to scipy, with narrow floating point as float64."""
        wide = np.float64 if _is_narrow(self.dtype) else self.dtype
        return self._as_scipy(self.values.astype(wide, copy=False))

    def _narrowed(self, wide: Any, dtype: Any = None) -> Any:
        kind = dtype or (self.dtype if _is_narrow(self.dtype) else None)
        with np.errstate(over="ignore"):
            return wide if kind is None else wide.astype(kind)

    def _reduced(self, name: str, axis: Any, keepdims: bool, dtype: Any) -> Any:
        caller = f"{type(self).__name__}.{name}"
        with _named(caller):
            axes = normalize_axis_tuple(range(self.ndim) if axis is None else axis, self.ndim)
            # Before 1.17, scipy refuses a tuple of all axes.
            axis = None if len(axes) == self.ndim else axis
            reduced = getattr(self._wide(), name)(axis=axis)
        if keepdims:
            shape = tuple(1 if n in axes else length for n, length in enumerate(self.shape))
            reduced = reduced.reshape(shape)
        if not scipy.sparse.issparse(reduced):
            return self._narrowed(reduced, dtype)
        return self._derived(reduced, lambda data: self._narrowed(data, dtype))

    @classmethod
    def _stacked(cls, name: str, tensors: Iterable[Any]) -> Any:
        caller = f"{cls.__name__}.{name}"
        parts = [cls._adopted(caller, x) for x in tensors]
        if not parts:
            raise wrong(caller, "tensors", "some", "none")
        begins = starts(np.array([x.nnz for x in parts]))
        each = [x._as_scipy(np.arange(*begins[n : n + 2])) for n, x in enumerate(parts)]
        with _named(caller):
            joined = getattr(scipy.sparse, name)(each)
        values = np.concatenate([x.values for x in parts])
        return parts[0]._derived(joined, lambda positions: values[positions])

    def __add__(self, other: Any) -> Any:
        """Add a tensor."""
        return self._with_tensor(operator.add, other)

    def __sub__(self, other: Any) -> Any:
        """Subtract a tensor."""
        return self._with_tensor(operator.sub, other)

    def __matmul__(self, other: Any) -> Any:
        """Multiply by a tensor, the last axis by its first."""
        return self._with_tensor(operator.matmul, other)

    def __mul__(self, other: Any) -> Any:
        """Multiply values by a number, or by those of a dense array or a tensor; typed as in
        NumPy."""
        if isinstance(other, ArrayMethods):
            return self._with_tensor(operator.mul, other)
        return self._scaled(operator.mul, other)

    def _with_tensor(self, op: Callable[[Any, Any], Any], other: Any) -> Any:
        """Compute with another tensor by scipy, for tensors that are not two matrices."""
        if not isinstance(other, ArrayMethods):
            return NotImplemented
        dtype = np.result_type(self.dtype, other.dtype)
        with _named(f"{type(self).__name__}.__{op.__name__}__"):
            result = op(self._wide(), other._wide())
        if not scipy.sparse.issparse(result):
            return np.asarray(result).astype(dtype)[()]
        return self._derived(result, lambda data: data.astype(dtype))

    def __rmul__(self, other: object) -> Any:
        """Multiply a number or a dense array by the values."""
        return NotImplemented if scipy.sparse.issparse(other) else self * other

    def __truediv__(self, other: object) -> Any:
        """Divide values by a number, or by those of a dense array; other elements stay zero."""
        caller = f"{type(self).__name__}.__truediv__"
        if isinstance(other, ArrayMethods) or sources.is_sparse(other):
            expected = "a number or a dense array, such as that of toarray()"
            raise TypeError(f"{caller}: expected {expected}, got {type_name(other)}")
        if _is_number(other) and other == 0:
            raise ZeroDivisionError(f"{caller}: zeros that are not stored would be NaN")
        return self._scaled(operator.truediv, other)

    def __pow__(self, other: Any) -> Any:
        """Raise the values to a positive power."""
        if not _is_number(other):
            return NotImplemented
        if not other > 0:
            caller = f"{type(self).__name__}.__pow__"
            raise ValueError(
                f"{caller}: expected a positive exponent, which keeps zeros, got {other}"
            )
        return self.with_values(self.values**other)

    def _scaled(self, op: Callable[[Any, Any], Any], other: Any) -> Any:
        caller = f"{type(self).__name__}.__{op.__name__}__"
        if not _is_number(other):
            if not is_array(other) or sources.is_sparse(other):
                return NotImplemented
            refuse_gradient(caller, other)
            other = to_host(caller, "other", other)
            try:
                np.broadcast_to(other, self.shape)
            except ValueError:
                expected = f"a shape that broadcasts to {self.shape}"
                raise wrong(caller, "other", expected, other.shape) from None
            coords = self.pattern.coords[self.ndim - other.ndim :]
            lengths = zip(coords, other.shape, strict=True)
            other = other[tuple(c if length > 1 else 0 for c, length in lengths)]
        return self.with_values(op(self.values, other))

    __eq__, __ne__ = _comparison("eq"), _comparison("ne")
    __lt__, __gt__ = _comparison("lt"), _comparison("gt")
    __le__, __ge__ = _comparison("le"), _comparison("ge")

    def __bool__(self) -> bool:
        raise ValueError(f"{type(self).__name__}: a tensor is neither true nor false; use nnz")

    def _compared(self, op: Callable[[Any, Any], Any], other: Any) -> Any:
        caller = f"{type(self).__name__}.__{op.__name__}__"
        sparse = isinstance(other, ArrayMethods) or sources.is_sparse(other)
        if not (sparse or is_array(other) or _is_number(other)):
            return NotImplemented
        if not (sparse or _is_number(other)) or op(self.dtype.type(0), 0 if sparse else other):
            raise TypeError(
                f"{caller}: expected a comparison with a number or a sparse tensor that is false "
                "where nothing is stored; compare toarray(), or (A != B).nnz with 0 for A == B"
            )
        if not sparse:
            return self.with_values(op(self.values, other)).eliminate_zeros()
        second = self._adopted(caller, other)
        if second.shape != self.shape:
            raise wrong(caller, "other", f"shape {self.shape}", second.shape)
        return self._derived(op(self._wide(), second._wide()), lambda data: data)


@contextmanager
def _named(caller: str) -> Iterator[None]:
    """Prefix scipy's errors with the function's name."""
    try:
        yield
    except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        kind = ValueError if isinstance(error, ZeroDivisionError) else type(error)
        raise kind(f"{caller}: {error}") from error


def _is_narrow(dtype: np.dtype) -> bool:
    return dtype.name in ("float16", "bfloat16", "float32")


def _is_number(x: object) -> bool:
    return np.isscalar(x) and not isinstance(x, str | bytes)


def refuse_gradient(caller: str, other: Any) -> None:
    """Raise for a torch tensor whose gradient would be lost."""
    if is_torch(other) and other.requires_grad:
        raise TypeError(
            f"{caller}: expected a tensor without a gradient, which would end here, got one that "
            "requires it; detach it, or see sparsetir.ops and sparsetir.einsum, which have them"
        )
