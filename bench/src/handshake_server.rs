//! The serving process of `idle` and `handshake`: the driver's server, with as little around it as a
//! server can have that keeps its flows.
//!
//! ```text
//!  accept ─▶ new: reads who asks (8 bytes) ─┐
//!         ─▶ woke: its memo says who ───────┴▶ keeps it, sends from a source that needs no memory
//! ```
//!
//! On its standard input it is asked for figures, a word a line; it answers with a line of JSON.

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use d2tp_driver::{
    Admission, EndpointConfig, Flow, FlowIo, HibernationOptions, Journal, SendSource, Server,
    ServerOptions,
};
use d2tp_session::PublicKey;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;

use crate::handshake_hosts::{FLOW_BYTES, content, key_of};

/// The server's own number among the keys.
pub const SERVER: u64 = u64::MAX / 8;

/// Options of the hidden verb that runs a server of hibernated sessions.
#[derive(clap::Args)]
pub struct HandshakeServerOptions {
    /// The path of its journal
    #[arg(long)]
    journal: PathBuf,
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    sleep_after_ms: u64,
    /// SYNs per second above which addresses must be proved
    #[arg(long)]
    cookie_above: u32,
}

/// What the server reports once it listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Listening {
    /// The server's address.
    pub address: SocketAddr,
    /// The process id of the server.
    pub pid: u32,
}

/// Figures of the serving process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct HandshakeServerFigures {
    /// Resident memory, all of it.
    pub rss_bytes: u64,
    /// Bytes of resident memory that no file backs.
    pub anon_bytes: u64,
    /// Sessions awake, asleep, half open.
    pub awake: usize,
    /// Hibernated sessions.
    pub asleep: usize,
    /// Half-open handshakes.
    pub half_open: usize,
    /// CPU time used so far.
    pub cpu_s: f64,
    /// Flows accepted so far.
    pub accepted: u64,
    /// Whether everything in the journal has been read.
    pub all_known: bool,
    /// The time since the start when the whole journal had been read.
    pub all_known_s: Option<f64>,
}

struct Pattern(u64);

impl SendSource for Pattern {
    fn poll_read_at(
        &self,
        _: &mut Context<'_>,
        at: u64,
        max: usize,
    ) -> Poll<std::io::Result<Bytes>> {
        let n = FLOW_BYTES.saturating_sub(at).min(max as u64);
        let bytes = content(self.0, at, n as usize);
        Poll::Ready(Ok(bytes.into()))
    }
}

/// Runs the server until it is killed or its input ends.
///
/// # Errors
/// The socket or the journal cannot be opened.
pub fn run(options: &HandshakeServerOptions) -> Result<()> {
    let started = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let journal = Arc::new(Journal::open(&options.journal)?);
        let server = Server::bind_with(
            ServerOptions {
                listen: options.listen,
                key: key_of(SERVER),
                admission: Admission::Anybody,
                config: EndpointConfig {
                    cookie_above: options.cookie_above,
                    // Longer than any run, because an hour of silence is measured.
                    absence_max: d2tp_session::Span::from_secs(24 * 3600),
                    ..EndpointConfig::default()
                },
            },
            HibernationOptions {
                hibernate_after: Some(Duration::from_millis(options.sleep_after_ms)),
                journal: Some(journal),
            },
        )?;
        let server = Arc::new(server);
        say(&Listening {
            address: server.local_addr(),
            pid: std::process::id(),
        })?;
        let accepted = Arc::new(AtomicU64::new(0));
        let known_at = Arc::new(std::sync::OnceLock::new());
        tokio::spawn({
            let (server, known_at) = (server.clone(), known_at.clone());
            async move {
                while !server.knows_all() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                let _ = known_at.set(started.elapsed().as_secs_f64());
            }
        });
        tokio::spawn(serve(server.clone(), accepted.clone()));
        let (asked, mut asks) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                let _ = asked.send(line);
            }
        });
        while let Some(line) = asks.recv().await {
            if line != "figures" {
                bail!("{line:?} is no question");
            }
            let (awake, asleep, half_open) = server.counts();
            let (rss_bytes, anon_bytes) = resident()?;
            say(&HandshakeServerFigures {
                rss_bytes,
                anon_bytes,
                awake,
                asleep,
                half_open,
                cpu_s: cpu_s(),
                accepted: accepted.load(Ordering::Relaxed),
                all_known: server.knows_all(),
                all_known_s: known_at.get().copied(),
            })?;
        }
        Ok(())
    })
}

async fn serve(server: Arc<Server>, accepted: Arc<AtomicU64>) {
    while let Some(flow) = server.accept().await {
        accepted.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(attend(flow));
    }
}

