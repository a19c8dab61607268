//! What an order of a mirror means: which folder becomes what which other one is.

use std::path::PathBuf;

use url::Url;

use super::path_filter::PathFilter;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::transfer::redact_url;
use crate::order::{MirrorOptions, TransferOrder, TransferVerb};

/// An order of a mirror that makes sense.
pub struct MirrorPlan {
    /// Where files come from, and where they go.
    pub(super) direction: MirrorDirection,
    /// Which files are meant.
    pub(super) filter: PathFilter,
    /// Whether files are deleted that the source does not have.
    pub(super) delete: bool,
}

impl MirrorPlan {
    /// Reads an order.
    ///
    /// # Errors
    /// It makes no sense; in words.
    pub fn of(order: &TransferOrder) -> Result<MirrorPlan, TransferFailure> {
        let MirrorOptions {
            include,
            exclude,
            delete,
        } = order.mirror.clone().unwrap_or_default();
        let direction = MirrorDirection::of(order).map_err(TransferFailure::usage)?;
        let filter = PathFilter::new(&include, &exclude).map_err(TransferFailure::usage)?;
        Ok(MirrorPlan {
            direction,
            filter,
            delete,
        })
    }
}

/// Where files come from, and where they go.
#[derive(Debug, Clone)]
pub enum MirrorDirection {
    /// The server's files are copied into a local folder.
    Download {
        /// The folder on the server.
        from: Url,
        /// The local folder.
        to: PathBuf,
    },
    /// The files of a local folder are copied to a server.
    Upload {
        /// The local folder.
        from: PathBuf,
        /// The folder on the server.
        to: Url,
    },
}

impl MirrorDirection {
    /// The direction of an order, whose URL gets a slash at its end.
    ///
    /// # Errors
    /// The order names no two folders; in words.
    pub fn of(order: &TransferOrder) -> Result<MirrorDirection, String> {
        let url: Url = (order.url.parse())
            .map_err(|error| format!("`{}` is not a URL: {error}", redacted(&order.url)))?;
        let url = folder_url(url)?;
        let folder = order.file.clone().ok_or("a mirror needs a folder here")?;
        match order.verb {
            TransferVerb::Get if folder.exists() && !folder.is_dir() => {
                Err(format!("{} is a file, not a folder", folder.display()))
            }
            TransferVerb::Get => Ok(MirrorDirection::Download {
                from: url,
                to: folder,
            }),
            TransferVerb::Put if !folder.is_dir() => {
                Err(format!("{} is no folder", folder.display()))
            }
            TransferVerb::Put => Ok(MirrorDirection::Upload {
                from: folder,
                to: url,
            }),
        }
    }
}

fn redacted(url: &str) -> String {
    url.parse()
        .map_or_else(|_| url.to_owned(), |url| redact_url(&url))
}

/// The URL of a folder, with a slash at its end.
fn folder_url(mut url: Url) -> Result<Url, String> {
    if !matches!(url.scheme(), "http" | "https" | "d2tp") {
        let scheme = url.scheme();
        return Err(format!(
            "{scheme}: is not supported; use http:, https: or d2tp:"
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(format!(
            "`{}` names no folder: leave out what follows ? and #",
            redact_url(&url)
        ));
    }
    if !url.path().ends_with('/') {
        let path = format!("{}/", url.path());
        url.set_path(&path);
    }
    Ok(url)
}
