//! Ours again, by the socket calls of `libd2tp`: a program that blocks, its engine, and the kernel between
//! them, all on the core that a process has here.

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use d2tp_driver::{PublicKey, SecretKey};

use super::{CALL_BYTES, LOOK, Peer};
use crate::meter::Meter;
use crate::process::Card;

/// Options of `d2tp.h`.
const SOL_D2TP: c_int = 0xd2;
const D2TP_SO_PEERKEY: c_int = 9;

/// The peer.
pub struct Sockets;

/// A socket that is given back.
struct Fd(c_int);

impl Drop for Fd {
    fn drop(&mut self) {
        d2tp::d2tp_close(self.0);
    }
}

fn check<T: PartialOrd + Default>(said: T) -> Result<T> {
    if said < T::default() {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(said)
}

/// The key of this process goes where the library looks for it, and not into the user's folder.
fn bring_key(secret: u8) -> Result<PublicKey> {
    let key = SecretKey::from_bytes([secret; 32]);
    let folder = tempfile::tempdir()?.keep();
    let path = folder.join("key");
    let mut options = std::fs::OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)?;
    std::io::Write::write_all(&mut file, key.to_text().as_bytes())?;
    // SAFETY: a process of a measurement has no other thread that asks for its environment yet.
    unsafe { std::env::set_var("CEDOS_KEY_FILE", &path) };
    Ok(key.public())
}

fn in_c(address: SocketAddr) -> Result<libc::sockaddr_in> {
    let IpAddr::V4(ip) = address.ip() else {
        bail!("the networks of the bench are IPv4")
    };
    Ok(libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(ip).to_be(),
        },
        sin_zero: [0; 8],
    })
}

fn timeout(fd: &Fd, option: c_int) -> Result<()> {
    let look = libc::timeval {
        tv_sec: 0,
        tv_usec: LOOK.as_micros() as libc::suseconds_t,
    };
    let value = (&raw const look).cast();
    let len = size_of::<libc::timeval>() as libc::socklen_t;
    check(unsafe { d2tp::d2tp_setsockopt(fd.0, libc::SOL_SOCKET, option, value, len) })?;
    Ok(())
}

fn is_again() -> bool {
    std::io::Error::last_os_error().kind() == std::io::ErrorKind::WouldBlock
}

impl Peer for Sockets {
    fn name(&self) -> &'static str {
        "d2tp-sockets"
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<Meter>,
        ready: &mut dyn FnMut(Card) -> Result<()>,
    ) -> Result<()> {
        let key = bring_key(2)?;
        let ear =
            Fd(check(d2tp::d2tp_socket(libc::AF_INET, libc::SOCK_STREAM, 0)).context("socket")?);
        let mut at = in_c((address, 0).into())?;
        let mut len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        check(unsafe { d2tp::d2tp_bind(ear.0, (&raw const at).cast(), len) }).context("bind")?;
        check(d2tp::d2tp_listen(ear.0, 1)).context("listen")?;
        check(unsafe { d2tp::d2tp_getsockname(ear.0, (&raw mut at).cast(), &mut len) })
            .context("name")?;
        let ip = Ipv4Addr::from(u32::from_be(at.sin_addr.s_addr));
        ready(Card {
            address: (ip, u16::from_be(at.sin_port)).into(),
            identity: key.0.to_vec(),
        })?;
        let none = std::ptr::null_mut();
        let flow = Fd(
            check(unsafe { d2tp::d2tp_accept(ear.0, none, std::ptr::null_mut()) })
                .context("accept")?,
        );
        timeout(&flow, libc::SO_RCVTIMEO)?;
        let mut buffer = vec![0u8; CALL_BYTES];
        while !meter.is_over() {
            let place = buffer.as_mut_ptr().cast::<c_void>();
            // SAFETY: the buffer has that many bytes.
            match unsafe { d2tp::d2tp_recv(flow.0, place, buffer.len(), 0) } {
                0 => break,
                count @ 1.. => meter.add(count as usize),
                _ if is_again() => {}
                _ => {
                    let error = std::io::Error::last_os_error();
                    return meter.forgive(Err(error).context("receiving"));
                }
            }
        }
        Ok(())
    }

    fn send(&self, card: &Card, meter: &Arc<Meter>) -> Result<()> {
        bring_key(1)?;
        let flow =
            Fd(check(d2tp::d2tp_socket(libc::AF_INET, libc::SOCK_STREAM, 0)).context("socket")?);
        let (key, len) = (card.identity.as_ptr().cast(), card.identity.len());
        let len = len as libc::socklen_t;
        check(unsafe { d2tp::d2tp_setsockopt(flow.0, SOL_D2TP, D2TP_SO_PEERKEY, key, len) })
            .context("key")?;
        let at = in_c(card.address)?;
        let len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        check(unsafe { d2tp::d2tp_connect(flow.0, (&raw const at).cast(), len) })
            .context("connect")?;
        timeout(&flow, libc::SO_SNDTIMEO)?;
        meter.note("calls of 256 kB that block; engine and program on one core".into());
        let payload = vec![0x5au8; CALL_BYTES];
        while !meter.is_over() {
            let place = payload.as_ptr().cast::<c_void>();
            // SAFETY: the buffer has that many bytes.
            match unsafe { d2tp::d2tp_send(flow.0, place, payload.len(), 0) } {
                count @ 0.. => meter.add(count as usize),
                _ if is_again() => {}
                _ => {
                    let error = std::io::Error::last_os_error();
                    return meter.forgive(Err(error).context("sending"));
                }
            }
        }
        Ok(())
    }
}
