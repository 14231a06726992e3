"""What a machine has to serve on, without torch."""

import pytest

from fettle.package import host


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["cpu", "cuda:0", "cuda:2"]),
        ("0,1", ["cpu", "cuda:0"]),
        ("2, 0", ["cpu", "cuda:0", "cuda:1"]),
        ("2,-1,0", ["cpu", "cuda:0"]),
        ("0,7,2", ["cpu", "cuda:0"]),
        ("NoDevFiles,0", ["cpu"]),
        ("GPU-a", ["cpu", "cuda:0"]),
        ("GPU-a,MIG-b,GPU-c,GPU-d", ["cpu", "cuda:0", "cuda:2"]),
        ("", ["cpu"]),
        ("-1", ["cpu"]),
    ],
)
def test_gpus_that_are_hidden_are_not_served_on(
    visible: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_gpus", lambda: ["H200", "H200", "L4"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host.devices() == found
