"""Points to convolve, and MinkowskiNet's layers on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsetir.nn import SparseConv3d, SparseConvTranspose3d, SparsePoints

VOXEL = 0.05  # metres, as for MinkowskiNet on SemanticKITTI
BEAMS, TURNS = 64, 2000
# The convolutions of size 3 at each level's points, by channels in and out; the levels are 1, 2, 4,
# 8 and 16 voxels apart.
AT_POINTS = (
    ((4, 32), (32, 32), (128, 96), (96, 96)),
    ((32, 32), (128, 96), (96, 96)),
    ((32, 64), (64, 64), (192, 128), (128, 128)),
    ((64, 128), (128, 128), (384, 256), (256, 256)),
    ((128, 256), (256, 256)),
)
# Convolutions of size 2 with stride 2 from each level, and back onto it.
DOWN, UP = (32, 32, 64, 128), ((96, 96), (128, 96), (256, 128), (256, 256))


class Layer(NamedTuple):
    """A layer of the net, and its input."""

    name: str
    made: SparseConv3d | SparseConvTranspose3d
    points: SparsePoints

    @property
    def channels(self) -> tuple[int, int]:
        """Channels in and out."""
        return self.made.in_channels, self.made.out_channels


def scene(seed: int = 0, beams: int = BEAMS, turns: int = TURNS) -> np.ndarray:
    """(n, 3) integers: voxels that a lidar sees on a plain with boxes on it."""
    rng = np.random.default_rng(seed)
    around = np.linspace(0, 2 * np.pi, turns, endpoint=False)[None]
    down = np.deg2rad(np.linspace(-24.8, 2, beams))[:, None]
    parts = np.cos(down) * np.cos(around), np.cos(down) * np.sin(around), np.sin(down)
    ways = np.stack(np.broadcast_arrays(*parts), axis=-1).reshape(-1, 3).astype(np.float32)
    height, far = 1.7, 70.0
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.where(ways[:, 2] < 0, -height / ways[:, 2], np.inf)
        for _ in range(40):
            middle, half = rng.uniform(-40, 40, 2), rng.uniform(1, 5, 2)
            low = np.append(middle - half, -height).astype(np.float32)
            high = np.append(middle + half, rng.uniform(-0.5, 4)).astype(np.float32)
            if (low[:2] < 2).all() and (high[:2] > -2).all():
                continue  # the lidar would be inside it
            ends = np.sort([low / ways, high / ways], axis=0)
            first, last = ends[0].max(1), ends[1].min(1)
            reach = np.where((first > 0) & (first < last), np.minimum(reach, first), reach)
    hit = reach < far
    reach = reach[hit] + rng.normal(0, 0.01, int(hit.sum()))
    cells = np.floor(ways[hit] * reach[:, None] / VOXEL).astype(np.int64)
    return np.unique(cells - cells.min(0), axis=0)


def layers(places: np.ndarray, dtype: torch.dtype, seed: int = 0) -> Iterator[Layer]:
    """Every layer of distinct size or points, on voxels (n, 3)."""
    torch.manual_seed(seed)

    def features(x: SparsePoints, channels: int) -> SparsePoints:
        return x.with_features(torch.randn(len(x), channels).to(dtype))

    coords = torch.from_numpy(np.insert(places, 0, 0, axis=1))
    x = SparsePoints(coords, torch.zeros(len(coords), 1))
    for level, sizes in enumerate(AT_POINTS):
        for size in sizes:
            layer: Any = SparseConv3d(*size, 3, bias=False).to(dtype)
            yield Layer(f"3, level {level}", layer, features(x, size[0]))
        if level == len(DOWN):
            return
        channels = DOWN[level]
        layer = SparseConv3d(channels, channels, 2, stride=2, bias=False).to(dtype)
        points = features(x, channels)
        yield Layer(f"2 down, level {level}", layer, points)
        with torch.no_grad():
            x = layer(points)
        layer = SparseConvTranspose3d(*UP[level], 2, stride=2, bias=False).to(dtype)
        yield Layer(f"2 up, level {level}", layer, features(x, UP[level][0]))
