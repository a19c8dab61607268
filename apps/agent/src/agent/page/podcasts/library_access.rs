//! The page's way to the library of podcasts.

use std::path::PathBuf;
use std::sync::OnceLock;

use cedos_readycast::{Library, LibraryError};

use super::super::frame::PageContext;
use crate::fetch::jobs;
use crate::fetch::outcome::TransferFailure;

/// The library, opened when a page first needs it.
#[derive(Default)]
pub(in super::super) struct PodcastAccess {
    library: OnceLock<Library>,
}

/// The folder of the library.
fn folder() -> Result<PathBuf, TransferFailure> {
    let state = jobs::state_directory();
    let state = state.map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    Ok(state.join("podcasts"))
}

fn failure(error: &LibraryError) -> TransferFailure {
    match error {
        LibraryError::Scheme(_) | LibraryError::Feed(_) => {
            TransferFailure::usage(error.to_string())
        }
        _ => TransferFailure::error(error.to_string()),
    }
}

impl PodcastAccess {
    fn library(&self) -> Result<Library, TransferFailure> {
        if let Some(library) = self.library.get() {
            return Ok(library.clone());
        }
        let opened = Library::open(&folder()?).map_err(|error| failure(&error))?;
        Ok(self.library.get_or_init(|| opened).clone())
    }
}

impl PageContext {
    /// Calls the library on a thread for blocking calls. The library is made if there is none.
    ///
    /// # Errors
    /// The library's, in a sentence.
    pub(super) async fn change_podcasts<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Library) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, TransferFailure> {
        let access = self.podcasts.clone();
        let called = tokio::task::spawn_blocking(move || {
            let library = access.library()?;
            call(&library).map_err(|error| failure(&error))
        });
        called
            .await
            .map_err(|error| TransferFailure::error(error.to_string()))?
    }

    /// What the library says. Without a library it is nothing, and none is made.
    ///
    /// # Errors
    /// The library's, in a sentence.
    pub(super) async fn read_podcasts<T: Default + Send + 'static>(
        &self,
        call: impl FnOnce(&Library) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, TransferFailure> {
        if self.podcasts.library.get().is_none() && !Library::exists(&folder()?) {
            return Ok(T::default());
        }
        self.change_podcasts(call).await
    }
}
