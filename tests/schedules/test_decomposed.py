"""SpMM over formats of the library, against scipy, on patterns that are easy to get wrong."""

import importlib

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from pairs import by_turns
from sparsetir.formats import (
    BSR,
    COO,
    CSC,
    CSR,
    DBSR,
    DCSR,
    DIA,
    ELL,
    SELL,
    SRBCRS,
    EnumeratedPatterns,
    Hyb,
    Ragged,
    RowELL,
)
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates import decomposed
from sparsetir.schedules.templates.decomposed import Decomposed, refusal
from sparsetir.sparse_ir.errors import ScheduleError
from spmm_gpu_common import (
    MASKS,
    kernel,
    name_of,
    of_mask,
    on_runners,
    operands,
    oracle,
    run_kernel,
    scheduled,
)
from spmm_gpu_common import check as check_close

FORMATS = (
    CSR(), DCSR(), CSC(), COO(), ELL(), Ragged(), DIA(), RowELL(4), BSR(3, 4), DBSR(4, 2),
    SRBCRS(4, 4), SELL(4, 8), Hyb(2, 2), EnumeratedPatterns(3),
)  # fmt: skip
IN_TILES = (CSR(), DCSR(), ELL(), DIA(), RowELL(4), BSR(3, 4), DBSR(4, 2), SRBCRS(4, 4), Hyb(2, 2))


def csr(dense, dtype="float32"):
    out = sp.csr_array(dense.astype(dtype))
    out.data = np.random.default_rng(3).uniform(-1, 1, out.nnz).astype(dtype)
    return out


def zoo():
    """Rows and columns of different lengths, of sizes that blocks do not divide."""
    rng = np.random.default_rng(0)
    scattered = rng.random((37, 29)) < 0.15
    scattered[5:9] = False
    one_row = np.zeros((23, 40), bool)
    one_row[7] = True
    band = abs(np.subtract.outer(np.arange(19), np.arange(26))) < 3
    return {
        "scattered": scattered, "one row": one_row, "band": band, "empty": np.zeros((6, 5), bool),
        "no rows": np.zeros((0, 5), bool), "one element": np.ones((1, 1), bool),
        "dense": np.ones((17, 11), bool),
    }  # fmt: skip


def check(matrix, config, feat, dtype="float32", fill=None):
    plan = sparsetir.plan("spmm", matrix, feat, config=config)
    b = np.random.default_rng(1).uniform(-1, 1, (matrix.shape[1], feat)).astype(dtype)
    if fill is not None:
        b[fill] = np.inf
    out = np.full((matrix.shape[0], feat), np.nan, dtype)
    plan(b, out=out)
    with np.errstate(invalid="ignore"):
        wanted = np.vstack([np.zeros((0, feat)), *(
            matrix.data[s:e] @ b[matrix.indices[s:e]] if e > s else np.zeros((1, feat))
            for s, e in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)
        )])  # fmt: skip
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    return plan, b


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_default_schedule(fmt):
    """One kernel for all patterns and features; padding does not show."""
    before = sparsetir.compilations()
    for name, dense in zoo().items():
        matrix = csr(dense)
        pattern = sparsetir.SparseMatrix(matrix).pattern
        if refusal(fmt, pattern, Spmm()) is None:
            fill = 4 if name == "scattered" else None
            check(matrix, Decomposed(fmt), 5, fill=fill)
            check(matrix, Decomposed(fmt), 18)
    assert sparsetir.compilations() - before <= 1


@pytest.mark.parametrize("fmt", IN_TILES, ids=lambda f: f.name)
def test_tiles_in_registers(fmt):
    config = Decomposed(fmt, tile=16, lanes=8)
    for name, dense in zoo().items():
        matrix = csr(dense)
        if refusal(fmt, sparsetir.SparseMatrix(matrix).pattern, Spmm()) is None:
            check(matrix, config, 32, fill=4 if name == "scattered" else None)
    with pytest.raises(ScheduleError, match="multiples of 16 features, got 24"):
        sparsetir.plan("spmm", csr(zoo()["band"]), 24, config=config)


@pytest.mark.parametrize("fmt", IN_TILES, ids=lambda f: f.name)
def test_a_feature_size_that_tiles_do_not_divide(fmt):
    for dense in (zoo()["scattered"], zoo()["one row"]):
        check(csr(dense), Decomposed(fmt, tile=20, lanes=8, feat=29), 29)


def test_filled_blocks_have_no_mask():
    blocks = np.kron(np.random.default_rng(0).random((4, 5)) < 0.5, np.ones((2, 3), bool))
    config = Decomposed(BSR(2, 3), tile=8, lanes=8, filled=True)
    plan, _ = check(csr(blocks), config, 16)
    assert not any("mask" in name for name in plan.kernel.signature.names)
    assert plan.padding == 0
    check(csr(blocks), Decomposed(BSR(2, 3), filled=True), 3)
    with pytest.raises(ScheduleError, match="expected a pattern that fills bsr_2_3"):
        sparsetir.plan("spmm", csr(zoo()["scattered"]), 16, config=config)


