"""fettle ui FOLDER: what fettle wrote into a folder, in a browser."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show


def command(
    folder: Annotated[Path, typer.Argument(help="where studies, traces, snapshots and reports lie")] = Path("."),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="open it in a browser, if there is one")
    ] = True,
    as_json: _options.AsJson = False,
) -> None:
    """Show what fettle wrote into a folder, and into those in it, as one page that links all reports.

    The page changes while a study runs. It is for you alone: on 127.0.0.1, read-only, behind a random token in the
    address that is printed, and opened in a browser where there is a desktop; Ctrl-C ends it. With --json the inventory
    is printed and nothing is served. Exit codes: 0 done, 2 no such folder, or a port that is taken.

    fettle ui fettle-out
    fettle ui . --port 8300 --no-browser
    fettle ui fettle-out --json
    """
    from fettle.ui import Site, address_of, inventory, serve

    if as_json:
        contents = inventory(folder)
        _show.answer(
            True, lambda: {"folder": str(contents.folder), "items": contents.items, "cut": contents.cut}, lambda _: None
        )
        return
    site = Site(folder)
    with serve(site, port) as server:
        print(
            f"{folder}: {len(site.contents().items)} things found. Open (Ctrl-C ends it):\n{address_of(server)}",
            flush=True,
        )
        with _opened(address_of(server)) if browser and _has_desktop() else nullcontext():
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print()


def _has_desktop() -> bool:
    """Whether somebody sits before it: on a server a browser of the terminal would take the place of this command."""
    shown = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.stdout.isatty() and bool(shown)


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """The user's browser on a page of the user's own that leads to `address`: other users can read the words of a
    command, and a token among them would let them in."""
    with tempfile.TemporaryDirectory(prefix="fettle-ui-") as folder:
        page = Path(folder, "open.html")
        page.write_text(f'<meta http-equiv="refresh" content="0;url={address}">', encoding="utf-8")
        webbrowser.open(page.as_uri())
        yield
