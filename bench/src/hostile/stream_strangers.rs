//! Strangers at the port for streams: who has no admitted key, and no wish to show one.
//!
//! ```text
//!  TCP ─▶ [TLS] ─▶ GET /d2tp, Upgrade ─▶ binary messages        each is where some of them stop, or go on wrongly
//! ```

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use d2tp_wire::Cid;

use super::attack_context::{AttackContext, AttackTally, STRANGERS};
use super::raw_client::syn;
use super::tcp_flood::{Reading, Script, ScriptedConnection, connect, keep_connections};
use crate::credential::{SERVER_NAME, client_config};
use crate::handshake_hosts::key_of;

/// Connections that are kept open: more than there are places for.
const CONNECTIONS: usize = 512;
/// Connections that send as fast as they can.
const FLOODS: usize = 32;
/// The content of a ping: the largest (RFC 6455 §5.5).
const PING_BYTES: usize = 125;
/// Packets of a message, and their size.
const PACKETS: u64 = 16;
const PACKET_BYTES: usize = 1_200;

const PING: u8 = 0x9;
const CONTINUATION: u8 = 0x0;
const BINARY: u8 = 0x2;
/// The bit of the last fragment of a message.
const FINAL: u8 = 0x80;

/// What the strangers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamAbuse {
    /// Each falls silent, at another point of the set-up.
    Silence,
    /// Bytes that are no stream.
    Garbage,
    /// Packets of no session, and SYNs of keys that are not admitted.
    Packets,
    /// Pings, whose answers are not read.
    Pings,
}

/// Opens streams and abuses them until the time is over.
pub fn attack_streams(abuse: StreamAbuse, context: &AttackContext) -> Result<AttackTally> {
    let to = context.tcp.streams.context("the proxy takes no streams")?;
    let tls = Arc::new(client_config(&context.tcp.certificate)?);
    let count = match abuse {
        StreamAbuse::Silence => CONNECTIONS,
        StreamAbuse::Garbage | StreamAbuse::Packets | StreamAbuse::Pings => FLOODS,
    };
    keep_connections(count, context.until, |number| {
        let tcp = connect(to, number)?;
        let (tcp, reading, script) = match abuse {
            StreamAbuse::Silence => (silent(tcp, number, &tls)?, Reading::Nothing, nothing()),
            StreamAbuse::Garbage => garbage(tcp, number)?,
            StreamAbuse::Packets => {
                let message = frame(FINAL | BINARY, &strange_packets(number, context)?);
                (websocket(tcp)?, Reading::Nothing, endless(message))
            }
            StreamAbuse::Pings => {
                let pings = frame(FINAL | PING, &[b'x'; PING_BYTES]).repeat(100);
                (websocket(tcp)?, Reading::Nothing, endless(pings))
            }
        };
        ScriptedConnection::new(tcp, reading, script)
    })
}

/// Goes as far as the number says, and no further.
fn silent(mut tcp: TcpStream, number: u64, tls: &Arc<ClientConfig>) -> Result<TcpStream> {
    match number % 5 {
        0 => {}
        1 => {
            let hello = client_hello(tls)?;
            tcp.write_all(&hello[..hello.len() / 2])?;
        }
        2 => tcp.write_all(b"GET /d2tp HTTP/1.1\r\nHost: proxy\r\nUpgr")?,
        3 => {
            let name = ServerName::try_from(SERVER_NAME)?;
            let mut connection = ClientConnection::new(tls.clone(), name)?;
            while connection.is_handshaking() {
                connection.complete_io(&mut tcp)?;
            }
        }
        _ => tcp = websocket(tcp)?,
    }
    Ok(tcp)
}

fn client_hello(tls: &Arc<ClientConfig>) -> Result<Vec<u8>> {
    let name = ServerName::try_from(SERVER_NAME)?;
    let mut connection = ClientConnection::new(tls.clone(), name)?;
    let mut hello = Vec::new();
    connection.write_tls(&mut hello)?;
    Ok(hello)
}

