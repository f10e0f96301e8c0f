"""Fused relational gather-matmul-scatter on GPUs: its CUDA text under several orders of warps."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest

import rgms_common
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from gpu_runner import requires_nvcc
from pairs import by_default, by_turns
from rgms_common import GPU, MASKS, SEEDS, UNITS
from sparsetir import interpret
from sparsetir.formats import Pattern
from sparsetir.runtime.build import kernel_of
from sparsetir.runtime.pipeline import lower_template
from sparsetir.schedules.gpu import rgms as rgms_gpu
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_tensor_cores import RelationalTensorCores
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.templates.registry import TEMPLATES
from spmm_gpu_common import as_dtype, bfloat16_arrays, compile_cuda, instructions

HALF = Rgms("float16", out="float32")


@functools.cache
def kernel(problem: Rgms, config: Any, **options: Any) -> CudaStages:
    """A kernel for each config; options as of `CudaFunction`."""
    template = TEMPLATES[type(config), Rgms]
    func = template.program(problem, config)
    return CudaStages(func, template.apply, config, arch="sm_80", **options)


def arguments(
    problem: Rgms, config: Any, mask: np.ndarray, feat_in: int, feat: int, special: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Of a kernel, and the operands as they are; `special` puts NaN and infinities into them."""
    rng, dtype = np.random.default_rng(0), as_dtype(problem.dtype)
    relations, m, n = mask.shape
    a = rng.standard_normal(int(mask.sum()))
    x = rng.standard_normal((n, feat_in))
    w = rng.standard_normal((relations, feat_in, feat))
    if special:
        x[1], x[2, 0], x[3, -1] = np.nan, np.inf, -np.inf
        w[0, 0, 0], w[-1, -1, -1] = np.inf, np.nan
        a[::11] = 0
    operands = {k: v.astype(dtype) for k, v in {"a": a, "x": x, "w": w}.items()}
    if not problem.weighted:
        operands["a"][:] = 1
    given = rgms_gpu.arrange(Pattern(mask.nonzero(), mask.shape), problem, config)
    args = {**given.arguments, "x": operands["x"], "w": operands["w"]}
    if problem.weighted:
        args |= given.stored.values(A=operands["a"])
    out = np.full((m, feat), 7, as_dtype(problem.out or problem.dtype))
    return {**args, "out": out, "feat_in": feat_in, "feat": feat}, operands


def exact(mask: np.ndarray, a: Any, x: Any, w: Any) -> np.ndarray:
    """Of stored elements alone, in float64."""
    out = np.zeros((mask.shape[1], w.shape[2]))
    places = zip(*mask.nonzero(), strict=True)
    with np.errstate(invalid="ignore", over="ignore"):
        for (r, i, j), value in zip(places, a.astype(float), strict=True):
            out[i] += (value * x[j].astype(float)) @ w[r].astype(float)
    return out


def check(
    problem: Rgms, config: Any, mask: np.ndarray, feat_in: int, feat: int, special: bool = False
) -> CudaStages:
    """Run a kernel and compare: float32 sums of so many terms, and inner sums that are rounded."""
    run = kernel(problem, config)
    args, operands = arguments(problem, config, mask, feat_in, feat, special)
    with bfloat16_arrays():
        found = run(args, seeds=SEEDS)["out"]
    expected = exact(mask, **operands)
    if special:
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        # An infinity of W, which is in the first column, meets sums, not each of their terms.
        np.testing.assert_array_equal(np.isnan(found[:, 1:]), np.isnan(expected[:, 1:]))
    scale = exact(mask, **{k: np.abs(np.nan_to_num(v, posinf=0)) for k, v in operands.items()})
    terms = feat_in * int(mask.sum(axis=(0, 2)).max(initial=0)) + 2
    unit = 2.0**-53 if problem.dtype == "float64" else 2.0**-24
    rounded = isinstance(config, RelationalTensorCores) and (config.k or problem.weighted)
    allowed = (2 * terms * unit + (UNITS[problem.dtype] if rounded else 0)) * scale + 1e-6
    fine = np.isfinite(expected)
    wrong = np.abs(found[fine] - expected[fine]) > allowed[fine]
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} are wrong"
    return run


