"""CUDA text as text of C++ that `cuda/device.h` completes.

Three things of CUDA are no C++: shared arrays, PTX, and how a kernel is called.

    __shared__ alignas(64) float S_ptr[32];
    asm volatile("cp.async.wait_group 1;" : : : "memory");

becomes

    float (&S_ptr)[32] = *(float (*)[32])cuda_shared(0, "S_ptr", sizeof(float[32]), sizeof(float));
    ptx_cp_async_wait_group<1>();

and a function `cuda_call_NAME(void** arguments)` is added for each kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_SHARED = re.compile(
    r"(extern\s+)?__shared__\s+(?:(?:alignas|__align__)\(\d+\)\s+)?"
    r"(?:volatile\s+)?([A-Za-z_][\w:]*(?:\s+[A-Za-z_]\w*)*?)\s+(\w+)\[(\d*)\];"
)
_ASM = re.compile(r"\b(?:asm|__asm__)(?:\s+(?:volatile|__volatile__))?\s*\(")
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)\s*\{'
)
_OPEN, _CLOSED = "([{", ")]}"


def to_cpp(source: str, arch: int) -> tuple[str, list[str]]:
    """The text of C++, and the names of its kernels.

    arch : 80 or 90, what `__CUDA_ARCH__` says divided by ten

    Raises `ValueError` at PTX of several statements.
    """
    kernels = {m[1]: m[2] for m in _KERNEL.finditer(source)}
    text = re.sub(r"^[ \t]*#[ \t]*include[^\n]*$", "", source, flags=re.M)
    text = _shared_arrays("".join(_without_asm(text)))
    cores = "nvcuda::" in text or "ptx_" in text
    head = f"""#define __CUDA_ARCH__ {arch * 10}
#include "{"tensor_cores" if cores else "device"}.h"
"""
    calls = "".join(_call(name, parameters) for name, parameters in kernels.items())
    return head + text + "\n" + calls, list(kernels)


def _shared_arrays(text: str) -> str:
    """Shared arrays as references to what the runtime has made."""
    numbers = iter(range(text.count("__shared__")))

    def replace(match: re.Match[str]) -> str:
        dynamic, kind, name, size = match.groups()
        if dynamic:
            return f"{kind}* {name} = ({kind}*)cuda_dynamic_shared();"
        array = f"{kind}[{size}]"
        call = f'cuda_shared({next(numbers)}, "{name}", sizeof({array}), sizeof({kind}))'
        return f"{kind} (&{name})[{size}] = *({kind} (*)[{size}]){call};"

    replaced = _SHARED.sub(replace, text)
    if "__shared__" in replaced:
        line = replaced[replaced.index("__shared__") :].split("\n")[0]
        raise ValueError(f"to_cpp: argument 'source': expected shared arrays, got {line!r}")
    return replaced


def _call(name: str, parameters: str) -> str:
    """A stand-in that unpacks a kernel's arguments."""
    kinds = [re.sub(r"\w+\s*$", "", p).replace("__restrict__", "") for p in parameters.split(",")]
    values = ", ".join(f"*({kind.strip()}*)a[{i}]" for i, kind in enumerate(kinds) if kind.strip())
    return f'extern "C" CUDA_QUIET void cuda_call_{name}(void** a) {{ {name}({values}); }}\n'


def _without_asm(text: str) -> Iterator[str]:
    """The text in pieces, PTX as calls."""
    start = 0
    while match := _ASM.search(text, start):
        end = _closing(text, match.end() - 1)
        yield text[start : match.start()]
        yield _ptx(text[match.end() : end])
        start = end + 1
    yield text[start:]


def _ptx(body: str) -> str:
    """A call for `"mnemonic %0, 1;" : "=r"(a) : "r"(b)`: results first, numbers in brackets."""
    template, *operands = _split(body, ":")
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", " ").strip()
    statement = re.fullmatch(r"([a-z][\w.:]*)\s*([^;]*);?", text)
    if not statement:
        raise ValueError(f"to_cpp: argument 'source': expected PTX of one statement, got {text!r}")
    values = []
    for operand in (o for part in operands[:2] for o in _split(part, ",") if o.strip()):
        value = re.fullmatch(r'\s*"[^"]*"\s*\((.*)\)\s*', operand, re.S)
        if not value:
            raise ValueError(
                f"to_cpp: argument 'source': expected an operand, got {operand.strip()!r}"
            )
        values.append(value[1])
    name = re.sub(r"\.L2::\w+", "", statement[1])
    numbers = re.findall(r"(?<![%\w])\d+\b", statement[2])
    brackets = f"<{', '.join(numbers)}>" if numbers else ""
    return f"ptx_{re.sub(r'[^a-z0-9]+', '_', name)}{brackets}({', '.join(values)})"


def _steps(text: str, begin: int = 0) -> Iterator[tuple[int, str, int]]:
    """Place, letter and depth of brackets after it, of all that is in no string."""
    depth, quoted, i = 0, False, begin
    while i < len(text):
        letter = text[i]
        if quoted and letter == "\\":
            i += 1
        elif letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter in _OPEN) - (letter in _CLOSED)
            yield i, letter, depth
        i += 1


def _closing(text: str, begin: int) -> int:
    """The place of the bracket that closes the one at `begin`."""
    return next(i for i, _, depth in _steps(text, begin) if depth == 0)


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are in no brackets."""
    cuts = [i for i, c, depth in _steps(text) if c == separator and depth == 0]
    bounds = [-1, *cuts, len(text)]
    return [text[a + 1 : b] for a, b in zip(bounds, bounds[1:])]
