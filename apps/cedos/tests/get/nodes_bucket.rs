//! Several proxies with one key that share their sessions in Redis and their copies in a bucket, both real servers: a node
//! is killed in the middle of downloads and uploads, and another goes on with what the bucket has; the bucket fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, reply};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::{ProxyProcess, ended};
use cedos_lab_rig::wait::{until, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::durable_proxy::{PlainAnswer, TOKEN, command, get, head_of, offset, rest_of};
use crate::nodes::{Balancer, Nodes, ObjectSizes, SIZE};
use crate::prox_bucket::{BucketServer, PART, PLACE, S3Fault, S3Server};

/// Objects of a part and something more, of which the origin gives all of the part at first.
pub(crate) const LARGE: ObjectSizes = ObjectSizes {
    whole: PART + 1_000_000,
    first: PART + 300_000,
    next_from: PART,
};

/// Objects that one request gets whole.
pub(crate) const SMALL: ObjectSizes = ObjectSizes {
    whole: SIZE,
    first: SIZE,
    next_from: 0,
};

/// The rate at which the second node lets each client have its downloads.
const SLOW: &str = "client_down_bytes_per_s = 300000\n";
/// The rate of the first node, at which downloads take more than a minute: all are under way when it is killed.
const SLOWEST: &str = "client_down_bytes_per_s = 30000\n";

/// Starts the first node, which lets clients have their downloads very slowly, and the second one.
async fn slow_nodes(nodes: &Nodes) -> (ProxyProcess, ProxyProcess) {
    std::fs::write(nodes.path().join("slow.toml"), SLOW).unwrap();
    std::fs::write(nodes.path().join("slowest.toml"), SLOWEST).unwrap();
    (
        nodes.start("a", &["--config", "slowest.toml"]).await,
        nodes.start("b", &["--config", "slow.toml"]).await,
    )
}

/// Nodes with a bucket, or `None` where there is no `redis-server`.
async fn with_bucket(devices: usize, sizes: ObjectSizes) -> Option<(Nodes, S3Server)> {
    let server = S3Server::start().await;
    let nodes = with_server(devices, sizes, &server).await?;
    Some((nodes, server))
}

/// Nodes with the bucket of this server, or `None` where there is no `redis-server`.
pub(crate) async fn with_server(
    devices: usize,
    sizes: ObjectSizes,
    server: &impl BucketServer,
) -> Option<Nodes> {
    let mut nodes = Nodes::with_sizes(devices, sizes).await?;
    nodes.copies = PLACE;
    nodes.environment = server.environment();
    Some(nodes)
}

/// A node to which clients without D2TP speak at a port of their own.
struct TcpNode {
    name: &'static str,
    port: HeldPort,
    process: ProxyProcess,
}

impl TcpNode {
    async fn start(nodes: &Nodes, name: &'static str) -> TcpNode {
        let port = HeldPort::take();
        let process = TcpNode::process(nodes, name, &port).await;
        TcpNode {
            name,
            port,
            process,
        }
    }

    async fn process(nodes: &Nodes, name: &str, port: &HeldPort) -> ProxyProcess {
        let tcp = port.address().to_string();
        let more = [
            "--tcp-listen",
            &tcp,
            "--allow-address",
            "127.0.0.0/8",
            "--cache-quota",
            "0",
        ];
        nodes.start(name, &more).await
    }

    async fn kill(&mut self) {
        self.process.child.kill().await.unwrap();
    }

    async fn start_again(&mut self, nodes: &Nodes) {
        self.process = TcpNode::process(nodes, self.name, &self.port).await;
    }

    async fn send(&self, request: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = within(TcpStream::connect(self.port.address()))
            .await
            .unwrap();
        stream.write_all(request.as_ref()).await.unwrap();
        stream
    }

    async fn ask(&self, request: impl AsRef<[u8]>) -> PlainAnswer {
        rest_of(self.send(request).await).await
    }
}

/// How many notes of this kind the store has.
fn notes(nodes: &Nodes, kind: &str) -> usize {
    let count = format!("return #redis.call('KEYS', 'cedos:*:n{kind}*')");
    let counted = nodes.redis.ask(&["EVAL", &count, "0"]);
    counted.trim().parse().expect("a number")
}

fn is_empty(server: &S3Server) -> bool {
    server.parts().is_empty()
}

#[tokio::test]
async fn a_node_is_killed_and_another_asks_the_origin_for_nothing_that_the_bucket_has() {
    let Some((nodes, server)) = with_bucket(4, LARGE).await else {
        return;
    };
    let (mut first, second, balancer) = nodes.start_two(&[]).await;
    let mut downloads = nodes.download(8, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    until("the bucket has a part of each", || {
        server.parts() == [PART as u64; 8]
    })
    .await;
    first.child.kill().await.unwrap();
    nodes.give_rest().await;
    downloads.measure_silence();
    balancer.move_to(&second);
    downloads.each_has(LARGE.whole).await;
    let (median, longest) = downloads.silence();
    eprintln!(
        "8 downloads went on from the bucket: silence median {median:?}, longest {longest:?}"
    );
    // They acknowledge the last bytes: a flow that is not delivered keeps its copy.
    let _devices = std::mem::take(&mut downloads.devices);
    nodes.assert_whole(downloads).await;
    until("the bucket is empty", || is_empty(&server)).await;
    nodes.until_no_copy("state-b/copies").await;
}

/// Downloads whose copies are complete at a first node, and in the bucket, while the devices get them slowly.
pub(crate) async fn whole_copies(
    nodes: &Nodes,
    server: &impl BucketServer,
) -> (
    ProxyProcess,
    ProxyProcess,
    Balancer,
    crate::nodes::Downloads,
) {
    let (first, second) = slow_nodes(nodes).await;
    let balancer = Balancer::start(first.listens_at().parse().unwrap()).await;
    let at = balancer.address_of(&first);
    let downloads = nodes.download_at(40, &at, "/whole").await;
    until("the bucket has all copies", || {
        server.parts() == [SIZE as u64; 40]
    })
    .await;
    until("they are recorded as complete", || notes(nodes, "p") == 40).await;
    (first, second, balancer, downloads)
}

#[tokio::test]
async fn complete_copies_of_a_killed_node_come_from_the_bucket_alone() {
    let Some((nodes, server)) = with_bucket(4, SMALL).await else {
        return;
    };
    let (mut first, second, balancer, mut downloads) = whole_copies(&nodes, &server).await;
    assert!(downloads.received() < 40 * SIZE as u64, "they run");
    first.child.kill().await.unwrap();
    balancer.move_to(&second);
    // They acknowledge the last bytes: a flow that is not delivered keeps its copy.
    let _devices = std::mem::take(&mut downloads.devices);
    nodes.assert_whole(downloads).await;
    until_removed(&nodes, &server).await;
}

/// Waits until the bucket has none of the copies that the second node took over. What the first one was removing when it
/// was killed stays for a day.
pub(crate) async fn until_removed(nodes: &Nodes, server: &impl BucketServer) {
    let taken: Vec<String> = nodes
        .log()
        .lines()
        .filter(|line| {
            line.starts_with("b: ") && line.contains("takes over a copy from the bucket")
        })
        .filter_map(|line| line.rsplit_once("id=")?.1.trim().parse::<u64>().ok())
        .map(|id| format!("{id:016x}"))
        .collect();
    assert!(!taken.is_empty(), "{}", nodes.log());
    let folder = server.root().join("bucket/prox/a");
    let has = |id: &String| {
        let parts = std::fs::read_dir(folder.join(id));
        parts.is_ok_and(|mut parts| parts.next().is_some())
    };
    until("the copies are removed from the bucket", || {
        !taken.iter().any(has)
    })
    .await;
}

/// A node is killed, and the other one needs its copies, which only the bucket has, while the bucket fails. `is_removed`:
/// whether the copies are removed from the bucket soon afterwards. A removal that got no answer is given up after its time,
/// which no test waits for.
pub(crate) async fn flows_that_wake_wait<B: BucketServer>(
    nodes: &Nodes,
    mut server: B,
    is_removed: bool,
    fail: impl FnOnce(&mut B),
    mend: impl AsyncFnOnce(&mut B),
) {
    let (mut first, second, balancer, mut downloads) = whole_copies(nodes, &server).await;
    fail(&mut server);
    first.child.kill().await.unwrap();
    balancer.move_to(&second);
    until("the second node says that they wait", || {
        nodes.has_said("b", "the bucket that has it fails; its flow waits")
    })
    .await;
    nodes.assert_status("b", &["\"failing\":\""]).await;
    mend(&mut server).await;
    // They acknowledge the last bytes: a flow that is not delivered keeps its copy.
    let _devices = std::mem::take(&mut downloads.devices);
    nodes.assert_whole(downloads).await;
    if is_removed {
        until_removed(nodes, &server).await;
    }
}

async fn devices_wait_for_the_bucket(fault: S3Fault) {
    let Some((nodes, server)) = with_bucket(4, SMALL).await else {
        return;
    };
    let fail = |server: &mut S3Server| server.set(fault);
    let mend = async |server: &mut S3Server| server.set(S3Fault::Well);
    flows_that_wake_wait(&nodes, server, fault != S3Fault::Silent, fail, mend).await;
}

#[tokio::test]
async fn flows_that_wake_wait_for_a_bucket_that_answers_with_errors() {
    devices_wait_for_the_bucket(S3Fault::Unavailable).await;
}

#[tokio::test]
async fn flows_that_wake_wait_for_a_bucket_that_does_not_answer() {
    devices_wait_for_the_bucket(S3Fault::Silent).await;
}

/// Downloads run while the bucket takes nothing; when it does again, another node goes on from it.
pub(crate) async fn what_runs_goes_on<B: BucketServer>(
    nodes: &Nodes,
    mut server: B,
    is_noticed: bool,
    fail: impl FnOnce(&mut B),
    mend: impl AsyncFnOnce(&mut B),
) {
    let (mut first, second) = slow_nodes(nodes).await;
    fail(&mut server);
    let balancer = Balancer::start(first.listens_at().parse().unwrap()).await;
    let at = balancer.address_of(&first);
    let downloads = nodes.download_at(40, &at, "/whole").await;
    if is_noticed {
        until("the first node says that the bucket fails", || {
            nodes.has_said("a", "the bucket of copies fails")
        })
        .await;
    }
    let before = downloads.received();
    until("they go on", || downloads.received() > before).await;
    assert_eq!(server.parts(), Vec::<u64>::new());
    mend(&mut server).await;
    if is_noticed {
        until("the bucket works again", || {
            nodes.has_said("a", "works again")
        })
        .await;
    }
    // What the devices have not got yet is what the bucket gets now, so that another node goes on.
    let undelivered = || {
        let all = downloads.progress.iter();
        all.filter(|one| one.bytes.load(Ordering::SeqCst) < SIZE as u64)
            .count()
    };
    until("the bucket has all that is under way", || {
        server.parts().len() >= undelivered()
    })
    .await;
    assert!(undelivered() > 0, "they run");
    first.child.kill().await.unwrap();
    balancer.move_to(&second);
    nodes.assert_whole(downloads).await;
    assert!(nodes.has_said("b", "takes over a copy from the bucket"));
}

#[tokio::test]
async fn what_runs_goes_on_without_the_bucket_which_gets_it_when_it_is_back() {
    for fault in [S3Fault::Unavailable, S3Fault::Full] {
        let Some((nodes, server)) = with_bucket(4, SMALL).await else {
            return;
        };
        let fail = |server: &mut S3Server| server.set(fault);
        let mend = async |server: &mut S3Server| server.set(S3Fault::Well);
        what_runs_goes_on(&nodes, server, true, fail, mend).await;
    }
}

/// The head of an upload of so many bytes.
fn upload_head(method: &str, url: &str, bytes: usize) -> String {
    format!(
        "{method} {url} HTTP/1.1\r\nHost: h\r\nContent-Length: {bytes}\r\nExpect: 100-continue\r\nCedos-Upload: {TOKEN}\r\n\r\n"
    )
}

/// An origin that answers an upload once it may, and counts those whose body is `expected`.
struct UploadOrigin {
    origin: ScriptedOrigin,
    right: Arc<AtomicUsize>,
    may_answer: watch::Sender<bool>,
}

impl UploadOrigin {
    async fn start(expected: &[u8]) -> UploadOrigin {
        let (right, may_answer) = (Arc::<AtomicUsize>::default(), watch::Sender::new(true));
        let (counted, gate) = (right.clone(), may_answer.subscribe());
        let expected: Arc<[u8]> = expected.into();
        let origin = ScriptedOrigin::play(move |request, mut stream| {
            let (counted, mut gate) = (counted.clone(), gate.clone());
            let expected = expected.clone();
            async move {
                if request.body(&mut stream).await.as_deref() == Some(&expected[..]) {
                    counted.fetch_add(1, Ordering::SeqCst);
                }
                let _ = gate.wait_for(|may| *may).await;
                let _ = stream.write_all(&reply("201 Created", &[], b"made")).await;
            }
        })
        .await;
        UploadOrigin {
            origin,
            right,
            may_answer,
        }
    }

    fn counts(&self) -> (usize, usize) {
        (
            self.origin.requests().len(),
            self.right.load(Ordering::SeqCst),
        )
    }
}

#[tokio::test]
async fn an_upload_of_a_killed_node_goes_on_at_another_after_its_parts_and_is_delivered_once() {
    let Some((nodes, server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let body = object(2 * PART + 500_000, 8);
    let origin = UploadOrigin::start(&body).await;
    let mut first = TcpNode::start(&nodes, "a").await;
    let second = TcpNode::start(&nodes, "b").await;
    let head = upload_head("POST", &origin.origin.url("/a"), body.len());
    let mut stream = first.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body[..PART + 200_000]).await.unwrap();
    until("a part is in the bucket", || {
        server.parts() == [PART as u64]
    })
    .await;
    first.kill().await;
    let mut stream = second.send(&head).await;
    assert_eq!(offset(&mut stream).await, PART, "{}", nodes.log());
    stream.write_all(&body[PART..]).await.unwrap();
    let answer = rest_of(stream).await;
    assert_eq!((answer.status, &answer.body[..]), (201, &b"made"[..]));
    assert_eq!(origin.counts(), (1, 1));
    // Its objects and notes go with it.
    until("the bucket is empty", || is_empty(&server)).await;
    until("no note is left", || {
        ["B", "o", "p"].iter().all(|kind| notes(&nodes, kind) == 0)
    })
    .await;
}

#[tokio::test]
async fn an_upload_in_a_directory_goes_on_at_another_node_from_its_last_byte() {
    let Some(nodes) = Nodes::with_devices(1).await else {
        return;
    };
    let body = object(500_000, 8);
    let origin = UploadOrigin::start(&body).await;
    let mut first = TcpNode::start(&nodes, "a").await;
    let second = TcpNode::start(&nodes, "b").await;
    let head = upload_head("POST", &origin.origin.url("/a"), body.len());
    let mut stream = first.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body[..200_000]).await.unwrap();
    let copies = nodes.path().join("copies/copies");
    let lengths = || {
        let files = std::fs::read_dir(&copies).unwrap().flatten();
        files
            .map(|file| file.metadata().map_or(0, |file| file.len()))
            .collect::<Vec<_>>()
    };
    until("the body is there", || lengths() == [200_000]).await;
    first.kill().await;
    let mut stream = second.send(&head).await;
    assert_eq!(offset(&mut stream).await, 200_000, "{}", nodes.log());
    stream.write_all(&body[200_000..]).await.unwrap();
    assert_eq!(rest_of(stream).await.status, 201);
    assert_eq!(origin.counts(), (1, 1));
    until("no file is left", || lengths().is_empty()).await;
}

#[tokio::test]
async fn an_upload_whose_device_moves_while_it_is_delivered_gets_the_answer_at_the_other_node() {
    let Some((nodes, _server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let body = object(100_000, 8);
    let origin = UploadOrigin::start(&body).await;
    origin.may_answer.send_replace(false);
    let first = TcpNode::start(&nodes, "a").await;
    let second = TcpNode::start(&nodes, "b").await;
    let head = upload_head("POST", &origin.origin.url("/a"), body.len());
    let mut stream = first.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body).await.unwrap();
    until("the origin has it", || origin.counts() == (1, 1)).await;
    stream.set_zero_linger().unwrap();
    drop(stream);
    let mut stream = second.send(&head).await;
    // sleep: that the second node does not answer is the subject
    let early = tokio::time::timeout(Duration::from_secs(1), stream.read_u8()).await;
    assert!(early.is_err(), "it answers before the origin");
    origin.may_answer.send_replace(true);
    let from = offset(&mut stream).await;
    stream.write_all(&body[from..]).await.unwrap();
    let answer = rest_of(stream).await;
    assert_eq!((answer.status, &answer.body[..]), (201, &b"made"[..]));
    assert_eq!(origin.counts(), (1, 1));
}

#[tokio::test]
async fn a_post_that_a_killed_node_was_sending_is_not_sent_again() {
    let Some((nodes, _server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let body = object(100_000, 8);
    let origin = UploadOrigin::start(&body).await;
    origin.may_answer.send_replace(false);
    let mut first = TcpNode::start(&nodes, "a").await;
    let second = TcpNode::start(&nodes, "b").await;
    let head = upload_head("POST", &origin.origin.url("/a"), body.len());
    let mut stream = first.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body).await.unwrap();
    until("the origin has it", || origin.counts() == (1, 1)).await;
    first.kill().await;
    let mut stream = second.send(&head).await;
    let from = offset(&mut stream).await;
    stream.write_all(&body[from..]).await.unwrap();
    assert_eq!(rest_of(stream).await.status, 502);
    assert_eq!(origin.counts(), (1, 1));
}

#[tokio::test]
async fn a_complete_upload_is_delivered_by_the_next_process_of_its_node_while_the_device_is_away() {
    let Some((nodes, _server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let body = object(100_000, 8);
    // Nobody listens there until the node is killed.
    let at = HeldPort::take();
    let mut first = TcpNode::start(&nodes, "a").await;
    let url = format!("http://{}/a", at.address());
    let head = upload_head("POST", &url, body.len());
    let mut stream = first.send(&head).await;
    assert_eq!(offset(&mut stream).await, 0);
    stream.write_all(&body).await.unwrap();
    until("the upload waits for its server", || {
        nodes.has_said("a", "the upload waits for its server")
    })
    .await;
    first.kill().await;
    let (right, expected) = (Arc::<AtomicUsize>::default(), body.clone());
    let counted = right.clone();
    let listener = tokio::net::TcpListener::bind(at.address()).await.unwrap();
    let origin = ScriptedOrigin::play_at(listener, None, move |request, mut stream| {
        let (counted, expected) = (counted.clone(), expected.clone());
        async move {
            if request.body(&mut stream).await == Some(expected) {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            let _ = stream.write_all(&reply("201 Created", &[], b"")).await;
        }
    });
    first.start_again(&nodes).await;
    until("the origin has it", || right.load(Ordering::SeqCst) == 1).await;
    let mut stream = first.send(&head).await;
    assert_eq!(offset(&mut stream).await, body.len(), "{}", nodes.log());
    assert_eq!(rest_of(stream).await.status, 201);
    assert_eq!(origin.requests().len(), 1);
}

/// A copy of three parts, of which nobody but the nodes has the rest: its flow has ended abnormally at the first node.
struct RetainedCopy {
    origin: ScriptedOrigin,
    body: Vec<u8>,
    tag: String,
}

const READ: usize = 100_000;

impl RetainedCopy {
    async fn make(nodes: &Nodes, server: &S3Server, node: &TcpNode) -> RetainedCopy {
        let body = object(2 * PART + 1_000, 9);
        let served = body.clone();
        // No validator: nothing but the copy has the rest of these bytes.
        let origin = ScriptedOrigin::start(move |_| {
            let fields = [("Cache-Control", "private")];
            OriginReply(reply("200 OK", &fields, &served), ReplyEnd::Close)
        })
        .await;
        let mut stream = node.send(get(&origin.url("/"), "")).await;
        let head = head_of(&mut stream).await;
        let mut lines = head.lines();
        let tag = lines.find_map(|line| line.strip_prefix("etag: "));
        let tag = tag.expect("a tag").to_owned();
        let mut first = vec![0; READ];
        within(stream.read_exact(&mut first)).await.unwrap();
        until("all parts are in the bucket", || {
            server.parts() == [1_000, PART as u64, PART as u64]
        })
        .await;
        stream.set_zero_linger().unwrap();
        drop(stream);
        until("the store knows that it is retained", || {
            notes(nodes, "R") == 1
        })
        .await;
        RetainedCopy { origin, body, tag }
    }

    async fn assert_goes_on_at(&self, nodes: &Nodes, node: &TcpNode) {
        let fields = format!("Range: bytes={READ}-\r\nIf-Range: {}\r\n", self.tag);
        let rest = node.ask(get(&self.origin.url("/"), &fields)).await;
        assert_eq!(rest.status, 206, "{}\n{}", rest.head, nodes.log());
        assert!(rest.body == self.body[READ..]);
        assert_eq!(self.origin.requests().len(), 1);
    }
}

#[tokio::test]
async fn a_copy_that_a_killed_node_retained_is_found_at_another_and_removed_when_it_is_delivered() {
    let Some((nodes, server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let mut first = TcpNode::start(&nodes, "a").await;
    let second = TcpNode::start(&nodes, "b").await;
    let copy = RetainedCopy::make(&nodes, &server, &first).await;
    first.kill().await;
    copy.assert_goes_on_at(&nodes, &second).await;
    until("the bucket is empty", || is_empty(&server)).await;
    until("no note is left", || notes(&nodes, "R") == 0).await;
}

#[tokio::test]
async fn a_node_that_is_killed_and_started_again_has_its_retained_copies() {
    let Some((nodes, server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let mut first = TcpNode::start(&nodes, "a").await;
    let copy = RetainedCopy::make(&nodes, &server, &first).await;
    first.kill().await;
    first.start_again(&nodes).await;
    let held = "local n = 0
        for _, key in ipairs(redis.call('KEYS', 'cedos:*:ha/*')) do n = n + redis.call('SCARD', key) end
        return n";
    until("the new process holds it", || {
        nodes.has_said("a", "retains what an earlier process of this node had")
            && nodes.redis.ask(&["EVAL", held, "0"]).trim() == "1"
    })
    .await;
    copy.assert_goes_on_at(&nodes, &first).await;
    until("the bucket is empty", || is_empty(&server)).await;
}

#[tokio::test]
async fn a_node_refuses_a_bucket_without_conditions_and_one_of_a_proxy_with_a_journal() {
    let Some((nodes, server)) = with_bucket(1, SMALL).await else {
        return;
    };
    let url = nodes.redis.url();
    let at = "127.0.0.1:0".parse().unwrap();
    let ends = async |more: &[&str], reason: &str| {
        std::fs::write(nodes.path().join("prox.toml"), "").unwrap();
        let arguments = [&PLACE[..], more].concat();
        let mut command = command(nodes.path(), at, &server.environment(), &arguments);
        let ran = ended(command.spawn().unwrap()).await;
        assert_ne!(ran.code, 0);
        assert!(ran.errors.contains(reason), "{}", ran.errors);
    };
    let of_store = ["--store", &url, "--node", "c"];
    server.set(S3Fault::Unconditional);
    ends(&of_store, "ignores If-None-Match").await;
    server.set(S3Fault::Well);
    let _node = nodes.start("a", &[]).await;
    ends(&[], "with --store").await;
}
