//! How the calls of `transfer` differ for datagram sockets: size limits, control messages,
//! addresses of peers, and the error after the end.

use std::mem::offset_of;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;

use libc::{c_int, c_void, cmsghdr, iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};

use crate::address::SocketName;
use crate::datagrams::{self, MessageHead, ProgramDatagrams};
use crate::errno::{CallResult, Errno};
use crate::memory;
use crate::options::{self, SO_EXPIRY, SO_ROUTE, SOL_D2TP};
use crate::table::{self, SocketEntry};

/// The most bytes of control messages that are read; a message needs at most two of this library's.
const CONTROL_BYTES_MAX: usize = 4096;
/// The most buffers of a message, as in the kernel (UIO_MAXIOV).
const PIECES_MAX: usize = 1024;

/// The state of a datagram socket during a call.
pub(super) struct DatagramCalls {
    fd: RawFd,
    socket: SocketEntry,
    grams: Arc<ProgramDatagrams>,
}

/// The datagram socket behind a descriptor, if it is one.
pub(super) fn find(fd: RawFd) -> CallResult<Option<DatagramCalls>> {
    if !datagrams::may_be_datagram_socket(fd) {
        return Ok(None);
    }
    let known = table::find(fd)?.map(|(_, socket)| socket);
    Ok(known.and_then(|socket| {
        let grams = socket.datagrams.clone()?;
        Some(DatagramCalls { fd, socket, grams })
    }))
}

fn moved(result: ssize_t) -> CallResult<ssize_t> {
    if result < 0 {
        return Err(Errno::last());
    }
    Ok(result)
}

fn place(name: Ipv4Addr, port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(name).to_be(),
        },
        sin_zero: [0; 8],
    }
}

impl DatagramCalls {
    /// The error of the socket's session, if it is over.
    fn fault(&self) -> Option<Errno> {
        let fault = self.socket.status.as_ref()?.fault.get()?;
        Some(Errno(fault.errno))
    }

    /// The peer that a message is addressed to.
    fn target(&self, to: *const sockaddr, to_len: socklen_t) -> CallResult<Ipv4Addr> {
        match (self.grams.to(), to.is_null()) {
            (Some(name), true) => Ok(name),
            (Some(_), false) => Err(Errno(libc::EISCONN)),
            (None, true) => Err(Errno(libc::EDESTADDRREQ)),
            (None, false) => {
                let named = SocketName::read(to.cast(), to_len, self.socket.domain)?;
                let SocketName::Ip(address) = named else {
                    return Err(Errno(libc::ENOTCONN));
                };
                match (address.ip().to_canonical(), address.port()) {
                    (std::net::IpAddr::V4(name), port)
                        if port == self.grams.ports.plain
                            && name.octets()[..2] == datagrams::NAMES =>
                    {
                        Ok(name)
                    }
                    // Only `connect` connects to a new peer.
                    _ => Err(Errno(libc::ENOTCONN)),
                }
            }
        }
    }

    /// Checks whether a message may be sent now.
    fn admit(&self, name: Ipv4Addr, len: usize) -> CallResult<()> {
        if !self.socket.is_ours() {
            return Ok(());
        }
        if let Some(errno) = self.fault() {
            return Err(errno);
        }
        match self.grams.max(name) {
            Some(max) if len > max => Err(Errno(libc::EMSGSIZE)),
            Some(_) => Ok(()),
            // The session is being created: only datagrams of a size that always fits are accepted.
            None if self.grams.to().is_some() && len <= datagrams::SURE_BYTES => Ok(()),
            None if self.grams.to().is_some() => Err(Errno(libc::EMSGSIZE)),
            // A device that has left, or never connected.
            None => Err(Errno(libc::ECONNREFUSED)),
        }
    }

    /// sendto(2)
    pub(super) fn send_to(
        &self,
        bytes: *const c_void,
        len: size_t,
        flags: c_int,
        to: *const sockaddr,
        to_len: socklen_t,
    ) -> CallResult<ssize_t> {
        let piece = iovec {
            iov_base: bytes.cast_mut(),
            iov_len: len,
        };
        self.send((&raw const piece).cast(), 1, len, flags, (to, to_len), None)
    }

    /// sendmsg(2)
    pub(super) fn send_message(&self, message: *const msghdr, flags: c_int) -> CallResult<ssize_t> {
        let message = read_message(message.cast())?;
        let pieces = read_pieces(&message)?;
        let len = pieces.iter().map(|piece| piece.iov_len).sum();
        let mark = self.mark(&message)?;
        let to = (message.msg_name.cast_const().cast(), message.msg_namelen);
        self.send(pieces.as_ptr(), pieces.len(), len, flags, to, mark)
    }

