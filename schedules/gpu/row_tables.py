"""Products of sparse matrices whose pattern a GPU finds: rows in hash tables in shared memory.

The threads of a row go through its terms and put their columns into a table, where a slot that
another column has taken leads on to the next one. A first kernel counts the columns of each row;
after a prefix sum a second one adds up the terms, too, and writes what the table has: an element's
place is the number of lesser columns. How many threads a row has, and how large its table is, goes
by how many terms it has (:data:`BINS`). A row of more terms than fit goes through ranges of as many
columns as the table has slots, one after the other.

A table that several threads insert into is no axis of stage I, so this is a function of TIR.

(Nagasaka, Nukada and Matsuoka, "High-performance and memory-saving sparse general matrix-matrix
multiplication for NVIDIA Pascal GPU", sections III and IV.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tvm.script import from_source

from sparsetir.schedules.arguments import Config
from sparsetir.schedules.gpu.sparse_results import program
from sparsetir.schedules.operators.sparse_results import SparseResult
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.sparse_results import refuse

BLOCK = 128  # threads
DTYPES = ("float32", "float64", "int32")  # that are added up atomically


@dataclass(frozen=True)
class RowTables(Config):
    """A product whose pattern the GPU finds, by a hash table for each row."""

    def tiles(self, feat: int) -> int:
        """None: there are no features."""
        del feat
        return 1


register(Template(RowTables, SparseResult, program, refuse, gpu=True))


class Bin(NamedTuple):
    """Rows of about as many terms: threads of a row, and slots of its table."""

    lanes: int
    slots: int

    @property
    def terms(self) -> int:
        """As many as a table has room for, so that a search in it is short."""
        return self.slots // 2


BINS = (Bin(8, 64), Bin(32, 512), Bin(BLOCK, 2048))


@cache
def rows_program(size: Bin, dtype: str | None) -> Any:
    """The kernel of a bin, as a function of TIR.

    dtype : of the values, which it adds up; None where it counts

    rows : (count,) the rows of the bin; all arrays of indices are of int32
    a_indptr, a_indices, b_indptr, b_indices : patterns, (m, l) and (l, n), in CSR
    ranges, width : how many ranges of columns a row goes through, and the columns of each
    counts : (m,) how many columns each row has
    a, b, c_indptr, c_indices, c : in place of `counts`, values, where rows of the result begin, its
        columns and values
    """
    lanes, slots = size
    sizes = {"groups": BLOCK // lanes, "lanes": lanes, "slots": slots, "dtype": dtype}
    counting = dtype is None
    shapes = {"counts": ("m", "int32")} if counting else {
        "a": ("a_nnz", dtype), "b": ("b_nnz", dtype), "c_indptr": ("m + 1", "int32"),
        "c_indices": ("c_nnz", "int32"), "c": ("c_nnz", dtype),
    }  # fmt: skip
    shapes = {**PATTERNS, **shapes}
    numbers = [*NUMBERS, *([] if counting else ["c_nnz"])]
    params = [*(f"{x}: T.handle" for x in shapes), *(f"{x}: T.int32" for x in numbers)]
    lines = [f'{x.upper()} = T.match_buffer({x}, ({n},), "{of}")' for x, (n, of) in shapes.items()]
    text = TEXT.format(
        params=", ".join(params), buffers="\n    ".join(lines),
        tables="" if counting else TABLES, cleared="" if counting else CLEARED,
        added="" if counting else ADDED, written=COUNTED if counting else WRITTEN, swap=SWAP,
        locals="\n                    ".join(
            f'{x} = T.sblock_alloc_buffer((1,), "int32", scope="local")' for x in LOCALS
        ),
    )  # fmt: skip
    for name, value in sizes.items():
        text = text.replace(name.upper(), str(value))
    return from_source(text)


NUMBERS = ("count", "ranges", "width", "m", "l", "a_nnz", "b_nnz")
PATTERNS = {
    "rows": ("count", "int32"), "a_indptr": ("m + 1", "int32"), "a_indices": ("a_nnz", "int32"),
    "b_indptr": ("l + 1", "int32"), "b_indices": ("b_nnz", "int32"),
}  # fmt: skip
LOCALS = ("row", "begin", "end", "done", "q", "last", "column", "slot", "seen", "at")
SWAP = 'T.call_extern("int32", "atomicCAS", T.address_of(keys[group, slot[0]]), -1, column[0])'
TABLES = """
                    sums = T.sblock_alloc_buffer((GROUPS, SLOTS), "DTYPE", scope="shared")
                    taken = T.sblock_alloc_buffer((GROUPS, SLOTS), "int32", scope="shared")"""
CLEARED = """
                            sums[group, s * LANES + lane] = T.cast(0, "DTYPE")"""
ADDED = """
                                    T.evaluate(T.call_extern(
                                        "DTYPE", "atomicAdd", T.address_of(sums[group, slot[0]]),
                                        A[begin[0] + p] * B[q[0]]))"""
COUNTED = """
                        if lane == 0 and begin[0] < end[0]:
                            COUNTS[row[0]] = done[0] + last[0]"""
WRITTEN = """
                        for s in T.serial(0, SLOTS // LANES):
                            seen[0] = keys[group, s * LANES + lane]
                            if seen[0] != -1:
                                slot[0] = T.call_extern(
                                    "int32", "atomicAdd", T.address_of(found[group, 1]), 1
                                )
                                taken[group, slot[0]] = s * LANES + lane
                        T.tvm_storage_sync("shared")
                        q[0] = lane
                        while q[0] < last[0]:
                            slot[0] = taken[group, q[0]]
                            column[0] = keys[group, slot[0]]
                            at[0] = C_INDPTR[row[0]] + done[0]
                            for s in T.serial(0, last[0]):
                                seen[0] = taken[group, s]
                                at[0] = at[0] + T.cast(keys[group, seen[0]] < column[0], "int32")
                            C_INDICES[at[0]] = column[0]
                            C[at[0]] = sums[group, slot[0]]
                            q[0] = q[0] + LANES"""
# Conditions and indices read locals alone: TVM's search for missing barriers asks for that.
TEXT = """# from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def row_tables({params}):
    T.func_attr({{"tirx.noalias": True}})
    {buffers}
    for block in T.thread_binding(T.max((count + GROUPS - 1) // GROUPS, 1), thread="blockIdx.x"):
        for group in T.thread_binding(GROUPS, thread="threadIdx.y"):
            for lane in T.thread_binding(LANES, thread="threadIdx.x"):
                with T.sblock("row"):
                    T.reads()
                    T.writes()
                    keys = T.sblock_alloc_buffer((GROUPS, SLOTS), "int32", scope="shared")
                    found = T.sblock_alloc_buffer((GROUPS, 2), "int32", scope="shared"){tables}
                    {locals}
                    row[0] = ROWS[T.min(block * GROUPS + group, count - 1)]
                    begin[0] = A_INDPTR[row[0]]
                    end[0] = begin[0]
                    if block * GROUPS + group < count:
                        end[0] = A_INDPTR[row[0] + 1]
                    done[0] = 0
                    for r in T.serial(0, ranges):
                        for s in T.serial(0, SLOTS // LANES):
                            keys[group, s * LANES + lane] = -1{cleared}
                        if lane < 2:
                            found[group, lane] = 0
                        T.tvm_storage_sync("shared")
                        for p in T.serial(0, end[0] - begin[0]):
                            q[0] = B_INDPTR[A_INDICES[begin[0] + p]] + lane
                            last[0] = B_INDPTR[A_INDICES[begin[0] + p] + 1]
                            while q[0] < last[0]:
                                column[0] = B_INDICES[q[0]]
                                if T.truncdiv(column[0], width) == r:
                                    slot[0] = T.bitwise_and(column[0], SLOTS - 1) * 107
                                    slot[0] = T.bitwise_and(slot[0], SLOTS - 1)
                                    seen[0] = {swap}
                                    while seen[0] != -1 and seen[0] != column[0]:
                                        slot[0] = T.bitwise_and(slot[0] + 1, SLOTS - 1)
                                        seen[0] = {swap}
                                    if seen[0] == -1:
                                        at[0] = T.call_extern(
                                            "int32", "atomicAdd", T.address_of(found[group, 0]), 1
                                        ){added}
                                q[0] = q[0] + LANES
                        T.tvm_storage_sync("shared")
                        last[0] = found[group, 0]{written}
                        done[0] = done[0] + last[0]
                        T.tvm_storage_sync("shared")
"""
