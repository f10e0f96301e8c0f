"""Linear layers with pruned weights, against dense ones with the same weights in float64."""

import copy
import doctest
import importlib
import itertools
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch.nn.functional import linear
from tvm.target import Target

import sparsetir
from cuda_runner import CudaFunction, requires_cuda_text
from pairs import by_turns
from refusals import refusals
from small import small
from sparsetir import ScheduleError
from sparsetir.nn import SparseLinear, prune, sparse_linears
from sparsetir.ops import block_linear as operator
from sparsetir.ops.tensors import plain_tensor
from sparsetir.runtime.signature import signature_of
from sparsetir.schedules.operators.block_linear import BlockLinear, BlockOuter, program
from sparsetir.schedules.templates.block_linear import BlockTile, apply
from spmm_gpu_common import bfloat16_arrays

CLOSE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def made(out, features, block, dtype=torch.float32, bias=True, sparsity=0.6):
    torch.manual_seed(0)
    dense = torch.nn.Linear(features, out, bias, dtype=dtype)
    return SparseLinear.from_linear(dense, sparsity=sparsity, block=block)


def close(result, wanted, dtype, terms):
    bound = CLOSE[dtype] * (1 + wanted.abs().max().item()) * terms**0.5
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=bound)


BLOCKS = [(32, 32), (16, 8), (8, 16), (4, 4), (6, 2), (64, 32), None]
CASES = itertools.product(BLOCKS, CLOSE, [(3, 13, 192), (192,), (5, 192), (0, 192)])


@pytest.mark.parametrize("block, dtype, shape", by_turns(CASES, 11), ids=str)
@pytest.mark.default(3)
def test_forward_and_backward(block, dtype, shape):
    layer = made(384, 192, block, dtype, bias=shape != (5, 192))
    weight = layer.dense_weight().double().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().double()
    x = torch.randn(shape).to(dtype).requires_grad_()
    other = x.detach().double().requires_grad_()
    result, wanted = layer(x), linear(other, weight, bias)
    assert result.dtype == dtype and result.shape == wanted.shape and result.is_contiguous()
    if not result.numel():
        return
    grad = torch.randn(result.shape).to(dtype)
    result.backward(grad)
    wanted.backward(grad.double())
    close(result, wanted, dtype, 1)
    close(x.grad, other.grad, dtype, 1)
    stored = SparseLinear(weight.grad, layer.dense_weight() != 0, None, block).values
    close(layer.values.grad, stored, dtype, len(grad.reshape(-1, 384)))
    if bias is not None:
        tokens = grad.double().reshape(-1, 384)
        close(layer.bias.grad, tokens.sum(0), dtype, len(tokens))


@pytest.mark.parametrize("block", [(4, 4), None])
@pytest.mark.default("None")
def test_second_gradients(block):
    layer = made(12, 8, block, torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def run(x, values, bias):
        parameters = {"values": values, "bias": bias}
        return torch.func.functional_call(layer, parameters, (x,))

    assert torch.autograd.gradcheck(run, (x, layer.values, layer.bias))
    assert torch.autograd.gradgradcheck(run, (x, layer.values, layer.bias))


@pytest.mark.parametrize("block", [(8, 8), None])
def test_compiled_in_one_graph(block):
    layer = made(32, 16, block)
    x = torch.randn(7, 16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    out.sum().backward()
    torch.testing.assert_close(out, layer(x))
    torch.testing.assert_close(x.grad, layer.dense_weight().sum(0).expand(7, 16))


@pytest.mark.parametrize("block", [(8, 8), None])
def test_state_dictionaries(block):
    """Go from one layer to another whose pattern is different, but for the number of weights."""
    one, other = made(32, 16, block), made(32, 16, block)
    x = torch.randn(4, 16)
    with torch.no_grad():
        mask = prune(torch.randn(32, 16), 0.6, block)
        other = SparseLinear(torch.randn(32, 16), mask, torch.randn(32), block)
        other(x)
        other.load_state_dict(one.state_dict())
        torch.testing.assert_close(other(x), one(x), rtol=0, atol=0)
    assert set(one.state_dict()) == {"values", "indptr", "indices", "bias"}


def test_examples_in_docstrings():
    tests = doctest.testmod(importlib.import_module("sparsetir.nn.sparse_linear"))
    assert tests.attempted and not tests.failed


def test_under_autocast():
    layer = made(32, 16, (8, 8))
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), rtol=0.02, atol=0.02)


