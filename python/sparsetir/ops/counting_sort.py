"""A hand-written stage-III kernel that sorts pairs of numbers by the first one."""

from __future__ import annotations

from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from sparsetir.planning.run_plan import compiled
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.targets import resolve_target


def program(dtype: str, narrow: bool) -> tirx.PrimFunc:
    """A stable counting sort of at least one pair; nothing is sorted if a key is out of range.

    dtype : the type of keys and others
    narrow : whether starts and others are returned in int32; positions are in int64
    """
    to = "int32" if narrow else "int64"

    @T.prim_func(s_tir=True)
    def counting_sort(
        keys: T.handle, others: T.handle, starts: T.handle, moved: T.handle, places: T.handle,
        bounds: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        pairs, ends = T.int64(), T.int64()
        KEY = T.match_buffer(keys, (pairs,), dtype)
        OTHER = T.match_buffer(others, (pairs,), dtype)
        START = T.match_buffer(starts, (ends,), to)
        MOVED = T.match_buffer(moved, (pairs,), to)
        PLACE = T.match_buffer(places, (pairs,), "int64")
        # The least and the greatest key, those of the others, and whether keys ever decrease.
        BOUND = T.match_buffer(bounds, (5,), "int64")
        least = T.alloc_buffer((1,), dtype, scope="local")
        greatest = T.alloc_buffer((1,), dtype, scope="local")
        low = T.alloc_buffer((1,), dtype, scope="local")
        high = T.alloc_buffer((1,), dtype, scope="local")
        falls = T.alloc_buffer((1,), dtype, scope="local")
        least[0] = KEY[0]
        greatest[0] = KEY[0]
        low[0] = OTHER[0]
        high[0] = OTHER[0]
        falls[0] = T.Cast(dtype, 0)
        for e in range(pairs):
            least[0] = T.min(least[0], KEY[e])
            greatest[0] = T.max(greatest[0], KEY[e])
            low[0] = T.min(low[0], OTHER[e])
            high[0] = T.max(high[0], OTHER[e])
        for e in range(pairs - 1):
            falls[0] = falls[0] | T.Cast(dtype, KEY[e + 1] < KEY[e])
        BOUND[0] = T.Cast("int64", least[0])
        BOUND[1] = T.Cast("int64", greatest[0])
        BOUND[2] = T.Cast("int64", low[0])
        BOUND[3] = T.Cast("int64", high[0])
        BOUND[4] = T.Cast("int64", falls[0])
        if BOUND[0] >= 0 and BOUND[1] < ends - 1:
            for i in range(ends):
                START[i] = T.Cast(to, 0)
            for e in range(pairs):
                START[KEY[e]] = START[KEY[e]] + T.Cast(to, 1)
            for i in range(ends - 1):  # the end of each key
                START[i + 1] = START[i + 1] + START[i]
            for n in range(pairs):
                START[KEY[pairs - 1 - n]] = START[KEY[pairs - 1 - n]] - T.Cast(to, 1)
                MOVED[START[KEY[pairs - 1 - n]]] = T.Cast(to, OTHER[pairs - 1 - n])
                PLACE[START[KEY[pairs - 1 - n]]] = pairs - 1 - n

    return counting_sort


@cache
def kernel(dtype: str, narrow: bool) -> Kernel:
    """The kernel, compiled on first use."""
    target = resolve_target("llvm")
    key = "counting_sort", dtype, narrow
    return compiled(key, target, lambda: lower(program(dtype, narrow), target=target))
