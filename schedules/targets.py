"""Targets of kernels, and this machine: its features, caches and cores."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import tvm

from sparsetir.machine import REGISTERS, this_machine

# The forms in which callers pass a target.
TargetLike = str | Mapping[str, object] | tvm.target.Target
DEFAULT_CUDA_ARCH = "sm_80"
# Features of x86 that neither compilers use by default nor kernels need. Virtual machines often
# lack some of these.
_UNUSED = frozenset(
    "64bit adx aes cldemote clflushopt clwb clzero cmpccxadd crc32 enqcmd fsgsbase fxsr hreset "
    "invpcid kl lwp mmx movdir64b movdiri movrs mwaitx pclmul pconfig pku prefetchi prfchw ptwrite "
    "raoint rdpid rdpru rdrnd rdseed rtm serialize sgx sha sha512 shstk sm3 sm4 tsxldtrk uintr "
    "usermsr vaes vpclmulqdq waitpkg wbnoinvd widekl xsave xsavec xsaveopt xsaves".split()
)
# Features that decide which schedule is the best: vector width, arithmetic of small types, and
# matrix engines.
_DISTINCTIVE = frozenset(
    "amx-bf16 amx-fp16 amx-int8 avx2 avx10.2 avx512bf16 avx512f avx512fp16 avx512vnni avxvnni "
    "bf16 fullfp16 i8mm sme sve sve2".split()
)
# LLVM's model of a pipeline, by the CPU's name, where another one gives better code: with that of
# Neoverse N1 it moves loads up until it spills vectors (LLVM 22: `test_other_cpus.py` counts them).
# The other CPU has the same pipeline and the same features, but for profiling.
_MODELS = {"neoverse-n1": "cortex-a76"}
# Cache sizes in bytes that gathered operands should fit, if the machine does not report any.
L1_BYTES, L2_BYTES, L3_BYTES = 32 << 10, 1 << 20, 32 << 20


def host_features() -> Mapping[str, bool]:
    """Whether this machine's CPU has a feature, by LLVM's name.

    Empty if LLVM cannot tell.
    """
    assumed = this_machine().features
    return _features_by_llvm() if assumed is None else assumed


@cache
def _features_by_llvm() -> Mapping[str, bool]:
    find = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures", allow_missing=True)
    told = {} if find is None else {str(name): bool(has) for name, has in (find() or {}).items()}
    named = cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": _host_name()}))
    # LLVM 22 tells few features of ARM; the name of the CPU implies others.
    return dict.fromkeys(named, True) | told if "neon" in named else told


def _host_name() -> str:
    return str(tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")())


@lru_cache(maxsize=16)
def cpu_features(target: object) -> frozenset[str]:
    """Features, by LLVM's names, that code for a CPU target may use, with those that they imply.

    target : tvm.target.Target of kind "llvm"
    """
    names = tvm.get_global_func("target.llvm_get_cpu_features")(target)
    return frozenset(str(name) for name in names)


@cache
def host_target() -> tvm.target.Target:
    """This machine's CPU: its name in LLVM, and the features in which it differs from that.

    Virtual machines hide features, and LLVM takes some for an older CPU than they are, so code for
    the name alone may be slower than necessary, or end with an illegal instruction.
    """
    return _named_and_different(_host_name(), _features_by_llvm())


def _named_and_different(name: str, has: Mapping[str, bool]) -> tvm.target.Target:
    """The target of a named CPU, with (and without) the features that it has (or lacks)."""
    named = {"kind": "llvm", "mcpu": name}
    implied = cpu_features(tvm.target.Target(named))
    differs = [f for f in sorted(has) if f not in _UNUSED and has[f] != (f in implied)]
    if not differs:
        return tvm.target.Target(named)
    mattr = [f"{'+' if has[f] else '-'}{f}" for f in differs]
    return tvm.target.Target({**named, "mattr": mattr})


def missing_features(target: object) -> list[str]:
    """Features that code for a CPU target may use and this machine's CPU lacks, sorted."""
    has = host_features()
    return sorted(f for f in cpu_features(target) if f not in _UNUSED and has.get(f) is False)


def distinctive_features(features: Iterable[str]) -> list[str]:
    """The features that decide which schedules are fast, sorted."""
    return sorted(_DISTINCTIVE.intersection(features))


def has_tensor_cores(target: Any) -> bool:
    """Whether a target is an NVIDIA GPU of compute capability 8.0 or more, which has bfloat16."""
    arch = re.fullmatch(r"sm_(\d+)[a-z]?", str(target.attrs.get("arch", "")))
    return str(target.kind.name) == "cuda" and arch is not None and int(arch[1]) >= 80


