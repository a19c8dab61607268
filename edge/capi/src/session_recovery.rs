//! Sessions that another agent had: the processes whose connections it carried come to this one, each with the claim and
//! the store of its connection.
//!
//! ```text
//!  process ── claim, store ─┐
//!  process ── claim, store ─┼─▶ all that the record names, or GATHERED_WITHIN ─▶ one handshake, all flows claimed
//!  process ── claim, store ─┘                                                     └─ a flow nobody came for: dropped
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    Flow, FlowIo as _, InstanceLease, LeaseClaim, LeaseRecord, PublicKey, ServerAddress,
};
use tokio::sync::{Notify, OnceCell};
use tokio::time::{Instant, timeout};

use crate::agent_message::{AgentCall, ConnectionClaim};
use crate::carried_flow::CarriedFlow;
use crate::connection_status::ConnectionStatus;
use crate::connection_store::{ConnectionStore, KernelCounts};
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::identity;
use crate::options::SocketOptions;
use crate::policy;
use crate::server_session::{ServerSession, ServerSessionState};
use crate::socket_owner::SocketOwner;

/// How long the processes of a session are waited for. One that runs comes at once; all wait for one that is stopped.
const GATHERED_WITHIN: Duration = Duration::from_secs(2); // a guess
/// The interval of checks whether processes that are waited for exist.
const EXISTS_LOOK: Duration = Duration::from_millis(50); // a guess
/// How long the agent before this one may take to end.
const ENDED_WITHIN: Duration = Duration::from_secs(10); // longer than transfers take to stop
/// The interval of checks whether the server has answered a claim, once there is a session.
const CLAIMED_LOOK: Duration = Duration::from_millis(5); // a guess: it answers within a round trip

/// The sessions of other agents, by the numbers of their instances.
#[derive(Default)]
pub(crate) struct SessionRecovery {
    sessions: RefCell<HashMap<u64, Rc<RecoveredSession>>>,
}

/// A session that another agent had.
#[derive(Default)]
struct RecoveredSession {
    stores: RefCell<HashMap<u64, Arc<ConnectionStore>>>,
    /// The processes' claims.
    claims: RefCell<HashMap<u64, ConnectionClaim>>,
    /// Notified when another process came.
    came: Notify,
    flows: OnceCell<Result<RecoveredFlows, SocketFault>>,
}

/// The flows of a session that were claimed and that their processes have not taken yet.
struct RecoveredFlows {
    session: Weak<ServerSession>,
    flows: RefCell<HashMap<u64, Flow>>,
}

fn fault(why: impl std::fmt::Display) -> SocketFault {
    let text =
        format!("the agent that carried this connection is gone, and this one cannot go on: {why}");
    SocketFault::new(libc::ECONNRESET, text)
}

