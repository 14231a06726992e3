"""Writes requirements.lock: the releases of constraints.txt, each with the hashes of its files on the package index.

    python .ci/lock.py [--wheel FILE ...]

`--wheel` takes a file that the index does not have in place of the release: torch's build for CPUs alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple"
PYTHONS = ("py3", "cp311", "cp312", "cp313", "cp314")
OLDEST = "3.11.0"
HEAD = """# By .ci/lock.py from constraints.txt: hashes of what PyPI has for Linux and macOS, Python 3.11 and later.
"""


def releases(text: str) -> list[tuple[str, str]]:
    """Names and versions in constraints."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [(name.strip(), version.strip()) for name, _, version in (line.partition("==") for line in lines if line)]


def hashes(release: tuple[str, str]) -> list[str]:
    """SHA-256 of each file of a release that is not yanked. One that the oldest Python cannot have ends this."""
    name, version = release
    asked = urllib.request.Request(
        f"{INDEX}/{canonicalize_name(name)}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        files = json.load(answer)["files"]
    own = [item for item in files if not item["yanked"] and of(item["filename"]) == version]
    if any(OLDEST not in SpecifierSet(item.get("requires-python") or "") for item in own):
        raise SystemExit(f"lock: {name}=={version} is not for Python {OLDEST}")
    found = [item["hashes"]["sha256"] for item in own]
    if not found:
        raise SystemExit(f"lock: the index has no {name}=={version}")
    return sorted(found)


def of(filename: str) -> str:
    """The version that a file of the index is of; empty for those of old kinds and of systems that are not meant."""
    try:
        if not filename.endswith(".whl"):
            return str(parse_sdist_filename(filename)[1])
        _, version, _, tags = parse_wheel_filename(filename)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return ""
    meant = any(
        (tag.interpreter in PYTHONS or tag.abi == "abi3") and tag.platform.startswith(("any", "manylinux", "macosx"))
        for tag in tags
    )
    return str(version) if meant else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, action="append", default=[])
    options = parser.parse_args()
    wanted = releases((ROOT / "constraints.txt").read_text())
    with ThreadPoolExecutor(8) as pool:
        known = dict(zip(wanted, pool.map(hashes, wanted), strict=True))
    for wheel in options.wheel:
        name, version = wheel.name.split("-")[:2]
        del known[name, version.partition("+")[0]]
        known[name, version] = [hashlib.sha256(wheel.read_bytes()).hexdigest()]
    lines = []
    for (name, version), found in known.items():
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in found)]))
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{len(known)} releases, {sum(map(len, known.values()))} files")


if __name__ == "__main__":
    main()
