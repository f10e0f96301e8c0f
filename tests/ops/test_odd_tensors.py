"""Tensors and arrays of unusual kinds: taken for what they are, or refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import sparsetir
from programs import PROGRAMS
from sparsetir import ops

A = scipy.sparse.random(6, 5, 0.5, "csr", "float32", random_state=0)
A.sort_indices()
ROWS = np.repeat(np.arange(6), np.diff(A.indptr))
EDGES = torch.from_numpy(np.stack([A.indices, ROWS]).astype("int64"))
B = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
ONES = (A != 0).astype("float32") @ B.numpy()
SIZE = (5, 6)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out.untyped_storage().resize_(0)
    return out


@pytest.mark.parametrize("edges", [
    EDGES.numpy().astype(">i8"), np.ascontiguousarray(EDGES.numpy()[:, ::-1])[:, ::-1],
    EDGES.t().contiguous().t(), EDGES.numpy().astype("uint8"),
])  # fmt: skip
def test_edges_in_other_memory(edges: Any) -> None:
    np.testing.assert_allclose(ops.spmm((edges, SIZE), B), ONES, rtol=1e-5)
    np.testing.assert_allclose(sparsetir.plan("spmm", (edges, SIZE), 4)(B), ONES, rtol=1e-5)


def out_of_order() -> torch.Tensor:
    indices = torch.stack([EDGES[1], EDGES[0]]).flip(1)
    return torch.sparse_coo_tensor(indices, torch.from_numpy(A.data), (6, 5), is_coalesced=True)


def plan_of(matrix: Any) -> Any:
    return sparsetir.plan("spmm", matrix, 4)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ops.spmm((EDGES.numpy().astype(object), SIZE), B), TypeError,
     "spmm: argument 'A': expected an array of numbers that torch knows, got one of object"),
    (lambda: ops.spmm((EDGES.to_sparse(), SIZE), B), TypeError,
     r"spmm: argument 'A': expected a sparse matrix or an edge_index .* got torch.sparse_coo"),
    (lambda: ops.spmm((torch.nested.nested_tensor([*EDGES]), SIZE), B), TypeError,
     "spmm: argument 'A': expected .*, got a nested tensor"),
    (lambda: ops.spmm(out_of_order(), B), ValueError,
     r"spmm: argument 'A': expected elements in order of rows, as its is_coalesced\(\) says"),
    (lambda: plan_of((EDGES.to("meta"), SIZE)), TypeError,
     "plan: argument 'matrix': expected a tensor of plain numbers, got one of torch.int64 on meta"),
    (lambda: plan_of((torch.nested.nested_tensor([*EDGES]), SIZE)), TypeError,
     "plan: argument 'matrix': expected a sparse matrix .* got a pair of .*Tensor and tuple"),
    (lambda: plan_of(A)(freed(B)), TypeError,
     "spmm: argument 'b': expected a tensor with memory, got one whose storage was let go of"),
    (lambda: plan_of(A)(B, out=freed(torch.empty(6, 4))), TypeError,
     "spmm: argument 'out': expected a tensor with memory, got one whose storage"),
])  # fmt: skip
def test_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_kernels_are_not_copied(copied: Callable[[Any], Any]) -> None:
    kernel = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
    with pytest.raises(TypeError, match="^Kernel: cannot be pickled or copied; export it"):
        copied(kernel)
