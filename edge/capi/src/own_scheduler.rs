//! The scheduler of a program's own engine: one for all sockets of the process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowClient, FlowClientReport, LinkStatus, SchedulerHandle};
use d2tp_links::Link;
use d2tp_sched::{ClientDecision, SchedulerKind};

use crate::agent_carrier::{SchedulerClient, SocketScheduler};

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
