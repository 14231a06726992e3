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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fettle.diagnose.compile_health import CacheHealth, CompileHealth, GraphBreak, LimitHit, Recompile, Specialised


def is_compiled(model: Any) -> bool:
    """Whether it is what `torch.compile` returned, or it or a module in it is compiled so, in place or by `forward`."""
    if isinstance(model, torch.nn.Module):
        return any(
            isinstance(part, torch._dynamo.OptimizedModule)
            or part._compiled_call_impl is not None
            or _is_compiled(getattr(part, "forward", None))
            for part in model.modules()
        )
    return _is_compiled(model)


def _is_compiled(function: Any) -> bool:
    disabled = getattr(function, "_torchdynamo_disable", False)  # by `torch.compiler.disable`
    return hasattr(function, "_torchdynamo_orig_callable") and not disabled


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
        watch.metrics = list(utils.get_compilation_metrics())
        for key, values in utils.counters.items():
            watch.counters[key] = Counter(values) - counters_before.get(key, Counter())


@dataclass
class CompileWatch:
    """What has been seen so far."""

    breaks: list[tuple[str, int, str, str]] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    wall_s: float = 0.0

    def health(self, **more: Any) -> CompileHealth:
        """Sum up; only after the block has ended."""
        runs = _compilations(self.metrics)
        items = {(file, line) for file, line, reason, _ in self.breaks if ".item()" in reason}
        return CompileHealth(
            breaks=tuple(GraphBreak(*key, count) for key, count in Counter(self.breaks).most_common()),
            recompiles=_recompiles(runs),
            specialised=_specialised(runs, items),
            limits=tuple({run.where: run.limit for run in runs if run.limit}.values()),
            errors=tuple(dict.fromkeys(run.error for run in runs if run.error)),
            compilations=sum(not run.failed for run in runs),
            graphs=int(self.counters.get("stats", Counter())["unique_graphs"]),
            compile_s=sum(run.seconds for run in runs),
            wall_s=self.wall_s,
            cache=_cache(self.counters),
            **more,
        )


_LIMIT = "recompile limit exceeded"


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
                return  # reported as a limit, with its guard
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


@dataclass(frozen=True)
class _Compilation:
    """One entry of dynamo's compilation metrics."""

    where: tuple[str, str, int]
    """Function, file and line."""
    guard: str
    """The check that failed on the newest version, without its number and comment; empty of a first compilation."""
    seconds: float
    failed: bool
    limit: LimitHit | None
    error: str
    """Why the frame could not be compiled at all, in one line; empty where it could, or the limit is the reason."""


def _compilations(metrics: Sequence[Any]) -> list[_Compilation]:
    def field(metric: Any, name: str) -> Any:
        return getattr(metric, name, None) or ""  # a field that this version lacks

    def frame(metric: Any) -> str:
        return str(field(metric, "compile_id")).split("/")[0]

    named = {frame(metric): metric for metric in metrics if field(metric, "co_name")}
    compilations = []
    for metric in metrics:
        # Failed compilations carry no place, but their function was compiled before.
        known = metric if field(metric, "co_name") else named.get(frame(metric), metric)
        where = (
            field(known, "co_name") or "?",
            field(known, "co_filename") or "?",
            int(field(known, "co_firstlineno") or 0),
        )
        first = (str(field(metric, "recompile_reason")).strip().splitlines() or [""])[0]
        guard = (
            re.sub(r"^\d+/\d+:\s*", "", first).split("  #")[0].strip() or first
        )  # 0/1: tensor 'x' size mismatch ...  # ...
        kind, reason = field(metric, "fail_type"), str(field(metric, "fail_reason"))
        limit, error = None, ""
        if kind and _LIMIT in reason:
            most = re.search(r"currently set to (\d+)", reason)
            limit = LimitHit(*where, guard, int(most[1]) if most else 0)
        elif kind:
            place = f"{field(metric, 'fail_user_frame_filename') or '?'}:{field(metric, 'fail_user_frame_lineno') or 0}"
            error = f"{place}: {kind}: {(reason.strip().splitlines() or [''])[0][:300]}"
        seconds = (field(metric, "duration_us") or 0) / 1e6
        compilations.append(_Compilation(where, guard, seconds, bool(kind), limit, error))
    return compilations


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


def _recompiles(runs: Sequence[_Compilation]) -> tuple[Recompile, ...]:
    """One for each function and check; values and sizes differ from one to the next, so they do not count apart."""
    by_place: dict[tuple[Any, ...], list[str]] = {}
    for run in runs:
        if run.guard and not run.failed:
            by_place.setdefault((*run.where, re.sub(_NUMBER, "#", run.guard)), []).append(run.guard)
    result = [
        Recompile(name, file, line, guards[0], _guard_kind(guards[0]), len(guards))
        for (name, file, line, _), guards in by_place.items()
    ]
    return tuple(sorted(result, key=lambda one: -one.count))


def _specialised(runs: Sequence[_Compilation], items: Collection[tuple[str, int]]) -> tuple[Specialised, ...]:
    by_variable: dict[tuple[str, int, str], dict[str, None]] = {}
    for run in runs:
        match = _EQUAL.match(run.guard)
        if match and _guard_kind(match[0]) == "value" and re.fullmatch(_NUMBER, match["value"]):
            by_variable.setdefault((*run.where[1:], match["name"]), {})[match["value"]] = None
    # A resume function's first line is that of the break it follows; its stack value is what `.item()` returned. Later
    # breaks in the same function pass it on under its own name.
    files = {file for file, _ in items}
    return tuple(
        Specialised(file, line, name, tuple(values)[:8], (file, line) in items or (file in files and "L[" not in name))
        for (file, line, name), values in by_variable.items()
    )


def _cache(counters: Mapping[str, Counter[str]]) -> CacheHealth:
    import torch._inductor.config as config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    inductor = counters.get("inductor", Counter())
    return CacheHealth(
        folder=folder,
        enabled=bool(getattr(config, "fx_graph_cache", True)) and not getattr(config, "force_disable_caches", False),
        hits=int(inductor["fxgraph_cache_hit"]),
        misses=int(inductor["fxgraph_cache_miss"]),
        bypasses=int(inductor["fxgraph_cache_bypass"]),
        temporary=Path(folder).is_relative_to(tempfile.gettempdir()),
    )
