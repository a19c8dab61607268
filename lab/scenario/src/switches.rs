//! Finds the switches in a run and how long each was silent, from what the links delivered.
//!
//! ```text
//!              wlan0 lost                       address on wwan0
//!   ─ data data ─┤                                    ├──── first data on wwan0
//!                                                     |<--->|  break before make: after the address
//!   ─ data ─┤ data ┤    first data on wwan0, which was up
//!           |<---------->|                    make before break: from the last data to the first
//! ```
//!
//! The simulator and the lab report the same events to it: links going up and down, and data
//! reaching the device. Links have their number in the scenario.

use crate::report::{DataSwitch, SwitchKind};
use cedos_lab_link::Time;

/// A switch that has begun: no data has arrived since.
#[derive(Clone, Copy, Debug)]
struct OngoingSwitch {
    at: Time,
    from: usize,
    kind: SwitchKind,
    /// Since when the silence counts; unknown until there is an address again.
    silent_since: Option<Time>,
}

/// Detects the switches of a run.
#[derive(Clone, Debug)]
pub struct SwitchMeter {
    names: Vec<String>,
    up: Vec<bool>,
    /// When a link came up beside others and has not carried data yet.
    fresh: Vec<Option<Time>>,
    last: Option<(Time, usize)>,
    begun: Option<OngoingSwitch>,
    found: Vec<DataSwitch>,
}

impl SwitchMeter {
    /// A meter for links of these names, all down.
    pub fn new(names: impl IntoIterator<Item = impl Into<String>>) -> SwitchMeter {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        SwitchMeter {
            up: vec![false; names.len()],
            fresh: vec![None; names.len()],
            names,
            last: None,
            begun: None,
            found: Vec::new(),
        }
    }

    /// Records that a link has an address from now on.
    pub fn on_up(&mut self, now: Time, link: usize) {
        if self.up[link] {
            return;
        }
        let alone = !self.up.contains(&true);
        self.up[link] = true;
        match &mut self.begun {
            Some(begun) => begun.silent_since = begun.silent_since.or(Some(now)),
            // Only a link that comes up beside one with data can take it over.
            None if !alone && self.last.is_some() => self.fresh[link] = Some(now),
            None => {}
        }
    }

    /// Records that a link is lost.
    pub fn on_down(&mut self, now: Time, link: usize) {
        self.up[link] = false;
        self.fresh[link] = None;
        let another = self.up.contains(&true);
        match (&mut self.begun, self.last) {
            // The link that was to continue was lost as well before it did.
            (Some(begun), _) if !another => {
                begun.kind = SwitchKind::BreakBeforeMake;
                begun.silent_since = None;
            }
            (None, Some((last, from))) if from == link => {
                let (kind, silent_since) = if another {
                    (SwitchKind::MakeBeforeBreak, Some(last))
                } else {
                    (SwitchKind::BreakBeforeMake, None)
                };
                self.begun = Some(OngoingSwitch {
                    at: now,
                    from,
                    kind,
                    silent_since,
                });
            }
            _ => {}
        }
    }

    /// Records that a link's address changed without the link being lost.
    pub fn on_new_address(&mut self, now: Time, link: usize) {
        self.on_down(now, link);
        self.on_up(now, link);
    }

    /// Records that data reached the device over a link.
    pub fn on_data(&mut self, now: Time, link: usize) {
        if let Some(begun) = self.begun
            && let Some(since) = begun.silent_since
        {
            self.found(begun.at, begun.from, link, begun.kind, since, now);
            self.begun = None;
        } else if let (Some(up_at), Some((last, from))) = (self.fresh[link], self.last)
            && from != link
            && self.begun.is_none()
        {
            self.found(up_at, from, link, SwitchKind::MakeBeforeBreak, last, now);
        }
        self.fresh[link] = None;
        self.last = Some((now, link));
    }

    /// Records that no flow is active: silence from here on does not count.
    pub fn on_idle(&mut self) {
        self.last = None;
        self.begun = None;
        self.fresh.fill(None);
    }

    /// The switches that were found, in order of time.
    pub fn into_switches(self) -> Vec<DataSwitch> {
        self.found
    }

    fn found(
        &mut self,
        at: Time,
        from: usize,
        to: usize,
        kind: SwitchKind,
        since: Time,
        now: Time,
    ) {
        self.found.push(DataSwitch {
            at_s: at.as_secs_f64(),
            from: self.names[from].clone(),
            to: self.names[to].clone(),
            kind,
            silence_ms: now.since(since).as_millis_f64(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_link::Span;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn meter() -> SwitchMeter {
        let mut meter = SwitchMeter::new(["wlan0", "wwan0"]);
        meter.on_up(ms(0), 0);
        meter.on_data(ms(10), 0);
        meter
    }

    fn only(meter: SwitchMeter) -> (String, String, SwitchKind, f64) {
        let [s] = &meter.into_switches()[..] else {
            panic!("not one switch")
        };
        (s.from.clone(), s.to.clone(), s.kind, s.silence_ms)
    }

    #[test]
    fn leaving_for_a_link_that_is_up_is_make_before_break() {
        let mut meter = meter();
        meter.on_up(ms(11), 1);
        meter.on_data(ms(12), 0);
        meter.on_down(ms(20), 0);
        meter.on_data(ms(50), 1);
        meter.on_data(ms(51), 1);
        let (from, to, kind, silence) = only(meter);
        assert_eq!((from.as_str(), to.as_str()), ("wlan0", "wwan0"));
        assert_eq!((kind, silence), (SwitchKind::MakeBeforeBreak, 38.0));
    }

    #[test]
    fn break_before_make_is_silent_from_the_new_address_on() {
        let mut meter = meter();
        meter.on_down(ms(20), 0);
        meter.on_up(ms(5000), 0);
        meter.on_data(ms(5042), 0);
        assert_eq!(
            only(meter),
            (
                "wlan0".into(),
                "wlan0".into(),
                SwitchKind::BreakBeforeMake,
                42.0
            )
        );
    }

    #[test]
    fn a_second_loss_before_data_came_back_is_one_switch() {
        let mut meter = meter();
        meter.on_up(ms(15), 1);
        meter.on_down(ms(20), 0);
        meter.on_down(ms(25), 1);
        meter.on_up(ms(60), 1);
        meter.on_data(ms(70), 1);
        let (_, to, kind, silence) = only(meter);
        assert_eq!(
            (to.as_str(), kind, silence),
            ("wwan0", SwitchKind::BreakBeforeMake, 10.0)
        );
    }

    #[test]
    fn a_link_that_comes_up_and_takes_over_is_a_switch_once() {
        let mut meter = meter();
        meter.on_up(ms(15), 1);
        meter.on_data(ms(20), 0);
        meter.on_data(ms(23), 1);
        meter.on_data(ms(24), 0);
        meter.on_data(ms(25), 1);
        assert_eq!(only(meter).3, 3.0);
    }

    #[test]
    fn losing_an_idle_link_is_no_switch() {
        let mut idle = meter();
        idle.on_up(ms(15), 1);
        idle.on_down(ms(20), 1);
        idle.on_data(ms(30), 0);
        assert!(idle.into_switches().is_empty());
        let mut done = meter();
        done.on_idle();
        done.on_down(ms(20), 0);
        done.on_up(ms(30), 0);
        done.on_data(ms(99), 0);
        assert!(done.into_switches().is_empty());
    }
}
