//! An index of podcasts on this device, which is searched without a network.
//!
//! ```text
//!  podcastindex_feeds.db ── import ──▶ index.sqlite.new ── whole ──▶ index.sqlite ── search ──▶ IndexedPodcast
//!  (table `podcasts`)      the most popular first                    (FTS5)
//! ```
//!
//! Podcast Index publishes all its feeds as one SQLite file, as `podcastindex_feeds.db` in an archive. The index keeps
//! title, author, address and language of each. It is a database of its own beside the library: it can be made anew at
//! any time, and a copy of the library need not have it.
//!
//! The order of the rows is their popularity, so that a search stops at the first rows that fit, however many do.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cedos_text::RemoteText;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, params};
use serde::Serialize;
use url::Url;

use crate::library::LibraryError;

/// Name of the index within the folder of the library.
const FILE_NAME: &str = "index.sqlite";

/// The maximum number of podcasts of an index.
pub const INDEX_PODCASTS_MAX: u64 = 20_000_000; // a guess: Podcast Index has 4.5 million

/// Words of a search that count; further ones are left out.
const WORDS_MAX: usize = 16;

/// The maximum number of bytes of an address.
const URL_BYTES_MAX: usize = 2_048; // a guess: browsers take so many

const SCHEMA: &str = "
    CREATE VIRTUAL TABLE podcasts USING fts5 (
        title, author, url UNINDEXED, language UNINDEXED, episodes UNINDEXED,
        tokenize = \"unicode61 remove_diacritics 2\", prefix = '2 3');
";

/// A podcast of the index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IndexedPodcast {
    /// Title, never empty.
    pub title: String,
    /// The podcast's author; may be empty.
    pub author: String,
    /// Address of its feed.
    pub url: Url,
    /// Language, as its feed says it; may be empty.
    pub language: String,
    /// The number of episodes, as the index counts them.
    pub episodes: Option<u32>,
}

/// What came of an import of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IndexImport {
    /// Podcasts that can be found now.
    pub podcasts: u64,
    /// Entries without a title or an address that can be read, and those that are marked as dead.
    pub skipped: u64,
}

/// The index of podcasts in a folder.
#[derive(Clone, Debug)]
pub struct PodcastIndex {
    file: PathBuf,
}

impl PodcastIndex {
    /// The index beside the library in this folder, whether it is there or not.
    pub fn in_folder(folder: &Path) -> PodcastIndex {
        PodcastIndex {
            file: folder.join(FILE_NAME),
        }
    }

    /// Whether there is an index.
    pub fn exists(&self) -> bool {
        self.file.exists()
    }

    /// When the index was made; none if there is none.
    pub fn made_at(&self) -> Option<SystemTime> {
        self.file.metadata().ok()?.modified().ok()
    }

    /// Removes the index, if there is one.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self) -> Result<(), LibraryError> {
        remove_database(&self.file)
    }

    /// Makes the index from a database of Podcast Index. The one that was there is replaced when the new one is whole.
    ///
    /// # Errors
    /// The database cannot be read or has no such table, or there is no room for the index.
    pub fn import(&self, database: &Path) -> Result<IndexImport, LibraryError> {
        let new = self.file.with_extension("sqlite.new");
        remove_database(&new)?;
        let imported = import_into(&new, database);
        let stored = imported.and_then(|imported| {
            std::fs::rename(&new, &self.file).map_err(|error| refused(&self.file, &error))?;
            Ok(imported)
        });
        if stored.is_err() {
            // What is left of it is removed by the next import too.
            let _ = remove_database(&new);
        }
        stored
    }

    /// Podcasts whose title or author has all words, or words that begin so for the last one; the most popular first,
    /// those with the words in a row in the title before all others.
    ///
    /// # Errors
    /// There is no index, or it is damaged.
    pub fn search(&self, words: &str, limit: usize) -> Result<Vec<IndexedPodcast>, LibraryError> {
        let words = query_words(words);
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let connection = read_only(&self.file)?;
        let mut query = connection.prepare(
            "SELECT title, author, url, language, episodes FROM podcasts WHERE podcasts MATCH ?1
             ORDER BY rowid LIMIT ?2",
        )?;
        let (mut found, mut known) = (Vec::new(), HashSet::new());
        let in_a_row = format!("title : \"{}\" *", words.join(" "));
        let anywhere = format!("\"{}\" *", words.join("\" AND \""));
        for wanted in [in_a_row, anywhere] {
            let rows = query.query_map(params![wanted, limit as i64], |row| {
                Ok((
                    row.get(0)?,
                    row.get(1)?,
                    row.get::<_, String>(2)?,
                    row.get(3)?,
                    row.get(4)?,
                ))
            })?;
            for row in rows {
                let (title, author, url, language, episodes) = row?;
                if let Ok(url) = url.parse::<Url>()
                    && found.len() < limit
                    && known.insert(url.clone())
                {
                    found.push(IndexedPodcast {
                        title,
                        author,
                        url,
                        language,
                        episodes,
                    });
                }
            }
        }
        Ok(found)
    }
}

