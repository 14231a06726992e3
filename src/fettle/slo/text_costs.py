"""What writing texts costs on the real engine, without HTTP: a step by its texts and what they keep, and prompts.

The engine of a server's worker (`fettle.package.handlers.running`) is timed in a process of its own. What is kept of a
text is declared to be there instead of computed: a step takes as long over zeros.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fettle.errors import UsageError
from fettle.files import plain
from fettle.measure import Surroundings
from fettle.package.manifest import Package
from fettle.package.settings import powers
from fettle.procs.child import ChildError, Request
from fettle.procs.parent import Parent, be_a_worker
from fettle.slo.calibrate import ANSWER_S, START_S
from fettle.slo.stopping import Stoppable, Stopped
from fettle.units import count_text

Array = np.ndarray[Any, Any]
SECONDS = 0.3
"""Least time of each cell."""
LEAST_KEPT = 16
"""The engine computes shorter beginnings anew, whatever is said to be there."""
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of prompts between two tokens of others' texts that are tried."""
GRAIN = 16
"""The tables of a simulation know what is kept to so many tokens."""


class Cell(msgspec.Struct, frozen=True):
    """A step of `rows` texts, each with new tokens after those that are kept."""

    rows: int
    new: int
    kept: int


class TextCosts(msgspec.Struct, dict=True):
    """Seconds of the engine's steps on one machine."""

    rows: int = 0
    """The most texts at once that were tried and fit into memory."""
    row_bytes: int = 0
    """Bytes of the keys and values of one text at full length; 0 where nothing is kept."""
    keeps: bool = True
    """Whether keys and values are kept: else each step computes whole texts, and there is no prefill."""
    writing: list[tuple[Cell, float]] = []
    """A token for each of so many texts: medians."""
    prompts: list[tuple[Cell, float]] = []
    """Medians by tokens of prompts."""
    spread: list[float] = []
    """All times over the median of their cell."""
    loads: list[dict[str, Any]] = []
    """What others had of the machine meanwhile: a `Load` of each cell, as plain data."""
    failures: dict[str, str] = {}
    """Why, by what was tried."""
    in_parts: bool = True
    """Whether prompts are computed in parts: an encoder reads them at once."""

    def writing_table(self, longest: int) -> list[list[float]]:
        """Seconds of a step by texts (from 0) and by what the longest keeps, in steps of `GRAIN`."""
        counts = sorted({cell.rows for cell, _ in self.writing})
        grid = np.arange(0, longest + 2 * GRAIN, GRAIN)
        by_count = []
        for count in counts:
            points = sorted((cell.kept, seconds) for cell, seconds in self.writing if cell.rows == count)
            by_count.append(_line(grid, *zip(*points, strict=True)))
        rows = np.arange(1, max(counts) + 1)
        columns = [np.interp(rows, counts, column) for column in np.array(by_count).T]
        return [[], *np.array(columns).T.tolist()]

    @cached_property
    def _alone(self) -> tuple[Array, Array]:
        """Tokens of prompts after nothing, and seconds."""
        points = sorted((cell.rows * cell.new, seconds) for cell, seconds in self.prompts if not cell.kept)
        return np.array([tokens for tokens, _ in points]), np.array([seconds for _, seconds in points])

    @cached_property
    def looking_s(self) -> float:
        """What each pair of a prompt's token and one that is kept adds to `prompt_table`."""
        more = [
            (seconds - float(_line(np.array([cell.new]), *self._alone)[0])) / (cell.new * cell.kept)
            for cell, seconds in self.prompts
            if cell.kept
        ]
        return max(0.0, statistics.median(more)) if more else 0.0

    def prompt_table(self, most: int) -> list[float]:
        """Seconds of up to so many tokens of prompts, from 0, after nothing."""
        seconds: list[float] = _line(np.arange(most + 1), *self._alone).tolist()
        return seconds


def _line(places: Array, known: Any, values: Any) -> Array:
    """Between what is known on lines, beyond it along the last one, and never below nothing."""
    known, values = np.asarray(known, float), np.asarray(values, float)
    times = np.interp(places, known, values)
    if len(known) > 1:
        slope = max(0.0, float((values[-1] - values[-2]) / (known[-1] - known[-2])))
        times = times + slope * np.maximum(0, places - known[-1])
    return np.asarray(np.maximum(times, 1e-9))


