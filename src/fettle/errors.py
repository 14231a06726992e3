"""The one exception that means: the person who called fettle can mend this.

Commands print its single line and leave with exit code 2; nothing has been written by then.
"""

import re

_COLOURS = re.compile("\x1b\\[[0-9;]*m")


class UsageError(Exception):
    """Bad usage or input. The message is one line: what is wrong, and what to do."""

    def _render_traceback_(self) -> list[str]:  # what a notebook shows in place of a traceback
        return [f"fettle: {self}"]


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, with its type: ``ValueError: too few channels``."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
