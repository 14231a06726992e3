"""What does not decode as a whole: event by event, and fields of an unexpected type made to fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from fettle.trace.io.events import Args, Event
from fettle.trace.io.fields import integer, number

_MOST_TIMES = 8
"""How often each letter may be read in vain: events may lie in what could be one, a thousand deep."""
_DEEP = 64 << 10
"""Letters that are too deep to be read, about."""
_NEXT_EVENT = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat)"\s*:)')


def read_event_by_event(text: bytes) -> tuple[list[dict[str, Any]], bytes, int]:
    """Salvage events from a chunk that does not decode as a whole.

    Returns the events that could be read, the unread end (an event that has only begun, or what follows the array's
    closing bracket, which is then its first character), and how many events had to be skipped.
    """
    decoder = json.JSONDecoder(strict=False)
    source = text.decode("utf-8", "replace")
    events: list[dict[str, Any]] = []
    skipped = spent = 0
    at, size = 0, len(source)
    while at < size:
        while at < size and source[at] in " \t\r\n,":
            at += 1
        if at >= size or source[at] == "]":
            break
        try:
            item, at = decoder.raw_decode(source, at)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and (
                error.pos >= size - 8 or error.msg.startswith("Unterminated string")
            ):
                break  # not broken, only not finished: more text may follow
            reached = error.pos if isinstance(error, json.JSONDecodeError) else at + _DEEP
            spent += reached - at
            match = _NEXT_EVENT.search(source, at if spent < _MOST_TIMES * size else reached)
            if match is None:
                break
            skipped += 1
            at = match.end()
            continue
        if isinstance(item, dict):
            events.append(item)
        else:
            skipped += 1
    return events, source[at:].encode(), skipped


def lenient(item: dict[str, Any]) -> Event | None:
    """An event whose fields have the wrong type, made to fit; None where it has no meaning left."""
    ph, args, known = item.get("ph"), item.get("args"), None
    if not isinstance(ph, str):
        return None
    if isinstance(args, dict):
        known = Args()
        for name, encoded in zip(Args.__struct_fields__, Args.__struct_encode_fields__, strict=True):
            value, fit = args.get(encoded), _FIT.get(name)
            if fit is not None:
                value = fit(value)
            if value is not None:
                setattr(known, name, value)
    return Event(
        ph=ph,
        cat=_text(item.get("cat")),
        name=_text(item.get("name")),
        pid=_text_or_integer(item.get("pid")),
        tid=_text_or_integer(item.get("tid")),
        ts=_clock(item.get("ts")),
        dur=_clock(item.get("dur")),
        args=known,
    )


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _text_or_integer(value: Any) -> str | int | None:
    return value if isinstance(value, int) else _text(value)


def _clock(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


# How the arguments are made to fit that are not `Any`; None leaves what stands for one that is not there.
_FIT: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("correlation", "external", "external_old", "sequence"), integer),
    **dict.fromkeys(("blocks", "occupancy"), number),
    **dict.fromkeys(("stream", "device"), lambda value: value if isinstance(value, (int, str)) else None),
    **dict.fromkeys(
        ("dims", "types", "values"),
        lambda value: msgspec.Raw(json.dumps(value).encode()) if isinstance(value, list) else None,
    ),
}
