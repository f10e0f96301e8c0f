"""The top-level loop nests of GPU programs, and their effects.

A nest that binds threads becomes a kernel launch. :class:`LoopNest` records the numbers of blocks
and threads, the buffers that it reads and writes, and whether its threads cooperate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer
from tvm_ffi import Object
from tvm_ffi.structural import WalkResult

from sparsetir.sparse_ir.annotations import RESTORE
from sparsetir.sparse_ir.nodes import nodes_of, stores_of
from sparsetir.sparse_ir.tir import free_vars

BLOCK_TAGS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
THREAD_TAGS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
# TVM's effect kinds of harmless calls: annotation, pure, reads state, part of another call.
HARMLESS_EFFECTS = (0, 1, 2, 4)
ATOMIC_ADDS = ("tirx.atomic_add", "tirx.cuda.atomic_add")
COPIES = "tirx.ptx.cp_async"  # of (address in shared memory, address to read from, bytes, ...)


def top_level(func: tirx.PrimFunc) -> list[Any]:
    """The statements of a function's root block, or of its body if it has none."""
    body = func.body.block.body if isinstance(func.body, s_tir.SBlockRealize) else func.body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def aliases(func: tirx.PrimFunc) -> dict[Any, Any]:
    """The buffers that alias the memory of others, each with that other."""
    owners: dict[Any, Any] = {}
    for node in nodes_of(tirx.DeclBuffer, func.body):
        owner = next((b for b in free_vars(node.data) if tirx.is_buffer_var(b)), None)
        if owner is not None:
            owners[node.buffer] = owner
    return owners


def count_launches(func: tirx.PrimFunc) -> int:
    """The number of kernels that a function launches: its outermost loops over blocks or threads.

    func : a function of stage II or III. A launch inside a host loop counts once.
    """
    launches: list[Any] = []

    def visit(node: Any) -> Any:
        if _binds(node):
            launches.append(node)
            return WalkResult.SKIP
        return WalkResult.ADVANCE

    tvm_ffi.structural_walk(func.body, (Object, visit), order="pre")
    return len(launches)


@dataclass
class Accesses:
    """The buffers that a statement accesses, without those that it allocates itself.

    adds : those that it only adds to atomically, by `atomicAdd` or TVM's atomic operations
    """

    reads: set[Any] = field(default_factory=set)
    writes: set[Any] = field(default_factory=set)
    adds: set[Any] = field(default_factory=set)

    def all(self) -> set[Any]:
        """All buffers accessed."""
        return self.reads | self.writes | self.adds

    def conflicts(self, other: Accesses) -> list[Any]:
        """The buffers with a dependence between the two: one writes what the other accesses."""
        buffers = self.writes & other.all() | other.writes & self.all()
        buffers |= self.adds & other.reads | other.adds & self.reads
        return sorted(buffers, key=lambda b: b.name)


class LoopNest:
    """A top-level statement.

    stmt : the statement
    name : the name of its first block
    blocks : the names of all its blocks
    grid : number of blocks by tag
    threads : number of threads by tag
    loops : the loops bound to blocks or threads, outer ones first
    accesses : the buffers that it accesses
    cooperation : how its threads cooperate, so that none of them may be left out; "" if they do not
    restores : whether it copies a format's values back, each to its own element
    problem : why it cannot be fused with other kernels; "" if it can
    """

    def __init__(self, stmt: Any, params: Any, aliases: Mapping[Any, Any]) -> None:
        self.stmt = stmt
        self.loops: list[Any] = [loop for loop in nodes_of(tirx.For, stmt) if _binds(loop)]
        self.grid: dict[str, Any] = {}
        self.threads: dict[str, int] = {}
        blocks = nodes_of(s_tir.SBlock, stmt)
        self.blocks = [str(block.name_hint) for block in blocks]
        self.restores = bool(blocks) and RESTORE in blocks[0].annotations
        self.name = self.blocks[0] if self.blocks else str(type(stmt).__name__)
        uses = _Uses(stmt, aliases)
        self.accesses = uses.found
        self.problem = self._problem(set(params))
        self.cooperation = "" if self.problem else _cooperation(stmt, self.loops, uses)

    def _problem(self, params: set[Any]) -> str:
        if any(map(_binds, nodes_of(tirx.AttrStmt, self.stmt))):
            return "expected loops bound to threads, got a 'thread_extent' attribute"
        if not self.loops:
            return (
                "expected loops bound to blocks and threads, got none (host code); bind some, or "
                "call sparsetir.horizontal_fuse of the schedule, which does"
            )
        outside = _outside_of_threads(self.stmt)
        if outside:
            return f"expected one launch, got {outside}"
        analyzer = Analyzer()
        for loop in self.loops:
            tag = str(loop.thread_binding.thread_tag)
            if not analyzer.can_prove_equal(loop.min, 0):
                return f"expected its loop over {tag} to start at 0, got {loop.min}"
            if tag in BLOCK_TAGS:
                extent = self.grid.setdefault(tag, loop.extent)
                if nodes_of(ir.TensorLoad, loop.extent) or not free_vars(loop.extent) <= params:
                    return (
                        f"expected a number of blocks ({tag}) that follows from the parameters, "
                        f"got {loop.extent}"
                    )
            elif tag not in THREAD_TAGS:
                return f"expected loops over blocks and threads, got one over {tag}"
            elif not isinstance(loop.extent, tirx.IntImm):
                return f"expected a constant number of threads ({tag}), got {loop.extent}"
            else:
                extent = self.threads.setdefault(tag, int(loop.extent))
            if not analyzer.can_prove_equal(extent, loop.extent):
                return f"expected equal extents of {tag}, got {extent} and {loop.extent}"
        for tag, realize in _reductions(self.stmt, self.loops):
            if tag in BLOCK_TAGS and _stores_to_memory(realize.block):
                return f"expected blocks that write for themselves, got a reduction over {tag}"
        return ""


