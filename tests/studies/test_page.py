"""The page and the pictures: drawn of what there is, escaped, without network."""

import copy
import html
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace

import numpy as np
import polars
import pytest

from fettle.errors import UsageError
from fettle.measure import Interval
from fettle.page import theme
from fettle.page.drawn import write_pictures
from fettle.studies.analysis import analyse
from fettle.studies.batches import Grown
from fettle.studies.charts import figures, on_average, on_machines, unbeaten
from fettle.studies.checks import Doubt
from fettle.studies.effects import at_each
from fettle.studies.ladder_chart import beside, unmatched
from fettle.studies.outcome import Rung
from fettle.studies.output import rows, study_json, write_table
from fettle.studies.page import headline, page, shares_table
from fettle.studies.reading import read_ladder
from fettle.studies.table import Experiment, Response, Table
from tests.studies.made_up import switches, table

GAINS = {"a=on": 0.1, "b=on": 0.4, "a=on b=on": 0.7, "c=on": -0.2}
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def study():
    made = table(GAINS, switches("abc"), noise=0.01, repeats=2)
    experiments = [
        replace(row, values={**row.values, "error": 1e-3 if row.levels["b"] == "on" else 1e-6},
                rounds=[(n, row.values["time_ms"] * (1 + 0.01 * n)) for n in range(5)])
        for row in made.experiments
    ]  # fmt: skip
    experiments[3] = replace(experiments[3], values={}, reason=f"out of memory {HOSTILE}", rounds=())
    return Table(made.factors, (*made.responses, Response("error", better="less error")), tuple(experiments))


RUNGS = [
    Rung("as given", "baseline", True, "measured", "", Interval(1, 1, 1), 100.0, 1 << 20, 0.0),
    Rung("a=on", "a=on", True, "measured", "", Interval(2, 1.9, 2.1), 200.0, 2 << 20, 1e-3),
    Rung("b=on", "a=on b=on", False, "measured", "", Interval(1.5, 1.4, 1.6), 150.0, 2 << 20, 1e-3),
    Rung("c=on", "a=on c=on", False, "failed", "does not compile", None, math.nan, None, math.nan),
]


