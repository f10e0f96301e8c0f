"""Every illegal use of a stage-I primitive names it, shows the iteration and says what is legal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import positions_common as programs
import sparsetir
from positions_common import layer
from programs import PROGRAMS
from schedule_common import opened, program, refused, table
from schedule_common import steps as do
from small import small
from sparsetir.schedules.operators import rgms

ScheduleError = sparsetir.ScheduleError
SPMM = program().script()
HEAD = '"spmm") as [i, j, k]:\n'
ORDER = 'T.sp_iter_attr({"ordered": 1})\n'
ORDERED = SPMM.replace(HEAD, HEAD + " " * 8 + ORDER)
SOFTMAX, ROWS = sparsetir.from_source(programs.SOFTMAX), '"rows") as [i, h]:\n'


def changed(*pairs: tuple[str, str], text: str = SPMM) -> Any:
    """A program with other text in places."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return sparsetir.from_source(text)


def layer_with(*pairs: tuple[str, str]) -> Any:
    buffer = 'Y2 = T.alloc_sparse_buffer((I,), "float32")\n    A = T.match'
    return changed(("A = T.match", buffer), *pairs, text=layer.script())


INIT = "        with T.init():\n            Y[i, l] = T.float32(1.0)\n"
POSITIONS = "p = positions(sparse_fuse(it, [i, j]))\n"
THREADS = f"{POSITIONS}block, thread = split(p, [None, 64])\nsparse_reorder(it, [block, thread, k])"
LANES = """bound(k, 2, "exact")
step, lane = strip_mine_rows(j, {})
sparse_reorder(it, [i, lane, step, k])
precompute("C", lane, [k])"""
RANGES = "_, tile, row = ranges(i, 2, 4)\n"
BOUND = 'bound(k, 3, "exact")\nbound(l, 5, "exact")\n'
TILES = "pos(i)\ntile, row = split(i, [None, 3])"
BLOCKED = """k0, k1 = split(k, [None, 4])
sparse_reorder(it, [i, k0, j, k1])
precompute("C", k0, [k1])
tiles("B", it, {"J_": [2, 2], "K": [4]}, order=["K0", "J_0", "J_1", "K1", "J_2"])"""
STEPS = small("steps", """
TOTAL = T.alloc_sparse_buffer((I,), "float32")
with T.sp_iter([I, J], "SR", "sums") as [i, j]:
    with T.init():
        TOTAL[i] = 0.0
    TOTAL[i] = TOTAL[i] + A[i, j]
with T.sp_iter([I, J], "SS", "divide") as [i, j]:
    A[i, j] = A[i, j] / TOTAL[i]
with T.sp_iter([I], "S", "last") as [i]:
    C[i] = C[i] + TOTAL[i]
with T.sp_iter([I, J], "SS", "gather") as [i, j]:
    B[i, j] = C[j]
with T.sp_iter([I, J], "SS", "ordered") as [i, j]:
    T.sp_iter_attr({"ordered": 1})
    C[i] = B[i, j]
""", A="I J", B="I J", C="I")  # fmt: skip
# By section: the program, its iteration, and what is done before.
SECTIONS: dict[str, tuple[Any, str, str]] = {
    "spmm": (program(), "spmm", ""),
    "spmm, the result first": (program(), "spmm", 'precompute("C", i, [k], scope="global")'),
    "spmm over positions": (program(), "spmm", POSITIONS),
    "spmm over positions in threads": (program(), "spmm", THREADS),
    "spmm in runs": (program(), "spmm", f"{POSITIONS}sparse_reorder(it, [k, p])"),
    "spmm in chunks": (program(), "spmm", "o, i, j = divide(sparse_fuse(it, [i, j]), 4)"),
    "spmm in 8 lanes": (program(), "spmm", LANES.format(8)),
    "spmm in 12 lanes": (program(), "spmm", LANES.format(12)),
    "spmm in 48 lanes": (program(), "spmm", LANES.format(48)),
    "spmm in blocks of B": (program(), "spmm", BLOCKED),
    "of another product": (
        changed(("C[i, k] + A[i, j]", "C[i, k] + C[i, 0] * A[i, j]"), text=ORDERED), "spmm", ""),
    "of a recurrence": (
        changed(("C[i, k] + A[i, j]", "C[i, k] * 2.0 + A[i, j]"), text=ORDERED), "spmm", ""),
    "of maxima": (
        changed(("C[i, k] + A[i, j] * B[j, k]", "T.max(C[i, k], A[i, j] * B[j, k])")), "spmm",
        f"{POSITIONS}sparse_reorder(it, [k, p])"),
    "elementwise": (program("elementwise"), "elementwise", ""),
    "scatter": (program("spmm_coo_scatter"), "scatter", ""),
    "sddmm": (program("sddmm"), "sddmm", ""),
    "sddmm_fused": (program("sddmm_fused"), "sddmm", ""),
    "row_softmax": (program("row_softmax"), "softmax", ""),
    "spmm_ell": (program("spmm_ell"), "spmm", "_, i, j, k = sch.get_sp_iters(it)"),
    "hypergraph": (program("hypergraph"), "", ""),
    "scaled": (programs.scaled, "scaled", ""),
    "total": (programs.total, "total", ""),
    "twice": (programs.twice, "first", ""),
    "twice, the second": (programs.twice, "second", ""),
    "two reads": (programs.two_reads, "first", ""),
    "neighbours": (programs.neighbours, "shifted", ""),
    "again": (programs.again, "again", ""),
    "rows_reduced": (programs.rows_reduced, "sums", ""),
    "relations": (programs.relations, "relations", ""),
    "rgms": (rgms.program(rgms.Rgms()), "rgms", BOUND),
    "rgms of any sizes": (rgms.program(rgms.Rgms()), "rgms", RANGES),
    "ttm": (program("ttm"), "ttm", ""),
    "softmax": (SOFTMAX, "rows", ""),
    "softmax that is ordered": (
        changed(("Y[i, j, h] = Y[i, j, h] *", "Y[i, j, 0] = Y[i, j, 0] *"),
                (ROWS, f"{ROWS}        {ORDER}"), text=SOFTMAX.script()),
        "rows", ""),
    "softmax in a loop": (
        changed(("        TOTAL[()] = 1.0 / TOTAL[()]", "        for n in range(1):\n"
                 "            TOTAL[()] = 1.0 / TOTAL[()]"), text=SOFTMAX.script()),
        "rows", "_, lanes = split(h, [None, 2])"),
    "steps": (STEPS, "sums", ""),
    "fibers": (sparsetir.from_source(programs.SUMS), "sums", ""),
    "layer of rows": (layer_with(("* W[k, l]", "* W[k, l] * Y2[i]")), "layer", TILES),
    "layer of spatial sums": (layer_with(("SRRS", "SRSS")), "layer", TILES),
    "layer of one": (
        layer_with(("Y[i, l]", "Y[i, 0]"), ("SRRS", "SRRR")), "layer", TILES),
    "layer without an init": (layer_with((INIT, "")), "layer", TILES),
}  # fmt: skip

