"""All formats of the library on all patterns of the zoo: what they store, and what they compute."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from conversions import as_inferred, check_values, patterns, spmm_arguments
from hypothesis import strategies as st
from zoo import DTYPES, MATRICES, TENSORS, values

import sparsetir
from cuda_runner import CudaFunction, requires_cuda_text
from drawing import examples
from gpu_runner import OpenCLFunction, requires_opencl
from pairs import by_turns
from programs import PROGRAMS
from sparsetir import formats as F
from sparsetir.formats.format import REGISTRY
from sparsetir.formats.library import refusal
from stage2 import on_threads

MIXTURES: list[F.Format] = [
    F.Mixture("blocks_and_rows", (F.BSR(2, 2), F.RowELL(2)), F.by_block_fill(2, 2, 0.75)),
    F.Mixture("band_and_hyb", (F.DIA(), F.Hyb(2, 1)), F.by_band(-1, 2)),
    F.Mixture("blocks_and_hyb", (F.BSR(3, 2), F.Hyb(1, 2)), F.by_block_fill(3, 2, 0.5)),
    F.Mixture("patterns_and_coo", (F.EnumeratedPatterns(4), F.COO()), F.by_block_fill(4, 1, 0.5)),
    F.Mixture("even_and_long_rows", (F.ELL(), F.DCSR()), F.by_row_length(6)),
]
FORMATS = MIXTURES + [F.CSF((0, 1)), F.CSF((1, 0)), F.BSR(1, 1), F.BSR(2, 3), F.BSR(16, 16)]
FORMATS += [F.DBSR(3, 2), F.SRBCRS(2, 3), F.SELL(2), F.Hyb(2, 1), F.RowELL(1)]
FORMATS += [e.small for e in REGISTRY.values() if e.small is not None]
TENSOR_FORMATS: list[F.Format] = [*map(F.CSF, permutations(range(3)))]
TENSOR_FORMATS += [F.RelationalHyb(2), F.RelationalHyb(1, 3)]


def has_own_order(fmt: F.Format) -> bool:
    """Whether rules tell less than `infer` knows, such as which rows go together."""
    tiled = isinstance(fmt, F.RelationalHyb) and fmt.rows is not None
    return tiled or isinstance(fmt, F.EnumeratedPatterns | F.SELL)


ON_MATRICES = [pytest.param(f, p, id=f"{f.name}-{n}") for f in FORMATS for n, p in MATRICES.items()]
ON_ALL = ON_MATRICES + [
    pytest.param(f, p, id=f"{f.name}-{n}") for f in TENSOR_FORMATS for n, p in TENSORS.items()
]
INFER_THEMSELVES = [
    pytest.param(f, p, id=f"{f.name}-{n}")
    for formats, zoo in ((FORMATS, MATRICES), (TENSOR_FORMATS, TENSORS))
    for f in formats
    if type(f).infer is not F.Format.infer and not has_own_order(f)
    for n, p in zoo.items()
]
FEAT = 3


@cache
def program(order: int, dtype: str = "float32", idtype: str = "int32") -> Any:
    """A program that reads a buffer A of this order."""
    return PROGRAMS["spmm" if order == 2 else "csf_sum"].make(dtype, idtype)


def converted(
    fmt: F.Format, pattern: F.Pattern, dtype: str = "float32", idtype: str | None = None
) -> F.ConvertedFormat:
    """A pattern in a format, as the operand A of a program."""
    func = program(pattern.order, dtype, idtype or pattern.idtype)
    return fmt.convert(pattern, F.Operand.of(func, "A"))


def check_partition(conv: F.ConvertedFormat) -> None:
    """Each element has one place in one part, and no place two elements."""
    taken = np.zeros(conv.pattern.nnz, int)
    for part in conv.parts:
        places = part.places[part.places >= 0]
        taken += part.places >= 0
        assert len(np.unique(places)) == len(places) == part.stored
        assert not len(places) or places.max() < part.size
        np.testing.assert_array_equal(part.elements[places], np.flatnonzero(part.places >= 0))
        np.testing.assert_array_equal(np.flatnonzero(part.mask), np.sort(places))
    assert (taken == 1).all()


def arguments_before(pattern: F.Pattern) -> dict[str, Any]:
    """Arguments of the program before decomposition, but for values."""
    idtype = pattern.idtype
    if pattern.order == 2:
        return spmm_arguments(pattern, FEAT)
    i, j, k = pattern.coords
    m, n, p = pattern.shape
    fibers, first = np.unique(i.astype(np.int64) * n + j, return_index=True)
    j_ptr = np.append(0, np.cumsum(np.bincount(fibers // n, minlength=m)))
    return {
        "j_ptr": j_ptr.astype(idtype),
        "j_idx": (fibers % n).astype(idtype),
        "k_ptr": np.append(first, len(k)).astype(idtype),
        "k_idx": k.astype(idtype),
        "m": m, "n": n, "p": p, "nnz_j": len(fibers), "nnz_k": len(k),
        "a": values(pattern), "y": np.full(m, 7, "float32"),
    }  # fmt: skip


# -- what is stored -------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "pattern"), ON_ALL)
def test_values_come_back(fmt: F.Format, pattern: F.Pattern) -> None:
    conv = converted(fmt, pattern)
    arguments = check_values(conv)
    check_partition(conv)

    statistics = conv.statistics
    assert [s.rule for s in statistics] == [r.name for r in conv.rules]
    assert sum(s.stored for s in statistics) == pattern.nnz
    assert sum(s.places for s in statistics) == conv.places == sum(p.size for p in conv.parts)
    assert fmt.places(pattern) == conv.places
    arrays = [a for a in arguments.values() if isinstance(a, np.ndarray)]
    assert conv.nbytes == sum(a.nbytes for a in arrays)
    padded = conv.places - pattern.nnz
    assert conv.padding == pytest.approx(padded / conv.places if conv.places else 0)
    for part, one in zip(conv.parts, statistics, strict=True):
        masked = part.rule.renamed("mask") in arguments
        assert masked == (part.rule.masked and one.stored < one.places)


@pytest.mark.parametrize(("fmt", "pattern"), ON_ALL)
def test_structure(fmt: F.Format, pattern: F.Pattern) -> None:
    """The index arrays are what the axes say, and not more than a program asks for."""
    conv = converted(fmt, pattern)
    arguments = {**arguments_before(pattern), **conv.arguments(A=values(pattern))}
    func = conv.decompose(program(pattern.order, idtype=pattern.idtype))
    sparsetir.check_structure(func, arguments)
    assert {str(p.name) for p in func.params} == set(arguments)


@pytest.mark.parametrize("fmt", by_turns([*FORMATS, *TENSOR_FORMATS], 2), ids=lambda f: f.name)
def test_types(fmt: F.Format) -> None:
    """Every type of values, and both types of indices, whatever that of the coordinates."""
    zoo = MATRICES if fmt in FORMATS else TENSORS
    for name in ("random", "int64"):
        for dtype in DTYPES:
            check_values(fmt.convert(zoo[name], _operand(zoo[name], dtype)), dtype)
        for idtype in ("int32", "int64"):
            conv = converted(fmt, zoo[name], idtype=idtype)
            arguments = check_values(conv)
            arrays = {str(a.dtype) for p in conv.parts for a in p.indices.values() if np.ndim(a)}
            assert arrays <= {idtype}
            before = arguments_before(zoo[name])
            for key, array in before.items():
                if isinstance(array, np.ndarray) and array.dtype.kind == "i":
                    before[key] = array.astype(idtype)
            func = conv.decompose(program(zoo[name].order, idtype=idtype))
            sparsetir.check_structure(func, {**before, **arguments})


def _operand(pattern: F.Pattern, dtype: str) -> F.Operand:
    return F.Operand({"A": dtype}, tuple("IJK"[: pattern.order]), pattern.idtype)


@pytest.mark.parametrize(("fmt", "pattern"), INFER_THEMSELVES)
def test_infer_of_its_own(fmt: F.Format, pattern: F.Pattern) -> None:
    """A format that overrides `infer` finds what inference from its rules finds."""
    for idtype in ("int32", "int64"):
        as_inferred(fmt, pattern, idtype=idtype)


def test_a_pattern_is_not_shared() -> None:
    """Index arrays that a user changes leave the pattern as it was."""
    for fmt in FORMATS:
        pattern = MATRICES["random"].take(np.arange(MATRICES["random"].nnz))
        want = [c.copy() for c in (*pattern.coords, pattern.indptr)]
        for array in converted(fmt, pattern).arguments().values():
            if isinstance(array, np.ndarray):
                array[:] = -7
        for have, before in zip((*pattern.coords, pattern.indptr), want, strict=True):
            np.testing.assert_array_equal(have, before, err_msg=fmt.name)


@examples(30, 500, pattern=patterns(), fmt=st.sampled_from(FORMATS))
def test_random_matrices(pattern: F.Pattern, fmt: F.Format) -> None:
    conv = converted(fmt, pattern)
    check_values(conv)
    check_partition(conv)


@examples(15, 500, pattern=patterns(3, 6), fmt=st.sampled_from(TENSOR_FORMATS))
def test_random_tensors(pattern: F.Pattern, fmt: F.Format) -> None:
    conv = converted(fmt, pattern)
    check_values(conv)
    check_partition(conv)


@pytest.mark.parametrize(
    "fmt", [F.CSR(), F.BSR(2, 3), F.SELL(4, 8), F.Hyb(1, 2)], ids=lambda f: f.name
)
def test_values_alone(fmt: F.Format) -> None:
    """Structure and values are all arguments; values may be arrays of another library."""
    pattern = MATRICES["random"]
    conv, stored = converted(fmt, pattern), values(pattern)
    alone = conv.values(A=stored)
    assert set(alone) == {conv.parameter("A", part) for part in conv.parts}
    for filled in (conv.arguments(A=stored), conv.arguments() | conv.values(A=_tensor(stored))):
        assert set(filled) == set(conv.arguments()) | set(alone)
        for name, array in alone.items():
            np.testing.assert_array_equal(filled[name], array)
    assert not any(array.any() for array in conv.values(A=None).values())
    with pytest.raises(ValueError, match=rf"{fmt.name}: argument 'A': expected .* float32, got"):
        conv.values(A=stored.astype("float64"))
    with pytest.raises(ValueError, match=rf"{fmt.name}: expected values of some of .*, got 'X'"):
        conv.values(X=stored)


def _tensor(array: np.ndarray) -> Any:
    return tvm.runtime.tensor(array)


@pytest.mark.parametrize(("operand", "size"), [(None, 9), (F.Operand({"A": "float64"}), 13)])
def test_what_takes_too_much_room(operand: F.Operand | None, size: int) -> None:
    """2 GiB of values, indices and masks; 64 slots per element from 1 MiB on."""
    pattern, few = MATRICES["one element"], 2**20 // size
    assert refusal(pattern, few, operand) is None
    assert refusal(pattern, few + 1, operand) == f"1 MB, {few + 1:,}.0 slots per element"
    many = F.Pattern([np.arange(few)] * 2, (few, few))
    assert refusal(many, 64 * few, operand) is None
    assert refusal(many, 65 * few, operand) == "68 MB, 65.0 slots per element"
    most = 2**31 // size
    assert refusal(pattern, most, operand, most_places=np.inf) is None
    assert "2,147 MB" in str(refusal(pattern, most + 1, operand, most_places=np.inf))


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda m: m.label)
def test_both_formats_of_a_mixture_have_work(mixture: F.Mixture) -> None:
    # Otherwise the other tests would say nothing about mixing.
    chosen = mixture.choose(MATRICES["one dense row"])
    assert set(chosen.tolist()) == {0, 1}


# -- what is computed -----------------------------------------------------------------------------


def spmm_case(pattern: F.Pattern) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of SpMM and its result; B is inf or NaN where nothing is stored, and once more."""
    args = spmm_arguments(pattern, FEAT)
    rng = np.random.default_rng(0)
    b = rng.standard_normal(args["b"].shape).astype("float32")
    unused = np.setdiff1d(np.arange(pattern.shape[1]), pattern.coords[1])
    b[unused[::2]], b[unused[1::2]] = np.inf, np.nan
    if pattern.shape[1] > 5:
        b[5] = np.inf
    a = sp.csr_array((args["a"], pattern.coords[1], pattern.indptr), pattern.shape)
    with np.errstate(all="ignore"):
        return {**args, "b": b}, a.astype("float64") @ b.astype("float64")


