//! `cedos page`: prints or opens the link of the agent's page.

use std::process::{ExitCode, Stdio};

use anyhow::{Context, anyhow, bail};
use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use serde_json::json;
use tokio::process::Command;

use super::agent_start;

/// The program that opens a link in the desktop's browser (xdg-utils).
const OPENER: &str = "xdg-open";

/// Print the link of a page that shows transfers, networks and spending in a browser
///
/// The page is served by the agent, which is started if none runs, to this machine only. The link is
/// secret: whoever knows it can see and control this user's transfers. It stays the same when the agent
/// restarts.
///
/// Exit codes: 0 done, 1 error, 2 usage.
#[derive(Debug, Args)]
pub struct PageArgs {
    /// Open the page in the browser of this desktop, and print nothing
    #[arg(long)]
    open: bool,

    /// Make a new link, so that the one known until now no longer works
    #[arg(long)]
    new_link: bool,

    /// Close the page: its link no longer works
    #[arg(long, conflicts_with_all = ["open", "new_link"])]
    close: bool,

    /// Print one JSON object
    #[arg(long, conflicts_with = "open")]
    json: bool,
}

/// Prints the link, or opens or closes the page.
///
/// # Errors
/// The agent cannot be started, or the browser.
pub async fn run(args: PageArgs) -> anyhow::Result<ExitCode> {
    let mut agent = agent_start::connect_or_start().await?;
    if args.close {
        ask(&mut agent, &AgentRequest::PageClose).await?;
        match args.json {
            true => print_stdout(&json!({"link": null}).to_string()),
            false => print_stderr("The page is closed; `cedos page` opens it with a new link"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let request = AgentRequest::Page {
        new_link: args.new_link,
        entry: args.open,
    };
    let answer = ask(&mut agent, &request).await?;
    if args.open {
        let entry = answer["entry"]
            .as_str()
            .context("the agent named no link")?;
        open(entry).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let link = answer["link"].as_str().context("the agent named no link")?;
    print_stdout(&match args.json {
        true => json!({"link": link}).to_string(),
        false => link.to_owned(),
    });
    Ok(ExitCode::SUCCESS)
}

async fn ask(
    agent: &mut AgentApiClient,
    request: &AgentRequest,
) -> anyhow::Result<serde_json::Value> {
    let answer = agent.ask(request).await;
    answer.map_err(|failure| anyhow!(failure.text))
}

/// Opens a link that works once: other users can read the command line of a browser.
async fn open(entry: &str) -> anyhow::Result<()> {
    let opened = Command::new(OPENER)
        .arg(entry)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .await;
    match opened {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{OPENER} opened no browser ({status}); `cedos page` prints the link"),
        Err(error) => bail!("cannot run {OPENER}: {error}; `cedos page` prints the link"),
    }
}
