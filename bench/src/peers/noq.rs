//! noq, quinn's multipath sibling, with one path. Only with the feature `peers-all`.
//!
//! Settings as for the peer `quinn`; see there.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use bytes::Bytes;
use noq::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use noq::{ClientConfig, Endpoint, EndpointConfig, MtuDiscoveryConfig, ServerConfig};
use noq::{TokioRuntime, TransportConfig, VarInt};

use super::bench_peer::{BenchPeer, CALL_BYTES, measured, on_this_thread};
use super::udp;
use crate::credential::{Credential, SERVER_NAME, client_config};
use crate::meter::ProcessMeter;
use crate::network::MTU_BYTES;
use crate::receiver_info::ReceiverInfo;

/// Flow-control and send windows. Measured: smaller ones stall the sender, larger ones only exceed
/// the cache.
const WINDOW_BYTES: u32 = 8 << 20;
/// Chunks taken per read.
const CHUNKS: usize = 64;

/// The QUIC library noq as a peer of the benchmark.
pub struct Noq;

impl BenchPeer for Noq {
    fn name(&self) -> &'static str {
        "noq"
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        let credential = Credential::make()?;
        let tls = QuicServerConfig::try_from(credential.server_config()?)?;
        let mut config = ServerConfig::with_crypto(Arc::new(tls));
        config.transport_config(Arc::new(transport()));
        on_this_thread(async {
            let endpoint = endpoint(address, Some(config))?;
            ready(ReceiverInfo {
                address: endpoint.local_addr()?,
                identity: credential.certificate,
            })?;
            let connection = endpoint.accept().await.context("endpoint closed")?.await?;
            let mut stream = connection.accept_uni().await?;
            let mut chunks = vec![Bytes::new(); CHUNKS];
            let outcome = measured(meter, async {
                while let Some(count) = stream.read_many_chunks(&mut chunks).await? {
                    meter.add(chunks[..count].iter().map(Bytes::len).sum());
                }
                Ok(())
            });
            meter.forgive(outcome.await.context("receiving"))
        })
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        let tls = QuicClientConfig::try_from(client_config(&card.identity)?)?;
        let mut config = ClientConfig::new(Arc::new(tls));
        config.transport_config(Arc::new(transport()));
        on_this_thread(async {
            let endpoint = endpoint([0, 0, 0, 0].into(), None)?;
            let connection = endpoint
                .connect_with(config, card.address, SERVER_NAME)?
                .await
                .context("handshake")?;
            let mut stream = connection.open_uni().await?;
            let payload = Bytes::from(vec![0x5a; CALL_BYTES]);
            let outcome = measured(meter, async {
                loop {
                    stream.write_chunk(payload.clone()).await?;
                    meter.add(CALL_BYTES);
                }
            })
            .await;
            let path = connection
                .path(noq::PathId::ZERO)
                .context("the only path is gone")?
                .stats();
            meter.note(format!(
                "AES-128-GCM, cubic, {} B datagrams, GSO ≤ 10, windows {} MB, {} of {} packets lost",
                path.current_mtu,
                WINDOW_BYTES >> 20,
                path.lost_packets,
                path.sent_packets,
            ));
            meter.forgive(outcome.context("sending"))
        })
    }
}

fn endpoint(address: IpAddr, server: Option<ServerConfig>) -> Result<Endpoint> {
    Ok(Endpoint::new(
        EndpointConfig::default(),
        server,
        udp::socket(address)?,
        Arc::new(TokioRuntime),
    )?)
}

fn transport() -> TransportConfig {
    let mut discovery = MtuDiscoveryConfig::default();
    // UDP payload over IPv4.
    discovery.upper_bound(MTU_BYTES as u16 - 20 - 8);
    let mut transport = TransportConfig::default();
    transport
        .stream_receive_window(VarInt::from_u32(WINDOW_BYTES))
        .receive_window(VarInt::from_u32(WINDOW_BYTES))
        .send_window(WINDOW_BYTES.into())
        .mtu_discovery_config(Some(discovery))
        .enable_segmentation_offload(true);
    transport
}
