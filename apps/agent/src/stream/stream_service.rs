//! Serves the links that `cedos url` requests, in its own process or in the agent.
//!
//! ```text
//!  StreamOrder ─▶ StreamService ─▶ links ─ local_server ─ link_catalog ─ feeds ─▶ scheduler
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{EndpointConfig, ServerList, ServerListError};
use d2tp_links::Link;
use d2tp_sched::CostPolicy;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use url::Url;

use super::feed::{StreamRules, StreamThreshold, StreamThresholds};
use super::link_catalog::{LinkCatalog, SavedLink};
use super::local_server::StreamListener;
use super::store::remove_old;
use super::stream_transport::StreamTransport;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::cookie_file::CookieFile;
use crate::fetch::direct::DirectConnector;
use crate::fetch::header::{self, HeaderField};
use crate::fetch::local_hosts::LocalHosts;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::proxy::ProxyClient;
use crate::fetch::tls::OriginTls;
use crate::fetch::transfer::redact_url;
use crate::fetch::tunnel::OriginTunnel;
use crate::key;
use d2tp_driver::SchedulerHandle;

/// A request to serve streams.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOrder {
    /// The URLs of the media: http:// or https://.
    pub urls: Vec<String>,
    /// The bit rate of the media, if the user gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
    /// The playing time in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_s: Option<f64>,
    /// The buffer level at which paying begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<StreamThreshold>,
    /// The buffer level at which paying ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<StreamThreshold>,
    /// The most bytes kept on disk.
    #[serde(default = "keep")]
    pub keep: u64,
    /// The folder of the stored objects; none is the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// The cost policy: `free-only` or `free-first`.
    #[serde(default = "free_first")]
    pub policy: String,
    /// The most bytes that metered links may carry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cell: Option<u64>,
    /// The proxy to go through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prox: Option<String>,
    /// Whether the proxy only opens a tunnel.
    #[serde(default)]
    pub sealed: bool,
    /// The path of this device's key file, if not the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// Header fields for the requests, `Name: value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<String>,
    /// A file of cookies for the requests, as curl and wget write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cookies: Option<PathBuf>,
    /// A file of trusted authorities in PEM, in addition to the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// Whether redirects from https to http are followed.
    #[serde(default)]
    pub allow_downgrade: bool,
    /// The hosts of local networks that requests may lead to, redirects included; none is any.
    #[serde(default, skip_serializing_if = "LocalHosts::is_any")]
    pub local_hosts: LocalHosts,
}

fn keep() -> u64 {
    2_000_000_000
}

fn free_first() -> String {
    CostPolicy::FreeFirst.as_str().to_owned()
}

/// A running service of streams, until [`StreamService::stop`].
pub struct StreamService {
    /// A link for players, for each URL.
    pub links: Vec<String>,
    urls: Vec<Url>,
    catalog: Arc<LinkCatalog>,
    transport: Arc<StreamTransport>,
    stop: watch::Sender<bool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    begun: BootInstant,
}

