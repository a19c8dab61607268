//! A name server that returns a stand-in address for every name: [`crate::NameStandIns`].
//!
//! Queries for IPv4 addresses are answered. For other types the name has no record, so that
//! programs use the IPv4 address.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::cmsg_space;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
    sockopt,
};
use simple_dns::rdata::{A, RData};
use simple_dns::{CLASS, Packet, PacketFlag, QCLASS, QTYPE, RCODE, ResourceRecord, TYPE};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::stand_ins::NameStandIns;

/// How long an answer may be cached, in seconds. The address stands for the name longer than that.
const TTL_S: u32 = 60; // a guess

/// The longest query in bytes (RFC 1035 §4.2.1).
const QUESTION_BYTES_MAX: usize = 512;

/// The port of name servers.
pub const DNS_PORT: u16 = 53;

/// The most TCP connections at once. Further ones wait in the kernel.
const TCP_CLIENTS_MAX: usize = 64; // a guess

/// How long a connection may be idle.
const TCP_IDLE: Duration = Duration::from_secs(30); // RFC 7766 §6.2.3 asks for seconds

/// The delay after a connection could not be accepted, in which descriptors may become free.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100); // a guess

/// The answer to a query; `None` if it is malformed.
pub fn answer(question: &[u8], names: &NameStandIns) -> Option<Vec<u8>> {
    let asked = Packet::parse(question).ok()?;
    if asked.has_flags(PacketFlag::RESPONSE) || asked.questions.len() != 1 {
        return None;
    }
    let mut said = Packet::new_reply(asked.id());
    said.set_flags(PacketFlag::RECURSION_AVAILABLE);
    if asked.has_flags(PacketFlag::RECURSION_DESIRED) {
        said.set_flags(PacketFlag::RECURSION_DESIRED);
    }
    let question = &asked.questions[0];
    let is_internet = matches!(question.qclass, QCLASS::CLASS(CLASS::IN) | QCLASS::ANY);
    let name = question.qname.to_string();
    match question.qtype {
        _ if !is_internet => *said.rcode_mut() = RCODE::Refused,
        QTYPE::TYPE(TYPE::A) | QTYPE::ANY => match address_of(&name, names) {
            Some(ip) => said.answers.push(ResourceRecord::new(
                question.qname.clone(),
                CLASS::IN,
                TTL_S,
                RData::A(A { address: ip.into() }),
            )),
            None => *said.rcode_mut() = RCODE::NameError,
        },
        QTYPE::TYPE(TYPE::PTR) => *said.rcode_mut() = RCODE::NameError,
        _ => {}
    }
    said.questions.push(question.clone());
    said.build_bytes_vec().ok()
}

fn address_of(name: &str, names: &NameStandIns) -> Option<Ipv4Addr> {
    let is_own = name == "localhost" || name.ends_with(".localhost");
    if is_own {
        return Some(Ipv4Addr::LOCALHOST);
    }
    names.stand_in(name)
}

/// Answers queries on all of these sockets. Must be called on a tokio runtime.
///
/// # Errors
/// The system's error.
pub fn serve(sockets: Vec<OwnedFd>, names: &Arc<NameStandIns>) -> io::Result<()> {
    for socket in sockets {
        let names = names.clone();
        if SockRef::from(&socket).r#type()? == Type::DGRAM {
            let socket = UdpSocket::from_std(socket.into())?;
            tokio::spawn(async move {
                if let Err(error) = serve_datagrams(socket, names).await {
                    tracing::error!(%error, "names can no longer be looked up");
                }
            });
        } else {
            let listener = TcpListener::from_std(socket.into())?;
            tokio::spawn(serve_connections(listener, names));
        }
    }
    Ok(())
}

/// Answers queries on a socket that receives for any address, until it fails.
async fn serve_datagrams(socket: UdpSocket, names: Arc<NameStandIns>) -> io::Result<()> {
    loop {
        socket.readable().await?;
        let took = socket.try_io(Interest::READABLE, || take(&socket));
        let (question, from, under) = match took {
            Ok(Some(took)) => took,
            Ok(None) => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            // An earlier answer was refused by its receiver.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error),
        };
        if let Some(answer) = answer(&question, &names) {
            // The client gives up by itself.
            let _ = give(&socket, &answer, from, under);
        }
    }
}

/// The address to which a query was sent.
enum AskedAddress {
    V4(libc::in_pktinfo),
    V6(libc::in6_pktinfo),
}

type DnsQuestion = (Vec<u8>, SockaddrStorage, AskedAddress);

fn take(socket: &UdpSocket) -> io::Result<Option<DnsQuestion>> {
    let mut bytes = [0; QUESTION_BYTES_MAX];
    let mut space = cmsg_space!(libc::in_pktinfo, libc::in6_pktinfo);
    let mut slices = [io::IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut slices,
        Some(&mut space),
        MsgFlags::MSG_DONTWAIT,
    )?;
    let under = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(AskedAddress::V4(info)),
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(AskedAddress::V6(info)),
        _ => None,
    });
    let (n, from) = (message.bytes, message.address);
    Ok(from
        .zip(under)
        .map(|(from, under)| (bytes[..n].to_vec(), from, under)))
}

