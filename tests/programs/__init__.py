"""The test programs: stage-I functions with inputs and oracles, shared by the tests of all stages.

`from programs import PROGRAMS, tolerance` (the folder `tests` is on the path).
"""

from __future__ import annotations

import sparsetir.sparse_ir  # noqa: F401 - registers the dialect that the programs are written in

from . import ell, formats, graph, matrix, merged, misc, ragged_tensor, tensor
from .common import CASES, Program, copied, tolerance

__all__ = ["CASES", "PROGRAMS", "Program", "copied", "tolerance"]

PROGRAMS: dict[str, Program] = {
    program.name: program
    for module in (matrix, formats, ell, tensor, ragged_tensor, graph, misc, merged)
    for program in module.PROGRAMS
}
