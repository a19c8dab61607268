//! A device's ticket for its next handshake, and whether it was shown.

use d2tp_seal::SessionTicket;

/// A ticket that a device holds.
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

    /// To be written down.
    pub(crate) fn ticket(&self) -> &SessionTicket {
        &self.ticket
    }

    /// R-TICKET-2: to be shown, if it still may be. It is in clear: shown at two places it would tell who
    /// listens there that the same device was at both.
    pub(crate) fn show(&mut self) -> Option<&SessionTicket> {
        (!std::mem::replace(&mut self.shown, true)).then_some(&self.ticket)
    }
}
