//! What a byte on a link costs, and who says so.
//!
//! In order: the user's rules, then what the kind and the network suggest. Unknown is metered
//! where a mobile network or a phone's hotspot is behind it, free on Ethernet and Wi-Fi. Roaming
//! is never guessed: only a rule can say it until something here can ask the modem.

use std::net::IpAddr;
use std::str::FromStr;

use serde::Serialize;

use crate::kind::Kind;
use crate::rules::covers;

/// What a byte on a link costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Nothing.
    Free,
    /// Money, or a monthly allowance.
    Metered,
    /// More money; used only where asked for by name.
    Roaming,
}

impl From<Class> for d2tp_sched::LinkClass {
    fn from(class: Class) -> d2tp_sched::LinkClass {
        match class {
            Class::Free => d2tp_sched::LinkClass::Free,
            Class::Metered => d2tp_sched::LinkClass::Metered,
            Class::Roaming => d2tp_sched::LinkClass::Roaming,
        }
    }
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Class::Free => "free",
            Class::Metered => "metered",
            Class::Roaming => "roaming",
        })
    }
}

/// A class and the evidence for it, in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Judgement {
    /// The class.
    pub class: Class,
    /// Why, for people: `cellular is taken as metered`.
    pub because: String,
}

/// One word of the user: links of this name have this class.
///
/// ```
/// use d2tp_links::{Class, ClassRule};
/// let rule: ClassRule = "wwan*=metered".parse().unwrap();
/// assert_eq!(rule.class, Class::Metered);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassRule {
    /// The device's name; a `*` at the end stands for any rest.
    pub name: String,
    /// The class it has.
    pub class: Class,
}

/// A rule that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not NAME=free|metered|roaming, for example wwan0=metered")]
pub struct ClassRuleError {
    text: String,
}

impl FromStr for ClassRule {
    type Err = ClassRuleError;

    fn from_str(text: &str) -> Result<ClassRule, ClassRuleError> {
        let refuse = || ClassRuleError { text: text.into() };
        let (name, class) = text.split_once('=').ok_or_else(refuse)?;
        let class = match class {
            "free" => Class::Free,
            "metered" => Class::Metered,
            "roaming" => Class::Roaming,
            _ => return Err(refuse()),
        };
        if name.is_empty() {
            return Err(refuse());
        }
        Ok(ClassRule {
            name: name.into(),
            class,
        })
    }
}

/// The user's rules; the first that covers a link decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClassRules {
    /// In order of precedence.
    pub rules: Vec<ClassRule>,
}

impl ClassRules {
    /// The class the user says, if they do.
    pub(crate) fn told(&self, name: &str) -> Option<Judgement> {
        let rule = self.rules.iter().find(|rule| covers(&rule.name, name))?;
        Some(Judgement {
            class: rule.class,
            because: format!("you said {}={}", rule.name, rule.class),
        })
    }

    /// The class of a link of this name, kind and gateways.
    pub fn judge(&self, name: &str, kind: Kind, gateways: &[IpAddr]) -> Judgement {
        if let Some(told) = self.told(name) {
            return told;
        }
        let says = |class, because: &str| Judgement {
            class,
            because: because.into(),
        };
        match kind {
            Kind::Cellular => says(Class::Metered, "cellular is taken as metered"),
            Kind::Loopback => says(Class::Free, "stays on this machine"),
            _ => match gateways.iter().find_map(|gateway| hotspot_of(*gateway)) {
                Some(phone) => says(Class::Metered, phone),
                None if kind == Kind::Vpn => says(Class::Free, "a tunnel over nothing we know"),
                None => says(Class::Free, &format!("{kind} is taken as free")),
            },
        }
    }
}

/// Phones give their hotspot clients well-known gateways.
fn hotspot_of(gateway: IpAddr) -> Option<&'static str> {
    match gateway.to_string().as_str() {
        // Apple's Personal Hotspot: always 172.20.10.0/28.
        "172.20.10.1" => Some("gateway 172.20.10.1 is an iPhone's hotspot"),
        // Android before 11 (AOSP's tethering defaults); later versions choose at random.
        "192.168.43.1" => Some("gateway 192.168.43.1 is an Android phone's hotspot"),
        "192.168.42.129" => Some("gateway 192.168.42.129 is an Android phone on USB"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str]) -> ClassRules {
        ClassRules {
            rules: texts.iter().map(|t| t.parse().expect("a rule")).collect(),
        }
    }

    #[test]
    fn cellular_is_metered_and_lans_are_free_unless_told() {
        let none = ClassRules::default();
        assert_eq!(
            none.judge("wwan0", Kind::Cellular, &[]).class,
            Class::Metered
        );
        assert_eq!(none.judge("wlan0", Kind::Wifi, &[]).class, Class::Free);
        assert_eq!(none.judge("eth0", Kind::Ethernet, &[]).class, Class::Free);
    }

    #[test]
    fn a_phones_hotspot_is_metered_wifi() {
        let gateway: IpAddr = "172.20.10.1".parse().expect("address");
        let judged = ClassRules::default().judge("wlan0", Kind::Wifi, &[gateway]);
        assert_eq!(judged.class, Class::Metered);
        assert!(judged.because.contains("hotspot"), "{}", judged.because);
    }

    #[test]
    fn the_user_wins_and_the_first_rule_decides() {
        let rules = rules(&["wwan0=free", "wwan*=roaming", "wlan0=metered"]);
        assert_eq!(rules.judge("wwan0", Kind::Cellular, &[]).class, Class::Free);
        assert_eq!(
            rules.judge("wwan1", Kind::Cellular, &[]).class,
            Class::Roaming
        );
        let judged = rules.judge("wlan0", Kind::Wifi, &[]);
        assert_eq!(
            (judged.class, judged.because.as_str()),
            (Class::Metered, "you said wlan0=metered")
        );
    }

    #[test]
    fn a_rule_that_cannot_be_read_says_what_one_looks_like() {
        for text in ["wwan0", "=free", "wwan0=cheap", ""] {
            let error = text.parse::<ClassRule>().expect_err(text);
            assert!(error.to_string().contains("wwan0=metered"), "{error}");
        }
    }
}
