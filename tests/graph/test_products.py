"""Products of features and weights against torch, and where graphs take them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sparsetir.graph import products
from sparsetir.graph.expressions import aten
from sparsetir.graph.products import Product, Run, profitable, take_products


def expected(x, y, bias, gradient):
    product = (x.t() if gradient else x).double() @ y.double()
    return (product if bias is None else product + bias.double()).float()


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(128, 104), (64, 8), (3, 5), (33, 24), (16, 40)])
@pytest.mark.parametrize("bias", ["none", "row", "whole", "into"])
@pytest.mark.parametrize("rows", [1, 2, 7, 131, 1000])
def test_sizes(inner, outer, gradient, bias, rows, monkeypatch):
    monkeypatch.setattr(products, "WORK", 0)
    torch.manual_seed(rows)
    x = torch.randn(inner, rows).t()  # not contiguous
    y = torch.randn(rows, outer) if gradient else torch.randn(outer, inner).t()
    shape = {"none": None, "row": (outer,)}.get(bias, (inner if gradient else rows, outer))
    added = None if shape is None else torch.randn(shape)
    wanted = expected(x, y, added, gradient)
    before = None if added is None else added.clone()
    result = Run(gradient)(x, y, *([] if added is None else [added]), into=bias == "into")
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    if bias == "into":
        assert result.data_ptr() == added.data_ptr()
    elif before is not None:
        assert torch.equal(added, before)


def test_what_is_no_number_stays():
    x, y = torch.ones(1000, 64), torch.ones(64, 32)
    x[3, 5], x[999, 0] = float("nan"), float("inf")
    torch.testing.assert_close(Run(False)(x, y), x @ y, equal_nan=True)
    torch.testing.assert_close(Run(True)(x, x[:, :32]), x.t() @ x[:, :32], equal_nan=True)


def test_on_threads(monkeypatch):
    monkeypatch.setattr(products, "pool", lambda: 3)
    x, y = torch.randn(2000, 64), torch.randn(2000, 32)
    product = Product(64, 32, gradient=True)
    assert "T.parallel(3)" in str(product.stages(products.resolve_target("llvm"))["III"])
    monkeypatch.setattr(Product, "kernel", lambda self: compiled_anew(self))
    torch.testing.assert_close(Run(True)(x, y), x.t() @ y, rtol=1e-4, atol=1e-3)


def compiled_anew(product):
    from sparsetir.runtime.pipeline import kernel_of

    target = products.resolve_target("llvm")
    return kernel_of(product.stages(target), target, check=False)


def test_which_are_taken():
    assert profitable(10_000, 128, 64) and profitable(10_000, 64, 7)
    assert not profitable(10, 128, 64)  # too little work
    assert not profitable(10_000, 100, 41)  # vectors that are not filled
    assert not profitable(10_000, 64, 2)
    assert not profitable(10_000, 1000, 1000)  # weights that stay in no cache

    def model(x, w, v, b):
        h = torch.addmm(b, x, w.t())
        return h, x.t() @ h, h @ v, h.double() @ v.double()

    args = [torch.randn(*s) for s in [(5000, 64), (32, 64), (32, 3), (32,)]]
    module = make_fx(model, tracing_mode="fake")(*args)
    take_products(module.graph)
    module.recompile()
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    assert [t.gradient for t in targets if isinstance(t, Run)] == [False, True]
    assert targets.count(aten.mm.default) == 2
    torch.testing.assert_close(module(*args), model(*args), rtol=1e-4, atol=1e-3)
