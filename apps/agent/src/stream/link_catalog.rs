//! Maps local links to objects: those requested by name, and those that their playlists name.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cedos_sandbox::confined;
use d2tp_sched::{CostPolicy, LinkClass, PlaybackMeter};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use url::Url;

use super::dash::{self, DashManifest};
use super::feed::{StreamFeed, StreamRules};
use super::local_server::{LinkResolver, LinkTarget};
use super::object::{OriginRefusal, StreamObject};
use super::playlist::{self, HlsPlaylist, MediaSegment, PlaylistLinkKind};
use super::store::{self, random_name};
use super::stream_transport::{RequestConn, StreamTransport};
use super::title::{StreamTitle, TitlePiece};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::FetchFault;
use crate::fetch::exchange::{FetchResponse, GetRequest, exchange};
use crate::fetch::filename;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::own_file;
use crate::fetch::request_method::RequestMethod;
use d2tp_driver::SchedulerHandle;
use d2tp_sched::TransferDirection;

/// What keeps a link the same after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedLink {
    /// The secret part of the links' paths.
    pub token: String,
    /// The port of the server.
    pub port: Option<u16>,
}

impl SavedLink {
    fn path(root: &Path, urls: &[Url]) -> PathBuf {
        let urls: Vec<&str> = urls.iter().map(Url::as_str).collect();
        store::folder_of(root, &urls.join("\n")).with_extension("link")
    }

    /// The saved link of these URLs, or a new one.
    pub fn of(root: &Path, urls: &[Url]) -> SavedLink {
        // A token that another user laid there would be known to them.
        let lying = own_file::read(&SavedLink::path(root, urls)).ok();
        let lying = lying.and_then(|bytes| serde_json::from_slice::<SavedLink>(&bytes).ok());
        // Half a token is easier to guess than none.
        let lying = lying.filter(|note| note.token.len() == random_name().len());
        lying.unwrap_or_else(|| SavedLink {
            token: random_name(),
            port: None,
        })
    }

    /// Keeps it for the next time.
    ///
    /// # Errors
    /// From the disk.
    pub fn save(&self, root: &Path, urls: &[Url]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        own_file::replace(&SavedLink::path(root, urls), &serde_json::to_vec(self)?)
    }
}

/// Segments of a playlist that are fetched ahead of the requested one.
const AHEAD: usize = 256; // a guess: a quarter of an hour; each is an open file

/// How long a playlist may take to arrive: less than players wait.
const PLAYLIST_WITHIN: Duration = Duration::from_secs(7); // Media3 gives up after 8 s

/// The content of one link.
#[derive(Clone)]
enum CatalogEntry {
    Stream(Arc<StreamObject>, Arc<StreamTitle>),
    Playlist(Url),
}

/// The segments of a playlist that are near the playing position.
struct MediaSegments {
    segments: Vec<MediaSegment>,
    open: BTreeMap<Url, Arc<StreamObject>>,
    title: Option<Arc<StreamTitle>>,
    /// The segment that was requested last.
    at: Option<Url>,
}

/// The content of playlists.
#[derive(Default)]
struct PlaylistIndex {
    /// The kind of each link of a playlist, and the playlist it belongs to.
    named: BTreeMap<Url, (PlaylistLinkKind, Url)>,
    media: BTreeMap<Url, MediaSegments>,
    /// Playlists as they are sent to players, and whether each is complete.
    texts: BTreeMap<Url, (String, bool)>,
    others: BTreeMap<Url, CatalogEntry>,
}

/// All links of a server.
pub struct LinkCatalog {
    root: PathBuf,
    transport: Arc<StreamTransport>,
    rules: StreamRules,
    rate: Option<f64>,
    token: String,
    begun: BootInstant,
    stop: watch::Receiver<bool>,
    /// The scheduler shared with other streams and transfers.
    scheduler: Option<Arc<SchedulerHandle>>,
    entries: Mutex<BTreeMap<String, CatalogEntry>>,
    lists: Mutex<PlaylistIndex>,
    feeds: Mutex<JoinSet<()>>,
}

