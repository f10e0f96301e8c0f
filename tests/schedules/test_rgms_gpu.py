"""Relational products and their gradients on GPUs: CUDA text under several orders of warps."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest

from cuda_runner import KernelError, requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import requires_nvcc
from pairs import by_default, by_turns
from rgms_common import GPU, MASKS, SEEDS, UNITS
from sparsetir.formats import Pattern
from sparsetir.runtime.pipeline import kernel_of, lower_template
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_gradients import GradientTiles
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms, RgmsGradient
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import as_dtype, bfloat16_arrays, compile_cuda, instructions

PLAIN, HALF = Rgms(), Rgms("float16", out="float32")
WEIGHTS, EDGES = RgmsGradient(), RgmsGradient(weighted=False, edges=True)
HALF_WEIGHTS = RgmsGradient("float16", values="float32")
HALF_EDGES = RgmsGradient("float16", weighted=False, edges=True)


def config_of(problem: Any, feat_in: int, feat: int, k: int = 1, rows: int = 32) -> Any:
    """Configs for tensor cores, of 16 bits; a kernel for any number of features."""
    cores = problem.dtype in UNITS
    if isinstance(problem, RgmsGradient):
        return GradientTiles.for_features(problem, feat_in, feat, k, rows, cores)
    return RelationalRows.for_features(feat_in, feat, problem.dtype, k, cores=cores)


def for_any_size(problem: RgmsGradient) -> GradientTiles:
    config = config_of(problem, 20, 36)
    changes = {"feat_in": None, "feat": None, "tile": (32, 32), "shape": config.shape and (4, 2)}
    return GradientTiles(**{**vars(config), **changes})


# A kernel of each, for all patterns and sizes.
KINDS = {
    "rows": (PLAIN, RelationalRows(k=1, tile=32, shape=(2, 4))),
    "cores": (HALF, RelationalRows(1, 32, 32, 32, (4, 4), shape=None, shares=(2, 2))),
    "weights": (WEIGHTS, for_any_size(WEIGHTS)),
    "edges": (EDGES, for_any_size(EDGES)),
    "weights on cores": (HALF_WEIGHTS, for_any_size(HALF_WEIGHTS)),
    "edges on cores": (HALF_EDGES, for_any_size(HALF_EDGES)),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def kernel(problem: Any, config: Any, **options: Any) -> CudaStages:
    """A kernel for each config; options as of `CudaFunction`."""
    template = TEMPLATES[type(config), type(problem)]
    func = template.program(problem, config)
    return CudaStages(func, template.apply, config, arch="sm_80", **options)


def operands(problem: Any, shape: Any, nnz: int, feat_in: int, feat: int) -> dict[str, Any]:
    """x, w, grad and a, in the types that kernels take; shape: relations, rows and columns."""
    rng, (relations, m, n) = np.random.default_rng(0), shape
    shapes = {"x": (n, feat_in), "grad": (m, feat), "w": (relations, feat_in, feat)}
    arrays = {k: rng.standard_normal(s).astype(as_dtype(problem.dtype)) for k, s in shapes.items()}
    arrays["a"] = rng.standard_normal(nnz).astype(as_dtype(problem.values or problem.dtype))
    if not problem.weighted:
        arrays["a"][:] = 1
    return arrays


def arguments(problem: Any, config: Any, pattern: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel."""
    arranged = TEMPLATES[type(config), type(problem)].arrange(pattern, problem, config)
    (relations, m, _), (_, feat_in, feat) = pattern.shape, arrays["w"].shape
    if isinstance(problem, Rgms):
        names, shape = "xw", (m, feat)
    elif problem.edges:
        names, shape = ("x", "grad", "w"), (pattern.nnz,)
    else:
        names, shape = ("x", "grad"), (relations, feat_in, feat)
    args = {**arranged.arguments, **{name: arrays[name] for name in names}}
    if problem.weighted:
        args |= arranged.stored.values(A=arrays["a"])
    out = np.full(shape, 7, as_dtype(problem.out or problem.dtype))
    return {**args, "out": out, "feat_in": feat_in, "feat": feat}


