"""References to schedules and plug-ins that other processes can import."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

EXPECTED = "expected a function (sch, config) at the top level of a file, which workers can import"
PREFIX = "sparsetir_file_"  # prefix of modules loaded from such files
# Names or files of modules that are being imported for their definitions.
_loading: list[str] = []


@dataclass(frozen=True)
class ScheduleRef:
    """A reference to a function at the top level of a file.

    module : the module to import; "" for a script, or a file outside the path
    file : its path; name : of the function in it
    """

    module: str
    file: str
    name: str

    @staticmethod
    def of(schedule: Callable[..., object]) -> ScheduleRef:
        """Make the reference to a function; ValueError, TypeError if workers cannot import it."""
        caller = "tune: argument 'schedule'"
        if not callable(schedule):
            raise TypeError(f"{caller}: {EXPECTED}, got {type(schedule).__name__}")
        name = getattr(schedule, "__qualname__", None)
        code = getattr(schedule, "__code__", None)
        if name is None or code is None:
            raise TypeError(f"{caller}: {EXPECTED}, got an object of {type(schedule).__name__}")
        if "<lambda>" in name:
            raise ValueError(f"{caller}: {EXPECTED}, got a lambda")
        if "." in name:
            raise ValueError(f"{caller}: {EXPECTED}, got '{name}', which is defined inside another")
        file = Path(code.co_filename)
        if not file.is_file():
            raise ValueError(f"{caller}: {EXPECTED}, got '{name}' of {file}, which is not a file")
        module = str(schedule.__module__)
        return ScheduleRef(
            module if _is_importable(module, file) else "", str(file.resolve()), name
        )

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module = importlib.import_module(self.module) if self.module else load_file(self.file)
        return getattr(module, self.name)

    def digest(self) -> str:
        """A hash of the function's name and its file's text, which identifies the schedule."""
        text = Path(self.file).read_bytes()
        return hashlib.blake2b(f"{self.name}\n".encode() + text, digest_size=16).hexdigest()


def module_ref(what: str, module: ModuleType) -> str:
    """The name of a module, or the path of its file, for :func:`load_module`.

    what : the name that it registers, for the ValueError if other processes cannot import it
    """
    spec, file = module.__spec__, getattr(module, "__file__", None)
    name = module.__name__ if spec is None else spec.name  # under `python -m` the real name
    if file is None or not Path(file).is_file():
        if name != "__main__":
            return name
        raise ValueError(
            f"tune: '{what}': expected to be registered in a file, which workers import, got a "
            "notebook or a prompt; put it into a module, and import that"
        )
    return name if _is_importable(name, Path(file)) else str(Path(file).resolve())


def load_module(ref: str) -> ModuleType:
    """Import a module by a result of :func:`module_ref`, or by its name."""
    _loading.append(ref)
    try:
        return load_file(ref) if os.path.isabs(ref) else importlib.import_module(ref)
    finally:
        _loading.remove(ref)


def importing() -> bool:
    """Whether a file is being imported for its definitions, and must not start any work."""
    return bool(_loading)


def load_file(file: Path | str) -> ModuleType:
    """Run a Python file as a module; raises its errors."""
    file = Path(file)
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()
    name = f"{PREFIX}{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"expected a Python file, got '{file}'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Python looks for the source of its functions
    _loading.append(name)
    try:
        spec.loader.exec_module(module)
    finally:
        _loading.remove(name)
    return module


def _is_importable(module: str, file: Path) -> bool:
    """Whether another process that imports a module by name gets this file."""
    if module == "__main__" or module.startswith(PREFIX):
        return False
    parent = sys.modules.get(module.rpartition(".")[0])
    # Not `importlib.util.find_spec`, which returns loaded modules, however they were loaded.
    path = getattr(parent, "__path__", None)
    specs = (finder.find_spec(module, path) for finder in sys.meta_path)
    origin = next((spec.origin for spec in specs if spec is not None), None)
    return origin is not None and Path(origin).is_file() and Path(origin).samefile(file)
