//! A proxy with two workers and streams is replaced in the middle of transfers: by an upgrade, and by a restart on
//! sockets that a manager of services holds. Devices on a network that blocks UDP go on in new streams, the others by
//! UDP.
//!
//! ```text
//!  devices ── wlan0, no UDP ──▶ streams ─┐
//!  devices ── loopback, UDP ─────────────┴─▶ the proxy ─▶ the next one, on the same sockets
//! ```

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    BlockedUdp, in_namespace, origin_namespace, received, sent, sh, wifi_on,
};
use cedos_lab_rig::origin::{ScriptedOrigin, object, proper};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::{ProxyProcess, cedos, ended, pid_of};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until, within};
use nix::sys::signal::{Signal, kill};
use socket2::{Domain, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::process::Child;
use tokio::sync::oneshot;

use crate::passed_tunnels::service_with;
use crate::upgrade::{device, logged, part_bytes, proxy, proxy_arguments};

/// Devices that download, by each of the two ways.
const DEVICES: usize = 5;
const OBJECTS: usize = 6;
const BYTES: usize = 2_000_000; // two seconds at the rate of a device
/// What the proxy lets each device have in a second, beside a second's bytes at first.
const RATE: &str = "client_down_bytes_per_s = 1000000\nclient_up_bytes_per_s = 300000\n";
/// How long nothing may arrive at a device once the next process serves, where that is measured: on a machine that does nothing else.
/// A device whose next stream is cut, too, waits for four seconds.
const SILENCE_MAX: Duration = Duration::from_secs(2);
const WORKERS: [&str; 4] = ["--workers", "2", "--config", "rate.toml"];

/// Objects of one size, each with content of its own: `/N`. They are served, and taken.
async fn origin() -> ScriptedOrigin {
    let listener = tokio::net::TcpListener::bind("192.0.2.1:0")
        .await
        .expect("a port");
    ScriptedOrigin::play_at(listener, None, |request, mut stream| async move {
        let seed = request.path.trim_start_matches('/').parse();
        let object = object(BYTES, seed.expect("a number"));
        let answer = match &*request.method {
            "PUT" => {
                let body = request.body(&mut stream).await;
                let status = match body == Some(object) {
                    true => "201 Created",
                    false => "400 Bad Request",
                };
                format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes()
            }
            _ => proper(&request, &object, "\"v1\""),
        };
        // The proxy may have closed the connection.
        let _ = stream.write_all(&answer).await;
    })
}

/// Devices on one network in the middle of their transfers.
struct TransferringDevices {
    homes: Vec<PathBuf>,
    downloads: Vec<Child>,
    upload: Child,
    first: usize,
}

impl TransferringDevices {
    /// Starts devices that transfer the objects from `first` on, and waits until each has begun.
    async fn start(
        directory: &Path,
        name: &str,
        first: usize,
        origin: SocketAddr,
        proxy: &str,
    ) -> TransferringDevices {
        let url = |number: usize| format!("http://{origin}/{number}");
        let homes: Vec<_> = (0..DEVICES)
            .map(|n| directory.join(format!("{name}{n}")))
            .collect();
        let downloads = homes.iter().enumerate().map(|(n, home)| {
            let from = first + n * OBJECTS;
            let urls: Vec<_> = (from..from + OBJECTS).map(url).collect();
            device(home, proxy, &urls, "100M")
        });
        let downloads = downloads.collect();
        let number = first + DEVICES * OBJECTS;
        let home = directory.join(format!("{name}-upload"));
        std::fs::create_dir(&home).expect("a directory");
        std::fs::write(home.join("file"), object(BYTES, number as u32)).expect("written");
        let arguments = ["put", "file", &url(number), "--json", "--prox", proxy];
        let upload = cedos(&home, &arguments).spawn().expect("start cedos");
        until("every device receives", || {
            homes.iter().all(|home| part_bytes(home) > 200_000)
        })
        .await;
        TransferringDevices {
            homes,
            downloads,
            upload,
            first,
        }
    }

    /// Waits until each device has all, and asserts that it is right.
    async fn assert_whole(self) {
        for download in self.downloads {
            let ran = ended(download).await;
            assert_eq!(ran.code, 0, "{} {:#?}", ran.errors, ran.events.last());
        }
        for (n, home) in self.homes.iter().enumerate() {
            let from = self.first + n * OBJECTS;
            for number in from..from + OBJECTS {
                let got = std::fs::read(home.join(number.to_string())).expect("the file");
                assert!(got == object(BYTES, number as u32), "object {number}");
            }
        }
        let put = ended(self.upload).await;
        assert_eq!(put.code, 0, "{} {:#?}", put.errors, put.events.last());
        assert_eq!(put.last()["status"], 201);
    }
}

/// When bytes arrived at each device until it had all.
async fn arrivals(homes: Vec<PathBuf>) -> Vec<Vec<Instant>> {
    let mut devices: Vec<_> = homes.into_iter().map(|home| (home, 0, vec![])).collect();
    let all = (OBJECTS * BYTES) as u64;
    until("every device has all", || {
        for (home, bytes, times) in &mut devices {
            let arrived = part_bytes(home);
            if arrived != *bytes {
                *bytes = arrived;
                times.push(Instant::now());
            }
        }
        devices.iter().all(|(_, bytes, _)| *bytes >= all)
    })
    .await;
    devices.into_iter().map(|(.., times)| times).collect()
}

/// How long nothing arrived at a device once the next process served, and in all; `None` if it had all before.
fn silence_at(times: &[Instant], served: Instant) -> Option<(Duration, Duration)> {
    let next = times.iter().find(|at| **at > served)?;
    let gaps = times.windows(2).map(|two| two[1] - two[0]);
    Some((*next - served, gaps.max().unwrap_or_default()))
}

/// Has the proxy of `start` replaced by `replace` while devices with and without UDP transfer by it. Both run in the
/// network of the origin, in a directory with the proxy's state. `silence_max`: how long nothing may arrive at a device.
fn transfers_go_on<S, R>(
    test: String,
    silence_max: Option<Duration>,
    start: impl FnOnce(PathBuf) -> S + Send + 'static,
    replace: impl FnOnce(PathBuf, ProxyProcess) -> R + Send + 'static,
) where
    S: Future<Output = ProxyProcess>,
    R: Future<Output = ProxyProcess>,
{
    in_namespace(test, move || async move {
        let directory = tempfile::tempdir().expect("a directory");
        let place = directory.path().to_owned();
        std::fs::write(place.join("rate.toml"), RATE).expect("written");
        let (origin, address, begin, begun, replaced) = origin_namespace(move || async move {
            sh("tc qdisc del dev ap0 root");
            // Its rules last as long as the namespace.
            let _udp = BlockedUdp::on("ap0");
            let origin = origin().await;
            let first = start(place.clone()).await;
            let (address, at) = (first.address.clone(), origin.address);
            let (begin, begins) = oneshot::channel::<()>();
            let (tell, begun) = oneshot::channel();
            let (tell_replaced, replaced) = oneshot::channel();
            // A thread of this network, which goes on with what it starts.
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                runtime.expect("a runtime").block_on(async move {
                    begins.await.expect("the test goes on");
                    let devices =
                        TransferringDevices::start(&place, "udp", 0, at, &first.address).await;
                    assert!(tell.send(devices).is_ok(), "the test goes on");
                    let next = replace(place, first).await;
                    let told = tell_replaced.send((next, Instant::now()));
                    assert!(told.is_ok(), "the test goes on");
                    std::future::pending::<()>().await;
                });
            });
            (origin, address, begin, begun, replaced)
        });
        wifi_on("198.51.100.7");
        let (at, seeds) = (origin.address, DEVICES * OBJECTS + 1);
        let before = (received("wlan0"), sent("wlan0"));
        let in_streams =
            TransferringDevices::start(directory.path(), "stream", seeds, at, &address).await;
        let wait = ProcessorWait::of_this_and_descendants();
        begin.send(()).expect("it waits");
        let by_udp = within(begun).await.expect("they begin");
        let watched = [by_udp.homes.clone(), in_streams.homes.clone()].concat();
        let all = async {
            tokio::join!(
                arrivals(watched),
                in_streams.assert_whole(),
                by_udp.assert_whole(),
                within(replaced)
            )
        };
        let ((arrivals, (), (), replaced), _) = wait.during(all).await;
        let (next, served) = replaced.expect("it is replaced");
        assert_eq!(next.address, address);
        let (by_udp, in_streams) = arrivals.split_at(DEVICES);
        let waited = wait.longest();
        for (devices, name) in [(by_udp, "by UDP"), (in_streams, "in streams")] {
            let silences: Vec<_> = (devices.iter())
                .filter_map(|times| silence_at(times, served))
                .collect();
            eprintln!("{name}: silences once the next process served, and in all: {silences:?}");
            let longest = silences.iter().map(|(since_served, _)| *since_served).max();
            let longest = longest.expect("a device is under way when the proxy is replaced");
            if let Some(most) = silence_max {
                assert!(
                    longest < most + waited,
                    "{name}: {longest:?}, {waited:?} of it for a processor"
                );
            }
        }
        // What it takes to carry all once, and what was under way when the streams ended.
        let carried = (received("wlan0") - before.0, sent("wlan0") - before.1);
        eprintln!("{carried:?} bytes by the link of the streams");
        let most = |payload: usize| (payload as u64 * 108 / 100) + 500_000;
        assert!(carried.0 < most(DEVICES * OBJECTS * BYTES), "{carried:?}");
        assert_asked_once(&origin, 2 * seeds);
    });
}