impl SessionRecovery {
    /// Goes on with a connection that another agent carried, whose socket has what `counts` says.
    ///
    /// # Errors
    /// Why that is impossible.
    pub(crate) async fn resume(
        &self,
        engine: &Rc<EngineState>,
        call: &AgentCall,
        claim: &ConnectionClaim,
        (store, counts): (Arc<ConnectionStore>, KernelCounts),
        (conn_status, owner): (Arc<ConnectionStatus>, &SocketOwner),
        latest: impl Fn() -> Option<SocketOptions>,
    ) -> Result<CarriedFlow, SocketFault> {
        if !store.is_whole() {
            return Err(fault("there was no memory for what is under way"));
        }
        let recovered = {
            let mut sessions = self.sessions.borrow_mut();
            let is_over = |session: &RecoveredSession| {
                let known = session.flows.get();
                known.is_some_and(|flows| !flows.as_ref().is_ok_and(RecoveredFlows::is_alive))
            };
            // An instance that an earlier agent had may be that of the last one again.
            sessions.retain(|_, session| !is_over(session));
            sessions.entry(claim.instance).or_default().clone()
        };
        recovered
            .stores
            .borrow_mut()
            .insert(claim.flow, store.clone());
        recovered
            .claims
            .borrow_mut()
            .insert(claim.flow, claim.clone());
        recovered.came.notify_one();
        let flows = recovered
            .flows
            .get_or_init(|| recover(engine, &recovered, call, claim));
        let flows = flows.await.as_ref().map_err(SocketFault::clone)?;
        let session = flows
            .session
            .upgrade()
            .ok_or_else(|| fault("its session is over"))?;
        let flow = flows.flows.borrow_mut().remove(&claim.flow);
        let flow = flow.ok_or_else(|| fault("it came too late"))?;
        let stored_before = store.received();
        let line = session.join();
        let flow = RefCell::new(flow);
        let options = latest().map_or_else(|| SocketOptions::try_from(&call.options), Ok)?;
        let claimed = async {
            let mut state = session.state.clone();
            let known = state.wait_for(|state| *state != ServerSessionState::Opening);
            if let Ok(ServerSessionState::Over(end)) = known.await.as_deref() {
                return Err(session.fault_of_end(end));
            }
            loop {
                if store.is_over_at_peer() {
                    return Ok(claim.sent_base + counts.taken);
                }
                if let Some(end) = flow.borrow().end() {
                    let of_session = session.fault_of_session();
                    return Err(of_session.unwrap_or_else(|| SocketFault::of_flow(end)));
                }
                if let Some(at) = flow.borrow().resumed_at() {
                    return Ok(at);
                }
                tokio::time::sleep(CLAIMED_LOOK).await;
            }
        };
        let resumed_at = tokio::select! {
            claimed = claimed => claimed?,
            // It may have to pay for the claim.
            fault = policy::enforce_opening(engine, Some(owner), &session, &flow, &options) => {
                return Err(fault);
            }
        };
        let flow = flow.into_inner();
        let resent_from = resumed_at.checked_sub(claim.sent_base);
        let resent_from =
            resent_from.filter(|from| *from >= store.released() && *from <= counts.taken);
        let resent_from = resent_from.ok_or_else(|| fault("the server has other bytes"))?;
        let options = latest().unwrap_or(options);
        flow.set_deadline(options.within());
        flow.set_route(options.route);
        let held = CarriedFlow::new(flow, Some(line), conn_status, options);
        Ok(held.resumed(claim, store, counts, (resent_from, stored_before)))
    }
}

impl RecoveredFlows {
    fn is_alive(&self) -> bool {
        self.session
            .upgrade()
            .is_some_and(|session| !session.is_over())
    }
}

/// Goes on with a session, once the processes have come that wait for its flows.
async fn recover(
    engine: &Rc<EngineState>,
    recovered: &RecoveredSession,
    call: &AgentCall,
    claim: &ConnectionClaim,
) -> Result<RecoveredFlows, SocketFault> {
    let key = identity::read(&call.key)?;
    let server: ServerAddress = claim.server.parse().map_err(fault)?;
    let (lease, record) = leased(key.public(), server.key, claim.instance).await?;
    let until = Instant::now() + GATHERED_WITHIN;
    let is_missing = || {
        let here = recovered.claims.borrow();
        record
            .awaited_flows()
            .iter()
            .any(|flow| !here.contains_key(flow))
    };
    while Instant::now() < until && is_missing() {
        let _ = timeout(EXISTS_LOOK, recovered.came.notified()).await;
    }
    let claims = recovered.claims.borrow().clone();
    let stores = recovered.stores.borrow().clone();
    let claims = claims.into_iter().filter_map(|(flow, claim)| {
        let store = stores.get(&flow)?.clone();
        let claim = LeaseClaim {
            flow,
            received: store.received(),
            sent: claim.sent_base + store.released(),
        };
        Some((claim, store))
    });
    let claims: Vec<_> = claims.collect();
    let links = engine.links().await;
    let resumed = ServerSession::resume(&server, key, links, (lease, record), &claims);
    let (session, flows) = resumed.await?;
    let session = Rc::new(session);
    tracing::info!(connections = flows.len(), %server, "connections of another agent go on");
    // Until its processes have joined it.
    let _in_use = session.join();
    let servers = call.server.parse().map_err(fault)?;
    engine.adopt(&servers, Some(&call.key), &session);
    Ok(RecoveredFlows {
        session: Rc::downgrade(&session),
        flows: RefCell::new(flows.into_iter().collect()),
    })
}

/// Leases the instance of another agent, which may be about to end.
async fn leased(
    device: PublicKey,
    server: PublicKey,
    instance: u64,
) -> Result<(InstanceLease, LeaseRecord), SocketFault> {
    let until = Instant::now() + ENDED_WITHIN;
    loop {
        let take = move || InstanceLease::take_record(device, server, instance);
        match tokio::task::spawn_blocking(take).await.map_err(fault)? {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => return Err(fault("another process has its place")),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                tokio::time::sleep(EXISTS_LOOK).await;
            }
            Err(error) => return Err(fault(error)),
        }
    }
}
