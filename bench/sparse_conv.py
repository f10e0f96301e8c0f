"""Sparse convolutions, layer by layer, beside torch's gather, mm and scatter."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.clouds import Layer, layers, read, scene
from bench.harness import each, finish
from bench.report import table
from bench.timing import progress
from bench.ways import Call, Comparison, Device, Table, Way, peaks, show_others, training
from sparsetir.nn import KernelMap, SparseConv3d

OURS, GATHER = "sparsetir", "gather"
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
    found: list[dict[str, Any]] = []
    for name, places in clouds.items():
        todo = (
            (f"{name}, {d}, {at.name}, {at.channels}", partial(measure, at, d, device))
            for d in args.dtype
            for at in islice(layers(places, getattr(torch, d)), 3 if args.quick else None)
        )
        cells = each(todo)
        progress(f"{name}: memory")
        measured = MEASURED_MEMORY[: 1 if args.quick else 2]
        memory = [peak(places, at, way) for at in measured for way in (OURS, GATHER)]
        about = {"cloud": name, "points": len(places)}
        found.append({**about, "cells": cells, "memory": memory})
        progress("")
        show(found[-1], args.threads)
    wrong = [c["wrong"] for cloud in found for c in cloud["cells"] if c["wrong"]]
    finish(args, "sparse_conv", found, wrong)


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


def makers(layer: Layer) -> dict[str, Callable[[], Way]]:
    """What makes each way, by name; of 16-bit types torch's is in float32, as on most CPUs."""
    gather, dtype = gathered(map_of(layer)), layer.points.features.dtype

    def wide(x: Tensor, weight: Tensor) -> Tensor:
        return gather(x.float(), weight.float()).to(dtype)

    return {OURS: lambda: ours(layer), GATHER: lambda: gather if dtype == torch.float32 else wide}


# -- times and memory -----------------------------------------------------------------------------


def measure(layer: Layer, dtype: str, device: Device) -> dict[str, Any]:
    """Times of results, and of results with gradients."""
    x, weight, pairs = layer.points.features, layer.made.weight.detach(), map_of(layer)
    limit = 1e-5 if dtype == "float32" else 0.05
    compared = Comparison([[x, weight]], gathered(pairs), limit, steps=STEPS)
    compared.grads = [torch.randn(pairs.m, weight.shape[-1]).to(x.dtype)]
    found = compared.measure(makers(layer), device)
    about = {"dtype": dtype, "layer": layer.name, "channels": layer.channels}
    return {**about, "inputs": pairs.n, "outputs": pairs.m, "pairs": len(pairs.rows), **found}


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
    made = makers(layer)[way]()
    return {"bytes": training(made, (layer.points.features, weight), grad)}


# -- what is shown --------------------------------------------------------------------------------


def show(found: dict[str, Any], threads: int) -> None:
    """Print tables of times and memory."""
    about = {"layer": name_of, "outputs": lambda c: c["outputs"]}
    about["pairs each"] = lambda c: f"{c['pairs'] / max(1, c['outputs']):.1f}"
    for dtype in dict.fromkeys(c["dtype"] for c in found["cells"]):
        cells = [c for c in found["cells"] if c["dtype"] == dtype]
        for step, what in zip(STEPS, ("result", "result and gradients"), strict=True):
            title = f"{found['cloud']}, {dtype}, {what}: ms, and times ours; threads: {threads}"
            Table(about, OURS).show(title, cells, step)
    rows = []
    for m in found["memory"]:
        sizes = f"{m['bytes'] / 2**20:.1f}", f"{m['bytes'] / m['operand_bytes']:.2f}"
        rows.append([name_of(m), m["way"], *sizes])
    table("Most memory of a result and gradients", ["layer", "way", "MiB", "times x and y"], rows)
    show_others(found["cells"], name_of)


def name_of(cell: dict[str, Any]) -> str:
    """A layer in words."""
    return f"{cell['layer']}, {cell['channels'][0]} to {cell['channels'][1]}"
