//! `cedos join LINE`: this device becomes a client of a proxy, and the proxy one of its default ones.

use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use cedos_agent::fetch::proxy::ProxyClient;
use cedos_agent::fetch::session_refusal::{host_and_port, session_end_text};
use cedos_agent::key::{device_key_path, load_device_key};
use cedos_agent::settings::{self, SettingsChange, UserSettings};
use cedos_prox::{Invitation, InvitationError};
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, FlowSettings, LinkUse, ReasonCode, SERVERS_MAX,
    SecretKey, ServerAddress, ServerNodes, SessionEnd, VersionProbeAnswer, probe_version,
};
use d2tp_links::{ClassRules, CostClass, LinkMonitor};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::credentials::hide_arguments;

/// How long the proxy may take in all.
const PATIENCE: Duration = Duration::from_secs(12); // a guess: handshakes are repeated after 0.6, 1.2 and 2 s
/// How long a handshake may take with a host that is known to speak D2TP.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(4); // a guess: three tries on a slow network
/// How long the host may take to say which versions it speaks.
const PROBE_PATIENCE: Duration = Duration::from_secs(8);
/// The most bytes of the proxy's answer.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;
/// The most bytes of the line with an invitation.
const LINE_BYTES_MAX: u64 = 4096;

/// Become a client of a proxy, by the line that `cedos prox invite` printed
///
/// `cedos join -` asks for the line, or reads it from standard input.
///
/// Makes this device's key if there is none, has the proxy enrol it, and makes the proxy the default: from
/// then on, get, put, run, url, play, serve and agent use it without --prox.
///
/// Exit codes: 0 done, 1 the proxy refused or cannot be reached, 2 usage.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// The line, or `-`: read it from standard input, so that nobody sees it on the command line
    line: String,

    /// What the proxy's operator is to call this device, unless the invitation says it [default: this
    /// machine's name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// What the settings are to call the proxy [default: made from its host]
    #[arg(long, value_name = "NAME", value_parser = parse_proxy_name)]
    r#as: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn parse_proxy_name(text: &str) -> Result<String, String> {
    match cedos_agent::settings::schema::is_proxy_name(text) {
        true => Ok(text.to_owned()),
        false => Err("a proxy's name has letters, digits, - and _ only".to_owned()),
    }
}

