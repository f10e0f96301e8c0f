"""sparsetir: a sparse tensor compiler on stock Apache TVM.

Write a function over axes, sparse buffers and sparse iterations (`from tvm.script import
sparse_tir as T`), lower it stage by stage, and call the kernel on torch, NumPy or TVM arrays.

TVM and torch are loaded when something that needs them is used for the first time.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparsetir import _imports, _versions

_versions.check()
_imports.install()

if TYPE_CHECKING:
    from sparsetir import datasets as datasets
    from sparsetir import distributed as distributed
    from sparsetir import formats as formats
    from sparsetir import graphs as graphs
    from sparsetir import masks as masks
    from sparsetir import nn as nn
    from sparsetir import ops as ops
    from sparsetir import plot as plot
    from sparsetir import schedules as schedules
    from sparsetir import sparse_ir as sparse_ir
    from sparsetir import tuning as tuning
    from sparsetir.build import build
    from sparsetir.compiled import compilations
    from sparsetir.formats.decompose import decompose_format
    from sparsetir.formats.format_part import FormatPart
    from sparsetir.formats.infer_indices import infer_format
    from sparsetir.formats.partition import check_partition
    from sparsetir.formats.preprocess import extract_preprocess
    from sparsetir.formats.rule import FormatRewriteRule
    from sparsetir.kernel import Kernel
    from sparsetir.load import load
    from sparsetir.pipeline import lower
    from sparsetir.plan import plan, plan_candidates
    from sparsetir.pool import threads
    from sparsetir.run_plan import Plan
    from sparsetir.schedules.default import default_schedule
    from sparsetir.sparse_ir.errors import (
        IllFormedError,
        LoweringError,
        ScheduleError,
        StructureError,
        StructureIndexError,
        StructureTypeError,
    )
    from sparsetir.sparse_ir.interpret import interpret
    from sparsetir.sparse_ir.lower_sparse_buffer import LowerSparseBuffer, lower_sparse_buffer
    from sparsetir.sparse_ir.lower_sparse_iter import LowerSparseIter, lower_sparse_iter
    from sparsetir.sparse_ir.nodes import (
        AttachedAxis,
        Axis,
        FusedAxis,
        PartAxis,
        SparseBuffer,
        SparseFunc,
        SparseIteration,
    )
    from sparsetir.sparse_ir.printer import module_script
    from sparsetir.sparse_ir.schedule import Schedule
    from sparsetir.sparse_ir.script.parser import from_source
    from sparsetir.sparse_ir.structure import check_structure
    from sparsetir.sparse_ir.verify import verify
    from sparsetir.sparse_tensor import SparseMatrix, SparseTensor
    from sparsetir.tuning.search import tune

__version__ = _versions.VERSION

__all__ = [
    "AttachedAxis",
    "Axis",
    "FormatPart",
    "FormatRewriteRule",
    "FusedAxis",
    "IllFormedError",
    "Kernel",
    "LowerSparseBuffer",
    "LowerSparseIter",
    "LoweringError",
    "PartAxis",
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
    "threads",
    "tune",
    "verify",
]

# Where the public names are, below this package; tests/test_start.py holds it beside what type
# checkers are told above.
_MODULES = {
    "build": "build",
    "compiled": "compilations",
    "formats.decompose": "decompose_format",
    "formats.format_part": "FormatPart",
    "formats.infer_indices": "infer_format",
    "formats.partition": "check_partition",
    "formats.preprocess": "extract_preprocess",
    "formats.rule": "FormatRewriteRule",
    "kernel": "Kernel",
    "load": "load",
    "pipeline": "lower",
    "plan": "plan plan_candidates",
    "run_plan": "Plan",
    "pool": "threads",
    "schedules.default": "default_schedule",
    "sparse_ir.errors": "IllFormedError LoweringError ScheduleError StructureError "
    "StructureIndexError StructureTypeError",
    "sparse_ir.interpret": "interpret",
    "sparse_ir.lower_sparse_buffer": "LowerSparseBuffer lower_sparse_buffer",
    "sparse_ir.lower_sparse_iter": "LowerSparseIter lower_sparse_iter",
    "sparse_ir.nodes": "AttachedAxis Axis FusedAxis PartAxis SparseBuffer SparseFunc "
    "SparseIteration",
    "sparse_ir.printer": "module_script",
    "sparse_ir.schedule": "Schedule",
    "sparse_ir.script.parser": "from_source",
    "sparse_ir.structure": "check_structure",
    "sparse_ir.verify": "verify",
    "sparse_tensor": "SparseMatrix SparseTensor",
    "tuning.search": "tune",
}
_WHERE = {name: f"sparsetir.{at}" for at, names in _MODULES.items() for name in names.split()}
# Modules that users import from.
_PACKAGES = (
    "datasets", "distributed", "formats", "graphs", "masks", "nn", "ops", "plot", "schedules",
    "sparse_ir", "tuning",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        found = getattr(import_module(_WHERE[name]), name)
        globals()[name] = found
        return found
    if name in _PACKAGES:
        return import_module(f"sparsetir.{name}")
    raise AttributeError(f"module 'sparsetir' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__", "__doc__", "__file__", "__path__"])


class _Package(ModuleType):
    """So that `sparsetir.plan` is the function, also once the module of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _WHERE:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
