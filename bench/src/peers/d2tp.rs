//! D2TP as a peer: one flow of one session, by the driver's ordinary calls.
//!
//! Payload goes in as reference-counted chunks and comes out as chunks in order, as for the QUIC
//! libraries. One thread per process, as each process has one core.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use bytes::Bytes;
use d2tp_driver::{
    Admission, CongestionKind, Device, DeviceOptions, DrwaLambda, EndpointConfig, FlowSettings,
    SecretKey, Server, ServerAddress, ServerOptions,
};

use super::bench_peer::{BenchPeer, CALL_BYTES, measured, on_this_thread};
use crate::meter::ProcessMeter;
use crate::receiver_info::ReceiverInfo;

/// D2TP as a peer, with one of its congestion controls.
pub struct D2tp {
    congestion: CongestionKind,
    /// Whether the receiver moves its window.
    held: bool,
}

impl D2tp {
    /// Creates the peer with this congestion controller.
    pub fn with(congestion: CongestionKind) -> Self {
        Self {
            congestion,
            held: false,
        }
    }

    /// Creates the peer with CUBIC, and a receiver that moves its window (DRWA).
    pub fn held() -> Self {
        Self {
            congestion: CongestionKind::Cubic,
            held: true,
        }
    }

    fn config(&self) -> EndpointConfig {
        EndpointConfig {
            congestion: self.congestion,
            drwa: self.held.then(DrwaLambda::default),
            ..EndpointConfig::default()
        }
    }
}

impl BenchPeer for D2tp {
    fn name(&self) -> &'static str {
        match self.congestion {
            CongestionKind::Cubic if self.held => "d2tp-drwa",
            CongestionKind::Cubic => "d2tp",
            CongestionKind::NewReno => "d2tp-newreno",
            CongestionKind::Bbr => "d2tp-bbr",
            CongestionKind::Lia => "d2tp-lia",
            CongestionKind::Olia => "d2tp-olia",
            CongestionKind::Balia => "d2tp-balia",
        }
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        on_this_thread(async {
            let server = Server::bind(ServerOptions {
                listen: (address, 0).into(),
                key: SecretKey::from_bytes([2; 32]),
                admission: Admission::Anybody,
                config: self.config(),
            })?;
            ready(ReceiverInfo {
                address: server.local_addr(),
                identity: server.public_key().0.to_vec(),
            })?;
            let mut flow = server.accept().await.context("the server stopped")?;
            let outcome = measured(meter, async {
                while let Some(chunk) = flow.read_chunk().await? {
                    meter.add(chunk.len());
                }
                Ok(())
            });
            meter.forgive(outcome.await.context("receiving"))
        })
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        on_this_thread(async {
            let key: [u8; 32] = card
                .identity
                .as_slice()
                .try_into()
                .context("the server's key")?;
            let device = Device::new(DeviceOptions {
                server: ServerAddress::new(
                    card.address.ip().to_string(),
                    card.address.port(),
                    d2tp_driver::PublicKey(key),
                ),
                key: SecretKey::from_bytes([1; 32]),
                config: self.config(),
            })
            .await?;
            device.use_default_route()?;
            let mut flow = device.open(FlowSettings::default())?;
            let payload = Bytes::from(vec![0x5a; CALL_BYTES]);
            let outcome = measured(meter, async {
                loop {
                    flow.write_chunk(payload.clone()).await?;
                    meter.add(CALL_BYTES);
                }
            })
            .await;
            if let Some(path) = device.paths().first() {
                meter.note(format!(
                    "AES-128-GCM, {:?}, {} B datagrams, window {} kB, {} packets lost, {} of them not",
                    self.congestion,
                    path.mtu,
                    path.window >> 10,
                    path.lost,
                    path.spurious,
                ));
            }
            meter.forgive(outcome.context("sending"))
        })
    }
}
