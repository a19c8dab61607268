//! Bytes between a flow and the engine's end of a program's socket, both ways until both have ended.
//!
//! ```text
//!  program writes ─▶ kernel ─▶ read, at most READ_BYTES ─▶ flow, when it has room
//!  program reads  ◀─ kernel ◀─ written, many pieces at once ◀─ flow
//! ```
//!
//! Ends stay ends (half-close), and breaks stay breaks: a flow that broke resets the program's socket, a
//! socket that was reset resets the flow. What the kernel cannot tell the program is in
//! [`Fate`](crate::table::Fate) before that.

use std::cell::{Cell, RefCell};
use std::future::{Future as _, poll_fn};
use std::io::{self, IoSlice};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Buf, Bytes, BytesMut};
use d2tp_driver::{Flow, FlowEnd, FlowIo as _};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::errno::Fault;
use crate::home::{Home, LineState, OnLine};
use crate::options::Options;
use crate::policy;
use crate::table::Fate;

/// Bytes read from a program's socket at once. More costs memory for every socket that writes, and from 128 KiB
/// on the C library maps and unmaps each piece; less costs system calls. docs/sockets.md, "Speed"
const READ_BYTES: usize = 64 * 1024;
/// Less room than this is not worth a read.
const READ_ROOM_MIN: usize = 16 * 1024;
/// Pieces of a flow that are written to a socket in one call.
const PIECES_MAX: usize = 64;
/// Reset code of a flow whose program's socket was reset.
const ABORTED: u64 = 0xd300;
/// Between two looks at what the peer has acknowledged, while somebody waits for it.
const FLUSH_LOOK: std::time::Duration = std::time::Duration::from_millis(2); // a guess

/// A socket's flow.
pub(crate) struct Held {
    pub(crate) flow: RefCell<Flow>,
    /// The device's session; none for flows that were accepted.
    pub(crate) line: Option<OnLine>,
    pub(crate) fate: Arc<Fate>,
    pub(crate) options: RefCell<Options>,
    /// Offset in the flow of the program's first byte.
    base: u64,
    /// Bytes taken from the program and given to it.
    pub(crate) sent: Cell<u64>,
    pub(crate) received: Cell<u64>,
    /// The program will write no more, and all it wrote is in the flow.
    drained: Cell<bool>,
    /// Its options are others than before.
    pub(crate) changed: Notify,
}

impl Held {
    pub(crate) fn new(flow: Flow, line: Option<OnLine>, fate: Arc<Fate>, options: Options) -> Held {
        Held {
            base: flow.written(),
            flow: RefCell::new(flow),
            line,
            fate,
            options: RefCell::new(options),
            sent: Cell::new(0),
            received: Cell::new(0),
            drained: Cell::new(false),
            changed: Notify::new(),
        }
    }

    /// Waits until the peer has the first `bytes` of the program's.
    ///
    /// # Errors
    /// The connection broke before.
    pub(crate) async fn flush(&self, bytes: u64) -> Result<(), Fault> {
        loop {
            // All that a flow which ended well has written was acknowledged.
            if self.flow.borrow().end() == Some(FlowEnd::Complete)
                || self.flow.borrow().acknowledged() >= self.base + bytes
            {
                return Ok(());
            }
            if let Some(fault) = self.fate.fault.get() {
                return Err(fault.clone());
            }
            tokio::time::sleep(FLUSH_LOOK).await;
        }
    }

    /// Bytes of the program's that the peer has acknowledged.
    pub(crate) fn acknowledged(&self) -> u64 {
        match self.flow.borrow().end() {
            Some(FlowEnd::Complete) => self.sent.get(),
            _ => self.flow.borrow().acknowledged().saturating_sub(self.base),
        }
    }

    /// Whether the peer has all that the program ever wrote, its end included.
    pub(crate) fn is_delivered(&self) -> bool {
        self.drained.get() && self.flow.borrow().is_flushed()
    }

    /// All that the program ever wrote is in the flow.
    pub(crate) fn finished(&self) {
        self.drained.set(true);
    }

    pub(crate) fn fault(&self, error: &io::Error) -> Fault {
        let line = self.line.as_ref().map(|line| line.0.state.borrow().clone());
        match (self.flow.borrow().end(), line) {
            (Some(FlowEnd::SessionEnded) | None, Some(LineState::Over(end))) => {
                Fault::of_session(&end)
            }
            (Some(end), _) => Fault::of_flow(end),
            (None, _) if error.kind() == io::ErrorKind::TimedOut => Fault::new(libc::ETIME, error),
            (None, _) => Fault::new(libc::ECONNRESET, error),
        }
    }
}

/// Why a pump stopped before both ends had.
enum Broken {
    /// The flow.
    Flow(Fault),
    /// The program's socket: it was closed or reset while there was something to say.
    Program,
}

/// Makes a flow known, before its program's socket is connected: what that asks then is answered.
pub(crate) fn enter(home: &Home, held: Held) -> Rc<Held> {
    let held = Rc::new(held);
    let serial = held.fate.serial;
    home.flows.borrow_mut().insert(serial, held.clone());
    held
}

/// It is over.
pub(crate) fn leave(home: &Home, held: &Held) {
    held.fate.over.store(true, Ordering::Relaxed);
    home.flows.borrow_mut().remove(&held.fate.serial);
}

