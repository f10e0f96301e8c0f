"""The registry of operators: importing it registers all of the library's."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sparsetir.schedules import operators
from sparsetir.schedules.operators import operands
from sparsetir.schedules.operators.names import OPS

# By name, the library's first; :func:`sparsetir.schedules.operators.operands.register` adds others.
OPERATORS, ALONG, OF_MATRICES = operands.OPERATORS, operands.ALONG, operands.OF_MATRICES

for _name in (*OPS, *sorted(module.name for module in iter_modules(operators.__path__))):
    import_module(f"{operators.__name__}.{_name}")
