//! The messages between this library and an agent about one connection: JSON objects, one per line,
//! on a separate connection to the agent's socket (`docs/agent.md`, "Sockets of programs").
//!
//! ```text
//!  {"do":"socket","version":1,"server":…,"options":…}  ▶
//!                                                      ◀ {"event":"taken","ok":true,"version":1}
//!  {"do":"carry","from":40112}  and a descriptor       ▶
//!                                                      ◀ {"event":"open"}      then the program is connected
//!  {"do":"options",…}, {"do":"flush",…}, {"do":"info"} ▶
//!                                                      ◀ {"event":"answer",…}
//!                                                      ◀ {"event":"fault",…}   before the descriptor breaks
//!  {"do":"d-lock","held":true}                         ▶
//!  {"do":"heard"}                                      ▶
//!                                                      ◀ {"event":"over"}
//! ```
//!
//! A datagram socket's descriptor comes last, after what waited for its session:
//!
//! ```text
//!  {"do":"socket",…,"datagrams":true}                  ▶
//!                                                      ◀ taken, {"event":"room","bytes":1116}, {"event":"open"}
//!  {"do":"message",…}   what was sent so far           ▶
//!  {"do":"carry",…}     and a descriptor               ▶   later messages use that
//!  {"do":"message",…}   messages with their own options ▶
//!  {"do":"closed"}                                     ▶
//!                                                      ◀ {"event":"over"}
//! ```
//!
//! Where the agent says `"resumes":true`, a connection can outlive it ([`crate::connection_store`]):
//!
//! ```text
//!  {"do":"store"}  and memory                          ▶   before `carry`
//!                                                      ◀ {"event":"open","claim":{…}}
//!                  that agent ends, another one begins
//!  {"do":"socket",…,"resumes":{…}}, store, carry       ▶
//!                                                      ◀ taken, {"event":"open","claim":{…}}
//! ```
//!
//! Connections that can be opened again have a few more messages ([`crate::agent_client`]).

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use d2tp_driver::PathSelection;
use d2tp_sched::{CostPolicy, DeadlineFallback};
use libc::c_int;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::clock::since_boot;
use crate::errno::SocketFault;
use crate::info::D2tpInfo;
use crate::options::{EXPIRY, PersistMode, SocketOptions, expiry_of};
use crate::rcvbuf_thresholds::RcvbufThresholds;
use crate::reopen_token::ReopenToken;

/// The version of these messages. An agent of another version does not understand them, and the process
/// then carries its socket itself.
pub const VERSION: u32 = 1;
/// The most bytes of a line.
pub(crate) const LINE_BYTES_MAX: usize = 64 * 1024;
/// The size of a read.
const READ_BYTES: usize = 4 * 1024;
/// The most descriptors in one message.
pub(crate) const PASSED_MAX: usize = 1;

/// A request to carry a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCall {
    /// Version of the messages.
    pub version: u32,
    /// The D2TP server, `d2tp://host:port/KEY`, or several proxies, separated by spaces.
    pub(crate) server: String,
    /// The host and port to request from the server, if it is a proxy.
    #[serde(default)]
    pub(crate) target: Option<String>,
    /// The path of the device's key file.
    pub(crate) key: PathBuf,
    pub(crate) options: SocketTerms,
    /// Options of a persistent connection. An agent that does not know this field cannot carry one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) keep: Option<ReopenOptions>,
    /// Whether the socket is a datagram socket. An agent that does not know this field cannot carry
    /// one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) datagrams: bool,
    /// The claim of a connection that another agent carried. An agent that does not know this field cannot carry it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) resumes: Option<ConnectionClaim>,
}

/// By what the next agent finds a connection: its flow, in the session of an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConnectionClaim {
    /// The server that the session is with.
    pub(crate) server: String,
    /// The number of the device's instance.
    pub(crate) instance: u64,
    pub(crate) flow: u64,
    /// The offsets of the program's first byte in both directions of the flow: what is sent, and what is received.
    pub(crate) sent_base: u64,
    pub(crate) received_base: u64,
}

/// Options of a connection that may be opened again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReopenOptions {
    pub(crate) token: ReopenToken,
    /// Whether the program asked for an IPv6 socket.
    pub(crate) ipv6: bool,
}

/// The current options of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SocketTerms {
    left_ms: Option<u64>,
    size: Option<u64>,
    policy: String,
    budget: Option<u64>,
    priority: u8,
    if_late: String,
    route: String,
    persist: bool,
    /// Receive buffer thresholds. An agent that does not know this field leaves such sockets to their
    /// programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    levels: Option<RcvbufThresholds>,
    /// How long a datagram is worth sending, if not the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expiry_ms: Option<u64>,
}

