//! Rules of `cedos vpn` that tell traffic apart: which connections and packets, and what they may cost.
//!
//! ```text
//!  udp port 3478-3481 = any            calls: mobile data too
//!  dscp ef = any
//!  cgroup system.slice/backup.service = by 2h
//!  port 443 = free-only
//! ```
//!
//! The first rule that matches decides.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use d2tp_sched::CostPolicy;

use crate::fetch::option_parsers::parse_span;

/// The most rules.
pub const TRAFFIC_RULES_MAX: usize = 16; // a guess: each has a listener, and is a client of the scheduler

/// The most mistakes in a word for which a similar word is suggested.
const MISTAKES_MAX: usize = 4;

/// What separates rules in one text.
const SEPARATOR: char = ';';

/// The words with which the traffic of a rule begins.
const FIRST_WORDS: [&str; 5] = ["port", "tcp", "udp", "dscp", "cgroup"];

/// Code points of Differentiated Services that have names (IANA; RFC 2474, 2597, 3246, 5865, 8622).
const DSCP_NAMES: [(&str, u8); 24] = [
    ("cs0", 0),
    ("le", 1),
    ("cs1", 8),
    ("af11", 10),
    ("af12", 12),
    ("af13", 14),
    ("cs2", 16),
    ("af21", 18),
    ("af22", 20),
    ("af23", 22),
    ("cs3", 24),
    ("af31", 26),
    ("af32", 28),
    ("af33", 30),
    ("cs4", 32),
    ("af41", 34),
    ("af42", 36),
    ("af43", 38),
    ("cs5", 40),
    ("voice-admit", 44),
    ("ef", 46),
    ("cs6", 48),
    ("cs7", 56),
    ("default", 0),
];

/// The largest code point of Differentiated Services (RFC 2474 §3).
const DSCP_MAX: u8 = 63;

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortTransport {
    /// The Transmission Control Protocol.
    Tcp,
    /// The User Datagram Protocol.
    Udp,
}

/// The traffic that a rule is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrafficMatch {
    /// Traffic to these ports of other hosts.
    Port {
        /// The transport; `None` means both.
        transport: Option<PortTransport>,
        /// The first port.
        first: u16,
        /// The last port.
        last: u16,
    },
    /// Traffic with this code point of Differentiated Services.
    Dscp(u8),
    /// Traffic of the programs in this cgroup, and in those below it.
    Cgroup(PathBuf),
}

/// A rule of `cedos vpn`: `TRAFFIC = POLICY`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrafficRule {
    /// The traffic that the rule is for.
    pub traffic: TrafficMatch,
    /// The cost policy; `None` means that of the deadline.
    pub policy: Option<CostPolicy>,
    /// The deadline of each connection, as it is read when the connection begins.
    pub by: Option<String>,
    /// The traffic, as it was written.
    traffic_text: String,
    /// The policy, as it was written.
    policy_text: String,
}

impl TrafficRule {
    /// The traffic that the rule is for, as it was written.
    pub fn traffic_text(&self) -> &str {
        &self.traffic_text
    }

    /// The policy and deadline, as they were written.
    pub fn policy_text(&self) -> &str {
        &self.policy_text
    }

    /// Whether packets may use metered networks while no free one is up. A packet has no deadline to meet.
    pub fn lets_packets_pay(&self) -> bool {
        let of_deadline = match self.by {
            Some(_) => CostPolicy::FreeFirst,
            None => CostPolicy::Any,
        };
        packets_may_pay(self.policy.unwrap_or(of_deadline))
    }

    /// Reads several rules, separated by `;`.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the first bad one.
    pub fn parse_list(text: &str) -> Result<Vec<TrafficRule>, String> {
        let texts = text.split(SEPARATOR).filter(|text| !text.trim().is_empty());
        let rules: Vec<TrafficRule> = texts.map(str::parse).collect::<Result<_, _>>()?;
        TrafficRule::check_count(rules.len())?;
        Ok(rules)
    }

