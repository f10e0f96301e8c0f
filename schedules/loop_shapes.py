"""The innermost loops of a CPU's scheduled program, in sentences: vectors, tiles, or why not.

For each computing block: its vectors, tiles and prefetches, or the reason why it has none.
"""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.schedules.passes.consecutive_parts import CONSECUTIVE
from sparsetir.schedules.passes.nests import is_offset_of, wide_indices
from sparsetir.sparse_ir.nodes import nodes_of, stores_of, substitute
from sparsetir.sparse_ir.reduction import add_guards, reduction_of, split_guards
from sparsetir.sparse_ir.tir import dtype_of, free_vars, values_of

TILES = re.compile(r"_tile_(\d+(?:_\d+)*)$")


def loop_shapes(lowered: tirx.PrimFunc, scheduled: tirx.PrimFunc) -> dict[str, str]:
    """Sentences about the innermost loops of a stage-II function, by block name.

    lowered : the function before scheduling
    scheduled : the function after it; possibly restricted to the branches that some sizes take
    """
    out: dict[str, str] = {}
    parts = [x for x in nodes_of(tirx.For, scheduled.body) if CONSECUTIVE in x.annotations]
    owned = [b.name_hint for b in nodes_of(s_tir.SBlock, *parts)]
    for loop in nodes_of(tirx.For, lowered.body):
        if not nodes_of(tirx.For, loop.body):
            for realize in nodes_of(s_tir.SBlockRealize, loop.body)[-1:]:
                name = str(realize.block.name_hint)
                if stores_of(realize.block.body):
                    out[name] = _shape(name, scheduled) or _reason(loop, realize)
                    if any(_blocks_of(name).fullmatch(x) for x in owned):
                        out[name] += "; each thread updates the elements that it owns"
    return out


def _blocks_of(name: str) -> re.Pattern[str]:
    """The names of the blocks that a schedule made of one."""
    return re.compile(rf"{re.escape(name)}(_.*)?")


def _shape(name: str, scheduled: tirx.PrimFunc) -> str:
    """The vectors of a block; "" if it has none."""
    blocks_of = _blocks_of(name)
    loops = [x for x in nodes_of(tirx.For, scheduled.body) if x.kind == tirx.ForKind.VECTORIZED]
    blocks = [b for b in nodes_of(s_tir.SBlock, scheduled.body) if blocks_of.fullmatch(b.name_hint)]
    mine, around = set(blocks), {x for b in blocks for x in nodes_of(tirx.For, b.body)}
    lanes = [x for x in loops if x in around or mine & set(nodes_of(s_tir.SBlock, x.body))]
    if not lanes:
        return ""
    widest = max(int(x.extent) for x in lanes)
    matches = (TILES.search(b.name_hint) for b in blocks)
    tiles = sorted({tuple(map(int, m[1].split("_"))) for m in matches if m})
    sums = ", ".join(" + ".join(map(str, tile)) for tile in tiles)
    parts = [f"tiles of {sums} in registers"] if tiles else []
    if any(b.name_hint.endswith("_group") for b in blocks):
        parts.append("the lanes of several elements added up together")
    return "; ".join(parts if tiles else [*parts, f"vectors of at most {widest} lanes"])


def _reason(loop: Any, realize: Any) -> str:
    """Why an innermost loop is not vectorised."""
    reason = _obstacle(loop, realize)
    return f"one by one, as {reason}" if reason else "left to LLVM, which has vectors for it"


def _obstacle(loop: Any, realize: Any) -> str:
    """The first obstacle to vectorisation, or ""."""
    var = loop.loop_var
    body = substitute(realize.block.body, values_of(realize))
    conditions, store = split_guards(body)
    if loop.kind != tirx.ForKind.SERIAL:
        return f"threads run the visits of {var.name}"
    if not isinstance(store, tirx.BufferStore):
        return "its body is more than one store"
    if dtype_of(store.value) == "bool":
        return "there are no vectors of booleans"
    reduces = not any(var in free_vars(i) for i in store.indices)
    for access in [*([] if reduces else [store]), *nodes_of(ir.TensorLoad, add_guards((), store))]:
        buffer = access.buffer if access is store else access.source
        *outer, last = wide_indices(buffer, access.indices) or [tirx.IntImm("int32", 0)]
        loaded = any(isinstance(i, ir.TensorLoad) for i in access.indices)
        if var not in free_vars(access) or (reduces and loaded):
            continue
        if not is_offset_of(last, var) or any(var in free_vars(i) for i in outer):
            idx = ", ".join(map(str, access.indices))
            does = "stores" if access is store else "reads"
            return (
                f"it {does} {buffer.name}[{idx}], which are not next to each other along {var.name}"
            )
    moving = next((c for c in conditions if var in free_vars(c)), None)
    if moving is not None:
        return f"each visit of {var.name} has a condition of its own, {moving}"
    reduction = reduction_of(body) if reduces else None
    if reduces and reduction is None:
        return "what it sums up is no update by one operator"
    if reduction is not None and reduction.operator == "product":
        return "a product keeps its order"
    if reduces and tvm.DataType(dtype_of(store.value)).bits not in (32, 64):
        return f"sums of {dtype_of(store.value)} round in each visit"
    if isinstance(loop.extent, tirx.IntImm):
        return f"{var.name} has {loop.extent} visits"
    if reduces:
        return f"{var.name} is not the only loop of its sum"
    return ""
