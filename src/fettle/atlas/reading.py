"""Reading an atlas, in a process of its own: what a hostile Parquet file grows to is not known beforehand."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fettle.atlas.table import MOST_BYTES, Row, parse
from fettle.errors import UsageError, refusing
from fettle.procs.child import Child, ChildError, Request
from fettle.procs.parent import Parent, be_a_worker

_MOST_MEMORY = 3 << 30
_LONGEST_S = 120.0


class Read(Request):
    """Read the atlas at `path`."""

    path: str


def read_atlas(path: str | Path) -> list[Row]:
    """The rows of an atlas. Raises `UsageError` with one line for a file that is not one."""
    path = Path(path)
    with refusing(f"cannot read the atlas {path}:", OSError):
        size = path.stat().st_size
    if not path.is_file() or size > MOST_BYTES:
        raise UsageError(f"{path} is not an atlas: it is not a file of at most {MOST_BYTES >> 20} MiB")
    one_thread = {"POLARS_MAX_THREADS": "1"}
    with refusing(f"the atlas {path} cannot be read:", ChildError), Child(__name__, variables=one_thread) as child:
        return child.call(Read(str(path.resolve())), list[Row], _LONGEST_S)


if __name__ == "__main__":
    be_a_worker()
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    Parent().serve(Read, lambda request: parse(Path(request.path)))
