//! The session with D2Prox that all connections of the local proxy share, and how each is opened in it.
//!
//! It begins with the first connection, or on request, and lasts as long as the local proxy: an
//! idle session costs nothing. Without a network a connection waits for one, as long as the program
//! does.

mod carrier_notices;
mod connect_wait;
mod packet_tunnel;
mod proxy_connection;
mod session_flows;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use d2tp_driver::{
    CarriedByLink, DriverError, EndpointConfig, Flow, FlowEnd, FlowSettings, LinkStatus, LinkUse,
    ReasonCode, SchedulerHandle, SecretKey, ServerList, SessionEvent,
};
use d2tp_links::{CostClass, Link};
use d2tp_sched::{CostPolicy, Grant, SchedulerKind};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::carrier_notices::CarrierNotices;
pub use self::connect_wait::{ANSWER_LIMIT, SESSION_CONNECTIONS_MAX};
pub use self::packet_tunnel::{MeteredPackets, PacketTunnel};
pub use self::proxy_connection::ProxyConnection;
use self::session_flows::{ConnGroup, ConnLengths, ConnTraffic, SessionFlows, SteeredFlow, lock};
pub use self::session_flows::{LinkPayload, RuleTraffic};
use super::agent_scheduler::AgentSchedulerFinder;
use super::conn_options::ConnOptions;
use super::optimistic_connect::OptimisticConnect;
use super::refusal::{ConnectRefusal, RefusalCause};
use super::target::TargetAddress;
use crate::fetch::dial::FetchFault;
use crate::fetch::proxy::{FlowLoss, FlowOpenError, ProxyClient};
use crate::fetch::tunnel;

/// The delay before a session that ended is opened again.
const CALL_AGAIN: Duration = Duration::from_secs(1); // a guess

/// The interval of decisions while metered links are up and data moves.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The interval of checks whether a session has ended, in case its last event is lost.
const ENDED_EVERY: Duration = Duration::from_secs(60); // a guess

/// How long a proxy may be silent, while there is a network, before it is reported as not answering.
const UNANSWERED_AFTER: Duration = Duration::from_secs(4); // five handshake tries on a fast link

/// The interval at which a proxy is checked for silence, where there are several.
const SILENCE_CHECK: Duration = Duration::from_millis(500);

/// How long a proxy with open connections may be silent, although a network is up and another proxy answers, before the
/// session moves there: its connections end with it. Lower: a restart of the proxy ends them. Higher: a person waits.
const SILENT_WITH_CONNECTIONS_MAX: Duration = Duration::from_secs(30); // as `ANSWER_LIMIT`

/// The priority of connections: behind the flow of a packet tunnel, whose packets are calls and queries of names. A connection
/// fills 32 packets before the next flow has its turn, for which a call would wait.
const CONNECTION_PRIORITY: u8 = 1; // as on links without grants, where datagrams leave before payload

/// How long closing waits for connections to send their rest.
const LAST_WORDS: Duration = Duration::from_secs(5); // as `exit` in docs/sockets.md

/// How long to wait for the first answer of a proxy before connections are refused.
const FIRST_WORD: Duration = Duration::from_millis(2_500); // three handshake tries: at 0, 0.6 and 1.8 s

/// A flow among those of the session.
struct EnteredFlow {
    number: u64,
    /// What the flow carries.
    moved: Arc<ConnTraffic>,
    /// What all flows with the same options carry.
    moved_together: Arc<ConnTraffic>,
    lengths: Arc<ConnLengths>,
}

/// The state of the session.
#[derive(Debug, Clone, Default)]
struct ProxySessionState {
    up: bool,
    /// The number of failed attempts; `text` has the reason of the last one.
    failures: u64,
    text: String,
    /// Why the proxy never admits this device, if it said so last.
    refused: Option<String>,
}

/// The budget that connections share with whatever else the device carries.
pub trait SpendingBudget: Send + Sync {
    /// The device's scheduler, which schedules connections too.
    fn scheduler(&self) -> &Arc<SchedulerHandle>;

    /// Charges what links carried since the last call.
    fn record_spent(&self, more: &[LinkPayload]);

