"""Attention over the stored blocks of a mask, in one kernel: scores are never stored as a whole.

OUT[h, i] = sum over the elements j of row i of softmax(scale * Q[h, i] . K[h, j]) * V[h, j]

The blocks of keys of a row of blocks are visited sequentially. For each row i of queries these
running values cover the keys so far:

    TOP[i]       the greatest score
    SUM[i]       sum of exp(score - TOP[i])
    TOTAL[:, i]  sum of exp(score - TOP[i]) * V[j]

A visit computes the greatest score including its own keys, NEXT[i]. Earlier sums were relative to
the old TOP[i], so they are multiplied by FADE[i] = exp(TOP[i] - NEXT[i]). In the end OUT is TOTAL /
SUM, and LSE = TOP + log(SUM), from which gradients recompute the weights. A row without
elements has TOP = LSE = -infinity and gives zeros.

(FlashAttention-2, Dao 2023, algorithm 1, over the blocks of SparseTIR's section 4.3.1.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.schedules.arguments import expect, expect_at_least, expect_one_of
from sparsetir.schedules.operators.names import DTYPES
from sparsetir.schedules.operators.problems import Problem, memoized
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, cast, reduced, visited

# Bits per word of a block's element mask.
WORD = 16
# The indices of a visit's elements.
ELEMENTS = ("Q", "h io ii f"), ("K", "h jo ji f"), ("V", "h jo ji w")


@dataclass(frozen=True)
class BlockAttention(Problem):
    """The part of attention's arguments that a kernel is compiled for.

    block : rows and columns of a block, a multiple of 16
    feat : features of Q and K
    width : features of V and OUT
    dtype : the type of Q, K, V and OUT; scores and sums are float32 (float64 for float64)
    """

    block: int = 64
    feat: int = 64
    width: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        expect(self, "block", self.block > 0 and self.block % WORD == 0, f"a multiple of {WORD}")
        expect_at_least(self, feat=1, width=1)
        expect_one_of(self, dtype=DTYPES)


@memoized
def program(problem: BlockAttention) -> SparseFunc:
    """The operator as a stage-I function.

    q : (heads, rows, block, feat) ; k : (heads, cols, block, feat)
    v : (heads, cols, block, width) ; out : (heads, rows, block, width)
    lse : (heads, rows, block) in the accumulator's type
    scale : number of that type
    indptr : (rows + 1,) ; indices : (blocks,) columns of blocks, each once in a row
    kind : (blocks,) the index in `bits` of each block's elements, 0 for blocks with all elements;
        callers check its range
    bits : (kinds, block, block / 16) int16: bit ii % 16 of [kind, ji, ii // 16] says whether
        (ii, ji) of a block of this kind is an element; [0] is not read

    `rows` and `cols` count blocks of queries and of keys. Local buffers have the queries of a block
    as their last axis, so that a step does the same for neighbours, whether it sums over features
    or keys.
    """
    acc, score = problem.accumulator, "SCORE[ji, ii]"
    write = begun("block_attention", problem)
    write.buffer("out", "H IO II W", problem.dtype)
    write.buffer("lse", "H IO II", acc)
    write.local(acc, QUERY="F II", SCORE="JI II", TOTAL="W II")
    write.local(acc, **dict.fromkeys(("TOP", "NEXT", "FADE", "SUM"), "II"))
    query, key, value = (write.load(*at, acc) for at in ELEMENTS)
    zero, one, least = (f"T.{acc}({x})" for x in (0, 1, '"-inf"'))
    is_none = f"NEXT[ii] == {least}"
    weighted = f"TOTAL[w, ii] / T.Select(SUM[ii] == {zero}, {one}, SUM[ii])"
    keys = [
        'T.sp_iter_attr({"ordered": 1})',  # each visit updates the running values
        *summed("score", "JI II F", score, f"{key} * QUERY[f, ii]", acc),
        *hidden(score, least),
        *each("before", "II", "TOP[ii] = NEXT[ii]"),
        *visited("top", "JI II", "RS", [f"NEXT[ii] = T.max(NEXT[ii], {score})"]),
        *each("fade", "II", f"FADE[ii] = T.Select({is_none}, {one}, T.exp(TOP[ii] - NEXT[ii]))"),
        *each(
            "powers", "JI II", f"{score} = T.exp({score} - T.Select({is_none}, {zero}, NEXT[ii]))"
        ),
        *each("less", "II", "SUM[ii] = SUM[ii] * FADE[ii]"),
        *visited("sum", "JI II", "RS", [f"SUM[ii] = SUM[ii] + {score}"]),
        *each("shrink", "W II", "TOTAL[w, ii] = TOTAL[w, ii] * FADE[ii]"),
        *summed("weigh", "W II JI", "TOTAL[w, ii]", f"{value} * {score}", acc, begins=False),
    ]
    rows = [
        *each("query", "F II", f"QUERY[f, ii] = {query} * scale"),
        *each("begin", "II", f"NEXT[ii] = {least}", f"SUM[ii] = {zero}"),
        *each("clear", "W II", f"TOTAL[w, ii] = {zero}"),
        *visited("keys", "JO", "R", keys),
        *each("lse", "II", "LSE[h, io, ii] = NEXT[ii] + T.log(SUM[ii])"),
        *each("write", "W II", f"OUT[h, io, ii, w] = {cast(weighted, acc, problem.dtype)}"),
    ]
    write.visit("rows", "H IO", "SS", rows)
    return write.program(
        "q k v out lse scale indptr indices kind bits heads rows cols blocks kinds"
    )


def begun(name: str, problem: BlockAttention, keys: bool = False) -> Writer:
    """A function with the axes, operands and mask of attention.

    keys : whether the mask is transposed: its rows of blocks are of keys
    """
    rows, columns, other = ("JO", "IO", "QO") if keys else ("IO", "JO", "KO")
    queries, cols = (other, rows) if keys else (rows, other)
    write = Writer(name)
    write.dense(H="heads", **{rows: "rows"})
    write.variable(columns, rows, "cols", "blocks", "indptr", "indices")
    write.dense(II=problem.block, JI=problem.block, F=problem.feat, W=problem.width)
    write.dense(**{other: "cols"}, KINDS="kinds", WORDS=problem.block // WORD)
    for array, axes in (("q", f"{queries} II F"), ("k", f"{cols} JI F"), ("v", f"{cols} JI W")):
        write.buffer(array, f"H {axes}", problem.dtype)
    write.buffer("kind", f"{rows} {columns}", "int32")
    write.buffer("bits", f"KINDS {'II' if keys else 'JI'} WORDS", "int16")
    write.fact("coordinates", buffer="KIND", axis="KINDS")
    write.number("scale", problem.accumulator)
    return write


def each(name: str, axes: str, *lines: str) -> list[str]:
    """A step for each coordinate."""
    return visited(name, axes, "S" * len(axes.split()), lines)


def summed(name: str, axes: str, out: str, term: str, acc: str, begins: bool = True) -> list[str]:
    """A step that sums a term over the last of three axes; begins : or adds the sums to `out`."""
    return visited(name, axes, "SSR", reduced("sum", out, term, acc, acc)[0 if begins else 2 :])


def hidden(score: str, instead: str, keys: bool = False) -> list[str]:
    """A step that replaces scores where the mask has no element; keys : as for :func:`begun`."""
    kind, at, axes = (
        ("KIND[jo, io]", "ii ji", "II JI") if keys else ("KIND[io, jo]", "ji ii", "JI II")
    )
    row, bit = at.split()
    word = f"BITS[{kind}, {row}, {bit} // {WORD}]"
    element = f'((T.cast({word}, "int32") >> ({bit} % {WORD})) & 1) != 0'
    line = f"{score} = T.Select({element}, {score}, {instead})"
    return each("hide", axes, f"if {kind} != 0:", f"    {line}")
