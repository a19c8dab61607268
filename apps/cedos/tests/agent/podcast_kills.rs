//! `kill -9` of the agent at random moments of refresh, download and play: no subscription, position or episode is lost
//! or doubled, and at the end every wanted episode is whole.
//!
//! ```text
//!  agent ─ adds, refreshes, downloads, positions ─ killed ─▶ the library beside what was acknowledged ─▶ next agent
//! ```
//!
//! `CEDOS_PODCAST_KILLS` sets the number of kills, `CEDOS_PODCAST_SEED` repeats a run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use cedos_agent::agent::api::{AgentRequest, PodcastRequest};
use cedos_agent::agent::client::AgentApiClient;
use cedos_lab_rig::origin::{OriginRequest, OriginStream, ScriptedOrigin, object, proper, reply};
use cedos_lab_rig::program::AgentProcess;
use cedos_lab_rig::wait::until;
use cedos_readycast::{
    ChannelId, ChannelSummary, EpisodeId, EpisodeQuery, EpisodeState, EpisodeSummary, Library,
};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg32;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use url::Url;

use crate::podcast_listener::{TAG, sha256};

/// Kills of the ordinary run.
const KILLS: u32 = 20;

/// The latest moment of a kill after the agent began.
const LIFE_MS: u64 = 900;

const FEEDS: u32 = 4;
const EPISODES_FIRST: u32 = 3;
const EPISODES_MAX: u32 = 9;
const BYTES: usize = 120_000;
const PIECE: usize = 6_000;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The bytes of the episode at a path such as `/2/5.mp3`.
fn audio(path: &str) -> Vec<u8> {
    let seed = path.bytes().fold(7_u32, |sum, b| {
        sum.wrapping_mul(31).wrapping_add(u32::from(b))
    });
    object(BYTES, seed)
}

fn feed(host: &str, feed: &str, episodes: u32) -> Vec<u8> {
    let items: String = (1..=episodes)
        .rev()
        .map(|n| {
            format!(
                "<item><title>Feed {feed} episode {n}</title><guid>{feed}-{n}</guid>\
                 <pubDate>{n:02} May 2024 06:00:00 GMT</pubDate>\
                 <enclosure url=\"http://{host}/{feed}/{n}.mp3\" length=\"{BYTES}\" type=\"audio/mpeg\"/></item>"
            )
        })
        .collect();
    format!("<rss version=\"2.0\"><channel><title>Feed {feed}</title>{items}</channel></rss>")
        .into_bytes()
}

