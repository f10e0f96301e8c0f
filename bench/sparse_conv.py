"""Sparse convolutions, layer by layer, beside torch's gather, mm and scatter, and dense ones."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv3d

from bench import plots
from bench.clouds import Layer, layers, read, scene
from bench.harness import each, finish, geomean
from bench.report import table
from bench.timing import interleaved, progress
from bench.ways import Call, Comparison, Device, Way, peaks, show_others, training
from sparsetir.nn import KernelMap, SparseConv3d
from sparsetir.nn.kernel_map import Sorted, reached, submanifold

OURS, GATHER, SPARSE, DENSE = "sparsetir", "gather", "torch.sparse", "dense"
MM = "mm"  # torch's products alone, of rows that are gathered before: what the others come down to
PEERS = (GATHER, SPARSE, DENSE, MM)
NO_GRADIENTS = (DENSE, MM)
# A dense convolution is left out where its input and result are larger, or where it is more work.
DENSE_BYTES, DENSE_WORK = 2 << 30, 10**11
IN_FLOAT32 = " in float32"
# Seconds that one call may take; torch multiplies float16 without instructions for it very slowly.
MOST_SECONDS = 1.0
MEASURED_MEMORY = (1, 2)  # layers: the first of 32 channels, and the widest on all points
STEPS = ("forward", "training")


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    device = Device.of(args, least=2)
    assert device is not None
    clouds: dict[str, np.ndarray] = {}
    if args.points is None:
        clouds["generated"] = scene(beams=8, turns=200) if args.quick else scene()
    else:
        clouds.update({path.stem: read(path, args.voxel) for path in args.points})
    peers = PEERS if args.peers is None else tuple(args.peers)
    found: list[dict[str, Any]] = []
    for name, places in clouds.items():
        todo = (
            (f"{name}, {d}, {at.name}, {at.channels}", partial(measure, at, d, peers, device))
            for d in args.dtype
            for at in islice(layers(places, getattr(torch, d)), 3 if args.quick else None)
        )
        cells = each(todo)
        progress(f"{name}: maps and memory")
        tried = [OURS, *(p for p in peers if p not in NO_GRADIENTS)]
        measured = MEASURED_MEMORY[: 1 if args.quick else 2]
        memory = [peak(places, at, way) for at in measured for way in tried]
        maps = [] if args.quick else building(places)
        about = {"cloud": name, "points": len(places)}
        found.append({**about, "cells": cells, "maps": maps, "memory": memory})
        progress("")
        show(found[-1], args.threads)
    wrong = [c["wrong"] for cloud in found for c in cloud["cells"] if c["wrong"]]
    finish(args, "sparse_conv", found, wrong, draw)


# -- ways -----------------------------------------------------------------------------------------


def map_of(layer: Layer) -> KernelMap:
    """Which inputs go to which outputs."""
    made, places = layer.made, layer.points.places
    if not isinstance(made, SparseConv3d):
        assert places.before is not None
        return places.before[0].back_from(places, made.conv)
    return places.submanifold(made.conv) if made.submanifold else places.reached(made.conv)[0]


def ours(layer: Layer) -> Way:
    """The layer itself, with these weights."""

    def way(x: Tensor, weight: Tensor) -> Tensor:
        given = layer.points.with_features(x)
        return torch.func.functional_call(layer.made, {"weight": weight}, (given,)).features

    return way


def gathered(pairs: KernelMap) -> Way:
    """For each offset: index_select, mm, index_add_."""
    sizes = pairs.row_ptr.diff().tolist()
    rows, indices = (x.long().split(sizes) for x in (pairs.rows, pairs.indices))

    def way(x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_zeros(pairs.m, weight.shape[-1])
        for r, w in enumerate(weight.flatten(0, 2)):
            if sizes[r]:
                out = out.index_add_(0, rows[r], x.index_select(0, indices[r]) @ w)
        return out

    return way


def fast_enough(way: Way, *given: Any) -> Way:
    """The way, unless a call takes too long."""
    begun = time.perf_counter()
    way(*given)
    if time.perf_counter() - begun > MOST_SECONDS:
        raise ValueError(f"it takes longer than {MOST_SECONDS:.0f} s")
    return way


def by_matrices(pairs: KernelMap, dtype: torch.dtype) -> Way:
    """Gathered by a torch.sparse matrix, mm for each offset, scattered by another one."""
    count, every = len(pairs.rows), torch.arange(len(pairs.rows))
    sizes, ones = pairs.row_ptr.diff().tolist(), torch.ones(count, dtype=dtype)
    gather, scatter = (
        torch.sparse_coo_tensor(torch.stack(at), ones, size).to_sparse_csr()
        for at, size in (
            ((every, pairs.indices.long()), (count, pairs.n)),
            ((pairs.rows.long(), every), (pairs.m, count)),
        )
    )

    def way(x: Tensor, weight: Tensor) -> Tensor:
        parts = (gather @ x).split(sizes)
        products = zip(parts, weight.flatten(0, 2), strict=True)
        return scatter @ torch.cat([part @ w for part, w in products])

    return way


def dense(layer: Layer) -> Way:
    """torch's conv3d on the box around the points; ValueError where that is too large."""
    made, x = layer.made, layer.points
    if not isinstance(made, SparseConv3d) or not made.submanifold:
        raise ValueError("the layer goes to other points")
    box = math.prod((x.coords.amax(0) - x.coords.amin(0) + 1).tolist())
    cin, cout = layer.channels
    size = box * (cin + cout) * x.features.element_size()
    if size > DENSE_BYTES or 2 * box * made.conv.offsets * cin * cout > DENSE_WORK:
        raise ValueError("the box around the points is too large")
    at = (x.coords - x.coords.amin(0)).long().unbind(1)
    given = x.dense()

    def way(features: Tensor, weight: Tensor) -> Tensor:
        # The points are in the box already, as dense networks have them.
        del features
        return conv3d(given, weight.permute(4, 3, 0, 1, 2), padding="same")

    def check(features: Tensor, weight: Tensor) -> Tensor:
        return way(features, weight).movedim(1, -1)[at]

    way.check = check
    return way


