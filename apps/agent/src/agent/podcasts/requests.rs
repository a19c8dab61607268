//! What `cedos cast` asks of the agent, and the answers in JSON.
//!
//! ```text
//!  {"do":"cast","cast":"rule","channel":"morning","schedule":"weekdays 07:30"}   ▶
//!                                                  ◀ {"ok":true,"channel":{"id":3,"title":…,"rule":{…}}}
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use cedos_readycast::{
    Channel, ChannelId, ChannelSummary, DelayProposal, DownloadSchedule, EnclosureChoice, Episode,
    EpisodeDeadline, EpisodeId, EpisodeQuery, EpisodeState, EpisodeSummary, FEED_BYTES_MAX,
    FeedError, Library, LibraryError, PROPOSAL_PLAYS_MAX, RefreshReport, TransferLogPage,
    UpNextMove, feed_links_of_page, parse_feed, propose_delay, read_opml, write_opml,
};
use d2tp_sched::CostPolicy;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::{Timestamp, Zoned};
use serde::Serialize;
use serde_json::{Value, json};
use url::Url;

use super::super::api::ok_response;
use super::super::state::Agent;
use super::downloads::{discard_part, ready_file, remove};
use super::episode_copy::is_coming;
use super::episode_notes::notes_text;
use super::feed_fetch::{FeedAnswer, FeedFault, FeedFetch, named_host};
use super::podcast_request::PodcastRequest;
use super::refreshes::{outcome_of, status_text};
use super::service::PodcastService;
use super::sync::SyncCause;
use crate::fetch::outcome::TransferFailure;

/// The maximum number of bytes of an imported list of subscriptions.
const OPML_BYTES_MAX: u64 = 16 << 20; // a guess: 10,000 feeds are 3 MB

/// Bytes after which a part of the log ends: with the longest entry it is less than a line of the agent's socket.
const LOG_PAGE_BYTES: usize = 256 << 10;

/// The maximum number of episodes that a search in the library shows.
const FOUND_MAX: u32 = 100; // a guess: more is no help

/// The longest position that is stored: four days.
const POSITION_MS_MAX: u64 = 4 * 24 * 3_600 * 1_000; // a guess

/// The maximum number of episodes that a request shows.
const SHOWN_MAX: u32 = 1_000;

/// Feeds of a refresh of all that wait for their turn at the same time, so that one feed alone waits for few of them.
const REFRESHED_AHEAD: usize = 16; // a guess: four times those that are fetched

/// Pages of a podcast that are tried for a feed.
const FEED_LINKS_MAX: usize = 3; // a guess: the first is the podcast, the others comments

/// A channel that was subscribed to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(in super::super) struct AddedChannel {
    /// Channel as a list shows it, after its feed was read.
    pub(in super::super) channel: ChannelSummary,
    /// What its feed brought.
    pub(in super::super) report: RefreshReport,
    /// Whether no network was up, so that its feed is read later.
    pub(in super::super) is_read_later: bool,
}

/// What came of an import of subscriptions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(in super::super) struct ImportedSubscriptions {
    /// Feeds of the list that are subscribed to now.
    pub(in super::super) feeds: usize,
    /// Entries that were left out, each with the reason.
    pub(in super::super) skipped: Vec<String>,
}

/// A change of a channel's rule, as a person writes it; what is none stays.
#[derive(Debug, Clone, Copy, Default)]
pub(in super::super) struct RuleChange<'a> {
    /// When new episodes are wanted.
    pub(in super::super) schedule: Option<&'a str>,
    /// How many of the newest episodes are kept.
    pub(in super::super) keep: Option<u32>,
    /// The maximum number of bytes of the channel's files.
    pub(in super::super) keep_bytes: Option<u64>,
    /// Whether an episode is removed when it was played.
    pub(in super::super) unplayed_only: Option<bool>,
    /// The policy of downloads; `default` is the device's own.
    pub(in super::super) policy: Option<&'a str>,
    /// Which of several files is downloaded.
    pub(in super::super) enclosure: Option<&'a str>,
}

/// Reads a policy as `--policy` takes it.
fn policy(text: &str) -> Result<String, TransferFailure> {
    let policy = text.parse::<CostPolicy>();
    let policy = policy
        .map_err(|error: d2tp_sched::ParsePolicyError| TransferFailure::usage(error.to_string()))?;
    Ok(policy.as_str().to_owned())
}