def test_threads_and_one_kernel_for_all_patterns():
    """Enough work for threads; sizes and patterns are not compiled in."""
    layer = made(128, 128, (16, 16))
    x = torch.randn(600, 128)
    torch.testing.assert_close(layer(x), linear(x, layer.dense_weight(), layer.bias))
    before = sparsetir.compilations()
    for sparsity in (0.2, 0.5):
        other = made(256, 128, (16, 16), sparsity=sparsity)
        torch.testing.assert_close(other(x), linear(x, other.dense_weight(), other.bias))
    assert sparsetir.compilations() == before


def test_what_is_pruned():
    dense = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        dense.weight.copy_(torch.tensor(
            [[9.0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [2, 0, 3, -4]]
        ))  # fmt: skip
    weight = dense.weight.detach()
    make = SparseLinear.from_linear
    torch.testing.assert_close(make(dense).dense_weight(), weight)
    assert make(dense).values.numel() == 6
    kept = make(dense, threshold=2.5).dense_weight()
    assert kept.tolist() == torch.where(weight.abs() > 2.5, weight, 0).tolist()
    assert make(dense, mask=weight > 0).values.tolist() == [9, 1, 1, 2, 3]
    assert make(dense, sparsity=0.75, block=(2, 2)).dense_weight()[:2, :2].tolist() == [
        [9, 0],
        [0, 1],
    ]
    assert make(dense, block=(2, 2)).sparsity == 0
    assert make(dense, sparsity=0.5, block=(2, 2)).sparsity == 0.5
    assert prune(weight, 1).sum() == 0 and prune(weight, 0).all()
    nothing = make(dense, sparsity=1.0, block=(2, 2))
    assert nothing(torch.ones(3, 4)).tolist() == [[0.0] * 4] * 3
    assert repr(make(dense, block=(4, 2))) == (
        "SparseLinear(in_features=4, out_features=4, bias=False, sparsity=0.00, block=(4, 2))"
    )


@pytest.mark.parametrize(
    "how, stored",
    [({}, 24), ({"threshold": 0.5}, None), ({"sparsity": 0.25}, 48), ({"block": (4, 8)}, 64)],
)
def test_weights_that_torch_prunes(how, stored):
    """Are as the next call has them, an optimiser's step later; kept zeros are stored."""
    dense, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    torch_prune.l1_unstructured(dense, "weight", 0.25)
    torch_prune.l1_unstructured(dense, "weight", 0.5)  # of the rest: a container of methods
    with torch.no_grad():
        dense.weight_orig.normal_()
        dense.weight_orig[tuple(dense.weight_mask.nonzero()[0])] = 0
    layer = SparseLinear.from_linear(dense, **how)
    assert set(layer.state_dict()) == {"values", "indptr", "indices", "bias"}
    wanted = dense(x)
    if stored is None:
        stored = (dense.weight.abs() > 0.5).sum()
        wanted = linear(x, dense.weight.where(dense.weight.abs() > 0.5, 0), dense.bias)
    torch.testing.assert_close(layer(x), wanted)
    assert layer.values.numel() == stored


@pytest.mark.parametrize("how", [{}, {"threshold": 2.0}, {"block": (2, 2)}, {"sparsity": 0.5}])
def test_weights_that_are_not_numbers_are_kept(how):
    dense = torch.nn.Linear(4, 4)
    with torch.no_grad():
        dense.weight[1, 2] = torch.nan
        dense.weight[3, 1] = torch.inf
    kept = SparseLinear.from_linear(dense, **how).dense_weight()
    assert kept[1, 2].isnan() and kept[3, 1] == torch.inf


def described(layer):
    """A module's attributes besides hooks and its weight."""
    weight = layer.values if isinstance(layer, SparseLinear) else layer.weight
    flags = [(x.requires_grad, x.dtype, x.device) for x in (weight, layer.bias)]
    kept = layer.scale is SCALE, layer.count is COUNT, layer.other is OTHER, layer.name, layer.none
    return flags, layer.training, kept, layer._non_persistent_buffers_set


SCALE, COUNT, OTHER = torch.nn.Parameter(torch.ones(1)), torch.ones(1), torch.nn.ReLU()


@pytest.mark.parametrize("one, two, three", [(0, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)])
def test_what_torch_keeps_of_a_module_is_kept(one, two, three):
    """Hooks survive copies, and swaps of layers, by their handles."""
    dense = torch.nn.Linear(8, 8, dtype=torch.float64 if one else torch.bfloat16).train(bool(two))
    dense.weight.requires_grad_(bool(three))
    dense.bias.requires_grad_(bool(two))
    dense.name, dense.other = "a", OTHER
    dense.register_parameter("scale", SCALE)
    dense.register_parameter("none", None)
    dense.register_buffer("count", COUNT, persistent=bool(one))
    before, calls = described(dense), []
    if two == three:
        torch_prune.l1_unstructured(dense, "weight", 0.5)

    def called(*args):
        calls.append(len(args))

    handles = [
        dense.register_forward_pre_hook(called), dense.register_forward_hook(called),
        dense.register_forward_pre_hook(called, with_kwargs=True),
        dense.register_forward_hook(called, with_kwargs=True, always_call=True),
        dense.register_full_backward_pre_hook(called), dense.register_full_backward_hook(called),
    ]  # fmt: skip
    copied, model = SparseLinear.from_linear(dense), torch.nn.ModuleList([dense])
    sparse_linears(model, threshold=0.0)
    x = torch.randn(2, 8, dtype=dense.bias.dtype, requires_grad=True)
    for layer in (dense, copied, model[0]):
        calls.clear()
        layer(x).sum().backward()
        assert sorted(calls) == [2, 2, 3, 3, 3, 4]
    assert described(copied) == described(model[0]) == before
    for handle in handles:
        handle.remove()
    calls.clear()
    model[0](x).sum().backward()
    assert not calls and not model[0]._forward_pre_hooks


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.dense = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)


