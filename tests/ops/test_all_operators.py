"""Each operator of the table: values, gradients, transforms, compilation, and errors."""

# pyright: reportAttributeAccessIssue=false

import itertools

import pytest
import torch
from torch.func import grad, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from ops_common import DTYPES, assert_close
from ops_table import MORE, OPS, PATTERNS, SMALL
from pairs import by_turns
from sparsetir import ops

EDGES = PATTERNS["edges"]
EACH = pytest.mark.parametrize("name", OPS)
COUNTED = [name for name, op in OPS.items() if op.counted]
SOME = pytest.mark.parametrize(
    "name", by_turns(COUNTED, 3) + by_turns([name for name in OPS if name not in COUNTED], 2)
)
TURNS = ["float32", "bfloat16", "float32", "float16"]  # float64 is what most tests here take
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


def weights_of(x, seed=9):
    return torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(op, case, dtype="float32", inputs=None):
    """The result and its gradients, beside those of float64."""
    kind = getattr(torch, dtype)
    inputs = op.operands(case, kind) if inputs is None else inputs
    exact = [x.detach().double().requires_grad_() for x in inputs]
    result, want = op.call(case.A, *inputs), op.exact(case, *exact)
    assert result.dtype == kind and result.shape == want.shape
    assert_close(result / op.close, want / op.close, dtype)
    with torch.no_grad():
        assert torch.equal(op.call(case.A, *inputs), result)
    weights = weights_of(want)
    grads = torch.autograd.grad((result * weights.to(kind)).sum(), inputs)
    for x, y in zip(grads, torch.autograd.grad((want * weights).sum(), exact), strict=True):
        assert x.dtype == kind
        assert_close(x / op.close / 4, y / op.close / 4, dtype)


@pytest.mark.parametrize(("name", "dtype", "half"), [
    pytest.param(name, dtype, half, marks=[] if (dtype, half) == quick else [pytest.mark.slow])
    for n, name in enumerate(OPS) for quick in [(TURNS[n % len(TURNS)], n // 2 % 2)]
    for dtype in DTYPES for half in (0, 1)
])  # fmt: skip
def test_patterns(name, dtype, half):
    for case in [*PATTERNS.values()][half::2]:
        if not OPS[name].ones or isinstance(case.A, tuple):
            check(OPS[name], case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_messages(name):
    for dtype in DTYPES:
        check(MORE[name], EDGES, dtype)


@SOME
@pytest.mark.default(9)
def test_gradients_of_gradients(name):
    """Gradients of gradients, by finite differences."""
    op = OPS[name]
    inputs = op.operands(SMALL, torch.float64)

    def call(*operands):
        return op.call(SMALL.A, *operands)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@SOME
def test_gradients_of_some_operands(name):
    """Whichever of them take gradients."""
    op = OPS[name]
    inputs = op.operands(SMALL, torch.float64)
    all_of_them = torch.autograd.grad(op.call(SMALL.A, *inputs).sin().sum(), inputs)
    for wanted in itertools.product([False, True], repeat=len(inputs)):
        leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted)]
        out = op.call(SMALL.A, *leaves)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.sin().sum().backward()
        for leaf, want, grad_of in zip(leaves, wanted, all_of_them):
            assert (leaf.grad is None) != want
            assert not want or torch.equal(leaf.grad, grad_of)


@SOME
def test_operands_that_are_not_contiguous(name):
    op = OPS[name]
    inputs = [x.detach() for x in op.operands(EDGES, torch.float64)]
    other = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    last_first = [x.permute(*reversed(range(x.dim()))).contiguous() for x in inputs]
    last_first = [x.permute(*reversed(range(x.dim()))) for x in last_first]
    want = op.call(EDGES.A, *inputs)
    for views in (other, last_first):
        assert torch.equal(op.call(EDGES.A, *views), want)
    wide = [x[:1].expand_as(x).requires_grad_() for x in inputs]
    check(op, EDGES, "float64", wide)
    op.call(EDGES.A, *wide).sum().backward()  # with a gradient of strides 0


@SOME
def test_nothing_to_compute_with(name):
    """Operands without features, heads, or width, with gradients."""
    op = OPS[name]
    letters = "".join(op.dims.values())
    for letter in set("khw") & set(letters) if "q" not in letters else ():
        inputs = [
            x[(slice(None),) * dims.index(letter) + (slice(0),)] if letter in dims else x
            for x, dims in zip(op.operands(SMALL, torch.float64), op.dims.values())
        ]
        inputs = [x.detach().requires_grad_() for x in inputs]
        result, want = op.call(SMALL.A, *inputs), op.exact(SMALL, *inputs)
        torch.testing.assert_close(result, want)
        result.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


class Calls(TorchDispatchMode):
    """The calls of our operators, by name."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparsetir":
            self.seen[func] = args
        return func(*args, **(kwargs or {}))


def test_torch_checks_the_operators():
    """Schemas, gradients, fake kernels and dynamic shapes, by torch's own tests."""
    calls_seen = {}
    for name in (*COUNTED[::4], "edge_softmax", "attention", "rgms", "rgms in blocks"):
        op = OPS[name]
        with Calls() as calls:
            op.call(SMALL.A, *op.operands(SMALL, torch.float64)).sum().backward()
        calls_seen |= calls.seen
    names = {str(func).split(".")[1] for func in calls_seen}
    assert names >= {
        "spmm", "spmm_transposed", "sddmm", "row_pointers", "gspmm", "gspmm_arg", "gsddmm", "rgms",
        "rgms_weight", "segment_softmax", "segment_softmax_backward", "edge_attention",
    }  # fmt: skip
    for operator, arguments in calls_seen.items():
        again = [x.detach().clone() if torch.is_tensor(x) else x for x in arguments]
        for x in again:
            if torch.is_tensor(x) and x.is_floating_point():
                x.requires_grad_("message_gradients" not in str(operator))  # it has none
        few = {"test_utils": CHECKS} if "rgms" in str(operator) else {}
        torch.library.opcheck(operator, tuple(again), **few)


@pytest.mark.parametrize("name", by_turns(COUNTED, 3))  # relations sum up or multiply first
def test_nan_and_infinities(name):
    """NaN and infinities spread as in torch's operators, and no further."""
    op = OPS[name]
    for value in (torch.nan, torch.inf, -torch.inf):
        for n in range(len(op.dims)):
            inputs = [x.detach() for x in op.operands(EDGES, torch.float64)]
            inputs[n][3] = value
            result, want = op.call(EDGES.A, *inputs), op.exact(EDGES, *inputs)
            torch.testing.assert_close(result, want, equal_nan=True)


def loss_of(name):
    op = OPS[name]
    return lambda *inputs: op.call(SMALL.A, *inputs).sin().sum()


@SOME
def test_transforms(name):
    """grad, vjp and vmap of torch.func, and many gradients in one."""
    loss, inputs = loss_of(name), OPS[name].operands(SMALL, torch.float64)
    plain, each = [x.detach() for x in inputs], tuple(range(len(inputs)))
    want = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(grad(loss, each)(*plain), want)
    out, pullback = vjp(loss, *plain)
    torch.testing.assert_close(pullback(torch.ones_like(out)), want)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    result = torch.autograd.grad(loss(*inputs), inputs, weights, is_grads_batched=True)
    stacked = [torch.stack([x, 2 * x]) for x in plain]
    inside = grad(lambda *x: vmap(loss)(*x).sum(), each)(*stacked)
    second = grad(loss, each)(*(2 * x for x in plain))
    many = vmap(grad(loss, each))(*stacked)
    for both, one, other, *mapped in zip(result, want, second, many, inside, strict=True):
        torch.testing.assert_close(both, torch.stack([one, 2 * one]))
        for each_of in mapped:
            torch.testing.assert_close(each_of, torch.stack([one, other]))


@SOME
@pytest.mark.default(6)
def test_compiled_without_breaks(name):
    op, inputs = OPS[name], OPS[name].operands(SMALL, torch.float64)
    torch.compiler.reset()
    A = ops.resolve(SMALL.A)

    def twice(*operands):
        return op.call(A, *operands) * 2

    fast = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(*inputs), twice(*inputs))
    both = [torch.autograd.grad(f(*inputs).pow(2).sum(), inputs) for f in (fast, twice)]
    torch.testing.assert_close(*both)


