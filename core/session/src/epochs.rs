//! Epochs that a device may still use, after its journal reserved them (R-HS-2).
//!
//! A journal that synced for every SYN would sync every 30 s on a dead network, so epochs are
//! reserved in steps. The rest of a step is never used if the process dies.

use std::ops::Range;

use crate::event::SessionEnd;
use crate::session::Session;
use crate::session_state::SessionState;

impl Session {
    /// The epochs that are reserved and not used yet.
    pub fn epochs_left(&self) -> Range<u32> {
        self.epochs.clone()
    }

    /// Adds epochs up to `end`, exclusive, which the journal has reserved, for a device that used
    /// up its own ([`crate::SessionEvent::EpochsUsedUp`]). A handshake that waits for them
    /// continues; if no epochs are left to reserve, the session ends.
    pub fn add_epochs(&mut self, end: u32) {
        if self.state == SessionState::Closed {
            return;
        }
        self.epochs.end = self.epochs.end.max(end);
        if self.epochs.is_empty() && self.epochs.start == u32::MAX {
            // R-HS-16
            return self.end(SessionEnd::EpochsExhausted);
        }
        if let Some(handshake) = &mut self.handshake
            && !self.epochs.is_empty()
        {
            handshake.failed = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use d2tp_seal::{PublicKey, SecretKey};
    use d2tp_time::{Span, Time};

    use std::collections::BTreeSet;

    use crate::config::EndpointConfig;
    use crate::endpoint::{Admission, Endpoint};
    use crate::event::{SessionEnd, SessionEvent};
    use crate::link::{Addresses, LinkId};

    #[test]
    fn a_device_sends_syns_with_reserved_epochs_only_and_continues_when_there_are_more() {
        // R-HS-2
        let key = SecretKey::from_bytes([1; 32]);
        let server: PublicKey = SecretKey::from_bytes([2; 32]).public();
        let config = EndpointConfig::default();
        let mut device = Endpoint::new(config, key, Admission::Nobody, [3; 32], [4; 32]);
        let mut now = Time::ZERO;
        let id = device.connect(now, server, 7, 5..7);
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: "192.0.2.1:4433".parse().unwrap(),
        };
        let _ = device.with(id, |s| s.open_path(now, addresses, false));
        // Copies of a SYN have its epoch.
        let mut syns = BTreeSet::new();
        let mut buf = vec![0; 65_536];
        let mut handshake = |device: &mut Endpoint, now: &mut Time| {
            for _ in 0..60 {
                *now += Span::from_secs(1);
                device.handle_timeouts(*now);
                // Called like this, as a driver does after every turn.
                let _ = device.with(id, |_| ());
                while let Some(t) = device.poll_transmit(*now, &mut buf) {
                    syns.insert(buf[..t.len].to_vec());
                }
            }
            syns.len()
        };
        assert_eq!(handshake(&mut device, &mut now), 2);
        assert!(device.session(id).unwrap().epochs_left().is_empty());
        let _ = device.with(id, |s| s.add_epochs(8));
        assert_eq!(handshake(&mut device, &mut now), 3);
    }

    #[test]
    fn a_session_ends_when_no_epoch_is_left() {
        // R-HS-16
        let (key, last) = (SecretKey::from_bytes([1; 32]), u32::MAX - 1);
        let config = EndpointConfig::default();
        let mut device = Endpoint::new(config, key.clone(), Admission::Nobody, [3; 32], [4; 32]);
        let id = device.connect(Time::ZERO, key.public(), 7, last..u32::MAX);
        let _ = device.with(id, |s| s.epochs.start = u32::MAX);
        let _ = device.with(id, |s| s.add_epochs(u32::MAX));
        let events: Vec<_> = std::iter::from_fn(|| device.poll_event()).collect();
        let end = SessionEvent::Closed(SessionEnd::EpochsExhausted);
        assert!(events.contains(&(id, end)), "{events:?}");
    }
}
