//! Certificates from an ACME authority (RFC 8555), which validates the host by TLS at port 443 (RFC 8737).
//!
//! ```text
//!  certificate on disk, young enough ── yes ─▶ used until a third of its lifetime is left ─┐
//!        ▲                    └── no ─▶ order ─▶ challenge answered by the listener ─▶ CSR  │
//!        └──────────────────────────────── stored ◀─────────────────────────────────────┘◀─┘
//! ```
//!
//! Devices accept any certificate, so streams work before there is one, and when it has expired. One that an
//! authority signed helps in networks that refuse others.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use d2tp_driver::StreamIdentity;
use http::{HeaderValue, Request};
use hyper_util::rt::TokioIo;
use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, BodyWrapper, BytesResponse, ChallengeType,
    HttpClient, Identifier, NewAccount, NewOrder, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, CustomExtension, KeyPair};
use rustls::ClientConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::tls::{ProxTlsError, client_config};

/// The directory of Let's Encrypt.
pub const ACME_DIRECTORY_DEFAULT: &str = "https://acme-v02.api.letsencrypt.org/directory";
/// The pause after an order that failed, doubled each time. Authorities count failed validations by the hour.
const RETRY: Duration = Duration::from_secs(60);
const RETRY_MAX: Duration = Duration::from_secs(6 * 3_600);
/// How long an authority may take to validate the host, and then to sign.
const ORDER_MAX: Duration = Duration::from_secs(120); // a guess
/// How long an order may take from its first request to its certificate.
const WHOLE_ORDER_MAX: Duration = Duration::from_secs(600); // a guess
/// The shortest time from one certificate to the next order, however short its life or wrong the clock: authorities
/// count certificates by the week.
const NEXT_ORDER_MIN: Duration = Duration::from_secs(3_600);
/// How long a request to the authority may take.
const REQUEST_MAX: Duration = Duration::from_secs(30); // a guess
/// The longest time until the certificate is looked at again: clocks are set, and sleep does not count.
const LOOK_MAX: Duration = Duration::from_secs(12 * 3_600);

