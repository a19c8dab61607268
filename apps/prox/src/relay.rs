//! RELAY and LISTEN: sealed packets are forwarded to D2TP origins and between clients.
//!
//! ```text
//!  RELAY host:port   200, Relay: ID ─▶ seen PATH ADDRESS … until either ends the flow
//!  RELAY KEY         the same, if that client listens and lets this one call
//!  LISTEN *          200 ─▶ call ID KEY · hung-up ID · seen PATH ADDRESS …
//! ```
//!
//! The packets themselves are not handled here: `d2tp-driver` forwards them between sockets. A
//! relay lasts as long as its flow.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::BytesMut;
use d2tp_driver::{
    Admission, CallEvent, DeviceRelays, FlowIo, IncomingCalls, PublicKey, RelayError, RelayHandle,
    RelayLimits, RelayRefusal,
};
use tokio::io::AsyncWriteExt;

use crate::config::ProxConfig;
use crate::dial::allowed_addresses;
use crate::flow_answer::refuse;
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::key_text::show_key;
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::request::RelayTarget;
use d2tp_driver::ResetCause;

impl ProxConfig {
    /// The limits on relays; none if relays are disabled.
    pub fn relay_limits(&self) -> Option<RelayLimits> {
        self.relay.then_some(RelayLimits {
            client: self.client_relays_max,
            all: self.relays_max,
        })
    }
}

impl From<RelayError> for ProxRefusal {
    fn from(fault: RelayError) -> ProxRefusal {
        match fault {
            RelayError::Refused(RelayRefusal::NobodyListens) => ProxRefusal::NoListener,
            RelayError::Refused(RelayRefusal::NoSession) => ProxRefusal::Stopping,
            RelayError::Refused(full) => ProxRefusal::RelaysFull(full.to_string()),
            RelayError::Socket(error) => ProxRefusal::RelayFailed(error.to_string()),
        }
    }
}

/// Serves a RELAY request.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    to: &RelayTarget,
) -> ProxFlowOutcome {
    record.asked = match to {
        RelayTarget::Origin(target) => {
            record.target = Some(target.to_string());
            format!("RELAY {target}")
        }
        RelayTarget::Device(key) => format!("RELAY {}", &show_key(key)[..8]),
    };
    let hosting = hosting(flow, prox);
    match open(hosting, prox, to).await {
        Ok((hosting, relay)) => {
            let head = format!("HTTP/1.1 200 OK\r\nrelay: {}\r\n\r\n", relay.id());
            let outcome = attend(flow, prox, watch, record, hosting, head, None).await;
            drop(relay);
            outcome
        }
        Err(refusal) => refuse(flow, prox, watch, record, &refusal, false).await,
    }
}

/// Serves a LISTEN request.
pub(crate) async fn listen<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    callers: &[[u8; 32]],
) -> ProxFlowOutcome {
    record.asked = "LISTEN".to_owned();
    let callers = match callers {
        [] => Admission::Anybody,
        some => Admission::Only(some.iter().copied().map(PublicKey).collect::<BTreeSet<_>>()),
    };
    let listening = hosting(flow, prox).and_then(|hosting| {
        let listening = hosting.listen(callers)?;
        Ok((hosting, listening))
    });
    match listening {
        Ok((hosting, listening)) => {
            let head = "HTTP/1.1 200 OK\r\n\r\n".to_owned();
            attend(flow, prox, watch, record, hosting, head, Some(listening)).await
        }
        Err(refusal) => refuse(flow, prox, watch, record, &refusal, false).await,
    }
}

fn hosting<F: FlowIo>(flow: &F, prox: &Prox) -> Result<DeviceRelays, ProxRefusal> {
    // A client without D2TP has no session whose places could be proved.
    let hosting = flow.relays().filter(|_| prox.config().relay);
    hosting.ok_or(ProxRefusal::NoRelay)
}

async fn open(
    hosting: Result<DeviceRelays, ProxRefusal>,
    prox: &Prox,
    to: &RelayTarget,
) -> Result<(DeviceRelays, RelayHandle), ProxRefusal> {
    let hosting = hosting?;
    let relay = match to {
        RelayTarget::Device(key) => hosting.relay_to_device(*key)?,
        // R-RELAY-6
        RelayTarget::Origin(target) => {
            let upstream = prox.upstream();
            let (filter, resolver) = (&upstream.filter, &*upstream.resolver);
            let found = allowed_addresses(target, filter, resolver, upstream.dns_timeout).await?;
            hosting.relay_to_address(SocketAddr::new(found[0], target.port()))?
        }
    };
    Ok((hosting, relay))
}

/// Sends events to the device while its flow lasts.
async fn attend<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    mut hosting: DeviceRelays,
    head: String,
    mut listening: Option<IncomingCalls>,
) -> ProxFlowOutcome {
    record.status = Some(200);
    record.served = ServedFrom::Relay;
    let mut reported: BTreeMap<u32, SocketAddr> = BTreeMap::new();
    let mut lines = head;
    let mut unheard = BytesMut::new();
    loop {
        let places = hosting.observed_addresses();
        for (path, at) in places
            .iter()
            .filter(|(path, at)| reported.get(path) != Some(at))
        {
            lines += &format!("seen {path} {at}\n");
        }
        reported = places;
        record.bytes_down += lines.len() as u64;
        if let Err(error) = flow.write_all(lines.as_bytes()).await {
            return ProxFlowOutcome::Broken(error.to_string());
        }
        lines.clear();
        let news = async {
            match &mut listening {
                Some(listening) => listening.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            read_result = watch.read(flow, prox, &mut unheard) => match read_result {
                Ok(0) => break,
                // There is nothing to say here.
                Ok(_) => unheard.clear(),
                Err(gone) => return gone.outcome(),
            },
            () = hosting.addresses_changed() => {}
            news = news => match news {
                Some(CallEvent::Call(relay, caller)) => {
                    lines += &format!("call {relay} {}\n", show_key(&caller));
                }
                Some(CallEvent::HungUp(relay)) => lines += &format!("hung-up {relay}\n"),
                // It listens by another flow now.
                None => break,
            },
        }
    }
    drop(listening);
    if flow.shutdown().await.is_err() {
        return ProxFlowOutcome::Reset(ResetCause::Stopping);
    }
    watch.gone(flow, prox).await.outcome()
}
