"""SpMM over blocks of rows, whose blocks are computed parameters: called as the plain one is."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

BLOCKS = {"recipe": "number", "value": 4}
BLOCK_PTR = {"recipe": "equal_work", "indptr": "$indptr", "parts": "$blocks", "cost": 2}
COMPUTED = {"blocks": BLOCKS, "block_ptr": BLOCK_PTR}
PROMISES = [{"param": "feat", "kind": "multiple", "value": 8}]


def blocked(idtype: str = "int32", computed: Any = COMPUTED, promises: Any = PROMISES) -> Any:
    """C[i, k] = sum over j of A[i, j] * B[j, k]."""
    size = getattr(T, idtype)

    @T.prim_func(check_well_formed=False)
    def spmm(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, feat: size, blocks: size, block_ptr: T.handle,
    ) -> None:  # fmt: skip
        T.func_attr({"computed": computed, "promises": promises})
        O = T.dense_fixed(blocks, idtype)
        I = T.dense_variable(O, (m, m), block_ptr, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (O, I, J), "float32")
        B = T.match_sparse_buffer(b, (N, K), "float32")
        C = T.match_sparse_buffer(c, (O, I, K), "float32")
        with T.sp_iter([O, I, K, J], "SSSR", "spmm") as [o, i, k, j]:
            with T.init():
                C[o, i, k] = 0.0
            C[o, i, k] = C[o, i, k] + A[o, i, j] * B[j, k]

    return spmm


def plain_arguments(
    m: int = 20, n: int = 30, feat: int = 16, idtype: str = "int32", seed: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of the plain SpMM by name, with empty rows, the output full of NaN."""
    rng = np.random.default_rng(seed)
    mask = rng.random((m, n)) < 0.3
    mask[::3] = False
    return {
        "a": rng.standard_normal(int(mask.sum())).astype("float32"),
        "b": rng.standard_normal((n, feat)).astype("float32"),
        "c": np.full((m, feat), np.nan, "float32"),
        "indptr": np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(idtype),
        "indices": np.nonzero(mask)[1].astype(idtype),
    }


def sizes(args: dict[str, np.ndarray]) -> dict[str, int]:
    """The numbers that the shapes of the arrays imply."""
    (m, feat), n = args["c"].shape, len(args["b"])
    return {"m": m, "n": n, "nnz": len(args["a"]), "feat": feat}