def cells(rows: int, prompt: int, whole: int, *, keeps: bool, in_parts: bool = True) -> tuple[list[Cell], list[Cell]]:
    """What to time: of writing, and of prompts up to `prompt` tokens, of texts up to `whole` tokens."""
    lengths = sorted({min(whole, LEAST_KEPT), whole // 2, max(1, whole - 1)} - {0})
    writing = [Cell(count, 1, kept) for count in powers(rows) for kept in lengths]
    if not keeps:
        return writing, []
    prompts = []
    for tokens in sorted({1, LEAST_KEPT, 64, 256, 1024, prompt}):
        several = min(rows, max(1, tokens // prompt))
        cell = Cell(several, min(tokens, prompt), 0)
        if cell not in prompts:
            prompts.append(cell)
    if in_parts:
        prompts += [Cell(1, new, prompt - new) for new in (LEAST_KEPT, 64, 256) if prompt - new >= LEAST_KEPT]
    return writing, prompts


def calibrate_texts(
    package: Package, *, most: int, prompt: int, whole: int, threads: int = 1, device: str = "cpu",
    on_progress: Callable[[str], None] = lambda text: None, around: Surroundings | None = None,
) -> TextCosts:  # fmt: skip
    """Time steps of up to `most` texts of up to `whole` tokens, of which prompts have up to `prompt`.

    What fails is kept with its reason, and nothing larger is tried. A cell that others disturbed is timed again once
    they are gone, as far as `around` waits for that. Raises `Stopped` once it is stopped.
    """
    costs, around = TextCosts(), around or Surroundings()
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}  # as a server's workers have
    with Stoppable("fettle.slo.text_costs", variables, around.stopped) as child:
        tried = "loading"
        try:
            costs = child.call(_Load(str(package.folder), threads, device, most), TextCosts, START_S)
            writing, prompts = cells(costs.rows, prompt, whole, keeps=costs.keeps, in_parts=costs.in_parts)
            for name, todo, into in (("prompts", prompts, costs.prompts), ("writing", writing, costs.writing)):
                for number, cell in enumerate(todo, 1):
                    if around.stopped():
                        raise Stopped
                    rows, new = count_text(cell.rows, "text"), count_text(cell.new, "token")
                    tried = f"{name}, {rows} with {new} after {cell.kept}"
                    on_progress(f"cost of {tried}: {number} of {len(todo)}")
                    time_cell = partial(child.call, _Time(cell, SECONDS), list[float], ANSWER_S)
                    samples, load = around.watched(time_cell)
                    costs.loads.append(plain(load))
                    middle = statistics.median(samples)
                    into.append((cell, middle))
                    costs.spread += [value / middle for value in samples]
        except (ChildError, UsageError) as failure:  # no room for one text, say: another package may have it
            costs.failures[tried] = str(failure)
    costs.writing = _whole(costs.writing)
    costs.rows = max((cell.rows for cell, _ in costs.writing), default=0)
    return costs


def _whole(points: Iterable[tuple[Cell, float]]) -> list[tuple[Cell, float]]:
    """Without the number of texts at which a length is missing."""
    by_rows: dict[int, list[tuple[Cell, float]]] = {}
    for cell, seconds in points:
        by_rows.setdefault(cell.rows, []).append((cell, seconds))
    most = max(map(len, by_rows.values()), default=0)
    return [pair for pairs in by_rows.values() if len(pairs) == most for pair in pairs]


# -- in the process ----------------------------------------------------------------------------------------------------


class _Load(Request, tag="loading"):
    folder: str
    threads: int
    device: str
    rows: int


class _Time(Request, tag="timing"):
    cell: Cell
    seconds: float


class _Worker:
    running: Any

    def answer(self, request: _Load | _Time) -> object:
        return self._load(request) if isinstance(request, _Load) else self._timed(request.cell, request.seconds)

    def _load(self, load: _Load) -> TextCosts:
        """Costs that know nothing yet but what there is room for."""
        import torch

        from fettle.package.handler import find_handler
        from fettle.package.manifest import open_package
        from fettle.package.model_runner import ModelRunner

        torch.set_num_threads(load.threads)
        package = open_package(Path(load.folder))
        handler = find_handler(package, ModelRunner(package, load.device), "")
        running = handler.running(load.rows, 0, 1 << 30)
        if running is None:
            raise UsageError("this model generates no text")
        self.running = running
        settings = running.handler.settings  # where answers are one token long, there would be no step to time
        running.handler.settings = msgspec.structs.replace(settings, max_new_tokens=settings.max_tokens)
        kept = running.cache
        row_bytes, in_parts = kept.nbytes // running.rows if kept is not None else 0, not running.handler.begins
        return TextCosts(running.rows, row_bytes, kept is not None, in_parts=in_parts)

    def _begin(self, cell: Cell) -> int:
        """Let texts join; how many tokens each may still get."""
        from fettle.package.handlers.asking import Ask
        from fettle.package.handlers.sampling import Sampling

        running, settings = self.running, self.running.handler.settings
        length = max(1, min(cell.kept + cell.new, settings.max_tokens - 4))
        known = min(240, running.handler.tokenizer.get_vocab_size())
        tokens = tuple(int(token) for token in np.random.default_rng(0).integers(0, known, length))
        running.texts.clear()
        for row in range(cell.rows):
            if running.cache is not None:
                running.cache.holds(row, tokens, cell.kept)
            running.add(row, Ask(tokens=tokens, sampling=Sampling(temperature=0.0, ignore_eos=True)))
        return int(running.texts[0].left)

    def _timed(self, cell: Cell, seconds: float) -> list[float]:
        samples: list[float] = []
        end = time.perf_counter()
        for turn in range(400):
            left = self._begin(cell)
            if cell.new > 1 or not cell.kept:
                samples.append(self._step())
            else:
                self._step()  # what the prompts lack
                samples += [self._step() for _ in range(min(16, left - 1))]
            if turn == 0:
                end, samples = time.perf_counter() + seconds, samples[-1:]  # what came first may have been compiled
            elif time.perf_counter() > end and len(samples) >= 6:
                break
        self.running.texts.clear()
        return samples[1:] or samples

    def _step(self) -> float:
        began = time.perf_counter()
        encoded: list[bytes] = []

        def on_piece(number: int, piece: Any) -> None:
            if isinstance(piece, Exception):
                raise piece
            encoded.append(msgspec.json.encode(piece))

        self.running.step(on_piece)
        return time.perf_counter() - began


if __name__ == "__main__":
    be_a_worker()
    Parent().serve(_Load | _Time, _Worker().answer)
