"""Matrices, operands, kernels and what SpMM is, for the tests of GPU templates."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi

import gpu_runner
from bench.gpucode import disassembled
from cuda_runner import CudaFunction, requires_cuda_text
from small import text_of
from sparsetir import lower_sparse_buffer
from sparsetir.runtime.pipeline import lower_template
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.search.spaces import space
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.sparse_ir.position_space import SIGNATURE

# What a kernel is run as: values of `as_cuda` of :func:`kernel`.
RUNNERS = [
    pytest.param(False, marks=gpu_runner.requires_opencl, id="OpenCL"),
    pytest.param(True, marks=requires_cuda_text, id="CUDA"),
]


def on_runners(
    cases: Sequence[tuple[Any, ...]],
    by_default: Collection[int],
    others: Collection[int] | None = None,
) -> list[Any]:
    """Parameters (*case, as_cuda): by default some places as CUDA, and others as OpenCL.

    others : these, where given; all that are not as CUDA
    """
    params = []
    for as_cuda, needs in ((False, gpu_runner.requires_opencl), (True, requires_cuda_text)):
        for place, case in enumerate(cases):
            opencl = place not in by_default if others is None else place in others
            quick = place in by_default if as_cuda else opencl
            slow = [] if quick else [pytest.mark.slow]
            params.append(pytest.param(*case, as_cuda, marks=[needs, *slow]))
    return params


def name_of(value: Any) -> str:
    """The id of a parameter in a test's name."""
    if isinstance(value, bool):
        return "CUDA" if value else "OpenCL"
    return str(getattr(value, "name", type(value).__name__))


GPU = tvm.target.Target(gpu_runner.OPENCL_TARGET)


@functools.cache
def scheduled(template: Any, problem: Any, config: Any) -> Any:
    """Stage II of a template's program, scheduled."""
    return lower_template(template, problem, config, GPU)["II scheduled"]


@functools.cache
def kernel(
    template: Any,
    problem: Any,
    config: Any,
    prelude: str = "",
    as_cuda: bool = False,
    edit: Any = str,
) -> tuple[gpu_runner.OpenCLFunction | CudaFunction, dict[str, str]]:
    """The kernel, as OpenCL or CUDA, and what its flat parameters are called in the program.

    edit : of CUDA text before it is compiled
    """
    func = scheduled(template, problem, config)
    flat = lower_sparse_buffer(func)
    names = [str(p.name) for p in func.attrs[SIGNATURE].params]
    by_flat = dict(zip((str(p.name) for p in flat.params), names, strict=True))
    runs = CudaFunction(flat, edit=edit) if as_cuda else gpu_runner.OpenCLFunction(flat, prelude)
    return runs, by_flat


def run_kernel(
    kernel: tuple[gpu_runner.OpenCLFunction | CudaFunction, dict[str, str]],
    args: dict[str, Any],
    **options: Any,
) -> dict[str, np.ndarray]:
    """Run a :func:`kernel`; arguments and arrays by their names in the program."""
    function, names = kernel
    with bfloat16_arrays():
        out = function({flat: args[name] for flat, name in names.items()}, **options)
    return {names[flat]: array for flat, array in out.items()}


def pattern_of(mask: np.ndarray, idtype: str) -> CsrPattern:
    """The pattern of the places where a mask holds."""
    rows, columns = np.nonzero(mask)
    counts = np.bincount(rows, minlength=mask.shape[0])
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(idtype)
    return CsrPattern(indptr, columns.astype(idtype), mask.shape)


def masks() -> dict[str, np.ndarray]:
    """Shapes and patterns that divide nothing, among them the extremes."""
    rng = np.random.default_rng(3)
    plain = rng.random((37, 29)) < 0.2
    gaps = rng.random((23, 17)) < 0.4
    gaps[[0, 5, 6, 7, 22]] = False
    dense_row = rng.random((9, 150)) < 0.03
    dense_row[4] = True
    return {
        "random": plain,
        "empty rows": gaps,
        "nothing stored": np.zeros((5, 7), bool),
        "one dense row": dense_row,
        "one column": rng.random((21, 1)) < 0.5,
        "one row": rng.random((1, 70)) < 0.9,
        "no rows": np.zeros((0, 7), bool),
        "no columns": np.zeros((6, 0), bool),
    }


MASKS = masks()


def operands(
    matrix: CsrPattern, problem: Spmm, feat: int, heads: int = 3, special: bool = False
) -> dict[str, np.ndarray]:
    """Values `a` and dense operand `b`; `special` puts NaN and infinities into both."""
    rng = np.random.default_rng(5)
    before = (heads,) if problem.batched else ()
    a = rng.standard_normal((*before, len(matrix.indices)))
    b = rng.standard_normal((*before, matrix.shape[1], feat))
    if special:
        a[..., ::7] = 0
        b[..., 1, :] = np.nan
        b[..., 2, 0], b[..., 3, -1] = np.inf, -np.inf
    dtype = as_dtype(problem.dtype)
    return {"a": a.astype(dtype), "b": b.astype(dtype)}


