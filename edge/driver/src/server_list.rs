//! Several servers, each with a key of its own, of which a device uses one: `d2tp://a:1/KEY d2tp://b:1/OTHER`.
//!
//! Addresses with the same key are nodes of one server ([`ServerAddress::add_nodes`]).

use std::fmt;
use std::str::FromStr;

use crate::address::{AddressError, ServerAddress};

/// The most servers in a list.
pub const SERVERS_MAX: usize = 8; // a guess: each costs a probe when one is chosen

/// Servers of different keys, the preferred ones first. There is always one at least.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerList(Vec<ServerAddress>);

/// A text is not a list of servers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerListError {
    /// An address of the list is wrong.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Addresses of one key are not nodes of one server, or there are too many.
    #[error("{0}")]
    Nodes(String),
    /// There are no addresses.
    #[error("no proxy is named; an address looks like d2tp://host:port/KEY")]
    Empty,
    /// There are too many servers.
    #[error("{0} proxies are named, and {SERVERS_MAX} is the most; leave some out")]
    TooMany(usize),
}

impl ServerList {
    /// The servers, the preferred ones first.
    pub fn servers(&self) -> &[ServerAddress] {
        &self.0
    }

    /// The server that is preferred where all are equally far.
    pub fn first(&self) -> &ServerAddress {
        &self.0[0]
    }

    /// Adds a server at the end, or its nodes to those of the server with its key.
    ///
    /// # Errors
    /// There are too many servers, or its nodes cannot be added.
    pub fn add(&mut self, other: ServerAddress) -> Result<(), ServerListError> {
        if let Some(known) = self.0.iter_mut().find(|known| known.key == other.key) {
            return known.add_nodes(&other).map_err(ServerListError::Nodes);
        }
        self.0.push(other);
        match self.0.len() {
            count if count > SERVERS_MAX => {
                self.0.pop();
                Err(ServerListError::TooMany(count))
            }
            _ => Ok(()),
        }
    }
}

impl From<ServerAddress> for ServerList {
    fn from(server: ServerAddress) -> ServerList {
        ServerList(vec![server])
    }
}

impl FromStr for ServerList {
    type Err = ServerListError;

    fn from_str(text: &str) -> Result<ServerList, ServerListError> {
        let mut words = text.split_whitespace();
        let first = words.next().ok_or(ServerListError::Empty)?;
        let mut list = ServerList::from(first.parse::<ServerAddress>()?);
        for word in words {
            list.add(word.parse()?)?;
        }
        Ok(list)
    }
}

impl fmt::Display for ServerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, server) in self.0.iter().enumerate() {
            if place > 0 {
                f.write_str(" ")?;
            }
            server.fmt(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_session::PublicKey;

    fn address(host: &str, key: u8) -> String {
        format!("d2tp://{host}:1/{}", PublicKey([key; 32]))
    }

    #[test]
    fn addresses_of_one_key_are_nodes_and_others_are_servers_of_their_own() {
        let text = [address("a", 7), address("b", 8), address("c", 7)].join(" ");
        let list: ServerList = text.parse().unwrap();
        let both = [
            format!("d2tp://a:1,c:1/{}", PublicKey([7; 32])),
            address("b", 8),
        ];
        assert_eq!(list.to_string(), both.join(" "));
        assert_eq!(list.to_string().parse(), Ok(list.clone()));
        assert_eq!(list.first().host, "a");
        let one: ServerList = address("a", 7).parse().unwrap();
        assert_eq!(one.servers().len(), 1);
    }

    #[test]
    fn a_list_that_makes_no_sense_says_why() {
        let many: Vec<String> = (1..=9).map(|key| address("a", key)).collect();
        for (text, why) in [
            ("", "no proxy is named"),
            (" ", "no proxy is named"),
            ("d2tp://a:1", "key is missing"),
            (&many.join(" "), "9 proxies are named"),
            (&format!("{} x", address("a", 1)), "d2tp://"),
        ] {
            let error = text.parse::<ServerList>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
