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
from sparsetir.formats.infer_indices import infer_format
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


def ways(func: Any) -> list[Any]:
    """The ways to run: interpreted, by code in one function, and in those of copies and the rest.

    The code is generated once.
    """
    whole, parts = sparsetir.build(func), [sparsetir.build(f) for f in extract_preprocess(func)]

    def run_parts(_: Any, args: dict[str, Any]) -> None:
        for kernel in parts:
            kernel(**{n: args[n] for n in kernel.signature.names})

    return [interpreted, lambda _, args: whole(**args), run_parts]


def interpreted(func: Any, args: dict[str, Any]) -> None:
    sparsetir.interpret(func, args)


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


def paper_example() -> Any:
    return decompose_format(sparsetir.from_source(APPENDIX_A), paper_rules())


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


@pytest.mark.parametrize("program_type", ["int32", "int64"])
@pytest.mark.default("int32")
def test_formats_of_another_index_type(program_type: str) -> None:
    other = "int64" if program_type == "int32" else "int32"
    rules = [matrix("bsr2", idtype=other), matrix("csr", idtype=program_type)]
    check("spmm", rules, csr_coordinates, idtype=program_type)


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


def test_relational_with_the_relation_in_a_buffer() -> None:
    rules = [matrix(n, "int32", buffers=["ETYPE"]) for n in ("bsr2", "ell")]
    program = PROGRAMS["relational"]
    kernel = sparsetir.build(decompose_format(program.make("float32", "int32"), rules))
    for case in program.cases:
        rng = np.random.default_rng(1)
        args = program.inputs(rng, case, "float32", "int32")
        with np.errstate(all="ignore"):
            expected = program.oracle(args)["y"]
        coords, shape = csr_coordinates(args)
        formats, more = inferred(rules, coords, shape, parts := split(rng, len(coords[0]), 2))
        args |= more
        kernel(**copied(args))  # padded slots hold relations that there are not
        mine = copied(args)
        for part, fmt in zip(parts, formats):
            mine[f"etype_{fmt.rule.name}"] = fmt.values(args["etype"][part])
        kernel(**mine)
        np.testing.assert_allclose(mine["y"], expected, **tolerance("float32"))


# -- several steps --------------------------------------------------------------------------------


def block_rows(b: int, *, mask: bool) -> Any:
    """A conversion from the blocks of bsr2 to blocks whose empty rows are not stored."""
    buffers = {"A_bsr2": "float32"} | ({"MASK_bsr2": "int8"} if mask else {})
    axes = [
        ("O", "dense", 1), ("IO2", "sparse", "mb", "O"), ("JO2", "sparse", "nb", "IO2"),
        ("II2", "dense", b), ("JI2", "dense", b),
    ]  # fmt: skip
    return rule(
        "rows", axes, [f"{a}_bsr2" for a in ("IO", "JO", "II", "JI")],
        {"IO_bsr2": ["O", "IO2"], "JO_bsr2": ["JO2"], "II_bsr2": ["II2"], "JI_bsr2": ["JI2"]},
        lambda io, jo, ii, ji: (0, io, jo, ii, ji), lambda o, io, jo, ii, ji: (io, jo, ii, ji),
        buffers,
    )  # fmt: skip


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("program", ["spmm", "row_max"])
@pytest.mark.default("row_max-True")
def test_rules_on_what_rules_produced(program: str, mask: bool) -> None:
    first, then, other = matrix("bsr2"), block_rows(2, mask=mask), matrix("csr")
    record = PROGRAMS[program]
    func = decompose_format(record.make("float32", "int32"), [first, then, other])
    names = [it.name for it in sparse_iterations(func)]
    filled = ["copy_A_bsr2", "copy_A_csr", "copy_A_bsr2_rows"]
    assert names[: 3 + mask] == filled + (["copy_MASK_bsr2_rows"] if mask else [])
    assert not any(n.startswith("restore") for n in names)
    assert f"{program}_bsr2_rows" in names and f"{program}_bsr2" not in names
    runs = ways(func)
    for case in record.cases:
        rng = np.random.default_rng(2)
        args = record.inputs(rng, case, "float32", "int32")
        with np.errstate(all="ignore"):
            expected = record.oracle(args)
        coords, shape = csr_coordinates(args)
        parts = split(rng, len(coords[0]), 2)
        _, more = inferred([first, other], coords, shape, parts)
        blocks = first.to_new([c[parts[0]] for c in coords])
        extent = (more["mb_bsr2"], more["nb_bsr2"], 2, 2)
        fmt = infer_format(then, blocks, extent)
        args |= more | fmt.arguments | {"a_bsr2_rows": np.full(fmt.shape, np.nan, "float32")}
        args["mask_bsr2_rows"] = fmt.arguments["mask_rows"]
        wanted = {str(p.name) for p in func.params}
        args["a_bsr2_rows"] = np.full(fmt.shape, np.nan, "float32")
        if mask:
            args["mask_bsr2_rows"] = np.full(fmt.shape, 77, "int8")
        args = {k: v for k, v in args.items() if k in wanted}
        for run in runs:
            mine = copied(args)
            run(func, mine)
            for output, want in expected.items():
                np.testing.assert_allclose(
                    mine[output].reshape(want.shape), want, err_msg=case,
                    **tolerance("float32"),
                )  # fmt: skip


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


@HOWS
@pytest.mark.parametrize("buffers", ["A", "A OUT"])
@pytest.mark.parametrize("names", [["bsr2"], ["csc"], ["bsr3", "ell"]])
@pytest.mark.default(1)
def test_softmax_of_rows(names: list[str], buffers: str, how: str) -> None:
    """Copies in and back of what nested iterations read and write."""
    rules = [matrix(n, buffers=buffers.split()) for n in names]
    check("row_softmax", rules, csr_coordinates, how=how)


def test_what_extraction_leaves_out() -> None:
    pre, rest = extract_preprocess(paper_example())
    assert pre.name == "spmm_preprocess" and rest.name == "spmm"
    gone = {"a", "indptr", "indices", "nnz"}
    assert gone <= {p.name for p in pre.params} and not gone & {p.name for p in rest.params}
    assert not {"b", "c", "mask_bsr_2"} & {p.name for p in pre.params}
    for func in (pre, rest):
        sparsetir.verify(func)