pub(super) fn no_episode(episode: EpisodeId) -> TransferFailure {
    TransferFailure::usage(format!(
        "there is no episode {episode}; `cedos cast show CHANNEL` lists them"
    ))
}

impl PodcastService {
    /// The channel that a person named: by number, address or words of the title.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub(in super::super) async fn named(
        &self,
        words: &str,
    ) -> Result<ChannelSummary, TransferFailure> {
        let owned = words.to_owned();
        let found = self
            .with(move |library| library.find_channels(&owned))
            .await?;
        match &found[..] {
            [one] => Ok(one.clone()),
            [] => Err(TransferFailure::usage(format!(
                "no channel is called `{words}`; `cedos cast list` lists them"
            ))),
            several => {
                let names = several.iter().take(5);
                let names: Vec<String> = names.map(|c| format!("{} ({})", c.id, c.title)).collect();
                Err(TransferFailure::usage(format!(
                    "`{words}` is in several titles: {}; name one by its number",
                    names.join(", ")
                )))
            }
        }
    }

    async fn channel(&self, channel: ChannelId) -> Result<Channel, TransferFailure> {
        let found = self.with(move |library| library.channel(channel)).await?;
        found.ok_or_else(|| TransferFailure::usage(format!("there is no channel {channel}")))
    }

    /// An episode by its number.
    ///
    /// # Errors
    /// There is none.
    pub(in super::super) async fn episode(
        &self,
        episode: EpisodeId,
    ) -> Result<Episode, TransferFailure> {
        let found = self.with(move |library| library.episode(episode)).await?;
        found.ok_or_else(|| no_episode(episode))
    }

    /// Subscribes to all feeds of a list.
    ///
    /// # Errors
    /// It is no list that can be read.
    pub(in super::super) async fn import(
        &self,
        opml: Vec<u8>,
    ) -> Result<ImportedSubscriptions, TransferFailure> {
        let now = Timestamp::now();
        let imported = self.with(move |library| {
            let list = read_opml(&opml)?;
            let imported = library.subscribe_all(&list.feeds, now)?;
            let mut skipped = list.skipped;
            skipped.extend(imported.skipped);
            Ok(ImportedSubscriptions {
                feeds: imported.feeds,
                skipped,
            })
        });
        let imported = imported.await?;
        self.changed();
        Ok(imported)
    }

    /// The subscriptions as OPML. Passwords are not in it.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(in super::super) async fn export(&self) -> Result<String, TransferFailure> {
        let channels = self.with(Library::channels).await?;
        Ok(write_opml(channels.iter(), |channel| channel.url.clone()))
    }

    /// The rule that fits how a channel is listened to; none if the present one does.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(in super::super) async fn proposal(
        &self,
        channel: &ChannelSummary,
    ) -> Result<Option<DelayProposal>, TransferFailure> {
        let (id, present) = (channel.id, channel.rule.schedule);
        let played = self
            .with(move |library| library.played_transfers(id, PROPOSAL_PLAYS_MAX))
            .await?;
        Ok(propose_delay(&played, present, Zoned::now().time_zone()))
    }

    /// Stores where a player is.
    ///
    /// # Errors
    /// There is no such episode.
    pub(in super::super) async fn store_position(
        &self,
        episode: EpisodeId,
        position_ms: u64,
        duration_ms: Option<u64>,
    ) -> Result<(), TransferFailure> {
        let position_ms = position_ms.min(POSITION_MS_MAX);
        let duration_ms = duration_ms.map(|ms| ms.min(POSITION_MS_MAX));
        let now = Timestamp::now();
        let stored = self
            .with(move |library| library.set_position(episode, position_ms, duration_ms, now))
            .await;
        self.changed();
        stored
    }

    /// Marks an episode as played, or as not played.
    ///
    /// # Errors
    /// There is no such episode.
    pub(in super::super) async fn mark_played(
        &self,
        episode: EpisodeId,
        played: bool,
    ) -> Result<Episode, TransferFailure> {
        self.episode(episode).await?;
        let now = Timestamp::now();
        self.with(move |library| library.set_played(episode, played, now))
            .await?;
        self.changed();
        self.episode(episode).await
    }
}

/// Whether bytes begin as a feed does: with XML, or with an object of JSON.
fn is_like_feed(body: &[u8]) -> bool {
    let text = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let first = text.iter().find(|byte| !byte.is_ascii_whitespace());
    matches!(first, Some(b'<' | b'{'))
}

