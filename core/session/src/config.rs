//! What a host decides before it speaks: suites, windows, limits.

use d2tp_seal::CipherSuite;
use d2tp_time::Span;

use crate::ack_offload_state::AckOffload;
use crate::congestion::CongestionKind;
use crate::drwa::DrwaLambda;
use crate::memory_pool::MemoryPool;
use crate::mirror_state::Mirroring;
use crate::path_scheduler::PathSchedulerKind;

/// Paths a session may have at once.
pub const PATHS_MAX: usize = 8;
/// Path ids issued ahead of use, so that a device that moves needs no new ones first.
pub const SPARE_PATHS: u32 = 4;
/// Ranges of received packets that are kept per path.
pub const ACK_RANGES_MAX: usize = 64;
/// Gaps in the received bytes of one flow that are kept.
pub const FLOW_GAPS_MAX: usize = 256;
/// Unreliable datagrams that wait to be sent. When there are more, the oldest is dropped.
pub const DATAGRAMS_MAX: usize = 64;
/// Events that the driver has not taken yet. A session with that many stops reading packets.
pub const EVENTS_MAX: usize = 4096;
/// Receive buffer of a flow in a tentatively restored session: what one packet may carry, and some room
/// until the handshake is confirmed.
pub const THAWED_BUFFER_BYTES: u64 = 16 * 1024;
/// REFUSED answers that wait to be sent or acknowledged. A packet whose claim finds no room is not
/// acknowledged, so that the claim is repeated.
pub const REFUSALS_MAX: usize = 64;
/// Ranges of the peer's used flow ids that are kept per epoch while the session is awake. Beyond that,
/// the lowest gap counts as used. Four times the ids that an honest opener may have unacknowledged.
pub const SEEN_RANGES_AWAKE_MAX: usize = 1024;
/// Sessions whose early data a server remembers, to recognize copies. Copies of older ones are accepted
/// again.
pub const EARLY_HEARD_MAX: usize = 4096; // a guess: 64 bytes each
/// Half-open handshakes per client key and instance.
pub const HALF_OPEN_PER_INSTANCE: usize = 2;

/// Settings of a host, the same for all its sessions.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// AEADs in order of preference.
    pub suites: Vec<CipherSuite>,
    /// Bytes of a flow that may be in flight or unread. A larger window fills longer, faster paths, and
    /// costs that much memory per busy flow.
    pub flow_window: u64,
    /// Bytes of all flows of a session that may be in flight or unread.
    pub session_window: u64,
    /// Bytes written and not acknowledged that a flow holds before writers must wait. Bytes that
    /// arrived behind a gap may take as much again.
    pub send_buffer: u64,
    /// Counts the memory that peers make this host hold, and bounds it for each key and in all. Without
    /// a limit, as by default, only the windows above bound it: that suits a device, which chooses its
    /// peers.
    pub memory: MemoryPool,
    /// Flows a peer may have open at once in a session.
    pub flows_max: usize,
    /// The largest UDP payload that path MTU discovery tries.
    pub mtu_max: u16,
    /// Congestion control of new paths.
    pub congestion: CongestionKind,
    /// Whether this host, as a receiver, bounds what its peer has in flight where a path's round trip
    /// grows by queueing, and how far it lets it grow (R-DRWA-1). Lower: shorter queues, and less of
    /// a rate that has just risen is used. None: the peer's congestion control is left alone.
    pub drwa: Option<DrwaLambda>,
    /// Whether the peer is asked for fewer ACKs as the window grows; otherwise it sends one for every
    /// second packet, as TCP does. Fewer ACKs cost less, and let the window grow later.
    pub thin_acks: bool,
    /// Which other paths may carry ACKs of half-duplex paths ([`crate::Session::set_half_duplex`]).
    pub ack_offload: AckOffload,
    /// How outgoing data is distributed over several paths.
    pub path_scheduler: PathSchedulerKind,
    /// Whether data in flight on a slow path is sent again on a faster one that has nothing else to
    /// send. This costs those bytes twice; without it a transfer waits for the slow path's last bytes.
    pub reinjection: bool,
    /// Which paths repair random losses of another one, while that one keeps its window. A path that is
    /// alone responds to every loss.
    pub mirroring: Mirroring,
    /// Whether a path that falls silent keeps its window, and a device reports the silence on another
    /// path and probes often. Otherwise the path continues as after persistent congestion.
    pub freezing: bool,
    /// The longest an ACK is held back.
    pub ack_delay_max: Span,
    /// The round trip assumed before the first sample. RFC 9002 says 333 ms; devices hop between
    /// links whose real figure is 15–100 ms, and a handshake lost costs three of these.
    pub rtt_initial: Span,
    /// The longest interval between probes of a silent path.
    pub probe_interval_max: Span,
    /// How long all paths may be silent before a server stops sending until the device sends again.
    pub silence_max: Span,
    /// How long flows without a deadline are kept while their device is away.
    pub absence_max: Span,
    /// How long a server keeps a hibernated session whose flows have no deadline: a record costs less
    /// than a session.
    pub hibernated_age_max: Span,
    /// How long the keys of one handshake are in use at most. Shorter: a leaked key exposes less; each
    /// handshake costs a round trip and repeats what is in flight.
    pub keys_max: Span,
    /// How long a device may be without a path before it resumes by a handshake with claims: one round
    /// trip, whether or not the server hibernated the session. Each such pause costs a public-key
    /// handshake.
    pub claim_after: Span,
    /// How long a half-open handshake is kept.
    pub half_open_max: Span,
    /// Handshakes per second above which a device must prove its address first.
    pub cookie_above: u32,
    /// Whether a server delivers the data of flows in a SYN before the device has proved that it is
    /// present: the data may be a replay (R-EARLY-2).
    pub early_data: bool,
    /// Awake sessions that a server keeps at once.
    pub sessions_max: usize,
    /// Hibernated sessions that a server keeps at once.
    pub hibernated_max: usize,
    /// Sessions (instances) of one client key: awake, hibernated and half open.
    pub sessions_per_key_max: usize,
    /// Flows of one client key in all its sessions, hibernated ones included.
    pub flows_per_key_max: usize,
    /// The latest deadline that a server accepts from a device. A later one is cut to it, and the
    /// device is informed.
    pub deadline_max: Span,
    /// Packets that may fail to open under the keys of one handshake, if that is less than the suite's
    /// own limit ([`CipherSuite::integrity_limit`]). Only tests have a reason to lower it.
    pub failed_openings_max: u64,
    /// How long a device leaves a path idle that must stay reachable (`FlowOptions::reachable`). Just
    /// below the time after which many NATs forget UDP bindings; shorter costs battery.
    pub keepalive: Span,
    /// [`EndpointConfig::silence_max`] for a device that promised to stay reachable: a few
    /// keepalives.
    pub silence_reachable_max: Span,
    /// How long a closed session without a path is kept to inform its peer, if no deadline of its flows
    /// was later.
    pub closing_max: Span,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        EndpointConfig {
            suites: vec![CipherSuite::Aes128Gcm, CipherSuite::ChaCha20Poly1305],
            flow_window: 8 << 20,
            session_window: 16 << 20,
            send_buffer: 4 << 20,
            memory: MemoryPool::default(),
            flows_max: 1_024,
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
            flows_per_key_max: 1_024,
            // A guess: no download waits longer than a month.
            deadline_max: Span::from_secs(30 * 24 * 3600),
            failed_openings_max: u64::MAX,
            keepalive: Span::from_secs(25),
            silence_reachable_max: Span::from_secs(120),
            closing_max: Span::from_secs(3600),
        }
    }
}
