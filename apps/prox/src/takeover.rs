//! The next process of a proxy takes the sockets of the running one over.
//!
//! ```text
//!  new process (--upgrade)              running process                      the same, begun anew
//!    ── {"do":"take-over"} ───────────▶
//!    ◀─ {"ok":true} and its sockets ───
//!    reads its settings, keys, files    goes on serving
//!    ── {"do":"release"} ─────────────▶ prepares to begin anew; sessions become records,
//!                                       execve of itself ─────────────────▶  holds the sockets only
//!    ◀─ {"ok":true} and the servers' connections of tunnels ──────────────── waits
//!    opens the journal, serves
//!    ── {"do":"served"} ──────────────────────────────────────────────────▶  ends
//!                                                  the connection breaks ─▶  serves again
//! ```
//!
//! `execve` closes the journal, stops every fetch and every task at one instant, and leaves a process that can serve
//! again: whatever becomes of the new process, a proxy serves. What devices send meanwhile waits in the sockets. What
//! can fail does so before the first session becomes a record; a new process whose predecessor has gone serves.
//!
//! Sockets travel beside messages (unix(7), SCM_RIGHTS), of which the kernel allows 253 with one: after the message,
//! which says how many there are, each further byte brings as many as are left, up to a limit.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::Pid;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc};

use crate::control::{ControlClient, ControlError};
use crate::tunnel_handover::{PassedTunnels, TUNNELS_VARIABLE};
use crate::tunnel_helper::HELPER_SOCKET_VARIABLE;

/// The most sockets that are handed over: two for each of 256 workers, and those of streams and of TCP.
const SOCKETS_MAX: usize = 1_024;
/// The most sockets beside one message.
const SOCKETS_AT_ONCE: usize = 200; // SCM_MAX_FD is 253
/// The most bytes of a message.
const MESSAGE_BYTES_MAX: usize = 256;
/// How long the new process may take to read its settings.
const PREPARATION_MAX: Duration = Duration::from_secs(60); // a guess: it reads a few small files
/// How long the new process may take to serve after the running one has ended.
const SERVED_WITHIN: Duration = Duration::from_secs(120); // a guess: a journal of a million sessions opens in seconds
/// The variable by which a process that begins anew knows that its standard input holds the sockets.
const STANDBY_VARIABLE: &str = "CEDOS_PROX_STANDBY";

/// The sockets of a running proxy, for the process that takes them over.
pub struct TakeoverOffer {
    /// The sockets kept while a process prepares to take them over.
    sockets: Mutex<Vec<OwnedFd>>,
    released: mpsc::Sender<Standby>,
}

impl TakeoverOffer {
    /// Offers these sockets. The receiver gets the standby as which this process is to begin anew, once its sessions
    /// are records.
    pub fn new(sockets: Vec<OwnedFd>) -> (Arc<TakeoverOffer>, mpsc::Receiver<Standby>) {
        let (released, on_release) = mpsc::channel(1);
        let sockets = Mutex::new(sockets);
        (Arc::new(TakeoverOffer { sockets, released }), on_release)
    }

