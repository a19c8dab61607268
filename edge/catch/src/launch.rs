//! Starts a program so that its connections can be caught.
//!
//! ```text
//!  this process ── fork ──▶ child: its own namespaces, if requested; sockets in them
//!        │ ◀── the sockets, and a porter's channel ───┤
//!        │ ── go: the environment ──────────────────▶ │ the filter, if requested
//!        │ ◀── the filter's listener ─────────────────┤
//!        │                                            └── execve
//! ```
//!
//! It must be called before this process has threads, because the child continues with its copy.
//!
//! In its own namespace every address leads back into it. Without a TUN they all belong to the
//! loopback: there is no listener, so a direct connection is refused at once, and our name server
//! answers at any address. With a TUN, packets to other hosts come out of it.

use std::ffi::{CString, OsString};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use netlink_packet_route::address::AddressHeaderFlags;
use netlink_packet_route::route::{RouteScope, RouteType};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigHandler, SigSet, Signal};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use nix::unistd::{ForkResult, Pid, fork};
use rtnetlink::{LinkUnspec, RouteMessageBuilder};
use socket2::SockRef;

use crate::executable::Executable;
use crate::notify::{self, SeccompSupervisor};
use crate::pair::{CatchPort, NamespaceSockets, ReservedPort};
use crate::preload::{self, PreloadListener};
use crate::stand_ins::NameStandIns;
use crate::{dns, fd_passing, pair};

/// The loopback interface of a new namespace.
const LOOPBACK_INDEX: u32 = 1;

/// The kernel's table of its own addresses.
const TABLE_LOCAL: u32 = 255; // linux/rtnetlink.h: RT_TABLE_LOCAL

/// The program's address on the TUN. A C library that sees only loopback addresses does not resolve
/// names.
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 19, 255, 253);

/// The program's IPv6 address on its TUN (RFC 4193). Without one it would send from a link-local address, which
/// the kernel makes some time after the link is up.
const OWN_IPV6_ADDRESS: Ipv6Addr = Ipv6Addr::new(0xfd63, 0x6564, 0x6f73, 0, 0, 0, 0, 1);
const TUN_NAME: &str = "cedos0";

/// The MTU of the TUN in bytes: large packets cost least, but a window should hold several.
const TUN_MTU: u16 = 9_000; // a guess

/// The network namespace in which a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramNamespace {
    /// This process's namespace.
    Shared,
    /// Its own namespace, without any network.
    Own,
    /// Its own namespace, with a TUN that receives outgoing packets.
    Tun,
}

/// How to start a program.
#[derive(Debug)]
pub struct LaunchPlan {
    /// The program to start.
    pub program: Executable,
    /// The arguments, the first of which is the program's name.
    pub words: Vec<OsString>,
    /// The network namespace.
    pub namespace: ProgramNamespace,
    /// Whether the kernel holds its connect calls until they are answered.
    pub notify: bool,
}

/// Sockets and devices that the child created.
pub struct LaunchResources {
    /// The listening socket of the local proxy.
    pub proxy: TcpListener,
    /// The socket that preload.c sends requests to.
    pub preload_socket: OwnedFd,
    /// The name of the socket on which the preloaded library is served.
    pub preload_name: OsString,
    /// The sockets of the name server, for [`crate::serve`].
    pub dns: Vec<OwnedFd>,
    /// The UDP port of the name server.
    pub dns_port: u16,
    /// The program's TUN device.
    pub tun: Option<OwnedFd>,
    /// The MTU of the TUN device.
    pub tun_mtu: u16,
    reserved: ReservedPort,
    socket_server: Option<OwnedFd>,
}

