//! The name to save under, when the user gave none: never a path, never hidden, never an option.

use std::path::{Path, PathBuf};

use cedos_text::is_control;
use http::HeaderMap;
use http::header::CONTENT_DISPOSITION;
use url::Url;

/// The longest name taken from an origin, in bytes (most file systems allow 255; `.part.json` is ours).
const NAME_BYTES_MAX: usize = 200;

/// The longest name from a title, in bytes: a date, a number and an ending come in addition.
const TITLE_BYTES_MAX: usize = 150;

/// The last segment of the URL's path, or `download`.
pub fn from_url(url: &Url) -> String {
    let segment = url
        .path_segments()
        .and_then(|mut s| s.rfind(|part| !part.is_empty()));
    segment
        .map(percent_decoded)
        .and_then(|name| harmless(&name))
        .unwrap_or_else(|| "download".into())
}

/// The name of a file or folder for a title from elsewhere: never a path, never hidden; `untitled` if nothing is left.
pub fn from_title(title: &str) -> String {
    let plain: String = title
        .chars()
        .map(|c| match c {
            '/' | '\\' | ':' => '-',
            c => c,
        })
        .collect();
    let name = harmless(&plain).unwrap_or_else(|| "untitled".into());
    let mut end = name.len().min(TITLE_BYTES_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].trim_end().to_owned()
}

/// Another name for a file whose own is taken: `film (1).mp4`. None if its own is free.
pub fn free_path(named: &Path, is_taken: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    if !is_taken(named) {
        return None;
    }
    let stem = named.file_stem().unwrap_or_default().to_string_lossy();
    let ending = named.extension();
    let ending = ending.map(|ending| format!(".{}", ending.to_string_lossy()));
    let ending = ending.unwrap_or_default();
    (1..)
        .map(|count: u32| named.with_file_name(format!("{stem} ({count}){ending}")))
        .find(|path| !is_taken(path))
}

/// The file name in `Content-Disposition` (RFC 6266), if it is usable.
pub fn from_headers(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(CONTENT_DISPOSITION)?.to_str().ok()?;
    let mut plain = None;
    for parameter in split_unquoted(text).skip(1) {
        let Some((key, value)) = parameter.split_once('=') else {
            continue;
        };
        let value = value.trim();
        match key.trim().to_ascii_lowercase().as_str() {
            // RFC 8187: charset'language'percent-encoded; wins over the plain form.
            "filename*" => {
                if let Some(encoded) = value.splitn(3, '\'').nth(2)
                    && value.to_ascii_lowercase().starts_with("utf-8'")
                {
                    return harmless(&percent_decoded(encoded));
                }
            }
            "filename" => plain = Some(unquoted(value)),
            _ => {}
        }
    }
    harmless(&plain?)
}

/// The parts between semicolons outside of quotes.
fn split_unquoted(text: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    let mut escaped = false;
    text.split(move |c| {
        let here = quoted;
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ => {}
        }
        c == ';' && !here
    })
}

fn unquoted(value: &str) -> String {
    let Some(inner) = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')) else {
        return value.to_owned();
    };
    let mut out = String::new();
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        out.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    out
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hex = (first == b'%')
            .then(|| {
                tail.get(..2)
                    .and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 16).ok())
            })
            .flatten();
        bytes.push(hex.unwrap_or(first));
        rest = if hex.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The last path component, without control characters (bidirectional ones hide an extension), and
/// without leading dots (hidden files) and hyphens (options of whatever command it is given to); none if
/// that leaves nothing.
fn harmless(name: &str) -> Option<String> {
    let last = name.rsplit(['/', '\\']).next().unwrap_or("");
    let clean: String = last.chars().filter(|c| !is_control(*c)).collect();
    let clean = clean
        .trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '.' | '-'))
        .trim_end_matches(|c: char| c.is_whitespace() || c == '.');
    let mut end = clean.len().min(NAME_BYTES_MAX);
    while !clean.is_char_boundary(end) {
        end -= 1;
    }
    let name = clean[..end].trim_end_matches(|c: char| c.is_whitespace() || c == '.');
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(disposition: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(
            CONTENT_DISPOSITION,
            disposition.parse().expect("a header value"),
        );
        from_headers(&headers)
    }

    #[test]
    fn a_title_is_no_path_and_not_hidden() {
        assert_eq!(from_title("News: 24/7"), "News- 24-7");
        assert_eq!(from_title("../../etc/passwd"), "etc-passwd");
        assert_eq!(from_title(".hidden"), "hidden");
        assert_eq!(from_title("\u{202e}3pm"), "3pm");
        assert_eq!(from_title(" ... "), "untitled");
        assert!(from_title(&"ä".repeat(300)).len() <= TITLE_BYTES_MAX);
    }

    #[test]
    fn a_name_that_is_taken_gets_a_number() {
        let taken = ["/d/film.mp4", "/d/film (1).mp4", "/d/README"];
        let free = |name: &str| {
            let path = free_path(Path::new(name), |path| {
                taken.iter().any(|taken| Path::new(taken) == path)
            });
            path.map(|path| path.display().to_string())
        };
        assert_eq!(free("/d/other"), None);
        assert_eq!(free("/d/film.mp4").as_deref(), Some("/d/film (2).mp4"));
        assert_eq!(free("/d/README").as_deref(), Some("/d/README (1)"));
    }

    #[test]
    fn a_url_gives_its_last_segment() {
        let of = |text: &str| from_url(&text.parse().expect("a URL"));
        assert_eq!(of("http://host/a/episode%20118.mp3?x=1"), "episode 118.mp3");
        assert_eq!(of("http://host/a/"), "a");
        assert_eq!(of("http://host/"), "download");
        assert_eq!(of("http://host/%2e%2e%2f%2e%2e%2fetc%2fpasswd"), "passwd");
    }

    #[test]
    fn an_origin_may_name_a_file_but_not_a_path() {
        assert_eq!(
            named("attachment; filename=\"a; b.mp3\"").as_deref(),
            Some("a; b.mp3")
        );
        assert_eq!(
            named("attachment; filename=../../.bashrc").as_deref(),
            Some("bashrc")
        );
        assert_eq!(named("attachment; filename=\"..\""), None);
        assert_eq!(
            named("attachment; filename=\"C:\\\\x\\\\y.txt\"").as_deref(),
            Some("y.txt")
        );
        assert_eq!(
            named("attachment; filename=x; filename*=UTF-8''na%C3%AFve.txt").as_deref(),
            Some("naïve.txt")
        );
        assert_eq!(named("inline"), None);
    }

    #[test]
    fn no_name_is_an_option_or_shows_itself_as_another() {
        assert_eq!(
            named("attachment; filename=-rf").as_deref(),
            Some("rf"),
            "an option"
        );
        assert_eq!(
            named("attachment; filename*=UTF-8''%E2%80%AE3pm.exe").as_deref(),
            Some("3pm.exe"),
            "a bidirectional control"
        );
        assert_eq!(named("attachment; filename*=UTF-8''.-.%1B%07-."), None);
        // The first plane has all controls but the tags.
        for c in ('\0'..='\u{ffff}').chain('\u{e0000}'..='\u{e007f}') {
            for name in [
                format!("{c}"),
                format!("{c}a"),
                format!("a{c}"),
                format!("-.{c}."),
            ] {
                if let Some(name) = harmless(&name) {
                    assert!(!name.contains(is_control) && !name.contains('/'), "{c:?}");
                    assert!(!name.starts_with(['-', '.', ' ']), "{c:?}: {name}");
                    assert!(!name.is_empty() && name.trim() == name, "{c:?}: {name}");
                }
            }
        }
    }
}
