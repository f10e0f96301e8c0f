"""Explanations of programs: loops with their proofs, the schedule, the roofline, the stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tvm
from numpy.lib.stride_tricks import as_strided
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from sparsetir._versions import VERSION
from sparsetir.runtime import pool
from sparsetir.runtime.bound_arguments import bound_arguments
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.texts import Section, as_html, as_markdown, as_text, many, micros, readable
from sparsetir.schedules.loop_shapes import loop_shapes
from sparsetir.schedules.targets import TargetLike, resolve_target
from sparsetir.sparse_ir import legal
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.nodes import (
    Axis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    attached_axes,
    entry_name,
    flat_axes,
    iterations_around,
    nodes_of,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.races import FREE, Fact
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.tir import as_dtype, block_with, dtype_of, values_of
from sparsetir.sparse_ir.traversal import map_expr

Facts = dict[str, Any]
SECONDS = 0.5  # of measuring
WARM_UP = 3
MOST_REPEATED = 2 * 2**20  # bytes of a part that is copied many times in one call
LEAST_REPEATED = 600  # NumPy keeps the interpreter's lock below 500 elements
PEAK_SIZE = 1536
LONG = 200  # lines of loops from which they are shown with the stages
NOT_KNOWN = (
    "Not known without arguments: in Python a dict of them; --graph cora --arg feat=64 on the "
    "command line, or --arg for each array."
)
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, ir.Call)
LEFT_OUT = ("T.reads(", "T.writes(", "T.sblock_attr(", "T.func_attr(", "# with", "T.evaluate(0)")
NO_ARITHMETIC = ("tirx.if_then_else", "tirx.likely", "tirx.reinterpret")


class ProgramExplanation:
    """The result of :func:`sparsetir.explain` for a program; `print` shows it.

    Parameters
    ----------
    title : str
        The program, its sizes, and the origin of its schedule.
    facts : dict
        The contents of the text as data, as `sparsetir explain --json` prints them. "loops" has a
        dict for each loop: "iteration", "loop", "axis", "kind", "parallel", "why"; "order" says by
        iteration whether its loops may be reordered; "innermost" describes by block how its
        innermost loop was lowered; "scheduled" is the text of the kernel's loops; "roofline" is
        empty without arguments, and has no times if nothing was run; also "target", "sizes" and
        "schedule".
    kernel : Kernel
        The kernel, whose `stages` are shown.
    program : SparseFunc
        The program as written, or as scheduled so far.

    Attributes
    ----------
    sections : list of Section
        The parts of the text, in order.
    """

    def __init__(self, title: str, facts: Facts, kernel: Kernel, program: SparseFunc) -> None:
        self.title, self.facts, self.kernel = title, facts, kernel
        self.sections = _sections(facts, kernel, program)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self, *, stages: bool = False) -> str:
        """The explanation as lines of text.

        Parameters
        ----------
        stages : bool
            Add the text of all stages, and of LLVM's or CUDA's source.

        Returns
        -------
        str
        """
        return as_text(self.title, self.sections, folded=stages)

    def html(self) -> str:
        """The explanation as a page in one file, with the text of all stages.

        Returns
        -------
        str
        """
        return as_html(self.title, self.sections)

    def markdown(self) -> str:
        """The explanation as Markdown, with the text of all stages.

        Returns
        -------
        str
        """
        return as_markdown(self.title, self.sections)


def explain_program(
    what: SparseFunc | Schedule | Kernel,
    arguments: object = None,
    *,
    schedule: Callable[..., object] | None = None,
    target: TargetLike | None = None,
    name: str = "",
    schedule_name: str | None = None,
) -> ProgramExplanation:
    """Explain a program; the arguments are those of :func:`sparsetir.explain`.

    name : for the title; by default the function's
    schedule_name : for title and facts; by default the name of `schedule`
    """
    if isinstance(what, Kernel):
        program, by = _kernel_function(what, schedule, target), "as it was built"
    elif isinstance(what, Schedule):
        program, by = what.func, "by its schedule"
    else:
        program, by = what, "by the default schedule"
    if schedule is not None:
        schedule_name = schedule_name or getattr(schedule, "__name__", str(schedule))
        by = f"by the schedule {schedule_name}"
    values = _arguments(program, arguments)
    if isinstance(what, Kernel):
        kernel = what
    else:
        resolved = resolve_target("llvm" if target is None else target, "explain")
        kernel = build(what, resolved, schedule=schedule)
    if values:  # they may choose the order of rows
        kernel = kernel.chosen_for(values)
    for place in kernel.signature.outputs if values else ():
        written = kernel.signature.names[place]
        values[written] = values[written].copy()
    stages, on_cpu = kernel.stages, kernel.target.kind.name == "llvm"
    run = measured(kernel, values, pool.count()) if values and on_cpu else None
    computed = kernel.compute(values) if values and kernel.computed else {}
    sizes = {n: v for n, v in values.items() if isinstance(v, int | float)}
    facts = {
        "target": str(kernel.target),
        "sizes": sizes,
        "schedule": schedule_name,
        "loops": loops_of(stages["I"]),
        "order": orders_of(stages["I"]),
        "innermost": loop_shapes(stages["II"], with_sizes(stages["II scheduled"], sizes))
        if on_cpu
        else {},
        "scheduled": scheduled_loops(stages["II scheduled"], sizes),
        "roofline": roofline(work_of(program, values, computed), run) if values else {},
    }
    shown = ", ".join(f"{n}={v:,}" for n, v in sizes.items())
    title = f"{name or program.name}{f' ({shown})' if shown else ''}, {by}"
    return ProgramExplanation(title, facts, kernel, program)


def _kernel_function(kernel: Kernel, schedule: object, target: object) -> SparseFunc:
    """The stage-I function of a kernel."""
    for argument, value in (("schedule", schedule), ("target", target)):
        if value is not None:
            expected = "none for a kernel, which is built"
            raise wrong("explain", argument, expected, f"{value!r}")
    if not isinstance(kernel.stages.get("I"), SparseFunc):
        got = f"the kernel '{kernel.name}', of " + (
            "a function of stage II" if kernel.stages else "a file, which holds no stages"
        )
        raise wrong("explain", "what", "a kernel of a stage-I function", got)
    return kernel.stages["I"]


def _arguments(program: SparseFunc, arguments: object) -> Facts:
    """All arguments by name; {} if none are passed."""
    if arguments is None or (isinstance(arguments, Mapping) and not arguments):
        return {}
    caller = "explain: argument 'arguments'"
    return bound_arguments(program, arguments, caller, np.random.default_rng(0))


def _schedule_section(facts: Facts) -> Section:
    """The innermost loops and the kernel's loops, which without sizes may be hundreds of lines."""
    shapes = [f"{block}: {shape}." for block, shape in facts["innermost"].items()]
    loops = facts["scheduled"]
    branches = "branches that these sizes take" if facts["sizes"] else "all branches"
    title, lines = f"The loops of the kernel ({branches})", loops.count("\n") + 1
    if lines <= LONG:
        return Section("Schedule", [*shapes, f"{title}:"], code=loops)
    text = f"{title} have {lines} lines, which --stages, or text(stages=True) in Python, shows"
    less = "" if facts["sizes"] else "; with arguments there are only the branches of their sizes"
    return Section("Schedule", [*shapes, f"{text}{less}."], folded=[(title, loops)])


