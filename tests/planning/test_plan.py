"""Plans: arguments, refusals, and that kernels are shared."""

# pyright: reportAttributeAccessIssue=false

import os
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import tvm

import sparsetir
from refusals import refusals, refuse
from sparsetir import SparseMatrix, SparseTensor
from sparsetir.formats import BSR, CSC, CSF, CSR, DBSR, ELL, SRBCRS, Hyb, RowELL
from sparsetir.planning import run_plan
from sparsetir.planning.plan import requested
from sparsetir.runtime.arrays import in_large_pages
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.templates.row_tile import RowTile

A = sp.random_array((30, 20), density=0.2, format="csr", dtype="float32", rng=0)
B = np.random.default_rng(1).standard_normal((20, 16)).astype("float32")
PLAN = sparsetir.plan("spmm", A, 16)
EMPTY = sparsetir.plan("spmm", sp.csr_array((0, 20), dtype="float32"), 16)
BOTH = np.zeros((50, 16), "float32")
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((30, 48), "float32"), RNG.standard_normal((20, 48), "float32")
OUT = torch.empty(A.nnz)
HEADS = sparsetir.plan("spmm", A, 16, heads=1)
ONES, NESTED = torch.ones(20, 1, 16), torch.nested.nested_tensor([torch.ones(2)])


def test_arrays_of_all_kinds_give_arrays_of_their_kind():
    want = A @ B
    np.testing.assert_allclose(PLAN(B), want, atol=1e-5)
    result = PLAN(torch.from_numpy(B))
    assert isinstance(result, torch.Tensor)
    np.testing.assert_allclose(result.numpy(), want, atol=1e-5)
    result = PLAN(tvm.runtime.tensor(B))
    np.testing.assert_allclose(result.numpy(), want, atol=1e-5)


def test_values_of_a_run():
    values = np.random.default_rng(2).standard_normal(A.nnz).astype("float32")
    other = sp.csr_array((values, A.indices, A.indptr), A.shape)
    np.testing.assert_allclose(PLAN(B, values=values), other @ B, atol=1e-5)
    np.testing.assert_allclose(PLAN(B), A @ B, atol=1e-5)  # the planned ones are as they were


def test_the_result_is_written_where_it_is_wanted():
    out = np.full((30, 16), np.nan, "float32")
    assert PLAN(B, out=out) is out
    np.testing.assert_allclose(out, A @ B, atol=1e-5)


def test_read_only_and_unaligned_operands():
    buffer = np.empty(20 * 16 + 1, "float32")
    b = buffer[1:].reshape(20, 16)
    b[:] = B
    b.flags.writeable = False
    np.testing.assert_allclose(PLAN(b), A @ B, atol=1e-5)
    one, values = b[:, :1].copy(), np.arange(A.nnz, dtype="float32")
    one.flags.writeable = False
    other = sp.csr_array((values, A.indices, A.indptr), A.shape)
    got = sparsetir.plan("spmv", A, heads=1)(one, values=values[:, None])  # no copy is made of it
    np.testing.assert_allclose(got, other @ one, rtol=1e-5)


def test_values_are_rounded_to_bfloat16():
    """Rounded to nearest, ties to even; NaN and infinities are kept."""
    tie, step = 2.0**-8, 2.0**-7
    rounded = {
        1 + tie: 1, 1 + 3 * tie: 1 + 2 * step, 1 + tie + 2.0**-20: 1 + step, -1 - tie: -1,
        2.0**-133: 2.0**-133, np.inf: np.inf, -np.inf: -np.inf, np.nan: np.nan,
    }  # fmt: skip
    diagonal = sp.diags_array(np.array(list(rounded), "float32")).tocsr()
    plan = sparsetir.plan("spmm", diagonal, 2, dtype="bfloat16")
    result = plan(np.ones((len(rounded), 2), "bfloat16")).astype("float32")
    np.testing.assert_array_equal(result[:, 0], np.array(list(rounded.values()), "float32"))


