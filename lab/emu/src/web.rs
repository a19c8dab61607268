//! The origin's web server: nginx if it is installed, otherwise the built-in one, each over HTTP
//! and over HTTPS with a certificate of an authority created for this run.
//!
//! ```text
//!            ┌ nginx :80 :443 ── /bytes/N of the scenario's flows: files
//!  origin ───┤                ── PUT /upload/NAME: files, if it has its DAV module
//!            │                └─ anything else ─▶ built-in server on 127.0.0.1
//!            └ or the built-in server on :80 and :443 itself
//! ```

use crate::content;
use crate::namespace::Namespace;
use crate::origin::{ObjectRequests, OriginServer, ServedFeeds, Tls, UploadCounts};
use crate::plan;
pub use crate::plan::ORIGIN_NAME;
use anyhow::{Context, bail};
use cedos_lab_scenario::{Direction, OriginKind, Scenario};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::fs;
use std::io::{BufWriter, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The port of the built-in server behind nginx.
const BEHIND_PORT: u16 = 8080;
/// The most bytes of objects that are written as files for nginx; others are generated.
const FILES_BYTES_MAX: u64 = 1 << 30;
/// How long nginx may take to start listening.
const START: Duration = Duration::from_secs(20);
/// The interval at which that is checked.
const LOOK: Duration = Duration::from_millis(10);
/// The folder of web servers that is not in ordinary users' paths. // Debian
const SBIN: &str = "/usr/sbin";

/// The origin's web server.
#[derive(Debug)]
pub struct OriginWebServer {
    /// The name of the server program.
    pub what: String,
    /// The certificate of the authority to trust, PEM.
    pub ca: PathBuf,
    /// The folder of uploads, if they become files.
    uploads: Option<PathBuf>,
    received: UploadCounts,
    requests: ObjectRequests,
    feeds: ServedFeeds,
    nginx: Option<Child>,
}

impl OriginWebServer {
    /// The feeds that the origin serves.
    pub fn feeds(&self) -> &ServedFeeds {
        &self.feeds
    }

    /// The file of an upload to `/upload/NAME`; `None` if the server keeps none.
    pub fn upload(&self, name: &str) -> Option<PathBuf> {
        self.uploads.as_ref().map(|folder| folder.join(name))
    }

    /// Bytes of the upload to `/upload/NAME` that have arrived; `None` behind nginx, which receives
    /// an upload completely before others can see it.
    pub fn upload_arrived(&self, name: &str) -> Option<u64> {
        self.nginx.is_none().then(|| self.received.arrived(name))
    }

    /// The number of requests that began at a byte of an object at which an earlier one had begun; `None` behind
    /// nginx, which serves files without the built-in server.
    pub fn requests_twice(&self) -> Option<u64> {
        self.nginx.is_none().then(|| self.requests.twice())
    }

    /// The objects for which requests began twice at the same byte, with those bytes in order.
    pub fn repeated_requests(&self) -> Vec<(String, Vec<u64>)> {
        self.requests.repeated()
    }
}

impl Drop for OriginWebServer {
    fn drop(&mut self) {
        if let Some(nginx) = &mut self.nginx {
            let _ = nginx.kill();
            let _ = nginx.wait();
        }
    }
}

/// Creates an authority and a certificate, and chooses the server. The caller starts the built-in
/// server, then [`OriginWebServer::listen`] starts nginx.
pub(crate) fn prepare(
    scenario: &Scenario,
    folder: &Path,
) -> anyhow::Result<(OriginWebServer, OriginServer)> {
    let tls = certify(folder)?;
    let ca = folder.join("ca.pem");
    let nginx = match scenario.origin {
        OriginKind::Builtin => None,
        OriginKind::Auto => Nginx::find(),
        OriginKind::Nginx => Some(Nginx::find().context(
            "the scenario wants nginx, which is neither in PATH nor in /usr/sbin; install it, or \
             say origin = \"auto\"",
        )?),
    };
    let feeds = ServedFeeds::default();
    let server = OriginServer {
        feeds: feeds.clone(),
        portal: Some(SocketAddr::new(plan::ORIGIN_V4.into(), plan::PORTAL_PORT)),
        http_proxy: scenario
            .has_http_proxy()
            .then(|| SocketAddr::new(plan::ORIGIN_V4.into(), plan::HTTP_PROXY_PORT)),
        seed: scenario.seed,
        ..OriginServer::default()
    };
    let Some(nginx) = nginx else {
        let web = OriginWebServer {
            what: "the built-in server".to_owned(),
            ca,
            uploads: None,
            received: UploadCounts::default(),
            requests: ObjectRequests::default(),
            feeds,
            nginx: None,
        };
        let at = |port| {
            vec![
                SocketAddr::new(plan::ORIGIN_V4.into(), port),
                SocketAddr::new(plan::ORIGIN_V6.into(), port),
            ]
        };
        let builtin = OriginServer {
            plain: at(80),
            tls: Some(Tls {
                addresses: at(443),
                ..tls
            }),
            received: web.received.clone(),
            requests: web.requests.clone(),
            ..server
        };
        return Ok((web, builtin));
    };
    let uploads = nginx.write(scenario, folder)?;
    let kept = if uploads.is_some() {
        "keeps uploads itself"
    } else {
        "has no DAV module, so the built-in server takes uploads"
    };
    let web = OriginWebServer {
        what: format!("{} ({kept})", nginx.version),
        ca,
        uploads,
        received: UploadCounts::default(),
        requests: ObjectRequests::default(),
        feeds,
        nginx: None,
    };
    let behind = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), BEHIND_PORT);
    let builtin = OriginServer {
        plain: vec![behind],
        ..server
    };
    Ok((web, builtin))
}

