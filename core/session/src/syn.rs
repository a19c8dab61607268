//! What a SYN says, and what is answered.

use d2tp_wire::{Cid, Reader, Reason, TOKEN_BYTES, Writer};

use crate::claim::Claims;
use crate::config::SPARE_PATHS;
use crate::early_data::read_early_data;

/// What a SYN's payload says.
#[derive(Debug)]
pub(crate) struct Syn {
    pub(crate) instance: u64,
    pub(crate) epoch: u32,
    pub(crate) suites: Vec<u8>,
    pub(crate) session_credit: u64,
    pub(crate) flow_credit: u64,
    pub(crate) spare: Vec<Cid>,
    pub(crate) claims: Claims,
    /// Frames: flows it opens, and their bytes.
    pub(crate) early_data: Option<Vec<u8>>,
}

impl Syn {
    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<Syn> {
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
            Some(_) => Claims::default(),
            None => Claims::decode(r)?,
        };
        Some(Syn {
            instance,
            epoch,
            suites,
            session_credit,
            flow_credit,
            spare,
            claims,
            early_data,
        })
    }
}

/// A server's answer when it takes the device in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SynAckBody {
    pub(crate) cid: Cid,
    pub(crate) token: [u8; TOKEN_BYTES],
    pub(crate) suite: u8,
    pub(crate) resumed: bool,
    pub(crate) session_credit: u64,
    pub(crate) flow_credit: u64,
    pub(crate) spare: Vec<(Cid, [u8; TOKEN_BYTES])>,
}

/// What a SYN+ACK's payload says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SynAck {
    Welcome(SynAckBody),
    Stale { confirmed: u32 },
    Refused(Reason),
    NoSuite,
}

impl SynAck {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) {
        match self {
            SynAck::Welcome(b) => {
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
        }
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Option<SynAck> {
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
                SynAck::Welcome(SynAckBody {
                    cid,
                    token,
                    suite,
                    resumed,
                    session_credit,
                    flow_credit,
                    spare,
                })
            }
            1 => SynAck::Stale {
                confirmed: r.u32().ok()?,
            },
            2 => SynAck::Refused(Reason::from_u8(r.u8().ok()?)),
            3 => SynAck::NoSuite,
            _ => return None,
        })
    }
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
        };
        for answer in [
            SynAck::Welcome(body),
            SynAck::Stale { confirmed: 9 },
            SynAck::Refused(Reason::NotAllowed),
            SynAck::NoSuite,
        ] {
            let mut buf = [0; 200];
            let mut w = Writer::new(&mut buf);
            answer.encode(&mut w);
            let n = w.written();
            assert_eq!(SynAck::decode(&mut Reader::new(&buf[..n])), Some(answer));
            for cut in 0..n {
                assert_eq!(SynAck::decode(&mut Reader::new(&buf[..cut])), None);
            }
        }
    }
}
