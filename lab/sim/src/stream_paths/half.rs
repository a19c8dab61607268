//! One end of a stream: the program that opens it or answers, and carries packets.

use cedos_lab_link::{Span, Time};
use d2tp_device::StreamFailure;

use super::messages::{MessageKind, StreamMessageReader, packets};
use super::packet_queue::StreamPacketQueue;
use crate::tcp::{TcpConnection, TcpEnd};

/// The maximum time until the WebSocket is accepted. // edge/stream
const CONNECT_MAX: Span = Span::from_secs(10);

/// How long the device waits for a TCP connection to an HTTP proxy before it also tries without. // edge/stream
const HTTP_PROXY_WAIT: Span = Span::from_millis(500);

/// How the device begins a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamOpening {
    /// To the proxy itself, at once.
    Direct,
    /// Through the network's HTTP proxy.
    ByHttpProxy,
    /// To the proxy itself, after a known HTTP proxy has not answered.
    WithoutHttpProxy,
}

/// The host at one end of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamRole {
    Device,
    Proxy,
    /// A portal or a middlebox, which answers in place of every host.
    Interceptor,
}

/// How far the set-up has come: what this end waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StreamSetup {
    Connection,
    Connected,
    Hello,
    Certificate,
    Request,
    Answer,
    Nothing,
}

/// What the program of an end learns of its stream.
#[derive(Debug)]
pub(crate) enum StreamEvent {
    /// The device's stream is open.
    Opened,
    /// The device has no stream.
    Failed(StreamFailure),
    /// Packets that arrived together.
    Packets(Vec<Vec<u8>>),
    /// An open stream ended, or one of the proxy's did at any time.
    Ended,
}

/// One end of a stream.
#[derive(Debug)]
pub(crate) struct StreamHalf {
    pub(crate) tcp: TcpConnection,
    pub(crate) queue: StreamPacketQueue,
    role: StreamRole,
    waits_for: StreamSetup,
    reader: StreamMessageReader,
    began_at: Time,
    /// Whether the device asks an HTTP proxy for its connection.
    asks_http_proxy: bool,
    /// Whether the program has given up the stream.
    closed: bool,
}

impl StreamHalf {
    /// The device's end at the beginning; `segment_bytes` fit into a TCP segment of its link.
    pub(crate) fn open(now: Time, opening: StreamOpening, segment_bytes: usize) -> StreamHalf {
        let tcp = match opening {
            StreamOpening::WithoutHttpProxy => {
                TcpConnection::connect(now + HTTP_PROXY_WAIT, segment_bytes)
            }
            _ => TcpConnection::connect(now, segment_bytes),
        };
        StreamHalf {
            asks_http_proxy: opening == StreamOpening::ByHttpProxy,
            ..StreamHalf::new(now, StreamRole::Device, tcp, StreamSetup::Connection)
        }
    }

    /// The end that answers, in this role.
    pub(crate) fn answer(now: Time, role: StreamRole, segment_bytes: usize) -> StreamHalf {
        let tcp = TcpConnection::accept(now, segment_bytes);
        StreamHalf::new(now, role, tcp, StreamSetup::Hello)
    }

    fn new(now: Time, role: StreamRole, tcp: TcpConnection, waits_for: StreamSetup) -> StreamHalf {
        StreamHalf {
            tcp,
            queue: StreamPacketQueue::new(),
            role,
            waits_for,
            reader: StreamMessageReader::default(),
            began_at: now,
            asks_http_proxy: false,
            closed: false,
        }
    }

    /// The host at this end.
    pub(crate) fn role(&self) -> StreamRole {
        self.role
    }

