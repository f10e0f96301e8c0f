"""Patterns that were seen: found again, bounded, and never mistaken for others."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import sparsetir
from sparsetir import ops
from sparsetir.ops import cache
from sparsetir.ops.cache import measured
from sparsetir.ops.structure import Structure, pattern_of_edges

ROWPTR, COL = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 1, 1, 0])  # in no order, one twice
EDGES = torch.tensor([[3, 1, 0, 1, 0], [0, 2, 0, 2, 2]])


def structure_of_edges(edges, m, n):
    return pattern_of_edges(edges, m, n).structure


def dense(structure):
    """The number of times that each element is stored."""
    out = torch.zeros(structure.shape, dtype=torch.int64)
    return out.index_put_((structure.rows, structure.col), torch.tensor(1), accumulate=True)


def test_a_structure_is_made_once():
    first = ops.structure_of(ROWPTR, COL, 4)
    assert ops.structure_of(ROWPTR, COL, 4) is first
    assert ops.structure_of(ROWPTR[:], COL.detach(), 4) is first  # other objects, the same memory
    assert ops.structure_of(ROWPTR, COL, 5) is not first
    assert ops.structure_of(ROWPTR, COL.clone(), 4) is not first
    assert first.transposed is first.transposed
    info = ops.cache_info()
    assert info["entries"] == 2  # that of the copy went with it
    more = first.rows.nbytes + first.degrees.nbytes
    assert ops.cache_info()["bytes"] == info["bytes"] + more
    ops.structure_of(ROWPTR, COL, 4).run("spmm", (torch.eye(4),))
    assert ops.cache_info()["bytes"] > info["bytes"] + more  # what the plan has arranged


def test_what_is_measured():
    x, y = torch.zeros(8), np.zeros(16, "int8")
    held = {"a": x, "b": [x[2:], x.numpy()], "c": (y, y[3:], None, "text")}
    assert measured(held) == 32 + 16
    plan = sparsetir.plan("spmm", sparsetir.SparseMatrix(torch.eye(64).to_sparse()), 4)
    assert 65 * 4 + 2 * 64 * 4 <= measured(plan) < 4096
    held["a"] = held  # which holds itself
    assert measured(held) == 48


@pytest.fixture
def compiled_kernels():
    """Those that steps take are there: TVM's parser keeps the frames that call it, with the edges
    in them, until garbage is collected."""
    for _ in range(2):
        x = torch.rand(4, 4, requires_grad=True)
        ops.spmm((EDGES.clone(), (4, 3)), x).sum().backward()
        ops.spmm(torch.eye(4).to_sparse_csr(), x)
        step(np.random.default_rng(0), torch.randn(200, 8))
    ops.clear_cache()
    gc.collect()


def test_what_is_kept_goes_with_the_memory_of_the_edges(compiled_kernels):
    """Memory is freed at once, unless a view, a structure's user or a backward pass needs it."""
    gc.disable()
    try:
        edges, x = EDGES.clone(), torch.rand(4, 4, requires_grad=True)
        view, kept = edges[:, 1:], weakref.ref(structure_of_edges(edges, 3, 4))
        out = ops.spmm((edges, (4, 3)), x)
        del edges
        assert kept() is not None and ops.cache_info()["entries"] == 1
        del view
        assert ops.cache_info() == {"entries": 0, "bytes": 0, "misses": ops.cache_info()["misses"]}
        assert kept() is not None
        out.sum().backward()
        assert x.grad[:, 0].tolist() == [2, 2, 0, 1]
        del out
        assert kept() is None
        csr = torch.eye(4).to_sparse_csr()
        ops.spmm(csr, x)
        assert ops.cache_info()["entries"] == 1
        del csr
        assert ops.cache_info()["entries"] == 0
    finally:
        gc.enable()


def test_garbage_is_collected_while_entries_are_measured():
    """An owner in a cycle goes at one of the allocations, and its entry with it."""
    limits = gc.get_threshold()
    gc.collect()
    try:
        for allocations in range(60):
            gc.disable()
            owner = [EDGES.clone()]
            structure_of_edges(owner[0], 3, 4)
            owner.append(owner)
            del owner
            gc.set_threshold(gc.get_count()[0] + allocations, *limits[1:])
            gc.enable()
            ops.cache_info()
    finally:
        gc.enable()
        gc.set_threshold(*limits)


def test_few_bytes_are_not_measured_again(monkeypatch):
    """Beside what new edges take, to walk through what is kept for others takes long."""
    calls, measured = [], cache.measured
    monkeypatch.setattr(cache, "measured", lambda *args: (calls.append(args), measured(*args))[1])
    small = cache.Cache(max_entries=100, max_bytes=1 << 30)
    owners = [torch.arange(1000) for _ in range(2 * cache.RECENT)]
    for owner in owners:
        small.keep("key", lambda x: x, owner)
    assert not calls and small.bytes == 2 * 8000 * len(owners)
    small.limit(None, 8000 * 2 * len(owners))
    calls.clear()
    for owner in [torch.arange(1000) for _ in range(cache.RECENT)]:
        small.keep("key", lambda x: x, owner)
    assert calls


