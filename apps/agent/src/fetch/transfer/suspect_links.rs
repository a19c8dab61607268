//! Links that lead to somebody else: the sign-in page of a captive portal, who answers for every
//! origin, or whoever shows a certificate that is not the origin's.
//!
//! ```text
//!  a stranger, or a page where none is due
//!     ├─ another link may be used now ──▶ doubt this one, go on there
//!     ├─ the origin was reached before ──▶ doubt this one, wait: `portal`
//!     └─ neither: cannot tell a portal from an origin like that ──▶ an error that says both
//! ```
//!
//! A doubt ends by itself, later each time, or as soon as the link has another address. Only for
//! downloads without a proxy: a proxy proves who it is, and a link on which it does not answer is
//! passed over for that.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use d2tp_links::LinkKind;
use d2tp_sched::LinkChoice;
use url::Url;

use super::super::boot_clock::BootInstant;
use super::super::mode::FetchMode;
use super::{
    Dial, FetchFault, FetchResponse, TransferExit, TransferFailure, TransferReason, TransferRun,
};

/// How long a link is doubted the first time; it doubles.
const DOUBT_FIRST: Duration = Duration::from_secs(30); // a guess: somebody types a password

/// How long at most.
const DOUBT_MAX: Duration = Duration::from_secs(600); // a guess

/// Endings of names that no web page has. An answer of HTML to one of them is a sign-in page, or
/// an error that the origin took for an answer.
const NOT_A_PAGE: &[&str] = &[
    "mp3",
    "m4a",
    "m4b",
    "aac",
    "ogg",
    "oga",
    "opus",
    "flac",
    "wav",
    "mp4",
    "m4v",
    "mkv",
    "webm",
    "mov",
    "avi",
    "ts",
    "mpg",
    "zip",
    "gz",
    "tgz",
    "xz",
    "zst",
    "bz2",
    "7z",
    "rar",
    "tar",
    "iso",
    "img",
    "deb",
    "rpm",
    "apk",
    "jar",
    "whl",
    "crate",
    "exe",
    "msi",
    "dmg",
    "pkg",
    "bin",
    "pdf",
    "epub",
    "mobi",
    "jpg",
    "jpeg",
    "png",
    "gif",
    "webp",
    "csv",
    "json",
    "safetensors",
    "gguf",
];

/// Why a link is passed over, and for how long.
#[derive(Debug, Clone)]
pub(super) struct SuspectLink {
    until: BootInstant,
    length: Duration,
    /// Another address is another network.
    addresses: Vec<IpAddr>,
}

/// What is known of links that led to somebody else.
#[derive(Debug, Default)]
pub(super) struct SuspectLinks {
    links: std::collections::BTreeMap<String, SuspectLink>,
    /// Links on which a page came that was not due, before anything was known of the origin.
    paged: BTreeSet<String>,
}

impl<D: Dial> TransferRun<'_, D> {
    /// Whether this link is passed over now.
    pub(super) fn is_suspect(&self, link: &str, addresses: &[IpAddr]) -> bool {
        self.doubts
            .links
            .get(link)
            .is_some_and(|doubt| doubt.until > BootInstant::now() && doubt.addresses == addresses)
    }

    /// The links passed over now, for people.
    pub(super) fn suspect_names(&self) -> Option<String> {
        let links = self.links.borrow();
        let names: Vec<&str> = links
            .iter()
            .filter(|link| link.is_usable() && self.is_suspect(&link.name, &link.addresses))
            .map(|link| link.name.as_str())
            .collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// Refuses a web page that is not the object: what a portal sends for everything.
    pub(super) fn refuse_portal(
        &mut self,
        answer: &FetchResponse,
        link: &str,
    ) -> Result<(), FetchFault> {
        if self.dial.mode() != FetchMode::Direct || !answer.is_page || answer.validator.is_some() {
            if !answer.is_page {
                self.was_page = Some(false);
            }
            return Ok(());
        }
        let other_before = self.was_page == Some(false) || self.sink.note.validator.is_some();
        let wifi = self.kind(link) == Some(LinkKind::Wifi);
        let elsewhere = self.doubts.paged.iter().any(|paged| paged != link);
        if other_before || (wifi && is_no_page(&self.job.url) && !elsewhere) {
            if !other_before {
                self.doubts.paged.insert(link.to_owned());
            }
            let host = self.job.url.host_str().unwrap_or_default().to_owned();
            return Err(FetchFault::CaptivePortal(format!(
                "a web page comes instead of the object of {host}"
            )));
        }
        Ok(())
    }

    /// After an answer of somebody else on `link`: goes on elsewhere, waits, or gives up.
    pub(super) fn mark_suspect(&mut self, link: &str, text: String) -> Result<(), TransferFailure> {
        let reached = self.best_length > 0 || self.sink.note.validator.is_some();
        let ways = self.link_candidates();
        let others: Vec<_> = ways.into_iter().filter(|way| way.name != link).collect();
        let elsewhere = matches!(self.decide(&others, false).choice, LinkChoice::Use { .. });
        let kind = self.kind(link);
        if kind == Some(LinkKind::Loopback) || kind.is_none() || !(reached || elsewhere) {
            let portal = match kind {
                Some(LinkKind::Wifi) => format!("; if {link} requires a sign-in, sign in first"),
                _ => String::new(),
            };
            let text = format!("{text}{portal}");
            return Err(match kind {
                Some(LinkKind::Wifi) => {
                    TransferFailure::of(TransferExit::Error, TransferReason::Portal, text)
                }
                _ => TransferFailure::error(text),
            });
        }
        let before = self.doubts.links.get(link).map(|doubt| doubt.length);
        let length = before.map_or(DOUBT_FIRST, |before| (before * 2).min(DOUBT_MAX));
        let addresses = {
            let links = self.links.borrow();
            let found = links.iter().find(|known| known.name == link);
            found
                .map(|known| known.addresses.clone())
                .unwrap_or_default()
        };
        let doubt = SuspectLink {
            until: BootInstant::now().after(length),
            length,
            addresses,
        };
        self.doubts.links.insert(link.to_owned(), doubt);
        let seconds = length.as_secs();
        self.note(
            Some(TransferReason::Portal),
            format!("{link}: {text}; not used for {seconds} s"),
        );
        Ok(())
    }

    fn kind(&self, name: &str) -> Option<LinkKind> {
        let links = self.links.borrow();
        links.iter().find(|link| link.name == name).map(|l| l.kind)
    }
}

fn is_no_page(url: &Url) -> bool {
    let name = url.path().rsplit('/').next().unwrap_or_default();
    name.rsplit_once('.').is_some_and(|(_, ending)| {
        NOT_A_PAGE
            .iter()
            .any(|known| ending.eq_ignore_ascii_case(known))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_due_unless_the_name_says_otherwise() {
        let no_page = |text: &str| is_no_page(&text.parse().expect("a URL"));
        assert!(no_page("http://host/show/118.MP3?x=1"));
        assert!(no_page("http://host/a.tar.gz"));
        for page in [
            "http://host/",
            "http://host/a",
            "http://host/a.html",
            "http://host.iso/a",
        ] {
            assert!(!no_page(page), "{page}");
        }
    }
}
