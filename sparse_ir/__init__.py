"""The floor: stage-I nodes, script dialect, printer, verifier, interpreter and lowerings."""

import tvm.script

tvm.script.register_dialect("sparse_tir", "sparsetir.sparse_ir.script")
