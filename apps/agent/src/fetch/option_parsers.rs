//! Reading sizes from the command line.

pub use cedos_text::parse_span;

use bytesize::ByteSize;

/// A number of bytes: `50M`, `1.5G`, `300k`, `700` (powers of 1000), `64MiB` (of 1024).
///
/// # Errors
/// A sentence that says what a size looks like.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let size: Result<ByteSize, _> = text.parse();
    size.map(|size| size.as_u64())
        .map_err(|_| format!("`{text}` is not a size: write 50M, 1.5G or 64MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_bytes("50M"), Ok(50_000_000));
        assert_eq!(parse_bytes("1.5G"), Ok(1_500_000_000));
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("0"), Ok(0));
        assert_eq!(parse_bytes("300k"), Ok(300_000));
        assert_eq!(parse_bytes("2TiB"), Ok(2 << 40));
        assert!(parse_bytes("").is_err());
        assert!(parse_bytes("K").is_err());
        assert!(parse_bytes("much").is_err());
        assert!(parse_bytes("-1M").is_err());
    }
}
