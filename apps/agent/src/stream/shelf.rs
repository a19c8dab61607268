//! Which link is which object: what was asked for by name, and what its playlists name.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use url::Url;

use super::door::{Found, House};
use super::feed::{Feed, Rules};
use super::object::Object;
use super::pace::Pace;
use super::roads::Roads;
use super::store::{self, fresh_name};
use super::title::{Piece, Title};
use crate::fetch::clock::Moment;
use crate::fetch::filename;

/// What makes a link the same after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkNote {
    /// What nobody can guess.
    pub token: String,
    /// Where the door was.
    pub port: Option<u16>,
}

impl LinkNote {
    fn path(root: &Path, urls: &[Url]) -> PathBuf {
        let urls: Vec<&str> = urls.iter().map(Url::as_str).collect();
        store::folder_of(root, &urls.join("\n")).with_extension("link")
    }

    /// Of these URLs, as it was; a fresh one where there was none.
    pub fn of(root: &Path, urls: &[Url]) -> LinkNote {
        let lying = std::fs::read(LinkNote::path(root, urls)).ok();
        let lying = lying.and_then(|bytes| serde_json::from_slice::<LinkNote>(&bytes).ok());
        // Half a token is easier to guess than none.
        let lying = lying.filter(|note| note.token.len() == fresh_name().len());
        lying.unwrap_or_else(|| LinkNote {
            token: fresh_name(),
            port: None,
        })
    }

    /// Keeps it for the next time.
    ///
    /// # Errors
    /// From the disk.
    pub fn keep(&self, root: &Path, urls: &[Url]) -> io::Result<()> {
        store::replace(&LinkNote::path(root, urls), &serde_json::to_vec(self)?)
    }
}

/// What one link leads to.
struct Place {
    object: Arc<Object>,
    title: Arc<Title>,
}

/// All links of a door.
pub struct Shelf {
    root: PathBuf,
    roads: Arc<Roads>,
    rules: Rules,
    rate: Option<f64>,
    begun: Moment,
    stop: watch::Receiver<bool>,
    places: Mutex<BTreeMap<String, Place>>,
    feeds: Mutex<JoinSet<()>>,
}

impl Shelf {
    /// Over these roads, keeping what it holds below `root`. `rate`: bytes a second of what is watched,
    /// where the user said it.
    pub fn new(
        root: PathBuf,
        roads: Arc<Roads>,
        rules: Rules,
        rate: Option<f64>,
        stop: watch::Receiver<bool>,
    ) -> Arc<Shelf> {
        Arc::new(Shelf {
            root,
            roads,
            rules,
            rate,
            begun: Moment::now(),
            stop,
            places: Mutex::default(),
            feeds: Mutex::default(),
        })
    }

    /// Puts a URL up; the name of its link.
    ///
    /// # Errors
    /// From the disk; `WouldBlock` while another program has it.
    pub fn put_up(&self, url: &Url) -> io::Result<String> {
        let object = Object::open(&self.root, url.clone())?;
        let own = filename::from_url(url);
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = |name: &String| places.contains_key(name);
        let others = (2..).map(|n| format!("{n}-{own}"));
        let name = std::iter::once(own.clone())
            .chain(others)
            .find(|name| !taken(name))
            .expect("there are names enough");
        let name = as_path(&name);
        let plays = self.rules.plays;
        let piece = Piece {
            object: object.clone(),
            plays,
        };
        let title = Title::new(name.clone(), vec![piece], Pace::new(self.rate));
        self.feed(title.clone());
        places.insert(name.clone(), Place { object, title });
        Ok(name)
    }

    fn feed(&self, title: Arc<Title>) {
        let feed = Feed::new(title, self.roads.clone(), self.rules.clone(), self.begun);
        let mut feeds = self.feeds.lock().unwrap_or_else(PoisonError::into_inner);
        feeds.spawn(feed.run(self.stop.clone()));
    }

    /// What is watched, by the names of its links.
    pub fn titles(&self) -> Vec<Arc<Title>> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.values().map(|place| place.title.clone()).collect()
    }

    /// Waits until all feeds have ended, after they were told to stop.
    pub async fn settled(&self) {
        let mut feeds =
            std::mem::take(&mut *self.feeds.lock().unwrap_or_else(PoisonError::into_inner));
        while feeds.join_next().await.is_some() {}
    }
}

/// A name as a path can have it.
fn as_path(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
    let name: String = name
        .chars()
        .map(|c| if plain(c) { c } else { '-' })
        .collect();
    name
}

impl House for Shelf {
    async fn find(&self, path: &str) -> Found {
        let name = path.split(['?', '#']).next().unwrap_or_default();
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        match places.get(name) {
            Some(place) => Found::Stream(place.object.clone(), place.title.clone()),
            None => Found::Refused(
                StatusCode::NOT_FOUND,
                "there is no such link here".to_owned(),
            ),
        }
    }

    fn begun(&self) -> Moment {
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
        let mut note = LinkNote::of(root.path(), &urls);
        assert_eq!(note.token.len(), 32, "128 bits");
        note.port = Some(4711);
        note.keep(root.path(), &urls).unwrap();
        let again = LinkNote::of(root.path(), &urls);
        assert_eq!((&again.token, again.port), (&note.token, Some(4711)));
        let others: Vec<Url> = vec!["https://o.example/b".parse().unwrap()];
        assert_ne!(LinkNote::of(root.path(), &others).token, note.token);
    }

    #[test]
    fn names_are_paths() {
        assert_eq!(as_path("a film (1).mp4"), "a-film--1-.mp4");
    }
}
