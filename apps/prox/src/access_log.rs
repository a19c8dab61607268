//! The access log: one JSON object a line for each flow that ended, for those who must keep one.
//!
//! ```text
//!  flow ends ──▶ line ──▶ queue, bounded ──▶ a thread ──▶ FILE, readable by its owner
//!                            │ full, or the disk is: the line is lost and counted, the proxy goes on
//! ```
//!
//! It is written only where the operator asks for it, and says no more than the detail that was chosen.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::counters::{ProxCounters, TrafficDirection};
use crate::flow_report::{FlowLogRecord, ProxFlowReport};

/// Lines that wait to be written; more are lost.
const LINES_MAX: usize = 4_096; // a guess: two seconds of a busy proxy
/// How often the log says that lines are lost.
const WARNING_EVERY: Duration = Duration::from_secs(60);

/// How long the end of a process waits for the log: what reads it may hang.
const FLUSH_WITHIN: Duration = Duration::from_secs(1); // a guess
/// How often a full queue is tried meanwhile.
const FLUSH_EVERY: Duration = Duration::from_millis(10);

/// How much the access log says of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum AccessDetail {
    /// A line says when a flow ended, what kind it was, and how much was transferred: neither who
    /// nor what.
    #[default]
    Counts,
    /// The host of the origin too.
    Origin,
    /// The client and the whole URL too.
    Full,
}

/// A running access log: its detail, and the queue of the thread that writes it.
#[derive(Clone, Debug)]
pub(crate) struct AccessLog {
    detail: AccessDetail,
    lines: SyncSender<AccessMessage>,
    counters: Arc<ProxCounters>,
}

#[derive(Debug)]
enum AccessMessage {
    Line(Vec<u8>),
    /// Opens the file again, because it was renamed.
    Reopen,
    /// Tells when everything before was written.
    Flush(SyncSender<()>),
}

/// Where lines go.
enum AccessSink {
    Stdout,
    File { path: PathBuf, file: File },
}

/// What the thread has.
struct AccessWriter {
    sink: AccessSink,
    counters: Arc<ProxCounters>,
    /// Whether a part of a line may have been written last.
    is_torn: bool,
    warned: Option<Instant>,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// Checks that an access log can be written into this file, which is made if there is none.
///
/// # Errors
/// It cannot be opened.
pub fn check_access_log(path: &Path) -> io::Result<()> {
    open(path).map(drop)
}

impl AccessWriter {
    fn run(mut self, messages: &Receiver<AccessMessage>) {
        while let Ok(message) = messages.recv() {
            match message {
                AccessMessage::Line(line) => self.write(line),
                AccessMessage::Reopen => self.reopen(),
                AccessMessage::Flush(done) => drop(done.send(())),
            }
        }
    }

    fn write(&mut self, mut line: Vec<u8>) {
        if self.is_torn {
            line.insert(0, b'\n');
        }
        let written = match &mut self.sink {
            AccessSink::Stdout => io::stdout()
                .write_all(&line)
                .and_then(|()| io::stdout().flush()),
            AccessSink::File { file, .. } => file.write_all(&line),
        };
        self.is_torn = written.is_err();
        if let Err(error) = written {
            self.counters.on_access_line_lost();
            self.warn(&error);
        }
    }

    fn reopen(&mut self) {
        if let AccessSink::File { path, file } = &mut self.sink {
            match open(path) {
                Ok(new) => *file = new,
                Err(error) => self.warn(&error),
            }
        }
    }

    fn warn(&mut self, error: &io::Error) {
        if self.warned.is_none_or(|at| at.elapsed() >= WARNING_EVERY) {
            self.warned = Some(Instant::now());
            tracing::warn!(%error, "the access log loses lines; the proxy goes on");
        }
    }
}

impl AccessLog {
    /// Starts a log: into a file, which is appended to, or to standard output if `path` is none.
    ///
    /// # Errors
    /// The file cannot be opened, or no thread be started.
    pub(crate) fn start(
        path: Option<&Path>,
        detail: AccessDetail,
        counters: Arc<ProxCounters>,
    ) -> io::Result<AccessLog> {
        let sink = match path {
            None => AccessSink::Stdout,
            Some(path) => AccessSink::File {
                path: path.to_owned(),
                file: open(path)?,
            },
        };
        let (lines, messages) = sync_channel(LINES_MAX);
        let writer = AccessWriter {
            sink,
            counters: counters.clone(),
            is_torn: false,
            warned: None,
        };
        std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || writer.run(&messages))?;
        Ok(AccessLog {
            detail,
            lines,
            counters,
        })
    }

