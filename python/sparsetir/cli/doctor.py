"""`sparsetir doctor`: installed packages, this machine's features, and a run of a kernel."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np

from sparsetir._versions import VERSION, installed
from sparsetir.cli import arguments
from sparsetir.cli.arguments import Facts, Parser
from sparsetir.machine import support_status, this_machine
from sparsetir.runtime.texts import many, memory

EPILOG = """\
Compiles, runs and checks a small kernel. The exit code is 1 if something that is needed is broken;
missing optional parts (a GPU, a package) are only reported.

examples:
  sparsetir doctor
  sparsetir doctor --json
"""
# Missing packages among these are reported with their purpose.
OPTIONAL = {"torch": "torch tensors", "optuna": "tune", "matplotlib": "pictures, reports"}
NEEDED = ("apache-tvm", "apache-tvm-ffi", "numpy", "scipy")
TARGETS = ("llvm", "cuda", "opencl", "vulkan", "rocm", "metal")
VARIABLES = (
    "SPARSETIR_RECORDS", "SPARSETIR_KERNELS", "SPARSETIR_POOL", "XDG_CACHE_HOME",
    "TVM_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "TVM_BIND_THREADS", "TVM_THREAD_POOL_SPIN_COUNT", "TVM_CUDA_COMPILE_MODE",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
TOLERANCE = 1e-4
POOLS = {"openmp": "OpenMP's pool", "tvm": "TVM's pool", "serial": "no pool"}


def add(out: Parser) -> None:
    """Add the arguments."""
    arguments.add_json(out)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if something that is needed is broken."""
    facts = {
        "system": support_status(this_machine()),
        "versions": versions(),
        "targets": targets(),
        "cpu": cpu(),
        "threads": _threads(),
        "gpu": gpu(),
        "nvcc": nvcc(),
        "records": records(),
        "kernels": kernels(),
        "environment": {n: os.environ[n] for n in VARIABLES if n in os.environ},
        "kernel": kernel(),
    }
    problems = [f"{n}: {facts[n]['error']}" for n in ("records", "kernel") if facts[n].get("error")]
    problems += [f"{name} is not installed" for name in NEEDED if not facts["versions"][name]]
    problems += [] if "llvm" in facts["targets"] else ["TVM was built without LLVM"]
    facts["problems"] = problems
    if args.json:
        arguments.print_json(facts)
    else:
        _show(facts)
    return int(bool(problems))


def _threads() -> dict[str, object]:
    """The result of :func:`sparsetir.threads`, in a process without torch."""
    from sparsetir.runtime.pool import threads

    return threads()._asdict()


def versions() -> dict[str, str | None]:
    """Versions of Python, this package and others; None for packages that are not installed."""
    out: dict[str, str | None] = {"python": platform.python_version(), "sparsetir": VERSION}
    return out | {name: installed(name) for name in (*NEEDED, *OPTIONAL)}


def targets() -> list[str]:
    """Targets that this TVM generates code for."""
    import tvm

    return [t for t in TARGETS if tvm.get_global_func(f"target.build.{t}", allow_missing=True)]


def cpu() -> Facts:
    """Name, cores that this process may use, vector registers, features and caches.

    features : features by which tuning distinguishes CPUs
    unlike : features in which it differs from LLVM's CPU of this name, such as "+amx-bf16", "-gfni"
    """
    from sparsetir.records.task import cpu_model
    from sparsetir.schedules.targets import (
        distinctive_features,
        host_features,
        host_target,
        vector_bits,
    )

    machine, target, has = this_machine(), host_target(), host_features()
    return {
        "name": cpu_model(),
        "llvm": str(target.attrs["mcpu"]),
        "cores": len(machine.cpus),
        "vector_bits": vector_bits(target),
        "features": distinctive_features(name for name in has if has[name]),
        "unlike": [str(name) for name in target.attrs.get("mattr", ())],
        "caches": dict(machine.caches),
    }


def gpu() -> Facts:
    """The first CUDA device, or why there is none."""
    import tvm

    device = tvm.runtime.device("cuda", 0)
    if device.exist:
        arch = "sm_" + device.compute_version.replace(".", "")
        return {"name": str(device.device_name), "arch": arch}
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return {"name": None, "reason": "CUDA_VISIBLE_DEVICES is empty"}
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"name": None, "reason": "there is no NVIDIA driver (libcuda.so.1)"}
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return {"name": None, "reason": "there is a driver, but no /dev/nvidia0"}
    return {"name": None, "reason": "the driver shows no device to CUDA"}


def nvcc() -> dict[str, object]:
    """CUDA's compiler, which is only needed with TVM_CUDA_COMPILE_MODE=nvcc."""
    path, said = shutil.which("nvcc"), ""
    if path is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
            said = run.stdout
    version = re.search("release (.*)", said)
    return {"path": path, "version": version and version[1]}


