"""A compiled function: binds arrays, checks them, runs, shows its stages, saves itself."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from sparsetir.signature import PlainSignature, Signature
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.structure import check_structure

__all__ = ["Kernel", "load"]

# An exported kernel is a shared library with its signature behind it, then the length of that
# text in 16 digits and this mark. Loaders of shared libraries ignore what follows the last section.
MARK = b"SPARSETIR1"


class Kernel:
    """A compiled function.

    Call it with the function's parameters in order or by name. Arrays are torch, NumPy or TVM
    arrays in their natural shape (see :mod:`sparsetir.signature`), contiguous, of any alignment,
    on the kernel's device; nothing is copied, outputs are written in place. Scalars are Python
    integers and may be left out (or None) where the shapes of arrays imply them.

    Index arrays that a kernel sees for the first time are checked (:func:`check_structure`);
    "first" goes by object: an array changed in place is not looked at again. `check=False` turns it
    off: the kernel then trusts them.

    Raises TypeError or ValueError naming function and argument, StructureError and its subclasses
    for invalid structure.

    stages : the function at stage "I", "II" (as lowered), "II scheduled" and "III"
    target : the `tvm.target.Target` it was compiled for
    """

    def __init__(
        self,
        module: Any,
        name: str,
        signature: Signature,
        stages: Mapping[str, Any],
        target: Any,
        *,
        check: bool = True,
    ) -> None:
        self.name = name
        self.signature = signature
        self.stages = dict(stages)
        self.target = target
        self.check = check
        self._module = module
        self._run = module[name]
        self._count = len(signature.names)
        self._arrays = tuple(signature.arrays)
        self._scalars = tuple(signature.scalars)
        self._outputs = frozenset(signature.outputs)
        # The index arrays (and sizes) that passed the last check, by reference.
        self._nothing_seen = [(i, _no_object) for i in signature.index_arrays]
        self._seen: list[tuple[int, Any]] = self._nothing_seen
        self._index_sizes = tuple(signature.index_sizes)
        self._seen_sizes: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the kernel; see the class."""
        values = list(args)
        if kwargs or len(values) != self._count:
            values = self._bind(args, kwargs)
        for i in self._scalars:
            if values[i] is None:
                self._infer(values)
                break
        if self.check:
            sizes = [values[i] for i in self._index_sizes]
            if sizes != self._seen_sizes or any(ref() is not values[i] for i, ref in self._seen):
                self._check(values, sizes)
        self._refuse_overlap(values)
        try:
            self._run(*values)
        except (TypeError, ValueError, BufferError):
            self._seen, self._seen_sizes = self._nothing_seen, None
            self._refuse(values)
            # Nothing is wrong with the arguments: some arrays only need another description.
            self._run(*[_plain_view(v) for v in values])

    def source(self, kind: str | None = None) -> str:
        """Generated code.

        kind : for CPUs "ll" (LLVM, the default) or "asm"; for GPUs the text of the kernels
            (the default), or "ll" and "asm" of the host part
        """
        module = getattr(self._module, "mod", self._module)
        device = list(module.imports)
        if kind is None and device:
            return "\n".join(m.inspect_source() for m in device)
        return module.inspect_source(kind or "ll")

    def export(self, path: str | Path) -> None:
        """Write a shared library that :func:`load` and TVM's runtime alone can load."""
        if not hasattr(self._module, "export_library"):
            raise ValueError(f"{self.name}: a loaded kernel cannot be exported again; copy its file")
        self._module.export_library(str(path))
        meta = {
            "name": self.name,
            "signature": tvm.ir.save_json(self.signature.source),
            "target": str(self.target),
        }
        text = json.dumps(meta).encode()
        with open(path, "ab") as file:
            file.write(text + f"{len(text):016d}".encode() + MARK)

    def __repr__(self) -> str:
        return f"<sparsetir.Kernel {self.name}({', '.join(self.signature.names)})>"

    # -- arguments ----------------------------------------------------------------------------

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        names = self.signature.names
        if len(args) > self._count:
            raise TypeError(
                f"{self.name}: expected at most {self._count} arguments "
                f"({', '.join(names)}), got {len(args)}"
            )
        values = [*args, *([None] * (self._count - len(args)))]
        for key, value in kwargs.items():
            at = self.signature.position.get(key)
            if at is None:
                raise TypeError(
                    f"{self.name}: no argument '{key}'; there are {', '.join(names)}"
                )
            if at < len(args):
                raise TypeError(f"{self.name}: argument '{key}' is given twice")
            values[at] = value
        for i in self._arrays:
            if values[i] is None:
                raise TypeError(f"{self.name}: argument '{names[i]}' is missing: expected an array")
        return values

    def _infer(self, values: list[Any]) -> None:
        """Fill in the scalars that the shapes of arrays imply."""
        for step in self.signature.inferences:
            if values[step.scalar] is not None:
                continue
            shape = getattr(values[step.array], "shape", None)
            if shape is None or len(shape) <= step.dim:
                continue
            size = int(shape[step.dim]) - step.minus
            for at in step.divide:
                if values[at]:
                    size //= values[at]
            values[step.scalar] = size
        for i in self._scalars:
            if values[i] is None:
                raise TypeError(
                    f"{self.name}: argument '{self.signature.names[i]}' is missing, and no array's "
                    "shape implies it: expected an integer"
                )

    def _check(self, values: list[Any], sizes: list[Any]) -> None:
        """Check index arrays, when they or the sizes they speak of differ from the last call's."""
        index = self.signature.index_arrays
        self._refuse(values)
        arguments = {self.signature.names[i]: _to_numpy(values[i]) for i in index}
        arguments |= {self.signature.names[i]: values[i] for i in self._scalars}
        check_structure(self.signature.func, arguments)
        self._seen = [(i, _reference(values[i])) for i in index]
        self._seen_sizes = sizes

    def _refuse_overlap(self, values: list[Any]) -> None:
        """Raise when an array that is written shares memory with another one."""
        spans = [(i, *_memory(values[i])) for i in self._arrays]
        for i, first, size in spans:
            if i in self._outputs and size:
                for j, other, length in spans:
                    if i != j and first < other + length and other < first + size:
                        names = self.signature.names
                        raise ValueError(
                            f"{self.name}: argument '{names[i]}' is written and shares memory "
                            f"with '{names[j]}'"
                        )

    def _refuse(self, values: list[Any]) -> None:
        """Raise for what is wrong with the arguments, if anything is."""
        names, dtypes = self.signature.names, self.signature.dtypes
        for i in self._scalars:
            self._refuse_scalar(names[i], dtypes[i], values[i])
        for i in self._arrays:
            array, who = values[i], f"{self.name}: argument '{names[i]}'"
            if not hasattr(array, "shape") or not hasattr(array, "dtype"):
                raise TypeError(
                    f"{who}: expected a torch, NumPy or TVM array, got {type(array).__name__}"
                )
            self._refuse_kind(who, array)
            dtype = _dtype_name(array)
            if dtype != dtypes[i]:
                raise TypeError(f"{who}: expected dtype {dtypes[i]}, got {dtype}")
            expected = self.signature.expected_shape(i, values)
            shape = [int(s) for s in array.shape]
            if shape != expected:
                raise ValueError(f"{who}: expected shape {tuple(expected)}, got {tuple(shape)}")
            if not _is_contiguous(array):
                raise ValueError(f"{who}: expected a contiguous array, got strides {_strides(array)}")
            if i in self._outputs and _is_read_only(array):
                raise ValueError(f"{who}: it is written, but the array is read-only")

    def _refuse_scalar(self, name: str, dtype: str, value: Any) -> None:
        who = f"{self.name}: argument '{name}'"
        if dtype.startswith(("int", "uint")):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{who}: expected an integer, got {type(value).__name__} {value!r}")
            info = np.iinfo(dtype)
            if not info.min <= value <= info.max:
                raise ValueError(f"{who}: expected a number that {dtype} holds, got {value}")

    def _refuse_kind(self, who: str, array: Any) -> None:
        kind = "cpu" if "cpu" in self.target.keys else self.target.kind.name
        layout = getattr(array, "layout", None)
        if layout is not None and "strided" not in str(layout):
            raise TypeError(f"{who}: expected a dense array of values or indices, got {layout}")
        device = getattr(array, "device", None)
        name = getattr(device, "type", None) or str(device or "cpu").split(":")[0].split("(")[0]
        if kind == "cpu" and name not in ("cpu", "None"):
            raise ValueError(f"{who}: expected an array on the CPU, got one on {device}")
        if kind == "cuda" and name != "cuda":
            raise ValueError(f"{who}: expected an array on a CUDA device, got one on {name}")


