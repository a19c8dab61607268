//! Which link one flow uses now, or why it waits: Algorithm 1 of the Cedos paper.
//!
//! ```text
//! urgent = remaining bytes ÷ metered rate > time left
//! not urgent: a free link if there is one, else wait          urgent: the fastest permitted link
//! ```
//!
//! Beyond the paper: a first estimate for links never measured, a margin with hysteresis so that
//! a flow at the edge does not switch every second, links that carry nothing go last, and a budget
//! for metered bytes. Flows that are on several links at once: `spending.rs`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Rate assumed of a metered link never measured. Higher: waits longer for a free link and may
/// be late; lower: pays sooner.
pub const METERED_RATE_FIRST_BYTES_PER_S: f64 = 250_000.0; // 2 Mb/s, a guess

/// Rate assumed of a free link never measured, used only to compare when urgent.
pub const FREE_RATE_FIRST_BYTES_PER_S: f64 = 1_250_000.0; // 10 Mb/s, a guess

/// Size assumed while the origin has not told one.
pub const SIZE_UNKNOWN_BYTES: u64 = 100_000_000; // a guess: a podcast episode

/// Time kept in hand for connecting and for the estimate being wrong.
pub const MARGIN: Duration = Duration::from_secs(5); // a guess

/// A century: keeps the arithmetic in range for sizes nobody will ever fetch.
pub(crate) const NEEDED_MAX_S: f64 = 3.2e9;

/// What a byte on a link costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Nothing.
    Free,
    /// Money, or a monthly allowance.
    Metered,
    /// More money: never used unasked.
    Roaming,
}

/// Why a flow uses no link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// No link is up.
    NoPath,
    /// Only links that cost are up, and there is time.
    PathCost,
    /// Metered links carried what they may.
    OverBudget,
    /// Only a roaming link is up.
    RoamingBlocked,
    /// Flows with earlier deadlines go first.
    QueuedBehind,
    /// What is up carries nothing.
    PathTooSlow,
}

/// How to weigh money against time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Never a byte on a link that costs.
    FreeOnly,
    /// Free links until the deadline needs another.
    FreeFirst,
    /// Like free-first, with twice the slack: pays earlier, misses less.
    Balanced,
    /// The fastest link at any time.
    Fast,
    /// Any link at once, free ones preferred.
    Any,
}

/// What to do when free links alone will not make the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfLate {
    /// Use cellular, within its budget.
    Cell,
    /// Stay on free links and be late.
    Wait,
    /// Stay on free links and give up at the deadline.
    Fail,
}

impl Policy {
    /// All of them, mildest first.
    pub const ALL: [Policy; 5] = [
        Policy::FreeOnly,
        Policy::FreeFirst,
        Policy::Balanced,
        Policy::Fast,
        Policy::Any,
    ];

    /// As people write it.
    pub fn word(self) -> &'static str {
        match self {
            Policy::FreeOnly => "free-only",
            Policy::FreeFirst => "free-first",
            Policy::Balanced => "balanced",
            Policy::Fast => "fast",
            Policy::Any => "any",
        }
    }
}

impl IfLate {
    /// All of them.
    pub const ALL: [IfLate; 3] = [IfLate::Cell, IfLate::Wait, IfLate::Fail];

    /// As people write it.
    pub fn word(self) -> &'static str {
        match self {
            IfLate::Cell => "cell",
            IfLate::Wait => "wait",
            IfLate::Fail => "fail",
        }
    }
}

/// A word that is none of those there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownWord {
    word: String,
    known: String,
}

impl fmt::Display for UnknownWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is none of {}", self.word, self.known)
    }
}

impl std::error::Error for UnknownWord {}

fn one_of<T: Copy>(text: &str, all: &[T], word: fn(T) -> &'static str) -> Result<T, UnknownWord> {
    all.iter()
        .copied()
        .find(|value| word(*value) == text)
        .ok_or_else(|| UnknownWord {
            word: text.into(),
            known: all.iter().map(|v| word(*v)).collect::<Vec<_>>().join(", "),
        })
}

impl FromStr for Policy {
    type Err = UnknownWord;
    fn from_str(text: &str) -> Result<Policy, UnknownWord> {
        one_of(text, &Policy::ALL, Policy::word)
    }
}

