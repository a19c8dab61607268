//! The library over its life: refreshes, plans, downloads, restarts.

#![allow(
    clippy::disallowed_types,
    reason = "this test starts itself again, as a process that is killed"
)]

use std::path::Path;
use std::time::Duration;

use cedos_readycast::{
    ChannelId, ChannelRule, DOWNLOAD_RETRY, DownloadOutcome, EnclosureChoice, EpisodeDeadline,
    EpisodeId, EpisodeQuery, EpisodeState, KeepRule, Library, LibraryError, REFRESH_INTERVAL,
    REFRESH_INTERVAL_MAX, REFRESH_RETRY, RefreshOutcome, RefreshReport, TransferLogEntry,
    TransferRecord, UpNextMove,
};
use jiff::{Timestamp, Zoned};
use url::Url;

const FEED: &str = "https://pod.example/feed";

/// A Saturday, at noon.
fn noon() -> Zoned {
    "2030-06-01T12:00:00[Asia/Seoul]"
        .parse()
        .expect("a zoned time")
}

fn now() -> Timestamp {
    noon().timestamp()
}

fn feed_of(items: &[(&str, u32, &str)]) -> RefreshOutcome {
    let items: String = items
        .iter()
        .map(|(guid, day, enclosure)| {
            format!(
                "<item><title>{guid}</title><guid>{guid}</guid><pubDate>{day:02} May 2030 06:00:00 +0000</pubDate>\
                 <description>about {guid}</description>\
                 <enclosure url=\"{enclosure}\" length=\"1000000\" type=\"audio/mpeg\"/></item>"
            )
        })
        .collect();
    fetched(&format!(
        "<rss version=\"2.0\"><channel><title>Morning</title>{items}</channel></rss>"
    ))
}

fn fetched(text: &str) -> RefreshOutcome {
    RefreshOutcome::Feed {
        bytes: text.as_bytes().to_vec(),
        etag: Some("\"1\"".to_owned()),
        last_modified: None,
        moved_to: None,
    }
}

fn failed(gone: bool, retry_after: Option<Duration>) -> RefreshOutcome {
    RefreshOutcome::Failed {
        reason: "the origin does not answer".to_owned(),
        gone,
        retry_after,
    }
}

struct LibraryFixture {
    folder: tempfile::TempDir,
    library: Library,
    channel: ChannelId,
}

impl LibraryFixture {
    /// A library with one channel that was never refreshed.
    fn new() -> LibraryFixture {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("a library");
        let feed = FEED.parse().expect("an address");
        let channel = library.subscribe(&feed, now()).expect("it is stored");
        LibraryFixture {
            folder,
            library,
            channel,
        }
    }

    fn apply(&self, outcome: RefreshOutcome) -> RefreshReport {
        self.apply_at(outcome, now())
    }

    fn apply_at(&self, outcome: RefreshOutcome, at: Timestamp) -> RefreshReport {
        let report = self.library.apply_refresh(self.channel, outcome, at);
        report.expect("it is stored")
    }

    fn url(&self) -> Url {
        let channel = self.library.channel(self.channel).expect("a query");
        channel.expect("the channel").summary.url
    }

    fn problem(&self) -> Option<String> {
        self.library.channels().expect("a list")[0].problem.clone()
    }

    fn rule(&self, schedule: &str, latest: u32) {
        let rule = ChannelRule {
            schedule: schedule.parse().expect(schedule),
            policy: None,
            keep: KeepRule {
                latest,
                ..KeepRule::default()
            },
            ..ChannelRule::default()
        };
        let set = self.library.set_channel_rule(self.channel, &rule);
        set.expect("it is stored");
    }

    fn id(&self, title: &str) -> EpisodeId {
        let query = EpisodeQuery {
            words: title.to_owned(),
            ..EpisodeQuery::default()
        };
        let found = self.library.episodes(&query).expect("a list");
        found.first().expect(title).id
    }

    fn state(&self, title: &str) -> EpisodeState {
        let episode = self.library.episode(self.id(title)).expect("a query");
        episode.expect(title).summary.state
    }

    /// Titles of the downloads that are to begin, in their order, with the deadlines in local time.
    fn start(&self) -> Vec<(String, Option<String>)> {
        let plan = self.library.planned_downloads(&noon()).expect("a plan");
        let start = plan.start.into_iter().map(|planned| {
            let at = planned
                .deadline
                .map(|at| at.to_zoned(noon().time_zone().clone()));
            (
                planned.title,
                at.map(|at| at.strftime("%a %H:%M").to_string()),
            )
        });
        start.collect()
    }

    fn start_titles(&self) -> Vec<String> {
        self.start().into_iter().map(|(title, _)| title).collect()
    }

    fn remove_titles(&self) -> Vec<String> {
        let plan = self.library.planned_downloads(&noon()).expect("a plan");
        let titles = plan.remove.iter().map(|file| {
            let episode = self.library.episode(file.episode).expect("a query");
            episode.expect("it").summary.title
        });
        titles.collect()
    }

    fn make_ready(&self, title: &str) {
        let id = self.id(title);
        let file = Path::new("/music").join(title);
        self.library
            .begin_download(id, &file, None)
            .expect("it begins");
        let whole = DownloadOutcome::Whole {
            bytes: 1_000_000,
            sha256: None,
            media_type: None,
        };
        let finished = self.library.finish_download(id, &whole, now());
        finished.expect("it is stored");
    }

    fn three(&self) {
        self.apply(feed_of(&[
            ("one", 1, "https://cdn.example/1.mp3"),
            ("two", 2, "https://cdn.example/2.mp3"),
            ("three", 3, "https://cdn.example/3.mp3"),
        ]));
    }
}

