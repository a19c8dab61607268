//! Two hundred devices of two nodes, each with a session and a download of its own, in the middle of which their node is
//! killed, drained or replaced, or their store is killed. All devices are in this process, so that what is measured is
//! theirs, and not the start of two hundred programs. Run one at a time, on a machine that does nothing else: `cargo test -p
//! cedos --test get many_devices:: -- --ignored --nocapture --test-threads 1`.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::{ProxyProcess, pid_of, run};
use cedos_lab_rig::wait::until;

use crate::nodes::{Downloads, Nodes, SIZE, address_of_both};

/// The number of devices, each with one download: that of the marks.
const DEVICES: usize = 200;
/// How many begin at once.
const BATCH: usize = 20;
/// What a device gets in a second: its download lasts for longer than all take to begin.
const SLOW: &str = "client_down_bytes_per_s = 8000\n";
const SLOW_OPTIONS: [&str; 2] = ["--config", "slow.toml"];

/// The longest silence of a device while its node is replaced, in an optimised build.
const UPGRADE_SILENCE_MAX: Duration = Duration::from_millis(300);

/// Counts the sessions of which the store has a record.
const SESSIONS_WITH_RECORD: &str = "local n = 0
for _, key in ipairs(redis.call('KEYS', 'cedos:*:s*')) do n = n + redis.call('HEXISTS', key, 'r') end
return n";

/// Two nodes, and a download of each device that is under way at the first one.
struct Scene {
    nodes: Nodes,
    first: ProxyProcess,
    _second: ProxyProcess,
    downloads: Downloads,
}

impl Scene {
    /// `None` where there is no `redis-server`.
    async fn start() -> Option<Scene> {
        let nodes = Nodes::with_devices(DEVICES).await?;
        std::fs::write(nodes.path().join("slow.toml"), SLOW).unwrap();
        let first = nodes.start("a", &SLOW_OPTIONS).await;
        let second = nodes.start("b", &SLOW_OPTIONS).await;
        let both = address_of_both(&first, &second);
        let mut downloads = nodes.download_at(0, &both, "/whole").await;
        // All at once they would wait for processors, and leave a node that is only busy.
        while downloads.progress.len() < DEVICES {
            nodes.download_more(&mut downloads, BATCH);
            until("all run", || {
                let all = &downloads.progress;
                all.iter()
                    .all(|one| one.bytes.load(Ordering::SeqCst) >= 8_000)
            })
            .await;
        }
        // What the store does not know when its node is killed is lost with it.
        until("the store knows all", || {
            nodes.redis.ask(&["EVAL", SESSIONS_WITH_RECORD, "0"]).trim() == DEVICES.to_string()
        })
        .await;
        downloads.measure_silence();
        let scene = Scene {
            nodes,
            first,
            _second: second,
            downloads,
        };
        // Else what follows measures something else: downloads that are over, or devices that left a busy node before.
        assert_eq!(
            scene.under_way(),
            (DEVICES, DEVICES),
            "open, at the first node"
        );
        Some(scene)
    }

    /// Waits until each device has got something new, and returns the longest silence of one.
    async fn all_have_gone_on(&self, since: &[u64]) -> Duration {
        until("every download has gone on", || {
            let all = self.downloads.progress.iter().zip(since);
            all.clone().all(|(one, before)| {
                let bytes = one.bytes.load(Ordering::SeqCst);
                bytes > *before + 4_000 || bytes >= SIZE as u64
            })
        })
        .await;
        self.downloads.silence().1
    }

    /// How many downloads are incomplete, and how many of those are at the first node.
    fn under_way(&self) -> (usize, usize) {
        let all = self.downloads.progress.iter().zip(&self.downloads.devices);
        let open = all.filter(|(one, _)| one.bytes.load(Ordering::SeqCst) < SIZE as u64);
        let at_first: Vec<bool> = open
            .map(|(_, device)| device.nodes().first().is_some_and(|node| node.is_current))
            .collect();
        (at_first.len(), at_first.iter().filter(|is| **is).count())
    }

