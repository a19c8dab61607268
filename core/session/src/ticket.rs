//! A device's ticket for its next handshake, and where it was shown.

use d2tp_seal::Ticket;

use crate::path::Addresses;

/// How often a ticket is shown: a server that lost the key to it does not answer.
const SHOWN_MAX: u8 = 2;

/// A ticket that a device holds.
#[derive(Debug)]
pub(crate) struct Held {
    ticket: Ticket,
    shown: Option<(Addresses, u8)>,
}

impl Held {
    pub(crate) fn new(ticket: Ticket) -> Self {
        Held {
            ticket,
            shown: None,
        }
    }

    /// To be written down.
    pub(crate) fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// R-TICKET-2: to be shown at this place, if it still may be. It is in clear: shown at two places it
    /// would tell who listens there that the same device was at both.
    pub(crate) fn show(&mut self, at: Addresses) -> Option<&Ticket> {
        let (place, times) = self.shown.unwrap_or((at, 0));
        if place != at || times >= SHOWN_MAX {
            return None;
        }
        self.shown = Some((place, times + 1));
        Some(&self.ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::LinkId;
    use d2tp_seal::TICKET_BYTES;

    #[test]
    fn it_is_shown_twice_and_at_one_place() {
        // R-TICKET-2
        let at = |port: u16| Addresses {
            link: LinkId(1),
            local: None,
            remote: ([192, 0, 2, 1], port).into(),
        };
        let mut held = Held::new(Ticket {
            bytes: [1; TICKET_BYTES],
            secret: [2; 32],
        });
        assert!(held.show(at(1)).is_some());
        assert!(held.show(at(2)).is_none(), "another place");
        assert!(held.show(at(1)).is_some());
        assert!(held.show(at(1)).is_none(), "often enough");
    }
}
