"""What is kept of patterns is never used for other ones, nor made unfit for gradients."""

import pytest
import torch

import sparsetir
from sparsetir import ops

N, NNZ, F = 40, 200, 4


@pytest.fixture(autouse=True)
def _empty_cache():
    torch.manual_seed(0)
    ops.clear_cache()
    yield
    ops.clear_cache()


def edges_of(seed):
    return torch.randint(0, N, (2, NNZ), generator=torch.Generator().manual_seed(seed))


def sums(edges, x):
    """What comes in at each node."""
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


# -- patterns that are first seen in inference mode -----------------------------------------------

EDGES = edges_of(0)
torch.manual_seed(0)
DENSE = (torch.rand(N, N) < 0.1).float()
ROWPTR = torch.arange(0, N + 1)
KINDS = {
    "edges": lambda: (EDGES, N),
    "csr": DENSE.to_sparse_csr,
    "coo": lambda: DENSE.to_sparse().coalesce(),
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "matrix": lambda: sparsetir.SparseMatrix(DENSE.to_sparse()),
}
CALLS = {
    "sum": ops.spmm,
    "mean": lambda A, x: ops.spmm(A, x, "mean"),
    "max": lambda A, x: ops.spmm(A, x, "max"),
    "sddmm": lambda A, x: ops.sddmm(A, x, x),
    "gspmm": lambda A, x: ops.gspmm(A, "copy_u", "mean", x),
    "gsddmm": lambda A, x: ops.gsddmm(A, "u_sub_v", x, x),
    "softmax": lambda A, x: ops.edge_softmax(A, ops.sddmm(A, x, x)),
    "attention": lambda A, x: ops.attention(A, x[:, None], x[:, None], x[:, None]),
    "segments": lambda A, x: ops.segment_reduce(x, ROWPTR, "mean"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "call, kind",
    [*((call, "edges") for call in CALLS), *(("sum", kind) for kind in list(KINDS)[1:])],
)
def test_first_seen_in_inference_mode(call, kind):
    A, x, run = KINDS[kind](), torch.randn(N, F), CALLS[call]
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    want = run(A, leaves[0])
    want.sin().sum().backward()
    ops.clear_cache()
    with torch.inference_mode():
        run(A, x)
    found = run(A, leaves[1])
    found.sin().sum().backward()
    assert torch.equal(found, want) and torch.equal(leaves[1].grad, leaves[0].grad)


@pytest.mark.parametrize("call", CALLS)
def test_made_in_inference_mode(call):
    with torch.inference_mode():
        edges, rowptr = EDGES.clone(), ROWPTR.clone()
    assert edges.is_inference()
    run = CALLS[call] if call != "segments" else lambda A, x: ops.segment_reduce(x, rowptr, "mean")
    x = torch.randn(N, F)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for leaf, given in zip(leaves, (EDGES, edges), strict=True):
        run((given, N), leaf).sin().sum().backward()
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
    """New tensors would come to lie there, with the key of the old ones."""
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
