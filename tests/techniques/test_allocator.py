"""The allocator: what a recipe asks for is what the process really has."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict, keeps_memory, machine_facts, source
from fettle.workload import find_target

WORKLOAD = """
import torch

class Who(torch.nn.Module):
    def forward(self, x):
        mapped = open("/proc/self/maps").read()
        print("mapped:", *(name for name in ("jemalloc", "tcmalloc") if f"lib{name}" in mapped))
        return x * 2

def workload():
    return Who(), [torch.ones(2)]
"""
HERE = machine_facts().libraries


def needs(name):
    return pytest.param(name, marks=pytest.mark.skipif(name not in HERE, reason=f"lib{name} is not installed"))


@pytest.mark.parametrize("name", [needs("jemalloc"), needs("tcmalloc")])
def test_the_script_starts_again_with_the_allocator(name, tmp_path):
    (tmp_path / "who.py").write_text(WORKLOAD)
    target = (str(tmp_path / "who.py"), "workload")
    script = tmp_path / "optimized.py"
    script.write_text(source(Recipe({"allocator": name}), Facts(libraries=HERE), target=target))
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "an argument"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(f"mapped: {name}\n") == 2  # once for each call, and the file ran once
    assert "conf" not in done.stderr  # jemalloc tells of options that it does not know


@pytest.mark.parametrize("name", [needs("jemalloc"), needs("tcmalloc")])
def test_a_worker_has_the_allocator(name, tmp_path):
    from fettle.measure import Worker, messages
    from fettle.techniques import find

    (tmp_path / "who.py").write_text(WORKLOAD)
    environment = find("allocator").code(name, Recipe({"allocator": name}), Facts(libraries=HERE)).environment
    with Worker(environment) as worker:
        target = find_target(str(tmp_path / "who.py"))
        worker.ask(messages.Build(target), messages.Built, 60)  # until it answers, the interpreter may not have begun
        assert f"lib{name}" in Path(f"/proc/{worker.pid}/maps").read_text()


@pytest.mark.skipif("glibc" not in HERE, reason="the C library is not glibc")
def test_freed_memory_is_kept():
    """A piece that is freed and allocated again does not cost its pages anew.

    The first calls may: glibc keeps the slivers that alignment cuts off in its cache of small pieces, seven of a size,
    and until that is full they stand between a freed piece and the rest of the heap.
    """
    script = source(Recipe({"allocator": "keep"}), Facts(libraries=HERE))
    script += """
import resource

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given = [faults() for _ in range(3)]
optimize(None, [])
print(given[-1], max([faults() for _ in range(40)][-8:]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    given, kept = map(int, done.stdout.split())
    assert kept * 4 < given


def test_only_where_the_library_is():
    facts = replace(Facts(), libraries={})
    assert conflict(Recipe({"allocator": "jemalloc"}), facts) == "allocator=jemalloc: jemalloc was not found"
    assert conflict(Recipe({"allocator": "keep"}), facts) == "allocator=keep: the C library is not glibc"


def test_importing_the_file_starts_nothing():
    """Only a file that is run by itself may start the process again: a program that imports it goes on."""
    text = source(Recipe({"allocator": "jemalloc"}), Facts(libraries={"jemalloc": "/nowhere/libjemalloc.so.2"}))
    before = dict(os.environ)
    exec(compile(text, "optimized.py", "exec"), {"__name__": "optimized"})
    assert dict(os.environ) == before
    assert "#   LD_PRELOAD=/nowhere/libjemalloc.so.2 MALLOC_CONF=" in text


def test_levels_of_device_memory_are_for_gpus():
    gpu = Facts(device="cuda", libraries=HERE)
    assert conflict(Recipe({"allocator": "expandable"}), gpu) == ""
    assert conflict(Recipe({"allocator": "cuda-async", "cuda_graphs": "off"}), gpu) == ""
    assert "the work is on a GPU" in conflict(Recipe({"allocator": "keep"}), gpu)
    for level in ("expandable", "cuda-async"):
        assert conflict(Recipe({"allocator": level}), Facts()).endswith("the work is not on a CUDA device")


@pytest.mark.parametrize(
    ("level", "read"),
    [
        pytest.param(
            "expandable",
            "torch._C._accelerator_getAllocatorSettings()",
            marks=pytest.mark.skipif(
                not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell them"
            ),
        ),
        ("cuda-async", 'os.environ["PYTORCH_CUDA_ALLOC_CONF"]'),
    ],
)
def test_the_script_sets_it_before_torch_is_imported_whatever_the_shell_says(level, read):
    text = source(Recipe({"allocator": level}), Facts(device="cuda"))
    assert text.index("PYTORCH_ALLOC_CONF") < text.index("import torch")
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    environment = {**os.environ, **dict.fromkeys(names, "max_split_size_mb:128")}
    done = subprocess.run(
        [sys.executable, "-c", f"{text}\nprint({read})"], capture_output=True, text=True, env=environment
    )
    assert {"expandable": "expandable_segments:True", "cuda-async": "backend:cudaMallocAsync"}[level] in done.stdout


def test_the_level_that_keeps_freed_memory_is_found_without_its_name():
    assert keeps_memory(Facts()) == {"allocator": "keep"}
    assert keeps_memory(Facts(libraries={"tcmalloc": "libtcmalloc.so"})) == {"allocator": "tcmalloc"}
    assert keeps_memory(Facts(device="cuda")) == {}