#[test]
fn a_refresh_adds_once_and_changes_what_changed() {
    let shelf = LibraryFixture::new();
    let first = [
        ("a", 1, "https://cdn.example/a.mp3"),
        ("b", 2, "https://cdn.example/b.mp3"),
    ];
    let report = shelf.apply(feed_of(&first));
    assert_eq!((report.added, report.changed), (2, 0));
    let report = shelf.apply(feed_of(&first));
    assert_eq!((report.added, report.changed), (0, 0));
    let a = shelf.id("a");
    // A feed that changes its identifiers is told by its enclosures.
    let report = shelf.apply(feed_of(&[
        ("a-renamed", 1, "https://cdn.example/a.mp3"),
        ("b", 2, "https://cdn.example/other.mp3"),
    ]));
    assert_eq!((report.added, report.changed), (0, 2));
    assert_eq!(shelf.id("a-renamed"), a);
    let channels = shelf.library.channels().expect("a list");
    assert_eq!(
        (channels[0].title.as_str(), channels[0].episodes),
        ("Morning", 2)
    );
    let episode = shelf.library.episode(a).expect("a query").expect("it");
    assert_eq!(episode.notes, "about a-renamed");
}

#[test]
fn feeds_are_asked_for_hourly_later_after_failures_and_never_when_gone() {
    let shelf = LibraryFixture::new();
    let due = |at| {
        !shelf
            .library
            .due_refreshes(at, 10)
            .expect("a list")
            .is_empty()
    };
    assert!(due(now()), "a new one is due at once");
    shelf.apply(RefreshOutcome::NotModified);
    let tenth_more = |span: Duration| span + span / 10;
    assert!(!due(now() + (REFRESH_INTERVAL - Duration::from_secs(1))));
    assert!(due(now() + tenth_more(REFRESH_INTERVAL)));
    for n in 0..20 {
        shelf.apply(failed(false, None));
        let wait = (REFRESH_RETRY * (1 << n.min(10))).min(REFRESH_INTERVAL_MAX);
        assert!(!due(now() + (wait - Duration::from_secs(1))), "{n}");
        assert!(due(now() + tenth_more(wait)), "{n}");
    }
    assert_eq!(
        shelf.problem().as_deref(),
        Some("the origin does not answer")
    );
    shelf.apply(RefreshOutcome::NotModified);
    assert_eq!(shelf.problem(), None);
    shelf.apply(failed(false, Some(3 * REFRESH_RETRY)));
    assert!(!due(now() + 2 * REFRESH_RETRY), "as the origin asks");
    shelf.apply(failed(true, None));
    assert!(!due(now() + 1000 * REFRESH_INTERVAL_MAX));
    assert_eq!(
        shelf.library.next_refresh_after(now()).expect("a query"),
        None
    );
    shelf
        .library
        .refresh_now(Some(shelf.channel), now())
        .expect("by hand");
    assert!(due(now()));
}

#[test]
fn a_clock_that_jumps_a_year_ahead_and_back_delays_nothing() {
    let shelf = LibraryFixture::new();
    let year = Duration::from_secs(365 * 24 * 3_600);
    let undated = fetched(
        "<rss version=\"2.0\"><channel><title>Morning</title><item><title>undated</title><guid>u</guid>\
         <enclosure url=\"https://cdn.example/u.mp3\" type=\"audio/mpeg\"/></item></channel></rss>",
    );
    let due = |at| {
        let due = shelf.library.due_refreshes(at, 10).expect("a list");
        let alone = shelf.library.due_refresh(shelf.channel, at).expect("one");
        assert_eq!(due.len(), usize::from(alone.is_some()));
        alone.is_some()
    };
    let published = || {
        let episode = shelf.library.episode(shelf.id("undated"));
        episode.expect("a query").expect("it").summary.published
    };
    // A year ahead, everything happens: a refresh, a download that fails, moves.
    shelf.apply_at(undated.clone(), now() + year);
    let failed = DownloadOutcome::Failed {
        reason: "the origin does not answer".to_owned(),
        is_final: false,
    };
    let id = shelf.id("undated");
    let noted = shelf.library.finish_download(id, &failed, now() + year);
    noted.expect("it is stored");
    assert!(!due(now() + year));
    // Back again.
    assert!(due(now()));
    assert_eq!(shelf.start_titles(), ["undated"]);
    shelf.apply(undated.clone());
    assert!(!due(now() + REFRESH_INTERVAL / 2) && due(now() + 2 * REFRESH_INTERVAL));
    assert_eq!(published(), now());
    // A clock that stood at 1970 while a feed was read first.
    let shelf = LibraryFixture::new();
    let one = [("one", 1, "https://cdn.example/1.mp3")];
    shelf.apply_at(feed_of(&one), Timestamp::UNIX_EPOCH);
    let report = shelf.apply(feed_of(&one));
    assert_eq!((report.added, report.changed), (0, 0));
    let episode = shelf.library.episode(shelf.id("one")).expect("a query");
    let published = episode.expect("it").summary.published;
    assert_eq!(published.to_string(), "2030-05-01T06:00:00Z");
}

