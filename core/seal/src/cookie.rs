//! Protection against unauthenticated packets: MACs on a SYN, cookies under load, tokens for
//! UNKNOWN.
//!
//! A SYN ends with two MACs. `mac1` shows that the sender knows the server's public key, so that a
//! scanner never causes a public-key operation. `mac2` shows that the sender received a cookie at
//! the address it sends from; the server requires it only under load. The mechanism is WireGuard's
//! (its paper, §5.3).

use std::net::SocketAddr;

use aws_lc_rs::{aead, digest, hmac};
use d2tp_wire::{Cid, TOKEN_BYTES};

use crate::SealError;
use crate::host_key::PublicKey;

const COOKIE_BYTES: usize = 16;

fn keyed(label: &[u8], key: &PublicKey) -> [u8; 32] {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(label);
    context.update(&key.0);
    context
        .finish()
        .as_ref()
        .try_into()
        .expect("SHA-256 has 32 bytes")
}

pub(crate) fn sum(key: &hmac::Key, parts: &[&[u8]]) -> [u8; 16] {
    let mut context = hmac::Context::with_key(key);
    for part in parts {
        context.update(part);
    }
    context.sign().as_ref()[..16]
        .try_into()
        .expect("HMAC-SHA-256 has 32 bytes")
}

fn equal(a: &[u8], b: &[u8]) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(a, b).is_ok()
}

/// The two MACs at the end of a SYN.
pub struct SynMacs;

impl SynMacs {
    /// The number of bytes that both MACs take.
    pub const BYTES: usize = 32;

    /// Fills the last [`SynMacs::BYTES`] bytes of `syn`. Without a cookie `mac2` is zero.
    pub fn write(syn: &mut [u8], server: &PublicKey, cookie: Option<&[u8; COOKIE_BYTES]>) {
        let at = syn.len() - SynMacs::BYTES;
        let key = hmac::Key::new(hmac::HMAC_SHA256, &keyed(b"d2tp mac1", server));
        let mac1 = sum(&key, &[&syn[..at]]);
        syn[at..at + 16].copy_from_slice(&mac1);
        let mac2 = cookie.map_or([0; 16], |cookie| {
            sum(
                &hmac::Key::new(hmac::HMAC_SHA256, cookie),
                &[&syn[..at + 16]],
            )
        });
        syn[at + 16..].copy_from_slice(&mac2);
    }

    /// The `mac1` of a SYN, to which a cookie is bound.
    pub fn mac1(syn: &[u8]) -> Option<[u8; 16]> {
        let at = syn.len().checked_sub(SynMacs::BYTES)?;
        syn[at..at + 16].try_into().ok()
    }
}

/// The secrets from which a server makes cookies and tokens. A cookie is valid for one to two
/// periods of rotation.
pub struct CookieSecrets {
    mac1: hmac::Key,
    sealing: aead::LessSafeKey,
    secrets: [hmac::Key; 2],
    token: hmac::Key,
}

fn cookie_key(server: &PublicKey) -> aead::LessSafeKey {
    let key = keyed(b"d2tp cookie", server);
    aead::LessSafeKey::new(aead::UnboundKey::new(&aead::CHACHA20_POLY1305, &key).expect("32 bytes"))
}

fn address_bytes(from: SocketAddr) -> [u8; 18] {
    let mut out = [0; 18];
    let ip = match from.ip() {
        std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        std::net::IpAddr::V6(ip) => ip,
    };
    out[..16].copy_from_slice(&ip.octets());
    out[16..].copy_from_slice(&from.port().to_be_bytes());
    out
}

impl CookieSecrets {
    /// Secrets of the server with this key. `seed` must be fresh at every start. `token_seed` is
    /// kept across restarts, so that UNKNOWN for old sessions still has the right token.
    pub fn new(server: &PublicKey, seed: [u8; 32], token_seed: [u8; 32]) -> Self {
        let secret = hmac::Key::new(hmac::HMAC_SHA256, &seed);
        CookieSecrets {
            mac1: hmac::Key::new(hmac::HMAC_SHA256, &keyed(b"d2tp mac1", server)),
            sealing: cookie_key(server),
            secrets: [secret.clone(), secret],
            token: hmac::Key::new(hmac::HMAC_SHA256, &token_seed),
        }
    }

    /// Begins a new period with a fresh seed; cookies of the period before the last become invalid.
    pub fn rotate(&mut self, seed: [u8; 32]) {
        self.secrets.swap(0, 1);
        self.secrets[0] = hmac::Key::new(hmac::HMAC_SHA256, &seed);
    }

