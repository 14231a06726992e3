"""What every page with charts is made of: the look in light and dark, the chart library, text that is fit to show.

It knows nothing of what the pages tell; rooms that write a page of their own build on it.
"""

from fettle.page import shell, theme
from fettle.page.clean import clean
from fettle.page.shell import Figure, as_spec

__all__ = ["Figure", "as_spec", "clean", "shell", "theme"]
