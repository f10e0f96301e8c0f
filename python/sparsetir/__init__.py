"""sparsetir: a sparse tensor compiler on stock Apache TVM.

Write a function over axes, sparse buffers and sparse iterations (`from tvm.script import
sparse_tir as T`), lower it stage by stage, and call the kernel on torch, NumPy or TVM arrays.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsetir import _versions

_versions.check()
_versions.load()

from sparsetir.build import build  # noqa: E402
from sparsetir.formats.decompose import decompose_format  # noqa: E402
from sparsetir.formats.format_part import FormatPart  # noqa: E402
from sparsetir.formats.infer_indices import infer_format  # noqa: E402
from sparsetir.formats.partition import check_partition  # noqa: E402
from sparsetir.formats.preprocess import extract_preprocess  # noqa: E402
from sparsetir.formats.rule import FormatRewriteRule  # noqa: E402
from sparsetir.kernel import Kernel  # noqa: E402
from sparsetir.load import load  # noqa: E402
from sparsetir.lower import lower  # noqa: E402
from sparsetir.plan import Plan, compilations, plan, plan_candidates  # noqa: E402
from sparsetir.schedules.default import default_schedule  # noqa: E402
from sparsetir.sparse_ir.errors import (  # noqa: E402
    IllFormedError,
    LoweringError,
    ScheduleError,
    StructureError,
    StructureIndexError,
    StructureTypeError,
)
from sparsetir.sparse_ir.interpret import interpret  # noqa: E402
from sparsetir.sparse_ir.lower_sparse_buffer import (  # noqa: E402
    LowerSparseBuffer,
    lower_sparse_buffer,
)
from sparsetir.sparse_ir.lower_sparse_iter import LowerSparseIter, lower_sparse_iter  # noqa: E402
from sparsetir.sparse_ir.nodes import (  # noqa: E402
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
)
from sparsetir.sparse_ir.printer import module_script  # noqa: E402
from sparsetir.sparse_ir.schedule import Schedule  # noqa: E402
from sparsetir.sparse_ir.script.parser import from_source  # noqa: E402
from sparsetir.sparse_ir.structure import check_structure  # noqa: E402
from sparsetir.sparse_ir.verify import verify  # noqa: E402
from sparsetir.sparse_tensor import SparseMatrix, SparseTensor  # noqa: E402

if TYPE_CHECKING:
    from sparsetir.tuning.search import tune

__version__ = _versions.VERSION

__all__ = [
    "AttachedAxis",
    "Axis",
    "FormatRewriteRule",
    "FusedAxis",
    "PartAxis",
    "IllFormedError",
    "FormatPart",
    "Kernel",
    "LowerSparseBuffer",
    "LowerSparseIter",
    "LoweringError",
    "Plan",
    "Schedule",
    "ScheduleError",
    "SparseBuffer",
    "SparseFunc",
    "SparseIteration",
    "SparseMatrix",
    "SparseTensor",
    "StructureError",
    "StructureIndexError",
    "StructureTypeError",
    "build",
    "check_partition",
    "check_structure",
    "compilations",
    "decompose_format",
    "default_schedule",
    "extract_preprocess",
    "from_source",
    "infer_format",
    "interpret",
    "load",
    "lower",
    "lower_sparse_buffer",
    "lower_sparse_iter",
    "module_script",
    "plan",
    "plan_candidates",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Few programs tune, and not all have torch: what needs them is imported when it is wanted.
    if name == "tune":
        from sparsetir.tuning.search import tune

        return tune
    if name in ("masks", "nn", "ops"):
        return import_module(f"sparsetir.{name}")
    raise AttributeError(f"module 'sparsetir' has no attribute {name!r}")
