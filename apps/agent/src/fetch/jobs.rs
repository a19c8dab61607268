//! Transfers in the background: those of `cedos get --detach` and of the agent, and what `ls`,
//! `status` and `cancel` know of them where no agent runs.
//!
//! ```text
//! $XDG_STATE_HOME/cedos/get/7/  job.json   what was asked for, never credentials
//!                               lock       held while it runs; its process id is in it
//!                               state.json the last event; replaced as a whole
//!                               log        what the download would have said on a terminal
//!                               order.json of the agent's: the whole order (agent/queue.rs)
//! $XDG_STATE_HOME/cedos/get/cleared  the highest number when `ls --clear` forgot transfers
//! $XDG_STATE_HOME/cedos/get/lock  held while an agent has them; its process id is in it
//! ```
//!
//! Without an agent each is a process in a session of its own, so that no terminal takes it along;
//! after a restart of the machine nothing runs, and the same command continues.

mod background_process;

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::ffi::OsString;

use super::outcome::TransferExit;
pub(crate) use super::state_directory::replace;
pub use super::state_directory::state_directory;
use crate::order::TransferVerb;

pub use background_process::{BackgroundProcess, LastProgress};

/// The environment variable that makes a process a background download: the path of its folder.
const FOLDER_VARIABLE: &str = "CEDOS_JOB";

/// The file with a transfer's order, in its folder.
pub(crate) const ORDER: &str = "order.json";

/// The file with the highest number when downloads were last forgotten.
const LAST_CLEARED: &str = "cleared";

/// Ended downloads that are still listed; older ones are removed.
const ENDED_KEPT_MAX: usize = 100; // a guess

/// The most bytes of a command line for a background process.
const ARGUMENTS_BYTES_MAX: u64 = 1 << 20;

/// How long a background process may take to start.
const BEGIN_MAX: Duration = Duration::from_secs(30); // a guess: a machine under load

/// How long a cancelled download may take to save its part.
const CANCEL_MAX: Duration = Duration::from_secs(30); // a guess: a sync on a slow disk

/// How long to wait for a lock that others hold while they check it.
const LOCK_MAX: Duration = Duration::from_secs(2); // a guess: a machine under load

/// The interval between reads of another process's file.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The request of a background job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobRequest {
    /// The direction of the transfer.
    #[serde(default = "get")]
    pub verb: TransferVerb,
    /// The URL, without credentials.
    pub url: String,
    /// The file, as an absolute path.
    pub file: PathBuf,
    /// When the job was requested.
    pub since: String,
    /// The time of the deadline.
    pub deadline: Option<String>,
}

/// The direction if the request names none.
fn get() -> TransferVerb {
    TransferVerb::Get
}

/// A background job, as described by its folder.
#[derive(Debug)]
pub struct BackgroundJob {
    /// The job's number.
    pub id: u64,
    /// The request of the job.
    pub request: JobRequest,
    /// The last event; null before the first.
    pub event: Value,
    /// The process that runs the job: its own, or the agent.
    pub pid: Option<i32>,
    folder: PathBuf,
}

/// The state of a background job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Bytes are arriving, or will soon.
    Running,
    /// Nothing moves; the event has the reason.
    Waiting,
    /// The object is complete.
    Done,
    /// The transfer failed.
    Failed,
    /// The user cancelled the job; it can be continued.
    Cancelled,
    /// The user paused the job.
    Paused,
    /// The job recurs, and its next run is to come.
    Scheduled,
    /// The job continues when the agent runs.
    Queued,
    /// The process is gone without a final event: it was killed, or the machine restarted.
    Gone,
}

impl BackgroundJob {
    /// The state of the job.
    pub fn state(&self) -> JobState {
        match (self.event["event"].as_str(), self.pid) {
            (Some("done"), _) => JobState::Done,
            (Some("error"), _) if self.event["exit"] == TransferExit::Cancelled as u8 => {
                JobState::Cancelled
            }
            (Some("error"), _) => JobState::Failed,
            (Some("paused"), _) => JobState::Paused,
            (Some("scheduled"), _) => JobState::Scheduled,
            (Some("queued"), Some(_)) => JobState::Queued,
            (_, None) if self.belongs_to_agent() => JobState::Queued,
            (_, None) => JobState::Gone,
            (Some("waiting"), _) => JobState::Waiting,
            _ => JobState::Running,
        }
    }

    /// Whether the job has reported its last event.
    pub fn has_ended(&self) -> bool {
        use JobState::{Cancelled, Done, Failed};
        matches!(self.state(), Done | Failed | Cancelled)
    }

