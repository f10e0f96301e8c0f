"""The schedules of Senanayake's thesis (appendix A), as `examples/` writes them."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_turns
from sparsetir import Schedule

EXAMPLES = Path(__file__).parents[2] / "examples"
TYPES = [("float32", "int32"), ("float64", "int64")]
SMALL = 0.01  # of the examples' inputs


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


thesis, inputs = imported("thesis_schedules"), imported("thesis_inputs")
TUNED = [
    (order, config)
    for order in (3, 4, 5)
    for config in thesis.Tuned.space(order)
    if config.prefetch == 8 * (order == 4)
]


def sizes(args):
    """The numbers that the shapes of arrays imply."""
    if "indptr" in args:
        right = args["x"] if "x" in args else args["b"]
        of_csr = {"m": len(args["indptr"]) - 1, "n": len(right), "nnz": len(args["a"])}
        return of_csr | ({"feat": right.shape[1]} if "b" in args else {})
    return inputs.mttkrp_sizes(args)


def check(program, schedule, dtype, idtype):
    """A schedule's kernel against exact results, with empty rows and sizes that divide nothing."""
    args, result, exact, _ = inputs.problem(program.__name__, SMALL, dtype, idtype)
    rows = np.diff(args.get("indptr", args.get("k_ptr")))
    assert rows.min() == 0 < rows.max() and len(rows) % 8
    sch = Schedule(program(dtype, idtype))
    schedule(sch)
    kernel = sparsetir.build(sch)
    kernel(**args)
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(args[result], exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, idtype", TYPES)
@pytest.mark.parametrize("name, program, schedule", thesis.SCHEDULES, ids=lambda x: str(x)[:4])
def test_schedule(name, program, schedule, dtype, idtype):
    check(program, schedule, dtype, idtype)


@pytest.mark.parametrize("order, config", TUNED, ids=str)
@pytest.mark.default(3)
def test_tuned(order, config):
    schedule = partial(thesis.tuned_mttkrp, config=config)
    check(getattr(thesis, f"mttkrp{order}"), schedule, *TYPES[order % 2])


@pytest.mark.parametrize("config", thesis.Tuned.space(3)[::2], ids=str)
def test_tuned_on_few_elements_and_what_is_no_number(config):
    sch = Schedule(thesis.mttkrp3("float32"))
    thesis.tuned_mttkrp(sch, config)
    kernel, shape, rng = sparsetir.build(sch), (7, 5, 6), np.random.default_rng(0)
    for share in (0, 0.01, 0.5):
        coords = np.array(np.nonzero(rng.random(shape) < share))
        args, exact = inputs.mttkrp_arguments(coords, shape, "float32", "int32", rng)
        kernel(**args)
        np.testing.assert_allclose(args["a"], exact, rtol=1e-4, atol=1e-5)
    before = args["a"].copy()
    args["d"][4] = np.nan
    kernel(**args)
    without = ~np.isin(np.arange(7), coords[0, coords[2] == 4])
    assert np.isnan(args["a"][~without]).all() and 0 < without.sum() < 7
    np.testing.assert_array_equal(args["a"][without], before[without])


@pytest.mark.parametrize("name, program, schedule", thesis.SCHEDULES, ids=lambda x: str(x)[:4])
def test_stage_one_means_the_same(name, program, schedule):
    args, result, exact, _ = inputs.problem(program.__name__, 0, "float64", "int32")
    sch = Schedule(program("float64", "int32"))
    schedule(sch)
    sparsetir.interpret(sch.func, {**args, **sizes(args)})
    np.testing.assert_allclose(args[result], exact, rtol=1e-12, atol=1e-12)


def test_workspaces_hold_partial_products():
    sch = Schedule(thesis.mttkrp5())
    thesis.a7_mttkrp5(sch)
    lines = [line.strip() for line in sch.func.script().splitlines() if "_workspace[" in line]
    place = "j0 * 16 + j1"
    name = "B[i, k, l, m, n]"
    for ws, factor in (("BF", "F[n"), ("BEF", "E[m"), ("BDEF", "D[l"), ("A", "C[k")):
        to = f"{ws}_workspace[j0, j1]" if ws != "A" else f"A[i, {place}]"
        term = f"{name} * {factor}, {place}]"
        # What is without terms stays 0, whatever it would be multiplied with.
        flag = f"{name.partition('[')[0]}_any[()]"
        term = term if ws == "BF" else f"T.Select({flag}, {term}, T.float32(0.0))"
        name, line = to, f"{to} = {to} + {term}"
        assert line in lines


def test_a_bound_is_checked():
    sch = Schedule(thesis.mttkrp3())
    thesis.a5_mttkrp3(sch)
    kernel = sparsetir.build(sch)
    args, *_ = inputs.problem("mttkrp3", SMALL)
    args |= {name: np.ascontiguousarray(args[name][:, :20]) for name in "acd"}
    promised = r"expected shape \(53, 32\), as its schedule promises that 'columns' is 32, got"
    with pytest.raises(ValueError, match=rf"{promised} \(53, 20\)"):
        kernel(**args)


# -- for GPUs, as CUDA text on the CPU -------------------------------------------------------------

gpu = imported("thesis_gpu_schedules")
COLUMNS = {"spmm": 128}
ON_GPUS = {name: (program, schedule) for name, program, schedule in gpu.GPU_SCHEDULES}


@requires_cuda_text
@pytest.mark.parametrize(
    ("name", "dtype", "idtype"),
    by_turns([(n, *kind) for at, n in enumerate(ON_GPUS) for kind in TYPES[:: 1 - at % 2 * 2]], 2),
)
@pytest.mark.default("A.9-float64-int64", "A.10-float32-int32", "A.11-float64-int64")
def test_on_gpus(name, dtype, idtype):
    """Against exact results, with empty rows and sizes that divide nothing."""
    program, schedule = ON_GPUS[name]
    args, result, exact, _ = inputs.problem(
        program.__name__, 0.01, dtype, idtype, columns=COLUMNS.get(program.__name__, 37)
    )
    kernel = CudaStages(program(dtype, idtype), schedule)
    out = kernel({**args, **sizes(args)})[result]
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(out, exact, rtol=tolerance, atol=tolerance)
