//! The head of a datagram between a program and its engine.

use std::net::Ipv4Addr;
use std::time::Duration;

use d2tp_driver::PathSelection;

use crate::options::ROUTES;

/// The head of a datagram between a program and the engine: its peer and its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHead {
    pub(crate) name: Ipv4Addr,
    pub(crate) route: Option<PathSelection>,
    pub(crate) expiry: Option<Duration>,
}

/// The size of the head in bytes: name, route, expiry in milliseconds.
pub(crate) const MARK_BYTES: usize = 4 + 4 + 4;

impl MessageHead {
    pub(crate) fn to_bytes(self) -> [u8; MARK_BYTES] {
        let place = |route| ROUTES.iter().position(|r| *r == route);
        let route = self.route.and_then(place).map_or(u32::MAX, |n| n as u32);
        let expiry = self.expiry.map_or(0, |expiry| expiry.as_millis() as u32);
        let mut bytes = [0; MARK_BYTES];
        bytes[..4].copy_from_slice(&self.name.octets());
        bytes[4..8].copy_from_slice(&route.to_ne_bytes());
        bytes[8..].copy_from_slice(&expiry.to_ne_bytes());
        bytes
    }

    pub(super) fn read(bytes: &[u8]) -> Option<(MessageHead, &[u8])> {
        let (head, message) = bytes.split_first_chunk::<MARK_BYTES>()?;
        let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("four"));
        let expiry = u64::from(word(8));
        let mark = MessageHead {
            name: Ipv4Addr::new(head[0], head[1], head[2], head[3]),
            route: ROUTES.get(word(4) as usize).copied(),
            expiry: (expiry > 0).then(|| Duration::from_millis(expiry)),
        };
        Some((mark, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_back_and_what_is_cut_is_none() {
        let marks = [
            (None, None),
            (Some(PathSelection::Each), None),
            (None, Some(Duration::from_millis(250))),
            (Some(PathSelection::Any), Some(Duration::from_secs(9))),
        ];
        for (route, expiry) in marks {
            let mark = MessageHead {
                name: Ipv4Addr::new(127, 1, 2, 3),
                route,
                expiry,
            };
            let bytes = [&mark.to_bytes()[..], b"message"].concat();
            assert_eq!(MessageHead::read(&bytes), Some((mark, &b"message"[..])));
            assert_eq!(MessageHead::read(&bytes[..MARK_BYTES - 1]), None);
        }
    }
}
