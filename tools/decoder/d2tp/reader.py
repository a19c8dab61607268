"""Bytes from front to back, in the notation of docs/protocol.md section 1."""

V_MAX = 2**62 - 1


class Malformed(Exception):
    """The bytes are not what the document allows there."""


class Reader:
    def __init__(self, data):
        self.data = bytes(data)
        self.at = 0

    def left(self):
        return len(self.data) - self.at

    def bytes(self, n):
        if n > self.left():
            raise Malformed(f"{n} bytes wanted, {self.left()} left")
        self.at += n
        return self.data[self.at - n : self.at]

    def rest(self):
        return self.bytes(self.left())

    def uint(self, n):
        return int.from_bytes(self.bytes(n), "big")

    def v(self):
        """A variable-length integer. Any form is taken (R-WIRE-3)."""
        first = self.uint(1)
        more = (1 << (first >> 6)) - 1
        return (first & 0x3F) << (8 * more) | self.uint(more)

    def v32(self):
        value = self.v()
        if value >= 2**32:
            raise Malformed(f"{value} has more than 32 bits")
        return value

    def flow(self):
        """R-FLOW-10"""
        value = self.v()
        if value >= 2**57:
            raise Malformed(f"flow id {value}")
        return value

    def some(self):
        """A value + 1, where 0 is none."""
        value = self.v()
        return value - 1 if value else None

    def string(self):
        return self.bytes(self.v())

    def flag(self):
        value = self.uint(1)
        if value > 1:
            raise Malformed(f"{value} is neither 0 nor 1")
        return bool(value)

    def ticket(self):
        """A ticket and its secret (section 3.6)."""
        return [self.bytes(76).hex(), self.bytes(32).hex()]

    def end(self):
        if self.left():
            raise Malformed(f"{self.left()} bytes left over")
