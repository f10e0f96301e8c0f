"""SpMM and SpMV on the CPU: every config against float64 sums, on the zoo of patterns."""

# pyright: reportAttributeAccessIssue=false

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetir
from csr_zoo import ZOO, check_spmm, expected
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program
from sparsetir.schedules.templates.spmm import RowBlocks, apply

RNG = np.random.default_rng(0)


def check(a, feat, dtype="float32", reduce="sum", config=None, threads=2):
    check_spmm(a, config, feat, dtype, reduce, threads)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_patterns(name, reduce):
    check(ZOO[name], 20, reduce=reduce)
    check(ZOO[name], 32, reduce=reduce, config=RowBlocks(tile=32, pack=True, parts=3, blocks=2))


@pytest.mark.parametrize("config", [None, RowBlocks(16, parts=4), RowBlocks(16, pack=True)])
def test_mean_of_a_long_row(config):
    """As exact as the sum; in parts, too, where the mean so far is stored in 16 bits."""
    a = sp.csr_array(np.ones((1, 100_000), "float32"))
    for dtype, close in (("float32", 1e-6), ("float16", 2e-3)):
        plan = sparsetir.plan("spmm", a, 16, dtype=dtype, reduce="mean", config=config)
        out = plan(torch.ones(100_000, 16, dtype=getattr(torch, dtype)))
        assert (out - 1).abs().max() <= close


@pytest.mark.parametrize("feat", [1, 2, 3, 7, 15, 16, 17, 33, 100, 129, 257, 600, 1023, 1024])
def test_feature_sizes(feat):
    check(ZOO["random"], feat)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    for reduce in ("sum", "mean", "max", "min"):
        check(ZOO["empty rows"], 24, dtype, reduce)


CONFIGS = [
    RowBlocks(tile=64, blocks=7),
    RowBlocks(tile=32, parts=5),
    RowBlocks(tile=16, lanes=8, prefetch=1),
    RowBlocks(tile=20, lanes=16, feat=64, pack=True),
    RowBlocks(tile=13, lanes=4, feat=64, prefetch=0, blocks=3),
    RowBlocks(tile=4, lanes=4, feat=64, pack=True, parts=2, blocks=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs(config):
    for name in ("random", "empty rows", "one dense row", "empty"):
        check(ZOO[name], 64, config=config, threads=3)


def test_one_kernel_serves_all_patterns_of_a_tile():
    config = RowBlocks(tile=48, prefetch=3)
    check(ZOO["random"], 48, config=config)
    before = sparsetir.compilations()
    check(ZOO["one dense row"], 96, config=config)
    check(ZOO["empty"], 144, config=RowBlocks(tile=48, prefetch=3, blocks=5))
    assert sparsetir.compilations() == before
    check(ZOO["random"], 48, config=RowBlocks(tile=48, prefetch=3, parts=2))
    check(ZOO["random"], 48, config=RowBlocks(tile=48, prefetch=3, parts=7))
    assert sparsetir.compilations() == before + 1


def test_int64_indices():
    a = ZOO["random"]
    config = RowBlocks(tile=16, parts=2)
    kernel = sparsetir.build(
        program(Spmm(idtype="int64", reduce="mean")), schedule=apply, config=config
    )
    b, out = RNG.standard_normal((47, 32)).astype("float32"), np.empty((61, 32), "float32")
    kernel(a.data, b, out, a.indptr.astype("int64"), a.indices.astype("int64"))
    np.testing.assert_allclose(out, expected(a, a.data, b, "mean")[0], atol=1e-5)


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_what_is_not_finite(reduce):
    """Only elements that are stored meet what B holds, and NaN and inf stay what they are."""
    a = sp.csr_array(([1.0, 0.0, -1.0], ([0, 0, 2], [0, 1, 2])), shape=(4, 5), dtype="float32")
    b = np.full((5, 18), np.nan, "float32")
    b[0], b[1], b[2] = 2.0, 3.0, np.inf
    out = sparsetir.plan("spmm", a, 18, reduce=reduce)(b)
    assert (
        (out[0] == (0 if reduce == "min" else 2)).all()
        and (out[1] == 0).all()
        and (out[3] == 0).all()
    )
    assert (out[2] == -np.inf).all()
    b[1, 3] = np.inf  # times the stored zero: NaN
    out = sparsetir.plan("spmm", a, 18, reduce=reduce)(b)
    assert np.isnan(out[0, 3]) and np.isfinite(np.delete(out[0], 3)).all()


def test_an_extremum_keeps_nan():
    a = sp.csr_array(np.ones((1, 3), "float32"))
    for place in range(3):
        b = np.ones((3, 4), "float32")
        b[place] = np.nan
        for reduce in ("amax", "amin"):
            assert np.isnan(sparsetir.plan("spmm", a, 4, reduce=reduce)(b)).all()


def test_heads():
    a, heads, feat = ZOO["random"], 3, 20
    b = RNG.standard_normal((47, heads, feat)).astype("float32")
    values = RNG.standard_normal((a.nnz, heads)).astype("float32")
    run = sparsetir.plan("spmm", a, feat, heads=heads)
    out = run(b, values=values)
    assert out.shape == (61, heads, feat)
    for h in range(heads):
        want = expected(a, values[:, h], b[:, h], "sum")[0]
        np.testing.assert_allclose(out[:, h], want, atol=1e-5)
    given = torch.empty(61, heads, feat)
    assert run(torch.from_numpy(b), values=torch.from_numpy(values), out=given) is given
    np.testing.assert_array_equal(given.numpy(), out)
    with pytest.raises(ValueError, match="'b': .* with heads as the second dimension, got .3, 47"):
        run(b.swapaxes(0, 1))
    with pytest.raises(ValueError, match="'values': .* with heads as the second dimension, got .3"):
        run(b, values=values.T)
    with pytest.raises(ValueError, match="'out' shares memory with 'b'"):
        square = sparsetir.plan("spmm", sp.eye_array(4, format="csr", dtype="float32"), b[:4])
        square(b[:4], out=b[:4])


def test_spmv():
    a = ZOO["random"]
    x = RNG.standard_normal(47).astype("float32")
    plan = sparsetir.plan("spmv", a)
    np.testing.assert_allclose(plan(x), a @ x, atol=1e-5)
    out = torch.empty(61)
    plan(torch.from_numpy(x), out=out)
    np.testing.assert_allclose(out.numpy(), a @ x, atol=1e-5)


def test_the_code_keeps_a_tile_in_registers():
    """No accumulator is loaded or stored in the loop over non-zeros, and rows are prefetched."""

    target = {"kind": "llvm", "mcpu": "cascadelake"}  # for others LLVM may write loops out twice
    plan = sparsetir.plan("spmm", ZOO["random"], 128, config=RowBlocks(tile=128), target=target)
    code = plan.kernel.source("ll")
    loop = next(part for part in re.split(r"\n(?=\S+:)", code) if "llvm.prefetch" in part)
    assert len(re.findall(r"call void @llvm.prefetch", loop)) == 8
    assert "store" not in loop
