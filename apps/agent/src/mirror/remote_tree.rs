//! What a listing of a folder names: the JSON of `cedos serve`, the JSON and the HTML of nginx's autoindex, and the HTML
//! of other servers.

use std::cell::RefCell;

use html5ever::tendril::StrTendril;
use html5ever::tokenizer::{
    BufferQueue, TagKind, Token, TokenSink, TokenSinkResult, Tokenizer, TokenizerOpts,
};
use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use url::Url;

/// The most bytes of a listing.
pub const LISTING_BYTES_MAX: u64 = 64 << 20; // a guess: half a million names

/// A file or a folder that a listing names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteEntry {
    /// The name in its folder, decoded.
    pub name: String,
    /// Whether the entry is a folder.
    pub is_folder: bool,
    /// The length, if the listing tells it for certain.
    pub bytes: Option<u64>,
    /// When the entry was changed, to the second, if the listing tells it for certain.
    pub modified: Option<Timestamp>,
}

/// What a listing names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RemoteListing {
    /// The files and folders.
    pub entries: Vec<RemoteEntry>,
    /// Whether the server left nothing out.
    pub is_complete: bool,
    /// Whether the listing was a page for people: a sign-in page, or an `index.html`, looks like a
    /// folder with other files.
    pub is_page: bool,
}

impl RemoteListing {
    /// Reads the listing of the folder at `url`, which ends with a slash.
    ///
    /// # Errors
    /// It is none; in words.
    pub fn parse(bytes: &[u8], url: &Url) -> Result<RemoteListing, String> {
        let text = String::from_utf8_lossy(bytes);
        match text.trim_start().chars().next() {
            Some('{') => parse_own(&text),
            Some('[') => parse_nginx(&text),
            Some('<') => Ok(parse_page(&text, url)),
            _ => Err("the server sends no listing of the folder".to_owned()),
        }
    }
}

/// The listing of `cedos serve`.
#[derive(Deserialize)]
struct OwnListing {
    entries: Vec<OwnEntry>,
    complete: bool,
}

#[derive(Deserialize)]
struct OwnEntry {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    bytes: Option<u64>,
    modified: Option<Timestamp>,
}

/// An entry of `autoindex_format json` of nginx.
#[derive(Deserialize)]
struct NginxEntry {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    size: Option<u64>,
    mtime: Option<String>,
}

fn parse_own(text: &str) -> Result<RemoteListing, String> {
    let refuse = |error| format!("the server sends JSON that is no listing: {error}");
    let listing: OwnListing = serde_json::from_str(text).map_err(refuse)?;
    let entry = |entry: OwnEntry| RemoteEntry {
        is_folder: entry.kind == "directory",
        name: entry.name,
        bytes: entry.bytes,
        modified: entry.modified,
    };
    Ok(RemoteListing {
        entries: listing.entries.into_iter().map(entry).collect(),
        is_complete: listing.complete,
        is_page: false,
    })
}

fn parse_nginx(text: &str) -> Result<RemoteListing, String> {
    let refuse = |error| format!("the server sends JSON that is no listing: {error}");
    let entries: Vec<NginxEntry> = serde_json::from_str(text).map_err(refuse)?;
    let entries = entries
        .into_iter()
        .filter(|entry| matches!(&*entry.kind, "file" | "directory"));
    let entry = |entry: NginxEntry| RemoteEntry {
        is_folder: entry.kind == "directory",
        name: entry.name,
        bytes: entry.size,
        modified: entry.mtime.and_then(|date| {
            let date = httpdate::parse_http_date(&date).ok()?;
            Timestamp::try_from(date).ok()
        }),
    };
    Ok(RemoteListing {
        entries: entries.map(entry).collect(),
        is_complete: true,
        is_page: false,
    })
}

/// The links of a page that lead to what is in the folder itself. Lengths and times on a page are for people, and are not
/// used.
fn parse_page(text: &str, url: &Url) -> RemoteListing {
    let links = FolderLinks {
        base: url,
        entries: RefCell::default(),
    };
    let tokenizer = Tokenizer::new(links, TokenizerOpts::default());
    let input = BufferQueue::default();
    input.push_back(StrTendril::from(text));
    let _ = tokenizer.feed(&input);
    tokenizer.end();
    RemoteListing {
        entries: tokenizer.sink.entries.into_inner(),
        is_complete: true,
        is_page: true,
    }
}

