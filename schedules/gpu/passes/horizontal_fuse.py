"""Horizontal fusion: many loop nests on one GPU grid (SparseTIR, section 3.4.2).

A composable format gives a program one loop nest per part, and each nest would be a separate kernel
launch. The pass places them side by side on one grid. Before::

    for i in T.thread_binding(m, thread="blockIdx.x"):
        for k in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("left"): ...
    for i in T.thread_binding(n, thread="blockIdx.x"):
        for k in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("right"): ...

After::

    for block in T.thread_binding(T.max(m + n, 1), thread="blockIdx.x"):
        if block < m:
            with T.sblock("left_nest"):
                i = T.axis.spatial(m, block)
                for k in T.thread_binding(32, thread="threadIdx.x"):
                    with T.sblock("left"): ...
        else:
            if block < m + n:
                for tx in T.thread_binding(32, thread="threadIdx.x"):
                    if tx < 8:
                        with T.sblock("right_nest"):
                            i = T.axis.spatial(n, block - m)
                            for k in T.thread_binding(32, thread="threadIdx.x"):
                                with T.sblock("right"): ...

The conditions on `block` are uniform over its threads, so that these do not diverge. Loops over
threads remain in place, for TVM to recognise reductions over threads; all of one dimension are one
thread variable. TVM does not place barriers below a condition: if the threads of any nest
synchronise, the nests are put in loops of one iteration or none, `range(T.Cast("int32", block <
m))`, which costs a further barrier per block; nvcc turns them into branches. Nests share their
shared memory: the kernel uses that of the largest; only that of reductions over threads adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from sparsetir.schedules.passes.launches import (
    BLOCK_TAGS,
    THREAD_TAGS,
    LoopNest,
    aliases,
    top_level,
)
from sparsetir.schedules.passes.parallel_loops import thread_axis
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import substitute
from sparsetir.sparse_ir.tir import as_dtype, as_one, block_with, dtype_of, loop_over
from sparsetir.sparse_ir.traversal import map_expr

MAX_THREADS = 1024  # per block, on any NVIDIA GPU
# TVM expands a nest's expressions of its block number, `(block - m) * 128`: where the nest itself
# stays below 2^31, `block * 128` need not.
BLOCK_DTYPE = "int64"


def horizontal_fuse(
    func: tirx.PrimFunc,
    names: Sequence[str] | None = None,
    *,
    independent: Sequence[str] = (),
    max_threads: int = MAX_THREADS,
) -> tirx.PrimFunc:
    """Fuse loop nests that would each be a kernel into one kernel.

    func : a scheduled function of stage II or III, whose loops are bound to blocks and threads
    names : a block's name in each nest; the fused nest takes the place of the first of them.
        None: every maximal run of adjacent nests that can be fused, without refusals
    independent : names of buffers where each nest writes disjoint elements, and reads none that
        another nest writes. Otherwise nests are not fused if one accesses what another writes,
        unless they only add to it atomically: fused, they run in no particular order. With `names`
        None this does not apply to a nest that only stores beside one that also loads: the first is
        taken for the init of the second. Two buckets of `hyb`, and its column parts, may hold
        pieces of one row: name C only if rows fit their bucket and there is one part.
    max_threads : the most threads that a block may have

    The grid is one-dimensional and has as many blocks as the nests together, in order, or one idle
    block if there are none; more than 2^31 - 1 cannot be launched. Thread dimensions are the maxima
    of the nests'; a nest with fewer leaves the others idle, which is impossible if its threads
    synchronise (barriers, shared memory, reductions over threads).

    Returns the new function; `func` is not modified. Raises ScheduleError, which names the nest,
    for a name that no nest or several have, an argument `independent` that names no buffer, and
    with `names` for nests that cannot be fused.
    """
    parts = top_level(func)
    nests = [LoopNest(part, func.params, aliases(func)) for part in parts]
    _check_buffers(nests, independent)
    if names is None:
        groups = _runs(nests, set(independent), max_threads)
    else:
        groups = [_chosen(nests, names, set(independent), max_threads)]
    for group in groups:
        if len(group) > 1:
            parts[group[0]] = _fuse([nests[n] for n in group])
            for n in group[1:]:
                parts[n] = None
    return _with_parts(func, [p for p in parts if p is not None])


def _with_parts(func: tirx.PrimFunc, parts: list[Any]) -> tirx.PrimFunc:
    body = as_one(parts)
    if isinstance(func.body, s_tir.SBlockRealize):
        root = block_with(func.body.block, body=body)
        body = s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, root)
    return func.with_body(body)


def _check_buffers(nests: list[LoopNest], independent: Sequence[str]) -> None:
    names_used = sorted({b.name for nest in nests for b in nest.accesses.all()})
    for name in independent:
        if name not in names_used:
            raise ScheduleError(
                f"horizontal_fuse: argument 'independent': expected buffers among {names_used}, "
                f"got '{name}'"
            )


def _runs(nests: list[LoopNest], independent: set[str], max_threads: int) -> list[list[int]]:
    """Runs of adjacent nests that can be fused, by index."""
    groups: list[list[int]] = []
    for n, nest in enumerate(nests):
        group = [nests[m] for m in groups[-1]] if groups else []
        covered = {b for b in independent if not _init_beside_update(b, [*group, nest])}
        if group and not _refusal(group, nest, covered, max_threads):
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _init_beside_update(name: str, nests: list[LoopNest]) -> bool:
    """Whether some nests only store to a buffer, and others load from it."""
    uses = [
        (buf in nest.accesses.writes, buf in nest.accesses.reads | nest.accesses.adds)
        for nest in nests
        for buf in nest.accesses.all()
        if buf.name == name
    ]
    return (True, False) in uses and any(loads for _, loads in uses)


def _chosen(
    nests: list[LoopNest], names: Sequence[str], independent: set[str], max_threads: int
) -> list[int]:
    """The indices of the named nests, in program order."""
    group = sorted({_find(nests, name) for name in names})
    for place, n in enumerate(group):
        why = _refusal([nests[m] for m in group[:place]], nests[n], independent, max_threads)
        if why:
            raise ScheduleError(f"horizontal_fuse: {why}")
        for m in range(group[0] + 1, n):
            shared = nests[n].accesses.conflicts(nests[m].accesses) if m not in group else ()
            for buf in shared:
                raise ScheduleError(
                    f"horizontal_fuse: nest '{nests[n].name}': expected to move before "
                    f"'{nests[m].name}', which is not named, but one writes '{buf.name}' and the "
                    "other uses it"
                )
    return group


def _find(nests: list[LoopNest], name: str) -> int:
    owners = [n for n, nest in enumerate(nests) if name in nest.blocks]
    if len(owners) != 1:
        raise ScheduleError(
            f"horizontal_fuse: argument 'names': expected a block of one nest, got '{name}', which "
            f"{len(owners)} nests have; the nests are {[nest.name for nest in nests]}"
        )
    return owners[0]


def _refusal(group: list[LoopNest], nest: LoopNest, independent: set[str], max_threads: int) -> str:
    """Return why a nest cannot be fused with others, or ""."""
    if nest.problem or any(other.problem for other in group):
        bad = nest if nest.problem else next(other for other in group if other.problem)
        return f"nest '{bad.name}': {bad.problem}"
    joined = [*group, nest]
    shape = _common_threads(joined)
    count = 1
    for extent in shape.values():
        count *= extent
    if count > max_threads:
        return (
            f"nest '{nest.name}': expected at most {max_threads} threads, got {count} as {shape} "
            f"together with {[other.name for other in group]}"
        )
    for member in joined:
        fewer = _fewer_threads(member, shape)
        if fewer and member.cooperation:
            tag, extent = next(iter(fewer.items()))
            return (
                f"nest '{member.name}': expected {shape[tag]} threads along {tag} like the others, "
                f"since its threads work together ({member.cooperation}), got {extent}"
            )
    for other in group:
        for buf in nest.accesses.conflicts(other.accesses):
            apart = other.restores and nest.restores
            apart = apart and buf not in other.accesses.reads | nest.accesses.reads
            if buf.name not in independent and not apart:
                return (
                    f"nests '{other.name}' and '{nest.name}': expected no order between them, but "
                    f"one writes '{buf.name}' and the other uses it; name it in 'independent' if "
                    "they use different elements, or let all of them add to it by atomics"
                )
    return ""


def _common_threads(nests: list[LoopNest]) -> dict[str, int]:
    tags = [tag for tag in THREAD_TAGS if any(tag in nest.threads for nest in nests)]
    return {tag: max(nest.threads.get(tag, 1) for nest in nests) for tag in tags}


def _fewer_threads(nest: LoopNest, shape: dict[str, int]) -> dict[str, int]:
    """The nest's extents in the dimensions in which it has fewer threads than the grid."""
    have = {tag: nest.threads.get(tag, 1) for tag in shape}
    return {tag: extent for tag, extent in have.items() if extent < shape[tag]}


