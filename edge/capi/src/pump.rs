//! Bytes between a flow and the engine's end of a program's socket, both ways until both have ended.
//!
//! ```text
//!  program writes ─▶ kernel ─▶ read, at most READ_BYTES ─▶ flow, when it has room
//!  program reads  ◀─ kernel ◀─ written, many pieces at once ◀─ flow
//! ```
//!
//! Ends stay ends (half-close), and breaks stay breaks: a flow that broke resets the program's socket, a
//! socket that was reset resets the flow. What the kernel cannot tell the program is in
//! [`Fate`](crate::table::ConnectionStatus) before that.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future as _, poll_fn};
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd as _;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use d2tp_driver::{Flow, FlowEnd, FlowIo as _};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::agent_carrier::SocketOwner;
use crate::engine_state::{EngineState, ServerSessionState, SessionUse};
use crate::errno::SocketFault;
use crate::info::D2tpInfo;
use crate::options::{PersistMode, SocketOptions};
use crate::policy::{self, ScheduledSocket};
use crate::read_ahead::{self, ReadAhead};
use crate::table::ConnectionStatus;

/// Bytes read from a program's socket at once. More costs memory for every socket that writes, and from 128 KiB
/// on the C library maps and unmaps each piece; less costs system calls. docs/sockets.md, "Speed"
const READ_BYTES: usize = 64 * 1024;
/// Less room than this is not worth a read.
const READ_ROOM_MIN: usize = 16 * 1024;
/// Pieces of a flow that are written to a socket in one call.
const PIECES_MAX: usize = 64;
/// Reset code of a flow whose program's socket was reset.
const ABORTED: u64 = 0xd300;
/// Bytes of a persistent socket that are taken from the program before the flow has room for them. More
/// costs an agent memory, less is taken only when the program ends.
const KEPT_BYTES_MAX: usize = 8 * 1024 * 1024; // a guess
/// How long what a program wrote is still sent after its death, unless its socket is persistent.
const LAST_WORDS: Duration = Duration::from_secs(5); // as at `exit`
/// What answers a program that has ended is read to its end, that the peer may end well, but no more of it
/// than this, …
const UNREAD_BYTES_MAX: u64 = 1024 * 1024; // a guess
/// The program's answer is waited for no longer than this after the peer has all.
const ANSWER_WITHIN: Duration = Duration::from_secs(60); // a guess: an origin that thinks
/// Between two looks at whether the peer has all of it, which may take days.
const DELIVERED_LOOK: Duration = Duration::from_secs(1); // a guess
/// Between two looks at what the peer has acknowledged, while somebody waits for it.
const FLUSH_LOOK: Duration = Duration::from_millis(2); // a guess

/// A socket's flow.
pub(crate) struct CarriedFlow {
    pub(crate) flow: RefCell<Flow>,
    /// The device's session; none for flows that were accepted.
    pub(crate) session: Option<SessionUse>,
    pub(crate) status: Arc<ConnectionStatus>,
    /// The process that the socket belongs to, where that is another one.
    owner: Option<Rc<SocketOwner>>,
    pub(crate) options: RefCell<SocketOptions>,
    /// Offset in the flow of the program's first byte.
    base: u64,
    /// Acknowledged when it was last asked: a flow that broke knows no more.
    acked: Cell<u64>,
    /// Bytes taken from the program and given to it.
    pub(crate) sent: Cell<u64>,
    pub(crate) received: Cell<u64>,
    /// What came and the program has not read.
    pub(crate) read_ahead: ReadAhead,
    /// The program will write no more, and all it wrote is in the flow.
    drained: Cell<bool>,
    /// Its options are others than before, or it moves again.
    pub(crate) changed: Notify,
    /// Whoever decides for it waits until it moves.
    pub(crate) resting: Cell<bool>,
    /// The socket as a client of the scheduler.
    pub(crate) scheduled: RefCell<Option<ScheduledSocket>>,
}

impl CarriedFlow {
    pub(crate) fn new(
        flow: Flow,
        line: Option<SessionUse>,
        fate: Arc<ConnectionStatus>,
        options: SocketOptions,
    ) -> CarriedFlow {
        CarriedFlow {
            base: flow.written(),
            acked: Cell::new(0),
            flow: RefCell::new(flow),
            session: line,
            status: fate,
            owner: None,
            options: RefCell::new(options),
            resting: Cell::new(false),
            scheduled: RefCell::default(),
            sent: Cell::new(0),
            received: Cell::new(0),
            read_ahead: ReadAhead::default(),
            drained: Cell::new(false),
            changed: Notify::new(),
        }
    }