/// Asserts that the origin was asked for each object once, and that each was taken whole once.
fn assert_asked_once(origin: &ScriptedOrigin, objects: usize) {
    let requests = origin.requests();
    let mut whole: Vec<_> = (requests.iter())
        .filter(|request| request.range_from().is_none())
        .map(|request| &request.path)
        .collect();
    whole.sort();
    assert_eq!(whole.len(), objects, "{whole:?}");
    whole.dedup();
    assert_eq!(
        whole.len(),
        objects,
        "the origin is asked for nothing twice"
    );
    for rest in requests.iter().filter(|r| r.range_from().is_some()) {
        assert!(rest.range_from() > Some(0), "{rest:?}");
    }
}

/// Two UDP sockets on one port, and a listener for streams, as a manager of services binds them.
fn sockets_of_two_workers() -> Vec<(String, OwnedFd)> {
    let bind = |at: SocketAddr| {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).expect("a socket");
        socket.set_reuse_port(true).expect("a shared port");
        socket.bind(&at.into()).expect("a port");
        UdpSocket::from(socket)
    };
    let first = bind(SocketAddr::from(([192, 0, 2, 1], 0)));
    let second = bind(first.local_addr().expect("its address"));
    let streams = TcpListener::bind("192.0.2.1:0").expect("a port");
    let named = |socket: OwnedFd| ("cedos-prox.socket".to_owned(), socket);
    vec![
        named(first.into()),
        named(second.into()),
        named(streams.into()),
    ]
}

