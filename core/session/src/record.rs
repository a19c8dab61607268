//! A session in encoded form, which survives hibernation and crashes.
//!
//! A record contains no packet keys and no buffers, but the identities of the two ends, the highest
//! epoch, and for each flow the progress of each direction. A flow takes about 30 bytes. The
//! driver's journal protects the integrity of records on disk.

use std::collections::BTreeMap;

use d2tp_seal::{PublicKey, SECRET_ID_BYTES, SessionSecret, SessionTicket, TICKET_BYTES};
use d2tp_time::Span;
use d2tp_wire::{FlowId, VARINT_MAX, WireReader, WireWriter};

use crate::flow_options::FlowOptions;
use crate::session_state::Role;

/// The format of a record without a session secret.
const FORMAT: u8 = 3;
/// The format of a record with one. It is not written otherwise, so that older programs read what
/// they can.
const FORMAT_WITH_SECRET: u8 = 4;
/// The most memory that a hibernated flow takes, in bytes.
pub const FLOW_RECORD_BYTES_MAX: usize = 96;
const HEAD_BYTES_MAX: usize = 80 + TICKET_BYTES + 32 + SECRET_ID_BYTES + 32;
/// The most epochs whose used flow ids are recorded individually.
pub(crate) const SEEN_EPOCHS_MAX: usize = 8;
/// The most ranges of used flow ids that are recorded for an epoch.
pub(crate) const SEEN_RANGES_MAX: usize = 16;
const SEEN_BYTES_MAX: usize = SEEN_EPOCHS_MAX * (5 + SEEN_RANGES_MAX * 8);
/// The most flows of one record. A record with more is damaged.
const FLOWS_MAX: u64 = 65_536;

/// The longest time left that a clock of 64-bit nanoseconds can represent, in whole milliseconds:
/// 584 years. Longer times are cut to it, so that a record does not change when it is written
/// again.
const MILLIS_MAX: u64 = u64::MAX / 1_000_000;

/// Why bytes cannot be decoded as a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The record ends too early or holds impossible values.
    #[error("the session record is damaged")]
    Damaged,
    /// The record was written in a format that this version does not know.
    #[error(
        "the session record has format {0}, this program reads formats {FORMAT} and {FORMAT_WITH_SECRET}"
    )]
    Format(u8),
}

/// Used flow ids: half-open ranges of counters per epoch.
pub type UsedFlowIds = Vec<(u32, Vec<(u64, u64)>)>;

/// A flow of a hibernated session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRecord {
    /// The flow's id.
    pub id: FlowId,
    /// The options the flow was opened with; the deadline is in [`FlowRecord::deadline_left`].
    pub options: FlowOptions,
    /// Time left until the deadline when the record was made.
    pub deadline_left: Option<Span>,
    /// The sequence number of the last change of the deadline.
    pub deadline_seq: u64,
    /// The offset from which sending resumes: the peer has everything below.
    pub sent_to: u64,
    /// The final size of this end's direction, once it is known.
    pub send_end: Option<u64>,
    /// Whether the peer acknowledged the end of this end's direction.
    pub send_complete: bool,
    /// The offset from which receiving resumes: the application has everything below.
    pub received_to: u64,
    /// The final size of the peer's direction, once it is known.
    pub receive_end: Option<u64>,
    /// Whether the application read the end.
    pub receive_complete: bool,
    /// The code with which this end reset its direction. The peer is told again, even if it acknowledged that: its record
    /// does not hold it.
    pub reset: Option<u64>,
    /// The code with which this end stopped the peer's direction.
    pub stopped: Option<u64>,
}

/// A hibernated session as it is stored: identity, epoch and open flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// Our role in the session.
    pub role: Role,
    /// The public key of the peer.
    pub peer: PublicKey,
    /// The device's instance.
    pub instance: u64,
    /// The highest confirmed epoch.
    pub epoch: u32,
    /// The epoch below which all flow ids of the peer count as used.
    pub seen_floor: u32,
    /// Ids that the peer used in later epochs: half-open ranges of counters.
    pub seen: UsedFlowIds,
    /// The code of a CLOSE that the peer has not received, and how long to keep trying; `None` if
    /// the session is not closed.
    pub closing: Option<(u64, Span)>,
    /// The ticket for a device's next handshake.
    pub ticket: Option<SessionTicket>,
    /// The secret of the last exchange by ML-KEM, which the next handshake names.
    pub secret: Option<SessionSecret>,
    /// Flows that are open.
    pub flows: Vec<FlowRecord>,
}

fn opt(v: Option<u64>) -> u64 {
    v.map_or(0, |v| (v + 1).min(VARINT_MAX))
}

