//! Copies data between a flow and the engine's end of a program's socket, in both directions until
//! both have ended.
//!
//! ```text
//!  program writes ─▶ kernel ─▶ read, at most READ_BYTES ─▶ flow, when it has room
//!  program reads  ◀─ kernel ◀─ written, many pieces at once ◀─ flow
//! ```
//!
//! The end of one direction leaves the other one open (half-close). A flow that broke resets the
//! program's socket, and a socket that was reset resets the flow. The cause, which the kernel
//! cannot report, is set in [`ConnectionStatus`](crate::connection_status::ConnectionStatus) before
//! that.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future as _, poll_fn};
use std::io;
use std::os::fd::AsRawFd as _;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use d2tp_driver::{FlowEnd, FlowIo as _};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::carried_flow::CarriedFlow;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::options::PersistMode;
use crate::policy;
use crate::program_stream::{self, PIECES_MAX, break_off, clear_linger, put, put_some};
use crate::rcvbuf_thresholds::AHEAD_BYTES_MAX;
use crate::read_ahead::{ReadAheadMemory, ReadAheadQueue};

/// The number of bytes read from a program's socket at once. Higher: more memory for every socket
/// that writes, and from 128 KiB on the C library maps and unmaps each piece. Lower: more system
/// calls. See docs/sockets.md, "Speed".
const READ_BYTES: usize = 64 * 1024;
/// The smallest room that is worth a read, in bytes.
const READ_ROOM_MIN: usize = 16 * 1024;
/// Reset code of a flow whose program's socket was reset.
const ABORTED: u64 = 0xd300;
/// The most bytes of a persistent socket that are taken from the program before the flow has room
/// for them. Higher: more memory of the agent. Lower: more is taken only when the program ends.
const KEPT_BYTES_MAX: usize = 8 * 1024 * 1024; // a guess
/// How long data of a program is still sent after its death, unless its socket is persistent.
const LAST_WORDS: Duration = Duration::from_secs(5); // the same as at `exit`
/// The most bytes of the answer to a program that has ended that are read and discarded, so that
/// the peer can end normally.
const UNREAD_BYTES_MAX: u64 = 1024 * 1024; // a guess
/// How long the answer to a program that has ended is waited for, after the peer has all data.
const ANSWER_WITHIN: Duration = Duration::from_secs(60); // a guess: a slow origin
/// The first interval between checks whether the peer has a program's end.
const SENT_END_LOOK: Duration = Duration::from_millis(4); // a guess
/// The interval between checks whether the peer has all data, which may take days.
const DELIVERED_LOOK: Duration = Duration::from_secs(1); // a guess

/// Why copying stopped before both directions had ended.
enum PumpError {
    /// The flow failed.
    Flow(SocketFault),
    /// The program's socket was closed or reset while there was data for it.
    Program,
}

