//! Packets over WebSocket, TLS and TCP: paths through networks that block UDP.
//!
//! ```text
//!  device                                                                     server
//!  connect ─▶ TCP on one link ─▶ [HTTP proxy: CONNECT] ─▶ TLS ─▶ GET /d2tp, Upgrade ─▶ StreamListener
//!                                                                [nginx, HAProxy, a CDN] ┘
//!  then, both ways: binary messages of some packets, each after two bytes of length
//! ```
//!
//! TLS is used because networks pass traffic that looks like the web. Security does not depend on
//! it: the packets are sealed for a key that the device knows, so any certificate is accepted. A
//! listener accepts plain HTTP on the same port, from a reverse proxy that terminates TLS itself.

mod connect;
mod identity;
mod listen;
mod messages;
mod tls;
mod unsent;

pub use connect::{
    ConnectError, HttpProxyError, StreamTarget, check_http_proxy, connect, http_proxy_for,
    is_http_proxy_set, use_http_proxy,
};
pub use identity::{IdentityError, StreamIdentity};
pub use listen::TcpStreamAcceptor;
pub use messages::{PacketBatch, PacketReceiver, PacketSender, StreamConnection, StreamEnd};

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use unsent::SharedTcp;

/// The path of the request that opens a stream.
pub const STREAM_HTTP_PATH: &str = "/d2tp";
/// The WebSocket subprotocol that both ends send.
pub const SUBPROTOCOL: &str = "d2tp";
/// The default port: of all TCP ports the one that the fewest networks block.
pub const STREAM_PORT_DEFAULT: u16 = 443;
/// The largest message that is accepted: a batch of packets and their lengths.
pub const MESSAGE_BYTES_MAX: usize = 128 * 1024;
/// Bytes that wait to be written before they are: those of a batch are written together.
const WRITE_BUFFER_BYTES: usize = 64 * 1024;
/// The most that waits to be written: a message of one packet of any size beside what waits already. So much is kept of
/// pongs to a peer that sends pings and reads nothing; pings beyond are not answered.
const WRITE_BUFFER_BYTES_MAX: usize = WRITE_BUFFER_BYTES + 66 * 1024;
/// The maximum time from the first TCP segment until packets can be sent.
pub const CONNECT_MAX: Duration = Duration::from_secs(10); // a guess: three SYNs and a slow proxy

/// How long TCP retransmits unacknowledged bytes before the connection counts as dead. A new
/// connection is faster than the backed-off retransmission of an old one.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30); // as long as a link may be without carrier

/// A byte stream over which a WebSocket can be opened.
pub(crate) trait CarrierStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> CarrierStream for T {}

/// Sets the options of a connection that carries packets.
fn carrier_of(tcp: TcpStream) -> io::Result<SharedTcp> {
    tcp.set_nodelay(true)?;
    socket2::SockRef::from(&tcp).set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX))?;
    SharedTcp::new(tcp)
}

fn websocket_config() -> WebSocketConfig {
    let mut config = WebSocketConfig::default();
    config.read_buffer_size = 64 * 1024;
    config.write_buffer_size = WRITE_BUFFER_BYTES;
    config.max_write_buffer_size = WRITE_BUFFER_BYTES_MAX;
    config.max_message_size = Some(MESSAGE_BYTES_MAX);
    config.max_frame_size = Some(MESSAGE_BYTES_MAX);
    config
}
