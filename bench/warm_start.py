"""How long until the first answer: a model built in eager mode, and its tuned package, cold and warm.

    python bench/warm_start.py --json bench/results/warm_start.json
    python bench/warm_start.py --recipe runtime=onnxruntime --json bench/results/warm_start_onnxruntime.json
    python bench/warm_start.py --apply --recipe runtime=openvino-bf16 --json bench/results/warm_start_apply.json

Every start is a process of its own, from its first line to its first answer of one row: `eager` imports torch and
transformers, builds the model from its configuration, reads its weights from a safetensors file and calls it; `cold`
loads the package where nothing was compiled; `warm` loads it again. Eager and warm starts take turns, `--starts` times.
With `--apply` it is no package: an eager start whose model is given to `fettle.apply`, cold where nothing is kept yet.
With `--openvino-cache` a start of a package of OpenVINO's takes turns with one that reads OpenVINO's own model cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fettle.machine import this_machine

RECIPE = "compile=default freeze=on grad=inference_mode"
MODELS = {
    "resnet-50": ("ResNetConfig", "ResNetForImageClassification", "{'pixel_values': torch.randn(2, 3, 224, 224)}"),
    "bert-base": ("BertConfig", "BertModel", "{'input_ids': torch.randint(0, 1000, (2, 64))}"),
}
MAKE = """
import sys, torch, transformers
from pathlib import Path
from safetensors.torch import save_model
from fettle import Recipe, Workload
from fettle.package.export import write_package
config, kind, batch, recipe, folder = sys.argv[1:]
torch.manual_seed(0)
model = getattr(transformers, kind)(getattr(transformers, config)()).eval()
save_model(model, folder + "/weights.safetensors")
if recipe:
    workload = Workload(model, [eval(batch), eval(batch)])
    write_package(workload, Recipe.parse(recipe), Path(folder) / "package", name="model")
"""
EAGER = """
import sys, time
began = time.perf_counter()
import torch, transformers
from safetensors.torch import load_model
config, kind, batch, folder = sys.argv[1:]
model = getattr(transformers, kind)(getattr(transformers, config)()).eval()
load_model(model, folder + "/weights.safetensors")
loaded = time.perf_counter() - began
with torch.inference_mode():
    model(**{name: tensor[:1] for name, tensor in eval(batch).items()})
print(loaded, time.perf_counter() - began)
"""
PACKAGE = """
import sys, time
began = time.perf_counter()
from pathlib import Path
from fettle.package.manifest import open_package
from fettle.package.model_runner import ModelRunner
runner = ModelRunner(open_package(Path(sys.argv[1]) / "package"))
loaded = time.perf_counter() - began
runner.run([runner.sample(1)], 1)
print(loaded, time.perf_counter() - began)
"""
APPLIED = """
import sys, time
began = time.perf_counter()
import torch, transformers, fettle
from safetensors.torch import load_model
config, kind, batch, folder, recipe = sys.argv[1:]
model = getattr(transformers, kind)(getattr(transformers, config)()).eval()
load_model(model, folder + "/weights.safetensors")
loaded = time.perf_counter() - began
batch = {name: tensor[:1] for name, tensor in eval(batch).items()}
fettle.apply(model, recipe, [batch])(**batch)
print(loaded, time.perf_counter() - began)
"""
CACHED = """
import sys, time
began = time.perf_counter()
from fettle.techniques import openvino_core
openvino_core().set_property({"CACHE_DIR": sys.argv[1] + "/openvino"})
""" + PACKAGE.split("\n", 3)[3]


def start(code: str, *arguments: str, cache: Path) -> tuple[float, float]:
    """Seconds until the model is loaded, and until its first answer."""
    environment = {**os.environ, "FETTLE_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, check=True,
    )  # fmt: skip
    loaded, first = done.stdout.split()[-2:] if code is not MAKE else ("0", "0")
    return float(loaded), float(first)


def measured(
    model: str, recipe: str, starts: int, folder: Path, *, applied: bool, openvino_cache: bool
) -> dict[str, Any]:
    """Medians, in seconds, and the first warm answer by the loading of the eager model."""
    config, kind, batch = MODELS[model]
    start(MAKE, config, kind, batch, "" if applied else recipe, str(folder), cache=folder / "made")
    tuned = (APPLIED, config, kind, batch, str(folder), recipe) if applied else (PACKAGE, str(folder))
    cold = start(*tuned, cache=folder / "cache")
    eager, warm, imported = [], [], []
    if openvino_cache:
        start(CACHED, str(folder), cache=folder / "cache")
    for _ in range(starts):
        eager.append(start(EAGER, config, kind, batch, str(folder), cache=folder / "cache"))
        warm.append(start(*tuned, cache=folder / "cache"))
        if openvino_cache:
            imported.append(start(CACHED, str(folder), cache=folder / "cache"))

    def median(of: list[tuple[float, float]]) -> dict[str, float]:
        loaded, first = zip(*of, strict=True)
        between = [end - begin for begin, end in zip(loaded, first, strict=True)]
        seconds = {"loaded_s": loaded, "first_answer_s": first, "from_loaded_to_answer_s": between}
        return {name: round(statistics.median(values), 3) for name, values in seconds.items()}

    ratios = [one[1] / other[0] for one, other in zip(warm, eager, strict=True)]
    return {
        "cold": median([cold]), "eager": median(eager), "warm": median(warm), "starts": starts,
        **({"with_openvino_cache": median(imported)} if imported else {}),
        "warm_answer_by_eager_loading": {"median": round(statistics.median(ratios), 2), "most": round(max(ratios), 2)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], action="append")
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("--openvino-cache", action="store_true")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    found: dict[str, Any] = {"machine": this_machine().summary, "recipe": options.recipe, "models": {},
                             "by": "fettle.apply" if options.apply else "a package"}  # fmt: skip
    for model in options.model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found["models"][model] = measured(
                model, options.recipe, options.starts, Path(folder), applied=options.apply,
                openvino_cache=options.openvino_cache,
            )  # fmt: skip
        print(model, json.dumps(found["models"][model]))
    found["load_before_and_after"] = [before, os.getloadavg()[0]]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
