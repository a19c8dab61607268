//! A machine of somebody who listens to podcasts, and the feeds and episodes of a scripted origin, for the tests of
//! podcasts.

use std::path::{Path, PathBuf};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, object, reply};
use cedos_lab_rig::program::{AgentProcess, CedosRun, cedos, ended, pid_of};
use nix::unistd::Pid;
use serde_json::Value;

/// Bytes of an episode.
pub const BYTES: usize = 300_000;
/// The `ETag` of feeds and episodes.
pub const TAG: &str = "\"v1\"";

/// A user's machine with an agent.
pub struct Listener {
    folder: tempfile::TempDir,
    agent: Option<AgentProcess>,
}

impl Listener {
    /// A machine with an agent that runs.
    pub async fn new() -> Listener {
        let folder = tempfile::tempdir().expect("a directory");
        let agent = Some(AgentProcess::start(folder.path()).await);
        Listener { folder, agent }
    }

    /// The user's home.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The process of the agent.
    pub fn agent(&self) -> Pid {
        pid_of(&self.agent.as_ref().expect("it runs").child)
    }

    /// Kills the agent, and starts another.
    pub async fn replace_agent(&mut self) {
        self.between_agents(|| ()).await;
    }

    /// Kills the agent, and starts another after `act`.
    pub async fn between_agents(&mut self, act: impl FnOnce()) {
        self.agent.take().expect("it runs").kill().await;
        act();
        self.agent = Some(AgentProcess::start(self.path()).await);
    }

    /// Kills the agent; a command may start another.
    pub async fn kill_agent(&mut self) {
        self.agent.take().expect("it runs").kill().await;
    }

    /// Runs `cedos` with these arguments.
    pub async fn run(&self, arguments: &[&str]) -> CedosRun {
        let mut command = cedos(self.path(), arguments);
        command.env("CEDOS_AGENT", self.path().join("agent.sock"));
        // Without a player, `play` prints what it would play.
        command
            .env_remove("CEDOS_PLAYER")
            .env("PATH", "/nonexistent");
        ended(command.spawn().expect("start cedos")).await
    }

    /// The answer of a verb of `cedos cast`.
    pub async fn cast(&self, arguments: &[&str]) -> Value {
        let run = self
            .run(&[&["cast"], arguments, &["--json"]].concat())
            .await;
        assert_eq!(run.code, 0, "{arguments:?}: {}", run.errors);
        run.last().clone()
    }

    /// The channel's answer once its episodes are as wanted.
    pub async fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let looking = async {
            loop {
                last = self.cast(&["show", "1"]).await;
                if wanted(&last) {
                    return last.clone();
                }
            }
        };
        let found = tokio::time::timeout(PATIENCE, looking).await;
        found.unwrap_or_else(|_| panic!("never {what}: {last}"))
    }

    /// The file of an episode that is whole.
    pub async fn file(&self, episode: &Value) -> PathBuf {
        let id = episode["id"].to_string();
        let run = self.run(&["cast", "play", &id]).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        let output = String::from_utf8(run.output).expect("text");
        PathBuf::from(output.trim())
    }
}

/// A feed with an item for each of these paths.
pub fn feed(origin: &str, paths: &[&str]) -> String {
    let items: String = paths
        .iter()
        .enumerate()
        .map(|(n, path)| {
            format!(
                "<item><title>Episode {path}</title><guid>{path}</guid>\
                 <pubDate>Mon, 0{} Jun 2020 06:00:00 GMT</pubDate>\
                 <enclosure url=\"{origin}/{path}.mp3\" length=\"{BYTES}\" type=\"audio/mpeg\"/></item>",
                n + 1
            )
        })
        .collect();
    format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\"><channel><title>Morning News</title>{items}</channel></rss>"
    )
}

/// The answer with such a feed.
pub fn feed_reply(asked: &OriginRequest, paths: &[&str]) -> OriginReply {
    let origin = format!("http://{}", asked.header("host").unwrap_or_default());
    let body = feed(&origin, paths);
    let length = body.len().to_string();
    let headers = [
        ("Content-Type", "application/rss+xml"),
        ("Content-Length", &*length),
        ("ETag", TAG),
    ];
    OriginReply(reply("200 OK", &headers, body.as_bytes()), ReplyEnd::Close)
}

/// An answer without a body.
pub fn empty(status: &str, headers: &[(&str, &str)]) -> OriginReply {
    let headers = [headers, &[("Content-Length", "0")]].concat();
    OriginReply(reply(status, &headers, b""), ReplyEnd::Close)
}

/// The bytes of the episode at a path such as `/b.mp3`.
pub fn episode_bytes(path: &str) -> Vec<u8> {
    object(BYTES, u32::from(path.as_bytes()[1]))
}

/// The states of a channel's episodes.
pub fn states(channel: &Value) -> Vec<&str> {
    let episodes = channel["episodes"].as_array().expect("a list");
    episodes
        .iter()
        .map(|episode| episode["state"].as_str().unwrap_or_default())
        .collect()
}

/// A digest in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    hex::encode(sha2::Sha256::digest(bytes))
}
