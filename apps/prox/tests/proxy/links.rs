//! Links for podcast apps: feeds whose enclosures are links, and one copy of each episode, as curl gets them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cedos_lab_rig::missing_tool::is_installed;
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, reply};
use cedos_lab_rig::wait::{until, within};
use cedos_prox::{Prox, ProxConfig, SystemResolver, TcpFlowListener, serve};
use d2tp_driver::{EndpointConfig, HibernationOptions, Journal, SecretKey, Server, ServerOptions};
use tokio::process::Command;
use url::Url;

/// Bytes of each episode.
const EPISODE_BYTES: usize = 600_000;

/// The address below which the tests' links lie. The proxy listens elsewhere.
const BASE: &str = "https://proxy.example/podcasts";

/// A proxy that gives links, and admits 127.0.0.1 to 127.0.0.7 to everything else.
struct LinkingProxy {
    prox: Arc<Prox>,
    at: SocketAddr,
    _state: tempfile::TempDir,
}

impl LinkingProxy {
    async fn start() -> LinkingProxy {
        LinkingProxy::with(ProxConfig::default()).await
    }

    async fn with(config: ProxConfig) -> LinkingProxy {
        let state = tempfile::tempdir().unwrap();
        let journal = Arc::new(Journal::open(&state.path().join("journal")).unwrap());
        let config = ProxConfig {
            state_dir: state.path().to_owned(),
            allow_addresses: vec!["127.0.0.0/29".parse().unwrap()],
            allow_nets: vec!["127.0.0.1/32".parse().unwrap()],
            feeds_url: Some(BASE.to_owned()),
            ..config
        };
        let resolver = Arc::new(SystemResolver);
        let prox = Prox::with_journal(config, resolver, Some(journal.clone())).unwrap();
        prox.use_link_key(&[9; 32]);
        let options = ServerOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            key: SecretKey::from_bytes([9; 32]),
            admission: prox.clients().admission(),
            config: EndpointConfig::default(),
        };
        let rest = HibernationOptions {
            hibernate_after: Some(Duration::from_secs(60)),
            journal: Some(journal),
        };
        let server = Arc::new(Server::bind_with(options, rest).unwrap());
        tokio::spawn(prox.clone().watch_clients(server.clone()));
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = TcpFlowListener::bind(any, prox.clone()).unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, prox.clone(), std::future::pending()));
        LinkingProxy {
            prox,
            at,
            _state: state,
        }
    }

    /// The link of the client `phone` to a feed.
    fn link(&self, feed: &str) -> String {
        self.link_of("phone", feed)
    }

    fn link_of(&self, client: &str, feed: &str) -> String {
        let made = self.prox.link_feeds(client, &[feed.to_owned()]).unwrap().1;
        self.here(made[0].as_ref().unwrap().as_str())
    }

    /// A link as a web server in front passes it on.
    fn here(&self, link: &str) -> String {
        let path = link.strip_prefix(BASE).expect("a link");
        format!("http://{}{path}", self.at)
    }

    /// The links of the enclosures of a feed.
    async fn enclosures(&self, feed: &str) -> Vec<String> {
        let answer = curl(&[&self.link(feed)]).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let text = answer.text();
        let tags = text.split("<enclosure ").skip(1);
        let addresses = tags.map(|tag| tag.split("url=\"").nth(1).unwrap().split('"').next());
        addresses.map(|link| self.here(link.unwrap())).collect()
    }
}

/// What curl got.
struct CurlAnswer {
    /// 0 if there was none.
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl CurlAnswer {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        let found = fields.find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value)
    }
}

