"""Relational gather-matmul-scatter: the plain program on inputs of all kinds."""

import numpy as np
import pytest

import sparsetir
from rgms_common import arguments, exact
from sparsetir.schedules.operators.rgms import Rgms, program


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_plain_program(dtype: str, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    problem = Rgms(dtype, "int64" if weighted else "int32", weighted)
    func = program(problem)
    kernel = sparsetir.build(func)
    for relations, m, n, density in [(3, 5, 4, 0.4), (1, 1, 1, 1.0), (4, 3, 6, 0.0)]:
        mask = rng.random((relations, m, n)) < density
        args = arguments(rng, mask, 3, 5, dtype, problem.idtype, weighted)
        kernel(**args)
        np.testing.assert_allclose(
            args["out"], exact(mask, args), rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2
        )


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Rgms: argument 'dtype'"):
        Rgms("int8")
    with pytest.raises(ValueError, match="Rgms: argument 'out': expected None, 'float16' or"):
        Rgms("float16", out="float64")
    with pytest.raises(ValueError, match="'added': expected False where the result is not float32"):
        Rgms("float16", added=True)
    with pytest.raises(ValueError, match="Rgms: argument 'values': expected None, 'float32' or"):
        Rgms("float32", values="float16")
