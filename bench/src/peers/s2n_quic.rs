//! s2n-quic, the fastest of the QUIC libraries measured. Only with the feature `peers-all`.
//!
//! Settings: MTU 1500 (its limits count IP and UDP headers), segmentation offload both ways (on by
//! default), windows as for the other QUIC peers, its default congestion controller (CUBIC), TLS by
//! `rustls` so that the cipher suite is the same for all peers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use s2n_quic::client::Connect;
use s2n_quic::provider::io;
use s2n_quic::provider::limits::Limits;
use s2n_quic::provider::tls::rustls as tls;
use s2n_quic::{Client, Server};

use super::bench_peer::{BenchPeer, CALL_BYTES, measured, on_this_thread};
use super::udp;
use crate::credential::{Credential, SERVER_NAME, client_config};
use crate::meter::ProcessMeter;
use crate::network::MTU_BYTES;
use crate::receiver_info::ReceiverInfo;

/// Flow-control windows and send buffer. As for quinn.
const WINDOW_BYTES: u32 = 8 << 20;
/// Chunks taken per read.
const CHUNKS: usize = 64;
/// s2n-quic refuses a handshake without one.
const ALPN: &[u8] = b"bench";

/// The QUIC library s2n-quic as a peer of the benchmark.
pub struct S2nQuic;

impl BenchPeer for S2nQuic {
    fn name(&self) -> &'static str {
        "s2n-quic"
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        let credential = Credential::make()?;
        let mut tls_config = credential.server_config()?;
        tls_config.alpn_protocols = vec![ALPN.to_vec()];
        on_this_thread(async {
            let mut server = Server::builder()
                .with_tls(tls::Server::from(tls_config))?
                .with_io(io(address)?)?
                .with_limits(limits()?)?
                .start()
                .context("no endpoint")?;
            ready(ReceiverInfo {
                address: server.local_addr()?,
                identity: credential.certificate,
            })?;
            let mut connection = server.accept().await.context("endpoint closed")?;
            let mut stream = connection
                .accept_receive_stream()
                .await?
                .context("the sender closed before it opened a stream")?;
            let mut chunks = vec![Bytes::new(); CHUNKS];
            let outcome = measured(meter, async {
                loop {
                    let (count, open) = stream.receive_vectored(&mut chunks).await?;
                    // It needs its slots empty again.
                    meter.add(
                        chunks[..count]
                            .iter_mut()
                            .map(|c| std::mem::take(c).len())
                            .sum(),
                    );
                    if !open {
                        break Ok(());
                    }
                }
            });
            meter.forgive(outcome.await.context("receiving"))
        })
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        let mut tls_config = client_config(&card.identity)?;
        tls_config.alpn_protocols = vec![ALPN.to_vec()];
        on_this_thread(async {
            let client = Client::builder()
                .with_tls(tls::Client::from(tls_config))?
                .with_io(io([0, 0, 0, 0].into())?)?
                .with_limits(limits()?)?
                .start()
                .context("no endpoint")?;
            let connect = Connect::new(card.address).with_server_name(SERVER_NAME);
            let mut connection = client.connect(connect).await.context("handshake")?;
            let mut stream = connection.open_send_stream().await?;
            meter.note(format!(
                "AES-128-GCM, cubic, MTU {MTU_BYTES}, GSO as it likes, windows {} MB",
                WINDOW_BYTES >> 20
            ));
            let payload = Bytes::from(vec![0x5a; CALL_BYTES]);
            let outcome = measured(meter, async {
                loop {
                    stream.send(payload.clone()).await?;
                    meter.add(CALL_BYTES);
                }
            });
            meter.forgive(outcome.await.context("sending"))
        })
    }
}

fn io(address: IpAddr) -> Result<io::Default> {
    let io = io::Default::builder()
        .with_receive_address(SocketAddr::new(address, 0))?
        .with_send_buffer_size(udp::SOCKET_BUFFER_BYTES)?
        .with_recv_buffer_size(udp::SOCKET_BUFFER_BYTES)?
        .with_max_mtu(MTU_BYTES as u16)?
        .build()?;
    Ok(io)
}

fn limits() -> Result<Limits> {
    Limits::new()
        .with_data_window(WINDOW_BYTES.into())?
        .with_bidirectional_local_data_window(WINDOW_BYTES.into())?
        .with_bidirectional_remote_data_window(WINDOW_BYTES.into())?
        .with_unidirectional_data_window(WINDOW_BYTES.into())?
        .with_max_send_buffer_size(WINDOW_BYTES)
        .map_err(|error| anyhow!("s2n-quic refuses the windows: {error}"))
}
