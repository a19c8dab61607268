//! Networks that carry no UDP: `get`, `put` and `run` reach D2Prox in a stream, by themselves, and go back to
//! UDP where a network has it. Two real links in a network namespace; what comes in by the Wi-Fi as UDP is
//! dropped at its far end.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    BlockedUdp, cell_on, in_namespace, origin_namespace, received, sent, sh, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, TestAuthority, object, proper,
};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, ended, run};
use cedos_lab_rig::{PATIENCE, this_test};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command as ProgramCommand;

const OBJECT_BYTES: usize = 6_000_000; // 2.4 s at 20 Mb/s

fn origins(asked: &OriginRequest) -> OriginReply {
    let bytes = object(OBJECT_BYTES, 1);
    OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
}

/// An origin, a D2Prox with streams, and a network without UDP at the far end of the Wi-Fi.
struct Served {
    url: String,
    /// Where a file can be put.
    put_url: String,
    proxy: ProxyProcess,
    udp: BlockedUdp,
}

struct Blocked {
    home: tempfile::TempDir,
    served: Served,
}

impl std::ops::Deref for Blocked {
    type Target = Served;
    fn deref(&self) -> &Served {
        &self.served
    }
}

impl Blocked {
    /// `streams`: where D2Prox listens for streams.
    fn new(streams: &'static str) -> Blocked {
        Blocked::with(streams, &[])
    }

