//! The pages of channels: all of them, one with its episodes and rule, and search.

use std::sync::Arc;

use askama::Template;
use axum::Form;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use cedos_readycast::{
    Channel, ChannelId, ChannelRule, ChannelSummary, DownloadSchedule, EnclosureChoice,
    EpisodeQuery, EpisodeState, EpisodeSummary, KeepRule,
};
use cedos_text::escape_controls;
use d2tp_sched::CostPolicy;
use jiff::Zoned;
use serde::Deserialize;
use url::Url;

use super::super::super::podcasts::directory_search::FoundPodcast;
use super::super::super::podcasts::requests::RuleChange;
use super::super::frame::{self, PageContext, PageFact, PageFrame};
use super::super::live;
use super::episode_row::{EpisodeRow, clock};
use super::library_access::frame_of;
use crate::fetch::deadline_text::{describe_deadline, describe_time};
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::human_bytes;

/// Episodes on a page of a channel, and results of a search.
const EPISODES_PER_PAGE: u32 = 50;

/// Channels on a page of the library. Higher: more of a large library at once, and each change of it is sent whole.
const CHANNELS_PER_PAGE: u32 = 500; // a guess: some 300 kB

/// Episodes that were begun, on the page of the library.
const BEGUN_SHOWN_MAX: u32 = 6; // a guess: who looks for an older one finds it in its channel

/// Colours of the placeholders for pictures, which are in the style as `art-0` and so on.
const ART_COLOURS: u64 = 6;

/// A channel in the list.
struct ChannelTile {
    id: i64,
    title: String,
    author: String,
    initials: String,
    colour: u64,
    counts: String,
    rule: String,
    next: Option<String>,
    problem: Option<String>,
}

#[derive(Template)]
#[template(path = "podcasts_library.html")]
struct PodcastLibraryPage {
    frame: PageFrame,
    /// Where the channels that are shown begin.
    from: u32,
    live: PodcastLibraryLive,
}

#[derive(Template)]
#[template(path = "podcasts_library_live.html")]
struct PodcastLibraryLive {
    base: Arc<str>,
    /// Episodes that were begun, the one that was heard last first.
    begun: Vec<BegunRow>,
    channels: Vec<ChannelTile>,
    before: Option<u32>,
    after: Option<u32>,
}

/// An episode that was begun and not heard to its end.
struct BegunRow {
    id: i64,
    title: String,
    channel_title: String,
    /// How far the episode was heard, and what is left.
    heard: String,
    percent: Option<u8>,
    /// Whether the episode is on this device.
    is_here: bool,
}

#[derive(Template)]
#[template(path = "podcasts_channel.html")]
struct ChannelPage {
    frame: PageFrame,
    base: Arc<str>,
    description: String,
    site: Option<Url>,
    facts: Vec<PageFact>,
    rule: RuleView,
    proposal: Option<RuleProposal>,
    /// Where the episodes that are shown begin.
    from: u32,
    live: ChannelLive,
}

#[derive(Template)]
#[template(path = "podcasts_channel_live.html")]
struct ChannelLive {
    base: Arc<str>,
    channel: ChannelTile,
    episodes: Vec<EpisodeRow>,
    newer: Option<u32>,
    older: Option<u32>,
}

/// The values in the form of a rule.
struct RuleView {
    schedule: String,
    latest: u32,
    unplayed_only: bool,
    megabytes: String,
    policies: Vec<PolicyChoice>,
    enclosures: Vec<EnclosureOption>,
}

/// A rule that fits how the channel is listened to.
struct RuleProposal {
    schedule: String,
    text: String,
}

struct PolicyChoice {
    value: &'static str,
    text: &'static str,
    is_chosen: bool,
}

#[derive(Template)]
#[template(path = "podcasts_search.html")]
struct PodcastSearchPage {
    frame: PageFrame,
    base: Arc<str>,
    words: String,
    channels: Vec<ChannelTile>,
    episodes: Vec<EpisodeRow>,
    directory: Option<DirectoryResults>,
    /// Whether there is an index on this device.
    has_index: bool,
}

/// What a directory knows, or the index on this device.
struct DirectoryResults {
    title: &'static str,
    found: Vec<FoundRow>,
    problem: Option<String>,
}

