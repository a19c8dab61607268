//! Claims inside a SYN: the flows that the device wants to continue, and from which offsets.
//!
//! A claim has the content of the RESUME and FLOW_CREDIT frames that would follow a round trip
//! later. It uses the padding of the SYN; claims that do not fit follow as RESUME frames. Only the
//! server's key protects them: whoever steals that key later can read flow ids and offsets, but no
//! data of a flow.

use d2tp_wire::{FlowId, Frame, VARINT_MAX, WireReader, WireWriter, varint_len};

/// The most claims in one SYN: as many as fit into its padding when their numbers are large.
pub(crate) const CLAIMS_MAX: usize = 64;

/// A flow that a waking device claims in its SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowClaim {
    pub(crate) flow: FlowId,
    /// The offset from which the server is to continue sending.
    pub(crate) received: u64,
    /// How many bytes the server may send from the claimed offset.
    pub(crate) credit: u64,
    /// Flags as in a RESUME frame.
    pub(crate) flags: u8,
}

impl FlowClaim {
    /// The encoded size of the claim in bytes.
    fn len(&self) -> usize {
        varint_len(self.flow.0) + varint_len(self.received) + varint_len(self.credit) + 1
    }
    pub(crate) fn is_complete(&self) -> bool {
        self.flags & Frame::RESUME_COMPLETE != 0
    }
}

/// The flows that a SYN claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SynClaims {
    /// Whether the link is metered: no payload before a grant.
    pub(crate) gated: bool,
    /// The claims, the most urgent first.
    pub(crate) list: Vec<FlowClaim>,
}

impl SynClaims {
    /// Writes as many claims as fit, and returns their number.
    pub(crate) fn encode(&self, w: &mut WireWriter<'_>) -> usize {
        let mut room = w.room().saturating_sub(2);
        let fit = self.list.iter().take(CLAIMS_MAX).take_while(|claim| {
            let need = claim.len();
            let fits = need <= room;
            room -= need.min(room);
            fits
        });
        let list = &self.list[..fit.count()];
        if list.is_empty() {
            return 0;
        }
        w.u8(list.len() as u8);
        w.u8(u8::from(self.gated));
        for claim in list {
            w.varint(claim.flow.0);
            w.varint(claim.received);
            w.varint(claim.credit);
            w.u8(claim.flags);
        }
        list.len()
    }

    /// R-HS-15: reads what [`SynClaims::encode`] wrote; anything else makes the SYN malformed.
    pub(crate) fn decode(r: &mut WireReader<'_>) -> Option<SynClaims> {
        // A SYN that ends here, or continues with padding, claims nothing.
        if r.is_empty() {
            return Some(SynClaims::default());
        }
        let n = usize::from(r.u8().ok()?);
        if n > CLAIMS_MAX {
            return None;
        }
        let gated = match n {
            0 => return Some(SynClaims::default()),
            _ => match r.u8().ok()? {
                0 => false,
                1 => true,
                _ => return None,
            },
        };
        let mut list: Vec<FlowClaim> = Vec::with_capacity(n);
        for _ in 0..n {
            let claim = FlowClaim {
                flow: FlowId(r.varint().ok()?),
                received: r.varint().ok()?,
                credit: r.varint().ok()?,
                flags: r.u8().ok()?,
            };
            // R-FLOW-10
            if claim.flow.0 > FlowId::MAX
                || claim.flags & !Frame::RESUME_COMPLETE != 0
                || claim.received + claim.credit > VARINT_MAX
                || list.iter().any(|c| c.flow == claim.flow)
            {
                return None;
            }
            list.push(claim);
        }
        Some(SynClaims { gated, list })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(n: u64) -> SynClaims {
        let claim = |i: u64| FlowClaim {
            flow: FlowId(i << 40),
            received: i << 32,
            credit: 8 << 20,
            flags: (i % 2) as u8,
        };
        SynClaims {
            gated: n % 2 == 1,
            list: (0..n).map(claim).collect(),
        }
    }

    fn bytes(claims: &SynClaims, room: usize) -> (Vec<u8>, usize) {
        let mut buf = vec![0; room];
        let mut w = WireWriter::new(&mut buf);
        let n = claims.encode(&mut w);
        let written = w.written();
        buf.truncate(written);
        (buf, n)
    }

    #[test]
    fn claims_come_back_and_the_first_of_too_many_are_kept() {
        // R-HS-15
        for n in [1, 2, 40, 64, 200] {
            let all = claims(n);
            let (buf, fit) = bytes(&all, 1007);
            assert!(
                fit >= 40.min(n as usize) && fit <= CLAIMS_MAX,
                "{fit} of {n}"
            );
            let read = SynClaims::decode(&mut WireReader::new(&buf)).unwrap();
            assert_eq!(read.list, all.list[..fit]);
            assert_eq!(read.gated, all.gated);
            for cut in 1..buf.len() {
                assert_eq!(SynClaims::decode(&mut WireReader::new(&buf[..cut])), None);
            }
        }
    }

    #[test]
    fn padding_and_nothing_at_all_are_no_claims() {
        for bytes in [&[][..], &[0; 1], &[0; 500]] {
            let claims = SynClaims::decode(&mut WireReader::new(bytes)).unwrap();
            assert_eq!(claims, SynClaims::default());
        }
    }

    #[test]
    fn what_is_no_claim_makes_all_of_it_malformed() {
        // R-HS-15
        let top = [0xff; 8];
        let bad: [&[&[u8]]; 6] = [
            &[&[65, 0], &[0; 400]],
            &[&[1, 2, 4, 0, 0, 0]],
            &[&[1, 0, 4, 0, 0, 2]],
            &[&[2, 0, 4, 0, 0, 0, 4, 1, 0, 0]],
            &[&[1, 0, 4], &top, &[1, 0]],
            &[&[3, 0, 4, 0, 0, 0]],
        ];
        for pieces in bad {
            let bytes = pieces.concat();
            assert_eq!(
                SynClaims::decode(&mut WireReader::new(&bytes)),
                None,
                "{bytes:?}"
            );
        }
        let good = [1, 1, 4, 0, 0, 1];
        assert_eq!(
            SynClaims::decode(&mut WireReader::new(&good))
                .unwrap()
                .list
                .len(),
            1
        );
    }

    #[test]
    fn claims_are_as_the_vectors_say() {
        // R-HS-15
        let file = include_str!("../../../docs/vectors/handshake.json");
        let file: serde_json::Value = serde_json::from_str(file).unwrap();
        let hex = |v: &serde_json::Value| hex::decode(v["bytes"].as_str().unwrap()).unwrap();
        for vector in file["claims"].as_array().unwrap() {
            let (buf, gated) = (hex(vector), vector["gated"].as_bool().unwrap());
            let list = vector["claims"].as_array().unwrap().iter();
            let list = list.map(|c| FlowClaim {
                flow: FlowId(c["flow"].as_u64().unwrap()),
                received: c["received"].as_u64().unwrap(),
                credit: c["credit"].as_u64().unwrap(),
                flags: c["flags"].as_u64().unwrap() as u8,
            });
            let list = list.collect();
            let claims = SynClaims { gated, list };
            assert_eq!(bytes(&claims, 1007).0, buf);
            assert_eq!(SynClaims::decode(&mut WireReader::new(&buf)), Some(claims));
        }
        for vector in file["claims_malformed"].as_array().unwrap() {
            let (buf, why) = (hex(vector), &vector["why"]);
            assert_eq!(SynClaims::decode(&mut WireReader::new(&buf)), None, "{why}");
        }
    }
}