    /// Checks how many rules there are.
    ///
    /// # Errors
    /// There are more than [`TRAFFIC_RULES_MAX`].
    pub fn check_count(count: usize) -> Result<(), String> {
        match count <= TRAFFIC_RULES_MAX {
            true => Ok(()),
            false => Err(format!(
                "{count} rules are too many; there may be {TRAFFIC_RULES_MAX}"
            )),
        }
    }
}

/// Whether this policy lets packets use metered networks while no free one is up.
pub fn packets_may_pay(policy: CostPolicy) -> bool {
    match policy {
        CostPolicy::Any | CostPolicy::Fast => true,
        CostPolicy::FreeOnly | CostPolicy::FreeFirst | CostPolicy::Balanced => false,
    }
}

impl fmt::Display for TrafficRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.traffic_text, self.policy_text)
    }
}

impl FromStr for TrafficRule {
    type Err = String;

    fn from_str(text: &str) -> Result<TrafficRule, String> {
        let (traffic_text, policy_text) = text.rsplit_once('=').ok_or_else(|| {
            format!("`{text}` has no policy; write `TRAFFIC = POLICY`, as `port 443 = free-only`")
        })?;
        let traffic_words: Vec<&str> = traffic_text.split_whitespace().collect();
        let policy_words: Vec<&str> = policy_text.split_whitespace().collect();
        let traffic = parse_traffic(&traffic_words)?;
        let (policy, by) = parse_policy(&policy_words)?;
        Ok(TrafficRule {
            traffic,
            policy,
            by,
            traffic_text: traffic_words.join(" "),
            policy_text: policy_words.join(" "),
        })
    }
}

fn parse_traffic(words: &[&str]) -> Result<TrafficMatch, String> {
    let ports = |transport, ports: &str| -> Result<TrafficMatch, String> {
        let (first, last) = parse_ports(ports)?;
        Ok(TrafficMatch::Port {
            transport,
            first,
            last,
        })
    };
    match words {
        ["port", range] => ports(None, range),
        ["tcp", "port", range] => ports(Some(PortTransport::Tcp), range),
        ["udp", "port", range] => ports(Some(PortTransport::Udp), range),
        ["dscp", code] => parse_dscp(code).map(TrafficMatch::Dscp),
        ["cgroup", path] => Ok(TrafficMatch::Cgroup(PathBuf::from(path))),
        ["tcp" | "udp", second, ..] if *second != "port" => Err(format!(
            "`{}` names no ports; write `{} port 443`{}",
            words.join(" "),
            words[0],
            meant(second, ["port"]),
        )),
        [first, ..] if !FIRST_WORDS.contains(first) => Err(format!(
            "`{}` is no traffic: it begins with port, tcp port, udp port, dscp or cgroup{}",
            words.join(" "),
            meant(first, FIRST_WORDS),
        )),
        [] => Err("a rule names its traffic before `=`, as `port 443 = free-only`".to_owned()),
        _ => Err(format!(
            "`{}` is no traffic; write port 443, udp port 3478-3481, dscp ef, or cgroup PATH",
            words.join(" "),
        )),
    }
}

fn parse_ports(text: &str) -> Result<(u16, u16), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok((first, last)),
        _ => Err(format!(
            "`{text}` is no port from 1 to 65535, and no range of ports such as 3478-3481"
        )),
    }
}

fn parse_dscp(text: &str) -> Result<u8, String> {
    let lower = text.to_lowercase();
    let named = DSCP_NAMES.iter().find(|(name, _)| *name == lower);
    let number = || lower.parse().ok().filter(|code| *code <= DSCP_MAX);
    named.map(|(_, code)| *code).or_else(number).ok_or_else(|| {
        format!(
            "`{text}` is no DSCP: write a number to {DSCP_MAX}, or a name such as ef, af41, cs1 or le{}",
            meant(&lower, DSCP_NAMES.map(|(name, _)| name)),
        )
    })
}

