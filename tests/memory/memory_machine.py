"""A small caching allocator that writes snapshots, so that tests know the truth about every moment.

It follows the real one in what matters here: sizes rounded to 512 bytes, small and large pools, best fit, splitting,
merging with free neighbours, segments given back whole. `used` holds the requested bytes in use after every event.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

MIB = 1 << 20
FORWARD = "/home/user/model.py"
Stack = list[dict[str, Any]]


def stack(*calls: str, file: str = FORWARD) -> Stack:
    """A Python stack, innermost first: each call is ``name`` or ``name:line``."""
    frames = []
    for call in calls:
        name, _, line = call.partition(":")
        frames.append({"name": name, "filename": file, "line": int(line or 1)})
    return frames


class Machine:
    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = start_us
        self.events: list[dict[str, Any]] = []
        self.used: list[int] = []
        self.in_use = 0
        self.segments: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {"expandable_segments": False, "max_split_size": -1}
        self.next_address = 0x7F00_0000_0000
        self.host_memory: list[tuple[int, int]] = []

    def note(self, action: str, size: int, frames: Stack, **more: Any) -> None:
        self.now_us += 10
        event = {"action": action, "size": size, "stream": 0, "time_us": self.now_us, "frames": frames, **more}
        self.events.append(event)
        self.used.append(self.in_use)

    def alloc(self, size: int, frames: Stack, stream: int = 0) -> int:
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= MIB
        kind = "small" if small else "large"
        fitting = [
            (block["size"], number, index)
            for number, segment in enumerate(self.segments)
            if segment["stream"] == stream and segment["segment_type"] == kind
            for index, block in enumerate(segment["blocks"])
            if block["state"] == "inactive" and block["size"] >= rounded
        ]
        if fitting:
            _, number, index = min(fitting)
        else:
            total = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            number, index = self._segment(total, kind, stream, frames), 0
        blocks = self.segments[number]["blocks"]
        block = blocks[index]
        rest = block["size"] - rounded
        if rest >= 512 if small else rest > MIB:
            blocks.insert(index + 1, _free_block(block["address"] + rounded, rest))
            block["size"] = rounded
        block |= {"state": "active_allocated", "requested_size": size, "frames": frames}
        self.in_use += size
        self.note("alloc", size, frames, addr=block["address"], stream=stream)
        return int(block["address"])

    def free(self, address: int, frames: Stack | None = None, complete: bool = True) -> None:
        frames = frames or []
        segment, index = self._find(address)
        block = segment["blocks"][index]
        size = block["requested_size"]
        self.note("free_requested", size, frames, addr=address)
        if not complete:
            block["state"] = "active_pending_free"
            return
        self.in_use -= size
        self.note("free_completed", size, frames, addr=address)
        segment["blocks"][index] = _free_block(address, block["size"])
        merged: list[dict[str, Any]] = []
        for each in segment["blocks"]:
            if merged and merged[-1]["state"] == each["state"] == "inactive":
                merged[-1]["size"] += each["size"]
            else:
                merged.append(each)
        segment["blocks"] = merged

    def give_back(self, frames: Stack) -> None:
        """Free every idle segment, as `empty_cache()` does."""
        kept = []
        for segment in self.segments:
            if all(block["state"] == "inactive" for block in segment["blocks"]):
                self.note("segment_free", segment["total_size"], frames, addr=segment["address"])
            else:
                kept.append(segment)
        self.segments = kept

    def step(self, name: str = "Optimizer.step#SGD.step") -> None:
        self.now_us += 10
        self.annotations.append({"stage": "START", "name": name, "device": 0, "time_us": self.now_us})
        self.annotations.append({"stage": "END", "name": name, "device": 0, "time_us": self.now_us})

    def data(self, window: int | None = None) -> dict[str, Any]:
        """What the snapshot file holds; `window` keeps the last so many events, as a full ring does."""
        segments = []
        for segment in self.segments:
            blocks = segment["blocks"]
            active = [block for block in blocks if block["state"] != "inactive"]
            live = [block for block in active if block["state"] == "active_allocated"]
            segments.append(
                segment
                | {
                    "allocated_size": sum(block["size"] for block in live),
                    "active_size": sum(block["size"] for block in active),
                    "requested_size": sum(block["requested_size"] for block in active),
                }
            )
        events = self.events if window is None else self.events[len(self.events) - window :]
        data = {
            "segments": segments,
            "device_traces": [events],
            "allocator_settings": self.settings,
            "external_annotations": self.annotations,
        }
        if self.host_memory:
            data["fettle"] = {"version": 1, "allocator": "cuda", "host_memory": self.host_memory}
        return data

    def save(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self.data(), protocol=4))
        return path

    def _segment(self, total: int, kind: str, stream: int, frames: Stack) -> int:
        address, self.next_address = self.next_address, self.next_address + total + MIB
        self.note("segment_alloc", total, frames, addr=address, stream=stream)
        self.segments.append(
            {
                "device": 0,
                "address": address,
                "total_size": total,
                "stream": stream,
                "segment_type": kind,
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": frames,
                "blocks": [_free_block(address, total)],
            }
        )
        return len(self.segments) - 1

    def _find(self, address: int) -> tuple[dict[str, Any], int]:
        for segment in self.segments:
            for index, block in enumerate(segment["blocks"]):
                if block["address"] == address:
                    return segment, index
        raise KeyError(address)


def _free_block(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


def healthy_training(steps: int = 10) -> Machine:
    """Parameters, then steps that allocate activations and gradients and free them all; optimizer state in step 0."""
    machine = Machine()
    machine.alloc(8 * MIB, stack("build:3"))
    for number in range(steps):
        activations = [
            machine.alloc(3 * MIB, stack("relu:10", "forward:20", "_call_impl:30", "step:40")),
            machine.alloc(3 * MIB, stack("linear:11", "forward:21", "_call_impl:31", "step:40")),
        ]
        gradient = machine.alloc(8 * MIB, [{"name": "MmBackward0::apply()", "filename": "??", "line": 0}])
        for address in reversed(activations):
            machine.free(address)
        if number == 0:
            machine.alloc(16 * MIB, stack("step:5", "step:41", file="/x/site-packages/torch/optim/adam.py"))
        machine.step()
        machine.free(gradient)
    return machine


OPERATION = st.tuples(
    st.sampled_from(["alloc", "alloc", "free", "give_back"]), st.integers(1, 30 * MIB), st.integers(0, 99)
)
"""What a program does, a size in bytes, and which block or line it does it with."""


def act(machine: Machine, held: list[int], plan: list[tuple[str, int, int]]) -> None:
    """Do the operations of `plan`; `held` are the blocks that are not freed yet."""
    for what, size, pick in plan:
        if what == "alloc":
            held.append(machine.alloc(size, stack(f"f:{pick % 5}")))
        elif what == "free" and held:
            machine.free(held.pop(pick % len(held)))
        elif what == "give_back":
            machine.give_back(stack("empty_cache:1"))
