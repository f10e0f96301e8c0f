"""A small network in the manner of MinkUNet, which tells points of a cloud apart.

    python examples/sparse_unet.py --steps 60

Clouds are generated: planes, boxes and spheres, each point of the class of the surface that it lies
on. `--data FILE.npz` takes `points` (n, 3 or more) of yours, in metres; with `labels` (n,) of
classes these are learned, and without it whether a point is less than `--height` above the lowest
one of its column. Features are what a voxel's points have besides where they are, the mean place of
the points in it and a one. What is printed: loss and accuracy of a step, then of clouds that were
not trained on, or of the file.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsetir.nn import OnFeatures, SparseConv3d, SparseConvTranspose3d, SparsePoints

SHAPES = ("plane", "box", "sphere")
COLUMN = 20  # voxels along a side of what is a column of --data


class Labelled(NamedTuple):
    """Points and the class of each, (n,) int64."""

    points: SparsePoints
    labels: Tensor


def normed(channels: int) -> OnFeatures:
    """BatchNorm and ReLU."""
    return OnFeatures(nn.BatchNorm1d(channels), nn.ReLU())


class Block(nn.Module):
    """Two convolutions at the points, added to what went in."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.first = SparseConv3d(channels_in, channels, 3, bias=False)
        self.second = SparseConv3d(channels, channels, 3, bias=False)
        self.norm, self.after = normed(channels), OnFeatures(nn.BatchNorm1d(channels))
        same = channels_in == channels
        self.skip = nn.Identity() if same else nn.Linear(channels_in, channels, bias=False)

    def forward(self, x: SparsePoints) -> SparsePoints:
        """The same points with other features."""
        y = self.after(self.second(self.norm(self.first(x))))
        return y.with_features(torch.relu(y.features + self.skip(x.features)))


