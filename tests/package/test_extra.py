"""What a package needs beyond fettle's own dependencies."""

from pathlib import Path

import pytest
import torch

from fettle.errors import UsageError
from fettle.package import export
from fettle.recipe import Recipe
from fettle.workload import Workload


def test_a_package_without_safetensors_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    workload = Workload(torch.nn.Linear(2, 2), [torch.randn(1, 2)])
    with pytest.raises(UsageError, match=r"needs safetensors: pip install .*serve"):
        export.write_package(workload, Recipe(), tmp_path / "p", name="p")
    assert not (tmp_path / "p").exists()