impl Agent {
    /// Subscribes to a feed, or to the feed that a page links to.
    ///
    /// # Errors
    /// There is no feed, or it cannot be read.
    pub(in super::super) async fn add_podcast(
        &self,
        url: &Url,
    ) -> Result<AddedChannel, TransferFailure> {
        let mut url = url.clone();
        url.set_fragment(None);
        if !matches!(url.scheme(), "http" | "https") {
            let text = format!("{}: is not read; use http: or https:", url.scheme());
            return Err(TransferFailure::usage(text));
        }
        let ask = FeedFetch::of(url.clone(), FEED_BYTES_MAX).with_local_host(named_host(&url));
        let answer = match self.fetch_document(&ask).await {
            Ok(answer) => answer,
            Err(FeedFault::NoNetwork) => return self.subscribe(&url, None).await,
            Err(FeedFault::Failed(text)) => return Err(TransferFailure::error(text)),
        };
        let answer = read_answer(answer)?;
        match parsed(&answer).await? {
            Ok(()) => self.subscribe(&url, Some(answer)).await,
            Err(FeedError::WebPage) => {
                let links = feed_links_of_page(&answer.body, &answer.url);
                for link in links.into_iter().take(FEED_LINKS_MAX) {
                    // A page in a local network may lead to its own host, one of the Internet to none there.
                    let ask = FeedFetch::of(link.clone(), FEED_BYTES_MAX)
                        .with_local_host(answer.local_host.clone());
                    let Ok(answer) = self.fetch_document(&ask).await else {
                        continue;
                    };
                    if let Ok(answer) = read_answer(answer)
                        && parsed(&answer).await?.is_ok()
                    {
                        return self.subscribe(&link, Some(answer)).await;
                    }
                }
                let text = "this page links to no podcast that can be read; look for the address of its feed (RSS), \
                            or try `cedos cast search`";
                Err(TransferFailure::error(text))
            }
            Err(FeedError::Malformed(_)) if !is_like_feed(&answer.body) => {
                let text = "what is at this address is not a feed; look for the address of the podcast's feed (RSS), or \
                            try `cedos cast search`";
                Err(TransferFailure::error(text))
            }
            Err(error) => Err(TransferFailure::error(error.to_string())),
        }
    }

    /// Subscribes, and stores what the feed brought.
    async fn subscribe(
        &self,
        url: &Url,
        answer: Option<FeedAnswer>,
    ) -> Result<AddedChannel, TransferFailure> {
        let (service, now) = (&self.podcasts, Timestamp::now());
        let is_read_later = answer.is_none();
        let is_local = answer.as_ref().is_some_and(|a| a.local_host.is_some());
        let (url, outcome) = (url.clone(), answer.map(outcome_of));
        let adding = service.adding.lock().await;
        let (id, report) = service
            .with(move |library| {
                let id = library.subscribe(&url, now)?;
                if is_local {
                    library.allow_local_host(id)?;
                }
                let report = match outcome {
                    Some(outcome) => library.apply_refresh(id, outcome, now)?,
                    None => RefreshReport::default(),
                };
                Ok((id, report))
            })
            .await?;
        drop(adding);
        service.changed();
        Ok(AddedChannel {
            channel: service.channel(id).await?.summary,
            report,
            is_read_later,
        })
    }

    /// Changes the rule of a channel.
    ///
    /// # Errors
    /// The schedule, the policy or the choice of files is none, in words.
    pub(in super::super) async fn change_podcast_rule(
        self: &Arc<Agent>,
        channel: ChannelId,
        change: RuleChange<'_>,
    ) -> Result<ChannelSummary, TransferFailure> {
        let service = &self.podcasts;
        let mut rule = service.channel(channel).await?.summary.rule;
        if let Some(text) = change.schedule {
            rule.schedule = text
                .parse::<DownloadSchedule>()
                .map_err(TransferFailure::usage)?;
        }
        if let Some(latest) = change.keep {
            rule.keep.latest = latest;
        }
        if let Some(unplayed_only) = change.unplayed_only {
            rule.keep.unplayed_only = unplayed_only;
        }
        rule.keep.bytes_max = change.keep_bytes.or(rule.keep.bytes_max);
        match change.policy {
            Some("default") => rule.policy = None,
            Some(text) => rule.policy = Some(policy(text)?),
            None => {}
        }
        if let Some(text) = change.enclosure {
            rule.enclosure = text
                .parse::<EnclosureChoice>()
                .map_err(TransferFailure::usage)?;
        }
        service
            .with(move |library| library.set_channel_rule(channel, &rule))
            .await?;
        self.retime_downloads(channel).await?;
        service.changed();
        Ok(service.channel(channel).await?.summary)
    }

