"""What torch.compile makes of a workload: graph breaks, recompiles, values it specialised on, the limit it hit.

Traced with the eager backend, so that it costs seconds: graph breaks and guards are decided before any code is
generated. The figures come from dynamo's own compilation metrics and counters.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fettle.diagnose.evidence import CompileHealth
from fettle.errors import first_line

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


def check_compile(run: Callable[[Any, Any], Any], model: Any, batches: Sequence[Any], rounds: int = 2) -> CompileHealth:
    """Compile `model` with the eager backend and call ``run(model, batch)`` for all batches, `rounds` times."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    counters.clear()
    began = time.perf_counter()
    places: Counter[tuple[str, str]] = Counter()
    problem = ""
    limit = torch._dynamo.config.recompile_limit
    try:
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad(), _breaks_into(places):
            for _ in range(rounds):
                for batch in batches:
                    torch.manual_seed(0)
                    run(compiled, batch)
    except Exception as error:
        problem = first_line(error)
    seconds = time.perf_counter() - began
    metrics = list(torch._dynamo.utils.get_compilation_metrics())
    recompiles = [(m.co_name or "?", _guard(m.recompile_reason)) for m in metrics if m.recompile_reason]
    limit_hit = any("recompile limit" in key.lower() for key in counters["unimplemented"]) or any(
        int(m.compile_id.rpartition("/")[2]) >= limit for m in metrics if m.compile_id and "/" in m.compile_id
    )
    if not places:  # older spellings of the log: the counter has the reasons without the places
        for reason, count in counters["graph_break"].items():
            places[first_line(reason), ""] += count
    torch._dynamo.reset()
    return CompileHealth(
        graphs=int(counters["stats"].get("unique_graphs", 0)),
        breaks=[(reason, place, count) for (reason, place), count in places.most_common()],
        recompiles=recompiles,
        limit_hit=limit_hit,
        specialised=sorted({guard for _, guard in recompiles if re.search(r"== -?\d", guard)}),
        seconds=seconds,
        cache_persists=os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") != "1"
        and os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE") != "0",
        problem=problem,
    )


class _breaks_into:  # a context manager, named as one
    """Collect the places of graph breaks from dynamo's own log artifact."""

    def __init__(self, places: Counter[tuple[str, str]]) -> None:
        self.places = places

    def __enter__(self) -> None:
        import logging

        torch._logging.set_logs(graph_breaks=True)
        places = self.places

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                text = record.getMessage()
                if "Graph break" not in text:
                    return
                lines = _PLACE.findall(text)
                own = [f"{p.rpartition('/')[2]}:{n}" for p, n in lines if "/torch/" not in p and "/fettle/" not in p]
                reason = re.search(r"(?:Explanation|Reason): ?(.+)", text) or re.search(r"Graph break[^\n]*", text)
                places[reason.group(reason.lastindex or 0).strip()[:160] if reason else "", own[-1] if own else ""] += 1

        self.handler = Handler()
        self.loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if _is_breaks(name)]
        self.loggers = self.loggers or [logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")]
        self.before = [(logger, logger.propagate, list(logger.handlers)) for logger in self.loggers]
        for logger in self.loggers:
            logger.handlers = [self.handler]
            logger.propagate = False

    def __exit__(self, *_: object) -> None:
        torch._logging.set_logs()
        for logger, propagate, handlers in self.before:
            logger.handlers, logger.propagate = handlers, propagate


def _is_breaks(name: str) -> bool:
    return name.startswith("torch._dynamo") and name.endswith("__graph_breaks")


def _guard(reason: str) -> str:
    """The failed guard of a recompile reason, on one line."""
    lines = [line.strip(" -") for line in reason.strip().splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return re.sub(r"^\d+/\d+: ", "", text)[:200]
