//! Several proxies with one key that share their sessions in Redis: a balancer moves devices from one to the other, a
//! node is killed in the middle of downloads, and the store is killed, paused, slow and filled.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::latency_proxy::LatencyProxy;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::processor_wait::{ProcessorWait, sleep_beside};
use cedos_lab_rig::program::{ProxyProcess, cedos, pid_of, run};
use cedos_lab_rig::redis::RedisServer;
use cedos_lab_rig::wait::until;
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, FlowSettings, LinkUse, ProvidedLink, ProvidedLinks,
    SecretKey, ServerAddress,
};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

pub(crate) const SIZE: usize = 200_000;
const HALF: usize = 100_000;
/// Devices of most tests, each with a session of its own.
const DEVICES: usize = 4;

/// A UDP balancer in front of the nodes, as a failover of an address is one.
pub(crate) struct Balancer {
    pub(crate) address: SocketAddr,
    to: Arc<Mutex<SocketAddr>>,
    is_cut: Arc<AtomicBool>,
    /// Bytes that nodes may still get until what they send back is lost.
    left: Arc<AtomicU64>,
    /// For how long what nodes send back is held.
    delay_ms: Arc<AtomicU64>,
}

impl Balancer {
    pub(crate) async fn start(to: SocketAddr) -> Balancer {
        Balancer::with_delay(to, Duration::ZERO).await
    }

    /// A balancer that holds what nodes send back for `delay`.
    pub(crate) async fn with_delay(to: SocketAddr, delay: Duration) -> Balancer {
        let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let address = front.local_addr().unwrap();
        let to = Arc::new(Mutex::new(to));
        let is_cut = Arc::new(AtomicBool::new(false));
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let delay_ms = Arc::new(AtomicU64::new(delay.as_millis() as u64));
        let (target, cut, may) = (to.clone(), is_cut.clone(), left.clone());
        let delays = delay_ms.clone();
        tokio::spawn(async move {
            let mut behind: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
            let mut bytes = vec![0; 65_536];
            while let Ok((len, from)) = front.recv_from(&mut bytes).await {
                if let Entry::Vacant(free) = behind.entry(from) {
                    let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                    free.insert(socket.clone());
                    let (front, cut, target) = (front.clone(), cut.clone(), target.clone());
                    let delays = delays.clone();
                    tokio::spawn(async move {
                        let mut bytes = vec![0; 65_536];
                        // An error is an ICMP message about a node that is gone.
                        loop {
                            let Ok((len, node)) = socket.recv_from(&mut bytes).await else {
                                continue;
                            };
                            let (front, cut, target) = (front.clone(), cut.clone(), target.clone());
                            let data = bytes[..len].to_vec();
                            let back = async move {
                                // What is held of a node is lost when the address moves to another.
                                let is_current = *target.lock().unwrap() == node;
                                if is_current && !cut.load(Ordering::SeqCst) {
                                    let _ = front.send_to(&data, from).await;
                                }
                            };
                            let delay = Duration::from_millis(delays.load(Ordering::SeqCst));
                            if delay.is_zero() {
                                back.await;
                                continue;
                            }
                            tokio::spawn(async move {
                                // sleep: the delay of the network is the subject
                                tokio::time::sleep(delay).await;
                                back.await;
                            });
                        }
                    });
                }
                let to = *target.lock().unwrap();
                let before = may.load(Ordering::SeqCst);
                let after = before.saturating_sub(len as u64);
                may.store(after, Ordering::SeqCst);
                if before > 0 && after == 0 {
                    cut.store(true, Ordering::SeqCst);
                }
                let _ = behind[&from].send_to(&bytes[..len], to).await;
            }
        });
        Balancer {
            address,
            to,
            is_cut,
            left,
            delay_ms,
        }
    }

    /// From now on what nodes send back is held for `delay`.
    fn set_delay(&self, delay: Duration) {
        let delay = delay.as_millis() as u64;
        self.delay_ms.store(delay, Ordering::SeqCst);
    }

    pub(crate) fn move_to(&self, node: &ProxyProcess) {
        *self.to.lock().unwrap() = node.listens_at().parse().unwrap();
    }

    /// Whether what nodes send back is lost, that which is held included.
    pub(crate) fn set_cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::SeqCst);
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::SeqCst)
    }

    /// What nodes send back is lost once they have got so many bytes.
    pub(crate) fn cut_after(&self, bytes: u64) {
        self.left.store(bytes, Ordering::SeqCst);
    }

    /// The proxy's address, with the balancer in the place of the node.
    pub(crate) fn address_of(&self, node: &ProxyProcess) -> String {
        node.address
            .replace(node.listens_at(), &self.address.to_string())
    }
}

/// Counts the flows of which the store has a memo.
const FLOWS_WITH_MEMO: &str = "local n = 0
for _, key in ipairs(redis.call('KEYS', 'cedos:*:s*')) do
  for _, field in ipairs(redis.call('HKEYS', key)) do if string.sub(field, 1, 1) == 'm' then n = n + 1 end end
end
return n";

/// What the origin gave: a path, and from which byte on.
type Given = (String, Option<usize>);

