"""sparsetir: a sparse tensor compiler on stock Apache TVM.

Write a function over axes, sparse buffers and sparse iterations (`from tvm.script import
sparse_tir as T`), lower it stage by stage, and call the kernel on torch, NumPy or TVM arrays.

TVM, which imports torch if that is installed, is loaded when something that needs it is first used.
"""

from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsetir import _versions
from sparsetir.data import hooks
from sparsetir.extras import need
from sparsetir.runtime import dialect

_versions.check()
dialect.register()

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
    from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
    from sparsetir.expressions.einsum import einsum, expression
    from sparsetir.expressions.execution import ExpressionPlan as ExpressionPlan
    from sparsetir.expressions.explain import explain
    from sparsetir.formats.decompose import decompose_format
    from sparsetir.formats.format_part import FormatPart as FormatPart
    from sparsetir.formats.infer_indices import infer_format as infer_format
    from sparsetir.formats.partition import check_partition as check_partition
    from sparsetir.formats.preprocess import extract_preprocess as extract_preprocess
    from sparsetir.formats.rule import FormatRewriteRule
    from sparsetir.graph.export import export
    from sparsetir.planning.plan import plan
    from sparsetir.planning.plan import plan_candidates as plan_candidates
    from sparsetir.planning.run_plan import Plan
    from sparsetir.planning.run_plan import compilations as compilations
    from sparsetir.planning.sparse_plan import RowTablesPlan as RowTablesPlan
    from sparsetir.planning.sparse_plan import SparsePlan as SparsePlan
    from sparsetir.planning.sparse_plan import ValuesPlan as ValuesPlan
    from sparsetir.runtime.assembled_levels import build_assembled
    from sparsetir.runtime.build import build
    from sparsetir.runtime.interpreted import interpret
    from sparsetir.runtime.kernel import Kernel
    from sparsetir.runtime.load import load
    from sparsetir.runtime.pipeline import lower
    from sparsetir.runtime.pool import threads
    from sparsetir.schedules.default import default_schedule
    from sparsetir.schedules.gpu.horizontal_fuse import horizontal_fuse
    from sparsetir.sparse_ir.errors import IllFormedError as IllFormedError
    from sparsetir.sparse_ir.errors import LoweringError as LoweringError
    from sparsetir.sparse_ir.errors import ScheduleError as ScheduleError
    from sparsetir.sparse_ir.errors import StructureError as StructureError
    from sparsetir.sparse_ir.errors import StructureIndexError as StructureIndexError
    from sparsetir.sparse_ir.errors import StructureTypeError as StructureTypeError
    from sparsetir.sparse_ir.gradient import gradient
    from sparsetir.sparse_ir.lower_sparse_buffer import LowerSparseBuffer as LowerSparseBuffer
    from sparsetir.sparse_ir.lower_sparse_buffer import lower_sparse_buffer
    from sparsetir.sparse_ir.lower_sparse_iter import LowerSparseIter as LowerSparseIter
    from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
    from sparsetir.sparse_ir.nodes import AttachedAxis as AttachedAxis
    from sparsetir.sparse_ir.nodes import Axis as Axis
    from sparsetir.sparse_ir.nodes import FusedAxis as FusedAxis
    from sparsetir.sparse_ir.nodes import PartAxis as PartAxis
    from sparsetir.sparse_ir.nodes import SparseBuffer as SparseBuffer
    from sparsetir.sparse_ir.nodes import SparseFunc as SparseFunc
    from sparsetir.sparse_ir.nodes import SparseIteration as SparseIteration
    from sparsetir.sparse_ir.printer import module_script as module_script
    from sparsetir.sparse_ir.schedule import Schedule
    from sparsetir.sparse_ir.script.parser import from_source as from_source
    from sparsetir.sparse_ir.structure import check_structure as check_structure
    from sparsetir.sparse_ir.verify import verify as verify
    from sparsetir.tuning.search import tune

__version__ = _versions.VERSION

