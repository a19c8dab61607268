//! TLS 1.3 over kernel TCP with `rustls`: the transport of most encrypted bulk transfers today.
//!
//! TCP as in the peer `tcp`; AES-128-GCM from `aws-lc-rs`; 16 kB records; encryption in the
//! process, not in the kernel. Up to [`BUFFER_BYTES`] are encrypted before they are written with
//! one vectored call.

use std::io::{Read, Write};
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, Stream};
use socket2::Protocol;

use super::bench_peer::{BenchPeer, CALL_BYTES};
use super::tcp;
use crate::credential::{Credential, SERVER_NAME, client_config};
use crate::meter::ProcessMeter;
use crate::receiver_info::ReceiverInfo;

/// Plaintext taken per write; rustls's own default.
const BUFFER_BYTES: usize = 64 << 10;

/// TLS over kernel TCP as a peer of the benchmark.
pub struct TcpTls;

impl BenchPeer for TcpTls {
    fn name(&self) -> &'static str {
        "tcp-tls"
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        let credential = Credential::make()?;
        let config = Arc::new(credential.server_config()?);
        let mut stream = tcp::accept(Protocol::TCP, address, credential.certificate, ready)?;
        let mut tls = ServerConnection::new(config)?;
        let mut flow = Stream::new(&mut tls, &mut stream);
        let mut buffer = vec![0u8; CALL_BYTES];
        while !meter.is_over() {
            match flow.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => meter.add(count),
                Err(error) => return meter.forgive(Err(error).context("receiving")),
            }
        }
        Ok(())
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        let config = Arc::new(client_config(&card.identity)?);
        let mut stream = tcp::connect(Protocol::TCP, tcp::CONGESTION_CONTROL, card.address)?;
        let transport = tcp::settings(&stream);
        let mut tls = ClientConnection::new(config, ServerName::try_from(SERVER_NAME)?)?;
        tls.set_buffer_limit(Some(BUFFER_BYTES));
        let mut flow = Stream::new(&mut tls, &mut stream);
        let payload = vec![0x5au8; CALL_BYTES];
        flow.write_all(&payload).context("handshake")?;
        let suite = flow
            .conn
            .negotiated_cipher_suite()
            .context("no suite after the handshake")?
            .suite();
        meter.note(format!("{suite:?}, 16 kB records; {transport}"));
        while !meter.is_over() {
            match flow.write(&payload) {
                Ok(count) => meter.add(count),
                Err(error) => return meter.forgive(Err(error).context("sending")),
            }
        }
        Ok(())
    }
}
