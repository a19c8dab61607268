"""A session at rest: docs/protocol.md section 10.2."""

from .reader import V_MAX, Malformed, Reader

FORMATS = (3, 4)
EPOCHS_MAX = 8
RANGES_MAX = 16
FLOWS_MAX = 65536
COUNTERS = 2**24
# Milliseconds a clock of 64-bit nanoseconds holds; longer ones count as this.
MS_MAX = (2**64 - 1) // 10**6


def counters(r):
    """Runs of used counters as [first, the one after the last]."""
    count = r.uint(1)
    if count > RANGES_MAX:
        raise Malformed(f"{count} ranges")
    runs, beyond = [], -1
    for _ in range(count):
        first, many = r.v(), r.v()
        if not many or first <= beyond:
            raise Malformed("ranges that are empty, touch or go down")
        beyond = first + many
        if beyond > COUNTERS:
            raise Malformed("a counter of more than 24 bits")
        runs.append([first, beyond])
    return runs


def time_left(r):
    told = r.some()
    return told if told is None else min(told, MS_MAX)


def flow(r):
    ident = r.flow()
    bits = r.uint(1)
    said = {
        "id": ident,
        "durable": bool(bits & 1),
        "hibernates": bool(bits & 2),
        "send_complete": bool(bits & 4),
        "receive_complete": bool(bits & 8),
        "priority": bits >> 4 & 7,
        "reachable": bool(bits >> 7),
        "size": r.some(),
        "deadline_left_ms": time_left(r),
        "deadline_seq": r.v(),
        "sent_to": r.v(),
        "send_end": r.some(),
        "received_to": r.v(),
        "receive_end": r.some(),
        "reset": r.some(),
        "stopped": r.some(),
    }
    for at, end in (("sent_to", "send_end"), ("received_to", "receive_end")):
        if said[end] is not None and said[end] < said[at]:
            raise Malformed(f"{end} lies before {at}")
    return said


def read_record(record):
    r = Reader(record)
    form = r.uint(1)
    if form not in FORMATS:
        raise Malformed("another format")
    role = r.uint(1)
    if role > 1:
        raise Malformed(f"role {role}")
    said = {
        "role": ("initiator", "responder")[role],
        "peer": r.bytes(32).hex(),
        "instance": r.uint(8),
        "epoch": r.uint(4),
        "seen_floor": r.uint(4),
    }
    epochs = r.uint(1)
    if epochs > EPOCHS_MAX:
        raise Malformed(f"{epochs} epochs")
    said["seen"] = [[r.uint(4), counters(r)] for _ in range(epochs)]
    code = r.some()
    closing = {"code": code, "left_ms": min(r.v(), MS_MAX)} if code is not None else None
    said["closing"] = closing
    said["ticket"] = r.ticket() if role == 0 and r.flag() else None
    if form == 4:
        said["secret"] = [r.bytes(8).hex(), r.bytes(32).hex()]
    count = r.v()
    if count > FLOWS_MAX:
        raise Malformed(f"{count} flows")
    said["flows"] = [flow(r) for _ in range(count)]
    r.end()
    return said