__all__ = [
    "FormatRewriteRule",
    "Kernel",
    "Plan",
    "Schedule",
    "SparseMatrix",
    "SparseTensor",
    "build",
    "build_assembled",
    "decompose_format",
    "default_schedule",
    "einsum",
    "explain",
    "export",
    "expression",
    "gradient",
    "horizontal_fuse",
    "interpret",
    "load",
    "lower",
    "lower_sparse_buffer",
    "lower_sparse_iter",
    "plan",
    "threads",
    "tune",
]

# The modules of public names, below this package; tests/project/test_start.py compares them with
# the imports for type checkers above. Names that are not in `__all__` are the compiler's, which are
# imported from `sparsetir.sparse_ir` and `sparsetir.formats`, or serve tools.
_MODULES = {
    "data.sparse_tensor": "SparseMatrix SparseTensor",
    "expressions.einsum": "einsum expression",
    "expressions.execution": "ExpressionPlan",
    "expressions.explain": "explain",
    "formats.decompose": "decompose_format",
    "formats.format_part": "FormatPart",
    "formats.infer_indices": "infer_format",
    "formats.partition": "check_partition",
    "formats.preprocess": "extract_preprocess",
    "formats.rule": "FormatRewriteRule",
    "graph.export": "export",
    "planning.plan": "plan plan_candidates",
    "planning.run_plan": "Plan compilations",
    "planning.sparse_plan": "RowTablesPlan SparsePlan ValuesPlan",
    "runtime.assembled_levels": "build_assembled",
    "runtime.build": "build",
    "runtime.interpreted": "interpret",
    "runtime.kernel": "Kernel",
    "runtime.load": "load",
    "runtime.pipeline": "lower",
    "runtime.pool": "threads",
    "schedules.default": "default_schedule",
    "schedules.gpu.horizontal_fuse": "horizontal_fuse",
    "sparse_ir.errors": "IllFormedError LoweringError ScheduleError StructureError "
    "StructureIndexError StructureTypeError",
    "sparse_ir.gradient": "gradient",
    "sparse_ir.lower_sparse_buffer": "LowerSparseBuffer lower_sparse_buffer",
    "sparse_ir.lower_sparse_iter": "LowerSparseIter lower_sparse_iter",
    "sparse_ir.nodes": "AttachedAxis Axis FusedAxis PartAxis SparseBuffer SparseFunc "
    "SparseIteration",
    "sparse_ir.printer": "module_script",
    "sparse_ir.schedule": "Schedule",
    "sparse_ir.script.parser": "from_source",
    "sparse_ir.structure": "check_structure",
    "sparse_ir.verify": "verify",
    "tuning.search": "tune",
}
_WHERE = {name: f"sparsetir.{at}" for at, names in _MODULES.items() for name in names.split()}
# Modules that users import from.
_PACKAGES = (
    "datasets", "distributed", "formats", "graphs", "masks", "nn", "ops", "plot", "schedules",
    "sparse_ir", "tuning",
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _WHERE:
        value = getattr(need(f"sparsetir.{name}", _WHERE[name]), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return need(f"sparsetir.{name}", f"sparsetir.{name}")
    raise AttributeError(f"module 'sparsetir' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])


def _product(matrix: object, x: object, plans: dict[object, object]) -> object:
    from sparsetir.planning.plan import product

    hooks.product = partial(product, ops=cache(lambda: import_module("sparsetir.ops")))
    return hooks.product(matrix, x, plans)


def _sparse_operation(op: str, *matrices: Any, **options: Any) -> object:
    from sparsetir.planning.sparse_results import sparse_operation

    hooks.sparse_operation = sparse_operation
    return sparse_operation(op, *matrices, **options)


def _expression(text: str, *operands: object, **options: Any) -> object:
    from sparsetir.expressions.einsum import plan_expression

    hooks.expression = plan_expression
    return plan_expression(text, *operands, **options)


hooks.product, hooks.sparse_operation, hooks.expression = _product, _sparse_operation, _expression