    /// Asks for an episode by a time of its own.
    ///
    /// # Errors
    /// There is no such episode, or the policy is none.
    pub(in super::super) async fn ask_for_episode(
        self: &Arc<Agent>,
        episode: EpisodeId,
        by: Option<Timestamp>,
        of_policy: Option<&str>,
    ) -> Result<Episode, TransferFailure> {
        if by.is_some_and(|by| by <= Timestamp::now()) {
            let text = "that time has passed; give one in the future";
            return Err(TransferFailure::usage(text));
        }
        let service = &self.podcasts;
        let found = service.episode(episode).await?;
        let channel = found.summary.channel;
        if found.summary.state == EpisodeState::Ready && ready_file(&found).await.is_none() {
            service
                .with(move |library| library.note_removed(episode))
                .await?;
        }
        let wanted = EpisodeDeadline {
            by,
            policy: of_policy.map(policy).transpose()?,
        };
        service
            .with(move |library| library.set_episode_deadline(episode, Some(&wanted)))
            .await?;
        self.retime_downloads(channel).await?;
        service.changed();
        service.episode(episode).await
    }

    /// Takes back that an episode was asked for, and takes it out of the queue if it is in it.
    ///
    /// # Errors
    /// There is no such episode, or nobody asked for it.
    pub(in super::super) async fn take_back_episode(
        self: &Arc<Agent>,
        id: EpisodeId,
    ) -> Result<Episode, TransferFailure> {
        let service = &self.podcasts;
        let episode = service.episode(id).await?;
        if episode.own_deadline.is_none() && episode.summary.state != EpisodeState::Downloading {
            let text = format!("episode {id} is not in the queue, and nobody asked for it");
            return Err(TransferFailure::usage(text));
        }
        service
            .with(move |library| library.set_episode_deadline(id, None))
            .await?;
        if let Some(job) = episode.summary.job {
            self.cancel_download(job);
        }
        service.changed();
        service.episode(id).await
    }

    /// Ends a subscription: its downloads are cancelled, its files removed. Returns the files that are gone.
    ///
    /// # Errors
    /// There is no such channel.
    pub(in super::super) async fn remove_podcast(
        self: &Arc<Agent>,
        channel: ChannelId,
    ) -> Result<usize, TransferFailure> {
        let service = &self.podcasts;
        // No download of it begins in between.
        let planning = service.planning.lock().await;
        let known = service.with(move |library| {
            let is_its = |episode| {
                let found = library.episode(episode)?;
                Ok::<_, LibraryError>(found.is_some_and(|e| e.summary.channel == channel))
            };
            let mut running = Vec::new();
            for download in library.active_downloads()? {
                if is_its(download.episode)? {
                    running.push(download);
                }
            }
            let mut files = Vec::new();
            for ready in library.ready_files()? {
                if is_its(ready.episode)? {
                    files.push(ready.file);
                }
            }
            Ok((running, files, library.failed_files(channel)?))
        });
        let (running, files, failed) = known.await?;
        // The library forgets it last: an agent that is killed before knows what is left to be removed.
        for download in running {
            self.discard_download(&download).await;
        }
        for file in failed {
            discard_part(&file).await;
        }
        let is_removed = |file: &&PathBuf| file.exists() && remove(file);
        let mut removed = files.iter().filter(is_removed).count();
        let ended = service.with(move |library| library.unsubscribe(channel));
        removed += ended.await?.iter().filter(is_removed).count();
        drop(planning);
        service.changed();
        Ok(removed)
    }