PLAIN = RelationalRows(k=1, tile=32, shape=(2, 4))
CORES = RelationalTensorCores(k=1, tile=32, vectors=(4, 4))


@requires_cuda_text
@pytest.mark.parametrize("name", by_default(MASKS, *(n for n in MASKS if n != "mixed")))
@pytest.mark.parametrize("problem, config", [(Rgms(), PLAIN), (HALF, CORES)], ids=["rows", "cores"])
def test_patterns(name: str, problem: Rgms, config: Any) -> None:
    """Empty relations, those of one element, rows in pieces; a kernel for all of them."""
    sizes = {"mixed": (20, 36), "one in each row": (48, 16), "one relation": (32, 20)}
    run = check(problem, config, MASKS[name], *sizes.get(name, (16, 48)))
    assert count_launches(run.stages["II scheduled"]) == 2
    if name == "one relation":
        check(problem, config, MASKS[name], 0, 4)  # no features to sum over


@requires_cuda_text
@pytest.mark.parametrize("problem, config", [(Rgms(), PLAIN), (HALF, CORES)], ids=["rows", "cores"])
def test_numbers_that_are_not_finite(problem: Rgms, config: Any) -> None:
    """They are where the sums of stored elements have them, and nowhere else."""
    check(problem, config, MASKS["mixed"], 20, 36, special=True)


@requires_cuda_text
@pytest.mark.parametrize("problem, config", [(Rgms(), PLAIN), (HALF, CORES)], ids=["rows", "cores"])
def test_values_of_padding_are_not_read(problem: Rgms, config: Any) -> None:
    args, operands = arguments(problem, config, MASKS["mixed"], 20, 36)
    padded = args
    for name in [n for n in args if n.startswith("a_")]:
        columns = args[name.replace("a_", "indices_jb_", 1)].reshape(args[name].shape)
        padded = {**padded, name: np.where(columns < 0, as_dtype(problem.dtype).type("nan"),
                                           args[name])}  # fmt: skip
        assert np.isnan(padded[name]).any()
    run = kernel(problem, config)
    found = [run(x, seeds=(0,))["out"] for x in (args, padded)]
    np.testing.assert_array_equal(*found)
    assert not np.isnan(found[0]).any() and exact(MASKS["mixed"], **operands).any()


