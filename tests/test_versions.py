"""The check of the TVM pair that `import sparsetir` makes first."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sparsetir import _versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TVM = "0.27.0.post1"
NEEDS = "sparsetir 0.2.0 needs apache-tvm==0.27.0.post1 and apache-tvm-ffi==0.1.14.post1"
RUN = "run `pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1`"


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Make the metadata say that these distributions, and no others, are installed."""
    versions = {name.replace("_", "-"): version for name, version in installed.items()}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def test_installed_pair_passes():
    _versions.check()


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"apache_tvm": TVM, "apache_tvm_ffi": "0.1.15.post2"}, "apache-tvm-ffi 0.1.15.post2"),
        ({"apache_tvm": "0.26.0", "apache_tvm_ffi": "0.1.14.post1"}, "apache-tvm 0.26.0"),
        ({"apache_tvm": "0.26", "apache_tvm_ffi": "0.1"}, "apache-tvm 0.26 and apache-tvm-ffi 0.1"),
        ({"apache_tvm": TVM}, "no apache-tvm-ffi"),
        ({"apache_tvm_ffi": "0.1.14.post1"}, "no apache-tvm"),
        ({}, "no apache-tvm and no apache-tvm-ffi"),
    ],
)
def test_wrong_pair_is_refused(monkeypatch, installed, found):
    pretend(monkeypatch, **installed)
    with pytest.raises(ImportError) as error:
        _versions.check()
    assert str(error.value) == f"{NEEDS}, found {found}: {RUN}"


def test_thread_defaults(monkeypatch):
    monkeypatch.delenv("TVM_BIND_THREADS", raising=False)
    monkeypatch.setenv("TVM_THREAD_POOL_SPIN_COUNT", "7")
    _versions.check()
    assert os.environ["TVM_BIND_THREADS"] == "0"
    assert os.environ["TVM_THREAD_POOL_SPIN_COUNT"] == "7"
    monkeypatch.delenv("TVM_BIND_THREADS")


def test_check_loads_no_tvm():
    """The check runs from its own file, without the package and without TVM."""
    code = (
        "import runpy, sys\n"
        f"runpy.run_path({_versions.__file__!r})['check']()\n"
        "assert not {'tvm', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_checks_first(tmp_path):
    """A package whose pair is wrong says so before it loads TVM."""
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "metadata.version = lambda name: '0.0.1'\n"
        "try:\n"
        "    import sparsetir\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "assert not {'tvm', 'tvm_ffi'} & set(sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert run.stdout.startswith(f"{NEEDS}, found apache-tvm 0.0.1 and apache-tvm-ffi 0.0.1")


def test_pins_agree():
    """pyproject.toml, constraints.txt and the check name the same versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == _versions.VERSION
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for name, version in _versions.REQUIRED.items():
        assert f"{name}=={version}" in project["dependencies"]
        assert f"{name}=={version}" in constraints
