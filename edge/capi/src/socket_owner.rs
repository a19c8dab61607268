//! The process that owns a carried socket, as an agent sees it: whether it exists, messages to it,
//! and the descriptor that is kept for another process.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::agent_message::{MessageFromAgent, send_message};
use crate::errno::SocketFault;

/// How long a program may take to confirm a fault before its socket is reset anyway.
pub(crate) const HEARD_WITHIN: Duration = Duration::from_secs(1); // a guess: the process is on this machine

/// How long to wait for the end of a process whose connection another one opens again.
const MISSED_WITHIN: Duration = Duration::from_secs(1); // a guess: the process is on this machine

/// How long a connection without a process is kept.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600); // a guess: a device that is used every day

/// A message for the process, and a channel that reports when it is sent.
type QueuedMessage = (MessageFromAgent, Option<oneshot::Sender<()>>);

/// Whether the owning process exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnerPresence {
    Here,
    /// The process is gone since then, and the connection may be opened again.
    Away(Instant),
}

/// The process that owns a carried socket.
pub(crate) struct SocketOwner {
    /// The queue of messages to the process; `None` while no process has the socket.
    messages: RefCell<Option<UnboundedSender<QueuedMessage>>>,
    /// The task that sends the messages.
    sender: RefCell<Option<JoinHandle<()>>>,
    fault_acked: Notify,
    /// Whether the socket ended, and no process can have the connection any more.
    ended: watch::Sender<bool>,
    presence: watch::Sender<OwnerPresence>,
    /// The descriptor of a connection that may be opened again.
    kept: RefCell<Option<OwnedFd>>,
    /// Whether the process holds a D-Lock.
    locked: watch::Sender<bool>,
    /// Whether the process goes on with the connection at the next agent.
    continues: Cell<bool>,
}

impl SocketOwner {
    pub(crate) fn new() -> Rc<SocketOwner> {
        Rc::new(SocketOwner {
            messages: RefCell::default(),
            sender: RefCell::default(),
            fault_acked: Notify::new(),
            ended: watch::channel(false).0,
            presence: watch::channel(OwnerPresence::Here).0,
            kept: RefCell::default(),
            locked: watch::channel(false).0,
            continues: Cell::new(false),
        })
    }

    /// Attaches a process, which is reached by `stream`.
    pub(crate) fn attach(&self, stream: Rc<UnixStream>) {
        let (sender, outgoing) = unbounded_channel();
        self.messages.replace(Some(sender));
        self.presence.send_replace(OwnerPresence::Here);
        let sender = tokio::task::spawn_local(send_all(stream, outgoing));
        self.sender.replace(Some(sender));
    }

    /// Detaches the process. Returns the task that sends what was queued before.
    pub(crate) fn detach(&self) -> Option<JoinHandle<()>> {
        self.messages.take();
        self.sender.take()
    }

    /// Handles the end of the process, or its release of the connection. `may_return`: another process
    /// may open the connection again, if its descriptor is kept.
    pub(crate) fn on_process_left(self: &Rc<SocketOwner>, may_return: bool) {
        self.set_locked(false);
        self.set_continues(false);
        if !self.is_kept() || !may_return {
            self.kept.take();
            self.end();
            return;
        }
        let since = OwnerPresence::Away(Instant::now());
        self.presence.send_replace(since);
        let owner = self.clone();
        tokio::task::spawn_local(async move {
            let mut presence = owner.presence.subscribe();
            let back = presence.wait_for(|presence| *presence != since);
            let mut gone = owner.ended.subscribe();
            tokio::select! {
                _ = back => {}
                _ = gone.wait_for(|gone| *gone) => {}
                () = tokio::time::sleep(KEPT_FOR) => owner.let_go(),
            }
        });
    }

    /// Records that no process can have the connection any more.
    pub(crate) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Records that the process knows the fault.
    pub(crate) fn on_fault_heard(&self) {
        self.fault_acked.notify_one();
    }

    pub(crate) fn set_locked(&self, held: bool) {
        self.locked.send_replace(held);
    }

