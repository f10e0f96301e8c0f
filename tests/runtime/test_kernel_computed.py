"""Kernels whose schedule needs more than callers give: called as the plain one is."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import tvm_ffi

import sparsetir
from computed_common import BLOCK_PTR, BLOCKS, COMPUTED, PROMISES, blocked, plain_arguments, sizes
from kernel_common import check, right
from refusals import refuse
from sparsetir.runtime import kernel as kernel_module
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.recipes.general import equal_work


@pytest.fixture(scope="module")
def built():
    return sparsetir.build(blocked())


@pytest.fixture
def counted(monkeypatch):
    """The number of times that a kernel computes its parameters."""
    calls = []

    def counting(*args, **named):
        calls.append(1)
        return compute(*args, **named)

    monkeypatch.setattr(kernel_module, "compute", counting)
    return calls


# What the default schedule adds.
OF_DEFAULT = {"J_indices_reuse": {"recipe": "reuse_distance", "indices": "$indices"}}


def kept(kernel):
    """The blocks of the last index arrays that a kernel met, before what the default adds."""
    blocks, block_ptr, _ = kernel._seen[0].computed
    return blocks, np.from_dlpack(block_ptr)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(20, 30), (1, 30), (3, 1), (0, 5), (4, 0)])
def test_it_is_called_as_the_plain_one(built, idtype, shape):
    kernel = built if idtype == "int32" else sparsetir.build(blocked(idtype))
    for seed in range(2):
        args = plain_arguments(*shape, idtype=idtype, seed=seed)
        kernel(*args.values())
        check(args)
        right(kernel, args)
        args["c"][:] = np.nan
        kernel(*args.values(), *sizes(args).values())
        check(args)
        blocks, block_ptr = kept(kernel)
        assert blocks == 4
        np.testing.assert_array_equal(block_ptr, equal_work(args["indptr"], 4, 2))


def test_of_torch_and_tvm(built):
    for convert in (torch.from_numpy, tvm_ffi.from_dlpack):
        args = plain_arguments()
        built(**{name: convert(array) for name, array in args.items()})
        check(args)


def test_another_matrix_is_computed_anew_and_the_same_is_not(counted):
    kernel = sparsetir.build(blocked())
    graphs = [plain_arguments(seed=seed) for seed in range(3)]
    for _ in range(3):
        for args in graphs:
            right(kernel, args)
    assert len(counted) == len(graphs)
    args = plain_arguments(7, 9)  # other sizes too
    right(kernel, args)
    assert len(counted) == len(graphs) + 1


def test_unchecked_kernels_compute_too(counted):
    kernel = sparsetir.build(blocked(), check=False)
    args = plain_arguments()
    for _ in range(2):
        right(kernel, args)
    assert len(counted) == 1
    args["indices"][0] = args["indices"][1]  # twice in a row: refused where it is checked
    kernel(**args)


def test_what_is_kept_goes_with_the_matrix():
    kernel = sparsetir.build(blocked())
    args = plain_arguments()
    kernel(**args)
    assert kernel._seen
    del args["indices"]
    gc.collect()
    assert not kernel._seen


def test_remembered_arrays_are_passed_as_the_caller_has_them_now(built):
    args = plain_arguments()
    right(built, args)
    for name in ("indptr", "indices"):
        args[name].flags.writeable = False
    right(built, args)
    args["c"].flags.writeable = False
    refuse("built(**args)  # ValueError: 'c': it is written, but the array is read-only",
           globals(), locals())  # fmt: skip
    args = {name: array.copy() for name, array in plain_arguments().items()}
    right(built, args)
    with pytest.raises(ValueError, match="referenced"):  # NumPy does not move its memory
        args["indices"].resize(len(args["indices"]) + 1, refcheck=False)


def test_sizes_of_other_types_are_refused_where_equal_ones_are_remembered(built):
    args = plain_arguments(1, 30)
    numbers = {**args, **sizes(args)}
    built(**numbers)
    for value in (True, 1.0):
        numbers["m"] = value
        refuse("built(**numbers)  # TypeError: 'm': expected an integer", globals(), locals())


def test_threads(built):
    graphs = [plain_arguments(seed=seed) for seed in range(12)]

    def work(first):
        for turn in range(40):
            args = graphs[(first + turn) % len(graphs)]
            right(built, {**args, "c": args["c"].copy()})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_callers_do_not_see_computed_parameters(built, counted):
    args = plain_arguments()
    names = [*args, "m", "n", "nnz", "feat"]
    assert built.signature.names == names
    assert repr(built) == f"<sparsetir.Kernel spmm({', '.join(names)})>"
    bad = {**args, "indptr": args["indptr"] + 1}
    none = {"blocks": {**BLOCKS, "value": 0}, "block_ptr": BLOCK_PTR}
    refuse(
        """
        built(**args, block_ptr=np.zeros(5, "int32"))  # TypeError: spmm: no argument 'block_ptr';
        built(*args.values(), *sizes(args).values(), 4)  # TypeError: expected at most 9 arguments
        built(**{**args, "indptr": None})  # TypeError: 'indptr' is missing: expected an array
        built(**bad)  # StructureError: spmm: argument 'indptr': axis 'J': expected
        sparsetir.build(blocked(computed=none))(**args)  # ScheduleError: 'parts': expected 1 or
        """,
        globals(),
        locals(),
    )
    assert len(counted) == 1  # of the last: what is refused is not computed of


def test_listing_and_computing(built):
    assert built.computed == {**COMPUTED, **OF_DEFAULT}
    args = plain_arguments()
    arguments = {**args, "indptr": torch.from_numpy(args["indptr"])}
    computed = built.compute(arguments, {"blocks": 3})
    assert computed["blocks"] == 3
    np.testing.assert_array_equal(computed["block_ptr"], equal_work(args["indptr"], 3, 2))
    every = {**args, **sizes(args), **computed}
    built.run_unchecked([every[name] for name in built.signature.passed])
    check(args)


def test_numbers_alone(counted):
    parts = {"recipe": "equal_parts", "length": "$m", "parts": "$blocks"}
    kernel = sparsetir.build(blocked(computed={"blocks": BLOCKS, "block_ptr": parts}))
    args = plain_arguments()
    right(kernel, args)
    np.testing.assert_array_equal(kept(kernel)[1], [0, 5, 10, 15, 20])
    kernel(**args)
    assert len(counted) == 1


# -- promises ---------------------------------------------------------------------------------


def test_a_broken_promise_is_refused_in_every_call(built):
    args, wrong = plain_arguments(), plain_arguments(feat=12)
    message = "spmm: argument 'feat': expected a multiple of 8, as its schedule promises, got 12"
    built(**args)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            built(**wrong)
        with pytest.raises(ValueError, match=message):
            built(*wrong.values(), *sizes(wrong).values())
    assert np.isnan(wrong["c"]).all()
    right(built, args)


def exactly(feat):
    """The program for one number of features, which is a constant in it."""
    func = blocked(promises=[{"param": "feat", "kind": "exact", "value": feat}])
    text = func.script()
    assert text.count("K = T.dense_fixed(feat") == 1
    return sparsetir.from_source(text.replace("dense_fixed(feat", f"dense_fixed({feat}"))


def test_an_exact_number_that_no_shape_implies_may_be_left_out():
    kernel, args = sparsetir.build(exactly(16)), plain_arguments()
    kernel(*args.values())
    check(args)
    kernel(**args, feat=16)
    refuse(
        """
        kernel(**args, feat=8)  # ValueError: 'feat': expected 16, as its schedule promises,
        kernel(**plain_arguments(feat=24))  # ValueError: 'b': expected shape (30 .. got (30, 24)
        """,
        globals(),
        locals(),
    )


# -- files ------------------------------------------------------------------------------------


def test_export_and_load(built, tmp_path):
    built.export(tmp_path / "spmm.so")
    loaded = sparsetir.load(tmp_path / "spmm.so")
    assert loaded.computed == built.computed and list(loaded.computed)[:2] == list(COMPUTED)
    assert loaded.signature.promises == PROMISES
    assert loaded.signature.names == built.signature.names
    for seed in range(2):
        args = plain_arguments(seed=seed)
        right(loaded, args)
        np.testing.assert_array_equal(kept(loaded)[1], equal_work(args["indptr"], 4, 2))
    with pytest.raises(ValueError, match="expected a multiple of 8, as its schedule promises, got"):
        loaded(**plain_arguments(feat=9))