/// Nodes of one operator, a balancer in front, and an origin that gives the first half of each object until it is told
/// to give the rest.
pub(crate) struct Nodes {
    directory: tempfile::TempDir,
    pub(crate) redis: RedisServer,
    /// Where nodes find the store, if not at the server itself.
    store_url: Option<String>,
    origin: ScriptedOrigin,
    /// The connection of the origin from which on it gives the rest of objects.
    gives_rest_from: Arc<AtomicUsize>,
    given: Arc<Mutex<Vec<Given>>>,
    /// What the nodes wrote in their logs.
    log: Arc<Mutex<String>>,
    /// How many devices there are.
    devices: usize,
    /// The processes of nodes that were started.
    started: Mutex<Vec<Pid>>,
    /// The sizes of objects.
    sizes: ObjectSizes,
    /// Where nodes keep copies.
    pub(crate) copies: [&'static str; 2],
    /// Variables of the nodes.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// The sizes of the objects of the origin.
#[derive(Clone, Copy)]
pub(crate) struct ObjectSizes {
    pub(crate) whole: usize,
    /// How much of an object the origin gives at first.
    pub(crate) first: usize,
    /// From which byte on another node requests it.
    pub(crate) next_from: usize,
}

const SMALL_SIZES: ObjectSizes = ObjectSizes {
    whole: SIZE,
    first: HALF,
    next_from: HALF,
};

fn device_key(n: usize) -> SecretKey {
    SecretKey::from_bytes([n as u8 + 1; 32])
}

impl Nodes {
    /// `None` where there is no `redis-server`.
    async fn new() -> Option<Nodes> {
        Nodes::with_devices(DEVICES).await
    }

    /// Nodes that admit so many devices.
    pub(crate) async fn with_devices(devices: usize) -> Option<Nodes> {
        Nodes::with_sizes(devices, SMALL_SIZES).await
    }

    /// Nodes that admit so many devices, and an origin whose objects have these sizes.
    pub(crate) async fn with_sizes(devices: usize, sizes: ObjectSizes) -> Option<Nodes> {
        let redis = RedisServer::start()?;
        let gives_rest_from = Arc::new(AtomicUsize::new(usize::MAX));
        let given = Arc::new(Mutex::new(Vec::new()));
        let (gate, gives) = (gives_rest_from.clone(), given.clone());
        let origin = ScriptedOrigin::start(move |asked| {
            if asked.path.starts_with("/small") {
                return OriginReply(
                    reply("200 OK", &[("Content-Length", "5")], b"small"),
                    ReplyEnd::Close,
                );
            }
            let whole = proper(asked, &object(sizes.whole, 3), "\"v1\"");
            let from = asked.range_from();
            if from.is_some() && asked.connection < gate.load(Ordering::SeqCst) {
                let later = reply("503 Later", &[("Content-Length", "0")], b"");
                return OriginReply(later, ReplyEnd::Close);
            }
            gives.lock().unwrap().push((asked.path.clone(), from));
            let is_whole = asked.path.starts_with("/whole");
            let given = if from.is_none() && !is_whole {
                cut(whole, sizes.first)
            } else {
                whole
            };
            OriginReply(given, ReplyEnd::Close)
        })
        .await;
        let directory = tempfile::tempdir().unwrap();
        run(directory.path(), &["key", "gen", "-o", "prox.key"]).await;
        Some(Nodes {
            directory,
            redis,
            store_url: None,
            origin,
            gives_rest_from,
            given,
            log: Arc::default(),
            devices,
            started: Mutex::default(),
            sizes,
            copies: ["--copies-dir", "copies"],
            environment: Vec::new(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Puts the store behind a latency each way.
    fn put_store_away(&mut self, latency: Duration) -> LatencyProxy {
        let at = self.path().join("far.sock");
        self.store_url = Some(format!("redis+unix://{}", at.display()));
        LatencyProxy::to_unix(self.redis.socket(), &at, latency)
    }

    /// Starts a node, and collects its log.
    pub(crate) async fn start(&self, name: &str, more: &[&str]) -> ProxyProcess {
        let url = self.store_url.clone().unwrap_or_else(|| self.redis.url());
        let state = format!("state-{name}");
        let mut arguments = vec![
            "prox",
            "--key",
            "prox.key",
            "--allow-private",
            "--store",
            &url,
            "--node",
            name,
            "--state-dir",
            &state,
        ];
        arguments.extend(self.copies);
        let clients: Vec<String> = (0..self.devices)
            .map(|n| format!("--allow-client={}", device_key(n).public()))
            .collect();
        arguments.extend(clients.iter().map(String::as_str));
        if !more.contains(&"--listen") {
            arguments.extend(["--listen", "127.0.0.1:0"]);
        }
        arguments.extend(more);
        let mut command = cedos(self.path(), &arguments);
        command.env("RUST_LOG", "info");
        let variables = self.environment.iter();
        command.envs(variables.map(|(name, value)| (name, value)));
        let mut child = command.spawn().unwrap();
        self.started.lock().unwrap().push(pid_of(&child));
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (log, name) = (self.log.clone(), name.to_owned());
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                *log.lock().unwrap() += &format!("{name}: {line}\n");
            }
        });
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = tokio::time::timeout(PATIENCE, output.next_line()).await;
        let address = address.expect("it starts").unwrap();
        let address = address.unwrap_or_else(|| panic!("a node ended: {}", self.log()));
        ProxyProcess { child, address }
    }

    /// Starts two nodes, and a balancer that leads to the first one.
    pub(crate) async fn start_two(&self, more: &[&str]) -> (ProxyProcess, ProxyProcess, Balancer) {
        let first = self.start("a", more).await;
        let second = self.start("b", more).await;
        let balancer = Balancer::start(first.listens_at().parse().unwrap()).await;
        (first, second, balancer)
    }

    /// Asserts that the status of a node says all of this.
    pub(crate) async fn assert_status(&self, node: &str, words: &[&str]) {
        let state = format!("state-{node}");
        let status = ["prox", "status", "--state-dir", &state, "--json"];
        let status = run(self.path(), &status).await;
        words.iter().for_each(|words| status.ends_with(0, words));
    }

    /// Waits until no copy is left in this folder.
    pub(crate) async fn until_no_copy(&self, folder: &str) {
        let copies = self.path().join(folder);
        until("the files of copies are removed", || {
            std::fs::read_dir(&copies).unwrap().count() == 0
        })
        .await;
    }

    /// From now on the origin gives the rest of objects, but not by connections that nodes have opened already: a node
    /// that was killed asked for it, too, and it would be given twice.
    pub(crate) async fn give_rest(&self) {
        let connections = self.origin.connections().await;
        self.gives_rest_from.store(connections, Ordering::SeqCst);
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// The store's key of the times at which sessions end.
    fn key_of_ends(&self) -> String {
        let keys = self.redis.ask(&["--scan", "--pattern", "cedos:*:d"]);
        keys.lines().next().unwrap_or("none").to_owned()
    }

    /// Whether a node said this in its log.
    pub(crate) fn has_said(&self, node: &str, words: &str) -> bool {
        let log = self.log.lock().unwrap();
        let mut lines = log.lines();
        lines.any(|line| line.starts_with(&format!("{node}: ")) && line.contains(words))
    }

    /// Starts `n` downloads of the devices through the balancer.
    pub(crate) async fn download(
        &self,
        n: usize,
        node: &ProxyProcess,
        balancer: &Balancer,
    ) -> Downloads {
        let server = balancer.address_of(node);
        self.download_at(n, &server, "").await
    }

    /// Starts `n` downloads of objects in this folder through the proxy at `server`.
    pub(crate) async fn download_at(
        &self,
        n: usize,
        server: &str,
        folder: &'static str,
    ) -> Downloads {
        let server: ServerAddress = server.parse().unwrap();
        let mut devices = Vec::new();
        for number in 0..self.devices {
            let options = DeviceOptions {
                server: server.clone(),
                key: device_key(number),
                config: EndpointConfig::default(),
            };
            let device = Device::new(options).await.unwrap();
            device.use_default_route().unwrap();
            devices.push(device);
        }
        self.download_by(devices, n, folder)
    }

    /// Starts `n` downloads of objects in this folder by these devices.
    fn download_by(&self, devices: Vec<Device>, n: usize, folder: &'static str) -> Downloads {
        let mut downloads = Downloads {
            progress: Vec::new(),
            tasks: JoinSet::new(),
            began: Instant::now(),
            devices,
            folder,
        };
        self.download_more(&mut downloads, n);
        downloads
    }

    /// Starts `n` more downloads.
    pub(crate) fn download_more(&self, downloads: &mut Downloads, n: usize) {
        let before = downloads.progress.len();
        for i in before..before + n {
            let device = &downloads.devices[i % self.devices];
            let mut flow = device.open(FlowSettings::default()).unwrap();
            let (url, host) = (
                self.origin.url(&format!("{}/{i}", downloads.folder)),
                self.origin.address,
            );
            let (progress, began) = (Arc::new(Progress::default()), downloads.began);
            downloads.progress.push(progress.clone());
            downloads.tasks.spawn(async move {
                let request = format!("GET {url} HTTP/1.1\r\nhost: {host}\r\n\r\n");
                flow.write_all(request.as_bytes()).await.unwrap();
                flow.shutdown().await.unwrap();
                let (mut answer, mut piece) = (Vec::new(), vec![0; 65_536]);
                loop {
                    let len = flow.read(&mut piece).await.map_err(|error| (i, error))?;
                    progress.note(began.elapsed(), len);
                    if len == 0 {
                        return Ok(answer);
                    }
                    answer.extend_from_slice(&piece[..len]);
                }
            });
        }
    }

    /// Waits until the devices have the first half of each object, and the store knows of all.
    pub(crate) async fn halves_are_there(&self, downloads: &Downloads) {
        downloads.each_has(self.sizes.first).await;
        until("the store knows all flows", || {
            let memos = self.redis.ask(&["EVAL", FLOWS_WITH_MEMO, "0"]);
            memos.trim() == downloads.progress.len().to_string()
        })
        .await;
        let nodes = self.started.lock().unwrap().clone();
        // sleep: how much of copies is there is written a moment later, and nothing tells of it
        sleep_beside(Duration::from_secs(1), &nodes).await;
    }

    /// Asserts that the downloads end well, and that the origin gave no byte of any twice.
    pub(crate) async fn assert_whole(&self, mut downloads: Downloads) {
        self.complete(&mut downloads).await;
        let expected = match downloads.folder {
            "" => vec![None, Some(self.sizes.next_from)],
            _ => vec![None],
        };
        for (i, from) in self.requests(&downloads).into_iter().enumerate() {
            assert_eq!(from, expected, "object {i}\n{}", self.log());
        }
    }

    /// Waits until the downloads have ended, and asserts that each has what the origin serves.
    async fn complete(&self, downloads: &mut Downloads) {
        let expected = object(self.sizes.whole, 3);
        while let Some(ended) = tokio::time::timeout(PATIENCE, downloads.tasks.join_next())
            .await
            .unwrap_or_else(|_| panic!("downloads stand still: {}", self.log()))
        {
            let answer = ended.unwrap();
            let answer = answer.unwrap_or_else(|error| panic!("{error:?}\n{}", self.log()));
            let end = answer
                .windows(4)
                .position(|four| four == b"\r\n\r\n")
                .unwrap();
            assert!(answer[end + 4..] == expected, "not what was served");
        }
    }

    /// From which bytes on the origin gave each download's object.
    fn requests(&self, downloads: &Downloads) -> Vec<Vec<Option<usize>>> {
        let given = self.given.lock().unwrap();
        let of = |i: usize| {
            let path = format!("{}/{i}", downloads.folder);
            let of_this = given.iter().filter(|(given, _)| *given == path);
            of_this.map(|(_, from)| *from).collect()
        };
        (0..downloads.progress.len()).map(of).collect()
    }
}

/// Downloads that run.
pub(crate) struct Downloads {
    pub(crate) progress: Vec<Arc<Progress>>,
    tasks: JoinSet<Result<Vec<u8>, (usize, std::io::Error)>>,
    began: Instant,
    pub(crate) devices: Vec<Device>,
    /// The origin's folder of the objects: those in `/whole` are given at once.
    folder: &'static str,
}

/// What has come of a download.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) bytes: AtomicU64,
    /// When bytes came last, and the longest silence before any, in microseconds.
    last_us: AtomicU64,
    silence_us: AtomicU64,
}

impl Progress {
    fn note(&self, at: Duration, len: usize) {
        let at = at.as_micros() as u64;
        let last = self.last_us.swap(at, Ordering::SeqCst);
        self.silence_us.fetch_max(at - last, Ordering::SeqCst);
        self.bytes.fetch_add(len as u64, Ordering::SeqCst);
    }
}

impl Downloads {
    pub(crate) fn received(&self) -> u64 {
        let all = self.progress.iter();
        all.map(|one| one.bytes.load(Ordering::SeqCst)).sum()
    }

    /// Waits until each download has so many bytes.
    pub(crate) async fn each_has(&self, bytes: usize) {
        until("every download has moved", || {
            let mut all = self.progress.iter();
            all.all(|one| one.bytes.load(Ordering::SeqCst) >= bytes as u64)
        })
        .await;
    }

    /// Begins to measure the silence of each download now.
    pub(crate) fn measure_silence(&self) {
        let now = self.began.elapsed().as_micros() as u64;
        for one in &self.progress {
            one.last_us.store(now, Ordering::SeqCst);
            one.silence_us.store(0, Ordering::SeqCst);
        }
    }

    /// Median and longest silence.
    pub(crate) fn silence(&self) -> (Duration, Duration) {
        let all = self.progress.iter();
        let mut all: Vec<u64> = all
            .map(|one| one.silence_us.load(Ordering::SeqCst))
            .collect();
        all.sort_unstable();
        let of = |us: u64| Duration::from_micros(us);
        (of(all[all.len() / 2]), of(all[all.len() - 1]))
    }
}

#[tokio::test]
async fn a_node_is_killed_and_another_goes_on_with_its_200_downloads() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    let (mut first, second, balancer) = nodes.start_two(&[]).await;
    assert_eq!(
        first.address.rsplit('/').next(),
        second.address.rsplit('/').next(),
        "one key"
    );
    let downloads = nodes.download(200, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    // In this order: else the first node may ask for the rest, too.
    first.child.kill().await.unwrap();
    nodes.give_rest().await;
    downloads.measure_silence();
    balancer.move_to(&second);
    downloads.each_has(SIZE).await;
    let (median, longest) = downloads.silence();
    let log = nodes.log();
    let took: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("took over"))
        .collect();
    eprintln!("{}\n{}", took[0], took[took.len() - 1]);
    eprintln!(
        "200 downloads went on at another node: silence median {median:?}, longest {longest:?}"
    );
    nodes.assert_whole(downloads).await;
    // Delivered: nothing is kept for anybody.
    nodes.until_no_copy("copies/copies").await;
}

#[tokio::test]
async fn a_node_whose_devices_moved_away_loses_their_sessions_and_says_so() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    let sleepy = ["--sleep-after", "6s"];
    let (first, second, balancer) = nodes.start_two(&sleepy).await;
    let mut downloads = nodes.download(8, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    balancer.move_to(&second);
    // Devices notice at their next packet, and the first node when it wants to write: here, that they sleep.
    nodes.download_more(&mut downloads, DEVICES);
    until("the first node has lost them", || {
        nodes.has_said("a", "another node has taken over this session")
    })
    .await;
    assert!(nodes.has_said("b", "took over a session from another node"));
    nodes.give_rest().await;
    downloads.each_has(SIZE).await;
    balancer.move_to(&first);
    nodes.download_more(&mut downloads, DEVICES);
    downloads.each_has(SIZE).await;
    nodes.assert_whole(downloads).await;
}

/// The rate that a proxy allows each client, so that downloads are under way for a while.
const SLOW: &str = "client_down_bytes_per_s = 1000000\n";

/// The proxy's address with both nodes.
pub(crate) fn address_of_both(first: &ProxyProcess, second: &ProxyProcess) -> String {
    let both = format!("{},{}", first.listens_at(), second.listens_at());
    first.address.replace(first.listens_at(), &both)
}

#[tokio::test]
async fn a_node_is_drained_while_200_downloads_run_and_none_is_requested_twice() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    std::fs::write(nodes.path().join("slow.toml"), SLOW).unwrap();
    let slow = ["--config", "slow.toml"];
    let mut first = nodes.start("a", &slow).await;
    let second = nodes.start("b", &slow).await;
    // Devices leave a node that a busy machine keeps silent for a second, without being asked: the other one answers
    // them from the drain on.
    let balancer = Balancer::start(second.listens_at().parse().unwrap()).await;
    balancer.set_cut(true);
    let key = first.address.rsplit('/').next().unwrap();
    let both = format!("d2tp://{},{}/{key}", first.listens_at(), balancer.address);
    let downloads = nodes.download_at(200, &both, "/whole").await;
    until("they run", || downloads.received() > 200 * 20_000).await;
    let wait = ProcessorWait::of(&[pid_of(&first.child), pid_of(&second.child)]);
    downloads.measure_silence();
    balancer.set_cut(false);
    let begun = Instant::now();
    let drain = ["prox", "drain", "--state-dir", "state-a", "--within", "60s"];
    let (drained, _) = wait.during(run(nodes.path(), &drain)).await;
    drained.ends_with(0, "the node has ended");
    let ended = tokio::time::timeout(PATIENCE, first.child.wait()).await;
    assert!(ended.unwrap().unwrap().success());
    let (lasted, waited) = (begun.elapsed(), wait.longest());
    let received = downloads.received();
    let (median, longest) = downloads.silence();
    eprintln!(
        "drained in {lasted:?}, with {received} bytes of {} received; silence median {median:?}, longest {longest:?}",
        200 * SIZE
    );
    assert!(received < 200 * SIZE as u64, "downloads ran meanwhile");
    assert!(nodes.has_said("b", "took over a session from another node"));
    assert!(!nodes.has_said("a", "the time for devices to go on elsewhere is over"));
    assert!(
        longest < Duration::from_secs(2) + waited,
        "{longest:?}, {waited:?} of it for a processor"
    );
    nodes.assert_whole(downloads).await;
}

/// The rate that a proxy allows each client, so that downloads last longer than devices need to notice a nearer node.
const SLOWER: &str = "client_down_bytes_per_s = 200000\n";

/// Two nodes, each behind a balancer of its own, so that each can be near or far.
async fn near_and_far(nodes: &Nodes) -> ([ProxyProcess; 2], [Balancer; 2]) {
    std::fs::write(nodes.path().join("slow.toml"), SLOWER).unwrap();
    let slow = ["--config", "slow.toml"];
    let first = nodes.start("a", &slow).await;
    let second = nodes.start("b", &slow).await;
    let [near, far] = [(&first, 5), (&second, 120)].map(|(node, delay_ms)| {
        let at = node.listens_at().parse().unwrap();
        Balancer::with_delay(at, Duration::from_millis(delay_ms))
    });
    let balancers = [near.await, far.await];
    ([first, second], balancers)
}

/// Devices that follow these networks, in place of the system's route.
async fn in_networks(nodes: &Nodes, server: &str, links: &Arc<ProvidedLinks>) -> Vec<Device> {
    let mut devices = Vec::new();
    for number in 0..nodes.devices {
        let options = DeviceOptions {
            server: server.parse().unwrap(),
            key: device_key(number),
            config: EndpointConfig::default(),
        };
        let mut device = Device::with_attach(options, links.clone()).await.unwrap();
        device.follow_links(links.subscribe(), |_| LinkUse::Free);
        devices.push(device);
    }
    devices
}

fn network(name: &str, last: u8) -> ProvidedLink {
    ProvidedLink::new(name, IpAddr::from([127, 0, 0, last]))
}

// R-NODE-5: their devices have moved to another city, say.
#[tokio::test]
async fn devices_with_downloads_move_to_a_node_that_became_nearer_and_nothing_is_requested_twice() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    let ([first, _second], [near, far]) = near_and_far(&nodes).await;
    let key = first.address.rsplit('/').next().unwrap();
    let both = format!("d2tp://{},{}/{key}", near.address, far.address);
    let links = ProvidedLinks::new();
    links.add(network("wifi", 2));
    let devices = in_networks(&nodes, &both, &links).await;
    let downloads = nodes.download_by(devices, 80, "/whole");
    until("they run", || downloads.received() > 400_000).await;
    let at_node = |address: SocketAddr| {
        let name = address.to_string();
        let here = |device: &Device| {
            let mut nodes = device.nodes().into_iter();
            nodes.any(|node| node.is_current && node.name == name)
        };
        downloads.devices.iter().all(here)
    };
    assert!(at_node(near.address));
    near.set_delay(Duration::from_millis(120));
    far.set_delay(Duration::from_millis(5));
    links.add(network("another", 3));
    links.remove("wifi");
    downloads.measure_silence();
    let begun = Instant::now();
    until("each device is at the second node", || at_node(far.address)).await;
    let (received, lasted) = (downloads.received(), begun.elapsed());
    assert!(received < 80 * SIZE as u64, "downloads ran meanwhile");
    until("the first node has let them go", || {
        let log = nodes.log();
        let of_first = log.lines().filter(|line| line.starts_with("a: "));
        let lost = |line: &&str| line.contains("another node has taken over this session");
        of_first.filter(lost).count() == DEVICES
    })
    .await;
    let (median, longest) = downloads.silence();
    eprintln!(
        "all had moved after {lasted:?}, with {received} bytes of {} received; silence median {median:?}, longest {longest:?}",
        80 * SIZE
    );
    nodes.assert_whole(downloads).await;
}

