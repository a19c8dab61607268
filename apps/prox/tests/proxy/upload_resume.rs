//! Uploads with a token: continued where they broke off, delivered once, discarded at last.

use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{Prox, ProxConfig, ProxFlowOutcome};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::sync::Notify;

const CREATED: &str = "HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nthere";
const TOKEN: &str = "0123456789abcdef-_XY";

/// An origin that keeps bodies and answers the n-th request with `answer(n)`, once it may.
struct Store {
    origin: ScriptedOrigin,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    may_answer: Arc<Notify>,
}

impl Store {
    async fn start(answer: fn(usize) -> &'static str) -> Store {
        let (bodies, may_answer) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()));
        let (kept, told) = (bodies.clone(), may_answer.clone());
        let origin = ScriptedOrigin::play(move |request, mut stream| {
            let (kept, told) = (kept.clone(), told.clone());
            async move {
                if let Some(body) = request.body(&mut stream).await {
                    kept.lock().push(body);
                    told.notified().await;
                    let _ = stream.write_all(answer(request.count).as_bytes()).await;
                }
            }
        })
        .await;
        Store {
            origin,
            bodies,
            may_answer,
        }
    }

    fn head(&self, method: &str, token: &str, length: usize) -> String {
        format!(
            "{method} {} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\
             Expect: 100-continue\r\nCedos-Upload: {token}\r\n\r\n",
            self.origin.url("/a")
        )
    }
}

/// Which byte the proxy wants next.
async fn offset(device: &mut Device) -> usize {
    let head = device.read_head().await;
    assert_eq!(head.status, 104);
    head.header("upload-offset").parse().unwrap()
}

#[tokio::test]
async fn an_upload_that_broke_off_goes_on_where_it_was() {
    let store = Store::start(|_| CREATED).await;
    store.may_answer.notify_one();
    let (prox, data) = (prox(), pattern(100_000));
    let head = store.head("PUT", TOKEN, data.len());
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(&head).await;
    assert_eq!(offset(&mut device).await, 0);
    device.send(&data[..60_000]).await;
    device.crash_with_reset();
    assert!(matches!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Broken(_)
    ));
    assert_eq!(prox.holdings().retained_uploads, 1);
    // Somebody else's token of the same name is another upload.
    let (stranger, mut other) = start(&prox, [2; 32]);
    other.send(&head).await;
    assert_eq!(offset(&mut other).await, 0);
    other.crash_with_reset();
    ended(stranger).await;
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(&head).await;
    let from = offset(&mut device).await;
    // What lay in the flow's buffer is lost with it.
    assert!((40_000..=60_000).contains(&from), "{from}");
    device.send(&data[from..]).await;
    device.finish_sending().await;
    assert_eq!(device.answer().await.whole().status, 201);
    assert_eq!(
        ended(serving).await.bytes_up as usize,
        data.len() - from,
        "only what was missing"
    );
    assert!(store.bodies.lock().as_slice() == [data]);
    let got = store.origin.requests()[0].clone();
    assert_eq!(got.header("cedos-upload"), None, "{got:?}");
    // What nobody needs any more is not kept; the stranger's still is.
    until(|| prox.holdings().retained_uploads == 1).await;
}

#[tokio::test]
async fn who_comes_back_before_the_old_flow_is_known_to_be_dead_takes_it_over() {
    let store = Store::start(|_| CREATED).await;
    store.may_answer.notify_one();
    let (prox, data) = (prox(), pattern(50_000));
    let head = store.head("PUT", TOKEN, data.len());
    let (first, mut silent) = start(&prox, CLIENT);
    silent.send(&head).await;
    assert_eq!(offset(&mut silent).await, 0);
    silent.send(&data[..30_000]).await;
    let (second, mut device) = start(&prox, CLIENT);
    device.send(&head).await;
    let from = offset(&mut device).await;
    assert!(matches!(
        ended(first).await.outcome,
        ProxFlowOutcome::Broken(_)
    ));
    device.send(&data[from..]).await;
    device.finish_sending().await;
    assert_eq!(device.answer().await.whole().status, 201);
    assert_eq!(ended(second).await.outcome, ProxFlowOutcome::Delivered);
    assert!(store.bodies.lock().as_slice() == [data]);
    until(|| prox.holdings() == Default::default()).await;
}

