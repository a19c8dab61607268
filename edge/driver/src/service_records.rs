//! The SVCB records (RFC 9460) of `_d2tp.NAME`, which list the nodes of a server.
//!
//! ```text
//!  _d2tp.example.org. 300 IN SVCB 1 a.example.org. port=4433 ipv4hint=192.0.2.1 key65280=<32 bytes> key65281=<port>
//!                                 │ │                                           │                    └ TCP port of streams
//!                                 │ └ "." is the owner's own name               └ the server's key
//!                                 └ lower first; 0: look at the target's records instead
//! ```
//!
//! Records are hints of addresses and nothing else: the device trusts the key that it has, and a record with
//! another key is not used at all (R-NODE-1). The system's name servers are asked. Answers that can be used are kept as
//! long as they say, five minutes at most, and until links change: another network has other name servers.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use d2tp_session::PublicKey;
use parking_lot::Mutex;
use simple_dns::rdata::{RData, SVCB, SVCParam};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, Question, RCODE, TYPE};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::address::{NODES_MAX, NodeAddress, PORT_DEFAULT};

/// The SVCB parameter (of private use, RFC 9460 §14.3.1) with the server's key, 32 bytes.
pub const SVCB_SERVER_KEY: u16 = 65_280;
/// The SVCB parameter with the TCP port of the node's streams, 2 bytes; 0 means that there are none.
pub const SVCB_STREAM_PORT: u16 = 65_281;

const DNS_PORT: u16 = 53;
/// The system's name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// How many name servers are asked, and how long each has to answer. Then the name's addresses are used.
const SERVERS_MAX: usize = 3; // resolv.conf(5), MAXNS
const SERVER_PATIENCE: Duration = Duration::from_millis(700); // a guess: a question and its repetition
const REPEAT_AFTER: Duration = Duration::from_millis(300);
/// The most aliases that are followed.
const ALIASES_MAX: usize = 4;
/// The longest answer over UDP.
const ANSWER_BYTES_MAX: usize = 4_096;
/// How long answers are kept at most, whatever they say: the name server of one network may be wrong, or lie. Lower:
/// more questions. Higher: nodes that the operator has corrected are found later.
const TTL_MAX: Duration = Duration::from_secs(300); // a guess
/// The maximum time for which the absence of records is remembered.
const NEGATIVE_TTL_MAX: Duration = Duration::from_secs(60); // a guess
/// The most names whose answers are kept.
const NAMES_MAX: usize = 64;

/// A node that a record names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServiceNode {
    pub(crate) name: NodeAddress,
    /// Addresses of the node, if the record has them.
    pub(crate) hints: Vec<IpAddr>,
    /// The TCP port of streams, if the record has one; 0: there are none.
    pub(crate) stream: Option<u16>,
}

/// A record in service mode.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServiceRecord {
    priority: u16,
    node: ServiceNode,
    key: Option<PublicKey>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ServiceRecordSet {
    /// The lowest priority first.
    services: Vec<ServiceRecord>,
    alias: Option<String>,
    ttl: Duration,
}

/// Looks up the nodes of the server `name`. Empty: there are no records, or no name server answered.
///
/// # Errors
/// Every record names another key.
pub(crate) async fn look_up(name: &str, key: &PublicKey) -> io::Result<Vec<ServiceNode>> {
    look_up_at(name, key, &name_servers(), cache()).await
}

/// The system's name servers.
fn name_servers() -> Vec<SocketAddr> {
    let text = std::fs::read(RESOLV_CONF).unwrap_or_default();
    let config = resolv_conf::Config::parse(text).unwrap_or_default();
    let all = config.nameservers.into_iter().map(IpAddr::from);
    let all = all.map(|ip| SocketAddr::new(ip, DNS_PORT));
    all.take(SERVERS_MAX).collect()
}

/// Nodes that are still valid, by the name that was asked and the server's key.
type RecordCache = Mutex<BTreeMap<(String, [u8; 32]), (Instant, Vec<ServiceNode>)>>;

fn cache() -> &'static RecordCache {
    static CACHE: OnceLock<RecordCache> = OnceLock::new();
    CACHE.get_or_init(Mutex::default)
}

/// Forgets all answers, because links have changed: they came from name servers of other networks.
pub(crate) fn forget() {
    cache().lock().clear();
}

