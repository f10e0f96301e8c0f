"""The machine that kernels are made for, as an object: its system, cores and caches.

Schedules, thread counts, keys of records and reports read :func:`this_machine`; `with
assume(machine)` gives them another one. The module is light, and is imported before TVM, whose
thread pool gets its size from here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
TESTED = {
    ("linux", "x86_64"): "tested",
    ("linux", "aarch64"): "kernels ran under emulation; speed not measured",
}
FULL = 1024  # the capacity of the fastest core, in Linux's unit
# Capacity of Intel's E cores: half the vector units of P cores, at a lower frequency.
E_CORE = FULL // 2
SIBLINGS = "topology/thread_siblings_list"
# Bits and number of vector registers, by the feature of LLVM that implies them, the widest first.
REGISTERS = {"avx512f": (512, 32), "avx": (256, 16), "sse2": (128, 16), "neon": (128, 32)}


class Machine(NamedTuple):
    """A CPU and its system, as far as choices and reports depend on them.

    system : name by `sys.platform`: "linux", "darwin", "win32"
    architecture : name by `platform.machine()`: "x86_64", "aarch64", "arm64"
    model : the system's name of the CPU, "" if it has none
    cpus : numbers of the processors that this process may keep busy, the fastest first
    cores : number of threads that run a kernel fastest, at least 1: one per fast core, within the
        CPU time that a container is granted
    caches : bytes of the data caches of a core, by "L1d", "L2" and "L3"; only known ones
    features : whether the CPU has a feature, by LLVM's names; None to ask LLVM
    llvm : LLVM's name of the CPU; None to ask LLVM
    registers : bits and number of its vector registers; None for those of the compiled target
    threads : number of threads of the pool that runs kernels; None for the size of TVM's pool
    work_of_threads : multiplications from which several threads are faster; None for the number of
        this process's pool
    """

    system: str
    architecture: str
    model: str = ""
    cpus: Sequence[int] = (0,)
    cores: int = 1
    caches: Mapping[str, int] = {}
    features: Mapping[str, bool] | None = None
    llvm: str | None = None
    registers: tuple[int, int] | None = None
    threads: int | None = None
    work_of_threads: int | None = None


_assumed: list[Machine] = []


def this_machine() -> Machine:
    """The machine that this process assumes: the one it runs on, or the last of :func:`assume`."""
    return _assumed[-1] if _assumed else real_machine()


@contextmanager
def assume(machine: Machine) -> Iterator[Machine]:
    """Make choices, texts and keys those of another machine; kernels are compiled for this one."""
    _assumed.append(machine)
    try:
        yield machine
    finally:
        # Not the last one: contexts of threads and generators may end in any order.
        del _assumed[max(i for i, x in enumerate(_assumed) if x is machine)]


@cache
def real_machine() -> Machine:
    """The machine that this process runs on."""
    cpus = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
    # `platform.machine()`, whose module takes milliseconds to import.
    architecture = os.uname().machine if hasattr(os, "uname") else "AMD64"
    if sys.platform == "linux":
        return linux(ROOT, architecture, cpus)
    if sys.platform == "darwin":
        return macos(_sysctl, architecture, cpus)
    return Machine(sys.platform, architecture, "", cpus, len(cpus))


def useful(capacities: Sequence[int]) -> int:
    """The number of cores that run a loop fastest if it is divided into equal parts.

    The slowest core determines when all are done: more cores only help if the slowest of them is
    fast enough.

    capacities : capacities of the cores, in any unit
    """
    falling = sorted(capacities, reverse=True)
    return max(range(len(falling), 0, -1), key=lambda n: n * falling[n - 1])


def support_status(machine: Machine) -> str:
    """A line about how far this package is tested on a machine's system and architecture."""
    system = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(
        machine.system, machine.system
    )
    how = TESTED.get((machine.system, machine.architecture), "not tested")
    return f"{system} on {machine.architecture}: {how}"


# -- Linux -----------------------------------------------------------------------------------------