def multiplied(pairs: KernelMap, features: Tensor, channels: int) -> Way:
    """For each offset only mm, in float32, of rows that are together, into one place."""
    parts = features.float()[pairs.indices.long()].split(pairs.row_ptr.diff().tolist())
    place = torch.empty(max(map(len, parts)), channels)

    def way(x: Tensor, weight: Tensor) -> Tensor:
        del x
        for part, w in zip(parts, weight.flatten(0, 2).float(), strict=True):
            torch.mm(part, w, out=place[: len(part)])
        return place

    return way


def makers(layer: Layer, peers: tuple[str, ...]) -> dict[str, Callable[[], Way]]:
    """Of ways by name; peers of 16-bit types also by way of float32."""
    pairs, x, weight = map_of(layer), layer.points.features, layer.made.weight.detach()
    gather = gathered(pairs)
    found: dict[str, Callable[[], Way]] = {GATHER: lambda: gather}
    if x.dtype == torch.float32:
        found[SPARSE] = lambda: by_matrices(pairs, x.dtype)
        found[DENSE] = lambda: dense(layer)
    else:
        found[GATHER] = lambda: fast_enough(gather, x, weight)
    found[MM] = lambda: multiplied(pairs, x, layer.channels[1])
    found = {OURS: lambda: ours(layer), **{n: m for n, m in found.items() if n in peers}}
    if x.dtype != torch.float32 and GATHER in peers:
        found[GATHER + IN_FLOAT32] = lambda: lambda x, w: gather(x.float(), w.float()).to(x.dtype)
    return found


# -- times and memory -----------------------------------------------------------------------------


def measure(layer: Layer, dtype: str, peers: tuple[str, ...], device: Device) -> dict[str, Any]:
    """Times of results, and of results with gradients."""
    x, weight, pairs = layer.points.features, layer.made.weight.detach(), map_of(layer)
    limit = 1e-5 if dtype == "float32" else 0.05
    compared = Comparison([[x, weight]], gathered(pairs), limit, steps=STEPS)
    compared.grads = [torch.randn(pairs.m, weight.shape[-1]).to(x.dtype)]
    compared.unchecked, compared.inferring = (MM,), NO_GRADIENTS
    found = compared.measure(makers(layer, peers), device)
    about = {"dtype": dtype, "layer": layer.name, "channels": layer.channels}
    return {**about, "inputs": pairs.n, "outputs": pairs.m, "pairs": len(pairs.rows), **found}


def building(places: np.ndarray) -> list[dict[str, Any]]:
    """Seconds of kernel maps, of voxels (n, 3) in order and in none, on one thread."""
    coords = np.insert(places, 0, 0, axis=1)
    rng, found = np.random.default_rng(0), []
    for order, given in (("in order", coords), ("in no order", rng.permutation(coords))):
        for made in (SparseConv3d(1, 1, 3), SparseConv3d(1, 1, 2, 2), SparseConv3d(1, 1, 3, 2, 1)):
            how = submanifold if made.submanifold else reached

            def call(given=given, made=made, how=how) -> None:
                how(Sorted.of(given), made.conv)

            times = interleaved({"": call}, 1)[""]
            found.append({"order": order, "kernel": made.extra_repr(), **times})
    return found


