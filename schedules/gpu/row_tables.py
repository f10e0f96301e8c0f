"""Products of sparse matrices whose pattern a GPU computes: rows as hash tables in shared memory.

The threads of a row iterate over its terms and insert their columns into a table with linear
probing. A first kernel counts the columns of each row; after a prefix sum a second one also adds up
the terms, and writes the table: the position of an element is the number of lesser columns. The
number of threads per row and the size of its table depend on the number of its terms
(:data:`BINS`). A row of more terms than fit is computed in ranges of as many columns as the table
has slots, one by one.

With a mask a row's table has the mask's columns, and nothing is counted: terms of other columns are
skipped, and each element of the mask takes the value of its slot.

A table that several threads insert into is not an axis of stage I, so this is a TIR function.

(Nagasaka, Nukada and Matsuoka, "High-performance and memory-saving sparse general matrix-matrix
multiplication for NVIDIA Pascal GPU", sections III and IV.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tvm.script import from_source
from tvm.script import tirx as tirx_script

from sparsetir.reductions import SEMIRINGS
from sparsetir.schedules.arguments import Config
from sparsetir.schedules.gpu.sparse_results import program
from sparsetir.schedules.operators.sparse_results import SparseResult, first_value, term_of
from sparsetir.schedules.template import Template, register
from sparsetir.schedules.templates.sparse_results import refuse
from sparsetir.sparse_ir.atomics import ATOMIC_DTYPES, atomic_call

BLOCK = 128  # threads per block


def dtypes_of(semiring: str) -> tuple[str, ...]:
    """The dtypes in which terms of a semiring can be combined atomically."""
    return ATOMIC_DTYPES[SEMIRINGS[semiring][0]]


class Bin(NamedTuple):
    """Rows with similar numbers of terms: threads per row, and slots of its table."""

    lanes: int
    slots: int

    @property
    def terms(self) -> int:
        """The most terms of a row: half the slots, which keeps searches in the table short."""
        return self.slots // 2


BINS = (Bin(8, 64), Bin(32, 512), Bin(BLOCK, 2048))


@cache
def rows_program(
    size: Bin, dtype: str | None, semiring: str = "plus_times", masked: bool = False,
    wide: bool = False,
) -> Any:  # fmt: skip
    """The kernel of a bin, as a TIR function.

    dtype : type of the accumulated values; None for a kernel that counts
    masked : whether `c_indices` is an input rather than an output
    wide : whether elements of the result are indexed by int64

    rows : (count,) the rows of the bin; all index arrays except `c_indptr` are int32
    a_indptr, a_indices, b_indptr, b_indices : patterns, (m, l) and (l, n), in CSR
    ranges, width : number of ranges of columns in which a row is computed, and columns per range
    counts : (m,) number of columns of each row
    a, b, c_indptr, c_indices, c : instead of `counts`, values, and the result's row pointers,
        columns and values
    """
    lanes, slots = size
    number = "int64" if wide else "int32"
    counting = dtype is None
    shapes = {"counts": ("m", "int32")} if counting else {
        "a": ("a_nnz", dtype), "b": ("b_nnz", dtype), "c_indptr": ("m + 1", number),
        "c_indices": ("c_nnz", "int32"), "c": ("c_nnz", dtype),
    }  # fmt: skip
    shapes = {**PATTERNS, **shapes}
    numbers = [f"{x}: T.int32" for x in NUMBERS] + ([] if counting else [f"c_nnz: T.{number}"])
    params = [*(f"{x}: T.handle" for x in shapes), *numbers]
    buffers = [
        f'{x.upper()} = T.match_buffer({x}, ({n},), "{of}")' for x, (n, of) in shapes.items()
    ]
    shared = {"keys": ("SLOTS", "int32")} | ({} if counting else {"sums": ("SLOTS", dtype)})
    shared |= {} if masked else {"found": (2, "int32")}
    shared |= {} if masked or counting else {"taken": ("SLOTS", "int32")}
    allocations = [
        f'{x} = T.sblock_alloc_buffer((GROUPS, {n}), "{of}", scope="shared")'
        for x, (n, of) in shared.items()
    ]
    for x in LOCALS:
        of = number if x in ("place", "stop") else "int32"
        allocations.append(f'{x} = T.sblock_alloc_buffer((1,), "{of}", scope="local")')
    steps = MASKED if masked else COUNTED if counting else WRITTEN
    added = "" if counting else ADDED
    text = _filled(
        TEXT, params=", ".join(params), buffers="\n".join(buffers), made="\n".join(allocations),
        steps=_filled(
            steps, insert=_filled(SEARCH, read=SWAP), find=_filled(SEARCH, read=READ), added=added,
            clear=CLEAR if counting else CLEAR + CLEARED,
        ),
    )  # fmt: skip
    for name, value in {"GROUPS": BLOCK // lanes, "LANES": lanes, "SLOTS": slots}.items():
        text = text.replace(name, str(value))
    how = {} if counting else {
        "first": first_value(semiring, str(dtype)), "term": partial(term_of, semiring, dtype),
        "taken_in": partial(atomic_call, SEMIRINGS[semiring][0]), "number": number,
    }  # fmt: skip
    return from_source(text, {"T": tirx_script, **how})


@dataclass(frozen=True)
class RowTables(Config):
    """A product with a hash table per row, whose pattern the GPU computes or a mask gives."""

    finds_pattern: ClassVar[bool] = True
    rows_program: ClassVar = staticmethod(rows_program)

    def alternative_for(self, problem: SparseResult, op: str) -> str:
        """The config to expect where this one does not support the problem; else ""."""
        if op != "spgemm":
            return "ElementThreads" + " or TermLanes" * problem.is_product
        dtypes = dtypes_of(problem.how)
        if problem.dtype in dtypes:
            return ""
        return f"ElementThreads or TermLanes but for {', '.join(dtypes)} with '{problem.how}'"

    @staticmethod
    def binned(terms: np.ndarray, columns: int) -> list[tuple[Bin, np.ndarray, int, int]]:
        """For each nonempty bin its rows, the number of column ranges they take, and their columns.

        terms : (rows,) terms of each row, or elements of a mask
        columns : the number of columns of the result
        """
        bins, least = [], 0  # rows without terms stay empty
        for size in BINS:
            bins.append((size, (terms > least) & (terms <= size.terms), 1, max(columns, 1)))
            least = size.terms
        long = -(-columns // size.slots)
        bins.append((size, terms > least, long, size.slots))
        return [(s, np.flatnonzero(rows), r, w) for s, rows, r, w in bins if rows.any()]


register(Template(RowTables, SparseResult, program, refuse, gpu=True))


def _filled(text: str, **pieces: str) -> str:
    """Replace each line that is a piece's name by the piece, at the same indentation."""
    lines = []
    for line in text.strip("\n").split("\n"):
        name = line.strip().removeprefix("$")
        if line.strip() == f"${name}" and name in pieces:
            indent = line[: -len(name) - 1]
            lines += [indent + x for x in pieces[name].strip("\n").split("\n") if x]
        else:
            for name, piece in pieces.items():
                line = line.replace(f"${name}", piece)
            lines.append(line)
    return "\n".join(lines)


