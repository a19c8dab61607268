//! Reinjection: data in flight on one path is sent again on another one.
//!
//! ```text
//!  slow path   ▐ 7 ▐ 8 ▐ 9 ▐ ──────────────── in flight ───────▶ 7 arrives at t + 0.5 s
//!  fast path   nothing new to send: the peer gives no credit, or all was sent
//!              ▐ 7'▐ 8'▐ 9'▐ ──▶ arrives at t + 0.02 s, and the data behind 7 can be read
//! ```
//!
//! So a slow path does not delay a fast one: neither by a full receive buffer whose first bytes it
//! carries (Raiciu et al., NSDI 2012, call it opportunistic retransmission), nor at the end of a
//! transfer. A packet is repeated once; with the redundant scheduler, once on each other path. A
//! copy is not copied, and a lost copy is not repeated: the original is still in flight, or is
//! itself sent again. A copy costs bytes, so data of a free path is not copied to a metered one,
//! except by the redundant scheduler; such copies need a grant like other payload.

use d2tp_time::{Span, Time};
use d2tp_wire::{Frame, PathId, WireWriter};

use super::{CopyMode, CopyProgress};
use crate::path::{PathState, SessionPath};
use crate::path_selection::PathSelection;
use crate::sent_packet::{SentData, SentFrame, SentPacket};
use crate::session::Session;

/// The smallest piece that is worth its header, in bytes.
const PIECE_MIN: usize = 32;

/// A packet to be repeated on another path, and the part of it that the peer may still lack.
#[derive(Debug)]
pub(crate) struct PacketCopy {
    from: PathId,
    at: CopyProgress,
    which: CopyMode,
    pieces: Vec<SentData>,
}

impl Session {
    /// The next packet of another path to repeat on the one in `slot`.
    pub(crate) fn next_copy(
        &mut self,
        now: Time,
        slot: usize,
        which: CopyMode,
    ) -> Option<PacketCopy> {
        if self.paths.len() < 2 {
            return None;
        }
        for n in (0..self.paths.len()).filter(|n| *n != slot) {
            while let Some(copy) = self.next_copy_of(now, slot, n, which) {
                if !copy.pieces.is_empty() {
                    return Some(copy);
                }
                // The peer lacks nothing of the packet any more, or it may not be sent here.
                self.note_copied(slot, &copy, u64::MAX);
            }
        }
        None
    }

    fn next_copy_of(
        &self,
        now: Time,
        to: usize,
        from: usize,
        which: CopyMode,
    ) -> Option<PacketCopy> {
        let (to, from) = (self.paths.nth(to), self.paths.nth(from));
        if which == CopyMode::Sooner && to.gated && !from.gated {
            return None;
        }
        let delay = self.config.ack_delay_max;
        let (number, sent, bytes) = match which {
            CopyMode::All | CopyMode::Chosen => {
                let done = to.copy_progress.get(&from.id).copied().unwrap_or_default();
                let (number, sent) = from.recovery.next_original(done.number, |_| true)?;
                let bytes = if number == done.number { done.bytes } else { 0 };
                (number, sent, bytes)
            }
            CopyMode::Sooner => {
                let wanted = |sent: &SentPacket| {
                    u64::from(sent.copied) < sent.payload() && is_sooner(now, to, from, sent, delay)
                };
                let (number, sent) = from.recovery.next_original(0, wanted)?;
                (number, sent, u64::from(sent.copied))
            }
        };
        let mut skip = bytes;
        let pieces = sent.frames().filter_map(|said| {
            let SentFrame::Data(mut piece) = said else {
                return None;
            };
            let part = skip.min(u64::from(piece.len));
            skip -= part;
            piece.offset += part;
            piece.len -= part as u16;
            let flow = self.flows.get(piece.flow)?;
            let wanted = (which != CopyMode::Chosen || flow.path_selection == PathSelection::Each)
                && flow.may_copy(piece.offset, u64::from(piece.len))
                && (part == 0 || piece.len > 0)
                && (!to.gated || flow.grants_in.room(to.id) >= u64::from(piece.len));
            wanted.then_some(piece)
        });
        let pieces = pieces.collect();
        Some(PacketCopy {
            from: from.id,
            at: CopyProgress { number, bytes },
            which,
            pieces,
        })
    }

    /// Writes as much of a packet to be repeated as fits.
    pub(crate) fn write_copy(
        &mut self,
        slot: usize,
        copy: &PacketCopy,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        let (mut whole, mut out) = (true, 0);
        let (path, gated) = (self.paths.at(slot).id, self.paths.at(slot).gated);
        for piece in &copy.pieces {
            let flow = self
                .flows
                .get_mut(piece.flow)
                .expect("looked at when the packet was chosen");
            let head = Frame::data_head_len(piece.flow, flow.send.end(), w.room());
            if w.room() < head + PIECE_MIN {
                whole = false;
                break;
            }
            let len = usize::from(piece.len).min(w.room() - head);
            let fin = piece.fin && len == usize::from(piece.len);
            Frame::encode_data_head(w, piece.flow, piece.offset, len, fin);
            flow.send.copy(piece.offset, w.reserve(len));
            if gated {
                flow.grants_in.on_sent(path, len as u64);
            }
            out += len as u64;
            sent.eliciting = true;
            sent.note(SentFrame::Copy(SentData {
                len: len as u16,
                fin,
                ..*piece
            }));
            if len < usize::from(piece.len) {
                whole = false;
                break;
            }
        }
        let path = self.paths.at(slot);
        path.payload_out += out;
        path.copied_out += out;
        self.note_copied(slot, copy, if whole { u64::MAX } else { out });
    }

    /// Records that bytes of a packet were sent again on the path in `slot`.
    fn note_copied(&mut self, slot: usize, copy: &PacketCopy, bytes: u64) {
        if copy.which == CopyMode::Sooner {
            if let Some(from) = self.paths.get_mut(copy.from) {
                from.recovery.note_copied(copy.at.number, bytes);
            }
            return;
        }
        *self.paths.at(slot).copy_progress.entry(copy.from) = match bytes {
            u64::MAX => CopyProgress {
                number: copy.at.number + 1,
                bytes: 0,
            },
            bytes => CopyProgress {
                bytes: copy.at.bytes + bytes,
                ..copy.at
            },
        };
    }
}

/// Whether a packet would arrive sooner if it were sent on `to` now, or is already overdue.
fn is_sooner(
    now: Time,
    to: &SessionPath,
    from: &SessionPath,
    sent: &SentPacket,
    ack_delay_max: Span,
) -> bool {
    if to.state != PathState::Active || !to.recovery.rtt.is_measured() {
        return false;
    }
    // Overdue by the tolerance that RFC 9002 §6.1.2 has for reordering. The probe timeout would
    // grow with every late answer.
    let rtt = from.recovery.rtt.smoothed();
    if sent.at + rtt.scaled(9, 8) + ack_delay_max <= now {
        return true;
    }
    // Only the forward direction includes queueing; the return path takes as long as always.
    let there = |path: &SessionPath| {
        let rtt = &path.recovery.rtt;
        rtt.smoothed().saturating_sub(rtt.min().divided(2))
    };
    sent.at + there(from) > now + there(to)
}
