//! `cedos agent --install` and `--uninstall`: the systemd user unit with which the agent starts with the
//! session.
//!
//! ```text
//!  install:   write ~/.config/systemd/user/cedos-agent.service ─▶ enable ─▶ end an agent that runs ─▶ start
//!  uninstall: stop and disable ─▶ remove the file; the queue stays, and commands start the agent by need
//! ```

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::agent::{SOCKET_VARIABLE, is_locked, socket_path};
use cedos_agent::settings::config_directory;
use cedos_terminal::{print_stderr, print_stdout};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;
use tokio::time::{Instant, sleep};

/// The unit of the packages, whose command and comments are replaced.
const PACKAGED: &str = include_str!("../../../../packaging/systemd/cedos-agent.service");
/// The name of the unit.
const UNIT: &str = "cedos-agent.service";
/// The first line of a file that may be replaced and removed.
const MARK: &str = "# Written by `cedos agent --install`; `cedos agent --uninstall` removes it.";

/// How long an agent that runs may take to end: it saves its transfers first.
const END_MAX: Duration = Duration::from_secs(30); // as TimeoutStopSec of the unit
/// The interval at which an ending agent is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long the unit's agent may take until it answers.
const START_MAX: Duration = Duration::from_secs(10); // a guess: a busy machine

/// Variables that the agent reads, which hold for the unit as they hold now.
const VARIABLES: [&str; 5] = [
    SOCKET_VARIABLE,
    "CEDOS_CONFIG",
    "CEDOS_KEY_FILE",
    "CEDOS_PROX",
    STATE_VARIABLE,
];
/// The variables among these whose value is the name of a file.
const PATH_VARIABLES: [&str; 3] = [SOCKET_VARIABLE, "CEDOS_CONFIG", "CEDOS_KEY_FILE"];
/// The variable that names the folder for states. A path in it that is not absolute is to be ignored (XDG Base
/// Directory Specification).
const STATE_VARIABLE: &str = "XDG_STATE_HOME";
/// Options of the agent whose value is the name of a file.
const PATH_OPTIONS: [&str; 2] = ["--config", "--key"];

/// Whether the agent starts with the session of this user, as far as the links of enabled units tell.
pub fn starts_with_session() -> bool {
    let folders = [
        config_directory()
            .ok()
            .map(|folder| folder.join("systemd/user")),
        Some("/etc/systemd/user".into()),
    ];
    let wants = ["default.target.wants", "graphical-session.target.wants"];
    folders.into_iter().flatten().any(|folder: PathBuf| {
        (wants.iter()).any(|wants| folder.join(wants).join(UNIT).symlink_metadata().is_ok())
    })
}

/// Has the agent start with the session, with the options of this command line, and starts it.
///
/// # Errors
/// There is no systemd for this user, or it refuses.
pub async fn install() -> anyhow::Result<ExitCode> {
    let path = unit_path()?;
    refuse_foreign(&path)?;
    let arguments = std::env::args_os().skip(1).collect();
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let mut variables = Vec::new();
    for name in VARIABLES {
        let value = std::env::var_os(name).map(|value| for_unit(name, value));
        variables.extend(value.transpose()?.flatten().map(|value| (name, value)));
    }
    let text = unit(&program, arguments, variables)?;
    systemctl(&["daemon-reload"]).await?; // whether it is there, before anything is written
    let folder = path.parent().expect("a unit is in a folder");
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, text))
        .with_context(|| format!("cannot write {}", path.display()))?;
    systemctl(&["daemon-reload"]).await?;
    systemctl(&["enable", UNIT]).await?;
    end_running_agent().await?;
    systemctl(&["restart", UNIT]).await?;
    // With `CEDOS_AGENT=none` it is not known where.
    let runs = match socket_path() {
        Ok(socket) => {
            until_it_answers(&socket).await?;
            "The agent runs, and"
        }
        Err(_) => "The agent",
    };
    print_stdout(&format!(
        "{runs} starts with your session: {}",
        path.display()
    ));
    print_stderr(
        "It also runs while you are not logged in, if you allow that: loginctl enable-linger. To take it back: \
         cedos agent --uninstall",
    );
    Ok(ExitCode::SUCCESS)
}

