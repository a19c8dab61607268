//! The serial lines of a device, each of which is a socket of its link.
//!
//! ```text
//!  engine ─▶ SerialCarriers::send ─▶ the line's queue ─▶ bridge ─▶ the server
//!  core  ◀─ receive_run, with the address that identifies the line ◀─ its task
//! ```

use std::collections::BTreeMap;

use d2tp_serial::StationSender;
use d2tp_session::LinkId;
use tokio::task::JoinHandle;

use crate::relay_state::AbortOnDrop;

/// An attached line.
struct SerialCarrier {
    sender: StationSender,
    _receiver: AbortOnDrop,
}

/// The serial lines that a device uses.
#[derive(Default)]
pub(crate) struct SerialCarriers(BTreeMap<LinkId, SerialCarrier>);

impl SerialCarriers {
    /// Adds a line, with the task that receives from it.
    pub(crate) fn insert(&mut self, link: LinkId, sender: StationSender, receiver: JoinHandle<()>) {
        let carrier = SerialCarrier {
            sender,
            _receiver: AbortOnDrop(receiver),
        };
        self.0.insert(link, carrier);
    }

    /// Queues packets of one size for a line.
    pub(crate) fn send(&self, link: LinkId, bytes: &[u8], stride: usize) {
        if let Some(carrier) = self.0.get(&link) {
            bytes
                .chunks(stride.max(1))
                .for_each(|packet| carrier.sender.send(packet));
        }
    }

    /// Stops using a line.
    pub(crate) fn remove(&mut self, link: LinkId) {
        self.0.remove(&link);
    }

    /// Stops using all lines.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
