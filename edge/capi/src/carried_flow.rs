//! The flow of a socket that is carried, and its state.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{Flow, FlowEnd, FlowIo as _};
use tokio::sync::Notify;

use crate::agent_message::ConnectionClaim;
use crate::connection_status::ConnectionStatus;
use crate::connection_store::{ConnectionStore, KernelCounts};
use crate::errno::SocketFault;
use crate::options::SocketOptions;
use crate::read_ahead::ReadAhead;
use crate::scheduled_socket::{ProgramBytes, ScheduledSocket};
use crate::server_session::SessionUse;
use crate::socket_owner::SocketOwner;

/// The interval between checks of what the peer has acknowledged.
const FLUSH_LOOK: Duration = Duration::from_millis(2); // a guess

/// A socket's flow.
pub(crate) struct CarriedFlow {
    pub(crate) flow: RefCell<Flow>,
    /// The device's session; `None` for flows that were accepted.
    pub(crate) session: Option<SessionUse>,
    pub(crate) status: Arc<ConnectionStatus>,
    /// The process that owns the socket, if it is another one.
    owner: Option<Rc<SocketOwner>>,
    pub(crate) options: RefCell<SocketOptions>,
    /// The offset in the flow of the program's first byte.
    base: u64,
    /// The offset in the peer's direction of the first byte for the program.
    received_base: u64,
    /// What outlives this agent, if the connection does.
    pub(crate) store: Option<Arc<ConnectionStore>>,
    /// The offset from which the program's bytes have to be sent again, because another agent had taken them.
    pub(crate) resent_from: Cell<Option<u64>>,
    /// The offset of the peer's direction below which another agent had received everything.
    pub(crate) stored_before: Cell<u64>,
    /// How much of the program's the peer had when another agent ended.
    sent_before: u64,
    /// Whether the next agent goes on with the flow.
    left: Cell<bool>,
    /// The number of acknowledged bytes when it was last read; a broken flow does not report it.
    acked: Cell<u64>,
    /// Bytes taken from the program.
    pub(crate) sent: Cell<u64>,
    /// Bytes given to the program.
    pub(crate) received: Cell<u64>,
    /// Received data that the program has not read.
    pub(crate) read_ahead: ReadAhead,
    /// Whether the program will write no more, and all its data is in the flow.
    drained: Cell<bool>,
    /// Notified when that is so.
    drained_notice: Notify,
    /// Notified when the options change, or the flow moves data again.
    pub(crate) changed: Notify,
    /// Notified when the options change to some with thresholds.
    thresholds_set: Notify,
    /// Whether the scheduling task waits until the flow moves data.
    pub(crate) resting: Cell<bool>,
    /// The socket as a client of the scheduler.
    pub(crate) scheduled: RefCell<Option<ScheduledSocket>>,
}

impl CarriedFlow {
    pub(crate) fn new(
        flow: Flow,
        line: Option<SessionUse>,
        conn_status: Arc<ConnectionStatus>,
        options: SocketOptions,
    ) -> CarriedFlow {
        CarriedFlow {
            base: flow.written(),
            received_base: 0,
            store: None,
            resent_from: Cell::new(None),
            stored_before: Cell::new(0),
            sent_before: 0,
            left: Cell::new(false),
            acked: Cell::new(0),
            flow: RefCell::new(flow),
            session: line,
            status: conn_status,
            owner: None,
            options: RefCell::new(options),
            resting: Cell::new(false),
            scheduled: RefCell::default(),
            sent: Cell::new(0),
            received: Cell::new(0),
            read_ahead: ReadAhead::default(),
            drained: Cell::new(false),
            drained_notice: Notify::new(),
            changed: Notify::new(),
            thresholds_set: Notify::new(),
        }
    }

    /// Returns the flow as one of a socket of another process.
    pub(crate) fn owned_by(self, owner: Rc<SocketOwner>) -> CarriedFlow {
        CarriedFlow {
            owner: Some(owner),
            ..self
        }
    }

    /// Returns the flow as one that outlives this agent, by what `store` keeps of it from now on.
    pub(crate) fn stored_in(self, store: Arc<ConnectionStore>) -> CarriedFlow {
        let received_base = self.flow.borrow().store_received(store.clone());
        CarriedFlow {
            received_base,
            store: Some(store),
            ..self
        }
    }

    /// Returns the flow as one that another agent carried so far: its socket has what `counts` says, of the program's
    /// bytes those from `resent_from` on are to be sent again, and the peer's are stored up to `stored_before`.
    pub(crate) fn resumed(
        self,
        claim: &ConnectionClaim,
        store: Arc<ConnectionStore>,
        counts: KernelCounts,
        (resent_from, stored_before): (u64, u64),
    ) -> CarriedFlow {
        CarriedFlow {
            base: claim.sent_base,
            received_base: claim.received_base,
            store: Some(store),
            resent_from: Cell::new(Some(resent_from)),
            stored_before: Cell::new(stored_before),
            sent_before: resent_from,
            acked: Cell::new(resent_from),
            sent: Cell::new(counts.taken),
            received: Cell::new(counts.written),
            ..self
        }
    }

    /// By what another agent carries the connection on, if one can.
    pub(crate) fn claim(&self) -> Option<ConnectionClaim> {
        self.store.as_ref()?;
        let session = self.session.as_ref()?;
        Some(ConnectionClaim {
            server: session.0.server.to_string(),
            instance: session.0.device.leased_instance()?,
            flow: self.flow.borrow().id(),
            sent_base: self.base,
            received_base: self.received_base,
        })
    }

