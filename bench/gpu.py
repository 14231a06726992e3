"""Everything that only a GPU can show, as one command whose result is one file to send back.

    make gpu-bench                        # all of it; go on with the same command where it was stopped
    make gpu-check                        # the tests alone
    python bench/gpu.py --pieces 1        # the next piece and no more: where a command may take ten minutes at most

The pieces are the test files with tests for GPUs, the kernels of our own beside what they stand for, what-if beside the
changed program, whole pipelines rung by rung, Stable Diffusion by its kinds of attention for more and more pictures at
once, and each workload tuned and raced against what a user would pick instead.
A piece is a process of its own, is ended after nine minutes,
and goes into bench/results/<gpu>/<piece>.json as soon as it is known; one that is there is not made again, one that was
ended or failed is, with its study where it has one. The file to send back is gpu-<gpu>.zip. The exit code is 1 where a
piece has failed, 3 where some are still to be made. With `--device cpu` it is a rehearsal: same pieces, same files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.gpu_workloads import NAMES  # noqa: E402
from fettle.files import write_text  # noqa: E402

PIECE_S = 540.0
SIZES = {  # batch, heads, height and width in tokens, channels of a head
    "ViT-B, all tokens": (1, 12, 64, 64, 64),
    "ViT-B, windows": (25, 12, 14, 14, 64),
    "ViT-H, all tokens": (1, 16, 64, 64, 80),
    "ViT-H, windows": (25, 16, 14, 14, 80),
}

SAM = "mode=eval grad=inference_mode precision[vision_encoder]=bf16 precision[mask_decoder]=bf16"
SD = "grad=inference_mode precision[unet]=bf16 precision[vae.decoder]=bf16 precision[text_encoder]=bf16"
FUSED, QUICK = "attention[vision_encoder]=fused", "channels_last[unet]=on channels_last[vae.decoder]=on"


def compiled(how: str, *parts: str) -> str:
    return " ".join(f"compile[{part}]={how}" for part in parts)


EXPORTED = "runtime[mask_decoder]=exported algebra[mask_decoder]=fewer-products"
GRAPHS = "cuda_graphs[vision_encoder]=on cuda_graphs[mask_decoder]=on matmul=high"
ENCODER = compiled("default", "vision_encoder")
COMPILED = compiled("default", "vision_encoder", "mask_decoder")
BEST_SAM = f"{SAM} {FUSED} {ENCODER} {EXPORTED} {GRAPHS} cuda_graphs[prompt_encoder]=on"

LADDERS = {  # rungs of pipelines as one would try them, and what the factory is given
    "segment_anything": (
        "workloads/segment_anything.py", "", (),
        (
            SAM,
            f"{SAM} {COMPILED}",
            f"{SAM} {FUSED} {COMPILED}",
            f"{SAM} {FUSED} {compiled('reduce-overhead', 'vision_encoder', 'mask_decoder')}",
            f"{SAM} {FUSED} {compiled('reduce-overhead', 'vision_encoder')} {EXPORTED}",
            f"{SAM} {FUSED} {ENCODER} {EXPORTED} {GRAPHS}",
            BEST_SAM,
            f"{BEST_SAM} channels_last[vision_encoder]=on",
        ),
    ),
    "segment_anything-eight": (  # as the published ladder: batches of eight, from products and a softmax on
        "workloads/segment_anything.py:eight", "@attention=products", (),
        (
            "@attention=sdpa",
            SAM,
            f"{SAM} {COMPILED}",
            f"{SAM} {FUSED} {COMPILED}",
            f"{SAM} {FUSED} {ENCODER} {EXPORTED} {GRAPHS}",
            BEST_SAM,
        ),
    ),
    "segment_anything-prompts": (
        "workloads/segment_anything.py:with_prompts", "@prompts=apart", (),
        (
            "@prompts=together",
            f"@prompts=apart {SAM} {FUSED} {COMPILED}",
            f"{SAM} {FUSED} {COMPILED}",
        ),
    ),
    "segment_anything-h": (
        "workloads/segment_anything.py:vit_h", "@attention=products", (),
        (
            "@attention=sdpa",
            SAM,
            f"{SAM} {COMPILED}",
            f"{SAM} {FUSED} {COMPILED}",
            BEST_SAM,
        ),
    ),
    "stable_diffusion": (
        "workloads/stable_diffusion.py", "@attention=products", ("steps=20",),
        (
            f"@attention=products {SD}",
            "@attention=sdpa",
            SD,
            f"{SD} {QUICK}",
            f"{SD} {QUICK} {compiled('default', 'unet', 'vae.decoder')}",
            f"{SD} {QUICK} {compiled('reduce-overhead', 'unet')} {compiled('default', 'vae.decoder')}",
        ),
    ),
}  # fmt: skip
PICTURES = ("most", "1", "2", "4", "8", "16", "32", "64")
"""The pieces of bench/stable_diffusion_attention.py."""


def pieces() -> list[str]:
    """All of them, in the order in which they are worth most to somebody who has little time."""
    marked = re.compile(r"^\s*@?pytest\.mark\.gpu", re.MULTILINE)
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))
    tested = (f"tests-{path.stem.removeprefix('test_')}" for path in files)
    whole = (*(f"ladder-{name}" for name in LADDERS), *(f"pictures-{part}" for part in PICTURES))
    return ["attention", *tested, "what-if", *whole, *NAMES]


# -- one piece, in a process of its own -------------------------------------------------------------------------------


def tests(name: str) -> dict[str, Any]:
    (path,) = (ROOT / "tests").rglob(f"test_{name.removeprefix('tests-')}.py")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "--junitxml", str(report), str(path)]
        if find_spec("xdist"):  # a test that crashes ends its process, and not those that follow
            command += ["-n", "1", "--max-worker-restart", "20"]
        told = ""
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as done:
            for line in done.stdout or ():
                print(line, end="", flush=True)  # what is there where the piece is ended
                told += line
        seen = report.read_text() if report.exists() else ""
    counts = re.search(r'errors="(\d+)" failures="(\d+)" skipped="(\d+)" tests="(\d+)"', seen)
    errors, failures, skipped, total = map(int, counts.groups()) if counts else (1, 0, 0, 1)
    found = {"passed": total - errors - failures - skipped, "failed": errors + failures, "skipped": skipped}
    why = f"{found['failed']} of {total} tests failed, exit code {done.returncode}\n{told[-6000:]}"
    return {**found, "failure": why if done.returncode else ""}


def attention(device: str, budget_s: float) -> dict[str, Any]:
    """Attention with a decomposed bias: our kernel, and SDPA and plain products with the bias written out; in turn."""
    import statistics

    import torch

    from fettle.kernels.decomposed_attention import attention_reference, decomposed_attention
    from fettle.measure._clock import Clock
    from fettle.techniques._tiled_attention import by_flex_attention, tiled_attention

    def sdpa(query: Any, key: Any, value: Any, rows: Any, columns: Any, scale: float) -> Any:
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, bias, scale=scale)

    ways = {"products": attention_reference, "SDPA with the bias": sdpa}
    ways |= (
        {"fused": decomposed_attention(), "flex": by_flex_attention()}
        if device == "cuda"
        else {"tiled": tiled_attention}
    )
    torch._dynamo.config.recompile_limit = 64  # each case is a compilation of its own
    clock, found = Clock(device), {}
    cases = [(name, dtype) for name in SIZES for dtype in ("bfloat16", "float16", "float32")]
    cases = cases if device == "cuda" else [("ViT-B, windows", "float32")]
    for name, dtype in cases:
        batch, heads, height, width, channels = SIZES[name]
        tokens = height * width
        torch.manual_seed(0)
        mixed = torch.randn(batch, tokens, 3, heads, channels, device=device).to(getattr(torch, dtype))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        bias = [torch.randn(batch, heads, tokens, n, device=device).to(query.dtype) for n in (height, width)]
        given = (query, key, value, *bias, channels**-0.5)
        some = [part[:1, :1].double() for part in given[:5]]
        wanted = attention_reference(*some, given[5])
        rows, failed = {}, {}
        for way, run in ways.items():
            try:
                with torch.no_grad():
                    out = run(*given)
            except Exception as raised:  # what one way cannot do says nothing of the others
                failed[way] = {"failure": str(raised)[:2000]}
                continue
            error = float((out[:1, :1].double() - wanted).norm() / wanted.norm())
            rows[way] = {"error": error, "ms": [], "peak_bytes": 0}
        until = time.monotonic() + budget_s / len(cases)
        rounds = 0
        while rounds < 3 or (rounds < 200 and time.monotonic() < until):
            rounds += 1
            for way, row in rows.items():
                run = ways[way]
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                with torch.no_grad():
                    row["ms"].append(clock.time_ns(lambda run=run, given=given: run(*given)) / 1e6)
                if device == "cuda":
                    row["peak_bytes"] = torch.cuda.max_memory_allocated() - held
        for row in rows.values():
            row |= {"median_ms": statistics.median(row.pop("ms")), "rounds": rounds}
        found[f"{name}, {dtype}"] = rows | failed
    return found


def script(name: str, *arguments: str) -> dict[str, Any]:
    """What a script of this folder writes with --json."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, str(ROOT / "bench" / name), *arguments, "--json", str(out)]
        done = subprocess.run(command, cwd=ROOT)
        return json.loads(out.read_text()) | ({"failure": f"exit code {done.returncode}"} if done.returncode else {})


