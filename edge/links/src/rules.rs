//! The user's rules for networks in the settings file. Only command-line flags take precedence.
//!
//! ```toml
//! [[network]]
//! ssid = "Train"            # conditions: ssid, type, carrier, device; all that are given must match
//! class = "metered"         # free, metered, roaming, auto
//! cap = "2G"                # bytes per month
//! reset_day = 14            # of each month; 31: its last day
//! cutoff = "cautious"       # what happens at the cap: hard, soft, cautious
//! ```
//!
//! The first rule that matches decides. An unknown key is an error, which suggests a similar key.

use serde::{Deserialize, Serialize};

use crate::class::CostClass;
use crate::link_kind::LinkKind;
use crate::network::NetworkInfo;

/// The share of a cap at which a cautious rule stops, because operators also count headers, which
/// are not counted here.
const CAUTIOUS_SHARE: f64 = 0.9; // a guess

/// The most mistakes in a key for which a similar key is suggested.
const MISTAKES_MAX: usize = 3;

/// Network rules that cannot be parsed: what is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NetworkRuleError(String);

/// The user's network rules. Other keys of the file are other settings, which their owner checks.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct NetworkRules {
    /// The rules, in order of precedence.
    #[serde(default)]
    pub network: Vec<NetworkRule>,
}

/// A rule for some networks.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkRule {
    /// The SSID of a Wi-Fi network.
    pub ssid: Option<String>,
    /// The kind: `wifi`, `cellular`, `ethernet`, `vpn`.
    #[serde(rename = "type")]
    pub kind: Option<LinkKindSetting>,
    /// The code of a mobile network: `26201`; `262*` matches all of a country's.
    pub carrier: Option<String>,
    /// The device's name, or its beginning and `*`.
    pub device: Option<String>,
    /// The cost class; absent or `auto`: as detected.
    #[serde(default)]
    pub class: CostClassSetting,
    /// The cap in bytes per month: `500M`, `2G`, or a number.
    #[serde(default, deserialize_with = "bytes")]
    pub cap: Option<u64>,
    /// The day of the month on which the count restarts.
    #[serde(default)]
    pub reset_day: ResetDay,
    /// What happens at the cap.
    #[serde(default)]
    pub cutoff: CapCutoff,
}

/// The kinds a rule can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "as Kind")]
pub enum LinkKindSetting {
    Wifi,
    Cellular,
    Ethernet,
    Vpn,
}

/// The classes a rule can name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "as Class")]
pub enum CostClassSetting {
    #[default]
    Auto,
    Free,
    Metered,
    Roaming,
}

/// What happens at the cap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CapCutoff {
    /// Data stops at the cap.
    #[default]
    Hard,
    /// The user is notified at the cap, and data continues.
    Soft,
    /// Data stops at nine tenths of the cap.
    Cautious,
}

/// A day of the month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u8")]
pub struct ResetDay(u8);

impl Default for ResetDay {
    fn default() -> ResetDay {
        ResetDay(1)
    }
}

impl TryFrom<u8> for ResetDay {
    type Error = String;
    fn try_from(day: u8) -> Result<ResetDay, String> {
        if (1..=31).contains(&day) {
            return Ok(ResetDay(day));
        }
        Err(format!("a month has days 1 to 31, not {day}"))
    }
}

impl ResetDay {
    /// The number of the day: 1 to 31.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The first day of the counting month that contains a day. Days are year, month and day.
    pub fn began(self, (year, month, day): (i16, u8, u8)) -> (i16, u8, u8) {
        let here = self.0.min(days_in(year, month));
        if day >= here {
            return (year, month, here);
        }
        let (year, month) = if month == 1 {
            (year - 1, 12)
        } else {
            (year, month - 1)
        };
        (year, month, self.0.min(days_in(year, month)))
    }
}

fn days_in(year: i16, month: u8) -> u8 {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

impl NetworkRules {
    /// Parses rules in TOML.
    ///
    /// # Errors
    /// The text is not TOML, has an unknown key or value, or a rule without a condition.
    pub fn parse(text: &str) -> Result<NetworkRules, NetworkRuleError> {
        let rules: NetworkRules =
            toml::from_str(text).map_err(|error| NetworkRuleError(explain(&error)))?;
        match rules.network.iter().position(NetworkRule::is_about_nothing) {
            Some(n) => Err(NetworkRuleError(format!(
                "[[network]] number {} says of no network what it is about: ssid, type, carrier or device",
                n + 1
            ))),
            None => Ok(rules),
        }
    }

    /// The rule for a device of this kind and the network behind it.
    pub fn of(
        &self,
        device: &str,
        kind: LinkKind,
        network: Option<&NetworkInfo>,
    ) -> Option<&NetworkRule> {
        self.network
            .iter()
            .find(|rule| rule.matches(device, kind, network))
    }
}

impl CapCutoff {
    /// Bytes left of a cap after `used` bytes; `None` means no limit.
    pub fn left(self, cap: u64, used: u64) -> Option<u64> {
        let cap = match self {
            CapCutoff::Soft => return None,
            CapCutoff::Hard => cap,
            CapCutoff::Cautious => (cap as f64 * CAUTIOUS_SHARE) as u64,
        };
        Some(cap.saturating_sub(used))
    }

    /// The name of the value in the settings.
    pub fn as_str(self) -> &'static str {
        match self {
            CapCutoff::Hard => "hard",
            CapCutoff::Soft => "soft",
            CapCutoff::Cautious => "cautious",
        }
    }
}

