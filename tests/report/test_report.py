"""What a person takes away, from made-up results: the page, the table, the JSON and the pictures say the same."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import operator
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fettle.errors import UsageError
from fettle.generate.speed import Generation
from fettle.measure import Interval, Load, Slice, Startup
from fettle.report import _format as fmt
from fettle.report import (
    cell,
    goal_kept,
    load_page,
    load_result,
    page,
    print_result,
    progress,
    save,
    save_result,
    to_json,
    write_charts,
)
from fettle.report._facts import checks, front_trials, goal_figure, levers, load_lines, ranked, status_of, under
from fettle.report._ladder import throughput_rows
from fettle.report._rounds import rounds
from fettle.report._text import sentence
from fettle.report._verdict import headline, payback, verdict
from fettle.report.charts import ladder
from fettle.report.progress import trial_line
from fettle.report.result import from_json
from fettle.report.slo import front, prediction
from fettle.result import Reference, Rung
from fettle.tuning import Event
from tests.conftest import Run
from tests.report.made_up import BEST, EVAL, HOSTILE, degenerate, resnet, trial

ALL = {"full": resnet(), **degenerate()}


class Reader(HTMLParser):
    """The page as a browser takes it: its text outside scripts, every tag, every attribute that may fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self._silent = 0
        self.feed(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._silent += tag in ("script", "style")
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "href") and value]
        self.fetched += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)


def table(result: object, width: int = 80) -> str:
    out = io.StringIO()
    print_result(result, Console(file=out, width=width))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize("name", ALL)
def test_every_result_makes_a_page_and_a_table_and_comes_back_from_json(name: str) -> None:
    result = ALL[name]
    seen = Reader(page(result))
    assert fmt.MISSING not in headline(result)
    assert seen.fetched == []  # no network, no handler of an event
    assert " ".join(verdict(result).split()[:4]) in seen.text
    for width in (60, 80, 160):
        assert table(result, width)
    again = from_json(json.loads(json.dumps(to_json(result), allow_nan=False)))
    assert to_json(again) == to_json(result)


def test_the_final_race_is_drawn_with_the_slices_that_others_disturbed() -> None:
    result = resnet()
    assert "none of them taken while others were busy" in page(result)
    winner = result.winner
    assert winner is not None
    busy = [dataclasses.replace(one, quiet=one.round > 5, others=0.5) for one in winner.slices]
    beside = dataclasses.replace(result, winner=dataclasses.replace(winner, slices=busy))
    assert "24 slices, 5 of them taken while others were busy" in page(beside)
    kept = dataclasses.replace(result, winner=dataclasses.replace(winner, slices=()))
    assert "round by round" not in page(kept)  # an old result, which kept no slices


def test_the_page_says_what_was_found() -> None:
    seen = Reader(page(resnet())).text
    assert "9.91x as fast" in seen
    assert "44.0 ms a call instead of 436 ms, with answers within 0.0081" in seen
    assert "relative error 0.038 is over the limit of 0.02" in seen  # fast and wrong is shown as rejected
    assert "ran out of memory: 7.9 of 8.0 GiB in use" in seen
    assert "this CPU has no float16 arithmetic" in seen
    assert "fettle tune workloads/resnet50.py --min-agreement 0.97" in seen
    assert "def optimize(model, batches):" in seen


def test_a_start_that_finds_what_was_kept_is_a_second_figure() -> None:
    result = resnet()
    assert result.winner is not None
    assert "is kept, it starts" not in table(result, 300)
    winner = dataclasses.replace(result.winner, startup=dataclasses.replace(result.winner.startup, warm_s=1.5))
    warm = dataclasses.replace(result, winner=winner)
    said = "is kept, it starts in 1.50 s from the second time on: paid back after 3 calls."
    assert f"Where what was compiled or converted {said}" in page(warm)
    assert result.payback_calls == warm.payback_calls
    assert result.warm_payback_calls is None
    assert "winner, started again" in page(warm)
    assert from_json(json.loads(json.dumps(to_json(warm)))).winner.startup.warm_s == 1.5  # type: ignore[union-attr]
    goal = dataclasses.replace(warm, goal="warm-startup")
    assert "warm start-up time is 1.50 s" in verdict(goal)
    assert "read from a further start of each: how far two such readings differ is not known" in verdict(goal)