def exact(problem: Any, places: Any, arrays: dict[str, Any]) -> np.ndarray:
    """The result of the elements at these places, in float64."""
    r, i, j = places
    a, x, grad, w = (arrays[n].astype(float) for n in ("a", "x", "grad", "w"))
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(problem, Rgms):
            out, index = np.zeros(grad.shape), i
            terms = np.einsum("e,ek,ekl->el", a, x[j], w[r])
        elif problem.edges:
            return np.einsum("ek,ekl,el->e", x[j], w[r], grad[i])
        else:
            out, index = np.zeros(w.shape), r
            terms = np.einsum("e,ek,el->ekl", a, x[j], grad[i])
        np.add.at(out, index, terms)
    return out


def check(problem: Any, config: Any, mask: np.ndarray, feat_in: int, feat: int) -> CudaStages:
    """Run a kernel and compare: float32 sums of so many terms, and inner sums that are rounded."""
    run, places = kernel(problem, config), mask.nonzero()
    arrays = operands(problem, mask.shape, len(places[0]), feat_in, feat)
    with bfloat16_arrays():
        args = arguments(problem, config, Pattern(places, mask.shape), arrays)
        result = run(args, seeds=SEEDS)["out"]
    expected = exact(problem, places, arrays)
    scale = exact(problem, places, {k: np.abs(v) for k, v in arrays.items()})
    cores = getattr(config, "shares", None) is not None
    if isinstance(problem, Rgms):
        terms = feat_in * int(mask.sum(axis=(0, 2)).max(initial=0))
        rounded = cores and (config.k or problem.weighted)
    else:
        terms = feat_in * feat if problem.edges else int(mask.sum(axis=(1, 2)).max(initial=0))
        rounded = cores and not problem.edges
    unit = 2.0**-53 if problem.dtype == "float64" else 2.0**-24
    allowed = (2 * (terms + 2) * unit + (UNITS[problem.dtype] if rounded else 0)) * scale + 1e-6
    wrong = ~(np.abs(result - expected) <= allowed)  # NaN is wrong, too
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} are wrong"
    return run


# The others meet a pattern in `test_padding_meets_no_number`.
@requires_cuda_text
@pytest.mark.parametrize("kind", by_default(KINDS, "rows", "cores", "weights on cores"))
@pytest.mark.default("rows", "cores")
def test_patterns(kind: str) -> None:
    """Empty relations, those of one element, rows in pieces; a kernel for all of them."""
    problem, config = KINDS[kind]
    sizes = {"mixed": (20, 36), "one in each row": (48, 16), "one relation": (32, 20)}
    for name, mask in MASKS.items():
        run = check(problem, config, mask, *sizes.get(name, (16, 48)))
    assert count_launches(run.stages["II scheduled"]) == 2
    if problem is not WEIGHTS and problem is not HALF_WEIGHTS:
        check(problem, config, MASKS["one relation"], 0, 4)  # no features to sum over
    if kind.startswith("edges"):
        check(problem, config, MASKS["one relation"], 4, 0)


