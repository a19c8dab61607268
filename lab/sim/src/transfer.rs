//! The device's application state of a transfer, which may take several flows.
//!
//! ```text
//!  Waiting ──open──▶ Active ──▶ Done
//!     ▲                 ├─────▶ Failed            (deadline; anything else is a fault of the core)
//!     └── refused, session gone: a new flow from the application's offset
//! ```

use cedos_lab_link::Time;
use cedos_lab_scenario::{Direction, ScenarioFlow};
use d2tp_session::FlowId;

use crate::stream::{DIGEST_BYTES, SimRequest, SimSink, SimSource};

/// The most flows of one transfer; more is a live-lock.
const FLOWS_MAX: u32 = 200;

/// The progress of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Progress {
    /// The transfer has not started, or starts again.
    Waiting,
    /// The transfer is under way.
    Active,
    /// The transfer was complete at this time.
    Done(Time),
    /// The deadline of the transfer passed.
    Late,
    /// The transfer is over and not complete.
    Failed(String),
}

/// The device's application state of a transfer.
#[derive(Clone, Debug)]
pub(crate) struct SimTransfer {
    pub id: Option<FlowId>,
    pub progress: Progress,
    pub source: SimSource,
    pub sink: SimSink,
    /// Sent bytes that the proxy has.
    pub acked: u64,
    /// Seed of the transfer's content.
    pub seed: u64,
    flows: u32,
}

impl SimTransfer {
    pub(crate) fn new(spec: &ScenarioFlow, seed: u64) -> SimTransfer {
        let answer = if spec.direction == Direction::Up {
            DIGEST_BYTES
        } else {
            0
        };
        let mut transfer = SimTransfer {
            id: None,
            progress: Progress::Waiting,
            source: SimSource::new(Vec::new(), seed, 0, 0),
            sink: SimSink::new(answer, seed),
            acked: 0,
            seed,
            flows: 0,
        };
        transfer.ask(spec);
        transfer
    }

    fn ask(&mut self, spec: &ScenarioFlow) {
        let size = spec.bytes.unwrap_or(0);
        let upload = spec.direction == Direction::Up;
        let request = SimRequest {
            upload,
            size,
            from: self.sink.content_bytes(),
            seed: self.seed,
        };
        let sent = if upload { size } else { 0 };
        self.source = SimSource::new(request.encode(), self.seed, 0, sent);
        self.source.open_ended = spec.late_end;
    }

    /// Handles the loss of the flow: the next one continues from the application's offset. Returns
    /// false if there were too many flows.
    pub(crate) fn again(&mut self, spec: &ScenarioFlow) -> bool {
        self.flows += 1;
        self.id = None;
        self.acked = 0;
        self.progress = Progress::Waiting;
        match spec.direction {
            Direction::Down => self.sink.go_on(),
            Direction::Up => self.sink = SimSink::new(DIGEST_BYTES, self.seed),
        }
        self.ask(spec);
        self.flows < FLOWS_MAX
    }

    /// Whether the transfer is complete or given up.
    pub(crate) fn is_over(&self) -> bool {
        !matches!(self.progress, Progress::Waiting | Progress::Active)
    }
}
