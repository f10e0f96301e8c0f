"""A compiled function: binds arrays, checks them, runs, shows its stages, saves itself."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm.support.cc import get_cc

from sparsetir.runtime import pool
from sparsetir.runtime.arrays import (
    LEAST_ALIGNED,
    aligned_rows,
    check_memory,
    count_writes,
    is_array,
    is_read_only,
    placed,
    plain_view,
    reference,
    to_numpy,
    unowned,
)
from sparsetir.runtime.file_errors import as_path
from sparsetir.runtime.kernel_file import write_library
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.signature import PENDING, Arguments, Signature
from sparsetir.schedules.targets import allowed, assumed_machine, features_needed, is_gpu, refusing
from sparsetir.sparse_ir.computed import compute, compute_of_values, reads, valid_for_any
from sparsetir.sparse_ir.promises import promised_range
from sparsetir.sparse_ir.structure import check_structure

# Sets of index arrays that a kernel remembers as valid, with the parameters computed from them.
REMEMBERED = 8


ByPattern = Callable[[Mapping[str, Any]], "Callable[[Sequence[Any]], Kernel | None] | None"]


class Seen(NamedTuple):
    """Index arrays that a kernel remembers as valid.

    sizes : the scalars that they were checked for
    references : their positions, each with a function that returns the array
    views : positions of NumPy's, each with a tensor of TVM's on its memory, which a call takes in a
        fifth of a microsecond less. It does not keep the array alive; NumPy does not move memory of
        arrays with weak references
    computed : the parameters computed from them
    orders : the orders of parameters that follow values
    other : selects another kernel that suits the pattern by a call's arguments
    """

    sizes: object
    references: tuple[tuple[int, Callable[[], object]], ...]
    views: tuple[tuple[int, object], ...]
    computed: list[object]
    orders: dict[str, np.ndarray]
    other: Callable[[Sequence[Any]], Kernel | None] | None

    @property
    def alive(self) -> bool:
        """Whether none of the arrays has been freed."""
        return all(array() is not None for _, array in self.references)


WRITTEN = (
    "it is written, and requires a gradient, which would not be that of what is written; give "
    "another tensor, or call under torch.no_grad()"
)


class Kernel:
    """A compiled function, made by :func:`sparsetir.build` and :func:`sparsetir.load`.

    Call it with the function's parameters in order or by name. Arrays are torch, NumPy or TVM
    arrays in their natural shape (see :mod:`sparsetir.runtime.signature`), contiguous, of any
    alignment, on the kernel's device; nothing is copied, outputs are written in place. Lazy states
    of torch that are not in memory, such as a negative bit, are refused, and so are outputs that
    require a gradient, except under torch.no_grad(); torch counts outputs as written in place.
    Scalars are Python integers and may be left out (or None) if the shapes of arrays imply them.

    Parameters
    ----------
    module : tvm.runtime.Module
        The module that TVM compiled.
    name : str
        The name of the function.
    signature : Signature
        Names, shapes and types of its parameters.
    stages : mapping of str to function, or callable
        The function at stage "I", "II" (as lowered), "II scheduled" and "III"; or a function that
        lowers it again when the stages are first read.
    target : tvm.target.Target
        The target it was compiled for.
    check : bool
        Check index arrays that are not among the last eight sets that the kernel saw
        (:func:`check_structure`). They are identified as objects: an array changed in place is not
        checked again. False turns it off: the kernel then trusts them.
    assumes : mapping of str to int, optional
        The value of :attr:`assumes`; by default that of this machine.
    needs : sequence of str, optional
        Features of the CPU that its schedule requires by name. Where they are missing, or the
        system does not permit their use, a call raises RuntimeError.
    compiler : callable, optional
        Compiles the stages again, for a kernel whose `module` comes from a file and has no text.

    Attributes
    ----------
    stages : dict of str to function
        The function at each stage; empty for a kernel that was loaded from an exported file.
    computed : mapping
        Recipe and keywords of each computed parameter, by name.
    estimates : mapping of str to int
        For each passed parameter that only affects speed, a value that is valid for any arguments.
    gathered : list of (int, int)
        Positions of arrays whose rows are gathered, and of the indices that select these. NumPy's
        arrays begin anywhere; where it pays, a call copies them to the start of a cache line.
    numbers : mapping of str to int
        Values of computed numbers that their recipes leave open, such as the number of blocks,
        unless a caller gives others.
    by_pattern : callable, optional
        For index arrays and sizes by name, a function that selects the kernel for later calls with
        them, by all arguments in order. None, of it or from it, is for this kernel. Set by
        :func:`sparsetir.build`.
    entry : tvm.runtime.PackedFunc
        TVM's function, which takes the arguments `signature.passed` in order; only TVM checks them.

    Raises
    ------
    TypeError, ValueError
        In a call, for an invalid argument; the message names it and the function.
    StructureError
        In a call, for invalid structure; also its subclasses.

    Notes
    -----
    Parameters that its schedule computes (see :mod:`sparsetir.sparse_ir.computed`) are not the
    caller's: they are computed when a set of index arrays is first seen, checked or not, and kept
    with it; those that depend on values, in every call. A schedule's promises about scalars are
    checked in every call. A kernel may be called from several threads at once.
    """

    entry: Callable[..., object]

    def __init__(
        self,
        module: tvm.runtime.Executable | tvm.runtime.Module,
        name: str,
        signature: Signature,
        stages: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        target: tvm.target.Target,
        *,
        check: bool = True,
        needs: Sequence[str] | None = None,
        assumes: Mapping[str, int] | None = None,
        compiler: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.name = name
        self.signature = signature
        self._stages = stages if callable(stages) else dict(stages)
        self._compiler = compiler
        self.target = target
        self.check = check
        self._assumes = assumes
        self._module = module
        self._loaded = not stages  # from a file, which holds no stages and cannot be written again
        self.needs: list[str] = (
            features_needed(self.stages.get("II scheduled")) if needs is None else list(needs)
        )
        refused = "" if is_gpu(target) else allowed(self.needs, target)
        with pool.serving():  # TVM loads a module when its first function is asked for
            self._run = self.entry = refusing(name, refused) if refused else module[name]
        self._given = binder = Arguments(name, signature, target)
        self._count, self._limits = binder.count, binder.limits
        self._numpy = binder.types(np.ndarray)
        self._arrays, self._scalars, self._outputs = binder.arrays, binder.scalars, binder.outputs
        self.gathered = [] if is_gpu(target) else signature.gathered
        self._other_shapes: tuple[int, ...] = ()  # positions where arrays of other shapes were seen
        self._array_names = [signature.names[i] for i in self._arrays]
        self._without_gradient = {self._arrays.index(i): WRITTEN for i in self._outputs}
        places = [(signature.position[p["param"]], p) for p in signature.promises]
        self._promised = tuple((i, *promised_range(p)) for i, p in places if i < self._count)
        self._index = (*signature.index_arrays,)
        self.computed = signature.computed
        self._remembers = bool(self.computed or (check and self._index))
        sizes = signature.index_sizes if self._remembers else []
        self._sizes_of = itemgetter(*sizes) if sizes else lambda values: ()
        # Other sizes are checked once, with index arrays.
        self._other_limits = tuple(limit for limit in self._limits if limit[0] not in sizes)
        self._made = signature.passed[self._count :]
        self._steady = [name for name in self._made if name not in signature.of_values]
        self._read = {name for how in self.computed.values() for name in reads(how)}
        estimates = {name: valid_for_any(self.computed[name]) for name in self._made}
        self.estimates = {name: x for name, x in estimates.items() if x is not None}
        self.numbers: Mapping[str, int] = {}
        self.by_pattern: ByPattern | None = None
        self._seen: list[Seen] = []  # the newest first

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Run the kernel; see the class.

        Parameters
        ----------
        *args, **kwargs
            The function's parameters, in order or by name.
        """
        values: list[Any] = [*args]
        if kwargs or len(values) != self._count:
            values = self._given.bind(args, kwargs)
        numpy = [*map(type, values)] == self._numpy
        for i, kind, low, high in self._other_limits if numpy else self._limits:
            value = values[i]
            if type(value) is not kind or not low <= value <= high:
                self._given.complete(values)
                break
        for i, low, high, step in self._promised:
            if not low <= values[i] <= high or values[i] % step:
                self._given.refuse_broken_promise(values)
        kernel, seen = self, self._remembered(values) if self._remembers else None
        if seen is not None and seen.other is not None:
            kernel = seen.other(values) or self
            seen = seen if kernel is self else kernel._remembered(values)
        for i, by in kernel.gathered:
            if isinstance(values[i], np.ndarray) and values[i].nbytes >= LEAST_ALIGNED:
                values[i] = aligned_rows(values[i], values[by], [values[o] for o in self._outputs])
        if not numpy:
            arrays = [values[i] for i in self._arrays]
            for array in arrays:
                if type(array) is not np.ndarray:
                    check_memory(self.name, self._array_names, arrays, self._without_gradient)
                    break
            else:
                numpy = True
        if seen is not None:
            values += kernel._with_values(values, seen) if seen.orders else seen.computed
            for i, view in seen.views:
                values[i] = view
        refusal = None
        try:
            kernel._run(*(kernel._in_natural_shape(values) if kernel._other_shapes else values))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            refusal = error
        if refusal is not None:
            kernel.run_refused(values, refusal)
        if not numpy:
            count_writes([values[i] for i in self._outputs])

    def shape_of(self, name: str, given: Mapping[str, object]) -> tuple[int, ...]:
        """The shape that an array must have, given the other arguments.

        Parameters
        ----------
        name : str
            The array's parameter.
        given : mapping
            The other arguments by name; scalars that their shapes imply may be left out.

        Returns
        -------
        tuple of int

        Raises
        ------
        TypeError
            For arguments that are missing.
        """
        whole = self.completed(given, name)
        values = [whole.get(other, PENDING) for other in self.signature.names]
        return tuple(self.signature.expected_shape(self.signature.position[name], values))

    def completed(self, given: Mapping[str, object], *others: str) -> dict[str, object]:
        """Add the scalars that the shapes of arrays imply to arguments.

        Parameters
        ----------
        given : mapping
            Arguments by name.
        *others : str
            Arrays that do not exist yet, which are left out.

        Returns
        -------
        dict

        Raises
        ------
        TypeError, ValueError
            For arguments that are missing, and scalars that are not numbers.
        """
        values = self._given.bind((), {**given, **dict.fromkeys(others, PENDING)})
        self._given.complete(values)
        named = zip(self.signature.names, values, strict=True)
        return {name: x for name, x in named if x is not PENDING}

    def chosen_for(self, given: Mapping[str, object]) -> Kernel:
        """The kernel that runs from the second call with the same index arrays on.

        Parameters
        ----------
        given : mapping
            Arguments by name; scalars that the shapes of arrays imply may be left out.

        Returns
        -------
        Kernel
            This one, but for a program and pattern with another order of rows.

        Raises
        ------
        TypeError, ValueError, StructureError
            As a call does.
        """
        values = [*self.completed(given).values()]
        if self.by_pattern is None:
            return self
        self._remembered(values)
        other = self._remembered(values).other
        return (None if other is None else other(values)) or self

    @property
    def assumes(self) -> Mapping[str, int]:
        """The "l2_bytes" of a core and "threads" of the CPU that the schedule was made for.

        On other CPUs results are the same, but the kernel may be slower. Empty for GPUs, and if a
        file does not record it.
        """
        return assumed_machine(self.target) if self._assumes is None else self._assumes

    @property
    def stages(self) -> dict[str, Any]:
        """The function at each stage, by name; see the class."""
        if callable(self._stages):
            self._stages = dict(self._stages())
        return self._stages

    @property
    def _text(self) -> Any:
        """The module whose text can be read, and which can be written to a file."""
        return self._module if self._compiler is None else self._compiler(self.stages)

    def run_unchecked(self, values: Sequence[object]) -> None:
        """Run on the arguments `signature.passed`; only TVM checks them.

        Parameters
        ----------
        values : sequence
            The arguments, in that order.
        """
        self._run(*values)

    def run(self, values: Sequence[object]) -> None:
        """Run on all of the function's parameters, which are trusted.

        Parameters
        ----------
        values : sequence
            The parameters, in order.
        """
        if self.computed:  # a full call caches them by index arrays
            self(*values)
            return
        try:
            self._run(*values)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            self.run_refused(values, error)

    def run_refused(self, values: Sequence[Any], error: Exception) -> None:
        """Run again with views of the arrays that TVM refused, or raise.

        Parameters
        ----------
        values : sequence
            The arguments of :meth:`run_unchecked`.
        error : Exception
            The exception. It is raised again if the arguments were not the reason: a kernel that
            failed while it ran is not run again.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.
        """
        values = list(values)
        views = self._plain_views(values)
        read_only = any(is_read_only(values[i]) for i in self._outputs)
        if views is None or read_only or isinstance(error, RuntimeError):
            self._given.refuse(values)
            raise error
        try:
            self._run(*views)
        except (TypeError, ValueError, BufferError) as other:
            self._given.refuse(values)
            raise other from None
        for i in self._arrays:
            if len(values[i].shape) != len(views[i].shape) and i not in self._other_shapes:
                self._other_shapes = (*self._other_shapes, i)

    def takes(self, values: Sequence[object]) -> bool:
        """Whether arguments fit, so that an error is the kernel's own.

        Parameters
        ----------
        values : sequence
            The arguments, as for :meth:`run_unchecked`.

        Returns
        -------
        bool
        """
        try:
            self._given.refuse(list(values))
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: tensors without memory
            return False
        return self._plain_views(values) is None

    def compute(
        self, arguments: Mapping[str, object], overrides: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Evaluate the computed parameters, by name.

        :meth:`run_unchecked` takes those in `signature.passed`.

        Parameters
        ----------
        arguments : mapping
            By name, at least those that the recipes read; without indices a reuse distance is
            2**62, which is valid for any.
        overrides : mapping, optional
            Values for numbers that their recipes leave open, such as the number of blocks;
            parameters that depend on them follow.

        Returns
        -------
        dict of str to ndarray or int

        Raises
        ------
        ValueError
            As from :func:`sparsetir.sparse_ir.computed.compute`.
        """
        chosen = {**self.numbers, **(overrides or {})}
        return compute(self.signature.func, self._numbers(arguments), chosen)

    def compute_passed(
        self, arguments: Mapping[str, object], estimate: bool | Mapping[str, int] = False
    ) -> dict[str, Any]:
        """Evaluate the computed parameters in `signature.passed`, and those they depend on.

        Parameters
        ----------
        arguments : mapping
            As for :meth:`compute`.
        estimate : bool or mapping
            Use the kernel's `estimates`, or other values for them, rather than compute, which
            takes longer than a small kernel.

        Returns
        -------
        dict of str to ndarray or int
        """
        estimates = self.estimates if estimate is True else estimate or {}
        if len(estimates) == len(self._made):
            return dict(estimates)
        chosen = {**self.numbers, **estimates}
        return compute(self.signature.func, self._numbers(arguments), chosen, self._made)

    def _numbers(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """The arguments that recipes read, arrays as NumPy."""
        named = ((n, arguments[n]) for n in self._read & arguments.keys())
        return {n: to_numpy(v) if type(v) is not int and is_array(v) else v for n, v in named}

    def of_values(
        self, arguments: Mapping[str, object], computed: Mapping[str, object]
    ) -> dict[str, object]:
        """The computed arguments that depend on values, by name.

        Parameters
        ----------
        arguments : mapping
            By name, at least the arrays that recipes read and that are not computed.
        computed : mapping
            The other computed parameters, from :meth:`compute`.

        Returns
        -------
        dict of str to ndarray
        """
        names = self.signature.of_values
        if not names:
            return {}
        read = {n for name in names for n in reads(self.computed[name])} - computed.keys()
        arrays = {name: to_numpy(arguments[name]) for name in read}
        return compute_of_values(self.signature.func, names, {**arrays, **computed})

    def source(self, kind: str | None = None) -> str:
        """Return the generated code.

        Parameters
        ----------
        kind : {"ll", "asm", "cuda"}, optional
            For CPUs LLVM's text (the default) or assembly. For GPUs "cuda", the kernels' CUDA text,
            is the default, which `nvcc -ptx` compiles to PTX; "ll" and "asm" are of the part that
            runs on the host, and launches them.

        Returns
        -------
        str
        """
        whole = self._text
        module = getattr(whole, "mod", whole)
        device = list(module.imports)
        if self._loaded and not device:
            raise ValueError(f"{self.name}: a loaded kernel has no source")
        if device and kind in (None, self.target.kind.name):
            return "\n".join(m.inspect_source() for m in device)
        if kind not in (None, "ll", "asm"):
            own = "'cuda' (nvcc -ptx compiles it to PTX), or of the host part " if device else ""
            expected = f"{own}'ll' or 'asm'"
            raise wrong(f"{self.name}: source", "kind", expected, f"{kind!r}")
        return module.inspect_source(kind or "ll")

    def export(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a shared library that :func:`sparsetir.load` and TVM's runtime alone can load.

        Parameters
        ----------
        path : str or Path
            A path that ends in ".so".
        overwrite : bool
            Replace an existing file; kernels loaded from it earlier are not affected.

        Raises
        ------
        ValueError
            For another ending.
        FileExistsError
            If the file exists, without `overwrite=True`.
        FileNotFoundError
            For a folder that does not exist.
        OSError
            If it cannot be written; then no partial file is left.
        RuntimeError
            Without a C compiler, which links the library.
        """
        caller = f"{self.name}: export: argument 'path'"
        path = as_path(f"{self.name}: export", "path", path)
        if self._loaded:
            raise ValueError(
                f"{self.name}: a loaded kernel cannot be exported again; copy its file"
            )
        if path.suffix != ".so":
            raise ValueError(f"{caller}: expected a name that ends in '.so', got '{path}'")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{caller}: there is no folder '{path.parent}'")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{caller}: '{path}' exists; pass overwrite=True to replace it")
        if shutil.which(compiler := get_cc() or "") is None:
            raise RuntimeError(
                f"{self.name}: export: expected a C compiler on PATH, such as gcc or clang, or its "
                f"path in CXX, as it links the library; got {compiler or 'none'}"
            )
        meta = description(self.name, self.signature, self.target, self.needs, self.assumes)
        try:
            write_library(self._text, path, meta, overwrite)
        except OSError as error:
            text = f"{caller}: '{path}' cannot be written: {error.strerror}"
            raise OSError(error.errno, text) from error

    def __reduce__(self) -> object:
        raise TypeError("Kernel: cannot be pickled or copied; export it, and load the file")

    def __repr__(self) -> str:
        return f"<sparsetir.Kernel {self.name}({', '.join(self.signature.names)})>"

    def _in_natural_shape(self, values: Sequence[Any], places: Sequence[int] = ()) -> list[Any]:
        """Convert arrays to natural shape, by default at positions that once had another shape."""
        views = list(values)
        for i in places or self._other_shapes:
            views[i] = self.signature.view(i, values)
        return views

    def _plain_views(self, values: Sequence[object]) -> list[Any] | None:
        """The arguments with views that TVM accepts; None if none is needed."""
        views = self._in_natural_shape(values, self._arrays)
        for i in self._arrays:
            views[i] = plain_view(views[i])
        changed = any(view is not value for view, value in zip(views, values, strict=True))
        return views if changed else None

    # -- index arrays, and parameters computed from them ---------------------------------------

    def _remembered(self, values: list[Any]) -> Seen:
        """The record of a call's index arrays; they are checked if there is none."""
        sizes = self._sizes_of(values)
        for seen in self._seen:
            for i, array in seen.references:
                if array() is not values[i]:
                    break
            else:
                if seen.sizes == sizes:
                    return seen
        return self._check_new_arrays(values, sizes)

    def _check_new_arrays(self, values: list[Any], sizes: object) -> Seen:
        """Check index arrays that are new with these sizes, and compute parameters from them."""
        self._given.refuse(values)
        names = self.signature.names
        numbers = [to_numpy(v) if i in self._index else v for i, v in enumerate(values)]
        arguments = {names[i]: self.signature.flat(i, numbers) for i in self._index}
        arguments |= {names[i]: values[i] for i in self._scalars}
        if self.check:
            check_structure(self.signature.func, arguments)
        func = self.signature.func
        extra = compute(func, arguments, self.numbers, self._made) if self.computed else {}
        forget = _evict_callback(self)
        references = tuple((i, reference(values[i], forget)) for i in self._index)
        orders: dict[str, np.ndarray] = {}
        if self.signature.of_values:
            # Once with all checks; later calls use orders in NumPy's own integers, twice as fast.
            natural = {names[i]: self.signature.view(i, values) for i in self._arrays}
            self.of_values(natural, extra)
            how = {n: str(self.computed[n]["order"])[1:] for n in self.signature.of_values}
            orders = {n: {**arguments, **extra}[order].astype(np.intp) for n, order in how.items()}
        computed = self._placed(values, [extra[n] for n in self._steady])
        views = tuple(
            (i, unowned(self.signature.view(i, values)))
            for i in self._index
            if type(values[i]) is np.ndarray and i not in self._outputs
        )
        seen = Seen(sizes, references, views, computed, orders, None)
        # Only from the second call on: preparing another kernel takes as long as some ten calls.
        later = None if self.by_pattern is None else self.by_pattern(arguments)
        # A new list each time: other threads may be reading the old one.
        self._seen = [seen._replace(other=later), *self._seen[: REMEMBERED - 1]]
        return seen

    def _placed(self, values: list[Any], computed: Iterable[object]) -> list[object]:
        """Move computed parameters to the arguments' device."""
        arrays = [values[i] for i in self._arrays]
        kind = "cpu" if "cpu" in self.target.keys else self.target.kind.name
        return [placed(v, kind, arrays) if is_array(v) else v for v in computed]

    def _with_values(self, values: list[Any], seen: Seen) -> list[object]:
        """All computed arguments, in order: the steady ones, and those that depend on `values`."""
        packed: list[np.ndarray] = []
        for name, order in seen.orders.items():
            i = self.signature.position[str(self.computed[name]["values"])[1:]]
            try:
                packed.append(to_numpy(values[i]).take(order))
            except Exception as error:
                self._given.refuse(values)
                if not isinstance(error, IndexError):
                    raise
                raise ValueError(
                    f"{self._given.named(i)}: expected {order.max() + 1} elements or more, which "
                    f"it is packed from, got {len(values[i])}"
                ) from None
        by_name = dict(zip(seen.orders, self._placed(values, packed), strict=True))
        rest = iter(seen.computed)
        return [by_name[name] if name in by_name else next(rest) for name in self._made]


def description(
    name: str, signature: Signature, target: tvm.target.Target, needs: Sequence[str],
    assumes: Mapping[str, int],
) -> dict[str, object]:  # fmt: skip
    """The description in the file of a kernel, beside its library."""
    return {
        "name": name,
        "signature": tvm.ir.save_json(signature.source),
        "target": str(target),
        "needs": list(needs),
        "assumes": dict(assumes),
    }


def _evict_callback(kernel: Kernel) -> Callable[[object], None]:
    """The callback that drops records of index arrays when one of these is freed."""
    referred = weakref.ref(kernel)

    def forget(_: object) -> None:
        kernel = referred()
        if kernel is not None:
            kernel._seen = [seen for seen in kernel._seen if seen.alive]

    return forget
