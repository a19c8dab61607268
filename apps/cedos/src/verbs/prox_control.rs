//! `cedos prox invite`, `client`, `feeds`, `status`, `reload`, `drain`: the operator's commands to a running proxy.

use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::fetch::option_parsers::{parse_bytes, parse_span};
use cedos_agent::fetch::report::human_bytes;
use cedos_prox::{ClientLimits, ControlRequest};
use cedos_terminal::{print_stderr, print_stdout, print_stdout_white_on_black};
use clap::{Args, Subcommand};
use fast_qr::{ECL, QRBuilder};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::get::parse_rate;
use super::log_levels::log_warnings;
use super::prox_feeds::{self, FeedsArgs};
use super::which_proxy::WhichProxy;

/// The interval of looks at a proxy that its devices leave.
const DRAIN_LOOK_EVERY: Duration = Duration::from_millis(500);
/// The longest time that an invitation may be open.
const EXPIRES_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Light modules around a QR code, as readers need them (ISO/IEC 18004 §6.3.8).
const QUIET_ZONE: usize = 4;

/// What an operator does beside running a proxy.
#[derive(Debug, Subcommand)]
pub enum ProxVerb {
    Invite(InviteArgs),
    Client(ClientArgs),
    Feeds(FeedsArgs),
    Status(StatusArgs),
    Reload(ReloadArgs),
    Drain(DrainArgs),
    /// Changes the system's network for a proxy in its sandbox
    #[command(hide = true, name = TUNNEL_HELPER_VERB)]
    TunnelHelper(TunnelHelperArgs),
}

/// The verb by which a proxy starts its helper for inner networks.
pub const TUNNEL_HELPER_VERB: &str = "tunnel-helper";

/// Options of the hidden verb that serves as the proxy's tunnel helper.
#[derive(Debug, Args)]
pub struct TunnelHelperArgs {
    /// The user who may attach to the device
    #[arg(long)]
    owner: u32,

    /// Inner networks
    #[arg(value_delimiter = ',', required = true)]
    nets: Vec<ipnet::IpNet>,
}

/// Invite a device: print the line that it joins with, and a QR code of it on a terminal
///
/// The line works for one device, once, until it expires or is withdrawn. Whoever has it can become a client:
/// give it to nobody else. On the device: cedos join LINE, or cedos join - and paste it.
#[derive(Debug, Args)]
pub struct InviteArgs {
    /// What the client will be called [default: as the device calls itself]
    #[arg(long = "for", value_name = "NAME", group = "new")]
    name: Option<String>,

    /// How long the invitation is open
    #[arg(long, value_name = "SPAN", default_value = "10m", value_parser = parse_expiry)]
    expires: Duration,

    /// The host in the line, by which devices reach the proxy [default: the proxy's --public-host, or its
    /// address]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,

    /// List the invitations that are open, instead of making one
    #[arg(long, conflicts_with_all = ["new", "host"])]
    list: bool,

    /// Withdraw an open invitation, by its number in --list or by the name of its client
    #[arg(long, value_name = "INVITATION", conflicts_with_all = ["new", "host", "list"])]
    withdraw: Option<String>,

    #[command(flatten)]
    which: WhichProxy,

    /// Print one JSON object: `line`, `id`, `expires`; with --list, one per invitation
    #[arg(long)]
    json: bool,
}

/// Show the address of a proxy that runs, and what it holds
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    which: WhichProxy,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The limits of one client.
#[derive(Debug, Args)]
#[group(id = "change", required = true, multiple = true)]
struct LimitArgs {
    /// The maximum number of simultaneous flows
    #[arg(long, value_name = "N")]
    flows: Option<u32>,
    /// Bytes of copies and uploads that the proxy holds for it, such as 500M or 2GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pinned: Option<u64>,
    /// Bytes a second to it, such as 2M; none: as many as possible
    #[arg(long, value_name = "RATE", value_parser = parse_rate_or_none)]
    down: Option<u64>,
    /// Bytes a second from it, such as 500k; none: as many as possible
    #[arg(long, value_name = "RATE", value_parser = parse_rate_or_none)]
    up: Option<u64>,
    /// Bytes in a calendar month (UTC), both directions together, such as 100G; none: any number
    #[arg(long, value_name = "SIZE", value_parser = parse_month)]
    month: Option<u64>,
    /// The furthest deadline that is accepted, such as 2d or 12h
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    deadline: Option<Duration>,
    /// Hold it to the limits of all clients again
    #[arg(long, conflicts_with_all = ["flows", "pinned", "down", "up", "month", "deadline"])]
    reset: bool,
}

