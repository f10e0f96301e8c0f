"""What a kernel asks of an array, whether torch's, NumPy's or TVM's.

Also whether its memory holds its numbers, and what torch is to know of a call: kernels read and
write memory as it is. All entrances ask here: kernels, plans, sparse matrices.
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

from sparsetir.runtime import pool
from sparsetir.runtime.refusals import wrong

if TYPE_CHECKING:
    from torch import Tensor

CACHE_LINE = 64
LEAST_ALIGNED = 1 << 16  # bytes; below, to align takes a good part of a product's time


def is_array(value: object) -> bool:
    """Whether it has a shape and a dtype and can hand out its memory."""
    if is_torch(value) and value.is_nested:  # which raises where it is asked for its shape
        return False
    return all(hasattr(value, name) for name in ("shape", "dtype", "__dlpack__"))


def is_torch(array: object) -> TypeGuard[Tensor]:
    """Whether it is torch's; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def shape_of(value: Any) -> object:
    """The shape of an array, or the type of what is none."""
    return tuple(value.shape) if is_array(value) else type(value).__name__


def is_strided(array: object) -> bool:
    """Whether it is no sparse tensor of torch."""
    return not is_torch(array) or "strided" in str(array.layout)


def type_name(value: object) -> str:
    """Such as "torch.Tensor"."""
    return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"


def dtype_name(array: Any) -> str:
    """Such as "float32"."""
    return _name_of(array.dtype)


@cache
def _name_of(dtype: object) -> str:
    """To ask NumPy takes microseconds."""
    return str(dtype).removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    kind = tvm.DataType(dtype)
    return (kind.bits * kind.lanes + 7) // 8


def device_name(array: object) -> str:
    """Such as "cpu", "cuda" or "meta"."""
    device = getattr(array, "device", None)
    return getattr(device, "type", None) or str(device or "cpu").split(":")[0].split("(")[0]


def is_contiguous(array: object) -> bool:
    """In C order, without gaps."""
    if isinstance(array, np.ndarray):
        return array.flags.c_contiguous
    check = getattr(array, "is_contiguous", None)
    return bool(check()) if callable(check) else True


def strides(array: Any) -> tuple[int, ...]:
    """In elements."""
    if isinstance(array, np.ndarray):
        return tuple(s // array.itemsize for s in array.strides)
    found = array.strides if hasattr(array, "strides") else array.stride()
    return tuple(int(s) for s in found)


def is_read_only(array: object) -> bool:
    """Whether writing is forbidden."""
    return isinstance(array, np.ndarray) and not array.flags.writeable


def memory(array: object, itemsize: int) -> tuple[int, int]:
    """Address and bytes of a contiguous array; no bytes where that is not known.

    itemsize : of the dtype, which takes long to ask a TVM tensor for
    """
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], array.nbytes
    if is_torch(array):
        try:
            return array.data_ptr(), array.nbytes
        except RuntimeError:  # one that stands for others
            return 0, 0
    if isinstance(array, tvm_ffi.Tensor):
        return array.data_ptr(), array.numel() * itemsize
    return 0, 0


def check_alignment(
    who: str, names: Sequence[str], arrays: Sequence[object], itemsize: int, alignment: int
) -> None:
    """Raise where vector loads of a GPU would fail, such as for a part of a tensor."""
    for name, array in zip(names, arrays, strict=True):
        if memory(array, itemsize)[0] % alignment:
            raise ValueError(
                f"{who}: argument '{name}': expected memory aligned to {alignment} bytes; copy "
                "the array"
            )


def overlap(a: object, b: object, itemsize: int, other: int | None = None) -> bool:
    """Whether two contiguous arrays have memory in common, as far as that is known.

    itemsize : of their dtype; other : of that of b, where it has another
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b)
    (first, size), (start, length) = memory(a, itemsize), memory(b, other or itemsize)
    return bool(size and length) and first < start + length and start < first + size


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """A new array of NumPy's that begins at a cache line, as torch's do, unless it is small.

    Those of `np.empty` begin 16 bytes behind one where they are large, so that every other vector
    of 32 bytes, and each of 64, is loaded from two lines.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_ALIGNED:
        return np.empty(shape, dtype)
    # One allocation alone: of two, freed together, the C library gives the memory back each time.
    memory = np.empty(size + CACHE_LINE, np.uint8)
    begin = -memory.__array_interface__["data"][0] % CACHE_LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


def at_cache_line(array: Any) -> Any:
    """The same array of NumPy's or torch's on the CPU; a copy where it begins within a line."""
    if is_torch(array):
        return array.clone() if array.data_ptr() % CACHE_LINE else array
    if not isinstance(array, np.ndarray) or not memory(array, 1)[0] % CACHE_LINE:
        return array
    found = empty(array.shape, array.dtype)
    found[...] = array
    return found