/// The words of a search as FTS5 tokenises them: only letters and digits, so that no word is an operator.
fn query_words(words: &str) -> Vec<String> {
    let words = words.split(|c: char| !c.is_alphanumeric());
    let words = words.filter(|word| !word.is_empty());
    words.take(WORDS_MAX).map(str::to_owned).collect()
}

fn refused(file: &Path, why: &dyn std::fmt::Display) -> LibraryError {
    LibraryError::Index {
        file: file.to_owned(),
        why: why.to_string(),
    }
}

fn remove_database(file: &Path) -> Result<(), LibraryError> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(refused(file, &error)),
        _ => Ok(()),
    }
}

/// Opens a database that a stranger may have made: nothing in it is carried out.
fn read_only(file: &Path) -> Result<Connection, LibraryError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags);
    let connection = connection.map_err(|error| refused(file, &error))?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    Ok(connection)
}

/// The columns of a row of Podcast Index that are kept; those that a database lacks are null.
struct SourceColumns {
    author: &'static str,
    language: &'static str,
    episodes: &'static str,
    popularity: &'static str,
    is_dead: &'static str,
}

impl SourceColumns {
    fn of(connection: &Connection, file: &Path) -> Result<SourceColumns, LibraryError> {
        let mut query = connection
            .prepare("SELECT name FROM pragma_table_info('podcasts')")
            .map_err(|error| refused(file, &error))?;
        let names = query.query_map([], |row| row.get::<_, String>(0));
        let names: HashSet<String> = names
            .and_then(Iterator::collect)
            .map_err(|error| refused(file, &error))?;
        let one_of = |columns: &[&'static str]| {
            let mut columns = columns.iter().copied();
            columns.find(|name| names.contains(*name)).unwrap_or("NULL")
        };
        if one_of(&["url"]) == "NULL" || one_of(&["title"]) == "NULL" {
            let why = "it has no table `podcasts` with the columns `url` and `title`";
            return Err(refused(file, &why));
        }
        Ok(SourceColumns {
            author: one_of(&["itunesAuthor", "author"]),
            language: one_of(&["language"]),
            episodes: one_of(&["episodeCount"]),
            popularity: one_of(&["popularityScore"]),
            is_dead: one_of(&["dead"]),
        })
    }
}

fn import_into(new: &Path, database: &Path) -> Result<IndexImport, LibraryError> {
    let source = read_only(database)?;
    let SourceColumns {
        author,
        language,
        episodes,
        popularity,
        is_dead,
    } = SourceColumns::of(&source, database)?;
    let mut query = source
        .prepare(&format!(
            "SELECT url, title, {author}, {language}, {episodes}, ifnull({is_dead}, 0) FROM podcasts
             ORDER BY ifnull({popularity}, 0) DESC, ifnull({episodes}, 0) DESC LIMIT ?1"
        ))
        .map_err(|error| refused(database, &error))?;
    private_file(new).map_err(|error| refused(new, &error))?;
    let mut index = Connection::open(new)?;
    // It is made anew if this one is lost.
    index.pragma_update(None, "journal_mode", "off")?;
    index.pragma_update(None, "synchronous", "off")?;
    index.execute_batch(SCHEMA)?;
    let transaction = index.transaction()?;
    let mut imported = IndexImport::default();
    {
        let mut insert = transaction.prepare(
            "INSERT INTO podcasts (title, author, url, language, episodes)
             VALUES (?1, ?2, ?3, ?4, ?5)",
        )?;
        let mut rows = query.query([INDEX_PODCASTS_MAX as i64])?;
        loop {
            let row = rows.next().map_err(|error| refused(database, &error))?;
            let Some(row) = row else { break };
            let raw = |column: usize| row.get_ref(column).ok()?.as_str().ok();
            let text = |column: usize| raw(column).map(plain).unwrap_or_default();
            let number = |column: usize| row.get::<_, i64>(column).ok();
            let url = raw(0).filter(|text| text.len() <= URL_BYTES_MAX);
            let url = url.and_then(|text| text.trim().parse::<Url>().ok());
            let url = url.filter(|url| matches!(url.scheme(), "http" | "https"));
            let title = text(1);
            let is_dead = number(5).is_some_and(|dead| dead != 0);
            let Some(url) = url.filter(|_| !title.is_empty() && !is_dead) else {
                imported.skipped += 1;
                continue;
            };
            let episodes = number(4).and_then(|n| u32::try_from(n).ok());
            insert.execute(params![title, text(2), url.as_str(), text(3), episodes])?;
            imported.podcasts += 1;
        }
    }
    transaction.commit()?;
    index.execute_batch("INSERT INTO podcasts (podcasts) VALUES ('optimize')")?;
    drop(index);
    let synced = OpenOptions::new().write(true).open(new);
    synced
        .and_then(|file| file.sync_all())
        .map_err(|error| refused(new, &error))?;
    Ok(imported)
}

/// A text of a stranger on one line.
fn plain(text: &str) -> String {
    RemoteText::new(text.trim()).as_str().to_owned()
}

/// Makes an empty file that only its owner can read.
pub(crate) fn private_file(file: &Path) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(file).map(drop)
}
