//! Podcasts of a scenario's device: what feeds bring when, by which rules it is fetched, and when a person hears it.

use crate::bounds::seconds;
use crate::file::Policy;
use serde::Deserialize;

/// The most feeds of a scenario.
pub const PODCAST_FEEDS_MAX: usize = 100;
/// The most episodes of a feed.
pub const PODCAST_EPISODES_MAX: usize = 1_000;
/// The largest episode in bytes.
pub const PODCAST_EPISODE_BYTES_MAX: u64 = 1 << 40;

/// The podcasts of the device. Lab only; the simulator has them in the row `readycast-week`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Podcasts {
    /// The links that downloads may use.
    #[serde(default)]
    pub policy: Policy,
    /// Local time of the device as the run begins, `07:28` or `07:28:30`; that of this machine if absent.
    pub clock: Option<String>,
    /// The feeds that the device is subscribed to.
    #[serde(rename = "feed")]
    pub feeds: Vec<PodcastFeed>,
}

/// A feed, which the lab's origin serves.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodcastFeed {
    /// The name of the feed, which is its title and in its address.
    pub id: String,
    /// When its episodes are wanted, as `cedos cast rule` takes it.
    pub rule: String,
    /// How many of the newest episodes are kept.
    #[serde(default = "keep_default")]
    pub keep: u32,
    /// The episodes that the feed brings.
    #[serde(default, rename = "episode")]
    pub episodes: Vec<PodcastEpisode>,
}

/// An episode of a feed.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodcastEpisode {
    /// When the episode is published.
    pub t_s: f64,
    /// The episode's size; the origin makes the content from a seed.
    pub bytes: u64,
    /// When a person plays it; never if absent.
    pub play_s: Option<f64>,
}

fn keep_default() -> u32 {
    20
}

impl Podcasts {
    /// Seconds after midnight of the device's local time as the run begins; `None` if the file does not say it.
    pub fn clock_s(&self) -> Option<u32> {
        time_of_day(self.clock.as_deref()?)
    }

    pub(crate) fn check(&self, duration_s: f64) -> Result<(), String> {
        if let Some(clock) = self
            .clock
            .as_deref()
            .filter(|clock| time_of_day(clock).is_none())
        {
            return Err(format!("clock is {clock}, expected HH:MM or HH:MM:SS"));
        }
        if self.feeds.is_empty() || self.feeds.len() > PODCAST_FEEDS_MAX {
            return Err(format!(
                "{} feeds, expected 1 to {PODCAST_FEEDS_MAX}",
                self.feeds.len()
            ));
        }
        for (number, feed) in self.feeds.iter().enumerate() {
            let is_same = |other: &PodcastFeed| other.id == feed.id;
            if self.feeds[..number].iter().any(is_same) {
                return Err(format!("two feeds have the id {}", feed.id));
            }
            feed.check(duration_s)
                .map_err(|fault| format!("feed {}: {fault}", feed.id))?;
        }
        Ok(())
    }
}

impl PodcastFeed {
    fn check(&self, duration_s: f64) -> Result<(), String> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if self.id.is_empty() || !self.id.chars().all(is_plain) {
            return Err("id has other characters than letters, digits and `-`, or none".to_owned());
        }
        if self.episodes.len() > PODCAST_EPISODES_MAX {
            return Err(format!(
                "{} episodes, at most {PODCAST_EPISODES_MAX}",
                self.episodes.len()
            ));
        }
        for episode in &self.episodes {
            seconds("t_s", episode.t_s, duration_s)?;
            if !(1..=PODCAST_EPISODE_BYTES_MAX).contains(&episode.bytes) {
                return Err(format!(
                    "bytes is {}, expected 1 to {PODCAST_EPISODE_BYTES_MAX}",
                    episode.bytes
                ));
            }
            let Some(play_s) = episode.play_s else {
                continue;
            };
            seconds("play_s", play_s, duration_s)?;
            if play_s <= episode.t_s {
                return Err(format!(
                    "play_s is {play_s}, which is not after t_s, {}",
                    episode.t_s
                ));
            }
        }
        Ok(())
    }
}

/// Seconds after midnight of `HH:MM` or `HH:MM:SS`.
fn time_of_day(text: &str) -> Option<u32> {
    let parts: Vec<u32> = text
        .split(':')
        .map(|part| part.parse().ok())
        .collect::<Option<_>>()?;
    let (hours, minutes, seconds) = match parts[..] {
        [hours, minutes] => (hours, minutes, 0),
        [hours, minutes, seconds] => (hours, minutes, seconds),
        _ => return None,
    };
    let is_time = hours < 24 && minutes < 60 && seconds < 60;
    is_time.then_some(hours * 3_600 + minutes * 60 + seconds)
}

#[cfg(test)]
mod tests {
    use crate::{Scenario, ScenarioFault};

    fn parse(podcasts: &str) -> Result<Scenario, String> {
        let text = format!("duration_s = 10\n[[link]]\nname = \"wlan0\"\n[podcasts]\n{podcasts}\n");
        let mut none = |_: &str| -> Result<String, ScenarioFault> { unreachable!("no traces") };
        Scenario::parse("test.toml", &text, &mut none).map_err(|fault| fault.to_string())
    }

    const FEED: &str = "[[podcasts.feed]]\nid = \"news\"\nrule = \"in 65s\"";

    #[test]
    fn podcasts_have_feeds_with_episodes() {
        let text = format!(
            "clock = \"07:28:30\"\n{FEED}\n[[podcasts.feed.episode]]\nt_s = 1\nbytes = 5\nplay_s = 9"
        );
        let podcasts = parse(&text).unwrap().podcasts.unwrap();
        assert_eq!(podcasts.clock_s(), Some(7 * 3_600 + 28 * 60 + 30));
        assert_eq!(podcasts.feeds[0].episodes[0].play_s, Some(9.0));
        assert!(parse("").is_err());
    }

    #[test]
    fn podcasts_that_make_no_sense_are_refused_in_words() {
        let episode = |keys: &str| format!("{FEED}\n[[podcasts.feed.episode]]\n{keys}");
        for (text, says) in [
            (format!("clock = \"24:00\"\n{FEED}"), "clock is 24:00"),
            (format!("{FEED}\n{FEED}"), "two feeds have the id news"),
            (
                FEED.replace("news", "a/b"),
                "feed a/b: id has other characters",
            ),
            (episode("t_s = 11\nbytes = 1"), "t_s is 11"),
            (episode("t_s = 1\nbytes = 0"), "bytes is 0"),
            (episode("t_s = 3\nbytes = 1\nplay_s = 2"), "not after t_s"),
            (episode("t_s = 3\nbyte = 1"), "did you mean `bytes`?"),
        ] {
            let fault = parse(&text).unwrap_err();
            assert!(fault.contains(says), "{text}: {fault}");
        }
    }
}