/// A proxy with two workers and streams.
async fn with_streams(
    directory: &Path,
    [listen, streams]: [&str; 2],
    more: &[&str],
    log: &str,
) -> ProxyProcess {
    let more = [&WORKERS[..], &["--stream-listen", streams], more].concat();
    proxy(directory, listen, &more, log).await
}

/// The address of the streams of a proxy.
fn streams_of(proxy: &ProxyProcess) -> String {
    let (_, port) = proxy.address.split_once("?stream=").expect("a port");
    format!("192.0.2.1:{port}")
}

async fn started(directory: PathBuf) -> ProxyProcess {
    with_streams(&directory, ["192.0.2.1:0"; 2], &[], "old.log").await
}

async fn upgraded(directory: PathBuf, mut old: ProxyProcess) -> ProxyProcess {
    let at = [old.listens_at(), &streams_of(&old)];
    let new = with_streams(&directory, at, &["--upgrade"], "new.log").await;
    let status = within(old.child.wait()).await.expect("it ends");
    assert!(status.success(), "{status}");
    new
}

/// An upgrade that fails when the old process has left, so that this serves again.
async fn not_upgraded(directory: PathBuf, old: ProxyProcess) -> ProxyProcess {
    let mut command = {
        let streams = streams_of(&old);
        let arguments = [
            &proxy_arguments(old.listens_at())[..],
            &WORKERS,
            &["--stream-listen", &streams, "--upgrade"],
            &["--qlog", "/proc/nowhere"],
        ];
        cedos(&directory, &arguments.concat())
    };
    let failed = command.output().await.expect("it ran");
    assert!(!failed.status.success());
    let serves_again = move || logged(&directory, "old.log", "ready").len() == 2;
    until("the old process serves again", serves_again).await;
    old
}

#[test]
fn an_upgrade_of_two_workers_goes_unnoticed_by_udp_and_in_streams() {
    transfers_go_on(this_test!(), None, started, upgraded);
}

#[test]
#[ignore = "a measurement, for a machine that does nothing else"]
fn an_upgrade_of_two_workers_with_streams_is_over_within_two_seconds() {
    transfers_go_on(this_test!(), Some(SILENCE_MAX), started, upgraded);
}

#[test]
fn an_upgrade_that_fails_leaves_the_streams_of_two_workers_to_the_old_process() {
    transfers_go_on(this_test!(), None, started, not_upgraded);
}

/// A proxy on the sockets of a manager of services.
async fn service(directory: PathBuf, sockets: &[(String, OwnedFd)]) -> ProxyProcess {
    let address = |passed: &(String, OwnedFd)| {
        let socket = Socket::from(passed.1.try_clone().expect("a descriptor"));
        let at = socket.local_addr().expect("its address").as_socket();
        at.expect("of IP").to_string()
    };
    let (listen, streams) = (address(&sockets[0]), address(&sockets[2]));
    let more = [&WORKERS[..], &["--stream-listen", &streams]].concat();
    let notify = directory.join("notify");
    service_with(&directory, &listen, &more, &notify, sockets).await
}

#[test]
fn two_workers_that_are_started_again_on_a_managers_sockets_go_on_by_udp_and_in_streams() {
    let (tell, told) = oneshot::channel();
    transfers_go_on(
        this_test!(),
        None,
        move |directory| async move {
            let manager = UnixDatagram::bind(directory.join("notify")).expect("a socket");
            let sockets = sockets_of_two_workers();
            let proxy = service(directory, &sockets).await;
            assert!(tell.send((manager, sockets)).is_ok(), "they are awaited");
            proxy
        },
        move |directory, mut old| async move {
            let (_manager, sockets) = told.await.expect("it was started");
            kill(pid_of(&old.child), Signal::SIGTERM).expect("send");
            let status = within(old.child.wait()).await.expect("it ends");
            assert!(status.success(), "{status}");
            service(directory, &sockets).await
        },
    );
}