/// Sends from the address that was asked, because a client accepts no other answer.
fn give(
    socket: &UdpSocket,
    answer: &[u8],
    to: SockaddrStorage,
    under: AskedAddress,
) -> nix::Result<usize> {
    let send = |from: ControlMessage<'_>| {
        sendmsg(
            socket.as_raw_fd(),
            &[io::IoSlice::new(answer)],
            &[from],
            MsgFlags::MSG_DONTWAIT,
            Some(&to),
        )
    };
    match under {
        AskedAddress::V4(under) => send(ControlMessage::Ipv4PacketInfo(&libc::in_pktinfo {
            ipi_ifindex: 0,
            ipi_spec_dst: under.ipi_addr,
            ipi_addr: under.ipi_addr,
        })),
        AskedAddress::V6(under) => send(ControlMessage::Ipv6PacketInfo(&libc::in6_pktinfo {
            ipi6_ifindex: 0,
            ..under
        })),
    }
}

/// A socket for [`serve`].
pub(crate) fn socket(at: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM, None)?;
    match at {
        SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?,
        SocketAddr::V6(_) => {
            socket.set_only_v6(true)?;
            setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
            // It answers from addresses that the kernel has only as a route.
            socket.set_freebind_v6(true)?;
        }
    }
    socket.bind(&at.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// A listening socket for [`serve`].
fn listener(at: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
    if at.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&at.into())?;
    socket.listen(TCP_CLIENTS_MAX as i32)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// The sockets of a name server for every address of this network namespace: UDP and TCP, for IPv4
/// and, if the kernel has it, IPv6.
pub(crate) fn sockets() -> io::Result<Vec<OwnedFd>> {
    let four = SocketAddr::from((Ipv4Addr::UNSPECIFIED, DNS_PORT));
    let mut all: Vec<OwnedFd> = vec![socket(four)?.into(), listener(four)?.into()];
    let six = SocketAddr::from((Ipv6Addr::UNSPECIFIED, DNS_PORT));
    if let (Ok(datagrams), Ok(connections)) = (socket(six), listener(six)) {
        all.extend([datagrams.into(), connections.into()]);
    }
    Ok(all)
}

/// Answers queries over TCP (RFC 1035 §4.2.2), until the socket fails.
async fn serve_connections(listener: TcpListener, names: Arc<NameStandIns>) {
    let room = Arc::new(Semaphore::new(TCP_CLIENTS_MAX));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((client, _)) => {
                let names = names.clone();
                tokio::spawn(async move {
                    // The client gives up by itself.
                    let _ = answer_client(client, &names).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "a lookup is not taken");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn answer_client(mut client: TcpStream, names: &NameStandIns) -> io::Result<()> {
    let mut question = vec![0; QUESTION_BYTES_MAX];
    loop {
        let len = timeout(TCP_IDLE, client.read_u16()).await??;
        let question = question
            .get_mut(..len.into())
            .ok_or(io::ErrorKind::InvalidData)?;
        timeout(TCP_IDLE, client.read_exact(question)).await??;
        let answer = answer(question, names).ok_or(io::ErrorKind::InvalidData)?;
        let mut said = (answer.len() as u16).to_be_bytes().to_vec();
        said.extend(answer);
        client.write_all(&said).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use simple_dns::{Name, Question};

    fn ask(name: &str, what: TYPE) -> Vec<u8> {
        let mut packet = Packet::new_query(7);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let name = Name::new(name).unwrap();
        let question = Question::new(name, what.into(), CLASS::IN.into(), false);
        packet.questions.push(question);
        packet.build_bytes_vec().unwrap()
    }

    #[test]
    fn every_name_has_an_address_of_ipv4_and_nothing_else() {
        let names = NameStandIns::default();
        let said = answer(&ask("origin.example", TYPE::A), &names).unwrap();
        let said = Packet::parse(&said).unwrap();
        let RData::A(A { address }) = &said.answers[0].rdata else {
            panic!("{said:?}");
        };
        let ip = Ipv4Addr::from(*address);
        assert_eq!(names.name_of(ip.into()), Ok(Some("origin.example".into())));
        assert_eq!(said.id(), 7);
        let said = answer(&ask("origin.example", TYPE::AAAA), &names).unwrap();
        let said = Packet::parse(&said).unwrap();
        assert!(said.answers.is_empty() && said.rcode() == RCODE::NoError);
        let said = answer(&ask("1.2.0.192.in-addr.arpa", TYPE::PTR), &names).unwrap();
        assert_eq!(Packet::parse(&said).unwrap().rcode(), RCODE::NameError);
        let said = answer(&ask("localhost", TYPE::A), &names).unwrap();
        assert_eq!(Packet::parse(&said).unwrap().answers.len(), 1);
    }

    #[test]
    fn what_is_no_question_gets_no_answer() {
        let names = NameStandIns::default();
        assert!(answer(b"", &names).is_none());
        assert!(answer(&[0xff; 40], &names).is_none());
        let said = answer(&ask("a.example", TYPE::A), &names).unwrap();
        assert!(answer(&said, &names).is_none(), "an answer is no question");
    }
}