    /// Returns the flow as one of a socket of another process.
    pub(crate) fn owned_by(self, owner: Rc<SocketOwner>) -> CarriedFlow {
        CarriedFlow {
            owner: Some(owner),
            ..self
        }
    }

    pub(crate) fn owner(&self) -> Option<&SocketOwner> {
        self.owner.as_deref()
    }

    /// Whether its program ended before it.
    pub(crate) fn is_orphan(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.is_gone())
    }

    async fn orphaned(&self) {
        match &self.owner {
            Some(owner) => owner.gone().await,
            None => std::future::pending().await,
        }
    }

    /// Other options.
    pub(crate) fn change(&self, options: SocketOptions) {
        let before = self.options.replace(options.clone());
        if (before.deadline, before.if_late) != (options.deadline, options.if_late) {
            self.flow.borrow().set_deadline(options.within());
        }
        if before.route != options.route {
            self.flow.borrow().set_route(options.route);
        }
        self.changed.notify_one();
    }

    /// The peer has said all it had to say, and it is here.
    pub(crate) fn has_all(&self) {
        self.read_ahead.ended();
        self.changed.notify_one();
    }

    pub(crate) fn count(&self, sum: &Cell<u64>, bytes: u64) {
        sum.set(sum.get() + bytes);
        if self.resting.replace(false) {
            self.changed.notify_one();
        }
    }

    /// Waits until the peer has the first `bytes` of the program's.
    ///
    /// # Errors
    /// The connection broke before.
    pub(crate) async fn flush(&self, bytes: u64) -> Result<(), SocketFault> {
        loop {
            let end = self.flow.borrow().end();
            // All that a flow which ended well has written was acknowledged.
            if end == Some(FlowEnd::Complete)
                || self.flow.borrow().acknowledged() >= self.base + bytes
            {
                return Ok(());
            }
            if let Some(fault) = self.status.fault.get() {
                return Err(fault.clone());
            }
            if let Some(end) = end.filter(|_| self.owner.is_some()) {
                return Err(SocketFault::of_flow(end));
            }
            tokio::time::sleep(FLUSH_LOOK).await;
        }
    }

    /// Bytes of the program's that the peer has acknowledged.
    pub(crate) fn acknowledged(&self) -> u64 {
        match self.flow.borrow().end() {
            Some(FlowEnd::Complete) => self.sent.get(),
            _ => {
                // Of a flow that broke no more may be known.
                let acked = self.flow.borrow().acknowledged().saturating_sub(self.base);
                self.acked.set(self.acked.get().max(acked));
                self.acked.get()
            }
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

    pub(crate) fn fault(&self, error: &io::Error) -> SocketFault {
        let line = self
            .session
            .as_ref()
            .map(|line| line.0.state.borrow().clone());
        match (self.flow.borrow().end(), line) {
            (Some(FlowEnd::SessionEnded) | None, Some(ServerSessionState::Over(end))) => {
                SocketFault::of_session(&end)
            }
            (Some(end), _) => SocketFault::of_flow(end),
            (None, _) if error.kind() == io::ErrorKind::TimedOut => {
                SocketFault::new(libc::ETIME, error)
            }
            (None, _) => SocketFault::new(libc::ECONNRESET, error),
        }
    }
}

/// Why a pump stopped before both ends had.
pub(crate) enum PumpError {
    /// The flow failed.
    Flow(SocketFault),
    /// The program's socket: it was closed or reset while there was something to say.
    Program,
}

/// Makes a flow known, before its program's socket is connected: what that asks then is answered.
pub(crate) fn register(home: &EngineState, held: CarriedFlow) -> Rc<CarriedFlow> {
    let held = Rc::new(held);
    let serial = held.status.serial;
    home.flows.borrow_mut().insert(serial, held.clone());
    held
}

/// Removes a flow that is over from the engine.
pub(crate) fn unregister(home: &EngineState, held: &CarriedFlow) {
    let _ = held.status.last.set(D2tpInfo::last_of(held));
    held.status.over.store(true, Ordering::Relaxed);
    home.flows.borrow_mut().remove(&held.status.serial);
}

/// Carries until both directions are over.
pub(crate) async fn run(home: Rc<EngineState>, held: Rc<CarriedFlow>, stream: TcpStream) {
    let persists = held.owner.is_some() && held.options.borrow().persist != PersistMode::No;
    held.read_ahead.open(stream.as_raw_fd());
    let carried = {
        let up = async {
            match persists {
                true => up_persistent(&held, &stream).await,
                false => up(&home, &held, &stream).await,
            }
        };
        let down = async {
            let down = async {
                match down(&home, &held, &stream).await {
                    // It closed without reading to the end. What it said before is still read.
                    Err(PumpError::Program) => Ok(ProgramDrain::Part),
                    whole => whole.map(|()| ProgramDrain::All),
                }
            };
            tokio::select! {
                heard = down => heard,
                () = held.orphaned(), if persists => drain_from_peer(&held).await,
            }
        };
        let both = async { tokio::try_join!(up, down) };
        tokio::select! {
            carried = both => carried,
            fault = policy::enforce(&home, &held) => {
                held.flow.borrow_mut().reset(ABORTED);
                Err(PumpError::Flow(fault))
            }
            () = orphan_expired(&held), if !persists => {
                held.flow.borrow_mut().reset(ABORTED);
                Err(PumpError::Program)
            }
        }
    };
    held.read_ahead.close();
    match carried {
        Ok(((), ProgramDrain::All)) => {
            clear_linger(&stream);
            drop(stream);
            if let Err(error) = poll_fn(|cx| held.flow.borrow_mut().poll_finished(cx)).await {
                let _ = held.status.fault.set(held.fault(&error));
            }
        }
        // Dropping the flow leaves what was finished to arrive, and tells the peer that nobody reads.
        Ok(((), ProgramDrain::Part)) => {}
        Err(PumpError::Flow(fault)) => {
            let _ = held.status.fault.set(fault.clone());
            if let Some(owner) = &held.owner {
                owner.send_fault(&fault).await;
            }
            break_off(stream);
        }
        Err(PumpError::Program) => held.flow.borrow_mut().reset(ABORTED),
    }
    policy::stop(&held);
    unregister(&home, &held);
}

/// Its program ended, and the time is over in which its last words are sent.
async fn orphan_expired(held: &CarriedFlow) {
    held.orphaned().await;
    tokio::time::sleep(LAST_WORDS).await;
}

/// Takes what comes for a program that has ended, so that the peer ends well. Nothing is put into its socket
/// any more: that would make the kernel forget what it still has of the program's.
async fn drain_from_peer(held: &CarriedFlow) -> Result<ProgramDrain, PumpError> {
    let ended = async {
        let mut unread = 0;
        while unread < UNREAD_BYTES_MAX {
            let chunk = poll_fn(|cx| {
                let mut flow = held.flow.borrow_mut();
                pin!(flow.read_chunk()).poll(cx)
            });
            match chunk.await {
                Ok(Some(chunk)) => unread += chunk.len() as u64,
                Ok(None) => return Ok(ProgramDrain::All),
                Err(error) => return Err(PumpError::Flow(held.fault(&error))),
            }
        }
        delivered(held).await;
        Ok(ProgramDrain::Part)
    };
    let patience = async {
        delivered(held).await;
        tokio::time::sleep(ANSWER_WITHIN).await;
    };
    tokio::select! {
        heard = ended => heard,
        () = patience => Ok(ProgramDrain::Part),
    }
}

/// Waits until the peer has all, or never will.
async fn delivered(held: &CarriedFlow) {
    while !held.is_delivered() && held.flow.borrow().end().is_none() {
        tokio::time::sleep(DELIVERED_LOOK).await;
    }
}

/// What was passed on to break with its holder ends as others do.
fn clear_linger(stream: &TcpStream) {
    // If that fails what the program has not read yet may be lost to it, and it hears so.
    let _ = socket2::SockRef::from(stream).set_linger(None);
}

/// How much of the flow the program took.
enum ProgramDrain {
    All,
    Part,
}

/// Resets the program's socket.
pub(crate) fn break_off(stream: TcpStream) {
    // If that fails the socket reads an end instead, and SO_ERROR still tells.
    let _ = stream.set_zero_linger();
}

async fn up(home: &EngineState, held: &CarriedFlow, stream: &TcpStream) -> Result<(), PumpError> {
    let mut leaving = home.leaving.subscribe();
    let mut buffer = BytesMut::new();
    loop {
        let mut last = *leaving.borrow_and_update();
        if !last {
            tokio::select! {
                readable = stream.readable() => readable.map_err(|_| PumpError::Program)?,
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
            Err(_) => return Err(PumpError::Program),
        }
        let chunk = buffer.split().freeze();
        let bytes = chunk.len() as u64;
        write(held, &chunk).await?;
        held.count(&held.sent, bytes);
    }
    finish(held).await
}

/// Ends the flow's direction.
async fn finish(held: &CarriedFlow) -> Result<(), PumpError> {
    let finished = poll_fn(|cx| {
        let mut flow = held.flow.borrow_mut();
        pin!(flow.shutdown()).poll(cx)
    });
    let finished = finished.await;
    held.finished();
    finished.map_err(|error| PumpError::Flow(held.fault(&error)))
}

/// How a program's direction ended.
enum ProgramEnd {
    All,
    /// The connection was reset: there may have been more.
    Part,
}

/// Carries what the program of a persistent socket writes: taken ahead of the flow, and all of it
/// once the program has ended, for the kernel forgets what a process left that nobody takes.
async fn up_persistent(held: &CarriedFlow, stream: &TcpStream) -> Result<(), PumpError> {
    let mut kept: VecDeque<Bytes> = VecDeque::new();
    let mut buffer = BytesMut::new();
    let mut bytes = 0;
    let mut said = None;
    loop {
        let takes = said.is_none() && (bytes < KEPT_BYTES_MAX || held.is_orphan());
        if said.is_some() && kept.is_empty() {
            break;
        }
        tokio::select! {
            readable = stream.readable(), if takes => {
                if buffer.capacity() < READ_ROOM_MIN {
                    buffer.reserve(READ_BYTES);
                }
                match readable.and_then(|()| stream.try_read_buf(&mut buffer)) {
                    Ok(0) => said = Some(ProgramEnd::All),
                    Ok(more) => {
                        bytes += more;
                        kept.push_back(buffer.split().freeze());
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        // A socket at rest holds no buffer.
                        buffer = BytesMut::new();
                    }
                    Err(_) => said = Some(ProgramEnd::Part),
                }
            }
            written = write_first(held, &kept), if !kept.is_empty() => {
                written?;
                let written = kept.pop_front().map_or(0, |chunk| chunk.len());
                bytes -= written;
                held.count(&held.sent, written as u64);
            }
            () = held.orphaned(), if said.is_none() && !takes => {}
        }
    }
    match said {
        Some(ProgramEnd::Part) => {
            // What there was is to arrive before the peer hears that it is not all.
            let _ = held.flush(held.sent.get()).await;
            Err(PumpError::Program)
        }
        _ => finish(held).await,
    }
}

async fn write_first(held: &CarriedFlow, kept: &VecDeque<Bytes>) -> Result<(), PumpError> {
    match kept.front() {
        Some(chunk) => write(held, chunk).await,
        None => Ok(()),
    }
}

async fn write(held: &CarriedFlow, chunk: &Bytes) -> Result<(), PumpError> {
    poll_fn(|cx| {
        let mut flow = held.flow.borrow_mut();
        // Made anew at each turn: it holds nothing but the chunk.
        pin!(flow.write_chunk(chunk.clone())).poll(cx)
    })
    .await
    .map_err(|error| PumpError::Flow(held.fault(&error)))
}

async fn down(home: &EngineState, held: &CarriedFlow, stream: &TcpStream) -> Result<(), PumpError> {
    let mut pieces: Vec<Bytes> = Vec::with_capacity(PIECES_MAX);
    loop {
        if held.options.borrow().thresholds.is_some() {
            return read_ahead::down(held, stream, &home.read_ahead).await;
        }
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
            .map_err(|_| PumpError::Program)?;
        held.count(&held.received, bytes);
        read.map_err(|error| PumpError::Flow(held.fault(&error)))?;
        if ended {
            held.has_all();
            return end_of_down(stream);
        }
    }
}

/// The program reads the end.
pub(crate) fn end_of_down(stream: &TcpStream) -> Result<(), PumpError> {
    socket2::SockRef::from(stream)
        .shutdown(std::net::Shutdown::Write)
        .map_err(|_| PumpError::Program)
}

/// Writes as much as there is room for, once the program makes some; returns how much.
pub(crate) async fn put_some(
    stream: &TcpStream,
    pieces: &mut VecDeque<Bytes>,
) -> io::Result<usize> {
    loop {
        let slices: Vec<IoSlice<'_>> = pieces
            .iter()
            .take(PIECES_MAX)
            .map(|piece| IoSlice::new(piece))
            .collect();
        match stream.try_write_vectored(&slices) {
            Ok(written) => {
                let mut left = written;
                while let Some(piece) = pieces.front_mut()
                    && left > 0
                {
                    let taken = left.min(piece.len());
                    piece.advance(taken);
                    left -= taken;
                    if piece.is_empty() {
                        pieces.pop_front();
                    }
                }
                return Ok(written);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
}

/// Writes all pieces, as the program makes room.
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
