"""The scalars of TensorBoard's event files, read without TensorBoard.

A file is records: length (8 bytes), checksum (4), Event, checksum (4). An Event is protobuf: wall_time = 1, step = 2,
summary = 5, whose values = 1 have a tag = 1 and a simple_value = 2 or a tensor = 8 of one element (dtype = 1,
content = 4, float_val = 5, double_val = 6). Checksums are not verified: what cannot be parsed is counted.
"""

import struct
from collections.abc import Iterator
from typing import Any


def scalars(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Each event's scalars by tag, with its ``step`` and ``wall_time`` (s); and how many records are damaged or cut.

    >>> scalars(b"")
    ([], 0)
    """
    rows, damaged, at = [], 0, 0
    while at < len(data):
        size = struct.unpack_from("<Q", data, at)[0] if at + 12 <= len(data) else len(data)
        event, at = data[at + 12 : at + 12 + size], at + 16 + size
        try:
            rows.append(dict(_scalars(event)) if at <= len(data) else {})
            damaged += at > len(data)
        except (ValueError, LookupError, TypeError, AttributeError, struct.error):
            damaged += 1
    return [row for row in rows if len(row) > 2], damaged


def _scalars(event: bytes) -> Iterator[tuple[str, Any]]:
    yield "step", 0
    for number, content in _fields(event):
        if number in (1, 2):
            yield ("wall_time", struct.unpack("<d", content)[0]) if number == 1 else ("step", content)
        for _, item in _fields(content) if number == 5 else ():
            value = dict(_fields(item))
            tensor = dict(_fields(value.get(8, b"")))
            held = tensor.get(4) or tensor.get(5) or tensor.get(6) or b"" if tensor.get(1) in (1, 2) else value.get(2)
            if held is not None and len(held) in (4, 8):
                yield value[1].decode(), struct.unpack("<f" if len(held) == 4 else "<d", held)[0]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """A protobuf message's fields by number: a whole number, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while shift == 0 or data[at - 1] > 127:
            value, at, shift = value | (data[at] & 127) << shift, at + 1, shift + 7
        return value

    while at < len(data):
        key = varint()
        number = varint() if key & 7 in (0, 2) else {1: 8, 5: 4}[key & 7]  # others are no protobuf
        yield key >> 3, number if key & 7 == 0 else data[at : at + number]
        at += 0 if key & 7 == 0 else number
