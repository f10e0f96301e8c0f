"""Kernels in files: written, loaded where nothing can be compiled, refused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

import sparsetir
from kernel_common import arguments, check, kernel, linker
from programs import PROGRAMS
from refusals import refuse
from sparsetir.runtime.kernel_file import MARK
from test_build import scale

pytestmark = linker


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "spmm.so"
    kernel().export(path)
    return path


def test_loaded_kernel_runs_and_knows_its_parameters(saved):
    loaded = sparsetir.load(str(saved))
    args = arguments()
    loaded(**args)
    check(args)
    built = kernel()
    assert loaded.name == built.name == "spmm"
    assert str(loaded.target) == str(built.target)
    for what in ("names", "dtypes", "outputs", "index_arrays", "index_sizes", "inferences"):
        assert getattr(loaded.signature, what) == getattr(built.signature, what)
    assert loaded.stages == {}
    assert loaded.assumes == built.assumes and set(built.assumes) == {"l2_bytes", "threads"}
    assert repr(loaded) == repr(built)


def test_a_file_says_for_which_machine_it_was_scheduled(tmp_path, monkeypatch):
    """What this one has plays no part where it is loaded."""
    machine = {"l2_bytes": 123, "threads": 7}
    monkeypatch.setattr("sparsetir.runtime.kernel.assumed_machine", lambda target: machine)
    sparsetir.build(scale).export(tmp_path / "scale.so")
    monkeypatch.undo()
    assert sparsetir.load(tmp_path / "scale.so").assumes == machine


def test_one_function_of_a_module(tmp_path):
    functions = {n: PROGRAMS[n].make("float32", "int32") for n in ("spmm", "spmv")}
    kernels = sparsetir.build(tvm.IRModule(functions))
    kernels["spmm"].export(tmp_path / "one.so")
    args = arguments()
    sparsetir.load(tmp_path / "one.so")(**args)
    check(args)


def test_what_a_loaded_kernel_refuses(saved, tmp_path):
    loaded, args = sparsetir.load(saved), arguments()
    wrong = {**args, "indices": np.append(99, args["indices"][1:]).astype("int32")}
    refuse(
        """
        loaded(**{**args, "b": args["b"].astype("float64")})  # TypeError: 'b': expected dtype
        loaded(**wrong)  # StructureIndexError: argument 'indices'
        loaded.export(path / "a.so")  # ValueError: spmm: a loaded kernel cannot be exported again
        loaded.source()  # ValueError: spmm: a loaded kernel has no source
        kernel().export(path / "a")  # ValueError: 'path': expected a name that ends in '.so'
        kernel().export(path / "none" / "a.so")  # FileNotFoundError: 'path': there is no folder '
        """,
        globals(),
        {**locals(), "path": tmp_path},
    )
    assert not list(tmp_path.iterdir())


# -- writing ----------------------------------------------------------------------------------


def test_existing_file_is_not_lost(tmp_path):
    path = tmp_path / "mine.so"
    path.write_text("precious")
    message = r"spmm: export: argument 'path': '.*mine.so' exists; pass overwrite=True to replace"
    with pytest.raises(FileExistsError, match=message):
        kernel().export(path)
    assert path.read_text() == "precious"
    assert [p.name for p in tmp_path.iterdir()] == ["mine.so"]


def test_overwriting_leaves_loaded_kernels_as_they_are(tmp_path):
    path = tmp_path / "kernel.so"
    kernel("spmv").export(path)
    old = sparsetir.load(path)
    kernel().export(path, overwrite=True)
    new = sparsetir.load(path)
    assert (old.name, new.name) == ("spmv", "spmm")
    args = arguments()
    new(**args)
    check(args)
    program = PROGRAMS["spmv"]
    args = program.inputs(np.random.default_rng(0), "small", "float32", "int32")
    old(**args)
    np.testing.assert_allclose(args["y"], program.oracle(args)["y"], rtol=1e-5, atol=1e-6)


# -- loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "no mark at the end"),
        (b"x", "no mark at the end"),
        (MARK[:-1] + b"1", "of another version; export it again"),
        (b"not a kernel" * 99, "no mark at the end"),
        (MARK, "no sizes before the mark"),
        (b"x" * 99 + MARK, "no sizes before the mark"),
        (b"-%015d%016d" % (1, 1) + b"x" * 32 + MARK, "no sizes before the mark"),
        (b"%016d%016d" % (9, 9) + b"x" * 32 + MARK, "cut off or added to: expected 92 bytes"),
        (b"%016d%016d" % (0, 0) + b"x" * 32 + MARK, "its bytes have changed since it was written"),
    ],
)
def test_loading_something_else(tmp_path, content, why):
    path = tmp_path / "other.so"
    path.write_bytes(content)
    message = f"load: argument 'path': '.*other.so' is not a kernel exported by sparsetir: {why}"
    with pytest.raises(ValueError, match=message):
        sparsetir.load(path)


def test_loading_a_gpu_kernel(tmp_path):
    built = sparsetir.build(PROGRAMS["spmm"].make("float32", "int32"), "cuda")
    built.export(tmp_path / "gpu.so")
    if tvm.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True):
        loaded = sparsetir.load(tmp_path / "gpu.so")
        with pytest.raises(ValueError, match="expected an array on a CUDA device"):
            loaded(**arguments())
    else:
        with pytest.raises(RuntimeError, match=r"compiled for cuda, cannot be loaded here: "):
            sparsetir.load(tmp_path / "gpu.so")
