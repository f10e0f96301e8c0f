"""Point clouds on a grid, with features, the inputs and outputs of sparse convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from sparsetir.nn.graph import remembered
from sparsetir.nn.kernel_map import (
    Convolution,
    Pairs,
    Sorted,
    Triple,
    between,
    in_row_order,
    reached,
    submanifold,
)
from sparsetir.ops.cache import attach, attached, cacheable, cached_result, private
from sparsetir.ops.compress import INT32_MAX
from sparsetir.ops.tensors import check_size, check_strided, check_tensor
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.refusals import wrong

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
T = TypeVar("T")


@dataclass(frozen=True)
class KernelMap:
    """The pairs of inputs and outputs of a convolution, at most one per output and offset.

    It is the pattern of relational gather-matmul-scatter, offsets being relations, without values.

    Parameters
    ----------
    row_ptr : (offsets + 1,) Tensor
        The start of each offset's pairs.
    rows : (pairs,) Tensor
        Outputs, ascending for each offset.
    indices : (pairs,) Tensor
        Inputs.
    m, n : int
        Number of outputs and of inputs.
    coords : (m, 4) Tensor, int32
        Coordinates of the outputs.

    Notes
    -----
    The first three are int32, or int64 if there are too many pairs for it.
    """

    row_ptr: Tensor
    rows: Tensor
    indices: Tensor
    m: int
    n: int
    coords: Tensor
    made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def offsets(self) -> int:
        """Number of the kernel's offsets."""
        return len(self.row_ptr) - 1

    @cached_property
    @cacheable
    def indptr(self) -> Tensor:
        """The start of each pair's single input, (pairs + 1,): 0, 1, 2 .."""
        return torch.arange(len(self.rows) + 1, dtype=self.rows.dtype, device=self.rows.device)

    def remembered(self, key: str, make: Callable[[KernelMap], T]) -> T:
        """Data derived from the map once and kept as long as the map.

        Parameters
        ----------
        key : str
            The key of the data.
        make : callable
            Derives it from this map.

        Returns
        -------
        object
        """
        data = self.made.get(key)
        if data is None:
            data = self.made.setdefault(key, cached_result(make, self))
        return data


class Places:
    """The coordinates of points and data derived from them, shared by all features there.

    coords : (n, 4) int32, private
    stride : spacing of this grid in units of the first points' grid
    before : the places that a strided convolution came from, and this convolution
    """

    coords: Tensor
    stride: Triple
    before: tuple[Places, Convolution] | None

    def __init__(
        self,
        coords: Tensor,
        stride: Triple = (1, 1, 1),
        before: tuple[Places, Convolution] | None = None,
        sorted_: Sorted | None = None,
    ) -> None:
        self.coords, self.stride, self.before = coords, stride, before
        if sorted_ is not None:
            self.sorted = sorted_
        attach(coords, ref(self))

    @cached_property
    def sorted(self) -> Sorted:
        """The points in lexicographic order; ValueError for duplicate points."""
        return Sorted.of(self.coords.cpu().numpy())

    @cached_property
    def batch_size(self) -> int:
        """The last batch number plus one."""
        return int(self.coords[:, 0].max()) + 1 if len(self.coords) else 0

    def submanifold(self, conv: Convolution) -> KernelMap:
        """The map of a convolution whose inputs and outputs are here."""
        return self._remembered(
            (conv, "submanifold"), lambda: self._map(submanifold(self.sorted, conv), self)
        )

    def reached(self, conv: Convolution) -> tuple[KernelMap, Places]:
        """The map of a convolution with all outputs that it reaches, and their places."""

        def make() -> tuple[KernelMap, Places]:
            pairs, outputs = reached(self.sorted, conv)
            columns = outputs.columns
            limits = columns.min(initial=0), columns.max(initial=0)
            if limits[0] < -INT32_MAX - 1 or limits[1] > INT32_MAX:
                raise ValueError(f"expected outputs within 2^31, got one at {max(limits, key=abs)}")
            coords = private(torch.from_numpy(columns.T.astype(np.int32)).to(self.coords.device))
            x, y, z = (a * b for a, b in zip(self.stride, conv.stride, strict=True))
            places = Places(coords, (x, y, z), (self, conv), outputs)
            return self._map(pairs, places), places

        return self._remembered((conv, "reached"), make)

    def onto(self, coarse: Places, conv: Convolution) -> KernelMap:
        """The map of a convolution from here to `coarse`."""
        if coarse.before == (self, conv):
            return self.reached(conv)[0]

        def make() -> KernelMap:
            return self._map(between(self.sorted, conv, coarse.sorted), coarse)

        return self._remembered((conv, "onto"), make, coarse.coords)

    def _map(self, pairs: Pairs, outputs: Places) -> KernelMap:
        dtype = torch.int64 if len(pairs.rows) > INT32_MAX else torch.int32
        arrays, at = (pairs.row_ptr, pairs.rows, pairs.indices), self.coords.device
        row_ptr, rows, indices = (torch.from_numpy(x).to(at, dtype) for x in arrays)
        onto = outputs.coords
        return KernelMap(row_ptr, rows, indices, len(onto), len(self.coords), onto)

    def _remembered(self, key: object, make: Callable[[], object], *more: Tensor) -> Any:
        return remembered((self.coords, *more), key, make)


