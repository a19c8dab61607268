//! Real browsers, where they are installed: the agent's page by keyboard, and downloads that are handed over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cedos_lab_rig::browser::{BrowserKind, ENTER, WebBrowser};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::wait::until_async;

use crate::page::{PageHome, halting};

const BYTES: usize = 400_000;

/// Whether the page shows these words, as an expression.
fn shows(words: &str) -> String {
    format!("document.body.innerText.includes({words:?})")
}

async fn page_by_keyboard(kind: BrowserKind) {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = PageHome::new().await;
    let Some(mut browser) = WebBrowser::start(kind, home.path(), &[]).await else {
        return;
    };
    let link = home.link(&[]).await;
    browser.open(&link.url).await;
    browser.until(&shows("Nothing is downloaded")).await;
    let get = [
        "get",
        "--detach",
        "-o",
        "film.mp4",
        "--stall",
        "1s",
        &origin.url("/a"),
    ];
    home.run(&get).await.ends_with(0, "1");
    browser.until(&shows("film.mp4")).await;
    // The first stop is the way past the navigation.
    browser.press(&[cedos_lab_rig::browser::TAB]).await;
    let first = browser.evaluate("document.activeElement.className").await;
    assert_eq!(first, "skip");
    browser.tab_to("t1-toggle").await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("Paused")).await;
    home.until_standing(1, "paused").await;
    // The page changed under it, and the focus stayed; the button does the next thing now.
    let focused =
        "document.activeElement.id === 't1-toggle' && document.activeElement.value === 'resume'";
    browser.until(focused).await;
    // So it does when something before it comes and goes.
    let moves = "(() => {
        const there = () => document.getElementById('live').innerHTML;
        const line = '<p>for a moment</p>';
        show(line + there());
        show(there().replace(line, ''));
    })()";
    browser.evaluate(moves).await;
    assert_eq!(browser.evaluate(focused).await, true, "the focus stays");
    let said = "document.getElementById('said').textContent.includes('film.mp4: Paused')";
    browser.until(said).await;

    // A deadline that makes no sense is refused with a sentence; one that does is set.
    browser.tab_to("t1-toggle").await;
    browser
        .evaluate("document.querySelector('#t1-deadline summary').focus()")
        .await;
    browser.press(&[ENTER]).await;
    browser.tab_to("t1-by").await;
    browser.press(&["s", "o", "o", "n", ENTER]).await;
    browser
        .until("!document.getElementById('problem').hidden")
        .await;
    let problem = browser
        .evaluate("document.getElementById('problem').textContent")
        .await;
    assert!(
        problem
            .as_str()
            .is_some_and(|text| text.contains("is not a time")),
        "{problem}"
    );
    browser
        .evaluate("document.getElementById('t1-by').select()")
        .await;
    browser.press(&["i", "n", " ", "2", "h", ENTER]).await;
    // Two hours, or a moment less.
    browser
        .until("/\\(in (2 hours|1 h 5\\d min)\\)/.test(document.body.innerText)")
        .await;
    browser
        .until("document.getElementById('problem').hidden")
        .await;

    open.store(true, Ordering::Relaxed);
    // What was closed left the focus where it was opened.
    browser.tab_back_to("t1-toggle").await;
    browser.press(&[ENTER]).await;
    browser.until(&shows("Complete")).await;
    home.until_standing(1, "done").await;

    for path in ["transfer/1", "networks", ""] {
        browser.open(&format!("{}{path}", link.url)).await;
        for (width, height) in [(320, 640), (1280, 800)] {
            browser.resize(width, height).await;
            let fits = "document.documentElement.scrollWidth <= window.innerWidth";
            assert_eq!(browser.evaluate(fits).await, true, "/{path} at {width}");
        }
    }
    // The favicon of a data: URL and the like are the browser's own.
    let here = link.url.rsplit_once('/').expect("a path").0;
    for url in browser.requests() {
        assert!(url.starts_with(here) || !url.starts_with("http"), "{url}");
    }
    assert!(browser.console().is_empty(), "{:?}", browser.console());
    browser.close().await;
}

