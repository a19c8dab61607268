//! How large what is downloaded may be.

use anyhow::{Result, bail};

/// Bytes of a program that users download.
pub const PROGRAM_BYTES_MAX: u64 = 25_000_000;

/// Bytes of an image that is pulled to a small server, for each architecture.
pub const IMAGE_BYTES_MAX: u64 = 30_000_000;

/// Fails where something is larger than `limit` bytes.
pub fn within(what: &str, bytes: u64, limit: u64) -> Result<()> {
    eprintln!("{what}: {:.1} MB", bytes as f64 / 1e6);
    if bytes > limit {
        bail!("{what} has {bytes} bytes, and may have {limit}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::within;

    #[test]
    fn a_file_over_its_limit_fails() {
        assert!(within("a program", 25, 25).is_ok());
        assert!(within("a program", 26, 25).is_err());
    }
}
