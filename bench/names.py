"""What the command line has to know before NumPy and others may be loaded."""

from __future__ import annotations

OPS = ("spmm", "sddmm", "spmv")
DTYPES = ("float32", "float16", "bfloat16")
MASKS = ("band", "causal band", "butterfly", "bigbird")  # of sparse attention
STUDIES = ("load-balance", "locality", "groups", "relations", "coarsen")
CONVOLUTIONS = ("gather", "torch.sparse", "dense", "mm")