def places_of(coords: Tensor) -> Places:
    """The places with these coordinates, from an operator's argument; new ones if they are gone."""
    carried = attached(coords)
    places = None if carried is None else carried()
    if places is None:
        return remembered((coords,), "places", lambda: Places(private(coords)))
    return places


def transposed(original: KernelMap, inputs: Places) -> KernelMap:
    """The map with inputs and outputs swapped; inputs : the places of the original inputs."""

    def make(_: KernelMap) -> KernelMap:
        arrays = (x.cpu().numpy() for x in (original.row_ptr, original.indices, original.rows))
        pairs = in_row_order(Pairs(*arrays), original.n)
        rows, indices = (torch.from_numpy(x).to(original.rows) for x in (pairs.rows, pairs.indices))
        back = KernelMap(original.row_ptr, rows, indices, original.n, original.m, inputs.coords)
        back.made["transposed"] = original
        return back

    return original.remembered("transposed", make)


class SparsePoints:
    """Points on a grid, of one cloud or several, with features.

    The grid has no bounds, and coordinates may be negative. Points at the same places share the
    kernel maps of convolutions: make others by :meth:`with_features`, or from the same tensor of
    coordinates.

    Parameters
    ----------
    coords : (n, 4) Tensor, int32
        Batch, x, y and z.
    features : (n, channels) Tensor
        Features of each point.
    batch_size : int, optional
        Number of clouds; by default the largest batch number plus one.

    Attributes
    ----------
    stride : (int, int, int)
        The grid's spacing in units of the first points' grid, which strided convolutions increase.

    Examples
    --------
    >>> import torch
    >>> x = SparsePoints(torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]]), torch.ones(2, 8))
    >>> x
    SparsePoints(2 points, 8 channels, batch_size=1, stride=(1, 1, 1))
    """

    places: Places
    features: Tensor
    batch_size: int

    def __init__(self, coords: Tensor, features: Tensor, batch_size: int | None = None) -> None:
        """Check and take points; raise TypeError and ValueError if invalid or duplicate.

        coords : (n, 4) integers within 2^31, in any order, each point once
        batch_size : needed if the last clouds have no points
        """
        _check_coords("SparsePoints", coords)
        places = _places("SparsePoints", coords)
        self._set(places, features, check_batches("SparsePoints", batch_size, places))

    def _set(self, places: Places, features: Tensor, batch_size: int) -> None:
        _check_features("SparsePoints", features, places.coords)
        self.places, self.features, self.batch_size = places, features, batch_size

    @classmethod
    def at(cls, places: Places, features: Tensor, batch_size: int) -> SparsePoints:
        """Make points at known places, without checks.

        Parameters
        ----------
        places : Places
            The places of other points.
        features : (n, channels) Tensor
            Features of each point.
        batch_size : int
            Number of clouds.

        Returns
        -------
        SparsePoints
        """
        points = cls.__new__(cls)
        points._set(places, features, batch_size)
        return points

    @property
    def coords(self) -> Tensor:
        """(n, 4) int32 of batch, x, y and z."""
        return self.places.coords

    @property
    def stride(self) -> Triple:
        """The grid's spacing in units of the first points' grid."""
        return self.places.stride

    def with_features(self, features: Tensor) -> SparsePoints:
        """Make points with other features at the same places.

        Parameters
        ----------
        features : (n, channels) Tensor
            Features of each point.

        Returns
        -------
        SparsePoints
        """
        return SparsePoints.at(self.places, features, self.batch_size)

    def dense(
        self, low: tuple[int, int, int] | None = None, size: tuple[int, int, int] | None = None
    ) -> Tensor:
        """Features on a dense grid, zero where there is no point.

        Parameters
        ----------
        low, size : (int, int, int), optional
            A box; by default around the points.

        Returns
        -------
        (batch_size, channels, x, y, z) Tensor

        Raises
        ------
        ValueError
            If a point lies outside.
        """
        xyz = self.coords[:, 1:].long()
        if low is None:
            least = xyz.amin(0) if len(xyz) else xyz.new_zeros(3)
        else:
            least = xyz.new_tensor(low)
        xyz = xyz - least
        if size is None:
            sizes = (xyz.amax(0) + 1).tolist() if len(xyz) else [0, 0, 0]
        else:
            sizes = list(size)
        if len(xyz) and (bool((xyz < 0).any()) or bool((xyz >= xyz.new_tensor(sizes)).any())):
            raise ValueError(
                f"SparsePoints.dense: argument 'size': expected a box with all points, got "
                f"{tuple(sizes)} from {tuple(least.tolist())}"
            )
        shape = (self.batch_size, *sizes, self.features.shape[1])
        place = (self.coords[:, 0].long(), *xyz.unbind(1))
        return self.features.new_zeros(shape).index_put(place, self.features).movedim(-1, 1)

    def __len__(self) -> int:
        return len(self.coords)

    def __repr__(self) -> str:
        return (
            f"SparsePoints({len(self)} points, {self.features.shape[1]} channels, "
            f"batch_size={self.batch_size}, stride={self.stride})"
        )


