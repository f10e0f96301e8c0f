"""Targets of kernels, and this machine: its features, caches and cores."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import tvm

from sparsetir.schedules.passes.amx_nests import NEEDS

# As users give one.
TargetLike = str | Mapping[str, object] | tvm.target.Target
DEFAULT_CUDA_ARCH = "sm_80"
# Of x86: what neither compilers use of their own accord nor kernels ask for. Virtual machines often
# lack some of these.
_UNUSED = frozenset(
    "64bit adx aes cldemote clflushopt clwb clzero cmpccxadd crc32 enqcmd fsgsbase fxsr hreset "
    "invpcid kl lwp mmx movdir64b movdiri movrs mwaitx pclmul pconfig pku prefetchi prfchw ptwrite "
    "raoint rdpid rdpru rdrnd rdseed rtm serialize sgx sha sha512 shstk sm3 sm4 tsxldtrk uintr "
    "usermsr vaes vpclmulqdq waitpkg wbnoinvd widekl xsave xsavec xsaveopt xsaves".split()
)
# What decides which schedule is the best one: how wide vectors are, arithmetic of small types, and
# matrix engines.
_DISTINCTIVE = frozenset(
    "amx-bf16 amx-fp16 amx-int8 avx2 avx10.2 avx512bf16 avx512f avx512fp16 avx512vnni avxvnni "
    "bf16 fullfp16 i8mm sme sve sve2".split()
)
# Bits of vectors of floats, by the first of these features that a CPU has.
X86_VECTORS = {"avx512f": 512, "avx": 256, "sse2": 128}
# Bytes of cache that what is gathered from should fit into, where the machine does not say.
L1_BYTES, L2_BYTES, L3_BYTES = 32 << 10, 1 << 20, 32 << 20
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # of Linux


@cache
def host_features() -> Mapping[str, bool]:
    """Whether this machine's CPU has a feature, by the name that LLVM gives it.

    Empty where LLVM cannot tell.
    """
    find = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures", allow_missing=True)
    found = None if find is None else find()
    return {str(name): bool(has) for name, has in (found or {}).items()}


@lru_cache(maxsize=16)
def cpu_features(target: object) -> frozenset[str]:
    """What code for a CPU target may use, by the names that LLVM gives; of a name alone, all of it.

    target : tvm.target.Target of kind "llvm"
    """
    found = tvm.get_global_func("target.llvm_get_cpu_features")(target)
    return frozenset(str(name) for name in found)


@cache
def host_target() -> tvm.target.Target:
    """This machine's CPU: the name that LLVM gives it, and in which features it differs from that.

    Virtual machines hide features, and LLVM takes some for an older CPU than they are, so code for
    the name alone may be slower than need be, or end with an illegal instruction.
    """
    name = str(tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")())
    return _named_and_different(name, host_features())


def _named_and_different(name: str, has: Mapping[str, bool]) -> tvm.target.Target:
    """The target of a CPU of a name, with (and without) the features that it has (or lacks)."""
    named = {"kind": "llvm", "mcpu": name}
    implied = cpu_features(tvm.target.Target(named))
    differs = [f for f in sorted(has) if f not in _UNUSED and has[f] != (f in implied)]
    if not differs:
        return tvm.target.Target(named)
    mattr = [f"{'+' if has[f] else '-'}{f}" for f in differs]
    return tvm.target.Target({**named, "mattr": mattr})


def missing_features(target: object) -> list[str]:
    """What code for a CPU target may use and this machine's CPU lacks; in order of the alphabet."""
    has = host_features()
    return sorted(f for f in cpu_features(target) if f not in _UNUSED and has.get(f) is False)


def distinctive_features(features: Iterable[str]) -> list[str]:
    """Those of the features that decide which schedules are fast; in order of the alphabet."""
    return sorted(_DISTINCTIVE.intersection(features))


def has_tensor_cores(target: Any) -> bool:
    """Whether a target is a GPU of NVIDIA with those of compute capability 8.0, and bfloat16."""
    arch = re.fullmatch(r"sm_(\d+)[a-z]?", str(target.attrs.get("arch", "")))
    return str(target.kind.name) == "cuda" and arch is not None and int(arch[1]) >= 80


