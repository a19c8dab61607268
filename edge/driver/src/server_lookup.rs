//! The addresses of a server's name. If the resolver does not answer, its last addresses are used:
//! a lookup uses the route that the system prefers, which may be a Wi-Fi that does not work.
//!
//! ```text
//!  resolver asked ── answer within 0.25 s ─────────────▶ its addresses, remembered
//!        │
//!        └── none, or an error ── remembered before? ──▶ those; a later answer replaces them, and
//!                                       │                after an error links that change ask again
//!                                       └── no ────────▶ wait for the resolver
//! ```
//!
//! An outdated address does no harm: the server proves that it has the expected key. Lookups are
//! not sent over each link separately: before there is a session it is not known which links may be
//! used, and the system's own resolver knows which names each network has.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;

/// How long to wait for the resolver before remembered addresses are used. Less: an answer of a
/// working network is ignored. More: a dead network delays longer.
const RESOLVER_WAIT: Duration = Duration::from_millis(250); // RFC 8305 §8, Connection Attempt Delay
/// The pauses after which the resolver is asked again after links changed: a network's name servers may
/// be known later than its addresses.
const ASKED_AGAIN_AFTER_S: [u64; 6] = [1, 2, 4, 8, 16, 32]; // a guess
/// The maximum number of remembered names.
const NAMES_MAX: usize = 64; // a guess: a user has one proxy or two
/// The maximum number of remembered addresses of a name.
const ADDRESSES_MAX: usize = 8;
/// The longest file that is read.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// The addresses of a server.
pub(crate) struct ServerAddresses {
    /// The addresses to use now.
    pub(crate) found: Vec<SocketAddr>,
    /// The resolver's later answer, if `found` was remembered.
    pub(crate) later: Option<oneshot::Receiver<Vec<SocketAddr>>>,
    /// Tells that links changed: a resolver that failed may answer now.
    pub(crate) links_changed: Arc<Notify>,
}

/// Looks up a name, or reads a literal address.
///
/// # Errors
/// The resolver's error, if no address is remembered.
pub(crate) async fn server_addresses(host: &str, port: u16) -> io::Result<ServerAddresses> {
    if let Ok(literal) = host.parse::<IpAddr>() {
        return Ok(ServerAddresses {
            found: vec![SocketAddr::new(literal, port)],
            later: None,
            links_changed: Arc::default(),
        });
    }
    let name = host.to_owned();
    let resolver = move || {
        let name = name.clone();
        async move {
            let found = tokio::net::lookup_host((name.as_str(), port)).await?;
            Ok(found.collect())
        }
    };
    race(host, port, resolver, memory_file()).await
}

/// Waits for the resolver, or uses the addresses in `memory`.
async fn race<F>(
    host: &str,
    port: u16,
    resolver: impl Fn() -> F + Send + 'static,
    memory: Option<PathBuf>,
) -> io::Result<ServerAddresses>
where
    F: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
{
    let (answered, mut answer) = oneshot::channel();
    let (mut sender, later) = oneshot::channel();
    let links_changed = Arc::<Notify>::default();
    let name = host.to_owned();
    let file = memory.clone();
    let asked_again = links_changed.clone();
    // It continues without a waiting caller, so that the next lookup has the result.
    tokio::spawn(async move {
        let remember = |found: &Vec<SocketAddr>| {
            if let Some(file) = &file {
                remember(file, &name, found);
            }
        };
        let found = match resolver().await {
            Ok(found) => {
                remember(&found);
                let _ = answered.send(Ok(found.clone()));
                found
            }
            Err(error) => {
                let _ = answered.send(Err(error));
                let again = ask_again(resolver, &asked_again);
                let found = tokio::select! {
                    found = again => found,
                    () = sender.closed() => return,
                };
                remember(&found);
                found
            }
        };
        let _ = sender.send(found);
    });
    let now = |found| ServerAddresses {
        found,
        later: None,
        links_changed: Arc::default(),
    };
    let failed = tokio::select! {
        found = &mut answer => match found {
            Ok(Ok(found)) => return Ok(now(found)),
            Ok(Err(error)) => Some(error),
            Err(_) => Some(io::ErrorKind::Interrupted.into()),
        },
        () = sleep(RESOLVER_WAIT) => None,
    };
    let known = memory.map(|file| read(&file)).unwrap_or_default();
    let known = known.get(host).filter(|known| !known.is_empty());
    match (known, failed) {
        (Some(known), _) => {
            tracing::info!(%host, "the resolver does not answer; using the address of last time");
            Ok(ServerAddresses {
                found: known.iter().map(|ip| SocketAddr::new(*ip, port)).collect(),
                later: Some(later),
                links_changed,
            })
        }
        (None, Some(error)) => Err(error),
        (None, None) => match answer.await {
            Ok(found) => found.map(now),
            Err(_) => Err(io::ErrorKind::Interrupted.into()),
        },
    }
}

