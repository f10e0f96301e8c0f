"""gspmm, gsddmm and segment_reduce against torch's gather and scatter, with gradients."""

# pyright: reportAttributeAccessIssue=false

import pytest
import torch

import sparsetir
from sparsetir import ops

M, N, NNZ = 6, 5, 14
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
MESSAGES = ("copy_u", "copy_e", "u_add_e", "u_sub_e", "u_mul_e", "u_div_e")
REDUCTIONS = ("sum", "mean", "max", "min")
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


def graph(seed=0, m=M, n=N, nnz=NNZ, dtype=torch.int64):
    """(2, nnz) edges in no order, some parallel, into all targets but the first and the last."""
    rng = torch.Generator().manual_seed(seed)
    source = torch.randint(0, n, (nnz,), generator=rng)
    target = torch.randint(1, m - 1, (nnz,), generator=rng)
    return torch.stack([source, target]).to(dtype)


def randn(*shape, dtype=torch.float64, seed=1, grad=False):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_(grad)


def in_rows(edges, m):
    """The same edges as CSR, and the place of each of its elements among the edges."""
    order = torch.argsort(edges[1], stable=True)
    rowptr = torch.cumsum(torch.bincount(edges[1], minlength=m), 0)
    rowptr = torch.nn.functional.pad(rowptr, (1, 0)).to(edges.dtype)
    return ops.Operand(rowptr, edges[0][order].contiguous(), m, N), order


def scattered(messages, target, m, reduce):
    """Messages (nnz, ...) reduced by torch; zero where there are none."""
    kind = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    index = target.long().view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    zeros = messages.new_zeros(m, *messages.shape[1:])
    return zeros.scatter_reduce(0, index, messages, kind, include_self=False)


def message(op, u, e, source):
    if op == "copy_u":
        return u[source.long()]
    if op == "copy_e":
        return e
    return BINARY[op[2:5]](u[source.long()], e)


def check_gspmm(op, reduce, u_shape, e_shape, dtype=torch.float64, idtype=torch.int64):
    edges = graph(dtype=idtype)
    u = randn(N, *u_shape, dtype=dtype, grad=True)
    e = randn(NNZ, *e_shape, dtype=dtype, seed=2)
    e = (e.sign() * (e.abs() + 1)).requires_grad_()  # no division by little
    found = ops.gspmm((edges, (N, M)), op, reduce, u, e)
    # A single number for an edge goes with any features.
    widened = e if e.dim() > 1 or op == "copy_e" else e.view(-1, *[1] * len(u_shape))
    wide = [x.double() for x in (u, widened)]
    expected = scattered(message(op, *wide, edges[0]), edges[1], M, reduce)
    assert found.dtype == dtype and found.shape == expected.shape
    close = CLOSE[dtype] * (1 + expected.abs().max())
    assert (found - expected).abs().max() <= close
    if reduce in ("max", "min") and dtype.itemsize < 4:
        return  # ties, of which torch takes all
    used = [x for x in (u, e) if not (op == "copy_u" and x is e or op == "copy_e" and x is u)]
    weights = randn(*expected.shape, seed=3)
    got = torch.autograd.grad((found * weights.to(dtype)).sum(), used)
    want = torch.autograd.grad((expected * weights).sum(), used)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert (g - w).abs().max() <= CLOSE[dtype] * 4 * (1 + w.abs().max())


# Heads; a number for an edge; the other way around; one number each; three dimensions.
SHAPES = [((3, 4), (3, 1)), ((7,), ()), ((1,), (5,)), ((), ()), ((2, 1, 3), (1, 4, 3))]


def each_once(shapes):
    """All shapes in float32, and the first one in every dtype."""
    others = [(shapes[0], dtype) for dtype in CLOSE if dtype != torch.float32]
    return [*((x, torch.float32) for x in shapes), *others]


@pytest.mark.parametrize(
    ("op", "reduce", "shapes", "dtype", "idtype"),
    [
        ("u_mul_e", "sum", 0, torch.float32, torch.int32),
        ("u_div_e", "mean", 0, torch.float64, torch.int64),
        ("u_sub_e", "max", 2, torch.float64, torch.int64),
        ("u_add_e", "sum", 4, torch.float16, torch.int32),
        ("u_mul_e", "mean", 1, torch.bfloat16, torch.int64),
        ("copy_e", "min", 0, torch.float32, torch.int64),
        ("copy_u", "max", 0, torch.float32, torch.int64),
        ("u_add_e", "min", 3, torch.float32, torch.int32),
    ],
)
def test_gspmm(op, reduce, shapes, dtype, idtype):
    check_gspmm(op, reduce, *SHAPES[shapes], dtype, idtype)


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "dtype"), each_once(SHAPES))
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("op", MESSAGES)
def test_gspmm_table(op, reduce, shapes, dtype):
    check_gspmm(op, reduce, *shapes, dtype)


