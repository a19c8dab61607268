//! Changes between two snapshots of links.

use std::net::IpAddr;

use serde::Serialize;

use crate::link::Link;

/// One change of one link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum LinkEvent {
    /// A new device.
    Appeared {
        /// The link that appeared.
        link: Link,
    },
    /// A known device whose facts changed.
    Changed {
        /// The link before the change.
        before: Box<Link>,
        /// The link after the change.
        link: Link,
    },
    /// A device that is gone.
    Vanished {
        /// The link that disappeared, as it was known last.
        link: Link,
    },
}

impl LinkEvent {
    /// The link of the event, as it is now or was last.
    pub fn link(&self) -> &Link {
        match self {
            LinkEvent::Appeared { link }
            | LinkEvent::Changed { link, .. }
            | LinkEvent::Vanished { link } => link,
        }
    }

    /// Whether a link became usable.
    pub fn gained_use(&self) -> bool {
        match self {
            LinkEvent::Appeared { link } => link.is_usable(),
            LinkEvent::Changed { before, link } => !before.is_usable() && link.is_usable(),
            LinkEvent::Vanished { .. } => false,
        }
    }

    /// Whether a link ceased to be usable.
    pub fn lost_use(&self) -> bool {
        match self {
            LinkEvent::Appeared { .. } => false,
            LinkEvent::Changed { before, link } => before.is_usable() && !link.is_usable(),
            LinkEvent::Vanished { link } => link.is_usable(),
        }
    }

    /// Addresses that are gone and that sockets may still be bound to.
    pub fn addresses_lost(&self) -> Vec<IpAddr> {
        match self {
            LinkEvent::Appeared { .. } => Vec::new(),
            LinkEvent::Vanished { link } => link.source_addresses().collect(),
            LinkEvent::Changed { before, link } => before
                .source_addresses()
                .filter(|a| !link.source_addresses().any(|b| *a == b))
                .collect(),
        }
    }
}

/// The events that lead from `before` to `after`: departures first, so that a device that left
/// and came back under its name is never seen twice. A device is its index and its name.
pub fn difference(before: &[Link], after: &[Link]) -> Vec<LinkEvent> {
    let same = |a: &Link, b: &Link| a.index == b.index && a.name == b.name;
    let gone = before
        .iter()
        .filter(|old| !after.iter().any(|new| same(old, new)))
        .map(|old| LinkEvent::Vanished { link: old.clone() });
    let others = after
        .iter()
        .filter_map(|new| match before.iter().find(|old| same(old, new)) {
            None => Some(LinkEvent::Appeared { link: new.clone() }),
            Some(old) if old != new => Some(LinkEvent::Changed {
                before: Box::new(old.clone()),
                link: new.clone(),
            }),
            Some(_) => None,
        });
    // Of the others, losses come first: sockets that must move are informed before those that may.
    let (losses, gains): (Vec<_>, Vec<_>) = others.partition(LinkEvent::lost_use);
    gone.chain(losses).chain(gains).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::tests::wifi;

    #[test]
    fn equal_snapshots_differ_in_nothing() {
        assert!(difference(&[wifi()], &[wifi()]).is_empty());
    }

    #[test]
    fn a_device_that_returns_under_its_name_left_first() {
        let again = Link { index: 9, ..wifi() };
        let events = difference(&[wifi()], std::slice::from_ref(&again));
        assert!(matches!(&events[..], [
            LinkEvent::Vanished { link: old },
            LinkEvent::Appeared { link: new },
        ] if old.index == 3 && new.index == 9));
        assert!(events[0].lost_use() && events[1].gained_use());
    }

    #[test]
    fn a_new_address_tells_which_one_is_lost() {
        let moved = Link {
            addresses: vec!["203.0.113.9".parse().expect("address")],
            ..wifi()
        };
        let events = difference(&[wifi()], &[moved]);
        assert_eq!(events.len(), 1);
        assert!(!events[0].lost_use() && !events[0].gained_use());
        assert_eq!(events[0].addresses_lost(), wifi().addresses);
    }

    #[test]
    fn losses_come_before_gains() {
        let cell = Link {
            name: "wwan0".into(),
            index: 1,
            ..wifi()
        };
        let cell_off = Link {
            up: false,
            ..cell.clone()
        };
        let wifi_off = Link {
            carrier: false,
            ..wifi()
        };
        let events = difference(&[cell_off, wifi()], &[cell, wifi_off]);
        assert!(events[0].lost_use() && events[1].gained_use(), "{events:?}");
    }
}
