//! The settings of users and of the machine, and the costs of links that follow from them.
//!
//! ```text
//!  options of a command ────────────────▶ win over
//!  environment variables ───────────────▶ win over
//!  $XDG_CONFIG_HOME/cedos/config.toml ──▶ wins over
//!  /etc/cedos/config.toml ──────────────▶ wins over the defaults in schema.rs
//!
//!  flags, rules for networks, NetworkManager ─▶ CostResolver ─▶ LinkMonitor ─▶ links, with what each costs
//! ```

pub mod schema;
mod settings_file;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use d2tp_driver::{PublicKey, ServerAddress, ServerList};
use d2tp_links::{
    ClassRules, CostResolver, LinkMonitor, NetworkManager, NetworkRule, NetworkRules,
};

use settings_file::SettingsFile;
pub use settings_file::{SettingsChange, SettingsError};

/// How long the system's bus may take to answer before it counts as absent.
const BUS_ANSWERS: Duration = Duration::from_secs(5); // a guess: a machine that starts

/// The environment variable with the path of the settings file.
pub const FILE_VARIABLE: &str = "CEDOS_CONFIG";
/// The settings of all users of this machine.
pub const SYSTEM_FILE: &str = "/etc/cedos/config.toml";

/// Where the value of a setting is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingSource {
    /// The setting is not set.
    Default,
    /// The settings file with this path.
    File(PathBuf),
    /// An environment variable.
    Environment(&'static str),
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingSource::Default => f.write_str("default"),
            SettingSource::File(path) => path.display().fmt(f),
            SettingSource::Environment(name) => write!(f, "${name}"),
        }
    }
}

/// All settings, as the files and the environment give them.
#[derive(Clone, Debug, Default)]
pub struct UserSettings {
    /// What the files say, the user's first.
    files: Vec<SettingsFile>,
}

/// The path of the user's settings, which need not be there: `$CEDOS_CONFIG`, else
/// `cedos/config.toml` in the user's folder of configuration.
///
/// # Errors
/// The user has no such folder.
pub fn user_file() -> anyhow::Result<PathBuf> {
    if let Some(named) = named_file() {
        return Ok(named);
    }
    let folder =
        config_directory().context("no place for settings: set HOME, or CEDOS_CONFIG to a file")?;
    Ok(folder.join("cedos").join("config.toml"))
}

