//! The application's calls on flows: open, write, read, reset, deadlines.
//!
//! Calls only change a flow's state and mark frames to be sent; nothing is sent here.

use std::sync::Arc;

use bytes::Bytes;
use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, ReasonCode, VARINT_MAX};

use crate::config::RESTORED_BUFFER_BYTES;
use crate::event::{FlowEnd, SessionEvent};
use crate::flow::{SessionFlow, want};
use crate::flow_options::{FlowOptions, PRIORITY_LAST};
use crate::memory_pool::{MemoryAccount, MemoryCharge};
use crate::recv_half::{ArrivedBytes, RecvHalf};
use crate::send_half::SendHalf;
use crate::session::{FlowError, ReadOutcome, Session, say};
use crate::session_state::{Role, SessionState};
use crate::trace::TraceRecord;

/// RESET and STOP code of a flow whose deadline passed; the codes 0xd000 to 0xd0ff are D2TP's own.
pub(crate) const CODE_DEADLINE: u64 = 0xd001;

/// R-FLOW-13: how many flows without a large window yet must find as large a window as a flow gets.
const SHARES_LEFT: u64 = 8; // a guess
/// The smallest growth of session credit that is announced, in bytes.
const CREDIT_STEP_BYTES: u64 = 16 * 1024; // a guess
/// The session credit that a peer gets even without room in memory, in bytes.
const CREDIT_BYTES_MIN: u64 = 64 * 1024; // a guess: some packets of each round trip

/// What a process holds of a flow beside its record ([`Session::take_remainder`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowRemainder {
    /// Bytes of the peer that the application has not read.
    pub unread: Vec<u8>,
    /// Whether the peer's direction ends after them.
    pub is_read: bool,
    /// The offset of the first byte of `unacked` in this end's direction.
    pub unacked_from: u64,
    /// Bytes of this end that the peer has not acknowledged. An end that followed them has to be written again.
    pub unacked: Vec<u8>,
    /// Whether the peer acknowledged the end of this end's direction.
    pub is_sent: bool,
}

impl Session {
    /// A flow without data, whose buffers are charged to the peer.
    pub(crate) fn new_flow(&self, id: FlowId, options: FlowOptions) -> SessionFlow {
        let account = self.config.memory.account(self.peer);
        let (credit, windows) = (self.initial_flow_credit, self.config.flow_windows());
        let send = SendHalf::new(credit, options.durable, account.charge());
        let recv = RecvHalf::new(windows, account.charge());
        let mut flow = SessionFlow::new(id, options, send, recv);
        flow.application = self.charge_application(&account);
        flow
    }

    /// Charges what the application holds for one flow.
    pub(crate) fn charge_application(&self, account: &MemoryAccount) -> MemoryCharge {
        let mut charge = account.charge();
        charge.resize(self.config.flow_memory);
        charge
    }

    /// Opens a flow. The application may write at once; the bytes leave when there is a path.
    ///
    /// # Errors
    /// The session is over, or `flows_max` flows are open.
    pub fn open(&mut self, mut options: FlowOptions) -> Result<FlowId, FlowError> {
        // The range of OPEN and of a record: three bits for the priority, and 62 bits for the size
        // plus one.
        options.priority = options.priority.min(PRIORITY_LAST);
        options.size = options.size.map(|size| size.min(VARINT_MAX - 1));
        if self.state == SessionState::Closed || self.closing.is_some() {
            return Err(FlowError::SessionOver);
        }
        if self.flows.len() >= self.config.flows_max || self.next_flow > FlowId::COUNTER_MAX {
            return Err(FlowError::TooMany);
        }
        let id = FlowId::new(
            self.flow_epoch,
            self.next_flow,
            self.role == Role::Initiator,
        );
        self.next_flow += 1;
        let options = FlowOptions {
            reachable: options.reachable || self.reachable,
            ..options
        };
        let mut flow = self.new_flow(id, options);
        flow.wants = want::OPEN;
        flow.waits_for_node = self.moves_to_node;
        self.flows.insert(flow);
        if let Some(trace) = &mut self.trace {
            trace.note(TraceRecord::FlowOpened(id));
        }
        Ok(id)
    }

    fn flow(&mut self, id: FlowId) -> Result<&mut SessionFlow, FlowError> {
        self.flows.get_mut(id).ok_or(FlowError::Gone)
    }

    /// The number of bytes that [`Session::write`] accepts now.
    ///
    /// # Errors
    /// The flow is over, or its peer wants no more of it.
    pub fn write_room(&mut self, id: FlowId) -> Result<u64, FlowError> {
        self.room(id, false)
    }