async fn look_up_at(
    name: &str,
    key: &PublicKey,
    servers: &[SocketAddr],
    cache: &RecordCache,
) -> io::Result<Vec<ServiceNode>> {
    let now = Instant::now();
    let entry = (name.to_owned(), key.0);
    let known = cache.lock().get(&entry).cloned();
    if let Some((_, nodes)) = known.filter(|(until, _)| *until > now) {
        return Ok(nodes);
    }
    let mut asked = format!("_d2tp.{name}");
    let mut records = ServiceRecordSet::default();
    let mut ttl = TTL_MAX;
    for _ in 0..=ALIASES_MAX {
        records = match records_of(&asked, servers).await {
            Ok(records) => records,
            Err(error) => {
                tracing::info!(name = asked, %error, "no SVCB records; using the name's addresses");
                return Ok(Vec::new());
            }
        };
        ttl = ttl.min(records.ttl);
        match records.alias.take() {
            Some(alias) if records.services.is_empty() => asked = alias,
            _ => break,
        }
    }
    let is_ours = |record: &&ServiceRecord| record.key.is_none_or(|theirs| theirs == *key);
    let ours = records.services.iter().filter(is_ours);
    let ours: Vec<ServiceNode> = ours
        .map(|record| record.node.clone())
        .take(NODES_MAX)
        .collect();
    if ours.is_empty() && !records.services.is_empty() {
        // Not kept: the next session asks again, perhaps on another network.
        return Err(io::Error::other(format!(
            "the records of {asked} name other keys only; the proxy has a new key, or the answer is forged"
        )));
    }
    let mut cache = cache.lock();
    cache.retain(|_, (until, _)| *until > now);
    if cache.len() < NAMES_MAX {
        cache.insert(entry, (now + ttl, ours.clone()));
    }
    Ok(ours)
}

async fn records_of(asked: &str, servers: &[SocketAddr]) -> io::Result<ServiceRecordSet> {
    let mut failure = io::Error::other("no name server is known");
    for server in servers.iter().take(SERVERS_MAX) {
        match timeout(SERVER_PATIENCE, ask(asked, *server)).await {
            Ok(Ok(records)) => return Ok(records),
            Ok(Err(error)) => failure = error,
            Err(_) => {
                failure = io::Error::other(format!("the name server {server} does not answer"))
            }
        }
    }
    Err(failure)
}

/// Asks one name server, over TCP if the answer is too long for UDP.
async fn ask(name: &str, server: SocketAddr) -> io::Result<ServiceRecordSet> {
    let malformed = |error: simple_dns::SimpleDnsError| io::Error::other(error.to_string());
    let mut number = [0; 2];
    getrandom::fill(&mut number).expect("the system has randomness");
    let id = u16::from_be_bytes(number);
    let mut question = Packet::new_query(id);
    question.set_flags(PacketFlag::RECURSION_DESIRED);
    question.questions.push(Question::new(
        Name::new(name).map_err(malformed)?,
        QTYPE::TYPE(TYPE::SVCB),
        CLASS::IN.into(),
        false,
    ));
    let question = question.build_bytes_vec().map_err(malformed)?;
    let local = match server.is_ipv6() {
        true => SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0)),
        false => SocketAddr::from((std::net::Ipv4Addr::UNSPECIFIED, 0)),
    };
    // The system chooses a port at random, and a connected socket hears only the server.
    let socket = UdpSocket::bind(local).await?;
    socket.connect(server).await?;
    let mut answer = vec![0; ANSWER_BYTES_MAX];
    loop {
        socket.send(&question).await?;
        let received = async {
            loop {
                let n = socket.recv(&mut answer).await?;
                if let Some(found) = read(name, id, &answer[..n]) {
                    return io::Result::Ok(found);
                }
            }
        };
        match timeout(REPEAT_AFTER, received).await {
            Err(_) => {}
            Ok(Ok(ServiceAnswer::Truncated)) => break,
            Ok(Ok(ServiceAnswer::Records(records))) => return Ok(records),
            Ok(Ok(ServiceAnswer::Failed(text))) => return Err(io::Error::other(text)),
            Ok(Err(error)) => return Err(error),
        }
    }
    let mut stream = TcpStream::connect(server).await?;
    let len = u16::try_from(question.len()).expect("a short question");
    stream.write_all(&len.to_be_bytes()).await?;
    stream.write_all(&question).await?;
    let len = stream.read_u16().await?;
    let mut answer = vec![0; usize::from(len)];
    stream.read_exact(&mut answer).await?;
    match read(name, id, &answer) {
        Some(ServiceAnswer::Records(records)) => Ok(records),
        Some(ServiceAnswer::Failed(text)) => Err(io::Error::other(text)),
        Some(ServiceAnswer::Truncated) | None => Err(io::Error::other("the answer makes no sense")),
    }
}

