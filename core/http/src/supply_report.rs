//! Reports of a proxy to a device on the rate at which a server supplies a transfer.
//!
//! ```text
//!  device ── GET …, Cedos-Supply: ?1 ──▶ proxy ── GET … ──▶ server
//!         ◀── DATAGRAM, about each second ──  the server's rate
//!
//!  flow (8 bytes) · bytes per second that the server sends (8 bytes); all ones: the links are slower
//! ```
//!
//! Numbers are in network byte order. Each report replaces the previous one, so the loss of a
//! report does no harm.

/// The request field by which a device requests reports.
pub const SUPPLY_FIELD: &str = "cedos-supply";

/// The value of [`SUPPLY_FIELD`] that requests reports: an RFC 9651 boolean.
pub const SUPPLY_ASKED: &str = "?1";

/// The context of the DATAGRAMs that carry reports. Chosen at random, because programs number
/// theirs from 0.
pub const SUPPLY_CONTEXT: u64 = 0x2c5e_8d31;

/// The value that means that the server is faster than the links.
const AMPLE: u64 = u64::MAX;

/// The encoded length.
const REPORT_BYTES: usize = 16;

/// A report on one flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SupplyReport {
    /// The id of the flow that carries the answer.
    pub flow: u64,
    /// The bytes per second that the server sends, if the proxy waits for it; `None` if the proxy
    /// has more data than the links carry.
    pub limit: Option<u64>,
}

impl SupplyReport {
    /// The report as the content of a DATAGRAM.
    pub fn encode(self) -> [u8; REPORT_BYTES] {
        let limit = self.limit.map_or(AMPLE, |limit| limit.min(AMPLE - 1));
        let mut bytes = [0; REPORT_BYTES];
        bytes[..8].copy_from_slice(&self.flow.to_be_bytes());
        bytes[8..].copy_from_slice(&limit.to_be_bytes());
        bytes
    }

    /// Decodes the content of a DATAGRAM. Longer content is from a later version, and only its
    /// beginning is read.
    pub fn decode(bytes: &[u8]) -> Option<SupplyReport> {
        let number = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (flow, limit) = (number(0)?, number(8)?);
        Some(SupplyReport {
            flow,
            limit: (limit != AMPLE).then_some(limit),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_comes_back_and_a_short_one_is_none() {
        for limit in [None, Some(0), Some(120_000), Some(u64::MAX - 1)] {
            let report = SupplyReport {
                flow: 0x0102_0304_0506_0708,
                limit,
            };
            let bytes = report.encode();
            assert_eq!(SupplyReport::decode(&bytes), Some(report));
            assert_eq!(SupplyReport::decode(&bytes[..15]), None);
            assert_eq!(
                SupplyReport::decode(&[&bytes[..], &[0]].concat()),
                Some(report)
            );
        }
    }
}
