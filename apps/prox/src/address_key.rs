//! Keys that represent addresses, because a client without D2TP has no key.

use std::net::{IpAddr, Ipv6Addr};

use d2tp_driver::HostKey;

/// The second half of a key that stands for an address. No host has the private key that would belong
/// to it: finding it is as hard as finding any other.
const ADDRESS_MARK: &[u8; 16] = b"an address only\0";

/// The key that stands for an address.
pub(crate) fn key_of(address: IpAddr) -> HostKey {
    key_with_mark(address, ADDRESS_MARK)
}

/// The address that a key stands for, if any.
pub(crate) fn address_of(key: &HostKey) -> Option<IpAddr> {
    address_half(key, ADDRESS_MARK)
}

/// A key of an address and what it stands for.
pub(crate) fn key_with_mark(address: IpAddr, mark: &[u8; 16]) -> HostKey {
    let words = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut key = [0; 32];
    key[..16].copy_from_slice(&words.octets());
    key[16..].copy_from_slice(mark);
    key
}

/// The address in a key with this mark; none if it has another.
pub(crate) fn address_half(key: &HostKey, mark: &[u8; 16]) -> Option<IpAddr> {
    let (address, found) = key.split_at(16);
    let octets: [u8; 16] = address.try_into().ok()?;
    (found == mark).then(|| IpAddr::V6(Ipv6Addr::from(octets)).to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_for_one_address_and_an_ordinary_one_for_none() {
        for address in ["192.0.2.7", "2001:db8::7"] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(address_of(&key_of(address)), Some(address));
        }
        assert_eq!(address_of(&[7; 32]), None);
    }
}
