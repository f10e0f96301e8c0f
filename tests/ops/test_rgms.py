"""Relational gather-matmul-scatter for torch: values, gradients, compilation, refusals."""

# pyright: reportAttributeAccessIssue=false

import numpy as np
import pytest
import torch

from cuda_plans import run_plans
from cuda_runner import requires_cuda_text
from ops_common import DTYPES, TOLERANCE
from pairs import by_default, by_turns
from refusals import refusals
from sparsetir import ops
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_gradients import GradientTiles
from sparsetir.schedules.targets import resolve_target

N, M, RELATIONS, E = 9, 7, 5, 40


def graph(edges=E, idtype=torch.int64, relations=RELATIONS, n=N, m=M, seed=0):
    """Edges with equal ends among them; the first relation has none, and the last one has one."""
    rng = torch.Generator().manual_seed(seed)
    ends = [torch.randint(0, k, (edges,), generator=rng) for k in (n, m)]
    kind = torch.randint(1, max(relations - 1, 2), (edges,), generator=rng)
    if edges > 3:
        ends[0][:2], ends[1][:2], kind[:2] = 3, 3, 1  # a self loop, twice
        kind[-1] = relations - 1
    return torch.stack(ends).to(idtype), kind.to(idtype)


def operands(dtype=torch.float64, feat_in=6, feat=4, edges=E, relations=RELATIONS, n=N):
    """x, weight and edge_weight, which take gradients."""
    rng = torch.Generator().manual_seed(1)
    shapes = ((n, feat_in), (relations, feat_in, feat), (edges,))
    tensors = (torch.randn(s, dtype=torch.float64, generator=rng) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in tensors]


def expected(x, weight, edge_index, edge_type, edge_weight=None, reduce="sum", m=M):
    """The result of dense tensors in float64."""
    (source, target), kind = edge_index.long(), edge_type.long()
    count, n = weight.shape[0], x.shape[0]
    a = torch.ones(len(source), dtype=torch.float64)
    a = a if edge_weight is None else edge_weight.double()
    if reduce == "mean":
        key = kind * m + target
        a = a / torch.bincount(key, minlength=count * m)[key]
    dense = torch.zeros(count, m, n, dtype=torch.float64)
    dense = dense.index_put((kind, target, source), a, accumulate=True)
    return torch.einsum("rij,jk,rkl->il", dense, x.double(), weight.double())


def whole(weight):
    """Matrices with these blocks on the diagonal, and zeros elsewhere."""
    return torch.stack([torch.block_diag(*of_relation) for of_relation in weight])


def in_blocks(blocks, rows, columns, dtype=torch.float64, relations=RELATIONS):
    rng = torch.Generator().manual_seed(4)
    shape = (relations, blocks, rows, columns)
    return torch.randn(shape, dtype=torch.float64, generator=rng).to(dtype).requires_grad_()


