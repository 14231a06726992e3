"""What `torch.compile` did with a program: plain data, from `watch_compile` or `compile_health`.

Graph breaks with their source line, recompilations with the guard that failed, Python numbers that the compiled code
was specialised for, functions that hit the recompile limit (from then on they run eagerly, after one warning), the time
spent compiling, and whether the compile cache keeps its results for the next process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphBreak:
    """A line that dynamo could not take into a graph: the code before and after it is compiled apart."""

    file: str
    line: int
    reason: str
    hint: str
    count: int
    """How many times dynamo broke there while compiling: once for each compiled variant of the function."""


@dataclass(frozen=True)
class Recompile:
    """A function compiled again because a guard of all earlier versions failed."""

    function: str
    file: str
    line: int
    guard: str
    """The check that failed, as dynamo words it."""
    kind: str
    """shape, value, type, module, grad mode, or other."""
    count: int


@dataclass(frozen=True)
class Specialised:
    """Compiled code that is good for one Python number only, usually one that came from `.item()`."""

    file: str
    line: int
    name: str
    values: tuple[str, ...]
    """Values that were compiled for, at most eight."""
    from_item: bool
    """Whether the function was entered through a graph break at `.item()`."""


@dataclass(frozen=True)
class LimitHit:
    """A function that is no longer compiled, because it was compiled too often. It runs eagerly."""

    function: str
    file: str
    line: int
    guard: str
    limit: int


@dataclass(frozen=True)
class CacheHealth:
    """Whether the next process has to compile again."""

    folder: str
    enabled: bool
    hits: int
    misses: int
    bypasses: int
    """Graphs that cannot be cached at all."""
    temporary: bool
    """The folder is under the system's temporary folder: it may not outlive a reboot, a container does not keep it."""

    @property
    def persists(self) -> bool:
        """What was compiled was saved or found, in a folder that lasts."""
        return self.enabled and not self.temporary and self.bypasses == 0


@dataclass(frozen=True)
class CompileHealth:
    """What dynamo and inductor said of a run."""

    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    specialised: tuple[Specialised, ...]
    limits: tuple[LimitHit, ...]
    errors: tuple[str, ...]
    """Frames that could not be compiled at all, and an exception of the run, one line each."""
    compilations: int
    graphs: int
    compile_s: float
    """Seconds in dynamo and the backend, each compilation counted once."""
    wall_s: float
    cache: CacheHealth
    calls: int = 0
    steady_recompiles: int = 0
    """Compilations after every input had been seen once: a program that never settles."""
    first_call_s: float = 0.0

    @property
    def healthy(self) -> bool:
        """No break, no recompilation, nothing run eagerly."""
        return not (self.breaks or self.recompiles or self.limits or self.errors)
