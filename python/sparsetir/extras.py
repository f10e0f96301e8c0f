"""Packages that only some functions need."""

from __future__ import annotations

from importlib import import_module

__all__ = ["WITHOUT_TORCH", "need"]

# Begins the code of a process that needs no torch, after `import sys`: TVM would import it, which
# takes longer than all else.
WITHOUT_TORCH = "sys.modules['torch'] = None; import sparsetir; del sys.modules['torch']"


def need(who: str, package: str, extra: str, title: str = "") -> None:
    """Raise ImportError, with what to install, where a package is not installed.

    extra : of sparsetir, that brings it
    title : what people call it; by default as it is imported
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{who}: needs {title or package}, which is not installed: "
            f"run `pip install 'sparsetir[{extra}]'`"
        ) from error