    /// Bytes that metered links may still carry, and changes of that; none is no limit.
    fn watch_left(&self) -> watch::Receiver<Option<u64>>;
}

/// The peer of a proxy session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxySessionPeer {
    /// D2Prox, which connects to each target.
    Prox,
    /// A server for which every flow is a connection to itself, whatever the target.
    Server,
    /// No peer was configured: connections are refused.
    Unconfigured,
}

/// The session with D2Prox, and the connections in it.
pub struct ProxySession {
    far: ProxySessionPeer,
    proxy: ProxyClient,
    links: watch::Receiver<Arc<Vec<Link>>>,
    /// Since when a session is wanted.
    wanted: watch::Sender<Option<Instant>>,
    /// Whether the proxy has answered at least once.
    answered: watch::Sender<bool>,
    state: watch::Sender<ProxySessionState>,
    flows: Mutex<SessionFlows>,
    /// Notified when a flow or a path begins or ends.
    stirred: Notify,
    left: Notify,
    budget: Mutex<Option<Arc<dyn SpendingBudget>>>,
    /// The path of the agent's socket, if the agent may decide.
    agent_socket: Mutex<Option<PathBuf>>,
    /// Bytes that metered links may still carry, as the agent reported last.
    agent_left: Mutex<Option<u64>>,
    /// Permits: one for each connection that the session may carry.
    places: Arc<Semaphore>,
    /// Whether a message has said that connections wait for a place.
    reported_full: AtomicBool,
    /// How long connections wait for a proxy that is silent although there is a network.
    answer_limit: Mutex<Option<Duration>>,
    /// Whether changes of the networks that carry connections are reported.
    reports_carriers: AtomicBool,
    /// Whether failures of the session are reported when they occur.
    reports_failures: AtomicBool,
    /// Connections that ended because D2Prox no longer knew them.
    lost: AtomicU64,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl ProxySession {
    /// Creates a session to this proxy, over these links. Must be called on a runtime; nothing is
    /// sent yet.
    pub fn new(
        far: ProxySessionPeer,
        servers: impl Into<ServerList>,
        key: SecretKey,
        links: watch::Receiver<Arc<Vec<Link>>>,
        set: impl FnOnce(&mut EndpointConfig),
    ) -> Arc<ProxySession> {
        let proxy = ProxyClient::new(servers, key, links.clone(), None).with_config(set);
        let line = Arc::new(ProxySession {
            far,
            proxy,
            links,
            wanted: watch::Sender::default(),
            answered: watch::Sender::default(),
            state: watch::Sender::default(),
            flows: Mutex::default(),
            stirred: Notify::new(),
            left: Notify::new(),
            budget: Mutex::default(),
            agent_socket: Mutex::default(),
            agent_left: Mutex::default(),
            places: Arc::new(Semaphore::new(SESSION_CONNECTIONS_MAX)),
            reported_full: AtomicBool::new(false),
            answer_limit: Mutex::new(Some(ANSWER_LIMIT)),
            reports_carriers: AtomicBool::new(false),
            reports_failures: AtomicBool::new(true),
            lost: AtomicU64::new(0),
            tasks: Mutex::default(),
        });
        let tasks = [
            tokio::spawn(line.clone().keep()),
            tokio::spawn(line.clone().steer()),
        ];
        lock(&line.tasks).extend(tasks);
        line
    }

    /// Sets the budget of metered bytes.
    pub fn set_budget(&self, budget: Arc<dyn SpendingBudget>) {
        *lock(&self.budget) = Some(budget);
    }

    /// Lets the agent with this socket decide whenever it runs: its budget is the device's.
    pub fn set_agent(&self, socket: PathBuf) {
        *lock(&self.agent_socket) = Some(socket);
    }

    /// Opens the session before there is a connection.
    pub fn connect(&self) {
        self.wanted.send_if_modified(|since| {
            let is_new = since.is_none();
            since.get_or_insert_with(Instant::now);
            is_new
        });
    }

    /// Reports in the log which networks carry connections, whenever that changes.
    pub fn report_carriers(&self) {
        self.reports_carriers.store(true, Relaxed);
    }

    /// Sets whether failures of the session are reported when they occur, and not only to those who wait for it.
    pub fn set_reports_failures(&self, reports: bool) {
        self.reports_failures.store(reports, Relaxed);
    }

    /// Connections that ended because the proxy was started again, or forgot them.
    pub fn lost_connections(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Tries to make a connection to `target`.
    async fn try_open(
        self: &Arc<ProxySession>,
        target: &TargetAddress,
        conn_options: ConnOptions,
    ) -> Result<ProxyConnection, ConnectRefusal> {
        let mut open = self.begin(target, conn_options).await?;
        if self.far == ProxySessionPeer::Prox {
            let answered = tunnel::read_response(&mut open.io).await;
            self.check_answer(answered, &open.flow)?;
        }
        open.lengths.on_made();
        Ok(open)
    }

    /// Opens a connection to `target` and sends what is written before it is made: for who has
    /// nothing to lose by that.
    ///
    /// # Errors
    /// There is no session to ask in.
    pub async fn open_optimistically(
        self: &Arc<ProxySession>,
        target: &TargetAddress,
        conn_options: ConnOptions,
    ) -> Result<OptimisticConnect, ConnectRefusal> {
        if self.proxy.has_alternatives() {
            // What was sent to a proxy that falls silent could not be sent to another one.
            let open = self.open(target, conn_options).await?;
            return Ok(OptimisticConnect::made(open));
        }
        let open = self.within_limit(self.begin(target, conn_options));
        let open = open.await?;
        let (line, flow) = (self.clone(), open.flow.clone());
        let lengths = open.lengths.clone();
        Ok(OptimisticConnect::new(open, |mut read| {
            Box::pin(async move {
                if line.far == ProxySessionPeer::Prox {
                    let answer = async {
                        let answered = tunnel::read_response(&mut read).await;
                        line.check_answer(answered, &flow)
                    };
                    line.within_limit(answer).await?;
                }
                lengths.on_made();
                Ok(read)
            })
        }))
    }

    /// Opens a flow that asks D2Prox for `target`.
    async fn begin(
        self: &Arc<ProxySession>,
        target: &TargetAddress,
        conn_options: ConnOptions,
    ) -> Result<ProxyConnection, ConnectRefusal> {
        let within = conn_options.due.map(|due| due.time_left());
        if within == Some(Duration::ZERO) {
            return Err(late());
        }
        if self.far == ProxySessionPeer::Unconfigured {
            let text = "no proxy for outgoing connections: give --prox d2tp://host:port/KEY, or \
                set CEDOS_PROX";
            return Err(ConnectRefusal::new(RefusalCause::NoProxy, text));
        }
        self.check_budget()?;
        let place = self.room().await?;
        self.session().await?;
        let settings = FlowSettings {
            // It may have waited.
            within: conn_options.due.map(|due| due.time_left()),
            reachable: true,
            priority: CONNECTION_PRIORITY,
            ..FlowSettings::default()
        };
        let mut begun = None;
        let io = self.proxy.open_parallel_with(settings, |_, flow| {
            let entered = self.enter(flow.clone(), conn_options);
            begun = Some((entered, flow.clone()));
        });
        let io = io.map_err(|error| {
            match (&error, self.proxy.flow_loss()) {
                (FlowOpenError::Driver(DriverError::Flow(_)), _) => {
                    ConnectRefusal::new(RefusalCause::Full, error.to_string())
                }
                // The session has ended a moment ago: why, and what to do.
                (_, Err(failure)) => ConnectRefusal::new(RefusalCause::NoProxy, failure.text),
                _ => ConnectRefusal::new(RefusalCause::NoProxy, error.to_string()),
            }
        })?;
        let (entered, flow) = begun.expect("steered when it was opened");
        let mut open = ProxyConnection {
            io,
            flow,
            number: entered.number,
            moved: entered.moved,
            moved_together: entered.moved_together,
            lengths: entered.lengths,
            target: target.clone(),
            line: self.clone(),
            _place: place,
        };
        self.stirred.notify_one();
        if self.far == ProxySessionPeer::Prox {
            let said = tunnel::write_connect(&mut open.io, &target.authority()).await;
            self.check_answer(said.map(|()| None), &open.flow)?;
        }
        Ok(open)
    }

    /// Handles the answer to a request.
    fn check_answer(
        &self,
        answered: Result<Option<tunnel::TunnelRefusal>, FetchFault>,
        flow: &Mutex<Flow>,
    ) -> Result<(), ConnectRefusal> {
        match answered {
            Ok(None) => Ok(()),
            Ok(Some(refused)) => Err(ConnectRefusal::from_proxy(&refused)),
            Err(_) if lock(flow).end() == Some(FlowEnd::DeadlinePassed) => Err(late()),
            Err(_) if lock(flow).end() == Some(FlowEnd::Refused(ReasonCode::LimitReached)) => {
                let text = FlowEnd::Refused(ReasonCode::LimitReached).to_string();
                Err(ConnectRefusal::new(RefusalCause::Full, text))
            }
            Err(fault) => {
                let text = match self.proxy.flow_loss() {
                    Err(failure) => failure.text,
                    Ok(Some(FlowLoss::Session(text))) => text,
                    Ok(_) => words(fault),
                };
                Err(ConnectRefusal::new(RefusalCause::NoProxy, text))
            }
        }
    }

    /// Why the proxy never admits this device, if it said so last, and what to do.
    pub fn proxy_refusal(&self) -> Option<String> {
        let refused = self.state.borrow().refused.clone();
        // The session may have ended a moment ago.
        refused.or_else(|| Some(self.proxy.flow_loss().err()?.text))
    }

    /// Waits until there is a session.
    async fn session(&self) -> Result<(), ConnectRefusal> {
        self.connect();
        let mut state = self.state.subscribe();
        let failures = state.borrow().failures;
        let there = state.wait_for(|s| s.up || s.failures > failures).await;
        match there.map(|s| s.clone()) {
            Ok(ProxySessionState { up: true, .. }) => Ok(()),
            Ok(ProxySessionState { text, .. }) => {
                Err(ConnectRefusal::new(RefusalCause::NoProxy, text))
            }
            Err(_) => Err(ConnectRefusal::new(
                RefusalCause::NoProxy,
                "the local proxy is stopping",
            )),
        }
    }

    /// Keeps a session open from the first request for one.
    async fn keep(self: Arc<ProxySession>) {
        let mut wanted = self.wanted.subscribe();
        let _ = wanted.wait_for(Option::is_some).await;
        loop {
            match self.proxy.connect().await {
                Ok(Some(mut events)) => {
                    self.state.send_modify(|state| state.up = true);
                    let (mut answered, mut patience) = (false, UNANSWERED_AFTER);
                    let mut has_moved = false;
                    let mut left_silent = pin!(self.silent_proxy_left());
                    while self.proxy.device().is_some_and(|d| d.ended().is_none()) {
                        let event = tokio::select! {
                            event = timeout(patience, events.recv()) => event,
                            moved = &mut left_silent => {
                                tracing::warn!("{moved}");
                                has_moved = true;
                                break;
                            }
                        };
                        match event {
                            Ok(None | Some(SessionEvent::Closed(_))) => break,
                            Ok(Some(event)) => {
                                if matches!(event, SessionEvent::PathUp { .. }) {
                                    self.state.send_modify(|state| state.refused = None);
                                    (answered, patience) = (true, ENDED_EVERY);
                                    self.answered.send_replace(true);
                                }
                                if matches!(
                                    event,
                                    SessionEvent::PathUp { .. }
                                        | SessionEvent::PathSilent { .. }
                                        | SessionEvent::PathDown { .. }
                                ) {
                                    self.stirred.notify_one();
                                }
                            }
                            Err(_) if !answered && self.is_online() => {
                                tracing::warn!("{}", self.why_unanswered());
                                patience = ENDED_EVERY;
                            }
                            Err(_) => {}
                        }
                    }
                    let failed = self.proxy.flow_loss().err().map(|failure| failure.text);
                    if let Some(text) = &failed {
                        let refused = Some(text.clone());
                        self.state.send_modify(|state| state.refused = refused);
                    }
                    self.proxy.drop_session();
                    self.fell(failed);
                    if has_moved {
                        continue;
                    }
                }
                Ok(None) => self.proxy.drop_session(),
                // Without a network a name cannot be looked up, and the wait is for the network.
                Err(error) => {
                    self.fell(self.is_online().then(|| error.to_string()));
                }
            }
            sleep(CALL_AGAIN).await;
            self.proxy.select_anew();
        }
    }

    /// Completes when the session has moved from a silent proxy to another of the list, with what happened.
    async fn silent_proxy_left(&self) -> String {
        if !self.proxy.has_alternatives() {
            return std::future::pending().await;
        }
        let mut silent_since = None;
        loop {
            sleep(SILENCE_CHECK).await;
            if self.proxy.has_answering_path() || !self.is_online() {
                silent_since = None;
                continue;
            }
            let silence = silent_since.get_or_insert_with(Instant::now).elapsed();
            let silent_max = match lock(&self.flows).has_made_connections() {
                true => SILENT_WITH_CONNECTIONS_MAX,
                // Nothing is lost.
                false => Duration::ZERO,
            };
            if silence >= silent_max
                && let Some(moved) = self.proxy.leave_silent_proxy()
            {
                return moved;
            }
        }
    }

    fn is_online(&self) -> bool {
        self.proxy.needs_no_link() || self.links.borrow().iter().any(Link::is_usable)
    }

    /// What the user can do about a proxy that has never answered.
    fn why_unanswered(&self) -> &'static str {
        self.waits_for_permitted_link().unwrap_or(
            "the proxy does not answer, and connections wait for it. Is it running, and are its \
             address and key right?",
        )
    }

    /// What the user can do about connections that may use none of the networks that are up; none where
    /// they may.
    fn waits_for_permitted_link(&self) -> Option<&'static str> {
        let links = self.links.borrow();
        let usable: Vec<CostClass> = links
            .iter()
            .filter(|link| link.is_usable())
            .map(|link| link.class.class)
            .collect();
        let only = |is: fn(&CostClass) -> bool| !usable.is_empty() && usable.iter().all(is);
        let flows = lock(&self.flows);
        let never_pays = |steered: &SteeredFlow| match steered.conn_options.policy {
            CostPolicy::FreeOnly => true,
            CostPolicy::FreeFirst | CostPolicy::Balanced => steered.conn_options.due.is_none(),
            CostPolicy::Fast | CostPolicy::Any => false,
        };
        let only_costly = only(|class| *class != CostClass::Free);
        if only_costly && !flows.all.is_empty() && flows.all.values().all(never_pays) {
            return Some(
                "only metered networks are up, and --policy does not allow them (free-first and \
                 balanced use them only to meet --by). Connections wait for a free network",
            );
        }
        if only(|class| *class == CostClass::Roaming) {
            return Some(
                "only roaming networks are up, which are not used. Connections wait for another; \
                 --link NAME=metered allows one",
            );
        }
        None
    }

