//! The podcasts of a scenario in the lab: a `cedos agent` on the device, and a person who uses `cedos cast`.
//!
//! ```text
//!  origin: /feed/ID grows at t_s, /bytes/N?seed=S        device: cedos agent
//!                                                                ▲ cast add, rule, refresh   as the feeds grow
//!                                                                ▲ cast play, played         at play_s
//!                                                                ▲ cast log                  at the end ─▶ report
//! ```
//!
//! The agent reads a feed once an hour, and a scenario leaves out hours in which nothing moves: a person's `cast
//! refresh` stands for that, again and again until a network brings what is new.

use anyhow::{Context, bail};
use cedos_lab_emu::{World, content};
use cedos_lab_link::{LinkReach, Rate, Span, Time};
use cedos_lab_scenario::{
    EpisodeReport, EventKind, PodcastFeed, PodcastReport, Podcasts, Scenario,
};
use cedos_lab_sim::score::course::{CourseSegment, LinkCourse};
use cedos_lab_sim::score::jobs::ScoreJob;
use cedos_lab_sim::score::optimum;
use cedos_readycast::TransferLogEntry;
use cedos_terminal::print_stderr;
use d2tp_sched::LinkClass;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::client::network_rules;
use super::prox::LabProx;
use super::{LOOK, end, is_interrupted, origin_named};

/// How long the agent may take to start.
const AGENT_START: Duration = Duration::from_secs(10);
/// How long a command of `cedos cast` that needs no network may take.
const CAST_MAX: Duration = Duration::from_secs(10);
/// The time between two attempts to read a feed.
const REFRESH_AGAIN: Span = Span::from_secs(1);
/// The time between two looks at what is still under way.
const LOG_AGAIN: Span = Span::from_secs(2);
/// The share of a link's bits that is content: what a packet of 1,500 bytes carries.
// As in lab/repro: 1,432 of 1,500 bytes.
const CONTENT_SHARE: f64 = 1_432.0 / 1_500.0;

/// The device's agent, and what its user does.
pub struct LabPodcasts {
    program: PathBuf,
    /// The home of the device's user.
    home: PathBuf,
    /// The zone in which the device's local time is the scenario's, as `TZ` takes it.
    zone: Option<String>,
    agent: Child,
}

/// A feed of the scenario while the lab runs.
struct LabFeed<'a> {
    feed: &'a PodcastFeed,
    number: usize,
    /// The channel's number in the device's library.
    channel: u64,
    /// Publication of each episode that is published.
    published: Vec<Timestamp>,
    /// Episodes that the device knows.
    known: u64,
    refresh: Option<(Child, PathBuf)>,
    refreshed: Option<Time>,
    /// What was found when episodes were played, by their number.
    heard: BTreeMap<usize, bool>,
}

impl Drop for LabPodcasts {
    fn drop(&mut self) {
        end(&mut self.agent);
    }
}

impl LabPodcasts {
    /// Starts the device's agent, before the scenario's time begins.
    ///
    /// # Errors
    /// It did not start.
    pub fn start(
        podcasts: &Podcasts,
        world: &World,
        program: &Path,
        folder: &Path,
        prox: Option<&LabProx>,
    ) -> anyhow::Result<LabPodcasts> {
        let home = folder.join("device");
        fs::create_dir_all(&home)?;
        let mut settings = String::new();
        if let Some(prox) = prox {
            settings += &format!("[proxy]\ndefault = \"{}\"\n", prox.reached_by(world));
            settings += &format!("[device]\nkey_file = \"{}\"\n", prox.key().display());
        }
        settings += &format!(
            "[podcasts]\ndirectory = \"{}\"\n",
            home.join("Podcasts").display()
        );
        settings += &network_rules(world.scenario());
        fs::write(home.join("config.toml"), settings)?;
        let zone = podcasts
            .clock_s()
            .map(|clock_s| zone(clock_s, Timestamp::now()));
        let log = home.join("agent.log");
        let mut command = Command::new(program);
        at_home(&mut command, &home, zone.as_deref());
        command
            .arg("agent")
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let agent = world.device().spawn(command)?;
        let mut started = LabPodcasts {
            program: program.to_owned(),
            home,
            zone,
            agent,
        };
        let mut left = AGENT_START;
        while !started.home.join("agent.sock").exists() {
            if left.is_zero() || started.agent.try_wait()?.is_some() {
                let said = fs::read_to_string(&log).unwrap_or_default();
                bail!("`cedos agent` does not start: {}", said.trim());
            }
            std::thread::sleep(LOOK);
            left = left.saturating_sub(LOOK);
        }
        Ok(started)
    }