def ladder(name: str, device: str) -> dict[str, Any]:
    target, given, arguments, rungs = LADDERS[name]
    path, _, factory = target.partition(":")
    small = "small_with_prompts" if factory == "with_prompts" else "small"
    if device == "cpu":  # a rehearsal
        target, rungs = f"{path}:{'small_eight' if factory == 'eight' else small}", rungs[:1]
    asked = [f"--argument={one}" for one in (f"device={device}", *arguments)] + [f"--recipe={rung}" for rung in rungs]
    together = ["--together"] if device == "cuda" else []
    return script("pipeline_ladder.py", target, f"--small={small}", f"--given={given}", "--rounds=5", *asked, *together)


def pictures(part: str, device: str, folder: Path) -> dict[str, Any]:
    """A piece of the one file of Stable Diffusion's kinds of attention, which goes on in it."""
    command = [sys.executable, str(ROOT / "bench" / "stable_diffusion_attention.py"), part, f"--device={device}"]
    command += [f"--json={folder / 'stable_diffusion-attention.json'}"]
    if device == "cpu":  # a rehearsal
        command += ["--model=small", "--memory=2GiB", "--steps=2", "--rounds=3"]
    done = subprocess.run(command, cwd=ROOT)
    return {"failure": f"exit code {done.returncode}"} if done.returncode else {}


