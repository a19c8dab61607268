//! Watches the links: hints trigger readings, and events are differences of snapshots.
//!
//! A hint is a netlink message or [`ChangeHandle::network_changed`]. After the first hint the
//! monitor waits [`GATHER`] for the rest of the burst, then reads everything. It does not read
//! again before [`READ_INTERVAL_MIN`] has passed, however many hints arrive.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::{Notify, watch};

use crate::class::ClassRules;
use crate::cost_resolver::CostResolver;
use crate::event::{LinkEvent, difference};
use crate::link::Link;
use crate::link_reader::LinkReader;
use crate::network_manager::NetworkManager;

/// How long a burst of changes is collected before reading, because the kernel removes a link's
/// addresses and routes one by one within a millisecond. Higher: every handover is delayed by as
/// much.
pub const GATHER: Duration = Duration::from_millis(3); // a guess

/// The shortest interval between two readings, so that a flapping link costs at most 20 per second.
pub const READ_INTERVAL_MIN: Duration = Duration::from_millis(50); // a guess

/// The delay before another reading after the kernel refused one.
const READ_RETRY: Duration = Duration::from_secs(1);

/// Why the links cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The system provides no netlink socket, or does not permit it.
    #[error("cannot open a netlink socket: {0} (links cannot be watched on this system)")]
    Socket(#[source] io::Error),
    /// The system refused to list links, addresses or routes.
    #[error("cannot read {what} from the kernel: {cause}")]
    Read {
        /// The kind of object: `links`, `addresses` or `routes`.
        what: &'static str,
        /// The kernel's error.
        cause: String,
    },
}

/// Signals a possible change, from any thread: for systems without netlink, and for programs that know
/// more (a wake from sleep, a callback of the platform).
#[derive(Debug, Clone)]
pub struct ChangeHandle {
    hint: Arc<Notify>,
}

impl ChangeHandle {
    /// Triggers a reading soon. Calling it often costs nothing more.
    pub fn network_changed(&self) {
        self.hint.notify_one();
    }
}

/// Watches the machine's links until it is dropped.
#[derive(Debug)]
pub struct LinkMonitor {
    latest: watch::Receiver<Arc<Vec<Link>>>,
    known: Arc<Vec<Link>>,
    pending: VecDeque<LinkEvent>,
    hint: Arc<Notify>,
    has_kernel_events: bool,
}

impl LinkMonitor {
    /// Reads the links, and starts a monitor whose events continue from exactly that snapshot.
    ///
    /// Must be called on a tokio runtime. If the kernel's messages are not available, the monitor
    /// still works and relies on [`ChangeHandle::network_changed`];
    /// [`LinkMonitor::has_kernel_events`] shows which case applies.
    ///
    /// # Errors
    /// [`LinkError`] if not even one reading succeeds.
    pub async fn start(rules: ClassRules) -> Result<(Vec<Link>, LinkMonitor), LinkError> {
        let resolver = CostResolver {
            flags: rules,
            ..CostResolver::default()
        };
        LinkMonitor::start_with(resolver, None).await
    }

    /// Starts a monitor that also resolves costs by the user's settings and by the network manager,
    /// if that runs.
    ///
    /// # Errors
    /// The same as those of [`LinkMonitor::start`].
    pub async fn start_with(
        resolver: CostResolver,
        manager: Option<NetworkManager>,
    ) -> Result<(Vec<Link>, LinkMonitor), LinkError> {
        // Hints are received from before the first reading on, so that no change is missed.
        let (mut reader, hints) = LinkReader::open(resolver, manager)?;
        let hears_kernel = hints.is_some();
        let first = Arc::new(reader.read().await?);
        let (publish, latest) = watch::channel(first.clone());
        let hint = Arc::new(Notify::new());
        let kernel = hints.unwrap_or_else(|| stream::pending().boxed());
        tokio::spawn(watch_links(reader, kernel, hint.clone(), publish));
        let monitor = LinkMonitor {
            latest,
            known: first.clone(),
            pending: VecDeque::new(),
            hint,
            has_kernel_events: hears_kernel,
        };
        Ok((first.to_vec(), monitor))
    }

    /// Waits for the next change. The future may be dropped without losing an event.
    ///
    /// Returns `None` when watching has stopped because the runtime shuts down.
    pub async fn next(&mut self) -> Option<LinkEvent> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Some(event);
            }
            self.latest.changed().await.ok()?;
            let now = self.latest.borrow_and_update().clone();
            self.pending.extend(difference(&self.known, &now));
            self.known = now;
        }
    }

    /// The links as of the last reading, which may be ahead of the events taken so far.
    pub fn links(&self) -> Arc<Vec<Link>> {
        self.latest.borrow().clone()
    }

    /// The latest snapshot and its changes, for users of whole states instead of events. Watching
    /// continues as long as a monitor or one of these lives.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Vec<Link>>> {
        self.latest.clone()
    }

    /// A handle to signal changes.
    pub fn handle(&self) -> ChangeHandle {
        ChangeHandle {
            hint: self.hint.clone(),
        }
    }

    /// Whether the kernel reports changes; otherwise they are seen only after
    /// [`ChangeHandle::network_changed`].
    pub fn has_kernel_events(&self) -> bool {
        self.has_kernel_events
    }

    /// Turns the monitor into a stream of its events.
    pub fn into_stream(self) -> impl Stream<Item = LinkEvent> {
        stream::unfold(self, |mut monitor| async move {
            let event = monitor.next().await?;
            Some((event, monitor))
        })
    }
}

/// Publishes a snapshot after each burst of changes, as long as there are receivers.
async fn watch_links(
    mut reader: LinkReader,
    mut kernel: stream::BoxStream<'static, ()>,
    hint: Arc<Notify>,
    publish: watch::Sender<Arc<Vec<Link>>>,
) {
    let mut kernel_open = true;
    loop {
        tokio::select! {
            () = publish.closed() => return,
            () = hint.notified() => {}
            () = reader.networks_changed() => {}
            message = kernel.next(), if kernel_open => {
                kernel_open = message.is_some();
                if !kernel_open {
                    tracing::warn!("the kernel's link messages ended; only network_changed() is heard");
                    continue;
                }
            }
        }
        tokio::time::sleep(GATHER).await;
        drain(&mut kernel);
        match reader.read().await {
            Ok(links) => {
                publish.send_if_modified(|known| {
                    let changed = **known != links;
                    *known = Arc::new(links);
                    changed
                });
            }
            // The last snapshot is kept, because a wrong "all links gone" would stop every
            // transfer.
            Err(error) => {
                tracing::warn!(%error, "links not read; keeping what was known");
                tokio::time::sleep(READ_RETRY).await;
                hint.notify_one();
            }
        }
        tokio::time::sleep(READ_INTERVAL_MIN).await;
    }
}

/// Drops pending hints, which the following reading covers.
fn drain(hints: &mut stream::BoxStream<'static, ()>) {
    use futures_util::FutureExt;
    while let Some(Some(())) = hints.next().now_or_never() {}
}