async fn curl(arguments: &[&str]) -> CurlAnswer {
    let folder = tempfile::tempdir().unwrap();
    let [head, body] = ["head", "body"].map(|name| folder.path().join(name));
    let read = |path: &Path| std::fs::read(path).unwrap_or_default();
    let mut command = Command::new("curl");
    command.args([
        "--silent",
        "--max-time",
        "60",
        "--write-out",
        "%{http_code}",
    ]);
    command
        .arg("--dump-header")
        .arg(&head)
        .arg("--output")
        .arg(&body);
    let output = within(command.args(arguments).output())
        .await
        .expect("curl runs");
    let status = String::from_utf8_lossy(&output.stdout).trim().parse();
    CurlAnswer {
        status: status.expect("a status"),
        head: String::from_utf8_lossy(&read(&head)).into_owned(),
        body: read(&body),
    }
}

/// A feed with enclosures at these addresses.
fn feed(enclosures: &[&str]) -> Vec<u8> {
    let items: String = enclosures
        .iter()
        .map(|address| {
            format!(
                "<item><guid>{address}</guid><enclosure url=\"{address}\" type=\"audio/mpeg\"/></item>"
            )
        })
        .collect();
    let text = format!("<rss version=\"2.0\"><channel><title>T</title>{items}</channel></rss>");
    text.into_bytes()
}

/// Answers with a body of known length.
fn whole(fields: &[(&str, &str)], body: &[u8]) -> OriginReply {
    let length = body.len().to_string();
    let fields = [&[("content-length", length.as_str())], fields].concat();
    OriginReply(reply("200 OK", &fields, body), ReplyEnd::Close)
}

/// An origin with a feed at `/feed`. The address of each episode redirects to another place at each request, and each has
/// other bytes: other advertisements were inserted.
async fn advertising_origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked: &OriginRequest| {
        let path = asked.path.split('?').next().unwrap_or_default();
        match path {
            "/feed" => whole(
                &[("content-type", "text/xml")],
                &feed(&["/play/1.mp3?a=1&amp;b=2", "/play/2.mp3"]),
            ),
            play if play.starts_with("/play/") => {
                let place = format!("/audio/{}.mp3", asked.count);
                let fields = [("location", place.as_str()), ("content-length", "0")];
                OriginReply(reply("302 Found", &fields, b""), ReplyEnd::Close)
            }
            _ => whole(
                &[
                    ("content-type", "audio/mpeg"),
                    // It is not true, as often.
                    ("last-modified", "Fri, 20 Nov 2020 10:00:00 GMT"),
                    ("date", "Fri, 20 Nov 2026 10:00:00 GMT"),
                    ("set-cookie", "a=b"),
                ],
                &object(EPISODE_BYTES, asked.count as u32),
            ),
        }
    })
    .await
}

/// How often an origin was asked for the bytes of an episode.
fn asked_for_audio(origin: &ScriptedOrigin) -> usize {
    let asked = origin.requests();
    asked
        .iter()
        .filter(|asked| asked.path.starts_with("/audio/"))
        .count()
}