def _fuse(nests: list[LoopNest]) -> tirx.Stmt:
    grid = _Grid(nests)
    if any(nest.cooperation for nest in nests):
        body = grid.select_by_loops()
    else:
        body = grid.select_by_branches()
    kind, axis = tirx.ForKind.THREAD_BINDING, thread_axis("blockIdx.x")
    return loop_over(grid.block, grid.total, body, kind, axis, grid.annotations)


class _Grid:
    """The common grid of some nests.

    block : the index of a block
    total : the number of blocks
    """

    def __init__(self, nests: list[LoopNest]) -> None:
        self.block = tirx.Var("block", BLOCK_DTYPE)
        self.annotations: dict[str, Any] = {}
        self.shape = _common_threads(nests)
        loops = [loop for nest in nests for loop in nest.loops]
        self._thread_dtypes = {
            str(loop.thread_binding.thread_tag): dtype_of(loop.loop_var) for loop in loops[::-1]
        }
        self._analyzer = Analyzer()
        ends: list[Any] = [as_dtype(0, BLOCK_DTYPE)]
        for nest in nests:
            size: Any = as_dtype(1, BLOCK_DTYPE)
            for extent in nest.grid.values():
                size = size * as_dtype(extent, BLOCK_DTYPE)
            ends.append(self._analyzer.simplify(ends[-1] + size))
        self._never_empty = self._analyzer.can_prove(ends[-1] > 0)
        one = as_dtype(1, BLOCK_DTYPE)
        self.total = ends[-1] if self._never_empty else tirx.max(ends[-1], one)
        self._ends = ends[1:]
        self._starts = ends[:-1]
        self._bodies = [
            self._placed(nest, start) for nest, start in zip(nests, self._starts, strict=True)
        ]

    def select_by_branches(self) -> tirx.Stmt:
        """Each nest guarded by whether the block belongs to it, selected by bisection."""
        *others, last = self._bodies
        if not self._never_empty:
            last = tirx.IfThenElse(self.block < self._ends[-1], last, None)
        return self._halve([*others, last], self._ends)

    def _halve(self, bodies: list[tirx.Stmt], ends: list[Any]) -> tirx.Stmt:
        middle = len(bodies) // 2
        if middle == 0:
            return bodies[0]
        first = self._halve(bodies[:middle], ends[:middle])
        second = self._halve(bodies[middle:], ends[middle:])
        return tirx.IfThenElse(self.block < ends[middle - 1], first, second)

    def select_by_loops(self) -> tirx.Stmt:
        """Nests in loops that run once in their own blocks and never in others."""
        steps: list[tirx.Stmt] = []
        for start, end, body in zip(self._starts, self._ends, self._bodies, strict=True):
            hit = self.block < end if not steps else tirx.all(start <= self.block, self.block < end)
            count, step = tirx.Var("own", "int32"), tirx.Var("step", "int32")
            steps += [tirx.Bind(count, tirx.Cast("int32", hit)), loop_over(step, count, body)]
        return tirx.SeqStmt(steps)

    def _placed(self, nest: LoopNest, start: Any) -> tirx.Stmt:
        """A nest on blocks from `start` on, and on the grid's threads.

        Its loops over blocks become iterators of an enclosing block: expressions of these remain
        affine; otherwise TVM silently fails to recognise reductions over threads.
        """
        iter_vars: list[Any] = []
        numbers: list[Any] = []

        def visit(loop: Any) -> Any:
            if loop.kind != tirx.ForKind.THREAD_BINDING:
                return loop
            tag, var = str(loop.thread_binding.thread_tag), loop.loop_var
            if tag in self.shape:
                return self._on_common_threads(loop, tag)
            self.annotations |= dict(loop.annotations)
            domain = ir.Range.from_min_extent(loop.min, loop.extent)
            iter_vars.append(tirx.IterVar(domain, var, tirx.IterVar.DataPar))
            numbers.append(_number_along(nest, tag, self.block, start, dtype_of(var)))
            return loop.body

        stmt = map_expr(nest.stmt, [(tirx.For, visit)])
        if iter_vars:
            uses = nest.accesses
            reads, writes = (_whole(b) for b in (uses.reads, uses.writes | uses.adds))
            block = s_tir.SBlock(iter_vars[::-1], reads, writes, f"{nest.name}_nest", stmt)
            stmt = s_tir.SBlockRealize(numbers[::-1], True, block)
        return self._for_fewer_threads(stmt, _fewer_threads(nest, self.shape))

    def _on_common_threads(self, loop: Any, tag: str) -> tirx.Stmt:
        """A loop over threads with the extent and the type common to all nests."""
        var, extent = loop.loop_var, as_dtype(self.shape[tag], self._thread_dtypes[tag])
        body = loop.body
        if dtype_of(var) != dtype_of(extent):
            var = tirx.Var(var.name, dtype_of(extent))
            body = substitute(body, {loop.loop_var: as_dtype(var, dtype_of(loop.loop_var))})
        return loop_over(var, extent, body, loop.kind, thread_axis(tag), loop.annotations)

    def _for_fewer_threads(self, stmt: tirx.Stmt, fewer: dict[str, int]) -> tirx.Stmt:
        """A statement guarded to run on the first threads only."""
        threads = {tag: tirx.Var("t" + tag[-1], self._thread_dtypes[tag]) for tag in fewer}
        if threads:
            among = [v < as_dtype(fewer[tag], dtype_of(v)) for tag, v in threads.items()]
            stmt = tirx.IfThenElse(tirx.all(*among), stmt, None)
        for tag, var in threads.items():
            kind = tirx.ForKind.THREAD_BINDING
            stmt = loop_over(var, self.shape[tag], stmt, kind, thread_axis(tag))
        return stmt


