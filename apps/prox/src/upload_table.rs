//! Uploads to which a device may return, by the token that it assigned, private to its key.
//!
//! ```text
//!  body comes ── whole ──▶ goes to the origin ── its answer ──▶ device has it: forgotten
//!      │ device went           │ device went: it goes on    │ device went
//!      └───────────────────────┴──────────────┬─────────────┘
//!                    kept for a while ◀───────┘ ── back with the token ──▶ on from there
//! ```
//!
//! One flow at a time fills a spool: a returning device ends the previous flow, which may not have
//! noticed yet that the device was gone. Uploads without a flow are, like kept copies, discarded
//! first when room is needed. With a copy store, uploads outlive the process.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::HostKey;
use http::Method;
use parking_lot::Mutex;
use tokio::sync::{OwnedMutexGuard, watch};
use url::Url;

use crate::refusal::ProxRefusal;
use crate::request::{UploadRequest, UploadToken};
use crate::spooled_body::SpooledBody;
use crate::stored_upload::StoredUpload;
use crate::upload_delivery::UploadDelivery;

/// The lock of one that looks for an upload among nodes, while others for the same wait.
type FindingTurn = Arc<tokio::sync::Mutex<()>>;

/// The uploads with tokens of all clients.
#[derive(Debug, Default)]
pub(crate) struct UploadTable {
    entries: Mutex<HashMap<(HostKey, UploadToken), UploadEntry>>,
    /// Uploads that only a bucket has which has not answered yet.
    awaited: Mutex<HashSet<(HostKey, UploadToken)>>,
    /// For each upload that a flow looks for among nodes, a lock.
    finding: Mutex<HashMap<(HostKey, UploadToken), FindingTurn>>,
}

#[derive(Debug)]
struct UploadEntry {
    upload: Arc<SpooledUpload>,
    /// The order in which devices left, counted over all uploads; none while a flow uses the upload.
    left: Option<u64>,
}

/// The body of an upload, and its delivery.
#[derive(Debug)]
pub(crate) struct SpooledUpload {
    method: Method,
    url: Url,
    length: Option<u64>,
    pub(crate) spool: Arc<SpooledBody>,
    /// The note of the upload, if it outlives the process.
    pub(crate) stored: Option<Arc<StoredUpload>>,
    pub(crate) delivery: Mutex<Option<UploadDelivery>>,
    /// Locked by the flow that fills the spool.
    filling: Arc<tokio::sync::Mutex<()>>,
    /// The number of flows that came for the upload.
    arrivals: watch::Sender<u64>,
}

/// Where the body of an upload is stored.
#[derive(Debug)]
pub(crate) struct UploadRoom {
    pub(crate) spool: SpooledBody,
    /// The note of the upload, if it outlives the process.
    pub(crate) stored: Option<Arc<StoredUpload>>,
}

/// A flow's hold on an upload.
pub(crate) struct UploadHold {
    pub(crate) upload: Arc<SpooledUpload>,
    /// The number of the flow among those that came for the upload.
    number: u64,
    arrivals: watch::Receiver<u64>,
    turn: Option<OwnedMutexGuard<()>>,
}

impl SpooledUpload {
    fn new(request: &UploadRequest, room: UploadRoom) -> Arc<SpooledUpload> {
        Arc::new(SpooledUpload {
            method: request.method.clone(),
            url: request.url.clone(),
            length: request.length,
            spool: Arc::new(room.spool),
            stored: room.stored,
            delivery: Mutex::default(),
            filling: Arc::default(),
            arrivals: watch::Sender::new(0),
        })
    }

    fn is(&self, request: &UploadRequest) -> bool {
        (&self.method, &self.url, self.length) == (&request.method, &request.url, request.length)
    }

    /// Attaches a flow, and supersedes the previous one.
    async fn taken_up(self: Arc<SpooledUpload>) -> UploadHold {
        let mut number = 0;
        self.arrivals.send_modify(|arrivals| {
            *arrivals += 1;
            number = *arrivals;
        });
        let arrivals = self.arrivals.subscribe();
        let turn = self.filling.clone().lock_owned().await;
        UploadHold {
            upload: self,
            number,
            arrivals,
            turn: Some(turn),
        }
    }
}

impl UploadHold {
    /// Ready when another flow came for the same upload.
    pub(crate) async fn until_superseded(&mut self) {
        let number = self.number;
        if self
            .arrivals
            .wait_for(|arrivals| *arrivals > number)
            .await
            .is_err()
        {
            std::future::pending().await
        }
    }