    /// The job as JSON, for `cedos ls` and its users.
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "standing": self.state(),
            "reason": self.event["reason"],
            "verb": self.request.verb,
            "url": self.request.url,
            "file": self.request.file,
            "since": self.request.since,
            "deadline": self.request.deadline,
            "mode": self.event["mode"],
            "bytes": self.event["bytes"],
            "length": self.event["length"],
            "promise": self.event["promise"],
            "log": self.log_path().exists().then(|| self.log_path()),
            "pid": self.pid,
            "last": self.event,
        })
    }

    /// Whether the job is one of the agent's.
    pub fn belongs_to_agent(&self) -> bool {
        self.folder.join(ORDER).exists()
    }

    /// Whether the job's process may not have taken its lock yet.
    fn may_be_starting(&self) -> bool {
        let made = std::fs::metadata(self.folder.join("job.json")).and_then(|m| m.modified());
        self.event.is_null()
            && made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age < BEGIN_MAX))
    }

    /// The path of the job's log for users.
    pub fn log_path(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// Asks it to stop and waits until it has.
    ///
    /// # Errors
    /// It does not run, or does not stop.
    pub fn cancel(&self) -> anyhow::Result<()> {
        let pid = match (self.belongs_to_agent(), self.pid) {
            (true, None) => bail!(
                "transfer {} belongs to the agent, which is not running",
                self.id
            ),
            (true, Some(pid)) => bail!(
                "transfer {} belongs to the agent in process {pid}, but $CEDOS_AGENT names another",
                self.id
            ),
            (false, None) => bail!("download {} is not running any more", self.id),
            (false, Some(pid)) => pid,
        };
        kill(Pid::from_raw(pid), Signal::SIGTERM)
            .with_context(|| format!("cannot stop process {pid}"))?;
        let begun = Instant::now();
        while running(&self.folder).is_some() {
            if begun.elapsed() > CANCEL_MAX {
                bail!("process {pid} was asked to stop and is still running; `kill {pid}` ends it");
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

/// The directory with the folders of jobs.
pub(crate) fn jobs_directory() -> anyhow::Result<PathBuf> {
    state_directory().map(|state| state.join("get"))
}

/// All downloads there are, oldest first.
///
/// # Errors
/// The state cannot be read.
pub fn list() -> anyhow::Result<Vec<BackgroundJob>> {
    let root = jobs_directory()?;
    let entries = match std::fs::read_dir(&root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(anyhow!("cannot read {}: {error}", root.display())),
    };
    let mut jobs: Vec<BackgroundJob> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|id: u64| read(&root, id))
        .collect();
    jobs.sort_by_key(|job| job.id);
    Ok(jobs)
}

/// The download of this number.
///
/// # Errors
/// There is none.
pub fn find(id: u64) -> anyhow::Result<BackgroundJob> {
    read(&jobs_directory()?, id)
        .with_context(|| format!("there is no download {id}; `cedos ls` lists them"))
}

fn read(root: &Path, id: u64) -> Option<BackgroundJob> {
    let folder = root.join(id.to_string());
    let json = |name: &str| std::fs::read(folder.join(name)).ok();
    let asked = serde_json::from_slice(&json("job.json")?).ok()?;
    // The process first: if it ends in between, its last word is there.
    let pid = match folder.join(ORDER).exists() {
        true => running(root),
        false => running(&folder),
    };
    let event = json("state.json").and_then(|text| serde_json::from_slice(&text).ok());
    Some(BackgroundJob {
        id,
        request: asked,
        event: event.unwrap_or(Value::Null),
        pid,
        folder,
    })
}

/// Takes the lock of the agent whose transfers are in this user's state directory.
///
/// # Errors
/// The state directory is not known, or another agent holds the lock.
pub(crate) fn claim_all() -> anyhow::Result<File> {
    let root = jobs_directory()?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&root)
        .with_context(|| format!("cannot make {}", root.display()))?;
    let mut lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(root.join("lock"))?;
    // Somebody who looks holds it for a moment, never longer.
    let begun = Instant::now();
    while lock.try_lock().is_err() {
        if begun.elapsed() > LOCK_MAX {
            bail!("another agent has the transfers in {}", root.display());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    lock.set_len(0)?;
    write!(lock, "{}", std::process::id())?;
    Ok(lock)
}

/// The process that holds the lock.
fn running(folder: &Path) -> Option<i32> {
    let mut lock = File::open(folder.join("lock")).ok()?;
    match lock.try_lock_shared() {
        Ok(()) => None,
        Err(_) => {
            let mut text = String::new();
            lock.read_to_string(&mut text).ok()?;
            text.trim().parse().ok()
        }
    }
}

/// Starts `arguments` (those of this process, less `--detach`) as a process of its own, and returns
/// once it has begun or failed to.
///
/// # Errors
/// It cannot be started, or says nothing.
pub fn start(asked: &JobRequest, arguments: &[OsString]) -> anyhow::Result<BackgroundJob> {
    let root = jobs_directory()?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&root)
        .with_context(|| format!("cannot make {}", root.display()))?;
    remove_old(&root);
    let id = claim(&root)?;
    let folder = root.join(id.to_string());
    replace(&folder.join("job.json"), asked)?;
    let log = OpenOptions::new()
        .create_new(true)
        .append(true)
        .mode(0o600)
        .open(folder.join("log"))?;
    let mut child = Command::new(std::env::current_exe()?)
        .env(FOLDER_VARIABLE, &folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("cannot start a process in the background")?;
    // Not as its command line: that everybody on this machine can read for as long as it runs, and
    // there may be credentials in it.
    let told: Vec<&[u8]> = arguments.iter().map(|a| a.as_bytes()).collect();
    let mut pipe = child.stdin.take().context("no pipe to it")?;
    pipe.write_all(&told.join(&0))?;
    drop(pipe);
    until_begun(&mut child, &folder)?;
    read(&root, id).context("its state is gone")
}

fn until_begun(child: &mut Child, folder: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !folder.join("state.json").exists() {
        if let Some(status) = child.try_wait()? {
            // It may have said why a moment ago.
            if folder.join("state.json").exists() {
                return Ok(());
            }
            let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
            let _ = std::fs::remove_dir_all(folder);
            let said = log.trim().trim_start_matches("cedos get: ");
            bail!("it did not start ({status}): {said}");
        }
        if begun.elapsed() > BEGIN_MAX {
            bail!(
                "it has not started after {BEGIN_MAX:?}; see {}",
                folder.join("log").display()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Creates the folder of the next number.
pub(crate) fn claim(root: &Path) -> anyhow::Result<u64> {
    loop {
        let last = list()?.last().map_or(0, |job| job.id);
        let last = last.max(last_cleared(root));
        for id in last + 1..last + 100 {
            match DirBuilder::new()
                .mode(0o700)
                .create(root.join(id.to_string()))
            {
                Ok(()) => return Ok(id),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => bail!("cannot make a folder in {}: {error}", root.display()),
            }
        }
    }
}

/// Forgets the downloads that have ended or are gone. Returns them. Those of an agent that runs are its own
/// to forget.
///
/// # Errors
/// The state cannot be read or changed.
pub fn clear() -> anyhow::Result<Vec<BackgroundJob>> {
    clear_with(&[])
}

/// Forgets the downloads that have ended or are gone, and `ended` of the agent that calls this.
pub(crate) fn clear_with(ended: &[u64]) -> anyhow::Result<Vec<BackgroundJob>> {
    let root = jobs_directory()?;
    let all = list()?;
    let Some(last) = all.last().map(|job| job.id) else {
        return Ok(all);
    };
    // A number that was forgotten is not given again: somebody may still mean the old one.
    let last = last.max(last_cleared(&root));
    replace(&root.join(LAST_CLEARED), &last)
        .with_context(|| format!("cannot write into {}", root.display()))?;
    let mut cleared = Vec::new();
    for job in all {
        let is_over = match (job.belongs_to_agent(), job.state()) {
            (true, _) if job.pid.is_some() => ended.contains(&job.id),
            (_, JobState::Gone) => !job.may_be_starting(),
            _ => job.has_ended(),
        };
        if is_over {
            std::fs::remove_dir_all(&job.folder)
                .with_context(|| format!("cannot remove {}", job.folder.display()))?;
            cleared.push(job);
        }
    }
    Ok(cleared)
}

fn last_cleared(root: &Path) -> u64 {
    let text = std::fs::read_to_string(root.join(LAST_CLEARED)).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

pub(crate) fn remove_old(root: &Path) {
    let ended: Vec<BackgroundJob> = list()
        .unwrap_or_default()
        .into_iter()
        .filter(|job| {
            use JobState::{Cancelled, Done, Failed, Gone};
            matches!(job.state(), Done | Failed | Cancelled | Gone)
        })
        .collect();
    let surplus = ended.len().saturating_sub(ENDED_KEPT_MAX);
    for job in &ended[..surplus] {
        let _ = std::fs::remove_dir_all(root.join(job.id.to_string()));
    }
}

/// The command line that was handed over to this process, if it is a background download.
pub fn handed_over_arguments() -> Option<Vec<OsString>> {
    std::env::var_os(FOLDER_VARIABLE)?;
    let mut bytes = Vec::new();
    let stdin = io::stdin().lock();
    stdin
        .take(ARGUMENTS_BYTES_MAX)
        .read_to_end(&mut bytes)
        .ok()?;
    let arguments = bytes.split(|byte| *byte == 0);
    Some(arguments.map(|a| OsString::from_vec(a.to_vec())).collect())
}

/// Whether this process is a background download.
pub fn is_in_background() -> bool {
    std::env::var_os(FOLDER_VARIABLE).is_some()
}

/// Whether SIGHUP is ignored, as under nohup.
pub fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Bit n-1 is signal n (proc(5)).
    mask.is_some_and(|mask| mask >> (Signal::SIGHUP as u32 - 1) & 1 == 1)
}