def test_a_gain_in_what_has_no_interval_says_what_is_known_of_its_spread() -> None:
    result = dataclasses.replace(resnet(), goal="memory")
    assert result.winner is not None
    assert "read from one process of each: how far" in verdict(result)
    given, winner = (
        dataclasses.replace(one, peaks_bytes=tuple(mib * 2**20 for mib in peaks))
        for one, peaks in ((resnet().trials[0], (810, 820)), (result.winner, (512, 512, 512)))
    )
    several = dataclasses.replace(result, trials=[given, *result.trials[1:]], winner=winner, baseline_again=given)
    assert "falls from 820 MiB to 512 MiB (1.60x less)" in verdict(several)
    assert verdict(several).endswith("a peak of its own: 512 MiB with it, 810 MiB to 820 MiB as given.")
    assert "read from the first start of each, once: how far" in verdict(dataclasses.replace(result, goal="startup"))


def test_a_figure_that_hardly_falls_is_no_difference_in_the_title_either() -> None:
    result = dataclasses.replace(resnet(), goal="memory")
    assert result.winner is not None
    less = dataclasses.replace(result, winner=dataclasses.replace(result.winner, peak_bytes=815 * 2**20))
    assert headline(less) == "No difference"
    assert verdict(less).startswith("No difference: memory is 815 MiB with")


def test_energy_of_what_writes_text_is_of_a_token() -> None:
    result = dataclasses.replace(resnet(), goal="energy")
    given, winner = (
        dataclasses.replace(one, energy_j=joules, generation=Generation())
        for one, joules in ((result.baseline, 8.0), (result.winner, 2.0))
    )
    told = dataclasses.replace(result, trials=[given, winner], winner=winner, ladder=())
    assert headline(told) == "4.00x less energy a token"
    assert verdict(told).startswith("Energy a token falls from 1.00 J to 250 mJ")
    assert "tuned for energy a token: 250 mJ instead of" in goal_kept("energy", given, winner)
    assert "energy a token" in table(told, 200)


@pytest.mark.parametrize(("flops", "roof"), [(1e9, "the measured bandwidth"), (1e6, "this machine")])
def test_decoding_is_judged_by_what_bounds_it(flops: float, roof: str) -> None:
    written = Generation(ttft_ms=10, tpot_ms=1, tokens_per_step=1, weight_bytes=900, cache_bytes=100)
    made = resnet()
    winner = dataclasses.replace(made.winner, generation=written)
    machine = {"peaks": {"matmul_float32": flops, "read": 2e6}}
    result = dataclasses.replace(made, winner=winner, machine=machine, reference=Reference(decode_flops=2_000))
    assert sentence(result).endswith(f" of what {roof} allows.")


def test_an_interval_without_ends_is_none() -> None:
    made = resnet()
    wide = dataclasses.replace(made.winner, speedup=Interval(1.5, 0.0, math.inf))
    seen = Reader(page(dataclasses.replace(made, winner=wide))).text
    assert "0.00 to inf" not in seen
    assert "1.50x" not in seen
    assert "too few rounds" in seen


def test_a_log_is_told_once_that_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as told:
        for waited in (4, 5, 9):
            told(Event(f"the machine is busy (others took {waited}% of the cores): waiting for a quiet moment"))
            told(Event("round 1"))
    assert capsys.readouterr().err.count("\n") == 1


def test_hostile_names_stay_text() -> None:
    text = page(ALL["hostile"])
    seen = Reader(text)
    assert "alert(" in seen.text
    assert seen.tags.count("script") == Reader(page(resnet())).tags.count("script")
    assert "img" not in seen.tags
    assert "{{ 7*7 }}" in seen.text
    for unfit in ("\x1b", "\u2028"):
        assert unfit not in text
    assert "\x1b" not in table(ALL["hostile"])


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_shows_the_verdict_and_no_script(name: str) -> None:
    result = ALL[name]
    text = cell(result)
    seen = Reader(text)
    assert "script" not in seen.tags
    assert "img" not in seen.tags
    assert seen.fetched == []
    assert "\x1b" not in text
    assert " ".join(verdict(result).split()[:3]) in seen.text
    assert repr(result).startswith(result.name)
    assert len(result._repr_html_()) == pytest.approx(len(text), rel=0.01)  # pictures number their clips