/// Sends without an end what is, at one point or another, not what should come.
fn garbage(tcp: TcpStream, number: u64) -> Result<(TcpStream, Reading, Script)> {
    let begun = |mut tcp: TcpStream, first: &[u8]| -> Result<TcpStream> {
        tcp.write_all(first)?;
        Ok(tcp)
    };
    // The beginning of a frame with a message of so many bytes, which hides nothing.
    let head = |bytes: u64| {
        let mut head = vec![FINAL | BINARY, 0x80 | 127];
        head.extend_from_slice(&bytes.to_be_bytes());
        head.extend_from_slice(&[0; 4]);
        head
    };
    Ok(match number % 5 {
        // Records of TLS that are none.
        0 => {
            let records = [&[0x16, 3, 1, 0x3f, 0xff][..], &noise(number, 16_383)].concat();
            (tcp, Reading::All, endless(records))
        }
        // A head without an end.
        1 => {
            let tcp = begun(tcp, b"GET /d2tp HTTP/1.1\r\n")?;
            let field = format!("x-filler: {}\r\n", "f".repeat(1_000));
            (tcp, Reading::All, endless(field.into_bytes()))
        }
        // A frame of 2^62 bytes.
        2 => {
            let tcp = begun(websocket(tcp)?, &head(1 << 62))?;
            (tcp, Reading::All, endless(noise(number, 16 * 1024)))
        }
        // A message of fragments without an end, some of them empty.
        3 => {
            let tcp = begun(websocket(tcp)?, &frame(BINARY, &[0; 64]))?;
            let fragments = [frame(CONTINUATION, &[0]), frame(CONTINUATION, &[])].concat();
            (tcp, Reading::All, endless(fragments.repeat(500)))
        }
        // A message that is as large as one may be, and never complete.
        _ => {
            let message = [head(128 * 1024), noise(number, 127 * 1024)].concat();
            let tcp = begun(websocket(tcp)?, &message)?;
            (tcp, Reading::Nothing, nothing())
        }
    })
}

/// A message of packets that a server has no use for: of no session, or SYNs of keys that are not admitted.
fn strange_packets(number: u64, context: &AttackContext) -> Result<Vec<u8>> {
    let packet = |n: u64| -> Result<Vec<u8>> {
        let instance = number * PACKETS + n;
        if number.is_multiple_of(2) {
            return Ok(noise(instance, PACKET_BYTES));
        }
        let key = key_of(STRANGERS + instance);
        let cid = Cid((instance << 8).to_be_bytes());
        Ok(syn(&context.proxy_key, &key, instance, 1, cid)?.1)
    };
    let packets: Result<Vec<Vec<u8>>> = (0..PACKETS).map(packet).collect();
    Ok(message_of(&packets?))
}

/// Arbitrary bytes, the same for the same number.
fn noise(number: u64, bytes: usize) -> Vec<u8> {
    let mut random = d2tp_session::Rng::new([number as u8; 32]);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.u64().to_le_bytes());
    words.take(bytes).collect()
}

/// The content of a message: each packet after its length (R-STREAM-1).
fn message_of(packets: &[Vec<u8>]) -> Vec<u8> {
    let mut message = Vec::new();
    for packet in packets {
        message.extend_from_slice(&(packet.len() as u16).to_be_bytes());
        message.extend_from_slice(packet);
    }
    message
}

/// Opens a stream over plain HTTP, as a reverse proxy does: an attacker has no use for TLS.
fn websocket(mut tcp: TcpStream) -> Result<TcpStream> {
    tcp.write_all(
        b"GET /d2tp HTTP/1.1\r\nHost: proxy\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
          Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
          Sec-WebSocket-Protocol: d2tp\r\n\r\n",
    )?;
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(head.len() < 4_096, "the proxy's answer has no end");
        if tcp.read(&mut byte)? == 0 {
            bail!("the proxy has no place for a stream");
        }
        head.push(byte[0]);
    }
    ensure!(
        head.starts_with(b"HTTP/1.1 101 "),
        "the proxy refuses a stream"
    );
    Ok(tcp)
}

/// A frame of WebSocket as a client sends it, with a mask that changes nothing (RFC 6455 §5.2).
fn frame(first: u8, content: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match content.len() {
        length @ 0..=125 => frame.push(0x80 | length as u8),
        length => {
            frame.push(0x80 | 126);
            frame.extend_from_slice(&(length as u16).to_be_bytes());
        }
    }
    frame.extend_from_slice(&[0; 4]);
    frame.extend_from_slice(content);
    frame
}

fn nothing() -> Script {
    Box::new(|_| {})
}

/// A script that writes the same bytes again and again.
fn endless(bytes: Vec<u8>) -> Script {
    Box::new(move |unsent| unsent.extend_from_slice(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_masked_and_has_its_length() {
        assert_eq!(frame(FINAL | PING, b"ab"), b"\x89\x82\0\0\0\0ab");
        let long = frame(FINAL | BINARY, &[7; 300]);
        assert_eq!(long[..8], [0x82, 0xfe, 1, 44, 0, 0, 0, 0]);
        assert_eq!(long.len(), 308);
    }
}
