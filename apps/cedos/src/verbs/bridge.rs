//! `cedos bridge`: turns options into a bridge between a serial line and proxies, and says what it does.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use d2tp_driver::ServerList;
use d2tp_serial::{
    BAUD_DEFAULT, BAUD_RANGE, Bridge, BridgeCounts, BridgeEvent, Callsign, LineFraming, SerialLine,
};
use tokio::signal::unix::{SignalKind, signal};

use super::log_levels::log_warnings;

/// The port of a proxy whose address states none.
const PORT_DEFAULT: u16 = 4433;

/// Carry packets between devices on a serial line, or a radio that looks like one, and a proxy
///
/// The bridge sees sealed packets only, and needs no key. Devices use the line with --link
/// serial:/dev/ttyUSB0@115200=free (docs/bridge.md).
///
/// Exit codes: 0 stopped (Ctrl-C), 1 the device or a proxy cannot be had, 2 usage.
#[derive(Debug, Args)]
pub struct BridgeArgs {
    /// The serial device
    #[arg(long, value_name = "DEVICE")]
    serial: std::path::PathBuf,
    /// Bits per second of the line; devices must use the same
    #[arg(long, value_name = "BAUD", default_value_t = BAUD_DEFAULT,
          value_parser = clap::value_parser!(u32).range(i64::from(*BAUD_RANGE.start())..=i64::from(*BAUD_RANGE.end())))]
    baud: u32,
    /// A proxy to which packets go: host, host:port, or d2tp://host:port/KEY (repeatable: the devices choose
    /// by the key that they know)
    #[arg(long = "prox", value_name = "PROXY", required = true)]
    proxies: Vec<String>,
    /// Speak KISS to a packet-radio modem (TNC), as the station CALLSIGN
    #[arg(long, value_name = "CALLSIGN")]
    kiss: Option<Callsign>,
    /// Listen before sending: only one station can send at a time
    #[arg(long)]
    half_duplex: bool,
    /// Give turns: devices send only when they are polled, so that they need not hear each other
    #[arg(long)]
    poll: bool,
}

impl BridgeArgs {
    fn line(&self) -> SerialLine {
        SerialLine {
            framing: self
                .kiss
                .clone()
                .map_or(LineFraming::Cobs, LineFraming::Kiss),
            half_duplex: self.half_duplex || self.poll,
            polled: self.poll,
            ..SerialLine::new(&self.serial, self.baud)
        }
    }
}

/// Runs `cedos bridge` until SIGTERM or Ctrl-C.
///
/// # Errors
/// A proxy's name has no address, or the device cannot be opened.
pub async fn run(args: BridgeArgs) -> anyhow::Result<ExitCode> {
    log_warnings("cedos bridge");
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for Ctrl-C")?;
    let mut proxies = Vec::new();
    for proxy in &args.proxies {
        proxies.extend(addresses(proxy).await?);
    }
    proxies.sort_unstable();
    proxies.dedup();
    let line = args.line();
    let mut bridge = Bridge::open(line.clone(), proxies)?;
    let frame = line.frame_bytes_max();
    print_stdout(&format!(
        "{line}: {} bytes per second, frames of up to {frame} bytes",
        line.bytes_per_second()
    ));
    let stopped = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::select! {
        () = bridge.run(say) => {}
        () = stopped => {}
    }
    say_counts(&bridge.counts());
    Ok(ExitCode::SUCCESS)
}

fn say(counts: &BridgeCounts, event: BridgeEvent) {
    match event {
        BridgeEvent::LineOpen if counts.line.bytes_in == 0 => {}
        BridgeEvent::LineOpen => print_stderr("cedos bridge: the serial device is back"),
        BridgeEvent::LineGone { cause } => {
            print_stderr(&format!(
                "cedos bridge: {cause}; waiting for it to come back"
            ));
        }
        BridgeEvent::Answered { mobile, server } => {
            print_stdout(&format!(
                "device {mobile}: answered by the proxy at {server}"
            ));
        }
    }
}

fn say_counts(counts: &BridgeCounts) {
    print_stdout(&format!(
        "{} packets to proxies, {} to devices; line: {}",
        counts.up, counts.down, counts.line
    ));
    let dropped = [
        ("datagrams of other hosts", counts.strangers),
        ("packets larger than 1,200 bytes", counts.too_large),
        ("packets that the network did not take", counts.unsent),
        ("devices that gave way to others", counts.displaced),
    ];
    for (what, n) in dropped.into_iter().filter(|(_, n)| *n > 0) {
        print_stdout(&format!("dropped: {n} {what}"));
    }
}

/// The addresses of a proxy: one of each family.
async fn addresses(proxy: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let (host, port) = match proxy.starts_with("d2tp://") {
        true => {
            let list: ServerList = proxy.parse()?;
            let first = list.first();
            (first.host.clone(), first.port)
        }
        false => host_and_port(proxy),
    };
    let unknown = || format!("the proxy {host} has no address; check its name and the network");
    let found = tokio::net::lookup_host((host.as_str(), port))
        .await
        .with_context(unknown)?;
    let mut kept: Vec<SocketAddr> = Vec::new();
    for address in found {
        if !kept.iter().any(|k| k.is_ipv6() == address.is_ipv6()) {
            kept.push(address);
        }
    }
    match kept.is_empty() {
        true => Err(anyhow!(unknown())),
        false => Ok(kept),
    }
}

fn host_and_port(text: &str) -> (String, u16) {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return (address.ip().to_string(), address.port());
    }
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return (ip.to_string(), PORT_DEFAULT);
    }
    match text.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() => {
            (host.to_owned(), port.parse().unwrap_or(PORT_DEFAULT))
        }
        _ => (text.to_owned(), PORT_DEFAULT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_named_by_host_or_address_with_a_port_or_without() {
        for (text, host, port) in [
            ("proxy.example", "proxy.example", 4433),
            ("proxy.example:443", "proxy.example", 443),
            ("192.0.2.1", "192.0.2.1", 4433),
            ("192.0.2.1:443", "192.0.2.1", 443),
            ("[2001:db8::1]:443", "2001:db8::1", 443),
            ("[2001:db8::1]", "2001:db8::1", 4433),
            ("2001:db8::1", "2001:db8::1", 4433),
        ] {
            assert_eq!(host_and_port(text), (host.to_owned(), port), "{text}");
        }
    }
}