def test_every_picture_is_drawn_from_its_data(study, tmp_path):
    drawn = figures(study, analyse(study), {"model": RUNGS})
    names = [figure.name for figure in drawn]
    assert names == [
        "ladder-0",
        "scatter-0",
        "forest-0-0",
        "matrix-0-0",
        "forest-0-1",
        "matrix-0-1",
        "front-0",
        "runs-0",
    ]
    paths = write_pictures(drawn, tmp_path)
    assert set(paths) == set(tmp_path.iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    svg = (tmp_path / "ladder-0.svg").read_text()
    for step in ("as given", "a=on", "b=on (left out)", "c=on (failed)", "does not compile", "1.50x", "error 1.0e-03"):
        assert step in svg, step
    scatter = (tmp_path / "scatter-0.svg").read_text()
    assert scatter.count('aria-roledescription="point"') == len(study.experiments) - 1
    assert "a = on" in scatter  # split by the second
    assert "a=on × b=on" in (tmp_path / "forest-0-0.svg").read_text()
    assert "2.01" in (tmp_path / "matrix-0-0.svg").read_text() or "2.0" in (tmp_path / "matrix-0-0.svg").read_text()


def test_the_same_level_stands_beside_itself_on_each_model_and_environment():
    factors = {**switches("ab"), "python": ("this", "old"), "batch": ("1", "4")}
    rows = []
    for place, gain in enumerate((0.1, 0.3, 0.5)):
        made = table({"a=on": gain, "b=on": 0.2, "a=on python=old": -0.4, "a=on batch=4": 0.2}, factors, noise=0.01)
        rows += [replace(row, group=f"model{place}") for row in made.experiments]
    whole = Table(factors, made.responses, tuple(rows), apart=frozenset({"batch"}))
    analyses = analyse(whole)
    drawn = {figure.name: figure for figure in figures(whole, analyses, {})}
    models = drawn["across"]
    assert models.alt.startswith("What each level brings, those that differ most first: a=on 1.22x mean of 3")
    assert "batch=4" not in models.svg()  # it did not run side by side
    here, there = (at_each(analyses[0].model, "python")[name] for name in ("this", "old"))
    for found, gain in ((here, 0.2), (there, -0.2)):  # half of batch's 0.2 on average
        assert found["a", "on"].low < math.exp(gain) < found["a", "on"].high
    assert at_each(analyses[0].model, "batch")["1"].keys() == {("a", "on"), ("b", "on"), ("python", "old")}
    assert {"across-0-python", "across-0-batch", "across-2-python"} < drawn.keys()
    text = page("x", whole, analyses, list(drawn.values()))
    assert all(text.count(f'id="chart-{name}"') == 1 for name in drawn)


def test_a_matrix_of_many_levels_has_those_of_the_surest_effects():
    made = table({"a=30": 1.0}, {"a": tuple(map(str, range(36))), **switches("b")}, repeats=2, noise=0.01)
    (matrix,) = (one for one in figures(made, analyse(made), {}) if one.name == "matrix-0-0")
    assert matrix.alt.startswith("Matrix of 30 levels")
    assert "a=30" in matrix.svg()


def test_the_mean_over_models_holds_what_one_more_brings():
    a, b = ("a", "on"), ("b", "on")
    models = [{a: Interval(ratio, 0.9 * ratio, 1.1 * ratio), b: Interval(1.0, 0.0, math.inf)} for ratio in (1, 2, 4)]
    (found,) = on_average(models).items()
    assert found[0] == a
    assert found[1].estimate == pytest.approx(2)
    assert found[1].low < 1 < 4 < found[1].high  # two degrees of freedom
    assert on_average(models[:2]) == {}


def test_the_mean_over_models_holds_for_one_more_machine_too():
    """What all models share on a machine is no surer for many models."""
    a, random, held = ("a", "on"), np.random.default_rng(1), Counter[str]()
    for _ in range(200):
        gains = random.normal(0, 0.1, (5, 1)) + random.normal(0, 0.2, (1, 4)) + random.normal(0, 0.02, (5, 4))
        models = [{a: Interval(math.exp(mean), 0.1, 10.0)} for mean in gains.mean(axis=1)]
        for name, machines in (("here", ()), ("anywhere", list(gains.mean(axis=0)))):
            found = on_average(models, {a: machines})[a]
            held[name] += found.low <= 1 <= found.high
    assert held["anywhere"] >= 185
    assert held["here"] < 150


def test_what_machines_differ_by_is_their_mean_over_models():
    slower = {"m1": 0.0, "m2": 0.3, "m3": -0.1}
    machine = {"machine": tuple(slower)}
    gains = {"a=on": 0.2} | {f"a=on machine={name}": gain for name, gain in slower.items()}
    tables = [table(gains | {"a=on b=on": more}, {**switches("ab"), **machine}, noise=1e-4, apart=["machine"])
              for more in (0.0, 0.2, 0.4)]  # fmt: skip
    found = on_machines([lead for one in tables for lead in analyse(one)])
    assert found["a", "on"] == pytest.approx([0.3, 0.6, 0.2], abs=2e-3)  # half of 0.2 on average is from the pair
    two = [replace(one, experiments=tuple(row for row in one.experiments if row.levels["machine"] != "m3"))
           for one in tables]  # fmt: skip
    assert on_machines([lead for one in two for lead in analyse(one)]) == {}


def test_a_level_that_was_never_tried_somewhere_is_not_told_there():
    made = table({"a=on": 0.3}, switches("abc"), repeats=2, noise=0.01, skip=lambda on: {"a=on", "b=on"} <= on)
    found = at_each(analyse(made)[0].model, "b")
    assert ("a", "on") in found["off"]
    assert ("a", "on") not in found["on"]


def test_a_published_ladder_stands_beside_ours(study, tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text("# from an article\nstep,latency ms\neager,10\na=on,5\nd=on,2\n")
    theirs = read_ladder(path)
    assert theirs == {"eager": 1.0, "a=on": 2.0, "d=on": 5.0}
    assert [beside(rung, RUNGS, theirs) for rung in RUNGS] == [1.0, 2.0, None, None]
    assert unmatched({"model": RUNGS}, theirs) == ["d=on"]
    ladder = figures(study, [], {"model": RUNGS}, theirs)[0]
    assert "published 2.00x" in ladder.svg()
    assert ladder.alt.startswith("Diamonds: as published.")
    assert "Diamonds" not in figures(study, [], {"model": RUNGS})[0].alt
    assert study_json(study, [], None, theirs)["published"] == theirs


def test_the_largest_batch_of_a_step_stands_below_its_bar(study):
    most = Grown(16, 64, "x17 would need about 2.1 GiB", Interval(3.1, 3.0, 3.2), 620.0, 2 << 30)
    rungs = [RUNGS[0], replace(RUNGS[1], grown=most), replace(RUNGS[2], grown=Grown(0, 0, "x1 needs 3.0 GiB"))]
    ladder = figures(study, [], {"model": rungs})[0]
    assert "batch 64: 620/s · 3.10x · 2.00 GiB · x17 would need about 2.1 GiB" in ladder.svg()
    assert "no batch fits: x1 needs 3.0 GiB" in ladder.svg()
    rungs[2] = replace(RUNGS[2], grown=Grown(0, 0, "what it needs was not measured"))
    assert "largest batch unknown: what it needs" in figures(study, [], {"model": rungs})[0].svg()
    assert "Thin bars" not in figures(study, [], {"model": RUNGS})[0].alt


@pytest.mark.parametrize("text", ["step,a,b\nx,1,2\n", "name,fps\nx,1\n", "step,fps\nx,0\n", "step,fps\nx,1\nx,2\n",
                                  "step,fps\nx,1\ny,fast\n"])  # fmt: skip
def test_what_is_no_published_ladder_is_one_line(text: str, tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as said:
        read_ladder(path)
    assert "\n" not in str(said.value)


def test_a_scatter_can_be_split_by_the_strongest_together_and_its_dots_pinned(study):
    spec = copy.deepcopy(next(one for one in figures(study, analyse(study), {}) if one.name == "scatter-0").spec)
    controls = {one["name"]: one for one in spec["params"]}
    assert "a = on, " not in theme.svg(spec, 640)
    assert ">a=on c=on<" not in theme.svg(spec, 640)
    assert controls["depth_scatter_0"]["bind"]["max"] == 3
    controls["depth_scatter_0"]["value"] = 2  # as the slider and a click set them
    controls["pin_scatter_0"]["value"] = [{"recipe": "a=on c=on"}]
    drawn = theme.svg(spec, 640)
    assert "b = on, a = on" in drawn
    assert ">a=on c=on<" in drawn
    assert ">a=on b=on<" not in drawn


def test_the_page_stands_alone_and_escapes_what_is_in_it(study):
    hostile = replace(study, notes=(HOSTILE,))
    analyses = analyse(hostile)
    text = page(HOSTILE, hostile, analyses, figures(hostile, analyses, {HOSTILE: RUNGS}), hostile.notes)
    assert HOSTILE not in text
    assert not re.search(r"(src|href)=[\"']https?:", text)
    assert "Content-Security-Policy" in text
    assert "out of memory &lt;/script&gt;" in text
    assert "a=on needs b=on" in text or "a=on is worth" in text


def test_of_too_few_rounds_a_ladder_shows_no_figure(study):
    vague = Interval(1.5, 0.01, 99)
    rungs = [RUNGS[0], RUNGS[1], replace(RUNGS[2], speedup=vague, grown=Grown(4, 64, "x5 needs more", vague, 620.0))]
    ladder = figures(study, [], {"model": rungs})[0]
    assert "b=on (left out) too few rounds · 2.00 MiB" in ladder.alt
    assert "batch 64: too few rounds · x5 needs more" in ladder.alt
    assert not any(figure in ladder.svg() for figure in ("1.50x", "150/s", "620/s"))


def test_a_ladder_is_headed_by_its_best_step(study):
    text = page("x", study, [], figures(study, [], {"model": RUNGS}), (), {"model": RUNGS})
    assert "<h1>a=on: 2.00x as fast as given, the best of 4 steps</h1>" in text
    assert all(f'id="chart-{name}"' in text for name in ("ladder-0", "front-0", "runs-0"))
    assert "No step ran" in page("x", study, [], [], (), {"model": RUNGS[3:]})
    wrong = [replace(RUNGS[1], status="rejected", reason="error 0.3")]
    assert "1.00x as fast as given, the best of 2 steps" in page("x", study, [], [], (), {"model": [RUNGS[0], *wrong]})
    assert "No step keeps the limit on the error" in page("x", study, [], [], (), {"model": wrong})
    faster = replace(RUNGS[2], speedup=Interval(2.01, 1.9, 2.2))  # by chance, so that it was left out
    assert "<h1>a=on: 2.00x as fast as given" in page("x", study, [], [], (), {"model": [*RUNGS[:2], faster]})
    # On a busy machine two processes may share no round that says anything.
    unknown = [replace(RUNGS[2], speedup=Interval(math.nan, 0.0, math.inf)), *RUNGS]
    assert "a=on: 2.00x as fast as given, the best of 5 steps" in page("x", study, [], [], (), {"model": unknown})


def test_importance_of_a_factor_of_many_levels_takes_no_longer():
    """With a column for each level, its work is that of all subsets of them."""
    levels = tuple(f"{place:02}" for place in range(20))
    gains = {f"wide={level}": 0.1 * (7 * place % 20) for place, level in enumerate(levels)} | {"a=on": 0.2}
    (lead,) = analyse(table(gains, {"a": ("off", "on"), "wide": levels}, noise=0.01, repeats=2))
    assert list(lead.importance) == ["wide", "a"]
    assert lead.importance["wide"] > 0.9


def test_importance_by_another_method_stands_beside_the_shares(study):
    lead = analyse(study)[0]
    assert next(iter(lead.importance)) == lead.dominant[0] == "b"
    assert sum(lead.importance.values()) == pytest.approx(1)
    assert study_json(study, [lead])["analyses"][0]["importance"] == pytest.approx(dict(lead.importance))
    assert shares_table(lead).columns[-1] == "importance (fANOVA)"
    assert replace(lead, model=None).importance == {}


def test_surprises_stand_before_what_helps(study):
    analyses = analyse(study)
    text = page("x", study, analyses, [], ())
    assert text.index("Surprises, the surest") < text.index("What helps") < text.index("share of variance")
    assert headline(analyses) in text.replace("&#34;", '"')
    assert headline([]) == "What was measured"
    doubted = [replace(one, checks=replace(one.checks, doubts=(Doubt("far off", serious=True),))) for one in analyses]
    assert headline(doubted) == "What was measured: these effects are not to be believed"
    assert headline([doubted[0], *analyses[1:]]) == f"{headline(analyses[1:])} (less error)"  # not of time


def test_what_failed_is_nowhere_and_never_zero(study):
    analyses = analyse(study)
    assert (analyses[0].experiments, analyses[0].missing) == (15, 1)
    flat = rows(study)[3]
    assert flat["time_ms"] is None
    assert flat["reason"].startswith("out of memory")
    data = study_json(study, analyses)
    assert data["analyses"][0]["missing"] == 1
    assert data["analyses"][0]["sentences"][0]["surprise"]


def test_the_table_goes_to_csv_and_parquet_and_back(study, tmp_path):
    for name, read in (("t.csv", polars.read_csv), ("t.parquet", polars.read_parquet)):
        write_table(study, tmp_path / name)
        frame = read(tmp_path / name)
        assert frame.height == 16
        assert frame["time_ms"].null_count() == 1
        assert set(frame.columns) == {"group", "a", "b", "c", "time_ms", "error", "reason"}


def test_a_table_has_the_host_of_each_experiment_beside_a_factor_of_that_name(study):
    levels = {"host": ("a", "b")}
    made = Experiment({"host": "a"}, {}, machine="cpu-x2", host="node7")
    row = rows(replace(study, factors=levels, experiments=(made,)))[0]
    assert (row["host"], row["host_"], row["machine"]) == ("a", "node7", "cpu-x2")


def test_the_front_is_what_no_other_beats_in_both():
    faster, more = Response("time"), Response("rate", larger_is_better=True)
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 5.0), (3.0, 6.0), (4.0, 1.0)]
    assert unbeaten(points, faster, faster) == {0, 1, 4}
    assert unbeaten(points, faster, more) == {0}


def test_a_table_of_one_response_that_does_not_vary_says_why_there_is_no_fit(study):
    flat = Table(
        study.factors, (Response("error"),), tuple(replace(row, values={"error": 1.0}) for row in study.experiments)
    )
    analyses = analyse(flat)
    assert analyses[0].checks is None
    assert "in which a factor and the result vary" in page("x", flat, analyses, figures(flat, analyses, {}), ())


CLICKS = """
<script>
const wait = ms => new Promise(done => setTimeout(done, ms));
const picture = () => document.getElementById("chart-scatter-0");
const words = () => [...picture().querySelectorAll("svg text")].map(one => one.textContent).join("|");
const turn = (query, value) => {
  const control = picture().querySelector(query);
  control.value = value;
  for (const kind of ["input", "change"]) control.dispatchEvent(new Event(kind, {bubbles: true}));
};
const turned = async () => {
  const seen = {};
  for (let tries = 0; tries < 100 && !picture().querySelector(".vega-bind input"); tries++) await wait(50);
  await wait(200); seen.first = words();
  turn("input[type=range]", 2); await wait(200); seen.together = words();
  turn("input[type=range]", 1);
  const [colour, split] = picture().querySelectorAll("select");
  seen.choices = [...colour.options].map(one => one.textContent);
  for (const list of [colour, split]) { list.value = "c"; list.dispatchEvent(new Event("change", {bubbles: true})); }
  await wait(200); seen.other = words();
  return seen;
};
turned().catch(error => ({error: String(error), page: picture().innerHTML})).then(seen => {
  const out = document.createElement("pre");
  out.id = "seen"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>
"""


@pytest.mark.slow
def test_in_a_browser_the_slider_and_the_lists_change_the_picture(study, tmp_path):
    browser = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium")
    analyses = analyse(study)
    text = page("study", study, analyses, figures(study, analyses, {}), ())
    before, end, after = text.rpartition("</body>")
    (tmp_path / "page.html").write_text(before + CLICKS + end + after)
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--timeout=20000", "--virtual-time-budget=15000", "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert set(seen["choices"]) == {"a", "b", "c"}
    assert "a = on" in seen["first"]
    assert "b = on, a = on" not in seen["first"]
    assert "b = on, a = on" in seen["together"]
    assert "c = on" in seen["other"]
    assert "a = on" not in seen["other"]
