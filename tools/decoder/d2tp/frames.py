"""The plaintext of a DATA packet: docs/protocol.md section 5.

A frame is a row of a table here as there. Adding one is adding a row.
"""

from .reader import V_MAX, Malformed, Reader

PADDING = 0x00
REASONS = 17
CLOSE_TEXT_MAX = 256


def reason(r):
    """What is unknown reads as 0."""
    value = r.uint(1)
    return value if value <= REASONS else 0


def status(r):
    value = r.uint(1)
    if value > 3:
        raise Malformed(f"status {value}")
    return value


def hexed(n):
    return lambda r: r.bytes(n).hex()


v, v32, some, flag, flow = Reader.v, Reader.v32, Reader.some, Reader.flag, Reader.flow


def u8(r):
    return r.uint(1)


def half(r):
    return int(r.flag())


def string(r):
    return r.string().hex()


def text(r):
    told = r.string()
    if len(told) > CLOSE_TEXT_MAX:
        raise Malformed(f"a text of {len(told)} bytes")
    return told.decode("utf-8", "replace")


def ranges(largest, count, first, r):
    """[low, high] of each run of numbers that arrived, the highest first (section 9.1)."""
    low = largest - first
    runs = [[low, largest]]
    # Each range takes two bytes at least: a count that lies ends with the bytes, not with memory.
    for _ in range(count):
        gap, length = r.v(), r.v()
        high = low - gap - 2
        low = high - length
        runs.append([low, high])
    if low < 0:
        raise Malformed("a range below zero")
    return runs


def ack(r):
    path, largest, delay_us, count, first = r.v32(), r.v(), r.v(), r.v(), r.v()
    return {"path": path, "delay_us": delay_us, "ranges": ranges(largest, count, first, r)}


def data(fin):
    def read(r):
        ident, offset, carried = r.flow(), r.v(), r.string()
        if offset + len(carried) > V_MAX:
            raise Malformed("bytes beyond the largest offset")
        return {"flow": ident, "offset": offset, "fin": fin, "bytes": carried.hex()}

    return read


def fields(*wanted):
    def read(r):
        return {name: kind(r) for name, kind in wanted}

    return read


FRAMES = {
    PADDING: ("PADDING", fields()),
    0x01: ("PING", fields()),
    0x02: ("ACK", ack),
    0x03: ("ACK_RATE", fields(("path", v32), ("every", v32), ("delay_us", v))),
    0x04: ("KEY_SHARE", fields(("half", half), ("bytes", string))),
    0x08: ("DATA", data(False)),
    0x09: ("DATA", data(True)),
    0x10: (
        "OPEN",
        fields(("flow", flow), ("flags", u8), ("priority", u8), ("size", some), ("deadline_ms", some)),
    ),
    0x11: ("RESET", fields(("flow", flow), ("code", v), ("final_size", v))),
    0x12: ("STOP", fields(("flow", flow), ("code", v))),
    0x13: ("FLOW_CREDIT", fields(("flow", flow), ("max", v))),
    0x14: ("SESSION_CREDIT", fields(("max", v))),
    0x15: ("DEADLINE", fields(("flow", flow), ("seq", v), ("remaining_ms", some))),
    0x16: ("DURABLE", fields(("flow", flow), ("offset", v))),
    0x17: ("COMMITTED", fields(("flow", flow), ("offset", v))),
    0x18: ("GRANT", fields(("seq", v), ("flow", flow), ("path", v32), ("max_sent", v))),
    0x19: ("SPENT", fields(("flow", flow), ("path", v32), ("sent", v))),
    0x1A: (
        "PATH_STATUS",
        fields(("path", v32), ("seq", v), ("status", status), ("gated", flag), ("reason", reason)),
    ),
    0x1B: ("PATH_LIMIT", fields(("path", v32), ("seq", v), ("bytes", v))),
    0x1C: ("FLOW_PAUSE", fields(("flow", flow), ("seq", v), ("paused", flag), ("reason", reason))),
    0x20: ("CHG", fields(("nonce", hexed(16)))),
    0x21: ("RSP", fields(("nonce", hexed(16)))),
    0x22: ("AUTH", fields(("path", v32))),
    0x23: ("PATH_CID", fields(("path", v32), ("cid", hexed(8)), ("token", hexed(16)))),
    0x28: ("RESUME", fields(("flow", flow), ("received", v), ("flags", u8))),
    0x29: ("RESUMED", fields(("flow", flow), ("received", v))),
    0x2A: ("REFUSED", fields(("flow", flow), ("reason", reason))),
    0x2B: ("RESUME_END", fields(("flows", v))),
    0x30: ("DATAGRAM", fields(("context", v), ("bytes", string))),
    0x3C: ("SUSPEND", fields(("reason", reason))),
    0x3E: ("CLOSE", fields(("code", v), ("text", text))),
}


def read_frames(plaintext):
    """Every frame but PADDING as [name, fields]; Malformed if there is anything else (R-WIRE-2)."""
    r = Reader(plaintext)
    found = []
    while r.left():
        kind = r.uint(1)
        if kind not in FRAMES:
            raise Malformed(f"no frame of type {kind:02x}")
        name, read = FRAMES[kind]
        said = read(r)
        if kind != PADDING:
            found.append([name, said])
    return found
