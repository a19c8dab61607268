//! Carrying an order out: who speaks to the origin, with what keys and trust, and the transfer.
//!
//! ```text
//!  Order ─▶ Errand::prepare  everything that can be wrong with it is said here, nothing is started
//!              └▶ Errand::way ─ Straight │ EndToEnd │ Proxied ─▶ Way::run ─▶ Exit
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use d2tp_driver::{AckOffload, AddressError, EndpointConfig, Qlog, SecretKey, ServerAddress};
use d2tp_links::Link;
use d2tp_sched::CostPolicy;
use d2tp_session::DrwaLambda;
use tokio::sync::watch;
use url::Url;

use crate::fetch::alternative;
use crate::fetch::dial::Dial as _;
use crate::fetch::direct::Direct;
use crate::fetch::header::Field;
use crate::fetch::jobs;
use crate::fetch::mode::Mode;
use crate::fetch::origin::{Origin, Whom};
use crate::fetch::outcome::{Exit, Failure};
use crate::fetch::parcel::Parcel;
use crate::fetch::proxy::Proxy;
use crate::fetch::report::Observer;
use crate::fetch::tls::Tls;
use crate::fetch::transfer::{self, Job, Setting};
use crate::fetch::tunnel::Tunnel;
use crate::key;
use crate::order::{Order, Verb};

/// How sessions are to send, beside what the order says.
#[derive(Default)]
pub struct Tuning {
    /// The configuration of sessions.
    pub config: EndpointConfig,
    /// Acknowledgements of Wi-Fi on other links.
    pub offload_acks: AckOffload,
    /// Keep queues short.
    pub drwa: Option<DrwaLambda>,
    /// What sessions do is written here.
    pub log: Option<Arc<Qlog>>,
}

/// What a way is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To carry the order out.
    Carry,
    /// To look what carrying it out would be.
    Look,
    /// To give up what was begun.
    Forget,
}

/// What an upload sends, and how.
#[derive(Clone)]
struct Sent {
    file: PathBuf,
    post: bool,
    kind: Option<String>,
    token: Option<String>,
}

/// An order that makes sense.
pub struct Errand {
    /// The job.
    pub job: Job,
    verb: Verb,
    whom: Option<Whom>,
    mode: Mode,
    tls: Option<Tls>,
    key: Option<SecretKey>,
    proxy: Option<ServerAddress>,
    /// What an upload sends.
    parcel: Option<Sent>,
    /// It may go to the same origin by D2TP, if that speaks it.
    may_go_end_to_end: bool,
}

impl Errand {
    /// Says what is wrong with an order, if anything is. `paid_asked`: the user spoke of links that
    /// cost.
    ///
    /// # Errors
    /// Whose fault it is, in words.
    pub fn prepare(order: &Order, mut job: Job, paid_asked: bool) -> Result<Errand, Failure> {
        let proxy = match order.prox.as_deref().filter(|text| !text.is_empty()) {
            Some(text) => {
                let read = text.parse::<ServerAddress>();
                Some(read.map_err(|e: AddressError| Failure::usage(e.to_string()))?)
            }
            None => None,
        };
        if order.verb == Verb::Put {
            return Errand::prepare_upload(order, job, proxy);
        }
        let plain = may_go_end_to_end(order, &job);
        let whom = end_to_end(order, &mut job, paid_asked)?;
        let mode = match whom {
            Some(_) => Mode::Direct,
            None => mode(order, &job, proxy.is_some())?,
        };
        let tls = match mode {
            Mode::Direct | Mode::Sealed if whom.is_none() => Some(Tls::new(order.ca.as_deref())?),
            _ => None,
        };
        let key = match (&proxy, &whom) {
            (Some(_), _) | (_, Some(_)) => Some(own_key(order)?),
            (None, None) => None,
        };
        Ok(Errand {
            job,
            verb: Verb::Get,
            whom,
            mode,
            tls,
            key,
            proxy,
            parcel: None,
            may_go_end_to_end: plain,
        })
    }