def _whole(buffers: set[Any]) -> list[Any]:
    """The regions declared by a block around a whole nest."""
    shared = [b for b in buffers if b.ty.storage_scope in ("", "global")]
    return [
        tirx.BufferRegion(
            b, [ir.Range.from_min_extent(as_dtype(0, dtype_of(d)), d) for d in b.ty.shape]
        )
        for b in sorted(shared, key=lambda b: b.name)
    ]


def _number_along(nest: LoopNest, tag: str, block: Any, start: Any, dtype: str) -> Any:
    """A block's index along one dimension of the nest's own grid, in which x varies fastest."""
    number = as_dtype(Analyzer().simplify(block - start), "int32")  # CUDA launches no more blocks
    if not (isinstance(start, tirx.IntImm) and int(start) == 0):
        # TVM cancels terms in indices of local memory that it knows to be nonnegative.
        number = tirx.max(number, as_dtype(0, "int32"))
    tags = [t for t in BLOCK_TAGS if t in nest.grid]
    for before in tags[: tags.index(tag)]:
        number = tirx.truncdiv(number, _divisor(nest.grid[before]))
    if tag != tags[-1]:
        number = tirx.truncmod(number, _divisor(nest.grid[tag]))
    return as_dtype(number, dtype)


def _divisor(extent: Any) -> Any:
    """A number of blocks that is safe to divide by, since TVM hoists the division."""
    extent = as_dtype(extent, "int32")
    return extent if isinstance(extent, tirx.IntImm) else tirx.max(extent, as_dtype(1, "int32"))