@pytest.mark.parametrize("config", [Decomposed(Hyb(1, 2)), Decomposed(BSR(2, 2), 8, 8)], ids=str)
def test_values_of_a_run(config):
    matrix = csr(zoo()["scattered"])
    plan, b = check(matrix, config, 8)
    values = np.arange(1, matrix.nnz + 1, dtype="float32")
    wanted = sp.csr_array((values, matrix.indices, matrix.indptr), shape=matrix.shape) @ b
    np.testing.assert_allclose(plan(b, values=values), wanted, rtol=1e-4)
    found = plan(torch.from_numpy(b), values=torch.from_numpy(values))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4)
    check(matrix, config, 8)


def check_narrow(matrix, config, feat, dtype):
    """Sums of n terms in float32, whatever their order, and one rounding."""
    rng, kind = np.random.default_rng(2), getattr(torch, dtype)
    a = torch.from_numpy(rng.standard_normal(matrix.nnz)).to(kind)
    b = torch.from_numpy(rng.standard_normal((matrix.shape[1], feat))).to(kind)
    run = sparsetir.plan("spmm", matrix, feat, config=config, dtype=dtype)
    out = torch.full((matrix.shape[0], feat), float("nan"), dtype=kind)
    run(b, out=out, values=a)
    dense = [np.zeros(matrix.shape) for _ in range(2)]
    at = sparsetir.SparseMatrix(matrix).pattern.coords
    for array, values in zip(dense, (a, abs(a)), strict=True):
        array[tuple(at)] = values.double().numpy()
    wanted, size = dense[0] @ b.double().numpy(), dense[1] @ abs(b).double().numpy()
    terms = np.diff(matrix.indptr)[:, None] + 2
    close = torch.finfo(kind).eps / 2 * abs(wanted) + terms * 2.0**-23 * size + 1e-7
    assert (abs(out.double().numpy() - wanted) <= close).all()
    return run


NARROW = [
    (dtype, config)
    for dtype in ("float16", "bfloat16")
    for fmt in FORMATS
    for config in (Decomposed(fmt), *([Decomposed(fmt, 20, 8, 29)] if fmt in IN_TILES else []))
]