    /// With more arguments for D2Prox.
    fn with(streams: &'static str, more: &'static [&'static str]) -> Blocked {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let served = origin_namespace(move || origin_and_proxy(place, streams, more));
        Blocked { home, served }
    }

    fn path(&self) -> &Path {
        self.home.path()
    }

    async fn get(&self, more: &[&str]) -> CedosRun {
        let out = [
            "get",
            "--json",
            "-o",
            "out",
            &self.url,
            "--prox",
            &self.proxy.address,
        ];
        run(self.path(), &[&out[..], more].concat()).await
    }

    fn assert_whole(&self, run: &CedosRun) {
        assert_eq!(run.code, 0, "{:#?}\n{}", run.events, run.errors);
        let got = std::fs::read(self.path().join("out")).expect("the file");
        assert!(got == object(OBJECT_BYTES, 1), "other bytes");
    }
}

async fn origin_and_proxy(home: PathBuf, streams: &'static str, more: &[&str]) -> Served {
    let udp = BlockedUdp::on("ap0");
    let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
    let taking = ScriptedOrigin::play(|request, mut stream| async move {
        if let Some(body) = request.body(&mut stream).await {
            let whole = body == object(OBJECT_BYTES, 1);
            let status = if whole {
                "201 Created"
            } else {
                "400 Bad Request"
            };
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    let put_url = taking.await.url("/place");
    let arguments = [&["--stream-listen", streams], more].concat();
    let proxy = ProxyProcess::start(&home, "192.0.2.1:0", &arguments).await;
    Served {
        url: origin.url("/object"),
        put_url,
        proxy,
        udp,
    }
}

#[test]
fn a_download_and_an_upload_travel_in_a_stream_where_udp_is_blocked() {
    in_namespace(this_test!(), || async {
        let blocked = Blocked::new("192.0.2.1:0");
        assert!(
            blocked.proxy.address.contains("?stream="),
            "{}",
            blocked.proxy.address
        );
        wifi_on("198.51.100.7");
        let before = received("wlan0");
        let run_of = blocked.get(&[]).await;
        blocked.assert_whole(&run_of);
        assert_all_by("wlan0", &run_of);
        // What it takes to carry it once, and no more.
        let carried = received("wlan0") - before;
        let most = OBJECT_BYTES as u64 * 108 / 100;
        assert!(carried < most, "{carried} bytes for {OBJECT_BYTES}");

        std::fs::write(blocked.path().join("file"), object(OBJECT_BYTES, 1)).expect("written");
        let before = sent("wlan0");
        let arguments = [
            "put",
            "file",
            &blocked.put_url,
            "--json",
            "--prox",
            &blocked.proxy.address,
        ];
        let put = run(blocked.path(), &arguments).await;
        assert_eq!(put.code, 0, "{:#?}\n{}", put.events, put.errors);
        assert_eq!(put.last()["status"], 201);
        let carried = sent("wlan0") - before;
        assert!(carried < most, "{carried} bytes for {OBJECT_BYTES}");
    });
}

#[test]
fn devices_travel_in_streams_to_a_proxy_with_several_workers() {
    in_namespace(this_test!(), || async {
        let blocked = Blocked::with("192.0.2.1:0", &["--workers", "3", "--allow-any-client"]);
        wifi_on("198.51.100.7");
        // A worker has all sessions of a device, and each of these has a key of its own.
        for device in 0..4 {
            let home = blocked.path().join(format!("device-{device}"));
            std::fs::create_dir(&home).expect("a directory");
            let proxy = &blocked.proxy.address;
            let arguments = ["get", "--json", "-o", "out", &blocked.url, "--prox", proxy];
            let run_of = run(&home, &arguments).await;
            assert_eq!(run_of.code, 0, "{:#?}\n{}", run_of.events, run_of.errors);
            let got = std::fs::read(home.join("out")).expect("the file");
            assert!(got == object(OBJECT_BYTES, 1), "other bytes");
            assert_all_by("wlan0", &run_of);
        }
    });
}

#[test]
fn a_port_for_streams_that_the_proxy_told_is_remembered() {
    in_namespace(this_test!(), || async {
        let blocked = Blocked::new("192.0.2.1:0");
        let (bare, _) = blocked.proxy.address.split_once('?').expect("a port");
        wifi_on("198.51.100.7");
        blocked.udp.lift();
        let get = |out: &'static str| {
            let arguments = ["get", "--json", "-o", out, &blocked.url, "--prox", bare];
            cedos(blocked.path(), &arguments)
                .spawn()
                .expect("start cedos")
        };
        let told = ended(get("first")).await;
        assert_eq!(told.code, 0, "{:#?}\n{}", told.events, told.errors);
        blocked.udp.block();
        let run = ended(get("out")).await;
        blocked.assert_whole(&run);
    });
}

#[test]
fn a_program_under_run_travels_in_a_stream_where_udp_is_blocked() {
    in_namespace(this_test!(), || async {
        let blocked = Blocked::new("192.0.2.1:0");
        wifi_on("198.51.100.7");
        let arguments = [
            "run",
            "--prox",
            &blocked.proxy.address,
            "--",
            "curl",
            "-sS",
            "--noproxy",
            "*",
        ];
        let mut command = cedos(blocked.path(), &arguments);
        command
            .args(["-o", "out", &blocked.url])
            .stderr(Stdio::piped());
        let output = ended(command.spawn().expect("start cedos")).await;
        if output.errors.contains("No such file") {
            return eprintln!("skipped: there is no curl");
        }
        blocked.assert_whole(&output);
    });
}

/// Payload that came by a link.
fn carried_by(run: &CedosRun, link: &str) -> u64 {
    run.last()["bytes_by_link"][link]
        .as_u64()
        .unwrap_or_default()
}

/// Asserts that the object came by this link, once, beside the head of the answer.
fn assert_all_by(link: &str, run: &CedosRun) {
    let carried = carried_by(run, link);
    let object = OBJECT_BYTES as u64;
    assert!(
        (object..object + 4_000).contains(&carried),
        "{}",
        run.last()
    );
}

/// Waits until so many bytes came by a link since its counter stood at `from`.
async fn comes(link: &'static str, from: u64, bytes: u64) {
    let begun = Instant::now();
    while received(link) < from + bytes {
        assert!(begun.elapsed() < PATIENCE, "too little by {link}");
        // sleep: nobody tells of the kernel's counters
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn a_download_goes_on_in_a_stream_where_udp_is_blocked_midway() {
    in_namespace(this_test!(), || async {
        let blocked = Blocked::new("192.0.2.1:0");
        blocked.udp.lift();
        wifi_on("198.51.100.7");
        let before = received("wlan0");
        let arguments = ["get", "--json", "-o", "out", &blocked.url];
        let mut command = cedos(blocked.path(), &arguments);
        command.args(["--prox", &blocked.proxy.address]);
        let child = command.spawn().expect("start cedos");
        let finished = tokio::spawn(ended(child));
        comes("wlan0", before, 1_500_000).await;
        blocked.udp.block();
        let run = finished.await.expect("it ends");
        blocked.assert_whole(&run);
        let twice = carried_by(&run, "wlan0") - OBJECT_BYTES as u64;
        // What was on its way when UDP ceased to pass is asked for again.
        assert!(twice < 200_000, "{twice} bytes came twice: {}", run.last());
    });
}

#[test]
fn a_transfer_goes_from_udp_to_a_stream_on_another_link_and_back_and_nothing_comes_twice() {
    in_namespace(this_test!(), || async {
        let blocked = Blocked::new("192.0.2.1:0");
        cell_on();
        let arguments = [
            "get",
            "--json",
            "--policy",
            "any",
            "-o",
            "out",
            &blocked.url,
        ];
        let mut command = cedos(blocked.path(), &arguments);
        command.args(["--prox", &blocked.proxy.address]);
        let (cell, wifi) = (received("wwan0"), received("wlan0"));
        let child = command.spawn().expect("start cedos");
        let finished = tokio::spawn(ended(child));
        comes("wwan0", cell, 1_500_000).await;
        wifi_on("198.51.100.7");
        sh("ip addr flush dev wwan0; ip link set wwan0 down");
        comes("wlan0", wifi, 1_500_000).await;
        let middle = received("wwan0");
        wifi_off();
        cell_on();
        comes("wwan0", middle, 500_000).await;
        let run = finished.await.expect("it ends");
        blocked.assert_whole(&run);
        let by_both = carried_by(&run, "wwan0") + carried_by(&run, "wlan0");
        let twice = by_both - OBJECT_BYTES as u64;
        // What was in flight when a link went is asked for again; what arrived is not.
        assert!(twice < 200_000, "{twice} bytes came twice: {}", run.last());
    });
}

/// Answers each TCP connection by one link with a portal's redirect, and says what it was told.
async fn portal_at(link: &'static str, port: u16) -> tokio::sync::mpsc::UnboundedReceiver<Vec<u8>> {
    let socket =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    socket
        .bind_device(Some(link.as_bytes()))
        .expect("bind to the link");
    socket.set_reuse_address(true).expect("reuse");
    let address: SocketAddr = ([192, 0, 2, 1], port).into();
    socket.bind(&address.into()).expect("bind");
    socket.listen(64).expect("listen");
    socket.set_nonblocking(true).expect("nonblocking");
    let listener = TcpListener::from_std(socket.into()).expect("a listener");
    let (tell, told) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let mut heard = vec![0; 4_096];
            let n = tcp.read(&mut heard).await.unwrap_or(0);
            heard.truncate(n);
            let page =
                b"HTTP/1.1 302 Found\r\nLocation: http://portal.test/\r\nContent-Length: 0\r\n\r\n";
            let _ = tcp.write_all(page).await;
            let _ = tell.send(heard);
        }
    });
    told
}

#[test]
fn a_portal_at_the_streams_port_is_shunned_and_cellular_carries() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        // Something else than D2Prox answers by Wi-Fi.
        let (url, proxy, _udp, mut told) = origin_namespace(move || async move {
            let udp = BlockedUdp::on("ap0");
            let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
            let told = portal_at("ap0", 8_443).await;
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (origin.url("/object"), proxy, udp, told)
        });
        wifi_on("198.51.100.7");
        cell_on();
        let address = format!("{}?stream=8443", proxy.address);
        let arguments = [
            "get", "--json", "-o", "out", &url, "--policy", "any", "--prox", &address,
        ];
        let run = run(home.path(), &arguments).await;
        assert_eq!(run.code, 0, "{:#?}\n{}", run.events, run.errors);
        assert_all_by("wwan0", &run);
        // R-STREAM-7: it heard the beginning of TLS and nothing of ours.
        let heard = told.recv().await.expect("it was asked");
        assert_eq!(heard[0], 0x16, "{heard:?}");
    });
}