def records() -> Facts:
    """The file of records, left unchanged; "error" if it cannot be read or written."""
    from sparsetir.records.records import RecordError, Records

    kept = Records()
    if kept.path is None:
        return {"path": None, "reason": "switched off: SPARSETIR_RECORDS is empty"}
    out: Facts = {"path": str(kept.path), "bytes": None, "records": 0}
    existing = kept.path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    out["writable"] = os.access(existing, os.W_OK)
    try:
        if kept.path.exists():
            out |= {"bytes": kept.path.stat().st_size, "records": len(kept.all())}
    except (RecordError, OSError) as error:
        return {**out, "error": str(error)}
    return out if out["writable"] else {**out, "error": f"{existing} cannot be written to"}


def kernels() -> Facts:
    """The folder of kernels that processes share, and its contents."""
    from sparsetir.runtime.kernel_cache import VARIABLE, cache_folder

    folder = cache_folder()
    if folder is None:
        return {"path": None, "reason": f"switched off: {VARIABLE} is empty"}
    sizes = [file.stat().st_size for file in folder.glob("*.so")]
    return {"path": str(folder), "kernels": len(sizes), "bytes": sum(sizes)}


def kernel() -> Facts:
    """Compile, run and check SpMM on a small matrix."""
    import scipy.sparse as sp

    import sparsetir
    from sparsetir.runtime.kernel_cache import VARIABLE
    from sparsetir.tuning.serving import one_line

    rng = np.random.default_rng(0)
    matrix = sp.random_array((200, 100), density=0.05, format="csr", dtype="float32", rng=rng)
    dense = rng.standard_normal((100, 32), dtype=np.float32)
    folder = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ""  # so that the kernel is compiled, not loaded
    try:
        config = sparsetir.plan_candidates("spmm", matrix, 32)[0]
        product = sparsetir.plan("spmm", matrix, 32, config=config)
        error = float(np.abs(product(dense) - matrix @ dense).max())
    except Exception as failure:
        return {"error": one_line(failure)}
    finally:
        os.environ.pop(VARIABLE)
        os.environ |= {} if folder is None else {VARIABLE: folder}
    out = {"compile_seconds": product.compile_seconds, "largest_error": error}
    return out if error < TOLERANCE else {**out, "error": f"the result is wrong by {error:.2g}"}


def _show(facts: Facts) -> None:
    there = {name: version for name, version in facts["versions"].items() if version}
    optional = [f"{name} {there[name]}" for name in OPTIONAL if name in there]
    absent = [f"{name} (for {why})" for name, why in OPTIONAL.items() if name not in there]
    needed = [f"{name} {version}" for name, version in there.items() if name not in OPTIONAL]
    _part("versions", ", ".join(needed), ", ".join(optional))
    _part("missing", ", ".join(absent))
    _part("system", facts["system"])
    _part("targets", ", ".join(facts["targets"]))
    chip = facts["cpu"]
    caches = ", ".join(f"{name} {memory(size)}" for name, size in chip["caches"].items())
    _part(
        "CPU",
        f"{chip['name']} ({chip['llvm']}), {many(chip['cores'], 'core')}, "
        f"vectors of {chip['vector_bits']} bits",
        f"features: {' '.join(chip['features']) or 'LLVM does not say'}",
        chip["unlike"] and f"unlike {chip['llvm']}: {' '.join(chip['unlike'])}",
        f"caches: {caches or 'the system does not say'}",
    )
    ran = facts["threads"]
    waits = "torch" in there and "torch is not loaded" in ran["why"]
    _part(
        "threads",
        f"{many(ran['count'], 'thread')} of {POOLS[ran['pool']]}: {ran['why']}",
        ran["library"],
        "with torch, kernels run on its pool" if waits else "",
    )
    device, compiler, kept = facts["gpu"], facts["nvcc"], facts["records"]
    name = f"{device['name']}, {device['arch']}" if device["name"] else f"none: {device['reason']}"
    _part("GPU", name)
    path = compiler["path"]
    _part("nvcc", f"{path}, {compiler['version']}" if path else "not on the path")
    if kept["path"] is None:
        _part("records", kept["reason"])
    else:
        size = "no file yet"
        if kept["bytes"] is not None:
            size = f"{many(kept['records'], 'record')} in {memory(kept['bytes'])}"
        _part("records", f"{kept['path']}: {size}")
    cache = facts["kernels"]
    contents = cache["path"] and f"{many(cache['kernels'], 'kernel')} in {memory(cache['bytes'])}"
    _part("kernels", f"{cache['path']}: {contents}" if contents else cache["reason"])
    _part("variables", *(f"{name}={value}" for name, value in facts["environment"].items()))
    ran = facts["kernel"]
    if "error" not in ran:
        _part("kernel", f"spmm compiled in {ran['compile_seconds']:.2f} s, its result is right")
    _part("BROKEN", *facts["problems"])
    if not facts["problems"]:
        _part("", "all that is needed works")


def _part(name: str, *lines: str) -> None:
    """Print the nonempty lines beside a name."""
    for number, line in enumerate(filter(None, lines)):
        print(f"{name if number == 0 else '':10} {line}")