/// Ends the agent, and no longer starts it with the session.
///
/// # Errors
/// The unit is somebody else's, or systemd refuses.
pub async fn uninstall() -> anyhow::Result<ExitCode> {
    let path = unit_path()?;
    if !path.exists() {
        print_stderr(&format!(
            "The agent was not installed: there is no {}",
            path.display()
        ));
        return Ok(ExitCode::SUCCESS);
    }
    refuse_foreign(&path)?;
    // Without systemd the file alone is left.
    let has_systemd = match systemctl(&["disable", "--now", UNIT]).await {
        Ok(()) => true,
        Err(error) if error.is::<NoUserSystemd>() => false,
        Err(error) => return Err(error),
    };
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    if has_systemd {
        systemctl(&["daemon-reload"]).await?;
    }
    print_stdout(&format!("Removed {}", path.display()));
    print_stderr("Transfers stay in the queue; commands start the agent when they need it");
    Ok(ExitCode::SUCCESS)
}

fn unit_path() -> anyhow::Result<PathBuf> {
    Ok(config_directory()?.join("systemd/user").join(UNIT))
}

/// Refuses to touch a unit that the user wrote.
fn refuse_foreign(path: &Path) -> anyhow::Result<()> {
    match std::fs::read_to_string(path) {
        Ok(text) if !text.starts_with(MARK) => bail!(
            "{} was not written by `cedos agent --install`; move it away first",
            path.display()
        ),
        _ => Ok(()),
    }
}

/// The value of a variable for the unit; none if it says nothing there.
fn for_unit(name: &str, value: OsString) -> std::io::Result<Option<OsString>> {
    if value.is_empty() || value == "none" {
        return Ok(None);
    }
    if name == STATE_VARIABLE {
        return Ok(Some(value).filter(|value| Path::new(value).is_absolute()));
    }
    if PATH_VARIABLES.contains(&name) {
        return Ok(Some(std::path::absolute(value)?.into_os_string()));
    }
    Ok(Some(value))
}

/// The text of the unit. `arguments`: this command line without the program.
fn unit(
    program: &Path,
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, OsString)>,
) -> anyhow::Result<String> {
    let mut words = vec![program.as_os_str().to_owned()];
    words.extend(with_absolute_paths(arguments)?);
    let words: anyhow::Result<Vec<String>> = words.iter().map(|word| quoted(word)).collect();
    let mut text = format!("{MARK}\n");
    let mut is_command = false;
    for line in PACKAGED.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with("ExecStart=") {
            is_command = true;
            text += &format!(
                "ExecStart={}\n",
                words.as_ref().map_err(|e| anyhow!("{e}"))?.join(" ")
            );
            for (name, value) in &variables {
                let mut assignment = OsString::from(format!("{name}="));
                assignment.push(value);
                text += &format!("Environment={}\n", quoted(&assignment)?.replace("$$", "$"));
            }
        }
        let continues = line.ends_with('\\');
        if !is_command {
            text += line;
            text.push('\n');
        }
        is_command &= continues;
    }
    Ok(text)
}

/// The options for the unit: without `--install`, and with files that are found from any directory.
fn with_absolute_paths(arguments: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let mut absolute = Vec::new();
    let mut is_path = false;
    for argument in arguments {
        if std::mem::take(&mut is_path) {
            absolute.push(std::path::absolute(&argument)?.into_os_string());
            continue;
        }
        let text = argument.to_string_lossy();
        let assigned = text
            .split_once('=')
            .filter(|(name, _)| PATH_OPTIONS.contains(name));
        if text == "--install" {
            continue;
        }
        if let Some((name, path)) = assigned {
            let mut whole = OsString::from(format!("{name}="));
            whole.push(std::path::absolute(path)?);
            absolute.push(whole);
            continue;
        }
        is_path = PATH_OPTIONS.contains(&&*text);
        absolute.push(argument);
    }
    Ok(absolute)
}

/// A word as systemd reads it back (systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers").
fn quoted(word: &std::ffi::OsStr) -> anyhow::Result<String> {
    let text = std::str::from_utf8(word.as_bytes()).context("a unit file is UTF-8")?;
    if text.contains(['\n', '\r', '\0']) {
        bail!("a line break cannot be in a unit file");
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '%' | '$' => quoted.extend([c, c]),
            c => quoted.push(c),
        }
    }
    Ok(quoted + "\"")
}

/// There is no systemd of this user, in words.
#[derive(Debug)]
struct NoUserSystemd(String);

impl std::fmt::Display for NoUserSystemd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "systemd does not run for this user, so the agent cannot start with the session. Commands start it when \
             they need it; to have it always, run `cedos agent` from what starts your session ({})",
            self.0
        )
    }
}

