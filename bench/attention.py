"""Sparse attention, beside torch's dense attention with the mask and its FlexAttention."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import plots
from bench.harness import beside, each, finish, in_a_process, inference, most_bytes, training
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir import masks, ops
from sparsetir.tuning.process import go_ahead

OURS, DENSE, FLEX = "sparsetir", "dense", "flex"
PEERS = (DENSE, FLEX)
LENGTH, HEADS, HEAD_SIZE, WIDTH, BLOCK = 4096, 12, 64, 256, 64
# Sizes of blocks of FlexAttention, of which 128 is its default.
FLEX_BLOCKS = (128, 64)
MASKS: dict[str, Callable[[int], Any]] = {
    "band": lambda length: masks.band(length, WIDTH, BLOCK),
    "causal band": lambda length: masks.band(length, WIDTH, BLOCK) & masks.causal(length, BLOCK),
    "butterfly": lambda length: masks.butterfly(length, BLOCK),
    "bigbird": lambda length: masks.bigbird(length, BLOCK),
}
Call = Callable[[], Any]


def near(i: Any, j: Any) -> Any:
    """Whether two positions are in the band."""
    return (i - j).abs() <= WIDTH // 2


def one_digit(i: Any, j: Any) -> Any:
    """Whether the blocks of two positions differ in at most one binary digit."""
    apart = (i // BLOCK) ^ (j // BLOCK)
    return (apart & (apart - 1)) == 0


def rule(name: str, mask: Any) -> Callable[..., Any]:
    """A mask as FlexAttention takes it: a function of positions."""
    if name == "bigbird":  # of which there is no formula
        table = mask.to_dense()[::BLOCK, ::BLOCK].contiguous()
        return lambda b, h, i, j: table[i // BLOCK, j // BLOCK]
    return {
        "band": lambda b, h, i, j: near(i, j),
        "causal band": lambda b, h, i, j: near(i, j) & (j <= i),
        "butterfly": lambda b, h, i, j: one_digit(i, j),
    }[name]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    if args.target == "cuda":
        from bench import attention_gpu

        attention_gpu.run(args)
        return
    length, heads = (256, 2) if args.quick else (args.length or LENGTH, HEADS)
    seconds = 0.05 if args.quick else args.seconds
    peers = PEERS if args.peers is None else tuple(args.peers)
    torch.set_num_threads(args.threads)
    go_ahead()
    cells = each(
        (name, lambda n=name: {"mask": n, **measure(n, length, heads, peers, seconds)})
        for name in args.mask
    )
    progress("memory")
    memories = [peak(OURS, n, heads) for n in (length, 2 * length, 4 * length)]
    memories += [peak(DENSE, length, heads)] if DENSE in peers else []
    progress("")
    show(cells, memories, args.threads)
    results = {"heads": heads, "head_size": HEAD_SIZE, "dtype": "float32"}
    results |= {"cells": cells, "memory": memories}
    finish(args, "attention", results, {c["mask"]: c["wrong"] for c in cells if c["wrong"]}, draw)


def measure(
    name: str, length: int, heads: int, peers: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    """Shortest and median times of results, and of results with gradients."""
    mask = MASKS[name](length)
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, length, HEAD_SIZE, generator=rng) for _ in range(4)]
    *operands, grad = given
    dense = mask.to_dense()
    ways: dict[str, Callable[..., Any]] = {
        OURS: lambda q, k, v: ops.sparse_attention(q, k, v, mask)
    }
    if DENSE in peers:
        ways[DENSE] = lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense)
    missing: dict[str, str] = {}
    if FLEX in peers:
        torch._dynamo.reset()  # which compiles one function only so many times
        for block in FLEX_BLOCKS:
            ways[f"{FLEX} {block}"] = flex(rule(name, mask), length, block)
    expected = scaled_dot_product_attention(*operands, attn_mask=dense)
    wrong: list[str] = []
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    for who, way in ways.items():
        with torch.no_grad():
            error = (way(*operands) - expected).abs().max().item()
        if not error < 1e-4:  # NaN is wrong too
            wrong.append(f"{who} by {error}")
            continue
        forward[who] = inference(way, operands)
    times = interleaved(forward, seconds)
    # Afterwards: what torch.compile has failed for once, it does not compile any more.
    for who in forward:
        try:
            call = training(ways[who], operands, grad)
            call()
            backward[who] = call
        except Exception as problem:  # whatever a peer says that it has no gradient with
            missing[who] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return {
        "length": length, "blocks": len(mask.rows.indices), "elements": mask.nnz,
        "forward": times, "backward": interleaved(backward, seconds),
        "no_gradient": missing, "wrong": wrong,
    }  # fmt: skip


def flex(
    holds: Callable[..., Any], length: int, block: int, device: str = "cpu"
) -> Callable[..., Any]:
    """Compiled FlexAttention with a mask; its blocks are made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    made = create_block_mask(holds, None, None, length, length, device, BLOCK_SIZE=block)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=made)


