"""Calling a kernel: which arrays it takes, how scalars are found, that nothing is copied."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi

import sparsetir
from kernel_common import arguments, check, kernel, right
from programs import PROGRAMS

ORDER = ("a", "b", "c", "indptr", "indices")
KINDS = {
    "numpy": lambda x: x,
    "torch": torch.from_numpy,
    "tvm": tvm_ffi.from_dlpack,  # tvm.runtime.from_dlpack wants 64-byte alignment
}
KINDS["mixed"] = lambda x: KINDS[("numpy", "torch", "tvm")[x.size % 3]](x)


def at_offset(array, offset):
    """A copy that starts `offset` elements behind a boundary of 64 bytes."""
    room = np.empty(array.nbytes + 128 + offset * array.itemsize, np.uint8)
    start = -room.ctypes.data % 64 + offset * array.itemsize
    out = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


# -- kinds of arrays --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["order", "all", "name", "both"])
def test_arrays(kind, way):
    args = arguments()
    given = {name: KINDS[kind](args[name]) for name in ORDER}
    if way == "order":
        assert kernel()(*given.values()) is None
    elif way == "all":
        kernel()(*given.values(), 20, 30, len(args["a"]), 16)
    elif way == "name":
        kernel()(**dict(reversed(given.items())))
    else:
        kernel()(given["a"], given["b"], c=given["c"], indices=given["indices"],
                 indptr=given["indptr"], m=20)  # fmt: skip
    check(args)  # all three share NumPy's memory: nothing was copied


# -- scalars ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scalars",
    [
        {},
        {"m": 20},
        {"m": None, "feat": 16},
        {"m": 20, "n": 30, "feat": 16},
        {"m": np.int64(20), "n": np.int32(30), "feat": np.uint8(16)},
    ],
)
def test_scalars_are_inferred_where_left_out(scalars):
    args = arguments()
    right(kernel(), args, **scalars)


# -- alignment --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_alignment(dtype):
    """Vectorised code with arrays one element off every boundary."""
    bound = 3e-2 if dtype == "float16" else 1e-5
    built = kernel("spmm", dtype)
    for feat in (8, 16, 33, 64, 70):
        for offset in (0, 1, 3, 4):
            args = arguments(feat, dtype)
            moved = {name: at_offset(value, offset) for name, value in args.items()}
            built(**moved)
            check({**args, "c": moved["c"]}, bound)


def test_every_feature_size():
    for feat in range(1, 71):
        args = arguments(feat)
        moved = {name: at_offset(value, feat % 5) for name, value in args.items()}
        kernel()(**moved)
        check(moved)


def test_numpy_slices_of_rows():
    args = arguments()
    b, c = np.empty((33, 16), "float32"), np.zeros((25, 16), "float32")
    b[3:] = args["b"]
    args["b"], args["c"] = b[3:], c[4:24]
    right(kernel(), args)
    assert not c[:4].any() and not c[24:].any()


# -- unusual arrays ---------------------------------------------------------------------------


def test_read_only_numpy_inputs():
    args = arguments()
    for name in ("a", "b", "indptr", "indices"):
        args[name].flags.writeable = False
    right(kernel(), args)
    assert not args["b"].flags.writeable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", ["nnz", "feat", "m", "n", "all"])
def test_empty_arrays(kind, empty):
    m, n, feat = (0 if empty in (name, "all") else size for name, size in
                  (("m", 20), ("n", 30), ("feat", 16)))  # fmt: skip
    args = arguments(feat, m=m, n=n)
    if empty == "nnz":
        args |= {"a": args["a"][:0], "indices": args["indices"][:0]}
        args["indptr"] = np.zeros(21, "int32")
    arrays = {k: KINDS[kind](v) for k, v in args.items()}
    kernel()(**arrays)
    check(args)


def test_odd_strides_of_dimensions_of_size_one():
    args = arguments(1)
    b = torch.from_numpy(args["b"]).as_strided((30, 1), (1, 7))
    c = torch.from_numpy(args["c"]).as_strided((20, 1), (1, 1000))
    kernel()(**{**args, "b": b, "c": c})
    check(args)
    args = arguments(16, m=1)
    c = torch.from_numpy(args["c"]).as_strided((1, 16), (3, 1))
    kernel()(**{**args, "c": c})
    check(args)
    args = arguments(1)
    args["b"] = np.lib.stride_tricks.as_strided(args["b"], (30, 1), (4, 12))
    right(kernel(), args)


def test_torch_inputs_that_require_gradients():
    args = arguments()
    tensors = {name: torch.from_numpy(value) for name, value in args.items()}
    tensors["a"].requires_grad_()
    tensors["b"].requires_grad_()
    kernel()(**tensors)
    check(args)
    assert tensors["c"].grad_fn is None


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype, bound", [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision(kind, dtype, bound):
    """Kernels of 16-bit floats have indices of 64 bits."""
    built = kernel("spmm", dtype, "int64")
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    for feat in (1, 7, 16, 40):
        args = {k: v.astype(numpy_dtype if k in "abc" else "int64")
                for k, v in arguments(feat).items()}  # fmt: skip
        if kind == "numpy":
            built(**args)
        else:
            wide = {k: v.astype("float32") if k in "abc" else v for k, v in args.items()}
            tensors = {k: torch.from_numpy(v) for k, v in wide.items()}
            tensors |= {k: tensors[k].to(getattr(torch, dtype)) for k in "abc"}
            built(**tensors)
            args["c"] = tensors["c"].float().numpy()
        check(args, bound)


# -- threads ----------------------------------------------------------------------------------


def test_threads_call_one_kernel():
    built = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"))
    start = threading.Barrier(8)

    def work(seed):
        args = arguments(33, m=20 + seed, n=30 + 2 * seed, seed=seed)
        bad = {**args, "indices": args["indices"] + 1000}
        start.wait()
        for turn in range(40):
            right(built, args)
            if turn % 4 == seed % 4:
                with pytest.raises(sparsetir.StructureIndexError):
                    built(**bad)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