async fn attend(mut flow: Flow) -> Result<()> {
    let memo = flow.memo();
    let woke = memo.is_some();
    let memo = match memo {
        Some(memo) => memo,
        None => {
            let mut asked = Vec::new();
            (&mut flow).take(64).read_to_end(&mut asked).await?;
            Bytes::from(asked)
        }
    };
    let number = u64::from_be_bytes(memo[..].try_into().context("eight bytes")?);
    flow.allow_hibernation(memo);
    let source = Arc::new(Pattern(number));
    if woke {
        flow.resume_source(source);
    } else {
        flow.send_source(source);
    }
    std::future::poll_fn(|cx| flow.poll_finished(cx)).await?;
    Ok(())
}

fn say(what: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(what)?)?;
    out.flush()?;
    Ok(())
}

/// The resident memory of this process: the total, and the part that no file backs.
///
/// # Errors
/// `/proc` cannot be read.
pub fn resident() -> Result<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let of = |name: &str| -> Result<u64> {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        let kib = line.and_then(|l| l.split_whitespace().next());
        Ok(kib
            .with_context(|| format!("no {name} in /proc/self/status"))?
            .parse::<u64>()?
            * 1024)
    };
    Ok((of("VmRSS:")?, of("RssAnon:")?))
}

/// The CPU time of this process so far, user and system.
pub fn cpu_s() -> f64 {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF);
    let seconds = |t: nix::sys::time::TimeVal| t.tv_sec() as f64 + t.tv_usec() as f64 / 1e6;
    usage.map_or(0.0, |u| seconds(u.user_time()) + seconds(u.system_time()))
}

/// The serving process as its parent sees it; killed when it is dropped.
pub struct HandshakeServerProcess {
    child: Child,
    stdin: ChildStdin,
    stdout: std::io::BufReader<ChildStdout>,
    /// The address on which the server listens.
    pub address: SocketAddr,
}

impl HandshakeServerProcess {
    /// Starts a serving process and waits until it listens.
    ///
    /// # Errors
    /// The process failed; its error is on standard error.
    pub fn start(
        journal: &std::path::Path,
        listen: SocketAddr,
        sleep_after: Duration,
        cookie_above: u32,
    ) -> Result<HandshakeServerProcess> {
        let spawn = |mut command: Command| {
            let child = command.spawn();
            child.context("the serving process could not be started")
        };
        HandshakeServerProcess::start_as(spawn, journal, listen, sleep_after, cookie_above)
    }

    /// Starts a serving process with `spawn`.
    ///
    /// # Errors
    /// The same as those of [`HandshakeServerProcess::start`].
    pub fn start_as(
        spawn: impl FnOnce(Command) -> Result<Child>,
        journal: &std::path::Path,
        listen: SocketAddr,
        sleep_after: Duration,
        cookie_above: u32,
    ) -> Result<HandshakeServerProcess> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("rest-serve")
            .arg("--journal")
            .arg(journal)
            .args(["--listen", &listen.to_string()])
            .args(["--sleep-after-ms", &sleep_after.as_millis().to_string()])
            .args(["--cookie-above", &cookie_above.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = spawn(command)?;
        let stdin = child.stdin.take().expect("piped above");
        let mut stdout = std::io::BufReader::new(child.stdout.take().expect("piped above"));
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        let said: Result<Listening, _> = serde_json::from_str(&line);
        let mut serving = HandshakeServerProcess {
            child,
            stdin,
            stdout,
            address: listen,
        };
        serving.address = said
            .context("the serving process ended; its error is above")?
            .address;
        Ok(serving)
    }

    /// The current figures of the process.
    ///
    /// # Errors
    /// The process has ended.
    pub fn figures(&mut self) -> Result<HandshakeServerFigures> {
        writeln!(self.stdin, "figures")?;
        self.stdin.flush()?;
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("the serving process said {line:?}"))
    }

    /// Waits until `so` holds for the figures, at most `patience`.
    ///
    /// # Errors
    /// The process has ended.
    pub fn wait(
        &mut self,
        patience: Duration,
        so: impl Fn(&HandshakeServerFigures) -> bool,
    ) -> Result<(bool, HandshakeServerFigures)> {
        let begun = Instant::now();
        loop {
            let figures = self.figures()?;
            if so(&figures) || begun.elapsed() > patience {
                return Ok((so(&figures), figures));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The public key of the server.
    pub fn key() -> PublicKey {
        key_of(SERVER).public()
    }

    /// Kills the process with SIGKILL, like a crash.
    ///
    /// # Errors
    /// It cannot be killed.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for HandshakeServerProcess {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
