//! Downloads of episodes: transfers of the agent's queue like any other, begun by the library's plan.
//!
//! ```text
//!  plan ─▶ begin_download (library) ─▶ add (queue) ─▶ set_job (library) ─▶ … ─▶ finish_download (library)
//! ```
//!
//! The library knows the file before the queue has the transfer, so an agent that is killed in between finds both
//! again by the file, and takes up the transfer instead of beginning another.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cedos_readycast::{
    ActiveDownload, ChannelId, DownloadOutcome, DownloadSchedule, Episode, EpisodeId,
    EpisodeSource, EpisodeState, EpisodeSummary, Library, LibraryError, LoggedNetwork,
    TransferLogEntry, TransferRecord, UnwantedFile, priority_of_place, start_bytes,
};
use d2tp_links::Link;
use d2tp_sched::CostPolicy;
use jiff::{Timestamp, Zoned};
use serde_json::Value;
use tokio::sync::broadcast::error::RecvError;

use super::super::api::TermsChange;
use super::super::queue::TransferIntent;
use super::super::state::{Agent, lock};
use super::episode_folder::{NewEpisodesFolder, episode_file, file_system_of, mount_of};
use super::transfer_record::{LoggedLink, RunningRecord};
use crate::fetch::forget::forget;
use crate::fetch::local_hosts::LocalHosts;
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::order::{Deadline, TransferOrder, TransferVerb};
use crate::settings::UserSettings;

/// Episodes that are in the queue at the same time; further ones follow when these end.
const DOWNLOADS_MAX: usize = 50; // a guess: a week of many channels

/// How long a download may take to stop before its part is left behind.
const STOP_MAX: Duration = Duration::from_secs(10); // a guess: a sync on a slow disk

/// The time until the folder of episodes is looked for again.
const FOLDER_LOOK_EVERY: Duration = Duration::from_secs(60); // a guess: a person who mounted a disk waits for it

/// How long a disk may take to say whether a file is there, while somebody waits for an answer.
pub(in super::super) const DISK_ANSWERS_WITHIN: Duration = Duration::from_secs(2); // a guess: a disk that starts to turn takes longer

/// Bytes of a file that are looked at to recognise a web page.
const BEGINNING_BYTES: u64 = 1024;

impl Agent {
    /// Notes an event of a transfer. Returns whether it is the end of an episode's download.
    pub(super) async fn note_download_event(&self, id: u64, event: &Value) -> bool {
        let links = self.logged_links();
        let record = {
            let mut records = lock(&self.podcasts.records);
            let Some(running) = records.get_mut(&id) else {
                return false;
            };
            let is_new = running.on_event(event, &links, Timestamp::now());
            is_new.then(|| running.record.clone())
        };
        if let Some(record) = record {
            self.keep_record(id, record).await;
        }
        matches!(event["event"].as_str(), Some("done" | "error"))
    }

    /// Notes which downloads lost the network that carried them.
    pub(super) async fn note_lost_networks(&self) {
        let links = self.logged_links();
        let now = Timestamp::now();
        let lost: Vec<(u64, TransferRecord)> = {
            let mut records = lock(&self.podcasts.records);
            let lost = records.iter_mut().filter_map(|(id, running)| {
                let is_lost = running.on_links(&links, now);
                is_lost.then(|| (*id, running.record.clone()))
            });
            lost.collect()
        };
        for (id, record) in lost {
            self.keep_record(id, record).await;
        }
    }

    async fn keep_record(&self, id: u64, record: TransferRecord) {
        let kept = self
            .podcasts
            .with(move |library| library.keep_transfer_record(id, &record));
        if let Err(failure) = kept.await {
            tracing::warn!(
                id,
                error = failure.text,
                "the log of the download is not kept"
            );
        }
    }

    /// The device's links, as the log of transfers knows them.
    fn logged_links(&self) -> Vec<LoggedLink> {
        let nearby = self.link_view.nearby().borrow().clone();
        let links = self.link_view.links().borrow().clone();
        let logged = |link: &Link| LoggedLink {
            device: link.name.clone(),
            network: LoggedNetwork {
                name: Some(nearby.name(&link.name)),
                kind: json_word(&link.kind),
                class: json_word(&link.class.class),
            },
            addresses: link.source_addresses().collect(),
        };
        links.iter().map(logged).collect()
    }
}

