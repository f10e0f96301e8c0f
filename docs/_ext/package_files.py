"""The directive `file-lines`: a list of the package's files, by folders."""

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from file_lines import folders, listed


class FileLines(Directive):
    """A definition for each folder, with its files and their first sentences."""

    def run(self) -> list[nodes.Node]:
        """Parse the list as Markdown, as the page is."""
        text = "\n\n".join(f"**`{folder}/`**\n\n{listed(folder)}" for folder in folders())
        container = nodes.container()
        self.state.nested_parse(text.splitlines(), 0, container)
        return container.children


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("file-lines", FileLines)
    return {"parallel_read_safe": True}