    /// Waits until each device is at the second node, and has got bytes since it was seen there: those that arrived
    /// before may have waited in its socket. Returns how long each took, the shortest first.
    async fn all_are_at_the_second(&self) -> Vec<Duration> {
        let begun = Instant::now();
        let mut seen: Vec<Option<u64>> = vec![None; DEVICES];
        let mut took: Vec<Option<Duration>> = vec![None; DEVICES];
        until("every download has gone on at the second node", || {
            let bytes = self.bytes();
            for (n, device) in self.downloads.devices.iter().enumerate() {
                let is_there = device.nodes().get(1).is_some_and(|node| node.is_current);
                match seen[n] {
                    None if is_there => seen[n] = Some(bytes[n]),
                    Some(before) if bytes[n] > before => {
                        took[n].get_or_insert_with(|| begun.elapsed());
                    }
                    _ => {}
                }
            }
            took.iter().all(Option::is_some)
        })
        .await;
        let mut took: Vec<Duration> = took.into_iter().flatten().collect();
        took.sort_unstable();
        took
    }

    fn bytes(&self) -> Vec<u64> {
        let all = self.downloads.progress.iter();
        all.map(|one| one.bytes.load(Ordering::SeqCst)).collect()
    }
}

#[tokio::test]
#[ignore = "a measurement, which a busy machine makes worthless: run it alone"]
async fn two_hundred_devices_of_a_killed_node_go_on_at_the_other_one() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    scene.first.child.kill().await.unwrap();
    let took = scene.all_are_at_the_second().await;
    let (median, last) = (took[DEVICES / 2], took[DEVICES - 1]);
    eprintln!(
        "killed: gone on after {:?} (first), {median:?} (median), {last:?} (last)",
        took[0]
    );
    scene.nodes.assert_whole(scene.downloads).await;
}

#[tokio::test]
#[ignore = "a measurement, which a busy machine makes worthless: run it alone"]
async fn two_hundred_devices_of_a_drained_node_go_on_at_the_other_one() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let drain = ["prox", "drain", "--state-dir", "state-a", "--within", "60s"];
    let begun = Instant::now();
    let drained = run(scene.nodes.path(), &drain).await;
    drained.ends_with(0, "the node has ended");
    let ended = tokio::time::timeout(PATIENCE, scene.first.child.wait()).await;
    assert!(ended.unwrap().unwrap().success());
    let lasted = begun.elapsed();
    let (median, longest) = scene.downloads.silence();
    eprintln!("drained in {lasted:?}; silence median {median:?}, longest {longest:?}");
    scene.nodes.assert_whole(scene.downloads).await;
}

#[tokio::test]
#[ignore = "a measurement, which a busy machine makes worthless: run it alone"]
async fn two_hundred_devices_hear_little_of_a_node_that_is_replaced() {
    let Some(scene) = Scene::start().await else {
        return;
    };
    let before = scene.bytes();
    let busy = ProcessorWait::of(&[pid_of(&scene.first.child)]);
    let upgrade = ["--listen", scene.first.listens_at(), "--upgrade"];
    let begun = Instant::now();
    let _new = scene
        .nodes
        .start("a", &[&SLOW_OPTIONS[..], &upgrade].concat())
        .await;
    let lasted = begun.elapsed();
    let longest = scene.all_have_gone_on(&before).await;
    let (median, _) = scene.downloads.silence();
    let busy = busy.longest();
    eprintln!("replaced in {lasted:?}; silence median {median:?}, longest {longest:?}");
    assert!(
        longest <= UPGRADE_SILENCE_MAX + busy,
        "{longest:?}, a thread waited {busy:?} for a processor"
    );
    scene.nodes.assert_whole(scene.downloads).await;
}

#[tokio::test]
#[ignore = "a measurement, which a busy machine makes worthless: run it alone"]
async fn two_hundred_downloads_go_on_while_their_store_is_killed() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let before = scene.bytes();
    scene.nodes.redis.kill();
    let longest = scene.all_have_gone_on(&before).await;
    eprintln!("store killed: longest silence {longest:?}");
    // With their node gone too, they wait for the store.
    scene.first.child.kill().await.unwrap();
    until("the second node says that they wait", || {
        scene
            .nodes
            .has_said("b", "sleeping sessions cannot be woken now")
    })
    .await;
    let before = scene.bytes();
    let begun = Instant::now();
    scene.nodes.redis.start_again();
    scene.all_have_gone_on(&before).await;
    eprintln!("store back: all have gone on after {:?}", begun.elapsed());
    scene.nodes.assert_whole(scene.downloads).await;
}