#[test]
fn where_the_network_lets_udp_pass_no_stream_is_opened() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (url, proxy, mut told) = origin_namespace(move || async move {
            let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
            let told = portal_at("ap0", 8_443).await;
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (origin.url("/object"), proxy, told)
        });
        wifi_on("198.51.100.7");
        let address = format!("{}?stream=8443", proxy.address);
        let arguments = ["get", "--json", "-o", "out", &url, "--prox", &address];
        let run = run(home.path(), &arguments).await;
        assert_eq!(run.code, 0, "{:#?}\n{}", run.events, run.errors);
        assert!(told.try_recv().is_err(), "nobody was asked by TCP");
    });
}

/// An HTTP proxy in this device's network, which connects to anything.
async fn http_proxy(at: &str) -> SocketAddr {
    let listener = TcpListener::bind(at).await.expect("a port");
    let address = listener.local_addr().expect("its address");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(client.read_u8().await?);
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let to = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let Ok(mut server) = TcpStream::connect(&to).await else {
                    return client.write_all(b"HTTP/1.1 502 Bad Gateway\r\n\r\n").await;
                };
                client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await?;
                std::io::Result::Ok(())
            });
        }
    });
    address
}

#[test]
fn a_network_with_an_http_proxy_alone_is_crossed_by_connect() {
    an_http_proxy_alone_is_crossed(this_test!(), |command, home, url| {
        let _ = home;
        command.env("HTTPS_PROXY", url);
    });
}

