"""Decomposition: one computation becomes one per format and still gives the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from format_rules import blocked_csf, csf, inferred, matrix, rule, split
from pairs import by_turns
from programs import PROGRAMS, copied, tolerance
from programs.common import parents_of
from sparsetir.formats.decompose import RESTORE, decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.sparse_ir.nodes import sparse_iterations

GOLDEN = Path(__file__).parents[1] / "golden" / "spmm_bsr_ell_stage1.txt"


def csr_coordinates(args: dict[str, Any]) -> tuple[list[np.ndarray], tuple[int, ...]]:
    return [parents_of(args["indptr"]), args["indices"]], (args["m"], args["n"])


def csf_coordinates(args: dict[str, Any]) -> tuple[list[np.ndarray], tuple[int, ...]]:
    fiber = parents_of(args["k_ptr"])
    rows = parents_of(args["j_ptr"])[fiber]
    return [rows, args["j_idx"][fiber], args["k_idx"]], (args["m"], args["n"], args["p"])


def relational_coordinates(args: dict[str, Any]) -> tuple[list[np.ndarray], tuple[int, ...]]:
    fiber = parents_of(args["j_ptr"])
    relation = parents_of(args["i_ptr"])[fiber]
    shape = (args["relations"], args["m"], args["n"])
    return [relation, args["i_idx"][fiber], args["j_idx"]], shape


def check(
    name: str, rules: list[Any], coordinates: Any, dtype: str = "float32", idtype: str = "int32",
    how: str = "whole",
) -> Any:  # fmt: skip
    """The decomposed program gives what its oracle says, on every case.

    how : "whole" for generated code in one function, which is interpreted as well if it is of
        float32; "parts" for copies and computation in two
    """
    program = PROGRAMS[name]
    func = decompose_format(program.make(dtype, idtype), rules)
    text = func.script()
    parsed = sparsetir.from_source(text)
    assert tvm_ffi.structural_equal(func, parsed, map_free_vars=True), text
    sparsetir.verify(func)
    functions = extract_preprocess(func) if how == "parts" else [func]
    kernels = [sparsetir.build(f) for f in functions]
    for case in program.cases:
        rng = np.random.default_rng(len(case))
        args = program.inputs(rng, case, dtype, idtype)
        with np.errstate(all="ignore"):
            expected = program.oracle(args)
        coords, shape = coordinates(args)
        _, more = inferred(rules, coords, shape, split(rng, len(coords[0]), len(rules)))
        args |= more
        sparsetir.check_structure(func, args)

        def by_code(mine: dict[str, Any]) -> None:
            for kernel in kernels:
                kernel(**{n: mine[n] for n in kernel.signature.names})

        runs = {how: by_code}
        if dtype == "float32" and how == "whole":  # of others each case costs a second
            runs["interpreted"] = functools.partial(sparsetir.interpret, func)
        for way, run in runs.items():
            mine = copied(args)
            run(mine)
            for output, want in expected.items():
                np.testing.assert_allclose(
                    mine[output].astype(np.float64).reshape(want.shape), want,
                    err_msg=f"{way} {case}", **tolerance(dtype),
                )  # fmt: skip
    return func


# -- the paper's example --------------------------------------------------------------------------

APPENDIX_A = """
@T.prim_func
def spmm(
    a: T.handle, b: T.handle, c: T.handle,
    indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat_size: T.int32
) -> None:
    I = T.dense_fixed(m, idtype="int32")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype="int32")
    J_ = T.dense_fixed(n, idtype="int32")
    K = T.dense_fixed(feat_size, idtype="int32")
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
"""


def paper_rules() -> list[Any]:
    """BSR(2) and ELL(2) of appendix A (test_rule.py has them as printed)."""
    blocks = [
        ("IO", "dense", "m"), ("JO", "sparse", "n", "IO"), ("II", "dense", 2), ("JI", "dense", 2),
    ]  # fmt: skip
    return [
        rule(
            "bsr_2", blocks, "IJ", {"I": ["IO", "II"], "J": ["JO", "JI"]},
            lambda i, j: (i // 2, j // 2, i % 2, j % 2),
            lambda io, jo, ii, ji: (io * 2 + ii, jo * 2 + ji),
        ),
        rule(
            "ell_2", [("I2", "dense", "m"), ("J2", "fixed", "n", "I2", 2)], "IJ",
            {"I": ["I2"], "J": ["J2"]}, lambda i, j: (i, j), lambda i, j: (i, j),
        ),
    ]  # fmt: skip


def test_golden() -> None:
    func = sparsetir.from_source(APPENDIX_A)
    before = tvm_ffi.structural_hash(func)
    assert decompose_format(func, paper_rules()).script() == GOLDEN.read_text()
    assert tvm_ffi.structural_hash(func) == before


# -- programs and formats -------------------------------------------------------------------------

# Others of the library are in test_library.py.
SPMM_FORMATS = [names.split() for names in (
    "ell_slots", "ell_rows", "dense", "bsr3", "interleaved", "bell", "bsr2 ell",
    "coo ragged dbsr csr",
)]  # fmt: skip
HOWS = pytest.mark.parametrize("how", ["whole", "parts"])


@HOWS
@pytest.mark.parametrize("names", by_turns(SPMM_FORMATS, 2))
@pytest.mark.default(2)
def test_spmm(names: list[str], how: str) -> None:
    check("spmm", [matrix(n) for n in names], csr_coordinates, how=how)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.default("float64-int64")
def test_spmm_types(dtype: str, idtype: str) -> None:
    rules = [matrix(n, dtype, idtype) for n in ("bsr3", "ell")]
    check("spmm", rules, csr_coordinates, dtype, idtype)


@HOWS
@pytest.mark.parametrize("names", [["bsr2"], ["ell", "csc"]])
@pytest.mark.parametrize("program", ["spmv", "row_sum", "row_max", "spmm_accumulate"])
@pytest.mark.default(2)
def test_reductions(program: str, names: list[str], how: str) -> None:
    check(program, [matrix(n) for n in names], csr_coordinates, how=how)


@HOWS
@pytest.mark.parametrize("buffers", ["A", "OUT", "A OUT"])
@pytest.mark.parametrize("names", [["bsr2"], ["dcsr", "csc", "ell"], ["csr", "bsr3"]])
@pytest.mark.parametrize("program", ["sddmm", "elementwise"])
@pytest.mark.slow
def test_sparse_outputs(program: str, names: list[str], buffers: str, how: str) -> None:
    rules = [matrix(n, buffers=buffers.split()) for n in names]
    # Nothing is taken out where the output alone is in a format.
    func = check(program, rules, csr_coordinates, how="whole" if buffers == "OUT" else how)
    restores = [it.name for it in sparse_iterations(func) if RESTORE in it.annotations]
    assert restores == ([f"restore_OUT_{n}" for n in names] if "OUT" in buffers else [])
    # An output that is set before it is read is not copied in.
    copies = [it.name for it in sparse_iterations(func) if it.name.startswith("copy_OUT")]
    assert not copies


@HOWS
@pytest.mark.parametrize("fmt", ["blocked", "three", "kij"])
@pytest.mark.parametrize("program", ["mttkrp", "csf_sum"])
@pytest.mark.default("mttkrp-kij-whole")
def test_order_three(program: str, fmt: str, how: str) -> None:
    rules = {
        "blocked": [blocked_csf("IJK", 2)],
        "kij": [csf("IJK", (2, 0, 1))],
        "three": [blocked_csf("IJK", 3), csf("IJK", (1, 2, 0)), csf("IJK", name="more")],
    }[fmt]
    check(program, rules, csf_coordinates, how=how)


@HOWS
@pytest.mark.parametrize(
    "rules", [[csf("RIJ", (1, 0, 2))], [blocked_csf("RIJ", 2), csf("RIJ")]], ids=len
)
@pytest.mark.default("1-whole")
def test_relational(rules: list[Any], how: str) -> None:
    check("relational_csf", rules, relational_coordinates, how=how)


@pytest.mark.parametrize("buffers", ["S P", "P"])
@pytest.mark.parametrize("names", [
    ["csc"], ["ell"], ["bsr2"], ["csr", "bsr3", "ell"],
])  # fmt: skip
@pytest.mark.slow
def test_attention(names: list[str], buffers: str) -> None:
    """Scores, softmax and product on other formats, the rows' maxima and sums over all of them."""
    rules = [matrix(n, buffers=buffers.split()) for n in names]
    func = check("attention", rules, csr_coordinates)
    text = func.script()
    assert all(f"top_{n}" in text for n in names) == (buffers == "S P")
    assert all(f"divide_{n}" in text for n in names)
