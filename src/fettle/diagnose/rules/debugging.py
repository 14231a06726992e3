"""The rule `debugging`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Anomaly detection, determinism or a profiler left on."""
    names = {
        "anomaly": "autograd's anomaly detection",
        "deterministic": "deterministic algorithms",
        "profiler": "a profiler",
    }
    on = [text for key, text in names.items() if seen.settings.get(key) == "True"]
    if not on:
        return None
    tried = [seen.variants[name] for name in ("anomaly=off", "deterministic=off") if name in seen.variants]
    told = [f"the same call without took {saved:.0%} less" for saved, _, _ in tried if saved > 0]
    return Finding(
        "debugging",
        f"{' and '.join(on)} left on.",
        bound=min(0.999, max((high for _, _, high in tried), default=0.9)),
        evidence=(*(f"{text} is on after the workload is built" for text in on), *told),
        advice="switch it off outside debugging",
        formula="upper end of what switching it off saved when it was tried",
        before="torch.autograd.set_detect_anomaly(True)",
        after="torch.autograd.set_detect_anomaly(False)",
    )
