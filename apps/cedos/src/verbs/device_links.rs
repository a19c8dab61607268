//! The links of this device, for verbs that run without the agent.

use cedos_agent::fetch::outcome::TransferFailure;
use cedos_agent::settings;
use d2tp_links::{ClassRule, ClassRules, LinkMonitor};

/// Watches the links, each with the class that the `--link` options, the settings and NetworkManager give it.
///
/// # Errors
/// A rule names no link of this device (wrong usage), the settings make no sense, or the system does not
/// show its links.
pub async fn watch_links(rules: &[ClassRule]) -> Result<LinkMonitor, TransferFailure> {
    let rules = ClassRules {
        rules: rules.to_vec(),
    };
    let (monitor, _) = settings::watch(rules.clone(), None)
        .await
        .map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    let checked = rules.check(&monitor.links());
    checked.map_err(|error| TransferFailure::usage(error.to_string()))?;
    Ok(monitor)
}