impl LimitArgs {
    /// The limits that change; none: all become those of all clients again.
    fn limits(&self) -> Option<ClientLimits> {
        (!self.reset).then(|| ClientLimits {
            flows: self.flows,
            pinned_bytes: self.pinned,
            down_bytes_per_s: self.down,
            up_bytes_per_s: self.up,
            month_bytes: self.month,
            deadline_s: self.deadline.map(|span| span.as_secs().max(1)),
        })
    }
}

/// A length of time in its largest whole unit.
fn span_text(span: Duration) -> String {
    let seconds = span.as_secs();
    let units = [(86_400, "d"), (3_600, "h"), (60, "m")];
    let whole = units
        .iter()
        .find(|(unit, _)| seconds > 0 && seconds.is_multiple_of(*unit));
    match whole {
        Some((unit, name)) => format!("{}{name}", seconds / unit),
        None => format!("{seconds}s"),
    }
}

/// A rate, or 0 for none.
fn parse_rate_or_none(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(0),
        text => parse_rate(text),
    }
}

/// The bytes of a month, or 0 for any number.
fn parse_month(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(0),
        text => match parse_bytes(text)? {
            0 => Err("to let it transfer nothing, remove the client; none: any number".to_owned()),
            bytes => Ok(bytes),
        },
    }
}

/// Show, limit, rename and remove clients of a proxy that runs
#[derive(Debug, Args)]
pub struct ClientArgs {
    #[command(subcommand)]
    verb: ClientVerb,
}

/// Read the settings of a proxy that runs with --config again
///
/// Says which have changed, and which are taken only when it starts again. If they make no sense, nothing changes.
#[derive(Debug, Args)]
pub struct ReloadArgs {
    #[command(flatten)]
    which: WhichProxy,

    /// Print one JSON object: `taken`, `at_restart`
    #[arg(long)]
    json: bool,
}

/// Have the devices go on at another node of the proxy, then end this one
///
/// Downloads move with their sessions if the nodes share a store, and a byte of none is requested twice. Sessions with
/// tunnels, uploads, or copies that are still being fetched stay until those are over, or --within has passed. Then
/// the node ends as by SIGTERM.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// IP address and UDP port of that node [default: the nearest that each device knows]
    #[arg(long, value_name = "ADDR")]
    to: Option<SocketAddr>,

    /// The time within which sessions move to another node
    #[arg(long, value_name = "SPAN", default_value = "10m", value_parser = parse_span)]
    within: Duration,

    #[command(flatten)]
    which: WhichProxy,
}