    fn fell(&self, failed: Option<String>) {
        self.state.send_modify(|state| {
            state.up = false;
            if let Some(text) = failed {
                if self.reports_failures.load(Relaxed) {
                    tracing::warn!("{text}");
                }
                state.failures += 1;
                state.text = text;
            }
        });
    }

    /// Fails at once if all links that are up are metered and the budget is used up.
    fn check_budget(&self) -> Result<(), ConnectRefusal> {
        let left = lock(&self.budget)
            .as_ref()
            .map_or(*lock(&self.agent_left), |budget| {
                *budget.watch_left().borrow()
            });
        let links = self.links.borrow();
        let mut usable = links.iter().filter(|link| link.is_usable()).peekable();
        let costs = |link: &Link| link.class.class != CostClass::Free;
        if left == Some(0) && usable.peek().is_some() && usable.all(costs) {
            let text = "the month's budget for metered networks is used up (`cedos budget`), and \
                no free network is up";
            return Err(ConnectRefusal::new(RefusalCause::Forbidden, text));
        }
        Ok(())
    }

    /// Decides for each flow whether it may use metered links.
    async fn steer(self: Arc<Self>) {
        let mut links = self.links.clone();
        let own = SchedulerHandle::new(SchedulerKind::D2Sched);
        let mut finder = AgentSchedulerFinder::default();
        let mut counted = BTreeMap::new();
        // A change may not have reached the device when it is looked at for that change.
        let mut settled = false;
        // The agent answered, and nothing is to be reported for that.
        let mut answered = false;
        let mut notices = CarrierNotices::default();
        loop {
            let (mut costs, mut again) = (false, None);
            let (mut moves, mut candidates_change, mut budget_left) = (None, None, None);
            let socket = lock(&self.agent_socket).clone();
            let any = self.connections() > 0;
            let agent = match any {
                true => finder.find(socket.as_ref()).await,
                false => finder.current(),
            };
            if let Some(device) = self.proxy.device() {
                // What was carried until now is in what is looked at.
                moves = Some(device.watch_traffic());
                candidates_change = Some(device.watch_candidates());
                let statuses = device.link_statuses();
                if self.reports_carriers.load(Relaxed)
                    && let Some(line) = notices.observe(&statuses, Instant::now())
                {
                    tracing::warn!("{line}");
                }
                let budget = lock(&self.budget).clone();
                budget_left = budget.as_ref().map(|budget| budget.watch_left());
                let mut flows = lock(&self.flows);
                match (&budget, agent) {
                    (Some(budget), _) => {
                        budget.record_spent(&carried_since(&mut counted, &statuses));
                        let left = budget_left.as_ref().and_then(|left| *left.borrow());
                        again = flows.decide(&statuses, budget.scheduler(), left);
                    }
                    (None, Some(agent)) => {
                        if !answered {
                            let spent = carried_since(&mut counted, &statuses);
                            flows.report(&statuses, &spent, agent);
                        }
                        if let Some(answer) = agent.answer() {
                            again = flows.take_answer(&answer);
                            *lock(&self.agent_left) = answer.left;
                        }
                    }
                    (None, None) => {
                        own.observe_links(&links.borrow());
                        *lock(&self.agent_left) = None;
                        again = flows.decide(&statuses, &own, None);
                    }
                }
                flows.apply(&device);
                let is_weighed = again.is_some_and(|again| again <= LOOK_EVERY);
                let is_paid = statuses.iter().any(|w| w.usage == LinkUse::Paid);
                costs = !flows.all.is_empty() && (is_weighed || is_paid);
            }
            let look_again = async {
                if settled {
                    tokio::select! {
                        () = changed(&mut moves) => {}
                        () = changed(&mut budget_left) => {}
                        () = sleep(again.unwrap_or_default()), if again.is_some() => return,
                    }
                }
                sleep(LOOK_EVERY).await;
            };
            let answers = async {
                match finder.current() {
                    Some(agent) => agent.changed().await,
                    None => std::future::pending().await,
                }
            };
            let was_settled = settled;
            answered = false;
            let line_due = notices.due();
            settled = tokio::select! {
                () = look_again, if costs => true,
                changed = links.changed() => match changed {
                    Ok(()) => false,
                    Err(_) => return,
                },
                () = self.stirred.notified() => false,
                () = changed(&mut candidates_change) => false,
                () = sleep_until(line_due.unwrap_or_else(Instant::now)), if line_due.is_some() => was_settled,
                () = answers => {
                    answered = true;
                    was_settled
                }
            };
        }
    }

