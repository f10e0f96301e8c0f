"""Arrays whose memory does not hold their numbers, and what torch is to know, at all entrances."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from kernel_common import arguments, expected, kernel
from sparsetir import SparseMatrix, ops

A = sp.random_array((20, 30), density=0.2, format="csr", dtype="float32", rng=0)
B = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
VALUES = torch.from_numpy(A.data.copy())


def planned():
    return sparsetir.plan("spmm", A, feat=16)


def called(b, c=None):
    """A kernel on torch's tensors but for what is given; its result."""
    args = {name: torch.from_numpy(x) for name, x in arguments().items()}
    args |= {"b": b, "c": torch.zeros(20, 16) if c is None else c}
    kernel()(**args)
    return args["c"]


def negative(x):
    return torch._neg_view(x.neg())


def wrapped(x):
    """The wrapper that torch.func gives to traced functions."""
    wrappers = []
    torch.func.vmap(lambda one: (wrappers.append(one), one)[1])(x[None])
    return wrappers[0]


HIDDEN = {
    "negative": (negative, "without the negative bit; give `tensor.resolve_neg\\(\\)`"),
    "zero": (lambda x: torch._efficientzerotensor(x.shape), "got torch._efficientzerotensor"),
    "masked": (lambda x: np.ma.masked_array(x.numpy(), x.numpy() > 0), "without a mask, got a mas"),
    "conjugate": (lambda x: x.to(torch.complex64).conj(), "without the conjugate bit; give"),
    "nested": (lambda x: torch.nested.as_nested_tensor([x]), "a dense tensor, got a nested one"),
    "fake": (lambda x: fake(x), "with memory of its own, got FakeTensor that stands for another"),
    "functorch": (wrapped, "with memory of its own, got Tensor that stands for another"),
}


def fake(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make, message", HIDDEN.values(), ids=HIDDEN)
def test_hidden_numbers_are_refused_by_name(make, message):
    b, out, values = make(B), make(torch.zeros(20, 16)), make(VALUES)
    run = planned()
    entrances = {
        "b": [lambda: called(b), lambda: run(b)],
        "c": [lambda: called(B, out)],
        "out": [lambda: run(B, out=out)],
        "array": [lambda: SparseMatrix.from_dense(b)],
        "values": [lambda: SparseMatrix.from_csr(A.indptr, A.indices, values, A.shape)],
    }
    for name, calls in entrances.items():
        for call in calls:
            with pytest.raises(TypeError, match=f"argument '{name}': expected .*{message}"):
                call()
    if "nested" not in message:  # which have no shape either
        with pytest.raises((TypeError, ValueError), match="argument '(values|a)': expected "):
            run(B, values=values)


def test_operators_resolve_what_plans_refuse():
    wanted = torch.from_numpy(A.toarray()) @ B
    S = torch.sparse_csr_tensor(*map(torch.from_numpy, (A.indptr, A.indices)), VALUES, A.shape)
    torch.testing.assert_close(ops.spmm(S, negative(B)), wanted)
    torch.testing.assert_close(ops.spmm(S, B, values=negative(VALUES)), wanted)
    zeros = torch._efficientzerotensor((30, 16))
    assert (ops.spmm(S, zeros) == 0).all()
    with pytest.raises(TypeError, match="argument 'B': expected a dense tensor, got a nested one"):
        ops.spmm(S, torch.nested.as_nested_tensor([B]))


def test_plans_refuse_operands_that_require_gradients():
    run, wanted = planned(), torch.from_numpy(A.toarray()) @ B
    leaf = B.clone().requires_grad_()
    message = "it requires a gradient, which results of plans do not have; use sparsetir.ops.spmm"
    with pytest.raises(ValueError, match=f"spmm: argument 'b': {message}"):
        run(leaf)
    with pytest.raises(ValueError, match=f"spmm: argument 'b': {message}"):
        run(leaf * 1, out=torch.zeros(20, 16))
    with pytest.raises(ValueError, match=f"spmm: argument 'values': {message}"):
        run(B, values=VALUES.clone().requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(run(leaf), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(run(leaf, out=torch.zeros(20, 16)), wanted)
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        torch.testing.assert_close(run(B), wanted)
        with pytest.raises(ValueError, match=f"spmm: argument 'b': {message}"):
            run(forward.make_dual(B, B))


def test_what_is_written_may_not_require_gradients():
    run, message = planned(), "it is written, and requires a gradient"
    for out in (torch.zeros(20, 16).requires_grad_(), torch.zeros(20, 16).requires_grad_() * 1):
        with pytest.raises(ValueError, match=f"spmm: argument 'c': {message}"):
            called(B, out)
        with pytest.raises(ValueError, match=f"spmm: argument 'out': {message}"):
            run(B, out=out)
        assert not out.any()
    leaf = torch.zeros(20, 16).requires_grad_()
    with torch.no_grad():
        called(B, leaf)
    np.testing.assert_allclose(
        leaf.detach(), expected({**arguments(), "b": B.numpy()}), rtol=1e-5, atol=1e-5
    )


def test_torch_knows_of_what_is_written():
    """A backward pass that needs what was there before fails."""
    run = planned()
    for write in (lambda c: called(B, c), lambda c: run(B, out=c)):
        c, weight = torch.ones(20, 16), torch.ones(20, 16, requires_grad=True)
        product = (c * weight).sum()
        before = c._version
        write(c)
        assert c._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    read = torch.ones(30, 16)
    run(read)
    called(read)
    assert read._version == 0
    with torch.inference_mode():  # whose tensors have no versions
        called(B, torch.zeros(20, 16))
