"""Checks on the installed TVM, made before it is loaded.

TVM comes as two distributions that must fit each other. A wrong pair does not fail at import: it
ends the process later, inside native code. So the pair is checked by name, from the installed
metadata alone.
"""

import os
from importlib import metadata

VERSION = "0.1.0"

REQUIRED = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


def check() -> None:
    """Raise ImportError when the installed TVM is not the one this package is made for.

    Imports neither tvm nor tvm_ffi. Also calls `set_thread_defaults`, which must come before
    either is loaded.
    """
    found = {name: _installed(name) for name in REQUIRED}
    wrong = [name for name, version in REQUIRED.items() if found[name] != version]
    if wrong:
        pins = [f"{name}=={version}" for name, version in REQUIRED.items()]
        seen = " and ".join(
            f"{name} {found[name]}" if found[name] else f"no {name}" for name in wrong
        )
        raise ImportError(
            f"sparsetir {VERSION} needs {' and '.join(pins)}, found {seen}: "
            f"run `pip install {' '.join(pins)}`"
        )
    set_thread_defaults()


def set_thread_defaults() -> None:
    """Keep TVM's CPU thread pool from spinning and from pinning its threads, unless told otherwise.

    By default each worker is bound to a core and spins while it waits. Beside another pool in the
    same process (torch, MKL) such a worker is not scheduled when its work comes, and a call that
    takes 0.1 ms waits for 2 to 3 ms. TVM reads both variables when its pool starts, so a value set
    by the user wins and a value set later has no effect.
    """
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")


def _installed(name: str) -> str | None:
    """The installed version of a distribution; None when there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