def peak(places: np.ndarray, at: int, way: str) -> dict[str, Any]:
    """Bytes that a layer with gradients takes at most, beside its operands."""
    layer = layer_at(places, at)
    pairs, channels = map_of(layer), layer.channels
    operands = 4 * (pairs.n * channels[0] + pairs.m * channels[1])
    about = {"way": way, "layer": layer.name, "channels": channels, "operand_bytes": operands}
    taken = peaks(_training, places, at, way)
    return {**about, "pairs_bytes": 4 * len(pairs.rows) * sum(channels), **taken}


def layer_at(places: np.ndarray, at: int) -> Layer:
    """One of the net's, in float32."""
    return next(islice(layers(places, torch.float32), at, None))


def _training(small: bool, places: np.ndarray, at: int, way: str) -> dict[str, Call]:
    layer = layer_at(places[:: len(places) // 500 + 1] if small else places, at)
    weight = layer.made.weight.detach()
    grad = torch.randn(map_of(layer).m, weight.shape[-1])
    made = makers(layer, (way,))[way]()
    return {"bytes": training(made, (layer.points.features, weight), grad)}


# -- what is shown --------------------------------------------------------------------------------


def ratio(times: dict[str, Any], peer: str) -> float:
    """How many times as long as ours a peer's fastest way takes; not a number where it has none."""
    own = [t["min"] for name, t in times.items() if name.split(IN_FLOAT32)[0] == peer]
    return min(own, default=math.nan) / times[OURS]["min"]


def show(found: dict[str, Any], threads: int) -> None:
    """Tables of times, kernel maps and memory."""
    for dtype in dict.fromkeys(c["dtype"] for c in found["cells"]):
        cells = [c for c in found["cells"] if c["dtype"] == dtype]
        for step, what in zip(STEPS, ("result", "result and gradients"), strict=True):
            peers = [p for p in PEERS if any(ratio(c[step], p) > 0 for c in cells)]
            rows = []
            for c in cells:
                about = [name_of(c), c["outputs"], f"{c['pairs'] / max(1, c['outputs']):.1f}"]
                ours = f"{1e3 * c[step][OURS]['min']:.2f}"
                rows.append([*about, ours, *(f"{ratio(c[step], p):.2f}" for p in peers)])
            ratios = [[r for c in cells if (r := ratio(c[step], p)) > 0] for p in peers]
            rows.append(["geometric mean", "", "", "", *(f"{geomean(r):.2f}" for r in ratios)])
            title = f"{found['cloud']}, {dtype}, {what}: ms, and times that; threads: {threads}"
            table(title, ["layer", "outputs", "pairs each", OURS, *peers], rows)
    if found["maps"]:
        rows = [[f"{m['order']}, {m['kernel']}", f"{1e3 * m['min']:.1f}"] for m in found["maps"]]
        table(f"Kernel maps of {found['points']} points, sorting included", ["", "ms"], rows)
    rows = []
    for m in found["memory"]:
        sizes = f"{m['bytes'] / 2**20:.1f}", f"{m['bytes'] / m['operand_bytes']:.2f}"
        rows.append([name_of(m), m["way"], *sizes])
    table("Most memory of a result and gradients", ["layer", "way", "MiB", "times x and y"], rows)
    show_others(
        [{"missing": {}, "no_gradient": {}, **c, "wrong": {}} for c in found["cells"]], name_of
    )


def name_of(cell: dict[str, Any]) -> str:
    """A layer in words."""
    return f"{cell['layer']}, {cell['channels'][0]} to {cell['channels'][1]}"


def draw(path: Path) -> Path:
    """A picture of a JSON file, beside it: how many times as long others take, by layer."""
    record, found = plots.read(path)
    cells = [c for cloud in found for c in cloud["cells"]]
    panels = []
    for step in STEPS:
        for dtype in dict.fromkeys(c["dtype"] for c in cells):
            mine = [c for c in cells if c["dtype"] == dtype]
            ways = {p: [ratio(c[step], p) for c in mine] for p in PEERS}
            ways = {p: r for p, r in ways.items() if not all(map(math.isnan, r))}
            title = f"{dtype}, {step}: times as long as {OURS}"
            panels.append(plots.Panel(title, [name_of(c) for c in mine], ways))
    return plots.grid(path, [panels], f"layers of MinkowskiNet, {plots.place(record)}", lying=True)