def empty_like(array: Any, shape: tuple[int, ...], who: str, dtype: str | None = None) -> Any:
    """A new array of the same kind and device.

    who : begins the TypeError for what is no array
    dtype : its name; by default that of the array
    """
    if isinstance(array, np.ndarray):
        return empty(shape, dtype or array.dtype)
    if is_torch(array):
        try:
            if dtype is None:
                return array.new_empty(*shape)  # sizes one by one: a tuple takes a microsecond more
            return array.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
        except RuntimeError as error:
            if not hidden(array):
                raise
            raise TypeError(f"{who}: expected {hidden(array)}") from error
    if isinstance(array, tvm_ffi.Tensor):
        return tvm.runtime.empty(shape, dtype or str(array.dtype), array.device)
    raise TypeError(f"{who}: expected a torch, NumPy or TVM array, got {type(array).__name__}")


def with_zeros(array: Any, shape: tuple[int, ...]) -> Any:
    """An array of a larger shape with zeros behind what there is; of TVM's through the host."""
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
    """A contiguous array of what is made of one; of TVM's through the host.

    change : gives it of an array of NumPy's or torch's, such as a part
    out : of the same kind, where it is written
    """
    if isinstance(array, tvm_ffi.Tensor):
        found = np.ascontiguousarray(change(to_numpy(array)))
        return tvm.runtime.tensor(found, array.device) if out is None else out.copyfrom(found)
    found = change(array)
    if out is not None:
        out[...] = found
        return out
    return found.contiguous() if is_torch(found) else np.ascontiguousarray(found)


def placed(array: Any, kind: str, beside: Iterable[object]) -> object:
    """A TVM tensor of these numbers on a device; on the CPU without a copy.

    kind : such as "cpu" or "cuda"
    beside : arrays on devices of that kind; the first one's is taken
    """
    if kind == "cpu":
        return tvm_ffi.from_dlpack(plain_view(array))
    indices = [getattr(getattr(other, "device", None), "index", None) for other in beside]
    index = next((i for i in indices if i is not None), 0)
    return tvm.runtime.tensor(array, tvm.runtime.device(kind, index))


def reference(array: object, callback: Callable[[object], None] | None = None) -> Callable[[], Any]:
    """A weak reference; a strong one to TVM's tensors, which take no other.

    callback : is called when the array is gone
    """
    try:
        return weakref.ref(array, callback)
    except TypeError:
        return lambda: array


def to_numpy(array: Any) -> np.ndarray:
    """The same numbers on the CPU; no copy if they are there already."""
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        array = array.detach().resolve_neg().cpu()
    if dtype_name(array) == "bfloat16" and device_name(array) == "cpu":  # none of DLPack's to NumPy
        solid = array.contiguous() if is_torch(array) else array
        plain: Any = tvm_ffi.from_dlpack(plain_view(solid))
        bits = np.from_dlpack(plain._create_view(plain.shape, "uint16"))
        return bits.view(np.dtype("bfloat16"))
    return array.numpy() if hasattr(array, "numpy") else np.from_dlpack(array)


def to_host(who: str, argument: str, array: Any) -> np.ndarray:
    """An array of NumPy, torch, TVM or a list, as a NumPy array on the CPU; shared if it is one."""
    instead = hidden(array)
    if instead:
        raise TypeError(f"{who}: argument '{argument}': expected {instead}")
    if not is_strided(array):
        raise wrong(who, argument, "a dense array", "a sparse one", TypeError)
    if is_array(array):
        try:
            return np.asarray(to_numpy(array))  # no np.matrix
        except (NotImplementedError, RuntimeError, TypeError) as err:  # on meta, quantized
            raise TypeError(
                f"{who}: argument '{argument}': expected a tensor of plain numbers, got one of "
                f"{array.dtype} on {device_name(array)}: {err}"
            ) from err
    try:
        return np.asarray(array)
    except (ValueError, TypeError) as err:
        raise wrong(who, argument, "an array", f"{type_name(array)}: {err}", TypeError) from err


