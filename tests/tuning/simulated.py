"""A study whose machine, processes and clock are made up: the real session, race and statistics, no time and no model.

`World` says what each recipe takes; its workers answer at once and move its clock instead. So what a study costs (in
processes, rounds and seconds of that clock) and how often it is right can be counted, the same on every machine.
"""

import importlib
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from fettle.measure import Accuracy, WorkerError, _candidates, _rounds, _watch
from fettle.measure.messages import Asked, Built, Judged, Prepare, Prepared, Reference, Settle, SliceTaken, TakeSlice
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.search import Space
from fettle.techniques import CATALOGUE, Facts
from fettle.tuning import Options, _budget
from fettle.tuning._final_race import FinalRace, final_race
from fettle.tuning._probe import MemoryPlan, Probed
from fettle.tuning.session import Session
from fettle.tuning.space import space_for
from fettle.workload import Target


class World:
    """One workload on one machine. Times are those of the truth: a process has luck, a round has noise."""

    def __init__(
        self,
        time_ms: Callable[[Recipe], float],
        ready_s: Callable[[Recipe], float] = lambda recipe: 1.0,
        *,
        process_s: float = 3.0,
        luck: float = 0.01,
        noise: float = 0.02,
        seed: int = 0,
        error: Callable[[Recipe], float] = lambda recipe: 0.0,
        neighbour: Callable[[float], float] = lambda now: 0.0,
        beside: Callable[[Recipe], float] = lambda recipe: 4.0,
        tells: Callable[[Recipe], bool] = lambda recipe: True,
    ) -> None:
        self.time_ms, self.ready_s, self.process_s, self.error = time_ms, ready_s, process_s, error
        self.luck, self.noise = luck, noise
        self.neighbour, self.beside = neighbour, beside
        """What a neighbour has of one of two cores at a moment, and how many times longer a recipe takes beside it."""
        self.tells = tells
        """Whether a recipe's threads, held apart beside a neighbour, show what a call takes alone."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.started: list[str] = []
        """The recipe of each process, in the order they were started."""
        self.slices = 0
        self.others_s = self.own_s = 0.0
        self.compiled: set[str] = set()
        self.alive: set[int] = set()
        self.room = math.inf
        """Processes that fit into memory."""

    def install(self, monkeypatch) -> None:
        """Let the rooms of measuring and tuning live in this world."""
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        for module in (_candidates, importlib.import_module("fettle.measure.race"), _rounds, _watch, _budget):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(_watch, "read_machine", self.reading)
        monkeypatch.setattr(_candidates, "Worker", lambda *args, **kwargs: _Worker(self))
        monkeypatch.setattr(_candidates, "_memory_is_short", lambda running: False)

    def sleep(self, seconds: float) -> None:
        self.others_s += seconds * self.neighbour(self.now)
        self.now += seconds

    def reading(self) -> _watch.Reading:
        return _watch.Reading(self.now, self.now, busy_s=self.others_s + self.own_s, cores=2)


_PIDS = itertools.count(1)


class _Worker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.luck = world.random.gauss(0, world.luck)
        self.pid = next(_PIDS)
        world.alive.add(self.pid)

    def send(self, request: Asked) -> None:
        self.sent, self.sent_at = request, self.world.now

    def finish(self, answer: type, timeout_s: float):
        if isinstance(self.sent, Prepare):  # beside others, each with cores of its own
            now, self.world.now = self.world.now, self.sent_at
            try:
                self.prepared = self.ask(self.sent, Prepared, timeout_s + now - self.sent_at)
                return Judged(seconds=self.world.now - self.sent_at)
            finally:
                self.world.now = max(now, self.world.now)
        self.world.now += min(self.world.process_s, timeout_s)
        if self.world.process_s > timeout_s:
            raise WorkerError("timed out", "timeout")
        return Built(load_s=0.1, fingerprint="made up", structure="", name="made up", mode="inference")

    def ask(self, request: Prepare | Settle | TakeSlice, answer: type, timeout_s: float):
        world = self.world
        if isinstance(request, Settle):
            return self.prepared
        if isinstance(request, Prepare):
            self.recipe = Recipe.parse(request.label)
            if len(world.alive) > world.room:
                raise WorkerError("out of memory: CUDA out of memory", "memory")
            world.started.append(request.label)
            self.ms = world.time_ms(self.recipe)
            warm = request.label in world.compiled
            first_s = world.ready_s(self.recipe) * (0.4 if warm else 1.0)
            seconds = first_s + 5 * self.ms / 1e3 + 0.3
            if seconds > timeout_s:
                world.now += timeout_s
                raise WorkerError("timed out", "timeout")
            world.now += seconds
            world.compiled.add(request.label)
            expensive = world.ready_s(self.recipe) > 5
            return Prepared(
                load_s=0.1, optimize_s=0.1, first_call_s=first_s, samples=1, peak_bytes=1 << 20,
                cache=("warm" if warm else "cold") if expensive else "", device="cpu", gpu="",
                accuracy=Accuracy(world.error(self.recipe), 1.0, 0.0, 1.0, finite=True, judged_batches=2),
                call_ns=int(self.ms * 1e6), notes=[], learned={},
            )  # fmt: skip
        busy = world.neighbour(world.now)
        slower = 1 + (world.beside(self.recipe) - 1) * busy
        ms = self.ms * math.exp(self.luck + world.random.gauss(0, world.noise))
        seconds = max(request.seconds, ms * slower / 1e3)
        world.sleep(seconds + 0.01)
        world.own_s += 2 * seconds * (1 - busy / 2)
        world.slices += 1
        # Threads that share a core tell no time without waiting; held apart they do, but for an error of the recipe.
        told = (request.apart and world.tells(self.recipe)) or not busy
        off = random.Random(str(self.recipe)).gauss(0, 0.06) * math.log(slower)
        return SliceTaken(
            samples_ns=[int(ms * slower * 1e6)], unhindered_ns=ms * math.exp(off) * 1e6 if told else math.nan,
            waits=0.8 * busy, cpu_s=2 * seconds * (1 - busy / 2), energy_j=None,
        )  # fmt: skip

    def pause(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        """It has not ended."""

    def kill(self) -> None:
        self.world.alive.discard(self.pid)

    def close(self) -> None:
        self.kill()


class _Study:
    """What a session asks of a study, kept in memory."""

    def __init__(self) -> None:
        self.notes: dict = {}

    def add(self, trial, mode) -> None:
        pass

    def note(self, key):
        return self.notes.get(key)

    def set_note(self, key, value) -> None:
        self.notes[key] = value


LEVELS = {
    "grad": ["grad", "inference_mode"],
    "matmul": ["highest", "medium"],
    "precision": ["fp32", "bf16", "autocast-bf16"],
    "compile": ["off", "default"],
    "freeze": ["off", "on"],
    "runtime": ["torch", "openvino-bf16", "onnxruntime"],
    "channels_last": ["off", "on"],
}


def made_up_space() -> tuple[Space, Facts]:
    """Much of the factorial of ``bench/search_regret.py digits`` on a machine with every runtime: 52 combinations."""
    facts = Facts(
        num_conv=5, num_linear=1, num_4d_inputs=1, samples=128, train_mode_differs=True, training=True,
        physical_cores=2, calibration_batches=2, num_input_shapes=1, cpu_flags=("avx512f", "avx512_bf16", "amx_bf16"),
        packages={"openvino": "2026.4", "onnxruntime": "1.31", "onnx": "1.2", "onnxscript": "1"},
    )  # fmt: skip
    given = {technique.name: [technique.default] for technique in CATALOGUE if "inference" in technique.modes}
    levels = {**given, **LEVELS}
    del levels["mode"]
    return space_for(facts, levels)[0], facts


def session_in(
    world: World, folder: Path, budget_s: float | None, facts: Facts, on_progress=lambda event: None
) -> Session:
    """A session that was just opened in this world."""
    target = Target("made/up.py:workload", name="made up")
    session = Session(
        target, Options(limits=Limits(0.02), budget_s=budget_s, output=folder), on_progress, started=world.now
    )
    session.rules = replace(session.rules, may_go_first=False)
    session.patience.left_s = 0.6 * session._may_wait_s
    reference = Reference(dtype="float64", seconds=0.0)
    session.study = _Study()  # type: ignore[assignment]
    path = str(folder / "reference.pt")
    session.probed_as(Probed(facts, False, {}, (), reference, {}, "made up", path))
    session.plan = MemoryPlan()
    session.facts = facts
    return session


def study(world: World, session: Session, space, design) -> FinalRace:
    """What `tune` does between the probe and the outcome."""
    space = replace(space, cost=session.costs.of)
    session.measure([Recipe()])
    design(space, session)
    return final_race(session, space)
