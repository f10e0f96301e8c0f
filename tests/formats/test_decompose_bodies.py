"""Decomposition of small bodies: buffers, other elements, locals, refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from zoo import MATRICES

import sparsetir
from format_rules import describe, inferred, matrix, split
from programs import PROGRAMS, copied
from programs.common import parents_of
from refusals import refusals
from small import small, text_of
from sparsetir import formats as F
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import COPY, extract_preprocess
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.errors import LoweringError, StructureError
from sparsetir.sparse_ir.nodes import sparse_iterations


def over_csr(body: str, axes: str = "", d: str = "") -> Any:
    """A function on A over (I, J) and dense X (n,), Y (m,); and on D, over what is said."""
    own_axes = f"I_ = T.dense_fixed(m)\nJ_ = T.dense_fixed(n)\n{axes}"
    return small("f", body, own_axes, A="I J", X="J_", Y="I_", **({"D": d} if d else {}))


def run_over_csr(
    func: Any, rules: list[Any], *, seed: int = 0, keep: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments after the function as it was, and after its decomposition."""
    rng = np.random.default_rng(seed)
    program = PROGRAMS["spmv"].inputs(rng, "small", "float32", "int32")
    before = copied(program)
    sparsetir.interpret(func, before)
    after = copied(program)
    coords, shape = (
        [parents_of(program["indptr"]), program["indices"]],
        (program["m"], program["n"]),
    )
    after |= inferred(rules, coords, shape, split(rng, len(coords[0]), len(rules)))[1]
    other = copied(after)
    decomposed = decompose_format(func, rules)
    wanted = {str(p.name) for p in decomposed.params}
    sparsetir.interpret(decomposed, {k: v for k, v in other.items() if k in wanted})
    sparsetir.build(decomposed)(**{k: v for k, v in after.items() if k in wanted})
    for name in ("a", "y"):
        np.testing.assert_allclose(after[name], other[name], rtol=1e-5)
    return before, after


TWO = [["bsr2", "ell"], ["csc"]]


@pytest.mark.parametrize("names", TWO, ids="+".join)
def test_a_buffer_that_is_read_and_written(names: list[str]) -> None:
    """Without an init the old values go in, and the new ones come back."""
    func = over_csr('with T.sp_iter([I, J], "SS", "twice") as [i, j]:\n    A[i, j] = A[i, j] * 2.0')
    before, after = run_over_csr(func, [matrix(n) for n in names])
    np.testing.assert_allclose(after["a"], before["a"], rtol=1e-6)
    its = {it.name: it for it in sparse_iterations(decompose_format(func, [matrix("bsr2")]))}
    assert list(its) == ["copy_A_bsr2", "twice_bsr2", "restore_A_bsr2"]
    assert COPY not in its["copy_A_bsr2"].annotations  # not constant: it may not be taken out


@pytest.mark.parametrize("names", TWO, ids="+".join)
def test_an_allocated_buffer(names: list[str]) -> None:
    func = over_csr(
        'S = T.alloc_sparse_buffer((I, J), "float32")\n'
        'with T.sp_iter([I, J], "SS", "fill") as [i, j]:\n    S[i, j] = A[i, j] * X[j]\n'
        'with T.sp_iter([I, J], "SR", "sum") as [i, j]:\n'
        "    with T.init():\n        Y[i] = 0.0\n    Y[i] = Y[i] + S[i, j]"
    )
    rules = [matrix(n, buffers=["S"]) for n in names]
    before, after = run_over_csr(func, rules)
    np.testing.assert_allclose(after["y"], before["y"], rtol=1e-5)
    assert "S" not in [b.name for b in decompose_format(func, rules).buffers]


@pytest.mark.parametrize("names", TWO, ids="+".join)
def test_an_init_over_axes_of_its_own(names: list[str]) -> None:
    func = over_csr(
        'with T.sp_iter([I, J], "SR", "backwards") as [i, j]:\n'
        "    with T.init():\n        Y[m - 1 - i] = 0.0\n"
        "    Y[m - 1 - i] = Y[m - 1 - i] + A[i, j] * X[j]"
    )
    rules = [matrix(n) for n in names]
    before, after = run_over_csr(func, rules)
    np.testing.assert_allclose(after["y"], before["y"], rtol=1e-5)
    text = decompose_format(func, rules).script()
    assert "I_all = T.dense_fixed(m" in text
    again = sparsetir.from_source(text)
    assert tvm_ffi.structural_equal(decompose_format(func, rules), again, map_free_vars=True)


def test_iterations_that_use_no_target_stay() -> None:
    func = over_csr(
        'with T.sp_iter([I, J], "SR", "degrees") as [i, j]:\n'
        "    with T.init():\n        Y[i] = 0.0\n    Y[i] = Y[i] + X[j]\n"
        'with T.sp_iter([I, J], "SR", "sum") as [i, j]:\n    Y[i] = Y[i] + A[i, j]'
    )
    names = [it.name for it in sparse_iterations(decompose_format(func, [matrix("bsr2")]))]
    assert names == ["copy_A_bsr2", "degrees", "sum_bsr2"]
    before, after = run_over_csr(func, [matrix("bsr2"), matrix("ell")])
    np.testing.assert_allclose(after["y"], before["y"], rtol=1e-5)