const ROUTE_WORDS: [(PathSelection, &str); 3] = [
    (PathSelection::Any, "any"),
    (PathSelection::Steadiest, "steadiest"),
    (PathSelection::Each, "each"),
];

fn route_name(route: PathSelection) -> &'static str {
    let known = ROUTE_WORDS.iter().find(|(r, _)| *r == route);
    known.map_or("any", |(_, word)| word)
}

fn route_from_name(word: &str) -> Option<PathSelection> {
    let known = ROUTE_WORDS.iter().find(|(_, w)| *w == word);
    known.map(|(route, _)| *route)
}

/// A datagram that does not use the socket's descriptor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AgentDatagram {
    /// The datagram in base64.
    bytes: String,
    /// The path selection, if it differs from the socket's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    route: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expiry_ms: Option<u64>,
}

impl AgentDatagram {
    pub(crate) fn new(
        bytes: &[u8],
        route: Option<PathSelection>,
        expiry: Option<Duration>,
    ) -> AgentDatagram {
        AgentDatagram {
            bytes: BASE64_STANDARD.encode(bytes),
            route: route.map(|route| route_name(route).to_owned()),
            expiry_ms: expiry.map(|expiry| expiry.as_millis() as u64),
        }
    }

    pub(crate) fn bytes(&self) -> Option<Vec<u8>> {
        BASE64_STANDARD.decode(&self.bytes).ok()
    }

    pub(crate) fn route(&self) -> Option<PathSelection> {
        route_from_name(self.route.as_ref()?)
    }

    pub(crate) fn expiry(&self) -> Option<Duration> {
        self.expiry_ms.map(expiry_of)
    }
}

impl From<&SocketOptions> for SocketTerms {
    fn from(options: &SocketOptions) -> SocketTerms {
        SocketTerms {
            left_ms: options.time_left().map(|left| left.as_millis() as u64),
            size: options.size,
            policy: options.policy.as_str().to_owned(),
            budget: options.budget,
            priority: options.priority,
            if_late: options.if_late.as_str().to_owned(),
            route: route_name(options.route).to_owned(),
            persist: options.persist != PersistMode::No,
            levels: options.thresholds,
            expiry_ms: (options.expiry != EXPIRY).then_some(options.expiry.as_millis() as u64),
        }
    }
}

impl TryFrom<&SocketTerms> for SocketOptions {
    type Error = SocketFault;
    fn try_from(terms: &SocketTerms) -> Result<SocketOptions, SocketFault> {
        let nonsense = |text: String| SocketFault::new(libc::EINVAL, text);
        let policy: CostPolicy = terms.policy.parse().map_err(|e| nonsense(format!("{e}")))?;
        let if_late: DeadlineFallback = terms
            .if_late
            .parse()
            .map_err(|e| nonsense(format!("{e}")))?;
        let route = route_from_name(&terms.route);
        let route = route.ok_or_else(|| nonsense(format!("`{}` is no route", terms.route)))?;
        if terms.levels.is_some_and(|levels| !levels.is_valid()) {
            return Err(nonsense("thresholds that no program may ask for".into()));
        }
        Ok(SocketOptions {
            deadline: terms
                .left_ms
                .map(|left| since_boot() + Duration::from_millis(left)),
            size: terms.size,
            policy,
            budget: terms.budget,
            priority: terms.priority,
            if_late,
            route,
            expiry: terms.expiry_ms.map_or(EXPIRY, expiry_of),
            persist: match terms.persist {
                true => PersistMode::Written,
                false => PersistMode::No,
            },
            thresholds: terms.levels,
            ..SocketOptions::default()
        })
    }
}

/// A message to the agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum MessageToAgent {
    Socket(Box<AgentCall>),
    /// Asks the agent to carry the connection. The other end of the program's stream socket comes
    /// with this message, not connected yet; a datagram socket waits at this port.
    Carry {
        from: u16,
    },
    /// Memory for a connection that is to outlive the agent comes with this message ([`crate::connection_store`]).
    Store,
    Options {
        options: SocketTerms,
    },
    Flush {
        ask: u64,
        /// Bytes that the program has written since the connection began.
        bytes: u64,
    },
    /// Cancels a flush request.
    Forget {
        ask: u64,
    },
    Info {
        ask: u64,
    },
    /// A message of a datagram socket.
    Message(AgentDatagram),
    /// The program has closed its datagram socket. Stream sockets show this by their descriptors.
    Closed,
    /// The program knows the fault, so the agent may now reset the socket.
    Heard,
    /// The networks changed in a way that the agent may not have seen.
    NetworkChanged,
    /// Whether the program holds a D-Lock; at the start it holds none.
    DLock {
        held: bool,
    },
    /// The descriptor is closed, and the connection will not be opened again.
    Release {
        ask: u64,
    },
    /// Sent instead of `Socket`: the descriptor of a program follows, whose connection may be
    /// opened again with this claim.
    Keep(ReopenClaim),
    /// The program's descriptor comes with this message.
    Left,
    /// Sent instead of `Socket`: opens a connection again.
    Reopen(ReopenClaim),
    /// Requests the descriptor of a connection that was opened again.
    Descriptor(ReopenClaim),
}

