"""Properties of arrays of torch, NumPy and TVM that kernels depend on.

Kernels read and write raw memory. So this module also checks that an array's memory holds its
numbers, and tells torch about writes. Kernels, plans and sparse matrices all use it.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import DTypeLike

from sparsetir.machine import this_machine
from sparsetir.runtime import pool
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from torch import Tensor

CACHE_LINE = 64
LEAST_ALIGNED = 1 << 16  # bytes; for smaller arrays aligning takes a good part of a product's time
# Uses of a row from which copying an array to the start of a cache line pays, and bytes of a row
# up to which it does.
ALIGNED_DEGREE, LONGEST_ALIGNED = 12, 256


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype and exposes its memory."""
    if is_torch(value) and value.is_nested:  # its shape raises
        return False
    return all(hasattr(value, name) for name in ("shape", "dtype", "__dlpack__"))


def is_torch(array: object) -> TypeGuard[Tensor]:
    """Whether an array is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def shape_of(value: Any) -> object:
    """The shape of an array, or the type name of another value."""
    return tuple(value.shape) if is_array(value) else type(value).__name__


def is_strided(array: object) -> bool:
    """Whether an array is not a sparse tensor of torch."""
    return not is_torch(array) or "strided" in str(array.layout)


def type_name(value: object) -> str:
    """The name of a value's type with its package, such as "torch.Tensor"."""
    return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"


def dtype_name(array: Any) -> str:
    """The name of an array's dtype, such as "float32"."""
    return _name_of(array.dtype)


@cache
def _name_of(dtype: object) -> str:
    """The name of a dtype, cached because NumPy takes microseconds."""
    return str(dtype).removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    kind = tvm.DataType(dtype)
    return (kind.bits * kind.lanes + 7) // 8


def device_name(array: object) -> str:
    """The kind of an array's device, such as "cpu", "cuda" or "meta"."""
    device = getattr(array, "device", None)
    return getattr(device, "type", None) or str(device or "cpu").split(":")[0].split("(")[0]


def is_contiguous(array: object) -> bool:
    """Whether an array is in C order without gaps."""
    if isinstance(array, np.ndarray):
        return array.flags.c_contiguous
    check = getattr(array, "is_contiguous", None)
    return bool(check()) if callable(check) else True


def strides(array: Any) -> tuple[int, ...]:
    """The strides of an array in elements."""
    if isinstance(array, np.ndarray):
        return tuple(s // array.itemsize for s in array.strides)
    steps = array.strides if hasattr(array, "strides") else array.stride()
    return tuple(int(s) for s in steps)


def is_read_only(array: object) -> bool:
    """Whether an array is read-only."""
    return isinstance(array, np.ndarray) and not array.flags.writeable


def memory(array: object, itemsize: int) -> tuple[int, int]:
    """Address and bytes of a contiguous array; (0, 0) where unknown.

    itemsize : bytes of an element, as asking a TVM tensor for them is slow
    """
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], array.nbytes
    if is_torch(array):
        try:
            return array.data_ptr(), array.nbytes
        except RuntimeError:  # a tensor that wraps others
            return 0, 0
    if isinstance(array, tvm_ffi.Tensor):
        return array.data_ptr(), array.numel() * itemsize
    return 0, 0


def check_alignment(
    caller: str, names: Sequence[str], arrays: Sequence[object], itemsize: int, alignment: int
) -> None:
    """Raise if vector loads of a GPU would fail, as on a slice of a tensor."""
    for name, array in zip(names, arrays, strict=True):
        if memory(array, itemsize)[0] % alignment:
            raise ValueError(
                f"{caller}: argument '{name}': expected memory aligned to {alignment} bytes; copy "
                "the array"
            )