    fn enter(&self, flow: Arc<Mutex<Flow>>, conn_options: ConnOptions) -> EnteredFlow {
        let mut flows = lock(&self.flows);
        flows.next += 1;
        let number = flows.next;
        let lengths = Arc::<ConnLengths>::default();
        let moved = Arc::<ConnTraffic>::default();
        let steered = SteeredFlow {
            flow,
            lengths: lengths.clone(),
            conn_options,
            pays: None,
            moved: moved.clone(),
            paid_before: 0,
            paid_since: 0,
        };
        flows.insert(number, steered);
        let known = flows
            .groups
            .iter()
            .find(|group| group.conn_options == conn_options);
        let moved_together = match known {
            Some(group) => group.moved.clone(),
            None => {
                let moved = Arc::<ConnTraffic>::default();
                flows.groups.push(ConnGroup {
                    id: number,
                    conn_options,
                    moved: moved.clone(),
                    client: None,
                    carried: CarriedByLink::default(),
                    grant: Grant::None,
                    left: None,
                    spent_at: None,
                });
                moved
            }
        };
        EnteredFlow {
            number,
            moved,
            moved_together,
            lengths,
        }
    }

    /// Removes a connection that ended.
    fn leave(&self, number: u64) {
        let device = self.proxy.device();
        lock(&self.flows).remove(number, device.as_deref());
        self.stirred.notify_one();
    }