/// Devices lose their node for a moment while an origin holds their requests. Returns whether no object was requested
/// twice, and how long the longest-waiting thread waited for a processor; `None` where there is no `redis-server`.
async fn lose_a_node_for_a_moment() -> Option<(bool, Duration)> {
    let mut nodes = Nodes::new().await?;
    let (gate, given) = (tokio::sync::watch::Sender::new(false), nodes.given.clone());
    let gates = gate.subscribe();
    nodes.origin = ScriptedOrigin::play(move |asked, mut stream| {
        let (mut gate, given) = (gates.clone(), given.clone());
        async move {
            let asked_for = (asked.path.clone(), asked.range_from());
            given.lock().unwrap().push(asked_for);
            let _ = gate.wait_for(|is_open| *is_open).await;
            let whole = proper(&asked, &object(SIZE, 3), "\"v1\"");
            let _ = stream.write_all(&whole).await;
            let _ = stream.shutdown().await;
        }
    })
    .await;
    let first = nodes.start("a", &[]).await;
    let second = nodes.start("b", &[]).await;
    let wait = ProcessorWait::of(&[pid_of(&first.child), pid_of(&second.child)]);
    let [near, other] =
        [&first, &second].map(|node| Balancer::start(node.listens_at().parse().unwrap()));
    let (near, other) = (near.await, other.await);
    // Until the first node is lost, no device finds the other one, however slow the first one is.
    other.set_cut(true);
    let key = first.address.rsplit('/').next().unwrap();
    let both = format!("d2tp://{},{}/{key}", near.address, other.address);
    let mut downloads = nodes.download_at(DEVICES, &both, "/held").await;
    until("the origin was asked for all", || {
        nodes.given.lock().unwrap().len() == DEVICES
    })
    .await;
    // The first node hears the devices, and they do not hear it. It waits for the origin, which the store does not know.
    near.set_cut(true);
    other.set_cut(false);
    until("a device tried the other node", || {
        nodes.has_said("a", "its device tries later")
    })
    .await;
    near.set_cut(false);
    gate.send_replace(true);
    nodes.download_more(&mut downloads, DEVICES);
    nodes.complete(&mut downloads).await;
    let requests = nodes.requests(&downloads);
    Some((requests.iter().all(|of| of == &[None]), wait.longest()))
}

