//! Servers that announce themselves on the local network, by DNS-SD (RFC 6763) over multicast DNS (RFC 6762).
//!
//! ```text
//!  question, at 0, 1 and 3 s ──▶ 224.0.0.251, ff02::fb ──▶ every host of the link
//!      _d2tp._udp.local PTR?
//!  answer ◀── PTR node._d2tp._udp.local
//!             SRV 4433 node.local       TXT key=<the server's key>       A 192.168.1.5
//! ```
//!
//! The question is asked when there is a use for an answer, and nothing is listened for afterwards: an idle device has no
//! socket here. That is why the question is not left to a library of DNS-SD, which browses without end in a thread of its
//! own; messages are those of `simple-dns`.
//!
//! An answer is a hint, which any host of the link can give. What does not name the right key, or names an address that
//! is neither of a local network nor the sender's, is ignored.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use d2tp_links::Link;
use d2tp_session::PublicKey;
use simple_dns::rdata::RData;
use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, Question, ResourceRecord, TYPE};
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

/// The type of service that proxies announce.
pub const SERVICE_TYPE: &str = "_d2tp._udp.local";
/// The attribute of the TXT record with the server's key, as in its address.
pub const SERVICE_KEY_ATTRIBUTE: &str = "key";

const PORT: u16 = 5353; // RFC 6762 §3
const GROUP_V4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251); // RFC 6762 §3
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb); // RFC 6762 §3
/// When the question is asked, after the first time: multicast packets are lost on Wi-Fi.
const ASKED_AGAIN_AT: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)]; // RFC 6762 §5.2
/// How long answers are awaited after the question is asked last, and after the first answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1); // a guess: a responder waits 0.12 s at most
/// The longest message.
const MESSAGE_BYTES_MAX: usize = 9_000; // RFC 6762 §17
/// The most packets of a link that are read for one question: others ask and answer there as well.
const PACKETS_MAX: u32 = 1_000; // a guess
/// The most records of a message that are looked at: the records are compared with each other.
const RECORDS_MAX: usize = 64; // a guess: a proxy with eight addresses has 11

/// Asks the hosts of a link for servers with this key, and sends the addresses of those that answer.
///
/// # Errors
/// The link has no multicast.
pub(crate) async fn ask(
    link: &Link,
    key: PublicKey,
    found: mpsc::UnboundedSender<SocketAddr>,
) -> io::Result<()> {
    let has = |is_v6: bool| link.source_addresses().any(|ip| ip.is_ipv6() == is_v6);
    let group_v6 = SocketAddr::V6(SocketAddrV6::new(GROUP_V6, PORT, 0, link.index));
    let groups = [
        (false, SocketAddr::from((GROUP_V4, PORT))),
        (true, group_v6),
    ];
    let mut asked = Vec::new();
    for (is_v6, group) in groups {
        if has(is_v6) {
            let socket = multicast_socket(link, group)?;
            let (key, found) = (key, found.clone());
            asked.push(ask_group(socket, group, key, found));
        }
    }
    for result in futures_util::future::join_all(asked).await {
        result?;
    }
    Ok(())
}

/// A socket that receives what is sent to the group on this link. Other programs may have theirs.
fn multicast_socket(link: &Link, group: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(group), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    // Not SO_REUSEPORT, which programs of several users cannot share.
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(link.name.as_bytes()))?;
    match group {
        SocketAddr::V4(_) => {
            let interface = InterfaceIndexOrAddress::Index(link.index);
            socket.join_multicast_v4_n(&GROUP_V4, &interface)?;
            socket.set_multicast_ttl_v4(255)?; // RFC 6762 §11
        }
        SocketAddr::V6(_) => {
            socket.set_only_v6(true)?;
            socket.join_multicast_v6(&GROUP_V6, link.index)?;
            socket.set_multicast_if_v6(link.index)?;
            socket.set_multicast_hops_v6(255)?;
        }
    }
    // At the group's address: what is sent to this host itself is for the system's own responder.
    socket.bind(&group.into())?;
    UdpSocket::from_std(socket.into())
}

