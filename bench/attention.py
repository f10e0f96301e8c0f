"""Sparse attention, beside torch's dense attention with the mask and FlexAttention.

As in figure 16 of the SparseTIR paper; on a GPU also torch's attention over BSR.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import run_cells
from bench.report import Form, show_others, show_times
from bench.ways import Comparison, Device, Makers, Way
from sparsetir import masks, ops

OURS, DENSE, FLEX, BSR = "sparsetir", "dense", "flex", "torch bsr"
PEERS = {"cpu": (DENSE, FLEX), "cuda": (DENSE, FLEX, BSR)}
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float16")}
# Operands are rounded, and so are weights, which sum to one.
CLOSE = {"bfloat16": 4e-2, "float16": 1e-2, "float32": 1e-4}
LENGTH, HEADS, HEAD_SIZE, WIDTH, BLOCK = 4096, 12, 64, 256, 64
# Block sizes of FlexAttention, whose default is 128.
FLEX_BLOCKS = (128, 64)
MASKS: dict[str, Callable[[int], Any]] = {
    "band": lambda length: masks.band(length, WIDTH, BLOCK),
    "causal band": lambda length: masks.band(length, WIDTH, BLOCK) & masks.causal(length, BLOCK),
    "butterfly": lambda length: masks.butterfly(length, BLOCK),
    "bigbird": lambda length: masks.bigbird(length, BLOCK),
}


def near(i: Any, j: Any) -> Any:
    """Whether two positions are in the band."""
    return (i - j).abs() <= WIDTH // 2


def one_digit(i: Any, j: Any) -> Any:
    """Whether the blocks of two positions differ in at most one binary digit."""
    apart = (i // BLOCK) ^ (j // BLOCK)
    return (apart & (apart - 1)) == 0


def rule(name: str, mask: Any) -> Callable[..., Any]:
    """A mask in FlexAttention's form: a function of positions."""
    if name == "bigbird":  # it has no formula
        table = mask.to_dense()[::BLOCK, ::BLOCK].contiguous()
        return lambda b, h, i, j: table[i // BLOCK, j // BLOCK]
    return {
        "band": lambda b, h, i, j: near(i, j),
        "causal band": lambda b, h, i, j: near(i, j) & (j <= i),
        "butterfly": lambda b, h, i, j: one_digit(i, j),
    }[name]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    device = Device.of(args)
    if device is None:
        return
    length, heads = (256, 2) if args.quick else (args.length or LENGTH, HEADS)
    peers = PEERS[device.name] if args.peers is None else tuple(args.peers)
    every = ((name, dtype) for name in args.mask or MASKS for dtype in DTYPES[device.name])
    options = length, heads, peers, device
    todo = ((", ".join(one), partial(measure, *one, *options)) for one in every)
    tables = partial(show, threads=args.threads)
    run_cells(args, "attention", todo, tables, ours=OURS, heads=heads, head_size=HEAD_SIZE)


def measure(
    name: str, dtype: str, length: int, heads: int, peers: tuple[str, ...], device: Device
) -> dict[str, Any]:
    """Times of results, and of results with gradients."""
    mask = MASKS[name](length).to(device.name)
    rng = torch.Generator().manual_seed(0)
    to = {"dtype": getattr(torch, dtype), "device": device.name}
    copies = [
        [torch.randn(1, heads, length, HEAD_SIZE, generator=rng).to(**to) for _ in range(4)]
        for _ in range(device.copies)
    ]
    compared = Comparison(
        [x[:3] for x in copies], dense(mask), CLOSE[dtype], [x[3] for x in copies]
    )
    times = compared.measure(makers(name, mask, dtype, peers, device), device)
    about = {"mask": name, "dtype": dtype, "length": length}
    return {**about, "blocks": len(mask.rows.indices), "elements": mask.nnz, **times}


def makers(name: str, mask: Any, dtype: str, peers: tuple[str, ...], device: Device) -> Makers:
    """The constructors of ways, by name."""
    out: dict[str, Callable[[], Way]] = {OURS: lambda: ours(mask)}
    if DENSE in peers:
        out[DENSE] = lambda: dense(mask)
    if FLEX in peers:
        torch._dynamo.reset()  # it compiles one function only a limited number of times
        for block in FLEX_BLOCKS:
            out[f"{FLEX} {block}"] = lambda block=block: flex(
                rule(name, mask), mask.shape[0], block, device.name
            )
    if BSR in peers:
        out[BSR] = lambda: torch_bsr(mask, dtype)
    return out


def ours(mask: Any) -> Way:
    """Fused, over the blocks of the mask."""
    return lambda q, k, v: ops.sparse_attention(q, k, v, mask)


def dense(mask: Any) -> Way:
    """Attention that computes all scores and masks some."""
    held = mask.to_dense()
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=held)


def flex(holds: Callable[..., Any], length: int, block: int, device: str = "cpu") -> Way:
    """Compiled FlexAttention with a mask; its blocks are computed beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(holds, None, None, length, length, device, BLOCK_SIZE=block)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def torch_bsr(mask: Any, dtype: str) -> Way:
    """Torch's Triton attention over blocks, for blocks without missing elements."""
    from torch.sparse import _triton_ops

    function: Any = _triton_ops._scaled_dot_product_attention
    if function is None:
        raise ValueError("torch has it with triton alone")
    if not bool(mask.full.all()):
        raise ValueError("it takes full blocks")
    stored = mask.to_dense().to(getattr(torch, dtype)).to_sparse_bsr((mask.block, mask.block))
    return lambda q, k, v: function(q[0], k[0], v[0], stored)[None]


def show(cells: list[dict[str, Any]], threads: int) -> None:
    """Print tables of times."""
    gpu = bool(cells) and cells[0].get("dtype", "float32") != "float32"
    form = Form(1e6, 0, "median") if gpu else Form(digits=1)
    where = "median us" if gpu else f"threads: {threads}; ms"
    for step, results in (("forward", "result"), ("backward", "result and gradients")):
        title = f"Attention, {results}: {where}, and times what sparsetir takes"
        show_times(title, cells, step, ("mask", "dtype", "blocks"), OURS, form)
    show_others(cells, lambda c: c["mask"])
