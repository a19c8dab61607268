//! The user's and the machine's settings, as far as sockets use them: the default proxy, the device's key file,
//! and the HTTP proxy of streams. `cedos config` writes them (docs/settings.md).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::errno::SocketFault;

/// The settings of all users of this machine.
const SYSTEM_FILE: &str = "/etc/cedos/config.toml";

/// The settings in a file that concern sockets. Other keys are for other programs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SocketSettings {
    proxies: std::collections::BTreeMap<String, String>,
    proxy: ProxySettings,
    device: DeviceSettings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProxySettings {
    #[serde(deserialize_with = "words")]
    default: Option<String>,
    http: Option<String>,
    discover: Option<bool>,
}

/// Reads a text, or an array of texts as words of one.
fn words<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMore {
        One(String),
        More(Vec<String>),
    }
    Ok(Some(match OneOrMore::deserialize(deserializer)? {
        OneOrMore::One(text) => text,
        OneOrMore::More(words) => words.join(" "),
    }))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DeviceSettings {
    key_file: Option<String>,
}

fn absolute(name: &str) -> Option<PathBuf> {
    // XDG Base Directory Specification: relative paths must be ignored.
    let path = PathBuf::from(std::env::var_os(name)?);
    path.is_absolute().then_some(path)
}

fn said(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Where settings are; earlier files win.
fn paths() -> Vec<PathBuf> {
    if let Some(named) = said("CEDOS_CONFIG") {
        return vec![named.into()];
    }
    let folder = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
    let own = folder.map(|folder| folder.join("cedos").join("config.toml"));
    own.into_iter().chain([SYSTEM_FILE.into()]).collect()
}

/// Reads the files that are there.
///
/// # Errors
/// EINVAL: one cannot be read, or is no TOML.
fn read(paths: &[PathBuf]) -> Result<Vec<SocketSettings>, SocketFault> {
    let mut all = Vec::new();
    for path in paths {
        all.extend(read_one(path)?);
    }
    Ok(all)
}

fn read_one(path: &Path) -> Result<Option<SocketSettings>, SocketFault> {
    let shown = path.display();
    let wrong = |error: &dyn std::fmt::Display| {
        SocketFault::new(libc::EINVAL, format!("the settings in {shown}: {error}"))
    };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // What another user may not read is not for this program.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(wrong(&error)),
    };
    let settings = toml::from_str(&text).map_err(|error| wrong(&error.message()))?;
    Ok(Some(settings))
}

fn first<'a>(
    files: &'a [SocketSettings],
    of: impl Fn(&'a SocketSettings) -> Option<&'a String>,
) -> Option<String> {
    files.iter().find_map(of).cloned()
}

/// The addresses of the proxies that sockets may use, separated by spaces, the preferred one first: of
/// `$CEDOS_PROX`, else of the settings. Either may name the settings' proxies.
///
/// # Errors
/// The settings cannot be read.
pub(crate) fn default_proxy() -> Result<Option<String>, SocketFault> {
    let said = said("CEDOS_PROX");
    match said {
        // Nothing but an address is needed.
        Some(text) if text.contains("://") => Ok(Some(text)),
        said => Ok(proxy_in(&read(&paths())?, said)),
    }
}

fn proxy_in(files: &[SocketSettings], said: Option<String>) -> Option<String> {
    let named = said.or_else(|| first(files, |file| file.proxy.default.as_ref()))?;
    let address = |word: &str| {
        let known = first(files, |file| file.proxies.get(word));
        known.unwrap_or_else(|| word.to_owned())
    };
    let addresses: Vec<String> = named.split_whitespace().map(address).collect();
    Some(addresses.join(" "))
}

/// The device's key file of the settings.
///
/// # Errors
/// The settings cannot be read.
pub(crate) fn key_file() -> Result<Option<PathBuf>, SocketFault> {
    let named = first(&read(&paths())?, |file| file.device.key_file.as_ref());
    Ok(
        named.map(|text| match (text.strip_prefix("~/"), absolute("HOME")) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => text.into(),
        }),
    )
}

/// Uses what the settings say for this process: the HTTP proxy for streams, and whether local networks are asked for
/// proxies. Nothing, if somebody has decided that already.
///
/// # Errors
/// The settings cannot be read, or what they name is not the address of an HTTP proxy.
pub(crate) fn use_network_settings() -> Result<(), SocketFault> {
    if d2tp_driver::is_http_proxy_set() {
        return Ok(());
    }
    let files = read(&paths())?;
    let asks = files.iter().find_map(|file| file.proxy.discover);
    d2tp_driver::use_local_hints(asks.unwrap_or(true));
    let named = first(&files, |file| file.proxy.http.as_ref());
    let used = d2tp_driver::use_http_proxy(named.as_deref());
    used.map_err(|error| SocketFault::new(libc::EINVAL, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_file_wins_and_names_lead_to_addresses() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("it is written");
            path
        };
        let user = "[proxy]\ndefault = \"home\"\n[transfer]\npolicy = \"any\"\n[[network]]\nssid = \"a\"\n";
        let machine = "[proxies]\nhome = \"d2tp://h:1/K?stream=8443\"\n[proxy]\ndefault = \"other\"\n\
            http = \"http://p:3128\"\n";
        let (user, machine) = (file("user", user), file("machine", machine));
        let files = read(&[user, folder.path().join("none"), machine]).expect("they are read");
        let home = Some("d2tp://h:1/K?stream=8443".to_owned());
        assert_eq!(proxy_in(&files, None), home);
        assert_eq!(proxy_in(&files, Some("home".into())), home);
        assert_eq!(proxy_in(&files, Some("x".into())), Some("x".into()));
        let both = Some("x d2tp://h:1/K?stream=8443".to_owned());
        assert_eq!(proxy_in(&files, Some("x home".into())), both);
        let listed = file("listed", "[proxy]\ndefault = [\"x\", \"y\"]\n");
        let listed = read(&[listed]).expect("it is read");
        assert_eq!(proxy_in(&listed, None), Some("x y".into()));
        let http = first(&files, |file| file.proxy.http.as_ref());
        assert_eq!(http.as_deref(), Some("http://p:3128"));
        let broken = read(&[file("broken", "[proxy\n")]).expect_err("no TOML");
        assert_eq!(broken.errno, libc::EINVAL);
        assert!(broken.text.contains("broken"), "{}", broken.text);
    }
}
