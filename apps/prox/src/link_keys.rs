//! Keys of clients that only have links: for podcast apps, which speak no D2TP and have no key of their own.
//!
//! ```text
//!  before the link is read:  16 bytes of the address │ GUEST_MARK    the connection of nobody in particular
//!  a client of links:        16 random bytes         │ LINK_MARK     among the enrolled clients, until it is removed
//! ```
//!
//! No host has the private key that would belong to such a key: finding it is as hard as finding any other.

use std::net::IpAddr;

use d2tp_driver::HostKey;

use crate::address_key::{address_half, key_with_mark};

/// The second half of a key that stands for a connection whose link was not read yet.
const GUEST_MARK: &[u8; 16] = b"not a client yet";

/// The second half of the key of a client of links.
const LINK_MARK: &[u8; 16] = b"a client's links";

/// Bytes of what tells clients of links apart.
pub(crate) const LINK_CLIENT_ID_BYTES: usize = 16;

/// The key that stands for a connection from this address, until its link says whose it is.
pub(crate) fn guest_key_of(address: IpAddr) -> HostKey {
    key_with_mark(address, GUEST_MARK)
}

/// The address of a connection whose link was not read yet, if the key stands for one.
pub(crate) fn guest_address_of(key: &HostKey) -> Option<IpAddr> {
    address_half(key, GUEST_MARK)
}

/// The key of the client of links with this id.
pub(crate) fn link_client_key(id: [u8; LINK_CLIENT_ID_BYTES]) -> HostKey {
    let mut key = [0; 32];
    key[..LINK_CLIENT_ID_BYTES].copy_from_slice(&id);
    key[LINK_CLIENT_ID_BYTES..].copy_from_slice(LINK_MARK);
    key
}

/// The id of a client of links; none if the key is that of a device.
pub(crate) fn link_client_id(key: &HostKey) -> Option<[u8; LINK_CLIENT_ID_BYTES]> {
    let (id, mark) = key.split_first_chunk()?;
    (mark == LINK_MARK).then_some(*id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address_key::{address_of, key_of};

    #[test]
    fn each_key_stands_for_one_thing() {
        let address: IpAddr = "192.0.2.7".parse().unwrap();
        let (guest, client) = (guest_key_of(address), link_client_key([5; 16]));
        assert_eq!(guest_address_of(&guest), Some(address));
        assert_eq!((address_of(&guest), link_client_id(&guest)), (None, None));
        assert_eq!(link_client_id(&client), Some([5; 16]));
        assert_eq!(
            (address_of(&client), guest_address_of(&client)),
            (None, None)
        );
        let (ordinary, device) = (key_of(address), [7; 32]);
        assert_eq!(
            (guest_address_of(&ordinary), link_client_id(&ordinary)),
            (None, None)
        );
        assert_eq!(
            (guest_address_of(&device), link_client_id(&device)),
            (None, None)
        );
    }
}