    /// What the connections of a rule have carried ([`ConnOptions::rule`]).
    pub fn rule_traffic(&self, rule: u16) -> RuleTraffic {
        let device = self.proxy.device();
        lock(&self.flows).rule_traffic(rule, device.as_deref())
    }

    /// The number of connections.
    pub fn connections(&self) -> usize {
        lock(&self.flows).all.len()
    }

    /// Payload that each link carried for the session, in both directions.
    pub fn carried(&self) -> BTreeMap<String, u64> {
        let statuses = self
            .proxy
            .device()
            .map(|d| d.link_statuses())
            .unwrap_or_default();
        let both =
            |status: d2tp_driver::LinkStatus| (status.name, status.payload.0 + status.payload.1);
        statuses.into_iter().map(both).collect()
    }

    /// Closes the session: sends the rest of all connections, and informs D2Prox.
    pub async fn close(&self) {
        let none_left = async {
            while self.connections() > 0 {
                self.left.notified().await;
            }
        };
        let answered = *self.answered.borrow();
        let since = self.wanted.borrow().unwrap_or_else(Instant::now);
        let nobody_hears = async {
            if !self.is_online() {
                return;
            }
            sleep_until(since + FIRST_WORD).await;
            if !*self.answered.borrow() {
                return;
            }
            std::future::pending().await
        };
        tokio::select! {
            _ = timeout(LAST_WORDS, none_left) => {}
            () = nobody_hears, if !answered => {}
        }
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        for task in &tasks {
            task.abort();
        }
        for task in tasks {
            let _ = task.await;
        }
        if *self.answered.borrow() {
            self.proxy.close().await;
        } else {
            // Nobody is there to take leave of.
            self.proxy.drop_session();
        }
    }
}

