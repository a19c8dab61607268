//! A device's end of a serial line: a link gets it as a socket, and its task passes packets to the core.

use std::sync::Arc;

use d2tp_device::AttachedSocket;
use d2tp_serial::{MobileStation, OpenLineError, SerialLine};
use d2tp_session::{Addresses, SerialPathId};

use crate::clock;
use crate::driver_core::DriverShared;
use crate::relay_dispatch;

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
    inner.serial_links.insert(link, sender, receiver);
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