    /// An episode in JSON, with its transfer and promise while it has one.
    pub(super) fn episode_json(&self, episode: &EpisodeSummary) -> Value {
        let mut value = serde_json::to_value(episode).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("transfer".into(), json!(self.episode_transfer(episode)));
        }
        value
    }

    async fn whole_episode_json(&self, episode: &Episode) -> Value {
        let mut value = serde_json::to_value(episode).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("summary".into(), self.episode_json(&episode.summary));
            fields.insert("file".into(), json!(ready_file(episode).await));
        }
        value
    }

    /// An episode in JSON with what a person reads of it: notes and chapters, and the transcript if that is wanted.
    async fn described_episode(self: &Arc<Agent>, episode: &Episode, transcript: bool) -> Value {
        let mut value = self.whole_episode_json(episode).await;
        let chapters = self.chapters(episode);
        let has_transcript = self.has_transcript(episode);
        if let Some(fields) = value.as_object_mut() {
            fields.insert("notes_text".into(), json!(notes_text(&episode.notes)));
            fields.insert("chapters_listed".into(), json!(chapters));
            fields.insert("has_transcript".into(), json!(has_transcript));
            if transcript {
                let passages = self.transcript(episode).await;
                fields.insert("transcript_passages".into(), json!(passages));
            }
        }
        json!({"episode": value})
    }

    /// The episodes in the queue by deadline, then those that are ready and not played.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(in super::super) async fn episode_queue(
        &self,
    ) -> Result<Vec<EpisodeSummary>, TransferFailure> {
        let of = |state| EpisodeQuery {
            state: Some(state),
            played: Some(false),
            limit: SHOWN_MAX,
            ..EpisodeQuery::default()
        };
        let found = self.podcasts.with(move |library| {
            let mut queued = library.episodes(&of(EpisodeState::Downloading))?;
            queued.sort_by_key(|e| (e.deadline.unwrap_or(Timestamp::MAX), e.published, e.id));
            let mut ready = library.episodes(&of(EpisodeState::Ready))?;
            ready.sort_by_key(|e| (e.published, e.id));
            queued.extend(ready);
            Ok(queued)
        });
        found.await
    }

    /// The episodes that are ready or coming, in the order in which they will be heard.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(in super::super) async fn up_next(&self) -> Result<Vec<EpisodeSummary>, TransferFailure> {
        let found = self.podcasts.with(|library| library.up_next(SHOWN_MAX));
        found.await
    }

    /// The episode to hear after another one; none if nothing else of the order of hearing can be played now.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(in super::super) async fn next_to_hear(
        &self,
        after: Option<EpisodeId>,
    ) -> Result<Option<EpisodeSummary>, TransferFailure> {
        let has_beginning = |episode: &EpisodeSummary| {
            episode.state == EpisodeState::Ready
                || self.episode_transfer(episode).is_some_and(|transfer| {
                    transfer["bytes"].as_u64().is_some_and(|bytes| bytes > 0)
                })
        };
        let mut others =
            (self.up_next().await?.into_iter()).filter(|episode| Some(episode.id) != after);
        Ok(others.find(has_beginning))
    }

    /// Moves an episode in the order of hearing. One that is not on this device is asked for, and one that was played is to
    /// be heard again.
    ///
    /// # Errors
    /// There is no such episode, or it cannot be fetched.
    pub(in super::super) async fn move_up_next(
        self: &Arc<Agent>,
        id: EpisodeId,
        to: UpNextMove,
    ) -> Result<(), TransferFailure> {
        let service = &self.podcasts;
        let episode = service.episode(id).await?;
        if episode.summary.played {
            service.mark_played(id, false).await?;
        }
        let is_here = episode.summary.state == EpisodeState::Ready;
        if !is_here && !is_coming(&episode) {
            let source = service.with(move |library| library.episode_source(id));
            if let Some(refused) = source.await?.and_then(|source| source.refused) {
                return Err(TransferFailure::error(refused));
            }
            self.ask_for_episode(id, None, None).await?;
        }
        service
            .with(move |library| library.move_up_next(id, to))
            .await?;
        self.prioritise_downloads().await?;
        service.changed();
        Ok(())
    }

    /// Makes the order of hearing that of publication again.
    ///
    /// # Errors
    /// The library fails.
    pub(in super::super) async fn reset_up_next(self: &Arc<Agent>) -> Result<(), TransferFailure> {
        let service = &self.podcasts;
        service.with(Library::reset_up_next).await?;
        self.prioritise_downloads().await?;
        service.changed();
        Ok(())
    }

    /// Answers what `cedos cast` asks.
    ///
    /// # Errors
    /// The request makes no sense, or cannot be carried out.
    pub(in super::super) async fn answer_podcasts(
        self: &Arc<Agent>,
        request: PodcastRequest,
    ) -> Result<Value, TransferFailure> {
        let service = &self.podcasts;
        // Who only looks leaves no library behind.
        let is_empty = !service.exists();
        if !is_empty {
            self.look_for_missing_files();
        }
        Ok(ok_response(match request {
            PodcastRequest::Add { url } => json!(self.add_podcast(&url).await?),
            PodcastRequest::Search { words, offline } => {
                let found = match offline {
                    true => self.search_index(&words).await?,
                    false => self.search_podcasts(&words).await?,
                };
                json!({"found": found})
            }
            PodcastRequest::Index { file } => json!(self.import_index(file).await?),
            PodcastRequest::Backup { file } => {
                let written = file.clone();
                service
                    .with(move |library| library.backup(&written))
                    .await?;
                json!({"file": file})
            }
            PodcastRequest::List { .. } if is_empty => json!({"channels": []}),
            PodcastRequest::List { words } if words.trim().is_empty() => {
                json!({"channels": service.with(Library::channels).await?})
            }
            PodcastRequest::List { words } => {
                let found = service.with(move |library| {
                    let query = EpisodeQuery {
                        words: words.clone(),
                        limit: FOUND_MAX,
                        ..EpisodeQuery::default()
                    };
                    Ok((library.find_channels(&words)?, library.episodes(&query)?))
                });
                let (channels, episodes) = found.await?;
                let episodes: Vec<Value> = episodes.iter().map(|e| self.episode_json(e)).collect();
                json!({"channels": channels, "episodes": episodes})
            }
            PodcastRequest::Show { channel, limit } => {
                let channel = service.named(&channel).await?.id;
                let query = EpisodeQuery {
                    channel: Some(channel),
                    limit: limit.min(SHOWN_MAX),
                    ..EpisodeQuery::default()
                };
                let episodes = service
                    .with(move |library| library.episodes(&query))
                    .await?;
                let episodes: Vec<Value> = episodes.iter().map(|e| self.episode_json(e)).collect();
                let channel = service.channel(channel).await?;
                let proposal = service.proposal(&channel.summary).await?;
                json!({"channel": channel, "episodes": episodes, "proposal": proposal})
            }
            PodcastRequest::Queue if is_empty => json!({"episodes": []}),
            PodcastRequest::Queue => {
                let queue = self.episode_queue().await?;
                let episodes: Vec<Value> = queue.iter().map(|e| self.episode_json(e)).collect();
                json!({"episodes": episodes})
            }
            PodcastRequest::UpNext { episode, to, reset } => {
                if reset && !is_empty {
                    self.reset_up_next().await?;
                }
                if let Some(episode) = episode {
                    self.move_up_next(episode, to).await?;
                }
                let order = match is_empty {
                    true => Vec::new(),
                    false => self.up_next().await?,
                };
                let episodes: Vec<Value> = order.iter().map(|e| self.episode_json(e)).collect();
                json!({"episodes": episodes})
            }
            PodcastRequest::Next { .. } if is_empty => json!({"episode": null}),
            PodcastRequest::Next { after } => {
                let next = self.next_to_hear(after).await?;
                json!({"episode": next.map(|next| self.episode_json(&next))})
            }
            PodcastRequest::Continue if is_empty => json!({"episodes": []}),
            PodcastRequest::Continue => {
                let begun = service.with(|library| library.begun_episodes(SHOWN_MAX));
                let begun = begun.await?;
                let episodes: Vec<Value> = begun.iter().map(|e| self.episode_json(e)).collect();
                json!({"episodes": episodes})
            }
            PodcastRequest::Episode {
                episode,
                transcript,
            } => {
                let episode = service.episode(episode).await?;
                self.described_episode(&episode, transcript).await
            }
            PodcastRequest::Play { .. } => unreachable!("it is answered where it is read"),
            PodcastRequest::Begun { episode } => {
                let now = Timestamp::now();
                service
                    .with(move |library| library.note_begun(episode, now))
                    .await?;
                json!({})
            }
            PodcastRequest::Position {
                episode,
                position_ms,
                duration_ms,
            } => {
                if let Some(position_ms) = position_ms {
                    service
                        .store_position(episode, position_ms, duration_ms)
                        .await?;
                }
                let episode = service.episode(episode).await?;
                json!({"episode": self.episode_json(&episode.summary)})
            }
            PodcastRequest::Rule {
                channel,
                schedule,
                keep,
                keep_bytes,
                unplayed_only,
                policy,
                file,
            } => {
                let id = service.named(&channel).await?.id;
                let change = RuleChange {
                    schedule: schedule.as_deref(),
                    keep,
                    keep_bytes,
                    unplayed_only,
                    policy: policy.as_deref(),
                    enclosure: file.as_deref(),
                };
                let summary = self.change_podcast_rule(id, change).await?;
                let next = summary
                    .rule
                    .schedule
                    .deadline(Timestamp::now(), &Zoned::now());
                json!({"channel": summary, "next": next})
            }
            PodcastRequest::Import { file } => json!(service.import(opml_file(&file)?).await?),
            PodcastRequest::Export { for_apps: false } => json!({"opml": service.export().await?}),
            PodcastRequest::Export { for_apps: true } => {
                json!({"opml": self.export_for_apps().await?})
            }
            PodcastRequest::Apps { new_links } => self.open_apps(new_links).await?,
            PodcastRequest::AppsClose => {
                self.close_apps().await?;
                json!({"server": null})
            }
            PodcastRequest::Sync { url: Some(url), .. } => self.set_up_sync(&url).await?,
            PodcastRequest::Sync {
                url: None,
                accept_removals,
            } => {
                let cause = SyncCause::ByHand { accept_removals };
                self.exchange(cause).await?
            }
            PodcastRequest::SyncStatus if is_empty => json!({"account": null}),
            PodcastRequest::SyncStatus => self.sync_status().await?,
            PodcastRequest::SyncEnd => self.end_sync().await?,
            PodcastRequest::Log { .. } if is_empty => json!(TransferLogPage::default()),
            PodcastRequest::Log { since, after } => {
                let since = since.unwrap_or(Timestamp::UNIX_EPOCH);
                let page = service
                    .with(move |library| library.transfer_log_page(since, after, LOG_PAGE_BYTES));
                json!(page.await?)
            }
            PodcastRequest::Refresh { channel } => {
                let channels = match channel {
                    Some(channel) => vec![service.named(&channel).await?],
                    None => service.with(Library::channels).await?,
                };
                let reports = channels.into_iter().map(|channel| async move {
                    let report = self.refresh_channel(channel.id).await?;
                    Ok::<_, TransferFailure>(
                        json!({"id": channel.id, "title": channel.title, "report": report}),
                    )
                });
                let reports = stream::iter(reports).buffered(REFRESHED_AHEAD);
                json!({"channels": reports.try_collect::<Vec<Value>>().await?})
            }
            PodcastRequest::Remove { channel } => {
                let channel = service.named(&channel).await?;
                let files = self.remove_podcast(channel.id).await?;
                json!({"channel": channel, "files_removed": files})
            }
            PodcastRequest::Played { episode, played } => {
                let episode = service.mark_played(episode, played).await?;
                json!({"episode": self.whole_episode_json(&episode).await})
            }
            PodcastRequest::Download {
                episode,
                by,
                policy,
            } => {
                let episode = self.ask_for_episode(episode, by, policy.as_deref()).await?;
                json!({"episode": self.whole_episode_json(&episode).await})
            }
            PodcastRequest::NotWanted { episode } => {
                let episode = self.take_back_episode(episode).await?;
                json!({"episode": self.whole_episode_json(&episode).await})
            }
        }))
    }
}