    /// Subscribes, publishes, plays, and reports when all is over or the scenario is.
    ///
    /// # Errors
    /// A command of the agent failed.
    pub fn run(&self, podcasts: &Podcasts, world: &World) -> anyhow::Result<PodcastReport> {
        let end_at = Time::from_secs_f64(world.scenario().duration_s);
        let start = Timestamp::now() - duration(world.now().since(Time::ZERO));
        let mut feeds = Vec::new();
        for (number, feed) in podcasts.feeds.iter().enumerate() {
            feeds.push(self.subscribe(number, feed, podcasts, world)?);
        }
        let mut looked = Time::ZERO;
        while world.now() < end_at && world.fault().is_none() && !is_interrupted() {
            let mut is_over = true;
            for feed in &mut feeds {
                feed.publish(world);
                self.refresh(feed, world)?;
                self.play(feed, world)?;
                is_over &= feed.is_over();
            }
            if is_over && world.now() >= looked + LOG_AGAIN {
                looked = world.now();
                let published: usize = podcasts.feeds.iter().map(|f| f.episodes.len()).sum();
                if self
                    .log(world)?
                    .iter()
                    .filter(|entry| entry.is_whole)
                    .count()
                    >= published
                {
                    break;
                }
            }
            std::thread::sleep(LOOK);
        }
        for (child, _) in feeds.iter_mut().filter_map(|feed| feed.refresh.as_mut()) {
            end(child);
        }
        let mut deadlines = BTreeMap::new();
        for feed in &feeds {
            let episodes = self.episodes(feed, world)?;
            deadlines.extend(episodes.iter().filter_map(|episode| {
                let title = episode["title"].as_str()?.to_owned();
                Some((title, episode["deadline"].as_str()?.parse().ok()?))
            }));
        }
        let seconds = |at: Timestamp| at.duration_since(start).as_secs_f64();
        let log = self.log(world)?;
        let mut episodes = Vec::new();
        for feed in &feeds {
            episodes.extend(feed.reports(&log, &deadlines, &seconds));
        }
        episodes.sort_by(|a, b| a.published_s.total_cmp(&b.published_s));
        let study = self.cast(world, &["log", "--summary", "--json"])?;
        Ok(PodcastReport {
            study,
            ..report(world.scenario(), podcasts, episodes)
        })
    }