impl LaunchResources {
    /// Takes the other ends of the program's sockets. Must be called on a tokio runtime. `porter`
    /// creates sockets in the program's namespace, if that is not this process's.
    ///
    /// # Errors
    /// The system's error.
    pub fn port(reserved: (OwnedFd, OwnedFd), porter: Option<OwnedFd>) -> io::Result<CatchPort> {
        let porter = porter.map(NamespaceSockets::new).transpose()?.map(Arc::new);
        let (all, mute) = reserved;
        CatchPort::new(
            ReservedPort {
                all,
                syn_sink: mute,
            },
            porter,
        )
    }

    /// Takes the parts that [`LaunchResources::port`] needs.
    pub fn take_port(&mut self) -> io::Result<((OwnedFd, OwnedFd), Option<OwnedFd>)> {
        let pair = (
            self.reserved.all.try_clone()?,
            self.reserved.syn_sink.try_clone()?,
        );
        Ok((pair, self.socket_server.take()))
    }

    /// Receives the requests of preload.c. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The system's error.
    pub fn preload_listener(
        ask: OwnedFd,
        names: Arc<NameStandIns>,
        dns_port: u16,
        namespace: ProgramNamespace,
    ) -> io::Result<PreloadListener> {
        let me = nix::unistd::getuid().as_raw();
        PreloadListener::new(
            ask,
            names,
            dns_port,
            (namespace == ProgramNamespace::Shared).then_some(me),
        )
    }
}

/// A program that is ready to be started.
pub struct PreparedProgram {
    pid: Pid,
    channel: OwnedFd,
    socket_server: Pid,
    notify: bool,
    /// The sockets and devices that the child created.
    pub resources: LaunchResources,
}

/// A program that was started, and its helper process.
pub struct RunningProgram {
    /// The process id.
    pub pid: Pid,
    /// The process that creates sockets in another namespace, which ends with this process.
    pub socket_server: Pid,
    listener: Option<OwnedFd>,
}

impl RunningProgram {
    /// Supervises the program's calls, if it was started so. Must be called once, on a tokio
    /// runtime.
    ///
    /// # Errors
    /// The system's error.
    pub fn supervisor(&mut self) -> io::Result<Option<SeccompSupervisor>> {
        self.listener.take().map(SeccompSupervisor::new).transpose()
    }
}

/// Starts a program up to the point where it waits for [`PreparedProgram::go`].
///
/// # Errors
/// The reason, in words.
pub fn launch(plan: &LaunchPlan) -> io::Result<PreparedProgram> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    let path = plan.program.c_path()?;
    let words: Vec<CString> = plan
        .words
        .iter()
        .map(|word| CString::new(word.as_bytes()))
        .collect::<Result<_, _>>()?;
    // SAFETY: this process has one thread, so the child may use its copy freely.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(ours);
            let failed = begin(plan, &theirs, &path, &words);
            let text = failed.to_string();
            let errno = failed.raw_os_error().unwrap_or(0).to_ne_bytes();
            let _ = send(
                theirs.as_raw_fd(),
                &[b"!", &errno[..], text.as_bytes()].concat(),
                MsgFlags::MSG_NOSIGNAL,
            );
            // SAFETY: no code of the parent may run at the end of the child.
            unsafe { libc::_exit(127) }
        }
        ForkResult::Parent { child } => {
            drop(theirs);
            receive_resources(child, ours, plan)
        }
    }
}

/// The child's error message.
fn child_error(said: &[u8]) -> io::Error {
    let text = said.get(5..).unwrap_or(b"the program cannot be started");
    let text = String::from_utf8_lossy(text).into_owned();
    io::Error::other(text)
}

