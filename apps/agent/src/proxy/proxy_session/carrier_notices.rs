//! Messages for people about the networks that carry a program's connections: one line for each
//! change between free networks, metered ones and none.

use d2tp_driver::{LinkStatus, LinkUse};
use d2tp_links::CostClass;
use tokio::time::{Duration, Instant};

use crate::fetch::report::human_bytes;

/// The shortest time between two lines.
const LINE_EVERY: Duration = Duration::from_secs(5); // a guess: a network that comes and goes is one event

/// Which networks carry the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    Free,
    Metered,
    None,
}

/// Words for changes of the networks that carry connections.
#[derive(Debug, Default)]
pub(super) struct CarrierNotices {
    /// The last reported carrier; none before the proxy has answered.
    reported: Option<Carrier>,
    reported_at: Option<Instant>,
    /// When a change is to be reported that came too soon after the last line.
    due: Option<Instant>,
    metered_bytes: u64,
}

impl CarrierNotices {
    /// When to observe again although nothing changes until then.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// A line if the carrier has changed since the last one.
    pub(super) fn observe(&mut self, statuses: &[LinkStatus], now: Instant) -> Option<String> {
        self.due = None;
        let used = || statuses.iter().filter(|link| link.usage != LinkUse::Off);
        let is_free = |link: &&LinkStatus| link.class == CostClass::Free;
        let paid: u64 = used()
            .filter(|link| !is_free(link))
            .map(|link| link.payload.0 + link.payload.1)
            .sum();
        let pays = paid > self.metered_bytes;
        let free = used().find(|link| is_free(link) && link.answers.is_up());
        let metered = used().find(|link| !is_free(link) && link.answers.is_up());
        let carrier = match (free, metered) {
            (Some(_), _) => Carrier::Free,
            (None, Some(_)) if pays => Carrier::Metered,
            // It is asked, and carries nothing yet.
            (None, Some(_)) => return None,
            (None, None) => Carrier::None,
        };
        if self.reported == Some(carrier) {
            return None;
        }
        let next_line = self.reported_at.map(|at| at + LINE_EVERY);
        self.due = next_line.filter(|at| now < *at);
        if self.due.is_some() {
            return None;
        }
        let before = self.reported;
        if before.is_none() && carrier == Carrier::None {
            return None;
        }
        self.reported = Some(carrier);
        let so_far = match paid {
            0 => String::new(),
            bytes => format!(", {} so far", human_bytes(bytes)),
        };
        // Each time that metered networks carry is counted as it begins.
        self.metered_bytes = paid;
        let line = match (carrier, free.or(metered)) {
            // That is what everybody expects.
            (Carrier::Free, _) if before.is_none() => return None,
            (Carrier::Free, Some(link)) => {
                let spent = match paid {
                    0 => String::new(),
                    bytes => format!(". Metered networks carried {}", human_bytes(bytes)),
                };
                format!("Using {} (free){spent}", link.name)
            }
            (Carrier::Metered, Some(link)) => {
                let silent = used().find(|link| is_free(link) && link.answers.is_silent());
                match silent {
                    Some(silent) => format!(
                        "{} does not carry; using {} ({}){so_far}",
                        silent.name, link.name, link.class
                    ),
                    None => format!("Using {} ({}){so_far}", link.name, link.class),
                }
            }
            _ => "No network reaches the proxy. Connections wait for one".to_owned(),
        };
        self.reported_at = Some(now);
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_driver::LinkAnswers;

    fn link(name: &str, class: CostClass, answers: LinkAnswers, bytes: u64) -> LinkStatus {
        LinkStatus {
            name: name.into(),
            class,
            usage: LinkUse::Paid,
            payload: (bytes, 0),
            busy: d2tp_time::Span::ZERO,
            rate: None,
            answers,
            stream: d2tp_driver::StreamStatus::Unused,
            path: None,
        }
    }

    #[test]
    fn a_line_says_which_network_carries_and_what_metered_ones_did_once_for_each_change() {
        let silent = LinkAnswers::Silent {
            since: d2tp_time::Time::ZERO,
        };
        let wifi = |answers| link("wlan0", CostClass::Free, answers, 0);
        let cell = |bytes| link("wwan0", CostClass::Metered, LinkAnswers::Answering, bytes);
        let mut notices = CarrierNotices::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let up = LinkAnswers::Answering;
        assert_eq!(notices.observe(&[wifi(LinkAnswers::Unasked)], at(0)), None);
        assert_eq!(notices.observe(&[wifi(up), cell(0)], at(1)), None);
        // Its handshake alone is no change.
        assert_eq!(notices.observe(&[wifi(silent), cell(0)], at(2)), None);
        let said = notices
            .observe(&[wifi(silent), cell(10_000)], at(3))
            .unwrap();
        assert_eq!(
            said,
            "wlan0 does not carry; using wwan0 (metered), 10.00 kB so far"
        );
        assert_eq!(notices.observe(&[wifi(silent), cell(20_000)], at(9)), None);
        let said = notices
            .observe(&[wifi(up), cell(3_000_000)], at(20))
            .unwrap();
        assert_eq!(said, "Using wlan0 (free). Metered networks carried 3.00 MB");
        // One that comes and goes is reported once.
        assert_eq!(notices.observe(&[wifi(silent)], at(21)), None);
        let said = notices.observe(&[wifi(silent)], at(30)).unwrap();
        assert!(said.starts_with("No network reaches the proxy"), "{said}");
        // One that comes back at once is reported when a line may follow, though nothing changes then.
        assert_eq!(notices.due(), None);
        assert_eq!(notices.observe(&[wifi(up)], at(31)), None);
        assert_eq!(notices.due(), Some(at(35)));
        let said = notices.observe(&[wifi(up)], at(35)).unwrap();
        assert!(said.starts_with("Using wlan0 (free)"), "{said}");
        assert_eq!(notices.due(), None);
    }
}
