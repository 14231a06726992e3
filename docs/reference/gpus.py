"""The page of what was measured on GPUs, made when the documentation is built from what `make gpu-bench` wrote into
`bench/results` (a hook of mkdocs)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add the page."""
    files.append(File.generated(config, "reference/gpus.md", content=gpus()))
    return files


def gpus(results: Path = RESULTS) -> str:
    """What was measured on GPUs, file by file."""
    parts = [
        "# On GPUs", "",
        "The tables of what `make gpu-bench` wrote into `bench/results`, GPU by GPU. [What they come "
        "to](../measured.md#on-a-gpu). Times are medians, ratios those of rounds in turn.",
    ]  # fmt: skip
    folders = [path.parent for path in sorted(results.glob("*/about.json"))]
    for folder in folders:
        parts += ["", f"## {folder.name}", "", f"{json.loads((folder / 'about.json').read_text())['machine']}."]
        for path in sorted(folder.glob("*.json")):
            made = json.loads(path.read_text())
            table = next((rows(made) for key, rows in _TABLES.items() if key in made or key == path.stem), None)
            if made.get("failure"):
                parts += ["", f"### {path.stem}", "", "It failed."]
            elif table:
                parts += ["", f"### {path.stem}", "", *_note(made), *table]
    return "\n".join([*parts, *([] if folders else ["", "No GPU has been at hand yet."])]) + "\n"


def _note(made: Mapping[str, Any]) -> list[str]:
    note = made.get("note", "")
    return [f"{note[:1].upper()}{note[1:]}.", ""] if note else []


def _said(value: float | None, form: str = ".3g") -> str:
    return "" if value is None else format(value, form)


def _ladder(made: Mapping[str, Any]) -> list[str]:
    rows = ["| recipe | s | times as fast, lowest to highest | peak, GiB | metric |", "| --- | --: | --- | --: | --: |"]
    for recipe, one in made["recipes"].items():
        if one["seconds"]:
            middle, found = statistics.median(one["speedups"]), one["speedups"]
            peak = (one["loaded_bytes"] + one["peak_bytes"]) / 2**30
            rows.append(
                f"| {f'`{recipe}`' if recipe else 'as given'} | {_said(statistics.median(one['seconds']))} | "
                f"{middle:.2f} ({min(found):.2f} to {max(found):.2f}) | {peak:.2f} | "
                f"{_said(one['metric'], '.4g')} |"
            )
    return rows


def _tuned(made: Mapping[str, Any]) -> list[str]:
    rows = ["| | recipe | ms | fettle is faster by | error |", "| --- | --- | --: | --- | --: |"]
    for name, one in {"fettle": made["fettle"], **made["peers"]}.items():
        middle, low, high = one["fettle_is_faster_by"] or (None, None, None)
        rows.append(
            f"| {name} | `{one['recipe'] or 'baseline'}` | {_said(one['ms'])} | "
            f"{_said(middle)} [{_said(low)}, {_said(high)}] | {_said(one['error'], '.2g')} |"
        )
    return rows


def _attention(made: Mapping[str, Any]) -> list[str]:
    rows = ["| attention | way | ms | peak, MiB | error |", "| --- | --- | --: | --: | --: |"]
    for case, ways in made.get("cases", made).items():
        for way, one in ways.items() if isinstance(ways, dict) else ():
            if "median_ms" in one:
                size = one["peak_bytes"] / 2**20
                rows.append(f"| {case} | {way} | {one['median_ms']:.3g} | {size:.0f} | {one['error']:.2g} |")
    return rows


_TABLES: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "recipes": _ladder, "peers": _tuned, "attention": _attention, "table": lambda made: made["table"],
}  # fmt: skip
"""By what a file holds, or its name."""
