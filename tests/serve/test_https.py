"""HTTPS with a certificate that the test made itself."""

import asyncio
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fettle.errors import UsageError
from fettle.serve.engine.registry import Options
from fettle.serve.server import Address, Server


def asked(port: int, scheme: str, trusted: Path | None) -> int:
    context = ssl.create_default_context(cafile=trusted) if trusted is not None else None
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/v2/health/live", context=context, timeout=10) as answer:
        return int(answer.status)


@pytest.mark.parametrize("files", [("certificate.pem", "key.pem"), ("both.pem", None)])
def test_it_answers_who_trusts_the_certificate_and_nobody_else(certified: Path, files: tuple[str, str | None]) -> None:
    certificate, key = certified / files[0], certified / files[1] if files[1] else None

    async def through() -> None:
        server = Server(Address(port=0, certificate=certificate, key=key), Options())
        await server.start([])
        try:
            (port,) = server.ports
            assert await asyncio.to_thread(asked, port, "https", certified / "certificate.pem") == 200
            with pytest.raises(urllib.error.URLError, match=r"self.signed"):
                await asyncio.to_thread(asked, port, "https", None)
            with pytest.raises((OSError, urllib.error.URLError)):  # plain HTTP
                await asyncio.to_thread(asked, port, "http", None)
            assert await asyncio.to_thread(asked, port, "https", certified / "certificate.pem") == 200
        finally:
            await server.close()

    asyncio.run(through())


def test_a_wrong_file_is_one_line(certified: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    for certificate, key, said in [
        (tmp_path / "none.pem", None, "No such file"),
        (tmp_path / "text.pem", None, "no certificate with its private key"),
        (certified / "certificate.pem", None, "no certificate with its private key"),
    ]:
        with pytest.raises(UsageError, match=said) as raised:
            Address(certificate=certificate, key=key).tls()
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="needs its `certificate`"):
        Address(key=certified / "key.pem").check()
