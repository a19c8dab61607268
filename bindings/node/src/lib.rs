//! The functions of libd2tp that Node needs beside the descriptor: connecting, reopening,
//! listening, options, causes. They use Node-API, so that one build works with every version.
//! `index.js` is the interface for programs.
//!
//! ```text
//!  index.js ── connect ──▶ attempt.rs    a thread for each connection that is being made ─┐
//!           ── listen ───▶ listener.rs   a thread for each listener ──────────────────────┼─▶ Node's thread
//!           ── flush, info, reopen, end ─▶ a thread of Node's pool ───────────────────────┘
//! ```

// Node calls these; index.js documents them.
#![allow(missing_docs)]
#![cfg_attr(test, allow(dead_code, reason = "napi registers nothing in a test"))]

mod attempt;
mod fault;
mod listener;
mod options;

use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

use d2tp_sockets::info::{ConnectionInfo, ConnectionPath, ConnectionState};
use d2tp_sockets::info::{NetworkCost, PathActivity, StallReason};
use d2tp_sockets::{ConnectionToken, D2tpConnection, D2tpStream, DLock};
use napi::bindgen_prelude::{AsyncTask, Buffer, ToNapiValue, TypeName};
use napi::{Env, Task};
use napi_derive::napi;

use fault::{CallFault, ThrowFault};
use options::NodeOptions;

/// A blocking call on a thread of Node's pool.
pub struct PoolCall<T>(Option<Box<dyn FnOnce() -> Result<T, CallFault> + Send>>);

impl<T> PoolCall<T> {
    fn new(call: impl FnOnce() -> Result<T, CallFault> + Send + 'static) -> AsyncTask<PoolCall<T>>
    where
        T: ToNapiValue + TypeName + Send + 'static,
    {
        AsyncTask::new(PoolCall(Some(Box::new(call))))
    }
}

impl<T: ToNapiValue + TypeName + Send + 'static> Task for PoolCall<T> {
    type Output = Result<T, CallFault>;
    type JsValue = T;

    fn compute(&mut self) -> napi::Result<Self::Output> {
        let call = self.0.take().expect("Node computes once");
        Ok(call())
    }

    fn resolve(&mut self, env: Env, output: Self::Output) -> napi::Result<T> {
        output.map_err(|fault| fault.thrown(&env))
    }
}

/// A connection by a duplicate of Node's descriptor: Node may close its own meanwhile.
fn twin(fd: i32) -> Result<D2tpStream, CallFault> {
    // SAFETY: the descriptor is open, or the call fails: only -1 must not be borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.max(0)) };
    Ok(D2tpStream::from(fd.try_clone_to_owned()?))
}

/// Changes options of a connection.
#[napi]
pub fn set(env: &Env, fd: i32, options: NodeOptions) -> napi::Result<()> {
    let set = || options.set(&twin(fd)?);
    set().failed(env)
}

/// The cause of a broken connection, or an empty text.
#[napi]
pub fn cause(fd: i32) -> String {
    let cause = || twin(fd).ok()?.cause().ok()?;
    cause().unwrap_or_default()
}

/// A promise that the peer has all written data; it waits forever if `within_ms` is negative.
#[napi]
pub fn flush(env: &Env, fd: i32, within_ms: i32) -> napi::Result<AsyncTask<PoolCall<()>>> {
    let stream = twin(fd).failed(env)?;
    let within = u64::try_from(within_ms).ok().map(Duration::from_millis);
    Ok(PoolCall::new(move || match stream.flush_to_peer(within) {
        Err(late) if late.kind() == std::io::ErrorKind::WouldBlock => Err(CallFault::new(
            nix::errno::Errno::EAGAIN,
            "the peer has not got everything yet",
        )),
        flushed => Ok(flushed?),
    }))
}

/// A promise of the figures of a connection.
#[napi]
pub fn info(env: &Env, fd: i32) -> napi::Result<AsyncTask<PoolCall<NodeInfo>>> {
    let stream = twin(fd).failed(env)?;
    Ok(PoolCall::new(move || Ok(NodeInfo::of(stream.info()?))))
}

/// A promise that a connection is ended. Node closes the descriptor itself.
#[napi]
pub fn end(env: &Env, fd: i32) -> napi::Result<AsyncTask<PoolCall<()>>> {
    let stream = twin(fd).failed(env)?;
    Ok(PoolCall::new(move || Ok(stream.end()?)))
}

