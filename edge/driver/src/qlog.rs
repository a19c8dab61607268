//! qlog: logs of sessions, one file each, for people and tools (draft-ietf-quic-qlog-main-schema).
//!
//! ```text
//!  core: TraceRecord ─▶ engine: QlogFeed ─▶ bounded queue ─▶ writer thread ─▶ DIR/TIME-ID.sqlog
//!                                 └ full: counted, and the count is written when there is room
//! ```
//!
//! The writer's thread formats the records. A full disk or a missing folder stops the log with one
//! warning, and never affects the transfer. `docs/qlog.md` lists the events.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use d2tp_session::{Endpoint, LinkId, Role, SessionId, Time, TraceLevel, TraceRecord};
use serde_json::{Value, json};

use crate::qlog_events::qlog_event;

/// The most records of all sessions that wait to be written. Newer ones are dropped and counted.
pub const QLOG_QUEUE_MAX: usize = 16_384;
/// How long a line may wait in memory.
const FLUSH_EVERY: Duration = Duration::from_millis(500);
/// How long a program waits for the log to be written when it ends.
const FINISH_MAX: Duration = Duration::from_secs(2);

/// Opens the writer of one session's log, given the file name it would have.
pub type OpenQlogFile = Box<dyn FnMut(&str) -> io::Result<Box<dyn Write + Send>> + Send>;

/// Logs of sessions.
///
/// ```no_run
/// # use d2tp_driver::*;
/// # async fn f(device: Device) -> std::io::Result<()> {
/// let qlog = Qlog::in_folder("/tmp/qlog".as_ref(), TraceLevel::Sampled)?;
/// device.log_to(&qlog); // before the device is given links, to see everything
/// // … and at the end of the program:
/// qlog.finish();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Qlog {
    queue: SyncSender<QlogMessage>,
    level: TraceLevel,
    feeds: AtomicU64,
}

/// A session of one of the endpoints that log here.
type QlogSessionKey = (u64, SessionId);

enum QlogMessage {
    Begin {
        key: QlogSessionKey,
        role: Role,
        peer: String,
    },
    Record {
        key: QlogSessionKey,
        at: Time,
        record: TraceRecord,
    },
    Note {
        key: QlogSessionKey,
        at: Time,
        name: String,
        data: Value,
    },
    Dropped {
        key: QlogSessionKey,
        at: Time,
        count: u64,
    },
    Named {
        feed: u64,
        link: LinkId,
        name: String,
    },
    End {
        key: QlogSessionKey,
    },
    Finish {
        done: SyncSender<()>,
    },
}

impl Qlog {
    /// Logs into files of a folder, which is created if it does not exist.
    ///
    /// # Errors
    /// The folder cannot be created, or no thread can be started.
    pub fn in_folder(folder: &Path, level: TraceLevel) -> io::Result<Arc<Qlog>> {
        std::fs::create_dir_all(folder)?;
        let folder: PathBuf = folder.to_owned();
        let open: OpenQlogFile = Box::new(move |name| {
            let file = std::fs::File::create_new(folder.join(name))?;
            Ok(Box::new(file) as Box<dyn Write + Send>)
        });
        Qlog::with_writers(open, level)
    }

    /// Creates a log whose writers `open` provides.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn with_writers(open: OpenQlogFile, level: TraceLevel) -> io::Result<Arc<Qlog>> {
        let (queue, messages) = sync_channel(QLOG_QUEUE_MAX);
        std::thread::Builder::new()
            .name("qlog".to_owned())
            .spawn(move || QlogWriter::new(open).run(&messages))?;
        Ok(Arc::new(Qlog {
            queue,
            level,
            feeds: AtomicU64::new(0),
        }))
    }

    /// Waits for a short time until everything logged so far is written.
    pub fn finish(&self) {
        let (done, wait) = sync_channel(1);
        if self.queue.send(QlogMessage::Finish { done }).is_ok() {
            let _ = wait.recv_timeout(FINISH_MAX);
        }
    }

    pub(crate) fn level(&self) -> TraceLevel {
        self.level
    }

    pub(crate) fn feed(self: &Arc<Qlog>) -> QlogFeed {
        QlogFeed {
            log: self.clone(),
            number: self.feeds.fetch_add(1, Ordering::Relaxed),
            begun: BTreeSet::new(),
            dropped: BTreeMap::new(),
        }
    }
}

