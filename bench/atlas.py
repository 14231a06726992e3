"""Makes the atlas: every model of ``atlas_models.py`` under the factorial of `LEVELS`, in pieces that resume.

    python bench/atlas.py --minutes 9            go on where the last piece stopped, the models in turn
    python bench/atlas.py --models resnet lstm   only these
    python bench/atlas.py --page                 write docs/atlas.md from what is there, measure nothing

Trials of the studies under ``--work`` go to ``bench/atlas/atlas.parquet`` after each model; those of other machines
stay there beside them. A model is left when its factorial is done. What was measured on a machine that was not quiet
has ``quiet`` false in its row.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
from atlas_models import FAMILY

from fettle.atlas import effects, matching, merged, never_compared, pairs, read_atlas, write_atlas
from fettle.errors import UsageError
from fettle.estimates import mean_interval, ratio_of
from fettle.files import write_text
from fettle.measure import Interval
from fettle.recipe import Recipe
from fettle.storage import storage_url
from fettle.studies import Plan, Settings, study
from fettle.studies.model import fit
from fettle.studies.table import Experiment, Response, Table
from fettle.techniques import CATALOGUE
from fettle.tuning import atlas_rows

HERE = Path(__file__).parent
ATLAS = HERE / "atlas" / "atlas.parquet"
PAGE = HERE.parent / "docs" / "atlas.md"
LEVELS = {
    "grad": ["grad", "inference_mode"],
    "precision": ["fp32", "bf16", "autocast-bf16"],
    "channels_last": ["off", "on"],
    "quantize": ["none", "int8-dynamic"],
    "compile": ["off", "default"],
    "freeze": ["off", "on"],
    "threads": ["as-given", "1"],
    "runtime": ["torch", "openvino-bf16", "onnxruntime"],
}
"""The factors; all others stay as given. About 60 to 100 combinations can work, by model."""
_PIECE_S = 270.0
"""Spent on one model before the next has its turn."""
_FEWEST_S = 45.0
_SURE = 3
"""Models from which a mean over them is shown with an interval, and a claim has a verdict."""
_MANY = 1_000
"""Trials that it is meant to have, of 16 models."""
_SPEED = Response("speedup", larger_is_better=True)
CLAIMS = (
    ("channels_last pays more with mixed precision", "PyTorch's memory-format tutorial", "convolutional",
     ("channels_last=on", "precision=autocast-bf16")),
    ("channels_last pays more with bfloat16 weights", "the same", "convolutional",
     ("channels_last=on", "precision=bf16")),
    ("eval mode and compile bring more together than apart", "Bridger's 800 experiments", "",
     ("mode=eval", "compile=default")),
    ("cuDNN's benchmark mode helps", "PyTorch's performance guide", "convolutional", ("cudnn_benchmark=on",)),
    ("compile helps by itself", "Ansel and others, ASPLOS 2024", "", ("compile=default",)),
    ("freezing the weights helps compiled models", "PyTorch's freezing tutorial", "", ("freeze=on",)),
    ("mixed precision helps by itself", "PyTorch's performance guide", "", ("precision=autocast-bf16",)),
    ("int8 weights of linear layers help transformers", "PyTorch's tutorial on BERT", "transformer",
     ("quantize=int8-dynamic",)),
    ("inference mode is faster than recording gradients", "PyTorch's documentation", "", ("grad=inference_mode",)),
)  # fmt: skip
"""What articles say: the claim, who says it, of which family, and the level or the two levels that it is about."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--models", nargs="+", choices=list(FAMILY), default=list(FAMILY))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fettle-atlas")
    parser.add_argument("--atlas", type=Path, default=ATLAS)
    parser.add_argument("--page", action="store_true", help="write docs/atlas.md, and measure nothing")
    options = parser.parse_args()
    if options.page:
        write_text(PAGE, page(read_atlas(options.atlas)))
        return
    end = time.monotonic() + 60 * options.minutes
    while (left := [name for name in options.models if not (options.work / name / "done").exists()]) and (
        end - time.monotonic() > _FEWEST_S
    ):
        for name in sorted(left, key=lambda name: _measured(options.work / name)):  # who has least goes first
            if end - time.monotonic() > _FEWEST_S:
                piece(name, options.work / name, min(_PIECE_S, end - time.monotonic()), options.atlas)
    print(f"{len(left)} models to go" if left else "done")


def levels(varied: Mapping[str, list[str]] = LEVELS) -> dict[str, list[str]]:
    """These, and all other techniques as given."""
    given = {technique.name: [technique.default] for technique in CATALOGUE if "inference" in technique.modes}
    del given["mode"]  # a precondition where it matters
    return {**given, **varied}


