//! Reading and writing integers and byte strings: variable-length integers as in RFC 9000 §16.

/// The largest number a variable-length integer can hold (62 bits).
pub const VARINT_MAX: u64 = (1 << 62) - 1;

/// Why received bytes could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes end in the middle of a field.
    Truncated,
    /// The frame type does not exist in this version of the protocol.
    UnknownFrame(u64),
    /// A field holds a value its frame does not allow.
    BadValue(&'static str),
}

impl std::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DecodeError::Truncated => f.write_str("the packet ends in the middle of a field"),
            DecodeError::UnknownFrame(t) => write!(f, "unknown frame type {t:#x}"),
            DecodeError::BadValue(what) => write!(f, "value not allowed: {what}"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// The number of bytes that the variable-length encoding of `v` takes: 1, 2, 4 or 8.
pub const fn varint_len(v: u64) -> usize {
    match v {
        0..0x40 => 1,
        0x40..0x4000 => 2,
        0x4000..0x4000_0000 => 4,
        _ => 8,
    }
}

/// A cursor over received bytes. Every read is checked.
#[derive(Clone, Copy, Debug)]
pub struct WireReader<'a> {
    bytes: &'a [u8],
}

impl<'a> WireReader<'a> {
    /// A cursor at the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        WireReader { bytes }
    }
    /// Whether all bytes were read.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
    /// The number of bytes not yet read.
    pub fn remaining(&self) -> usize {
        self.bytes.len()
    }
    /// Reads the next `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self
            .bytes
            .split_at_checked(n)
            .ok_or(DecodeError::Truncated)?;
        self.bytes = tail;
        Ok(head)
    }
    /// Reads the next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, tail) = self
            .bytes
            .split_first_chunk::<N>()
            .ok_or(DecodeError::Truncated)?;
        self.bytes = tail;
        Ok(*head)
    }
    /// Reads all bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }
    /// Reads one byte.
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }
    /// Reads four bytes, big-endian.
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_be_bytes(self.array()?))
    }
    /// Reads eight bytes, big-endian.
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_be_bytes(self.array()?))
    }
    /// Reads a variable-length integer.
    #[inline]
    pub fn varint(&mut self) -> Result<u64, DecodeError> {
        let first = *self.bytes.first().ok_or(DecodeError::Truncated)?;
        Ok(match first >> 6 {
            0 => {
                self.bytes = &self.bytes[1..];
                u64::from(first)
            }
            1 => u64::from(u16::from_be_bytes(self.array()?) & 0x3fff),
            2 => u64::from(u32::from_be_bytes(self.array()?) & 0x3fff_ffff),
            _ => u64::from_be_bytes(self.array()?) & VARINT_MAX,
        })
    }
    /// Reads a variable-length integer that must fit into 32 bits; `what` names the field in the
    /// error.
    pub fn varint32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        u32::try_from(self.varint()?).map_err(|_| DecodeError::BadValue(what))
    }
    /// Reads a byte string that is preceded by its length.
    pub fn string(&mut self) -> Result<&'a [u8], DecodeError> {
        let n = self.varint()?;
        self.bytes(usize::try_from(n).map_err(|_| DecodeError::Truncated)?)
    }
}

/// A cursor over a buffer to be filled. Writing past the end is a programming error and panics, so
/// callers check [`WireWriter::room`] first.
#[derive(Debug)]
pub struct WireWriter<'a> {
    buf: &'a mut [u8],
    at: usize,
}

impl<'a> WireWriter<'a> {
    /// A cursor at the start of `buf`.
    pub fn new(buf: &'a mut [u8]) -> Self {
        WireWriter { buf, at: 0 }
    }
    /// The number of bytes written so far.
    pub fn written(&self) -> usize {
        self.at
    }
    /// The number of bytes still free.
    pub fn room(&self) -> usize {
        self.buf.len() - self.at
    }
    /// Appends bytes.
    #[inline]
    pub fn bytes(&mut self, b: &[u8]) {
        self.buf[self.at..self.at + b.len()].copy_from_slice(b);
        self.at += b.len();
    }
    /// Appends `n` bytes, which the caller fills.
    #[inline]
    pub fn reserve(&mut self, n: usize) -> &mut [u8] {
        let at = self.at;
        self.at += n;
        &mut self.buf[at..at + n]
    }
    /// Appends `n` zero bytes.
    pub fn zeros(&mut self, n: usize) {
        self.buf[self.at..self.at + n].fill(0);
        self.at += n;
    }
    /// Appends one byte.
    pub fn u8(&mut self, v: u8) {
        self.bytes(&[v]);
    }
    /// Appends four bytes, big-endian.
    pub fn u32(&mut self, v: u32) {
        self.bytes(&v.to_be_bytes());
    }
    /// Appends eight bytes, big-endian.
    pub fn u64(&mut self, v: u64) {
        self.bytes(&v.to_be_bytes());
    }
    /// Appends a variable-length integer in its shortest form (R-WIRE-3).
    #[inline]
    pub fn varint(&mut self, v: u64) {
        assert!(v <= VARINT_MAX, "varint out of range");
        match varint_len(v) {
            1 => self.u8(v as u8),
            2 => self.bytes(&(v as u16 | 0x4000).to_be_bytes()),
            4 => self.bytes(&(v as u32 | 0x8000_0000).to_be_bytes()),
            _ => self.bytes(&(v | 0xc000_0000_0000_0000).to_be_bytes()),
        }
    }
    /// Appends a byte string, preceded by its length.
    pub fn string(&mut self, b: &[u8]) {
        self.varint(b.len() as u64);
        self.bytes(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_of_every_length_come_back() {
        // R-WIRE-3
        for v in [0, 63, 64, 16383, 16384, (1 << 30) - 1, 1 << 30, VARINT_MAX] {
            let mut buf = [0u8; 8];
            let mut w = WireWriter::new(&mut buf);
            w.varint(v);
            let n = w.written();
            assert_eq!(n, varint_len(v));
            let mut r = WireReader::new(&buf[..n]);
            assert_eq!(r.varint(), Ok(v));
            assert!(r.is_empty());
            for cut in 0..n {
                assert_eq!(
                    WireReader::new(&buf[..cut]).varint(),
                    Err(DecodeError::Truncated)
                );
            }
        }
    }
}
