"""Kernels in files: written, loaded, refused; damaged, forged, changed while in use; full disks.

What would end a process is run in one of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import sys

import numpy as np
import pytest
import tvm

import sparsetir
from kernel_common import arguments, kernel, linker, right
from programs import PROGRAMS
from refusals import refuse
from runtime.test_build import scale
from sparsetir.runtime import file_errors, kernel_file
from sparsetir.runtime.kernel_file import MARK, TRAILER, read_library

pytestmark = linker


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "spmm.so"
    kernel().export(path)
    return path


def test_loaded_kernel_runs_and_knows_its_parameters(saved):
    loaded = sparsetir.load(str(saved))
    right(loaded)
    built = kernel()
    assert loaded.name == built.name == "spmm"
    assert str(loaded.target) == str(built.target)
    for field in ("names", "dtypes", "outputs", "index_arrays", "index_sizes", "inferences"):
        assert getattr(loaded.signature, field) == getattr(built.signature, field)
    assert loaded.stages == {}
    assert loaded.assumes == built.assumes and set(built.assumes) == {"l2_bytes", "threads"}
    assert repr(loaded) == repr(built)


def test_a_file_says_for_which_machine_it_was_scheduled(tmp_path, monkeypatch):
    """The machine where a kernel is loaded counts, not this one."""
    machine = {"l2_bytes": 123, "threads": 7}
    monkeypatch.setattr("sparsetir.runtime.kernel.assumed_machine", lambda target: machine)
    sparsetir.build(scale).export(tmp_path / "scale.so")
    monkeypatch.undo()
    assert sparsetir.load(tmp_path / "scale.so").assumes == machine


def test_one_function_of_a_module(tmp_path):
    functions = {n: PROGRAMS[n].make("float32", "int32") for n in ("spmm", "spmv")}
    kernels = sparsetir.build(tvm.IRModule(functions))
    kernels["spmm"].export(tmp_path / "one.so")
    right(sparsetir.load(tmp_path / "one.so"))


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


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "gone")
    with pytest.raises(RuntimeError, match="export: expected a C compiler on PATH.* got gone"):
        kernel().export(tmp_path / "spmm.so")
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="it links the library; got none"):
        kernel().export(tmp_path / "spmm.so")


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
    right(new)
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


# -- damage and malice ----------------------------------------------------------------------------


def test_no_bit_may_differ(saved, tmp_path):
    """Bits in the first bytes, in the last ones and anywhere; and no byte may be missing."""
    whole, path = saved.read_bytes(), tmp_path / "a.so"
    rng = np.random.default_rng(0)
    places = [*range(0, 64, 7), *range(len(whole) - TRAILER, len(whole))]
    for place in (*places, *rng.integers(0, len(whole), 30)):
        data = bytearray(whole)
        data[place] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a.so' is not a kernel exported by sparsetir: "):
            sparsetir.load(path)
    # Also where the tail is there: a loader that maps a library that is cut off ends the process.
    tail = whole[int(whole[-TRAILER:][:16]) :]
    for size in (*range(9), *rng.integers(0, len(whole) - len(tail), 20)):
        for data in (whole[:size], whole[:size] + tail):
            path.write_bytes(data)
            with pytest.raises(ValueError, match=r"a.so' is not a kernel exported by sparsetir: "):
                sparsetir.load(path)


def forge(path, library, description):
    """A file whose hash is right."""
    body = library + description
    sizes = b"%016d%016d" % (len(library), len(description))
    path.write_bytes(body + sizes + hashlib.sha256(body).digest() + MARK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"needs": x}, "no list of texts 'needs'") for x in ("avx2", [1, 2], {"x": 1}, 7)),
        *(({"assumes": x}, "no numbers by name in 'assumes'")
          for x in (None, 7, ["threads"], {"threads": "2"})),
        ({"name": None}, "its description has no text 'name'"),
        ({"name": "other"}, "a.so': its library has no function 'other'"),
        ({"signature": "[]"}, "is not a kernel exported by sparsetir: ."),
        ({"signature": tvm.ir.save_json(tvm.tirx.const(1, "int32"))}, "its signature is no functi"),
        ({"target": "no such"}, "is not a kernel exported by sparsetir: ."),
        (None, "is not a kernel exported by sparsetir: maximum recurs"),
    ],
    ids=str,
)  # fmt: skip
def test_forged_descriptions(saved, tmp_path, changes, message):
    """Without changes one of many brackets."""
    library, found = read_library(saved)
    text = b"[" * 10**5 if changes is None else json.dumps({**found, **changes}).encode()
    forge(tmp_path / "a.so", library, text)
    with pytest.raises(ValueError, match=message):
        sparsetir.load(tmp_path / "a.so")


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of ELF")
def test_libraries_of_another_processor(saved, tmp_path):
    library, facts = read_library(saved)
    other = bytearray(library)
    other[18] ^= 0xFF
    forge(tmp_path / "a.so", bytes(other), json.dumps(facts).encode())
    with pytest.raises(RuntimeError, match="cannot be loaded here: it is for another kind of proc"):
        sparsetir.load(tmp_path / "a.so")
    # Of another name: a library that is mapped may not be cut off.
    forge(tmp_path / "b.so", b"no library", json.dumps(facts).encode())
    with pytest.raises(RuntimeError, match=r"load: argument 'path': .* cannot be loaded here"):
        sparsetir.load(tmp_path / "b.so")


def test_files_that_are_written_into_while_loaded(saved, tmp_path):
    """Overwriting as by `cp` would end the process, or a fork, or change the kernel's results."""
    path, whole = tmp_path / "a.so", saved.read_bytes()
    path.write_bytes(whole)
    loaded = sparsetir.load(path)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            for change in (b"\xcc" * len(whole), b"", whole):
                with open(path, "wb") as file:  # not another file of the same name
                    file.write(change)
                right(loaded)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_deleted_and_loaded_again(saved, tmp_path):
    path = tmp_path / "a.so"
    path.write_bytes(saved.read_bytes())
    first, second = sparsetir.load(path), sparsetir.load(path)
    path.unlink()
    right(first)
    del first
    right(second)


