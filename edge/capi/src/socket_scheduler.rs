//! The scheduler as an engine sees it: the agent's, or in a program's own engine one for all sockets of the
//! process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowClient, FlowClientReport, LinkStatus, SchedulerHandle};
use d2tp_links::Link;
use d2tp_sched::{ClientDecision, SchedulerKind};

/// Decides for all sockets of an engine together, and for whatever else its device carries.
pub trait SocketScheduler {
    /// A client for a socket, for as long as it wants something.
    fn join(&self) -> Box<dyn SchedulerClient>;

    /// Takes in the machine's links, where nobody else tells the scheduler of them.
    fn observe_links(&self, _links: &[Link]) {}
}

/// One socket as a client of a [`SocketScheduler`].
pub trait SchedulerClient {
    /// Reports, and returns what the socket may use.
    fn decide(&mut self, report: &FlowClientReport<'_>) -> ClientDecision;

    /// Reports what links carried and asks for nothing: at a socket's end, and for what never pays.
    fn report(&mut self, links: &[LinkStatus], carried: &BTreeMap<String, (u64, u64)>);

    /// The time until links that cost would carry the socket, if links stayed as they are; none if they
    /// never would.
    fn pays_after(&self) -> Option<Duration>;
}

/// Decides for all sockets of this process, where no agent does.
pub(crate) struct OwnScheduler {
    handle: Arc<SchedulerHandle>,
}

impl Default for OwnScheduler {
    fn default() -> OwnScheduler {
        OwnScheduler {
            handle: SchedulerHandle::new(SchedulerKind::D2Sched),
        }
    }
}

impl SocketScheduler for OwnScheduler {
    fn join(&self) -> Box<dyn SchedulerClient> {
        Box::new(OwnSocketClient(FlowClient::new(&self.handle)))
    }

    fn observe_links(&self, links: &[Link]) {
        self.handle.observe_links(links);
    }
}

struct OwnSocketClient(FlowClient);

impl SchedulerClient for OwnSocketClient {
    fn decide(&mut self, report: &FlowClientReport<'_>) -> ClientDecision {
        self.0.decide(report)
    }

    /// A process on its own has no budget but those of its sockets, which these count themselves.
    fn report(&mut self, _: &[LinkStatus], _: &BTreeMap<String, (u64, u64)>) {}

    fn pays_after(&self) -> Option<Duration> {
        self.0.pays_after()
    }
}
