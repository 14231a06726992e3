"""The best way to serve a model that writes texts, under limits on the first token and on each after it.

What a step costs is measured on the engine, every number of texts at once and every part of prompts is simulated, and
the best are proven by load on a real server, by the protocol that clients speak. Where a test's steps took longer than
simulated (the server and the client compute, too), all costs are corrected and the settings are ranked anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fettle.errors import UsageError
from fettle.files import plain
from fettle.journal import Journal
from fettle.load.arrivals import poisson
from fettle.load.run import TextLimits, as_data
from fettle.load.texts import TextLine, text_requests
from fettle.measure import Load, Surroundings
from fettle.package.handlers.generate import Settings
from fettle.package.handlers.text import read_tokenizer
from fettle.package.manifest import Package
from fettle.package.settings import ServeSettings, powers
from fettle.slo.kept import Tested, open_journal, package_key
from fettle.slo.outcome import about_bound, torchserve_test
from fettle.slo.points import Failure, Outcome, Proven, Variant
from fettle.slo.proof import bracket, load_test_s, loaded
from fettle.slo.server_process import ServerFailure, ServerProcess
from fettle.slo.stopping import Stopped
from fettle.slo.text_costs import CHUNKS, TextCosts, calibrate_texts
from fettle.slo.text_simulation import Tables, simulate_texts, text_capacity
from fettle.units import count_text

TEXTS, PATIENCE_S = 200, 60.0
"""A load test has so many texts at least, where it is not too long; and so long it waits for what is being written."""
OFF, BEHIND = 1.1, 0.95
"""Costs that are off by more than this factor are corrected; a setting that is expected to serve less than this share
of what another has shown is not tested."""
Engine = tuple[str, int]
"""A package, by its name among the variants, and the threads of its engine."""


@dataclass(frozen=True)
class TextSetting:
    """One way to write texts."""

    rows: int
    """Texts at once."""
    chunk: int
    """Tokens of prompts that are computed between two tokens of others."""
    threads: int
    device: str = "cpu"
    variant: str = ""
    """Which of the packages; empty where there is one only."""

    @property
    def engine(self) -> Engine:
        """The part that costs are measured for."""
        return self.variant, self.threads

    def __str__(self) -> str:
        texts, threads = count_text(self.rows, "text"), count_text(self.threads, "thread")
        device = f" on {self.device}" if self.device != "cpu" else ""
        variant = f", {self.variant}" if self.variant else ""
        return f"{texts} at once, {self.chunk} tokens of prompts a step, {threads}{device}{variant}"


@dataclass
class TextPoint(Proven):
    """A setting with what was predicted, and what was measured where it was."""

    setting: TextSetting
    predicted: float
    """Texts a second at which both limits are kept."""
    memory_bytes: int
    """Memory of keys and values."""

    @property
    def order(self) -> tuple[bool, float, float]:
        """Less is better: measured before predicted."""
        return self.measured is None, -(self.measured or 0.0), -self.predicted


@dataclass
class TextSearch(Outcome[TextPoint]):
    """The outcome of a search under limits on tokens."""

    limits: TextLimits
    prompts: list[int]
    outputs: list[int]
    """Tokens of the texts that are asked for."""
    costs: dict[Engine, TextCosts] = field(default_factory=dict)
    scale: dict[Engine, float] = field(default_factory=dict)
    """The factor by which they were multiplied after load tests that contradicted them."""


async def search_texts(
    packages: Package | Sequence[Variant], lines: Sequence[TextLine], limits: TextLimits, *, rate: float = 0.0,
    headroom: float = 0.0, most_rows: int = 32, cores: int = 2, device: str = "cpu", seconds: float = 8.0,
    confirm: int = 3, keep: Path | None = None, on_progress: Callable[[str], None] = lambda text: None,
    stop: asyncio.Event | None = None,
) -> TextSearch:  # fmt: skip
    """Find the setting that keeps both limits at the greatest rate of texts like these, and of several packages of one
    model that which serves so.

    `keep` is a file in which everything measured is kept, so that a search that was killed measures nothing twice;
    `stop` ends it early, with what is known by then. Raises `UsageError` for a package that writes no texts.
    """
    began = time.monotonic()
    variants = packages if isinstance(packages, Sequence) else [Variant("", packages)]
    lines, prompts, note = fitting(variants[0].package, lines)
    result = TextSearch(limits, prompts, [line.max_tokens for line in lines], rate=rate, headroom=headroom)
    result.why += [note] if note else []
    journal = open_journal(keep)
    work = _Search(variants, lines, result, journal, on_progress, stop or asyncio.Event(), seconds)
    try:
        for variant in variants:
            for threads in sorted({cores, max(1, cores - 1)} if device == "cpu" else {1}):  # one left for the server
                await work.calibrate(most_rows, (variant.name, threads), device)
        if result.costs:
            work.rank(device)
            await work.confirm(confirm)
    except Stopped:
        result.interrupted = True
    finally:
        journal.close()
    result.points.sort(key=lambda point: point.order)
    result.why += explain(result)
    result.seconds = time.monotonic() - began
    return result


def fitting(package: Package, lines: Sequence[TextLine]) -> tuple[list[TextLine], list[int], str]:
    """The texts as the package has room for them, how many tokens their prompts have, and what was cut.

    Raises `UsageError`.
    """
    handler = package.manifest.handler
    if not isinstance(handler, Settings):
        raise UsageError(
            f"{package.manifest.name} writes no texts: `ttft` and `itl` are for a package with `handler=generate`"
        )
    tokenizer = read_tokenizer(package.folder) if any(isinstance(line.prompt, str) for line in lines) else None
    made, counts, cut = [], [], 0
    for line in lines:
        prompt: Any = line.prompt
        if isinstance(prompt, int):
            prompt = count = min(prompt, handler.max_tokens - 1)
        else:
            assert tokenizer is not None
            count = len(tokenizer.encode(prompt).ids)
        most = min(handler.max_new_tokens, handler.max_tokens - count)
        if most < 1 or not count:
            raise UsageError(f"a prompt of {count} tokens: {package.manifest.name} takes 1 to {handler.max_tokens - 1}")
        cut += prompt != line.prompt or line.max_tokens > most
        made.append(TextLine(prompt, min(line.max_tokens, most)))
        counts.append(count)
    room = f"{handler.max_tokens} tokens, of which {handler.max_new_tokens} may be new"
    return made, counts, f"{cut} of {len(lines)} texts were cut to the package's {room}" if cut else ""


class _Search:
    def __init__(
        self, variants: Sequence[Variant], lines: Sequence[TextLine], result: TextSearch, journal: Journal,
        on_progress: Callable[[str], None], stop: asyncio.Event, seconds: float,
    ) -> None:  # fmt: skip
        self.packages = {variant.name: variant.package for variant in variants}
        self.lines, self.result, self.journal = lines, result, journal
        self.on_progress, self.stop, self.seconds = on_progress, stop, seconds
        self.longest = max(map(sum, zip(result.prompts, result.outputs, strict=True)))
        self.failed: set[TextSetting] = set()
        self.around = Surroundings(stopped=stop.is_set)

    async def calibrate(self, most: int, engine: Engine, device: str) -> None:
        """What steps cost."""
        result, package, threads = self.result, self.packages[engine[0]], engine[1]
        prompt, most = max(result.prompts), min(most, package.manifest.max_rows)
        key = f"costs {package_key(package)} {device} {threads} threads {most} texts {prompt} {self.longest}"
        costs = self.journal.answer(key, TextCosts)
        if costs is None:
            costs = await asyncio.to_thread(
                calibrate_texts, package, most=most, prompt=prompt, whole=self.longest, threads=threads,
                device=device, on_progress=self.on_progress, around=self.around,
            )  # fmt: skip
            if costs.writing:  # memory may be free the next time
                self.journal.put(key, costs)
        if costs.writing and (costs.prompts or not costs.keeps):
            result.costs[engine], result.scale[engine] = costs, 1.0
            result.loads += map(Load.from_json, costs.loads)
        of = f"{engine[0]}: " if engine[0] else ""
        result.failures += [Failure(of + what, why) for what, why in costs.failures.items()]

    def rank(self, device: str) -> None:
        """Every setting, simulated; those that were tested keep what they showed."""
        result = self.result
        longest = max(result.prompts)
        known = {point.setting: point for point in result.points}
        settings = [
            TextSetting(count, chunk, threads, device, variant)
            for (variant, threads), costs in result.costs.items()
            for count in powers(costs.rows)
            for chunk in chunks_for(costs, longest)
        ]
        settings = [setting for setting in settings if setting not in self.failed]
        points = []
        for number, setting in enumerate(settings, 1):
            self._check()
            self.on_progress(f"setting {number} of {len(settings)} simulated")
            predicted = text_capacity(
                result.prompts, result.outputs, setting.rows, setting.chunk, self._tables(setting), result.limits
            )
            point = known.get(setting) or TextPoint(setting, 0.0, setting.rows * result.costs[setting.engine].row_bytes)
            point.predicted = predicted
            points.append(point)
        # What is predicted within 2% is as good as equal: fewer texts at once and shorter parts go first then.
        most = max(point.predicted for point in points)

        def place(point: TextPoint) -> tuple[float, int, int, int]:
            behind = math.floor(math.log(most / point.predicted) / 0.02) if point.predicted else math.inf
            return behind, point.setting.threads, point.setting.rows, point.setting.chunk

        result.points = sorted(points, key=place)

    async def confirm(self, most: int) -> None:
        """Prove the best ones; with what their steps took, rank again."""
        result = self.result
        for _ in range(most):
            shown = result.best.measured if result.best is not None else 0.0
            new = [point for point in result.points if not point.tests and point.predicted > BEHIND * (shown or 0.0)]
            if not new:
                return
            point = new[0]
            try:
                await self._prove(point, shown or 0.0)
            except ServerFailure as failure:
                result.failures.append(Failure(str(point.setting), str(failure)))
                result.points.remove(point)
                self.failed.add(point.setting)
                continue
            slower = [test.slower for test in point.tests if test.slower]
            if slower and not 1 / OFF < (off := statistics.median(slower)) < OFF:
                result.scale[point.setting.engine] *= off
                self.rank(point.setting.device)

    async def _prove(self, point: TextPoint, to_beat: float) -> None:
        """Open-loop tests around what was predicted."""
        result, setting = self.result, point.setting
        package = self.packages[setting.variant]
        settings = settings_with(package.settings, setting, result.costs[setting.engine])
        lengths = hashlib.sha256(np.array([result.prompts, result.outputs]).tobytes()).hexdigest()[:12]
        about = f"{result.limits.ttft_s:g}s {result.limits.itl_s:g}s {lengths}"

        def key(rate: float) -> str:
            seconds = load_test_s(rate, self.seconds, TEXTS)
            return f"test {package_key(package)} {setting} {rate:.6g}/s {seconds:.6g}s {about}"

        def on_test(rate: float) -> None:
            self._check()
            self.on_progress(f"{rate:.4g} texts/s on {setting}")

        await bracket(
            point, result, self.journal, point.predicted, to_beat, near=bool(to_beat), on_test=on_test, key=key,
            start=lambda: ServerProcess.start(package, settings, (), self.stop.is_set), around=self.around,
            test=lambda served, rate: self._test(served, setting, rate),
        )  # fmt: skip

    async def _test(self, served: ServerProcess, setting: TextSetting, rate: float) -> Tested:
        result = self.result
        due = poisson(rate, load_test_s(rate, self.seconds, TEXTS))
        requests = text_requests(served.url, self.lines, model=self.packages[setting.variant].manifest.name)
        run = await loaded(served, requests, due, limits=result.limits, patience_s=PATIENCE_S, stop=self.stop)
        inside = await served.stats()
        expected = simulate_texts(
            due, result.prompts, result.outputs, setting.rows, setting.chunk, self._tables(setting)
        )  # fmt: skip
        busy_s = inside.calls * inside.model_ms.mean / 1e3
        ttft, itl = float(np.percentile(expected.ttft_s, 99)) * 1e3, expected.itl_s(99) * 1e3
        slower = busy_s / expected.busy_s if busy_s and expected.stable else None
        return Tested(rate, run.held, as_data(run), inside, ttft if expected.stable else None, slower, itl)

    def _tables(self, setting: TextSetting) -> Tables:
        costs, scale = self.result.costs[setting.engine], self.result.scale[setting.engine]
        return Tables.of(costs, self.longest, setting.chunk, scale)

    def _check(self) -> None:
        if self.stop.is_set():
            raise Stopped


def chunks_for(costs: TextCosts, longest: int) -> Sequence[int]:
    """Tokens of prompts a step to try, where the longest prompt has so many."""
    if not costs.keeps:
        return [ServeSettings().prefill_tokens]
    chunks = CHUNKS[: 1 + sum(size < 2 * longest for size in CHUNKS)]
    return chunks if costs.in_parts else [size for size in chunks if size >= longest] or [longest]


def settings_with(settings: ServeSettings, setting: TextSetting, costs: TextCosts) -> ServeSettings:
    """A package's settings with a found one."""
    return msgspec.structs.replace(
        settings, max_rows=setting.rows, prefill_tokens=setting.chunk, cache_bytes=setting.rows * costs.row_bytes,
        workers=1, threads=setting.threads, delay_ms=0.0, devices=(setting.device,),
    )  # fmt: skip


