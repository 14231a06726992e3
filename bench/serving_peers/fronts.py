"""One engine with one worker behind several HTTP servers at once: fettle's own connection, uvicorn and granian.

python fronts.py PACKAGE PORT        # own on PORT, uvicorn on PORT + 1, granian on PORT + 2
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

from fettle.loop import run
from fettle.package.manifest import open_package
from fettle.serve.engine.registry import Options
from fettle.serve.http import App
from fettle.serve.http.asgi import Asgi
from fettle.serve.server import Address, Server


def uvicorn_front(app: Any, port: int) -> Any:
    import uvicorn

    config = uvicorn.Config(app, port=port, http="httptools", loop="none", access_log=False, log_level="warning",
                            lifespan="off", server_header=False, date_header=False)  # fmt: skip
    return uvicorn.Server(config).serve()


def granian_front(app: Any, port: int) -> Any:
    from granian.constants import Interfaces
    from granian.server.embed import Server as Granian

    return Granian(app, address="127.0.0.1", port=port, interface=Interfaces.ASGINL, log_enabled=False).serve()


FRONTS = {"uvicorn": uvicorn_front, "granian": granian_front}


async def main() -> None:
    package, port = open_package(Path(sys.argv[1])), int(sys.argv[2])
    server = Server(Address(port=port), Options())
    await server.start([package])
    app = Asgi(App(server.registry, limits=server.address.limits))
    installed = [name for name in FRONTS if importlib.util.find_spec(name)]
    await asyncio.gather(*(FRONTS[name](app, port + 1 + list(FRONTS).index(name)) for name in installed))
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(main())
