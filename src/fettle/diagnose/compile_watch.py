"""Is `torch.compile` doing what it is thought to do, in this process?

    with watch_compile() as watch:
        compiled(batch)
    health = watch.health()

Breaks come from dynamo's own log records, the rest from its compilation metrics: written against torch 2.13; a
field that another version lacks is left empty.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fettle.diagnose.compile_health import (
    CacheHealth,
    CompileHealth,
    GraphBreak,
    LimitHit,
    Recompile,
    Specialised,
)


def is_compiled(model: Any) -> bool:
    """Whether it is what `torch.compile` returned."""
    import torch

    return isinstance(model, torch._dynamo.OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")


@contextlib.contextmanager
def watch_compile() -> Iterator[CompileWatch]:
    """Watch everything that dynamo compiles in this process while the block runs; ask for `health()` afterwards.

    It adds a log record to each graph break and nothing to a call. What was compiled before the block is not seen.
    """
    from torch._dynamo import utils

    watch = CompileWatch()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(10_000)  # 64 otherwise: fewer than a program that never settles makes
    counters_before = {key: Counter(values) for key, values in utils.counters.items()}
    loggers = [
        logging.getLogger(f"torch._dynamo.{name}.__graph_breaks") for name in ("symbolic_convert", "convert_frame")
    ]
    before = [(logger, logger.level, logger.propagate, logger.disabled) for logger in loggers]
    handler = _Breaks(watch)
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = logger.disabled = False
        # A program may have switched logging off, by `logging.disable` or a `dictConfig` that knows no dynamo.
        logger.isEnabledFor = lambda level: True  # type: ignore[method-assign]
    started = time.perf_counter()
    try:
        yield watch
    finally:
        watch.wall_s = time.perf_counter() - started
        for logger, level, propagate, disabled in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, disabled
            del logger.isEnabledFor
        watch.metrics = [_plain(metric) for metric in utils.get_compilation_metrics()]
        for key, values in utils.counters.items():
            watch.counters[key] = Counter(values) - counters_before.get(key, Counter())


@dataclass
class CompileWatch:
    """What has been seen so far."""

    breaks: list[tuple[str, int, str, str]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    wall_s: float = 0.0

    def health(self, **more: Any) -> CompileHealth:
        """Sum up; only after the block has ended."""
        places = {(m["compile_id"] or "").split("/")[0]: m for m in self.metrics if m["co_name"]}
        items = {(file, line) for file, line, reason, _ in self.breaks if ".item()" in reason}
        return CompileHealth(
            breaks=_breaks(self.breaks),
            recompiles=_recompiles(self.metrics, places),
            specialised=_specialised(self.metrics, places, items),
            limits=_limits(self.metrics, places),
            errors=_errors(self.metrics),
            compilations=sum(metric["fail_type"] is None for metric in self.metrics),
            graphs=int(self.counters.get("stats", Counter())["unique_graphs"]),
            compile_s=sum((metric["duration_us"] or 0) / 1e6 for metric in self.metrics),
            wall_s=self.wall_s,
            cache=_cache(self.counters),
            **more,
        )


_KEPT = (
    "compile_id",
    "co_name",
    "co_filename",
    "co_firstlineno",
    "recompile_reason",
    "fail_type",
    "fail_reason",
    "fail_user_frame_filename",
    "fail_user_frame_lineno",
    "duration_us",
)
_LIMIT = "recompile limit exceeded"


def _plain(metric: Any) -> dict[str, Any]:
    return {name: getattr(metric, name, None) for name in _KEPT}


class _Breaks(logging.Handler):
    """Takes dynamo's graph break records apart."""

    def __init__(self, watch: CompileWatch) -> None:
        super().__init__(logging.DEBUG)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a message of a new shape must not end the user's run
            text = record.getMessage()
            place = re.search(r"in user code at (.+?):(\d+)\n", text)
            reason, hint = _reason(text.partition("Graph Break Reason:")[2])
            if _LIMIT in text:
                return  # told as a limit, with its guard
            self.watch.breaks.append((place[1] if place else "?", int(place[2]) if place else 0, reason, hint))


