//! What a line carried and what was dropped, each with its reason.

use std::fmt;

/// Counters of a line since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounts {
    /// Packets received whole.
    pub packets_in: u64,
    /// Packets sent.
    pub packets_out: u64,
    /// Bytes read from the line.
    pub bytes_in: u64,
    /// Bytes written to the line.
    pub bytes_out: u64,
    /// Pieces between delimiters that are no frame: noise, or halves of frames.
    pub noise: u64,
    /// Frames with a right check and an unknown content.
    pub unknown: u64,
    /// Frames of other kinds of stations, and reports of a modem.
    pub foreign: u64,
    /// Frames in the direction in which this station sends: its own, reflected, or another bridge's.
    pub reflected: u64,
    /// Fragments that contradicted others.
    pub contradicting: u64,
    /// Packets of which fragments are missing.
    pub incomplete: u64,
    /// Packets to send that were too large for the line.
    pub too_large: u64,
    /// Packets to send that found a full queue.
    pub queue_full: u64,
    /// Received packets that nobody took in time.
    pub not_taken: u64,
    /// Frames of mobiles that sent more than they were polled for.
    pub out_of_turn: u64,
    /// Turns that the bridge gave to mobiles.
    pub turns: u64,
    /// Turns in which the mobile was not heard.
    pub unanswered_turns: u64,
}

impl LinkCounts {
    /// What was dropped, by reason; reasons that never occurred are left out.
    pub fn dropped(&self) -> Vec<(&'static str, u64)> {
        let all = [
            ("noise", self.noise),
            ("unknown frames", self.unknown),
            ("foreign frames", self.foreign),
            ("reflected frames", self.reflected),
            ("contradicting fragments", self.contradicting),
            ("incomplete packets", self.incomplete),
            ("packets too large", self.too_large),
            ("packets beyond a full queue", self.queue_full),
            ("packets not taken", self.not_taken),
            ("frames out of turn", self.out_of_turn),
        ];
        all.into_iter().filter(|(_, n)| *n > 0).collect()
    }
}

impl fmt::Display for LinkCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} packets ({} bytes) in, {} packets ({} bytes) out",
            self.packets_in, self.bytes_in, self.packets_out, self.bytes_out
        )?;
        if self.turns > 0 {
            write!(f, ", {} turns", self.turns)?;
            write!(f, " ({} without an answer)", self.unanswered_turns)?;
        }
        for (reason, n) in self.dropped() {
            write!(f, ", {n} {reason}")?;
        }
        Ok(())
    }
}