#[tokio::test]
async fn an_app_gets_one_copy_of_an_episode_over_all_its_connections() {
    if !is_installed("curl") {
        return;
    }
    let origin = advertising_origin().await;
    let proxy = LinkingProxy::start().await;
    let episodes = proxy.enclosures(&origin.url("/feed")).await;
    assert_eq!(episodes.len(), 2);
    let link = episodes[0].as_str();
    assert!(link.ends_with("/1.mp3"), "{link}");
    // Several connections at once, of which the first makes the copy.
    let first = curl(&["--range", "0-99999", link]).await;
    assert_eq!(
        (first.status, first.body.len()),
        (206, 100_000),
        "{}",
        first.head
    );
    let length = format!("bytes 0-99999/{EPISODE_BYTES}");
    assert_eq!(first.field("content-range"), Some(length.as_str()));
    let tag = first.field("etag").expect("a tag").to_owned();
    assert!(first.field("set-cookie").is_none() && first.field("last-modified").is_none());
    assert_eq!(
        first.field("content-security-policy"),
        Some("sandbox; default-src 'none'")
    );
    let parts = ["100000-299999", "300000-499999", "500000-"];
    let parts = futures_util::future::join_all(
        parts.map(|range| async move { curl(&["--range", range, link]).await }),
    )
    .await;
    let mut file = first.body.clone();
    for part in &parts {
        assert_eq!(part.status, 206, "{}", part.head);
        file.extend(&part.body);
    }
    let all = curl(&[link]).await;
    assert_eq!(all.status, 200);
    assert!(all.body == file, "the parts are one file");
    // A download that broke off, and goes on.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("1.mp3");
    std::fs::write(&path, &file[..123_456]).unwrap();
    let path = path.to_str().unwrap();
    let arguments = [
        "--silent",
        "--max-time",
        "60",
        "--continue-at",
        "-",
        "--output",
        path,
        link,
    ];
    let status = within(Command::new("curl").args(arguments).status())
        .await
        .unwrap();
    assert!(status.success() && std::fs::read(path).unwrap() == file);
    let if_range = format!("If-Range: {tag}");
    let rest = curl(&["--range", "599990-", "--header", &if_range, link]).await;
    assert_eq!((rest.status, rest.body.as_slice()), (206, &file[599_990..]));
    let other = curl(&["--range", "599990-", "--header", "If-Range: \"x\"", link]).await;
    assert!(other.status == 200 && other.body == file);
    let head = curl(&["--head", link]).await;
    assert_eq!(
        head.field("content-length"),
        Some(EPISODE_BYTES.to_string().as_str())
    );
    assert_eq!(asked_for_audio(&origin), 1);
    // The feed has the same links each time, and another client another copy.
    assert_eq!(proxy.enclosures(&origin.url("/feed")).await, episodes);
    let answer = curl(&[&proxy.link_of("tablet", &origin.url("/feed"))]).await;
    let text = answer.text();
    let own = text.split("<enclosure url=\"").nth(1).unwrap();
    let other = curl(&[&proxy.here(own.split('"').next().unwrap())]).await;
    assert!(other.status == 200 && other.body != file && other.body.len() == EPISODE_BYTES);
    assert_eq!(asked_for_audio(&origin), 2);
}

#[tokio::test]
async fn requests_that_come_at_once_are_one_request_to_the_origin() {
    if !is_installed("curl") {
        return;
    }
    let origin = advertising_origin().await;
    let proxy = LinkingProxy::start().await;
    let link = &proxy.enclosures(&origin.url("/feed")).await[1];
    let answers = (0..6).map(|_| async { curl(&[link.as_str()]).await });
    let answers = futures_util::future::join_all(answers).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.body.len()), (200, EPISODE_BYTES));
        assert!(answer.body == answers[0].body);
    }
    assert_eq!(asked_for_audio(&origin), 1);
}

#[tokio::test]
async fn the_rest_of_a_copy_that_is_gone_is_never_that_of_another() {
    if !is_installed("curl") {
        return;
    }
    let origin = advertising_origin().await;
    let proxy = LinkingProxy::with(ProxConfig {
        feeds_keep: Duration::ZERO,
        ..Default::default()
    })
    .await;
    let link = &proxy.enclosures(&origin.url("/feed")).await[0];
    let first = curl(&["--range", "0-99999", link]).await;
    assert_eq!(first.status, 206);
    let tag = format!("If-Range: {}", first.field("etag").expect("a tag"));
    let retained = proxy.prox.clone();
    until("the copy is gone", || {
        retained.holdings().listed_clients == 0
    })
    .await;
    for more in [&[][..], &["--header", &tag]] {
        let asked = [&["--range", "100000-", link.as_str()], more].concat();
        let rest = curl(&asked).await;
        assert_eq!(
            (rest.status, rest.body.len()),
            (200, EPISODE_BYTES),
            "{}",
            rest.head
        );
        assert!(rest.body[..100_000] != first.body[..]);
        until("the copy is gone", || {
            retained.holdings().listed_clients == 0
        })
        .await;
    }
}

