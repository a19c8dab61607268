//! Settings and limits of a host: cipher suites, windows, sizes, times.

use d2tp_seal::CipherSuite;
use d2tp_time::Span;
use d2tp_wire::DATAGRAM_MAX_BYTES;

use crate::ack_offload_state::AckOffload;
use crate::cid_share::CidShare;
use crate::congestion::CongestionKind;
use crate::drwa::DrwaLambda;
use crate::key_exchange_state::HybridPolicy;
use crate::memory_pool::{KEY_SHARE, MemoryPool};
use crate::mirror_state::Mirroring;
use crate::path_scheduler::PathSchedulerKind;
use crate::recv_half::FlowWindows;

/// The most paths of a session at once.
pub const PATHS_MAX: usize = 8;
/// The number of path ids that are issued in advance, so that a device can open paths without
/// waiting for new ids.
pub const SPARE_PATHS: u32 = 4;
/// The most ranges of received packet numbers that are kept for a path.
pub const ACK_RANGES_MAX: usize = 64;
/// The most gaps in the received bytes of one flow that are kept.
pub const FLOW_GAPS_MAX: usize = 256;
/// The most unreliable datagrams of a session that wait to be sent. When there are more, the oldest
/// is dropped.
pub const DATAGRAMS_MAX: usize = 64;
/// The most events of a session that wait for the driver. A session with this many does not read
/// further packets.
pub const EVENTS_MAX: usize = 4096;
/// The receive buffer of a flow in a tentatively restored session, in bytes: the payload of one
/// packet, and some room until the handshake is confirmed.
pub const RESTORED_BUFFER_BYTES: u64 = 16 * 1024;
/// REFUSED answers that wait to be sent or acknowledged. A packet whose claim finds no room is not
/// acknowledged, so that the claim is repeated.
pub const REFUSALS_MAX: usize = 64;
/// Ranges of the peer's used flow ids that are kept per epoch while the session is awake. Beyond that,
/// the lowest gap counts as used. Four times the ids that an honest opener may have unacknowledged.
pub const SEEN_RANGES_AWAKE_MAX: usize = 1024;
/// The most sessions whose early data a server remembers to detect copies. Copies of older ones are
/// accepted again.
pub const EARLY_SEEN_MAX: usize = 4096; // a guess: 64 bytes each
/// The least window of a session in a limited memory, in bytes, unless it is configured smaller.
const SESSION_WINDOW_MIN: u64 = 16 << 20; // a guess: two flows over a long and fast path
/// The most half-open handshakes of a client key and instance.
pub const HALF_OPEN_PER_INSTANCE: usize = 2;

