"""A plug-in module whose templates, each with a config to be searched, do what none may do."""

from dataclasses import replace

from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.template import register
from sparsetir.schedules.templates.registry import TEMPLATES
from tuning.faulty_templates import Crashing, Hanging, Wrong

for _config in (Crashing(), Hanging(), Wrong()):
    _template = TEMPLATES[type(_config), Spmm]
    register(replace(_template, configs=lambda *args, c=_config: [c]))
