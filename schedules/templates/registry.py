"""The registry of templates: importing it registers all of the library's.

The folder for GPUs is an extension, which may be absent.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from sparsetir import schedules
from sparsetir.extras import need
from sparsetir.schedules import template
from sparsetir.schedules.template import Template

# Keyed by the classes of config and problem.
TEMPLATES = template.TEMPLATES
GPU = "gpu"

for _folder in ("templates", GPU):
    for _module in iter_modules([f"{path}/{_folder}" for path in schedules.__path__]):
        import_module(f"{schedules.__name__}.{_folder}.{_module.name}")


def templates_for(problem: Any, gpu: bool) -> list[Template]:
    """Templates for a problem's operator, on GPUs or CPUs, in the order of a search.

    Raises ImportError if the extension for GPUs is needed and absent.
    """
    fitting = [template for template in TEMPLATES.values() if template.fits(problem, gpu)]
    if gpu and not any(template.gpu for template in fitting):
        need(f"{type(problem).__name__} on a GPU", f"{schedules.__name__}.{GPU}")
    return sorted(fitting, key=lambda template: template.turn)


def template_of(config: Any, problem: Any, gpu: bool) -> Template:
    """The template that a config belongs to.

    Raises TypeError for an object that is no config, or one of another operator or target kind.
    """
    served = TEMPLATES.get((type(config), type(problem)))
    if served is None or not served.fits(problem, gpu):
        fit = [template.config.__name__ for template in templates_for(problem, gpu)]
        raise TypeError(
            f"plan: argument 'config': expected {' or '.join(fit)} for this operator and target, "
            f"got {type(config).__name__}"
        )
    return served
