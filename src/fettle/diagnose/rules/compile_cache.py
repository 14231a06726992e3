"""The rule `compile-cache`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Compiled code is thrown away with the process."""
    if seen.compile is None or seen.compile.cache.enabled:
        return None
    return Finding(
        "compile-cache",
        "The compile cache is switched off: each start compiles everything again.",
        startup_s=seen.compile.compile_s,
        evidence=("the environment switches the cache off",),
        advice="unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE=0",
        formula="seconds spent compiling",
        before="TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python serve.py",
        after="python serve.py",
    )
