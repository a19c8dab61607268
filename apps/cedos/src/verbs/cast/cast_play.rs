//! `cedos cast play`: gives a player an episode, from where it was heard to, and stores how far it is heard.
//!
//! ```text
//!  agent ── file, or link to the growing copy ──▶ player ──▶ mpv's socket: position, length
//!    ▲                                                               │
//!    └──────────────── position, every ten seconds and at the end ───┘
//! ```
//!
//! mpv tells where it is over a socket of its own (`--input-ipc-server`). Other players do not: of them it is only noted
//! that they played. An agent that ends meanwhile is started again, with the same link.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use cedos_agent::agent::api::PodcastRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::agent::socket_path;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_readycast::EpisodeId;
use cedos_terminal::{print_stderr, print_stdout};
use cedos_text::escape_controls;
use clap::{Arg, ArgMatches, Args, Command as ArgCommand, FromArgMatches};
use d2tp_sched::CostPolicy;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::super::agent_start;
use super::super::play::{end, with_link};
use super::super::transfer_args::{stop_on_signal, word_parser};
use super::cast_text::clock;
use super::{ask, failed, parse_episode};
use crate::help::COST_AND_TIME;

/// The environment variable with the player of episodes and its arguments.
const PLAYER_VARIABLE: &str = "CEDOS_PLAYER";

/// The player that is used if the variable names none, and it is installed; and the one that tells where it is.
const PLAYER: &str = "mpv";

/// The part of a player's argument that stands for the position to begin at, in whole seconds.
const START_PLACE: &str = "{start}";

/// How often the position is stored, as on the page.
const STORE_EVERY: Duration = Duration::from_secs(10);

/// The time after which a player that tells nothing counts as one that plays.
const BEGUN_AFTER: Duration = Duration::from_secs(10); // a guess: one that cannot play ends before

/// How long mpv may take until it is at the position to begin at; one before it is not stored until then.
const SETTLED_AFTER: Duration = Duration::from_secs(10); // a guess: a slow disk

/// The seconds before its end in which an episode counts as heard, as in the library.
const END_S: f64 = 5.0;

/// How often mpv's socket is tried until it is there.
const SOCKET_LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long an agent that ended has to be started by somebody else.
const SUCCESSOR_WITHIN: Duration = Duration::from_secs(2); // a guess: an upgrade

/// The pause after an agent could not be started.
const START_AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess

/// Options of `cedos play` that have no meaning for a download.
const STREAM_OPTIONS: [&str; 9] = [
    "alone", "bitrate", "duration", "high", "keep", "link", "low", "max-cell", "store",
];

/// What `cedos cast play` plays, and how.
#[derive(Debug, Args)]
pub struct CastPlayArgs {
    /// The number of the episode [default: the one that was heard last, else the next one]
    #[arg(value_parser = parse_episode)]
    episode: Option<i64>,
    /// End with this episode, instead of going on with the next one
    #[arg(long)]
    once: bool,
    /// When its download may use metered networks [default: as the channel's rule says]
    #[arg(long, value_parser = word_parser::<CostPolicy, 4>(["free-only", "balanced", "any", "fast"]), help_heading = COST_AND_TIME)]
    policy: Option<CostPolicy>,
    /// Print one JSON object per line: waiting, link or file, and last ended
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stream: RefusedStreamOptions,
}

/// The options of a stream, which a download does not have: each is refused with a sentence.
#[derive(Debug)]
struct RefusedStreamOptions;

impl Args for RefusedStreamOptions {
    fn augment_args(command: ArgCommand) -> ArgCommand {
        let refuse = |_: &str| -> Result<String, String> {
            Err(
                "an episode is downloaded, not streamed, so it has no such option; \
                 `cedos play URL` has it"
                    .to_owned(),
            )
        };
        command.args(STREAM_OPTIONS.map(|name| {
            Arg::new(name)
                .long(name)
                .hide(true)
                .num_args(0..=1)
                .default_missing_value("")
                .value_parser(refuse)
        }))
    }

