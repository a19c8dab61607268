//! What a host decides before it speaks: suites, windows, limits.

use d2tp_seal::CipherSuite;
use d2tp_time::Span;

use crate::ack_offload_state::AckOffload;
use crate::congestion::CongestionKind;
use crate::drwa::DrwaLambda;
use crate::mirror_state::Mirroring;
use crate::path_scheduler::PathSchedulerKind;

/// Paths a session may have at once.
pub const PATHS_MAX: usize = 8;
/// Path ids issued ahead of use, so that a device can move while it cannot be told new ones.
pub const SPARE_PATHS: u32 = 4;
/// Acknowledgement ranges kept per path.
pub const ACK_RANGES_MAX: usize = 64;
/// Gaps in the bytes received of one flow.
pub const FLOW_GAPS_MAX: usize = 256;
/// Unreliable datagrams that wait to be sent; the oldest goes first.
pub const DATAGRAMS_MAX: usize = 64;
/// Events not yet taken by the driver. A session that is not attended stops reading packets.
pub const EVENTS_MAX: usize = 4096;
/// Bytes a flow of a session takes that was thawed for a handshake nobody confirmed yet: what one
/// packet may carry by then, and some for the moment after.
pub const THAWED_BUFFER_BYTES: u64 = 16 * 1024;
/// Answers REFUSED that wait to leave or to be acknowledged. A packet whose claim finds no place is
/// not acknowledged, so the claim comes again.
pub const REFUSALS_MAX: usize = 64;
/// Ranges of the peer's used flow ids kept for an epoch while the session is awake; the lowest gap
/// counts as used beyond that. Four times the ids an honest opener may leave unheard at once.
pub const SEEN_RANGES_AWAKE_MAX: usize = 1024;
/// Sessions whose early data a server remembers to have heard; of older ones a copy is heard again.
pub const EARLY_HEARD_MAX: usize = 4096; // a guess: 64 bytes each
/// Half-open handshakes per client key and instance.
pub const HALF_OPEN_PER_INSTANCE: usize = 2;