def binds_threads(stmt: Any) -> bool:
    """Whether any part of a statement runs on GPU threads."""
    return any(map(_binds, [*nodes_of(tirx.For, stmt), *nodes_of(tirx.AttrStmt, stmt)]))


def accessed_by_host(stmt: Any) -> str:
    """A device buffer that the host would access, and where; "" if there is none.

    stmt : of a GPU function. Outside of loops over blocks and threads the host runs, and it passes
        the extents of these to a kernel at its launch
    """
    if _binds(stmt):
        for loop in [n for n in nodes_of(tirx.For, stmt) if _binds(n)]:
            for load in nodes_of(ir.TensorLoad, loop.min, loop.extent):
                return f"'{load.source.name}' in the extent of '{loop.loop_var.name}'"
        return ""
    parts: list[Any] = []
    if isinstance(stmt, tirx.For):
        where, heads, parts = f"'{stmt.loop_var.name}'", [stmt.min, stmt.extent], [stmt.body]
    elif isinstance(stmt, s_tir.SBlockRealize):
        where, heads = f"'{stmt.block.name_hint}'", [*stmt.iter_values, stmt.predicate]
        parts = [p for p in (stmt.block.init, stmt.block.body) if p is not None]
    elif isinstance(stmt, tirx.SeqStmt):
        where, heads, parts = "", [], list(stmt.seq)
    else:
        where, heads = "a statement", [stmt]
    for load in nodes_of(ir.TensorLoad, *heads):
        return f"'{load.source.name}' in {where}"
    for store in stores_of(*heads) if not parts else []:
        return f"'{store.buffer.name}' in {where}"
    return next(filter(None, map(accessed_by_host, parts)), "")


def _binds(node: Any) -> bool:
    if isinstance(node, tirx.For):
        return node.kind == tirx.ForKind.THREAD_BINDING
    return isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent"


def _outside_of_threads(stmt: Any) -> str:
    """Statements around a nest's outermost thread loop that prevent moving it inside."""
    while not _binds(stmt):
        if isinstance(stmt, tirx.For) and isinstance(stmt.extent, tirx.IntImm):
            if int(stmt.extent) == 1:
                stmt = stmt.body
                continue
        if isinstance(stmt, s_tir.SBlockRealize) and stmt.block.init is None:
            if not stmt.block.alloc_buffers:
                stmt = stmt.block.body
                continue
            return f"the allocation of '{stmt.block.alloc_buffers[0].name}' on the host"
        if isinstance(stmt, tirx.For):
            return f"one for each step of the host's loop '{stmt.loop_var.name}'"
        return f"{type(stmt).__name__} on the host around it"
    return ""