class Model(torch.nn.Module):
    """A model with a list of layers, one used twice, a tied output, and attention."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 8)
        self.layer = torch.nn.ModuleList(Layer() for _ in range(2))
        self.again = self.layer[0].query
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight


def test_layers_of_a_model():
    model = Model()
    swapped = sparse_linears(model, sparsity=0.5, block=(4, 4))
    assert swapped == [
        "layer.0.query", "layer.0.dense", "layer.1.query", "layer.1.dense", "again"
    ]  # fmt: skip
    assert model.again is model.layer[0].query and isinstance(model.again, SparseLinear)
    assert type(model.head) is torch.nn.Linear and model.head.weight is model.embedding.weight
    assert isinstance(model.attention.out_proj, torch.nn.Linear)
    assert model.layer[1].dense.block == (4, 4) and model.layer[1].dense.sparsity == 0.5
    some = Model()
    assert sparse_linears(some, "layer.*.dense", sparsity=0.5) == ["layer.0.dense", "layer.1.dense"]
    chosen = lambda name, layer: layer.out_features == 8 and "1" in name  # noqa: E731
    assert sparse_linears(some, chosen, threshold=0.0) == ["layer.1.query"]
    assert copy.deepcopy(some).layer[0].dense.values.equal(some.layer[0].dense.values)


def test_layers_of_torchs_transformers():
    """Their fast paths for inference would read weights instead of calling layers."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.arange(5) > torch.tensor([[4], [2]])
    with torch.no_grad():
        expected = model(x), model(x, src_key_padding_mask=padding)
        # The encoder looks at its first layer only, and nests the inputs of the others.
        last: Any = model.layers[1]
        last.linear1 = SparseLinear.from_linear(last.linear1, sparsity=0)
        last.linear2 = SparseLinear.from_linear(last.linear2, sparsity=0, block=(8, 8))
        nested = model(x), model(x, src_key_padding_mask=padding)
        names = [f"layers.0.linear{i}" for i in (1, 2)]
        assert sparse_linears(model, sparsity=0) == names
        dense = model(x), model(x, src_key_padding_mask=padding)
    for results in nested, dense:
        torch.testing.assert_close(results[0], expected[0])
        torch.testing.assert_close(results[1][~padding], expected[1][~padding])