def test_what_the_caller_can_mend_is_one_line_in_a_notebook() -> None:
    assert UsageError("no such file: x.py")._render_traceback_() == ["fettle: no such file: x.py"]


def test_a_random_model_is_allowed_its_own_noise_on_top() -> None:
    result = dataclasses.replace(resnet(), reference=Reference(noise=0.1))
    held = {check.name: check for check in checks(result, trial(BEST, 40.0, 0.11))}
    assert held["relative error"].held
    assert "0.12" in held["relative error"].limit
    assert "differ by 0.1 from seed to seed" in Reader(page(result)).text


def test_the_table_and_the_page_agree() -> None:
    result = resnet()
    rows = table(result, 200)
    seen = Reader(page(result)).text
    for one in ranked(result):
        assert fmt.milliseconds(one.time_ms) in rows
        assert fmt.interval(one.speedup) in rows
        assert fmt.interval(one.speedup) in seen
    assert len(ranked(result)) + 3 == len(result.trials)  # three never ran


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no winner", "No"),
        ("baseline wins", "Leave it as it is"),
        ("same", "No difference"),
        ("slower", "Slower"),
        ("cannot tell", "Cannot tell"),
        ("interrupted", "as fast"),
        ("memory", "less memory"),
    ],
)
def test_the_headline_is_no_better_than_the_race(name: str, words: str) -> None:
    assert words in headline(ALL[name])


def test_answers_that_only_a_metric_judged_are_said_by_it() -> None:
    result = ALL["metric"]
    accuracy = dataclasses.replace(result.winner.accuracy, error=math.nan)
    said = verdict(dataclasses.replace(result, winner=dataclasses.replace(result.winner, accuracy=accuracy)))
    assert "with a metric of 0.9694 against 0.972" in said


def test_where_only_the_baseline_was_measured_it_says_what_to_do() -> None:
    for name in ("baseline wins", "no winner"):
        alone = dataclasses.replace(ALL[name], trials=[ALL[name].baseline], nearest=())
        assert "longer budget" in verdict(alone)
        assert headline(alone) in ("Nothing to compare", "No winner")


def test_a_model_that_is_off_its_own_reference_is_said_first() -> None:
    given = ALL["no winner"].baseline
    off = dataclasses.replace(given, accuracy=dataclasses.replace(given.accuracy, error=0.5))
    trials = [off, *(one for one in ALL["no winner"].trials if one.recipe.levels)]
    result = dataclasses.replace(ALL["no winner"], trials=trials, baseline_again=None)
    said = {}
    for differs in (False, True):  # as train mode is: that is no fault of the reference
        facts = dataclasses.replace(result.facts, train_mode_differs=differs)
        said[differs] = verdict(dataclasses.replace(result, facts=facts))
    assert "the model as given is off its own float64 reference by 0.5, more than the limit" in said[False]
    assert "off its own" not in said[True]


def test_what_was_not_measured_is_never_kept() -> None:
    result = resnet()
    unknown = trial(BEST, 40.0, math.nan, mib=None)
    held = {check.name: check.held for check in checks(result, unknown)}
    assert held["relative error"] is None
    assert held["peak memory"] is None
    assert status_of(dataclasses.replace(result, winner=None), unknown) == "over limit"


def test_statuses_limits_and_the_front() -> None:
    result = resnet()
    words = {str(one.recipe): status_of(result, one) for one in result.trials}
    assert words[BEST] == "winner"
    assert words["baseline"] == "baseline"
    assert [word for word in words.values() if word == "failed"] == ["failed"] * 3
    over = [one for one in result.trials if status_of(result, one) == "over limit"]
    assert all(one.peak_bytes > 900 * 2**20 for one in over)
    assert over
    front = front_trials(result.trials)
    assert all(one.status == "measured" for one in front)
    for one in front:
        worse = [
            other
            for other in front
            if other.speedup.estimate > one.speedup.estimate
            and other.accuracy.error < one.accuracy.error
            and other.peak_bytes < one.peak_bytes
        ]
        assert not worse


