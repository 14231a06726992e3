"""A recording of the device's activity alone, with a device that is made up."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from fettle.errors import UsageError
from fettle.trace import record


def test_the_profiler_is_asked_for_no_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = torch.profiler.profile

    def watched(activities, **more):
        asked.append(set(activities))
        return real(activities=[ProfilerActivity.CPU], **more)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {ProfilerActivity.CPU, ProfilerActivity.CUDA})
    monkeypatch.setattr(torch.profiler, "profile", watched)
    for device_only in (False, True):
        with record(tmp_path / "trace.json", device_only=device_only):
            torch.ones(2).sum()
    assert asked == [{ProfilerActivity.CPU, ProfilerActivity.CUDA}, {ProfilerActivity.CUDA}]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no device here"), record(tmp_path / "trace.json", device_only=True):
        pass


@pytest.mark.parametrize("more", [{"memory": True}, {"stacks": True}])
def test_what_belongs_to_operators_is_refused(tmp_path: Path, more: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match="belong to operators"), record(tmp_path / "t.json", device_only=True, **more):
        pass
