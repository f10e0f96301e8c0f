"""Sparse convolutions, layer by layer, beside torch's gather, mm and scatter, and dense ones."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv3d

from bench import plots
from bench.clouds import Layer, layers, read, scene
from bench.harness import finish, geomean, in_a_process, inference, most_bytes, training
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir.nn import KernelMap, SparseConv3d, kernel_map
from sparsetir.nn.kernel_map import Sorted, reached, submanifold
from sparsetir.ops import clear_cache
from sparsetir.plotting.kernel_map import plot_kernel_map
from sparsetir.tuning.process import go_ahead

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
Way = Callable[[Tensor, Tensor], Tensor]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    torch.set_num_threads(args.threads)
    go_ahead()
    seconds = 0.05 if args.quick else args.seconds
    clouds: dict[str, np.ndarray] = {}
    if args.points is None:
        clouds["generated"] = scene(beams=8, turns=200) if args.quick else scene()
    else:
        clouds.update({path.stem: read(path, args.voxel) for path in args.points})
    peers = PEERS if args.peers is None else tuple(args.peers)
    found: list[dict[str, Any]] = []
    for name, places in clouds.items():
        cells = []
        for dtype in args.dtype:
            for at, layer in enumerate(layers(places, getattr(torch, dtype))):
                if args.quick and at > 2:
                    break
                progress(f"{name}, {dtype}, {layer.name}, {layer.channels}")
                cells.append({"dtype": dtype, **measure(layer, peers, seconds)})
        progress(f"{name}: maps and memory")
        maps = [] if args.quick else building(places)
        tried = [OURS, *(p for p in peers if p not in NO_GRADIENTS)]
        memory = [peak(places, at, way) for at in MEASURED_MEMORY[: 1 if args.quick else 2]
                  for way in tried]  # fmt: skip
        found.append({"cloud": name, "points": len(places), "cells": cells, "maps": maps,
                      "memory": memory})  # fmt: skip
        progress("")
        show(found[-1], args.threads)
    wrong = [c["wrong"] for cloud in found for c in cloud["cells"] if c["wrong"]]
    path = finish(args, "sparse_conv", found)
    if args.plot:
        draw(path)
        for name, places in clouds.items():
            draw_map(places, path.with_name(f"{path.stem}-map-{name}.png"))
    if wrong:
        raise SystemExit(f"sparse_conv: wrong: {wrong}")


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
        with_weight = {"weight": weight}
        given = layer.points.with_features(x)
        return torch.func.functional_call(layer.made, with_weight, (given,)).features

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


def dense(layer: Layer) -> Way | None:
    """torch's conv3d on the box around the points, of outputs too; None where that is too large."""
    made, x = layer.made, layer.points
    if not isinstance(made, SparseConv3d) or not made.submanifold:
        return None
    box = math.prod((x.coords.amax(0) - x.coords.amin(0) + 1).tolist())
    cin, cout = layer.channels
    size = box * (cin + cout) * x.features.element_size()
    if size > DENSE_BYTES or 2 * box * made.conv.offsets * cin * cout > DENSE_WORK:
        return None
    at = (x.coords - x.coords.amin(0)).long().unbind(1)
    given = x.dense()

    def way(features: Tensor, weight: Tensor) -> Tensor:
        # The points are in the box already, as dense networks have them.
        del features
        return conv3d(given, weight.permute(4, 3, 0, 1, 2), padding="same")

    def check(features: Tensor, weight: Tensor) -> Tensor:
        return way(features, weight).movedim(1, -1)[at]

    way.check = check  # pyright: ignore[reportFunctionMemberAccess]
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