/// Settings of a host, equal for all its sessions.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// AEADs in order of preference.
    pub suites: Vec<CipherSuite>,
    /// Whether keys are agreed by ML-KEM too. Each new session then costs about 2.5 kB more, once.
    pub hybrid: HybridPolicy,
    /// The most bytes of a flow that may be in flight or unread. A larger window suits longer and
    /// faster paths, and costs this much memory for each busy flow.
    pub flow_window: u64,
    /// The most bytes that may be in flight or unread of a flow of which nothing was read yet, if less than `flow_window`.
    /// The window grows by as much as is read. A smaller value leaves a session room for more flows that nobody reads.
    pub flow_window_first: u64,
    /// The most bytes of all flows of a session together that may be in flight or unread.
    pub session_window: u64,
    /// The most bytes that a flow holds before writers must wait: written and not yet acknowledged.
    /// Bytes that arrived beyond a gap may take as much again.
    pub send_buffer: u64,
    /// Counts the memory that peers cause this host to hold, and limits it for each key and in
    /// total. Without a limit, which is the default, only the windows above limit it; that suits a
    /// device, which chooses its peers.
    pub memory: MemoryPool,
    /// Bytes that the application holds for each flow from the moment it is opened, such as a task: charged
    /// with the flow's own state, and a flow that a peer opens without room for both is refused.
    pub flow_memory: u64,
    /// The most flows that a peer may have open at once in a session.
    pub flows_max: usize,
    /// The largest UDP payload that path MTU discovery tries over IPv4; 20 bytes less over IPv6.
    pub mtu_max: u16,
    /// Congestion control of new paths.
    pub congestion: CongestionKind,
    /// The rate at which this host sends on new paths, in bytes a second of whole IP packets, where it is known
    /// beforehand: instead of congestion control. `None`: it is searched for. [`EndpointConfig::expect_rates`] sets it.
    pub known_rate: Option<u64>,
    /// Whether this host, as a receiver, limits the bytes that its peer has in flight while
    /// queueing increases a path's round trip, and how large an increase it allows (R-DRWA-1).
    /// Lower: shorter queues, and less use of a rate that has just risen. `None`: the peer's
    /// congestion control is not limited.
    pub drwa: Option<DrwaLambda>,
    /// The wait in a path's queue below which `drwa` leaves the path alone (R-DRWA-4); zero: it depends on the factor alone.
    /// Higher: fewer paths are limited, and queues are longer before they are. [`crate::Drwa::BLOATED_WAIT`] where nobody
    /// asked for short queues.
    pub drwa_wait_min: Span,
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
    /// The longest time for which an ACK is delayed.
    pub ack_delay_max: Span,
    /// The round trip that is assumed before the first sample. RFC 9002 says 333 ms; devices move
    /// between links whose round trip is 15–100 ms, and a lost handshake packet costs three times
    /// this value. Where round trips are known to be longer, [`EndpointConfig::expect_round_trip`] sets it and the waiting
    /// times that depend on it.
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
    /// How long the keys of one handshake are used at most. Lower: a leaked key reveals less, but
    /// each handshake costs a round trip and repeats data in flight.
    pub keys_max: Span,
    /// How long a device may be without a path before it resumes by a handshake with claims: one round
    /// trip, whether or not the server hibernated the session. Each such pause costs a public-key
    /// handshake.
    pub claim_after: Span,
    /// How long a half-open handshake is kept.
    pub half_open_max: Span,
    /// The number of handshakes per second above which devices must prove their addresses first.
    pub cookie_above: u32,
    /// Whether a server delivers the data of flows in a SYN before the device has proved that it is
    /// present: the data may be a replay (R-EARLY-2).
    pub early_data: bool,
    /// The connection ids that a server issues, where several share an address behind a balancer (R-CID-1).
    /// `None`: any.
    pub cid_share: Option<CidShare>,
    /// The worker that this endpoint is, of several on one port: which clients are its own, and which ids it
    /// issues. `None`: the only one.
    pub worker: Option<CidShare>,
    /// The most awake sessions that a server keeps at once, in all its workers.
    pub sessions_max: usize,
    /// The most hibernated sessions that a server keeps at once, in all its workers.
    pub hibernated_max: usize,
    /// The most sessions (instances) of one client key: awake, hibernated and half-open ones
    /// together.
    pub sessions_per_key_max: usize,
    /// The most flows of one client key in all its sessions, hibernated ones included.
    pub flows_per_key_max: usize,
    /// The latest deadline that a server accepts from a device. A later one is cut to this time
    /// from now, and the device is informed.
    pub deadline_max: Span,
    /// The number of packets that may fail to authenticate under the keys of one handshake, if it
    /// is less than the suite's own limit ([`CipherSuite::integrity_limit`]). Only tests have a
    /// reason to lower it.
    pub failed_openings_max: u64,
    /// How long a device leaves a path idle that must stay reachable (`FlowOptions::reachable`).
    /// The value is just below the time after which many NATs drop UDP bindings; a lower one costs
    /// battery.
    pub keepalive: Span,
    /// [`EndpointConfig::silence_max`] for a device that has a reachable flow: the time of several
    /// keepalives.
    pub silence_reachable_max: Span,
    /// How long a closed session without a path is kept to inform its peer, unless a flow had a
    /// later deadline.
    pub closing_max: Span,
}

impl EndpointConfig {
    /// The most bytes of all flows of a session together that may be in flight or unread. Where memory is limited, no
    /// more than the share of one key, or [`SESSION_WINDOW_MIN`]: most bytes in flight never wait here.
    pub(crate) fn window_of_session(&self) -> u64 {
        let share = self.memory.max().map_or(u64::MAX, |max| max / KEY_SHARE);
        self.session_window.min(share.max(SESSION_WINDOW_MIN))
    }

    /// The window of a flow of which nothing was read yet, as it is announced in a handshake.
    pub(crate) fn window_of_new_flow(&self) -> u64 {
        self.flow_window_first.min(self.flow_window)
    }

    pub(crate) fn flow_windows(&self) -> FlowWindows {
        FlowWindows {
            first: self.window_of_new_flow(),
            max: self.flow_window,
        }
    }
}

impl Default for EndpointConfig {
    fn default() -> Self {
        EndpointConfig {
            suites: vec![CipherSuite::Aes128Gcm, CipherSuite::ChaCha20Poly1305],
            hybrid: HybridPolicy::default(),
            flow_window: 8 << 20,
            flow_window_first: 512 << 10, // a guess: 256 flows that nobody reads leave room to others
            session_window: 128 << 20,    // a guess
            send_buffer: 4 << 20,
            memory: MemoryPool::default(),
            flow_memory: 0,
            flows_max: 1_024,
            mtu_max: DATAGRAM_MAX_BYTES as u16,
            congestion: CongestionKind::default(),
            known_rate: None,
            drwa: None,
            drwa_wait_min: Span::ZERO,
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
            cid_share: None,
            worker: None,
            sessions_max: 100_000,
            hibernated_max: 2_000_000,
            // One hundredth of all sessions.
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
