"""The PTX of CUDA text, by NVRTC: CUDA's compiler as a library, of its wheel."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "ptx"  # by hash of their CUDA
# What TVM's text needs of CUDA's C++ library, which would take 0.4 s in each.
HEADERS = {
    "cuda/std/cstdint": """
namespace cuda::std {
using int8_t = signed char; using uint8_t = unsigned char;
using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned;
using int64_t = long; using uint64_t = unsigned long;
}""",
    "cuda/std/type_traits": """
namespace cuda::std {
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <class A, class B> struct is_same { static constexpr bool value = is_same_v<A, B>; };
template <class> struct is_integral;
template <class> struct is_signed;
template <class> struct is_unsigned;
template <class> struct is_floating_point;
template <bool, class> struct enable_if;
template <bool, class, class> struct conditional;
}""",
}


class Nvrtc:
    """The library and its version; `RuntimeError` where its wheels are not installed."""

    def __init__(self) -> None:
        homes = (Path(place) / "nvidia" / "cu13" for place in sys.path)
        home = next((h for h in homes if (h / "lib" / "libnvrtc.so.13").exists()), None)
        if home is None or not (home / "include" / "cuda_fp16.h").exists():
            raise RuntimeError("no NVRTC: wheels nvidia-cuda-nvrtc and nvidia-cuda-runtime")
        self._include = home / "include"
        for builtins in (home / "lib").glob("libnvrtc-builtins.so.*"):  # NVRTC looks on paths alone
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(home / "lib" / "libnvrtc.so.13"))
        numbers = ctypes.c_int(), ctypes.c_int()
        self._call("Version", *map(ctypes.byref, numbers))
        self.version = ".".join(str(number.value) for number in numbers)

    def _call(self, name: str, *args: Any) -> bool:
        """Call a function of the library; whether it succeeded."""
        return getattr(self._library, f"nvrtc{name}")(*args) == 0

    def _text(self, name: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{name}", program, text)
        return text.value.decode()

    def ptx(self, source: str, arch: str) -> str:
        """The PTX of CUDA text; `RuntimeError` with what NVRTC says."""
        program = ctypes.c_void_p()
        self._call(
            "CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", len(HEADERS),
            _strings(HEADERS.values()), _strings(HEADERS),
        )  # fmt: skip
        options = ["-w", f"-arch={arch.replace('sm', 'compute')}", f"-I{self._include}"]
        try:
            if not self._call("CompileProgram", program, len(options), _strings(options)):
                raise RuntimeError(f"NVRTC failed:\n{self._text('ProgramLog', program)[:4000]}")
            return self._text("PTX", program)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))


def _strings(texts: Collection[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


compiler = functools.cache(Nvrtc)


def unavailable_reason() -> str:
    """Why there is no NVRTC; empty if there is."""
    try:
        compiler()
    except RuntimeError as error:
        return str(error)
    return ""


def ptx_of(source: str, arch: str) -> str:
    """The PTX of CUDA text, made once for all processes; `RuntimeError` with what NVRTC says."""
    key = "\n".join((compiler().version, *HEADERS.values(), arch, source))
    kept = FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.ptx"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / "made.ptx"
            made.write_text(compiler().ptx(source, arch))
            os.replace(made, kept)
    os.utime(kept)
    return kept.read_text()