#[tokio::test]
async fn a_copy_that_its_origin_breaks_off_is_not_continued_with_another() {
    if !is_installed("curl") {
        return;
    }
    let origin = ScriptedOrigin::start(|asked: &OriginRequest| match asked.path.as_str() {
        "/feed" => whole(&[], &feed(&["/1.mp3"])),
        _ => {
            let OriginReply(mut bytes, _) = whole(&[], &object(EPISODE_BYTES, asked.count as u32));
            if asked.count < 2 {
                bytes.truncate(bytes.len() - 200_000);
            }
            OriginReply(bytes, ReplyEnd::Close)
        }
    })
    .await;
    let proxy = LinkingProxy::start().await;
    let link = &proxy.enclosures(&origin.url("/feed")).await[0];
    let broken = curl(&[link.as_str()]).await;
    assert!(broken.body.len() < EPISODE_BYTES);
    let from = format!("{}-", broken.body.len().max(1));
    let whole = curl(&["--range", &from, link.as_str()]).await;
    assert_eq!(
        (whole.status, whole.body.len()),
        (200, EPISODE_BYTES),
        "{}",
        whole.head
    );
    assert!(whole.body == object(EPISODE_BYTES, 2));
    assert!(curl(&["--range", &from, link.as_str()]).await.status == 206);
}

#[tokio::test]
async fn links_work_from_everywhere_and_nothing_else_does() {
    if !is_installed("curl") {
        return;
    }
    let origin = advertising_origin().await;
    let proxy = LinkingProxy::start().await;
    let elsewhere = ["--interface", "127.0.0.9"];
    let link = proxy.link(&origin.url("/feed"));
    let feed = curl(&[&elsewhere[..], &[&link]].concat()).await;
    assert_eq!(feed.status, 200, "{}", feed.text());
    let tag = format!("If-None-Match: {}", feed.field("etag").unwrap());
    assert_eq!(curl(&["--header", &tag, &link]).await.status, 304);
    let by_proxy = format!("http://{}", proxy.at);
    let asked = ["--proxy", &by_proxy, &origin.url("/feed")];
    assert_eq!(
        curl(&asked).await.status,
        200,
        "127.0.0.1 may use the proxy"
    );
    for more in [&[][..], &["--proxytunnel"], &["--http2-prior-knowledge"]] {
        let answer = curl(&[&elsewhere[..], &asked, more].concat()).await;
        assert_eq!(answer.status, 0, "{}", answer.text());
    }
    let base = format!("http://{}", proxy.at);
    let mut changed = link.clone();
    let last = if changed.pop() == Some('A') { 'B' } else { 'A' };
    changed.push(last);
    for wrong in [
        changed.as_str(),
        &format!("{base}/"),
        &format!("{base}/feeds/"),
        &format!("{base}/feeds/AAAA/AAAA"),
        &format!("{base}/feeds/{}", origin.url("/feed")),
    ] {
        let answer = curl(&[&elsewhere[..], &["--path-as-is", wrong]].concat()).await;
        assert_eq!(answer.status, 404, "{wrong}: {}", answer.text());
        assert!(
            answer.text().contains("cedos prox feeds"),
            "{}",
            answer.text()
        );
    }
    // Who may use the proxy is told how.
    let told = curl(&[&format!("{base}/feeds/AAAA/AAAA")]).await;
    assert!(
        told.status == 400 && told.text().contains("full URL"),
        "{}",
        told.text()
    );
    let posted = curl(&[&elsewhere[..], &["--data", "x", &link]].concat()).await;
    assert_eq!(posted.status, 0, "POST is no link's");
    let put = curl(&[&elsewhere[..], &["--request", "GET", "--data", "x", &link]].concat()).await;
    assert_eq!(put.status, 400, "{}", put.text());
}