impl OriginWebServer {
    /// Starts nginx, if it is used, and waits until it listens.
    pub(crate) fn listen(&mut self, origin: &Namespace, folder: &Path) -> anyhow::Result<()> {
        let conf = folder.join("nginx.conf");
        if !conf.exists() {
            return Ok(());
        }
        let program = Nginx::find().context("nginx is gone")?.program;
        let mut command = Command::new(program);
        command.arg("-p").arg(folder).arg("-c").arg(&conf);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::from(fs::File::create(folder.join("nginx.err"))?));
        let mut child = origin.spawn(command)?;
        let mut left = START;
        let probe = SocketAddr::new(plan::ORIGIN_V4.into(), 443);
        while origin
            .run(move |_| std::net::TcpStream::connect(probe))?
            .is_err()
        {
            if left.is_zero() || child.try_wait()?.is_some() {
                let _ = child.kill();
                let _ = child.wait();
                let said = ["nginx.err", "error.log"]
                    .map(|name| fs::read_to_string(folder.join(name)).unwrap_or_default());
                bail!("nginx does not listen: {}", said.concat().trim());
            }
            std::thread::sleep(LOOK);
            left = left.saturating_sub(LOOK);
        }
        self.nginx = Some(child);
        Ok(())
    }
}

/// An installed nginx.
struct Nginx {
    program: PathBuf,
    version: String,
    dav: bool,
}

impl Nginx {
    fn find() -> Option<Nginx> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = std::env::split_paths(&path)
            .chain([PathBuf::from(SBIN)])
            .map(|folder| folder.join("nginx"))
            .find(|program| program.is_file())?;
        let told = Command::new(&program).arg("-V").output().ok()?;
        let told = String::from_utf8_lossy(&told.stderr).into_owned();
        let version = told.lines().next()?.rsplit(' ').next()?.to_owned();
        Some(Nginx {
            program,
            version,
            dav: told.contains("http_dav_module"),
        })
    }

    /// Writes nginx's configuration and files. Returns the folder of uploads.
    fn write(&self, scenario: &Scenario, folder: &Path) -> anyhow::Result<Option<PathBuf>> {
        let www = folder.join("www");
        fs::create_dir_all(www.join("bytes"))?;
        fs::create_dir_all(www.join("upload"))?;
        let mut room = FILES_BYTES_MAX;
        let down = |flow: &&cedos_lab_scenario::ScenarioFlow| flow.direction == Direction::Down;
        for bytes in scenario.flows.iter().filter(down).filter_map(|f| f.bytes) {
            let file = www.join("bytes").join(bytes.to_string());
            if bytes > room || file.exists() {
                continue;
            }
            room -= bytes;
            write_content(&file, scenario.seed, bytes)
                .with_context(|| format!("no room for {bytes} bytes of content"))?;
        }
        let dir = folder.display();
        let upload = if self.dav {
            "dav_methods PUT; create_full_put_path on;"
        } else {
            "proxy_pass http://behind;"
        };
        let serving = format!(
            "root {dir}/www;
             location / {{ proxy_pass http://behind; }}
             location /bytes/ {{ if ($args) {{ return 418; }} error_page 418 = @made;
                                 try_files $uri @made; }}
             location @made {{ proxy_pass http://behind; proxy_buffering off; }}
             location /upload/ {{ {upload} }}"
        );
        // The current user, because there may be no other one.
        let config = format!(
            "user root; daemon off; master_process off; pid {dir}/nginx.pid; error_log {dir}/error.log;
             worker_rlimit_nofile 4096;
             events {{ worker_connections 1024; }}
             http {{
               access_log off; sendfile on; tcp_nodelay on; client_max_body_size 0;
               default_type application/octet-stream;
               client_body_temp_path {dir}/t1; proxy_temp_path {dir}/t2;
               fastcgi_temp_path {dir}/t3; uwsgi_temp_path {dir}/t4; scgi_temp_path {dir}/t5;
               upstream behind {{ server 127.0.0.1:{BEHIND_PORT}; }}
               proxy_http_version 1.1;
               server {{ listen {v4}:80; listen [{v6}]:80; {serving} }}
               server {{ listen {v4}:443 ssl; listen [{v6}]:443 ssl;
                         ssl_certificate {dir}/origin.pem; ssl_certificate_key {dir}/origin.key;
                         {serving} }}
             }}\n",
            v4 = plan::ORIGIN_V4,
            v6 = plan::ORIGIN_V6,
        );
        fs::write(folder.join("nginx.conf"), config)?;
        Ok(self.dav.then(|| www.join("upload")))
    }
}

/// Writes the content of `/bytes/N`.
pub fn write_content(file: &Path, seed: u64, bytes: u64) -> std::io::Result<()> {
    let mut out = BufWriter::new(fs::File::create(file)?);
    let mut piece = vec![0; 1 << 16];
    let mut at = 0;
    while at < bytes {
        let length = piece.len().min((bytes - at) as usize);
        content::fill(seed, at, &mut piece[..length]);
        out.write_all(&piece[..length])?;
        at += length as u64;
    }
    out.flush()
}

/// Creates an authority and its certificate for the origin's name and addresses, as PEM files.
fn certify(folder: &Path) -> anyhow::Result<Tls> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let names = [
        ORIGIN_NAME.to_owned(),
        plan::ORIGIN_V4.to_string(),
        plan::ORIGIN_V6.to_string(),
    ];
    let certificate = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
    fs::write(folder.join("ca.pem"), issuer.pem())?;
    fs::write(folder.join("origin.pem"), certificate.pem())?;
    fs::write(folder.join("origin.key"), key.serialize_pem())?;
    Ok(Tls {
        addresses: Vec::new(),
        certificate: certificate.der().to_vec(),
        key: key.serialize_der(),
    })
}
