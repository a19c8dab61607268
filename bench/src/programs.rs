//! `cedos-bench programs`: how long downloads and unmodified programs take by Cedos, beside `curl` over TLS.
//!
//! ```text
//!  device's namespace ──────────── veth, MTU 1500 ─────────── server's namespace
//!  curl https:// ─────────────────────────────────────────▶ nginx, TLS
//!  curl https:// ══ TLS ══▶ haproxy ──────────────────────▶ nginx, plain HTTP on the same machine
//!  cedos get, cedos run -- curl ═══ D2TP ══▶ cedos prox ──▶ nginx, plain HTTP on the same machine
//! ```
//!
//! All ways encrypt what crosses the veth pair, once. HAProxy, where it is installed, shows what any proxy in between costs.
//! Everything shares this machine's cores.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cedos_lab_scenario::TextTable;
use cedos_terminal::{print_stderr, print_stdout};
use serde::Serialize;

use crate::hostile::find_program;
use crate::median::median;
use crate::network::{self, BenchNetwork, BenchNetworkKind};
use crate::placement::ProcessPlacement;

/// How long nginx may take until it listens.
const START_WITHIN: Duration = Duration::from_secs(10);
/// How long HAProxy may take; without an answer it counts as not installed.
const HAPROXY_WITHIN: Duration = Duration::from_secs(2);
/// The bytes of an object of the cases with many requests.
const SMALL_BYTES: usize = 1_000;
/// The bytes of an object of the case with many connections.
const MIDDLE_BYTES: usize = 100_000;
/// The port of HAProxy at the server.
const HAPROXY_PORT: u16 = 8443;
/// What is appended to PATH: where Debian has nginx.
const SBIN: &str = "/usr/sbin";

/// Options of `bench programs`.
#[derive(clap::Args)]
pub struct ProgramsOptions {
    /// Bytes of the large object
    #[arg(long, default_value_t = 1_000_000_000)]
    bytes: u64,
    /// Requests that one program sends one after the other, each for 1,000 bytes
    #[arg(long, default_value_t = 1_000)]
    requests: u32,
    /// Connections that one program has at once, each for 100,000 bytes
    #[arg(long, default_value_t = 200)]
    connections: u32,
    /// How often each is measured, in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// The directory for objects and what is downloaded [default: a temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// One JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
}

/// How a program reaches nginx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerWay {
    /// By TLS.
    Tls,
    /// By TLS that HAProxy ends.
    HaProxy,
    /// By plain HTTP, as D2Prox does.
    Plain,
}

impl ServerWay {
    const ALL: [ServerWay; 3] = [ServerWay::Tls, ServerWay::HaProxy, ServerWay::Plain];

    /// The beginning of URLs.
    fn url(self, host: &str) -> String {
        match self {
            ServerWay::Tls => format!("https://{host}"),
            ServerWay::HaProxy => format!("https://{host}:{HAPROXY_PORT}"),
            ServerWay::Plain => format!("http://{host}"),
        }
    }

    /// The name in files with lists of URLs.
    fn name(self) -> &'static str {
        match self {
            ServerWay::Tls => "tls",
            ServerWay::HaProxy => "haproxy",
            ServerWay::Plain => "plain",
        }
    }
}

/// What is measured, each by `curl` over TLS and by Cedos.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum ProgramsCase {
    /// A large object into a file, with its digest: `cedos get`.
    Download,
    /// A large object into a file: a program under `cedos run`.
    Program,
    /// Small requests, one after the other over one connection: a program under `cedos run`.
    Requests,
    /// Connections at once: a program under `cedos run`.
    Connections,
}

impl ProgramsCase {
    const ALL: [ProgramsCase; 4] = [
        ProgramsCase::Download,
        ProgramsCase::Program,
        ProgramsCase::Requests,
        ProgramsCase::Connections,
    ];

    /// The name in tables.
    fn name(self) -> &'static str {
        match self {
            ProgramsCase::Download => "cedos get",
            ProgramsCase::Program => "run -- curl",
            ProgramsCase::Requests => "run, requests",
            ProgramsCase::Connections => "run, connections",
        }
    }

    /// The most times what `curl` over TLS takes; none is set for many connections.
    fn mark(self) -> Option<f64> {
        match self {
            ProgramsCase::Download | ProgramsCase::Requests => Some(1.2),
            ProgramsCase::Program => Some(1.3),
            ProgramsCase::Connections => None,
        }
    }
}