    fn send(
        &self,
        pieces: *const iovec,
        count: usize,
        len: usize,
        flags: c_int,
        (to, to_len): (*const sockaddr, socklen_t),
        mark: Option<MessageHead>,
    ) -> CallResult<ssize_t> {
        let name = self.target(to, to_len)?;
        self.admit(name, len)?;
        let head = mark.map(|mark| MessageHead { name, ..mark }.to_bytes());
        let ports = self.grams.ports;
        let to = match &head {
            Some(_) => place(Ipv4Addr::LOCALHOST, ports.with_head),
            None => place(name, ports.plain),
        };
        let mut all = Vec::with_capacity(count + 1);
        if let Some(head) = &head {
            all.push(iovec {
                iov_base: head.as_ptr().cast_mut().cast(),
                iov_len: head.len(),
            });
        }
        // SAFETY: `count` pieces, in memory of this function.
        all.extend_from_slice(unsafe { std::slice::from_raw_parts(pieces, count) });
        // SAFETY: msghdr consists of plain numbers and pointers.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw const to).cast_mut().cast();
        message.msg_namelen = size_of::<libc::sockaddr_in>() as socklen_t;
        message.msg_iov = all.as_mut_ptr();
        message.msg_iovlen = all.len() as _;
        // SAFETY: the kernel checks the memory that the program's pieces point at.
        let sent = moved(unsafe { libc::sendmsg(self.fd, &message, flags | libc::MSG_NOSIGNAL) });
        match sent {
            Ok(_) => Ok(len as ssize_t),
            // The engine's end is closed; the status has the reason.
            Err(Errno(libc::ECONNREFUSED)) => {
                Err(self.fault().unwrap_or(Errno(libc::ECONNREFUSED)))
            }
            Err(errno) => Err(errno),
        }
    }

    /// The options that a message's control messages set for this message only.
    fn mark(&self, message: &msghdr) -> CallResult<Option<MessageHead>> {
        // In other C libraries this field has four bytes.
        #[allow(clippy::unnecessary_cast)]
        let len = message.msg_controllen as usize;
        if len == 0 {
            return Ok(None);
        }
        if len > CONTROL_BYTES_MAX {
            return Err(Errno(libc::ENOBUFS));
        }
        let control = memory::read(message.msg_control, len)?;
        let mut mark = MessageHead {
            name: Ipv4Addr::UNSPECIFIED,
            route: None,
            expiry: None,
        };
        for (level, kind, value) in controls(&control)? {
            match (level, kind) {
                (SOL_D2TP, SO_EXPIRY) => mark.expiry = Some(options::expiry(value)?),
                (SOL_D2TP, SO_ROUTE) => mark.route = Some(options::route(value)?),
                // Options that would only affect loopback packets have no effect on the peer.
                _ => return Err(Errno(libc::EINVAL)),
            }
        }
        Ok(Some(mark))
    }

    /// recvfrom(2)
    pub(super) fn receive_from(
        &self,
        into: *mut c_void,
        len: size_t,
        flags: c_int,
        from: *mut sockaddr,
        from_len: *mut socklen_t,
    ) -> CallResult<ssize_t> {
        let mut piece = iovec {
            iov_base: into,
            iov_len: len,
        };
        // SAFETY: msghdr consists of plain numbers and pointers.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &mut piece;
        message.msg_iovlen = 1;
        let (bytes, who) = self.receive(&mut message, flags)?;
        if !from.is_null() {
            let who = who.to_bytes(self.socket.domain);
            memory::answer(&who, from.cast(), from_len, who.len())?;
        }
        Ok(bytes)
    }

    /// recvmsg(2)
    pub(super) fn receive_message(&self, at: *mut msghdr, flags: c_int) -> CallResult<ssize_t> {
        let theirs = read_message(at.cast())?;
        let mut message = theirs;
        let (bytes, who) = self.receive(&mut message, flags)?;
        let who = who.to_bytes(self.socket.domain);
        if !theirs.msg_name.is_null() {
            let fits = who.len().min(theirs.msg_namelen as usize);
            memory::write(theirs.msg_name, &who[..fits])?;
            let len = who.len() as socklen_t;
            let place = offset_of!(msghdr, msg_namelen);
            memory::write(at.wrapping_byte_add(place).cast(), &len.to_ne_bytes())?;
        }
        let place = offset_of!(msghdr, msg_controllen);
        let control = message.msg_controllen.to_ne_bytes();
        memory::write(at.wrapping_byte_add(place).cast(), &control)?;
        let place = offset_of!(msghdr, msg_flags);
        let flags = message.msg_flags.to_ne_bytes();
        memory::write(at.wrapping_byte_add(place).cast(), &flags)?;
        Ok(bytes)
    }