@requires_cuda_text
def test_elements_that_are_there_several_times() -> None:
    """As edges of a graph are; columns in any order."""
    rng, mask = np.random.default_rng(2), MASKS["mixed"]
    given = rgms_common.arguments(rng, mask, 20, 36)
    given["indices"] = rng.integers(0, mask.shape[2], len(given["indices"])).astype("int32")
    arrays = [given[n] for n in ("row_ptr", "rows", "indptr", "indices")]
    order = np.arange(len(given["indices"]))
    pattern = RelationPattern(*arrays, mask.shape, order).coordinates
    relation, row, column = pattern.coords
    np.testing.assert_array_equal(np.stack([relation, row]), np.stack(mask.nonzero()[:2]))
    made = rgms_gpu.arrange(pattern, Rgms(), PLAIN)
    shuffled = rng.permutation(len(row))  # as triples in any order, with their values
    triples = RelationPattern.of(*(c[shuffled] for c in pattern.coords), mask.shape)
    other = rgms_gpu.arrange(triples, Rgms(), PLAIN)
    for name, array in other.arguments.items():
        if "indices_jb" not in name:  # columns are in order here
            np.testing.assert_array_equal(array, made.arguments[name])
    args = {**other.arguments, **other.stored.values(A=given["a"][shuffled])}
    args |= {n: given[n] for n in ("x", "w", "out")} | {"feat_in": 20, "feat": 36}
    found = kernel(Rgms(), PLAIN)(args, seeds=SEEDS)["out"]
    expected = np.zeros(found.shape)
    terms = given["x"].astype(float)[column] * given["a"][:, None]
    np.add.at(expected, row, np.einsum("ek,ekl->el", terms, given["w"].astype(float)[relation]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


SIZES = ((16, 16), (32, 32), (48, 20), (20, 48), (33, 7), (64, 100), (1, 1), (24, 200))
KINDS = (
    (Rgms(weighted=False), RelationalRows),
    (Rgms("bfloat16", "int64", out="float32"), RelationalTensorCores),
    (Rgms("float16", weighted=False, out="float32"), RelationalTensorCores),
    (Rgms("float64", "int64"), RelationalRows),
    (Rgms("bfloat16", weighted=False, out="float32"), RelationalTensorCores),
    (Rgms("float16", "int64", out="float32"), RelationalRows),
    (HALF, RelationalTensorCores),
)
KS = (("one in each row", 0), ("mixed", 0), ("mixed", 2), ("one in each row", 3), ("mixed", 5))


@requires_cuda_text
@pytest.mark.parametrize(
    ("sizes", "kind", "case"), by_turns(itertools.product(SIZES, KINDS, KS), 167), ids=str
)
def test_types_and_sizes(sizes: Any, kind: Any, case: Any) -> None:
    """Each type with any numbers of features, in buckets up to any size."""
    (problem, template), (name, k) = kind, case
    config = template.for_features(*sizes, problem.dtype, k)
    check(problem, config, MASKS[name], *sizes)


SHAPES = {
    "wide": RelationalRows(1, 16, 128, 32, (4, 4), 1, shape=(2, 8)),
    "many threads": RelationalRows(1, 64, 64, 8, (2, 1), 3, shape=(4, 4)),
    "a column each": RelationalRows(1, 32, 16, 16, (1, 1), 4, shape=(4, 1)),
    "one warp": RelationalTensorCores(1, 16, 16, 16, (4, 4), 1, shares=(1, 1)),
    "eight warps": RelationalTensorCores(1, 64, 64, 48, (2, 2), 3, shares=(2, 4)),
    "rows": RelationalTensorCores(1, 128, 32, 64, (1, 1), 2, shares=(8, 1)),
}


@requires_cuda_text
@pytest.mark.parametrize("name", by_turns(SHAPES, 6))
def test_shapes_of_tiles(name: str) -> None:
    config = SHAPES[name]
    problem = Rgms() if isinstance(config, RelationalRows) else HALF
    check(problem, config, MASKS["mixed"], 36, 68)


def test_the_program_means_the_same() -> None:
    """In stage I, tiles of rows and all."""
    rng = np.random.default_rng(0)
    mask = rng.random((2, 5, 4)) < 0.5
    for problem in (Rgms(), Rgms(weighted=False)):
        config = RelationalRows(1, 4, 64, shape=(4, 2))
        func = rgms_gpu.program(problem, config)
        args, operands = arguments(problem, config, mask, 3, 2)
        names = {str(p.name) for p in func.params}
        args |= {"relations": 2, "m": 5, "n": 4}
        interpret(func, {k: v for k, v in args.items() if k in names})
        np.testing.assert_allclose(args["out"], exact(mask, **operands), rtol=1e-5, atol=1e-5)


@requires_nvcc
def test_cuda(tmp_path: Any) -> None:
    """Products on tensor cores, asynchronous copies; nothing is spilled."""
    config = RelationalTensorCores.for_features(64, 64, k=1)
    stages = lower_template(TEMPLATES[RelationalTensorCores, Rgms], HALF, config, GPU)
    found = compile_cuda(kernel_of(stages, GPU).source("cuda"), tmp_path, "sm_80")
    assert found.spills == 0 and found.registers <= 128
    code = instructions(found.cubin)
    # Two buckets; 4 warps of 32 by 32 sums, over 64 terms.
    assert len(re.findall(r"HMMA\.16816\.F32", code)) == 2 * 2 * 4 * 4
    assert len(re.findall(r"\bLDGSTS\b", code)) >= 2 * 2
