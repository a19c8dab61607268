//! The authentication of origins: by the machine's authorities and one file of the operator.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

/// Why the proxy cannot verify origins.
#[derive(Debug, thiserror::Error)]
pub enum ProxTlsError {
    /// The file given with `--ca` is not usable.
    #[error("cannot use the CA file {path}: {cause}; it must hold PEM certificates")]
    CaFile {
        /// The file that cannot be used.
        path: String,
        /// What was wrong with it.
        cause: String,
    },
    /// There is no certificate authority.
    #[error(
        "no certificate authorities found on this machine; install ca-certificates or give --ca FILE"
    )]
    NoRoots,
    /// The TLS library refused our parameters.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[from] rustls::Error),
}

/// A client configuration that verifies certificates, and offers HTTP/2 before HTTP/1.1.
pub(crate) fn client_config(
    ca_file: Option<&Path>,
    native_roots: bool,
) -> Result<Arc<ClientConfig>, ProxTlsError> {
    let mut roots = RootCertStore::empty();
    if native_roots {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "cannot read a certificate authority of this machine");
        }
        roots.add_parsable_certificates(found.certs);
    }
    if let Some(path) = ca_file {
        let fault = |cause: String| ProxTlsError::CaFile {
            path: path.display().to_string(),
            cause,
        };
        let certificates = CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| fault(error.to_string()))?;
        if certificates.is_empty() {
            return Err(fault("no certificate in it".to_owned()));
        }
        for certificate in certificates {
            roots
                .add(certificate)
                .map_err(|error| fault(error.to_string()))?;
        }
    }
    if roots.is_empty() {
        return Err(ProxTlsError::NoRoots);
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// The certificate problem inside an I/O error of a handshake, if there is one.
pub(crate) fn certificate_error(error: &io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref::<rustls::Error>()? {
        rustls::Error::InvalidCertificate(cause) => Some(cause.to_string()),
        rustls::Error::NoCertificatesPresented => Some("the server sent none".to_owned()),
        _ => None,
    }
}