/// Options for certificates from an ACME authority.
#[derive(Clone, Debug)]
pub struct AcmeOptions {
    /// The names of the host. The authority connects to port 443 of each.
    pub names: Vec<String>,
    /// The URL of the authority's directory.
    pub directory: String,
    /// The address to which the authority may write.
    pub contact: Option<String>,
    /// A PEM file with more roots for the authority's own certificate than the system has.
    pub root: Option<PathBuf>,
    /// The directory for the account, the certificate and its key.
    pub store: PathBuf,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum AcmeError {
    /// The authority refuses, or does not answer.
    #[error("the authority: {0}")]
    Authority(#[from] instant_acme::Error),
    /// The authority's own certificate cannot be verified.
    #[error(transparent)]
    Tls(#[from] ProxTlsError),
    /// The authority began to answer, and did not come to an end.
    #[error("the authority did not finish the order within {0:?}")]
    TookTooLong(Duration),
    /// The authority does not validate by TLS.
    #[error("the authority does not offer the challenge tls-alpn-01 for {0}")]
    NoChallenge(String),
    /// The authority could not validate the host.
    #[error("the authority could not validate {0}: does it reach port 443 of that name?")]
    NotValidated(String),
    /// A certificate cannot be made or read.
    #[error("the certificate: {0}")]
    Certificate(String),
    /// A file cannot be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
}

/// Keeps the certificate of a listener valid, until the future is dropped.
pub async fn keep_certificate(identity: StreamIdentity, options: AcmeOptions) {
    let mut pause = RETRY;
    loop {
        let wait = match renew_if_due(&identity, &options).await {
            Ok(wait) => {
                pause = RETRY;
                wait
            }
            Err(error) => {
                let names = options.names.join(", ");
                let again_s = pause.as_secs();
                tracing::warn!(%names, %error, again_s, "no certificate by ACME");
                let wait = pause;
                pause = (pause * 2).min(RETRY_MAX);
                wait
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// Uses the stored certificate, or orders a new one if that is due. Returns when to look again.
///
/// # Errors
/// There is no valid certificate, and the authority gives none.
async fn renew_if_due(
    identity: &StreamIdentity,
    options: &AcmeOptions,
) -> Result<Duration, AcmeError> {
    std::fs::create_dir_all(&options.store)
        .map_err(|e| AcmeError::File(options.store.clone(), e))?;
    let path = options.store.join("certificate.pem");
    let now = SystemTime::now();
    let stored = read(&path)?.and_then(|pem| StoredCertificate::parse(&pem, &options.names).ok());
    if let Some(stored) = stored.filter(|stored| stored.valid_until > now) {
        let due = stored.due;
        identity
            .replace(stored.chain, stored.key)
            .map_err(|e| AcmeError::Certificate(e.to_string()))?;
        if let Ok(left) = due.duration_since(now) {
            return Ok(left.min(LOOK_MAX));
        }
    }
    let ordered = tokio::time::timeout(WHOLE_ORDER_MAX, order(identity, options)).await;
    let pem = ordered.map_err(|_| AcmeError::TookTooLong(WHOLE_ORDER_MAX))??;
    let stored = StoredCertificate::parse(&pem, &options.names)?;
    let left = stored.due.duration_since(now).unwrap_or_default();
    // One that is in use serves until the next start, also where it cannot be written.
    identity
        .replace(stored.chain, stored.key)
        .map_err(|e| AcmeError::Certificate(e.to_string()))?;
    write(&path, &pem)?;
    tracing::info!(names = %options.names.join(", "), "the authority gave a certificate");
    Ok(left.clamp(NEXT_ORDER_MIN, LOOK_MAX))
}

/// A certificate with its chain and its key.
struct StoredCertificate {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    valid_until: SystemTime,
    /// When the certificate is to be renewed: a third of its lifetime before its end.
    due: SystemTime,
}

impl StoredCertificate {
    /// Reads a certificate for these names.
    fn parse(pem: &str, names: &[String]) -> Result<StoredCertificate, AcmeError> {
        let fault = |error: &dyn std::fmt::Display| AcmeError::Certificate(error.to_string());
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|e| fault(&e))?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
        let chain = chain.map_err(|e| fault(&e))?;
        let first = chain.first().ok_or_else(|| fault(&"there is none"))?;
        let (_, parsed) = x509_parser::parse_x509_certificate(first).map_err(|e| fault(&e))?;
        let alternatives = parsed.subject_alternative_name().map_err(|e| fault(&e))?;
        let covers = |name: &String| {
            alternatives
                .iter()
                .flat_map(|a| &a.value.general_names)
                .any(|general| {
                    matches!(general, x509_parser::extensions::GeneralName::DNSName(dns)
                    if dns.eq_ignore_ascii_case(name))
                })
        };
        if let Some(name) = names.iter().find(|name| !covers(name)) {
            return Err(fault(&format!("it is not for {name}")));
        }
        let at = |time: x509_parser::time::ASN1Time| {
            UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0))
        };
        let validity = parsed.validity();
        let (from, valid_until) = (at(validity.not_before), at(validity.not_after));
        let lifetime = valid_until.duration_since(from).unwrap_or_default();
        let due = valid_until - lifetime / 3;
        Ok(StoredCertificate {
            chain,
            key,
            valid_until,
            due,
        })
    }
}

/// Orders a certificate; returns it with its chain and its key as PEM.
async fn order(identity: &StreamIdentity, options: &AcmeOptions) -> Result<String, AcmeError> {
    let account = account(options).await?;
    let names: Vec<Identifier> = options.names.iter().cloned().map(Identifier::Dns).collect();
    let mut order = account.new_order(&NewOrder::new(&names)).await?;
    let _answers = ChallengeAnswers(identity);
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization?;
        if authorization.status == AuthorizationStatus::Valid {
            continue;
        }
        let name = authorization.identifier().to_string();
        let challenge = authorization.challenge(ChallengeType::TlsAlpn01);
        let mut challenge = challenge.ok_or_else(|| AcmeError::NoChallenge(name.clone()))?;
        let digest = challenge.key_authorization().digest();
        answer_challenge(identity, &name, digest.as_ref())?;
        challenge.set_ready().await?;
    }
    let retries = RetryPolicy::default().timeout(ORDER_MAX);
    let invalid = || AcmeError::NotValidated(options.names.join(", "));
    if order.poll_ready(&retries).await? != OrderStatus::Ready {
        return Err(invalid());
    }
    let fault = |error: rcgen::Error| AcmeError::Certificate(error.to_string());
    let key = KeyPair::generate().map_err(fault)?;
    let request = CertificateParams::new(options.names.clone()).map_err(fault)?;
    let request = request.serialize_request(&key).map_err(fault)?;
    order.finalize_csr(request.der()).await?;
    let chain = order.poll_certificate(&retries).await?;
    Ok(format!("{}{chain}", key.serialize_pem()))
}

/// The challenges that a listener answers, until this is dropped.
struct ChallengeAnswers<'a>(&'a StreamIdentity);

impl Drop for ChallengeAnswers<'_> {
    fn drop(&mut self) {
        self.0.forget_challenges();
    }
}

/// Lets the listener answer the validation of a name. // RFC 8737 §3
fn answer_challenge(identity: &StreamIdentity, name: &str, digest: &[u8]) -> Result<(), AcmeError> {
    let fault = |error: &dyn std::fmt::Display| AcmeError::Certificate(error.to_string());
    let mut params = CertificateParams::new([name.to_owned()]).map_err(|e| fault(&e))?;
    params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest)];
    let key = KeyPair::generate().map_err(|e| fault(&e))?;
    let made = params.self_signed(&key).map_err(|e| fault(&e))?;
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|e| fault(&e))?;
    identity
        .answer_challenge(name, made.der().clone(), key)
        .map_err(|e| fault(&e))
}