def overlap(a: object, b: object, itemsize: int, other: int | None = None) -> bool:
    """Whether two contiguous arrays share memory, as far as that is known.

    itemsize : bytes of an element; other : bytes of an element of b, if different
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b)
    (first, size), (start, length) = memory(a, itemsize), memory(b, other or itemsize)
    return bool(size and length) and first < start + length and start < first + size


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """A new NumPy array that begins at a cache line, like torch's, if it has rows and is not small.

    Large arrays of `np.empty` begin 16 bytes into a line, so that every other vector of 32 bytes,
    and each of 64, is loaded from two lines.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_ALIGNED or len(shape) < 2:
        return np.empty(shape, dtype)
    # A single allocation: if two are freed together, the C library returns the memory each time.
    memory = np.empty(size + CACHE_LINE, np.uint8)
    begin = -memory.__array_interface__["data"][0] % CACHE_LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


def gathers_often(uses: int, rows: int, row: int) -> bool:
    """Whether so many uses of rows pay for a copy that begins at a cache line.

    Rows of one to four whole cache lines that begin within one take 1.2 to 1.7 times as long to
    gather, also with the copy 1.0 to 1.4 times (Zen 5, one thread, 13 to 60 uses a row); longer
    rows gain as little as the copy takes, or are packed by the kernel.

    row : bytes of a row
    """
    often = uses >= ALIGNED_DEGREE * rows and rows * row >= LEAST_ALIGNED
    return often and row <= LONGEST_ALIGNED and row % CACHE_LINE == 0


