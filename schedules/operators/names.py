"""Names of operators, reductions and types; imports nothing, as `sparsetir --help` needs them."""

OPS = ("spmm", "spmv", "sddmm")
REDUCTIONS = ("sum", "mean", "max", "min")
DTYPES = ("float32", "float16", "bfloat16", "float64")
IDTYPES = ("int32", "int64")