/// The medians of one case.
#[derive(Debug, Serialize)]
struct ProgramsRow {
    case: ProgramsCase,
    /// Seconds by `curl` over TLS.
    curl_s: f64,
    /// Seconds by `curl` over TLS to HAProxy; none where it is not installed.
    haproxy_s: Option<f64>,
    /// Seconds by Cedos.
    cedos_s: f64,
    /// What Cedos takes over what `curl` over TLS takes.
    times: f64,
    /// The most that it should be.
    mark: Option<f64>,
}

/// The results of `bench programs`.
#[derive(Debug, Serialize)]
struct ProgramsRows {
    bytes: u64,
    requests: u32,
    connections: u32,
    rounds: usize,
    rows: Vec<ProgramsRow>,
}

/// Measures and prints.
///
/// # Errors
/// A program is missing or fails, or the network cannot be made.
pub fn run(options: &ProgramsOptions) -> Result<()> {
    ensure!(options.rounds > 0, "no round: --rounds N");
    network::enter_user_namespace()?;
    let temporary = tempfile::tempdir()?;
    let dir = options.dir.as_deref().unwrap_or(temporary.path());
    let setup = ProgramsSetup::start(options, dir)?;
    let mut rows = Vec::new();
    for case in ProgramsCase::ALL {
        let (mut curl, mut haproxy, mut cedos) = (Vec::new(), Vec::new(), Vec::new());
        // The first of each fills caches of files and names, and is not counted.
        for round in 0..=options.rounds {
            let direct = setup.curl(case, ServerWay::Tls)?;
            let proxied = match setup.has_haproxy {
                true => Some(setup.curl(case, ServerWay::HaProxy)?),
                false => None,
            };
            let ours = setup.cedos(case)?;
            let said = proxied.map_or("-".to_owned(), |s| format!("{s:.3}"));
            print_stderr(&format!(
                "{}: {direct:.3} s, {said} s, {ours:.3} s",
                case.name()
            ));
            if round > 0 {
                curl.push(direct);
                haproxy.extend(proxied);
                cedos.push(ours);
            }
        }
        let (curl_s, cedos_s) = (median(curl.into_iter()), median(cedos.into_iter()));
        rows.push(ProgramsRow {
            case,
            curl_s,
            haproxy_s: (!haproxy.is_empty()).then(|| median(haproxy.into_iter())),
            cedos_s,
            times: cedos_s / curl_s,
            mark: case.mark(),
        });
    }
    let all = ProgramsRows {
        bytes: options.bytes,
        requests: options.requests,
        connections: options.connections,
        rounds: options.rounds,
        rows,
    };
    match options.json {
        true => print_stdout(&serde_json::to_string(&all)?),
        false => print_stdout(&table(&all)),
    }
    Ok(())
}

fn table(all: &ProgramsRows) -> String {
    let mut table = TextTable::new([
        "",
        "curl, TLS: s",
        "by HAProxy: s",
        "Cedos: s",
        "times",
        "mark",
    ]);
    for row in &all.rows {
        table.row([
            row.case.name().to_owned(),
            format!("{:.3}", row.curl_s),
            row.haproxy_s.map_or("-".to_owned(), |s| format!("{s:.3}")),
            format!("{:.3}", row.cedos_s),
            format!("{:.2}", row.times),
            row.mark.map_or("-".to_owned(), |mark| format!("{mark:.1}")),
        ]);
    }
    table.to_text()
}

/// Both namespaces, nginx and the proxy, which end when this is dropped.
struct ProgramsSetup {
    network: BenchNetwork,
    dir: PathBuf,
    cedos: PathBuf,
    proxy: String,
    /// The address of nginx.
    host: String,
    digest: String,
    requests: u32,
    connections: u32,
    has_haproxy: bool,
    servers: Vec<Child>,
}

