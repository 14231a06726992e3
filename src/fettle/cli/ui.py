"""fettle ui FOLDER: what fettle wrote into a folder, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show


def command(
    folder: Annotated[Path, typer.Argument(help="where studies, traces, snapshots and reports lie")] = Path("."),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 0,
    as_json: _options.AsJson = False,
) -> None:
    """Show what fettle wrote into a folder, and into those in it, as one page that links all reports.

    The page changes while a study runs. It is for you alone: on 127.0.0.1, read-only, behind a random token in the
    address that is printed; Ctrl-C ends it. With --json the inventory is printed and nothing is served. Exit codes: 0
    done, 2 no such folder, or a port that is taken.

    [bold]Examples[/]

      fettle ui fettle-out

      fettle ui . --port 8300

      fettle ui fettle-out --json
    """
    from fettle.ui import Site, address_of, inventory, serve

    if as_json:
        found = inventory(folder)
        _show.answer(
            True, lambda: {"folder": str(found.folder), "items": found.items, "cut": found.cut}, lambda _: None
        )
        return
    site = Site(folder)
    with serve(site, port) as server:
        print(
            f"{folder}: {len(site.found().items)} things found. Open (Ctrl-C ends it):\n{address_of(server)}",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
