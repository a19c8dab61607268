//! HTTP for the bucket of copies: requests of `object_store` over our hyper and rustls, connections kept for the next.
//!
//! The endpoint is the operator's choice, so the rules for origins do not hold here.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderValue};
use http::{Request, Uri};
use http_body_util::BodyExt;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use parking_lot::Mutex;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// How long a connection, its TLS included, may take. A guess.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// How long a request may take until the head of its answer, with a part of 8 MiB to be sent. A guess: 1 Mb/s.
const ANSWER_WITHIN: Duration = Duration::from_secs(70);
/// Connections that are kept for the next request.
const IDLE_CONNS_MAX: usize = 8;

type BucketSender = SendRequest<HttpRequestBody>;

/// Makes the HTTP client of a bucket.
pub(crate) struct BucketConnector {
    pub(crate) tls: Arc<rustls::ClientConfig>,
}

/// The HTTP client of a bucket.
struct BucketHttp {
    tls: TlsConnector,
    /// Whether the connector accepts endpoints without TLS.
    allows_http: bool,
    idle: Arc<Mutex<Vec<(BucketEndpoint, BucketSender)>>>,
}

/// Where a connection leads.
#[derive(Clone, PartialEq, Eq)]
struct BucketEndpoint {
    is_tls: bool,
    host: String,
    port: u16,
}

impl fmt::Debug for BucketConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BucketConnector")
    }
}

impl fmt::Debug for BucketHttp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BucketHttp")
    }
}

impl HttpConnector for BucketConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        let mut tls = (*self.tls).clone();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(HttpClient::new(BucketHttp {
            tls: TlsConnector::from(Arc::new(tls)),
            allows_http: allows_http.as_deref() == Some("true"),
            idle: Arc::default(),
        }))
    }
}

impl HttpService for BucketHttp {
    // As the trait's macro writes it.
    fn call<'a, 'f>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        Box::pin(self.exchange(request))
    }
}

impl BucketEndpoint {
    fn of(uri: &Uri) -> Option<BucketEndpoint> {
        let is_tls = uri.scheme_str() == Some("https");
        Some(BucketEndpoint {
            is_tls,
            host: uri.host()?.to_owned(),
            port: uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
        })
    }
}

impl BucketHttp {
    async fn exchange(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut head, body) = request.into_parts();
        let no_host = || HttpError::new(HttpErrorKind::Unknown, NoHost);
        let endpoint = BucketEndpoint::of(&head.uri).ok_or_else(no_host)?;
        if !endpoint.is_tls && !self.allows_http {
            return Err(HttpError::new(HttpErrorKind::Unknown, NoTls));
        }
        let authority = head.uri.authority().ok_or_else(no_host)?;
        let authority = HeaderValue::from_str(authority.as_str())
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        head.headers.insert(header::HOST, authority);
        let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
        head.uri = path.parse().map_err(|error: http::uri::InvalidUri| {
            HttpError::new(HttpErrorKind::Unknown, error)
        })?;
        let mut sender = match self.take_idle(&endpoint) {
            Some(sender) => sender,
            None => self.connect(&endpoint).await?,
        };
        let answer = sender.send_request(Request::from_parts(head, body));
        let response = match tokio::time::timeout(ANSWER_WITHIN, answer).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(HttpError::new(HttpErrorKind::Request, error)),
            Err(late) => return Err(HttpError::new(HttpErrorKind::Timeout, late)),
        };
        let idle = self.idle.clone();
        tokio::spawn(async move {
            // Ready when the body has been read.
            if sender.ready().await.is_ok() {
                let mut idle = idle.lock();
                if idle.len() < IDLE_CONNS_MAX {
                    idle.push((endpoint, sender));
                }
            }
        });
        let (head, body) = response.into_parts();
        let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
    }

    fn take_idle(&self, endpoint: &BucketEndpoint) -> Option<BucketSender> {
        let mut idle = self.idle.lock();
        idle.retain(|(_, sender)| !sender.is_closed());
        let at = idle.iter().rposition(|(known, _)| known == endpoint)?;
        Some(idle.remove(at).1)
    }

    async fn connect(&self, endpoint: &BucketEndpoint) -> Result<BucketSender, HttpError> {
        match tokio::time::timeout(CONNECT_WITHIN, self.connect_now(endpoint)).await {
            Ok(connected) => connected,
            Err(late) => Err(HttpError::new(HttpErrorKind::Connect, late)),
        }
    }

    async fn connect_now(&self, endpoint: &BucketEndpoint) -> Result<BucketSender, HttpError> {
        let bare = endpoint
            .host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let tcp = TcpStream::connect((bare.as_str(), endpoint.port)).await;
        let tcp = tcp.map_err(|error| HttpError::new(HttpErrorKind::Connect, error))?;
        let _ = tcp.set_nodelay(true);
        if !endpoint.is_tls {
            return handshake(tcp).await;
        }
        let name = ServerName::try_from(bare)
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let tls = self.tls.connect(name, tcp).await;
        handshake(tls.map_err(|error| HttpError::new(HttpErrorKind::Connect, error))?).await
    }
}

async fn handshake<S>(stream: S) -> Result<BucketSender, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| HttpError::new(HttpErrorKind::Connect, error))?;
    tokio::spawn(connection); // Its error reaches the answer.
    Ok(sender)
}

/// The URL of a request to the bucket has no host.
#[derive(Debug, thiserror::Error)]
#[error("the endpoint of the bucket has no host")]
struct NoHost;

/// The URL of a request would send credentials in clear.
#[derive(Debug, thiserror::Error)]
#[error("the endpoint has no TLS, which AWS_ALLOW_HTTP does not allow")]
struct NoTls;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_sent_in_clear_that_the_options_do_not_allow() {
        let tls = crate::tls::client_config(None, true).unwrap();
        let connector = BucketConnector { tls };
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/x", server.local_addr().unwrap());
        let ask = async |options: ClientOptions| {
            let client = connector.connect(&options).unwrap();
            let request = Request::get(&url).body(HttpRequestBody::empty()).unwrap();
            client.execute(request).await
        };
        let refused = ask(ClientOptions::new()).await.unwrap_err();
        assert!(format!("{refused:?}").contains("NoTls"), "{refused:?}");
        // Those of an address of this machine's cloud, for instance.
        let allowed = ask(ClientOptions::new().with_allow_http(true));
        tokio::select! {
            _ = allowed => panic!("nobody answers"),
            accepted = server.accept() => drop(accepted.unwrap()),
        }
    }
}
