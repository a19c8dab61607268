"""What can be read of a datagram without keys: docs/protocol.md section 2."""

from .reader import Malformed, Reader

VERSION = 1
CID = 8
TAG = 16
SYN_MIN = 1200
NOISE_1 = 32 + 48 + 16
NOISE_2 = 32 + 16


def data(first, r):
    if r.left() < 4 + TAG:
        raise Malformed("too short for a number and a tag")
    return {"sealed": r.rest().hex()}


def syn(first, r):
    if len(r.data) < SYN_MIN:
        raise Malformed("a SYN below 1,200 bytes")
    message = r.bytes(r.left() - 32)
    return {"message": message.hex(), "mac1": r.bytes(16).hex(), "mac2": r.bytes(16).hex()}


def syn_ack(first, r):
    if r.left() < NOISE_2:
        raise Malformed("too short for Noise message 2")
    return {"message": r.rest().hex()}


def cookie(first, r):
    said = {"nonce": r.bytes(12).hex(), "sealed": r.bytes(32).hex()}
    r.end()
    return said


def unknown(first, r):
    said = {"token": r.bytes(16).hex()}
    r.end()
    return said


def version(first, r):
    return {"versions": list(r.rest())}


KINDS = {
    0b010: ("DATA", data),
    0b100: ("SYN", syn),
    0b101: ("SYN+ACK", syn_ack),
    0b110: ("COOKIE", cookie),
    0b111: ("UNKNOWN", unknown),
    0b001: ("VERSION", version),
}


def read_datagram(datagram):
    """Kind, version and cid of a datagram, and the parts in clear of what is ours."""
    r = Reader(datagram)
    first = r.uint(1)
    cid = r.bytes(CID)
    if first >> 5 not in KINDS:
        raise Malformed(f"{first >> 5:03b} names no kind")
    name, read = KINDS[first >> 5]
    said = {"kind": name, "cid": cid.hex()}
    if name == "DATA":
        return said | read(first, r)
    said["version"] = first & 0x1F
    if said["version"] != VERSION:
        # Another version's packet: nothing beyond the cid is known of it.
        return said
    return said | read(first, r)
