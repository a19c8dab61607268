//! The certificate of `--stream-listen` by ACME, from pebble: Let's Encrypt's own authority for tests.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::TestAuthority;
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::ProxyProcess;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The authority, and the DNS server by which it finds every host on this machine.
struct Pebble {
    _authority: Running,
    _names: Running,
    directory: String,
    management: String,
    _ports: [HeldPort; 4],
}

fn is_installed(program: &str) -> bool {
    let mut asked = Command::new(program);
    asked
        .arg("-help")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    asked.status().is_ok()
}

/// The options by which the DNS server listens at this address alone. It is `-dns01` in older versions and `-dnsserver` in
/// newer ones, some of which also open a port for DNS over HTTPS.
fn name_server_options(at: &str) -> Result<Vec<String>> {
    let help = Command::new("pebble-challtestsrv").arg("-help").output()?;
    let help = String::from_utf8_lossy(&help.stderr).into_owned();
    let knows = |option: &str| help.lines().any(|line| line.trim().starts_with(option));
    let listen = match knows("-dnsserver ") {
        true => "-dnsserver",
        false => "-dns01",
    };
    let mut options = vec![listen.to_owned(), at.to_owned()];
    if knows("-doh ") {
        options.extend(["-doh".to_owned(), String::new()]);
    }
    Ok(options)
}

/// Starts pebble, which validates hosts at `tls_port`. Its own certificate is in `folder`.
async fn pebble(folder: &Path, tls_port: u16) -> Result<Pebble> {
    let authority = TestAuthority::new();
    std::fs::write(folder.join("cert.pem"), &authority.certificate_pem)?;
    std::fs::write(folder.join("key.pem"), &authority.key_pem)?;
    std::fs::write(folder.join("ca.pem"), &authority.pem)?;
    let ports = [(); 4].map(|()| HeldPort::take());
    let [listen, management, dns, dns_management] = [0, 1, 2, 3].map(|n| ports[n].number());
    let config = serde_json::json!({ "pebble": {
        "listenAddress": format!("127.0.0.1:{listen}"),
        "managementListenAddress": format!("127.0.0.1:{management}"),
        "certificate": folder.join("cert.pem"),
        "privateKey": folder.join("key.pem"),
        "httpPort": 1, "tlsPort": tls_port, "ocspResponderURL": "", "externalAccountBindingRequired": false,
    }});
    std::fs::write(folder.join("pebble.json"), config.to_string())?;
    let quiet = |command: &mut Command| -> Result<Running> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Running(command.spawn()?))
    };
    let names = quiet(
        Command::new("pebble-challtestsrv")
            .args([
                "-defaultIPv4",
                "127.0.0.1",
                "-defaultIPv6",
                "",
                "-http01",
                "",
                "-https01",
                "",
            ])
            .args(["-tlsalpn01", ""])
            .args(name_server_options(&format!("127.0.0.1:{dns}"))?)
            .args(["-management", &format!("127.0.0.1:{dns_management}")]),
    )?;
    let authority = quiet(
        Command::new("pebble")
            .arg("-config")
            .arg(folder.join("pebble.json"))
            .args(["-dnsserver", &format!("127.0.0.1:{dns}")])
            .env("PEBBLE_VA_NOSLEEP", "1")
            // By chance it would refuse some requests.
            .env("PEBBLE_WFE_NONCEREJECT", "0"),
    )?;
    let begun = Instant::now();
    for port in [listen, dns_management] {
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .await
            .is_err()
        {
            ensure!(begun.elapsed() < PATIENCE, "pebble does not listen");
            // sleep: nobody tells when another program listens
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(Pebble {
        _authority: authority,
        _names: names,
        directory: format!("https://localhost:{listen}/dir"),
        management: format!("localhost:{management}"),
        _ports: ports,
    })
}

/// The root that pebble signs with in this run, from its management port.
async fn signing_root(pebble: &Pebble, folder: &Path) -> Result<CertificateDer<'static>> {
    let mut roots = rustls::RootCertStore::empty();
    for one in CertificateDer::pem_file_iter(folder.join("ca.pem"))? {
        roots.add(one?)?;
    }
    let tls = TlsConnector::from(Arc::new(client(roots)?));
    let tcp = TcpStream::connect(&pebble.management).await?;
    let tls = tls.connect(ServerName::try_from("localhost")?, tcp).await?;
    let io = hyper_util::rt::TokioIo::new(tls);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
    tokio::spawn(connection);
    let ask = http::Request::get("/roots/0").header("host", "localhost");
    let answer = sender
        .send_request(ask.body(http_body_util::Empty::<bytes::Bytes>::new())?)
        .await?;
    let body = http_body_util::BodyExt::collect(answer.into_body())
        .await?
        .to_bytes();
    Ok(CertificateDer::from_pem_slice(&body)?)
}

