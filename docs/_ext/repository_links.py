"""Links of pages to files of the repository that are no pages.

The same text is read in the repository, where such links work. On the site a link to a file that a
page includes leads to that page, and others become plain text.
"""

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
# Files outside of docs/ that are pages, by their path in the repository.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "measurements.md",
    "examples/README.md": "examples.md",
}


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("include-read", _included)
    return {"parallel_read_safe": True}


def relinked(text: str, file: str, page: str) -> str:
    """Text of a file, with links for where it is shown.

    file, page : paths in the repository of what the text is from, and of the page
    """
    here, shown = str(Path(file).parent), str(Path(page).parent)

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = normpath(f"{here}/{target}")
        if path in PAGES:
            path, anchor = f"docs/{PAGES[path]}", ""
        if not path.startswith("docs/"):
            return words
        return f"[{words}]({relpath(path, shown)}{anchor})"

    return LINK.sub(link, text)


def _read(app: Any, docname: str, source: list[str]) -> None:
    page = f"docs/{docname}.md"
    source[0] = relinked(source[0], page, page)


def _included(app: Any, path: Path, parent: str, source: list[str]) -> None:
    root = Path(app.srcdir).parent
    file = (Path(app.srcdir) / path).resolve().relative_to(root.resolve())
    source[0] = relinked(source[0], str(file), f"docs/{parent}.md")
