"""What is done around the first imports of TVM and torch, whoever makes them.

`import sparsetir` loads neither of the two. When TVM comes, it learns our dialect, so that
`from tvm.script import sparse_tir as T` works. It would import torch, which takes longer than all
else; it is told about torch when that is imported by someone who wants it.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DIALECT = "sparse_tir", "sparsetir.sparse_ir.script"
# The thread that imports TVM without torch, if any; whether TVM is to be told of torch.
_state: dict[str, Any] = {"without_torch": None, "tell": False}


def install() -> None:
    """Be there for imports from now on; may be called again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if "tvm.script" in sys.modules:
        _register()


class _Finder:
    """Puts something around the imports of the modules of `AROUND`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `sys.meta_path`."""
        around = AROUND.get(name)
        if around is None:
            return None
        if name == "torch" and _state["without_torch"] == threading.get_ident():
            raise ModuleNotFoundError("No module named 'torch'", name=name)
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(name, path, target)
            if found is not None:
                if found.loader is not None:
                    found.loader = _Loader(found.loader, around)  # type: ignore[assignment]
                return found
        return None


class _Loader:
    """A loader with something around the execution of its module."""

    def __init__(self, loader: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
        self.loader, self.around = loader, around

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `importlib.abc.Loader`."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with self.around():
            self.loader.exec_module(module)


@contextmanager
def _of_tvm() -> Iterator[None]:
    """Without torch, unless it is there, and without a look for garbage.

    What is made meanwhile are classes, which are none; to look takes a tenth of the time.
    """
    collects, hides = gc.isenabled(), _state["without_torch"] is None and "torch" not in sys.modules
    gc.disable()
    if hides:
        _state["without_torch"] = threading.get_ident()
    try:
        yield
        _state["tell"] |= hides
    finally:
        if hides:
            _state["without_torch"] = None
        if collects:
            gc.enable()


@contextmanager
def _of_script() -> Iterator[None]:
    yield
    _register()


@contextmanager
def _of_torch() -> Iterator[None]:
    """TVM gets what it would have, had torch been there before it, and kernels torch's threads.

    But for `torch.dtype` as an argument of TVM's own functions, which take names as well.
    """
    yield
    if "sparsetir.runtime.pool" in sys.modules:
        sys.modules["sparsetir.runtime.pool"].meet_torch()
    if not _state["tell"]:
        return
    _state["tell"] = False
    torch, ffi = sys.modules["torch"], sys.modules["tvm_ffi"]
    names = ("core", "_convert", "stream", "_optional_torch_c_dlpack")
    core, convert, stream, exchange = (sys.modules[f"tvm_ffi.{name}"] for name in names)
    for module in (core, convert):
        vars(module)["torch"] = torch
    importlib.reload(exchange)
    vars(ffi)["use_torch_stream"] = importlib.reload(stream).use_torch_stream
    relax = sys.modules.get("tvm.relax.base_py_module")
    if relax is not None:
        vars(relax)["to_dlpack_legacy"] = torch.utils.dlpack.to_dlpack


def _register() -> None:
    """Make our dialect known to TVMScript, as an address: it is imported when it is used."""
    vars(sys.modules["tvm.script"])["register_dialect"](*DIALECT)


AROUND: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "tvm": _of_tvm,
    "tvm_ffi": _of_tvm,
    "tvm.script": _of_script,
    "torch": _of_torch,
}
