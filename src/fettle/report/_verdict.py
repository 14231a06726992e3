"""The verdict in a sentence, and the few other sentences that a report opens with. All computed, none templated in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fettle.measure import Interval, Trial
from fettle.measure import verdict as told
from fettle.report import _format as fmt
from fettle.report._facts import disturbed, elapsed, load_of, misses, name_of, ran, speed, under, unit_name
from fettle.result import LEAST, Goal, Outcome, goal_figure, needs_less


def verdict(result: Outcome) -> str:
    """What came out, in one sentence (two when the study was cut short)."""
    text = _sentence(result)
    winner = result.winner
    if winner is not None and winner.recipe.levels:
        text = f"{under(winner, result.under_load, result.baseline)}{text}"
        if not result.under_load and (also := elapsed(winner)):
            text = f"{text} {also}"
    if result.unconfirmed:
        return f"{text} {result.unconfirmed}"
    if result.interrupted:
        return f"Interrupted before the end, so this is what was known by then. {text}"
    return text


def headline(result: Outcome) -> str:
    """The verdict in two or three words, for a title."""
    winner = result.winner
    if winner is None:
        return "No winner"
    beside = ", on a busy machine" if disturbed(result) else ""
    if not winner.recipe.levels:
        return f"Leave it as it is{beside}" if _others(result) else "Nothing to compare"
    if result.goal in _GOAL_NOUN:
        before, after = _goal_values(result)
        if before and after and after < before:
            if before < LEAST * after:
                return "No difference"
            return f"{before / after:.2f}x less {_noun(result.goal, winner)}"
    if result.verdict == "faster" and math.isfinite(speed(winner)):
        return f"{fmt.times(speed(winner))} as fast{beside}"
    return {"faster": "Faster", "same": "No difference", "slower": "Slower", "cannot tell": "Cannot tell"}[
        result.verdict
    ]


def payback(result: Outcome) -> str:
    """After how many calls, steps or texts the winner's start-up cost is paid back, as a sentence; may be empty."""
    winner, baseline = result.winner, result.baseline
    if winner is None or not winner.recipe.levels or baseline is None:
        return ""
    if not (math.isfinite(winner.startup.total_s) and math.isfinite(baseline.startup.total_s)):
        return "The start-up time was not measured, so nothing can be said about when it is paid back."
    extra = winner.startup.total_s - baseline.startup.total_s
    calls, unit = result.payback_calls, unit_name(result)
    cache = f", with a {winner.startup.cache} compile cache" if winner.startup.cache else ""
    if calls is None and extra <= 0:
        sooner = f"{fmt.seconds(-extra)} sooner than the model as given" if extra else "as soon as the model as given"
        return f"It starts in {fmt.seconds(winner.startup.total_s)}{cache}, {sooner}: there is nothing to pay back."
    if calls is None or not math.isfinite(calls):
        return (
            f"It starts in {fmt.seconds(winner.startup.total_s)}{cache}; no {unit} certainly saves time that would pay "
            "that back."
        )
    if extra <= 0 or calls < 1:
        return f"It starts in {fmt.seconds(winner.startup.total_s)}{cache}, and pays from the first {unit} on."
    spent = calls * winner.time_ms / 1e3 * baseline.samples / winner.samples
    return (
        f"It starts {fmt.seconds(extra)} later than the model as given{cache}; that is paid back after "
        f"{fmt.count(calls)} {unit}s, which take about {fmt.seconds(spent)} at the new speed.{_warm_payback(result)}"
    )


def _warm_payback(result: Outcome) -> str:
    """The same of a start that finds what an earlier one compiled or converted; empty where none was measured."""
    winner, baseline, calls = result.winner, result.baseline, result.warm_payback_calls
    if winner is None or baseline is None or calls is None:
        return ""
    seconds = fmt.seconds(winner.startup.warm_s)
    again = f" Where what was compiled or converted is kept, it starts in {seconds} from the second time on"
    if calls < 1:
        return f"{again}, and pays from the first {unit_name(result)} on."
    return f"{again}: paid back after {fmt.count(calls)} {unit_name(result)}s."


