"""Our dialect of TVMScript, made known when TVM is there: `import sparsetir` does not load TVM."""

from __future__ import annotations

import sys

ADDRESS = "sparse_tir", "sparsetir.sparse_ir.script"  # which is imported when it is used


def register() -> None:
    """So that `from tvm.script import sparse_tir as T` works, whatever is imported first."""
    if not _registered() and _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)


def _registered() -> bool:
    add = getattr(sys.modules.get("tvm.script"), "register_dialect", None)
    if add is not None:
        add(*ADDRESS)
    return add is not None


class _Watch:
    """Finds no module. TVM imports its own dialects behind `tvm.script`, and then ours is added."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """See `sys.meta_path`."""
        if name.startswith("tvm.") and _Watch in sys.meta_path and _registered():
            # A new list: the import that asks goes through the one there was.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not _Watch]
