//! Copies that hibernated flows continue to read.

use std::collections::HashMap;
use std::sync::Arc;

use d2tp_driver::HostKey;
use parking_lot::Mutex;

use crate::copy_store::CopyStore;
use crate::pinned_copy::PinnedCopy;

/// Copies that hibernated flows read.
#[derive(Debug, Default)]
pub(crate) struct HibernatedCopies {
    copies: Mutex<HashMap<u64, HibernatedCopy>>,
}

/// A copy that hibernated flows read.
#[derive(Debug)]
pub(crate) struct HibernatedCopy {
    flows: u32,
    /// Whom its bytes are charged to.
    pub(crate) client: HostKey,
    /// The copy in memory; none if it is on disk only. Its bytes stay counted.
    pub(crate) copy: Option<Arc<PinnedCopy>>,
    pub(crate) counted: u64,
}

impl HibernatedCopies {
    /// Records that a flow which reads this copy hibernated.
    pub(crate) fn add_flow(&self, copy: Arc<PinnedCopy>) {
        let client = copy.body.client();
        let mut copies = self.copies.lock();
        let resting = copies.entry(copy.id).or_insert(HibernatedCopy {
            flows: 0,
            client,
            copy: None,
            counted: 0,
        });
        resting.flows += 1;
        resting.client = client; // The copy may have been charged to another since the first flow.
        resting.copy = Some(copy);
    }

    /// Adds a copy from the journal, and the number of hibernated flows that read it.
    pub(crate) fn restore(&self, id: u64, flows: u32, client: HostKey, counted: u64) {
        let resting = HibernatedCopy {
            flows,
            client,
            copy: None,
            counted,
        };
        self.copies.lock().insert(id, resting);
    }

    /// Records that the copy is in memory, for all flows that read it.
    pub(crate) fn set_loaded(&self, copy: &Arc<PinnedCopy>) {
        if let Some(resting) = self.copies.lock().get_mut(&copy.id) {
            resting.copy = Some(copy.clone());
        }
    }

    /// Has copies leave memory, too, whose record in the copy store says only after their flow fell asleep that they are
    /// whole.
    pub(crate) fn follow_records(self: &Arc<HibernatedCopies>, copy_store: &CopyStore) {
        let copies = Arc::downgrade(self);
        copy_store.set_whole_listener(move |id| {
            if let Some(copies) = copies.upgrade() {
                copies.unload(id);
            }
        });
    }

    /// Removes a complete copy from memory, if nothing else uses it and the copy store has recorded that it is complete. It is
    /// tried when a flow hibernates and when the record is made, whichever is later.
    pub(crate) fn unload(&self, id: u64) {
        let mut copies = self.copies.lock();
        let Some(resting) = copies.get_mut(&id) else {
            return;
        };
        let alone = resting.copy.as_ref().filter(|c| Arc::strong_count(c) == 1);
        let Some(counted) = alone.and_then(|copy| copy.body.release_memory()) else {
            return;
        };
        resting.counted = counted;
        let copy = resting.copy.take();
        drop(copies); // Outside the lock: this closes a file.
        drop(copy);
    }

    /// Records that a flow on this copy was restored or is over. Returns the copy, and whether no other
    /// hibernated flow reads it.
    pub(crate) fn remove_flow(&self, id: u64) -> Option<(HibernatedCopy, bool)> {
        let mut copies = self.copies.lock();
        let resting = copies.get_mut(&id)?;
        resting.flows = resting.flows.saturating_sub(1);
        let last = resting.flows == 0;
        let copy = resting.copy.clone();
        let (client, counted) = (resting.client, resting.counted);
        if last {
            copies.remove(&id);
        }
        let roused = HibernatedCopy {
            flows: 0,
            client,
            copy,
            counted,
        };
        Some((roused, last))
    }

    /// The copy of hibernated flows: in memory, or in the copy store if the inner option is none.
    pub(crate) fn get(&self, id: u64) -> Option<Option<Arc<PinnedCopy>>> {
        self.copies.lock().get(&id).map(|r| r.copy.clone())
    }

    /// The number of copies.
    pub(crate) fn len(&self) -> usize {
        self.copies.lock().len()
    }
}
