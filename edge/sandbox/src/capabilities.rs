//! Capabilities of the process (capabilities(7)): all are dropped but those that are named.

use rustix::io;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities,
};

use crate::sandbox_report::SandboxPart;

/// Drops every capability of this thread and of those it starts, but `kept`. One that the process does not have is not
/// gained.
pub(crate) fn keep_only(kept: CapabilitySet) -> SandboxPart {
    drop_others(kept).map_err(|error| error.to_string())
}

fn drop_others(kept: CapabilitySet) -> io::Result<()> {
    let current = capabilities(None)?;
    // The bounding set, first: that needs CAP_SETPCAP. It is what a program of root's would have after an execve.
    if current.effective.contains(CapabilitySet::SETPCAP) {
        for capability in each_bit(!kept.bits()) {
            // The kernel knows fewer than there are bits.
            if capability_is_in_bounding_set(capability).unwrap_or(false) {
                remove_capability_from_bounding_set(capability)?;
            }
        }
    }
    clear_ambient_capability_set()?;
    let kept = kept & current.permitted;
    set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: kept & current.inheritable,
        },
    )?;
    // What an ordinary user was given by its service manager also stays over an execve.
    for capability in each_bit((kept & current.inheritable).bits()) {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// The capabilities of a set, one by one.
fn each_bit(bits: u64) -> impl Iterator<Item = CapabilitySet> {
    let each = (0..u64::BITS).map(|n| 1 << n);
    each.filter(move |bit| bits & bit != 0)
        .map(CapabilitySet::from_bits_retain)
}
