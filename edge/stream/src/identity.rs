//! The certificate of a listener, which can be replaced while it listens.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::tls;

/// The application protocol of a connection that validates the host. // RFC 8737 §3
const ACME_ALPN: &[u8] = b"acme-tls/1";

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the certificate for streams: {0}")]
pub struct IdentityError(String);

/// The certificate of a listener.
#[derive(Clone)]
pub struct StreamIdentity {
    certificates: Arc<Certificates>,
    config: Arc<ServerConfig>,
}

/// What a listener shows: its certificate, and to an ACME authority that validates a name, the answer to
/// its challenge.
#[derive(Debug)]
struct Certificates {
    current: RwLock<Arc<CertifiedKey>>,
    challenges: RwLock<BTreeMap<String, Arc<CertifiedKey>>>,
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let validates = hello
            .alpn()
            .is_some_and(|mut all| all.any(|one| one == ACME_ALPN));
        if validates {
            let name = hello.server_name()?.to_ascii_lowercase();
            let challenges = self.challenges.read();
            return challenges
                .unwrap_or_else(PoisonError::into_inner)
                .get(&name)
                .cloned();
        }
        Some(
            self.current
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        )
    }
}

impl StreamIdentity {
    /// Creates a new self-signed certificate. Devices accept it: they rely on the server's D2TP
    /// key.
    ///
    /// # Errors
    /// The host's name cannot be put into a certificate.
    pub fn self_signed(host: &str) -> Result<StreamIdentity, IdentityError> {
        let fault = |error: rcgen::Error| IdentityError(error.to_string());
        let made = rcgen::generate_simple_self_signed([host.to_owned()]).map_err(fault)?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        StreamIdentity::new(vec![made.cert.der().clone()], key.into())
    }

    /// Loads a certificate with its chain, and its private key, from PEM files.
    ///
    /// # Errors
    /// A file cannot be read, or the two do not match.
    pub fn from_pem_files(chain: &Path, key: &Path) -> Result<StreamIdentity, IdentityError> {
        let fault = |path: &Path, error: rustls_pki_types::pem::Error| {
            IdentityError(format!("{}: {error}", path.display()))
        };
        let certificates: Result<Vec<CertificateDer<'static>>, _> =
            CertificateDer::pem_file_iter(chain)
                .map_err(|error| fault(chain, error))?
                .collect();
        let certificates = certificates.map_err(|error| fault(chain, error))?;
        if certificates.is_empty() {
            return Err(IdentityError(format!(
                "there is no certificate in {}",
                chain.display()
            )));
        }
        let key = PrivateKeyDer::from_pem_file(key).map_err(|error| fault(key, error))?;
        StreamIdentity::new(certificates, key)
    }

    fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<StreamIdentity, IdentityError> {
        let certificates = Arc::new(Certificates {
            current: RwLock::new(certified(chain, key)?),
            challenges: RwLock::default(),
        });
        let mut config = ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| IdentityError(error.to_string()))?
            .with_no_client_auth()
            .with_cert_resolver(certificates.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec(), ACME_ALPN.to_vec()];
        Ok(StreamIdentity {
            certificates,
            config: Arc::new(config),
        })
    }

    /// Uses another certificate for new connections.
    ///
    /// # Errors
    /// The key is not that of the certificate.
    pub fn replace(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<(), IdentityError> {
        let new = certified(chain, key)?;
        *self
            .certificates
            .current
            .write()
            .unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Shows this certificate to an ACME authority that validates `name` (RFC 8737).
    ///
    /// # Errors
    /// The key cannot be read.
    pub fn answer_challenge(
        &self,
        name: &str,
        certificate: CertificateDer<'static>,
        key: PrivateKeyDer<'static>,
    ) -> Result<(), IdentityError> {
        let key = tls::provider().key_provider.load_private_key(key);
        let key = key.map_err(|error| IdentityError(error.to_string()))?;
        // Unchecked: the checks know nothing of the critical extension that answers the challenge.
        let answer = Arc::new(CertifiedKey::new(vec![certificate], key));
        let challenges = self.certificates.challenges.write();
        challenges
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.to_ascii_lowercase(), answer);
        Ok(())
    }

    /// Stops answering ACME challenges.
    pub fn forget_challenges(&self) {
        let challenges = self.certificates.challenges.write();
        challenges.unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The configuration of TLS.
    pub(crate) fn tls(&self) -> Arc<ServerConfig> {
        self.config.clone()
    }
}

fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<CertifiedKey>, IdentityError> {
    CertifiedKey::from_der(chain, key, &tls::provider())
        .map(Arc::new)
        .map_err(|error| IdentityError(error.to_string()))
}
