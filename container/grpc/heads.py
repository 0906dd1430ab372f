"""The bytes of a ModelInferRequest that many requests have in common: all but the id and the raw contents. PURE.

Clients write fields in the order of their numbers. A message in which anything else is the case is read by protobuf.

    model_name, model_version, id, parameters, inputs, outputs      the head, less the id
    raw_input_contents …                                            the tensors
"""

from __future__ import annotations

from container.grpc import grpc_service_pb2 as pb

_FIELDS = {field.name: field.number << 3 | 2 for field in pb.ModelInferRequest.DESCRIPTOR.fields}  # each has a length
_ID = _FIELDS["id"]
_RAW = _FIELDS["raw_input_contents"]
_LONGEST = 4096  # bytes of a head


def split(data: bytes) -> tuple[bytes, str, int] | None:
    """The head, the id, and where the raw contents begin; None of a message that has no such parts."""
    at, has = 0, len(data)
    id_at = id_end = text_at = 0
    while at < has and data[at] != _RAW:
        tag = data[at]
        if tag & 7 != 2 or tag > 127:
            return None
        start, end = _field(data, at)
        if end > has or end > _LONGEST:
            return None
        if tag == _ID:
            if id_end:
                return None
            id_at, text_at, id_end = at, start, end
        at = end
    if at >= has:
        return None
    if not id_end:
        return data[:at], "", at
    try:
        return data[:id_at] + data[id_end:at], data[text_at:id_end].decode(), at
    except UnicodeDecodeError:
        return None  # protobuf says what is wrong with it


def contents(data: bytes, at: int) -> list[tuple[int, int]] | None:
    """Where each of the raw contents lies, which are all that follows; None where something else follows, too."""
    found = []
    has = len(data)
    while at < has:
        if data[at] != _RAW:
            return None
        start, end = _field(data, at)
        if end > has:
            return None
        found.append((start, end))
        at = end
    return found


def _field(data: bytes, at: int) -> tuple[int, int]:
    """Where the bytes of the field that begins here lie; behind the message, where it ends too early."""
    has = len(data)
    size = shift = 0
    while True:
        at += 1
        if at >= has or shift > 28:
            return has, has + 1
        byte = data[at]
        size |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    start = at + 1
    return start, start + size
