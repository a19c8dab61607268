//! The memory that peers cause a host to hold: one limit for all of them, and a share for each key.
//!
//! ```text
//!  MemoryPool ── max, used
//!      ├── MemoryAccount of a key ── used ≤ (max − what the others use) / KEY_SHARE
//!      │       ├── MemoryCharge: unread bytes of a flow
//!      │       ├── MemoryCharge: unacknowledged bytes of a flow
//!      │       └── MemoryCharge: other memory that the driver or an application holds for the key
//!      └── …
//! ```
//!
//! Charges count allocated memory with its bookkeeping overhead, not received bytes. Dropping a
//! charge returns its memory, so that no code path can forget it. A key may have a part of what the
//! others leave, so a key that takes all it can still leaves room for the next one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use d2tp_seal::PublicKey;

/// The part of the memory left by other keys that one key may hold: the memory is divided by this.
pub const KEY_SHARE: u64 = 5; // a guess: the first ten greedy keys leave a sixth of the pool

/// Counts the memory that peers cause this host to hold, and refuses what would exceed the limit.
/// The default has no limit and counts nothing. Clones share the counts.
///
/// ```
/// use d2tp_session::{MemoryPool, PublicKey};
/// let pool = MemoryPool::new(1_000_000);
/// let account = pool.account(PublicKey([1; 32]));
/// assert_eq!(account.room(), 200_000);
/// let mut charge = account.charge();
/// assert!(charge.try_resize(150_000) && !charge.try_resize(250_000));
/// assert_eq!((pool.used(), account.room()), (150_000, 50_000));
/// drop(charge);
/// assert_eq!(pool.used(), 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct MemoryPool(Option<Arc<PoolState>>);

#[derive(Debug)]
struct PoolState {
    max: u64,
    used: AtomicU64,
    refusals: AtomicU64,
    /// Held while a charge grows that must not grow beyond its limit: two threads that both look first and then charge
    /// would exceed it together.
    growing: Mutex<()>,
    accounts: Mutex<BTreeMap<PublicKey, Weak<AccountState>>>,
}

#[derive(Debug)]
struct AccountState {
    key: PublicKey,
    used: AtomicU64,
    pool: Arc<PoolState>,
}

impl MemoryPool {
    /// A pool of `max` bytes.
    pub fn new(max: u64) -> MemoryPool {
        MemoryPool(Some(Arc::new(PoolState {
            max,
            used: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            growing: Mutex::default(),
            accounts: Mutex::default(),
        })))
    }

    /// The most bytes that may be charged; `None` without a limit.
    pub fn max(&self) -> Option<u64> {
        self.0.as_ref().map(|pool| pool.max)
    }

    /// The number of bytes charged now.
    pub fn used(&self) -> u64 {
        self.0
            .as_ref()
            .map_or(0, |pool| pool.used.load(Ordering::Relaxed))
    }

    /// How often memory was refused.
    pub fn refusals(&self) -> u64 {
        self.0
            .as_ref()
            .map_or(0, |pool| pool.refusals.load(Ordering::Relaxed))
    }

    /// Whether the pool has room for `bytes` more, for any key.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.0.as_ref().is_none_or(|pool| {
            let fits = pool.used.load(Ordering::Relaxed).saturating_add(bytes) <= pool.max;
            pool.refusals.fetch_add(u64::from(!fits), Ordering::Relaxed);
            fits
        })
    }

    /// The account of a key. It exists as long as something refers to it.
    pub fn account(&self, key: PublicKey) -> MemoryAccount {
        let Some(pool) = &self.0 else {
            return MemoryAccount(None);
        };
        let mut accounts = pool.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = accounts.get(&key).and_then(Weak::upgrade) {
            return MemoryAccount(Some(account));
        }
        let account = Arc::new(AccountState {
            key,
            used: AtomicU64::new(0),
            pool: pool.clone(),
        });
        accounts.insert(key, Arc::downgrade(&account));
        MemoryAccount(Some(account))
    }
}

impl AccountState {
    fn room(&self) -> u64 {
        let mine = self.used.load(Ordering::Relaxed);
        let others = self.pool.used.load(Ordering::Relaxed).saturating_sub(mine);
        (self.pool.max.saturating_sub(others) / KEY_SHARE).saturating_sub(mine)
    }

    /// Charges `bytes` if there is room for them and for `beside` more.
    fn try_add(&self, bytes: u64, beside: u64) -> bool {
        let growing = self.pool.growing.lock();
        let _growing = growing.unwrap_or_else(PoisonError::into_inner);
        let fits = self.room() >= bytes.saturating_add(beside);
        if fits {
            self.add(bytes);
        }
        fits
    }

    fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        self.pool.used.fetch_add(bytes, Ordering::Relaxed);
    }

    fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.pool.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for AccountState {
    fn drop(&mut self) {
        let accounts = &self.pool.accounts;
        let mut accounts = accounts.lock().unwrap_or_else(PoisonError::into_inner);
        // Another account of this key may have been created meanwhile.
        if accounts
            .get(&self.key)
            .is_some_and(|entry| entry.strong_count() == 0)
        {
            accounts.remove(&self.key);
        }
    }
}

