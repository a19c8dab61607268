//! The listing of a folder by a WebDAV server: its answer to PROPFIND with `Depth: 1` (RFC 4918 §9.1, §13).
//!
//! ```text
//!  <multistatus xmlns="DAV:">
//!    <response> <href>/dav/</href>   the folder itself
//!    <response> <href>/dav/a%20b.jpg</href>
//!      <propstat> <prop> getcontentlength, getlastmodified, resourcetype </prop> <status>HTTP/1.1 200 OK</status>
//! ```
//!
//! Only the path of an address counts, and only what is in the folder itself: behind a proxy servers name hosts that
//! nobody else knows, and some answer with what is deeper.

use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use roxmltree::{Document, Node, ParsingOptions};
use url::Url;

use super::remote_tree::{RemoteEntry, RemoteListing};

/// The namespace of WebDAV's elements.
const DAV: &str = "DAV:";

/// The most nodes of an answer.
const NODES_MAX: u32 = 8_000_000; // a guess: some twenty for each of 400,000 files

/// Reads the answer to PROPFIND of the folder at `url`, which ends with a slash.
///
/// # Errors
/// It is none, or lists no folder; in words.
pub(super) fn parse(bytes: &[u8], url: &Url) -> Result<RemoteListing, String> {
    let text = String::from_utf8_lossy(bytes);
    let options = ParsingOptions {
        nodes_limit: NODES_MAX,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(text.trim_start_matches('\u{feff}'), options)
        .map_err(|error| {
            format!("the server's list of files is no XML that can be read: {error}")
        })?;
    let root = document.root_element();
    if !is(root, "multistatus") {
        return Err("the server sends no list of files".to_owned());
    }
    let base = names_of(url.path()).ok_or("the address of the folder is no UTF-8")?;
    let mut listing = RemoteListing {
        is_complete: true,
        ..RemoteListing::default()
    };
    for response in children(root, "response") {
        let Some(names) = child(response, "href").and_then(|href| names_in(href, url)) else {
            // A name that nobody can read, or none.
            listing.is_complete = false;
            continue;
        };
        let found = child(response, "status").is_none_or(is_ok);
        let prop = children(response, "propstat")
            .filter(|propstat| child(*propstat, "status").is_none_or(is_ok))
            .find_map(|propstat| child(propstat, "prop"));
        let is_folder = prop.and_then(|prop| child(prop, "resourcetype"));
        let is_folder = is_folder.is_some_and(|kind| child(kind, "collection").is_some());
        if names == base {
            if found && prop.is_some() && !is_folder {
                return Err("it is a file there, not a folder".to_owned());
            }
            continue;
        }
        let Some([name]) = names.strip_prefix(&*base) else {
            continue;
        };
        if !found {
            listing.is_complete = false;
            continue;
        }
        let text_of = |name| {
            prop.and_then(|prop| child(prop, name)?.text())
                .map(str::trim)
        };
        listing.entries.push(RemoteEntry {
            name: name.clone(),
            is_folder,
            bytes: text_of("getcontentlength").and_then(|text| text.parse().ok()),
            modified: text_of("getlastmodified").and_then(|date| {
                let date = httpdate::parse_http_date(date).ok()?;
                Timestamp::try_from(date).ok()
            }),
        });
    }
    Ok(listing)
}

fn is(node: Node<'_, '_>, name: &str) -> bool {
    node.tag_name().name() == name && node.tag_name().namespace() == Some(DAV)
}

fn children<'a, 'b>(node: Node<'a, 'b>, name: &'static str) -> impl Iterator<Item = Node<'a, 'b>> {
    node.children().filter(move |child| is(*child, name))
}

fn child<'a, 'b>(node: Node<'a, 'b>, name: &'static str) -> Option<Node<'a, 'b>> {
    children(node, name).next()
}

/// Whether a status line says that what it is of is there.
fn is_ok(status: Node<'_, '_>) -> bool {
    let code = status
        .text()
        .and_then(|text| text.split_whitespace().nth(1));
    code.is_some_and(|code| code.starts_with('2'))
}

/// The names in an address, which may be relative to that of the folder.
fn names_in(href: Node<'_, '_>, folder: &Url) -> Option<Vec<String>> {
    let url = folder.join(href.text()?.trim()).ok()?;
    names_of(url.path())
}

/// The decoded names in a path; none if one is not UTF-8.
fn names_of(path: &str) -> Option<Vec<String>> {
    let names = path.split('/').filter(|name| !name.is_empty());
    let decoded = names.map(|name| percent_decode_str(name).decode_utf8().ok());
    decoded
        .map(|name| name.map(|name| name.into_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<RemoteListing, String> {
        parse(
            text.as_bytes(),
            &"https://h/dav/my%20files/".parse().expect("a URL"),
        )
    }

    fn named(listing: &RemoteListing) -> Vec<(&str, bool, Option<u64>)> {
        let entries = listing.entries.iter();
        entries
            .map(|entry| (&*entry.name, entry.is_folder, entry.bytes))
            .collect()
    }

    /// An answer of Apache httpd (mod_dav_fs 2.4).
    const APACHE: &str = r#"<?xml version="1.0" encoding="utf-8"?>
<D:multistatus xmlns:D="DAV:" xmlns:ns0="DAV:">
<D:response xmlns:lp1="DAV:" xmlns:lp2="http://apache.org/dav/props/">
<D:href>/dav/my%20files/</D:href>
<D:propstat><D:prop><lp1:resourcetype><D:collection/></lp1:resourcetype>
<lp1:getlastmodified>Tue, 01 Jan 2030 00:00:00 GMT</lp1:getlastmodified></D:prop>
<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>
<D:response xmlns:lp1="DAV:" xmlns:lp2="http://apache.org/dav/props/">
<D:href>/dav/my%20files/a%20%26%20b.jpg</D:href>
<D:propstat><D:prop><lp1:resourcetype/><lp1:getcontentlength>3</lp1:getcontentlength>
<lp1:getlastmodified>Tue, 01 Jan 2030 00:00:00 GMT</lp1:getlastmodified>
<lp1:getetag>"3-1"</lp1:getetag><lp2:executable>F</lp2:executable></D:prop>
<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>
<D:response><D:href>/dav/my%20files/d/</D:href>
<D:propstat><D:prop><D:resourcetype><D:collection/></D:resourcetype></D:prop>
<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>
</D:multistatus>"#;

    /// An answer in the style of Nextcloud (SabreDAV): properties that a file does not have come with 404.
    const SABRE: &str = r#"<?xml version="1.0"?>
<d:multistatus xmlns:d="DAV:" xmlns:s="http://sabredav.org/ns"><d:response><d:href>/dav/my%20files/</d:href><d:propstat>
<d:prop><d:resourcetype><d:collection/></d:resourcetype></d:prop><d:status>HTTP/1.1 200 OK</d:status></d:propstat>
<d:propstat><d:prop><d:getcontentlength/></d:prop><d:status>HTTP/1.1 404 Not Found</d:status></d:propstat></d:response>
<d:response><d:href>/dav/my%20files/%c3%bc.txt</d:href><d:propstat><d:prop><d:getcontentlength/></d:prop>
<d:status>HTTP/1.1 404 Not Found</d:status></d:propstat><d:propstat><d:prop><d:resourcetype/>
<d:getcontentlength>12</d:getcontentlength></d:prop><d:status>HTTP/1.1 200 OK</d:status></d:propstat></d:response>
</d:multistatus>"#;

    #[test]
    fn files_and_folders_are_named_with_lengths_and_times() {
        let apache = read(APACHE).expect("a listing");
        let expected = [("a & b.jpg", false, Some(3)), ("d", true, None)];
        assert_eq!(named(&apache), expected);
        let at = "2030-01-01T00:00:00Z".parse().ok();
        assert_eq!(apache.entries[0].modified, at);
        assert!(apache.is_complete && !apache.is_page);
        let sabre = read(SABRE).expect("a listing");
        assert_eq!(named(&sabre), [("ü.txt", false, Some(12))]);
    }

    fn with(responses: &str) -> String {
        format!("<multistatus xmlns='DAV:'>{responses}</multistatus>")
    }

    #[test]
    fn only_the_path_counts_and_only_what_is_in_the_folder_itself() {
        let one = |href: &str| format!("<response><href>{href}</href></response>");
        let hrefs = [
            "http://internal:8080/dav/my%20files/a",
            "/dav/my files/b/",
            "/dav/my%20files/b/deeper",
            "/dav/other",
            "/",
            "c",
            "/dav/my%20files/..%2fup",
        ];
        let listing = read(&with(&hrefs.map(one).concat())).expect("a listing");
        let names: Vec<&str> = listing.entries.iter().map(|entry| &*entry.name).collect();
        // A name that leads elsewhere is refused where paths are made.
        assert_eq!(names, ["a", "b", "c", "../up"]);
    }

    #[test]
    fn what_the_server_does_not_tell_makes_the_listing_incomplete() {
        for bad in [
            "<response/>",
            "<response><href>/dav/my%20files/%ff</href></response>",
            "<response><href>/dav/my%20files/x</href><status>HTTP/1.1 403 Forbidden</status></response>",
        ] {
            let listing = read(&with(bad)).expect("a listing");
            assert!(!listing.is_complete && listing.entries.is_empty(), "{bad}");
        }
    }

    #[test]
    fn what_is_no_list_of_a_folder_is_refused() {
        let entity = "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><multistatus xmlns='DAV:'>&e;</multistatus>";
        let other = "<multistatus xmlns='elsewhere'/>";
        for bad in ["", "<html></html>", entity, other] {
            read(bad).expect_err(bad);
        }
        let file = with(
            "<response><href>/dav/my%20files/</href><propstat><prop><resourcetype/></prop></propstat></response>",
        );
        let error = read(&file).expect_err("a file");
        assert!(error.contains("not a folder"), "{error}");
    }
}
