"""What every HTML page is made of: one shell with one look in light and dark, and blocks to build with.

It knows nothing of what the pages say. A room's page is a template that extends `shell.html.j2` and calls the macros
of `blocks.html.j2`, rendered by `shell.render`.
"""

from fettle.page import drawn, shell, theme
from fettle.page.blocks import Cell, Figure, Row, Still, Table, clean, still
from fettle.page.shell import as_spec, picture

__all__ = [
    "Cell", "Figure", "Row", "Still", "Table", "as_spec", "clean", "drawn", "picture", "shell", "still", "theme",
]  # fmt: skip
