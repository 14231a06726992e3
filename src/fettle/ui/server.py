"""The inventory of a folder behind HTTP, for one person on this machine: read-only, on localhost, behind a token.

What keeps others out: the address (127.0.0.1), the token in the path, which is compared in constant time, and the Host
header, which must name this server, so that a page elsewhere whose name is made to resolve to 127.0.0.1 (DNS rebinding)
gets nothing. A path is looked up among the files that were found and never put together, so there is nothing to escape
from. Reports run in a sandbox: their scripts draw charts, and reach neither this server nor another.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from fettle.errors import UsageError, refusing
from fettle.page import clean, shell
from fettle.ui.listing import KINDS, TYPES, Contents, Item, inventory
from fettle.units import size_text

FRESH_S = 1.0
"""How long an inventory is good for: several readers do not walk the folder several times a second."""
_SANDBOX = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
    "script-src 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"
)
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
_TITLES = {"study": "Studies", "report": "Reports", "load": "Load and limits", "trace": "Traces",
           "snapshot": "Memory snapshots", "package": "Packages", "results": "Recipes and results"}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What is sent: a status, headers, and either text or a file."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None


class Site:
    """A folder's pages. `respond` is all of it that does not concern sockets."""

    def __init__(self, folder: Path, token: str = "") -> None:
        """Raises `UsageError` where `folder` is not one."""
        self.folder, self._contents, self._at = folder, inventory(folder), time.monotonic()
        self.token = token or secrets.token_urlsafe(24)

    def respond(self, method: str, target: str, hosts: Sequence[str], port: int) -> Answer:
        """The answer to a request: its method, its target, and its Host headers."""
        if len(hosts) != 1 or hosts[0].lower() not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return _text(403, "this server answers to 127.0.0.1 and localhost only")
        token, _, rest = target.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return _text(403, "the token in the address is missing or wrong: use the address that fettle ui printed")
        if method not in ("GET", "HEAD"):
            return _text(405, "this server is read-only")
        if not rest:
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": _POLICY}
            return Answer(200, headers, page(self.contents(), self.token).encode())
        kind, _, place = rest.partition("/")
        path = self.contents().files.get(unquote(place, errors="surrogateescape")) if kind == "file" else None
        return _shown(path) if path else _MISSING

    def contents(self) -> Contents:
        """The inventory, made again where it is older than `FRESH_S`. A folder that has gone holds nothing."""
        if time.monotonic() - self._at > FRESH_S:
            try:
                self._contents = inventory(self.folder)
            except UsageError:
                self._contents = Contents(self.folder, [], {})
            self._at = time.monotonic()
        return self._contents


def page(contents: Contents, token: str) -> str:
    """The one page: what the folder holds, with links to what a browser can show."""
    beside: dict[str, list[str]] = {}  # a study's own pages lie in its folder
    for item in contents.items:
        if item.kind in ("report", "results") and item.path in contents.files:
            beside.setdefault(item.path.rpartition("/")[0], []).append(item.path)
    sections = []
    for kind in KINDS:
        items = [item for item in contents.items if item.kind == kind]
        if items:
            sections.append((_TITLES[kind], [_row(item, contents, beside, token) for item in items]))
    running = sum(item.running for item in contents.items)
    headline = f"{running} {'study' if running == 1 else 'studies'} running" if running else ""
    return shell.render(
        "fettle.ui", "page.html.j2", clean(contents.folder.name or "fettle"), folder=clean(str(contents.folder)),
        headline=headline, sections=sections, cut=contents.cut, scripts=True, live=True,
    )  # fmt: skip


def _row(item: Item, contents: Contents, beside: Mapping[str, Sequence[str]], token: str) -> dict[str, object]:
    links: Sequence[str] = [item.path] if item.path in contents.files else []
    if item.kind == "study":
        links = beside.get(item.path.rpartition("/")[0], ())
    return {
        "path": clean(item.path), "says": clean(item.says), "running": item.running, "command": clean(item.command),
        "size": size_text(item.size_bytes), "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(item.changed)),
        "links": [(clean(path.rpartition("/")[2]), f"/{token}/file/{quote(os.fsencode(path))}") for path in links],
    }  # fmt: skip


def _shown(path: Path) -> Answer:
    kind = TYPES[path.suffix.lower()]
    text = "; charset=utf-8" if kind.startswith("text/") else ""
    return Answer(200, {"Content-Type": kind + text, "Content-Security-Policy": _SANDBOX}, file=path)


def _text(status: int, line: str) -> Answer:
    return Answer(status, {"Content-Type": "text/plain; charset=utf-8"}, f"{line}\n".encode())


_MISSING = _text(404, "there is no such file here")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30.0
    server_version, sys_version = "fettle", ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        answer = self.server.site.respond(self.command, self.path, hosts, self.server.server_port)
        if self.command not in ("GET", "HEAD"):
            self.close_connection = True  # the body that was sent is not read
        if answer.file is None:
            self._answer(answer)
            return
        try:
            handle = os.open(answer.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            self._answer(_MISSING)
            return
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or Path(os.path.realpath(answer.file)) != answer.file:
                self._answer(_MISSING)  # it, or a folder on the way, has become a link since
                return
            self._send(answer, about.st_size)
            left = about.st_size if self.command != "HEAD" else 0
            while left and (part := file.read(min(left, 1 << 20))):
                self.wfile.write(part)
                left -= len(part)
            self.close_connection |= left > 0  # it has become shorter: the reader must not wait for the rest

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def _answer(self, answer: Answer) -> None:
        self._send(answer, len(answer.body))
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _send(self, answer: Answer, length: int) -> None:
        self.send_response(answer.status)
        for name, value in {**_HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, site: Site, port: int) -> None:
        self.site = site
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a browser that hangs up


@contextmanager
def serve(site: Site, port: int = 0) -> Iterator[_Server]:
    """A server for `site` on 127.0.0.1, bound but not yet answering (`serve_forever`); its address is `address_of`.

    Raises `UsageError` where the port is taken.
    """
    with refusing(f"cannot listen on 127.0.0.1:{port}:", (OSError, OverflowError)):
        server = _Server(site, port)
    with server:
        yield server


def address_of(server: _Server) -> str:
    """The address to open, with its token."""
    return f"http://127.0.0.1:{server.server_port}/{server.site.token}/"
