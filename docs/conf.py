"""Configuration of the site (`make docs`). Pages are Markdown (MyST); no network is needed."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "_ext")]

import sparsetir  # noqa: E402

project = "sparsetir"
author = "the authors of sparsetir"
copyright = "2026, the authors of sparsetir"
release = version = sparsetir.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "plain_docstrings",
    "package_files",
    "repository_links",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext"]
templates_path = []

myst_enable_extensions = ["colon_fence", "deflist", "attrs_block"]
myst_heading_anchors = 4
# Programs are laid out by hand; a console block is text with prompts.
highlight_language = "python"

default_role = "code"
smartquotes_action = "D"  # dashes alone: "sum" is what one types
napoleon_google_docstring = False
# Types of arguments are words with shapes, so no links; those of signatures are.
napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what a class has of its own; the rest is where it comes from
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# TVM and torch have no inventories here: names of theirs stay plain text.
nitpicky = False

html_theme = "furo"
html_title = f"sparsetir {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0068a3"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