def explain(result: TextSearch) -> list[str]:
    """What bounds the best setting, in words."""
    best, notes = result.best, []
    if result.points and best is None:
        notes.append("no load test kept the limits" if result.tests else "no setting keeps the limits by simulation")
    if best is None:
        if result.points and not any(point.predicted for point in result.points):
            alone = min(seconds for costs in result.costs.values() for cell, seconds in costs.writing if cell.rows == 1)
            notes.append(f"a token of one text alone takes {alone * 1e3:.4g} ms")
        return notes
    notes += about_bound(best)
    for name, change in (("rows", "texts at once"), ("chunk", "tokens of prompts a step")):
        own = getattr(best.setting, name)
        near = sorted(
            (getattr(point.setting, name), point.predicted)
            for point in result.points
            if replace(point.setting, **{name: own}) == best.setting
        )
        less = [value for size, value in near if size < own][-1:]
        more = [value for size, value in near if size > own][:1]
        parts = [f"{'half' if name == 'rows' else 'less'} would serve {less[0]:.4g}/s"] if less else []
        parts += [f"more {more[0]:.4g}/s"] if more else []
        if parts:
            notes.append(f"{own} {change}: predicted {best.predicted:.4g}/s, {', '.join(parts)}")
    tops: dict[str, TextPoint] = {}
    for point in result.points:
        tops.setdefault(point.setting.variant, point)
    notes += [f"{variant}, at best: predicted {point.predicted:.4g}/s"
              for variant, point in tops.items() if variant != best.setting.variant]  # fmt: skip
    slower = [test.slower for test in best.tests if test.slower]
    if slower:
        notes.append(f"steps took {statistics.median(slower):.2f} of what was simulated in its load tests")
    return notes