    /// The number of bytes that [`Session::write`] should be given now from a source that can be read
    /// again: what can be sent soon, instead of as much as the send buffer holds.
    ///
    /// # Errors
    /// The flow is over, or its peer wants no more of it.
    pub fn source_room(&mut self, id: FlowId) -> Result<u64, FlowError> {
        self.room(id, true)
    }

    fn room(&mut self, id: FlowId, has_source: bool) -> Result<u64, FlowError> {
        let mut limit = self.config.send_buffer;
        let is_tentative = self.is_tentative();
        if is_tentative {
            limit = limit.min(RESTORED_BUFFER_BYTES);
        }
        let flow = self.flow(id)?;
        if let Some(code) = flow.send.reset {
            return Err(FlowError::Stopped(code));
        }
        flow.has_source = has_source;
        let memory = flow.send.memory_room();
        // What leaves with the answer to a SYN is asked for before the peer's credit is known.
        let room = match has_source && !is_tentative {
            true => flow.send.source_room(limit),
            false => flow.send.room(limit),
        };
        let room = room.min(memory);
        if room == 0 {
            flow.wants_writable = true;
            self.awaits_memory |= memory == 0;
        }
        Ok(room)
    }

    /// Adds bytes to be sent. The caller must keep to [`Session::write_room`]; more bytes are
    /// accepted, too. Bytes that are written while [`SessionEvent::SendFrom`] waits to be taken are
    /// dropped, because the caller does not know the new offset yet, and will write them again from
    /// there.
    pub fn write(&mut self, id: FlowId, bytes: Bytes) -> Result<(), FlowError> {
        let flow = self.flow(id)?;
        if let Some(code) = flow.send.reset {
            return Err(FlowError::Stopped(code));
        }
        if flow.rewinding {
            return Ok(());
        }
        if flow.send.is_finished() {
            return Err(FlowError::Gone);
        }
        flow.send.write(bytes);
        self.flows.touch(id);
        Ok(())
    }

