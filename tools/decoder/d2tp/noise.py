"""The two patterns of Noise, revision 34, as far as a reader of both messages needs them.

```text
 IK                                                    NNpsk0
 <- s        the server's key, known beforehand
 -> e, es, s, ss                                       -> psk, e
 <- e, ee, se                                          <- e, ee
```

With a psk, every public ephemeral key goes into the key too.
"""

import hashlib

from .crypto import Forged, chacha_open, chacha_seal, hmac256, x25519, x25519_base
from .reader import Malformed

IK = b"Noise_IK_25519_ChaChaPoly_SHA256"
NN_PSK0 = b"Noise_NNpsk0_25519_ChaChaPoly_SHA256"


class Symmetric:
    def __init__(self, name, prologue):
        self.h = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self.ck = self.h
        self.key, self.n = None, 0
        self.mix_hash(prologue)

    def mix_hash(self, told):
        self.h = hashlib.sha256(self.h + told).digest()

    def hkdf(self, material, outputs=2):
        temp, out = hmac256(self.ck, material), [b""]
        for i in range(1, outputs + 1):
            out.append(hmac256(temp, out[-1] + bytes([i])))
        return out[1:]

    def mix_key(self, material):
        self.ck, self.key = self.hkdf(material)
        self.n = 0

    def mix_psk(self, psk):
        self.ck, told, key = self.hkdf(psk, 3)
        self.mix_hash(told)
        self.key, self.n = key, 0

    def mix_ephemeral(self, public):
        """The token `e` of a pattern with a psk."""
        self.mix_hash(public)
        self.mix_key(public)

    def mix_dh(self, secret, public):
        shared = x25519(secret, public)
        if shared == bytes(32):
            raise Malformed("X25519 gave zero")  # R-HS-3
        self.mix_key(shared)

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
        self.state = Symmetric(IK, prologue)
        self.state.mix_hash(x25519_base(secret))

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
        self.state = Symmetric(IK, prologue)
        self.state.mix_hash(server_public)
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


class PskResponder:
    def __init__(self, prologue, psk):
        self.state = Symmetric(NN_PSK0, prologue)
        self.state.mix_psk(psk)

    def read_1(self, message):
        """The payload. Nothing is multiplied yet: that begins with message 2."""
        if len(message) < 48:
            raise Malformed("too short for Noise message 1")
        self.state.mix_ephemeral(message[:32])
        return self.state.open(message[32:])


class PskInitiator:
    """As Initiator, of a device that showed a ticket."""

    def __init__(self, prologue, psk, ephemeral, payload):
        self.ephemeral = ephemeral
        self.state = Symmetric(NN_PSK0, prologue)
        self.state.mix_psk(psk)
        e = x25519_base(ephemeral)
        self.state.mix_ephemeral(e)
        self.message_1 = e + self.state.seal(payload)

    def read_2(self, message):
        if len(message) < 48:
            raise Malformed("too short for Noise message 2")
        ephemeral = message[:32]
        self.state.mix_ephemeral(ephemeral)
        self.state.mix_dh(self.ephemeral, ephemeral)
        return self.state.open(message[32:])

    def split(self):
        return self.state.split()
