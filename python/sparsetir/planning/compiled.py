"""Kernels that are compiled once in a process, and serve all patterns."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from tvm.target import Target

from sparsetir.records.task import Compiled
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import Stages, kernel_of, lower_template
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import Problem
from sparsetir.schedules.templates.registry import template_of

# Kernels that are kept, with all of their stages; those of plans that are in use live on without.
MOST_KERNELS = 512
_kernels: OrderedDict[Hashable, Kernel] = OrderedDict()
_count = 0
_access = threading.Lock()
# One kernel at a time: LLVM's options in TVM are the process's.
_compiling = threading.Lock()


def compilations() -> int:
    """How many kernels plans and operators have compiled in this process."""
    return _count


def compiled_by(config: Compiled, problem: Problem, target: Target) -> Kernel:
    """The kernel that the template of a config makes for a problem, of plans and operators alike.

    Raises TypeError for what is no config for this.
    """

    def stages() -> Stages:
        template = template_of(config, problem, is_gpu(target))
        return lower_template(template, problem, config, target)

    return compiled((problem, config.compiled), target, stages)


def compiled(key: Hashable, target: Target, stages: Callable[[], Stages]) -> Kernel:
    """The kernel for a key and a `tvm.target.Target`, compiled when it is first wanted.

    The one that was not asked for longest goes where there are more than `MOST_KERNELS`. A thread
    that wants what is there does not wait for others that compile.

    stages : gives what is compiled; the kernel trusts its index arrays
    """
    global _count
    key = (key, str(target))
    found = _kept(key)
    if found is not None:
        return found
    with _compiling:
        found = _kept(key)  # another thread may have wanted it too
        if found is None:
            found = kernel_of(stages(), target, check=False)
            with _access:
                _count += 1
                _kernels[key] = found
                while len(_kernels) > MOST_KERNELS:
                    _kernels.popitem(last=False)
        return found


def _kept(key: Hashable) -> Kernel | None:
    with _access:
        if key in _kernels:
            _kernels.move_to_end(key)
        return _kernels.get(key)
