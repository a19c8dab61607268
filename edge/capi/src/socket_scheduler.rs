//! The scheduler of an engine's sockets: the agent's, or, in a program's own engine, one for all
//! sockets of the process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowClient, FlowClientReport, LinkStatus, SchedulerHandle};
use d2tp_links::Link;
use d2tp_sched::{ClientDecision, SchedulerKind};

/// Schedules all sockets of an engine, together with other clients of the device.
pub trait SocketScheduler {
    /// Adds a client for a socket, as long as it needs something.
    fn join(&self) -> Box<dyn SchedulerClient>;

    /// Observes the machine's links, if the scheduler has no other source.
    fn observe_links(&self, _links: &[Link]) {}
}

/// One socket as a client of a [`SocketScheduler`].
pub trait SchedulerClient {
    /// Reports the socket's state, and returns what it may use.
    fn decide(&mut self, report: &FlowClientReport<'_>) -> ClientDecision;

    /// Reports what links carried without a demand: at a socket's end, or for a socket that never
    /// pays.
    fn report(&mut self, links: &[LinkStatus], carried: &BTreeMap<String, (u64, u64)>);

    /// The time until metered links would carry the socket, if links stayed as they are; `None` if they
    /// never would.
    fn pays_after(&self) -> Option<Duration>;
}

/// The scheduler for the sockets of this process, without an agent.
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

    /// Does nothing: a process on its own has only the budgets of its sockets, which these count
    /// themselves.
    fn report(&mut self, _: &[LinkStatus], _: &BTreeMap<String, (u64, u64)>) {}

    fn pays_after(&self) -> Option<Duration> {
        self.0.pays_after()
    }
}
