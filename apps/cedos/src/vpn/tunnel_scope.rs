//! What goes into the tunnel, and what stays outside: networks, and programs by their cgroup.

use std::path::PathBuf;
use std::str::FromStr;

use ipnet::IpNet;

use super::cgroup_match::CgroupMatch;
use crate::verbs::prox::parse_net;

/// The beginning of a value of `--include` or `--exclude` that names a cgroup.
const CGROUP: &str = "cgroup:";

/// A value of `--include` or `--exclude`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopeEntry {
    /// A network, or an address.
    Net(IpNet),
    /// Programs of a cgroup, and of those below it.
    Cgroup(PathBuf),
}

impl FromStr for ScopeEntry {
    type Err = String;

    fn from_str(text: &str) -> Result<ScopeEntry, String> {
        match text.strip_prefix(CGROUP) {
            Some("") => Err(format!("{CGROUP} needs a path, as {CGROUP}user.slice")),
            Some(path) => Ok(ScopeEntry::Cgroup(PathBuf::from(path))),
            None => parse_net(text).map(ScopeEntry::Net).map_err(|_| {
                format!(
                    "{text} is neither a network, like 10.0.0.0/8, nor an address, nor {CGROUP}PATH"
                )
            }),
        }
    }
}

/// Networks and programs that go into the tunnel, or stay outside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TunnelScope {
    /// The networks.
    pub nets: Vec<IpNet>,
    /// The programs.
    pub cgroups: Vec<CgroupMatch>,
}

impl TunnelScope {
    /// Finds what these values of an option name.
    ///
    /// # Errors
    /// A cgroup cannot be told apart.
    pub fn find(entries: &[ScopeEntry]) -> anyhow::Result<TunnelScope> {
        let mut scope = TunnelScope::default();
        for entry in entries {
            match entry {
                ScopeEntry::Net(net) => scope.nets.push(*net),
                ScopeEntry::Cgroup(path) => scope.cgroups.push(CgroupMatch::find(path)?),
            }
        }
        Ok(scope)
    }

    /// Whether nothing is named.
    pub fn is_empty(&self) -> bool {
        self.nets.is_empty() && self.cgroups.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_addresses_and_cgroups_are_told_apart() {
        let net: ScopeEntry = "192.0.2.0/24".parse().unwrap();
        assert_eq!(net, ScopeEntry::Net("192.0.2.0/24".parse().unwrap()));
        let host: ScopeEntry = "192.0.2.1".parse().unwrap();
        assert_eq!(host, ScopeEntry::Net("192.0.2.1/32".parse().unwrap()));
        let programs: ScopeEntry = "cgroup:user.slice".parse().unwrap();
        assert_eq!(programs, ScopeEntry::Cgroup("user.slice".into()));
        for bad in ["user.slice", "cgroup:"] {
            let error = bad.parse::<ScopeEntry>().unwrap_err();
            assert!(error.contains("cgroup:"), "{error}");
        }
    }
}
