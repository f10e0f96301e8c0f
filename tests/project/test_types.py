"""Completeness of the types of public names; `typed.py` checks what types some have."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")
PYTHON = Path(__file__).resolve().parents[2] / "python"
PUBLIC = (
    "sparsetir", "sparsetir.datasets", "sparsetir.distributed", "sparsetir.formats",
    "sparsetir.graphs", "sparsetir.masks", "sparsetir.nn", "sparsetir.ops", "sparsetir.plot",
)  # fmt: skip


def public_names():
    """The names of public objects by their modules."""
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            public = getattr(module, name)
            home = getattr(public, "__module__", None) or package
            if home.startswith("sparsetir"):
                yield f"{home}.{getattr(public, '__qualname__', name)}"


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.slow
def test_every_public_name_has_a_known_type(tmp_path):
    venv = Path(sys.prefix)
    config = {"venvPath": str(venv.parent), "venv": venv.name, "extraPaths": [str(PYTHON)]}
    config |= {"include": [str(PYTHON / "sparsetir")], "useLibraryCodeForTypes": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "pyright", "--outputjson"]
    words += ["--verifytypes", "sparsetir", "--ignoreexternal"]
    # Pyright does not see through the hook of an editable installation.
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(PYTHON), "PATH": path}
    run = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    symbols = json.loads(run.stdout)["typeCompleteness"]["symbols"]
    public = set(public_names())
    assert len(public) > 100
    unknown, roots = {}, set()
    for symbol in symbols:
        name = symbol["name"]
        root = next((p for p in public if name == p or name.startswith(f"{p}.")), None)
        if root is None or is_private(name[len(root) :]):
            continue
        roots.add(root)
        if not symbol["isTypeKnown"] or symbol.get("isTypeAmbiguous"):
            unknown[name] = [d["message"] for d in symbol["diagnostics"]]
    assert unknown == {}
    assert len(roots) > 0.9 * len(public)  # others are constants, or inherited
