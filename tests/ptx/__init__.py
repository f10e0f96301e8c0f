"""Run the PTX of a kernel on a CPU, and find what it must not do.

All warps of a launch (or of some of its blocks) advance together: a register is an array over their
threads, 32 neighbours a warp, and NumPy runs an instruction for all threads that have come to it.
`parse` reads PTX, `order` says which threads go first where they part, `machine` runs them,
`memory` knows buffers and who touched them, `instructions`, `matrices` and `warpgroups` say what
each instruction does, `arithmetic` what types are, and `counting` what a launch costs. Semantics
are those of NVIDIA's PTX ISA, 8.x.

`PtxError` is raised for

- accesses outside of every buffer and misaligned ones, writes to what may only be read, loads by
  `ld.global.nc` of what the launch writes,
- races: two threads touch an element, one of them writing, not both by atomics, with no barrier
  between them; blocks are never ordered,
- barriers that not all threads of a block reach, and warp instructions whose mask names lanes that
  do not come, or not the lane itself,
- shared memory that is read before anything is written there, or before an asynchronous copy to it
  has been waited for,
- what products of warpgroups need and do not get: see `warpgroups`,
- instructions and modifiers that are not known here, when a kernel is made.

Registers without a value hold NaN. Sums of `mma` are exact in float64, then rounded once; tensor
cores round more often. `ex2.approx` and the like are NumPy's. The order of memory between blocks is
not modelled: they race instead.
"""

from ptx.machine import Kernel, Module
from ptx.memory import Global, PtxError

__all__ = ["Global", "Kernel", "Module", "PtxError"]
