//! `cedos get` from nginx over HTTPS with a certificate authority of the test's own: ranges,
//! redirects, gzip, errors and trust, by a server nobody here wrote. Passes, saying so, where
//! nginx is not installed.

use std::path::Path;
use std::process::{Child, Command, Output};

use crate::serve::started;
use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::missing_tool::is_installed;
use cedos_lab_rig::origin::{TestAuthority, note};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program;
use cedos_lab_rig::program::ProxyProcess;
use serde_json::Value;
use sha2::{Digest, Sha256};

struct Nginx {
    child: Child,
    directory: tempfile::TempDir,
    tls_port: u16,
    plain_port: u16,
    _ports: [HeldPort; 2],
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn object() -> Vec<u8> {
    (0..2_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

/// An authority and a certificate of it for 127.0.0.1 and localhost, as PEM files.
fn certify(directory: &Path) {
    let authority = TestAuthority::new();
    for (name, text) in [
        ("ca.pem", &authority.pem),
        ("server.pem", &authority.certificate_pem),
        ("server.key", &authority.key_pem),
    ] {
        std::fs::write(directory.join(name), text).expect("write");
    }
}

fn start() -> Option<Nginx> {
    is_installed("nginx").then(|| start_in(tempfile::tempdir().expect("a directory"), ""))
}

/// Starts nginx with more lines for its server over TLS.
fn start_in(directory: tempfile::TempDir, more: &str) -> Nginx {
    let root = directory.path();
    certify(root);
    std::fs::create_dir_all(root.join("www")).expect("create");
    std::fs::write(root.join("www/object"), object()).expect("write");
    std::fs::write(root.join("www/empty"), b"").expect("write");
    std::fs::write(root.join("www/one"), b"1").expect("write");
    std::fs::write(root.join("www/page.html"), "<p>hello</p>\n".repeat(1000)).expect("write");
    let ports = [HeldPort::take(), HeldPort::take()];
    let [tls_port, plain_port] = [ports[0].number(), ports[1].number()];
    let dir = root.display();
    let places = "location /moved { return 302 /object; }
        location /down { return 302 http://127.0.0.1:PLAIN/object; }
        location /cut { alias www/object; limit_rate 1; }"
        .replace("PLAIN", &plain_port.to_string())
        .replace("alias www", &format!("alias {dir}/www"));
    let config = format!(
        "daemon off; master_process off; pid {dir}/pid; error_log {dir}/error.log;
         events {{ worker_connections 64; }}
         http {{
           access_log off; root {dir}/www; gzip on; gzip_types *; gzip_min_length 1;
           client_body_temp_path {dir}/t1; proxy_temp_path {dir}/t2; fastcgi_temp_path {dir}/t3;
           uwsgi_temp_path {dir}/t4; scgi_temp_path {dir}/t5;
           server {{ listen 127.0.0.1:{plain_port}; {places} }}
           server {{ listen 127.0.0.1:{tls_port} ssl; ssl_certificate {dir}/server.pem;
                     ssl_certificate_key {dir}/server.key; {places} {more} }}
         }}"
    );
    std::fs::write(root.join("conf"), config).expect("write");
    let mut command = Command::new("nginx");
    command.arg("-p").arg(root).arg("-c").arg(root.join("conf"));
    // One process only, so that ending it ends everything; and no pipe of ours in its hands.
    let quiet = || std::process::Stdio::null();
    command.stdin(quiet()).stdout(quiet()).stderr(quiet());
    let child = command.spawn().expect("start nginx");
    let nginx = Nginx {
        child,
        directory,
        tls_port,
        plain_port,
        _ports: ports,
    };
    let begun = std::time::Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", nginx.tls_port)).is_err() {
        let log = std::fs::read_to_string(nginx.directory.path().join("error.log"));
        assert!(begun.elapsed() < PATIENCE, "nginx does not listen: {log:?}");
        std::thread::yield_now();
    }
    nginx
}

impl Nginx {
    fn get(&self, path: &str, more: &[&str]) -> (Output, Value) {
        let ca = self.directory.path().join("ca.pem");
        let mut arguments = vec!["--ca", ca.to_str().expect("a path")];
        arguments.extend(more);
        self.get_plainly(
            &format!("https://localhost:{}{path}", self.tls_port),
            &arguments,
        )
    }

    fn get_plainly(&self, url: &str, more: &[&str]) -> (Output, Value) {
        let output = Command::new(program::built("cedos"))
            .current_dir(self.directory.path())
            .args(["get", "--json", "-o", "out", url])
            .args(more)
            .env_remove("CEDOS_PROX")
            .env("CEDOS_AGENT", "none")
            .output()
            .expect("run cedos");
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap_or("null");
        let last = serde_json::from_str(last).expect("JSON");
        (output, last)
    }

    #[track_caller]
    fn assert_gets(&self, path: &str, wanted: &[u8]) {
        let (output, last) = self.get(path, &[]);
        assert_eq!(output.status.code(), Some(0), "{path}: {last}");
        assert_eq!(
            last["sha256"],
            hex::encode(Sha256::digest(wanted)),
            "{path}"
        );
        let bytes = std::fs::read(self.directory.path().join("out")).expect("the file");
        assert!(bytes == wanted, "{path}: other bytes");
    }

    #[track_caller]
    fn assert_fails(&self, (output, last): (Output, Value), code: i32, words: &str) {
        assert_eq!(output.status.code(), Some(code), "{last}");
        assert!(
            last["text"].as_str().expect("a text").contains(words),
            "{last}"
        );
        assert!(!self.directory.path().join("out").exists());
    }
}

#[test]
fn nginx_over_https_serves_every_kind_of_object() {
    let Some(nginx) = start() else { return };
    nginx.assert_gets("/object", &object());
    nginx.assert_gets("/empty", b"");
    nginx.assert_gets("/one", b"1");
    nginx.assert_gets("/moved", &object());
    // gzip is on there for every type; we ask for the object itself.
    nginx.assert_gets("/page.html", "<p>hello</p>\n".repeat(1000).as_bytes());
}

#[test]
fn nginx_continues_a_download_that_was_stopped() {
    let Some(nginx) = start() else { return };
    let url = format!("https://localhost:{}/object", nginx.tls_port);
    // A part as an interrupted run leaves it: nginx's own validator, the first million bytes.
    let (_, first) = nginx.get("/object", &[]);
    assert_eq!(first["exit"], 0);
    let modified = std::fs::metadata(nginx.directory.path().join("www/object"))
        .and_then(|m| m.modified())
        .expect("its time")
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970")
        .as_secs();
    let etag = format!("\"{modified:x}-{:x}\"", object().len());
    std::fs::remove_file(nginx.directory.path().join("out")).expect("remove");
    std::fs::write(
        nginx.directory.path().join("out.part"),
        &object()[..1_000_000],
    )
    .expect("write");
    std::fs::write(
        nginx.directory.path().join("out.part.json"),
        note(&url, &etag, Some(object().len()), 1_000_000),
    )
    .expect("write");
    let (_, last) = nginx.get("/object", &[]);
    assert_eq!(
        last["sha256"],
        hex::encode(Sha256::digest(object())),
        "{last}"
    );
    assert_eq!(last["bytes_by_link"]["lo"], 1_000_000 + 16 * 1024, "{last}");
}

#[test]
fn trust_is_never_assumed_and_errors_name_their_cause() {
    let Some(nginx) = start() else { return };
    let tls = format!("https://localhost:{}", nginx.tls_port);
    let untrusted = nginx.get_plainly(&format!("{tls}/object"), &[]);
    nginx.assert_fails(untrusted, 1, "--ca FILE");
    nginx.assert_fails(nginx.get("/none", &[]), 1, "404 Not Found for /none");
    nginx.assert_fails(nginx.get("/down", &[]), 1, "--allow-downgrade");
    let (output, last) = nginx.get("/down", &["--allow-downgrade"]);
    assert_eq!(output.status.code(), Some(0), "{last}");
    std::fs::remove_file(nginx.directory.path().join("out")).expect("remove");
    // TLS spoken to a port without it.
    let mistaken = nginx.get_plainly(&format!("https://127.0.0.1:{}/", nginx.plain_port), &[]);
    nginx.assert_fails(mistaken, 1, "TLS with 127.0.0.1 failed");
    let late = nginx.get("/cut", &["--within", "1s", "--if-late", "fail"]);
    nginx.assert_fails(late, 10, "the deadline passed");
}

#[tokio::test]
async fn nginx_over_https_serves_a_proxy_and_a_tunnel_alike() {
    let Some(nginx) = start() else { return };
    let home = nginx.directory.path();
    let proxy = ProxyProcess::start(home, "127.0.0.1:0", &["--ca", "ca.pem"]).await;
    let page = "<p>hello</p>\n".repeat(1000);
    for (mode, more) in [
        ("proxy-fetch", &[][..]),
        ("sealed", &["--sealed", "--ca", "ca.pem"]),
    ] {
        for (path, wanted) in [
            ("/object", object()),
            ("/empty", Vec::new()),
            ("/one", b"1".to_vec()),
            ("/moved", object()),
            ("/page.html", page.clone().into_bytes()),
        ] {
            let url = format!("https://localhost:{}{path}", nginx.tls_port);
            let start = ["get", "--json", "-o", "out", &url, "--prox", &proxy.address];
            let run = program::run(home, &[&start[..], more].concat()).await;
            assert_eq!(
                run.code, 0,
                "{mode} {path}: {:#?}\n{}",
                run.events, run.errors
            );
            assert_eq!(run.last()["mode"], mode, "{path}");
            let got = std::fs::read(home.join("out")).expect("the file");
            assert!(got == wanted, "{mode} {path}: other bytes");
        }
        let url = format!("https://localhost:{}/none", nginx.tls_port);
        let start = [
            "get",
            "--json",
            "-o",
            "none",
            &url,
            "--prox",
            &proxy.address,
        ];
        let run = program::run(home, &[&start[..], more].concat()).await;
        run.ends_with(1, "404 Not Found");
    }
}

#[tokio::test]
async fn what_a_slow_nginx_sends_comes_by_d2tp_from_the_same_directory_once_it_has_said_so() {
    if !is_installed("nginx") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (home, www) = (directory.path().to_owned(), directory.path().join("www"));
    std::fs::create_dir(&www).expect("create");
    let shown = www.display().to_string();
    let serve = [
        "serve",
        &shown,
        "--listen",
        "127.0.0.1:0",
        "--allow-any-client",
    ];
    let serve = [&serve[..], &["--etags", "nginx"]].concat();
    let (_serving, address) = started(&home.join("d2tp"), &serve).await;
    let address = address.trim_start_matches("d2tp://").trim_matches('/');
    let (at, key) = address.split_once('/').expect("an address and a key");
    // Two million bytes take it 20 s.
    let more = format!(
        "limit_rate 100k; access_log {}/asked; add_header Alt-Svc 'd2tp=\"{at}\"; key=\"{key}\"';",
        home.display()
    );
    let nginx = start_in(directory, &more);
    let (url, begun) = (
        format!("https://localhost:{}/object", nginx.tls_port),
        std::time::Instant::now(),
    );
    let get = [
        "get",
        "--json",
        "--policy",
        "free-only",
        "--ca",
        "ca.pem",
        "-o",
        "out",
        &url,
    ];
    let got = program::run(&home, &get).await;
    assert_eq!(got.code, 0, "{:#?}", got.events);
    let took = begun.elapsed();
    assert!(took.as_secs() < 15, "{took:?}, {:#?}", got.events);
    let notes: Vec<&str> = got
        .events
        .iter()
        .filter_map(|event| event["text"].as_str())
        .collect();
    assert!(
        notes.iter().any(|text| text.contains("that way")),
        "{notes:?}"
    );
    assert!(std::fs::read(home.join("out")).expect("the file") == object());
    let asked = std::fs::read_to_string(home.join("asked")).expect("a log");
    assert!(asked.lines().count() <= 1, "{asked}");
}