/// The memory that one key causes this host to hold.
#[derive(Clone, Debug, Default)]
pub struct MemoryAccount(Option<Arc<AccountState>>);

impl MemoryAccount {
    /// The number of bytes that this key may still charge.
    pub fn room(&self) -> u64 {
        self.0.as_ref().map_or(u64::MAX, |account| account.room())
    }

    /// The number of bytes charged to all keys, and the most that may be.
    pub fn used_by_all(&self) -> (u64, u64) {
        self.0.as_ref().map_or((0, u64::MAX), |account| {
            let pool = &account.pool;
            (pool.used.load(Ordering::Relaxed), pool.max)
        })
    }

    /// The number of bytes charged to this key.
    pub fn used(&self) -> u64 {
        self.0
            .as_ref()
            .map_or(0, |account| account.used.load(Ordering::Relaxed))
    }

    /// A new charge of zero bytes.
    pub fn charge(&self) -> MemoryCharge {
        MemoryCharge {
            account: self.0.clone(),
            bytes: 0,
        }
    }
}

/// Bytes that are charged to a key until this value is dropped.
#[derive(Debug, Default)]
pub struct MemoryCharge {
    account: Option<Arc<AccountState>>,
    bytes: u64,
}

impl MemoryCharge {
    /// The number of bytes by which this charge could grow.
    #[inline]
    pub fn room(&self) -> u64 {
        self.account
            .as_ref()
            .map_or(u64::MAX, |account| account.room())
    }

    /// Whether the charge could grow by `bytes`. A refusal is counted.
    #[inline]
    pub fn has_room(&self, bytes: u64) -> bool {
        let Some(account) = &self.account else {
            return true;
        };
        let fits = account.room() >= bytes;
        if !fits {
            account.pool.refusals.fetch_add(1, Ordering::Relaxed);
        }
        fits
    }

    /// The number of bytes charged.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the charge belongs to a pool with a limit, which counts it.
    #[inline]
    pub fn is_counted(&self) -> bool {
        self.account.is_some()
    }

    /// Changes the charge to `bytes` in total. Returns false and changes nothing if it would grow
    /// beyond the limit.
    pub fn try_resize(&mut self, bytes: u64) -> bool {
        let fits = self.try_resize_beside(bytes, 0);
        if !fits && let Some(account) = &self.account {
            account.pool.refusals.fetch_add(1, Ordering::Relaxed);
        }
        fits
    }

    /// Changes the charge to `bytes` in total, if `beside` more bytes still fit beside it when it grows. Otherwise it
    /// changes nothing and returns false, which does not count as a refusal: the caller makes do with less.
    pub fn try_resize_beside(&mut self, bytes: u64, beside: u64) -> bool {
        if let Some(account) = &self.account
            && bytes > self.bytes
        {
            if !account.try_add(bytes - self.bytes, beside) {
                return false;
            }
            self.bytes = bytes;
        } else {
            self.resize(bytes);
        }
        true
    }

    /// Changes the charge to `bytes` in total, whether or not they fit, because the memory is
    /// already allocated.
    #[inline]
    pub fn resize(&mut self, bytes: u64) {
        if let Some(account) = &self.account
            && bytes != self.bytes
        {
            if bytes > self.bytes {
                account.add(bytes - self.bytes);
            } else {
                account.release(self.bytes - bytes);
            }
            self.bytes = bytes;
        }
    }
}

impl PartialEq for MemoryCharge {
    fn eq(&self, other: &MemoryCharge) -> bool {
        self.bytes == other.bytes
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_takes_all_it_can_leaves_most_to_the_next() {
        let pool = MemoryPool::new(1_000_000);
        let mut charges = Vec::new();
        for key in 0..10 {
            let account = pool.account(PublicKey([key; 32]));
            let room = account.room();
            assert!(room > 20_000, "key {key} finds {room} bytes");
            let mut charge = account.charge();
            assert!(charge.try_resize(room) && !charge.try_resize(room + 1));
            charges.push(charge);
        }
        assert!(pool.used() < 900_000);
        assert_eq!(pool.refusals(), 10);
        charges.clear();
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn all_charges_of_a_key_share_its_account_and_an_idle_key_costs_nothing() {
        let pool = MemoryPool::new(1_000);
        let key = PublicKey([7; 32]);
        let mut first = pool.account(key).charge();
        let mut second = pool.account(key).charge();
        assert!(first.try_resize(120) && second.try_resize(80) && !second.try_resize(81));
        assert_eq!(pool.account(key).used(), 200);
        drop((first, second));
        let state = pool.0.as_ref().unwrap();
        assert!(state.accounts.lock().unwrap().is_empty());
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let pool = MemoryPool::default();
        let mut charge = pool.account(PublicKey([1; 32])).charge();
        assert!(charge.try_resize(u64::MAX) && !charge.is_counted());
        assert_eq!((pool.used(), pool.max(), charge.bytes()), (0, None, 0));
    }
}
