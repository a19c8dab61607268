//! A client that violates the protocol: a valid handshake by `d2tp-seal`, then arbitrary frames, in
//! its own packets.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use d2tp_seal::{
    CipherSuite, Initiator, PacketKeys, PublicKey, SYN_OVERHEAD_BYTES, SecretKey, SynMacs,
};
use d2tp_wire::{
    Cid, DATAGRAM_FIRST_BYTES, Frame, PacketKind, PathId, PathStatus, ReasonCode, TAG_BYTES,
    VERSION, WireReader, WireWriter,
};

const PROLOGUE: &[u8] = &[b'D', b'2', b'T', b'P', VERSION];
/// How long an answer to a SYN may take.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// The number of SYNs before it gives up.
const TRIES: u32 = 6;

/// A connected client on path 0.
pub struct RawClient {
    socket: UdpSocket,
    keys: PacketKeys,
    server_cid: Cid,
    number: u64,
}

impl RawClient {
    /// Completes a handshake as instance `instance` of `key`.
    ///
    /// # Errors
    /// The server does not admit it.
    pub fn enter(
        server: SocketAddr,
        server_key: &PublicKey,
        key: &SecretKey,
        instance: u64,
    ) -> Result<RawClient> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(server)?;
        socket.set_read_timeout(Some(ANSWER_WITHIN))?;
        for epoch in 1..=TRIES {
            let cid = Cid((instance << 8 | u64::from(epoch)).to_be_bytes());
            let (mut initiator, syn) = syn(server_key, key, instance, epoch, cid)?;
            socket.send(&syn)?;
            let mut answer = [0; 2048];
            let Ok(length) = socket.recv(&mut answer) else {
                continue;
            };
            let Some((PacketKind::SynAck, _, to, body)) = PacketKind::split(&answer[..length])
            else {
                continue;
            };
            if to != cid {
                continue;
            }
            let mut payload = [0; 1500];
            let finished = initiator.finish(body, &mut payload);
            let Ok((secrets, length)) = finished else {
                continue;
            };
            let mut reader = WireReader::new(&payload[..length]);
            if reader.u8()? != 0 {
                bail!("the server does not let a hostile client in");
            }
            let server_cid = Cid(reader.array()?);
            let _token: [u8; 16] = reader.array()?;
            let suite = CipherSuite::from_code(reader.u8()?).context("a suite")?;
            let mut client = RawClient {
                socket,
                keys: PacketKeys::new(suite, &secrets, true),
                server_cid,
                number: 0,
            };
            client.send(&[Frame::PathStatus {
                path: PathId(0),
                seq: 1,
                status: PathStatus::Available,
                gated: false,
                reason: ReasonCode::None,
            }])?;
            return Ok(client);
        }
        bail!("the server does not answer a hostile client")
    }

    /// Sends frames in one packet.
    ///
    /// # Errors
    /// The socket failed.
    pub fn send(&mut self, frames: &[Frame<'_>]) -> Result<()> {
        let mut packet = [0; 2048];
        packet[0] = PacketKind::Data.first_byte();
        packet[1..9].copy_from_slice(&self.server_cid.0);
        let mut writer = WireWriter::new(&mut packet[13..]);
        for frame in frames {
            frame.encode(&mut writer);
        }
        let length = 13 + writer.written() + TAG_BYTES;
        self.keys
            .seal(PathId(0), self.number, &mut packet[..length]);
        self.number += 1;
        self.socket.send(&packet[..length])?;
        Ok(())
    }
}

/// A SYN of full size, and the state that completes its handshake.
pub fn syn(
    server_key: &PublicKey,
    key: &SecretKey,
    instance: u64,
    epoch: u32,
    cid: Cid,
) -> Result<(Initiator, Vec<u8>)> {
    let mut syn = vec![0; DATAGRAM_FIRST_BYTES];
    let mut payload = [0; DATAGRAM_FIRST_BYTES - 9 - SYN_OVERHEAD_BYTES - SynMacs::BYTES];
    let mut writer = WireWriter::new(&mut payload);
    writer.u64(instance);
    writer.u32(epoch);
    writer.u8(1);
    writer.u8(CipherSuite::Aes128Gcm.code());
    writer.varint(1 << 30);
    writer.varint(1 << 30);
    writer.u8(0);
    syn[0] = PacketKind::Syn.first_byte();
    syn[1..9].copy_from_slice(&cid.0);
    let end = syn.len() - SynMacs::BYTES;
    let mut seed = [0x5e; 32];
    seed[..8].copy_from_slice(&instance.to_be_bytes());
    seed[8..12].copy_from_slice(&epoch.to_be_bytes());
    let started = Initiator::start(key, server_key, PROLOGUE, seed, &payload, &mut syn[9..end]);
    let (initiator, _) = started.ok().context("no SYN can be made")?;
    SynMacs::write(&mut syn, server_key, None);
    Ok((initiator, syn))
}
