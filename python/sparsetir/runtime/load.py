"""Loading of exported kernels, without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm

import sparsetir.runtime.launch_limits  # noqa: F401 - which kernels for GPUs call
from sparsetir.runtime.file_errors import as_path, first_line
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.kernel_file import open_library, read_library
from sparsetir.runtime.signature import Signature
from sparsetir.schedules.targets import missing_features
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.recipes.registry import RECIPES


def load(path: str | Path, *, check: bool = True) -> Kernel:
    """Load a kernel that :meth:`Kernel.export` wrote; needs no compiler.

    This runs code from the file, as importing a module does: load only files that you trust. It is
    checked that the file is intact, not who wrote it.

    Parameters
    ----------
    path : str or Path
        The shared library.
    check : bool
        The same as for :func:`sparsetir.build`.

    Returns
    -------
    Kernel
        The kernel, from a copy: the file may then be changed or deleted.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        For a file that is not an exported kernel, is truncated or was changed, or whose computed
        parameters use recipes that are not registered.
    RuntimeError
        For a kernel that cannot run here, such as a GPU's without a driver, or one that uses
        instructions which this CPU lacks.
    """
    path = as_path("load", "path", path)
    caller = f"load: argument 'path': '{path}'"
    if not path.is_file():
        raise FileNotFoundError(f"load: argument 'path': expected a file, got '{path}'")
    try:
        library, meta = read_library(path)
        name, signature, target = described(meta)
    except OSError:
        raise
    except Exception as error:  # TVM raises many types
        raise ValueError(
            f"{caller} is not a kernel exported by sparsetir: {first_line(error)}"
        ) from error
    for parameter, how in signature.computed.items():
        if how["recipe"] not in RECIPES:
            raise ValueError(
                f"{caller}: computed parameter '{parameter}' takes the recipe '{how['recipe']}', "
                "which this version does not have: import the module that registers it before; "
                f"there are {sorted(RECIPES)}"
            )
    missing = missing_features(target)
    if missing:
        raise RuntimeError(
            f"{caller}: compiled for a CPU with {', '.join(missing)}, which this one lacks; export "
            "a kernel that was built for this one"
        )
    try:
        module = open_library(library)
    except Exception as error:
        raise RuntimeError(
            f"{caller}, compiled for {target.kind.name}, cannot be loaded here: {first_line(error)}"
        ) from error
    try:
        return Kernel(
            module, name, signature, {}, target, check=check, needs=meta.get("needs"),
            assumes=meta.get("assumes", {}),
        )  # fmt: skip
    except AttributeError as error:
        raise ValueError(f"{caller}: its library has no function '{name}'") from error


def described(meta: dict[str, Any]) -> tuple[str, Signature, tvm.target.Target]:
    """Name, signature and target from a description; raises if it is invalid."""
    for field in ("name", "signature", "target"):
        if not isinstance(meta.get(field), str):
            raise ValueError(f"its description has no text '{field}'")
    needs = meta.get("needs")
    if needs is not None and not (
        isinstance(needs, list) and all(isinstance(name, str) for name in needs)
    ):
        raise ValueError("its description has no list of texts 'needs'")
    assumes = meta.get("assumes", {})  # missing in older files
    if not isinstance(assumes, dict) or not all(type(n) is int for n in assumes.values()):
        raise ValueError("its description has no numbers by name in 'assumes'")
    source = tvm.ir.load_json(meta["signature"])
    if not isinstance(source, SparseFunc | tvm.tirx.PrimFunc):
        raise ValueError(f"its signature is not a function, but {type(source).__name__}")
    return meta["name"], Signature(source), tvm.target.Target(meta["target"])
