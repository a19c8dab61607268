//! Which of an episode's enclosures is downloaded: the feed's own, or one of `podcast:alternateEnclosure`.
//!
//! An alternate is the same episode in another size or form, so position, chapters and transcript are those of the
//! episode. Other apps know an episode by its own enclosure, whichever was downloaded.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use url::Url;

/// The maximum number of alternates that are kept of an episode.
pub const ALTERNATES_MAX: usize = 16; // a guess: feeds have three or four

/// Media types of alternates that the page can play; a feed may also list torrents and playlists.
const PLAYED: [&str; 12] = [
    "audio/aac",
    "audio/flac",
    "audio/mp4",
    "audio/mpeg",
    "audio/ogg",
    "audio/opus",
    "audio/wav",
    "audio/webm",
    "audio/x-m4a",
    "audio/x-wav",
    "video/mp4",
    "video/webm",
];

/// An enclosure of an episode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpisodeEnclosure {
    /// The address of the file.
    pub url: Url,
    /// Media type as the feed says it.
    pub media_type: Option<String>,
    /// Bytes as the feed says it.
    pub bytes: Option<u64>,
    /// What the feed calls it; empty if nothing.
    #[serde(default)]
    pub title: String,
}

/// Which enclosure of an episode is downloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnclosureChoice {
    /// The feed's own.
    #[default]
    Original,
    /// The feed's own if it is audio, else the first alternate that is.
    Audio,
    /// The smallest audio of which the feed says the size; a video only if there is no audio.
    Smallest,
}

impl EnclosureChoice {
    /// All choices.
    pub const ALL: [EnclosureChoice; 3] = [
        EnclosureChoice::Original,
        EnclosureChoice::Audio,
        EnclosureChoice::Smallest,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            EnclosureChoice::Original => "original",
            EnclosureChoice::Audio => "audio",
            EnclosureChoice::Smallest => "smallest",
        }
    }

    /// The enclosure to download: one of the alternates, or none for the feed's own.
    pub fn choose<'a>(
        self,
        own: &EpisodeEnclosure,
        alternates: &'a [EpisodeEnclosure],
    ) -> Option<&'a EpisodeEnclosure> {
        let mut played = alternates.iter().filter(|alternate| alternate.is_played());
        match self {
            EnclosureChoice::Original => None,
            EnclosureChoice::Audio if own.is_video() => played.find(|found| !found.is_video()),
            EnclosureChoice::Audio => None,
            EnclosureChoice::Smallest => {
                let size = |enclosure: &EpisodeEnclosure| {
                    let bytes = enclosure.bytes.filter(|bytes| *bytes > 0);
                    (enclosure.is_video(), bytes.unwrap_or(u64::MAX))
                };
                let smallest = played.min_by_key(|alternate| size(alternate))?;
                (size(smallest) < size(own)).then_some(smallest)
            }
        }
    }
}

impl EpisodeEnclosure {
    fn kind(&self) -> String {
        let media_type = self.media_type.as_deref().unwrap_or_default();
        let kind = media_type.split(';').next().unwrap_or_default();
        kind.trim().to_ascii_lowercase()
    }

    fn is_played(&self) -> bool {
        PLAYED.contains(&self.kind().as_str())
    }

    fn is_video(&self) -> bool {
        self.kind().starts_with("video/")
    }
}

impl fmt::Display for EnclosureChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for EnclosureChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<EnclosureChoice, String> {
        let known = EnclosureChoice::ALL.into_iter();
        let found = known.into_iter().find(|choice| choice.as_str() == text);
        found.ok_or_else(|| {
            format!("`{text}` is no choice of files: write original, audio or smallest")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enclosure(name: &str, media_type: &str, bytes: u64) -> EpisodeEnclosure {
        EpisodeEnclosure {
            url: format!("https://a.example/{name}")
                .parse()
                .expect("an address"),
            media_type: Some(media_type.to_owned()),
            bytes: Some(bytes),
            title: name.to_owned(),
        }
    }

    fn chosen(
        choice: EnclosureChoice,
        own: &EpisodeEnclosure,
        alternates: &[EpisodeEnclosure],
    ) -> String {
        let found = choice.choose(own, alternates);
        found.map_or_else(|| "own".to_owned(), |found| found.title.clone())
    }

    #[test]
    fn a_rule_chooses_among_the_files_that_can_be_played() {
        use EnclosureChoice::{Audio, Original, Smallest};
        let own = enclosure("mp3", "audio/mpeg", 1_000);
        let alternates = [
            enclosure("torrent", "application/x-bittorrent", 1),
            enclosure("flac", "audio/flac", 9_000),
            enclosure("opus", "audio/opus; codecs=opus", 300),
            enclosure("unknown", "audio/aac", 0),
            enclosure("film", "video/mp4", 200),
        ];
        assert_eq!(chosen(Original, &own, &alternates), "own");
        assert_eq!(chosen(Audio, &own, &alternates), "own");
        assert_eq!(chosen(Smallest, &own, &alternates), "opus");
        assert_eq!(chosen(Smallest, &own, &alternates[..2]), "own");
        let film = enclosure("film", "video/mp4", 100);
        assert_eq!(chosen(Original, &film, &alternates), "own");
        assert_eq!(chosen(Audio, &film, &alternates), "flac");
        assert_eq!(chosen(Smallest, &film, &alternates), "opus");
        assert_eq!(chosen(Audio, &film, &alternates[..1]), "own");
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        for choice in EnclosureChoice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        "best".parse::<EnclosureChoice>().expect_err("none");
    }
}
