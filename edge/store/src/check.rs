//! What a store must do before records are trusted to it: conditional writes, and keeping what it has.
//!
//! Stores exist that take Redis's commands and ignore their conditions. With one of those two nodes would wake one
//! flow, and a device would get the bytes of both.

use d2tp_driver::{JournalError, JournalSessionKey, OwnershipClaim, PublicKey};

use crate::{CommitCall, StoreInner};

impl StoreInner {
    /// Creates the same session twice, writes it with a stale epoch, and sees that the store refuses both.
    pub(crate) async fn check(&self) -> Result<(), JournalError> {
        self.check_keeps().await?;
        // A key that no device has: of this process alone.
        let mut key = [0xff; 32];
        let name = self.connection.process.as_bytes();
        let of_name = &name[name.len().saturating_sub(16)..];
        key[..of_name.len()].copy_from_slice(of_name);
        let key = JournalSessionKey {
            peer: PublicKey(key),
            instance: 0,
        };
        let checked = self.check_conditions(key).await;
        let removed = self
            .connection
            .remove(&[self.key(b"s", &key.bytes()), self.key(b"n", &key.bytes())])
            .await;
        let removed = match removed {
            Ok(()) => {
                let ends = self.key(b"d", b"");
                self.connection.remove_member(&ends, &key.bytes()).await
            }
            error => error,
        };
        checked.and(removed)
    }

    async fn check_conditions(&self, key: JournalSessionKey) -> Result<(), JournalError> {
        let ours = &self.connection.process;
        let untrusted = |what: &str| {
            self.connection.error(format!(
                "{what}: it does not honour conditional writes, so two nodes could wake one download. Use Redis 7, \
                 Valkey, or another that does"
            ))
        };
        let is_owned = |claim: &OwnershipClaim| matches!(claim, OwnershipClaim::Owned { .. });
        if !is_owned(&self.claim(key, 1, ours, "check").await?) {
            return Err(untrusted("refused to create a record"));
        }
        if is_owned(&self.claim(key, 1, "another", "check").await?) {
            return Err(untrusted("let a record be created twice"));
        }
        if !is_owned(&self.claim(key, 2, "another", "check").await?) {
            return Err(untrusted("refused a newer owner"));
        }
        let batch = {
            let mut batch = d2tp_driver::JournalBatch::default();
            batch.sessions.insert(key, None);
            batch
        };
        let stale: Vec<CommitCall> = vec![self.session_call(key, 1, &batch)];
        if self.commit(stale).await?.lost != [key] {
            return Err(untrusted("took a write with a stale epoch"));
        }
        let note = |value| self.note_call(&key.bytes(), Some(None), Some(value));
        if !self.change_note(&note(b"1"), false).await? {
            return Err(untrusted("refused to create a note"));
        }
        if self.change_note(&note(b"2"), false).await? {
            return Err(untrusted("let a note be created twice"));
        }
        Ok(())
    }

    /// Sees that the store does not drop records by itself.
    async fn check_keeps(&self) -> Result<(), JournalError> {
        let memory = self.connection.info("memory").await?;
        let told = |info: &str, name: &str| {
            let lines = info.lines();
            let mut fields = lines.filter_map(|line| line.trim().split_once(':'));
            fields
                .find(|(field, _)| *field == name)
                .map(|(_, value)| value.to_owned())
        };
        let max = told(&memory, "maxmemory").unwrap_or_default();
        let policy = told(&memory, "maxmemory_policy").unwrap_or_default();
        if max != "0" && !policy.is_empty() && policy != "noeviction" {
            return Err(self.connection.error(format!(
                "drops records when it is full (maxmemory-policy {policy}); set it to noeviction"
            )));
        }
        let disk = self.connection.info("persistence").await?;
        if told(&disk, "aof_enabled").as_deref() == Some("0") {
            let store = self.connection.place();
            tracing::warn!(
                store,
                "the store writes no append-only file: when it is restarted, downloads of absent devices may be lost. \
                 Set `appendonly yes`"
            );
        }
        Ok(())
    }
}