# -- memory ---------------------------------------------------------------------------------------


def peak(way: str, length: int, heads: int) -> dict[str, Any]:
    """Bytes that a call with gradients takes at most, beside its operands, in its own process."""
    found = in_a_process(_peak, way, length, heads)
    return {"way": way, "mask": "band", "length": length, **found}


def _peak(way: str, length: int, heads: int) -> dict[str, int]:
    taken, blocks = 0, 0
    for size in (128, length):  # the first compiles
        mask = MASKS["band"](size)
        *operands, grad = (torch.randn(1, heads, size, HEAD_SIZE) for _ in range(4))

        def attend(q: Any, k: Any, v: Any, mask: Any = mask) -> Any:
            if way == OURS:
                return ops.sparse_attention(q, k, v, mask)
            return scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense())

        taken, blocks = most_bytes(training(attend, operands, grad)), len(mask.rows.indices)
    operand = heads * length * HEAD_SIZE * 4
    return {"blocks": blocks, "bytes": taken, "operand_bytes": operand}


# -- what is shown --------------------------------------------------------------------------------


def show(cells: list[dict[str, Any]], memories: list[dict[str, Any]], threads: int) -> None:
    for step in ("forward", "backward"):
        names = list(dict.fromkeys(n for c in cells for n in c[step]))
        rows = [[c["mask"], c["blocks"], *beside(c[step], names, OURS, digits=1)] for c in cells]
        what = "result" if step == "forward" else "result and gradients"
        title = f"Attention, {what}: ms, and times what sparsetir takes; threads: {threads}"
        table(title, ["mask", "blocks", *names], rows)
    for name, text in _without_gradient(cells).items():
        print(f"{name} has no gradient here: {text}")
    mb = [
        [m["way"], m["length"], m["blocks"], f"{m['bytes'] / 2**20:.1f}",
         f"{m['bytes'] / m['operand_bytes']:.2f}"]
        for m in memories
    ]  # fmt: skip
    head = ["way", "length", "blocks", "MiB", "times q"]
    table("Most memory of a band's result and gradients, beside operands", head, mb)


def _without_gradient(cells: list[dict[str, Any]]) -> Mapping[str, str]:
    return {name: text for c in cells for name, text in c["no_gradient"].items()}


def draw(path: Path) -> Path:
    """A picture of a JSON file of this command, beside it: bars of milliseconds."""
    plt, record, results = plots.load(path)
    cells, size = results["cells"], (2.4 * len(results["cells"]) + 1, 4)
    figure, axes = plt.subplots(2, len(cells), squeeze=False, figsize=size, sharex="row")
    for row, step in zip(axes, ("forward", "backward"), strict=True):
        for axis, cell in zip(row, cells, strict=True):
            times = [1e3 * t["min"] for t in cell[step].values()]
            plots.bars(axis, [*cell[step]], {"": times}, marked=OURS, lying=True, form="{:.0f}")
            what = "" if step == "forward" else " and gradients"
            axis.set_title(f"{cell['mask']}{what}", fontsize=9)
    heads = f"{results['heads']} heads of {results['head_size']}, float32"
    label = f"ms, length {cells[0]['length']}, {heads}, {plots.place(record)}"
    figure.supxlabel(label, fontsize=8)
    return plots.save(plt, figure, path)
