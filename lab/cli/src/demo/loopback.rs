//! The demonstration without namespaces: everything runs in this process, on loopback.
//!
//! ```text
//!  device (given links) ══ Loopback: wlan0, wwan0 ══ proxy ── origin      D2TP
//!  a plain GET ─────────── TcpRelays: the same ────────────── origin      TCP
//! ```
//!
//! It does not show the interaction with the kernel: interfaces, routes and their changes. The
//! links are provided to the device instead.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use cedos_lab_emu::{Loopback, LoopbackHappening, TcpRelays, WorldEvent, WorldObservations};
use cedos_lab_link::Time;
use cedos_lab_scenario::Class as ScenarioClass;
use cedos_prox::{Prox, ProxConfig};
use d2tp_driver::{
    Admission, EndpointConfig, ProvidedLink, ProvidedLinks, SecretKey, Server, ServerAddress,
    ServerOptions,
};
use d2tp_links::{CostClass, LinkKind};
use tokio::sync::{oneshot, watch};

use super::plain::PlainDownload;
use super::run::{DemoProgress, DemoSetting, DemoSetup, lock, summarise, watch as look_on};
use super::summary::DemoSummary;
use super::view::DemoView;
use cedos_agent::fetch::proxy::ProxyClient;
use cedos_agent::fetch::report::{TransferEvent, TransferObserver};
use cedos_agent::fetch::request_method::RequestMethod;
use cedos_agent::fetch::transfer::{self, Destination, TransferContext, TransferJob};
use cedos_agent::key;
use cedos_agent::terms::{DueTime, TransferTerms};
use cedos_lab_emu::origin::OriginServer;
use d2tp_driver::SchedulerHandle;
use d2tp_sched::SchedulerKind;

/// A service that runs on its own thread and runtime until it is dropped.
struct LoopbackService {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for LoopbackService {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl LoopbackService {
    /// Runs `serve` on a thread. Returns its first result once it is ready.
    fn start<T: Send + 'static>(
        name: &str,
        serve: impl FnOnce(std::sync::mpsc::Sender<anyhow::Result<T>>, oneshot::Receiver<()>)
        + Send
        + 'static,
    ) -> anyhow::Result<(T, LoopbackService)> {
        let (stop, stopped) = oneshot::channel();
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || serve(ready, stopped))?;
        let serving = LoopbackService {
            stop: Some(stop),
            thread: Some(thread),
        };
        let told = wait
            .recv()
            .with_context(|| format!("the {name} exited"))?
            .with_context(|| format!("the {name} cannot start"))?;
        Ok((told, serving))
    }
}

fn start_origin(seed: u64) -> anyhow::Result<(SocketAddr, LoopbackService)> {
    LoopbackService::start("origin", move |ready, stopped| {
        let server = OriginServer {
            plain: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))],
            seed,
            ..OriginServer::default()
        };
        let told = ready.clone();
        let served = server.run(|at| drop(told.send(Ok(at[0]))), stopped);
        if let Err(error) = served {
            let _ = ready.send(Err(error));
        }
    })
}

fn start_prox(
    folder: &Path,
    device: &SecretKey,
) -> anyhow::Result<(ServerAddress, LoopbackService)> {
    let (folder, client, key) = (folder.to_owned(), device.public(), key::generate()?);
    LoopbackService::start("proxy", move |ready, stopped| {
        let serve = async {
            let prox = Prox::new(ProxConfig {
                allow_clients: vec![client.0],
                // The origin is on loopback, like everything else here.
                allow_private: true,
                state_dir: folder,
                ..ProxConfig::default()
            })?;
            let server = Arc::new(Server::bind(ServerOptions {
                listen: (Ipv4Addr::LOCALHOST, 0).into(),
                key,
                admission: Admission::Only([client].into()),
                config: EndpointConfig::default(),
            })?);
            let _ = ready.send(Ok(ServerAddress::new(
                server.local_addr().ip().to_string(),
                server.local_addr().port(),
                server.public_key(),
            )));
            let stop = async { drop(stopped.await) };
            cedos_prox::serve(server.clone(), prox, stop).await;
            server.close().await;
            anyhow::Ok(())
        };
        if let Err(error) = on_runtime(serve).and_then(|served| served) {
            let _ = ready.send(Err(error));
        }
    })
}

fn on_runtime<T>(f: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    Ok(runtime.block_on(f))
}

/// Receives the progress of a download.
struct ProgressObserver(Arc<Mutex<DemoProgress>>);

impl TransferObserver for ProgressObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        if let Ok(event) = serde_json::to_value(event) {
            lock(&self.0).hear(event);
        }
    }
}

/// Links made of sockets, with a download on a thread.
struct LoopbackDemo {
    relay: Loopback,
    download: Option<JoinHandle<anyhow::Result<bool>>>,
    stop: watch::Sender<bool>,
}

