"""Gradients of relational products for weights on GPUs: CUDA text under several orders of warps."""

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
from sparsetir import interpret
from sparsetir.formats import Pattern
from sparsetir.runtime.build import kernel_of
from sparsetir.runtime.pipeline import lower_template
from sparsetir.schedules.gpu import rgms_gradients as template
from sparsetir.schedules.gpu.rgms_gradients import GradientTiles
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms_gradients import RgmsGradient
from sparsetir.schedules.operators.rgms_gradients import program as operator
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import as_dtype, bfloat16_arrays, compile_cuda, instructions

WEIGHTS, EDGES = RgmsGradient(), RgmsGradient(weighted=False, edges=True)
HALF = RgmsGradient("float16", values="float32")
HALF_EDGES = RgmsGradient("float16", weighted=False, edges=True)
KINDS = {"weights": WEIGHTS, "edges": EDGES, "cores": HALF, "edges on cores": HALF_EDGES}


@functools.cache
def kernel(problem: RgmsGradient, config: GradientTiles, **options: Any) -> CudaStages:
    """A kernel for each config; options as of `CudaFunction`."""
    func = template.program(problem, config)
    return CudaStages(func, template.apply, config, arch="sm_80", **options)


def config_of(problem: RgmsGradient, feat_in: int, feat: int, k: int, rows: int) -> GradientTiles:
    """On tensor cores, of 16 bits; a kernel for features of any number."""
    cores = problem.dtype in UNITS
    return GradientTiles.for_features(problem, feat_in, feat, k, rows, cores)


def operands(problem: RgmsGradient, mask: np.ndarray, feat_in: int, feat: int) -> dict[str, Any]:
    """x, grad, and a or w, in the types that kernels take."""
    rng, (relations, m, n) = np.random.default_rng(0), mask.shape
    shapes = {"x": (n, feat_in), "grad": (m, feat), "w": (relations, feat_in, feat)}
    made = {k: rng.standard_normal(s).astype(as_dtype(problem.dtype)) for k, s in shapes.items()}
    values = rng.standard_normal(int(mask.sum()))
    made["a"] = values.astype(as_dtype(problem.values or problem.dtype))
    if not problem.weighted:
        made["a"][:] = 1
    return made


def arguments(
    problem: RgmsGradient, config: GradientTiles, pattern: Any, given: dict[str, Any]
) -> dict[str, Any]:
    """Of a kernel."""
    arranged = template.arrange(pattern, problem, config)
    (_, feat_in), (_, feat), relations = given["x"].shape, given["grad"].shape, pattern.shape[0]
    shape = (pattern.nnz,) if problem.edges else (relations, feat_in, feat)
    args = {**arranged.arguments, "x": given["x"], "grad": given["grad"]}
    args |= {"w": given["w"]} if problem.edges else {}
    if problem.weighted:
        args |= arranged.stored.values(A=given["a"])
    out = np.full(shape, 7, as_dtype(problem.out))
    return {**args, "out": out, "feat_in": feat_in, "feat": feat}


def exact(problem: RgmsGradient, places: Any, relations: int, given: dict[str, Any]) -> np.ndarray:
    """Of stored elements alone, in float64."""
    r, i, j = places
    x, grad, w = (given[n].astype(float) for n in ("x", "grad", "w"))
    with np.errstate(invalid="ignore", over="ignore"):
        if problem.edges:
            return np.einsum("ek,ekl,el->e", x[j], w[r], grad[i])
        out = np.zeros((relations, x.shape[1], grad.shape[1]))
        terms = np.einsum("e,ek,el->ekl", given["a"].astype(float), x[j], grad[i])
        np.add.at(out, r, terms)
        return out


