"""What can be read of a datagram without keys: docs/protocol.md section 2."""

from .reader import Malformed, Reader

VERSION = 1
CID = 8
TAG = 16
SYN_MIN = 160
NOISE_2 = 32 + 16

KINDS = {
    0b010: "DATA",
    0b100: "SYN",
    0b011: "WAKE",
    0b101: "SYN+ACK",
    0b110: "COOKIE",
    0b111: "UNKNOWN",
    0b001: "VERSION",
}


def read_head(datagram):
    """Kind, version, cid and the rest of any datagram that is D2TP at all (R-WIRE-1)."""
    r = Reader(datagram)
    first = r.uint(1)
    cid = r.bytes(CID)
    kind = KINDS.get(first >> 5)
    if kind is None:
        raise Malformed(f"{first >> 5:03b} names no kind")
    version = None if kind == "DATA" else first & 0x1F
    return {"kind": kind, "version": version, "cid": cid.hex(), "rest": r.rest().hex()}


def body_of(datagram, kind):
    """The cid and what follows it, if the datagram is a `kind` of our version."""
    head = read_head(datagram)
    if head["kind"] != kind:
        raise Malformed(f"not a {kind}")
    if head["version"] not in (None, VERSION):
        raise Malformed(f"version {head['version']}")
    return head["cid"], Reader(bytes.fromhex(head["rest"]))


def read_parts(datagram):
    """The fields in clear of a datagram of our version, for somebody who looks at one."""
    head = read_head(datagram)
    cid, r = body_of(datagram, head["kind"])
    said = {"kind": head["kind"], "cid": cid}
    if head["kind"] == "DATA":
        if r.left() < 4 + TAG:
            raise Malformed("too short for a number and a tag")
        return said | {"sealed": r.rest().hex()}
    if head["kind"] in ("SYN", "WAKE"):
        if len(datagram) < SYN_MIN:
            raise Malformed(f"a {head['kind']} below 160 bytes")
        if head["kind"] == "WAKE":
            said |= {"ticket": r.bytes(76).hex()}
        message = r.bytes(r.left() - 32)
        return said | {"message": message.hex(), "mac1": r.bytes(16).hex(), "mac2": r.bytes(16).hex()}
    if head["kind"] == "SYN+ACK":
        if r.left() < NOISE_2:
            raise Malformed("too short for Noise message 2")
        return said | {"message": r.rest().hex()}
    if head["kind"] == "VERSION":
        return said | {"versions": list(r.rest())}
    if head["kind"] == "COOKIE":
        said |= {"nonce": r.bytes(12).hex(), "sealed": r.bytes(32).hex()}
    else:
        said |= {"token": r.bytes(16).hex()}
    r.end()
    return said
