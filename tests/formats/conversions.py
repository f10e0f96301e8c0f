"""Conversions run through programs: tests of formats with separate converters."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from zoo import DTYPES, values

import sparsetir
from programs import PROGRAMS, tolerance
from programs.common import scatter_sum
from sparsetir.formats import ConvertedFormat, Format, Operand, Pattern
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.partition import check_partition

Arrays = dict[str, Any]


@st.composite
def patterns(draw: Any, order: int = 2, longest: int = 20) -> Pattern:
    """Patterns of any density, some axes of length 0."""
    shape = draw(st.tuples(*[st.integers(0, longest)] * order))
    density = draw(st.sampled_from([0.0, 0.1, 0.4, 0.9, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    coords = np.nonzero(rng.random(shape) < density)
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return Pattern([c.astype(dtype) for c in coords], shape)


def check_values(conv: ConvertedFormat, dtype: str = "float32") -> Arrays:
    """Values come back bit by bit, and padding holds zeros; the arguments with them."""
    original = values(conv.pattern, dtype)
    arguments = conv.arguments(A=original)
    back = conv.restore("A", arguments)
    assert back.dtype == original.dtype and back.tobytes() == original.tobytes()
    for part in conv.parts:
        stored = arguments[conv.parameter("A", part)]
        assert stored.shape == part.shape and stored.dtype == original.dtype
        assert not stored[part.mask == 0].any()
    return arguments


def round_trip(fmt: Format, pattern: Pattern, dtypes: tuple[str, ...] = DTYPES) -> ConvertedFormat:
    """Values of every type come back as they were."""
    axes = tuple("RIJ"[-pattern.order :])
    for dtype in dtypes:
        conv = fmt.convert(pattern, Operand({"A": dtype}, axes, pattern.idtype))
        check_values(conv, dtype)
    return conv


def as_inferred(
    fmt: Format, pattern: Pattern, places: bool = True, idtype: str | None = None
) -> None:
    """The converter of a format gives what index inference does with the elements it splits."""
    axes = tuple("RIJ"[-pattern.order :])
    conv = fmt.convert(pattern, Operand({"A": "float32"}, axes, idtype or pattern.idtype))
    for part, taken in zip(conv.parts, fmt.split(pattern), strict=True):
        slow = infer_format(part.rule, [c[taken] for c in pattern.coords], pattern.shape)
        assert part.shape == slow.shape and part.stored == slow.stored == len(taken)
        assert part.indices.keys() == slow.indices.keys()
        for name, want in slow.indices.items():
            have = part.indices[name]
            assert np.asarray(have).dtype == np.asarray(want).dtype, name
            if places:
                np.testing.assert_array_equal(have, want, err_msg=name)
        np.testing.assert_array_equal(np.flatnonzero(part.places >= 0), taken)
        if places:
            np.testing.assert_array_equal(part.places[taken], slow.places)


def converted(fmt: Format, pattern: Pattern, places: bool = True) -> ConvertedFormat:
    """Each element in one part, arrays as inferred, and float32 values that round-trip."""
    check_partition(pattern.coords, fmt.split(pattern))
    as_inferred(fmt, pattern, places)
    return round_trip(fmt, pattern, ("float32",))


def spmm_arguments(pattern: Pattern, feat: int, seed: int = 0) -> Arrays:
    """Arguments of the program `spmm`; some rows of B are infinite or NaN."""
    rng = np.random.default_rng(seed)
    b = rng.standard_normal((pattern.shape[1], feat)).astype("float32")
    b[::3] = np.inf
    b[1::4] = np.nan
    index = pattern.idtype
    return {
        "a": rng.standard_normal(pattern.nnz).astype("float32"),
        "b": b,
        "c": np.full((pattern.shape[0], feat), 7, "float32"),
        "indptr": pattern.indptr.astype(index),
        "indices": pattern.coords[1].astype(index),
        "m": pattern.shape[0],
        "n": pattern.shape[1],
        "nnz": pattern.nnz,
        "feat": feat,
    }


def spmm(fmt: Format, pattern: Pattern, build: bool = False, feat: int = 2) -> Any:
    """SpMM on a pattern in a format gives what the stored elements say, and nothing else."""
    args = spmm_arguments(pattern, feat)
    with np.errstate(all="ignore"):
        terms = args["a"][:, None].astype(float) * args["b"][pattern.coords[1]]
        want = scatter_sum(args["c"].shape, pattern.coords[0], terms)
    func = PROGRAMS["spmm"].make("float32", pattern.idtype)
    kernel = run(fmt, pattern, func, args, build)
    np.testing.assert_allclose(args["c"], want, **tolerance("float32"))
    return kernel


def run(fmt: Format, pattern: Pattern, func: Any, args: Arrays, build: bool) -> Any:
    """Run a program whose operand A is of a pattern and now in a format; returns its kernel."""
    conv = fmt.convert(pattern, Operand.of(func, "A"))
    _, rest = sparsetir.extract_preprocess(conv.decompose(func))
    args = {**args, **conv.arguments(A=args["a"])}
    needed = {str(p.name): args[str(p.name)] for p in rest.params}
    sparsetir.check_structure(rest, needed)
    if not build:
        sparsetir.interpret(rest, needed)
        return None
    kernel = sparsetir.build(rest)
    kernel(**needed)
    return kernel
