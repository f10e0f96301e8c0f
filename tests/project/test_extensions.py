"""The core without its extensions: a copy of the package that lacks their files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparsetir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(sparsetir.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
# Modules by extension, as the contracts of imports list them.
EXTENSIONS = {
    contract["name"].removeprefix("extension: "): contract["protected_modules"]
    for contract in TOOLS["importlinter"]["contracts"]
    if contract["name"].startswith("extension: ")
}


def files_of(modules):
    """The files and folders of modules, relative to the package."""
    paths = [module.removeprefix("sparsetir.").replace(".", "/") for module in modules]
    files = [Path(path if (PACKAGE / path).is_dir() else f"{path}.py") for path in paths]
    assert [file for file in files if not (PACKAGE / file).exists()] == []
    return files


def leave_out(absent, folder, inside=Path()):
    """A package folder of links to all of it but some files and folders."""
    folder.mkdir()
    for entry in (PACKAGE / inside).iterdir():
        path = inside / entry.name
        if path in absent:
            continue
        if any(path in file.parents for file in absent):
            leave_out(absent, folder / entry.name, path)
        else:
            (folder / entry.name).symlink_to(entry.resolve())


@pytest.mark.parametrize(
    "names", [[*EXTENSIONS], *([name] for name in EXTENSIONS)], ids=["all", *EXTENSIONS]
)
@pytest.mark.default("all")
def test_the_core_does_without(names, tmp_path):
    """It builds, runs and searches; and what asks for an extension is told what is missing."""
    absent = [module for name in names for module in EXTENSIONS[name]]
    leave_out(files_of(absent), tmp_path / "sparsetir")
    paths = f"{tmp_path}{os.pathsep}{ROOT / 'tests'}"
    env = {**os.environ, "PYTHONPATH": paths, "SPARSETIR_RECORDS": ""}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("core_alone.py")), *absent],
        capture_output=True, text=True, env=env, cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers = [line.split(": ", 1) for line in run.stdout.splitlines()]
    assert {name for name, _ in answers} == EXTENSIONS.keys() - {"tile engines"}
    for name, answer in answers:
        if name not in names:
            assert answer == "open", (name, answer)
            continue
        asked, _, rest = answer.partition(": needs ")
        module, _, says = rest.partition(", ")
        assert asked and says == "which is not installed with this sparsetir", (name, answer)
        assert any(module == x or module.startswith(f"{x}.") for x in EXTENSIONS[name]), answer