def test_the_lever_is_the_technique_that_carries_the_speed() -> None:
    trials = [trial("baseline"), trial(EVAL, 400), trial(f"{EVAL} precision=bf16", 100), trial("precision=bf16", 110)]
    named = levers(trials)
    assert named[trials[2].recipe] == "precision"
    assert named[trials[0].recipe] == "as given"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, fmt.MISSING),
        (Interval(math.nan, math.nan, math.nan), fmt.MISSING),
        (Interval(1.5, 0, math.inf), "too few rounds"),
        (Interval(9.91, 9.6, 10.22), "9.91x [9.60, 10.22]"),
        (Interval(0.67, 0.0002, 2819.97), "too few rounds"),
    ],
)
def test_intervals_as_text(value: Interval | None, text: str) -> None:
    assert fmt.interval(value) == text


@settings(max_examples=200, deadline=None)
@given(value=st.floats(-1e18, 1e18) | st.sampled_from([None, math.nan, math.inf, -math.inf]))
def test_any_number_is_text_without_surprises(value: float | None) -> None:
    for shown in (fmt.times, fmt.milliseconds, fmt.seconds, fmt.size, fmt.error, fmt.share, fmt.number):
        text = shown(value)
        assert text == fmt.MISSING or re.search(r"\d", text)
        assert "nan" not in text
        assert "inf" not in text


def test_the_four_files(tmp_path: Path) -> None:
    paths = save(resnet(), tmp_path / "new")
    assert sorted(path.name for path in paths) == ["optimized.py", "recipe.toml", "report.html", "result.json"]
    assert load_result(tmp_path / "new" / "result.json").winner.recipe == resnet().winner.recipe  # type: ignore[union-attr]
    assert [path.name for path in save(ALL["no winner"], tmp_path / "new")] == ["report.html", "result.json"]
    assert {path.name for path in (tmp_path / "new").glob("*.toml")} == {"earlier-recipe.toml"}  # of other limits
    save(resnet(), tmp_path / "cut short")
    save(dataclasses.replace(ALL["no winner"], interrupted=True), tmp_path / "cut short")
    assert (tmp_path / "cut short" / "recipe.toml").exists()


def test_beside_others_only_times_that_fit_the_figure_stand_in_one_sentence() -> None:
    """Where no slice shows what the model as given takes alone, its time is one of the neighbours."""
    full = resnet()
    winner = dataclasses.replace(full.winner, is_quiet=False)
    ratio = winner.speedup.estimate
    for factor, told in ((1.0, True), (20.0, False), (0.3, False)):
        again = dataclasses.replace(full.trials[0], time_ms=winner.time_ms * ratio * factor)
        said = verdict(dataclasses.replace(full, winner=winner, baseline_again=again))
        assert fmt.milliseconds(winner.time_ms) in said
        assert ("instead of" in said) == told


@pytest.mark.parametrize(
    ("goal", "column"), [("startup", "start-up"), ("warm-startup", "warm start"), ("memory", "memory")]
)
def test_the_table_shows_and_goes_by_what_the_goal_asks(goal, column) -> None:
    result = dataclasses.replace(resnet(), goal=goal)
    seen = table(result, 80)
    assert column in seen
    figures = [goal_figure(goal, one) for one in ranked(result) if one.status == "measured"]
    assert figures == sorted(figures)


def test_what_others_hid_is_said_to_be_hidden() -> None:
    full = resnet()
    trials = [full.trials[0], *(dataclasses.replace(one, speedup=None) for one in full.trials[1:])]
    said = verdict(dataclasses.replace(full, trials=trials, winner=trials[0], verdict="same"))
    assert said.startswith("Cannot tell: others had so much of the machine")
    assert "--under-load" in said