# -- refusals -------------------------------------------------------------------------------------


def loop(axes: str, kinds: str, name: str, *lines: str) -> str:
    """An iteration over axes I, J, K or L, by the names of these in small letters."""
    coords = re.sub(r"T.attach\((\w), \w\)|T.fuse\((.*)\)", r"\1\2", axes).lower()
    return "\n    ".join([f'with T.sp_iter([{axes}], "{kinds}", "{name}") as [{coords}]:', *lines])


INIT_Y = "with T.init():", "    Y[i] = 0.0"
SUM = loop("I, J", "SR", "sum", *INIT_Y, "Y[i] = Y[i] + A[i, j]")
DEEP = "K = T.sparse_variable(J, (n, nnz2), (ptr2, idx2))", "I J K"
HOP = "E = T.dense_fixed(n)\nL = T.sparse_variable(E, (n, nnz2), (ptr2, idx2))"


def refuse(body: str, *more: str, names: str = "bsr2") -> None:
    decompose_format(over_csr(body, *more), [matrix(n) for n in names.split()])


def parts_of_an_axis() -> None:
    sch = sparsetir.Schedule(over_csr(SUM))
    sch.divide(sch.get_sp_iters(sch.get_sparse_iteration("sum"))[0], 4)
    decompose_format(sch.func, [matrix("bsr2")])


test_refusals = refusals(
    """
refuse(loop("I", "S", "rows", "Y[i] = A[i, 0]"))
    # LoweringError: decompose_format: iteration 'rows' of 'f' does not iterate 'J'; rule 'bsr2'
        needs plain iterations over ['I', 'J']
refuse(loop("T.fuse(I, J)", "SS", "fused", "A[i, j] = 0.0"))
    # LoweringError: iteration 'fused' of 'f' has fused axes; decompose before fusing
refuse(loop("I, J", "SS", "next", "Y[i] = A[i, j + 1]"), names="bsr2 csr")
    # LoweringError: iteration 'next' of 'f' accesses ['A'] at [i, j + 1], which may be the element
        of another of the rules ['bsr2', 'csr']; decompose with one rule
refuse(loop("I, J", "SS", "shift", "A[i, j + 1] = X[j]"), names="bsr2 csr")
    # LoweringError: iteration 'shift' of 'f' accesses ['A'] at [i, j + 1], which may
refuse(loop("I, J", "SS", "mixed", *INIT_Y, "    A[i, j] = 0.0", "A[i, j] = A[i, j] + X[j]"))
    # LoweringError: the init of iteration 'mixed' writes rewritten buffers and others; give each an
        iteration of its own
refuse(loop("I, J, K", "SSS", "deep", "D[i, j, k] = A[i, j]"), *DEEP)
    # LoweringError: iteration 'deep' of 'f': axis 'K' depends on 'J', which rule 'bsr2' replaces;
        rewrite a buffer over both
refuse(loop("I, J, T.attach(L, J)", "SRR", "hop", "Y[i] = Y[i] + A[i, j] * X[l]"), HOP)
    # LoweringError: iteration 'hop' of 'f': axis 'L' depends on 'J', which rule 'bsr2' replaces;
        rewrite a buffer over both
refuse("if m > 3:\\n    " + SUM.replace("\\n", "\\n    "))
    # LoweringError: 'f' uses ['A'] inside a IfThenElse; only sparse iterations are decomposed
parts_of_an_axis()  # LoweringError: 'sum' of 'f' visits parts of 'I'; decomp
decompose_format(over_csr(SUM), [])
    # ValueError: argument 'rules': expected at least one rule, got none
decompose_format(over_csr(SUM), [matrix("bsr2")] * 2)
    # ValueError: expected different names, got ['bsr2', 'bsr2']
decompose_format(over_csr(SUM), [matrix("bsr2", buffers=["Q"])])
    # ValueError: rule 'bsr2' rewrites 'Q'; the function has the buffers ['A', 'X', 'Y']
decompose_format(over_csr(SUM), [matrix("bsr2", buffers=["X"])])
    # ValueError: rule 'bsr2': argument 'axes_before_rewrite': expected the axes ['J_'] of buffer
        'X', got ['I', 'J']
decompose_format(over_csr(SUM), [matrix("bsr2", "float64")])
    # ValueError: buffer 'A' has dtype float32, the description says float64
decompose_format(sparsetir.lower_sparse_iter(over_csr(SUM)), [matrix("bsr2")])
    # ValueError: 'func': expected a stage-I function, got PrimFunc
""",
    globals(),
)


