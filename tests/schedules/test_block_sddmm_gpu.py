"""SDDMM of blocks on tensor cores: run as CUDA on a CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_default
from sparsetir import interpret
from sparsetir.schedules.gpu.block_sddmm import BlockSddmm, WarpTiles, apply, program
from spmm_gpu_common import bfloat16_arrays, check

HEADS, MB, NB = 2, 4, 3
SHAPES = [(16, 32, 48, "bfloat16"), (64, 16, 64, "float16"), (32, 32, 128, "bfloat16")]


def arguments(rows, cols, feat, dtype):
    here = np.zeros((MB, NB), bool)
    here[[0, 2, 2, 2, 3], [1, 0, 1, 2, 0]] = True  # a row without blocks, and one with all
    rng, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    indptr = np.concatenate([[0], np.cumsum(here.sum(axis=1))]).astype("int32")
    return {
        "x": rng.standard_normal((HEADS, MB, rows, feat)).astype(kind),
        "y": rng.standard_normal((HEADS, NB, cols, feat)).astype(kind),
        "out": np.full((HEADS, indptr[-1], rows, cols), np.nan, kind),
        "indptr": indptr, "indices": np.nonzero(here)[1].astype("int32"),
        "heads": HEADS, "mb": MB, "nb": NB, "blocks": int(indptr[-1]),
    }  # fmt: skip


def exact(args):
    row = np.repeat(np.arange(MB), np.diff(args["indptr"]))
    x, y = args["x"].astype("float64")[:, row], args["y"].astype("float64")[:, args["indices"]]
    return x @ y.swapaxes(2, 3)


@requires_cuda_text
@pytest.mark.parametrize("shape", by_default(SHAPES, SHAPES[0]), ids=str)
def test_products_of_blocks(shape):
    args = arguments(*shape)
    stages = CudaStages(program(BlockSddmm(*shape)), apply, WarpTiles(stages=3))
    with bfloat16_arrays():
        found = stages(args)["out"]
    bound = 2.0**-8 if shape[3] == "bfloat16" else 2.0**-11  # the result alone is rounded
    np.testing.assert_allclose(found.astype("float64"), exact(args), rtol=bound, atol=1e-4)


def test_what_it_means():
    args = arguments(2, 3, 4, "float32")
    args["out"] = args["out"].reshape(-1)
    args |= {name: args[name].reshape(-1) for name in ("x", "y")}
    interpret(program(BlockSddmm(2, 3, 4, "float32")), args)
    shaped = arguments(2, 3, 4, "float32")
    check(args["out"].reshape(shaped["out"].shape), exact(shaped), "float32")
