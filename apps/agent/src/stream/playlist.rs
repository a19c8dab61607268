//! HLS playlists (RFC 8216) whose links lead here.
//!
//! ```text
//!  #EXT-X-STREAM-INF:BANDWIDTH=640000                #EXT-X-STREAM-INF:BANDWIDTH=640000
//!  low/media.m3u8                              ─▶    /TOKEN/at/https/o.example/low/media.m3u8
//!  #EXT-X-MAP:URI="https://cdn.example/i.mp4"        #EXT-X-MAP:URI="/TOKEN/at/https/cdn.example/i.mp4"
//! ```
//!
//! Line by line, and nothing but links is touched: tags that nobody here knows stay as they are, which
//! a parser and its writer would not promise.

use std::time::Duration;

use url::Url;

/// A media type of playlists (RFC 8216 §4).
pub const MEDIA_TYPE: &str = "application/vnd.apple.mpegurl";

/// The largest playlist.
pub const BYTES_MAX: usize = 8 << 20; // a guess: a day of segments of 2 s

/// The kind of a playlist's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaylistLinkKind {
    /// The address of another playlist.
    Playlist,
    /// A media segment, in playing order.
    Segment,
    /// The address of another resource, such as a key.
    Other,
}

/// A media segment of a playlist.
#[derive(Debug, Clone, PartialEq)]
pub struct MediaSegment {
    /// The URL of the segment.
    pub url: Url,
    /// The playing time of the segment, if it has one.
    pub duration: Option<Duration>,
}

/// A parsed playlist.
#[derive(Debug, Clone, PartialEq)]
pub struct HlsPlaylist {
    /// The playlist as it is sent to players.
    pub text: String,
    /// All links of the playlist.
    pub links: Vec<(Url, PlaylistLinkKind)>,
    /// The media segments, each URL once.
    pub segments: Vec<MediaSegment>,
    /// Whether the playlist is complete, so that no segments will be added.
    pub is_complete: bool,
}

/// Whether a URL names a playlist, by its extension.
pub fn is_playlist_url(url: &Url) -> bool {
    let path = url.path().to_ascii_lowercase();
    path.ends_with(".m3u8") || path.ends_with(".m3u")
}

/// Parses a playlist from `base`; `link` turns an origin's URL into one of this server.
pub fn read(text: &str, base: &Url, link: impl Fn(&Url) -> String) -> Option<HlsPlaylist> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    // RFC 8216 §4.3.1.1: it must be the first line.
    if !text.starts_with("#EXTM3U") {
        return None;
    }
    let mut playlist = HlsPlaylist {
        text: String::with_capacity(text.len() * 2),
        links: Vec::new(),
        segments: Vec::new(),
        is_complete: false,
    };
    let mut plays = None;
    let mut next_is_playlist = false;
    for line in text.lines() {
        let line = line.trim_end();
        if line.is_empty() {
            continue;
        }
        if !line.starts_with('#') {
            let kind = match next_is_playlist {
                true => PlaylistLinkKind::Playlist,
                false => PlaylistLinkKind::Segment,
            };
            let text_of = playlist.lead(line, base, &link, kind, plays.take());
            playlist.text += &text_of;
            next_is_playlist = false;
        } else {
            let (tag, value) = line.split_once(':').unwrap_or((line, ""));
            match tag {
                "#EXTINF" => {
                    let seconds = value.split(',').next().unwrap_or_default();
                    let seconds = seconds.trim().parse::<f64>().ok();
                    plays = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
                }
                "#EXT-X-STREAM-INF" => next_is_playlist = true,
                "#EXT-X-ENDLIST" => playlist.is_complete = true,
                _ => {}
            }
            let kind = match tag {
                "#EXT-X-MEDIA" | "#EXT-X-I-FRAME-STREAM-INF" | "#EXT-X-RENDITION-REPORT" => {
                    PlaylistLinkKind::Playlist
                }
                "#EXT-X-MAP" => PlaylistLinkKind::Segment,
                _ => PlaylistLinkKind::Other,
            };
            match uri_of(line) {
                Some((from, to)) => {
                    let text_of = playlist.lead(&line[from..to], base, &link, kind, None);
                    playlist.text += &line[..from];
                    playlist.text += &text_of;
                    playlist.text += &line[to..];
                }
                None => playlist.text += line,
            }
        }
        playlist.text.push('\n');
    }
    Some(playlist)
}

impl HlsPlaylist {
    /// Adds a link of the playlist. Returns the URL for players.
    fn lead(
        &mut self,
        text_of: &str,
        base: &Url,
        link: &impl Fn(&Url) -> String,
        kind: PlaylistLinkKind,
        plays: Option<Duration>,
    ) -> String {
        let url = base.join(text_of.trim()).ok();
        let Some(url) = url.filter(|url| matches!(url.scheme(), "http" | "https")) else {
            // Data in the playlist itself, or nothing that could be fetched.
            return text_of.to_owned();
        };
        let here = link(&url);
        if kind == PlaylistLinkKind::Segment && !self.segments.iter().rev().any(|s| s.url == url) {
            let url = url.clone();
            self.segments.push(MediaSegment {
                url,
                duration: plays,
            });
        }
        self.links.push((url, kind));
        here
    }
}

