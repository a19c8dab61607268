//! Assigns a flow's bytes to links, where several flows share a session.

use std::collections::BTreeMap;

/// A link of a session, with the session's byte counts.
pub trait CarryingLink {
    /// The name of the link's device.
    fn name(&self) -> &str;
    /// Payload bytes that the link carried for the session, towards this device and from it.
    fn payload(&self) -> (u64, u64);
}

/// Assigns a flow's bytes to the links of its session. A session counts bytes per link, not per flow,
/// so a flow's bytes are distributed in proportion to all bytes.
#[derive(Debug, Default)]
pub struct CarriedByLink {
    /// Bytes that links had carried for the session at the last call, towards this device and from it.
    before: BTreeMap<String, (u64, u64)>,
    /// How many of the flow's bytes are assigned to links, towards this device and from it.
    assigned: (u64, u64),
    carried: BTreeMap<String, (u64, u64)>,
}

impl CarriedByLink {
    /// For a flow of which others have carried this much, towards this device and from it.
    pub fn after(moved: (u64, u64)) -> CarriedByLink {
        CarriedByLink {
            assigned: moved,
            ..CarriedByLink::default()
        }
    }

    /// Assigns what moved since the last call. `moved`: the flow's bytes so far, towards this device and
    /// from it; `links`: what the session's links have carried.
    pub fn assign(&mut self, moved: (u64, u64), links: &[impl CarryingLink]) {
        let since: Vec<(u64, u64)> = links
            .iter()
            .map(|link| {
                let payload = link.payload();
                let (down, up) = self.before.get(link.name()).copied().unwrap_or(payload);
                (payload.0.saturating_sub(down), payload.1.saturating_sub(up))
            })
            .collect();
        let share = |mine: u64, all: u64, link: u64| {
            (u128::from(mine) * u128::from(link))
                .checked_div(u128::from(all))
                .map_or(0, |share| share as u64)
        };
        let all_down = since.iter().map(|(down, _)| down).sum();
        let all_up = since.iter().map(|(_, up)| up).sum();
        let mine_down = moved.0.saturating_sub(self.assigned.0);
        let mine_up = moved.1.saturating_sub(self.assigned.1);
        for (link, (down, up)) in links.iter().zip(&since) {
            let carried = self.carried.entry(link.name().to_owned()).or_default();
            carried.0 += share(mine_down, all_down, *down);
            carried.1 += share(mine_up, all_up, *up);
            self.before.insert(link.name().to_owned(), link.payload());
        }
        // Bytes that no link is known to have carried yet are assigned at a later call.
        if all_down > 0 {
            self.assigned.0 = moved.0;
        }
        if all_up > 0 {
            self.assigned.1 = moved.1;
        }
    }

    /// Bytes that each link carried of the flow, towards this device and from it.
    pub fn bytes(&self) -> &BTreeMap<String, (u64, u64)> {
        &self.carried
    }

    /// Restarts the flow's counts from zero; the links' counts are kept.
    pub fn restart(&mut self) {
        self.carried.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counted(&'static str, (u64, u64));

    impl CarryingLink for Counted {
        fn name(&self) -> &str {
            self.0
        }

        fn payload(&self) -> (u64, u64) {
            self.1
        }
    }

    fn link(name: &'static str, payload: (u64, u64)) -> Counted {
        Counted(name, payload)
    }

    #[test]
    fn a_flows_bytes_are_on_the_links_that_carried_its_session_meanwhile() {
        let mut carried = CarriedByLink::default();
        // Bytes carried before the flow joined are not its own.
        carried.assign((0, 0), &[link("wlan0", (5_000, 0))]);
        assert_eq!(carried.bytes()["wlan0"], (0, 0));
        let both = [link("wlan0", (8_000, 0)), link("wwan0", (1_000, 0))];
        carried.assign((3_000, 0), &both);
        // A link that was unknown until now had carried nothing for the flow.
        assert_eq!(carried.bytes()["wlan0"], (3_000, 0));
        let later = [link("wlan0", (8_500, 0)), link("wwan0", (2_500, 0))];
        carried.assign((4_000, 700), &later);
        assert_eq!(carried.bytes()["wlan0"], (3_250, 0));
        assert_eq!(carried.bytes()["wwan0"], (750, 0));
        // Bytes sent before a link was known to carry them are assigned at the next call.
        let sent = [link("wlan0", (8_500, 800)), link("wwan0", (2_500, 0))];
        carried.assign((4_000, 700), &sent);
        assert_eq!(carried.bytes()["wlan0"], (3_250, 700));
    }
}
