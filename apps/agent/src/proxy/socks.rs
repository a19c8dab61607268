//! SOCKS5 (RFC 1928): CONNECT, with or without user name and password (RFC 1929).
//!
//! The user name says how ([`super::ConnOptions`]); the password is not looked at, because whose connection it is
//! was seen before. Names are taken as they are: D2Prox looks them up.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use fast_socks5::server::{AuthMethod, AuthMethodSuccessState, Socks5ServerProtocol};
use fast_socks5::util::target_addr::TargetAddr;
use fast_socks5::{ReplyError, Socks5Command};
use jiff::Zoned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::carry::reset;
use super::proxy_context::{HELLO_WITHIN, ProxyContext};
use super::refusal::RefusalCause;

/// The bound address in replies: a flow has no address (RFC 1928 §6 allows this).
const BOUND: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Authentication methods, by their numbers (RFC 1928 §3).
#[derive(Clone, Copy)]
enum SocksMethod {
    Nothing = 0x00,
    UserName = 0x02,
}

/// A client to which the method was sent.
struct SocksAccepted<T>(SocksMethod, T);

impl<T> AuthMethod<T> for SocksMethod {
    type StartingState = SocksAccepted<T>;
    fn method_id(self) -> u8 {
        self as u8
    }
    fn new(self, client: T) -> SocksAccepted<T> {
        SocksAccepted(self, client)
    }
}

impl<T> AuthMethodSuccessState<T> for SocksAccepted<T> {
    fn into_inner(self) -> T {
        self.1
    }
}

/// The version number of the user name sub-negotiation (RFC 1929 §2).
const USER_VERSION: u8 = 1;
const WELCOME: u8 = 0;
const UNWELCOME: u8 = 1;

/// Reads the user name. The password may be empty, which the crate's own method takes for an error.
async fn user_name(client: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
    let version = client.read_u8().await?;
    if version != USER_VERSION {
        let text = format!("version {version} of user names is not supported");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut words = [const { Vec::new() }; 2];
    for word in &mut words {
        *word = vec![0; usize::from(client.read_u8().await?)];
        client.read_exact(word).await?;
    }
    let [user, _password] = words;
    Ok(String::from_utf8_lossy(&user).into_owned())
}

/// An error of the client or of the SOCKS crate.
type SocksError = Box<dyn std::error::Error + Send + Sync>;

/// Serves one SOCKS connection.
pub(super) async fn serve(program: TcpStream, context: &ProxyContext) {
    if let Err(error) = speak(program, context).await {
        tracing::debug!(%error, "a SOCKS client disconnected");
    }
}

async fn speak(program: TcpStream, context: &ProxyContext) -> Result<(), SocksError> {
    let hello = async {
        let begun = Socks5ServerProtocol::start(program)
            .negotiate_auth(&[SocksMethod::UserName, SocksMethod::Nothing])
            .await?;
        let (program, conn_options) = match begun.0 {
            SocksMethod::Nothing => (begun.1, Ok(context.options)),
            SocksMethod::UserName => {
                let mut program = begun.1;
                let user = user_name(&mut program).await?;
                match context.options.with_user_name(&user, &Zoned::now()) {
                    Ok(conn_options) => {
                        program.write_all(&[USER_VERSION, WELCOME]).await?;
                        (program, Ok(conn_options))
                    }
                    Err(text) => {
                        tracing::warn!("SOCKS user name {user:?}: {text}");
                        program.write_all(&[USER_VERSION, UNWELCOME]).await?;
                        return Ok(None);
                    }
                }
            }
        };
        let authenticated =
            Socks5ServerProtocol::finish_auth(SocksAccepted(SocksMethod::Nothing, program));
        let (command, what, target) = authenticated.read_command().await?;
        Ok::<_, SocksError>(Some((command, what, target, conn_options)))
    };
    let Ok(hello) = timeout(HELLO_WITHIN, hello).await else {
        return Ok(());
    };
    let Some((command, what, target, conn_options)) = hello? else {
        return Ok(());
    };
    if what != Socks5Command::TCPConnect {
        return Ok(command
            .reply_error(&ReplyError::CommandNotSupported)
            .await?);
    }
    let (host, port) = match target {
        TargetAddr::Ip(at) => (at.ip().to_canonical().to_string(), at.port()),
        TargetAddr::Domain(name, port) => (name, port),
    };
    let conn_options = conn_options
        .map_err(|text: String| super::ConnectRefusal::new(RefusalCause::BadRequest, text));
    let opened = match conn_options {
        Ok(conn_options) => context.open(&host, port, conn_options).await,
        Err(refusal) => Err(refusal),
    };
    match opened {
        Ok(open) => match command.reply_success(BOUND).await {
            Ok(program) => open.carry(program).await,
            Err(error) => return Err(error.into()),
        },
        Err(refusal) => {
            tracing::info!(%host, port, "{}", refusal.text);
            command.reply_error(&refusal.reply()).await?;
        }
    }
    Ok(())
}

/// Refuses SOCKS4, which cannot carry our answers: its clients see a broken connection.
pub(super) fn reject_socks4(program: TcpStream) {
    tracing::info!("SOCKS4 is not supported: use socks5h://");
    reset(program);
}