    /// Records that the spool is complete: later flows need not wait.
    pub(crate) fn set_filled(&mut self) {
        self.turn = None;
    }

    fn is_superseded(&self) -> bool {
        *self.arrivals.borrow() > self.number
    }

    /// Whether the entry is what this flow serves, and no other flow came for it since.
    fn owns(&self, entry: &UploadEntry) -> bool {
        Arc::ptr_eq(&entry.upload, &self.upload) && !self.is_superseded()
    }
}

impl UploadTable {
    /// The upload with this token, as far as it is stored, or a new one in what `room` returns.
    pub(crate) async fn attach(
        &self,
        client: HostKey,
        request: &UploadRequest,
        room: impl FnOnce() -> Result<UploadRoom, ProxRefusal>,
    ) -> Result<UploadHold, ProxRefusal> {
        let Some(token) = &request.token else {
            return Ok(SpooledUpload::new(request, room()?).taken_up().await);
        };
        let key = (client, token.clone());
        if self.awaited.lock().contains(&key) {
            return Err(ProxRefusal::UploadAwaited);
        }
        let known = {
            let mut entries = self.entries.lock();
            let known = entries.get_mut(&key);
            let known = known.filter(|entry| entry.upload.is(request));
            known.map(|entry| {
                entry.left = None;
                entry.upload.clone()
            })
        };
        if let Some(stored) = known.as_ref().and_then(|upload| upload.stored.as_ref()) {
            stored.record_until(None);
        }
        let upload = match known {
            Some(upload) => upload,
            None => {
                let upload = SpooledUpload::new(request, room()?);
                let entry = UploadEntry {
                    upload: upload.clone(),
                    left: None,
                };
                let before = self.entries.lock().insert(key, entry);
                drop(before); // Outside the lock: this frees bytes.
                upload
            }
        };
        Ok(upload.taken_up().await)
    }

    /// Puts an upload into the table that a flow comes for at once.
    pub(crate) fn put(&self, client: HostKey, request: &UploadRequest, room: UploadRoom) {
        let Some(token) = request.token.clone() else {
            return;
        };
        let entry = UploadEntry {
            upload: SpooledUpload::new(request, room),
            left: None,
        };
        let before = self.entries.lock().insert((client, token), entry);
        drop(before); // Outside the lock: this frees bytes.
    }

    /// The version of the note of this request's upload, if the upload is known and nodes share its note.
    pub(crate) fn version_of(&self, client: HostKey, request: &UploadRequest) -> Option<u64> {
        let entries = self.entries.lock();
        let known = entries.get(&(client, request.token.clone()?))?;
        let known = Some(&known.upload).filter(|upload| upload.is(request))?;
        Some(known.stored.as_ref()?.version())
    }

    /// A lock for what is done to find an upload: two flows that come for it find one.
    pub(crate) fn finding(&self, client: HostKey, token: &UploadToken) -> FindingTurn {
        let mut finding = self.finding.lock();
        finding.retain(|_, lock| Arc::strong_count(lock) > 1);
        finding.entry((client, token.clone())).or_default().clone()
    }

    /// Notes an upload that only a bucket has which has not answered yet: its device is to come later.
    pub(crate) fn set_awaited(&self, client: HostKey, request: Option<UploadRequest>) {
        let token = request.and_then(|request| request.token);
        self.awaited
            .lock()
            .extend(token.map(|token| (client, token)));
    }

    /// Forgets which uploads only a bucket has.
    pub(crate) fn clear_awaited(&self) {
        self.awaited.lock().clear();
    }

    /// Whether the upload of this request is known.
    pub(crate) fn has(&self, client: HostKey, request: &UploadRequest) -> bool {
        let Some(token) = request.token.clone() else {
            return false;
        };
        let entries = self.entries.lock();
        let known = entries.get(&(client, token));
        known.is_some_and(|entry| entry.upload.is(request))
    }

    /// Removes an upload whose device has its answer, or gave it up.
    pub(crate) fn forget(&self, client: HostKey, token: &UploadToken, hold: &UploadHold) {
        let key = (client, token.clone());
        let mut entries = self.entries.lock();
        let own = entries.get(&key).is_some_and(|entry| hold.owns(entry));
        let entry = own.then(|| entries.remove(&key));
        drop(entries);
        drop(entry); // Outside the lock: this frees bytes.
    }