test_refusals = refusals(
    """
PLAN()  # TypeError: spmm: expected 1 operands (b), got 0
PLAN(B[:, :8].copy())  # ValueError: 'b': expected shape (20, 16), .. (20, 8)
PLAN(B.astype("float64"))  # TypeError: 'b': expected dtype float32, got float64
PLAN(B[:, ::-1])  # ValueError: 'b': expected a contiguous array
PLAN(B, values=np.ones(2 * A.nnz, "float32")[::2])  # ValueError: 'values': expected a contiguous
PLAN(np.zeros((20, 16), [("a", "f4")]))  # TypeError: 'b': expected dtype float32, got [('a', '<f
PLAN(ONES.to_sparse())  # TypeError: 'b': expected a dense
sparsetir.plan("spmm", A.astype(int), 4)  # ValueError: 'matrix': expected one of .. got 'int64'
SparseMatrix(A) @ B.astype(complex)  # TypeError: A @ x: argument 'x': .. complex128
PLAN(B, values=NESTED)  # ValueError: 'values': expected an array of shape .. got Tensor
HEADS(NESTED)  # ValueError: 'b': expected an array of shape .. second dimension, got Tensor
HEADS(ONES.to_sparse())  # TypeError: 'b': expected a dense array, got a sparse one
HEADS(ONES, out=torch._efficientzerotensor((30, 1, 16)))  # TypeError: 'out': .. tensor with memory
PLAN(3)  # TypeError: argument 'b': expected a torch, NumPy or TVM array, got int
PLAN(B, out=np.empty((30, 15), "float32"))  # ValueError: 'out': expected shape
PLAN(B, values=np.ones(3, "float32"))  # ValueError: 'values': expected an array
PLAN(B, values=np.ones(A.nnz))  # TypeError: 'values': expected dtype float32, got
PLAN(np.zeros((30, 16), "float32")[:20], out=3)  # TypeError: 'out': expected a torch
sparsetir.plan("spam", A)  # ValueError: argument 'op': expected one of spmm, spmv
sparsetir.plan(["spmm"], A)  # ValueError: argument 'op': expected one of spmm, spmv
sparsetir.plan("spmm", A, 4, target=B)  # TypeError: plan: argument 'target': expected 'cpu', 'cuda'
sparsetir.plan("spmm", A)  # TypeError: 'feat': expected the number of features for
sparsetir.plan("spmm", A, 0)  # ValueError: argument 'feat': expected 1 or more, got 0
sparsetir.plan("spmm", A, 2.0)  # ValueError: 'feat': expected 1 or more, got 2.0
sparsetir.plan("spmv", A, 2)  # ValueError: 'feat': expected 1 for 'spmv', got 2
sparsetir.plan("spmm", A, np.ones(3))  # ValueError: expected a number, or an operand of 2
sparsetir.plan("spmm", A, 4, heads=0)  # ValueError: 'heads': expected 1 or more, got 0
sparsetir.plan("spmm", A, 4, threads=-2)  # ValueError: 'threads': expected 1 or more
sparsetir.plan("spmm", A, 4, dtype="int8")  # ValueError: 'dtype': expected one of float32
sparsetir.plan("spmm", A, 4, dtype=np.dtype("float32"))  # TypeError: 'dtype': expected a
sparsetir.plan("spmm", A, 4, reduce="prod")  # ValueError: 'reduce': expected sum, add,
sparsetir.plan("spmm", A, 4, config=3)  # TypeError: 'config': expected .. RowTile
sparsetir.plan("spmm", A, 16, config=RowSplit.for_features(16))  # TypeError: 'config': expected
sparsetir.plan("spmm", A, 16, format=CSC(), config=RowTile(tile=16))
    # ValueError: 'format': expected None with a config, got CSC
sparsetir.plan("spmm", A, 4, format="bsr")  # TypeError: 'format': expected a format of
sparsetir.plan("spmm", A, 4, format=CSF((0, 1, 2)))  # TypeError: a format of matrices
sparsetir.plan("sddmm", A, 8, format=CSR())  # ValueError: expected None for 'sddmm'
sparsetir.plan("spmm", A, 8, format=CSR(), heads=2)  # ScheduleError: 'format': formats .. got heads
pickle.dumps(PLAN)  # TypeError: Plan: cannot be pickled
RowTile(parts=2.5)  # ValueError: RowTile: argument 'parts': expected an integer
PLAN(BOTH[:20], out=BOTH[10:40])  # ValueError: spmm: argument 'out' shares memory with 'b'
EMPTY(B[:3].copy())  # ValueError: 'b': expected shape
sparsetir.plan("sddmm", A, 48)(X, Y, values=OUT)  # TypeError: 'values': the operator takes none
sparsetir.plan("sddmm", A, 48, reduce="mean")  # ValueError: 'reduce': expected 'sum' for 'sddmm'
sparsetir.plan("spmm", A, np.ones((3, 20, 5), "float32"))  # ValueError: 'feat': expected heads as
sparsetir.plan("u_mul_e_sum", A, 4, reduce="max")  # ValueError: 'reduce': expected .. got 'max'
sparsetir.plan("u_sub_v", A, 4)  # ValueError: expected one of spmm, .. or u_dot_v, got 'u_sub_v'
""",
    globals(),
    CSF,
    RowSplit,
    pickle,
)