/// The position of the value of the attribute `URI`.
fn uri_of(line: &str) -> Option<(usize, usize)> {
    let mut from = 0;
    loop {
        let at = from + line[from..].find("URI=\"")?;
        let starts = at + "URI=\"".len();
        let ends = starts + line[starts..].find('"')?;
        // An attribute of another name may end in the same letters.
        if at == 0 || line[..at].ends_with([',', ':', ' ']) {
            return Some((starts, ends));
        }
        from = ends;
    }
}

/// The path that stands for an origin's URL, after a token.
pub fn path_of(url: &Url) -> String {
    let host = &url[url::Position::BeforeHost..url::Position::AfterPort];
    let rest = &url[url::Position::BeforePath..url::Position::AfterQuery];
    format!("at/{}/{host}{rest}", url.scheme())
}

/// The URL that such a path stands for.
pub fn url_of(path: &str) -> Option<Url> {
    let (scheme, rest) = path.strip_prefix("at/")?.split_once('/')?;
    if !matches!(scheme, "http" | "https") {
        return None;
    }
    format!("{scheme}://{rest}").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Url {
        "https://o.example/film/main.m3u8".parse().unwrap()
    }

    fn link(url: &Url) -> String {
        format!("/T/{}", path_of(url))
    }

    #[test]
    fn a_master_playlists_variants_and_renditions_lead_here() {
        let text = "#EXTM3U\n#EXT-X-MEDIA:TYPE=AUDIO,GROUP-ID=\"a\",URI=\"audio.m3u8\"\n\
                    #EXT-X-NEW:X-URI=\"untouched\"\n\
                    #EXT-X-STREAM-INF:BANDWIDTH=640000\nlow/media.m3u8?a=b\n\
                    #EXT-X-STREAM-INF:BANDWIDTH=1\nhttps://cdn.example:8443/hi.m3u8\n";
        let playlist = read(text, &base(), link).unwrap();
        assert!(
            playlist
                .links
                .iter()
                .all(|(_, kind)| *kind == PlaylistLinkKind::Playlist)
        );
        assert!(playlist.segments.is_empty() && !playlist.is_complete);
        let expected = "#EXTM3U\n\
            #EXT-X-MEDIA:TYPE=AUDIO,GROUP-ID=\"a\",URI=\"/T/at/https/o.example/film/audio.m3u8\"\n\
            #EXT-X-NEW:X-URI=\"untouched\"\n\
            #EXT-X-STREAM-INF:BANDWIDTH=640000\n/T/at/https/o.example/film/low/media.m3u8?a=b\n\
            #EXT-X-STREAM-INF:BANDWIDTH=1\n/T/at/https/cdn.example:8443/hi.m3u8\n";
        assert_eq!(playlist.text, expected);
    }

    #[test]
    fn a_media_playlists_segments_are_in_order_and_known_by_their_length() {
        let text = "#EXTM3U\r\n#EXT-X-MAP:URI=\"init.mp4\"\r\n#EXT-X-KEY:METHOD=AES-128,URI=\"k\"\r\n\
                    #EXTINF:4.5,\r\n1.m4s\r\n#EXTINF:2,x\r\n/2.m4s\r\n#EXT-X-ENDLIST\r\n";
        let playlist = read(text, &base(), link).unwrap();
        let names: Vec<&str> = playlist.segments.iter().map(|s| s.url.path()).collect();
        assert_eq!(names, ["/film/init.mp4", "/film/1.m4s", "/2.m4s"]);
        let plays: Vec<_> = playlist.segments.iter().map(|s| s.duration).collect();
        let s = |seconds| Some(Duration::from_secs_f64(seconds));
        assert_eq!(plays, [None, s(4.5), s(2.0)]);
        assert!(playlist.is_complete);
        assert!(
            playlist
                .links
                .contains(&(base().join("k").unwrap(), PlaylistLinkKind::Other))
        );
    }

    #[test]
    fn what_is_no_playlist_is_not_taken_for_one_and_data_stays() {
        assert_eq!(read("<html>", &base(), link), None);
        let text =
            "#EXTM3U\n#EXT-X-KEY:URI=\"data:text/plain;base64,AA\"\n#EXTINF:-1,\nftp://x/y\n";
        let playlist = read(text, &base(), link).unwrap();
        assert!(playlist.links.is_empty());
        assert_eq!(playlist.text, text);
    }

    #[test]
    fn a_path_stands_for_its_url() {
        for url in [
            "https://o.example/a/b?c=d",
            "http://[2001:db8::1]:81/",
            "http://h/%20",
        ] {
            let url: Url = url.parse().unwrap();
            assert_eq!(url_of(&path_of(&url)), Some(url));
        }
        for path in ["at/file/etc/passwd", "at/https", "film.mp4", "at/https//x"] {
            let url = url_of(path);
            assert!(url.is_none() || path == "at/https//x", "{path}: {url:?}");
        }
    }
}
