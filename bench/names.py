"""What the command line has to know before NumPy and others may be loaded."""

from __future__ import annotations

# Every library that a benchmark runs reads one of these when it is loaded.
THREADS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OPS = ("spmm", "sddmm", "spmv")
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes
MASKS = ("band", "causal band", "butterfly", "bigbird")  # of sparse attention
STUDIES = ("load-balance", "locality", "groups", "relations", "coarsen")
CONVOLUTIONS = ("gather", "torch.sparse", "dense", "mm")