#[test]
fn an_episode_with_a_date_in_the_future_is_not_the_newest_for_longer_than_it_is() {
    let shelf = LibraryFixture::new();
    shelf.rule("daily 07:30", 1);
    let item = |title: &str, date: &str| {
        format!(
            "<item><title>{title}</title><guid>{title}</guid><pubDate>{date}</pubDate>\
             <enclosure url=\"https://cdn.example/{title}.mp3\" type=\"audio/mpeg\"/></item>"
        )
    };
    let feed = |items: &str| {
        fetched(&format!(
            "<rss version=\"2.0\"><channel><title>Morning</title>{items}</channel></rss>"
        ))
    };
    let published = |title: &str| {
        let episode = shelf.library.episode(shelf.id(title)).expect("a query");
        episode.expect("it").summary.published
    };
    let hour = Duration::from_secs(3_600);
    let (mistyped, early) = (
        item("mistyped", "Thu, 01 Jun 2062 03:00:00 GMT"),
        item("early", "Sat, 01 Jun 2030 00:30:00 GMT"),
    );
    // Three hours ago, when the second one was not due for half an hour.
    let first = now() - 3 * hour;
    shelf.apply_at(feed(&(mistyped.clone() + &early)), first);
    assert_eq!((published("mistyped"), published("early")), (first, first));
    let new = item("new", "Sat, 01 Jun 2030 02:00:00 GMT");
    for at in [now() - hour / 2, now()] {
        shelf.apply_at(feed(&(mistyped.clone() + &early + &new)), at);
        assert_eq!(published("mistyped"), first);
        assert_eq!(published("early").to_string(), "2030-06-01T00:30:00Z");
        assert_eq!(shelf.start_titles(), ["new"]);
    }
}

#[test]
fn the_copy_that_apps_were_given_last_is_known_until_the_episode_goes() {
    let shelf = LibraryFixture::new();
    shelf.apply(feed_of(&[("one", 1, "https://cdn.example/1.mp3")]));
    let one = shelf.id("one");
    let noted = |edition: &str| shelf.library.note_app_copy(one, edition).expect("stored");
    assert_eq!(noted("a"), None);
    assert_eq!(noted("a").as_deref(), Some("a"));
    assert_eq!(noted("b").as_deref(), Some("a"));
    assert_eq!(noted("b").as_deref(), Some("b"));
    shelf.library.unsubscribe(shelf.channel).expect("it ends");
    assert_eq!(noted("c"), None);
    assert_eq!(
        noted("c"),
        None,
        "nothing is noted of an episode that is gone"
    );
}

#[test]
fn moves_under_a_wrong_clock_do_not_count_later() {
    let shelf = LibraryFixture::new();
    let year = Duration::from_secs(365 * 24 * 3_600);
    let moved = |n: u32| RefreshOutcome::Feed {
        bytes: b"<rss version=\"2.0\"><channel><title>Morning</title></channel></rss>".to_vec(),
        etag: None,
        last_modified: None,
        moved_to: Some(format!("https://pod.example/{n}").parse().expect("one")),
    };
    for n in 0..5 {
        assert_eq!(shelf.apply_at(moved(n), now() + year).problem, None);
    }
    assert_eq!(shelf.apply(moved(5)).problem, None);
    assert_eq!(shelf.url().as_str(), "https://pod.example/5");
}

#[test]
fn what_is_no_feed_is_a_problem_and_takes_nothing_away() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let report = shelf.apply(fetched(
        "<!doctype html><html><title>Sign in</title></html>",
    ));
    assert_eq!(
        report.problem.as_deref(),
        Some("this is a web page, not a feed")
    );
    assert_eq!(shelf.problem(), report.problem);
    assert_eq!(shelf.library.channels().expect("a list")[0].episodes, 3);
}

#[test]
fn a_feed_moves_but_not_in_circles_and_not_into_the_local_network() {
    let shelf = LibraryFixture::new();
    let moved = |to: &str| RefreshOutcome::Feed {
        bytes: b"<rss version=\"2.0\"><channel><title>Morning</title></channel></rss>".to_vec(),
        etag: None,
        last_modified: None,
        moved_to: Some(to.parse().expect("an address")),
    };
    let report = shelf.apply(moved("http://192.168.1.1/feed"));
    assert!(report.problem.expect("a reason").contains("local network"));
    assert_eq!(shelf.url().as_str(), FEED);
    let report = shelf.apply(moved("file:///etc/passwd"));
    assert!(report.problem.is_some());
    for n in 0..5 {
        let to = format!("https://pod.example/{n}");
        assert_eq!(shelf.apply(moved(&to)).problem, None);
        assert_eq!(shelf.url().as_str(), to);
    }
    let report = shelf.apply(moved("https://pod.example/again"));
    assert!(
        report
            .problem
            .expect("a reason")
            .contains("5 times in a day")
    );
    assert_eq!(shelf.url().as_str(), "https://pod.example/4");
    let later = now() + Duration::from_secs(25 * 3600);
    shelf.apply_at(moved("https://pod.example/again"), later);
    assert_eq!(shelf.url().as_str(), "https://pod.example/again");
    // One that is there already stays a channel of its own.
    let other: Url = "https://other.example/".parse().expect("an address");
    shelf
        .library
        .subscribe(&other, now())
        .expect("it is stored");
    let report = shelf.apply_at(moved("https://other.example/"), later);
    assert!(report.problem.expect("a reason").contains("already"));
}

