"""The sparse_tir dialect of TVMScript: `from tvm.script import sparse_tir as T`.

It extends TVM's own `T` by axes, sparse buffers and sparse iterations.
"""

import tvm.script
from tvm.tirx.script import *  # noqa: F403

from sparsetir.sparse_ir.script import axes, builder, parser
from sparsetir.sparse_ir.script.axes import *  # noqa: F403
from sparsetir.sparse_ir.script.builder import *  # noqa: F403
from sparsetir.sparse_ir.script.parser import from_source, ir_module, prim_func
from sparsetir.sparse_ir.tile_marks import at_most, tail

__all__ = ["at_most", "axes", "builder", "from_source", "ir_module", "parser", "prim_func", "tail"]

tvm.script.register_dialect("sparse_tir", __name__)
