"""The clock waits for whatever accelerator the work is on."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fettle.diagnose.collectors.variants import timed
from fettle.generate.speed import Text
from fettle.measure._clock import Clock
from fettle.measure._state import rotation


def test_work_on_another_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is only handed over takes as long as it takes, not as long as handing it over."""
    pending: list[float] = []

    def wait(device: int | None) -> None:
        while pending:
            time.sleep(pending.pop())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    assert Clock("mps").time_ns(lambda: pending.append(0.05)) >= 50e6
    assert not pending


def test_texts_and_the_calls_of_a_diagnosis_wait_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int | None] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    Text(0, 1).on_tokens(SimpleNamespace(device=torch.device("mps:0"), shape=(1, 1)))  # type: ignore[arg-type]
    timed(lambda: None, "mps", 0.0, least=2)
    assert waited == [0, None, None]


def test_a_cpu_is_not_asked_whether_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: pytest.fail("asked"))
    assert Clock("cpu").time_ns(lambda: None) >= 0


def test_batches_of_another_structure_are_one_sample_together() -> None:
    """A call with a mask may take longer than one without: the median of both would be either's by chance."""
    x, longer = torch.ones(2, 3), torch.ones(2, 4)
    assert rotation([{"x": x}, {"x": x}]) == [[{"x": x}], [{"x": x}]]
    for other in ({"x": longer}, {"x": x, "mask": x}, {"y": x}, (x,)):
        assert len(rotation([{"x": x}, other])) == 1


@pytest.mark.parametrize(
    ("batch", "alike", "other"),
    [
        (np.ones((2, 3)), np.zeros((2, 3)), np.ones((2, 4))),
        ("a text", "as one", "a longer text"),
        ({"x": torch.ones(2), "steps": 10}, {"x": torch.ones(2), "steps": 10}, {"x": torch.ones(2), "steps": 50}),
    ],
)
def test_arrays_texts_and_numbers_that_differ_are_one_sample_together_too(batch, alike, other) -> None:
    assert rotation([batch, alike]) == [[batch], [alike]]
    assert rotation([batch, other]) == [[batch, other]]