/// A message from the agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum MessageFromAgent {
    /// The agent accepts the socket. An agent that does not support sockets answers `ok: false`,
    /// without an `event`.
    Taken {
        ok: bool,
        version: u32,
        /// Whether the agent understands `network-changed`. One that does not would close the
        /// connection.
        #[serde(default)]
        notices: bool,
        /// Whether the agent understands `d-lock`.
        #[serde(default)]
        locks: bool,
        /// Whether the agent understands `store`, and carries connections on.
        #[serde(default)]
        resumes: bool,
    },
    /// The connection is established; the descriptor is connected next.
    Open {
        /// By what another agent carries it on, if that is possible.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claim: Option<ConnectionClaim>,
    },
    /// Datagrams of this many bytes fit in a packet now.
    Room { bytes: usize },
    /// The connection failed, or breaks now.
    Fault { errno: c_int, text: String },
    Answer {
        ask: u64,
        #[serde(default)]
        fault: Option<(c_int, String)>,
        #[serde(default)]
        info: Option<Box<D2tpInfo>>,
    },
    /// The connection belongs to this process from now on, unchanged.
    Reopened {
        server: String,
        target: Option<String>,
        ipv6: bool,
        options: SocketTerms,
    },
    /// The connection is over.
    Over {
        #[serde(default)]
        info: Option<Box<D2tpInfo>>,
    },
}

impl MessageFromAgent {
    pub(crate) fn fault(fault: &SocketFault) -> MessageFromAgent {
        MessageFromAgent::Fault {
            errno: fault.errno,
            text: fault.text.clone(),
        }
    }
}

/// Reads the messages of one side: complete lines, and the descriptors that came with them.
pub(crate) struct MessageReader {
    stream: Rc<UnixStream>,
    buffer: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl MessageReader {
    pub(crate) fn new(stream: Rc<UnixStream>) -> MessageReader {
        MessageReader {
            stream,
            buffer: Vec::new(),
            descriptors: VecDeque::new(),
        }
    }

    /// The next message; `None` at the end. The future may be dropped and the call repeated.
    ///
    /// # Errors
    /// The message is malformed, or the connection broke.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(io::Error::other("a line that is too long"));
            }
            let stream = self.stream.clone();
            let (bytes, fds) = stream
                .async_io(Interest::READABLE, || receive(&stream))
                .await?;
            if bytes.is_empty() {
                return Ok(None);
            }
            self.buffer.extend(bytes);
            self.descriptors.extend(fds);
        }
    }

    /// Takes the descriptor that came with the last message.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }
}

fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; READ_BYTES];
    let mut space = nix::cmsg_space!([libc::c_int; PASSED_MAX]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(stream.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(passed) = control {
            // SAFETY: the kernel has just created them for this process.
            let owned = passed
                .into_iter()
                .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
            fds.extend(owned);
        }
    }
    let length = message.bytes;
    bytes.truncate(length);
    Ok((bytes, fds))
}

/// Sends a message, with a descriptor if one is given.
///
/// # Errors
/// The other end is closed.
pub(crate) async fn send_message<T: Serialize>(
    stream: &UnixStream,
    what: &T,
    fd: Option<OwnedFd>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    let mut from = 0;
    let mut fd = fd;
    while from < line.len() {
        let fds: Vec<c_int> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        let slices = [IoSlice::new(&line[from..])];
        from += stream
            .async_io(Interest::WRITABLE, || {
                let sent = sendmsg::<()>(stream.as_raw_fd(), &slices, rights, flags, None);
                sent.map_err(io::Error::from)
            })
            .await?;
        fd = None;
    }
    Ok(())
}

/// A claim on a connection that outlives its program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReopenClaim {
    /// The version of the messages.
    pub version: u32,
    pub(crate) token: ReopenToken,
}

