"""Noise_IK_25519_ChaChaPoly_SHA256 as far as a reader of both messages needs it.

```text
 <- s        the server's key, known beforehand
 -> e, es, s, ss
 <- e, ee, se
```
"""

import hashlib

from .crypto import Forged, chacha_open, chacha_seal, hmac256, x25519, x25519_base
from .reader import Malformed

NAME = b"Noise_IK_25519_ChaChaPoly_SHA256"


class Symmetric:
    def __init__(self, prologue, server_public):
        self.h = NAME.ljust(32, b"\0") if len(NAME) <= 32 else hashlib.sha256(NAME).digest()
        self.ck = self.h
        self.key, self.n = None, 0
        self.mix_hash(prologue)
        self.mix_hash(server_public)

    def mix_hash(self, told):
        self.h = hashlib.sha256(self.h + told).digest()

    def hkdf(self, material):
        temp = hmac256(self.ck, material)
        one = hmac256(temp, b"\1")
        return one, hmac256(temp, one + b"\2")

    def mix_dh(self, secret, public):
        shared = x25519(secret, public)
        if shared == bytes(32):
            raise Malformed("X25519 gave zero")  # R-HS-3
        self.ck, self.key = self.hkdf(shared)
        self.n = 0

    def nonce(self):
        self.n += 1
        return bytes(4) + (self.n - 1).to_bytes(8, "little")

    def open(self, sealed):
        try:
            plain = chacha_open(self.key, self.nonce(), self.h, sealed)
        except Forged as forged:
            raise Malformed(str(forged)) from None
        self.mix_hash(sealed)
        return plain

    def seal(self, plain):
        sealed = chacha_seal(self.key, self.nonce(), self.h, plain)
        self.mix_hash(sealed)
        return sealed

    def split(self):
        """Keys of the initiator's and the responder's direction, and the transcript hash."""
        return (*self.hkdf(b""), self.h)


class Responder:
    def __init__(self, prologue, secret):
        self.secret = secret
        self.state = Symmetric(prologue, x25519_base(secret))

    def read_1(self, message):
        """The device's public key and the payload."""
        if len(message) < 96:
            raise Malformed("too short for Noise message 1")
        ephemeral = message[:32]
        self.state.mix_hash(ephemeral)
        self.state.mix_dh(self.secret, ephemeral)
        device = self.state.open(message[32:80])
        self.state.mix_dh(self.secret, device)
        return device, self.state.open(message[80:])


class Initiator:
    """A device whose ephemeral key is known, so that the answer to its SYN can be read."""

    def __init__(self, prologue, secret, ephemeral, server_public, payload):
        self.secret, self.ephemeral = secret, ephemeral
        self.state = Symmetric(prologue, server_public)
        # The transcript must hold message 1 before message 2 can be read.
        e = x25519_base(ephemeral)
        self.state.mix_hash(e)
        self.state.mix_dh(ephemeral, server_public)
        s = self.state.seal(x25519_base(secret))
        self.state.mix_dh(secret, server_public)
        self.message_1 = e + s + self.state.seal(payload)

    def read_2(self, message):
        if len(message) < 48:
            raise Malformed("too short for Noise message 2")
        ephemeral = message[:32]
        self.state.mix_hash(ephemeral)
        self.state.mix_dh(self.ephemeral, ephemeral)
        self.state.mix_dh(self.secret, ephemeral)
        return self.state.open(message[32:])

    def split(self):
        return self.state.split()
