//! The index of podcasts: databases as Podcast Index publishes them, large ones, damaged ones.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cedos_readycast::{LibraryError, PodcastIndex};
use rusqlite::{Connection, params};

/// A database with some of the columns that Podcast Index publishes.
fn database(folder: &Path) -> (PathBuf, Connection) {
    let file = folder.join("podcastindex_feeds.db");
    let connection = Connection::open(&file).expect("a database");
    connection
        .execute_batch(
            "CREATE TABLE podcasts (id INTEGER PRIMARY KEY, url TEXT NOT NULL UNIQUE, title TEXT,
             lastUpdate INTEGER, link TEXT, dead INTEGER, itunesAuthor TEXT, itunesOwnerName TEXT,
             explicit INTEGER, imageUrl TEXT, language TEXT, episodeCount INTEGER,
             popularityScore INTEGER, description TEXT)",
        )
        .expect("a table");
    (file, connection)
}

fn add(connection: &Connection, row: (&str, &str, &str, u32, u32)) {
    let (url, title, author, popularity, dead) = row;
    connection
        .prepare_cached(
            "INSERT INTO podcasts (url, title, itunesAuthor, popularityScore, dead, language, episodeCount)
             VALUES (?1, ?2, ?3, ?4, ?5, 'en', 7)",
        )
        .and_then(|mut insert| insert.execute(params![url, title, author, popularity, dead]))
        .expect("a row");
}

fn titles(index: &PodcastIndex, words: &str) -> Vec<String> {
    let found = index.search(words, 25).expect("a list");
    found.into_iter().map(|podcast| podcast.title).collect()
}

#[test]
fn podcasts_are_found_by_words_of_title_and_author_the_most_popular_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, connection) = database(folder.path());
    for row in [
        ("https://a.example/f", "Morning News", "Ann", 3, 0),
        ("https://b.example/f", "News of the Morning", "Bob", 9, 0),
        ("https://c.example/f", "Café Über", "Cora News", 1, 0),
        ("https://d.example/f", "Morning News, dead", "Dan", 9, 1),
        ("file:///etc/passwd", "Morning file", "Eve", 9, 0),
        ("https://e.example/f", "", "Eve", 9, 0),
        (
            "https://f.example/f",
            "Evil \u{1b}[31m OR title",
            "Eve",
            0,
            0,
        ),
    ] {
        add(&connection, row);
    }
    let index = PodcastIndex::in_folder(folder.path());
    assert!(!index.exists());
    assert!(index.search("news", 25).is_err());
    let imported = index.import(&file).expect("an index");
    assert_eq!((imported.podcasts, imported.skipped), (4, 3));
    assert!(index.exists());
    assert_eq!(
        titles(&index, "news"),
        ["News of the Morning", "Morning News", "Café Über"]
    );
    // In a row in the title first, although the other is more popular.
    assert_eq!(
        titles(&index, "morning NEWS"),
        ["Morning News", "News of the Morning"]
    );
    assert_eq!(titles(&index, "cafe ub"), ["Café Über"]);
    assert_eq!(titles(&index, "cora"), ["Café Über"]);
    let evil = titles(&index, "evil");
    assert!(!evil[0].contains('\u{1b}'), "{evil:?}");
    let found = &index.search("ann", 25).expect("a list")[0];
    assert_eq!(found.url.as_str(), "https://a.example/f");
    assert_eq!((&*found.language, found.episodes), ("en", Some(7)));
    // No word is an operator.
    for words in [
        "news OR dead",
        "\"",
        "title:news",
        "NEAR(a b)",
        "*",
        "a AND",
        "-news",
        "'",
    ] {
        index.search(words, 25).expect(words);
    }
    assert!(titles(&index, "news OR dead").is_empty());
    assert!(titles(&index, "").is_empty());
}