impl ReopenClaim {
    pub(crate) fn to(token: ReopenToken) -> ReopenClaim {
        ReopenClaim {
            version: VERSION,
            token,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn what_a_program_asks_for_is_the_same_at_the_agent() {
        let numbers = [1_000, 2_000, 0].map(u64::to_ne_bytes);
        let levels = RcvbufThresholds::of_bytes(&numbers.concat());
        let options = SocketOptions {
            deadline: Some(since_boot() + Duration::from_secs(60)),
            size: Some(94_000_000),
            policy: CostPolicy::Balanced,
            budget: Some(5_000_000),
            priority: 3,
            if_late: DeadlineFallback::Wait,
            route: PathSelection::Each,
            persist: PersistMode::Written,
            thresholds: levels.unwrap(),
            expiry: Duration::from_millis(250),
            ..SocketOptions::default()
        };
        let text = serde_json::to_string(&SocketTerms::from(&options)).unwrap();
        let terms: SocketTerms = serde_json::from_str(&text).unwrap();
        let there = SocketOptions::try_from(&terms).unwrap();
        let left = there.time_left().unwrap();
        assert!(left > Duration::from_secs(58) && left <= Duration::from_secs(60));
        assert_eq!(
            SocketOptions {
                deadline: None,
                ..there
            },
            SocketOptions {
                deadline: None,
                ..options
            }
        );
        let mut nonsense = terms.clone();
        nonsense.levels =
            serde_json::from_str(r#"{"low":9,"high":3,"unit":"ms","rate":0}"#).unwrap();
        assert!(
            SocketOptions::try_from(&nonsense).is_err(),
            "low above high"
        );
        let mut nonsense = terms;
        nonsense.policy = "cheap".into();
        assert_eq!(
            SocketOptions::try_from(&nonsense).unwrap_err().errno,
            libc::EINVAL
        );
    }

    #[test]
    fn what_a_message_asks_for_itself_comes_with_it() {
        let bytes: Vec<u8> = (0..=255).collect();
        for (route, expiry) in [
            (None, None),
            (Some(PathSelection::Each), Some(Duration::from_millis(7))),
        ] {
            let said = MessageToAgent::Message(AgentDatagram::new(&bytes, route, expiry));
            let text = serde_json::to_string(&said).unwrap();
            let Ok(MessageToAgent::Message(there)) = serde_json::from_str(&text) else {
                panic!("{text}");
            };
            let asked = (there.bytes(), there.route(), there.expiry());
            assert_eq!(asked, (Some(bytes.clone()), route, expiry));
        }
        // No program sends these values, and none of them harms an agent.
        for ms in [0, u64::MAX] {
            let text = format!(r#"{{"bytes":"=","route":"moon","expiry_ms":{ms}}}"#);
            let there: AgentDatagram = serde_json::from_str(&text).unwrap();
            assert_eq!((there.bytes(), there.route()), (None, None));
            let expiry = there.expiry().unwrap();
            assert!(!expiry.is_zero() && expiry <= Duration::from_secs(86_400));
        }
    }

    #[test]
    fn a_call_says_nothing_that_an_agent_of_before_does_not_know_unless_it_is_needed() {
        let mut call = AgentCall {
            version: VERSION,
            server: "d2tp://host:1/KEY".into(),
            target: None,
            key: "/key".into(),
            options: SocketTerms::from(&SocketOptions::default()),
            keep: None,
            datagrams: false,
            resumes: None,
        };
        let text = serde_json::to_string(&call).unwrap();
        assert!(
            !text.contains("datagrams") && !text.contains("expiry"),
            "{text}"
        );
        call.datagrams = true;
        let text = serde_json::to_string(&call).unwrap();
        assert!(text.contains(r#""datagrams":true"#), "{text}");
        assert_eq!(serde_json::from_str::<AgentCall>(&text).unwrap(), call);
        // Read by an agent of an earlier version.
        let asked = serde_json::to_string(&MessageToAgent::Socket(Box::new(call))).unwrap();
        let unknown = asked.replace("\"datagrams\"", "\"smoke-signals\"");
        assert!(serde_json::from_str::<MessageToAgent>(&asked).is_ok());
        assert!(serde_json::from_str::<MessageToAgent>(&unknown).is_err());
    }

    #[test]
    fn lines_come_whole_and_a_descriptor_comes_with_its_line() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (here, there) = UnixStream::pair().unwrap();
            let mut reader = MessageReader::new(Rc::new(there));
            let (mut read, write) = nix::unistd::pipe().unwrap();
            send_message(&here, &MessageToAgent::Heard, None)
                .await
                .unwrap();
            let carry = MessageToAgent::Carry { from: 7 };
            send_message(
                &here,
                &carry,
                Some(read.as_fd().try_clone_to_owned().unwrap()),
            )
            .await
            .unwrap();
            drop(here);
            assert!(matches!(
                reader.next().await,
                Ok(Some(MessageToAgent::Heard))
            ));
            let second = reader.next().await.unwrap();
            assert!(matches!(second, Some(MessageToAgent::Carry { from: 7 })));
            read = reader.take_descriptor().expect("it came along");
            nix::unistd::write(&write, b"x").unwrap();
            let mut byte = [0];
            assert_eq!(nix::unistd::read(&read, &mut byte).unwrap(), 1);
            assert!(matches!(reader.next::<MessageToAgent>().await, Ok(None)));
        });
    }
}
