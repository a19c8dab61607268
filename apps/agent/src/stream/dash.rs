//! DASH manifests (ISO/IEC 23009-1) whose links lead here.
//!
//! ```text
//!  <MPD>                                                      <MPD><BaseURL>/TOKEN/at/https/o.example/film/</BaseURL>
//!    <BaseURL>https://cdn.example/</BaseURL>             ─▶     <BaseURL>/TOKEN/at/https/cdn.example/</BaseURL>
//!    <SegmentTemplate media="$RepresentationID$/$Number$.m4s" …/>   as it is: the player makes the same of it
//! ```
//!
//! Nothing but links is touched. What a template stands for is written out, so that segments are known before
//! a player asks: by a timeline, or by a duration where the length of the period is known. Of a live manifest
//! without a timeline it is not: then all links lead to the origin, as they did.

use std::time::Duration;

use jiff::{SignedDuration, Span, SpanRelativeTo};
use roxmltree::{Document, Node};
use url::Url;

use super::playlist::{MediaSegment, PlaylistLinkKind};

/// The media type of manifests.
pub const MEDIA_TYPE: &str = "application/dash+xml";

/// The most segments of one manifest that are listed; a manifest with more is passed through.
const SEGMENTS_MAX: usize = 200_000; // a guess: a day of seconds, seen and heard

/// A parsed manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct DashManifest {
    /// The manifest as it is sent to players.
    pub text: String,
    /// The manifest's links other than segments.
    pub links: Vec<(Url, PlaylistLinkKind)>,
    /// The segments of each representation in order, under a URL that names the representation.
    pub media: Vec<(Url, Vec<MediaSegment>)>,
    /// Whether the manifest is complete, so that no segments will be added.
    pub is_complete: bool,
}

/// Whether a URL names a manifest, by its extension.
pub fn is_manifest_url(url: &Url) -> bool {
    url.path().to_ascii_lowercase().ends_with(".mpd")
}

/// Parses a manifest from `base`; `link` turns an origin's URL into one of this server.
pub fn read(text: &str, base: &Url, link: impl Fn(&Url) -> String) -> Option<DashManifest> {
    let (manifest, is_known) = read_with(text, base, &link)?;
    if is_known {
        return Some(manifest);
    }
    let (there, _) = read_with(text, base, &|url| url.to_string())?;
    Some(DashManifest {
        links: Vec::new(),
        media: Vec::new(),
        ..there
    })
}

/// Parses a manifest. Also returns whether all of its segments are known.
fn read_with(
    text: &str,
    base: &Url,
    link: &dyn Fn(&Url) -> String,
) -> Option<(DashManifest, bool)> {
    let document = Document::parse(text).ok()?;
    let root = document.root_element();
    if root.tag_name().name() != "MPD" {
        return None;
    }
    let mut reader = DashReader {
        url: base,
        link,
        edits: Vec::new(),
        links: Vec::new(),
        media: Vec::new(),
        is_known: true,
        segments_left: SEGMENTS_MAX,
        is_over: root.attribute("type") != Some("dynamic"),
    };
    reader.manifest(root);
    let DashReader {
        mut edits,
        links,
        media,
        is_known,
        is_over,
        ..
    } = reader;
    edits.sort_by_key(|(from, ..)| *from);
    let mut told = String::with_capacity(text.len() * 2);
    let mut at = 0;
    for (from, to, by) in edits {
        told += &text[at..from];
        told += &by;
        at = to;
    }
    told += &text[at..];
    let manifest = DashManifest {
        text: told,
        links,
        media,
        is_complete: is_over,
    };
    Some((manifest, is_known))
}

struct DashReader<'a> {
    url: &'a Url,
    link: &'a dyn Fn(&Url) -> String,
    /// Replacements in the text: start, end, new text.
    edits: Vec<(usize, usize, String)>,
    links: Vec<(Url, PlaylistLinkKind)>,
    media: Vec<(Url, Vec<MediaSegment>)>,
    is_known: bool,
    segments_left: usize,
    is_over: bool,
}

/// Attributes that contain links, if these are not relative.
const LINKS: [&str; 4] = ["media", "initialization", "sourceURL", "index"];

fn children<'a>(node: Node<'a, 'a>, name: &str) -> impl Iterator<Item = Node<'a, 'a>> {
    node.children().filter(move |n| n.tag_name().name() == name)
}