    /// Whether the sender of a SYN knows the server's public key.
    pub fn verify_mac1(&self, syn: &[u8]) -> bool {
        let Some(at) = syn.len().checked_sub(SynMacs::BYTES) else {
            return false;
        };
        equal(&sum(&self.mac1, &[&syn[..at]]), &syn[at..at + 16])
    }

    /// Whether the sender of a SYN has proved that it receives packets at `from`.
    pub fn verify_mac2(&self, syn: &[u8], from: SocketAddr) -> bool {
        let Some(at) = syn.len().checked_sub(16) else {
            return false;
        };
        self.secrets.iter().any(|secret| {
            let cookie = sum(secret, &[&address_bytes(from)]);
            let key = hmac::Key::new(hmac::HMAC_SHA256, &cookie);
            equal(&sum(&key, &[&syn[..at]]), &syn[at..])
        })
    }

    /// A sealed cookie for the sender of a SYN. Only the host that sent that SYN can open it.
    pub fn seal_cookie(&self, mac1: [u8; 16], from: SocketAddr, nonce: [u8; 12]) -> [u8; 32] {
        let mut out = [0; 32];
        out[..16].copy_from_slice(&sum(&self.secrets[0], &[&address_bytes(from)]));
        let tag = self
            .sealing
            .seal_in_place_separate_tag(
                aead::Nonce::assume_unique_for_key(nonce),
                aead::Aad::from(mac1),
                &mut out[..16],
            )
            .expect("16 bytes are below every limit");
        out[16..].copy_from_slice(tag.as_ref());
        out
    }

    /// The token that proves an UNKNOWN answer for packets to `cid`.
    pub fn token(&self, cid: Cid) -> [u8; TOKEN_BYTES] {
        sum(&self.token, &[&cid.0])
    }
}

/// Opens the COOKIE answer to the SYN with this `mac1`.
pub fn open_cookie(
    server: &PublicKey,
    mac1: [u8; 16],
    nonce: [u8; 12],
    sealed: &[u8],
) -> Result<[u8; COOKIE_BYTES], SealError> {
    let mut buf: [u8; 32] = sealed.try_into().map_err(|_| SealError::BadLength)?;
    let text = cookie_key(server)
        .open_in_place(
            aead::Nonce::assume_unique_for_key(nonce),
            aead::Aad::from(mac1),
            &mut buf,
        )
        .map_err(|_| SealError::NotAuthentic)?;
    text[..16].try_into().map_err(|_| SealError::BadLength)
}

/// Whether the token of an UNKNOWN answer is the one that was issued with the connection id.
pub fn verify_unknown_token(promised: &[u8; TOKEN_BYTES], got: &[u8]) -> bool {
    equal(promised, got)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_counts_only_at_the_address_it_was_sent_to() {
        let server = PublicKey([5; 32]);
        let mut jar = CookieSecrets::new(&server, [1; 32], [2; 32]);
        let here: SocketAddr = "192.0.2.1:7000".parse().unwrap();
        let there: SocketAddr = "192.0.2.1:7001".parse().unwrap();
        let mut syn = vec![7; 100];
        SynMacs::write(&mut syn, &server, None);
        assert!(jar.verify_mac1(&syn) && !jar.verify_mac2(&syn, here));
        let mac1 = SynMacs::mac1(&syn).unwrap();
        let sealed = jar.seal_cookie(mac1, here, [3; 12]);
        assert!(
            open_cookie(&server, [0; 16], [3; 12], &sealed).is_err(),
            "bound to the SYN"
        );
        let cookie = open_cookie(&server, mac1, [3; 12], &sealed).unwrap();
        SynMacs::write(&mut syn, &server, Some(&cookie));
        assert!(jar.verify_mac2(&syn, here) && !jar.verify_mac2(&syn, there));
        jar.rotate([9; 32]);
        assert!(
            jar.verify_mac2(&syn, here),
            "the cookie of the period before still counts"
        );
        jar.rotate([8; 32]);
        assert!(!jar.verify_mac2(&syn, here));
    }

    #[test]
    fn who_does_not_know_the_key_is_not_heard() {
        let jar = CookieSecrets::new(&PublicKey([5; 32]), [1; 32], [2; 32]);
        let mut syn = vec![7; 100];
        SynMacs::write(&mut syn, &PublicKey([6; 32]), None);
        assert!(!jar.verify_mac1(&syn));
        assert!(
            !jar.verify_mac1(&[0; 10]) && !jar.verify_mac2(&[0; 3], "[::1]:1".parse().unwrap())
        );
    }
}