/// Waits for a change, if there is a channel; otherwise forever.
async fn changed<T>(what: &mut Option<watch::Receiver<T>>) {
    if let Some(what) = what
        && what.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// What links carried since the last count; a new session counts from zero.
fn carried_since(
    counted: &mut BTreeMap<String, (u64, u64)>,
    statuses: &[LinkStatus],
) -> Vec<LinkPayload> {
    let mut more = Vec::new();
    for status in statuses {
        let before = counted.insert(status.name.clone(), status.payload);
        let before = before
            .filter(|before| before.0 <= status.payload.0 && before.1 <= status.payload.1)
            .unwrap_or_default();
        let (down, up) = (status.payload.0 - before.0, status.payload.1 - before.1);
        if down + up > 0 {
            more.push(LinkPayload {
                link: status.name.clone(),
                class: status.class,
                down,
                up,
            });
        }
    }
    more
}

fn late() -> ConnectRefusal {
    ConnectRefusal::new(RefusalCause::Late, "the deadline has passed")
}

fn words(fault: FetchFault) -> String {
    match fault {
        FetchFault::Path(text)
        | FetchFault::Origin { text, .. }
        | FetchFault::Proxy(text)
        | FetchFault::UntrustedPeer(text)
        | FetchFault::CaptivePortal(text)
        | FetchFault::NameNotFound(text) => text,
        FetchFault::Final(failure) => failure.text,
    }
}