enum ServiceAnswer {
    Records(ServiceRecordSet),
    Failed(String),
    Truncated,
}

/// Reads a name server's answer; `None` if it answers something else.
fn read(name: &str, id: u16, answer: &[u8]) -> Option<ServiceAnswer> {
    let answer = Packet::parse(answer).ok()?;
    let question = answer.questions.first()?;
    let is_asked = question.qname.to_string().eq_ignore_ascii_case(name)
        && question.qtype == QTYPE::TYPE(TYPE::SVCB);
    if answer.id() != id || !answer.has_flags(PacketFlag::RESPONSE) || !is_asked {
        return None;
    }
    if answer.has_flags(PacketFlag::TRUNCATION) {
        return Some(ServiceAnswer::Truncated);
    }
    match answer.rcode() {
        RCODE::NoError | RCODE::NameError => {}
        other => {
            return Some(ServiceAnswer::Failed(format!(
                "the name server answers {other:?}"
            )));
        }
    }
    let mut records = ServiceRecordSet::default();
    let mut ttl: Option<u32> = None;
    // CNAMEs lead to the owner of the records, which the answer contains.
    for record in &answer.answers {
        let RData::SVCB(svcb) = &record.rdata else {
            continue;
        };
        ttl = Some(ttl.map_or(record.ttl, |ttl| ttl.min(record.ttl)));
        let target = match svcb.target.to_string() {
            root if root.is_empty() || root == "." => record.name.to_string(),
            target => target,
        };
        match svcb.priority {
            0 => records.alias = Some(target),
            _ => records.services.extend(service(svcb, target)),
        }
    }
    records.services.sort_by_key(|record| record.priority);
    let negative = answer
        .name_servers
        .iter()
        .find_map(|record| match &record.rdata {
            RData::SOA(soa) => Some(record.ttl.min(soa.minimum)),
            _ => None,
        });
    records.ttl = match ttl {
        Some(ttl) => Duration::from_secs(ttl.into()).min(TTL_MAX),
        None => negative
            .map_or(NEGATIVE_TTL_MAX, |ttl| Duration::from_secs(ttl.into()))
            .min(NEGATIVE_TTL_MAX),
    };
    Some(ServiceAnswer::Records(records))
}

/// A record in service mode; `None` if it demands what is not known here, or its key is none.
fn service(svcb: &SVCB<'_>, target: String) -> Option<ServiceRecord> {
    let mut record = ServiceRecord {
        priority: svcb.priority,
        node: ServiceNode {
            name: NodeAddress {
                host: target,
                port: PORT_DEFAULT,
            },
            hints: Vec::new(),
            stream: None,
        },
        key: None,
    };
    for param in svcb.iter_params() {
        match param {
            SVCParam::Port(port) => record.node.name.port = *port,
            SVCParam::Ipv4Hint(all) => {
                let all = all.iter().map(|ip| IpAddr::V4((*ip).into()));
                record
                    .node
                    .hints
                    .extend(all.filter(is_host).take(NODES_MAX));
            }
            SVCParam::Ipv6Hint(all) => {
                let all = all.iter().map(|ip| IpAddr::V6((*ip).into()));
                record
                    .node
                    .hints
                    .extend(all.filter(is_host).take(NODES_MAX));
            }
            SVCParam::Unknown(SVCB_SERVER_KEY, bytes) => {
                record.key = Some(PublicKey(<[u8; 32]>::try_from(&**bytes).ok()?));
            }
            SVCParam::Unknown(SVCB_STREAM_PORT, bytes) => {
                let bytes = <[u8; 2]>::try_from(&**bytes).ok()?;
                record.node.stream = Some(u16::from_be_bytes(bytes));
            }
            SVCParam::Mandatory(keys) => {
                // RFC 9460 §8: what is mandatory and unknown makes the record useless.
                let known = [3, 4, 6, SVCB_SERVER_KEY, SVCB_STREAM_PORT];
                if keys.iter().any(|key| !known.contains(key)) {
                    return None;
                }
            }
            _ => {}
        }
    }
    Some(record)
}

