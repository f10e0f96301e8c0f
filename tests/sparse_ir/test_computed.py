"""Recipes, what they are given and give, and what the verifier and `compute` refuse."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

import sparsetir
from computed_common import BLOCK_PTR, BLOCKS, COMPUTED, blocked, plain_arguments, sizes
from refusals import refusals
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.errors import IllFormedError, ScheduleError, StructureError
from sparsetir.sparse_ir.recipes.general import cache_parts, column_parts, equal_work
from sparsetir.sparse_ir.structure import check_structure
from sparsetir.sparse_ir.verify import verify

IDTYPES = ("int32", "int64")
# Lengths of rows: none, empty ones, one row, one long row, even ones.
ROWS = ([], [0, 0, 0], [5], [0, 40, 0, 1], [3] * 17)


def indptr_of(lengths, idtype="int32"):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(idtype)


def test_the_first_block_may_have_more_work():
    """The axis grows by this number, the others stay; all values where there are no more."""
    indptr = indptr_of([8] * 100)  # with the cost of a row, 10 each
    assert equal_work(indptr, 2, cost=2, ahead=200).tolist() == [0, 60, 100]
    assert equal_work(indptr, 4, cost=2, ahead=200).tolist() == [0, 40, 60, 80, 100]
    assert equal_work(indptr, 2, cost=2, ahead=5000).tolist() == [0, 100, 100]
    assert equal_work(indptr_of([]), 2, cost=2, ahead=5).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("nnz", "feat", "parts"),
    [
        (80_000, 512, 16),  # a core's cache: 8 elements a row in each part
        (20_000, 512, 2),  # one element there; the shared cache, with 10
        (7_000, 512, 1),  # three and a half there
        (2_000, 512, 1),  # none of both
        (80_000, 8, 1),  # a part that all fits in
        (20_000, 64, 1),  # two parts, where a row has too little to do
    ],
)
def test_parts_of_the_columns_leave_rows_enough_to_do(nnz, feat, parts):
    sizes = {"m": 1000, "n": 1000, "nnz": nnz, "feat": feat, "itemsize": 4}
    assert cache_parts(**sizes, cache=1000 * 512 * 4 // 16, shared=1000 * 512 * 4 // 2) == parts
    assert cache_parts(**sizes, cache=1000 * 512 * 4 // 16) == (parts if parts != 2 else 1)


@pytest.mark.parametrize("idtype", IDTYPES)
@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("parts", [1, 3, 60])
def test_column_parts(lengths, parts, idtype):
    n, rng = 50, np.random.default_rng(1)
    indptr = indptr_of(lengths, idtype)
    columns = [np.sort(rng.choice(n, k, replace=False)) for k in lengths]
    indices = np.concatenate([np.zeros(0), *columns]).astype(idtype)
    starts = column_parts(indptr, indices, n, parts)
    assert starts.dtype == idtype and starts[0] == 0 and starts[-1] == len(indices)
    np.testing.assert_array_equal(starts[::parts], indptr)
    width = -(-n // parts)
    for row in range(len(lengths)):
        for part in range(parts):
            here = slice(*starts[row * parts + part :][:2])
            wanted = columns[row][columns[row] // width == part]
            np.testing.assert_array_equal(indices[here], wanted)


def test_column_parts_of_more_rows_than_the_index_type_counts():
    with pytest.raises(ScheduleError, match="at most 2147483647 .* int32, got 2048 . 1048576"):
        column_parts(np.zeros(2**20 + 1, "int32"), np.zeros(0, "int32"), 8, 2**11)


# -- compute ----------------------------------------------------------------------------------


def given(idtype="int32"):
    args = plain_arguments(idtype=idtype)
    return {**args, **sizes(args)}


def test_a_given_one_is_followed_by_what_is_made_of_it():
    args = given()
    computed = compute(blocked(), args, {"blocks": np.int64(7)})
    assert type(computed["blocks"]) is int and len(computed["block_ptr"]) == 8


def making(change, values=None, **computed):
    """Compute with other recipes, arguments or given values."""
    compute(blocked(computed={**COMPUTED, **computed}), {**given(), **change}, values)


def verified(**computed):
    verify(blocked(computed={**COMPUTED, **computed}))


NOT_ARRAY = {"recipe": "inverse_counts", "indptr": "$indptr"}
# What is not open is not given: guards are proven from what its recipe makes.
test_refusals = refusals(
    """
making({}, {"block_ptr": np.array([0, 20, 20, 20, 20], "int32")})
    # ValueError: spmm: computed parameter 'block_ptr': expected what recipe 'equal_work' makes, got
        another value; open are ['blocks']
making({}, {"blocks": 3}, blocks={"recipe": "last_of", "offsets": "$indptr"})
    # ValueError: 'blocks': expected what recipe 'last_of' makes, got another value; open are []
making({}, {"blocks": 3}, blocks={"recipe": "constant", "value": 4})
    # ValueError: 'blocks': expected what recipe 'constant' makes, got another value; open are []
making({}, {"parts": 7})  # TypeError: spmm: 'parts' is no computed parameter; there are ['bl
making({}, blocks={"recipe": "number", "value": 2**31})
    # ScheduleError: 'blocks': expected a number that int32 holds, got 21
