//! Tries a hint: does the host at an address hold the server's key?
//!
//! ```text
//!  a session of its own, over the link of the hint ─▶ SYN ─▶ an answer that only the key's holder can give ─▶ CLOSE
//!                                                      └── none within 2 s ──▶ not the server
//! ```
//!
//! The session of the device has no part in it: who announces a server's key, which anybody knows, can take nothing from
//! the session and delay nothing. A SYN names neither the device nor an origin to who does not hold the key.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use d2tp_device::NODE_ANSWER_MAX;
use d2tp_links::Link;
use d2tp_session::{SessionEnd, SessionEvent};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::address::ServerAddress;
use crate::device::{Device, DeviceOptions, LinkUse};
use crate::local_hints::{self, HintTrial, LocalHint, LocalNetwork};

/// How long a host may take to answer. A proxy of the local network takes milliseconds.
const ANSWERS_WITHIN: Duration = Duration::from_nanos(NODE_ANSWER_MAX.as_nanos());

impl HintTrial {
    /// Asks the network of a link for the server, and tries each hint. What proves true is told to all devices.
    pub(crate) async fn ask_network(self, link: Link, network: LocalNetwork) {
        let mut hints = self.attach.local_hints(&link, self.server);
        let mut trials = JoinSet::new();
        let mut is_open = true;
        while is_open || !trials.is_empty() {
            tokio::select! {
                hint = hints.recv(), if is_open => match hint {
                    Some(hint) => {
                        let begins = local_hints::with_memory(|memory| {
                            memory.begin_trial(&network, &self.server, hint, Instant::now())
                        });
                        if begins {
                            let (trial, link) = (self.clone(), link.clone());
                            trials.spawn(async move { (hint, trial.holds_key(&link, hint.address).await) });
                        }
                    }
                    None => is_open = false,
                },
                Some(Ok((hint, is_true))) = trials.join_next() => {
                    self.end(&link, &network, hint, is_true);
                }
                // A trial that panicked.
                else => {}
            }
        }
    }

    fn end(&self, link: &Link, network: &LocalNetwork, hint: LocalHint, is_true: bool) {
        let (address, source) = (hint.address, hint.source.describe());
        local_hints::with_memory(|memory| {
            memory.end_trial(network, &self.server, address, is_true);
        });
        if is_true {
            tracing::info!(link = %link.name, %address, "the proxy is {source}");
            local_hints::notify();
        } else {
            // The hint is no fault of the user's, and may be a lie.
            tracing::info!(link = %link.name, %address, "{source}, but no host with the proxy's key answers there");
        }
    }

    /// Whether a host that holds the server's key answers at `address`, asked over `link` alone (R-NODE-7).
    async fn holds_key(&self, link: &Link, address: SocketAddr) -> bool {
        let options = DeviceOptions {
            server: ServerAddress {
                // Nothing but a SYN is sent to a host that may be anybody.
                stream: Some(0),
                ..ServerAddress::new(address.ip().to_string(), address.port(), self.server)
            },
            key: self.key.clone(),
            config: self.config.clone(),
        };
        let Ok(device) = Device::without_hints(options, self.attach.clone()).await else {
            return false;
        };
        let mut events = device.events();
        device.use_link(link, LinkUse::Free);
        let answered = async {
            loop {
                match events.recv().await {
                    Ok((_, SessionEvent::Established { .. })) => return true,
                    // Only who holds the key can refuse.
                    Ok((_, SessionEvent::Closed(end))) => {
                        return matches!(end, SessionEnd::Refused(_));
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return false,
                }
            }
        };
        let is_true = timeout(ANSWERS_WITHIN, answered).await.unwrap_or(false);
        if is_true {
            device.close().await;
        }
        is_true
    }
}