    /// Sets whether the process goes on with the connection at the next agent.
    pub(crate) fn set_continues(&self, continues: bool) {
        self.continues.set(continues);
    }

    /// Whether the process goes on with the connection at the next agent.
    pub(crate) fn continues(&self) -> bool {
        self.continues.get() && !self.is_gone()
    }

    /// Whether the process holds a D-Lock.
    pub(crate) fn is_locked(&self) -> bool {
        *self.locked.borrow()
    }

    /// Waits until the D-Lock status differs from `than`.
    pub(crate) async fn lock_changed(&self, than: bool) {
        let mut locked = self.locked.subscribe();
        // The sender is a field of this struct, so it exists.
        let _ = locked.wait_for(|locked| *locked != than).await;
    }

    pub(crate) fn keep(&self, fd: OwnedFd) {
        self.kept.replace(Some(fd));
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.kept.borrow().is_some()
    }

    /// Since when the connection has had no process, if one may open it again.
    pub(crate) fn away_since(&self) -> Option<Instant> {
        match *self.presence.borrow() {
            OwnerPresence::Away(since) => Some(since),
            OwnerPresence::Here => None,
        }
    }

    #[cfg(test)]
    pub(crate) fn is_away(&self, since: Instant) {
        self.presence.send_replace(OwnerPresence::Away(since));
    }

    /// Gives up the connection, so that it cannot be opened again.
    pub(crate) fn let_go(&self) {
        self.kept.take();
        if self.away_since().is_some() {
            self.ended.send_replace(true);
        }
    }

    /// Waits a short time for the end of the process. Returns whether it ended.
    pub(crate) async fn wait_until_away(&self) -> bool {
        let mut presence = self.presence.subscribe();
        let away = presence.wait_for(|presence| matches!(presence, OwnerPresence::Away(_)));
        let _ = timeout(MISSED_WITHIN, away).await;
        // Other tasks waited, too.
        self.away_since().is_some() && self.is_kept()
    }

    /// A descriptor for the current process.
    pub(crate) fn descriptor(&self) -> Option<OwnedFd> {
        let kept = self.kept.borrow();
        let kept = kept.as_ref().filter(|_| self.away_since().is_none())?;
        kept.try_clone().ok()
    }

    pub(crate) fn enqueue(&self, what: MessageFromAgent) {
        // A process that is gone needs no message.
        if let Some(sender) = &*self.messages.borrow() {
            let _ = sender.send((what, None));
        }
    }

    /// Sends the process the size of datagrams that fit.
    pub(crate) fn has_room(&self, bytes: usize) {
        self.enqueue(MessageFromAgent::Room { bytes });
    }

    /// Sends a message. Returns when the kernel has it.
    pub(crate) async fn send(&self, what: MessageFromAgent) {
        let (done, told) = oneshot::channel();
        match &*self.messages.borrow() {
            Some(sender) => drop(sender.send((what, Some(done)))),
            None => return,
        }
        let _ = told.await;
    }

    /// Informs the process why its socket is about to be reset, so that it knows the cause when
    /// that happens.
    pub(crate) async fn send_fault(&self, fault: &SocketFault) {
        if self.away_since().is_some() {
            return;
        }
        self.enqueue(MessageFromAgent::fault(fault));
        let heard = async {
            tokio::select! {
                () = self.fault_acked.notified() => {}
                () = self.gone() => {}
            }
        };
        let _ = timeout(HEARD_WITHIN, heard).await;
    }

    /// Waits until the process has ended, or gave up the connection.
    pub(crate) async fn gone(&self) {
        let mut gone = self.ended.subscribe();
        // The sender is a field of this struct, so it exists.
        let _ = gone.wait_for(|gone| *gone).await;
    }

    pub(crate) fn is_gone(&self) -> bool {
        *self.ended.borrow()
    }
}

async fn send_all(stream: Rc<UnixStream>, mut outgoing: UnboundedReceiver<QueuedMessage>) {
    while let Some((what, waits)) = outgoing.recv().await {
        if send_message(&stream, &what, None).await.is_err() {
            return;
        }
        if let Some(waits) = waits {
            let _ = waits.send(());
        }
    }
}
