"""Types of what users call: pyright checks them with the package, nothing runs them."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import sparsetir
from sparsetir import Kernel, Plan, SparseFunc, SparseMatrix, SparseTensor, nn, ops
from sparsetir.tuning.tuned import Tuned, TunedPlan, TunedProgram, TunedSparse


def plans(matrix: SparseMatrix, tensor: SparseTensor) -> None:
    run = assert_type(sparsetir.plan("spmm", matrix, 64, reduce="mean"), Plan)
    assert_type(run.kernel, Kernel)
    assert_type(run.chosen_by, str)
    assert_type(run(np.ones((3, 64))), Any)
    assert_type(matrix.T.tocsr(), Any)
    assert_type(tensor.with_values(tensor.values), SparseTensor)


def searches(matrix: SparseMatrix, tensor: SparseTensor, func: SparseFunc, name: str) -> None:
    tuned = assert_type(sparsetir.tune("spmm", matrix, 64, trials=8, heads=2), Tuned)
    assert_type(tuned.plan(), Plan)
    assert_type(tuned.speedup, float | None)
    assert_type(sparsetir.tune("attention", matrix, 64).plan(), Plan)
    assert_type(sparsetir.tune("softmax", matrix), TunedPlan)
    assert_type(sparsetir.tune("rgms", tensor, 64, feat_in=32), TunedPlan)
    assert_type(sparsetir.tune(name, matrix, 64), Tuned | TunedPlan)
    assert_type(sparsetir.tune("add", matrix, matrix, matrix, trials=2), TunedSparse)
    program = assert_type(sparsetir.tune(func, {"n": 3}, space={"tile": [1]}), TunedProgram)
    assert_type(program.kernel(), Kernel)
    sparsetir.tune("spmm", matrix, 64, trails=8)  # pyright: ignore[reportCallIssue]
    sparsetir.tune("spmm", matrix, 64, seed="a")  # pyright: ignore[reportArgumentType, reportCallIssue]


def kernels(func: SparseFunc) -> None:
    assert_type(sparsetir.build(func), Kernel)
    assert_type(sparsetir.load("kernel.so"), Kernel)
    assert_type(sparsetir.SparseMatrix.from_edge_index(np.ones((2, 3))), SparseMatrix)


def operators(edge_index: Tensor, x: Tensor) -> None:
    g = assert_type(ops.prepare(edge_index, 3), ops.Prepared)
    assert_type(ops.spmm(g, x), Tensor)
    assert_type(ops.gspmm(g, "u_add_e_max", u=x, e=x), Tensor)
    assert_type(ops.edge_softmax(g, x), Tensor)
    assert_type(ops.attention(g, x, x, x, scale=0.5), Tensor)
    assert_type(ops.cache_info(), dict[str, int])


def layers(edge_index: Tensor) -> None:
    layer = nn.GCNConv(16, 8, sparse_features=True)
    assert_type(layer.in_channels, int)
    assert_type(layer.bias, torch.nn.Parameter | None)
    assert_type(layer.forward(torch.ones(3, 16), edge_index), Tensor)