def aligned_rows(array: Any, indices: Any, written: Sequence[object] = ()) -> Any:
    """A contiguous array of NumPy at a cache line, copied if its rows are gathered by so many
    indices that this pays. (Other libraries allocate at cache lines.)

    written : arrays that the kernel writes; one that shares their memory is left, to be refused
    """
    if not isinstance(array, np.ndarray) or array.ndim < 2 or not array.flags.c_contiguous:
        return array
    row = array.shape[-1] * array.itemsize
    often = gathers_often(math.prod(indices.shape), array.nbytes // max(1, row), row)
    if not often or any(overlap(array, other, array.itemsize) for other in written):
        return array
    return at_cache_line(array)


def at_cache_line(array: Any) -> Any:
    """A NumPy or torch array on the CPU, copied if it does not begin at a cache line."""
    if is_torch(array):
        return array.clone() if array.data_ptr() % CACHE_LINE else array
    if not isinstance(array, np.ndarray) or not memory(array, 1)[0] % CACHE_LINE:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def empty_like(array: Any, shape: tuple[int, ...], caller: str, dtype: str | None = None) -> Any:
    """A new array of the same kind and device as `array`.

    caller : beginning of the TypeError for a value that is not an array
    dtype : its name; by default that of the array
    """
    if isinstance(array, np.ndarray):
        return empty(shape, dtype or array.dtype)
    if is_torch(array):
        try:
            if not is_strided(array):
                raise TypeError(f"{caller}: expected a dense tensor, got {array.layout}")
            if dtype is None:
                return array.new_empty(*shape)  # sizes one by one: a tuple takes a microsecond more
            return array.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
        except RuntimeError as error:
            if not hidden(array):
                raise
            raise TypeError(f"{caller}: expected {hidden(array)}") from error
    if isinstance(array, tvm_ffi.Tensor):
        return tvm.runtime.empty(shape, dtype or str(array.dtype), array.device)
    raise TypeError(f"{caller}: expected a torch, NumPy or TVM array, got {type(array).__name__}")


def with_zeros(array: Any, shape: tuple[int, ...]) -> Any:
    """An array padded with zeros to a larger shape; TVM's are copied to the host and back."""
    if tuple(array.shape) == shape:
        return array
    if isinstance(array, tvm_ffi.Tensor):
        return tvm.runtime.tensor(with_zeros(to_numpy(array), shape), array.device)
    if is_torch(array):  # in one step
        more = ((0, size - had) for size, had in zip(shape, array.shape, strict=True))
        ends = [end for pair in reversed([*more]) for end in pair]
        return sys.modules["torch"].nn.functional.pad(array, ends)
    out = empty_like(array, shape, "with_zeros")
    out[...] = 0
    out[tuple(slice(size) for size in array.shape)] = array
    return out


def changed(array: Any, change: Callable[[Any], Any], out: Any = None) -> object:
    """Apply a function to an array and make the result contiguous; TVM's are copied to the host.

    change : function of a NumPy or torch array, such as slicing
    out : array of the same kind to write the result to
    """
    if isinstance(array, tvm_ffi.Tensor):
        result = np.ascontiguousarray(change(to_numpy(array)))
        return tvm.runtime.tensor(result, array.device) if out is None else out.copyfrom(result)
    result = change(array)
    if out is not None:
        out[...] = result
        return out
    return result.contiguous() if is_torch(result) else np.ascontiguousarray(result)


def placed(array: Any, kind: str, beside: Iterable[object]) -> object:
    """Move an array to a device as a TVM tensor; on the CPU without a copy.

    kind : such as "cpu" or "cuda"
    beside : arrays on devices of that kind; the first one's device is used
    """
    if kind == "cpu":
        return tvm_ffi.from_dlpack(plain_view(array))
    indices = [getattr(getattr(other, "device", None), "index", None) for other in beside]
    index = next((i for i in indices if i is not None), 0)
    return tvm.runtime.tensor(array, tvm.runtime.device(kind, index))


def reference(array: object, callback: Callable[[object], None] | None = None) -> Callable[[], Any]:
    """A weak reference to an array; a strong one to TVM's tensors, which do not support others.

    callback : called when the array is freed
    """
    try:
        return weakref.ref(array, callback)
    except TypeError:
        return lambda: array


def to_numpy(array: Any) -> np.ndarray:
    """An array as a NumPy array; shares memory if it is on the CPU."""
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        if dtype_name(array) != "bfloat16":
            return array.numpy(force=True)
        array = array.detach().resolve_neg().cpu()
    if dtype_name(array) == "bfloat16" and device_name(array) == "cpu":  # NumPy's DLPack lacks it
        solid = array.contiguous() if is_torch(array) else array
        plain: Any = tvm_ffi.from_dlpack(plain_view(solid))
        bits = np.from_dlpack(plain._create_view(plain.shape, "uint16"))
        return bits.view(np.dtype("bfloat16"))
    return array.numpy() if hasattr(array, "numpy") else np.from_dlpack(array)


def to_host(caller: str, argument: str, array: Any) -> np.ndarray:
    """Convert a NumPy, torch or TVM array or a list to NumPy, sharing memory on the CPU."""
    instead = hidden(array)
    if instead:
        raise TypeError(f"{caller}: argument '{argument}': expected {instead}")
    if not is_strided(array):
        raise wrong(caller, argument, "a dense array", "a sparse one", TypeError)
    if is_array(array):
        try:
            return np.asarray(to_numpy(array))  # turns np.matrix into an array
        except (NotImplementedError, RuntimeError, TypeError) as err:  # on meta, quantized
            raise TypeError(
                f"{caller}: argument '{argument}': expected a tensor of plain numbers, got one of "
                f"{array.dtype} on {device_name(array)}: {err}"
            ) from err
    try:
        return np.asarray(array)
    except (ValueError, TypeError) as err:
        raise wrong(caller, argument, "an array", f"{type_name(array)}: {err}", TypeError) from err


def plain_view(value: object) -> object:
    """A view of a contiguous array in a form that DLPack and TVM accept.

    They refuse read-only NumPy arrays (do not pass ones that are written), NumPy arrays of
    bfloat16, and unusual strides along dimensions of size 0 or 1. Arrays that need no view, or are
    not contiguous, and other values are returned unchanged.
    """
    if isinstance(value, np.ndarray):
        return _plain_numpy(value) if value.flags.c_contiguous else value
    if is_torch(value) and value.is_nested:  # nested tensors have no shape
        return value
    if is_torch(value) and is_strided(value) and value.is_contiguous():
        steps = _plain_strides(value.shape)
        return value if value.stride() == steps else value.detach().as_strided(value.shape, steps)
    if isinstance(value, tvm_ffi.Tensor) and hasattr(value, "_create_view"):
        return _plain_tvm(value)
    return value


def reshaped(array: Any, shape: Sequence[int]) -> object:
    """A view of a contiguous array in another shape."""
    if hasattr(array, "_create_view"):  # TVM's
        return array._create_view(tuple(shape), array.dtype)
    array = array.detach() if is_torch(array) else array
    return array.reshape(tuple(shape))


def _plain_tvm(tensor: Any) -> object:
    steps = _plain_strides(tensor.shape)
    if tuple(tensor.strides) == steps or not tensor.is_contiguous():
        return tensor
    return tensor._create_view(tensor.shape, tensor.dtype)


class _Memory:
    """An object for `np.asarray` that keeps the owner of the memory alive."""

    def __init__(self, owner: np.ndarray | None, interface: dict[str, object]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def unowned(array: np.ndarray) -> object:
    """A tensor of TVM's on the memory of a contiguous array, valid as long as the caller keeps the
    array."""
    interface = {**array.__array_interface__, "strides": None}
    interface["data"] = (interface["data"][0], False)
    return tvm_ffi.from_dlpack(plain_view(np.asarray(_Memory(None, interface))))


def _plain_numpy(array: np.ndarray) -> object:
    steps = tuple(s * array.itemsize for s in _plain_strides(array.shape))
    # NumPy's kind of the dtypes of ml_dtypes, and of records
    foreign = array.dtype.kind == "V" and array.dtype.type is not np.void
    if array.flags.writeable and array.strides == steps and not foreign:
        return array
    interface = {**array.__array_interface__, "strides": steps}
    interface["data"] = (interface["data"][0], False)
    if foreign:
        interface["typestr"] = f"<u{array.itemsize}"
        interface["descr"] = [("", interface["typestr"])]
    view = np.asarray(_Memory(array, interface))
    if not foreign:
        return view
    tensor: Any = tvm_ffi.from_dlpack(view)
    return tensor._create_view(array.shape, dtype_name(array))


def _plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Contiguous strides of a shape in elements, as in TVM: 0 before a dimension of size 0."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    return tuple(steps)


LEAST_BYTES = 1 << 22  # from which NumPy asks for large pages
PAGE = 1 << 21
ADVICE = 14  # MADV_HUGEPAGE


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The function of libc, or None."""
    if this_machine().system != "linux":
        return None
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def in_large_pages(tensor: Tensor) -> None:
    """Ask for large pages for a new tensor of torch on the CPU that has not been written yet.

    The system maps memory page by page on the first write, and fills each page with zeros: with
    pages of 4 KiB that takes as long as a product, with 2 MiB half as long.

    Does nothing on systems without large pages.
    """
    advise, begin = _madvise(), tensor.data_ptr()
    first = -(-begin // PAGE) * PAGE
    size = (begin + tensor.nbytes - first) // PAGE * PAGE
    if advise is not None and size > 0:
        advise(first, size, ADVICE)


# -- whether memory holds the numbers of an array --------------------------------------------------

# The dispatch keys of torch's tensors that wrap others.
STANDING = ("Python", "FuncTorchGradWrapper", "FuncTorchBatched", "Functionalize")
NONE: Mapping[int, str] = {}
# Types whose memory holds their numbers. An isinstance check for torch takes half a microsecond.
PLAIN = frozenset((np.ndarray, tvm.runtime.Tensor, tvm_ffi.Tensor))


class _Torch:
    """Attributes of torch that calls need, looked up once, as a call takes a few microseconds."""

    def __init__(self, torch: Any) -> None:
        self.tensor = torch.Tensor
        self.recording = torch.is_grad_enabled
        self.forward = torch.autograd.forward_ad
        self.increment = torch.autograd.graph.increment_version


_torch: _Torch | None = None


def _loaded_torch() -> _Torch | None:
    """The attributes of torch; None if torch is not imported, so that no array is torch's."""
    global _torch
    if _torch is None:
        module = sys.modules.get("torch")
        if hasattr(module, "autograd"):  # not while it is being imported
            _torch = _Torch(module)
            pool.use_torch_threads()
    return _torch


def check_memory(
    caller: str,
    names: Sequence[str],
    arrays: Sequence[Any],
    without_gradient: Mapping[int, str] = NONE,
) -> bool:
    """Raise TypeError if an array's memory does not hold its numbers, by quick checks.

    Arrays without memory pass here and fail later; :func:`hidden` recognises all kinds.

    without_gradient : by position, why an argument may not require a gradient while torch records
        them (ValueError)

    Returns True if all are known to be plain tensors of torch.
    """
    torch = _torch or _loaded_torch()
    if torch is not None:  # plain tensors in a fraction of a microsecond
        tensor = torch.tensor
        for array in arrays:
            if type(array) is not tensor or array.is_neg():
                break
        else:
            for i in without_gradient:
                if arrays[i].requires_grad:
                    break
            else:
                if torch.forward._current_level < 0:
                    return True
    _check_each(torch, caller, names, arrays, without_gradient)
    return False


def _check_each(
    torch: _Torch | None,
    caller: str,
    names: Sequence[str],
    arrays: Sequence[Any],
    without_gradient: Mapping[int, str],
) -> None:
    for i, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if type(array) in PLAIN:
            continue
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{caller}: argument '{name}': expected {hidden(array)}")
        if torch is None or not isinstance(array, torch.tensor):
            continue
        if array.is_neg():
            raise TypeError(f"{caller}: argument '{name}': expected {hidden(array)}")
        if i in without_gradient and _has_gradient(torch, array):
            raise ValueError(f"{caller}: argument '{name}': {without_gradient[i]}")


def _has_gradient(torch: _Torch, tensor: Tensor) -> bool:
    """Whether torch records derivatives of operations on a tensor, backward or forward."""
    if tensor.requires_grad and torch.recording():
        return True
    return torch.forward._current_level >= 0 and torch.forward.unpack_dual(tensor)[1] is not None


def hidden(array: Any) -> str:
    """A phrase for the error about an array whose memory lacks its numbers; "" for other arrays.

    For example "an array without a mask, got a masked one; give `array.filled(...)`".
    """
    if isinstance(array, np.ma.MaskedArray):
        return "an array without a mask, got a masked one; give `array.filled(...)`"
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return ""
    if array._is_zerotensor():
        return "a tensor with memory, got torch._efficientzerotensor; give `tensor.clone()`"
    if array.is_neg():
        return "a tensor without the negative bit; give `tensor.resolve_neg()`"
    if array.is_conj():
        return "a tensor without the conjugate bit; give `tensor.resolve_conj()`"
    if array.is_nested:
        return "a dense tensor, got a nested one"
    keys = torch._C._dispatch_keys(array)
    standing = (getattr(torch._C.DispatchKey, name, None) for name in STANDING)
    if any(key is not None and keys.has(key) for key in standing):
        return (
            f"a tensor with memory of its own, got {type(array).__name__} that stands for another, "
            "as in torch.func and in traces"
        )
    in_memory = array.layout is torch.strided and array.device.type == "cpu"
    if in_memory and array.numel() and not array.data_ptr():
        return "a tensor with memory, got one whose storage was let go of"
    return ""


def count_writes(arrays: Iterable[object]) -> None:
    """Tell torch that tensors were written, as its own operators do.

    A backward pass that needs the old values then fails, instead of using the new ones.
    """
    torch = _loaded_torch()
    if torch is None:
        return
    for array in arrays:
        if type(array) not in PLAIN and isinstance(array, torch.tensor):
            torch.increment(array)
