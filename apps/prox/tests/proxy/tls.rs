//! Origins over TLS: a test authority, HTTP/2, and a real nginx where one is installed.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use crate::support::*;
use bytes::Bytes;
use cedos_lab_rig::origin::TestAuthority;
use cedos_prox::{Prox, ProxConfig};
use http_body_util::Full;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;

/// A proxy that trusts this authority and no other.
fn prox_that_trusts(authority: &TestAuthority, dir: &Path) -> Arc<Prox> {
    let ca = dir.join("ca.pem");
    std::fs::write(&ca, &authority.pem).unwrap();
    Prox::new(ProxConfig {
        ca_file: Some(ca),
        native_roots: false,
        ..config()
    })
    .unwrap()
}

/// An origin that says which version it was asked in and which authority and path it saw.
async fn origin(authority: &TestAuthority, alpn: &[&[u8]]) -> SocketAddr {
    let acceptor = authority.acceptor(alpn);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(tls) = acceptor.accept(tcp).await else {
                    return;
                };
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = builder
                    .serve_connection(TokioIo::new(tls), service_fn(what_was_seen))
                    .await;
            });
        }
    });
    address
}

async fn what_was_seen(
    request: http::Request<hyper::body::Incoming>,
) -> Result<http::Response<Full<Bytes>>, std::convert::Infallible> {
    let host = request
        .headers()
        .get("host")
        .map(|host| host.to_str().unwrap());
    let authority = request.uri().authority().map(|name| name.as_str());
    let text = format!(
        "{:?} {} {}",
        request.version(),
        host.or(authority).unwrap_or("?"),
        request.uri().path_and_query().unwrap()
    );
    if request.uri().path() == "/never" {
        std::future::pending::<()>().await;
    }
    let mut response = http::Response::new(Full::new(Bytes::from(text)));
    if request.uri().path() == "/down" {
        *response.status_mut() = http::StatusCode::FOUND;
        let location = http::HeaderValue::from_static("http://127.0.0.1:1/");
        response.headers_mut().insert("location", location);
    }
    Ok(response)
}

#[tokio::test]
async fn http2_is_spoken_where_offered_and_http1_where_not() {
    let authority = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let prox = prox_that_trusts(&authority, dir.path());
    for (alpn, version, via) in [
        (&[b"h2".as_slice(), b"http/1.1"][..], "HTTP/2.0", "2 d2prox"),
        (&[b"http/1.1".as_slice()][..], "HTTP/1.1", "1.1 d2prox"),
        (&[][..], "HTTP/1.1", "1.1 d2prox"),
    ] {
        let address = origin(&authority, alpn).await;
        let url = format!("https://localhost:{}/a?b=c", address.port());
        let answer = ask(&prox, get(&url, "")).await.whole();
        let expected = format!("{version} localhost:{} /a?b=c", address.port());
        assert_eq!(String::from_utf8(answer.body.clone()).unwrap(), expected);
        assert_eq!(answer.header("via"), via);
        assert_eq!(answer.header("content-length"), expected.len().to_string());
    }
}

#[tokio::test]
async fn the_window_of_an_http2_connection_is_charged_and_a_client_with_little_room_gets_a_small_one()
 {
    let authority = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let address = origin(&authority, &[b"h2"]).await;
    let url = |path: &str| format!("https://localhost:{}/{path}", address.port());
    let ca = dir.path().join("ca.pem");
    std::fs::write(&ca, &authority.pem).unwrap();
    let whole = 1 << 20;
    for (share, window) in [(16 << 20, whole..2 * whole), (400 << 10, 64 << 10..whole)] {
        let prox = Prox::new(ProxConfig {
            session_memory_bytes_max: 5 * share,
            ca_file: Some(ca.clone()),
            native_roots: false,
            ..config()
        })
        .unwrap();
        let answer = ask(&prox, get(&url("a"), "")).await.whole();
        assert_eq!(answer.status, 200);
        let (serving, mut device) = start(&prox, CLIENT);
        device.send(get(&url("never"), "")).await;
        // The head of the response and TLS count besides.
        until(|| prox.session_memory().used() > window.start + (96 << 10)).await;
        assert!(prox.session_memory().used() < window.end);
        device.crash();
        ended(serving).await;
        assert_eq!(prox.session_memory().used(), 0);
    }
}