    fn subscribe<'a>(
        &self,
        number: usize,
        feed: &'a PodcastFeed,
        podcasts: &Podcasts,
        world: &World,
    ) -> anyhow::Result<LabFeed<'a>> {
        let mut served = LabFeed {
            feed,
            number,
            channel: 0,
            published: Vec::new(),
            known: 0,
            refresh: None,
            refreshed: None,
            heard: BTreeMap::new(),
        };
        served.serve(world);
        let url = format!("{}/feed/{}", origin_named(world), feed.id);
        let added = self.cast(world, &["add", &url, "--json"])?;
        served.channel = added["channel"]["id"]
            .as_u64()
            .with_context(|| format!("`cedos cast add {url}` answers {added}"))?;
        let (channel, keep) = (served.channel.to_string(), feed.keep.to_string());
        let policy = podcasts.policy.word();
        let rule = [
            "rule", &channel, &feed.rule, "--keep", &keep, "--policy", policy, "--json",
        ];
        self.cast(world, &rule)?;
        Ok(served)
    }

    /// Reads a feed that has more than the device knows.
    fn refresh(&self, feed: &mut LabFeed<'_>, world: &World) -> anyhow::Result<()> {
        if let Some((child, output)) = &mut feed.refresh {
            if child.try_wait()?.is_none() {
                return Ok(());
            }
            let answer = last_object(output);
            let reports = answer["channels"].as_array().into_iter().flatten();
            feed.known += reports
                .filter_map(|channel| channel["report"]["added"].as_u64())
                .sum::<u64>();
            feed.refresh = None;
            feed.refreshed = Some(world.now());
            return Ok(());
        }
        let rests = feed
            .refreshed
            .is_some_and(|at| world.now() < at + REFRESH_AGAIN);
        if feed.known >= feed.published.len() as u64 || rests {
            return Ok(());
        }
        let output = self.home.join(format!("refresh-{}.json", feed.number));
        let channel = feed.channel.to_string();
        let child = self.begin(world, &["refresh", &channel, "--json"], &output, None)?;
        feed.refresh = Some((child, output));
        Ok(())
    }

    /// Plays the episodes for which it is time: what the player gets must be the origin's content.
    fn play(&self, feed: &mut LabFeed<'_>, world: &World) -> anyhow::Result<()> {
        let due: Vec<usize> = feed.to_play(world.now()).collect();
        for number in due {
            let heard = self.hear(feed, number, world)?;
            let word = if heard { "whole" } else { "NOT WHOLE" };
            print_stderr(&format!(
                "{:9.3} s  podcast  {} is played: {word}",
                world.now().as_secs_f64(),
                feed.title(number)
            ));
            feed.heard.insert(number, heard);
        }
        Ok(())
    }

    fn hear(&self, feed: &LabFeed<'_>, number: usize, world: &World) -> anyhow::Result<bool> {
        let title = feed.title(number);
        let episodes = self.episodes(feed, world)?;
        let episode = episodes.iter().find(|e| e["title"] == title.as_str());
        let Some(episode) = episode else {
            return Ok(false);
        };
        let id = episode["id"].to_string();
        if episode["state"] != "ready" {
            return Ok(false);
        }
        let output = self.home.join("played.txt");
        let mut player = self.begin(world, &["play", &id], &output, Some("sha256sum"))?;
        if !ended_well(&mut player, CAST_MAX)? {
            return Ok(false);
        }
        self.cast(world, &["played", &id, "--json"])?;
        let digest = content::sha256(
            feed.content_seed(number, world),
            feed.feed.episodes[number].bytes,
        );
        let printed = fs::read_to_string(output).unwrap_or_default();
        Ok(printed.starts_with(&hex::encode(digest)))
    }

    fn episodes(&self, feed: &LabFeed<'_>, world: &World) -> anyhow::Result<Vec<Value>> {
        let channel = feed.channel.to_string();
        let shown = self.cast(world, &["show", &channel, "--limit", "1000", "--json"])?;
        Ok(shown["episodes"].as_array().cloned().unwrap_or_default())
    }

    fn log(&self, world: &World) -> anyhow::Result<Vec<TransferLogEntry>> {
        let mut log = self.cast(world, &["log", "--json"])?;
        serde_json::from_value(log["entries"].take()).context("the log of downloads")
    }

    /// Runs a command of `cedos cast` that needs no network, and returns what it prints.
    fn cast(&self, world: &World, arguments: &[&str]) -> anyhow::Result<Value> {
        let output = self.home.join("cast.json");
        let mut child = self.begin(world, arguments, &output, None)?;
        if !ended_well(&mut child, CAST_MAX)? {
            bail!("`cedos cast {}` failed", arguments.join(" "));
        }
        Ok(last_object(&output))
    }

    fn begin(
        &self,
        world: &World,
        arguments: &[&str],
        output: &Path,
        player: Option<&str>,
    ) -> anyhow::Result<Child> {
        let mut command = Command::new(&self.program);
        at_home(&mut command, &self.home, self.zone.as_deref());
        command.arg("cast").args(arguments);
        command.env("CEDOS_PLAYER", player.unwrap_or_default());
        command.stdin(Stdio::null()).stdout(File::create(output)?);
        command.stderr(
            File::options()
                .create(true)
                .append(true)
                .open(self.home.join("cast.log"))?,
        );
        world.device().spawn(command)
    }
}

