"""The rule `compile-cache`."""

from __future__ import annotations

from fettle.diagnose.compile_health import CompileHealth
from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Compiled code is thrown away with the process, or with the machine."""
    if seen.compile is None:
        return None
    if not seen.compile.cache.enabled:
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
    return _lost(seen.compile) if seen.compiled else None


def _lost(health: CompileHealth) -> Finding | None:
    """What was compiled is kept, but not for long, or not all of it."""
    cache = health.cache
    if cache.persists or not (cache.hits or cache.misses or cache.bypasses):  # by a backend without that cache
        return None
    says = "Compiled code is kept in a temporary folder: a container or a reboot compiles again."
    if cache.bypasses:
        says = f"The compile cache cannot keep {cache.bypasses} graph{'s' if cache.bypasses > 1 else ''}."
    return Finding(
        "compile-cache",
        says,
        startup_s=0.0 if cache.hits else health.compile_s,  # found in the cache, it took no time to speak of
        evidence=(f"{cache.folder}: {cache.hits} hits, {cache.misses} misses, {cache.bypasses} bypassed",),
        advice="TORCHINDUCTOR_CACHE_DIR=a folder that lasts",
        formula="seconds spent compiling, where nothing was found in the cache",
        before="python serve.py",
        after="TORCHINDUCTOR_CACHE_DIR=/var/cache/inductor python serve.py",
        opportunity=True,
    )