    /// Records that the application knows from which offset to write.
    pub(crate) fn on_send_from_taken(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.rewinding = false;
        }
    }

    /// Ends the flow's sending direction: the peer reads an end after the last byte.
    pub fn finish(&mut self, id: FlowId) -> Result<(), FlowError> {
        let flow = self.flow(id)?;
        if let Some(code) = flow.send.reset {
            return Err(FlowError::Stopped(code));
        }
        if !flow.rewinding {
            flow.send.finish();
        }
        self.flows.touch(id);
        Ok(())
    }

    /// The offset of the next byte to be written, and of the first byte that the peer has not
    /// acknowledged.
    pub fn send_offsets(&self, id: FlowId) -> Option<(u64, u64)> {
        self.flows
            .get(id)
            .map(|f| (f.send.end(), f.send.acked_to()))
    }

    /// Whether all that was written so far was acknowledged, the end included.
    pub fn is_flushed(&self, id: FlowId) -> bool {
        self.flows.get(id).is_none_or(|f| {
            f.send.acked_to() == f.send.end() && (!f.send.is_finished() || f.send.is_fin_acked())
        })
    }

    /// Whether nothing of a flow remains to be carried in either direction. What arrived may still have to be read. It is
    /// also true of a flow that the session does not know, or no longer.
    pub fn is_carried(&self, id: FlowId) -> bool {
        self.flows.get(id).is_none_or(|f| {
            f.send.is_complete() && (f.recv.is_complete() || f.recv.is_all_received())
        })
    }

    /// Whether the flow ended because its deadline passed. The event of its end may still be queued.
    pub fn is_ended_by_deadline(&self, id: FlowId) -> bool {
        let end = self.flows.get(id).and_then(|flow| flow.end);
        end == Some(FlowEnd::DeadlinePassed)
    }

    /// Takes what a flow of this end's process holds that its peer or its application has not got, so that another process
    /// can go on with the flow from [`Session::record`]: it writes [`FlowRemainder::unacked`] again, and reads
    /// [`FlowRemainder::unread`] before what the peer sends then. Bytes beyond a gap are not taken, because the peer sends
    /// them again. `None` if the flow is over or carried, was reset or stopped, or is durable: what its peer may discard is then
    /// decided by its application.
    pub fn take_remainder(&mut self, id: FlowId) -> Option<FlowRemainder> {
        let flow = self.flows.get(id)?;
        let is_cut = flow.send.reset.is_some() || flow.recv.reset.is_some();
        // Its peer would take the flow for over as soon as the rest is read.
        let is_carried = flow.send.is_complete() && flow.recv.is_all_received();
        let is_over = flow.end.is_some() || is_cut || flow.recv.stopped.is_some();
        if is_over || is_carried || flow.options.durable {
            return None;
        }
        let mut unread = Vec::new();
        let is_read = loop {
            match self.read(id, usize::MAX) {
                Ok(ReadOutcome::Chunk(chunk)) => unread.extend_from_slice(&chunk),
                Ok(ReadOutcome::End) => break true,
                Ok(ReadOutcome::Pending) => break false,
                Err(_) => return None,
            }
        };
        let flow = self.flows.get_mut(id)?;
        let from = flow.send.safe_to();
        let mut unacked = vec![0; (flow.send.end() - from) as usize];
        flow.send.copy(from, &mut unacked);
        Some(FlowRemainder {
            unread,
            is_read,
            unacked_from: from,
            unacked,
            is_sent: flow.send.is_complete(),
        })
    }

    /// The offset of the next byte that the application reads.
    pub fn read_offset(&self, id: FlowId) -> Option<u64> {
        Some(self.flows.get(id)?.recv.read_to())
    }

    /// Up to which offset the peer's direction arrived without a gap, and whether it ends there.
    pub fn arrived_to(&self, id: FlowId) -> Option<(u64, bool)> {
        let recv = &self.flows.get(id)?.recv;
        let to = recv.contiguous();
        Some((to, recv.final_size() == Some(to)))
    }

    /// Passes what arrived without a gap and is not read to `f`, from `offset` on, piece by piece, with the offset of each.
    /// The bytes stay unread.
    pub fn visit_unread(&self, id: FlowId, offset: u64, f: impl FnMut(u64, &[u8])) {
        if let Some(flow) = self.flows.get(id) {
            flow.recv.visit_unread(offset, f);
        }
    }

    /// Whether a flow was restored from a record and its peer has not said yet from which offset it goes on.
    pub fn awaits_claim(&self, id: FlowId) -> bool {
        self.flows
            .get(id)
            .is_some_and(|f| f.unclaimed || f.rewinding)
    }

    /// Whether the application does not know yet from which offset to write, because the event of that waits to be taken.
    pub fn awaits_offset(&self, id: FlowId) -> bool {
        self.flows.get(id).is_some_and(|f| f.rewinding)
    }

    /// Reads the next bytes, at most `max` of them.
    pub fn read(&mut self, id: FlowId, max: usize) -> Result<ReadOutcome, FlowError> {
        let Some(flow) = self.flows.get_mut(id) else {
            return Err(FlowError::Gone);
        };
        flow.readable_reported = false;
        if flow.end == Some(FlowEnd::DeadlinePassed) {
            return Err(FlowError::DeadlinePassed);
        }
        if let Some(code) = flow.recv.reset {
            return Err(FlowError::Reset(code));
        }
        let chunk = flow.recv.read_chunk(max);
        let at_end = flow.recv.is_at_end();
        let n = chunk.as_ref().map_or(0, Bytes::len) as u64;
        self.on_read(id, n);
        Ok(match chunk {
            Some(chunk) => ReadOutcome::Chunk(chunk),
            None if at_end => ReadOutcome::End,
            None => ReadOutcome::Pending,
        })
    }

    /// Reads into `out`. `Ok(None)` means the end, `Ok(Some(0))` that nothing is available now.
    pub fn read_into(&mut self, id: FlowId, out: &mut [u8]) -> Result<Option<usize>, FlowError> {
        let Some(flow) = self.flows.get_mut(id) else {
            return Err(FlowError::Gone);
        };
        flow.readable_reported = false;
        if flow.end == Some(FlowEnd::DeadlinePassed) {
            return Err(FlowError::DeadlinePassed);
        }
        if let Some(code) = flow.recv.reset {
            return Err(FlowError::Reset(code));
        }
        let n = flow.recv.read(out);
        let at_end = flow.recv.is_at_end();
        self.on_read(id, n as u64);
        Ok(if n == 0 && at_end { None } else { Some(n) })
    }

    /// R-FLOW-9: announces session credit as soon as a reader, or the end of a flow, frees it.
    pub(crate) fn offer_credit(&mut self) {
        let window = self.config.window_of_session();
        // Bytes that nobody reads free nothing, so what others free in their part of the window must be enough.
        let unread = self.credit.received.saturating_sub(self.credit.consumed);
        let step = match unread > window / 2 {
            false => window / 4,
            true => (window.saturating_sub(unread) / 4).max(1),
        };
        if self.credit.consumed + window - self.credit.advertised < step {
            return;
        }
        // If memory allows less than the window, the credit grows in smaller steps.
        let more = self
            .session_credit_max()
            .saturating_sub(self.credit.advertised);
        if more >= step.min(CREDIT_STEP_BYTES) {
            self.wants |= say::CREDIT;
        }
    }

    /// R-FLOW-9: the session credit to announce. Beyond the bytes that arrived it promises only
    /// what fits into the memory of the peer's key, but at least [`CREDIT_BYTES_MIN`], so that a
    /// reader makes progress.
    pub(crate) fn session_credit_max(&self) -> u64 {
        let full = self.credit.consumed + self.config.window_of_session();
        if self.config.memory.max().is_none() {
            return full;
        }
        let room = self.config.memory.account(self.peer).room();
        let least = self.credit.consumed + CREDIT_BYTES_MIN.min(self.config.window_of_session());
        full.min(self.credit.received.saturating_add(room))
            .max(least)
    }

    /// R-FLOW-13: the most bytes of a flow that may be in flight or unread, beside those of others. The more of the session's
    /// window lies unread, and the more flows have a large window, the less another one gets. So flows that were read
    /// and are not read any more leave room to the others.
    fn flow_share(&self) -> u64 {
        let unread = self.credit.received.saturating_sub(self.credit.consumed);
        let free = self.config.window_of_session().saturating_sub(unread);
        free / (SHARES_LEFT + self.flows.grown())
    }

    /// Informs writers that wait when there is room because memory was freed.
    pub(crate) fn offer_room(&mut self) {
        let limit = self.config.send_buffer;
        let mut writable = Vec::new();
        for flow in self.flows.iter_mut().filter(|f| f.wants_writable) {
            match flow.take_writable(limit) {
                true => writable.push(flow.id),
                false => self.awaits_memory |= flow.send.memory_room() == 0,
            }
        }
        for id in writable {
            self.emit(SessionEvent::Writable(id));
        }
    }

    fn on_read(&mut self, id: FlowId, n: u64) {
        self.credit.consumed += n;
        self.offer_credit();
        let share = self.flow_share();
        let Some(flow) = self.flows.set_share(id, share) else {
            return;
        };
        if flow.recv.wants_credit() {
            flow.wants |= want::CREDIT;
        }
        self.flows.touch(id);
        self.retire_if_complete(id);
    }

    /// Whether the application has ended the sending direction of the flow.
    pub fn is_finishing(&self, id: FlowId) -> bool {
        self.flows.get(id).is_none_or(|f| f.send.is_finished())
    }

    /// The number of bytes of a flow that were read so far, and its length if known.
    pub fn received(&self, id: FlowId) -> Option<(u64, Option<u64>)> {
        self.flows
            .get(id)
            .map(|f| (f.recv.read_to(), f.recv.final_size()))
    }

    /// The bytes of a flow that the application has not read.
    pub fn arrived(&self, id: FlowId) -> ArrivedBytes {
        let flow = self.flows.get(id);
        flow.map(|f| f.recv.arrived()).unwrap_or_default()
    }

    /// Abandons the flow's sending direction. The peer's reader gets `code`.
    pub fn reset(&mut self, id: FlowId, code: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.send.is_complete() {
            return;
        }
        flow.send.reset = Some(code);
        flow.end.get_or_insert(FlowEnd::Local(code));
        if !flow.unclaimed {
            flow.wants |= want::RESET;
        }
        self.flows.touch(id);
        self.retire_if_complete(id);
    }

    /// Asks the peer to stop sending on the flow. Bytes that still arrive are dropped.
    pub fn stop(&mut self, id: FlowId, code: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.recv.is_complete() {
            return;
        }
        let unread = flow.recv.reached() - flow.recv.read_to();
        self.credit.consumed += unread;
        self.wants |= say::CREDIT;
        flow.recv.stopped = Some(code);
        flow.recv.discard();
        flow.end.get_or_insert(FlowEnd::Local(code));
        flow.wants |= want::STOP;
        self.flows.touch(id);
        self.retire_if_complete(id);
    }

    /// Changes a flow's deadline, and informs the peer.
    pub fn set_deadline(&mut self, id: FlowId, deadline: Option<Time>) -> Result<(), FlowError> {
        let flow = self.flow(id)?;
        if flow.options.deadline != deadline {
            flow.options.deadline = deadline;
            // R-DEADLINE-2: the peer may have used the largest sequence number.
            flow.deadline_seq = (flow.deadline_seq + 1).min(d2tp_wire::VARINT_MAX);
            flow.wants |= want::DEADLINE;
            self.flows.on_deadline_changed();
            self.flows.touch(id);
        }
        Ok(())
    }
    /// At a server: from now on the device may move deadlines of its flows no further away than this.
    pub fn limit_moved_deadlines(&mut self, max: Span) {
        self.moved_deadline_max = Some(max);
    }
    /// A flow's deadline.
    pub fn deadline(&self, id: FlowId) -> Option<Time> {
        self.flows.get(id).and_then(|f| f.options.deadline)
    }
    /// The options that a flow was opened with.
    pub fn options(&self, id: FlowId) -> Option<FlowOptions> {
        self.flows.get(id).map(|f| f.options)
    }

    /// Records that the application has stored everything below `offset` on disk.
    pub fn set_durable(&mut self, id: FlowId, offset: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.recv.set_durable(offset) {
            self.flows.want(id, want::DURABLE);
        }
    }
    /// Records that the application needs nothing below `offset` again, so that it is not delivered
    /// again.
    pub fn set_committed(&mut self, id: FlowId, offset: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if offset > flow.committed {
            flow.committed = offset;
            self.flows.want(id, want::COMMITTED);
        }
    }

    /// Asks the peer to pause sending on this flow, or to continue.
    pub fn pause(&mut self, id: FlowId, paused: bool, reason: ReasonCode) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.pause_out.1 != paused || flow.pause_out.2 != reason {
            flow.pause_out = (flow.pause_out.0 + 1, paused, reason);
            self.flows.want(id, want::PAUSE);
        }
    }

    pub(crate) fn retire_if_complete(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id).filter(|f| f.is_over()) else {
            return;
        };
        if !flow.end_reported {
            flow.end_reported = true;
            let end = flow.end.unwrap_or(FlowEnd::Complete);
            self.emit(SessionEvent::Ended { flow: id, end });
        }
        if self.flows.get(id).is_some_and(SessionFlow::is_settled) {
            self.forget_flow(id);
        }
    }

    fn forget_flow(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.remove(id) {
            if self.role == Role::Initiator {
                self.flows.note_ended_spending(&flow);
            }
            if flow.recv.stopped.is_none() && flow.recv.reset.is_none() {
                self.credit.consumed += flow.recv.reached() - flow.recv.read_to();
            }
            self.offer_credit();
            self.duplicate_bytes += flow.recv.duplicate();
        }
    }

    /// Ends a flow locally, without informing the peer.
    pub(crate) fn end_flow(&mut self, id: FlowId, end: FlowEnd) {
        let Some(flow) = self.flows.get(id) else {
            return;
        };
        if !flow.end_reported {
            self.emit(SessionEvent::Ended { flow: id, end });
        }
        self.forget_flow(id);
    }

    // R-CLOSE-1, R-RESUME-2
    /// Delivers the complete rest of a flow, its end included, because the peer closed the session
    /// after sending it, or no longer knows the flow. If the peer also received everything, the flow is complete even though its end
    /// is still unread here.
    pub(crate) fn deliver_remaining(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let recv = &mut flow.recv;
        let broken = flow.end.is_some() || recv.reset.is_some() || recv.stopped.is_some();
        if broken || recv.final_size() != Some(recv.contiguous()) {
            return;
        }
        let pieces: Vec<Bytes> = std::iter::from_fn(|| recv.read_chunk(usize::MAX)).collect();
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        let charge = Arc::new(recv.take_charge(bytes));
        let complete = flow.send.is_complete() && !flow.end_reported;
        flow.end_reported |= complete;
        self.emit(SessionEvent::Remains {
            flow: id,
            pieces,
            charge,
        });
        if complete {
            let end = FlowEnd::Complete;
            self.emit(SessionEvent::Ended { flow: id, end });
        }
    }

    // R-DEADLINE-1
    /// Ends a flow locally because its deadline passed, as the peer does by itself. The peer is
    /// informed how many bytes were sent as soon as there is a path, so that both ends agree on the
    /// session's credit.
    pub(crate) fn expire_flow(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        flow.end.get_or_insert(FlowEnd::DeadlinePassed);
        flow.options.deadline = None;
        flow.send.drop_bytes();
        self.flows.on_deadline_changed();
        self.reset(id, CODE_DEADLINE);
        self.stop(id, CODE_DEADLINE);
        self.retire_if_complete(id);
    }
}
