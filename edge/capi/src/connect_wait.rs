//! The reason why a connection attempt waits.

use d2tp_links::{CostClass, Link, LinkKind};
use d2tp_sched::CostPolicy;

use crate::options::SocketOptions;

/// What a connection attempt waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectWait {
    Network,
    /// A metered network is up, and the socket may not use it.
    FreeNetwork,
    Answer,
}

impl ConnectWait {
    /// The reason in words, for users.
    pub(crate) fn why(self) -> &'static str {
        match self {
            ConnectWait::Network => "not connected yet: no network is up; it connects when one is",
            ConnectWait::FreeNetwork => {
                "not connected yet: only metered networks are up, and policy, deadline and budget \
                 do not allow them. It connects on a free one; D2TP_SO_POLICY any allows metered \
                 ones"
            }
            ConnectWait::Answer => {
                "not connected yet: the server does not answer; trying again. Are its address and \
                 key right?"
            }
        }
    }

    /// What a connection attempt with these options waits for, given the current links.
    pub(crate) fn of(links: &[Link], options: &SocketOptions) -> ConnectWait {
        let leads_away = |link: &&Link| link.kind != LinkKind::Loopback;
        if links.iter().all(|link| !leads_away(&link)) {
            return ConnectWait::Answer;
        }
        let usable: Vec<&Link> = links
            .iter()
            .filter(leads_away)
            .filter(|link| link.is_usable())
            .collect();
        let pays = match options.policy {
            _ if options.budget == Some(0) => false,
            CostPolicy::Fast | CostPolicy::Any => true,
            CostPolicy::FreeFirst | CostPolicy::Balanced => options.deadline.is_some(),
            CostPolicy::FreeOnly => false,
        };
        match usable
            .iter()
            .all(|link| link.class.class != CostClass::Free)
        {
            _ if usable.is_empty() => ConnectWait::Network,
            true if !pays => ConnectWait::FreeNetwork,
            _ => ConnectWait::Answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;
    use std::time::Duration;

    use crate::clock::since_boot;
    use d2tp_links::{CostAssessment, DefaultRoute};

    fn link(class: CostClass, up: bool) -> Link {
        Link {
            name: "wlan0".into(),
            index: 3,
            kind: LinkKind::Wifi,
            class: CostAssessment {
                class,
                because: "test".into(),
            },
            up,
            carrier: up,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            addresses: vec![IpAddr::from([192, 0, 2, 7])],
            routes: vec![DefaultRoute {
                metric: 1,
                ipv6: false,
                gateway: None,
                table: 254,
            }],
        }
    }

    #[test]
    fn what_a_connection_waits_for_follows_from_links_and_what_may_be_paid() {
        let (free, dear) = (link(CostClass::Free, true), link(CostClass::Metered, true));
        let gone = link(CostClass::Free, false);
        let options = |policy, deadline, budget| SocketOptions {
            policy,
            deadline,
            budget,
            ..SocketOptions::default()
        };
        let plain = |policy| options(policy, None, None);
        let hour = Some(since_boot() + Duration::from_secs(3600));
        for (links, options, waits) in [
            (
                vec![gone.clone()],
                plain(CostPolicy::Any),
                ConnectWait::Network,
            ),
            (
                vec![dear.clone(), gone.clone()],
                plain(CostPolicy::FreeOnly),
                ConnectWait::FreeNetwork,
            ),
            (
                vec![dear.clone()],
                plain(CostPolicy::FreeFirst),
                ConnectWait::FreeNetwork,
            ),
            (
                vec![dear.clone()],
                options(CostPolicy::FreeFirst, hour, None),
                ConnectWait::Answer,
            ),
            (
                vec![dear.clone()],
                options(CostPolicy::Fast, None, Some(0)),
                ConnectWait::FreeNetwork,
            ),
            (
                vec![dear.clone()],
                plain(CostPolicy::Any),
                ConnectWait::Answer,
            ),
            (
                vec![dear, free],
                plain(CostPolicy::FreeOnly),
                ConnectWait::Answer,
            ),
            (vec![], plain(CostPolicy::FreeOnly), ConnectWait::Answer),
        ] {
            assert_eq!(
                ConnectWait::of(&links, &options),
                waits,
                "{links:?} {options:?}"
            );
        }
    }
}