/// Joins.
///
/// # Errors
/// The proxy refused, cannot be reached, or something cannot be written.
pub async fn run(args: JoinArgs) -> anyhow::Result<ExitCode> {
    // The secret must not be seen in the list of processes.
    hide_arguments(|argument| {
        let secret = argument.find('#')? + 1;
        argument
            .starts_with("d2tp://")
            .then_some(secret..argument.len())
    });
    let invitation = match read_line(&args.line)?.parse::<Invitation>() {
        Ok(invitation) => invitation,
        Err(error) => return Ok(usage(error)),
    };
    // What is wrong with the settings is said before the invitation is used up.
    let settings = UserSettings::load(None)?;
    let key_path = device_key_path()?;
    let is_new_key = !key_path.exists();
    let key = load_device_key(None)?;
    let name = args.name.clone().or_else(machine_name);
    let joined = enrol(&invitation, &key, name.as_deref()).await;
    let known = settings
        .proxy_name(&invitation.proxy.key)
        .map(str::to_owned);
    let (address, added) = match &known {
        None => (invitation.proxy.to_string(), false),
        Some(known) => with_node(&settings, known, &invitation.proxy)?,
    };
    let client = match joined {
        Ok(client) => Some(client),
        // The device was enrolled, and died before it could write down its proxy.
        Err(JoinError::UsedByThisDevice) if known.is_none() => None,
        Err(error) => bail!("{}", error.text(&invitation)),
    };
    let proxy_name = args
        .r#as
        .or(known)
        .unwrap_or_else(|| free_name(&settings, &invitation.proxy));
    let proxies_key = format!("proxies.{proxy_name}");
    let list = with_proxy(&settings, &proxy_name, &invitation.proxy);
    let list_text = list.as_ref().map(|list| list.join(" "));
    let mut changes = vec![SettingsChange::Set(&proxies_key, &address)];
    changes.extend((list_text.as_deref()).map(|text| SettingsChange::Set("proxy.default", text)));
    let path = UserSettings::change(&changes)
    .with_context(|| {
        format!("the proxy has enrolled this device, but the settings cannot be written; use --prox {address}")
    })?;
    report(&Report {
        client,
        proxy: &invitation.proxy,
        address: &address,
        is_added: added,
        proxy_name: &proxy_name,
        key_path: is_new_key.then_some(key_path),
        public_key: key.public().to_string(),
        settings: path,
        list,
        json: args.json,
    });
    if std::env::var_os("CEDOS_PROX").is_some_and(|text| !text.is_empty()) {
        print_stderr(
            "note: CEDOS_PROX is set and wins over the settings; unset it to use this proxy",
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn usage(error: InvitationError) -> ExitCode {
    print_stderr(&format!("cedos join: {error}"));
    ExitCode::from(2)
}

/// The line: the argument, or for `-` what is typed or piped in.
fn read_line(argument: &str) -> anyhow::Result<String> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    if std::io::stdin().is_terminal() {
        let prompt = "Invitation (d2tp://…, not shown): ";
        return rpassword::prompt_password(prompt).context("cannot ask for the invitation");
    }
    let mut line = String::new();
    let input = std::io::stdin().lock();
    let read = std::io::Read::take(input, LINE_BYTES_MAX).read_line(&mut line);
    read.context("cannot read standard input")?;
    Ok(line)
}

/// The name of this machine.
fn machine_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

/// The proxies that commands use, with this one: at the end if it was not there. `None` if the list is full.
fn with_proxy(settings: &UserSettings, name: &str, proxy: &ServerAddress) -> Option<Vec<String>> {
    let mut listed = settings.listed_proxies();
    let is_it = |known: &String| {
        let address = settings.proxy_address(known).ok();
        let address = address.and_then(|text| text.parse::<ServerAddress>().ok());
        known == name || address.is_some_and(|address| address.key == proxy.key)
    };
    if !listed.iter().any(is_it) {
        listed.push(name.to_owned());
    }
    (listed.len() <= SERVERS_MAX).then_some(listed)
}

/// The address of the known proxy with the invitation's node added, and whether it was not there before.
fn with_node(
    settings: &UserSettings,
    known: &str,
    node: &ServerAddress,
) -> anyhow::Result<(String, bool)> {
    let before: ServerAddress = settings.proxy_address(known)?.parse()?;
    let mut all = before.clone();
    match all.add_nodes(node) {
        Ok(()) => Ok((all.to_string(), all.named_nodes() != before.named_nodes())),
        // The records of the name have it, or will.
        Err(_) if before.nodes == ServerNodes::Records => Ok((before.to_string(), false)),
        Err(error) => bail!(error),
    }
}

/// A name for the proxy that the settings do not have yet.
fn free_name(settings: &UserSettings, proxy: &ServerAddress) -> String {
    let taken: BTreeMap<_, _> = settings.proxies();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    // The digits of an address are no name to remember.
    let is_address = proxy.host.parse::<IpAddr>().is_ok();
    let host = if is_address { "" } else { proxy.host.as_str() };
    let name: String = host.chars().map(plain).take(48).collect();
    let name = name.trim_matches('-').to_owned();
    let name = if name.is_empty() {
        "proxy".to_owned()
    } else {
        name
    };
    let numbered = (2..).map(|n| format!("{name}-{n}"));
    let mut names = std::iter::once(name.clone()).chain(numbered);
    let free = names.find(|name| !taken.contains_key(name.as_str()));
    free.expect("there are more numbers than proxies")
}

/// What was done, for people and programs.
struct Report<'a> {
    /// The name under which the proxy enrolled the device; none if it had done so before.
    client: Option<String>,
    proxy: &'a ServerAddress,
    /// The proxy's address in the settings, with all its nodes.
    address: &'a str,
    /// Whether the invitation's node was added to those of a known proxy.
    is_added: bool,
    proxy_name: &'a str,
    /// The file of the key that was made.
    key_path: Option<PathBuf>,
    public_key: String,
    settings: PathBuf,
    /// The proxies that commands use, the preferred one first; `None` if this one has no place among them.
    list: Option<Vec<String>>,
    json: bool,
}

fn report(report: &Report<'_>) {
    if report.json {
        let told = serde_json::json!({
            "proxy": report.proxy.to_string(),
            "address": report.address,
            "node_added": report.is_added,
            "name": report.proxy_name,
            "client": report.client,
            "public_key": report.public_key,
            "key_made": report.key_path,
            "settings": report.settings,
            "default": report.list,
        });
        return print_stdout(&told.to_string());
    }
    if let Some(path) = &report.key_path {
        print_stdout(&format!("Made this device's key: {}", path.display()));
    }
    let server = host_and_port(report.proxy);
    match &report.client {
        Some(client) => print_stdout(&format!(
            "The proxy {server} enrolled this device as {client}"
        )),
        None => print_stdout(&format!(
            "The proxy {server} had enrolled this device already"
        )),
    }
    if report.is_added {
        print_stdout(&format!(
            "{server} is another node of {}, which is {} now; the nearest that answers is used",
            report.proxy_name, report.address
        ));
    }
    let (name, file) = (report.proxy_name, report.settings.display());
    print_stdout(&match report.list.as_deref() {
        None => format!(
            "It is {name} in {file}, and not among the default proxies: {SERVERS_MAX} is the most. \
             --prox {name} uses it"
        ),
        Some([_]) => format!("It is the default now, as {name} in {file}"),
        Some(list) => format!(
            "It is {name} in {file}. The nearest of {} is used, and {} where they are equally near \
             (`cedos config set proxy.default` changes that)",
            list.join(", "),
            list[0]
        ),
    });
    print_stdout("Try it: cedos get URL (--no-prox goes without it)");
}

/// Why a device was not enrolled.
#[derive(Debug)]
enum JoinError {
    /// The invitation was used up, by this very device.
    UsedByThisDevice,
    /// No invitation is open at the proxy.
    NotInviting,
    /// The proxy answered with a refusal, in words.
    Refused(String),
    /// The session ended without an answer that can be read.
    Ended(String),
    /// The session is over, and why.
    Closed(SessionEnd),
    /// A D2TP server is there, and has another key.
    OtherKey,
    /// A D2TP server is there, and speaks other versions.
    OtherVersion,
    /// The port is closed.
    NobodyListens,
    /// The proxy did not answer.
    Silent,
    /// The host's name has no address, or the device no socket.
    Local(String),
}

impl JoinError {
    /// What happened, why, and what to do.
    fn text(&self, invitation: &Invitation) -> String {
        let server = host_and_port(&invitation.proxy);
        let again = "ask its operator for a new one (`cedos prox invite`)";
        match self {
            JoinError::UsedByThisDevice => format!(
                "this invitation was used already, by this device: it is a client of the proxy {server} and \
                 needs no other"
            ),
            JoinError::NotInviting => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let is_past = now.is_ok_and(|now| now.as_secs() >= invitation.secret.expires_s());
                match is_past {
                    true => format!("this invitation of the proxy {server} has expired; {again}"),
                    false => format!(
                        "this invitation of the proxy {server} was used already, by another device, or \
                         its operator took it back; {again}"
                    ),
                }
            }
            JoinError::Refused(text) => format!("the proxy {server} refused: {text}"),
            JoinError::Ended(text) => format!("the proxy {server} ended the session: {text}"),
            JoinError::Closed(end) => session_end_text(end, &format!("the proxy {server}")),
            JoinError::OtherKey => format!(
                "a proxy answers at {server}, but not with the key in the invitation: the line is another \
                 proxy's, or the proxy has a new key; {again}"
            ),
            JoinError::OtherVersion => format!(
                "the proxy at {server} speaks another version of D2TP; update the older one"
            ),
            JoinError::NobodyListens => format!(
                "no proxy listens at {server}; is it running, and is this its address and port?"
            ),
            JoinError::Silent => format!(
                "the proxy {server} cannot be reached: nothing came back within {} s. Is it running, and \
                 does its firewall, and this network, let UDP pass? `cedos doctor` looks closer",
                PATIENCE.as_secs()
            ),
            JoinError::Local(text) => text.clone(),
        }
    }
}