struct FolderLinks<'a> {
    base: &'a Url,
    entries: RefCell<Vec<RemoteEntry>>,
}

impl FolderLinks<'_> {
    fn entry(&self, href: &str) -> Option<RemoteEntry> {
        let url = self.base.join(href.trim()).ok()?;
        // Links with a query sort the list anew.
        let is_plain = url.query().is_none() && url.fragment().is_none();
        let is_here = (url.scheme(), url.host_str(), url.port())
            == (self.base.scheme(), self.base.host_str(), self.base.port());
        let below = url.path().strip_prefix(self.base.path());
        let below = below.filter(|below| is_plain && is_here && !below.is_empty())?;
        let name = below.strip_suffix('/').unwrap_or(below);
        if name.contains('/') {
            return None;
        }
        Some(RemoteEntry {
            name: percent_decode_str(name).decode_utf8().ok()?.into_owned(),
            is_folder: below.ends_with('/'),
            bytes: None,
            modified: None,
        })
    }
}

impl TokenSink for FolderLinks<'_> {
    type Handle = ();

    fn process_token(&self, token: Token, _line: u64) -> TokenSinkResult<()> {
        if let Token::TagToken(tag) = token
            && tag.kind == TagKind::StartTag
            && &*tag.name == "a"
            && let Some(href) = tag.attrs.iter().find(|a| &*a.name.local == "href")
            && let Some(entry) = self.entry(&href.value)
        {
            self.entries.borrow_mut().push(entry);
        }
        TokenSinkResult::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RemoteListing, String> {
        let url = "http://h:8080/pub/".parse().expect("a URL");
        RemoteListing::parse(text.as_bytes(), &url)
    }

    fn named(listing: &RemoteListing) -> Vec<(&str, bool)> {
        let entries = listing.entries.iter();
        entries
            .map(|entry| (&*entry.name, entry.is_folder))
            .collect()
    }

    #[test]
    fn listings_of_cedos_and_nginx_tell_lengths_and_times() {
        let own = r#"{"path":"/","entries":[
            {"name":"a","type":"file","bytes":3,"modified":"2030-01-01T00:00:00Z"},
            {"name":"d","type":"directory","bytes":null,"modified":null}],"complete":false}"#;
        let own = parse(own).expect("a listing");
        assert_eq!(named(&own), [("a", false), ("d", true)]);
        assert!(!own.is_complete);
        let nginx = r#"[{"name":"d","type":"directory","mtime":"Tue, 01 Jan 2030 00:00:00 GMT"},
            {"name":"a","type":"file","mtime":"Tue, 01 Jan 2030 00:00:00 GMT","size":3},
            {"name":"p","type":"other","mtime":"Tue, 01 Jan 2030 00:00:00 GMT"}]"#;
        let nginx = parse(nginx).expect("a listing");
        assert_eq!(named(&nginx), [("d", true), ("a", false)]);
        assert_eq!(nginx.entries[1], own.entries[0]);
    }

    #[test]
    fn a_page_names_what_its_links_lead_to_in_the_folder_and_nothing_else() {
        let page = r#"<html><head><title>Index of /pub/</title></head><body><h1>Index of /pub/</h1><hr><pre>
            <a href="../">../</a> <a href="?C=N;O=D">Name</a> <a href="/">top</a> <a href="./">here</a>
            <a href="a%20b%3F.txt">a b?.txt</a>   27-Nov-2026 10:00   3
            <a href='/pub/d/'>d/</a> <a href="http://h:8080/pub/c&amp;d">c</a>
            <a href="http://other/pub/x">x</a> <a href="d/deeper">y</a> <a href="mailto:me@h">me</a>
            <a name="none">none</a> <a href="..%2fetc">z</a></pre></body></html>"#;
        let listing = parse(page).expect("a page");
        // A name that leads elsewhere is refused where paths are made.
        let names = [
            ("a b?.txt", false),
            ("d", true),
            ("c&d", false),
            ("../etc", false),
        ];
        assert_eq!(named(&listing), names);
    }

    #[test]
    fn what_is_no_listing_is_refused() {
        for bad in ["", "hello", "{}", "[1]", "{\"entries\":3}"] {
            parse(bad).expect_err(bad);
        }
    }
}