def check(
    problem: RgmsGradient, config: GradientTiles, mask: np.ndarray, feat_in: int, feat: int,
) -> CudaStages:  # fmt: skip
    """Run a kernel and compare: float32 sums of so many terms, and inner sums that are rounded."""
    run = kernel(problem, config)
    given = operands(problem, mask, feat_in, feat)
    pattern = Pattern(mask.nonzero(), mask.shape)
    with bfloat16_arrays():
        found = run(arguments(problem, config, pattern, given), seeds=SEEDS)["out"]
    expected = exact(problem, mask.nonzero(), mask.shape[0], given)
    sizes = {k: np.abs(v) for k, v in given.items()}
    scale = exact(problem, mask.nonzero(), mask.shape[0], sizes)
    each = int(mask.sum(axis=(1, 2)).max(initial=0))
    terms = (feat_in * feat if problem.edges else each) + 2
    unit = 2.0**-53 if problem.dtype == "float64" else 2.0**-24
    rounded = config.shares is not None and not problem.edges
    allowed = (2 * terms * unit + (UNITS[problem.dtype] if rounded else 0)) * scale + 1e-6
    wrong = np.abs(found - expected) > allowed
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} are wrong"
    return run


@requires_cuda_text
@pytest.mark.parametrize("name", by_default(MASKS, *(n for n in MASKS if n != "mixed")))
@pytest.mark.parametrize("kind", KINDS)
def test_patterns(name: str, kind: str) -> None:
    """Empty relations, those of one element, rows in pieces; a kernel for all of them."""
    sizes = {"mixed": (20, 36), "one in each row": (48, 16), "one relation": (32, 20)}
    problem = KINDS[kind]
    given = config_of(problem, 20, 36, 1, 32)
    config = GradientTiles(**{**vars(given), "feat_in": None, "feat": None, "tile": (32, 32),
                              "shape": given.shape and (4, 2)})  # fmt: skip
    run = check(problem, config, MASKS[name], *sizes.get(name, (16, 48)))
    assert count_launches(run.stages["II scheduled"]) == 2
    if name == "one relation" and problem.edges:
        check(problem, config, MASKS[name], 0, 4)  # no features to sum over
        check(problem, config, MASKS[name], 4, 0)


@requires_cuda_text
@pytest.mark.parametrize("kind", by_default(KINDS, "weights", "edges on cores"))
def test_padding_meets_no_number(kind: str) -> None:
    """What is not finite is where stored elements have it, and nowhere else."""
    problem = KINDS[kind]
    config, mask = config_of(problem, 20, 36, 1, 32), MASKS["mixed"]
    given = operands(problem, mask, 20, 36)
    # Column 0 and row 0 are where padding would point to.
    mask = mask.copy()
    mask[:, 0] = mask[:, :, 0] = False
    given["a"] = given["a"][: int(mask.sum())]
    given["x"][0], given["grad"][0] = np.nan, np.inf
    pattern = Pattern(mask.nonzero(), mask.shape)
    found = kernel(problem, config)(arguments(problem, config, pattern, given), seeds=SEEDS)["out"]
    assert np.isfinite(found).all()
    given["x"][1, 0] = np.inf
    found = kernel(problem, config)(arguments(problem, config, pattern, given), seeds=SEEDS)["out"]
    want = exact(problem, mask.nonzero(), mask.shape[0], given)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    assert not np.isfinite(found).all() and np.isfinite(found).any()


@requires_cuda_text
@pytest.mark.parametrize("problem", [WEIGHTS, EDGES], ids=["weights", "edges"])
def test_elements_that_are_there_several_times(problem: RgmsGradient) -> None:
    """As triples of a graph are, in any order; results are in theirs."""
    rng, mask = np.random.default_rng(2), MASKS["mixed"]
    r, i, _ = mask.nonzero()
    order = rng.permutation(len(r))
    r, i, j = r[order], i[order], rng.integers(0, mask.shape[2], len(r))
    given = operands(problem, mask, 20, 36)
    pattern = RelationPattern.of(r, i, j, mask.shape)
    assert not pattern.keeps_order
    config = config_of(problem, 20, 36, 1, 32)
    found = kernel(problem, config)(arguments(problem, config, pattern, given), seeds=SEEDS)["out"]
    want = exact(problem, (r, i, j), mask.shape[0], given)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


SIZES = ((16, 16), (32, 32), (48, 20), (20, 48), (33, 7), (64, 100), (1, 1), (24, 200), (130, 8))
TYPES = (
    RgmsGradient(weighted=False),
    RgmsGradient("bfloat16", "int64", weighted=False, edges=True),
    RgmsGradient("float64", "int64"),
    RgmsGradient("float64", weighted=False, edges=True),
    RgmsGradient("bfloat16", "int64", values="float32"),
    RgmsGradient("float16", weighted=False),
    RgmsGradient("float32", "int64", weighted=False, edges=True),
)
KS = (("one in each row", 0, 16), ("mixed", 0, 64), ("mixed", 2, 32), ("mixed", 5, 16))


