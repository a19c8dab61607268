//! How far the making of the index of podcasts is that the page asked for.

/// How far the making of an index is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum IndexProgress {
    /// Its file is being downloaded, by the transfer with this number.
    Downloading(u64),
    /// Its file is being read.
    Reading,
    /// The index was not made, and why.
    Failed(String),
}
