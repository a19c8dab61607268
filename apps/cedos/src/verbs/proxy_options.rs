//! The options of every verb that can use a proxy: which one, or none.

use cedos_agent::settings::{SettingsError, UserSettings};
use clap::Args;

/// Which proxy is used.
#[derive(Clone, Debug, Default, Args)]
pub struct ProxyOptions {
    /// Use this proxy: a name in the settings, d2tp://host:port/KEY, or d2tp://name/KEY, whose records list
    /// its nodes [default: the settings' proxy.default, which `cedos join` sets]. Several times, for several
    /// nodes that have one key: the one that answers soonest is used, and left when it falls silent
    #[arg(long, value_name = "PROXY", env = "CEDOS_PROX")]
    prox: Vec<String>,

    /// Use no proxy, whatever the settings say
    #[arg(long)]
    no_prox: bool,
}

impl ProxyOptions {
    /// The address of the proxy to use, if one is to be used.
    ///
    /// # Errors
    /// The settings make no sense, or know no proxy of that name.
    pub fn address(&self) -> Result<Option<String>, SettingsError> {
        self.address_in(&UserSettings::load(None)?)
    }

    /// The address of the proxy to use, by these settings.
    ///
    /// # Errors
    /// The settings know no proxy of that name.
    pub fn address_in(&self, settings: &UserSettings) -> Result<Option<String>, SettingsError> {
        settings.proxy(&self.prox, self.no_prox)
    }
}
