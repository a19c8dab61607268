//! Simulates a video in two layers over DATAGRAMs, in virtual time, with the real core.
//!
//! ```text
//!  server ── base layer, 300 kb/s, and enhancement, as much as seems to fit ──▶ device
//!         ◀── a report each 100 ms · a command now and then ──
//! ```
//!
//! The sender adapts to the reports: faster while little is lost, slower with loss, and half as
//! fast for each half second without a report, because it cannot distinguish a silent viewer from a
//! congested network. A report without received messages changes nothing. A frame counts if all of
//! it arrived in time, an enhancement only with its base. The same application runs with every use
//! of the links; only the route of each kind of message differs (Super-aggregation §5.1).

use bytes::Bytes;
use cedos_lab_link::{PushOutcome, Span, Time};
use cedos_lab_scenario::{EventKind, Scenario};
use d2tp_session::{
    Addresses, Admission, Endpoint, EndpointConfig, FirstHopStatus, IncomingDatagram, LinkId,
    PathSelection, SecretKey, Session, SessionEvent, SessionId,
};

use crate::network::SimNetwork;

/// The interval between pictures.
const PICTURE: Span = Span::from_millis(40);
/// The time after which an incomplete picture is not shown. // a guess: tolerable in a conversation
const LATE: Span = Span::from_millis(300);
const REPORT: Span = Span::from_millis(100);
/// How long the sender waits without a report before it slows down.
const UNHEARD: Span = Span::from_millis(500);
/// The time after which a command without an effect is repeated.
const AGAIN: Span = Span::from_millis(500);
/// The interval between commands, not a multiple of any other interval here.
const COMMAND: Span = Span::from_millis(1_370);
/// The bytes of a picture's base layer: 300 kb/s.
const BASE_BYTES: u64 = 1_500;
/// The initial rate of the enhancement in bits per second.
const EXTRA_FIRST: f64 = 1_000_000.0;
/// The highest rate of the enhancement in bits per second.
const EXTRA_MAX: f64 = 6_000_000.0;
/// The most bytes of a message.
const MESSAGE_BYTES: usize = 1_000;
/// How long an answer of a first hop is waited for, as in the driver.
const HOP_PATIENCE: Span = Span::from_millis(100);

/// How the links are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoLinkUse {
    /// The number of the scenario's links that are used.
    pub links: usize,
    /// The route of reports.
    pub reports: PathSelection,
    /// The route of commands.
    pub commands: PathSelection,
    /// The route of base layers; enhancements use any path.
    pub base: PathSelection,
}

impl VideoLinkUse {
    /// A device with this many links and default routes.
    pub const fn plain(links: usize) -> VideoLinkUse {
        VideoLinkUse {
            links,
            reports: PathSelection::Any,
            commands: PathSelection::Any,
            base: PathSelection::Any,
        }
    }

    /// Reports on the steadier link, commands and base layers on both.
    pub const THREE: VideoLinkUse = VideoLinkUse {
        links: 2,
        reports: PathSelection::Steadiest,
        commands: PathSelection::Each,
        base: PathSelection::Each,
    };
}

/// The quality of a video.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VideoQuality {
    /// The number of pictures sent.
    pub pictures: u64,
    /// Pictures whose base arrived in time.
    pub base: u64,
    /// Payload bytes of enhancements that could be shown.
    pub extra_bytes: u64,
    /// The number of reports sent.
    pub reports: u64,
    /// Reports that arrived within 300 ms.
    pub reports_in_time: u64,
    /// The longest time between reports at the sender.
    pub report_gap_max: Span,
    /// The delay of each command, from sending to arrival.
    pub commands: Vec<Span>,
    /// Commands that were repeated.
    pub given_again: u64,
    /// Bytes of IP packets by link, to the device and from it.
    pub bytes_by_link: Vec<(u64, u64)>,
}

/// A picture as the viewer has received it.
#[derive(Clone, Copy, Default)]
struct ReceivedPicture {
    base: (u16, u16),
    extra: (u16, u16),
    extra_bytes: u64,
}

/// The head of a message: its kind, its picture, its piece and the number of pieces, and the time
/// of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VideoMessageHead {
    kind: u8,
    number: u32,
    pieces: u16,
    /// In a picture: the last command that arrived. In a report: bytes that arrived since the
    /// previous one.
    told: u32,
    /// In a report: the number of messages that arrived.
    came: u16,
    /// In a report: the number of messages that should have arrived.
    due: u16,
    at: Time,
    /// The sequence number of a picture's messages.
    seq: u32,
}

