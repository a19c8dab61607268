//! `cedos-bench churn`: many hosts download at once while a tenth of them goes silent every minute
//! until all are, and then comes back, a tenth every minute.
//!
//! ```text
//!  active  1.0 ┤████                              █
//!              │    ███                        ███
//!              │       ███                  ███
//!              │          ███            ███
//!          0.1 ┤             ████████████
//!              └ baseline ┴ 10 minutes leave ┴ 9 come ┴
//! ```
//!
//! The server is D2Prox in its default configuration but for memory for sessions, one process or several; another process runs
//! all hosts, which download one object through it. The server's link limits them. Hosts leave
//! when a minute begins. Hosts come back at any time within a minute: after minutes of silence each
//! needs a handshake, and a tenth of all at once would overload the server. As soon as all are
//! silent the first tenth comes back. `--scale` sets the length of minutes; the protocol's own
//! times are not scaled, so a server probes silent hosts for a larger part of a shorter minute, and
//! hibernates them later.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cedos_terminal::{print_stderr, print_stdout};
use serde::{Deserialize, Serialize};

use crate::churn_hosts::ChurnHosts;
use crate::churn_server::ChurnServerInfo;
use crate::jain;
use crate::placement::ProcessPlacement;
use crate::process::{Process, own_program, tell};
use crate::{churn_network, network};

/// The divisor of the share of hosts that leaves or comes in a minute.
const SHARE: usize = 10;
/// The time allowed for handshakes and everything else beside the minutes.
const PATIENCE: Duration = Duration::from_secs(600);

/// Options of `bench churn`.
#[derive(clap::Args, Clone)]
pub struct ChurnOptions {
    /// Hosts, each with its own key, session and flow
    #[arg(long, default_value_t = 65_536)]
    flows: usize,
    /// How many times faster than minutes: 3 makes them 20 s long
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Proxies, each a process; the hosts are divided among them
    #[arg(long, default_value_t = 1)]
    nodes: usize,
    /// Minutes with all of them active, before the churn
    #[arg(long, default_value_t = 2)]
    baseline: usize,
    /// Rate of the server's link, as whole Ethernet frames
    #[arg(long, default_value_t = 280.0)]
    mbps: f64,
    /// Bytes that a host allows the server to have in flight to it
    #[arg(long, default_value_t = 4096)]
    window_bytes: u64,
    /// A tenth of those still active leaves each minute, and a tenth of those still silent comes,
    /// instead of a tenth of all
    #[arg(long)]
    compound: bool,
    /// The program `cedos` [default: the one in this program's folder]
    #[arg(long)]
    cedos: Option<PathBuf>,
    /// The directory in which the proxies' state is during the run; it should be on a disk
    #[arg(long)]
    dir: Option<PathBuf>,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct HostsOptions {
    #[arg(long)]
    card: String,
    #[command(flatten)]
    plan: ChurnOptions,
}

/// The results of one minute.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ChurnMinute {
    /// The number of active flows at the end of the minute.
    active: usize,
    /// The number of flows active during the whole minute.
    throughout: usize,
    mbps: f64,
    /// Jain's index over the flows active during the whole minute.
    jain: Option<f64>,
    /// Resident memory of all proxies.
    server_rss_bytes: u64,
    /// CPU time of all proxies, in seconds.
    server_cpu_s: f64,
}

/// The result of `bench churn`.
#[derive(Debug, Serialize, Deserialize)]
struct ChurnReport {
    flows: usize,
    nodes: usize,
    /// Goodput of all flows with churn, as a fraction of their goodput without churn.
    goodput_ratio: f64,
    /// The minimum over all minutes with churn in which any host was active throughout.
    jain: f64,
    jain_mean: f64,
    jain_without_churn: f64,
    mbps_without_churn: f64,
    mbps: f64,
    link_mbps: f64,
    minute_s: f64,
    scale: f64,
    window_bytes: u64,
    server_rss_bytes: u64,
    /// CPU time of all proxies for each gigabyte that hosts read, without churn and with it, in
    /// seconds.
    server_cpu_s_per_gb_without_churn: f64,
    server_cpu_s_per_gb: f64,
    /// The time from the first SYN until all sessions are established.
    calling_s: f64,
    unsent: u64,
    baseline: Vec<ChurnMinute>,
    minutes: Vec<ChurnMinute>,
}