impl NetworkRule {
    /// The configured class, if any.
    pub fn class(&self) -> Option<CostClass> {
        match self.class {
            CostClassSetting::Auto => None,
            CostClassSetting::Free => Some(CostClass::Free),
            CostClassSetting::Metered => Some(CostClass::Metered),
            CostClassSetting::Roaming => Some(CostClass::Roaming),
        }
    }

    /// Bytes left of the cap after `used` bytes this month; `None` means no limit.
    pub fn left(&self, used: u64) -> Option<u64> {
        self.cutoff.left(self.cap?, used)
    }

    /// The networks that the rule applies to, for users.
    pub fn describe(&self) -> String {
        let kind = self.kind.map(|kind| format!("{kind:?}").to_lowercase());
        let words = [
            ("ssid", self.ssid.clone()),
            ("type", kind),
            ("carrier", self.carrier.clone()),
            ("device", self.device.clone()),
        ];
        let given = words
            .into_iter()
            .filter_map(|(key, word)| Some(format!("{key} {}", word?)));
        given.collect::<Vec<_>>().join(", ")
    }

    fn is_about_nothing(&self) -> bool {
        self.ssid.is_none()
            && self.kind.is_none()
            && self.carrier.is_none()
            && self.device.is_none()
    }

    fn matches(&self, device: &str, kind: LinkKind, network: Option<&NetworkInfo>) -> bool {
        let ssid = network.and_then(|n| Some(n.access_point.as_ref()?.ssid.as_str()));
        let carrier = network.and_then(|n| n.operator.as_deref());
        let word = match kind {
            LinkKind::Wifi => Some(LinkKindSetting::Wifi),
            LinkKind::Cellular => Some(LinkKindSetting::Cellular),
            LinkKind::Ethernet => Some(LinkKindSetting::Ethernet),
            LinkKind::Vpn => Some(LinkKindSetting::Vpn),
            LinkKind::Loopback | LinkKind::Serial | LinkKind::Other => None,
        };
        let is = |wanted: &Option<String>, there: Option<&str>| match wanted {
            Some(wanted) => there.is_some_and(|there| matches_pattern(wanted, there)),
            None => true,
        };
        // An SSID may contain a star.
        let named = self
            .ssid
            .as_deref()
            .is_none_or(|wanted| ssid == Some(wanted));
        named
            && self.kind.is_none_or(|wanted| word == Some(wanted))
            && is(&self.carrier, carrier)
            && is(&self.device, Some(device))
    }
}

/// Matches a pattern, in which a `*` at the end stands for any rest.
pub(crate) fn matches_pattern(wanted: &str, there: &str) -> bool {
    match wanted.strip_suffix('*') {
        Some(beginning) => there.starts_with(beginning),
        None => wanted == there,
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ByteCountSetting {
    Number(u64),
    Words(String),
}

fn bytes<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let words = match ByteCountSetting::deserialize(from)? {
        ByteCountSetting::Number(bytes) => return Ok(Some(bytes)),
        ByteCountSetting::Words(words) => words,
    };
    let bare = words.trim().trim_end_matches(['B', 'b']);
    let (number, times) = match bare.chars().last().map(|unit| unit.to_ascii_lowercase()) {
        Some('k') => (&bare[..bare.len() - 1], 1e3),
        Some('m') => (&bare[..bare.len() - 1], 1e6),
        Some('g') => (&bare[..bare.len() - 1], 1e9),
        _ => (bare, 1.0),
    };
    match number.trim().parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(Some((number * times) as u64)),
        _ => Err(serde::de::Error::custom(format!(
            "`{words}` is no number of bytes, for example 500M or 2G"
        ))),
    }
}

/// The parser's message, with a suggestion for an unknown key.
fn explain(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let text = text.trim_end();
    match closest_key(error.message()) {
        Some(key) => format!("{text}\ndid you mean `{key}`?"),
        None => text.to_owned(),
    }
}