/// The account at the authority, which is made at the first order.
async fn account(options: &AcmeOptions) -> Result<Account, AcmeError> {
    let path = options.store.join("account.json");
    let mut tls = (*client_config(options.root.as_deref(), true)?).clone();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let builder = Account::builder_with_http(Box::new(AuthorityClient(Arc::new(tls))));
    let stored: Option<StoredAccount> =
        read(&path)?.and_then(|text| serde_json::from_str(&text).ok());
    if let Some(stored) = stored.filter(|stored| stored.directory == options.directory) {
        return Ok(builder.from_credentials(stored.credentials).await?);
    }
    let contact = options.contact.as_ref().map(|at| format!("mailto:{at}"));
    let contact: Vec<&str> = contact.iter().map(String::as_str).collect();
    let new = NewAccount {
        contact: &contact,
        terms_of_service_agreed: true,
        only_return_existing: false,
    };
    let (account, credentials) = builder
        .create(&new, options.directory.clone(), None)
        .await?;
    let stored = StoredAccount {
        directory: options.directory.clone(),
        credentials,
    };
    let text =
        serde_json::to_string(&stored).map_err(|e| AcmeError::File(path.clone(), e.into()))?;
    write(&path, &text)?;
    Ok(account)
}

/// The HTTP client for the authority: a connection for each of the few requests.
struct AuthorityClient(Arc<ClientConfig>);

impl HttpClient for AuthorityClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, instant_acme::Error>> + Send>> {
        let tls = self.0.clone();
        Box::pin(async move {
            let asked = tokio::time::timeout(REQUEST_MAX, ask(tls, request)).await;
            let asked = asked.unwrap_or_else(|late| Err(late.into()));
            asked.map_err(instant_acme::Error::Other)
        })
    }
}

async fn ask(
    tls: Arc<ClientConfig>,
    mut request: Request<BodyWrapper<Bytes>>,
) -> Result<BytesResponse, Box<dyn std::error::Error + Send + Sync>> {
    let uri = request.uri().clone();
    let authority = uri.authority().ok_or("its URL has no host")?;
    let host = authority.host().trim_matches(['[', ']']).to_owned();
    let tcp = TcpStream::connect((host.clone(), authority.port_u16().unwrap_or(443))).await?;
    let tcp = TlsConnector::from(tls)
        .connect(host.try_into()?, tcp)
        .await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp)).await?;
    tokio::spawn(connection);
    let field = HeaderValue::from_str(authority.as_str())?;
    request.headers_mut().insert(http::header::HOST, field);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse()?;
    Ok(sender.send_request(request).await?.into())
}

/// The account as it is stored: credentials hold for the authority that gave them.
#[derive(serde::Serialize, serde::Deserialize)]
struct StoredAccount {
    directory: String,
    credentials: AccountCredentials,
}

fn read(path: &Path) -> Result<Option<String>, AcmeError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(AcmeError::File(path.to_owned(), error)),
    }
}

/// Writes a file that only its owner may read; it is complete or as before.
fn write(path: &Path, text: &str) -> Result<(), AcmeError> {
    let fresh = path.with_extension("new");
    let written = || -> io::Result<()> {
        let _ = std::fs::remove_file(&fresh);
        let mut options = std::fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&fresh)?;
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&fresh, path)
    };
    written().map_err(|error| AcmeError::File(path.to_owned(), error))
}