def resolve_target(target: TargetLike) -> tvm.target.Target:
    """A `tvm.target.Target`; "cpu" or "llvm", and "cuda", are of this machine."""
    if isinstance(target, tvm.target.Target):
        return target
    if isinstance(target, str) and target in ("cpu", "llvm"):
        return host_target()
    if isinstance(target, str) and target == "cuda":
        device = tvm.runtime.device("cuda", 0)
        arch = f"sm_{device.compute_version.replace('.', '')}" if device.exist else None
        return tvm.target.Target({"kind": "cuda", "arch": arch or DEFAULT_CUDA_ARCH})
    if not isinstance(target, str | dict):
        raise TypeError(
            "build: argument 'target': expected 'cpu', 'cuda', a target dict or a Target, "
            f"got {target!r}"
        )
    try:
        return tvm.target.Target(target)
    except (ValueError, TypeError) as error:
        raise ValueError(f"build: argument 'target': {error}") from error


def usable_cpus() -> list[int]:
    """Numbers of the processors that this process may run on; all, where it cannot be told."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def is_gpu(target: Any) -> bool:
    """Whether programs for the target need threads."""
    return "gpu" in target.keys


@lru_cache(maxsize=16)  # LLVM takes longer to say it than a small kernel to run
def vector_bits(target: Any) -> int:
    """Width of a CPU target's vector registers.

    Of x86 by its features: TVM says 512 for all of them.
    """
    if target.kind.name == "llvm":
        has = cpu_features(target)
        found = next((bits for name, bits in X86_VECTORS.items() if name in has), None)
        if found is not None:
            return found
    width = tvm.get_global_func("target.llvm_get_vector_width")(target)
    return int(width) if int(width) > 0 else 128


def cpu_name(target: Any) -> str:
    """What LLVM calls the CPU of a target, "" for none."""
    return str(target.attrs.get("mcpu", ""))


def l1_bytes() -> int:
    """Size of the L1 data cache of a core, of this machine's."""
    return cache_bytes().get("L1d", L1_BYTES)


def l2_bytes() -> int:
    """Size of the L2 cache of a core, of this machine's."""
    return cache_bytes().get("L2", L2_BYTES)


def l3_bytes() -> int:
    """Size of the L3 cache, which cores share, of this machine's."""
    return cache_bytes().get("L3", L3_BYTES)


@cache
def cache_bytes() -> Mapping[str, int]:
    """Bytes of the data caches of a core by name, such as "L1d" and "L2".

    Without those of which the system does not say it. Python's sysconf has no names for them.
    """
    found: dict[str, int] = {}
    for folder in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = (
                (folder / n).read_text().strip() for n in ("level", "type", "size")
            )
        except OSError:
            continue
        number = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", size)
        if kind != "Instruction" and number is not None:
            name = f"L{level}{'d' if kind == 'Data' else ''}"
            found[name] = int(number[1]) << " KMG".index(number[2] or " ") * 10
    return found


def pool() -> int:
    """Threads of TVM's pool, the one that calls among them."""
    return int(tvm.get_global_func("runtime.NumThreads")())


def assumed_machine(target: Any) -> dict[str, int]:
    """What kernels for a target assume of this machine beside it: speed alone depends on it.

    "l2_bytes" of a core and "threads" for CPUs, nothing for GPUs.
    """
    return {} if is_gpu(target) else {"l2_bytes": l2_bytes(), "threads": pool()}


ARCH_PRCTL = 158  # of x86-64
REQUEST_PERMISSION, TILE_DATA = 0x1023, 18


def features_needed(func: object) -> list[str]:
    """The features that a function of stage II asks for by intrinsics, as LLVM names them."""
    attrs = getattr(func, "attrs", None) or {}
    return [str(name) for name in attrs.get(NEEDS, [])]


def missing_of(needed: Sequence[str], target: object) -> list[str]:
    """The ones of some features that a CPU target lacks."""
    return [name for name in needed if name not in cpu_features(target)] if needed else []


@cache
def _tiles_refused() -> str:
    """Ask the system, once for this process and the threads it will have; why not, or nothing.

    A process that uses tiles without leave is ended. Asking enlarges what signal handlers are
    given, so it is done when the first kernel that needs it is made.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "this is not Linux on x86-64, where it is known how to ask"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def allowed(needed: Sequence[str]) -> str:
    """Why this process cannot run a kernel that needs some features; nothing where it can.

    Asks the system for tiles where they are needed and there.
    """
    has = host_features()
    lacks = [name for name in needed if not has.get(name, False)]
    if lacks:
        return f"it needs a CPU with {' and '.join(lacks)}, which this one has not"
    refused = _tiles_refused() if "amx-tile" in needed else ""
    return f"the system gives this process no tiles: {refused}" if refused else ""


def refusing(name: str, reason: str) -> Callable[..., None]:
    """A function that raises, in place of one that cannot run here."""

    def run(*_: object) -> None:
        raise RuntimeError(f"{name}: {reason}")

    return run