class UNet(nn.Module):
    """Levels twice as coarse each, and back with what the levels had on the way."""

    def __init__(self, channels_in: int, classes: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            SparseConv3d(channels_in, channels[0], 3, bias=False), normed(channels[0])
        )
        pairs = list(zip(channels[:-1], channels[1:], strict=True))
        self.down = nn.ModuleList(
            nn.Sequential(SparseConv3d(a, a, 2, stride=2, bias=False), normed(a), Block(a, b))
            for a, b in pairs
        )
        self.up = nn.ModuleList(
            nn.ModuleList([
                SparseConvTranspose3d(b, a, 2, stride=2, bias=False), normed(a), Block(2 * a, a)
            ])
            for a, b in reversed(pairs)
        )  # fmt: skip
        self.head = nn.Linear(channels[0], classes)

    def forward(self, x: SparsePoints) -> Tensor:
        """(n, classes) scores."""
        levels = [self.stem(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        y = levels.pop()
        for up, norm, block in self.up:
            before = levels.pop()
            y = norm(up(y))
            y = block(y.with_features(torch.cat([y.features, before.features], 1)))
        return self.head(y.features)


# -- data -----------------------------------------------------------------------------------------


def surfaces(rng: np.random.Generator, points: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3) points in metres on a plane with boxes and spheres on it, and the class of each."""
    plane = np.stack([*rng.uniform(-4, 4, (2, points)), np.zeros(points)], 1)
    found, classes = [plane], [np.zeros(points, int)]
    for shape in (1, 1, 1, 2, 2, 2):
        middle, size = rng.uniform(-3, 3, 2), rng.uniform(0.3, 0.8, 3)
        if shape == 1:
            at = rng.uniform(-1, 1, (points // 4, 3))
            side = rng.integers(3, size=len(at))
            at[np.arange(len(at)), side] = rng.choice([-1, 1], len(at))
        else:
            at = rng.normal(size=(points // 4, 3))
            at /= np.linalg.norm(at, axis=1, keepdims=True)
            size[:] = size[0]
        found.append(at * size + np.append(middle, size[2]))
        classes.append(np.full(len(at), shape))
    return np.concatenate(found), np.concatenate(classes)


def voxelized(
    clouds: list[tuple[np.ndarray, np.ndarray]], voxel: float, extra: int = 0
) -> Labelled:
    """Clouds of points (n, 3 + extra) and classes (n,) as one batch."""
    coords, features, labels = [], [], []
    for at, (points, classes) in enumerate(clouds):
        place = points[:, :3] / voxel
        cells, index, counts = np.unique(
            np.floor(place).astype(np.int64), axis=0, return_inverse=True, return_counts=True
        )
        inside = place - np.floor(place) - 0.5
        sums = np.zeros((len(cells), 3 + extra))
        np.add.at(sums, index.ravel(), np.concatenate([inside, points[:, 3 : 3 + extra]], 1))
        of_classes = np.zeros((len(cells), classes.max() + 1))
        np.add.at(of_classes, (index.ravel(), classes), 1)
        coords.append(np.insert(cells, 0, at, axis=1))
        features.append(np.insert(sums / counts[:, None], 0, 1, axis=1))
        labels.append(of_classes.argmax(1))
    made = SparsePoints(
        torch.from_numpy(np.concatenate(coords)), torch.from_numpy(np.concatenate(features)).float()
    )
    return Labelled(made, torch.from_numpy(np.concatenate(labels)))


def read(path: str, voxel: float, height: float) -> tuple[Labelled, int]:
    """The points of a file, and how many classes they have."""
    with np.load(path) as file:
        points = file["points"]
        given = file["labels"].astype(np.int64) if "labels" in file else None
    if given is None:
        column = np.floor(points[:, :2] / (voxel * COLUMN)).astype(np.int64)
        _, index = np.unique(column, axis=0, return_inverse=True)
        low = np.full(index.max() + 1, np.inf)
        np.minimum.at(low, index.ravel(), points[:, 2])
        given = (points[:, 2] - low[index.ravel()] > height).astype(np.int64)
    return voxelized([(points, given)], voxel, points.shape[1] - 3), int(given.max()) + 1


# -- training -------------------------------------------------------------------------------------


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Percent that are right."""
    return 100 * (scores.argmax(1) == labels).float().mean().item()


def train(arguments: argparse.Namespace) -> float:
    """Train a network; its last accuracy."""
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)

    def batch() -> Labelled:
        clouds = [surfaces(rng, arguments.points) for _ in range(arguments.batch)]
        return voxelized(clouds, arguments.voxel or 0.1)

    if arguments.data:
        data, classes = read(arguments.data, arguments.voxel or 0.05, arguments.height)
        batches = [data]
    else:
        batches, classes = [batch() for _ in range(arguments.batches)], len(SHAPES)
    model = UNet(batches[0].points.features.shape[1], classes, tuple(arguments.channels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    print(f"{sum(len(b.points) for b in batches)} points, {classes} classes")
    for step in range(arguments.steps):
        start = time.perf_counter()
        points, labels = batches[step % len(batches)]
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % arguments.every == 0 or step == arguments.steps - 1:
            print(
                f"step {step}: loss {loss.item():.3f}, accuracy {accuracy(scores, labels):.1f} %, "
                f"{1e3 * (time.perf_counter() - start):.0f} ms",
                flush=True,
            )
    model.eval()
    points, labels = batches[0] if arguments.data else batch()
    with torch.inference_mode():
        found = accuracy(model(points), labels)
    print(f"accuracy on {'the file' if arguments.data else 'new clouds'}: {found:.1f} %")
    return found


def main(argv: list[str] | None = None) -> float:
    """Train as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="FILE", help="npz file with points, and maybe labels")
    parser.add_argument("--voxel", type=float, help="side in metres (0.1, or 0.05 of a file)")
    parser.add_argument("--height", type=float, default=0.3, help="metres above the ground")
    parser.add_argument("--channels", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--batch", type=int, default=2, help="clouds of a step")
    parser.add_argument("--batches", type=int, default=8, help="that are trained on in turns")
    parser.add_argument("--points", type=int, default=8000, help="of the plane of a cloud")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from one line to the next")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
