//! Serial lines as links: those that the user names. The system does not tell a line to a bridge from any
//! other device.

use std::net::{IpAddr, Ipv6Addr};

use d2tp_serial::SerialLine;

use crate::class::ClassRules;
use crate::link::{DefaultRoute, Link};
use crate::link_kind::LinkKind;

/// The address of this host on all serial lines, which have none: no host has this one. // RFC 6666
const LINE_ADDRESS: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);
/// The metric of a serial line: every other link is preferred.
const LINE_METRIC: u32 = u32::MAX - 1;

/// The serial lines that class rules name. A device that is not plugged in is listed as well: the link
/// does not answer until it is.
pub(crate) fn serial_links(rules: &ClassRules) -> Vec<Link> {
    let named = rules
        .rules
        .iter()
        .filter(|rule| SerialLine::is_line_name(&rule.name));
    let lines = named.filter(|rule| rule.name.parse::<SerialLine>().is_ok());
    let link = |(n, name): (u32, &String)| Link {
        name: name.clone(),
        // The kernel counts from one.
        index: u32::MAX - n,
        kind: LinkKind::Serial,
        class: rules.assess(name, LinkKind::Serial, &[]),
        up: true,
        carrier: true,
        mtu_bytes: 0,
        dhcp_proxy: None,
        addresses: vec![IpAddr::V6(LINE_ADDRESS)],
        routes: vec![DefaultRoute {
            metric: LINE_METRIC,
            ipv6: true,
            gateway: None,
            table: 254, // the main routing table
        }],
    };
    (0..).zip(lines.map(|rule| &rule.name)).map(link).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::{CostClass, IneffectiveRuleError};

    fn rules(texts: &[&str]) -> ClassRules {
        ClassRules {
            rules: texts.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn a_rule_that_names_a_line_adds_a_link_of_its_class() {
        let named = rules(&[
            "wlan0=free",
            "serial:/dev/ttyUSB0@9600=metered",
            "kiss:/dev/x,N0=free",
        ]);
        let links = serial_links(&named);
        let [slow, radio] = &links[..] else {
            panic!("{links:?}")
        };
        assert_eq!(slow.name, "serial:/dev/ttyUSB0@9600");
        assert_eq!(
            (slow.class.class, slow.kind),
            (CostClass::Metered, LinkKind::Serial)
        );
        assert!(slow.is_usable() && radio.is_usable() && slow.index != radio.index);
        assert_eq!(rules(&["serial:/dev/ttyUSB0@9600=free"]).check(&[]), Ok(()));
    }

    #[test]
    fn a_line_that_cannot_be_is_refused_with_the_reason() {
        let wrong = rules(&["serial:/dev/ttyUSB0@fast=free"]);
        assert!(serial_links(&wrong).is_empty());
        let refused = wrong.check(&[]).unwrap_err();
        assert!(matches!(refused, IneffectiveRuleError::SerialLine { .. }));
        assert!(refused.to_string().contains("no bit rate"), "{refused}");
    }
}