/// Asks the proxy to enrol this device. Returns the name under which it was enrolled.
async fn enrol(
    invitation: &Invitation,
    key: &SecretKey,
    name: Option<&str>,
) -> Result<String, JoinError> {
    let proxy = &invitation.proxy;
    let local = |error: &dyn std::fmt::Display| JoinError::Local(format!("{error}"));
    let address = tokio::net::lookup_host((proxy.host.as_str(), proxy.port)).await;
    let address = match address {
        Ok(mut all) => all.next(),
        Err(cause) => {
            let text = format!(
                "the name {} was not found: {cause}; check the spelling",
                proxy.host
            );
            return Err(JoinError::Local(text));
        }
    };
    let connecting = ReachingDevice::new(proxy, key).await;
    let ReachingDevice { device, _links } =
        connecting.map_err(|error| local(&format!("{error:#}")))?;
    // Its bytes are sent only when the handshake is done, so that they cannot be replayed.
    let settings = FlowSettings {
        within: Some(PATIENCE),
        early: false,
        ..FlowSettings::default()
    };
    let mut flow = device.open(settings).map_err(|error| local(&error))?;
    let asking = async {
        let secret = invitation.secret.to_text();
        let name = name.map(|name| utf8_percent_encode(name, NON_ALPHANUMERIC).to_string());
        let name = name.map_or(String::new(), |name| format!("device-name: {name}\r\n"));
        let host = host_and_port(proxy);
        let head =
            format!("ENROL * HTTP/1.1\r\nhost: {host}\r\ninvitation: {secret}\r\n{name}\r\n");
        flow.write_all(head.as_bytes()).await?;
        flow.shutdown().await?;
        let mut answer = Vec::new();
        (&mut flow)
            .take(ANSWER_BYTES_MAX)
            .read_to_end(&mut answer)
            .await?;
        std::io::Result::Ok(answer)
    };
    let answer = tokio::select! {
        answer = asking => answer,
        why = absence(address) => return Err(why),
        () = tokio::time::sleep(PATIENCE) => return Err(JoinError::Silent),
    };
    let ended = device.ended();
    let result = match (answer, ended) {
        (Ok(answer), _) => read_answer(&answer),
        (Err(_), Some(SessionEnd::Refused(ReasonCode::NotAllowed))) => Err(JoinError::NotInviting),
        (Err(_), Some(SessionEnd::Refused(ReasonCode::LimitReached))) => {
            let text = "too many devices ask at the same time; try again in a minute";
            Err(JoinError::Refused(text.to_owned()))
        }
        (Err(_), Some(SessionEnd::NoCommonVersion)) => Err(JoinError::OtherVersion),
        (Err(error), None) if error.kind() == std::io::ErrorKind::TimedOut => {
            Err(JoinError::Silent)
        }
        (Err(_), Some(end)) => Err(JoinError::Closed(end)),
        (Err(error), None) => Err(JoinError::Ended(error.to_string())),
    };
    device.close().await;
    result
}

