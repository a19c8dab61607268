//! The page's way to the library of podcasts, which the agent's service holds.

use cedos_readycast::{Library, LibraryError};

use super::super::frame::{PageContext, PageFrame};
use crate::fetch::outcome::TransferFailure;

impl PageContext {
    /// Changes the library, which is made if there is none; the service does what follows from it.
    ///
    /// # Errors
    /// The library's, in a sentence.
    pub(super) async fn change_podcasts<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Library) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, TransferFailure> {
        let changed = self.agent.podcasts.with(call).await;
        self.agent.podcasts.changed();
        changed
    }

    /// Reads from the library of podcasts. If there is no library, the answer is empty, and none is created.
    ///
    /// # Errors
    /// The library's, in a sentence.
    pub(super) async fn read_podcasts<T: Default + Send + 'static>(
        &self,
        call: impl FnOnce(&Library) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, TransferFailure> {
        match self.agent.podcasts.exists() {
            true => {
                self.agent.look_for_missing_files();
                self.agent.podcasts.with(call).await
            }
            false => Ok(T::default()),
        }
    }
}

/// The frame of a page of podcasts.
pub(super) fn frame_of(context: &PageContext) -> PageFrame {
    PageFrame {
        base: context.base.clone(),
        section: "podcasts",
    }
}
