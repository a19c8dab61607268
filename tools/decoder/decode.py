#!/usr/bin/env python3
"""Reads D2TP. Needs Python 3.9 and nothing else.

    decode.py datagram HEX     kind, connection id and fields in clear
    decode.py frames HEX       the plaintext of a DATA packet
    decode.py record HEX       a session at rest
    decode.py check FILE …     cases as in docs/vectors/agreement: does this decoder agree?
    decode.py say              cases as JSON lines on stdin; a verdict for each on stdout

A case is a JSON object: `case` (a name of CASES below), `given` (keys and the like) and `hex`.
A verdict is what the bytes say, as JSON, or null if a receiver must refuse them.
"""

import json
import sys

from d2tp import crypto, frames, handshake, noise, packets, protection, records
from d2tp.reader import Malformed

unhex = bytes.fromhex


def opened(keys, packet, given):
    expected = given["expected"]
    largest = expected - 1 if expected else None
    return keys.open(packet, given["path"], largest, given["generation"])


def packet(told, given):
    keys = protection.Direction(given["suite"], unhex(given["key"]), unhex(given["transcript"]))
    return opened(keys, told, given)


def syn(told, given):
    cookie = unhex(given["cookie"]) if given["cookie"] else None
    return handshake.read_syn(told, unhex(given["server_secret"]), cookie)


def wake(told, given):
    names = ("server_secret", "device_public", "ticket_secret")
    return handshake.read_wake(told, *(unhex(given[name]) for name in names))


def initiator_of(given):
    """Whoever said SYN, or WAKE if there is a ticket."""
    secret, ephemeral = unhex(given["device_secret"]), unhex(given["device_ephemeral"])
    server, payload = unhex(given["server_public"]), unhex(given["payload"])
    if given["ticket"] is None:
        return noise.Initiator(handshake.PROLOGUE, secret, ephemeral, server, payload)
    ticket, psk = map(unhex, given["ticket"])
    prologue = handshake.wake_prologue(server, crypto.x25519_base(secret), ticket)
    return noise.PskInitiator(prologue, psk, ephemeral, payload)


def syn_ack(told, given):
    """The answer, and the server's first packet under the keys it leaves."""
    initiator = initiator_of(given)
    said = handshake.read_syn_ack(told, initiator)
    if said["payload"]["kind"] == "welcome":
        _, responder, transcript = initiator.split()
        keys = protection.Direction(said["payload"]["suite"], responder, transcript)
        first = {"expected": 0, "path": 0, "generation": 0}
        said["first_packet"] = opened(keys, unhex(given["first_packet"]), first)
    return said


CASES = {
    "datagram": lambda told, given: packets.read_head(told),
    "frames": lambda told, given: frames.read_frames(told),
    "packet": packet,
    "syn": syn,
    "wake": wake,
    "syn payload": lambda told, given: handshake.read_syn_payload(told),
    "syn ack": syn_ack,
    "syn ack payload": lambda told, given: handshake.read_syn_ack_payload(told),
    "cookie": lambda told, given: handshake.read_cookie(
        told, unhex(given["server_public"]), unhex(given["mac1"])
    ),
    "unknown": lambda told, given: handshake.read_unknown(told, unhex(given["token"])),
    "record": lambda told, given: records.read_record(told),
}


def verdict(case):
    try:
        return CASES[case["case"]](unhex(case["hex"]), case["given"])
    except Malformed:
        return None


def compact(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def check(names):
    """Says where this decoder and the files part; how many of each verdict there were."""
    taken = refused = 0
    apart = []
    for name in names:
        with open(name, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                case = json.loads(line)
                ours = verdict(case)
                taken += ours is not None
                refused += ours is None
                if ours != case["says"]:
                    apart.append(f"{name}:{number}: {case['why']}\n  theirs {compact(case['says'])}")
                    apart.append(f"  ours   {compact(ours)}")
    print("\n".join(apart + [f"{taken} taken, {refused} refused, {len(apart) // 2} apart"]))
    return not apart


def main(arguments):
    verb, rest = (arguments or ["help"])[0], arguments[1:]
    if verb == "say" and not rest:
        # All of it first: whoever writes to us need not read at the same time.
        for line in sys.stdin.readlines():
            print(compact(verdict(json.loads(line))))
        return 0
    if verb == "check" and rest:
        return 0 if check(rest) else 1
    readers = {
        "datagram": packets.read_parts,
        "frames": frames.read_frames,
        "record": records.read_record,
    }
    if verb in readers and len(rest) == 1:
        try:
            print(json.dumps(readers[verb](unhex(rest[0])), indent=1))
            return 0
        except Malformed as fault:
            print(f"refused: {fault}", file=sys.stderr)
            return 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
