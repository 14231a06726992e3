"""What a rank sets before it is one."""

import os

import pytest

from fettle.procs import launcher


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
        # AMD's runtime goes by its own variable, NVIDIA's does not know it.
        ({"HIP_VISIBLE_DEVICES": "3,5"}, {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "1"}),
        (
            {"HIP_VISIBLE_DEVICES": "3,5", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
            {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "GPU-b"},
        ),
    ],
)
def test_each_rank_sees_a_device_of_its_own(
    given: dict[str, str], seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception): ...

    def be_a_worker() -> None:
        raise Begun

    monkeypatch.setattr(launcher, "be_a_worker", be_a_worker)
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1", "RANK": "1", **given})
    with pytest.raises(Begun):
        launcher.be_a_rank()
    assert {name: value for name, value in os.environ.items() if name.endswith("DEVICES")} == seen