making({"indptr": None})
    # TypeError: spmm: computed parameter 'block_ptr': recipe 'equal_work' reads 'indptr', which is
        not among the arguments ['a', 'b', 'blo
making({"indptr": [0, 1]})  # TypeError: reads 'indptr': expected a NumPy array, got l
making({"m": 3.0}, blocks={"recipe": "number", "value": "$m"})
    # TypeError: reads 'm': expected an integer, got float
making({}, block_ptr=NOT_ARRAY)
    # TypeError: 'block_ptr': expected an array of integers, got one of f
making({}, blocks={**BLOCKS, "value": 2.5})  # TypeError: 'blocks': expected an integer, got 2.5
making({}, block_ptr=BLOCKS)  # TypeError: 'block_ptr': expected a NumPy array, got int
making({"m": 2**40}, block_ptr={"recipe": "equal_parts", "length": "$m", "parts": "$blocks"})
    # ScheduleError: 'block_ptr': expected numbers that int32 holds, got 0
verify(blocked(computed={"rows": BLOCKS}))
    # IllFormedError: computed parameter 'rows': no such parameter; there are ['a', 'b',
verified(blocks=3)  # IllFormedError: parameter 'blocks': expected a dict with its 'recipe'
verified(m=BLOCKS)  # IllFormedError: 'm': expected it after all that callers give, but 'n' com
verified(blocks={"recipe": "y"})
    # IllFormedError: 'blocks': unknown recipe 'y': import the module that registers it before;
        there are ['cache_parts', 'column_parts'
verified(blocks={"value": 2})  # IllFormedError: 'blocks': unknown recipe 'None': import
verified(blocks={"recipe": "number"})
    # IllFormedError: recipe 'number': expected the keywords ['value'], got []
verified(blocks={**BLOCKS, "cost": 1})
    # IllFormedError: recipe 'number': expected the keywords ['value'], got ['cost', 'value']
verified(block_ptr={**BLOCK_PTR, "indptr": "$ptr"})
    # IllFormedError: computed parameter 'block_ptr': it reads 'ptr'; parameters before it are
verified(blocks={"recipe": "number", "value": "$block_ptr"})
    # IllFormedError: 'blocks': it reads 'block_ptr'; parameters before it are ['a'
verify(blocked(computed=[1]))  # IllFormedError: attribute 'computed': expected a dict by parameter
""",
    globals(),
)


# -- the attribute ----------------------------------------------------------------------------


def test_verify_refuses_parameters():
    """Buffers of other types, unbound ones, and those that the body writes."""
    func, counts = blocked(), {"recipe": "inverse_counts", "indptr": "$indptr"}
    (c,) = [p for p in func.params if p.name == "c"]
    moved = [*(p for p in func.params if p.name != "c"), c]
    x, scale = (tvm.tirx.Var("x", dtype) for dtype in ("handle", "float32"))
    reading = {"blocks": BLOCKS, "block_ptr": {**BLOCK_PTR, "indptr": "$x"}}
    for params, computed, message in [
        ([*func.params, x], {**COMPUTED, "x": BLOCKS}, "'x': expected it to be bound to an axis o"),
        ([*func.params, scale], {**COMPUTED, "x": BLOCKS}, "'x': expected an array or an integer"),
        ([x, *func.params], reading, "it reads 'x', which is bound to no axis and no buff"),
        (moved, {**COMPUTED, "c": counts}, "computed parameter 'c': the body writes it"),
    ]:
        with pytest.raises(IllFormedError, match=message):
            verify(func.replace(params=params).with_attr("computed", computed))


# -- interpreter and checks of structure -------------------------------------------------------


def test_the_interpreter_names_what_callers_give():
    args = plain_arguments(m=6, n=7, feat=8)
    with pytest.raises(TypeError, match=r"spmm: expected 9 arguments \['a', .*'feat'\], got 20"):
        sparsetir.interpret(blocked(), [*args.values()] * 4)
    with pytest.raises(TypeError, match="spmm: argument 'b' is missing"):
        sparsetir.interpret(blocked(), {"a": args["a"]})
    more = {**sizes(args), "block_ptr": np.array([0, 6], "int64"), "blocks": 1}
    with pytest.raises(TypeError, match="'block_ptr': axis 'I': expected dtype int32, got int64"):
        sparsetir.interpret(blocked(), {**args, **more})


def test_indices_under_computed_offsets_are_checked_for_their_range():
    func = blocked()
    axes = {a.name: a for a in func.axes}
    assert axes["J"].indptr.name == "indptr"
    rows = {
        "blocks": BLOCKS,
        "block_ptr": {"recipe": "equal_parts", "length": "$m", "parts": "$blocks"},
        "indptr": {"recipe": "equal_parts", "length": "$nnz", "parts": "$m"},
    }
    params = sorted(func.params, key=lambda p: p.name in rows)
    func = func.replace(params=params).with_attr("computed", rows)
    verify(func)
    args = given()
    del args["indptr"]
    check_structure(func, args)  # in another order: rows are not the caller's to describe
    args["indices"][3] = 30
    with pytest.raises(
        StructureError, match=r"expected indices in \[0, 30\), got 30 at position 3"
    ):
        check_structure(func, args)