#[tokio::test]
async fn what_is_no_feed_is_refused_with_the_reason() {
    if !is_installed("curl") {
        return;
    }
    let bomb =
        "<!DOCTYPE r [<!ENTITY a \"b\"><!ENTITY c \"&a;&a;\">]><rss><channel>&c;</channel></rss>";
    let origin = ScriptedOrigin::start(move |asked: &OriginRequest| match asked.path.as_str() {
        "/bomb" => whole(&[], bomb.as_bytes()),
        "/page" => whole(&[], b"<!DOCTYPE html><title>Log in</title>"),
        "/cut" => whole(&[], b"<rss><channel><item>"),
        "/svg" => whole(&[], b"<svg><enclosure url=\"/x\"/></svg>"),
        "/coded" => whole(&[("content-encoding", "gzip")], b"\x1f\x8b"),
        "/huge" => whole(&[], &vec![b' '; (16 << 20) + 1]),
        "/endless" => {
            let body = vec![b' '; (16 << 20) + 100_000];
            OriginReply(reply("200 OK", &[], &body), ReplyEnd::Close)
        }
        "/gone" => OriginReply(
            reply("410 Gone", &[("content-length", "0")], b""),
            ReplyEnd::Close,
        ),
        _ => OriginReply(
            reply("500 Oops", &[("content-length", "4")], b"oops"),
            ReplyEnd::Close,
        ),
    })
    .await;
    let proxy = LinkingProxy::start().await;
    for (path, status, words) in [
        ("/bomb", 502, "entities of its own"),
        ("/page", 502, "a web page, not a feed"),
        ("/cut", 502, "not a feed that can be read"),
        ("/svg", 502, "not that of a feed"),
        ("/coded", 502, "coding"),
        ("/huge", 502, "larger than 16 MB"),
        ("/endless", 502, "larger than 16 MB"),
        ("/gone", 404, "answered 410 instead of the feed"),
        ("/oops", 502, "answered 500 instead of the feed"),
    ] {
        let answer = curl(&[&proxy.link(&origin.url(path))]).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
        assert!(answer.text().contains(words), "{path}: {}", answer.text());
    }
    let unreachable = curl(&[&proxy.link("http://127.0.0.1:1/feed")]).await;
    assert_eq!(unreachable.status, 502, "{}", unreachable.text());
}

#[tokio::test]
async fn a_feed_leads_nowhere_that_the_proxy_does_not_go() {
    if !is_installed("curl") {
        return;
    }
    let addresses = [
        "http://10.0.0.1/x.mp3",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/x.mp3",
        "http://127.0.0.2/x.mp3",
    ];
    let origin = ScriptedOrigin::start(move |_: &OriginRequest| {
        whole(
            &[],
            &feed(&[&addresses[..], &["file:///etc/passwd", "data:,x"]].concat()),
        )
    })
    .await;
    let proxy = LinkingProxy::start().await;
    let answer = curl(&[&proxy.link(&origin.url("/feed"))]).await;
    assert!(
        answer.text().contains("url=\"file:///etc/passwd\""),
        "no link leads there"
    );
    let text = answer.text();
    let links = text.split("enclosure url=\"").skip(1);
    let links: Vec<&str> = links.filter_map(|rest| rest.split('"').next()).collect();
    for (link, address) in links.iter().zip(addresses) {
        assert!(link.starts_with(BASE), "{link}");
        let answer = curl(&[&proxy.here(link)]).await;
        assert_eq!(answer.status, 403, "{address}: {}", answer.text());
        let kind = answer.field("proxy-status").unwrap_or_default();
        assert!(kind.contains("destination_ip_prohibited"), "{kind}");
    }
    let direct = curl(&[&proxy.link("http://10.0.0.1/feed")]).await;
    assert_eq!(direct.status, 403, "{}", direct.text());
    let (_, made) = proxy
        .prox
        .link_feeds("phone", &["file:///etc/passwd".to_owned()])
        .unwrap();
    assert!(made[0].as_ref().unwrap_err().contains("http and https"));
}

