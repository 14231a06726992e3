"""requirements.lock: the releases of constraints.txt, each with hashes, and none that is known to be compromised."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fettle.doctor import shipped_advisories

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")


def _pinned(text: str) -> dict[str, str]:
    lines = [line.partition(" --hash")[0] for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        wanted = Requirement(line)
        (one,) = wanted.specifier
        assert one.operator == "=="
        found[canonicalize_name(wanted.name)] = one.version
    return found


def test_it_is_what_the_constraints_say() -> None:
    constrained = _pinned((ROOT / "constraints.txt").read_text())
    assert {name: version.partition("+")[0] for name, version in _pinned(LOCK).items()} == constrained


def test_every_release_has_hashes() -> None:
    for line in LOCK.splitlines()[1:]:
        name, *hashes = line.split()
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name


def test_none_is_known_to_be_compromised() -> None:
    advisories = shipped_advisories().advisory
    assert advisories
    pinned = _pinned(LOCK)
    for advisory in advisories:
        assert pinned.get(canonicalize_name(advisory.package)) not in advisory.versions, advisory.package
