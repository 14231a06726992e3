"""What the first compilation of a process takes is done in the server that processes are forked from."""

import os
import sys
import textwrap

import pytest

from fettle.procs.child import Child
from fettle.procs.forks import ForkServer, Imports
from fettle.procs.process import Fork
from fettle.recipe import Recipe
from fettle.techniques import imports_of
from tests.procs.test_forks import ASKED, asked

pytest.importorskip("torch._inductor.runtime.cache_dir_utils")


def test_forks_have_compiled_and_count_nothing_of_it(tmp_path):
    (tmp_path / "asked.py").write_text(textwrap.dedent(ASKED))
    compiled = tmp_path / "compiled"
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
                 "TORCHINDUCTOR_CACHE_DIR": str(compiled)}  # fmt: skip
    forks = ForkServer(["asked"], variables, Imports())
    try:
        spared = forks.spare(imports_of(Recipe({"compile": "default"})))
        assert spared.seconds > 0
        assert spared.size > 0
        with Child("asked", variables=variables, forks=forks) as child:
            assert isinstance(child._process, Fork)
            assert asked(child, "'fettle.techniques._first_compile' in sys.modules")
            assert asked(child, "dict(sys.modules['torch._dynamo.utils'].counters)") == {}
            assert asked(child, "os.environ['TORCHINDUCTOR_CACHE_DIR']") == str(compiled)
    finally:
        forks.close()
    assert list(compiled.rglob("*.so"))  # what was found out of the C++ compiler, and no graph
    assert not (compiled / "fxgraph").exists()
    assert not (compiled / "aotautograd").exists()
