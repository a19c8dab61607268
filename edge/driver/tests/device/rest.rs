//! Tests of hibernated sessions: a server that keeps only records, a journal that outlives both
//! ends.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use cedos_lab_rig::wait::{until_async, within};
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, FORGOTTEN, Flow, FlowHibernated, FlowIo,
    FlowSettings, HibernationOptions, Instance, InstanceClaim, Journal, JournalBatch,
    JournalFlowKey, JournalSessionKey, PathState, SecretKey, SendSource, Server, ServerAddress,
    ServerOptions, StoredRecord,
};
use d2tp_session::{FlowId, FlowOptions, FlowRecord, PublicKey, Role, SessionRecord, Span};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub(crate) const SIZE: u64 = 3_000_000;

fn key(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

fn server_at(listen: &str, journal: Option<Arc<Journal>>) -> Server {
    let options = ServerOptions {
        listen: listen.parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    };
    let rest = HibernationOptions {
        hibernate_after: Some(Duration::from_millis(50)),
        journal: journal.map(|journal| journal as _),
    };
    Server::bind_with(options, rest).unwrap()
}

fn options(server: &Server) -> DeviceOptions {
    DeviceOptions {
        server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()),
        key: key(1),
        config: EndpointConfig::default(),
    }
}

fn instance(dir: &Path, wanted: bool) -> Arc<Instance> {
    let (ours, theirs) = (key(1).public(), key(2).public());
    Arc::new(Instance::take(dir, ours, theirs, None, |_, _, _| wanted).unwrap())
}

async fn until(true_now: impl FnMut() -> bool) {
    cedos_lab_rig::wait::until("what the test waits for", true_now).await;
}

/// The bytes of every flow that a server sends.
pub(crate) struct Pattern;

fn pattern(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9) >> 11) as u8
}

impl SendSource for Pattern {
    fn poll_read_at(&self, _: &mut Context<'_>, at: u64, max: usize) -> Poll<io::Result<Bytes>> {
        let n = (SIZE - at).min(max as u64);
        Poll::Ready(Ok((at..at + n).map(pattern).collect::<Vec<u8>>().into()))
    }
}

/// Reads a flow's bytes between these offsets, which are the pattern's.
pub(crate) async fn read_to(flow: &mut Flow, from: u64, to: u64) {
    let mut at = from;
    let mut buf = vec![0; 65_536];
    while at < to {
        let most = ((to - at) as usize).min(buf.len());
        let n = within(flow.read(&mut buf[..most])).await.unwrap();
        assert!(n > 0, "ended at {at}");
        for b in &buf[..n] {
            assert_eq!(*b, pattern(at));
            at += 1;
        }
    }
}

/// A device sends a request and reads a part; the server keeps the flow with a memo.
async fn begun(server: &Server, device: &Device, read: u64) -> (Flow, Flow) {
    begun_with(FlowSettings::default(), server, device, read).await
}

async fn begun_with(
    settings: FlowSettings,
    server: &Server,
    device: &Device,
    read: u64,
) -> (Flow, Flow) {
    let mut flow = device.open(settings).unwrap();
    flow.write_all(b"get").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    let mut asked = [0; 3];
    within(far.read_exact(&mut asked)).await.unwrap();
    far.send_source(Arc::new(Pattern));
    far.allow_hibernation(Bytes::from_static(b"what it needs"));
    read_to(&mut flow, 0, read).await;
    until_async("the flow can be kept", async || {
        let part = Bytes::from_static(b"part");
        let kept = device.persist_flow(flow.id(), part).await;
        kept.unwrap().then_some(())
    })
    .await;
    (flow, far)
}

/// The flow hibernates. Its handle would reset it if it were dropped before.
async fn asleep(mut far: Flow) {
    let end = within(std::future::poll_fn(|cx| far.poll_finished(cx))).await;
    assert!(end.unwrap_err().get_ref().unwrap().is::<FlowHibernated>());
}

/// The device is gone, without informing the server about the flow.
async fn gone(device: Device, flow: Flow) {
    flow.leave_open();
    drop(flow);
    device.leave().await.unwrap();
}