#[tokio::test]
async fn an_address_in_a_certificate_counts() {
    let authority = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let address = origin(&authority, &[b"h2"]).await;
    let answer = ask(
        &prox_that_trusts(&authority, dir.path()),
        get(&format!("https://{address}/"), ""),
    )
    .await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn a_certificate_that_does_not_prove_the_name_is_502_and_names_the_cause() {
    let authority = TestAuthority::new();
    let stranger = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let prox = prox_that_trusts(&authority, dir.path());
    let address = origin(&stranger, &[b"h2"]).await;
    let answer = ask(&prox, get(&format!("https://{address}/"), ""))
        .await
        .whole();
    assert_eq!(answer.status, 502);
    assert!(
        answer
            .header("proxy-status")
            .contains("error=tls_certificate_error"),
        "{answer:?}"
    );

    let address = origin(&authority, &[b"h2"]).await;
    let url = format!("https://127.0.0.2:{}/", address.port());
    // 127.0.0.2 is not bound, so ask by a name that leads to the right address.
    let names = Names(vec![("wrong.example", "127.0.0.1".parse().unwrap())]);
    let named = Prox::with_resolver(
        ProxConfig {
            ca_file: Some(dir.path().join("ca.pem")),
            native_roots: false,
            ..config()
        },
        Arc::new(names),
    )
    .unwrap();
    let answer = ask(&named, get(&url.replace("127.0.0.2", "wrong.example"), ""))
        .await
        .whole();
    assert!(
        answer
            .header("proxy-status")
            .contains("error=tls_certificate_error"),
        "{answer:?}"
    );
}

#[tokio::test]
async fn a_server_without_tls_is_502_and_a_redirect_from_https_to_http_too() {
    let authority = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let prox = prox_that_trusts(&authority, dir.path());
    let origin = origin(&authority, &[b"http/1.1"]).await;
    let answer = ask(&prox, get(&format!("https://{origin}/down"), ""))
        .await
        .whole();
    assert_eq!(answer.status, 502);
    assert!(
        answer.header("proxy-status").contains("plain http"),
        "{answer:?}"
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, b"SSH-2.0-x\r\n").await;
        std::future::pending::<()>().await;
    });
    let answer = ask(&prox, get(&format!("https://{address}/"), ""))
        .await
        .whole();
    assert!(
        answer
            .header("proxy-status")
            .contains("error=tls_protocol_error"),
        "{answer:?}"
    );
}

#[test]
fn a_ca_file_that_is_none_is_said_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.pem");
    std::fs::write(&ca, "not PEM").unwrap();
    for ca_file in [Some(ca), Some(dir.path().join("missing.pem")), None] {
        let config = ProxConfig {
            ca_file,
            native_roots: false,
            ..config()
        };
        assert!(Prox::new(config).is_err());
    }
}

/// A running nginx, stopped when dropped.
struct Nginx(std::process::Child);

