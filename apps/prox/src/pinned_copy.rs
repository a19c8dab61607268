//! A pinned copy: the origin's answer about an object, and its bytes.

use std::sync::{Arc, Weak};

use http::header::HeaderValue;
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use crate::copy_head::{CopyHead, CopyRequest};
use crate::retained_copies::CopyListing;
use crate::shared_cache::SharedCache;
use crate::spooled_body::SpooledBody;

/// A pinned copy. Dropping the last handle stops the fetch and frees the bytes.
#[derive(Debug)]
pub(crate) struct PinnedCopy {
    /// The copy's id, in memos and in the copy store.
    pub(crate) id: u64,
    pub(crate) head: CopyHead,
    pub(crate) body: Arc<SpooledBody>,
    /// The request, in case another process must repeat it.
    pub(crate) request: CopyRequest,
    /// The cache that may hold it, to be told when nobody reads it any more.
    pub(crate) cache: Weak<SharedCache>,
    /// Where the copy is listed for clients.
    pub(crate) listings: Mutex<Vec<CopyListing>>,
    pub(crate) _fetch: AbortOnDropHandle<()>,
}

impl PinnedCopy {
    /// The entity tag under which apps know this copy and no other.
    pub(crate) fn link_tag(&self) -> HeaderValue {
        let tag = format!("\"d2prox-{:016x}\"", self.id);
        HeaderValue::from_str(&tag).expect("hex digits are a header value")
    }

    /// A flow that read the copy has ended. The caller holds this handle and no other.
    pub(crate) fn on_reader_gone(self: &Arc<PinnedCopy>) {
        self.body.sweep(Arc::strong_count(self));
        if let Some(cache) = self.cache.upgrade() {
            cache.on_reader_gone(self);
        }
    }
}