REFUSED = """
[spmm]
sparse_reorder(it, [j, i, k])  # expected axis 'I', its parent, before 'J'
sparse_reorder(it, [i, i, j])  # expected each of ['I', 'J', 'K'] once, got ['I', 'I', 'J']
sparse_reorder(it, ["Q", j, k])  # 'Q' is not an axis of this iteration
sparse_reorder(it, 3)  # - argument 'order': expected a list of which each is .. , got 3
sparse_fuse(it, [i, j]); sparse_reorder(it, [i, k])
    'I' is not an axis of this iteration, but ['I_J', 'K'] are: what cuts or fuses loops returns
sparse_fuse(it, [i, k])  # expected neighbours .. 'I', 'K'
sparse_fuse(it, [i])  # at least two axes, got 1
sparse_fuse("spmm", [i, j])  # - expected a handle of get_sparse_iteration, got 'spmm'
annotate(it, 3, "x")  # - argument 'key': expected a name, got 3
annotate(it, "x", 2**70)  # - argument 'value': .. 64 bits
split(k, [4])
    argument 'factors': expected two or more positive integers, the first of which may be None
split(k, [None, None])
    argument 'factors': expected two or more positive integers .. got [None, None]
split(k, [None, 0])  # argument 'factors': expected two or more positive integers .. got [None, 0]
split(k, [None, True])
    argument 'factors': expected two or more positive integers .. got [None, True]
split(k, [2, -1])  # argument 'factors': expected two or more positive integers .. got [2, -1]
split(k, 16)  # argument 'factors': expected two or more positive integers .. got 16
split(k, [None, 2**12, 2**12])
    argument 'factors': expected tiles of less than 16777216 visits .. got
split(k, [None, 4], tail="cut")
    argument 'tail': expected one of guard, shift, repeat, exact, got 'cut'
split(k, [2, 4], tail="exact")
    argument 'factors': expected their product to be the length of axis 'K', feat, got 8; None as
bound(k, 4, "exact"); split(k, [4, 2], tail="exact")
    argument 'factors': expected their product to be the length of axis 'K', 4, got 8; None as the
bound(k, 100, "exact"); split(k, [None, 16], tail="exact")
    argument 'tail': "exact" expects axis 'K' to be a multiple of 16 long, got 100; "guard", "shift"
bound(k, 15, "exact"); split(k, [None, 16], tail="shift")
    argument 'tail': "shift" expects axis 'K' to hold a tile of 16, got 15 coordinates; "guard" and
split(i, [None, 4])  # axis 'J' would be separated from its parent 'I'; to keep it there call pos
split(j, [2, 8])
    argument 'factors': expected None as the first, as rows store more or less than others, got 2;
split(j, [None, 8], tail="shift")
    argument 'tail': expected "guard" for 'J', of which a row's last tile holds what is left, got
split(sparse_fuse(it, [i, j]), [None, 4, 8])
    argument 'factors': expected two for 'I_J', as [None, 8], whose tiles are not cut .. positions
split(sparse_fuse(it, [i, j]), [None, 8], tail="repeat")
    ; legal after positions of it, which makes one loop
split(split(j, [None, 4])[1], [None, 4])
    'J' is in parts already; tiles of tiles are made at once, as by [None, 8, 4]
parallelize(k); split(k, [None, 4])
    ['K'] is divided among workers and has to stay as it is; expected split before parallelize
coord(sparse_fuse(it, [i, j]))  # 'I_J' has positions alone; expected a loop over one axis
divide(j, 2); coord(sch.get_sp_iters(it)[1])  # the coordinates of 'J_parts' are in no order
divide(i, 4, by="rows")  # argument 'by': expected one of positions, work, coordinates, got 'rows'
divide(i, 0)  # argument 'parts': expected a positive integer or a name, got 0
divide(i, True)  # argument 'parts': expected a positive integer or a name, got True
divide(i, 1.5)  # argument 'parts': expected a positive integer or a name, got 1.5
divide(i, "4 x")  # argument 'parts': expected a positive integer or a name, got '4 x'
divide(i, "feat")
    argument 'parts': expected a number or a new name, got 'feat', which the function has already
divide(k, 4, by="work")
    by="work" expects a variable axis under 'K' in the iteration; by="positions" makes parts of
divide(i, 4, by="coordinates")
    by="coordinates" expects a sparse_variable axis whose coordinates differ, got 'I'
divide(divide(i, 4)[1], 4)  # 'I' is in parts already; divide a part's children, or split
divide(i, 4, by="work", cost=-1)  # argument 'cost': expected an integer of 0 or more, got -1
divide(i, "n_parts", default=2**31)
    argument 'default': expected a positive integer below 16777216, got 2147483648
divide(i, 4, by="work", ahead="")  # argument 'ahead': expected a name or None, got ''
divide(k, 2, ahead="ahead")  # argument 'ahead': expected None
divide(j, 2, by="coordinates", ahead="ahead")  # argument 'ahead': expected None
parallelize(i); divide(i, 4)
    ['I'] is divided among workers and has to stay as it is; expected divide before parallelize
parallelize(i); sparse_fuse(it, [i, j])
    ['I'] is divided among workers and has to stay as it is; expected sparse_fuse before parallelize
sparse_reorder(it, [i, k, j]); parallelize([i, k]); sparse_reorder(it, [i, j, k])
    ['I', 'K'] is divided among workers and has to stay as it is; expected sparse_reorder before
bound(k, 64, "about")  # argument 'kind': expected one of exact, max, min, multiple, got 'about'
bound(k, 0, "exact")  # argument 'n': expected a positive integer, got 0
bound(sparse_fuse(it, [i, j]), 4, "max")
    expected a loop over one axis, got 'I_J', whose extent is no length
bound(k, 64, "exact"); bound(k, 48, "multiple")
    axis 'K' has 64 coordinates, which is not a multiple of 48
k0, k1 = split(k, [None, 4]); bound(k0, 4, "max")
    expected the length of the axis to be a parameter of 'spmm' or a number .. got (feat + 3) // 4
precompute("D", i, [k])  # argument 'buffer': expected one of ['A', 'B', 'C'], got 'D'
precompute("C", i, [k], scope="registers")
    argument 'scope': expected one of local, global, shared, got 'registers'
precompute("C", it, [i, k], scope="global", dtype="float99x")
    - argument 'dtype': expected a dtype, such as 'float32', got 'float99x'
precompute("C", it, [i, k], scope="global", dtype="int32")
    argument 'dtype': expected a type of the kind of 'C', float32, got 'int32'
precompute("C", it, [i, k], scope="global", name="a b")
    - argument 'name': expected a name, got 'a b'
precompute("C", it, [i, k], scope="global", hoist="yes")
    - argument 'hoist': expected True or False, got 'yes'
precompute("C", j, [i])
    expected loops inside of the place of the workspace, ['K'], got 'I'; sparse_reorder can bring
precompute("C", i, [k])
    expected loops of constant extent for a workspace in scope "local", got 'K' of feat; split it
precompute("C", it, [i, k], lanes=[k], scope="global")
    argument 'lanes': expected reduction loops, got 'K'
precompute("C", i, [j], scope="global")  # expected loops over dense axes for the workspace, got 'J'
precompute("C", i, [], scope="global")
    the spatial loop 'K' inside would change what the workspace stands for; expected it among the
precompute("B", i, ["J_", k])
    a copy of 'B' would part the iteration from its init; expected its result to be precomputed
precompute("B", i, ["J_"], hoist=True)  # argument 'hoist': expected none, as 'B' is only read here
precompute("B", i, ["J__", k])
    argument 'axes': expected handles of loops inside of the place of the copy, among ['K'], or
parallelize(k); precompute("C", i, [k], scope="global")
    ['K'] inside is divided among workers; expected precompute before parallelize
sparse_reorder(it, [k, i, j]); precompute("C", i, []); precompute("B", k, ["J_"], scope="global")
parallelize(i)
    'I' is not an axis of this iteration, but of ['spmm_rest'], whose get_sp_iters gives its handle
parallelize(j)
    loop 'J' is not proven free of races (reduction: C); legal are loops whose .. race="ignore"
parallelize(j, race="atomics")
    argument 'race': expected "none" or "ignore" or "temporary" for unit "cpu", got 'atomics': a CPU
parallelize(i, race="maybe")
    argument 'race': expected "none" or "ignore" or "temporary" for unit "cpu", got 'maybe'
parallelize(i, "gpu")
    argument 'unit': expected "cpu" or "block" or "warp" or "thread" or "vector", got 'gpu'
parallelize([])  # - argument 'loop': expected one or more loops, got
parallelize([i, k])
    argument 'loop': expected neighbours in the order of the iteration, got ['I', 'K'];
parallelize(i); parallelize(k)
    ['I'] is divided among threads already, which do not nest; legal are neighbouring loops as one
parallelize(j, race="temporary")
    race="temporary" of the reduction loop 'J': legal are loops free of races, ['I', 'K'], or, after
parallelize(split(j, [None, 4])[0], race="temporary")
    the reduction loop 'J_tiles0': legal are loops free of races, ['I', 'K']
parallelize(i, race="temporary")
    race="temporary" expects the loop over the chunks that split or divide made of fused rows and
parallelize(i, "thread", race="segment(3)")
    or "temporary" or "group(r)" or "segment(r)" for unit "thread", got 'segment(3)', r a power of
parallelize(i, "block", race="group(4)")
    expected "none" or "ignore" or "atomics" for unit "block", got 'group(4)'
parallelize(i, "block", per_block=4)
    argument 'per_block': expected None for unit "block", whose visits are no threads, got 4
parallelize(i, "thread", per_block=2048)
    argument 'per_block': expected None or 1 to 1024 visits of a loop over "warp" or "thread", got
parallelize(i, "thread")
    expected one loop over a dense axis of constant extent for unit "thread" .. per_block=n, got
parallelize(split(k, [None, 2048])[1], "thread")
    expected at most 1024 visits, as a block has threads, got 2048 of 'K1'; split it
parallelize(split(k, [None, 8])[1], "thread", race="group(8)")
    visits of 'K1' do not add to the same elements; legal is race="none"
step, lane = strip_mine_rows(j, 8); sparse_reorder(it, [i, k, lane, step])
parallelize(lane, "thread", race="group(8)")
    expected the sum over ['J_steps'] in a workspace, which precompute makes
positions(k)  # expected a loop over a dense axis fused with sparse_variable axes
positions(sparse_fuse(it, [i, j]), rows="x")
    argument 'rows': expected "table" or "search" or "blocks", got 'x'
positions(sparse_fuse(it, [i, j]), rows="search", parts=2)
    argument 'rows': expected "table" with parts = 2, in whose order rows do not follow .. 'search'
p = positions(sparse_fuse(it, [i, j]), rows="blocks")
outer, inner = split(p, [None, 16], tail="repeat"); sparse_reorder(it, [inner, outer, k])
parallelize(inner, "block", race="atomics")
    rows by blocks: expected a block to have positions in a row .. got 'I_J1' at .. legal is
peel(split(k, [None, 300])[0], 2**24 - 1)
    - expected sizes that the axis's type, int32, holds, got 5033164500; give smaller
peel(i, 2)  # the iteration visits axes under
sell_slices(i, j, 0)  # argument 'lanes': expected a positive integer
sell_slices(i, j, 4, longest=0)  # argument 'longest': expected a positive
sell_slices(i, j, 4, window="a b")  # argument 'window': expected a positive
sell_slices(i, j, 4, diagonals=101)  # argument 'diagonals': expected a positive integer below 101
sell_slices(i, j, 64, diagonals=30)  # argument 'lanes': expected a positive integer below 33
sell_slices(i, k, 4)  # expected a spatial loop over a dense axis and a reduct
sell_slices(j, i, 4)  # got 'J' and 'I'
annotate(it, "note", "kept"); sell_slices(i, j, 4)  # without nested ones and annotations
parts, i = divide(i, 2); sell_slices(parts, j, 4)  # got 'I_parts' and 'J'
sort_rows_by_length(i, j, 0)  # argument 'window': expected a positive
sort_rows_by_length(i, j, True)  # argument 'window': expected a positive
sort_rows_by_length(i, k)  # expected a spatial loop over
group_columns_by_pattern(i, j, 1)  # 'size': expected 2 to 8 rows, got 1
group_columns_by_pattern(i, j, 9)  # 'size': expected 2 to 8 rows, got 9
group_columns_by_pattern(i, j, True)  # 'size': expected 2 to 8 rows, got True
group_columns_by_pattern(i, j, 4, by="rows")  # 'by': expected 'pattern' or 'count', got 'rows'
group_columns_by_pattern(i, j, 4); pack("C", it)  # argument 'buffer': expected a parameter
sell_slices(i, j, 4); pack("Z", it)  # argument 'buffer': expected a parameter over one
sell_slices(i, j, 4); pack("B", it)  # argument 'buffer': expected a parameter over one
sell_slices(i, j, 4); pack("I_left_rows", it)  # expected 'I_left_rows' to be read here, and
sell_slices(i, j, 4); pack("A", of("spmm_long"))  # expected all reads of 'A' at one table, got
sell_slices(i, j, 4); pack("I_lengths", it)  # expected all reads of 'I_lengths' at one table
segment_accumulate(i)  # expected spatial loops of constant extent inside of 'I', got 'J'; split
segment_accumulate(j)  # expected a loop over a dense axis, got 'J'
segment_accumulate(k)  # expected visits of 'K' to add to the rows that a table gives, got
distribute(k)  # expected an iteration without
tiles("Z", it, {"K": [4]}, order=["K0", "J_", "K1"])
    argument 'buffer': expected .. over dense axes, of ['B', 'C'], got 'Z'
tiles("A", it, {"K": [4]}, order=["K0", "J_", "K1"])
    argument 'buffer': expected .. over dense axes, of ['B', 'C'], got 'A'
tiles("C", it, {"K": [4]}, order=["K0", "J_", "K1"])
    argument 'buffer': expected 'C' to be read here, a
tiles("B", it, {"K": [4]}, order=["K0", "J_", "K1"])
    expected an iteration without an init, which a c
combine_row_pieces([it], race=[])  # - argument 'race': expected .. got []
[spmm, the result first]
precompute("B", i, ["J_"])
    the index k of axis 'K' depends on ['k'], which the copy does not go over; expected 'K' or these
precompute("B", i, ["J"])
    argument 'axes': expected handles of loops .. names of axes of 'B', among ['J_', 'K'], got the
precompute("B", i, [j, k])
    argument 'axes': expected dense axes to copy over, got 'J' (sparse_variable)
tiles("B", it, {}, order=["K0", "J_", "K1"])  # argument 'sizes': expected positive extents
tiles("B", it, {"J": [2]}, order=["K0", "J_", "K1"])  # argument 'sizes': expected positive extents
tiles("B", it, {"K": [0]}, order=["K0", "J_", "K1"])  # argument 'sizes': expected positive extents
tiles("B", it, {"K": [4]}, order=["K0", "K1"])  # argument 'order': expected .. in some order
inner = sch.get_sp_iters(of("spmm_reduce")); sparse_reorder(of("spmm_reduce"), inner[::-1])
distribute(inner[0])  # expected loops over dense axes, got 'J'
[spmm in blocks of B]
tiles("B", it, {"K": [4]}, order=["K0", "J_", "K1"])
    argument 'buffer': expected 'B' to be read here
[spmm over positions]
segment_accumulate(p)  # expected spatial loops of constant extent inside of 'I_J', got 'K'
precompute("C", p, [k], scope="global"); segment_accumulate(p)
    expected an iteration without nested ones, before parallelize
[spmm in runs]
parallelize(p, "thread", race="ignore", per_block=32); segment_accumulate(p)
    ['I_J'] is divided among workers; expected segment_accumulate before parallelize
[spmm over positions in threads]
parallelize(block, "block")
    loop 'I_J0' is not proven free of races (scatter: C); legal are .. and race="atomics" of a sum
parallelize(thread, "thread", race="group(32)")
    lanes of 'I_J1' add to different elements, [I_at[ij0 * 64 + ij1], k]; legal is
[spmm in chunks]
parallelize(o, "block", race="temporary")
    argument 'race': expected "none" or "ignore" or "atomics" for unit "block", got 'temporary'
parallelize(o)
    loop 'I_J_parts' is not proven free of races (scatter: C); .. race="temporary" of this one
[spmm in 8 lanes]
parallelize(lane, "thread")
    element, race="atomics" or "segment(r)" of a sum, and "group(r)" of threads of one row
parallelize(lane, "thread", race="segment(8)")
    all lanes of 'J_lanes' add to the same element, [i, k]; legal is race="group(8)"
parallelize(lane, "thread", race="group(8)", per_block=8)
    argument 'per_block': expected None for race 'group(8)', whose threads are all of one block, got
[spmm in 12 lanes]
parallelize(lane, "thread", race="group(8)")
    argument 'race': expected a loop over a multiple of 8 threads, got 12 of 'J_lanes'
[spmm in 48 lanes]
parallelize(lane, "thread", race="temporary")
    race="temporary" expects a power of two of threads, got 48 of 'J_lanes'; legal is
[of another product]
precompute("C", i, [k], scope="global")
    'C' is accessed at more than one place, [i, k] and [i, 0]: the value that the workspace holds
[of a recurrence]
precompute("C", j, [k], scope="global")
    where a visit does not see all terms of an element expects a body of the form X[..] = X[..] +
[of maxima]
segment_accumulate(p)  # expected a body of the form X[..] = X[..]
[scatter]
parallelize(e)  # loop 'E' is not proven free of races (scatter: C)
[elementwise]
parallelize([i, j])
    argument 'loop': the extent of 'J' depends on ['I'], so that they are not one loop; legal is one
[sddmm]
parallelize(split(k, [None, 4], tail="exact")[1], race="temporary")
    loop 'K1': precompute(.., lanes=[loop]) gives
group_columns_by_pattern(i, j, 4)  # expected a spatial loop over a dense axis and a reduction over
[row_softmax]
(j,) = sch.get_sp_iters(of("divide")); parallelize(j); parallelize(i)
    ['J'] of 'divide' is divided among threads already, which do not nest; legal are neighbouring
[spmm_ell]
split(j, [2, 0])  # argument 'factors': expected two or more positive integers
split(j, [None, 2], tail="wrap")  # argument 'tail': expected one of guard, shift, repeat, exact
positions(j, parts=2)  # argument 'parts': expected None below 'I'
positions(j, rows="search")  # argument 'rows': expected the default for slots, got 'search'
divide(sparse_fuse(it, [o, i, j]), 2)  # a length that is .. got rows * cols; split cuts others
positions(sparse_fuse(it, [i, j]))  # expected 'O', of one coordinate, to be fused with these
split(i, [None, 2])  # 'J' is below 'I'; expected slots that are fused with
[hypergraph]
sparse_fuse(it, sch.get_sp_iters(it)[1:3])  # axis 'EV' is attached and cannot be fused
[sddmm_fused]
positions(ij, parts=0)  # 'parts': expected a positive integer or a name, got
positions(ij, parts="feat")  # 'parts': expected a number or a new name, got
peel(ij, 8)  # expected a loop over one dense_fixed axis, got 'I_J'
p = positions(ij); annotate(it, "note", 1); peel(p, 8)  # the iteration has annotations
p, group = split(positions(ij), [None, 4]); precompute("OUT", p, [group]); peel(p, 8)
    without nested ones, got 'sddmm_start' inside
[total]
parallelize(positions(ij, parts=3))  # loop 'I_J' is not proven free of races (reduction
[scaled]
sell_slices(k, k, 4)  # got 'K' and 'K'
[twice]
positions(ij)  # sp_iter 'second' visits 'J' too
[twice, the second]
sell_slices(i, j, 4)  # got 'I' and 'J'
[two reads]
tiles("B", it, {"K": [4]}, order=["K0", "I", "K1"])
    'B' is read at more than one place, so that no t
tiles("B", of("second"), {"K": [4]}, order=["K0", "I", "K1"], given=True)
    'B' is read elsewhere, too, which needs it as it is
[neighbours]
positions(ij)  # buffer 'A' is accessed at [i, j + 1], which is not the
[again]
peel(i, 1)  # 'multiple': expected an integer of 2 or more, below 16777216, got 1
peel(o, 3)  # axis 'O' of 3 coordinates is a multiple of 3; there is nothing
peel(o, 2)  # loop 'O' is not proven to write elements of its own
[rows_reduced]
positions(sparse_fuse(it, [i, j]))  # expected axes of one kind, or a reduction below
[relations]
pack("W", it)  # expected 'ETYPE' to be known to hold positions of 'W'
assume("valid", axis="J")  # - 'fact': expected one of coordinates, filled, inside, got 'valid'
assume("coordinates", axis="R")  # - 'buffer': expected a name for 'coordinates', got None
assume("filled", axis="J", buffer="W")  # - 'buffer': expected None for 'filled', got 'W'
assume("filled", axis="R")  # - axis 'R': expected a sparse_fixed axis .. got a dense_fixed
assume("filled", axis="Q")  # - 'Q': no such axis; there are ['I', 'J', 'R']
assume("coordinates", axis="R", buffer="V")  # - 'V': no such buffer; there are ['W'
assume("coordinates", axis="R", buffer="W")  # - 'W': expected a buffer of integers, got fl
assume("inside", axis="J", buffer="W")  # - 'W': expected one of its axes .. got 'J'
[rgms]
ranges(r, 2, 4)  # expected a loop over a sparse_variable
ranges(j, 2, 4)  # expected a loop over a sparse_variable
ranges(i, 2, 0)  # argument 'tile': expected a positive integer, got 0
ranges(i, 2, 4, cost=True)  # argument 'cost': expected a positive integer
ranges(i, 0, 4)  # argument 'parts': expected a positive integer or a
aggregate("Y", r, i, [j])  # argument 'rows': expected a loop over the rows
_, tile, row = ranges(i, 2, 4); aggregate("Y", tile, row, [])
    argument 'columns': expected one or more reduction
_, tile, row = ranges(i, 2, 4); aggregate("Y", tile, row, [l])
    argument 'columns': expected one or more reduction
_, tile, row = ranges(i, 2, 4); aggregate("X", tile, row, [j])
    argument 'buffer': expected 'Y', which the iteration
_, tile, row = ranges(i, 2, 4); aggregate("Y", row, row, [j])
    expected loops inside of the place of the sums
_, tile, row = ranges(i, 2, 4); aggregate("Y", tile, row, [j, k])
    expected factors that vary over the columns, and
_, tile, row = ranges(i, 2, 4); split(k, [None, 2]); aggregate("Y", tile, row, [j])
    expected a body of the form .. without conditions
parallelize(r)  # is not proven free of races
parallelize(divide(i, 4, by="coordinates")[0])  # is not proven free of races
[rgms of any sizes]
aggregate("Y", tile, row, [j])  # expected other loops of constant extent inside
[ttm]
positions(sparse_fuse(it, sch.get_sp_iters(it)[:2]), parts=2)
    buffer 'A' .. does not lie over the .. alone
[softmax]
distribute([])  # - argument 'loop': expected one or more loops, got none
distribute([i])
    'loop': expected the innermost of several loops, in their order, got ['I']; sparse_reorder can
distribute([i, h])
    'loop': expected the innermost of several loops, in their order, got ['I', 'H']; sparse_reorder
distribute(h)
    expected loops of constant extent, as 'TOP' in scope "local" gets a place .. got 'H' of heads;
[softmax that is ordered]
distribute(h)  # 'H' is not proven free of races (scatter
[softmax in a loop]
distribute(lanes)  # expected stores and iterations in 'rows'
[steps]
fuse_steps([], [i])  # - argument 'steps': expected two or more iterations that follow .. got []
fuse_steps([it], [i])  # - argument 'steps': expected two or more .. got ['sums']
fuse_steps([it, of("last")], [i])  # - that follow each other .. got ['sums', 'last']
fuse_steps([of("divide"), it], sch.get_sp_iters(of("divide"))[:1])  # - got ['divide', 'sums']
fuse_steps([of("ordered"), it], sch.get_sp_iters(of("ordered"))[:1])  # - got ['ordered', 'sums']
fuse_steps([it, of("divide")], [i, i])  # - 'loops': expected different loops, got ['I', 'I']
fuse_steps([it, of("divide")], [])  # - argument 'loops': expected different loops, got []
fuse_steps([it, of("divide")], [j])  # expected a spatial loop over the dense axis 'J' in 'sums'
fuse_steps([of("divide"), of("last")], sch.get_sp_iters(of("divide")))
    expected a spatial loop over the dense axis 'J' in 'divide'
fuse_steps([of("last"), of("gather")], sch.get_sp_iters(of("last")))
    loop 'I' is not proven free of races (
fuse_steps([of("gather"), of("ordered")], sch.get_sp_iters(of("gather"))[:1])
    expected iterations without annotations, got {'ordered': 1}
annotate(it, "note", 1); fuse_steps([it, of("divide")], [i])  # without annotations, got {'note'
fuse_steps([it, of("divide")], [i]); fuse_steps([of("sums_steps"), of("last")], [i])
    expected iterations without others inside
[fibers]
positions(sparse_fuse(it, [k, l]), parts=2)  # argument 'parts': expected None below 'J'
positions(sparse_fuse(it, [k, l]), rows="search")  # argument 'rows': expected "table" below 'J'
positions(sparse_fuse(it, [j, k]))  # expected axes of one kind .. got 'SR' for 'J_K'
sparse_fuse(it, [k, l]); positions(sparse_fuse(it, [i, j]))
    'K_L' is below 'J'; expected a loop
[layer of rows]
aggregate("Y", tile, row, [j], dtype="float64")  # argument 'dtype': expected float32, that of the
[layer of spatial sums]
aggregate("Y", tile, row, [j], dtype="float64")
    expected 'K' to be a reduction, as sums vary over it
[layer of one]
aggregate("Y", tile, row, [j], dtype="float64")  # expected 'L' to be spatial
[layer without an init]
aggregate("Y", tile, row, [j], dtype="float64")
    argument 'dtype': expected an init for sums in another type
"""


