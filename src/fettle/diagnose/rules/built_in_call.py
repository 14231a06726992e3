"""The rule `built-in-call`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """A model, or a part of it, that is built on every call."""
    if not seen.built:
        return None
    count = sum(seen.built.values())
    places = sorted(seen.built, key=lambda line: -seen.built[line])[:4]
    # Nobody knows what a constructor does, and weights just written are in no cache: of the call, surely still needed
    # are the loader, and the products at their peak.
    return Finding(
        "built-in-call",
        f"Modules are built on every call: {count} parameter{'s' if count > 1 else ''}.",
        bound=min(0.999, 1 - seen.share(seen.ideal_s() + seen.loading.seconds)),
        where=tuple(line for line in places if line),
        evidence=tuple(f"{line or 'no line known'}: parameters made there: {seen.built[line]}" for line in places),
        advice="build them once, outside the call",
        formula="(call - products at the measured peak - loader) / call",
        before="def predict(x):\n    return Net()(x)",
        after="net = Net()\n\ndef predict(x):\n    return net(x)",
    )