#[test]
fn what_is_no_index_is_refused_and_the_old_one_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, connection) = database(folder.path());
    add(
        &connection,
        ("https://a.example/f", "Morning News", "", 1, 0),
    );
    drop(connection);
    let index = PodcastIndex::in_folder(folder.path());
    index.import(&file).expect("an index");
    let bad = folder.path().join("bad.db");
    let refused = |why: &str| {
        let error = index.import(&bad).expect_err(why);
        assert!(matches!(error, LibraryError::Index { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(titles(&index, "news"), ["Morning News"]);
    };
    refused("unable to open");
    std::fs::write(&bad, "<html>").expect("written");
    refused("not a database");
    std::fs::remove_file(&bad).expect("removed");
    let other = Connection::open(&bad).expect("a database");
    other
        .execute_batch("CREATE TABLE podcasts (name TEXT)")
        .expect("a table");
    refused("no table `podcasts` with the columns");
    // A view could run on for ever.
    other
        .execute_batch(
            "DROP TABLE podcasts;
             CREATE VIEW podcasts AS WITH RECURSIVE n(url, title) AS
             (SELECT 'https://a.example/', 'x' UNION ALL SELECT url, title FROM n) SELECT * FROM n",
        )
        .expect("a view");
    refused("");
    drop(other);
    // Half of a whole one.
    let bytes = std::fs::read(&file).expect("the database");
    std::fs::write(&bad, &bytes[..bytes.len() / 2]).expect("written");
    assert!(index.import(&bad).is_err());
    assert_eq!(titles(&index, "news"), ["Morning News"]);
    let left = std::fs::read_dir(folder.path()).expect("a folder");
    let left = left.filter(|entry| {
        let name = entry.as_ref().expect("an entry").file_name();
        name.to_string_lossy().contains(".new")
    });
    assert_eq!(left.count(), 0);
}

/// The index of this many podcasts, in `folder`.
fn index_of(podcasts: u32, folder: &Path) -> PodcastIndex {
    let (file, mut connection) = database(folder);
    let words = [
        "morning", "history", "daily", "science", "news", "crime", "music", "garden", "sport",
        "money", "kids", "radio", "night", "story", "talk", "code",
    ];
    let transaction = connection.transaction().expect("one");
    for n in 0..podcasts {
        let word = |at: u32| words[(n / 16_u32.pow(at)) as usize % words.len()];
        let title = format!("The {} {} {} podcast {n}", word(0), word(1), word(2));
        let author = format!("{} studio", word(3));
        add(
            &transaction,
            (
                &format!("https://h{}.example/{n}", n % 977),
                &title,
                &author,
                n % 10,
                0,
            ),
        );
    }
    transaction.commit().expect("stored");
    let index = PodcastIndex::in_folder(folder);
    let begun = Instant::now();
    let imported = index.import(&file).expect("an index");
    eprintln!("{podcasts} imported in {:?}", begun.elapsed());
    assert_eq!(imported.podcasts, u64::from(podcasts));
    index
}

/// Searches, and how many podcasts each finds at least of 25 wanted.
const SEARCHES: [(&str, usize); 6] = [
    // In every title.
    ("the podcast", 25),
    ("p", 25),
    ("morning", 25),
    ("morning history science", 1),
    ("podcast 77", 1),
    ("nothing like this", 0),
];

#[test]
fn a_search_finds_as_many_as_are_wanted() {
    let folder = tempfile::tempdir().expect("a folder");
    let index = index_of(10_000, folder.path());
    for (words, at_least) in SEARCHES {
        let found = index.search(words, 25).expect(words);
        assert!(found.len() >= at_least, "`{words}`: {}", found.len());
        assert!(found.len() <= 25, "`{words}`: {}", found.len());
    }
    assert!(
        index
            .search("nothing like this", 25)
            .expect("a search")
            .is_empty()
    );
}

/// A page is to be there in a tenth of a second, its search in half of that. A loaded machine takes longer, so this is
/// measured, by `cargo test --release -p cedos-readycast --test podcast_index -- --ignored --nocapture`.
#[test]
#[ignore = "measures time"]
fn measure_searches_of_a_hundred_thousand() {
    const SEARCH_MAX: Duration = Duration::from_millis(50);
    let folder = tempfile::tempdir().expect("a folder");
    let index = index_of(100_000, folder.path());
    for (words, _) in SEARCHES {
        let begun = Instant::now();
        let found = index.search(words, 25).expect(words);
        let took = begun.elapsed();
        eprintln!("`{words}`: {} in {took:?}", found.len());
        assert!(took < SEARCH_MAX, "`{words}`: {took:?}");
    }
}