    fn prepare_upload(
        order: &Order,
        job: Job,
        proxy: Option<ServerAddress>,
    ) -> Result<Errand, Failure> {
        if !matches!(job.url.scheme(), "http" | "https") || !job.url.has_host() {
            let text = format!("{} is not an http:// or https:// URL", job.url);
            return Err(Failure::usage(text));
        }
        if has_password(&job.url) {
            let text = "the URL carries credentials, which the proxy would see";
            return Err(Failure::usage(text));
        }
        if proxy.is_none() {
            let text = "uploads go through a proxy: give --prox ADDR or CEDOS_PROX";
            return Err(Failure::usage(text));
        }
        let Some(file) = order.file.clone() else {
            return Err(Failure::usage("an upload needs a file"));
        };
        Ok(Errand {
            job,
            verb: Verb::Put,
            whom: None,
            mode: Mode::ProxyFetch,
            tls: None,
            key: Some(own_key(order)?),
            proxy,
            parcel: Some(Sent {
                file,
                post: order.post,
                kind: order.content_type.clone(),
                token: order.token.clone(),
            }),
            may_go_end_to_end: false,
        })
    }

    /// Who speaks to the origin.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether it can be carried out by somebody else than this process.
    pub fn is_of_the_web(&self) -> bool {
        self.whom.is_none()
    }

    /// Makes what moves its requests.
    pub async fn way(
        &mut self,
        links: &watch::Receiver<Arc<Vec<Link>>>,
        tuning: &Tuning,
        purpose: Purpose,
    ) -> Way {
        let origin = |whom, key| {
            let (proxy, links, log) = (self.proxy.clone(), links.clone(), tuning.log.clone());
            Origin::new(whom, proxy, key, tuning.config.clone(), links, log)
        };
        let end_to_end = match (self.whom.clone(), &self.key) {
            (Some(whom), Some(key)) => Some(origin(whom, key.clone())),
            (None, _) if self.may_go_end_to_end && purpose == Purpose::Carry => {
                self.alternative(links, origin).await
            }
            _ => None,
        };
        let tls = self.tls.take();
        match (end_to_end, self.proxy.clone(), self.key.clone(), tls) {
            (Some(origin), ..) => Way::EndToEnd(Box::new(origin)),
            (None, Some(address), Some(key), tls) => {
                let tunnel = tls.map(Tunnel::new);
                let mut proxy =
                    Proxy::new(address, key, links.clone(), tunnel).configured(|config| {
                        *config = tuning.config.clone();
                        config.ack_offload = tuning.offload_acks;
                        config.drwa = tuning.drwa;
                    });
                if let Some(log) = &tuning.log {
                    proxy.log_to(log.clone());
                }
                if self.verb == Verb::Put {
                    return Way::Proxied(Box::new(proxy.sending()));
                }
                // Only a flow of which the proxy knows what it carries goes on in another process.
                let lasts = match purpose {
                    Purpose::Forget => true,
                    Purpose::Carry => self.mode == Mode::ProxyFetch,
                    Purpose::Look => false,
                };
                if let Some(directory) = jobs::state().ok().filter(|_| lasts) {
                    proxy = proxy.keep_in(directory.join("instances"));
                }
                Way::Proxied(Box::new(proxy))
            }
            (None, _, _, Some(tls)) => Way::Straight(Direct::new(tls).holding(tuning.drwa)),
            (None, _, _, None) => unreachable!("a download without a proxy has its own trust"),
        }
    }

    /// The origin by D2TP, if it said before that it speaks it and is there now.
    async fn alternative(
        &self,
        links: &watch::Receiver<Arc<Vec<Link>>>,
        origin: impl Fn(Whom, SecretKey) -> Origin,
    ) -> Option<Origin> {
        let proxy = self.proxy.as_ref().map(ToString::to_string);
        let address = alternative::known(&self.job.url, proxy.as_deref())?;
        let key = match &self.key {
            Some(key) => key.clone(),
            None => key::of_device(None).ok()?,
        };
        let origin = origin(Whom::At(address), key);
        // Without a network nobody is there, which says nothing of the origin.
        let may_ask = origin.needs_no_link() || links.borrow().iter().any(Link::is_usable);
        (may_ask && alternative::answers(&origin, &self.job.url).await).then_some(origin)
    }