#[test]
fn a_rule_chooses_the_file_of_an_episode_and_the_library_keeps_which_it_was() {
    let shelf = LibraryFixture::new();
    let alternate = |address: &str, bytes: u64| {
        format!(
            "<podcast:alternateEnclosure type=\"audio/opus\" length=\"{bytes}\">\
             <podcast:source uri=\"{address}\"/></podcast:alternateEnclosure>"
        )
    };
    let small = "https://pod.example/1.opus";
    let feed = |alternates: &str| {
        fetched(&format!(
            "<rss version=\"2.0\"><channel><title>Morning</title><item><title>one</title><guid>one</guid>\
             <enclosure url=\"https://pod.example/1.mp3\" length=\"1000\" type=\"audio/mpeg\"/>{alternates}</item>\
             </channel></rss>"
        ))
    };
    // One at an address that is not fetched is not chosen, however small it is.
    let local = alternate("http://192.168.1.1/1.opus", 1);
    shelf.apply(feed(&format!("{local}{}", alternate(small, 300))));
    let planned = || {
        let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
        plan.start.into_iter().next().expect("a download")
    };
    assert_eq!(planned().source.url.path(), "/1.mp3");
    assert_eq!(planned().source.chosen, None);
    let rule = ChannelRule {
        enclosure: EnclosureChoice::Smallest,
        ..ChannelRule::default()
    };
    let set = shelf.library.set_channel_rule(shelf.channel, &rule);
    set.expect("stored");
    let first = planned();
    assert_eq!(first.source.url.as_str(), small);
    assert_eq!(first.media_type.as_deref(), Some("audio/opus"));
    let known = shelf.library.episode_source(first.episode);
    assert_eq!(known.expect("a query").as_ref(), Some(&first.source));
    let file = shelf.folder.path().join("1.opus");
    let chosen = first.source.chosen.as_ref();
    let begun = shelf
        .library
        .begin_download_from(first.episode, &file, None, chosen);
    begun.expect("stored");
    let episode = || {
        let found = shelf.library.episode(first.episode).expect("a query");
        found.expect("the episode")
    };
    assert_eq!(episode().chosen.as_ref(), chosen);
    assert_eq!(episode().enclosure.path(), "/1.mp3");
    assert_eq!(episode().alternates.len(), 2);
    // Another list of files is a change, and does not change what is downloaded.
    let report = shelf.apply(feed(&alternate(small, 400)));
    assert_eq!((report.added, report.changed), (0, 1));
    assert_eq!(episode().alternates[0].bytes, Some(400));
    assert_eq!(shelf.apply(feed(&alternate(small, 400))).changed, 0);
    assert_eq!(episode().chosen.as_ref(), chosen);
    shelf.library.note_removed(first.episode).expect("stored");
    assert_eq!(episode().chosen, None);
}

#[test]
fn a_feed_of_the_local_network_leads_to_its_own_host_and_no_other() {
    let shelf = LibraryFixture::new();
    let local_host = || {
        let later = now() + 2 * REFRESH_INTERVAL_MAX;
        let due = shelf.library.due_refresh(shelf.channel, later);
        due.expect("a query").expect("it is due").local_host
    };
    let moved = |to: &str| RefreshOutcome::Feed {
        bytes: b"<rss version=\"2.0\"><channel><title>Morning</title></channel></rss>".to_vec(),
        etag: None,
        last_modified: None,
        moved_to: Some(to.parse().expect("an address")),
    };
    assert_eq!(local_host(), None);
    shelf
        .library
        .allow_local_host(shelf.channel)
        .expect("stored");
    assert_eq!(local_host().as_deref(), Some("pod.example"));
    shelf.apply(feed_of(&[("one", 1, "https://pod.example/1.mp3")]));
    let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
    let source = &plan.start[0].source;
    assert_eq!(source.local_host.as_deref(), Some("pod.example"));
    let known = shelf.library.episode_source(shelf.id("one"));
    assert_eq!(known.expect("a query").as_ref(), Some(source));
    shelf.apply(moved("https://pod.example/new"));
    assert_eq!(local_host().as_deref(), Some("pod.example"));
    shelf.apply(moved("https://cdn.example/new"));
    assert_eq!(local_host(), None);
    // An address that is local by what is written needs no word of the user's.
    let router: Url = "http://192.168.1.5/feed".parse().expect("an address");
    let router = shelf.library.subscribe(&router, now()).expect("stored");
    let due = shelf.library.due_refresh(router, now()).expect("a query");
    assert_eq!(due.expect("due").local_host.as_deref(), Some("192.168.1.5"));
    let report = shelf
        .library
        .apply_refresh(router, moved("http://192.168.1.6/feed"), now())
        .expect("stored");
    assert!(report.problem.expect("a reason").contains("local network"));
}

#[test]
fn an_episode_with_a_new_address_is_tried_at_once_but_not_again_and_again() {
    let shelf = LibraryFixture::new();
    let with_token = |n: u32| feed_of(&[("one", 1, &format!("https://cdn.example/1?token={n}"))]);
    let failed = DownloadOutcome::Failed {
        reason: "cdn.example answers 403 Forbidden".to_owned(),
        is_final: false,
    };
    let is_due = || {
        let due = shelf.library.due_refresh(shelf.channel, now());
        due.expect("a query").is_some()
    };
    shelf.apply(with_token(1));
    let id = shelf.id("one");
    let fail = |begun| {
        let noted = shelf.library.finish_download(id, &failed, now());
        noted.expect("stored");
        let noted = shelf.library.refresh_for_episode(id, begun, now());
        noted.expect("stored");
    };
    // A feed that was read after the download began has nothing newer.
    fail(now() - Duration::from_secs(1));
    assert!(!is_due());
    assert!(shelf.start_titles().is_empty());
    shelf.apply(with_token(2));
    assert_eq!(shelf.start_titles(), ["one"]);
    fail(now());
    assert!(is_due());
    shelf.apply(with_token(3));
    assert!(shelf.start_titles().is_empty(), "it waits after the second");
    assert_eq!(shelf.state("one"), EpisodeState::Failed);
    let later: Zoned = noon() + 3 * DOWNLOAD_RETRY;
    let plan = shelf.library.planned_downloads(&later).expect("a plan");
    let address = plan.start[0].source.url.as_str();
    assert_eq!(address, "https://cdn.example/1?token=3");
}