/// Asks a resolver that failed again whenever links have changed, at once and after pauses, until it
/// answers.
async fn ask_again<F>(resolver: impl Fn() -> F, links_changed: &Notify) -> Vec<SocketAddr>
where
    F: Future<Output = io::Result<Vec<SocketAddr>>>,
{
    links_changed.notified().await;
    'changed: loop {
        for pause_s in ASKED_AGAIN_AFTER_S {
            if let Ok(found) = resolver().await {
                return found;
            }
            tokio::select! {
                () = sleep(Duration::from_secs(pause_s)) => {}
                () = links_changed.notified() => continue 'changed,
            }
        }
        links_changed.notified().await;
    }
}

/// The file of remembered addresses: `$XDG_CACHE_HOME/cedos/servers`, else
/// `~/.cache/cedos/servers`.
fn memory_file() -> Option<PathBuf> {
    // XDG Base Directory Specification: a relative path must be ignored.
    let absolute = |name: &str| {
        let path = std::env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    cache.map(|cache| cache.join("cedos/servers"))
}

/// Reads the remembered addresses: a line for each name. A file that cannot be read counts as
/// empty.
fn read(file: &Path) -> BTreeMap<String, Vec<IpAddr>> {
    let is_small = std::fs::metadata(file).is_ok_and(|found| found.len() <= FILE_BYTES_MAX);
    if !is_small {
        return BTreeMap::new();
    }
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let addresses = words.filter_map(|word| word.parse().ok());
        Some((name, addresses.take(ADDRESSES_MAX).collect()))
    };
    text.lines().filter_map(line).take(NAMES_MAX).collect()
}