def resolve_target(target: TargetLike, caller: str = "build") -> tvm.target.Target:
    """A `tvm.target.Target`; "cpu" or "llvm", and "cuda", denote this machine's.

    caller : the name of the function, for errors
    """
    if isinstance(target, tvm.target.Target):
        return target
    if isinstance(target, str) and target in ("cpu", "llvm"):
        return host_target()
    if isinstance(target, str) and target == "cuda":
        device = tvm.runtime.device("cuda", 0)
        arch = f"sm_{device.compute_version.replace('.', '')}" if device.exist else None
        return tvm.target.Target({"kind": "cuda", "arch": arch or DEFAULT_CUDA_ARCH})
    refusal = (
        f"{caller}: argument 'target': expected 'cpu', 'cuda', a target dict or a Target, "
        f"got {target!r}"
    )
    if not isinstance(target, str | dict):
        raise TypeError(refusal)
    try:
        return tvm.target.Target(target)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{refusal}: {error}") from error


def code_target(target: Any) -> Any:
    """The target that a kernel is compiled for, which runs on the same CPUs as `target`."""
    model = _MODELS.get(str(target.attrs.get("mcpu")))
    return tvm.target.Target({**target.export(), "mcpu": model}) if model else target


def is_gpu(target: Any) -> bool:
    """Whether programs for the target need threads."""
    return "gpu" in target.keys


def vector_registers(target: Any) -> tuple[int, int]:
    """Width in bits of a CPU target's vector registers, and their number."""
    assumed = this_machine().registers
    return assumed if assumed and is_host(target) else _registers_of(target)


@lru_cache(maxsize=16)  # asking LLVM takes longer than running a small kernel
def _registers_of(target: Any) -> tuple[int, int]:
    """Vector registers by feature, if there are any: TVM reports 512 bits for all x86."""
    if target.kind.name == "llvm":
        has = cpu_features(target)
        registers = next((size for name, size in REGISTERS.items() if name in has), None)
        if registers is not None:
            return registers
    width = int(tvm.get_global_func("target.llvm_get_vector_width")(target))
    return (width if width > 0 else 128), 16


def vector_bits(target: Any) -> int:
    """Width of a CPU target's vector registers."""
    return vector_registers(target)[0]


def is_host(target: Any) -> bool:
    """Whether a target is this machine's CPU."""
    return str(target) == str(host_target())


def cpu_name(target: Any) -> str:
    """LLVM's name of a target's CPU, "" if there is none."""
    assumed = this_machine().llvm
    if assumed is not None and is_host(target):
        return assumed
    return str(target.attrs.get("mcpu", ""))


def l1_bytes() -> int:
    """Size of this machine's L1 data cache, per core."""
    return this_machine().caches.get("L1d", L1_BYTES)


def l2_bytes() -> int:
    """Size of this machine's L2 cache, per core."""
    return this_machine().caches.get("L2", L2_BYTES)


def l3_bytes() -> int:
    """Size of this machine's L3 cache, which cores share."""
    return this_machine().caches.get("L3", L3_BYTES)


def pool() -> int:
    """Threads of TVM's pool, including the calling one."""
    return this_machine().threads or int(tvm.get_global_func("runtime.NumThreads")())


def assumed_machine(target: Any) -> dict[str, int]:
    """Assumptions of a target's kernels about the rest of the machine, which only affect speed.

    "l2_bytes" of a core and "threads" for CPUs, nothing for GPUs.
    """
    return {} if is_gpu(target) else {"l2_bytes": l2_bytes(), "threads": pool()}


# Stage-II attribute: the CPU features, or the GPU's architecture, that a function needs.
NEEDS = "sparsetir.needs"
ARCHITECTURES = {"arm64": "aarch64", "amd64": "x86_64", "AMD64": "x86_64"}  # other names
ARCH_PRCTL = 158  # of x86-64
REQUEST_PERMISSION, TILE_DATA = 0x1023, 18


def features_needed(func: object) -> list[str]:
    """The features that a stage-II function needs, by LLVM's names; of a GPU its architecture."""
    attrs = getattr(func, "attrs", None) or {}
    return [str(name) for name in attrs.get(NEEDS, [])]


def missing_of(needed: Sequence[str], target: Any) -> list[str]:
    """Those of some features that a target lacks."""
    if not needed:
        return []
    has = {str(target.attrs.get("arch"))} if is_gpu(target) else cpu_features(target)
    return [name for name in needed if name not in has]


@cache
def _tiles_refused() -> str:
    """Ask the system, once for this process and its future threads; returns why not, or "".

    A process that uses tiles without permission is killed. Asking enlarges the frames of signal
    handlers, so it is done when the first kernel that needs it is created.
    """
    if (this_machine().system, this_machine().architecture) != ("linux", "x86_64"):
        return "this is not Linux on x86-64, where it is known how to ask"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def allowed(needed: Sequence[str], target: Any = None) -> str:
    """Why this process cannot run a kernel that needs some features; "" if it can.

    Asks the system for tiles if they are needed and exist.

    target : of the kernel, if its architecture must match, too
    """
    wanted = str(target.attrs.get("mtriple", "")).partition("-")[0] if target else ""
    mine = this_machine().architecture
    if wanted and ARCHITECTURES.get(wanted, wanted) != ARCHITECTURES.get(mine, mine):
        return f"it is compiled for {wanted}, and this machine is {mine}"
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
