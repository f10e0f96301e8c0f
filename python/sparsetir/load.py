"""Exported kernels, loaded where nothing can be compiled."""

from __future__ import annotations

from pathlib import Path

import tvm

from sparsetir.kernel import Kernel
from sparsetir.kernel_file import open_library, read_description
from sparsetir.signature import PlainSignature, Signature
from sparsetir.sparse_ir.computed import RECIPES
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["load"]


def load(path: str | Path, *, check: bool = True) -> Kernel:
    """Load a kernel that :meth:`Kernel.export` wrote; needs no compiler.

    check : as in :func:`sparsetir.build`

    Raises FileNotFoundError, ValueError for a file that is not an exported kernel, or whose
    computed parameters take recipes that this version does not have, RuntimeError for one that
    cannot run here, such as a GPU's where there is no driver.
    """
    path = Path(path).resolve()
    try:
        meta = read_description(path)
        source = tvm.ir.load_json(meta["signature"])
        target = tvm.target.Target(meta["target"])
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"load: argument 'path': '{path}' is not a kernel exported by sparsetir"
        ) from error
    signature = Signature(source) if isinstance(source, SparseFunc) else PlainSignature(source)
    for name, how in signature.computed.items():
        if how["recipe"] not in RECIPES:
            raise ValueError(
                f"load: argument 'path': '{path}': computed parameter '{name}' takes the recipe "
                f"'{how['recipe']}', which this version does not have; there are {sorted(RECIPES)}"
            )
    try:
        module = open_library(path)
    except Exception as error:
        raise RuntimeError(
            f"load: argument 'path': '{path}', compiled for {target.kind.name}, cannot be loaded "
            f"here: {error}"
        ) from error
    return Kernel(module, meta["name"], signature, {}, target, check=check)
