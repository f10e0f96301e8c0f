"""Checks on the installed TVM, made before it is loaded.

TVM comes as two distributions that must match. A wrong pair does not fail at import: it crashes the
process later, inside native code. So the versions are checked, from the installed metadata alone.
"""

import os
import warnings
from importlib import metadata
from pathlib import Path

from sparsetir.machine import this_machine

VERSION = "0.3.0"

REQUIRED = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}

# Records of other versions are measured again: there the same config may be another kernel.
VERSIONS = {"sparsetir": VERSION, **REQUIRED}


def check() -> None:
    """Raise ImportError if the installed TVM is not the one this package is made for.

    Imports neither tvm nor tvm_ffi. Also calls `set_thread_defaults`, which must come before
    either is loaded.
    """
    _check_system(Path(__file__).parent)
    present = {name: installed(name) for name in REQUIRED}
    wrong = [name for name, version in REQUIRED.items() if present[name] != version]
    if wrong:
        pins = [f"{name}=={version}" for name, version in REQUIRED.items()]
        seen = " and ".join(
            f"{name} {present[name]}" if present[name] else f"no {name}" for name in wrong
        )
        raise ImportError(
            f"sparsetir {VERSION} needs {' and '.join(pins)}, found {seen}: "
            f"run `pip install {' '.join(pins)}`"
        )
    set_thread_defaults()


def _check_system(folder: Path) -> None:
    """Raise ImportError for a checkout without symbolic links; warn on untested systems.

    folder : folder of this package
    """
    if (folder / "sparse_ir").is_file():
        raise ImportError(
            f"sparsetir: {folder / 'sparse_ir'} is a file, where a checkout has a symbolic link: "
            "clone with `git clone -c core.symlinks=true`, or install a wheel"
        )
    if this_machine().system == "win32":
        warnings.warn(
            "sparsetir is not tested on Windows, where tuning and torch's pool of threads are not "
            "available", stacklevel=4,
        )  # fmt: skip


def set_thread_defaults() -> None:
    """Choose how TVM's CPU thread pool behaves, unless the user has.

    By default each worker is bound to a core and spins while it waits. Beside another pool in the
    same process (torch, MKL) such a worker is not scheduled when work arrives, and a call that
    takes 0.1 ms waits for 2 to 3 ms. Also by default, on x86-64, the pool uses half of the logical
    CPUs, assuming that two of them share a core; here it uses the actual cores, like torch. TVM
    reads the variables when its pool starts, so a value set by the user wins and a value set later
    has no effect.
    """
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
    if "OMP_NUM_THREADS" not in os.environ:  # TVM obeys it, too
        os.environ.setdefault("TVM_NUM_THREADS", str(this_machine().cores))


def installed(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