const BASE: u8 = 1;
const EXTRA: u8 = 2;
const REPORTED: u8 = 3;
const COMMANDED: u8 = 4;
const HEAD_BYTES: usize = 27;

impl VideoMessageHead {
    fn new(kind: u8, number: u32, at: Time) -> VideoMessageHead {
        VideoMessageHead {
            kind,
            number,
            pieces: 1,
            told: 0,
            came: 0,
            due: 0,
            at,
            seq: 0,
        }
    }

    fn message(&self, bytes: usize) -> Bytes {
        let mut out = vec![self.kind];
        out.extend(self.number.to_be_bytes());
        out.extend(self.pieces.to_be_bytes());
        out.extend(self.told.to_be_bytes());
        out.extend(self.came.to_be_bytes());
        out.extend(self.due.to_be_bytes());
        out.extend(self.at.as_nanos().to_be_bytes());
        out.extend(self.seq.to_be_bytes());
        debug_assert_eq!(out.len(), HEAD_BYTES);
        out.resize(bytes.max(HEAD_BYTES), 0);
        out.into()
    }

    fn of(bytes: &[u8]) -> Option<VideoMessageHead> {
        let (kind, rest) = bytes.split_first()?;
        let (number, rest) = rest.split_first_chunk()?;
        let (pieces, rest) = rest.split_first_chunk()?;
        let (told, rest) = rest.split_first_chunk()?;
        let (came, rest) = rest.split_first_chunk()?;
        let (due, rest) = rest.split_first_chunk()?;
        let (at, rest) = rest.split_first_chunk()?;
        let (seq, _) = rest.split_first_chunk()?;
        Some(VideoMessageHead {
            kind: *kind,
            number: u32::from_be_bytes(*number),
            pieces: u16::from_be_bytes(*pieces),
            told: u32::from_be_bytes(*told),
            came: u16::from_be_bytes(*came),
            due: u16::from_be_bytes(*due),
            at: Time::from_nanos(u64::from_be_bytes(*at)),
            seq: u32::from_be_bytes(*seq),
        })
    }
}

/// The sender of the video.
struct VideoSender {
    /// The rate of the enhancement in bits per second.
    rate: f64,
    picture_at: Time,
    number: u32,
    seq: u32,
    /// When the sender last slowed down because of missing reports.
    slowed_at: Time,
    command: u32,
}

impl VideoSender {
    fn picture(&mut self, now: Time, session: &mut Session, base: PathSelection) {
        self.number += 1;
        let expires = now + LATE;
        let extra = (self.rate / 8.0 * PICTURE.as_secs_f64()) as u64;
        for (kind, bytes, route) in [(BASE, BASE_BYTES, base), (EXTRA, extra, PathSelection::Any)] {
            let pieces = bytes.div_ceil(MESSAGE_BYTES as u64);
            for piece in 0..pieces {
                let size = bytes / pieces + u64::from(piece < bytes % pieces);
                let head = VideoMessageHead {
                    pieces: pieces as u16,
                    told: self.command,
                    seq: self.seq,
                    ..VideoMessageHead::new(kind, self.number, now)
                };
                self.seq += 1;
                session.send_datagram_on(route, 0, head.message(size as usize), expires);
            }
        }
    }

    fn on_report(&mut self, now: Time, report: &VideoMessageHead) {
        self.slowed_at = now;
        if report.came == 0 || report.due == 0 {
            return;
        }
        let lost = 1.0 - f64::from(report.came) / f64::from(report.due);
        if lost > 0.1 {
            self.rate *= 1.0 - lost / 2.0;
        } else if lost <= 0.04 {
            self.rate = (self.rate * 1.05).clamp(50_000.0, EXTRA_MAX);
        }
    }

    fn miss_reports(&mut self, now: Time) {
        if now >= self.slowed_at + UNHEARD {
            self.slowed_at = now;
            self.rate /= 2.0;
        }
    }
}

/// The viewer of the video.
#[derive(Default)]
struct VideoViewer {
    pictures: Vec<ReceivedPicture>,
    report: u32,
    report_at: Time,
    /// Messages of pictures since the last report.
    came: u16,
    /// The highest sequence number at the last report.
    highest_reported: u32,
    /// The highest sequence number so far.
    highest: u32,
    command: u32,
    given_at: Time,
    given_again_at: Time,
    heard: bool,
}