#[test]
fn an_http_proxy_of_the_settings_is_crossed_as_one_of_the_environment_is() {
    an_http_proxy_alone_is_crossed(this_test!(), |_, home, url| {
        let folder = home.join(".config/cedos");
        std::fs::create_dir_all(&folder).expect("a directory");
        let settings = format!("[proxy]\nhttp = \"{url}\"\n");
        std::fs::write(folder.join("config.toml"), settings).expect("written");
    });
}

/// Downloads where only an HTTP proxy reaches D2Prox; `name` tells the command of it.
fn an_http_proxy_alone_is_crossed(test: String, name: fn(&mut ProgramCommand, &Path, &str)) {
    in_namespace(test, move || async move {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (url, proxy, _udp, http) = origin_namespace(move || async move {
            let udp = BlockedUdp::on("ap0");
            // D2Prox is where the device has no TCP to: only the HTTP proxy does.
            sh("ip addr add 192.0.2.2/32 dev lo
                ip rule add pref 11 iif ap0 to 192.0.2.2 blackhole");
            let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
            let more = ["--stream-listen", "192.0.2.2:0"];
            let proxy = ProxyProcess::start(&place, "192.0.2.2:0", &more).await;
            (
                origin.url("/object"),
                proxy,
                udp,
                http_proxy("198.51.100.1:0").await,
            )
        });
        wifi_on("198.51.100.7");
        let arguments = ["get", "--json", "-o", "out", &url, "--prox", &proxy.address];
        let mut command = cedos(home.path(), &arguments);
        name(&mut command, home.path(), &format!("http://{http}"));
        let run = ended(command.spawn().expect("start cedos")).await;
        assert_eq!(run.code, 0, "{:#?}\n{}", run.events, run.errors);
        assert_all_by("wlan0", &run);
    });
}

#[test]
fn a_network_that_blocks_everything_is_named_as_such() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (url, proxy, _udp) = origin_namespace(move || async move {
            let udp = BlockedUdp::on("ap0");
            // The first hop answers, and what goes to D2Prox is dropped behind it.
            sh("ip addr add 192.0.2.2/32 dev lo
                ip rule add pref 11 iif ap0 to 192.0.2.2 blackhole");
            let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
            let more = ["--stream-listen", "192.0.2.2:0"];
            let proxy = ProxyProcess::start(&place, "192.0.2.2:0", &more).await;
            (origin.url("/object"), proxy, udp)
        });
        wifi_on("198.51.100.7");
        let arguments = ["get", "--json", "-o", "out", &url, "--prox", &proxy.address];
        let mut command = cedos(home.path(), &arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("start cedos");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut all = Vec::new();
        let told = async {
            while let Some(line) = lines.next_line().await.expect("its output") {
                if line.contains("neither over UDP nor over TCP") {
                    return Some(line);
                }
                all.push(line);
            }
            None
        };
        let told = tokio::time::timeout(PATIENCE, told).await.ok().flatten();
        let told = told.unwrap_or_else(|| panic!("it does not say it: {all:#?}"));
        let event: serde_json::Value = serde_json::from_str(&told).expect("a line of JSON");
        let why = event["why"].as_str().unwrap_or_default();
        assert!(why.contains("wlan0 "), "{told}");
        assert_eq!(event["reason"], "network_blocked");
        child.kill().await.expect("it ends");
    });
}

/// The part of a server's configuration that docs/proxy.md shows in a block of this language.
fn documented(language: &str) -> String {
    let page = include_str!("../../../../docs/proxy.md");
    let begin = format!("```{language}\n");
    let blocks = page.split(&begin).skip(1);
    let mut blocks = blocks.filter_map(|rest| Some(rest.split_once("```")?.0));
    let of_streams = blocks.find(|block| block.contains("/d2tp"));
    of_streams
        .unwrap_or_else(|| panic!("docs/proxy.md has no block for {language}"))
        .to_owned()
}

