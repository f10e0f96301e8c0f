"""Packages that only some functions need."""

from __future__ import annotations

from importlib import import_module

__all__ = ["need"]


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
