//! The links that a simulated device uses, as its strategy chooses among the permitted ones.

use cedos_lab_link::Time;
use cedos_lab_scenario::Class;
use d2tp_device::LinkUse;
use d2tp_session::{PathState, PathStatus, Session};

use crate::device::{SimDevice, link_of};
use crate::network::SimNetwork;
use crate::strategy::LinkSample;

impl SimDevice {
    /// The links that may be used now, and when to call the strategy again.
    pub(crate) fn picked(&mut self, now: Time, network: &SimNetwork) -> (Vec<bool>, Time) {
        let links = self.classes.len();
        let Some(strategy) = &mut self.strategy else {
            return (vec![true; links], Time::NEVER);
        };
        let samples: Vec<LinkSample> = (0..links)
            .map(|link| LinkSample {
                up: network.is_up(link),
                attachment: self.attachments[link],
                bytes: self.accounts.iter().map(|a| a.of_link(link)).sum(),
            })
            .collect();
        (strategy.pick(now, &samples), now + strategy.again())
    }

    /// Whether to leave a link that was not chosen: as soon as another one carries, so that data
    /// always moves.
    pub(crate) fn leave(&self, link: usize, picked: &[bool], in_use: bool) -> LinkUse {
        let paths = self.core().map(Session::path_stats).unwrap_or_default();
        let carries = paths.iter().any(|path| {
            let open = (path.state, path.status) == (PathState::Active, PathStatus::Available);
            picked[link_of(path.addresses.link)] && open
        });
        match (in_use && !carries, self.classes[link]) {
            (false, _) => LinkUse::Off,
            (true, Class::Free) => LinkUse::Free,
            (true, _) => LinkUse::Paid,
        }
    }
}
