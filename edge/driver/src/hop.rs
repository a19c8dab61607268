//! Signs of links: whose carrier is lost, whose first hop is silent, whose radio counts failures.
//!
//! ```text
//!  200 ms of silence (PathQuiet) ─┐
//!  the radio's counters ──────────┴▶ ask the first hop ─▶ Session::on_link_silent
//!
//!  carrier lost, same addresses ──▶ freeze_path ── it is back within 30 s ──▶ thaw_path
//!                                              └── it is not ──▶ the link is lost like any other
//! ```
//!
//! A first hop that never answered on this attachment says nothing by its silence, so each is asked once
//! when its path comes up.

use std::sync::Arc;

use d2tp_links::{Kind, Link, Station};
use d2tp_session::{Event, FirstHop, LinkId, Session, Span, Time};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use crate::clock;
use crate::device::{Body, Known};

/// How long a link without a carrier keeps its paths: after a longer absence it will be another network.
const CARRIER_LOST_MAX: Span = Span::from_secs(30); // a guess

/// What is known of a link beside its facts.
#[derive(Debug, Default)]
pub(crate) struct KnownSigns {
    /// Its first hop answered, on this attachment.
    hop_heard: bool,
    asking: bool,
    /// What its radio had counted when it was last read; it is not asked again once it told nothing.
    station: Option<Station>,
    mute: bool,
    /// Since when it has no carrier.
    lost_at: Option<Time>,
    /// The program wants it left alone.
    pub(crate) told_still: bool,
    /// The session knows that it is to be left alone.
    still: bool,
}

impl KnownSigns {
    /// Its sockets are kept, and not used.
    pub(crate) fn is_held(&self) -> bool {
        self.lost_at.is_some() || self.told_still
    }

    /// When it is taken for lost.
    pub(crate) fn given_up_at(&self) -> Option<Time> {
        self.lost_at.map(|at| at + CARRIER_LOST_MAX)
    }

    /// Its sockets go: what comes next is another attachment.
    pub(crate) fn forget(&mut self) {
        *self = KnownSigns {
            told_still: self.told_still,
            ..KnownSigns::default()
        };
    }
}

impl Known {
    /// Whether it is the attachment that we know, though its carrier may be lost, or back.
    pub(crate) fn stays(&mut self, now: &Link) -> bool {
        let same = now.index == self.link.index
            && now.addresses == self.link.addresses
            && now.up
            && !self.ids.is_empty();
        let lost = self.signs.lost_at.is_some();
        if !same || (!lost && (now.carrier || !self.link.is_usable())) {
            return false;
        }
        if now.is_usable() {
            self.signs.lost_at = None;
        } else if now.carrier {
            return false;
        } else if !lost {
            self.signs.lost_at = Some(clock::now());
        }
        true
    }
}

/// Asks first hops when paths become quiet, and once when they come up.
pub(crate) fn watch(body: Arc<Body>) -> JoinHandle<()> {
    let mut events = body.shared.events.subscribe();
    tokio::spawn(async move {
        loop {
            let (link, quiet) = match events.recv().await {
                Ok((_, Event::PathQuiet { link, .. })) => (link, true),
                Ok((_, Event::PathUp { link, .. })) => (link, false),
                Ok(_) | Err(RecvError::Lagged(_)) => continue,
                Err(RecvError::Closed) => return,
            };
            let name = {
                let state = body.state.lock();
                let mut links = state.links.iter();
                let named = links.find(|(_, known)| known.ids.contains(&link));
                named.map(|(name, _)| name.clone())
            };
            if let Some(name) = name {
                tokio::spawn(ask_hop(body.clone(), name, quiet));
            }
        }
    })
}

/// Asks a link's first hop; where its path is quiet the session is told what came of it.
async fn ask_hop(body: Arc<Body>, name: String, quiet: bool) {
    let since = clock::now();
    let (link, heard) = {
        let mut state = body.state.lock();
        let Some(known) = state.links.get_mut(&name) else {
            return;
        };
        if known.signs.is_held() || std::mem::replace(&mut known.signs.asking, true) {
            return;
        }
        (known.link.clone(), known.signs.hop_heard)
    };
    let answer = body.signs.ask_hop(&link).await;
    let ids = {
        let mut state = body.state.lock();
        let Some(known) = state.links.get_mut(&name) else {
            return;
        };
        known.signs.asking = false;
        if known.link.index != link.index {
            return;
        }
        known.signs.hop_heard |= answer == Some(true);
        known.ids.clone()
    };
    let hop = match answer {
        Some(true) => FirstHop::Answers,
        Some(false) if heard => FirstHop::Silent,
        Some(false) | None => FirstHop::Unknown,
    };
    if quiet {
        tracing::debug!(link = name, ?hop, "asked its first hop");
        let now = clock::now();
        body.with_all(&ids, |s, id| s.on_link_silent(now, id, since, hop));
    }
}

impl Body {
    /// Does something with every session, for each of these links.
    fn with_all(&self, links: &[LinkId], mut each: impl FnMut(&mut Session, LinkId)) {
        {
            let mut inner = self.shared.inner.lock();
            for session in inner.core.ids() {
                for link in links {
                    // It was there a moment ago, and may end any time.
                    let _ = inner.core.with(session, |s| each(s, *link));
                }
            }
        }
        self.shared.wake();
    }

    /// Freezes links that are to be left alone, and thaws those that are not any more.
    pub(crate) fn hold(&self) {
        let (mut freeze, mut thaw) = (Vec::new(), Vec::new());
        for known in self.state.lock().links.values_mut() {
            let still = known.signs.is_held() && !known.ids.is_empty();
            if still != known.signs.still {
                known.signs.still = still;
                let list = if still { &mut freeze } else { &mut thaw };
                list.extend(known.ids.iter().copied());
            }
        }
        let now = clock::now();
        self.with_all(&freeze, |s, id| s.freeze_path(now, id));
        self.with_all(&thaw, |s, id| s.thaw_path(id));
        self.shared.stir();
    }

    /// Links whose carrier has been away for too long are lost.
    pub(crate) fn give_up_carriers(&self) {
        let now = clock::now();
        let lost: Vec<LinkId> = {
            let mut state = self.state.lock();
            let late = |k: &&mut Known| k.signs.given_up_at().is_some_and(|at| at <= now);
            let links = state.links.values_mut().filter(late);
            links.flat_map(Known::take_sockets).collect()
        };
        if !lost.is_empty() {
            self.drop_links(&lost);
        }
    }

    /// While payload moves, radios are read: their failures are a sign sooner than silence is.
    pub(crate) async fn read_radios(self: &Arc<Body>) {
        if !self.moves() {
            return;
        }
        let radios: Vec<Link> = {
            let state = self.state.lock();
            let used = |k: &&Known| {
                k.link.kind == Kind::Wifi
                    && !k.ids.is_empty()
                    && !k.signs.mute
                    && !k.signs.is_held()
            };
            let used = state.links.values().filter(used);
            used.map(|k| k.link.clone()).collect()
        };
        for link in radios {
            let station = self.signs.station(&link).await;
            let fails = {
                let mut state = self.state.lock();
                let Some(known) = state.links.get_mut(&link.name) else {
                    continue;
                };
                known.signs.mute = station.is_none();
                let before = std::mem::replace(&mut known.signs.station, station);
                let both = station.zip(before);
                both.is_some_and(|(now, before)| now.fails_since(&before))
            };
            if fails {
                tokio::spawn(ask_hop(self.clone(), link.name, true));
            }
        }
    }
}