    fn receive(&self, message: &mut msghdr, flags: c_int) -> CallResult<(ssize_t, SocketName)> {
        let mut from = place(Ipv4Addr::UNSPECIFIED, 0);
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_in>() as socklen_t;
        // Datagrams that arrived before the end are read first.
        let flags = match self.fault() {
            Some(_) => flags | libc::MSG_DONTWAIT,
            None => flags,
        };
        // SAFETY: the kernel checks the memory that the program's pieces point at.
        let got = moved(unsafe { libc::recvmsg(self.fd, message, flags) });
        let bytes = match (got, self.fault()) {
            // An empty message signals the end.
            (Ok(0), Some(errno)) => return Err(errno),
            (Err(Errno(libc::EAGAIN | libc::ECONNREFUSED)), Some(errno)) => return Err(errno),
            (Err(errno), _) => return Err(errno),
            (Ok(bytes), _) => bytes,
        };
        let name = Ipv4Addr::from(u32::from_be(from.sin_addr.s_addr));
        let by_name = SocketAddr::from((name, u16::from_be(from.sin_port)));
        let peer = self.socket.peer.clone();
        Ok((bytes, peer.unwrap_or(SocketName::Ip(by_name))))
    }
}

fn read_message(at: *const c_void) -> CallResult<msghdr> {
    let bytes = memory::read(at, size_of::<msghdr>())?;
    // SAFETY: plain numbers and pointers, for which any value is valid until it is used.
    Ok(unsafe { bytes.as_ptr().cast::<msghdr>().read_unaligned() })
}

fn read_pieces(message: &msghdr) -> CallResult<Vec<iovec>> {
    #[allow(clippy::unnecessary_cast)]
    let count = message.msg_iovlen as usize;
    if count > PIECES_MAX {
        return Err(Errno(libc::EMSGSIZE));
    }
    let bytes = memory::read(message.msg_iov.cast(), count * size_of::<iovec>())?;
    let pieces = bytes.chunks_exact(size_of::<iovec>());
    // SAFETY: the same as above.
    Ok(pieces
        .map(|piece| unsafe { piece.as_ptr().cast::<iovec>().read_unaligned() })
        .collect())
}

/// Control messages: the level, type and value of each (cmsg(3)).
fn controls(mut bytes: &[u8]) -> CallResult<Vec<(c_int, c_int, &[u8])>> {
    const HEAD: usize = size_of::<cmsghdr>();
    let mut all = Vec::new();
    while bytes.len() >= HEAD {
        let len = usize::from_ne_bytes(bytes[..8].try_into().expect("eight"));
        if !(HEAD..=bytes.len()).contains(&len) {
            return Err(Errno(libc::EINVAL));
        }
        let word = |at: usize| c_int::from_ne_bytes(bytes[at..at + 4].try_into().expect("four"));
        all.push((word(8), word(12), &bytes[HEAD..len]));
        bytes = &bytes[len.next_multiple_of(size_of::<usize>()).min(bytes.len())..];
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_found_and_cut_ones_are_an_error() {
        let one = |kind: c_int, value: c_int| {
            let mut bytes = 20usize.to_ne_bytes().to_vec();
            for word in [SOL_D2TP, kind, value, 0] {
                bytes.extend(word.to_ne_bytes());
            }
            bytes
        };
        let two = [one(SO_EXPIRY, 5), one(SO_ROUTE, 2)].concat();
        let found = controls(&two).unwrap();
        let value = |n: c_int| n.to_ne_bytes();
        assert_eq!(
            found,
            [
                (SOL_D2TP, SO_EXPIRY, &value(5)[..]),
                (SOL_D2TP, SO_ROUTE, &value(2)[..])
            ]
        );
        let mut long = one(SO_EXPIRY, 5);
        long[0] = 200;
        assert_eq!(controls(&long), Err(Errno(libc::EINVAL)));
        long[0] = 3;
        assert_eq!(controls(&long), Err(Errno(libc::EINVAL)));
        assert_eq!(controls(&[]), Ok(vec![]));
    }
}