impl Drop for Nginx {
    fn drop(&mut self) {
        // Without a master process nginx is this one child.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_real_nginx_over_https_and_http2() {
    let Some(binary) = ["/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx"]
        .into_iter()
        .find(|path| Path::new(path).exists())
    else {
        eprintln!("no nginx on this machine: nothing was tested");
        return;
    };
    let authority = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let data = pattern(5_000_000);
    std::fs::create_dir(at("root")).unwrap();
    std::fs::write(at("root/object"), &data).unwrap();
    std::fs::write(at("cert.pem"), &authority.certificate_pem).unwrap();
    std::fs::write(at("key.pem"), &authority.key_pem).unwrap();
    // Bound and let go: nginx cannot be handed a socket. Another program may take the port first;
    // then nginx says so and the test fails by name.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let root = dir.path().display();
    let mut file = std::fs::File::create(at("nginx.conf")).unwrap();
    write!(
        file,
        "daemon off; master_process off; pid {root}/pid; error_log {root}/error.log;\n\
         events {{}}\n\
         http {{ access_log off; client_body_temp_path {root}/1; proxy_temp_path {root}/2;\n\
         fastcgi_temp_path {root}/3; uwsgi_temp_path {root}/4; scgi_temp_path {root}/5;\n\
         server {{ listen 127.0.0.1:{port} ssl http2; ssl_certificate {root}/cert.pem;\n\
         ssl_certificate_key {root}/key.pem; root {root}/root;\n\
         location /moved {{ return 301 /object; }} }} }}\n"
    )
    .unwrap();
    let child = std::process::Command::new(binary)
        .arg("-c")
        .arg(at("nginx.conf"))
        .arg("-e")
        .arg(at("error.log"))
        .spawn()
        .unwrap();
    let _nginx = Nginx(child);
    until(|| std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()).await;

    let prox = prox_that_trusts(&authority, dir.path());
    let url = |path: &str| format!("https://localhost:{port}{path}");
    let answer = ask(&prox, get(&url("/moved"), "")).await.whole();
    assert_eq!((answer.status, answer.header("via")), (200, "2 d2prox"));
    assert!(answer.body == data);
    assert_eq!(answer.header("content-location"), url("/object"));
    let tag = answer.header("etag").to_owned();
    let headers = format!("Range: bytes=4999990-\r\nIf-Range: {tag}\r\n");
    let answer = ask(&prox, get(&url("/object"), &headers)).await.whole();
    assert_eq!(
        (answer.status, answer.header("content-range")),
        (206, "bytes 4999990-4999999/5000000")
    );
    assert!(answer.body == data[4_999_990..]);
    assert_eq!(ask(&prox, get(&url("/none"), "")).await.whole().status, 404);
    let answer = ask(
        &prox,
        get(&url("/object"), &format!("If-None-Match: {tag}\r\n")),
    )
    .await;
    assert_eq!((answer.status, answer.body.len()), (304, 0));
}

/// An origin over HTTP/2 that refuses the second request of its first connection. Returns its address, and the bodies that
/// it has got, each with the number of its connection.
async fn refusing_origin(authority: &TestAuthority) -> (SocketAddr, BodiesByConn) {
    let acceptor = authority.acceptor(&[b"h2"]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bodies = BodiesByConn::default();
    let told = bodies.clone();
    tokio::spawn(async move {
        for conn in 0.. {
            let (tcp, _) = listener.accept().await.unwrap();
            let tls = acceptor.accept(tcp).await.unwrap();
            let mut requests = h2::server::handshake(tls).await.unwrap();
            let told = told.clone();
            tokio::spawn(async move {
                let mut number = 0;
                while let Some(Ok((request, mut respond))) = requests.accept().await {
                    number += 1;
                    if (conn, number) == (0, 2) {
                        respond.send_reset(h2::Reason::REFUSED_STREAM);
                        continue;
                    }
                    let told = told.clone();
                    tokio::spawn(async move {
                        let body = cedos_lab_rig::http2::read_all(&mut request.into_body()).await;
                        told.lock().push((conn, body.unwrap()));
                        let mut answer = http::Response::new(());
                        *answer.status_mut() = http::StatusCode::CREATED;
                        respond.send_response(answer, true).unwrap();
                    });
                }
            });
        }
    });
    (address, bodies)
}

type BodiesByConn = Arc<parking_lot::Mutex<Vec<(usize, Vec<u8>)>>>;

#[tokio::test]
async fn posts_share_a_connection_of_http2_and_one_that_is_refused_there_is_delivered_by_another() {
    let authority = TestAuthority::new();
    let dir = tempfile::tempdir().unwrap();
    let prox = prox_that_trusts(&authority, dir.path());
    let (address, bodies) = refusing_origin(&authority).await;
    let url = format!("https://localhost:{}/a", address.port());
    for body in ["one", "two", "six"] {
        let post = format!("POST {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\n{body}");
        assert_eq!(ask(&prox, post).await.whole().status, 201);
        // sleep: that the connection is kept shows in nothing until it is used
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let expected =
        [(0, b"one"), (1, b"two"), (1, b"six")].map(|(conn, body)| (conn, body.to_vec()));
    assert_eq!(*bodies.lock(), expected);
}