    /// Opens the file again, which was renamed.
    pub(crate) fn reopen(&self) {
        // A full queue is written to the old file, and the next SIGHUP opens the new one.
        let _ = self.lines.try_send(AccessMessage::Reopen);
    }

    /// Waits until all lines so far are written, for a second at most. Blocks.
    pub(crate) fn flush(&self) {
        let until = Instant::now() + FLUSH_WITHIN;
        let (done, flushed) = sync_channel(1);
        let mut message = AccessMessage::Flush(done);
        while let Err(TrySendError::Full(again)) = self.lines.try_send(message) {
            if Instant::now() >= until {
                break;
            }
            message = again;
            std::thread::sleep(FLUSH_EVERY);
        }
        let left = until.saturating_duration_since(Instant::now());
        if flushed.recv_timeout(left).is_err() {
            tracing::warn!("the access log is slow; its last lines may be lost");
        }
    }

    /// Writes the line of a flow that ended. `client`: what the operator calls its client.
    pub(crate) fn write(
        &self,
        client: impl FnOnce() -> String,
        record: &FlowLogRecord,
        report: &ProxFlowReport,
    ) {
        let traffic = &record.traffic;
        let mut line = json!({
            "time": Timestamp::now().to_string(),
            "kind": traffic.kind().as_str(),
            "status": report.status,
            "from": report.served.as_str(),
            "down_bytes": traffic.bytes(TrafficDirection::Down),
            "up_bytes": traffic.bytes(TrafficDirection::Up),
            "lasted_ms": u64::try_from(report.lasted.as_millis()).unwrap_or(u64::MAX),
            "outcome": report.outcome.as_str(),
        });
        let target = record.target.as_deref();
        if self.detail >= AccessDetail::Origin {
            line["origin"] = target.and_then(host_of).map_or(Value::Null, Value::from);
        }
        if self.detail == AccessDetail::Full {
            line["client"] = client().into();
            line["asked"] = report.asked.split(' ').next().unwrap_or_default().into();
            line["url"] = target.map_or(Value::Null, Value::from);
        }
        let line = format!("{line}\n").into_bytes();
        if self.lines.try_send(AccessMessage::Line(line)).is_err() {
            self.counters.on_access_line_lost();
        }
    }
}

/// The host of a URL, or of a host and port.
fn host_of(target: &str) -> Option<String> {
    let url = match target.contains("://") {
        true => url::Url::parse(target),
        false => url::Url::parse(&format!("tunnel://{target}")),
    };
    url.ok()?.host_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_reduced_to_its_host() {
        let host = |target: &str| host_of(target).unwrap();
        assert_eq!(host("https://example.org:8443/a?b=c"), "example.org");
        assert_eq!(host("example.org:443"), "example.org");
        assert_eq!(host("[2001:db8::1]:443"), "[2001:db8::1]");
    }

    #[test]
    fn a_reader_that_hangs_does_not_keep_the_process_from_ending() {
        use std::sync::mpsc::channel;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // It is opened for reading too, so that the log can be opened, and is never read.
        let _pipe = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let log = AccessLog::start(Some(&path), AccessDetail::Full, Arc::default()).unwrap();
        let line = vec![b'x'; 1000];
        let mut lines = 0;
        // Many more than a pipe and the queue hold.
        for _ in 0..10 * LINES_MAX {
            let line = AccessMessage::Line(line.clone());
            lines += usize::from(log.lines.try_send(line).is_ok());
        }
        assert!(lines < 10 * LINES_MAX);
        let (tell, told) = channel();
        std::thread::spawn(move || {
            log.flush();
            tell.send(()).unwrap();
        });
        told.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_disk_that_is_full_costs_lines_and_nothing_else() {
        let counters: Arc<ProxCounters> = Arc::default();
        let path = Path::new("/dev/full");
        let mut writer = AccessWriter {
            sink: AccessSink::File {
                path: path.to_owned(),
                file: open(path).unwrap(),
            },
            counters: counters.clone(),
            is_torn: false,
            warned: None,
        };
        writer.write(b"{}\n".to_vec());
        writer.write(b"{}\n".to_vec());
        assert!(writer.is_torn);
        assert_eq!(counters.access_lines_lost(), 2);
    }
}