fn receive_resources(pid: Pid, channel: OwnedFd, plan: &LaunchPlan) -> io::Result<PreparedProgram> {
    let gone = || {
        let _ = nix::sys::wait::waitpid(pid, None);
    };
    let (said, fds) = fd_passing::take(&channel).inspect_err(|_| gone())?;
    let Some((b'=', said)) = said.split_first() else {
        gone();
        return Err(child_error(&said));
    };
    let porter: [u8; 4] = said
        .get(..4)
        .and_then(|b| b.try_into().ok())
        .unwrap_or_default();
    let porter = Pid::from_raw(i32::from_ne_bytes(porter));
    let ask_name = OsString::from_vec(said[4..].to_vec());
    let mut fds = fds.into_iter();
    let mut next = || fds.next().ok_or(io::ErrorKind::UnexpectedEof);
    let (proxy, ask, all, mute) = (next()?, next()?, next()?, next()?);
    let tun = match plan.namespace {
        ProgramNamespace::Tun => Some(next()?),
        _ => None,
    };
    let porter_channel = next()?;
    let dns: Vec<OwnedFd> = fds.collect();
    let dns_port = dns
        .first()
        .ok_or(io::ErrorKind::UnexpectedEof)
        .and_then(|socket| SockRef::from(socket).local_addr().map_err(|e| e.kind()))?
        .as_socket()
        .map_or(0, |at| at.port());
    let proxy = TcpListener::from(proxy);
    proxy.set_nonblocking(true)?;
    Ok(PreparedProgram {
        pid,
        channel,
        socket_server: porter,
        notify: plan.notify,
        resources: LaunchResources {
            proxy,
            preload_socket: ask,
            preload_name: ask_name,
            dns,
            dns_port,
            tun,
            tun_mtu: TUN_MTU,
            reserved: ReservedPort {
                all,
                syn_sink: mute,
            },
            socket_server: Some(porter_channel),
        },
    })
}

impl PreparedProgram {
    /// Lets the program run, with these variables in addition to its environment.
    ///
    /// # Errors
    /// It could not be executed.
    pub fn go(
        self,
        variables: &[(OsString, OsString)],
    ) -> io::Result<(RunningProgram, LaunchResources)> {
        let mut said = Vec::new();
        for (name, value) in variables {
            said.extend(name.as_bytes());
            said.push(b'=');
            said.extend(value.as_bytes());
            said.push(0);
        }
        said.insert(0, b'>');
        fd_passing::give(&self.channel, &said, &[])?;
        let gone = || {
            let _ = nix::sys::wait::waitpid(self.pid, None);
        };
        let mut listener = None;
        if self.notify {
            let (said, mut fds) = fd_passing::take(&self.channel)?;
            if said.first() != Some(&b'=') {
                gone();
                return Err(child_error(&said));
            }
            listener = fds.pop();
        }
        // The channel closes when the child executes the program.
        let (said, _) = fd_passing::take(&self.channel)?;
        if !said.is_empty() {
            gone();
            return Err(child_error(&said));
        }
        let running = RunningProgram {
            pid: self.pid,
            socket_server: self.socket_server,
            listener,
        };
        Ok((running, self.resources))
    }
}

/// Sets up the child, up to the start of the program. Returns why that failed.
fn begin(plan: &LaunchPlan, channel: &OwnedFd, path: &CString, words: &[CString]) -> io::Error {
    let prepared = prepare(plan, channel).and_then(|()| await_go(channel));
    let environment = match prepared {
        Ok(environment) => environment,
        Err(error) => return error,
    };
    if plan.notify {
        let installed = notify::install()
            .and_then(|listener| fd_passing::give(channel, b"=", &[listener.as_fd()]));
        if let Err(error) = installed {
            let text = format!("this system cannot hold connections (seccomp): {error}");
            return io::Error::other(text);
        }
    }
    restore_signals();
    let Err(errno) = nix::unistd::execve(path, words, &environment);
    let shown = plan.program.path.display();
    let error = io::Error::from(errno);
    io::Error::new(error.kind(), format!("{shown} cannot be run: {error}"))
}

/// Restores the default of SIGPIPE, which Rust ignores: ignored signals survive execve.
fn restore_signals() {
    // SAFETY: no handler of this program is left.
    unsafe {
        let _ = nix::sys::signal::signal(Signal::SIGPIPE, SigHandler::SigDfl);
    }
    let _ = SigSet::empty().thread_set_mask();
}