/// Carries until both directions are over.
pub(crate) async fn run(home: Rc<Home>, held: Rc<Held>, stream: TcpStream) {
    let carried = {
        let up = up(&home, &held, &stream);
        let down = async {
            match down(&held, &stream).await {
                // It closed without reading to the end. What it said before is still read.
                Err(Broken::Program) => Ok(Heard::Part),
                whole => whole.map(|()| Heard::All),
            }
        };
        let both = async { tokio::try_join!(up, down) };
        tokio::select! {
            carried = both => carried,
            fault = policy::steer(&held) => {
                held.flow.borrow_mut().reset(ABORTED);
                Err(Broken::Flow(fault))
            }
        }
    };
    match carried {
        Ok(((), Heard::All)) => {
            drop(stream);
            if let Err(error) = poll_fn(|cx| held.flow.borrow_mut().poll_finished(cx)).await {
                let _ = held.fate.fault.set(held.fault(&error));
            }
        }
        // Dropping the flow leaves what was finished to arrive, and tells the peer that nobody reads.
        Ok(((), Heard::Part)) => {}
        Err(Broken::Flow(fault)) => {
            let _ = held.fate.fault.set(fault);
            break_off(stream);
        }
        Err(Broken::Program) => held.flow.borrow_mut().reset(ABORTED),
    }
    policy::stop(&held);
    leave(&home, &held);
}

/// How much of the flow the program took.
enum Heard {
    All,
    Part,
}

/// Resets the program's socket.
pub(crate) fn break_off(stream: TcpStream) {
    // If that fails the socket reads an end instead, and SO_ERROR still tells.
    let _ = stream.set_zero_linger();
}

async fn up(home: &Home, held: &Held, stream: &TcpStream) -> Result<(), Broken> {
    let mut leaving = home.leaving.subscribe();
    let mut buffer = BytesMut::new();
    loop {
        let mut last = *leaving.borrow_and_update();
        if !last {
            tokio::select! {
                readable = stream.readable() => readable.map_err(|_| Broken::Program)?,
                _ = leaving.changed() => last = true,
            }
        }
        if buffer.capacity() < READ_ROOM_MIN {
            buffer.reserve(READ_BYTES);
        }
        match stream.try_read_buf(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if last {
                    break;
                }
                // A socket at rest holds no buffer.
                buffer = BytesMut::new();
                continue;
            }
            Err(_) => return Err(Broken::Program),
        }
        let chunk = buffer.split().freeze();
        let bytes = chunk.len() as u64;
        write(held, &chunk).await?;
        held.sent.set(held.sent.get() + bytes);
    }
    let finished = poll_fn(|cx| {
        let mut flow = held.flow.borrow_mut();
        pin!(flow.shutdown()).poll(cx)
    });
    let finished = finished.await;
    held.finished();
    finished.map_err(|error| Broken::Flow(held.fault(&error)))
}

async fn write(held: &Held, chunk: &Bytes) -> Result<(), Broken> {
    poll_fn(|cx| {
        let mut flow = held.flow.borrow_mut();
        // Made anew at each turn: it holds nothing but the chunk.
        pin!(flow.write_chunk(chunk.clone())).poll(cx)
    })
    .await
    .map_err(|error| Broken::Flow(held.fault(&error)))
}

async fn down(held: &Held, stream: &TcpStream) -> Result<(), Broken> {
    let mut pieces: Vec<Bytes> = Vec::with_capacity(PIECES_MAX);
    loop {
        let mut ended = false;
        let read = poll_fn(|cx| {
            let mut flow = held.flow.borrow_mut();
            loop {
                match pin!(flow.read_chunk()).poll(cx) {
                    std::task::Poll::Ready(Ok(Some(chunk))) => pieces.push(chunk),
                    std::task::Poll::Ready(Ok(None)) => {
                        ended = true;
                        return std::task::Poll::Ready(Ok(()));
                    }
                    std::task::Poll::Ready(Err(error)) => {
                        return std::task::Poll::Ready(Err(error));
                    }
                    std::task::Poll::Pending if pieces.is_empty() => {
                        return std::task::Poll::Pending;
                    }
                    std::task::Poll::Pending => return std::task::Poll::Ready(Ok(())),
                }
                if pieces.len() == PIECES_MAX {
                    return std::task::Poll::Ready(Ok(()));
                }
            }
        })
        .await;
        let bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        put(stream, &mut pieces)
            .await
            .map_err(|_| Broken::Program)?;
        held.received.set(held.received.get() + bytes);
        read.map_err(|error| Broken::Flow(held.fault(&error)))?;
        if ended {
            break;
        }
    }
    socket2::SockRef::from(stream)
        .shutdown(std::net::Shutdown::Write)
        .map_err(|_| Broken::Program)
}

/// Writes all of it, as the program makes room.
async fn put(stream: &TcpStream, pieces: &mut Vec<Bytes>) -> io::Result<()> {
    let mut from = 0;
    while from < pieces.len() {
        let slices: Vec<IoSlice<'_>> = pieces[from..].iter().map(|p| IoSlice::new(p)).collect();
        match stream.try_write_vectored(&slices) {
            Ok(mut written) => {
                while from < pieces.len() && written >= pieces[from].len() {
                    written -= pieces[from].len();
                    // Its block is of use to the core again.
                    pieces[from] = Bytes::new();
                    from += 1;
                }
                if written > 0 {
                    pieces[from].advance(written);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
    pieces.clear();
    Ok(())
}
