"""Recorded traces of all sorts, which are not part of the project: those in the folder that `FETTLE_TRACES` names."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

from fettle.trace import identities, idle_summary, load
from fettle.trace.analyses.idle import EXPLAINED, missing_information

FOLDER = os.environ.get("FETTLE_TRACES", "")
FILES = sorted(Path(FOLDER).rglob("*.json.gz")) if FOLDER else []


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="FETTLE_TRACES names no folder of traces")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_answers_agree_and_say_what_they_lack(path: Path) -> None:
    trace = load(path, use_sidecar=False)
    table = identities(trace)
    assert table["holds"].all(), table.filter(~pl.col("holds"))
    for device in trace.device_keys:
        share = dict(idle_summary(trace, device).select("cause", "share").iter_rows())
        if share.get("queued_unknown", 0.0) > EXPLAINED or share.get("unlinked", 0.0) > EXPLAINED:
            assert missing_information(trace, device)
