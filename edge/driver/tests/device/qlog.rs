//! Tests of session logs: they are written and read back.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{active, at, device, flow, server, server_with, wifi};
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{EndpointConfig, ProvidedLink, ProvidedLinks, Qlog, TraceLevel};
use d2tp_links::CostClass;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The records of every file in a folder, with the file's first line apart.
fn files(folder: &Path) -> Vec<(Value, Vec<Value>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(path.extension().unwrap(), "sqlog");
        let text = std::fs::read_to_string(path).unwrap();
        let mut records = text.split('\x1e').filter(|r| !r.is_empty()).map(|record| {
            assert!(record.ends_with('\n'), "RFC 7464: a record ends its line");
            serde_json::from_str::<Value>(record).unwrap()
        });
        let head = records.next().unwrap();
        files.push((head, records.collect()));
    }
    files
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|e| e["name"] == name).collect()
}

fn first(events: &[Value], name: &str, is_it: impl Fn(&Value) -> bool) -> usize {
    events
        .iter()
        .position(|e| e["name"] == name && is_it(&e["data"]))
        .unwrap_or_else(|| panic!("no such {name}"))
}

#[tokio::test]
async fn a_session_that_moves_is_told_in_order_by_both_ends() {
    let folder = tempfile::tempdir().unwrap();
    let log = Qlog::in_folder(folder.path(), TraceLevel::Packets).unwrap();
    let (server, links) = (server(), ProvidedLinks::new());
    server.log_to(&log);
    let device = device(&server, &links, links.clone()).await;
    device.log_to(&log);
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    far.write_all(&[1; 100_000]).await.unwrap();
    within(near.read_exact(&mut [0; 100_000])).await.unwrap();
    device.note("cedos:decision", || serde_json::json!({ "link": "dock" }));
    links.add(ProvidedLink::new("dock", at(3)));
    until("the other link answers", || {
        !active(&device, "dock").is_empty()
    })
    .await;
    links.remove("wifi");
    until("the first is gone", || active(&device, "wifi").is_empty()).await;
    far.write_all(&[2; 100_000]).await.unwrap();
    within(near.read_exact(&mut [0; 100_000])).await.unwrap();
    let deadline = std::time::Duration::from_secs(99);
    near.set_deadline(Some(deadline));
    until("the other end knows", || {
        d2tp_driver::FlowIo::deadline_left(&far).is_some()
    })
    .await;
    let datagram = bytes::Bytes::from_static(&[3; 77]);
    let expiry = std::time::Duration::from_secs(5);
    near.connection().send_datagram(datagram, expiry).unwrap();
    within(far.connection().recv_datagram()).await.unwrap();
    drop(near);
    until("the flow's end is known", || far.end().is_some()).await;
    device.close().await;
    until("the server knows", || server.counts().0 == 0).await;
    log.finish();

    let files = files(folder.path());
    assert_eq!(files.len(), 2, "one for each end");
    for (head, events) in &files {
        assert_eq!(head["file_schema"], "urn:ietf:params:qlog:file:sequential");
        assert_eq!(head["serialization_format"], "application/qlog+json-seq");
        let times: Vec<f64> = events.iter().map(|e| e["time"].as_f64().unwrap()).collect();
        assert!(times.is_sorted(), "time runs forwards");
        assert!(named(events, "d2tp:events_dropped").is_empty());
        for packet in events.iter().filter(|e| {
            ["d2tp:packet_sent", "d2tp:packet_received"].contains(&e["name"].as_str().unwrap())
        }) {
            let path = &packet["data"]["path"];
            let opened = first(events, "d2tp:path_opened", |d| d["path"] == *path);
            let it = events.iter().position(|e| e == packet).unwrap();
            assert!(opened < it, "a packet on path {path} before it was opened");
        }
        assert!(!named(events, "d2tp:metrics_updated").is_empty());
        let closed = first(events, "d2tp:session_closed", |_| true);
        assert_eq!(closed, events.len() - 1, "nothing after the end");
    }
    let of = |role: &str| {
        let file = files
            .iter()
            .find(|(head, _)| head["trace"]["vantage_point"]["type"] == role);
        &file.unwrap().1
    };
    let device = of("client");
    let steps = [
        first(device, "d2tp:handshake_sent", |d| d["link"] == "wifi"),
        first(device, "d2tp:established", |_| true),
        first(device, "cedos:decision", |d| d["link"] == "dock"),
        first(device, "d2tp:path_opened", |d| d["link"] == "dock"),
        first(device, "d2tp:challenge", |d| d["by"] == "local"),
        first(device, "d2tp:challenge_answered", |d| d["by"] == "remote"),
        first(device, "d2tp:path_up", |d| d["link"] == "dock"),
        first(device, "d2tp:path_closed", |d| d["link"] == "wifi"),
        first(device, "d2tp:switched", |d| {
            d["from"] == "wifi" && d["to"] == "dock"
        }),
        first(device, "d2tp:deadline", |d| d["by"] == "local"),
        first(device, "d2tp:datagram", |d| {
            d["by"] == "local" && d["length"] == 77
        }),
        first(device, "d2tp:flow_reset", |_| true),
    ];
    assert!(steps.is_sorted(), "{steps:?}");
    let switch = &named(device, "d2tp:switched")[0]["data"];
    assert_eq!(switch["kind"], "make-before-break");
    let server = of("server");
    let opened = first(server, "d2tp:flow_opened", |d| d["by"] == "remote");
    let changed = first(server, "d2tp:deadline_changed", |_| true);
    assert!(opened < changed);
}

