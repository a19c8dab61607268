//! The cost class of a link, and the reason for it.
//!
//! The user's rules take precedence over what the kind of link and the network suggest. A link of
//! unknown cost is metered if it is a mobile network or a phone's hotspot, and free on Ethernet and
//! Wi-Fi. Roaming is never guessed: only a rule can set it, because the modem is not asked.

use std::net::IpAddr;
use std::str::FromStr;

use d2tp_serial::{SerialLine, SerialLineError};
use serde::Serialize;

use crate::link::Link;
use crate::link_kind::LinkKind;
use crate::rules::matches_pattern;

/// The cost class of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CostClass {
    /// Free: a byte costs nothing.
    Free,
    /// Metered: money, or a monthly allowance.
    Metered,
    /// Roaming: more money; used only if allowed by name.
    Roaming,
}

impl From<CostClass> for d2tp_sched::LinkClass {
    fn from(class: CostClass) -> d2tp_sched::LinkClass {
        match class {
            CostClass::Free => d2tp_sched::LinkClass::Free,
            CostClass::Metered => d2tp_sched::LinkClass::Metered,
            CostClass::Roaming => d2tp_sched::LinkClass::Roaming,
        }
    }
}

impl std::fmt::Display for CostClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CostClass::Free => "free",
            CostClass::Metered => "metered",
            CostClass::Roaming => "roaming",
        })
    }
}

/// A cost class and its reason in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CostAssessment {
    /// The cost class of the link.
    pub class: CostClass,
    /// The reason, for users: `mobile networks are metered by default`.
    pub because: String,
}

/// A rule of the user: links of this name have this class. A rule that names a serial line
/// (`serial:/dev/ttyUSB0@9600=free`) adds that line to the links.
///
/// ```
/// use d2tp_links::{ClassRule, CostClass};
/// let rule: ClassRule = "wwan*=metered".parse().unwrap();
/// assert_eq!(rule.class, CostClass::Metered);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassRule {
    /// The device's name; a `*` at the end matches any rest.
    pub name: String,
    /// The cost class of the links that match.
    pub class: CostClass,
}

impl ClassRule {
    /// Whether the rule names a serial line instead of a network device.
    pub fn names_line(&self) -> bool {
        SerialLine::is_line_name(&self.name)
    }
}

/// A class rule that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not NAME=free|metered|roaming, for example wwan0=metered")]
pub struct LinkClassRuleError {
    text: String,
}

impl FromStr for ClassRule {
    type Err = LinkClassRuleError;

    fn from_str(text: &str) -> Result<ClassRule, LinkClassRuleError> {
        let refuse = || LinkClassRuleError { text: text.into() };
        let (name, class) = text.split_once('=').ok_or_else(refuse)?;
        let class = match class {
            "free" => CostClass::Free,
            "metered" => CostClass::Metered,
            "roaming" => CostClass::Roaming,
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

/// The user's class rules; the first that matches a link decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClassRules {
    /// In order of precedence.
    pub rules: Vec<ClassRule>,
}

/// A class rule that no link of this device can follow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IneffectiveRuleError {
    /// No link has the rule's name.
    #[error(
        "--link {rule}: this device has no network device `{}`. It has {devices}. For one that is plugged in \
         later, end the name with a star: {}*={}", .rule.name, .rule.name, .rule.class
    )]
    UnknownDevice {
        /// The class rule that names no device.
        rule: ClassRule,
        /// The names of the devices that exist, for users.
        devices: String,
    },
    /// The rule names a serial line that cannot be.
    #[error("--link {rule}: {cause}")]
    SerialLine {
        /// The class rule that names the line.
        rule: ClassRule,
        /// What is wrong with the name.
        cause: SerialLineError,
    },
    /// The rule says that the loopback link costs something.
    #[error(
        "--link {rule}: {} does not leave this machine, so it is always free; leave the option out",
        .rule.name
    )]
    Loopback {
        /// The class rule for the loopback device.
        rule: ClassRule,
    },
}

impl std::fmt::Display for ClassRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.name, self.class)
    }
}

