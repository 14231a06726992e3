"""`fettle trace`: analyse profiler traces, one command a question; each module holds the commands of one side."""

from fettle.cli.trace import overview, device, path, host, files  # noqa: F401, I001 - registers, in the help's order
from fettle.cli.trace.shared import app

__all__ = ["app"]
