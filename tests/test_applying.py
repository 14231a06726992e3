"""A recipe that was measured elsewhere is put to use with a warning."""

from dataclasses import replace

import pytest

from fettle import applying
from fettle.machine import this_machine
from fettle.recipe_file import RecipeFile


def test_another_version_of_the_runtime_of_a_recipe_is_said(monkeypatch):
    here = replace(this_machine(), versions={"torch": "2.13", "openvino": "2026.4"})
    monkeypatch.setattr(applying, "this_machine", lambda: here)
    file = RecipeFile(
        levels={"runtime": "openvino"}, machine={"id": here.id, "versions": {"torch": "2.13", "openvino": "2025.1"}}
    )
    with pytest.warns(UserWarning, match=r"measured with openvino 2025\.1 \(here 2026\.4\): measure it again"):
        assert applying.warn_if_foreign(file)
    file.levels = {"precision": "bf16"}  # which runs by torch
    assert applying.warn_if_foreign(file) == ""
    file.levels, file.machine = {"runtime": "openvino"}, {"id": here.id}  # of an earlier version
    assert applying.warn_if_foreign(file) == ""