#[tokio::test]
async fn chromium_shows_and_steers_transfers_by_keyboard_alone() {
    page_by_keyboard(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn firefox_shows_and_steers_transfers_by_keyboard_alone() {
    page_by_keyboard(BrowserKind::Firefox).await;
}

/// A page whose updates end, and that is refused once before it is there again.
async fn refused_once(kind: BrowserKind) {
    let answer = |status: &str, media_type: &str, body: &str| {
        let length = body.len().to_string();
        let headers = [("Content-Type", media_type), ("Content-Length", &length)];
        OriginReply(reply(status, &headers, body.as_bytes()), ReplyEnd::Close)
    };
    let (pages, updates) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let origin = ScriptedOrigin::start(move |asked| match &*asked.path {
        "/" if pages.fetch_add(1, Ordering::Relaxed) == 1 => {
            answer("503 Service Unavailable", "text/html", "<p>not now</p>")
        }
        "/" => answer(
            "200 OK",
            "text/html",
            "<!doctype html><title>t</title><p id=\"problem\" hidden></p><p id=\"said\"></p>\
             <div id=\"live\" data-updates=\"/updates\"></div><script src=\"/page.js\"></script>",
        ),
        "/updates" => {
            let n = updates.fetch_add(1, Ordering::Relaxed);
            let event = format!("data: \"<p>update {n}</p>\"\n\n");
            answer("200 OK", "text/event-stream", &event)
        }
        "/page.js" => answer(
            "200 OK",
            "text/javascript",
            include_str!("../../../agent/assets/page.js"),
        ),
        _ => answer("404 Not Found", "text/plain", ""),
    })
    .await;
    let folder = tempfile::tempdir().expect("a directory");
    let Some(mut browser) = WebBrowser::start(kind, folder.path(), &[]).await else {
        return;
    };
    browser.open(&origin.url("/")).await;
    browser.until(&shows("It is asked again")).await;
    browser.until(&shows("update 1")).await;
    browser
        .until("document.getElementById('problem').hidden")
        .await;
    browser.close().await;
}

#[tokio::test]
async fn a_page_that_is_refused_once_goes_on_in_chromium() {
    refused_once(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn a_page_that_is_refused_once_goes_on_in_firefox() {
    refused_once(BrowserKind::Firefox).await;
}

/// An origin with a page that sets a cookie and links a file; the file's first bytes come, and the rest once the
/// agent asked for it.
async fn behind_login() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| {
        if asked.path == "/page" {
            let fields = [("Content-Type", "text/html"), ("Set-Cookie", "user=me")];
            let page = b"<!doctype html><title>page</title><a id=file href=\"/file.bin\">file</a>";
            return OriginReply(reply("200 OK", &fields, page), ReplyEnd::Close);
        }
        if asked.path != "/file.bin" {
            return OriginReply(reply("404 Not Found", &[], b""), ReplyEnd::Close);
        }
        if asked.header("cookie") != Some("user=me") {
            return OriginReply(reply("403 Forbidden", &[], b""), ReplyEnd::Close);
        }
        let answer = proper(asked, &object(BYTES, 1), "\"v1\"");
        // Who shows its browser's engine in `Sec-Fetch-Mode` is the browser itself.
        match asked.header("sec-fetch-mode") {
            Some(_) => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence),
            None => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await
}

async fn download_handed_over(kind: BrowserKind) {
    let origin = behind_login().await;
    let home = PageHome::new().await;
    let socket = [("CEDOS_AGENT", home.agent.socket.as_path())];
    home.run(&["browser", "install"])
        .await
        .ends_with(0, "browser-extension");
    let Some(mut browser) = WebBrowser::start(kind, home.path(), &socket).await else {
        return;
    };
    let extension = home.path().join(".local/share/cedos/browser-extension");
    browser.install_extension(&extension).await;
    if kind == BrowserKind::Chromium {
        // Its worker begins later, and only a worker that ran once is woken by a download.
        let manifest =
            (home.path()).join(".config/chromium/NativeMessagingHosts/io.github.cedos.json");
        let manifest = std::fs::read(manifest).expect("installed");
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
        let inside = manifest["allowed_origins"][0]
            .as_str()
            .expect("an extension");
        browser.open(&format!("{inside}manifest.json")).await;
        browser
            .until("chrome.storage.local.get('on').then(({ on }) => on === true)")
            .await;
    }
    for (id, name) in [(1, "file.bin"), (2, "file (1).bin")] {
        browser.open(&origin.url("/page")).await;
        browser
            .evaluate("document.getElementById('file').click()")
            .await;
        until_async("the agent has it", async || {
            let listed = home.run(&["ls", "--json"]).await;
            // The browser's messages are read meanwhile.
            browser.evaluate("1").await;
            (listed.events.len() as u64 == id).then_some(())
        })
        .await;
        home.until_standing(id, "done").await;
        let file = std::fs::read(home.path().join("Downloads").join(name));
        assert!(file.expect("a file") == object(BYTES, 1), "{name}");
    }
    let agents = origin.requests();
    let mut agents = agents
        .iter()
        .filter(|asked| asked.header("sec-fetch-mode").is_none());
    let agents = agents.find(|asked| asked.path == "/file.bin").expect("one");
    assert_eq!(agents.header("referer"), Some(&*origin.url("/page")));
    assert!(
        agents
            .header("user-agent")
            .is_some_and(|name| name.starts_with("Mozilla/"))
    );
    // Nothing of the browser's own download is left.
    until_async("the browser gave it up", async || {
        browser.evaluate("1").await;
        let folder = std::fs::read_dir(home.path().join("Downloads")).expect("a folder");
        (folder.count() == 2).then_some(())
    })
    .await;
    browser.close().await;
}

#[tokio::test]
async fn chromium_hands_a_download_over_with_its_cookies() {
    download_handed_over(BrowserKind::Chromium).await;
}

#[tokio::test]
async fn firefox_hands_a_download_over_with_its_cookies() {
    download_handed_over(BrowserKind::Firefox).await;
}
