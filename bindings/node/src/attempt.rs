//! A connection that is being made. It has its own thread, which waits for hours without a network
//! and would block other calls in Node's pool.

use std::io::PipeWriter;
use std::os::fd::{AsFd, IntoRawFd};

use d2tp_sockets::D2tpStream;
use napi::Env;
use napi::bindgen_prelude::{Function, Undefined};
use napi::threadsafe_function::{ThreadsafeCallContext, ThreadsafeFunctionCallMode};
use napi_derive::napi;

use crate::fault::{CallFault, ThrowFault};
use crate::options::NodeOptions;

/// Bytes of the thread's stack: the thread waits, and calls the library.
pub const STACK_BYTES: usize = 256 * 1024; // a guess

/// A connection that is being made, for `index.js`.
#[napi]
pub struct NodeAttempt {
    fd: i32,
    /// Closing this ends the thread's wait: when the attempt is abandoned, or when Node or one of
    /// its workers ends. While the connection is being made the callback owns this.
    waiting: Option<PipeWriter>,
}

#[napi]
impl NodeAttempt {
    /// The descriptor, which Node polls and closes.
    #[napi(getter)]
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// Abandons the attempt: it reports nothing more.
    #[napi]
    pub fn abandon(&mut self) {
        self.waiting = None;
    }
}

/// Begins to connect; `done` is called with null or an error, unless the attempt is abandoned.
#[napi]
pub fn connect(
    env: &Env,
    address: String,
    proxy: String,
    options: NodeOptions,
    done: Function<Option<CallFault>, Undefined>,
) -> napi::Result<NodeAttempt> {
    let begin = || {
        let attempt = options.settings(&proxy)?.attempt(&address)?;
        // A duplicate for Node: an abandoned attempt is ended by the library's own.
        let fd = attempt.as_fd().try_clone_to_owned()?;
        Ok((attempt, fd, std::io::pipe()?))
    };
    let (attempt, fd, (give_up, waiting)) = begin().failed(env)?;
    let done = done
        .build_threadsafe_function::<Option<CallFault>>()
        .build_callback(|call: ThreadsafeCallContext<Option<CallFault>>| Ok(call.value))?;
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        let fault = match attempt.run(give_up.as_fd()) {
            Ok(None) => return,
            // Node has a duplicate of it.
            Ok(Some(made)) => {
                drop::<D2tpStream>(made);
                None
            }
            Err(error) => Some(CallFault::from(error)),
        };
        done.call(fault, ThreadsafeFunctionCallMode::Blocking);
    });
    started.map_err(CallFault::from).failed(env)?;
    Ok(NodeAttempt {
        fd: fd.into_raw_fd(),
        waiting: Some(waiting),
    })
}
