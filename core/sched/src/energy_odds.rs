//! The probability that some of the links are enough for a deadline, so that the others may rest.

use d2tp_time::Time;

use crate::capacity_forecast::CapacityForecast;
use crate::explanation::due_until;
use crate::link_assignment::ScheduledFlow;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// The probability that those links which `is_used` names by their place carry in `left_s` seconds all
    /// that is due until a flow's deadline. Zero while the size of the flow is unknown.
    pub(crate) fn odds_over(
        &self,
        now: Time,
        flows: &[ScheduledFlow],
        flow: usize,
        left_s: f64,
        is_used: &dyn Fn(usize) -> bool,
    ) -> f64 {
        if !flows[flow].is_sized() {
            return 0.0;
        }
        let horizon = std::iter::once(left_s);
        let outlook = CapacityForecast::over(now, self.links(), is_used, horizon);
        let bytes = due_until(flows, flow).until(&outlook, 0);
        1.0 - outlook.all_short_of(0, bytes)
    }
}