/// A device that reaches a proxy by whatever network there is, if need be by a stream where UDP is blocked:
/// for a few packets that the user asked for.
pub(super) struct ReachingDevice {
    pub(super) device: Device,
    /// What the device follows.
    pub(super) _links: LinkMonitor,
}

impl ReachingDevice {
    /// Begins to connect.
    ///
    /// # Errors
    /// The proxy's name has no address, or there are no sockets.
    pub(super) async fn new(
        proxy: &ServerAddress,
        key: &SecretKey,
    ) -> anyhow::Result<ReachingDevice> {
        let options = DeviceOptions {
            server: proxy.clone(),
            key: key.clone(),
            config: EndpointConfig::default(),
        };
        let mut device = Device::new(options).await?;
        let (links, _) = settings::watch(ClassRules::default(), None).await?;
        let client = ProxyClient::new(proxy.clone(), key.clone(), links.subscribe(), None);
        if client.needs_no_link() {
            device.use_default_route()?;
        } else {
            // Some kilobytes: what is metered may carry them, where it is not dear.
            device.follow_links(links.subscribe(), |link| match link.class.class {
                CostClass::Roaming => LinkUse::Off,
                _ => LinkUse::Free,
            });
        }
        Ok(ReachingDevice {
            device,
            _links: links,
        })
    }
}