async fn again(server: &Server, dir: &Path, id: u64, received: u64) -> (Device, Option<Flow>) {
    // A task of the previous device releases its journal soon.
    until(|| {
        let files = std::fs::read_dir(dir).unwrap().flatten().map(|f| f.path());
        let journals = files.filter(|path| path.extension().is_some_and(|kind| kind == "journal"));
        journals
            .into_iter()
            .all(|path| Journal::open(&path).is_ok())
    })
    .await;
    let claim = InstanceClaim { flow: id, received };
    let (device, flow) = Device::resume(options(server), instance(dir, false), Some(claim))
        .await
        .unwrap();
    device.use_default_route().unwrap();
    (device, flow)
}

#[tokio::test]
async fn a_flow_sleeps_in_memory_and_goes_on_where_its_device_says() {
    let dir = tempfile::tempdir().unwrap();
    let server = server_at("127.0.0.1:0", None);
    let (device, _) = Device::resume(options(&server), instance(dir.path(), false), None)
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let (flow, far) = begun(&server, &device, 100_000).await;
    let id = flow.id();
    gone(device, flow).await;
    asleep(far).await;
    assert_eq!(server.counts(), (0, 1, 0));

    // Fewer bytes are durable there than had arrived.
    let (_device, flow) = again(&server, dir.path(), id, 70_000).await;
    let mut far = within(server.accept()).await.unwrap();
    assert_eq!(far.memo().unwrap(), "what it needs");
    assert_eq!(far.id(), id);
    far.resume_source(Arc::new(Pattern));
    read_to(&mut flow.unwrap(), 70_000, SIZE).await;
    assert_eq!(server.counts().1, 0);
}

/// A flow whose first bytes the server has, and has not read.
async fn unread(server: &Server, device: &Device) -> (Flow, Flow) {
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"get").await.unwrap();
    let far = within(server.accept()).await.unwrap();
    until(|| flow.is_flushed()).await;
    (flow, far)
}

fn has_path(far: &Flow) -> bool {
    let paths = far.connection().paths();
    paths.iter().any(|path| path.state == PathState::Active)
}

#[tokio::test]
async fn a_flow_that_may_hibernate_only_when_its_device_has_left_hibernates() {
    let dir = tempfile::tempdir().unwrap();
    let server = server_at("127.0.0.1:0", None);
    let (device, _) = Device::resume(options(&server), instance(dir.path(), false), None)
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let (flow, mut far) = unread(&server, &device).await;
    far.read_exact(&mut [0; 3]).await.unwrap();
    gone(device, flow).await;
    until(|| !has_path(&far)).await;
    far.allow_hibernation(Bytes::from_static(b"what it needs"));
    asleep(far).await;
}

#[tokio::test]
async fn a_flow_whose_bytes_are_read_when_its_device_has_left_hibernates_then() {
    let server = server_at("127.0.0.1:0", None);
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let start = async |dir: &tempfile::TempDir| {
        let instance = instance(dir.path(), false);
        let (device, _) = Device::resume(options(&server), instance, None)
            .await
            .unwrap();
        device.use_default_route().unwrap();
        device
    };
    let device = start(&dirs[0]).await;
    let (flow, mut far) = unread(&server, &device).await;
    far.allow_hibernation(Bytes::from_static(b"what it needs"));
    gone(device, flow).await;
    until(|| !has_path(&far)).await;
    // Another device leaves later and hibernates: the first one's turn has come, and it was refused.
    let other = start(&dirs[1]).await;
    let (flow, far_other) = begun(&server, &other, 100_000).await;
    gone(other, flow).await;
    asleep(far_other).await;
    assert_eq!(server.counts(), (1, 1, 0));
    far.read_exact(&mut [0; 3]).await.unwrap();
    asleep(far).await;
}

