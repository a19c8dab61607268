//! Basic types of the scheduler: link classes, policies, demands of flows, candidates and choices.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The assumed rate of a metered link that was never measured. Higher: flows wait longer for a free
/// link and may be late. Lower: they pay sooner.
pub const METERED_RATE_FIRST_BYTES_PER_S: f64 = 250_000.0; // 2 Mb/s, a guess

/// The assumed rate of a free link that was never measured, used only to compare links when a flow
/// is urgent.
pub const FREE_RATE_FIRST_BYTES_PER_S: f64 = 1_250_000.0; // 10 Mb/s, a guess

/// The assumed size of an object whose size the origin has not reported yet.
pub const SIZE_UNKNOWN_BYTES: u64 = 100_000_000; // a guess: a podcast episode

/// The cost class of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkClass {
    /// Free: a byte costs nothing.
    Free,
    /// Metered: bytes cost money, or count against a monthly allowance.
    Metered,
    /// Roaming: bytes cost more money; never used unless allowed.
    Roaming,
}

/// Why a flow uses no link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkWaitReason {
    /// No link is up.
    NoPath,
    /// Only metered links are up, and the deadline leaves time to wait for a free one.
    PathCost,
    /// The budget for metered links is used up.
    OverBudget,
    /// Only a roaming link is up.
    RoamingBlocked,
    /// Flows with earlier deadlines are served first.
    QueuedBehind,
    /// The links that are up carry no data.
    PathTooSlow,
    /// The links that are up need much energy, and the deadline leaves time to wait for one that needs less.
    SavesEnergy,
}

/// How a flow weighs money against time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CostPolicy {
    /// No byte uses a metered link.
    FreeOnly,
    /// Free links until the deadline requires a metered one.
    FreeFirst,
    /// Like free-first, but a missed deadline counts twice: it pays earlier and misses less.
    Balanced,
    /// The fastest link at any time, whatever it costs.
    Fast,
    /// Any link at once, free ones preferred. The default for flows that cannot wait.
    Any,
}

/// What to do when free links alone would miss the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadlineFallback {
    /// Use metered links, within the budget.
    Cell,
    /// Stay on free links and be late.
    Wait,
    /// Stay on free links and give up at the deadline.
    Fail,
}

impl CostPolicy {
    /// Every policy, the cheapest first.
    pub const ALL: [CostPolicy; 5] = [
        CostPolicy::FreeOnly,
        CostPolicy::FreeFirst,
        CostPolicy::Balanced,
        CostPolicy::Fast,
        CostPolicy::Any,
    ];

    /// The name of the policy on a command line, such as `free-first`.
    pub fn as_str(self) -> &'static str {
        match self {
            CostPolicy::FreeOnly => "free-only",
            CostPolicy::FreeFirst => "free-first",
            CostPolicy::Balanced => "balanced",
            CostPolicy::Fast => "fast",
            CostPolicy::Any => "any",
        }
    }
}

impl DeadlineFallback {
    /// Every fallback.
    pub const ALL: [DeadlineFallback; 3] = [
        DeadlineFallback::Cell,
        DeadlineFallback::Wait,
        DeadlineFallback::Fail,
    ];

    /// The name of the fallback on a command line, such as `wait`.
    pub fn as_str(self) -> &'static str {
        match self {
            DeadlineFallback::Cell => "cell",
            DeadlineFallback::Wait => "wait",
            DeadlineFallback::Fail => "fail",
        }
    }
}

/// The word is not a known policy or fallback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsePolicyError {
    word: String,
    known: String,
}

impl fmt::Display for ParsePolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is none of {}", self.word, self.known)
    }
}

impl std::error::Error for ParsePolicyError {}

fn one_of<T: Copy>(
    text: &str,
    all: &[T],
    word: fn(T) -> &'static str,
) -> Result<T, ParsePolicyError> {
    all.iter()
        .copied()
        .find(|value| word(*value) == text)
        .ok_or_else(|| ParsePolicyError {
            word: text.into(),
            known: all.iter().map(|v| word(*v)).collect::<Vec<_>>().join(", "),
        })
}

impl FromStr for CostPolicy {
    type Err = ParsePolicyError;
    fn from_str(text: &str) -> Result<CostPolicy, ParsePolicyError> {
        one_of(text, &CostPolicy::ALL, CostPolicy::as_str)
    }
}

impl FromStr for DeadlineFallback {
    type Err = ParsePolicyError;
    fn from_str(text: &str) -> Result<DeadlineFallback, ParsePolicyError> {
        one_of(text, &DeadlineFallback::ALL, DeadlineFallback::as_str)
    }
}

/// The demand of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowDemand {
    /// Bytes still to be carried, if known.
    pub remaining_bytes: Option<u64>,
    /// Time until the deadline; zero after it has passed; `None` without a deadline.
    pub left: Option<Duration>,
    /// How to weigh money against time.
    pub policy: CostPolicy,
    /// What to do when free links are not enough.
    pub if_late: DeadlineFallback,
    /// Bytes that metered links may still carry; `None` means no limit.
    pub metered_bytes_left: Option<u64>,
}