    fn augment_args_for_update(command: ArgCommand) -> ArgCommand {
        RefusedStreamOptions::augment_args(command)
    }
}

impl FromArgMatches for RefusedStreamOptions {
    fn from_arg_matches(_: &ArgMatches) -> Result<RefusedStreamOptions, clap::Error> {
        Ok(RefusedStreamOptions)
    }

    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }
}

/// What a player is given.
enum PlayedMedia {
    File(String),
    Link(String),
}

impl PlayedMedia {
    fn as_str(&self) -> &str {
        match self {
            PlayedMedia::File(text) | PlayedMedia::Link(text) => text,
        }
    }
}

/// The connection to the agent, which is made again when the agent has ended.
struct PlayAgent {
    client: Option<AgentApiClient>,
    episode: EpisodeId,
    policy: Option<CostPolicy>,
}

impl PlayAgent {
    async fn start(args: &CastPlayArgs) -> anyhow::Result<PlayAgent> {
        Ok(PlayAgent {
            client: Some(agent_start::connect_or_start().await?),
            episode: EpisodeId(args.episode.unwrap_or_default()),
            policy: args.policy,
        })
    }

    /// Chooses the episode that was heard last and not to its end; the first of the order of hearing if there is none.
    async fn choose(&mut self) -> Result<(), TransferFailure> {
        let begun = self.ask(&PodcastRequest::Continue).await?;
        let chosen = match begun["episodes"][0]["id"].as_i64() {
            Some(last_heard) => Some(EpisodeId(last_heard)),
            None => self.next(None).await?.map(|(next, _)| next),
        };
        let nothing = "no episode was begun, and none is ready; `cedos cast list` shows the channels, and `cedos cast play \
                       NUMBER` plays any of their episodes";
        self.episode = chosen.ok_or_else(|| TransferFailure::usage(nothing))?;
        Ok(())
    }

    /// The episode to hear after another one, and its title; none if nothing else is here.
    async fn next(
        &mut self,
        after: Option<EpisodeId>,
    ) -> Result<Option<(EpisodeId, String)>, TransferFailure> {
        let answer = self.ask(&PodcastRequest::Next { after }).await?;
        let next = &answer["episode"];
        let title = escape_controls(next["title"].as_str().unwrap_or_default()).into_owned();
        Ok(next["id"].as_i64().map(|id| (EpisodeId(id), title)))
    }

    /// What to play. `again`: the player asked before.
    async fn media(&mut self, again: bool) -> Result<Value, TransferFailure> {
        let policy = self.policy.filter(|_| !again);
        let request = PodcastRequest::Play {
            episode: self.episode,
            policy: policy.map(|policy| policy.as_str().to_owned()),
            again,
        };
        self.ask(&request).await
    }

    async fn ask(&mut self, request: &PodcastRequest) -> Result<Value, TransferFailure> {
        let gone = || TransferFailure::error("the agent has stopped");
        ask(self.client.as_mut().ok_or_else(gone)?, request).await
    }

    /// Ready when the agent has ended and this is connected to its successor.
    async fn replaced(&mut self) {
        if let Some(client) = &mut self.client {
            while client.next().await.is_some() {}
            self.client = None;
        }
        self.find_successor().await;
    }

    /// Says if the link that a player reads is not the successor's.
    async fn check_link(&mut self, media: &str) {
        let link = self.media(true).await.ok();
        let link = link.and_then(|answer| answer["link"].as_str().map(str::to_owned));
        if let Some(link) = link.filter(|link| link != media && media.starts_with("http://")) {
            print_stderr(&format!(
                "The agent was replaced, and the player's link no longer works; it is {link} now"
            ));
        }
    }

