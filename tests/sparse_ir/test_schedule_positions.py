"""positions and peel, also of fibers: what they make, that it means the same, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from pairs import by_turns
from positions_common import SUMS, scaled, total
from programs import CASES, PROGRAMS, copied
from schedule_common import gives, opened, program
from small import making

RNG = np.random.default_rng(0)


def sddmm() -> Any:
    return program("sddmm_fused")


def arguments(func: Any, density: float = 0.3) -> tuple[dict[str, Any], np.ndarray]:
    """Arrays for one of the programs here, and the result in float64."""
    m, n, feat = 13, 9, 5
    a = sp.random_array((m, n), density=density, format="csr", rng=RNG)
    a.sort_indices()
    nnz, rows, cols = a.nnz, np.repeat(np.arange(m), np.diff(a.indptr)), a.indices

    def of(*shape: int) -> np.ndarray:
        return RNG.random(shape, dtype="float32")

    index = {"indptr": a.indptr.astype("int32"), "indices": cols.astype("int32")}
    sizes = {"m": m, "n": n, "nnz": nnz, "feat": feat}
    if func.name == "scaled":
        values = {"a": of(nnz, feat), "b": of(n)}
        want = (values["a"] * values["b"][cols, None]).T
    elif func.name == "total":
        values = {"a": of(nnz), "b": of(n)}
        want = np.array([(values["a"].astype("float64") * values["b"][cols]).sum()])
        del sizes["feat"]
    else:
        values = {"a": of(nnz), "x": of(m, feat), "y": of(n, feat)}
        want = values["a"] * (values["x"][rows] * values["y"][cols]).sum(1)
    return {**values, "out": np.zeros(want.shape, "float32"), **index, **sizes}, want


def check(func: Any, plain: Any) -> None:
    """The result of the plain program."""
    kernel = sparsetir.build(func)
    for density in (0.3, 0.03, 0.0, 1.0):
        args, want = arguments(plain, density)
        gives(func, args, {"out": want}, kernel=kernel)


@pytest.mark.parametrize("parts", [None, 1, 3, "parts"])
@pytest.mark.parametrize("plain", [scaled, total, sddmm()], ids=lambda f: f.name)
def test_positions_keep_the_result(plain: Any, parts: Any) -> None:
    name = {"sddmm_fused": "sddmm"}.get(plain.name, plain.name)
    sch, _, loops = opened(plain, name)
    loop = sch.positions(next(x for x in loops if x.name == "I_J"), parts=parts)
    assert loop.name == "I_J"
    assert "search" not in sparsetir.lower_sparse_iter(sch.func).script()
    check(sch.func, plain)


# -- peel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [scaled, total, sddmm()], ids=lambda f: f.name)
@pytest.mark.parametrize("multiple", [2, 8])
def test_peel_keeps_the_result(plain: Any, multiple: int) -> None:
    name = {"sddmm_fused": "sddmm"}.get(plain.name, plain.name)
    sch, _, loops = opened(plain, name)
    whole, rest = sch.peel(sch.positions(next(x for x in loops if x.name == "I_J")), multiple)
    assert (whole.iteration, rest.iteration) == (name, f"{name}_rest")
    sch.split(whole, [None, multiple], tail="exact")
    assert "promises" not in sch.func.script()
    check(sch.func, plain)


def test_peel_drops_the_conditions_of_shifted_tiles_that_always_hold() -> None:
    sch, it, (loop, k) = opened(sddmm(), "sddmm")
    sch.positions(loop)
    sch.bound(k, 5, "exact")
    tiles, lanes = sch.split(k, [None, 2], tail="shift")
    sch.peel(tiles, 2)
    first, second = sch.func.script().split("sddmm_rest")
    assert "T.at_most" not in first and "T.tail" not in first
    assert "if T.tail(T.at_most((2 + k0) * 2, 3) + k1, 5, (2 + k0) * 2):" in second
    check(sch.func, sddmm())


def fiber_positions(func: Any, name: str, **options: Any) -> Any:
    """The schedule after positions of its first two loops, and its loops."""
    sch = sparsetir.Schedule(func)
    it = sch.get_sparse_iteration(name)
    i, j, *_ = sch.get_sp_iters(it)
    sch.positions(sch.sparse_fuse(it, [i, j]), **options)
    return sch


@pytest.mark.parametrize("name", ["ttm", "ttv"])
def test_a_tensor_as_the_matrix_of_its_fibers(name: str) -> None:
    program = PROGRAMS[name]
    sch = fiber_positions(program.make("float32", "int32"), name)
    assert "I_J_K = T.sparse_variable(I_J, (p, nnz_k), (k_ptr, k_idx)" in sch.func.script()
    assert "search" not in sparsetir.lower_sparse_iter(sch.func).script()
    kernel, rng = sparsetir.build(sch), np.random.default_rng(0)
    for case in CASES:
        args = program.inputs(rng, case, "float32", "int32")
        with np.errstate(invalid="ignore"):
            gives(sch, args, program.oracle(args), 1e-4, 1e-5, kernel)


def check_sums(sch: Any) -> None:
    """A schedule of `SUMS` on a tensor with an empty row, and a fiber without elements."""
    args = {
        "a": np.arange(1, 7, dtype="float32"), "y": np.zeros(3, "float32"),
        "j_ptr": [0, 2, 2, 3], "j_idx": [0, 2, 1], "k_ptr": [0, 2, 2, 3], "k_idx": [0, 1, 1],
        "l_ptr": [0, 2, 3, 6], "l_idx": [0, 3, 1, 0, 1, 2],
    }  # fmt: skip
    args = {k: np.asarray(v, "int32") if isinstance(v, list) else v for k, v in args.items()}
    sizes = {"m": 3, "n": 3, "p": 2, "q": 4, "nnz_j": 3, "nnz_k": 3, "nnz_l": 6}
    gives(sch, {**args, **sizes}, {"y": [1 + 2 + 3, 0, 4 + 5 + 6]}, rtol=0)


def test_axes_of_several_levels_follow() -> None:
    sch = fiber_positions(sparsetir.from_source(SUMS), "sums")
    assert "[I_J, I_J_K, I_J_L]" in sch.func.script()
    check_sums(sch)


def below_fibers(**options: Any) -> Any:
    """The schedule of `SUMS` after positions of its last two loops."""
    sch = sparsetir.Schedule(sparsetir.from_source(SUMS))
    it = sch.get_sparse_iteration("sums")
    sch.positions(sch.sparse_fuse(it, sch.get_sp_iters(it)[2:]), **options)
    return sch


def test_levels_below_a_visited_one() -> None:
    """Rows of what all levels below them store, without a loop for each fiber."""
    sch = below_fibers()
    text = sch.func.script()
    assert "K_L = T.dense_variable(J, (nnz_l, nnz_l), K_L_ptr" in text
    assert "Y[i, j] = Y[i, j] + A[i, j, kl]" in text
    check_sums(sch)


# -- slots --------------------------------------------------------------------------------------

# What is done to the loops of an iteration over rows, slots and features.
SLOTS = {
    "split": lambda sch, it, i, j, k: sch.split(j, [None, 3]),
    "shift": lambda sch, it, i, j, k: sch.split(j, [None, 2], tail="shift"),
    "repeat": lambda sch, it, i, j, k: sch.split(j, [None, 2, 2], tail="repeat"),
    "exact": lambda sch, it, i, j, k: sch.split(j, [None, 2], tail="exact"),
    "as many": lambda sch, it, i, j, k: sch.split(j, [2, 4]),
    "parts": lambda sch, it, i, j, k: sch.divide(j, 2),
    "each row": lambda sch, it, i, j, k: sch.positions(j),
    "fused": lambda sch, it, i, j, k: sch.sparse_fuse(it, [i, j]),
    "all": lambda sch, it, i, j, k: sch.positions(sch.sparse_fuse(it, [i, j])),
    "tiles of all": lambda sch, it, i, j, k: sch.split(sch.sparse_fuse(it, [i, j]), [None, 5]),
    "workspace": lambda sch, it, i, j, k: sch.precompute(
        *(("C", i, [k]) if it.name == "sums" else ("S", sch.split(j, [None, 2])[1], [])),
        scope="global",
    ),
}
# Rows, columns, slots, share of padding.
ZOO = {
    "some": (7, 11, 4, 0.4), "no rows": (0, 11, 4, 0.0), "one slot": (5, 3, 1, 0.3),
    "full": (6, 9, 8, 0.0), "padding alone": (4, 5, 2, 1.0), "one row": (1, 6, 6, 0.5),
}  # fmt: skip
make_sums = making("sums", """
with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", "I\nJ = T.sparse_fixed(I, (n, cols), indices)\nN\nK", A="I J", B="N K", C="I K")  # fmt: skip


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("how", by_turns(SLOTS, 2))
@pytest.mark.parametrize("name", ["sums", "distances"])
def test_slots_are_cut_as_dense_axes_are(name: str, how: str, idtype: str) -> None:
    make = make_sums if name == "sums" else PROGRAMS["distances_ell"].make
    func = make("float32", idtype)
    sch = sparsetir.Schedule(func)
    it = sch.get_sparse_iteration(name)
    SLOTS[how](sch, it, *sch.get_sp_iters(it))
    plain = idtype == "int64"  # the default schedule is on the other ones
    kernel = sparsetir.build(sparsetir.lower_sparse_iter(sch.func) if plain else sch)
    for m, n, cols, padding in ZOO.values():
        columns = np.sort(RNG.random((m, n)).argsort(1)[:, :cols], 1)
        indices = np.where(RNG.random((m, cols)) < padding, -1, columns).astype(idtype)
        sizes = {"m": m, "n": n, "cols": cols, "feat": 5}
        shapes = {
            "a": (m, cols),
            "b": (n, 5),
            "c": (m, 5),
            "x": (m, 5),
            "y": (n, 5),
            "s": (m, cols),
        }
        args = {k: RNG.random(shape, "float32") for k, shape in shapes.items()}
        args = {p: {**args, **sizes, "indices": indices}[p] for p in (q.name for q in func.params)}
        want = copied(args)
        sparsetir.interpret(func, want)
        for run in (lambda **done: sparsetir.interpret(sch.func, done), kernel):
            done = copied(args)
            try:
                run(**done)
            except ValueError as error:
                assert "as its schedule promises" in str(error)
                continue
            for p in (p for p in done if p not in sizes):
                np.testing.assert_allclose(done[p], want[p], rtol=1e-5, err_msg=f"{p} {m, n, cols}")
