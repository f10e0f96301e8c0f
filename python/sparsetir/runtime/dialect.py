"""Registration of our TVMScript dialect once TVM is loaded: `import sparsetir` does not load it."""

from __future__ import annotations

import sys

ADDRESS = "sparse_tir", "sparsetir.sparse_ir.script"  # the module is imported on use


def register() -> None:
    """Make `from tvm.script import sparse_tir as T` work, whichever is imported first."""
    if not _registered() and _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)


def _registered() -> bool:
    add = getattr(sys.modules.get("tvm.script"), "register_dialect", None)
    if add is not None:
        add(*ADDRESS)
    return add is not None


class _Watch:
    """A finder that finds nothing, but adds our dialect once TVM imports its own."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """See `sys.meta_path`."""
        if name.startswith("tvm.") and _Watch in sys.meta_path and _registered():
            # A new list, because the running import iterates over the old one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not _Watch]
