//! The encrypted payloads of SYN and SYN+ACK.

use d2tp_seal::{SessionTicket, TICKET_BYTES};
use d2tp_wire::{
    CID_BYTES, Cid, FlowId, Frame, FrameIter, ReasonCode, TOKEN_BYTES, WireReader, WireWriter,
};

use crate::claim::SynClaims;
use crate::config::SPARE_PATHS;
use crate::key_exchange_state::{HYBRID_SUITE, HybridAnswer, SynTrailer};
use crate::link::Addresses;

/// The decoded payload of a SYN.
#[derive(Debug)]
pub(crate) struct Syn {
    pub(crate) instance: u64,
    pub(crate) epoch: u32,
    pub(crate) suites: Vec<u8>,
    pub(crate) session_credit: u64,
    pub(crate) flow_credit: u64,
    pub(crate) spare: Vec<Cid>,
    pub(crate) claims: SynClaims,
    /// Frames that open flows, and their data.
    pub(crate) early_data: Option<Vec<u8>>,
    /// The epoch of the handshake that issued the ticket, if the SYN has one.
    pub(crate) ticket_of: Option<u32>,
    /// The device's offer to agree keys by ML-KEM, if it makes one.
    pub(crate) hybrid: Option<SynTrailer>,
}

/// The source of a SYN, and the properties of its datagram that its answer needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SynOrigin {
    pub(crate) from: Addresses,
    /// The device's connection id for path 0.
    pub(crate) cid: Cid,
    /// The size of the datagram in bytes.
    pub(crate) len: usize,
    pub(crate) mac1: [u8; 16],
    /// Whether mac2 proves the address.
    pub(crate) proved: bool,
}

impl Syn {
    pub(crate) fn decode(r: &mut WireReader<'_>) -> Option<Syn> {
        let instance = r.u64().ok()?;
        let epoch = r.u32().ok()?;
        let n = r.u8().ok()?;
        let suites = r.bytes(usize::from(n)).ok()?.to_vec();
        let session_credit = r.varint().ok()?;
        let flow_credit = r.varint().ok()?;
        let n = r.u8().ok()?;
        if u32::from(n) > 2 * SPARE_PATHS {
            return None;
        }
        let spare = (0..n)
            .map(|_| Cid::decode(r))
            .collect::<Result<_, _>>()
            .ok()?;
        let early_data = read_early_data(r, epoch)?;
        let claims = match early_data {
            Some(_) => SynClaims::default(),
            None => SynClaims::decode(r)?,
        };
        let offers = suites.contains(&HYBRID_SUITE);
        let hybrid = offers.then(|| SynTrailer::decode(r.rest()));
        Some(Syn {
            instance,
            epoch,
            suites,
            session_credit,
            flow_credit,
            spare,
            claims,
            early_data,
            ticket_of: None,
            hybrid,
        })
    }
}

/// The payload of a SYN+ACK that accepts the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SynAckBody {
    pub(crate) cid: Cid,
    pub(crate) token: [u8; TOKEN_BYTES],
    pub(crate) suite: u8,
    pub(crate) resumed: bool,
    pub(crate) session_credit: u64,
    pub(crate) flow_credit: u64,
    pub(crate) spare: Vec<(Cid, [u8; TOKEN_BYTES])>,
    /// The ticket for the device's next handshake.
    pub(crate) ticket: Option<SessionTicket>,
    /// What follows for keys of ML-KEM.
    pub(crate) hybrid: HybridAnswer,
}

/// The size of each spare connection id in a SYN+ACK.
const SPARE_BYTES: usize = CID_BYTES + TOKEN_BYTES;
/// The size of a ticket in a SYN+ACK.
const TICKET_FIELD_BYTES: usize = TICKET_BYTES + 32;

impl SynAckBody {
    /// R-HS-5: leaves out what a SYN+ACK can do without, so that its payload is at most `room` bytes large:
    /// the ticket, then connection ids for further paths.
    pub(crate) fn shorten_to(&mut self, room: usize) {
        let mut scratch = [0; 1_200];
        let mut w = WireWriter::new(&mut scratch);
        SynAck::Accepted(self.clone()).encode(&mut w);
        let mut size = w.written();
        if size > room && self.ticket.take().is_some() {
            size -= TICKET_FIELD_BYTES;
        }
        while size > room && self.spare.pop().is_some() {
            size -= SPARE_BYTES;
        }
    }
}

/// The decoded payload of a SYN+ACK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SynAck {
    Accepted(SynAckBody),
    Stale {
        confirmed: u32,
    },
    Refused(ReasonCode),
    NoSuite,
    /// The ticket is no longer valid; the device must use its key.
    NoTicket,
    /// The server cannot look up the session now; the device tries again.
    Later,
}

