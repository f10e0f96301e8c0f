"""Position space: `pos`, `coord`, and cuts of loops over stored elements."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsetir
from csr_zoo import ZOO
from programs import CASES, PROGRAMS, tolerance
from sparsetir.sparse_ir.nodes import Axis, sparse_iterations

Schedule, ScheduleError = sparsetir.Schedule, sparsetir.ScheduleError


def opened(name: str = "spmm", idtype: str = "int32") -> tuple[Any, Any, list[Any]]:
    sch = Schedule(PROGRAMS[name].make("float32", idtype))
    it = sch.get_sparse_iteration(name)
    return sch, it, sch.get_sp_iters(it)


def _columns(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.coord(j)
    sch.split(j, [None, 2, 3])


def _parts_of_columns(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.coord(j)
    sch.divide(j, 3)


def _rows(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.pos(i)
    sch.split(i, [None, 3])


def _taken_back(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.coord(j)
    sch.pos(j)
    sch.split(j, [None, 3])


CUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "split": (
        lambda sch, it, i, j, k: sch.split(j, [None, 3]),
        '[I, J_tiles0, T.part(J, J_part), K], "SRRS"',
    ),
    "split twice": (
        lambda sch, it, i, j, k: sch.split(j, [None, 2, 3]),
        '[I, J_tiles0, J_tiles1, T.part(J, J_part), K], "SRRRS"',
    ),
    "split columns": (_columns, '[I, J_tiles0, J_tiles1, T.part(J, J_part), K], "SRRRS"'),
    "pos after coord": (_taken_back, '[I, J_tiles0, T.part(J, J_part), K], "SRRS"'),
    "split rows": (_rows, '[I_tiles, T.part(I, I_part), J, K], "SSRS"'),
    "divide": (
        lambda sch, it, i, j, k: sch.divide(j, 3),
        '[I, J_parts, T.part(J, J_part), K], "SRRS"',
    ),
    "divide columns": (_parts_of_columns, '[I, J_parts, T.part(J, J_part), K], "SRRS"'),
    "split fused": (
        lambda sch, it, i, j, k: sch.split(sch.sparse_fuse(it, [i, j]), [None, 5]),
        '[I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS"',
    ),
    "divide fused": (
        lambda sch, it, i, j, k: sch.divide(sch.sparse_fuse(it, [i, j]), 500),
        '[I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS"',
    ),
    "divide fused by work": (
        lambda sch, it, i, j, k: sch.divide(sch.sparse_fuse(it, [i, j]), "chunks", by="work"),
        '[I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS"',
    ),
}  # fmt: skip


def operands(matrix: Any, idtype: str, feat: int = 5) -> dict[str, Any]:
    csr = sp.csr_array(matrix)
    csr.sort_indices()
    rng = np.random.default_rng(0)
    (m, n), b = csr.shape, rng.uniform(-1, 1, (csr.shape[1], feat)).astype("float32")
    return {
        "a": csr.data.astype("float32"), "b": b, "c": np.full((m, feat), np.nan, "float32"),
        "indptr": csr.indptr.astype(idtype), "indices": csr.indices.astype(idtype), "m": m, "n": n,
        "nnz": csr.nnz, "feat": feat,
    }  # fmt: skip


def check_spmm(sch: Any, idtype: str, feat: int = 5, interpret: bool = True) -> None:
    """The interpreter, and a kernel called as ever, on the extremes of matrices."""
    kernel = sparsetir.build(sch)
    for name, matrix in ZOO.items():
        args = operands(matrix, idtype, feat)
        want = sp.csr_array(matrix) @ args["b"].astype("float64")
        have = args | {"c": args["c"].copy()}
        kernel(args["a"], args["b"], have["c"], args["indptr"], args["indices"])
        np.testing.assert_allclose(have["c"], want, rtol=1e-4, atol=1e-5, err_msg=name)
        if interpret and args["nnz"] * feat < 4000:
            sparsetir.interpret(sch.func, args)
            np.testing.assert_allclose(args["c"], want, rtol=1e-4, atol=1e-5, err_msg=name)


def check_text_and_trace(sch: Any, func: Any) -> None:
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    again = sch.trace.apply(func)
    assert tvm_ffi.structural_equal(again.func, sch.func, map_free_vars=True)


@pytest.mark.parametrize(
    ("cut", "idtype"), [(c, ("int32", "int64")[n % 2]) for n, c in enumerate(CUTS)]
)
def test_cuts_compute_the_same(cut: str, idtype: str) -> None:
    apply, head = CUTS[cut]
    sch, it, loops = opened(idtype=idtype)
    before = sch.func
    apply(sch, it, *loops)
    assert head in sch.func.script()
    assert "T.sp_iter_attr" not in sch.func.script()  # a cut ends what pos and coord have chosen
    check_text_and_trace(sch, before)
    check_spmm(sch, idtype)


def test_what_is_chosen_is_seen() -> None:
    sch, it, (i, j, k) = opened()
    sch.coord(j)
    assert '"cut": {"J": "coordinates"}' in sch.func.script()
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    lowered = sparsetir.lower_sparse_iter(sch.func).script()
    assert '"cut"' not in lowered


def sites() -> list[tuple[str, str]]:
    """(program, iteration) of all test programs with a variable axis in an iteration."""
    found = []
    for name, program in PROGRAMS.items():
        for it in sparse_iterations(program.make("float32", "int32")):
            if any(isinstance(a, Axis) and a.is_variable for a in it.axes):
                found.append((name, it.name))
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_cuts_of_all_programs(data: Any) -> None:
    """Whatever is legal on the test programs gives what it gave before, by the interpreter."""
    name, where = data.draw(st.sampled_from(sites()))
    program = PROGRAMS[name]
    func = program.make("float32", "int32")
    sch = Schedule(func)
    it = sch.get_sparse_iteration(where)
    loops = sch.get_sp_iters(it)
    nodes = next(x for x in sparse_iterations(func) if x.name == where).axes
    at = data.draw(st.sampled_from(
        [n for n, a in enumerate(nodes) if isinstance(a, Axis) and a.is_variable]
    ))  # fmt: skip
    size, loop = data.draw(st.integers(1, 4)), loops[at]
    how = data.draw(st.sampled_from(["split", "twice", "coord", "divide", "fuse split", "fuse"]))
    try:
        if how.startswith("fuse"):
            loop = sch.sparse_fuse(it, loops[max(at - 1, 0) : at + 1])
        if how == "coord":
            sch.coord(loop)
        if how in ("divide", "fuse"):
            sch.divide(loop, size, by=data.draw(st.sampled_from(["positions", "work"])))
        else:
            sch.split(loop, [None, 2, size] if how == "twice" else [None, size])
    except ScheduleError as error:
        assert f'"{where}")' in str(error)  # a refusal shows the iteration
        return
    args = program.inputs(np.random.default_rng(0), data.draw(st.sampled_from(CASES)), "float32",
                          "int32")  # fmt: skip
    plain, cut = ({k: np.copy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
                  for _ in range(2))  # fmt: skip
    sparsetir.interpret(func, plain)
    sparsetir.interpret(sch.func, cut)
    for key, value in plain.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(cut[key], value, **tolerance("float32"), err_msg=name)
    check_text_and_trace(sch, func)


def chunked(pre: str = "", idtype: str = "int32", tail: str = "guard", by: str = "work") -> Any:
    """SpMM in chunks of equal work; `pre` says where the sum of a piece is precomputed."""
    sch, it, (i, j, k) = opened(idtype=idtype)
    o, i, j = sch.divide(sch.sparse_fuse(it, [i, j]), "chunks", by=by)
    if not pre:
        sch.parallelize(o, race="temporary")
        return sch
    p, v, lane = sch.split(k, [None, 2, 4], tail=tail)
    first = pre == "tiles first"
    sch.sparse_reorder(it, [p, o, i, j, v, lane] if first else [o, i, p, j, v, lane])
    sch.precompute("C", i if first else p, [v, lane])
    sch.parallelize([p, o] if first else o, race="temporary")
    return sch


@pytest.mark.parametrize(
    ("pre", "idtype", "tail", "by"),
    [
        ("", "int32", "guard", "work"),
        ("tiles", "int64", "guard", "positions"),
        ("tiles", "int32", "shift", "work"),
        ("tiles", "int32", "exact", "positions"),
        ("tiles first", "int32", "shift", "work"),
    ],
)
def test_equal_work(pre: str, idtype: str, tail: str, by: str) -> None:
    """Empty rows are zeros, one giant row is summed from many chunks; the init is gone."""
    sch = chunked(pre, idtype, tail, by)
    text = sch.func.script()
    assert "spmm_init" not in text and "if i != C_row[i_parts]:" in text
    check_text_and_trace(sch, PROGRAMS["spmm"].make("float32", idtype))
    check_spmm(sch, idtype, 16 if tail == "exact" else 13)
    assert "for i_parts in T.parallel(chunks)" in sparsetir.build(sch).stages["II"].script() or (
        pre == "tiles first"
    )


OUTPUTS = """
@T.prim_func
def total(a: T.handle, y: T.handle, w: T.handle, indptr: T.handle, m: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_variable(I, (nnz, nnz), indptr)
    K = T.dense_fixed(4)
    A = T.match_sparse_buffer(a, (I, J, K), "float16")
    W = T.match_sparse_buffer(w, (I, K), "float16")
    Y = T.match_sparse_buffer(y, (I, K), "float16")
    with T.sp_iter([I, J, K], "SRS", "total") as [i, j, k]:
        with T.init():
            Y[i, k] = W[i, k]
        Y[i, k] = T.max(Y[i, k], A[i, j, k])
"""


@pytest.mark.parametrize("precomputed", [False, True])
def test_other_sums_that_are_carried(precomputed: bool) -> None:
    """A maximum, an init that reads, half precision, rows of positions alone."""
    sch = Schedule(sparsetir.from_source(OUTPUTS))
    it = sch.get_sparse_iteration("total")
    i, j, k = sch.get_sp_iters(it)
    o, i, j = sch.split(sch.sparse_fuse(it, [i, j]), [None, 3])
    if precomputed:
        sch.precompute("Y", i, [k], dtype="float32")
    sch.parallelize(o, race="temporary")
    assert "total_init" not in sch.func.script()
    lengths = np.array([0, 1, 17, 0, 2, 3, 0])
    rng = np.random.default_rng(0)
    a, w = (rng.uniform(-1, 1, (n, 4)).astype("float16") for n in (lengths.sum(), len(lengths)))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    rows = np.repeat(np.arange(len(lengths)), lengths)
    want = w.copy()
    np.maximum.at(want, rows, a)
    y = np.full((len(lengths), 4), np.nan, "float16")
    args = {"a": a, "w": w, "indptr": indptr, "m": len(w), "nnz": len(a)}
    sparsetir.interpret(sch.func, {**args, "y": y})
    np.testing.assert_array_equal(y, want)
    y[:] = np.nan
    sparsetir.build(sch)(**args, y=y)
    np.testing.assert_array_equal(y, want)


def test_an_init_that_sets_more_is_kept() -> None:
    """Half of the columns are added to; the others are set and stay."""
    text = PROGRAMS["spmm"].make("float32", "int32").script()
    head = text.split("    with T.sp_iter", 1)[0]
    lines = (
        "    H = T.dense_fixed(2)\n    with T.sp_iter([I, K], \"SS\", \"first\") as [i, k]:\n"
        "        C[i, k] = 7.0\n    with T.sp_iter([I, J, H], \"SRS\", \"spmm\") as [i, j, k]:\n"
        "        C[i, k] = C[i, k] + A[i, j] * B[j, k]\n"
    )  # fmt: skip
    func = sparsetir.from_source(head + lines)
    sch = Schedule(func)
    it = sch.get_sparse_iteration("spmm")
    i, j, h = sch.get_sp_iters(it)
    o, i, j = sch.divide(sch.sparse_fuse(it, [i, j]), 5)
    sch.precompute("C", i, [h])
    sch.parallelize(o, race="temporary")
    assert '"first"' in sch.func.script()
    plain, cut = (operands(ZOO["empty rows"], "int32") for _ in range(2))
    sparsetir.interpret(func, plain)
    sparsetir.interpret(sch.func, cut)
    np.testing.assert_allclose(cut["c"], plain["c"], rtol=1e-5)
    assert np.all(cut["c"][:, 2:] == 7.0)


def test_chunks_are_an_argument_of_plans() -> None:
    """The number of chunks is a computed parameter, whose arrays follow; few, or far too many."""
    func = chunked().func
    matrix = ZOO["one dense row"]
    args = operands(matrix, "int32")
    want = sp.csr_array(matrix) @ args["b"].astype("float64")
    for chunks in (1, 2, 999):
        args["c"][:] = np.nan
        sparsetir.interpret(func, {**args, "chunks": chunks})
        np.testing.assert_allclose(args["c"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", ["split columns", "divide fused"])
def test_gpu_text(cut: str) -> None:
    sch, it, loops = opened()
    CUTS[cut][0](sch, it, *loops)
    assert "__global__" in sparsetir.build(sch.func, {"kind": "cuda", "arch": "sm_90"}).source()


def test_no_search_for_each_element() -> None:
    """Rows are found once per piece: the code holds no loop of a search."""
    assert "while" not in sparsetir.build(chunked()).stages["III"].script()


def _fused(sch: Any, it: Any, i: Any, j: Any) -> list[Any]:
    return sch.divide(sch.sparse_fuse(it, [i, j]), 4)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (
        lambda s, it, i, j, k: s.split(j, [2, 8]),
        "split: argument 'factors': expected None as the first, as rows store more or less than "
        "others, got 2; divide cuts each into as many parts",
    ),
    (
        lambda s, it, i, j, k: s.split(j, [None, 8], tail="shift"),
        "split: argument 'tail': expected \"guard\" for 'J', of which a row's last tile holds what "
        "is left, got 'shift'",
    ),
    (
        lambda s, it, i, j, k: s.split(s.sparse_fuse(it, [i, j]), [None, 4, 8]),
        "split: argument 'factors': expected two for 'I_J', as [None, 8], whose tiles are not cut",
    ),
    (
        lambda s, it, i, j, k: s.split(s.split(j, [None, 4])[1], [None, 4]),
        "split: 'J' is in parts already; tiles of tiles are made at once, as by [None, 8, 4]",
    ),
    (
        lambda s, it, i, j, k: s.coord(s.sparse_fuse(it, [i, j])),
        "coord: 'I_J' has positions alone; expected a loop over one axis",
    ),
    (
        lambda s, it, i, j, k: s.coord(s.divide(j, 2)[0]) or s.coord(s.get_sp_iters(it)[1]),
        "coord: the coordinates of 'J_parts' are in no order",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(j, race="temporary"),
        "parallelize: race=\"temporary\" of the reduction loop 'J': legal are loops free of races, "
        "['I', 'K'], or, after sparse_fuse of 'I' and 'J' and split of the fused loop, the first "
        'of the loops made, with race="temporary"',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(s.split(j, [None, 4])[0], race="temporary"),
        "the reduction loop 'J_tiles0': legal are loops free of races, ['I', 'K']\n",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(i, race="temporary"),
        'parallelize: race="temporary" expects the loop over the chunks that split or divide made '
        "of fused rows and elements, got 'I'",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(i, race="atomics"),
        "for unit \"cpu\", got 'atomics': a CPU has no atomic update of what several workers add "
        "to; legal are loops "
        'over rows that one worker owns, or race "temporary"',
    ),
    (
        lambda s, it, i, j, k: s.parallelize(_fused(s, it, i, j)[0], "block", race="temporary"),
        'parallelize: argument \'race\': expected "none" or "ignore" or "atomics" for unit '
        "\"block\", got 'temporary'",
    ),
    (
        lambda s, it, i, j, k: s.parallelize(_fused(s, it, i, j)[0]),
        "loop 'I_J_parts' is not proven free of races (scatter: C); legal are loops whose "
        'coordinates each write elements of their own, or race="ignore" where you know that visits '
        'do not meet, and race="temporary" of this one',
    ),
]


def test_a_dense_reduction_is_told_of_lanes() -> None:
    sch, _, (_, j, k) = opened("sddmm")
    k0, k1 = sch.split(k, [None, 4], tail="exact")
    with pytest.raises(ScheduleError, match=r"loop 'K1': precompute\(.., lanes=\[loop\]\) gives"):
        sch.parallelize(k1, race="temporary")
    _, reduce, *_ = sch.precompute("OUT", j, [], lanes=[k1])
    sch.parallelize(sch.get_sp_iters(reduce)[1])  # as it says
    assert '"loops": ["K1"]' in sch.func.script()


@pytest.mark.parametrize(("apply", "message"), REFUSED)
def test_refused(apply: Callable[..., Any], message: str) -> None:
    sch, it, loops = opened()
    with pytest.raises(ScheduleError) as error:
        apply(sch, it, *loops)
    assert message in str(error.value)
    assert "in T.sp_iter([" in str(error.value)  # the iteration is shown
