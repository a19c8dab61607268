//! The links as transfers see them: what the system says, with what the user says each costs.
//!
//! Whoever knows more of a network than the kernel does (is it metered, does it lead anywhere) puts
//! it between: [`Roads::new`] takes any stream of links.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use d2tp_links::{Class, Link};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::fetch::jobs;

/// What the user said of links, by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Said(BTreeMap<String, String>);

/// The links, and what the user said of them.
pub struct Roads {
    said: watch::Sender<Said>,
    links: watch::Receiver<Arc<Vec<Link>>>,
    file: Option<PathBuf>,
}

fn class_of(word: &str) -> Option<Class> {
    [Class::Free, Class::Metered, Class::Roaming]
        .into_iter()
        .find(|class| class.to_string() == word)
}

fn apply(links: &[Link], said: &Said) -> Arc<Vec<Link>> {
    let mut links = links.to_vec();
    for link in &mut links {
        if let Some(class) = said.0.get(&link.name).and_then(|word| class_of(word)) {
            link.class.class = class;
            link.class.because = "you said so (cedos net set)".into();
        }
    }
    Arc::new(links)
}

impl Roads {
    /// Over what the system says. Must be called on a runtime.
    pub fn new(system: watch::Receiver<Arc<Vec<Link>>>) -> Roads {
        let file = jobs::state().ok().map(|state| state.join("links.json"));
        let text = file.as_ref().and_then(|file| std::fs::read(file).ok());
        let known: Said = text
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        let first = apply(&system.borrow(), &known);
        let (publish, links) = watch::channel(first);
        let (said, mut heard) = watch::channel(known);
        let mut system = system;
        tokio::spawn(async move {
            loop {
                let going = tokio::select! {
                    changed = system.changed() => changed.is_ok(),
                    changed = heard.changed() => changed.is_ok(),
                };
                if !going {
                    return;
                }
                let now = apply(&system.borrow_and_update(), &heard.borrow_and_update());
                publish.send_if_modified(|links| {
                    let changed = **links != *now;
                    *links = now;
                    changed
                });
            }
        });
        Roads { said, links, file }
    }

    /// The links now and as they change.
    pub fn links(&self) -> watch::Receiver<Arc<Vec<Link>>> {
        self.links.clone()
    }

    /// Takes the user's word for what a link costs, or takes it back (`auto`).
    ///
    /// # Errors
    /// The word is none.
    pub fn set(&self, name: &str, word: &str) -> Result<(), String> {
        if word != "auto" && class_of(word).is_none() {
            return Err(format!("`{word}` is none of free, metered, roaming, auto"));
        }
        self.said.send_modify(|said| {
            if word == "auto" {
                said.0.remove(name);
            } else {
                said.0.insert(name.to_owned(), word.to_owned());
            }
        });
        let Some(file) = &self.file else {
            return Ok(());
        };
        let written = file
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| jobs::replace(file, &*self.said.borrow()));
        written.map_err(|error| format!("it holds until the agent ends: {error}"))
    }
}