def texts_data(result: TextSearch, *, name: str, target: str, machine: str) -> dict[str, Any]:
    """The search as plain data."""
    best = result.best
    data: dict[str, Any] = plain({
        "kind": "texts", "name": name, "target": target, "machine": machine, "written": "",
        "ttft_limit_ms": result.limits.ttft_s * 1e3, "itl_limit_ms": result.limits.itl_s * 1e3,
        "rate": result.rate, "headroom": result.headroom, "met": result.met, "interrupted": result.interrupted,
        "best": result.points.index(best) if best is not None else None, "scale": list(result.scale.values()),
        "prompt_tokens": _lengths(result.prompts), "output_tokens": _lengths(result.outputs),
        "points": [{
            "setting": str(point.setting), "max_rows": point.setting.rows, "prefill_tokens": point.setting.chunk,
            "threads": point.setting.threads, "device": point.setting.device, "variant": point.setting.variant,
            "cache_bytes": point.memory_bytes,
            "predicted": point.predicted, "measured": point.measured,
            "tests": [msgspec.to_builtins(test) for test in point.tests],
        } for point in result.points],
        "costs": {
            "writing": [{"variant": variant, "threads": threads, "texts": cell.rows, "kept": cell.kept, "ms": s * 1e3}
                        for (variant, threads), costs in result.costs.items() for cell, s in costs.writing],
            "prompts": [{"variant": variant, "threads": threads, "tokens": cell.rows * cell.new, "kept": cell.kept,
                         "ms": s * 1e3}
                        for (variant, threads), costs in result.costs.items() for cell, s in costs.prompts],
        },
        "why": result.why, "failures": result.failures, "is_quiet": result.load.is_quiet, "load": result.load,
        "tests": result.tests, "tests_kept": result.tests_kept, "seconds": result.seconds,
    })  # fmt: skip
    return data


def texts_rows(result: TextSearch, name: str) -> list[dict[str, str]]:
    """Every load test in the columns of TorchServe's ``ab_report.csv``, best setting first."""
    return [torchserve_test(test, f"{name}, {point.setting}", "texts", point.setting.rows)
            for point in result.points for test in point.tests]  # fmt: skip


def _lengths(counts: Sequence[int]) -> dict[str, float]:
    return {"p50": float(np.median(counts)), "mean": float(np.mean(counts)), "max": float(np.max(counts))}
