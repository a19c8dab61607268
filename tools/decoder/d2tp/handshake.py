"""SYN, WAKE, COOKIE and SYN+ACK: docs/protocol.md section 3."""

import hashlib

from . import crypto, noise, packets
from .crypto import Forged, hmac256
from .frames import read_frames, reason
from .reader import V_MAX, Malformed, Reader

PROLOGUE = b"D2TP\x01"
SPARE_MAX = 8
CLAIMS_MAX = 64
EARLY_DATA = 255
HYBRID = 16
TRAILER = 9
EARLY_FRAMES = ("OPEN", "DATA")
SUITES = {1: "AES-128-GCM", 2: "ChaCha20-Poly1305"}


def spare(r, entry):
    count = r.uint(1)
    if count > SPARE_MAX:
        raise Malformed(f"{count} connection ids")
    return [entry(r) for _ in range(count)]


def claims_or_early_data(r, epoch):
    count = r.uint(1) if r.left() else 0
    if count == EARLY_DATA:
        return {"metered": False, "claims": [], "early_data": early_data(r.string(), epoch)}
    return {**claims(r, count), "early_data": None}


def claims(r, count):
    """Sections 3.1 and 10.1; R-HS-15."""
    if count > CLAIMS_MAX:
        raise Malformed(f"{count} claims")
    metered = r.flag() if count else False
    said = [claim(r) for _ in range(count)]
    if len({c["flow"] for c in said}) < count:
        raise Malformed("a flow is claimed twice")
    return {"metered": metered, "claims": said}


def claim(r):
    said = {"flow": r.flow(), "received": r.v(), "credit": r.v(), "complete": r.flag()}
    if said["received"] + said["credit"] > V_MAX:
        raise Malformed("credit beyond the largest offset")
    return said


def early_data(told, epoch):
    """Section 3.5; the layout of a flow id is in section 7."""
    for name, said in read_frames(told):
        if name not in EARLY_FRAMES:
            raise Malformed(f"{name} as early data")
        if said["flow"] & 1:
            raise Malformed("early data of a flow of the server's")
        if said["flow"] >> 25 > epoch:
            raise Malformed("early data of an epoch to come")
    return told.hex()


def read_syn_payload(payload):
    """Fields in their order; what follows them is padding."""
    r = Reader(payload)
    said = {
        "instance": r.uint(8),
        "epoch": r.uint(4),
        "suites": list(r.bytes(r.uint(1))),
        "session_credit": r.v(),
        "flow_credit": r.v(),
        "cids": spare(r, lambda r: r.bytes(8).hex()),
    }
    said.update(claims_or_early_data(r, said["epoch"]))
    if HYBRID in said["suites"]:
        said["hybrid"] = trailer(r.rest())
    return said


def trailer(padding):
    """The end of the payload of a SYN that offers hybrid keys (section 3.7)."""
    end = padding[-TRAILER:] if len(padding) >= TRAILER else bytes(TRAILER)
    return {
        "secret": end[1:].hex() if end[0] & 1 else None,
        "required": bool(end[0] & 2),
    }


def read_syn_ack_payload(payload):
    """What follows the fields is not read."""
    r = Reader(payload)
    answer = r.uint(1)
    if answer == 0:
        said = {
            "kind": "welcome",
            "cid": r.bytes(8).hex(),
            "token": r.bytes(16).hex(),
            "suite": r.uint(1),
            "resumed": r.uint(1) == 1,
            "session_credit": r.v(),
            "flow_credit": r.v(),
            "spare": spare(r, lambda r: [r.bytes(8).hex(), r.bytes(16).hex()]),
        }
        if said["suite"] not in SUITES:
            raise Malformed(f"suite {said['suite']}")
        # A welcome that ends here, or says anything but 1, comes without.
        said["ticket"] = r.ticket() if r.left() and r.uint(1) == 1 else None
        hybrid = r.uint(1) if r.left() else 0
        if hybrid in (1, 2):
            said["hybrid"] = hybrid
    elif answer == 1:
        said = {"kind": "stale", "confirmed": r.uint(4)}
    elif answer == 2:
        said = {"kind": "refused", "reason": reason(r)}
    elif answer == 3:
        said = {"kind": "no suite"}
    elif answer == 4:
        said = {"kind": "no ticket"}
    elif answer == 5:
        said = {"kind": "later"}
    else:
        raise Malformed(f"an answer of kind {answer}")
    return said


def mac1_of(server_public, before):
    key = hashlib.sha256(b"d2tp mac1" + server_public).digest()
    return hmac256(key, before)[:16]


def wake_prologue(server_public, device_public, ticket):
    return PROLOGUE + server_public + device_public + ticket


def parts_for(server_public, datagram, kind):
    """The parts of a SYN or WAKE that was made for this server (R-HS-6)."""
    parts = packets.read_parts(datagram)
    if parts["kind"] != kind:
        raise Malformed(f"not a {kind}")
    if mac1_of(server_public, datagram[:-32]).hex() != parts["mac1"]:
        raise Malformed("mac1 is wrong")
    return parts


def read_syn(datagram, server_secret, cookie=None):
    """A SYN as its server sees it: whose it is, from a proved address or not, what it says."""
    parts = parts_for(crypto.x25519_base(server_secret), datagram, "SYN")
    proved = cookie is not None and hmac256(cookie, datagram[:-16])[:16].hex() == parts["mac2"]
    responder = noise.Responder(PROLOGUE, server_secret)
    device, payload = responder.read_1(bytes.fromhex(parts["message"]))
    return {
        "cid": parts["cid"],
        "device": device.hex(),
        "address_proved": proved,
        "payload": read_syn_payload(payload),
    }


def read_wake(datagram, server_secret, device_public, ticket_secret):
    """A WAKE as its server sees it, which knows whose the ticket is and its secret."""
    public = crypto.x25519_base(server_secret)
    parts = parts_for(public, datagram, "WAKE")
    prologue = wake_prologue(public, device_public, bytes.fromhex(parts["ticket"]))
    responder = noise.PskResponder(prologue, ticket_secret)
    payload = responder.read_1(bytes.fromhex(parts["message"]))
    return {
        "cid": parts["cid"],
        "ticket": parts["ticket"],
        "payload": read_syn_payload(payload),
    }


def read_syn_ack(datagram, initiator):
    """A SYN+ACK as its device sees it; the keys are then in `initiator`, of either pattern."""
    parts = packets.read_parts(datagram)
    if parts["kind"] != "SYN+ACK":
        raise Malformed("not a SYN+ACK")
    payload = initiator.read_2(bytes.fromhex(parts["message"]))
    return {"cid": parts["cid"], "payload": read_syn_ack_payload(payload)}


def read_cookie(datagram, server_public, mac1):
    parts = packets.read_parts(datagram)
    if parts["kind"] != "COOKIE":
        raise Malformed("not a COOKIE")
    key = hashlib.sha256(b"d2tp cookie" + server_public).digest()
    try:
        cookie = crypto.chacha_open(
            key, bytes.fromhex(parts["nonce"]), mac1, bytes.fromhex(parts["sealed"])
        )
    except Forged as forged:
        raise Malformed(str(forged)) from None
    return {"cid": parts["cid"], "cookie": cookie.hex()}


def read_unknown(datagram, token):
    """UNKNOWN, if its token is the one that came with the cid (R-UNKNOWN-1)."""
    parts = packets.read_parts(datagram)
    if parts["kind"] != "UNKNOWN" or parts["token"] != token.hex():
        raise Malformed("not an UNKNOWN with that token")
    return {"cid": parts["cid"]}