/// Measures and prints.
///
/// # Errors
/// Something failed, or a flow ended.
pub fn run(options: &ChurnOptions) -> Result<()> {
    if options.flows < SHARE || options.baseline == 0 || options.nodes == 0 {
        bail!("there must be {SHARE} flows, a minute of baseline and a node at least");
    }
    let minute = minute(options)?;
    network::enter_user_namespace()?;
    let network = churn_network::make(options.mbps)?;
    // Records of an earlier run count as flows that sleep.
    let dir = match &options.dir {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    };
    let dir = dir.context("--dir")?;
    let mut server = own_program("churn-server")?;
    server
        .args(["--nodes", &options.nodes.to_string()])
        .args(["--address", &network.receiver_address().to_string()])
        .args(["--object-bytes", &object_bytes(options)?.to_string()])
        .arg("--dir")
        .arg(dir.path());
    if let Some(program) = &options.cedos {
        server.arg("--cedos").arg(program);
    }
    let server = Process::new(network.start_receiver(server)?, "server")?;
    let card: ChurnServerInfo = server.hear(PATIENCE)?;
    let mut hosts = own_program("churn-hosts")?;
    hosts
        .args(["--card", &serde_json::to_string(&card)?])
        .args(["--flows", &options.flows.to_string()])
        .args(["--nodes", &options.nodes.to_string()])
        .args(["--scale", &options.scale.to_string()])
        .args(["--baseline", &options.baseline.to_string()])
        .args(["--mbps", &options.mbps.to_string()])
        .args(["--window-bytes", &options.window_bytes.to_string()]);
    if options.compound {
        hosts.arg("--compound");
    }
    let hosts = Process::new(network.start_sender(hosts)?, "hosts")?;
    let minutes = options.baseline + plan(options).len() + 1;
    let report: ChurnReport = hosts.hear(minute * minutes as u32 + PATIENCE)?;
    if options.json {
        print_stdout(&serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

fn minute(options: &ChurnOptions) -> Result<Duration> {
    Duration::try_from_secs_f64(60.0 / options.scale).context("--scale")
}

/// Bytes of the object: more than any host reads, even one of the last tenth with the whole link.
fn object_bytes(options: &ChurnOptions) -> Result<u64> {
    let minutes = options.baseline + plan(options).len() + 2;
    let seconds = minute(options)?.as_secs_f64() * minutes as f64;
    let fewest = options.flows / SHARE;
    let most = options.mbps * 1e6 / 8.0 * seconds / fewest as f64;
    Ok(most as u64 + (1 << 20))
}

/// The number of active hosts in each minute of the churn.
fn plan(options: &ChurnOptions) -> Vec<usize> {
    let all = options.flows;
    let share = |of: usize| if options.compound { of } else { all }.div_ceil(SHARE);
    let mut counts = Vec::new();
    let mut active = all;
    while active > 0 {
        active -= share(active).min(active);
        counts.push(active);
    }
    // All are silent: the first ones are back at once.
    counts.pop();
    while active < all {
        active += share(all - active).min(all - active);
        counts.push(active);
    }
    counts
}

/// The process of the hosts.
pub fn hosts(options: &HostsOptions) -> Result<()> {
    let card: ChurnServerInfo = serde_json::from_str(&options.card).context("--card")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let report = runtime.block_on(live(&options.plan, &card))?;
    tell(&report)
}

async fn live(options: &ChurnOptions, card: &ChurnServerInfo) -> Result<ChurnReport> {
    let length = minute(options)?;
    let mut hosts = ChurnHosts::make(options.flows, options.window_bytes, card)?;
    let begun = Instant::now();
    hosts.call_all().await?;
    let calling_s = begun.elapsed().as_secs_f64();
    print_stderr(&format!("{} sessions in {calling_s:.1} s", hosts.len()));
    hosts.open_all().await?;
    // Tens of thousands of requests at one moment take the two cores longer than a short minute.
    while hosts.without_answer() > 0 {
        if begun.elapsed() > PATIENCE {
            bail!("{} hosts have no answer", hosts.without_answer());
        }
        hosts.live(Instant::now() + Duration::from_secs(1)).await?;
    }
    print_stderr(&format!(
        "all were answered after {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    // A minute for the newest flows to find their pace.
    pass(&mut hosts, length, card, &[]).await?;
    let mut baseline = Vec::new();
    for _ in 0..options.baseline {
        baseline.push(pass(&mut hosts, length, card, &[]).await?);
    }
    // The first to leave are the first to come back.
    let mut silent = std::collections::VecDeque::new();
    let mut leaving = 0..options.flows as u32;
    let mut minutes: Vec<ChurnMinute> = Vec::new();
    let mut active = options.flows;
    for count in plan(options) {
        if count >= active {
            // These come from here. The first time, the last ones leave before.
            for number in leaving.by_ref() {
                hosts.leave(number);
                silent.push_back(number);
                active -= 1;
            }
        }
        while active > count {
            let number = leaving.next().context("more leave than there are")?;
            hosts.leave(number);
            silent.push_back(number);
            active -= 1;
        }
        let coming: Vec<u32> = silent.drain(..count - active).collect();
        active = count;
        minutes.push(pass(&mut hosts, length, card, &coming).await?);
    }
    ChurnReport::of(options, length, calling_s, hosts.unsent, baseline, minutes)
}

/// Lets a minute pass, in which the hosts of `coming` come one by one, and returns its results.
async fn pass(
    hosts: &mut ChurnHosts,
    length: Duration,
    card: &ChurnServerInfo,
    coming: &[u32],
) -> Result<ChurnMinute> {
    let (before, at) = (hosts.bytes(), Instant::now());
    let cpu_before = cpu_s(card)?;
    let throughout = hosts.active();
    for (done, number) in coming.iter().enumerate() {
        let due = at + length.mul_f64(done as f64 / coming.len() as f64);
        if Instant::now() < due {
            hosts.live(due).await?;
        }
        hosts.come(*number);
    }
    hosts.live(at + length).await?;
    let seconds = at.elapsed().as_secs_f64();
    let grown: Vec<f64> = (hosts.bytes().iter().zip(&before))
        .map(|(now, was)| (now - was) as f64)
        .collect();
    let of_active: Vec<f64> = (grown.iter().zip(throughout))
        .filter_map(|(bytes, active)| active.then_some(*bytes))
        .collect();
    let minute = ChurnMinute {
        active: hosts.active().iter().filter(|active| **active).count(),
        throughout: of_active.len(),
        mbps: grown.iter().sum::<f64>() * 8.0 / 1e6 / seconds,
        jain: jain::index(&of_active),
        server_rss_bytes: rss_bytes(card)?,
        server_cpu_s: cpu_s(card)? - cpu_before,
    };
    print_stderr(&format!(
        "{:6} active {:8.1} Mb/s  jain {:.4}  server {} MB",
        minute.active,
        minute.mbps,
        minute.jain.unwrap_or(f64::NAN),
        minute.server_rss_bytes / 1_000_000
    ));
    Ok(minute)
}

/// The resident memory of all proxies.
fn rss_bytes(card: &ChurnServerInfo) -> Result<u64> {
    let each = card.nodes.iter().map(|node| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", node.process));
        let kb = status
            .context("a proxy is gone")?
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.trim().strip_suffix(" kB"))
            .and_then(|kb| kb.trim().parse::<u64>().ok())
            .context("/proc says nothing of memory")?;
        Ok(kb * 1024)
    });
    each.sum()
}

/// The CPU time that all proxies have used, in seconds.
fn cpu_s(card: &ChurnServerInfo) -> Result<f64> {
    let each = card.nodes.iter().map(|node| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", node.process));
        let stat = stat.context("a proxy is gone")?;
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let ticks = fields.split_whitespace().skip(11).take(2);
        let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
        Ok(ticks / 100.0) // USER_HZ is 100 on all supported Linux systems
    });
    each.sum()
}

impl ChurnReport {
    fn of(
        options: &ChurnOptions,
        length: Duration,
        calling_s: f64,
        unsent: u64,
        baseline: Vec<ChurnMinute>,
        minutes: Vec<ChurnMinute>,
    ) -> Result<ChurnReport> {
        let mean = |of: &[ChurnMinute], f: fn(&ChurnMinute) -> f64| {
            of.iter().map(f).sum::<f64>() / of.len() as f64
        };
        // A minute in which no bytes arrived is not fair. In the minute when the first hosts are
        // back no flow was active throughout, and there is no index.
        let shared: Vec<ChurnMinute> = (minutes.iter().filter(|m| m.throughout > 0))
            .cloned()
            .collect();
        let jain = |minute: &ChurnMinute| minute.jain.unwrap_or(0.0);
        let (without, with) = (mean(&baseline, |m| m.mbps), mean(&minutes, |m| m.mbps));
        if without <= 0.0 {
            bail!("nothing came through without churn");
        }
        // The time of all minutes over the bytes of all, which have equal lengths.
        let per_gb = |of: &[ChurnMinute]| {
            let gb = mean(of, |m| m.mbps) * 1e6 / 8.0 * length.as_secs_f64() / 1e9;
            mean(of, |m| m.server_cpu_s) / gb
        };
        let (cpu_without, cpu_with) = (per_gb(&baseline), per_gb(&minutes));
        let rss = baseline.iter().chain(&minutes).map(|m| m.server_rss_bytes);
        Ok(ChurnReport {
            flows: options.flows,
            nodes: options.nodes,
            goodput_ratio: with / without,
            jain: shared.iter().map(jain).fold(1.0, f64::min),
            jain_mean: mean(&shared, jain),
            jain_without_churn: mean(&baseline, jain),
            mbps_without_churn: without,
            mbps: with,
            link_mbps: options.mbps,
            minute_s: length.as_secs_f64(),
            scale: options.scale,
            window_bytes: options.window_bytes,
            server_rss_bytes: rss.max().unwrap_or(0),
            server_cpu_s_per_gb_without_churn: cpu_without,
            server_cpu_s_per_gb: cpu_with,
            calling_s,
            unsent,
            baseline,
            minutes,
        })
    }
}

fn print(report: &ChurnReport) {
    print_stdout(&format!(
        "{} hosts, a session and a flow each, at {} D2Prox behind a link of {} Mb/s; minutes of {} s \
         ({} times faster); {} B on the way to each host at most",
        report.flows,
        report.nodes,
        report.link_mbps,
        report.minute_s,
        report.scale,
        report.window_bytes
    ));
    print_stdout(&format!(
        "  called in {:.1} s; server {} MB resident at most, {:.1} kB a session",
        report.calling_s,
        report.server_rss_bytes / 1_000_000,
        report.server_rss_bytes as f64 / 1e3 / report.flows as f64,
    ));
    print_stdout(&format!(
        "  without churn {:.0} Mb/s, jain {:.4}",
        report.mbps_without_churn, report.jain_without_churn
    ));
    print_stdout(&format!(
        "  with churn    {:.0} Mb/s, jain {:.4} in the worst minute, {:.4} on average",
        report.mbps, report.jain, report.jain_mean
    ));
    print_stdout(&format!(
        "  goodput ratio {:.3}; {:.1} CPU-seconds per GB, {:.1} without churn",
        report.goodput_ratio, report.server_cpu_s_per_gb, report.server_cpu_s_per_gb_without_churn
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(flows: usize, compound: bool) -> ChurnOptions {
        ChurnOptions {
            flows,
            scale: 3.0,
            nodes: 1,
            baseline: 1,
            mbps: 280.0,
            window_bytes: 4096,
            compound,
            cedos: None,
            dir: None,
            json: false,
        }
    }

    #[test]
    fn a_tenth_of_all_leaves_each_minute_until_all_are_silent_and_then_returns() {
        let counts = plan(&options(100, false));
        let down = [90, 80, 70, 60, 50, 40, 30, 20, 10];
        let up = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100];
        assert_eq!(counts, [&down[..], &up[..]].concat());
    }

    #[test]
    fn compounded_it_takes_longer_and_ends_with_all_of_them_back() {
        let counts = plan(&options(100, true));
        assert_eq!(counts[..3], [90, 81, 72]);
        assert_eq!(counts.last(), Some(&100));
        let least = counts.iter().min();
        assert_eq!(least, Some(&1));
        assert!(counts.len() > 40, "{}", counts.len());
    }

    #[test]
    fn the_worst_minute_is_what_counts_for_fairness() {
        let minute = |mbps, jain| ChurnMinute {
            active: 10,
            throughout: 9,
            mbps,
            jain,
            server_rss_bytes: 7,
            server_cpu_s: 0.1,
        };
        let report = ChurnReport::of(
            &options(10, false),
            Duration::from_secs(6),
            1.0,
            0,
            vec![minute(100.0, Some(0.99))],
            vec![minute(90.0, Some(0.95)), minute(100.0, Some(0.97))],
        )
        .unwrap();
        assert_eq!((report.goodput_ratio, report.jain), (0.95, 0.95));
        assert!((report.jain_mean - 0.96).abs() < 1e-9);
    }
}