INTERPRETED = ["random", "empty rows", "one dense row", "no rows", "last element", "band"]


@pytest.mark.parametrize("fmt", by_turns(FORMATS, 2), ids=lambda f: f.name)
def test_interpreted(fmt: F.Format) -> None:
    """The copies fill a format as `arguments` does, and the computation does not see padding."""
    for name in INTERPRETED:
        pattern = MATRICES[name]
        args, want = spmm_case(pattern)
        func = program(2)
        conv = converted(fmt, pattern)
        filled = conv.arguments(A=args["a"])
        empty = {n: np.full_like(v, np.nan) if n.startswith("a_") else v for n, v in filled.items()}
        args |= empty
        sparsetir.interpret(conv.decompose(func), args)
        np.testing.assert_allclose(args["c"], want, rtol=1e-5, atol=1e-5, err_msg=name)
        for part in conv.parts:
            param = conv.parameter("A", part)
            stored = part.mask != 0
            np.testing.assert_array_equal(args[param][stored], filled[param][stored], err_msg=param)


@pytest.mark.parametrize(
    "fmt", by_turns({type(f): f for f in FORMATS}.values(), 2), ids=lambda f: f.name
)
@pytest.mark.default("coo", "dia")
def test_built(fmt: F.Format) -> None:
    """One kernel for the copies and one for the computation serve all patterns."""
    conv = converted(fmt, MATRICES["random"])
    parts = sparsetir.extract_preprocess(conv.decompose(program(2), drop_full_masks=False))
    kernels = [sparsetir.build(p) for p in parts]
    for name, pattern in MATRICES.items():
        if pattern.coords[0].dtype != np.int32:
            pattern = F.Pattern([c.astype(np.int32) for c in pattern.coords], pattern.shape)
        args, want = spmm_case(pattern)
        conv = converted(fmt, pattern)
        filled = conv.arguments(False, A=args["a"])
        for copied in (False, True):
            mine = {**args, **filled, "c": args["c"].copy()}
            if copied:
                mine |= {n: np.full_like(v, np.nan) for n, v in filled.items() if n[:2] == "a_"}
            for kernel in kernels if copied else kernels[1:]:
                kernel(**{n: mine[n] for n in kernel.signature.names})
            np.testing.assert_allclose(mine["c"], want, rtol=1e-5, atol=1e-5, err_msg=name)


