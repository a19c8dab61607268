//! `cedos config`: shows the settings and their sources, and changes them.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use cedos_agent::fetch::report::human_bytes;
use cedos_agent::settings::schema::{self, SETTINGS};
use cedos_agent::settings::{
    SYSTEM_FILE, SettingSource, SettingsChange, SettingsError, UserSettings, user_file,
};
use cedos_terminal::{print_stderr, print_stdout};
use clap::{Args, Subcommand};
use d2tp_links::NetworkRule;
use serde_json::{Value, json};

/// The text of a new file, for `edit`.
const NEW_FILE: &str = "\
# Settings of cedos. `cedos config show` lists all keys with their values; docs/settings.md explains them.
#
# [transfer]
# policy = \"free-first\"      # free-only, free-first, balanced, fast, any
# within = \"6h\"              # the deadline of transfers that name none
#
# [[network]]
# ssid = \"Train\"
# class = \"metered\"          # free, metered, roaming
# cap = \"2G\"                 # in a month
";

/// Show, change and check the settings
///
/// Options of a command win over environment variables, those over ~/.config/cedos/config.toml, and that
/// over /etc/cedos/config.toml.
///
/// Exit codes: 0 done, 1 a file cannot be read or written, 2 a setting that does not exist or makes no
/// sense.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    verb: Option<ConfigVerb>,
    /// Print one JSON object per setting
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum ConfigVerb {
    /// Show every setting, its value, and where that is from (the default)
    Show {
        /// Show only this setting, such as transfer.policy
        key: Option<String>,
    },
    /// Set a value in your file
    Set {
        /// The setting, such as transfer.policy, or proxies.NAME
        key: String,
        /// The value of the setting
        #[arg(allow_hyphen_values = true)]
        value: String,
    },
    /// Take a setting out of your file, so that the default holds
    Unset {
        /// The setting
        key: String,
    },
    /// Open your file in $VISUAL or $EDITOR; what makes no sense is not saved
    Edit,
    /// Check files: those named, else yours and the system's
    Check {
        /// The settings files to check
        files: Vec<PathBuf>,
    },
}