def plain_view(value: object) -> object:
    """A view that DLPack and TVM take of a contiguous array which they refuse as it is.

    They refuse read-only NumPy arrays (do not give ones that are written), NumPy arrays of
    bfloat16, and strides that are unusual along dimensions of size 0 or 1. What is fine as it is,
    or not contiguous, or no array, comes back as it is.
    """
    if isinstance(value, np.ndarray):
        return _plain_numpy(value) if value.flags.c_contiguous else value
    if is_torch(value) and value.is_nested:  # which has no shape
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
    """What `np.asarray` makes an array of; keeps the owner of the memory alive."""

    def __init__(self, owner: np.ndarray, interface: dict[str, object]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def _plain_numpy(array: np.ndarray) -> object:
    steps = tuple(s * array.itemsize for s in _plain_strides(array.shape))
    foreign = array.dtype.kind == "V"  # what NumPy calls the dtypes of ml_dtypes
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
    """In elements, as TVM expects them: 0 before a dimension of size 0."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    return tuple(steps)


LEAST_BYTES = 1 << 22  # from which on NumPy asks
PAGE = 1 << 21
ADVICE = 14  # MADV_HUGEPAGE


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The function of libc; None where there is none."""
    if sys.platform != "linux":
        return None
    found: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def in_large_pages(tensor: Tensor) -> None:
    """Ask for large pages for a new tensor of torch on the CPU that has not been written yet.

    The system gives memory page by page when it is first written, and fills each with zeros: of 4
    KiB each that takes as long as a product does, of 2 MiB half of it.

    Does nothing where the system has none: it is advice.
    """
    advise, begin = _madvise(), tensor.data_ptr()
    first = -(-begin // PAGE) * PAGE
    size = (begin + tensor.nbytes - first) // PAGE * PAGE
    if advise is not None and size > 0:
        advise(first, size, ADVICE)


# -- whether memory holds the numbers of an array --------------------------------------------------

# Of torch's dispatch keys those of tensors that stand for others.
STANDING = ("Python", "FuncTorchGradWrapper", "FuncTorchBatched", "Functionalize")
NONE: Mapping[int, str] = {}
# Whose memory holds their numbers. To ask whether something is torch's takes half a microsecond.
PLAIN = frozenset((np.ndarray, tvm.runtime.Tensor, tvm_ffi.Tensor))


class _Torch:
    """What calls need of torch, looked up once: a call takes a few microseconds."""

    def __init__(self, torch: Any) -> None:
        self.tensor = torch.Tensor
        self.recording = torch.is_grad_enabled
        self.forward = torch.autograd.forward_ad
        self.increment = torch.autograd.graph.increment_version


_torch: _Torch | None = None


def _loaded_torch() -> _Torch | None:
    """None where nothing has imported torch, so that no array is its."""
    global _torch
    if _torch is None:
        module = sys.modules.get("torch")
        if hasattr(module, "autograd"):  # not while it is being imported
            _torch = _Torch(module)
            pool.meet_torch()
    return _torch


def check_memory(
    who: str,
    names: Sequence[str],
    arrays: Sequence[Any],
    without_gradient: Mapping[int, str] = NONE,
) -> bool:
    """Raise TypeError for an array whose memory does not hold its numbers, as far as it is seen.

    Others of these have no memory at all, which fails later; :func:`hidden` tells all of them.

    without_gradient : by position, why an argument may not require a gradient while torch records
        them (ValueError)

    Gives True where all of them are seen to be plain tensors of torch.
    """
    torch = _torch or _loaded_torch()
    if torch is not None:  # plain tensors in a fraction of a microsecond
        tensor = torch.tensor
        for array in arrays:
            if type(array) is not tensor or array.is_neg():
                break
        else:
            for at in without_gradient:
                if arrays[at].requires_grad:
                    break
            else:
                if torch.forward._current_level < 0:
                    return True
    _check_each(torch, who, names, arrays, without_gradient)
    return False


def _check_each(
    torch: _Torch | None,
    who: str,
    names: Sequence[str],
    arrays: Sequence[Any],
    without_gradient: Mapping[int, str],
) -> None:
    for at, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if type(array) in PLAIN:
            continue
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{who}: argument '{name}': expected {hidden(array)}")
        if torch is None or not isinstance(array, torch.tensor):
            continue
        if array.is_neg():
            raise TypeError(f"{who}: argument '{name}': expected {hidden(array)}")
        if at in without_gradient and _has_gradient(torch, array):
            raise ValueError(f"{who}: argument '{name}': {without_gradient[at]}")


def _has_gradient(torch: _Torch, tensor: Tensor) -> bool:
    """Whether derivatives of what is made of a tensor are recorded, backward or forward."""
    if tensor.requires_grad and torch.recording():
        return True
    return torch.forward._current_level >= 0 and torch.forward.unpack_dual(tensor)[1] is not None


def hidden(array: Any) -> str:
    """What is expected instead of an array whose memory does not hold its numbers; "" for others.

    Such as "an array without a mask, got a masked one; give `array.filled(...)`".
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
    """Let torch know that tensors were written, as its own operators do.

    A backward pass that needs what was there before then fails, instead of using what is there now.
    """
    torch = _loaded_torch()
    if torch is None:
        return
    for array in arrays:
        if type(array) not in PLAIN and isinstance(array, torch.tensor):
            torch.increment(array)