/// An answer that brought a document.
fn read_answer(answer: FeedAnswer) -> Result<FeedAnswer, TransferFailure> {
    match answer.status {
        http::StatusCode::OK => Ok(answer),
        status => Err(TransferFailure::error(status_text(&answer, status))),
    }
}

/// Whether an answer is a feed; parsed on a thread for blocking calls.
async fn parsed(answer: &FeedAnswer) -> Result<Result<(), FeedError>, TransferFailure> {
    let (body, url) = (answer.body.clone(), answer.url.clone());
    let parsed = tokio::task::spawn_blocking(move || parse_feed(&body, &url).map(drop)).await;
    parsed.map_err(|error| TransferFailure::error(error.to_string()))
}

fn opml_file(file: &std::path::Path) -> Result<Vec<u8>, TransferFailure> {
    let failed = |error: &dyn std::fmt::Display| {
        TransferFailure::error(format!("cannot read {}: {error}", file.display()))
    };
    let found = file.metadata().map_err(|error| failed(&error))?;
    if !found.is_file() || found.len() > OPML_BYTES_MAX {
        let most = OPML_BYTES_MAX >> 20;
        return Err(failed(&format!("it is no file of at most {most} MB")));
    }
    std::fs::read(file).map_err(|error| failed(&error))
}
