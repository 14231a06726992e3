"""Made-up results for the tests of the report: figures of a likely size, measured on no machine."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fettle.measure import Accuracy, Interval, Slice, Startup, Trial
from fettle.recipe import Recipe
from fettle.report import Result
from fettle.result import LeftOut, Limits, Reference, Rung
from fettle.techniques import Facts

MIB = 2**20
BASE_MS = 436.0
HOSTILE = (
    """</script><script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)>'"&{{ 7*7 }}\x1b[31m\u2028"""
)


def trial(
    text: str, ms: float = BASE_MS, error: float = 4.1e-7, mib: float | None = 820, startup: float = 0.5,
    status: str = "measured", reason: str = "", **more: object,
) -> Trial:  # fmt: skip
    """One trial with paired rounds around its speed-up."""
    recipe = Recipe.parse(text)
    ratio = BASE_MS / ms
    logs = np.random.default_rng(len(text)).normal(math.log(ratio), 0.03, 24)
    half = 1.96 * 0.03 / math.sqrt(24)
    values: dict[str, object] = {
        "time_ms": ms,
        "p90_ms": ms * 1.07,
        "speedup": Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half)) if recipe.levels else None,
        "slices": [Slice(text, turn, float(BASE_MS / math.exp(x))) for turn, x in enumerate(logs, 1)],
        "samples": 8,
        "peak_bytes": None if mib is None else int(mib * MIB),
        "startup": Startup(1.1, startup * 0.2, startup * 0.8, "cold" if "compile" in text else ""),
        "accuracy": Accuracy(error, 1 - error**2 / 2, error * 11, 1.0 - min(1, error), True, math.nan, 2),
        "seconds": 20 + startup,
    }
    return Trial(recipe, status, reason, **{**values, **more})  # type: ignore[arg-type]


def crashed(text: str, reason: str, after_s: float = 12.0) -> Trial:
    """A trial that never ran."""
    return Trial(Recipe.parse(text), "failed", reason, seconds=after_s)


EVAL = "mode=eval grad=inference"
BEST = "channels_last=on compile=default freeze=on grad=inference mode=eval precision=bf16"
MACHINE = {
    "id": "fedcba9876543210",
    "gpus": [],
    "python": "3.12.4",
    "name": "two-core cloud machine",
    "system": "Linux 6.1",
    "cpu": "Intel Xeon (Sapphire Rapids)",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "cpu_flags": ["avx512f", "avx512_bf16", "amx_bf16", "amx_int8"],
    "versions": {"python": "3.12.4", "torch": "2.13.0+cpu", "torchao": "0.18.0", "openvino": "2026.4"},
    "peaks": {"fp32_flops": 1.6e11, "bf16_flops": 1.9e12, "bandwidth_bytes_per_s": 2.1e10},
}
FACTS = Facts(
    num_parameters=25_557_032, parameter_bytes=102_228_128, num_conv=53, num_linear=1, num_4d_inputs=1, samples=8,
    calibration_batches=2, train_mode_differs=True, training=True, physical_cores=2,
)  # fmt: skip
CODE = '''"""ResNet-50, tuned. Plain PyTorch: channels_last, bfloat16, compiled with frozen weights."""

import torch
import torch._inductor.config

torch._inductor.config.freezing = True


def cast(tree, dtype):
    """Convert every floating tensor in a tree."""
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    return tuple(cast(item, dtype) for item in tree)


def optimize(model, batches):
    model.eval()
    model.to(torch.bfloat16)
    model.to(memory_format=torch.channels_last)
    compiled = torch.compile(model)

    def tuned(*args):
        with torch.inference_mode():
            output = compiled(*cast(args, torch.bfloat16))
        return output.to(torch.float32)  # the caller sees the type it always saw

    return tuned
'''