fn parse_policy(words: &[&str]) -> Result<(Option<CostPolicy>, Option<String>), String> {
    let (policy, by) = match words {
        [] => {
            return Err("a rule names its policy after `=`, as `port 443 = free-only`".to_owned());
        }
        ["by", by @ ..] => (None, Some(by)),
        [policy, "by", by @ ..] => (Some(*policy), Some(by)),
        [policy] => (Some(*policy), None),
        [_, more, ..] => {
            return Err(format!(
                "`{more}` follows no policy; a deadline is `by 2h`{}",
                meant(more, ["by"]),
            ));
        }
    };
    let parsed = policy.map(|word| {
        let known = CostPolicy::ALL.map(CostPolicy::as_str);
        word.parse().map_err(|_| {
            format!(
                "`{word}` is no policy: {}, or by TIME{}",
                known.join(", "),
                meant(word, known)
            )
        })
    });
    let by = by.map(|words| {
        let text = words.join(" ");
        // A length of time is from the connection's beginning.
        match parse_span(&text) {
            Ok(_) => format!("+{text}"),
            Err(_) => text,
        }
    });
    Ok((parsed.transpose()?, by))
}

/// Asks for the known word that was probably meant, if one is near.
fn meant<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let distance = |known: &&str| strsim::damerau_levenshtein(word, known);
    let nearest = known.into_iter().min_by_key(distance).filter(|known| {
        // A short word is near to others with which it has next to nothing in common.
        let mistakes = distance(known);
        mistakes <= MISTAKES_MAX && 2 * mistakes <= word.len()
    });
    nearest
        .map(|known| format!("; do you mean `{known}`?"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> TrafficRule {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_rule_names_ports_a_code_point_or_a_cgroup_and_their_policy() {
        let calls = rule(" udp  port 3478-3481=any ");
        let ports = TrafficMatch::Port {
            transport: Some(PortTransport::Udp),
            first: 3478,
            last: 3481,
        };
        assert_eq!(calls.traffic, ports);
        assert_eq!(calls.to_string(), "udp port 3478-3481 = any");
        assert!(calls.lets_packets_pay());
        let web = rule("port 443 = free-only");
        assert_eq!(web.policy, Some(CostPolicy::FreeOnly));
        assert!(!web.lets_packets_pay());
        assert_eq!(rule("dscp EF = fast").traffic, TrafficMatch::Dscp(46));
        assert_eq!(rule("dscp 8 = any").traffic, TrafficMatch::Dscp(8));
        let backup = rule("cgroup system.slice/b=c.service = by 2h");
        let path = PathBuf::from("system.slice/b=c.service");
        assert_eq!(backup.traffic, TrafficMatch::Cgroup(path));
        assert_eq!((backup.policy, backup.by.as_deref()), (None, Some("+2h")));
        assert!(!backup.lets_packets_pay());
        let both = rule("port 22 = balanced by 2h");
        assert_eq!(both.policy, Some(CostPolicy::Balanced));
    }

    #[test]
    fn a_bad_rule_is_refused_with_the_word_that_was_probably_meant() {
        for (bad, word) in [
            ("prot 443 = any", "do you mean `port`?"),
            ("dcsp ef = any", "do you mean `dscp`?"),
            ("udp prot 53 = any", "do you mean `port`?"),
            ("port 443 = free-olny", "do you mean `free-only`?"),
            ("dscp af14x = any", "do you mean `af1"),
            ("port 443", "TRAFFIC = POLICY"),
            ("port 443 =", "after `=`"),
            ("= any", "before `=`"),
            ("port 0 = any", "1 to 65535"),
            ("port 9-8 = any", "1 to 65535"),
            ("port 443 = any at 2h", "by 2h"),
            ("dscp 64 = any", "63"),
            ("port 443 444 = any", "no traffic"),
        ] {
            let error = bad.parse::<TrafficRule>().unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn a_list_of_rules_keeps_their_order_and_has_an_end() {
        let rules = TrafficRule::parse_list("port 1 = any; port 2 = free-only;").unwrap();
        let texts: Vec<String> = rules.iter().map(TrafficRule::to_string).collect();
        assert_eq!(texts, ["port 1 = any", "port 2 = free-only"]);
        let many = "port 1 = any;".repeat(TRAFFIC_RULES_MAX + 1);
        assert!(TrafficRule::parse_list(&many).is_err());
    }
}