def as_dtype(name: str) -> Any:
    """A NumPy dtype by TVM's name."""
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def oracle(matrix: CsrPattern, problem: Spmm, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """C in float64."""
    if problem.batched:
        plain = Spmm(problem.dtype, problem.idtype, problem.reduce)
        return np.stack([oracle(matrix, plain, x, y) for x, y in zip(a, b, strict=True)])
    indptr, indices, (m, _) = matrix
    out = np.zeros((m, b.shape[1]))
    with np.errstate(invalid="ignore"):
        for i in range(m):
            row = slice(int(indptr[i]), int(indptr[i + 1]))
            if row.start == row.stop:
                continue
            terms = a[row].astype("float64")[:, None] * b[indices[row]].astype("float64")
            combine = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[problem.reduce]
            out[i] = combine(terms, axis=0)
    return out


def check(result: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Compare, with the tolerance that rounding of the result and of float32 sums needs."""
    relative = {"float32": 1e-4, "float64": 1e-10, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    np.testing.assert_allclose(
        result.astype("float64"), expected, rtol=relative, atol=relative / 10, equal_nan=True
    )


def run_spmm(
    problem: Spmm, config: Any, matrix: CsrPattern, feat: int = 0, special: bool = False,
    as_cuda: bool = True, template: Any = None, edit: Any = str, **options: Any,
) -> Any:  # fmt: skip
    """Run a template's kernel, compare with the oracle, and give what was counted.

    special : with NaN and infinities among the operands
    """
    template = template or TEMPLATES[type(config), Spmm]
    heads, feat = 3, feat or config.feat or config.tile
    stored = operands(matrix, problem, feat, heads, special)
    arranged = template.arrange(matrix, problem, config)
    args: dict[str, Any] = {"feat": feat, "heads": heads, **arranged.arguments, "b": stored["b"]}
    args |= {"a": stored["a"], **arranged.stored.values(A=stored["a"])}
    args |= arranged.computed(scheduled(template, problem, config).attrs[SIGNATURE], args)
    before = (heads,) if problem.batched else ()
    kind = as_dtype(problem.out or problem.dtype)
    args["out"] = np.full((*before, matrix.shape[0], feat), np.nan, kind)
    compiled = kernel(template, problem, config, gpu_runner.ATOMIC_ADD_PRELUDE, as_cuda, edit)
    result = run_kernel(compiled, args, **options)["out"]
    check(result, oracle(matrix, problem, **stored), problem.dtype)
    return getattr(compiled[0], "counts", None)


@contextlib.contextmanager
def bfloat16_arrays() -> Iterator[None]:
    """Let `run_opencl` take NumPy arrays of bfloat16, which DLPack does not know."""
    plain = tvm_ffi.from_dlpack

    def from_dlpack(array: Any) -> Any:
        if array.dtype.name != "bfloat16":
            return plain(array)
        bits: Any = plain(array.view("int16"))
        return bits._create_view(array.shape, "bfloat16")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tvm_ffi, "from_dlpack", from_dlpack)
        yield


# A user's program, which gathers nothing.
SCALED_SUMS = text_of("scaled_sums", """
with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
    with T.init():
        OUT[i, k] = 0.0
    OUT[i, k] = OUT[i, k] + A[i, j] * W[k]
""", A="I J", W="K", OUT="I K")  # fmt: skip


def scaled_sums() -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of it, and the result."""
    matrix, rng = pattern_of(MASKS["random"], "int32"), np.random.default_rng(0)
    (m, n), nnz = matrix.shape, len(matrix.indices)
    a, w = (rng.random(size, "float32") for size in (nnz, 16))
    sums = [a[i:j].sum() for i, j in itertools.pairwise(matrix.indptr)]
    args = {
        "a": a, "w": w, "out": np.full((m, 16), np.nan, "float32"), "indptr": matrix.indptr,
        "indices": matrix.indices, "m": m, "n": n, "nnz": nnz, "feat": 16,
    }  # fmt: skip
    return args, np.outer(sums, w)


def configs_of_space(kind: type, problem: Spmm, feat: int, mask: str, longest: int) -> list[Any]:
    """Configs of a template that a search tries."""
    matrix = pattern_of(MASKS[mask], "int32")
    stats = Statistics(*matrix.shape, matrix.nnz, feat, longest=longest)
    points = space(problem, matrix, stats, GPU).points()
    return [config for _, config in points if isinstance(config, kind)]


def check_offsets(problem: Spmm, config: Any) -> None:
    """Rows, columns or non-zeros times features may be more than 32 bits hold."""
    func = scheduled(TEMPLATES[type(config), type(problem)], problem, config)
    places = re.findall(
        r"\b[BC]_ptr( \+ |\[)([^;=]*)", gpu_runner.cuda_source(lower_sparse_buffer(func))
    )
    assert len(places) >= 2 and all("(int64_t)" in place for _, place in places)


class Compiled(NamedTuple):
    """The cubin that nvcc compiled from a source.

    ptx : its text
    registers : of the kernel that has most
    spills : bytes that all kernels spill
    cubin : the file, for :func:`instructions`
    """

    ptx: str
    registers: int
    spills: int
    cubin: Path


def compile_cuda(source: str, folder: Path, arch: str = "sm_90") -> Compiled:
    """Compile CUDA text without a GPU, and see what came of it."""
    text = folder / "kernels.cu"
    text.write_text(source)
    command = [
        str(gpu_runner._nvcc()), f"-arch={arch}", "-cubin", "-Xptxas", "-v", "--keep",
        "--keep-dir", str(folder), "-o", str(folder / "kernels.cubin"), str(text),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr)]
    ptx, cubin = (folder / "kernels.ptx").read_text(), folder / "kernels.cubin"
    return Compiled(ptx, max(registers), sum(spills), cubin)


def instructions(cubin: Path) -> str:
    """SASS; skips the test where there is no nvdisasm."""
    sass = disassembled(cubin)
    if sass is None:
        pytest.skip("compiled; no nvdisasm to look at the instructions with")
    return sass