#[tokio::test]
async fn grants_are_told_and_packets_only_as_far_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let log = Qlog::in_folder(folder.path(), TraceLevel::Events).unwrap();
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    device.log_to(&log);
    links.add(ProvidedLink::new("cell", at(4)).with_class(CostClass::Metered));
    let mut near = device.open(Default::default()).unwrap();
    device.allow_paid(&near, true, None);
    near.write_all(b"!").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    far.write_all(&[1; 300_000]).await.unwrap();
    within(near.read_exact(&mut [0; 300_000])).await.unwrap();
    device.close().await;
    log.finish();
    let files = files(folder.path());
    let events = &files[0].1;
    assert!(named(events, "d2tp:packet_sent").is_empty());
    let opened = first(events, "d2tp:path_opened", |d| d["gated"] == true);
    let granted = first(events, "d2tp:granted", |d| d["by"] == "local");
    assert!(opened < granted);
    assert!(events[granted]["data"]["max_sent"].as_u64() > Some(0));
}

/// A disk that is full after this many bytes.
struct FullDisk(usize, Arc<AtomicUsize>);

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 < bytes.len() {
            self.1.fetch_add(1, Ordering::SeqCst);
            return Err(io::Error::from_raw_os_error(28)); // ENOSPC
        }
        self.0 -= bytes.len();
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_full_disk_ends_the_log_and_not_the_transfer() {
    let refused = Arc::new(AtomicUsize::new(0));
    let counting = refused.clone();
    let open = Box::new(move |_: &str| {
        Ok(Box::new(FullDisk(20_000, counting.clone())) as Box<dyn Write + Send>)
    });
    let log = Qlog::with_writers(open, TraceLevel::Packets).unwrap();
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    device.log_to(&log);
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    far.write_all(&[1; 2_000_000]).await.unwrap();
    within(near.read_exact(&mut vec![0; 2_000_000]))
        .await
        .unwrap();
    log.finish();
    assert_eq!(refused.load(Ordering::SeqCst), 1, "it is not tried again");
}

/// A disk whose writes never return.
struct StuckDisk(
    std::sync::mpsc::Receiver<()>,
    Arc<std::sync::Mutex<Vec<u8>>>,
);

impl Write for StuckDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        self.1.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_disk_that_hangs_delays_nothing_and_what_was_dropped_is_counted() {
    let (free, stuck) = std::sync::mpsc::channel();
    let text = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (mut stuck, kept) = (Some(stuck), text.clone());
    let open = Box::new(move |_: &str| {
        let stuck = stuck.take().expect("one session");
        Ok(Box::new(StuckDisk(stuck, kept.clone())) as Box<dyn Write + Send>)
    });
    let log = Qlog::with_writers(open, TraceLevel::Packets).unwrap();
    // Without jumbo frames, so that there are many packets.
    let config = EndpointConfig {
        mtu_max: 1472,
        ..EndpointConfig::default()
    };
    let (server, links) = (server_with(config), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    device.log_to(&log);
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    // More packets than the queue holds, while no byte can be written.
    for _ in 0..40 {
        far.write_all(&vec![1; 1_000_000]).await.unwrap();
        within(near.read_exact(&mut vec![0; 1_000_000]))
            .await
            .unwrap();
    }
    drop(free);
    within(tokio::task::spawn_blocking({
        let log = log.clone();
        move || log.finish()
    }))
    .await
    .unwrap();
    // There is room again: the next record brings the count.
    device.note("test:after", || Value::Null);
    log.finish();
    let text = String::from_utf8(text.lock().unwrap().clone()).unwrap();
    let records: Vec<Value> = text
        .split('\x1e')
        .filter(|r| !r.is_empty())
        .map(|r| serde_json::from_str(r).unwrap())
        .collect();
    let dropped = first(&records, "d2tp:events_dropped", |_| true);
    assert!(records[dropped]["data"]["count"].as_u64() > Some(0));
    assert!(dropped < first(&records, "test:after", |_| true));
}
