//! What can be learnt of a link beside its facts: whether its first hop answers, what its radio counts.
//!
//! Reading facts costs nothing and comes by itself ([`crate::LinkMonitor`]); these are asked for, when
//! somebody wonders whether a link still carries.

use std::pin::Pin;
use std::sync::Mutex;
use std::time::Duration;

use crate::echo::{self, Hop};
use crate::link::Link;
use crate::station::{Station, Stations};

/// An answer that takes a moment.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// How long a first hop may take to answer. // a guess: ten round trips of a crowded access point
pub const HOP_PATIENCE: Duration = Duration::from_millis(100);

/// Signs of links: the kernel's ([`KernelSigns`]), or a test's.
pub trait Signs: Send + Sync + 'static {
    /// Whether the first hop of the link answers within [`HOP_PATIENCE`]; none if there is no way to ask.
    fn ask_hop<'a>(&'a self, link: &'a Link) -> Answer<'a, Option<bool>>;

    /// What the link's radio has counted, if it is Wi-Fi and tells.
    fn station<'a>(&'a self, link: &'a Link) -> Answer<'a, Option<Station>>;
}

/// Signs of links that nothing is known of but their packets.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSigns;

impl Signs for NoSigns {
    fn ask_hop<'a>(&'a self, _: &'a Link) -> Answer<'a, Option<bool>> {
        Box::pin(std::future::ready(None))
    }

    fn station<'a>(&'a self, _: &'a Link) -> Answer<'a, Option<Station>> {
        Box::pin(std::future::ready(None))
    }
}

/// Signs of this machine's links: echoes to the gateway, nl80211.
#[derive(Debug, Default)]
pub struct KernelSigns {
    /// Opened by the first question.
    stations: Mutex<Option<Stations>>,
}

impl Signs for KernelSigns {
    fn ask_hop<'a>(&'a self, link: &'a Link) -> Answer<'a, Option<bool>> {
        Box::pin(async move {
            let hop = Hop::of(link)?;
            let asked = tokio::task::spawn_blocking(move || echo::ask(&hop, HOP_PATIENCE));
            asked.await.ok()?
        })
    }

    fn station<'a>(&'a self, link: &'a Link) -> Answer<'a, Option<Station>> {
        Box::pin(async move {
            let stations = {
                let mut opened = self.stations.lock().ok()?;
                opened.get_or_insert_with(Stations::open).clone()
            };
            stations.read(link.index).await
        })
    }
}
