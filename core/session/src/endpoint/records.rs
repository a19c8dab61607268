//! Sessions as records: restored, hibernated, looked up elsewhere, and removed.

use std::ops::Range;

use d2tp_seal::PublicKey;
use d2tp_time::Time;

use super::{Endpoint, HibernateError, UnknownSession};
use crate::hibernated::{HibernatedExpiry, InstanceKey};
use crate::pending_lookup::PendingLookup;
use crate::record::{RecordError, SessionRecord};
use crate::session_id::SessionId;
use crate::session_state::Role;

impl Endpoint {
    /// Restores a device's session from its record, with epochs above all that were used before.
    ///
    /// # Errors
    /// The record is damaged.
    pub fn restore(
        &mut self,
        now: Time,
        record: &[u8],
        epochs: Range<u32>,
    ) -> Result<SessionId, RecordError> {
        let record = SessionRecord::decode(record)?;
        let first = epochs.start.max(record.epoch.saturating_add(1));
        let mut session = self.new_session(
            now,
            record.role,
            record.peer,
            record.instance,
            first..epochs.end,
        );
        session.restore(now, &record);
        let id = self.insert(session);
        // The session's deadlines are timers, with or without a link.
        self.book_changes(id);
        Ok(id)
    }

    /// Adds the record of a hibernated session to a server, if its age is not known.
    ///
    /// # Errors
    /// The record is damaged, or not a server's.
    pub fn adopt(&mut self, record: &[u8]) -> Result<(), RecordError> {
        self.take_in_record(None, &SessionRecord::decode(record)?, record)
    }

    /// Adds a record that its owner has read, as if it had been made now: its deadlines count from
    /// this time.
    ///
    /// # Errors
    /// The record is not a server's.
    pub fn adopt_at(&mut self, now: Time, record: &SessionRecord) -> Result<(), RecordError> {
        self.take_in_record(Some(now), record, &record.encode())
    }

    pub(super) fn take_in_record(
        &mut self,
        since: Option<Time>,
        record: &SessionRecord,
        bytes: &[u8],
    ) -> Result<(), RecordError> {
        if record.role != Role::Responder {
            return Err(RecordError::Damaged);
        }
        self.insert_record((record.peer, record.instance), record, bytes, since);
        Ok(())
    }

    /// Sets whether the owner has records that it has not passed to [`Endpoint::adopt_at`] yet.
    /// While it has, a SYN of an unknown session waits for [`Endpoint::poll_lookup`].
    pub fn set_records_elsewhere(&mut self, elsewhere: bool) {
        self.records_elsewhere = elsewhere;
    }

    /// The next device whose session may be in a record elsewhere. Pass that record, if there is
    /// one, to [`Endpoint::adopt_at`], then call [`Endpoint::finish_lookup`].
    pub fn poll_lookup(&mut self) -> Option<PendingLookup> {
        self.pending_lookups.pop()
    }

    /// Ends a lookup and answers the SYN. The record was adopted before; otherwise the session is
    /// new.
    pub fn finish_lookup(&mut self, now: Time, sought: PendingLookup) {
        let PendingLookup {
            origin,
            syn,
            responder,
            ..
        } = sought;
        self.answer_syn(now, origin, syn, responder);
    }

    /// Ends a lookup that could not be made: the device is told to try later.
    pub fn defer_lookup(&mut self, sought: PendingLookup) {
        self.answer_later(&sought.origin, sought.responder);
    }

    /// Whether the endpoint has this session, awake or hibernated.
    pub fn has_session(&self, peer: PublicKey, instance: u64) -> bool {
        let key = (peer, instance);
        self.by_key.contains_key(&key) || self.hibernated.contains(&key)
    }

    /// The next hibernated session or flow that expired.
    pub fn poll_expired(&mut self) -> Option<HibernatedExpiry> {
        self.hibernated.poll_expired()
    }

    /// Hibernates a session: only its record remains, which is also returned. A server keeps the
    /// record and restores the session when the device connects; a device passes it to
    /// [`Endpoint::restore`].
    ///
    /// # Errors
    /// There is no such session, or one of its flows cannot hibernate
    /// ([`may_hibernate`](crate::session::Session::may_hibernate)).
    pub fn hibernate(&mut self, now: Time, id: SessionId) -> Result<Vec<u8>, HibernateError> {
        let session = self.session(id).ok_or(UnknownSession)?;
        if session.is_unconfirmed() {
            return Err(HibernateError::Unconfirmed);
        }
        // R-SUSPEND-4
        if let Some(flow) = session.unhibernatable_flow() {
            return Err(HibernateError::FlowNotReplayable(flow));
        }
        let mut record = session.record(now, false);
        let (key, role) = ((session.peer(), session.instance()), session.role());
        if self.tentative.contains(&id)
            && let Some(before) = self.hibernated.get(&key).and_then(|a| a.record_at(now))
        {
            // R-RESUME-8: the offset from which sending resumes was not confirmed.
            record.keep_sending_of(&before);
            let ends = |id| !record.flows.iter().any(|f| f.id == id);
            self.hibernated.expire_flows(&key, &before, ends);
        }
        let bytes = record.encode();
        self.drop_session(id);
        if role == Role::Responder {
            self.insert_record(key, &record, &bytes, Some(now));
        }
        Ok(bytes)
    }

    pub(super) fn insert_record(
        &mut self,
        key: InstanceKey,
        record: &SessionRecord,
        bytes: &[u8],
        since: Option<Time>,
    ) {
        let absence = self.config.hibernated_age_max;
        let was = self.hibernated.insert(key, record, bytes, since, absence);
        self.book_flows(key.0, was.map_or(0, |a| a.flows()), record.flows.len());
    }

    /// Removes a hibernated session and its flows.
    pub(super) fn drop_hibernated(&mut self, key: InstanceKey) {
        if let Some(asleep) = self.hibernated.remove(&key) {
            self.book_flows(key.0, asleep.flows(), 0);
        }
    }

    /// R-QUOTA-2: records that a session of this client has `is` flows instead of `was`, and
    /// informs the client's other sessions.
    pub(super) fn book_flows(&mut self, peer: PublicKey, was: usize, is: usize) {
        // A client without awake sessions needs no count.
        if was == is || !self.is_client_awake(peer) {
            return;
        }
        let total = self.flows_by_key.entry(peer).or_default();
        *total = *total + is - was;
        let total = *total;
        if total == 0 {
            self.flows_by_key.remove(&peer);
        }
        for (_, id) in self.by_key.range((peer, 0)..=(peer, u64::MAX)) {
            if let Some(slot) = self.sessions.get_mut(id.index as usize) {
                slot.session.flows_elsewhere = total - slot.flows;
            }
        }
    }
}