def piece(name: str, folder: Path, budget_s: float, path: Path) -> None:
    """Go on with one model, and put what is known of it into the atlas."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(design="factorial", techniques=levels(), budget_s=budget_s, output=folder, rounds=6)
    made = study([f"{HERE / 'atlas_models.py'}:{name}"], settings, lambda event: None)
    assert not isinstance(made, Plan)
    rows = [msgspec.structs.replace(row, workload=name)
            for row in atlas_rows(storage_url(None, folder), family=FAMILY[name])]  # fmt: skip
    everything = merged(read_atlas(path) if path.exists() else [], rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atlas(everything, path)
    write_text(path.with_suffix(".json"), json.dumps(summary(everything), indent=1) + "\n")
    (folder / "trials").write_text(str(len(rows)))
    if not any("fit into the budget" in note for note in made.notes):
        (folder / "done").touch()
    quiet = sum(row.quiet for row in rows)
    print(f"{name}: {len(rows)} trials, {quiet} quiet; the atlas has {len(everything)}", flush=True)


def _measured(folder: Path) -> int:
    return int((folder / "trials").read_text()) if (folder / "trials").exists() else 0


def summary(rows) -> dict:
    """What there is, for people who look at the repository."""
    return {
        "trials": len(rows), "quiet": sum(row.quiet for row in rows), "models": len({row.workload for row in rows}),
        "recipes": len({row.recipe for row in rows}),
        "statuses": dict(sorted(Counter(row.status for row in rows).items())),
        "machines": sorted({f"{row.machine}: {row.gpu or row.cpu}, {_parts(row)}" for row in rows}),
        "by_model": dict(sorted(Counter(f"{row.workload} on {row.machine}" for row in rows).items())),
    }  # fmt: skip


def page(rows) -> str:
    """docs/atlas.md."""
    machines = sorted({row.machine for row in rows})
    lines = [
        "# What helps whom", "",
        "Generated by `python bench/atlas.py --page` from `bench/atlas/atlas.parquet`.",
        "[Searching](search.md#with-an-atlas) says what an atlas holds;",
        "`fettle atlas query bench/atlas/atlas.parquet` answers further questions.", "",
        f"{len(rows):,} trials of {len({row.workload for row in rows})} small models and "
        f"{len({row.recipe for row in rows})} recipes, on {len(machines)} machine{'s' * (len(machines) > 1)}.",
        "A gain is the ratio of times without and with a level, in otherwise equal recipes on the same model and",
        "machine: the geometric mean over models, with a 95% interval that says how much models differ. *Gained* and",
        "*lost* count models that changed by more than 2%; *failed* and *inaccurate* count trials.",
    ]  # fmt: skip
    if len(rows) < _MANY:
        lines += [
            "", f"**These are few**: the aim is {_MANY:,} trials of 16 models. Where fewer than {_SURE} models tell,",
            "there is no verdict.",
        ]  # fmt: skip
    for machine in machines:
        some = matching(rows, machine=machine)
        one = some[0]
        busy, brought = sum(not row.quiet for row in some), effects(some)
        lines += [
            "", f"## {one.gpu or one.cpu or machine}", "",
            f"{_parts(one)}, torch {one.torch}. "
            + (f"{busy} of {len(some)} trials {'was' if busy == 1 else 'were'} measured while others used the machine."
               if busy else
               "All trials were measured while the machine was quiet."), "",
            *_table(brought), *_without_twins(some, brought), "", "### By family", "", *_families(some),
            "", "### Levels that interact", "", *_pairs(some),
            "", "### The literature's claims", "", *claims(some),
        ]  # fmt: skip
    if len(machines) > 1:
        lines += ["", "## The same levels on each machine", "", *_across(rows, machines)]
    return "\n".join(lines) + "\n"


def _across(rows, machines: list[str]) -> list[str]:
    """What each level brings to the models that all machines have."""
    by_machine = [matching(rows, machine=machine) for machine in machines]
    shared = set.intersection(*({row.workload for row in some} for some in by_machine))
    found = [{one.name: one for one in effects([row for row in some if row.workload in shared])} for some in by_machine]
    heads = [some[0].gpu or some[0].cpu for some in by_machine]
    return [
        f"Gains on the {len(shared)} models that were measured on every machine.", "",
        "| level | " + " | ".join(heads) + " |", "| --- |" + " --: |" * len(heads),
        *(f"| `{name}` | " + " | ".join(_gain(one[name]) for one in found) + " |"
          for name in found[0] if all(name in one for one in found)),
    ]  # fmt: skip


def _table(found) -> list[str]:
    rows = ["| level | gain | models | gained | lost | most | least | failed | inaccurate |",
            "| --- | --: | --: | --: | --: | --- | --- | --: | --: |"]  # fmt: skip
    for one in found:
        most, least = (f"{ratio:.2f}x {model}" for model, ratio in (one.best, one.worst))
        cells = [f"`{one.name}`", _gain(one), one.models, one.helped, one.hurt, most, least,
                 f"{one.failed} of {one.trials}", one.inaccurate]  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def _without_twins(rows, brought) -> list[str]:
    """Levels that ran, and never beside an otherwise equal recipe, so that the table cannot have them."""
    told = {name: own for name in never_compared(rows, brought) if (own := fitted(rows, (name,)))}
    return [f"\n`{name}` never ran beside an otherwise equal recipe. By a fit to all trials of each model it is worth\n"
            f"{ratio} on {models} models." for name, (ratio, models) in told.items()]  # fmt: skip


def _parts(row) -> str:
    return f"{row.cores:g} cores, {row.matrix_units or 'no matrix units'}"


def _gain(one) -> str:
    return str(one.gain) if one.models >= _SURE else f"{one.gain.estimate:.2f}x"


def _families(rows) -> list[str]:
    families = sorted({row.family for row in rows})
    found = {
        family: {one.name: one for one in effects([row for row in rows if row.family == family])} for family in families
    }
    names = sorted({name for one in found.values() for name in one})
    lines = ["| level | " + " | ".join(families) + " |", "| --- |" + " --: |" * len(families)]
    for name in names:
        cells = [f"{found[family][name].gain.estimate:.2f}x" if name in found[family] else "" for family in families]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def _pairs(rows) -> list[str]:
    told = [pair for pair in pairs(rows, _SURE) if pair.together.high < 1 or pair.together.low > 1]
    if not told:
        return [f"On {_SURE} models or more, no two levels are shown to hinder or help each other."]
    return ["| levels | together, over the product of both | models |", "| --- | --: | --: |",
            *(f"| `{pair.name}` | {pair.together} | {pair.models} |" for pair in told)]  # fmt: skip


def claims(rows) -> list[str]:
    """What is said in articles, against these trials; the verdict whichever way it falls."""
    lines = ["| claim | source | these trials say |", "| --- | --- | --- |"]
    for claim, source, family, levels in CLAIMS:
        some = [row for row in rows if row.family.startswith(family)]
        lines.append(f"| {claim} | {source} | {_verdict(some, levels)} |")
    return lines


def _verdict(rows, levels: tuple[str, ...]) -> str:
    """Of one level what it brings, of two what they bring together over the product of both."""
    if len(levels) == 1:
        found = next((one for one in effects(rows) if one.name == levels[0]), None)
        ratio = found.gain if found else None
    else:
        names = {frozenset("=".join(level) for level in pair.levels): pair for pair in pairs(rows, 1)}
        found = names.get(frozenset(levels))
        ratio = found.together if found else None
    models, points = (found.models, found.comparisons) if found else (0, 0)
    where = f"on {models} model{'s' * (models > 1)}"
    if models < _SURE:
        own = fitted(rows, levels)
        if own is None:
            tried = sum(row.gain is not None and set(levels) <= set(row.recipe.split()) for row in rows)
            known = f"{ratio.estimate:.2f}x {where}" if ratio else f"`{'` with `'.join(levels)}` ran {tried} times"
            return f"**cannot be checked with these data**: {points} points; {known}"
        ratio, where = own[0], f"on {own[1]} models, by a fit to all their {len(rows)} trials"
    word = "yes" if ratio.low > 1 else "no, the contrary" if ratio.high < 1 else "cannot tell"
    return f"**{word}**: {ratio} {where}"


def fitted(rows, levels: tuple[str, ...]) -> tuple[Interval, int] | None:
    """The same where too few models had twins, recipes that differ in these levels alone: by a fit to all trials of
    each model, as a study makes it, the mean over models, with their number. None of fewer than `_SURE`."""
    pair = tuple(tuple(level.split("=")) for level in levels)
    known = {technique.name: technique.default for technique in CATALOGUE}
    recipes = [(row, Recipe.parse(row.recipe).levels) for row in rows if row.gain is not None]
    factors = {name: (known[name], *sorted({own[name] for _, own in recipes if name in own}))
               for name in known if any(name in own for _, own in recipes)}  # fmt: skip
    experiments = [Experiment({name: own.get(name, known[name]) for name in factors}, {_SPEED.name: row.speedup},
                              group=row.workload) for row, own in recipes]  # fmt: skip
    table, gains = Table(factors, (_SPEED,), tuple(experiments)), []
    for model in (fit(table, group, _SPEED, first=[name for name, _ in pair]) for group in table.groups):
        if model is not None and all(level in model.levels.get(name, ()) for name, level in pair):
            both = model.gain({model.pair(*pair): 1.0}) if len(pair) > 1 else model.main(pair[0])
            gains += [both] if both is not None and math.isfinite(both.error) else []
    if len(gains) < _SURE:
        return None
    # What each fit leaves open counts once more than it does in how models differ: all of them had the same recipes, in
    # which the same levels change together, and an error that all fits share shows in no difference between models.
    own = sum(one.error**2 for one in gains) / len(gains) ** 2
    mean, half = mean_interval([one.gain for one in gains], own, int(min(one.freedom for one in gains)))
    return Interval(*(ratio_of(mean + side * half) for side in (0, -1, 1))), len(gains)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(f"atlas: {error}") from error
