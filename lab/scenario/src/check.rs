//! Checks of a scenario beyond its syntax: values in range, names that exist, keys that go
//! together.
//!
//! Each error contains the table, the key, the value and what was expected.

use crate::bounds::seconds;
use crate::crash::{CRASHES_MAX, REPLAYED_MAX};
use crate::file::{
    DURATION_S_MAX, FLOWS_MAX, Handover, LINK_NAME_BYTES_MAX, LINKS_MAX, Link, NatKind, Scenario,
    ScenarioFlow,
};
use crate::properties::MTU_V6_MIN;

impl Scenario {
    /// Whether some network lets only an HTTP proxy pass, so that devices are told of that proxy.
    pub fn has_http_proxy(&self) -> bool {
        self.links.iter().any(|link| {
            let at = link.at.iter().map(|at| at.only_http_proxy);
            let repeats = link.repeat.iter().map(|repeat| repeat.only_http_proxy);
            at.chain(repeats).any(|only| only == Some(true))
        })
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        seconds("duration_s", self.duration_s, DURATION_S_MAX)?;
        if self.duration_s == 0.0 {
            return Err("duration_s is 0: the run would end before it begins".to_owned());
        }
        if self.links.is_empty() || self.links.len() > LINKS_MAX {
            return Err(format!(
                "{} links, expected 1 to {LINKS_MAX}",
                self.links.len()
            ));
        }
        if self.flows.len() > FLOWS_MAX {
            return Err(format!("{} flows, at most {FLOWS_MAX}", self.flows.len()));
        }
        for (number, link) in self.links.iter().enumerate() {
            if self.links[..number]
                .iter()
                .any(|other| other.name == link.name)
            {
                return Err(format!("two links are called {}", link.name));
            }
            link.check()
                .map_err(|fault| format!("link {}: {fault}", link.name))?;
        }
        for (number, flow) in self.flows.iter().enumerate() {
            if self.flows[..number].iter().any(|other| other.id == flow.id) {
                return Err(format!("two flows have the id {}", flow.id));
            }
            flow.check(self.duration_s)
                .map_err(|fault| format!("flow {}: {fault}", flow.id))?;
        }
        if let Some(handover) = &self.handover {
            handover
                .check(self)
                .map_err(|fault| format!("handover: {fault}"))?;
        }
        if !(1..=2).contains(&self.nodes) {
            return Err(format!("nodes is {}, expected 1 or 2", self.nodes));
        }
        seconds("hibernate_after_s", self.hibernate_after_s, DURATION_S_MAX)?;
        if self.crashes.len() > CRASHES_MAX {
            return Err(format!(
                "{} crashes, at most {CRASHES_MAX}",
                self.crashes.len()
            ));
        }
        for crash in &self.crashes {
            crash
                .check(self.duration_s)
                .map_err(|fault| format!("crash: {fault}"))?;
        }
        if self.store_outages.len() > CRASHES_MAX {
            return Err(format!(
                "{} outages of the store, at most {CRASHES_MAX}",
                self.store_outages.len()
            ));
        }
        if !self.store && !self.store_outages.is_empty() {
            return Err("store_outage: the scenario has no store; say store = true".to_owned());
        }
        let mut away_until = 0.0;
        for outage in &self.store_outages {
            outage
                .check(self.duration_s)
                .map_err(|fault| format!("store_outage: {fault}"))?;
            if outage.t_s < away_until {
                return Err(format!(
                    "store_outage: t_s is {}, but the outage before it lasts until {away_until} s",
                    outage.t_s
                ));
            }
            away_until = outage.t_s + outage.for_s;
        }
        if self.node_distances.len() > CRASHES_MAX {
            return Err(format!(
                "{} distances of nodes, at most {CRASHES_MAX}",
                self.node_distances.len()
            ));
        }
        for distance in &self.node_distances {
            distance
                .check(self.nodes, self.duration_s)
                .map_err(|fault| format!("node_distance: {fault}"))?;
        }
        if self.replays.len() > REPLAYED_MAX as usize {
            return Err(format!(
                "{} replays, at most {REPLAYED_MAX}",
                self.replays.len()
            ));
        }
        for replay in &self.replays {
            replay
                .check(self.duration_s)
                .map_err(|fault| format!("replay: {fault}"))?;
        }
        if let Some(podcasts) = &self.podcasts {
            podcasts
                .check(self.duration_s)
                .map_err(|fault| format!("podcasts: {fault}"))?;
        }
        for expect in &self.expectations {
            crate::expression::Expression::parse(&expect.text)
                .map(drop)
                .map_err(|fault| format!("expect `{}`: {fault}", expect.text))?;
        }
        Ok(())
    }
}