def _reason(text: str) -> tuple[str, str]:
    """The sentence that says what is unsupported, and dynamo's first hint."""
    text = text.partition("User code traceback:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Encountered graph break when attempting")] or lines
    hint = next((line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")), "")
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    reason = lines[0] if lines else "no reason given"
    if explanation:
        reason += ": " + explanation.removeprefix("Explanation: ")
    return reason[:500], hint[:300]


def _breaks(seen: list[tuple[str, int, str, str]]) -> tuple[GraphBreak, ...]:
    return tuple(GraphBreak(*key, count) for key, count in Counter(seen).most_common())


def _guard(metric: Mapping[str, Any]) -> str:
    """The guard that failed on the newest version: `0/1: tensor 'x' size mismatch ...` without number and comment."""
    lines = str(metric["recompile_reason"] or "").splitlines()
    first = lines[0] if lines else ""
    return re.sub(r"^\d+/\d+:\s*", "", first).split("  #")[0].strip()


_NUMBER = r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)"
_EQUAL = re.compile(rf"^(?P<name>.+?) == (?P<value>{_NUMBER}|'[^']*'|True|False)$")


def _guard_kind(guard: str) -> str:
    if re.search(r"size mismatch|rank mismatch|stride mismatch|size\(\)|\.size|\.shape|len\(", guard):
        return "shape"
    if re.search(r"GLOBAL_STATE|grad_mode|autocast|requires_grad", guard):
        return "grad mode"
    if re.search(r"dtype mismatch|type mismatch|dispatch key|check_type_id|check_obj_id|type\(", guard):
        return "type"
    if _EQUAL.match(guard):
        return "module" if re.search(r"self\.\w|_modules|\.training", guard) else "value"
    return "other"


def _where(metric: Mapping[str, Any], places: Mapping[str, Mapping[str, Any]]) -> tuple[str, str, int]:
    """Function, file, line; failed compilations carry none, but their function was compiled before."""
    known = places.get((metric["compile_id"] or "").split("/")[0], metric) if not metric["co_name"] else metric
    return str(known["co_name"] or "?"), str(known["co_filename"] or "?"), int(known["co_firstlineno"] or 0)


def _recompiles(metrics: list[dict[str, Any]], places: Mapping[str, Mapping[str, Any]]) -> tuple[Recompile, ...]:
    """One for each function and check; values and sizes differ from one to the next, so they do not count apart."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for metric in metrics:
        if metric["recompile_reason"] and metric["fail_type"] is None:
            guard = _guard(metric)
            key = (*_where(metric, places), re.sub(_NUMBER, "#", guard))
            found.setdefault(key, []).append(guard)
    result = [
        Recompile(name, file, line, guards[0], _guard_kind(guards[0]), len(guards))
        for (name, file, line, _), guards in found.items()
    ]
    return tuple(sorted(result, key=lambda one: -one.count))


def _specialised(
    metrics: list[dict[str, Any]], places: Mapping[str, Mapping[str, Any]], items: set[tuple[str, int]]
) -> tuple[Specialised, ...]:
    found: dict[tuple[str, int, str], dict[str, None]] = {}
    for metric in metrics:
        match = _EQUAL.match(_guard(metric)) if metric["recompile_reason"] else None
        if match and _guard_kind(match[0]) == "value" and re.fullmatch(_NUMBER, match["value"]):
            _, file, line = _where(metric, places)
            found.setdefault((file, line, match["name"]), {})[match["value"]] = None
    # A resume function's first line is that of the break it follows; its stack value is what `.item()` returned. Later
    # breaks in the same function pass it on under its own name.
    files = {file for file, _ in items}
    return tuple(
        Specialised(file, line, name, tuple(values)[:8], (file, line) in items or (file in files and "L[" not in name))
        for (file, line, name), values in found.items()
    )


def _limits(metrics: list[dict[str, Any]], places: Mapping[str, Mapping[str, Any]]) -> tuple[LimitHit, ...]:
    found = {}
    for metric in metrics:
        reason = str(metric["fail_reason"] or "")
        if metric["fail_type"] and _LIMIT in reason:
            limit = re.search(r"currently set to (\d+)", reason)
            where = _where(metric, places)
            found[where] = LimitHit(*where, _guard(metric), int(limit[1]) if limit else 0)
    return tuple(found.values())


def _errors(metrics: list[dict[str, Any]]) -> tuple[str, ...]:
    lines: dict[str, None] = {}
    for metric in metrics:
        reason = str(metric["fail_reason"] or "")
        if metric["fail_type"] and _LIMIT not in reason:
            place = f"{metric['fail_user_frame_filename'] or '?'}:{metric['fail_user_frame_lineno'] or 0}"
            lines[f"{place}: {metric['fail_type']}: {(reason.strip().splitlines() or [''])[0][:300]}"] = None
    return tuple(lines)


def _cache(counters: Mapping[str, Counter[str]]) -> CacheHealth:
    import torch._inductor.config as config

    folder = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_cache())
    inductor = counters.get("inductor", Counter())
    temporary = Path(folder).is_relative_to(tempfile.gettempdir())
    return CacheHealth(
        folder=folder,
        enabled=bool(getattr(config, "fx_graph_cache", True)) and not getattr(config, "force_disable_caches", False),
        hits=int(inductor["fxgraph_cache_hit"]),
        misses=int(inductor["fxgraph_cache_miss"]),
        bypasses=int(inductor["fxgraph_cache_bypass"]),
        temporary=temporary,
    )


def _default_cache() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(default_cache_dir())
