"""What uvicorn's request object knows already, without ASGI's messages: for each request three awaited calls less.

ASGI gives a body by `receive` and takes an answer by `send`, twice. Behind both stands one object of uvicorn's, which
most often has the whole body when the application begins, and whose transport takes a whole answer in one write. Where
anything is unusual, or another ASGI server is used, the functions here say so, and the messages are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

_STATUS = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)


def cycle_of(method: Callable[..., Any]) -> Any:
    """uvicorn's object that `receive` or `send` is a method of; None where there is another one or none."""
    cycle = getattr(method, "__self__", None)
    return cycle if hasattr(cycle, "message_event") and hasattr(cycle, "response_started") else None


def whole_body(cycle: Any) -> bytes | None:
    """The body, once, where all of it has come; else None."""
    if cycle.more_body or cycle.disconnected or cycle.response_complete:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.message_event.clear()
    cycle.flow.resume_reading()  # which pauses for large bodies
    return body


def answer(cycle: Any, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
    """Write a whole answer, whose headers give its length. False where that is for `send` to do."""
    if (
        cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.scope["method"] == "HEAD"
        or status not in _STATUS or status in _WITHOUT_BODY
    ):  # fmt: skip
        return False
    parts = [_STATUS[status]]
    for name, value in headers:
        if b"\n" in value or b"\r" in value or b"\0" in value or name == b"connection":
            return False
        parts += (name, b": ", value, b"\r\n")
    parts += (b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n", body)
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join(parts))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True