    /// Connects to the agent's successor, or starts one; then the link works again.
    async fn find_successor(&mut self) {
        let until = Instant::now() + SUCCESSOR_WITHIN;
        loop {
            self.client = AgentApiClient::connect().await;
            if self.client.is_some() || Instant::now() >= until {
                break;
            }
            sleep(SOCKET_LOOK_EVERY).await;
        }
        while self.client.is_none() {
            match agent_start::connect_or_start().await {
                Ok(client) => self.client = Some(client),
                Err(error) => {
                    print_stderr(&format!("{error:#}"));
                    sleep(START_AGAIN_AFTER).await;
                }
            }
        }
    }
}

/// What mpv told last.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct MpvPosition {
    position_s: Option<f64>,
    duration_s: Option<f64>,
}

impl MpvPosition {
    /// Takes over what an event says.
    fn note(&mut self, event: &Value) {
        let Some(seconds) = event["data"].as_f64().filter(|s| *s >= 0.0) else {
            return;
        };
        match event["name"].as_str() {
            Some("time-pos") => self.position_s = Some(seconds),
            Some("duration") => self.duration_s = Some(seconds),
            _ => {}
        }
    }

    /// Whether the player was at the end of the episode. A player that tells nothing was not, as far as is known.
    fn is_at_end(&self) -> bool {
        let position_and_duration = self.position_s.zip(self.duration_s);
        position_and_duration.is_some_and(|(position, duration)| position + END_S >= duration)
    }
}

/// Asks mpv at this socket where it is, and hears it until mpv ends.
async fn hear_mpv(socket: PathBuf, heard: watch::Sender<MpvPosition>) {
    let stream = loop {
        match UnixStream::connect(&socket).await {
            Ok(stream) => break stream,
            Err(_) => sleep(SOCKET_LOOK_EVERY).await,
        }
    };
    let (read, mut write) = stream.into_split();
    for (number, name) in [(1, "time-pos"), (2, "duration")] {
        let command = json!({"command": ["observe_property", number, name]});
        if (write.write_all(format!("{command}\n").as_bytes()).await).is_err() {
            return;
        }
    }
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(event) = serde_json::from_str(&line) {
            heard.send_modify(|position| position.note(&event));
        }
    }
}

/// The command line of a player.
struct PlayerCommand {
    words: Vec<String>,
    /// mpv's socket.
    socket: Option<PathBuf>,
    /// Whether the player begins at the position.
    begins_there: bool,
}

impl PlayerCommand {
    /// The player's words for this file or link, from `start_ms` on; `socket`: where mpv is to listen.
    fn of(player: &[String], media: &str, start_ms: u64, socket: PathBuf) -> PlayerCommand {
        let mut words = player.to_vec();
        let has_place = words.iter().any(|word| word.contains(START_PLACE));
        let seconds = (start_ms / 1000).to_string();
        for word in &mut words {
            *word = word.replace(START_PLACE, &seconds);
        }
        let is_mpv = Path::new(&words[0])
            .file_name()
            .is_some_and(|name| name == PLAYER);
        let own = |option: &str| {
            let found = player.iter().find_map(|word| word.strip_prefix(option));
            found.map(str::to_owned)
        };
        let own_start = own("--start=").is_some();
        let mut listens = None;
        if is_mpv {
            if start_ms > 0 && !own_start {
                let start = format!("--start={}.{:03}", start_ms / 1000, start_ms % 1000);
                words.insert(1, start);
            }
            listens = Some(match own("--input-ipc-server=") {
                Some(own) => PathBuf::from(own),
                None => {
                    let option = format!("--input-ipc-server={}", socket.display());
                    words.insert(1, option);
                    socket
                }
            });
        }
        PlayerCommand {
            words: with_link(&words, media),
            socket: listens,
            begins_there: has_place || is_mpv && !own_start,
        }
    }

