//! The progress of a transfer, as input of decisions about links.

/// The progress of a download or an upload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ContentProgress {
    /// Bytes at their destination.
    pub(super) done: u64,
    /// Size of the object, if known.
    pub(super) length: Option<u64>,
    /// Bytes that a new request would transfer again.
    pub(super) repeated_by_request: u64,
    /// The most bytes there ever were: a restart from zero does not lower it.
    pub(super) most: u64,
    /// Whether the origin sent something by which to recognise the object.
    pub(super) is_recognisable: bool,
}

impl ContentProgress {
    /// Bytes still to move, if known.
    pub(super) fn remaining(&self) -> Option<u64> {
        self.length.map(|length| length.saturating_sub(self.done))
    }

    /// Whether a new request can continue from the bytes held.
    pub(super) fn is_continuable(&self) -> bool {
        self.is_recognisable || self.done == 0
    }
}
