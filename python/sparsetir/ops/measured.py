"""How much memory the arrays take that something holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tvm_ffi
from torch import Tensor

from sparsetir.planning.run_plan import Plan
from sparsetir.runtime.arrays import dtype_name, itemsize
from sparsetir.runtime.kernel import Kernel


def measured(thing: object, carried: Callable[[Tensor], object] | None = None) -> int:
    """Bytes of all arrays that can be reached from it, each piece of memory once.

    Goes through containers and objects of sparsetir; but for kernels, which others share.

    carried : gives what a tensor carries, which counts, too
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found = _memory(one)
        if found is None:
            left += _parts(one)
        else:
            address, size = found
            sizes[address] = max(size, sizes.get(address, 0))
            if carried is not None and isinstance(one, Tensor):
                left.append(carried(one))
    return sum(sizes.values())


def _memory(array: object) -> tuple[int, int] | None:
    """Where the memory is that an array keeps, and its bytes; None of what is no array."""
    if isinstance(array, Tensor):
        try:
            storage = array.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # one without memory
            return 0, 0
    if isinstance(array, np.ndarray):
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array.__array_interface__["data"][0], array.nbytes
    if isinstance(array, tvm_ffi.Tensor):
        return array.data_ptr(), array.numel() * itemsize(dtype_name(array))
    return None


def _parts(thing: object) -> Iterator[object]:
    """What a container holds, or an object of ours."""
    if isinstance(thing, Plan):  # of what else it knows nothing is an array
        yield from (thing._args, thing._stored, thing._computed)
        return
    if isinstance(thing, Mapping):
        yield from list(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from list(thing)
    if type(thing).__module__.startswith("sparsetir.") and not isinstance(thing, Kernel):
        yield from list(getattr(thing, "__dict__", {}).values())
