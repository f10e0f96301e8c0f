"""Machines by what production code reads of them: to choose, to print, and to know records by.

Kernels are compiled for the machine that runs them all the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

__all__ = ["MACHINES", "REAL", "TESTS", "Machine", "on", "settle"]

AVX512 = {"avx2": True, "avx512f": True, "avx512vnni": True}
AMX = {**AVX512, "avx512bf16": True, "avx512fp16": True, "amx-bf16": True, "amx-int8": True}


@dataclass(frozen=True)
class Machine:
    """What is read of a machine.

    cpu : as the system names it
    features : of the CPU, by the names that LLVM gives; printed, in keys of records, and by what
        vectors are wide, which code for the machine that runs them takes in pieces if it must
    cores : that may be used
    l2 : bytes of a core's cache, -1 where the system does not tell
    """

    cpu: str
    features: dict[str, bool]
    cores: int
    l2: int

    @property
    def vector_bits(self) -> int:
        """Of its registers."""
        return 512 if "avx512f" in self.features else 256 if "avx2" in self.features else 128


LONG = "Intel(R) Xeon(R) Platinum 8481C Processor of a virtual machine @ 2.70GHz"
MACHINES = {
    "long name with AMX": Machine(LONG, AMX, 2, 2 << 20),
    "no AVX-512": Machine("AMD Ryzen 5 3600 6-Core Processor", {"avx2": True}, 6, 512 << 10),
    "1 core": Machine("Intel(R) Xeon(R) CPU", AVX512, 1, 1 << 20),
    "64 cores": Machine("AMD EPYC 9554 64-Core Processor", AVX512, 64, 1 << 20),
    "no cache sizes": Machine("Intel(R) Xeon(R) CPU", AVX512, 2, -1),
    "unknown": Machine("", {}, 4, 0),
}
# What tests are on where they do not say.
TESTS = Machine("CPU of tests", AVX512, 2, 1 << 20)


def _facts(machine: Machine) -> dict[str, dict[str, Any]]:
    """What stands for functions of production code, by module and name."""
    from sparsetir.schedules.targets import L1_BYTES, L2_BYTES, L3_BYTES

    l2 = machine.l2 if machine.l2 > 0 else L2_BYTES
    bits = partial(_of_host, "vector_bits", lambda: machine.vector_bits)
    name = partial(_of_host, "cpu_name", lambda: "")
    return {
        "sparsetir.records.task": {"cpu_model": lambda: machine.cpu or "x86_64 generic"},
        "sparsetir.runtime.pool": {"work_of_threads": lambda: 1 << 20},
        "sparsetir.schedules.targets": {
            "l2_bytes": lambda: l2, "pool": lambda: machine.cores, "vector_bits": bits,
            "cpu_name": name, "l1_bytes": lambda: L1_BYTES, "l3_bytes": lambda: L3_BYTES,
        },
    }  # fmt: skip


def _of_host(function: str, here: Callable[[], Any], target: Any) -> Any:
    """What a machine says of a target that is the CPU it stands for, and the function of others."""
    from sparsetir.schedules.targets import host_target

    return here() if str(target) == str(host_target()) else REAL[function](target)


# The functions that :func:`settle` has replaced, by name.
REAL: dict[str, Any] = {}


def settle(machine: Machine = TESTS) -> None:
    """Put this process on a machine, also modules that have taken the functions by name."""
    for module, functions in _facts(machine).items():
        __import__(module)
        for name, function in functions.items():
            REAL[name] = old = getattr(sys.modules[module], name)
            for other in _ours_with(name, old):
                setattr(other, name, function)


def _ours_with(name: str, value: Any) -> list[Any]:
    """The modules of the project in which a name is a value."""
    loaded = [m for m in list(sys.modules.values()) if m is not None]
    ours = [m for m in loaded if str(getattr(m, "__name__", "")).startswith("sparsetir")]
    return [m for m in ours if vars(m).get(name) is value]


@contextlib.contextmanager
def on(machine: Machine) -> Iterator[None]:
    """On a machine: choices, texts and keys are those of it."""
    from sparsetir.schedules.targets import host_target

    host_target()  # which stays, of the machine that runs the tests
    facts = _facts(machine)
    facts["sparsetir.schedules.targets"] |= {
        "host_features": lambda: machine.features,
        "usable_cpus": lambda: list(range(machine.cores)),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "cpu_count", lambda: machine.cores))
        for module, functions in facts.items():
            __import__(module)
            for name, function in functions.items():
                old = getattr(sys.modules[module], name)
                for other in _ours_with(name, old):
                    stack.enter_context(mock.patch.object(other, name, function))
        yield