/// Whether an address may be that of one host.
fn is_host(ip: &IpAddr) -> bool {
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    !ip.is_unspecified() && !ip.is_multicast() && !is_broadcast
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use simple_dns::ResourceRecord;
    use simple_dns::rdata::SOA;

    use super::*;

    const KEY: PublicKey = PublicKey([7; 32]);
    const OTHER: PublicKey = PublicKey([9; 32]);

    /// A record of `_d2tp.example.org`.
    fn record(
        priority: u16,
        target: &'static str,
        params: Vec<SVCParam<'static>>,
    ) -> RData<'static> {
        let mut svcb = SVCB::new(priority, Name::new_unchecked(target));
        params.into_iter().for_each(|param| svcb.set_param(param));
        RData::SVCB(svcb)
    }

    fn key_param(key: PublicKey) -> SVCParam<'static> {
        SVCParam::Unknown(SVCB_SERVER_KEY, key.0.to_vec().into())
    }

    /// A name server on loopback that has these records, by owner.
    async fn name_server(
        records: Vec<(&'static str, RData<'static>)>,
    ) -> (SocketAddr, Arc<AtomicUsize>) {
        name_server_with(300, records).await
    }

    /// A name server on loopback that has these records, by owner, for `ttl` seconds.
    async fn name_server_with(
        ttl: u32,
        records: Vec<(&'static str, RData<'static>)>,
    ) -> (SocketAddr, Arc<AtomicUsize>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        tokio::spawn(async move {
            let mut buf = [0; 1500];
            while let Ok((n, from)) = socket.recv_from(&mut buf).await {
                count.fetch_add(1, Ordering::SeqCst);
                let question = Packet::parse(&buf[..n]).unwrap();
                let mut answer = Packet::new_reply(question.id());
                let name = question.questions[0].qname.to_string();
                answer.questions = question.questions.clone();
                for (owner, data) in records.iter().filter(|(owner, _)| *owner == name) {
                    let owner = Name::new_unchecked(owner);
                    let record = ResourceRecord::new(owner, CLASS::IN, ttl, data.clone());
                    answer.answers.push(record);
                }
                if answer.answers.is_empty() {
                    let soa = SOA {
                        mname: Name::new_unchecked("ns.example.org"),
                        rname: Name::new_unchecked("root.example.org"),
                        serial: 1,
                        refresh: 1,
                        retry: 1,
                        expire: 1,
                        minimum: 120,
                    };
                    let owner = Name::new_unchecked("example.org");
                    let record = ResourceRecord::new(owner, CLASS::IN, 600, RData::SOA(soa));
                    answer.name_servers.push(record);
                }
                let answer = answer.build_bytes_vec().unwrap();
                let _ = socket.send_to(&answer, from).await;
            }
        });
        (at, asked)
    }

    const OWNER: &str = "_d2tp.example.org";

    #[tokio::test]
    async fn records_name_nodes_the_preferred_one_first_and_are_asked_for_once() {
        let hints = SVCParam::Ipv4Hint(vec![0xc000_0201, 0xe000_0001]);
        let records = vec![
            (OWNER, record(2, "b.example.org", vec![key_param(KEY)])),
            (
                OWNER,
                record(
                    1,
                    "a.example.org",
                    vec![SVCParam::Port(4434), hints, key_param(KEY)],
                ),
            ),
        ];
        let (at, asked) = name_server(records).await;
        let cache = RecordCache::default();
        for _ in 0..3 {
            let nodes = look_up_at("example.org", &KEY, &[at], &cache)
                .await
                .unwrap();
            let names: Vec<String> = nodes.iter().map(|node| node.name.to_string()).collect();
            assert_eq!(names, ["a.example.org:4434", "b.example.org:4433"]);
            // A multicast address is no host's.
            assert_eq!(nodes[0].hints, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_record_with_another_key_is_not_used_and_without_any_other_it_is_an_error() {
        let ours = (OWNER, record(2, "a.example.org", vec![key_param(KEY)]));
        let forged = (OWNER, record(1, "evil.example", vec![key_param(OTHER)]));
        let (both, _) = name_server(vec![ours, forged.clone()]).await;
        let nodes = look_up_at("example.org", &KEY, &[both], &RecordCache::default()).await;
        let nodes = nodes.unwrap();
        assert_eq!((nodes.len(), &*nodes[0].name.host), (1, "a.example.org"));
        let (one, asked) = name_server(vec![forged]).await;
        let cache = RecordCache::default();
        let error = look_up_at("example.org", &KEY, &[one], &cache).await;
        let text = error.unwrap_err().to_string();
        assert!(text.contains("other keys only"), "{text}");
        // On another network, the right records are found at once.
        let nodes = look_up_at("example.org", &KEY, &[both], &cache).await;
        assert_eq!(nodes.unwrap()[0].name.host, "a.example.org");
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn that_there_are_no_records_is_remembered_for_a_minute_at_most() {
        let (at, asked) = name_server(Vec::new()).await;
        let cache = RecordCache::default();
        for _ in 0..3 {
            let nodes = look_up_at("example.org", &KEY, &[at], &cache)
                .await
                .unwrap();
            assert_eq!(nodes, []);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        // The zone says 120 s.
        assert!(left(&cache) <= Duration::from_secs(60));
    }

    /// How long the only answer of a cache is still kept.
    fn left(cache: &RecordCache) -> Duration {
        let cache = cache.lock();
        let (until, _) = cache.values().next().unwrap();
        until.saturating_duration_since(Instant::now())
    }

    #[tokio::test]
    async fn records_are_kept_for_five_minutes_at_most_whatever_they_say() {
        let ours = record(1, "a.example.org", vec![key_param(KEY)]);
        let (at, _) = name_server_with(86_400, vec![(OWNER, ours)]).await;
        let cache = RecordCache::default();
        let nodes = look_up_at("example.org", &KEY, &[at], &cache).await;
        assert_eq!(nodes.unwrap().len(), 1);
        assert!(left(&cache) <= Duration::from_secs(300));
    }

    #[tokio::test]
    async fn aliases_are_followed_and_a_circle_of_them_ends() {
        let records = vec![
            (OWNER, record(0, "_d2tp.cdn.example", Vec::new())),
            ("_d2tp.cdn.example", record(1, "", vec![SVCParam::Port(1)])),
            (
                "_d2tp.round.example",
                record(0, "_d2tp.round.example", Vec::new()),
            ),
        ];
        let (at, _) = name_server(records).await;
        let cache = RecordCache::default();
        let nodes = look_up_at("example.org", &KEY, &[at], &cache)
            .await
            .unwrap();
        assert_eq!(nodes[0].name.to_string(), "_d2tp.cdn.example:1");
        let nodes = look_up_at("round.example", &KEY, &[at], &cache)
            .await
            .unwrap();
        assert_eq!(nodes, []);
    }

    #[tokio::test]
    async fn what_is_mandatory_and_unknown_makes_a_record_useless() {
        let mandatory = SVCParam::Mandatory([65_300].into());
        let unknown = SVCParam::Unknown(65_300, vec![1].into());
        let short = SVCParam::Unknown(SVCB_SERVER_KEY, vec![7; 31].into());
        let records = vec![
            (OWNER, record(1, "a.example.org", vec![mandatory, unknown])),
            (OWNER, record(2, "b.example.org", vec![short])),
        ];
        let (at, _) = name_server(records).await;
        let nodes = look_up_at("example.org", &KEY, &[at], &RecordCache::default()).await;
        assert_eq!(nodes.unwrap(), []);
    }

    #[tokio::test]
    async fn silent_name_servers_leave_the_name_to_its_addresses() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = silent.local_addr().unwrap();
        let nodes = look_up_at("example.org", &KEY, &[at], &RecordCache::default()).await;
        assert_eq!(nodes.unwrap(), []);
    }

    #[test]
    fn answers_to_other_questions_and_any_bytes_are_ignored() {
        let mut answer = Packet::new_reply(5);
        answer.questions.push(Question::new(
            Name::new_unchecked("_d2tp.other.example"),
            QTYPE::TYPE(TYPE::SVCB),
            CLASS::IN.into(),
            false,
        ));
        let bytes = answer.build_bytes_vec().unwrap();
        assert!(read("_d2tp.other.example", 5, &bytes).is_some());
        assert!(read(OWNER, 5, &bytes).is_none());
        assert!(read("_d2tp.other.example", 6, &bytes).is_none());
        for cut in 0..bytes.len() {
            assert!(read("_d2tp.other.example", 5, &bytes[..cut]).is_none());
        }
    }
}
