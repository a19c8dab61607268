//! This process as a download in the background, which stores its events for commands that list it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use nix::unistd::setsid;
use serde_json::Value;

use super::{FOLDER_VARIABLE, replace};
use crate::fetch::report::{TransferEvent, TransferObserver, print_stderr};

/// This process as a background download: holds the job's lock and saves events.
pub struct BackgroundProcess {
    folder: PathBuf,
    _lock: File,
    memory: LastProgress,
}

/// Fields of earlier events that later ones lack: bytes, length, and bytes by link.
#[derive(Debug, Default)]
pub struct LastProgress {
    latest_fields: serde_json::Map<String, Value>,
}

impl LastProgress {
    /// The fields that are carried over from one event to the next.
    const FIELDS: [&str; 5] = ["bytes", "length", "bytes_by_link", "promise", "mode"];

    /// The fields of an event that an earlier process saved.
    pub fn of(event: &Value) -> LastProgress {
        let mut memory = LastProgress::default();
        memory.complete(event.clone());
        memory
    }

    /// Adds the missing fields to an event.
    pub fn complete(&mut self, mut event: Value) -> Value {
        let Some(fields) = event.as_object_mut() else {
            return event;
        };
        // The first event has the bytes of earlier runs; a report has both.
        if let (Some(held), None) = (fields.get("held_bytes").cloned(), fields.get("bytes")) {
            fields.insert("bytes".to_owned(), held);
        }
        for name in LastProgress::FIELDS {
            match fields.get(name) {
                Some(value) if !value.is_null() => {
                    self.latest_fields.insert(name.to_owned(), value.clone());
                }
                _ => {
                    if let Some(value) = self.latest_fields.get(name) {
                        fields.insert(name.to_owned(), value.clone());
                    }
                }
            }
        }
        event
    }
}

impl BackgroundProcess {
    /// Leaves the terminal and takes the lock, if this process is one.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn claim() -> io::Result<Option<BackgroundProcess>> {
        let Some(folder) = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from) else {
            return Ok(None);
        };
        // No terminal, no signal of one. Fails only for who leads a group already.
        let _ = setsid();
        let mut lock = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(folder.join("lock"))?;
        // Somebody who looks holds it for a moment, never longer.
        lock.lock()?;
        write!(lock, "{}", std::process::id())?;
        Ok(Some(BackgroundProcess {
            folder,
            _lock: lock,
            memory: LastProgress::default(),
        }))
    }
}

impl TransferObserver for BackgroundProcess {
    fn on_event(&mut self, event: &TransferEvent) {
        // What `status` shows is where it stands; what happened in passing is in the log.
        if matches!(event, TransferEvent::Note { .. }) {
            return;
        }
        let Ok(event) = serde_json::to_value(event) else {
            return;
        };
        let event = self.memory.complete(event);
        if let Err(error) = replace(&self.folder.join("state.json"), &event) {
            print_stderr(&format!("note: cannot save the state: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_wait_is_told_with_the_bytes_that_are_there() {
        let mut memory = LastProgress::default();
        memory.complete(json!({"event": "begun", "held_bytes": 3}));
        let waiting = memory.complete(json!({"event": "waiting", "reason": "no_path"}));
        assert_eq!(waiting["bytes"], 3);
        memory.complete(json!({"event": "progress", "bytes": 5, "length": 9}));
        let waiting = memory.complete(json!({"event": "waiting", "length": null}));
        assert_eq!(
            (&waiting["bytes"], &waiting["length"]),
            (&json!(5), &json!(9))
        );
        let done = memory.complete(json!({"event": "done", "held_bytes": 3, "bytes": 9}));
        assert_eq!(done["bytes"], 9);
        let again = LastProgress::of(&waiting).complete(json!({"event": "begun", "held_bytes": 4}));
        assert_eq!((&again["bytes"], &again["length"]), (&json!(4), &json!(9)));
    }
}
