"""Plans whose results have another type than their operands."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import tvm

import sparsetir
from cuda_runner import requires_cuda_text
from pairs import by_turns
from refusals import refusals
from sparsetir.formats import BSR, CSC, SRBCRS, Hyb
from sparsetir.planning.plan import requested as request
from sparsetir.runtime.signature import signature_of
from sparsetir.schedules.search.choose import candidates
from spmm_gpu_common import kernel, run_kernel

GPU = {"kind": "cuda", "arch": "sm_80"}
OUT = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}


def matrix(dtype):
    """A matrix of integers, all sums of which are exact."""
    a = sp.random_array((50, 40), density=0.2, format="csr", dtype="float32", rng=0)
    a.data = np.random.default_rng(0).integers(-128, 128, a.nnz).astype("float32")
    return a.astype("int8") if dtype == "int8" else a


def operand(feat, dtype):
    b = torch.from_numpy(np.random.default_rng(1).integers(-8, 8, (40, feat)))
    return b.to(getattr(torch, dtype))


FORMATS = [None, BSR(8, 8), CSC(), SRBCRS(8, 16), Hyb(1, 2)]


@pytest.mark.parametrize("dtype, fmt", by_turns([(d, f) for f in FORMATS for d in OUT], 4), ids=str)
def test_sums_are_not_rounded(dtype, fmt):
    a, b = matrix(dtype), operand(24, dtype)
    run = sparsetir.plan("spmm", a, 24, dtype=dtype, out_dtype=OUT[dtype], format=fmt)
    wanted = torch.from_numpy(a.toarray().astype("float64") @ b.double().numpy())
    result = run(b)
    assert str(result.dtype) == f"torch.{OUT[dtype]}"
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=0)
    out = torch.full((50, 24), 7, dtype=result.dtype)
    assert run(b, out=out) is out and torch.equal(out, result)


def test_other_arrays_and_overlaps():
    a, b = matrix("int8"), operand(24, "int8").numpy()
    run = sparsetir.plan("spmm", a, 24, out_dtype="int32")
    wanted = a.toarray().astype("int32") @ b.astype("int32")
    for result in (run(b), run(tvm.runtime.tensor(b)).numpy()):
        assert result.dtype == "int32"
        np.testing.assert_array_equal(result, wanted)
    memory = torch.zeros(50 * 24 * 4, dtype=torch.int8)
    out, inside = memory.view(torch.int32).view(50, 24), memory[-960:].view(40, 24)
    with pytest.raises(ValueError, match="argument 'out' shares memory with 'b'"):
        run(inside, out=out)
    with pytest.raises(TypeError, match="argument 'out': expected dtype int32, got int8"):
        run(b, out=np.empty((50, 24), "int8"))


@requires_cuda_text
@pytest.mark.parametrize("feat", by_turns([24, 1], 2))
@pytest.mark.slow
def test_on_gpus(feat):
    """One config of each template that may be chosen: vectors are of the wider type."""
    a = matrix("float16")
    wanted = request("spmm", a, feat, dtype="float16", out_dtype="float32", target=GPU)
    b = operand(feat, "float16").numpy()
    configs = candidates(wanted.problem, wanted.statistics, wanted.target)
    for config in {type(c): c for c in configs}.values():
        template, sizes = wanted.template(config), {"heads": 1, "tiles": config.tiles(feat)}
        arranged = template.arrange(wanted.pattern, wanted.problem, config)
        args = {**sizes, "feat": feat, **arranged.arguments, "b": b}
        args |= arranged.computed(signature_of(wanted.stages(config)).func, args)
        args |= {**arranged.stored.values(A=a.data.astype("float16"))}
        args["out"] = np.full((50, feat), 7, "float32")
        out = run_kernel(kernel(template, wanted.problem, config, as_cuda=True), args)["out"]
        np.testing.assert_array_equal(out, a.toarray() @ b.astype("float32"))


HALF = matrix("float16")
test_refusals = refusals(
    """
sparsetir.plan("sddmm", HALF, 8, dtype="float16", out_dtype="float32")
    # ValueError: 'out_dtype': expected None for 'sddmm'
sparsetir.plan("spmm", HALF, 8, out_dtype=4)  # TypeError: 'out_dtype': expected a .. got 4
sparsetir.plan("spmm", HALF, 8, dtype="float16", out_dtype="float64")
    # ValueError: plan: argument 'out_dtype': expected None, 'float16' or 'float32', got 'float64'
sparsetir.plan("spmm", HALF, 8, dtype="int8")  # ValueError: plan: argument 'dtype': expected
sparsetir.plan("spmm", HALF, 8, dtype="int8", out_dtype="int32", target=GPU)
    # ValueError: argument 'format': expected one that tensor cores take, for 'int8' on a GPU
""",
    globals(),
)