@SOME
@pytest.mark.default(9)
def test_autocast(name):
    op, inputs = OPS[name], OPS[name].operands(EDGES, torch.float32)
    want = op.exact(EDGES, *(x.detach().double() for x in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        result = op.call(EDGES.A, *inputs)
        wide = op.call(EDGES.A, *(x.double() for x in inputs))
    assert result.dtype == torch.bfloat16 and wide.dtype == torch.float64
    assert_close(result / op.close, want / op.close, "bfloat16")
    grads = torch.autograd.grad(result.float().sum(), inputs)
    assert all(x.dtype == torch.float32 for x in grads)


OF_ROWS = [
    (lambda x: x[1:], ValueError), (lambda x: torch.cat([x, x]), ValueError),
    (lambda x: x.to("meta"), ValueError),
]  # fmt: skip


@EACH
def test_refusals(name):
    """Each operand in turn has a wrong kind, type, device or number of rows."""
    op, case = OPS[name], PATTERNS["edges"]
    for n, named in enumerate(op.dims):
        for change, error in (
            (lambda x: 3, TypeError), (lambda x: x.tolist(), TypeError),
            (lambda x: x.to(torch.int32), TypeError), (lambda x: x > 0, TypeError),
            (lambda x: x.to_sparse(), TypeError), *OF_ROWS * op.counted,
        ):  # fmt: skip
            inputs = [x.detach() for x in op.operands(case, torch.float32)]
            inputs[n] = change(inputs[n])
            with pytest.raises(error, match=rf"^\w+: argument '{named}': expected .*, got "):
                op.call(case.A, *inputs)
        if len(op.dims) > 1:  # types of two operands differ; the second is named
            inputs = [x.detach() for x in op.operands(case, torch.float32)]
            inputs[n] = inputs[n].double()
            with pytest.raises(TypeError, match=r"^\w+: argument '\w+': expected .* as .*, got "):
                op.call(case.A, *inputs)


@SOME
def test_results_are_written_to(name):
    """Changes in place, as by torch.relu_, are right, or refused: a softmax keeps its result."""
    op = OPS[name]
    inputs = op.operands(SMALL, torch.float64)
    want = torch.autograd.grad((op.call(SMALL.A, *inputs) * 3).sum(), inputs)
    loss = op.call(SMALL.A, *inputs).mul_(3).sum()
    if "softmax" in name:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), want)