@requires_cuda_text
@pytest.mark.parametrize(
    ("sizes", "problem", "case"), by_turns(itertools.product(SIZES, TYPES, KS), 137), ids=str
)
def test_types_and_sizes(sizes: Any, problem: RgmsGradient, case: Any) -> None:
    """Each type with any numbers of features, in buckets up to any size."""
    name, k, rows = case
    check(problem, config_of(problem, *sizes, k, rows), MASKS[name], *sizes)


SHAPES = {
    "one stage": (WEIGHTS, GradientTiles(1, 32, (64, 32), 32, stages=1, shape=(8, 2))),
    "three stages": (EDGES, GradientTiles(1, 32, (32, 16), 8, (2, 4), 3, shape=(4, 1))),
    "half of the type": (HALF, GradientTiles(1, 32, (32, 32), shape=(4, 2))),
    "one warp": (HALF, GradientTiles(1, 16, (16, 16), shape=None, shares=(1, 1))),
    "eight warps": (HALF_EDGES, GradientTiles(1, 64, (64, 32), 48, shape=None, shares=(2, 4))),
}


@requires_cuda_text
@pytest.mark.parametrize("name", by_turns(SHAPES, 3))
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
        found = [*re.finditer(r"__syncthreads\(\);", source)]
        before = source.find("+ __shfl_xor_sync(")
        gone = found[0] if which == "first" else [x for x in found if x.start() < before][-1]
        return source[: gone.start()] + source[gone.end() :]

    config = config_of(problem, 68, 36, 0, 32)
    run = kernel(problem, config, edit=without)
    given = operands(problem, MASKS["mixed"], 68, 36)
    pattern = Pattern(MASKS["mixed"].nonzero(), MASKS["mixed"].shape)
    with pytest.raises(KernelError, match="race"):
        run(arguments(problem, config, pattern, given), seeds=SEEDS)


@pytest.mark.parametrize("problem", [WEIGHTS, EDGES], ids=["weights", "edges"])
def test_the_program_means_the_same(problem: RgmsGradient) -> None:
    """In stage I, as it is and in tiles of rows."""
    mask = np.random.default_rng(0).random((2, 5, 4)) < 0.5
    given = operands(problem, mask, 3, 2)
    want = exact(problem, mask.nonzero(), 2, given)
    config = GradientTiles(1, 4, (16, 16), 4, (1, 1), shape=(2, 2))
    pattern = RelationPattern.of(*mask.nonzero(), mask.shape)
    args = arguments(problem, config, Pattern(mask.nonzero(), mask.shape), given)
    plain = {**args, **pattern.arguments(), "a": given["a"]}
    plain |= {"edge": np.arange(pattern.nnz, dtype="int32"), "out": args["out"].copy()}
    for func, own in ((template.program(problem, config), args), (operator(problem), plain)):
        names = {str(p.name) for p in func.params}
        interpret(func, {k: v for k, v in own.items() if k in names})
        np.testing.assert_allclose(own["out"], want, rtol=1e-5, atol=1e-5)


@requires_nvcc
@pytest.mark.parametrize("kind", by_default(KINDS, "weights", "edges"))
def test_cuda(kind: str, tmp_path: Any) -> None:
    """Asynchronous copies, products on tensor cores of 16 bits; nothing is spilled."""
    problem = KINDS[kind]
    config = config_of(problem, 64, 64, 1, 64)
    stages = lower_template(TEMPLATES[GradientTiles, RgmsGradient], problem, config, GPU)
    found = compile_cuda(kernel_of(stages, GPU).source("cuda"), tmp_path, "sm_80")
    assert found.spills == 0 and found.registers <= 128
    code = instructions(found.cubin)
    # Two buckets; 4 warps of 32 by 32 sums, over 64 terms, in 2 visits that may be written out.
    products = len(re.findall(r"HMMA\.16816\.F32", code))
    assert products in ((32, 64) if "cores" in kind else (0,))
    assert len(re.findall(r"\bLDGSTS\b", code)) >= 2
