"""Translation of torch's graphs to Relax, with stage-I programs for the computations.

Regions keep their programs; all other float32 computations become stage-I programs, too. Relax
handles memory, sizes, and the order of calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg
from tvm import IRModule, relax, tirx

from sparsetir.graph import edges
from sparsetir.graph.expressions import (
    COMPARED,
    FILLED,
    POINTWISE,
    SAME,
    VIEWS,
    Expression,
    Size,
    Stored,
    aten,
    axes_of,
    dims_of,
    dtype_of,
    first,
    gather_of,
    is_float32,
    is_one,
    kept_axes,
    module_of,
    passed,
    same_shape,
    shape_of,
)
from sparsetir.graph.operator import PROGRAMS, region, restored
from sparsetir.graph.prelude import acts
from sparsetir.graph.products import Product
from sparsetir.graph.programs import GIVEN, Program, features, filled, layout
from sparsetir.graph.regions import LANES, SUMS, rewrite
from sparsetir.reductions import EXTREMA
from sparsetir.runtime.pipeline import lower, with_natural_shapes
from sparsetir.runtime.signature import signature_of
from sparsetir.schedules.passes.add_lanes import add_lanes
from sparsetir.schedules.passes.parallel_loops import in_vectors
from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.recipes.registry import facts_of
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.script.parser import from_source
from sparsetir.sparse_ir.script.writer import reduced

REDUCED: dict[object, str] = {
    **dict.fromkeys(SUMS, "sum"),
    aten.amax.default: "max",
    aten.amin.default: "min",
}
COMPUTED = POINTWISE | {aten.clamp.default}
COMPARISONS = {
    "==": relax.op.equal, "!=": relax.op.not_equal, ">": relax.op.greater,
    ">=": relax.op.greater_equal, "<": relax.op.less, "<=": relax.op.less_equal,
}  # fmt: skip
NAME = "export"
LAYER = ", in layer "


class Translation:
    """The translation of a graph to Relax, with stage-I programs for computations."""

    def __init__(self, exported: Any, target: Any) -> None:
        self._graph: fx.Graph = exported.graph_module.graph
        self._target = target
        self._builder = relax.BlockBuilder()
        self._functions: dict[str, tirx.PrimFunc] = {}  # the called functions
        self._programs: dict[str, tirx.PrimFunc] = {}  # by text
        self._unknown: dict[str, Any] = {}  # parameters with a value that is valid for any graph
        self._sizes: dict[str, Any] = {}
        self._values: dict[Any, Any] = {}
        self._constants: dict[fx.Node, torch.Tensor] = {}
        rewrite(exported.graph_module, lambda _: set(), factors=False, products=False)
        self._graph = exported.graph_module.graph
        self._read_constants(exported)
        self._shared = {n for n in self._graph.nodes if is_float32(n) and self._is_stored(n)}

    def module(self) -> IRModule:
        """An IRModule whose function `main` is the graph."""
        places = [
            n for n in self._graph.nodes if n.op == "placeholder" and n not in self._constants
        ]
        params = []
        for node in places:
            for size in shape_of(node):
                self._name_of_size(size)
            params.append(relax.Var(node.name, self._type(node)))
            self._values[node] = params[-1]
        (output,) = self._graph.find_nodes(op="output")
        builder = self._builder
        with builder.function("main", params):
            with builder.dataflow():
                outputs = [self._value(n) for n in output.args[0]]
                results = [builder.emit_output(x) for x in outputs]
            builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
        module = builder.get()
        for name, func in self._functions.items():
            module[name] = func
        return module

    # -- constants ------------------------------------------------------------------------------

    def _read_constants(self, exported: Any) -> None:
        """Collect parameters, and constants that depend on them alone."""
        state = {**exported.state_dict, **exported.constants}
        signature = exported.graph_signature
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        named |= signature.inputs_to_lifted_tensor_constants
        for node in self._graph.nodes:
            if node.op == "placeholder" and node.name in named:
                self._constants[node] = state[named[node.name]].detach()
            elif node.op == "call_function" and dtype_of(node) is not None and not acts(node):
                of = node.all_input_nodes
                if all(n in self._constants for n in of) and all(
                    isinstance(s, int) for s in shape_of(node)
                ):
                    args, kwargs = map_arg((node.args, node.kwargs), self._constants.get)
                    target: Any = node.target
                    self._constants[node] = target(*args, **kwargs)

    # -- sizes ------------------------------------------------------------------------------------

    def _name_of_size(self, size: Size) -> None:
        if not isinstance(size, int) and str(size) not in self._sizes:
            self._sizes[str(size)] = tirx.Var(f"size{len(self._sizes)}", "int64")

    def _size(self, size: Any) -> Any:
        """Convert a size of torch's to an expression of Relax."""
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if isinstance(size, int):
            return tirx.IntImm("int64", size)
        return self._expression(size.node.expr)

    def _expression(self, of: Any) -> Any:
        if str(of) in self._sizes:
            return self._sizes[str(of)]
        if isinstance(of, sympy.Integer):
            return tirx.IntImm("int64", int(of))
        if isinstance(of, sympy.Add | sympy.Mul):
            result, *others = map(self._expression, of.args)
            for other in others:
                result = result + other if isinstance(of, sympy.Add) else result * other
            return result
        raise LoweringError(f"{NAME}: the model has a data-dependent size {of}")

    def _shape(self, node: fx.Node) -> list[Any]:
        return [self._size(s) for s in shape_of(node)]

    def _type(self, node: fx.Node) -> Any:
        return relax.TensorType(self._shape(node), self._dtype(node))

    # -- values -----------------------------------------------------------------------------------

    def _value(self, node: fx.Node) -> relax.Expr:
        """The value of a node in Relax."""
        if node not in self._values:
            try:
                self._values[node] = self._made(node)
            except LoweringError as error:
                name, kind = module_of(node)
                if name and LAYER not in str(error):
                    raise LoweringError(f"{error}{LAYER}'{name}' ({kind})") from None
                raise
        return self._values[node]

    def _made(self, node: fx.Node) -> relax.Expr:
        if node in self._constants:
            return relax.const(self._constants[node].contiguous().numpy(), self._dtype(node))
        target: Any = node.target
        args: Any = node.args
        if target is region:
            return self._region(*args)
        if target is restored:
            return self._restored(self._value(args[0]), self._shape(node), args[1])
        if target in REDUCED and is_float32(node):
            return self._reduced(node)
        if is_float32(node) and target in (aten.addmm.default, aten.mm.default):
            return self._product(node)
        if is_float32(node) and target in COMPUTED:
            return self._dense(node, node)
        expr = self._other(node)
        if expr is None:
            what = f"({', '.join(map(str, shape_of(node)))}) of {dtype_of(node)}"
            raise LoweringError(f"{NAME}: operator {target} that gives {what} is not supported")
        return expr if isinstance(expr, relax.Var) else self._builder.emit(expr)

    def _is_stored(self, node: fx.Node) -> bool:
        """Whether a value of a pointwise operator is read more than once."""
        if node.target not in COMPUTED:
            return False
        readers = [u for u in node.users if u.target not in VIEWS | SAME]
        through = [u for u in node.users if u not in readers]
        return len(readers) + sum(max(1, len(u.users)) for u in through) > 1

    def _reduced(self, node: fx.Node) -> relax.Expr:
        """A reduction along the last dimensions."""
        values = first(node)
        rank, dims = len(shape_of(values)), dims_of(node)
        if 0 in dims or dims != list(range(rank - len(dims), rank)):
            raise LoweringError(
                f"{NAME}: operator {node.target} over the dimensions {dims} of {rank} is not "
                "supported; expected the last ones, without the first"
            )
        return self._dense(node, values, REDUCED[node.target], len(dims))

    def _dense(
        self, node: fx.Node, values: fx.Node, reduce: str | None = None, dims: int = 0
    ) -> Any:
        shape, axes = shape_of(values), axes_of(values)
        if not shape:
            raise LoweringError(f"{NAME}: operator {node.target} of one number is not supported")
        loops = [s for s in shape[1:] if not is_one(s)]
        kept, summed = kept_axes(axes, dims, len(shape_of(node)))
        try:
            text, read = pointwise(values, axes, loops, self._shared - {node}, kept, reduce, summed)
        except Stored as why:
            raise LoweringError(
                f"{NAME}: operator {node.target} reads {why.args[0]}, which is not of float32"
            ) from None
        if node in read:
            raise LoweringError(f"{NAME}: operator {node.target} is not supported")
        named = {"m": self._size(shape[0])} | {f"d{n}": self._size(s) for n, s in enumerate(loops)}
        arrays = {f"x{n}": self._operand(x) for n, x in enumerate(read)}
        return self._call(text, arrays, named, self._type(node))

    def _operand(self, node: fx.Node) -> relax.Expr:
        """Convert a program's operand to a float32 array with at least one dimension."""
        value = self._value(node)
        if dtype_of(node) != torch.float32:
            value = self._builder.emit(relax.op.astype(value, "float32"))
        if not shape_of(node):
            value = self._builder.emit(relax.op.reshape(value, [1]))
        return value

    def _product(self, node: fx.Node) -> relax.Expr:
        args = passed(node, len(node.args))
        if args is None:
            what = ", ".join(f"{name}={value}" for name, value in node.kwargs.items())
            raise LoweringError(f"{NAME}: operator {node.target} with {what} is not supported")
        *bias, x, y = args
        inner, outer = shape_of(y)
        fits = not bias or len(shape_of(bias[0])) == 1 and not is_one(shape_of(bias[0])[0])
        if not (isinstance(inner, int) and isinstance(outer, int) and fits):
            raise LoweringError(f"{NAME}: operator {node.target} of open sizes is not supported")
        arrays = {f"x{n}": self._value(v) for n, v in enumerate([x, y, *bias])}
        m = {"m": self._size(shape_of(node)[0])}
        prod = Product(inner, outer, bias="row" if bias else "none")
        return self._call(prod.text(), arrays, m, self._type(node), prod.schedule(self._target))

    # -- regions ----------------------------------------------------------------------------------

    def _region(
        self, number: int, operands: list[fx.Node], indices: list[fx.Node], shape: list[Any],
        m: Any, given: bool,
    ) -> Any:  # fmt: skip
        program: Program = PROGRAMS[number]
        for dtype in (program.stored, program.dtype, *(x.dtype for x in program.operands)):
            if dtype != "float32":
                raise LoweringError(f"{NAME}: a reduction of edges in {dtype} is not supported")
        rows, others = indices[0], indices[1 : 1 + program.others]
        m = self._size(m)
        starts, places = self._order(rows, m)
        arrays = {"indptr": starts, **{f"x{n}": self._operand(x) for n, x in enumerate(operands)}}
        named: dict[str, Any] = {"m": m, "edges": self._size(shape_of(rows)[0])}
        aligned = []
        for n, operand in enumerate(program.operands):
            aligned.append(operand.at != "edge" or operand.number == 0)
            if not aligned[-1]:
                by = None if operand.number == GIVEN else indices[operand.number]
                arrays[f"place{n}"] = places if by is None else self._between(by, places)
        sizes = [self._size(s) for s in shape]
        known = program.sizes(list(map(shape_of, operands)), shape)
        named |= {name: self._size(size) for name, size in known.items()}
        for n, index in enumerate(others):
            arrays[f"index{n}"] = self._arranged(index, rows, places, named[f"n{n}"])
        of = relax.TensorType(sizes, "float32")
        text = program.text(tuple(aligned), fused=False)
        out = self._call(text, arrays, named, of, _by_rows if program.summed else None)
        if program.reduce in EXTREMA:
            out = self._flat(edges.zero_of_empty_rows, out, sizes, starts)
        if given and program.reduce is None:
            out = self._restored(out, sizes, rows)
        return out

    def _order(self, rows: fx.Node, m: Any) -> tuple[relax.Expr, relax.Expr]:
        """The starts of each of m nodes' edges, and the edges' positions, sorted by an index."""
        index, key = self._index(rows), ("starts", rows, str(m))
        if key not in self._values:
            of = relax.TensorType([m + 1], "int32")
            self._values[key] = self._call_given(edges.count_edges, [index], of)
        starts = self._values[key]
        if ("order", rows) not in self._values:
            of = relax.TensorType(self._shape(rows), "int32")
            self._values["order", rows] = self._call_given(edges.sort_edges, [index, starts], of)
        return starts, self._values["order", rows]

    def _arranged(self, index: fx.Node, rows: fx.Node, places: relax.Expr, size: Any) -> relax.Expr:
        """Another index, of `size` nodes, in the order by that of the rows."""
        key = "arranged", index, rows, str(size)
        if key not in self._values:
            of = relax.TensorType(self._shape(index), "int64")
            checked = self._call_given(edges.in_range, [self._index(index)], of, [size])
            taken = self._builder.emit(relax.op.take(checked, places, axis=0))
            self._values[key] = self._builder.emit(relax.op.astype(taken, "int32"))
        return self._values[key]

    def _index(self, index: fx.Node) -> relax.Expr:
        """A vector of nodes in int64."""
        vector = self._value(index)
        wide = dtype_of(index) == torch.int64
        return vector if wide else self._builder.emit(relax.op.astype(vector, "int64"))

    def _between(self, by: fx.Node, places: relax.Expr) -> relax.Expr:
        """The positions of edges within the order by another index."""
        of = relax.TensorType(self._shape(by), "int32")
        other = self._values["order", by]
        workspace = self._builder.emit(relax.op.zeros_like(other))
        return self._call_given(edges.places_between, [other, places, workspace], of)

    def _restored(self, values: relax.Expr, shape: list[Any], rows: fx.Node) -> relax.Expr:
        """Values of edges in their original order."""
        return self._flat(edges.restored, values, shape, self._values["order", rows])

    def _flat(
        self, func: tirx.PrimFunc, values: relax.Expr, shape: list[Any], other: relax.Expr
    ) -> relax.Expr:
        """Call a function on values flattened to one dimension of features."""
        width: Any = tirx.IntImm("int64", 1)
        for size in shape[1:]:
            width = width * size
        flat = self._builder.emit(relax.op.reshape(values, [shape[0], width]))
        of = relax.TensorType([shape[0], width], "float32")
        result = self._call_given(func, [flat, other], of)
        return self._builder.emit(relax.op.reshape(result, shape))

    # -- calls ------------------------------------------------------------------------------------

    def _call(
        self, text: str, arrays: dict[str, relax.Expr], sizes: dict[str, Any], result: Any,
        schedule: Callable[[Schedule], None] | None = None,
    ) -> relax.Expr:  # fmt: skip
        """Call the kernel of a program, which is compiled once."""
        func = self._programs.get(text)
        if func is None:
            name = f"program{len(self._programs)}"
            stages = lower(from_source(text), schedule, target=self._target)
            computed = signature_of(stages).computed if "II scheduled" in stages else {}
            for param, how in computed.items():
                number = facts_of(how["recipe"]).unknown
                if number is None:
                    raise LoweringError(f"{NAME}: a program needs values computed for each graph")
                self._unknown[param] = tirx.IntImm("int64", number)
            func = with_natural_shapes(name, stages, check=False)
            params = {str(p.name): p for p in func.params}
            out = params.pop("out")
            func = tirx.PrimFunc([*params.values(), out], func.body, func.ret_type, func.attrs)
            func = self._programs[text] = func.with_attr("global_symbol", name)
        names, sizes = [str(p.name) for p in func.params[:-1]], {**self._unknown, **sizes}
        passed = [arrays[n] for n in names if n in arrays]
        return self._call_given(func, passed, result, [sizes[n] for n in names if n in sizes])

    def _call_given(
        self, func: tirx.PrimFunc, arrays: list[relax.Expr], result: Any, sizes: Sequence[Any] = ()
    ) -> relax.Expr:
        """Call a function that takes arrays, sizes, and its output."""
        name = str(func.attrs["global_symbol"])
        self._functions[name] = func
        passed = relax.Tuple([*arrays, *map(relax.prim_value, sizes)])
        call = relax.op.call_dps_packed(relax.ExternFunc(name), passed, result)
        return self._builder.emit(call)

    # -- integers, masks and shapes ---------------------------------------------------------------

    def _other(self, node: fx.Node) -> relax.Expr | None:
        """Translate an operator on integers, or one that only moves data; None for others."""
        target: Any = node.target
        args: Any = node.args
        if target in COMPARED:
            compare, other = COMPARISONS[COMPARED[target]], self._scalar(args[1], args[0])
            return None if other is None else compare(self._value(args[0]), other)
        gathered = gather_of(node)
        if gathered is not None:
            source, index = gathered
            of, count = (
                relax.TensorType(self._shape(index), "int64"),
                self._size(shape_of(source)[0]),
            )
            checked = self._call_given(edges.in_range, [self._index(index)], of, [count])
            return relax.op.take(self._value(source), checked, axis=0)
        if target == aten.index.Tensor:
            return self._masked(node)
        if target == aten.index_put.default:
            return self._put(node)
        if target == aten.arange.start_step:
            if len(args) > 2 or any(isinstance(x, float) for x in args):
                return None
            return relax.op.arange(*map(self._size, args), 1, self._dtype(node))
        if target in FILLED:
            value = FILLED[target] if FILLED[target] is not None else args[1]
            if isinstance(value, fx.Node):
                return None
            return relax.op.full(self._shape(node), relax.const(value, self._dtype(node)))
        if target == aten.scalar_tensor.default:
            return relax.const(args[0], self._dtype(node))
        if target == aten.cat.default:
            parts, dim, rank = args[0], (*args, 0)[1], len(shape_of(node))
            if any(dtype_of(x) != dtype_of(node) or len(shape_of(x)) != rank for x in parts):
                return None
            return relax.op.concat([self._value(x) for x in parts], dim % rank)
        value = self._value(args[0]) if args and isinstance(args[0], fx.Node) else None
        if target == aten.expand.default:
            return relax.op.broadcast_to(value, self._shape(node))
        if target in VIEWS:
            return relax.op.reshape(value, self._shape(node))
        if target in SAME:
            return value
        if target == aten.slice.Tensor and len(args) == 4:
            return self._cut(value, args[0], *args[1:])
        if target == aten.bitwise_not.default and dtype_of(node) == torch.bool:
            return relax.op.logical_not(value)
        if target == aten.select.int:
            part = self._cut(value, args[0], args[1], args[2], None)
            return relax.op.reshape(self._builder.emit(part), self._shape(node))
        if target == aten.permute.default:
            return relax.op.permute_dims(value, args[1])
        fixed = target == aten.repeat.default and all(isinstance(x, int) for x in args[1])
        if fixed and len(args[1]) == len(shape_of(args[0])):
            return relax.op.tile(value, args[1])
        if target == aten._to_copy.default:
            return relax.op.astype(value, self._dtype(node))
        return None

    def _dtype(self, node: fx.Node) -> str:
        return str(dtype_of(node)).removeprefix("torch.")

    def _scalar(self, value: fx.Node | float, like: fx.Node) -> relax.Expr | None:
        """The operand of a comparison in the type of `like`; None if the type cannot hold it."""
        dtype = dtype_of(like)
        if isinstance(value, fx.Node):
            return self._value(value) if dtype_of(value) == dtype else None
        whole = value in (0, 1) if dtype == torch.bool else value % 1 == 0
        return relax.const(value, self._dtype(like)) if whole or is_float32(like) else None

    def _cut(self, value: relax.Expr, of: fx.Node, dim: int, start: Any, end: Any) -> relax.Expr:
        """A slice of a tensor along a dimension; negative positions count from the end, and an
        `end` of None takes one element."""
        dim %= len(shape_of(of))
        size = self._size(shape_of(of)[dim])

        def place(at: Any) -> Any:
            if isinstance(at, int) and at < 0:
                return tirx.max(size + at, 0)
            return size if isinstance(at, int) and at >= 2**62 else self._size(at)

        if isinstance(start, int) and isinstance(end, int) and 0 <= end < start:
            end = start
        first = place(start or 0)
        last = first + 1 if end is None else place(end)
        return relax.op.strided_slice(value, [dim], [first], [last])

    def _masked(self, node: fx.Node) -> relax.Expr | None:
        """The part of a tensor at the edges that a mask selects."""
        args: Any = node.args
        value, (*rows, at) = args
        func, sizes = edges.KEPT.get(self._dtype(node)), self._shape(value)
        if func is None or dtype_of(at) != torch.bool or any(rows) or len(shape_of(at)) != 1:
            return None
        mask = self._value(at)
        if ("count", at) not in self._values:
            mask = self._builder.emit(relax.op.astype(mask, "int32"))
            count = self._call_given(edges.count_kept, [mask], relax.TensorType([1], "int64"))
            shape = self._builder.emit(relax.op.tensor_to_shape(count))
            size = tirx.Var(f"size{len(self._sizes)}", "int64")
            self._builder.match_cast(shape, relax.ShapeType([size]))
            self._values["count", at] = mask, size
        mask, size = self._values["count", at]
        dim, one = len(rows), tirx.IntImm("int64", 1)
        self._sizes[str(shape_of(node)[dim])] = size
        outer, inner = (
            functools.reduce(operator.mul, x, one) for x in (sizes[:dim], sizes[dim + 1 :])
        )
        kept = relax.op.reshape(self._value(value), [outer, sizes[dim], inner])
        of = relax.TensorType([outer, size, inner], self._dtype(node))
        kept = self._call_given(func, [self._builder.emit(kept), mask], of)
        return relax.op.reshape(kept, self._shape(node))

    def _put(self, node: fx.Node) -> relax.Expr | None:
        """Replace values at some nodes."""
        args: Any = node.args
        base, index, values = args[0], args[1], args[2]
        if len(args) > 3 and args[3] or len(index) != 1 or not is_float32(node):
            return None
        if len(shape_of(node)) != 1 or dtype_of(index[0]) not in (torch.int32, torch.int64):
            return None
        if len(shape_of(values)) != 1 or not same_shape(values, index[0]):
            return None
        arrays = [self._value(base), self._index(index[0]), self._value(values)]
        return self._call_given(edges.put, arrays, self._type(node))