def interval_meaning(result: Outcome) -> str:
    """What the intervals mean, in a sentence."""
    level = fmt.share(result.confidence).replace(".0%", "%")
    return (
        f"A speed-up comes from rounds in which recipe and baseline ran in turn on the same machine; the "
        f"figures in brackets are a {level} confidence interval: if the same race were run again and again, an "
        f"interval made in this way would hold the true ratio in {level} of the races. One that holds 1 does not "
        f"tell faster from slower."
    )


def yardstick(result: Outcome) -> str:
    """How far the model as given is from the reference, as a sentence."""
    baseline, reference = result.baseline, result.reference
    if result.facts.mode == "training":
        return (
            f"Losses are judged over {len(reference.curves[0]) if reference.curves else 0} steps against the training "
            "as given, from the same seed and on the same data; the loss deviation is the mean distance of the two, "
            f"as a share of the typical distance of two of {len(reference.curves)} seeds."
        )
    if result.facts.generates:
        return (
            f"What a recipe would write is judged token by token against the same model in {reference.dtype}, on that "
            "model's own text and the workload's, by the Kullback-Leibler divergence in nats; the reference's "
            f"perplexity is {fmt.number(reference.perplexity)}."
        )
    why = f" ({reference.why})" if reference.why else ""
    text = f"Answers are judged against the same model run in {reference.dtype}{why}"
    if baseline is not None and math.isfinite(baseline.accuracy.error):
        text += f"; the model as given is itself {fmt.error(baseline.accuracy.error)} away from it"
    if reference.noise > 1e-6:
        text += (
            f", and its own answers differ by {fmt.error(reference.noise)} from seed to seed, which is allowed on top "
            "of the limit"
        )
    return text + "."


def miss_text(result: Outcome, trial: Trial) -> str:
    """Which limits a trial misses, as a phrase: ``relative error 0.034 (limit ≤ 0.02)``."""
    parts = [
        f"{check.name} not measured" if check.held is None else f"{check.name} {check.value} (limit {check.limit})"
        for check in misses(result, trial)
    ]
    return ", ".join(parts)


_GOAL_NOUN = {"memory": "memory", "energy": "energy a row", "startup": "start-up time",
              "warm-startup": "warm start-up time"}  # fmt: skip


def _noun(goal: Goal, trial: Trial) -> str:
    """What the goal asks to be small, where it is no time."""
    return "energy a token" if goal == "energy" and trial.generation else _GOAL_NOUN[goal]


_SHOWN: Mapping[str, Callable[[float], str]] = {"memory": fmt.size, "energy": fmt.joules}
"""How the figure of a goal is written, where it is no time."""


def _sentence(result: Outcome) -> str:
    winner = result.winner
    if winner is None:
        return _no_winner(result)
    if not winner.recipe.levels:
        return _unchanged(result)
    how = name_of(winner.recipe)
    answers = _answers(result, winner)
    if result.goal in _GOAL_NOUN:
        return _other_goal(result, winner, how, answers)
    figures = _figures(winner.speedup, result.confidence)
    if result.verdict == "faster":
        now, then = _per_call(result, winner)
        beside = f" instead of {then}" if _times_agree(result, winner) else ""
        return f"{fmt.times(speed(winner))} as fast as given{figures}: {now}{beside}, {answers}."
    if result.verdict == "same":
        pace = f"runs as fast as the model as given{figures}"
        return f"No difference: the best recipe, {how}, {pace}. Keep the model as it is."
    if result.verdict == "slower":
        return (
            f"Slower: measured again in a fresh race, {how} ran at {fmt.times(speed(winner))} the speed of the "
            f"model as given{figures}. Keep the model as it is."
        )
    return (
        f"Cannot tell: whether {how} is faster than the model as given is not settled by what was measured{figures}. "
        "A longer budget or a quieter machine may settle it."
    )


