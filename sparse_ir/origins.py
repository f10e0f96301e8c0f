"""Modules outside the package that register operators, templates and formats.

Measuring processes import them, too.
"""

from __future__ import annotations

import sys
from types import ModuleType

# Keyed by the name of an operator, the class of a config, or the class of a format.
ORIGINS: dict[object, ModuleType] = {}


def note_origin(registered: object) -> None:
    """Record the module whose import registers something; the package's own are not recorded."""
    ORIGINS.pop(registered, None)
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        module = sys.modules.get(name)
        # Executed text may have a module name without being one.
        if module and frame.f_code.co_name == "<module>" and vars(module) is frame.f_globals:
            if not name.startswith("sparsetir."):
                ORIGINS[registered] = module
            return
        frame = frame.f_back