/// Remembers the addresses of a name. A failure to write is ignored: the file is needed only if the
/// resolver does not answer.
fn remember(file: &Path, name: &str, found: &[SocketAddr]) {
    let mut addresses: Vec<IpAddr> = Vec::new();
    // This machine's own addresses can be resolved without a network.
    let elsewhere = found.iter().map(SocketAddr::ip);
    for address in elsewhere.filter(|address| !address.is_loopback()) {
        if addresses.len() < ADDRESSES_MAX && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    let mut known = read(file);
    if addresses.is_empty() || known.get(name) == Some(&addresses) {
        return;
    }
    if known.len() >= NAMES_MAX && !known.contains_key(name) {
        known.pop_first();
    }
    known.insert(name.to_owned(), addresses);
    let lines = known.iter().map(|(name, addresses)| {
        let words = addresses.iter().map(|address| format!(" {address}"));
        format!("{name}{}\n", words.collect::<String>())
    });
    let text: String = lines.collect();
    let write = || {
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // Written atomically, also with concurrent processes.
        let new = file.with_extension(std::process::id().to_string());
        std::fs::write(&new, text)?;
        std::fs::rename(&new, file)
    };
    if let Err(error) = write() {
        tracing::debug!(%error, "the address of the server is not remembered");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    const NAME: &str = "prox.example";

    fn at(ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), 443)
    }

    #[tokio::test]
    async fn a_resolver_that_never_answers_delays_by_a_quarter_of_a_second_once_a_name_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("deep/servers");
        let both = vec![at("192.0.2.1"), at("2001:db8::1")];
        let (answer, file) = (both.clone(), Some(memory.clone()));
        let first = race(NAME, 443, move || ready(Ok(answer.clone())), file).await;
        assert_eq!(first.unwrap().found, both);
        let silent = || pending::<io::Result<Vec<SocketAddr>>>();
        let began = std::time::Instant::now();
        let again = race(NAME, 8443, silent, Some(memory.clone()))
            .await
            .unwrap();
        assert!(began.elapsed() >= RESOLVER_WAIT);
        let ports: Vec<u16> = again.found.iter().map(SocketAddr::port).collect();
        assert_eq!(ports, [8443, 8443]);
        assert!(again.later.is_some());
        let failing = || {
            ready(Err(io::Error::other(
                "temporary failure in name resolution",
            )))
        };
        let again = race(NAME, 443, failing, Some(memory)).await.unwrap();
        assert_eq!(again.found, both);
    }

    #[tokio::test]
    async fn a_resolver_that_failed_is_asked_again_when_links_changed() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("servers");
        remember(&memory, NAME, &[at("192.0.2.1")]);
        let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = asked.clone();
        let resolver = move || {
            let times = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let answer = match times {
                0 | 1 => Err(io::Error::other("temporary failure in name resolution")),
                _ => Ok(vec![at("192.0.2.9")]),
            };
            ready(answer)
        };
        let known = race(NAME, 443, resolver, Some(memory.clone()))
            .await
            .unwrap();
        assert_eq!(known.found, [at("192.0.2.1")]);
        let mut later = known.later.expect("the resolver failed");
        assert!(later.try_recv().is_err(), "no link changed");
        let times = || asked.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(times(), 1);
        known.links_changed.notify_one();
        assert_eq!(later.await.unwrap(), [at("192.0.2.9")]);
        assert_eq!(times(), 3, "a network's name servers come a moment later");
        assert_eq!(read(&memory)[NAME], [at("192.0.2.9").ip()]);
    }

    #[tokio::test(start_paused = true)]
    async fn links_that_change_during_a_pause_ask_at_once_and_begin_the_pauses_anew() {
        let asked = std::sync::Mutex::new(Vec::new());
        let began = tokio::time::Instant::now();
        let resolver = || {
            let mut asked = asked.lock().unwrap();
            asked.push(began.elapsed().as_secs());
            let answer = match asked.len() {
                6 => Ok(vec![at("192.0.2.9")]),
                _ => Err(io::Error::other("temporary failure in name resolution")),
            };
            ready(answer)
        };
        let links_changed = Notify::new();
        let changes = async {
            links_changed.notify_one();
            // sleep: in paused time
            sleep(Duration::from_secs(5)).await;
            links_changed.notify_one();
            pending::<()>().await;
        };
        tokio::select! {
            found = ask_again(resolver, &links_changed) => assert_eq!(found, [at("192.0.2.9")]),
            () = changes => unreachable!(),
        }
        assert_eq!(*asked.lock().unwrap(), [0, 1, 3, 5, 6, 8]);
    }

    #[tokio::test]
    async fn what_the_resolver_says_late_is_said_later_and_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("servers");
        remember(&memory, NAME, &[at("192.0.2.1")]);
        let (answer, late) = oneshot::channel();
        let late = std::sync::Mutex::new(Some(late));
        let resolver = move || {
            let late = late.lock().unwrap().take().expect("it is asked once");
            async move { Ok(late.await.expect("an answer")) }
        };
        let known = race(NAME, 443, resolver, Some(memory.clone()))
            .await
            .unwrap();
        assert_eq!(known.found, [at("192.0.2.1")]);
        answer.send(vec![at("192.0.2.9")]).unwrap();
        let later = known.later.expect("it was remembered").await.unwrap();
        assert_eq!(later, [at("192.0.2.9")]);
        assert_eq!(read(&memory)[NAME], [at("192.0.2.9").ip()]);
    }

    #[tokio::test]
    async fn a_name_that_was_never_found_is_the_resolvers_to_find() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("servers");
        let failing = || ready(Err(io::Error::other("no such host")));
        let error = race(NAME, 443, failing, Some(memory.clone())).await;
        assert_eq!(error.err().unwrap().to_string(), "no such host");
        let slow = || async {
            // sleep: a resolver that is slower than the wait is the subject
            sleep(RESOLVER_WAIT * 2).await;
            Ok(vec![at("192.0.2.1")])
        };
        let found = race(NAME, 443, slow, Some(memory)).await.unwrap();
        assert_eq!(found.found, [at("192.0.2.1")]);
        assert!(found.later.is_none());
    }

    #[test]
    fn the_memory_is_bounded_and_whatever_is_not_an_address_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("servers");
        for n in 0..NAMES_MAX + 9 {
            remember(&memory, &format!("n{n:03}.example"), &[at("192.0.2.1")]);
        }
        let known = read(&memory);
        assert_eq!(known.len(), NAMES_MAX);
        assert!(known.contains_key("n072.example"));
        std::fs::write(&memory, "a.example 192.0.2.1 nonsense\n\n").unwrap();
        remember(&memory, "localhost", &[at("127.0.0.1"), at("::1")]);
        assert_eq!(read(&memory)["a.example"], [at("192.0.2.1").ip()]);
        assert_eq!(read(&memory).len(), 1);
    }
}
