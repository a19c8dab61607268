//! A client of the agent's scheduler, for a program that carries its connections itself.
//!
//! Reports go out in their order, and each waits for its answer; when the agent ends, so does this.

use std::path::{Path, PathBuf};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, timeout};

use crate::schedule_message::{ScheduleAnswer, ScheduleReport};

/// How long an agent may take to answer before this connection to it is given up.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2); // a guess: it is on this machine

/// How often to try to connect to an agent that does not run.
const LOOK_EVERY: Duration = Duration::from_secs(10); // a guess

/// A connection to the agent that schedules this process's connections.
pub(super) struct AgentScheduler {
    reports: mpsc::UnboundedSender<ScheduleReport>,
    answers: watch::Receiver<Option<ScheduleAnswer>>,
    task: JoinHandle<()>,
}

impl AgentScheduler {
    async fn connect(path: &Path) -> Option<AgentScheduler> {
        let opened = timeout(ANSWERED_WITHIN, open(path)).await;
        let (lines, write) = opened.ok()??;
        let (reports, to_send) = mpsc::unbounded_channel();
        let (answered, answers) = watch::channel(None);
        let task = tokio::spawn(exchange(lines, write, to_send, answered));
        Some(AgentScheduler {
            reports,
            answers,
            task,
        })
    }

    /// Whether the agent is gone.
    fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// Sends a report, whose answer arrives later.
    pub(super) fn report(&self, report: ScheduleReport) {
        // An agent that is gone is noticed when it is looked for next.
        let _ = self.reports.send(report);
    }

    /// The latest answer; none before the first.
    pub(super) fn answer(&mut self) -> Option<ScheduleAnswer> {
        self.answers.borrow_and_update().clone()
    }

    /// Waits until there is another answer, or the agent is gone.
    pub(super) async fn changed(&mut self) {
        let _ = self.answers.changed().await;
    }
}

impl Drop for AgentScheduler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The path of the agent's socket, and the connection while there is one.
#[derive(Default)]
pub(super) struct AgentSchedulerFinder {
    current: Option<AgentScheduler>,
    looked_at: Option<Instant>,
}

impl AgentSchedulerFinder {
    /// Connects to the agent whose socket is at `path`; none while it does not run.
    pub(super) async fn find(&mut self, path: Option<&PathBuf>) -> Option<&mut AgentScheduler> {
        if self.current.as_ref().is_some_and(AgentScheduler::is_over) {
            self.current = None;
        }
        let lately = |at: Instant| at.elapsed() < LOOK_EVERY;
        if self.current.is_none()
            && let Some(path) = path
            && !self.looked_at.is_some_and(lately)
        {
            self.looked_at = Some(Instant::now());
            self.current = AgentScheduler::connect(path).await;
        }
        self.current.as_mut()
    }

    /// The current connection.
    pub(super) fn current(&mut self) -> Option<&mut AgentScheduler> {
        self.current.as_mut()
    }
}

type AgentConnectionHalves = (Lines<BufReader<OwnedReadHalf>>, OwnedWriteHalf);

async fn open(path: &Path) -> Option<AgentConnectionHalves> {
    let stream = UnixStream::connect(path).await.ok()?;
    let (read, mut write) = stream.into_split();
    write.write_all(b"{\"do\":\"schedule\"}\n").await.ok()?;
    let mut lines = BufReader::new(read).lines();
    let answer = lines.next_line().await.ok()??;
    let answer: serde_json::Value = serde_json::from_str(&answer).ok()?;
    // An older agent does not know of this.
    (answer["ok"] == true).then_some((lines, write))
}

async fn exchange(
    mut lines: Lines<BufReader<OwnedReadHalf>>,
    mut write: OwnedWriteHalf,
    mut to_send: mpsc::UnboundedReceiver<ScheduleReport>,
    answered: watch::Sender<Option<ScheduleAnswer>>,
) {
    while let Some(report) = to_send.recv().await {
        let line = serde_json::to_string(&report).expect("plain data");
        if write
            .write_all(format!("{line}\n").as_bytes())
            .await
            .is_err()
        {
            return;
        }
        let Ok(Ok(Some(answer))) = timeout(ANSWERED_WITHIN, lines.next_line()).await else {
            return;
        };
        match serde_json::from_str::<ScheduleAnswer>(&answer) {
            Ok(answer) => drop(answered.send_replace(Some(answer))),
            Err(_) => {
                tracing::warn!(%answer, "the agent does not schedule these connections");
                return;
            }
        }
    }
}
