"""The events of a trace as typed structs that name only the fields we keep; msgspec skips the rest unbuilt."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec


class Args(msgspec.Struct, gc=False):
    """The arguments that we keep. Rare ones are `Any`: absent they cost nothing. Numbers that are not there are -1, so
    that a column of them is an array at once."""

    stream: int | str | float | None = None
    device: int | str | None = None
    correlation: int | None = -1
    external: int | None = msgspec.field(name="External id", default=-1)
    external_old: int | None = msgspec.field(name="external id", default=-1)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())  # empty: not recorded
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())
    sequence: int | None = msgspec.field(name="Sequence number", default=-1)
    stack: Any = msgspec.field(name="Call stack", default=None)
    bytes: Any = None
    gb_per_s: Any = msgspec.field(name="memory bandwidth (GB/s)", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    sync: Any = msgspec.field(name="cuda_sync_kind", default=None)
    wait_on_stream: Any = None
    wait_on_record: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    blocks: float | None = msgspec.field(name="blocks per SM", default=None)
    occupancy: float | None = msgspec.field(name="est. achieved occupancy %", default=None)
    file: Any = msgspec.field(name="kernel_file", default=None)
    address: Any = msgspec.field(name="Addr", default=None)
    memory_bytes: Any = msgspec.field(name="Bytes", default=None)
    allocated: Any = msgspec.field(name="Total Allocated", default=None)
    reserved: Any = msgspec.field(name="Total Reserved", default=None)
    memory_device: Any = msgspec.field(name="Device Id", default=None)
    memory_device_type: Any = msgspec.field(name="Device Type", default=None)
    name: Any = None


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """As `Event`, with clocks as decimal text: for fractional microseconds since 1970, which a float64 would round."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


decode_fast = msgspec.json.Decoder(list[Event]).decode
decode_exact = msgspec.json.Decoder(list[ExactEvent]).decode
NO_ARGS = Args()
