//! Connections per second that quinn makes, both ends on this machine.
//!
//! TLS 1.3 with a certificate of the server (ECDSA P-256) and none of the client, so it does less
//! than a D2TP handshake, which authenticates both ends.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use futures_util::stream::{StreamExt, iter};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Endpoint, ServerConfig};
use tokio::runtime::{Builder, Runtime};

use crate::credential::{Credential, SERVER_NAME, client_config};
use crate::handshake::AT_ONCE;

fn one_thread() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Opens `connections`, as many at once as for D2TP, each closed when both ends have its keys.
///
/// # Errors
/// A socket cannot be opened, or a connection failed.
pub(crate) fn per_second(connections: u64) -> Result<f64> {
    let credential = Credential::make()?;
    let tls = QuicServerConfig::try_from(credential.server_config()?)?;
    let config = ServerConfig::with_crypto(Arc::new(tls));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || -> Result<()> {
        one_thread()?.block_on(async {
            let endpoint = Endpoint::server(config, (Ipv4Addr::LOCALHOST, 0).into())?;
            tell.send(endpoint.local_addr()?)?;
            // It ends with the process, after the last client.
            while let Some(incoming) = endpoint.accept().await {
                tokio::spawn(async move {
                    if let Ok(connection) = incoming.await {
                        connection.closed().await;
                    }
                });
            }
            Ok(())
        })
    });
    let server = told.recv().context("quinn's server did not start")?;
    let mut tls = client_config(&credential.certificate)?;
    // As if each were the first of another client: no tickets.
    tls.resumption = rustls::client::Resumption::disabled();
    let tls = QuicClientConfig::try_from(tls)?;
    let config = ClientConfig::new(Arc::new(tls));
    one_thread()?.block_on(async {
        let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into())?;
        let begun = Instant::now();
        let mut all = iter(0..connections)
            .map(|_| async {
                let connecting = endpoint.connect_with(config.clone(), server, SERVER_NAME)?;
                connecting.await?.close(0_u32.into(), b"");
                anyhow::Ok(())
            })
            .buffer_unordered(AT_ONCE);
        while let Some(done) = all.next().await {
            done.context("a connection of quinn")?;
        }
        Ok(connections as f64 / begun.elapsed().as_secs_f64())
    })
}
