//! The pages of podcasts in Chromium and Firefox, where they are installed: how they look, whether everybody can use them, and a walk
//! from the first subscription to the end of an episode.

use std::path::{Path, PathBuf};

use cedos_lab_rig::browser::{BrowserKind, ColourScheme, ENTER, SPACE, WebBrowser};
use cedos_lab_rig::missing_tool::skip_without;
use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, wifi_off, wifi_on};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::until_async;
use serde_json::Value;

use crate::podcast_scene::{PodcastOrigin, PodcastScene};

/// Widths and heights of pages: a phone held upright, and a laptop.
const SIZES: [(u32, u32); 2] = [(390, 844), (1280, 800)];

/// The environment variable with the file of axe-core, for machines that have it elsewhere than npm puts it.
const AXE_VARIABLE: &str = "CEDOS_AXE";

/// Where `npm install --global axe-core` puts it.
const AXE_FILES: [&str; 2] = [
    "/usr/local/lib/node_modules/axe-core/axe.min.js",
    "/usr/lib/node_modules/axe-core/axe.min.js",
];

/// A script that runs axe-core with all rules of WCAG 2.2 AA and its best practices, and returns
/// its findings as text.
const AXE_RUN: &str = "axe.run(document, {
    resultTypes: ['violations'],
    runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'],
}).then(({ violations }) => violations.map(({ id, help, nodes }) =>
    `${id}: ${help}\\n` + nodes.map((node) => `  ${node.html}\\n  ${node.failureSummary}`).join('\\n')
).join('\\n'))";

/// The accessibility checker, if it is installed.
fn axe() -> Option<String> {
    let named = std::env::var_os(AXE_VARIABLE).map(PathBuf::from);
    let mut files = named.into_iter().chain(AXE_FILES.map(PathBuf::from));
    let script = files.find_map(|file| std::fs::read_to_string(file).ok());
    if script.is_none() {
        skip_without(
            "axe",
            "accessibility is not checked: install axe-core (npm install --global axe-core)",
        );
    }
    script
}

/// The folder of screenshots, for those who want to see them.
fn screenshot_folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("podcast-pages");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// A browser, if it is installed.
pub async fn started(kind: BrowserKind, scene: &PodcastScene) -> Option<WebBrowser> {
    WebBrowser::start(kind, scene.home.path(), &[]).await
}

/// The colours in which pages are looked at. Firefox takes them from its desktop, and there is none.
fn schemes(kind: BrowserKind) -> &'static [ColourScheme] {
    match kind {
        BrowserKind::Chromium => &[ColourScheme::Light, ColourScheme::Dark],
        BrowserKind::Firefox => &[ColourScheme::Light],
    }
}

/// Whether the page shows these words, as an expression.
pub fn shows(words: &str) -> String {
    format!("document.body.innerText.includes({words:?})")
}

/// Checks what holds for every page: it fits its width, and axe-core finds no fault. Leaves a screenshot.
async fn check_page(browser: &mut WebBrowser, kind: BrowserKind, name: &str, axe: Option<&str>) {
    if let Some(axe) = axe {
        browser.evaluate(&format!("{axe}; 0")).await;
    }
    for (width, height) in SIZES {
        browser.resize(width, height).await;
        for scheme in schemes(kind) {
            if kind == BrowserKind::Chromium {
                browser.prefer(*scheme).await;
            }
            let what = format!("{kind:?}-{name}-{width}-{}", scheme.as_str()).to_lowercase();
            let picture = browser.screenshot_of_page().await;
            let file = screenshot_folder().join(format!("{what}.png"));
            std::fs::write(file, picture).expect("written");
            let fits = "document.documentElement.scrollWidth <= window.innerWidth";
            assert_eq!(browser.evaluate(fits).await, true, "{what} is too wide");
            if axe.is_some() {
                let found = browser.evaluate(AXE_RUN).await;
                assert_eq!(found, "", "{what}");
            }
        }
    }
}

/// Nothing came from elsewhere, and no page had an error or broke its own content security policy.
pub fn check_console(browser: &WebBrowser, scene: &PodcastScene) {
    let here = scene.link.url.rsplit_once('/').expect("a path").0;
    for url in browser.requests() {
        assert!(url.starts_with(here) || !url.starts_with("http"), "{url}");
    }
    assert!(browser.console().is_empty(), "{:?}", browser.console());
}