#[tokio::test]
async fn links_of_a_client_that_was_removed_work_no_more() {
    if !is_installed("curl") {
        return;
    }
    let origin = advertising_origin().await;
    let proxy = LinkingProxy::start().await;
    let feed = proxy.link(&origin.url("/feed"));
    let episode = proxy.enclosures(&origin.url("/feed")).await.remove(0);
    assert_eq!(curl(&[&episode]).await.status, 200);
    // The flow ends a moment after curl has everything.
    until("the copy is kept", || {
        proxy.prox.holdings().retained_copies == 1
    })
    .await;
    // One that takes long is broken off.
    let limits = cedos_prox::ClientLimits {
        down_bytes_per_s: Some(50_000),
        ..Default::default()
    };
    proxy
        .prox
        .set_client_limits("phone", Some(&limits))
        .unwrap();
    let slow = tokio::spawn({
        let episode = episode.clone();
        async move { curl(&[&episode]).await }
    });
    let prox = proxy.prox.clone();
    until("it runs", || prox.holdings().flows == 1).await;
    let removed = proxy.prox.clients().remove("phone").unwrap();
    assert_eq!(removed.name, "phone");
    until("what it held is free", || {
        let holdings = prox.holdings();
        (
            holdings.flows,
            holdings.retained_copies,
            holdings.listed_clients,
        ) == (0, 0, 0)
    })
    .await;
    assert!(within(slow).await.unwrap().body.len() < EPISODE_BYTES);
    for link in [&feed, &episode] {
        let answer = curl(&[link]).await;
        assert_eq!(answer.status, 403, "{}", answer.text());
        assert!(answer.text().contains("withdrawn"), "{}", answer.text());
    }
    // A new client of this name has new links.
    let again = proxy.link(&origin.url("/feed"));
    assert_ne!(again, feed);
    assert_eq!(curl(&[&again]).await.status, 200);
    assert_eq!(curl(&[&feed]).await.status, 403);
}

#[tokio::test]
async fn limits_of_a_client_hold_for_its_links() {
    if !is_installed("curl") {
        return;
    }
    let origin = advertising_origin().await;
    let proxy = LinkingProxy::start().await;
    let episode = proxy.enclosures(&origin.url("/feed")).await.remove(0);
    let limits = cedos_prox::ClientLimits {
        month_bytes: Some(300_000),
        ..Default::default()
    };
    proxy
        .prox
        .set_client_limits("phone", Some(&limits))
        .unwrap();
    let cut = curl(&[&episode]).await;
    assert!(cut.body.len() <= 300_000, "{}", cut.body.len());
    let refused = curl(&[&episode]).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    let name = proxy.prox.clients().find("phone").unwrap().key;
    assert!(proxy.prox.client_usage(&name).month.down >= 290_000);
}

#[tokio::test]
async fn a_password_of_a_feed_reaches_its_origin_and_no_other() {
    if !is_installed("curl") {
        return;
    }
    let origin = ScriptedOrigin::start(|asked: &OriginRequest| match asked.path.as_str() {
        "/feed" => whole(&[], &feed(&["/1.mp3", "http://localhost:1/2.mp3"])),
        _ => whole(&[], b"audio"),
    })
    .await;
    let proxy = LinkingProxy::start().await;
    let url = origin.url("/feed").replace("http://", "http://me:hush@");
    let episodes = proxy.enclosures(&url).await;
    assert_eq!(curl(&[&episodes[0]]).await.text(), "audio");
    for asked in origin.requests() {
        assert_eq!(
            asked.header("authorization"),
            Some("Basic bWU6aHVzaA=="),
            "{}",
            asked.path
        );
        assert!(!asked.head.contains("cookie"), "{}", asked.head);
    }
    let both = episodes.join(" ");
    assert!(!both.contains("hush") && !both.contains("bWU6"), "{both}");
}

#[test]
fn an_address_for_links_that_makes_no_sense_is_refused_at_the_start() {
    for wrong in [
        "proxy.example",
        "ftp://h/",
        "https://a:b@h/",
        "https://h/?x",
        "https://h/#x",
        "",
    ] {
        let config = ProxConfig {
            allow_any_client: true,
            feeds_url: Some(wrong.to_owned()),
            ..Default::default()
        };
        let refused = Prox::new(config).err().expect(wrong).to_string();
        assert!(refused.contains("--feeds-url"), "{refused}");
        assert!(Url::parse(wrong).is_err() || refused.contains(wrong));
    }
}
