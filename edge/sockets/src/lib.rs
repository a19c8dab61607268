//! D2TP connections as Rust streams: [`D2tpStream`] and [`D2tpListener`] block like those of
//! `std::net`; [`asynchronous::AsyncStream`] and [`asynchronous::AsyncListener`] are for tokio.
//!
//! ```text
//!  D2tpStream: Read, Write, AsFd ┐
//!  asynchronous::AsyncStream:    ├── descriptor of the kernel ── engine of libd2tp ══ links ══▶
//!      AsyncRead + AsyncWrite ───┘
//! ```
//!
//! [`DatagramSocket`] carries messages, like `std::net::UdpSocket`. D2TP's own operations on a
//! connection, such as its deadline and paths, are in the trait [`D2tpConnection`].
//!
//! They use the calls of `libd2tp` (docs/sockets.md), which this crate contains. A descriptor may
//! therefore be polled beside others, given to another library, or passed to a child.
//!
//! ```
//! use std::io::{Read, Write};
//! use std::time::Duration;
//!
//! # fn main() -> std::io::Result<()> {
//! # let home = std::env::temp_dir().join(format!("d2tp-sockets-doc-{}", std::process::id()));
//! # // SAFETY: nothing else runs yet.
//! # unsafe { std::env::set_var("XDG_CONFIG_HOME", &home) };
//! let listener = d2tp_sockets::D2tpListener::bind("127.0.0.1:0".parse().unwrap())?;
//! let address = listener.address()?; // d2tp://127.0.0.1:…/KEY
//! let server = std::thread::spawn(move || {
//!     let mut stream = listener.accept()?.0;
//!     std::io::copy(&mut stream.try_clone()?, &mut stream)
//! });
//! let settings = d2tp_sockets::ConnectSettings {
//!     deadline: Some(Duration::from_secs(3600)),
//!     ..Default::default()
//! };
//! let mut stream = settings.connect(&address)?;
//! stream.write_all(b"there and back")?;
//! stream.shutdown(std::net::Shutdown::Write)?;
//! let mut answer = String::new();
//! stream.read_to_string(&mut answer)?;
//! assert_eq!(answer, "there and back");
//! # drop(stream);
//! # server.join().unwrap()?;
//! # std::fs::remove_dir_all(home)
//! # }
//! ```

pub mod asynchronous;
mod connect_attempt;
mod connection;
mod connection_token;
mod datagrams;
mod device;
pub mod info;
mod raw;
mod settings;
mod stream;

pub use connect_attempt::ConnectAttempt;
pub use connection::D2tpConnection;
pub use connection_token::ConnectionToken;
pub use datagrams::DatagramSocket;
pub use device::{DLock, network_changed};
pub use info::ConnectionInfo;
pub use raw::ConnectionFault;
pub use settings::{
    BufferThresholds, ConnectSettings, ConnectionPersist, LatePolicy, PayPolicy, SendRoute,
    ThresholdUnit,
};
pub use stream::{D2tpListener, D2tpStream};