@requires_cuda_text
@each_kind
@pytest.mark.default("rows", "cores", "weights on cores")
def test_padding_meets_no_number(kind: str) -> None:
    """Only stored elements pass on NaN and infinity."""
    problem, config = KINDS[kind]
    mask = MASKS["mixed"].copy()
    mask[:, 0] = mask[:, :, 0] = False  # where padding would point to
    places, pattern = mask.nonzero(), Pattern(mask.nonzero(), mask.shape)
    arrays = operands(problem, mask.shape, pattern.nnz, 20, 36)
    arrays["x"][0], arrays["grad"][0] = np.nan, np.inf

    def found() -> np.ndarray:
        args = arguments(problem, config, pattern, arrays)
        return kernel(problem, config)(args, seeds=SEEDS)["out"]

    assert np.isfinite(found()).all()
    arrays["x"][1, 0] = np.inf
    if isinstance(problem, Rgms):
        arrays["x"][2], arrays["x"][3, -1], arrays["a"][::11] = np.nan, -np.inf, 0
        arrays["w"][0, 0, 0], arrays["w"][-1, -1, -1] = np.inf, np.nan
    want, have = exact(problem, places, arrays), found()
    np.testing.assert_array_equal(np.isfinite(have), np.isfinite(want))
    assert not np.isfinite(have).all() and np.isfinite(have).any()
    near = np.where(np.isfinite(want), want, 0)
    np.testing.assert_allclose(np.where(np.isfinite(have), have, 0), near, rtol=1e-2, atol=0.05)


@requires_cuda_text
@pytest.mark.parametrize("kind", ["rows", "weights", "edges"])
@pytest.mark.default("edges")
def test_elements_that_are_there_several_times(kind: str) -> None:
    """Triples in any order, as of a graph; results for them are in the same order."""
    problem, config = KINDS[kind]
    rng, mask = np.random.default_rng(2), MASKS["mixed"]
    r, i, _ = mask.nonzero()
    order = rng.permutation(len(r))
    places = r[order], i[order], rng.integers(0, mask.shape[2], len(r))
    arrays = operands(problem, mask.shape, len(r), 20, 36)
    pattern = RelationPattern.of(*places, mask.shape)
    assert not pattern.keeps_order
    args = arguments(problem, config, pattern, arrays)
    result = kernel(problem, config)(args, seeds=SEEDS)["out"]
    np.testing.assert_allclose(result, exact(problem, places, arrays), rtol=1e-4, atol=1e-3)


SIZES = ((16, 16), (32, 32), (48, 20), (20, 48), (33, 7), (64, 100), (1, 1), (24, 200), (130, 8))
PROBLEMS = (
    Rgms(weighted=False),
    Rgms("bfloat16", "int64", out="float32"),
    Rgms("float16", weighted=False, out="float32"),
    Rgms("float64", "int64"),
    Rgms("bfloat16", weighted=False, out="float32"),
    HALF,
    RgmsGradient(weighted=False),
    RgmsGradient("bfloat16", "int64", weighted=False, edges=True),
    RgmsGradient("float64", "int64"),
    RgmsGradient("float64", weighted=False, edges=True),
    RgmsGradient("bfloat16", "int64", values="float32"),
    RgmsGradient("float16", weighted=False),
    RgmsGradient("float32", "int64", weighted=False, edges=True),
)
KS = (
    ("one in each row", 0, 16), ("mixed", 5, 16), ("mixed", 2, 32), ("one in each row", 3, 32),
    ("mixed", 0, 64),
)  # fmt: skip


@requires_cuda_text
@pytest.mark.parametrize(
    ("sizes", "problem", "case"), by_turns(itertools.product(SIZES, PROBLEMS, KS), 282), ids=str
)
@pytest.mark.slow
def test_types_and_sizes(sizes: Any, problem: Any, case: Any) -> None:
    """Each type with any numbers of features, in buckets up to any size."""
    name, k, rows = case
    check(problem, config_of(problem, *sizes, k, rows), MASKS[name], *sizes)