/// A podcast that a directory knows.
struct FoundRow {
    title: String,
    author: String,
    /// Episodes, as the directory counts them, and the host of the feed.
    figures: String,
    url: Url,
    /// Number of the channel, if a person is subscribed to it.
    channel: Option<i64>,
}

/// The form that subscribes.
#[derive(Debug, Deserialize)]
pub(super) struct SubscribeForm {
    url: String,
}

/// The words of a search.
#[derive(Debug, Deserialize)]
pub(super) struct SearchForm {
    #[serde(default)]
    words: String,
    /// Where to search besides the library.
    #[serde(default, rename = "in")]
    further: Option<FurtherSearch>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FurtherSearch {
    Directory,
    /// The index on this device.
    Index,
}

/// Where a page of a list begins.
#[derive(Debug, Deserialize)]
pub(super) struct ListFrom {
    #[serde(default)]
    from: u32,
}

/// A choice of files as the form offers it.
struct EnclosureOption {
    value: &'static str,
    text: &'static str,
    is_chosen: bool,
}

/// The choices of files in the page's words.
const ENCLOSURE_TEXTS: [(EnclosureChoice, &str); 3] = [
    (EnclosureChoice::Original, "the podcast's own file"),
    (EnclosureChoice::Audio, "audio, where there is a video too"),
    (EnclosureChoice::Smallest, "the smallest audio"),
];

/// A policy in the page's words.
fn policy_text(policy: CostPolicy) -> &'static str {
    match policy {
        CostPolicy::FreeOnly => "never",
        CostPolicy::FreeFirst => "only as much as the time asks for",
        CostPolicy::Balanced => "a little sooner than that",
        CostPolicy::Any => "whenever Wi-Fi is missing or slow",
        CostPolicy::Fast => "always, beside Wi-Fi",
    }
}