impl SessionRecord {
    /// Lets `age` pass for a record that was made that long ago: its deadlines approach.
    pub fn make_older(&mut self, age: Span) {
        self.closing = self.closing.map(|(c, left)| (c, left.saturating_sub(age)));
        for flow in &mut self.flows {
            flow.deadline_left = flow.deadline_left.map(|left| left.saturating_sub(age));
        }
    }

    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        let mut buf =
            vec![0; HEAD_BYTES_MAX + SEEN_BYTES_MAX + self.flows.len() * FLOW_RECORD_BYTES_MAX];
        let mut w = WireWriter::new(&mut buf);
        w.u8(match self.secret {
            None => FORMAT,
            Some(_) => FORMAT_WITH_SECRET,
        });
        w.u8(u8::from(self.role == Role::Responder));
        w.bytes(&self.peer.0);
        w.u64(self.instance);
        w.u32(self.epoch);
        w.u32(self.seen_floor);
        w.u8(self.seen.len() as u8);
        for (epoch, ranges) in &self.seen {
            w.u32(*epoch);
            w.u8(ranges.len() as u8);
            for (start, end) in ranges {
                w.varint(*start);
                w.varint(end - start);
            }
        }
        w.varint(opt(self.closing.map(|(code, _)| code)));
        if let Some((_, left)) = self.closing {
            w.varint(left.as_millis().min(VARINT_MAX));
        }
        if self.role == Role::Initiator {
            w.u8(u8::from(self.ticket.is_some()));
            if let Some(ticket) = &self.ticket {
                w.bytes(&ticket.bytes);
                w.bytes(&ticket.secret);
            }
        }
        if let Some(secret) = &self.secret {
            w.bytes(&secret.id);
            w.bytes(&secret.secret);
        }
        w.varint(self.flows.len() as u64);
        for f in &self.flows {
            w.varint(f.id.0);
            w.u8(u8::from(f.options.durable)
                | u8::from(f.options.hibernates) << 1
                | u8::from(f.send_complete) << 2
                | u8::from(f.receive_complete) << 3
                | f.options.priority << 4
                | u8::from(f.options.reachable) << 7);
            w.varint(opt(f.options.size));
            w.varint(opt(f.deadline_left.map(|d| d.as_millis())));
            w.varint(f.deadline_seq);
            w.varint(f.sent_to);
            w.varint(opt(f.send_end));
            w.varint(f.received_to);
            w.varint(opt(f.receive_end));
            w.varint(opt(f.reset));
            w.varint(opt(f.stopped));
        }
        let n = w.written();
        buf.truncate(n);
        buf
    }

    /// Sets the offsets from which flows resume sending to those of `before`, unless the flows have
    /// ended since.
    pub(crate) fn keep_sending_of(&mut self, before: &SessionRecord) {
        let before: BTreeMap<FlowId, &FlowRecord> =
            before.flows.iter().map(|f| (f.id, f)).collect();
        for flow in &mut self.flows {
            if let Some(old) = before.get(&flow.id)
                && old.send_complete == flow.send_complete
            {
                (flow.sent_to, flow.send_end) = (old.sent_to, old.send_end);
            }
        }
    }

    /// Decodes what [`SessionRecord::encode`] wrote, completely or not at all (R-REC-1).
    ///
    /// # Errors
    /// The bytes are damaged or of another format.
    pub fn decode(bytes: &[u8]) -> Result<SessionRecord, RecordError> {
        let bad = |_| RecordError::Damaged;
        let mut r = WireReader::new(bytes);
        let format = r.u8().map_err(bad)?;
        if format != FORMAT && format != FORMAT_WITH_SECRET {
            return Err(RecordError::Format(format));
        }
        let role = match r.u8().map_err(bad)? {
            0 => Role::Initiator,
            1 => Role::Responder,
            _ => return Err(RecordError::Damaged),
        };
        let peer = PublicKey(r.array().map_err(bad)?);
        let instance = r.u64().map_err(bad)?;
        let epoch = r.u32().map_err(bad)?;
        let seen_floor = r.u32().map_err(bad)?;
        let epochs = usize::from(r.u8().map_err(bad)?);
        let mut seen = Vec::new();
        for _ in 0..epochs {
            let epoch = r.u32().map_err(bad)?;
            let n = usize::from(r.u8().map_err(bad)?);
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for _ in 0..n {
                let start = r.varint().map_err(bad)?;
                let len = r.varint().map_err(bad)?;
                let follows = ranges.last().is_none_or(|(_, end)| *end < start);
                let end = start + len;
                if !follows || len == 0 || end > u64::from(FlowId::COUNTER_MAX) + 1 {
                    return Err(RecordError::Damaged);
                }
                ranges.push((start, end));
            }
            seen.push((epoch, ranges));
        }
        if epochs > SEEN_EPOCHS_MAX || seen.iter().any(|(_, r)| r.len() > SEEN_RANGES_MAX) {
            return Err(RecordError::Damaged);
        }
        let closing = match r.varint().map_err(bad)?.checked_sub(1) {
            Some(code) => {
                let left = r.varint().map_err(bad)?.min(MILLIS_MAX);
                Some((code, Span::from_millis(left)))
            }
            None => None,
        };
        let has_ticket = match role {
            Role::Initiator => r.u8().map_err(bad)?,
            Role::Responder => 0,
        };
        let ticket = match has_ticket {
            0 => None,
            1 => Some(SessionTicket {
                bytes: r.array().map_err(bad)?,
                secret: r.array().map_err(bad)?,
            }),
            _ => return Err(RecordError::Damaged),
        };
        let secret = match format {
            FORMAT_WITH_SECRET => Some(SessionSecret {
                id: r.array().map_err(bad)?,
                secret: r.array().map_err(bad)?,
            }),
            _ => None,
        };
        let n = r.varint().map_err(bad)?;
        if n > FLOWS_MAX {
            return Err(RecordError::Damaged);
        }
        let mut flows = Vec::new();
        for _ in 0..n {
            let id = FlowId(r.varint().map_err(bad)?);
            if id.0 > FlowId::MAX {
                return Err(RecordError::Damaged);
            }
            let flags = r.u8().map_err(bad)?;
            let mut next = || r.varint().map_err(bad);
            let size = next()?.checked_sub(1);
            let deadline_left = next()?.checked_sub(1);
            let deadline_left = deadline_left.map(|ms| Span::from_millis(ms.min(MILLIS_MAX)));
            let deadline_seq = next()?;
            let sent_to = next()?;
            let send_end = next()?.checked_sub(1);
            let received_to = next()?;
            let receive_end = next()?.checked_sub(1);
            let reset = next()?.checked_sub(1);
            let stopped = next()?.checked_sub(1);
            if send_end.is_some_and(|e| e < sent_to) || receive_end.is_some_and(|e| e < received_to)
            {
                return Err(RecordError::Damaged);
            }
            flows.push(FlowRecord {
                id,
                options: FlowOptions {
                    priority: flags >> 4 & 7,
                    size,
                    deadline: None,
                    durable: flags & 1 != 0,
                    hibernates: flags & 2 != 0,
                    reachable: flags & 128 != 0,
                    early: false,
                },
                deadline_left,
                deadline_seq,
                sent_to,
                send_end,
                send_complete: flags & 4 != 0,
                received_to,
                receive_end,
                receive_complete: flags & 8 != 0,
                reset,
                stopped,
            });
        }
        if !r.is_empty() {
            return Err(RecordError::Damaged);
        }
        Ok(SessionRecord {
            role,
            peer,
            instance,
            epoch,
            seen_floor,
            seen,
            closing,
            ticket,
            secret,
            flows,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flow(id: u64, n: u64) -> FlowRecord {
        FlowRecord {
            id: FlowId(id),
            options: FlowOptions {
                priority: 3,
                size: Some(n),
                deadline: None,
                durable: n.is_multiple_of(2),
                hibernates: true,
                reachable: n.is_multiple_of(7),
                early: false,
            },
            deadline_left: Some(Span::from_millis(n)),
            deadline_seq: 2,
            sent_to: n,
            send_end: (n.is_multiple_of(3)).then_some(n + 5),
            send_complete: false,
            received_to: n / 2,
            receive_end: None,
            receive_complete: n.is_multiple_of(5),
            reset: n.is_multiple_of(4).then_some(n),
            stopped: n.is_multiple_of(6).then_some(0),
        }
    }

    proptest! {
        #[test]
        fn records_come_back(n in 0u64..1_000_000, flows in 0u64..20, role: bool) {
            let record = SessionRecord {
                role: if role { Role::Initiator } else { Role::Responder },
                peer: PublicKey([9; 32]),
                instance: n,
                epoch: 7,
                seen_floor: 3,
                seen: vec![(5, vec![(0, 4), (6, 7)]), (7, vec![(0, 1)])],
                closing: n.is_multiple_of(2).then(|| (n, Span::from_millis(n))),
                ticket: (role && n.is_multiple_of(3)).then_some(SessionTicket {
                    bytes: [n as u8; TICKET_BYTES],
                    secret: [7; 32],
                }),
                secret: n.is_multiple_of(5).then_some(SessionSecret {
                    id: [n as u8; 8],
                    secret: [8; 32],
                }),
                flows: (0..flows).map(|i| flow(i << 25, n + i)).collect(),
            };
            let bytes = record.encode();
            prop_assert!(bytes.len() <= HEAD_BYTES_MAX + 20 + 40 * flows as usize);
            // R-REC-1
            prop_assert_eq!(SessionRecord::decode(&bytes), Ok(record));
            for cut in 0..bytes.len() {
                prop_assert!(SessionRecord::decode(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn damaged_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = SessionRecord::decode(&bytes);
        }
    }
}