    /// Serves a process that asked to take the sockets over.
    pub(crate) async fn attend(&self, stream: tokio::net::UnixStream) -> io::Result<()> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        let Ok(sockets) = self.sockets.try_lock() else {
            let text = "another process is taking this proxy over already";
            return send_message(&stream, &json!({"ok": false, "text": text}));
        };
        let passed: Vec<_> = sockets.iter().map(OwnedFd::as_fd).collect();
        let sent = match sockets.len() > SOCKETS_MAX {
            true => {
                let text = format!("{} sockets are too many to hand over", sockets.len());
                Err(io::Error::other(text))
            }
            false => send_with(&stream, &json!({"ok": true}), &passed),
        };
        if let Err(error) = sent {
            let text = format!("it cannot hand its sockets over: {error}");
            send_message(&stream, &json!({"ok": false, "text": text}))?;
            return Err(error);
        }
        tracing::info!("a new process prepares to take over");
        let waiting = stream.try_clone()?;
        waiting.set_read_timeout(Some(PREPARATION_MAX))?;
        let said = tokio::task::spawn_blocking(move || read_message(waiting)).await?;
        match said {
            Ok(said) if said["do"] == "release" => {
                let standby = match Standby::prepare(&stream, &sockets) {
                    Ok(standby) => standby,
                    Err(error) => {
                        let text = format!("it cannot prepare to hold the sockets: {error}");
                        send_message(&stream, &json!({"ok": false, "text": text}))?;
                        return Err(error);
                    }
                };
                tracing::info!("a new process takes over");
                let gone = |_| io::Error::from(ErrorKind::BrokenPipe);
                self.released.send(standby).await.map_err(gone)
            }
            _ => {
                tracing::warn!("the new process ended before it was ready; this one goes on");
                Ok(())
            }
        }
    }
}

/// The connection of a new process to the proxy that it replaces.
pub struct ProxyTakeover {
    /// The connection, which breaks when this process ends, not before: then the state directory is free.
    stream: ManuallyDrop<UnixStream>,
}

impl ProxyTakeover {
    /// Asks the proxy with this state directory for its sockets. It goes on serving.
    ///
    /// # Errors
    /// None runs, it is another user's, or it refuses.
    pub async fn begin(directory: &Path) -> Result<(ProxyTakeover, Vec<OwnedFd>), ControlError> {
        let stream = ControlClient::connect(directory).await?.into_stream();
        let asked = tokio::task::spawn_blocking(move || {
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            send_message(&stream, &json!({"do": "take-over"}))?;
            let (answer, sockets) = receive_with(&stream)?;
            accepted(&answer)?;
            let stream = ManuallyDrop::new(stream);
            Ok((ProxyTakeover { stream }, sockets))
        });
        asked.await.expect("no panic").map_err(refused)
    }