FORMATS = (
    BSR(4, 4), DBSR(5, 3), CSR(), CSC(), ELL(), RowELL(4), Hyb(1, 2), SRBCRS(4, 8),
)  # fmt: skip


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_a_format_that_the_user_names(format):
    for feat in (5, 48):
        b = np.random.default_rng(0).random((A.shape[1], feat), "float32")
        run = sparsetir.plan("spmm", A, feat, format=format)
        assert run.config.format == format and run.chosen_by == "user"
        np.testing.assert_allclose(run(b), A @ b, rtol=1e-4)


def test_blocks_are_kept():
    """Operands of torch, of scipy, and of a matrix that is made of them."""
    rng = np.random.default_rng(0)
    dense = np.kron(rng.random((4, 6)) < 0.4, np.ones((8, 8))) * rng.random((32, 48))
    dense = dense.astype("float32")
    b = rng.random((48, 32), "float32")
    csr = sp.csr_array(dense)
    bsr = torch.from_numpy(dense).to_sparse_bsr((8, 8))
    for matrix in (csr, csr.tobsr((8, 8)), bsr, sparsetir.SparseMatrix(csr)):
        run = sparsetir.plan("spmm", matrix, 32)
        assert run.config.format == BSR(8, 8) and run.config.filled
        np.testing.assert_allclose(run(b), dense @ b, rtol=1e-4)
        assert not sparsetir.plan("spmm", matrix, 32, format=BSR(5, 5)).config.filled


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_runs_kernels():
    """Workers of a torch DataLoader lack the parent's threads."""
    want = PLAN(B)
    child = os.fork()
    if child == 0:
        os._exit(0 if (PLAN(B) == want).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (PLAN(B) == want).all()


@pytest.mark.skipif(tvm.cuda(0).exist, reason="there is a GPU")
def test_a_target_that_there_is_not():
    with pytest.raises(RuntimeError, match="'target': there is no cuda device"):
        sparsetir.plan("spmm", A, 16, target="cuda")


def test_a_plan_says_what_it_is():
    assert "spmm (30, 16) RowTile(" in repr(PLAN)
    assert PLAN.launches == 1 and PLAN.padding == 0 and PLAN.convert_seconds > 0


def test_large_results_are_asked_for_in_large_pages(monkeypatch):
    large = []
    monkeypatch.setattr(run_plan, "in_large_pages", lambda x: large.append(x) or in_large_pages(x))
    run = sparsetir.plan("spmm", sp.eye_array(4096, format="csr", dtype="float32"), feat=256)
    b = torch.rand(4096, 256)
    assert torch.equal(run(b), b) and [x.nbytes for x in large] == [1 << 22]
    run(b, out=torch.empty_like(b))
    small = torch.empty(64)
    in_large_pages(small)  # less than a page: no request
    assert len(large) == 1


def test_what_changes_between_calls_is_seen():
    run = sparsetir.plan("spmm", sp.eye_array(8, format="csr", dtype="float32"), feat=4)
    b, out = np.ones((8, 4), "float32"), np.empty((8, 4), "float32")
    for _ in range(2):
        assert (run(b, out=out) == 1).all()
    memory = np.ones(40, "float32")
    inside = memory[:32].reshape(8, 4)
    assert (run(b, out=inside, values=memory[32:]) == 1).all()
    out.flags.writeable = False
    refuse(
        """
        b.shape = (4, 8); run(b, out=inside)  # ValueError: argument 'b': expected shape
        b.shape = (8, 4); run(b, out=out)  # ValueError: 'out': it is written, but .. is read-only
        run(b, out=inside, values=memory[31:39])  # ValueError: 'out' shares memory with the values
        """,
        locals(),
    )


@pytest.mark.parametrize(
    ("op", "feat", "options"),
    [
        ("spmm", 4, {"heads": 2, "threads": 2}), ("softmax", None, {"heads": 2}),
        ("attention", 4, {"heads": 2, "feat_in": 2}), ("rgms", 4, {"feat_in": 2}),
        ("u_add_e_max", 4, {"heads": 2, "edge_feat": 4}),
    ],
)  # fmt: skip
def test_counts_may_be_of_numpy(op, feat, options):
    values, dense = np.ones(24, "float32"), np.ones((2, 3, 4))
    matrix = SparseTensor(dense.nonzero(), values, dense.shape) if op == "rgms" else A
    numbers = {name: np.int64(value) for name, value in options.items()}
    request = requested(op, matrix, feat and np.int64(feat), **numbers)
    expected = requested(op, matrix, feat, **options)
    for name in ("problem", "features", "sizes", "callers", "threads", "shapes"):
        assert repr(getattr(request, name)) == repr(getattr(expected, name))
    assert request.chosen() == expected.chosen()


def test_an_operand_says_features_types_and_heads():
    b = np.ones((A.shape[1], 5), "float64")
    run = sparsetir.plan("spmm", A, b, target="cpu")
    assert (run.feat, run.problem.dtype) == (5, "float64")
    np.testing.assert_allclose(run(b), A.astype("float64") @ b)
    heads = np.ones((A.shape[1], 3, 5), "float32")
    assert sparsetir.plan("spmm", A, heads)(heads).shape == (A.shape[0], 3, 5)
    assert sparsetir.plan("spmv", A, b[:, 0]).problem.dtype == "float64"


@pytest.mark.parametrize(
    "options",
    [
        {"config": RowTile(tile=16, lanes=16)},  # CSR as it is
        {"config": RowTile(16, rows=2, blocks=2)},  # values in another order
        {"config": RowTile(16, window=4096, tiles_first=False)},
        {"config": RowTile(16, packed=False, window=4096, tiles_first=False)},
        {"format": BSR(2, 2)},
    ],
    ids=lambda options: "-".join(type(x).__name__ for x in options.values()),
)
def test_a_plan_has_the_matrix_as_it_was(options):
    """Whatever the schedule: what it takes in place of copies would be read unchecked."""
    a = A.copy()
    matrix = SparseMatrix(a)
    run, values = sparsetir.plan("spmm", matrix, 16, **options), A.data + 1
    want, other = A @ B, sp.csr_array((values, A.indices, A.indptr), A.shape) @ B
    a.data *= 2
    a.indices[:] = 0
    a.indptr[1:] = a.nnz
    np.testing.assert_allclose(run(B), want, atol=1e-5)
    np.testing.assert_allclose(run(B, values=values), other, atol=1e-5)
    np.testing.assert_allclose(run(B, out=np.empty((30, 16), "float32")), want, atol=1e-5)


@pytest.mark.parametrize("op", ["u_mul_e_max", "sddmm", "attention"])
def test_plans_of_other_operators_have_the_matrix_as_it_was(op):
    a = A.copy()
    run = sparsetir.plan(op, SparseMatrix(a), 16)
    rows = np.random.default_rng(3).standard_normal((30, 16)).astype("float32")
    operands = {"u_mul_e_max": (B,), "sddmm": (rows, B), "attention": (rows, B, B)}[op]
    want = run(*operands)
    a.data *= 2
    a.indices[:] = 0
    a.indptr[1:] = a.nnz
    np.testing.assert_array_equal(run(*operands), want)


def test_relational_plans_have_the_tensor_as_it_was():
    coords = np.array([[0, 0, 1], [0, 1, 1], [1, 0, 2]], "int32")
    values = np.array([1, 2, 3], "float32")
    run = sparsetir.plan("rgms", SparseTensor(coords, values, (2, 2, 3)), 16)
    x, w = np.ones((3, 16), "float32"), np.ones((2, 16, 16), "float32")
    want = run(x, w)
    values *= 2
    coords[:] = 0
    np.testing.assert_array_equal(run(x, w), want)


def _at(array, offset):
    """The same numbers in memory that begins so many bytes behind a cache line."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    moved = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("offset", [0, 4, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_that_begins_within_a_cache_line(dtype, offset):
    """Large results begin at lines; operands that do not are right, and stay as they are."""
    a = sp.random_array((600, 600), density=0.1, format="csr", dtype=dtype, rng=2)
    plan = sparsetir.plan("spmm", a, 32)
    assert plan.config.pack is False and plan._gathered >= 0
    b = np.random.default_rng(3).random((600, 32)).astype(dtype)
    placed = _at(b, offset * b.itemsize // 4)
    tensor = torch.from_numpy(placed)
    result = plan(placed)
    assert result.ctypes.data % 64 == 0
    out = _at(np.zeros((600, 32), dtype), offset * b.itemsize // 4)
    assert plan(placed, out=out) is out
    for array in (result, out, plan(tensor), plan.repeat([tensor])):
        np.testing.assert_allclose(array, a @ b, rtol=1e-4)
    np.testing.assert_array_equal(placed, b)


def test_candidates_of_operators_of_further_matrices():
    other = A.T.tocsr()
    first, *_ = sparsetir.plan_candidates("spgemm", A, other)
    assert first == sparsetir.plan("spgemm", A, other).config