fn await_go(channel: &OwnedFd) -> io::Result<Vec<CString>> {
    let (said, _) = fd_passing::take(channel)?;
    let Some((b'>', said)) = said.split_first() else {
        // The parent has ended.
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    let said: Vec<&[u8]> = said.split(|b| *b == 0).filter(|v| !v.is_empty()).collect();
    let name = |pair: &[u8]| pair.split(|b| *b == b'=').next().map(<[u8]>::to_vec);
    let changed: Vec<_> = said.iter().filter_map(|pair| name(pair)).collect();
    let kept = std::env::vars_os().filter_map(|(name, value)| {
        let is_kept = !changed.iter().any(|c| c == name.as_bytes());
        is_kept.then(|| [name.as_bytes(), b"=", value.as_bytes()].concat())
    });
    // A variable with an empty value is removed.
    let set = said.iter().filter(|pair| !pair.ends_with(b"="));
    kept.chain(set.map(|pair| pair.to_vec()))
        .map(|pair| CString::new(pair).map_err(io::Error::from))
        .collect()
}

fn prepare(plan: &LaunchPlan, channel: &OwnedFd) -> io::Result<()> {
    let said = |what: &str, error: io::Error| io::Error::other(format!("{what}: {error}"));
    let mut tun = None;
    if plan.namespace != ProgramNamespace::Shared {
        enter().map_err(|e| said(NO_NAMESPACE, e))?;
        tun = configure_namespace(plan.namespace)?;
    }
    let name = format!("cedos-run-{}", std::process::id()).into_bytes();
    let ask = preload::bind_abstract(&name).map_err(|e| said("no place to ask", e))?;
    let proxy = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let own = plan.namespace != ProgramNamespace::Shared;
    let dns = match own {
        true => dns::sockets(),
        false => dns::socket((Ipv4Addr::LOCALHOST, 0).into()).map(|socket| vec![socket.into()]),
    };
    let dns = dns.map_err(|e| said("no name server", e))?;
    let reserved = pair::reserve().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied if !own => said(NO_FILTER, error),
        _ => said("no port for connections", error),
    })?;
    let (porter, porter_channel) = start_socket_server(!own)?;
    let mut fds = vec![
        proxy.as_fd(),
        ask.as_fd(),
        reserved.all.as_fd(),
        reserved.syn_sink.as_fd(),
    ];
    fds.extend(tun.iter().map(AsFd::as_fd));
    fds.push(porter_channel.as_fd());
    fds.extend(dns.iter().map(AsFd::as_fd));
    let message = [&b"="[..], &porter.to_ne_bytes(), &name].concat();
    fd_passing::give(channel, &message, &fds)
}

const NO_NAMESPACE: &str = "this system gives no network namespace (user namespaces may be \
    switched off; root needs none)";

const NO_FILTER: &str = "no port for connections: on this system only root may filter a socket's \
    packets. With --strict the program has its own network, where it may";

/// Enters new namespaces, with a user namespace if necessary.
fn enter() -> io::Result<()> {
    let Err(error) = unshare(CloneFlags::CLONE_NEWNET) else {
        return Ok(());
    };
    if error != nix::errno::Errno::EPERM {
        return Err(error.into());
    }
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)?;
    // user_namespaces(7) requires it before a group can be mapped.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))
}

