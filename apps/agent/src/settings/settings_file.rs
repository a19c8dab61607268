//! One file of settings: read and checked, and changed without losing its comments.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use d2tp_driver::ServerAddress;
use d2tp_links::NetworkRules;
use toml::Value;
use toml_edit::{DocumentMut, Item, Table, value};

use super::schema::{self, NETWORK_TABLE, PROXIES_TABLE, SettingKind};

/// Settings that make no sense: in which file, and what is wrong. Programs exit with 2 for it.
#[derive(Debug)]
pub struct SettingsError {
    /// The file; none if the environment or a command says it.
    pub path: Option<PathBuf>,
    /// What is wrong, with the name that was probably meant.
    pub text: String,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "in {}: {}", path.display(), self.text),
            None => f.write_str(&self.text),
        }
    }
}

impl std::error::Error for SettingsError {}

/// The contents of one file of settings.
#[derive(Clone, Debug, Default)]
pub(super) struct SettingsFile {
    /// The path of the file.
    pub(super) path: PathBuf,
    /// Values by key, as texts.
    pub(super) values: BTreeMap<&'static str, String>,
    /// Addresses of proxies by name.
    pub(super) proxies: BTreeMap<String, String>,
    /// The user's rules for networks.
    pub(super) rules: NetworkRules,
}

impl SettingsFile {
    /// Reads and checks a file; none if it is not there.
    pub(super) fn read(path: &Path) -> Result<Option<SettingsFile>, SettingsError> {
        match std::fs::read_to_string(path) {
            Ok(text) => SettingsFile::parse(path, &text).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(SettingsError {
                path: Some(path.to_owned()),
                text: format!("cannot read it: {error}"),
            }),
        }
    }

    /// Checks the text of a file.
    pub(super) fn parse(path: &Path, text: &str) -> Result<SettingsFile, SettingsError> {
        let mut file = SettingsFile {
            path: path.to_owned(),
            ..SettingsFile::default()
        };
        file.take(text).map_err(|text| SettingsError {
            path: Some(path.to_owned()),
            text,
        })?;
        Ok(file)
    }

    fn take(&mut self, text: &str) -> Result<(), String> {
        let document: toml::Table =
            toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        for (name, value) in document {
            match (name.as_str(), value) {
                // Parsed from the whole text, for messages with lines.
                (NETWORK_TABLE, _) => {
                    self.rules = NetworkRules::parse(text).map_err(|error| error.to_string())?;
                }
                (PROXIES_TABLE, Value::Table(proxies)) => {
                    for (name, address) in proxies {
                        let address = address.as_str().unwrap_or_default();
                        check_proxy(&name, address)
                            .map_err(|why| format!("{PROXIES_TABLE}.{name}: {why}"))?;
                        self.proxies.insert(name, address.to_owned());
                    }
                }
                (_, Value::Table(table)) => {
                    for (key, value) in table {
                        self.take_value(&format!("{name}.{key}"), &value)?;
                    }
                }
                _ => return Err(schema::unknown_key(&name)),
            }
        }
        Ok(())
    }

    fn take_value(&mut self, key: &str, value: &Value) -> Result<(), String> {
        let setting = schema::setting(key)?;
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Boolean(switch) => switch.to_string(),
            Value::Array(words) if setting.kind == SettingKind::Proxy => {
                let words: Option<Vec<&str>> = words.iter().map(Value::as_str).collect();
                let words =
                    words.filter(|all| !all.iter().any(|w| w.contains(char::is_whitespace)));
                words
                    .ok_or_else(|| {
                        format!("{key}: expected a list of {}", setting.kind.describe())
                    })?
                    .join(" ")
            }
            Value::Array(rules) if setting.kind == SettingKind::TrafficRules => {
                let rules: Option<Vec<&str>> = rules.iter().map(Value::as_str).collect();
                rules
                    .ok_or_else(|| format!("{key}: expected {}", setting.kind.describe()))?
                    .join("; ")
            }
            _ => return Err(format!("{key}: expected {}", setting.kind.describe())),
        };
        let checked = setting.kind.check(&text);
        checked.map_err(|why| format!("{key}: {why}"))?;
        self.values.insert(setting.key, text);
        Ok(())
    }
}

