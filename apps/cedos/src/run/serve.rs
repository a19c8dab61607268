//! Runs an unmodified server as a D2TP server: each of its TCP listeners gets a D2TP listener.
//!
//! ```text
//!  device ══ a flow ══▶ Server (UDP) ──▶ a connection on loopback ──▶ the program's listener
//! ```

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::proxy::carry;
use d2tp_catch::CatchPort;
use d2tp_driver::{
    Admission, EndpointConfig, Flow, FlowIo as _, SecretKey, Server, ServerAddress, ServerOptions,
};

use crate::verbs::reachable_host::host_for_devices;

/// The interval of retries, because a listener may be reported before it listens.
const CALL_AGAIN: Duration = Duration::from_millis(20);
const CALLS_MAX: u32 = 50;

/// Reset code of a flow whose program does not take it.
const REFUSED: u64 = 0xd301;

/// How a server is offered.
pub struct ProgramServing {
    /// Where its first listener is, if that is said; others have the number of their TCP port.
    pub first_address: Option<SocketAddr>,
    /// The key of the server.
    pub key: SecretKey,
    /// The devices that may connect.
    pub admission: Admission,
    /// The port on the program's loopback interface.
    pub port: Arc<CatchPort>,
}

/// The D2TP listeners in front of a program.
pub struct ProgramServers {
    served: ProgramServing,
    servers: HashMap<u16, Arc<Server>>,
}

impl ProgramServers {
    /// A set without servers yet.
    pub fn new(served: ProgramServing) -> ProgramServers {
        ProgramServers {
            served,
            servers: HashMap::new(),
        }
    }

    /// The program listens there: its address, if it has one that is new.
    ///
    /// # Errors
    /// No socket can be had for it.
    pub async fn open(&mut self, at: SocketAddr) -> anyhow::Result<Option<ServerAddress>> {
        // A port that is not chosen yet is nobody's to call.
        if at.port() == 0 || self.servers.contains_key(&at.port()) {
            return Ok(None);
        }
        let listen = match self.served.first_address {
            Some(said) if self.servers.is_empty() => said,
            Some(said) => SocketAddr::new(said.ip(), at.port()),
            None => (Ipv6Addr::UNSPECIFIED, at.port()).into(),
        };
        let server = Server::bind(ServerOptions {
            listen,
            key: self.served.key.clone(),
            admission: self.served.admission.clone(),
            config: EndpointConfig::default(),
        })
        .with_context(|| format!("no D2TP listener for the program's port {}", at.port()))?;
        let server = Arc::new(server);
        let local = server.local_addr();
        let address = ServerAddress::new(
            host_for_devices(local).await.to_string(),
            local.port(),
            server.public_key(),
        );
        tokio::spawn(front(
            server.clone(),
            as_called(at),
            self.served.port.clone(),
        ));
        self.servers.insert(at.port(), server);
        Ok(Some(address))
    }

    /// Ends them, so that devices hear of it.
    pub async fn close(self) {
        for server in self.servers.values() {
            server.close().await;
        }
    }
}

/// A listener on any address is called on loopback.
fn as_called(at: SocketAddr) -> SocketAddr {
    let ip = match at.ip().to_canonical() {
        // What listens for both families listens for IPv4.
        ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    (ip, at.port()).into()
}

async fn front(server: Arc<Server>, program: SocketAddr, port: Arc<CatchPort>) {
    while let Some(flow) = server.accept().await {
        tokio::spawn(hand_over(flow, program, port.clone()));
    }
}

async fn hand_over(mut flow: Flow, to: SocketAddr, port: Arc<CatchPort>) {
    let mut calls = 0;
    let program = loop {
        match port.connect_loopback(to).await {
            Ok(program) => break program,
            Err(_) if calls < CALLS_MAX => calls += 1,
            Err(error) => {
                tracing::warn!(%to, %error, "the program does not accept a connection");
                return flow.reset(REFUSED);
            }
        }
        tokio::time::sleep(CALL_AGAIN).await;
    };
    if carry(program, &mut flow).await {
        let _ = std::future::poll_fn(|cx| flow.poll_finished(cx)).await;
    }
}
