//! The deadline and cost policy of a connection, as programs can set them.
//!
//! | where | for example |
//! |---|---|
//! | user name of SOCKS5 or of `Proxy-Authorization: Basic` | `by=+45m,policy=free-only` |
//! | fields of an HTTP request | `Cedos-By: 07:30`, `Cedos-Policy: fast` |
//!
//! A user name without `=` is ignored.

use d2tp_sched::{CostPolicy, DeadlineFallback, FlowDemand};
use jiff::Zoned;

use super::traffic_rule::TrafficRule;
use crate::fetch::deadline_text::parse_deadline;
use crate::terms::DueTime;

/// Options of a program's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnOptions {
    /// The deadline, at which both ends drop the connection.
    pub due: Option<DueTime>,
    /// The cost policy.
    pub policy: CostPolicy,
    /// What to do when free links are too slow for the deadline.
    pub if_late: DeadlineFallback,
    /// The number of the rule that the connection is under, if there are rules. Connections of different rules are
    /// scheduled and counted apart.
    pub rule: Option<u16>,
}

impl Default for ConnOptions {
    /// Any link at once, preferably a free one: what a program has without the proxy.
    fn default() -> ConnOptions {
        ConnOptions {
            due: None,
            policy: CostPolicy::Any,
            if_late: DeadlineFallback::Cell,
            rule: None,
        }
    }
}

impl ConnOptions {
    /// The connection's demand, for the scheduler; its size is unknown.
    pub(super) fn demand(&self) -> FlowDemand {
        FlowDemand {
            remaining_bytes: None,
            left: self.due.map(DueTime::time_left),
            policy: self.policy,
            if_late: self.if_late,
            metered_bytes_left: None,
        }
    }

    /// Reads the options of a command line; a deadline alone means free links first.
    ///
    /// # Errors
    /// A sentence that says what is wrong with them.
    pub fn of(
        by: Option<&str>,
        policy: Option<CostPolicy>,
        now: &Zoned,
    ) -> Result<ConnOptions, String> {
        let mut conn_options = ConnOptions::default();
        if let Some(by) = by {
            conn_options.set_by(by, now)?;
        }
        conn_options.policy = policy.unwrap_or(conn_options.policy);
        Ok(conn_options)
    }

    /// The options of a connection under a rule that begins now.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the rule's deadline, which may have passed.
    pub fn of_rule(rule: &TrafficRule, now: &Zoned) -> Result<ConnOptions, String> {
        ConnOptions::of(rule.by.as_deref(), rule.policy, now)
    }

    fn set_by(&mut self, text: &str, now: &Zoned) -> Result<(), String> {
        self.due = Some(parse_deadline(text, now)?.due());
        if self.policy == CostPolicy::Any {
            self.policy = CostPolicy::FreeFirst;
        }
        Ok(())
    }

    /// Returns the options with one of them changed.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn with(mut self, name: &str, value: &str, now: &Zoned) -> Result<ConnOptions, String> {
        match name {
            "by" => self.set_by(value, now)?,
            "policy" => self.policy = value.parse().map_err(|e| format!("policy: {e}"))?,
            "if-late" => self.if_late = value.parse().map_err(|e| format!("if-late: {e}"))?,
            other => return Err(format!("`{other}` is not one of by, policy, if-late")),
        }
        Ok(self)
    }

    /// Returns the options with those that a user name contains.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn with_user_name(self, user: &str, now: &Zoned) -> Result<ConnOptions, String> {
        if !user.contains('=') {
            return Ok(self);
        }
        // A policy that is said stands, wherever the deadline stands beside it.
        let mut parts: Vec<(&str, &str)> = Vec::new();
        for part in user.split(',') {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}` is not name=value"))?;
            parts.push((name.trim(), value.trim()));
        }
        parts.sort_by_key(|(name, _)| *name != "by");
        parts
            .into_iter()
            .try_fold(self, |conn_options, (name, value)| {
                conn_options.with(name, value, now)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn noon() -> Zoned {
        "2030-06-01T12:00:00[Asia/Seoul]".parse().unwrap()
    }

    #[test]
    fn a_user_name_says_by_when_and_at_what_price() {
        let conn_options = ConnOptions::default().with_user_name("policy=fast,by=+45m", &noon());
        let conn_options = conn_options.unwrap();
        assert_eq!(conn_options.policy, CostPolicy::Fast);
        let left = conn_options.due.unwrap().time_left();
        assert!(left <= Duration::from_secs(2_700) && left > Duration::from_secs(2_600));
        let by = ConnOptions::default()
            .with_user_name("by=+45m", &noon())
            .unwrap();
        assert_eq!(
            by.policy,
            CostPolicy::FreeFirst,
            "a deadline is for waiting"
        );
    }

    #[test]
    fn a_rule_gives_each_connection_its_deadline_and_policy() {
        let of = |text: &str| ConnOptions::of_rule(&text.parse().unwrap(), &noon());
        let backup = of("port 22 = by 2h").unwrap();
        assert_eq!(backup.policy, CostPolicy::FreeFirst);
        let left = backup.due.unwrap().time_left();
        assert!(left > Duration::from_secs(7_000), "{left:?}");
        assert_eq!(of("port 22 = fast").unwrap().policy, CostPolicy::Fast);
        assert!(of("port 22 = by soon").unwrap_err().contains("07:30"));
    }

    #[test]
    fn a_plain_user_name_says_nothing_and_nonsense_is_refused_in_words() {
        assert_eq!(
            ConnOptions::default().with_user_name("alice", &noon()),
            Ok(ConnOptions::default())
        );
        for (nonsense, word) in [
            ("by=soon", "07:30"),
            ("policy=cheap", "free-first"),
            ("speed=9", "by, policy"),
            ("by=+1h,fast", "name=value"),
        ] {
            let error = ConnOptions::default()
                .with_user_name(nonsense, &noon())
                .unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
