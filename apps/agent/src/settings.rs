//! The user's file of settings, and the links judged by it.
//!
//! ```text
//!  flags ─────────────────────────────┐
//!  $XDG_CONFIG_HOME/cedos/config.toml ┼─▶ Judge ─▶ LinkMonitor ─▶ links, each with what it costs and why
//!  NetworkManager, where it runs ─────┘
//! ```

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use d2tp_links::{ClassRules, CostResolver, LinkMonitor, NetworkManager, NetworkRules};

/// How long the system's bus may take to answer before it counts as absent.
const BUS_ANSWERS: Duration = Duration::from_secs(5); // a guess: a machine that starts

/// The environment variable with the path of the settings file.
pub const FILE_VARIABLE: &str = "CEDOS_CONFIG";

/// The default path of the settings file.
fn usual() -> Option<PathBuf> {
    let absolute = |name: &str| {
        let path = std::env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let folder = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(folder.join("cedos").join("config.toml"))
}

/// What the user says of networks: in this file, else in `$CEDOS_CONFIG`, else in the usual one, which
/// need not be there.
///
/// # Errors
/// It cannot be read, or says what nobody knows.
pub fn rules(file: Option<&Path>) -> anyhow::Result<NetworkRules> {
    let named = std::env::var_os(FILE_VARIABLE).filter(|name| !name.is_empty());
    let asked = file.map(Path::to_owned).or(named.map(PathBuf::from));
    let Some(path) = asked.clone().or_else(usual) else {
        return Ok(NetworkRules::default());
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound && asked.is_none() => {
            return Ok(NetworkRules::default());
        }
        Err(error) => bail!("cannot read the settings in {}: {error}", path.display()),
    };
    NetworkRules::parse(&text).with_context(|| format!("in {}", path.display()))
}

/// NetworkManager, where it runs.
pub async fn network_manager() -> Option<NetworkManager> {
    match tokio::time::timeout(BUS_ANSWERS, NetworkManager::start()).await {
        Ok(Ok(manager)) => Some(manager),
        Ok(Err(error)) => {
            tracing::debug!(%error, "NetworkManager does not answer; costs are guessed from what \
                the kernel shows");
            None
        }
        Err(_) => {
            tracing::warn!(
                "the system bus does not answer; costs are guessed without NetworkManager"
            );
            None
        }
    }
}

/// The links, judged by flags, the settings and NetworkManager.
///
/// # Errors
/// The settings make no sense, or the links cannot be read.
pub async fn watch(
    flags: ClassRules,
    file: Option<&Path>,
) -> anyhow::Result<(LinkMonitor, Option<NetworkManager>)> {
    let rules = rules(file)?;
    let manager = network_manager().await;
    let resolver = CostResolver { flags, rules };
    let (_, monitor) = LinkMonitor::start_with(resolver, manager.clone()).await?;
    Ok((monitor, manager))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_make_no_sense_say_where_and_what_was_meant() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        let none = rules(Some(&file)).unwrap_err().to_string();
        assert!(none.contains("config.toml"), "{none}");
        std::fs::write(&file, "[[network]]\nssid = \"Train\"\nclas = \"free\"\n").unwrap();
        let error = format!("{:#}", rules(Some(&file)).unwrap_err());
        assert!(
            error.contains("config.toml") && error.contains("`class`"),
            "{error}"
        );
        std::fs::write(
            &file,
            "[[network]]\nssid = \"Train\"\nclass = \"metered\"\n",
        )
        .unwrap();
        assert_eq!(rules(Some(&file)).unwrap().network.len(), 1);
    }
}
