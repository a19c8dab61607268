"""Opening DATA packets: docs/protocol.md section 4."""

import hashlib

from . import crypto
from .crypto import Forged, hkdf_expand, hkdf_extract
from .reader import Malformed

HYBRID_BIT = 4
HEADER = 1 + 8 + 4
TAG = 16
AES, CHACHA = 1, 2


def number_near(low, largest):
    """RFC 9000 A.3 for 32 bits; `largest` is None before the first packet of a path."""
    expected = 0 if largest is None else largest + 1
    window = 2**32
    candidate = expected & ~(window - 1) | low
    if candidate <= expected - window // 2 and candidate < 2**62 - window:
        return candidate + window
    if candidate > expected + window // 2 and candidate >= window:
        return candidate - window
    return candidate


class Direction:
    """Keys of what one end sends."""

    def __init__(self, suite, noise_key, transcript, session_secret=b""):
        if suite not in (AES, CHACHA):
            raise ValueError(f"suite {suite}")
        self.suite = suite
        self.key_bytes = 16 if suite == AES else 32
        self.root = hkdf_expand(hkdf_extract(transcript, noise_key + session_secret), b"d2tp root", 32)
        self.hybrid_root = None
        self.mask_key = hkdf_expand(self.root, b"d2tp mask", self.key_bytes)

    def keys(self, generation, root=None):
        secret = root or self.root
        for _ in range(generation):
            secret = hkdf_expand(secret, b"d2tp next", 32)
        return hkdf_expand(secret, b"d2tp key", self.key_bytes), hkdf_expand(
            secret, b"d2tp iv", 12
        )

    def mask(self, sample):
        if self.suite == AES:
            return crypto.Aes(self.mask_key).block(sample)[:5]
        counter = int.from_bytes(sample[:4], "little")
        return crypto.chacha_block(self.mask_key, counter, sample[4:])[:5]

    def open(self, packet, path, largest, generation):
        """Number, generation and frames of a packet on `path`, for a receiver that has heard
        `largest` there and whose newest generation is `generation`."""
        if len(packet) < HEADER + TAG:
            raise Malformed("too short for a sealed packet")
        mask = self.mask(packet[13:29])
        first = packet[0] ^ (mask[0] & 0x1F)
        low = crypto.xor(packet[9:13], mask[1:])
        number = number_near(int.from_bytes(low, "big"), largest)
        bits = first >> 3 & 3
        root = None
        if first & HYBRID_BIT:
            root = self.hybrid_root
            if root is None:
                raise Malformed("reserved bits are set: there are no hybrid keys")
        # The one in force, the one before and the next; no two of them share their two bits.
        fitting = [g for g in range(max(0, generation - 1), generation + 2) if g % 4 == bits]
        if not fitting:
            raise Malformed("a generation that is not read")
        key, iv = self.keys(fitting[0], root)
        nonce = crypto.xor(iv, path.to_bytes(4, "big") + number.to_bytes(8, "big"))
        header = bytes([first]) + packet[1:9] + low
        opened = crypto.gcm_open if self.suite == AES else crypto.chacha_open
        try:
            plain = opened(key, nonce, header, packet[13:])
        except Forged as forged:
            raise Malformed(str(forged)) from None
        if first & 3:
            raise Malformed("reserved bits are set")
        return {"number": number, "generation": fitting[0], "frames": plain.hex()}


def exchanged(initiator_key, responder_key, transcript, key, ciphertext, shared):
    """Section 4.1: hybrid roots of both directions, name and session secret."""
    keys = initiator_key + responder_key
    handshake = hkdf_expand(hkdf_extract(transcript, keys), b"d2tp exchange", 32)
    salt = hashlib.sha256(key + ciphertext).digest()
    prk = hkdf_extract(salt, handshake + shared)
    return {
        "root_initiator": hkdf_expand(prk, b"d2tp hybrid initiator", 32),
        "root_responder": hkdf_expand(prk, b"d2tp hybrid responder", 32),
        "secret_id": hkdf_expand(prk, b"d2tp secret id", 8),
        "secret": hkdf_expand(prk, b"d2tp secret", 32),
    }