#[tokio::test]
async fn a_device_that_loses_its_node_for_a_moment_leaves_no_request_behind() {
    for _ in 0..5 {
        let Some((is_once, waited)) = lose_a_node_for_a_moment().await else {
            return;
        };
        if is_once {
            return;
        }
        // A node that does not answer another for a second counts as gone, and it keeps a session for three: a busy
        // machine may hold it for longer.
        assert!(
            waited > Duration::from_millis(250),
            "an object was requested twice; {waited:?} without a processor"
        );
    }
    panic!("an object was requested twice, each time");
}

#[tokio::test]
async fn devices_of_a_drained_node_go_on_at_one_that_they_did_not_know() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    std::fs::write(nodes.path().join("slow.toml"), SLOW).unwrap();
    let slow = ["--config", "slow.toml"];
    let first = nodes.start("a", &slow).await;
    let second = nodes.start("b", &slow).await;
    let downloads = nodes.download_at(40, &first.address, "/whole").await;
    until("they run", || downloads.received() > 40 * 20_000).await;
    let drained = run(
        nodes.path(),
        &[
            "prox",
            "drain",
            "--state-dir",
            "state-a",
            "--to",
            second.listens_at(),
        ],
    )
    .await;
    drained.ends_with(0, "the node has ended");
    nodes.assert_whole(downloads).await;
}

