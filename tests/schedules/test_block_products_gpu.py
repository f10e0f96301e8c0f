"""SpMM and SDDMM of blocks, with values of each head, on tensor cores: run as CUDA on a CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_default
from sparsetir import interpret
from sparsetir.formats import BSR
from sparsetir.schedules.gpu import block_sddmm, spmm_tensor_cores
from sparsetir.schedules.operators import block_spmm
from spmm_gpu_common import bfloat16_arrays, check

HEADS, MB, NB = 2, 4, 3
SHAPES = [  # whether of an SDDMM, and rows and columns of a block, features, type
    (False, 16, 32, 72, "bfloat16"), (True, 16, 32, 48, "bfloat16"),
    (False, 64, 16, 64, "float16"), (True, 64, 16, 64, "float16"),
    (False, 32, 32, 30, "bfloat16"), (True, 32, 32, 128, "bfloat16"),
]  # fmt: skip


def arguments(sampled, rows, cols, feat, dtype):
    here = np.zeros((MB, NB), bool)
    here[[0, 2, 2, 2, 3], [1, 0, 1, 2, 0]] = True  # a row without blocks, and one with all
    rng, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    indptr = np.concatenate([[0], np.cumsum(here.sum(axis=1))]).astype("int32")
    blocks, high = (HEADS, int(indptr[-1]), rows, cols), (HEADS, MB, rows, feat)
    wide = (HEADS, NB, cols, feat)
    shapes = {"x": high, "y": wide} if sampled else {"a": blocks, "b": wide}
    return {
        **{name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()},
        "out": np.full(blocks if sampled else high, np.nan, kind),
        "indptr": indptr, "indices": np.nonzero(here)[1].astype("int32"),
        "heads": HEADS, "mb": MB, "nb": NB, "blocks": blocks[1], "feat": feat,
    }  # fmt: skip


def exact(args):
    row = np.repeat(np.arange(MB), np.diff(args["indptr"]))
    wide = {name: array.astype("float64") for name, array in args.items() if name in "abxy"}
    if "x" in wide:
        return wide["x"][:, row] @ wide["y"][:, args["indices"]].swapaxes(2, 3)
    out = np.zeros(args["out"].shape)
    products = wide["a"] @ wide["b"][:, args["indices"]]
    for row_of, product in zip(row, products.swapaxes(0, 1), strict=True):
        out[:, row_of] += product
    return out


def program(sampled, rows, cols, feat, dtype):
    if sampled:
        return block_sddmm.program(block_sddmm.BlockSddmm(rows, cols, dtype, feat))
    return block_spmm.program(block_spmm.BlockSpmm(rows, cols, dtype))


@requires_cuda_text
@pytest.mark.parametrize("shape", by_default(SHAPES, *SHAPES[:2]), ids=str)
@pytest.mark.default("(True, 16, 32, 48, 'bfloat16')")
def test_products_of_blocks(shape):
    sampled, rows, cols, feat, dtype = shape
    if sampled:
        apply, config = block_sddmm.apply, block_sddmm.WarpTiles(stages=3)
    else:
        apply = spmm_tensor_cores.apply
        config = spmm_tensor_cores.TensorCores.for_features(BSR(rows, cols), feat, dtype)
    args = arguments(*shape)
    with bfloat16_arrays():
        result = CudaStages(program(*shape), apply, config)(args)["out"]
    bound = 2.0**-8 if dtype == "bfloat16" else 2.0**-11  # the result alone is rounded
    np.testing.assert_allclose(result.astype("float64"), exact(args), rtol=bound, atol=1e-4)


@pytest.mark.parametrize("sampled", [False, True])
def test_what_it_means(sampled):
    shape = sampled, 2, 3, 4, "float32"
    shaped, func = arguments(*shape), program(*shape)
    flat = {n: x.reshape(-1) if n in ("a", "b", "x", "y", "out") else x for n, x in shaped.items()}
    interpret(func, {str(p.name): flat[str(p.name)] for p in func.params})
    check(flat["out"].reshape(shaped["out"].shape), exact(shaped), "float32")
