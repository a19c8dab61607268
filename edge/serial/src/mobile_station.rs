//! A mobile's end of a line. Sessions of one process share the device: each has an address of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::frame::StationAddress;
use crate::line::SerialLine;
use crate::port::{LinkPacket, OpenLineError, SerialPort, StationRole};

/// Received packets that may wait for one session.
const RECEIVED_MAX: usize = 64; // a guess

/// The lines that this process has open.
static OPEN_LINES: LazyLock<Mutex<BTreeMap<SerialLine, Weak<MobileLine>>>> =
    LazyLock::new(Mutex::default);

/// An open line and who receives from it.
struct MobileLine {
    port: SerialPort,
    receivers: Arc<Mutex<BTreeMap<StationAddress, mpsc::Sender<Vec<u8>>>>>,
    dispatcher: JoinHandle<()>,
}

impl Drop for MobileLine {
    fn drop(&mut self) {
        self.dispatcher.abort();
    }
}

/// A session's end of a line.
pub struct MobileStation {
    line: Arc<MobileLine>,
    address: StationAddress,
    packets: mpsc::Receiver<Vec<u8>>,
}

/// Sends packets of a station.
#[derive(Clone)]
pub struct StationSender {
    line: Arc<MobileLine>,
    address: StationAddress,
}

impl MobileStation {
    /// Opens a line, or joins the sessions that use it. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn attach(line: &SerialLine) -> Result<MobileStation, OpenLineError> {
        let mut lines = OPEN_LINES.lock();
        lines.retain(|_, line| line.strong_count() > 0);
        let open = lines.get(line).and_then(Weak::upgrade);
        let open = match open.filter(|open| open.port.end().is_none()) {
            Some(open) => open,
            None => {
                let open = Arc::new(MobileLine::open(line)?);
                lines.insert(line.clone(), Arc::downgrade(&open));
                open
            }
        };
        drop(lines);
        let (give, packets) = mpsc::channel(RECEIVED_MAX);
        let address = {
            let mut receivers = open.receivers.lock();
            let address = draw_address(&receivers);
            receivers.insert(address, give);
            address
        };
        Ok(MobileStation {
            line: open,
            address,
            packets,
        })
    }

    /// The station's address.
    pub fn address(&self) -> StationAddress {
        self.address
    }

    /// The next packet for this station; `None` when the line has ended.
    pub async fn recv(&mut self) -> Option<Vec<u8>> {
        self.packets.recv().await
    }

    /// A handle that sends the station's packets.
    pub fn sender(&self) -> StationSender {
        StationSender {
            line: self.line.clone(),
            address: self.address,
        }
    }

    /// Why the line ended, if it has.
    pub fn end(&self) -> Option<String> {
        self.line.port.end()
    }
}

impl StationSender {
    /// Queues a packet for the bridge.
    pub fn send(&self, packet: &[u8]) {
        self.line.port.send(self.address, packet);
    }
}

impl Drop for MobileStation {
    fn drop(&mut self) {
        self.line.receivers.lock().remove(&self.address);
    }
}

impl MobileLine {
    fn open(line: &SerialLine) -> Result<MobileLine, OpenLineError> {
        let (port, mut packets) = SerialPort::open(line, StationRole::Mobile)?;
        let receivers: Arc<Mutex<BTreeMap<StationAddress, mpsc::Sender<Vec<u8>>>>> = Arc::default();
        let to = receivers.clone();
        let dispatcher = tokio::spawn(async move {
            while let Some(LinkPacket { address, bytes }) = packets.recv().await {
                let receiver = to.lock().get(&address).cloned();
                // Packets of other mobiles are heard as well; one that is not taken in time is lost.
                if let Some(receiver) = receiver {
                    let _ = receiver.try_send(bytes);
                }
            }
            // Every session learns that the line has ended.
            to.lock().clear();
        });
        Ok(MobileLine {
            port,
            receivers,
            dispatcher,
        })
    }
}

/// An address that no other session of this process has.
fn draw_address<T>(taken: &BTreeMap<StationAddress, T>) -> StationAddress {
    let mut bytes = [0; 2];
    // Without randomness other mobiles may have the same address, and share their turns.
    let _ = getrandom::fill(&mut bytes);
    let first = u16::from_be_bytes(bytes);
    let drawn = (0..u16::MAX).map(|n| StationAddress(first.wrapping_add(n)));
    let free = drawn
        .into_iter()
        .find(|address| !taken.contains_key(address));
    free.unwrap_or(StationAddress(first))
}

impl std::fmt::Debug for MobileStation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MobileStation({}, {:?})", self.address, self.line.port)
    }
}
