//! The sandbox of `cedos prox`: what a proxy keeps of the machine that it runs on (docs/security.md has the table).
//!
//! It is entered before the process has threads, so that all of them are in it, and before a socket is opened. A
//! process that begins anew for a takeover is in it already.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Context as _;
use cedos_prox::TunnelHelper;
use cedos_sandbox::{
    CapabilitySet, FileAccess, ProcessSandbox, ProgramStarts, SandboxReport, program_loader,
    set_confinement,
};
use nix::unistd::geteuid;

use super::prox::ProxArgs;
use super::prox_control::TUNNEL_HELPER_VERB;
use super::prox_state::create_private_dir;
use super::system_files::allow_system_files;

/// The first port for which no capability is needed.
const FREE_PORT_MIN: u16 = 1024; // net.ipv4.ip_unprivileged_port_start, unless it is changed

/// The sandbox that the proxy's process has entered.
pub struct ProxSandbox {
    /// Which parts of the sandbox hold, and why others do not.
    pub report: SandboxReport,
    /// The helper process that changes the system's network in place of this process; `None`
    /// without inner networks.
    pub tunnel_helper: Option<TunnelHelper>,
}

/// Enters the sandbox that the options allow. Nothing without one.
///
/// # Errors
/// The settings make no sense, or the helper for inner networks cannot be started.
pub fn enter(args: &mut ProxArgs) -> anyhow::Result<Option<ProxSandbox>> {
    if args.no_sandbox {
        set_confinement(false);
        return Ok(None);
    }
    if !args.begins_server() {
        return Ok(None);
    }
    args.settle_state_dir()?;
    let nets = args.config()?.tunnel_nets;
    let tunnel_helper = match nets.is_empty() {
        true => None,
        // `ip` and `nft` change the system's network, now and at the end.
        false => Some(
            TunnelHelper::start(&["prox", TUNNEL_HELPER_VERB], &nets)
                .context("cannot start the helper for --tunnel-net")?,
        ),
    };
    let mut files = files_of(args)?;
    if tunnel_helper.is_some() {
        files.write("/dev/net/tun");
    }
    let capabilities = capabilities_of(args, &files);
    let sandbox = ProcessSandbox {
        files,
        // The proxy that is taken over begins anew.
        starts: ProgramStarts::BecomesAnother,
        capabilities,
    };
    Ok(Some(ProxSandbox {
        report: sandbox.enter(),
        tunnel_helper,
    }))
}

/// Files that the proxy reads and writes, now and after settings are reloaded.
fn files_of(args: &ProxArgs) -> anyhow::Result<FileAccess> {
    let config = args.config()?;
    let mut files = FileAccess::default();
    allow_system_files(&mut files);
    // Not its path, which leads to the new program after an upgrade.
    files.run("/proc/self/exe");
    if let Some(loader) = program_loader() {
        files.run(loader);
    }
    let folders = [
        args.state_dir.as_deref(),
        config.copies_dir.as_deref(),
        args.qlog.folder(),
    ];
    for folder in folders.into_iter().flatten() {
        // One that cannot be made is reported where it is used.
        let _ = create_private_dir(folder);
        files.write(folder);
    }
    files.write(&config.state_dir);
    let read = [
        &args.config,
        &args.key,
        &args.stream_cert,
        &args.stream_key,
        &args.ca,
        &config.ca_file,
    ];
    for file in read.into_iter().flatten() {
        files.read_replaceable(file);
    }
    if let Some(log) = args
        .access_log
        .as_deref()
        .filter(|log| *log != Path::new("-"))
    {
        // One in a folder of many programs must exist before the sandbox. What is wrong with it is reported later.
        let _ = cedos_prox::check_access_log(log);
        files.write_replaceable(log);
    }
    Ok(files)
}

/// Capabilities that the proxy needs, of those that it has.
fn capabilities_of(args: &ProxArgs, files: &FileAccess) -> CapabilitySet {
    let mut kept = CapabilitySet::empty();
    let ports = [
        Some(args.listen),
        args.stream_listen,
        args.tcp_listen,
        args.metrics_listen,
    ];
    let is_low = |port: u16| (1..FREE_PORT_MIN).contains(&port);
    // The name server of inner networks has port 53.
    let serves_names = args
        .config()
        .is_ok_and(|config| !config.tunnel_nets.is_empty());
    if serves_names || ports.into_iter().flatten().any(|at| is_low(at.port())) {
        kept |= CapabilitySet::NET_BIND_SERVICE;
    }
    // What the system grants to everybody is less than the sockets' buffers.
    if !grants_large_buffers() {
        kept |= CapabilitySet::NET_ADMIN;
    }
    // Root opens what others own by this capability.
    let is_foreign = |path: &Path| {
        path.metadata()
            .is_ok_and(|found| found.uid() != geteuid().as_raw())
    };
    // Files of the name service are everybody's to read.
    let of_system = |path: &Path| path.starts_with("/proc") || path.starts_with("/run/systemd");
    let own = files.paths().filter(|path| !of_system(path));
    if geteuid().is_root() && own.into_iter().any(is_foreign) {
        kept |= CapabilitySet::DAC_OVERRIDE;
    }
    kept
}

/// Whether the system grants every process as large socket buffers as the proxy wants.
fn grants_large_buffers() -> bool {
    ["rmem_max", "wmem_max"].iter().all(|name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}"));
        let bytes = text.ok().and_then(|text| text.trim().parse::<usize>().ok());
        bytes.is_some_and(|bytes| bytes >= d2tp_driver::SOCKET_BUFFER_BYTES)
    })
}
