//! TCP connections that nftables redirects here: each becomes a flow.
//!
//! The program's kernel speaks TCP with this process, which is on the same machine, and the proxy's with the server. Both
//! directions end by themselves, and a full buffer stops the sender.
//!
//! Each rule has listeners of its own: nftables knows which rule a connection is under, and redirects it to those.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use cedos_agent::proxy::{CONNECTIONS_MAX, ProxySession, TargetAddress, reset};
use d2tp_tunnel::original_destination;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use super::rule_set::{RuleNumber, RuleSet};

/// How long to wait when the system is out of descriptors: some connections may end meanwhile.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// How TCP is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TcpMode {
    /// Each connection is a flow: it is resumed, has a policy, and survives outages of hours
    Flows,
    /// End to end, as packets
    Packets,
}

/// Where connections under a rule are redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpRedirect {
    /// The address of the listener.
    pub to: SocketAddr,
    /// The number of the rule that the connections are under.
    pub rule: RuleNumber,
}

/// The listeners: for each rule, one of each family that the kernel has.
pub struct TcpFlows {
    redirects: Vec<TcpRedirect>,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl TcpFlows {
    /// Listens on this machine, and carries what is redirected here by `session`.
    ///
    /// # Errors
    /// No port can be had.
    pub async fn listen(session: &Arc<ProxySession>, rules: &Arc<RuleSet>) -> io::Result<TcpFlows> {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let (mut redirects, mut tasks) = (Vec::new(), Vec::new());
        for rule in rules.numbers() {
            for at in [
                SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
                SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
            ] {
                if rules.tcp_match(rule, at.is_ipv6()).is_none() {
                    continue;
                }
                let listener = match TcpListener::bind(at).await {
                    // A kernel without IPv6.
                    Err(_) if at.is_ipv6() => continue,
                    listener => listener?,
                };
                redirects.push(TcpRedirect {
                    to: listener.local_addr()?,
                    rule,
                });
                let accepting = accept(
                    listener,
                    session.clone(),
                    rules.clone(),
                    rule,
                    places.clone(),
                );
                tasks.push(AbortOnDropHandle::new(tokio::spawn(accepting)));
            }
        }
        Ok(TcpFlows {
            redirects,
            _tasks: tasks,
        })
    }

    /// Where connections are to be redirected, in the order of the rules.
    pub fn redirects(&self) -> &[TcpRedirect] {
        &self.redirects
    }
}

async fn accept(
    listener: TcpListener,
    session: Arc<ProxySession>,
    rules: Arc<RuleSet>,
    rule: RuleNumber,
    places: Arc<Semaphore>,
) {
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((program, _)) => {
                let carried = carry(program, session.clone(), rules.clone(), rule, place);
                tokio::spawn(carried);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn carry(
    program: TcpStream,
    session: Arc<ProxySession>,
    rules: Arc<RuleSet>,
    rule: RuleNumber,
    _place: OwnedSemaphorePermit,
) {
    let own = program.local_addr();
    let is_ipv6 = own.as_ref().is_ok_and(SocketAddr::is_ipv6);
    let to = match original_destination(&program, is_ipv6) {
        // Who connects here without being redirected would connect to itself.
        Ok(to) if own.is_ok_and(|own| own != to) => to,
        _ => return reset(program),
    };
    let options = match rules.options(rule) {
        Ok(options) => options,
        Err(text) => {
            tracing::info!(%to, "{text}");
            return reset(program);
        }
    };
    match session.open(&TargetAddress::from(to), options).await {
        Ok(open) => open.carry(program).await,
        Err(refusal) => {
            tracing::info!(%to, "{}", refusal.text);
            reset(program);
        }
    }
}
