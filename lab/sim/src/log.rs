//! The event log of a run: one JSON object per line, the same bytes for the same seed.
//!
//! ```text
//! {"t_ns":0,"who":"net","what":"wlan0 Up { address: 0 }"}
//! {"t_ns":0,"who":"device","what":"sends 1200 on wlan0, hash 9f2ec1a4"}
//! ```

use std::io::{self, Write};

use cedos_lab_link::Time;
use serde_json::json;

/// The destination of events, if they are logged.
pub(crate) struct Log<'a> {
    out: Option<&'a mut dyn Write>,
    fault: Option<io::Error>,
}

impl<'a> Log<'a> {
    pub(crate) fn new(out: Option<&'a mut dyn Write>) -> Log<'a> {
        Log { out, fault: None }
    }

    /// Logs an event; `what` is only evaluated if events are logged.
    pub(crate) fn note(&mut self, now: Time, who: &str, what: impl FnOnce() -> String) {
        let Some(out) = &mut self.out else { return };
        let line = json!({ "t_ns": now.as_nanos(), "who": who, "what": what() });
        if let Err(fault) = writeln!(out, "{line}") {
            self.fault.get_or_insert(fault);
            self.out = None;
        }
    }

    /// The first error of writing, if there was one.
    pub(crate) fn into_fault(self) -> Option<io::Error> {
        self.fault
    }
}

/// A short hash of a datagram's bytes, so that equal logs mean equal datagrams. // FNV-1a
pub(crate) fn hash(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |h, b| {
        (h ^ u32::from(*b)).wrapping_mul(0x0100_0193)
    })
}