def at(x, target, edges):
    return {"u": lambda: x[edges[0]], "v": lambda: x[edges[1]], "e": lambda: x}[target]()


def check_gsddmm(op, left, right, shapes, dtype=torch.float64):
    edges, rows = graph(), {"u": N, "v": M, "e": NNZ}
    lhs = randn(rows[left], *shapes[0], dtype=dtype, grad=True)
    rhs = randn(rows[right], *shapes[1], dtype=dtype, seed=2)
    rhs = (rhs.sign() * (rhs.abs() + 1)).requires_grad_()
    found = ops.gsddmm((edges, (N, M)), op, lhs, rhs, left, right)
    a, b = at(lhs.double(), left, edges), at(rhs.double(), right, edges)
    if op == "dot":
        expected = (a * b).sum(-1, keepdim=True)
    else:
        expected = {"copy_lhs": a, "copy_rhs": b}.get(op)
        expected = BINARY[op](a, b) if expected is None else expected
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found - expected).abs().max() <= CLOSE[dtype] * (1 + expected.abs().max())
    used = [
        x for x in (lhs, rhs) if op not in ("copy_lhs", "copy_rhs") or (x is lhs) == (op[-3] == "l")
    ]
    weights = randn(*expected.shape, seed=3)
    got = torch.autograd.grad((found * weights.to(dtype)).sum(), used)
    want = torch.autograd.grad((expected * weights).sum(), used)
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() <= CLOSE[dtype] * 4 * (1 + w.abs().max())


HEADS = ((3, 4), (3, 4))


@pytest.mark.parametrize(
    ("op", "left", "right", "shapes", "dtype"),
    [
        ("dot", "u", "v", HEADS, torch.float32),
        ("dot", "v", "u", ((9,), (9,)), torch.float64),
        ("add", "u", "v", ((3,), (3,)), torch.float32),
        ("mul", "e", "v", ((3, 1), (3, 4)), torch.float64),
        ("div", "v", "u", HEADS, torch.float64),
        ("sub", "u", "e", ((4,), (4,)), torch.bfloat16),
        ("copy_rhs", "u", "v", HEADS, torch.float32),
        ("dot", "u", "v", ((3, 4), (3, 1)), torch.float64),
    ],
)
def test_gsddmm(op, left, right, shapes, dtype):
    check_gsddmm(op, left, right, shapes, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "dtype"), each_once([HEADS, ((3, 4), (3, 1)), ((1, 5), (2, 5)), ((17,), (17,))])
)
@pytest.mark.parametrize("targets", ["uv", "vu", "ue", "ev", "vv", "ee"])
@pytest.mark.parametrize("op", [*BINARY, "dot", "copy_lhs", "copy_rhs"])
def test_gsddmm_table(op, targets, shapes, dtype):
    check_gsddmm(op, *targets, shapes, dtype)


def test_names():
    edges, u, v = graph(), randn(N, 3), randn(M, 3)
    A = (edges, (N, M))
    assert torch.equal(ops.gsddmm(A, "v_sub_u", v, u), ops.gsddmm(A, "sub", v, u, "v", "u"))
    assert torch.equal(ops.gsddmm(A, "copy_v", v), v[edges[1]])
    assert torch.equal(ops.gspmm(A, "add", "sum", u, u[edges[0]]), ops.gspmm(A, "copy_u", u=2 * u))


def test_rows_in_order_and_values():
    """CSR gives what the edges give; a matrix's own values are the features of edges."""
    edges, u, e = graph(), randn(N, 3, 2), randn(NNZ, 3, 1)
    A, order = in_rows(edges, M)
    for reduce in ("sum", "max"):
        expected = ops.gspmm((edges, (N, M)), "u_mul_e", reduce, u, e)
        assert torch.equal(ops.gspmm(A, "u_mul_e", reduce, u, e[order]), expected)
    v = randn(M, 3, 2)
    expected = ops.gsddmm((edges, (N, M)), "u_dot_v", u, v)
    assert torch.equal(ops.gsddmm(A, "u_dot_v", u, v), expected[order])
    values = randn(NNZ)
    found = ops.gspmm(A._replace(values=values), "u_add_e", "sum", u)
    assert torch.equal(found, ops.gspmm(A, "u_add_e", "sum", u, values.view(-1, 1, 1)))


