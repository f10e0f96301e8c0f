"""Gradients of attention over the stored blocks of a mask; see `block_attention`.

With the gradient G of OUT, the weights P[i, j] = exp(scale * Q[i] . K[j] - LSE[i]) are recomputed,
block by block, and DELTA[i] = G[i] . OUT[i]:

    DS[i, j] = P[i, j] * (G[i] . V[j] - DELTA[i])
    DQ[i] = scale * sum over j of DS[i, j] * K[j]
    DK[j] = scale * sum over i of DS[i, j] * Q[i]
    DV[j] = sum over i of P[i, j] * G[i]

Sums over j run over the rows of blocks, sums over i over those of the transposed mask, so that each
is accumulated by one visit. (FlashAttention-2, Dao 2023, algorithm 2.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.operators.block_attention import (
    ELEMENTS,
    BlockAttention,
    begun,
    each,
    hidden,
    summed,
)
from sparsetir.schedules.operators.problems import memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import cast, visited

PARAMS = "q k v grad lse delta dq dk dv scale indptr indices kind bits heads rows cols blocks kinds"


@dataclass(frozen=True)
class BlockAttentionBackward(BlockAttention):
    """The part of its arguments that a kernel is compiled for, besides :class:`BlockAttention`'s.

    keys : whether the gradients of K and V are computed, instead of that of Q
    """

    keys: bool = False


@memoized
def program(problem: BlockAttentionBackward) -> SparseFunc:
    """The operator as a stage-I function.

    q, k, v, lse : as for attention
    grad : like its result ; delta : like lse
    dq : like q, or with `keys` dk and dv, like k and v
    scale : number of the accumulator's type
    indptr, indices, kind, bits : as for attention; with `keys` those of the transposed mask, whose
        blocks `rows` and `cols` then count
    """
    return _keys(problem) if problem.keys else _queries(problem)


def _queries(problem: BlockAttentionBackward) -> SparseFunc:
    acc, score, dscore = problem.accumulator, "SCORE[ji, ii]", "DSCORE[ji, ii]"
    write = begun("block_attention_dq", problem)
    write.buffer("grad", "H IO II W", problem.dtype, "G")
    write.buffer("lse", "H IO II", acc)
    write.buffer("delta", "H IO II", acc)
    write.buffer("dq", "H IO II F", problem.dtype)
    write.local(acc, QUERY="F II", GRAD="W II", SCORE="JI II", DSCORE="JI II", TOTAL="F II")
    query, key, value = (write.load(*at, acc) for at in ELEMENTS)
    keys = [
        *summed("score", "JI II F", score, f"{key} * QUERY[f, ii]", acc),
        *summed("dweight", "JI II W", dscore, f"{value} * GRAD[w, ii]", acc),
        *each(
            "dscore", "JI II",
            f"{dscore} = T.exp({score} - LSE[h, io, ii]) * ({dscore} - DELTA[h, io, ii])",
        ),
        *hidden(dscore, f"T.{acc}(0)"),
        *summed("weigh", "F II JI", "TOTAL[f, ii]", f"{key} * {dscore}", acc, begins=False),
    ]  # fmt: skip
    rows = [
        *each("query", "F II", f"QUERY[f, ii] = {query} * scale"),
        *each("grad", "W II", f"GRAD[w, ii] = {write.load('G', 'h io ii w', acc)}"),
        *each("clear", "F II", f"TOTAL[f, ii] = T.{acc}(0)"),
        *visited("keys", "JO", "R", keys),
        *each(
            "write",
            "F II",
            f"DQ[h, io, ii, f] = {cast('TOTAL[f, ii] * scale', acc, problem.dtype)}",
        ),
    ]
    write.visit("rows", "H IO", "SS", rows)
    return write.program(PARAMS)


def _keys(problem: BlockAttentionBackward) -> SparseFunc:
    """The gradients of K and V; JO, the transposed mask's rows of blocks, are of keys."""
    dtype, acc = problem.dtype, problem.accumulator
    weight, dscore = "WEIGHT[ii, ji]", "DSCORE[ii, ji]"
    write = begun("block_attention_dkv", problem, keys=True)
    write.buffer("grad", "H QO II W", dtype, "G")
    write.buffer("lse", "H QO II", acc)
    write.buffer("delta", "H QO II", acc)
    write.buffer("dk", "H JO JI F", dtype)
    write.buffer("dv", "H JO JI W", dtype)
    write.local(acc, KEY="F JI", VALUE="W JI", WEIGHT="II JI", DSCORE="II JI")
    write.local(acc, KEYS="F JI", VALUES="W JI")
    query, key, value = (write.load(*at, acc) for at in ELEMENTS)
    grad = write.load("G", "h io ii w", acc)
    queries = [
        *summed("score", "II JI F", weight, f"{query} * KEY[f, ji]", acc),
        *each("weight", "II JI", f"{weight} = T.exp({weight} - LSE[h, io, ii])"),
        *hidden(weight, f"T.{acc}(0)", keys=True),
        *summed("add_values", "W JI II", "VALUES[w, ji]", f"{grad} * {weight}", acc, begins=False),
        *summed("dweight", "II JI W", dscore, f"{grad} * VALUE[w, ji]", acc),
        *each("dscore", "II JI", f"{dscore} = {weight} * ({dscore} - DELTA[h, io, ii])"),
        *summed("add_keys", "F JI II", "KEYS[f, ji]", f"{query} * {dscore}", acc, begins=False),
    ]
    columns = [
        *each("key", "F JI", f"KEY[f, ji] = {key} * scale"),
        *each("value", "W JI", f"VALUE[w, ji] = {value}"),
        *each("clear_keys", "F JI", f"KEYS[f, ji] = T.{acc}(0)"),
        *each("clear_values", "W JI", f"VALUES[w, ji] = T.{acc}(0)"),
        *visited("queries", "IO", "R", queries),
        *each(
            "write_keys", "F JI", f"DK[h, jo, ji, f] = {cast('KEYS[f, ji] * scale', acc, dtype)}"
        ),
        *each("write_values", "W JI", f"DV[h, jo, ji, w] = {cast('VALUES[w, ji]', acc, dtype)}"),
    ]
    write.visit("columns", "H JO", "SS", columns)
    return write.program(PARAMS)