ON_THREADS = [
    F.CSR(), F.COO(), F.BSR(4, 2), F.SRBCRS(4, 4), F.SELL(4, 8), F.DIA(), F.Hyb(2, 2),
    F.EnumeratedPatterns(3),
    F.Mixture("halves", (F.BSR(2, 2), F.Hyb(1, 1)), lambda pattern: np.arange(pattern.nnz) % 2),
]  # fmt: skip


@pytest.mark.parametrize("make", [
    pytest.param(OpenCLFunction, marks=requires_opencl, id="OpenCL"),
    pytest.param(CudaFunction, marks=[requires_cuda_text, pytest.mark.slow], id="CUDA"),
])  # fmt: skip
@pytest.mark.parametrize("fmt", by_turns(ON_THREADS, 2), ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["random", "one dense row"])
@pytest.mark.default("random-csr-OpenCL", "one dense row-bsr_4_2-OpenCL")
def test_on_threads(fmt: F.Format, name: str, make: Any) -> None:
    """The default schedule of GPUs, as OpenCL and as CUDA on a CPU."""
    args, want = spmm_case(MATRICES[name])
    conv = converted(fmt, MATRICES[name])
    _, compute = sparsetir.extract_preprocess(conv.decompose(program(2)))
    run = on_threads(compute, sparsetir.lower_sparse_iter(compute), "opencl", make)
    arguments = {**args, **conv.arguments(A=args["a"])}
    result = run({str(p.name): arguments[str(p.name)] for p in compute.params})["c"]
    np.testing.assert_allclose(result.reshape(want.shape), want, rtol=1e-4, atol=1e-5)


