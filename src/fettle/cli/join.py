"""fettle join HOST:PORT: lend this machine's ranks to a study on another."""

from __future__ import annotations

from typing import Annotated

import typer

from fettle.cli._console import console


def command(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the study, as its --listen says", show_default=False)],
) -> None:
    """Lend this machine to a training study that runs on another: its ranks of each trial are started here.

    The study shows the whole command, with the key that both sides need. What is trained must lie at the same place on
    every node. The study's node may run code here: give the key to no one else. Ends when the study does.

    FETTLE_KEY=4f0c... fettle join 10.0.0.1:29400
    """
    from fettle.procs.nodes import address_of, join

    out = console(error=True)
    workers = join(*address_of(address, "the study's address"), lambda text: out.print(text, markup=False))
    out.print(f"the study has ended; processes of it that had ranks here: {workers}")