async fn every_page(kind: BrowserKind) {
    let axe = axe();
    let axe = axe.as_deref();
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    browser.open(&scene.url("podcasts")).await;
    check_page(&mut browser, kind, "library-empty", axe).await;
    browser.open(&scene.url("podcasts/queue")).await;
    check_page(&mut browser, kind, "queue-empty", axe).await;
    check_console(&browser, &scene);
    browser.close().await;

    let scene = PodcastScene::new().await;
    let mut browser = started(kind, &scene).await.expect("it is installed");
    let news = scene.cast(&["show", "1"]).await["episodes"].clone();
    let water = scene.cast(&["show", "2"]).await["episodes"].clone();
    let arabic = scene.cast(&["show", "3"]).await["episodes"].clone();
    let id = |episodes: &Value, at: usize| episodes[at]["id"].to_string();
    let store = format!("/podcasts/episode/{}/position", id(&water, 1));
    let stored = scene
        .link
        .post(&store, "position_ms=31000&duration_ms=60000");
    assert_eq!(stored.await.status, 204);
    let pages = [
        ("library", "podcasts".to_owned()),
        ("channel", "podcasts/channel/1".to_owned()),
        ("channel-arabic", "podcasts/channel/3".to_owned()),
        (
            "episode-downloading",
            format!("podcasts/episode/{}", id(&news, 0)),
        ),
        (
            "episode-failed",
            format!("podcasts/episode/{}", id(&news, 2)),
        ),
        (
            "episode-chapters",
            format!("podcasts/episode/{}", id(&water, 0)),
        ),
        (
            "episode-begun",
            format!("podcasts/episode/{}", id(&water, 1)),
        ),
        (
            "episode-new",
            format!("podcasts/episode/{}", id(&arabic, 0)),
        ),
        ("queue", "podcasts/queue".to_owned()),
        ("search", "podcasts/search?words=the".to_owned()),
        ("search-nothing", "podcasts/search?words=xyz".to_owned()),
        (
            "search-directory",
            "podcasts/search?words=news&in=directory".to_owned(),
        ),
        ("settings", "podcasts/settings".to_owned()),
        ("log", "podcasts/log".to_owned()),
        ("transfers", String::new()),
        ("networks", "networks".to_owned()),
    ];
    for (name, path) in pages {
        browser.open(&scene.url(&path)).await;
        check_page(&mut browser, kind, name, axe).await;
    }
    scene.cast(&["apps"]).await;
    browser.open(&scene.url("podcasts/settings")).await;
    check_page(&mut browser, kind, "settings-apps", axe).await;
    check_console(&browser, &scene);
    // The browser itself reports that its answer is no success.
    browser.open(&scene.url("podcasts/episode/99")).await;
    check_page(&mut browser, kind, "problem", axe).await;
    if axe.is_some() {
        // The checker finds what is wrong on purpose.
        let wrong = "document.querySelector('main').innerHTML = '<input>'";
        browser.evaluate(wrong).await;
        let found = browser.evaluate(AXE_RUN).await;
        assert!(
            found
                .as_str()
                .is_some_and(|found| found.starts_with("label: ")),
            "{found}"
        );
    }
    browser.close().await;
}

