"""What the trace benchmarks share: the reference in an environment of its own, and real traces made larger."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REFERENCE = "traceinsight==0.6.1"
HERE = Path(__file__).parent


def reference_python(given: str | None) -> str:
    """The interpreter that has the reference; made under bench/.reference on first use where none is given."""
    if given:
        return given
    folder = HERE / ".reference"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", REFERENCE], check=True)
    return str(python)


def read_events(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(data)
    events = document.pop("traceEvents")
    return document, events


def repeat(path: Path, target: Path, events_wanted: int) -> int:
    """Write a real trace again and again, shifted in time and in ids, until it has `events_wanted` events.

    Step marks are left out: the reference drops everything behind the last one, and takes longer the more there are.
    Returns the number of complete events.
    """
    document, events = read_events(path)
    body = [
        e for e in events if e.get("ph") in ("X", "s", "f") and not str(e.get("name", "")).startswith("ProfilerStep#")
    ]
    rest = [e for e in events if e.get("ph") == "M"]
    timed = [e for e in body if e.get("ph") == "X" and e.get("cat") != "Trace"]
    low = min(e["ts"] for e in timed)
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - low + 100
    ids = 1 + max(max(int((e.get("args") or {}).get(k, 0) or 0) for k in ("correlation", "External id")) for e in timed)
    complete = 0
    with target.open("w") as out:
        out.write(
            "{" + "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in document.items()) + '"traceEvents": [\n'
        )
        first, copy, written = True, 0, 0
        while written < events_wanted:
            for event in body:
                new = {**event, "ts": event["ts"] + copy * span}
                args = event.get("args")
                if args:
                    args = dict(args)
                    for key in ("correlation", "External id"):
                        if isinstance(args.get(key), int):
                            args[key] += copy * ids
                    new["args"] = args
                if isinstance(event.get("id"), int):
                    new["id"] = event["id"] + copy * ids
                out.write(("" if first else ",\n") + json.dumps(new))
                first = False
                complete += event["ph"] == "X"
            written += len(body)
            copy += 1
        out.write(",\n" + ",\n".join(json.dumps(e) for e in rest) + "\n]}\n")
    return complete


def child(python: str, code: str, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run code in a fresh process that prints one line of JSON last."""
    done = subprocess.run([python, "-c", code, *args], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1][:300]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