    /// Makes the running proxy end, and returns its tunnels when it has released the state directory, or is gone.
    ///
    /// # Errors
    /// It refuses.
    pub async fn release(&mut self) -> Result<Option<PassedTunnels>, ControlError> {
        let stream = self.stream.try_clone();
        let released = tokio::task::spawn_blocking(move || {
            let stream = stream?;
            let answer = send_message(&stream, &json!({"do": "release"}))
                .and_then(|()| receive_with(&stream));
            match answer {
                Ok((answer, mut passed)) => {
                    accepted(&answer)?;
                    // The description is the first ([`PassedTunnels::descriptors`]).
                    let description = (!passed.is_empty()).then(|| passed.remove(0));
                    Ok(description.map(|it| PassedTunnels::from_descriptors(it, passed)))
                }
                Err(error) if is_gone(&error) => {
                    // This process has the sockets: nobody else can serve.
                    tracing::warn!("the running proxy ended; its last changes may be lost");
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        });
        released.await.expect("no panic").map_err(refused)
    }

    /// Reports that this process serves, so that the other one ends.
    pub fn complete(self) {
        let stream = ManuallyDrop::into_inner(self.stream);
        // If it is gone, nobody waits for this.
        let _ = send_message(&stream, &json!({"do": "served"}));
    }
}

/// A process of this program that holds the sockets until a new process serves, and can start the
/// proxy again.
#[derive(Debug)]
pub struct Standby {
    command: Command,
    /// Kept while it begins anew.
    tunnels: Option<PassedTunnels>,
}

impl Standby {
    /// Prepares to hold these sockets for the process at `connection`.
    ///
    /// # Errors
    /// There are too many sockets, or descriptors are short.
    fn prepare(connection: &UnixStream, sockets: &[OwnedFd]) -> io::Result<Standby> {
        let (ours, theirs) = UnixStream::pair()?;
        let passed = std::iter::once(connection.as_fd());
        let passed: Vec<_> = passed.chain(sockets.iter().map(OwnedFd::as_fd)).collect();
        send_with(&ours, &json!({}), &passed)?;
        // Not its path, which leads to the new program after an upgrade.
        let program = "/proc/self/exe";
        std::fs::metadata(program)?;
        let arguments: Vec<OsString> = std::env::args_os().collect();
        let mut command = Command::new(program);
        command
            .arg0(&arguments[0])
            .args(&arguments[1..])
            .env(STANDBY_VARIABLE, "1")
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_FDNAMES")
            .env_remove(HELPER_SOCKET_VARIABLE)
            .env_remove(TUNNELS_VARIABLE)
            .stdin(Stdio::from(OwnedFd::from(theirs)));
        Ok(Standby {
            command,
            tunnels: None,
        })
    }

    /// Gives the program a variable when it begins anew.
    #[must_use]
    pub fn with_variable(mut self, (name, value): (&str, String)) -> Standby {
        self.command.env(name, value);
        self
    }

    /// Gives the process these tunnels when it begins anew, for the new process or for itself.
    ///
    /// # Errors
    /// Their descriptors cannot be kept.
    pub fn with_tunnels(self, tunnels: Option<PassedTunnels>) -> io::Result<Standby> {
        let Some(tunnels) = tunnels else {
            return Ok(self);
        };
        let variable = tunnels.keep_at_exec()?;
        Ok(Standby {
            tunnels: Some(tunnels),
            ..self.with_variable(variable)
        })
    }

    /// Begins this program anew. Returns only if that fails; the new process serves when this one ends.
    pub fn begin(mut self) -> io::Error {
        let error = self.command.exec();
        drop(self.tunnels);
        error
    }
}

/// What a process that began anew has to do.
#[derive(Debug)]
pub enum StandbyOutcome {
    /// The process was started as usual.
    NotStandby,
    /// The new process serves; this one has to end.
    Replaced,
    /// The new process failed: this one has to serve, on these sockets, and with these tunnels.
    Resumed(Vec<OwnedFd>, Option<PassedTunnels>),
}

/// Whether this process began anew for another that takes over.
pub fn is_standby() -> bool {
    std::env::var_os(STANDBY_VARIABLE).is_some()
}

/// Waits for the new process, if this one began anew for it.
///
/// # Errors
/// The sockets cannot be had.
pub fn await_replacement() -> io::Result<StandbyOutcome> {
    if !is_standby() {
        return Ok(StandbyOutcome::NotStandby);
    }
    let input = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (_, mut sockets) = receive_with(&input)?;
    if sockets.is_empty() {
        return Err(ErrorKind::InvalidData.into());
    }
    // It is the first ([`Standby::prepare`]).
    let connection = UnixStream::from(sockets.remove(0));
    let tunnels = PassedTunnels::after_exec();
    let passed: Vec<_> = tunnels
        .iter()
        .flat_map(PassedTunnels::descriptors)
        .collect();
    let told = send_with(&connection, &json!({"ok": true}), &passed);
    connection.set_read_timeout(Some(SERVED_WITHIN))?;
    match told.and_then(|()| read_message(connection.try_clone()?)) {
        Ok(said) if said["do"] == "served" => Ok(StandbyOutcome::Replaced),
        answer => {
            let waits_in_vain = |error: &io::Error| {
                matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
            };
            if answer.as_ref().err().is_some_and(waits_in_vain) {
                end_peer(&connection)?;
            }
            Ok(StandbyOutcome::Resumed(sockets, tunnels))
        }
    }
}

/// Ends the process at the other end, which takes too long, so that two never serve on one state directory.
fn end_peer(connection: &UnixStream) -> io::Result<()> {
    let peer = nix::sys::socket::getsockopt(connection, PeerCredentials)?;
    match peer.pid() {
        // 0: a process of another namespace.
        pid if pid > 0 => Ok(nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL)?),
        _ => Err(ErrorKind::TimedOut.into()),
    }
}

/// Sends a message and sockets beside it, [`SOCKETS_AT_ONCE`] with each part.
fn send_with(stream: &UnixStream, message: &Value, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut message = message.clone();
    message["sockets"] = sockets.len().into();
    let text = format!("{message}\n");
    let mut parts = sockets.chunks(SOCKETS_AT_ONCE);
    send_part(stream, text.as_bytes(), parts.next().unwrap_or_default())?;
    for part in parts {
        send_part(stream, b"+", part)?;
    }
    Ok(())
}

fn send_part(stream: &UnixStream, bytes: &[u8], sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_AT_ONCE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(sockets));
        assert!(fits, "the space is for as many");
    }
    let parts = [IoSlice::new(bytes)];
    sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a message and the sockets beside it.
