//! TLS with an origin, over whatever carries it: the device verifies the origin itself.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio_rustls::TlsConnector;
use url::{Host, Url};

use super::dial::{ByteStream, FetchFault};
use super::outcome::TransferFailure;

/// Wraps connections in TLS for `https` URLs.
pub struct OriginTls(TlsConnector);

impl OriginTls {
    /// Trusts what the system trusts, and the authorities in `extra_ca` (PEM) besides.
    ///
    /// # Errors
    /// An `extra_ca` that cannot be read or holds no certificate.
    pub fn new(extra_ca: Option<&Path>) -> Result<OriginTls, TransferFailure> {
        let mut roots = RootCertStore::empty();
        let (_, unfit) =
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if unfit > 0 {
            tracing::debug!(unfit, "some certificates of the system cannot be read");
        }
        if let Some(path) = extra_ca {
            add_authorities(&mut roots, path)
                .map_err(|why| TransferFailure::usage(format!("--ca {}: {why}", path.display())))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| TransferFailure::error(format!("TLS: {error}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(OriginTls(TlsConnector::from(Arc::new(config))))
    }

    /// The stream itself for `http`, TLS over it for `https`.
    ///
    /// # Errors
    /// An origin that is not who it says, or a stream that broke.
    pub async fn wrap(
        &self,
        url: &Url,
        stream: impl ByteStream,
    ) -> Result<Box<dyn ByteStream>, FetchFault> {
        if url.scheme() != "https" {
            return Ok(Box::new(stream));
        }
        let host = url
            .host()
            .ok_or_else(|| FetchFault::Final(TransferFailure::error("the URL has no host")))?;
        let name = match &host {
            Host::Domain(name) => ServerName::try_from(name.to_string()).map_err(|e| {
                FetchFault::Final(TransferFailure::error(format!(
                    "`{name}` is not a host: {e}"
                )))
            })?,
            Host::Ipv4(ip) => ServerName::from(IpAddr::V4(*ip)),
            Host::Ipv6(ip) => ServerName::from(IpAddr::V6(*ip)),
        };
        match self.0.connect(name, stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => Err(fault(&host, error)),
        }
    }
}

fn add_authorities(roots: &mut RootCertStore, path: &Path) -> Result<(), String> {
    let mut count = 0;
    let words = |error: pem::Error| match error {
        pem::Error::Io(error) => format!("cannot be read: {error}"),
        error => error.to_string(),
    };
    for certificate in CertificateDer::pem_file_iter(path).map_err(words)? {
        let certificate = certificate.map_err(words)?;
        roots.add(certificate).map_err(|e| e.to_string())?;
        count += 1;
    }
    if count == 0 {
        Err("no certificate in it (PEM is expected)".into())
    } else {
        Ok(())
    }
}

fn fault(host: &Host<&str>, error: io::Error) -> FetchFault {
    let inner = error
        .get_ref()
        .and_then(|e| e.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(why)) => FetchFault::UntrustedPeer(format!(
            "the certificate of {host} is not valid: {why}. If it is from your own authority, \
             give --ca FILE"
        )),
        Some(rustls::Error::InvalidMessage(why)) => {
            FetchFault::Final(TransferFailure::error(format!(
                "TLS with {host} failed: the answer is not TLS ({why:?}). Do you mean http://, or \
                 another port?"
            )))
        }
        Some(why) => FetchFault::Final(TransferFailure::error(format!(
            "TLS with {host} failed: {why}"
        ))),
        None => FetchFault::Path(format!("TLS with {host} was interrupted: {error}")),
    }
}
