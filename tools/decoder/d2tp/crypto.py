"""The primitives D2TP names, in plain Python: RFC 7748, RFC 8439, FIPS 197, SP 800-38D, RFC 5869.

Slow, and open to timing: for reading test vectors, never for secrets that matter. It is here so
that the decoder runs wherever Python does and shares no code with what it is compared to.
"""

import hashlib
import hmac
import struct


class Forged(Exception):
    """A tag does not fit."""

    def __init__(self):
        super().__init__("does not authenticate")


def hmac256(key, told):
    return hmac.new(key, told, hashlib.sha256).digest()


def hkdf_extract(salt, material):
    return hmac256(salt, material)


def hkdf_expand(key, label, n):
    out, block = b"", b""
    for i in range(1, -(-n // 32) + 1):
        block = hmac256(key, block + label + bytes([i]))
        out += block
    return out[:n]


# X25519 --------------------------------------------------------------------------------------

P = 2**255 - 19


def x25519(secret, public):
    k = int.from_bytes(secret, "little")
    k = (k & ~7 & (2**255 - 1)) | 2**254
    u = int.from_bytes(public, "little") & (2**255 - 1)
    x2, z2, x3, z3, swapped = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swapped ^ bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swapped = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb = a * a % P, b * b % P
        e = aa - bb
        da, cb = d * a % P, c * b % P
        x3, z3 = (da + cb) ** 2 % P, u * (da - cb) ** 2 % P
        x2, z2 = aa * bb % P, e * (aa + 121665 * e) % P
    if swapped:
        x2, z2 = x3, z3
    return (x2 * pow(z2, P - 2, P) % P).to_bytes(32, "little")


def x25519_base(secret):
    return x25519(secret, (9).to_bytes(32, "little"))


# ChaCha20 and Poly1305 -----------------------------------------------------------------------

M = 0xFFFFFFFF
QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip


def chacha_block(key, counter, nonce):
    start = struct.unpack("<16I", b"expand 32-byte k" + key + struct.pack("<I", counter) + nonce)
    x = list(start)
    for _ in range(10):
        for a, b, c, d in QUARTERS:
            x[a] = x[a] + x[b] & M
            w = x[d] ^ x[a]
            x[d] = (w << 16 | w >> 16) & M
            x[c] = x[c] + x[d] & M
            w = x[b] ^ x[c]
            x[b] = (w << 12 | w >> 20) & M
            x[a] = x[a] + x[b] & M
            w = x[d] ^ x[a]
            x[d] = (w << 8 | w >> 24) & M
            x[c] = x[c] + x[d] & M
            w = x[b] ^ x[c]
            x[b] = (w << 7 | w >> 25) & M
    return struct.pack("<16I", *((a + b) & M for a, b in zip(x, start)))


def xor(a, b):
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).to_bytes(len(a), "big")


def chacha_stream(key, counter, nonce, told):
    blocks = -(-len(told) // 64)
    stream = b"".join(chacha_block(key, counter + i, nonce) for i in range(blocks))
    return xor(told, stream[: len(told)])


def poly1305(key, told):
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    a = 0
    for i in range(0, len(told), 16):
        a = (a + int.from_bytes(told[i : i + 16] + b"\1", "little")) * r % (2**130 - 5)
    return (a + int.from_bytes(key[16:32], "little") & (2**128 - 1)).to_bytes(16, "little")


def padded(told):
    return told + bytes(-len(told) % 16)


def chacha_tag(key, nonce, associated, sealed):
    lengths = struct.pack("<QQ", len(associated), len(sealed))
    return poly1305(chacha_block(key, 0, nonce)[:32], padded(associated) + padded(sealed) + lengths)


def chacha_seal(key, nonce, associated, plain):
    sealed = chacha_stream(key, 1, nonce, plain)
    return sealed + chacha_tag(key, nonce, associated, sealed)


def chacha_open(key, nonce, associated, sealed):
    sealed, tag = sealed[:-16], sealed[-16:]
    if len(tag) < 16 or not hmac.compare_digest(tag, chacha_tag(key, nonce, associated, sealed)):
        raise Forged
    return chacha_stream(key, 1, nonce, sealed)


# AES-128 and GCM -----------------------------------------------------------------------------


def double(b):
    return (b << 1 ^ (0x1B if b & 0x80 else 0)) & 0xFF


def sbox():
    """The inverse in GF(2^8), then the affine map: powers of 3 give the inverses."""
    powers, x = [], 1
    for _ in range(255):
        powers.append(x)
        x ^= double(x)
    inverse = [0] * 256
    for i, p in enumerate(powers):
        inverse[p] = powers[-i % 255]
    return [b ^ 0x63 ^ turn(b, 1) ^ turn(b, 2) ^ turn(b, 3) ^ turn(b, 4) for b in inverse]


def turn(b, n):
    return (b << n | b >> 8 - n) & 0xFF


SBOX = sbox()
# One column of SubBytes and MixColumns for each byte that can stand in its first row.
T = [
    (double(s) << 24 | s << 16 | s << 8 | (double(s) ^ s)) for s in SBOX
]  # fmt: skip


def right(w, n):
    return (w >> n | w << 32 - n) & M


class Aes:
    def __init__(self, key):
        words = list(struct.unpack(">4I", key))
        rcon = 1
        while len(words) < 44:
            w = words[-1]
            if len(words) % 4 == 0:
                w = (w << 8 | w >> 24) & M
                w = sum(SBOX[w >> s & 0xFF] << s for s in (0, 8, 16, 24)) ^ rcon << 24
                rcon = double(rcon)
            words.append(words[-4] ^ w)
        self.words = words

    def block(self, told):
        w = self.words
        s = [a ^ b for a, b in zip(struct.unpack(">4I", told), w)]
        for k in range(4, 40, 4):
            s = [
                T[s[i] >> 24]
                ^ right(T[s[(i + 1) % 4] >> 16 & 0xFF], 8)
                ^ right(T[s[(i + 2) % 4] >> 8 & 0xFF], 16)
                ^ right(T[s[(i + 3) % 4] & 0xFF], 24)
                ^ w[k + i]
                for i in range(4)
            ]
        return struct.pack(
            ">4I",
            *(
                (
                    SBOX[s[i] >> 24] << 24
                    | SBOX[s[(i + 1) % 4] >> 16 & 0xFF] << 16
                    | SBOX[s[(i + 2) % 4] >> 8 & 0xFF] << 8
                    | SBOX[s[(i + 3) % 4] & 0xFF]
                )
                ^ w[40 + i]
                for i in range(4)
            ),
        )


def gf_times(x, y):
    z = 0
    for i in reversed(range(128)):
        if x >> i & 1:
            z ^= y
        y = y >> 1 ^ (0xE1 << 120 if y & 1 else 0)
    return z


def gcm_tag(aes, nonce, associated, sealed):
    h = int.from_bytes(aes.block(bytes(16)), "big")
    told = padded(associated) + padded(sealed)
    told += struct.pack(">QQ", 8 * len(associated), 8 * len(sealed))
    y = 0
    for i in range(0, len(told), 16):
        y = gf_times(y ^ int.from_bytes(told[i : i + 16], "big"), h)
    return xor(y.to_bytes(16, "big"), aes.block(nonce + b"\0\0\0\1"))


def gcm_open(key, nonce, associated, sealed):
    aes = Aes(key)
    sealed, tag = sealed[:-16], sealed[-16:]
    if len(tag) < 16 or not hmac.compare_digest(tag, gcm_tag(aes, nonce, associated, sealed)):
        raise Forged
    blocks = range(2, 2 + -(-len(sealed) // 16))
    stream = b"".join(aes.block(nonce + struct.pack(">I", i)) for i in blocks)
    return xor(sealed, stream[: len(sealed)])