impl LabFeed<'_> {
    /// The title of an episode, by which log and lists name it.
    fn title(&self, number: usize) -> String {
        format!("{} {number}", self.feed.id)
    }

    /// The seed of an episode's content: another one for each, so that no two are the same object.
    fn content_seed(&self, number: usize, world: &World) -> u64 {
        let of_feed = world
            .scenario()
            .seed
            .wrapping_mul(1_000)
            .wrapping_add(self.number as u64);
        of_feed.wrapping_mul(1_000).wrapping_add(number as u64)
    }

    /// Publishes what is due.
    fn publish(&mut self, world: &World) {
        let now = world.now().as_secs_f64();
        let due = self
            .feed
            .episodes
            .iter()
            .filter(|episode| episode.t_s <= now)
            .count();
        if due > self.published.len() {
            self.published.resize(due, Timestamp::now());
            self.serve(world);
        }
    }

    /// Has the origin serve the feed with all that is published.
    fn serve(&self, world: &World) {
        let origin = origin_named(world);
        let item = |(number, at): (usize, &Timestamp)| {
            let date =
                jiff::fmt::rfc2822::to_string(&at.to_zoned(TimeZone::UTC)).unwrap_or_default();
            let (title, bytes) = (self.title(number), self.feed.episodes[number].bytes);
            let seed = self.content_seed(number, world);
            format!(
                "<item><title>{title}</title><guid>{title}</guid><pubDate>{date}</pubDate>\
                 <enclosure url=\"{origin}/bytes/{bytes}?seed={seed}\" length=\"{bytes}\" type=\"audio/mpeg\"/></item>"
            )
        };
        let items: String = self.published.iter().enumerate().map(item).collect();
        let document = format!(
            "<?xml version=\"1.0\"?><rss version=\"2.0\"><channel><title>{}</title>{items}</channel></rss>",
            self.feed.id
        );
        if let Some(web) = world.web() {
            web.feeds().set(&self.feed.id, document);
        }
    }

    /// Episodes that are to be played by now and were not.
    fn to_play(&self, now: Time) -> impl Iterator<Item = usize> {
        let numbered = self.feed.episodes.iter().enumerate();
        numbered
            .filter(move |(_, episode)| episode.play_s.is_some_and(|at| at <= now.as_secs_f64()))
            .map(|(number, _)| number)
            .filter(|number| !self.heard.contains_key(number))
    }

    /// Whether everything is published and played.
    fn is_over(&self) -> bool {
        let played = self
            .feed
            .episodes
            .iter()
            .filter(|e| e.play_s.is_some())
            .count();
        self.published.len() == self.feed.episodes.len() && self.heard.len() == played
    }

    fn reports(
        &self,
        log: &[TransferLogEntry],
        deadlines: &BTreeMap<String, Timestamp>,
        seconds: &dyn Fn(Timestamp) -> f64,
    ) -> Vec<EpisodeReport> {
        let numbered = self.feed.episodes.iter().enumerate();
        let reported = numbered.map(|(number, episode)| {
            let title = self.title(number);
            let entries = log.iter().filter(|entry| {
                let labels = entry.labels.as_ref();
                labels.is_some_and(|labels| labels.title == title)
            });
            let mut report = EpisodeReport {
                feed: self.feed.id.clone(),
                number,
                bytes: episode.bytes,
                published_s: episode.t_s,
                deadline_s: deadlines.get(&title).copied().map(seconds),
                heard_whole: self.heard.get(&number).copied(),
                ..EpisodeReport::default()
            };
            // One that failed has an entry for each attempt.
            for entry in entries {
                report.deadline_s = entry.deadline.map(seconds).or(report.deadline_s);
                if entry.is_whole {
                    report.whole_s = Some(seconds(entry.last_byte_at.unwrap_or(entry.ended_at)));
                    report.in_time = entry.is_in_time().unwrap_or(true);
                }
                for carried in &entry.carried {
                    let class = carried.network.class.clone();
                    *report.bytes_by_class.entry(class).or_default() += carried.bytes;
                }
                report.switches += entry.switches.len() as u64;
                report.restart_bytes = report.restart_bytes.max(entry.restart_bytes());
            }
            report
        });
        reported.collect()
    }
}

/// Sets the home of a command of the device, with its settings and its agent.
fn at_home(command: &mut Command, home: &Path, zone: Option<&str>) {
    command
        .env("HOME", home)
        .env("XDG_CONFIG_HOME", home.join("config"))
        .env("XDG_STATE_HOME", home.join("state"))
        .env("XDG_CACHE_HOME", home.join("cache"))
        .env("XDG_RUNTIME_DIR", home)
        .env("CEDOS_CONFIG", home.join("config.toml"))
        .env("CEDOS_AGENT", home.join("agent.sock"))
        .env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")
        .env("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nonexistent");
    command.envs(zone.map(|zone| ("TZ", zone)));
}

