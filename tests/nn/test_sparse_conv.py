"""Sparse convolutions beside torch's dense ones."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv3d, conv_transpose3d

from refusals import refusals
from sparsetir.nn import (
    OnFeatures,
    SparseConv3d,
    SparseConvTranspose3d,
    SparsePoints,
    kernel_map,
    points,
)

LOW, PERIOD = -12, 24  # of a box around all that small clouds reach; multiples of all strides


def cloud(
    seed: int, n: int, channels: int, batches: int = 1, extent: int = 6, dtype: Any = torch.float64
) -> SparsePoints:
    """Up to n points in no order around the origin."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.randint(-extent // 2, extent - extent // 2, (n, 3), generator=generator)
    batch = torch.randint(0, batches, (n, 1), generator=generator)
    coords = torch.unique(torch.cat([batch, grid], 1), dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)]
    features = torch.randn(len(coords), channels, generator=generator, dtype=torch.float64)
    return SparsePoints(coords, features.to(dtype), batches)


def in_box(x: SparsePoints, stride: Any = (1, 1, 1)) -> Tensor:
    """Features in a box as large for all clouds; strides divide its place."""
    low = tuple(LOW // s for s in stride)
    return x.dense(low, tuple(PERIOD // s for s in stride))


def values_at(dense: Tensor, coords: Tensor, stride: Any = (1, 1, 1)) -> Tensor:
    """(n, channels) of the numbers of a dense result that such a box gave."""
    b, *cell = coords.long().unbind(1)
    cell = [x - LOW // s for x, s in zip(cell, stride, strict=True)]
    return dense.movedim(1, -1)[b, cell[0], cell[1], cell[2]]


triples = st.tuples(*[st.integers(1, 3)] * 3)
clouds = {"seed": st.integers(0, 99), "n": st.sampled_from([0, 1, 2, 30, 60])}
few = settings(max_examples=15, deadline=None)


@pytest.mark.filterwarnings("ignore:Using padding")
@few
@given(
    kernel=st.tuples(*[st.integers(1, 4)] * 3), dilation=triples, batches=st.integers(1, 3),
    channels=st.sampled_from([(1, 1), (3, 2), (16, 5)]), **clouds,
)  # fmt: skip
def test_outputs_at_inputs(
    kernel: Any, dilation: Any, batches: int, channels: Any, seed: int, n: int
) -> None:
    cin, cout = channels
    x = cloud(seed, n, cin, batches)
    layer = SparseConv3d(cin, cout, kernel, dilation=dilation).double()
    y = layer(x)
    weight = layer.weight.permute(4, 3, 0, 1, 2)
    dense = conv3d(in_box(x), weight, layer.bias, padding="same", dilation=dilation)
    assert y.places is x.places and y.batch_size == batches
    torch.testing.assert_close(y.features, values_at(dense, x.coords))


@few
@given(
    kernel=triples, stride=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3), dilation=triples,
    padding=st.tuples(*[st.integers(0, 3)] * 3), **clouds,
)  # fmt: skip
def test_all_outputs_that_are_reached(
    kernel: Any, stride: Any, dilation: Any, padding: Any, seed: int, n: int
) -> None:
    x = cloud(seed, n, 2, 2)
    how = {"stride": stride, "padding": padding, "dilation": dilation}
    layer = SparseConv3d(2, 3, kernel, submanifold=False, **how).double()
    y = layer(x)
    dense = conv3d(in_box(x), layer.weight.permute(4, 3, 0, 1, 2), layer.bias, **how)
    torch.testing.assert_close(y.features, values_at(dense, y.coords, stride))
    # Outputs are where anything is reached, in order, and the rest of the result is bias.
    ones = in_box(x.with_features(torch.ones(len(x), 1).double()))
    counts = conv3d(ones, torch.ones(1, 1, *kernel).double(), **how)
    expected = counts[:, 0].nonzero() + torch.tensor([0, *(LOW // s for s in stride)])
    assert torch.equal(y.coords, expected.to(torch.int32))
    assert y.stride == stride


@few
@given(kernel=triples, stride=triples, padding=st.tuples(*[st.integers(0, 2)] * 3), **clouds)
def test_back_onto_points(kernel: Any, stride: Any, padding: Any, seed: int, n: int) -> None:
    x = cloud(seed, n, 2, 2)
    how = {"stride": stride, "padding": padding}
    coarse = SparseConv3d(2, 3, 2, stride=(2, 2, 2), submanifold=False).double()(x)
    same = SparseConv3d(2, 3, kernel, submanifold=False, **how).double()(x)
    layer = SparseConvTranspose3d(3, 4, kernel, **how).double()
    weight = layer.weight.permute(3, 4, 0, 1, 2)
    # From the points that this convolution made, and from others.
    for given_, onto in ((same, None), (coarse, x)):
        y = layer(given_, onto)
        dense = conv_transpose3d(in_box(given_, stride), weight, layer.bias, **how)
        assert y.places is x.places
        torch.testing.assert_close(y.features, values_at(dense, x.coords))


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed: bool) -> None:
    x = cloud(1, 8, 2, 2, extent=3)
    down = SparseConv3d(2, 2, 3, stride=2, padding=1).double()
    up = SparseConvTranspose3d(2, 3, 3, stride=2, padding=1).double()
    here = SparseConv3d(2, 3, (3, 2, 1)).double()

    def run(features: Tensor, *_: Tensor) -> Tensor:
        points = x.with_features(features)
        return up(down(points)).features if transposed else here(points).features

    layers = (down, up) if transposed else (here,)
    parameters = [p for layer in layers for p in layer.parameters()]
    torch.autograd.gradcheck(run, (x.features.requires_grad_(), *parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.default(1)
def test_dtypes(dtype: torch.dtype) -> None:
    x = cloud(2, 60, 5, dtype=dtype)
    layer = SparseConv3d(5, 7, 3).to(dtype)
    exact = SparseConv3d(5, 7, 3).double()
    exact.load_state_dict(layer.state_dict())
    features = [x.features.clone().requires_grad_(), x.features.double().requires_grad_()]
    result, wanted = (
        f(x.with_features(a)).features for f, a in zip((layer, exact), features, strict=True)
    )
    assert result.dtype == dtype
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(result.double(), wanted, **tolerance)
    for y in (result, wanted):
        y.sum().backward()
    pairs = [(features[0].grad, features[1].grad), (layer.weight.grad, exact.weight.grad)]
    for a, b in pairs:
        assert a is not None and b is not None and a.dtype == dtype
        torch.testing.assert_close(a.double(), b, **{**tolerance, "atol": 0.1})


def test_gradients_of_gradients() -> None:
    """Gradients of gradients at the same points, and from coarse ones back to fine ones."""
    x = cloud(5, 12, 2, extent=3)
    same, down = SparseConv3d(2, 2, 3).double(), SparseConv3d(2, 2, 2, 2).double()
    up = SparseConvTranspose3d(2, 2, 2, 2).double()

    def net(features: Tensor, *weights: Tensor) -> Tensor:
        result = x.with_features(features)
        for layer, weight in zip((same, down, up), weights, strict=True):
            result = torch.func.functional_call(layer, {"weight": weight}, (result,))
        return result.features

    weights = [layer.weight.detach().clone() for layer in (same, down, up)]
    leaves = [v.requires_grad_() for v in (x.features, *weights)]
    torch.autograd.gradgradcheck(net, leaves, fast_mode=True)


@pytest.mark.parametrize("strides", [False, True])
@pytest.mark.default("False")
def test_compile(strides: bool) -> None:
    """Outputs with strides are located outside of the graphs, which hold all products."""
    torch.compiler.reset()
    x, act, graphs = cloud(6, 30, 2), OnFeatures(torch.nn.ReLU()), []
    first, second = SparseConv3d(2, 2, 3).double(), SparseConv3d(2, 2, (1, 3, 1)).double()
    if strides:
        first = SparseConv3d(2, 2, 2, stride=2).double()
        second = SparseConvTranspose3d(2, 2, 2, stride=2).double()

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    def model(features: Tensor) -> Tensor:
        return second(act(first(x.with_features(features)))).features.square().sum()

    results = []
    for f in (model, torch.compile(model, fullgraph=not strides, backend=backend)):
        features = x.features.clone().requires_grad_()
        result = f(features)
        results.append(
            [result, *torch.autograd.grad(result, [features, first.weight, second.weight])]
        )
    torch.testing.assert_close(*results)
    assert sum("points_sum" in target for graph in graphs for target in graph) == 2
    results = torch.compile(model, fullgraph=not strides, backend="aot_eager")(x.features)
    torch.testing.assert_close(results, model(x.features))


def test_checks_of_torch() -> None:
    x = cloud(7, 20, 3)
    numbers = [3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    features, weight = x.features.requires_grad_(), torch.randn(27, 3, 2, dtype=torch.float64)
    where = (x.places.coords, None, numbers)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    library = torch.ops.sparsetir
    torch.library.opcheck(
        library.points_sum, (features, weight.requires_grad_(), *where, True), test_utils=tests
    )
    args = (features, torch.randn_like(features), *where)
    torch.library.opcheck(library.points_weight, args, test_utils=tests)


def test_coordinates_whose_places_are_gone() -> None:
    """Operators in compiled code may outlive what they were traced with."""
    x = cloud(8, 20, 3)
    layer = SparseConv3d(3, 2, 3, bias=False).double()
    weight, numbers = layer.weight.flatten(0, 2), list(layer.conv.numbers)
    coords = x.coords.clone()
    result = torch.ops.sparsetir.points_sum(x.features, weight, coords, None, numbers, False)
    torch.testing.assert_close(result, layer(x).features)


def test_maps_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    maps: list[str] = []
    for name in ("submanifold", "reached", "between"):
        original = getattr(points, name)
        monkeypatch.setattr(points, name, lambda *a, f=original, n=name: (maps.append(n), f(*a))[1])
    x = cloud(3, 40, 4)
    first, second = SparseConv3d(4, 4, 3).double(), SparseConv3d(4, 4, 3).double()
    down = SparseConv3d(4, 4, 2, stride=2).double()
    up = SparseConvTranspose3d(4, 4, 2, stride=2).double()
    act = OnFeatures(torch.nn.BatchNorm1d(4), torch.nn.ReLU()).double()
    for _ in range(2):
        low = down(act(second(first(x))))
        up(first(low)).features.sum().backward()
    assert maps == ["submanifold", "reached", "submanifold"]
    again = SparsePoints(x.coords, x.features)
    assert again.places is SparsePoints(x.coords, x.features).places


def test_a_map() -> None:
    """Points 0 and 2 are neighbours along z, 1 is alone."""
    coords = torch.tensor([[0, 0, 0, 1], [0, 5, 0, 0], [0, 0, 0, 0]])
    kmap = kernel_map(coords, (1, 1, 3))
    assert kmap.row_ptr.tolist() == [0, 1, 4, 5]
    assert kmap.rows.tolist() == [0, 0, 1, 2, 2]
    assert kmap.indices.tolist() == [2, 0, 1, 2, 0]
    assert kmap.indptr.tolist() == list(range(6)) and (kmap.m, kmap.n) == (3, 3)
    coarse = kernel_map(coords, 2, stride=2)
    assert coarse.coords.tolist() == [[0, 0, 0, 0], [0, 2, 0, 0]]
    assert [coarse.rows.tolist(), coarse.indices.tolist()] == [[0, 0, 1], [2, 0, 1]]


def test_points_far_apart() -> None:
    far = 2**31 - 1
    coords = torch.tensor([[0, -far, 0, 3], [0, far, 0, 2], [7, far, 0, 3]])
    kmap = kernel_map(coords, 3)
    assert kmap.rows.tolist() == [0, 1, 2] and kmap.offsets == 27


def ones_at(*rows: Any, **how: Any) -> Any:
    coords = torch.tensor(rows, **how)
    return SparsePoints(coords, torch.ones(len(rows), 2))


X = cloud(0, 9, 2, dtype=torch.float32)


test_refusals = refusals(
    r"""
SparsePoints([[0, 1, 2, 3]], X.features)  # TypeError: 'coords': expected a tensor, got list
ones_at([0.0, 1, 2, 3])  # TypeError: 'coords': expected integers, got float32
ones_at([0, 1, 2])  # ValueError: 'coords': expected shape (n, 4) of batch, x, y and z, got
ones_at([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3])  # ValueError: 'coords': .. got [0, 1, 2, 3] again
ones_at([-1, 1, 2, 3])  # ValueError: 'coords': expected batches of at least 0, got -1
ones_at([0, 1, 2**31, 3])  # ValueError: 'coords': expected coordinates within 2^31, got 2147483648
ones_at([0, 2**31 - 1, 2**31 - 1, 0], [0, -(2**31), -(2**31), 9])  # ValueError: 'coords': expected
SparsePoints(X.coords, X.features[1:])  # ValueError: 'features': expected shape ( .. , channels) as
X.with_features(X.features.int())  # TypeError: 'features': expected float32, float16 .. got int32
X.with_features(X.features.to("meta"))  # ValueError: 'features': expected to be on cpu .. got meta
SparsePoints(X.coords + 4, X.features, 0)  # ValueError: 'batch_size': expected 5 or more .. got 0
SparsePoints(X.coords, X.features, 1.5)  # TypeError: 'batch_size': expected an integer, got 1.5
X.dense((0, 0, 0), (2, 2, 2))  # ValueError: 'size': expected a box with all .. got (2, 2, 2) from
SparseConv3d(0, 2, 3)  # ValueError: SparseConv3d: argument 'in_channels': expected 1 or more, got 0
SparseConv3d(2, 2, (3, 3))  # ValueError: 'kernel_size': expected one number or three, got (3, 3)
SparseConv3d(2, 2, 0)  # ValueError: 'kernel_size': expected 1 or more, got 0
SparseConv3d(2, 2, 3, stride=1.0)  # TypeError: 'stride': expected an integer, got 1.0
SparseConv3d(2, 2, 3, padding=1)  # ValueError: 'padding': expected None, as outputs are at .. got 1
SparseConvTranspose3d(2, 2, 3, padding=-1)  # ValueError: 'padding': expected 0 or more, got -1
SparseConv3d(2, 2, 3)(X.features)  # TypeError: 'x': expected SparsePoints, got Tensor
SparseConv3d(3, 2, 3)(X)  # ValueError: SparseConv3d: argument 'x': expected 3 channels, got 2
SparseConv3d(2, 2, 3).half()(X)  # TypeError: 'x': expected features of float16 as .. got float32
SparseConvTranspose3d(2, 2, 2)(X)  # ValueError: 'onto': expected points, as x came from no strided
SparseConvTranspose3d(2, 2, 2)(X, X.coords)  # TypeError: 'onto': expected SparsePoints, got Tensor
kernel_map(X.coords.float(), 3)  # TypeError: 'coords': expected integers, got float32
kernel_map(torch.tensor([[0, 0, 0, 2**31 - 1]]), 1, 1, 1, 1, False)
    # ValueError: kernel_map: argument 'coords': expected outputs within 2^31, got one at
        2147483648
    """,
    globals(),
)
