"""Cached patterns are never used for other ones, nor made unfit for gradients."""

import pytest
import torch

import sparsetir
from sparsetir import nn, ops

N, NNZ, F = 40, 200, 4


def edges_of(seed):
    return torch.randint(0, N, (2, NNZ), generator=torch.Generator().manual_seed(seed))


def sums(edges, x):
    """The inputs of each node."""
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


# -- patterns that are first seen in inference mode -----------------------------------------------

EDGES = edges_of(0)
torch.manual_seed(0)
DENSE = (torch.rand(N, N) < 0.1).float()
ROWPTR = torch.arange(0, N + 1)
KINDS = {
    "edges": lambda: (EDGES, N),
    "NumPy": lambda: (EDGES.numpy(), N),
    "csr": DENSE.to_sparse_csr,
    "coo": lambda: DENSE.to_sparse().coalesce(),
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "matrix": lambda: sparsetir.SparseMatrix(DENSE.to_sparse()),
}
TYPES = [torch.arange(NNZ) % 3, (torch.arange(NNZ) // 3) % 3]
WEIGHT = torch.randn(3, F, F, generator=torch.Generator().manual_seed(0))
OPERATORS = {
    "spmm": lambda A, x: ops.spmm(A, x),
    "mean": lambda A, x: ops.spmm(A, x, "mean"),
    "max": lambda A, x: ops.spmm(A, x, "max"),
    "spmv": lambda A, x: ops.spmv(A, x[:, 0]),
    "sddmm": lambda A, x: ops.sddmm(A, x, x),
    "gspmm": lambda A, x: ops.gspmm(A, "copy_u", "mean", x),
    "gsddmm": lambda A, x: ops.gsddmm(A, "u_sub_v", x, x),
    "softmax": lambda A, x: ops.sparse_softmax(A, torch.arange(NNZ) / NNZ * x[0, 0]),
    "edge_softmax": lambda A, x: ops.edge_softmax(A, torch.arange(NNZ) / NNZ * x[0, 0]),
    "by source": lambda A, x: ops.edge_softmax(A, torch.arange(NNZ) / NNZ * x[0, 0], "src"),
    "attention": lambda A, x: ops.attention(A, x[:, None], x[:, None], x[:, None]),
    "sparse_attention": lambda A, x: ops.sparse_attention(*(x[None, None],) * 3, A),
    "rgms": lambda A, x: ops.rgms(x, WEIGHT, A[0], TYPES[0]),
    "heads": lambda A, x: ops.spmm(A, torch.stack([x, -x], 1)),
}
CALLS = {**OPERATORS, "segments": lambda A, x: ops.segment_reduce(x, ROWPTR, "mean")}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "call, kind",
    [*((call, "edges") for call in CALLS), *(("spmm", kind) for kind in list(KINDS)[1:])],
)
def test_first_seen_in_inference_mode(call, kind):
    A, x, run = KINDS[kind](), torch.randn(N, F), CALLS[call]
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    want = run(A, leaves[0])
    want.sin().sum().backward()
    ops.clear_cache()
    with torch.inference_mode():
        run(A, x)
    result = run(A, leaves[1])
    result.sin().sum().backward()
    assert torch.equal(result, want) and torch.equal(leaves[1].grad, leaves[0].grad)


@pytest.mark.parametrize("call", CALLS)
def test_made_in_inference_mode(call):
    with torch.inference_mode():
        edges, rowptr = EDGES.clone(), ROWPTR.clone()
    assert edges.is_inference()
    run = CALLS[call] if call != "segments" else lambda A, x: ops.segment_reduce(x, rowptr, "mean")
    x = torch.randn(N, F)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for leaf, pattern in zip(leaves, (EDGES, edges), strict=True):
        run((pattern, N), leaf).sin().sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


# -- memory that is used again --------------------------------------------------------------------


def assign(x, other):
    x.data = other


MOVES = {
    "set_": lambda x, other: x.set_(other),
    "data": assign,
    "swap": torch.utils.swap_tensors,
    "share_memory_": lambda x, _: x.share_memory_(),
}


@pytest.mark.parametrize("move", MOVES)
def test_tensors_that_let_go_of_their_memory(move):
    """New tensors would have the same address, with the key of the old ones."""
    x, kept = torch.randn(N, F), []
    for i in range(20):
        edges, other = edges_of(2 * i), edges_of(2 * i + 1)
        ops.spmm((edges, N), x)
        MOVES[move](edges, torch.zeros(2, 1, dtype=torch.long))
        kept.append(edges)
        again = other.clone()
        torch.testing.assert_close(ops.spmm((again, N), x), sums(other, x))


# -- signs ----------------------------------------------------------------------------------------


def test_negative_bit():
    """Torch's view of a number's negative has the memory of the number."""
    x = torch.randn(N, 1, dtype=torch.complex64).conj().imag
    flat = torch.randn(1, dtype=torch.complex64).conj().imag
    assert x.is_neg() and flat.is_neg() and flat.is_contiguous()
    one = (torch.tensor([[0], [0]]), 1)
    torch.testing.assert_close(ops.spmm(one, flat[:, None]), flat[:, None].resolve_neg())
    torch.testing.assert_close(ops.spmm(one, flat[:, None], values=flat), flat[:, None] ** 2)
    torch.testing.assert_close(ops.sddmm(one, flat[:, None], torch.ones(1, 1)), +flat)
    torch.testing.assert_close(ops.gspmm(one, "u_add_e", u=flat, e=flat), 2 * flat)
    torch.testing.assert_close(ops.spmm((EDGES, N), x), sums(EDGES, x.clone()))


pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def by_data(x, other):
    x.data.copy_(other)


def by_numpy(x, other):
    x.numpy()[:] = other.numpy()


def by_dlpack(x, other):
    torch.from_dlpack(x).copy_(other)


def in_inference_mode(x, other):
    with torch.inference_mode():
        x.copy_(other)


WRITES = {"data": by_data, "NumPy": by_numpy, "DLPack": by_dlpack, "inference": in_inference_mode}


def copy_for(write, x):
    """A tensor that the write goes unseen to."""
    with torch.inference_mode(write is in_inference_mode):
        return x.clone()


def check(run, tensors, others, write):
    """The results of `run` after each write, beside those of fresh copies."""
    copies = [copy_for(write, x) for x in tensors]
    x = torch.randn(N, F, requires_grad=True)
    for now in (tensors, others, tensors):
        for old, new in zip(copies, now, strict=True):
            write(old, new)
        for _ in range(2):
            result, wanted = run(*copies, x), run(*(part.clone() for part in now), x)
            torch.testing.assert_close(result, wanted)
            for out, want in ((result, wanted), (run(*copies, x.detach()), wanted.detach())):
                torch.testing.assert_close(out, want)
            both = [torch.autograd.grad(out.sin().sum(), x)[0] for out in (result, wanted)]
            torch.testing.assert_close(*both)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_edges(operator, write):
    run = OPERATORS[operator]
    check(lambda edges, x: run((edges, N), x), [edges_of(1)], [edges_of(2)], write)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_relations(write):
    run = lambda edges, types, x: ops.rgms(x, WEIGHT, edges, types, reduce="mean")  # noqa: E731
    edges = [edges_of(1), edges_of(2)]
    for now in ([edges[1], TYPES[0]], [edges[0], TYPES[1]]):
        check(run, [edges[0], TYPES[0]], now, write)


MATRICES = [
    torch.kron(
        torch.eye(N // 2)[torch.randperm(N // 2, generator=torch.Generator().manual_seed(seed))],
        torch.ones(2, 2),
    )
    for seed in (1, 2)
]  # of as many elements in each row
LAYOUTS = {
    "csr": (lambda x: x.to_sparse_csr(), lambda A: A.col_indices()),
    "csc": (lambda x: x.to_sparse_csc(), lambda A: A.row_indices()),
    "coo": (lambda x: x.to_sparse().coalesce(), lambda A: A.indices()),
    "bsr": (lambda x: x.to_sparse_bsr((2, 2)), lambda A: A.col_indices()),
    "matrix": (
        lambda x: sparsetir.SparseMatrix(x.to_sparse_csr()),
        lambda A: torch.from_numpy(A.pattern.coords[1]),
    ),
    "operand": (
        lambda x: ops.Operand(torch.arange(0, 2 * N + 1, 2), x.nonzero()[:, 1].contiguous(), N, N),
        lambda A: A.col,
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", [by_data, by_numpy, by_dlpack])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors(layout, write):
    make, indices = LAYOUTS[layout]
    A, x = make(MATRICES[0]), torch.randn(N, F)
    others = [make(dense) for dense in MATRICES]
    for other in (others[0], others[1], others[0]):
        write(indices(A), indices(other).clone())
        for call in (ops.spmm, lambda A, x: ops.sddmm(A, x, x)):
            torch.testing.assert_close(call(A, x), call(other, x))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_segments(write):
    run = lambda rowptr, x: ops.segment_reduce(x, rowptr, "sum")  # noqa: E731
    check(run, [torch.tensor([0, 3, 9, N])], [torch.tensor([0, 8, 20, N])], write)


def test_the_gradient_is_that_of_what_was_computed():
    """Even if the edges are written to before the backward pass."""
    for name, run in OPERATORS.items():
        edges, x = edges_of(1), torch.randn(N, F, requires_grad=True)
        (wanted,) = torch.autograd.grad(run((edges.clone(), N), x).sin().sum(), x)
        run((edges, N), x).sum().backward()
        for write in (by_numpy, lambda a, b: a.copy_(b)):
            edges = edges_of(1)
            out = run((edges, N), x)
            write(edges, edges_of(2))
            (grad_x,) = torch.autograd.grad(out.sin().sum(), x)
            torch.testing.assert_close(grad_x, wanted, msg=name)


def test_compiled_code():
    def run(edges, x):
        return ops.spmm((edges, N), x) + ops.attention((edges, N), x, x, x)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for write in (by_data, by_numpy):
        check(compiled, [edges_of(1)], [edges_of(2)], write)


# -- layers ---------------------------------------------------------------------------------------

LAYERS = {
    "gcn": lambda: nn.GCNConv(F, 3),
    "gcn without loops": lambda: nn.GCNConv(F, 3, add_self_loops=False),
    "gcn reversed": lambda: nn.GCNConv(F, 3, flow="target_to_source"),
    "sage": lambda: nn.SAGEConv(F, 3),
    "sage max": lambda: nn.SAGEConv(F, 3, aggr="max"),
    "gat": lambda: nn.GATConv(F, 3, heads=2),
    "gat without loops": lambda: nn.GATConv(F, 3, add_self_loops=False),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, write):
    layer = LAYERS[name]()
    check(lambda edges, x: layer(x, edges), [edges_of(1)], [edges_of(2)], write)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}])
def test_relational_layers_of_rows(options, write):
    layer = nn.RGCNConv(N, 6, 3, **options)
    copies = [copy_for(write, x) for x in (edges_of(1), TYPES[0].to(torch.int16))]
    for now in ((edges_of(1), TYPES[0]), (edges_of(2), TYPES[0]), (edges_of(2), TYPES[1])):
        for old, new in zip(copies, now, strict=True):
            write(old, new.to(old.dtype))
        torch.testing.assert_close(layer(None, *copies), layer(None, *(x.clone() for x in now)))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_points(write):
    grid = torch.cartesian_prod(torch.zeros(1), *(torch.arange(4.0),) * 3).int()
    cloud = [grid[torch.randperm(64)[:N]] for _ in range(2)]
    for layer in (nn.SparseConv3d(F, 3, 3), nn.SparseConv3d(F, 3, 2, stride=2)):
        coords, x = copy_for(write, cloud[0]), torch.randn(N, F)
        for now in (cloud[0], cloud[1], cloud[0]):
            write(coords, now)
            result, wanted = (layer(nn.SparsePoints(c, x)) for c in (coords, now.clone()))
            assert torch.equal(result.coords, wanted.coords)
            torch.testing.assert_close(result.features, wanted.features)


def test_what_torch_writes_to_the_tensors_of_an_operand():
    edges, x = edges_of(1), torch.randn(N, F)
    operand = ops.resolve((edges, N))
    wanted = ops.spmm(operand, x)
    operand.col.copy_(edges_of(2))
    torch.testing.assert_close(ops.spmm(operand, x), ops.spmm((edges_of(2), N), x))
    torch.testing.assert_close(ops.spmm((edges, N), x), wanted)


@pytest.mark.parametrize("write", [by_data, by_numpy])
def test_edges_that_are_no_block_of_memory(write):
    edges, other, x = edges_of(1).T.contiguous().T, edges_of(2), torch.randn(N, F)
    for now in (edges_of(1), other):
        write(edges, now)
        for _ in range(2):
            torch.testing.assert_close(ops.spmm((edges, N), x), ops.spmm((now.clone(), N), x))