impl ClassRules {
    /// Checks that each rule can apply to a link of this device. A name with a star may also match a link
    /// that appears later.
    ///
    /// # Errors
    /// The first rule that names no link, or makes the loopback link cost something.
    pub fn check(&self, links: &[Link]) -> Result<(), IneffectiveRuleError> {
        for rule in self.rules.iter().filter(|rule| !rule.name.ends_with('*')) {
            if rule.names_line() {
                let read: Result<SerialLine, SerialLineError> = rule.name.parse();
                if let Err(cause) = read {
                    let rule = rule.clone();
                    return Err(IneffectiveRuleError::SerialLine { rule, cause });
                }
                continue;
            }
            let named = links.iter().find(|link| link.name == rule.name);
            match named.map(|link| link.kind) {
                None => {
                    let mut names: Vec<&str> = links
                        .iter()
                        .filter(|link| link.kind != LinkKind::Loopback)
                        .map(|link| link.name.as_str())
                        .collect();
                    names.sort_unstable();
                    let devices = match names.is_empty() {
                        true => "none at the moment".to_owned(),
                        false => names.join(", "),
                    };
                    let rule = rule.clone();
                    return Err(IneffectiveRuleError::UnknownDevice { rule, devices });
                }
                Some(LinkKind::Loopback) if rule.class != CostClass::Free => {
                    let rule = rule.clone();
                    return Err(IneffectiveRuleError::Loopback { rule });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// The class that the user configured, if any.
    pub(crate) fn configured_class(&self, name: &str) -> Option<CostAssessment> {
        let rule = self
            .rules
            .iter()
            .find(|rule| matches_pattern(&rule.name, name))?;
        Some(CostAssessment {
            class: rule.class,
            because: format!("set by --link {}={}", rule.name, rule.class),
        })
    }

    /// The class of a link of this name, kind and gateways.
    pub fn assess(&self, name: &str, kind: LinkKind, gateways: &[IpAddr]) -> CostAssessment {
        let says = |class, because: &str| CostAssessment {
            class,
            because: because.into(),
        };
        if kind == LinkKind::Loopback {
            return says(CostClass::Free, "stays on this machine");
        }
        if let Some(configured) = self.configured_class(name) {
            return configured;
        }
        match kind {
            LinkKind::Cellular => {
                says(CostClass::Metered, "mobile networks are metered by default")
            }
            _ => match gateways.iter().find_map(|gateway| hotspot_of(*gateway)) {
                Some(phone) => says(CostClass::Metered, phone),
                None if kind == LinkKind::Vpn => {
                    says(CostClass::Free, "a VPN over an unknown network")
                }
                None if kind == LinkKind::Other => {
                    says(CostClass::Free, "an unknown network is free by default")
                }
                None => says(CostClass::Free, &format!("{kind} is free by default")),
            },
        }
    }
}

/// The phone system whose hotspot uses this gateway, if it is a well-known one.
fn hotspot_of(gateway: IpAddr) -> Option<&'static str> {
    match gateway.to_string().as_str() {
        // Apple's Personal Hotspot always uses 172.20.10.0/28.
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
            none.assess("wwan0", LinkKind::Cellular, &[]).class,
            CostClass::Metered
        );
        assert_eq!(
            none.assess("wlan0", LinkKind::Wifi, &[]).class,
            CostClass::Free
        );
        assert_eq!(
            none.assess("eth0", LinkKind::Ethernet, &[]).class,
            CostClass::Free
        );
    }

    #[test]
    fn a_phones_hotspot_is_metered_wifi() {
        let gateway: IpAddr = "172.20.10.1".parse().expect("address");
        let judged = ClassRules::default().assess("wlan0", LinkKind::Wifi, &[gateway]);
        assert_eq!(judged.class, CostClass::Metered);
        assert!(judged.because.contains("hotspot"), "{}", judged.because);
    }

    #[test]
    fn the_user_wins_and_the_first_rule_decides() {
        let rules = rules(&["wwan0=free", "wwan*=roaming", "wlan0=metered"]);
        assert_eq!(
            rules.assess("wwan0", LinkKind::Cellular, &[]).class,
            CostClass::Free
        );
        assert_eq!(
            rules.assess("wwan1", LinkKind::Cellular, &[]).class,
            CostClass::Roaming
        );
        let judged = rules.assess("wlan0", LinkKind::Wifi, &[]);
        assert_eq!(
            (judged.class, judged.because.as_str()),
            (CostClass::Metered, "set by --link wlan0=metered")
        );
    }

    #[test]
    fn a_rule_for_a_device_that_does_not_exist_or_cannot_cost_is_refused() {
        let wlan0 = crate::link::tests::wifi();
        let lo = Link {
            name: "lo".into(),
            kind: LinkKind::Loopback,
            ..wlan0.clone()
        };
        let links = [lo, wlan0];
        let check = |text: &str| rules(&[text]).check(&links).map_err(|e| e.to_string());
        for accepted in ["wlan0=metered", "wwan0*=metered", "lo=free", "*=metered"] {
            assert_eq!(check(accepted), Ok(()), "{accepted}");
        }
        let unknown = check("wlan9=free").unwrap_err();
        assert!(
            unknown.contains("It has wlan0.") && unknown.contains("wlan9*=free"),
            "{unknown}"
        );
        assert!(check("lo=metered").unwrap_err().contains("always free"));
    }

    #[test]
    fn no_rule_makes_the_loopback_link_cost_something() {
        let assessed = rules(&["*=metered"]).assess("lo", LinkKind::Loopback, &[]);
        assert_eq!(assessed.class, CostClass::Free);
    }

    #[test]
    fn a_rule_that_cannot_be_read_says_what_one_looks_like() {
        for text in ["wwan0", "=free", "wwan0=cheap", ""] {
            let error = text.parse::<ClassRule>().expect_err(text);
            assert!(error.to_string().contains("wwan0=metered"), "{error}");
        }
    }
}
