//! `cedos lab socket HOST PATH (--output FILE | --upload FILE)`: an HTTP request over a socket of
//! libd2tp, like that of a program written for D2TP.
//!
//! This process carries the socket, through the proxy in `$CEDOS_PROX`.

use anyhow::{Context, ensure};
use cedos_terminal::{print_stderr, print_stdout};
use clap::Args;
use d2tp_sockets::{ConnectSettings, D2tpConnection, D2tpStream, PayPolicy};
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The number of bytes requested in one call.
const CALL_BYTES: usize = 64 << 10;
/// The longest head of an answer.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Carry an HTTP request over a socket of libd2tp.
#[derive(Debug, Args)]
pub struct SocketTransferArgs {
    host: String,
    path: String,
    /// Where the answer's body goes.
    #[arg(long, required_unless_present = "upload")]
    output: Option<PathBuf>,
    /// The file that is uploaded.
    #[arg(long, conflicts_with = "output")]
    upload: Option<PathBuf>,
    /// A value of `D2TP_SO_POLICY`.
    #[arg(long)]
    policy: i32,
    /// Seconds until the deadline.
    #[arg(long)]
    within_s: Option<u64>,
}

/// Carries out `cedos lab socket`. The exit code is 0 if the answer is complete.
///
/// # Errors
/// The connection could not be established, or broke.
pub fn transfer(args: &SocketTransferArgs) -> anyhow::Result<ExitCode> {
    let policies = [
        PayPolicy::FreeOnly,
        PayPolicy::FreeFirst,
        PayPolicy::Balanced,
        PayPolicy::Fast,
        PayPolicy::Any,
    ];
    let named = |policy: &PayPolicy| *policy as i32 == args.policy;
    let settings = ConnectSettings {
        deadline: args.within_s.map(Duration::from_secs),
        policy: policies.into_iter().find(named).context("no such policy")?,
        ..ConnectSettings::default()
    };
    let port = if args.host.contains(':') { "" } else { ":80" };
    let mut stream = settings.connect(&format!("{}{port}", args.host))?;
    let (path, host) = (&args.path, &args.host);
    let bytes = match &args.upload {
        None => {
            write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")?;
            let mut out = File::create(args.output.as_ref().context("no file to write")?)?;
            receive(&mut stream, &mut out, 0)?
        }
        Some(file) => upload(&mut stream, path, host, file)?,
    };
    stream.end()?;
    print_stderr(&json!({ "event": "done", "bytes": bytes }).to_string());
    Ok(ExitCode::SUCCESS)
}

/// Sends a file, and prints the server's answer.
fn upload(stream: &mut D2tpStream, path: &str, host: &str, file: &Path) -> anyhow::Result<u64> {
    let mut file = File::open(file)?;
    let bytes = file.metadata()?.len();
    let head = format!("PUT {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {bytes}\r\n\r\n");
    stream.set_size(Some(head.len() as u64 + bytes))?;
    stream.write_all(head.as_bytes())?;
    let mut piece = vec![0; CALL_BYTES];
    loop {
        let count = file.read(&mut piece)?;
        if count == 0 {
            break;
        }
        stream.write_all(&piece[..count])?;
    }
    let mut answer = Vec::new();
    receive(stream, &mut answer, bytes)?;
    print_stdout(String::from_utf8_lossy(&answer).trim());
    Ok(bytes)
}

/// Reads the answer to a request of about `sent` bytes, and writes its body. Returns the body's length.
fn receive(stream: &mut D2tpStream, out: &mut impl Write, sent: u64) -> anyhow::Result<u64> {
    let mut piece = vec![0; CALL_BYTES];
    let mut head = Vec::new();
    let (length, body_at) = loop {
        let count = stream.read(&mut piece)?;
        ensure!(count > 0, "the connection ended before an answer");
        head.extend_from_slice(&piece[..count]);
        let mut fields = [httparse::EMPTY_HEADER; 32];
        let mut answer = httparse::Response::new(&mut fields);
        if let httparse::Status::Complete(end) = answer.parse(&head)? {
            let code = answer.code.unwrap_or_default();
            ensure!((200..300).contains(&code), "the origin answers {code}");
            let length = (answer.headers.iter())
                .find(|field| field.name.eq_ignore_ascii_case("content-length"))
                .and_then(|field| std::str::from_utf8(field.value).ok()?.parse::<u64>().ok());
            break (length.context("the answer has no length")?, end);
        }
        ensure!(
            head.len() < HEAD_BYTES_MAX,
            "the answer has too long a head"
        );
    };
    // As a program does that was written for D2TP: with a deadline, what is paid for goes by the size.
    stream.set_size(Some(sent + body_at as u64 + length))?;
    out.write_all(&head[body_at..])?;
    let mut bytes = (head.len() - body_at) as u64;
    while bytes < length {
        let count = stream.read(&mut piece)?;
        ensure!(
            count > 0,
            "the connection ended after {bytes} bytes of {length}"
        );
        out.write_all(&piece[..count])?;
        bytes += count as u64;
    }
    ensure!(bytes == length, "more came than was promised");
    Ok(length)
}