impl FromStr for IfLate {
    type Err = UnknownWord;
    fn from_str(text: &str) -> Result<IfLate, UnknownWord> {
        one_of(text, &IfLate::ALL, IfLate::word)
    }
}

/// What a flow wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Bytes still to come, when known.
    pub remaining_bytes: Option<u64>,
    /// Time until the deadline; zero when it has passed; none when there is none.
    pub left: Option<Duration>,
    /// How to weigh money against time.
    pub policy: Policy,
    /// What to do when free links are not enough.
    pub if_late: IfLate,
    /// Bytes metered links may still carry; none is no limit.
    pub metered_bytes_left: Option<u64>,
}

/// One usable link.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// The device's name.
    pub name: String,
    /// What it costs.
    pub class: Class,
    /// Measured rate, when it has been used.
    pub rate_bytes_per_s: Option<f64>,
    /// How much the system prefers it; lower is more.
    pub metric: u32,
    /// It carried nothing lately although it is up.
    pub stalled: bool,
    /// The transfer is on it now.
    pub in_use: bool,
}

/// The decision, with its reason in words.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// Use this link.
    Use {
        /// Its place in the list given.
        index: usize,
        /// Why.
        why: String,
    },
    /// Use none for now.
    Wait {
        /// The reason code.
        reason: Hold,
        /// Why.
        why: String,
        /// What would end the wait.
        unblocks: String,
    },
}

impl Way {
    pub(crate) fn rate(&self) -> f64 {
        let first = match self.class {
            Class::Free => FREE_RATE_FIRST_BYTES_PER_S,
            Class::Metered | Class::Roaming => METERED_RATE_FIRST_BYTES_PER_S,
        };
        // A rate measured as nothing must not stop the arithmetic.
        self.rate_bytes_per_s.unwrap_or(first).max(1.0)
    }
}

/// Chooses one link for one flow.
pub fn choose(need: &Need, ways: &[Way]) -> Choice {
    let of = |class: Class| {
        ways.iter()
            .enumerate()
            .filter(move |(_, way)| way.class == class)
    };
    let over_budget = need.metered_bytes_left == Some(0);
    let metered = || of(Class::Metered).filter(|_| !over_budget);

    let best_free = fastest_working(of(Class::Free), need.policy == Policy::Fast);
    let urgency = urgency(need, ways);
    let pays_at_once = matches!(need.policy, Policy::Fast | Policy::Any);
    let may_pay = match need.policy {
        Policy::FreeOnly => false,
        Policy::Fast | Policy::Any => true,
        Policy::FreeFirst | Policy::Balanced => need.if_late == IfLate::Cell && urgency.is_some(),
    };
    let free_works = best_free.is_some_and(|(_, way)| !way.stalled);

    if may_pay {
        // When urgent (or told to be fast) the fastest permitted link; `any` prefers a free one.
        let by_speed = need.policy == Policy::Fast || urgency.is_some();
        let pool = of(Class::Free).chain(metered());
        let best = if need.policy == Policy::Any && free_works {
            best_free
        } else {
            fastest_working(pool, by_speed)
        };
        if let Some((index, way)) = best {
            let why = match (&urgency, way.class) {
                (_, Class::Free) => format!("{} is up and free", way.name),
                (Some(urgent), _) => format!("{urgent}, so {} may cost", way.name),
                (None, _) => format!("the policy allows {} to cost", way.name),
            };
            return Choice::Use { index, why };
        }
    }
    if let Some((index, way)) = best_free {
        return Choice::Use {
            index,
            why: format!("{} is up and free", way.name),
        };
    }
    wait(need, ways, over_budget && (may_pay || pays_at_once))
}

/// Why the deadline needs a metered link now, if it does.
fn urgency(need: &Need, ways: &[Way]) -> Option<String> {
    let left = need.left?;
    let rate = ways
        .iter()
        .filter(|way| way.class == Class::Metered)
        .map(Way::rate)
        .fold(f64::NAN, f64::max);
    let rate = if rate.is_nan() {
        METERED_RATE_FIRST_BYTES_PER_S
    } else {
        rate
    };
    let needed = time_for(need, rate);
    is_short(need, ways, rate, left)
        .then(|| format!("{} needed of {} left", in_words(needed), in_words(left)))
}

