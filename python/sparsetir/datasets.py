"""The graph that ships with the package, for demonstrations and first steps."""

from __future__ import annotations

from importlib import resources

import numpy as np
from scipy.sparse import csr_array

__all__ = ["load_cora"]


def load_cora() -> csr_array:
    """The Cora citation graph: (2708, 2708), 10556 ones in float32, int32 sorted indices.

    Origin, licence and what else the file holds: `data/README.md` of this package.
    """
    file = resources.files("sparsetir") / "data" / "cora.npz"
    with resources.as_file(file) as path, np.load(path) as arrays:
        indptr, indices = arrays["indptr"], arrays["indices"]
        shape = tuple(int(n) for n in arrays["shape"])
    return csr_array((np.ones(len(indices), np.float32), indices, indptr), shape=shape)
