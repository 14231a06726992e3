"""Multipart forms, as other programs write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3 import encode_multipart_formdata

from fettle.serve.engine.refusal import Malformed
from fettle.serve.http.torchserve import MAX_HEAD, MAX_PARTS, read_field

KIND = "multipart/form-data; boundary=xyz"


def form(*parts, end=b"--xyz--\r\n"):
    return b"".join(b"--xyz\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + end


def named(name, more=b""):
    return b'Content-Disposition: form-data; name="' + name + b'"; filename="a.jpg"' + more


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_a_field_comes_back_to_the_byte(data, before):
    if b"\r\n--xyz" in b"\r\n" + data + b"\r\n" + before:
        return
    body = form((named(b"other"), before), (named(b"data", b"\r\nContent-Type: image/jpeg"), data))
    assert read_field(body, KIND, ("data", "body")) == data


def test_what_urllib3_writes_can_be_read():
    data = bytes(range(256)) * 400
    body, kind = encode_multipart_formdata({"other": "1", "data": ("a.bin", data, "image/png")})
    assert read_field(body, kind, ("data",)) == data


def test_quoted_boundaries_preambles_and_spaces():
    body = b"a preamble\r\n--x y\r\n" + named(b"body") + b"\r\n\r\nhello\r\n--x y--"
    assert read_field(body, 'multipart/form-data; charset=utf-8; boundary="x y"', ("data", "body")) == b"hello"
    padded = b"--xyz  \r\n" + named(b"data") + b"\r\n\r\n\r\n--xyz--"
    assert read_field(padded, KIND, ("data",)) == b""


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (form((named(b"data"), b"1")), "multipart/form-data", "no boundary"),
        (form((named(b"data"), b"1")), "multipart/form-data; boundary=", "no boundary"),
        (form((named(b"data"), b"1")), "multipart/form-data; boundary*0=x; boundary*=utf-8''yz", "cannot be read"),
        (form((b"Content-Disposition: form-data; name*0=da; name*=ta", b"1")), KIND, "cannot be read"),
        (form((b"Content-Disposition: form-data; name*" + b"9" * 5000 + b"=a", b"1")), KIND, "cannot be read"),
        (form((named(b"other"), b"1")), KIND, "no field data"),
        (form(end=b"--xyz--") + form((named(b"data"), b"after the end")), KIND, "no field data"),
        (b"", KIND, "no field data"),
        (form(*[(named(b"other"), b"")] * (MAX_PARTS + 1)), KIND, "too many parts"),
        (form((b"a" * MAX_HEAD, b"1")), KIND, "no headers, or too many"),
        (form((named(b"data", b"\r\nContent-Transfer-Encoding: base64"), b"MQ==")), KIND, "not supported"),
    ],
)
def test_what_is_no_such_form_is_one_sentence(body, kind, why):
    with pytest.raises(Malformed, match=why):
        read_field(body, kind, ("data",))