class _Uses:
    """Collects the accesses of a statement.

    found : the accesses of buffers from outside
    scoped : all buffers that are accessed or allocated, by variable
    calls : the calls that are not atomic additions
    """

    def __init__(self, stmt: Any, aliases: Mapping[Any, Any]) -> None:
        self.found = Accesses()
        self.scoped: set[Any] = set()
        self.calls: list[Any] = []
        self._private: set[Any] = set()
        self._matched: dict[Any, Any] = dict(aliases)
        self._walk(stmt)
        for kind in (self.found.reads, self.found.writes, self.found.adds):
            self.scoped |= kind
            kind -= self._private

    def _walk(self, node: Any) -> None:
        tvm_ffi.structural_walk(
            node,
            [
                (s_tir.SBlock, self._block),
                (tirx.AllocBuffer, lambda n: self._allocated([n.buffer])),
                (tirx.BufferStore, lambda n: self._use(n.buffer, self.found.writes)),
                (ir.TensorLoad, lambda n: self._use(n.source, self.found.reads)),
                (ir.Call, self._call),
            ],
            order="pre",
        )

    def _block(self, block: Any) -> Any:
        self._matched |= {m.buffer: m.source.source for m in block.match_buffers}
        return self._allocated(block.alloc_buffers)

    def _allocated(self, buffers: Any) -> Any:
        self._private |= set(buffers)
        self.scoped |= set(buffers)
        return WalkResult.ADVANCE

    def _use(self, buf: Any, *kinds: set[Any]) -> Any:
        while buf in self._matched:
            buf = self._matched[buf]
        for kind in kinds:
            kind.add(buf)
        return WalkResult.ADVANCE

    def _call(self, call: Any) -> Any:
        name, args = _op_name(call), list(call.args)
        pointer = _added_to(name, args)
        if pointer is not None:
            self._address(pointer, self.found.adds)
            for arg in args:
                if arg is not pointer:
                    self._walk(arg)
            return WalkResult.SKIP
        if name in ("tirx.address_of", "tirx.tvm_access_ptr"):
            self._address(call, *self._directions(name, args))
            return WalkResult.SKIP
        if name.startswith(COPIES) and len(args) > 1 and _op_name(args[1]) == "tirx.address_of":
            self.calls.append(call)
            self._address(args[1], self.found.reads)
            for arg in (args[0], *args[2:]):
                self._walk(arg)
            return WalkResult.SKIP
        self.calls.append(call)
        for arg in args:
            if tirx.is_buffer_var(arg):
                self._use(arg, self.found.reads, self.found.writes)
        return WalkResult.ADVANCE

    def _directions(self, name: str, args: list[Any]) -> list[set[Any]]:
        """The accesses that a pointer permits, which `tvm_access_ptr` encodes in bits."""
        both = [self.found.reads, self.found.writes]
        if name != "tirx.tvm_access_ptr" or not isinstance(args[-1], tirx.IntImm):
            return both
        return [kind for n, kind in enumerate(both) if int(args[-1]) >> n & 1]

    def _address(self, pointer: Any, *kinds: set[Any]) -> None:
        """Record an access of the memory at an address; indices inside count as reads."""
        for arg in pointer.args:
            if isinstance(arg, ir.TensorLoad):
                self._use(arg.source, *kinds)
                for index in arg.indices:
                    self._walk(index)
            elif _op_name(arg) == "tirx.buffer_data":
                self._use(arg.args[0], *kinds)
            elif tirx.is_buffer_var(arg):
                self._use(arg, *kinds)
            else:
                self._walk(arg)


def _op_name(call: Any) -> str:
    return str(getattr(getattr(call, "op", None), "name", ""))


def _added_to(name: str, args: list[Any]) -> Any:
    """The pointer operand of an atomic addition, None for another call."""
    n = 0 if name in ATOMIC_ADDS else None
    if name == "tirx.call_extern" and str(getattr(args[0], "value", "")) == "atomicAdd":
        n = 1
    if n is None or _op_name(args[n]) not in ("tirx.address_of", "tirx.tvm_access_ptr"):
        return None
    return args[n]


def _cooperation(stmt: Any, loops: list[Any], uses: _Uses) -> str:
    for buf in sorted(uses.scoped, key=lambda b: b.name):
        scope = str(buf.ty.storage_scope)
        if scope not in ("", "global", "local"):
            return f"'{buf.name}' in {scope} memory"
    for tag, _ in _reductions(stmt, loops):
        if tag in THREAD_TAGS:
            return f"a reduction over {tag}"
    for call in uses.calls:
        is_op = isinstance(call.op, ir.Op)
        if not is_op or call.op.get_attr("TCallEffectKind") not in HARMLESS_EFFECTS:
            called = call.args[0].value if _op_name(call) == "tirx.call_extern" else _op_name(call)
            return f"a call of {called}"
    return ""


def _reductions(stmt: Any, loops: list[Any]) -> list[tuple[str, Any]]:
    """The blocks that reduce over some of these loops, each with the tag of the loop."""
    tags = {loop.loop_var: str(loop.thread_binding.thread_tag) for loop in loops}
    return [
        (tags[var], realize)
        for realize in nodes_of(s_tir.SBlockRealize, stmt)
        for iter_var, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
        if iter_var.iter_type == tirx.IterVar.CommReduce
        for var in free_vars(value) & set(tags)
    ]


def _stores_to_memory(block: Any) -> bool:
    return any(s.buffer.ty.storage_scope in ("", "global") for s in stores_of(block))
