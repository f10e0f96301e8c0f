"""Memory of large results in large pages, as NumPy asks for its own.

The system gives memory a page at a time when it is first written, and fills each with zeros. Of
4 KiB each that takes as long as a product does; of 2 MiB half of it. What takes none is to write
into a result that is there: `out=`.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

LEAST_BYTES = 1 << 22  # from which on NumPy asks
PAGE = 1 << 21
ADVICE = 14  # MADV_HUGEPAGE


@cache
def _madvise() -> Any:
    """The function of libc; None where there is none."""
    if sys.platform != "linux":
        return None
    found: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def in_large_pages(tensor: Any) -> None:
    """Ask for large pages for a new tensor of torch on the CPU that has not been written yet.

    Does nothing where the system has none: it is advice.
    """
    advise, begin = _madvise(), tensor.data_ptr()
    first = -(-begin // PAGE) * PAGE
    size = (begin + tensor.nbytes - first) // PAGE * PAGE
    if advise is not None and size > 0:
        advise(first, size, ADVICE)