#[tokio::test]
async fn every_page_of_podcasts_fits_phone_and_desktop_and_passes_an_accessibility_checker_in_chromium()
 {
    every_page(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn every_page_of_podcasts_fits_phone_and_desktop_and_passes_an_accessibility_checker_in_firefox()
 {
    every_page(BrowserKind::Firefox).await;
}

/// Types text into what has the focus.
async fn type_text(browser: &mut WebBrowser, text: &str) {
    let keys: Vec<String> = text.chars().map(String::from).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    browser.press(&keys).await;
}

/// Moves to a field by Tab, and replaces what it says.
async fn fill(browser: &mut WebBrowser, id: &str, text: &str) {
    browser.tab_to(id).await;
    let select = format!("document.getElementById({id:?}).select()");
    browser.evaluate(&select).await;
    type_text(browser, text).await;
}

/// Opens a page, and waits until its updates arrive.
pub async fn open_live(browser: &mut WebBrowser, url: &str) {
    browser.open(url).await;
    browser
        .until("source?.readyState === EventSource.OPEN")
        .await;
}

async fn subscribed_by_keyboard(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    browser.open(&scene.url("podcasts")).await;
    browser.tab_to("feed-url").await;
    type_text(&mut browser, &scene.origin.url("/news")).await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("Friday: a bridge that sings")).await;

    browser.open(&scene.url("podcasts/search")).await;
    browser.tab_to("words").await;
    type_text(&mut browser, "water").await;
    browser.tab_to("search-directory").await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("You are subscribed")).await;
    let subscribe = "document.querySelector('.card form button').focus()";
    browser.evaluate(subscribe).await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("12: Where eels go")).await;

    let list = scene.home.path().join("subscriptions.opml");
    let outline = format!(
        "<outline type=\"rss\" xmlUrl=\"{}\"/>",
        scene.origin.url("/arabic")
    );
    let text = format!("<opml version=\"2.0\"><body>{outline}</body></opml>");
    std::fs::write(&list, text).expect("written");
    browser.open(&scene.url("podcasts/settings")).await;
    browser.choose_file("#file", &list).await;
    browser.tab_to("import-file").await;
    browser.press(&[ENTER]).await;
    browser
        .until(&shows("You are subscribed to the one podcast of the file."))
        .await;

    browser.open(&scene.url("podcasts/channel/1")).await;
    browser.tab_to("rule").await;
    browser.press(&[ENTER]).await;
    fill(&mut browser, "schedule", "soon").await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("says no time")).await;
    browser.open(&scene.url("podcasts/channel/1")).await;
    browser.tab_to("rule").await;
    browser.press(&[SPACE]).await;
    fill(&mut browser, "schedule", "weekdays 07:30").await;
    fill(&mut browser, "latest", "1").await;
    browser.tab_to("set-rule").await;
    browser.press(&[SPACE]).await;
    browser.until(&shows("Next deadline: ")).await;
    let kept = browser
        .evaluate("document.getElementById('latest').value")
        .await;
    assert_eq!(kept, "1");

    // The lists change while somebody looks: an episode that was played leaves the device.
    browser.open(&scene.url("podcasts/channel/2")).await;
    browser
        .until("source?.readyState === EventSource.OPEN")
        .await;
    browser.until(&shows("2 on this device")).await;
    let water = scene.cast(&["show", "2"]).await["episodes"][0]["id"].to_string();
    scene.cast(&["played", &water]).await;
    browser.until(&shows("1 on this device")).await;
    browser.until(&shows("Played")).await;

    // Half of it comes, and then nothing: the promise is made, and made anew when the deadline is another.
    open_live(&mut browser, &scene.url("podcasts/queue")).await;
    let group = "document.querySelector('.timeline h3')?.textContent ?? ''";
    browser.until(&format!("/^By .*07:30/.test({group})")).await;
    browser.until(&shows("likely to be on time")).await;
    // The same as a picture, with a sentence for those who do not see it.
    browser
        .until("document.querySelectorAll('#chart[role=img] .span').length === 1")
        .await;
    let label = browser
        .evaluate("document.getElementById('chart').getAttribute('aria-label')")
        .await;
    let label = label.as_str().expect("a sentence");
    assert!(
        label.starts_with("Time line of one download from now to"),
        "{label}"
    );
    let episode = scene.cast(&["show", "1"]).await["episodes"][0]["id"].to_string();
    let asked = ["cast", "download", &episode, "--by", "in 3h"];
    scene.home.run(&asked).await.ends_with(0, "");
    let in_3h = r"/\(in (3 hours|2 h 5\d min)\)/";
    browser.until(&format!("{in_3h}.test({group})")).await;
    // The page says why it waits, and that what was missing has come.
    browser
        .until("document.querySelector('.timeline .why') !== null")
        .await;
    scene.open();
    browser.until(&shows("Nothing is wanted now.")).await;
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn a_person_subscribes_sets_a_rule_and_watches_its_promise_by_keyboard_alone_in_chromium() {
    subscribed_by_keyboard(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn a_person_subscribes_sets_a_rule_and_watches_its_promise_by_keyboard_alone_in_firefox() {
    subscribed_by_keyboard(BrowserKind::Firefox).await;
}

/// The player's position in seconds.
pub async fn position(browser: &mut WebBrowser) -> f64 {
    let at = browser
        .evaluate("document.getElementById('audio').currentTime")
        .await;
    at.as_f64().expect("a number")
}

async fn played_by_keyboard(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    browser.hasten_minutes().await;
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
    browser.tab_to("forward").await;
    browser.press(&[ENTER]).await;
    browser
        .until("document.getElementById('audio').currentTime > 30")
        .await;
    browser.tab_back_to("back").await;
    browser.press(&[SPACE]).await;
    browser
        .until("document.getElementById('audio').currentTime < 29")
        .await;
    browser.tab_to("speed").await;
    type_text(&mut browser, "2").await;
    browser
        .until("document.getElementById('audio').playbackRate === 2")
        .await;
    assert_eq!(
        browser
            .evaluate("document.getElementById('audio').paused")
            .await,
        false
    );
    // Five minutes, which pass in a moment here.
    browser.tab_to("sleep").await;
    type_text(&mut browser, "5").await;
    browser
        .until("document.getElementById('audio').paused")
        .await;
    let heard = position(&mut browser).await;
    assert!((15.0..55.0).contains(&heard), "{heard}");
    let id = episodes[1].to_string();
    cedos_lab_rig::wait::until_async("stored", async || {
        let episode = scene.cast(&["show", "1"]).await["episodes"][1].clone();
        let stored = episode["position_ms"].as_f64().unwrap_or(0.0) / 1000.0;
        ((stored - heard).abs() < 0.1).then_some(())
    })
    .await;

    open_live(&mut browser, &page).await;
    browser.until(&shows("Goes on at 0:")).await;
    browser
        .until("document.getElementById('audio').currentTime > 0")
        .await;
    let at = position(&mut browser).await;
    assert!(
        (at - heard).abs() < 0.1,
        "{at} is not {heard} of episode {id}"
    );
    // Its end is played, and the library knows. The next episode would follow.
    browser.tab_to("sleep").await;
    type_text(&mut browser, "thi").await;
    browser
        .until("document.getElementById('sleep').value === 'episode'")
        .await;
    browser.tab_back_to("forward").await;
    browser.press(&[ENTER, ENTER]).await;
    browser.until(&shows("On this device, played")).await;
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn a_ready_episode_is_played_by_keyboard_and_goes_on_where_it_was_after_a_reload_in_chromium()
{
    played_by_keyboard(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn a_ready_episode_is_played_by_keyboard_and_goes_on_where_it_was_after_a_reload_in_firefox()
{
    played_by_keyboard(BrowserKind::Firefox).await;
}

async fn played_while_downloaded(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/news").await;
    let episode = scene.cast(&["show", "1"]).await["episodes"][4]["id"].to_string();
    let page = scene.url(&format!("podcasts/episode/{episode}"));
    open_live(&mut browser, &page).await;
    let hidden = browser
        .evaluate("document.getElementById('player').hidden")
        .await;
    assert_eq!(hidden, true);
    browser.tab_to("play").await;
    browser.press(&[ENTER]).await;
    // It begins by itself when its beginning is here.
    browser
        .until("!document.getElementById('player').hidden")
        .await;
    browser
        .until("document.getElementById('audio').currentTime > 0.2")
        .await;
    browser
        .evaluate("document.getElementById('audio').currentTime = 45")
        .await;
    browser
        .until(&shows("Waiting for more of the episode."))
        .await;
    // Firefox breaks off what it loads when any network of the machine changes; then it goes on there again.
    browser
        .until("Math.abs(document.getElementById('audio').currentTime - 45) < 0.1")
        .await;
    scene.open();
    browser
        .until("document.getElementById('audio').currentTime > 45.2")
        .await;
    browser.until(&shows("On this device")).await;
    let problem = browser
        .evaluate("document.getElementById('audio').error")
        .await;
    assert_eq!(problem, Value::Null);
    // One transfer brought it.
    let requests = scene.origin.requests();
    let of_it = requests
        .iter()
        .filter(|asked| asked.path == "/slow/news-1.mp3");
    assert_eq!(
        of_it.filter(|asked| asked.range_from().is_none()).count(),
        1
    );
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn an_episode_is_played_while_it_is_downloaded_and_waits_for_what_has_not_come_in_chromium() {
    played_while_downloaded(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn an_episode_is_played_while_it_is_downloaded_and_waits_for_what_has_not_come_in_firefox() {
    played_while_downloaded(BrowserKind::Firefox).await;
}

async fn chapters_seek(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    open_live(
        &mut browser,
        &scene.url(&format!("podcasts/episode/{}", episodes[1])),
    )
    .await;
    browser
        .until(&shows("Eels <script>alert(1)</script>"))
        .await;
    let chapters =
        "[...document.querySelectorAll('.chapters button')].map((c) => c.dataset.start).join()";
    assert_eq!(browser.evaluate(chapters).await, "0,12.5,40");
    let links = "[...document.querySelectorAll('.chapters a')].map((a) => a.href).join()";
    assert_eq!(browser.evaluate(links).await, "https://eels.example/");
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    browser
        .evaluate("document.querySelector('.chapters button[data-start=\"12.5\"]').focus()")
        .await;
    browser.press(&[ENTER]).await;
    browser
        .until("document.getElementById('audio').currentTime > 12.6")
        .await;
    let present = "document.querySelector('.chapters [aria-current]')?.dataset.start";
    browser.until(&format!("{present} === '12.5'")).await;
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn chapters_that_a_feed_names_are_in_the_player_as_text_and_seek_in_chromium() {
    chapters_seek(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn chapters_that_a_feed_names_are_in_the_player_as_text_and_seek_in_firefox() {
    chapters_seek(BrowserKind::Firefox).await;
}

/// After a failure the file has become shorter than the position: what is heard of it is stored all the same.
async fn shorter_after_failure(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    let page = scene.url(&format!("podcasts/episode/{}", episodes[0]));
    open_live(&mut browser, &page).await;
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    browser
        .evaluate("document.getElementById('audio').currentTime = 40")
        .await;
    let stored = async |ms: u64| {
        until_async("stored", async || {
            let shown = scene.cast(&["show", "1"]).await;
            (shown["episodes"][0]["position_ms"] == ms).then_some(())
        })
        .await;
    };
    stored(40_000).await;
    let fail = "(() => {
        const audio = document.getElementById('audio');
        audio.dispatchEvent(new Event('error'));
        Object.defineProperty(audio, 'duration', { get: () => 20 });
        window.loaded = false;
        audio.addEventListener('loadeddata', () => { window.loaded = true; });
        document.getElementById('live').dispatchEvent(new Event('update'));
    })()";
    browser.evaluate(fail).await;
    browser.until("window.loaded").await;
    browser
        .evaluate("document.getElementById('audio').currentTime = 3")
        .await;
    stored(3_000).await;
    browser.close().await;
}

#[tokio::test]
async fn the_position_in_a_file_that_became_shorter_is_stored_in_chromium() {
    shorter_after_failure(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn the_position_in_a_file_that_became_shorter_is_stored_in_firefox() {
    shorter_after_failure(BrowserKind::Firefox).await;
}

/// A browser forgets where it was when it fails: playing goes on there all the same.
async fn forgotten_position(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    let page = scene.url(&format!("podcasts/episode/{}", episodes[0]));
    open_live(&mut browser, &page).await;
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    browser
        .evaluate("document.getElementById('audio').currentTime = 40")
        .await;
    browser
        .until("!document.getElementById('audio').seeking")
        .await;
    // As Firefox does when it cannot decode.
    let fail = "(() => {
        const audio = document.getElementById('audio');
        Object.defineProperty(audio, 'error', { configurable: true, get: () => ({ code: 3 }) });
        Object.defineProperty(audio, 'currentTime', { configurable: true, get: () => 0 });
        audio.dispatchEvent(new Event('timeupdate'));
        audio.dispatchEvent(new Event('error'));
        window.loaded = false;
        audio.addEventListener('emptied', () => { window.loaded = true; });
        document.getElementById('live').dispatchEvent(new Event('update'));
        delete audio.currentTime;
        delete audio.error;
    })()";
    browser.evaluate(fail).await;
    browser.until("window.loaded").await;
    browser
        .until("Math.abs(document.getElementById('audio').currentTime - 40) < 0.1")
        .await;
    browser.close().await;
}

#[tokio::test]
async fn playing_goes_on_where_it_was_if_a_browser_forgets_that_in_chromium() {
    forgotten_position(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn playing_goes_on_where_it_was_if_a_browser_forgets_that_in_firefox() {
    forgotten_position(BrowserKind::Firefox).await;
}

async fn transcript_read_along(kind: BrowserKind) {
    let scene = PodcastScene::empty().await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    let page = scene.url(&format!("podcasts/episode/{}", episodes[1]));
    open_live(&mut browser, &page).await;
    // It may come after the page.
    browser
        .until("!document.getElementById('transcript').hidden")
        .await;
    browser
        .evaluate("document.querySelector('#transcript summary').focus()")
        .await;
    browser.press(&[ENTER]).await;
    browser
        .until(&shows("The lamp <script>alert(3)</script> burns."))
        .await;
    let speakers = "[...document.querySelectorAll('.speaker')].map((s) => s.innerText).join()";
    assert_eq!(browser.evaluate(speakers).await, "Ada,Jonas,Ada");
    let times =
        "[...document.querySelectorAll('.transcript button')].map((b) => b.dataset.start).join()";
    assert_eq!(browser.evaluate(times).await, "0,14.5,42");
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    browser
        .evaluate("document.querySelector('.transcript [data-start=\"14.5\"]').focus()")
        .await;
    browser.press(&[ENTER]).await;
    browser
        .until("document.getElementById('audio').currentTime > 14.6")
        .await;
    let present =
        "[...document.querySelectorAll('[aria-current=true]')].map((p) => p.dataset.start).join()";
    browser.until(&format!("{present} === '12.5,14.5'")).await;
    check_page(&mut browser, kind, "transcript", axe().as_deref()).await;
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn a_transcript_is_beside_the_player_as_text_and_seeks_in_chromium() {
    transcript_read_along(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn a_transcript_is_beside_the_player_as_text_and_seeks_in_firefox() {
    transcript_read_along(BrowserKind::Firefox).await;
}

async fn network_waited_for(kind: BrowserKind) {
    let origin = origin_namespace(|| PodcastOrigin::start_at("192.0.2.1"));
    wifi_on("198.51.100.7");
    let scene = PodcastScene::with(origin).await;
    let Some(mut browser) = started(kind, &scene).await else {
        return;
    };
    scene.subscribe("/news").await;
    scene
        .until_states("1", &["downloading", "ready", "failed", "new", "new"])
        .await;
    let episodes = scene.cast(&["show", "1"]).await["episodes"].clone();
    let page = |at: usize| scene.url(&format!("podcasts/episode/{}", episodes[at]["id"]));
    open_live(&mut browser, &page(0)).await;
    browser.until(&shows("119.51 kB of 239.02 kB")).await;
    wifi_off();
    browser.until(&shows("no network is up.")).await;
    // What is here is played all the same.
    browser
        .until("!document.getElementById('player').hidden")
        .await;
    browser.tab_to("audio").await;
    browser.press(&[SPACE]).await;
    browser
        .until("document.getElementById('audio').currentTime > 0.2")
        .await;
    scene.open();
    wifi_on("198.51.100.7");
    browser.until(&shows("On this device")).await;
    browser
        .until("document.getElementById('audio').currentTime > 0.4")
        .await;

    // Nobody pays for what they want to hear now without having said so.
    wifi_off();
    cell_on();
    open_live(&mut browser, &page(4)).await;
    browser.tab_to("play").await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("Use any network")).await;
    browser.tab_to("any-network").await;
    match kind {
        BrowserKind::Chromium => browser.press(&[ENTER]).await,
        // A Firefox without a screen gets the keys here, and presses no button; the cause is not known.
        BrowserKind::Firefox => {
            let click = "document.activeElement.click()";
            browser.evaluate(click).await;
        }
    }
    browser
        .until("document.getElementById('audio').currentTime > 0.2")
        .await;
    // Firefox breaks all connections when a network changes, and says so of the page's updates.
    let console = browser.console();
    let is_of_change = |text: &String| {
        let words = ["was interrupted while", "establish a connection"];
        words.iter().any(|word| text.contains(word)) && text.contains("/updates")
    };
    let others = console
        .iter()
        .filter(|text| !(kind == BrowserKind::Firefox && is_of_change(text)));
    assert_eq!(others.count(), 0, "{console:?}");
    browser.close().await;
}

#[test]
fn the_page_says_what_network_an_episode_waits_for_and_it_comes_when_there_is_one_in_chromium() {
    in_namespace(this_test!(), || network_waited_for(BrowserKind::Chromium));
}

#[test]
fn the_page_says_what_network_an_episode_waits_for_and_it_comes_when_there_is_one_in_firefox() {
    in_namespace(this_test!(), || network_waited_for(BrowserKind::Firefox));
}

/// The environment variable with which the pictures of docs/readycast.md are made anew.
const PICTURES_VARIABLE: &str = "CEDOS_WRITE_PICTURES";

/// Bytes of all pictures of the tour: everybody who has the repository has them.
const PICTURES_BYTES_MAX: u64 = 600_000;

/// A picture of the tour.
struct TourPicture {
    name: &'static str,
    size: (u32, u32),
    scheme: ColourScheme,
    path: String,
    /// The script that runs on the page before the picture is taken.
    prepare: &'static str,
}

fn tour(episodes: &[i64]) -> [TourPicture; 6] {
    let picture = |name, size, scheme, path: &str| TourPicture {
        name,
        size,
        scheme,
        path: path.to_owned(),
        prepare: "0",
    };
    use ColourScheme::{Dark, Light};
    let episode = |at: usize| format!("podcasts/episode/{}", episodes[at]);
    [
        picture("library", (900, 560), Light, "podcasts"),
        picture(
            "search",
            (900, 560),
            Light,
            "podcasts/search?words=news&in=directory",
        ),
        TourPicture {
            prepare: "document.querySelector('details').open = true",
            ..picture("rule", (900, 800), Light, "podcasts/channel/1")
        },
        picture("queue", (900, 640), Dark, "podcasts/queue"),
        picture("episode", (390, 844), Light, &episode(0)),
        picture("chapters", (390, 844), Dark, &episode(1)),
    ]
}

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[tokio::test]
async fn the_tour_shows_pictures_of_the_pages_that_are_small_together() {
    let folder = repository().join("docs/pictures");
    if std::env::var_os(PICTURES_VARIABLE).is_some() {
        let scene = PodcastScene::new().await;
        let started = started(BrowserKind::Chromium, &scene).await;
        let mut browser = started.expect("Chromium is installed");
        let news = scene.cast(&["show", "1"]).await["episodes"][0]["id"].as_i64();
        let water = scene.cast(&["show", "2"]).await["episodes"][0]["id"].as_i64();
        let episodes = [news.expect("a number"), water.expect("a number")];
        std::fs::create_dir_all(&folder).expect("a folder");
        for picture in tour(&episodes) {
            let (width, height) = picture.size;
            browser.resize(width, height).await;
            browser.prefer(picture.scheme).await;
            browser.open(&scene.url(&picture.path)).await;
            browser.evaluate(picture.prepare).await;
            let file = folder.join(format!("podcasts-{}.png", picture.name));
            std::fs::write(file, browser.screenshot().await).expect("written");
        }
        browser.close().await;
    }
    let text = std::fs::read_to_string(repository().join("docs/readycast.md")).expect("the tour");
    let mut bytes = 0;
    for TourPicture { name, .. } in tour(&[0, 0]) {
        let file = format!("podcasts-{name}.png");
        assert!(
            text.contains(&format!("](pictures/{file})")),
            "{file} is not in the tour"
        );
        let found = folder.join(&file).metadata();
        bytes += found
            .unwrap_or_else(|error| panic!("{file}: {error}"))
            .len();
    }
    assert!(bytes <= PICTURES_BYTES_MAX, "{bytes} bytes of pictures");
}
