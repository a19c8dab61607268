//! The parts of `d2tp.h` beside the calls: numbers of options and values, and structures that the
//! kernel does not have. `cargo xtask header` generates the header from this file, `info.rs`,
//! `address.rs` and `calls`, with their doc comments.

use libc::c_int;

/// A `char` of C, in text that the header declares.
pub(crate) type CChar = u8;

/// Address family of struct sockaddr_d2tp: a name and, unless it is all zero, the key of the D2TP
/// server there. The structure fits into a sockaddr_storage. As a domain of d2tp_socket it accepts
/// addresses of every family. It is none of the kernel's families, which end below 64.
pub const AF_D2TP: c_int = 210;

/// The level of D2TP's options. "Any time" means before connect and while connected; accepted
/// sockets inherit their listener's options.
pub const SOL_D2TP: c_int = 0xd2;

/// int or int64_t: seconds from now, 0 for none; struct timespec: a time of day. At the deadline
/// both ends drop the connection (ETIME). Reads as int64_t: seconds left. Any time.
pub const SO_DEADLINE: c_int = 1;
/// uint64_t: total bytes expected, 0 if unknown. Any time.
pub const SO_ESIZE: c_int = 2;
/// int: which networks may be paid for, one of the D2TP_POLICY values. Any time.
pub const SO_POLICY: c_int = 3;
/// D2TP_SO_POLICY: never use metered networks.
pub const POLICY_FREE_ONLY: c_int = 0;
/// D2TP_SO_POLICY: use metered networks when the deadline needs it (the default).
pub const POLICY_FREE_FIRST: c_int = 1;
/// D2TP_SO_POLICY: use metered networks when the deadline needs it, with twice the slack.
pub const POLICY_BALANCED: c_int = 2;
/// D2TP_SO_POLICY: use all networks at any time.
pub const POLICY_FAST: c_int = 3;
/// D2TP_SO_POLICY: use metered networks when no free one works.
pub const POLICY_ANY: c_int = 4;
/// uint64_t: bytes that metered networks may carry, UINT64_MAX for no limit. Any time. When the
/// budget is used up and no free network works, the connection ends (EDQUOT), unless D2TP_SO_IFLATE
/// is D2TP_IFLATE_WAIT.
pub const SO_BUDGET: c_int = 4;
/// int: priority, 0 (the default) to 7; higher goes first. Before connect.
pub const SO_PRIORITY: c_int = 5;
/// int: what to do when free networks cannot meet the deadline. Any time.
pub const SO_IFLATE: c_int = 6;
/// D2TP_SO_IFLATE: pay, up to the budget (the default).
pub const IFLATE_CELL: c_int = 0;
/// D2TP_SO_IFLATE: be late; the connection continues after its deadline.
pub const IFLATE_WAIT: c_int = 1;
/// D2TP_SO_IFLATE: do not pay, and end at the deadline.
pub const IFLATE_FAIL: c_int = 2;
/// struct d2tp_info, read only: the state of the connection.
pub const SO_INFO: c_int = 7;
/// Text, read only: why the connection broke; empty if it did not.
pub const SO_ERROR: c_int = 8;
/// 32 bytes, or 43 characters: the key of the D2TP server to connect to. Before connect.
pub const SO_PEERKEY: c_int = 9;
/// Text: d2tp://host:port/KEY of the proxy; the default is $CEDOS_PROX, or that of the settings. Before connect.
pub const SO_PROXY: c_int = 10;
/// Text, read only: the public key of this process.
pub const SO_HOSTKEY: c_int = 11;
/// struct d2tp_rcvbufth: how much to buffer ahead of the program, up to 64 MiB; all 0, the default:
/// only the kernel's buffers. Free networks fill the buffer; metered networks are used from
/// dr_low on, up to dr_high. Any time.
pub const SO_RCVBUFTH: c_int = 12;
/// dr_unit of struct d2tp_rcvbufth: bytes.
pub const RCVBUFTH_BYTES: c_int = 0;
/// dr_unit of struct d2tp_rcvbufth: milliseconds at the rate that the program reads.
pub const RCVBUFTH_MS: c_int = 1;
/// int: what persists after this process has ended, carried by the user's agent; EOPNOTSUPP without
/// one. Before connect. With D2TP_PERSIST_OPEN, a read into 32 bytes or more after connect returns
/// the token for d2tp_reopen.
pub const SO_PERSIST: c_int = 13;
/// D2TP_SO_PERSIST: nothing persists (the default).
pub const PERSIST_NO: c_int = 0;
/// D2TP_SO_PERSIST: written data is still delivered to the peer.
pub const PERSIST_WRITTEN: c_int = 1;
/// D2TP_SO_PERSIST: the connection stays open, for a day at most, until d2tp_reopen or d2tp_close.
pub const PERSIST_OPEN: c_int = 2;
/// The size of the token for d2tp_reopen, in bytes.
pub const TOKEN_BYTES: usize = 32;
/// int, milliseconds, 1 to a day: after this time a datagram that could not be sent is dropped
/// (default: 1000). Any time; also for one message, as a control message of sendmsg.
pub const SO_EXPIRY: c_int = 14;
/// int: which paths carry sent data. Any time; also for one message, as a control message of
/// sendmsg.
pub const SO_ROUTE: c_int = 15;
/// D2TP_SO_ROUTE: the fastest path (the default).
pub const ROUTE_ANY: c_int = 0;
/// D2TP_SO_ROUTE: the path that is least likely to fail.
pub const ROUTE_STEADIEST: c_int = 1;
/// D2TP_SO_ROUTE: a copy on each path; the first to arrive counts.
pub const ROUTE_EACH: c_int = 2;

/// The most paths in struct d2tp_info.
pub const PATHS_MAX: usize = 8;

/// The value of D2TP_SO_RCVBUFTH.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct D2tpRcvbufth {
    /// Metered networks are used from this level on: when no more than this is buffered.
    pub dr_low: u64,
    /// Metered networks are used up to this level: at most 64 MiB or a day, and at least dr_low.
    pub dr_high: u64,
    /// The unit of the levels: D2TP_RCVBUFTH_BYTES or D2TP_RCVBUFTH_MS.
    pub dr_unit: u32,
    /// The rate at which the program reads, in bytes per second; 0: measured.
    pub dr_rate: u32,
}
