//! The addresses under which apps know feeds and episodes, and those at their origins.

use cedos_readycast::{ChannelId, EpisodeId};
use url::Url;

use crate::fetch::filename;

/// The links of one port and token.
pub(in super::super) struct AppAddresses {
    /// Scheme, host, port and token, with a slash at the end.
    base: Url,
    token: String,
}

/// What a link of the agent leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum AppLink {
    /// The feed of this channel.
    Feed(ChannelId),
    /// The audio or video of this episode.
    Episode(EpisodeId),
}

impl AppAddresses {
    /// The links below `http://127.0.0.1:PORT/TOKEN`.
    pub(super) fn new(base: &str, token: &str) -> AppAddresses {
        AppAddresses {
            base: format!("{base}/")
                .parse()
                .expect("it is made of an address and digits"),
            token: token.to_owned(),
        }
    }

    fn join(&self, path: &str) -> Url {
        self.base.join(path).expect("a path of letters and digits")
    }

    /// The link of a channel's feed.
    pub(super) fn feed(&self, channel: ChannelId) -> Url {
        self.join(&format!("feeds/{channel}"))
    }

    /// The link of an episode, under the name that it has at its origin: apps name files by it.
    pub(super) fn episode(&self, episode: EpisodeId, at_origin: &Url) -> Url {
        let mut link = self.join(&format!("episodes/{episode}"));
        if let Ok(mut segments) = link.path_segments_mut() {
            segments.push(&filename::from_url(at_origin));
        }
        link
    }

    /// The link of the list of subscriptions.
    pub(super) fn opml(&self) -> Url {
        self.join("subscriptions.opml")
    }

    /// What an address leads to, if it is a link of this agent. Its port may be an earlier one.
    pub(in super::super) fn read(&self, address: &Url) -> Option<AppLink> {
        let is_here = matches!(address.host_str(), Some("127.0.0.1" | "localhost"));
        let mut segments = address.path_segments()?;
        if !is_here || segments.next()? != self.token {
            return None;
        }
        let kind = segments.next()?;
        let number: i64 = segments.next()?.parse().ok()?;
        match kind {
            "feeds" => Some(AppLink::Feed(ChannelId(number))),
            "episodes" => Some(AppLink::Episode(EpisodeId(number))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_back_to_what_it_was_made_for() {
        let addresses = AppAddresses::new("http://127.0.0.1:4711/secret", "secret");
        let feed = addresses.feed(ChannelId(3));
        assert_eq!(feed.as_str(), "http://127.0.0.1:4711/secret/feeds/3");
        assert_eq!(addresses.read(&feed), Some(AppLink::Feed(ChannelId(3))));
        let origin = "https://a.example/x/caf%C3%A9%20?%2F..mp3#f"
            .parse()
            .expect("an address");
        let episode = addresses.episode(EpisodeId(17), &origin);
        assert!(
            episode
                .as_str()
                .starts_with("http://127.0.0.1:4711/secret/episodes/17/"),
            "{episode}"
        );
        assert_eq!(
            addresses.read(&episode),
            Some(AppLink::Episode(EpisodeId(17)))
        );
        for other in [
            "http://127.0.0.1:4711/other/feeds/3",
            "http://evil.example/secret/feeds/3",
            "http://127.0.0.1:4711/secret/feeds/x",
            "http://127.0.0.1:4711/secret/",
        ] {
            assert_eq!(
                addresses.read(&other.parse().expect("an address")),
                None,
                "{other}"
            );
        }
        let earlier = "http://localhost:1/secret/feeds/3"
            .parse()
            .expect("an address");
        assert_eq!(addresses.read(&earlier), Some(AppLink::Feed(ChannelId(3))));
    }
}