/// The source of log records of one endpoint.
#[derive(Debug)]
pub(crate) struct QlogFeed {
    log: Arc<Qlog>,
    number: u64,
    begun: BTreeSet<SessionId>,
    dropped: BTreeMap<SessionId, u64>,
}

impl QlogFeed {
    fn put(&self, message: QlogMessage) -> bool {
        self.log.queue.try_send(message).is_ok()
    }

    /// Begins the log of a session.
    pub(crate) fn begin(&mut self, id: SessionId, role: Role, peer: String) {
        if !self.begun.contains(&id) {
            let key = (self.number, id);
            // Without its first line a file is not valid: try again at the next record.
            if self.put(QlogMessage::Begin { key, role, peer }) {
                self.begun.insert(id);
            }
        }
    }

    fn enqueue(&mut self, id: SessionId, at: Time, message: QlogMessage) {
        let key = (self.number, id);
        let behind = self.dropped.get(&id).copied();
        if let Some(count) = behind {
            if !self.put(QlogMessage::Dropped { key, at, count }) {
                self.dropped.insert(id, count + 1);
                return;
            }
            self.dropped.remove(&id);
        }
        if !self.put(message) {
            *self.dropped.entry(id).or_default() += 1;
        }
    }

    pub(crate) fn note(&mut self, id: SessionId, at: Time, name: String, data: Value) {
        let key = (self.number, id);
        self.enqueue(
            id,
            at,
            QlogMessage::Note {
                key,
                at,
                name,
                data,
            },
        );
    }

    pub(crate) fn name_link(&self, link: LinkId, name: &str) {
        let (feed, name) = (self.number, name.to_owned());
        self.put(QlogMessage::Named { feed, link, name });
    }

    pub(crate) fn end(&mut self, id: SessionId) {
        let key = (self.number, id);
        self.dropped.remove(&id);
        if self.begun.remove(&id) {
            self.put(QlogMessage::End { key });
        }
    }

    /// Queues the core's new trace records.
    pub(crate) fn drain(&mut self, core: &mut Endpoint) {
        while let Some((id, at, record)) = core.poll_trace() {
            if let Some(session) = core.session(id) {
                self.begin(id, session.role(), session.peer().to_string());
            }
            let key = (self.number, id);
            let over = matches!(
                record,
                TraceRecord::Event(d2tp_session::SessionEvent::Closed(_))
            );
            self.enqueue(id, at, QlogMessage::Record { key, at, record });
            if over {
                self.end(id);
            }
        }
    }
}

/// One session's file.
struct QlogFile {
    out: BufWriter<Box<dyn Write + Send>>,
    begun: Option<Time>,
}

struct QlogWriter {
    open: OpenQlogFile,
    logs: BTreeMap<QlogSessionKey, QlogFile>,
    names: BTreeMap<(u64, LinkId), String>,
    warned: bool,
}

impl QlogWriter {
    fn new(open: OpenQlogFile) -> QlogWriter {
        QlogWriter {
            open,
            logs: BTreeMap::new(),
            names: BTreeMap::new(),
            warned: false,
        }
    }

