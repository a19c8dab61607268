//! Connection ids that lead to this host where several hosts, or several workers, share an address.
//!
//! ```text
//!  cid ─▶ jhash(cid, seed) ─▶ × shares / 2³² ─▶ 0 … shares − 1     a load balancer, for every packet
//!  random cids, until one has this host's index                    the host, for each cid that it issues
//! ```
//!
//! The function is that of nftables' `jhash … mod … seed …`, so an ordinary Linux machine balances by one rule and
//! keeps no state. A cid stays eight random bytes: without the seed it says nothing of the host, and two cids of one
//! session cannot be linked.

use d2tp_seal::Rng;
use d2tp_wire::Cid;

/// The most hosts, or workers, that share an address.
pub const CID_SHARES_MAX: u16 = 256;
/// Draws for one id, as a multiple of the mean: a host misses all of them once in 10²⁷ ids.
const DRAWS: u32 = 64;

/// The part of all connection ids that one of several hosts issues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CidShare {
    seed: u32,
    index: u16,
    shares: u16,
}

/// The index or the number of shares is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the index counts from 0 and is below the number of hosts, which is 1 to {CID_SHARES_MAX}")]
pub struct BadCidShare;

impl CidShare {
    /// The share with this index, of `shares`. All hosts and the balancer have the same `seed`.
    ///
    /// ```
    /// use d2tp_session::CidShare;
    /// assert!(CidShare::new(0x1f2e_3d4c, 2, 3).is_ok());
    /// assert!(CidShare::new(0x1f2e_3d4c, 3, 3).is_err());
    /// ```
    ///
    /// # Errors
    /// The index or the number is out of range.
    pub fn new(seed: u32, index: u16, shares: u16) -> Result<CidShare, BadCidShare> {
        if index >= shares || shares > CID_SHARES_MAX {
            return Err(BadCidShare);
        }
        Ok(CidShare {
            seed,
            index,
            shares,
        })
    }

    /// The index of the share to which an id belongs.
    pub fn index_of(&self, cid: [u8; 8]) -> u16 {
        let hash = u64::from(jhash(cid, self.seed));
        // reciprocal_scale of the kernel: no division. Below `shares`.
        ((hash * u64::from(self.shares)) >> 32) as u16
    }

    /// Whether an id belongs to this share.
    pub fn contains(&self, cid: [u8; 8]) -> bool {
        self.index_of(cid) == self.index
    }

    /// The index of this share.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The seed that hosts and balancer share.
    pub fn seed(&self) -> u32 {
        self.seed
    }

    /// The number of shares.
    pub fn shares(&self) -> u16 {
        self.shares
    }
}

/// A new id in these shares (R-CID-1): of the host, and of its worker.
pub(crate) fn draw(shares: [Option<CidShare>; 2], rng: &mut Rng) -> Cid {
    let mut cid = rng.array();
    let tries = shares.iter().flatten().map(|share| u32::from(share.shares));
    let mut draws = tries.product::<u32>().saturating_mul(DRAWS);
    while draws > 0 && !shares.iter().flatten().all(|share| share.contains(cid)) {
        cid = rng.array();
        draws -= 1;
    }
    Cid(cid)
}

/// `jhash` of the Linux kernel (include/linux/jhash.h, Bob Jenkins' lookup3) for eight bytes.
fn jhash(key: [u8; 8], seed: u32) -> u32 {
    let [k0, k1, k2, k3, k4, k5, k6, k7] = key;
    let start = 0xdead_beef_u32.wrapping_add(8).wrapping_add(seed);
    let mut a = start.wrapping_add(u32::from_le_bytes([k0, k1, k2, k3]));
    let mut b = start.wrapping_add(u32::from_le_bytes([k4, k5, k6, k7]));
    let mut c = start;
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_that_a_host_draws_is_in_its_share_and_the_shares_are_even() {
        // R-CID-1
        let mut rng = Rng::new([7; 32]);
        for shares in [1, 2, 3, CID_SHARES_MAX] {
            for index in [0, shares - 1] {
                let share = CidShare::new(0x1f2e_3d4c, index, shares).unwrap();
                for _ in 0..50 {
                    let cid = draw([Some(share), None], &mut rng);
                    assert_eq!(share.index_of(cid.0), index);
                }
            }
        }
        let both = [(3, 1, 4), (5, 7, 8)].map(|(seed, i, n)| CidShare::new(seed, i, n).ok());
        for _ in 0..50 {
            let cid = draw(both, &mut rng);
            assert!(both.iter().flatten().all(|share| share.contains(cid.0)));
        }
        let third = CidShare::new(99, 1, 3).unwrap();
        let inside = (0..30_000).filter(|_| third.contains(rng.array())).count();
        assert!((9_500..10_500).contains(&inside), "{inside}");
    }

    #[test]
    fn the_hash_is_the_kernels() {
        // Counted by `nft … jhash @th,72,64 mod 3 seed 0x1f2e3d4c` on Linux 6: the same ids, the same shares.
        assert_eq!(jhash([0, 1, 2, 3, 4, 5, 6, 7], 0x1f2e_3d4c), 0x2fef_de20);
        assert_eq!(jhash([0xff; 8], 0), 0x5264_8e85);
    }

    #[test]
    fn another_seed_gives_other_shares() {
        let mut rng = Rng::new([8; 32]);
        let [one, other] = [1, 2].map(|seed| CidShare::new(seed, 0, 2).unwrap());
        let same = (0..10_000).filter(|_| {
            let cid = rng.array();
            one.contains(cid) == other.contains(cid)
        });
        let same = same.count();
        assert!((4_500..5_500).contains(&same), "{same}");
    }
}