/// The user's directory of configuration, of all programs: `$XDG_CONFIG_HOME`, else `~/.config`.
///
/// # Errors
/// The user has no home.
pub fn config_directory() -> anyhow::Result<PathBuf> {
    // XDG Base Directory Specification: a path that is not absolute is to be ignored.
    let absolute = |name: &str| {
        let path = std::env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    absolute("XDG_CONFIG_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".config")))
        .context("HOME is not set")
}

fn named_file() -> Option<PathBuf> {
    let named = std::env::var_os(FILE_VARIABLE).filter(|name| !name.is_empty());
    named.map(PathBuf::from)
}

impl UserSettings {
    /// Reads the settings: in this file, else in `$CEDOS_CONFIG`, else in the user's file and then
    /// [`SYSTEM_FILE`], which need not be there.
    ///
    /// # Errors
    /// [`SettingsError`]: a file cannot be read, or says what nobody knows.
    pub fn load(file: Option<&Path>) -> Result<UserSettings, SettingsError> {
        if let Some(path) = file.map(Path::to_owned).or_else(named_file) {
            let missing = || SettingsError {
                path: Some(path.clone()),
                text: "there is no such file".to_owned(),
            };
            let file = SettingsFile::read(&path)?.ok_or_else(missing)?;
            return Ok(UserSettings { files: vec![file] });
        }
        let usual = user_file()
            .ok()
            .into_iter()
            .chain([PathBuf::from(SYSTEM_FILE)]);
        let usual: Vec<PathBuf> = usual.collect();
        UserSettings::read(&usual)
    }

    /// Reads those of these files that are there; earlier ones win.
    fn read(paths: &[PathBuf]) -> Result<UserSettings, SettingsError> {
        let mut files = Vec::new();
        for path in paths {
            files.extend(SettingsFile::read(path)?);
        }
        Ok(UserSettings { files })
    }

    /// Checks the text of a file of settings.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn check(path: &Path, text: &str) -> Result<(), SettingsError> {
        SettingsFile::parse(path, text).map(drop)
    }

    /// The paths of the files that are there.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The value of a setting, and where it is from: the environment, the user's file, the system's, or the
    /// default.
    ///
    /// # Panics
    /// There is no such setting.
    pub fn value(&self, key: &str) -> (Option<String>, SettingSource) {
        let setting = schema::setting(key).expect("a key of the table");
        if let Some(name) = setting.environment
            && let Ok(text) = std::env::var(name)
            && !text.is_empty()
        {
            return (Some(text), SettingSource::Environment(name));
        }
        for file in &self.files {
            if let Some(text) = file.values.get(setting.key) {
                return (Some(text.clone()), SettingSource::File(file.path.clone()));
            }
        }
        (setting.default.map(str::to_owned), SettingSource::Default)
    }

    /// The value of a setting, if it is set.
    ///
    /// # Panics
    /// There is no such setting.
    pub fn chosen(&self, key: &str) -> Option<String> {
        match self.value(key) {
            (_, SettingSource::Default) => None,
            (text, _) => text,
        }
    }

    /// The parsed value of a setting, if it is set. Files were checked when they were read.
    ///
    /// # Panics
    /// There is no such setting.
    pub fn parsed<T, E>(&self, key: &str, parse: impl Fn(&str) -> Result<T, E>) -> Option<T> {
        self.chosen(key).and_then(|text| parse(&text).ok())
    }

    /// The value of a setting as a path with `~/` resolved, if it is set.
    ///
    /// # Panics
    /// There is no such setting.
    pub fn path(&self, key: &str) -> Option<PathBuf> {
        let text = self.chosen(key)?;
        match (text.strip_prefix("~/"), std::env::var_os("HOME")) {
            (Some(rest), Some(home)) => Some(PathBuf::from(home).join(rest)),
            _ => Some(text.into()),
        }
    }

    /// The addresses of proxies, by name, with the file that each is from.
    pub fn proxies(&self) -> BTreeMap<&str, (&str, &Path)> {
        let mut all = BTreeMap::new();
        for file in self.files.iter().rev() {
            let these = file.proxies.iter();
            all.extend(these.map(|(name, at)| (&**name, (&**at, file.path.as_path()))));
        }
        all
    }

    /// The address of a proxy that is named, or that is an address already.
    ///
    /// # Errors
    /// There is no proxy of that name.
    pub fn proxy_address(&self, text: &str) -> Result<String, SettingsError> {
        let proxies = self.proxies();
        if let Some((address, _)) = proxies.get(text) {
            return Ok((*address).to_owned());
        }
        // What is no name either is for the parser of addresses to explain.
        if text.contains("://") || !schema::is_proxy_name(text) {
            return Ok(text.to_owned());
        }
        let known: Vec<&str> = proxies.keys().copied().collect();
        let known = match known.is_empty() {
            true => "none is known; `cedos join` adds one".to_owned(),
            false => format!("known are {}", known.join(", ")),
        };
        Err(SettingsError {
            path: None,
            text: format!("there is no proxy named `{text}`: {known}"),
        })
    }

    /// The addresses of the proxies to use, separated by spaces, the preferred one first: those that options name,
    /// else the default ones; `None` if `without`, or if none is set.
    ///
    /// # Errors
    /// There is no proxy of a name, or the addresses cannot be in one list.
    pub fn proxy(
        &self,
        options: &[String],
        without: bool,
    ) -> Result<Option<String>, SettingsError> {
        if without {
            return Ok(None);
        }
        let words =
            |text: &String| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        let mut named: Vec<String> = options.iter().flat_map(words).collect();
        if named.is_empty() {
            named.extend(self.default_proxies());
        }
        let named = named.iter().map(|text| self.proxy_address(text));
        let addresses: Vec<String> = named.collect::<Result<_, _>>()?;
        proxy_list(&addresses).map_err(|text| SettingsError { path: None, text })
    }

    /// The proxies that commands use, as the settings name them, the preferred one first.
    pub fn default_proxies(&self) -> Vec<String> {
        let chosen = self.chosen("proxy.default").unwrap_or_default();
        chosen.split_whitespace().map(str::to_owned).collect()
    }

    /// The proxies that the files name as the default ones, whatever the environment says.
    pub fn listed_proxies(&self) -> Vec<String> {
        let named = self
            .files
            .iter()
            .find_map(|file| file.values.get("proxy.default"));
        let words = named.map(|text| text.split_whitespace().map(str::to_owned));
        words.into_iter().flatten().collect()
    }

    /// The name of the proxy with this key in the settings, if it has one.
    pub fn proxy_name(&self, key: &PublicKey) -> Option<&str> {
        let proxies = self.proxies().into_iter();
        let mut same = proxies.filter(|(_, (known, _))| {
            let known = known.parse::<ServerAddress>();
            known.is_ok_and(|known| known.key == *key)
        });
        same.next().map(|(name, _)| name)
    }

    /// Uses the HTTP proxy of the files for streams of this process. One that the environment names wins by
    /// itself.
    pub fn use_http_proxy(&self) {
        let named = self
            .files
            .iter()
            .find_map(|file| file.values.get("proxy.http"));
        let used = d2tp_driver::use_http_proxy(named.map(String::as_str));
        used.expect("files were checked when they were read");
    }

    /// Sets whether this process asks local networks for its proxies.
    pub fn use_local_hints(&self) {
        let is_used = self.parsed("proxy.discover", str::parse);
        d2tp_driver::use_local_hints(is_used.unwrap_or(true));
    }

    /// The rules for networks in all files, the user's first.
    pub fn rules(&self) -> NetworkRules {
        NetworkRules {
            network: self.network_rules().map(|(rule, _)| rule.clone()).collect(),
        }
    }

    /// The rules for networks in all files, the user's first, with the file that each is from.
    pub fn network_rules(&self) -> impl Iterator<Item = (&NetworkRule, &Path)> {
        self.files.iter().flat_map(|file| {
            let path = file.path.as_path();
            file.rules.network.iter().map(move |rule| (rule, path))
        })
    }

    /// Changes the user's settings, in the file that [`user_file`] names. Returns its path.
    ///
    /// # Errors
    /// A change makes no sense ([`SettingsError`]), or the file cannot be written.
    pub fn change(changes: &[SettingsChange<'_>]) -> anyhow::Result<PathBuf> {
        let path = user_file()?;
        settings_file::change(&path, changes)?;
        Ok(path)
    }

    /// Replaces the user's settings.
    ///
    /// # Errors
    /// The text makes no sense ([`SettingsError`]), or the file cannot be written.
    pub fn replace(text: &str) -> anyhow::Result<PathBuf> {
        let path = user_file()?;
        UserSettings::check(&path, text)?;
        settings_file::replace(&path, text)?;
        Ok(path)
    }
}

/// The text of a list of proxies with these addresses; `None` if there are none.
///
/// # Errors
/// They cannot be in one list.
pub fn proxy_list(addresses: &[String]) -> Result<Option<String>, String> {
    match addresses {
        [] => Ok(None),
        // What is no address is for those who use it to explain.
        [one] => Ok(Some(one.clone())),
        several => {
            let list = several.join(" ").parse::<ServerList>();
            let list = list.map_err(|error| error.to_string())?;
            Ok(Some(list.to_string()))
        }
    }
}

/// The user's rules for networks: from this file, else from the usual ones.
///
/// # Errors
/// [`SettingsError`]: a file cannot be read, or says what nobody knows.
pub fn rules(file: Option<&Path>) -> anyhow::Result<NetworkRules> {
    Ok(UserSettings::load(file)?.rules())
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

    const ADDRESS: &str = "d2tp://192.0.2.1:4433/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc";

    fn settings(text: &str) -> Result<UserSettings, SettingsError> {
        let file = SettingsFile::parse(Path::new("/h/config.toml"), text)?;
        Ok(UserSettings { files: vec![file] })
    }

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

    #[test]
    fn an_unknown_key_or_table_is_refused_wherever_it_stands() {
        for (text, meant) in [
            ("[transfer]\npolcy = \"any\"\n", "`transfer.policy`"),
            ("[transfers]\npolicy = \"any\"\n", "`transfer.policy`"),
            ("policy = \"any\"\n", "`transfer.policy`"),
            ("[proxies]\n\"my proxy\" = \"d2tp://h:1/k\"\n", "letters"),
            ("[transfer]\nwithin = \"soon\"\n", "transfer.within"),
            ("[transfer]\nwithin = [1]\n", "transfer.within"),
        ] {
            let error = settings(text).unwrap_err().to_string();
            assert!(
                error.contains(meant) && error.contains("/h/config.toml"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_users_file_wins_over_the_systems_which_wins_over_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [
            folder.path().join("user.toml"),
            folder.path().join("system.toml"),
        ];
        std::fs::write(
            &paths[0],
            "[transfer]\nwithin = \"2h\"\n[[network]]\nssid = \"U\"\n",
        )
        .unwrap();
        std::fs::write(
            &paths[1],
            "[transfer]\nwithin = \"9h\"\npolicy = \"any\"\n[[network]]\nssid = \"S\"\n",
        )
        .unwrap();
        let all = UserSettings::read(&paths).unwrap();
        let file = |n: usize| SettingSource::File(paths[n].clone());
        assert_eq!(all.value("transfer.within"), (Some("2h".into()), file(0)));
        assert_eq!(all.value("transfer.policy"), (Some("any".into()), file(1)));
        let late = (Some("cell".into()), SettingSource::Default);
        assert_eq!(all.value("transfer.if_late"), late);
        assert_eq!(all.chosen("transfer.if_late"), None);
        let ssids = all
            .rules()
            .network
            .into_iter()
            .map(|rule| rule.ssid.unwrap());
        assert_eq!(ssids.collect::<Vec<_>>(), ["U", "S"]);
    }

    #[test]
    fn a_proxy_is_found_by_its_name_and_an_unknown_one_is_named() {
        let all = settings(&format!("[proxies]\nhome = \"{ADDRESS}\"\n")).unwrap();
        assert_eq!(
            all.proxy(&["home".into()], false).unwrap().unwrap(),
            ADDRESS
        );
        assert_eq!(
            all.proxy(&[ADDRESS.into()], false).unwrap().unwrap(),
            ADDRESS
        );
        assert_eq!(all.proxy(&["home".into()], true).unwrap(), None);
        let error = all.proxy(&["hmoe".into()], false).unwrap_err().to_string();
        assert!(error.contains("hmoe") && error.contains("home"), "{error}");
        assert_eq!(
            all.proxy(&["host:1/x".into()], false).unwrap().unwrap(),
            "host:1/x"
        );
    }

    #[test]
    fn several_proxies_are_a_list_with_the_preferred_one_first() {
        let other = ADDRESS.replace("/BwcH", "/CwcH");
        let all = |default: &str| {
            let text = format!(
                "[proxies]\nhome = \"{ADDRESS}\"\nwork = \"{other}\"\n[proxy]\ndefault = {default}\n"
            );
            settings(&text)
        };
        let both = format!("{other} {ADDRESS}");
        for default in ["[\"work\", \"home\"]", "\"work home\""] {
            let all = all(default).unwrap();
            assert_eq!(all.default_proxies(), ["work", "home"]);
            assert_eq!(all.proxy(&[], false).unwrap().unwrap(), both);
            let named = ["home".to_owned(), "work".to_owned()];
            let turned = format!("{ADDRESS} {other}");
            assert_eq!(all.proxy(&named, false).unwrap().unwrap(), turned);
            assert_eq!(
                all.proxy_name(&other.parse::<ServerAddress>().unwrap().key),
                Some("work")
            );
        }
        for wrong in [
            "[\"work\", 1]",
            "[]",
            "\"\"",
            "[\"my proxy\", \"d2tp://h:1/k\"]",
        ] {
            let error = all(wrong).unwrap_err().to_string();
            assert!(error.contains("proxy.default"), "{error}");
        }
    }

    #[test]
    fn a_list_of_proxies_is_written_as_an_array() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        for (text, line) in [
            ("home", "default = \"home\""),
            ("home work", "default = [\"home\", \"work\"]"),
            ("work", "default = \"work\""),
        ] {
            settings_file::change(&path, &[SettingsChange::Set("proxy.default", text)]).unwrap();
            let written = std::fs::read_to_string(&path).unwrap();
            assert!(written.contains(line), "{written}");
        }
    }

    #[test]
    fn a_change_keeps_comments_and_refuses_what_makes_no_sense() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cedos").join("config.toml");
        let change = |changes: &[SettingsChange<'_>]| settings_file::change(&path, changes);
        change(&[
            SettingsChange::Set("proxies.home", ADDRESS),
            SettingsChange::Set("proxy.default", "home"),
        ])
        .unwrap();
        let made = std::fs::read_to_string(&path).unwrap();
        let commented = format!("# mine\n{made}\n[transfer]\nwithin = \"2h\" # why\n");
        std::fs::write(&path, commented).unwrap();
        change(&[
            SettingsChange::Set("transfer.within", "3h"),
            SettingsChange::Set("budget.reset_day", "14"),
            SettingsChange::Set("agent.notifications", "false"),
        ])
        .unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for line in [
            "# mine",
            "within = \"3h\" # why",
            "reset_day = 14",
            "notifications = false",
        ] {
            assert!(text.contains(line), "no {line} in {text}");
        }
        for wrong in [
            SettingsChange::Set("transfer.polcy", "any"),
            SettingsChange::Set("transfer.policy", "sometimes"),
            SettingsChange::Set("proxies.x", "nowhere"),
            SettingsChange::Unset("transfer.polcy"),
        ] {
            assert!(change(&[wrong]).unwrap_err().is::<SettingsError>());
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        change(&[SettingsChange::Unset("transfer.within")]).unwrap();
        assert!(!std::fs::read_to_string(&path).unwrap().contains("within"));
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no half-written file remains");
    }
}