/// The zone, as POSIX writes it in `TZ`, in which it is so many seconds after midnight at this moment.
fn zone(clock_s: u32, now: Timestamp) -> String {
    const DAY: i64 = 86_400;
    let utc_s = now.as_second().rem_euclid(DAY);
    let mut ahead = (i64::from(clock_s) - utc_s).rem_euclid(DAY);
    if ahead > DAY / 2 {
        ahead -= DAY;
    }
    // POSIX counts west of Greenwich.
    let (sign, s) = if ahead > 0 {
        ("-", ahead)
    } else {
        ("", -ahead)
    };
    format!("LAB{sign}{:02}:{:02}:{:02}", s / 3_600, s / 60 % 60, s % 60)
}

fn duration(span: Span) -> SignedDuration {
    SignedDuration::from_secs_f64(span.as_secs_f64())
}

/// Waits for a child at most this long. Returns whether it ended by itself and successfully.
fn ended_well(child: &mut Child, limit: Duration) -> anyhow::Result<bool> {
    let mut left = limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if left.is_zero() {
            end(child);
            return Ok(false);
        }
        std::thread::sleep(LOOK);
        left = left.saturating_sub(LOOK);
    }
}

/// The last JSON object in a file; `null` if there is none.
fn last_object(file: &Path) -> Value {
    let text = fs::read_to_string(file).unwrap_or_default();
    let last = text.lines().next_back().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_default()
}

/// The report of all episodes.
fn report(scenario: &Scenario, podcasts: &Podcasts, episodes: Vec<EpisodeReport>) -> PodcastReport {
    let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    let count =
        |is: &dyn Fn(&EpisodeReport) -> bool| episodes.iter().filter(|e| is(e)).count() as u64;
    let sum = |of: &dyn Fn(&EpisodeReport) -> u64| episodes.iter().map(of).sum::<u64>();
    let free = |e: &EpisodeReport| e.bytes_by_class.get("free").copied().unwrap_or(0);
    let carried = sum(&|e| e.bytes_by_class.values().sum());
    PodcastReport {
        policy: podcasts.policy.word().to_owned(),
        in_time_share: share(count(&|e| e.in_time), episodes.len() as u64),
        heard_whole_share: share(
            count(&|e| e.heard_whole == Some(true)),
            count(&|e| e.heard_whole.is_some()),
        ),
        free_share: share(sum(&free), carried),
        optimum_free_share: optimum_free_share(scenario, &episodes),
        restart_share: share(sum(&|e| e.restart_bytes), sum(&|e| e.bytes)),
        switches: sum(&|e| e.switches),
        study: Value::Null,
        episodes,
    }
}

/// The largest share of the bytes that free links can carry with every deadline met; `None` if they cannot all be met.
fn optimum_free_share(scenario: &Scenario, episodes: &[EpisodeReport]) -> Option<f64> {
    let job = |episode: &EpisodeReport| {
        let deadline_s = episode.deadline_s?;
        Some(ScoreJob {
            arrival: Time::from_secs_f64(episode.published_s),
            bytes: episode.bytes,
            deadline: Span::from_secs_f64((deadline_s - episode.published_s).max(0.0)),
        })
    };
    let jobs: Vec<ScoreJob> = episodes.iter().map(job).collect::<Option<_>>()?;
    let all: u64 = jobs.iter().map(|job| job.bytes).sum();
    let best = optimum::solve(&link_courses(scenario), &jobs)?;
    (all > 0).then(|| 1.0 - best.metered_bytes / all as f64)
}