def test_places_of_a_format_of_a_users_own() -> None:
    """The library does not know it, so it is converted; `plan` asks to know whether it pads."""
    fmt = F.RuleFormat(F.BSR(2, 3).rules(F.Operand.default(2))[0])
    for pattern in MATRICES.values():
        assert fmt.places(pattern) == fmt.convert(pattern).places == F.BSR(2, 3).places(pattern)


@pytest.mark.parametrize(
    "fmt", by_turns({type(f): f for f in FORMATS}.values(), 2), ids=lambda f: f.name
)
@pytest.mark.parametrize("build", [False, True])
def test_sampled_products(fmt: F.Format, build: bool) -> None:
    """A and OUT share their structure; OUT is made in the format and comes back from it."""
    func = PROGRAMS["sddmm"].make("float32", "int32")
    for name in ["random"] if build else ["empty rows", "nothing stored", "last element"]:
        pattern = MATRICES[name]
        args = spmm_arguments(pattern, FEAT)
        rng = np.random.default_rng(5)
        args |= {"y": args.pop("b"), "x": rng.random((pattern.shape[0], FEAT), "float32")}
        args |= {"out": np.zeros(pattern.nnz, "float32")}
        conv = fmt.convert(pattern, F.Operand.of(func, "A", "OUT"))
        args |= conv.arguments(A=args["a"], OUT=None)
        with np.errstate(all="ignore"):
            want = PROGRAMS["sddmm"].oracle(args)["out"]
        run = conv.decompose(func)
        if build:
            kernel = sparsetir.build(run)
            kernel(**{n: args[n] for n in kernel.signature.names})
        else:
            sparsetir.interpret(run, {n: args[n] for n in (str(p.name) for p in run.params)})
        np.testing.assert_allclose(args["out"], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(conv.restore("OUT", args), want, rtol=1e-5, atol=1e-5)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [*FORMATS, *TENSOR_FORMATS], ids=lambda f: f.name)
def test_another_order_is_refused(fmt: F.Format) -> None:
    axes, pattern = (2, TENSORS["random"]) if fmt in FORMATS else (3, MATRICES["random"])
    with pytest.raises(ValueError, match=rf"{fmt.name}: expected a pattern of {axes} axes, got"):
        fmt.convert(pattern)
    pattern = MATRICES["random"] if fmt in FORMATS else TENSORS["random"]
    with pytest.raises(ValueError, match=rf"{fmt.name}: argument 'operand': expected {axes} axes"):
        fmt.convert(pattern, F.Operand(axes=("I", "J", "K", "L")))
