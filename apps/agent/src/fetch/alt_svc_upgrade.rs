//! A direct transfer that goes over to D2TP with the origin itself on the way, once the origin says where it speaks that.
//!
//! ```text
//!  answer of the web server, with Alt-Svc ──▶ HEAD by D2TP, beside it: the same validator, the same length?
//!      its bytes come meanwhile                  │ yes
//!      the running request is left ◀─────────────┘
//!      the next one, from the byte reached, goes by D2TP ── fails ──▶ the web server again, until the end
//! ```
//!
//! Whether bytes may be joined is decided as for every request (`transfer/download/joining.rs`): the two servers need to agree on
//! the validator.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use d2tp_driver::{EndpointConfig, Qlog, SecretKey};
use d2tp_links::Link;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use url::Url;

use super::alt_svc;
use super::dial::{AnnouncedObject, ByteStream, Dial, EgressLink, FetchFault, HEAD_MAX};
use super::direct::DirectConnector;
use super::mode::FetchMode;
use super::origin::{D2tpOrigin, D2tpTarget};
use super::outcome::TransferFailure;
use super::unanswered_connects::UnansweredConnects;
use crate::key;

/// How sessions with origins are made.
pub struct AltSvcOptions {
    /// The device's key; none is that of the settings.
    pub key: Option<SecretKey>,
    /// The configuration of sessions.
    pub config: EndpointConfig,
    /// The links of this device.
    pub links: watch::Receiver<Arc<Vec<Link>>>,
    /// The log of sessions.
    pub log: Option<Arc<Qlog>>,
}

/// The server that an origin announced for an object.
#[derive(Default)]
enum AnnouncedServer {
    /// The origin announced no server for the object.
    #[default]
    Unknown,
    /// The server is being asked for the object.
    Asked,
    /// The server has the object.
    Ready(Arc<D2tpOrigin>),
    /// The server has another object or none, or a request to it failed.
    Unusable,
}

#[derive(Default)]
struct AltSvcUpgrade {
    /// The object that the state is about.
    url: Option<Url>,
    state: AnnouncedServer,
    /// Whether the last request went to the announced server.
    is_taken: bool,
    probe: Option<AbortHandle>,
}

/// Opens TCP connections to origins, and D2TP flows to those that announced it while an object came from them.
pub struct UpgradingConnector {
    direct: DirectConnector,
    options: Option<AltSvcOptions>,
    upgrade: Arc<Mutex<AltSvcUpgrade>>,
}

impl UpgradingConnector {
    /// Creates a connector. Without options it stays with TCP.
    pub fn new(direct: DirectConnector, options: Option<AltSvcOptions>) -> UpgradingConnector {
        UpgradingConnector {
            direct,
            options,
            upgrade: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, AltSvcUpgrade> {
        lock(&self.upgrade)
    }

    /// The announced server, if it has this object.
    fn ready_for(&self, url: &Url) -> Option<Arc<D2tpOrigin>> {
        let upgrade = self.lock();
        match &upgrade.state {
            AnnouncedServer::Ready(origin) if upgrade.url.as_ref() == Some(url) => {
                Some(origin.clone())
            }
            _ => None,
        }
    }

    /// The announced server, if the last request went there.
    fn taken(&self) -> Option<Arc<D2tpOrigin>> {
        let upgrade = self.lock();
        match &upgrade.state {
            AnnouncedServer::Ready(origin) if upgrade.is_taken => Some(origin.clone()),
            _ => None,
        }
    }
}

fn lock(upgrade: &Mutex<AltSvcUpgrade>) -> MutexGuard<'_, AltSvcUpgrade> {
    upgrade.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the announced server for the object.
async fn probe(
    origin: Arc<D2tpOrigin>,
    object: AnnouncedObject,
    upgrade: Arc<Mutex<AltSvcUpgrade>>,
) {
    let head = origin.head(&object.url).await;
    if head.is_none() {
        alt_svc::forget_server(&object.url);
    }
    let is_same = head.is_some_and(|head| {
        let length = head.part.object_length();
        head.validator.is_some() && head.validator == object.validator && length == object.length
    });
    let mut upgrade = lock(&upgrade);
    if upgrade.url.as_ref() == Some(&object.url) {
        upgrade.state = match is_same {
            true => AnnouncedServer::Ready(origin),
            false => AnnouncedServer::Unusable,
        };
    }
}

impl Drop for UpgradingConnector {
    fn drop(&mut self) {
        if let Some(probe) = self.lock().probe.take() {
            probe.abort();
        }
    }
}

impl Dial for UpgradingConnector {
    async fn dial(&self, url: &Url, via: &EgressLink) -> Result<Box<dyn ByteStream>, FetchFault> {
        let origin = self.ready_for(url);
        self.lock().is_taken = origin.is_some();
        match origin {
            Some(origin) => origin.dial(url, via).await,
            None => self.direct.dial(url, via).await,
        }
    }

    fn mode(&self) -> FetchMode {
        FetchMode::Direct
    }

    fn answering_proxy(&self) -> Option<String> {
        self.taken()?.answering_proxy()
    }

    fn session_failure(&self) -> Option<TransferFailure> {
        self.taken()?.session_failure()
    }

    fn session_end_text(&self) -> Option<String> {
        self.taken()?.session_end_text()
    }

    fn unanswered_connects(&self) -> Option<&UnansweredConnects> {
        self.direct.unanswered_connects()
    }

    fn survives_link_loss(&self) -> bool {
        self.taken().is_some()
    }

    fn answers_within(&self) -> Duration {
        // There is another server to ask.
        HEAD_MAX
    }

    fn on_announcement(&self, object: AnnouncedObject) {
        let Some(options) = self.options.as_ref().filter(|_| object.validator.is_some()) else {
            return;
        };
        let mut upgrade = self.lock();
        let is_known = upgrade.url.as_ref() == Some(&object.url);
        if is_known && !matches!(upgrade.state, AnnouncedServer::Unknown) {
            return;
        }
        let Some(server) = alt_svc::known_server(&object.url, None) else {
            return;
        };
        let key = (options.key.clone()).or_else(|| key::load_device_key(None).ok());
        let Some(key) = key else {
            return;
        };
        let (config, links) = (options.config.clone(), options.links.clone());
        let whom = D2tpTarget::Address(server);
        let origin = D2tpOrigin::new(whom, None, key, config, links, options.log.clone());
        (upgrade.url, upgrade.state) = (Some(object.url.clone()), AnnouncedServer::Asked);
        let probe = tokio::spawn(probe(Arc::new(origin), object, self.upgrade.clone()));
        let before = upgrade.probe.replace(probe.abort_handle());
        if let Some(before) = before {
            before.abort();
        }
    }

    fn has_better_way(&self, url: &Url) -> bool {
        self.ready_for(url).is_some() && !self.lock().is_taken
    }

    fn goes_better_way(&self) -> bool {
        self.taken().is_some()
    }

    fn leave_better_way(&self) {
        let mut upgrade = self.lock();
        if upgrade.is_taken {
            (upgrade.state, upgrade.is_taken) = (AnnouncedServer::Unusable, false);
            if let Some(url) = &upgrade.url {
                alt_svc::forget_server(url);
            }
        }
    }
}