/// The number of streams in the scheduler, which no transfer has.
const STREAM: u64 = 0;

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LinkCatalog {
    /// Creates a catalog over this transport that stores objects below `root`. `rate`: bytes per second
    /// of the media, if the user gave it.
    pub fn new(
        root: PathBuf,
        transport: Arc<StreamTransport>,
        rules: StreamRules,
        rate: Option<f64>,
        token: String,
        stop: watch::Receiver<bool>,
    ) -> LinkCatalog {
        LinkCatalog {
            root,
            transport,
            rules,
            rate,
            token,
            begun: BootInstant::now(),
            stop,
            scheduler: None,
            entries: Mutex::default(),
            lists: Mutex::default(),
            feeds: Mutex::default(),
        }
    }

    /// Returns the catalog with a scheduler that decides for other transfers too.
    pub fn with_scheduler(self, scheduler: Arc<SchedulerHandle>) -> LinkCatalog {
        LinkCatalog {
            scheduler: Some(scheduler),
            ..self
        }
    }

    /// Puts a URL up; the name of its link.
    ///
    /// # Errors
    /// From the disk; `WouldBlock` while another program has it.
    pub fn publish(&self, url: &Url) -> io::Result<String> {
        let own = filename::from_url(url);
        let mut places = held(&self.entries);
        let others = (2..).map(|n| format!("{n}-{own}"));
        let name = std::iter::once(own.clone())
            .chain(others)
            .map(|name| as_path(&name))
            .find(|name| !places.contains_key(name))
            .expect("u64 has enough names");
        let place = match playlist::is_playlist_url(url) || dash::is_manifest_url(url) {
            true => CatalogEntry::Playlist(url.clone()),
            false => self.stream(url, &name, false)?,
        };
        places.insert(name.clone(), place);
        Ok(name)
    }

    fn stream(&self, url: &Url, name: &str, only_watched: bool) -> io::Result<CatalogEntry> {
        let object = StreamObject::open(&self.root, url.clone())?;
        let pieces = vec![TitlePiece {
            object: object.clone(),
            duration: None,
        }];
        let (name, pace) = (name.to_owned(), PlaybackMeter::new(self.rate));
        let title = match only_watched {
            true => StreamTitle::while_watched(name, pieces, pace),
            false => StreamTitle::new(name, pieces, pace),
        };
        self.feed(title.clone());
        Ok(CatalogEntry::Stream(object, title))
    }

    fn feed(&self, title: Arc<StreamTitle>) {
        let feed = StreamFeed::new(
            title,
            self.transport.clone(),
            self.rules.clone(),
            self.begun,
        );
        let client = self
            .scheduler
            .as_ref()
            .map(|d| d.join(TransferDirection::Down, STREAM));
        let feed = feed.with_slot(client);
        held(&self.feeds).spawn(feed.run(self.stop.clone()));
    }

    /// The titles of the catalog.
    pub fn titles(&self) -> Vec<Arc<StreamTitle>> {
        let places: Vec<CatalogEntry> = held(&self.entries).values().cloned().collect();
        let of_place = |place| match place {
            CatalogEntry::Stream(_, title) => Some(title),
            CatalogEntry::Playlist(_) => None,
        };
        let lists = held(&self.lists);
        let of_lists = lists.media.values().filter_map(|media| media.title.clone());
        places
            .into_iter()
            .filter_map(of_place)
            .chain(of_lists)
            .collect()
    }

    /// Waits until all feeds have ended, after they were asked to stop.
    pub async fn until_feeds_ended(&self) {
        let mut feeds = std::mem::take(&mut *held(&self.feeds));
        while feeds.join_next().await.is_some() {}
    }

    // ---- playlists ----

    async fn playlist(&self, url: &Url) -> LinkTarget {
        let kept = held(&self.lists).texts.get(url).cloned();
        if let Some((text, true)) = kept {
            return told(text);
        }
        match (self.fetch_playlist(url).await, kept) {
            (Ok(text), _) => told(text),
            // While no network is there, the one before says what is held.
            (Err(_), Some((text, _))) => told(text),
            (Err(refusal), None) => LinkTarget::Refused(refusal.status, refusal.text),
        }
    }

    async fn fetch_playlist(&self, url: &Url) -> Result<String, OriginRefusal> {
        let refuse = |status, text: String| OriginRefusal {
            status,
            text,
            is_temporary: false,
        };
        let ask = GetRequest {
            url: url.clone(),
            from: 0,
            to: None,
            if_range: None,
            unless: None,
            cookies: self.rules.cookies.clone(),
            allow_downgrade: self.rules.allow_downgrade,
            fields: self.rules.fields.clone(),
            method: RequestMethod::Get,
        };
        let mut conn = self.playlist_conn(url);
        let text = async {
            let mut answer = self.request_playlist(&ask, &mut conn).await?;
            let mut bytes = Vec::new();
            while let Some(piece) = answer.next().await {
                bytes.extend_from_slice(&piece?);
                if bytes.len() > playlist::BYTES_MAX {
                    return Err(FetchFault::Final(TransferFailure::error(
                        "the playlist has no end",
                    )));
                }
            }
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = match timeout(PLAYLIST_WITHIN, text).await {
            Ok(Ok(text)) => text,
            Ok(Err(fault)) => {
                let status = conn.status().filter(|status| status.as_u16() >= 400);
                return Err(refuse(
                    status.unwrap_or(StatusCode::BAD_GATEWAY),
                    words(fault),
                ));
            }
            Err(_) => {
                let text = "the playlist did not arrive in time".to_owned();
                return Err(refuse(StatusCode::GATEWAY_TIMEOUT, text));
            }
        };
        let token = self.token.as_str();
        let here = |url: &Url| format!("/{token}/{}", playlist::path_of(url));
        if let Some(list) = confined(|| playlist::read(&text, url, here)) {
            Ok(self.learn(url, list))
        } else if let Some(manifest) = confined(|| dash::read(&text, url, here)) {
            Ok(self.learn_manifest(url, manifest))
        } else {
            let text = "the server's playlist is not a playlist".to_owned();
            Err(refuse(StatusCode::BAD_GATEWAY, text))
        }
    }

    /// The connection for a playlist, over a link that works.
    fn playlist_conn(&self, url: &Url) -> RequestConn {
        let candidates = self.transport.link_candidates(url);
        let working = |class: LinkClass| {
            let mut candidates = candidates
                .iter()
                .filter(move |candidate| candidate.class == class && !candidate.stalled);
            candidates.next().map(|candidate| candidate.name.clone())
        };
        let free = working(LinkClass::Free);
        // Somebody asked for it, and it is short.
        let pays = free.is_none() && self.rules.policy != CostPolicy::FreeOnly;
        let link = free.or_else(|| working(LinkClass::Metered).filter(|_| pays));
        self.transport
            .request_conn(url, link.filter(|_| self.transport.is_direct()), pays)
    }

    /// Requests a playlist over `conn`, and over another link's connection, which replaces it, where
    /// its own link does not answer.
    async fn request_playlist(
        &self,
        ask: &GetRequest,
        conn: &mut RequestConn,
    ) -> Result<FetchResponse, FetchFault> {
        loop {
            let via = self.transport.egress_link(conn.link.as_deref());
            let via = via.ok_or_else(|| FetchFault::Path("no network is up".into()))?;
            let other = async {
                conn.until_unanswered().await;
                let other = self.playlist_conn(&ask.url);
                match other.link.is_some() && other.link != conn.link {
                    true => other,
                    false => std::future::pending().await,
                }
            };
            let other = tokio::select! {
                answer = exchange(&*conn, ask, &via) => return answer,
                other = other => other,
            };
            conn.avoid_link();
            *conn = other;
        }
    }

    fn learn(&self, url: &Url, list: HlsPlaylist) -> String {
        let mut lists = held(&self.lists);
        let named = list.links.into_iter();
        lists
            .named
            .extend(named.map(|(link, kind)| (link, (kind, url.clone()))));
        if !list.segments.is_empty() {
            self.learn_media(&mut lists, url, list.segments);
        }
        let kept = (list.text.clone(), list.is_complete);
        lists.texts.insert(url.clone(), kept);
        list.text
    }

    fn learn_manifest(&self, url: &Url, manifest: DashManifest) -> String {
        let mut lists = held(&self.lists);
        for (link, kind) in manifest.links {
            lists.named.insert(link, (kind, url.clone()));
        }
        for (of, segments) in manifest.media {
            for segment in &segments {
                let named = (PlaylistLinkKind::Segment, of.clone());
                lists.named.insert(segment.url.clone(), named);
            }
            self.learn_media(&mut lists, &of, segments);
        }
        let kept = (manifest.text.clone(), manifest.is_complete);
        lists.texts.insert(url.clone(), kept);
        manifest.text
    }

    fn learn_media(&self, lists: &mut PlaylistIndex, of: &Url, segments: Vec<MediaSegment>) {
        let media = lists
            .media
            .entry(of.clone())
            .or_insert_with(|| MediaSegments {
                segments: Vec::new(),
                open: BTreeMap::new(),
                title: None,
                at: None,
            });
        media.segments = segments;
        if let Some(at) = media.at.clone() {
            let _ = self.unroll(media, &at);
        }
    }

    /// Opens the segments from `at` on, and closes those long before it.
    fn unroll(&self, media: &mut MediaSegments, at: &Url) -> io::Result<()> {
        let Some(now) = media.segments.iter().position(|segment| segment.url == *at) else {
            return Ok(());
        };
        let from = now.saturating_sub(1);
        let to = media.segments.len().min(now + AHEAD);
        let mut open = BTreeMap::new();
        let mut pieces = Vec::new();
        for segment in &media.segments[from..to] {
            let object = match media.open.get(&segment.url) {
                Some(object) => object.clone(),
                None => StreamObject::open(&self.root, segment.url.clone())?,
            };
            open.insert(segment.url.clone(), object.clone());
            let plays = segment.duration;
            pieces.push(TitlePiece {
                object,
                duration: plays,
            });
        }
        media.open = open;
        if let Some(title) = &media.title {
            title.set_pieces(pieces);
        } else {
            let name = media.segments[now].url.path().to_owned();
            let title = StreamTitle::while_watched(name, pieces, PlaybackMeter::new(self.rate));
            self.feed(title.clone());
            media.title = Some(title);
        }
        Ok(())
    }

    fn segment(&self, url: &Url, of: &Url) -> io::Result<Option<LinkTarget>> {
        let mut lists = held(&self.lists);
        let Some(media) = lists.media.get_mut(of) else {
            return Ok(None);
        };
        if media.at.as_ref() != Some(url) {
            self.unroll(media, url)?;
            media.at = Some(url.clone());
        }
        let object = media.open.get(url).cloned();
        Ok(object
            .zip(media.title.clone())
            .map(|(o, t)| LinkTarget::Stream(o, t)))
    }

    fn beside(&self, url: &Url) -> io::Result<LinkTarget> {
        let mut lists = held(&self.lists);
        let place = match lists.others.get(url) {
            Some(place) => place.clone(),
            None => self.stream(url, url.path(), true)?,
        };
        lists.others.insert(url.clone(), place.clone());
        match place {
            CatalogEntry::Stream(object, title) => Ok(LinkTarget::Stream(object, title)),
            CatalogEntry::Playlist(_) => Ok(nothing()),
        }
    }
}

fn words(fault: FetchFault) -> String {
    match fault {
        FetchFault::Final(failure) => failure.text,
        FetchFault::Origin { text, .. }
        | FetchFault::Path(text)
        | FetchFault::Proxy(text)
        | FetchFault::UntrustedPeer(text)
        | FetchFault::NameNotFound(text)
        | FetchFault::CaptivePortal(text) => text,
    }
}

/// The answer with a playlist or a manifest.
fn told(text: String) -> LinkTarget {
    let kind = match text.starts_with("#EXTM3U") {
        true => playlist::MEDIA_TYPE,
        false => dash::MEDIA_TYPE,
    };
    LinkTarget::Text(text, kind)
}

fn nothing() -> LinkTarget {
    let text = "there is no such link here";
    LinkTarget::Refused(StatusCode::NOT_FOUND, text.to_owned())
}

/// Encodes a name for use in a path.
fn as_path(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
    name.chars()
        .map(|c| if plain(c) { c } else { '-' })
        .collect()
}

impl LinkResolver for LinkCatalog {
    async fn find(&self, path: &str) -> LinkTarget {
        let name = path.split(['?', '#']).next().unwrap_or_default();
        let place = held(&self.entries).get(name).cloned();
        match place {
            Some(CatalogEntry::Stream(object, title)) => return LinkTarget::Stream(object, title),
            Some(CatalogEntry::Playlist(url)) => return self.playlist(&url).await,
            None => {}
        }
        // Only what a playlist named: a link is no way to anywhere else.
        let url = playlist::url_of(path);
        let named = url.and_then(|url| Some((held(&self.lists).named.get(&url).cloned()?, url)));
        let found = match named {
            Some(((PlaylistLinkKind::Playlist, _), url)) => return self.playlist(&url).await,
            Some(((PlaylistLinkKind::Segment, of), url)) => self.segment(&url, &of),
            Some(((PlaylistLinkKind::Other, _), url)) => self.beside(&url).map(Some),
            None => Ok(None),
        };
        match found {
            Ok(found) => found.unwrap_or_else(nothing),
            Err(error) => {
                let text = format!("cannot store it: {error}");
                LinkTarget::Refused(StatusCode::INSUFFICIENT_STORAGE, text)
            }
        }
    }

    fn opened_at(&self) -> BootInstant {
        self.begun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_the_same_after_a_restart_and_another_for_another_url() {
        let root = tempfile::tempdir().unwrap();
        let urls: Vec<Url> = vec!["https://o.example/a".parse().unwrap()];
        let mut note = SavedLink::of(root.path(), &urls);
        assert_eq!(note.token.len(), 32, "128 bits");
        note.port = Some(4711);
        note.save(root.path(), &urls).unwrap();
        let again = SavedLink::of(root.path(), &urls);
        assert_eq!((&again.token, again.port), (&note.token, Some(4711)));
        let others: Vec<Url> = vec!["https://o.example/b".parse().unwrap()];
        assert_ne!(SavedLink::of(root.path(), &others).token, note.token);
        // One that is a link to elsewhere is not believed.
        let path = SavedLink::path(root.path(), &urls);
        std::fs::rename(&path, root.path().join("laid")).unwrap();
        std::os::unix::fs::symlink(root.path().join("laid"), &path).unwrap();
        assert_ne!(SavedLink::of(root.path(), &urls).token, note.token);
    }

    #[test]
    fn names_are_paths() {
        assert_eq!(as_path("a film (1).mp4"), "a-film--1-.mp4");
    }
}