impl VideoViewer {
    fn on_picture(&mut self, now: Time, head: &VideoMessageHead, bytes: usize) {
        self.came += 1;
        self.highest = self.highest.max(head.seq);
        self.heard |= head.told >= self.command;
        if now > head.at + LATE {
            return;
        }
        let number = head.number as usize;
        if self.pictures.len() <= number {
            self.pictures.resize(number + 1, ReceivedPicture::default());
        }
        let picture = &mut self.pictures[number];
        let layer = match head.kind {
            BASE => &mut picture.base,
            _ => {
                picture.extra_bytes += bytes as u64;
                &mut picture.extra
            }
        };
        *layer = (layer.0 + 1, head.pieces);
    }

    fn report(&mut self, now: Time, session: &mut Session, route: PathSelection) {
        self.report += 1;
        self.report_at = now + REPORT;
        let head = VideoMessageHead {
            came: self.came,
            due: (self.highest - self.highest_reported).min(u32::from(u16::MAX)) as u16,
            ..VideoMessageHead::new(REPORTED, self.report, now)
        };
        (self.came, self.highest_reported) = (0, self.highest);
        session.send_datagram_on(route, 0, head.message(40), now + LATE);
    }

    fn command(&mut self, now: Time, session: &mut Session, route: PathSelection) {
        let head = VideoMessageHead::new(COMMANDED, self.command, self.given_at);
        self.given_again_at = now + AGAIN;
        session.send_datagram_on(route, 0, head.message(40), now + AGAIN);
    }
}

struct VideoSimulation {
    now: Time,
    manner: VideoLinkUse,
    network: SimNetwork,
    device: Endpoint,
    server: Endpoint,
    session: SessionId,
    sender: VideoSender,
    viewer: VideoViewer,
    /// Since when the first hop of each link is being asked.
    asked: Vec<Option<Time>>,
    half_duplex: Vec<bool>,
    last_report_at: Time,
    command_at: Time,
    commands_received: u32,
    watched: VideoQuality,
    buffer: Vec<u8>,
}

/// Simulates the scenario's video to its end, with this use of the links.
pub fn watch(scenario: &Scenario, manner: VideoLinkUse) -> VideoQuality {
    let key = SecretKey::from_bytes([9; 32]);
    let (own, config) = (SecretKey::from_bytes([1; 32]), EndpointConfig::default());
    let seed = |n: u8| [n ^ scenario.seed as u8; 32];
    let mut device = Endpoint::new(config.clone(), own, Admission::Nobody, seed(2), seed(3));
    let session = device.connect(Time::ZERO, key.public(), 7, 1..1_000);
    // Half a second for the handshake.
    let begin = Time::ZERO + Span::from_millis(500);
    let links = manner.links;
    let mut show = VideoSimulation {
        now: Time::ZERO,
        manner,
        network: SimNetwork::new(scenario),
        device,
        server: Endpoint::new(config, key, Admission::Anybody, seed(4), seed(5)),
        session,
        sender: VideoSender {
            rate: EXTRA_FIRST,
            picture_at: begin,
            number: 0,
            seq: 0,
            slowed_at: begin,
            command: 0,
        },
        viewer: VideoViewer {
            report_at: begin,
            ..VideoViewer::default()
        },
        asked: vec![None; links],
        half_duplex: (scenario.links.iter())
            .map(|link| link.medium.is_some())
            .collect(),
        last_report_at: begin,
        command_at: begin,
        commands_received: 0,
        watched: VideoQuality::default(),
        buffer: vec![0; 65_536],
    };
    let end = Time::from_secs_f64(scenario.duration_s);
    while show.step(end) {}
    show.result()
}

