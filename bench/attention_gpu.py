"""`python -m bench attention --target cuda`: sparse attention on a GPU.

As in figure 16 of the SparseTIR paper: fused in one kernel, and in three steps, beside compiled
FlexAttention, torch's dense attention with the mask and, where blocks are full, its attention over
BSR; results, and results with gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import harness
from bench.attention import FLEX_BLOCKS, HEAD_SIZE, HEADS, LENGTH, MASKS, flex, rule
from bench.blocks_gpu import Device
from bench.harness import beside, inference, refuse_bad, training
from bench.peers.gpu_clock import take_turns
from bench.report import circumstances, table, write
from bench.timing import progress
from bench.unfused import Unfused
from sparsetir import ops
from sparsetir.tuning.serving import one_line

OURS, UNFUSED, DENSE, FLEX, BSR = "sparsetir", "sparsetir unfused", "dense", "flex", "torch bsr"
PEERS = (DENSE, FLEX, BSR)
DTYPES = ("bfloat16", "float16")
COPIES, ROUNDS, CALLS = 3, 5, 10
# Operands are rounded, and weights, which add up to one.
CLOSE = {"bfloat16": 4e-2, "float16": 1e-2, "float32": 1e-4}

Way = Callable[..., Any]


def run(args: argparse.Namespace) -> None:
    """The command; without a device it says so and measures nothing."""
    if harness.cuda() is None:
        return
    length, heads = (512, 2) if args.quick else (args.length or LENGTH, HEADS)
    peers = PEERS if args.peers is None else tuple(args.peers)
    where = {**circumstances(1), **harness.of_gpu(torch)}
    device, cells = Device.gpu(), []
    for name in args.mask:
        for dtype in DTYPES:
            progress(f"{name}, {dtype}")
            cells.append(measure(name, dtype, length, heads, peers, device, args.quick))
            results = {"heads": heads, "head_size": HEAD_SIZE, "cells": cells}
            write(args.out, "attention", where, results, quiet=True)
    progress("")
    show(cells)
    refuse_bad(cells, [c for c in cells if c["wrong"] or OURS in c["missing"]])


def measure(
    name: str, dtype: str, length: int, heads: int, peers: tuple[str, ...], device: Device,
    quick: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Times of results (`forward`), with gradients (`backward`), and of products alone."""
    mask = MASKS[name](length).to(device.name)
    rng = torch.Generator().manual_seed(0)
    to = {"dtype": getattr(torch, dtype), "device": device.name}
    copies = [
        [torch.randn(1, heads, length, HEAD_SIZE, generator=rng).to(**to) for _ in range(4)]
        for _ in range(COPIES)
    ]
    wide = [x.float() for x in copies[0][:3]]
    expected = scaled_dot_product_attention(*wide, attn_mask=mask.to_dense())
    cell: dict[str, Any] = {
        "mask": name, "dtype": dtype, "length": length, "blocks": len(mask.rows.indices),
        "elements": mask.nnz, "missing": {}, "no_gradient": {}, "wrong": {},
    }  # fmt: skip
    ways: dict[str, Way] = {}
    for who, make in makers(name, mask, dtype, peers, device).items():
        try:
            way = make()
            with torch.no_grad():
                error = (way(*copies[0][:3]).float() - expected).abs().max().item()
        except Exception as problem:  # of a peer that is not there, or does not take this
            cell["missing"][who] = one_line(problem)
            continue
        if error < CLOSE[dtype]:
            ways[who] = way
        else:
            cell["wrong"][who] = f"by {error:.2g}"
    forward = {who: by_copy([inference(way, x[:3]) for x in copies]) for who, way in ways.items()}
    backward = {}
    for who, way in ways.items():
        call = by_copy([training(way, x[:3], x[3]) for x in copies])
        try:
            call(0)
            backward[who] = call
        except Exception as problem:
            cell["no_gradient"][who] = one_line(problem)
    counts = (1, 2, COPIES) if quick else (ROUNDS, CALLS, COPIES)
    for what, calls in (("forward", forward), ("backward", backward)):
        cell[what] = take_turns(device.clock, calls, *counts)
    if UNFUSED in ways:
        products = alone(ways[UNFUSED], copies)
        cell["products"] = take_turns(device.clock, products, *counts)
    return cell