impl ProgramsSetup {
    fn start(options: &ProgramsOptions, dir: &Path) -> Result<ProgramsSetup> {
        let network = BenchNetwork::make(BenchNetworkKind::Veth1500)?;
        let mut setup = ProgramsSetup {
            host: network.receiver_address().to_string(),
            network,
            dir: dir.to_owned(),
            cedos: find_program(options.cedos.as_ref())?,
            proxy: String::new(),
            digest: String::new(),
            requests: options.requests,
            connections: options.connections,
            has_haproxy: false,
            servers: Vec::new(),
        };
        setup.write_objects(options.bytes)?;
        setup.start_nginx()?;
        setup.start_haproxy()?;
        setup.start_proxy()?;
        Ok(setup)
    }

    fn write_objects(&mut self, bytes: u64) -> Result<()> {
        let www = self.dir.join("www");
        std::fs::create_dir_all(&www)?;
        std::fs::write(www.join("small"), vec![7; SMALL_BYTES])?;
        std::fs::write(www.join("middle"), vec![7; MIDDLE_BYTES])?;
        let made =
            format!("head -c {bytes} /dev/urandom | tee www/large | sha256sum | cut -d ' ' -f 1");
        let output = Command::new("sh")
            .args(["-c", &made])
            .current_dir(&self.dir)
            .output()?;
        ensure!(output.status.success(), "no room for {bytes} bytes");
        self.digest = String::from_utf8(output.stdout)?.trim().to_owned();
        let urls = |path: &str, number: u32, server: &str| -> String {
            let line = format!("url = \"{server}/{path}\"\noutput = \"/dev/null\"\n");
            line.repeat(number as usize)
        };
        for way in ServerWay::ALL {
            let server = way.url(&self.host);
            let lists = [
                ("small", urls("small", self.requests, &server)),
                ("middle", urls("middle", self.connections, &server)),
            ];
            for (what, list) in lists {
                let name = format!("{what}-{}.txt", way.name());
                std::fs::write(self.dir.join(name), list)?;
            }
        }
        Ok(())
    }

