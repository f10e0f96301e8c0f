"""SpMM of blocks with values of each head on tensor cores: run as CUDA on a CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_default
from sparsetir import interpret
from sparsetir.formats import BSR
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores, apply
from sparsetir.schedules.operators.block_spmm import BlockSpmm, program
from spmm_gpu_common import bfloat16_arrays, check

HEADS, MB, NB = 2, 4, 3
SHAPES = [(16, 32, 72, "bfloat16"), (64, 16, 64, "float16"), (32, 32, 30, "bfloat16")]


def arguments(rows, cols, feat, dtype):
    here = np.zeros((MB, NB), bool)
    here[[0, 2, 2, 2, 3], [1, 0, 1, 2, 0]] = True  # a row without blocks, and one with all
    rng, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    indptr = np.concatenate([[0], np.cumsum(here.sum(axis=1))]).astype("int32")
    return {
        "a": rng.standard_normal((HEADS, indptr[-1], rows, cols)).astype(kind),
        "b": rng.standard_normal((HEADS, NB, cols, feat)).astype(kind),
        "out": np.full((HEADS, MB, rows, feat), np.nan, kind),
        "indptr": indptr, "indices": np.nonzero(here)[1].astype("int32"),
        "heads": HEADS, "mb": MB, "nb": NB, "blocks": int(indptr[-1]), "feat": feat,
    }  # fmt: skip


def exact(args):
    row = np.repeat(np.arange(MB), np.diff(args["indptr"]))
    out = np.zeros(args["out"].shape)
    products = args["a"].astype("float64") @ args["b"].astype("float64")[:, args["indices"]]
    for at, product in zip(row, products.swapaxes(0, 1), strict=True):
        out[:, at] += product
    return out


@requires_cuda_text
@pytest.mark.parametrize("shape", by_default(SHAPES, SHAPES[0]), ids=str)
def test_products_of_blocks(shape):
    rows, cols, feat, dtype = shape
    args = arguments(*shape)
    config = TensorCores.for_features(BSR(rows, cols), feat, dtype)
    stages = CudaStages(program(BlockSpmm(rows, cols, dtype)), apply, config)
    with bfloat16_arrays():
        found = stages(args)["out"]
    bound = 2.0**-8 if dtype == "bfloat16" else 2.0**-11  # the result alone is rounded
    np.testing.assert_allclose(found.astype("float64"), exact(args), rtol=bound, atol=1e-4)


def test_what_it_means():
    shaped = arguments(2, 3, 4, "float32")
    args = {**shaped, **{name: shaped[name].reshape(-1) for name in ("a", "b", "out")}}
    interpret(program(BlockSpmm(2, 3, "float32")), args)
    check(args["out"].reshape(shaped["out"].shape), exact(shaped), "float32")