/// Shows or changes the settings.
///
/// # Errors
/// A file cannot be read or written, or a setting makes no sense.
pub fn run(args: ConfigArgs) -> anyhow::Result<ExitCode> {
    match args.verb.unwrap_or(ConfigVerb::Show { key: None }) {
        ConfigVerb::Show { key } => show(key.as_deref(), args.json)?,
        ConfigVerb::Set { key, value } => {
            if key == "proxy.default" {
                // A name that the settings do not have would break every command.
                UserSettings::load(None)?.proxy(std::slice::from_ref(&value), false)?;
            }
            let path = UserSettings::change(&[SettingsChange::Set(&key, &value)])?;
            report_change(&key, &path, args.json);
        }
        ConfigVerb::Unset { key } => {
            let path = UserSettings::change(&[SettingsChange::Unset(&key)])?;
            report_change(&key, &path, args.json);
        }
        ConfigVerb::Edit => edit()?,
        ConfigVerb::Check { files } => check(&files, args.json)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what holds after a change: the environment may win over it.
fn report_change(key: &str, path: &Path, json: bool) {
    let known = schema::setting(key).ok();
    let by_environment = known.and_then(|setting| {
        let name = setting.environment?;
        std::env::var_os(name).filter(|text| !text.is_empty())?;
        Some(name)
    });
    if let Some(name) = by_environment {
        print_stderr(&format!("note: ${name} is set and wins over the file"));
    }
    match json {
        true => print_stdout(&json!({"key": key, "file": path}).to_string()),
        false => print_stderr(&format!("changed {key} in {}", path.display())),
    }
}

fn show(only: Option<&str>, json: bool) -> anyhow::Result<()> {
    let settings = UserSettings::load(None)?;
    if let Some((table, name)) = only.and_then(|key| key.split_once('.'))
        && table == schema::PROXIES_TABLE
    {
        let known = settings.proxies();
        let (address, path) = known
            .get(name)
            .with_context(|| format!("there is no proxy named {name}"))?;
        let source = SettingSource::File(path.to_path_buf());
        print_setting(only.unwrap_or_default(), Some(address), &source, None, json);
        return Ok(());
    }
    if let Some(key) = only {
        schema::setting(key).map_err(|text| SettingsError { path: None, text })?;
    }
    for setting in SETTINGS {
        if only.is_none_or(|key| key == setting.key) {
            let (text, source) = settings.value(setting.key);
            print_setting(
                setting.key,
                text.as_deref(),
                &source,
                Some(setting.meaning),
                json,
            );
        }
    }
    if only.is_some() {
        return Ok(());
    }
    for (name, (address, path)) in settings.proxies() {
        let key = format!("{}.{name}", schema::PROXIES_TABLE);
        let source = SettingSource::File(path.to_path_buf());
        print_setting(&key, Some(address), &source, None, json);
    }
    for (rule, path) in settings.network_rules() {
        print_rule(rule, path, json);
    }
    if !json && settings.paths().next().is_none() {
        let path = user_file()?;
        print_stderr(&format!("no file of settings yet ({})", path.display()));
    }
    Ok(())
}

fn print_setting(
    key: &str,
    text: Option<&str>,
    source: &SettingSource,
    meaning: Option<&str>,
    json: bool,
) {
    if json {
        let from = match source {
            SettingSource::Default => "default",
            SettingSource::File(_) => "file",
            SettingSource::Environment(_) => "environment",
        };
        let mut told =
            json!({"key": key, "value": text, "from": from, "source": source.to_string()});
        if let Some(meaning) = meaning {
            told["meaning"] = Value::from(meaning);
        }
        return print_stdout(&told.to_string());
    }
    match text {
        Some(text) => print_stdout(&format!("{key} = {text}  ({source})")),
        None => print_stdout(&format!("{key} is not set")),
    }
}

fn print_rule(rule: &NetworkRule, path: &Path, json: bool) {
    let class = rule.class().map_or("auto".to_owned(), |class| {
        format!("{class:?}").to_lowercase()
    });
    let (day, cutoff) = (rule.reset_day.number(), rule.cutoff.as_str());
    if json {
        let told = json!({
            "key": schema::NETWORK_TABLE,
            "value": {
                "of": rule.describe(), "class": class, "cap": rule.cap, "reset_day": day, "cutoff": cutoff,
            },
            "from": "file",
            "source": path,
        });
        return print_stdout(&told.to_string());
    }
    let cap = rule.cap.map(|cap| {
        let cap = human_bytes(cap);
        format!(", cap {cap} a month, reset_day {day}, cutoff {cutoff}")
    });
    let (of, cap, path) = (rule.describe(), cap.unwrap_or_default(), path.display());
    print_stdout(&format!("network ({of}) = {class}{cap}  ({path})"));
}

fn check(files: &[PathBuf], json: bool) -> anyhow::Result<()> {
    let is_named = !files.is_empty();
    let usual = [user_file()?, SYSTEM_FILE.into()];
    let files = if is_named { files } else { &usual };
    let mut checked = 0;
    for path in files {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_named => continue,
            Err(error) => bail!("cannot read {}: {error}", path.display()),
        };
        UserSettings::check(path, &text)?;
        checked += 1;
        match json {
            true => print_stdout(&json!({"file": path, "good": true}).to_string()),
            false => print_stdout(&format!("{} is good", path.display())),
        }
    }
    if checked == 0 && !json {
        print_stdout("there is no file of settings; the defaults hold");
    }
    Ok(())
}

fn edit() -> anyhow::Result<()> {
    let path = user_file()?;
    let editor = ["VISUAL", "EDITOR"].into_iter().find_map(std::env::var_os);
    let editor = editor.unwrap_or_else(|| "vi".into());
    let before = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => NEW_FILE.to_owned(),
        Err(error) => bail!("cannot read {}: {error}", path.display()),
    };
    let draft = tempfile::Builder::new()
        .prefix("cedos-config-")
        .suffix(".toml")
        .tempfile()?;
    std::fs::write(draft.path(), &before)?;
    // $EDITOR may have arguments, for the shell to read, as git and others have it.
    let mut command = Command::new("sh");
    let shown = editor.to_string_lossy();
    command.arg("-c").arg(format!("{shown} \"$1\"")).arg("sh");
    let status = command.arg(draft.path()).status();
    let status = status.with_context(|| format!("cannot run {shown}"))?;
    if !status.success() {
        bail!("{shown} ended with an error; nothing was saved. $EDITOR names another editor");
    }
    let after = std::fs::read_to_string(draft.path())?;
    if after == before {
        print_stderr("nothing changed");
        return Ok(());
    }
    if let Err(error) = UserSettings::check(&path, &after) {
        let (_, kept) = draft.keep().context("cannot keep what you wrote")?;
        let text = format!(
            "{}. It was not saved; what you wrote is in {}",
            error.text,
            kept.display()
        );
        return Err(SettingsError {
            path: error.path,
            text,
        }
        .into());
    }
    UserSettings::replace(&after)?;
    print_stderr(&format!("saved {}", path.display()));
    Ok(())
}
