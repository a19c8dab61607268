//! `cedos net`, `cedos budget`: networks, their costs and limits.

use cedos_terminal::is_stdout_closed;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::agent::contact_log::contact_log;
use cedos_agent::agent::link_json;
use cedos_agent::fetch::option_parsers;
use cedos_agent::fetch::proxy::remembered_round_trips;
use cedos_agent::fetch::report::{human_bytes, print_stderr, print_stdout};
use cedos_agent::fetch::session_refusal::host_and_port;
use cedos_agent::settings;
use clap::{Args, Subcommand};
use d2tp_driver::{HintSource, ServerList, nearest_server};
use d2tp_links::{CapCutoff, ClassRules, Link};
use d2tp_session::Span;
use serde_json::{Value, json};

use super::agent_start;
use super::power_line::PowerLine;

/// How often an agent is asked what links carry, while they are watched.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Show networks, what each costs and why, and what it carries
#[derive(Debug, Args)]
pub struct NetArgs {
    #[command(subcommand)]
    verb: Option<NetVerb>,
    /// Print one JSON object per network
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum NetVerb {
    /// List them (the default)
    Ls,
    /// List them again whenever one changes
    Watch,
    /// Print what the agent has learnt of outages, without names, places and times: for a study, if you hand it over
    Contacts,
    /// Tell the agent what a network costs: free, metered, roaming; auto takes it back. It holds for that
    /// network wherever the device meets it again
    Set {
        /// Its device (wlan0), its SSID, or carrier:CODE
        link: String,
        /// free, metered, roaming or auto
        class: String,
    },
}

/// Show or set how much metered data all transfers together may use in a month
#[derive(Debug, Args)]
pub struct BudgetArgs {
    #[command(subcommand)]
    verb: Option<BudgetVerb>,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum BudgetVerb {
    /// Show it (the default)
    Show,
    /// Set the limit, when a period begins, and what happens at the limit
    Set {
        /// Metered data in a period: 2G, or `none` for no limit
        #[arg(value_parser = parse_cap)]
        cap: Option<CapArgument>,
        /// The day of the month on which a period begins
        #[arg(long, value_name = "DAY", value_parser = clap::value_parser!(i8).range(1..=31))]
        reset_day: Option<i8>,
        /// What happens at the cap: hard, metered networks are no longer used; soft, a notice only;
        /// cautious, as hard but a tenth earlier
        #[arg(long, value_name = "WORD", value_parser = parse_cutoff)]
        cutoff: Option<CapCutoff>,
    },
}

fn parse_cutoff(text: &str) -> Result<CapCutoff, String> {
    let all = [CapCutoff::Hard, CapCutoff::Soft, CapCutoff::Cautious];
    let found = all.into_iter().find(|cutoff| cutoff.as_str() == text);
    found.ok_or_else(|| format!("`{text}` is not one of hard, soft, cautious"))
}

#[derive(Debug, Clone, Copy)]
struct CapArgument(Option<u64>);

fn parse_cap(text: &str) -> Result<CapArgument, String> {
    match text {
        "none" => Ok(CapArgument(None)),
        size => option_parsers::parse_bytes(size).map(|bytes| CapArgument(Some(bytes))),
    }
}

/// Prints outages: a line of comma-separated values each, or a JSON object.
fn print_contacts(as_json: bool) -> anyhow::Result<()> {
    let records = contact_log()?;
    if !as_json {
        print_stdout("link,place,seconds,metres,metres_per_s");
    }
    for record in records {
        let speed = record.speed().map(|speed| (speed * 10.0).round() / 10.0);
        print_stdout(&match as_json {
            true => json!({
                "link": record.link,
                "place": record.place,
                "seconds": record.seconds,
                "metres": record.metres,
                "metres_per_s": speed,
            })
            .to_string(),
            false => {
                let text = |number: Option<f32>| number.map_or_else(String::new, |n| n.to_string());
                let (link, place, seconds) = (record.link, record.place, record.seconds);
                format!(
                    "{link},{place},{seconds},{},{}",
                    text(record.metres),
                    text(speed)
                )
            }
        });
    }
    Ok(())
}

/// Shows or sets them.
///
/// # Errors
/// The links cannot be read, or the agent says no.
pub async fn net(args: NetArgs) -> anyhow::Result<ExitCode> {
    let said = |failure: cedos_agent::fetch::outcome::TransferFailure| anyhow!(failure.text);
    match args.verb.unwrap_or(NetVerb::Ls) {
        NetVerb::Ls => {
            for link in links().await? {
                show(&link, args.json);
            }
            for proxy in proxies().await? {
                show_proxy(&proxy, args.json);
            }
            if let Some(power) = PowerLine::read()? {
                print_stdout(&match args.json {
                    true => power.to_json().to_string(),
                    false => power.to_line(),
                });
            }
        }
        NetVerb::Watch => {
            let mut before = Vec::new();
            loop {
                let now = links().await?;
                for link in &now {
                    if !before.contains(link) {
                        show(link, args.json);
                    }
                }
                before = now;
                if is_stdout_closed() {
                    break;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        NetVerb::Contacts => print_contacts(args.json)?,
        NetVerb::Set { link, class } => {
            let request = AgentRequest::NetSet { link, class };
            let answer = agent_start::connect_or_start()
                .await?
                .ask(&request)
                .await
                .map_err(said)?;
            if args.json {
                print_stdout(&answer.to_string());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn links() -> anyhow::Result<Vec<Value>> {
    if let Some(mut agent) = AgentApiClient::connect().await
        && let Ok(answer) = agent.ask(&AgentRequest::Net).await
    {
        let links = answer["links"].as_array().cloned();
        return Ok(links.unwrap_or_default());
    }
    let (monitor, manager) = settings::watch(ClassRules::default(), None).await?;
    let networks = manager
        .map(|manager| manager.networks())
        .unwrap_or_default();
    let links = monitor.links();
    let show = |link: &Link| link_json(link, networks.of(&link.name));
    Ok(links.iter().map(show).collect())
}

/// The proxies that commands use, with the round trips that were measured on this network, and which is the first to be
/// asked.
async fn proxies() -> anyhow::Result<Vec<Value>> {
    let settings = settings::UserSettings::load(None)?;
    let Some(text) = settings.proxy(&[], false)? else {
        return Ok(Vec::new());
    };
    let list: ServerList = text.parse()?;
    let trips = match list.servers().len() {
        // Where there is no choice, nothing is measured.
        1 => vec![None],
        _ => {
            let (monitor, _) = settings::watch(ClassRules::default(), None).await?;
            remembered_round_trips(&list, &monitor.links())
        }
    };
    let spans: Vec<_> = trips.iter().map(|trip| trip.map(Span::from)).collect();
    let first = nearest_server(&spans).unwrap_or(0);
    let proxies = list.servers().iter().zip(trips).enumerate();
    let told = proxies.map(|(place, (server, trip))| {
        json!({
            "proxy": settings.proxy_name(&server.key),
            "address": host_and_port(server),
            "round_trip_ms": trip.map(|trip| trip.as_secs_f64() * 1e3),
            "use": match place == first {
                true if list.servers().len() == 1 => "always",
                true => "first",
                false => "otherwise",
            },
        })
    });
    Ok(told.collect())
}

fn show_proxy(proxy: &Value, json: bool) {
    if json {
        return print_stdout(&proxy.to_string());
    }
    let address = proxy["address"].as_str().unwrap_or("?");
    let name = match proxy["proxy"].as_str() {
        Some(name) => format!("proxy {name}: {address}"),
        None => format!("proxy: {address}"),
    };
    let trip = match proxy["round_trip_ms"].as_f64() {
        Some(ms) => format!(", round trip {ms:.0} ms"),
        None => String::new(),
    };
    let order = match proxy["use"].as_str() {
        Some("first") => ", used first",
        Some("otherwise") => ", used when the first does not answer",
        _ => "",
    };
    print_stdout(&format!("{name}{trip}{order}"));
}

fn show(link: &Value, json: bool) {
    if json {
        return print_stdout(&link.to_string());
    }
    let text = |field: &str| link[field].as_str().unwrap_or("?").to_owned();
    let usable = match (link["usable"].as_bool(), link["carries"].as_bool()) {
        (Some(true), Some(false)) => ", carries no data",
        (Some(true), _) => "",
        _ => ", not usable now",
    };
    let rate = match link["rate_bytes_per_s"].as_f64() {
        Some(rate) => format!(", {}/s", human_bytes(rate as u64)),
        None => String::new(),
    };
    let trip = match link["rtt_ms"].as_f64() {
        Some(ms) => format!(", round trip {ms:.0} ms"),
        None => String::new(),
    };
    let on = match (link["ssid"].as_str(), link["operator"].as_str()) {
        (Some(ssid), _) => {
            let signal = link["signal_percent"].as_u64().unwrap_or(0);
            format!(", on {ssid} at {signal} %")
        }
        (None, Some(operator)) => format!(", operator {operator}"),
        (None, None) => String::new(),
    };
    let portal = match link["portal"] == true {
        true => ", requires a sign-in",
        false => "",
    };
    let udp = match link["udp"].as_str() {
        Some("blocked") => ", blocks UDP (packets go over TCP)",
        Some("intercepted") => ", blocks UDP, and something else answers for the proxy",
        Some("unreachable") => ", reaches the proxy neither over UDP nor over TCP",
        _ => "",
    };
    let hints = link["proxy_hints"].as_array().into_iter().flatten();
    let hints: String = hints.filter_map(proxy_hint).collect();
    let cap = &link["cap"];
    let cap = match (cap["used"].as_u64(), cap["cap"].as_u64()) {
        (Some(used), Some(cap)) => {
            format!(", {} of {} this month", human_bytes(used), human_bytes(cap))
        }
        _ => String::new(),
    };
    let on_it: Vec<String> = link["transfers"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|id| format!("#{id}"))
        .collect();
    let on_it = match on_it.is_empty() {
        true => String::new(),
        false => format!(", carries {}", on_it.join(" ")),
    };
    print_stdout(&format!(
        "{}: {}, {} ({}){on}{portal}{udp}{hints}{usable}{rate}{trip}{cap}{on_it}",
        text("link"),
        text("kind"),
        text("class"),
        text("because")
    ));
}

/// Where a network says that the proxy is, once it is known whether that is true.
fn proxy_hint(hint: &Value) -> Option<String> {
    let address = hint["address"].as_str()?;
    let said = match hint["source"].as_str() {
        Some("dhcp") => HintSource::Dhcp,
        _ => HintSource::Announced,
    };
    let said = said.describe();
    match hint["holds_key"].as_bool()? {
        true => Some(format!(", proxy at {address} ({said})")),
        false => Some(format!(
            ", {address} {said} as the proxy, but does not prove its key"
        )),
    }
}

/// Shows or sets the allowance.
///
/// # Errors
/// No agent runs, or it says no.
pub async fn budget(args: BudgetArgs) -> anyhow::Result<ExitCode> {
    let request = match args.verb.unwrap_or(BudgetVerb::Show) {
        BudgetVerb::Show => AgentRequest::Budget,
        BudgetVerb::Set {
            cap: None,
            reset_day: None,
            cutoff: None,
        } => {
            print_stderr(
                "cedos budget set: say how much (2G, none), --reset-day DAY or --cutoff WORD",
            );
            return Ok(ExitCode::from(2));
        }
        BudgetVerb::Set {
            cap,
            reset_day,
            cutoff,
        } => AgentRequest::BudgetSet {
            cap: cap.and_then(|cap| cap.0),
            no_cap: cap.is_some_and(|cap| cap.0.is_none()),
            reset_day,
            cutoff,
        },
    };
    let is_change = matches!(request, AgentRequest::BudgetSet { .. });
    let answer = agent_start::connect_or_start().await?.ask(&request).await;
    let answer = answer.map_err(|failure| anyhow!(failure.text))?;
    if is_change {
        let settings = settings::UserSettings::load(None)?;
        let keys = ["budget.cap", "budget.reset_day", "budget.cutoff"];
        for key in keys {
            if let (Some(text), source) = (settings.chosen(key), settings.value(key).1) {
                print_stderr(&format!(
                    "note: {key} = {text} in {source} holds again when the agent starts next; change it by \
                     `cedos config set {key}`"
                ));
            }
        }
    }
    if args.json {
        let told = json!({"cap": answer["cap"], "used": answer["used"], "left": answer["left"],
                          "over": answer["over"], "cutoff": answer["cutoff"], "since": answer["since"],
                          "reset_day": answer["reset_day"]});
        print_stdout(&told.to_string());
        return Ok(ExitCode::SUCCESS);
    }
    let bytes = |field: &str| answer[field].as_u64().map(human_bytes);
    let used = bytes("used").unwrap_or_default();
    let since = answer["since"].as_str().unwrap_or("?");
    print_stdout(&match (bytes("cap"), bytes("left")) {
        (Some(cap), Some(left)) => {
            let cautious = match answer["cutoff"] == "cautious" {
                true => " (a tenth is held back)",
                false => "",
            };
            format!("metered networks: {used} of {cap} used since {since}, {left} left{cautious}")
        }
        (Some(cap), None) => {
            let over = match answer["over"] == true {
                true => "used up; transfers continue (cutoff soft)",
                false => "transfers continue beyond it (cutoff soft)",
            };
            format!("metered networks: {used} of {cap} used since {since}; {over}")
        }
        _ => format!("metered networks: {used} used since {since}; no limit"),
    });
    Ok(ExitCode::SUCCESS)
}
