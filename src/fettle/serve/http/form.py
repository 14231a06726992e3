"""The file of a multipart form, as ``curl -F data=@file`` sends it (RFC 7578).

The library's parser reads a message line by line: a picture of 64 MB would stop the event loop for seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from email.message import Message
from email.parser import BytesHeaderParser

from fettle.serve.engine.refusal import Malformed

MAX_PARTS = 64
MAX_HEAD = 8 << 10
"""Bytes of one part's headers."""


def read_field(body: bytes, kind: str, names: Collection[str]) -> bytes:
    """The first field of a form that has one of these names. `kind` is the form's content type.

    Raises `Malformed`.
    """
    message = Message()
    message["content-type"] = kind
    boundary = message.get_boundary()
    if not boundary:
        raise Malformed("the form's content type names no boundary")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS + 1)
    if len(parts) > MAX_PARTS + 1:
        raise Malformed("the form has too many parts")
    for part in parts[1:]:
        if part.startswith(b"--"):
            break
        end = part.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            raise Malformed("a part of the form has no headers, or too many")
        headers = BytesHeaderParser().parsebytes(part[: end + 2].lstrip())
        if headers.get_param("name", header="content-disposition") in names:
            if str(headers.get("content-transfer-encoding", "binary")).lower() not in ("binary", "8bit", "7bit"):
                raise Malformed("the field's Content-Transfer-Encoding is not supported", 415)
            return part[end + 4 :]
    raise Malformed(f"the form has no field {' or '.join(names)}")