@pytest.mark.parametrize(("section", "code", "words"), table(REFUSED))
def test_refused(section: str, code: str, words: list[str]) -> None:
    func, iteration, before = SECTIONS[section]
    refused(f"{before}\n{code}", words, func, iteration)


@pytest.mark.parametrize(
    ("name", "message"), [("x", "no sparse iteration 'x'; there are"), (["spmm"], "a string, got")]
)
def test_names_of_iterations(name: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        sparsetir.Schedule(program()).get_sparse_iteration(name)


def test_the_default_lets_threads_be() -> None:
    sch, _, (j,) = opened(program("row_softmax"), "divide")
    sch.parallelize(j)
    assert "T.parallel(m)" not in sparsetir.lower(sch)["III"].script()


def test_a_shifted_tile_needs_its_length_when_called() -> None:
    sch, _, (_, _, k) = opened()
    sch.split(k, [None, 4], tail="shift")
    arguments = PROGRAMS["spmm"].inputs(np.random.default_rng(0), "empty", "float32", "int32")
    kernel = sparsetir.build(sch)
    with pytest.raises(ValueError, match=r"'feat': expected at least 4, .* got 3"):
        kernel(**arguments)


def test_annotations_by_hand_name_loops() -> None:
    sch, _, (i, *_) = opened()
    sch.parallelize(i)
    text = sch.func.script().replace('"loops": ["I"]', '"loops": ["Q"]')
    with pytest.raises(
        sparsetir.LoweringError,
        match=r"sp_iter 'spmm': annotation 'parallel': expected names of its loops, "
        r"\['I', 'J', 'K'\], got \['Q'\]",
    ):
        sparsetir.lower_sparse_iter(sparsetir.from_source(text))


# Several steps of a kernel, whose threads do not fit together: seen when all are known.
BLOCKS = """
[32]
parallelize(i, "thread", per_block=64); parallelize(lane, "thread", race="temporary")
    expected at most 1024 threads, got {'threadIdx.x': 32, 'threadIdx.y': 64}
[8]
parallelize(i, "warp", per_block=4); parallelize(lane, "thread", race="temporary")
    expected 32 threads inside of the loop over warps ['I'], got {'threadIdx.x': 8
(write,) = parallelize(lane, "thread", race="temporary")
parallelize(sch.get_sp_iters(write)[0], "thread")
    expected the lanes 'J_lanes' to be the innermost loop over threads, got threadIdx.y
[none]
k0, k1, k2 = split(k, [None, 2, 4]); sparse_reorder(it, [k0, i, j, k1, k2])
start, _, write = precompute("C", i, [k1, k2]); parallelize(k0, "block")
parallelize(sch.get_sp_iters(start)[0], "thread"); parallelize(sch.get_sp_iters(write)[1], "thread")
    expected 4 threads as threadIdx.x in all loops, got {'threadIdx.x': 2}
"""


@pytest.mark.parametrize(("lanes", "code", "words"), table(BLOCKS))
def test_refused_blocks(lanes: str, code: str, words: list[str]) -> None:
    sch, it, _ = opened()
    before = "" if lanes == "none" else LANES.format(lanes)
    _, call = do(f"{before}\n{code}", sch, it)
    call()
    with pytest.raises(sparsetir.LoweringError) as error:
        sparsetir.lower(sch, target={"kind": "cuda", "arch": "sm_90"})
    assert words[0] in str(error.value)
