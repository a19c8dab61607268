//! A device's ticket for its next handshake, and whether it was shown.

use d2tp_seal::Ticket;

/// A ticket that a device holds.
#[derive(Debug)]
pub(crate) struct Held {
    ticket: Ticket,
    shown: bool,
}

impl Held {
    pub(crate) fn boxed(ticket: Ticket) -> Box<Self> {
        let shown = false;
        Box::new(Held { ticket, shown })
    }

    /// To be written down.
    pub(crate) fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// R-TICKET-2: to be shown, if it still may be. It is in clear: shown at two places it would tell who
    /// listens there that the same device was at both.
    pub(crate) fn show(&mut self) -> Option<&Ticket> {
        (!std::mem::replace(&mut self.shown, true)).then_some(&self.ticket)
    }
}