/// A flow at the server, and its device, which leaves; then another device leaves and its session hibernates, so that the
/// first one's turn has come. `before`: what the server does with its flow before the first device leaves, and `after` when
/// it has left.
async fn awake_in_its_turn(
    before: impl AsyncFn(&mut Flow),
    after: impl AsyncFn(&mut Flow),
) -> (Server, Flow) {
    let server = server_at("127.0.0.1:0", None);
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let start = async |dir: &tempfile::TempDir| {
        let instance = instance(dir.path(), false);
        let (device, _) = Device::resume(options(&server), instance, None)
            .await
            .unwrap();
        device.use_default_route().unwrap();
        device
    };
    let device = start(&dirs[0]).await;
    let (flow, mut far) = unread(&server, &device).await;
    far.read_exact(&mut [0; 3]).await.unwrap();
    before(&mut far).await;
    gone(device, flow).await;
    until(|| !has_path(&far)).await;
    after(&mut far).await;
    let other = start(&dirs[1]).await;
    let (flow, far_other) = begun(&server, &other, 100_000).await;
    gone(other, flow).await;
    asleep(far_other).await;
    assert_eq!(server.counts(), (1, 1, 0));
    (server, far)
}

#[tokio::test]
async fn a_flow_without_a_source_does_not_hibernate_before_its_peer_has_what_was_written() {
    let memo = Bytes::from_static(b"what it needs");
    let (server, far) = awake_in_its_turn(
        async |far| far.allow_hibernation(memo.clone()),
        async |far| far.write_all(b"nobody acknowledges it").await.unwrap(),
    )
    .await;
    drop((server, far));
}

#[tokio::test]
async fn a_flow_that_may_hibernate_no_longer_stays_awake_until_it_may_again() {
    let memo = Bytes::from_static(b"what it needs");
    let (_server, far) = awake_in_its_turn(
        async |far| {
            far.allow_hibernation(memo.clone());
            far.hibernation_switch()(None);
        },
        async |_| {},
    )
    .await;
    far.hibernation_switch()(Some(memo));
    asleep(far).await;
}

#[tokio::test]
async fn a_flow_that_woke_is_given_again_once_the_handle_from_before_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let server = server_at("127.0.0.1:0", None);
    let (device, _) = Device::resume(options(&server), instance(dir.path(), false), None)
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let (flow, mut far) = begun(&server, &device, 100_000).await;
    let id = flow.id();
    gone(device, flow).await;
    let end = within(std::future::poll_fn(|cx| far.poll_finished(cx))).await;
    assert!(end.unwrap_err().get_ref().unwrap().is::<FlowHibernated>());

    let (_device, flow) = again(&server, dir.path(), id, 70_000).await;
    let mut flow = flow.unwrap();
    until(|| server.counts() == (1, 0, 0)).await;
    let early = tokio::time::timeout(Duration::from_millis(200), server.accept()).await;
    assert!(early.is_err(), "what the flow held is not put by yet");
    drop(far);
    let mut far = within(server.accept()).await.unwrap();
    assert_eq!(far.memo().unwrap(), "what it needs");
    far.resume_source(Arc::new(Pattern));
    read_to(&mut flow, 70_000, 80_000).await;
}

#[tokio::test]
async fn a_memo_comes_back_once_the_handle_from_before_the_sleep_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let server = server_at("127.0.0.1:0", None);
    let (device, _) = Device::resume(options(&server), instance(dir.path(), false), None)
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let settings = FlowSettings {
        within: Some(Duration::from_secs(2)),
        ..FlowSettings::default()
    };
    let (flow, mut far) = begun_with(settings, &server, &device, 100_000).await;
    gone(device, flow).await;
    let end = within(std::future::poll_fn(|cx| far.poll_finished(cx))).await;
    assert!(end.unwrap_err().get_ref().unwrap().is::<FlowHibernated>());
    let early = tokio::time::timeout(Duration::from_secs(3), server.next_expired()).await;
    assert!(early.is_err(), "what the flow held is not put by yet");
    drop(far);
    let (_, memo) = within(server.next_expired()).await.unwrap();
    assert_eq!(memo, "what it needs");
}

