//! Stand-in addresses for names, so that a name is resolved where the connection ends.
//!
//! They belong to 198.18.0.0/15, which is only used in test networks (RFC 2544), and to a unique
//! local prefix for clients that use only IPv6.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first address of the range, and its size. When all are in use, the name that was assigned
/// longest ago loses its address.
pub const STAND_INS: (Ipv4Addr, u32) = (Ipv4Addr::new(198, 18, 0, 0), 1 << 17);

/// The first 96 bits of stand-in IPv6 addresses (RFC 4193), chosen at random.
const SIX: [u8; 12] = [0xfd, 0x5c, 0xed, 0x05, 0x9e, 0x31, 0, 0, 0, 0, 0, 0];

/// The longest name in bytes (RFC 1035 §2.3.4).
const NAME_BYTES_MAX: usize = 253;

/// Names and the addresses that stand for them.
#[derive(Debug)]
pub struct NameStandIns {
    first: u32,
    capacity: u32,
    table: Mutex<StandInTable>,
}

#[derive(Debug, Default)]
struct StandInTable {
    by_name: HashMap<String, u32>,
    by_number: HashMap<u32, String>,
    order: VecDeque<u32>,
    next: u32,
}

impl Default for NameStandIns {
    fn default() -> NameStandIns {
        NameStandIns::with_capacity(STAND_INS.1)
    }
}

impl NameStandIns {
    /// Creates a table for this many names.
    pub fn with_capacity(room: u32) -> NameStandIns {
        NameStandIns {
            first: u32::from(STAND_INS.0),
            // The first address of the range is no host address; the last few belong to the
            // namespace (launch.rs).
            capacity: room.clamp(3, STAND_INS.1 - 6) - 2,
            table: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, StandInTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address that stands for a name; `None` if the name is invalid.
    pub fn stand_in(&self, name: &str) -> Option<Ipv4Addr> {
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
            return None;
        }
        let mut known = self.known();
        let number = match known.by_name.get(&name) {
            Some(number) => *number,
            None => {
                let number = if (known.order.len() as u32) < self.capacity {
                    known.next += 1;
                    known.next
                } else {
                    let oldest = known.order.pop_front().expect("there is room for one");
                    if let Some(old) = known.by_number.remove(&oldest) {
                        known.by_name.remove(&old);
                    }
                    oldest
                };
                known.order.push_back(number);
                known.by_name.insert(name.clone(), number);
                known.by_number.insert(number, name);
                number
            }
        };
        Some(Ipv4Addr::from(self.first + number))
    }

    /// The IPv6 address that stands for a name.
    pub fn stand_in_v6(&self, name: &str) -> Option<Ipv6Addr> {
        let four = self.stand_in(name)?;
        let mut bytes = [0; 16];
        bytes[..12].copy_from_slice(&SIX);
        bytes[12..].copy_from_slice(&four.octets());
        Some(bytes.into())
    }

    /// The name that an address stands for; `None` if it is not a stand-in.
    ///
    /// # Errors
    /// The name is not known any more.
    pub fn name_of(&self, ip: IpAddr) -> Result<Option<String>, String> {
        let four = match ip.to_canonical() {
            IpAddr::V4(four) => four,
            IpAddr::V6(six) => match six.octets() {
                bytes if bytes[..12] == SIX => {
                    Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15])
                }
                _ => return Ok(None),
            },
        };
        let number = u32::from(four).wrapping_sub(self.first);
        if number >= STAND_INS.1 {
            return Ok(None);
        }
        let known = self.known().by_number.get(&number).cloned();
        known
            .map(Some)
            .ok_or_else(|| format!("{ip} no longer stands for a name; look it up again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address_and_the_address_leads_back() {
        let names = NameStandIns::default();
        let a = names.stand_in("Origin.Example.").unwrap();
        assert_eq!(names.stand_in("origin.example"), Some(a));
        assert_ne!(names.stand_in("b.example"), Some(a));
        assert_eq!(names.name_of(a.into()), Ok(Some("origin.example".into())));
        let six = names.stand_in_v6("origin.example").unwrap();
        assert_eq!(names.name_of(six.into()), Ok(Some("origin.example".into())));
        assert_eq!(names.name_of("192.0.2.1".parse().unwrap()), Ok(None));
        assert_eq!(names.name_of("2001:db8::1".parse().unwrap()), Ok(None));
        assert!(names.stand_in("no name").is_none());
    }

    #[test]
    fn when_the_room_is_used_up_the_oldest_name_loses_its_address() {
        let names = NameStandIns::with_capacity(4);
        let [a, b, c] = ["a", "b", "c"].map(|name| names.stand_in(name).unwrap());
        assert_eq!(a, c, "it was the first");
        assert_eq!(names.name_of(c.into()), Ok(Some("c".into())));
        assert_eq!(names.name_of(b.into()), Ok(Some("b".into())));
        assert_ne!(names.stand_in("a"), Some(c));
        let never = Ipv4Addr::from(u32::from(STAND_INS.0) + 99);
        assert!(names.name_of(never.into()).is_err());
    }
}