impl StreamService {
    /// Starts the local HTTP server for players. `scheduler` also decides for the device's other
    /// streams and transfers; `configure` sets how sessions send.
    ///
    /// # Errors
    /// What was asked for makes no sense, or there is no room or no port.
    pub async fn start(
        ordered: &StreamOrder,
        links: watch::Receiver<Arc<Vec<Link>>>,
        scheduler: Option<Arc<SchedulerHandle>>,
        configure: impl FnOnce(&mut EndpointConfig),
    ) -> Result<StreamService, TransferFailure> {
        let urls = ordered.urls()?;
        let rules = ordered.rules()?;
        let transport = ordered.transport(&urls, links, configure)?;
        let root = ordered.root()?;
        let storage = |error: &std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock => TransferFailure::error(
                "another cedos serves this URL with the same --store; stop it, or use its link",
            ),
            _ => TransferFailure::storage("cannot store the stream", error),
        };
        remove_old(&root);
        let (stop, told) = watch::channel(false);
        let rate = ordered.bitrate.map(|bits| bits as f64 / 8.0);
        let mut note = SavedLink::of(&root, &urls);
        let token = note.token.clone();
        let catalog = LinkCatalog::new(root.clone(), transport.clone(), rules, rate, token, told);
        let catalog = match scheduler {
            Some(scheduler) => catalog.with_scheduler(scheduler),
            None => catalog,
        };
        let catalog = Arc::new(catalog);
        let names: Result<Vec<String>, _> = urls.iter().map(|url| catalog.publish(url)).collect();
        let names = names.map_err(|error| storage(&error))?;
        let listener = StreamListener::bind(note.token.clone(), note.port)
            .await
            .map_err(|error| {
                TransferFailure::error(format!("cannot open a port on this machine: {error}"))
            })?;
        note.port = Some(listener.port());
        note.save(&root, &urls).map_err(|error| storage(&error))?;
        let base = listener.base();
        let links = names.iter().map(|name| format!("{base}/{name}")).collect();
        let tasks = vec![
            tokio::spawn(transport.clone().keep_session()),
            tokio::spawn(listener.serve(catalog.clone())),
        ];
        Ok(StreamService {
            links,
            urls,
            catalog,
            transport,
            stop,
            tasks,
            begun: BootInstant::now(),
        })
    }

    /// Each link, and its URL at the origin.
    pub fn links_json(&self) -> Vec<Value> {
        let pairs = self.urls.iter().zip(&self.links);
        let told = |(url, link)| {
            let url = redact_url(url);
            json!({"event": "link", "url": url, "link": link, "mode": self.transport.mode()})
        };
        pairs.map(told).collect()
    }

    /// The transport of the streams' requests.
    pub fn transport(&self) -> &Arc<StreamTransport> {
        &self.transport
    }

    /// The URLs of the media.
    pub fn urls(&self) -> &[Url] {
        &self.urls
    }

    /// The state of the service as JSON.
    pub fn state(&self, event: &str) -> Value {
        let now = BootInstant::now().since(self.begun);
        let titles = self.catalog.titles();
        let streams: Vec<_> = titles.iter().map(|title| {
            let view = title.view(now);
            let (pauses, paused) = title.pace(|pace| pace.stalls());
            let (rate, in_player) = title.pace(|pace| (pace.rate(now), pace.in_player()));
            json!({
                "name": title.name, "why": title.reason(), "held_bytes": title.held_bytes(),
                "ahead_bytes": view.held_bytes + in_player, "rate_bytes_per_s": rate as u64,
                "pauses": pauses, "paused_s": paused.as_secs_f64(), "is_watched": view.is_watched,
            })
        }).collect();
        json!({
            "event": event, "t_s": now.as_secs_f64(), "streams": streams,
            "bytes_by_link": self.transport.carried(), "mode": self.transport.mode(),
        })
    }

    /// Stops the service: syncs what is held, and informs the proxy. Returns the final state.
    pub async fn stop(self) -> Value {
        self.stop.send_replace(true);
        self.catalog.until_feeds_ended().await;
        let state = self.state("ended");
        self.tasks.iter().for_each(|task| task.abort());
        self.transport.close().await;
        state
    }
}

impl Drop for StreamService {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        self.tasks.iter().for_each(|task| task.abort());
    }
}

impl StreamOrder {
    /// The order with every path beginning at the root, as one that leaves this process must be.
    ///
    /// # Errors
    /// The working directory is gone, or nobody says where things are kept.
    pub fn with_absolute_paths(mut self) -> Result<StreamOrder, TransferFailure> {
        self.store = Some(self.root()?);
        let paths = [
            &mut self.store,
            &mut self.key,
            &mut self.ca,
            &mut self.cookies,
        ];
        for path in paths.into_iter().flatten() {
            *path = std::path::absolute(&*path).map_err(|error| {
                TransferFailure::error(format!("the working directory: {error}"))
            })?;
        }
        Ok(self)
    }

    fn urls(&self) -> Result<Vec<Url>, TransferFailure> {
        let parse = |text: &String| match text.parse::<Url>() {
            Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(url),
            Ok(url) => Err(TransferFailure::usage(format!(
                "{}: cannot be streamed",
                url.scheme()
            ))),
            Err(error) => Err(TransferFailure::usage(format!(
                "`{text}` is not a URL: {error}"
            ))),
        };
        if self.urls.is_empty() {
            return Err(TransferFailure::usage("name at least one URL"));
        }
        self.urls.iter().map(parse).collect()
    }