    fn spawn(&self, is_silent: bool) -> Result<Child, TransferFailure> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).kill_on_drop(true);
        if is_silent {
            // Ours is for programs to read.
            command.stdout(Stdio::null());
        }
        command.spawn().map_err(|error| {
            let name = &self.words[0];
            TransferFailure::error(format!("cannot run {name}: {error}. Is it installed?"))
        })
    }
}

/// What is heard of an episode while a player runs.
struct EpisodeListening {
    start_ms: u64,
    began_at: Instant,
    stored_ms: Option<u64>,
    has_begun: bool,
}

impl EpisodeListening {
    fn from(start_ms: u64) -> EpisodeListening {
        EpisodeListening {
            start_ms,
            began_at: Instant::now(),
            stored_ms: None,
            has_begun: false,
        }
    }

    /// The position to store and the length; none if mpv told none, or none that counts.
    fn to_store(&self, heard: MpvPosition) -> Option<(u64, Option<u64>)> {
        let milliseconds = |seconds: f64| (seconds * 1000.0) as u64;
        let position = milliseconds(heard.position_s?);
        let has_settled = position + 2_000 >= self.start_ms;
        let counts = has_settled || self.began_at.elapsed() >= SETTLED_AFTER;
        let is_new = self.stored_ms != Some(position);
        (counts && is_new).then(|| (position, heard.duration_s.map(milliseconds)))
    }

    /// Stores what was heard. What the agent does not hear is stored the next time.
    async fn store(&mut self, agent: &mut PlayAgent, heard: MpvPosition) {
        let episode = agent.episode;
        if let Some((position_ms, duration_ms)) = self.to_store(heard) {
            let request = PodcastRequest::Position {
                episode,
                position_ms: Some(position_ms),
                duration_ms,
            };
            if agent.ask(&request).await.is_ok() {
                self.stored_ms = Some(position_ms);
            }
        } else if !self.has_begun && self.began_at.elapsed() >= BEGUN_AFTER {
            self.note_begun(agent).await;
        }
    }

    async fn note_begun(&mut self, agent: &mut PlayAgent) {
        let request = PodcastRequest::Begun {
            episode: agent.episode,
        };
        self.has_begun = agent.ask(&request).await.is_ok();
    }
}

/// Runs `cedos cast play`.
///
/// # Errors
/// The agent cannot be started.
pub async fn play(args: CastPlayArgs) -> anyhow::Result<ExitCode> {
    let (stop, mut stopped) = watch::channel(false);
    stop_on_signal(stop).context("signals")?;
    let mut agent = PlayAgent::start(&args).await?;
    if args.episode.is_none()
        && let Err(failure) = agent.choose().await
    {
        return Ok(failed(&failure));
    }
    loop {
        let played = match play_one(&mut agent, &args, &mut stopped).await {
            Ok(played) => played,
            Err(failure) => return Ok(failed(&failure)),
        };
        if args.once || !played.is_to_end {
            return Ok(played.code);
        }
        let Ok(Some((next, title))) = agent.next(Some(agent.episode)).await else {
            return Ok(played.code);
        };
        (agent.episode, agent.policy) = (next, None);
        if !args.json {
            print_stderr(&format!("Next: {title}"));
        }
    }
}

/// How a player ended.
struct PlayedEpisode {
    code: ExitCode,
    /// Whether the player told that it came to the end of the episode.
    is_to_end: bool,
}

