//! A device's end of a serial line, which is a socket of its link.
//!
//! ```text
//!  engine ─▶ SerialLinks::send ─▶ the line's queue ─▶ bridge ─▶ the server
//!  core  ◀─ receive_run, with the address that identifies the line ◀─ its task
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use d2tp_device::AttachedSocket;
use d2tp_serial::{MobileStation, OpenLineError, SerialLine, StationSender};
use d2tp_session::{Addresses, LinkId, SerialPathId};

use crate::clock;
use crate::driver_core::DriverShared;
use crate::relay_dispatch;
use crate::relay_state::AbortOnDrop;

/// An attached line.
struct SerialCarrier {
    sender: StationSender,
    _receiver: AbortOnDrop,
}

/// The serial lines that a device uses.
#[derive(Default)]
pub(crate) struct SerialLinks(BTreeMap<LinkId, SerialCarrier>);

impl SerialLinks {
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

/// Attaches to a line as a new socket. Must be called on a tokio runtime.
///
/// # Errors
/// The line cannot be opened.
pub(crate) fn attach(
    shared: &Arc<DriverShared>,
    line: &SerialLine,
) -> Result<AttachedSocket, OpenLineError> {
    let station = MobileStation::attach(line)?;
    let sender = station.sender();
    let path = SerialPathId {
        number: station.address().0.into(),
        bytes_per_second: line.packet_bytes_per_second(),
    };
    let mut inner = shared.inner.lock();
    let link = inner.new_link();
    let addresses = Addresses {
        link,
        local: None,
        remote: path.address(),
    };
    let receiver = tokio::spawn(receive(Arc::downgrade(shared), station, addresses));
    let carrier = SerialCarrier {
        sender,
        _receiver: AbortOnDrop(receiver),
    };
    inner.serial_links.0.insert(link, carrier);
    Ok(AttachedSocket {
        socket: link,
        remote: addresses.remote,
    })
}

/// Passes packets of a line to the core until the line ends.
async fn receive(
    shared: std::sync::Weak<DriverShared>,
    mut station: MobileStation,
    addresses: Addresses,
) {
    while let Some(mut packet) = station.recv().await {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let stride = packet.len();
        let mut inner = shared.inner.lock();
        inner.counts.on_received(packet.len(), stride);
        relay_dispatch::receive_run(&mut inner, clock::now(), addresses, &mut packet, stride);
        drop(inner);
        shared.wake();
        shared.notify_activity();
    }
    let end = station.end();
    tracing::warn!(
        end = end.as_deref().unwrap_or("closed"),
        "a serial line ended"
    );
    if let Some(shared) = shared.upgrade() {
        shared.inner.lock().gone.push(addresses.link);
        shared.wake();
        shared.notify_activity();
    }
}