def test_what_cannot_be_extracted() -> None:
    func = over_csr(SUM)
    with pytest.raises(ValueError, match="'f' has no copies of constant values; decompose_format"):
        extract_preprocess(func)
    desc = describe([("I2", "dense", "m"), ("J2", "sparse", "n", "I2")], {"A": "float32"})
    lines = desc.script().replace(
        'T.match_sparse_buffer(a, (I2, J2), "float32")',
        'T.alloc_sparse_buffer((I2, J2), "float32")',
    )
    local = sparsetir.from_source(lines)
    same = matrix("csr")
    r = FormatRewriteRule(
        "local", local, ["A"], ["I", "J"], ["I2", "J2"], same.axis_map, same.idx_map,
        same.inv_idx_map,
    )  # fmt: skip
    decomposed = decompose_format(func, [r])
    with pytest.raises(
        ValueError, match="'A_local' is allocated in 'f', so that what one function"
    ):
        extract_preprocess(decomposed)


HEAD = text_of("f", "", "J_ = T.dense_fixed(n)", A="I J", X="J_", D="J_ K", Y="I")  # fmt: skip
READ = """
    with T.sp_iter([I, J], "SR", "read") as [i, j]:
        with T.init():
            Y[i] = 0.0
        Y[i] = Y[i] + A[i, j + 1] * X[j]
"""
STORE = """
    with T.sp_iter([I, J], "SS", "store") as [i, j]:
        A[i, j + 1] = X[j]
"""
INIT = """
    with T.sp_iter([I, J, K], "SSR", "start") as [i, j, k]:
        with T.init():
            A[i, j] = 1.0
        A[i, j] = A[i, j] + D[j, k]
"""
SET = """
    with T.sp_iter([I, J, K], "SSR", "set") as [i, j, k]:
        T.sp_iter_attr({"ordered": 1})
        A[i, j] = D[j, k]
"""
LOCAL = """
    with T.sp_iter([I, J], "SR", "local") as [i, j]:
        with T.init():
            Y[i] = 0.0
        t = A[i, j] * X[j]
        Y[i] = Y[i] + t * t
"""


def arguments(pattern: F.Pattern, feat: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    whole = lambda *shape: rng.integers(1, 9, shape).astype("float32")  # noqa: E731 - exact sums
    return {
        "a": whole(pattern.nnz), "x": whole(pattern.shape[1]), "y": whole(pattern.shape[0]),
        "d": whole(pattern.shape[1], feat), "indptr": pattern.indptr.astype("int32"),
        "indices": pattern.coords[1].astype("int32"), "m": pattern.shape[0],
        "n": pattern.shape[1], "nnz": pattern.nnz, "feat": feat,
    }  # fmt: skip


def check(body: str, fmt: F.Format, feat: int = 2, pattern: F.Pattern = MATRICES["random"]) -> None:
    """The decomposed program leaves what the program leaves, interpreted and built."""
    func = sparsetir.from_source(HEAD + body)
    args = arguments(pattern, feat)
    want = copied(args)
    sparsetir.interpret(func, want)
    converted = fmt.convert(pattern, F.Operand.of(func, "A"))
    decomposed = converted.decompose(func)
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        mine = copied(args)
        run(decomposed, mine | converted.arguments(A=mine["a"]))
        np.testing.assert_array_equal(mine["y"], want["y"])
        np.testing.assert_array_equal(mine["a"], want["a"])


LOOKED_UP = [F.CSC(), F.ELL(), F.DIA(), F.Ragged(), F.BSR(2, 3), F.DBSR(2, 2)]


@pytest.mark.parametrize("fmt", LOOKED_UP, ids=lambda f: f.name)
@pytest.mark.parametrize("body", [READ, STORE + READ, INIT + READ], ids=["read", "store", "init"])
@pytest.mark.default("read-csc", "store-ell", "init-dia")
def test_other_elements_are_looked_up(body: str, fmt: F.Format) -> None:
    check(body, fmt)


@pytest.mark.parametrize(
    "fmt", [F.COO(), F.RowELL(2), F.SRBCRS(2, 2), F.SELL(2)], ids=lambda f: f.name
)
def test_what_cannot_be_looked_up_is_refused(fmt: F.Format) -> None:
    func = sparsetir.from_source(HEAD + READ)
    with pytest.raises(LoweringError, match="cannot be looked up: axis '.*' of rule"):
        fmt.convert(MATRICES["random"], F.Operand.of(func, "A")).decompose(func)


@pytest.mark.parametrize("feat", [0, 2])
def test_an_iteration_that_may_set_nothing(feat: int) -> None:
    check(SET, F.CSR(), feat)


@pytest.mark.parametrize("fmt", [F.Hyb(1, 1), F.EnumeratedPatterns(3)], ids=lambda f: f.name)
def test_locals_in_several_parts(fmt: F.Format) -> None:
    check(LOCAL, fmt)


MATRIX = sp.random(20, 20, 0.2, "csr", "float32", rng=np.random.default_rng(0))


@pytest.mark.parametrize("fmt", [F.CSR(), F.CSC(), F.BSR(2, 2), F.Hyb(1, 1)], ids=lambda f: f.name)
def test_arrays_that_their_owner_has_written_to(fmt: F.Format) -> None:
    matrix = MATRIX.copy()
    handle = sparsetir.SparseMatrix(matrix)
    matrix.indices[0] = 10**9
    with pytest.raises(StructureError, match=r"expected coordinates in \[0, 20\), got 1000000000"):
        handle.to(fmt)