    /// Reads what an upload sends, telling how far that is.
    ///
    /// # Errors
    /// The file cannot be read, or it was stopped.
    pub async fn pack(
        &self,
        stop: watch::Receiver<bool>,
        mut read: impl FnMut(u64, u64) + Send + 'static,
    ) -> Result<Option<Parcel>, Failure> {
        let Some(sent) = self.parcel.clone() else {
            return Ok(None);
        };
        let url = self.job.url.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let stopped = || *stop.borrow();
            let (file, kind) = (&sent.file, sent.kind.as_deref());
            Parcel::open(file, &url, sent.post, kind, sent.token, stopped, &mut read)
        });
        reading.await.expect("reading does not panic").map(Some)
    }
}

/// What moves the requests of an errand.
pub enum Way {
    /// TCP and TLS, over one link at a time.
    Straight(Direct),
    /// A session with the origin itself.
    EndToEnd(Box<Origin>),
    /// A session with a proxy.
    Proxied(Box<Proxy>),
}

impl Way {
    /// The proxy, if there is one.
    pub fn proxy(&self) -> Option<&Proxy> {
        match self {
            Way::Straight(_) | Way::EndToEnd(_) => None,
            Way::Proxied(proxy) => Some(proxy),
        }
    }

    /// Runs the job to its end. `parcel`: what it sends, if it does.
    pub async fn run(
        &self,
        job: &Job,
        parcel: Option<Parcel>,
        setting: Setting,
        observer: &mut dyn Observer,
    ) -> Exit {
        match (self, parcel) {
            (Way::Straight(dial), _) => transfer::run(job, dial, setting, observer).await,
            (Way::EndToEnd(dial), _) => transfer::run(job, &**dial, setting, observer).await,
            (Way::Proxied(proxy), None) => {
                transfer::run_proxied(job, proxy, setting, observer).await
            }
            (Way::Proxied(proxy), Some(parcel)) => {
                transfer::run_upload(job, parcel, proxy, setting, observer).await
            }
        }
    }
}

fn own_key(order: &Order) -> Result<SecretKey, Failure> {
    key::of_device(order.key.as_deref()).map_err(|error| Failure::error(format!("{error:#}")))
}

fn has_password(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

/// Whether the request carries what proves who the user is.
pub fn carries_credentials(job: &Job) -> bool {
    has_password(&job.url) || job.fields.iter().any(Field::is_credential)
}

/// Whom a `d2tp:` URL names. The job then asks them, and spends nothing: these sessions use free links.
fn end_to_end(order: &Order, job: &mut Job, paid_asked: bool) -> Result<Option<Whom>, Failure> {
    if job.url.scheme() != "d2tp" {
        return Ok(None);
    }
    let (whom, url) =
        Whom::of(&job.url).map_err(|why| Failure::usage(format!("{}: {why}", job.url)))?;
    if order.sealed || order.ca.is_some() {
        let text = "d2tp:// is end to end in any case, and proved by the key in it";
        return Err(Failure::usage(format!(
            "{text}: leave out --sealed and --ca"
        )));
    }
    if paid_asked {
        let text = "d2tp:// goes over free links only: leave out --policy and --max-cell";
        return Err(Failure::usage(text));
    }
    job.url = url;
    job.terms.policy = CostPolicy::FreeOnly;
    Ok(Some(whom))
}

/// Whether a web download may go to the same origin by D2TP, if that speaks it: over free links only,
/// with nothing that is to be seen by whom it was meant for alone.
fn may_go_end_to_end(order: &Order, job: &Job) -> bool {
    job.terms.policy == CostPolicy::FreeOnly && !carries_credentials(job) && !order.sealed
}

/// Who speaks to the origin. What proves who the user is, no proxy gets to see unasked.
fn mode(order: &Order, job: &Job, through_proxy: bool) -> Result<Mode, Failure> {
    let refuse = |text: &str| Err(Failure::usage(text));
    if !through_proxy {
        return match order.sealed {
            true => refuse("--sealed is a way of using a proxy: give --prox too, or leave it out"),
            false => Ok(Mode::Direct),
        };
    }
    if order.sealed || carries_credentials(job) {
        return Ok(Mode::Sealed);
    }
    if order.ca.is_some() {
        return refuse(
            "--ca is for downloads whose origin this device verifies: add --sealed, or give --ca \
             to `cedos prox`, which verifies it otherwise",
        );
    }
    Ok(Mode::ProxyFetch)
}
