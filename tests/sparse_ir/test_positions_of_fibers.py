"""positions of axes that others hang under: a tensor in CSF becomes a matrix of its fibers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from positions_common import SUMS
from programs import CASES, PROGRAMS


def of_fibers(func: Any, name: str, **options: Any) -> Any:
    """The schedule after positions of its first two loops, and its loops."""
    sch = sparsetir.Schedule(func)
    it = sch.get_sparse_iteration(name)
    i, j, *_ = sch.get_sp_iters(it)
    sch.positions(sch.sparse_fuse(it, [i, j]), **options)
    return sch


@pytest.mark.parametrize("name", ["ttm", "ttv"])
def test_a_tensor_as_the_matrix_of_its_fibers(name: str) -> None:
    program = PROGRAMS[name]
    sch = of_fibers(program.make("float32", "int32"), name)
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    assert "I_J_K = T.sparse_variable(I_J, (p, nnz_k), (k_ptr, k_idx)" in sch.func.script()
    assert "search" not in sparsetir.lower_sparse_iter(sch.func).script()
    kernel, rng = sparsetir.build(sch), np.random.default_rng(0)
    for case in CASES:
        args = program.inputs(rng, case, "float32", "int32")
        with np.errstate(invalid="ignore"):
            wanted = program.oracle(args)["y"]
        for run in (lambda a: sparsetir.interpret(sch.func, a), lambda a: kernel(**a)):
            args["y"][...] = np.nan
            run(args)
            np.testing.assert_allclose(args["y"], wanted, rtol=1e-4, atol=1e-5)


def check_sums(sch: Any) -> None:
    """A schedule of `SUMS` on a tensor with an empty row, and a fiber without elements."""
    args = {
        "a": np.arange(1, 7, dtype="float32"), "y": np.full(3, np.nan, "float32"),
        "j_ptr": [0, 2, 2, 3], "j_idx": [0, 2, 1], "k_ptr": [0, 2, 2, 3], "k_idx": [0, 1, 1],
        "l_ptr": [0, 2, 3, 6], "l_idx": [0, 3, 1, 0, 1, 2],
    }  # fmt: skip
    args = {k: np.asarray(v, "int32") if isinstance(v, list) else v for k, v in args.items()}
    sizes = {"m": 3, "n": 3, "p": 2, "q": 4, "nnz_j": 3, "nnz_k": 3, "nnz_l": 6}
    kernel = sparsetir.build(sch)
    for run in (lambda a: sparsetir.interpret(sch.func, a), lambda a: kernel(**a)):
        args["y"][:] = np.nan
        run({**args, **sizes})
        assert args["y"].tolist() == [1 + 2 + 3, 0, 4 + 5 + 6]


def test_axes_of_several_levels_follow() -> None:
    sch = of_fibers(sparsetir.from_source(SUMS), "sums")
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
    assert tvm_ffi.structural_equal(sparsetir.from_source(text), sch.func)
    assert "K_L = T.dense_variable(J, (nnz_l, nnz_l), K_L_ptr" in text
    assert "Y[i, j] = Y[i, j] + A[i, j, kl]" in text
    check_sums(sch)
