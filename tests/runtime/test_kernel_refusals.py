"""Errors of kernels and their messages."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import tvm_ffi
from tvm import tirx

import sparsetir
from kernel_common import arguments, check, kernel, right
from programs import PROGRAMS
from refusals import refuse
from sparsetir import StructureError, StructureIndexError
from sparsetir.runtime import kernel as kernel_module
from sparsetir.sparse_ir.tir import size_text


@functools.cache
def compiled(target):
    return sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"), target)


def fresh(check=True, target="llvm"):
    """A kernel that has seen nothing, of code that others have too."""
    of = compiled(target)
    return sparsetir.Kernel(of._module, of.name, of.signature, of.stages, of.target, check=check)


def change(**new):
    """Arguments with some replaced by functions of themselves."""
    args = arguments()
    return {**args, **{k: f(args[k]) for k, f in new.items()}}


@pytest.fixture(params=["first", "seen", "unchecked"])
def call(request):
    """A kernel called for the first time, one that saw these index arrays, one without checks."""
    built = fresh(check=request.param != "unchecked")
    accepted = arguments()
    if request.param == "seen":
        built(**accepted)

    def run(*args, **kwargs):
        for name in ("indptr", "indices"):
            array = kwargs.get(name)
            if getattr(array, "dtype", None) == "int32" and np.array_equal(array, accepted[name]):
                kwargs[name] = accepted[name]
        built(*args, **kwargs)

    yield run
    args = arguments()
    built(**args)  # a refusal leaves the kernel in order
    check(args)


def read_only(array):
    array.flags.writeable = False
    return array


WRONG_ARRAYS = [
    ("b", lambda x: x.astype("float64"), TypeError, "expected dtype float32, got float64"),
    ("b", lambda x: x.astype(">f4"), TypeError, "expected dtype float32, got >f4"),
    ("b", lambda x: torch.zeros(30, 16, dtype=torch.float16), TypeError,
     "expected dtype float32, got float16"),
    ("indices", lambda x: x.astype("int64"), TypeError, "expected dtype int32, got int64"),
    ("indptr", lambda x: x.astype("float32"), TypeError, "expected dtype int32, got float32"),
    ("c", lambda x: x[1:], ValueError, r"expected shape \(19, 16\), got \(20, 16\)|"
     r"expected shape \(20,\), got \(21,\)"),
    ("c", lambda x: x[:, :8].copy(), ValueError, r"expected shape \(20, 16\), got \(20, 8\)"),
    ("c", lambda x: x.T.copy(), ValueError, r"expected shape"),
    ("c", lambda x: x.reshape(-1), ValueError,
     r"expected shape \(\d+, 16\), got \(320,\)|expected 2 dimensions \(m, 16\), got 1: \(320,\)"),
    ("b", lambda x: x[..., None], ValueError, r"expected 2 .* \(n, 16\), got 3: \(30, 16, 1\)"),
    ("a", lambda x: x[:, None], ValueError, r"expected shape \(\d+,\), got \(\d+, 1\)"),
    ("b", np.asfortranarray, ValueError, r"expected a contiguous array, got strides \(1, 30\)"),
    ("c", lambda x: np.zeros((20, 32), "float32")[:, ::2], ValueError,
     r"expected a contiguous array, got strides \(32, 2\)"),
    ("c", lambda x: torch.zeros(16, 20).T, ValueError,
     r"expected a contiguous array, got strides \(1, 20\)"),
    ("b", lambda x: torch.zeros(16).expand(30, 16), ValueError,
     r"expected a contiguous array, got strides \(0, 1\)"),
    ("b", lambda x: torch.zeros(30, 16, device="meta"), ValueError,
     "expected an array on the CPU, got one on meta"),
    ("c", read_only, ValueError, "it is written, but the array is read-only"),
    ("b", lambda x: x.tolist(), TypeError, "expected a torch, NumPy or TVM array, got list"),
    ("b", lambda x: 3.0, TypeError, "expected a torch, NumPy or TVM array, got float"),
    ("b", lambda x: "x", TypeError, "expected a torch, NumPy or TVM array, got str"),
    ("b", lambda x: sp.csr_matrix(x), TypeError,
     "expected a torch, NumPy or TVM array, got csr_matrix"),
    ("b", lambda x: torch.from_numpy(x).to_sparse(), TypeError,
     "expected a dense array of values or indices, got torch.sparse_coo"),
    ("b", lambda x: torch.from_numpy(x).to_sparse_csr(), TypeError,
     "expected a dense array of values or indices, got torch.sparse_csr"),
    ("b", lambda x: None, TypeError, "is missing: expected an array"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name, make, error, message", WRONG_ARRAYS)
def test_wrong_array(call, name, make, error, message):
    start = r"spmm: argument '\w+'.* " if "shape" in message else rf"spmm: argument '{name}'.* "
    with pytest.raises(error, match=f"{start}?(?:{message})"):
        call(**change(**{name: make}))


def test_sizes_are_readable():
    n, m = (tirx.Var(name, dtype) for name, dtype in (("n", "int32"), ("m", "int64")))
    rows = tirx.Cast("int64", n)
    eight, huge = (tirx.IntImm("int64", number) for number in (8, 2**33))
    for size, text in (
        (rows * eight, "n * 8"),
        (tirx.floordiv(rows + m * huge, eight), "(n + m * 8589934592) // 8"),
        (tirx.max(rows, m), "T.max(n, m)"), (eight, "8"), (m, "m"),
    ):  # fmt: skip
        assert size_text(size) == text
    signature = compiled("llvm").signature
    shown = {**vars(signature), "shapes": [[rows * eight], *signature.shapes[1:]]}
    ell = object.__new__(type(signature))
    vars(ell).update(shown, _named=[[None], *signature._named[1:]])
    assert ell.expected_shape(0, [None] * len(ell.names)) == ["n * 8"]


KINDS = [lambda x: x, torch.from_numpy, tvm_ffi.from_dlpack]
SCALARS = {"m": 20, "n": 30, "feat": 16}
WRONG_SCALARS = [
    ("m", 2.5, TypeError, "expected an integer, got float 2.5"),
    ("m", 20.0, TypeError, "expected an integer, got float 20.0"),
    ("feat", "x", TypeError, "expected an integer, got str 'x'"),
    ("feat", [16], TypeError, r"expected an integer, got list \[16\]"),
    ("feat", True, TypeError, "expected an integer, got bool True"),
    ("feat", 2**31, ValueError, "expected a number that int32 holds, got 2147483648"),
    ("feat", 2**32 + 16, ValueError, "expected a number that int32 holds, got 4294967312"),
    ("m", 2**70, ValueError, "expected a number that int32 holds, got 1180591620717411303424"),
    ("n", -(2**31) - 1, ValueError, "expected a number that int32 holds, got -2147483649"),
    ("m", 21, ValueError, r"expected shape \((21, 16|22,)\), got \((20, 16|21,)\)"),
    ("m", -1, ValueError, r"expected shape \((-1, 16|0,)\), got \((20, 16|21,)\)"),
    ("n", -30, ValueError, r"expected shape \(-30, 16\), got \(30, 16\)"),
    ("feat", -1, ValueError, r"expected shape \(30, -1\), got \(30, 16\)"),
    ("feat", 0, ValueError, r"expected shape \(30, 0\), got \(30, 16\)"),
]


@pytest.mark.parametrize("name, value, error, message", WRONG_SCALARS)
def test_wrong_scalar(call, name, value, error, message):
    start = r"spmm: argument '\w+'" if "shape" in message else f"spmm: argument '{name}'"
    with pytest.raises(error, match=f"{start}: {message}"):
        call(**{**arguments(), **SCALARS, name: value})


def test_other_arguments(call):
    """Missing, unknown, too many, given twice."""
    args = arguments()
    a, b, c, indptr, indices = args.values()
    refuse(
        """
        call(b=b, c=c, indptr=indptr, indices=indices)  # TypeError: 'a' is missing: expected an
        call(a=a, b=b, indptr=indptr, indices=indices)  # TypeError: spmm: argument 'c' is missing
        call(a=a, b=b, c=c, indices=indices)  # TypeError: spmm: argument 'indptr' is missing
        call(**args, foo=3)  # TypeError: spmm: no argument 'foo'; there are a, b, c, indptr
        call(*args.values(), 20, 30, 10, 16, 7)  # TypeError: spmm: expected at most 9 arguments (a
        call(a, b, b=b, c=c, indptr=indptr)  # TypeError: spmm: argument 'b' is given twice
        """,
        locals(),
    )


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, lambda x: x if x.size % 3 else torch.from_numpy(x)])
@pytest.mark.parametrize("shift", [0, 1, 10, 19, -1, -19])
def test_output_that_overlaps_an_input(call, kind, shift):
    room = np.zeros((60, 16), "float32")
    args = arguments(m=20, n=20)
    args["b"], args["c"] = room[20:40], room[20 + shift : 40 + shift]
    with pytest.raises(ValueError, match=r"argument 'c' is written and shares memory with 'b'"):
        call(**{k: kind(v) for k, v in args.items()})
    assert not room.any()


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_in_memory_do_not_overlap(kind):
    room = np.zeros((40, 16), "float32")
    args = arguments(m=20, n=20)
    room[:20] = args["b"]
    args["b"], args["c"] = room[:20], room[20:]
    kernel()(**{k: kind(v) for k, v in args.items()})
    check(args)


def test_empty_arrays_do_not_overlap():
    """Index arrays that point into the output are refused, too."""
    args = arguments()
    args["a"] = args["c"].reshape(-1)[5:5]
    args["indices"] = args["c"].view("int32").reshape(-1)[7:7]
    args["indptr"] = np.zeros(21, "int32")
    right(kernel(), args)
    args["c"][:] = np.nan
    kernel()(**{k: torch.from_numpy(v) for k, v in args.items()})
    check(args)


# -- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_arrays_for_a_gpu_kernel(checked, kind):
    built = fresh(checked, "cuda")
    message = r"spmm: argument 'a': expected an array on a CUDA device, got one on cpu"
    with pytest.raises(ValueError, match=message):
        built(**{k: kind(v) for k, v in arguments().items()})


# -- structure --------------------------------------------------------------------------------


def edit(place, value):
    def change_one(x):
        x = x.copy()
        x[place] = value
        return x

    return change_one


def first_pair(of):
    """The first two indices of the first row that has two are others of them."""
    first = arguments()["indptr"][np.flatnonzero(np.diff(arguments()["indptr"]) > 1)[0]]
    return lambda x: edit(slice(first, first + 2), x[first + np.array(of)])(x)


WRONG_STRUCTURE = [
    (
        "indices",
        edit(0, 99),
        StructureIndexError,
        r"expected indices in \[0, 30\), got 99 .*; n is 30$",
    ),
    ("indices", edit(3, -1), StructureIndexError, r"expected indices in \[0, 30\), got -1 at pos"),
    ("indices", first_pair([1, 0]), StructureError, "expected strictly increasing indices in row"),
    ("indices", first_pair([0, 0]), StructureError, "expected strictly increasing indices in row"),
    ("indptr", edit(0, 1), StructureError, "expected it to start at 0, got 1"),
    ("indptr", edit(-1, 1000), StructureError, "expected it to end at nnz = .*, got 1000"),
    ("indptr", edit(5, 1000), StructureError, "expected non-decreasing offsets, got .* after 1000"),
    ("indptr", edit(5, -3), StructureError, "expected non-decreasing offsets, got -3 after"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, make, error, message", WRONG_STRUCTURE)
def test_wrong_structure(name, make, error, message, kind):
    built = fresh()
    args = arguments()
    built(**{k: kind(v) for k, v in args.items()})
    wrong = {**args, name: make(args[name]), "c": np.full_like(args["c"], 7)}
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(error, match=rf"spmm: argument '{name}': axis 'J': {message}"):
            built(**{k: kind(v) for k, v in wrong.items()})
    assert (wrong["c"] == 7).all()
    right(built, args)


@pytest.mark.parametrize("make", [lambda x: x[:-1], lambda x: np.append(x, x[-1])])
def test_indptr_of_another_length(make):
    with pytest.raises(ValueError, match=r"argument 'indptr': expected shape \(21,\), got"):
        kernel()(**change(indptr=make))


def test_same_arrays_are_checked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel_module, "check_structure", lambda *_: calls.append(1))
    built = fresh()
    graphs = [arguments(seed=seed) for seed in range(3)]
    for _ in range(4):
        for args in graphs:  # taking turns does not cost a check either
            built(**args)
            built(**{**args, "c": args["c"].copy(), "a": args["a"].copy(), "m": 20})
            wide = arguments(40)
            built(**{**args, "b": wide["b"], "c": wide["c"]})
    assert len(calls) == len(graphs)
    built(**{**graphs[0], "indices": graphs[0]["indices"].copy()})
    assert len(calls) == len(graphs) + 1


def test_another_array_at_the_same_address_is_checked():
    built = fresh()
    args = arguments()
    indices = args.pop("indices")
    for turn in range(20):
        other = indices.copy()
        if turn % 2:
            other[0] = 99
            with pytest.raises(StructureIndexError):
                built(**args, indices=other)
        else:
            built(**args, indices=other)
        del other


def test_other_sizes_are_checked_again():
    built = fresh()
    args = arguments()
    built(**args)
    largest = int(args["indices"].max())
    args["b"] = args["b"][: largest + 1].copy()
    right(built, args)
    with pytest.raises(StructureIndexError, match=rf"expected indices in \[0, {largest}\)"):
        built(**{**args, "b": args["b"][:largest].copy()})


def test_check_can_be_turned_off(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("checked")

    built = fresh()
    built.export(tmp_path / "spmm.so")
    monkeypatch.setattr(kernel_module, "check_structure", refuse)
    for quiet in (fresh(check=False), sparsetir.load(tmp_path / "spmm.so", check=False)):
        right(quiet)
    for loud in (built, sparsetir.load(tmp_path / "spmm.so")):
        with pytest.raises(AssertionError, match="checked"):
            loud(**arguments())