#[tokio::test]
async fn a_sleeping_flow_is_read_before_it_is_taken_up_and_no_byte_comes_twice() {
    // R-RESUME-7: no application accepts the flow before its first bytes have arrived.
    let dir = tempfile::tempdir().unwrap();
    for journal in [None, Some("server")] {
        let dir = dir.path().join(journal.unwrap_or("memory"));
        std::fs::create_dir_all(&dir).unwrap();
        let journal = journal.map(|name| Arc::new(Journal::open(&dir.join(name)).unwrap()));
        let server = server_at("127.0.0.1:0", journal);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heard = asked.clone();
        server.set_hibernated_reader(Arc::new(move |memo, offset, max| {
            heard.lock().unwrap().push((memo.to_vec(), offset));
            // A tenth of what would fit, so that the source continues within the first packet.
            let end = offset + max as u64 / 10;
            Some((offset..end).map(pattern).collect::<Vec<u8>>().into())
        }));
        let (device, _) = Device::resume(options(&server), instance(&dir, false), None)
            .await
            .unwrap();
        device.use_default_route().unwrap();
        let (flow, far) = begun(&server, &device, 100_000).await;
        let id = flow.id();
        gone(device, flow).await;
        asleep(far).await;

        let (_device, flow) = again(&server, &dir, id, 70_000).await;
        let mut flow = flow.unwrap();
        read_to(&mut flow, 70_000, 70_050).await;
        let mut far = within(server.accept()).await.unwrap();
        assert_eq!(far.memo().unwrap(), "what it needs");
        far.resume_source(Arc::new(Pattern));
        read_to(&mut flow, 70_050, SIZE).await;
        let asked = asked.lock().unwrap();
        assert_eq!(*asked, [(b"what it needs".to_vec(), 70_000)]);
    }
}

/// How many flows the sessions of a journal have, and how many memos are there.
fn flows_in(journal: &Journal) -> (usize, usize) {
    let (mut flows, mut memos) = (0, 0);
    let count = |_, stored: StoredRecord| {
        flows += SessionRecord::decode(&stored.record).unwrap().flows.len();
    };
    journal.sessions(count).unwrap();
    journal.memos(|_, _| memos += 1).unwrap();
    (flows, memos)
}

#[tokio::test]
async fn a_flow_outlives_both_processes_and_a_flow_without_a_memo_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server");
    let journal = Arc::new(Journal::open(&path).unwrap());
    let server = server_at("127.0.0.1:0", Some(journal.clone()));
    let listen = server.local_addr().to_string();
    let (device, _) = Device::resume(options(&server), instance(dir.path(), false), None)
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let (flow, far) = begun(&server, &device, 100_000).await;
    let id = flow.id();
    gone(device, flow).await;
    // The process ends without writing or sending anything more.
    until(|| server.counts() == (0, 1, 0)).await;
    // The journal is written a moment later.
    until(|| flows_in(&journal) == (1, 1)).await;
    drop((server, far, journal));
    // The server's tasks release its port and its journal when they are next polled.
    until(|| std::net::UdpSocket::bind(&listen).is_ok() && Journal::open(&path).is_ok()).await;

    let journal = Arc::new(Journal::open(&path).unwrap());
    let server = server_at(&listen, Some(journal));
    assert_eq!(server.counts().1, 1);
    let (device, flow) = again(&server, dir.path(), id, 50_000).await;
    let mut bare = device.open(FlowSettings::default()).unwrap();
    bare.write_all(b"x").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    assert_eq!(far.memo().unwrap(), "what it needs");
    far.resume_source(Arc::new(Pattern));
    let new = within(server.accept()).await.unwrap();
    assert_eq!(new.memo(), None);
    read_to(&mut flow.unwrap(), 50_000, SIZE).await;
}

#[tokio::test]
async fn a_flow_nobody_wants_any_more_is_told_of_by_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let server = server_at("127.0.0.1:0", None);
    let first = instance(dir.path(), false);
    let (device, _) = Device::resume(options(&server), first, None).await.unwrap();
    device.use_default_route().unwrap();
    let (flow, far) = begun(&server, &device, 100_000).await;
    gone(device, flow).await;
    asleep(far).await;
    let (device, flow) = Device::resume(options(&server), instance(dir.path(), false), None)
        .await
        .unwrap();
    assert!(flow.is_none());
    assert!(!device.is_settled());
    device.use_default_route().unwrap();
    let mut far = within(server.accept()).await.unwrap();
    let end = within(std::future::poll_fn(|cx| far.poll_finished(cx))).await;
    let end = end.unwrap_err().to_string();
    assert!(end.contains(&format!("{FORGOTTEN:#x}")), "{end}");
    drop(far);
    until(|| device.is_settled()).await;
}