/// The form of a channel.
#[derive(Debug, Deserialize)]
pub(super) struct ChannelForm {
    #[serde(rename = "do")]
    action: ChannelAction,
    #[serde(default)]
    schedule: String,
    #[serde(default)]
    latest: String,
    unplayed_only: Option<String>,
    #[serde(default)]
    megabytes: String,
    #[serde(default)]
    policy: String,
    #[serde(default)]
    enclosure: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ChannelAction {
    Rule,
    /// Changes when episodes are wanted, and nothing else.
    Schedule,
    Remove,
}

/// The first letters of a title's first two words.
fn initials(title: &str) -> String {
    let words = title.split(|c: char| !c.is_alphanumeric());
    let letters = words.filter_map(|word| word.chars().next());
    letters.take(2).flat_map(char::to_uppercase).collect()
}

fn plain(text: &str) -> String {
    escape_controls(text).into_owned()
}

impl BegunRow {
    fn of(episode: &EpisodeSummary) -> BegunRow {
        let heard_s = episode.position_ms / 1000;
        // A length that is shorter than what was heard was wrong.
        let length_s = episode.duration_s.map(u64::from);
        let length_s = length_s.filter(|length_s| *length_s > heard_s);
        let heard = match length_s {
            Some(length_s) => format!(
                "At {} of {}, {} left",
                clock(heard_s),
                clock(length_s),
                clock(length_s - heard_s)
            ),
            None => format!("At {}", clock(heard_s)),
        };
        BegunRow {
            id: episode.id.0,
            title: plain(&episode.title),
            channel_title: plain(&episode.channel_title),
            heard,
            percent: length_s.map(|length_s| (100 * heard_s / length_s) as u8),
            is_here: episode.state == EpisodeState::Ready,
        }
    }
}

impl ChannelTile {
    fn of(channel: &ChannelSummary, now: &Zoned) -> ChannelTile {
        let episodes = match channel.episodes {
            1 => "1 episode".to_owned(),
            number => format!("{number} episodes"),
        };
        let mut counts = vec![episodes, format!("{} not played", channel.unplayed)];
        if channel.ready > 0 {
            let bytes = human_bytes(channel.file_bytes);
            counts.push(format!("{} on this device ({bytes})", channel.ready));
        }
        let schedule = channel.rule.schedule;
        let next = match schedule {
            DownloadSchedule::At { .. } => schedule.deadline(now.timestamp(), now),
            _ => None,
        };
        ChannelTile {
            id: channel.id.0,
            title: plain(&channel.title),
            author: plain(&channel.author),
            initials: initials(&channel.title),
            colour: channel.id.0.unsigned_abs() % ART_COLOURS,
            counts: counts.join(", "),
            rule: format!("{schedule}; {}", channel.rule.keep),
            next: next.map(|at| format!("Next deadline: {}", describe_deadline(at, now))),
            problem: channel.problem.as_deref().map(plain),
        }
    }
}

impl RuleView {
    fn of(rule: &ChannelRule) -> RuleView {
        let policies = CostPolicy::ALL.into_iter().map(|policy| PolicyChoice {
            value: policy.as_str(),
            text: policy_text(policy),
            is_chosen: rule.policy.as_deref() == Some(policy.as_str()),
        });
        let bytes_max = rule.keep.bytes_max.map(|bytes| bytes / 1_000_000);
        RuleView {
            schedule: rule.schedule.to_string(),
            latest: rule.keep.latest,
            unplayed_only: rule.keep.unplayed_only,
            megabytes: bytes_max.map_or_else(String::new, |bytes| bytes.to_string()),
            policies: policies.collect(),
            enclosures: ENCLOSURE_TEXTS
                .into_iter()
                .map(|(choice, text)| EnclosureOption {
                    value: choice.as_str(),
                    text,
                    is_chosen: rule.enclosure == choice,
                })
                .collect(),
        }
    }
}

impl ChannelForm {
    fn rule(&self) -> Result<ChannelRule, String> {
        let number = |text: &str, what: &str| {
            let number = text.trim().parse::<u32>();
            number.map_err(|_| format!("`{text}` is no number of {what}: write digits, such as 5"))
        };
        let policy = match &*self.policy {
            "" => None,
            name if CostPolicy::ALL.iter().any(|known| known.as_str() == name) => {
                Some(name.to_owned())
            }
            name => return Err(format!("`{name}` is no policy")),
        };
        let bytes_max = match self.megabytes.trim() {
            "" => None,
            text => Some(u64::from(number(text, "megabytes")?) * 1_000_000),
        };
        Ok(ChannelRule {
            schedule: self.schedule.parse()?,
            policy,
            keep: KeepRule {
                latest: number(&self.latest, "episodes")?,
                unplayed_only: self.unplayed_only.is_some(),
                bytes_max,
            },
            enclosure: match &*self.enclosure {
                "" => EnclosureChoice::Original,
                name => name.parse()?,
            },
        })
    }
}

/// The error for a channel that is not in the library.
fn missing(id: ChannelId) -> TransferFailure {
    TransferFailure::error(format!("There is no channel with the number {id}."))
}

impl PodcastLibraryLive {
    async fn of(context: &PageContext, from: u32) -> Result<PodcastLibraryLive, TransferFailure> {
        let found = context.read_podcasts(move |library| {
            let begun = match from {
                0 => library.begun_episodes(BEGUN_SHOWN_MAX)?,
                _ => Vec::new(),
            };
            Ok((library.channels_from(from, CHANNELS_PER_PAGE + 1)?, begun))
        });
        let (mut channels, begun) = found.await?;
        let has_more = channels.len() > CHANNELS_PER_PAGE as usize;
        channels.truncate(CHANNELS_PER_PAGE as usize);
        let now = Zoned::now();
        let tiles = channels
            .iter()
            .map(|channel| ChannelTile::of(channel, &now));
        Ok(PodcastLibraryLive {
            base: context.base.clone(),
            begun: begun.iter().map(BegunRow::of).collect(),
            channels: tiles.collect(),
            before: (from > 0).then(|| from.saturating_sub(CHANNELS_PER_PAGE)),
            after: has_more.then(|| from.saturating_add(CHANNELS_PER_PAGE)),
        })
    }
}

/// Shows channels.
pub(super) async fn library(
    State(context): State<PageContext>,
    Query(ListFrom { from }): Query<ListFrom>,
) -> Response {
    match PodcastLibraryLive::of(&context, from).await {
        Ok(live) => frame::html(&PodcastLibraryPage {
            frame: frame_of(&context),
            from,
            live,
        }),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Sends the channels when they change.
pub(super) async fn library_updates(
    State(context): State<PageContext>,
    Query(ListFrom { from }): Query<ListFrom>,
) -> Response {
    let view = context.clone();
    let look = move || {
        let view = view.clone();
        async move { PodcastLibraryLive::of(&view, from).await.ok() }
    };
    live::updates(&context, look).into_response()
}

/// Subscribes to the feed at an address.
pub(super) async fn subscribe(
    State(context): State<PageContext>,
    Form(form): Form<SubscribeForm>,
) -> Response {
    let subscribed = async {
        let address = form.url.trim();
        let url: Url = address.parse().map_err(|error| {
            let text = format!("`{address}` is no address of a feed: {error}");
            TransferFailure::usage(text)
        })?;
        let added = context.agent.add_podcast(&url).await?;
        Ok(added.channel.id)
    };
    match subscribed.await {
        Ok(id) => Redirect::to(&format!("{}/podcasts/channel/{id}", context.base)).into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}

fn facts_of(channel: &Channel, now: &Zoned) -> Vec<PageFact> {
    let mut facts = vec![PageFact::new("Address", channel.summary.url.as_str())];
    if let Some(at) = channel.refreshed_at {
        facts.push(PageFact::new("Feed read", &describe_time(at, now)));
    }
    let next = match channel.next_refresh_at {
        Some(at) if at <= now.timestamp() => "as soon as a network permits".to_owned(),
        Some(at) => describe_time(at, now),
        None => "never: the feed is gone".to_owned(),
    };
    facts.push(PageFact::new("Read again", &next));
    facts
}

impl RuleProposal {
    async fn of(
        context: &PageContext,
        channel: &ChannelSummary,
    ) -> Result<Option<RuleProposal>, TransferFailure> {
        let found = context.agent.podcasts.proposal(channel).await?;
        Ok(found.map(|proposal| RuleProposal {
            text: format!(
                "“{}” would have been in time for {} of the last {} episodes that you played, and lets downloads wait \
                 longest for a free network.",
                proposal.schedule, proposal.met, proposal.plays
            ),
            schedule: proposal.schedule,
        }))
    }
}

/// A channel, and what changes of its page.
async fn find(
    context: &PageContext,
    id: ChannelId,
    from: u32,
) -> Result<(Channel, ChannelLive), TransferFailure> {
    let found = context.read_podcasts(move |library| {
        let query = EpisodeQuery {
            channel: Some(id),
            offset: from,
            limit: EPISODES_PER_PAGE + 1,
            ..EpisodeQuery::default()
        };
        Ok((library.channel(id)?, library.episodes(&query)?))
    });
    let (channel, mut episodes) = found.await?;
    let channel = channel.ok_or_else(|| missing(id))?;
    let has_older = episodes.len() > EPISODES_PER_PAGE as usize;
    episodes.truncate(EPISODES_PER_PAGE as usize);
    let now = Zoned::now();
    let live = ChannelLive {
        base: context.base.clone(),
        channel: ChannelTile::of(&channel.summary, &now),
        episodes: episodes
            .iter()
            .map(|episode| EpisodeRow::of(episode, &now))
            .collect(),
        newer: (from > 0).then(|| from.saturating_sub(EPISODES_PER_PAGE)),
        older: has_older.then(|| from.saturating_add(EPISODES_PER_PAGE)),
    };
    Ok((channel, live))
}

/// Shows a channel with its rule and a page of its episodes.
pub(super) async fn channel(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Query(ListFrom { from }): Query<ListFrom>,
) -> Response {
    let found = async {
        let (channel, live) = find(&context, ChannelId(id), from).await?;
        let proposal = RuleProposal::of(&context, &channel.summary).await?;
        Ok((channel, live, proposal))
    };
    match found.await {
        Ok((channel, live, proposal)) => frame::html(&ChannelPage {
            proposal,
            frame: frame_of(&context),
            base: context.base.clone(),
            facts: facts_of(&channel, &Zoned::now()),
            rule: RuleView::of(&channel.summary.rule),
            description: plain(&channel.description),
            site: channel.site,
            from,
            live,
        }),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Sends the episodes of a channel when they change.
pub(super) async fn channel_updates(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Query(ListFrom { from }): Query<ListFrom>,
) -> Response {
    let id = ChannelId(id);
    // An event stream that ends at once would be asked for again and again.
    if let Err(failure) = find(&context, id, from).await {
        return frame::problem(&context, &failure);
    }
    let view = context.clone();
    let look = move || {
        let view = view.clone();
        async move { Some(find(&view, id, from).await.ok()?.1) }
    };
    live::updates(&context, look).into_response()
}

/// Changes the rule of a channel, or ends the subscription.
pub(super) async fn change(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Form(form): Form<ChannelForm>,
) -> Response {
    let id = ChannelId(id);
    let done = async {
        match form.action {
            ChannelAction::Rule => {
                let rule = form.rule().map_err(TransferFailure::usage)?;
                context
                    .change_podcasts(move |library| library.set_channel_rule(id, &rule))
                    .await?;
                context.agent.retime_downloads(id).await?;
                Ok(format!("{}/podcasts/channel/{id}", context.base))
            }
            ChannelAction::Schedule => {
                let schedule = Some(form.schedule.as_str());
                let change = RuleChange {
                    schedule,
                    ..RuleChange::default()
                };
                context.agent.change_podcast_rule(id, change).await?;
                Ok(format!("{}/podcasts/channel/{id}", context.base))
            }
            ChannelAction::Remove => {
                context.agent.remove_podcast(id).await?;
                Ok(format!("{}/podcasts", context.base))
            }
        }
    };
    match done.await {
        Ok(path) => Redirect::to(&path).into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}

impl FoundRow {
    fn of(podcast: FoundPodcast, channels: &[ChannelSummary]) -> FoundRow {
        let episodes = podcast.episodes.map(|number| format!("{number} episodes"));
        let host = podcast.url.host_str().map(str::to_owned);
        let figures: Vec<String> = episodes.into_iter().chain(host).collect();
        let known = channels.iter().find(|channel| channel.url == podcast.url);
        FoundRow {
            title: plain(&podcast.title),
            author: plain(&podcast.author),
            figures: figures.join(", "),
            channel: known.map(|channel| channel.id.0),
            url: podcast.url,
        }
    }
}

impl DirectoryResults {
    async fn of(
        context: &PageContext,
        words: &str,
        place: FurtherSearch,
    ) -> Result<DirectoryResults, TransferFailure> {
        let channels = context.read_podcasts(|library| library.channels()).await?;
        let (title, found) = match place {
            FurtherSearch::Directory => (
                "In the directory",
                context.agent.search_podcasts(words).await,
            ),
            FurtherSearch::Index => (
                "In the index on this device",
                context.agent.search_index(words).await,
            ),
        };
        Ok(match found {
            Ok(found) => DirectoryResults {
                title,
                found: (found.into_iter())
                    .map(|podcast| FoundRow::of(podcast, &channels))
                    .collect(),
                problem: None,
            },
            Err(failure) => DirectoryResults {
                title,
                found: Vec::new(),
                problem: Some(plain(&failure.text)),
            },
        })
    }
}

/// Shows channels and episodes whose titles have the words, and podcasts of the directory if it is to be asked.
pub(super) async fn search(
    State(context): State<PageContext>,
    Query(SearchForm { words, further }): Query<SearchForm>,
) -> Response {
    let directory = match further {
        Some(place) if !words.trim().is_empty() => {
            match DirectoryResults::of(&context, words.trim(), place).await {
                Ok(results) => Some(results),
                Err(failure) => return frame::problem(&context, &failure),
            }
        }
        _ => None,
    };
    let wanted = words.clone();
    let found = context.read_podcasts(move |library| {
        if wanted.trim().is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let query = EpisodeQuery {
            limit: EPISODES_PER_PAGE,
            words: wanted.clone(),
            ..EpisodeQuery::default()
        };
        Ok((library.find_channels(&wanted)?, library.episodes(&query)?))
    });
    match found.await {
        Ok((channels, episodes)) => {
            let now = Zoned::now();
            let tiles = channels
                .iter()
                .map(|channel| ChannelTile::of(channel, &now));
            frame::html(&PodcastSearchPage {
                frame: frame_of(&context),
                base: context.base.clone(),
                words: plain(words.trim()),
                channels: tiles.collect(),
                episodes: episodes
                    .iter()
                    .map(|episode| EpisodeRow::of(episode, &now))
                    .collect(),
                has_index: context.agent.index_made_at().is_some(),
                directory,
            })
        }
        Err(failure) => frame::problem(&context, &failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initials_are_letters_of_the_first_two_words() {
        assert_eq!(initials("the morning news"), "TM");
        assert_eq!(initials("\"><img onerror=x>"), "IO");
        assert_eq!(initials("ßtraße"), "SS");
        assert_eq!(initials("…"), "");
    }
}
