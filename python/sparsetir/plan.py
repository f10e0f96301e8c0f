"""Operators on a pattern: planned once, run for any values and features.

>>> import numpy as np, scipy.sparse as sp, sparsetir
>>> a = sp.random_array((1000, 800), density=0.01, format="csr", dtype="float32", rng=0)
>>> run = sparsetir.plan("spmm", a, feat=64)
>>> b = np.ones((800, 64), "float32")
>>> bool(np.allclose(run(b), a @ b, atol=1e-4))
True
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from sparsetir.arrays import (
    check_alignment,
    dtype_name,
    empty_like,
    is_array,
    is_contiguous,
    itemsize,
    memory,
    overlap,
    plain_view,
    spans_meet,
    strides,
    to_numpy,
)
from sparsetir.compiled import compilations, compiled
from sparsetir.formats import Format
from sparsetir.kernel import WRITTEN
from sparsetir.readable import check_memory, count_writes
from sparsetir.relational_request import AnyRequest, relational_request
from sparsetir.request import refuse_relational, request
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.search.choose import candidates, choose
from sparsetir.tuning.lookup import recorded_config, warn_of_record

__all__ = ["Plan", "compilations", "plan", "plan_candidates"]

GPU_ALIGNMENT = 16
NO_GRADIENT = (
    "it requires a gradient, which results of plans do not have; use sparsetir.ops.{}, or call "
    "under torch.no_grad()"
)


def plan(
    op: str,
    matrix: Any,
    feat: int = 1,
    *,
    dtype: str | None = None,
    reduce: str = "sum",
    heads: int | None = None,
    target: Any = "llvm",
    threads: int | None = None,
    format: Format | None = None,
    config: Any = None,
    out_dtype: str | None = None,
    feat_in: int | None = None,
    weighted: bool = True,
) -> Plan:
    """An operator on a pattern, with its kernel compiled and the pattern arranged for it.

    op : "spmm", C[i, k] = reduce over the stored j of A[i, j] * B[j, k]; "spmv", the same for
        vectors; "sddmm", OUT[i, j] = sum over k of X[i, k] * Y[j, k] at the stored places (the
        values of the matrix play no part); "rgms", Y[i, l] = sum over the stored (r, i, j) and
        over k of A[r, i, j] * X[j, k] * W[r, k, l], whose `config` has the feature sizes
    matrix : a SparseMatrix, or what that takes; its values are the default of a run. Or a
        :class:`sparsetir.schedules.operators.problems.CsrPattern`, which is trusted: columns of a
        row may come in any order and more than once, as edges of a graph do. It has no values, so
        that each run is given its own. Of "rgms" a SparseTensor by (relation, row, column), or a
        :class:`sparsetir.schedules.operators.relations.RelationPattern`, without values
    feat : features of the dense operands (1 for "spmv")
    dtype : "float32", "float16", "bfloat16" or "float64", of values, dense operands and result;
        by default that of the matrix. Sums are in float32, for float64 in float64
    reduce : "sum", "mean" or "max" (see :class:`sparsetir.schedules.operators.problems.Spmm`)
    heads : how many matrices share the pattern; a first dimension of values, operands and result
    target : as for :func:`sparsetir.build`
    threads : of the CPU, that the rows are divided among; by default all
    format : that stores the matrix, such as `sparsetir.formats.BSR(32, 32)` for pruned weights; for
        sums of one matrix. By default one is chosen: on a CPU blocks where the matrix is made of
        full ones, as block-pruned weights are, else CSR
    config : of a template, which names the format; by default the one that tuning has recorded for
        this very problem on this machine (see :mod:`sparsetir.tuning.records`), else one chosen by
        the sizes of the pattern and the target. For a CsrPattern, by its sizes alone:
        `sparsetir.ops`, which has such patterns, looks for records itself
    out_dtype : of the result of "spmm" and "spmv": float32 for operands of 16 bits, int32 for
        "int8", whose sums are in int32 (on a GPU with a format that tensor cores take); by default
        `dtype`. Records of tuning are for the default
    feat_in, weighted : of "rgms": features of x, by default `feat`; whether values play a part,
        without which they are all 1. It takes no reduce, heads and format. Features that fill no
        vectors get zeros behind them, in copies

    Raises ValueError and TypeError for other arguments, ScheduleError where the config does not
    serve the problem, RuntimeError where there is no such device.
    """
    if op == "rgms":
        related = relational_request(
            matrix, feat, feat_in=feat_in, weighted=weighted, dtype=dtype, reduce=reduce,
            heads=heads, target=target, threads=threads, format=format, out_dtype=out_dtype,
        )  # fmt: skip
        from sparsetir.relational_plan import relational_plan  # whose plans are Plans

        return relational_plan(related, config)
    refuse_relational(op, feat_in, weighted)
    wanted = request(
        op, matrix, feat, dtype=dtype, reduce=reduce, heads=heads, target=target, threads=threads,
        out_dtype=out_dtype,
    )  # fmt: skip
    if format is not None:
        if config is not None:
            raise ValueError(
                f"plan: argument 'format': expected None beside a config, got {format!r}"
            )
        config = wanted.config_of(format)
    if config is not None:
        return Plan(wanted, config)
    if wanted.gpu and wanted.problem.dtype == "int8":
        raise ValueError(
            "plan: argument 'format': expected one that tensor cores take, for 'int8' on a GPU, "
            "such as sparsetir.formats.BSR(32, 32), got None"
        )
    default = next(iter(wanted.engine()), None) or choose(
        wanted.problem, wanted.statistics, wanted.target
    )
    if isinstance(wanted.matrix, CsrPattern):  # to know it again takes time; see ops.Structure
        return Plan(wanted, getattr(default, "unpacked", default), "default")  # values of each run
    recorded = None if out_dtype is not None else recorded_config(wanted.task())
    if recorded is not None:
        try:
            return Plan(wanted, recorded, "record")
        except Exception as error:  # such as of a template that has changed since
            warn_of_record(recorded, error)  # what else is wrong shows with the default
    return Plan(wanted, default, "default")


def plan_candidates(op: str, matrix: Any, feat: int = 1, **options: Any) -> list[Any]:
    """Configs worth measuring, the default of :func:`plan` first; options as there."""
    if op == "rgms":
        return relational_request(matrix, feat, **options).whole.candidates()
    wanted = request(op, matrix, feat, **options)
    return [*wanted.engine(), *candidates(wanted.problem, wanted.statistics, wanted.target)]


class Plan:
    """What :func:`plan` makes; call it with the dense operands.

    config : of the template
    chosen_by : "user", "record" (of tuning) or "default"
    kernel : the :class:`Kernel`, which other plans may share
    convert_seconds, compile_seconds : what the plan took; no compilation where the kernel was
        there already
    arranges_values : whether values are brought into another order, on the host, before the kernel
        takes them: for those of a run in each run
    launches : kernels started by a call
    needs_values : whether each run is to be given values
    """

    def __init__(self, wanted: AnyRequest, config: Any, chosen_by: str = "user") -> None:
        self.op, self.problem, self.feat = wanted.name, wanted.problem, wanted.feat
        self.config, self.chosen_by = config, chosen_by
        problem, target, values = wanted.problem, wanted.target, wanted.values
        gpu = self._gpu = wanted.gpu
        self._device = tvm.runtime.device(target.kind.name if gpu else "cpu", 0)
        if not self._device.exist:
            raise RuntimeError(f"plan: argument 'target': there is no {target.kind.name} device")
        template = wanted.template(config)
        tiles = config.tiles(wanted.feat)
        start = time.perf_counter()
        key = problem, config.compiled
        self.kernel = compiled(key, target, lambda: wanted.stages(config))
        self.compile_seconds = time.perf_counter() - start
        start = time.perf_counter()
        arranged = template.arrange(wanted.pattern, problem, config)
        self.launches = count_launches(self.kernel.stages["II scheduled"]) if gpu else 1
        self._stored = arranged.stored
        self.arranges_values = not self._stored.keeps_order
        self._shapes = wanted.shapes
        self._operands = tuple(name for name in self._shapes if name not in ("a", "out"))
        self._bytes = itemsize(problem.dtype)
        self._out_dtype = getattr(problem, "out", None)
        self._out_bytes = itemsize(self._out_dtype or problem.dtype)
        signature = self.kernel.signature
        self._place = {name: at for at, name in enumerate(signature.passed)}
        count = len(self._operands)
        self._no_gradient = dict.fromkeys(range(count), NO_GRADIENT.format(self.op))
        self._no_gradient_out = {**self._no_gradient, count: WRITTEN}
        self._first = f"{self.op}: argument '{self._operands[0]}'"
        self._nothing = 0 in self._shapes["out"]
        self._args: list[Any] = [None] * len(signature.passed)
        # Values of a run's own may take another kernel, made when it is first wanted.
        unpacked = getattr(config, "unpacked", config)
        self._for_values: Any = None
        if unpacked != config:
            self._for_values = cache(lambda: Plan(wanted, unpacked, chosen_by))
        self._planned: Any = None  # the values, unless the caller gives others
        self._planned_memory: tuple[int, int] = (0, 0)
        self.needs_values = "a" in self._shapes and values is None
        sizes = {**wanted.sizes, "tiles": tiles}
        computed = arranged.computed(signature.func, sizes)
        self._computed = computed if signature.of_values else {}
        given = {**sizes, **arranged.arguments, **computed}
        # Of what kernels take in another shape than the caller gives it.
        numbers = [given.get(name) for name in signature.names]
        # Values that are arranged have other names.
        own = [name for name in self._shapes if name in self._place]
        taken = {name: signature.expected_shape(self._place[name], numbers) for name in own}
        self._kernel_shapes = {n: tuple(s) for n, s in taken.items() if s != [*self._shapes[n]]}
        self._put({name: value for name, value in given.items() if name in self._place})
        if "a" in self._shapes and values is not None:
            values = np.broadcast_to(values, self._shapes["a"])
            self._planned = np.ascontiguousarray(values, problem.dtype)
            self._planned_memory = memory(self._planned, self._bytes)
            self._put(self._arranged(self._planned))
        self.convert_seconds = time.perf_counter() - start

    @property
    def padding(self) -> float:
        """Places that are stored beside the elements, as a fraction of all places."""
        return self._stored.padding

    def _put(self, arguments: Mapping[str, Any]) -> None:
        """Keep arguments for all runs, arrays where the kernel runs."""
        for name, value in arguments.items():
            array = self._on_device(value) if is_array(value) else value
            self._args[self._place[name]] = self._view(name, array)

    def _on_device(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if not self._gpu:
            return tvm_ffi.from_dlpack(plain_view(array))
        return tvm.runtime.tensor(array, self._device)

    def __call__(self, *operands: Any, out: Any = None, values: Any = None) -> Any:
        """Run on torch, NumPy or TVM arrays, contiguous and of the plan's dtype.

        operands : b (n, feat) for "spmm", (n,) for "spmv"; x (m, feat) and y (n, feat) for "sddmm";
            x (n, feat_in) and w (relations, feat_in, feat) for "rgms"
        out : written and returned; by default a new array like the first operand: (m, feat),
            (m,) or (nnz,)
        values : (nnz,) of the matrix, in the order of its pattern; by default those planned with

        Changing the matrix itself after planning is not supported: plans share its arrays where
        they can. Results have no gradients, so what requires one is refused but under
        torch.no_grad(); :mod:`sparsetir.ops` has them. With heads, each has them as a first
        dimension.

        Raises TypeError and ValueError that name the argument.
        """
        if values is not None and self._for_values is not None:
            return self._for_values()(*operands, out=out, values=values)
        if len(operands) != len(self._operands):
            raise TypeError(
                f"{self.op}: expected {len(self._operands)} operands "
                f"({', '.join(self._operands)}), got {len(operands)}"
            )
        if values is None and self.needs_values:
            raise TypeError(f"{self.op}: argument 'values': expected an array, got None")
        given = out
        for array in operands if out is None else (*operands, out):
            if type(array) is not np.ndarray:
                self._check_memory(operands, out)
                break
        args, place, viewed = self._args.copy(), self._place, self._kernel_shapes
        for name, array in zip(self._operands, operands, strict=True):
            args[place[name]] = self._view(name, array) if name in viewed else array
        if values is not None:
            for name, array in self._values(values).items():
                args[place[name]] = array
        if out is None:
            out = empty_like(operands[0], self._shapes["out"], self._first, self._out_dtype)
        else:
            self._refuse_overlap(out, operands, values)
        args[place["out"]] = self._view("out", out) if "out" in viewed else out
        if self._gpu:
            names, arrays = (*self._operands, "out"), (*operands, out)
            check_alignment(self.op, names, arrays, self._bytes, GPU_ALIGNMENT)
        if self._nothing and self._gpu:
            return out  # a grid of no blocks is an error there
        try:
            self.kernel.run_unchecked(args)
        except (TypeError, ValueError, BufferError, RuntimeError):
            # Says what is wrong, or takes what only needs another view.
            self.kernel(*args[: len(self.kernel.signature.names)])
        if given is not None and type(given) is not np.ndarray:
            count_writes((given,))
        return out

    def run_trusted(self, operands: Sequence[Any], values: Any = None) -> Any:
        """A call on contiguous torch tensors that fit, which is not checked, with a new result."""
        if values is not None and (self.arranges_values or self._for_values is not None):
            return self._run_detached(operands, values)
        if self._nothing:
            return self._run_detached(operands, values)
        args, viewed = self._args.copy(), self._kernel_shapes
        if self._out_dtype is None:  # one call less
            out = operands[0].new_empty(self._shapes["out"])
        else:
            out = empty_like(operands[0], self._shapes["out"], self._first, self._out_dtype)
        given = dict(zip(self._operands, operands, strict=True), out=out)
        if values is not None:
            given |= self._stored.values(A=values)
        for name, array in given.items():
            args[self._place[name]] = array.view(viewed[name]) if name in viewed else array
        try:
            self.kernel.run_unchecked(args)
        except (TypeError, ValueError, BufferError, RuntimeError):
            return self._run_detached(operands, values)  # takes other views, or says what is wrong
        return out

    def _run_detached(self, operands: Sequence[Any], values: Any) -> Any:
        """A call whose caller sees to gradients."""
        plain = [x.detach() for x in operands]
        return self(*plain, values=None if values is None else values.detach())

    def _check_memory(self, operands: tuple[Any, ...], out: Any) -> None:
        """Raise for operands and a result whose memory does not hold their numbers."""
        if out is None:
            names, arrays, without = self._operands, operands, self._no_gradient
        else:
            names, without = (*self._operands, "out"), self._no_gradient_out
            arrays = (*operands, out)
        check_memory(self.op, names, arrays, without)

    def _values(self, values: Any) -> Mapping[str, Any]:
        """The kernel's arrays of values."""
        if "a" not in self._shapes:
            raise TypeError(f"{self.op}: argument 'values': the operator takes none")
        if not is_array(values) or tuple(values.shape) != self._shapes["a"]:
            raise ValueError(
                f"{self.op}: argument 'values': expected an array of shape {self._shapes['a']}, "
                f"got {getattr(values, 'shape', type(values).__name__)}"
            )
        if dtype_name(values) != self.problem.dtype:
            raise TypeError(
                f"{self.op}: argument 'values': expected dtype {self.problem.dtype}, got "
                f"{dtype_name(values)}"
            )
        if type(values) is not np.ndarray:
            why = {0: self._no_gradient[0]}
            check_memory(self.op, ("values",), (values,), why)
        arrays = self._arranged(values)
        return {name: self._view(name, self._on_device(x)) for name, x in arrays.items()}

    def _arranged(self, values: Any) -> dict[str, Any]:
        """The kernel's arrays of values, those that its schedule makes of them too."""
        stored = self._stored.values(A=values if self._stored.keeps_order else to_numpy(values))
        return {**stored, **self.kernel.of_values(stored, self._computed)}

    def _view(self, name: str, array: Any) -> Any:
        """An array as the kernel takes it: it has no heads of its own, and no vectors."""
        shape = self._kernel_shapes.get(name)
        if shape is None or not is_array(array):
            return array
        if tuple(array.shape) != self._shapes[name] or not is_contiguous(array):
            raise ValueError(
                f"{self.op}: argument '{name}': expected a contiguous array of shape "
                f"{self._shapes[name]}, got shape {tuple(array.shape)}, strides {strides(array)}"
            )
        view: Any = getattr(array, "_create_view", None)  # of TVM's tensors
        return array.reshape(shape) if view is None else view(shape, array.dtype)

    def _refuse_overlap(self, out: Any, operands: tuple[Any, ...], values: Any) -> None:
        """Raise where the result shares memory with what is read."""
        for name, array in zip(self._operands, operands, strict=True):
            if self._overlaps(out, array):
                raise ValueError(f"{self.op}: argument 'out' shares memory with '{name}'")
        if values is not None or isinstance(out, np.ndarray):
            shared = self._overlaps(out, self._planned if values is None else values)
        else:  # to ask NumPy's array for its memory takes longer than all else here
            shared = spans_meet(memory(out, self._out_bytes), self._planned_memory)
        if shared:
            raise ValueError(f"{self.op}: argument 'out' shares memory with the values")

    def _overlaps(self, out: Any, array: Any) -> bool:
        return overlap(out, array, self._out_bytes, self._bytes)

    def __reduce__(self) -> Any:
        raise TypeError("Plan: cannot be pickled; pickle the matrix and plan again")

    def __repr__(self) -> str:
        return f"<sparsetir.Plan {self.op} {self._shapes['out']} {self.config}>"