def test_second_gradients():
    edges = graph(nnz=6)
    A = (edges, (N, M))
    u, e = randn(N, 2, 2, grad=True), (randn(6, 2, 1).abs() + 1).requires_grad_()
    v = randn(M, 2, 2, grad=True)
    for op, reduce in (("u_mul_e", "sum"), ("u_div_e", "mean"), ("u_mul_e", "max")):

        def messages(u, e, op=op, reduce=reduce):
            return ops.gspmm(A, op, reduce, u, e)

        assert torch.autograd.gradcheck(messages, (u, e), fast_mode=True)
        assert torch.autograd.gradgradcheck(messages, (u, e), fast_mode=True)
    for op in ("u_dot_v", "u_add_v"):

        def scores(u, v, op=op):
            return ops.gsddmm(A, op, u, v)

        assert torch.autograd.gradcheck(scores, (u, v), fast_mode=True)
        assert torch.autograd.gradgradcheck(scores, (u, v), fast_mode=True)


def test_nan_inf_and_whose_the_maximum_is():
    edges = torch.tensor([[0, 1, 2, 0], [1, 1, 2, 3]])
    u = torch.tensor([[float("-inf")], [float("nan")], [float("-inf")]])
    e = torch.ones(4, 1, requires_grad=True)
    found = ops.gspmm((edges, (3, 5)), "u_add_e", "max", u, e)
    assert found[1].isnan() and found[2].isneginf() and not found[0] and not found[4]
    found[2].backward()
    assert e.grad.flatten().tolist() == [0, 0, 1, 0]


def test_nothing():
    """No edges, no features, no rows."""
    edges = torch.zeros(2, 0, dtype=torch.int64)
    u, e = randn(N, 3, 2, grad=True), randn(0, 3, 1, grad=True)
    for reduce in REDUCTIONS:
        out = ops.gspmm((edges, (N, M)), "u_mul_e", reduce, u, e)
        assert out.shape == (M, 3, 2) and not out.any()
        out.sum().backward()
    assert not u.grad.any()
    assert ops.gsddmm((edges, (N, M)), "u_dot_v", u, randn(M, 3, 2)).shape == (0, 3, 1)
    edges = graph()
    assert ops.gspmm((edges, (N, M)), "u_add_e", "sum", randn(N, 0), randn(NNZ, 1)).shape == (M, 0)
    dots = ops.gsddmm((edges, (N, M)), "u_dot_v", randn(N, 2, 0), randn(M, 2, 0))
    assert dots.shape == (NNZ, 2, 1) and not dots.any()


@pytest.mark.parametrize("size", [0, (0, 3)])
def test_no_nodes(size):
    A = torch.zeros(2, 0, dtype=torch.int64), size
    rows = 3 if size else 0
    for op, e in (("copy_u", None), ("u_mul_e", randn(0)), ("u_add_e", randn(0))):
        u = randn(0, 4, grad=True)
        out = ops.gspmm(A, op, "mean", u, e)
        assert out.shape == (rows, 4) and not out.any()
        out.sum().backward()
        assert u.grad.shape == (0, 4)


def test_gradient_of_the_mean_of_a_row_longer_than_float16_counts():
    count = 70_000
    e = torch.ones(count, 1, dtype=torch.float16, requires_grad=True)
    out = ops.segment_reduce(e, torch.tensor([0, count]), "mean")
    out.backward(torch.full((1, 1), 7000, dtype=torch.float16))
    torch.testing.assert_close(e.grad, torch.full_like(e, 0.1))


