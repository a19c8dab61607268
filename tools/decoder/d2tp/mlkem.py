"""ML-KEM-768, from FIPS 203. It is neither fast nor safe against who measures its time."""

import hashlib

N, Q = 256, 3329
K, ETA, DU, DV = 3, 2, 10, 4


def bit_reversed(i):
    return int(f"{i:07b}"[::-1], 2)


ZETAS = [pow(17, bit_reversed(i), Q) for i in range(128)]
GAMMAS = [pow(17, 2 * bit_reversed(i) + 1, Q) for i in range(128)]


def g(told):
    out = hashlib.sha3_512(told).digest()
    return out[:32], out[32:]


def h(told):
    return hashlib.sha3_256(told).digest()


def prf(seed, n):
    return hashlib.shake_256(seed + bytes([n])).digest(64 * ETA)


def encoded(numbers, d):
    """Algorithm 5: d bits of each number, the lowest first."""
    bits = sum(value << d * i for i, value in enumerate(numbers))
    return bits.to_bytes(N * d // 8, "little")


def decoded(told, d):
    """Algorithm 6"""
    bits = int.from_bytes(told, "little")
    return [bits >> d * i & (1 << d) - 1 for i in range(N)]


def compressed(numbers, d):
    return [((x << d) + Q // 2) // Q % (1 << d) for x in numbers]


def decompressed(numbers, d):
    return [(x * Q + (1 << d - 1)) >> d for x in numbers]


def sample_ntt(seed, j, i):
    """Algorithm 7"""
    out, length = [], 1008
    told = hashlib.shake_128(seed + bytes([j, i])).digest(length)
    for at in range(0, length, 3):
        a, b, c = told[at : at + 3]
        for x in (a + 256 * (b % 16), b // 16 + 16 * c):
            if x < Q and len(out) < N:
                out.append(x)
    assert len(out) == N
    return out


def sample_cbd(told):
    """Algorithm 8"""
    bits = [byte >> i & 1 for byte in told for i in range(8)]
    pairs = [bits[4 * i : 4 * i + 4] for i in range(N)]
    return [(a + b - c - d) % Q for a, b, c, d in pairs]


def ntt(f):
    """Algorithm 9"""
    f, i, length = list(f), 1, 128
    while length >= 2:
        for start in range(0, N, 2 * length):
            for j in range(start, start + length):
                t = ZETAS[i] * f[j + length] % Q
                f[j + length], f[j] = (f[j] - t) % Q, (f[j] + t) % Q
            i += 1
        length //= 2
    return f


def inverse_ntt(f):
    """Algorithm 10"""
    f, i, length = list(f), 127, 2
    while length <= 128:
        for start in range(0, N, 2 * length):
            for j in range(start, start + length):
                t = f[j]
                f[j] = (t + f[j + length]) % Q
                f[j + length] = ZETAS[i] * (f[j + length] - t) % Q
            i -= 1
        length *= 2
    return [x * 3303 % Q for x in f]


def times(a, b):
    """Algorithm 11"""
    out = []
    for i in range(128):
        a0, a1, b0, b1 = a[2 * i], a[2 * i + 1], b[2 * i], b[2 * i + 1]
        out += [(a0 * b0 + a1 * b1 * GAMMAS[i]) % Q, (a0 * b1 + a1 * b0) % Q]
    return out


def plus(*terms):
    return [sum(column) % Q for column in zip(*terms)]


def dot(row, column):
    return plus(*(times(a, b) for a, b in zip(row, column)))


def matrix(rho):
    return [[sample_ntt(rho, j, i) for j in range(K)] for i in range(K)]


def noise_of(seed, first, count):
    return [sample_cbd(prf(seed, first + n)) for n in range(count)]


def split(told, size):
    return [told[at : at + size] for at in range(0, len(told), size)]


def key_pair(seed):
    """Algorithms 13 and 16: encapsulation key, and what decapsulation needs."""
    d, z = seed[:32], seed[32:]
    rho, sigma = g(d + bytes([K]))
    s = [ntt(f) for f in noise_of(sigma, 0, K)]
    e = [ntt(f) for f in noise_of(sigma, K, K)]
    t = [plus(dot(row, s), error) for row, error in zip(matrix(rho), e)]
    key = b"".join(encoded(f, 12) for f in t) + rho
    return key, (s, key, z)


def encrypt(key, message, r):
    """Algorithm 14"""
    t, rho = [decoded(f, 12) for f in split(key[:-32], 384)], key[-32:]
    y = [ntt(f) for f in noise_of(r, 0, K)]
    e1, e2 = noise_of(r, K, K), sample_cbd(prf(r, 2 * K))
    columns = zip(*matrix(rho))
    u = [plus(inverse_ntt(dot(column, y)), error) for column, error in zip(columns, e1)]
    v = plus(inverse_ntt(dot(t, y)), e2, decompressed(decoded(message, 1), 1))
    first = b"".join(encoded(compressed(f, DU), DU) for f in u)
    return first + encoded(compressed(v, DV), DV)


def is_key(key):
    """Section 7.2: the numbers of the key are reduced."""
    numbers = [x for f in split(key[:-32], 384) for x in decoded(f, 12)]
    return len(key) == 384 * K + 32 and all(x < Q for x in numbers)


def encapsulate(key, message):
    """Algorithm 17: ciphertext and shared secret."""
    secret, r = g(message + h(key))
    return encrypt(key, message, r), secret


def decapsulate(pair, ciphertext):
    """Algorithm 18"""
    s, key, z = pair
    at = 32 * DU * K
    u = [decompressed(decoded(f, DU), DU) for f in split(ciphertext[:at], 32 * DU)]
    v = decompressed(decoded(ciphertext[at:], DV), DV)
    product = inverse_ntt(dot(s, [ntt(f) for f in u]))
    message = encoded(compressed([(a - b) % Q for a, b in zip(v, product)], 1), 1)
    secret, r = g(message + h(key))
    if encrypt(key, message, r) != ciphertext:
        return hashlib.shake_256(z + ciphertext).digest(32)
    return secret
