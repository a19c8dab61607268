//! A device's ticket for its next handshake, and whether it was used.

use d2tp_seal::SessionTicket;

/// A ticket that a device received.
#[derive(Debug)]
pub(crate) struct ClientTicket {
    ticket: SessionTicket,
    shown: bool,
}

impl ClientTicket {
    pub(crate) fn boxed(ticket: SessionTicket) -> Box<Self> {
        let shown = false;
        Box::new(ClientTicket { ticket, shown })
    }

    /// The ticket, to be saved.
    pub(crate) fn ticket(&self) -> &SessionTicket {
        &self.ticket
    }

    /// R-TICKET-2: the ticket for a SYN, if it may still be used. It is sent in clear, so if it
    /// were used in two places, an observer of both could see that the same device was there.
    pub(crate) fn show(&mut self) -> Option<&SessionTicket> {
        (!std::mem::replace(&mut self.shown, true)).then_some(&self.ticket)
    }
}