def test_not_contiguous():
    edges, u, e = (
        graph(),
        randn(4, 3, N).permute(2, 1, 0),
        randn(3, NNZ, 2)[..., :1].transpose(0, 1),
    )
    found = ops.gspmm((edges, (N, M)), "u_mul_e", "sum", u, e)
    expected = ops.gspmm((edges, (N, M)), "u_mul_e", "sum", u.contiguous(), e.contiguous())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_segment_reduce(reduce):
    rowptr = torch.tensor([0, 0, 3, 4, 9, 9])
    values = randn(9, 3, grad=True)
    found = ops.segment_reduce(values, rowptr, reduce)
    expected = scattered(values, torch.tensor([1, 1, 1, 2, 3, 3, 3, 3, 3]), 5, reduce)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        *(torch.autograd.grad(x.pow(2).sum(), values) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert ops.segment_reduce(values.detach()[:, 0], rowptr, reduce).shape == (5,)


def test_threads():
    """Many edges, over all threads."""
    edges = graph(m=300, n=200, nnz=9000)
    u, e = randn(200, 2, 64, dtype=torch.float32), randn(9000, 2, 1, dtype=torch.float32)
    expected = scattered((u[edges[0]] * e).double(), edges[1], 300, "sum")
    found = ops.gspmm((edges, (200, 300)), "u_mul_e", "sum", u, e)
    assert (found - expected).abs().max() < 1e-4
    assert torch.equal(found, ops.gspmm((edges, (200, 300)), "u_mul_e", "sum", u, e))
    found = ops.gsddmm((edges, (200, 300)), "u_add_v", u, found)
    assert found.shape == (9000, 2, 64)


def test_a_new_pattern_compiles_nothing():
    def once(seed):
        edges = graph(seed)
        u = randn(N, 3, 4, seed=seed, grad=True)
        ops.gspmm((edges, (N, M)), "u_mul_e", "sum", u, randn(NNZ, 3, 1)).sum().backward()

    once(0)
    before = sparsetir.compilations()
    for seed in range(1, 4):
        once(seed)
    assert sparsetir.compilations() == before


def test_compiled_without_breaks():
    edges = graph()
    A = ops.resolve((edges, (N, M)))

    def layer(u, e):
        return ops.gspmm(A, "u_mul_e", "sum", u, ops.gsddmm(A, "u_dot_v", u, e))

    u, v = randn(N, 3, 4, grad=True), randn(M, 3, 4, grad=True)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, fast):
        out = run(u, v)
        grads.append((out, *torch.autograd.grad(out.pow(2).sum(), (u, v))))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_torch_knows_the_operators():
    edges, u, e = graph(), randn(N, 3, 4, grad=True), randn(NNZ, 3, 1, grad=True)
    rowptr, col, _, n, _ = ops.resolve((edges, (N, M)))
    calls = {
        "gspmm": (rowptr, col, u, e, n, "mul", "sum", False),
        "gspmm_arg": (rowptr, col, u, e, n, "mul", "max"),
        "gsddmm": (rowptr, col, u, randn(M, 3, 4, grad=True), n, "dot", "u", "v"),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.sparsetir, name).default, arguments)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda A, u, e: ops.gspmm(A, "u_pow_e", "sum", u, e), ValueError, "'op'.*'u_pow_e'"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "prod", u, e), ValueError, "'reduce'.*'prod'"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "sum", u[1:], e), ValueError, "'u'.*5 rows"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "sum", u, e[1:]), ValueError, "'e'.*14 rows"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "sum", u), TypeError, "'e'.*without values"),
        (lambda A, u, e: ops.gspmm(A, "copy_u", "sum"), TypeError, "'u'.*NoneType"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "sum", u, e.float()), TypeError, "'e'.*float64"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "sum", u.char(), e), TypeError, "'u'.*int8"),
        (lambda A, u, e: ops.gspmm(A, "u_mul_e", "sum", u, e[:, :2]), ValueError, "'e'.*broadcast"),
        (lambda A, u, e: ops.gsddmm(A, "pow", u, e), ValueError, "'op'.*'pow'"),
        (lambda A, u, e: ops.gsddmm(A, "add", u, e, "u", "x"), ValueError, "'rhs_target'.*'x'"),
        (lambda A, u, e: ops.gsddmm(A, "u_dot_e", u, e[:, :, :2]), ValueError, "'rhs'.*last"),
        (lambda A, u, e: ops.segment_reduce(u, torch.tensor([0, 2])), ValueError, "rowptr"),
    ],
)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call((graph(), (N, M)), randn(N, 3, 4), randn(NNZ, 3, 4))


@pytest.mark.parametrize("name", ["u_mul_e_sum", "copy_u_add", "u_sub_e_amin", "copy_e_mean"])
def test_names_of_dgl_hold_the_reduction(name):
    edges = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])
    u, e = torch.rand(3, 2), torch.rand(4, 2)
    op, _, reduce = name.rpartition("_")
    expected = ops.gspmm(edges, op, reduce, u, e)
    given = {"copy_u": {"lhs_data": u}, "copy_e": {"rhs_data": e}}
    given = given.get(op, {"lhs_data": u, "rhs_data": e})
    assert torch.equal(ops.gspmm(edges, name, **given), expected)
    assert torch.equal(ops.gspmm(edges, op, reduce_op=reduce, **given), expected)
    assert torch.equal(
        ops.gsddmm(edges, "add", lhs_data=u, rhs_data=u), ops.gsddmm(edges, "add", u, u)
    )


def test_names_that_say_two_things_are_refused():
    edges, u = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2)
    with pytest.raises(ValueError, match="'reduce': expected none beside 'copy_u_sum', got 'max'"):
        ops.gspmm(edges, "copy_u_sum", "max", u)
    with pytest.raises(TypeError, match="'lhs_data': expected none beside 'u', which is the same"):
        ops.gspmm(edges, "copy_u", u=u, lhs_data=u)
    with pytest.raises(TypeError, match="'reduce_op': expected none beside 'reduce'"):
        ops.gspmm(edges, "copy_u", "sum", u, reduce_op="sum")
    with pytest.raises(ValueError, match="copy_u, copy_lhs, .* as 'u_mul_e_sum', got 'u_mul_e_x'"):
        ops.gspmm(edges, "u_mul_e_x", u=u)