SHAPES = {
    "wide": (PLAIN, RelationalRows(1, 16, 128, 32, (4, 4), 1, shape=(2, 8))),
    "many threads": (PLAIN, RelationalRows(1, 64, 64, 8, (2, 1), 3, shape=(4, 4))),
    "a column each": (PLAIN, RelationalRows(1, 32, 16, 16, (1, 1), 4, shape=(4, 1))),
    "twelve threads of a row": (PLAIN, RelationalRows(1, 32, 48, 16, (4, 4), 2, shape=(4, 4))),
    "16 bits by rows": (HALF, RelationalRows.for_features(36, 68, "float16", 2)),
    "one warp": (HALF, RelationalRows(1, 16, 16, 16, (4, 4), 1, shape=None, shares=(1, 1))),
    "eight warps": (HALF, RelationalRows(1, 64, 64, 48, (2, 2), 3, shape=None, shares=(2, 4))),
    "warps of rows": (HALF, RelationalRows(1, 128, 32, 64, (1, 1), 2, shape=None, shares=(8, 1))),
    "one stage": (WEIGHTS, GradientTiles(1, 32, (64, 32), 32, stages=1, shape=(8, 2))),
    "three stages": (EDGES, GradientTiles(1, 32, (32, 16), 8, (2, 4), 3, shape=(4, 1))),
    "half of the type": (HALF_WEIGHTS, GradientTiles(1, 32, (32, 32), shape=(4, 2))),
    "one warp of weights": (
        HALF_WEIGHTS, GradientTiles(1, 16, (16, 16), shape=None, shares=(1, 1))),
    "eight warps of edges": (
        HALF_EDGES, GradientTiles(1, 64, (64, 32), 48, shape=None, shares=(2, 4))),
}  # fmt: skip


@requires_cuda_text
@pytest.mark.parametrize("name", by_default(SHAPES, "wide", "twelve threads of a row"))
def test_shapes_of_tiles(name: str) -> None:
    problem, config = SHAPES[name]
    check(problem, config, MASKS["mixed"], 36, 68)


# The first one waits for the copies of a step, the last one for products that others have made.
PLAIN_HALF = RgmsGradient("float16", weighted=False)
BARRIERS = ((PLAIN_HALF, "first"), (EDGES, "last"), (HALF_EDGES, "first"), (HALF_EDGES, "last"))


@requires_cuda_text
@pytest.mark.parametrize(("problem", "which"), by_turns(BARRIERS, 3), ids=str)
def test_a_barrier_that_is_missing_is_found(problem: RgmsGradient, which: str) -> None:
    def without(source: str) -> str:
        barriers = [*re.finditer(r"__syncthreads\(\);", source)]
        before = source.find("+ __shfl_xor_sync(")
        gone = barriers[0] if which == "first" else [x for x in barriers if x.start() < before][-1]
        return source[: gone.start()] + source[gone.end() :]

    config = config_of(problem, 68, 36, 0)
    run = kernel(problem, config, edit=without)
    pattern = Pattern(MASKS["mixed"].nonzero(), MASKS["mixed"].shape)
    arrays = operands(problem, pattern.shape, pattern.nnz, 68, 36)
    with pytest.raises(KernelError, match="race"):
        run(arguments(problem, config, pattern, arrays), seeds=SEEDS)


@requires_nvcc
@pytest.mark.parametrize("kind", by_default(KINDS, "cores", "weights"))
@pytest.mark.default("weights")
def test_cuda(kind: str, tmp_path: Any) -> None:
    """Asynchronous copies, products on tensor cores of 16 bits; nothing is spilled."""
    problem, _ = KINDS[kind]
    config = config_of(problem, 64, 64, 1, 64)
    stages = lower_template(TEMPLATES[type(config), type(problem)], problem, config, GPU)
    compiled = compile_cuda(kernel_of(stages, GPU).source("cuda"), tmp_path, "sm_80")
    assert compiled.spills == 0 and compiled.registers <= 128
    code = instructions(compiled.cubin)
    # Two buckets; 4 warps of 32 by 32 sums, over 64 terms, in 2 visits that may be written out.
    products = len(re.findall(r"HMMA\.16816\.F32", code))
    assert products in ((64,) if kind == "cores" else (32, 64) if "cores" in kind else (0,))
    assert len(re.findall(r"\bLDGSTS\b", code)) >= (4 if kind == "cores" else 2)