/// How long what is left takes at `rate`: ⌈f/r⌉ of the paper, in seconds.
pub(crate) fn time_for(need: &Need, rate: f64) -> Duration {
    let remaining = need.remaining_bytes.unwrap_or(SIZE_UNKNOWN_BYTES);
    Duration::from_secs_f64((remaining as f64 / rate).ceil().min(NEEDED_MAX_S))
}

/// Whether `rate` does not get the flow there in time, with the policy's slack.
fn is_short(need: &Need, ways: &[Way], rate: f64, left: Duration) -> bool {
    let needed = time_for(need, rate);
    // Once paying, pay on until there is clearly more slack than when it began.
    let paying = ways
        .iter()
        .any(|way| way.in_use && way.class == Class::Metered);
    let mut wanted = needed;
    if paying {
        wanted += needed / 2;
    }
    if need.policy == Policy::Balanced {
        wanted = wanted.saturating_mul(2);
    }
    wanted.saturating_add(MARGIN) > left
}

/// The best of some ways: working before stalled; then by rate, or by the system's preference.
/// The one in use is kept unless another is a fifth faster.
pub(crate) fn fastest_working<'a>(
    ways: impl Iterator<Item = (usize, &'a Way)>,
    by_speed: bool,
) -> Option<(usize, &'a Way)> {
    let stay = |way: &Way| if way.in_use { 1.2 } else { 1.0 };
    ways.min_by(|(_, a), (_, b)| {
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

pub(crate) fn wait(need: &Need, ways: &[Way], over_budget: bool) -> Choice {
    let named = |class: Class| {
        let names: Vec<&str> = ways
            .iter()
            .filter(|way| way.class == class)
            .map(|way| way.name.as_str())
            .collect();
        names.join(", ")
    };
    let (metered, roaming) = (named(Class::Metered), named(Class::Roaming));
    if ways.is_empty() {
        return Choice::Wait {
            reason: Hold::NoPath,
            why: "no network is up".into(),
            unblocks: "any network".into(),
        };
    }
    if metered.is_empty() {
        return Choice::Wait {
            reason: Hold::RoamingBlocked,
            why: format!("only {roaming} is up, class roaming"),
            unblocks: format!("another network | --link {roaming}=metered"),
        };
    }
    if over_budget {
        return Choice::Wait {
            reason: Hold::OverBudget,
            why: format!("{metered} carried what it may"),
            unblocks: "a free network | a larger --max-cell".into(),
        };
    }
    let spends_later = matches!(need.policy, Policy::FreeFirst | Policy::Balanced)
        && need.if_late == IfLate::Cell
        && need.left.is_some();
    let slack = need
        .left
        .map(|left| format!("; {} left", in_words(left)))
        .unwrap_or_default();
    Choice::Wait {
        reason: Hold::PathCost,
        why: format!("only {metered} is up, class metered{slack}"),
        unblocks: if spends_later {
            format!("a free network | {metered} when the deadline needs it | --policy any")
        } else {
            "a free network | --policy any".into()
        },
    }
}

/// A length of time for people: `5 h 12 m`, `3 m 20 s`, `4 s`.
pub fn in_words(span: Duration) -> String {
    let s = span.as_secs();
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} m {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(name: &str, class: Class, rate: f64) -> Way {
        Way {
            name: name.into(),
            class,
            rate_bytes_per_s: Some(rate),
            metric: 100,
            stalled: false,
            in_use: false,
        }
    }

    fn wifi() -> Way {
        way("wlan0", Class::Free, 1e6)
    }

    fn cell() -> Way {
        way("wwan0", Class::Metered, 2e6)
    }

    fn need(policy: Policy, remaining: u64, left_s: u64) -> Need {
        Need {
            remaining_bytes: Some(remaining),
            left: Some(Duration::from_secs(left_s)),
            policy,
            if_late: IfLate::Cell,
            metered_bytes_left: None,
        }
    }

    fn used(choice: &Choice, ways: &[Way]) -> String {
        match choice {
            Choice::Use { index, .. } => ways[*index].name.clone(),
            Choice::Wait { reason, .. } => format!("{reason:?}"),
        }
    }

    #[track_caller]
    fn decides(need: &Need, ways: &[Way], wanted: &str) {
        let choice = choose(need, ways);
        assert_eq!(used(&choice, ways), wanted, "{choice:?}");
    }

    #[test]
    fn with_slack_a_free_link_is_used_and_a_metered_one_waited_out() {
        let need = need(Policy::FreeFirst, 100_000_000, 3600);
        decides(&need, &[wifi(), cell()], "wlan0");
        decides(&need, &[cell()], "PathCost");
        decides(&need, &[], "NoPath");
    }

    #[test]
    fn without_slack_the_faster_link_is_used() {
        // 100 MB at 2 MB/s need 50 s.
        let need = need(Policy::FreeFirst, 100_000_000, 50);
        decides(&need, &[wifi(), cell()], "wwan0");
        decides(&need, &[way("wlan0", Class::Free, 9e6), cell()], "wlan0");
        decides(&need, &[cell()], "wwan0");
    }

    #[test]
    fn a_transfer_that_began_to_pay_does_not_stop_at_the_first_second_of_slack() {
        let need = need(Policy::FreeFirst, 100_000_000, 60);
        decides(&need, &[cell()], "PathCost");
        decides(
            &need,
            &[Way {
                in_use: true,
                ..cell()
            }],
            "wwan0",
        );
    }

    #[test]
    fn balanced_pays_at_twice_the_slack() {
        decides(
            &need(Policy::FreeFirst, 100_000_000, 90),
            &[cell()],
            "PathCost",
        );
        decides(&need(Policy::Balanced, 100_000_000, 90), &[cell()], "wwan0");
    }

    #[test]
    fn free_only_never_pays_however_late() {
        decides(
            &need(Policy::FreeOnly, 100_000_000, 0),
            &[cell()],
            "PathCost",
        );
        for if_late in [IfLate::Wait, IfLate::Fail] {
            let need = Need {
                if_late,
                ..need(Policy::FreeFirst, 100_000_000, 0)
            };
            decides(&need, &[cell()], "PathCost");
        }
    }

    #[test]
    fn any_takes_what_is_there_and_prefers_free_and_fast_prefers_fast() {
        decides(&need(Policy::Any, 1000, 3600), &[cell()], "wwan0");
        decides(&need(Policy::Any, 1000, 3600), &[cell(), wifi()], "wlan0");
        decides(&need(Policy::Fast, 1000, 3600), &[wifi(), cell()], "wwan0");
    }

    #[test]
    fn an_exhausted_budget_stops_metered_links_only() {
        let need = Need {
            metered_bytes_left: Some(0),
            ..need(Policy::FreeFirst, 100_000_000, 0)
        };
        decides(&need, &[cell()], "OverBudget");
        decides(&need, &[cell(), wifi()], "wlan0");
    }

    #[test]
    fn roaming_is_never_used_unasked() {
        let roaming = way("wwan0", Class::Roaming, 2e6);
        for policy in [Policy::FreeFirst, Policy::Any, Policy::Fast] {
            decides(
                &need(policy, 100_000_000, 0),
                std::slice::from_ref(&roaming),
                "RoamingBlocked",
            );
        }
    }

    #[test]
    fn a_link_that_carries_nothing_goes_last() {
        let dead = Way {
            stalled: true,
            ..wifi()
        };
        let other = way("eth0", Class::Free, 1.0);
        decides(
            &need(Policy::FreeFirst, 1000, 3600),
            &[dead.clone(), other],
            "eth0",
        );
        decides(
            &need(Policy::FreeFirst, 1000, 3600),
            std::slice::from_ref(&dead),
            "wlan0",
        );
        decides(&need(Policy::Any, 1000, 3600), &[dead, cell()], "wwan0");
    }

    #[test]
    fn an_unknown_size_is_taken_as_a_large_one() {
        let need = Need {
            remaining_bytes: None,
            ..need(Policy::FreeFirst, 0, 20)
        };
        decides(&need, &[cell()], "wwan0");
    }

    #[test]
    fn no_deadline_never_pays_under_free_first() {
        let need = Need {
            left: None,
            ..need(Policy::FreeFirst, 100_000_000, 0)
        };
        decides(&need, &[cell()], "PathCost");
    }

    #[test]
    fn words_lead_back_to_their_policy() {
        for policy in Policy::ALL {
            assert_eq!(policy.word().parse(), Ok(policy));
        }
        for if_late in IfLate::ALL {
            assert_eq!(if_late.word().parse(), Ok(if_late));
        }
        let error = "cheap".parse::<Policy>().unwrap_err();
        assert!(error.to_string().contains("free-first"), "{error}");
    }
}
