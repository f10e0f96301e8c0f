"""Refusals of check_structure: one test per message, and no crash on anything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from drawing import examples
from programs import CASES, PROGRAMS
from refusals import refusals
from sparsetir.sparse_ir.errors import StructureError, StructureIndexError, StructureTypeError
from sparsetir.sparse_ir.structure import check_structure


def make(name="spmm", idtype="int32"):
    return PROGRAMS[name].make("float32", idtype)


def csr_args(**changes):
    """Row 1 is empty; row 2 starts with a smaller index than row 0 ends with."""
    args = {"indptr": ints(0, 2, 2, 5), "indices": ints(1, 3, 0, 2, 3)}
    return {**args, "m": 3, "n": 4, "nnz": 5, "feat": 8, **changes}


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_pass(name, idtype):
    program = PROGRAMS[name]
    func = program.make("float32", idtype)
    for case in set(CASES) & set(program.cases):
        args = program.inputs(np.random.default_rng(1), case, "float32", idtype)
        check_structure(func, args)


def ints(*values, dtype="int32"):
    return np.array(values, dtype)


REFUSALS = [  # (argument, value, words of the message, error)
    ("indices", ints(1, 3, 0, 4, 3), "got 4 at position 3; n is 4", StructureIndexError),
    ("indices", ints(1, -1, 0, 2, 3), "got -1 at position 1; n is 4", StructureIndexError),
    ("indices", ints(1, 3, 0, 3, 2), "strictly increasing indices in row 2, got 2 after 3 at "
     "position 4", StructureError),
    ("indices", ints(3, 3, 0, 1, 2), "increasing indices in row 0, got 3 after 3 at position 1",
     StructureError),
    ("indices", ints(1, 3, 0, 2, 3, dtype="int64"), "dtype int32, got int64", StructureTypeError),
    ("indices", ints(1, 3, 0, 2), "shape (5,) (nnz), got shape (4,)", StructureError),
    ("indices", [1, 3, 0, 2, 3], "a NumPy array, got list", StructureTypeError),
    ("indptr", ints(0, 2, 5), "shape (4,) (parents + 1), got shape (3,)", StructureError),
    ("indptr", ints(0, 2, 2, 5).reshape(2, 2), "(parents + 1), got shape (2, 2)", StructureError),
    ("indptr", ints(1, 2, 2, 5), "it to start at 0, got 1", StructureError),
    ("indptr", ints(0, 2, 1, 5), "non-decreasing offsets, got 1 after 2 at row 1", StructureError),
    ("indptr", ints(0, 2, 2**31 - 1, -(2**31)), "got -2147483648 after 2147483647 at row 2",
     StructureError),
    ("indptr", ints(0, 2, 2, 4), "it to end at nnz = 5, got 4", StructureError),
    ("indptr", np.array([0.0, 2.0, 2.0, 5.0]), "dtype int32, got float64", StructureTypeError),
    ("nnz", 2**31, "a number of type int32, got 2147483648", StructureError),
    ("m", 3.0, "an integer, got 3.0", StructureTypeError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words", "error"), REFUSALS)
def test_refusals_of_csr(name, value, words, error):
    with pytest.raises(StructureError) as caught:
        check_structure(make(), csr_args(**{name: value}))
    axis = "axis 'J': " if name.startswith("ind") else ""
    assert str(caught.value).startswith(f"spmm: argument '{name}': {axis}expected ")
    assert str(caught.value).endswith(words)
    assert type(caught.value) is error
    python = {StructureIndexError: IndexError, StructureTypeError: TypeError}
    assert isinstance(caught.value, python.get(error, ValueError))


@pytest.mark.parametrize(("name", "message"), [
    ("indptr", "^spmm: argument 'indptr': axis 'J': the argument is missing$"),
    ("indices", "^spmm: argument 'indices': axis 'J': the argument is missing$"),
    ("nnz", r"^spmm: axis 'J': nnz = nnz cannot be computed from the arguments \['feat', "),
])  # fmt: skip
def test_missing_arguments(name, message):
    args = csr_args()
    del args[name]
    with pytest.raises(StructureTypeError, match=message):
        check_structure(make(), args)
    with pytest.raises(StructureError, match="nnz = nnz within 0 and the largest int32, got -1"):
        check_structure(make(), csr_args(nnz=-1))


def ell_args(*indices):
    return {"indices": ints(*indices), "m": 2, "n": 9, "cols": 3}


def check_ell(*indices):
    check_structure(make("row_max_ell"), ell_args(*indices))


test_refusals_of_ell = refusals(
    """