def _sections(facts: Facts, kernel: Kernel, program: SparseFunc) -> list[Section]:
    heads = ("iteration", "loop", "axis", "kind", "parallel", "why")
    rows = [tuple(loop[h] for h in heads) for loop in facts["loops"]]
    machine = roofline_rows(facts["roofline"]) if facts["roofline"] else []
    texts = [(f"stage {name}", readable(func)) for name, func in kernel.stages.items()]
    plain = readable(program)
    moved = [] if plain == texts[0][1] else [("as it was written", plain)]
    orders = [f"{name}: {order}." for name, order in facts["order"].items()]
    source = "source", kernel.source().rstrip("\n")
    by = f"sparsetir {VERSION}, TVM {tvm.__version__}, target {facts['target']}"
    return [
        Section("Program", code=texts[0][1], folded=moved),
        Section("Loops", orders, heads, rows),
        _schedule_section(facts),
        Section("Roofline", [] if machine else [NOT_KNOWN], rows=machine),
        Section("Stages", folded=[("facts", str(known(kernel.stages["I"]))), *texts[1:], source]),
        Section("Made by", [by]),
    ]


def loops_of(func: SparseFunc) -> list[dict[str, str]]:
    """The loops of a stage-I function's iterations: whether each may be parallel, and why."""
    out: list[dict[str, str]] = []
    for it in sparse_iterations(func):
        facts = legal.parallelizable(func, it)
        for place, (node, begin, end) in enumerate(it.entries()):
            coords = ", ".join(v.name for v in it.vars[begin:end])
            kinds = set(it.kinds[begin:end])
            out.append(
                {
                    "iteration": it.name,
                    "loop": coords,
                    "axis": entry_name(node),
                    "kind": "spatial" if kinds == {"S"} else "reduction",
                    "parallel": "yes" if facts[place] == FREE else "no",
                    "why": _why(func, it, place, facts[place], coords),
                }
            )
    return out


