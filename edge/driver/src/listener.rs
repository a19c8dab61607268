//! A device that others may call by its key, through its server.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use d2tp_session::{Admission, LinkId, PublicKey, RelayId};

use crate::device::Device;
use crate::engine::Shared;
use crate::flow::Flow;
use crate::peer::{Asked, CallError, ToServer, hear_seen};
use crate::relaying::Tied;

/// Between two attempts to be listened for again, at first and at most.
const AGAIN_FIRST: Duration = Duration::from_millis(500);
const AGAIN_MAX: Duration = Duration::from_secs(30);

/// Calls to a device, for as long as this lives.
pub struct Listener {
    shared: Arc<Shared>,
    _keeping: Tied,
}

impl Device {
    /// From now on those whom `callers` admits may call this device by its public key, through its
    /// server.
    ///
    /// # Errors
    /// The server refuses, or cannot be asked.
    pub async fn listen(&self, callers: Admission) -> Result<Listener, CallError> {
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
            inner.relaying.listens = true;
        }
        let listener = |keeping| Listener {
            shared: shared.clone(),
            _keeping: keeping,
        };
        match server.ask(&request).await {
            Ok(asked) => Ok(listener(Tied(tokio::spawn(keep(server, request, asked))))),
            Err(error) => {
                // As if it had never been begun.
                drop(listener(Tied(tokio::spawn(async {}))));
                Err(error)
            }
        }
    }
}

/// Stays asked for, through restarts of the server too.
async fn keep(server: ToServer, request: String, asked: Asked) {
    let mut asked = Some(asked);
    let mut wait = AGAIN_FIRST;
    loop {
        if let Some(mut answer) = asked.take() {
            wait = AGAIN_FIRST;
            let mut calls = BTreeSet::new();
            while let Some(line) = answer.line().await
                && let Some(shared) = server.shared.upgrade()
            {
                hear(&shared, &server, &line, &mut calls);
            }
            if let Some(shared) = server.shared.upgrade() {
                let guest = &mut shared.inner.lock().relaying.guest;
                calls.into_iter().for_each(|relay| guest.leave_relay(relay));
            }
        }
        if server.shared.strong_count() == 0 {
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(AGAIN_MAX);
        asked = server.ask(&request).await.ok();
    }
}

/// `call ID KEY`: somebody calls by this relay. `hung-up ID`: no more.
fn hear(shared: &Arc<Shared>, server: &ToServer, line: &str, calls: &mut BTreeSet<RelayId>) {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["call", relay, caller] => {
            let (Ok(relay), Ok(caller)) = (relay.parse(), PublicKey::from_text(caller)) else {
                return;
            };
            let mut inner = shared.inner.lock();
            let link = LinkId(inner.next_link);
            if inner.relaying.guest.take_call(relay, server.session, link) {
                inner.next_link += 1;
                calls.insert(relay);
                tracing::debug!(%relay, ?caller, "called");
            }
        }
        ["hung-up", relay] => {
            if let Ok(relay) = relay.parse() {
                calls.remove(&relay);
                shared.inner.lock().relaying.guest.leave_relay(relay);
            }
        }
        _ => hear_seen(shared, line),
    }
}

impl Listener {
    /// The next flow a caller opens: [`crate::FlowIo::peer`] says whose it is. None when the device is
    /// gone.
    pub async fn accept(&self) -> Option<Flow> {
        self.shared.accept().await
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.core.set_admission(Admission::Nobody);
        inner.relaying.listens = false;
    }
}
