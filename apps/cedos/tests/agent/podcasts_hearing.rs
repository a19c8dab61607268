//! What is heard after what, in Chromium and Firefox: the order of the user's own, what goes on where it was, the next episode
//! after the end of one, media keys.

use cedos_lab_rig::browser::{BrowserKind, ENTER, SPACE, WebBrowser};

use crate::podcast_scene::PodcastScene;
use crate::podcasts_browser::{check_console, open_live, position, shows, started};

/// The titles in the order of hearing, as an expression.
const UP_NEXT: &str = "[...document.querySelectorAll('li[id^=n] h3 a')].map((a) => a.textContent.split(':')[0]).join()";

/// Whether the player plays, as an expression.
const PLAYS: &str = "document.getElementById('audio').currentTime > 0.2 && !document.getElementById('audio').paused";

/// A listener with two episodes on the device, and their numbers, the newest first.
async fn two_episodes(kind: BrowserKind) -> Option<(PodcastScene, WebBrowser, Vec<i64>)> {
    let scene = PodcastScene::empty().await;
    let browser = started(kind, &scene).await?;
    scene.subscribe("/water").await;
    let episodes = scene.until_states("1", &["ready", "ready"]).await;
    Some((scene, browser, episodes))
}

async fn moved_by_keyboard(kind: BrowserKind) {
    let Some((scene, mut browser, episodes)) = two_episodes(kind).await else {
        return;
    };
    open_live(&mut browser, &scene.url("podcasts/queue")).await;
    browser.until(&format!("{UP_NEXT} === '11,12'")).await;
    let up = format!("n{}-up", episodes[0]);
    browser.tab_to(&up).await;
    browser.press(&[ENTER]).await;
    browser.until(&format!("{UP_NEXT} === '12,11'")).await;
    // Who moves on with the keyboard is where they were, and hears what was done.
    let focused = format!("document.activeElement.id === {up:?}");
    browser.until(&focused).await;
    browser
        .until("document.getElementById('said').textContent.endsWith('is one place higher')")
        .await;
    // At the top there is nothing to do, and nothing breaks.
    browser.press(&[SPACE]).await;
    browser.until(&format!("{UP_NEXT} === '12,11'")).await;
    browser.tab_to(&format!("n{}-down", episodes[0])).await;
    browser.press(&[SPACE]).await;
    browser.until(&format!("{UP_NEXT} === '11,12'")).await;
    // Forward the way leads around by the browser's own buttons, and a Firefox without a screen presses none after that.
    browser.tab_back_to(&format!("n{}-top", episodes[0])).await;
    browser.press(&[ENTER]).await;
    browser.until(&format!("{UP_NEXT} === '12,11'")).await;
    let listed = scene.cast(&["next"]).await;
    assert_eq!(listed["episodes"][0]["id"], episodes[0], "{listed}");
    browser.tab_to("reset-up-next").await;
    browser.press(&[ENTER]).await;
    browser.until(&format!("{UP_NEXT} === '11,12'")).await;
    // From the page of an episode.
    open_live(
        &mut browser,
        &scene.url(&format!("podcasts/episode/{}", episodes[0])),
    )
    .await;
    browser.tab_to("hear-next").await;
    browser.press(&[ENTER]).await;
    browser
        .until("document.getElementById('said').textContent.endsWith('is first in Up next')")
        .await;
    let listed = scene.cast(&["next"]).await;
    assert_eq!(listed["episodes"][0]["id"], episodes[0], "{listed}");
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn the_order_of_hearing_is_changed_by_keyboard_alone_in_chromium() {
    moved_by_keyboard(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn the_order_of_hearing_is_changed_by_keyboard_alone_in_firefox() {
    moved_by_keyboard(BrowserKind::Firefox).await;
}

async fn next_after_the_end(kind: BrowserKind) {
    let Some((scene, mut browser, episodes)) = two_episodes(kind).await else {
        return;
    };
    let page = |at: usize| scene.url(&format!("podcasts/episode/{}", episodes[at]));
    open_live(&mut browser, &page(0)).await;
    browser.until(&shows("Next: 11: A very long evening")).await;
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    browser
        .evaluate("document.getElementById('audio').currentTime = 57")
        .await;
    browser.tab_to("audio").await;
    browser.press(&[SPACE]).await;
    let is_other = format!("location.href === {:?}", page(1));
    browser.until(&is_other).await;
    match kind {
        BrowserKind::Chromium => browser.until(PLAYS).await,
        // Whether a Firefox lets a page begin by itself is its user's choice.
        BrowserKind::Firefox => browser.until(&shows("On this device")).await,
    }
    let heard = scene.cast(&["show", "1"]).await["episodes"][0].clone();
    assert_eq!(heard["played"], true, "{heard}");
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn after_the_end_of_an_episode_the_next_one_is_played_in_chromium() {
    next_after_the_end(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn after_the_end_of_an_episode_the_next_one_is_played_in_firefox() {
    next_after_the_end(BrowserKind::Firefox).await;
}

async fn gone_on_with(kind: BrowserKind) {
    let Some((scene, mut browser, episodes)) = two_episodes(kind).await else {
        return;
    };
    browser.open(&scene.url("podcasts")).await;
    assert_eq!(
        browser.evaluate(&shows("Continue listening")).await,
        false,
        "nothing was begun"
    );
    let store = format!("/podcasts/episode/{}/position", episodes[1]);
    let stored = scene
        .link
        .post(&store, "position_ms=31000&duration_ms=60000");
    assert_eq!(stored.await.status, 204);
    open_live(&mut browser, &scene.url("podcasts")).await;
    browser.until(&shows("At 0:31 of 1:00, 0:29 left")).await;
    browser.tab_to(&format!("b{}-continue", episodes[1])).await;
    browser.press(&[ENTER]).await;
    let page = scene.url(&format!("podcasts/episode/{}", episodes[1]));
    browser.until(&format!("location.href === {page:?}")).await;
    browser
        .until("document.getElementById('audio').currentTime >= 31")
        .await;
    if kind == BrowserKind::Chromium {
        browser.until(PLAYS).await;
    }
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn what_was_begun_goes_on_from_the_page_of_the_library_in_chromium() {
    gone_on_with(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn what_was_begun_goes_on_from_the_page_of_the_library_in_firefox() {
    gone_on_with(BrowserKind::Firefox).await;
}

async fn played_by_media_keys(kind: BrowserKind) {
    let Some((scene, mut browser, episodes)) = two_episodes(kind).await else {
        return;
    };
    browser.keep_media_keys().await;
    let page = |at: usize| scene.url(&format!("podcasts/episode/{}", episodes[at]));
    open_live(&mut browser, &page(0)).await;
    browser
        .until("document.getElementById('audio').duration > 55")
        .await;
    let told =
        "navigator.mediaSession.metadata.title + ' / ' + navigator.mediaSession.metadata.artist";
    assert_eq!(
        browser.evaluate(told).await,
        "12: Where eels go / Deep Water"
    );
    // A page that nobody touched may not play.
    browser.tab_to("audio").await;
    browser.press(&[SPACE]).await;
    browser.until(PLAYS).await;
    browser.press_media_key("pause").await;
    browser
        .until("document.getElementById('audio').paused")
        .await;
    let before = position(&mut browser).await;
    browser.press_media_key("seekforward").await;
    let after = position(&mut browser).await;
    assert!((after - before - 30.0).abs() < 0.5, "{before} {after}");
    browser.press_media_key("seekbackward").await;
    let back = position(&mut browser).await;
    assert!((after - back - 15.0).abs() < 0.5, "{after} {back}");
    browser.press_media_key("play").await;
    browser
        .until("!document.getElementById('audio').paused")
        .await;
    browser.press_media_key("nexttrack").await;
    browser
        .until(&format!("location.href === {:?}", page(1)))
        .await;
    check_console(&browser, &scene);
    browser.close().await;
}

#[tokio::test]
async fn media_keys_play_pause_skip_and_go_to_the_next_episode_in_chromium() {
    played_by_media_keys(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn media_keys_play_pause_skip_and_go_to_the_next_episode_in_firefox() {
    played_by_media_keys(BrowserKind::Firefox).await;
}
