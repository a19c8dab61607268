//! The serving process of a churn run: a real server that writes on every flow as fast as it may.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use bytes::Bytes;
use d2tp_driver::{Admission, EndpointConfig, Flow, SecretKey, Server, ServerOptions};
use serde::{Deserialize, Serialize};

use crate::process::tell;

/// Bytes handed over in one call; all flows share the one buffer.
const PIECE_BYTES: usize = 16 << 10;
/// Bytes written and not acknowledged that a flow holds: what hosts take, and one call more.
const SEND_BUFFER_BYTES: u64 = 2 * PIECE_BYTES as u64;

#[derive(clap::Args)]
pub struct ChurnServerOptions {
    /// Sessions it keeps awake
    #[arg(long)]
    sessions: usize,
    /// Where it listens
    #[arg(long)]
    address: IpAddr,
}

/// What hosts must know of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChurnServerInfo {
    pub address: SocketAddr,
    pub key: [u8; 32],
    pub process: u32,
}

/// Runs until it is killed.
pub fn run(options: &ChurnServerOptions) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let defaults = EndpointConfig::default();
        let server = Server::bind(ServerOptions {
            listen: (options.address, 0).into(),
            key: SecretKey::from_bytes([2; 32]),
            admission: Admission::Anybody,
            config: EndpointConfig {
                send_buffer: SEND_BUFFER_BYTES,
                sessions_max: defaults.sessions_max.max(options.sessions),
                ..defaults
            },
        })?;
        tell(&ChurnServerInfo {
            address: server.local_addr(),
            key: server.public_key().0,
            process: std::process::id(),
        })?;
        let piece = Bytes::from(vec![0x5a; PIECE_BYTES]);
        loop {
            let flow = server.accept().await.context("the server stopped")?;
            tokio::spawn(fill(flow, piece.clone()));
        }
    })
}

async fn fill(mut flow: Flow, piece: Bytes) {
    // Until the hosts' process ends.
    while flow.write_chunk(piece.clone()).await.is_ok() {}
}