@pytest.mark.parametrize("which", ["as given", "final race", "recipes"])
def test_nothing_to_gain_on_a_busy_machine_is_said_to_be_found_on_one(tmp_path: Path, which: str) -> None:
    """A small gain drowns there, so that "leave it as it is" says less than on a quiet machine."""
    full = ALL["baseline wins"]
    given, *others = full.trials
    busy = {"is_quiet": False, "load": Load(waits=0.4, others=0.5)}
    hidden = dataclasses.replace(given, **busy)
    result = dataclasses.replace(full, **{
        "as given": {"trials": [hidden, *others], "winner": hidden},
        "final race": {"winner": hidden, "baseline_again": hidden},
        "recipes": {"trials": [given, dataclasses.replace(others[0], **busy), *others[1:]]},
    }[which])  # fmt: skip
    first, _, rest = verdict(result).partition(": ")
    assert first.startswith("On a machine that was busy for part of the study (its threads together waited 40%")
    assert "others took 50% of the cores" in first
    assert first.endswith("which may hide a small gain")
    assert rest.startswith("leave it as it is; none of the")
    assert headline(result) == "Leave it as it is, on a busy machine"
    save(result, tmp_path)
    assert "a busy machine (its threads" in (tmp_path / "recipe.toml").read_text()
    asked = verdict(dataclasses.replace(result, under_load=True))
    assert asked.startswith("Measured under load, as asked (its threads together waited")
    assert verdict(full).startswith("Leave it as it is: none of the")


def test_the_load_is_the_baselines_where_the_recipe_itself_saw_little() -> None:
    given = dataclasses.replace(trial("baseline"), load=Load(others=0.5))
    recipe = dataclasses.replace(trial("precision=bf16", 200), is_quiet=False)
    assert "others took 50% of the cores" in load_lines([given, recipe])[1]
    assert "others took 50% of the cores" in under(recipe, given=given)


def test_times_that_stand_side_by_side_are_of_one_race() -> None:
    """The baseline was measured first in a minute in which the machine was half as fast as in the final race."""
    full = resnet()
    first = dataclasses.replace(full.trials[0], time_ms=2 * full.trials[0].time_ms)
    again = dataclasses.replace(full.trials[0], time_ms=full.winner.time_ms * full.winner.speedup.estimate)
    rungs = [Rung("as given", again), *full.ladder[1:]]
    result = dataclasses.replace(full, trials=[first, *full.trials[1:]], baseline_again=again, ladder=rungs)
    assert result.baseline is again
    assert fmt.milliseconds(again.time_ms) in verdict(result)
    assert fmt.milliseconds(first.time_ms) not in verdict(result)
    assert next(trial for trial in ranked(result) if not trial.recipe.levels) is again
    for row in throughput_rows(result)[1:]:
        gained = next(rung.trial for rung in rungs if str(rung.trial.recipe) == row["recipe"]).speedup.estimate
        assert row["value"] == pytest.approx(again.throughput * gained)
    assert from_json(json.loads(json.dumps(to_json(result)))).baseline.time_ms == again.time_ms


def test_what_an_earlier_version_wrote_is_read() -> None:
    data = json.loads(json.dumps(to_json(resnet())))
    layers = {"int8_layers": [1, 3]}  # was a field of its own
    for holder, chosen in ((data["facts"], layers), *((each, {"int8_layers": []}) for each in data["trials"])):
        del holder["learned"]
        holder.update(chosen)
    data["winner"]["recipe"] = {"runtime": "openvino-int8-part", "policy": "bf16"}
    result = from_json(data)
    assert result.facts.learned == result.learned == layers
    assert not any(trial.learned.get("int8_layers") for trial in result.trials)
    assert result.recipe.levels == {"runtime": "openvino-int8-part", "mixed_precision": "bf16"}
    data["facts"]["int8_layers"] = ["__import__('os')"]  # goes into code
    with pytest.raises(UsageError, match="not a fettle result"):
        from_json(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "not a fettle result"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1, "surprise": 1}', "unknown field 'surprise'"),
        ('{"format": 1, "name": 3}', "not a fettle result"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_foreign_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        load_result(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"samples": 0}, {"time_ms": -1.0}, {"peak_bytes": -5}, {"speedup": {"estimate": 3.0, "low": 4.0, "high": 5.0}}],
)
def test_figures_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    data = json.loads(json.dumps(to_json(resnet())))
    data["trials"][3].update(change)
    with pytest.raises(UsageError):
        from_json(data)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("machine", "peaks"), "many"), (("machine", "versions"), ["2.13"]), (("machine", "memory_bytes"), "16 GiB"),
        (("limits", "max_error"), -1.0), (("reference", "noise"), -1.0), (("reference", "noise"), None),
        (("winner", "accuracy", "error"), -1.0),
    ],
)  # fmt: skip
def test_what_no_page_can_show_is_refused_and_ends_in_no_traceback(place: tuple[str, ...], value: object) -> None:
    data = json.loads(json.dumps(to_json(resnet())))
    *way, last = place
    functools.reduce(operator.getitem, way, data)[last] = value
    with pytest.raises(UsageError, match="it is not a fettle result"):
        from_json(data)