#[test]
fn a_copy_is_whole_and_its_owners_alone() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("library.sqlite");
    shelf.library.backup(&copy).expect("a copy");
    assert!(matches!(
        shelf.library.backup(&copy),
        Err(LibraryError::Backup { .. })
    ));
    let nowhere = folder.path().join("none/library.sqlite");
    assert!(shelf.library.backup(&nowhere).is_err());
    let of = |library: &Library| {
        let channels = library.channels().expect("a list");
        let episodes = library.episodes(&EpisodeQuery::default());
        (channels, episodes.expect("a list"))
    };
    let copied = Library::open(folder.path()).expect("the copy");
    assert_eq!(of(&copied), of(&shelf.library));
}

#[test]
fn a_password_goes_to_its_own_host_only() {
    let shelf = LibraryFixture::new();
    let with_password: Url = "https://me:secret@pod.example/feed".parse().expect("one");
    shelf
        .library
        .subscribe(&with_password, now())
        .expect("stored");
    shelf.apply(feed_of(&[
        ("own", 1, "https://pod.example/1.mp3"),
        ("other", 2, "https://cdn.example/2.mp3"),
    ]));
    let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
    let has_password: Vec<_> = plan
        .start
        .iter()
        .map(|p| (p.title.as_str(), p.source.authorization.is_some()))
        .collect();
    assert_eq!(has_password, [("own", true), ("other", false)]);
    shelf.apply(RefreshOutcome::Feed {
        bytes: b"<rss version=\"2.0\"><channel><title>M</title></channel></rss>".to_vec(),
        etag: None,
        last_modified: None,
        moved_to: Some("https://elsewhere.example/".parse().expect("one")),
    });
    let later = now() + 2 * REFRESH_INTERVAL;
    let due = shelf.library.due_refreshes(later, 1).expect("a list");
    assert_eq!(due[0].authorization, None);
}

#[test]
fn the_latest_that_were_not_played_are_wanted_the_oldest_first() {
    let shelf = LibraryFixture::new();
    shelf.three();
    shelf.rule("weekdays 07:30", 2);
    let monday = || Some("Mon 07:30".to_owned());
    assert_eq!(
        shelf.start(),
        [("two".to_owned(), monday()), ("three".to_owned(), monday())]
    );
    let three = shelf.id("three");
    shelf
        .library
        .set_played(three, true, now())
        .expect("stored");
    assert_eq!(shelf.start_titles(), ["one", "two"]);
    shelf.rule("by hand", 2);
    assert!(shelf.start().is_empty());
    let by = "2030-06-01T10:00:00Z".parse().expect("a time");
    let own = EpisodeDeadline {
        by: Some(by),
        policy: Some("any".to_owned()),
    };
    let set = shelf.library.set_episode_deadline(three, Some(&own));
    set.expect("it is stored");
    let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
    assert_eq!(plan.start[0].deadline, Some(by));
    assert_eq!(plan.start[0].policy.as_deref(), Some("any"));
}

#[test]
fn without_a_deadline_only_free_networks_are_used() {
    let shelf = LibraryFixture::new();
    shelf.three();
    shelf.rule("whenever it is free", 1);
    let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
    assert_eq!(plan.start[0].policy.as_deref(), Some("free-only"));
    assert_eq!(plan.start[0].deadline, None);
}

#[test]
fn files_go_when_they_were_played_or_newer_ones_are_kept() {
    let shelf = LibraryFixture::new();
    shelf.three();
    shelf.rule("daily 07:30", 2);
    for title in ["one", "two", "three"] {
        shelf.make_ready(title);
    }
    assert_eq!(shelf.remove_titles(), ["one"]);
    // What was begun stays.
    let one = shelf.id("one");
    let position = shelf
        .library
        .set_position(one, 60_000, Some(600_000), now());
    position.expect("it is stored");
    assert!(shelf.remove_titles().is_empty());
    let end = shelf
        .library
        .set_position(one, 599_000, Some(600_000), now());
    end.expect("it is stored");
    assert_eq!(shelf.remove_titles(), ["one"], "it was heard to its end");
    shelf.library.note_removed(one).expect("it is stored");
    assert_eq!(shelf.state("one"), EpisodeState::Removed);
    assert!(shelf.start().is_empty(), "it does not come back");
}

#[test]
fn what_a_person_moves_is_heard_first_and_newer_episodes_come_behind_it() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let titles = || -> Vec<String> {
        let list = shelf.library.up_next(10).expect("a list");
        list.into_iter().map(|episode| episode.title).collect()
    };
    assert!(titles().is_empty(), "nothing is here");
    for title in ["two", "three", "one"] {
        shelf.make_ready(title);
    }
    let go = |title: &str, to: UpNextMove| {
        let moved = shelf.library.move_up_next(shelf.id(title), to);
        moved.expect("it is stored");
        titles()
    };
    assert_eq!(titles(), ["one", "two", "three"], "by publication");
    assert_eq!(go("three", UpNextMove::Top), ["three", "one", "two"]);
    assert_eq!(go("three", UpNextMove::Up), ["three", "one", "two"]);
    assert_eq!(go("three", UpNextMove::Down), ["one", "three", "two"]);
    assert_eq!(go("two", UpNextMove::Up), ["one", "two", "three"]);
    assert_eq!(go("two", UpNextMove::Last), ["one", "three", "two"]);
    // A newer one is behind all that have a place.
    shelf.apply(feed_of(&[("four", 4, "https://cdn.example/4.mp3")]));
    shelf.make_ready("four");
    assert_eq!(titles(), ["one", "three", "two", "four"]);
    // What has a place stays, whatever the rule keeps; what was heard leaves, and its place with it.
    shelf.rule("daily 07:30", 1);
    assert!(shelf.remove_titles().is_empty());
    let end = |title: &str| {
        let id = shelf.id(title);
        let heard = shelf
            .library
            .set_position(id, 599_000, Some(600_000), now());
        heard.expect("it is stored");
    };
    end("one");
    assert_eq!(titles(), ["three", "two", "four"]);
    assert_eq!(shelf.remove_titles(), ["one"]);
    shelf
        .library
        .set_played(shelf.id("one"), false, now())
        .expect("it is stored");
    assert_eq!(titles(), ["three", "two", "one", "four"], "it has no place");
    shelf.library.reset_up_next().expect("it is stored");
    assert_eq!(titles(), ["one", "two", "three", "four"]);
    let unknown = shelf.library.move_up_next(EpisodeId(99), UpNextMove::Top);
    assert!(matches!(unknown, Err(LibraryError::NoEpisode(99))));
}

