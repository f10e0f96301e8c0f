"""The methods of `Schedule` are made of the primitives, and so is what is said of them.

`primitives.pyi` is written anew by::

    python -c "import sparsetir.sparse_ir.schedule as s; print(s.primitives.stub(), end='')" \
        > sparse_ir/schedule/primitives.pyi
"""

import inspect
import re
from pathlib import Path

import pytest

import sparsetir
from schedule_common import opened
from sparsetir.sparse_ir.schedule import primitives
from sparsetir.sparse_ir.schedule.loops import SpIter
from sparsetir.sparse_ir.schedule.primitives import PRIMITIVES, Primitives, primitive

ROOT = Path(__file__).parents[2]
OURS = [n for n, f in PRIMITIVES.items() if f.__module__.startswith("sparsetir.")]


def test_the_stub_file_is_that_of_the_primitives():
    text = Path(inspect.getfile(primitives)).with_suffix(".pyi").read_text()
    assert text == primitives.stub()


def test_the_table_of_the_docs_has_all_primitives():
    text = (ROOT / "docs/schedules.md").read_text().split("## The primitives")[1]
    table = text.split("\nStage II")[0]
    assert {*re.findall(r"`(\w+)`", table)} == {*OURS}


@pytest.mark.parametrize("was, name", [
    ("by_length", "sort_rows_by_length"), ("meet", "combine_row_pieces"),
    ("patterns", "group_columns_by_pattern"), ("runs", "segment_accumulate"),
    ("slices", "sell_slices"), ("steps", "strip_mine_rows"),
])  # fmt: skip
def test_older_names_warn_and_do_the_same(was, name):
    said = rf"Schedule\.{was} is now Schedule\.{name}"
    assert (
        name in OURS and was not in PRIMITIVES and name in getattr(sparsetir.Schedule, was).__doc__
    )
    with pytest.warns(DeprecationWarning, match=said), pytest.raises(TypeError, match="missing"):
        getattr(opened()[0], was)()


def test_a_primitive_of_a_user_is_a_method(monkeypatch):
    def twice(func, loop: SpIter, times: int = 2, *, how: str = "so"):
        """Do nothing."""
        return func, [loop] * times

    primitive(twice)
    try:
        sch, _, (i, *_) = opened()
        assert sch.twice(i, how="so") == [i, i]
        assert sch.trace.as_python().splitlines()[-1].strip().endswith("= sch.twice(v1, 2)")
        with pytest.raises(sparsetir.ScheduleError, match="twice: argument 'times': expected an"):
            sch.twice(i, "two")
        with pytest.raises(TypeError, match="hwo"):
            sch.twice(i, hwo="so")
        primitive(twice)  # as a module that is read again
    finally:
        delattr(Primitives, "twice")
        del PRIMITIVES["twice"]


def test_no_other_method_is_overwritten():
    def lower(func):
        """Another."""

    with pytest.raises(ValueError, match="primitive: argument 'function': .* another 'lower'"):
        primitive(lower)
    assert "lower" not in PRIMITIVES