/// Plays one episode, or prints what there is to play if there is no player.
async fn play_one(
    agent: &mut PlayAgent,
    args: &CastPlayArgs,
    stopped: &mut watch::Receiver<bool>,
) -> Result<PlayedEpisode, TransferFailure> {
    let ended = |code: ExitCode| PlayedEpisode {
        code,
        is_to_end: false,
    };
    let found = tokio::select! {
        found = wait_for_media(agent, args.json) => found,
        _ = stopped.wait_for(|stop| *stop) => return Ok(ended(TransferExit::Cancelled.into())),
    };
    let (media, position_ms) = found?;
    if args.json {
        let mut told = match &media {
            PlayedMedia::File(file) => json!({"event": "file", "file": file}),
            PlayedMedia::Link(link) => json!({"event": "link", "link": link}),
        };
        told["episode"] = json!(agent.episode);
        told["position_ms"] = json!(position_ms);
        print_stdout(&told.to_string());
    }
    let Some(player) = player() else {
        if !args.json {
            print_stdout(media.as_str());
        }
        if let PlayedMedia::Link(_) = media {
            serve_link(agent, stopped).await;
        }
        return Ok(ended(ExitCode::SUCCESS));
    };
    run_player(agent, args, &player, media.as_str(), position_ms, stopped).await
}

/// Waits until there is something to play. Returns it, and the position to begin at.
async fn wait_for_media(
    agent: &mut PlayAgent,
    is_json: bool,
) -> Result<(PlayedMedia, u64), TransferFailure> {
    let mut again = false;
    let mut told = None;
    loop {
        let answer = agent.media(again).await?;
        again = true;
        let position_ms = answer["episode"]["position_ms"].as_u64().unwrap_or(0);
        if let Some(file) = answer["file"].as_str() {
            return Ok((PlayedMedia::File(file.to_owned()), position_ms));
        }
        if let Some(link) = answer["link"].as_str() {
            return Ok((PlayedMedia::Link(link.to_owned()), position_ms));
        }
        let why = answer["why"].as_str().unwrap_or("its download begins");
        // What changes every second is no news.
        let news = why.replace(|c: char| c.is_ascii_digit(), "");
        if told.as_ref() == Some(&news) {
            continue;
        }
        told = Some(news);
        match is_json {
            true => print_stdout(&json!({"event": "waiting", "why": why}).to_string()),
            false => print_stderr(&format!(
                "Waiting for its first part: {}. `cedos cast play {} --policy any` uses mobile data, too",
                escape_controls(why),
                agent.episode
            )),
        }
    }
}

/// Keeps an agent running for a link until it is stopped.
async fn serve_link(agent: &mut PlayAgent, stopped: &mut watch::Receiver<bool>) {
    loop {
        tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => return,
            () = agent.replaced() => {}
        }
    }
}

/// Runs a player until it ends.
async fn run_player(
    agent: &mut PlayAgent,
    args: &CastPlayArgs,
    player: &[String],
    media: &str,
    start_ms: u64,
    stopped: &mut watch::Receiver<bool>,
) -> Result<PlayedEpisode, TransferFailure> {
    let socket = mpv_socket().map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    let command = PlayerCommand::of(player, media, start_ms, socket.clone());
    if start_ms > 0 && !command.begins_there {
        print_stderr(&format!(
            "It was heard to {}; this player is not told where to begin",
            clock(start_ms / 1000)
        ));
    }
    let mut child = command.spawn(args.json)?;
    let (heard, position) = watch::channel(MpvPosition::default());
    let hearing = command.socket.clone();
    let hearing = hearing.map(|socket| tokio::spawn(hear_mpv(socket, heard)));
    let mut listening = EpisodeListening::from(start_ms);
    let mut every = interval(STORE_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let status = loop {
        tokio::select! {
            status = child.wait() => break status.ok(),
            _ = stopped.wait_for(|stop| *stop) => {
                end(&mut child).await;
                break None;
            }
            () = agent.replaced() => agent.check_link(media).await,
            _ = every.tick(), if agent.client.is_some() => {
                let heard = *position.borrow();
                listening.store(agent, heard).await;
            }
        }
    };
    if let Some(hearing) = hearing {
        hearing.abort();
        // A socket that the user named is the user's.
        let _ = std::fs::remove_file(&socket);
    }
    if agent.client.is_none() {
        agent.client = agent_start::connect_or_start().await.ok();
    }
    let heard = *position.borrow();
    listening.store(agent, heard).await;
    let has_succeeded = status.is_some_and(|status| status.success());
    if has_succeeded && !listening.has_begun && listening.stored_ms.is_none() {
        listening.note_begun(agent).await;
    }
    if args.json {
        let ended =
            json!({"event": "ended", "episode": agent.episode, "position_ms": listening.stored_ms});
        print_stdout(&ended.to_string());
    }
    let is_to_end = has_succeeded && heard.is_at_end();
    let code = match status {
        Some(status) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            // A signal ended it, as the shell would say it.
            ExitCode::from(code.unwrap_or(128))
        }
        None => TransferExit::Cancelled.into(),
    };
    Ok(PlayedEpisode { code, is_to_end })
}

