//! `cedos cast`: podcasts of the agent from the command line.

mod cast_log;
mod cast_play;
mod cast_text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use cedos_agent::agent::api::{AgentRequest, INDEX_DOWNLOAD_FILE, PodcastRequest};
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::deadline_text::parse_deadline;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::outcome::TransferFailure;
use cedos_agent::fetch::state_directory::state_directory;
use cedos_agent::order::{TransferOrder, TransferVerb};
use cedos_readycast::UpNextMove;
use cedos_terminal::{print_stderr, print_stdout};
use clap::{Args, Subcommand};
use d2tp_sched::CostPolicy;
use jiff::Zoned;
use serde_json::{Value, json};
use url::Url;

use super::agent_start;
use super::credentials::{CredentialArgs, hide_passwords};
use super::handover;
use super::url::{parse_url, report_failure};
use crate::help::COST_AND_TIME;

/// Podcasts that are on this device when they are wanted
///
/// The agent reads the feeds, and downloads episodes by the rule of their channel: by a time of day, within
/// a time of being published, or whenever a free network is there. It is started if none runs.
///
/// Exit codes: 0 done, 1 error, 2 usage.
#[derive(Debug, Args)]
pub struct CastArgs {
    #[command(subcommand)]
    verb: CastVerb,
}

/// What is done with podcasts.
#[derive(Debug, Subcommand)]
enum CastVerb {
    /// Subscribe to a podcast: the address of its feed, or of a page that links to it
    ///
    /// With a password, the agent keeps it for the host of the feed, and shows it to nobody.
    Add {
        /// The address: http:// or https://
        #[arg(value_parser = parse_url)]
        url: Url,
        #[command(flatten)]
        credentials: Box<CredentialArgs>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Search a directory for podcasts
    Search {
        /// Words of the title
        #[arg(required = true)]
        words: Vec<String>,
        /// Search the index on this device, which `cedos cast index` makes
        #[arg(long)]
        offline: bool,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Make an index of all podcasts on this device, for searches without a network
    ///
    /// Podcast Index publishes one as podcastindex_feeds.db.tgz (some GB). An address is downloaded over
    /// free networks first.
    Index {
        /// The file, its archive, or its address
        source: String,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Write a copy of the library: subscriptions, episodes, positions, rules
    ///
    /// Passwords of feeds are in it. To go back to it, end the agent, and copy it over
    /// podcasts/library.sqlite in the directory of the state.
    Backup {
        /// The file to write, which must not exist
        file: PathBuf,
        #[command(flatten)]
        output: CastOutput,
    },
    /// List the channels with their rules, or the channels and episodes with these words in their titles
    List {
        /// Words of titles [default: all channels]
        words: Vec<String>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Show a channel and its newest episodes
    Show {
        #[command(flatten)]
        channel: NamedChannel,
        /// Show at most this many episodes
        #[arg(long, value_name = "N", default_value_t = 20)]
        limit: u32,
        #[command(flatten)]
        output: CastOutput,
    },
    /// List the episodes that are downloaded, by their deadlines, and those that are ready
    Queue {
        #[command(flatten)]
        output: CastOutput,
    },
    /// List the episodes in the order in which they will be heard, or put one where it belongs
    ///
    /// These are the episodes that are ready or coming and were not heard to their end. Those that nobody moved are in the order
    /// of their publication, behind the others. Downloads follow the order where deadlines leave a choice, and `cedos cast play`
    /// goes on in it. An episode that is not on this device is downloaded.
    Next {
        /// The number of the episode to move, to the top unless an option says where
        #[arg(value_parser = parse_episode)]
        episode: Option<i64>,
        /// Put it before all others
        #[arg(long, requires = "episode", conflicts_with_all = ["up", "down", "last"])]
        top: bool,
        /// Move it one place nearer to the top
        #[arg(long, requires = "episode", conflicts_with_all = ["down", "last"])]
        up: bool,
        /// Move it one place further from the top
        #[arg(long, requires = "episode", conflicts_with = "last")]
        down: bool,
        /// Put it behind all others
        #[arg(long, requires = "episode")]
        last: bool,
        /// Go back to the order of publication
        #[arg(long, conflicts_with = "episode")]
        reset: bool,
        #[command(flatten)]
        output: CastOutput,
    },
    /// List the episodes that were begun and not heard to their end, the one that was heard last first
    Continue {
        #[command(flatten)]
        output: CastOutput,
    },
    /// Show an episode: its notes, chapters and where it is
    Notes {
        /// The number of the episode
        #[arg(value_parser = parse_episode)]
        episode: i64,
        /// Show the transcript, too
        #[arg(long)]
        transcript: bool,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Play an episode from where it was heard to, also while it is not whole
    ///
    /// The player is given the copy that the agent downloads; an episode that nobody asked for is downloaded, and stays as
    /// the channel's rule says. Without a number, the episode that was heard last goes on, else the first of `cedos cast next`.
    /// When mpv came to the end of an episode, the next one follows.
    ///
    /// The player is $CEDOS_PLAYER, else mpv. mpv begins where the episode was heard to, and where it ends is stored. For
    /// another player, {start} in $CEDOS_PLAYER stands for the second to begin at, and only that it played is noted.
    /// Without a player the link or file is printed, and the link works until stopped. The exit code is the player's; 3 if stopped.
    Play(cast_play::CastPlayArgs),
    /// Show how far an episode was heard, or set it
    Position {
        /// The number of the episode
        #[arg(value_parser = parse_episode)]
        episode: i64,
        /// The position: 12:34, 1:02:03, 0 for the beginning [default: as it is]
        #[arg(value_parser = cast_text::parse_clock)]
        position: Option<u64>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Set when episodes of a channel are wanted, and how many are kept
    Rule {
        /// The channel: its number, address, or words of its title
        channel: String,
        /// weekdays 07:30, fri 16:00, in 2h, whenever it is free, by hand [default: as it is]
        #[arg(value_name = "WHEN")]
        schedule: Vec<String>,
        /// Keep at most this many of the newest episodes
        #[arg(long, value_name = "N")]
        keep: Option<u32>,
        /// Keep at most this much of the channel: 500M, 2G
        #[arg(long, value_name = "SIZE", value_parser = option_parsers::parse_bytes)]
        keep_size: Option<u64>,
        /// Remove an episode from this device when it was played
        #[arg(long, value_name = "YES|NO", value_parser = parse_yes_or_no)]
        remove_played: Option<bool>,
        /// When to use metered networks: free-only, free-first, balanced, fast, any; `default` is the device's
        #[arg(long, help_heading = COST_AND_TIME)]
        policy: Option<String>,
        /// Where an episode has several files: original (the podcast's own), audio (rather than a video), smallest
        #[arg(long, value_name = "WHICH", value_parser = ["original", "audio", "smallest"])]
        file: Option<String>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Show what downloads cost, how they came, and whether they were there in time
    ///
    /// The log stays on this device. A delay is none if an episode was wanted at once. What is saved is against
    /// a client that begins again at the first byte whenever it loses its network.
    Log(cast_log::LogArgs),
    /// Write the log of downloads to a file, for a study or another program
    Export(cast_log::ExportArgs),
    /// Exchange subscriptions with other programs
    #[command(subcommand)]
    Opml(OpmlVerb),
    /// Let other podcast apps on this machine use the agent's downloads
    ///
    /// Prints what an app is to be told: the address of a list of subscriptions (OPML) whose episodes come through the
    /// agent, by its rules and networks; and a server of the gpodder API, with user and password, that the app can sync
    /// subscriptions and positions with.
    Apps {
        /// Close it: what apps were told no longer works
        #[arg(long, conflicts_with = "new_links")]
        off: bool,
        /// Make new addresses and a new password: those until now no longer work
        #[arg(long)]
        new_links: bool,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Sync subscriptions and positions with a server of the gpodder API
    ///
    /// Such servers are gpodder.net, oPodSync, gpodder2go and Nextcloud's GPodder Sync. With the address of a server,
    /// that one is set up; the agent then syncs with it once an hour. Without one, it syncs now.
    Sync {
        /// The address of the server: https:// or http://
        #[arg(value_parser = parse_url)]
        url: Option<Url>,
        /// Forget the server; subscriptions and positions stay
        #[arg(long, conflicts_with_all = ["url", "accept_removals", "status"])]
        off: bool,
        /// Show the server that is set up, and when it was synced
        #[arg(long, conflicts_with_all = ["url", "accept_removals"])]
        status: bool,
        /// End subscriptions here also if the server ends many at once
        #[arg(long, conflicts_with = "url")]
        accept_removals: bool,
        #[command(flatten)]
        credentials: Box<CredentialArgs>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Read feeds now, all of them or one
    Refresh {
        /// The channel: its number, address, or words of its title
        channel: Vec<String>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// End a subscription, and remove its downloaded episodes
    Remove {
        #[command(flatten)]
        channel: NamedChannel,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Mark an episode as played; its file goes when the rule says so
    Played {
        /// The number of the episode
        #[arg(value_parser = parse_episode)]
        episode: i64,
        /// Mark it as not played
        #[arg(long)]
        not: bool,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Download an episode, whatever the rule of its channel says
    Download {
        /// The number of the episode
        #[arg(value_parser = parse_episode)]
        episode: i64,
        /// Finish by TIME: 07:30 (the next one), 7pm, tomorrow 07:30, friday 16:00, +45m [default: no deadline]
        #[arg(long, value_name = "TIME", help_heading = COST_AND_TIME)]
        by: Option<String>,
        /// When to use metered networks [default: as the channel's rule says]
        #[arg(long, help_heading = COST_AND_TIME)]
        policy: Option<String>,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Take an episode out of the queue, and do not ask for it any longer
    Cancel {
        /// The number of the episode
        #[arg(value_parser = parse_episode)]
        episode: i64,
        #[command(flatten)]
        output: CastOutput,
    },
}

/// Subscriptions in a file.
#[derive(Debug, Subcommand)]
enum OpmlVerb {
    /// Subscribe to the podcasts that another program exported
    Import {
        /// The OPML file
        file: PathBuf,
        #[command(flatten)]
        output: CastOutput,
    },
    /// Write the subscriptions for other programs, without passwords
    Export {
        /// The file to write [default: standard output]
        file: Option<PathBuf>,
        /// For other podcast apps on this machine: episodes come through the agent
        #[arg(long)]
        for_apps: bool,
        #[command(flatten)]
        output: CastOutput,
    },
}

/// A channel on the command line.
#[derive(Debug, Args)]
struct NamedChannel {
    /// The channel: its number, address, or words of its title
    #[arg(value_name = "CHANNEL", required = true)]
    words: Vec<String>,
}

/// How a verb of `cedos cast` prints.
#[derive(Debug, Args)]
struct CastOutput {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn parse_yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        other => Err(format!("`{other}` is neither yes nor no")),
    }
}

fn parse_episode(text: &str) -> Result<i64, String> {
    text.trim_start_matches('#').parse().map_err(|_| {
        format!("`{text}` is not the number of an episode; `cedos cast show CHANNEL` lists them")
    })
}

/// Runs a verb of `cedos cast`.
///
/// # Errors
/// The agent cannot be started.
pub async fn run(args: CastArgs) -> anyhow::Result<ExitCode> {
    match args.verb {
        CastVerb::Play(args) => cast_play::play(args).await,
        CastVerb::Opml(OpmlVerb::Export {
            file,
            for_apps,
            output,
        }) => export(file, for_apps, output.json).await,
        CastVerb::Index { source, output } => Ok(match index(&source, output.json).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => failed(&failure),
        }),
        CastVerb::Log(args) => cast_log::log(args).await,
        CastVerb::Export(args) => cast_log::export(args).await,
        verb => {
            let (request, json) = match request(verb)? {
                Ok(request) => request,
                Err(text) => return Ok(failed(&TransferFailure::usage(text))),
            };
            let mut agent = agent_start::connect_or_start().await?;
            Ok(match ask(&mut agent, &request).await {
                Ok(answer) => {
                    show(&request, &answer, json);
                    ExitCode::SUCCESS
                }
                Err(failure) => failed(&failure),
            })
        }
    }
}

fn failed(failure: &TransferFailure) -> ExitCode {
    report_failure("cast", failure)
}

async fn ask(
    agent: &mut AgentApiClient,
    request: &PodcastRequest,
) -> Result<Value, TransferFailure> {
    let mut answer = agent.ask(&AgentRequest::Cast(request.clone())).await?;
    // Only the agent and its client say it to each other.
    if let Some(fields) = answer.as_object_mut() {
        fields.remove("ok");
    }
    Ok(answer)
}

/// The request of a verb, and whether the answer is printed as JSON; or what is wrong with the command line.
fn request(verb: CastVerb) -> anyhow::Result<Result<(PodcastRequest, bool), String>> {
    let by = |text: &String| parse_deadline(text, &Zoned::now()).map(|by| by.due().at());
    Ok(Ok(match verb {
        CastVerb::Add {
            mut url,
            credentials,
            output,
        } => {
            hide_passwords();
            if let Err(text) = credentials.apply(std::slice::from_mut(&mut url)) {
                return Ok(Err(text));
            }
            (PodcastRequest::Add { url }, output.json)
        }
        CastVerb::Search {
            words,
            offline,
            output,
        } => {
            let words = words.join(" ");
            (PodcastRequest::Search { words, offline }, output.json)
        }
        CastVerb::Backup { file, output } => {
            let file = std::path::absolute(&file).context("the working directory is gone")?;
            (PodcastRequest::Backup { file }, output.json)
        }
        CastVerb::List { words, output } => {
            let words = words.join(" ");
            (PodcastRequest::List { words }, output.json)
        }
        CastVerb::Notes {
            episode,
            transcript,
            output,
        } => {
            let episode = episode_id(episode);
            let request = PodcastRequest::Episode {
                episode,
                transcript,
            };
            (request, output.json)
        }
        CastVerb::Position {
            episode,
            position,
            output,
        } => {
            let request = PodcastRequest::Position {
                episode: episode_id(episode),
                position_ms: position.map(|seconds| seconds.saturating_mul(1000)),
                duration_ms: None,
            };
            (request, output.json)
        }
        CastVerb::Cancel { episode, output } => {
            let episode = episode_id(episode);
            (PodcastRequest::NotWanted { episode }, output.json)
        }
        CastVerb::Show {
            channel,
            limit,
            output,
        } => {
            let channel = channel.words.join(" ");
            (PodcastRequest::Show { channel, limit }, output.json)
        }
        CastVerb::Queue { output } => (PodcastRequest::Queue, output.json),
        CastVerb::Next {
            episode,
            top: _,
            up,
            down,
            last,
            reset,
            output,
        } => {
            let to = match (up, down, last) {
                (true, ..) => UpNextMove::Up,
                (_, true, _) => UpNextMove::Down,
                (.., true) => UpNextMove::Last,
                _ => UpNextMove::Top,
            };
            let episode = episode.map(episode_id);
            (PodcastRequest::UpNext { episode, to, reset }, output.json)
        }
        CastVerb::Continue { output } => (PodcastRequest::Continue, output.json),
        CastVerb::Rule {
            channel,
            schedule,
            keep,
            keep_size,
            remove_played,
            policy,
            file,
            output,
        } => {
            let schedule = (!schedule.is_empty()).then(|| schedule.join(" "));
            let request = PodcastRequest::Rule {
                channel,
                schedule,
                keep,
                keep_bytes: keep_size,
                unplayed_only: remove_played,
                policy,
                file,
            };
            (request, output.json)
        }
        CastVerb::Opml(OpmlVerb::Import { file, output }) => {
            let file = std::path::absolute(&file).context("the working directory is gone")?;
            (PodcastRequest::Import { file }, output.json)
        }
        CastVerb::Apps {
            off,
            new_links,
            output,
        } => {
            let request = match off {
                true => PodcastRequest::AppsClose,
                false => PodcastRequest::Apps { new_links },
            };
            (request, output.json)
        }
        CastVerb::Sync {
            mut url,
            off,
            status,
            accept_removals,
            credentials,
            output,
        } => {
            hide_passwords();
            if let Some(url) = &mut url
                && let Err(text) = credentials.apply(std::slice::from_mut(url))
            {
                return Ok(Err(text));
            }
            let request = match (off, status) {
                (true, _) => PodcastRequest::SyncEnd,
                (_, true) => PodcastRequest::SyncStatus,
                _ => PodcastRequest::Sync {
                    url,
                    accept_removals,
                },
            };
            (request, output.json)
        }
        CastVerb::Refresh { channel, output } => {
            let channel = (!channel.is_empty()).then(|| channel.join(" "));
            (PodcastRequest::Refresh { channel }, output.json)
        }
        CastVerb::Remove { channel, output } => {
            let channel = channel.words.join(" ");
            (PodcastRequest::Remove { channel }, output.json)
        }
        CastVerb::Played {
            episode,
            not,
            output,
        } => {
            let (episode, played) = (episode_id(episode), !not);
            (PodcastRequest::Played { episode, played }, output.json)
        }
        CastVerb::Download {
            episode,
            by: text,
            policy,
            output,
        } => {
            let by = match text.as_ref().map(by).transpose() {
                Ok(by) => by,
                Err(text) => return Ok(Err(text)),
            };
            let episode = episode_id(episode);
            let request = PodcastRequest::Download {
                episode,
                by,
                policy,
            };
            (request, output.json)
        }
        CastVerb::Play(_)
        | CastVerb::Index { .. }
        | CastVerb::Log(_)
        | CastVerb::Export(_)
        | CastVerb::Opml(OpmlVerb::Export { .. }) => {
            unreachable!("these are carried out where they are read")
        }
    }))
}

fn episode_id(number: i64) -> cedos_readycast::EpisodeId {
    cedos_readycast::EpisodeId(number)
}

fn show(request: &PodcastRequest, answer: &Value, json: bool) {
    if json {
        return print_stdout(&answer.to_string());
    }
    for line in cast_text::lines(request, answer, &Zoned::now()) {
        print_stdout(&line);
    }
    for note in cast_text::notes(request, answer) {
        print_stderr(&note);
    }
}

async fn export(file: Option<PathBuf>, for_apps: bool, json: bool) -> anyhow::Result<ExitCode> {
    let mut agent = agent_start::connect_or_start().await?;
    let answer = match ask(&mut agent, &PodcastRequest::Export { for_apps }).await {
        Ok(answer) => answer,
        Err(failure) => return Ok(failed(&failure)),
    };
    let opml = answer["opml"].as_str().context("the agent sent no list")?;
    if let Some(file) = &file {
        std::fs::write(file, opml).with_context(|| format!("cannot write {}", file.display()))?;
    }
    match (&file, json) {
        (Some(file), true) => print_stdout(&json!({ "file": file }).to_string()),
        (None, true) => print_stdout(&json!({ "opml": opml }).to_string()),
        (Some(_), false) => {}
        (None, false) => print_stdout(opml),
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes the index on this device from a file, or from what an address has.
async fn index(source: &str, json: bool) -> Result<(), TransferFailure> {
    let stopped = |error: anyhow::Error| TransferFailure::error(format!("{error:#}"));
    let is_address = source.starts_with("http://") || source.starts_with("https://");
    let file = match is_address {
        true => {
            let agent = agent_start::connect_or_start().await.map_err(stopped)?;
            download_index(agent, source).await?
        }
        false => std::path::absolute(source)
            .map_err(|error| TransferFailure::usage(format!("{source}: {error}")))?,
    };
    let request = PodcastRequest::Index { file: file.clone() };
    // The connection of a transfer that was followed ends with it.
    let mut agent = agent_start::connect_or_start().await.map_err(stopped)?;
    let made = ask(&mut agent, &request).await;
    if is_address {
        // It is of no more use, and large.
        let _ = std::fs::remove_file(&file);
    }
    show(&request, &made?, json);
    Ok(())
}

/// Downloads a published index by free networks; returns its file. A download that broke off goes on.
async fn download_index(
    mut agent: AgentApiClient,
    address: &str,
) -> Result<PathBuf, TransferFailure> {
    let state = state_directory().map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    let file = state.join(INDEX_DOWNLOAD_FILE);
    let mut order = TransferOrder::new(TransferVerb::Get, address);
    order.file = Some(file.clone());
    CostPolicy::FreeOnly.as_str().clone_into(&mut order.policy);
    let added = handover::add(&mut agent, order, true, true).await?;
    print_stderr(&format!(
        "Downloading the index, by free networks only; `cedos status {}` shows how far it is",
        added["id"]
    ));
    loop {
        let gone = || TransferFailure::error("the agent has stopped; run the same command again");
        let event = agent.next().await.ok_or_else(gone)?;
        match event["event"].as_str() {
            Some("done") => return Ok(file),
            Some("error") => {
                let why = event["text"].as_str().unwrap_or("the download failed");
                return Err(TransferFailure::error(why));
            }
            _ => {}
        }
    }
}
