"""Who may call: asked before anything else is looked at, of every path and method alike."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from fettle.serve.engine.refusal import Refusal

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Guard:
    """Denies by default: the token on every path where there is one, and the host name on the management port."""

    def __init__(self, token: str, *, management: bool, hosts: tuple[str, ...] = ()) -> None:
        self._token, self._management = token.encode(), management
        self._hosts = LOOPBACK_NAMES | {host.lower() for host in hosts}

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Refusal` (403 or 401) unless this request may come in."""
        if self._management:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name not in self._hosts:  # a page in a browser that lured the name to this machine
                raise Refusal(403, "this host name is not served here")
        if self._token or self._management:
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            if not self._token or kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
                raise Refusal(401, "a token is needed", ((b"www-authenticate", b"Bearer"),))
