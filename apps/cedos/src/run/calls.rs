//! Handles caught calls: connects a program's own socket to a local peer, and carries its data in a
//! flow.
//!
//! ```text
//!  blocking      held ── the flow opens ── the sockets meet ── connect() returns 0, or the reason
//!  non-blocking  EINPROGRESS ── the flow opens ── the sockets meet: writable, or ECONNREFUSED
//! ```

use cedos_terminal::print_stderr;
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cedos_agent::proxy::{ConnOptions, ConnectRefusal, ProxySession, RefusalCause, TargetAddress};
use d2tp_catch::{
    CallAnswer, CallVerdict, CatchPort, CaughtCall, DNS_PORT, LookupNamespace, NameStandIns,
    PendingConnection, ProgramNamespace, SeccompSupervisor, UncaughtReason, host_replacement,
    is_local,
};
use socket2::{Domain, SockRef, Type};
use tokio::sync::{Semaphore, mpsc};

/// Connections that are being made or carried; one more is told that there is no room.
const CALLS_MAX: usize = 4096; // a guess: a fifth of a process's descriptors

/// Filters that are heard at once, two descriptors each; a program too many is told that it is not caught.
const FILTERS_MAX: usize = 4096; // a guess: two fifths of a process's descriptors

/// The maximum number of programs that are reported as not caught.
const MISSED_MAX: usize = 64; // a guess

/// Reasons why connections are not made that are said.
const REFUSED_MAX: usize = 32; // a guess

/// Between two attempts to meet a socket whose own SYN is on its way.
const MEET_AGAIN: Duration = Duration::from_millis(1);

/// Answers caught calls.
pub struct CallHandler {
    /// The session that carries caught connections.
    pub session: Arc<ProxySession>,
    /// The options of caught connections.
    pub options: ConnOptions,
    /// What addresses stand for.
    pub stand_ins: Arc<NameStandIns>,
    /// The loopback port at which caught connections arrive.
    pub catch_port: Arc<CatchPort>,
    /// Whether the program shares the host's network namespace, or has one of its own.
    pub namespace: ProgramNamespace,
    /// Our name server, for programs that share the host's network namespace.
    pub dns: SocketAddr,
    /// Sockets for programs that ask name servers themselves; none where the program has a network
    /// namespace of its own.
    pub lookups: Option<Arc<LookupNamespace>>,
    /// Receives the address of each socket that the program listens on.
    pub listeners: mpsc::UnboundedSender<SocketAddr>,
    /// Permits: one for each caught connection.
    pub connection_permits: Arc<Semaphore>,
    /// Permits: one for each system-call filter.
    pub filter_permits: Arc<Semaphore>,
    /// Programs of which was said that they are not caught.
    pub reported_uncaught: Mutex<BTreeSet<String>>,
    /// Why connections were refused, as far as it was said.
    pub reported_refusals: Mutex<BTreeSet<String>>,
}

