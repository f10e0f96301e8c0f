"""Machines that tests hand to production code: to choose, to print, and to know records by.

Kernels are compiled for the machine that runs them all the same.
"""

from __future__ import annotations

from contextlib import ExitStack

from sparsetir.machine import Machine, assume, real_machine

__all__ = ["MACHINES", "settle"]

AVX512 = {"avx2": True, "avx512f": True, "avx512vnni": True}
AMX = {**AVX512, "avx512bf16": True, "avx512fp16": True, "amx-bf16": True, "amx-int8": True}
NEON = {"neon": True, "dotprod": True, "fullfp16": True}
LONG = "Intel(R) Xeon(R) Platinum 8481C Processor of a virtual machine @ 2.70GHz"


def machine(
    model: str,
    features: dict[str, bool] | None,
    cores: int,
    l2: int | None,
    registers: tuple[int, int] = (512, 32),
    architecture: str = "x86_64",
) -> Machine:
    """A machine of Linux; l2 : bytes of a core's cache, None where the system does not tell."""
    caches = {"L2": l2} if l2 else {}
    return Machine(
        "linux", architecture, model, tuple(range(cores)), cores, caches, features, llvm="",
        registers=registers, threads=cores, work_of_threads=1 << 20,
    )  # fmt: skip


MACHINES = {
    "long name with AMX": machine(LONG, AMX, 2, 2 << 20),
    "no AVX-512": machine(
        "AMD Ryzen 5 3600 6-Core Processor", {"avx2": True}, 6, 512 << 10, (256, 16)
    ),
    "1 core": machine("Intel(R) Xeon(R) CPU", AVX512, 1, 1 << 20),
    "64 cores": machine("AMD EPYC 9554 64-Core Processor", AVX512, 64, 1 << 20),
    "no cache sizes": machine("Intel(R) Xeon(R) CPU", AVX512, 2, None),
    "ARM": machine("", NEON, 4, 1 << 20, (128, 32), "aarch64"),
    "unknown": machine("", {}, 4, None, (128, 16)),
}


# What tests are on where they do not say, with the features of the CPU that runs them.
TESTS = machine("CPU of tests", None, 2, 1 << 20, architecture=real_machine().architecture)
SETTLED = ExitStack()


def settle() -> None:
    """Put this process on the machine of tests."""
    SETTLED.enter_context(assume(TESTS))