impl FlowDemand {
    /// Whether the decision depends on time or on carried bytes, not on links alone. It is then
    /// repeated each second while a metered link is up.
    pub fn is_weighed(&self) -> bool {
        let weighs = matches!(self.policy, CostPolicy::FreeFirst | CostPolicy::Balanced)
            && self.if_late == DeadlineFallback::Cell;
        (self.left.is_some() && weighs) || self.metered_bytes_left.is_some()
    }
}

/// One usable link.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkCandidate {
    /// The name of the link's device.
    pub name: String,
    /// The cost class of the link.
    pub class: LinkClass,
    /// The measured rate, if the link has been used.
    pub rate_bytes_per_s: Option<f64>,
    /// The system's route metric; lower is preferred.
    pub metric: u32,
    /// Whether the link carried nothing lately although it is up.
    pub stalled: bool,
    /// Whether the transfer uses the link now.
    pub in_use: bool,
}

/// The decision, with its reason in words.
#[derive(Debug, Clone, PartialEq)]
pub enum LinkChoice {
    /// Use this link.
    Use {
        /// The index in the list of candidates.
        index: usize,
        /// Why the link is used, as a sentence for people.
        why: String,
    },
    /// Use no link for now.
    Wait {
        /// The reason code.
        reason: LinkWaitReason,
        /// Why no link is used, as a sentence for people.
        why: String,
        /// What would end the wait, as a sentence for people.
        unblocks: String,
    },
}

impl LinkCandidate {
    pub(crate) fn rate(&self) -> f64 {
        let first = match self.class {
            LinkClass::Free => FREE_RATE_FIRST_BYTES_PER_S,
            LinkClass::Metered | LinkClass::Roaming => METERED_RATE_FIRST_BYTES_PER_S,
        };
        // A measured rate of zero must not divide by zero.
        self.rate_bytes_per_s.unwrap_or(first).max(1.0)
    }
}

/// The best candidate: working links before stalled ones, then by rate or by the system's
/// preference. The link in use is kept unless another one is a fifth faster.
pub fn fastest_working<'a>(
    candidates: impl Iterator<Item = (usize, &'a LinkCandidate)>,
    by_speed: bool,
) -> Option<(usize, &'a LinkCandidate)> {
    let stay = |candidate: &LinkCandidate| if candidate.in_use { 1.2 } else { 1.0 };
    candidates.min_by(|(_, a), (_, b)| {
        let speed = || (b.rate() * stay(b)).total_cmp(&(a.rate() * stay(a)));
        let order = || b.in_use.cmp(&a.in_use).then(a.metric.cmp(&b.metric));
        let inner = if by_speed {
            speed().then_with(order)
        } else {
            order()
        };
        a.stalled.cmp(&b.stalled).then(inner)
    })
}

/// A length of time for users: `5 h 12 min`, `3 min 20 s`, `4 s`.
pub fn format_duration(span: Duration) -> String {
    let s = span.as_secs();
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, rate: f64) -> LinkCandidate {
        LinkCandidate {
            name: name.into(),
            class: LinkClass::Free,
            rate_bytes_per_s: Some(rate),
            metric: 100,
            stalled: false,
            in_use: false,
        }
    }

    fn best(candidates: &[LinkCandidate], by_speed: bool) -> &str {
        let best = fastest_working(candidates.iter().enumerate(), by_speed);
        best.map_or("none", |(_, candidate)| &candidate.name)
    }

    #[test]
    fn a_link_that_carries_nothing_goes_last() {
        let dead = LinkCandidate {
            stalled: true,
            ..candidate("wlan0", 9e6)
        };
        assert_eq!(best(&[dead.clone(), candidate("eth0", 1.0)], true), "eth0");
        assert_eq!(best(&[dead], true), "wlan0");
        assert_eq!(best(&[], true), "none");
    }

    #[test]
    fn the_link_in_use_stays_unless_another_is_a_fifth_faster() {
        let used = LinkCandidate {
            in_use: true,
            ..candidate("wlan0", 1e6)
        };
        assert_eq!(
            best(&[used.clone(), candidate("eth0", 1.1e6)], true),
            "wlan0"
        );
        assert_eq!(
            best(&[used.clone(), candidate("eth0", 1.3e6)], true),
            "eth0"
        );
        assert_eq!(best(&[used, candidate("eth0", 9e6)], false), "wlan0");
        let preferred = LinkCandidate {
            metric: 50,
            ..candidate("eth0", 1.0)
        };
        assert_eq!(best(&[candidate("wlan0", 1e6), preferred], false), "eth0");
    }

    #[test]
    fn words_lead_back_to_their_policy() {
        for policy in CostPolicy::ALL {
            assert_eq!(policy.as_str().parse(), Ok(policy));
        }
        for if_late in DeadlineFallback::ALL {
            assert_eq!(if_late.as_str().parse(), Ok(if_late));
        }
        let error = "cheap".parse::<CostPolicy>().unwrap_err();
        assert!(error.to_string().contains("free-first"), "{error}");
    }
}