/// From "unknown field `a`, expected one of `b`, `c`": the one of `b` and `c` that is nearest to `a`.
fn closest_key(message: &str) -> Option<&str> {
    let mut quoted = message
        .strip_prefix("unknown ")?
        .split('`')
        .skip(1)
        .step_by(2);
    let unknown = quoted.next()?;
    let nearest = quoted.min_by_key(|key| strsim::damerau_levenshtein(unknown, key))?;
    let mistakes = strsim::damerau_levenshtein(unknown, nearest);
    (mistakes <= MISTAKES_MAX && mistakes < unknown.len()).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::AccessPoint;

    fn on(ssid: &str) -> NetworkInfo {
        NetworkInfo {
            device: "wlan0".into(),
            access_point: Some(AccessPoint {
                ssid: ssid.into(),
                bssid: "02:00:00:00:00:01".into(),
                signal_percent: 50,
                frequency_mhz: 2_412,
                known: true,
            }),
            ..NetworkInfo::default()
        }
    }

    const RULES: &str = r#"
        [[network]]
        ssid = "Train"
        class = "metered"
        cap = "1.5G"
        cutoff = "cautious"

        [[network]]
        type = "cellular"
        carrier = "262*"
        class = "free"

        [[network]]
        type = "cellular"
        class = "roaming"
        cap = 1000
        reset_day = 31
    "#;

    #[test]
    fn the_first_rule_that_fits_all_it_is_about_decides() {
        let rules = NetworkRules::parse(RULES).unwrap();
        let class = |device, kind, network: Option<&NetworkInfo>| {
            rules.of(device, kind, network).and_then(NetworkRule::class)
        };
        let modem = |code: &str| NetworkInfo {
            operator: Some(code.into()),
            ..NetworkInfo::default()
        };
        assert_eq!(
            class("wlan0", LinkKind::Wifi, Some(&on("Train"))),
            Some(CostClass::Metered)
        );
        assert_eq!(class("wlan0", LinkKind::Wifi, Some(&on("Trainer"))), None);
        assert_eq!(class("wlan0", LinkKind::Wifi, None), None);
        let home = modem("26201");
        assert_eq!(
            class("wwan0", LinkKind::Cellular, Some(&home)),
            Some(CostClass::Free)
        );
        let abroad = modem("22801");
        assert_eq!(
            class("wwan0", LinkKind::Cellular, Some(&abroad)),
            Some(CostClass::Roaming)
        );
        assert_eq!(
            class("wwan0", LinkKind::Cellular, None),
            Some(CostClass::Roaming)
        );
    }

    #[test]
    fn a_cap_leaves_what_its_cutoff_says() {
        let rules = NetworkRules::parse(RULES).unwrap().network;
        assert_eq!(rules[0].left(350_000_000), Some(1_000_000_000));
        assert_eq!(rules[1].left(u64::MAX), None);
        assert_eq!(
            (rules[2].left(400), rules[2].left(2_000)),
            (Some(600), Some(0))
        );
        let soft = NetworkRule {
            cutoff: CapCutoff::Soft,
            ..rules[2].clone()
        };
        assert_eq!(soft.left(2_000), None);
    }

    #[test]
    fn a_month_begins_on_its_reset_day_or_on_its_last() {
        let began = |day: u8, today| ResetDay::try_from(day).unwrap().began(today);
        assert_eq!(began(14, (2026, 11, 22)), (2026, 11, 14));
        assert_eq!(began(14, (2026, 11, 14)), (2026, 11, 14));
        assert_eq!(began(14, (2026, 1, 13)), (2025, 12, 14));
        assert_eq!(began(31, (2026, 3, 30)), (2026, 2, 28));
        assert_eq!(began(31, (2028, 2, 29)), (2028, 2, 29));
        assert_eq!(began(31, (2026, 4, 30)), (2026, 4, 30));
        assert_eq!(began(1, (2026, 4, 30)), (2026, 4, 1));
    }

    #[test]
    fn what_nobody_knows_is_refused_and_what_was_meant_is_said() {
        for (text, said) in [
            ("[[network]]\nsid = \"a\"", "did you mean `ssid`?"),
            (
                "[[network]]\ntype = \"cellular\"\nreset_dya = 3",
                "did you mean `reset_day`?",
            ),
            ("[[network]]\ntype = \"wify\"", "did you mean `wifi`?"),
            (
                "[[network]]\ntype = \"wifi\"\ncutoff = \"sofft\"",
                "did you mean `soft`?",
            ),
            ("[[network]]\ntype = \"wifi\"\ncap = \"much\"", "500M"),
            ("[[network]]\ntype = \"wifi\"\nreset_day = 32", "1 to 31"),
            ("[[network]]\nclass = \"free\"", "about"),
        ] {
            let error = NetworkRules::parse(text).expect_err(text).to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