@pytest.mark.parametrize(("dtype", "config"), by_turns(NARROW, 9), ids=str)
def test_sums_of_16_bits_are_rounded_once(dtype, config):
    """In all formats, in pieces of rows and over several rules too."""
    for dense in zoo().values():
        matrix = csr(dense)
        if refusal(config.format, sparsetir.SparseMatrix(matrix).pattern, Spmm(dtype)) is None:
            check_narrow(matrix, config, 29, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", [Decomposed(RowELL(4)), Decomposed(RowELL(4), 16, 16)], ids=str)
def test_terms_that_16_bits_would_lose(config, dtype):
    """2048 and more pieces of one, which float16 would stop at."""
    matrix = sp.csr_array(np.ones((1, 5000), "float32"))
    run = check_narrow(matrix, config, 16, dtype)
    out = run(torch.ones(5000, 16, dtype=getattr(torch, dtype)))
    assert (out == torch.tensor(5000.0).to(out.dtype)).all()


def test_float64_int64_and_vectors(monkeypatch):
    matrix = csr(zoo()["scattered"], "float64")
    check(matrix, Decomposed(BSR(3, 4), 8, 8), 16, "float64")
    x = np.random.default_rng(0).random(29)
    run = sparsetir.plan("spmv", matrix, config=Decomposed(ELL()))
    np.testing.assert_allclose(run(x), matrix @ x)
    module = importlib.import_module("sparsetir.planning.request")
    monkeypatch.setattr(module, "idtype_for", lambda *_: "int64")
    plan, _ = check(csr(zoo()["scattered"]), Decomposed(Hyb(1, 2)), 8)
    assert plan.problem.idtype == "int64"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 2}, "got heads"),
        ({"reduce": "max"}, "got reduce='max'"),
        ({"reduce": "mean"}, "got reduce='mean'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(options, message):
    with pytest.raises(ScheduleError, match=message):
        sparsetir.plan("spmm", csr(zoo()["band"]), 8, config=Decomposed(CSR()), **options)
    with pytest.raises(TypeError, match="expected SddmmGroups for this operator"):
        sparsetir.plan("sddmm", csr(zoo()["band"]), 8, config=Decomposed(CSR()))


def test_tiles_that_a_format_does_not_have_are_refused():
    band = csr(zoo()["band"])
    with pytest.raises(ScheduleError, match="Decomposed: .* rows of 'spmm_csc' to come before"):
        sparsetir.plan("spmm", band, 16, config=Decomposed(CSC(), 16, 8))


def test_too_much_padding_is_refused_before_converting(monkeypatch):
    def convert(*_):
        raise AssertionError

    monkeypatch.setattr(ELL, "convert", convert)
    one_row = np.zeros((400, 300), bool)
    one_row[3] = True
    with pytest.raises(
        ScheduleError, match=r"ell takes too much room .* 400.0 places for each element"
    ):
        sparsetir.plan("spmm", csr(one_row), 8, config=Decomposed(ELL()))


@pytest.mark.parametrize(
    "fmt, dtype, as_cuda",
    on_runners([(BSR(3, 4), "float32"), (CSC(), "float32"), (Hyb(1, 2), "float16")], (1, 2)),
    ids=name_of,
)
def test_the_default_schedule_of_gpus(fmt, dtype, as_cuda):
    config, problem = Decomposed(fmt), Spmm(dtype)
    made = kernel(decomposed, problem, config, as_cuda=as_cuda)
    for name in ("empty rows", "one dense row"):
        matrix = of_mask(MASKS[name], "int32")
        given = operands(matrix, problem, 12)
        arranged = decomposed.arrange(matrix, problem, config)
        out = np.full((matrix.shape[0], 12), np.nan, dtype)
        args = {**arranged.arguments, **arranged.stored.values(A=given["a"]), "feat": 12}
        found = run_kernel(made, {**args, "b": given["b"], "out": out})["out"]
        wanted = oracle(matrix, problem, given["a"], given["b"])
        check_close(found, wanted, dtype)
    with pytest.raises(ScheduleError, match="scheduled for no threads"):
        scheduled(decomposed, problem, Decomposed(CSR(), 16, 8))


@pytest.mark.parametrize("fmt", IN_TILES, ids=lambda f: f.name)
def test_tiles_of_doubles_and_long_offsets(fmt, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("sparsetir.planning.request"), "idtype_for", lambda *_: "int64"
    )
    config = Decomposed(fmt, tile=12, lanes=8, feat=24)
    for dense in (zoo()["scattered"], zoo()["empty"]):
        plan, _ = check(csr(dense, "float64"), config, 24, "float64")
        assert plan.problem.idtype == "int64"


USERS = """
@T.prim_func
def blocks(v: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
           m: T.int32, n: T.int32, nnz: T.int32, d: T.int32):
    R = T.dense_fixed(m)
    S = T.sparse_variable(R, (n, nnz), (indptr, indices))
    P = T.dense_fixed(4)
    Q = T.dense_fixed(4)
    ROW = T.dense_fixed(m * 4)
    COL = T.dense_fixed(n * 4)
    F = T.dense_fixed(d)
    V = T.match_sparse_buffer(v, (R, S, P, Q), "float32")
    X = T.match_sparse_buffer(x, (COL, F), "float32")
    Y = T.match_sparse_buffer(y, (ROW, F), "float32")
    with T.sp_iter({axes}, "{kinds}", "sums") as {coords}:
        with T.init():
            Y[r * 4 + p, f] = 0.0
        {body}
"""
PLAIN = {
    "axes": "[R, S, P, Q, F]", "kinds": "SRSRS", "coords": "[r, s, p, q, f]",
    "body": "Y[r * 4 + p, f] = Y[r * 4 + p, f] + V[r, s, p, q] * X[s * 4 + q, f]",
}  # fmt: skip


def test_a_program_of_ones_own():
    """The template goes by what loops are, whatever they are called."""
    matrix = sp.random_array((8, 6), density=0.4, format="csr", dtype="float32", rng=0)
    blocked = sp.kron(matrix, np.ones((4, 4), "float32"), "bsr")
    kernel = sparsetir.build(
        sparsetir.from_source(USERS.format(**PLAIN)),
        schedule=decomposed.apply, config=Decomposed(BSR(4, 4), 16, 8),
    )  # fmt: skip
    assert 'with T.sp_iter([S, Q, P, F1, F2], "RRSSS"' in kernel.stages["I"].script()
    x = np.random.default_rng(0).random((24, 32), "float32")
    y = np.full((32, 32), np.nan, "float32")
    blocks = blocked.tobsr((4, 4))
    blocks.sort_indices()
    indptr, indices = (a.astype("int32") for a in (blocks.indptr, blocks.indices))
    kernel(blocks.data, x, y, indptr, indices, n=6)
    np.testing.assert_allclose(y, blocked @ x, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "body": 'T.sp_iter_attr({"ordered": 1}); '
                "Y[r * 4 + p, f] = V[r, s, p, q] * X[s * 4 + q, f]"
            },
            "'sums' to be a reduction",
        ),
        (
            {"body": PLAIN["body"].replace("Y[r * 4 + p, f]", "Y[f, r * 4 + p]")},
            "'sums' to store features side by side",
        ),
        ({"kinds": "SSSSS"}, "sums over what rows store"),
    ],
)
def test_programs_of_another_shape_are_refused(fields, message):
    func = sparsetir.from_source(USERS.format(**{**PLAIN, **fields}))
    with pytest.raises(ScheduleError, match=f"Decomposed: argument 'sch': expected {message}"):
        sparsetir.build(func, schedule=decomposed.apply, config=Decomposed(BSR(4, 4), 16, 8))