    fn run(&mut self, messages: &Receiver<QlogMessage>) {
        let mut unwritten = false;
        loop {
            let message = if unwritten {
                messages.recv_timeout(FLUSH_EVERY)
            } else {
                // Nothing is waiting to be written, so no timeout is needed.
                messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match message {
                Ok(message) => {
                    self.take(message);
                    unwritten = true;
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.flush();
                    unwritten = false;
                }
                Err(RecvTimeoutError::Disconnected) => return self.flush(),
            }
        }
    }

    fn take(&mut self, message: QlogMessage) {
        match message {
            QlogMessage::Begin { key, role, peer } => self.begin(key, role, &peer),
            QlogMessage::Named { feed, link, name } => drop(self.names.insert((feed, link), name)),
            QlogMessage::Record { key, at, record } => {
                let name_of = |link: LinkId| self.names.get(&(key.0, link)).cloned();
                let (name, data) = qlog_event(&record, &name_of);
                self.line(key, at, &name, &data);
            }
            QlogMessage::Note {
                key,
                at,
                name,
                data,
            } => self.line(key, at, &name, &data),
            QlogMessage::Dropped { key, at, count } => {
                self.line(key, at, "d2tp:events_dropped", &json!({ "count": count }));
            }
            QlogMessage::End { key } => {
                if let Some(mut log) = self.logs.remove(&key)
                    && let Err(error) = log.out.flush()
                {
                    self.warn(&error);
                }
            }
            QlogMessage::Finish { done } => {
                self.flush();
                let _ = done.send(());
            }
        }
    }

    fn begin(&mut self, key: QlogSessionKey, role: Role, peer: &str) {
        let wall = jiff::Timestamp::now();
        let mut id = [0; 4];
        // The file system refuses a name that exists, so the randomness need not be strong.
        let _ = aws_lc_rs::rand::fill(&mut id);
        let name = format!(
            "{}-{:08x}.sqlog",
            wall.strftime("%Y%m%dT%H%M%SZ"),
            u32::from_be_bytes(id)
        );
        let out = match (self.open)(&name) {
            Ok(out) => out,
            Err(error) => return self.warn(&error),
        };
        self.logs.insert(
            key,
            QlogFile {
                out: BufWriter::new(out),
                begun: None,
            },
        );
        let point = match role {
            Role::Initiator => "client",
            Role::Responder => "server",
        };
        self.put(
            key,
            &json!({
                "file_schema": "urn:ietf:params:qlog:file:sequential",
                "serialization_format": "application/qlog+json-seq",
                "title": "D2TP session",
                "event_schemas": ["urn:cedos:qlog:events:d2tp"],
                "trace": {
                    "vantage_point": { "name": "cedos", "type": point },
                    "common_fields": {
                        "time_format": "relative_to_epoch",
                        "reference_time": {
                            "clock_type": "monotonic",
                            "epoch": "unknown",
                            "wall_clock_time": wall.to_string(),
                        },
                        "group_id": peer,
                    },
                },
            }),
        );
    }

    fn line(&mut self, key: QlogSessionKey, at: Time, name: &str, data: &Value) {
        let Some(log) = self.logs.get_mut(&key) else {
            return;
        };
        let begun = *log.begun.get_or_insert(at);
        let time = at.since(begun).as_secs_f64() * 1e3;
        self.put(key, &json!({ "time": time, "name": name, "data": data }));
    }

    /// Writes one record of a JSON text sequence (RFC 7464 §2.2).
    fn put(&mut self, key: QlogSessionKey, record: &Value) {
        let Some(log) = self.logs.get_mut(&key) else {
            return;
        };
        let written = log
            .out
            .write_all(b"\x1e")
            .and_then(|()| serde_json::to_writer(&mut log.out, record).map_err(io::Error::from))
            .and_then(|()| log.out.write_all(b"\n"));
        if let Err(error) = written {
            self.give_up(key, &error);
        }
    }

    fn flush(&mut self) {
        let keys: Vec<QlogSessionKey> = self.logs.keys().copied().collect();
        for key in keys {
            if let Some(log) = self.logs.get_mut(&key)
                && let Err(error) = log.out.flush()
            {
                self.give_up(key, &error);
            }
        }
    }

    /// Stops writing to a file that cannot be written.
    fn give_up(&mut self, key: QlogSessionKey, error: &io::Error) {
        if let Some(log) = self.logs.remove(&key) {
            // The buffer is discarded, because writing it is what failed.
            drop(log.out.into_parts());
        }
        self.warn(error);
    }

    fn warn(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(%error, "cannot write a qlog; its session continues without");
        }
    }
}