def linux(root: Path, architecture: str, cpus: Sequence[int]) -> Machine:
    """Read a machine from the files of Linux.

    Parameters
    ----------
    root : Path
        The folder that holds `proc` and `sys`.
    architecture : str
        The machine's, as `platform.machine()` names it.
    cpus : sequence of int
        Numbers of the processors that the process may run on.

    Returns
    -------
    Machine
    """
    base = root / "sys/devices/system/cpu"
    e_cores = _numbers(_text(root / "sys/devices/cpu_atom/cpus"))
    capacity: dict[int, int] = {}
    for cpu in cpus:
        told = _text(base / f"cpu{cpu}/cpu_capacity")
        capacity[cpu] = int(told) if told.isdecimal() else E_CORE if cpu in e_cores else FULL
    fastest_first = sorted(cpus, key=lambda cpu: -capacity[cpu])
    cores = {_text(base / f"cpu{cpu}" / SIBLINGS) or str(cpu): capacity[cpu] for cpu in cpus}
    granted = max(1, _granted(root))
    return Machine(
        "linux", architecture, _model(root), fastest_first[:granted],
        min(useful(list(cores.values())), granted), _caches(base / f"cpu{fastest_first[0]}"),
    )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    numbers: set[int] = set()
    for first, last in re.findall(r"([0-9]+)(?:-([0-9]+))?", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _model(root: Path) -> str:
    # The line is missing on ARM.
    match = re.search(r"^model name\s*:[ \t]*(.*\S)", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else ""


def _granted(root: Path) -> int:
    """The number of whole processors whose time control groups (of both versions) grant.

    One more thread would be stopped for a part of each period, and the others would wait for it.
    """
    granted = float("inf")
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "cpu" not in kinds.split(","):
            continue
        mount = root / "sys/fs/cgroup" / kinds
        # A container sees its own group as the root, whatever the path says.
        for group in [mount / path.strip("/"), *(mount / path.strip("/")).parents]:
            if kinds:
                told = [_text(group / f"cpu.cfs_{x}_us") for x in ("quota", "period")]
            else:
                told = [*_text(group / "cpu.max").split(), "", ""][:2]
            if all(x.isdecimal() and int(x) for x in told):
                granted = min(granted, int(told[0]) // int(told[1]))
            if group == mount:
                break
    return sys.maxsize if granted == float("inf") else int(granted)


def _caches(cpu: Path) -> dict[str, int]:
    """Bytes of the data caches of a core; for an L2 shared by cores, a core's part."""
    sizes: dict[str, int] = {}
    threads = len(_numbers(_text(cpu / SIBLINGS))) or 1
    for folder in sorted((cpu / "cache").glob("index*")):
        level, kind, size = (_text(folder / n) for n in ("level", "type", "size"))
        number = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", size)
        if level and kind != "Instruction" and number is not None:
            name = f"L{level}{'d' if kind == 'Data' else ''}"
            sharing = max(1, len(_numbers(_text(folder / "shared_cpu_list"))) // threads)
            bytes = int(number[1]) << " KMG".index(number[2] or " ") * 10
            sizes[name] = bytes // (sharing if name == "L2" else 1)
    return sizes


# -- macOS -----------------------------------------------------------------------------------------


def macos(sysctl: Callable[[str], bytes], architecture: str, cpus: Sequence[int]) -> Machine:
    """Read a machine from the values of macOS.

    Parameters
    ----------
    sysctl : callable
        Returns the bytes of a value by its name, none if there is no such value.
    architecture : str
        The machine's, as `platform.machine()` names it.
    cpus : sequence of int
        Numbers of the processors that the process may run on.

    Returns
    -------
    Machine
        For Apple's own chips it has the performance cores: an efficiency core takes about three
        times as long.
    """

    def number(name: str, kind: str = "perflevel0.") -> int:
        found = int.from_bytes(sysctl(f"hw.{kind}{name}"), "little")
        return found if found or not kind else number(name, "")

    sizes = {
        "L1d": number("l1dcachesize"),
        "L2": number("l2cachesize") // (number("cpusperl2") or 1),
        "L3": number("l3cachesize"),
    }
    model = sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    cores = number("physicalcpu") or len(cpus)
    caches = {name: size for name, size in sizes.items() if size}
    return Machine("darwin", architecture, model, cpus, cores, caches)


def _sysctl(name: str) -> bytes:
    import ctypes

    libc, size = ctypes.CDLL(None), ctypes.c_size_t(0)
    if libc.sysctlbyname(name.encode(), None, ctypes.byref(size), None, 0):
        return b""
    value = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name.encode(), value, ctypes.byref(size), None, 0):
        return b""
    return value.raw[: size.value]