class OnFeatures(torch.nn.Sequential):
    """Modules that work on features alone, such as BatchNorm1d and ReLU, one after the other.

    Parameters
    ----------
    *args : torch.nn.Module
        The modules, as for `torch.nn.Sequential`.

    Examples
    --------
    >>> norm = OnFeatures(torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    """

    def forward(self, input: SparsePoints) -> SparsePoints:
        """Run the modules on the features.

        Parameters
        ----------
        input : SparsePoints
            The points.

        Returns
        -------
        SparsePoints
            The same points with other features.
        """
        return input.with_features(super().forward(input.features))


def kernel_map(
    coords: Tensor,
    kernel_size: int | Triple,
    stride: int | Triple = 1,
    padding: int | Triple | None = None,
    dilation: int | Triple = 1,
    submanifold: bool = True,
) -> KernelMap:
    """Find the input points of each output of a convolution.

    Parameters
    ----------
    coords : (n, 4) Tensor, int32
        Coordinates, as for :class:`SparsePoints`.
    kernel_size, stride, padding, dilation, submanifold
        As for :class:`SparseConv3d`.

    Returns
    -------
    KernelMap
    """
    caller = "kernel_map"
    conv, here = convolution(caller, kernel_size, stride, padding, dilation, submanifold)
    _check_coords(caller, coords)
    places = _places(caller, coords)
    return places.submanifold(conv) if here else reached_by(caller, places, conv)[0]


def convolution(
    caller: str,
    kernel_size: object,
    stride: object,
    padding: object,
    dilation: object,
    submanifold: bool,
) -> tuple[Convolution, bool]:
    """The convolution of :class:`SparseConv3d`'s arguments, and whether outputs are at inputs."""
    kernel, strides, dilations = (
        triple(caller, name, x, 1)
        for name, x in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
    )
    here = submanifold and strides == (1, 1, 1)
    if not here:
        pads = triple(caller, "padding", 0 if padding is None else padding, 0)
        return Convolution(kernel, strides, pads, dilations), False
    if padding is not None:
        raise wrong(caller, "padding", "None, as outputs are at inputs", f"{padding!r}")
    return Convolution.submanifold(kernel, dilations), True


def reached_by(caller: str, places: Places, conv: Convolution) -> tuple[KernelMap, Places]:
    """Call :meth:`Places.reached`, with errors that name the caller."""
    try:
        return places.reached(conv)
    except ValueError as error:
        raise ValueError(f"{caller}: argument 'coords': {error}") from None


def triple(caller: str, name: str, value: Any, least: int) -> Triple:
    """Expand one or three integers to x, y and z; TypeError and ValueError for other values."""
    numbers = value if isinstance(value, tuple | list) else (value,) * 3
    if len(numbers) != 3:
        raise ValueError(
            f"{caller}: argument '{name}': expected one number or three, got {value!r}"
        )
    x, y, z = (check_size(caller, name, number, least) for number in numbers)
    return x, y, z


def check_batches(caller: str, batch_size: object, places: Places) -> int:
    """Check the number of clouds and return it; TypeError and ValueError if it is invalid."""
    least = places.batch_size
    if batch_size is None:
        return least
    return check_size(caller, "batch_size", batch_size, least)


def _places(caller: str, coords: Tensor) -> Places:
    """The places of coordinates, which are checked for range and duplicates."""

    def make() -> Places:
        limits = (int(coords.min()), int(coords.max())) if len(coords) else (0, 0)
        if limits[0] < -INT32_MAX - 1 or limits[1] > INT32_MAX:
            raise ValueError(f"expected coordinates within 2^31, got {max(limits, key=abs)}")
        if len(coords) and int(coords[:, 0].min()) < 0:
            raise ValueError(f"expected batches of at least 0, got {int(coords[:, 0].min())}")
        places = Places(private(coords.to(torch.int32)))
        places.sorted  # noqa: B018 (raises for points that occur twice)
        return places

    try:
        return remembered((coords,), "places", make)
    except ValueError as error:
        raise ValueError(f"{caller}: argument 'coords': {error}") from None


def _check_coords(caller: str, coords: object) -> None:
    coords = check_strided(caller, "coords", coords)
    if coords.dtype not in INTEGERS:
        raise wrong(caller, "coords", "integers", dtype_name(coords), TypeError)
    if coords.dim() != 2 or coords.shape[1] != 4:
        raise wrong(caller, "coords", "shape (n, 4) of batch, x, y and z", tuple(coords.shape))


def _check_features(caller: str, features: Any, coords: Tensor) -> None:
    check_tensor(caller, "features", features)
    if features.dim() != 2 or len(features) != len(coords):
        expected = f"shape ({len(coords)}, channels) as there are points"
        raise wrong(caller, "features", expected, tuple(features.shape))
    if features.device != coords.device:
        raise wrong(
            caller, "features", f"to be on {coords.device} as the coordinates", features.device
        )
