//! The HTTP proxy of networks that let nothing else pass: it connects to the hosts that it is asked for by CONNECT, and
//! refuses every other method (RFC 9110 §9.3.6).

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

use crate::plan;

/// Serves until the task ends.
pub(crate) async fn serve(listener: TcpListener) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            // Without descriptors, for example.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            continue;
        };
        let _ = client.set_nodelay(true);
        tokio::spawn(async move {
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(client), service_fn(answer))
                .with_upgrades();
            if let Err(error) = served.await {
                tracing::debug!(%error, "a connection to the HTTP proxy ended");
            }
        });
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let mut response = Response::new(Empty::new());
    // The namespace of the origin has the machine's own list of names.
    let host = request.uri().authority().and_then(|authority| {
        let address = plan::address_of(authority.host())?;
        Some((address, authority.port_u16()?))
    });
    let (&Method::CONNECT, Some(host)) = (request.method(), host) else {
        *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        return Ok(response);
    };
    let mut server = match TcpStream::connect(host).await {
        Ok(server) => server,
        Err(error) => {
            tracing::debug!(%error, ?host, "the HTTP proxy has no connection");
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            return Ok(response);
        }
    };
    let _ = server.set_nodelay(true);
    tokio::spawn(async move {
        let carried = async {
            let mut client = TokioIo::new(hyper::upgrade::on(request).await?);
            tokio::io::copy_bidirectional(&mut client, &mut server).await?;
            Ok::<_, anyhow::Error>(())
        };
        if let Err(error) = carried.await {
            tracing::debug!(%error, "a connection through the HTTP proxy ended");
        }
    });
    Ok(response)
}