fn child<'a>(node: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    children(node, name).next()
}

fn seconds_of(node: Node<'_, '_>, attribute: &str) -> Option<f64> {
    let span: Span = node.attribute(attribute)?.parse().ok()?;
    let relative = SpanRelativeTo::days_are_24_hours();
    let duration: SignedDuration = span.to_duration(relative).ok()?;
    Some(duration.as_secs_f64())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

impl DashReader<'_> {
    fn manifest(&mut self, root: Node<'_, '_>) {
        for location in children(root, "Location") {
            if let Some(url) = self.replace(location, &self.url.clone()) {
                self.links.push((url, PlaylistLinkKind::Playlist));
            }
        }
        let own = child(root, "BaseURL").is_some();
        let base = self.base(root, &self.url.clone());
        let elements = root.children().filter(Node::is_element);
        let mut after = elements.filter(|n| n.tag_name().name() != "ProgramInformation");
        if let (false, Some(first)) = (own, after.next()) {
            let at = first.range().start;
            let link = escaped(&(self.link)(self.url));
            self.edits
                .push((at, at, format!("<BaseURL>{link}</BaseURL>\n")));
        }
        let all = seconds_of(root, "mediaPresentationDuration");
        let periods: Vec<Node<'_, '_>> = children(root, "Period").collect();
        let mut begins = 0.0;
        for (n, period) in periods.iter().enumerate() {
            begins = seconds_of(*period, "start").unwrap_or(begins);
            let next = periods.get(n + 1).and_then(|p| seconds_of(*p, "start"));
            let ends = next.or(all.filter(|_| n + 1 == periods.len()));
            let lasts = seconds_of(*period, "duration").or(ends.map(|ends| ends - begins));
            self.period(n, *period, &base, lasts);
            begins += lasts.unwrap_or(0.0);
        }
    }

    fn period(&mut self, n: usize, period: Node<'_, '_>, base: &Url, lasts: Option<f64>) {
        let base = self.base(period, base);
        self.attributes(period, &base);
        for (m, set) in children(period, "AdaptationSet").enumerate() {
            let base = self.base(set, &base);
            self.attributes(set, &base);
            for (k, representation) in children(set, "Representation").enumerate() {
                let base = self.base(representation, &base);
                self.attributes(representation, &base);
                let levels = [representation, set, period];
                let mut key = self.url.clone();
                key.set_fragment(Some(&format!("{n}-{m}-{k}")));
                match self.segments(&levels, &base, lasts) {
                    Some(segments) => self.media.push((key, segments)),
                    // One file, of which players ask for ranges.
                    None => self.links.push((base, PlaylistLinkKind::Other)),
                }
            }
        }
    }

    /// Takes in the base URLs of an element. Returns the base of its links.
    fn base(&mut self, node: Node<'_, '_>, base: &Url) -> Url {
        let mut first = None;
        for element in children(node, "BaseURL") {
            let url = self.replace(element, base);
            first = first.or(url);
        }
        first.unwrap_or_else(|| base.clone())
    }

    /// Replaces a link in the text of an element. Returns the original URL.
    fn replace(&mut self, element: Node<'_, '_>, base: &Url) -> Option<Url> {
        let text = element.children().find(Node::is_text)?;
        let url = base.join(text.text()?.trim()).ok()?;
        let range = text.range();
        let link = escaped(&(self.link)(&url));
        self.edits.push((range.start, range.end, link));
        Some(url)
    }

    /// Replaces absolute links of segment information, which the base URL does not cover.
    fn attributes(&mut self, node: Node<'_, '_>, base: &Url) {
        let names = ["SegmentTemplate", "SegmentList", "SegmentBase"];
        let says = node
            .children()
            .filter(|n| names.contains(&n.tag_name().name()));
        for element in says.flat_map(|n| n.descendants()).filter(Node::is_element) {
            for attribute in element.attributes() {
                let value = attribute.value();
                let is_absolute = value.starts_with('/') || Url::parse(value).is_ok();
                if !LINKS.contains(&attribute.name()) || !is_absolute {
                    continue;
                }
                if let Ok(url) = base.join(value) {
                    let range = attribute.range_value();
                    let link = escaped(&(self.link)(&url));
                    self.edits.push((range.start, range.end, link));
                }
            }
        }
    }

    /// The segments of a representation; none if it is a single file.
    fn segments(
        &mut self,
        levels: &[Node<'_, '_>; 3],
        base: &Url,
        lasts: Option<f64>,
    ) -> Option<Vec<MediaSegment>> {
        let of = |name: &'static str| levels.iter().filter_map(move |n| child(*n, name));
        let mut all = Vec::new();
        if of("SegmentTemplate").next().is_some() {
            let found = SegmentTemplate::of(of("SegmentTemplate").collect(), levels[0]);
            let left = self.segments_left;
            self.is_known &= found.write_out(base, lasts, self.is_over, (&mut all, left));
            self.segments_left = left.saturating_sub(all.len());
            return Some(all);
        }
        let list = of("SegmentList").next()?;
        let plays = number(list, "duration").map(|d| {
            let scale = number(list, "timescale").unwrap_or(1.0);
            Duration::try_from_secs_f64(d / scale).unwrap_or_default()
        });
        let initial = child(list, "Initialization").and_then(|n| n.attribute("sourceURL"));
        if let Some(url) = initial.and_then(|told| base.join(told).ok()) {
            all.push(MediaSegment {
                url,
                duration: None,
            });
        }
        for told in children(list, "SegmentURL") {
            // Without it, a range of the base.
            let url = base.join(told.attribute("media")?).ok()?;
            all.push(MediaSegment {
                url,
                duration: plays,
            });
        }
        self.is_known &= all.len() <= self.segments_left;
        self.segments_left = self.segments_left.saturating_sub(all.len());
        Some(all)
    }
}