def resnet() -> Result:
    """A full study: a winner, rejected and failed trials, some over a limit, levels left out."""
    given = trial("baseline", BASE_MS)
    winner = trial(BEST, 44.0, 0.0081, 512, 38.2, notes=("0 graph breaks", "53 of 53 convolutions in channels_last"))
    steps = [
        ("as given", given),
        ("mode=eval", trial("mode=eval", 353)),
        ("grad=inference", trial(EVAL, 324)),
        ("channels_last=on", trial(f"{EVAL} channels_last=on", 277, 4.4e-7, 824)),
        ("precision=bf16", trial(f"{EVAL} channels_last=on precision=bf16", 91, 0.0079, 430)),
        ("compile=default", trial(f"{EVAL} channels_last=on precision=bf16 compile=default", 58, 0.0080, 470, 31)),
        ("freeze=on", winner),
    ]
    trials = [
        *(step for _, step in steps[:-1]),
        trial(BEST, 44.6, 0.0081, 512, 38.6),
        trial(f"{EVAL} precision=bf16", 190, 0.0078, 428),
        trial(f"{EVAL} precision=autocast-bf16", 205, 0.0071, 905),
        trial(f"{EVAL} compile=default", 255, 4.0e-7, 840, 24),
        trial(f"{EVAL} compile=default freeze=on", 223, 4.2e-7, 1010, 26),
        trial(f"{EVAL} compile=max-autotune freeze=on channels_last=on precision=bf16", 44.9, 0.0081, 520, 96),
        trial(f"{EVAL} quant=int8-dynamic compile=default", 286, 0.012, 610, 40),
        trial(f"{EVAL} quant=int8-dynamic compile=default precision=bf16", 83, 0.0155, 410, 42),
        trial(f"{EVAL} runtime=onnxruntime", 206, 5.3e-7, 640, 9.5),
        trial(f"{EVAL} runtime=openvino", 215, 5.1e-7, 700, 7.2),
        trial(f"{EVAL} runtime=openvino-bf16", 47.5, 0.011, 640, 7.8),
        trial(f"{EVAL} threads=1", 611),
        trial(f"{EVAL} matmul=medium", 322, 0.0003),
        trial(
            f"{EVAL} quant=int8-static compile=default freeze=on", 31, 0.038, 390, 52, "rejected",
            "relative error 0.038 is over the limit of 0.02",
        ),
        trial(
            f"{EVAL} precision=autocast-fp16", 240, math.nan, 900, 0.7, "rejected", "the output holds NaN",
            accuracy=Accuracy(problem="output[0] holds 12 NaN", judged_batches=2),
        ),
        crashed(f"{EVAL} compile=reduce-overhead region=blocks", "ran out of memory: 7.9 of 8.0 GiB in use"),
        crashed(f"{EVAL} quant=float8", "RuntimeError: \"addmm\" not implemented for 'Float8_e4m3fn'", 3.0),
        crashed(f"{EVAL} runtime=aotinductor", "killed after 120 s without an answer", 120.0),
    ]  # fmt: skip
    return Result(
        name="resnet50",
        target="workloads/resnet50.py:workload",
        fingerprint="0123456789abcdef",
        facts=FACTS,
        machine=MACHINE,
        goal="latency",
        limits=Limits(max_error=0.02, min_agreement=0.97, max_memory_bytes=900 * MIB),
        reference=Reference(),
        trials=trials,
        winner=winner,
        verdict="faster",
        ladder=[Rung(label, step) for label, step in steps],
        left_out=[
            LeftOut("precision", "fp16", "this CPU has no float16 arithmetic"),
            LeftOut("cudagraphs", "on", "the model is on the CPU"),
            LeftOut("sparsity", "2:4", "needs a GPU with sparse tensor cores"),
            LeftOut("attention", "sdpa", "the model has no attention"),
        ],
        seconds=1312.0,
        command="fettle tune workloads/resnet50.py --min-agreement 0.97 --max-memory 900MiB --budget 25m",
        code=CODE,
        created="2026-01-02T03:04:05Z",
        notes=("The machine's clock rose by 6% during the first race; the rounds are paired, so the ratios hold.",),
    )


def _with(**changes: object) -> Result:
    return dataclasses.replace(resnet(), **changes)  # type: ignore[arg-type]