def load(path: str | Path, *, check: bool = True) -> Kernel:
    """Load a kernel that :meth:`Kernel.export` wrote; needs no compiler.

    Raises FileNotFoundError, or ValueError for a file that is not an exported kernel.
    """
    data = Path(path).read_bytes()
    end = len(data) - len(MARK)
    if data[end:] != MARK:
        raise ValueError(f"load: argument 'path': '{path}' is not a kernel exported by sparsetir")
    size = int(data[end - 16 : end])
    meta = json.loads(data[end - 16 - size : end - 16])
    source = tvm.ir.load_json(meta["signature"])
    signature = Signature(source) if isinstance(source, SparseFunc) else PlainSignature(source)
    module = tvm.runtime.load_module(str(Path(path).resolve()))
    target = tvm.target.Target(meta["target"])
    return Kernel(module, meta["name"], signature, {}, target, check=check)


def _dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_contiguous(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.flags.c_contiguous
    check = getattr(array, "is_contiguous", None)
    return bool(check()) if callable(check) else True


def _strides(array: Any) -> tuple[int, ...]:
    if isinstance(array, np.ndarray):
        return tuple(s // array.itemsize for s in array.strides)
    return tuple(array.stride())


def _is_read_only(array: Any) -> bool:
    return isinstance(array, np.ndarray) and not array.flags.writeable


def _memory(array: Any) -> tuple[int, int]:
    """Address and bytes of an array; (0, 0) where that is not known."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], array.nbytes
    if _is_torch(array):
        return array.data_ptr(), array.nbytes
    return 0, 0


def _no_object() -> Any:
    return _no_object


def _reference(array: Any) -> Any:
    """A weak reference; a strong one to TVM's tensors, which take no other."""
    try:
        return weakref.ref(array)
    except TypeError:
        return lambda: array


def _to_numpy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    if _is_torch(array):
        return array.detach().cpu().numpy()
    return array.numpy()


def _plain_view(value: Any) -> Any:
    """A view that DLPack and TVM take of a contiguous array which they refuse as it is.

    They refuse read-only NumPy arrays (these are inputs here), and strides that are unusual along
    dimensions of size 0 or 1.
    """
    if isinstance(value, np.ndarray):
        interface = value.__array_interface__

        class View:
            __array_interface__ = {**interface, "data": (interface["data"][0], False), "strides": None}
            owner = value

        return np.asarray(View())
    if _is_torch(value):
        strides, step = [], 1
        for size in reversed(value.shape):
            strides.insert(0, step)
            step *= max(1, size)
        return value.as_strided(value.shape, strides)
    return value
