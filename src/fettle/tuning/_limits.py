"""The goal and the limits as numbers: how good a trial is, and what it breaks."""

from __future__ import annotations

import math

from fettle.generate.speed import Generation
from fettle.measure import Trial
from fettle.result import Goal, Limits


def score(trial: Trial, goal: Goal) -> float:
    """The goal as a number, smaller is better; infinite where the trial does not have it."""
    if not trial.ok or trial.speedup is None:
        return math.inf
    if goal == "memory":
        return math.log(trial.peak_bytes) if trial.peak_bytes else math.inf
    if goal == "energy":
        return math.log(trial.energy_j / trial.samples) if trial.energy_j else math.inf
    if goal == "startup":
        return math.log(trial.startup.total_s)
    return -math.log(trial.speedup.estimate)


def misses(trial: Trial, limits: Limits) -> str:
    """Which limit on time or memory a trial breaks, as a phrase; empty when it keeps them."""
    latency, memory, least = limits.max_latency_ms, limits.max_memory_bytes, limits.min_throughput
    if latency is not None and not trial.time_ms <= latency:
        return f"{trial.time_ms:.3g} ms is above {latency:g} ms"
    if memory is not None and not (trial.peak_bytes is not None and trial.peak_bytes <= memory):
        return f"{(trial.peak_bytes or 0) / 2**20:.0f} MiB is above {memory / 2**20:.0f} MiB"
    if broken := _misses_of_text(trial, limits):
        return broken
    rate = _rate(trial)
    if least is not None and not rate >= least:
        return f"{rate:.3g} {'tokens' if trial.generation else 'samples'} a second are below {least:g}"
    return ""


def _rate(trial: Trial) -> float:
    """Samples a second; tokens of whole texts where those are written, whatever part of them the race went by."""
    return trial.generation.throughput if trial.generation else trial.throughput


def _misses_of_text(trial: Trial, limits: Limits) -> str:
    text = trial.generation or Generation()
    for name, took, most in (("to the first token", text.ttft_ms, limits.max_ttft_ms),
                             ("per output token", text.tpot_ms, limits.max_tpot_ms)):  # fmt: skip
        if most is not None and not took <= most:
            return f"{took:.3g} ms {name} are above {most:g} ms"
    return ""


def distance(trial: Trial, limits: Limits) -> float:
    """How far a trial is from keeping the limits: the log of the largest factor that one is missed by; 0 for none."""
    error = math.inf if math.isnan(trial.accuracy.error) else trial.accuracy.error
    factors = [1.0]
    if limits.max_error is not None:
        factors.append(error / limits.max_error)
    if limits.max_latency_ms is not None:
        factors.append(trial.time_ms / limits.max_latency_ms)
    text = trial.generation or Generation()
    if limits.max_ttft_ms is not None and text.ttft_ms > 0:
        factors.append(text.ttft_ms / limits.max_ttft_ms)
    if limits.max_tpot_ms is not None and text.tpot_ms > 0:
        factors.append(text.tpot_ms / limits.max_tpot_ms)
    if limits.min_throughput is not None and _rate(trial) > 0:
        factors.append(limits.min_throughput / _rate(trial))
    if limits.max_memory_bytes is not None:
        factors.append((trial.peak_bytes or 1) / limits.max_memory_bytes)
    return math.log(max(factors))