    /// Whether neither the program nor TCP needs the end any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.closed && self.tcp.is_gone()
    }

    /// Closes the stream at once: what TCP has is still sent.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.tcp.close();
    }

    /// When the end has to run if nothing arrives. Without its program, only TCP does.
    pub(crate) fn next_timeout(&self, program_runs: bool) -> Option<Time> {
        let opens = program_runs && !self.closed && self.role == StreamRole::Device;
        let opens = opens && self.waits_for != StreamSetup::Nothing;
        let given_up = opens.then_some(self.began_at + CONNECT_MAX);
        self.tcp.next_timeout().into_iter().chain(given_up).min()
    }

    /// Lets the program read and write.
    pub(crate) fn run(&mut self, now: Time) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        if self.closed {
            return events;
        }
        if self.waits_for == StreamSetup::Connection && self.tcp.is_open() {
            let (kind, then) = match self.asks_http_proxy {
                true => (MessageKind::Connect, StreamSetup::Connected),
                false => (MessageKind::Hello, StreamSetup::Certificate),
            };
            self.say(kind);
            self.waits_for = then;
        }
        let read = self.tcp.read(now);
        self.reader.push(&read);
        while !self.closed
            && let Some((kind, content)) = self.reader.next()
        {
            self.on_message(kind, &content, &mut events);
        }
        if !self.closed && (self.tcp.end().is_some() || self.tcp.is_peer_done()) {
            self.on_end(&mut events);
        }
        let overdue = self.role == StreamRole::Device && now >= self.began_at + CONNECT_MAX;
        if !self.closed && overdue && self.waits_for != StreamSetup::Nothing {
            events.push(StreamEvent::Failed(StreamFailure::Unreachable));
            self.close();
        }
        if !self.closed && self.waits_for == StreamSetup::Nothing {
            self.queue.write(now, &mut self.tcp);
            if self.queue.is_finished() {
                self.close();
            }
        }
        events
    }

    fn say(&mut self, kind: MessageKind) {
        if self.tcp.is_open() {
            self.tcp.write(&kind.setup_message());
        }
    }

    fn on_message(&mut self, kind: MessageKind, content: &[u8], events: &mut Vec<StreamEvent>) {
        match (self.waits_for, kind) {
            // The HTTP proxy is as far away as the proxy behind it, and connects in no time.
            (StreamSetup::Hello, MessageKind::Connect) => self.say(MessageKind::Connected),
            (StreamSetup::Connected, MessageKind::Connected) => {
                self.say(MessageKind::Hello);
                self.waits_for = StreamSetup::Certificate;
            }
            (StreamSetup::Hello, MessageKind::Hello) => {
                self.say(MessageKind::Certificate);
                self.waits_for = StreamSetup::Request;
            }
            (StreamSetup::Certificate, MessageKind::Certificate) => {
                self.say(MessageKind::Request);
                self.waits_for = StreamSetup::Answer;
            }
            (StreamSetup::Request, MessageKind::Request) if self.role == StreamRole::Proxy => {
                self.say(MessageKind::Accepted);
                self.waits_for = StreamSetup::Nothing;
            }
            (StreamSetup::Request, MessageKind::Request) => {
                self.say(MessageKind::Page);
                self.close();
            }
            (StreamSetup::Answer, MessageKind::Accepted) => {
                self.waits_for = StreamSetup::Nothing;
                events.push(StreamEvent::Opened);
            }
            (StreamSetup::Answer, _) => {
                // R-STREAM-7
                events.push(StreamEvent::Failed(StreamFailure::Foreign));
                self.close();
            }
            (StreamSetup::Nothing, MessageKind::Packets) => {
                events.push(StreamEvent::Packets(packets(content)));
            }
            (waits_for, kind) => unreachable!("{kind:?} for {waits_for:?}"),
        }
    }

    fn on_end(&mut self, events: &mut Vec<StreamEvent>) {
        let end = self.tcp.end();
        events.push(match (self.role, self.waits_for) {
            (StreamRole::Device, StreamSetup::Nothing) => StreamEvent::Ended,
            (StreamRole::Device, _) => StreamEvent::Failed(match end {
                Some(TcpEnd::Refused) => StreamFailure::Refused,
                Some(TcpEnd::TimedOut) => StreamFailure::Unreachable,
                _ => StreamFailure::Foreign,
            }),
            _ => StreamEvent::Ended,
        });
        self.close();
    }
}