def test_the_ladder_of_memory_alone_is_titled_so() -> None:
    made = resnet()
    untimed = [Rung(rung.label, dataclasses.replace(rung.trial, time_ms=math.nan)) for rung in made.ladder]
    drawn = ladder(dataclasses.replace(made, ladder=untimed))
    assert drawn is not None
    assert [chart["title"]["text"] for chart in drawn.spec["hconcat"]] == ["peak memory"]
    assert "MiB" in drawn.alt


def test_charts_as_pictures(tmp_path: Path) -> None:
    paths = write_charts(resnet(), tmp_path)
    assert set(paths) == set(tmp_path.iterdir())
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<svg")
        assert path.with_suffix(".svg").exists()
    assert (tmp_path / "ladder.png").exists()
    assert HOSTILE not in "".join(path.read_text() for path in tmp_path.glob("*.svg"))


def test_where_the_finalists_fell_in_the_final_race_it_does_not_say_that_none_kept_the_limits() -> None:
    result = ALL["no winner"]
    fine = next(one for one in resnet().trials if one.ok and one.recipe.levels)
    said = verdict(dataclasses.replace(result, limits=resnet().limits, nearest=[fine]))
    assert "final race" in said
    assert "no recipe keeps the limits" not in said


def test_what_is_paid_back_is_counted_in_what_the_workload_does() -> None:
    made = resnet()
    assert " calls, which take" in payback(made)
    training = dataclasses.replace(made, facts=dataclasses.replace(made.facts, mode="training"))
    assert " steps, which take" in payback(training)
    limited = dataclasses.replace(training, limits=dataclasses.replace(made.limits, max_latency_ms=100.0))
    assert made.winner is not None
    assert "time of a step" in [check.name for check in checks(limited, made.winner)]


def test_a_limit_on_the_latency_is_of_the_whole_text() -> None:
    made = resnet()
    limits = dataclasses.replace(made.limits, max_latency_ms=100.0)
    facts = dataclasses.replace(made.facts, new_tokens=8)
    result = dataclasses.replace(made, limits=limits, facts=facts, goal="ttft")
    winner = dataclasses.replace(made.winner, time_ms=20.0, generation=Generation(text_ms=130.0))
    (check,) = [check for check in checks(result, winner) if check.name == "time of a text"]
    assert (check.value, check.held) == ("130 ms", False)
    assert "latency limit" not in page(result)


def test_a_speed_that_is_not_certain_pays_nothing_back() -> None:
    made = resnet()
    unsure = dataclasses.replace(made, verdict="cannot tell")
    assert unsure.payback_calls is None
    assert payback(unsure).endswith("; no call certainly saves time that would pay that back.")
    memory = dataclasses.replace(unsure, goal="memory")  # whose verdict is of memory
    assert memory.payback_calls == made.payback_calls
    winner = dataclasses.replace(made.winner, speedup=Interval(1.1, 0.9, 1.3))
    assert dataclasses.replace(memory, winner=winner).payback_calls is None


def test_a_start_that_comes_sooner_needs_no_paying_back() -> None:
    made = resnet()
    assert made.winner is not None
    assert made.baseline is not None
    sooner = dataclasses.replace(made.winner, startup=Startup(0.1, 0.2, 0.1), time_ms=2 * made.baseline.time_ms)
    said = payback(dataclasses.replace(made, winner=sooner))
    assert "sooner than the model as given: there is nothing to pay back" in said


def test_what_was_measured_is_told_from_what_was_predicted_on_the_front_of_a_service_level() -> None:
    point = {"setting": "a", "predicted": 9.0, "measured": None, "p99_ms": 5.0, "memory_bytes": 1 << 20, "front": True,
             "error": 0.0}  # fmt: skip
    data = {"points": [point, {**point, "measured": 8.0}], "limit_ms": 9.0, "reference_rate": 4.0, "best": 1}
    chart = front(data)
    assert chart is not None
    dots = chart.spec["layer"][0]["encoding"]
    assert dots["shape"]["scale"] == {"domain": ["measured", "predicted"], "range": ["diamond", "circle"]}