/// Waits until it is clear that the proxy of the invitation is not there, and says why.
async fn absence(address: Option<SocketAddr>) -> JoinError {
    let Some(address) = address else {
        return std::future::pending().await;
    };
    match probe_version(address, PROBE_PATIENCE).await {
        Ok(VersionProbeAnswer::Answered { .. }) => {
            // A host that has another key drops what is meant for this one (R-HS-6).
            tokio::time::sleep(HANDSHAKE_PATIENCE).await;
            JoinError::OtherKey
        }
        Ok(VersionProbeAnswer::Rejected(_)) => {
            // Where a firewall rejects UDP, a stream may still get through.
            tokio::time::sleep(HANDSHAKE_PATIENCE).await;
            JoinError::NobodyListens
        }
        Ok(VersionProbeAnswer::Silent) | Err(_) => std::future::pending().await,
    }
}

/// Reads the proxy's answer: the client's name, or its refusal.
fn read_answer(answer: &[u8]) -> Result<String, JoinError> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1));
    let client = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.eq_ignore_ascii_case("client-name")).then(|| value.trim())
    });
    match (status, client) {
        (Some("200"), Some(client)) => {
            let name = percent_decode_str(client).decode_utf8_lossy().into_owned();
            Ok(name.chars().filter(|c| !c.is_control()).collect())
        }
        (Some("409"), _) => Err(JoinError::UsedByThisDevice),
        (Some(_), _) => {
            let text: String = body.trim().chars().filter(|c| !c.is_control()).collect();
            Err(JoinError::Refused(text))
        }
        (None, _) => Err(JoinError::Ended("it did not answer".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_prox::InvitationSecret;
    use d2tp_driver::PublicKey;

    fn invitation(expires_s: u64) -> Invitation {
        Invitation {
            proxy: ServerAddress::new("proxy.example", 4433, PublicKey([7; 32])),
            secret: InvitationSecret::generate(expires_s),
        }
    }

    #[test]
    fn answers_are_a_name_or_a_refusal() {
        let ok = b"HTTP/1.1 200 OK\r\nclient-name: my%20laptop\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(read_answer(ok).unwrap(), "my laptop");
        let no = b"HTTP/1.1 410 Gone\r\nx: y\r\n\r\nthis invitation has expired\n";
        let Err(JoinError::Refused(text)) = read_answer(no) else {
            panic!("refused");
        };
        assert_eq!(text, "this invitation has expired");
        let used = b"HTTP/1.1 409 Conflict\r\n\r\nused\n";
        assert!(matches!(
            read_answer(used),
            Err(JoinError::UsedByThisDevice)
        ));
        assert!(matches!(read_answer(b""), Err(JoinError::Ended(_))));
    }

    #[test]
    fn a_proxy_that_invites_nobody_is_told_as_expired_or_used() {
        let past = JoinError::NotInviting.text(&invitation(1_000));
        assert!(past.contains("has expired"), "{past}");
        let open = JoinError::NotInviting.text(&invitation(u64::from(u32::MAX)));
        assert!(open.contains("was used already"), "{open}");
    }

    #[test]
    fn no_sentence_has_the_secret() {
        let invitation = invitation(5);
        let secret = invitation.secret.to_text();
        for error in [
            JoinError::NotInviting,
            JoinError::OtherKey,
            JoinError::Silent,
        ] {
            assert!(!error.text(&invitation).contains(&secret));
        }
    }
}
