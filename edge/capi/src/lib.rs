//! `libd2tp`: the BSD socket calls over D2TP (`docs/sockets.md`, `include/d2tp.h`).
//!
//! ```text
//!  the program                      │ the engine: one thread, its own descriptors
//!  fd ── kernel TCP on loopback ────┼──── pump ── Flow ── Device or Server ══ links ══▶
//!  select, epoll, read, sendfile    │       (d2tp-driver)
//! ```
//!
//! The descriptor that a program holds is one end of a loopback TCP connection, so the kernel
//! itself handles all calls on the descriptor, and a reset appears as such (`pair`). The other end
//! belongs to a background thread that starts at first use (`engine`) and copies data between it
//! and a flow (`pump`), ahead of the program if requested (`read_ahead`). State that the kernel
//! does not have (the deadline, the peer, the cause of an error) is in `table`, which is indexed by
//! the socket's cookie, so that descriptors may be reused and duplicated. Datagram sockets are UDP
//! sockets on loopback, in the same way (`datagrams`).
//!
//! If the user's agent runs, it carries outgoing streams (`agent_delegation`), with the tasks of
//! this crate (`agent_carrier`).
//!
//! # The order of the files
//!
//! A file needs only files of its own row and of the rows below it.
//!
//! ```text
//!  calls       calls/*                                     the functions of the header
//!  process     engine · exit_flush · fork                  the thread, its start and end
//!              engine_handle                               how calls reach it
//!  behaviour   connect · listen · agent_carrier · wake_watch        tasks on the engine's thread
//!              agent_delegation · pump · policy · datagrams/{client,server,dispatch,for_agent}
//!  state       engine_state                                everything that the engine has:
//!              table                                       sockets, as the program's calls know them
//!              carried_flow · server_session · agent_connection · listen_address · datagrams/registry
//!              socket_owner · agent_socket · scheduled_socket · read_ahead · wake_registry
//!  facts       options · info · connection_status · connect_call · connect_wait · agent_message · reopen_token
//!              address · identity · clock · pair · kernel · memory · errno
//! ```
//!
//! Tasks change `EngineState`, which does not depend on the engine. Only `engine_handle` and the
//! files above it may be called from the program's threads, besides the facts and `table`.
//!
//! Only `calls`, the numbers of the options and the interface for agents are public.

mod address;
mod agent_address;
pub mod agent_carrier;
mod agent_client;
mod agent_connection;
mod agent_delegation;
mod agent_message;
mod agent_socket;
mod calls;
mod carried_flow;
mod clock;
mod connect;
mod connect_call;
mod connect_wait;
mod connection_status;
mod connection_store;
mod datagram_accounting;
mod datagrams;
mod dlock;
mod engine;
mod engine_handle;
mod engine_state;
mod errno;
mod exit_flush;
mod flow_info;
mod fork;
mod header;
mod identity;
mod info;
mod kept_connections;
mod kernel;
mod left_connection;
mod listen;
mod listen_address;
mod memory;
mod options;
mod pair;
mod policy;
mod program_stream;
mod proxy_choice;
mod pump;
mod rcvbuf_thresholds;
mod read_ahead;
mod reopen_token;
mod scheduled_socket;
mod server_session;
mod session_recovery;
mod settings_file;
mod socket_owner;
mod socket_scheduler;
mod table;
mod tunnel;
mod wake_registry;
mod wake_watch;

pub use calls::*;
pub use engine::share_descriptors;
pub use header::*;