#[derive(Debug, Subcommand)]
enum ClientVerb {
    /// List the clients: names, keys, when they were enrolled and last seen
    List {
        #[command(flatten)]
        which: WhichProxy,
        /// Print one JSON object per client
        #[arg(long)]
        json: bool,
    },
    /// Show one client
    Show {
        /// The client's name, its key, or at least the first 6 characters of the key
        #[arg(allow_hyphen_values = true)]
        client: String,
        #[command(flatten)]
        which: WhichProxy,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Give a client another name
    Rename {
        /// The client's name, its key, or at least the first 6 characters of the key
        #[arg(allow_hyphen_values = true)]
        client: String,
        /// The client's new name
        name: String,
        #[command(flatten)]
        which: WhichProxy,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Change what a client may do; it holds at once, for running transfers too
    ///
    /// What is not named stays as it is. Limits for all clients are in the file of `cedos prox --config`.
    Limit {
        /// The client's name, its key, or at least the first 6 characters of the key
        #[arg(allow_hyphen_values = true)]
        client: String,
        #[command(flatten)]
        limits: LimitArgs,
        #[command(flatten)]
        which: WhichProxy,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Remove a client: its sessions end at once, and what the proxy holds for it is freed
    Remove {
        /// The client's name, its key, or at least the first 6 characters of the key
        #[arg(allow_hyphen_values = true)]
        client: String,
        #[command(flatten)]
        which: WhichProxy,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

fn parse_expiry(text: &str) -> Result<Duration, String> {
    let span = parse_span(text)?;
    match span <= EXPIRES_MAX {
        true => Ok(span),
        false => Err("an invitation is open for 30 days at most".to_owned()),
    }
}

/// Carries it out.
///
/// # Errors
/// No such proxy runs, or it says no.
pub async fn run(verb: ProxVerb) -> anyhow::Result<ExitCode> {
    match verb {
        ProxVerb::Invite(args) => invite(args).await?,
        ProxVerb::Client(args) => client(args.verb).await?,
        ProxVerb::Feeds(args) => prox_feeds::feeds(args).await?,
        ProxVerb::Status(args) => status(args).await?,
        ProxVerb::Reload(args) => reload(args).await?,
        ProxVerb::Drain(args) => drain(args).await?,
        ProxVerb::TunnelHelper(args) => {
            log_warnings("cedos prox");
            cedos_prox::serve_tunnel_helper(&args.nets, args.owner).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the invitations that are open.
async fn list_invitations(args: &InviteArgs) -> anyhow::Result<()> {
    let answer = args.which.ask(ControlRequest::Invitations).await?;
    let open = answer["invitations"].as_array();
    let open = open.map(Vec::as_slice).unwrap_or_default();
    if open.is_empty() && !args.json {
        print_stderr("no invitation is open");
    }
    open.iter()
        .for_each(|invitation| show_invitation(invitation, args.json));
    Ok(())
}

fn show_invitation(invitation: &Value, json: bool) {
    let expires = Timestamp::from_second(invitation["expires_s"].as_i64().unwrap_or_default());
    let expires = expires.unwrap_or_default();
    let (id, name) = (&invitation["id"], &invitation["name"]);
    if json {
        let told = json!({"id": id, "name": name, "expires": expires.to_string()});
        return print_stdout(&told.to_string());
    }
    let name = name
        .as_str()
        .map_or(String::new(), |name| format!(" for {name}"));
    let until = expires.to_zoned(jiff::tz::TimeZone::system());
    let (id, until) = (id.as_str().unwrap_or("?"), until.strftime("%Y-%m-%d %H:%M"));
    print_stdout(&format!("{id}{name}, open until {until}"));
}

/// Withdraws an invitation that is open.
async fn withdraw(args: &InviteArgs, invitation: &str) -> anyhow::Result<()> {
    let invitation = invitation.to_owned();
    let answer = (args.which)
        .ask(ControlRequest::Withdraw { invitation })
        .await?;
    let was = &answer["invitation"];
    if args.json {
        let told = json!({"withdrawn": true, "id": was["id"], "name": was["name"]});
        print_stdout(&told.to_string());
        return Ok(());
    }
    let name = was["name"].as_str();
    let name = name.map_or(String::new(), |name| format!(" for {name}"));
    let id = was["id"].as_str().unwrap_or("?");
    print_stdout(&format!(
        "withdrew the invitation {id}{name}; its line is worthless now"
    ));
    Ok(())
}

async fn invite(args: InviteArgs) -> anyhow::Result<()> {
    if args.list {
        return list_invitations(&args).await;
    }
    if let Some(invitation) = &args.withdraw {
        return withdraw(&args, invitation).await;
    }
    let request = ControlRequest::Invite {
        name: args.name,
        expires_s: args.expires.as_secs().max(1),
        host: args.host,
    };
    let answer = args.which.ask(request).await?;
    let line = answer["line"].as_str().context("the proxy gave no line")?;
    let expires = answer["expires_s"].as_i64().unwrap_or_default();
    let expires = Timestamp::from_second(expires).unwrap_or_default();
    let proxy = line.split('#').next().unwrap_or_default();
    let host = proxy
        .parse::<d2tp_driver::ServerAddress>()
        .map(|address| address.host);
    let reach = host.ok().and_then(|host| reach_of(&host));
    if args.json {
        let told = json!({"line": line, "id": answer["id"], "expires": expires.to_string(),
                          "note": reach});
        print_stdout(&told.to_string());
        return Ok(());
    }
    if std::io::stdout().is_terminal()
        && let Some(code) = qr_code(line)
    {
        match forbids_colours() {
            true => print_stdout(&code),
            // Readers want dark modules on light ground, whatever the terminal has.
            false => print_stdout_white_on_black(&code),
        }
    }
    print_stdout(line);
    let until = expires.to_zoned(jiff::tz::TimeZone::system());
    print_stderr(&format!(
        "For one device, until {}. There: cedos join - (then paste the line)",
        until.strftime("%Y-%m-%d %H:%M")
    ));
    if let Some(id) = answer["id"].as_str() {
        print_stderr(&format!(
            "To withdraw it: cedos prox invite --withdraw {id}"
        ));
    }
    if let Some(reach) = reach {
        print_stderr(&format!("note: {reach}"));
    }
    Ok(())
}

/// Whether the user wants no colours (no-color.org).
fn forbids_colours() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// A remark on who can reach this host, if not everybody can.
fn reach_of(host: &str) -> Option<String> {
    let address: IpAddr = host.parse().ok()?;
    let change = "name a host that they reach by --host, or by --public-host of `cedos prox`";
    let is_private = match address {
        IpAddr::V4(v4) => v4.is_private() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unique_local() || v6.is_unicast_link_local(),
    };
    if address.is_loopback() {
        return Some(format!(
            "{host} is this machine itself; for other devices, {change}"
        ));
    }
    is_private
        .then(|| format!("{host} is a private address: for devices outside this network, {change}"))
}

/// The QR code of a text, for a terminal with light text on dark ground: two rows of modules in a line. None if the text
/// does not fit into one.
fn qr_code(text: &str) -> Option<String> {
    let code = QRBuilder::new(text).ecl(ECL::L).build().ok()?;
    let is_dark = |x: usize, y: usize| {
        let inside = |at: usize| at.checked_sub(QUIET_ZONE).filter(|at| *at < code.size);
        match (inside(x), inside(y)) {
            (Some(x), Some(y)) => code[y][x].value(),
            _ => false,
        }
    };
    let side = code.size + 2 * QUIET_ZONE;
    let row = |y: usize| {
        let halves = (0..side).map(|x| match (is_dark(x, y), is_dark(x, y + 1)) {
            (true, true) => ' ',
            (true, false) => '▄',
            (false, true) => '▀',
            (false, false) => '█',
        });
        halves.collect::<String>()
    };
    let rows: Vec<String> = (0..side).step_by(2).map(row).collect();
    Some(rows.join("\n"))
}

async fn reload(args: ReloadArgs) -> anyhow::Result<()> {
    let answer = args.which.ask(ControlRequest::Reload).await?;
    if args.json {
        let told = json!({"taken": answer["taken"], "at_restart": answer["at_restart"]});
        print_stdout(&told.to_string());
        return Ok(());
    }
    let names = |field: &str| {
        let all = answer[field].as_array().into_iter().flatten();
        all.filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
    };
    let (taken, at_restart) = (names("taken"), names("at_restart"));
    if taken.is_empty() && at_restart.is_empty() {
        print_stdout("nothing has changed");
    }
    if !taken.is_empty() {
        print_stdout(&format!("changed: {taken}"));
    }
    if !at_restart.is_empty() {
        print_stderr(&format!(
            "changed when the proxy starts again: {at_restart}"
        ));
    }
    Ok(())
}

async fn drain(args: DrainArgs) -> anyhow::Result<()> {
    let mut control = args.which.connect().await?;
    let order = ControlRequest::Drain {
        to: args.to,
        within_s: args.within.as_secs(),
    };
    control.ask(&order).await?;
    drop(control);
    let mut shown = None;
    // The control socket goes with the process.
    while let Ok(mut control) = args.which.connect().await {
        let Ok(status) = control.ask(&ControlRequest::Status).await else {
            break;
        };
        let left = &status["draining"];
        let number = |field: &str| left[field].as_u64().unwrap_or_default();
        let now = (number("sessions"), number("staying"));
        if left.is_object() && shown != Some(now) {
            let (asked, staying) = now;
            print_stderr(&format!(
                "{asked} sessions were asked to go on elsewhere, {staying} wait for their transfers"
            ));
            shown = Some(now);
        }
        tokio::time::sleep(DRAIN_LOOK_EVERY).await;
    }
    print_stdout("the node has ended");
    Ok(())
}

async fn status(args: StatusArgs) -> anyhow::Result<()> {
    let answer = args.which.ask(ControlRequest::Status).await?;
    if args.json {
        let mut told = answer;
        if let Some(fields) = told.as_object_mut() {
            fields.remove("ok");
        }
        print_stdout(&told.to_string());
        return Ok(());
    }
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let bytes = |field: &str| human_bytes(number(field));
    print_stdout(answer["address"].as_str().unwrap_or("?"));
    print_stdout(&format!(
        "{} clients, {} flows",
        number("clients"),
        number("flows")
    ));
    print_stdout(&format!(
        "holds {} in memory and {} on disk",
        bytes("memory_bytes"),
        bytes("disk_bytes")
    ));
    print_stdout(&match number("cache_bytes_max") {
        0 => "no cache for all clients".to_owned(),
        _ => format!(
            "of that, the cache for all clients: {} of {}, in {} responses",
            bytes("cache_bytes"),
            bytes("cache_bytes_max"),
            number("cache_responses")
        ),
    });
    let text = |field: &str| answer[field].as_str().unwrap_or("?");
    if answer["store"].is_string() {
        print_stdout(&format!(
            "node {}; store {}: {}",
            text("node"),
            text("store"),
            text("store_state")
        ));
        if answer["clients_counted"] == "this node" {
            print_stdout("clients are held to what this node alone knows, until the store answers");
        }
    }
    let bucket = &answer["bucket"];
    if let Some(waiting) = bucket["waiting_copies"].as_u64() {
        print_stdout(&match bucket["failing"].as_str() {
            None => format!("bucket: {waiting} copies wait to be stored"),
            Some(cause) => format!("bucket fails, {waiting} copies wait: {cause}"),
        });
    }
    Ok(())
}

async fn client(verb: ClientVerb) -> anyhow::Result<()> {
    match verb {
        ClientVerb::List { which, json } => {
            let answer = which.ask(ControlRequest::Clients).await?;
            let clients = answer["clients"].as_array().cloned().unwrap_or_default();
            if clients.is_empty() && !json {
                print_stderr("no clients; `cedos prox invite` invites one");
            }
            for client in &clients {
                show(client, json, false);
            }
        }
        ClientVerb::Show {
            client,
            which,
            json,
        } => {
            let answer = which.ask(ControlRequest::Client { client }).await?;
            show(&answer["client"], json, true);
        }
        ClientVerb::Limit {
            client,
            limits,
            which,
            json,
        } => {
            let limits = limits.limits();
            let request = ControlRequest::Limit { client, limits };
            let answer = which.ask(request).await?;
            show(&answer["client"], json, true);
        }
        ClientVerb::Rename {
            client,
            name,
            which,
            json,
        } => {
            let answer = which.ask(ControlRequest::Rename { client, name }).await?;
            let text = |field: &str| answer[field].as_str().unwrap_or("?").to_owned();
            match json {
                true => print_stdout(
                    &json!({"name": answer["name"], "was": answer["was"], "key": answer["key"]})
                        .to_string(),
                ),
                false => print_stdout(&format!("{} is called {} now", text("was"), text("name"))),
            }
        }
        ClientVerb::Remove {
            client,
            which,
            json,
        } => {
            let answer = which.ask(ControlRequest::Remove { client }).await?;
            let text = |field: &str| answer[field].as_str().unwrap_or("?").to_owned();
            match json {
                true => print_stdout(
                    &json!({"removed": true, "name": answer["name"], "key": answer["key"]})
                        .to_string(),
                ),
                false => print_stdout(&format!("removed {} ({})", text("name"), text("key"))),
            }
        }
    }
    Ok(())
}

/// Prints a client; `in_full`: with its limits.
fn show(client: &Value, json: bool, in_full: bool) {
    let time = |field: &str| {
        let second = client[field].as_i64()?;
        Timestamp::from_second(second).ok()
    };
    if json {
        let told = json!({
            "name": client["name"],
            "key": client["key"],
            "enrolled": time("enrolled_s").map(|at| at.to_string()),
            "last_seen": time("seen_s").map(|at| at.to_string()),
            "by": client["by"],
            "flows": client["flows"],
            "flows_elsewhere": client["flows_elsewhere"],
            "pinned_bytes": client["pinned_bytes"],
            "month": client["month"],
            "limits": client["limits"],
            "own_limits": client["own_limits"],
        });
        return print_stdout(&told.to_string());
    }
    let shown = |at: Option<Timestamp>| {
        let zoned = at.map(|at| at.to_zoned(jiff::tz::TimeZone::system()));
        zoned.map(|at| at.strftime("%Y-%m-%d %H:%M").to_string())
    };
    let name = client["name"].as_str().unwrap_or("(--allow-client)");
    let key = client["key"].as_str().unwrap_or("?");
    let enrolled = shown(time("enrolled_s")).map_or(String::new(), |at| format!(", enrolled {at}"));
    let seen = shown(time("seen_s")).map_or(String::new(), |at| format!(", last seen {at}"));
    print_stdout(&format!("{name}: {key}{enrolled}{seen}"));
    let month = &client["month"];
    let bytes = |value: &Value| human_bytes(value.as_u64().unwrap_or_default());
    let (down, up) = (bytes(&month["down_bytes"]), bytes(&month["up_bytes"]));
    let flows = client["flows"].as_u64().unwrap_or_default();
    let flows = match client["flows_elsewhere"].as_u64() {
        None | Some(0) => flows.to_string(),
        Some(elsewhere) => format!("{flows} here and {elsewhere} at other nodes"),
    };
    let pinned = bytes(&client["pinned_bytes"]);
    if !in_full {
        let text = format!("  {flows} flows, {pinned} held; this month {down} down, {up} up");
        return print_stdout(&text);
    }
    let (limits, own) = (&client["limits"], &client["own_limits"]);
    let of_all = |field: &str| match own[field].is_null() {
        true => "",
        false => " (its own limit)",
    };
    let line = |what: &str, now: &str, max: String, field: &str| {
        print_stdout(&format!("  {what}: {now}{max}{}", of_all(field)));
    };
    let at_most = |field: &str, unit: &str| match limits[field].as_u64() {
        None | Some(0) => "no limit".to_owned(),
        Some(max) => format!("at most {}{unit}", human_bytes(max)),
    };
    let flows_max = limits["flows"].as_u64().unwrap_or_default();
    line("flows", &flows, format!(" of {flows_max}"), "flows");
    line(
        "held",
        &pinned,
        format!(" of {}", bytes(&limits["pinned_bytes"])),
        "pinned_bytes",
    );
    let month = format!("{down} down, {up} up, ");
    line(
        "this month (UTC)",
        &month,
        at_most("month_bytes", ""),
        "month_bytes",
    );
    line(
        "down",
        "",
        at_most("down_bytes_per_s", "/s"),
        "down_bytes_per_s",
    );
    line("up", "", at_most("up_bytes_per_s", "/s"), "up_bytes_per_s");
    let deadline = limits["deadline_s"].as_u64().unwrap_or_default();
    let deadline = Duration::from_secs(deadline);
    line(
        "deadlines",
        "",
        format!("at most {}", span_text(deadline)),
        "deadline_s",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_is_told_as_it_is_written() {
        for text in ["7d", "36h", "90m", "61s"] {
            assert_eq!(span_text(parse_span(text).unwrap()), text);
        }
    }

    #[test]
    fn a_limit_of_none_is_no_limit() {
        assert_eq!(parse_rate_or_none("none"), Ok(0));
        assert_eq!(parse_rate_or_none("2M/s"), Ok(2_000_000));
        assert_eq!(parse_month("none"), Ok(0));
        assert!(parse_month("0").unwrap_err().contains("remove the client"));
    }

    #[test]
    fn who_cannot_reach_a_host_is_said() {
        assert!(reach_of("192.168.1.2").unwrap().contains("private"));
        assert!(reach_of("fd00::1").unwrap().contains("private"));
        assert!(reach_of("127.0.0.1").unwrap().contains("this machine"));
        assert_eq!(reach_of("192.0.2.1"), None);
        assert_eq!(reach_of("proxy.example"), None);
    }

    #[test]
    fn a_qr_code_is_a_square_with_light_around_it() {
        let line = format!(
            "d2tp://proxy.example:4433/{}#{}",
            "k".repeat(43),
            "s".repeat(27)
        );
        let code = qr_code(&line).expect("it fits");
        let rows: Vec<&str> = code.lines().collect();
        let side = rows[0].chars().count();
        assert!(rows.iter().all(|row| row.chars().count() == side));
        assert_eq!(rows.len(), side.div_ceil(2));
        assert!(
            rows[0].chars().all(|half| half == '█'),
            "the first rows are light"
        );
        assert!(rows.iter().all(|row| row.starts_with("████")));
    }
}