/// What the scenario's links can carry towards the device, as fluids.
pub fn link_courses(scenario: &Scenario) -> Vec<LinkCourse> {
    let end = Time::from_secs_f64(scenario.duration_s);
    let mut courses: Vec<LinkCourse> = scenario
        .links
        .iter()
        .map(|link| LinkCourse {
            name: link.name.clone(),
            class: match link.class {
                cedos_lab_scenario::Class::Free => LinkClass::Free,
                cedos_lab_scenario::Class::Metered => LinkClass::Metered,
                cedos_lab_scenario::Class::Roaming => LinkClass::Roaming,
            },
            stretches: Vec::new(),
            end,
        })
        .collect();
    for event in scenario.timeline() {
        let condition = &event.condition;
        let up = condition.up && !matches!(event.kind, EventKind::Attaching | EventKind::Down);
        let works = !condition.dead && !condition.stalled;
        let passes = matches!(condition.reach, LinkReach::All | LinkReach::NoUdp);
        let bits = match condition.down.rate {
            Rate::BitsPerSecond(bits) => bits as f64,
            // Not in scenarios with podcasts so far: nothing, rather than a guess.
            Rate::Unlimited | Rate::Opportunities(_) | Rate::Shared(_) => 0.0,
        };
        let rate = if up && works && passes {
            bits / 8.0 * CONTENT_SHARE
        } else {
            0.0
        };
        courses[event.link].stretches.push(CourseSegment {
            at: event.at,
            up,
            rate,
        });
    }
    for course in &mut courses {
        course.stretches.push(CourseSegment {
            at: end,
            up: false,
            rate: 0.0,
        });
    }
    courses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_devices_local_time_is_the_scenarios() {
        for now in [
            "2030-06-01T00:00:05Z",
            "2030-06-01T07:30:00Z",
            "2030-06-01T23:59:59Z",
        ] {
            let now: Timestamp = now.parse().unwrap();
            for clock_s in [0, 7 * 3_600 + 28 * 60 + 20, 86_399] {
                let zone = TimeZone::posix(&zone(clock_s, now)).unwrap();
                let local = now.to_zoned(zone);
                let s =
                    (local.hour() as u32 * 60 + local.minute() as u32) * 60 + local.second() as u32;
                assert_eq!(s, clock_s, "{now}");
            }
        }
    }

    fn scenario() -> Scenario {
        let text = "duration_s = 40\n[[link]]\nname = \"wlan0\"\ndown_mbps = 8\nattach_s = 1\n\
                    [[link.at]]\nt_s = 10\nup = false\n[[link.at]]\nt_s = 20\nup = true\n\
                    [[link.at]]\nt_s = 30\ndead = true\n\
                    [[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 4\n";
        Scenario::parse("test.toml", text, &mut |_| unreachable!()).unwrap()
    }

    #[test]
    fn links_carry_while_they_are_attached_and_alive() {
        let courses = link_courses(&scenario());
        let bytes = |from, to| {
            courses[0].bytes_between(Time::from_secs_f64(from), Time::from_secs_f64(to))
                / (1e6 * CONTENT_SHARE)
        };
        for (from, to, expected) in [
            (0.0, 10.0, 10.0),
            (10.0, 21.0, 0.0),
            (21.0, 30.0, 9.0),
            (30.0, 40.0, 0.0),
        ] {
            assert!(
                (bytes(from, to) - expected).abs() < 1e-6,
                "{from} to {to}: {}",
                bytes(from, to)
            );
        }
        assert_eq!(courses[1].class, LinkClass::Metered);
    }

    fn episode(published_s: f64, deadline_s: f64, bytes: u64) -> EpisodeReport {
        EpisodeReport {
            bytes,
            published_s,
            deadline_s: Some(deadline_s),
            ..EpisodeReport::default()
        }
    }

    #[test]
    fn the_optimum_is_what_free_links_can_carry_in_time() {
        let share = |episodes: &[EpisodeReport]| optimum_free_share(&scenario(), episodes);
        let half = (10e6 * CONTENT_SHARE) as u64;
        // Ten seconds of Wi-Fi before it goes, and none again before the deadline.
        let found = share(&[episode(0.0, 20.0, 15_000_000)]).unwrap();
        assert!((found - half as f64 / 15e6).abs() < 1e-3, "{found}");
        assert!(share(&[episode(0.0, 20.0, 5_000_000)]).unwrap() > 0.9999);
        assert_eq!(share(&[episode(0.0, 20.0, 50_000_000)]), None);
        let endless = EpisodeReport {
            deadline_s: None,
            ..episode(0.0, 20.0, 1)
        };
        assert_eq!(share(&[endless]), None);
    }
}
