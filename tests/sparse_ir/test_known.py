"""The table of what is known of a function, as it is printed."""

from __future__ import annotations

from small import small
from sparsetir import Schedule
from sparsetir.sparse_ir.known import known

PROGRAM = """
with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    C[i, k] = C[i, k] + A[i, j] * B[PLACE[i, j], k]
"""
FACTS = """
B       accessed at coordinates of N alone
I_at    searched for by kernels
PLACE   coordinates of N, as assumed
feat    a multiple of 64
i_at    computed by row_of_position
i_at    values in [0, m)
indices values in [0, n)
indptr  values in [0, nnz + 1)
"""


def test_facts_by_parameter_and_buffer():
    func = small("spmm", PROGRAM, A="I J", B="N K", C="I K", PLACE="I J int32")
    sch = Schedule(func)
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    sch.bound(k, 64, "multiple")
    sch.assume("coordinates", buffer="PLACE", axis="N")
    sch.assume("inside", buffer="B", axis="N")
    sch.positions(sch.sparse_fuse(it, [i, j]), rows="search")
    assert str(known(sch.func)) == FACTS.strip()