#[test]
fn downloads_begin_with_the_priority_of_their_place_and_say_what_is_wanted_first() {
    let shelf = LibraryFixture::new();
    shelf.three();
    shelf.rule("daily 07:30", 3);
    for title in ["two", "three"] {
        let asked = EpisodeDeadline {
            by: None,
            policy: None,
        };
        let id = shelf.id(title);
        let wanted = shelf.library.set_episode_deadline(id, Some(&asked));
        wanted.expect("it is stored");
        let moved = shelf.library.move_up_next(id, UpNextMove::Top);
        moved.expect("it is stored");
    }
    let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
    let mut planned: Vec<(&str, u8, u64)> = (plan.start.iter())
        .map(|planned| (&*planned.title, planned.priority, planned.start_bytes))
        .collect();
    planned.sort_unstable();
    // Their length is not known: three minutes of 128 kb/s.
    let start_bytes = 2_880_000;
    assert_eq!(
        planned,
        [
            ("one", 0, start_bytes),
            ("three", 7, start_bytes),
            ("two", 6, start_bytes)
        ]
    );
}

#[test]
fn what_was_begun_is_listed_by_when_it_was_heard_until_its_end() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let begun = || -> Vec<String> {
        let list = shelf.library.begun_episodes(10).expect("a list");
        list.into_iter().map(|episode| episode.title).collect()
    };
    let hear = |title: &str, position_ms: u64, after_s: i64| {
        let at = now() + jiff::SignedDuration::from_secs(after_s);
        let id = shelf.id(title);
        let stored = shelf
            .library
            .set_position(id, position_ms, Some(600_000), at);
        stored.expect("it is stored");
    };
    hear("one", 60_000, 1);
    hear("three", 60_000, 2);
    hear("two", 60_000, 3);
    assert_eq!(begun(), ["two", "three", "one"]);
    hear("one", 90_000, 4);
    hear("two", 599_000, 5);
    assert_eq!(begun(), ["one", "three"]);
    hear("three", 0, 6);
    assert_eq!(begun(), ["one"], "back at its beginning");
}

#[test]
fn a_limit_of_bytes_holds() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let rule = ChannelRule {
        schedule: "daily 07:30".parse().expect("one"),
        policy: None,
        keep: KeepRule {
            latest: 3,
            unplayed_only: true,
            // Episodes have a megabyte each.
            bytes_max: Some(2_500_000),
        },
        ..ChannelRule::default()
    };
    let set = shelf.library.set_channel_rule(shelf.channel, &rule);
    set.expect("it is stored");
    assert_eq!(shelf.start_titles(), ["two", "three"]);
}

#[test]
fn a_failed_download_is_tried_later_and_a_final_one_by_hand_only() {
    let shelf = LibraryFixture::new();
    shelf.three();
    shelf.rule("daily 07:30", 1);
    let three = shelf.id("three");
    let fail = |is_final| {
        let outcome = DownloadOutcome::Failed {
            reason: "it is a web page".to_owned(),
            is_final,
        };
        let finished = shelf.library.finish_download(three, &outcome, now());
        finished.expect("it is stored");
    };
    fail(false);
    let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
    assert!(plan.start.is_empty());
    let again = plan.next_retry_at.expect("a time");
    let then = again.to_zoned(noon().time_zone().clone());
    let plan = shelf.library.planned_downloads(&then).expect("a plan");
    assert_eq!(plan.start.len(), 1);
    fail(true);
    let much_later = (again + 1000 * REFRESH_INTERVAL_MAX).to_zoned(noon().time_zone().clone());
    let plan = shelf
        .library
        .planned_downloads(&much_later)
        .expect("a plan");
    assert!(plan.start.is_empty() && plan.next_retry_at.is_none());
    let own = EpisodeDeadline {
        by: None,
        policy: None,
    };
    let set = shelf.library.set_episode_deadline(three, Some(&own));
    set.expect("it is stored");
    assert_eq!(shelf.start_titles(), ["three"]);
}

#[test]
fn the_part_of_a_failed_download_is_continued_and_goes_when_nobody_wants_it() {
    let shelf = LibraryFixture::new();
    shelf.three();
    shelf.rule("daily 07:30", 1);
    let three = shelf.id("three");
    let file = Path::new("/music/three.mp3");
    let fail = |is_final| {
        let begun = shelf.library.begin_download(three, file, None);
        begun.expect("it begins");
        let outcome = DownloadOutcome::Failed {
            reason: "the server broke off".to_owned(),
            is_final,
        };
        let finished = shelf.library.finish_download(three, &outcome, now());
        finished.expect("it is stored");
    };
    let discarded = || -> Vec<EpisodeId> {
        let plan = shelf.library.planned_downloads(&noon()).expect("a plan");
        plan.discard.iter().map(|part| part.episode).collect()
    };
    fail(false);
    assert!(discarded().is_empty(), "it is tried again");
    let later = (now() + REFRESH_INTERVAL_MAX).to_zoned(noon().time_zone().clone());
    let plan = shelf.library.planned_downloads(&later).expect("a plan");
    assert_eq!(plan.start[0].file.as_deref(), Some(file));
    let failed = || shelf.library.failed_files(shelf.channel).expect("a list");
    assert_eq!(failed(), [file]);
    // Played elsewhere, or of a channel that is fetched by hand: no further attempt is made.
    let set_played = |played| {
        let set = shelf.library.set_played(three, played, now());
        set.expect("it is stored");
    };
    for is_played in [true, false] {
        match is_played {
            true => set_played(true),
            false => shelf.rule("by hand", 1),
        }
        assert_eq!(discarded(), [three]);
        shelf.library.note_discarded(three).expect("stored");
        assert!(discarded().is_empty() && failed().is_empty());
        set_played(false);
        shelf.rule("daily 07:30", 1);
        fail(false);
    }
    // What failed for good left nothing.
    fail(true);
    assert!(discarded().is_empty() && failed().is_empty());
}