impl Link {
    /// A link has a medium all the time or never, and then no other key sets its rate.
    fn check_medium(&self) -> Result<(), String> {
        let tables = (self.at.iter().map(|at| at.properties()))
            .chain(self.repeat.iter().map(|repeat| repeat.properties()))
            .chain(self.access_points.iter().map(|ap| ap.properties()))
            .chain([self.properties()]);
        let (mut medium, mut rates) = (false, false);
        for p in tables {
            medium |= p.medium.is_some();
            rates |= p.down_mbps.or(p.up_mbps).is_some();
        }
        let trace = [&self.trace, &self.mahimahi_down, &self.mahimahi_up];
        if medium && (rates || trace.into_iter().any(Option::is_some)) {
            return Err(
                "medium says how fast the link is: no down_mbps, up_mbps or trace beside it"
                    .to_owned(),
            );
        }
        if medium && self.medium.is_none() {
            return Err("a table has a medium: give [[link]] one too".to_owned());
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty()
            || self.name.len() > LINK_NAME_BYTES_MAX
            || !self.name.chars().all(good)
            || ["lo", "all", "default", ".", ".."].contains(&self.name.as_str())
        {
            return Err(format!(
                "not a name for an interface: 1 to {LINK_NAME_BYTES_MAX} letters, digits, - _ or ."
            ));
        }
        let fault = |p: crate::properties::LinkProperties| p.fault().map_or(Ok(()), Err);
        fault(self.properties())?;
        let mtus = (self.at.iter().map(|at| at.mtu))
            .chain(self.repeat.iter().map(|repeat| repeat.mtu))
            .chain(self.access_points.iter().map(|ap| ap.mtu))
            .chain([self.mtu]);
        if let Some(mtu) = mtus.flatten().find(|mtu| *mtu < MTU_V6_MIN)
            && self.family.has_v6()
        {
            return Err(format!(
                "mtu is {mtu}, but a link with IPv6 has at least {MTU_V6_MIN}"
            ));
        }
        self.check_medium()?;
        seconds("attach_s", self.attach_s, DURATION_S_MAX)?;
        seconds("trace_start_s", self.trace_start_s, 1e9)?;
        match (self.nat, self.nat_rebind_s) {
            (NatKind::Rebinding, None) => {
                return Err("nat is rebinding: say how often with nat_rebind_s".to_owned());
            }
            (NatKind::Rebinding, Some(s)) if s.is_nan() || s < 0.001 => {
                return Err(format!("nat_rebind_s is {s}, expected at least 0.001"));
            }
            (NatKind::None | NatKind::Stable, Some(_)) => {
                return Err("nat_rebind_s needs nat = \"rebinding\"".to_owned());
            }
            _ => {}
        }
        match (self.nat, self.nat_idle_s) {
            (NatKind::None, Some(_)) => {
                return Err("nat_idle_s needs a NAT, and nat is \"none\"".to_owned());
            }
            (_, Some(s)) if s.is_nan() || s < 0.001 => {
                return Err(format!("nat_idle_s is {s}, expected at least 0.001"));
            }
            _ => {}
        }
        for (number, ap) in self.access_points.iter().enumerate() {
            fault(ap.properties()).map_err(|f| format!("access_point {}: {f}", ap.name))?;
            if self.access_points[..number]
                .iter()
                .any(|other| other.name == ap.name)
            {
                return Err(format!("two access points are called {}", ap.name));
            }
        }
        let joins = self
            .at
            .iter()
            .filter_map(|at| at.join.as_ref())
            .chain(&self.join);
        for join in joins {
            if self.access_point(Some(join)).is_none() {
                return Err(format!(
                    "join = {join:?}: no [[link.access_point]] has this name"
                ));
            }
        }
        for at in &self.at {
            seconds("at.t_s", at.t_s, DURATION_S_MAX)?;
            fault(at.properties()).map_err(|f| format!("at {} s: {f}", at.t_s))?;
        }
        for repeat in &self.repeat {
            fault(repeat.properties()).map_err(|f| format!("repeat: {f}"))?;
            if repeat.every_s.is_nan() || repeat.every_s < 0.001 {
                return Err(format!(
                    "repeat: every_s is {}, expected at least 0.001",
                    repeat.every_s
                ));
            }
            for (key, s) in [
                ("first_s", repeat.first_s),
                ("until_s", repeat.until_s),
                ("for_s", repeat.for_s),
            ] {
                seconds(&format!("repeat.{key}"), s.unwrap_or(0.0), DURATION_S_MAX)?;
            }
            if repeat.for_s.is_some_and(|s| s >= repeat.every_s) {
                return Err("repeat: for_s must be shorter than every_s".to_owned());
            }
        }
        if self.trace.is_none() && (self.trace_iface.is_some() || self.trace_repeat) {
            return Err("trace_iface and trace_repeat need a trace".to_owned());
        }
        Ok(())
    }
}

impl ScenarioFlow {
    fn check(&self, duration_s: f64) -> Result<(), String> {
        if self.bytes.is_some() == self.url.is_some() {
            return Err("give either bytes or url".to_owned());
        }
        seconds("start_s", self.start_s, duration_s)?;
        if let Some(deadline_s) = self.deadline_s {
            seconds("deadline_s", deadline_s, DURATION_S_MAX)?;
            if deadline_s <= self.start_s {
                return Err(format!(
                    "deadline_s is {deadline_s}, not after start_s {}: it counts from the run's start",
                    self.start_s
                ));
            }
        }
        Ok(())
    }
}

impl Handover {
    fn check(&self, scenario: &Scenario) -> Result<(), String> {
        for name in &self.links {
            if scenario.link_number(name).is_none() {
                return Err(format!("no link is called {name}"));
            }
        }
        let pair = |key: &str, pair: [f64; 2]| {
            let [min, max] = pair;
            if min >= 0.0 && min <= max && max <= DURATION_S_MAX {
                Ok(())
            } else {
                Err(format!(
                    "{key} is [{min}, {max}], expected [shortest, longest]"
                ))
            }
        };
        pair("every_s", self.every_s)?;
        if self.every_s[0] < 0.001 {
            return Err("every_s must be at least 0.001 s".to_owned());
        }
        pair("overlap_s", self.overlap_s.unwrap_or_default())?;
        pair("gap_s", self.gap_s.unwrap_or_default())?;
        if !(0.0..=1.0).contains(&self.overlap_share) {
            return Err(format!(
                "overlap_share is {}, expected 0 to 1",
                self.overlap_share
            ));
        }
        match (self.links.len(), self.overlap_s, self.gap_s) {
            (0, ..) => Err("links is empty".to_owned()),
            (_, None, None) => Err("give overlap_s, gap_s or both".to_owned()),
            (1, Some(_), _) => {
                Err("one link cannot overlap with itself; give gap_s only".to_owned())
            }
            _ => Ok(()),
        }
    }
}