def _by_rows(sch: Schedule) -> None:
    """Schedule rows on threads; sums for each edge stay in the order of rows."""
    (iteration,) = sparse_iterations(sch.func)
    *outer, last = sch.get_sp_iters(sch.get_sparse_iteration(iteration.name))
    size = iteration.axes[-1].length
    if iteration.kinds.count("R") > 1 or not isinstance(size, tirx.IntImm) or int(size) % LANES:
        sch.parallelize(outer[0])
        return
    _, lanes = sch.split(last, [None, LANES])
    start, update, sums, _ = sch.precompute("OUT", outer[-1], [], lanes=[lanes])
    sch.parallelize(outer[0])
    second = sch.lower()
    in_vectors(second, start, 1)
    in_vectors(second, update, 1)
    sch.rewrite(add_lanes, sums.block)


def pointwise(
    values: fx.Node, axes: list[int | None], loops: Sequence[Any], stored: set[fx.Node],
    result: list[int | None], reduce: str | None = None, summed: int = 0,
) -> tuple[str, list[fx.Node]]:  # fmt: skip
    """The program of pointwise operators, reduced along the last loops, and its operands.

    Its parameters are `out`, the operands `x0`, `x1` and so on, the number of rows `m`, and `d0`
    and so on for loops of open size.

    axes : for each dimension of the values after the first its loop, None for those of size 1
    loops : sizes of the loops
    stored : values that are read
    result : axes of the result, like those of the values
    reduce : reduction along the last `summed` loops, "sum", "max" or "min"

    Raises :class:`Stored` for operands that are not of float32.
    """
    expression = Expression(None, dict.fromkeys(stored))
    finished = expression.finished(expression.of(values, axes, root=True))
    for x, tensor in zip(finished.operands, finished.tensors, strict=True):
        if x.dtype != "float32":
            raise Stored(tensor)
    operands = [
        [*([] if x.at == "all" else [("I", "i")]), *features(x.axes)] or [("ONE0", "0")]
        for x in finished.operands
    ]
    reads = (f"X{n}[{', '.join(i for _, i in places)}]" for n, places in enumerate(operands))
    written = [("I", "i"), *features(result)]
    out = f"OUT[{', '.join(i for _, i in written)}]"
    term = filled(finished.text, *reads, dtype="float32")
    lines = [f"{out} = {term}"] if reduce is None else reduced(reduce, out, term)
    kinds = "S" * (1 + len(loops) - summed) + "R" * summed
    over = [("I", "i"), *((f"D{n}", f"k{n}") for n in range(len(loops)))]
    sizes = [size if isinstance(size, int) else None for size in loops]
    return layout("dense", operands, written, over, kinds, sizes, lines), finished.tensors