/// Interfaces and routes of a new namespace.
fn configure_namespace(namespace: ProgramNamespace) -> io::Result<Option<OwnedFd>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        io::Error::other(format!("{what} of the program's namespace: {error}"))
    };
    let tun = match namespace {
        ProgramNamespace::Tun => {
            let device = tun_rs::DeviceBuilder::new()
                .name(TUN_NAME)
                .layer(tun_rs::Layer::L3)
                .ipv4(OWN_ADDRESS, 30_u8, None)
                .mtu(TUN_MTU)
                .with(|options| {
                    options.offload(false).packet_information(false);
                })
                .build_sync()
                .map_err(|e| failed("no TUN", &e))?;
            // SAFETY: its owner has given it up.
            Some(unsafe { OwnedFd::from_raw_fd(device.into_raw_fd()) })
        }
        _ => None,
    };
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let connection = tokio::spawn(connection);
        let up = LinkUnspec::new_with_index(LOOPBACK_INDEX).up().build();
        let up = handle.link().set(up).execute().await;
        up.map_err(|e| failed("no loopback", &e))?;
        if tun.is_none() {
            let own = handle.address();
            let own = own.add(LOOPBACK_INDEX, OWN_ADDRESS.into(), 32).execute();
            own.await.map_err(|e| failed("no address", &e))?;
        }
        let out = match &tun {
            Some(_) => nix::net::if_::if_nametoindex(TUN_NAME)?,
            None => LOOPBACK_INDEX,
        };
        if tun.is_some() {
            let own = handle.address();
            let mut own = own.add(out, OWN_IPV6_ADDRESS.into(), 128);
            // Nobody else is on the link: it can be used at once.
            own.message_mut().header.flags = AddressHeaderFlags::Nodad;
            // The kernel adds this route some time later, on a busy machine after seconds; until then answers are
            // dropped.
            let local = RouteMessageBuilder::<Ipv6Addr>::new()
                .destination_prefix(OWN_IPV6_ADDRESS, 128)
                .output_interface(out)
                .kind(RouteType::Local)
                .table_id(TABLE_LOCAL);
            // On a kernel without IPv6 there is nothing to set up.
            let _ = own.execute().await;
            let _ = handle.route().add(local.build()).execute().await;
        }
        let mut four = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(out);
        let mut six = RouteMessageBuilder::<Ipv6Addr>::new().output_interface(out);
        if tun.is_none() {
            four = four.kind(RouteType::Local).scope(RouteScope::Host);
            four = four.table_id(TABLE_LOCAL);
            six = six.kind(RouteType::Local).table_id(TABLE_LOCAL);
        }
        let routed = handle.route().add(four.build()).execute().await;
        routed.map_err(|e| failed("no route", &e))?;
        // On a kernel without IPv6 there is nothing to set up.
        let _ = handle.route().add(six.build()).execute().await;
        connection.abort();
        Ok::<(), io::Error>(())
    })?;
    Ok(tun)
}

/// Starts a process that stays in this namespace, as a child of the parent. `lookups`: it enters a
/// namespace for [`crate::LookupNamespace`] at the first request.
fn start_socket_server(lookups: bool) -> io::Result<(i32, OwnedFd)> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    let flags = libc::CLONE_PARENT | libc::SIGCHLD;
    // SAFETY: like fork, except for the parent of the child; this process has one thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        0 => {
            drop(ours);
            run_socket_server(theirs, lookups)
        }
        pid if pid > 0 => Ok((pid as i32, ours)),
        _ => Err(io::Error::last_os_error()),
    }
}

fn run_socket_server(channel: OwnedFd, lookups: bool) -> ! {
    let _ = SigSet::all().thread_set_mask();
    let _ = nix::sys::prctl::set_name(c"cedos-porter");
    // It must hold neither output nor the other channel. SAFETY: plain numbers; nothing is used
    // afterwards except the channel, as 0.
    unsafe {
        libc::dup2(channel.as_raw_fd(), 0);
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        std::mem::forget(channel);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        libc::dup2(null, 1);
        libc::dup2(null, 2);
        libc::close(null);
        pair::serve_sockets(&OwnedFd::from_raw_fd(0), || match lookups {
            true => enter().and_then(|()| configure_namespace(ProgramNamespace::Own).map(drop)),
            false => Ok(()),
        });
        libc::_exit(0)
    }
}