/// Where mpv is to listen: beside the agent's socket, which is this user's alone.
fn mpv_socket() -> anyhow::Result<PathBuf> {
    let agent = socket_path()?;
    let folder = agent
        .parent()
        .ok_or_else(|| anyhow!("the agent's socket has no folder"))?;
    Ok(folder.join(format!("mpv-{}.sock", std::process::id())))
}

/// The player and its arguments; none if there is none.
fn player() -> Option<Vec<String>> {
    let named = std::env::var(PLAYER_VARIABLE).unwrap_or_default();
    let named: Vec<String> = named.split_whitespace().map(str::to_owned).collect();
    if !named.is_empty() {
        return Some(named);
    }
    let path = std::env::var_os("PATH")?;
    let is_there = std::env::split_paths(&path).any(|folder| folder.join(PLAYER).is_file());
    is_there.then(|| vec![PLAYER.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn mpv_begins_at_the_position_and_tells_where_it_is() {
        let of = |player: &str, start_ms| {
            PlayerCommand::of(&words(player), "L", start_ms, PathBuf::from("/s"))
        };
        let mpv = of("/usr/bin/mpv --no-video", 754_321);
        assert_eq!(
            mpv.words,
            words("/usr/bin/mpv --input-ipc-server=/s --start=754.321 --no-video L")
        );
        assert!(mpv.begins_there);
        let own = of("mpv --start=0 --input-ipc-server=/own", 754_321);
        assert_eq!(own.words, words("mpv --start=0 --input-ipc-server=/own L"));
        assert_eq!(own.socket, Some(PathBuf::from("/own")));
        assert!(!own.begins_there);
        let vlc = of("vlc --start-time={start} {}", 754_321);
        assert_eq!(vlc.words, words("vlc --start-time=754 L"));
        assert!(vlc.begins_there && vlc.socket.is_none());
        let other = of("ffplay -autoexit", 754_321);
        assert_eq!(other.words, words("ffplay -autoexit L"));
        assert!(!other.begins_there);
    }

    #[tokio::test(start_paused = true)]
    async fn a_position_before_the_one_to_begin_at_counts_only_after_a_while() {
        let mut position = MpvPosition::default();
        let listening = EpisodeListening::from(60_000);
        assert_eq!(listening.to_store(position), None);
        let event = |name: &str, data: Value| json!({"event": "property-change", "name": name, "data": data});
        position.note(&event("time-pos", json!(0.0)));
        position.note(&event("duration", json!(500.5)));
        position.note(&event("time-pos", Value::Null));
        assert_eq!(listening.to_store(position), None);
        assert!(!position.is_at_end(), "it tells 0:00");
        tokio::time::advance(SETTLED_AFTER).await;
        assert_eq!(listening.to_store(position), Some((0, Some(500_500))));
        let mut listening = EpisodeListening::from(60_000);
        position.note(&event("time-pos", json!(61.25)));
        assert_eq!(listening.to_store(position), Some((61_250, Some(500_500))));
        listening.stored_ms = Some(61_250);
        assert_eq!(listening.to_store(position), None);
        assert!(!MpvPosition::default().is_at_end(), "it told nothing");
        position.note(&event("time-pos", json!(496.0)));
        assert!(position.is_at_end());
    }
}
