//! A listener: its thread accepts connections and passes them to Node.

use std::io::PipeWriter;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use d2tp_sockets::D2tpListener;
use napi::bindgen_prelude::{Function, Undefined};
use napi::threadsafe_function::{ThreadsafeCallContext, ThreadsafeFunctionCallMode};
use napi::{Env, Status};
use napi_derive::napi;
use nix::errno::Errno;

use crate::attempt::STACK_BYTES;
use crate::fault::{CallFault, ThrowFault};

/// How long a listener pauses if there is no descriptor or memory for a connection.
const REST: Duration = Duration::from_millis(100); // a guess

/// A listener, for `index.js`.
#[napi]
pub struct NodeListener {
    address: String,
    /// Closing this ends the thread's wait: when listening stops, or when Node or one of its
    /// workers ends. While it listens the callback owns this.
    waiting: Option<PipeWriter>,
}

#[napi]
impl NodeListener {
    /// The address to which peers connect: `d2tp://host:port/KEY`.
    #[napi(getter)]
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Accepts no more connections; the callback then gets -1.
    #[napi]
    pub fn stop(&mut self) {
        self.waiting = None;
    }
}

/// Listens at a UDP address; `heard` is called with the descriptor of each connection, and with -1 at the end.
#[napi]
pub fn listen(
    env: &Env,
    ip: String,
    port: u16,
    heard: Function<i32, Undefined>,
) -> napi::Result<NodeListener> {
    let begin = || {
        let ip: IpAddr = ip.parse().map_err(|_| {
            let words = "a D2TP server listens at an address in numbers";
            CallFault::new(Errno::EINVAL, words)
        })?;
        let listener = D2tpListener::bind(SocketAddr::new(ip, port))?;
        let address = listener.address()?;
        Ok((listener, address, std::io::pipe()?))
    };
    let (listener, address, (stop, waiting)) = begin().failed(env)?;
    let heard = heard
        .build_threadsafe_function::<i32>()
        .build_callback(|call: ThreadsafeCallContext<i32>| Ok(call.value))?;
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        loop {
            match listener.accept_until(stop.as_fd()) {
                Ok(None) => break,
                Ok(Some((stream, _))) => {
                    let fd = OwnedFd::from(stream).into_raw_fd();
                    let told = heard.call(fd, ThreadsafeFunctionCallMode::Blocking);
                    if told != Status::Ok {
                        break;
                    }
                }
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM) => {
                        std::thread::sleep(REST);
                    }
                    Some(Errno::EBADF | Errno::EINVAL) | None => break,
                    // A connection that broke before it was accepted.
                    Some(_) => {}
                },
            }
        }
        // When this returns the address is free, or becomes free when the accepted connections have
        // ended.
        let _ = listener.end();
        heard.call(-1, ThreadsafeFunctionCallMode::Blocking);
    });
    started.map_err(CallFault::from).failed(env)?;
    Ok(NodeListener {
        address,
        waiting: Some(waiting),
    })
}
