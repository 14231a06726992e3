"""May this pickle be loaded? Only if its instructions can build nothing but plain data.

A pickle is a program. Before it runs, `scan` walks over its opcodes and accepts only those that make dictionaries,
lists, pairs of numbers, strings, numbers, booleans and None. That settles at once what a file from outside could try:

- classes and calls (GLOBAL, REDUCE, BUILD, persistent ids ...) are not in the list;
- a tiny file that asks for a huge memo (the C unpickler allocates for the largest memo index it meets) is refused:
  an index may not exceed the file's own length;
- strings longer than the file, huge integers and byte arrays that are allocated before they are read are refused;
- nested tuples used as dictionary keys, which overflow the C stack when they are hashed, cannot be built;
- dictionaries of numbers, or pairs of them, that were chosen to have one hash take a time that grows with the square of
  their count: the unpickler is fed a piece at a time, and is given no more once it has taken too long.

Runs of fixed-size opcodes are matched by one possessive regular expression, so a scan costs about 10 ns an opcode.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
import time
from typing import NoReturn

from fettle.errors import UsageError

_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x08.{8}|\x07.{7}|\x06.{6}|\x05.{5}|\x04.{4}|\x09.{8}\x00|\x03...|\x02..|\x01.|\x00))"
_FRAME = rb"\x95..[\x00-\x02]\x00{5}"  # those of Python end after 64 KiB and one more string of less
_PAIR = _INT + rb"(?:" + _FRAME + rb")?+" + _INT + rb"(?:" + _FRAME + rb")?+\x86"  # a frame may end within it
_STRINGS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # opcode -> bytes of its length field: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
_STOP, _LONG1 = 0x2E, 0x8A
_LEAST_S, _S_PER_BYTE = 5.0, 5e-7
"""CPU time that loading may take: ten times and more what honest files do."""
_FORBIDDEN = {
    "names a class": ("GLOBAL", "STACK_GLOBAL"),
    "calls a function": ("REDUCE",),
    "sets an object's state": ("BUILD",),
    "makes an object": ("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"),
    "refers to something outside": ("PERSID", "BINPERSID"),
    "names an extension class": ("EXT1", "EXT2", "EXT4"),
    "asks for a byte array": ("BYTEARRAY8",),
    "asks for a frame larger than any that is written": ("FRAME",),
    "uses a memo index beyond its own length": ("LONG_BINPUT", "LONG_BINGET"),
    "holds an integer of more than 64 bits": ("LONG1", "LONG4"),
    "nests tuples": ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def load_plain_data(raw: bytes, name: str) -> object:
    """The value in a pickle that can only hold plain data, or `UsageError`; `name` is for the message."""
    scan(raw, name)
    was_collecting = gc.isenabled()
    gc.disable()  # millions of dictionaries without a cycle among them: collecting while loading doubles the time
    try:
        return _PlainUnpickler(_Fed(raw, name)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise UsageError(f"{name}: damaged pickle, its instructions do not fit together") from None
    except (MemoryError, RecursionError, OverflowError):
        raise UsageError(f"{name}: this pickle asks for more memory than there is") from None
    finally:
        if was_collecting:
            gc.enable()


def scan(raw: bytes, name: str) -> None:
    """Refuse, with `UsageError`, every pickle that could do more than build plain data of about its own size."""
    length = len(raw)
    if length < 4 or raw[0] != 0x80:
        raise UsageError(f"{name}: not a memory snapshot (a pickle of protocol 2 or later is expected)")
    run = _run_of_fixed_opcodes(length)
    position = 0
    while True:
        match = run.match(raw, position)
        position = match.end() if match else position
        if position >= length:
            raise UsageError(f"{name}: truncated, the file ends in the middle of the pickle")
        opcode = raw[position]
        if opcode == _STOP:
            return
        width = _STRINGS.get(opcode)
        if width is None:
            _refuse(raw, position, name)
        size = int.from_bytes(raw[position + 1 : position + 1 + width], "little")
        position += 1 + width + size
        if position > length:
            raise UsageError(f"{name}: truncated, a string of {size} bytes reaches beyond the end of the file")


def _run_of_fixed_opcodes(length: int) -> re.Pattern[bytes]:
    """Matches as many harmless opcodes of fixed size as stand in a row; long memo indices only up to `length`."""
    top = length >> 24
    memo_index = rb"..." + _byte_up_to(min(top, 255)) if top else rb".." + _byte_up_to(length >> 16) + rb"\x00"
    fixed = [
        rb"[hq].",  # BINGET, BINPUT
        rb"[rj]" + memo_index,  # LONG_BINPUT, LONG_BINGET
        rb"\x94",  # MEMOIZE
        _PAIR,  # a pair of integers (a pool id): the only tuple that a snapshot holds
        _INT,
        rb"[N\x88\x89\]})]",  # None, True, False, [], {}, ()
        rb"[(ueas021]",  # MARK, SETITEMS, APPENDS, APPEND, SETITEM, POP, DUP, POP_MARK
        rb"G.{8}",  # BINFLOAT
        _FRAME,
        rb"\x80.",  # PROTO
    ]
    return re.compile(rb"(?s:" + rb"|".join(fixed) + rb")*+")


def _byte_up_to(largest: int) -> bytes:
    return rb"[\x00-" + re.escape(bytes([largest])) + rb"]"


def _refuse(raw: bytes, position: int, name: str) -> NoReturn:
    code, left = raw[position], len(raw) - position - 1
    opcode = next((one for one in pickletools.opcodes if one.code == chr(code)), None)
    width = max(opcode.arg.n, 0) if opcode is not None and opcode.arg is not None else 0
    if code == _LONG1:
        width = 1 + raw[position + 1] if left and raw[position + 1] <= 9 else 1
    if left < width:  # a harmless one that the end of the file cuts off
        raise UsageError(f"{name}: truncated, the file ends in the middle of the pickle")
    what = f"0x{code:02x}" if opcode is None else opcode.name
    reasons = [reason for reason, opcodes in _FORBIDDEN.items() if what in opcodes]
    reason = reasons[0] if reasons else "uses an instruction that plain data does not need"
    raise UsageError(f"{name}: refused, not plain data: this pickle {reason} ({what})")


class _Fed(io.BytesIO):
    """The file, a piece at a time: the unpickler asks for more after 16 KiB, or after a frame."""

    def __init__(self, raw: bytes, name: str) -> None:
        super().__init__(raw)
        self._name, self._end_s = name, time.thread_time() + _LEAST_S + _S_PER_BYTE * len(raw)

    def peek(self, size: int) -> bytes:
        at, piece = self.tell(), self.read(size)
        self.seek(at)
        return piece

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self._end_s:
            raise UsageError(f"{self._name}: refused, it takes far longer to read than snapshots of its size")
        return super().read(size)


class _PlainUnpickler(pickle.Unpickler):
    """The second line of defence: resolves no name, whatever got past the scan."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError("a snapshot names no class")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("a snapshot has no persistent ids")