    fn fields(&self) -> Result<Vec<HeaderField>, TransferFailure> {
        let fields = self.headers.iter().map(|text| header::parse(text));
        fields
            .collect::<Result<_, _>>()
            .map_err(TransferFailure::usage)
    }

    fn cookie_file(&self) -> Result<Option<Arc<CookieFile>>, TransferFailure> {
        let read = self.cookies.as_deref().map(CookieFile::read).transpose();
        Ok(read.map_err(TransferFailure::usage)?.map(Arc::new))
    }

    /// The rules for fetching the stream's object.
    ///
    /// # Errors
    /// That makes no sense.
    pub fn rules(&self) -> Result<StreamRules, TransferFailure> {
        let (low, high) = (self.low, self.high);
        let wrong = match (low, high) {
            (Some(StreamThreshold::Bytes(low)), Some(StreamThreshold::Bytes(high))) => low > high,
            (Some(StreamThreshold::Time(low)), Some(StreamThreshold::Time(high))) => low > high,
            _ => false,
        };
        if wrong {
            return Err(TransferFailure::usage("--low is more than --high"));
        }
        let policy: CostPolicy =
            (self.policy.parse()).map_err(|error: d2tp_sched::ParsePolicyError| {
                TransferFailure::usage(error.to_string())
            })?;
        if !matches!(policy, CostPolicy::FreeOnly | CostPolicy::FreeFirst) {
            return Err(TransferFailure::usage(
                "a stream's policy is free-only or free-first",
            ));
        }
        let plays = self.duration_s.map(Duration::try_from_secs_f64).transpose();
        Ok(StreamRules {
            policy,
            thresholds: StreamThresholds { low, high },
            quota_bytes: self.keep,
            metered_bytes_max: self.max_cell,
            duration: plays
                .map_err(|_| TransferFailure::usage("duration_s is a number of seconds"))?,
            fields: self.fields()?.into(),
            cookies: self.cookie_file()?,
            allow_downgrade: self.allow_downgrade,
        })
    }

    fn root(&self) -> Result<PathBuf, TransferFailure> {
        if let Some(store) = &self.store {
            return Ok(store.clone());
        }
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let cache = set("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".cache")));
        let cache = cache.ok_or_else(|| {
            TransferFailure::usage("no place for the stream: set HOME, or give --store DIR")
        })?;
        Ok(cache.join("cedos").join("stream"))
    }

    fn transport(
        &self,
        urls: &[Url],
        links: watch::Receiver<Arc<Vec<Link>>>,
        configure: impl FnOnce(&mut EndpointConfig),
    ) -> Result<Arc<StreamTransport>, TransferFailure> {
        let secret = |url: &Url| !url.username().is_empty() || url.password().is_some();
        let secret =
            urls.iter().any(secret) || self.fields()?.iter().any(HeaderField::is_credential);
        let secret = secret || self.cookies.is_some();
        let Some(address) = self.prox.as_deref().filter(|text| !text.is_empty()) else {
            if self.sealed {
                let text = "--sealed needs a proxy: give --prox too, or leave it out";
                return Err(TransferFailure::usage(text));
            }
            let tls = OriginTls::new(self.ca.as_deref())?;
            let direct = DirectConnector::new(tls).with_local_hosts(self.local_hosts.clone());
            return Ok(StreamTransport::direct(direct, links));
        };
        let address: ServerList = address
            .parse()
            .map_err(|error: ServerListError| TransferFailure::usage(error.to_string()))?;
        let key = key::load_device_key(self.key.as_deref())
            .map_err(|error| TransferFailure::error(format!("{error:#}")))?;
        // What proves who the user is, no proxy gets to see unasked.
        let tunnel = match self.sealed || secret {
            true => Some(OriginTunnel::new(OriginTls::new(self.ca.as_deref())?)),
            false if self.ca.is_some() => {
                let text = "--ca has no effect here, because the proxy verifies the server: add \
                    --sealed, or give --ca to `cedos prox`";
                return Err(TransferFailure::usage(text));
            }
            false => None,
        };
        let proxy = ProxyClient::new(address, key, links.clone(), tunnel);
        let proxy = proxy.with_config(configure);
        Ok(StreamTransport::proxied(proxy, links))
    }
}
