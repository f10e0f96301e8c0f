"""Stage-I nodes, script dialect, printer, verifier, interpreter and lowerings."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import tvm.script

if TYPE_CHECKING:
    from sparsetir.sparse_ir.errors import IllFormedError as IllFormedError
    from sparsetir.sparse_ir.errors import LoweringError as LoweringError
    from sparsetir.sparse_ir.errors import ScheduleError as ScheduleError
    from sparsetir.sparse_ir.errors import StructureError as StructureError
    from sparsetir.sparse_ir.errors import StructureIndexError as StructureIndexError
    from sparsetir.sparse_ir.errors import StructureTypeError as StructureTypeError
    from sparsetir.sparse_ir.lower_sparse_buffer import LowerSparseBuffer as LowerSparseBuffer
    from sparsetir.sparse_ir.lower_sparse_iter import LowerSparseIter as LowerSparseIter
    from sparsetir.sparse_ir.nodes import AttachedAxis as AttachedAxis
    from sparsetir.sparse_ir.nodes import Axis as Axis
    from sparsetir.sparse_ir.nodes import FusedAxis as FusedAxis
    from sparsetir.sparse_ir.nodes import PartAxis as PartAxis
    from sparsetir.sparse_ir.nodes import SparseBuffer as SparseBuffer
    from sparsetir.sparse_ir.nodes import SparseFunc as SparseFunc
    from sparsetir.sparse_ir.nodes import SparseIteration as SparseIteration
    from sparsetir.sparse_ir.printer import module_script as module_script
    from sparsetir.sparse_ir.schedule import Schedule as Schedule
    from sparsetir.sparse_ir.script.parser import from_source as from_source
    from sparsetir.sparse_ir.structure import check_structure as check_structure

tvm.script.register_dialect("sparse_tir", "sparsetir.sparse_ir.script")

# Public names, loaded on first access: modules of this package import other packages through it.
_MODULES = {
    "errors": "IllFormedError LoweringError ScheduleError StructureError StructureIndexError "
    "StructureTypeError",
    "lower_sparse_buffer": "LowerSparseBuffer",
    "lower_sparse_iter": "LowerSparseIter",
    "nodes": "AttachedAxis Axis FusedAxis PartAxis SparseBuffer SparseFunc SparseIteration",
    "printer": "module_script",
    "schedule": "Schedule",
    "script.parser": "from_source",
    "structure": "check_structure",
}
_WHERE = {name: f"{__name__}.{at}" for at, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
