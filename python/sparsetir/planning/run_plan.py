"""Plans: operators on a pattern with their compiled kernel and prepared arguments.

Kernels are compiled once per process, and shared by plans and operators.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any, NoReturn

import numpy as np
import tvm
import tvm_ffi
from tvm.target import Target

from sparsetir.planning.request import Request
from sparsetir.records.task import Config
from sparsetir.runtime.arrays import (
    LEAST_BYTES,
    at_cache_line,
    check_alignment,
    check_memory,
    count_writes,
    dtype_name,
    empty,
    empty_like,
    in_large_pages,
    is_array,
    is_contiguous,
    is_strided,
    is_torch,
    itemsize,
    overlap,
    plain_view,
    shape_of,
    strides,
    to_numpy,
)
from sparsetir.runtime.kernel import WRITTEN, Kernel
from sparsetir.runtime.kernel_cache import COMPILING, kept_kernel
from sparsetir.runtime.pipeline import Stages, lower_template
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.problems import Problem, Stored
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.schedules.targets import is_gpu
from sparsetir.schedules.templates.registry import template_of
from sparsetir.sparse_ir.origins import ORIGINS

GPU_ALIGNMENT = 16  # bytes, for vector loads
NO_GRADIENT = (
    "it requires a gradient, which results of plans do not have; use sparsetir.ops.{}, or call "
    "under torch.no_grad()"
)


class Plan:
    """An operator's compiled kernel, arranged for a pattern; call it with the dense operands.

    Attributes
    ----------
    config
        The config of the template.
    chosen_by : {"user", "record", "default"}
        The origin of the config; "record" is tuning.
    kernel : Kernel
        The kernel, which other plans may share.
    convert_seconds, compile_seconds : float
        The times of making the plan; no compilation if the kernel existed already.
    arranges_values : bool
        Whether values are reordered on the host for the kernel: in each run, if passed to it.
    launches : int
        Kernels launched by a call.
    needs_values : bool
        Whether each run needs values.
    """

    op: str
    problem: Problem
    feat: int
    config: Config
    chosen_by: str
    launches: int = 1
    compile_seconds: float = 0.0
    needs_values: bool = False
    arranges_values: bool = False
    repeats: bool = False
    _stored: Any = Stored()  # for plans that take CSR unchanged

    def __init__(self, wanted: Request, config: Config, chosen_by: str = "user") -> None:
        self._configure(wanted, config, chosen_by)
        self._bind(wanted)

    @classmethod
    def unbound(cls, wanted: Request, config: Config, chosen_by: str) -> Plan:
        """Make a plan without a pattern; :meth:`on` binds it to patterns.

        Parameters
        ----------
        wanted, config, chosen_by
            Those of the first such plan; values that depend on the pattern are ignored.

        Returns
        -------
        Plan
        """
        plan = cls.__new__(cls)
        plan._configure(wanted, config, chosen_by)
        return plan

    def on(self, wanted: Request) -> Plan:
        """Bind this plan's kernel to a pattern, in a new plan.

        Parameters
        ----------
        wanted : request
            The request that this plan was settled for, with another pattern.

        Returns
        -------
        Plan
        """
        bound = type(self).__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._bind(wanted)
        return bound

    def _set_device(self, wanted: Request) -> None:
        """Set the device that kernels run on."""
        kind, self._gpu = wanted.target.kind.name, wanted.gpu
        self._device = tvm.runtime.device(kind if self._gpu else "cpu", 0)
        if not self._device.exist:
            raise RuntimeError(f"plan: argument 'target': there is no {kind} device")

    def _name(self, wanted: Request, config: Any, chosen_by: str) -> None:
        """Set the attributes that callers see."""
        self.op, self.problem, self.feat = wanted.name, wanted.problem, wanted.feat
        self.config, self.chosen_by = config, chosen_by

    def _configure(self, wanted: Request, config: Config, chosen_by: str) -> None:
        """Set up everything that depends on the problem, the config, features and heads."""
        self._name(wanted, config, chosen_by)
        problem, target, gpu = wanted.problem, wanted.target, wanted.gpu
        self._set_device(wanted)
        self._template = wanted.template(config)
        self._tiles = config.tiles(wanted.feat)
        start = time.perf_counter()
        self.kernel: Kernel = compiled_by(config, problem, target)
        self.compile_seconds = time.perf_counter() - start
        if gpu:
            self.launches = count_launches(self.kernel.stages["II scheduled"])
        self._operands = tuple(name for name in wanted.shapes if name not in ("a", "out"))
        self._bytes = itemsize(problem.dtype)
        self._values_dtype = getattr(problem, "values", None) or problem.dtype
        self._out_dtype = getattr(problem, "out", None)
        self._out_bytes = itemsize(self._out_dtype or problem.dtype)
        self._place = {name: i for i, name in enumerate(self.kernel.signature.passed)}
        self._checked = {
            passed: _checked(wanted.operator.function or self.op, self._operands, *passed)
            for passed in product((False, True), repeat=2)
        }
        self._first = f"{self.op}: argument '{self._operands[0]}'"
        self._run, self._out_at = self.kernel.entry, self._place["out"]
        self._count = len(self._operands)
        # Values passed to a run may need another kernel.
        self._unpacked = getattr(config, "unpacked", config)

    def _bind(self, wanted: Request) -> None:
        """Set up everything that depends on the pattern."""
        values, config, signature = wanted.values, self.config, self.kernel.signature
        start = time.perf_counter()
        arranged = self._template.arrange(wanted.pattern, self.problem, config)
        self._stored = arranged.stored
        self.arranges_values = not self._stored.keeps_order
        self._shapes = wanted.shapes
        self._out_shape = self._shapes["out"]
        self._nothing = 0 in self._out_shape
        result = math.prod(self._out_shape) * self._out_bytes
        self._large = not self._gpu and result >= LEAST_BYTES
        often = not self._gpu and wanted.gathers_often(config)
        self._gathered = self._place["b"] if often else -1
        self._args: list[object] = [None] * len(signature.passed)
        self._for_values: Callable[[], Plan] | None = None
        if self._unpacked != config:  # made on first use
            self._for_values = cache(lambda: Plan(wanted, self._unpacked, self.chosen_by))
        self.needs_values = "a" in self._shapes and values is None
        sizes = {**wanted.sizes, "tiles": self._tiles}
        computed = arranged.computed(signature.func, sizes)
        self._computed = computed if signature.of_values else {}
        arguments = {**sizes, **arranged.arguments, **computed}
        # Shapes of arrays that the kernel takes in another shape than the caller's.
        numbers = [arguments.get(name) for name in signature.names]
        # Values that are arranged have other names.
        ours = [name for name in self._shapes if name in self._place]
        taken = {name: signature.expected_shape(self._place[name], numbers) for name in ours}
        self._kernel_shapes = {n: tuple(s) for n, s in taken.items() if s != [*self._shapes[n]]}
        self._put({name: value for name, value in arguments.items() if name in self._place})
        # Positions of arrays that are passed to the kernel unchanged.
        self._scratch = {
            name: (
                tuple(signature.expected_shape(self._place[name], numbers)),
                self.problem.accumulator,
            )
            for name in wanted.operator.scratch
        }
        direct = not self._gpu and not self._kernel_shapes and not self._scratch
        direct = direct and self._count <= 2
        self._direct = [self._place[n] for n in self._operands] if direct else []
        self._values_at = self._place_of_values() if direct else -1
        fixed = "a" not in self._shapes or self._values_at >= 0
        # Values that are arranged have no position.
        self.repeats = direct and not self._nothing and fixed and self._for_values is None
        if "a" in self._shapes and values is not None:
            values = np.broadcast_to(values, self._shapes["a"])
            copy = empty(self._shapes["a"], self._values_dtype)  # the pattern is a copy, too
            copy[...] = values
            self._put(self._arranged(copy))
        self.convert_seconds: float = time.perf_counter() - start

    @property
    def padding(self) -> float:
        """Share of the slots that are padding."""
        return self._stored.padding

    def _put(self, arguments: Mapping[str, object]) -> None:
        """Keep arguments for all runs, with arrays on the kernel's device."""
        for name, value in arguments.items():
            array = self._on_device(value) if is_array(value) else value
            self._args[self._place[name]] = self._view(name, array)

    def _on_device(self, array: object) -> object:
        if not isinstance(array, np.ndarray):
            return array
        if not self._gpu:
            return tvm_ffi.from_dlpack(plain_view(array))
        return tvm.runtime.tensor(array, self._device)

    def __call__(self, *operands: Any, out: Any = None, values: Any = None) -> Any:
        """Run on torch, NumPy or TVM arrays, contiguous and of the plan's dtype.

        Parameters
        ----------
        *operands : arrays
            b (n, feat) for "spmm", (n,) for "spmv"; x (m, feat) and y (n, feat) for "sddmm"; x (n,
            feat_in) and w (relations, feat_in, feat) for "rgms"; u (n, feat), e (nnz, edge_feat) or
            both for messages, x (nnz,) for "softmax"; q (m, feat_in), k (n, feat_in) and v
            (n, feat) for "attention". Heads come second.
        out : array, optional
            The array to write to and return. A new one of several MiB costs about as much as the
            product, since the system maps its memory page by page: reuse one where you can.
        values : (nnz,) array, optional
            Values of the matrix, in the order of its pattern; by default those planned with.

        Returns
        -------
        array
            Like the first operand: (m, feat), (m,) or (nnz,).

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.

        Notes
        -----
        A plan has copies of the matrix's values and indices: later writes to the matrix change no
        result, whatever the config; pass `values` for other values. Results have no gradients, so
        tensors that require one are refused except under torch.no_grad(); :mod:`sparsetir.ops` has
        gradients.
        """
        if values is not None and self._for_values is not None:
            return self._for_values()(*operands, out=out, values=values)
        if len(operands) != self._count:
            raise TypeError(
                f"{self.op}: expected {len(self._operands)} operands "
                f"({', '.join(self._operands)}), got {len(operands)}"
            )
        if values is None and self.needs_values:
            raise TypeError(f"{self.op}: argument 'values': expected an array, got None")
        result = out
        for array in operands:
            if type(array) is not np.ndarray:
                self._check_memory(operands, values, out)
                if result is None:
                    out = self._new_result(operands[0])
                break
        else:
            if result is None:
                out = empty(self._out_shape, self._out_dtype or operands[0].dtype)
            if type(out) is not np.ndarray or not (values is None or type(values) is np.ndarray):
                self._check_memory(operands, values, result)
        args = self._args.copy()
        if not self._direct or (values is not None and self._values_at < 0):
            self._fill(args, operands, values, out)
        else:
            args[self._direct[0]] = operands[0]
            if self._count > 1:
                args[self._direct[1]] = operands[1]
            if values is not None:
                args[self._values_at] = values
            args[self._out_at] = out
        if self._gpu:
            names, arrays = (*self._operands, "out"), (*operands, out)
            check_alignment(self.op, names, arrays, self._bytes, GPU_ALIGNMENT)
            if self._nothing:
                return out  # CUDA refuses an empty grid
        if self._gathered >= 0:
            args[self._gathered] = at_cache_line(args[self._gathered])
        try:
            self._run(*args)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            self._run_refused(args, operands, values, result, error)
        if result is not None and type(result) is not np.ndarray:
            count_writes((result,))
        return out

    def _check_memory(self, operands: tuple[object, ...], values: object, out: object) -> None:
        """Raise for arrays whose memory does not hold their numbers."""
        names, gradients = self._checked[values is not None, out is not None]
        arrays = operands if values is None else (*operands, values)
        check_memory(self.op, names, arrays if out is None else (*arrays, out), gradients)

    def _fill(
        self, args: list[object], operands: tuple[object, ...], values: object, out: object
    ) -> None:
        """Put arrays at the kernel's positions, in its shapes."""
        for name, array in zip(self._operands, operands, strict=True):
            args[self._place[name]] = self._view(name, array)
        if values is not None:
            for name, array in self._values(values).items():
                args[self._place[name]] = array
        args[self._out_at] = self._view("out", out)
        for name, (shape, dtype) in self._scratch.items():  # new in each call
            scratch = tvm.runtime.empty(shape, dtype, self._device) if self._gpu else None
            args[self._place[name]] = np.empty(shape, dtype) if scratch is None else scratch

    def _run_refused(
        self,
        args: list[object],
        operands: tuple[object, ...],
        values: object,
        out: object,
        error: Exception,
    ) -> None:
        """Raise for arguments that TVM refused, or run with other views of them.

        out : None for a new array
        error : raised again if the arguments were not the reason
        """
        if values is not None and self._direct:  # they were passed unchecked
            self._values(values)
        if out is not None:
            self._refuse_overlap(out, operands, values)
        try:
            self.kernel.run_refused(args, error)
        except (TypeError, ValueError) as refusal:  # in the kernel's names
            text = str(refusal).replace(f"{self.kernel.name}: argument", f"{self.op}: argument", 1)
            raise type(refusal)(text) from error

    def _new_result(self, operand: object) -> object:
        """A result of the operand's kind, other than NumPy's."""
        out = empty_like(operand, self._out_shape, self._first, self._out_dtype)
        if self._large and is_torch(out):
            in_large_pages(out)
        return out

    def repeat(self, operands: Sequence[Any], values: Any = None) -> Any:
        """Run on torch tensors that fit, without checks, into a new result.

        Parameters
        ----------
        operands, values
            As for a call; contiguous, unless the plan `repeats`.

        Returns
        -------
        Tensor or None
            None if TVM refuses the tensors, or they must be arranged; a kernel that fails raises.
        """
        args, first = self._args.copy(), operands[0]
        if self._out_dtype is None and not self._large:
            out = first.new_empty(*self._out_shape)
        else:
            out = self._new_result(first)
        if self.repeats:
            args[self._direct[0]] = first
            if self._count > 1:
                args[self._direct[1]] = operands[1]
            if values is not None:
                args[self._values_at] = values
            args[self._out_at] = out
        elif not self._view_all(args, operands, values, out):
            return None
        if self._gathered >= 0:
            args[self._gathered] = at_cache_line(args[self._gathered])
        try:
            self._run(*args)
        except (TypeError, ValueError, BufferError, RuntimeError):
            if self.kernel.takes(args):
                raise
            return None
        return out

    def _view_all(
        self, args: list[object], operands: Sequence[Any], values: Any, out: object
    ) -> bool:
        """Put tensors that fit at the kernel's positions; return False if that needs more steps."""
        arranged = self.arranges_values or self._for_values is not None
        if self._nothing or self._scratch or (values is not None and arranged):
            return False
        named = dict(zip(self._operands, operands, strict=True), out=out)
        if values is not None:
            named |= self._stored.values(A=values)
        shapes = self._kernel_shapes
        for name, array in named.items():
            args[self._place[name]] = array.view(shapes[name]) if name in shapes else array
        return True

    def _values(self, values: Any) -> Mapping[str, Any]:
        """The kernel's arrays of values."""
        if "a" not in self._shapes:
            raise TypeError(f"{self.op}: argument 'values': the operator takes none")
        if not is_array(values) or tuple(values.shape) != self._shapes["a"]:
            expected = f"an array of shape {self._shapes['a']}"
            raise wrong(self.op, "values", expected, shape_of(values))
        if dtype_name(values) != self._values_dtype:
            raise wrong(
                self.op, "values", f"dtype {self._values_dtype}", dtype_name(values), TypeError
            )
        arrays = self._arranged(values)
        if not is_contiguous(values) and any(x is values for x in arrays.values()):
            got = f"strides {strides(values)}" if is_strided(values) else values.layout
            raise wrong(self.op, "values", "a contiguous array", got)
        return {name: self._view(name, self._on_device(x)) for name, x in arrays.items()}

    def _place_of_values(self) -> int:
        """The position of a run's values if the kernel takes them unchanged, else -1."""
        signature = self.kernel.signature
        if signature.of_values or not self._stored.keeps_order or "a" not in self._place:
            return -1
        probe = np.zeros(self._shapes["a"], self._values_dtype)
        stored = self._stored.values(A=probe)
        return self._place["a"] if set(stored) == {"a"} and stored["a"] is probe else -1

    def _arranged(self, values: object) -> dict[str, object]:
        """The kernel's arrays of values, including those that its schedule derives from them."""
        stored = self._stored.values(A=values if self._stored.keeps_order else to_numpy(values))
        return {**stored, **self.kernel.of_values(stored, self._computed)}

    def _view(self, name: str, array: Any) -> Any:
        """View an array in the kernel's shape, which has neither heads nor vectors."""
        shape = self._kernel_shapes.get(name)
        if shape is None or not is_array(array):
            return array
        if tuple(array.shape) != self._shapes[name] or not is_contiguous(array):
            raise ValueError(
                f"{self.op}: argument '{name}': expected a contiguous array of shape "
                f"{self._shapes[name]}, got shape {tuple(array.shape)}, strides {strides(array)}"
            )
        view: Any = getattr(array, "_create_view", None)  # TVM's tensors have it
        return array.reshape(shape) if view is None else view(shape, array.dtype)

    def _refuse_overlap(self, out: object, operands: tuple[object, ...], values: object) -> None:
        """Raise if the result shares memory with an input."""
        arrays = {f"'{name}'": x for name, x in zip(self._operands, operands, strict=True)}
        for said, array in {**arrays, "the values": values}.items():
            if array is not None and overlap(out, array, self._out_bytes, self._bytes):
                raise ValueError(f"{self.op}: argument 'out' shares memory with {said}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("Plan: cannot be pickled; pickle the matrix and plan again")

    def __repr__(self) -> str:
        return f"<sparsetir.Plan {self.op} {self._shapes['out']} {self.config}>"


def _checked(
    op: str, operands: tuple[str, ...], values: bool, out: bool
) -> tuple[tuple[str, ...], dict[int, str]]:
    """Names of a call's arrays and, by position, why they must not require a gradient."""
    names = (*operands, "values") if values else operands
    gradients = dict.fromkeys(range(len(names)), NO_GRADIENT.format(op))
    if out:
        gradients[len(names)], names = WRITTEN, (*names, "out")
    return names, gradients


# -- the cache of kernels, which serve all patterns -----------------------------------------------


# Kernels in the cache, with all of their stages; plans keep their kernels beyond it.
MOST_KERNELS = 512
_kernels: OrderedDict[Hashable, Kernel] = OrderedDict()
_count = 0
_access = threading.Lock()


def compilations() -> int:
    """The number of kernels that plans and operators have compiled in this process."""
    return _count


def compiled_by(config: Config, problem: Problem, target: Target) -> Kernel:
    """The kernel of a config's template for a problem, shared by plans and operators.

    Raises TypeError if `config` is not a config for the problem.
    """
    return finder(config, problem, target)()


def finder(config: Config, problem: Problem, target: Target) -> Callable[[], Kernel]:
    """A function that returns :func:`compiled_by`, and keeps no kernel alive itself."""

    def stages() -> Stages:
        template = template_of(config, problem, is_gpu(target))
        return lower_template(template, problem, config, target)

    def what() -> str:
        if type(config) in ORIGINS:  # a template of a user's is code that may change
            return ""
        template = template_of(config, problem, is_gpu(target))
        program = template.program(problem, config.compiled)
        return f"{tvm.ir.save_json(program)} {config.compiled!r}"

    key = _Key((problem, _compiled_part(config)))
    return lambda: compiled(key, target, stages, what)


class _Key(tuple[Problem, Hashable]):
    """The key of a kernel with a cached hash, which takes longer than a small kernel."""

    def __init__(self, _: object) -> None:
        self.number = super().__hash__()

    def __hash__(self) -> int:
        return self.number


# Cached, as computing the text of a target, or a config's part, takes longer than a look-up.
_text = lru_cache(64)(str)


@lru_cache(1024)
def _compiled_part(config: Config) -> Hashable:
    return config.compiled


def compiled(
    key: Hashable, target: Target, stages: Callable[[], Stages],
    what: Callable[[], str] | None = None,
) -> Kernel:  # fmt: skip
    """The kernel for a key and a `tvm.target.Target`, loaded or compiled on first use.

    Evicts the least recently used kernel beyond `MOST_KERNELS`. A thread that looks up a compiled
    kernel does not wait for others that compile.

    stages : returns the stages to compile; the kernel trusts its index arrays
    what : see :func:`sparsetir.runtime.kernel_cache.kept_kernel`; by default the text of `key`
    """
    global _count
    what = what or partial(repr, key)
    key = (key, _text(target))
    kernel = _kept(key)
    if kernel is not None:
        return kernel
    with COMPILING:
        kernel = _kept(key)  # another thread may have compiled it meanwhile
        if kernel is None:
            kernel, new = kept_kernel(what, target, stages)
            with _access:
                _count += new
                _kernels[key] = kernel
                while len(_kernels) > MOST_KERNELS:
                    _kernels.popitem(last=False)
        return kernel


def _kept(key: Hashable) -> Kernel | None:
    with _access:
        kernel = _kernels.get(key)
        if kernel is not None:
            _kernels.move_to_end(key)
        return kernel