fn check_proxy(name: &str, address: &str) -> Result<(), String> {
    if !schema::is_proxy_name(name) {
        return Err("a proxy's name has letters, digits, - and _ only".to_owned());
    }
    let parsed = address.parse::<ServerAddress>();
    parsed.map(drop).map_err(|error| error.to_string())
}

/// A change of a file of settings.
#[derive(Clone, Debug)]
pub enum SettingsChange<'a> {
    /// Gives a key a value: one of [`schema::SETTINGS`], or `proxies.NAME`.
    Set(&'a str, &'a str),
    /// Takes a key out.
    Unset(&'a str),
}

/// Changes a file, which is made if there is none. Nothing is written unless all of it makes sense.
///
/// # Errors
/// A change makes no sense ([`SettingsError`]), or the file cannot be read or written.
pub(super) fn change(path: &Path, changes: &[SettingsChange<'_>]) -> anyhow::Result<()> {
    let before = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => bail!("cannot read {}: {error}", path.display()),
    };
    SettingsFile::parse(path, &before)?;
    let mut document: DocumentMut = before.parse().context("cannot read the settings")?;
    for change in changes {
        let (key, text) = match change {
            SettingsChange::Set(key, text) => (*key, Some(*text)),
            SettingsChange::Unset(key) => (*key, None),
        };
        let in_words = |text| SettingsError { path: None, text };
        let kind = match key.split_once('.') {
            Some((PROXIES_TABLE, name)) => {
                if let Some(text) = text {
                    check_proxy(name, text).map_err(in_words)?;
                }
                None
            }
            _ => Some(schema::setting(key).map_err(in_words)?.kind),
        };
        if let (Some(kind), Some(text)) = (kind, text) {
            let checked = kind.check(text).map_err(|why| format!("{key}: {why}"));
            checked.map_err(in_words)?;
        }
        let (table, name) = key.split_once('.').expect("every key has a table");
        match text {
            Some(text) => {
                let table = document
                    .entry(table)
                    .or_insert_with(|| Item::Table(Table::new()));
                let table = table.as_table_like_mut().context("a table was expected")?;
                let new = match kind {
                    Some(SettingKind::Switch) => value(text == "true"),
                    Some(SettingKind::Proxy) if text.contains(char::is_whitespace) => {
                        value(text.split_whitespace().collect::<toml_edit::Array>())
                    }
                    Some(SettingKind::TrafficRules) => {
                        let rules = text
                            .split(';')
                            .map(str::trim)
                            .filter(|rule| !rule.is_empty());
                        value(rules.collect::<toml_edit::Array>())
                    }
                    Some(SettingKind::Day) => value(text.parse::<i64>().unwrap_or(1)),
                    _ => value(text),
                };
                // The old value keeps its comment.
                match table.get_mut(name).and_then(Item::as_value_mut) {
                    Some(old) => {
                        let decor = old.decor().clone();
                        *old = new.into_value().expect("made as a value");
                        *old.decor_mut() = decor;
                    }
                    None => drop(table.insert(name, new)),
                }
            }
            None => {
                let table = document.get_mut(table).and_then(Item::as_table_like_mut);
                table.and_then(|table| table.remove(name));
            }
        }
    }
    let after = document.to_string();
    SettingsFile::parse(path, &after)?;
    replace(path, &after)
}

/// Replaces a file in one step.
///
/// # Errors
/// It cannot be written.
pub(super) fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let shown = path.display();
    // A link to a file elsewhere remains one.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = target.parent().context("the settings need a directory")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let mode = std::fs::metadata(&target).map_or(0o600, |old| old.permissions().mode() & 0o777);
    let new = target.with_extension(format!("toml.{}", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(mode).open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &target)?;
        File::open(folder)?.sync_all()
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(&new);
        anyhow::anyhow!("cannot write {shown}: {error}")
    })
}