#[test]
fn an_instance_belongs_to_one_process_and_its_epochs_never_come_again() {
    let dir = tempfile::tempdir().unwrap();
    let first = instance(dir.path(), false);
    let second = instance(dir.path(), false);
    assert_ne!(first.number(), second.number());
    let number = first.number();
    drop((first, second));
    let (ours, theirs) = (key(1).public(), key(2).public());
    let again = Instance::take(dir.path(), ours, theirs, Some(number), |_, _, _| true).unwrap();
    assert_eq!(again.number(), number);
    drop(again);
    let other = Instance::take(
        dir.path(),
        ours,
        key(3).public(),
        Some(number),
        |_, _, _| false,
    );
    assert_ne!(other.unwrap().number(), number, "it is with another server");
}

fn stored(n: u64, left_s: u64) -> (JournalSessionKey, StoredRecord, JournalFlowKey) {
    let mut peer = [0; 32];
    peer[..8].copy_from_slice(&n.to_be_bytes());
    let session = JournalSessionKey {
        peer: PublicKey(peer),
        instance: n,
    };
    let flow = FlowId::new(1, 0, true);
    let record = SessionRecord {
        role: Role::Responder,
        peer: session.peer,
        instance: n,
        epoch: 1,
        seen_floor: 0,
        seen: vec![(1, vec![(0, 1)])],
        closing: None,
        ticket: None,
        secret: None,
        flows: vec![FlowRecord {
            id: flow,
            options: FlowOptions {
                hibernates: true,
                ..FlowOptions::default()
            },
            deadline_left: Some(Span::from_secs(left_s)),
            deadline_seq: 0,
            sent_to: 5,
            send_end: None,
            send_complete: false,
            received_to: 3,
            receive_end: None,
            receive_complete: false,
            reset: None,
            stopped: None,
        }],
    };
    (
        session,
        StoredRecord::now(record.encode()),
        JournalFlowKey { session, flow },
    )
}

fn filled(path: &Path, n: u64, left_s: u64) -> Journal {
    let journal = Journal::open(path).unwrap();
    let mut batch = JournalBatch::default();
    for n in 0..n {
        let (session, stored, flow) = stored(n, left_s);
        batch.sessions.insert(session, Some(stored));
        batch.memos.insert(flow, Some(n.to_string().into()));
    }
    journal.commit(&batch).unwrap();
    journal
}

#[tokio::test]
async fn a_thousand_sessions_that_sleep_end_at_their_deadlines_and_give_their_memos_back() {
    let dir = tempfile::tempdir().unwrap();
    // None is over before all are written, on a busy machine either.
    let journal = Arc::new(filled(&dir.path().join("j"), 1_000, 4));
    let server = server_at("127.0.0.1:0", Some(journal.clone()));
    assert_eq!(server.counts().1, 1_000);
    let mut told = Vec::new();
    while told.len() < 1_000 {
        let (_, memo) = within(server.next_expired()).await.unwrap();
        told.push(
            String::from_utf8(memo.to_vec())
                .unwrap()
                .parse::<u64>()
                .unwrap(),
        );
    }
    told.sort_unstable();
    assert!(told.into_iter().eq(0..1_000));
    let left = || {
        let mut left = 0;
        journal.memos(|_, _| left += 1).unwrap();
        left
    };
    until(|| left() == 0).await;
}

/// The content of a journal; `None` if it is refused.
fn content(path: &Path) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let journal = Journal::open(path).ok()?;
    let mut all = Vec::new();
    journal
        .sessions(|key, stored| all.push((key.peer.0.to_vec(), stored.record)))
        .ok()?;
    journal
        .memos(|key, memo| all.push((key.session.peer.0.to_vec(), memo.to_vec())))
        .ok()?;
    Some(all)
}

/// The store's panics on damaged files are caught; this suppresses their messages.
fn hush_the_store() {
    let words = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic
            .location()
            .is_none_or(|at| !at.file().contains("redb"))
        {
            words(panic);
        }
    }));
}

