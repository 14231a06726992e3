"""The HTTP face: one application (`App`) for requests, another for management, on ports of their own.

A `Connection` reads requests from a socket. Each is a `Call` (what it says, within `Limits`); the `App` looks at who
calls, and hands it to the first route that knows its path: `oip` (Open Inference Protocol v2), `generation` (text by
server-sent events), `torchserve` (TorchServe's URLs), `management`, `about` (metrics and documentation). What a route
returns or raises is a `Reply`. `asgi` puts an `App` behind another server.
"""

from fettle.serve.http.app import App
from fettle.serve.http.call import Limits

__all__ = ["App", "Limits"]
