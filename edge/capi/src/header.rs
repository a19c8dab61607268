//! What `d2tp.h` has beside the calls: the numbers of options and of their values, and the structures that
//! are not the kernel's. `cargo xtask header` makes the header of this file, `info.rs`, `address.rs` and
//! `calls`; their doc comments are its comments.

use libc::c_int;

/// A `char` of C, in text that the header declares.
pub(crate) type CChar = u8;

/// A name and, where it is not all zero, the key of the D2TP server there: struct sockaddr_d2tp. Fits a
/// sockaddr_storage. As a domain of d2tp_socket it takes addresses of every family. Not one of the kernel's
/// families, which end below 64.
pub const AF_D2TP: c_int = 210;

/// The level of the options. "any time" is before connect and while connected; accepted sockets begin with
/// their listener's.
pub const SOL_D2TP: c_int = 0xd2;

/// int or int64_t: seconds from now, 0 for none; struct timespec: a time of day. Then both ends drop the
/// connection (ETIME). Reads as int64_t: seconds left. Any time.
pub const SO_DEADLINE: c_int = 1;
/// uint64_t: bytes expected in all, 0 when not known. Any time.
pub const SO_ESIZE: c_int = 2;
/// int: which networks may be paid for. Any time.
pub const SO_POLICY: c_int = 3;
/// D2TP_SO_POLICY: none.
pub const POLICY_FREE_ONLY: c_int = 0;
/// D2TP_SO_POLICY: when the deadline needs it (the default).
pub const POLICY_FREE_FIRST: c_int = 1;
/// D2TP_SO_POLICY: when the deadline needs it, with twice the slack.
pub const POLICY_BALANCED: c_int = 2;
/// D2TP_SO_POLICY: all, at any time.
pub const POLICY_FAST: c_int = 3;
/// D2TP_SO_POLICY: all, when no free one works.
pub const POLICY_ANY: c_int = 4;
/// uint64_t: bytes that networks which cost may carry, UINT64_MAX for no limit. Any time. When it is used up and
/// no free network works the connection ends (EDQUOT), unless it is D2TP_IFLATE_WAIT.
pub const SO_BUDGET: c_int = 4;
/// int: 0 (the default) to 7; higher goes first. Before connect.
pub const SO_PRIORITY: c_int = 5;
/// int: what to do when free networks will not make the deadline. Any time.
pub const SO_IFLATE: c_int = 6;
/// D2TP_SO_IFLATE: pay, up to the budget (the default).
pub const IFLATE_CELL: c_int = 0;
/// D2TP_SO_IFLATE: be late; the connection outlives its deadline.
pub const IFLATE_WAIT: c_int = 1;
/// D2TP_SO_IFLATE: do not pay, and end at the deadline.
pub const IFLATE_FAIL: c_int = 2;
/// struct d2tp_info, to be read.
pub const SO_INFO: c_int = 7;
/// Text, to be read: why the connection broke, empty if it did not.
pub const SO_ERROR: c_int = 8;
/// 32 bytes, or 43 characters: the key of the D2TP server that connect is to find. Before connect.
pub const SO_PEERKEY: c_int = 9;
/// Text: d2tp://host:port/KEY of the proxy; else $CEDOS_PROX. Before connect.
pub const SO_PROXY: c_int = 10;
/// Text, to be read: this process's own public key.
pub const SO_HOSTKEY: c_int = 11;
/// struct d2tp_rcvbufth: what is to be held ahead of the program, up to 64 MiB of memory; all 0, the default, is
/// what the kernel holds. Free networks fill it; those that cost are used from dr_low on, up to dr_high. Any time.
pub const SO_RCVBUFTH: c_int = 12;
/// dr_unit of struct d2tp_rcvbufth: bytes.
pub const RCVBUFTH_BYTES: c_int = 0;
/// dr_unit of struct d2tp_rcvbufth: milliseconds at the rate that the program reads.
pub const RCVBUFTH_MS: c_int = 1;
/// int: what goes on after this process has ended, carried by the user's agent; without one EOPNOTSUPP. Before
/// connect. Where that is all, reads into 32 bytes or more after connect: the token that d2tp_reopen takes.
pub const SO_PERSIST: c_int = 13;
/// D2TP_SO_PERSIST: nothing (the default).
pub const PERSIST_NO: c_int = 0;
/// D2TP_SO_PERSIST: what was written goes on to the peer.
pub const PERSIST_WRITTEN: c_int = 1;
/// D2TP_SO_PERSIST: the connection stays, for a day at most, until d2tp_reopen or d2tp_close.
pub const PERSIST_OPEN: c_int = 2;
/// Bytes of the token that d2tp_reopen takes.
pub const TOKEN_BYTES: usize = 32;
/// int, milliseconds, 1 to a day: how long a datagram is worth sending (default: 1000). Any time; also for one
/// message, as a control message of sendmsg.
pub const SO_EXPIRY: c_int = 14;
/// int: which paths carry what is sent. Any time; also for one message, as a control message of sendmsg.
pub const SO_ROUTE: c_int = 15;
/// D2TP_SO_ROUTE: whichever is fastest (the default).
pub const ROUTE_ANY: c_int = 0;
/// D2TP_SO_ROUTE: the one least likely to fail.
pub const ROUTE_STEADIEST: c_int = 1;
/// D2TP_SO_ROUTE: a copy on each; the first to arrive counts.
pub const ROUTE_EACH: c_int = 2;

/// Paths in struct d2tp_info at most.
pub const PATHS_MAX: usize = 8;

/// The value of D2TP_SO_RCVBUFTH.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct D2tpRcvbufth {
    /// Networks that cost begin when no more than this is ahead.
    pub dr_low: u64,
    /// Networks that cost end at this: 64 MiB or a day at most, and no less than dr_low.
    pub dr_high: u64,
    /// D2TP_RCVBUFTH_BYTES or D2TP_RCVBUFTH_MS.
    pub dr_unit: u32,
    /// The rate that the program reads at, in bytes a second; 0: as it is measured.
    pub dr_rate: u32,
}