def test_rows_degrees_and_order():
    sparse = ops.structure_of(ROWPTR, COL, 4)
    assert sparse.rows.tolist() == [0, 0, 2, 2, 2]
    assert sparse.degrees.tolist() == [2, 0, 3]
    assert sparse.order is None and sparse.pattern.indices.dtype == np.int32
    edges = structure_of_edges(EDGES, 3, 4)
    assert torch.equal(edges.rowptr, ROWPTR) and edges.col.tolist() == [3, 0, 1, 1, 0]
    assert edges.order.tolist() == [0, 2, 1, 3, 4]
    values = torch.arange(5.0)
    assert edges.arranged(values).tolist() == [0, 2, 1, 3, 4]
    assert torch.equal(edges.restored(edges.arranged(values)), values)
    both = torch.stack([values, -values], 1)
    assert torch.equal(edges.restored(edges.arranged(both, 0), 0), both)


@pytest.mark.skipif(sparsetir.threads().pool != "openmp", reason="torch's threads are others")
def test_numbers_of_threads_are_followed():
    rowptr, col = torch.arange(0, 60_001, 60), torch.arange(60_000) % 1000
    structure, before, plans = ops.structure_of(rowptr, col, 1000), torch.get_num_threads(), []
    try:
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            structure.run("spmm", (torch.ones(1000, 64),))
            structure.fast_path("spmm", (torch.ones(1000, 64),))
            plans.append(structure.planned("spmm", 64, torch.float32, ones=True).plan)
    finally:
        torch.set_num_threads(before)
    assert [plan.config.parallel for plan in plans] == [False, True, False]
    assert {run for run, _ in structure._calls.values()} == {*plans[:2]} and plans[0] is plans[2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_transposed(dtype):
    sparse = structure_of_edges(EDGES.to(dtype), 3, 4)
    other = sparse.transposed
    assert torch.equal(dense(other), dense(sparse).T)
    assert other.rowptr.dtype == other.col.dtype == torch.int32  # as kernels take them
    arranged = other.arranged(EDGES)  # sources are its rows, targets its columns
    assert arranged.tolist() == [other.rows.tolist(), other.col.tolist()]
    again = other.transposed
    assert torch.equal(dense(again), dense(sparse))


def test_limits():
    ops.limit_cache(entries=3)
    edges = [torch.tensor([[i], [0]]) for i in range(6)]
    structures = [structure_of_edges(e, 1, 6) for e in edges]
    assert ops.cache_info()["entries"] == 3
    assert structure_of_edges(edges[5], 1, 6) is structures[5]
    assert structure_of_edges(edges[0], 1, 6) is not structures[0]
    ops.limit_cache(bytes=1)
    assert ops.cache_info()["entries"] == 1  # the last one always stays
    with pytest.raises(ValueError, match="limit_cache: argument 'entries': expected 1 or more"):
        ops.limit_cache(entries=0)


def step(rng, B):
    """An operator and its gradient on a new pattern."""
    edges = torch.from_numpy(rng.integers(0, 200, (2, 500)))
    x, values = B.clone().requires_grad_(), torch.ones(500, requires_grad=True)
    ops.spmm((edges, 200), x, values=values).sum().backward()
    ops.gspmm((edges, 200), "u_mul_e", "sum", B, values[:, None]).sum().backward()
    degrees = torch.bincount(edges[0], minlength=200).float()
    assert torch.equal(x.grad[:, 0], degrees)


def test_what_the_cache_drops_is_freed_at_once():
    """A structure's caches do not refer to it: graphs are large, and cycles live long."""

    def living():
        return [obj for obj in gc.get_objects() if type(obj) is Structure]

    others = living()  # of what other tests keep
    edges = torch.randint(0, 30, (2, 90))
    x, values = torch.randn(30, 8, requires_grad=True), torch.ones(90, requires_grad=True)
    for reduce in ("sum", "mean", "max"):
        ops.spmm((edges, 30), x, reduce, values=values).sum().backward()
    ops.gspmm((edges, 30), "copy_u", "mean", x).sum().backward()
    ops.edge_softmax((edges, 30), ops.sddmm((edges, 30), x, x)).sum().backward()
    gc.collect()
    structures = [
        weakref.ref(each) for each in living() if not any(each is other for other in others)
    ]
    assert structures
    gc.disable()
    try:
        ops.clear_cache()
        assert not any(each() for each in structures)
    finally:
        gc.enable()


def test_many_threads_and_one_structure():
    rng = np.random.default_rng(0)
    A = (torch.from_numpy(rng.integers(0, 300, (2, 6000))), 300)
    inputs = [(torch.randn(300, 16), torch.randn(6000)) for _ in range(8)]

    def run(B, values):
        B, values = B.clone().requires_grad_(), values.clone().requires_grad_()
        out = ops.spmm(A, B, values=values)
        return out, *torch.autograd.grad(out.sin().sum(), (B, values))

    want = [run(*each) for each in inputs]
    ops.clear_cache()
    wrong, start = [], threading.Barrier(8)

    def work(i):
        start.wait()
        for _ in range(25):
            if not all(map(torch.equal, run(*inputs[i]), want[i])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ops.cache_info()["entries"] == 1
