//! Sign-in pages: a captive portal answers for every origin, with a web page.

use std::collections::BTreeSet;

use d2tp_links::LinkKind;
use url::Url;

use crate::fetch::exchange::FetchResponse;

/// File name extensions that no web page has. An answer of HTML for one of them is a captive portal, or
/// an error page with a wrong status.
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

/// Distinguishes a captive portal's page from the object.
#[derive(Debug, Default)]
pub(super) struct PortalDetector {
    /// Whether an answer that was no web page has arrived.
    had_other_answer: bool,
    /// Links on which an unexpected page arrived before anything was known of the origin.
    paged: BTreeSet<String>,
}

impl PortalDetector {
    /// Whether an answer over `link` is a web page instead of the object, like a captive portal's.
    /// `is_recognisable`: the origin sent something by which to recognise the object.
    pub(super) fn is_portal(
        &mut self,
        answer: &FetchResponse,
        url: &Url,
        (link, kind): (&str, Option<LinkKind>),
        is_recognisable: bool,
    ) -> bool {
        self.had_other_answer |= !answer.is_page;
        if !answer.is_page || answer.validator.is_some() {
            return false;
        }
        if self.had_other_answer || is_recognisable {
            return true;
        }
        let elsewhere = self.paged.iter().any(|paged| paged != link);
        let is_portal = kind == Some(LinkKind::Wifi) && is_no_page(url) && !elsewhere;
        if is_portal {
            self.paged.insert(link.to_owned());
        }
        is_portal
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