/// Copies until both directions are over.
pub(crate) async fn run(engine: Rc<EngineState>, held: Rc<CarriedFlow>, stream: TcpStream) {
    let persists = held.owner().is_some() && held.options.borrow().persist != PersistMode::No;
    held.read_ahead.open(stream.as_raw_fd());
    let carried = {
        let up = async {
            send_again(&held).await?;
            match persists {
                true => up_persistent(&held, &stream).await,
                false => up(&engine, &held, &stream).await,
            }
        };
        let down = async {
            let down = async {
                let copied = async {
                    match deliver_stored(&held, &stream).await? {
                        true => end(&stream),
                        false => down(&engine, &held, &stream).await,
                    }
                };
                match copied.await {
                    // The program closed without reading to the end. Data that it wrote before is
                    // still read.
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
            fault = policy::enforce(&engine, &held) => {
                held.flow.borrow_mut().reset(ABORTED);
                Err(PumpError::Flow(fault))
            }
            () = orphan_expired(&held), if !persists => {
                held.flow.borrow_mut().reset(ABORTED);
                Err(PumpError::Program)
            }
            () = until_handed_over(&engine, &held) => {
                held.leave();
                Ok(((), ProgramDrain::Part))
            }
            never = note_sent_end(&held), if held.store.is_some() => match never {},
        }
    };
    held.read_ahead.close();
    if held.is_left() {
        policy::stop(&held);
        return engine.forget(&held);
    }
    match carried {
        Ok(((), ProgramDrain::All)) => {
            clear_linger(&stream);
            drop(stream);
            let is_over = held.store.as_ref().is_some_and(|s| s.is_over_at_peer());
            if !is_over
                && let Err(error) = poll_fn(|cx| held.flow.borrow_mut().poll_finished(cx)).await
            {
                let _ = held.status.fault.set(held.fault(&error));
            }
        }
        // Dropping the flow leaves a finished direction to be delivered, and tells the peer that
        // nothing is read.
        Ok(((), ProgramDrain::Part)) => {}
        Err(PumpError::Flow(fault)) => {
            let _ = held.status.fault.set(fault.clone());
            if let Some(owner) = held.owner() {
                owner.send_fault(&fault).await;
            }
            break_off(stream);
        }
        Err(PumpError::Program) => held.flow.borrow_mut().reset(ABORTED),
    }
    policy::stop(&held);
    engine.unregister(&held);
}

/// Resolves when this agent ends, and the next one goes on with the connection.
async fn until_handed_over(engine: &EngineState, held: &CarriedFlow) {
    let mut handing_over = engine.handing_over.subscribe();
    // The sender is a field of the engine, so it exists.
    let _ = handing_over.wait_for(|now| *now).await;
    if !held.continues() {
        std::future::pending().await
    }
}

/// Notes when the peer has all that the program wrote, with the end.
async fn note_sent_end(held: &CarriedFlow) -> Infallible {
    held.until_drained().await;
    let mut look = SENT_END_LOOK;
    while !held.is_delivered() {
        tokio::time::sleep(look).await;
        look = (2 * look).min(DELIVERED_LOOK);
    }
    let end = held.flow.borrow().end();
    if let Some(store) = &held.store
        && matches!(end, None | Some(FlowEnd::Complete))
    {
        store.sent_end();
    }
    std::future::pending().await
}

/// Sends the bytes again that another agent had taken from the program.
async fn send_again(held: &CarriedFlow) -> Result<(), PumpError> {
    let (Some(store), Some(mut at)) = (&held.store, held.resent_from.take()) else {
        return Ok(());
    };
    while at < store.taken() && !store.is_over_at_peer() {
        let len = (store.taken() - at).min(READ_BYTES as u64) as usize;
        let bytes = store.sent_bytes(at, len);
        let bytes = bytes.map_err(|error| {
            let text = format!("the agent before this one lost what was written: {error}");
            PumpError::Flow(SocketFault::new(libc::ECONNRESET, text))
        })?;
        write(held, &bytes.into()).await?;
        at += len as u64;
    }
    Ok(())
}

/// Gives the program what another agent had received for it. Returns whether that is all there is.
async fn deliver_stored(held: &CarriedFlow, stream: &TcpStream) -> Result<bool, PumpError> {
    let Some(store) = &held.store else {
        return Ok(false);
    };
    // What arrives from here on is read from the flow.
    let to = held.stored_before.get();
    while held.received_offset() < to {
        let at = held.received_offset();
        let len = (to - at).min(READ_BYTES as u64) as usize;
        let bytes = store.received_bytes(at, len);
        let bytes = bytes.map_err(|error| {
            let text = format!("the agent before this one lost what had arrived: {error}");
            PumpError::Flow(SocketFault::new(libc::ECONNRESET, text))
        })?;
        let written = put(stream, &mut vec![bytes.into()]).await;
        written.map_err(|_| PumpError::Program)?;
        held.count_received(len as u64);
    }
    let is_whole = store.is_over_at_peer();
    if is_whole {
        held.has_all();
    }
    Ok(is_whole)
}

/// Takes bytes of the program; zero at its end.
fn take(held: &CarriedFlow, stream: &TcpStream, buffer: &mut BytesMut) -> io::Result<usize> {
    match &held.store {
        Some(store) => {
            store.release_sent(held.acknowledged());
            store.take(stream, buffer)
        }
        None => stream.try_read_buf(buffer),
    }
}

/// Resolves when the program has ended, and the time for its last data is over.
async fn orphan_expired(held: &CarriedFlow) {
    held.orphaned().await;
    tokio::time::sleep(LAST_WORDS).await;
}

/// Reads the peer's data for a program that has ended, so that the peer ends normally. Nothing is
/// written to its socket any more, because that would make the kernel discard the program's unread
/// data.
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

/// Waits until the peer has all data, or never will.
async fn delivered(held: &CarriedFlow) {
    while !held.is_delivered() && held.flow.borrow().end().is_none() {
        tokio::time::sleep(DELIVERED_LOOK).await;
    }
}

/// How much of the flow the program took.
enum ProgramDrain {
    All,
    Part,
}

async fn up(engine: &EngineState, held: &CarriedFlow, stream: &TcpStream) -> Result<(), PumpError> {
    let mut leaving = engine.leaving.subscribe();
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
        match take(held, stream, &mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if last {
                    break;
                }
                // An idle socket holds no buffer.
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

/// Ends this direction of the flow.
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
    /// The connection was reset: data may be missing.
    Part,
}

/// Copies the data of a persistent socket's program: ahead of the flow, and all of it once the
/// program has ended, because the kernel discards data of an ended process that is not read.
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
                match readable.and_then(|()| take(held, stream, &mut buffer)) {
                    Ok(0) => said = Some(ProgramEnd::All),
                    Ok(more) => {
                        bytes += more;
                        kept.push_back(buffer.split().freeze());
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        // An idle socket holds no buffer.
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
            // The data must arrive before the peer is informed that it is incomplete.
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
        // The future is created in each turn, because it holds only the chunk.
        pin!(flow.write_chunk(chunk.clone())).poll(cx)
    })
    .await
    .map_err(|error| PumpError::Flow(held.fault(&error)))
}

async fn down(
    engine: &EngineState,
    held: &CarriedFlow,
    stream: &TcpStream,
) -> Result<(), PumpError> {
    let mut pieces: Vec<Bytes> = Vec::with_capacity(PIECES_MAX);
    loop {
        if held.reads_ahead() {
            return down_ahead(held, stream, &engine.read_ahead, pieces).await;
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
        let bytes = length(&pieces);
        // A program that reads nothing may ask for data ahead meanwhile. The rest is buffered then.
        let written = tokio::select! {
            biased;
            () = held.until_reads_ahead(), if read.is_ok() => Ok(()),
            written = put(stream, &mut pieces) => written,
        };
        held.count_received(bytes - length(&pieces));
        written.map_err(|_| PumpError::Program)?;
        read.map_err(|error| PumpError::Flow(held.fault(&error)))?;
        if ended {
            held.has_all();
            if pieces.is_empty() {
                return end(stream);
            }
        }
    }
}

fn length(pieces: &[Bytes]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

/// Copies data to the program from now on, `pieces` first, and buffers what it does not accept yet.
async fn down_ahead(
    held: &CarriedFlow,
    stream: &TcpStream,
    store: &ReadAheadMemory,
    pieces: Vec<Bytes>,
) -> Result<(), PumpError> {
    let ahead = &held.read_ahead;
    let mut kept = ReadAheadQueue::new(ahead, store);
    for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
        kept.push(piece);
    }
    loop {
        if ahead.has_ended() && kept.pieces.is_empty() {
            return end(stream);
        }
        // Without thresholds, which may have been removed again, at most one piece is buffered.
        let most = match held.options.borrow().thresholds {
            Some(_) => AHEAD_BYTES_MAX,
            None => 0,
        };
        let reads = !ahead.has_ended() && kept.has_room(most);
        let read = poll_fn(|cx| {
            let mut flow = held.flow.borrow_mut();
            pin!(flow.read_chunk()).poll(cx)
        });
        tokio::select! {
            read = read, if reads => match read {
                Ok(Some(piece)) => kept.push(piece),
                Ok(None) => held.has_all(),
                Err(error) => return Err(PumpError::Flow(held.fault(&error))),
            },
            written = put_some(stream, &mut kept.pieces), if !kept.pieces.is_empty() => {
                let written = written.map_err(|_| PumpError::Program)? as u64;
                kept.on_written(written);
                held.count_received(written);
            }
        }
    }
}

fn end(stream: &TcpStream) -> Result<(), PumpError> {
    program_stream::end(stream).map_err(|_| PumpError::Program)
}
