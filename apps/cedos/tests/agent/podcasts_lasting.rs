//! Pages of podcasts that outlast their agent, and pages of thousands of channels, in Chromium and Firefox where they are
//! installed.

use std::path::Path;

use cedos_lab_rig::browser::{BrowserKind, SPACE};
use cedos_lab_rig::program::AgentProcess;
use cedos_lab_rig::wait::until_async;
use cedos_readycast::{Library, OpmlFeed};
use jiff::Timestamp;

use crate::page::PageHome;
use crate::podcast_scene::PodcastScene;
use crate::podcasts_browser::{open_live, position, shows, started};

const CHANNELS: usize = 10_000;

/// A player that is open while the agent is killed: what was heard meanwhile is stored by the next agent, without a
/// reload.
async fn outlasts_the_agent(kind: BrowserKind) {
    let mut scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    let page = scene.url(&format!("podcasts/episode/{}", episodes[1]));
    open_live(&mut browser, &page).await;
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    browser.tab_to("audio").await;
    browser.press(&[SPACE]).await;
    browser
        .until("document.getElementById('audio').currentTime > 0.2")
        .await;
    scene.home.agent.child.kill().await.expect("it ends");
    browser
        .evaluate("document.getElementById('audio').currentTime = 20")
        .await;
    browser
        .until(&shows("The position is not stored: Cedos does not answer."))
        .await;
    browser
        .evaluate("document.getElementById('audio').pause()")
        .await;
    browser.until(&shows("Cedos does not answer")).await;
    let heard = position(&mut browser).await;
    assert!(heard >= 20.0, "{heard}");

    scene.home.agent = AgentProcess::start(scene.home.path()).await;
    until_async("the position is stored", async || {
        let episode = scene.cast(&["show", "1"]).await["episodes"][1].clone();
        let stored = episode["position_ms"].as_f64().unwrap_or(0.0) / 1000.0;
        // Messages of the browser are read meanwhile.
        browser.evaluate("1").await;
        ((stored - heard).abs() < 0.1).then_some(())
    })
    .await;
    browser
        .until(&format!("!{}", shows("The position is not stored")))
        .await;
    browser
        .until("document.getElementById('problem').hidden")
        .await;
    // It plays on, of the same bytes.
    browser
        .evaluate("void document.getElementById('audio').play()")
        .await;
    browser
        .until(&format!(
            "document.getElementById('audio').currentTime > {}",
            heard + 0.2
        ))
        .await;
    let transfers = scene.origin.requests();
    let audio = transfers
        .iter()
        .filter(|asked| asked.path.starts_with("/audio/"));
    assert_eq!(audio.count(), 2, "nothing is fetched again");
    browser.close().await;
}

#[tokio::test]
async fn a_position_is_stored_by_the_next_agent_when_one_is_killed_in_chromium() {
    outlasts_the_agent(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn a_position_is_stored_by_the_next_agent_when_one_is_killed_in_firefox() {
    outlasts_the_agent(BrowserKind::Firefox).await;
}

/// A library that waits for nobody's feed.
fn fill(home: &Path) {
    let library = Library::open(&home.join(".state/cedos/podcasts")).expect("a library");
    let feeds: Vec<OpmlFeed> = (0..CHANNELS)
        .map(|n| OpmlFeed {
            url: format!("https://a.example/{n}")
                .parse()
                .expect("an address"),
            title: format!("Podcast {n:05}"),
        })
        .collect();
    let imported = library.subscribe_all(&feeds, Timestamp::now());
    assert_eq!(imported.expect("stored").feeds, CHANNELS);
}

#[tokio::test]
async fn a_library_of_ten_thousand_channels_has_pages() {
    let home = PageHome::prepared(fill).await;
    let link = home.link(&[]).await;
    let tiles = |text: &str| text.matches("class=\"card tile\"").count();
    let first = link.get("/podcasts").await.text;
    assert_eq!(tiles(&first), 500);
    assert!(
        first.contains("podcasts?from=500\">Further channels"),
        "{first}"
    );
    assert!(!first.contains("Channels before these"), "{first}");
    let last = link.get("/podcasts?from=9500").await.text;
    assert_eq!(tiles(&last), 500);
    assert!(last.contains("Podcast 09999") && !last.contains("\">Further channels"));
    assert!(last.contains("podcasts?from=9000\">Channels before these"));
    assert_eq!(tiles(&link.get("/podcasts?from=20000").await.text), 0);
}

/// How often the script reads ids of elements while it shows a list with a new first entry.
const READS_OF_IDS: &str = "((entries) => {
    const list = (from) => `<ul class=\"cards\">${Array.from({ length: entries }, (_, n) =>
        `\\n<li id=\"x${from + n}\">${from + n}</li>\\n`).join('')}</ul>`;
    show(list(1));
    const id = Object.getOwnPropertyDescriptor(Element.prototype, 'id');
    let reads = 0;
    Object.defineProperty(Element.prototype, 'id', { ...id, get() { reads += 1; return id.get.call(this); } });
    show(list(0));
    Object.defineProperty(Element.prototype, 'id', id);
    const shown = [...document.querySelectorAll('#live li')].map((entry) => entry.id);
    return shown.length === entries && shown[0] === 'x0' && shown.at(-1) === `x${entries - 1}` ? reads : -1;
})";

#[tokio::test]
async fn the_work_of_showing_a_change_grows_with_the_list_and_not_with_its_square() {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(BrowserKind::Chromium, &scene).await else {
        return;
    };
    browser.open(&scene.url("podcasts")).await;
    for entries in [100, 2_000] {
        let reads = browser
            .evaluate(&format!("{READS_OF_IDS}({entries})"))
            .await;
        let reads = reads.as_f64().expect("a number");
        assert!(reads > 0.0, "the list is shown as it is");
        assert!(reads < 12.0 * f64::from(entries), "{reads} for {entries}");
    }
    browser.close().await;
}