fn receive_with(stream: &UnixStream) -> io::Result<(Value, Vec<OwnedFd>)> {
    let mut text = [0; MESSAGE_BYTES_MAX];
    let mut sockets = Vec::new();
    let mut len = receive_part(stream, &mut text, &mut sockets)?;
    // A message may come in pieces. The sockets are beside its first byte.
    while !text[..len].contains(&b'\n') && len < text.len() {
        len += receive_part(stream, &mut text[len..], &mut sockets)?;
    }
    let message: Value = serde_json::from_slice(&text[..len])?;
    // A proxy that does not say it has all of them beside the message.
    let count = message["sockets"].as_u64().unwrap_or(0);
    while (sockets.len() as u64) < count {
        let before = sockets.len();
        receive_part(stream, &mut [0], &mut sockets)?;
        if sockets.len() == before {
            return Err(io::Error::other("sockets are missing"));
        }
    }
    Ok((message, sockets))
}

/// Receives bytes and the sockets beside them. Returns the number of bytes.
fn receive_part(
    stream: &UnixStream,
    bytes: &mut [u8],
    sockets: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_AT_ONCE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(bytes)];
    let received = recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            sockets.extend(passed);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        let text =
            "not all sockets arrived: this process may have too few descriptors (RLIMIT_NOFILE)";
        return Err(io::Error::other(text));
    }
    if received.bytes == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(received.bytes)
}

/// Sends a message as a whole: a reader that is quick would see the pieces that formatting writes.
fn send_message(mut stream: &UnixStream, message: &Value) -> io::Result<()> {
    stream.write_all(format!("{message}\n").as_bytes())
}