def agree(pattern, x, weight, edge_weight, reduce="sum", m=M, scale=8):
    """The result and its gradients."""
    dtype, leaves = x.dtype, [x, weight, *([] if edge_weight is None else [edge_weight])]
    result = ops.rgms(x, weight, *pattern, edge_weight, reduce, num_targets=m)
    exact = whole(weight) if weight.dim() == 4 else weight
    want = expected(x, exact, *pattern, edge_weight, reduce, m)
    by = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((result * by.to(dtype)).sum(), leaves)
    wanted = torch.autograd.grad((want * by).sum(), leaves)
    tolerance = scale * TOLERANCE[str(dtype)[6:]]
    for one, other in zip((result, *grads), (want, *wanted), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", by_default(DTYPES, "float32", "bfloat16"))
@pytest.mark.parametrize("sizes", [(3, 2, 5), (2, 8, 4), (1, 6, 6)], ids=str)
@pytest.mark.default("(2, 8, 4)-bfloat16", "(1, 6, 6)-float32")
def test_weights_in_blocks(dtype, sizes):
    dtype, idtype = getattr(torch, dtype), torch.int32 if dtype == "float32" else torch.int64
    pattern, weight = graph(60, idtype), in_blocks(*sizes, dtype)
    x, _, edge_weight = operands(dtype, sizes[0] * sizes[1], 1, 60)
    agree(pattern, x, weight, edge_weight, scale=16)
    agree(pattern, x, weight, None, "mean", scale=16)


def test_features_of_any_number_and_threads(monkeypatch):
    """Several vectors, and parts of them; relations of many rows, in pieces."""
    from sparsetir.ops import relations, rgms_kernels

    monkeypatch.setattr(rgms_kernels, "profitable", lambda *_: True)
    monkeypatch.setattr(rgms_kernels, "default_threads", lambda: 2)
    monkeypatch.setattr(relations, "ROWS_OF_PIECE", 64)
    for sizes in ((32, 48), (19, 36)):
        inputs = operands(torch.float32, *sizes, 3000, n=300)
        agree(graph(3000, n=300, m=200), *inputs, m=200, scale=100)


def test_what_is_not_finite_stays_where_it_belongs():
    """Chunks are not full, and nothing of theirs meets an infinity elsewhere."""
    pattern = graph()
    x, weight, edge_weight = (v.detach() for v in operands())
    (source, target), kind = pattern
    x[source[-1]] = torch.inf
    weight[0] = torch.nan  # of a relation without edges
    x.requires_grad_(), weight.requires_grad_(), edge_weight.requires_grad_()
    result = ops.rgms(x, weight, *pattern, edge_weight, num_targets=M)
    touched = torch.zeros(M, dtype=torch.bool).index_fill(0, target[source == source[-1]], True)
    assert torch.equal(result.isfinite().all(1), ~touched)
    of_x, of_weight, of_edges = torch.autograd.grad(result.sum(), (x, weight, edge_weight))
    assert of_x.isfinite().all()
    relations = torch.zeros(RELATIONS, dtype=torch.bool)
    relations[kind[source == source[-1]]] = True
    assert torch.equal(of_weight.isfinite().flatten(1).all(1), ~relations)
    assert torch.equal(of_edges.isfinite(), source != source[-1])
    assert not of_weight[0].any()


X, W, A = (v.detach() for v in operands())
INDEX, KIND = graph()


def of(x=X, weight=W, edges=INDEX, kind=KIND, *more, **options):
    return ops.rgms(x, weight, edges, kind, *more, **options)


test_refusals = refusals(
    """
of(X[0])  # ValueError: rgms: argument 'x': expected shape (n, feat_in)
of(X.long())  # TypeError: rgms: argument 'x': expected float32, float16
of(X, W.float())  # TypeError: rgms: argument 'weight': expected float64
of(X, W[0])  # ValueError: rgms: argument 'weight': expected shape (relations, 6, feat)
of(X, W[:, None, :4])  # ValueError: rgms: argument 'weight': .. with 6 rows in all
of(X, W.mT)  # ValueError: rgms: argument 'weight': expected shape (relations, 6, feat)
of(edges=[0, 1])  # TypeError: rgms: argument 'edge_index': expected a dense tensor, got list
of(edges=INDEX[0])  # ValueError: rgms: argument 'edge_index': expected shape (2, E)
of(edges=INDEX.double())  # TypeError: rgms: argument 'edge_index': expected int32 or int64
of(edges=INDEX + N)  # IndexError: rgms: argument 'edge_index': expected each source to be
of(num_targets=2)  # IndexError: rgms: argument 'edge_index': expected each target
of(num_targets=-1)  # ValueError: rgms: argument 'num_targets': expected 0 or more
of(kind=KIND + 1)  # IndexError: rgms: argument 'edge_type': expected each relation to be .. 5
of(kind=KIND[1:])  # ValueError: rgms: argument 'edge_type': expected shape (40,)
of(kind=KIND.bool())  # TypeError: rgms: argument 'edge_type': expected int32 or int64, got bool
of(kind=None)  # TypeError: rgms: argument 'edge_type': expected a dense tensor, got NoneType
of(X, W, INDEX, KIND, A[1:])  # ValueError: rgms: argument 'edge_weight': expected shape (40,)
of(X, W, INDEX, KIND, A.float())  # TypeError: rgms: argument 'edge_weight': expected float64
of(reduce="max")  # ValueError: rgms: argument 'reduce': expected sum, add, mean, got 'max'
of(X.to("meta"))  # ValueError: rgms: argument 'weight': expected to be on meta as 'x'
""",
    globals(),
)


@pytest.mark.parametrize("dtype", by_default(DTYPES, "float32"))
@pytest.mark.parametrize("first", [[1, 3], [2, RELATIONS - 1], range(1, RELATIONS)], ids=str)
@pytest.mark.default("range(1, 5)-float32")
def test_products_before_sums(dtype, first, monkeypatch):
    """Products first for some relations, and for all that have edges, in all directions."""
    from sparsetir.ops import relations

    calls = []

    def chosen(sizes, m, n, *features):
        first_of = np.isin(np.arange(RELATIONS), first) & (sizes.edges > 0)
        assert ((sizes.columns > 0) == (sizes.edges > 0)).all()
        calls.append(features)
        return first_of

    monkeypatch.setattr(relations, "products_first", chosen)
    ops.clear_cache()
    idtype = torch.int32 if dtype == "float32" else torch.int64
    pattern, (x, weight, a) = graph(60, idtype, seed=5), operands(getattr(torch, dtype), edges=60)
    for reduce, extra in (("mean", None), ("sum", a), ("sum", None)):
        agree(pattern, x, weight, extra, reduce)
    assert len(calls) >= 2


def test_products_are_no_more_than_nodes():
    """A relation of two columns and many rows has two products, one of which each row takes."""
    from sparsetir.ops.relations import edge_copies, relations_of, where_products_first

    rng = torch.Generator().manual_seed(3)
    target = torch.randperm(20000, generator=rng)
    edges = torch.stack([torch.randint(5, 7, (20000,), generator=rng), target])
    kind = torch.zeros(20000, dtype=torch.long)
    kind[:20], edges[0, :20] = 1, torch.arange(20)
    x, weight, _ = operands(torch.float32, 64, 64, relations=2, n=20000)
    rows = relations_of(*edge_copies(edges, kind), 20000, 20000, 2).by_target
    plan = where_products_first(rows, 20000, 20000, 64, 64, 1)
    assert plan is not None and plan.others is not None
    assert (plan.sums.n, plan.sums.nnz, len(plan.others.indices)) == (2, 19980, 20)
    kept = []
    for _ in range(2):  # the parts of shares are made once
        result = ops.rgms(x, weight, edges, kind, reduce="mean")
        kept.append(plan._kept)
        want = torch.zeros(20000, 64).index_add(
            0, target, torch.stack([x[edges[0]] @ w for w in weight])[kind, torch.arange(20000)]
        )
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    assert kept[0] is not None and kept[0] is kept[1]


# -- on a GPU -------------------------------------------------------------------------------------


def sparse_graph():
    """Up to two edges for each end in each relation: one kernel serves both directions."""
    node = torch.arange(24)
    ends = [(node, (5 * node + 3) % 24), (node, (7 * node + 1) % 24), (node[:9], node[:9] + 1)]
    edge_index = torch.cat([torch.stack(x) for x in ends], 1)
    return edge_index, torch.cat([torch.zeros(48, dtype=torch.int64), torch.full((9,), 2)])


@requires_cuda_text
@pytest.mark.parametrize(
    ("dtype", "weighted", "reduce", "cores"),
    by_turns(
        [
            (torch.float32, True, "sum", False),
            (torch.bfloat16, False, "sum", True),
            (torch.float16, False, "mean", True),
            (torch.float64, True, "mean", False),
        ],
        2,
    ),
    ids=str,
)
@pytest.mark.default(1)
def test_on_a_gpu(dtype, weighted, reduce, cores, monkeypatch):
    """The result and all gradients are of kernels, with odd features too."""
    from sparsetir.ops import rgms_kernels

    kernels = run_plans(monkeypatch)
    target = resolve_target({"kind": "cuda", "arch": "sm_90"})
    monkeypatch.setattr(rgms_kernels, "target_of", lambda _: target)
    x, weight, a = operands(dtype, 15, 16, 57, 3, 24)
    agree(sparse_graph(), x, weight, a if weighted else None, reduce, 24)
    gradients = [GradientTiles] * (1 + weighted)
    assert [type(config) for _, config in kernels] == [RelationalRows, *gradients]
    (_, config), *_ = kernels
    assert (config.shares is not None) == cores
