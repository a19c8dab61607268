//! `cedos prox feeds`: links for a podcast app, which then downloads by the proxy.
//!
//! ```text
//!  OPML of any program, addresses ─▶ the proxy's control socket ─▶ a link for each ─▶ OPML for the app
//! ```

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use cedos_prox::ControlRequest;
use cedos_readycast::{OPML_FEEDS_MAX, OpmlFeed, read_opml, write_feed_list};
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use serde_json::{Value, json};
use url::Url;

use super::which_proxy::WhichProxy;

/// Feeds that one request to the proxy names: its lines are 1 MB at most, and an address has 4 kB.
const FEEDS_AT_ONCE: usize = 200;

/// The most bytes of a list that is read.
const LIST_BYTES_MAX: u64 = 50 << 20; // as of feeds

/// Make links to podcast feeds for an app that speaks no D2TP, such as AntennaPod on a phone
///
/// Prints a list (OPML) for the app to import. It then fetches feeds and episodes by this proxy, which has one copy of each
/// episode for it, whatever the server sends at the next request. Needs `cedos prox` with --tcp-listen and --feeds-url.
/// Whoever has the list can fetch these feeds here: `cedos prox client remove NAME` withdraws all links of NAME.
#[derive(Debug, Args)]
pub struct FeedsArgs {
    /// What the client is called, such as the phone; the first time, it becomes one
    name: String,

    /// Addresses of feeds
    #[arg(value_name = "FEED", required_unless_present = "opml")]
    feeds: Vec<Url>,

    /// List of feeds (OPML), as podcast apps and `cedos cast opml export` write it; -: standard input
    #[arg(long, value_name = "FILE")]
    opml: Option<PathBuf>,

    /// File to write, which must not exist [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    #[command(flatten)]
    which: WhichProxy,

    /// Print one JSON object instead of the list: `client`, `key`, `feeds` (each with `title`, `feed`, `link` or `refused`)
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// Carries it out.
///
/// # Errors
/// The list cannot be read or written, no such proxy runs, or it says no.
pub(super) async fn feeds(args: FeedsArgs) -> anyhow::Result<()> {
    let mut feeds: Vec<OpmlFeed> = Vec::new();
    for url in &args.feeds {
        feeds.push(OpmlFeed {
            url: url.clone(),
            title: String::new(),
        });
    }
    if let Some(path) = &args.opml {
        let import = read_opml(&read_list(path)?)
            .with_context(|| format!("cannot read the list {}", path.display()))?;
        for why in &import.skipped {
            print_stderr(&format!("left out: {why}"));
        }
        feeds.extend(import.feeds);
    }
    if feeds.len() > OPML_FEEDS_MAX {
        bail!(
            "{} feeds are more than the {OPML_FEEDS_MAX} of a list",
            feeds.len()
        );
    }
    if feeds.is_empty() {
        bail!("there is no feed in the list");
    }
    let mut linked = Vec::new();
    let mut client = (Value::Null, Value::Null);
    for part in feeds.chunks(FEEDS_AT_ONCE) {
        let request = ControlRequest::Feeds {
            client: args.name.clone(),
            feeds: part.iter().map(|feed| feed.url.to_string()).collect(),
        };
        let answer = args.which.ask(request).await?;
        client = (answer["client"].clone(), answer["key"].clone());
        let answers = answer["feeds"].as_array().into_iter().flatten();
        linked.extend(part.iter().zip(answers.cloned()));
    }
    if args.json {
        let shown = linked.iter().map(|(feed, answer)| {
            json!({"title": feed.title, "feed": feed.url.as_str(), "link": answer["link"],
                   "refused": answer["refused"]})
        });
        let shown: Vec<Value> = shown.collect();
        let told = json!({"client": client.0, "key": client.1, "feeds": shown});
        print_stdout(&told.to_string());
        return Ok(());
    }
    let mut list = Vec::new();
    for (feed, answer) in &linked {
        match answer["link"].as_str().map(Url::parse) {
            Some(Ok(link)) => list.push((title_of(feed), link)),
            _ => print_stderr(&format!(
                "left out: {}: {}",
                without_password(&feed.url),
                answer["refused"]
                    .as_str()
                    .unwrap_or("the proxy gave no link")
            )),
        }
    }
    if list.is_empty() {
        bail!("the proxy gave a link to none of the feeds");
    }
    let text = write_feed_list(
        list.iter()
            .map(|(title, link)| (title.as_str(), link.clone())),
    );
    match &args.output {
        None => print_stdout(&text),
        Some(path) => {
            write_new(path, &text).with_context(|| format!("cannot write {}", path.display()))?
        }
    }
    print_stderr(&format!(
        "{} links of {}: import the list in the app. To withdraw them: cedos prox client remove {}",
        list.len(),
        args.name,
        args.name
    ));
    Ok(())
}

fn read_list(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = match path == Path::new("-") {
        true => std::io::stdin()
            .take(LIST_BYTES_MAX + 1)
            .read_to_end(&mut bytes),
        false => std::fs::File::open(path)
            .and_then(|file| file.take(LIST_BYTES_MAX + 1).read_to_end(&mut bytes)),
    };
    read.with_context(|| format!("cannot read the list {}", path.display()))?;
    Ok(bytes)
}

/// Writes a file that only its owner can read: whoever has the links can use them.
fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

fn without_password(url: &Url) -> String {
    let mut url = url.clone();
    let _ = (url.set_username(""), url.set_password(None));
    url.into()
}

/// The title of a feed in the list; without one, where it is.
fn title_of(feed: &OpmlFeed) -> String {
    match feed.title.as_str() {
        "" => without_password(&feed.url),
        title => title.to_owned(),
    }
}
