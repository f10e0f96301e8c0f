"""Blocks in tiles of the CPU's matrix engine: run on an emulated one, and as assembly.

Kernels are lowered for a CPU with AMX, or of ARM with `bfmmla`; `amx_runner` runs them with these
instructions emulated, on any CPU. What such a CPU does is tested where there is one.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
import tvm

import sparsetir
from amx_runner import EmulatedKernel, requires_compiler
from pairs import by_default
from small import small
from sparsetir.formats import BSR, CSR
from sparsetir.machine import assume, this_machine
from sparsetir.planning.plan import requested
from sparsetir.runtime.kernel_file import read_library
from sparsetir.runtime.pipeline import kernel_of, lower_template
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.passes.tile_isas import TILE_ISAS
from sparsetir.schedules.targets import allowed, host_target
from sparsetir.schedules.templates import matrix_tiles
from sparsetir.schedules.templates.matrix_tiles import MatrixTiles
from sparsetir.sparse_ir.errors import ScheduleError

BF16 = np.dtype(ml_dtypes.bfloat16)
SPR = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "sapphirerapids"}
ARM = {"kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu", "mcpu": "neoverse-v1"}
COOPER_LAKE = {**SPR, "mcpu": "cooperlake"}
TARGETS = {"amx": SPR, "neon": ARM, "avx512": COOPER_LAKE}
PROBLEM = Spmm("bfloat16")
ROUNDED = 2.0**-8  # of bfloat16

pytestmark = requires_compiler
NEEDED = [*TILE_ISAS["amx"]["bfloat16"].features]
WHY_NOT = allowed(NEEDED)
HERE = not WHY_NOT
has_amx = pytest.mark.skipif(not HERE, reason=f"no tiles here: {WHY_NOT}")


def has_bfmmla():
    """Whether Linux on ARM says so, which an emulated process knows by this call alone."""
    asked = this_machine().system, this_machine().architecture
    return asked == ("linux", "aarch64") and bool(ctypes.CDLL(None).getauxval(26) & 1 << 14)


def rounded(array):
    """Numbers that bfloat16 has, in float64."""
    return array.astype(BF16).astype("float64")


def blocked(shape, rows, cols, fill=0.5, seed=0):
    """A matrix of whole blocks, float64 but of bfloat16's numbers; the second row of them empty."""
    rng = np.random.default_rng(seed)
    grid = -(-shape[0] // rows), -(-shape[1] // cols)
    mask = rng.random(grid) < fill
    mask[1:2] = False
    whole = np.kron(mask, np.ones((rows, cols)))[: shape[0], : shape[1]]
    return rounded(whole * rng.uniform(0.5, 1, shape) * rng.choice([-1, 1], shape))


def pattern_of(matrix):
    stored = sp.csr_array(matrix)
    indptr, indices = (x.astype("int32") for x in (stored.indptr, stored.indices))
    return CsrPattern(indptr, indices, matrix.shape), stored.data


def product(a, b):
    """The product in float64, of stored elements alone."""
    out = np.zeros((a.shape[0], b.shape[1]))
    with np.errstate(invalid="ignore"):
        for i, j in zip(*np.nonzero(a), strict=True):
            out[i] += a[i, j] * b[j]
    return out


def arguments(matrix, config, feat, seed=1, fill=None):
    """Arguments of a kernel by name, and what its result is to be."""
    pattern, values = pattern_of(matrix)
    arranged = matrix_tiles.arrange(pattern, PROBLEM, config)
    b = rounded(np.random.default_rng(seed).uniform(-1, 1, (matrix.shape[1], feat)))
    if fill is not None:
        b[fill[0]] = fill[1]
    args = {**arranged.arguments, **arranged.stored.values(A=values.astype(BF16)), "feat": feat}
    args["b"] = b.astype(BF16)
    if config.given:
        args["b"] = matrix_tiles.in_tiles(args["b"].view("uint16"), config)
        args["b"] = args["b"].view(BF16)
    return args, product(matrix, b)


def run(kernel, args, out):
    """Call a kernel; the result in float64. bfloat16 goes by TVM's arrays."""
    arrays = {n: tvm.runtime.tensor(x) if getattr(x, "dtype", None) == BF16 else x
              for n, x in args.items()}  # fmt: skip
    written = tvm.runtime.tensor(out)
    kernel(**arrays, out=written)
    return written.numpy().astype("float64")


def check(kernel, matrix, config, feat, **options):
    args, wanted = arguments(matrix, config, feat, **options)
    result = run(kernel, args, np.full(wanted.shape, np.nan).astype(BF16))
    np.testing.assert_allclose(result, wanted, rtol=ROUNDED, atol=1e-5)
    return result


# Kernels take a while to compile: one of each config for the whole file.
_made: dict[Any, EmulatedKernel] = {}


def kernel_for(config, problem=PROBLEM):
    key = (problem, config.compiled)
    if key not in _made:
        _made[key] = EmulatedKernel(
            lower_template(matrix_tiles, problem, config, TARGETS[config.isa])
        )
    return _made[key]


def sizes(rows, cols):
    """Shapes and feature sizes: whole tiles, blocks that stick out, one block, less than one."""
    return [
        ((4 * rows, 3 * cols), 64), ((3 * rows - 1, 3 * cols - 1), 70), ((rows, cols), 16),
        ((3 * rows + 1, cols), 33), ((1, 1), 1), ((2 * rows, cols - 1), 31),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    by_default(
        [(32, 32, 32), (24, 48, 16), (5, 6, 32), (64, 64, 16), (16, 16, 32), (8, 8, 16),
         (40, 4, 32)],
        (32, 32, 32), (24, 48, 16), (5, 6, 32), (64, 64, 16),
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.default("(5, 6, 32)", "(64, 64, 16)")
def test_shapes(shape):
    rows, cols, features = shape
    config = MatrixTiles(BSR(rows, cols), features, blocks=3)
    kernel = kernel_for(config)
    for shape, feat in sizes(rows, cols):
        check(kernel, blocked(shape, rows, cols), config, feat)
        assert kernel.counts["configurations"] == kernel.counts["releases"] == 1


@pytest.mark.parametrize("rows, cols", [(32, 32), (12, 24), (2, 8)])
def test_shapes_of_neon(rows, cols):
    config = MatrixTiles(BSR(rows, cols), 8, "neon", blocks=3)
    kernel = kernel_for(config)
    for shape, feat in sizes(rows, cols):
        matrix = blocked(shape, rows, cols)
        check(kernel, matrix, config, feat)
        assert (
            kernel.counts["configurations"] == 0 and bool(kernel.counts["products"]) == matrix.any()
        )


CONFIG = MatrixTiles(BSR(32, 32), blocks=3)
NEON = MatrixTiles(BSR(32, 32), 8, "neon", blocks=3)
AVX512 = MatrixTiles(BSR(32, 32), 32, "avx512", blocks=3)


def test_places_of_a_block_without_an_element():
    """Empty places are zeros: their products with finite numbers are zero, with others NaN."""
    matrix = blocked((64, 64), 32, 32, fill=1)
    matrix[3] = 0
    pattern, _ = pattern_of(matrix)
    with pytest.raises(ScheduleError, match=r"expected a pattern that fills blocks of 32 x 32, or"):
        matrix_tiles.arrange(pattern, PROBLEM, CONFIG)
    config = replace(CONFIG, finite=True)
    check(kernel_for(config), matrix, config, 32)
    args, wanted = arguments(matrix, config, 32, fill=((5, 0), np.inf))
    result = run(kernel_for(config), args, np.full(wanted.shape, np.nan).astype(BF16))
    assert wanted[3, 0] == 0 and np.isnan(result[3, 0])
    np.testing.assert_allclose(result[:, 1:], wanted[:, 1:], rtol=ROUNDED, atol=1e-5)


def test_each_worker_configures_its_tiles():
    matrix = blocked((900, 200), 32, 32)
    args, wanted = arguments(matrix, CONFIG, 64)
    kernel = kernel_for(CONFIG)
    signature = kernel.kernel.signature
    arrays = {n: tvm.runtime.tensor(x) if hasattr(x, "shape") else x for n, x in args.items()}
    arrays["out"] = tvm.runtime.tensor(np.full(wanted.shape, np.nan).astype(BF16))
    integers = {n: x for n, x in args.items() if getattr(x, "dtype", None) != BF16}
    computed = kernel.kernel.compute(integers, {"blocks": 7})
    computed = {n: tvm.runtime.tensor(x) if hasattr(x, "shape") else x for n, x in computed.items()}
    kernel.run([{**arrays, **computed}[name] for name in signature.passed])
    np.testing.assert_allclose(
        arrays["out"].numpy().astype("float64"), wanted, rtol=ROUNDED, atol=1e-5
    )
    assert kernel.counts["configurations"] == kernel.counts["releases"] == 7


def test_b_that_the_caller_brings_in_tiles():
    for fmt, features, isa in (
        (BSR(32, 32), 32, "amx"), (BSR(16, 64), 16, "amx"), (BSR(8, 24), 8, "neon"),
    ):  # fmt: skip
        config = MatrixTiles(fmt, features, isa, given=True)
        check(kernel_for(config), blocked((70, 100), fmt.rows, fmt.cols), config, 40)


# -- programs of one's own --------------------------------------------------------------------


def blocks_of(dtype, sums, apart=1, size=32):
    """Blocks in a separate array, and a result of another type, some rows of which are set."""

    place = f"(io * {size} + ii) * {apart}"
    return small("bsr", f"""
with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "bsr") as [io, jo, ii, ji, k]:
    with T.init():
        C[{place}, k] = T.cast(0, "{sums}")
    C[{place}, k] = C[{place}, k] + T.cast(
        A[io, jo, ii, ji], "{sums}") * T.cast(B[jo * {size} + ji, k], "{sums}")
""", f"""
IO = T.dense_fixed(mb)
JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
II = T.dense_fixed({size})
JI = T.dense_fixed({size})
N = T.dense_fixed(nb * {size})
M = T.dense_fixed(mb * {size * apart})
""", dtype, A="IO JO II JI", B="N K", C=f"M K {sums}")  # fmt: skip


@pytest.mark.parametrize(
    "dtype, sums, apart, config",
    [("bfloat16", "float32", 1, CONFIG), ("int8", "int32", 1, CONFIG), ("int8", "int32", 2, CONFIG),
     ("bfloat16", "float32", 1, NEON), ("int8", "int32", 2, NEON)],
    ids=str,
)  # fmt: skip
def test_results_of_the_type_of_the_sums(dtype, sums, apart, config):
    """Results are stored from tiles, unless a block of features sticks out, or rows are apart."""
    rng = np.random.default_rng(0)
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    func = blocks_of(dtype, sums, apart)
    stages = sparsetir.lower(func, matrix_tiles.apply, config, TARGETS[config.isa])
    kernel = EmulatedKernel(stages)
    indptr, indices = np.array([0, 2, 2, 3], "int32"), np.array([0, 2, 1], "int32")
    blocks = rng.integers(-100, 100, (3, 32, 32)).astype(kind)
    whole = np.zeros((96, 96))
    for (i, j), block in zip([(0, 0), (0, 2), (2, 1)], blocks, strict=True):
        whole[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] = block
    for feat in (64, 45):
        b = rng.integers(-100, 100, (96, feat)).astype(kind)
        c = tvm.runtime.tensor(np.full((96 * apart, feat), 7, sums))
        arrays = {"a": blocks, "b": b}
        kernel(**{n: tvm.runtime.tensor(x) for n, x in arrays.items()}, c=c, indptr=indptr,
               indices=indices, mb=3, nb=3, nnzb=3, feat=feat)  # fmt: skip
        np.testing.assert_array_equal(c.numpy()[::apart], whole @ b.astype("float64"))
        assert apart == 1 or (c.numpy()[1::apart] == 7).all()


# -- the text of kernels ----------------------------------------------------------------------


@functools.cache
def assembly(problem=PROBLEM, mcpu="sapphirerapids", config=CONFIG):
    target = tvm.target.Target({**TARGETS[config.isa], "mcpu": mcpu})
    return kernel_of(lower_template(matrix_tiles, problem, config, target), target).source("asm")


def count(lines, name):
    return sum(line.startswith(name) for line in lines)


def test_sums_stay_in_tiles_over_a_row_of_blocks():
    lines = [line.split("#")[0].strip() for line in assembly().splitlines()]
    products = [n for n, line in enumerate(lines) if line.startswith("tdpbf16ps")]
    begin = max(n for n in range(products[0]) if lines[n].endswith(":"))
    label = lines[begin][:-1]
    end = next(n for n in range(begin, len(lines)) if re.match(rf"j\w+\s+{label}$", lines[n]))
    loop = lines[begin:end]
    assert count(loop, "tdpbf16ps") == len(products) == 4 and count(loop, "tileloadd") == 4
    assert not any(count(loop, x) for x in ("tilezero", "tilestored", "call", "ldtilecfg"))
    assert count(lines[:begin], "tilezero") == count(lines, "tilezero") == 4
    assert count(lines[end:], "tilestored") >= 4
    # In the function that workers call, and there alone.
    entry = max(n for n in range(begin) if re.match(r"\.L__tvm_parallel_lambda.*:", lines[n]))
    assert count(lines[entry:begin], "ldtilecfg") == 1 and not count(lines[:entry], "ldtilecfg")
    assert count(lines[end:], "tilerelease") >= 1


def test_sums_stay_in_vectors_over_a_row_of_blocks():
    """16 columns of a block in one step, or 32, by 24 vectors, none of which goes to memory."""
    lines = [line.strip() for line in assembly(mcpu="neoverse-v1", config=NEON).splitlines()]
    products = [n for n, line in enumerate(lines) if line.startswith("bfmmla")]
    first = max(n for n in range(products[0]) if re.match(r"\.LBB.*:", lines[n]))
    loop = lines[first + 1 : products[-1] + 1]
    assert len(products) in (4 * 16, 8 * 16) and len({lines[n].split()[1] for n in products}) == 16
    assert not any(re.match(r"\.LBB|bl\b|st|.*\[sp", line) for line in loop)


def test_pairs_are_multiplied_in_vectors_of_sums():
    """32 columns of 8 rows in a step, by 16 vectors of sums that stay in registers."""
    lines = [line.strip() for line in assembly(mcpu="cooperlake", config=AVX512).splitlines()]
    products = [n for n, line in enumerate(lines) if line.startswith("vdpbf16ps")]
    first = max(n for n in range(products[0]) if re.match(r"\.LBB.*:", lines[n]))
    loop = lines[first + 1 : products[-1] + 1]
    assert len(products) == 16 * 8 and len({lines[n].split()[-1] for n in products}) == 16
    assert not any(re.match(r"\.LBB|call|vmovu?ap?s?\s+%zmm.*\(", line) for line in loop)


def test_float16_has_a_product_of_its_own():
    text = assembly(Spmm("float16"), "graniterapids")
    assert "tdpfp16ps" in text and "tdpbf16ps" not in text


# -- what is refused --------------------------------------------------------------------------


def test_other_configs_are_refused():
    for rows, cols in ((4, 5), (4, 2), (4, 34), (1, 32), (37, 32)):
        with pytest.raises(
            ScheduleError,
            match="expected blocks whose rows a number from 2 to 32 divides, and whose columns a "
            f"multiple of 2 from 4 to 32, in bfloat16, got {rows} x {cols}",
        ):
            lower_template(matrix_tiles, PROBLEM, MatrixTiles(BSR(rows, cols)), SPR)


def test_other_programs_are_refused():
    with pytest.raises(ScheduleError, match="products of values and .* both bfloat16 or float"):
        sparsetir.lower(blocks_of("float32", "float32"), matrix_tiles.apply, CONFIG, SPR)


# -- whose turn it is -------------------------------------------------------------------------


def whole_blocks(size, shape=(64, 96)):
    return sparsetir.SparseMatrix(sp.csr_array(blocked(shape, size, size)).astype("float32"))


def candidates(matrix, target=SPR, **options):
    options = {"dtype": "bfloat16", "threads": 2, **options}
    return sparsetir.plan_candidates("spmm", matrix, 64, target=target, **options)


def test_plans_take_tiles_where_the_cpu_has_them_and_blocks_are_full(monkeypatch):
    assert not any(isinstance(c, MatrixTiles) for c in candidates(whole_blocks(32)) if not HERE)
    monkeypatch.setattr(matrix_tiles, "allowed", lambda needed: "")
    first, second, *others = candidates(whole_blocks(32))
    assert (first.format, second.format) == (BSR(32, 32), BSR(16, 16))
    assert candidates(whole_blocks(16))[0].format == BSR(16, 16)
    assert candidates(whole_blocks(32, (70, 100)))[0].format == BSR(32, 32)
    scattered = sparsetir.SparseMatrix(sp.eye_array(64, format="csr", dtype="float32"))
    for configs in (
        others, candidates(scattered), candidates(whole_blocks(32), reduce="mean"),
        candidates(whole_blocks(32), dtype="float32"), candidates(whole_blocks(32), heads=2),
        candidates(whole_blocks(32), {**SPR, "mcpu": "icelake-server"}),
        candidates(pattern_of(np.ones((32, 32)))[0]),
    ):  # fmt: skip
        assert not any(isinstance(c, MatrixTiles) for c in configs)
    wanted = requested("spmm", whole_blocks(32), 64, dtype="bfloat16", target=SPR)
    for fmt, served in (
        (BSR(8, 16), True),
        (BSR(64, 64), False),
        (BSR(5, 5), False),
        (CSR(), False),
    ):
        assert [c.format for c in wanted.engine(fmt)] == [fmt] * served
    plan = sparsetir.plan("spmm", whole_blocks(32), 64, dtype="bfloat16", target=SPR)
    assert isinstance(plan.config, MatrixTiles) and plan.kernel.needs == ["amx-tile", "amx-bf16"]


@pytest.mark.skipif(HERE, reason="this CPU has AMX")
def test_a_kernel_that_cannot_run_here_says_so(tmp_path):
    target = tvm.target.Target(SPR)
    kernel = kernel_of(lower_template(matrix_tiles, PROBLEM, CONFIG, target), target)
    args, wanted = arguments(blocked((64, 64), 32, 32), CONFIG, 32)
    message = "it needs a CPU with amx-tile and amx-bf16, which this one has not"
    if this_machine().architecture != "x86_64":
        message = "it is compiled for x86_64, and this machine is "
    with pytest.raises(RuntimeError, match=f"spmm: {message}"):
        run(kernel, args, np.zeros(wanted.shape).astype(BF16))


@pytest.mark.skipif(this_machine().architecture != "x86_64", reason="links a kernel of x86")
def test_files_say_what_kernels_need(tmp_path):
    target = tvm.target.Target(SPR)
    kernel_of(lower_template(matrix_tiles, PROBLEM, CONFIG, target), target).export(
        tmp_path / "spmm.so"
    )
    assert read_library(tmp_path / "spmm.so")[1]["needs"] == NEEDED
    if not HERE:
        with pytest.raises(RuntimeError, match="compiled for a CPU with amx-bf16, amx-int8, amx-t"):
            sparsetir.load(tmp_path / "spmm.so")


# -- on a CPU with AMX ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [CONFIG, MatrixTiles(BSR(24, 48), 16, blocks=2), AVX512, MatrixTiles(BSR(7, 10), 16, "avx512")],
    ids=str,
)
def test_on_the_cpu(config):
    why_not, target = allowed(TILE_ISAS[config.isa]["bfloat16"].features), host_target()
    if why_not:
        pytest.skip(why_not)
    kernel = kernel_of(lower_template(matrix_tiles, PROBLEM, config, target), target)
    rows, cols = config.format.rows, config.format.cols
    for shape, feat in sizes(rows, cols):
        check(kernel, blocked(shape, rows, cols), config, feat)


@pytest.mark.skipif(
    not has_bfmmla(), reason="no `bfmmla` here: `ARM_CPU=max tests/on_arm.sh` emulates it"
)
@pytest.mark.parametrize("config", [NEON, MatrixTiles(BSR(12, 8), 8, "neon")], ids=str)
def test_bfmmla_on_the_cpu(config):
    target = tvm.target.Target(ARM)
    with assume(this_machine()._replace(features={"bf16": True})):
        kernel = kernel_of(lower_template(matrix_tiles, PROBLEM, config, target), target)
    rows, cols = config.format.rows, config.format.cols
    for shape, feat in sizes(rows, cols):
        check(kernel, blocked(shape, rows, cols), config, feat)