def ways_of(layer: Layer, peers: tuple[str, ...]) -> dict[str, Way]:
    """By names; peers of 16-bit types also by way of float32."""
    pairs, dtype = map_of(layer), layer.points.features.dtype
    ways: dict[str, Way] = {OURS: ours(layer)}
    if GATHER in peers:
        ways[GATHER] = gathered(pairs)
    if SPARSE in peers and dtype == torch.float32:
        ways[SPARSE] = by_matrices(pairs, dtype)
    if dtype != torch.float32 and GATHER in peers:
        inner = ways[GATHER]
        ways[GATHER + IN_FLOAT32] = lambda x, w: inner(x.float(), w.float()).to(dtype)
    if MM in peers:
        ways[MM] = multiplied(pairs, layer.points.features, layer.channels[1])
    found = dense(layer) if DENSE in peers and dtype == torch.float32 else None
    return ways if found is None else {**ways, DENSE: found}


# -- times and memory -----------------------------------------------------------------------------


def measure(layer: Layer, peers: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Shortest and median times of results, and of results with gradients."""
    x, weight, pairs = layer.points.features, layer.made.weight.detach(), map_of(layer)
    ways = ways_of(layer, peers)
    with torch.no_grad():
        expected = gathered(pairs)(x.float(), weight.float())
        scale = expected.abs().max().item() + 1e-30
        wrong, limit = [], 1e-5 if x.dtype == torch.float32 else 0.05
        for name, way in [*ways.items()]:
            if name == MM:
                continue
            begun = time.perf_counter()
            result = getattr(way, "check", way)(x, weight).float()
            if name + IN_FLOAT32 in ways and time.perf_counter() - begun > MOST_SECONDS:
                del ways[name]
                continue
            error = (result - expected).abs().max().item() / scale
            if not error < limit:  # NaN is wrong too
                wrong.append(f"{layer.name}, {layer.channels}: {name} by {error}")
                del ways[name]
    grad = torch.randn(pairs.m, weight.shape[-1]).to(x.dtype)
    without = {name: inference(way, (x, weight)) for name, way in ways.items()}
    with_them = {
        name: training(way, (x, weight), grad)
        for name, way in ways.items()
        if name not in NO_GRADIENTS
    }
    return {
        "layer": layer.name, "channels": layer.channels, "inputs": pairs.n, "outputs": pairs.m,
        "pairs": len(pairs.rows), "forward": interleaved(without, seconds, least=2),
        "training": interleaved(with_them, seconds, least=2), "wrong": wrong,
    }  # fmt: skip


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
    """Bytes that a layer with gradients takes at most, beside its operands, in its own process."""
    found = in_a_process(_peak, places, at, way, torch.get_num_threads())
    return {"way": way, **found}


def _peak(places: np.ndarray, at: int, way: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    taken, pairs, layer = 0, None, None
    for given in (places[:: len(places) // 500 + 1], places):  # the first compiles
        layer = [x for _, x in zip(range(at + 1), layers(given, torch.float32), strict=False)][-1]
        pairs = map_of(layer)
        x, weight = layer.points.features, layer.made.weight.detach()
        grad = torch.randn(pairs.m, weight.shape[-1])
        call = training(ways_of(layer, (way,))[way], (x, weight), grad)
        taken = most_bytes(call)
    assert pairs is not None and layer is not None
    clear_cache()
    x = layer.points.features
    return {"layer": layer.name, "channels": layer.channels, "bytes": taken,
            "pairs_bytes": 4 * len(pairs.rows) * sum(layer.channels),
            "operand_bytes": x.nbytes + 4 * pairs.m * layer.channels[1]}  # fmt: skip


# -- what is shown --------------------------------------------------------------------------------


def best(times: dict[str, Any], peer: str) -> float:
    """Seconds of a peer's fastest way; not a number where it has none."""
    return min(
        (t["min"] for name, t in times.items() if name.split(IN_FLOAT32)[0] == peer),
        default=math.nan,
    )


def speedups(cells: list[dict[str, Any]], step: str, peer: str) -> list[float]:
    """How many times as long a peer takes, of layers that it has a time for."""
    found = [best(c[step], peer) / best(c[step], OURS) for c in cells]
    return [x for x in found if not math.isnan(x)]


def show(found: dict[str, Any], threads: int) -> None:
    for dtype in dict.fromkeys(c["dtype"] for c in found["cells"]):
        cells = [c for c in found["cells"] if c["dtype"] == dtype]
        for step, what in (("forward", "result"), ("training", "result and gradients")):
            peers = [p for p in PEERS if speedups(cells, step, p)]
            rows = [
                [
                    f"{c['layer']}, {c['channels'][0]} to {c['channels'][1]}", c["outputs"],
                    f"{c['pairs'] / max(1, c['outputs']):.1f}", f"{1e3 * best(c[step], OURS):.2f}",
                    *(_times(best(c[step], p) / best(c[step], OURS)) for p in peers),
                ]
                for c in cells
            ]  # fmt: skip
            means = [f"{geomean(speedups(cells, step, p)):.2f}" for p in peers]
            rows.append(["geometric mean", "", "", "", *means])
            title = f"{found['cloud']}, {dtype}, {what}: ms, and times that; threads: {threads}"
            table(title, ["layer", "outputs", "pairs each", OURS, *peers], rows)
    if found["maps"]:
        rows = [[f"{m['order']}, {m['kernel']}", f"{1e3 * m['min']:.1f}"] for m in found["maps"]]
        table(f"Kernel maps of {found['points']} points, sorting included", ["", "ms"], rows)
    rows = [
        [f"{m['layer']}, {m['channels'][0]} to {m['channels'][1]}", m["way"],
         f"{m['bytes'] / 2**20:.1f}", f"{m['bytes'] / m['operand_bytes']:.2f}"]
        for m in found["memory"]
    ]  # fmt: skip
    table("Most memory of a result and gradients", ["layer", "way", "MiB", "times x and y"], rows)


def _times(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.2f}"


def draw(path: Path) -> Path:
    """A picture of a JSON file, beside it: speed-ups by channels, as figure 23 of SparseTIR."""
    plt, record, found = plots.load(path)
    cells = [c for cloud in found for c in cloud["cells"]]
    dtypes = list(dict.fromkeys(c["dtype"] for c in cells))
    size = (4 * len(dtypes) + 1, 3.2 * 2)
    figure, axes = plt.subplots(2, len(dtypes), squeeze=False, sharex=True, figsize=size)
    colours = {GATHER: "#c8102e", SPARSE: "#0072b2", DENSE: "#009e73", MM: "#8a8a8a"}
    for row, step in zip(axes, ("forward", "training"), strict=True):
        for axis, dtype in zip(row, dtypes, strict=True):
            mine = [c for c in cells if c["dtype"] == dtype]
            at = [math.sqrt(math.prod(c["channels"])) for c in mine]
            for peer, colour in colours.items():
                ratios = [best(c[step], peer) / best(c[step], OURS) for c in mine]
                if not all(map(math.isnan, ratios)):
                    axis.scatter(at, ratios, s=14, color=colour, label=peer)
            axis.axhline(1, color="#8a8a8a", linewidth=0.8)
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_title(f"{dtype}, {step}", fontsize=9)
            axis.legend(fontsize=7, frameon=False)
            plots.plain(axis)
    channels = "$\\sqrt{C_{in} C_{out}}$, layers of MinkowskiNet"
    figure.supxlabel(f"{channels}, {plots.place(record)}", fontsize=8)
    figure.supylabel(f"times as long as {OURS}", fontsize=8)
    return plots.save(plt, figure, path)


def draw_map(places: np.ndarray, picture: Path) -> None:
    """A picture of the kernel map of the first convolution."""
    pairs = kernel_map(torch.from_numpy(np.insert(places, 0, 0, axis=1)), 3)
    plot_kernel_map(pairs).savefig(picture, dpi=150)
    print(f"drawn: {picture.name}")