def test_the_lines_of_the_payback_cross_where_it_is_paid_back() -> None:
    made = resnet()
    assert made.winner is not None
    assert made.baseline is not None
    larger = dataclasses.replace(made, winner=dataclasses.replace(made.winner, samples=4 * made.winner.samples))
    for result in (made, larger):
        winner, calls = result.winner, result.payback_calls
        assert winner is not None
        assert calls is not None
        ends = [
            trial.startup.total_s + calls * trial.time_ms / 1e3 * made.baseline.samples / trial.samples
            for trial in (made.baseline, winner)
        ]
        assert ends[0] == pytest.approx(ends[1])


def test_rounds_of_a_larger_batch_are_compared_row_by_row() -> None:
    made = resnet()
    assert made.winner is not None
    assert made.baseline is not None
    slices = [Slice("a", number, 10.0) for number in range(3)]
    given = dataclasses.replace(made.baseline, slices=slices, samples=8)
    larger = dataclasses.replace(made.winner, slices=[dataclasses.replace(one, ms=20.0) for one in slices], samples=32)
    drawn = rounds(dataclasses.replace(made, winner=larger, baseline_again=given))
    assert drawn is not None
    assert set(re.findall(r'"ms": ([0-9.]+)', json.dumps(drawn.spec))) == {"10.0", "5.0"}


def test_charts_of_load_draw_the_intervals_that_are_known() -> None:
    run = {"latency_ms": {"p50": 10.0, "p99": 20.0}, "intervals_ms": {"p50": [9.0, 11.0], "p99": None}, "limit_ms": 0}
    figure = load_page._figure([run], ["80/s"], *load_page._KINDS[2])
    assert figure is not None
    whiskers = [layer["encoding"] for layer in figure.spec["layer"] if layer["mark"]["type"] == "rule"]
    assert [(one["y"]["field"], one["y2"]["field"]) for one in whiskers] == [("low", "high")]
    assert figure.svg()
    tested = {"latency_ms": {"p99": 10.0}, "p99_interval_ms": [8.0, 12.0]}
    first = {"predicted_p99_ms": 9.0, "run": tested, "held": True, "rate": 4.0}
    tests = [first, {**first, "run": {**tested, "p99_interval_ms": None}}]
    drawn = prediction({"points": [{"setting": "a", "tests": tests}], "limit_ms": 9.0})
    assert drawn is not None
    whiskers = drawn.spec["layer"][1]["encoding"]
    assert whiskers["y2"]["field"] == "high"
    assert whiskers["y"]["scale"]["domain"] == [8.0 / 1.15, 12.0 * 1.15]


def test_a_load_test_that_is_void_is_not_the_best() -> None:
    void, fine = {"goodput": 9.0, "void": "sent late", "stable": True}, {"goodput": 4.0, "void": "", "stable": True}
    assert load_page.headline([void, fine], ["9/s", "5/s"]) == "4 answers a second, at 5/s"
    assert load_page.headline([void], ["9/s"]) == "Nothing can be concluded: every run is void"
    assert load_page._doubt({**fine, "stable": False}).startswith("the backlog only grew")


def test_nothing_is_printed_where_the_page_cannot_be_written(tmp_path: Path, run_fettle: Run) -> None:
    save_result(resnet(), tmp_path / "result.json")
    said = run_fettle("report", tmp_path, "--json", "--output", tmp_path / "result.json" / "page.html")
    assert (said.code, said.out) == (2, "")


def test_a_large_number_has_no_exponent():
    assert [fmt.number(value, 3) for value in (1461.2, 71.04, 0.00123)] == ["1,461", "71", "0.00123"]


def test_a_finished_trial_names_the_parts_that_its_recipe_changes() -> None:
    text = "precision[unet]=bf16 precision[vae.decoder]=bf16"
    for made in (trial(text), trial(text, status="failed", reason="no [memory]")):
        out = io.StringIO()
        Console(file=out, width=200).print(trial_line(Event("finished", made)))
        assert text in out.getvalue()
    unknown = dataclasses.replace(trial(text), speedup=Interval(math.nan, math.nan, math.nan))
    assert "nan" not in trial_line(Event("finished", unknown))