    /// Keeps an upload without a flow for `grace`; drops the client's oldest if there are more than
    /// `max`.
    pub(crate) fn retain(
        self: &Arc<UploadTable>,
        client: HostKey,
        token: &UploadToken,
        hold: &UploadHold,
        (grace, max): (Duration, usize),
    ) {
        if grace.is_zero() || max == 0 {
            return self.forget(client, token, hold);
        }
        let key = (client, token.clone());
        let serial = {
            let mut entries = self.entries.lock();
            let serial = next_serial(&entries);
            match entries.get_mut(&key).filter(|entry| hold.owns(entry)) {
                Some(entry) => entry.left = Some(serial),
                None => return,
            }
            serial
        };
        if let Some(stored) = &hold.upload.stored {
            stored.record_until(Some(SystemTime::now() + grace));
        }
        while self.kept_of(client) > max && self.make_room(Some(client)) {}
        self.expire_after(grace, key, serial);
    }

    /// Puts an upload of an earlier process back, which is kept without a flow for `grace`.
    pub(crate) fn restore(
        self: &Arc<UploadTable>,
        client: HostKey,
        request: &UploadRequest,
        room: UploadRoom,
        grace: Duration,
    ) -> Option<Arc<SpooledUpload>> {
        let key = (client, request.token.clone()?);
        let upload = SpooledUpload::new(request, room);
        let mut entries = self.entries.lock();
        let serial = next_serial(&entries);
        let entry = UploadEntry {
            upload: upload.clone(),
            left: Some(serial),
        };
        let before = entries.insert(key.clone(), entry);
        drop(entries);
        drop(before); // Outside the lock: this frees bytes.
        self.expire_after(grace, key, serial);
        Some(upload)
    }

    /// Drops an upload after `grace`, if no flow came for it since it was left with this serial.
    fn expire_after(
        self: &Arc<UploadTable>,
        grace: Duration,
        key: (HostKey, UploadToken),
        serial: u64,
    ) {
        let uploads = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(grace).await;
                let Some(uploads) = uploads.upgrade() else {
                    return;
                };
                let mut entries = uploads.entries.lock();
                let same = |entry: &UploadEntry| entry.left == Some(serial);
                if !entries.get(&key).is_some_and(same) {
                    return;
                }
                // What is on its way to the origin is not broken off for want of patience.
                if entries.get(&key).is_some_and(UploadEntry::may_go) {
                    let entry = entries.remove(&key);
                    drop(entries);
                    drop(entry);
                    return;
                }
            }
        });
    }

    /// Drops the upload, of `client` if given, that was left first, to make room. False if there is
    /// none.
    pub(crate) fn make_room(&self, client: Option<HostKey>) -> bool {
        let mut entries = self.entries.lock();
        let of = |key: &(HostKey, UploadToken)| client.is_none_or(|client| key.0 == client);
        let oldest = (entries.iter())
            .filter(|(key, entry)| of(key) && entry.may_go())
            .min_by_key(|(_, entry)| entry.left)
            .map(|(key, _)| key.clone());
        let dropped = oldest.and_then(|key| entries.remove(&key));
        drop(entries);
        dropped.is_some()
    }

    /// Removes all uploads of a client, who comes back no more. What a flow still has goes with the flow.
    pub(crate) fn discard_client(&self, client: HostKey) {
        let mut entries = self.entries.lock();
        let removed = entries.extract_if(|(owner, _), _| *owner == client);
        let removed: Vec<_> = removed.collect();
        drop(entries);
        drop(removed); // Outside the lock: this frees bytes.
    }

    /// The number of uploads kept without a flow.
    pub(crate) fn retained_count(&self) -> usize {
        let entries = self.entries.lock();
        entries
            .values()
            .filter(|entry| entry.left.is_some())
            .count()
    }

    fn kept_of(&self, client: HostKey) -> usize {
        let entries = self.entries.lock();
        let kept = |(key, entry): &(&(HostKey, UploadToken), &UploadEntry)| {
            key.0 == client && entry.left.is_some()
        };
        entries.iter().filter(kept).count()
    }
}

/// The serial of the upload that is left next.
fn next_serial(entries: &HashMap<(HostKey, UploadToken), UploadEntry>) -> u64 {
    let left = entries.values().filter_map(|entry| entry.left);
    1 + left.max().unwrap_or(0)
}

impl UploadEntry {
    fn may_go(&self) -> bool {
        let delivery = self.upload.delivery.lock();
        self.left.is_some() && delivery.as_ref().is_none_or(UploadDelivery::is_finished)
    }
}
