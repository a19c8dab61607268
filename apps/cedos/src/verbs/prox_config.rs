//! `cedos prox --config FILE`: a TOML file with settings of the proxy.
//!
//! Its keys are the fields of [`ProxConfig`]. Options of the command override it, and lists of clients and networks
//! are added to its own.

use std::path::{Path, PathBuf};

use cedos_agent::settings::SettingsError;
use cedos_agent::settings::schema::nearest_key;
use cedos_prox::ProxConfig;

/// The contents of a configuration file of D2Prox.
#[derive(Debug)]
pub(super) struct ProxConfigFile {
    /// The settings, defaults where it says nothing.
    pub(super) config: ProxConfig,
    /// The directory for state, if it names one.
    pub(super) state_dir: Option<PathBuf>,
}

impl ProxConfigFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, or makes no sense.
    pub(super) fn read(path: &Path) -> Result<ProxConfigFile, SettingsError> {
        let in_file = |text: String| SettingsError {
            path: Some(path.to_owned()),
            text,
        };
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| in_file(format!("cannot read it: {error}")))?;
        ProxConfigFile::parse(&text).map_err(in_file)
    }

    fn parse(text: &str) -> Result<ProxConfigFile, String> {
        let in_words = |error: toml::de::Error| error.to_string().trim_end().to_owned();
        let table: toml::Table = toml::from_str(text).map_err(in_words)?;
        let keys = ProxConfig::keys();
        if let Some(unknown) = table.keys().find(|key| !keys.contains(key)) {
            let all = keys.iter().map(String::as_str);
            return Err(match nearest_key(unknown, all) {
                Some(known) => format!("there is no setting `{unknown}`; do you mean `{known}`?"),
                None => format!("there is no setting `{unknown}`; docs/proxy.md lists them"),
            });
        }
        let config: ProxConfig = toml::from_str(text).map_err(in_words)?;
        let state_dir = table.contains_key("state_dir");
        Ok(ProxConfigFile {
            state_dir: state_dir.then(|| config.state_dir.clone()),
            config,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn refused(text: &str) -> String {
        ProxConfigFile::parse(text).expect_err(text)
    }

    #[test]
    fn a_file_says_what_it_says_and_the_rest_is_the_default() {
        let file = ProxConfigFile::parse(
            "keep_s = 1.5\nallow_nets = [\"10.0.0.0/8\"]\nmemory_quota_bytes = 1000\n",
        )
        .unwrap();
        let expected = ProxConfig {
            keep: Duration::from_millis(1500),
            allow_nets: vec!["10.0.0.0/8".parse().unwrap()],
            memory_quota_bytes: 1000,
            ..ProxConfig::default()
        };
        assert_eq!(file.config, expected);
        assert_eq!(file.state_dir, None);
        let file = ProxConfigFile::parse("state_dir = \"/x\"\nkeep_s = 3").unwrap();
        assert_eq!(file.state_dir, Some("/x".into()));
        assert_eq!(file.config.keep, Duration::from_secs(3));
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_one_that_was_meant() {
        let text = refused("memory_quota_byte = 1");
        assert_eq!(
            text,
            "there is no setting `memory_quota_byte`; do you mean `memory_quota_bytes`?"
        );
        assert!(refused("retry_wiat_s = 1").contains("`retry_wait_s`"));
        assert!(refused("xyzzy = 1").ends_with("docs/proxy.md lists them"));
    }

    #[test]
    fn a_value_of_the_wrong_kind_is_said_with_its_line() {
        assert!(refused("keep_s = \"soon\"").contains("line 1"));
        assert!(refused("keep_s = -1").contains("keep_s"));
        assert!(refused("allow_nets = [\"10.0.0.0/99\"]").contains("line 1"));
        assert!(refused("keep_s =").contains("line 1"));
    }
}