/// Passes damaged versions of a file to `f`: cut at any length, or with any bit flipped in its used
/// parts; all of them, or `some` of each kind.
fn damage(good: &[u8], some: Option<usize>, mut f: impl FnMut(&[u8], &str)) {
    let used: Vec<usize> = (0..good.len()).filter(|i| good[*i] != 0).collect();
    let last = *used.last().unwrap();
    let cut_step = some.map_or(1, |some| (last / some).max(1));
    for length in (0..64).chain((64..=last).step_by(cut_step)) {
        f(&good[..length], &format!("cut at {length}"));
    }
    // In unused parts a bit changes nothing, or a number that was zero: some of those as well.
    let bits = 8 * used.len();
    let bit_step = some.map_or(1, |some| (bits / some).max(1) | 1);
    let mut bytes = good.to_vec();
    for bit in (0..bits).step_by(bit_step) {
        let at = used[bit / 8];
        bytes[at] ^= 1 << (bit % 8);
        f(&bytes, &format!("bit {} of byte {at}", bit % 8));
        bytes[at] = good[at];
    }
    let zeros: Vec<usize> = (0..=last).filter(|i| good[*i] == 0).collect();
    let zero_step = some.map_or(5, |some| (zeros.len() / some).max(1) | 1);
    for (n, at) in zeros.iter().step_by(zero_step).enumerate() {
        bytes[*at] ^= 1 << (n % 8);
        f(&bytes, &format!("bit {} of byte {at}", n % 8));
        bytes[*at] = good[*at];
    }
}

fn damage_a_servers_journal(some: Option<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let journal = filled(&path, 19, 1_000);
    let mut last = JournalBatch::default();
    let (session, stored, flow) = stored(19, 1_000);
    last.sessions.insert(session, Some(stored));
    last.memos.insert(flow, Some(Bytes::from_static(b"19")));
    journal.commit(&last).unwrap();
    // The file as a crash leaves it, and as an orderly end does.
    let crashed = std::fs::read(&path).unwrap();
    drop(journal);
    let closed = std::fs::read(&path).unwrap();
    let all = content(&path).unwrap();
    assert_eq!(all.len(), 40);
    hush_the_store();
    let copy = dir.path().join("copy");
    let try_out = |bytes: &[u8], what: &str| {
        std::fs::write(&copy, bytes).unwrap();
        match Journal::open(&copy) {
            Ok(journal) => {
                drop(journal);
                assert_eq!(content(&copy).as_ref(), Some(&all), "{what}");
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(copy.to_str().unwrap()), "{what}: {text}");
                // The damaged file is left as it was.
                assert!(std::fs::read(&copy).unwrap() == bytes, "{what}");
            }
        }
    };
    for (state, good) in [("closed", closed), ("crashed", crashed)] {
        damage(&good, some, |bytes, what| {
            try_out(bytes, &format!("{state}, {what}"));
        });
    }
}

#[test]
fn a_journal_that_was_cut_or_flipped_is_refused_or_holds_all_that_was_written() {
    damage_a_servers_journal(Some(80));
}

#[test]
#[ignore = "minutes: every bit of a file of some ten kilobytes"]
fn a_journal_survives_every_cut_and_every_flip_or_is_refused() {
    damage_a_servers_journal(None);
}

/// R-HS-2: however its file is damaged, an instance is unchanged or replaced by another one: no
/// epoch recurs, and no flow is claimed at another offset.
async fn damage_a_devices_journal(some: Option<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let server = server_at("127.0.0.1:0", None);
    let first = instance(dir.path(), false);
    let number = first.number();
    let (device, _) = Device::resume(options(&server), first.clone(), None)
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let (flow, far) = begun(&server, &device, 100_000).await;
    let id = flow.id();
    gone(device, flow).await;
    drop((first, far));
    let path = dir.path().join(format!("{number:016x}.journal"));
    let held = |path: &Path| {
        let journal = Journal::open(path).ok()?;
        let mut records = Vec::new();
        journal
            .sessions(|key, stored| records.push((key.instance, stored.record)))
            .ok()?;
        let mut memos = Vec::new();
        journal
            .memos(|key, memo| memos.push((key.flow, memo.to_vec())))
            .ok()?;
        Some((Instance::first_free_epoch(&journal).ok()?, records, memos))
    };
    let mut before = None;
    // Its owner releases it soon.
    until(|| {
        before = held(&path);
        before.is_some()
    })
    .await;
    let before = before.unwrap();
    assert!(before.0 > Some(1) && before.2[0].0 == FlowId(id));
    let good = std::fs::read(&path).unwrap();
    hush_the_store();
    let (ours, theirs) = (key(1).public(), key(2).public());
    damage(&good, some, |bytes, what| {
        for file in std::fs::read_dir(dir.path()).unwrap().flatten() {
            std::fs::remove_file(file.path()).unwrap();
        }
        std::fs::write(&path, bytes).unwrap();
        let taken = Instance::take(dir.path(), ours, theirs, Some(number), |_, _, _| true).unwrap();
        if taken.number() == number {
            drop(taken);
            assert_eq!(held(&path).as_ref(), Some(&before), "{what}");
        }
    });
}

