//! `cedos browser`: has Firefox and Chromium hand their downloads over to the agent.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Context;
use cedos_terminal::{print_stderr, print_stdout};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::browser::host;
use crate::browser::install::BrowserFolders;

/// Have Firefox and Chromium hand their downloads over to the agent
///
/// `cedos browser install` tells the browsers of this user which program takes downloads, and writes the
/// extension, which you then load in the browser.
///
/// Exit codes: 0 done, 1 error, 2 usage.
#[derive(Debug, Args)]
pub struct BrowserArgs {
    #[command(subcommand)]
    verb: BrowserVerb,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum BrowserVerb {
    /// Tell the browsers which program takes downloads, and write the extension
    Install,
    /// Remove what `install` wrote
    Remove,
    /// Take downloads from a browser: it starts this by itself
    #[command(hide = true)]
    Host {
        /// What the browser says of the extension
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        _arguments: Vec<OsString>,
    },
}

/// Carries the verb out.
///
/// # Errors
/// A file cannot be written, or the browser sends what is no message.
pub async fn run(args: BrowserArgs) -> anyhow::Result<ExitCode> {
    match args.verb {
        BrowserVerb::Install => {
            let folders = BrowserFolders::from_env()?;
            let cedos = std::env::current_exe().context("the path of this program")?;
            let browsers = folders.install(&cedos)?;
            let extension = folders.extension();
            if args.json {
                let told = json!({"browsers": browsers, "extension": extension});
                print_stdout(&told.to_string());
                return Ok(ExitCode::SUCCESS);
            }
            let browsers = browsers.join(", ");
            print_stdout(&extension.display().to_string());
            print_stderr(&format!(
                "{browsers} can hand downloads over now. Load the extension from that folder: in Chromium at \
                 chrome://extensions (Developer mode, Load unpacked), in Firefox at about:debugging (This \
                 Firefox, Load Temporary Add-on)"
            ));
        }
        BrowserVerb::Remove => {
            let browsers = BrowserFolders::from_env()?.remove()?;
            if args.json {
                print_stdout(&json!({"browsers": browsers}).to_string());
                return Ok(ExitCode::SUCCESS);
            }
            print_stderr(&match browsers.is_empty() {
                true => "No browser of this user knew of it".to_owned(),
                false => format!(
                    "Removed from {}. Remove the extension in the browser, too",
                    browsers.join(", ")
                ),
            });
        }
        BrowserVerb::Host { .. } => host::serve().await?,
    }
    Ok(ExitCode::SUCCESS)
}