impl VideoSimulation {
    fn step(&mut self, end: Time) -> bool {
        let hops = self.asked.iter().flatten().map(|at| *at + HOP_PATIENCE);
        let own = [
            self.sender.picture_at,
            self.sender.slowed_at + UNHEARD,
            self.viewer.report_at,
            self.command_at,
        ];
        let timers = [
            self.network.next_at(),
            self.device.next_timeout(),
            self.server.next_timeout(),
        ];
        let again = match self.viewer.heard || self.viewer.command == 0 {
            true => Time::NEVER,
            false => self.viewer.given_again_at.max(self.now),
        };
        let at = hops.chain(own).chain(timers).chain([again]).min();
        self.now = self.now.max(at.unwrap_or(end));
        if self.now >= end {
            return false;
        }
        self.change_links();
        self.deliver();
        self.device.handle_timeouts(self.now);
        self.server.handle_timeouts(self.now);
        self.attend();
        self.act();
        self.hear_hops();
        self.talk();
        true
    }

    fn change_links(&mut self) {
        let now = self.now;
        while let Some(event) = self.network.next_event(now) {
            let (link, id) = (event.link, LinkId(event.link as u32));
            if link >= self.manner.links {
                continue;
            }
            match event.kind {
                EventKind::Up { .. } => {
                    let to = Addresses {
                        link: id,
                        local: None,
                        remote: self.network.proxy_address(link),
                    };
                    let half_duplex = self.half_duplex[link];
                    let _ = self.device.with(self.session, |s| {
                        s.open_path(now, to, false);
                        if half_duplex {
                            s.set_half_duplex(id);
                        }
                    });
                }
                EventKind::Down => {
                    let _ = (self.device).with(self.session, |s| s.on_link_down(now, id));
                }
                _ => {}
            }
        }
    }

    fn deliver(&mut self) {
        while let Some(mut delivery) = self.network.next_for_proxy(self.now) {
            let addresses = Addresses {
                link: LinkId(0),
                local: None,
                remote: delivery.from,
            };
            let bytes = &mut delivery.bytes[..];
            self.server
                .handle_datagram(self.now, IncomingDatagram { addresses, bytes });
        }
        while let Some(mut delivery) = self.network.next_for_device(self.now) {
            let addresses = Addresses {
                link: LinkId(delivery.link as u32),
                local: None,
                remote: delivery.from,
            };
            let bytes = &mut delivery.bytes[..];
            self.device
                .handle_datagram(self.now, IncomingDatagram { addresses, bytes });
        }
    }

    /// Handles received messages at both ends.
    fn attend(&mut self) {
        let now = self.now;
        while let Some((_, event)) = self.device.poll_event() {
            match event {
                SessionEvent::Datagram { bytes, .. } => {
                    if let Some(head) = VideoMessageHead::of(&bytes) {
                        self.viewer.on_picture(now, &head, bytes.len());
                    }
                }
                SessionEvent::PathQuiet { link, .. } => {
                    self.asked[link.0 as usize].get_or_insert(now);
                }
                _ => {}
            }
        }
        while let Some((_, event)) = self.server.poll_event() {
            let SessionEvent::Datagram { bytes, .. } = event else {
                continue;
            };
            match VideoMessageHead::of(&bytes) {
                Some(head) if head.kind == REPORTED => {
                    self.watched.reports_in_time += u64::from(now <= head.at + LATE);
                    let gap = now.since(self.last_report_at);
                    self.watched.report_gap_max = self.watched.report_gap_max.max(gap);
                    self.last_report_at = now;
                    self.sender.on_report(now, &head);
                }
                Some(head) if head.kind == COMMANDED && head.number > self.commands_received => {
                    self.commands_received = head.number;
                    self.sender.command = head.number;
                    self.watched.commands.push(now.since(head.at));
                }
                _ => {}
            }
        }
    }

    /// Sends pictures, reports and commands that are due.
    fn act(&mut self) {
        let now = self.now;
        let Some(server) = self.server.ids().first().copied() else {
            // There is no path yet: the handshake takes longer than expected.
            let later = now + PICTURE;
            (self.sender.picture_at, self.viewer.report_at) = (
                self.sender.picture_at.max(later),
                self.viewer.report_at.max(later),
            );
            self.command_at = self.command_at.max(later);
            self.sender.slowed_at = now;
            return;
        };
        let VideoLinkUse {
            reports,
            commands,
            base,
            ..
        } = self.manner;
        if now >= self.sender.picture_at {
            self.sender.picture_at = now + PICTURE;
            self.watched.pictures += 1;
            let sender = &mut self.sender;
            let _ = (self.server).with(server, |s| sender.picture(now, s, base));
        }
        self.sender.miss_reports(now);
        let viewer = &mut self.viewer;
        if now >= viewer.report_at {
            self.watched.reports += 1;
            let _ = (self.device).with(self.session, |s| viewer.report(now, s, reports));
        }
        if now >= self.command_at {
            self.command_at = now + COMMAND;
            // One at a time: the next command follows when the last one was confirmed.
            if viewer.heard || viewer.command == 0 {
                viewer.command += 1;
                (viewer.given_at, viewer.heard) = (now, false);
                let _ = (self.device).with(self.session, |s| viewer.command(now, s, commands));
            }
        } else if !viewer.heard && viewer.command > 0 && now >= viewer.given_again_at {
            self.watched.given_again += 1;
            let _ = (self.device).with(self.session, |s| viewer.command(now, s, commands));
        }
    }

