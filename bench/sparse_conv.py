"""Sparse convolutions, layer by layer, beside torch's gather, mm and scatter."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bench.clouds import Layer, layers, scene
from bench.harness import finish, measure_each, refuse_bad
from bench.report import show_others, show_times
from bench.ways import Comparison, Device, Way
from sparsetir.nn import KernelMap, SparseConv3d
from sparsetir.nn.points import transposed

OURS, GATHER = "sparsetir", "gather"
STEPS = ("forward", "training")


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    device = Device.of(args, least=2)
    assert device is not None
    places = scene(beams=8, turns=200) if args.quick else scene()
    todo = (
        (f"{d}, {layer.name}, {layer.channels}", partial(measure, layer, d, device))
        for d in args.dtype
        for layer in islice(layers(places, getattr(torch, d)), 3 if args.quick else None)
    )
    cells = measure_each(todo)
    clouds = [{"cloud": "generated", "points": len(places), "cells": cells}]
    show(clouds[0], args.threads)
    finish(args, "sparse_conv", clouds)
    refuse_bad(cells)


def map_of(layer: Layer) -> KernelMap:
    """The map from inputs to outputs."""
    conv, places = layer.made, layer.points.places
    if not isinstance(conv, SparseConv3d):
        assert places.before is not None
        fine = places.before[0]
        return transposed(fine.onto(places, conv.conv), fine)
    return places.submanifold(conv.conv) if conv.submanifold else places.reached(conv.conv)[0]


def ours(layer: Layer) -> Way:
    """The layer itself, with these weights."""

    def way(x: Tensor, weight: Tensor) -> Tensor:
        points = layer.points.with_features(x)
        return torch.func.functional_call(layer.made, {"weight": weight}, (points,)).features

    return way


def gathered(pairs: KernelMap) -> Way:
    """Sparse convolution by index_select, mm and index_add_ for each offset."""
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
    """The constructors of ways by name; torch's is in float32 for 16-bit types, as on most CPUs."""
    gather, dtype = gathered(map_of(layer)), layer.points.features.dtype

    def wide(x: Tensor, weight: Tensor) -> Tensor:
        return gather(x.float(), weight.float()).to(dtype)

    return {OURS: lambda: ours(layer), GATHER: lambda: gather if dtype == torch.float32 else wide}


def measure(layer: Layer, dtype: str, device: Device) -> dict[str, Any]:
    """Times of results, and of results with gradients."""
    x, weight, pairs = layer.points.features, layer.made.weight.detach(), map_of(layer)
    limit = 1e-5 if dtype == "float32" else 0.05
    compared = Comparison([[x, weight]], gathered(pairs), limit, steps=STEPS)
    compared.grads = [torch.randn(pairs.m, weight.shape[-1]).to(x.dtype)]
    times = compared.measure(makers(layer), device)
    about = {"dtype": dtype, "layer": layer.name, "channels": layer.channels}
    return {**about, "inputs": pairs.n, "outputs": pairs.m, "pairs": len(pairs.rows), **times}


def show(cloud: dict[str, Any], threads: int) -> None:
    """Print tables of times."""
    about = {"layer": name_of, "outputs": lambda c: c["outputs"]}
    about["pairs each"] = lambda c: f"{c['pairs'] / max(1, c['outputs']):.1f}"
    for dtype in dict.fromkeys(c["dtype"] for c in cloud["cells"]):
        cells = [c for c in cloud["cells"] if c["dtype"] == dtype]
        for step, kind in zip(STEPS, ("result", "result and gradients"), strict=True):
            title = f"{cloud['cloud']}, {dtype}, {kind}: ms, and times ours; threads: {threads}"
            show_times(title, cells, step, about, OURS)
    show_others(cloud["cells"], name_of)


def name_of(cell: dict[str, Any]) -> str:
    """A layer in words."""
    return f"{cell['layer']}, {cell['channels'][0]} to {cell['channels'][1]}"
