//! `cedos get --forget`: discards a part, and frees its resources at the proxy.

use std::path::Path;
use std::time::Duration;

use super::outcome::TransferFailure;
use super::partial::PartialFile;
use super::proxy::ProxyClient;

/// How long to try to inform the proxy. Without a network the next download informs it.
const TELL_MAX: Duration = Duration::from_secs(5); // a guess

/// Removes the part for `destination`; returns what to say about it.
///
/// # Errors
/// From the disk, or when another program is writing the part.
pub async fn forget(
    destination: &Path,
    url: &str,
    proxy: Option<&ProxyClient>,
) -> Result<String, TransferFailure> {
    let what = format!("cannot remove {}.part", destination.display());
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            TransferFailure::error(format!("{what}: another cedos get is writing it"))
        }
        _ => TransferFailure::storage(&what, &error),
    };
    if !PartialFile::exists(destination) {
        return Ok(format!(
            "nothing to remove: {}.part does not exist",
            destination.display()
        ));
    }
    let (partial, note) = PartialFile::open(destination, url).map_err(failed)?;
    partial.discard().map_err(failed)?;
    let file = destination.display();
    let Some(flow) = note.and_then(|note| note.flow) else {
        return Ok(format!("{file}.part is removed"));
    };
    let told = match proxy {
        Some(proxy) => proxy.release_instance(&flow, TELL_MAX).await,
        None => false,
    };
    Ok(if told {
        format!("{file}.part is removed, and the proxy has freed its copy")
    } else {
        format!(
            "{file}.part is removed; the next download through the proxy will tell it to free its \
             copy"
        )
    })
}