    fn hear_hops(&mut self) {
        for link in 0..self.asked.len() {
            let Some(since) = self.asked[link] else {
                continue;
            };
            let asked = self.now == since || self.now >= since + HOP_PATIENCE;
            let hop = if asked && self.network.hop_answers(self.now, link) {
                FirstHopStatus::Answers
            } else if self.now >= since + HOP_PATIENCE {
                FirstHopStatus::Silent
            } else {
                continue;
            };
            self.asked[link] = None;
            let (now, id) = (self.now, LinkId(link as u32));
            let _ = (self.device).with(self.session, |s| s.on_link_silent(now, id, since, hop));
        }
    }

    fn talk(&mut self) {
        let now = self.now;
        while let Some(t) = self.device.poll_transmit(now, &mut self.buffer) {
            for datagram in self.buffer[..t.len].chunks(t.segment) {
                let verdict = (self.network).send_up(now, t.link.0 as usize, t.remote, datagram);
                debug_assert_ne!(verdict, PushOutcome::Down);
                if verdict == PushOutcome::TooBig {
                    self.device.on_too_big(now, &t, t.segment);
                }
            }
        }
        while let Some(t) = self.server.poll_transmit(now, &mut self.buffer) {
            for datagram in self.buffer[..t.len].chunks(t.segment) {
                if self.network.is_too_big_for_proxy(t.remote, t.segment) {
                    self.server.on_too_big(now, &t, t.segment);
                    break;
                }
                self.network.send_down(now, t.remote, datagram);
            }
        }
    }

    fn result(mut self) -> VideoQuality {
        for picture in &self.viewer.pictures {
            let whole = |(came, all): (u16, u16)| came > 0 && came == all;
            if whole(picture.base) {
                self.watched.base += 1;
                self.watched.extra_bytes += match whole(picture.extra) {
                    true => picture.extra_bytes,
                    false => 0,
                };
            }
        }
        let reports = self.network.reports().into_iter();
        let bytes = reports.map(|link| (link.bytes_down, link.bytes_up));
        self.watched.bytes_by_link = bytes.collect();
        self.watched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let head = VideoMessageHead {
            pieces: 3,
            told: 5,
            came: 6,
            due: 7,
            seq: 8,
            ..VideoMessageHead::new(BASE, 2, Time::from_nanos(9))
        };
        let message = head.message(100);
        assert_eq!(
            (VideoMessageHead::of(&message), message.len()),
            (Some(head), 100)
        );
        assert_eq!(VideoMessageHead::of(&message[..HEAD_BYTES - 1]), None);
    }

    #[test]
    fn a_sender_slows_down_with_loss_and_silence_and_not_for_a_hole_that_is_reported() {
        let at = |ms| Time::ZERO + Span::from_millis(ms);
        let mut sender = VideoSender {
            rate: 1e6,
            picture_at: at(0),
            number: 0,
            seq: 0,
            slowed_at: at(0),
            command: 0,
        };
        let report = |came, due| VideoMessageHead {
            came,
            due,
            ..VideoMessageHead::new(REPORTED, 0, at(0))
        };
        sender.on_report(at(100), &report(0, 0));
        assert_eq!(sender.rate, 1e6);
        sender.on_report(at(200), &report(100, 100));
        assert_eq!(sender.rate, 1.05e6);
        sender.on_report(at(300), &report(50, 100));
        assert_eq!(sender.rate, 1.05e6 * 0.75);
        sender.miss_reports(at(799));
        assert_eq!(sender.rate, 1.05e6 * 0.75);
        sender.miss_reports(at(800));
        assert_eq!(sender.rate, 1.05e6 * 0.375);
    }
}