impl std::error::Error for NoUserSystemd {}

async fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("systemctl")
        .arg("--user")
        .args(arguments)
        .output()
        .await
        .map_err(|error| NoUserSystemd(format!("systemctl: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let text = text.trim();
    if text.contains("connect to bus") || text.contains("not been booted with systemd") {
        let said = text.lines().next().unwrap_or_default();
        return Err(NoUserSystemd(said.to_owned()).into());
    }
    bail!("systemctl --user {}: {text}", arguments.join(" "))
}

/// Waits until an agent answers at the socket.
async fn until_it_answers(socket: &Path) -> anyhow::Result<()> {
    let until = Instant::now() + START_MAX;
    while AgentApiClient::connect_to(socket).await.is_none() {
        if Instant::now() > until {
            bail!(
                "the agent was started, but does not answer at {}: `journalctl --user -u cedos-agent` shows why",
                socket.display()
            );
        }
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}

/// Ends an agent that a command or the user started, so that the unit's gets the socket. Its transfers go on
/// in that.
async fn end_running_agent() -> anyhow::Result<()> {
    // Commands that use no agent (`CEDOS_AGENT=none`) leave the one alone that runs.
    let Ok(socket) = socket_path() else {
        return Ok(());
    };
    let Some(mut agent) = AgentApiClient::connect_to(&socket).await else {
        return Ok(());
    };
    let hello = agent.ask(&AgentRequest::Hello).await;
    let hello = hello.map_err(|failure| anyhow!(failure.text))?;
    let pid = hello["pid"]
        .as_i64()
        .and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.context("the agent that runs does not say which process it is")?;
    drop(agent);
    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    let until = Instant::now() + END_MAX;
    // The unit's own agent may be started again by systemd at once; the restart that follows does no harm.
    while is_locked(&socket) && kill(Pid::from_raw(pid), None).is_ok() {
        if Instant::now() > until {
            bail!("the agent that runs (process {pid}) does not end; end it, and run this again");
        }
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_unit_is_the_packages_with_this_program_and_these_options() {
        let program = Path::new("/opt/my cedos/100%/cedos");
        let arguments = words("agent --install --metrics 127.0.0.1:9646 --when-free=echo~$HOME");
        let variables = vec![("CEDOS_CONFIG", OsString::from("/a b/$c%d"))];
        let text = unit(program, arguments, variables).expect("a unit");
        assert!(text.starts_with(MARK), "{text}");
        let command = "ExecStart=\"/opt/my cedos/100%%/cedos\" \"agent\" \"--metrics\" \"127.0.0.1:9646\" \
                       \"--when-free=echo~$$HOME\"\n";
        assert!(text.contains(command), "{text}");
        assert!(
            text.contains("Environment=\"CEDOS_CONFIG=/a b/$c%%d\"\n"),
            "{text}"
        );
        assert_eq!(text.matches("ExecStart=").count(), 1);
        for kept in [
            "[Unit]",
            "[Service]",
            "Restart=always",
            "WantedBy=default.target",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert!(!text.contains(".cargo"), "{text}");
        assert!(!text.contains("cedos-unmetered.target"), "{text}");
    }

    #[test]
    fn files_in_variables_are_found_from_any_directory() {
        let here = std::env::current_dir().expect("a directory");
        let value = |name, value: &str| for_unit(name, value.into()).expect("a value");
        for name in PATH_VARIABLES {
            let expected = here.join("a/b").into_os_string();
            assert_eq!(value(name, "a/b"), Some(expected), "{name}");
            assert_eq!(value(name, "none"), None, "{name}");
        }
        assert_eq!(value("CEDOS_PROX", "h:1/K"), Some("h:1/K".into()));
        assert_eq!(value(STATE_VARIABLE, "/s"), Some("/s".into()));
        assert_eq!(value(STATE_VARIABLE, "s"), None);
    }

    #[test]
    fn files_in_options_are_found_from_any_directory() {
        let here = std::env::current_dir().expect("a directory");
        let absolute = with_absolute_paths(words("agent --key my.key --config=a/b.toml --install"));
        let expected = [
            "agent".into(),
            "--key".into(),
            here.join("my.key").into_os_string(),
            format!("--config={}", here.join("a/b.toml").display()).into(),
        ];
        assert_eq!(absolute.expect("paths"), expected);
    }
}
