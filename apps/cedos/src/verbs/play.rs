//! `cedos play URL -- PLAYER…`: serves a link like `cedos url`, and starts a player that reads it.

use std::process::{ExitCode, Stdio};
use std::time::Duration;

use clap::Args;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::timeout;
use url::Url;

use super::credentials::hide_passwords;
use super::transfer_args::stop_on_signal;
use super::url::{ServedLinks, StreamArgs, parse_url, report_failure};
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};

/// How long a player may take to end after it was asked to.
const FAREWELL: Duration = Duration::from_secs(3); // a guess

/// The argument of the player's command that stands for the link.
const PLACE: &str = "{}";

/// Play URL in a player, through a link on this machine: cedos play URL -- mpv
///
/// See `cedos url`. The link replaces {} in the player's arguments, or follows them.
///
/// The exit code is the player's; 1 if it could not be run, 3 if stopped.
#[derive(Debug, Args)]
pub struct PlayArgs {
    /// What to play: http:// or https://
    #[arg(value_parser = parse_url)]
    url: Url,

    #[command(flatten)]
    stream: StreamArgs,

    /// The player and its arguments
    #[arg(last = true, required = true)]
    player: Vec<String>,
}

/// Runs `cedos play` until the player ends.
pub async fn run(mut args: PlayArgs) -> ExitCode {
    hide_passwords();
    match play(&mut args).await {
        Ok(code) => code,
        Err(failure) => report_failure("play", &failure),
    }
}

async fn play(args: &mut PlayArgs) -> Result<ExitCode, TransferFailure> {
    let found = (args.stream.credentials).apply(std::slice::from_mut(&mut args.url));
    found.map_err(TransferFailure::usage)?;
    let (stop, stopped) = watch::channel(false);
    stop_on_signal(stop).map_err(|error| TransferFailure::error(format!("signals: {error}")))?;
    let urls = std::slice::from_ref(&args.url);
    let serving = ServedLinks::start(urls, &args.stream, stopped).await?;
    play_link(&args.player, serving, args.stream.json).await
}

/// Starts a player on a link that is served, and ends the link when the player ends. Returns the player's code.
async fn play_link(
    player: &[String],
    mut serving: ServedLinks,
    json: bool,
) -> Result<ExitCode, TransferFailure> {
    let words = with_link(player, &serving.links[0]);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).kill_on_drop(true);
    if json {
        // Ours is for programs to read.
        command.stdout(Stdio::null());
    }
    let mut player = command.spawn().map_err(|error| {
        let name = &words[0];
        TransferFailure::error(format!("cannot run {name}: {error}. Is it installed?"))
    })?;
    let ended = serving.serve_until(player.wait()).await;
    let code = match ended {
        Some(Ok(status)) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            // A signal ended it, as the shell would say it.
            code.unwrap_or(128)
        }
        Some(Err(_)) => TransferExit::Error as u8,
        None => {
            end(&mut player).await;
            TransferExit::Cancelled as u8
        }
    };
    serving.stop().await;
    Ok(ExitCode::from(code))
}

/// The player's words, the link among them.
pub(super) fn with_link(player: &[String], link: &str) -> Vec<String> {
    let named = player.iter().any(|word| word.contains(PLACE));
    let words = player.iter().map(|word| word.replace(PLACE, link));
    let behind = (!named).then(|| link.to_owned());
    words.chain(behind).collect()
}

/// Ends a player that is asked to end, and kills it if it does not.
pub(super) async fn end(player: &mut Child) {
    use nix::sys::signal::{Signal, kill};
    if let Some(id) = player.id() {
        let _ = kill(nix::unistd::Pid::from_raw(id as i32), Signal::SIGTERM);
    }
    if timeout(FAREWELL, player.wait()).await.is_err() {
        let _ = player.kill().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_goes_where_it_is_wanted() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        assert_eq!(
            with_link(&words("mpv --pause"), "L"),
            words("mpv --pause L")
        );
        let ffmpeg = words("ffmpeg -i {} -f null -");
        assert_eq!(with_link(&ffmpeg, "L"), words("ffmpeg -i L -f null -"));
    }
}