#[tokio::test]
async fn an_instance_whose_file_was_cut_or_flipped_is_what_it_was_or_passed_over() {
    damage_a_devices_journal(Some(60)).await;
}

#[tokio::test]
#[ignore = "minutes: every bit of a file of some kilobytes"]
async fn an_instance_survives_every_cut_and_every_flip_of_its_file_or_is_passed_over() {
    damage_a_devices_journal(None).await;
}

#[test]
fn a_journal_that_is_open_elsewhere_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let _first = Journal::open(&path).unwrap();
    let error = Journal::open(&path).unwrap_err().to_string();
    assert!(error.contains("in use by another process"), "{error}");
}

/// Names the file to a child process of this test whose files are limited in size.
const CHILD: &str = "D2TP_TEST_FULL_DISK";

#[test]
fn a_full_disk_is_told_and_takes_nothing_that_was_written() {
    const NAME: &str = "a_full_disk_is_told_and_takes_nothing_that_was_written";
    if let Some(path) = std::env::var_os(CHILD) {
        return fill_the_disk(Path::new(&path));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    drop(filled(&path, 20, 1_000));
    let all = content(&path).unwrap();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        // The child's last line is not one of this program's.
        .stdout(std::io::stderr())
        .env(CHILD, &path)
        .status()
        .unwrap();
    assert!(child.success());
    assert_eq!(content(&path).unwrap(), all);
}

fn fill_the_disk(path: &Path) {
    let journal = Journal::open(path).unwrap();
    let most = std::fs::metadata(path).unwrap().len() + (64 << 10);
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: plain system calls on this process, which is the test's own child.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    let mut batch = JournalBatch::default();
    batch
        .notes
        .insert(b"large".to_vec(), Some(vec![7; 8 << 20].into()));
    let error = journal.commit(&batch).unwrap_err().to_string();
    assert!(error.contains("the disk is full; make room"), "{error}");
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    // When there is room again, the same journal continues in a new file.
    let limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the same as above.
    unsafe { assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0) };
    journal.commit(&batch).unwrap();
    let large = journal.note(b"large").unwrap().unwrap();
    assert_eq!(large.len(), 8 << 20);
    let mut small = JournalBatch::default();
    small.notes.insert(b"large".to_vec(), None);
    journal.commit(&small).unwrap();
}

/// Names the journal to a child process of this test that loads it.
const LOADER: &str = "D2TP_TEST_LOADER";