/// Downloads through a web server at port 443 that passes streams on to D2Prox, which listens at `streams`.
/// `start` starts the server in a folder that has its certificate.
fn a_download_comes_through(
    test: String,
    program: &str,
    streams: &'static str,
    start: fn(&Path) -> Command,
) {
    // Not every one of them knows `-v`.
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .stdout(Stdio::null())
        .status();
    if !found.is_ok_and(|status| status.success()) {
        return eprintln!("skipped: {program} is not installed");
    }
    in_namespace(test, move || async move {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (url, proxy, _udp, mut server) = origin_namespace(move || async move {
            let udp = BlockedUdp::on("ap0");
            let origin = ScriptedOrigin::start_at("192.0.2.1", origins).await;
            let more = ["--stream-listen", streams, "--stream-port", "443"];
            let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &more).await;
            let authority = TestAuthority::new();
            let both = format!("{}{}", authority.certificate_pem, authority.key_pem);
            std::fs::write(place.join("server.pem"), &authority.certificate_pem).expect("write");
            std::fs::write(place.join("server.key"), &authority.key_pem).expect("write");
            std::fs::write(place.join("both.pem"), both).expect("write");
            let mut command = start(&place);
            let log = std::fs::File::create(place.join("server.log")).expect("a file");
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log);
            let server = command.spawn().expect("start the server");
            listens("192.0.2.1:443").await;
            (origin.url("/object"), proxy, udp, server)
        });
        // Port 443 is what devices try by themselves.
        assert!(!proxy.address.contains("stream"), "{}", proxy.address);
        wifi_on("198.51.100.7");
        let arguments = ["get", "--json", "-o", "out", &url, "--prox", &proxy.address];
        let run = run(home.path(), &arguments).await;
        let _ = server.kill();
        let _ = server.wait();
        let log = std::fs::read_to_string(home.path().join("server.log")).unwrap_or_default();
        assert_eq!(run.code, 0, "{:#?}\n{}\n{log}", run.events, run.errors);
        let got = std::fs::read(home.path().join("out")).expect("the file");
        assert_eq!(Sha256::digest(got), Sha256::digest(object(OBJECT_BYTES, 1)));
        assert_all_by("wlan0", &run);
    });
}

/// Waits until a TCP port accepts connections.
async fn listens(at: &str) {
    let begun = Instant::now();
    while TcpStream::connect(at).await.is_err() {
        assert!(begun.elapsed() < PATIENCE, "nobody listens at {at}");
        // sleep: nobody tells when another program listens
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn nginx_passes_streams_with_the_documented_location() {
    a_download_comes_through(this_test!(), "nginx", "127.0.0.1:8443", |root| {
        let (dir, location) = (root.display(), documented("nginx"));
        let config = format!(
            "daemon off; master_process off; user root; pid {dir}/pid; error_log {dir}/error.log;
             events {{ worker_connections 64; }}
             http {{
               access_log off;
               client_body_temp_path {dir}/t1; proxy_temp_path {dir}/t2; fastcgi_temp_path {dir}/t3;
               uwsgi_temp_path {dir}/t4; scgi_temp_path {dir}/t5;
               server {{ listen 192.0.2.1:443 ssl; ssl_certificate {dir}/server.pem;
                         ssl_certificate_key {dir}/server.key;
                         {location} }}
             }}"
        );
        std::fs::write(root.join("conf"), config).expect("write");
        let mut command = Command::new("nginx");
        command.arg("-p").arg(root).arg("-c").arg(root.join("conf"));
        command
    });
}

#[test]
fn haproxy_passes_streams_with_the_documented_backend() {
    a_download_comes_through(this_test!(), "haproxy", "127.0.0.1:8443", |root| {
        let (dir, documented) = (root.display(), documented("haproxy"));
        let config = format!(
            "defaults
                 mode http
                 timeout connect 5s
                 timeout client 30s
                 timeout server 30s
             frontend https
                 bind 192.0.2.1:443 ssl crt {dir}/both.pem alpn h2,http/1.1
                 {documented}"
        );
        std::fs::write(root.join("conf"), config).expect("write");
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(root.join("conf"));
        command
    });
}

// Caddy stands in for a CDN: it ends TLS, offers HTTP/2, and reaches D2Prox by HTTP/1.1 over TLS of its own.
#[test]
fn a_reverse_proxy_that_reaches_d2prox_by_tls_passes_streams_as_a_cdn_does() {
    a_download_comes_through(this_test!(), "caddy", "127.0.0.1:8443", |root| {
        let dir = root.display();
        let config = format!(
            "{{\n admin off\n auto_https off\n}}\n
             https://192.0.2.1:443 {{\n
               tls {dir}/server.pem {dir}/server.key\n
               reverse_proxy https://127.0.0.1:8443 {{\n
                 header_up Host d2prox.internal\n
                 transport http {{\n tls_insecure_skip_verify\n versions 1.1\n}}\n
               }}\n
             }}\n"
        );
        std::fs::write(root.join("Caddyfile"), config).expect("write");
        let mut command = Command::new("caddy");
        command.args(["run", "--adapter", "caddyfile", "--config"]);
        command.arg(root.join("Caddyfile")).env("HOME", root);
        command
    });
}