#[test]
fn an_enclosure_of_the_local_network_is_refused_whoever_asks() {
    let shelf = LibraryFixture::new();
    shelf.apply(feed_of(&[
        ("loopback", 1, "http://127.0.0.1/a.mp3"),
        ("name", 2, "http://router.local/a.mp3"),
        ("mapped", 3, "http://[::ffff:10.0.0.1]/a.mp3"),
        ("file", 4, "file:///etc/passwd"),
        ("good", 5, "https://cdn.example/a.mp3"),
    ]));
    shelf.rule("daily 07:30", 10);
    assert_eq!(shelf.start_titles(), ["good"]);
    let loopback = shelf.id("loopback");
    let own = EpisodeDeadline {
        by: None,
        policy: None,
    };
    let set = shelf.library.set_episode_deadline(loopback, Some(&own));
    set.expect("it is stored");
    assert_eq!(shelf.start_titles(), ["good"]);
    let episode = shelf
        .library
        .episode(loopback)
        .expect("a query")
        .expect("it");
    let problem = episode.summary.problem.expect("a reason");
    assert!(problem.contains("local network"), "{problem}");
    // A feed of that network may.
    let own: Url = "http://127.0.0.1/feed".parse().expect("an address");
    let channel = shelf.library.subscribe(&own, now()).expect("it is stored");
    let outcome = feed_of(&[("here", 1, "http://127.0.0.1/a.mp3")]);
    shelf
        .library
        .apply_refresh(channel, outcome, now())
        .expect("it is stored");
    assert_eq!(shelf.state("here"), EpisodeState::New);
}

#[test]
fn downloads_are_taken_up_after_a_restart() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let (one, two) = (shelf.id("one"), shelf.id("two"));
    let library = &shelf.library;
    library
        .begin_download(one, Path::new("/music/one"), Some(now()))
        .expect("it begins");
    library.set_job(one, 7).expect("it is stored");
    library
        .begin_download(two, Path::new("/music/two"), None)
        .expect("it begins");
    let again = Library::open(shelf.folder.path()).expect("a library");
    let active = again.active_downloads().expect("a list");
    let active: Vec<_> = active.iter().map(|a| (a.episode, a.job)).collect();
    assert_eq!(active, [(one, Some(7)), (two, None)]);
    assert!(!shelf.start_titles().contains(&"one".to_owned()));
}

#[test]
fn lists_have_pages_words_and_states() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let titles = |query: EpisodeQuery| -> Vec<String> {
        let found = shelf.library.episodes(&query).expect("a list");
        found.into_iter().map(|e| e.title).collect()
    };
    let all = EpisodeQuery::default;
    assert_eq!(titles(all()), ["three", "two", "one"]);
    let second = EpisodeQuery {
        offset: 1,
        limit: 1,
        ..all()
    };
    assert_eq!(titles(second), ["two"]);
    let with_words = |words: &str| EpisodeQuery {
        words: words.to_owned(),
        ..all()
    };
    assert_eq!(titles(with_words("T E")), ["three"]);
    assert!(titles(with_words("%")).is_empty(), "no pattern of its own");
    shelf.make_ready("two");
    let ready = EpisodeQuery {
        state: Some(EpisodeState::Ready),
        played: Some(false),
        channel: Some(shelf.channel),
        ..all()
    };
    assert_eq!(titles(ready), ["two"]);
}

#[test]
fn the_log_of_transfers_is_kept() {
    let shelf = LibraryFixture::new();
    let entry = TransferLogEntry {
        started_at: now(),
        ended_at: now() + Duration::from_secs(60),
        is_whole: true,
        bytes: 5,
        ..TransferLogEntry::default()
    };
    shelf.library.record_transfer(&entry).expect("it is stored");
    assert_eq!(shelf.library.transfer_log(now()).expect("a list"), [entry]);
    let later = now() + Duration::from_secs(61);
    assert!(
        shelf
            .library
            .transfer_log(later)
            .expect("a list")
            .is_empty()
    );
}