fn read_message(stream: UnixStream) -> io::Result<Value> {
    let mut line = String::new();
    let mut stream = BufReader::new(stream.take(MESSAGE_BYTES_MAX as u64));
    if stream.read_line(&mut line)? == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

fn accepted(answer: &Value) -> io::Result<()> {
    if answer["ok"] == true {
        return Ok(());
    }
    let text = answer["text"].as_str();
    Err(io::Error::other(
        text.unwrap_or("the running proxy refused").to_owned(),
    ))
}

/// Whether the process at the other end has ended.
fn is_gone(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

fn refused(error: io::Error) -> ControlError {
    if is_gone(&error) {
        let text = "the running proxy ended while it handed its sockets over";
        return ControlError::Refused(text.to_owned());
    }
    ControlError::Refused(format!("cannot take the running proxy over: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_that_ends_before_it_is_ready_changes_nothing_and_the_next_may_ask() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let (offer, mut on_release) = TakeoverOffer::new(vec![socket.into()]);
        for round in 0..2 {
            let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
            let attending = {
                let offer = offer.clone();
                tokio::spawn(async move { offer.attend(theirs).await })
            };
            let mut ours = ours.into_std().unwrap();
            ours.set_nonblocking(false).unwrap();
            let asked = tokio::task::spawn_blocking(move || {
                let (answer, sockets) = receive_with(&ours).unwrap();
                assert_eq!(answer["ok"], true);
                if round == 1 {
                    writeln!(ours, r#"{{"do":"release"}}"#).unwrap();
                }
                (ours, sockets)
            });
            let (ours, mut sockets) = asked.await.unwrap();
            let passed = std::net::UdpSocket::from(sockets.pop().unwrap());
            assert_eq!(passed.local_addr().unwrap(), address);
            if round == 0 {
                drop(ours);
            }
            attending.await.unwrap().unwrap();
        }
        assert!(on_release.try_recv().is_ok());
        assert!(on_release.try_recv().is_err(), "the first did not release");
    }

    fn sockets(count: usize) -> Vec<OwnedFd> {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let socket = OwnedFd::from(socket);
        (0..count).map(|_| socket.try_clone().unwrap()).collect()
    }

    /// An offer of this many sockets, and a process that asks for them and for their release.
    async fn sockets_passed(count: usize) -> (io::Result<usize>, io::Result<Value>) {
        let (offer, mut on_release) = TakeoverOffer::new(sockets(count));
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        let attending = tokio::spawn(async move { offer.attend(theirs).await });
        let mut ours = ours.into_std().unwrap();
        ours.set_nonblocking(false).unwrap();
        let asked = tokio::task::spawn_blocking(move || {
            let (answer, sockets) = receive_with(&ours)?;
            accepted(&answer)?;
            writeln!(ours, r#"{{"do":"release"}}"#).unwrap();
            Ok((ours, sockets.len()))
        });
        let (ours, count) = match asked.await.unwrap() {
            Ok(got) => got,
            Err(error) => return (Err(error), Ok(json!({}))),
        };
        attending.await.unwrap().unwrap();
        let standby = on_release.try_recv().expect("it released");
        drop((standby, on_release));
        // The standby's input was dropped with the connection in it.
        (Ok(count), read_message(ours))
    }

    #[tokio::test]
    async fn sockets_of_many_workers_arrive_in_several_parts() {
        for count in [1, 16, 18, 200, 201, 520] {
            let (passed, after) = sockets_passed(count).await;
            assert_eq!(passed.unwrap(), count);
            assert!(is_gone(&after.unwrap_err()));
        }
    }

    #[tokio::test]
    async fn more_sockets_than_the_limit_are_refused_in_words_before_anything_ends() {
        let (passed, _) = sockets_passed(SOCKETS_MAX + 1).await;
        let error = passed.unwrap_err().to_string();
        assert!(error.contains("too many to hand over"), "{error}");
    }

    #[test]
    fn a_message_that_comes_in_pieces_is_read_whole() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let reader = std::thread::spawn(move || receive_with(&theirs).unwrap().0);
        for piece in ["{", "\"ok\":", "false}", "\n"] {
            ours.write_all(piece.as_bytes()).unwrap();
            // sleep: the reader is to find this piece alone
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(reader.join().unwrap(), json!({"ok": false}));
    }

    #[test]
    fn sockets_that_do_not_all_arrive_are_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sockets = sockets(3);
        let passed: Vec<_> = sockets.iter().map(OwnedFd::as_fd).collect();
        send_part(&ours, b"{\"sockets\":4}\n", &passed).unwrap();
        send_part(&ours, b"+", &[]).unwrap();
        let error = receive_with(&theirs).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
    }

    #[tokio::test]
    async fn a_new_process_serves_when_the_running_one_ends_in_the_release() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stream = ManuallyDrop::new(ours);
        drop(theirs);
        ProxyTakeover { stream }.release().await.unwrap();
    }

    #[tokio::test]
    async fn two_processes_cannot_take_over_at_once() {
        let (offer, _on_release) = TakeoverOffer::new(Vec::new());
        let _first = offer.sockets.try_lock().unwrap();
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        offer.attend(theirs).await.unwrap();
        let ours = ours.into_std().unwrap();
        ours.set_nonblocking(false).unwrap();
        let answer = read_message(ours).unwrap();
        assert_eq!(answer["ok"], false);
        assert!(accepted(&answer).is_err());
    }
}