impl CallHandler {
    /// Room for all there may be.
    pub fn new_connection_permits() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(CALLS_MAX))
    }

    /// Room for all the filters there may be.
    pub fn new_filter_permits() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(FILTERS_MAX))
    }

    /// Answers calls that the kernel holds, until no process has the filter.
    pub async fn supervise(self: Arc<CallHandler>, supervisor: SeccompSupervisor) {
        loop {
            match supervisor.next().await {
                Ok(Some(caught)) => self.answer(caught),
                Ok(None) => return,
                Err(error) => {
                    return tracing::error!(%error, "connections are no longer caught");
                }
            }
        }
    }

    /// Answers a call, now or when it can be.
    pub fn answer(self: &Arc<CallHandler>, caught: CaughtCall) {
        match caught {
            CaughtCall::Listen { socket, answer } => {
                if let Some(at) = SockRef::from(&socket)
                    .local_addr()
                    .ok()
                    .and_then(|a| a.as_socket())
                {
                    let _ = self.listeners.send(at);
                }
                answer.give(CallVerdict::Continue);
            }
            CaughtCall::Open {
                domain,
                nonblocking,
                answer,
            } => self.open_datagram_socket(domain, nonblocking, answer),
            CaughtCall::Send { socket, to, answer } => self.datagram(socket, to, answer),
            CaughtCall::Supervised { supervisor, answer } => {
                let Ok(room) = self.filter_permits.clone().try_acquire_owned() else {
                    return answer.give(CallVerdict::Failed(libc::ENOBUFS));
                };
                let calls = self.clone();
                tokio::spawn(async move {
                    calls.supervise(supervisor).await;
                    drop(room);
                });
                answer.give(CallVerdict::Done);
            }
            CaughtCall::Unsupervised {
                program,
                because,
                answer,
            } => {
                self.say_missed(&program, &because);
                answer.give(CallVerdict::Done);
            }
            CaughtCall::Connect { socket, to, answer } => {
                let kind = SockRef::from(&socket).r#type();
                match kind {
                    Ok(Type::DGRAM) => self.datagram(socket, to, answer),
                    // A resolver on this machine would ask others.
                    Ok(Type::STREAM) if is_local(to.ip()) && to.port() == DNS_PORT => {
                        self.lookup(socket, answer);
                    }
                    _ if is_local(to.ip()) || self.is_under_way(&socket) => {
                        answer.give(CallVerdict::Continue);
                    }
                    Ok(Type::STREAM) => self.stream(socket, to, answer),
                    Ok(_) if self.namespace != ProgramNamespace::Shared => {
                        answer.give(CallVerdict::Continue);
                    }
                    Ok(_) => answer.give(CallVerdict::Failed(libc::ENETUNREACH)),
                    Err(error) => answer.give(CallVerdict::of(&error)),
                }
            }
        }
    }

    /// Once for each program.
    fn say_missed(&self, program: &str, because: &UncaughtReason) {
        let mut missed = self
            .reported_uncaught
            .lock()
            .expect("nobody panics with it");
        if missed.len() >= MISSED_MAX || !missed.insert(program.to_owned()) {
            return;
        }
        let program = program.escape_debug();
        let fails = self.namespace != ProgramNamespace::Shared
            || matches!(because, UncaughtReason::Unheard(_));
        let because = match because {
            UncaughtReason::System(error) => {
                format!(
                    "loads no C library, and the kernel cannot hold its connections (seccomp: \
                    {error})"
                )
            }
            UncaughtReason::Unheard(error) => {
                format!("loads no C library, and too many such programs run at once ({error})")
            }
            UncaughtReason::Privileged => {
                "loads no C library, and runs with other privileges".to_owned()
            }
            UncaughtReason::Foreign => "is of another architecture".to_owned(),
        };
        let so = match fails {
            true => "its connections fail",
            false => "its connections bypass the proxy",
        };
        print_stderr(&format!(
            "cedos run: {program} is not caught: it {because}, so {so}. To carry them: cedos run \
             --rung tun -- …"
        ));
    }

    /// Prints the reason of a refusal, which an errno cannot express, once for each reason.
    fn say_refused(&self, target: &TargetAddress, refusal: &ConnectRefusal) {
        let text = &refusal.text;
        if matches!(
            refusal.cause,
            RefusalCause::Refused | RefusalCause::TimedOut | RefusalCause::Unreachable
        ) {
            return tracing::info!(%target, "{text}");
        }
        let mut refused = self
            .reported_refusals
            .lock()
            .expect("nobody panics with it");
        match refused.len() < REFUSED_MAX && refused.insert(text.clone()) {
            true => tracing::warn!(%target, "{text}"),
            false => tracing::info!(%target, "{text}"),
        }
    }

    /// A socket that is connected, or about to be: the kernel knows what to say.
    fn is_under_way(&self, socket: &OwnedFd) -> bool {
        // SAFETY: plain numbers, into a place of the size that is said.
        let state = unsafe {
            let mut info: libc::tcp_info = std::mem::zeroed();
            let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
            let told = libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                (&raw mut info).cast(),
                &raw mut len,
            );
            (told == 0).then_some(info.tcpi_state)
        };
        state.is_some_and(|state| state != TCP_CLOSE)
    }

    /// Gives the program a socket of the lookup namespace, so that no datagram leaves by any call. Where
    /// there is none, the kernel creates one, and `connect` and `sendto` are looked at.
    fn open_datagram_socket(&self, domain: Domain, nonblocking: bool, answer: CallAnswer) {
        let Some(lookups) = self.lookups.clone() else {
            return answer.give(CallVerdict::Continue);
        };
        tokio::spawn(async move {
            let made = lookups.socket(domain, Type::DGRAM).await;
            let made = made.and_then(|made| {
                SockRef::from(&made).set_nonblocking(nonblocking)?;
                Ok(made)
            });
            match made {
                Ok(made) => answer.give_socket(&made),
                Err(error) => {
                    tracing::debug!(%error, "a socket of this network namespace");
                    answer.give(CallVerdict::Continue);
                }
            }
        });
    }

    /// Datagrams are not carried. Questions to a name server are answered here, and what is for this
    /// machine stays on it. Where the others can go nowhere they may try.
    fn datagram(&self, socket: OwnedFd, to: SocketAddr, answer: CallAnswer) {
        let Some(lookups) = &self.lookups else {
            return answer.give(CallVerdict::Continue);
        };
        let is_replaced = lookups.contains(&socket);
        match (to.port() == DNS_PORT, is_local(to.ip())) {
            (true, _) if is_replaced => answer.give(CallVerdict::Continue),
            (true, _) => self.lookup(socket, answer),
            (false, true) if is_replaced => match host_replacement(&socket) {
                Ok(socket) => answer.give_socket(&socket),
                Err(error) => answer.give(CallVerdict::of(&error)),
            },
            (false, true) => answer.give(CallVerdict::Continue),
            (false, false) => answer.give(CallVerdict::Failed(libc::ENETUNREACH)),
        }
    }

    /// A socket for questions to a name server.
    fn lookup(&self, socket: OwnedFd, answer: CallAnswer) {
        let Some(lookups) = self.lookups.clone() else {
            return answer.give(CallVerdict::Continue);
        };
        let dns = self.dns;
        tokio::spawn(async move {
            match lookups.replacement(&socket).await {
                Ok(made) => answer.give_socket(&made),
                Err(error) => {
                    tracing::debug!(%error, "a lookup without a socket of its own");
                    answer.give(connect_lookup(&SockRef::from(&socket), dns));
                }
            }
        });
    }

    fn stream(self: &Arc<CallHandler>, socket: OwnedFd, to: SocketAddr, answer: CallAnswer) {
        let Ok(room) = self.connection_permits.clone().try_acquire_owned() else {
            tracing::warn!("more than {CALLS_MAX} connections: refused");
            return answer.give(CallVerdict::Failed(libc::ENOBUFS));
        };
        let target = match self.stand_ins.name_of(to.ip()) {
            Ok(None) => TargetAddress::from(to),
            Ok(Some(host)) => TargetAddress {
                host,
                port: to.port(),
            },
            Err(text) => {
                tracing::warn!("{text}");
                return answer.give(CallVerdict::Failed(libc::EHOSTUNREACH));
            }
        };
        let meeting = match self.catch_port.begin(socket) {
            Ok(meeting) => meeting,
            Err(error) => return answer.give(CallVerdict::of(&error)),
        };
        let calls = self.clone();
        tokio::spawn(async move {
            match meeting.blocks {
                true => calls.held(meeting, target, answer).await,
                false => calls.in_progress(meeting, target, answer).await,
            }
            drop(room);
        });
    }

    async fn held(&self, meeting: PendingConnection, target: TargetAddress, answer: CallAnswer) {
        let open = match self.session.open(&target, self.options).await {
            Ok(open) => open,
            Err(refusal) => {
                self.say_refused(&target, &refusal);
                return answer.give(CallVerdict::Failed(refusal.errno()));
            }
        };
        let theirs = meeting.peer_address;
        let connecting = tokio::task::spawn_blocking(move || meeting.connect());
        let met = loop {
            match self.catch_port.accept_waiting(theirs).await {
                // Its SYN is not on its way yet.
                Err(error)
                    if error.kind() == io::ErrorKind::ConnectionRefused
                        && !connecting.is_finished() =>
                {
                    tokio::time::sleep(MEET_AGAIN).await;
                }
                met => break met,
            }
        };
        let program = match met {
            Ok(program) => program,
            Err(error) => return answer.give(CallVerdict::of(&error)),
        };
        match connecting.await {
            Ok(Ok(())) => answer.give(CallVerdict::Done),
            Ok(Err(error)) => return answer.give(CallVerdict::of(&error)),
            Err(_) => return,
        }
        open.carry(program).await;
    }

    async fn in_progress(
        &self,
        mut meeting: PendingConnection,
        target: TargetAddress,
        answer: CallAnswer,
    ) {
        self.catch_port.guard(&mut meeting).await;
        answer.give(match meeting.connect() {
            Ok(()) => CallVerdict::Done,
            Err(error) => CallVerdict::of(&error),
        });
        match self.session.open(&target, self.options).await {
            Ok(open) => match self.catch_port.establish(meeting).await {
                Ok(program) => open.carry(program).await,
                Err(error) => tracing::debug!(%target, %error, "nobody waits any more"),
            },
            Err(refusal) => {
                self.say_refused(&target, &refusal);
                meeting.refuse();
            }
        }
    }
}

/// Connects a socket for questions to our name server, whose address is not the one that was asked: a
/// resolver that looks at it takes no answer.
fn connect_lookup(socket: &SockRef<'_>, dns: SocketAddr) -> CallVerdict {
    if !matches!(socket.r#type(), Ok(Type::DGRAM)) {
        return CallVerdict::Failed(libc::ECONNREFUSED);
    }
    let is_six = socket.domain().is_ok_and(|d| d == Domain::IPV6);
    let to = match (is_six, dns) {
        (true, SocketAddr::V4(four)) => (four.ip().to_ipv6_mapped(), four.port()).into(),
        (_, at) => at,
    };
    match socket.connect(&to.into()) {
        Ok(()) => CallVerdict::Done,
        Err(error) => CallVerdict::of(&error),
    }
}

/// The state of a closed TCP socket. // linux/tcp_states.h
const TCP_CLOSE: u8 = 7;