def _given() -> Trial:
    return resnet().trials[0]


def degenerate() -> dict[str, Result]:
    """Results at the edges of what can come out; each must make a page and a table."""
    full = resnet()
    given = _given()
    near = full.trials[-5]
    best = full.winner
    assert best is not None
    flat = dataclasses.replace(best, speedup=Interval(1.001, 0.994, 1.009), time_ms=435.5)
    unclear = dataclasses.replace(best, speedup=Interval(1.03, 0.95, 1.12), time_ms=423.0)
    slower = dataclasses.replace(best, speedup=Interval(0.93, 0.91, 0.95), time_ms=468.0)
    blank = dataclasses.replace(
        best, time_ms=math.nan, p90_ms=math.nan, speedup=Interval(math.nan, math.nan, math.nan), peak_bytes=None,
        startup=Startup(), accuracy=Accuracy(),
    )  # fmt: skip
    failures = [crashed(str(one.recipe), "ImportError: no module") for one in full.trials]
    long = " ".join(
        f"a-technique-with-a-rather-long-name-{i}=a-level-that-says-all-there-is-to-say-{i}" for i in range(9)
    )
    mean = Recipe({HOSTILE: HOSTILE, "precision": "bf16"})
    return {
        "no winner": _with(winner=None, verdict="cannot tell", ladder=(), nearest=[near], code=""),
        "only baseline": _with(trials=[given], winner=given, verdict="same", ladder=(), left_out=(), code=""),
        "baseline wins": _with(winner=given, verdict="same", ladder=(), code=""),
        "all failed": _with(trials=failures, winner=None, verdict="cannot tell", ladder=(), code=""),
        "baseline failed": _with(
            trials=[crashed("baseline", "RuntimeError: mat1 and mat2 shapes cannot be multiplied")],
            winner=None, verdict="cannot tell", ladder=(), code="",
        ),
        "nothing": _with(
            trials=(), winner=None, verdict="cannot tell", ladder=(), left_out=(), code="", command="", created="",
            machine={}, notes=(), seconds=0.0,
        ),
        "same": _with(winner=flat, verdict="same"),
        "cannot tell": _with(winner=unclear, verdict="cannot tell"),
        "slower": _with(winner=slower, verdict="slower"),
        "interrupted": _with(interrupted=True, trials=full.trials[:4], winner=full.trials[3], ladder=()),
        "nan": _with(winner=blank, trials=[given, blank], ladder=[Rung("as given", given), Rung("all", blank)]),
        "long names": _with(
            name="a-model-with-a-very-long-name-" * 6, winner=trial(long, 44.0), trials=[given, trial(long, 44.0)],
            ladder=[Rung("as given", given), Rung(long, trial(long, 44.0))], command="fettle tune " + "x" * 300,
        ),
        "hostile": _with(
            name=HOSTILE, target=HOSTILE, command=HOSTILE, code=HOSTILE, created=HOSTILE, notes=[HOSTILE],
            machine={HOSTILE: HOSTILE, "versions": {HOSTILE: [HOSTILE]}},
            left_out=[LeftOut(HOSTILE, HOSTILE, HOSTILE)],
            winner=dataclasses.replace(best, recipe=mean, notes=[HOSTILE]),
            trials=[
                given, dataclasses.replace(best, recipe=mean),
                Trial(Recipe({HOSTILE: "on"}), "failed", HOSTILE),
                dataclasses.replace(near, reason=HOSTILE, recipe=Recipe({"x": HOSTILE})),
            ],
            ladder=[Rung("as given", given), Rung(HOSTILE, dataclasses.replace(best, recipe=mean))],
        ),
        "memory": _with(goal="memory"),
        "metric": _with(
            limits=Limits(max_error=None, max_metric_drop=0.01, max_latency_ms=100.0),
            reference=Reference("float32", "float64 needs more memory than there is", 1e-7, 0.972),
            winner=dataclasses.replace(best, accuracy=dataclasses.replace(best.accuracy, metric=0.9694)),
        ),
    }  # fmt: skip