    fn start_nginx(&mut self) -> Result<()> {
        let key = rcgen::KeyPair::generate()?;
        let params = rcgen::CertificateParams::new([self.host.clone()])?;
        let certificate = params.self_signed(&key)?;
        std::fs::write(self.dir.join("cert.pem"), certificate.pem())?;
        std::fs::write(self.dir.join("key.pem"), key.serialize_pem())?;
        let dir = self.dir.display();
        let host = &self.host;
        let config = format!(
            "daemon off; master_process off; pid {dir}/nginx.pid; error_log {dir}/error.log;
             user root;
             events {{ worker_connections 2048; }}
             http {{
               access_log off; sendfile on; tcp_nodelay on; keepalive_requests 100000;
               client_body_temp_path {dir}/t1; proxy_temp_path {dir}/t2; fastcgi_temp_path {dir}/t3;
               uwsgi_temp_path {dir}/t4; scgi_temp_path {dir}/t5;
               server {{ listen {host}:80; root {dir}/www; }}
               server {{ listen {host}:443 ssl; root {dir}/www;
                         ssl_certificate {dir}/cert.pem; ssl_certificate_key {dir}/key.pem; }}
             }}\n"
        );
        let file = self.dir.join("nginx.conf");
        std::fs::write(&file, config)?;
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("env");
        command.arg(format!("PATH={path}:{SBIN}"));
        command.arg("nginx").arg("-c").arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::from(std::fs::File::create(
            self.dir.join("nginx.err"),
        )?));
        let nginx = self.network.start_receiver(command)?;
        self.servers.push(nginx);
        if !self.serves_within(ServerWay::Tls, START_WITHIN)? {
            let said = std::fs::read_to_string(self.dir.join("nginx.err"))?;
            bail!(
                "nginx does not serve (nginx and curl are needed): {}",
                said.trim()
            );
        }
        Ok(())
    }

    /// Starts HAProxy; it is not needed.
    fn start_haproxy(&mut self) -> Result<()> {
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name));
        let both = read("cert.pem")? + &read("key.pem")?;
        std::fs::write(self.dir.join("haproxy.pem"), both)?;
        let (dir, host) = (self.dir.display(), &self.host);
        let config = format!(
            "global\n  maxconn 2000\n\
             defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n\
             listen tls\n  bind {host}:{HAPROXY_PORT} ssl crt {dir}/haproxy.pem\n  server nginx {host}:80\n"
        );
        let file = self.dir.join("haproxy.cfg");
        std::fs::write(&file, config)?;
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("env");
        command.arg(format!("PATH={path}:{SBIN}"));
        command.args(["haproxy", "-db", "-f"]).arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null());
        let haproxy = self.network.start_receiver(command)?;
        self.servers.push(haproxy);
        self.has_haproxy = self.serves_within(ServerWay::HaProxy, HAPROXY_WITHIN)?;
        Ok(())
    }

    /// Waits until there is an answer by this way; returns whether there was one in time.
    fn serves_within(&self, way: ServerWay, limit: Duration) -> Result<bool> {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            let mut probe = self.curl_command();
            let url = format!("{}/small", way.url(&self.host));
            probe.args(["-s", "-o", "/dev/null", &url]);
            if self.network.start_sender(probe)?.wait()?.success() {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(false)
    }

    fn start_proxy(&mut self) -> Result<()> {
        let mut command = Command::new(&self.cedos);
        command
            .args(["prox", "--allow-any-client", "--allow-private"])
            .args(["--listen", &format!("{}:4433", self.host), "--state-dir"])
            .arg(self.dir.join("proxy"))
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut proxy = self.network.start_receiver(command)?;
        let stdout = proxy.stdout.take().context("its output is piped")?;
        self.servers.push(proxy);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(!line.is_empty(), "the proxy ended; its error is above");
        self.proxy = line.trim().to_owned();
        Ok(())
    }

    fn curl_command(&self) -> Command {
        let mut command = Command::new("curl");
        command.arg("--cacert").arg(self.dir.join("cert.pem"));
        command
    }

    /// The seconds of a case by `curl` over TLS.
    fn curl(&self, case: ProgramsCase, way: ServerWay) -> Result<f64> {
        let url = format!("{}/large", way.url(&self.host));
        let command = match case {
            ProgramsCase::Download => {
                let mut command = Command::new("sh");
                command.args([
                    "-c",
                    "curl -fsS --cacert cert.pem \"$0\" | tee out | sha256sum -c sum",
                ]);
                std::fs::write(self.dir.join("sum"), format!("{}  -\n", self.digest))?;
                command.arg(&url).stdout(Stdio::null());
                command
            }
            _ => {
                let mut command = self.curl_command();
                self.transfer(&mut command, case, &url, way);
                command
            }
        };
        self.time(command)
    }

    /// The seconds of a case by Cedos.
    fn cedos(&self, case: ProgramsCase) -> Result<f64> {
        let way = ServerWay::Plain;
        let url = format!("{}/large", way.url(&self.host));
        let mut command = Command::new(&self.cedos);
        match case {
            ProgramsCase::Download => {
                command.args(["get", &url, "-o", "out", "--prox", &self.proxy]);
                command.args(["--integrity", &format!("sha256:{}", self.digest)]);
            }
            _ => {
                command.args(["run", "--prox", &self.proxy, "--", "curl"]);
                self.transfer(&mut command, case, &url, way);
            }
        }
        command
            .env("HOME", &self.dir)
            .env("CEDOS_AGENT", "none")
            .env("RUST_LOG", "error");
        self.time(command)
    }

    /// Adds what `curl` is to transfer.
    fn transfer(&self, curl: &mut Command, case: ProgramsCase, url: &str, way: ServerWay) {
        let way = way.name();
        curl.args(["-fsS", "--no-progress-meter"]);
        match case {
            ProgramsCase::Download | ProgramsCase::Program => {
                curl.args(["-o", "out", url]);
            }
            ProgramsCase::Requests => {
                curl.args(["--config", &format!("small-{way}.txt")]);
            }
            ProgramsCase::Connections => {
                let all = self.connections.to_string();
                curl.args(["--parallel", "--parallel-immediate", "--parallel-max", &all]);
                curl.args(["--config", &format!("middle-{way}.txt")]);
            }
        }
    }

    fn time(&self, mut command: Command) -> Result<f64> {
        let out = self.dir.join("out");
        if out.exists() {
            std::fs::remove_file(&out)?;
        }
        command
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let begun = Instant::now();
        let status = self.network.start_sender(command)?.wait()?;
        let took = begun.elapsed();
        ensure!(status.success(), "a program ended with {status}");
        Ok(took.as_secs_f64())
    }
}

impl Drop for ProgramsSetup {
    fn drop(&mut self) {
        for server in &mut self.servers {
            // Both fail only if the process has ended already.
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