#[tokio::test]
async fn a_drained_node_keeps_copies_that_are_fetched_until_its_time_is_over() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    let first = nodes.start("a", &[]).await;
    let second = nodes.start("b", &[]).await;
    let both = address_of_both(&first, &second);
    let downloads = nodes.download_at(8, &both, "").await;
    nodes.halves_are_there(&downloads).await;
    let drain = ["prox", "drain", "--state-dir", "state-a", "--within", "2s"];
    let drained = run(nodes.path(), &drain).await;
    drained.ends_with(0, "the node has ended");
    drained.ends_with(0, "4 wait for their transfers");
    assert!(nodes.has_said("a", "the time for devices to go on elsewhere is over"));
    nodes.give_rest().await;
    nodes.assert_whole(downloads).await;
    assert!(nodes.has_said("b", "took over a session from another node"));
}

/// What happens to a store.
#[derive(Clone, Copy, Debug)]
enum StoreFault {
    Killed,
    Paused,
    /// The store answers after longer than nodes wait.
    Slow,
    Full,
}

/// A latency of a store each way, of which a node notices only that all takes longer.
const FAR: Duration = Duration::from_millis(100);
/// A latency of a store each way, so that no node waits for an answer.
const TOO_FAR: Duration = Duration::from_secs(3);