def changed(change):
    dense = torch.nn.Linear(6, 4)
    change(dense)
    return dense


def test_where_a_layer_is_refused_none_is_swapped():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LazyLinear(4))
    model[1].register_forward_hook(print)
    with pytest.raises(ValueError, match="sparse_linears: layer '1': .*, got sizes that its first"):
        sparse_linears(model)
    assert type(model[0]) is torch.nn.Linear
    assert sparse_linears(model, "0", sparsity=0) == ["0"]
    assert sparse_linears(model, lambda *_: False) == []


def test_layers_that_nobody_has_pruned_stay():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = 0.0
    assert sparse_linears(model) == ["1"] and type(model[0]) is torch.nn.Linear


def own_forward(dense):
    dense.forward = dense.forward


class Bilinear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * x


nn, utils = torch.nn, torch.nn.utils
parametrized = utils.parametrizations
DENSE = torch.nn.Linear(6, 4)
LAYER = made(32, 16, (8, 8))
SINGLE = SparseLinear.from_linear(DENSE, sparsity=0.5)


test_refusals = refusals(
    """
prune(torch.ones(3), 0.5)  # ValueError: prune: argument 'weight': expected two
prune(torch.ones(2, 2), 1.5)  # ValueError: 'sparsity': expected 0 to 1, got 1.5
prune(torch.ones(4, 6), 0.5, (4, 4))  # ValueError: prune: argument 'block': expected
SparseLinear.from_linear(DENSE, block=(3, 2))  # ValueError: divide .. got (3, 2)
SparseLinear.from_linear(DENSE, block=4)  # ValueError: 'block': .. got 4
SparseLinear.from_linear(torch.nn.ReLU())  # TypeError: expected a torch.nn.Linear
SparseLinear.from_linear(DENSE, torch.ones(4, 6))  # ValueError: 'mask': expected bool of shape (4
SparseLinear.from_linear(DENSE, sparsity=0.5, threshold=0.1)  # ValueError: expected one of 'mask'
SparseLinear.from_linear(DENSE, threshold=float("nan"))  # ValueError: 'threshold': .. got nan
SparseLinear.from_linear(DENSE, threshold=-1)  # ValueError: 'threshold': expected 0 or more, got -1
SparseLinear.from_linear(Bilinear(4, 4))  # ValueError: cannot keep, got a forward of its own
SparseLinear.from_linear(changed(own_forward))  # ValueError: got a forward of its own
SparseLinear.from_linear(changed(parametrized.weight_norm))  # ValueError: got parametrizations
SparseLinear.from_linear(changed(utils.spectral_norm))  # ValueError: got a weight .. at each call
SparseLinear.from_linear(changed(utils.weight_norm))  # ValueError: got a weight or bias
SparseLinear.from_linear(changed(lambda x: torch_prune.random_unstructured(x, "bias", 0.5)))
    # ValueError: got a weight or bias that is computed at each call: .. prune.remove of torch.nn
SparseLinear.from_linear(nn.LazyLinear(4))  # ValueError: got sizes that its first call tells
SparseLinear.from_linear(nn.Linear(4, 4, device="meta"))  # ValueError: got parameters on the device
SparseLinear.from_linear(changed(lambda x: x.register_state_dict_pre_hook(print)))
    # ValueError: got hooks of state dictionaries
SparseLinear.from_linear(changed(lambda x: x.register_load_state_dict_post_hook(print)))
    # ValueError: got hooks of state dictionaries
SparseLinear.from_linear(changed(lambda x: x.weight.register_hook(print)))
    # ValueError: got hooks of its parameters
SparseLinear.from_linear(changed(lambda x: x.bias.register_post_accumulate_grad_hook(print)))
    # ValueError: got hooks of its parameters
SparseLinear.from_linear(changed(lambda x: setattr(x, "sparsity", 0.5)))
    # ValueError: expected no attributes with names of a SparseLinear's, got ['sparsity']
sparse_linears(nn.Sequential(changed(parametrized.orthogonal)))  # ValueError: layer '0': .. param
sparse_linears(Model(), "layer")
    # ValueError: 'names': .. full names .. ('layer.0.query', .. got 'layer', which matches
sparse_linears(Model(), "head")  # ValueError: 'names': .. got 'head', which matches none
sparse_linears(DENSE, "*.dense")  # ValueError: 'names': .. (there are none), got '*.dense'
sparse_linears(Model(), "layer.1.*")
    # ValueError: 'model': expected weights that are zero, or .. got none in ['layer.1.query'
sparse_linears(DENSE, mask=None)  # TypeError: argument 'mask': expected none
LAYER(torch.ones(2, 5))  # ValueError: 'x': expected 16 features, got shape (2, 5)
SINGLE(torch.ones(2, 5))  # ValueError: SparseLinear: argument 'x': expected 6 features, got shape
SINGLE(None)  # TypeError: SparseLinear: argument 'x': expected a tensor, got NoneType
SINGLE(torch.ones(2, 6).double())  # TypeError: 'x': expected float32 as the weights, got float64
SINGLE(torch.ones(2, 7))  # ValueError: 'x': expected 6 features, got shape (2, 7)
nn.functional.linear(torch.ones(2, 6), SINGLE.weight)
    # TypeError: linear: expected a dense weight, got that of a SparseLinear, .. its dense_weight()
LAYER(torch.ones(2, 16).double())  # TypeError: 'x': expected float32 as the other
BlockTile(lanes=3)  # ValueError: 'lanes': expected a power of two, got 3
BlockTile(tile=0)  # ValueError: BlockTile: argument 'tile'
BlockLinear(0, 4)  # ValueError: BlockLinear: argument 'rows'
BlockOuter(4, 4, "int8")  # ValueError: BlockOuter: argument 'dtype'
operator.block_outer(torch.ones(2, 4), 3, *[torch.zeros(1, dtype=torch.int32)] * 2, 4, 4)
    # TypeError: block_outer: argument 'y': expected a tensor, got int
    """,
    globals(),
)


