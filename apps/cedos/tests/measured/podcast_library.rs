//! A library of 200 podcasts with 50,000 episodes in Chromium: when its pages paint first, and what the agent takes.

use std::path::Path;
use std::time::{Duration, Instant};

use cedos_lab_rig::browser::{BrowserKind, WebBrowser};
use cedos_lab_rig::program::{AgentProcess, cedos, ended, pid_of};
use cedos_lab_rig::share::beside_others;
use cedos_readycast::{ChannelRule, DownloadSchedule, Library, RefreshOutcome};
use jiff::Timestamp;

const CHANNELS: usize = 200;
const EPISODES_OF_EACH: usize = 250;

/// Times that each page is opened; the median counts.
const OPENED: usize = 7;

/// The latest first paint of a page, in an optimised build.
const FIRST_PAINT_MAX: Duration = Duration::from_millis(200);

/// The most memory of the agent.
const RESIDENT_BYTES_MAX: u64 = 60_000_000;

/// The feed of a channel, with notes of ordinary length.
fn feed(channel: usize) -> Vec<u8> {
    let notes = "What was said, by whom, and where to read on. ".repeat(20);
    let items: String = (0..EPISODES_OF_EACH)
        .map(|n| {
            let (day, month) = (n % 28 + 1, ["Jan", "Apr", "Jul", "Oct"][n / 28 % 4]);
            let year = 2025 - n / 112;
            format!(
                "<item><title>Episode {n} of podcast {channel}</title><guid>{n}</guid>\
                 <pubDate>{day:02} {month} {year} 06:00:00 GMT</pubDate><description>{notes}</description>\
                 <enclosure url=\"https://a.example/{channel}/{n}.mp3\" length=\"40000000\" type=\"audio/mpeg\"/></item>"
            )
        })
        .collect();
    format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\"><channel><title>Podcast {channel}</title>\
         <description>{notes}</description>{items}</channel></rss>"
    )
    .into_bytes()
}

/// A library whose channels wait for nobody: nothing is fetched while pages are measured.
fn fill(home: &Path) {
    let library = Library::open(&home.join(".state/cedos/podcasts")).expect("a library");
    let now = Timestamp::now();
    for channel in 0..CHANNELS {
        let url = format!("https://a.example/{channel}/feed");
        let url = url.parse().expect("an address");
        let id = library.subscribe(&url, now).expect("stored");
        let rule = ChannelRule {
            schedule: DownloadSchedule::Manual,
            ..ChannelRule::default()
        };
        library.set_channel_rule(id, &rule).expect("stored");
        let outcome = RefreshOutcome::Feed {
            bytes: feed(channel),
            etag: None,
            last_modified: None,
            moved_to: None,
        };
        let report = library.apply_refresh(id, outcome, now).expect("stored");
        assert_eq!(report.added as usize, EPISODES_OF_EACH, "{report:?}");
    }
}

/// Resident bytes of a process.
fn resident(agent: &AgentProcess) -> u64 {
    let status = format!("/proc/{}/status", pid_of(&agent.child));
    let status = std::fs::read_to_string(status).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.expect("a number") * 1024
}

/// When the page that is open began to arrive, and when it was painted first, since its address was entered.
async fn first_paint(browser: &mut WebBrowser) -> (Duration, Duration) {
    let entry = "performance.getEntriesByName('first-contentful-paint')[0]";
    browser.until(&format!("{entry} !== undefined")).await;
    let mut time = async |expression: &str| {
        let at = browser.evaluate(expression).await;
        Duration::from_secs_f64(at.as_f64().expect("a number") / 1e3)
    };
    let answered = time("performance.getEntriesByType('navigation')[0].responseStart").await;
    (answered, time(&format!("{entry}.startTime")).await)
}

#[tokio::test]
#[ignore = "makes 50,000 episodes, and is of use in an optimised build: run it with --release"]
async fn pages_of_fifty_thousand_episodes_paint_at_once_and_the_agent_stays_small() {
    let _share = beside_others();
    let home = tempfile::tempdir().expect("a directory");
    let begun = Instant::now();
    fill(home.path());
    eprintln!("library made in {:.1} s", begun.elapsed().as_secs_f64());
    let agent = AgentProcess::start(home.path()).await;
    let mut page = cedos(home.path(), &["page"]);
    page.env("CEDOS_AGENT", &agent.socket);
    let page = ended(page.spawn().expect("start cedos")).await;
    let link = String::from_utf8(page.output).expect("text");
    let link = link.trim();
    let started = WebBrowser::start(BrowserKind::Chromium, home.path(), &[]);
    let Some(mut browser) = started.await else {
        return;
    };
    eprintln!("resident before: {} bytes", resident(&agent));
    let paths = [
        "podcasts",
        "podcasts/channel/1",
        "podcasts/episode/1",
        "podcasts/queue",
        "podcasts/search?words=episode+249",
    ];
    for path in paths {
        let (mut answers, mut paints) = (Vec::new(), Vec::new());
        for _ in 0..OPENED {
            browser.open(&format!("{link}{path}")).await;
            let (answered, painted) = first_paint(&mut browser).await;
            answers.push(answered);
            paints.push(painted);
        }
        answers.sort();
        paints.sort();
        let answered = answers[OPENED / 2];
        let (median, worst) = (paints[OPENED / 2], paints[OPENED - 1]);
        eprintln!(
            "{path}: answered after {answered:.1?}, painted after {median:.1?}, at most {worst:.1?}"
        );
        assert!(median <= FIRST_PAINT_MAX, "{path}: {median:?}");
    }
    let resident = resident(&agent);
    eprintln!("resident: {resident} bytes");
    assert!(resident <= RESIDENT_BYTES_MAX, "{resident}");
    browser.close().await;
}
