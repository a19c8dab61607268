//! A name server that knows no name and has an address for each: [`crate::NameStandIns`].
//!
//! Questions for an address of IPv4 are answered; those for anything else say that the name has no such
//! record, so that programs take the address.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use nix::cmsg_space;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, sendmsg,
};
use simple_dns::rdata::{A, RData};
use simple_dns::{CLASS, Packet, PacketFlag, QCLASS, QTYPE, RCODE, ResourceRecord, TYPE};
use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::stand_ins::NameStandIns;

/// How long an answer may be kept, in seconds: the address stands for the name longer than that.
const TTL_S: u32 = 60; // a guess

/// A question is short (RFC 1035 §4.2.1).
const QUESTION_BYTES_MAX: usize = 512;

/// The answer to a question; none to what is none.
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

/// Answers on a socket that may be asked under any address, until it breaks.
///
/// # Errors
/// What the system says.
pub async fn serve(socket: UdpSocket, names: Arc<NameStandIns>) -> io::Result<()> {
    loop {
        socket.readable().await?;
        let took = socket.try_io(Interest::READABLE, || take(&socket));
        let (question, from, under) = match took {
            Ok(Some(took)) => took,
            Ok(None) => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            // An answer that nobody waited for came back.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error),
        };
        if let Some(answer) = answer(&question, &names) {
            // Who asks gives up by itself.
            let _ = give(&socket, &answer, from, under);
        }
    }
}

type DnsQuestion = (Vec<u8>, SockaddrIn, libc::in_pktinfo);

fn take(socket: &UdpSocket) -> io::Result<Option<DnsQuestion>> {
    let mut bytes = [0; QUESTION_BYTES_MAX];
    let mut space = cmsg_space!(libc::in_pktinfo);
    let mut slices = [io::IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<SockaddrIn>(
        socket.as_raw_fd(),
        &mut slices,
        Some(&mut space),
        MsgFlags::MSG_DONTWAIT,
    )?;
    let under = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(info),
        _ => None,
    });
    let (n, from) = (message.bytes, message.address);
    Ok(from
        .zip(under)
        .map(|(from, under)| (bytes[..n].to_vec(), from, under)))
}

/// From the address that was asked: a client takes no other's answer.
fn give(
    socket: &UdpSocket,
    answer: &[u8],
    to: SockaddrIn,
    under: libc::in_pktinfo,
) -> nix::Result<usize> {
    let from = libc::in_pktinfo {
        ipi_ifindex: 0,
        ipi_spec_dst: under.ipi_addr,
        ipi_addr: under.ipi_addr,
    };
    sendmsg(
        socket.as_raw_fd(),
        &[io::IoSlice::new(answer)],
        &[ControlMessage::Ipv4PacketInfo(&from)],
        MsgFlags::MSG_DONTWAIT,
        Some(&to),
    )
}

/// A socket for [`serve`].
pub(crate) fn socket(at: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = std::net::UdpSocket::bind(at)?;
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::Ipv4PacketInfo, &true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
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