#[tokio::test]
async fn a_post_whose_device_went_is_delivered_once_and_answered_to_who_comes_back() {
    let store = Store::start(|_| CREATED).await;
    let prox = prox();
    let head = store.head("POST", TOKEN, 3);
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(&head).await;
    assert_eq!(offset(&mut device).await, 0);
    device.send("abc").await;
    until(|| store.bodies.lock().len() == 1).await;
    device.crash_with_reset();
    assert!(matches!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Broken(_)
    ));
    // The origin answers while nobody is there.
    store.may_answer.notify_one();
    // sleep: what the proxy has of an answer shows in nothing until somebody asks
    tokio::time::sleep(Duration::from_millis(50)).await;
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(&head).await;
    assert_eq!(offset(&mut device).await, 3);
    device.finish_sending().await;
    let answer = device.answer().await.whole();
    assert_eq!(
        (answer.status, answer.body.as_slice()),
        (201, &b"there"[..])
    );
    ended(serving).await;
    assert_eq!(store.bodies.lock().as_slice(), [b"abc"]);
    until(|| prox.holdings() == Default::default()).await;
}

#[tokio::test]
async fn a_post_that_the_origin_may_have_seen_is_not_sent_again_for_who_comes_back() {
    // It reads the body and hangs up.
    let store = Store::start(|_| "").await;
    store.may_answer.notify_one();
    let prox = prox();
    for _ in 0..2 {
        let (serving, mut device) = start(&prox, CLIENT);
        device.send(store.head("POST", TOKEN, 3)).await;
        let from = offset(&mut device).await;
        device.send(&b"abc"[from..]).await;
        device.finish_sending().await;
        assert_eq!(device.answer().await.whole().status, 502);
        ended(serving).await;
    }
    assert_eq!(store.bodies.lock().len(), 1);
}

#[tokio::test]
async fn an_origin_that_could_not_just_now_is_asked_again_without_the_body_from_the_device() {
    const BUSY: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
    // A device that has its answer may break off before its flow counts as delivered.
    for breaks_off in [false, true] {
        let store = Store::start(|number| if number == 0 { BUSY } else { CREATED }).await;
        let (prox, data) = (prox(), pattern(30_000));
        for (n, status) in [503, 201].into_iter().enumerate() {
            store.may_answer.notify_one();
            let (serving, mut device) = start(&prox, CLIENT);
            device.send(store.head("PUT", TOKEN, data.len())).await;
            let from = offset(&mut device).await;
            assert_eq!(from, n * data.len());
            device.send(&data[from..]).await;
            if breaks_off && n == 0 {
                assert_eq!(device.read_head().await.status, status);
                device.crash_with_reset();
            } else {
                device.finish_sending().await;
                assert_eq!(device.answer().await.whole().status, status);
            }
            ended(serving).await;
        }
        assert!(store.bodies.lock().as_slice() == [data.clone(), data]);
        until(|| prox.holdings() == Default::default()).await;
    }
}

#[tokio::test]
async fn what_is_kept_goes_after_its_time_or_when_room_is_needed() {
    let store = Store::start(|_| CREATED).await;
    store.may_answer.notify_one();
    let leave = async |prox: &Arc<Prox>, token: &str| {
        let (serving, mut device) = start(prox, CLIENT);
        device.send(store.head("PUT", token, 6_000)).await;
        offset(&mut device).await;
        device.crash_with_reset();
        ended(serving).await;
    };
    let short = Prox::new(ProxConfig {
        keep: Duration::from_millis(20),
        ..config()
    });
    let short = short.unwrap();
    leave(&short, TOKEN).await;
    until(|| short.holdings() == Default::default()).await;
    let small = Prox::new(ProxConfig {
        client_pinned_bytes_max: 10_000,
        client_kept_max: 1,
        ..config()
    });
    let small = small.unwrap();
    leave(&small, TOKEN).await;
    assert_eq!(small.holdings().retained_uploads, 1);
    // It needs the room of the first.
    let answer = ask(&small, plain(&store.origin.url("/b"), &[1; 9_000])).await;
    assert_eq!(answer.whole().status, 201);
    until(|| small.holdings() == Default::default()).await;
}

fn plain(url: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("PUT {url} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

#[tokio::test]
async fn a_token_that_says_nothing_is_refused() {
    let store = Store::start(|_| CREATED).await;
    let prox = prox();
    for token in ["short", "with a space in it.", &"x".repeat(65)] {
        let answer = ask(&prox, store.head("PUT", token, 3)).await.whole();
        assert_eq!(answer.status, 400, "{token}");
    }
    let unasked = format!(
        "PUT {} HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nCedos-Upload: {TOKEN}\r\n\r\nabc",
        store.origin.url("/")
    );
    assert_eq!(ask(&prox, unasked).await.whole().status, 400);
    assert_eq!(store.origin.requests().len(), 0);
}