def test_what_is_no_file(tmp_path, monkeypatch):
    (tmp_path / "a.so").mkdir()
    os.mkfifo(tmp_path / "b.so")
    (tmp_path / "c.so").symlink_to("/dev/zero")
    (tmp_path / "d.so").symlink_to(tmp_path / "d.so")
    for name in "abcd":
        text = re.escape(f"load: argument 'path': expected a file, got '{tmp_path / name}.so'")
        with pytest.raises(FileNotFoundError, match=text):
            sparsetir.load(tmp_path / f"{name}.so")
    for wrong in (None, 5, b"a.so"):
        with pytest.raises(TypeError, match="^load: argument 'path': expected a path, got "):
            sparsetir.load(wrong)
        with pytest.raises(TypeError, match="^spmm: export: argument 'path': expected a path"):
            kernel().export(wrong)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/none.so")):
        sparsetir.load("~/none.so")


def test_no_room_for_a_file(tmp_path):
    """LLVM would end the process; nothing is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="a.so' cannot be written: File too large") as raised:
            kernel().export(tmp_path / "a.so")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


def test_folders_that_are_not_ours(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(file_errors.tempfile, "TemporaryDirectory", refuse)
    text = "spmm: export: argument 'path': '.*a.so' cannot be written: Permission denied"
    with pytest.raises(PermissionError, match=text):
        kernel().export(tmp_path / "a.so")


def test_two_that_write_at_once(tmp_path, monkeypatch):
    """Without `overwrite` the second does not replace what the first has written meanwhile."""
    path, built = tmp_path / "a.so", kernel()
    exported = kernel_file.hashlib.sha256
    monkeypatch.setattr(
        kernel_file.hashlib, "sha256", lambda data: path.write_bytes(b"first") and exported(data)
    )
    with pytest.raises(FileExistsError, match="a.so' cannot be written: File exists"):
        built.export(path)
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["a.so"]
