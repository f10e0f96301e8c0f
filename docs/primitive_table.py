"""The table of docs/tvm.md: which of TVM's primitives work on which storage, each cell tried.

    python docs/primitive_table.py

writes it between `<!-- primitives -->` and `<!-- end -->`; `tests/project/test_primitives.py`
holds both equal, and compares with scipy what the kernels compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as TIR

import sparsetir
from sparsetir.formats import COO, Hyb, Operand
from sparsetir.schedules.passes.hide_index_reads import hide_index_reads
from sparsetir.schedules.passes.parallel_loops import innermost_block
from sparsetir.sparse_ir.nodes import sparse_iterations

PAGE = Path(__file__).with_name("tvm.md")
MARKED = re.compile(r"(?<=<!-- primitives -->\n).*?(?=<!-- end -->)", re.DOTALL)
PROGRAM = """
@T.prim_func
def spmm({params}, m: T.int32, n: T.int32{size}):
    {axes}
    N = T.dense_fixed(n)
    K = T.dense_fixed({feat})
    A = T.match_sparse_buffer(a, ({over}), "float32")
    B = T.match_sparse_buffer(b, (N, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    {more}
    with T.sp_iter([{over}, K], "{kinds}S", "spmm") as [{at}, k]:
        with T.init():
            C[i, k] = T.float32(0)
        C[i, k] = C[i, k] + A[{at}] * B[{row}, k]
"""
BLOCKS = """
@T.prim_func
def spmm(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
         mb: T.int32, nb: T.int32, nnzb: T.int32{size}):
    I = T.dense_fixed(mb)
    J = T.sparse_variable(I, (nb, nnzb), (indptr, indices))
    II = T.dense_fixed(4)
    JI = T.dense_fixed(8)
    N = T.dense_fixed(nb)
    K = T.dense_fixed({feat})
    A = T.match_sparse_buffer(a, (I, J, II, JI), "float32")
    B = T.match_sparse_buffer(b, (N, JI, K), "float32")
    C = T.match_sparse_buffer(c, (I, II, K), "float32")
    with T.sp_iter([I, J, II, JI, K], "SRSRS", "spmm") as [i, j, ii, ji, k]:
        with T.init():
            C[i, ii, k] = T.float32(0)
        C[i, ii, k] = C[i, ii, k] + A[i, j, ii, ji] * B[j, ji, k]
"""
FEATURES = 32
HANDLES = "a: T.handle, b: T.handle, c: T.handle, "
CSR = PROGRAM.format(
    params=f"{HANDLES}indptr: T.handle, indices: T.handle, nnz: T.int32",
    axes="I = T.dense_fixed(m)\n    J = T.sparse_variable(I, (n, nnz), (indptr, indices))",
    over="I, J", at="i, j", kinds="SR", row="j", more="", size="{size}", feat="{feat}",
)  # fmt: skip
ELL = PROGRAM.format(
    params=f"{HANDLES}indices: T.handle",
    axes="I = T.dense_fixed(m)\n    J = T.sparse_fixed(I, (n, 8), indices)",
    over="I, J", at="i, j", kinds="SR", row="j", more="", size="{size}", feat="{feat}",
)  # fmt: skip
DIA = PROGRAM.format(
    params=f"{HANDLES}off: T.handle, d: T.int32",
    axes="I = T.dense_fixed(m)\n    J = T.dense_fixed(d)",
    over="I, J", at="i, j", kinds="SR", row="i + OFF[j]",
    more='OFF = T.match_sparse_buffer(off, (J,), "int32")', size="{size}", feat="{feat}",
)  # fmt: skip
STORAGES: dict[str, Any] = {
    "CSR": CSR, "ELL": ELL, "BSR": BLOCKS, "DIA": DIA, "COO": COO(), "hyb part": Hyb(1, 2),
}  # fmt: skip


class Case:
    """SpMM over one storage in stage II, with the parts that primitives are applied to.

    feat : how many features, None for any number

    sch : TVM's schedule
    block : the innermost one
    rows, j, k : loops over rows, over what is summed (the innermost), and over features
    """

    def __init__(self, storage: Any, feat: int | None = FEATURES) -> None:
        size = {"feat": feat or "feat", "size": "" if feat else ", feat: T.int32"}
        if isinstance(storage, str):
            self.func = sparsetir.from_source(storage.format(**size))
        else:
            plain = sparsetir.from_source(CSR.format(**size))
            rules = storage.rules(Operand.of(plain, "A"))
            _, self.func = sparsetir.extract_preprocess(sparsetir.decompose_format(plain, rules))
        name = [it.name for it in sparse_iterations(self.func)][-1]  # of hyb, the last part
        self.sch: Any = sparsetir.Schedule(self.func).lower()
        self.block: Any = innermost_block(self.sch, name)
        self.loops: list[Any] = self.sch.get_loops(self.block)
        self.top: list[Any] = self.sch.get_loops(self.sch.get_sblock(f"{name}0"))
        self.k: Any = self._loop(self.loops, "k")
        self.j: Any = self._loop(self.loops[::-1], "j")
        self.rows: Any = self._loop(self.top, "i")

    def _loop(self, loops: list[Any], first: str) -> Any:
        names = [(x, str(self.sch.get(x).loop_var.name)) for x in loops]
        named = [(x, name) for x, name in names if name.startswith(first)]
        return next((x for x, name in named if name != "io"), named[0][0])

    def number(self, name: str) -> int:
        """Which of the reads of the block is of this buffer."""
        names = [str(r.source.name) for r in self.sch.get(self.block).reads]
        return next(n for n, x in enumerate(names) if x.startswith(name))

    def lanes(self, count: int = 16) -> Any:
        return self.sch.split(self.k, [None, count])[1]

    def copy(self, of: str = "B") -> Any:
        return self.sch.cache_read(self.block, self.number(of), "global")


@TIR.prim_func(s_tir=True)
def _axpy(a: TIR.handle, b: TIR.handle, c: TIR.handle) -> None:
    A = TIR.match_buffer(a, (1,), "float32", offset_factor=1)
    B = TIR.match_buffer(b, (16,), "float32", offset_factor=1)
    C = TIR.match_buffer(c, (16,), "float32", offset_factor=1)
    with TIR.sblock("root"):
        TIR.reads(C[0:16], A[0], B[0:16])
        TIR.writes(C[0:16])
        for k in range(16):
            with TIR.sblock("update"):
                vk = TIR.axis.spatial(16, k)
                C[vk] = C[vk] + A[0] * B[vk]


@TIR.prim_func(s_tir=True)
def _axpy_in_vectors(a: TIR.handle, b: TIR.handle, c: TIR.handle) -> None:
    A = TIR.match_buffer(a, (1,), "float32", offset_factor=1)
    B = TIR.match_buffer(b, (16,), "float32", offset_factor=1)
    C = TIR.match_buffer(c, (16,), "float32", offset_factor=1)
    with TIR.sblock("root"):
        TIR.reads(C[0:16], A[0], B[0:16])
        TIR.writes(C[0:16])
        for k in TIR.vectorized(16):
            C[k] = C[k] + A[0] * B[k]


TensorIntrin.register("sparsetir_docs_axpy16", _axpy, _axpy_in_vectors, override=True)


def _tensorize(c: Case) -> None:
    lanes = c.lanes()
    if c.sch.get(c.block).init is not None:
        c.sch.decompose_reduction(c.block, c.loops[0])
    hide_index_reads(c.sch, c.block)
    c.sch.tensorize(lanes, "sparsetir_docs_axpy16")


def _write(c: Case) -> Any:
    return c.sch.cache_write(c.block, 0, "global")


ANY = "`blockize` of any number of features"
# What each row of the table does. It is applied to a new case for each cell.
PRIMITIVES: dict[str, Callable[[Case], Any]] = {
    "`split` of features": Case.lanes,
    "`split` of the sum": lambda c: c.sch.split(c.j, [None, 4]),
    "`reorder` in a block": lambda c: c.sch.reorder(c.k, c.j),
    "`reorder` of rows and features": lambda c: c.sch.reorder(c.k, c.rows),
    "`fuse` of neighbours": lambda c: c.sch.fuse(*c.loops[-2:]),
    "`vectorize` of features": lambda c: c.sch.vectorize(c.lanes()),
    "`vectorize` of the sum": lambda c: c.sch.vectorize(c.j),
    "`unroll`": lambda c: c.sch.unroll(c.lanes()),
    "`parallel` of rows": lambda c: c.sch.parallel(c.rows),
    "`bind` of rows": lambda c: c.sch.bind(c.rows, "blockIdx.x"),
    "`cache_read` of B": lambda c: c.copy(),
    "`cache_read`, `compute_at` the sum": lambda c: c.sch.compute_at(c.copy(), c.j),
    "`cache_write` of C": _write,
    "`cache_write`, `reverse_compute_at` rows": lambda c: c.sch.reverse_compute_at(
        _write(c), c.rows
    ),
    "`compute_inline` of a copy": lambda c: c.sch.compute_inline(c.copy()),
    "`storage_align` of a copy": lambda c: c.sch.storage_align(c.copy(), 0, -2, 16, 8),
    "`transform_layout` of a copy": lambda c: c.sch.transform_layout(
        c.copy("A"), ("write", 0), lambda *x: x[::-1]
    ),
    "`transform_layout` of B": lambda c: c.sch.transform_layout(
        c.block, "B", lambda *x: x[::-1]
    ),
    "`decompose_reduction`": lambda c: c.sch.decompose_reduction(c.block, c.loops[0]),
    "`rfactor` of the sum": lambda c: c.sch.rfactor(c.j, 0),
    "`blockize` of features": lambda c: c.sch.blockize(c.lanes()),
    ANY: lambda c: c.sch.blockize(c.lanes()),
    "`tensorize` of features": _tensorize,
    "`pad_einsum`": lambda c: c.sch.pad_einsum(c.block, [16] * len(c.sch.get(c.block).iter_vars)),
    "`decompose_padding`": lambda c: c.sch.decompose_padding(c.block, c.loops[0]),
}  # fmt: skip

# Of what TVM and `sparsetir.lower` say, the part that tells refusals apart, and what to do.
REASONS = {
    "not in a chain|under the same block scope": "a block boundary stands between the loops, as "
    "the inner one's extent depends on the outer: change their order in stage I",
    "compact dataflow": "rows may be visited twice, so C is added to in place, in which TVM sees "
    'no reduction: `run_in_parallel` and `in_vectors` prove it, or take your `race="ignore"`',
    "not a data parallel": "visits add to one element: `rfactor`, or `precompute(.., lanes=)`",
    "stage pipeline|single block": "the init and each part write C: `precompute` in stage I",
    "a schedule may change|IndexError": "the layout is the caller's: transform a copy",
    "not a reduction block": "the init is a nest of its own already",
    "condition #3": "a condition stands in the block, as slots may be empty",
    "can not be blockized": "the last tile has a predicate: a constant size, or `split` in stage I",
    "Einsum": "made for dense products; `decompose_format` pads",
    "not a complete block": "made for a block that pads",
    "not match": "the block has a condition, which the intrinsic has not",
}


def apply(primitive: str, case: Case) -> None:
    """Apply a primitive, and lower what comes of it."""
    PRIMITIVES[primitive](case)
    gpu = {"kind": "cuda", "arch": "sm_80"}
    sparsetir.lower(case.sch, target=gpu if "bind" in primitive else "llvm")


def case_of(primitive: str, storage: str) -> Case:
    """A new case for a cell."""
    return Case(STORAGES[storage], None if primitive == ANY else FEATURES)


def refusal(primitive: str, case: Case) -> str:
    """The pattern of the reason why a primitive does not work, "" if it does."""
    try:
        apply(primitive, case)
    except Exception as error:  # TVM has several classes
        said = f"{type(error).__name__}: {error}"
        found = next((r for r in REASONS if re.search(r, said)), None)
        if found is None:
            raise
        return found
    return ""


def table() -> str:
    """A row for each primitive, a column for each storage, and the reasons."""
    lines = ["| | " + " | ".join(STORAGES) + " |", "|--" * (len(STORAGES) + 1) + "|"]
    letters: dict[str, str] = {"": "yes"}
    for primitive in PRIMITIVES:
        cells = []
        for storage in STORAGES:
            why = refusal(primitive, case_of(primitive, storage))
            cells.append(letters.setdefault(why, f"({len(letters)})"))
        lines.append(f"| {primitive} | {' | '.join(cells)} |")
    notes = [f"{n}. {REASONS[why]}" for n, why in enumerate(letters) if why]
    return "\n".join([*lines, "", *notes, ""])


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text()))