NUMBERS = ("count", "ranges", "width", "m", "l", "a_nnz", "b_nnz")
PATTERNS = {
    "rows": ("count", "int32"), "a_indptr": ("m + 1", "int32"), "a_indices": ("a_nnz", "int32"),
    "b_indptr": ("l + 1", "int32"), "b_indices": ("b_nnz", "int32"),
}  # fmt: skip
LOCALS = (
    "row",
    "begin",
    "end",
    "done",
    "q",
    "last",
    "column",
    "slot",
    "seen",
    "at",
    "place",
    "stop",
)
SWAP = 'T.call_extern("int32", "atomicCAS", T.address_of(keys[group, slot[0]]), -1, column[0])'
READ = "keys[group, slot[0]]"
# Conditions and indices only read locals: TVM's search for missing barriers requires that.
TEXT = """
# from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def row_tables($params):
    T.func_attr({"tirx.noalias": True})
    $buffers
    for block in T.thread_binding(T.max((count + GROUPS - 1) // GROUPS, 1), thread="blockIdx.x"):
        for group in T.thread_binding(GROUPS, thread="threadIdx.y"):
            for lane in T.thread_binding(LANES, thread="threadIdx.x"):
                with T.sblock("row"):
                    T.reads()
                    T.writes()
                    $made
                    row[0] = ROWS[T.min(block * GROUPS + group, count - 1)]
                    begin[0] = A_INDPTR[row[0]]
                    end[0] = begin[0]
                    if block * GROUPS + group < count:
                        end[0] = A_INDPTR[row[0] + 1]
                    done[0] = 0
                    for r in T.serial(0, ranges):
                        $steps
                        T.tvm_storage_sync("shared")
"""
CLEAR = """
for s in T.serial(0, SLOTS // LANES):
    keys[group, s * LANES + lane] = -1
"""
CLEARED = "    sums[group, s * LANES + lane] = first"
# Starting at a column's hash, the slot that has it, or a free one.
SEARCH = """
slot[0] = T.bitwise_and(T.bitwise_and(column[0], SLOTS - 1) * 107, SLOTS - 1)
seen[0] = $read
while seen[0] != -1 and seen[0] != column[0]:
    slot[0] = T.bitwise_and(slot[0] + 1, SLOTS - 1)
    seen[0] = $read
"""
ADDED = "T.evaluate(taken_in(sums[group, slot[0]], term(A[begin[0] + p], B[q[0]])))"
TERMS = """
for p in T.serial(0, end[0] - begin[0]):
    q[0] = B_INDPTR[A_INDICES[begin[0] + p]] + lane
    last[0] = B_INDPTR[A_INDICES[begin[0] + p] + 1]
    while q[0] < last[0]:
        column[0] = B_INDICES[q[0]]
        if T.truncdiv(column[0], width) == r:
            $each
        q[0] = q[0] + LANES
"""
INSERT = """
$insert
if seen[0] == -1:
    at[0] = T.call_extern("int32", "atomicAdd", T.address_of(found[group, 0]), 1)
$added
"""
FIND = """
$find
if seen[0] == column[0]:
    $added
"""
LISTED = _filled("""
$clear
if lane < 2:
    found[group, lane] = 0
T.tvm_storage_sync("shared")
$terms
T.tvm_storage_sync("shared")
last[0] = found[group, 0]
$told
done[0] = done[0] + last[0]
""", terms=_filled(TERMS, each=INSERT))  # fmt: skip
COUNTED = _filled(LISTED, told="""
if lane == 0 and begin[0] < end[0]:
    COUNTS[row[0]] = done[0] + last[0]
""")  # fmt: skip
WRITTEN = _filled(LISTED, told="""
for s in T.serial(0, SLOTS // LANES):
    seen[0] = keys[group, s * LANES + lane]
    if seen[0] != -1:
        slot[0] = T.call_extern("int32", "atomicAdd", T.address_of(found[group, 1]), 1)
        taken[group, slot[0]] = s * LANES + lane
T.tvm_storage_sync("shared")
q[0] = lane
while q[0] < last[0]:
    slot[0] = taken[group, q[0]]
    column[0] = keys[group, slot[0]]
    place[0] = C_INDPTR[row[0]] + T.cast(done[0], number)
    for s in T.serial(0, last[0]):
        seen[0] = taken[group, s]
        place[0] = place[0] + T.cast(keys[group, seen[0]] < column[0], number)
    C_INDICES[place[0]] = column[0]
    C[place[0]] = sums[group, slot[0]]
    q[0] = q[0] + LANES
""")  # fmt: skip
IN_MASK = """
place[0] = C_INDPTR[row[0]]
stop[0] = place[0]
if block * GROUPS + group < count:
    stop[0] = C_INDPTR[row[0] + 1]
place[0] = place[0] + T.cast(lane, number)
while place[0] < stop[0]:
    column[0] = C_INDICES[place[0]]
    if T.truncdiv(column[0], width) == r:
        $each
    place[0] = place[0] + T.cast(LANES, number)
"""
MASKED = _filled("""
$clear
T.tvm_storage_sync("shared")
$listed
T.tvm_storage_sync("shared")
$terms
T.tvm_storage_sync("shared")
$taken
""", listed=_filled(IN_MASK, each="$insert"), terms=_filled(TERMS, each=FIND),
    taken=_filled(IN_MASK, each="$find\nC[place[0]] = sums[group, slot[0]]"))  # fmt: skip