def _why(func: SparseFunc, it: SparseIteration, place: int, fact: Fact, coords: str) -> str:
    pairs = legal.evidence(func, it, place)
    if fact == FREE:
        shown = "; ".join(", ".join(_access(buffer, a) for a in every) for buffer, every in pairs)
        return f"visits that differ in {coords} access other elements: {shown}"
    if not pairs:
        return f"a race: {coords} may be the same under another parent"
    buffer, (one, other) = pairs[0]
    pair = " and ".join(dict.fromkeys((_access(buffer, one), _access(buffer, other))))
    if fact.kind == "reduction":
        return f"a reduction: visits that differ in {coords} update the same {pair}"
    return f"a race: visits that differ in {coords} may meet at {pair}"


def _access(buffer: SparseBuffer, indices: list[tirx.PrimExpr]) -> str:
    return f"{buffer.name}[{', '.join(map(str, indices))}]"


def orders_of(func: SparseFunc) -> dict[str, str]:
    """For each iteration, whether its loops may be reordered, or the dependence against it."""
    return {
        it.name: str(legal.reorderable(func, it) or "its visits may come in any order")
        for it in sparse_iterations(func)
    }


def with_sizes(func: tirx.PrimFunc, sizes: Mapping[str, object]) -> tirx.PrimFunc:
    """A function of stage II without the branches that these sizes do not take."""
    known = _constants(func, sizes)
    analyzer = Analyzer()

    def taken(branch: tirx.IfThenElse) -> tirx.Stmt:
        test = analyzer.simplify(substitute(branch.condition, known))
        if not isinstance(test, tirx.IntImm):
            return branch
        return branch.then_case if int(test) else branch.else_case or tirx.Evaluate(0)

    return func.with_body(map_expr(func.body, [(tirx.IfThenElse, taken)]))


