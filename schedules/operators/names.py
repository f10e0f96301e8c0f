"""Names of operators, reductions and types; imports nothing, as `sparsetir --help` needs them."""

# On the elements of a matrix; softmax of each row's.
OPS = ("spmm", "spmv", "sddmm")
SOFTMAX = ("softmax", "sparse_softmax", "edge_softmax")
# That plans and searches take by their names; they take messages by those of `vocabulary`.
NAMED = (*OPS, *SOFTMAX, "attention", "rgms", "spgemm")
REDUCTIONS = ("sum", "mean", "max", "min")
DTYPES = ("float32", "float16", "bfloat16", "float64")
IDTYPES = ("int32", "int64")
