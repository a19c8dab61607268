//! D2TP as a peer by the socket API: blocking calls on a kernel descriptor, with the engine of
//! `libd2tp` in its own threads. All of them share the process's core.

use std::io::{Read, Write};
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Result;
use d2tp_sockets::{D2tpListener, D2tpStream};

use super::bench_peer::{BenchPeer, CALL_BYTES};
use crate::meter::ProcessMeter;
use crate::receiver_info::ReceiverInfo;

/// D2TP over the socket API as a peer.
pub struct D2tpSockets;

impl BenchPeer for D2tpSockets {
    fn name(&self) -> &'static str {
        "d2tp-sockets"
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        let listener = D2tpListener::bind((address, 0).into())?;
        ready(ReceiverInfo {
            address: listener.local_addr()?,
            identity: listener.address()?.into_bytes(),
        })?;
        let (mut stream, _) = listener.accept()?;
        let mut buffer = vec![0; CALL_BYTES];
        while !meter.is_over() {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(bytes) => meter.add(bytes),
                Err(error) => return meter.forgive(Err(error)),
            }
        }
        Ok(())
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        let mut stream = D2tpStream::connect(std::str::from_utf8(&card.identity)?)?;
        let payload = vec![0x5a; CALL_BYTES];
        while !meter.is_over() {
            match stream.write(&payload) {
                Ok(bytes) => meter.add(bytes),
                Err(error) => return meter.forgive(Err(error)),
            }
        }
        meter.note(format!("calls of {} kB on a descriptor", CALL_BYTES >> 10));
        Ok(())
    }
}