async fn ask_group(
    socket: UdpSocket,
    group: SocketAddr,
    key: PublicKey,
    found: mpsc::UnboundedSender<SocketAddr>,
) -> io::Result<()> {
    let question = question();
    let begun = Instant::now();
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    let mut known = BTreeSet::new();
    let mut packets = 0;
    let mut times = ASKED_AGAIN_AT.into_iter();
    loop {
        socket.send_to(&question, group).await?;
        let next = times.next();
        let mut until = match next {
            Some(at) => begun + at,
            None => Instant::now() + ANSWERS_WITHIN,
        };
        while let Ok(received) = timeout_at(until, socket.recv_from(&mut buffer)).await {
            let (len, from) = received?;
            packets += 1;
            if packets > PACKETS_MAX || found.is_closed() {
                return Ok(());
            }
            for address in addresses_in(&buffer[..len], from, &key) {
                if known.insert(address) {
                    // One that answered has nothing to add, and others have been asked as well.
                    until = until.min(Instant::now() + ANSWERS_WITHIN);
                    let _ = found.send(address);
                }
            }
        }
        if next.is_none() || !known.is_empty() {
            return Ok(());
        }
    }
}

fn question() -> Vec<u8> {
    let mut packet = Packet::new_query(0); // RFC 6762 §18.1
    packet.questions.push(Question::new(
        Name::new_unchecked(SERVICE_TYPE),
        QTYPE::TYPE(TYPE::PTR),
        CLASS::IN.into(),
        false,
    ));
    let built = packet.build_bytes_vec();
    built.expect("a short question")
}

/// The addresses of servers with this key in a message that arrived from `from`.
fn addresses_in(message: &[u8], from: SocketAddr, key: &PublicKey) -> Vec<SocketAddr> {
    // RFC 6762 §6: an answer from another port is none.
    if from.port() != PORT {
        return Vec::new();
    }
    let Ok(packet) = Packet::parse(message) else {
        return Vec::new();
    };
    if !packet.has_flags(PacketFlag::RESPONSE) {
        return Vec::new();
    }
    let records = packet.answers.iter().chain(&packet.additional_records);
    // One with no time left is taken back.
    let records: Vec<&ResourceRecord<'_>> = records
        .filter(|record| record.ttl > 0)
        .take(RECORDS_MAX)
        .collect();
    let mut found = Vec::new();
    for record in &records {
        let RData::TXT(text) = &record.rdata else {
            continue;
        };
        let instance = record.name.to_string().to_ascii_lowercase();
        let is_ours = text.iter_raw().any(|(name, value)| {
            let value = value.and_then(|value| std::str::from_utf8(value).ok());
            name.eq_ignore_ascii_case(SERVICE_KEY_ATTRIBUTE.as_bytes())
                && value.and_then(|value| PublicKey::from_text(value).ok()) == Some(*key)
        });
        if !is_ours || !instance.ends_with(&format!(".{SERVICE_TYPE}")) {
            continue;
        }
        for record in &records {
            if let RData::SRV(place) = &record.rdata
                && record.name.to_string().eq_ignore_ascii_case(&instance)
                && place.port > 0
            {
                found.extend(addresses_of(
                    &records,
                    &place.target.to_string(),
                    place.port,
                ));
            }
        }
    }
    found.retain(|address| is_local(address.ip()) || address.ip() == from.ip());
    found.sort_unstable();
    found.dedup();
    found
}

/// The addresses of a host.
fn addresses_of<'a>(
    records: &'a [&ResourceRecord<'_>],
    host: &str,
    port: u16,
) -> impl Iterator<Item = SocketAddr> + use<'a> {
    let host = host.to_owned();
    records.iter().filter_map(move |record| {
        let ip: IpAddr = match &record.rdata {
            RData::A(a) => Ipv4Addr::from(a.address).into(),
            RData::AAAA(aaaa) => Ipv6Addr::from(aaaa.address).into(),
            _ => return None,
        };
        let is_of_host = record.name.to_string().eq_ignore_ascii_case(&host);
        is_of_host.then(|| SocketAddr::new(ip, port))
    })
}

/// Whether an address is of a local network, and one that a packet can be sent to by its number alone. An answer must
/// not have this device send packets to hosts elsewhere.
fn is_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private() || is_shared(ip),
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

/// Whether an address is shared by the customers of a provider, whose networks may be local ones (RFC 6598).
fn is_shared(ip: Ipv4Addr) -> bool {
    let [a, b, ..] = ip.octets();
    a == 100 && b & 0xc0 == 64
}

#[cfg(test)]
mod tests {
    use super::*;

    use simple_dns::rdata::{A, AAAA, PTR, SRV, TXT};

    const KEY: PublicKey = PublicKey([7; 32]);
    const INSTANCE: &str = "node-1._d2tp._udp.local";