impl SynAck {
    pub(crate) fn encode(&self, w: &mut WireWriter<'_>) {
        match self {
            SynAck::Accepted(b) => {
                w.u8(0);
                w.bytes(&b.cid.0);
                w.bytes(&b.token);
                w.u8(b.suite);
                w.u8(u8::from(b.resumed));
                w.varint(b.session_credit);
                w.varint(b.flow_credit);
                w.u8(b.spare.len() as u8);
                for (cid, token) in &b.spare {
                    w.bytes(&cid.0);
                    w.bytes(token);
                }
                w.u8(u8::from(b.ticket.is_some()));
                if let Some(ticket) = &b.ticket {
                    w.bytes(&ticket.bytes);
                    w.bytes(&ticket.secret);
                }
                if b.hybrid != HybridAnswer::Unused {
                    w.u8(b.hybrid.code());
                }
            }
            SynAck::Stale { confirmed } => {
                w.u8(1);
                w.u32(*confirmed);
            }
            SynAck::Refused(reason) => {
                w.u8(2);
                w.u8(*reason as u8);
            }
            SynAck::NoSuite => w.u8(3),
            SynAck::NoTicket => w.u8(4),
            SynAck::Later => w.u8(5),
        }
    }

    pub(crate) fn decode(r: &mut WireReader<'_>) -> Option<SynAck> {
        Some(match r.u8().ok()? {
            0 => {
                let cid = Cid::decode(r).ok()?;
                let token = r.array().ok()?;
                let suite = r.u8().ok()?;
                let resumed = r.u8().ok()? == 1;
                let session_credit = r.varint().ok()?;
                let flow_credit = r.varint().ok()?;
                let n = r.u8().ok()?;
                if u32::from(n) > 2 * SPARE_PATHS {
                    return None;
                }
                let mut spare = Vec::with_capacity(usize::from(n));
                for _ in 0..n {
                    spare.push((Cid::decode(r).ok()?, r.array().ok()?));
                }
                let ticket = match r.u8() {
                    Ok(1) => Some(SessionTicket {
                        bytes: r.array::<TICKET_BYTES>().ok()?,
                        secret: r.array().ok()?,
                    }),
                    _ => None,
                };
                let hybrid = HybridAnswer::from_code(r.u8().unwrap_or(0));
                SynAck::Accepted(SynAckBody {
                    cid,
                    token,
                    suite,
                    resumed,
                    session_credit,
                    flow_credit,
                    spare,
                    ticket,
                    hybrid,
                })
            }
            1 => SynAck::Stale {
                confirmed: r.u32().ok()?,
            },
            2 => SynAck::Refused(ReasonCode::from_u8(r.u8().ok()?)),
            3 => SynAck::NoSuite,
            4 => SynAck::NoTicket,
            5 => SynAck::Later,
            _ => return None,
        })
    }
}

/// The number of claims that announces early data instead.
pub(crate) const EARLY_DATA_MARK: u8 = 255;

/// The most bytes of early data in a SYN: the size of its padding if all other fields are longest.
pub(crate) const EARLY_DATA_BYTES_MAX: usize = 960;

/// R-HS-15: reads the early data of a SYN of this epoch, if it contains any instead of claims: only
/// OPEN and DATA frames of flows that the device opens. `None` if it is malformed.
#[expect(clippy::option_option, reason = "malformed, and not there")]
pub(crate) fn read_early_data(r: &mut WireReader<'_>, epoch: u32) -> Option<Option<Vec<u8>>> {
    let mut ahead = *r;
    if ahead.u8() != Ok(EARLY_DATA_MARK) {
        return Some(None);
    }
    *r = ahead;
    let n = usize::try_from(r.varint().ok()?).ok()?;
    let bytes = r.bytes(n).ok()?;
    let ours = |flow: FlowId| flow.by_initiator() && flow.0 <= FlowId::MAX && flow.epoch() <= epoch;
    let good = FrameIter::new(bytes).all(|frame| match frame {
        Ok(Frame::Open { flow, .. } | Frame::Data { flow, .. }) => ours(flow),
        _ => false,
    });
    good.then(|| Some(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_back_and_every_truncation_is_refused() {
        let body = SynAckBody {
            cid: Cid([1; 8]),
            token: [2; 16],
            suite: 1,
            resumed: true,
            session_credit: 1 << 20,
            flow_credit: 77,
            spare: vec![(Cid([3; 8]), [4; 16]); 3],
            ticket: None,
            hybrid: HybridAnswer::Unused,
        };
        let ticket = Some(SessionTicket {
            bytes: [5; TICKET_BYTES],
            secret: [6; 32],
        });
        let with_ticket = SynAckBody {
            ticket,
            ..body.clone()
        };
        for answer in [
            SynAck::Accepted(body),
            SynAck::Accepted(with_ticket),
            SynAck::Stale { confirmed: 9 },
            SynAck::Refused(ReasonCode::NotAllowed),
            SynAck::NoSuite,
            SynAck::NoTicket,
            SynAck::Later,
        ] {
            let mut buf = [0; 400];
            let mut w = WireWriter::new(&mut buf);
            answer.encode(&mut w);
            let n = w.written();
            let read = SynAck::decode(&mut WireReader::new(&buf[..n]));
            assert_eq!(read.as_ref(), Some(&answer));
            // An accepting SYN+ACK may end before the field of the ticket.
            let whole = match &answer {
                SynAck::Accepted(body) if body.ticket.is_none() => n - 1,
                SynAck::Accepted(_) => n - TICKET_BYTES - 33,
                _ => n,
            };
            for cut in (0..n).filter(|cut| *cut != whole) {
                assert_eq!(SynAck::decode(&mut WireReader::new(&buf[..cut])), None);
            }
        }
    }
}