def scheduled_loops(func: tirx.PrimFunc, sizes: Mapping[str, object]) -> str:
    """Loops, branches and stores of a function of stage II, without the blocks' declarations.

    sizes : numbers by parameter; if they decide a branch, only the one taken is shown
    """

    def inlined(realize: s_tir.SBlockRealize) -> tirx.Stmt:
        block, values = realize.block, values_of(realize)
        init = None if block.init is None else substitute(block.init, values)
        block = block_with(block, body=substitute(block.body, values), init=init)
        return s_tir.SBlockRealize(realize.iter_values, realize.predicate, block, realize.span)

    body = map_expr(with_sizes(func, sizes).body, [(s_tir.SBlockRealize, inlined)])
    text = readable(tirx.PrimFunc(func.params, body, func.ret_type, func.attrs, func.span))
    out, open_blocks = list[str](), list[int]()
    for line in text[text.index("def ") :].partition(":\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        open_blocks = [n for n in open_blocks if n < indent]
        if line.lstrip().startswith("with T.sblock("):
            open_blocks.append(indent)
        elif not line.lstrip().startswith(LEFT_OUT) and " = T.axis." not in line:
            out.append(line[4 + 4 * len(open_blocks) :] if indent >= 4 else line)
    return "\n".join(out)


def _constants(
    func: tirx.PrimFunc | SparseFunc, values: Mapping[str, object]
) -> dict[object, object]:
    """The integers among arguments, by parameter."""
    numbers = {p: values.get(p.name) for p in func.params}
    return {p: as_dtype(x, dtype_of(p)) for p, x in numbers.items() if isinstance(x, int)}


def work_of(
    func: SparseFunc, arguments: Mapping[str, object], computed: Mapping[str, object] | None = None
) -> Facts:
    """Floating-point operations, visits and bytes of a stage-I function as written.

    computed : computed parameters by name, which do not count as bytes

    A branch counts as taken. "flops" and "visits" are None if sizes and index arrays do not
    determine them: for merged axes, and loops of TIR. "bytes" counts each array once: the least
    memory traffic.
    """
    known = {**arguments, **(computed or {})}
    counts = [
        (_visits(func, [*iterations_around(func, it), it], known), _operations(stores))
        for it in sparse_iterations(func)
        if (stores := legal.own_stores(it))
    ]
    counted = [(visits, each) for visits, each in counts if visits is not None]
    every = bool(counts) and len(counted) == len(counts)
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
    return {
        "visits": sum(v for v, _ in counted) if every else None,
        "flops": sum(v * n for v, n in counted) if every else None,
        "bytes": sum(int(x.nbytes) for x in arrays),
    }


def _operations(stores: list[tirx.Stmt]) -> int:
    """Floating-point operations in the values of stores."""
    return sum(
        dtype_of(node).startswith(("float", "bfloat"))
        and not (isinstance(node, ir.Call) and str(node.op.name) in NO_ARITHMETIC)
        for store in stores
        for node in nodes_of(ARITHMETIC, store.value)
    )


def _visits(
    func: SparseFunc, its: list[SparseIteration], arguments: Mapping[str, Any]
) -> int | None:
    """Visits of the innermost of nested iterations; None if unknown."""
    nodes = [node for it in its for node in it.axes]
    axes = {a.name: a for a in flat_axes(nodes)}
    cuts = {flat_axes([n])[-1].name: n.by for n in nodes if isinstance(n, PartAxis)}
    attached = {a.axis.name: a.to.name for a in attached_axes(nodes) if a.axis.name not in cuts}
    # A cut loop over fused axes visits the last of them.
    skipped = {a.name for n in nodes if isinstance(n, PartAxis) for a in flat_axes([n])[:-1]}
    axes = {name: a for name, a in axes.items() if name not in skipped}
    parents = {name: cuts.get(name, a).parent for name, a in axes.items()}
    above = {n: attached.get(n) or ("" if p is None else p.name) for n, p in parents.items()}
    loops = nodes_of(tirx.For, *(it.body for it in its))
    if loops or any(a.is_merged for a in axes.values()) or skipped & set(above.values()):
        return None
    sizes = _constants(func, arguments)

    def number(expr: object) -> int:
        return int(Analyzer().simplify(substitute(expr, sizes)))

    def positions(axis: Axis) -> int:
        if axis.nnz is not None:
            return number(axis.nnz)
        each = 1 if axis.parent is None else positions(axis.parent)
        return each * number(axis.length if axis.nnz_cols is None else axis.nnz_cols)

    def weights(axis: Axis) -> np.ndarray:
        """For each position of an axis, the visits of the axes under it."""
        out = np.ones(positions(axis))
        if axis.is_sparse and axis.kind.endswith("fixed"):
            out[np.ravel(arguments[axis.indices.name]) < 0] = 0  # padding
        for name, parent in above.items():
            if parent == axis.name:
                visits = sums(axes[name])
                if name in attached and axis.is_sparse:
                    visits = visits[np.ravel(arguments[axis.indices.name])]
                out *= visits
        return out

    def sums(axis: Axis) -> np.ndarray:
        """For each position of an axis's parent, the visits under it."""
        each = weights(axis)
        by = cuts.get(axis.name, axis)
        if by.is_variable:
            total = np.concatenate([[0.0], np.cumsum(each)])
            indptr = np.asarray(arguments[by.indptr.name])
            return total[indptr[1:]] - total[indptr[:-1]]
        return each.reshape(positions(axis.parent), -1).sum(1)

    out = 1.0
    for name, parent in above.items():
        if parent not in axes:
            out *= float(weights(axes[name]).sum())
    return int(out)


def measured(kernel: Kernel, arguments: Mapping[str, object], threads: int) -> Facts:
    """Seconds of a kernel's calls, and the machine's rates of copies and dense products."""
    times: list[float] = []
    size = sum(int(x.nbytes) for x in arguments.values() if isinstance(x, np.ndarray))
    end = time.perf_counter() + SECONDS
    while len(times) < WARM_UP + 5 or time.perf_counter() < end:
        start = time.perf_counter()
        kernel(**arguments)
        times.append(time.perf_counter() - start)
    times = times[WARM_UP:]
    return {
        "threads": threads,
        "calls": len(times),
        "seconds": min(times),
        "median": statistics.median(times),
        "copy_bytes_per_second": copy_bandwidth(size, threads, SECONDS / 2),
        "dense_flops_per_second": dense_rate(SECONDS / 2),
    }


def roofline(work: Facts, run: Facts | None) -> Facts:
    """Bytes, operations and, if the kernel ran, the bound and the fraction of it reached."""
    out = {**work, **(run or {})}
    if run is None:
        return out
    memory = work["bytes"] / run["copy_bytes_per_second"]
    compute = (work["flops"] or 0) / run["dense_flops_per_second"]
    least = max(memory, compute)
    return {
        **out,
        "memory_seconds": memory,
        "compute_seconds": compute,
        "bound": "memory" if memory >= compute else "compute",
        "bound_seconds": least,
        "reached": least / run["seconds"],
    }


def roofline_rows(facts: Facts) -> list[tuple[str, str]]:
    """The roofline as rows of a table."""
    flops, size = facts["flops"], facts["bytes"]
    out = [("bytes", f"{size:,}, each array once: the least that memory moves")]
    if flops is None:
        out.append(("flops", "not known: merged axes, or loops of TIR"))
    else:
        out.append(("flops", f"{flops:,} in {many(facts['visits'], 'visit')} of the program"))
        out.append(("intensity", f"{flops / max(1, size):.2f} flops a byte"))
    if "seconds" not in facts:
        return [*out, ("measured", "not run")]
    copy, dense = facts["copy_bytes_per_second"] / 1e9, facts["dense_flops_per_second"] / 1e9
    rate = "" if not flops else f", {flops / facts['seconds'] / 1e9:.1f} GFLOP/s"
    by_memory, by_flops = micros(facts["memory_seconds"]), micros(facts["compute_seconds"])
    bound = f"{by_memory} by memory, flops not known"
    if flops is not None:
        bound = f"{facts['bound']}: {micros(facts['bound_seconds'])} "
        bound += f"(memory {by_memory}, compute {by_flops})"
    machine = f"{copy:.1f} GB/s (copy of as many bytes, {many(facts['threads'], 'thread')}), "
    machine += f"{dense:.0f} GFLOP/s (dense float32 product, NumPy's threads)"
    times = f"{micros(facts['seconds'])}, median {micros(facts['median'])}"
    return [
        *out,
        ("machine", machine),
        ("bound", bound),
        ("measured", f"{times} of {many(facts['calls'], 'call')}{rate}"),
        ("reached", f"{100 * facts['reached']:.0f} % of the bound"),
    ]


def copy_bandwidth(size: int, threads: int, seconds: float) -> float:
    """Bytes per second, read plus written, of copies whose two sides are `size` bytes together.

    Each thread copies its own part repeatedly, so that small parts stay in caches, as in the
    measured call. Returns the best of five, and at least the rate of one thread.
    """
    part = max(64, size // (2 * threads))
    pairs = [(np.ones(part, np.uint8), np.zeros(part, np.uint8)) for _ in range(threads)]

    def work(pair: tuple[np.ndarray, np.ndarray], turns: int) -> None:
        if part > MOST_REPEATED:
            for _ in range(turns):
                np.copyto(pair[1], pair[0])
            return
        # A single call for all turns, as threads would wait for each other's interpreter lock:
        # arrays whose elements are the whole part, all at the same address.
        source, target = (as_strided(x.view(f"V{part}"), (turns,), (0,)) for x in pair)
        np.copyto(target, source)

    least = 3 if part > MOST_REPEATED else LEAST_REPEATED
    start = time.perf_counter()
    work(pairs[0], least)
    each = (time.perf_counter() - start) / least
    turns = max(1 if part > MOST_REPEATED else least, int(seconds / 5 / each))
    best = 0.0
    with ThreadPoolExecutor(threads) as workers:
        for _ in range(5):
            start = time.perf_counter()
            list(workers.map(work, pairs, [turns] * threads))
            best = max(best, 2 * part * threads * turns / (time.perf_counter() - start))
    return best if threads == 1 else max(best, copy_bandwidth(size, 1, seconds))


def dense_rate(seconds: float) -> float:
    """Floating-point operations per second of a dense float32 product, by NumPy's BLAS."""
    a, b = (np.ones((PEAK_SIZE, PEAK_SIZE), "float32") for _ in range(2))
    out = np.empty_like(a)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        np.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * PEAK_SIZE**3 / best
