//! SOCKS5 (RFC 1928): CONNECT, with or without user name and password (RFC 1929).
//!
//! The user name says how ([`super::Wish`]); the password is not looked at, because whose connection it is
//! was seen before. Names are taken as they are: D2Prox looks them up.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use fast_socks5::server::{
    Socks5ServerProtocol, SocksServerError, StandardAuthentication, StandardAuthenticationStarted,
};
use fast_socks5::util::target_addr::TargetAddr;
use fast_socks5::{ReplyError, Socks5Command};
use jiff::Zoned;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::carry::break_off;
use super::door::{HELLO_WITHIN, House};
use super::refusal::Cause;

/// What a client is told to be bound to: the flow has no address (RFC 1928 §6 lets a server say so).
const BOUND: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Serves one connection.
pub(super) async fn serve(program: TcpStream, house: &House) {
    if let Err(error) = speak(program, house).await {
        tracing::debug!(%error, "a SOCKS client went");
    }
}

async fn speak(program: TcpStream, house: &House) -> Result<(), SocksServerError> {
    let hello = async {
        let methods = StandardAuthentication::allow_no_auth(true);
        let begun = Socks5ServerProtocol::start(program)
            .negotiate_auth(methods)
            .await?;
        let (authenticated, wish) = match begun {
            StandardAuthenticationStarted::NoAuthentication(none) => {
                (Socks5ServerProtocol::finish_auth(none), Ok(house.wish))
            }
            StandardAuthenticationStarted::PasswordAuthentication(asked) => {
                let (user, _password, asked) = asked.read_username_password().await?;
                match house.wish.named(&user, &Zoned::now()) {
                    Ok(wish) => (
                        Socks5ServerProtocol::finish_auth(asked.accept().await?),
                        Ok(wish),
                    ),
                    Err(text) => {
                        tracing::warn!("SOCKS user name {user:?}: {text}");
                        asked.reject().await?;
                        return Ok(None);
                    }
                }
            }
        };
        let (command, what, target) = authenticated.read_command().await?;
        Ok::<_, SocksServerError>(Some((command, what, target, wish)))
    };
    let Ok(hello) = timeout(HELLO_WITHIN, hello).await else {
        return Ok(());
    };
    let Some((command, what, target, wish)) = hello? else {
        return Ok(());
    };
    if what != Socks5Command::TCPConnect {
        return command.reply_error(&ReplyError::CommandNotSupported).await;
    }
    let (host, port) = match target {
        TargetAddr::Ip(at) => (at.ip().to_canonical().to_string(), at.port()),
        TargetAddr::Domain(name, port) => (name, port),
    };
    let wish = wish.map_err(|text: String| super::Refusal::new(Cause::Nonsense, text));
    let opened = match wish {
        Ok(wish) => house.open(&host, port, wish).await,
        Err(refusal) => Err(refusal),
    };
    match opened {
        Ok(open) => match command.reply_success(BOUND).await {
            Ok(program) => open.carry(program).await,
            Err(error) => return Err(error),
        },
        Err(refusal) => {
            tracing::info!(%host, port, "{}", refusal.text);
            command.reply_error(&refusal.reply()).await?;
        }
    }
    Ok(())
}

/// Refuses SOCKS4, which cannot say what we would answer: its clients see a connection that breaks.
pub(super) fn turn_away(program: TcpStream) {
    tracing::info!("SOCKS4 is not spoken here: use socks5h://");
    break_off(program);
}