impl DemoSetting for LoopbackDemo {
    fn now(&self) -> Time {
        self.relay.now()
    }
    fn idle(&self) {
        self.relay.idle();
    }
    fn fault(&self) -> Option<String> {
        self.relay.fault()
    }
    fn seen(&self) -> Option<WorldObservations> {
        self.relay.seen()
    }
    fn ended(&mut self) -> anyhow::Result<Option<bool>> {
        let over = self.download.take_if(|thread| thread.is_finished());
        match over.map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(outcome)) => outcome.map(Some),
            Some(Err(_)) => anyhow::bail!("the download panicked"),
        }
    }
}

impl LoopbackDemo {
    /// Stops the download, which keeps its data, and waits for that.
    fn abandon(&mut self) {
        self.stop.send_replace(true);
        if let Some(download) = self.download.take() {
            let _ = download.join();
        }
    }
}

/// Provides the links to the device.
fn give(links: &ProvidedLinks, classes: &[(String, ScenarioClass)], told: &LoopbackHappening) {
    let happening = &told.happening;
    let (Some(addresses), Some(proxy_at)) = (happening.addresses, told.proxy_at) else {
        return links.remove(&happening.link);
    };
    let (_, class) = &classes[happening.event.link];
    let (kind, class) = match class {
        ScenarioClass::Free => (LinkKind::Wifi, CostClass::Free),
        ScenarioClass::Metered => (LinkKind::Cellular, CostClass::Metered),
        ScenarioClass::Roaming => (LinkKind::Cellular, CostClass::Roaming),
    };
    let link = ProvidedLink::new(&happening.link, addresses.v4.into()).with_class(class);
    links.add(ProvidedLink { kind, ..link }.with_remote(proxy_at));
}

/// Runs the demonstration on loopback.
pub(super) fn run(matter: DemoSetup) -> anyhow::Result<DemoSummary> {
    let scenario = &matter.scenario;
    let (origin, _origin) = start_origin(scenario.seed)?;
    let device = key::generate()?;
    let (address, _prox) = start_prox(matter.folder.path(), &device)?;
    let proxy_at = SocketAddr::new(address.host.parse()?, address.port);
    let relays = Arc::new(TcpRelays::start(scenario, origin)?);
    let links = ProvidedLinks::new();

    let view = Arc::new(DemoView::new(matter.bytes, matter.deadline_s));
    let happenings: Arc<Mutex<Vec<WorldEvent>>> = Arc::default();
    let relay = {
        let (seen, shown) = (happenings.clone(), view.clone());
        let (links, relays) = (links.clone(), relays.clone());
        let classes: Vec<_> = scenario
            .links
            .iter()
            .map(|link| (link.name.clone(), link.class))
            .collect();
        Loopback::start(scenario, proxy_at, move |told| {
            use cedos_lab_scenario::EventKind::{Down, NewAddress, Up};
            if matches!(
                told.happening.event.kind,
                Up { .. } | NewAddress { .. } | Down
            ) {
                give(&links, &classes, told);
            }
            relays.happened(&told.happening);
            shown.happened(&told.happening);
            lock(&seen).push(told.happening.clone());
        })?
    };

    let told: Arc<Mutex<DemoProgress>> = Arc::default();
    let (stop, stopped) = watch::channel(false);
    let within = (matter.deadline_s - relay.now().as_secs_f64())
        .floor()
        .max(1.0);
    let flow = &scenario.flows[0];
    let job = TransferJob {
        url: format!("http://{origin}/bytes/{}", matter.bytes).parse()?,
        destination: Destination::File(matter.file.clone()),
        terms: TransferTerms {
            due: Some(DueTime::within(Duration::from_secs_f64(within))),
            policy: flow.policy.word().parse()?,
            metered_bytes_max: flow.metered_bytes_max,
            ..TransferTerms::default()
        },
        now: false,
        integrity: None,
        tries_max: 8,
        stall: Duration::from_secs(10),
        allow_downgrade: false,
        fields: [].into(),
        cookies: None,
        keep_older: 0,
        method: RequestMethod::Get,
        unless: None,
    };
    let mut telling = ProgressObserver(told.clone());
    let download = std::thread::Builder::new()
        .name("device".to_owned())
        .spawn(move || {
            on_runtime(async {
                let proxy = ProxyClient::with_provided_links(address, device, links.clone());
                let scheduler = SchedulerHandle::new(SchedulerKind::default());
                let setting = TransferContext::standalone(links.subscribe(), stopped, scheduler);
                let exit = transfer::run_proxied(&job, &proxy, setting, &mut telling).await;
                exit == cedos_agent::fetch::outcome::TransferExit::Done
            })
        })?;
    let plain = {
        let relays = relays.clone();
        PlainDownload::start_by(move || relays.way(), matter.bytes)?
    };
    let mut stage = LoopbackDemo {
        relay,
        download: Some(download),
        stop,
    };
    let run = look_on(&matter, &mut stage, &view, &told, &plain)?;
    if run.finished.is_none() {
        stage.abandon();
    }
    let happened = lock(&happenings).clone();
    summarise(&matter, &stage, run, &told, &plain, &happened)
}