/// The word of a value that is one in JSON.
fn json_word(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

impl Agent {
    /// Looks after downloads that have begun: those that ended, and those that an earlier agent left.
    pub(super) async fn follow_downloads(self: &Arc<Agent>) -> Result<(), TransferFailure> {
        let active = self.podcasts.with(Library::active_downloads).await?;
        for download in active {
            let job = match download.job {
                Some(job) => Some(job),
                None => self.adopt(&download).await?,
            };
            let Some(job) = job else {
                self.queue_again(&download).await?;
                continue;
            };
            lock(&self.podcasts.records)
                .entry(job)
                .or_insert_with(|| RunningRecord::of(download.record.clone()));
            let Ok(transfer) = self.show(job) else {
                // Its record was cleared away.
                self.finish_by_file(&download).await?;
                continue;
            };
            match transfer["standing"].as_str() {
                Some("done") => {
                    self.finish(&download, job, &transfer, true).await?;
                    // Chapters and transcript are to be here without a network, too.
                    let id = download.episode;
                    let found = self.podcasts.with(move |library| library.episode(id));
                    if let Some(episode) = found.await? {
                        self.listed_chapters(&episode);
                        self.has_transcript(&episode);
                    }
                }
                Some("failed" | "cancelled") => {
                    self.finish(&download, job, &transfer, false).await?;
                }
                Some("gone") => self.queue_again(&download).await?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The transfer that an agent queued just before it was killed, by its file: the newest, unless it is one of an
    /// earlier download of the same episode.
    async fn adopt(&self, download: &ActiveDownload) -> Result<Option<u64>, TransferFailure> {
        let found = {
            let tasks = lock(&self.tasks);
            let mut newest_first = tasks.iter().rev();
            let of_it = newest_first
                .find(|(_, task)| task.saved.order.file.as_deref() == Some(&download.file));
            of_it
                .filter(|(_, task)| !task.has_ended() || download.file.exists())
                .map(|(id, _)| *id)
        };
        if let Some(job) = found {
            let episode = download.episode;
            let noted = self
                .podcasts
                .with(move |library| library.set_job(episode, job));
            noted.await?;
        }
        Ok(found)
    }

    /// Queues a download whose transfer is not in the queue.
    async fn queue_again(
        self: &Arc<Agent>,
        download: &ActiveDownload,
    ) -> Result<(), TransferFailure> {
        let id = download.episode;
        let Some(episode) = self
            .podcasts
            .with(move |library| library.episode(id))
            .await?
        else {
            return Ok(());
        };
        let is_by_rule = episode.own_deadline.is_none();
        let own = episode.own_deadline.clone().and_then(|own| own.policy);
        let policy = match own {
            Some(policy) => Some(policy),
            None => {
                let channel = episode.summary.channel;
                let channel = self.podcasts.with(move |library| library.channel(channel));
                channel.await?.and_then(|channel| match is_by_rule {
                    true => channel.summary.rule.download_policy(),
                    false => channel.summary.rule.policy,
                })
            }
        };
        let source = self
            .podcasts
            .with(move |library| library.episode_source(id))
            .await?;
        let Some(source) = source else {
            return Ok(());
        };
        let order = DownloadOrder {
            source: &source,
            file: &download.file,
            deadline: download.deadline,
            policy: policy.as_deref(),
            start_bytes: start_bytes(episode.summary.bytes, episode.summary.duration_s),
            priority: priority_of_place(episode.summary.up_next),
        };
        self.queue(id, order).await
    }

    /// Begins the downloads that the library plans, of all channels or of these, and removes the files that it no
    /// longer wants. Returns when a failed one may be tried again.
    pub(super) async fn start_downloads(
        self: &Arc<Agent>,
        channels: Option<Vec<ChannelId>>,
    ) -> Result<Option<Timestamp>, TransferFailure> {
        let now = Zoned::now();
        let plan = self.podcasts.with(move |library| match channels {
            Some(channels) => library.planned_downloads_of(&channels, &now),
            None => library.planned_downloads(&now),
        });
        let plan = plan.await?;
        for unwanted in plan.remove {
            let episode = unwanted.episode;
            let removed = tokio::task::spawn_blocking(move || remove_unwanted(&unwanted));
            if removed.await.unwrap_or(false) {
                let noted = self
                    .podcasts
                    .with(move |library| library.note_removed(episode));
                noted.await?;
            }
        }
        for unwanted in plan.discard {
            if discard_part(&unwanted.file).await {
                let episode = unwanted.episode;
                let noted = self
                    .podcasts
                    .with(move |library| library.note_discarded(episode));
                noted.await?;
            }
        }
        if plan.start.is_empty() {
            return Ok(plan.next_retry_at);
        }
        let active = self.podcasts.with(Library::active_downloads).await?;
        let room = DOWNLOADS_MAX.saturating_sub(active.len());
        let folder = match self.new_episodes_folder().await? {
            NewEpisodesFolder::Ready(folder) => Ok(folder),
            NewEpisodesFolder::Unknown(reason) => Err(reason),
            NewEpisodesFolder::Absent(reason) => {
                for planned in plan.start.into_iter().take(room) {
                    let reason = reason.clone();
                    let noted = self
                        .podcasts
                        .with(move |library| library.note_waiting(planned.episode, &reason));
                    noted.await?;
                }
                let again = Timestamp::now() + FOLDER_LOOK_EVERY;
                return Ok(plan.next_retry_at.into_iter().chain([again]).min());
            }
        };
        let known = self.podcasts.with(Library::known_files).await?;
        let known = known.into_iter().map(|(episode, file)| (file, episode));
        let mut taken: Arc<BTreeMap<PathBuf, EpisodeId>> = Arc::new(known.collect());
        for planned in plan.start.into_iter().take(room) {
            let file = match &folder {
                Ok(folder) => episode_file(&planned, folder.clone(), taken.clone()).await,
                Err(reason) => Err(reason.clone()),
            };
            let file = match file {
                Ok(file) => file,
                Err(reason) => {
                    self.fail(planned.episode, reason, false).await?;
                    continue;
                }
            };
            Arc::make_mut(&mut taken).insert(file.clone(), planned.episode);
            let (episode, deadline, begun) = (planned.episode, planned.deadline, file.clone());
            let chosen = planned.source.chosen.clone();
            let noted = self.podcasts.with(move |library| {
                library.begin_download_from(episode, &begun, deadline, chosen.as_ref())
            });
            noted.await?;
            let order = DownloadOrder {
                source: &planned.source,
                file: &file,
                deadline,
                policy: planned.policy.as_deref(),
                start_bytes: planned.start_bytes,
                priority: planned.priority,
            };
            self.queue(episode, order).await?;
        }
        Ok(plan.next_retry_at)
    }

    /// Puts a download into the queue.
    async fn queue(
        self: &Arc<Agent>,
        episode: EpisodeId,
        order: DownloadOrder<'_>,
    ) -> Result<(), TransferFailure> {
        let added = order.build().and_then(|order| self.add(order, true));
        match added {
            Ok((job, _)) => {
                lock(&self.podcasts.records).entry(job).or_default();
                let noted = self
                    .podcasts
                    .with(move |library| library.set_job(episode, job));
                noted.await
            }
            Err(failure) => self.fail(episode, failure.text, false).await,
        }
    }

    async fn fail(
        &self,
        episode: EpisodeId,
        reason: String,
        is_final: bool,
    ) -> Result<(), TransferFailure> {
        let outcome = DownloadOutcome::Failed { reason, is_final };
        let now = Timestamp::now();
        let noted = self
            .podcasts
            .with(move |library| library.finish_download(episode, &outcome, now));
        noted.await
    }

    /// Notes how a download ended.
    async fn finish(
        &self,
        download: &ActiveDownload,
        job: u64,
        transfer: &Value,
        is_whole: bool,
    ) -> Result<(), TransferFailure> {
        let last = &transfer["last"];
        let outcome = if is_whole {
            whole(
                &download.file,
                last["bytes"].as_u64(),
                last["sha256"].as_str(),
            )
        } else if transfer["standing"] == "cancelled" {
            DownloadOutcome::Cancelled
        } else {
            let reason = last["text"].as_str().unwrap_or("the download failed");
            DownloadOutcome::Failed {
                reason: reason.to_owned(),
                is_final: false,
            }
        };
        let running = lock(&self.podcasts.records)
            .remove(&job)
            .unwrap_or_else(|| RunningRecord::of(download.record.clone()));
        let entry = self.log_entry(download, transfer, running, &outcome);
        if outcome.is_end() {
            discard_part(&download.file).await;
        }
        let episode = download.episode;
        let now = Timestamp::now();
        let is_refused = matches!(outcome, DownloadOutcome::Failed { .. }) && is_refusal(last);
        let (begun, file) = (entry.started_at, download.file.clone());
        let noted = self.podcasts.with(move |library| {
            finish_file(library, episode, &file, &outcome, now)?;
            if is_refused {
                library.refresh_for_episode(episode, begun, now)?;
            }
            library.record_transfer(&entry)
        });
        noted.await
    }

    /// What the log of transfers keeps of a download.
    fn log_entry(
        &self,
        download: &ActiveDownload,
        transfer: &Value,
        mut running: RunningRecord,
        outcome: &DownloadOutcome,
    ) -> TransferLogEntry {
        let last = &transfer["last"];
        let now = Timestamp::now();
        // Events that were missed, or came while no agent looked.
        running.on_event(last, &self.logged_links(), now);
        let record = running.record;
        let since = transfer["since"].as_str().and_then(|at| at.parse().ok());
        TransferLogEntry {
            episode: Some(download.episode),
            labels: None,
            started_at: since.unwrap_or(now),
            ended_at: now,
            deadline: download.deadline,
            policy: transfer["policy"].as_str().map(str::to_owned),
            is_whole: matches!(outcome, DownloadOutcome::Whole { .. }),
            bytes: last["bytes"].as_u64().unwrap_or(0),
            wasted_bytes: last["duplicate_bytes"].as_u64().unwrap_or(0),
            played_at: None,
            first_byte_at: record.first_byte_at,
            last_byte_at: record.last_byte_at,
            carried: record.carried,
            switches: record.switches,
            losses: record.losses,
        }
    }

    /// Notes how a download ended whose transfer nobody remembers: its file tells.
    async fn finish_by_file(
        self: &Arc<Agent>,
        download: &ActiveDownload,
    ) -> Result<(), TransferFailure> {
        let Ok(found) = std::fs::metadata(&download.file) else {
            return self.queue_again(download).await;
        };
        if let Some(job) = download.job {
            lock(&self.podcasts.records).remove(&job);
        }
        let outcome = whole(&download.file, Some(found.len()), None);
        let (episode, file, now) = (download.episode, download.file.clone(), Timestamp::now());
        let noted = self
            .podcasts
            .with(move |library| finish_file(library, episode, &file, &outcome, now));
        noted.await
    }

    /// Gives downloads of a channel that are in the queue the deadline and policy that hold now: those of its rule, or
    /// those that a person asked for an episode alone.
    pub(in super::super) async fn retime_downloads(
        self: &Arc<Agent>,
        channel: ChannelId,
    ) -> Result<(), TransferFailure> {
        let _planning = self.podcasts.planning.lock().await;
        let known = self.podcasts.with(move |library| library.channel(channel));
        let Some(rule) = known.await?.map(|channel| channel.summary.rule) else {
            return Ok(());
        };
        let active = self.podcasts.with(Library::active_downloads).await?;
        for download in active {
            let (id, Some(job)) = (download.episode, download.job) else {
                continue;
            };
            let found = self.podcasts.with(move |library| library.episode(id));
            let Some(episode) = found.await?.filter(|e| e.summary.channel == channel) else {
                continue;
            };
            let (deadline, own_policy) = match episode.own_deadline {
                Some(own) => (own.by, own.policy),
                None => {
                    let published = episode.summary.published;
                    (rule.schedule.deadline(published, &Zoned::now()), None)
                }
            };
            let is_patient = rule.schedule == DownloadSchedule::WhenFree && deadline.is_none();
            let policy = own_policy.or_else(|| rule.policy.clone());
            let policy = policy.or_else(|| is_patient.then(|| "free-only".to_owned()));
            let policy = policy.unwrap_or_else(|| {
                let settings = UserSettings::load(None).ok();
                let set = settings.and_then(|settings| settings.chosen("transfer.policy"));
                set.unwrap_or_else(|| CostPolicy::FreeFirst.as_str().to_owned())
            });
            let change = TermsChange {
                deadline: deadline.map(Deadline::At),
                no_deadline: deadline.is_none(),
                policy: Some(policy),
                ..TermsChange::default()
            };
            // One that has just ended keeps what it had.
            if self.edit(job, &change).is_ok() {
                let noted = self
                    .podcasts
                    .with(move |library| library.set_download_deadline(id, deadline));
                noted.await?;
            }
        }
        Ok(())
    }

    /// Gives downloads in the queue the priorities that follow from the order of hearing.
    pub(super) async fn prioritise_downloads(self: &Arc<Agent>) -> Result<(), TransferFailure> {
        let _planning = self.podcasts.planning.lock().await;
        let active = self.podcasts.with(Library::active_downloads).await?;
        for download in active {
            let (id, Some(job)) = (download.episode, download.job) else {
                continue;
            };
            let found = self.podcasts.with(move |library| library.episode(id));
            let Some(episode) = found.await? else {
                continue;
            };
            let priority = priority_of_place(episode.summary.up_next);
            let differs = (lock(&self.tasks).get(&job))
                .is_some_and(|task| task.saved.order.priority != priority);
            if differs {
                let change = TermsChange {
                    priority: Some(priority),
                    ..TermsChange::default()
                };
                // One that has just ended keeps what it had.
                let _ = self.edit(job, &change);
            }
        }
        Ok(())
    }

    /// Lets a download that is being heard wait for no other's beginning.
    pub(super) fn prefer_heard_download(self: &Arc<Agent>, job: u64) {
        let waits = (lock(&self.tasks).get(&job))
            .is_some_and(|task| task.saved.order.start_bytes.is_some_and(|bytes| bytes > 0));
        if waits {
            let change = TermsChange {
                start_bytes: Some(0),
                ..TermsChange::default()
            };
            // One that has just ended waits for nothing.
            let _ = self.edit(job, &change);
        }
    }

    /// Takes an episode out of the queue, if it is in it.
    pub(in super::super) fn cancel_download(self: &Arc<Agent>, job: u64) {
        // One that has just ended needs no end.
        let _ = self.set_intent(job, TransferIntent::Cancel);
    }

    /// Takes an episode out of the queue, and removes what came of it.
    pub(super) async fn discard_download(self: &Arc<Agent>, download: &ActiveDownload) {
        if let Some(job) = download.job {
            let mut events = self.events.subscribe();
            self.cancel_download(job);
            let runs = || lock(&self.tasks).get(&job).is_some_and(|task| task.running);
            let stopped = async {
                while runs() {
                    // Missed events are no reason to wait: the task is asked again.
                    if let Err(RecvError::Closed) = events.recv().await {
                        break;
                    }
                }
            };
            if tokio::time::timeout(STOP_MAX, stopped).await.is_err() {
                tracing::warn!(job, "does not stop; its part stays");
            }
        }
        discard_part(&download.file).await;
        remove(&download.file);
    }

    /// The transfer of an episode with its promise, as `cedos why` shows it; none if it is not in the queue.
    pub(in super::super) fn episode_transfer(&self, episode: &EpisodeSummary) -> Option<Value> {
        let is_queued = episode.state == EpisodeState::Downloading;
        let job = episode.job.filter(|_| is_queued)?;
        self.show(job).ok()
    }
}

/// Removes what came of a file that is not wanted any longer; returns whether it is gone.
pub(super) async fn discard_part(file: &Path) -> bool {
    match forget(file, "", None).await {
        Ok(_) => true,
        Err(failure) => {
            tracing::warn!(error = failure.text, "cannot remove the part of an episode");
            false
        }
    }
}

/// Whether a transfer failed because of what the origin said, so that the feed may have a newer address.
fn is_refusal(last: &Value) -> bool {
    let reason = last["reason"].as_str();
    let is_of_origin = matches!(reason, None | Some("url_expired" | "auth_required"));
    is_of_origin && last["exit"] == TransferExit::Error as u8
}

/// What a transfer of an episode is ordered with.
struct DownloadOrder<'a> {
    source: &'a EpisodeSource,
    file: &'a Path,
    deadline: Option<Timestamp>,
    policy: Option<&'a str>,
    /// The bytes at the beginning that are wanted before the rest of other episodes.
    start_bytes: u64,
    priority: u8,
}

impl DownloadOrder<'_> {
    /// The order as `cedos get --detach` would make it: what the rule leaves open is from the settings.
    fn build(&self) -> Result<TransferOrder, TransferFailure> {
        let settings =
            UserSettings::load(None).map_err(|error| TransferFailure::usage(error.to_string()))?;
        let mut order = TransferOrder::new(TransferVerb::Get, self.source.url.as_str());
        order.local_hosts = LocalHosts::only(self.source.local_host.as_deref());
        order.file = Some(self.file.to_owned());
        (order.start_bytes, order.priority) = (Some(self.start_bytes), self.priority);
        // One that has passed while nothing ran is as late as can be.
        order.deadline = self.deadline.map(|at| match at > Timestamp::now() {
            true => Deadline::At(at),
            false => Deadline::WithinS(60.0),
        });
        if let Some(policy) = self
            .policy
            .or(settings.chosen("transfer.policy").as_deref())
        {
            policy.clone_into(&mut order.policy);
        }
        if let Some(if_late) = settings.chosen("transfer.if_late") {
            order.if_late = if_late;
        }
        order.max_cell = settings.parsed(
            "transfer.max_cell",
            crate::fetch::option_parsers::parse_bytes,
        );
        let proxy = settings.proxy(&[], false);
        let proxy = proxy.map_err(|error| TransferFailure::usage(error.to_string()))?;
        // A proxy is elsewhere: it reaches no host of this device's local network.
        let is_local = self.source.local_host.as_deref() == self.source.url.host_str();
        order.prox = proxy.filter(|_| !is_local);
        order.key = settings.path("device.key_file").filter(|p| p.exists());
        if let Some(value) = &self.source.authorization {
            order.headers.push(format!("Authorization: {value}"));
        }
        Ok(order)
    }
}

/// How a file that is whole counts: a web page in place of the audio is no episode, and is removed.
fn whole(file: &Path, bytes: Option<u64>, sha256: Option<&str>) -> DownloadOutcome {
    if is_web_page(file) {
        remove(file);
        let reason =
            "the server sent a web page in place of the episode; `cedos cast download` tries again";
        return DownloadOutcome::Failed {
            reason: reason.to_owned(),
            is_final: true,
        };
    }
    let length = || file.metadata().map_or(0, |found| found.len());
    DownloadOutcome::Whole {
        bytes: bytes.unwrap_or_else(length),
        sha256: sha256.map(str::to_owned),
        media_type: None,
    }
}

/// Whether a file begins as web pages do.
fn is_web_page(file: &Path) -> bool {
    let mut beginning = Vec::new();
    let read = std::fs::File::open(file)
        .and_then(|file| file.take(BEGINNING_BYTES).read_to_end(&mut beginning));
    if read.is_err() {
        return false;
    }
    let text = String::from_utf8_lossy(&beginning).to_lowercase();
    let text = text.trim_start_matches('\u{feff}').trim_start();
    ["<!doctype html", "<html", "<head"]
        .iter()
        .any(|tag| text.starts_with(tag))
}

/// Notes how a download ended, and the disk that the file is on.
fn finish_file(
    library: &Library,
    episode: EpisodeId,
    file: &Path,
    outcome: &DownloadOutcome,
    now: Timestamp,
) -> Result<(), LibraryError> {
    library.finish_download(episode, outcome, now)?;
    if let (DownloadOutcome::Whole { .. }, Ok(file_system)) = (outcome, file_system_of(file)) {
        library.note_file_system(episode, file, &file_system)?;
    }
    Ok(())
}

/// Removes a file that is not wanted any longer; returns whether it is gone. One on a disk that is not mounted is not.
fn remove_unwanted(unwanted: &UnwantedFile) -> bool {
    let is_there = || !matches!(unwanted.file.try_exists(), Ok(false));
    let is_of_this_disk = || {
        let here = mount_of(&unwanted.file).map(|mount| mount.file_system).ok();
        unwanted.file_system.is_none() || unwanted.file_system == here
    };
    (is_there() || is_of_this_disk()) && remove(&unwanted.file)
}

/// Removes a file; returns whether it is gone.
pub(super) fn remove(file: &Path) -> bool {
    match std::fs::remove_file(file) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "cannot remove an episode");
            false
        }
    }
}

/// The episode's file if it is whole and there. On a disk that does not answer it is not.
pub(super) async fn ready_file(episode: &Episode) -> Option<PathBuf> {
    let file = episode.file.clone()?;
    let looking = tokio::task::spawn_blocking(move || file.exists().then_some(file));
    let found = tokio::time::timeout(DISK_ANSWERS_WITHIN, looking).await;
    found.ok()?.ok()?
}