    /// What another agent carried of the connection: for the program, and from it.
    pub(crate) fn carried_before(&self) -> (u64, u64) {
        let received = self.stored_before.get().saturating_sub(self.received_base);
        (received, self.sent_before)
    }

    /// The offset in the peer's direction of the next byte for the program.
    pub(crate) fn received_offset(&self) -> u64 {
        self.received_base + self.received.get()
    }

    /// Whether its program goes on with the connection at the next agent.
    pub(crate) fn continues(&self) -> bool {
        self.owner().is_some_and(SocketOwner::continues) && self.claim().is_some()
    }

    /// Records that no process goes on with the connection at the next agent.
    pub(crate) fn forget_waiting(&self) {
        if let (Some(_), Some(session)) = (&self.store, &self.session) {
            session.0.forget_waiting(self.flow.borrow().id());
        }
    }

    /// Leaves the flow open for the next agent.
    pub(crate) fn leave(&self) {
        self.flow.borrow().leave_open();
        self.left.set(true);
    }

    /// Whether the next agent goes on with the flow.
    pub(crate) fn is_left(&self) -> bool {
        self.left.get()
    }

    /// The process that owns the socket, if it is another one.
    pub(crate) fn owner(&self) -> Option<&SocketOwner> {
        self.owner.as_deref()
    }

    /// Whether the program has ended before its socket.
    pub(crate) fn is_orphan(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.is_gone())
    }

    /// Resolves when the program has ended before its socket.
    pub(crate) async fn orphaned(&self) {
        match &self.owner {
            Some(owner) => owner.gone().await,
            None => std::future::pending().await,
        }
    }

    /// Sets changed options.
    pub(crate) fn change(&self, options: SocketOptions) {
        let before = self.options.replace(options.clone());
        if (before.deadline, before.if_late) != (options.deadline, options.if_late) {
            self.flow.borrow().set_deadline(options.within());
        }
        if before.route != options.route {
            self.flow.borrow().set_route(options.route);
        }
        if options.thresholds.is_some() {
            self.thresholds_set.notify_one();
        }
        self.changed.notify_one();
    }

    /// Whether data is read ahead of the program.
    pub(crate) fn reads_ahead(&self) -> bool {
        self.options.borrow().thresholds.is_some()
    }

    /// Waits until data is read ahead of the program.
    pub(crate) async fn until_reads_ahead(&self) {
        while !self.reads_ahead() {
            self.thresholds_set.notified().await;
        }
    }

    /// Records that all data of the peer has arrived.
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

    /// Counts bytes that the program's socket has now.
    pub(crate) fn count_received(&self, bytes: u64) {
        self.count(&self.received, bytes);
        if let Some(store) = &self.store {
            store.release_received(self.received_offset());
        }
    }

    /// Waits until the peer has the first `bytes` of the program.
    ///
    /// # Errors
    /// The connection broke before.
    pub(crate) async fn flush(&self, bytes: u64) -> Result<(), SocketFault> {
        loop {
            let end = self.flow.borrow().end();
            // A flow that ended well has had all its data acknowledged.
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

    /// Waits until the peer has acknowledged the flow's first `bytes`, also those before the program's.
    ///
    /// # Errors
    /// The flow or its session ended before.
    pub(crate) async fn wait_for_peer(&self, bytes: u64) -> Result<(), SocketFault> {
        while self.flow.borrow().acknowledged() < bytes {
            let end = self.flow.borrow().end();
            let session = self.session.as_ref();
            match (
                session.and_then(|session| session.0.fault_of_session()),
                end,
            ) {
                (Some(fault), _) => return Err(fault),
                (None, Some(end)) => return Err(SocketFault::of_flow(end)),
                (None, None) => tokio::time::sleep(FLUSH_LOOK).await,
            }
        }
        Ok(())
    }

    /// The byte counts of the program's socket.
    pub(crate) fn program_bytes(&self) -> ProgramBytes {
        ProgramBytes {
            down: self.received.get() + self.read_ahead.kept(),
            up: self.acknowledged(),
            written: self.sent.get(),
        }
    }

    /// Bytes written by the program that the peer has acknowledged.
    pub(crate) fn acknowledged(&self) -> u64 {
        match self.flow.borrow().end() {
            Some(FlowEnd::Complete) => self.sent.get(),
            _ => {
                // The count of a broken flow may be lower than the last one that is known.
                let acked = self.flow.borrow().acknowledged().saturating_sub(self.base);
                self.acked.set(self.acked.get().max(acked));
                self.acked.get()
            }
        }
    }

    /// Whether the peer has everything that the program wrote, including the end.
    pub(crate) fn is_delivered(&self) -> bool {
        self.drained.get() && self.flow.borrow().is_flushed()
    }

    /// Records that everything that the program wrote is in the flow.
    pub(crate) fn finished(&self) {
        self.drained.set(true);
        self.drained_notice.notify_one();
    }

    /// Waits until everything that the program wrote is in the flow. One task may wait.
    pub(crate) async fn until_drained(&self) {
        while !self.drained.get() {
            self.drained_notice.notified().await;
        }
    }

    /// The fault that explains this error of the flow.
    pub(crate) fn fault(&self, error: &io::Error) -> SocketFault {
        let ended = self
            .session
            .as_ref()
            .and_then(|line| line.0.fault_of_session());
        match (self.flow.borrow().end(), ended) {
            (Some(FlowEnd::SessionEnded) | None, Some(fault)) => fault,
            (Some(end), _) => SocketFault::of_flow(end),
            (None, _) if error.kind() == io::ErrorKind::TimedOut => {
                SocketFault::new(libc::ETIME, error)
            }
            (None, _) => SocketFault::new(libc::ECONNRESET, error),
        }
    }
}
