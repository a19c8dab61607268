//! How far a transfer is, as those see it who decide about links.

/// How far a download or an upload is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ContentProgress {
    /// Bytes that are where they belong.
    pub(super) done: u64,
    /// Bytes of the object, when known.
    pub(super) length: Option<u64>,
    /// Bytes that a new request brings once more.
    pub(super) repeated_by_request: u64,
    /// The most bytes there ever were: a restart from zero does not lower it.
    pub(super) most: u64,
    /// Whether the origin gave something to recognise the object by.
    pub(super) is_recognisable: bool,
}

impl ContentProgress {
    /// Bytes still to move, when known.
    pub(super) fn remaining(&self) -> Option<u64> {
        self.length.map(|length| length.saturating_sub(self.done))
    }

    /// Whether another request can go on from what is there.
    pub(super) fn is_continuable(&self) -> bool {
        self.is_recognisable || self.done == 0
    }
}