/// Settings of a host, the same for all its sessions.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// AEADs in order of preference.
    pub suites: Vec<CipherSuite>,
    /// Bytes of a flow that may be on the way or unread. Larger fills longer, faster paths, and
    /// costs that much memory per busy flow.
    pub flow_window: u64,
    /// Bytes of all flows of a session together that may be on the way or unread.
    pub session_window: u64,
    /// Bytes written and not yet acknowledged that a flow holds before writers must wait; as much again
    /// where they arrived and wait for a lost one before them.
    pub send_buffer: u64,
    /// Flows a peer may have open at once in a session.
    pub flows_max: usize,
    /// The largest UDP payload to try.
    pub mtu_max: u16,
    /// Congestion control of new paths.
    pub congestion: CongestionKind,
    /// Whether this host, as a receiver, bounds what its peer has in flight where a path's round trip
    /// grows by queueing, and how far it lets it grow (R-DRWA-1). Lower: shorter queues, and less of
    /// a rate that has just risen is used. None: the peer's congestion control is left alone.
    pub drwa: Option<DrwaLambda>,
    /// Whether the peer is asked for fewer ACKs as the window grows; else it sends one for every
    /// second packet, as TCP does. Fewer cost less, and feed the window later.
    pub thin_acks: bool,
    /// Where ACKs of half-duplex paths may travel besides ([`crate::Session::set_half_duplex`]).
    pub ack_offload: AckOffload,
    /// How what is sent is spread over several paths.
    pub path_scheduler: PathSchedulerKind,
    /// Whether bytes under way on a slow path are sent again on a faster one that has nothing else to
    /// send. Costs those bytes twice; without it a slow path's last bytes are waited for.
    pub reinjection: bool,
    /// Where what was lost at random is fetched, while the path that lost it goes on as fast as before.
    /// A path that is alone responds to every loss in any case.
    pub mirroring: Mirroring,
    /// Whether a path that falls silent keeps its window, and a device says so on another one and asks
    /// it often. Without, it goes on as after persistent congestion.
    pub freezing: bool,
    /// The longest an ACK is held back.
    pub ack_delay_max: Span,
    /// The round trip assumed before the first sample. RFC 9002 says 333 ms; devices hop between
    /// links whose real figure is 15–100 ms, and a handshake lost costs three of these.
    pub rtt_initial: Span,
    /// How far apart probes of a silent path get at most.
    pub probe_interval_max: Span,
    /// Silence on every path after which a server stops sending until the device speaks again.
    pub silence_max: Span,
    /// How long flows without a deadline are kept for a device that is away.
    pub absence_max: Span,
    /// How long a server keeps a session asleep whose flows have no deadline: a record costs less
    /// than a session.
    pub hibernated_age_max: Span,
    /// The longest that keys of one handshake are in use. Shorter: less is lost with a key;
    /// each handshake costs a round trip and re-sends what is in flight.
    pub keys_max: Span,
    /// After how long without a path a device goes on by a handshake that claims its flows: one round
    /// trip whether the server sleeps by now or not. A public-key handshake for each pause that long.
    pub claim_after: Span,
    /// How long a half-open handshake is kept.
    pub half_open_max: Span,
    /// Handshakes per second above which addresses must be proved first.
    pub cookie_above: u32,
    /// Whether a server hands on flows that a SYN opens before the device has proved that it is
    /// there: their bytes may be a copy of what was said before (R-EARLY-2).
    pub early_data: bool,
    /// Sessions a server keeps awake at once.
    pub sessions_max: usize,
    /// Sessions a server keeps as records at once.
    pub hibernated_max: usize,
    /// Sessions of one client key, awake, asleep and half open: its instances.
    pub sessions_per_key_max: usize,
    /// Flows of one client key in all its sessions, those asleep included.
    pub flows_per_key_max: usize,
    /// The furthest deadline a server takes from a device; a later one is cut to it, and told.
    pub deadline_max: Span,
    /// Packets that may fail to open under the keys of one handshake, if less than the suite's own
    /// limit ([`CipherSuite::integrity_limit`]). Only tests have a reason to lower it.
    pub failed_openings_max: u64,
    /// How long a device lets a path rest that must stay reachable (`FlowOptions::reachable`). Just
    /// below what careless NATs forget UDP after; shorter costs battery.
    pub keepalive: Span,
    /// [`EndpointConfig::silence_max`] for a device that promised to stay reachable: a few
    /// keepalives.
    pub silence_reachable_max: Span,
    /// How long a closed session that found no path waits to tell its peer, if no deadline of its
    /// flows was later.
    pub closing_max: Span,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        EndpointConfig {
            suites: vec![CipherSuite::Aes128Gcm, CipherSuite::ChaCha20Poly1305],
            flow_window: 8 << 20,
            session_window: 16 << 20,
            send_buffer: 4 << 20,
            flows_max: 256,
            mtu_max: 1472,
            congestion: CongestionKind::default(),
            drwa: None,
            thin_acks: true,
            ack_offload: AckOffload::default(),
            path_scheduler: PathSchedulerKind::default(),
            reinjection: true,
            mirroring: Mirroring::default(),
            freezing: true,
            ack_delay_max: Span::from_millis(20),
            rtt_initial: Span::from_millis(150),
            probe_interval_max: Span::from_secs(2),
            silence_max: Span::from_secs(15),
            absence_max: Span::from_secs(3600),
            hibernated_age_max: Span::from_secs(24 * 3600),
            keys_max: Span::from_secs(3600),
            claim_after: Span::from_secs(60),
            half_open_max: Span::from_secs(10),
            cookie_above: 500,
            early_data: false,
            sessions_max: 100_000,
            hibernated_max: 2_000_000,
            // One in a hundred of the pool.
            sessions_per_key_max: 1_000,
            flows_per_key_max: 256,
            // A guess: no download waits longer than a month.
            deadline_max: Span::from_secs(30 * 24 * 3600),
            failed_openings_max: u64::MAX,
            keepalive: Span::from_secs(25),
            silence_reachable_max: Span::from_secs(120),
            closing_max: Span::from_secs(3600),
        }
    }
}
