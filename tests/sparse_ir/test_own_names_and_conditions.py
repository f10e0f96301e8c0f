"""Names and marks like the compiler's own: refused, or they mean what the program says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from tvm.error import DiagnosticError

import sparsetir
from schedule_common import program
from small import text_of
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.row_tile import apply as apply_row_tile

ScheduleError = sparsetir.ScheduleError


TEXT = text_of("f", """
with T.sp_iter([I, J], "SS", "copy") as [i, j]:
    HERE
""", "J = T.dense_fixed(n)", A="I J", C="I J")  # fmt: skip


SPMM = program().script()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('T.sp_iter_attr({"parallel": []})', "'parallel', which parallelize sets"),
        ('T.sp_iter_attr({"cut": {}})', "'cut', which pos or coord sets"),
        ('T.sp_iter_attr({"atomic": 1})', "'atomic', which race=\"atomics\""),
        ('T.sp_iter_attr({"group": {}})', "'group', which race=\"group"),
        ('T.sp_iter_attr({"ranges": []})', "'ranges', which ranges sets"),
        ('T.sp_iter_attr({"sparsetir.races": {}})', "those that begin with 'sparsetir.' are not"),
        ("if T.tail(i, n, j):\n            C[i, j] = 1.0", "T.tail marks .* expected T.likely"),
        ("C[i, T.at_most(j, 5)] = 1.0", "T.at_most marks .* expected T.min"),
        ('if T.call_intrin("bool", "sparsetir.tail", i >= j):\n            C[i, j] = 1.0',
         "T.tail marks"),
    ],
)  # fmt: skip
def test_what_primitives_write_is_refused_from_programs(
    line: str, message: str, tmp_path: Any
) -> None:
    """A decorated function has none of it, and `annotate` sets none."""
    body = TEXT.replace("HERE", line)
    if "C[" not in line:
        body += "        C[i, j] = A[i, j]\n"
    path = tmp_path / "mine.py"
    path.write_text(f"from tvm.script import sparse_tir as T\n{body}")
    code = compile(path.read_text(), str(path), "exec")
    with pytest.raises(DiagnosticError) as caught:
        exec(code, {"__name__": "mine", "__file__": str(path)})
    assert re.search(message, str(caught.value))
    key = re.match(r'T.sp_iter_attr\({"([a-z.]+)"', line)
    if key:
        sch = sparsetir.Schedule(sparsetir.from_source(TEXT.replace("HERE", "C[i, j] = A[i, j]")))
        with pytest.raises(ScheduleError, match=f"annotate: argument 'key': .*{message}"):
            sch.annotate(sch.get_sparse_iteration("copy"), key[1], 1)


def test_panels_of_rows_that_have_another_name() -> None:
    """A template finds what a primitive made by what made it, not by how its names end."""
    text = SPMM
    for was, name in (("I", "Rows"), ("B", "B_counts")):
        text = re.sub(rf"\b{was}\b", name, text)
    text = sparsetir.from_source(text)
    rng = np.random.default_rng(3)
    A = scipy.sparse.random(33, 21, 0.4, "csr", "float32", rng=rng)
    B = rng.random((21, 32), dtype="float32")
    kernel = sparsetir.build(text, schedule=apply_row_tile, config=RowTile(16, rows=4))
    C = np.full((33, 32), np.nan, "float32")
    kernel(A.data, B, C, A.indptr, A.indices)
    np.testing.assert_allclose(C, A @ B, rtol=1e-5)