def _no_winner(result: Outcome) -> str:
    baseline = result.baseline
    if not result.trials:
        return "No winner: nothing was measured."
    if baseline is not None and not ran(baseline):
        return f"No winner: the model as given could not be measured ({baseline.reason or 'no reason recorded'})."
    if not any(ran(trial) for trial in result.trials):
        return f"No winner: all {len(result.trials)} trials failed."
    if baseline is not None and _is_off(result, baseline):
        return (
            f"No winner: the model as given is off its own {result.reference.dtype} reference by "
            f"{fmt.error(baseline.accuracy.error)}, more than the limit. Where it keeps state from call to call, give "
            "a `call` that resets it, or a `metric`; where its own precision is that coarse, a larger `max_error`."
        )
    if result.nearest:
        near = result.nearest[0]
        missed = miss_text(result, near)
        if not missed and near.ok:
            return (
                f"No winner: {name_of(near.recipe)} kept the limits when it was first measured, and neither it nor "
                "another finalist ran and kept them again in the final race."
            )
        return f"No winner: no recipe keeps the limits. Nearest: {name_of(near.recipe)}" + (
            f", with {missed}." if missed else "."
        )
    if baseline is not None and len(result.trials) == 1:
        missed = miss_text(result, baseline)
        return f"No winner: the model as given misses {missed}, and nothing else was tried: give a longer budget."
    return "No winner: no recipe that was tried keeps the limits."


def _is_off(result: Outcome, baseline: Trial) -> bool:
    """Whether the model as given misses the limit on the error, and not because it came in train mode."""
    missed = any(check.name == "relative error" and check.held is False for check in misses(result, baseline))
    return missed and not result.facts.train_mode_differs


def _others(result: Outcome) -> int:
    return sum(1 for trial in result.trials if trial.recipe.levels)


def _unchanged(result: Outcome) -> str:
    others = _others(result)
    if not others:
        return "Nothing to compare: only the model as given was measured; give a longer budget, or allow more levels."
    ran_well = [trial for trial in result.trials if trial.recipe.levels and trial.ok]
    if ran_well and not any(trial.is_compared for trial in ran_well):
        return (
            "Cannot tell: others had so much of the machine that what a call takes could not be read, and no recipe be "
            "compared with the model as given. The same command measures these again, on a quieter machine; "
            "--under-load (in Python under_load=True) asks for what is fastest beside others."
        )
    goals = {"memory": "needs less memory", "energy": "needs less energy", "startup": "starts sooner",
             "warm-startup": "starts sooner"}  # fmt: skip
    what = goals.get(result.goal, "is certainly faster")
    why = f"none of the {others} other recipes tried {what} and keeps the limits."
    if others == 1:
        why = f"no other recipe {what} and keeps the limits; one was tried."
    busy = disturbed(result)
    if not busy:
        return f"Leave it as it is: {why}"
    if result.under_load:
        return f"Measured under load, as asked{load_of(*busy)}: leave it as it is; {why}"
    at_times = " for part of the study" if any(trial.is_quiet for trial in ran_well) else ""
    hides = "" if result.goal == "memory" else ", which may hide a small gain"
    return f"On a machine that was busy{at_times}{load_of(*busy)}{hides}: leave it as it is; {why}"


def _other_goal(result: Outcome, winner: Trial, how: str, answers: str) -> str:
    noun = _noun(result.goal, winner)
    before, after = _goal_values(result)
    show = _SHOWN.get(result.goal, fmt.seconds)
    pace = f"in speed it is {_pace(winner.speedup)}"
    if before is None or after is None:
        return f"The winner is {how}, but its {noun} cannot be compared with the model as given; {pace}, {answers}."
    name, known = noun[0].upper() + noun[1:], _readings(result, winner)
    if before >= LEAST * after:
        fell = f"{name} falls from {show(before)} to {show(after)} ({before / after:.2f}x less)"
        return f"{fell}; {pace}, {answers}. {known}"
    nothing = "No difference" if after < before else "No gain"
    return f"{nothing}: {noun} is {show(after)} with {how} and {show(before)} as given; {pace}, {answers}. {known}"


def goal_kept(goal: Goal, given: Trial, trial: Trial) -> str:
    """Whether a recipe still saves what it was tuned for, a sentence; empty where races compare that."""
    before, after = goal_figure(goal, given), goal_figure(goal, trial)
    if before is None or after is None:
        return ""
    noun, show = _noun(goal, trial), _SHOWN.get(goal, fmt.seconds)
    if math.isnan(before) or math.isnan(after):
        return f"The recipe was tuned for {noun}, which could not be read here."
    if needs_less(trial, given, goal):
        return f"The recipe was tuned for {noun}: {show(after)} instead of {show(before)}, {before / after:.2f}x less."
    figures = f"{show(after)}, and {show(before)} as given"
    return f"The recipe was tuned for {noun}, and it is not certain that it needs less of it here: {figures}."