#[test]
fn the_log_says_what_was_fetched_and_when_it_was_first_played() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let log = || {
        shelf
            .library
            .transfer_log(Timestamp::UNIX_EPOCH)
            .expect("a list")
    };
    let fetched = |title: &str, ended_at: Timestamp| {
        let entry = TransferLogEntry {
            episode: Some(shelf.id(title)),
            started_at: now(),
            ended_at,
            is_whole: true,
            ..TransferLogEntry::default()
        };
        shelf.library.record_transfer(&entry).expect("it is stored");
    };
    let after = |minutes: u64| now() + Duration::from_secs(60 * minutes);
    let play = |title: &str, at: Timestamp| {
        let played = shelf.library.set_position(shelf.id(title), 5_000, None, at);
        played.expect("it is stored");
    };
    // One is played while it is still fetched, one later and twice, one was played before it was asked for again.
    play("one", after(2));
    play("three", now() - Duration::from_secs(600));
    for title in ["one", "two", "three"] {
        fetched(title, after(10));
    }
    play("two", after(30));
    play("two", after(40));
    let played: Vec<_> = log().iter().map(|entry| entry.played_at).collect();
    assert_eq!(played, [Some(after(2)), Some(after(30)), None]);
    let labels = log()[0].labels.clone().expect("they are stored");
    assert_eq!((&*labels.channel_title, &*labels.title), ("Morning", "one"));
    assert_eq!(labels.channel, Some(shelf.channel));
    assert!(
        labels
            .url
            .is_some_and(|url| url.as_str().ends_with("1.mp3"))
    );
    let played = shelf
        .library
        .played_transfers(shelf.channel, 1)
        .expect("a list");
    assert_eq!(played, log()[1..2]);
    // By pages it is the same.
    let mut pages = Vec::new();
    let mut after = Some(0);
    while let Some(from) = after {
        let page = shelf
            .library
            .transfer_log_page(Timestamp::UNIX_EPOCH, from, 1);
        let page = page.expect("a page");
        assert_eq!(page.entries.len(), 1);
        pages.extend(page.entries);
        after = page.next;
    }
    assert_eq!(pages, log());
    // The log outlives the channel.
    shelf
        .library
        .unsubscribe(shelf.channel)
        .expect("it is removed");
    assert_eq!(log().len(), 3);
}

#[test]
fn what_the_log_will_say_of_a_download_survives_until_it_ends() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let one = shelf.id("one");
    let begin = || {
        let begun = shelf
            .library
            .begin_download(one, Path::new("/music/one"), None);
        begun.expect("it begins");
        shelf.library.set_job(one, 7).expect("it is stored");
    };
    let record = || {
        shelf.library.active_downloads().expect("a list")[0]
            .record
            .clone()
    };
    begin();
    let kept = TransferRecord {
        first_byte_at: Some(now()),
        bytes: 5,
        ..TransferRecord::default()
    };
    let stored = shelf.library.keep_transfer_record(7, &kept);
    stored.expect("it is stored");
    assert_eq!(record(), kept);
    // Another deadline changes nothing of it; another download begins without it.
    begin();
    assert_eq!(record(), kept);
    let cancelled = DownloadOutcome::Cancelled;
    let ended = shelf.library.finish_download(one, &cancelled, now());
    ended.expect("it is stored");
    begin();
    assert_eq!(record(), TransferRecord::default());
}

#[test]
fn a_newer_library_and_a_damaged_one_are_refused_in_words() {
    let shelf = LibraryFixture::new();
    let file = shelf.folder.path().join("library.sqlite");
    let connection = rusqlite::Connection::open(&file).expect("a database");
    connection
        .pragma_update(None, "user_version", 1000)
        .expect("it is written");
    drop(connection);
    let error = Library::open(shelf.folder.path()).err().expect("a refusal");
    assert!(matches!(error, LibraryError::Newer { .. }), "{error}");
    let other = tempfile::tempdir().expect("a folder");
    std::fs::write(other.path().join("library.sqlite"), [7; 4096]).expect("it is written");
    let error = Library::open(other.path()).err().expect("a refusal");
    assert!(matches!(error, LibraryError::Database(_)), "{error}");
}

/// Set for the process that [`what_was_stored_survives_a_kill`] kills.
const WRITER: &str = "CEDOS_TEST_LIBRARY_WRITER";

#[test]
fn what_was_stored_survives_a_kill() {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};
    if let Some(folder) = std::env::var_os(WRITER) {
        let library = Library::open(Path::new(&folder)).expect("a library");
        let episode = library.episodes(&EpisodeQuery::default()).expect("a list")[0].id;
        for position in 1_u64.. {
            let stored = library.set_position(episode, position, None, now());
            stored.expect("it is stored");
            let mut out = std::io::stdout().lock();
            writeln!(out, "position {position}").expect("it is said");
            out.flush().expect("it is said");
        }
    }
    let shelf = LibraryFixture::new();
    shelf.apply(feed_of(&[("a", 1, "https://cdn.example/a.mp3")]));
    let mut position = 0;
    for kill in 0..20 {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "what_was_stored_survives_a_kill", "--nocapture"])
            .env(WRITER, shelf.folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut said = 0_u64;
        // Another number of writes each time, so that the kill finds another moment.
        for _ in 0..=3 * kill {
            let line = lines.next().expect("it goes on").expect("text");
            // The first may stand behind what the test program says of itself.
            if let Some((_, number)) = line.split_once("position ") {
                said = number.parse().expect("a number");
            }
        }
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        let library = Library::open(shelf.folder.path()).expect("a library");
        let episode = library.episodes(&EpisodeQuery::default()).expect("a list")[0].clone();
        assert!(
            episode.position_ms >= said,
            "{kill}: {} < {said}",
            episode.position_ms
        );
        position = position.max(episode.position_ms);
    }
    assert!(position > 0, "something was stored");
}

#[test]
fn a_whole_file_under_the_name_of_a_failed_download_does_not_go_with_the_channel() {
    let shelf = LibraryFixture::new();
    shelf.three();
    let three = shelf.id("three");
    let begun = shelf
        .library
        .begin_download(three, Path::new("/music/three.mp3"), None);
    begun.expect("it begins");
    let outcome = DownloadOutcome::Failed {
        reason: "the server broke off".to_owned(),
        is_final: false,
    };
    let finished = shelf.library.finish_download(three, &outcome, now());
    finished.expect("it is stored");
    let files = shelf.library.unsubscribe(shelf.channel).expect("it ends");
    assert!(files.is_empty(), "{files:?}");
}