/// The token of a persistent connection.
#[napi]
pub fn token(env: &Env, fd: i32) -> napi::Result<Option<Buffer>> {
    let token = || Ok(twin(fd)?.token()?);
    let token: Option<ConnectionToken> = token().failed(env)?;
    Ok(token.map(|token| token.as_bytes().to_vec().into()))
}

/// A promise of the descriptor of a connection whose process has ended.
#[napi]
pub fn reopen(env: &Env, token: Buffer) -> napi::Result<AsyncTask<PoolCall<i32>>> {
    let token = ConnectionToken::try_from(&token[..])
        .map_err(|_| CallFault::new(nix::errno::Errno::EINVAL, "a token is a Buffer of 32 bytes"));
    let token = token.failed(env)?;
    Ok(PoolCall::new(move || {
        let stream = D2tpStream::reopen(&token)?;
        Ok(OwnedFd::from(stream).into_raw_fd())
    }))
}

/// host:port of the peer, or an empty text.
#[napi]
pub fn far(fd: i32) -> String {
    let far = || twin(fd).ok()?.peer_addr().ok();
    far().map_or(String::new(), |far| far.to_string())
}

/// Makes all links be tried at once, since the networks changed.
#[napi]
pub fn network_changed(env: &Env) -> napi::Result<()> {
    d2tp_sockets::network_changed()
        .map_err(CallFault::from)
        .failed(env)
}

/// D-Locks that the program holds.
static DLOCKS: Mutex<Vec<DLock>> = Mutex::new(Vec::new());

/// Takes or releases a D-Lock.
#[napi]
pub fn dlock(env: &Env, taken: bool) -> napi::Result<()> {
    let mut held = DLOCKS.lock().expect("nobody panics with it");
    if taken {
        held.push(DLock::acquire().map_err(CallFault::from).failed(env)?);
    } else {
        held.pop();
    }
    Ok(())
}

/// The state of a connection and its paths, in the numbers of `d2tp.h`.
#[napi(object)]
pub struct NodeInfo {
    pub state: u32,
    pub reason: u32,
    pub bytes_sent: f64,
    pub bytes_acked: f64,
    pub bytes_received: f64,
    pub bytes_ahead: f64,
    /// Milliseconds; negative without a deadline.
    pub slack: f64,
    pub paths: Vec<NodePath>,
}

/// A path of a connection.
#[napi(object)]
pub struct NodePath {
    pub link: String,
    pub cost: u32,
    pub state: u32,
    /// The smoothed round trip in milliseconds.
    pub rtt: f64,
    pub rtt_min: f64,
    pub bytes_received: f64,
    pub bytes_sent: f64,
    /// The rate; 0 if it is not known.
    pub rate: f64,
}

impl NodeInfo {
    fn of(info: ConnectionInfo) -> NodeInfo {
        NodeInfo {
            state: match info.state {
                ConnectionState::Idle => 0,
                ConnectionState::Connecting => 1,
                ConnectionState::Connected => 2,
                ConnectionState::Over => 3,
            },
            reason: match info.reason {
                Some(StallReason::NoPath) => 1,
                Some(StallReason::PathCost) => 2,
                _ => 0,
            },
            bytes_sent: info.bytes_sent as f64,
            bytes_acked: info.bytes_acked as f64,
            bytes_received: info.bytes_received as f64,
            bytes_ahead: info.bytes_ahead as f64,
            slack: info.slack.map_or(-1.0, |slack| slack.as_millis() as f64),
            paths: info.paths.into_iter().map(NodePath::of).collect(),
        }
    }
}

impl NodePath {
    fn of(path: ConnectionPath) -> NodePath {
        NodePath {
            link: path.link,
            cost: match path.cost {
                NetworkCost::Free => 0,
                NetworkCost::Metered => 1,
                NetworkCost::Roaming => 2,
            },
            state: match path.state {
                PathActivity::Opening => 0,
                PathActivity::Works => 1,
                PathActivity::Silent => 2,
            },
            rtt: path.rtt.as_secs_f64() * 1e3,
            rtt_min: path.rtt_min.as_secs_f64() * 1e3,
            bytes_received: path.bytes_received as f64,
            bytes_sent: path.bytes_sent as f64,
            rate: path.rate.unwrap_or(0) as f64,
        }
    }
}