def _readings(result: Outcome, winner: Trial) -> str:
    """What is known of how far two readings of the goal's figure differ, a sentence: it has no interval."""
    given = result.baseline
    if result.goal == "memory" and given is not None and min(len(winner.peaks_bytes), len(given.peaks_bytes)) > 1:
        return f"Each process has a peak of its own: {_range(winner)} with it, {_range(given)} as given."
    further = winner.processes - 1
    times = "" if further < 2 else f", the median of {further}"
    what = {
        "memory": "one process of each", "startup": "the first start of each, once",
        "energy": f"the median slice of {winner.processes} process{'es' * (winner.processes > 1)} of each",
        "warm-startup": f"a further start of each{times}",
    }[result.goal]  # fmt: skip
    return f"That was read from {what}: how far two such readings differ is not known."


def _range(trial: Trial) -> str:
    low, high = fmt.size(min(trial.peaks_bytes)), fmt.size(max(trial.peaks_bytes))
    return low if low == high else f"{low} to {high}"


def _goal_values(result: Outcome) -> tuple[float | None, float | None]:
    """The goal's figure of the baseline and of the winner, where both are known."""

    def value(trial: Trial | None) -> float | None:
        figure = None if trial is None else goal_figure(result.goal, trial)
        return None if figure is None or math.isnan(figure) else figure

    return value(result.baseline), value(result.winner)


def _pace(speedup: Interval | None) -> str:
    if speedup is None or not math.isfinite(speedup.estimate):
        return "not compared"
    word = told(speedup, 0.0)
    return f"{word if word in ('faster', 'slower') else 'not told apart'}, {fmt.interval(speedup)}"


def _figures(speedup: Interval | None, confidence: float) -> str:
    if speedup is None or not speedup.is_known:
        return ""
    level = fmt.share(confidence).replace(".0%", "%")
    return f" ({level} interval {speedup.low:.2f} to {speedup.high:.2f})"


def _per_call(result: Outcome, winner: Trial) -> tuple[str, str]:
    baseline = result.baseline
    one = unit_name(result)
    if baseline is None:
        return f"{fmt.milliseconds(winner.time_ms)} a {one}", "an unknown time"
    if baseline.samples != winner.samples:
        return f"{fmt.rate(winner.throughput)}", f"{fmt.rate(baseline.throughput)} samples"
    return f"{fmt.milliseconds(winner.time_ms)} a {one}", fmt.milliseconds(baseline.time_ms)


def _times_agree(result: Outcome, winner: Trial) -> bool:
    """Whether the times are such as the speed-up says: beside others the model as given may have no time of its own."""
    if winner.is_quiet or result.baseline is None:
        return True
    ratio = winner.throughput / result.baseline.throughput
    return abs(math.log(ratio / speed(winner))) < math.log(1.5) if ratio > 0 and speed(winner) > 0 else False


def _answers(result: Outcome, winner: Trial) -> str:
    """How well the answers were kept, never claimed without a number."""
    accuracy = winner.accuracy
    missed = miss_text(result, winner)
    if missed:
        return f"but {missed}"
    has_metric = math.isfinite(accuracy.metric) and math.isfinite(result.reference.metric)
    metric = f"a metric of {fmt.number(accuracy.metric)} against {fmt.number(result.reference.metric)}"
    if not math.isfinite(accuracy.error):
        return f"with {metric}" if has_metric else "with answers that were not compared"
    if result.facts.mode == "training":
        return f"with losses {fmt.share(accuracy.error)} as far from the baseline's as two seeds' are from each other"
    text = f"with answers within {fmt.error(accuracy.error)} (relative error)"
    if accuracy.is_text:
        text = (
            f"with a mean KL divergence of {fmt.error(accuracy.error)} from the reference and "
            f"{fmt.share(accuracy.agreement)} of tokens the same"
        )
    return f"{text} and {metric}" if has_metric else text
