//! A device that listens: others may call it by its key, through its server.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use d2tp_session::{Admission, LinkId, PublicKey, RelayId};

use crate::device::Device;
use crate::driver_core::DriverShared;
use crate::flow::Flow;
use crate::peer::{CallError, ServerHandle, ServerRequest, handle_seen_line};
use crate::relay_state::AbortOnDrop;

/// The interval between attempts to register again, at first and at most.
const AGAIN_FIRST: Duration = Duration::from_millis(500);
const AGAIN_MAX: Duration = Duration::from_secs(30);

/// The registration of a device for incoming calls. It ends when this is dropped.
pub struct PeerListener {
    shared: Arc<DriverShared>,
    _renewal_task: AbortOnDrop,
}

impl Device {
    /// Registers this device as a listener: those that `callers` admits may call it by its public
    /// key, through its server.
    ///
    /// # Errors
    /// The server refuses, or is not reachable.
    pub async fn listen(&self, callers: Admission) -> Result<PeerListener, CallError> {
        let server = self.to_server();
        let (shared, _, _) = self.parts();
        let mut request = "LISTEN * HTTP/1.1\r\nHost: *\r\n".to_owned();
        if let Admission::Only(keys) = &callers {
            for key in keys {
                request += &format!("Caller: {key}\r\n");
            }
        }
        request += "\r\n";
        {
            let mut inner = shared.inner.lock();
            inner.core.set_admission(callers);
            inner.relays.accepts_peers = true;
        }
        let listener = |keeping| PeerListener {
            shared: shared.clone(),
            _renewal_task: keeping,
        };
        match server.request(&request).await {
            Ok(asked) => Ok(listener(AbortOnDrop(tokio::spawn(keep(
                server, request, asked,
            ))))),
            Err(error) => {
                // Undo the registration.
                drop(listener(AbortOnDrop(tokio::spawn(async {}))));
                Err(error)
            }
        }
    }
}

/// Keeps the registration, also when the server restarts.
async fn keep(server: ServerHandle, request: String, asked: ServerRequest) {
    let mut asked = Some(asked);
    let mut wait = AGAIN_FIRST;
    loop {
        if let Some(mut answer) = asked.take() {
            wait = AGAIN_FIRST;
            let mut calls = BTreeSet::new();
            while let Some(line) = answer.line().await
                && let Some(shared) = server.shared.upgrade()
            {
                handle_line(&shared, &server, &line, &mut calls);
            }
            if let Some(shared) = server.shared.upgrade() {
                let relay_client = &mut shared.inner.lock().relays.relay_client;
                calls
                    .into_iter()
                    .for_each(|relay| relay_client.leave_relay(relay));
            }
        }
        if server.shared.strong_count() == 0 {
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(AGAIN_MAX);
        asked = server.request(&request).await.ok();
    }
}

/// Handles a line of the server: `call ID KEY` (a call by this relay) or `hung-up ID` (its end).
fn handle_line(
    shared: &Arc<DriverShared>,
    server: &ServerHandle,
    line: &str,
    calls: &mut BTreeSet<RelayId>,
) {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["call", relay, caller] => {
            let (Ok(relay), Ok(caller)) = (relay.parse(), PublicKey::from_text(caller)) else {
                return;
            };
            let mut inner = shared.inner.lock();
            let link = LinkId(inner.next_link);
            if inner
                .relays
                .relay_client
                .take_call(relay, server.session, link)
            {
                inner.next_link += 1;
                calls.insert(relay);
                tracing::debug!(%relay, ?caller, "called");
            }
        }
        ["hung-up", relay] => {
            if let Ok(relay) = relay.parse() {
                calls.remove(&relay);
                shared.inner.lock().relays.relay_client.leave_relay(relay);
            }
        }
        _ => handle_seen_line(shared, line),
    }
}

impl PeerListener {
    /// The next flow that a caller opens; [`crate::FlowIo::peer`] is the caller. `None` when the
    /// device is dropped.
    pub async fn accept(&self) -> Option<Flow> {
        self.shared.accept().await
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.core.set_admission(Admission::Nobody);
        inner.relays.accepts_peers = false;
    }
}