def tuned(name: str, device: str, budget_s: float, kept: Path) -> dict[str, Any]:
    from bench.tune_vs_peers import PEERS, measure

    target = f"{ROOT / 'bench' / 'gpu_workloads.py'}:{name}"
    if device == "cpu":  # a rehearsal shows that it goes through, not what is fast
        return measure(name, budget_s, 3, target, kept, {"eager": PEERS["eager"]})
    return measure(name, budget_s, 15, target, kept)


def piece(name: str, device: str, budget_s: float, kept: Path) -> dict[str, Any]:
    if name == "attention":
        return attention(device, min(budget_s, 120.0))
    if name == "what-if":
        return script("trace_whatif_device.py")
    if name.startswith("ladder-"):
        return ladder(name.removeprefix("ladder-"), device)
    if name.startswith("pictures-"):
        return pictures(name.removeprefix("pictures-"), device, kept.parents[1])
    return tests(name) if name.startswith("tests-") else tuned(name, device, budget_s, kept)


# -- all of them -------------------------------------------------------------------------------------------------------


def gpu_name(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"rehearsal {platform.machine()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_piece(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The piece's result, or why there is none; ended with all its processes after `PIECE_S`."""
    out = folder / f"{name}.json"
    command = [
        sys.executable, __file__, "--device", options.device, "--budget", str(options.budget), "--folder", str(folder),
        "--piece", name,
    ]  # fmt: skip
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "FETTLE_BENCH_DEVICE": options.device}
        )
        try:
            process.wait(options.limit)
            why = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    child.kill()
            process.wait()
            why = f"ended after {options.limit:.0f} s"
        log.seek(0)
        told = log.read()
    found = json.loads(out.read_text()) if out.exists() and not why else {"failure": f"{why}\n{told[-6000:]}"}
    found["seconds"] = round(time.monotonic() - started, 1)
    write_text(out, json.dumps(found, indent=1) + "\n")
    return found


def pack(folder: Path, device: str, to: Path) -> None:
    """All results, and what they were made with, as one file."""
    import torch

    from fettle.machine import this_machine

    about = {
        "machine": this_machine().summary, "device": device, "torch": torch.__version__, "cuda": torch.version.cuda,
        "hip": torch.version.hip, "python": platform.python_version(),
        "packages": {found.metadata["Name"]: found.version for found in distributions()},
    }  # fmt: skip
    write_text(folder / "about.json", json.dumps(about, indent=1) + "\n")
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.glob("*.json")):
            packed.write(path, f"{folder.name}/{path.name}")


def main(say: Callable[..., None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="PIECE", help="these pieces, or all whose name begins so")
    parser.add_argument("--pieces", type=int, default=1000, help="so many, and no more")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for tuning a workload")
    parser.add_argument("--limit", type=float, default=PIECE_S, help="seconds after which a piece is ended")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.piece:
        kept = options.folder / "studies" / options.piece
        made = piece(options.piece, options.device, options.budget, kept)
        write_text(options.folder / f"{options.piece}.json", json.dumps(made) + "\n")
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here: --device cpu is a rehearsal without one", file=sys.stderr)
        return 2
    every = pieces()
    chosen = [name for name in every if not options.only or name.startswith(tuple(options.only))]
    if not chosen:
        print(f"there is no such piece: {', '.join(every)}", file=sys.stderr)
        return 2
    folder = options.results / gpu_name(options.device)
    folder.mkdir(parents=True, exist_ok=True)

    def done(name: str) -> dict[str, Any] | None:
        path = folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    todo = [name for name in chosen if (done(name) or {"failure": "not yet"}).get("failure")]
    for name in todo[: options.pieces]:
        say(f"{name} ...", flush=True)
        found = run_piece(name, folder, options)
        why = found.get("failure", "").strip().splitlines()
        say(f"{name}: {'failed: ' + why[0] if why else 'done'} in {found['seconds']:.0f} s", flush=True)
    file = options.results / f"gpu-{folder.name}.zip"
    pack(folder, options.device, file)
    results = [done(name) for name in chosen]
    missing, failed = results.count(None), sum(bool(found and found.get("failure")) for found in results)
    say(f"{len(chosen) - missing - failed} of {len(chosen)} pieces done, {failed} failed, {missing} to be made: {file}")
    return 3 if missing else int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
