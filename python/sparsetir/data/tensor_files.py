"""Files of `torch.save` read without torch: no code in them runs, and they are taken at no word.

    path.pt, since torch 1.6                     path.pt, before
    +------------------------------------+       +------------------------------------+
    | zip, nothing in it compressed      |       | three pickles: a magic number, the |
    |   <root>/data.pkl    the objects   |       |   version, facts of the machine    |
    |   <root>/byteorder   little or big |       | a pickle of the objects            |
    |   <root>/data/<key>  each storage  |       | a pickle of the storages' keys     |
    +------------------------------------+       | each storage: its length, its data |
                                                 +------------------------------------+

In the objects, a tensor is a call of `torch._utils._rebuild_tensor_v2` on a persistent name of its
storage, an offset, a shape and strides.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sparsetir.data.plain_pickle import Named, PickleError, read_pickle

MAGIC = 0x1950A86A20F9469CFC6C
MOST_DIMENSIONS = 64  # of NumPy's arrays
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}  # fmt: skip
NUMBERS = {*STORAGES.values(), "uint16", "uint32", "uint64"}
REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}


@dataclass(frozen=True)
class _Storage:
    """What a persistent name says of a storage."""

    key: str
    dtype: str


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file; what it says of itself is checked when it is read.

    read : gives the bytes of a storage
    most : elements that a tensor in this file may have
    """

    storage: _Storage
    dtype: str
    offset: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    plain: bool
    read: Callable[[str], np.ndarray]
    most: int

    def numpy(self) -> np.ndarray:
        """The numbers, read-only; raises PickleError where the file does not hold them."""
        if not self.plain:
            raise PickleError("it has a tensor with the negative or conjugate bit")
        about = (self.offset, *self.shape, *self.strides)
        sound = len(self.strides) == len(self.shape) <= MOST_DIMENSIONS
        if not sound or not all(type(n) is int and 0 <= n < 2**63 for n in about):
            raise PickleError(f"it has a tensor of shape {_short(self.shape)}")
        kind = _kind(self.dtype)
        data = self.read(self.storage.key)
        stored, size = len(data) // kind.itemsize, math.prod(self.shape)
        if size == 0:
            return np.empty(self.shape, kind)
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        # With strides of 0 a tensor repeats what is stored, but not a whole file's worth of it.
        if self.offset + last >= stored or size > self.most:
            raise PickleError(
                f"it has a tensor of shape {_short(self.shape)} in a storage of {stored} elements"
            )
        elements = data[: stored * kind.itemsize].view(kind)[self.offset :]
        steps = [step * kind.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(elements, self.shape, steps, writeable=False)


def read_tensors(path: Path) -> Any:
    """The objects of a file: containers, :class:`StoredTensor` and what :func:`read_pickle` makes.

    Raises PickleError, zipfile.BadZipFile and EOFError for a file that is damaged or another kind.
    """
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    return _Zipped(path).objects() if zipped else _Legacy(path).objects()


class _File:
    """What both layouts have in common.

    size : of the file in bytes
    dtypes : of the storages, by key, as the objects name them
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.dtypes: dict[str, str] = {}

    def storage(self, key: str) -> np.ndarray:
        """(bytes,) uint8 of a storage."""
        raise NotImplementedError

    def stored(self, name: Any) -> _Storage:
        """What a persistent name stands for: ("storage", class, key, device, length, ...)."""
        said: list[Any] = list(name) if isinstance(name, tuple) else []
        if len(said) < 5 or said[0] != "storage":
            raise PickleError("it names what is no storage of a tensor")
        _, kind, key, _, _, *views = said
        if not isinstance(kind, Named) or not isinstance(key, str):
            raise PickleError("it names what is no storage of a tensor")
        if kind.name not in STORAGES or any(part is not None for part in views):
            raise PickleError(f"it has a storage that is not read here: {kind.name[:40]}")
        dtype = STORAGES[kind.name]
        if self.dtypes.setdefault(key, dtype) != dtype:
            raise PickleError("it has one storage of two types")
        return _Storage(key, dtype)

    def made(self, by: Named, args: tuple[Any, ...]) -> Any:
        """The tensor that a call stands for; None for what is none."""
        if by.module != "torch._utils":
            return None
        if by.name.startswith("_rebuild_parameter") and args:
            return args[0]
        if by.name not in REBUILD or len(args) < 4 or not isinstance(args[0], _Storage):
            return None
        storage, offset, shape, strides = args[:4]
        more: list[Any] = list(args[4:])
        if not isinstance(shape, tuple) or not isinstance(strides, tuple):
            return None
        dtype, bits = storage.dtype, more[2:]  # behind requires_grad and hooks
        if by.name == "_rebuild_tensor_v3":  # which has a dtype of its own
            named, *bits = bits or [None]
            if not isinstance(named, Named) or named.module != "torch":
                return None
            if named.name not in NUMBERS:
                return None
            dtype = named.name
        plain = not any(bits)
        return StoredTensor(storage, dtype, offset, shape, strides, plain, self.storage, self.size)


class _Zipped(_File):
    """Since torch 1.6."""

    def objects(self) -> Any:
        """Those of the file."""
        with zipfile.ZipFile(self.path) as archive:
            found = [n for n in archive.namelist() if n.count("/") == 1 and n.endswith("/data.pkl")]
            if len(found) != 1:
                raise PickleError("it is a zip file without the objects of torch.save")
            self.root = found[0].partition("/")[0]
            if f"{self.root}/byteorder" in archive.namelist():
                if self._read(archive, f"{self.root}/byteorder") != b"little":
                    raise PickleError("it was written on a big-endian machine")
            data = self._read(archive, found[0])
        return read_pickle(io.BytesIO(data), self.made, self.stored)

    def storage(self, key: str) -> np.ndarray:
        with zipfile.ZipFile(self.path) as archive:
            name = f"{self.root}/data/{key}"
            if name not in archive.namelist():
                raise PickleError(f"it lacks the storage {key[:40]}")
            return np.frombuffer(self._read(archive, name), np.uint8)

    def _read(self, archive: zipfile.ZipFile, name: str) -> bytes:
        """An entry; not one that unpacks to more than the file has."""
        entry = archive.getinfo(name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > self.size:
            raise PickleError("it has compressed entries, which torch.save does not write")
        return archive.read(entry)


class _Legacy(_File):
    """Before torch 1.6, and by `_use_new_zipfile_serialization=False`."""

    def objects(self) -> Any:
        """Those of the file."""
        self._data = self.path.read_bytes()
        file = io.BytesIO(self._data)
        if read_pickle(file) != MAGIC:
            raise PickleError("it does not begin as files of torch.save do")
        read_pickle(file)
        facts = read_pickle(file)
        if not isinstance(facts, dict) or facts.get("little_endian") is not True:
            raise PickleError("it was written on a big-endian machine")
        found = read_pickle(file, self.made, self.stored)
        keys = read_pickle(file)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise PickleError("it has no list of storages")
        at, self._places = file.tell(), dict[str, tuple[int, int]]()
        for key in keys:
            if key not in self.dtypes:
                raise PickleError("it lists a storage that nothing has")
            begin = at + 8
            count = int.from_bytes(self._data[at:begin], "little", signed=True)
            at = begin + count * _kind(self.dtypes[key]).itemsize
            if count < 0 or at > self.size:
                raise EOFError("it ends within a storage")
            self._places[key] = begin, at
        return found

    def storage(self, key: str) -> np.ndarray:
        if key not in self._places:
            raise PickleError(f"it lacks the storage {key[:40]}")
        begin, end = self._places[key]
        return np.frombuffer(self._data, np.uint8, end - begin, begin)


def _kind(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