def makers(
    name: str, mask: Any, dtype: str, peers: tuple[str, ...], device: Device
) -> dict[str, Callable[[], Way]]:
    """What makes each way, by its name."""
    out: dict[str, Callable[[], Way]] = {
        OURS: lambda: lambda q, k, v: ops.sparse_attention(q, k, v, mask),
        UNFUSED: lambda: Unfused(mask, HEAD_SIZE, dtype, device.kernels),
    }
    if DENSE in peers:
        held = mask.to_dense()
        out[DENSE] = lambda: lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=held)
    if FLEX in peers:
        torch._dynamo.reset()  # which compiles one function only so many times
        for block in FLEX_BLOCKS:
            out[f"{FLEX} {block}"] = lambda block=block: flex(
                rule(name, mask), mask.shape[0], block, device.name
            )
    if BSR in peers:
        out[BSR] = lambda: torch_bsr(mask, dtype)
    return out


def torch_bsr(mask: Any, dtype: str) -> Way:
    """Attention over blocks as torch has it in Triton, for blocks whose elements are all there."""
    from torch.sparse import _triton_ops

    function: Any = _triton_ops._scaled_dot_product_attention
    if function is None:
        raise ValueError("torch has it with triton alone")
    if not bool(mask.full.all()):
        raise ValueError("it takes full blocks")
    dense = mask.to_dense().to(getattr(torch, dtype))
    stored = dense.to_sparse_bsr((mask.block, mask.block))
    return lambda q, k, v: function(q[0], k[0], v[0], stored)[None]


def by_copy(calls: list[Any]) -> Callable[[int], Any]:
    """One call that takes the number of a copy of the operands."""
    return lambda i: calls[i]()


def alone(unfused: Any, copies: list[Any]) -> dict[str, Callable[[int], Any]]:
    """Both products of the way in three steps, and the dense ones by cuBLAS."""
    with torch.no_grad():
        weights = [unfused.sddmm(q, k) for q, k, _, _ in copies]
        full = [torch.bmm(q[0], k[0].transpose(1, 2)) for q, k, _, _ in copies]
    return {
        "sddmm": lambda i: unfused.sddmm(*copies[i][:2]),
        "sddmm dense": lambda i: torch.bmm(copies[i][0][0], copies[i][1][0].transpose(1, 2)),
        "spmm": lambda i: unfused.spmm(weights[i], copies[i][2]),
        "spmm dense": lambda i: torch.bmm(full[i], copies[i][2][0]),
    }


def show(cells: list[dict[str, Any]]) -> None:
    """Print tables."""
    titles = {
        "forward": "Attention, result", "backward": "Attention, result and gradients",
        "products": "Products of attention in three steps",
    }  # fmt: skip
    for what, title in titles.items():
        names = list(dict.fromkeys(n for c in cells for n in c.get(what, {})))
        rows = [
            [c["mask"], c["dtype"], c["blocks"],
             *beside(c.get(what, {}), names, OURS, 1e6, 0, "median")]
            for c in cells
        ]  # fmt: skip
        if names:
            rest = "" if what == "products" else ", and times what sparsetir takes"
            table(f"{title}: median us{rest}", ["mask", "dtype", "blocks", *names], rows)
    for what, text in (("missing", "is missing"), ("no_gradient", "has no gradient here")):
        for name, why in {n: w for c in cells for n, w in c[what].items()}.items():
            print(f"{name} {text}: {why}")
    for cell in cells:
        for name, error in cell["wrong"].items():
            print(f"wrong: {name}, {cell['mask']}, {cell['dtype']}: {error}")