async fn devices_wait_for_the_store(fault: StoreFault) {
    let Some(mut nodes) = Nodes::new().await else {
        return;
    };
    let path = nodes.put_store_away(Duration::ZERO);
    let (mut first, second, balancer) = nodes.start_two(&[]).await;
    let downloads = nodes.download(8, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    match fault {
        StoreFault::Killed => nodes.redis.kill(),
        StoreFault::Paused => nodes.redis.pause(),
        StoreFault::Slow => path.set_latency(TOO_FAR),
        StoreFault::Full => nodes.redis.set_full(true),
    }
    // In this order: else the first node may ask for the rest, too.
    first.child.kill().await.unwrap();
    nodes.give_rest().await;
    balancer.move_to(&second);
    until("the second node says that they wait", || {
        nodes.has_said("b", "sleeping sessions cannot be woken now")
    })
    .await;
    let before = downloads.received();
    let word = match fault {
        StoreFault::Full => "full",
        StoreFault::Killed | StoreFault::Paused | StoreFault::Slow => "away",
    };
    let state = format!("\"store_state\":\"{word}\"");
    nodes.assert_status("b", &[&state, "\"node\":\"b\""]).await;
    assert_eq!(
        downloads.received(),
        before,
        "nothing moves without a record"
    );
    match fault {
        StoreFault::Killed => nodes.redis.start_again(),
        StoreFault::Paused => nodes.redis.resume(),
        StoreFault::Slow => path.set_latency(Duration::ZERO),
        StoreFault::Full => nodes.redis.set_full(false),
    }
    nodes.assert_whole(downloads).await;
}

#[tokio::test]
async fn devices_wait_for_a_store_that_was_killed() {
    devices_wait_for_the_store(StoreFault::Killed).await;
}

#[tokio::test]
async fn devices_wait_for_a_store_that_does_not_answer() {
    devices_wait_for_the_store(StoreFault::Paused).await;
}

#[tokio::test]
async fn devices_wait_for_a_store_that_answers_too_late() {
    devices_wait_for_the_store(StoreFault::Slow).await;
}

#[tokio::test]
async fn downloads_go_on_at_another_node_by_a_store_that_is_far_away() {
    let Some(mut nodes) = Nodes::new().await else {
        return;
    };
    let _path = nodes.put_store_away(FAR);
    let (mut first, second, balancer) = nodes.start_two(&[]).await;
    let downloads = nodes.download(40, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    // In this order: else the first node may ask for the rest, too.
    first.child.kill().await.unwrap();
    nodes.give_rest().await;
    downloads.measure_silence();
    balancer.move_to(&second);
    downloads.each_has(SIZE).await;
    let (median, longest) = downloads.silence();
    eprintln!("a store at {FAR:?}: silence median {median:?}, longest {longest:?}");
    nodes.assert_whole(downloads).await;
    assert!(!nodes.has_said("b", "cannot be woken now"));
}

#[tokio::test]
async fn devices_wait_for_a_store_that_is_full() {
    devices_wait_for_the_store(StoreFault::Full).await;
}

#[tokio::test]
async fn what_runs_goes_on_without_the_store_and_is_written_when_it_is_back() {
    let Some(mut nodes) = Nodes::new().await else {
        return;
    };
    let first = nodes.start("a", &[]).await;
    let balancer = Balancer::start(first.listens_at().parse().unwrap()).await;
    let downloads = nodes.download(8, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    nodes.redis.kill();
    nodes.give_rest().await;
    // All of it arrives although no record can be written.
    nodes.assert_whole(downloads).await;
    until("the first node says that the store is away", || {
        nodes.has_said("a", "the store does not take records")
    })
    .await;
    nodes.redis.start_again();
    until("the first node has written what it had to", || {
        nodes.has_said("a", "the store is back")
    })
    .await;
    // Sessions that ended meanwhile have left nothing for another node.
    until("no record is left", || {
        nodes.redis.ask(&["ZCARD", &nodes.key_of_ends()]).trim() == "0"
    })
    .await;
}

/// Small objects of one connection each.
const SMALL_OBJECTS: usize = 650;

/// Clients without D2TP that fetch small objects from a node, one after the other.
async fn fetch_small(nodes: &Nodes, tcp: &str, paths: std::ops::Range<usize>) {
    let host = nodes.origin.address;
    for i in paths {
        let fetching = async {
            let mut stream = tokio::net::TcpStream::connect(tcp).await.unwrap();
            let request = format!(
                "GET http://{host}/small{i} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
            );
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            answer
        };
        let answer = tokio::time::timeout(PATIENCE, fetching).await;
        let answer = answer.unwrap_or_else(|_| panic!("object {i} stands still: {}", nodes.log()));
        assert!(answer.starts_with(b"HTTP/1.1 200"), "object {i}");
    }
}

#[tokio::test]
async fn a_store_that_is_away_stops_no_node_after_hundreds_of_objects_and_they_leave_nothing() {
    let Some(mut nodes) = Nodes::new().await else {
        return;
    };
    let port = HeldPort::take();
    let tcp = port.address().to_string();
    let more = [
        "--tcp-listen",
        &tcp,
        "--allow-address",
        "127.0.0.0/8",
        "--cache-quota",
        "0",
    ];
    let _node = nodes.start("a", &more).await;
    nodes.redis.kill();
    fetch_small(&nodes, &tcp, 0..SMALL_OBJECTS).await;
    nodes.redis.start_again();
    nodes.until_no_copy("copies/copies").await;
    // Holds and records are named after the objects.
    until("nothing of them is in the store", || {
        let held = nodes.redis.ask(&["--scan", "--pattern", "cedos:*:r*"]);
        let notes = nodes.redis.ask(&["--scan", "--pattern", "cedos:*:nc*"]);
        held.is_empty() && notes.is_empty()
    })
    .await;
}

#[tokio::test]
async fn an_upgrade_while_the_store_is_away_leaves_the_running_process_as_it_is() {
    let Some(mut nodes) = Nodes::new().await else {
        return;
    };
    let mut first = nodes.start("a", &[]).await;
    let balancer = Balancer::start(first.listens_at().parse().unwrap()).await;
    let downloads = nodes.download(8, &first, &balancer).await;
    nodes.halves_are_there(&downloads).await;
    nodes.redis.kill();
    let url = nodes.redis.url();
    let upgrade = [
        "prox",
        "--upgrade",
        "--listen",
        first.listens_at(),
        "--key",
        "prox.key",
        "--store",
        &url,
        "--node",
        "a",
        "--state-dir",
        "state-a",
        "--copies-dir",
        "copies",
        "--allow-any-client",
    ];
    let refused = run(nodes.path(), &upgrade).await;
    refused.ends_with(1, "does not answer");
    assert!(first.child.try_wait().unwrap().is_none(), "it runs");
    nodes.redis.start_again();
    nodes.give_rest().await;
    nodes.assert_whole(downloads).await;
    assert!(!nodes.has_said("a", "a new process takes over"));
}

#[tokio::test]
async fn what_nodes_cannot_share_is_refused_with_a_sentence() {
    let Some(nodes) = Nodes::new().await else {
        return;
    };
    let _node = nodes.start("a", &[]).await;
    let url = nodes.redis.url();
    let begin = ["prox", "--listen", "127.0.0.1:0", "--allow-any-client"];
    let refused = async |code: i32, more: &[&str], sentence: &str| {
        let ran = run(nodes.path(), &[&begin[..], more].concat()).await;
        ran.ends_with(code, sentence);
    };
    let of_store = [
        "--store",
        &url,
        "--copies-dir",
        "copies",
        "--state-dir",
        "other",
    ];
    let named = [&of_store[..], &["--node", "a"]].concat();
    refused(1, &named, "--store needs --key FILE").await;
    let same_name = [&named[..], &["--key", "prox.key"]].concat();
    refused(1, &same_name, "another node \"a\"").await;
    refused(2, &["--node", "b"], "--node needs --store").await;
    refused(2, &["--copies-dir", "copies"], "--copies-dir needs --store").await;
    let both = [&same_name[..], &["--copies", "s3://bucket/a"]].concat();
    refused(1, &both, "in --copies-dir or in --copies").await;
}

#[tokio::test]
async fn a_node_without_a_name_or_a_shared_directory_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let start = [
        "prox",
        "--allow-any-client",
        "--store",
        "redis://127.0.0.1:1",
    ];
    let refused = run(folder.path(), &start).await;
    refused.ends_with(1, "--node NAME");
    let named = [&start[..], &["--node", "a", "--state-dir", "s"]].concat();
    run(folder.path(), &named)
        .await
        .ends_with(1, "--copies-dir DIR");
    let away = [&named[..], &["--copies-dir", "c", "--key", "k"]].concat();
    run(folder.path(), &["key", "gen", "-o", "k"]).await;
    run(folder.path(), &away)
        .await
        .ends_with(1, "does not answer");
}
