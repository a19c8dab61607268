//! How many descriptors this process may have.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises this process's limit to what the system allows it (getrlimit(2)): each connection of a program or a
/// device is a descriptor or two, and many systems begin with 1,024.
pub fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::debug!(%error, "the number of descriptors stays as it is");
    }
}