/// Feeds that grow, and episodes that come in pieces until the gate is open.
async fn origin(episodes: Arc<AtomicU32>, is_fast: Arc<AtomicBool>) -> ScriptedOrigin {
    let serve = move |asked: OriginRequest, mut stream: OriginStream| {
        let (episodes, is_fast) = (episodes.clone(), is_fast.clone());
        async move {
            let host = asked.header("host").unwrap_or_default();
            let answer = match asked.path.strip_prefix("/feed/") {
                Some(name) => {
                    let body = feed(host, name, episodes.load(Ordering::Relaxed));
                    let length = body.len().to_string();
                    reply("200 OK", &[("Content-Length", &length)], &body)
                }
                None => proper(&asked, &audio(&asked.path), TAG),
            };
            for piece in answer.chunks(PIECE) {
                if stream.write_all(piece).await.is_err() || stream.flush().await.is_err() {
                    return;
                }
                if !is_fast.load(Ordering::Relaxed) {
                    // sleep: a slow server is the subject
                    tokio::time::sleep(Duration::from_millis(8)).await;
                }
            }
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    };
    ScriptedOrigin::play(serve).await
}

/// What was acknowledged by the agents so far.
#[derive(Default)]
struct Acknowledged {
    subscribed: BTreeSet<String>,
    /// Subscriptions that were asked for and not acknowledged.
    perhaps_subscribed: BTreeSet<String>,
    /// Positions, and the ones that were sent after them without an answer.
    positions: BTreeMap<EpisodeId, (u64, Option<u64>)>,
    /// Bytes of pages that were open while agents were killed.
    page_bytes: usize,
    /// Identifiers of episodes that a library had, by channel.
    episodes: BTreeMap<String, BTreeSet<String>>,
}

/// Sends a position as the page's player does; returns whether it was acknowledged.
async fn store_position(link: &str, episode: EpisodeId, position_ms: u64) -> bool {
    let sent = async {
        let rest = link.strip_prefix("http://")?;
        let (host, base) = rest.split_once('/')?;
        let base = base.trim_end_matches('/');
        let form = format!("position_ms={position_ms}&duration_ms=3600000");
        let length = form.len();
        let request = format!(
            "POST /{base}/podcasts/episode/{episode}/position HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\
             Content-Type: application/x-www-form-urlencoded\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n\
             {form}"
        );
        let mut stream = TcpStream::connect(host).await.ok()?;
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        Some(answer.starts_with("HTTP/1.1 204"))
    };
    sent.await.unwrap_or(false)
}

/// Reads an answer of the page until it ends, as a browser does that has it open. Returns the bytes that came; none of
/// a refusal.
async fn read_page(link: String, path: String) -> usize {
    let read = async {
        let rest = link.strip_prefix("http://")?;
        let (host, base) = rest.split_once('/')?;
        let base = base.trim_end_matches('/');
        let request =
            format!("GET /{base}/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let mut stream = TcpStream::connect(host).await.ok()?;
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut bytes = Vec::new();
        // The agent may be killed in the middle of it.
        let _ = stream.read_to_end(&mut bytes).await;
        bytes.starts_with(b"HTTP/1.1 200").then_some(bytes.len())
    };
    read.await.unwrap_or(0)
}

async fn ask(client: &mut AgentApiClient, request: PodcastRequest) -> Option<Value> {
    client.ask(&AgentRequest::Cast(request)).await.ok()
}

/// Does what a user does until the agent is gone.
async fn use_podcasts(
    socket: PathBuf,
    origin: String,
    library: Library,
    random: &mut Pcg32,
    acknowledged: &mut Acknowledged,
) {
    let Some(mut client) = AgentApiClient::connect_to(&socket).await else {
        return;
    };
    let page = AgentRequest::Page {
        new_link: false,
        entry: false,
    };
    let Ok(page) = client.ask(&page).await else {
        return;
    };
    let link = page["link"].as_str().expect("a link").to_owned();
    // The library, the queue and a player are open all the while.
    let mut open = JoinSet::new();
    for path in ["podcasts/updates", "podcasts/queue/updates"] {
        open.spawn(read_page(link.clone(), path.to_owned()));
    }
    loop {
        let known = library
            .episodes(&EpisodeQuery::default())
            .expect("the library");
        let some = |random: &mut Pcg32| -> Option<EpisodeSummary> {
            let index = random.random_range(0..known.len().max(1));
            known.get(index).cloned()
        };
        let answer = match random.random_range(0..4) {
            0 => {
                let url = format!("{origin}/feed/{}", random.random_range(0..FEEDS));
                if !acknowledged.subscribed.contains(&url) {
                    acknowledged.perhaps_subscribed.insert(url.clone());
                }
                let address: Url = url.parse().expect("an address");
                let added = ask(&mut client, PodcastRequest::Add { url: address }).await;
                if added.is_some() {
                    acknowledged.perhaps_subscribed.remove(&url);
                    acknowledged.subscribed.insert(url);
                }
                added
            }
            1 => ask(&mut client, PodcastRequest::Refresh { channel: None }).await,
            2 => match some(random) {
                Some(episode) => {
                    let request = PodcastRequest::Download {
                        episode: episode.id,
                        by: None,
                        policy: None,
                    };
                    ask(&mut client, request).await
                }
                None => {
                    ask(
                        &mut client,
                        PodcastRequest::List {
                            words: String::new(),
                        },
                    )
                    .await
                }
            },
            _ => match some(random) {
                Some(EpisodeSummary { id, .. }) => {
                    for part in ["audio", "updates"] {
                        let path = format!("podcasts/episode/{id}/{part}");
                        open.spawn(read_page(link.clone(), path));
                    }
                    let position = 1_000 + random.random_range(0..3_000_000);
                    let of_it = acknowledged.positions.entry(id).or_default();
                    of_it.1 = Some(position);
                    if store_position(&link, id, position).await {
                        *of_it = (position, None);
                    }
                    ask(&mut client, PodcastRequest::Queue).await
                }
                None => {
                    ask(
                        &mut client,
                        PodcastRequest::List {
                            words: String::new(),
                        },
                    )
                    .await
                }
            },
        };
        if answer.is_none() && AgentApiClient::connect_to(&socket).await.is_none() {
            while let Some(read) = open.join_next().await {
                acknowledged.page_bytes += read.expect("no panic");
            }
            return;
        }
    }
}

/// Compares the library with what was acknowledged.
fn check(library: &Library, acknowledged: &mut Acknowledged, when: &str, is_end: bool) {
    let channels = library.channels().expect("the channels");
    let addresses: Vec<&str> = channels.iter().map(|c| c.url.as_str()).collect();
    let unique: BTreeSet<&str> = addresses.iter().copied().collect();
    assert_eq!(unique.len(), addresses.len(), "{when}: {addresses:?}");
    for url in &acknowledged.subscribed {
        assert!(unique.contains(url.as_str()), "{when}: {url} is lost");
    }
    for url in unique {
        // What was asked for in the last moment may have happened.
        if acknowledged.perhaps_subscribed.remove(url) {
            acknowledged.subscribed.insert(url.to_owned());
        }
        assert!(acknowledged.subscribed.contains(url), "{when}: {url}");
    }
    let mut files = BTreeSet::new();
    for channel in &channels {
        let query = EpisodeQuery {
            channel: Some(channel.id),
            limit: 1_000,
            ..EpisodeQuery::default()
        };
        let episodes = library.episodes(&query).expect("the episodes");
        let mut guids = BTreeSet::new();
        for summary in episodes {
            let episode = library.episode(summary.id).expect("a query").expect("it");
            let guid = &episode.guid;
            assert!(guids.insert(guid.clone()), "{when}: {guid} is there twice");
            if let Some(file) = &episode.file {
                assert!(files.insert(file.clone()), "{when}: two have {file:?}");
                let bytes = match std::fs::read(file) {
                    Ok(bytes) => bytes,
                    // Removed by its rule, and not noted yet: the next agent does.
                    Err(_) if !is_end => continue,
                    Err(error) => panic!("{when}: {file:?}: {error}"),
                };
                let path = episode.enclosure.path();
                assert_eq!(sha256(&bytes), sha256(&audio(path)), "{when}: {file:?}");
            }
            if let Some((stored, sent)) = acknowledged.positions.get_mut(&summary.id) {
                let now = summary.position_ms;
                assert!(
                    now == *stored || Some(now) == *sent,
                    "{when}: episode {guid} is at {now}, not at {stored} or {sent:?}"
                );
                (*stored, *sent) = (now, None);
            }
        }
        let known = acknowledged.episodes.entry(channel.url.to_string());
        let known = known.or_default();
        assert!(
            known.is_subset(&guids),
            "{when}: of {known:?} {guids:?} are left"
        );
        *known = guids;
    }
}

/// Transfers of the queue that have not ended, by file: each has one.
async fn check_queue(socket: &Path, when: &str) {
    let Some(mut client) = AgentApiClient::connect_to(socket).await else {
        panic!("{when}: no agent");
    };
    let answer = client.ask(&AgentRequest::List).await.expect("a list");
    let mut files = BTreeMap::new();
    let jobs = answer["transfers"].as_array();
    for job in jobs.unwrap_or_else(|| panic!("no list: {answer}")) {
        let standing = job["standing"].as_str().unwrap_or_default();
        if !matches!(standing, "done" | "failed" | "cancelled") {
            let other = files.insert(job["file"].to_string(), job);
            assert!(
                other.is_none(),
                "{when}: two write a file: {other:?}, {job}"
            );
        }
    }
}

/// Files below a folder whose names end so.
fn count_files(folder: &Path, ending: &str) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let counts = entries.map(|entry| {
        let path = entry.path();
        match path.is_dir() {
            true => count_files(&path, ending),
            false => usize::from(path.to_string_lossy().ends_with(ending)),
        }
    });
    counts.sum()
}

#[tokio::test]
async fn nothing_is_lost_or_doubled_when_the_agent_is_killed_at_any_moment() {
    let kills = number("CEDOS_PODCAST_KILLS").map_or(KILLS, |n| n as u32);
    let seed = number("CEDOS_PODCAST_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("{kills} kills, CEDOS_PODCAST_SEED={seed}");
    let mut random = Pcg32::seed_from_u64(seed);
    let home = tempfile::tempdir().expect("a directory");
    let episodes = Arc::new(AtomicU32::new(EPISODES_FIRST));
    let is_fast = Arc::new(AtomicBool::new(false));
    let origin = origin(episodes.clone(), is_fast.clone()).await;
    let library = Library::open(&home.path().join(".state/cedos/podcasts")).expect("a library");
    let mut acknowledged = Acknowledged::default();
    for kill in 1..=kills {
        let when = format!("seed {seed}, kill {kill}");
        if kill % (kills / (EPISODES_MAX - EPISODES_FIRST)).max(1) == 0 {
            let more = (episodes.load(Ordering::Relaxed) + 1).min(EPISODES_MAX);
            episodes.store(more, Ordering::Relaxed);
        }
        let agent = AgentProcess::start(home.path()).await;
        check_queue(&agent.socket, &when).await;
        let life = Duration::from_millis(random.random_range(0..LIFE_MS));
        let used = use_podcasts(
            agent.socket.clone(),
            origin.url(""),
            library.clone(),
            &mut random,
            &mut acknowledged,
        );
        let killed = async {
            // sleep: the moment of the kill is the subject
            tokio::time::sleep(life).await;
            agent.kill().await;
        };
        tokio::join!(used, killed);
        check(&library, &mut acknowledged, &when, false);
    }
    // Left alone, everything comes to its end.
    is_fast.store(true, Ordering::Relaxed);
    let agent = AgentProcess::start(home.path()).await;
    let mut client = AgentApiClient::connect_to(&agent.socket).await.expect("it");
    for channel in library.channels().expect("the channels") {
        let refreshed = PodcastRequest::Refresh {
            channel: Some(channel.id.to_string()),
        };
        ask(&mut client, refreshed).await.expect("refreshed");
    }
    let of_state = |channel: ChannelId, state| {
        let query = EpisodeQuery {
            channel: Some(channel),
            state: Some(state),
            ..EpisodeQuery::default()
        };
        library.episodes(&query).expect("the episodes").len()
    };
    let podcasts = home.path().join("Podcasts");
    let all_ready = || -> usize {
        let channels = library.channels().expect("the channels");
        let ready = |channel: &ChannelSummary| of_state(channel.id, EpisodeState::Ready);
        channels.iter().map(ready).sum()
    };
    // What a refresh brought may begin after everything else has ended, and take the place of older files.
    until(&format!("all is whole, seed {seed}"), || {
        let channels = library.channels().expect("the channels");
        let is_left = count_files(&podcasts, ".part") > 0;
        !is_left
            && count_files(&podcasts, ".mp3") == all_ready()
            && channels.iter().all(|channel| {
                let (id, kept) = (channel.id, channel.rule.keep.latest as usize);
                of_state(id, EpisodeState::Downloading) == 0
                    && of_state(id, EpisodeState::Failed) == 0
                    && of_state(id, EpisodeState::Ready) >= kept.min(channel.episodes as usize)
            })
    })
    .await;
    let when = format!("seed {seed}, at the end");
    check(&library, &mut acknowledged, &when, true);
    assert_eq!(
        library.channels().expect("the channels").len(),
        acknowledged.subscribed.len(),
        "{when}"
    );
    let ready = all_ready();
    assert!(acknowledged.page_bytes > 0, "{when}: no page was open");
    eprintln!(
        "{} channels, {ready} episodes whole, {} positions, {} bytes of pages",
        acknowledged.subscribed.len(),
        acknowledged.positions.len(),
        acknowledged.page_bytes
    );
}