    fn from(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 168, 1, 5], port))
    }

    fn record(name: &'static str, ttl: u32, data: RData<'static>) -> ResourceRecord<'static> {
        ResourceRecord::new(Name::new_unchecked(name), CLASS::IN, ttl, data)
    }

    fn srv(port: u16) -> RData<'static> {
        RData::SRV(SRV {
            priority: 0,
            weight: 0,
            port,
            target: Name::new_unchecked("Node-1.local"),
        })
    }

    fn txt(key: PublicKey) -> RData<'static> {
        let attribute = format!("key={key}");
        let mut txt = TXT::new();
        txt.add_string("v=1").unwrap();
        txt.add_string(&attribute).unwrap();
        RData::TXT(txt.into_owned())
    }

    fn a(address: [u8; 4]) -> RData<'static> {
        let address = u32::from_be_bytes(address);
        RData::A(A { address })
    }

    /// An announcement with these records beside the pointer to the instance.
    fn message(records: Vec<ResourceRecord<'static>>) -> Vec<u8> {
        let mut packet = Packet::new_reply(0);
        let pointer = RData::PTR(PTR(Name::new_unchecked(INSTANCE)));
        packet.answers.push(record(SERVICE_TYPE, 4_500, pointer));
        packet.additional_records = records;
        packet.build_bytes_vec_compressed().unwrap()
    }

    fn whole(key: PublicKey, address: [u8; 4]) -> Vec<ResourceRecord<'static>> {
        vec![
            record(INSTANCE, 120, srv(4_433)).with_cache_flush(true),
            record(INSTANCE, 4_500, txt(key)),
            record("node-1.local", 120, a(address)),
        ]
    }

    #[test]
    fn the_addresses_of_the_server_with_the_key_are_found() {
        let mut records = whole(KEY, [192, 168, 1, 5]);
        let v6: Ipv6Addr = "fd00::5".parse().unwrap();
        let data = RData::AAAA(AAAA { address: v6.into() });
        records.push(record("NODE-1.local", 120, data));
        let found = addresses_in(&message(records), from(5353), &KEY);
        let expected: [SocketAddr; 2] = [
            "192.168.1.5:4433".parse().unwrap(),
            "[fd00::5]:4433".parse().unwrap(),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn an_answer_with_another_key_or_none_names_no_address() {
        let found = |records| addresses_in(&message(records), from(5353), &KEY);
        let mut without = whole(KEY, [192, 168, 1, 5]);
        without.remove(1);
        let mut elsewhere = whole(KEY, [192, 168, 1, 5]);
        elsewhere[1] = record("node-1._http._tcp.local", 4_500, txt(KEY));
        let mut withdrawn = whole(KEY, [192, 168, 1, 5]);
        withdrawn[0].ttl = 0;
        let mut no_port = whole(KEY, [192, 168, 1, 5]);
        no_port[0] = record(INSTANCE, 120, srv(0));
        for records in [
            whole(PublicKey([9; 32]), [192, 168, 1, 5]),
            without,
            elsewhere,
            withdrawn,
            no_port,
        ] {
            assert_eq!(found(records), []);
        }
        assert_eq!(found(whole(KEY, [192, 168, 1, 5])).len(), 1);
        let right = message(whole(KEY, [192, 168, 1, 5]));
        assert_eq!(addresses_in(&right, from(40_000), &KEY), []);
        let mut question = right;
        question[2] &= 0x7f;
        assert_eq!(addresses_in(&question, from(5353), &KEY), []);
    }

    #[test]
    fn an_answer_does_not_lead_out_of_local_networks() {
        for address in [
            [203, 0, 113, 9],
            [8, 8, 8, 8],
            [127, 0, 0, 1],
            [224, 0, 0, 251],
            [255, 255, 255, 255],
            [0, 0, 0, 0],
            [169, 254, 1, 1],
        ] {
            let message = message(whole(KEY, address));
            assert_eq!(addresses_in(&message, from(5353), &KEY), [], "{address:?}");
        }
        for address in [[10, 1, 2, 3], [172, 16, 0, 1], [100, 64, 0, 1]] {
            let message = message(whole(KEY, address));
            assert_eq!(addresses_in(&message, from(5353), &KEY).len(), 1);
        }
    }

    #[test]
    fn any_bytes_are_read_without_harm() {
        let whole = message(whole(KEY, [192, 168, 1, 5]));
        for cut in 0..whole.len() {
            assert_eq!(addresses_in(&whole[..cut], from(5353), &KEY), []);
        }
        for at in 0..whole.len() {
            for bits in [0x01, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[at] ^= bits;
                let _ = addresses_in(&changed, from(5353), &KEY);
            }
        }
    }
}