fn client(roots: rustls::RootCertStore) -> Result<rustls::ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider);
    Ok(config
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

/// The certificate that a listener shows for a name, if it is one that is trusted.
async fn signed(
    name: &'static str,
    at: (Ipv4Addr, u16),
    config: &Arc<rustls::ClientConfig>,
) -> Result<CertificateDer<'static>> {
    let tcp = TcpStream::connect(at).await?;
    let connector = TlsConnector::from(config.clone());
    let tls = connector.connect(ServerName::try_from(name)?, tcp).await?;
    let shown = tls.get_ref().1.peer_certificates();
    let first = shown.and_then(|all| all.first());
    Ok(first.context("a certificate")?.clone().into_owned())
}

/// The certificate, as soon as there is a trusted one.
async fn signed_soon(
    name: &'static str,
    at: (Ipv4Addr, u16),
    config: &Arc<rustls::ClientConfig>,
) -> Result<CertificateDer<'static>> {
    let begun = Instant::now();
    loop {
        match signed(name, at, config).await {
            Ok(shown) => return Ok(shown),
            Err(error) if begun.elapsed() > PATIENCE => return Err(error),
            // sleep: the proxy tells nobody but its log
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

#[tokio::test]
async fn an_authority_validates_a_proxys_streams_and_signs_their_certificate() -> Result<()> {
    if !is_installed("pebble") || !is_installed("pebble-challtestsrv") {
        eprintln!("skipped: pebble is not installed");
        return Ok(());
    }
    let home = tempfile::tempdir()?;
    let port = HeldPort::take();
    let streams = (Ipv4Addr::LOCALHOST, port.number());
    let pebble = pebble(home.path(), streams.1).await?;
    let listen = format!("127.0.0.1:{}", streams.1);
    let more = [
        &[
            "--stream-listen",
            &listen,
            "--state-dir",
            "state",
            "--ca",
            "ca.pem",
        ][..],
        &["--acme", "prox.example", "--acme", "www.prox.example"],
        &[
            "--acme-contact",
            "operator@prox.example",
            "--acme-directory",
            &pebble.directory,
        ],
    ]
    .concat();
    let mut proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &more).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(signing_root(&pebble, home.path()).await?)?;
    let config = Arc::new(client(roots)?);
    // Who trusts the authority trusts the listener, under each name.
    let first = signed_soon("prox.example", streams, &config).await?;
    ensure!(
        signed("www.prox.example", streams, &config).await? == first,
        "another certificate"
    );
    ensure!(
        signed("other.example", streams, &config).await.is_err(),
        "it is not for that"
    );

    // A proxy that starts again uses what it has; the authority need not be there.
    let more: Vec<String> = more.iter().map(|text| (*text).to_owned()).collect();
    drop(pebble);
    proxy.child.kill().await?;
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let _proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &more).await;
    let kept = signed_soon("prox.example", streams, &config).await?;
    ensure!(kept == first, "another certificate");
    for file in ["certificate.pem", "account.json"] {
        let kept = std::fs::metadata(home.path().join("state/acme").join(file))?;
        let mode = std::os::unix::fs::PermissionsExt::mode(&kept.permissions());
        ensure!(mode & 0o077 == 0, "others may read {file}: {mode:o}");
    }
    Ok(())
}
