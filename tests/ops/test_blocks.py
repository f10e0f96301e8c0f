"""Sparse BSR tensors of torch: products by their blocks, gradients in the order of their values."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from cuda_runner import requires_cuda_text
from pairs import by_turns
from sparsetir import ops
from sparsetir.ops import blocks
from sparsetir.planning.plan import requested as request
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from sparsetir.schedules.search.by_format import by_format
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from spmm_gpu_common import kernel, run_kernel

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def blocked(shape, size, dtype=torch.float32, idtype=torch.int64, seed=0):
    """A BSR tensor, its values with a gradient, and the same dense."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.4
    mask[1] = False
    full = np.kron(mask, np.ones(size))
    full *= rng.standard_normal(full.shape)
    bsr = torch.from_numpy(full).to(dtype).to_sparse_bsr(size)
    values = bsr.values().clone().requires_grad_()
    indices = bsr.crow_indices().to(idtype), bsr.col_indices().to(idtype)
    A = torch.sparse_bsr_tensor(*indices, values, bsr.shape)
    return A, values, torch.from_numpy(full).to(dtype)


def block_values(values, like):
    """The places of blocks in a dense matrix, as values of a BSR tensor."""
    r, c = values.shape[1:]
    return like.reshape(like.shape[0] // r, r, -1, c).transpose(1, 2)


def plans(A):
    """The configs that products with a tensor have had."""
    operand = ops.resolve(A)
    structure = ops.structure_of(*operand[:2], operand.n)
    kept = [structure, *(x for x in (structure.made.get("transposed"),) if x is not None)]
    return [p.plan.config for s in kept for p in s._plans.values() if hasattr(p, "plan")]


CASES = itertools.product(
    [(4, 4), (8, 16), (6, 2), (32, 32)], CLOSE, [torch.int32, torch.int64], [16, 40]
)


@pytest.mark.parametrize("size, dtype, idtype, feat", by_turns(CASES, 7), ids=str)
@pytest.mark.default(2)
def test_products_and_gradients(size, dtype, idtype, feat):
    A, values, dense = blocked((5, 6), size, dtype, idtype)
    wide, B = dense.double(), torch.randn(6 * size[1], feat).to(dtype).requires_grad_()
    out = ops.spmm(A, B)
    grad = torch.randn(out.shape).to(dtype)
    out.backward(grad)
    full = grad.double() @ B.detach().double().T
    rows = torch.repeat_interleave(torch.arange(5), A.crow_indices().diff().long())
    for_values = block_values(values, full)[rows, A.col_indices().long()]
    for result, wanted in (
        (out, wide @ B.detach().double()), (B.grad, wide.T @ grad.double()),
        (values.grad, for_values),
    ):  # fmt: skip
        close = CLOSE[dtype] * (1 + wanted.abs().max().item())
        np.testing.assert_allclose(result.detach().double(), wanted, atol=close)
    names = {c.format.name for c in plans(A) if isinstance(c, BlockRows)}
    assert names == {f"bsr_{r}_{c}" for r, c in (size, size[::-1])}


def test_what_goes_by_elements():
    """Means, few features, no values, and blocks of one row."""
    A, _, dense = blocked((4, 4), (4, 4))
    B = torch.randn(16, 32)
    counts = (dense != 0).sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(ops.spmm(A, B, reduce="mean"), dense @ B / counts)
    torch.testing.assert_close(ops.spmm(A, B[:, :3].contiguous()), dense @ B[:, :3])
    flat, _, other = blocked((4, 4), (1, 4))
    torch.testing.assert_close(ops.spmm(flat, B), other @ B)
    for matrix in (A, flat):
        assert all(isinstance(c, RowTile) for c in plans(matrix))


def test_blocks_of_a_row_in_any_order():
    values = torch.randn(3, 4, 4)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        A = torch.sparse_bsr_tensor([0, 2, 3], [1, 0, 1], values, (8, 8))
    dense = torch.zeros(8, 8)
    dense[:4, 4:], dense[:4, :4], dense[4:, 4:] = values
    B = torch.randn(8, 16, requires_grad=True)
    out = ops.spmm(A, B)
    torch.testing.assert_close(out, dense @ B)
    out.sum().backward()
    torch.testing.assert_close(B.grad, dense.T @ torch.ones(8, 16))


def test_values_beside_a_tensor():
    A, values, _ = blocked((4, 5), (4, 4))
    B, other = torch.randn(20, 16), torch.randn(values.numel())
    dense = torch.sparse_bsr_tensor(
        A.crow_indices(), A.col_indices(), other.view_as(values), A.shape
    ).to_dense()
    torch.testing.assert_close(ops.spmm(A, B, values=other), dense @ B)


@requires_cuda_text
def test_on_a_gpu_tensor_cores_take_them(monkeypatch):
    """The request for a plan, and its kernel with values block by block, on the CPU."""
    A, values, dense = blocked((3, 4), (16, 8), torch.float16)
    operand, target = ops.resolve(A), resolve_target({"kind": "cuda", "arch": "sm_90"})
    structure = ops.structure_of(*operand[:2], operand.n)
    b = np.random.default_rng(1).standard_normal((32, 24)).astype("float16")
    formats: list[str] = []

    def plan(op, matrix, feat, **options):
        fmt = options.pop("format")
        formats.append(fmt.name)
        wanted = request(op, matrix, feat, **options)
        facts = wanted.pattern.coordinates, wanted.statistics, wanted.target
        config = by_format(fmt, wanted.problem, *facts)
        template = wanted.template(config)
        arranged = template.arrange(wanted.pattern, wanted.problem, config)
        assert isinstance(config, TensorCores) and arranged.stored.keeps_order
        args = {**arranged.arguments, **arranged.stored.values(A=values.detach().numpy())}
        args |= {"b": b, "feat": feat, "out": np.full((48, feat), 7, "float16")}
        return run_kernel(kernel(template, wanted.problem, config, as_cuda=True), args)["out"]

    monkeypatch.setattr(blocks, "plan", plan)
    result: Any = structure.blocks.plan(structure.pattern, 24, "float16", target)
    wanted = dense.double().numpy() @ b
    np.testing.assert_allclose(result, wanted, atol=3e-3 * (1 + np.abs(wanted).max()))
    assert structure.blocks.plan(structure.pattern, 24, "float32", target) is None
    other = ops.structure_of(*ops.resolve(blocked((3, 4), (4, 4), torch.float16)[0])[:2], 16)
    assert other.blocks.plan(other.pattern, 24, "float16", target) is None
    assert formats == ["bsr_16_8"]