/// Prints memory and time for a hundred thousand hibernated sessions with one flow each.
#[tokio::test]
#[ignore = "a measurement: cargo test -p d2tp-driver --test device rest:: --profile sim -- --ignored --nocapture"]
async fn what_a_hundred_thousand_sleepers_cost() {
    const NAME: &str = "what_a_hundred_thousand_sleepers_cost";
    const COUNT: u64 = 100_000;
    if let Some(path) = std::env::var_os(LOADER) {
        let before = resident_kb();
        let began = std::time::Instant::now();
        let journal = Arc::new(Journal::open(Path::new(&path)).unwrap());
        let server = server_at("127.0.0.1:0", Some(journal));
        let (took, after) = (began.elapsed(), resident_kb());
        assert_eq!(server.counts().1, COUNT as usize);
        let each = (after - before) * 1024 / COUNT;
        println!("{COUNT} sleepers: {each} bytes each, loaded in {took:?}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    drop(filled(&path, COUNT, 100_000));
    let bytes = std::fs::metadata(&path).unwrap().len();
    println!("on disk: {} bytes each", bytes / COUNT);
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--ignored", "--nocapture"])
        // The child's last line is not one of this program's.
        .stdout(std::io::stderr())
        .env(LOADER, &path)
        .status()
        .unwrap();
    assert!(child.success());
}

fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A journal with more sessions than a server loads at once, each with a flow, as bytes.
fn crowded(journal: &Journal, sessions: u64) {
    let mut batch = JournalBatch::default();
    for n in 0..sessions {
        let mut peer = [0; 32];
        peer[..8].copy_from_slice(&n.to_le_bytes());
        let peer = PublicKey(peer);
        let flow = FlowId::new(1, 0, true);
        let record = SessionRecord {
            role: Role::Responder,
            peer,
            instance: n,
            epoch: 1,
            seen_floor: 0,
            seen: Vec::new(),
            closing: None,
            ticket: None,
            secret: None,
            flows: vec![FlowRecord {
                id: flow,
                options: FlowOptions {
                    hibernates: true,
                    ..FlowOptions::default()
                },
                deadline_left: Some(Span::from_secs(3600)),
                deadline_seq: 0,
                sent_to: 0,
                send_end: None,
                send_complete: false,
                received_to: 0,
                receive_end: None,
                receive_complete: false,
                reset: None,
                stopped: None,
            }],
        };
        let session = JournalSessionKey { peer, instance: n };
        batch
            .sessions
            .insert(session, Some(StoredRecord::now(record.encode())));
        batch.memos.insert(
            JournalFlowKey { session, flow },
            Some(Bytes::from_static(b"memo")),
        );
    }
    journal.commit(&batch).unwrap();
}

#[tokio::test]
async fn a_server_with_a_long_journal_serves_while_it_reads_and_then_knows_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Arc::new(Journal::open(&dir.path().join("journal")).unwrap());
    crowded(&journal, 12_000);
    let server = server_at("127.0.0.1:0", Some(journal));
    // The test's only thread has not yielded yet, so only the first part was read.
    assert!(!server.knows_all());
    let (_, asleep, _) = server.counts();
    assert!(asleep > 0 && asleep < 12_000, "{asleep}");
    let device = Device::new(options(&server)).await.unwrap();
    device.use_default_route().unwrap();
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"new").await.unwrap();
    within(server.accept()).await.unwrap();
    until(|| server.knows_all()).await;
    assert_eq!(server.counts().1, 12_000);
}

#[test]
fn parts_of_a_journal_are_all_of_it_and_its_bare_notes_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(&dir.path().join("journal")).unwrap();
    crowded(&journal, 25);
    let of = |n: u8| JournalSessionKey {
        peer: PublicKey([n; 32]),
        instance: 0,
    };
    let mut batch = JournalBatch::default();
    for n in [0x05, 0xff] {
        let key = JournalFlowKey {
            session: of(n),
            flow: FlowId::new(1, 7, true),
        };
        batch.memos.insert(key, Some(Bytes::from_static(b"bare")));
    }
    journal.commit(&batch).unwrap();
    let (mut sessions, mut flows, mut bare, mut after) = (Vec::new(), 0, Vec::new(), None);
    loop {
        let part = journal.page(after, 10).unwrap();
        flows += part
            .sessions
            .iter()
            .map(|kept| kept.flows.len())
            .sum::<usize>();
        sessions.extend(part.sessions.iter().map(|kept| kept.key));
        bare.extend(part.orphan_memos.iter().map(|flow| flow.session));
        if part.is_last {
            break;
        }
        after = part.sessions.last().map(|kept| kept.key);
    }
    assert!(sessions.is_sorted());
    assert_eq!((sessions.len(), flows), (25, 25));
    bare.sort();
    assert_eq!(bare, [of(0x05), of(0xff)]);
    let found = journal.session(sessions[3]).unwrap().unwrap();
    assert_eq!((found.key, found.flows.len()), (sessions[3], 1));
    assert!(journal.session(of(9)).unwrap().is_none());
}