fn number(node: Node<'_, '_>, attribute: &str) -> Option<f64> {
    node.attribute(attribute)?.parse().ok()
}

/// The segment information of a representation, or inherited from its parents.
struct SegmentTemplate<'a> {
    levels: Vec<Node<'a, 'a>>,
    id: &'a str,
    bandwidth: &'a str,
}

impl<'a> SegmentTemplate<'a> {
    fn of(levels: Vec<Node<'a, 'a>>, representation: Node<'a, 'a>) -> SegmentTemplate<'a> {
        SegmentTemplate {
            levels,
            id: representation.attribute("id").unwrap_or_default(),
            bandwidth: representation.attribute("bandwidth").unwrap_or_default(),
        }
    }

    fn attribute(&self, name: &str) -> Option<&'a str> {
        self.levels.iter().find_map(|n| n.attribute(name))
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.attribute(name)?.parse().ok()
    }

    /// Adds all segments. False if they cannot be determined, or exceed `left`.
    fn write_out(
        &self,
        base: &Url,
        lasts: Option<f64>,
        is_over: bool,
        (all, left): (&mut Vec<MediaSegment>, usize),
    ) -> bool {
        let mut add = |template: &str, number: u64, time: u64, plays: Option<f64>| {
            let told = self.filled(template, number, time);
            if let Ok(url) = base.join(&told) {
                let plays = plays.and_then(|s| Duration::try_from_secs_f64(s).ok());
                all.push(MediaSegment {
                    url,
                    duration: plays,
                });
            }
        };
        if let Some(template) = self.attribute("initialization") {
            add(template, 0, 0, None);
        }
        let Some(media) = self.attribute("media") else {
            return true;
        };
        let scale = self.number("timescale").filter(|s| *s > 0.0).unwrap_or(1.0);
        let first = self.attribute("startNumber").and_then(|n| n.parse().ok());
        let mut number: u64 = first.unwrap_or(1);
        let timeline = self
            .levels
            .iter()
            .find_map(|n| child(*n, "SegmentTimeline"));
        if let Some(timeline) = timeline {
            let runs: Vec<Node<'_, '_>> = children(timeline, "S").collect();
            let whole = |n: &Node<'_, '_>, name| n.attribute(name).and_then(|v| v.parse().ok());
            let offset = self.number("presentationTimeOffset").unwrap_or(0.0);
            let ends = lasts.map(|lasts| (offset + lasts * scale) as u64);
            let (mut time, mut left) = (0u64, left);
            for (n, run) in runs.iter().enumerate() {
                time = whole(run, "t").unwrap_or(time);
                let Some(length) = whole(run, "d").filter(|d: &u64| *d > 0) else {
                    return false;
                };
                let repeats = run.attribute("r").and_then(|r| r.parse::<i64>().ok());
                let until = runs.get(n + 1).and_then(|next| whole(next, "t")).or(ends);
                let count = match (repeats.unwrap_or(0), until) {
                    (0.., _) => repeats.unwrap_or(0).unsigned_abs() + 1,
                    (_, Some(until)) => until.saturating_sub(time).div_ceil(length),
                    (_, None) => return false,
                };
                for _ in 0..count {
                    if left == 0 {
                        return false;
                    }
                    add(media, number, time, Some(length as f64 / scale));
                    (number, time) = (number.saturating_add(1), time.saturating_add(length));
                    left -= 1;
                }
            }
        } else if let (Some(length), Some(lasts), true) =
            (self.number("duration").filter(|d| *d > 0.0), lasts, is_over)
        {
            let count = (lasts * scale / length).ceil() as usize;
            if count > left {
                return false;
            }
            for n in 0..count as u64 {
                let time = (n as f64 * length) as u64;
                add(media, number.saturating_add(n), time, Some(length / scale));
            }
        } else {
            // One segment for the whole period has no number and no time.
            let is_one = !media.contains("$Number") && !media.contains("$Time");
            if is_one {
                add(media, number, 0, lasts);
            }
            return is_one;
        }
        true
    }

    /// Fills in the identifiers of a template (§5.3.9.4.4).
    fn filled(&self, template: &str, number: u64, time: u64) -> String {
        let mut told = String::with_capacity(template.len());
        for (n, part) in template.split('$').enumerate() {
            if n % 2 == 0 {
                told += part;
                continue;
            }
            let (name, width) = match part.split_once("%0") {
                Some((name, width)) => (name, width.trim_end_matches('d').parse().unwrap_or(0)),
                None => (part, 0usize),
            };
            // No segment has a name so long.
            let width = width.min(20);
            match name {
                "" => told.push('$'),
                "RepresentationID" => told += self.id,
                "Bandwidth" => told += &format!("{:0>width$}", self.bandwidth),
                "Number" => told += &format!("{number:0width$}"),
                "Time" => told += &format!("{time:0width$}"),
                _ => told += part,
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::super::playlist::path_of;
    use super::*;

    fn read_here(text: &str) -> DashManifest {
        let base: Url = "https://o.example/film/main.mpd".parse().unwrap();
        read(text, &base, |url| format!("/T/{}", path_of(url))).expect("a manifest")
    }

    fn paths(segments: &[MediaSegment]) -> Vec<&str> {
        segments.iter().map(|s| s.url.path()).collect()
    }

    #[test]
    fn a_template_with_a_duration_is_written_out_and_its_text_stays() {
        let text = r#"<?xml version="1.0"?>
<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="P0Y0M0DT0H0M9.500S">
<ProgramInformation/><Period><AdaptationSet>
<SegmentTemplate timescale="1000" duration="4000" startNumber="0" initialization="$RepresentationID$/i.mp4"
 media="$RepresentationID$/$Number%03d$.m4s?x=1&amp;y=2"/>
<Representation id="lo" bandwidth="64000"/><Representation id="hi" bandwidth="640000"/>
</AdaptationSet></Period></MPD>"#;
        let manifest = read_here(text);
        assert_eq!(manifest.media.len(), 2);
        let of_lo = &manifest.media[0].1;
        let expected = [
            "/film/lo/i.mp4",
            "/film/lo/000.m4s",
            "/film/lo/001.m4s",
            "/film/lo/002.m4s",
        ];
        assert_eq!(paths(of_lo), expected);
        assert_eq!(of_lo[1].url.query(), Some("x=1&y=2"));
        assert_eq!(of_lo[1].duration, Some(Duration::from_secs(4)));
        assert!(manifest.is_complete && manifest.links.is_empty());
        let added =
            "<ProgramInformation/><BaseURL>/T/at/https/o.example/film/main.mpd</BaseURL>\n<Period>";
        assert_eq!(
            manifest.text,
            text.replace("<ProgramInformation/><Period>", added)
        );
    }

    #[test]
    fn timelines_repeat_and_bases_and_absolute_links_lead_here() {
        let text = r#"<MPD type="dynamic"><BaseURL>https://cdn.example/a/</BaseURL>
<Location>https://o.example/film/next.mpd?s=1&amp;t=2</Location>
<Period duration="PT10S"><AdaptationSet><BaseURL>b/</BaseURL>
<Representation id="v"><SegmentTemplate timescale="10" media="/c/$Time$.m4s" initialization="i.mp4">
<SegmentTimeline><S t="5" d="20" r="1"/><S d="25"/><S d="15" r="-1"/></SegmentTimeline>
</SegmentTemplate></Representation></AdaptationSet></Period></MPD>"#;
        let manifest = read_here(text);
        let expected = [
            "/a/b/i.mp4",
            "/c/5.m4s",
            "/c/25.m4s",
            "/c/45.m4s",
            "/c/70.m4s",
            "/c/85.m4s",
        ];
        assert_eq!(paths(&manifest.media[0].1), expected);
        assert!(!manifest.is_complete);
        let next: Url = "https://o.example/film/next.mpd?s=1&t=2".parse().unwrap();
        assert_eq!(manifest.links, [(next, PlaylistLinkKind::Playlist)]);
        let told = &manifest.text;
        for there in [
            "<BaseURL>/T/at/https/cdn.example/a/</BaseURL>",
            "<BaseURL>/T/at/https/cdn.example/a/b/</BaseURL>",
            "media=\"/T/at/https/cdn.example/c/$Time$.m4s\" initialization=\"i.mp4\"",
            "<Location>/T/at/https/o.example/film/next.mpd?s=1&amp;t=2</Location>",
        ] {
            assert!(told.contains(there), "{there} in {told}");
        }
    }

    #[test]
    fn lists_and_single_files_are_known() {
        let text = r#"<MPD><Period>
<AdaptationSet><Representation id="l"><SegmentList timescale="2" duration="5"><Initialization sourceURL="i"/>
<SegmentURL media="1"/><SegmentURL media="2"/></SegmentList></Representation></AdaptationSet>
<AdaptationSet><Representation id="f"><BaseURL>all.mp4</BaseURL><SegmentBase indexRange="0-99"/>
</Representation></AdaptationSet></Period></MPD>"#;
        let manifest = read_here(text);
        let segments = &manifest.media[0].1;
        assert_eq!(paths(segments), ["/film/i", "/film/1", "/film/2"]);
        assert_eq!(segments[2].duration, Some(Duration::from_millis(2500)));
        let file: Url = "https://o.example/film/all.mp4".parse().unwrap();
        assert_eq!(manifest.links, [(file, PlaylistLinkKind::Other)]);
    }

    #[test]
    fn live_segments_that_only_a_clock_tells_come_from_the_origin() {
        let text = r#"<MPD type="dynamic" availabilityStartTime="2026-01-01T00:00:00Z"><Period start="PT0S"><AdaptationSet>
<SegmentTemplate duration="2" media="/v/$Number$.m4s"/><Representation id="v"/></AdaptationSet></Period></MPD>"#;
        let manifest = read_here(text);
        assert!(manifest.media.is_empty() && manifest.links.is_empty() && !manifest.is_complete);
        let told = &manifest.text;
        assert!(
            told.contains("<BaseURL>https://o.example/film/main.mpd</BaseURL>"),
            "{told}"
        );
        assert!(
            told.contains("media=\"https://o.example/v/$Number$.m4s\""),
            "{told}"
        );
    }

    #[test]
    fn what_is_no_manifest_or_has_no_end_is_not_taken_for_one() {
        let link = |url: &Url| url.to_string();
        let base: Url = "https://o.example/a.mpd".parse().unwrap();
        for text in ["", "#EXTM3U", "<html/>", "<MPD>"] {
            assert_eq!(read(text, &base, link), None);
        }
        let text = r#"<MPD><Period duration="PT1000000000S"><AdaptationSet><Representation id="v">
<SegmentTemplate media="$Number$" timescale="1000" duration="1"/></Representation></AdaptationSet></Period></MPD>"#;
        let manifest = read(text, &base, link).unwrap();
        assert!(manifest.media.is_empty());
        // Nor one of many representations that are endless together.
        let one = r#"<Representation id="v"/>"#.repeat(100);
        let text = format!(
            r#"<MPD><Period duration="PT9000S"><AdaptationSet><SegmentTemplate media="$Number$" duration="1"/>{one}
</AdaptationSet></Period></MPD>"#
        );
        let manifest = read(&text, &base, link).unwrap();
        assert!(manifest.media.is_empty());
        let text = text.replace("9000S", "1900S");
        assert_eq!(read(&text, &base, link).unwrap().media.len(), 100);
    }
}
