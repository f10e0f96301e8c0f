"""Attention with a sparse mask, against torch's dense attention with a dense one."""

# pyright: reportAttributeAccessIssue=false

import sys

import numpy as np
import pytest
import torch
import tvm

from pairs import by_default
from refusals import refuse
from sparsetir import masks, ops
from sparsetir.data.mask_blocks import BLOCKS
from sparsetir.ops import masked_attention as module

CLOSE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
TYPES = tuple(CLOSE)


def table(high, wide, seed=0):
    blocks = np.random.default_rng(seed).random((high, wide)) < 0.4
    blocks[0] = False
    return blocks


MASKS = {
    "band": lambda m, b: masks.band(m, 30, b),
    "butterfly": lambda m, b: masks.butterfly(m, b),
    "causal band": lambda m, b: masks.band(m, 30, b) & masks.causal(m, b),
    "bigbird": lambda m, b: masks.bigbird(m, b, random=1),
    "table": lambda m, b: masks.blocks(table(-(-m // b), -(-m // b)), b, (m, m)),
    "wide": lambda m, b: masks.blocks(table(-(-m // b), 5), b, (m, 5 * b - 3)),
}


def operands(mask, feat, width, dtype=torch.float32, batch=2, heads=3):
    rng = torch.Generator().manual_seed(1)
    m, n = mask.shape
    shapes = ((batch, heads, m, feat), (batch, heads, n, feat), (batch, heads, n, width))
    tensors = (torch.randn(s, dtype=torch.float64, generator=rng) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in tensors]


def dense(mask, q, k, v, scale=None):
    """The result in float64; zeros for rows without elements."""
    q, k, v = (x.double() for x in (q, k, v))
    some = mask.any(1)[:, None]
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask | ~some, scale=scale
    )
    return torch.where(some, result, 0)


def check(mask, inputs, given_mask=None):
    """The result and its gradients."""
    dtype = inputs[0].dtype
    result = ops.sparse_attention(*inputs, mask if given_mask is None else given_mask)
    expected = dense(mask.to_dense(), *inputs)
    assert result.dtype == dtype and result.shape == expected.shape
    assert (result - expected).abs().max() <= CLOSE[dtype]
    weights = torch.randn(expected.shape, dtype=torch.float64)
    grads = torch.autograd.grad((result * weights.to(dtype)).sum(), inputs)
    want = torch.autograd.grad((expected * weights).sum(), inputs)
    for g, w in zip(grads, want, strict=True):
        assert g.dtype == dtype
        assert (g - w).abs().max() <= 8 * CLOSE[dtype] * (1 + w.abs().max())
    return result


@pytest.fixture
def by_elements(monkeypatch):
    """Masks of elements are not put in blocks."""
    monkeypatch.setattr(module, "ELEMENT", 0)


@pytest.fixture
def by_small_blocks(monkeypatch):
    """Masks of elements are put in blocks of 16 alone."""
    monkeypatch.setattr(module, "PLACE", {16: 1})


@pytest.mark.parametrize("dtype", by_default(TYPES, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", by_default(MASKS, "causal band", "wide"))
@pytest.mark.parametrize("block", by_default(BLOCKS, 16))
@pytest.mark.parametrize("sizes", by_default([(8, 12), (64, 64), (20, 7)], (8, 12)))
@pytest.mark.default(1)
def test_blocks(name, block, sizes, dtype):
    mask = MASKS[name](100, block)
    check(mask, operands(mask, *sizes, dtype))


# -- masks of elements ----------------------------------------------------------------------------


def as_elements(mask):
    return ops.Operand(*mask.csr, *mask.shape)


@pytest.mark.parametrize(("width", "block"), [(20, 16), (200, 32), (1600, 64)])
def test_size_of_blocks(width, block):
    mask = masks.band(800, width)
    assert module._fitting(ops.structure_of(*mask.csr, 800)).block == block


def test_elements_that_are_there_twice_count_twice():
    rowptr, col = torch.tensor([0, 3]), torch.tensor([0, 0, 1])
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)
    v = torch.tensor([3.0, 0.0]).reshape(1, 1, 2, 1)
    result = ops.sparse_attention(q, k, v, ops.Operand(rowptr, col, 1, 2))
    torch.testing.assert_close(result, torch.full((1, 1, 1, 1), 2.0))


# -- values ---------------------------------------------------------------------------------------


def test_rows_without_elements_give_zeros():
    mask = masks.blocks(np.array([[False, False], [True, False]]), 16)
    inputs = operands(mask, 8, 12)
    result = check(mask, inputs)
    assert not result[..., :16, :].any() and result[..., 16:, :].all()
    none = masks.blocks(np.zeros((2, 2), bool), 16)
    out = ops.sparse_attention(*inputs, none)
    out.sum().backward()
    assert out.shape == result.shape and not out.any()
    assert all(not x.grad.any() for x in inputs)


def test_large_scores_infinities_and_nan():
    mask = masks.causal(40, 16)
    q, k, v = (x.detach() for x in operands(mask, 8, 12, batch=1, heads=1))
    large, expected = (
        ops.sparse_attention(q * 1e4, k, v, mask),
        dense(mask.to_dense(), q * 1e4, k, v),
    )
    assert (large - expected).abs().max() < 1e-2  # differences of scores of 1e4
    before = ops.sparse_attention(q, k, v, mask)
    q[0, 0, 3, 0], v[0, 0, 20, 1], k[0, 0, 35, 2] = torch.nan, torch.inf, -torch.inf
    result = ops.sparse_attention(q, k, v, mask)
    assert result[0, 0, 3].isnan().all() and result[0, 0, 20, 1].isinf()
    other = torch.arange(16) != 3  # rows that share no block with an infinity
    assert torch.equal(result[0, 0, :16][other], before[0, 0, :16][other])
    assert torch.equal(result[0, 0, 16:32, 2:], before[0, 0, 16:32, 2:])
    # A score of +infinity gives NaN, as in a dense softmax, one of -infinity a weight of zero.
    up = q[0, 0, 35:, 2] < 0
    assert (result[0, 0, 35:, 0].isnan() == up).all() and up.any() and not up.all()


def test_torch_knows_the_operators(by_small_blocks):
    mask = masks.band(20, 10, 16)
    inputs = operands(mask, 8, 12)
    arguments = (*inputs, *mask.rows, *mask.columns, 0.5)
    torch.library.opcheck(torch.ops.sparsetir.block_attention.default, arguments)
    elements = (*inputs, *mask.csr, 0.5)
    torch.library.opcheck(torch.ops.sparsetir.element_attention.default, elements)


# -- torch ----------------------------------------------------------------------------------------


def test_no_second_gradients(by_small_blocks):
    mask = masks.band(20, 10, 16)
    inputs = operands(mask, 8, 12)
    for A in (mask, as_elements(mask)):
        out = ops.sparse_attention(*inputs, A).sum()
        (first,) = torch.autograd.grad(out, inputs[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="no gradients of gradients"):
            first.sum().backward()


MASK = masks.band(20, 4, 16)


def test_refusals():
    q, k, v = (x.detach() for x in operands(MASK, 8, 12))
    refuse(
        """
        ops.sparse_attention(None, k, v, MASK)  # TypeError: 'q': expected a tensor, got NoneType
        ops.sparse_attention(q[0], k, v, MASK)  # ValueError: 'q': expected a dense tensor (batch
        ops.sparse_attention(q, k[:1], v, MASK)  # ValueError: 'k': expected batch and heads
        ops.sparse_attention(q, k[..., :2], v, MASK)  # ValueError: 'k': expected head size 8
        ops.sparse_attention(q, k, v[:, :, :9], MASK)  # ValueError: 'v': expected length 20 as 'k'
        ops.sparse_attention(q, k, v.double(), MASK)  # TypeError: 'v': expected float32 as 'q'
        ops.sparse_attention(q.int(), k, v, MASK)  # TypeError: 'q': expected .. , got int32
        ops.sparse_attention(q, k.to("meta"), v, MASK)  # ValueError: 'k': expected to be on cpu
        ops.sparse_attention(q, k, v, masks.band(21, 4))  # ValueError: 'mask': .. (20, 20)
        ops.sparse_attention(q, k, v, as_elements(masks.band(9, 4)))  # ValueError: got (9, 9)
        ops.sparse_attention(q, k, v, MASK.to("meta"))  # ValueError: 'mask': expected to be on cpu
        ops.sparse_attention(q, k, v, torch.ones(20, 20))  # ValueError: 'mask': expected a sparse
        ops.sparse_attention(q, k, v, MASK, "1")  # TypeError: 'scale': expected a number, got str
        """,
        locals(),
        globals(),
    )


def test_what_tiles_do_not_take_goes_by_elements(monkeypatch, by_elements):
    """The types of float32 on a GPU, whose tensor cores take 16 bits."""
    monkeypatch.setattr(module, "_in_tiles", lambda q: False)
    monkeypatch.setattr(module, "_run", None)
    mask = masks.band(70, 9, 16) & masks.causal(70, 16)
    check(mask, operands(mask, 8, 12))
    assert mask.csr is mask.csr  # one pattern for all calls


def test_what_kernels_of_gpus_are_given(monkeypatch):
    """Whole blocks and features in multiples of 16, in the type of q; results are cut to size."""
    calls, cuda = [], tvm.target.Target({"kind": "cuda", "arch": "sm_90"})

    def compiled(key, target, stages, *_):
        text = stages()["III"].script()
        assert target is cuda and "mma" in text and "ldmatrix" in text
        return lambda **args: calls.append(args)

    monkeypatch.setattr(sys.modules["sparsetir.planning.run_plan"], "compiled", compiled)
    monkeypatch.setattr(module, "target_of", lambda device: cuda)
    monkeypatch.setattr(module, "launch", lambda kernel, named: kernel(**named))
    mask = masks.band(40, 8, block=16)
    q, k = (torch.empty(1, 2, 40, 24, dtype=torch.bfloat16, device="meta") for _ in "qk")
    v = torch.empty(1, 2, 40, 20, dtype=torch.bfloat16, device="meta")
    out, lse = module.attention_over_blocks(q, k, v, mask.rows, 0.5)
    assert (out.shape, lse.shape) == ((1, 2, 40, 20), (1, 2, 40))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = module.gradients_over_blocks(q, k, v, out, lse, out, mask.rows, mask.columns, 0.5)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    for call in calls:
        wide = {n: x for n, x in call.items() if torch.is_tensor(x) and x.dim() == 4}
        assert {tuple(x.shape) for x in wide.values()} == {(2, 3, 16, 32)}
        assert {x.dtype for x in wide.values()} == {torch.bfloat16}
        assert (call["rows"], call["cols"], call["heads"]) == (3, 3, 2)
    assert ["out" in x for x in calls] == [True, False, False]
    assert module._in_tiles(q) and not module._in_tiles(q.float())
