"""What a compiler makes of fettle's kernels for GPUs that are not here: registers, spills, shared memory, occupancy.

    python bench/kernels.py                 # a table, and bench/results/kernels.json

Triton brings the compilers with it; no GPU is needed, and no time is measured.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fettle.kernels.decomposed_attention import decomposed_attention_kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that one block may have, and a multiprocessor has, by the vendors' tables.
SHARED = {"sm_80": (166912, 167936), "sm_90": (232448, 233472), "sm_100": (232448, 233472), "gfx942": (65536, 65536)}
SIZES = ((64, 64), (64, 80), (14, 64), (14, 80))
"""Width and channels of a head: Segment Anything's ViT-B and ViT-H, all tokens and windows."""
POINTERS = ("query", "key", "value", "rows", "columns", "out")


def configs(kind: str, width: int) -> list[Any]:
    """What is tuned over for elements of `kind`."""
    _, tuned = decomposed_attention_kernels()
    query = torch.empty(0, dtype=torch.float32 if kind == "fp32" else torch.bfloat16)
    return tuned.early_config_prune(
        tuned.configs, {"query": query, "tokens": 4096}, PADDED=triton.next_power_of_2(width)
    )


def compiled(target: str, kind: str, width: int, channels: int, config: Any) -> Any:
    """The kernel for `target` with all pointers and strides aligned, as they are in a model."""
    attend, _ = decomposed_attention_kernels()
    fixed = {
        "WIDTH": width, "PADDED": triton.next_power_of_2(width), "CHANNELS": channels, "FIRST": 64,
        "REST": 16 if channels > 64 else 0, "PRECISION": "ieee", **config.kwargs,
    }  # fmt: skip
    types, aligned = {}, {}
    for at, name in enumerate(attend.arg_names):
        if name in fixed:
            types[name] = "constexpr"
        elif name == "scale":
            types[name] = "fp32"
        else:
            types[name] = f"*{kind}" if name in POINTERS else "i32"
            unaligned = name in ("heads", "tokens", "height") or (
                width % 16 and name in ("rows_token", "columns_token")
            )
            if not unaligned:
                aligned[(at,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    return triton.compile(ASTSource(attend, types, fixed, aligned), target=TARGETS[target], options=options)


def resources(target: str, kernel: Any) -> dict[str, int]:
    """Registers of a thread, bytes that a thread spills, bytes of shared memory of a block."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")
        )
        return {"registers": registers, "spilled": 4 * spilled, "shared": kernel.metadata.shared}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = {key: int(count) for key, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout)}
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": kernel.metadata.shared}


def occupancy(target: str, warps: int, registers: int, shared: int) -> int:
    """Warps that a multiprocessor holds at once, by registers (64 K of them, allocated for a warp in steps of 256) and
    shared memory (1 KB of each block is the system's). Not for AMD, whose registers are counted otherwise."""
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
    by_shared = SHARED[target][1] // (shared + 1024)
    return min(by_registers, by_shared, 64 // warps, 32) * warps


def rows() -> Iterator[dict[str, Any]]:
    for target in TARGETS:
        for kind in ("bf16", "fp32"):
            for width, channels in SIZES:
                for config in configs(kind, width):
                    kernel = compiled(target, kind, width, channels, config)
                    row = {"target": target, "type": kind, "width": width, "channels": channels, **config.all_kwargs()}
                    row = {key: value for key, value in row.items() if value is not None and key != "num_ctas"}
                    row |= resources(target, kernel)
                    if target.startswith("sm_"):
                        row["warps"] = occupancy(target, config.num_warps, row["registers"], row["shared"])
                    yield row


def main() -> int:
    found = []
    for row in rows():
        found.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    out = Path(__file__).parent / "results" / "kernels.json"
    lines = ",\n".join(json.dumps(row) for row in found)
    out.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n{lines}\n]}}\n')
    return int(any(row["spilled"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
