//! Probes of a link: whether its first hop answers, and what its radio counts.
//!
//! Facts about links are free and reported automatically ([`crate::LinkMonitor`]); probes are made
//! on request, when it is doubtful whether a link still carries data.

use std::pin::Pin;
use std::sync::Mutex;
use std::time::Duration;

use crate::gateway_probe::{self, GatewayTarget};
use crate::link::Link;
use crate::station::{StationReader, StationStats};

/// The future result of a probe.
pub type ProbeFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// How long a first hop may take to answer. // a guess: ten round trips of a crowded access point
pub const HOP_PATIENCE: Duration = Duration::from_millis(100);

/// Probes links by other means than their packets: the kernel's ([`KernelLinkProbe`]), or a test's.
pub trait LinkProbe: Send + Sync + 'static {
    /// Whether the first hop of the link answers within [`HOP_PATIENCE`]; `None` if it cannot be
    /// probed.
    fn probe_first_hop<'a>(&'a self, link: &'a Link) -> ProbeFuture<'a, Option<bool>>;

    /// The statistics of the link's radio, if it is Wi-Fi and reports them.
    fn station_stats<'a>(&'a self, link: &'a Link) -> ProbeFuture<'a, Option<StationStats>>;
}

/// A probe that measures nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLinkProbe;

impl LinkProbe for NoLinkProbe {
    fn probe_first_hop<'a>(&'a self, _: &'a Link) -> ProbeFuture<'a, Option<bool>> {
        Box::pin(std::future::ready(None))
    }

    fn station_stats<'a>(&'a self, _: &'a Link) -> ProbeFuture<'a, Option<StationStats>> {
        Box::pin(std::future::ready(None))
    }
}

/// Probes this machine's links: echoes to the gateway, nl80211.
#[derive(Debug, Default)]
pub struct KernelLinkProbe {
    /// The reader, which is opened at the first use.
    stations: Mutex<Option<StationReader>>,
}

impl LinkProbe for KernelLinkProbe {
    fn probe_first_hop<'a>(&'a self, link: &'a Link) -> ProbeFuture<'a, Option<bool>> {
        Box::pin(async move {
            let hop = GatewayTarget::of(link)?;
            let asked = tokio::task::spawn_blocking(move || {
                gateway_probe::probe_gateway(&hop, HOP_PATIENCE)
            });
            asked.await.ok()?
        })
    }

    fn station_stats<'a>(&'a self, link: &'a Link) -> ProbeFuture<'a, Option<StationStats>> {
        Box::pin(async move {
            let stations = {
                let mut opened = self.stations.lock().ok()?;
                opened.get_or_insert_with(StationReader::open).clone()
            };
            stations.read(link.index).await
        })
    }
}