check_ell(1, 2, 3, 0, 4, 9)
    # StructureIndexError: row_max_ell: argument 'indices': axis 'J': expected indices in [-1, 9),
        got 9 at position 5
check_ell(1, 2, 3, -2, 4, 8)  # StructureIndexError: indices in [-1, 9), got -2 at position 3
check_ell(1, 2, 3, 0, 4, 4)
    # StructureError: strictly increasing indices in row 1, got 4 after 4 at position 5
check_ell(5, -1, 3, 0, 4, 8)
    # StructureError: strictly increasing indices in row 0, got 3 after 5 at position 2
check_ell(1, 2, 3)  # StructureError: shape (6,) (parents * nnz_cols), got shape (3,)
""",
    globals(),
)


def test_too_much_for_int32_or_a_row():
    args = {**ell_args(), "m": 2**20, "cols": 2**20}
    with pytest.raises(
        StructureError, match="'J': 1048576 parents times 1048576 slots do not fit int32$"
    ):
        check_structure(make("row_max_ell"), args)
    args = {"indptr": ints(0, 1, 5, 6), "m": 3, "n": 3, "nnz": 6}
    with pytest.raises(StructureError, match="'J': expected rows of at most 3, got 4 in row 1$"):
        check_structure(make("ragged_sum"), args)
    check_structure(make("ragged_sum"), {**args, "n": 4})


NUMBERS = st.one_of(
    st.integers(-3, 20), st.sampled_from([2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**70])
)


@examples(60, 1000, data=st.data())
def test_corruption_is_refused_or_harmless(data):
    """Whatever is broken, the check passes or raises an error of ours."""
    program = PROGRAMS[data.draw(st.sampled_from(sorted(PROGRAMS)))]
    idtype = data.draw(st.sampled_from(["int32", "int64"]))
    case = data.draw(st.sampled_from(program.cases))
    args = program.inputs(np.random.default_rng(0), case, "float32", idtype)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(args)))
        args[name] = data.draw(corrupted(args[name]))
    try:
        check_structure(program.make("float32", idtype), args)
    except StructureError as error:
        assert str(error).startswith(f"{program.name}: ")


@st.composite
def corrupted(draw, value):
    """A number, an array with other elements, shape or type, or no array at all."""
    if not isinstance(value, np.ndarray) or value.dtype.kind == "f":
        return draw(st.one_of(NUMBERS, st.just(1.5), st.none()))
    how = draw(st.sampled_from(["element", "shape", "type", "order", "other"]))
    value = value.copy()
    if how == "element" and value.size:
        limits = np.iinfo(value.dtype)  # another one where it was corrupted before
        place = draw(st.integers(0, value.size - 1))
        few = st.integers(max(-3, limits.min), 20)
        value.flat[place] = draw(st.one_of(few, st.integers(limits.min, limits.max)))
    elif how == "shape":
        return draw(
            st.sampled_from([value[:-1], np.append(value, value[:1]), value[None], value[:0]])
        )
    elif how == "type":
        return value.astype(draw(st.sampled_from(["int8", "int32", "int64", "uint32", "float64"])))
    elif how == "order":
        return np.ascontiguousarray(value[::-1])
    elif how == "other":
        return draw(st.sampled_from([None, "text", 3, [0, 1], 2.5]))
    return value