def test_a_program_of_another_shape_is_refused():
    func = small("sums", """
with T.sp_iter([I, K], "SR", "sums") as [i, k]:
    with T.init():
        C[i] = 0.0
    C[i] = C[i] + A[i, k]
""", A="I K", C="I")  # fmt: skip
    expected = "BlockTile: .* expected 'sums' to be a reduction over blocks or over tokens"
    with pytest.raises(ScheduleError, match=expected):
        sparsetir.build(func, schedule=apply, config=BlockTile())


@pytest.mark.parametrize("shape", [(600, 64), (1, 64)])
def test_sums_are_vectors_in_registers(shape):
    problem = BlockLinear(32, 32)
    config = BlockTile.for_block(problem, (512, 32), shape[0], False)
    assert config == BlockTile(8 if shape[0] > 1 else 1, 16, False)
    assert BlockTile.for_block(BlockOuter(32, 12), (256, 16), 9, True) == BlockTile(2, 8, True)
    text = sparsetir.build(program(problem), schedule=apply, config=config).source("asm")
    if "zmm" in text:
        assert len(re.findall(r"vfmadd\w+ps\s.*zmm", text)) >= 2 * config.tile


@pytest.mark.parametrize("block", [(8, 4), (4, 8)])
def test_blocks_elsewhere_than_on_a_cpu(monkeypatch, block):
    """Elsewhere the products are dense."""
    layer, x = made(32, 16, block), torch.randn(3, 16, requires_grad=True)
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(
            sys.modules["sparsetir.ops.block_linear"], "_has_kernels", lambda _, k=kernels: k
        )
        out = layer(x)
        wanted = (x, layer.values, layer.bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Kernels of GPUs in the place of others, their CUDA text run on the CPU; those compiled."""
    compiled_for: list[str] = []

    def compiled(key, target, stages, *_):
        lowered = stages()
        compiled_for.append(type(key[0]).__name__)
        names = [str(p.name) for p in lowered["III"].params]
        signature, function = signature_of(lowered), CudaFunction(lowered["III"])

        def run(**args):
            sizes = [args.get(name) for name in signature.names]
            for name in signature.names:
                if torch.is_tensor(args[name]):
                    shape = signature.expected_shape(signature.position[name], sizes)
                    assert [*args[name].shape] == shape and args[name].is_contiguous()
            arrays = {
                n: x.view(torch.int16).numpy().view("bfloat16")
                if torch.is_tensor(x) and x.dtype == torch.bfloat16
                else x.numpy() if torch.is_tensor(x) else x
                for n, x in args.items()
            }  # fmt: skip
            with bfloat16_arrays():
                out = function({n: arrays[c] for n, c in zip(names, signature.passed, strict=True)})
            result = out[names[signature.passed.index("out")]]
            args["out"].view(torch.int16).copy_(torch.from_numpy(result.view("int16")))

        return run

    monkeypatch.setattr(sys.modules["sparsetir.planning.run_plan"], "compiled", compiled)
    monkeypatch.setattr(operator, "target_of", lambda _: Target({"kind": "cuda", "arch": "sm_90"}))
    monkeypatch.setattr(operator, "_has_kernels", lambda _: False)

    def launch(kernel, named):
        kernel(**{n: plain_tensor(x) if torch.is_tensor(x) else x for n, x in named.items()})

    monkeypatch.setattr(operator, "launch", launch)
    return compiled_for


@requires_cuda_text
@pytest.mark.parametrize(
    "block, dtype", by_turns([((8, 16), torch.float16), ((32, 16), torch.bfloat16)], 2), ids=str
)
@pytest.mark.slow
def test_blocks_on_tensor_cores(as_on_a_gpu, block, dtype):
    layer = made(64, 48, block, dtype)
    x = torch.randn(5, 48).to(dtype).requires_grad_()
    result, other = layer(x), x.detach().double().requires_grad_()
    wanted = linear(other, layer.dense_weight().double(), layer.bias.detach().double())
    result.backward(torch.ones_like(result))
    wanted.sum().backward()
    close(result, wanted, dtype, 2)
    close(x.grad, other.grad, dtype, 1)
    assert as_on_a_gpu == ["BlockSpmm", "BlockSpmm"]


@pytest.mark.parametrize("block, dtype", [((6, 2), torch.float16), ((16, 16), torch.float32)])
def test_products_that_are_dense_on_a_gpu(as_on_a_gpu, block, dtype):
    layer = made(96, 48, block, dtype)
    x = torch.randn(5, 48).to(dtype)
    with torch.no_grad():
        close(layer(x), linear(x, layer.dense_weight(), layer.bias).double(), dtype, 1)
    assert as_on_a_gpu == []
