"""Attention over blocks and its gradients: programs against the interpreter, and definitions."""

# pyright: reportAttributeAccessIssue=false

import numpy as np
import pytest

import sparsetir
from programs import copied
from sparsetir.schedules.operators import block_attention, block_attention_backward
from sparsetir.schedules.operators.block_attention import BlockAttention
from sparsetir.schedules.operators.block_attention_backward import BlockAttentionBackward
from sparsetir.schedules.operators.edge_attention import EdgeAttention
from sparsetir.schedules.operators.edge_attention import program as edge_program
from sparsetir.schedules.templates import edge_attention
from sparsetir.schedules.templates.block_attention import BlockTiles, apply
from sparsetir.schedules.templates.message_tiles import Tile

HEADS, SCALE = 2, 0.3
# Blocks of 4 rows of 3, the second of which is empty.
TABLE = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]], bool)


def structure(block, transposed=False):
    """Index arrays and elements; of the third kind of blocks some rows are empty."""
    rng = np.random.default_rng(0)
    bits = rng.random((3, block, block)) < 0.5
    bits[0], bits[2, : block // 2] = True, False
    kinds = np.array([0, 1, 2, 1, 0, 2], "int32")
    row, column = TABLE.nonzero()
    whole = np.zeros((*TABLE.shape, block, block), bool)
    whole[row, column] = bits[kinds]
    mask = whole.transpose(0, 2, 1, 3).reshape(len(TABLE) * block, -1)
    if transposed:
        order = np.lexsort((row, column))
        row, column, kinds, bits = column[order], row[order], kinds[order], bits.swapaxes(1, 2)
    sizes = TABLE.shape[::-1] if transposed else TABLE.shape
    words = np.packbits(bits.swapaxes(1, 2), axis=-1, bitorder="little").view("int16")
    indptr = np.searchsorted(row, np.arange(sizes[0] + 1)).astype("int32")
    return mask, {
        "indptr": indptr, "indices": column.astype("int32"), "kind": kinds, "bits": words,
        "heads": HEADS, "rows": sizes[0], "cols": sizes[1], "blocks": len(row), "kinds": len(bits),
    }  # fmt: skip


def operands(problem):
    rng, block = np.random.default_rng(1), problem.block
    rows, cols = TABLE.shape
    shapes = {
        "q": (rows, problem.feat), "k": (cols, problem.feat), "v": (cols, problem.width),
        "grad": (rows, problem.width),
    }  # fmt: skip
    return {
        name: rng.standard_normal((HEADS, blocks, block, size)).astype(problem.dtype)
        for name, (blocks, size) in shapes.items()
    }


def exact(problem, mask):
    """Result, logarithms and gradients in float64, by their definitions."""
    q, k, v, grad = (
        x.astype("float64").reshape(HEADS, -1, x.shape[-1]) for x in operands(problem).values()
    )
    scores = np.where(mask, SCALE * q @ k.swapaxes(1, 2), -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - np.where(np.isinf(lse), 0, lse)[..., None])
    out = weights @ v
    delta = (out * grad).sum(-1)
    dscores = weights * (grad @ v.swapaxes(1, 2) - delta[..., None])
    return {
        "out": out, "lse": lse, "delta": delta, "dq": SCALE * dscores @ k,
        "dk": SCALE * dscores.swapaxes(1, 2) @ q, "dv": weights.swapaxes(1, 2) @ grad,
    }  # fmt: skip


def arguments(problem):
    """Those of a problem's kernel, its results by name, and what they should be."""
    backward = isinstance(problem, BlockAttentionBackward)
    keys = backward and problem.keys
    mask, stored = structure(problem.block, keys)
    wanted, given = exact(problem, mask), operands(problem)
    like = {"out": "grad", "dq": "q", "dk": "k", "dv": "v"}
    results = (["dk", "dv"] if keys else ["dq"]) if backward else ["out", "lse"]
    made = {}
    for name in ("lse", "delta"):
        made[name] = wanted[name].reshape(HEADS, -1, problem.block).astype(problem.accumulator)
    if not backward:
        del given["grad"], made["delta"]
    made |= {
        n: np.empty(operands(problem)[like[n]].shape, problem.dtype) for n in results if n != "lse"
    }
    for name in results:
        made[name] = np.full_like(made[name], np.nan)
    return {**given, **made, **stored, "scale": SCALE}, results, wanted


def check(problem, config, tolerance):
    backward = isinstance(problem, BlockAttentionBackward)
    template = block_attention_backward if backward else block_attention
    program = template.program(problem, config)
    found, results, wanted = arguments(problem)
    expected = copied(found)
    sparsetir.interpret(program, expected)
    sparsetir.build(program, schedule=apply, config=config, check=False)(**found)
    for name in results:
        shape = found[name].shape
        for got in (found, expected):
            np.testing.assert_allclose(
                got[name].astype("float64"), wanted[name].reshape(shape), atol=tolerance, rtol=0
            )


PROBLEMS = [
    BlockAttention(16, 4, 6), BlockAttentionBackward(16, 4, 6),
    BlockAttentionBackward(16, 4, 6, keys=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "problem",
    [PROBLEMS[0], pytest.param(PROBLEMS[1], marks=pytest.mark.slow), PROBLEMS[2]],
    ids=["result", "queries", "keys"],
)
def test_programs(problem):
    check(problem, BlockTiles(8, 2, 3, parallel=False), 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS, ids=["result", "queries", "keys"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_types(problem, dtype):
    tolerance = {"float64": 1e-14, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    changed = type(problem)(**{**vars(problem), "dtype": dtype})
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    check(changed, BlockTiles.for_block(16, 512, changed.accumulator), tolerance)


def test_attention_of_elements_with_heads_first():
    """The same kernel, with heads before rows and columns."""
    rng, heads = np.random.default_rng(0), 2
    indptr, indices = np.array([0, 3, 3, 5], "int32"), np.array([0, 2, 3, 1, 1], "int32")
    shapes = {"q": (3, 5), "k": (4, 5), "v": (4, 6), "out": (3, 6)}
    given = {n: rng.standard_normal((heads, *s)).astype("float32") for n, s in shapes.items()}
    given["out"][:] = np.nan
    rest = {
        "scores": np.zeros(heads * 5, "float32"), "scale": 0.5, "indptr": indptr,
        "indices": indices, "m": 3, "n": 4, "nnz": 5, "heads": heads, "feat": 5, "width": 6,
    }  # fmt: skip
    found = []
    for first in (True, False):
        program = edge_program(EdgeAttention(heads_first=first))
        turned = {n: x if first else x.swapaxes(0, 1).copy() for n, x in given.items()}
        interpreted = {n: x.copy() for n, x in turned.items()}
        sparsetir.interpret(program, {**interpreted, **rest})
        config = edge_attention.AttentionTiles(Tile(4), Tile(4))
        kernel = sparsetir.build(program, schedule=edge_attention.apply, config=config, check=False)
        kernel(**turned, **rest)
        np.testing.assert_allclose(turned["out"], interpreted["out"], atol=1e-6)
        found.append(turned["out"] if first else turned["out"].swapaxes(0, 1))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
