"""Builds and installations: every way to install gives the same modules."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = [
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "NOTICE", "README.md",
    "pyproject.toml",
]  # fmt: skip
CORE = ["formats", "schedules", "sparse_ir"]
FOLDERS = ["python", *CORE]

# Lists the modules that Python finds below a package, without importing it.
LIST = """
import importlib.util, pkgutil, site, sys
site.addsitedir(sys.argv[1])
def walk(prefix, paths):
    for info in pkgutil.iter_modules(paths, prefix):
        print(info.name)
        if info.ispkg:
            leaf = info.name.rpartition(".")[2]
            walk(info.name + ".", [path + "/" + leaf for path in paths])
spec = importlib.util.find_spec("sparsetir")
print(spec.name)
walk("sparsetir.", list(spec.submodule_search_locations))
"""


def python(*args, cwd):
    """Run this interpreter away from the repository; give back what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    run = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(tree, out, kind):
    """Build `kind` (wheel, sdist, editable) of a source tree without network; its file."""
    out.mkdir()
    if kind == "editable":
        code = "import sys; from setuptools import build_meta as b; b.build_editable(sys.argv[1])"
        python("-c", code, out, cwd=tree)
    else:
        python("-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, tree, cwd=out)
    (file,) = out.iterdir()
    return file


def modules(wheel):
    """The modules in a wheel."""
    files = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    dotted = {".".join(file.with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__") for name in dotted}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what is packaged, links kept, so that building leaves nothing in the repository."""
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGED:
        shutil.copy(ROOT / name, tree / name)
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=leftovers)
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return build(tree, tmp_path_factory.mktemp("wheel") / "out", "wheel")


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    return build(tree, tmp_path_factory.mktemp("sdist") / "out", "sdist")


def test_core_is_relative_links():
    package = ROOT / "python" / "sparsetir"
    assert {path.name for path in package.iterdir() if path.is_symlink()} == set(CORE)
    for name in CORE:
        link = package / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../../{name}"


def test_wheel_holds_every_file(wheel):
    """No module is left out: a folder that lacks its __init__.py shows here."""
    package = ROOT / "python" / "sparsetir"
    files = {
        Path(folder, name).relative_to(ROOT / "python").as_posix()
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
        if name.endswith((".py", ".npz"))
    }
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    others = {"sparsetir/data/README.md", "sparsetir/py.typed"}
    assert others <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_sdist_gives_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() or member.islnk() for member in archive)
        if hasattr(tarfile, "data_filter"):  # absent before 3.10.12
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    (unpacked,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    again = build(unpacked, tmp_path / "out", "wheel")
    assert modules(again) == modules(wheel)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_editable_finds_the_same_modules(tree, wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(build(tree, tmp_path / "out", "editable")).extractall(site)
    listed = python("-S", "-c", LIST, site, cwd=tmp_path).split()
    assert set(listed) == modules(wheel)
    assert len(listed) == len(set(listed))


def test_installed_wheel_imports(wheel, tmp_path):
    """From an empty folder, the package that is imported is the one just installed."""
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    python(*pip, "--target", target, wheel, cwd=empty)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); sys.modules['torch'] = None\n"
        "import sparsetir, sparsetir.sparse_ir as core\n"
        "print(sparsetir.__file__); print(core.__file__)\n"
        "from sparsetir.cli import main; sys.stderr = sys.stdout; print(main(['bench', 'run']))"
    )
    *paths, message, status = python("-c", code, cwd=empty).splitlines()
    shown, core = map(Path, paths)
    assert "run `python -m bench` in a checkout" in message and status == "1"
    assert shown == target / "sparsetir" / "__init__.py"
    assert core.is_relative_to(target)


def interpreter(version):
    """A Python of that version with its own `venv`, from the path or from pyenv; None for none."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *versions.glob(f"{version}.*/bin/python")]
    for file in filter(None, candidates):
        if subprocess.run([file, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return file
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_other_pythons_install_the_wheel(version, wheel, tmp_path):
    """With another Python, all modules compile, and without TVM the import says what it needs."""
    file = interpreter(version)
    if file is None:
        pytest.skip(f"python{version} is not on this machine")
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    assert run([file, "-m", "venv", "venv"]).returncode == 0
    here = tmp_path / "venv" / "bin" / "python"
    done = run([here, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel])
    assert done.returncode == 0, done.stderr
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    assert run([here, "-m", "compileall", "-q", "-f", site / "sparsetir"]).returncode == 0
    failed = run([here, "-c", "import sparsetir"], env={"PATH": os.environ["PATH"]})
    assert "needs apache-tvm==" in failed.stderr and "found no apache-tvm" in failed.stderr


def test_wheel_names_the_backend_of_torch(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/entry_points.txt")]
        text = archive.read(name).decode()
    assert "[torch_dynamo_backends]\nsparsetir = sparsetir.graph.backend:backend\n" in text


@pytest.mark.slow
def test_torch_finds_the_backend_without_an_import(wheel, tmp_path):
    """A process that has not imported sparsetir; by its name, a layer gives eager's results."""
    pytest.importorskip("torch")
    target = tmp_path / "target"
    zipfile.ZipFile(wheel).extractall(target)
    program = tmp_path / "program.py"  # torch reads the text of what it compiles
    program.write_text(
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import torch, torch._dynamo\n"
        "assert 'sparsetir' in torch._dynamo.list_backends() and 'sparsetir' not in sys.modules\n"
        "def added(x, index): return torch.zeros_like(x).index_add(0, index, x[index].exp())\n"
        "x, index = torch.rand(5, 3), torch.tensor([0, 3, 3, 1])\n"
        "found = torch.compile(added, backend='sparsetir')(x, index)\n"
        "torch.testing.assert_close(found, added(x, index))\n"
        "from sparsetir.graph.operator import PROGRAMS; print(len(PROGRAMS))\n"
        "print(sys.modules['sparsetir'].__file__)"
    )
    count, file = python(program, cwd=tmp_path).splitlines()
    assert count == "1" and Path(file) == target / "sparsetir" / "__init__.py"
