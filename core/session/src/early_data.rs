//! Early data: flows opened inside the SYN, for requests that may safely be received twice.
//!
//! ```text
//!  device                                            server
//!   SYN: OPEN flow, its first bytes    ──────────▶    a session that is not confirmed; the
//!                                                     application reads, and may answer
//!                                      ◀──────────  SYN+ACK
//!                                      ◀──────────  DATA flow from 0 on   (early_packets.rs)
//!   first packet: OPEN, bytes, again   ──────────▶    confirmed: the flow is claimed by it
//! ```
//!
//! This saves a round trip when both ends connect for the first time. The first packet repeats what
//! the SYN contained, so nothing depends on whether the server read it; a server that did treats
//! the repetition as a claim. A copy of the SYN can bring the same bytes to a server that has
//! forgotten the session. Therefore only flows that ask for it use early data, and only with
//! servers that allow it.

use d2tp_time::Time;
use d2tp_wire::{FlowId, Frame, FrameIter, WireWriter};

use crate::event::{PeerFault, SessionEnd};
use crate::flow::SessionFlow;
use crate::session::{Session, SessionCredit};
use crate::syn::EARLY_DATA_BYTES_MAX;

/// Bytes of the longest OPEN frame.
const OPEN_BYTES_MAX: usize = 1 + 8 + 1 + 1 + 8 + 8;
/// The smallest piece of data that is worth its header, in bytes.
const DATA_MIN: usize = 16;

impl Session {
    /// R-EARLY-1: OPEN frames and first bytes, for a SYN, of flows that allow replays. The bytes do not
    /// count as sent.
    pub(crate) fn early_data(&mut self, now: Time) -> Vec<u8> {
        let early = |f: &SessionFlow| {
            f.options.early && !f.announced && !f.restored && f.send.reset.is_none()
        };
        if self.known_to_peer
            || self.inherits_instance
            || self.closing.is_some()
            || !self.flows.iter().any(early)
        {
            return Vec::new();
        }
        let mut buf = vec![0; EARLY_DATA_BYTES_MAX];
        let mut w = WireWriter::new(&mut buf);
        for flow in self.flows.iter_mut().filter(|f| early(f)) {
            if w.room() < OPEN_BYTES_MAX {
                break;
            }
            flow.options.open_frame(now, flow.id).encode(&mut w);
            let head = Frame::data_head_len(flow.id, 0, w.room());
            if w.room() < head + DATA_MIN || !flow.send.holds(0) {
                break;
            }
            let len = (flow.send.end() as usize).min(w.room() - head);
            let fin = flow.send.is_finished() && len as u64 == flow.send.end();
            if len > 0 || fin {
                Frame::encode_data_head(&mut w, flow.id, 0, len, fin);
                flow.send.copy(0, w.reserve(len));
                flow.send.note_early(len as u64);
            }
        }
        let written = w.written();
        buf.truncate(written);
        buf
    }

    /// Sets up a server's session for early data: the credit in both directions.
    pub(crate) fn begin_unconfirmed(&mut self, session_credit: u64, flow_credit: u64) {
        self.credit = SessionCredit {
            peer_max: session_credit,
            advertised: self.config.window_of_session(),
            ..SessionCredit::default()
        };
        self.initial_flow_credit = flow_credit;
    }

    /// R-EARLY-2: handles the early data of a SYN. Returns the flows that it opened or extended.
    pub(crate) fn take_early_data(
        &mut self,
        now: Time,
        bytes: &[u8],
    ) -> Result<Vec<FlowId>, PeerFault> {
        let mut flows: Vec<FlowId> = Vec::new();
        for frame in FrameIter::new(bytes) {
            let frame = frame?;
            let (Frame::Open { flow: id, .. } | Frame::Data { flow: id, .. }) = frame else {
                continue;
            };
            let full = self.flows.len() + self.flows_elsewhere >= self.config.flows_per_key_max
                || self.flows.len() >= self.config.flows_max;
            if full && self.flows.get(id).is_none() {
                // R-QUOTA-2: the device is informed when it opens the flow again.
                continue;
            }
            match frame {
                Frame::Open { .. } => self.on_open(now, &frame)?,
                Frame::Data {
                    offset, bytes, fin, ..
                } => {
                    self.take_bytes(None, id, offset, bytes, fin)?;
                }
                _ => {}
            }
            if let Some(flow) = self.flows.get_mut(id)
                && !flows.contains(&id)
            {
                // The application starts at offset 0 by itself.
                flow.requested_from = Some(0);
                flow.opened_by_syn = true;
                flows.push(id);
            }
        }
        // Data that found no room arrives again in the first packet.
        self.unretained = false;
        Ok(flows)
    }

    /// Whether the peer has not proved yet that it is present: its data may be a replay.
    pub fn is_unconfirmed(&self) -> bool {
        self.is_tentative() && !self.known_to_peer
    }

    /// Ends a session whose handshake was not confirmed.
    pub(crate) fn end_unconfirmed(&mut self) {
        self.end(SessionEnd::Unconfirmed);
    }
}
